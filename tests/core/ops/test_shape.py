"""Slices, pads and concatenation: NumPy values, derivatives, ``vmap``, messages."""

import functools

import numpy as np
import pytest

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy, scalar
from blufunc.core.ir import dtypes
from blufunc.core.ops import shape as sh
from blufunc.core.ops.elementwise import mul
from blufunc.transforms.autodiff.grad import vjp
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.core.ops.checks import check, host


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(config, "check", True)


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


SLICES = [
    # shape, start, limit, strides
    ((5,), (1,), (4,), None),
    ((5,), (0,), (5,), (2,)),
    ((5,), (1,), (5,), (3,)),
    ((7,), (2,), (3,), (5,)),
    ((4, 6), (1, 0), (4, 5), (2, 3)),
    ((4, 6), (0, 2), (4, 6), None),
    ((3,), (2,), (2,), None),
    ((2, 3, 4), (0, 1, 1), (2, 2, 4), (1, 1, 2)),
    ((), (), (), None),
]


@pytest.mark.parametrize("shape, start, limit, strides", SLICES)
def test_slice(shape, start, limit, strides):
    x = data(*shape)
    want = x[tuple(map(slice, start, limit, strides or (1,) * len(shape)))]
    check(lambda x: sh.slice_(x, start, limit, strides), [x], np.asarray(want))


@pytest.mark.parametrize(
    "args, index",
    [
        ((1, 3), np.s_[:, 1:3]),
        ((None, -1), np.s_[:, :-1]),
        ((-3, None), np.s_[:, -3:]),
        ((0, None, 2), np.s_[:, ::2]),
        ((0, 2, 1, 0), np.s_[:2]),
        ((0, 4, 1, -1), np.s_[:, :4]),
    ],
)
def test_slice_in_dim(args, index):
    x = data(3, 5)
    args = (*args, *(1, 1)[len(args) - 2 :])
    np.testing.assert_array_equal(host(sh.slice_in_dim(from_numpy(x), *args)), x[index])


def test_index_in_dim():
    x = data(3, 5)
    np.testing.assert_array_equal(host(sh.index_in_dim(from_numpy(x), -1, 1)), x[:, -1:])
    np.testing.assert_array_equal(host(sh.index_in_dim(from_numpy(x), 1, keepdims=False)), x[1])
    with pytest.raises(errors.ValueRangeError, match="5 is out of range"):
        sh.index_in_dim(from_numpy(x), 5, 1)


def padded(x, value, config):
    """Brute force: move each element to its position, if that exists."""
    shape = [lo + n + hi + i * max(n - 1, 0) for n, (lo, hi, i) in zip(x.shape, config)]
    out = np.full(shape, value)
    for at in np.ndindex(*x.shape):
        to = tuple(lo + k * (i + 1) for k, (lo, _, i) in zip(at, config))
        if all(0 <= k < n for k, n in zip(to, shape)):
            out[to] = x[at]
    return out


PADS = [
    ((3,), [(1, 2, 0)]),
    ((3,), [(0, 0, 2)]),
    ((4,), [(-1, -2, 0)]),
    ((4,), [(-2, 1, 1)]),
    ((4,), [(3, -4, 2)]),
    ((4,), [(-4, 0, 0)]),
    ((3,), [(-6, 2, 1)]),
    ((0,), [(2, 1, 3)]),
    ((2, 3), [(1, 0, 0), (-1, 2, 1)]),
    ((2, 3), [(0, 0, 0), (0, -3, 0)]),
    ((), []),
]


@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("shape, config", PADS)
def test_pad(shape, config, value):
    x, value = data(*shape), np.asarray(value)
    check(lambda x, v: sh.pad(x, v, config), [x, value], padded(x, value, config))


def test_gradient_of_the_padding_value_does_not_cancel():
    ct = np.array([1e300, 1.0, 1e300])
    _, pullback = vjp(lambda v: sh.pad(from_numpy(np.zeros(2)), v, [(0, 1, 0)]), scalar(0.0, dtypes.float64))
    assert host(pullback(from_numpy(ct[[0, 2, 1]]))[0]) == 1.0


CONCATENATIONS = [
    ([(2,), (3,)], 0),
    ([(2, 3), (2, 1), (2, 0)], 1),
    ([(1, 3), (2, 3)], 0),
    ([(2, 2, 1), (2, 2, 3)], -1),
]


@pytest.mark.parametrize("shapes, dimension", CONCATENATIONS)
def test_concatenate(shapes, dimension):
    xs = [data(*s, seed=i) for i, s in enumerate(shapes)]
    check(lambda *xs: sh.concatenate(xs, dimension), xs, np.concatenate(xs, dimension))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (-1,)])
def test_rev(dims):
    x = data(3, 4)
    check(lambda x: sh.rev(x, dims), [x], np.flip(x, dims))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32", "bfloat16", "complex64", "int64"])
@pytest.mark.parametrize(
    "shape, dimension", [((4,), 0), ((2, 3), 0), ((2, 3), 1), ((2, 0), 1), ((2, 3, 4), 1)]
)
def test_iota(dtype, shape, dimension):
    dtype = dtypes.as_dtype(dtype)
    got = host(sh.iota(dtype, shape, dimension))
    np.testing.assert_array_equal(got, np.indices(shape)[dimension].astype(dtype))


def test_squeeze_and_expand_dims():
    check(lambda x: sh.squeeze(x, (0, -1)), [data(1, 3, 1)], data(1, 3, 1)[0, :, 0])
    check(lambda x: sh.expand_dims(x, (0, -1)), [data(3, 2)], data(3, 2)[None, :, :, None])


def test_nothing_to_do_is_nothing_done():
    x = from_numpy(data(2, 3))
    assert sh.slice_(x, (0, 0), (2, 3), (1, 1)) is x
    assert sh.slice_in_dim(x, 0, 3, axis=1) is x
    assert sh.pad(x, 0.0, [(0, 0, 0)] * 2) is x
    assert sh.concatenate([x], 1) is x
    assert sh.rev(x, ()) is x
    assert sh.squeeze(x, ()) is x


def test_every_dtype():
    for name in ("bool", "int8", "uint16", "bfloat16", "float8_e5m2", "complex64", "key<fry>"):
        raw = np.arange(6, dtype=np.uint8).reshape(2, 3)
        dtype = dtypes.as_dtype(name)
        a = raw.astype(np.uint64).view(dtype) if name == "key<fry>" else raw.astype(dtype)
        x = from_numpy(a)
        np.testing.assert_array_equal(host(sh.slice_in_dim(x, 1, 3, axis=1)), a[:, 1:])
        np.testing.assert_array_equal(host(sh.concatenate([x, x], 0)), np.concatenate([a, a]))
        np.testing.assert_array_equal(host(sh.rev(x, (1,))), a[:, ::-1])
        got = host(sh.pad(x, from_numpy(a[0, 0]), [(0, 1, 0), (1, 0, 0)]))
        np.testing.assert_array_equal(got[:2, 1:], a)
        assert (got[2] == a[0, 0]).all()


def test_slice_and_pad_transpose_to_one_equation():
    x = from_numpy(data(6))
    for f in (
        lambda x: sh.slice_(x, (1,), (5,), (3,)),
        lambda x: sh.pad(x, 0.0, [(1, 2, 1)]),
    ):
        out, pullback = vjp(f, x)
        assert len(make_jaxpr(pullback)(out).eqns) == 1


ERRORS = [
    (errors.ShapeError, "needs 2 starts", lambda x: sh.slice_(x, (0,), (1,))),
    (errors.ShapeError, "axis 1 has 3 elements, 1:4", lambda x: sh.slice_(x, (0, 1), (2, 4))),
    (errors.ShapeError, "axis 0 has 2 elements, 2:1", lambda x: sh.slice_(x, (2, 0), (1, 3))),
    (errors.ShapeError, "strides must be positive", lambda x: sh.slice_(x, (0, 0), (2, 3), (1, 0))),
    (errors.AxisRangeError, "axis 2 is out of range", lambda x: sh.slice_in_dim(x, 0, 1, axis=2)),
    (errors.ShapeError, "needs 2 triples", lambda x: sh.pad(x, 0.0, [(1, 1, 0)])),
    (errors.ShapeError, "interior padding", lambda x: sh.pad(x, 0.0, [(1, 1, -1), (0, 0, 0)])),
    (errors.ShapeError, "cuts off more", lambda x: sh.pad(x, 0.0, [(-2, -1, 0), (0, 0, 0)])),
    (errors.ShapeError, "one value", lambda x: sh.pad(x, x, [(1, 1, 0)] * 2)),
    (errors.DtypeError, "of its dtype", lambda x: sh.pad(x, scalar(0, dtypes.int32), [(1, 1, 0)] * 2)),
    (errors.ArgumentError, "at least one", lambda x: sh.concatenate([], 0)),
    (errors.ShapeError, "it has 2 axes", lambda x: sh.concatenate([x, x], 2)),
    (errors.ShapeError, "array 1 is f64", lambda x: sh.concatenate([x, sh.slice_(x, (0, 0), (2, 2))], 0)),
    (errors.DtypeError, "array 1 is i32", lambda x: sh.concatenate([x, sh.iota(dtypes.int32, (2, 3), 0)], 0)),
    (errors.ShapeError, "distinct", lambda x: sh.rev(x, (1, -1))),
    (errors.DtypeError, "iota takes numbers", lambda x: sh.iota(dtypes.bool_, (2,), 0)),
    (errors.ShapeError, "iota of shape", lambda x: sh.iota(dtypes.int32, (2,), 1)),
    (errors.ShapeError, "do not all have size 1", lambda x: sh.squeeze(x, (0,))),
    (errors.ShapeError, "repeat", lambda x: sh.expand_dims(x, (0, 0))),
    (errors.ConcretizationError, "index", lambda x: make_jaxpr(functools.partial(sh.slice_, x, (0, 0)))(mul(x, x))),
]  # fmt: skip


@pytest.mark.parametrize("error, text, f", ERRORS, ids=[t for _, t, _ in ERRORS])
def test_errors(error, text, f):
    with pytest.raises(error, match=text) as e:
        f(from_numpy(data(2, 3)))
    assert e.value.fix and e.value.where
