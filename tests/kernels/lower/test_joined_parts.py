"""Arrays joined from parts: a point stores an element of each equal piece."""

from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.kernels.loopir.ir import Store, post_order
from blufunc.kernels.pipeline import same_place
from tests.kernels.differential import SMALL, case

JOINS = replace(SMALL, joined_parts=True)
RNG = np.random.default_rng(0)


def drawn(*shape, dtype=np.float32):
    return from_numpy(RNG.standard_normal(shape).astype(dtype))


def rotated(x, c, s):
    a, b = bnp.split(x, 2, axis=-1)
    return bnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def halves_exchanged(x):
    return bnp.concatenate([x[16:], x[:16]])


def turned(x, y):
    """Joined rows whose halves read each other."""
    swap = lambda x: bnp.concatenate([x[..., 16:] * x[..., :16], x[..., :16] - x[..., 16:]], -1)
    return bnp.concatenate([swap(x), swap(y * 2)], 1)


X, C, S = drawn(3, 5, 32), drawn(5, 16), drawn(5, 16)

PROGRAMS = {  # function, arguments, stores of a point, loads of a point
    "rotary embedding": (rotated, (X, C, S), 2, 4),
    "its gradient": (bf.grad(lambda x, c, s: (rotated(x, c, s) * x).sum()), (X, C, S), 2, 4),
    "along the first axis": (lambda x, y: bnp.concatenate([x * 2, x + y]), (drawn(4, 16), drawn(4, 16)), 2, 2),
    "a stack of three": (lambda x: bnp.stack([x, x * 2, bnp.sin(x)], 1), (drawn(4, 32),), 3, 1),
    "halves exchanged": (halves_exchanged, (drawn(32),), 2, 2),
    "zeros before": (lambda x: bnp.pad(x * x, ((0, 0), (16, 0))), (drawn(4, 16),), 2, 1),
    "zeros around": (lambda x: bnp.pad(x, ((16, 16),)) + 1, (drawn(16),), 3, 1),
    "parts of other sizes": (lambda x, y: bnp.concatenate([x, y * 2]), (drawn(32), drawn(16)), 3, 3),
    "parts of parts": (turned, (drawn(8, 6, 32), drawn(8, 2, 32)), 8, 8),
    "parts of no common size": (lambda x, y: bnp.concatenate([x, y * 2]), (drawn(32), drawn(15)), 1, 2),
    "zeros in between": (lambda x: lax.pad(x, np.float32(0), ((0, 17, 1),)) + 1, (drawn(16),), 1, 1),
    "zeros for some elements": (lambda x: lax.pad(x, np.float32(0), ((-16, 16, 0),)) + 1, (drawn(48),), 1, 1),
    "parts with few elements": (lambda x: bnp.concatenate([x, x * 2], 1), (drawn(8, 4),), 1, 2),
    "more parts than registers hold": (lambda x: bnp.concatenate([x] * 17), (drawn(16),), 1, 17),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_point_stores_an_element_of_each_part(name):
    fun, args, stores, loads = PROGRAMS[name]
    made = case(fun, *args, target=JOINS, name=name)
    (kernel,) = made.schedule.kernels  # each obeys the rules of LoopIR
    assert sum(isinstance(s, Store) for s in kernel.body) == stores
    assert sum(v.op == "load" for v in post_order(kernel.roots())) == loads
    assert (stores == 1) == any(v.op == "within" for v in post_order(kernel.roots()))
    for got, want in zip(made.interpreted(), made.expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


RANGES = {  # a function, its arguments, the ranges of the grid
    "batches of images": (lambda x, y: bnp.concatenate([x * 2, y]), (drawn(4, 4, 3), drawn(4, 4, 3)), [48]),
    "columns": (lambda x: bnp.concatenate([x, x * 2], 1), (drawn(2, 3, 16, 3),), [2, 144]),
    "channels": (lambda x: bnp.concatenate([x, x * 2], -1), (drawn(2, 3, 16),), [6, 16]),
    "a new axis": (lambda x: bnp.stack([x, x * 2], 1), (drawn(4, 2, 8),), [4, 16]),
    "a table of rows": (rotated, (X, C, S), [3, 5, 16]),
}


@pytest.mark.parametrize("name", RANGES)
def test_axes_that_all_accesses_stride_through_are_one_range(name):
    fun, args, extents = RANGES[name]
    made = case(fun, *args, target=JOINS, name=name)
    (kernel,) = made.schedule.kernels
    assert [r.extent for r in kernel.grid] == extents and len(kernel.body) == 2
    for got, want in zip(made.interpreted(), made.expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


IN_PLACE = {  # a function of a donated argument, whether its result takes that memory
    "each part from its own elements": (lambda x: x - bnp.pad(bnp.sin(x[:16]), (0, 16)), True),
    "each part from the other": (halves_exchanged, False),
    "both parts from both": (lambda x: bnp.concatenate([x[:16] - x[16:], x[:16] + x[16:]]), False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_parts_in_place(name):
    fun, in_place = IN_PLACE[name]
    made = case(fun, X[0, 0], donate=(0,), target=JOINS, name=name)
    (kernel,) = made.schedule.kernels
    assert sum(isinstance(s, Store) for s in kernel.body) == 2
    assert bool(same_place(kernel)) == in_place == (made.schedule.plan.peak_bytes == X[0, 0].nbytes)
    for got, want in zip(made.interpreted(), made.expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
