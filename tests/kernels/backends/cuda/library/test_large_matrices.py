"""Factorizations by cuSOLVER and cuBLAS on a device: one by one, and in batches."""

import numpy as np
import pytest

import blufunc as bf
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
    "lu": (lax.linalg.lu, random(3, ROWS, ROWS)),
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
    want = eqn.prim.impl(x)
    check(eqn, [x], got, want if eqn.prim.multiple_results else [want])


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 3])
def test_matrices_without_a_factor_are_nan(number):
    x = np.stack([definite(ROWS, ROWS).real] * (number + 2)).astype(np.float32)
    x[1, 5, 5] = -1
    x[-1, 7, 2] = np.nan
    eqn, (got,) = run(cholesky, x[1:2] if number == 1 else x)
    want = eqn.prim.impl(x[1:2] if number == 1 else x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert not np.triu(np.nan_to_num(got), 1).any()


@pytest.mark.gpu
def test_a_singular_matrix_ends():
    eqn, (packed, pivots, permutation) = run(lax.linalg.lu, np.ones((2, ROWS, ROWS), np.float32))
    np.testing.assert_allclose(packed[:, 0], 1)
    assert (np.sort(permutation) == np.arange(ROWS)).all()


def test_what_is_batched():
    assert large.is_batched(1000, 100)
    assert large.is_batched(2, 200)
    assert not large.is_batched(1, 100)
    assert not large.is_batched(2, 500)
    assert not large.is_batched(100, large.MOST_BATCHED + 1)
