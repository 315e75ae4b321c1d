"""``dot_general`` beyond the op table: random shapes, copies, derivatives, errors."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.core.ops import dot as module
from blufunc.core.ops.dot import dot, dot_general, dot_general_p
from blufunc.core.ops.elementwise import add
from blufunc.transforms.autodiff.grad import jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 1, "f": 3, "g": 2, "h": 4, "i": 2}


def positions(axes, names):
    return tuple(names.index(i) for i in axes)


@st.composite
def contractions(draw):
    shared = draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=4))
    cut = draw(st.integers(0, len(shared)))
    contract, batch = "".join(shared[:cut]), "".join(shared[cut:])
    left = draw(st.permutations([*shared, *"fg"[: draw(st.integers(0, 2))]]))
    right = draw(st.permutations([*shared, *"hi"[: draw(st.integers(0, 2))]]))
    return "".join(left), "".join(right), contract, batch, draw(st.permutations(range(len(left))))


@given(contractions())
def test_any_contraction(case):
    """Values, transposes and batching of any contraction in any memory layout."""
    left, right, contract, batch, layout = case
    rng = np.random.default_rng(0)
    # the memory order of the left operand's axes differs from their logical order
    x = rng.normal(size=[SIZES[left[i]] for i in layout]).transpose(np.argsort(layout))
    y = rng.normal(size=[SIZES[i] for i in right])
    numbers = tuple((positions(axes, left), positions(axes, right)) for axes in (contract, batch))
    params = {"dimension_numbers": numbers, "precision": None, "preferred_element_type": None}
    free = "".join(i for i in left + right if i in "fghi")
    want = np.einsum(f"{left},{right}->{batch}{free}", x, y)
    got = dot_general_p.impl(x, y, **params)
    assert not np.shares_memory(got, x) and not np.shares_memory(got, y)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)

    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    f = lambda a, b: dot_general(a, b, numbers)
    out, pull = vjp(f, x32, y32)
    ct = rng.normal(size=out.shape).astype(np.float32)
    dx, dy = pull(ct)
    assert dx.shape == x.shape and dy.shape == y.shape
    for tangents, cotangent in (((x32, 0 * y32), dx), ((0 * x32, y32), dy)):
        _, t = jvp(f, (x32, y32), tangents)
        given_ = tangents[0] if cotangent is dx else tangents[1]
        np.testing.assert_allclose(
            np.vdot(np.asarray(t), ct), np.vdot(given_, np.asarray(cotangent)), rtol=1e-3, atol=1e-3
        )
    xs, ys = np.stack([x32, 2 * x32], -1), np.stack([y32, 3 * y32])
    np.testing.assert_allclose(np.asarray(vmap(f, (-1, None))(xs, y32))[1], 2 * want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(vmap(f, (None, 0))(x32, ys))[1], 3 * want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(vmap(f, (-1, 0))(xs, ys))[1], 6 * want, rtol=1e-4, atol=1e-4)


MATMULS = {
    # lhs, rhs as typical views, and dimension numbers
    "projection": ((4, 5, 6), (6, 7), (((2,), (0,)), ((), ()))),
    "its lhs gradient": ((4, 5, 7), (6, 7), (((2,), (1,)), ((), ()))),
    "its rhs gradient": ((4, 5, 6), (4, 5, 7), (((0, 1), (0, 1)), ((), ()))),
    "heads": ((4, 5, 6), (6, 2, 3), (((2,), (0,)), ((), ()))),
    "joined heads": ((4, 5, 2, 3), (2, 3, 6), (((2, 3), (0, 1)), ((), ()))),
    "scores": ((4, 5, 2, 3), (4, 5, 2, 3), (((3,), (3,)), ((0, 2), (0, 2)))),
    "weighted values": ((4, 2, 5, 6), (4, 6, 2, 3), (((3,), (1,)), ((0, 1), (0, 2)))),
    "gradient of queries": ((4, 2, 5, 6), (4, 6, 2, 3), (((3,), (1,)), ((0, 1), (0, 2)))),
    "gradient of keys": ((4, 2, 5, 6), (4, 5, 2, 3), (((2,), (1,)), ((0, 1), (0, 2)))),
}


@pytest.mark.parametrize("name", MATMULS)
def test_operands_reach_blas_as_views(name, monkeypatch):
    left, right, numbers = MATMULS[name]
    x, y = np.ones(left, np.float32), np.ones(right, np.float32)
    seen = []

    def record(a, b, out=None):
        seen.extend([a, b])
        return np.einsum("...ij,...jk->...ik", a, b)

    monkeypatch.setattr(module.np, "matmul", record)
    dot_general_p.impl(x, y, dimension_numbers=numbers, precision=None, preferred_element_type=None)
    a, b = seen
    assert np.shares_memory(a, x) and np.shares_memory(b, y)


@pytest.mark.parametrize(
    "shape, strides, is_ready",
    [
        ((3, 4), (16, 4), True),
        ((3, 4), (4, 12), True),
        ((3, 4), (64, 4), True),
        ((3, 4), (8, 24), False),  # neither axis is contiguous
        ((3, 4), (0, 4), False),  # broadcast rows
        ((3, 1), (8, 4), True),
        ((1, 4), (4, 8), True),  # one column of the transposed matrix, rows two apart
        ((3, 4), (-16, 4), False),
    ],
)
def test_what_blas_can_read(shape, strides, is_ready):
    a = np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32)[500:], shape, strides)
    ready = module._for_blas(a)
    assert (ready is a) == is_ready
    assert is_ready or ready.flags.c_contiguous


def test_gradients_of_a_projection_need_no_transposition():
    numbers = (((2,), (0,)), ((), ()))
    x, w, g = np.ones((2, 3, 4), np.float32), np.ones((4, 5), np.float32), np.ones((2, 3, 5), np.float32)
    text = str(make_jaxpr(lambda x, w, g: vjp(lambda x, w: dot_general(x, w, numbers), x, w)[1](g))(x, w, g))
    assert text.count("dot_general") == 3 and "transpose" not in text


def test_a_batched_operand_is_folded_into_the_product():
    x, w = np.ones((7, 2, 4), np.float32), np.ones((4, 5), np.float32)
    text = str(make_jaxpr(vmap(lambda x: dot(x, w)))(x))
    assert text.count("dot_general") == 1 and "broadcast" not in text and "transpose" not in text
    text = str(make_jaxpr(vmap(lambda x: dot(w.T, x), in_axes=2, out_axes=2))(np.ones((4, 2, 7), np.float32)))
    assert text.count("dot_general") == 1 and "broadcast" not in text and "transpose" not in text


def test_second_derivatives():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 3)).astype(np.float32)
    v, u = (rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    cube = lambda a: dot(dot(a, a), a)
    first = lambda a: jvp(cube, (a,), (v,))[1]
    got = jvp(first, (x,), (u,))[1]
    orders = [x, u, v]
    want = sum(a @ b @ c for a, b, c in itertools.permutations(orders))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jit(lambda a: jvp(first, (a,), (u,))[1])(x), got, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_half_precision_is_summed_in_float32(dtype):
    ones = np.ones(5000, dtype)
    as_float = lambda x: np.asarray(x).astype(np.float64)
    one = np.ones(5000, np.float32)
    got = dot_general(ones, one.astype(dtype), (((0,), (0,)), ((), ())), preferred_element_type="float32")
    assert got.dtype == np.float32 and float(as_float(got)) == 5000
    if dtype != ml_dtypes.float8_e4m3fn:
        assert (
            abs(float(as_float(dot(ones, ones))) - 5000) <= 8
        )  # a sum in this dtype would stop at 2048 or 256


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int16])
def test_integers_wrap(dtype):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    x = rng.integers(info.min, info.max, (4, 300), dtype=dtype, endpoint=True)
    y = rng.integers(info.min, info.max, (300, 5), dtype=dtype, endpoint=True)
    want = (x.astype(object) @ y.astype(object)) % 2 ** (8 * x.itemsize)
    got = np.asarray(dot(x, y))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(object) % 2 ** (8 * x.itemsize), want)


def test_preferred_element_type():
    x = np.array([[100, 100]], np.int8)
    assert np.asarray(dot(x, x.T, preferred_element_type="int32")).tolist() == [[20000]]
    h = np.ones((2, 3), ml_dtypes.bfloat16)
    out, pull = vjp(lambda a, b: dot(a, b, preferred_element_type="float32"), h, h.T)
    assert out.dtype == np.float32
    dx, dy = pull(np.full((2, 2), 1 + 2**-12, np.float32))
    assert dx.dtype == dy.dtype == dtypes.bfloat16 and dx.shape == (2, 3) and dy.shape == (3, 2)
    e5 = np.full((3, 2), 2, ml_dtypes.float8_e5m2)
    mixed = dot(np.ones((2, 3), ml_dtypes.float8_e4m3fn), e5, preferred_element_type="float32")
    np.testing.assert_array_equal(mixed, np.full((2, 2), 6))


def test_booleans():
    x = np.array([[True, False], [False, False]])
    np.testing.assert_array_equal(dot(x, x), x)


@pytest.mark.parametrize("x, y", [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0))])
def test_empty(x, y):
    np.testing.assert_array_equal(
        dot(np.ones(x, np.float32), np.ones(y, np.float32)), np.ones(x) @ np.ones(y)
    )


def f32(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (
            lambda: dot(f32(2, 3), f32(2, 3)),
            errors.ShapeError,
            r"axis 1 of f32\[2,3\] \(size 3\) with axis 0",
        ),
        (lambda: dot(f32(2, 3, 4), f32(4)), errors.ShapeError, "rank 1 or 2"),
        (lambda: dot_general(f32(2), f32(2), (((1,), (0,)), ((), ()))), errors.ShapeError, "of the lhs"),
        (lambda: dot_general(f32(2), f32(2), (((0,), (0,)), ((0,), (0,)))), errors.ShapeError, "distinct"),
        (lambda: dot_general(f32(2), f32(2), (((0,), ()), ((), ()))), errors.ShapeError, "contracts 1 axes"),
        (
            lambda: dot_general(f32(2, 3), f32(4, 3), (((1,), (1,)), ((0,), (0,)))),
            errors.ShapeError,
            "batches axis 0",
        ),
        (lambda: dot(f32(2), np.ones(2, np.int32)), errors.DtypeError, "one dtype, not f32 and i32"),
        (lambda: dot(f32(2), f32(2), preferred_element_type="int32"), errors.DtypeError, "cannot give i32"),
        (lambda: dot(f32(2), f32(2), precision="most"), errors.ArgumentError, "not a precision"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match) as raised:
        call()
    if "rank" not in match:
        assert "test_dot.py" in raised.value.where


def test_precision_is_kept():
    for precision in ("highest", ("high", "default")):
        assert "precision=" in str(make_jaxpr(lambda x, p=precision: add(dot(x, x, p), 1))(f32(2)))


@pytest.mark.peer
@pytest.mark.parametrize("name", MATMULS)
def test_as_jax(name):
    import jax

    left, right, numbers = MATMULS[name]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=left).astype(np.float32), rng.normal(size=right).astype(np.float32)
    np.testing.assert_allclose(
        dot_general(x, y, numbers), jax.lax.dot_general(x, y, numbers), rtol=1e-4, atol=1e-5
    )
