"""Special values of elementwise functions, case by case, in both precisions."""

import itertools
import math

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.transforms.staging.jit import jit
from tests.array_api.special_cases import CLASSES, COMPLEX, REAL, cases, number, values


def same(got, want):
    """Equal to rounding, with the same sign."""
    if math.isnan(want):
        return math.isnan(got)
    if want == 0 or math.isinf(want):
        return got == want and math.copysign(1, got) == math.copysign(1, want)
    return math.isclose(got, want, rel_tol=1e-6)


def wanted(token, operands):
    """The results that a token allows."""
    for t in token.split("|"):
        if t in ("x1", "x2"):
            yield operands[int(t[1]) - 1]
        elif t in CLASSES:
            yield from CLASSES[t]
        else:
            yield number(t)


REAL_CASES = [pytest.param(*c, id=f"{c[0]}-{'-'.join(c[1])}") for c in cases(REAL)]
COMPLEX_CASES = [pytest.param(*c, id=f"{c[0]}-{'-'.join(c[1])}") for c in cases(COMPLEX)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name, left, right", REAL_CASES)
def test_real(name, left, right, dtype):
    rows = list(itertools.product(*map(values, left)))
    columns = [bnp.asarray(np.array(c), dtype=dtype) for c in zip(*rows)]
    f = getattr(bnp, name)
    for out in (f(*columns), jit(f)(*columns)):
        assert out.dtype == dtype
        for row, got in zip(rows, np.asarray(out, np.float64).tolist()):
            allowed = list(wanted(right[0], row))
            assert any(same(got, w) for w in allowed), (name, row, got, allowed)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name, left, right", COMPLEX_CASES)
def test_complex(name, left, right, dtype):
    rows = list(itertools.product(*map(values, left)))
    column = bnp.asarray(np.array([complex(*row) for row in rows]), dtype=dtype)
    out = np.asarray(getattr(bnp, name)(column)).astype(np.complex128 if len(right) == 2 else np.float64)
    for row, got in zip(rows, out.tolist()):
        parts = (got.real, got.imag) if len(right) == 2 else (got,)
        for part, token in zip(parts, right):
            assert any(same(part, w) for w in wanted(token, row)), (name, row, got, right)


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
