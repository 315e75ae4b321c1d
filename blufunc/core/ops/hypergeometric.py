"""Rarer special functions: hypergeometric ones, Bessel J, integrals of sines.

Core operations, elementwise, above ``special``. SciPy defines them, so a GPU computes them on the host. Derivatives
follow the NIST Digital Library of Mathematical Functions (chapters 5 to 7, 10, 13 and 15); that of Owen's T is in D. B.
Owen, "Tables for computing bivariate normal probabilities" (1956). Derivatives of hypergeometric functions in their
parameters are series of their own, after transformations to arguments where these converge fast.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.ir import source
from blufunc.core.ops.elementwise import (
    add,
    binary,
    cos,
    div,
    eq,
    erf,
    exp,
    mul,
    neg,
    ones_of,
    select,
    sin,
    square,
    sub,
    unary_function,
)
from blufunc.core.ops.numerics import through_single
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.primitive import unsupported

with _lazy.modules(globals()):
    import scipy.special

_ON_HOST = "SciPy defines it, and computes it on the host"


def _special(name: str, impl: Any, derivs: list, types: str = "float") -> Elementwise:
    return Elementwise(name, through_single(impl), types, derivs, lower=unsupported(_ON_HOST), cost=1)


def _no_derivative(name: str, argument: str) -> Any:
    def refuse(t: Any, ans: Any, *xs: Any) -> Any:
        raise errors.GradError(
            f"{name} has no derivative in {argument}.",
            where=source.here(),
            why="it has no closed form in terms of implemented functions.",
            fix=f"hold it constant: lax.stop_gradient({argument})",
        )

    return refuse


# -- Fresnel, sine and cosine integrals, Owen's T, Bessel J ------------------------------------------


def _quarter_turns(x: Any) -> Any:
    return mul(square(x), math.pi / 2)


def _sine_over(t: Any, ans: Any, x: Any) -> Any:
    at_zero = eq(x, 0)
    safe = select(at_zero, ones_of(x), x)
    return mul(t, select(at_zero, ones_of(x), div(sin(safe), safe)))


fresnel_s_p = _special(
    "fresnel_s", lambda x: scipy.special.fresnel(x)[0], [lambda t, ans, x: mul(t, sin(_quarter_turns(x)))]
)
fresnel_c_p = _special(
    "fresnel_c", lambda x: scipy.special.fresnel(x)[1], [lambda t, ans, x: mul(t, cos(_quarter_turns(x)))]
)
sine_integral_p = _special("sine_integral", lambda x: scipy.special.sici(x)[0], [_sine_over])
cosine_integral_p = _special(
    "cosine_integral",
    lambda x: scipy.special.sici(np.abs(x))[
        1
    ],  # that of the absolute value, as in JAX: SciPy has NaN below 0
    [lambda t, ans, x: mul(t, div(cos(x), x))],
)
owens_t_p = _special(
    "owens_t",
    lambda h, a: scipy.special.owens_t(h, a),
    [
        lambda t, ans, h, a: mul(
            t,
            mul(
                mul(exp(mul(square(h), -0.5)), erf(mul(mul(a, h), math.sqrt(0.5)))),
                -0.5 / math.sqrt(2 * math.pi),
            ),
        ),
        lambda t, ans, h, a: mul(
            t,
            div(exp(mul(mul(square(h), add(square(a), 1)), -0.5)), mul(add(square(a), 1), 2 * math.pi)),
        ),
    ],
)
bessel_jv_p = _special(
    "bessel_jv",
    lambda v, z: scipy.special.jv(v, z),
    [
        _no_derivative("bessel_jv", "v"),
        lambda t, ans, v, z: mul(t, mul(sub(bessel_jv(sub(v, 1), z), bessel_jv(add(v, 1), z)), 0.5)),
    ],
)

# -- of complex numbers ------------------------------------------------------------------------------

faddeeva_p = _special(
    "faddeeva",
    lambda z: scipy.special.wofz(z),
    [lambda t, ans, z: mul(t, add(mul(mul(z, ans), -2), 2j / math.sqrt(math.pi)))],
    "complex",
)
complex_digamma_p = _special(
    "complex_digamma",
    lambda z: scipy.special.digamma(z),
    [_no_derivative("the derivative of loggamma of complex numbers", "x")],
    "complex",
)
complex_lgamma_p = _special(
    "complex_lgamma",
    lambda z: scipy.special.loggamma(z),
    [lambda t, ans, z: mul(t, complex_digamma_p.bind(z))],
    "complex",
)

# -- 1F1 and 2F1 -------------------------------------------------------------------------------------

_TERMS = 20_000
"""Terms of a series at most; without convergence (2F1 above 0.998) it is NaN."""


def _parameter_slopes(upper: list, lower: list, x: Any) -> list:
    """The derivatives of a hypergeometric series in each of its parameters.

    Term k is a product of ``(p + j) / (q + j)``, j < k, whose logarithm has the derivative ``sum 1 / (p + j)``. Where a
    factor ``p + j`` is 0, its logarithmic derivative is that of the product without it.
    """
    parameters = [np.asarray(p, np.float64) for p in (*upper, *lower)]
    *parameters, x = np.broadcast_arrays(*parameters, np.asarray(x, np.float64))
    n = len(upper)
    # the term, and its derivative in each parameter
    term = np.ones(x.shape)
    slopes = [np.zeros(x.shape) for _ in parameters]
    totals = [np.zeros(x.shape) for _ in parameters]
    done = np.zeros(x.shape, bool)
    with np.errstate(all="ignore"):
        for k in range(_TERMS):
            factors = [p + k for p in parameters]
            whole = np.prod(factors[:n], axis=0) / np.prod(factors[n:], axis=0) * x / (k + 1)
            for i, f in enumerate(factors):
                others = [g for j, g in enumerate(factors[:n]) if j != i]
                by = np.prod([np.ones(x.shape), *others], axis=0) / np.prod(factors[n:], axis=0) * x / (k + 1)
                own = by if i < n else -whole / f
                slopes[i] = slopes[i] * whole + term * own
                totals[i] = totals[i] + slopes[i]
            term = term * whole
            small = [np.abs(s) <= 1e-17 * np.abs(total) for s, total in zip(slopes, totals, strict=True)]
            ended = (k > 2) & np.all(small, axis=0) & (np.abs(whole) < 1)
            done = done | ended | ~np.isfinite(term)
            if done.all():
                break
    return [np.where(done, total, np.nan) for total in totals]


def _hyp1f1_slopes(a: Any, b: Any, x: Any) -> tuple:
    """The derivatives in a and b; for x < 0 by Kummer's transformation (DLMF 13.2.39)."""
    a, b, x = (np.asarray(v, np.float64) for v in np.broadcast_arrays(a, b, x))
    flipped = x < 0
    da, db = _parameter_slopes([np.where(flipped, b - a, a)], [b], np.abs(x))
    scale = np.exp(np.where(flipped, x, 0))
    return np.where(flipped, -scale * da, da), np.where(flipped, scale * (da + db), db)


def _hyp2f1_slopes(a: Any, b: Any, c: Any, x: Any) -> tuple:
    """Derivatives in a, b and c; for x < 0 by Pfaff's transformation (DLMF 15.8.1)."""
    a, b, c, x = (np.asarray(v, np.float64) for v in np.broadcast_arrays(a, b, c, x))
    flipped = x < 0
    with np.errstate(all="ignore"):
        z = np.where(flipped, x / (x - 1), x)
        z = np.where(z < 1, z, np.nan)
        second = np.where(flipped, c - b, b)
        da, db, dc = _parameter_slopes([a, second], [c], z)
        base = np.where(flipped, 1 - x, 1.0)
        scale = base**-a
        value = scipy.special.hyp2f1(a, second, c, z)
        da = scale * (da - np.log(base) * value)
        return da, np.where(flipped, -scale * db, db), np.where(flipped, scale * (dc + db), dc)


def _slope(name: str, slopes: Any, i: int) -> Elementwise:
    """The primitive of a derivative in parameter i, differentiable in x alone."""
    impl = lambda *xs: slopes(*xs)[i].astype(np.result_type(*[x.dtype for x in xs]))
    parameters = "ab" if name == "hyp1f1" else "abc"
    refused = [_no_derivative(f"{name}, differentiated in a parameter,", p) for p in parameters]

    def deriv(t, ans, *xs):
        # d/dx F = ab/c F(+), with all parameters increased by 1, and the factor depends on them
        *ps, x = xs
        factor, own = _factor(ps), _factor(ps, without=i)
        following = [add(p, 1) for p in ps]
        return mul(
            t, add(mul(own, _FUNCTIONS[name].bind(*following, x)), mul(factor, prim.bind(*following, x)))
        )

    prim = _special(f"{name}_slope_{parameters[i]}", impl, [*refused, deriv])
    return prim


def _factor(parameters: list, without: int | None = None) -> Any:
    """``a b / c``, or its derivative in parameter ``without``."""
    *upper, low = parameters
    product = None
    for j, p in enumerate(upper):
        if j != without:
            product = p if product is None else mul(product, p)
    value = div(ones_of(low) if product is None else product, low)
    return neg(div(value, low)) if without == len(upper) else value


hyp1f1_slope_a_p, hyp1f1_slope_b_p = (_slope("hyp1f1", _hyp1f1_slopes, i) for i in range(2))
hyp2f1_slope_a_p, hyp2f1_slope_b_p, hyp2f1_slope_c_p = (_slope("hyp2f1", _hyp2f1_slopes, i) for i in range(3))

hyp1f1_p = _special(
    "hyp1f1",
    lambda a, b, x: scipy.special.hyp1f1(a, b, x),
    [
        lambda t, ans, *xs: mul(t, hyp1f1_slope_a_p.bind(*xs)),
        lambda t, ans, *xs: mul(t, hyp1f1_slope_b_p.bind(*xs)),
        lambda t, ans, a, b, x: mul(t, mul(_factor([a, b]), hyp1f1_p.bind(add(a, 1), add(b, 1), x))),
    ],
)
hyp2f1_p = _special(
    "hyp2f1",
    lambda a, b, c, x: scipy.special.hyp2f1(a, b, c, x),
    [
        lambda t, ans, *xs: mul(t, hyp2f1_slope_a_p.bind(*xs)),
        lambda t, ans, *xs: mul(t, hyp2f1_slope_b_p.bind(*xs)),
        lambda t, ans, *xs: mul(t, hyp2f1_slope_c_p.bind(*xs)),
        lambda t, ans, a, b, c, x: mul(
            t, mul(_factor([a, b, c]), hyp2f1_p.bind(add(a, 1), add(b, 1), add(c, 1), x))
        ),
    ],
)

_FUNCTIONS = {"hyp1f1": hyp1f1_p, "hyp2f1": hyp2f1_p}

# -- functions ---------------------------------------------------------------------------------------

fresnel_s = unary_function(fresnel_s_p, "The integral of ``sin(pi t^2 / 2)`` from 0.")
fresnel_c = unary_function(fresnel_c_p, "The integral of ``cos(pi t^2 / 2)`` from 0.")
sine_integral = unary_function(sine_integral_p, "The integral of ``sin(t) / t`` from 0.")
cosine_integral = unary_function(cosine_integral_p, "Minus the integral of ``cos(t) / t`` from abs(x).")


def bessel_jv(v: Any, z: Any) -> Any:
    """The Bessel function of the first kind of order v, differentiable in z."""
    return binary(bessel_jv_p, v, z)
