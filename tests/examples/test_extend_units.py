"""The example of units: results have units, and errors name the user's line."""

from fractions import Fraction

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, testing
from examples.extend import units
from examples.extend.units import Quantity, Unit, UnitError, checked, kg, m, one, s
from tests.transforms.common import arr

X, T = arr([3.0, 4.0]), arr([1.0, 2.0])


def test_units():
    assert m / s * s == m and m**2 / m == m and m**0 == one and (m * m) ** Fraction(1, 2) == m
    assert str(kg * m / s**2) == "kg m s^-2" and str(one) == "1"
    assert hash(m * s) == hash(s * m)


RESULTS = {
    "product": (lambda x, t: x * t, m * s),
    "quotient": (lambda x, t: x / t, m / s),
    "inverse": (lambda x, t: 1 / t, s**-1),
    "sum": (lambda x, t: x + 2 * x - x / 2, m),
    "with zero": (lambda x, t: bnp.maximum(x, 0) + 0.0, m),
    "root": (lambda x, t: bnp.sqrt(x * x * t), m * s ** Fraction(1, 2)),
    "power": (lambda x, t: x**3, m**3),
    "rsqrt": (lambda x, t: lax.rsqrt(x), m ** Fraction(-1, 2)),
    "pure function": (lambda x, t: bnp.exp(x / (2 * x)), one),
    "moved": (lambda x, t: bnp.concatenate([x[::-1], x[:1]]).sum(), m),
    "matrix product": (lambda x, t: x @ t, m * s),
    "choice": (lambda x, t: bnp.where(x > 2 * x, x, -x), m),
    "indexing": (lambda x, t: x[bnp.argmax(t)], m),
    "derivative": (lambda x, t: bf.grad(lambda v: (v * v * t).sum())(x), m * s),
    "tangent": (lambda x, t: bf.jvp(bnp.square, (x,), (t,))[1], m * s),
    "second derivative": (lambda x, t: bf.grad(lambda v: bf.grad(lambda w: w**3)(v))(x[0]), m),
    "loop": (lambda x, t: lax.fori_loop(0, 3, lambda i, c: c + x * i, x), m),
    "branch": (lambda x, t: lax.cond(True, lambda a: a, lambda a: 2 * a, x), m),
    "mapped": (lambda x, t: bf.vmap(lambda a, b: a / b)(x, t), m / s),
}


@pytest.mark.parametrize("f, unit", RESULTS.values(), ids=RESULTS)
def test_results_have_the_right_unit_and_value(f, unit):
    for g in (checked(f), bf.jit(checked(f)), checked(bf.jit(f)), checked(bf.checkpoint(f))):
        got = g(Quantity(X, m), Quantity(T, s))
        assert isinstance(got, Quantity) and got.unit == unit
        np.testing.assert_allclose(got.value, f(X, T), rtol=1e-12)


MISTAKES = {
    "sum": (lambda x, t: x + t, r"add of \[m\] and \[s\]"),
    "with a number": (lambda x, t: x + 1, r"add of \[m\] and \[1\]"),
    "comparison": (lambda x, t: x < t, r"lt of \[m\] and \[s\]"),
    "choice": (lambda x, t: bnp.where(X > 2, x, t), r"select of \[m\] and \[s\]"),
    "exp": (lambda x, t: bnp.exp(x), r"exp of \[m\]"),
    "in jit": (lambda x, t: bf.jit(lambda a: a + t)(x), r"add of \[m\] and \[s\]"),
    "in a loop": (lambda x, t: lax.scan(lambda c, _: (c, c + t), x, None, length=2), r"add of \[m\]"),
    "in a branch": (lambda x, t: lax.cond(True, lambda a: a, lambda a: a + t, x), r"add of \[m\]"),
    "in a gradient": (lambda x, t: bf.grad(lambda v: (bnp.sin(v) * t).sum())(x), r"sin of \[m\]"),
}


@pytest.mark.parametrize("f, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_errors_at_the_line(f, message):
    line = f.__code__.co_firstlineno
    for g in (checked(f), bf.jit(checked(f))):
        with pytest.raises(UnitError, match=message) as info:
            g(Quantity(X, m), Quantity(T, s))
        assert f"test_extend_units.py:{line} " in str(info.value)


def test_a_loop_cannot_change_the_unit_of_its_carry():
    f = lambda x, t: lax.fori_loop(0, 3, lambda i, c: c * t, x)
    with pytest.raises(errors.CarryError, match="changes the box of its carry"):
        checked(f)(Quantity(X, m), Quantity(T, s))
    g = lambda x, t: lax.cond(True, lambda: x, lambda: t)
    with pytest.raises(errors.BranchError, match="have boxes that differ"):
        checked(g)(Quantity(X, m), Quantity(T, s))


def test_composition():
    f = lambda x, t: x * bnp.sin(t / (2 * t)) / t
    assert not testing.check_transform(checked, f, (Quantity(X, m), Quantity(T, s))).unsupported


def test_the_orbit_closes():
    (x, v), energy = bf.jit(checked(lambda **a: units.orbit(**a, steps=365)))(**units.EARTH)
    assert x.unit == units.au and v.unit == units.au / units.yr
    np.testing.assert_allclose(x.value, [1, 0], atol=2e-3)
    assert energy.unit == kg * units.au**2 / units.yr**2
    assert np.ptp(np.asarray(energy.value)) < 1e-5 * abs(float(energy.value[0]))


def test_main(capsys):
    units.main()
    printed = capsys.readouterr().out
    assert "9.0 kg m^2 s^-2" in printed and "return speed + t" in printed


def test_units_are_static():
    """The unit costs nothing at run time, and another unit is another program."""
    f = bf.jit(checked(lambda x: x * x))
    assert f(Quantity(X, m)).unit == m**2 and f(Quantity(X, Unit())).unit == one
