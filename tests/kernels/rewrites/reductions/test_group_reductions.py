"""Reductions of groups of features, over their rows first."""

from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda.device_model import H200
from blufunc.kernels.fusion.iteration_space import reduces
from blufunc.kernels.rewrites.reductions.group_reductions import with_columns_first

EAGER = replace(H200, launch=0.0)  # any sector that is read again is worth a launch
BF16, F32 = dtypes.bfloat16, np.dtype("float32")


def traced(f, x):
    return simplify(bf.jit(f).trace(x).jaxpr)


def axes_of(jaxpr):
    return [e.params["axes"] for e in jaxpr.eqns if reduces(e.prim)]


SPLIT = {  # the function, the shape and dtype of its argument, and the axes of its reductions afterwards
    "group norm's mean": (lambda x: x.mean((1, 3)), (2, 24, 3, 4), F32, [(1,), (2,)]),
    "of one image": (lambda x: x.sum((0, 2)), (24, 3, 4), F32, [(0,), (1,)]),
    "rows of several axes": (lambda x: x.sum((1, 2, 4)), (2, 4, 6, 3, 4), F32, [(1, 2), (2,)]),
    "few of several axes": (lambda x: x.sum((0, 2, 3)), (24, 3, 2, 2), F32, [(0,), (1, 2)]),
    "groups of several axes": (lambda x: x.sum((0, 3)), (24, 3, 5, 2), F32, [(0,), (2,)]),
    "axes of one element": (lambda x: x.sum((0, 3, 4)), (24, 1, 3, 4, 1), F32, [(0,), (2, 3)]),
    "greatest": (lambda x: x.max((1, 3)), (2, 24, 3, 4), BF16, [(1,), (2,)]),
    "a product of integers": (lambda x: x.prod((1, 3)), (2, 24, 3, 4), np.dtype("int32"), [(1,), (2,)]),
    "widened, and read where it is narrow": (
        lambda x: (x.astype(F32) * 2).reshape(2, 24, 3, 8).sum((1, 3)), (2, 24, 24), BF16, [(1,), (2,)]
    ),
}  # fmt: skip

WHOLE = {
    "whole sectors": (lambda x: x.sum((1, 3)), (2, 24, 3, 8), F32),
    "groups of adjacent elements": (lambda x: x.sum((2, 3)), (2, 24, 3, 4), F32),
    "features of their own": (lambda x: x.sum((0, 1)), (2, 24, 3, 4), F32),
    "groups of one feature": (lambda x: x.sum((1, 3)), (2, 24, 3, 1), F32),
    "sums that round in between": (lambda x: bf.lax.reduce_sum(x, (1, 3)), (2, 24, 3, 4), BF16),
    "two kept axes apart": (lambda x: x.sum((0, 2, 4)), (4, 3, 5, 3, 2), F32),
    "complex": (lambda x: x.sum((1, 3)), (2, 24, 3, 2), np.dtype("complex64")),
}


@pytest.mark.parametrize("name", SPLIT)
def test_rows_are_reduced_first(name, rng):
    f, shape, dtype, axes = SPLIT[name]
    x = from_numpy(rng.integers(-3, 4, shape).astype(dtype))
    jaxpr = traced(f, x)
    split = with_columns_first(jaxpr, {}, EAGER)
    assert axes_of(split) == axes
    np.testing.assert_array_equal(eval_jaxpr(split, [x])[0], eval_jaxpr(jaxpr, [x])[0])


@pytest.mark.parametrize("name", WHOLE)
def test_reductions_that_stay(name, rng):
    f, shape, dtype = WHOLE[name]
    jaxpr = traced(f, from_numpy(rng.normal(size=shape).astype(dtype)))
    assert with_columns_first(jaxpr, {}, EAGER) is jaxpr


@pytest.mark.parametrize("rows, parts", [(64, 1), (4096, 2)])
def test_a_second_launch_must_be_worth_it(rows, parts):
    """Groups of 4 in bfloat16 read four times 16 MiB: 9 us, against 2."""
    x = bf.ShapeDtypeStruct((16, rows, 128), BF16)
    jaxpr = traced(lambda x: x.astype(F32).reshape(16, rows, 32, 4).sum((1, 3)), x)
    assert len(axes_of(with_columns_first(jaxpr, {}, H200))) == parts


def test_norm_of_groups_stores_no_float32():
    """Its gradient too reads the 16-bit arrays in every kernel."""

    def loss(x, w):
        y = (x @ w).astype(F32).reshape(16, 4096, 32, 4)
        y = (y - y.mean((1, 3), keepdims=True)) * bf.lax.rsqrt(y.var((1, 3), keepdims=True) + 1e-5)
        return bf.nn.silu(y.reshape(x.shape).astype(BF16) @ w).astype(F32).sum()

    shapes = bf.ShapeDtypeStruct((16, 64, 64, 128), BF16), bf.ShapeDtypeStruct((128, 128), BF16)
    lowered = bf.jit(bf.grad(loss, (0, 1))).trace(*shapes).lower(platform="cuda:sm_90")
    written = [v.aval for r in lowered.fusion.regions for v in r.outputs]
    assert not [a for a in written if a.dtype == F32 and a.size >= 16 * 4096 * 128]
