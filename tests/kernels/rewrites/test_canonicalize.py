"""Matmuls that sum nothing, and positions of extrema along any axis."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.rewrites.canonicalize import canonicalize
from tests.emulation import fake_cuda

X, Y = (np.random.default_rng(0).standard_normal(n).astype(np.float32) * 3 for n in (15, 7))


@pytest.mark.parametrize(
    ("of", "to", "elementwise"),
    [
        ("float32", "float32", True),
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
    ],
)
def test_an_outer_product_is_rounded_once(of, to, elementwise, monkeypatch):
    def fun(x, y):
        return lax.dot_general(x, y, (((), ()), ((), ())), preferred_element_type=to)

    x, y = (from_numpy(a).astype(of) for a in (X, Y))
    made = canonicalize(simplify(bf.jit(fun).trace(x, y).jaxpr), {}, False)
    assert ("dot_general" not in [e.prim.name for e in made.eqns]) == elementwise
    monkeypatch.setattr(config, "host_compiler", "always")
    np.testing.assert_array_equal(bf.jit(fun)(x, y), fun(x, y))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "bool"])
def test_positions_of_extrema_along_any_axis(monkeypatch, rng, device, dtype):
    """NaN is extreme, of equal elements the first counts, and zeros are equal."""
    x = rng.integers(-3, 4, (5, 7, 6)).astype(np.float32)
    if "float" in dtype:
        x[1, 3, 2], x[2, :, 1], x[0, :, 0], x[0, 3, 0] = np.nan, -np.inf, 0, -0.0
    x = bnp.asarray(x).astype(dtype)
    wide = np.asarray(x).astype(np.float32)
    if device == "cuda":
        fake_cuda.install(monkeypatch)
    else:
        monkeypatch.setattr(toolchain, "WORTH_CALLING", 0)
    on_device = bf.device_put(x, bf.devices(device)[0])
    every = bf.jit(lambda x: [(bnp.argmax(x, d), bnp.argmin(x, d)) for d in (0, 1, 2)])
    sight = every.lower(on_device).sight(bf.devices(device)[0])
    assert {s.kind for s in sight.cost.steps} == {"kernel"}
    for d, (largest, smallest) in enumerate(every(on_device)):
        assert largest.dtype == smallest.dtype == np.int32
        np.testing.assert_array_equal(np.asarray(largest), wide.argmax(d))
        np.testing.assert_array_equal(np.asarray(smallest), wide.argmin(d))


@pytest.mark.parametrize(
    ("dims", "shapes", "copies"),
    [
        (((1,), (0,)), ((96, 128), (128, 160)), 1),
        (((1,), (1,)), ((96, 128), (160, 128)), 0),
        (((0,), (0,)), ((128, 96), (128, 160)), 2),
        (((2,), (1,)), ((3, 96, 128), (3, 128, 160)), 1),
        (((1,), (0,)), ((2, 128), (128, 160)), 0),
    ],
    ids=["rows by columns", "rows by rows", "columns by columns", "in batches", "few rows"],
)
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_the_summed_axis_of_small_integers_is_last(rng, dtype, dims, shapes, copies):
    """Integer tensor cores need it so; other matmuls read operands in place."""
    batch = ((0,), (0,)) if len(shapes[0]) == 3 else ((), ())
    x, y = (from_numpy(rng.integers(-9, 9, s).astype(dtype)) for s in shapes)
    fun = lambda x, y: lax.dot_general(
        x, y, (dims, batch), preferred_element_type="int32" if dtype == "int8" else None
    )
    jaxpr = simplify(bf.jit(fun).trace(x, y).jaxpr)
    made = canonicalize(jaxpr, {}, True)
    assert [e.prim.name for e in made.eqns].count("copy") == (copies if dtype == "int8" else 0)
    for got, want in zip(eval_jaxpr(made, [x, y]), eval_jaxpr(jaxpr, [x, y]), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("n, index", [(256, "uint8"), (128, "int8")])
def test_positions_fill_their_dtype(monkeypatch, n, index):
    monkeypatch.setattr(toolchain, "WORTH_CALLING", 0)
    x = from_numpy(np.arange(2 * n, dtype=np.float32).reshape(n, 2))
    np.testing.assert_array_equal(bf.jit(lambda x: lax.argmax(x, 0, index))(x), [n - 1, n - 1])
