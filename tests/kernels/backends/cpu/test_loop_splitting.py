"""Loop splitting: concatenations and pads vectorize without changing results."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.kernels.backends.cpu.loop_splitting import split_innermost
from blufunc.kernels.backends.cpu.renderer import render
from tests.kernels.differential import case, compile_all, differences


def draw(*shape):
    return from_numpy(np.random.default_rng(shape).normal(size=shape).astype(np.float32))


X, Y, ROW = draw(6, 32), draw(6, 16), draw(100)
PROGRAMS = {  # the program, its arguments, and its number of loops
    "two arrays": (lambda x, y: bnp.concatenate([x * 2, y], 1), (X, Y), 2),
    "three arrays": (lambda x, y: bnp.concatenate([x, y * y, x], 1), (X, Y), 3),
    "a pad on both sides": (lambda x: lax.pad(x, 1.0, [(0, 0, 0), (8, 24, 0)]) + 1, (X,), 3),
    "a row of its own": (lambda x: bnp.concatenate([x[8:], -x[:8]]), (ROW,), 2),
    "every second element": (
        lambda x: lax.pad(x, 0.0, [(0, 0, 0), (0, 1, 1)]) + lax.pad(x, 0.0, [(0, 0, 0), (1, 0, 1)]), (X,), 2),
    "a part shorter than a vector": (lambda x, y: bnp.concatenate([x, y[:, :3]], 1), (X, Y), 1),
    "more parts than are worth it": (lambda x: bnp.concatenate([x] * 5, 1), (X,), 1),
    "along an outer axis": (lambda x: bnp.concatenate([x, -x], 0), (X,), 1),
    "nothing to split": (lambda x: x * 2 + 1, (X,), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts(name):
    fun, args, parts = PROGRAMS[name]
    c = case(fun, *args, name=name)
    (kernel,) = c.schedule.kernels
    assert len(split_innermost(kernel)) == parts
    assert (" ? " in render(kernel)) == (parts == 1 and name != "nothing to split")
    (functions,) = compile_all([c])
    assert not differences(c.run(functions), c.expected(), exact=True)
