"""Matmuls of rows in groups, against loops over the groups."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import errors, lax, testing

RNG = np.random.default_rng(0)
SIZES = np.array([2, 0, 3, 1], "int32")


def of(*shape):
    return RNG.normal(size=shape).astype("float32")


def numbers(contract, batch, ragged, group):
    return lax.RaggedDotDimensionNumbers((contract, batch), [ragged], group)


def rows_by_matrices(x, y, sizes):
    out, start = np.zeros((len(x), y.shape[-1]), x.dtype), 0
    for g, n in enumerate(sizes):
        out[start : start + n] = x[start : start + n] @ y[g]
        start += n
    return out


def sums_of_groups(x, y, sizes):
    ends = np.cumsum(sizes)
    return np.stack([x[e - n : e].T @ y[e - n : e] for n, e in zip(sizes, ends, strict=True)])


def test_rows():
    x, y = of(7, 3), of(4, 3, 5)
    want = rows_by_matrices(x, y, SIZES)
    for f in (lax.ragged_dot, bf.jit(lax.ragged_dot)):
        np.testing.assert_allclose(f(x, y, SIZES), want, rtol=1e-5)
    testing.check_grads(lambda x, y: lax.ragged_dot(x, y, SIZES), (x, y), order=2, modes=("fwd", "rev"))
    batch = of(2, 7, 3)
    got = bf.vmap(lax.ragged_dot, (0, None, None))(batch, y, SIZES)
    np.testing.assert_allclose(got, [rows_by_matrices(b, y, SIZES) for b in batch], rtol=1e-5)
    assert lax.ragged_dot(x, y, SIZES, preferred_element_type="float64").dtype == "float64"
    x[6] = np.nan  # after the last group
    np.testing.assert_allclose(lax.ragged_dot(x, y, SIZES)[:6], want[:6], rtol=1e-5)


def test_batches_of_rows():
    x, y, sizes = of(2, 7, 3), of(4, 2, 3, 5), np.stack([SIZES, SIZES[::-1]])
    how = numbers(([2], [2]), ([0], [1]), 1, [0])
    got = lax.ragged_dot_general(x, y, sizes, how)
    np.testing.assert_allclose(got, [rows_by_matrices(x[b], y[:, b], sizes[b]) for b in range(2)], rtol=1e-5)
    np.testing.assert_allclose(lax.ragged_dot_general(x, y, SIZES, how)[0], got[0], rtol=1e-5)


def test_sums():
    x, y = of(7, 3), of(7, 5)
    got = lax.ragged_dot_general(x, y, SIZES, numbers(([0], [0]), ([], []), 0, []))
    np.testing.assert_allclose(got, sums_of_groups(x, y, SIZES), rtol=1e-5, atol=1e-6)
    x, y, sizes = of(2, 7, 3), of(2, 7, 5), np.stack([SIZES, SIZES[::-1]])
    got = lax.ragged_dot_general(x, y, sizes, numbers(([1], [1]), ([0], [0]), 1, []))
    want = np.stack([sums_of_groups(x[b], y[b], sizes[b]) for b in range(2)], 1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_groups_of_a_batch_change_nothing():
    x, y = of(6, 2, 3), of(6, 3, 5)
    got = lax.ragged_dot_general(x, y, SIZES, numbers(([2], [1]), ([0], [0]), 0, []))
    np.testing.assert_allclose(got, x @ y, rtol=1e-5)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: lax.ragged_dot(of(7, 3), of(3, 3, 5), SIZES), errors.ShapeError),
        (lambda: lax.ragged_dot(of(7, 3), of(4, 3, 5), SIZES * 1.0), errors.ArgumentError),
        (lambda: lax.ragged_dot(of(7, 3), of(4, 3, 5), np.stack([SIZES] * 2)), errors.ShapeError),
        (lambda: lax.ragged_dot(of(7, 3), of(4, 3, 5), SIZES, group_offset=SIZES), errors.UnsupportedError),
        (
            lambda: lax.ragged_dot_general(of(7, 3), of(7, 5), SIZES, numbers(([0], [0]), ([], []), 0, [0])),
            errors.ArgumentError,
        ),
    ],
)
def test_errors(call, error):
    with pytest.raises(error, match="ragged_dot"):
        call()
