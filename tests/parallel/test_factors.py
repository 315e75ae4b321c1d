"""Every row of the table of operations, divided at random over meshes, against one device."""

import zlib

import numpy as np
import pytest

from blufunc.core.primitive import Primitive
from tests.op_table import OPS
from tests.parallel.lockstep import MESHES, P, check

# What no single device would compute twice alike, or nothing that is compared: effects, and devices' own memory.
LEFT_OUT = {"pure_callback", "io_callback", "debug_callback", "offload"}


def random_spec(rng: np.random.Generator, ndim: int, axes: tuple[str, ...]) -> P:
    """A spec that uses each axis along some dimension, or nowhere."""
    entries: list[tuple[str, ...]] = [() for _ in range(ndim)]
    for axis in rng.permutation(axes):
        d = int(rng.integers(-1, ndim))
        if d >= 0:
            entries[d] += (str(axis),)
    return P(*entries)


def rows():
    seen = set()
    for op in OPS:
        if isinstance(op.prim, Primitive) and op.prim.name not in LEFT_OUT and op.id not in seen:
            seen.add(op.id)
            yield op


@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize("op", list(rows()), ids=lambda op: op.id)
def test_operations_divided_at_random(op, mesh):
    rng = np.random.default_rng([zlib.crc32(op.id.encode()), len(mesh)])
    dtype = next((d for d in op.dtypes if d in ("float32", "complex64", "int32")), op.dtypes[0])
    args = op.sample(dtype)
    tol = {"rtol": 2e-4, "atol": 2e-4} if dtype != "bfloat16" else {"rtol": 0.05, "atol": 0.05}
    for _ in range(2):
        specs = [random_spec(rng, a.ndim, MESHES[mesh].axis_names) for a in args]
        check(op.apply, args, specs, MESHES[mesh], **tol)
