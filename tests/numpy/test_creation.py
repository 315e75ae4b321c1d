"""Creation functions against NumPy, eagerly and inside traces."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, scalar
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.common import f32, i32, same

CALLS = [
    ("zeros", (3,), {}), ("zeros", ((2, 3),), {}), ("ones", ((2, 0),), {}), ("ones", ((),), {}),
    ("zeros", ((2, 3), "int32"), {}), ("ones", (3,), {"dtype": "bool"}),
    ("full", ((2, 3), 1.5), {}), ("full", ((2,), 7), {}), ("full", ((), True), {}),
    ("full", ((2, 2), 3, "float32"), {}),
    ("eye", (3,), {}), ("eye", (2, 4), {"k": 1}), ("eye", (4, 2), {"k": -1, "dtype": "int32"}),
    ("identity", (3,), {}),
    ("tri", (3,), {}), ("tri", (3, 5, 1), {}), ("tri", (4, 3, -1), {}),
    ("arange", (5,), {}), ("arange", (2, 7), {}), ("arange", (1, 10, 3), {}), ("arange", (5, 0, -2), {}),
    ("arange", (0.0, 1.0, 0.25), {}), ("arange", (3.0,), {}), ("arange", (5, 2), {}),
    ("arange", (4,), {"dtype": "uint8"}),
    ("arange", (1, 3, 0.5), {}), ("arange", (3,), {"dtype": "float32"}),
    ("linspace", (0, 1), {}), ("linspace", (2.0, -3.0, 7), {}), ("linspace", (0, 1, 5, False), {}),
    ("linspace", (1, 2, 1), {}), ("linspace", (1, 2, 0), {}), ("linspace", (0, 10, 5), {"dtype": "int32"}),
    ("logspace", (0, 2, 5), {}), ("geomspace", (1, 100, 4), {}),
    ("indices", ((2, 3),), {}), ("tril_indices", (3,), {}), ("triu_indices", (3, 1, 4), {}),
]  # fmt: skip


@pytest.mark.parametrize("name, args, kwargs", CALLS)
def test_calls(name, args, kwargs):
    want = getattr(np, name)(*args, **kwargs)
    same(getattr(bnp, name)(*args, **kwargs), want)
    same(jit(lambda: getattr(bnp, name)(*args, **kwargs))(), want)


def test_from_arrays():
    x, n = f32(3, 4), i32(3)
    for name in ("zeros_like", "ones_like", "tril", "triu"):
        for v in (x, f32(2, 3, 3)):
            same(getattr(bnp, name)(bnp.asarray(v)), getattr(np, name)(v))
    same(bnp.tril(x, -1), np.tril(x, -1))
    same(bnp.triu(x, 2), np.triu(x, 2))
    same(bnp.full_like(bnp.asarray(n), 3), np.full_like(n, 3))
    same(bnp.zeros_like(x, dtype="int32", shape=(2,)), np.zeros(2, np.int32))
    same(bnp.ones_like(2.0), np.float32(1))
    assert bnp.zeros_like(ShapeDtypeStruct((2,), "bfloat16")).dtype == bnp.bfloat16
    assert bnp.empty_like(x).shape == (3, 4) and bnp.empty((2,)).shape == (2,)
    same(bnp.full((2, 3), x[0, :3]), np.broadcast_to(x[0, :3], (2, 3)))
    same(bnp.vander(x[0], 3), np.vander(x[0], 3))
    for kwargs in ({}, {"indexing": "ij"}, {"sparse": True}):
        same(bnp.meshgrid(x[0], n, **kwargs), list(np.meshgrid(x[0], n, **kwargs)))
    same(bnp.linspace(bnp.asarray(x[0]), x[1], 5), np.linspace(x[0], x[1], 5), rtol=1e-4)
    same(bnp.linspace(x[0], x[1], 5, axis=1), np.linspace(x[0], x[1], 5, axis=1), rtol=1e-4)
    value, step = bnp.linspace(0, 1, 5, retstep=True)
    assert float(step) == 0.25
    same(grad(lambda a: bnp.linspace(a, 2.0, 5).sum())(1.0), np.float32(2.5))


def test_asarray():
    same(bnp.asarray([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]))
    same(bnp.asarray([1.0, 2]), np.array([1.0, 2]))
    same(bnp.asarray([]), np.zeros(0, np.float32))
    same(bnp.asarray([True, False]), np.array([True, False]))
    same(bnp.asarray(np.arange(3)), np.arange(3))
    same(bnp.array([1, 2], ndmin=3), np.array([1, 2], ndmin=3))
    same(bnp.asarray([1.7, -2.7], dtype="int32"), np.array([1, -2]))
    x = bnp.asarray([1.0, 2.0])
    assert bnp.asarray(x) is x and bnp.array(x) is not x
    assert bnp.asarray(x, dtype="float32") is x and bnp.astype(x, "int32").dtype == bnp.int32
    same(bnp.asarray([x, [3.0, 4.0]]), np.array([[1, 2], [3, 4]], np.float32))
    same(bnp.asarray([x[0], 5]), np.array([1, 5], np.float32))
    same(
        jit(lambda a, b: bnp.asarray([a, [b, 1]], dtype="float32"))(x, 3.0),
        np.array([[1, 2], [3, 1]], np.float32),
    )
    same(bnp.asarray(x, device="cpu:0"), np.array([1, 2], np.float32))

    class HasArray:
        def __array__(self, dtype=None, copy=None):
            return np.ones(2)

    same(bnp.asarray(HasArray()), np.ones(2, np.float32))


def test_asarray_is_fresh():
    """A donated array takes its memory: a shared constant must not be donated."""
    for x in (bnp.asarray(2.0), bnp.zeros(()), bnp.full((), 2.0), bnp.ones(())):
        assert isinstance(x, ConcreteArray)
        for weak in (True, False):
            shared = scalar(x.item(), x.dtype, weak)
            assert shared is not x and shared.buffer is not x.buffer
    host = np.ones(3, np.float32)
    x = bnp.asarray(host)
    host[0] = 5
    assert float(x[0]) == 1


def test_constants_in_traces_are_equations():
    jaxpr = make_jaxpr(lambda: (bnp.zeros((1000, 1000)), bnp.arange(2, 5000), bnp.eye(300), bnp.tri(50)))()
    assert not jaxpr.constvars


def test_errors():
    with pytest.raises(errors.ArgumentError, match="rows of one length"):
        bnp.asarray([[1, 2], [3]])
    with pytest.raises(errors.ArgumentError):
        bnp.asarray("abc")
    with pytest.raises((errors.ArgumentError, errors.DtypeError)):
        bnp.asarray(object())
    with pytest.raises(errors.ConcretizationError, match="static"):
        jit(lambda n: bnp.arange(n))(3)
    with pytest.raises(errors.ConcretizationError, match="static"):
        jit(lambda n: bnp.zeros((n, 2)))(3)
    with pytest.raises(errors.ValueRangeError, match="negative"):
        bnp.zeros(-1)
    with pytest.raises(errors.ValueRangeError, match="step"):
        bnp.arange(0, 1, 0)
    with pytest.raises(errors.ShapeError, match="broadcast"):
        bnp.full((2, 3), np.ones(4))
    with pytest.raises(errors.ShapeError):
        bnp.asarray([bnp.ones(2), bnp.ones(3)])
    with pytest.raises(errors.ValueRangeError, match="cpu:0"):
        bnp.asarray(1, device="cpu:9")


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("target", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_floats_beyond_integers(source, target):
    info = np.iinfo(target)
    beyond = float(info.max + 1)
    values = np.array(
        [beyond, -beyond, 2 * beyond, -1.0, -0.5, 2.7, np.inf, -np.inf, np.nan, 300.0], np.float32
    )
    x = bnp.asarray(values.tolist(), "float64" if source == "float64" else "float32").astype(source)
    exact = np.asarray(x).real.astype(np.float64)
    want = [
        0 if np.isnan(v) else info.max if v >= beyond else info.min if v < info.min else int(v) for v in exact
    ]
    for got in (
        x.astype(target),
        jit(lambda v: v.astype(target))(x),
        bnp.asarray(np.asarray(x), dtype=target),
        bnp.stack([v.astype(target) for v in x]),
    ):
        assert got.dtype == target and np.asarray(got).tolist() == want
    assert bnp.asarray(np.nan).astype("bool") and x[:0].astype(target).shape == (0,)


def test_masked_arrays_are_refused():
    """A mask of NumPy is never lost: it is an error that names the way out."""
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])
    for take in (
        bnp.asarray, bnp.array, bnp.sum, bnp.negative, bf.jit(lambda x: x), bf.device_put,
        lambda x: bnp.asarray(x, dtype="float64"), lambda x: bnp.ones(3) + x, lambda x: bnp.full(3, x),
        lambda x: bf.grad(lambda y: (y * y).sum())(x),
    ):  # fmt: skip
        with pytest.raises(errors.DtypeError, match=r"masked array(.|\n)*x.filled\(value\)"):
            take(masked)
    assert bnp.asarray(masked.filled(0)).tolist() == [1.0, 0.0, 3.0]
