"""Results of a function by NumPy calls and by its compiled program."""

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.config import config


def by_both(fun, *args, native=True):
    """Pairs of wanted and compiled results, of equal shapes and dtypes.

    With ``native``, the program must call no Python.
    """
    args = [bnp.asarray(x, dtype=x.dtype) for x in args]
    results = []
    before = config.host_compiler
    try:
        for config.host_compiler in ("never", "always"):
            program = bf.jit(lambda *args: fun(*args))
            results.append([np.asarray(y) for y in bf.tree.leaves(program(*args))])
        if native:
            assert program.lower(*args).compile().program.is_native
    finally:
        config.host_compiler = before
    pairs = list(zip(*results, strict=True))
    for want, got in pairs:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    return pairs
