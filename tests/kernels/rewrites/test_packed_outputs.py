"""Gradients of attention in one array: plans and values."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn, tree
from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import dce, inline_bodies, simplify
from blufunc.kernels.rewrites import packed_outputs
from tests.emulation import fake_cuda
from tests.kernels.backends.cuda.test_program import on, program_of, uniform

BF16 = dtypes.bfloat16
PACKED = "attention_grad+packed"


@pytest.fixture
def cuda(monkeypatch):
    fake_cuda.install(monkeypatch)
    return bf.devices("cuda")[0]


def small(*shape):
    """Numbers of both signs, so that weights are not of one key alone."""
    return (uniform(*shape, seed=1) - np.float32(0.5)) * np.float32(0.5)


def same(got, want, deviation):
    """Compare relative to the largest element: gradients are sums with cancellation."""
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        assert np.abs(g - w).max() <= deviation * np.abs(w).max()


def by_axis(y):
    y = y.reshape(2, 40, 3, 4, 16)
    return [y[:, :, i] for i in range(3)]


def by_heads(y):
    y = y.reshape(2, 40, 12, 16)
    return [y[:, :, :4], y[:, :, 4:8], y[:, :, 8:]]


def shared_heads(y):
    y = y.reshape(2, 40, 12, 16)
    return [y[:, :, 2:10], y[:, :, :2], y[:, :, 10:]]


def by_features(y):
    return [x.reshape(2, 40, 4, 16) for x in bnp.split(y, 3, -1)]


def attend(q, k, v):
    return (nn.dot_product_attention(q, k, v, is_causal=True).astype("float32") ** 2).sum()


def steps_of(f, device, *args):
    return [s.eqn.prim.name for s in program_of(f, *on(device, *args)).schedule.steps if hasattr(s, "eqn")]


@pytest.mark.parametrize("parts", [by_axis, by_heads, shared_heads, by_features], ids=lambda f: f.__name__)
def test_are_written_where_one_array_has_them(parts, cuda):
    """Nothing puts them together: a product reads them."""
    x, w = uniform(2, 40, 32).astype(BF16), small(32, 192).astype(BF16)
    f = bf.grad(lambda x, w: attend(*parts(x @ w)), (0, 1))
    steps = program_of(f, *on(cuda, x, w)).schedule.steps
    names = [s.eqn.prim.name if hasattr(s, "eqn") else "kernel" for s in steps]
    assert names == ["dot_general", "attention", "kernel", PACKED, "dot_general", "dot_general"]
    same(bf.jit(f)(*on(cuda, x, w)), f(*on(backend.host_device(), x, w)), 2e-2)


@pytest.mark.parametrize(
    "precision, dtype", [("bf16", "float32"), ("tf32", "float32"), ("float32_tc", "float32")]
)
def test_in_mixed_precision_and_in_parts(precision, dtype, cuda, monkeypatch):
    """Gradients that are float32 before they are packed are rounded once, as before."""
    x, w, b = uniform(2, 40, 32), small(32, 192), uniform(192)
    loss = lambda x, w, b: attend(*by_axis(x @ w + b))
    if precision == "bf16":
        loss = bf.autocast(loss)
    else:
        monkeypatch.setattr(config, "matmul_precision", precision)
    f = bf.grad(loss, (0, 1, 2))
    names = steps_of(f, cuda, x, w, b)
    assert names.count(PACKED) == 1 and "attention_grad" not in names
    want = f(*on(backend.host_device(), x, w, b))
    same(bf.jit(f)(*on(cuda, x, w, b)), want, {"bf16": 2e-2, "tf32": 2e-3, "float32_tc": 1e-5}[precision])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_a_bias_is_made_of_sums_that_kernels_begin(dtype, cuda, monkeypatch):
    """For 16-bit elements; for float32, the kernel of their scales reads all anyway."""
    monkeypatch.setattr(config, "matmul_precision", "tf32")
    x, w, b = uniform(2, 40, 32), small(32, 192), uniform(192)
    loss = lambda x, w, b: attend(*by_axis(x @ w + b))
    f = bf.grad(bf.autocast(loss) if dtype == "bfloat16" else loss, (0, 1, 2))
    (packed,) = (
        s.eqn
        for s in program_of(f, *on(cuda, x, w, b)).schedule.steps
        if hasattr(s, "eqn") and s.eqn.prim.name == PACKED
    )
    sums = [v.aval for v in packed.outvars[1:]]
    assert [str(a) for a in sums] == (["f32[6,192]"] if dtype == "bfloat16" else [])
    same(bf.jit(f)(*on(cuda, x, w, b)), f(*on(backend.host_device(), x, w, b)), 2e-2)


ASIDE = {
    "something between them": (lambda y: [y.reshape(2, 40, 3, 4, 16)[:, :, i] for i in (0, 1, 1)], 192),
    "more in the array": (lambda y: [y.reshape(2, 40, 4, 4, 16)[:, :, i] for i in range(3)], 256),
    "queries of another array": (lambda y: [y[..., :64].reshape(2, 40, 4, 16) * 2, *by_axis(y)[1:]], 192),
    "tokens apart": (lambda y: [bnp.flip(x, 1) for x in by_axis(y)], 192),
}


@pytest.mark.parametrize("name", ASIDE)
def test_other_gradients_stay_apart(name, cuda):
    parts, width = ASIDE[name]
    x, w = uniform(2, 40, 32).astype(BF16), small(32, width).astype(BF16)
    f = bf.grad(lambda x, w: attend(*parts(x @ w)), (0, 1))
    assert PACKED not in steps_of(f, cuda, x, w)
    same(bf.jit(f)(*on(cuda, x, w)), f(*on(backend.host_device(), x, w)), 2e-2)


def test_one_that_is_returned_stays_apart(cuda):
    y = small(2, 40, 192).astype(BF16)

    def f(y):
        parts = by_axis(y)
        grads = bf.grad(lambda *parts: attend(*parts), (0, 1, 2))(*parts)
        return bnp.stack(grads, 2), grads[0]

    assert PACKED not in steps_of(f, cuda, y)
    same(bf.jit(f)(*on(cuda, y)), f(*on(backend.host_device(), y)), 2e-2)


@pytest.mark.parametrize("prim", packed_outputs._REMOVED, ids=lambda prim: prim.name)
def test_what_puts_them_together_in_another_way_is_asked(prim, cuda):
    y = small(2, 40, 192).astype(BF16)
    with bf.override(prim, impl=lambda *args, **params: prim.impl(*args, **params)):
        assert PACKED not in steps_of(bf.grad(lambda y: attend(*by_axis(y))), cuda, y)


def test_means_the_same_by_its_definition():
    y = small(2, 40, 192)
    f = bf.grad(lambda y: attend(*shared_heads(y)))
    keep = lambda e: e.prim.name in ("attention", "attention_grad")
    jaxpr, origins = inline_bodies(simplify(bf.make_jaxpr(f)(y)), keep)
    made = dce(packed_outputs.with_packed_gradients(jaxpr, origins))
    (packed,) = [e for e in made.eqns if e.prim is packed_outputs.packed_p]
    assert packed.params["places"] == (32, 0, 160)
    (got,) = eval_jaxpr(made, [from_numpy(y)])
    np.testing.assert_allclose(np.asarray(got), np.asarray(f(y)), rtol=1e-6, atol=1e-6)
