"""Shapes, dtypes and error classes for which NumPy's conventions are exact."""

import warnings

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, nn, random
from blufunc.transforms.staging.jit import jit

A, B, M, C = np.arange(2), np.arange(2) + 5, np.arange(4).reshape(2, 2), np.arange(8).reshape(2, 2, 2)

DIRECTIVES = [
    None, "0", "1", "-1", "0,2", "1,2", "-1,2", "0,2,0", "0,2,1", "0,2,-1", "1,2,0", "0,3", "0,3,0", "0,3,1", "0,3,2",
    "1,3,0", "1,3,1", "-1,3,0", "0,3,-1", "r", "c",
]  # fmt: skip
JOINED = [
    (A, B),
    (M, M),
    (slice(0, 2), B),
    (A, 1, 2),
    (1, 2, 3),
    (A, slice(0, 1, 3j), B),
    (C, C),
    (C, M),
    (M, A),
]


@pytest.mark.parametrize("directive", DIRECTIVES)
@pytest.mark.parametrize("name", ["r_", "c_"])
def test_joins(name, directive):
    """The shape and the values of NumPy, and an error where NumPy has one."""
    for entries in JOINED:
        if directive in ("r", "c") and C in [e for e in entries if e is C]:
            continue  # NumPy makes matrices, which have two axes
        key = entries if directive is None else (directive, *entries)
        ours = tuple(bnp.asarray(e) if isinstance(e, np.ndarray) else e for e in key)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PendingDeprecationWarning)  # of np.matrix
                want = np.asarray(getattr(np, name)[key])
        except (ValueError, IndexError):
            with pytest.raises(errors.BlufuncError):
                getattr(bnp, name)[ours]
            continue
        for got in (getattr(bnp, name)[ours], jit(lambda ours=ours: getattr(bnp, name)[ours])()):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want)


def test_no_differences():
    for kwargs in ({}, {"prepend": 1}, {"append": 2}, {"prepend": 1, "append": 2}):
        assert (
            bnp.diff(bnp.arange(3), n=0, **kwargs).tolist() == np.diff(np.arange(3), n=0, **kwargs).tolist()
        )


def test_bincount_length():
    x = bnp.asarray([1, 2, 30])
    assert bnp.bincount(x, length=8, minlength=20).tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert jit(lambda x: bnp.bincount(x, length=8, minlength=20))(x).shape == (8,)
    assert bnp.bincount(x[:2], minlength=20).shape == (20,)


@pytest.mark.parametrize(
    "subscripts", ["ij->i", "ij->", "ii->i", "ii", "ij->ji", "ij,jk", "ij,ij->", "ij,jk,kl->l"]
)
def test_einsum_of_booleans(subscripts):
    x = np.array([[True, False], [False, False]])
    operands = [x] * (subscripts.split("->")[0].count(",") + 1)
    want = np.einsum(subscripts, *operands)
    for f in (bnp.einsum, jit(bnp.einsum, static_argnums=0)):
        np.testing.assert_array_equal(f(subscripts, *[bnp.asarray(x) for x in operands]), want, strict=True)


def test_counts_of_booleans():
    x = bnp.ones((2, 2), bool)
    assert bnp.matmul(x, x, preferred_element_type="int32").tolist() == [[2, 2], [2, 2]]
    assert bnp.einsum("ij,ij->", x, x, preferred_element_type="float32") == 4.0
    assert bnp.matmul(x, x).dtype == bool


@pytest.mark.parametrize(
    "a, b", [("int8", "int32"), ("int32", "float32"), ("float32", "int8"), ("bool", "int32")]
)
@pytest.mark.parametrize("assume_unique", [False, True])
def test_setdiff1d_dtype(a, b, assume_unique):
    x, y = np.array([1, 0], a), np.array([0, 100], b)
    want = np.setdiff1d(x, y, assume_unique)
    np.testing.assert_array_equal(bnp.setdiff1d(x, y, assume_unique), want, strict=True)
    with_size = jit(lambda x, y: bnp.setdiff1d(x, y, assume_unique, size=2, fill_value=0))(x, y)
    assert with_size.dtype == a and with_size.tolist() == [1, 0]


def test_unravel_index_dtype():
    """int32 like all positions, of indices of any width."""
    for dtype in ("int8", "uint8", "int16", "int32"):
        rows, columns = bnp.unravel_index(bnp.asarray([100, 7], dtype), (2, 300))
        assert rows.dtype == columns.dtype == "int32" and columns.tolist() == [100, 7]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex128", "bfloat16"])
def test_finfo(dtype):
    info = bnp.finfo(dtype)
    for name in ("bits", "iexp", "maxexp", "minexp", "nmant", "precision"):
        assert type(getattr(info, name)) is int
    for name in ("eps", "max", "min", "tiny", "smallest_normal", "smallest_subnormal"):
        assert type(getattr(info, name)) is float


@pytest.mark.parametrize(
    "f",
    [
        lambda x: bnp.sum(x, axis=2), lambda x: bnp.max(x, axis=(0, -3)), lambda x: bnp.argmax(x, 2),
        lambda x: bnp.concatenate([x, x], 2), lambda x: bnp.stack([x, x], 4), lambda x: bnp.expand_dims(x, 4),
        lambda x: bnp.squeeze(x, 2), lambda x: bnp.flip(x, 2), lambda x: bnp.sort(x, 2), lambda x: bnp.take(x, 0, 2),
        lambda x: bnp.moveaxis(x, 2, 0), lambda x: bnp.cumsum(x, 2), lambda x: bnp.roll(x, 1, 2),
        lambda x: bnp.repeat(x, 2, 2), lambda x: bnp.split(x, 1, 2), lambda x: bnp.diff(x, axis=2),
        lambda x: bnp.linalg.norm(x, axis=2), lambda x: bnp.fft.fft(x, axis=2), lambda x: nn.softmax(x, 2),
        lambda x: lax.rev(x, (2,)), lambda x: lax.sort(x, 2), lambda x: random.permutation(random.key(0), x, 2),
        lambda x: bnp.swapaxes(x, 0, 2), lambda x: bnp.unstack(x, axis=2),
    ],
)  # fmt: skip
def test_axis_out_of_range(f):
    """Both a ``ValueError``, as in JAX, and an ``IndexError``, as in the standard."""
    for g in (f, jit(f)):
        with pytest.raises(errors.AxisRangeError, match="axis") as raised:
            g(bnp.ones((2, 2)))
        assert isinstance(raised.value, ValueError) and isinstance(raised.value, IndexError)


def test_keys_compare_by_their_words():
    keys = random.split(random.key(0), 3)
    assert bnp.equal(keys, keys).tolist() == [True] * 3 and bool(bnp.array_equal(keys, keys))
    assert bnp.not_equal(keys[0], keys).tolist() == [False, True, True]
    assert not bnp.allclose(keys[0], keys[1]) and bnp.result_type(keys, keys[0]) == keys.dtype
    assert jit(bnp.equal)(keys, keys[1]).tolist() == [False, True, False]


def test_arrays_as_shapes_and_axes():
    x = bnp.ones((2, 3, 4))
    assert bnp.reshape(x, bnp.array([-1, 3])).shape == (8, 3)
    assert bnp.moveaxis(x, bnp.arange(2), np.arange(1, 3)).shape == (4, 2, 3)
    assert bnp.sum(x, bnp.array([0, 2])).shape == (3,)


def test_dtype_of_a_dtype():
    assert (
        lax.dtype(np.dtype("int16")) == np.int16
        and lax.dtype(np.float32) == lax.dtype("float32") == np.float32
    )


def test_einsum_sums_an_ellipsis_that_the_result_lacks():
    x = np.arange(24.0, dtype="float32").reshape(2, 3, 4)
    assert bnp.einsum("a...->a", x).tolist() == x.sum((1, 2)).tolist()
    assert bnp.einsum("a...d,e...->ade", x, np.ones((2, 3), "float32")).shape == (2, 4, 2)
