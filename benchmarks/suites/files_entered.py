"""Files of blufunc entered by one small kernel, ``jit(softmax)``.

Counted to C++ that runs, and to CUDA source.

A file counts when one of its functions runs, other than for an import. No peer is measured.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import blufunc as bf
from blufunc.config import config
from blufunc.kernels.backends.cuda.program import Draft

ARCH = "sm_90a"
PACKAGE = Path(bf.__file__).parent


def files_entered(run: Callable[[], object]) -> set[str]:
    """The files of the package of which a function runs in ``run``, relative to it."""
    codes = set()
    importing = 0  # depth

    def seen(frame, event, arg):
        nonlocal importing
        body = frame.f_code.co_name == "<module>"
        if event == "call":
            importing += body
            if not importing:
                codes.add(frame.f_code)
        elif event == "return":
            importing -= body

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    root = f"{PACKAGE}/"
    return {c.co_filename[len(root) :] for c in codes if c.co_filename.startswith(root)}


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    """Within the block every program is planned, generated and compiled afresh."""
    before = config.plan_cache, config.host_compiler
    config.plan_cache, config.host_compiler = False, "always"
    try:
        yield
    finally:
        config.plan_cache, config.host_compiler = before


def softmax(x):
    """Softmax along rows, as users write it."""
    e = bf.numpy.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def to_cpp() -> set[str]:
    """Files on the way to C++ source that is compiled and run."""
    x = bf.numpy.asarray(np.ones((64, 256), np.float32))
    with _without_caches():
        return files_entered(lambda: bf.jit(softmax)(x))


def to_cuda() -> set[str]:
    """Files on the way to CUDA source; no device is needed."""

    def run():
        jaxpr = bf.jit(softmax).trace(bf.ShapeDtypeStruct((64, 256), "float32")).lower().jaxpr
        assert "__global__" in Draft(jaxpr, (False,), ARCH).source()

    with _without_caches():
        return files_entered(run)


def main() -> None:
    """Print both counts and the files."""
    for target, count in (("C++", to_cpp), ("CUDA", to_cuda)):
        files = sorted(count())
        print(f"{target}: {len(files)} files\n  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
