"""Factorizations by cuSOLVER and cuBLAS on a device: one by one, and in batches."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.kernels.backends.cuda.library.linalg import large, small
from tests.kernels.backends.cuda.library.test_small_matrices import (
    DTYPES,
    bind,
    check,
    cholesky,
    definite,
    random,
)
from tests.kernels.backends.cuda.test_program import on

ROWS = small.MOST_ROWS + 1
CASES = {
    "cholesky": (cholesky, definite(2, ROWS, ROWS)),
    "cholesky of one": (cholesky, definite(2 * ROWS, 2 * ROWS)),
    "cholesky of several, one by one": (cholesky, definite(2, 2 * ROWS, 2 * ROWS)),
    "lu": (lax.linalg.lu, random(5, ROWS, ROWS)),
    "lu of several, one by one": (lax.linalg.lu, random(9, 3 * ROWS, 3 * ROWS)),
    "lu of one": (lax.linalg.lu, random(2 * ROWS, 2 * ROWS)),
    "lu, tall": (lax.linalg.lu, random(2, ROWS, 40)),
    "lu, wide": (lax.linalg.lu, random(2, 40, ROWS)),
}


def run(fun, x):
    """The only equation of a function, and its results on a device."""
    jaxpr = bf.make_jaxpr(fun)(bf.ShapeDtypeStruct(x.shape, x.dtype))
    (eqn,) = getattr(jaxpr, "jaxpr", jaxpr).eqns
    assert small.small(eqn) is None
    got = bf.jit(bind(eqn))(*on(bf.devices("cuda")[0], x))
    return eqn, [np.asarray(r) for r in (got if eqn.prim.multiple_results else [got])]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_factorizations(name, dtype):
    fun, x = CASES[name]
    x = np.asarray(x if dtype[0] == "c" else x.real, dtype)
    eqn, got = run(fun, x)
    if eqn.prim.multiple_results:
        check_lu(x, *got)
    else:
        check(eqn, [x], got, [eqn.prim.impl(x)])


def check_lu(x, packed, pivots, permutation):
    """The product of the factors: libraries choose complex pivots by another norm."""
    k = pivots.shape[-1]
    low = np.tril(packed[..., :k], -1) + np.eye(x.shape[-2], k, dtype=x.dtype)
    rows = np.take_along_axis(x, permutation[..., None], -2)
    size = np.abs(x).max() * np.finfo(x.dtype).eps * 50 * k
    np.testing.assert_allclose(low @ np.triu(packed[..., :k, :]), rows, atol=size)
    assert np.abs(low).max() < 1.5
    order = lax.linalg.lu_pivots_to_permutation(bnp.asarray(pivots), x.shape[-2])
    np.testing.assert_array_equal(order, permutation)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 3])
def test_matrices_without_a_factor_are_nan(number):
    x = np.stack([definite(ROWS, ROWS).real] * (number + 2)).astype(np.float32)
    x[1, 5, 5] = -1
    x[-1, 7, 2] = np.nan
    x = x[1:2] if number == 1 else x
    _, (got,) = run(cholesky, x)
    bad = [True] if number == 1 else [False, True, False, False, True]
    np.testing.assert_array_equal(np.isnan(got), np.tril(np.ones_like(x)) * np.reshape(bad, (-1, 1, 1)))
    assert not np.triu(np.nan_to_num(got), 1).any()


@pytest.mark.gpu
def test_a_singular_matrix_ends():
    eqn, (packed, pivots, permutation) = run(lax.linalg.lu, np.ones((2, ROWS, ROWS), np.float32))
    np.testing.assert_allclose(packed[:, 0], 1)
    assert (np.sort(permutation) == np.arange(ROWS)).all()


def test_what_is_batched():
    assert large.is_batched(1000, 100)
    assert large.is_batched(4, 200)
    assert not large.is_batched(1, 100)
    assert not large.is_batched(2, 500)
    assert large.is_batched(16, 384, large.ROWS_PER_PIVOTED)
    assert not large.is_batched(16, 512, large.ROWS_PER_PIVOTED)
