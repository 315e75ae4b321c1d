"""Derivatives of the incomplete gamma function in its parameter, in NumPy.

Below the operations ``special``. With P and Q = 1 - P the lower and upper functions, and p the density
``x**(a-1) exp(-x) / gamma(a)``, so that dP/dx = p, this module computes dP/da. It is computed as a factor times
``x * p``, so that the ratio of both derivatives, which sampling needs, is right also where each of them underflows.

Where x < max(a, 1) and a < 20, by the series of P, whose terms are differentiated (R. J. Moore, "Derivatives of the
incomplete gamma integral", Applied Statistics AS 187, 1982). Elsewhere from the integral on the side of x that has
the smaller tail,

    dQ/da = x p  int_0^inf exp(a v - x (exp(v) - 1)) (log x + v - digamma(a)) dv,      t = x exp(v), x >= a
    dP/da = x p  int_0^inf exp(-a v + x (1 - exp(-v))) (log x - v - digamma(a)) dv,    t = x exp(-v), x < a

whose integrands are entire functions that decay like a Gaussian or faster: by Gauss and Legendre's rule on an interval
that leaves out a part of exp(-40).
"""

from __future__ import annotations

import functools

import numpy as np

from blufunc import _lazy

with _lazy.modules(globals()):
    import scipy.special

_SMALL = 20.0
_DECAY = 40.0
_NODES = 64
_TERMS = 400


def igamma_grad_a(a, x):
    """dP/da at ``a > 0`` and ``x >= 0``, NaN elsewhere."""
    dtype = a.dtype
    a, x = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(x, np.float64))
    ok = (a > 0) & (x > 0) & np.isfinite(a) & np.isfinite(x)
    out = np.where((a > 0) & ((x == 0) | (x == np.inf)), 0.0, np.nan)
    a, x = a[ok], x[ok]
    out[ok] = np.exp(_log_scale(a, x)) * _factor(a, x)
    return np.asarray(out, dtype)


def random_gamma_grad(a, x):
    """Derivative of a gamma variate in a at fixed probability: ``-(dP/da) / (dP/dx)``."""
    dtype = a.dtype
    a, x = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(x, np.float64))
    ok = (a > 0) & (x > 0) & np.isfinite(a) & np.isfinite(x)
    out = np.where((a > 0) & (x == 0), 0.0, np.nan)
    out[ok] = -x[ok] * _factor(a[ok], x[ok])
    return np.asarray(out, dtype)


def _log_scale(a, x):
    """``log(x p) = a log x - x - log gamma(a)``, without cancellation for large a."""
    large = a >= _SMALL
    out = np.where(large, 0, a * np.log(x) - x - scipy.special.gammaln(a))
    b, y = a[large], x[large]
    away = (y - b) / b
    # Stirling's formula for gamma, with four correction terms
    rest = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / b**2) / b**2) / b**2) / b
    out[large] = -b * (away - np.log1p(away)) + 0.5 * np.log(b / (2 * np.pi)) - rest
    return out


def _factor(a, x):
    """``(dP/da) / (x p)`` of one-dimensional arrays."""
    series = (a < _SMALL) & (x < np.maximum(a, 1))
    out = np.empty_like(x)
    out[series] = _by_series(a[series], x[series])
    out[~series] = _by_integral(a[~series], x[~series])
    return out


def _by_series(a, x):
    """From P = x p / a times the sum of x**n / ((a + 1) ... (a + n))."""
    # each term carries the derivative of its logarithm, minus the sum of 1 / (a + i)
    term, slope = np.ones_like(x), np.zeros_like(x)
    total, slopes = term.copy(), slope.copy()
    for n in range(1, _TERMS):
        term = term * (x / (a + n))
        slope = slope - 1 / (a + n)
        total += term
        slopes += term * slope
        if not np.any(term * (1 - slope) > 1e-17 * total):
            break
    return (total * (np.log(x) - scipy.special.digamma(a + 1)) + slopes) / a


@functools.cache
def _rule():
    return np.polynomial.legendre.leggauss(_NODES)


def _by_integral(a, x):
    """From the integrals above."""
    upper = x >= a
    sign = np.where(upper, 1.0, -1.0)
    # extent of the integrand: the exponent has slope 0 there, and the remainder bounds it too
    away = np.maximum(np.abs(x - a), 1e-300)
    c = _DECAY / x
    flat = np.where(
        upper, np.minimum(np.sqrt(2 * c), np.log1p(c) + 0.5), np.where(c < 1 / 3, np.sqrt(3 * c), 1 + c)
    )
    reach = np.minimum(_DECAY / away, flat)
    log_ratio = np.where(np.abs(x - a) < 0.5 * a, np.log1p((x - a) / a), np.log(x / a))
    offset = log_ratio - _digamma_less_log(a)
    total = np.zeros_like(x)
    for node, weight in zip(*_rule(), strict=True):
        v = 0.5 * (node + 1) * reach
        s = sign * v
        total += 0.5 * weight * np.exp((a - x) * s - x * (np.expm1(s) - s)) * (offset + s)
    # above x the integral is that of Q, whose derivative has the other sign
    return -sign * total * reach


def _digamma_less_log(a):
    """``digamma(a) - log(a)``, by the asymptotic series for large a."""
    w = 1 / np.square(np.maximum(a, _SMALL))
    series = -(1 / 12 - (1 / 120 - (1 / 252 - (1 / 240 - w / 132) * w) * w) * w) * w - 0.5 / np.maximum(
        a, _SMALL
    )
    return np.where(a >= _SMALL, series, scipy.special.digamma(a) - np.log(a))
