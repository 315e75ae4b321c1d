"""Special functions: gamma, Bessel, exponential integrals, normal distribution.

Core operations, elementwise. SciPy defines most of them, ``gamma`` those that SciPy lacks. Derivatives follow
the NIST Digital Library of Mathematical Functions (chapters 5, 6, 7, 8, 10 and 25). Where a derivative has no
closed form, differentiation raises an error that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import gamma as gamma_numerics
from blufunc.core.ops.elementwise import (
    abs,
    add,
    binary,
    div,
    eq,
    exp,
    gt,
    is_finite,
    log,
    log1p,
    logical_and,
    lt,
    max,
    mul,
    neg,
    ones_of,
    operand,
    select,
    sign,
    square,
    stretched,
    sub,
    unary_function,
    zeros_of,
)
from blufunc.core.ops.numerics import through_single
from blufunc.core.primitives.c_form import call
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.primitive import unsupported

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

with _lazy.modules(globals()):
    import scipy.special

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_ROOT_TWO_PI = math.sqrt(2 * math.pi)
_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)


def _special(name: str, f: str | Callable, derivs: list, lower: Any = None, cost: int = 1) -> Elementwise:
    """A primitive; ``f`` is its definition, or a name in ``scipy.special``."""
    impl = f if callable(f) else lambda *xs: getattr(scipy.special, f)(*xs)
    lower = lower or unsupported("SciPy defines it, and computes it on the host")
    return Elementwise(name, through_single(impl), "float", derivs, lower=lower, cost=cost)


def _no_derivative(name: str, argument: str) -> Callable:
    """The error for a derivative in an argument without closed form."""

    def refuse(t: Any, ans: Any, *xs: Any) -> Any:
        raise errors.GradError(
            f"{name} has no derivative in {argument}.",
            where=source.here(),
            why="it has no closed form in terms of implemented functions.",
            fix=f"hold it constant: lax.stop_gradient({argument})",
        )

    return refuse


def _times_log(y: Any, x: Any) -> Any:
    """``y log x``, which is 0 where both are 0."""
    return mul(y, log(select(logical_and(eq(x, 0), eq(y, 0)), ones_of(x), x)))


# -- gamma, its logarithm, and the derivatives of that ---------------------------------------------


def _polygamma(m, x):
    # order 0 is digamma, which the formula with zeta excludes
    m, x = np.broadcast_arrays(m, x)
    order = np.where(m == 0, 1, m).astype(np.float64)
    factor = np.where(order % 2 == 0, -1.0, 1.0) * scipy.special.gamma(order + 1)
    value = factor * scipy.special.zeta(order + 1, x.astype(np.float64))
    return np.where(m == 0, digamma_p.impl(x), value).astype(x.dtype)


def _digamma(x):
    # NaN at all poles: the sign of the infinity depends on the side
    value = scipy.special.digamma(x)
    return np.where(x == 0, np.asarray(np.nan, value.dtype), value)


def _lgamma(x):
    value = scipy.special.gammaln(x)
    return np.where(x == -np.inf, np.asarray(np.inf, value.dtype), value)


gamma_p = _special("gamma", "gamma", [lambda t, ans, x: mul(t, mul(ans, digamma(x)))])
gammasgn_p = _special("gammasgn", "gammasgn", [None])
lgamma_p = _special("lgamma", _lgamma, [lambda t, ans, x: mul(t, digamma(x))])
digamma_p = _special("digamma", _digamma, [lambda t, ans, x: mul(t, polygamma(1, x))])
polygamma_p = _special(
    "polygamma",
    _polygamma,
    [_no_derivative("polygamma", "m"), lambda t, ans, m, x: mul(t, polygamma(add(m, 1), x))],
)
zeta_p = _special(
    "zeta",
    "zeta",
    [_no_derivative("zeta", "x"), lambda t, ans, x, q: mul(t, mul(neg(x), zeta(add(x, 1), q)))],
)
betaln_p = _special(
    "betaln",
    "betaln",
    [
        lambda t, ans, a, b: mul(t, sub(digamma(a), digamma(add(a, b)))),
        lambda t, ans, a, b: mul(t, sub(digamma(b), digamma(add(a, b)))),
    ],
)
poch_p = _special(
    "poch",
    "poch",
    [
        lambda t, ans, z, m: mul(t, mul(ans, sub(digamma(add(z, m)), digamma(z)))),
        lambda t, ans, z, m: mul(t, mul(ans, digamma(add(z, m)))),
    ],
)

# -- incomplete gamma and beta functions -----------------------------------------------------------


def _gamma_density(a: Any, x: Any) -> Any:
    """The derivative of ``igamma`` in x."""
    return exp(sub(sub(_times_log(sub(a, 1), x), x), lgamma(a)))


def _beta_density(a: Any, b: Any, x: Any) -> Any:
    """The derivative of ``betainc`` in x."""
    b = sub(b, 1)
    corner = logical_and(eq(x, 1), eq(b, 0))
    rest = mul(b, log1p(neg(select(corner, zeros_of(x), x))))
    return exp(sub(add(_times_log(sub(a, 1), x), rest), betaln(a, add(b, 1))))


igamma_p = _special(
    "igamma",
    "gammainc",
    [
        lambda t, ans, a, x: mul(t, igamma_grad_a(a, x)),
        lambda t, ans, a, x: mul(t, _gamma_density(a, x)),
    ],
)
igammac_p = _special(
    "igammac",
    "gammaincc",
    [
        lambda t, ans, a, x: mul(t, neg(igamma_grad_a(a, x))),
        lambda t, ans, a, x: mul(t, neg(_gamma_density(a, x))),
    ],
)
igamma_grad_a_p = _special(
    "igamma_grad_a",
    gamma_numerics.igamma_grad_a,
    [
        _no_derivative("igamma_grad_a", "a"),
        lambda t, ans, a, x: mul(t, mul(_gamma_density(a, x), sub(log(x), digamma(a)))),
    ],
)
random_gamma_grad_p = _special(
    "random_gamma_grad",
    gamma_numerics.random_gamma_grad,
    [
        _no_derivative("random_gamma_grad", "a"),
        # of -P_a / p, with the logarithmic derivatives of the density p in a and in x
        lambda t, ans, a, x: mul(
            t, sub(sub(digamma(a), log(x)), mul(ans, sub(div(sub(a, 1), x), ones_of(x))))
        ),
    ],
)
regularized_incomplete_beta_p = _special(
    "regularized_incomplete_beta",
    "betainc",
    [
        _no_derivative("betainc", "a"),
        _no_derivative("betainc", "b"),
        lambda t, ans, a, b, x: mul(t, _beta_density(a, b, x)),
    ],
)

# -- Bessel functions ------------------------------------------------------------------------------


def _i1e_deriv(t, ans, x):
    at_zero = eq(x, 0)
    ratio = select(at_zero, 0.5, div(ans, select(at_zero, ones_of(x), x)))
    return mul(t, sub(bessel_i0e(x), add(ratio, mul(sign(x), ans))))


bessel_i0e_p = _special(
    "bessel_i0e",
    "i0e",
    [lambda t, ans, x: mul(t, sub(bessel_i1e(x), mul(sign(x), ans)))],
)
bessel_i1e_p = _special("bessel_i1e", "i1e", [_i1e_deriv])

# -- logsumexp and hypotenuse, without overflow -----------------------------------------------------


def _share(part: Any, other: Any, whole: Any, of: Any) -> Any:
    """A tangent times ``exp(part - whole)``; for infinities all, half or nothing."""
    one, half, none = (scalar(v, whole.aval.dtype) for v in (1, 0.5, 0))
    at_infinity = select(eq(part, whole), select(eq(other, whole), half, one), none)
    regular = is_finite(whole)
    # both sides are guarded: exp of an unselected infinity would make second derivatives NaN
    below = sub(select(regular, part, none), select(regular, whole, none))
    return mul(of, select(regular, exp(below), at_infinity))


def _direction(part: Any, whole: Any) -> Any:
    """``part / whole``; 0 where the whole is 0, the sign or 0 where it is infinite."""
    regular = logical_and(is_finite(whole), gt(whole, 0))
    at_infinity = select(eq(abs(part), whole), sign(part), zeros_of(part))
    return div(select(regular, part, at_infinity), select(regular, whole, ones_of(whole)))


logaddexp_p = _special(
    "logaddexp",
    np.logaddexp,
    [lambda t, ans, x, y: _share(x, y, ans, t), lambda t, ans, x, y: _share(y, x, ans, t)],
    call("logaddexp", "f", 2),
    cost=20,
)
hypot_p = _special(
    "hypot",
    np.hypot,
    [lambda t, ans, x, y: mul(t, _direction(x, ans)), lambda t, ans, x, y: mul(t, _direction(y, ans))],
    call("hypot", "f", 2),
    cost=20,
)

# -- integrals of exponentials, logarithms and of the normal density -------------------------------


def _expn(n, x):
    order = np.floor(n)  # orders must be integers
    values = scipy.special.expn(np.where(np.isfinite(order), order, 0).astype(np.int64), x.astype(np.float64))
    return np.where(order == n, values, np.nan).astype(x.dtype)


def _expn_deriv(t, ans, n, x):
    # minus the function of order n - 1; orders 0 and 1 follow by recurrence
    low = div(sub(exp(neg(x)), mul(sub(n, 1), ans)), x)
    return mul(t, neg(select(gt(n, 1), expn(max(sub(n, 1), 1), x), low)))


def _spence_deriv(t, ans, x):
    # log(x) / (1 - x), near 1 by its series, of which every derivative is right: -sum of (1 - x)**k / (k + 1)
    near = lt(abs(sub(x, 1)), 0.05)
    safe = select(near, 2.0, x)
    gap = select(near, sub(1, x), zeros_of(x))
    series: Any = scalar(0.0, x.aval.dtype)
    for k in range(13, -1, -1):
        series = sub(mul(series, gap), 1 / (k + 1))
    return mul(t, select(near, series, div(log(safe), sub(1, safe))))


expi_p = _special("expi", "expi", [lambda t, ans, x: mul(t, div(exp(x), x))])
exp1_p = _special("exp1", "exp1", [lambda t, ans, x: mul(t, neg(div(exp(neg(x)), x)))])
expn_p = _special("expn", _expn, [None, _expn_deriv])
spence_p = _special("spence", "spence", [_spence_deriv])
erfcx_p = _special(
    "erfcx",
    "erfcx",
    [lambda t, ans, x: mul(t, sub(mul(mul(x, 2), ans), _TWO_OVER_ROOT_PI))],
)
dawsn_p = _special("dawsn", "dawsn", [lambda t, ans, x: mul(t, sub(1, mul(mul(x, 2), ans)))])
log_ndtr_p = _special(
    "log_ndtr",
    "log_ndtr",
    [lambda t, ans, x: mul(t, exp(sub(mul(square(x), -0.5), add(ans, _HALF_LOG_TWO_PI))))],
)
ndtri_p = _special(
    "ndtri", "ndtri", [lambda t, ans, x: mul(t, mul(exp(mul(square(ans), 0.5)), _ROOT_TWO_PI))]
)

# -- functions -------------------------------------------------------------------------------------


gamma = unary_function(gamma_p, "The gamma function.")
gammasgn = unary_function(gammasgn_p, "The sign of the gamma function, 1 or -1.")
lgamma = unary_function(lgamma_p, "The logarithm of the absolute value of the gamma function.")
digamma = unary_function(digamma_p, "The derivative of ``lgamma``; NaN at 0 and the negative integers.")
bessel_i0e = unary_function(bessel_i0e_p, "``exp(-|x|)`` times the modified Bessel function of order 0.")
bessel_i1e = unary_function(bessel_i1e_p, "``exp(-|x|)`` times the modified Bessel function of order 1.")
expi = unary_function(expi_p, "The exponential integral Ei, the principal value for x > 0.")
exp1 = unary_function(exp1_p, "The exponential integral E1.")
spence = unary_function(spence_p, "Spence's function: the integral of ``log(t) / (1 - t)`` from 1 to x.")
erfcx = unary_function(erfcx_p, "``exp(x**2) erfc(x)``, which does not underflow.")
dawsn = unary_function(
    dawsn_p, "Dawson's integral: ``exp(-x**2)`` times the integral of ``exp(t**2)`` from 0 to x."
)
log_ndtr = unary_function(log_ndtr_p, "The logarithm of the normal distribution function.")
ndtri = unary_function(ndtri_p, "The inverse of the normal distribution function.")


def polygamma(m: ArrayLike, x: ArrayLike) -> Array:
    """The m-th derivative of ``digamma``, integer ``m >= 0``; not differentiable in m."""
    return binary(polygamma_p, m, x)


def zeta(x: ArrayLike, q: ArrayLike) -> Array:
    """Hurwitz zeta, the sum of ``(k + q)**-x`` over k >= 0; not differentiable in x."""
    return binary(zeta_p, x, q)


def betaln(a: Any, b: Any) -> Any:
    """The logarithm of the absolute value of the beta function."""
    return binary(betaln_p, a, b)


def poch(z: Any, m: Any) -> Any:
    """Pochhammer's symbol ``gamma(z + m) / gamma(z)``."""
    return binary(poch_p, z, m)


def igamma(a: ArrayLike, x: ArrayLike) -> Array:
    """The regularized lower incomplete gamma function, for ``a > 0`` and ``x >= 0``."""
    return binary(igamma_p, a, x)


def igammac(a: ArrayLike, x: ArrayLike) -> Array:
    """The regularized upper incomplete gamma function: ``1 - igamma(a, x)``."""
    return binary(igammac_p, a, x)


def igamma_grad_a(a: ArrayLike, x: ArrayLike) -> Array:
    """The derivative of ``igamma`` in a, itself differentiable in x."""
    return binary(igamma_grad_a_p, a, x)


def random_gamma_grad(a: ArrayLike, sample: ArrayLike) -> Array:
    """The derivative in a of a sample of the gamma distribution with parameter a.

    That is, of the quantile: ``-igamma_grad_a(a, x) / p(x)`` with the density p, right also where both underflow.
    """
    return binary(random_gamma_grad_p, a, sample)


def betainc(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> Array:
    """Regularized incomplete beta function, a, b > 0, x in [0, 1]; derivative in x."""
    like = next((v for v in (a, b, x) if isinstance(v, Array)), None)
    if like is None:
        like = lift(x)
    a, b, x = stretched(*[operand(v, like) for v in (a, b, x)])
    return regularized_incomplete_beta_p.bind(a, b, x)


def expn(n: Any, x: Any) -> Any:
    """Exponential integral: ``exp(-x t) t**-n`` integrated from 1, integer ``n >= 0``."""
    return binary(expn_p, n, x)
