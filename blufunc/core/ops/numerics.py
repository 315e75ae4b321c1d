"""Elementwise operations that NumPy lacks or defines differently from XLA.

Below ``elementwise``, which adds types and derivatives. In: checked NumPy arrays. Out: NumPy arrays of the
same dtype, with XLA's conventions. SciPy's functions run in float32 for half precision.
"""

from __future__ import annotations

import numpy as np

from blufunc import _lazy
from blufunc.core.ir import dtypes

with _lazy.modules(globals()):
    import scipy.special


def divide(x, y):
    """``x / y``; integers are divided toward zero."""
    if not dtypes.is_integer(x.dtype):
        return np.true_divide(x, y)
    quotient = np.floor_divide(x, y)
    if dtypes.is_unsigned(x.dtype):
        return quotient
    # XLA and C truncate, NumPy floors
    return np.asarray(quotient + ((quotient < 0) & (quotient * y != x)), x.dtype)


def power(x, y):
    """``x**y``, for integers modulo their range.

    Powers below 0 of integers are rounded toward zero; that of 0 is 0.
    """
    if dtypes.is_floating(x.dtype):
        return _power_of_floats(x, y)
    if not dtypes.is_integer(x.dtype) or dtypes.is_unsigned(x.dtype):
        return np.power(x, y)
    inverse = y < 0
    if not inverse.any():
        return np.power(x, y)
    # of integers, only 1 and -1 have one; their powers have the parity of the exponent
    base = np.where(inverse & (x != 1) & (x != -1), np.zeros((), x.dtype), x)
    return np.power(base, np.where(inverse, y & 1 | (base == 0), y).astype(x.dtype))


def _power_of_floats(x, y):
    result = np.power(x, y)
    if y.ndim and 0 not in y.strides:
        return result
    # an exponent of 0.5 for many elements makes NumPy take roots, which differ from powers at -0 and -inf
    half = y == 0.5
    if not half.any() or not x.size or x.min() > 0:
        return result
    result = np.where(half & (x == 0), x.dtype.type(0), result)
    return np.where(half & np.isneginf(x), x.dtype.type(np.inf), result)


def _of_complex(function):
    """A function of arrays: NumPy's of real ones, ``function`` of complex ones.

    ``function`` takes complex128 values, their real and their imaginary parts, and returns both parts.
    """
    real = getattr(np, function.__name__)

    def of_any(x):
        if not dtypes.is_complex(x.dtype):
            return real(x)
        wide = np.asarray(x, np.complex128)
        result = np.empty(wide.shape, np.complex128)
        with np.errstate(all="ignore"):
            result.real, result.imag = function(wide, wide.real, wide.imag)
            return result.astype(x.dtype)

    return of_any


@_of_complex
def expm1(z, re, im):
    """``exp(z) - 1``, accurate near 0, with the limits of C's ``cexp`` at infinities."""
    half = np.sin(0.5 * im)
    real = np.expm1(re) * np.cos(im) - 2 * half * half
    imag = np.where(im == 0, im, np.exp(re) * np.sin(im))
    real = np.where(im == 0, np.expm1(re) + 0.0, real)  # 0 of -0, as a difference of ones is
    endless = np.isinf(re) & ~np.isfinite(im)
    return np.where(endless, np.where(re < 0, -1, re), real), np.where(endless & (re < 0), 0, imag)


@_of_complex
def log1p(z, re, im):
    """``log(1 + z)``, accurate near 0."""
    near = (np.abs(re) < 0.5) & (np.abs(im) < 0.5)
    far = np.log(1 + z)
    return np.where(near, 0.5 * np.log1p(re * (2 + re) + im * im), far.real), np.arctan2(im, 1 + re)


@_of_complex
def tan(z, re, im):
    """The tangent; its zero at ``im = inf`` has the sign of ``re``."""
    ratio = np.tan(z)
    return np.where(np.isinf(im), np.copysign(0.0, re), ratio.real), ratio.imag


@_of_complex
def tanh(z, re, im):
    """The hyperbolic tangent; its zero at ``re = inf`` has the sign of ``im``."""
    ratio = np.tanh(z)
    return ratio.real, np.where(np.isinf(re), np.copysign(0.0, im), ratio.imag)


def sign(x):
    """``x / |x|``, 0 of 0, and NaN of complex numbers with a NaN part.

    Where the other part is infinite, NumPy gives its direction.
    """
    unit = np.sign(x)
    if not dtypes.is_complex(x.dtype) or not (missing := np.isnan(x)).any():
        return unit
    return np.where(missing, x.dtype.type(complex(np.nan, np.nan)), unit)


def to_integer(x, dtype):
    """Real floats as integers, toward zero, saturating, and 0 for NaN, as in XLA."""
    if dtypes.is_narrow(dtype):
        limits = dtypes.iinfo(dtype)
        x = np.asarray(x, np.float32 if x.dtype.itemsize < 4 else x.dtype)
        return to_integer(np.clip(x, limits.min, limits.max), dtypes.WIDE_OF_NARROW[dtype]).astype(dtype)
    x = np.asarray(x, np.float32 if x.dtype.itemsize < 4 else x.dtype)
    limits = np.iinfo(dtype)
    # both are powers of two, or 0, and so exact; values between -1 and 0 give 0 in any case
    low, beyond = x.dtype.type(limits.min), x.dtype.type(limits.max + 1)
    if not x.size or (x.min() >= low and x.max() < beyond):  # NaN is neither
        return x.astype(dtype)
    result = np.where((x >= low) & (x < beyond), x, 0).astype(dtype)
    result = np.where(x >= beyond, dtype.type(limits.max), result)
    return np.where(x < low, dtype.type(limits.min), result)


def convert(x, dtype):
    """``x`` as another dtype: real part of complex, ``to_integer`` for floats."""
    if dtypes.is_complex(x.dtype) and not dtypes.is_complex(dtype):
        x = (x != 0) if dtypes.is_bool(dtype) else x.real
    if dtypes.is_integer(dtype) and dtypes.is_floating(x.dtype):
        return to_integer(x, dtype)
    if _is_byte(x.dtype) and _is_byte(dtype):  # ml_dtypes converts few of these pairs
        x = x.astype(np.float32)
    return x.astype(dtype)


def _is_byte(dtype):
    return dtype in dtypes.SMALL_FLOATS or dtypes.is_narrow(dtype)


def _shift(f, arithmetic: bool):
    def impl(x, y):
        # a shift by the width or more is undefined in C: it yields 0, or the sign for arithmetic shifts
        bits = x.dtype.itemsize * 8
        wide = np.asarray(y).astype(np.uint64) >= bits
        shifted = f(x, np.where(wide, 0, y).astype(x.dtype))
        rest = np.where(x < 0, -1, 0).astype(x.dtype) if arithmetic else np.zeros_like(x)
        return np.asarray(np.where(wide, rest, shifted), x.dtype)

    return impl


def _as_unsigned(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def _logical_right(x, y):
    return np.right_shift(_as_unsigned(x), _as_unsigned(y)).view(x.dtype)


shift_left = _shift(np.left_shift, False)
shift_right_logical = _shift(_logical_right, False)
shift_right_arithmetic = _shift(np.right_shift, True)


def population_count(x):
    """The number of bits set; for signed integers NumPy counts in |x|."""
    return np.bitwise_count(_as_unsigned(x)).astype(x.dtype)


def logistic(x):
    """``1 / (1 + exp(-x))``."""
    # 1/(1+exp(-x)) overflows harmlessly: exp(-x) -> inf gives 0
    one = np.asarray(1, x.dtype)
    return one / (one + np.exp(-x))


def reduce_precision(x, *, exponent_bits, mantissa_bits):
    """``x`` rounded to fewer bits, ties to even; overflow is inf, subnormals are 0."""
    info = dtypes.finfo(x.dtype)
    unsigned = np.dtype(f"u{x.dtype.itemsize}").type
    bits = _as_unsigned(x)
    drop = info.nmant - mantissa_bits
    if drop > 0:  # a carry out of the mantissa correctly increments the exponent
        odd = (bits >> unsigned(drop)) & unsigned(1)
        bits = (bits + unsigned((1 << (drop - 1)) - 1) + odd) >> unsigned(drop) << unsigned(drop)
    if exponent_bits < info.nexp:
        exponent = (bits >> unsigned(info.nmant)) & unsigned((1 << info.nexp) - 1)
        middle, reach = (1 << (info.nexp - 1)) - 1, (1 << (exponent_bits - 1)) - 1
        sign = bits & unsigned(1 << (8 * x.dtype.itemsize - 1))
        infinite = sign | unsigned(((1 << info.nexp) - 1) << info.nmant)
        bits = np.where(exponent > middle + reach, infinite, bits)
        bits = np.where(exponent <= middle - reach, sign, bits)
    return np.where(np.isfinite(x), np.asarray(bits, unsigned).view(x.dtype), x)


def through_single(f):
    """Run a SciPy function on half-precision input in float32."""

    def impl(*xs):
        dtype = xs[0].dtype
        if dtype.itemsize <= 2 and dtypes.is_floating(dtype):
            return np.asarray(f(*[np.asarray(x, np.float32) for x in xs]), dtype)
        return f(*xs)

    return impl


erf = through_single(lambda x: scipy.special.erf(x))
erfc = through_single(lambda x: scipy.special.erfc(x))


def erf_inv(x):
    """The inverse error function."""
    if x.dtype == np.float64:
        return scipy.special.erfinv(x)
    return _erf_inv_single(np.asarray(x, np.float32)).astype(x.dtype)


def _horner(coefficients, w):
    p = np.full_like(w, coefficients[0])
    for c in coefficients[1:]:
        p = np.asarray(c, np.float32) + p * w
    return p


def _erf_inv_single(x):
    """Inverse error function in float32: M. Giles, GPU Computing Gems (2011)."""
    w = -np.log1p(-x * x)
    central = _horner(
        (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
         0.246640727, 1.50140941),
        w - np.float32(2.5),
    )  # fmt: skip
    tail = _horner(
        (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
         1.00167406, 2.83297682),
        np.sqrt(np.maximum(w, 5)) - np.float32(3),
    )  # fmt: skip
    result = np.where(w < 5, central, tail) * x
    return np.where(np.abs(x) == 1, x * np.float32(np.inf), result)
