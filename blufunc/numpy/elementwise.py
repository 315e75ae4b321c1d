"""Functions of array elements: arithmetic, elementary functions, comparison, bits.

Face over ``core.ops.elementwise``: each function promotes and broadcasts its operands and binds
primitives. Operands of one type, the usual case, go straight to the primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import special
from blufunc.core.ops.reduce import reduce_and, reduce_or
from blufunc.core.primitives.primitive import Primitive
from blufunc.numpy.promotion import (
    PYTHON_SCALARS,
    as_value,
    binary,
    binary_inexact,
    cast,
    constant,
    constant_like,
    extremum,
    inexact,
    match_shapes,
    meet,
    named,
    ordering,
    promote_dtypes,
    static_int,
    unary_inexact,
    value_of,
)

with _lazy.modules(globals()):
    from blufunc.core.ops import random_bits

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import NamedUnary, Ufunc, Unary

_BOOL = dtypes.bool_


sin = unary_inexact(ops.sin_p, "sin", "The sine of x in radians.")
cos = unary_inexact(ops.cos_p, "cos", "The cosine of x in radians.")
tan = unary_inexact(ops.tan_p, "tan", "The tangent of x in radians.")
arcsin = asin = unary_inexact(ops.asin_p, "arcsin", "The inverse sine, in [-pi/2, pi/2].")
arccos = acos = unary_inexact(ops.acos_p, "arccos", "The inverse cosine, in [0, pi].")
arctan = atan = unary_inexact(ops.atan_p, "arctan", "The inverse tangent, in [-pi/2, pi/2].")
sinh = unary_inexact(ops.sinh_p, "sinh", "The hyperbolic sine.")
cosh = unary_inexact(ops.cosh_p, "cosh", "The hyperbolic cosine.")
tanh = unary_inexact(ops.tanh_p, "tanh", "The hyperbolic tangent.")
arcsinh = asinh = unary_inexact(ops.asinh_p, "arcsinh", "The inverse hyperbolic sine.")
arccosh = acosh = unary_inexact(ops.acosh_p, "arccosh", "The inverse hyperbolic cosine.")
arctanh = atanh = unary_inexact(ops.atanh_p, "arctanh", "The inverse hyperbolic tangent.")
exp = unary_inexact(ops.exp_p, "exp", "e to the power x.")
exp2 = unary_inexact(ops.exp2_p, "exp2", "2 to the power x.")
expm1 = unary_inexact(ops.expm1_p, "expm1", "``exp(x) - 1``, accurate near 0.")
log = unary_inexact(ops.log_p, "log", "The natural logarithm.")
log1p = unary_inexact(ops.log1p_p, "log1p", "``log(1 + x)``, accurate near 0.")
sqrt = unary_inexact(ops.sqrt_p, "sqrt", "The square root; NaN of negative numbers.")
cbrt = unary_inexact(ops.cbrt_p, "cbrt", "The cube root.")

add = binary(ops.add_p, "add", "``x + y``; of booleans, their disjunction.", ops.or_p)
subtract = binary(ops.sub_p, "subtract", "``x - y``.")
divide = binary_inexact(ops.div_p, "divide", "``x / y``, also of integers.")
true_divide = divide
arctan2 = atan2 = binary_inexact(ops.atan2_p, "arctan2", "The angle of the point (y, x), in [-pi, pi].")
nextafter = binary_inexact(ops.nextafter_p, "nextafter", "The next float from x towards y.")


_multiply = ops.mul_p.bind


def multiply(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``x * y``. Elementwise, with promotion and broadcasting.

    The product of booleans is their conjunction. An array of booleans selects from floats and complex numbers: where
    it is False, the product is 0, also with infinity and NaN.
    """
    if not (isinstance(x, Array) and isinstance(y, Array) and x.aval is y.aval):
        if isinstance(x, Array):
            if x.aval.dtype is _BOOL and (value := _factor(y, x)) is not None:
                return _selected(x, value)
        elif x.__class__ not in PYTHON_SCALARS:
            return multiply(as_value(x, "multiply"), y)
        if isinstance(y, Array):
            if y.aval.dtype is _BOOL and (value := _factor(x, y)) is not None:
                return _selected(y, value)
        elif y.__class__ not in PYTHON_SCALARS:
            return multiply(x, as_value(y, "multiply"))
        x, y = meet(x, y, "multiply")
    if x.aval.dtype is _BOOL:
        return ops.and_p.bind(x, y)
    return _multiply(x, y)


multiply.__module__ = "blufunc.numpy"


def _factor(x: Any, mask: Array) -> Array | None:
    """The factor of a mask if not all of its values times 0 are 0, else None."""
    kind = PYTHON_SCALARS.get(x.__class__)
    if kind is None:
        x = as_value(x, "multiply")
        return x if dtypes.is_inexact(x.aval.dtype) else None
    return constant(x, kind[0], not mask.aval.ndim) if dtypes.is_inexact(kind[0]) else None


def _selected(mask: Array, x: Array) -> Array:
    mask, x = match_shapes("multiply", mask, x)
    return ops.select_p.bind(mask, x, constant_like(0, x))


def _comparing(prim: Primitive, of_words: Callable, name: str, doc: str) -> Ufunc:
    """A comparison of arrays, random keys among them, which compare by their words."""
    of_arrays = binary(prim, name, doc)

    def function(x: Any, y: Any, /) -> Array:
        if isinstance(x, Array) and isinstance(y, Array) and x.aval.dtype == dtypes.key == y.aval.dtype:
            words = of_arrays(*[random_bits.random_unwrap_p.bind(as_value(k, name)) for k in (x, y)])
            return of_words(words, (words.aval.ndim - 1,))
        return of_arrays(x, y)

    return named(function, name, of_arrays.__doc__ or doc)


equal = _comparing(ops.eq_p, reduce_and, "equal", "``x == y``, as bool.")
not_equal = _comparing(ops.ne_p, reduce_or, "not_equal", "``x != y``, as bool.")
less = ordering(ops.lt_p, ops.lt_p, "less", "``x < y``, as bool.")
less_equal = ordering(ops.le_p, ops.lt_p, "less_equal", "``x <= y``, as bool.")
greater = ordering(ops.gt_p, ops.gt_p, "greater", "``x > y``, as bool.")
greater_equal = ordering(ops.ge_p, ops.gt_p, "greater_equal", "``x >= y``, as bool.")
maximum = extremum(ops.max_p, greater_equal, "maximum", "The larger of x and y; NaN if either is.")
minimum = extremum(ops.min_p, less_equal, "minimum", "The smaller of x and y; NaN if either is.")

bitwise_and = binary(ops.and_p, "bitwise_and", "``x & y`` of integers or booleans.")
bitwise_or = binary(ops.or_p, "bitwise_or", "``x | y`` of integers or booleans.")
bitwise_xor = binary(ops.xor_p, "bitwise_xor", "``x ^ y`` of integers or booleans.")
left_shift = bitwise_left_shift = binary(
    ops.shift_left_p, "left_shift", "``x << y`` of integers; 0 from the width of the dtype on."
)


def right_shift(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``x >> y`` of integers, elementwise; signed ones keep their sign."""
    x, y = meet(x, y, "right_shift")
    prim = ops.shift_right_logical_p if dtypes.is_unsigned(x.aval.dtype) else ops.shift_right_arithmetic_p
    return prim.bind(x, y)


bitwise_right_shift = right_shift


# -- signs and rounding ----------------------------------------------------------------------------


def negative(x: ArrayLike, /) -> Array:
    """``-x``. Elementwise, in the dtype of x, which must be a number."""
    return ops.neg_p.bind(value_of(x, "negative"))


def positive(x: ArrayLike, /) -> Array:
    """``+x``: x itself."""
    return value_of(x, "positive")


def abs(x: ArrayLike, /) -> Array:
    """The absolute value, elementwise; of complex numbers the modulus, a real number."""
    x = value_of(x, "abs")
    if not dtypes.is_complex(x.aval.dtype):
        return x if dtypes.is_bool(x.aval.dtype) else ops.abs(x)
    size = ops.abs(x)
    return ops.select(isinf(x), constant(math.inf, size.aval.dtype), size)  # also if the other part is NaN


absolute = abs


def fabs(x: ArrayLike, /) -> Array:
    """The absolute value as a float, elementwise."""
    return ops.abs(inexact(x, "fabs"))


def sign(x: ArrayLike, /) -> Array:
    """-1, 0 or 1 by the sign of x, elementwise; complex: ``x / |x|``; NaN stays NaN."""
    return ops.sign_p.bind(value_of(x, "sign"))


def square(x: ArrayLike, /) -> Array:
    """``x * x``, elementwise."""
    x = value_of(x, "square")
    return ops.square_p.bind(cast(x, dtypes.int32) if dtypes.is_bool(x.aval.dtype) else x)


def reciprocal(x: ArrayLike, /) -> Array:
    """``1 / x``, elementwise; integers are computed in float32."""
    x = inexact(x, "reciprocal")
    return ops.div_p.bind(constant_like(1, x), x)


def _rounding(prim: Primitive, name: str, doc: str) -> NamedUnary:
    def function(x: Any) -> Array:
        x = value_of(x, name)
        return x if not dtypes.is_inexact(x.aval.dtype) else prim.bind(x)

    return named(function, name, f"{doc} Elementwise; integers are returned as they are.")


floor = _rounding(ops.floor_p, "floor", "The largest integer not above x, as a float.")
ceil = _rounding(ops.ceil_p, "ceil", "The smallest integer not below x, as a float.")
trunc = _rounding(ops.trunc_p, "trunc", "x without its fraction, as a float.")
fix = trunc
rint = unary_inexact(ops.round_p, "rint", "The nearest integer as a float, ties to even.")


def round(a: ArrayLike, decimals: int = 0, out: None = None) -> Array:
    """Round to a number of decimals, ties to even, in the dtype of ``a``.

    Integers are rounded (half to even) only where ``decimals`` is negative.
    """
    only_none("round", "out", out)
    decimals = static_int(decimals, "round", "decimals")
    x = value_of(a, "round")
    dtype = x.aval.dtype
    if not dtypes.is_inexact(dtype):
        if decimals >= 0:
            return x
        return cast(round(cast(x, dtypes.float32), decimals), dtype)
    if dtypes.is_complex(dtype):
        return ops.complex_(round(ops.real(x), decimals), round(ops.imag(x), decimals))
    if not decimals:
        return ops.round_p.bind(x)
    factor = constant(10.0 ** math.fabs(decimals), dtype, x.aval.weak_type)
    if decimals > 0:
        return ops.div_p.bind(ops.round_p.bind(ops.mul_p.bind(x, factor)), factor)
    return ops.mul_p.bind(ops.round_p.bind(ops.div_p.bind(x, factor)), factor)


around = round


def signbit(x: ArrayLike, /) -> Array:
    """Test the sign bit (set for -0.0), elementwise, as bool."""
    x = value_of(x, "signbit")
    dtype = x.aval.dtype
    if dtypes.is_floating(dtype):
        bits = dtypes.as_dtype(f"int{8 * dtype.itemsize}")
        x = ops.bitcast_p.bind(x, dtype=bits)
    return less(x, 0)


def copysign(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The magnitude of x with the sign of y, elementwise, as floats."""
    x, y = meet(x, y, "copysign", inexact=True)
    magnitude = ops.abs(x)
    return ops.select(signbit(y), ops.neg_p.bind(magnitude), magnitude)


# -- division --------------------------------------------------------------------------------------


def _signs_differ(r: Array, y: Array) -> Array:
    """True where a remainder must be moved into the interval of its divisor."""
    zero = constant(0, y.aval.dtype)
    differ = ops.ne_p.bind(ops.lt_p.bind(r, zero), ops.lt_p.bind(y, zero))
    return ops.and_p.bind(differ, ops.ne_p.bind(r, zero))


def remainder(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``x % y``, elementwise: it has the sign of y, and ``x == y * (x // y) + x % y``."""
    x, y = meet(x, y, "remainder")
    _refuse_bool("remainder", x)
    r = ops.rem_p.bind(x, y)
    if dtypes.is_unsigned(x.aval.dtype):
        return r
    differ = _signs_differ(r, y)
    if dtypes.is_integer(x.aval.dtype):
        return ops.select(differ, ops.add_p.bind(r, y), r)
    # as if y were positive, so that adding 0 makes a zero of its sign
    zero = constant_like(0, y)
    mirrored = ops.lt_p.bind(y, zero)
    r, size = (ops.select(mirrored, ops.neg_p.bind(v), v) for v in match_shapes("remainder", r, y))
    r = ops.add_p.bind(r, ops.select(differ, size, zero))
    return ops.select(mirrored, ops.neg_p.bind(r), r)


mod = remainder


def fmod(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The remainder that has the sign of x, as in C, elementwise."""
    x, y = meet(x, y, "fmod")
    return ops.rem_p.bind(x, y)


def floor_divide(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``x // y``, elementwise, rounded down, in the promoted dtype."""
    x, y = meet(x, y, "floor_divide")
    _refuse_bool("floor_divide", x)
    dtype = x.aval.dtype
    if dtypes.is_unsigned(dtype):
        return ops.div_p.bind(x, y)
    one = constant_like(1, x)
    if dtypes.is_integer(dtype):
        q = ops.div_p.bind(x, y)
        r = ops.sub_p.bind(x, ops.mul_p.bind(q, y))
        return ops.select(_signs_differ(r, y), ops.sub_p.bind(q, one), q)
    # floor(x / y) would be wrong where the rounded quotient reaches the next integer: 1.0 // 0.1 is 9
    r = ops.rem_p.bind(x, y)
    q = ops.div_p.bind(ops.sub_p.bind(x, r), y)
    q = ops.round_p.bind(ops.select(_signs_differ(r, y), ops.sub_p.bind(q, one), q))
    zero, quotient = constant_like(0, x), ops.div_p.bind(x, y)
    signed_zero = ops.select(signbit(quotient), constant_like(-0.0, x), zero)
    return ops.select(ops.eq_p.bind(y, zero), quotient, ops.select(ops.eq_p.bind(q, zero), signed_zero, q))


def divmod(x: ArrayLike, y: ArrayLike, /) -> tuple[Array, Array]:
    """``(x // y, x % y)``, elementwise."""
    x, y = meet(x, y, "divmod")
    return floor_divide(x, y), remainder(x, y)


def _refuse_bool(name: str, x: Array) -> None:
    if dtypes.is_bool(x.aval.dtype):
        raise errors.DtypeError(
            f"{name} of booleans has no meaning.", where=source.here(), fix="convert first: x.astype('int32')"
        )


# -- powers ----------------------------------------------------------------------------------------


def power(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``x ** y``, elementwise; integers to integer powers stay integers.

    A Python int as exponent is static: small powers are products, and the derivative is defined at 0.
    Integers to a negative power raise an error where the power is a Python int; where it comes in an array,
    the result is the real number rounded toward zero: 0, but of 1 and -1, whose powers are 1 and -1. Of 0 it is 0.
    """
    if y.__class__ is int and y < 0 and x.__class__ in (int, bool):
        raise errors.ValueRangeError(
            f"power: the integer {x} cannot be raised to the negative power {y}.",
            where=source.here(),
            fix="use floats",
        )
    if y.__class__ is int and x.__class__ not in PYTHON_SCALARS:
        x = as_value(x, "power")
        if dtypes.is_bool(x.aval.dtype):
            x = cast(x, dtypes.int32)
        return x if y == 1 else ops.integer_pow(x, y)
    x, y = meet(x, y, "power")
    if dtypes.is_bool(x.aval.dtype):
        x, y = cast(x, dtypes.int32), cast(y, dtypes.int32)
    return ops.pow_p.bind(x, y)


pow = power


def float_power(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``x ** y`` as a float, elementwise."""
    x, y = meet(x, y, "float_power", inexact=True)
    return ops.pow_p.bind(x, y)


def hypot(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``sqrt(x**2 + y**2)`` without intermediate overflow, elementwise, as floats.

    It is infinite where one of them is, even if the other is NaN.
    """
    x, y = meet(x, y, "hypot", inexact=True)
    if dtypes.is_complex(x.aval.dtype):
        raise errors.DtypeError(
            "hypot of complex numbers has no meaning.", where=source.here(), fix="bnp.hypot(abs(x), abs(y))"
        )
    return special.hypot_p.bind(x, y)


# -- composite logarithms and exponentials ----------------------------------------------------------


def log2(x: ArrayLike, /) -> Array:
    """The logarithm to base 2, elementwise, as a float."""
    x = inexact(x, "log2")
    return ops.div_p.bind(ops.log_p.bind(x), constant_like(math.log(2), x))


def log10(x: ArrayLike, /) -> Array:
    """The logarithm to base 10, elementwise, as a float."""
    x = inexact(x, "log10")
    return ops.div_p.bind(ops.log_p.bind(x), constant_like(math.log(10), x))


def logaddexp(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``log(exp(x) + exp(y))`` without overflow, elementwise, as floats."""
    x, y = meet(x, y, "logaddexp", inexact=True)
    return special.logaddexp_p.bind(x, y)


def logaddexp2(x: ArrayLike, y: ArrayLike, /) -> Array:
    """``log2(2**x + 2**y)`` without overflow, elementwise, as floats."""
    x, y = meet(x, y, "logaddexp2", inexact=True)
    ln2 = constant_like(math.log(2), x)
    return ops.div_p.bind(logaddexp(ops.mul_p.bind(x, ln2), ops.mul_p.bind(y, ln2)), ln2)


def sinc(x: ArrayLike, /) -> Array:
    """``sin(pi x) / (pi x)``, and 1 at 0, elementwise, as a float."""
    x = inexact(x, "sinc")
    pi_x = ops.mul_p.bind(x, constant_like(math.pi, x))
    # near 0 by its series, of which every derivative is right
    size = ops.abs(pi_x)
    near = ops.lt(size, constant(0.3, size.aval.dtype))
    safe = ops.select(near, constant_like(1, x), pi_x)
    squared = ops.square_p.bind(ops.select(near, pi_x, constant_like(0, x)))
    series = constant_like(0, x)
    for k in range(7, -1, -1):
        term = constant_like((-1) ** k / math.factorial(2 * k + 1), x)
        series = ops.add_p.bind(ops.mul_p.bind(series, squared), term)
    return ops.select(near, series, ops.div_p.bind(ops.sin_p.bind(safe), safe))


def deg2rad(x: ArrayLike, /) -> Array:
    """Degrees to radians, elementwise, as a float."""
    return multiply(inexact(x, "deg2rad"), math.pi / 180)


def rad2deg(x: ArrayLike, /) -> Array:
    """Radians to degrees, elementwise, as a float."""
    return multiply(inexact(x, "rad2deg"), 180 / math.pi)


radians, degrees = deg2rad, rad2deg


def heaviside(x: ArrayLike, y: ArrayLike, /) -> Array:
    """0 where x is negative, 1 where positive, y where it is 0, as floats."""
    x, y = meet(x, y, "heaviside", inexact=True)
    zero, one = constant_like(0, x), constant_like(1, x)
    step = ops.select(ops.lt_p.bind(x, zero), zero, ops.select(ops.gt_p.bind(x, zero), one, x))
    return ops.select(ops.eq_p.bind(x, zero), y, step)


# -- complex numbers -------------------------------------------------------------------------------


def real(x: ArrayLike, /) -> Array:
    """The real part, elementwise; x itself if it is real."""
    return ops.real(value_of(x, "real"))


def imag(x: ArrayLike, /) -> Array:
    """The imaginary part, elementwise; zeros if x is real."""
    x = value_of(x, "imag")
    return ops.imag_p.bind(x) if dtypes.is_complex(x.aval.dtype) else ops.weak_as(ops.zeros_like(x), x)


def conj(x: ArrayLike, /) -> Array:
    """The complex conjugate, elementwise; x itself if it is real."""
    return ops.conj(value_of(x, "conj"))


conjugate = conj


def angle(z: ArrayLike, deg: bool = False) -> Array:
    """The argument of complex numbers in radians or degrees; real: 0 or pi (-0.0 too)."""
    x = inexact(z, "angle")
    if dtypes.is_complex(x.aval.dtype):
        result = ops.atan2(ops.imag(x), ops.real(x))
    else:
        zero = constant(0, x.aval.dtype)
        result = ops.select(signbit(x), constant(math.pi, x.aval.dtype), zero)
        result = ops.select(isnan(x), x, result)
    return rad2deg(result) if deg else result


# -- tests -----------------------------------------------------------------------------------------


def _real_test(name: str, doc: str, test: Callable[[Array], Array], otherwise: bool) -> Unary:
    def function(x: Any, /) -> Array:
        x = value_of(x, name)
        dtype = x.aval.dtype
        if dtypes.is_complex(dtype):
            combine = ops.and_p if otherwise else ops.or_p
            return combine.bind(function(ops.real(x)), function(ops.imag(x)))
        if not dtypes.is_inexact(dtype):
            return ops.full(x.aval.shape, otherwise, _BOOL)
        return test(x)

    return named(function, name, f"{doc} Elementwise, as bool.")


isfinite = _real_test("isfinite", "Whether x is neither infinite nor NaN.", ops.is_finite, True)
isnan = _real_test("isnan", "Whether x is NaN.", lambda x: ops.ne_p.bind(x, x), False)
isinf = _real_test(
    "isinf",
    "Whether x is infinite.",
    lambda x: ops.eq_p.bind(ops.abs(x), constant(math.inf, x.aval.dtype)),
    False,
)


def isposinf(x: ArrayLike, /, out: None = None) -> Array:
    """Test for plus infinity, elementwise, as bool."""
    only_none("isposinf", "out", out)
    x = inexact(x, "isposinf")
    return ops.eq_p.bind(x, constant(math.inf, x.aval.dtype))


def isneginf(x: ArrayLike, /, out: None = None) -> Array:
    """Test for minus infinity, elementwise, as bool."""
    only_none("isneginf", "out", out)
    x = inexact(x, "isneginf")
    return ops.eq_p.bind(x, constant(-math.inf, x.aval.dtype))


def isreal(x: ArrayLike) -> Array:
    """Test for imaginary part 0, elementwise, as bool."""
    return equal(imag(x), 0)


def iscomplex(x: ArrayLike) -> Array:
    """Test for nonzero imaginary part, elementwise, as bool."""
    return not_equal(imag(x), 0)


def fmax(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The larger of ``x1`` and ``x2``, elementwise; NaN only where both are."""
    x, y = meet(x1, x2, "fmax")
    return ops.select(ops.or_p.bind(greater(x, y), isnan(y)), *match_shapes("fmax", x, y))


def fmin(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The smaller of ``x1`` and ``x2``, elementwise; NaN only where both are."""
    x, y = meet(x1, x2, "fmin")
    return ops.select(ops.or_p.bind(less(x, y), isnan(y)), *match_shapes("fmin", x, y))


def nan_to_num(
    x: ArrayLike,
    copy: bool = True,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Array:
    """Replace NaN (by 0) and infinities (by the largest finite numbers).

    ``copy`` has no effect: arrays are immutable.
    """
    x = value_of(x, "nan_to_num")
    dtype = x.aval.dtype
    if not dtypes.is_inexact(dtype):
        return x
    if dtypes.is_complex(dtype):
        return ops.complex_(
            *[nan_to_num(part, copy, nan, posinf, neginf) for part in (ops.real(x), ops.imag(x))]
        )
    info = dtypes.finfo(dtype)
    high = float(info.max) if posinf is None else posinf
    low = float(info.min) if neginf is None else neginf
    for number in (nan, high, low):
        if not isinstance(number, (bool, int, float, np.number)):
            raise errors.ArgumentError(
                f"nan_to_num replaces by Python numbers, not {number!r:.60}.",
                where=source.here(),
                fix="for arrays: bnp.where(bnp.isnan(x), y, x)",
            )
    x = ops.select(isnan(x), constant(float(nan), dtype), x)
    x = ops.select(isposinf(x), constant(high, dtype), x)
    return ops.select(isneginf(x), constant(low, dtype), x)


# -- logic and bits --------------------------------------------------------------------------------


def truth(x: Any, name: str) -> Array:
    """x as booleans: whether it is not 0."""
    x = value_of(x, name)
    dtype = x.aval.dtype
    return x if dtypes.is_bool(dtype) else ops.ne_p.bind(x, constant(0, dtype))


def _logical(prim: Primitive, name: str, doc: str) -> Ufunc:
    def function(x: Any, y: Any, /) -> Array:
        return prim.bind(*match_shapes(name, truth(x, name), truth(y, name)))

    return named(function, name, f"{doc} Elementwise, with broadcasting; numbers are true unless 0.")


logical_and = _logical(ops.and_p, "logical_and", "Whether both x and y are true.")
logical_or = _logical(ops.or_p, "logical_or", "Whether x or y is true.")
logical_xor = _logical(ops.xor_p, "logical_xor", "Whether exactly one of x and y is true.")


def logical_not(x: ArrayLike, /) -> Array:
    """Test for false (0), elementwise, as bool."""
    return ops.not_p.bind(truth(x, "logical_not"))


def bitwise_not(x: ArrayLike, /) -> Array:
    """``~x``: all bits of integers inverted, booleans negated."""
    return ops.not_p.bind(value_of(x, "bitwise_not"))


invert = bitwise_invert = bitwise_not


def bitwise_count(x: ArrayLike, /) -> Array:
    """The number of bits set in the absolute value of integers, elementwise, as uint8."""
    x = value_of(x, "bitwise_count")
    return ops.convert(ops.population_count_p.bind(ops.abs(x)), dtypes.uint8)


# -- choice ----------------------------------------------------------------------------------------


def choose(condition: Any, x: Any, y: Any) -> Array:
    """``x`` where ``condition`` holds, else ``y``: ``where`` of three operands."""
    pred, x, y = match_shapes("where", truth(condition, "where"), *promote_dtypes("where", x, y))
    return ops.select_p.bind(pred, x, y)


def clip(x: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Array:
    """Limit x to [min, max], elementwise; None leaves a side open."""
    bounds = [b for b in (min, max) if b is not None]
    if not bounds:
        return value_of(x, "clip")
    operands = match_shapes("clip", *promote_dtypes("clip", x, *bounds))
    x = operands[0]
    # not clamp, whose derivative at the ends is 0: here x and the bound share it
    if min is not None:
        x = ops.max_p.bind(x, operands[1])
    return x if max is None else ops.min_p.bind(x, operands[-1])


# -- methods of ufuncs ------------------------------------------------------------------------------


IDENTITIES: dict[Callable, Any] = {
    add: 0,
    multiply: 1,
    subtract: None,
    maximum: None,
    minimum: None,
    bitwise_and: -1,
    bitwise_or: 0,
    bitwise_xor: 0,
    logical_and: True,
    logical_or: False,
    logical_xor: False,
    logaddexp: -math.inf,
    logaddexp2: -math.inf,
}
"""The functions of two operands that are ``ufunc``s, with their identities."""
