"""Convolutions as kinds, matmuls and products, and their layouts."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Literal
from blufunc.core.programs.simplify import inline_bodies, inline_definitions, simplify
from blufunc.kernels.backends.cuda.library.convolution import plans
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.rewrites.convolutions.canonical import with_convolutions
from tests.kernels.backends.cuda.library.test_convolution import CASES, NCHW, NHWC, arrays, function


def traced(fun, *avals):
    jaxpr = bf.make_jaxpr(fun)(*avals)
    return inline_bodies(simplify(inline_definitions(getattr(jaxpr, "jaxpr", jaxpr))), lambda e: False)[0]


def evaluated(jaxpr, args):
    """The results of a program, each primitive by its ``impl``."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    read = lambda a: np.asarray(a.array.__array__()) if isinstance(a, Literal) else env[a]
    for e in jaxpr.eqns:
        out = e.prim.impl(*map(read, e.invars), **e.params)
        for v, x in zip(e.outvars, out if e.prim.multiple_results else [out], strict=True):
            assert x.shape == v.aval.shape and x.dtype == v.aval.dtype, e
            env[v] = x
    return [read(a) for a in jaxpr.outvars]


def gradient(name):
    """Both gradients of a case, given a cotangent."""
    params = CASES[name][3]
    return lambda ct, x, w: bf.vjp(lambda x, w: lax.conv_general_dilated(x, w, **params), x, w)[1](ct)


def kinds(jaxpr):
    """The kinds of convolutions in order, and matmuls."""
    names = {"convolution": lambda e: e.params["kind"], "dot_general": lambda e: "matmul"}
    return [names[e.prim.name](e) for e in jaxpr.eqns if e.prim.name in names]


FORWARD = {
    "transposed": "input", "transposed in groups": "input", "batch groups": "weight",
    **dict.fromkeys(("1 x 1", "patches", "whole window"), "matmul"),
    "negative padding": "weight",  # of fewer results than window elements: the same sums
}  # fmt: skip
"""Kinds of values that are not ``forward``."""


@pytest.mark.parametrize("name", [n for n in CASES if n != "large"])
@pytest.mark.parametrize("library", [True, False])
def test_results_are_the_same(name, library):
    x, w = (a.astype(np.float32) for a in arrays(name, np.float64))
    out = bf.eval_shape(function(name), x, w)[0]
    ct = np.random.default_rng(2).standard_normal(out.shape).astype(np.float32)
    params = {**CASES[name][3], "preferred_element_type": None}
    forward = lambda x, w: lax.conv_general_dilated(x, w, **params)
    for fun, args in ((forward, (x, w)), (lambda ct, x, w: bf.vjp(forward, x, w)[1](ct), (ct, x, w))):
        before = traced(fun, *args)
        after = with_convolutions(before, {}, lambda c: library)
        assert not any(e.prim.name == "conv_general_dilated" for e in after.eqns)
        for a, b in zip(evaluated(after, args), evaluated(before, args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in CASES if "depth" not in n and n != "causal"])
def test_kinds_are_recognized(name):
    x, w = (bf.ShapeDtypeStruct(s, dtypes.as_dtype(CASES[name][2])) for s in CASES[name][:2])
    forward = traced(lambda x, w: lax.conv_general_dilated(x, w, **CASES[name][3]), x, w)
    first = FORWARD.get(name, "forward")
    assert kinds(with_convolutions(forward, {})) == [first]
    ct = bf.ShapeDtypeStruct(forward.outvars[0].aval.shape, forward.outvars[0].aval.dtype)
    found = kinds(with_convolutions(traced(gradient(name), ct, x, w), {}))
    want = {
        "forward": {"input", "weight"}, "input": {"forward", "weight"}, "weight": {"forward", "input"},
        "matmul": {"matmul"},
    }[first]  # fmt: skip
    if name != "whole window":  # its weight gradient has as many results as window elements
        assert set(found) == want


def test_second_derivatives_and_vmap_are_recognized():
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    loss = lambda x, w: bnp.sum(bf.vmap(conv, (0, None))(x, w) ** 2)
    x, w = bnp.ones((2, 3, 6, 6, 8)), bnp.ones((3, 3, 8, 8))
    found = with_convolutions(traced(lambda x, w: bf.jvp(bf.grad(loss), (x, w), (x, w))[1], x, w), {})
    assert {"forward", "input"} <= set(kinds(found))
    assert not any(e.prim.name == "conv_general_dilated" for e in found.eqns)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_other_dtypes_stay(dtype):
    x, w = bf.ShapeDtypeStruct((2, 6, 6, 4), dtype), bf.ShapeDtypeStruct((3, 3, 4, 4), dtype)
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    before = traced(conv, x, w)
    assert with_convolutions(before, {}) is before


ALL_PADDING = {  # shapes of x and w, and the parameters; numbers NHC, HIO, NHC
    "first elements cropped": ((1, 2, 8), (3, 8, 8), {"window_strides": (1,), "padding": [(4, -2)]}),
    "crop, then pad": ((2, 1, 6), (1, 6, 8), {"window_strides": (1,), "padding": [(2, -1)]}),
    "stride over the end": ((2, 3, 8), (1, 8, 8), {"window_strides": (2,), "padding": [(2, -3)]}),
    "holes": ((2, 2, 8), (1, 8, 8), {"window_strides": (1,), "padding": [(-3, 4)], "lhs_dilation": (3,)}),
    "batch groups": (
        (3, 1, 1), (1, 1, 9),
        {"window_strides": (3,), "padding": [(2, 0)], "lhs_dilation": (3,), "batch_group_count": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL_PADDING)
def test_windows_of_padding_alone(name):
    shapes, params = ALL_PADDING[name][:2], ALL_PADDING[name][2]
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    forward = lambda x, w: lax.conv_general_dilated(x, w, **params, dimension_numbers=("NHC", "HIO", "NHC"))
    ct = rng.standard_normal(bf.eval_shape(forward, x, w).shape).astype(np.float32)
    for fun, args in ((forward, (x, w)), (lambda ct, x, w: bf.vjp(forward, x, w)[1](ct), (ct, x, w))):
        before = traced(fun, *args)
        after = with_convolutions(before, {})
        assert all(0 not in v.aval.shape for e in after.eqns for v in e.outvars)
        for a, b in zip(evaluated(after, args), evaluated(before, args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# -- layouts -------------------------------------------------------------------------------------------


def network(numbers, axis):
    """Two layers with batch norm, a residual and a pool, and a loss."""
    others = tuple(d for d in range(4) if d != axis)
    shape = tuple(-1 if d == axis else 1 for d in range(4))

    def layer(p, x):
        y = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=numbers)
        wide = y.astype("float32")
        mean = wide.mean(others)
        scale = lax.rsqrt(((wide - mean.reshape(shape)) ** 2).mean(others) + 1e-5)
        y = (wide - mean.reshape(shape)) * (scale * p["scale"]).reshape(shape)
        return bf.nn.relu(y).astype("bfloat16")

    def loss(params, x):
        x = layer(params[0], x.astype("bfloat16"))
        x = x + layer(params[1], x)
        return (x.astype("float32").mean(others[1:]) ** 2).sum()

    return loss


def scheduled(numbers, axis, n=16, size=32):
    x = (n, size, size, size)
    w = np.ones((size, size, 3, 3) if axis == 1 else (3, 3, size, size), np.float32)
    params = [{"w": w.astype(dtypes.bfloat16), "scale": np.ones(size, np.float32)}] * 2
    jaxpr = bf.make_jaxpr(bf.value_and_grad(network(numbers, axis)))(params, np.ones(x, np.float32))
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return Draft(jaxpr, [False] * len(jaxpr.invars), "sm_90a").schedule


def large_copies(schedule, size):
    """Launches that only move an activation."""
    moved = ("copy", "transpose")
    return [
        s for s in schedule.steps
        if hasattr(s, "region") and all(e.prim.name in moved for e in s.region.eqns)
        and max(v.aval.size for v in s.region.outputs) >= size
    ]  # fmt: skip


def test_features_second_costs_one_transpose_of_the_input():
    last, second = scheduled(NHWC, 3), scheduled(NCHW, 1)
    size = 16 * 32**3
    assert not large_copies(last, size)
    assert len(large_copies(second, size)) <= 1
    assert len(second.steps) <= len(last.steps) + 4


def test_explain_says_what_runs(monkeypatch):
    x, w = bnp.ones((2, 8, 8, 8), "bfloat16"), bnp.ones((3, 3, 8, 8), "bfloat16")
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    for reason, text in (
        (None, "runs by cuDNN"),
        ("none here", "GEMM: cuDNN does not compute it (none here"),
    ):
        monkeypatch.setattr(plans, "why_not", lambda c, reason=reason: reason)
        jaxpr = traced(conv, x, w)
        notes = Draft(jaxpr, [False] * 2, "sm_90a").schedule.notes
        assert any(text in n for n in notes), notes
