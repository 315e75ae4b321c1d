"""Rows for special functions, ``reduce_precision`` and bitcasts of other widths.

``tests/op_table/rows.py`` adds ``ROWS`` to its own. References are SciPy's functions under other names or
definitions by other functions, where there are any.
"""

from __future__ import annotations

import numpy as np
import scipy.special
import scipy.stats

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import hypergeometric as rare
from blufunc.core.ops import special
from tests.op_table.row import FLOATS, KEY, Arg, Op

M = (2, 3)
_NOT_FLOATS = ("complex64", "int32", "bool", KEY)


def _row(prim, ref, *ranges, name="", kinds=FLOATS, avoid=(), integers=(), **kw):
    """A row with arguments in the given ranges; those of ``integers`` are integral."""
    args = tuple(
        Arg(M, low, high, avoid=avoid, step=1.0 if i in integers else 0.0)
        for i, (low, high) in enumerate(ranges)
    )
    kw.setdefault("grad", 2)
    kw.setdefault("tol", 16)
    return Op(prim, args, ref, name=name, dtypes=kinds, refuses=() if name else _NOT_FLOATS, **kw)


def _number(prim, ref, low, high, x, **kw):
    """A row whose first argument is a number."""
    args = (Arg((), low, high, step=1.0 if kw.pop("whole", False) else 0.0), Arg(M, *x))
    return Op(prim, args, ref, name="number", grad=2, dtypes=("float64",), tol=16, **kw)


def _quantile_slope(a, x):
    """The derivative in a of the quantile of x, by fourth-order differences."""
    p, h = scipy.special.gammainc(a, x), 1e-3 * a
    f = lambda s: scipy.special.gammaincinv(a + s * h, p)
    return (8 * (f(1) - f(-1)) - (f(2) - f(-2))) / (12 * h)


def _grad_a(a, x):
    """The derivative of gammainc in a, by differences of order 4."""
    h = 1e-3 * a
    f = lambda s: scipy.special.gammainc(a + s * h, x)
    return (8 * (f(1) - f(-1)) - (f(2) - f(-2))) / (12 * h)


_POSITIVE = (0.3, 4)
_BY_DIFFERENCES = {"tol": 1e6, "wrt": (1,)}

SPECIAL = [
    _row(special.gamma_p, lambda x: np.exp(scipy.special.loggamma(x)), _POSITIVE),
    _row(special.gamma_p, scipy.special.gamma, (-2.9, -2.1), name="negative", kinds=("float64", "float32")),
    _row(special.gammasgn_p, lambda x: np.sign(scipy.special.gamma(x)), (-3, 3), avoid=(0, -1, -2, -3), grad=0),
    _row(special.lgamma_p, lambda x: scipy.special.loggamma(x).real, (0.1, 9)),
    _row(special.digamma_p, lambda x: scipy.special.digamma(x + 1) - 1 / x, (0.3, 5)),
    _row(special.polygamma_p, lambda m, x: scipy.special.polygamma(m.astype(int), x), (0, 3), (0.5, 4), integers=(0,),
         wrt=(1,)),
    _number(special.polygamma_p, lambda m, x: scipy.special.polygamma(int(m), x), 1, 3, (0.5, 4), whole=True, wrt=(1,)),
    _row(special.zeta_p, lambda x, q: scipy.special.zeta(x, q + 1) + q**-x, (1.5, 5), (0.5, 4), wrt=(1,)),
    _row(special.betaln_p, lambda a, b: np.log(scipy.special.beta(a, b)), _POSITIVE, _POSITIVE),
    _row(special.poch_p, lambda z, m: scipy.special.gamma(z + m) / scipy.special.gamma(z), _POSITIVE, _POSITIVE),
    _row(special.igamma_p, lambda a, x: scipy.stats.gamma.cdf(x, a), _POSITIVE, _POSITIVE, wrt=(1,)),
    _row(special.igamma_p, lambda a, x: scipy.stats.gamma.cdf(x, a), _POSITIVE, _POSITIVE, name="order-1", grad=1),
    _number(special.igamma_p, lambda a, x: scipy.stats.gamma.cdf(x, a), 0.5, 3, _POSITIVE, wrt=(1,)),
    _row(special.igammac_p, lambda a, x: scipy.stats.gamma.sf(x, a), _POSITIVE, _POSITIVE, wrt=(1,)),
    _row(special.igammac_p, lambda a, x: scipy.stats.gamma.sf(x, a), (10, 40), (10, 40), name="large",
         kinds=("float64",), grad=1),
    _row(special.igamma_grad_a_p, _grad_a, _POSITIVE, _POSITIVE, **_BY_DIFFERENCES),
    _row(special.random_gamma_grad_p, _quantile_slope, _POSITIVE, (0.3, 2), **_BY_DIFFERENCES),
    _row(special.regularized_incomplete_beta_p, lambda a, b, x: scipy.stats.beta.cdf(x, a, b), _POSITIVE, _POSITIVE,
         (0.1, 0.9), wrt=(2,)),
    _row(special.bessel_i0e_p, lambda x: np.exp(-np.abs(x)) * scipy.special.iv(0, x), (-4, 4), avoid=(0,)),
    _row(special.bessel_i1e_p, lambda x: np.exp(-np.abs(x)) * scipy.special.iv(1, x), (-4, 4), avoid=(0,)),
    _row(special.expi_p, lambda x: -scipy.special.exp1(-x + 0j).real, (0.2, 3)),
    _row(special.exp1_p, lambda x: -scipy.special.expi(-x), (0.2, 3)),
    _row(special.expn_p, lambda n, x: scipy.special.expn(n, x), (0, 4), (0.5, 3), integers=(0,), wrt=(1,)),
    _row(special.spence_p, scipy.special.spence, (0.2, 3)),
    _row(special.erfcx_p, lambda x: np.exp(x * x) * scipy.special.erfc(x), (-1, 2)),
    _row(special.dawsn_p, lambda x: np.sqrt(np.pi) / 2 * np.exp(-x * x) * scipy.special.erfi(x), (-2, 2)),
    _row(special.log_ndtr_p, scipy.stats.norm.logcdf, (-4, 2)),
    _row(special.ndtri_p, scipy.stats.norm.ppf, (0.1, 0.9)),
]  # fmt: skip


def _integral(f):
    """The integral of f from 0 to x, by Gauss's rule."""
    at, weights = np.polynomial.legendre.leggauss(40)
    return lambda x: np.sum(weights * f(x[..., None] * (at + 1) / 2), -1) * x / 2


def _by_differences(f, i):
    """The derivative of f in argument i, by fourth-order differences."""

    def slope(*xs):
        h = 1e-3
        at = lambda s: f(*[x + s * h if j == i else x for j, x in enumerate(xs)])
        return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)

    return slope


_UNIT, _Z = (-0.7, 0.7), Arg(M, -2, 2)
_COMPLEX = {"dtypes": ("complex64", "complex128"), "refuses": ("float32", "int32", "bool", KEY), "tol": 64}

RARE = [
    _row(rare.fresnel_s_p, _integral(lambda t: np.sin(np.pi / 2 * t**2)), (-2, 2)),
    _row(rare.fresnel_c_p, _integral(lambda t: np.cos(np.pi / 2 * t**2)), (-2, 2)),
    _row(rare.sine_integral_p, _integral(lambda t: np.sinc(t / np.pi)), (-3, 3)),
    _row(rare.cosine_integral_p, lambda x: ((scipy.special.exp1(1j * x) + scipy.special.exp1(-1j * x)) / -2).real,
         (0.3, 3)),
    _row(rare.owens_t_p, lambda h, a: np.sign(a) * scipy.special.owens_t(-h, abs(a)), (-2, 2), (-2, 2)),
    _row(rare.bessel_jv_p, lambda v, z: (scipy.special.hankel1(v, z)).real, (0, 4), (0.5, 6), integers=(0,), wrt=(1,),
         tol=256),
    Op(rare.faddeeva_p, (_Z,), lambda z: np.exp(-z * z) * scipy.special.erfc(-1j * z), grad=2, **_COMPLEX),
    Op(rare.complex_lgamma_p, (Arg(M, 1, 3),), lambda z: scipy.special.loggamma(z + 1) - np.log(z), **_COMPLEX),
    Op(rare.complex_digamma_p, (Arg(M, 1, 3),), lambda z: scipy.special.digamma(z + 1) - 1 / z, **_COMPLEX),
    _row(rare.hyp1f1_p, lambda a, b, x: np.exp(x) * scipy.special.hyp1f1(b - a, b, -x), _POSITIVE, _POSITIVE, (-2, 2),
         wrt=(2,), tol=64),
    _row(rare.hyp2f1_p, lambda a, b, c, x: (1 - x) ** (c - a - b) * scipy.special.hyp2f1(c - a, c - b, c, x),
         _POSITIVE, _POSITIVE, _POSITIVE, _UNIT, wrt=(3,), tol=256),
    *(
        _row(prim, _by_differences(f, i), *[_POSITIVE] * n, _UNIT, wrt=(n,), tol=1e6)
        for f, n, slopes in (
            (scipy.special.hyp1f1, 2, (rare.hyp1f1_slope_a_p, rare.hyp1f1_slope_b_p)),
            (scipy.special.hyp2f1, 3, (rare.hyp2f1_slope_a_p, rare.hyp2f1_slope_b_p, rare.hyp2f1_slope_c_p)),
        )
        for i, prim in enumerate(slopes)
    ),
]  # fmt: skip


def _rounded(x):
    """Rounded to bfloat16 and back."""
    return x.astype(np.float32).astype(dtypes.bfloat16).astype(x.dtype)


_BF16, _F64 = {"exponent_bits": 8, "mantissa_bits": 7}, {"exponent_bits": 11, "mantissa_bits": 52}

BITS = [
    Op(ew.reduce_precision_p, (Arg(M),), _rounded, _BF16, dtypes=FLOATS, refuses=_NOT_FLOATS),
    Op(ew.reduce_precision_p, (Arg(M),), lambda x: x, _F64, "identity", grad=2, dtypes=("float64",)),
    Op(ew.bitcast_p, (Arg(M),), lambda x: np.stack([x.view(np.uint64) & 0xFFFFFFFF, x.view(np.uint64) >> 32], -1),
       {"dtype": dtypes.uint32}, "parts", dtypes=("float64",), out="uint32"),
    Op(ew.bitcast_p, (Arg((3, 4), 0, 255),), lambda x: x.astype(np.uint32) @ (256 ** np.arange(4)),
       {"dtype": dtypes.uint32}, "joined", dtypes=("uint8",), out="uint32", refuses=(KEY,)),
    Op(ew.bitcast_p, (Arg((), -99, 99),), lambda x: x.reshape(1).view(np.uint8), {"dtype": dtypes.uint8},
       "parts-of-a-number", dtypes=("int32",), out="uint8"),
]  # fmt: skip

# lengths and sums of exponentials, at ties and zeros too: their second derivatives are not zero there
SUMS = [
    _row(special.logaddexp_p, lambda x, y: np.log(np.exp(x) + np.exp(y)), (-3, 3), (-3, 3)),
    _row(special.logaddexp_p, lambda x, y: np.log(np.exp(x) + np.exp(y)), (1, 1), (1, 1), name="ties"),
    _row(special.logaddexp_p, lambda x, y: x + np.log1p(np.exp(y - x)), (80, 81), (-3, 3), name="far apart"),
    _row(special.hypot_p, lambda x, y: np.sqrt(x * x + y * y), (-3, 3), (0.5, 3)),
    _row(special.hypot_p, lambda x, y: np.sqrt(x * x + y * y), (0, 0), (0.5, 3), name="zeros"),
]
ROWS: list[Op] = [*SPECIAL, *RARE, *SUMS, *BITS]
