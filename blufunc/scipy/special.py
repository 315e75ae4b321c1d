"""``scipy.special``: special functions, elementwise, with derivatives.

Face, above ``blufunc.numpy`` and ``blufunc.nn``. Each function promotes and broadcasts as ``blufunc.numpy`` does, takes
real numbers (integers and booleans are computed in float32), and returns an array of their shape; the definitions are
in ``core/ops/special``. What is undefined at a point is NaN there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

import blufunc.numpy as bnp
from blufunc import _lazy, errors, lax, nn
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import special as ops
from blufunc.core.ops.linalg.common import complex_dtype
from blufunc.core.primitives.primitive import Primitive
from blufunc.numpy.promotion import as_value, inexact, match_shapes, named, promote_dtypes
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import NamedUnary

with _lazy.modules(globals()):
    import scipy.special

    from blufunc.core.ops import hypergeometric as rare

__all__ = [
    "bernoulli", "bessel_jn", "beta", "betainc", "betaln", "boxcox", "boxcox1p", "comb", "dawsn", "digamma", "entr",
    "erf", "erfc", "erfcx", "erfinv", "exp1", "expi", "expit", "expn", "factorial", "fresnel", "gamma", "gammainc",
    "gammaincc", "gammaln", "gammasgn", "hyp1f1", "hyp2f1", "i0", "i0e", "i1", "i1e", "kl_div", "log_ndtr",
    "log_softmax", "loggamma", "logit", "logsumexp", "multigammaln", "ndtr", "ndtri", "owens_t", "poch", "polygamma",
    "rel_entr", "sici", "softmax", "spence", "sph_harm_y", "wofz", "xlog1py", "xlogy", "zeta",
]  # fmt: skip


def _function(prim: Primitive, name: str, doc: str) -> NamedUnary:
    """A function of one operand that binds one primitive."""

    def function(x: Any) -> Array:
        return prim.bind(inexact(x, name))

    return named(function, name, doc, "blufunc.scipy.special")


def _operands(name: str, *xs: Any) -> list[Array]:
    """Floating values of one dtype, of one shape or of rank 0."""
    return match_shapes(name, *promote_dtypes(name, *xs, inexact=True))


# -- gamma and beta functions ----------------------------------------------------------------------

gamma = _function(ops.gamma_p, "gamma", "The gamma function; NaN at negative integers.")
gammaln = _function(ops.lgamma_p, "gammaln", "``log(abs(gamma(x)))``; infinite at 0 and negative integers.")
gammasgn = _function(ops.gammasgn_p, "gammasgn", "The sign of ``gamma(x)``, 1 or -1; it has no derivative.")
digamma = _function(
    ops.digamma_p, "digamma", "The derivative of ``gammaln``; NaN at 0 and negative integers."
)


def polygamma(n: ArrayLike, x: ArrayLike) -> Array:
    """The derivative of ``digamma`` of order n, an integer of 0 or more, at x."""
    return ops.polygamma_p.bind(*_operands("polygamma", n, x))


def betaln(a: ArrayLike, b: ArrayLike) -> Array:
    """``log(abs(beta(a, b)))``."""
    return ops.betaln_p.bind(*_operands("betaln", a, b))


def poch(z: ArrayLike, m: ArrayLike) -> Array:
    """Pochhammer's symbol ``gamma(z + m) / gamma(z)``."""
    return ops.poch_p.bind(*_operands("poch", z, m))


def gammainc(a: ArrayLike, x: ArrayLike) -> Array:
    """The regularized lower incomplete gamma function, differentiable in a and x.

    ``a`` is positive, ``x`` at least 0.
    """
    return ops.igamma_p.bind(*_operands("gammainc", a, x))


def gammaincc(a: ArrayLike, x: ArrayLike) -> Array:
    """``1 - gammainc(a, x)``, accurate where it is small."""
    return ops.igammac_p.bind(*_operands("gammaincc", a, x))


def beta(a: ArrayLike, b: ArrayLike) -> Array:
    """The beta function: ``gamma(a) * gamma(b) / gamma(a + b)``."""
    a, b = _operands("beta", a, b)
    signs = ew.mul(ew.mul(ops.gammasgn(a), ops.gammasgn(b)), ops.gammasgn(ew.add(a, b)))
    return ew.mul(signs, ew.exp(ops.betaln(a, b)))


def betainc(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> Array:
    """The regularized incomplete beta function, differentiable in x alone.

    ``a`` and ``b`` are positive, ``x`` is in [0, 1].
    """
    return ops.betainc(*_operands("betainc", a, b, x))


def factorial(n: ArrayLike, exact: bool = False) -> Array:
    """``gamma(n + 1)``, and 0 for n < 0.

    Raises:
      UnsupportedError: ``exact`` is true: there are no integers of any size.
    """
    if exact:
        raise errors.UnsupportedError(
            "factorial(exact=True) needs integers of any size, which arrays do not have.",
            where=source.here(),
            fix="use math.factorial, or leave exact out",
        )
    n = inexact(n, "factorial")
    negative = ew.lt(n, 0)
    return ew.select(negative, 0.0, ops.gamma(ew.add(ew.select(negative, ew.zeros_of(n), n), 1)))


def multigammaln(a: ArrayLike, d: int) -> Array:
    """The log of the gamma function of dimension d: sum of ``gammaln(a - j / 2)``.

    The sum is over j < d, and a constant is added.

    Args:
      a: an array, of numbers above (d - 1) / 2.
      d: a Python int.
    """
    a, d = inexact(a, "multigammaln"), static_int(d, "multigammaln", "d")
    if d < 1:
        raise errors.ValueRangeError(
            f"multigammaln: the dimension is {d}.", where=source.here(), fix="give 1 or more"
        )
    halves = bnp.arange(d).astype(a.dtype) / 2
    shifted = bnp.expand_dims(a, -1) - bnp.expand_dims(halves, tuple(range(a.ndim)))
    return bnp.sum(ops.lgamma(shifted), axis=-1) + d * (d - 1) / 4 * math.log(math.pi)


def loggamma(x: ArrayLike) -> Array:
    """The principal ``log(gamma(x))``: NaN for real x < 0; one derivative if complex."""
    x = inexact(x, "loggamma")
    if dtypes.is_complex(x.aval.dtype):
        return rare.complex_lgamma_p.bind(x)
    return bnp.where(x > 0, ops.lgamma(x), math.nan)


def comb(N: Any, k: ArrayLike, *, repetition: bool = False) -> Array:
    """The binomial coefficient, of real numbers; 0 unless ``0 <= k <= N``.

    ``repetition``: the number of multisets, ``comb(N + k - 1, k)``.
    """
    n, k = _operands("comb", N, k)
    if repetition:
        n = bnp.where(bnp.equal(n, 0) & bnp.equal(k, 0), 0, n + k - 1)
    inside = (n >= 0) & (k >= 0) & (k <= n)
    n, k = bnp.where(inside, n, 0), bnp.where(inside, k, 0)
    return bnp.where(inside, bnp.exp(-bnp.log1p(n) - ops.betaln(n - k + 1, k + 1)), 0)


def bernoulli(n: int) -> Array:
    """The Bernoulli numbers B_0 to B_n, with B_1 = -1/2; float32."""
    n = static_int(n, "bernoulli", "n")
    if n < 0:
        raise errors.ValueRangeError(f"bernoulli: n = {n}.", where=source.here(), fix="give 0 or more")
    return bnp.asarray(scipy.special.bernoulli(n)[: n + 1], dtype="float32")


def zeta(x: ArrayLike, q: ArrayLike | None = None) -> Array:
    """The Hurwitz zeta function: sum of ``(k + q)**-x``, k >= 0, x > 1; default q 1."""
    return ops.zeta_p.bind(*_operands("zeta", x, 1 if q is None else q))


# -- error functions and the normal distribution ---------------------------------------------------

erf = _function(ew.erf_p, "erf", "The error function.")
erfc = _function(ew.erfc_p, "erfc", "``1 - erf(x)``, accurate for large x.")
erfcx = _function(ops.erfcx_p, "erfcx", "``exp(x**2) * erfc(x)``, which does not underflow.")
erfinv = _function(ew.erf_inv_p, "erfinv", "The inverse of ``erf``.")
dawsn = _function(ops.dawsn_p, "dawsn", "``exp(-x**2)`` times the integral of ``exp(t**2)`` from 0 to x.")


def ndtri(p: ArrayLike) -> Array:
    """The inverse of ``ndtr``."""
    return ops.ndtri_p.bind(inexact(p, "ndtri"))


def ndtr(x: ArrayLike) -> Array:
    """The normal CDF: the probability of a standard normal variate below x."""
    return ew.mul(ew.erfc(ew.mul(inexact(x, "ndtr"), -math.sqrt(0.5))), 0.5)


def log_ndtr(x: ArrayLike, series_order: int = 3) -> Array:
    """``log(ndtr(x))``, accurate in both tails; ``series_order`` is ignored."""
    static_int(series_order, "log_ndtr", "series_order")
    return ops.log_ndtr(inexact(x, "log_ndtr"))


def owens_t(h: Any, a: ArrayLike) -> Array:
    """Owen's T: the probability of x > h and 0 < y < a x, for standard normal x and y."""
    return rare.owens_t_p.bind(*_operands("owens_t", h, a))


def wofz(z: ArrayLike) -> Array:
    """The Faddeeva function ``exp(-z^2) erfc(-i z)``; complex."""
    z = inexact(z, "wofz")
    return rare.faddeeva_p.bind(z.astype(complex_dtype(z.aval.dtype)))


# -- hypergeometric functions, and integrals of sines ----------------------------------------------


def hyp1f1(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> Array:
    """Kummer's function 1F1: the sum of ``(a)_k / (b)_k x^k / k!``."""
    return rare.hyp1f1_p.bind(*_operands("hyp1f1", a, b, x))


def hyp2f1(a: ArrayLike, b: ArrayLike, c: ArrayLike, x: ArrayLike) -> Array:
    """Gauss's function 2F1: the sum of ``(a)_k (b)_k / (c)_k x^k / k!``."""
    return rare.hyp2f1_p.bind(*_operands("hyp2f1", a, b, c, x))


def fresnel(x: ArrayLike) -> tuple[Array, Array]:
    """The integrals of ``sin(pi t^2 / 2)`` and ``cos(pi t^2 / 2)`` from 0 to x."""
    x = inexact(x, "fresnel")
    return rare.fresnel_s(x), rare.fresnel_c(x)


def sici(x: ArrayLike) -> tuple[Array, Array]:
    """The sine integral, and the cosine integral of ``abs(x)``."""
    x = inexact(x, "sici")
    return rare.sine_integral(x), rare.cosine_integral(x)


def sph_harm_y(
    n: ArrayLike, m: ArrayLike, theta: Any, phi: Any, diff_n: int | None = None, n_max: int | None = None
) -> Array:
    """Orthonormal spherical harmonics of degree n and order m, with phase (-1)^m.

    By the recurrence in n of normalized Legendre functions (DLMF 14.10.3), elementwise.

    Args:
      n, m: integers, ``0 <= abs(m) <= n``; elsewhere the result is 0.
      theta: the polar angle, 0 to pi.
      phi: the azimuth.
      diff_n: None: use ``grad`` for derivatives.
      n_max: the largest degree; needed where n is traced. Larger degrees are taken for it.
    """
    only_none("sph_harm_y", "diff_n", diff_n, "derivatives of any order are those of grad")
    n, m = (as_value(v, "sph_harm_y") for v in (n, m))
    for name, v in (("n", n), ("m", m)):
        if not (dtypes.is_integer(v.aval.dtype) or dtypes.is_floating(v.aval.dtype)):
            raise errors.DtypeError(
                f"sph_harm_y: {name} is {v.aval}.", where=source.here(), fix="pass integers, such as 2"
            )
    if n_max is None:
        n_max = int(np.max(np.asarray(n), initial=0))
    n_max = static_int(n_max, "sph_harm_y", "n_max")
    theta, phi = promote_dtypes("sph_harm_y", theta, phi, inexact=True)
    n, m, theta, phi = bnp.broadcast_arrays(bnp.minimum(n, n_max), m, theta, phi)
    order, x, s = bnp.abs(m), bnp.cos(theta), bnp.sin(theta)
    number = lambda v: v.astype(theta.dtype)
    start = bnp.full_like(theta, 0.5 / math.sqrt(math.pi))

    def diagonal(j, p):  # from the function of degree and order j - 1 to that of j
        step = bnp.sqrt(number(2 * j + 1) / number(2 * j))
        return bnp.where(j <= order, -step * s * p, p)

    start = lax.fori_loop(1, n_max + 1, diagonal, start)

    def upward(degree, state):  # from degrees l - 1 and l - 2 to l, of one order
        low, high = state
        above = (degree > order) & (degree <= n)
        l, k = number(degree), number(bnp.where(above, order, 0))
        new = bnp.sqrt((4 * l * l - 1) / (l * l - k * k))
        old = bnp.sqrt(bnp.maximum((l - 1) ** 2 - k * k, 0) / bnp.maximum(4 * (l - 1) ** 2 - 1, 1))
        following = new * (x * high - old * low)
        return bnp.where(above, high, low), bnp.where(above, following, high)

    _, p = lax.fori_loop(1, n_max + 1, upward, (bnp.zeros_like(start), start))
    p = bnp.where((order <= n) & (n >= 0), p, 0)
    p = bnp.where((m < 0) & (order % 2 == 1), -p, p)
    angle = number(m) * phi
    return lax.complex(p * bnp.cos(angle), p * bnp.sin(angle))


# -- exponential integrals and Bessel functions ----------------------------------------------------

expi = _function(ops.expi_p, "expi", "The exponential integral Ei, the principal value for x > 0.")
exp1 = _function(ops.exp1_p, "exp1", "The exponential integral E1, for x > 0.")


def expn(n: ArrayLike, x: ArrayLike) -> Array:
    """The exponential integral of order n, an integer of 0 or more, at x >= 0."""
    return ops.expn_p.bind(*_operands("expn", n, x))


spence = _function(ops.spence_p, "spence", "The integral of ``log(t) / (1 - t)`` from 1 to x.")
i0e = _function(ops.bessel_i0e_p, "i0e", "``exp(-abs(x)) * i0(x)``, which does not overflow.")
i1e = _function(ops.bessel_i1e_p, "i1e", "``exp(-abs(x)) * i1(x)``, which does not overflow.")


def i0(x: ArrayLike) -> Array:
    """The modified Bessel function of the first kind of order 0."""
    x = inexact(x, "i0")
    return ew.mul(ew.exp(ew.abs(x)), ops.bessel_i0e(x))


def i1(x: ArrayLike) -> Array:
    """The modified Bessel function of the first kind of order 1."""
    x = inexact(x, "i1")
    return ew.mul(ew.exp(ew.abs(x)), ops.bessel_i1e(x))


def bessel_jn(z: ArrayLike, *, v: int, n_iter: int = 50) -> Array:
    """The Bessel functions of the first kind of orders 0 to v.

    Args:
      z: real numbers.
      v: a Python int.
      n_iter: of JAX's recurrence; without effect.
    Returns:
      (v + 1, *z.shape).
    """
    z, v = inexact(z, "bessel_jn"), static_int(v, "bessel_jn", "v")
    if v < 0:
        raise errors.ValueRangeError(f"bessel_jn: v = {v}.", where=source.here(), fix="give 0 or more")
    return bnp.stack([rare.bessel_jv_p.bind(bnp.asarray(k, z.aval.dtype), z) for k in range(v + 1)])


# -- logarithms, entropies, logistic functions -----------------------------------------------------


def expit(x: ArrayLike) -> Array:
    """``1 / (1 + exp(-x))``."""
    return ew.logistic(inexact(x, "expit"))


def logit(x: ArrayLike) -> Array:
    """``log(x / (1 - x))``, the inverse of ``expit``."""
    x = inexact(x, "logit")
    return ew.sub(ew.log(x), ew.log1p(ew.neg(x)))


def _product_with(log: Callable, argument: Callable) -> Callable:
    """``x * log(y)``, 0 where x is 0; its derivative in x is ``log(y)`` there too."""

    @custom_jvp
    def product(x, y):
        at_zero = ew.logical_and(ew.eq(x, 0), ew.eq(y, y))
        return ew.select(at_zero, ew.zeros_of(x), ew.mul(x, log(ew.select(at_zero, ew.ones_of(y), y))))

    @product.defjvp
    def product_jvp(primals, tangents):
        (x, y), (tx, ty) = primals, tangents
        divisor = argument(y)
        nothing = ew.bitwise_and(
            ew.eq(x, 0), ew.eq(divisor, 0)
        )  # 0 log 0: elsewhere x / y is differentiable in x
        slope = ew.div(x, ew.select(nothing, ew.ones_of(divisor), divisor))
        value = product(x, y)
        return value, bnp.broadcast_to(tx * log(y) + ty * slope, value.shape)

    return product


_xlogy = _product_with(ew.log, lambda y: y)
_xlog1py = _product_with(ew.log1p, lambda y: ew.add(y, 1))


def xlogy(x: ArrayLike, y: ArrayLike) -> Array:
    """``x * log(y)``, and 0 where x is 0."""
    return _xlogy(*_operands("xlogy", x, y))


def xlog1py(x: ArrayLike, y: ArrayLike) -> Array:
    """``x * log(1 + y)``, and 0 where x is 0."""
    return _xlog1py(*_operands("xlog1py", x, y))


def _power_over(log_x: Array, lmbda: Array) -> Array:
    """``(exp(lmbda log_x) - 1) / lmbda``, or its limit, with all derivatives."""
    near = (bnp.abs(lmbda * log_x) < 0.1) | bnp.equal(lmbda, 0)
    u = lmbda * bnp.where(near & bnp.isfinite(log_x), log_x, 0)
    series = sum(u**k / math.factorial(k + 1) for k in range(1, 11)) + 1
    divisor = bnp.where(near, 1, lmbda)
    return bnp.where(near, log_x * series, bnp.expm1(divisor * log_x) / divisor)


def boxcox(x: ArrayLike, lmbda: ArrayLike) -> Array:
    """The Box-Cox transform ``(x^lmbda - 1) / lmbda``, ``log(x)`` where lmbda is 0."""
    x, lmbda = _operands("boxcox", x, lmbda)
    return _power_over(bnp.log(x), lmbda)


def boxcox1p(x: ArrayLike, lmbda: ArrayLike) -> Array:
    """``boxcox(1 + x, lmbda)``, accurate for small x."""
    x, lmbda = _operands("boxcox1p", x, lmbda)
    return _power_over(bnp.log1p(x), lmbda)


def entr(x: ArrayLike) -> Array:
    """``-x * log(x)``: 0 at 0, minus infinity below."""
    x = inexact(x, "entr")
    safe = ew.select(ew.lt(x, 0), ew.ones_of(x), x)
    return ew.select(ew.lt(x, 0), -math.inf, ew.neg(_xlogy(safe, safe)))


def _outside(p: Array, q: Array) -> Array:
    """True outside the domain of the relative entropy, where it is infinite."""
    known = ew.logical_and(ew.eq(p, p), ew.eq(q, q))
    impossible = ew.logical_and(ew.gt(p, 0), ew.eq(q, 0))
    return ew.logical_and(known, ew.bitwise_or(ew.bitwise_or(ew.lt(p, 0), ew.lt(q, 0)), impossible))


def rel_entr(p: ArrayLike, q: ArrayLike) -> Array:
    """``p * log(p / q)``; 0 at p = 0 <= q; infinite for negative values or q = 0 < p."""
    p, q = _operands("rel_entr", p, q)
    both = ew.logical_and(ew.gt(p, 0), ew.gt(q, 0))
    safe_p, safe_q = ew.select(both, p, ew.ones_of(p)), ew.select(both, q, ew.ones_of(q))
    value = ew.mul(safe_p, ew.sub(ew.log(safe_p), ew.log(safe_q)))
    known = ew.logical_and(ew.eq(p, p), ew.eq(q, q))
    rest = ew.select(_outside(p, q), math.inf, ew.select(known, ew.zeros_of(value), math.nan))
    return ew.select(both, value, rest)


def kl_div(p: ArrayLike, q: ArrayLike) -> Array:
    """``rel_entr(p, q) - p + q``, which is nowhere negative."""
    p, q = _operands("kl_div", p, q)
    return ew.select(_outside(p, q), math.inf, ew.add(ew.sub(rel_entr(p, q), p), q))


@overload
def logsumexp(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
) -> Array: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> Array | tuple[Array, Array]: ...


def logsumexp(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> Any:
    """``log(sum(b * exp(a)))`` over ``axis``, without overflow.

    Args:
      a: an array.
      axis: an axis, several, or None for all of them.
      b: factors that broadcast against ``a``; 1 by default. A negative sum gives NaN, unless its sign is asked for.
      keepdims: keep the summed axes, with size 1.
      return_sign: return the logarithm of the absolute value of the sum, and its sign.
      where: booleans that broadcast against ``a``: which elements to sum. A sum of none is minus infinity.
    """
    return nn.logsumexp(a, axis, b, keepdims, return_sign, where)


def softmax(x: ArrayLike, /, *, axis: int | Sequence[int] | None = None) -> Array:
    """``exp(x) / sum(exp(x))`` over ``axis``: an int, a tuple or None for all."""
    return nn.softmax(x, axis)


def log_softmax(x: ArrayLike, /, *, axis: int | Sequence[int] | None = None) -> Array:
    """The logarithm of ``softmax``, accurate for small probabilities."""
    return nn.log_softmax(x, axis)
