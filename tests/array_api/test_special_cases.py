"""Special values of elementwise functions, case by case, in both precisions."""

import itertools
import math
import operator

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.config import config
from blufunc.transforms.staging.jit import jit
from tests.array_api.special_cases import COMPLEX, REAL, assert_parts, cases, rows_of, same, wanted

REAL_CASES = [pytest.param(*c, id=f"{c[0]}-{'-'.join(c[1])}") for c in cases(REAL)]
COMPLEX_CASES = [pytest.param(*c, id=f"{c[0]}-{'-'.join(c[1])}") for c in cases(COMPLEX)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name, left, right", REAL_CASES)
def test_real(name, left, right, dtype):
    rows = rows_of(left)
    columns = [bnp.asarray(np.array(c), dtype=dtype) for c in zip(*rows)]
    f = getattr(bnp, name)
    for out in (f(*columns), jit(f)(*columns)):
        assert out.dtype == dtype
        for row, got in zip(rows, np.asarray(out, np.float64).tolist()):
            allowed = list(wanted(right[0], row))
            assert any(same(got, w) for w in allowed), (name, row, got, allowed)


OPERATORS = {
    "add": operator.add, "divide": operator.truediv, "floor_divide": operator.floordiv, "multiply": operator.mul,
    "pow": operator.pow, "remainder": operator.mod, "subtract": operator.sub,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_a_number(name, dtype):
    """Each operand as a Python number, of which NumPy has paths of its own."""
    f = OPERATORS[name]
    for left, right in [(left, right) for n, left, right in cases(REAL) if n == name]:
        for row in rows_of(left):
            x, y = (bnp.asarray(v, dtype=dtype) for v in row)
            assert_parts(name, [row, row], right, [float(f(x, row[1])), float(f(row[0], y))])


def column_of(rows, dtype):
    return bnp.asarray(np.array([complex(*row) for row in rows]), dtype=dtype)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name, left, right", COMPLEX_CASES)
def test_complex(name, left, right, dtype):
    rows = rows_of(left)
    assert_parts(name, rows, right, getattr(bnp, name)(column_of(rows, dtype)))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_in_a_kernel(dtype, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    table = list(cases(COMPLEX))
    columns = [column_of(rows_of(left), dtype) for _, left, _ in table]
    results = jit(lambda xs: [getattr(bnp, name)(x) for (name, *_), x in zip(table, xs, strict=True)])(
        columns
    )
    for (name, left, right), out in zip(table, results, strict=True):
        assert_parts(name, rows_of(left), right, out)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reductions(dtype):
    empty, nan = bnp.zeros((0,), dtype), bnp.asarray(np.array([1.0, math.nan]), dtype=dtype)
    assert float(bnp.sum(empty)) == 0 and float(bnp.prod(empty)) == 1
    assert not bool(bnp.any(empty)) and bool(bnp.all(empty))
    assert math.isnan(float(bnp.mean(empty)))
    for f in (bnp.sum, bnp.prod, bnp.mean, bnp.var, bnp.std, bnp.max, bnp.min):
        assert math.isnan(float(f(nan)))
    assert bool(bnp.any(nan)) and bool(bnp.all(nan))
    assert math.isnan(float(bnp.var(bnp.ones(1, dtype), correction=1)))


def test_integers_divide_towards_minus_infinity():
    for x, y in itertools.product((-7, -1, 0, 7), (-3, 2)):
        a, b = bnp.asarray(x, dtype="int64"), bnp.asarray(y, dtype="int64")
        assert int(a // b) == x // y and int(a % b) == x % y


def test_every_function_with_special_cases_is_there():
    assert len(REAL_CASES) > 200 and len(COMPLEX_CASES) > 60
    assert all(callable(getattr(bnp, name)) for name, *_ in [*cases(REAL), *cases(COMPLEX)])
