"""Elementwise operations: each with its NumPy definition and its derivatives.

Core operations, above ``numerics``, which supplies functions that NumPy lacks or defines differently.
Functions here are strict: operands of one dtype, equal shapes or rank 0; Python scalars take the dtype of the
other operand. ``blufunc.numpy`` adds promotion and broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import numerics
from blufunc.core.primitives.c_form import CForm, arithmetic, bitwise, call, comparison, same
from blufunc.core.primitives.kinds import C_FORMS, Elementwise
from blufunc.core.primitives.linear_ops import add_any, broadcast_to, full, move_dim, zeros
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import Factoring
from blufunc.core.primitives.tangents import Zero, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import NamedBinary, NamedUnary

_FIRST, _EITHER, _BOTH = [{0}], [{0}, {1}], [{0, 1}]  # groups of operands in which an operation is linear

_PY_SCALARS = (bool, int, float, complex)


def operand(x: Any, like: Any) -> Any:
    """``x`` as a value; a Python scalar becomes a constant of the type of ``like``."""
    if isinstance(x, Array):
        return x
    if isinstance(x, _PY_SCALARS) and isinstance(like, Array):
        dtype = like.aval.dtype
        exact = isinstance(x, int) or dtypes.is_inexact(dtype)
        if not exact or (isinstance(x, complex) and not dtypes.is_complex(dtype)):
            raise errors.DtypeError(
                f"the Python scalar {x!r} does not fit {like.aval}.",
                where=source.here(),
                fix="convert one of them first",
            )
        return scalar(x, dtype, like.aval.weak_type)
    return lift(x)


def binary(prim: Primitive, x: Any, y: Any) -> Any:
    """Bind a primitive of two operands; of those of one rank, axes of size 1 stretch."""
    if not isinstance(x, Array):
        x = operand(x, y)
    if not isinstance(y, Array):
        y = operand(y, x)
    a, b = x.aval, y.aval
    if a is not b and a.ndim == b.ndim and a.shape != b.shape:
        x, y = stretched(x, y)
    return prim.bind(x, y)


def stretched(*xs: Any) -> tuple[Any, ...]:
    """Values of one rank, or 0, with axes of size 1 repeated to those of the others.

    Where sizes do not fit they are left as they are, for the primitive to refuse.
    """
    shapes = [x.aval.shape for x in xs if x.aval.shape]
    if len({len(s) for s in shapes}) != 1:
        return xs
    sizes = [{*of_axis} - {1} or {1} for of_axis in zip(*shapes, strict=True)]
    if any(len(s) > 1 for s in sizes):
        return xs
    shape = tuple([next(iter(s)) for s in sizes])
    return tuple([broadcast_to(x, shape) if x.aval.shape else x for x in xs])


# -- families ----------------------------------------------------------------------------------------


class _Mended(Elementwise):
    """The ufunc ``numpy``, except for dtypes of which ``unless`` is true."""

    def __init__(self, name, impl, *args, numpy: np.ufunc, unless: Callable[[np.dtype], bool], **kwargs):
        super().__init__(name, impl, *args, **kwargs)
        self._numpy, self._unless = numpy, unless
        C_FORMS[numpy] = self

    def ufunc_for(self, dtype):
        return None if self._unless(dtype) else self._numpy


def _function(
    name: str,
    impl: Callable,
    deriv: Callable | None,
    kinds: str = "fc",
    *,
    autocast: str = "float32",
    cost: int = 1,
    exact: bool = False,
    out: np.dtype | None = None,
    numpy: np.ufunc | None = None,
) -> Elementwise:
    """A floating-point function of one operand; kernels call ``bf_<name>``.

    ``numpy`` is the ufunc that implements it for all but complex numbers, if ``impl`` is none.
    """
    types = "inexact" if "c" in kinds else "float"
    lower = call(name, kinds, exact=exact)
    args = (name, impl, types, [deriv])
    if numpy is None:
        return Elementwise(*args, out=out, lower=lower, autocast=autocast, cost=cost)
    unless = dtypes.is_complex
    return _Mended(*args, out=out, lower=lower, autocast=autocast, cost=cost, numpy=numpy, unless=unless)


def _extremum(name: str, ufunc: np.ufunc, bit_op: str) -> Elementwise:
    """``max`` or ``min``; ``bit_op`` is the one of booleans."""
    number, boolean = f"bf_{name}({{0}}, {{1}})", f"bool({{0}} {bit_op} {{1}})"
    form = CForm({"f": number, "i": number, "b": boolean}, exact=True)
    derivs = [_maximum_deriv(True), _maximum_deriv(False)]
    return Elementwise(name, ufunc, "ordered", derivs, lower=form, autocast="widest")


def _comparison(name: str, ufunc: np.ufunc, op: str, types: str = "ordered") -> Elementwise:
    form = comparison(op, "bif" if types == "ordered" else "bifc")
    return Elementwise(name, ufunc, types, [None, None], out=dtypes.bool_, lower=form, autocast="widest")


def _shift(name: str, impl: Callable) -> Elementwise:
    return Elementwise(name, impl, "integer", [None, None], lower=call(name, "i", 2))


# -- arithmetic ------------------------------------------------------------------------------------


class _Div(_Mended):
    """Division: linear in its dividend, but for integers."""

    def linear_in(self, avals, outs, **params):
        return self.linear if dtypes.is_inexact(outs[0].dtype) else ()


def _pow_deriv_x(t, ans, x, y):
    # 0 * 0**-1 is NaN where the derivative of x**0 is 0; at other x the exponent must be unchanged
    corner = logical_and(eq(x, zeros_of(x)), eq(y, zeros_of(y)))
    safe = select(corner, ones_of(y), y)
    return mul(t, mul(y, pow(x, sub(safe, ones_of(y)))))


def _pow_deriv_y(t, ans, x, y):
    # the limit x -> 0 of x**y log x is 0 for y > 0, and log 0 is -inf: guard the product
    log_x = log(select(eq(x, zeros_of(x)), ones_of(x), x))
    return mul(t, mul(log_x, ans))


def _maximum_deriv(choose_x):
    def deriv(t, ans, x, y):
        # ties get half each: the symmetric subgradient
        mine, other = (x, y) if choose_x else (y, x)
        half = select(eq(mine, other), full((), 0.5, ans.dtype), full((), 1.0, ans.dtype))
        return mul(t, select(eq(mine, ans), half, full((), 0.0, ans.dtype)))

    return deriv


neg_p = Elementwise(
    "neg",
    np.negative,
    "number",
    [lambda t, ans, x: neg(t)],
    [lambda ct, x: neg(ct)],
    lower=CForm({"f": "-{0}", "c": "-{0}", "i": "{T}({U}(0) - {U}({0}))"}, exact=True),
    linear=_FIRST,
    autocast="widest",
)
add_p = Elementwise(
    "add",
    np.add,
    "number",
    [lambda t, ans, x, y: t, lambda t, ans, x, y: t],
    [lambda ct, x, y: ct, lambda ct, x, y: ct],
    lower=arithmetic("+"),
    linear=_BOTH,
    autocast="widest",
)
sub_p = Elementwise(
    "sub",
    np.subtract,
    "number",
    [lambda t, ans, x, y: t, lambda t, ans, x, y: neg(t)],
    [lambda ct, x, y: ct, lambda ct, x, y: neg(ct)],
    lower=arithmetic("-"),
    linear=_BOTH,
    autocast="float32",
)
mul_p = Elementwise(
    "mul",
    np.multiply,
    "number",
    [lambda t, ans, x, y: mul(t, y), lambda t, ans, x, y: mul(x, t)],
    [lambda ct, x, y: mul(ct, y), lambda ct, x, y: mul(x, ct)],
    lower=arithmetic("*"),
    linear=_EITHER,
    autocast="widest",
)
div_p = _Div(
    "div",
    numerics.divide,
    "number",
    [lambda t, ans, x, y: div(t, y), lambda t, ans, x, y: mul(neg(t), div(ans, y))],
    [lambda ct, x, y: div(ct, y), None],
    lower=CForm({"f": "{0} / {1}", "c": "{0} / {1}", "i": "bf_div({0}, {1})"}),
    linear=_FIRST,
    autocast="widest",
    cost=4,
    numpy=np.true_divide,
    unless=dtypes.is_integer,
)
rem_p = Elementwise(
    "rem",
    np.fmod,
    "real",
    [lambda t, ans, x, y: t, lambda t, ans, x, y: mul(neg(t), trunc(div(x, y)))],
    lower=call("rem", "fi", 2),
    autocast="widest",
    cost=4,
)
max_p = _extremum("max", np.maximum, "|")
min_p = _extremum("min", np.minimum, "&")
pow_p = _Mended(
    "pow",
    numerics.power,
    "number",
    [_pow_deriv_x, _pow_deriv_y],
    lower=CForm({**dict.fromkeys("fc", "bf_pow({0}, {1})"), "i": "bf_pow_integers({0}, {1})"}),
    autocast="float32",
    cost=20,
    numpy=np.power,
    unless=lambda dtype: not dtypes.is_complex(dtype),
)
atan2_p = Elementwise(
    "atan2",
    np.arctan2,
    "float",
    [
        lambda t, ans, x, y: mul(t, div(y, add(square(x), square(y)))),
        lambda t, ans, x, y: mul(t, div(neg(x), add(square(x), square(y)))),
    ],
    lower=call("atan2", "f", 2),
    autocast="float32",
    cost=12,
)
nextafter_p = Elementwise(
    "nextafter",
    np.nextafter,
    "float",
    [None, None],
    lower=CForm({"f": "bf_nextafter({0}, {1})"}, stored=True),
    cost=20,
)
# the symmetric derivative at 0: compositions such as exp(-|x - y|) rely on it
abs_p = Elementwise(
    "abs",
    np.abs,
    "real",
    [lambda t, ans, x: mul(t, sign(x))],
    lower=call("abs", "fi", exact=True),
    autocast="widest",
)
sign_p = _Mended(
    "sign",
    numerics.sign,
    "number",
    [None],
    lower=call("sign", "fic", exact=True),
    autocast="widest",
    numpy=np.sign,
    unless=dtypes.is_complex,
)
square_p = Elementwise(
    "square",
    np.square,
    "number",
    [lambda t, ans, x: mul(t, mul(x, 2))],
    lower=CForm({"f": "{0} * {0}", "c": "{0} * {0}", "i": "{T}({U}({0}) * {U}({0}))"}),
    autocast="float32",
)
sqrt_p = _function("sqrt", np.sqrt, lambda t, ans, x: mul(t, div(ones_of(ans), mul(ans, 2))), cost=4)
rsqrt_p = _function(
    "rsqrt",
    lambda x: np.asarray(1, x.dtype) / np.sqrt(x),
    lambda t, ans, x: mul(t, mul(div(ans, x), -0.5)),
    cost=4,
)
cbrt_p = _function("cbrt", np.cbrt, lambda t, ans, x: div(t, mul(square(ans), 3)), "f", cost=12)


class _IntegerPow(Elementwise):
    """x to a static integer power: cheaper and defined on more than ``pow``."""

    def __init__(self):
        super().__init__(
            "integer_pow",
            None,
            "number",
            [self._deriv],
            lower=CForm(special="integer_pow", repeats=True),
            autocast="float32",
        )

    def impl(self, x, *, y):
        if y == 2:
            return np.square(x)
        if y == 3:
            return x * np.square(x)
        if y >= 0 or not dtypes.is_integer(x.dtype):
            return np.asarray(np.power(x, np.asarray(y, x.dtype) if y >= 0 else float(y)), x.dtype)
        raise errors.ValueRangeError("integers cannot be raised to negative powers.")

    def abstract(self, x, *, y):
        if y < 0 and dtypes.is_integer(x.dtype):
            raise errors.ValueRangeError(
                f"integers ({x}) cannot be raised to the negative power {y}.", fix="use floats"
            )
        return super().abstract(x, y=y)

    @staticmethod
    def _deriv(t, ans, x, *, y):
        return mul(t, zeros_of(x)) if y == 0 else mul(t, mul(integer_pow(x, y - 1), y))


integer_pow_p = _IntegerPow()

# -- exponentials, trigonometry, special functions -------------------------------------------------


_TWO_OVER_ROOT_PI = 1.1283791670955126
_ROOT_PI_OVER_TWO = 0.8862269254527580


def _bell(t, x, factor):
    return mul(t, mul(exp(neg(square(x))), factor))


exp_p = _function("exp", np.exp, lambda t, ans, x: mul(t, ans), cost=8)
exp2_p = _function("exp2", np.exp2, lambda t, ans, x: mul(t, mul(ans, 0.6931471805599453)), "f", cost=8)
expm1_p = _function("expm1", numerics.expm1, lambda t, ans, x: mul(t, add(ans, 1)), cost=8, numpy=np.expm1)
log_p = _function("log", np.log, lambda t, ans, x: div(t, x), cost=8)
log1p_p = _function("log1p", numerics.log1p, lambda t, ans, x: div(t, add(x, 1)), cost=8, numpy=np.log1p)
logistic_p = _function(
    "logistic", numerics.logistic, lambda t, ans, x: mul(t, mul(ans, sub(1, ans))), autocast="widest", cost=8
)
sin_p = _function("sin", np.sin, lambda t, ans, x: mul(t, cos(x)), autocast="widest", cost=8)
cos_p = _function("cos", np.cos, lambda t, ans, x: mul(t, neg(sin(x))), autocast="widest", cost=8)
tan_p = _function("tan", numerics.tan, lambda t, ans, x: mul(t, add(square(ans), 1)), cost=12, numpy=np.tan)
asin_p = _function("asin", np.arcsin, lambda t, ans, x: mul(t, rsqrt(sub(1, square(x)))), cost=12)
acos_p = _function("acos", np.arccos, lambda t, ans, x: mul(t, neg(rsqrt(sub(1, square(x))))), cost=12)
atan_p = _function("atan", np.arctan, lambda t, ans, x: div(t, add(square(x), 1)), cost=12)
sinh_p = _function("sinh", np.sinh, lambda t, ans, x: mul(t, cosh(x)), cost=12)
cosh_p = _function("cosh", np.cosh, lambda t, ans, x: mul(t, sinh(x)), cost=12)
tanh_p = _function(
    "tanh",
    numerics.tanh,
    lambda t, ans, x: mul(t, sub(1, square(ans))),
    autocast="widest",
    cost=8,
    numpy=np.tanh,
)
asinh_p = _function("asinh", np.arcsinh, lambda t, ans, x: mul(t, rsqrt(add(square(x), 1))), cost=20)
acosh_p = _function(
    "acosh", np.arccosh, lambda t, ans, x: mul(t, mul(rsqrt(sub(x, 1)), rsqrt(add(x, 1)))), cost=20
)
atanh_p = _function("atanh", np.arctanh, lambda t, ans, x: div(t, sub(1, square(x))), cost=20)
erf_p = _function(
    "erf", numerics.erf, lambda t, ans, x: _bell(t, x, _TWO_OVER_ROOT_PI), "f", autocast="widest", cost=12
)
erfc_p = _function("erfc", numerics.erfc, lambda t, ans, x: _bell(t, x, -_TWO_OVER_ROOT_PI), "f", cost=20)
erf_inv_p = _function(
    "erf_inv",
    numerics.erf_inv,
    lambda t, ans, x: mul(t, mul(exp(square(ans)), _ROOT_PI_OVER_TWO)),
    "f",
    cost=20,
)

# -- rounding, tests, bits -------------------------------------------------------------------------

floor_p = _function("floor", np.floor, None, "f", autocast="widest", exact=True)
ceil_p = _function("ceil", np.ceil, None, "f", autocast="widest", exact=True)
trunc_p = _function("trunc", np.trunc, None, "f", autocast="widest", exact=True)
round_p = _function("round", np.rint, None, "f", autocast="widest", exact=True)
reduce_precision_p = Elementwise(
    "reduce_precision",
    numerics.reduce_precision,
    "float",
    [lambda t, ans, x, **bits: reduce_precision_p.bind(t, **bits)],
    [lambda ct, x, **bits: reduce_precision_p.bind(ct, **bits)],
    lower=CForm({"f": "bf_reduce_precision({0}, {exponent_bits}, {mantissa_bits})"}, stored=True),
)
is_finite_p = _function("is_finite", np.isfinite, None, autocast="widest", out=dtypes.bool_)

eq_p = _comparison("eq", np.equal, "==", "numeric")
ne_p = _comparison("ne", np.not_equal, "!=", "numeric")
lt_p = _comparison("lt", np.less, "<")
le_p = _comparison("le", np.less_equal, "<=")
gt_p = _comparison("gt", np.greater, ">")
ge_p = _comparison("ge", np.greater_equal, ">=")

not_p = Elementwise("not", np.invert, "bits", [None], lower=CForm({"i": "{T}(~{0})", "b": "!{0}"}))
and_p = Elementwise("and", np.bitwise_and, "bits", [None, None], lower=bitwise("&"))
or_p = Elementwise("or", np.bitwise_or, "bits", [None, None], lower=bitwise("|"))
xor_p = Elementwise("xor", np.bitwise_xor, "bits", [None, None], lower=bitwise("^"))
shift_left_p = _shift("shift_left", numerics.shift_left)
shift_right_logical_p = _shift("shift_right_logical", numerics.shift_right_logical)
shift_right_arithmetic_p = _shift("shift_right_arithmetic", numerics.shift_right_arithmetic)
population_count_p = Elementwise(
    "population_count", numerics.population_count, "integer", [None], lower=call("population_count", "i")
)

# -- choice, conversion, identity ------------------------------------------------------------------


class _Select(Elementwise):
    """``where(predicate, on_true, on_false)``: boolean predicate, cases of one dtype."""

    widens = False

    def __init__(self):
        on_true = lambda ct, p, x, y: select(p, ct, zeros_of(ct))
        on_false = lambda ct, p, x, y: select(p, zeros_of(ct), ct)
        super().__init__(
            "select",
            np.where,
            "any",
            transposes=(None, on_true, on_false),
            lower=same("{0} ? {1} : {2}", "bifck", exact=True),
            linear=[{1, 2}],
            autocast="widest",
        )

    def abstract(self, pred, x, y):
        if not dtypes.is_bool(pred.dtype):
            raise errors.DtypeError(
                f"select takes a boolean predicate, not {pred}.", fix="compare first: x != 0"
            )
        out = super().abstract(x, y)
        shape = pred.shape or out.shape
        if out.shape and out.shape != shape:
            raise errors.ShapeError(f"select: the predicate is {pred}, the cases are {x} and {y}.")
        return ShapedArray(shape, out.dtype, out.weak_type)

    def jvp(self, primals, tangents):
        pred, x, y = primals
        _, tx, ty = tangents
        out = select(*primals)
        if tx.__class__ is Zero and ty.__class__ is Zero:
            return out, zero(out.aval)
        nil = full((), 0, out.dtype)
        tx, ty = (nil if t.__class__ is Zero else t for t in (tx, ty))
        return out, select(pred, tx, ty)


class _Convert(Elementwise):
    """Dtype conversion: floats truncate to integers, complex loses the imaginary part.

    Floats beyond an integer dtype saturate, and NaN becomes 0.

    ``weak`` (present only if true) keeps the result weakly typed: a Python scalar changing its kind.
    """

    fresh = widens = False

    def __init__(self):
        super().__init__("convert", None, "any", lower=CForm(special="convert", repeats=True), linear=_FIRST)

    def impl(self, x, *, dtype, weak=False):
        return x if x.dtype == dtype else numerics.convert(x, dtype)

    def linear_in(self, avals, outs, **params):
        (x,), (out,) = avals, outs
        # rounding terms to integers changes their sum
        both_integers = dtypes.is_integer(x.dtype) and dtypes.is_integer(out.dtype)
        return self.linear if dtypes.is_inexact(out.dtype) or both_integers else ()

    def abstract(self, x, *, dtype, weak=False):
        if dtypes.is_key(x.dtype) or dtypes.is_key(dtype):
            raise errors.DtypeError(f"a {x} cannot be converted to {dtypes.short_name(dtype)}: keys are opaque.",
                                    fix="use random.key_data and random.wrap_key_data")  # fmt: skip
        return ShapedArray(x.shape, dtype, weak)

    def jvp(self, primals, tangents, *, dtype, **weak):
        (x,), (t,) = primals, tangents
        out = convert_p.bind(x, dtype=dtype, **weak)
        if t.__class__ is Zero or not dtypes.is_inexact(dtype):
            return out, zero(out.aval)
        return out, convert_p.bind(t, dtype=dtype, **weak)

    def transpose(self, ct, x, *, dtype, **weak):
        x.add(convert_p.bind(ct, dtype=x.aval.dtype))


class _Bitcast(Elementwise):
    """The same bits as another dtype; narrower adds a last axis, wider drops it."""

    fresh = widens = False

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(avals[0].shape[: outs[0].ndim])  # to another width it adds or removes a last dimension
        return b.rule(*[[[*dims, *[()] * (a.ndim - len(dims))]] for a in (avals[0], outs[0])])

    def __init__(self):
        super().__init__("bitcast", None, "any", [None], lower=CForm(special="bitcast"), cost=0)

    def impl(self, x, *, dtype):
        if x.dtype.itemsize == dtype.itemsize:
            return np.asarray(x).view(dtype)
        if x.dtype.itemsize > dtype.itemsize:
            return np.ascontiguousarray(x).reshape(*x.shape, 1).view(dtype)
        return np.ascontiguousarray(x).view(dtype)[..., 0]

    def abstract(self, x, *, dtype):
        size, new = x.dtype.itemsize, dtype.itemsize
        bits, new_bits = dtypes.bits_of(x.dtype), dtypes.bits_of(dtype)
        if bits != new_bits and (bits < 8 or new_bits < 8):
            raise errors.DtypeError(
                f"cannot bitcast {x} to {dtypes.short_name(dtype)}: numbers of 2 and 4 bits are not packed into bytes.",
                fix="shift and mask the bits, then convert with .astype",
            )
        if dtypes.is_bool(x.dtype) != dtypes.is_bool(dtype) or (
            size != new and (dtypes.is_key(x.dtype) or dtypes.is_key(dtype))
        ):
            raise errors.DtypeError(f"cannot bitcast {x} to {dtypes.short_name(dtype)}.",
                                    fix="convert with .astype, or use random.key_data")  # fmt: skip
        if size >= new:
            return ShapedArray(x.shape if size == new else (*x.shape, size // new), dtype)
        if not x.ndim or x.shape[-1] != new // size:
            raise errors.ShapeError(
                f"bitcast of {x} to {dtypes.short_name(dtype)}, which is wider, needs a last axis of {new // size}.",
                fix="reshape it first, or convert with .astype",
            )
        return ShapedArray(x.shape[:-1], dtype)

    def batch(self, axis, args, dims, *, dtype):
        return self.bind(move_dim(args[0], dims[0], 0), dtype=dtype), 0


class _Clamp(Elementwise):
    """``min(max(x, low), high)``; the bounds may be of rank 0."""

    def __init__(self):
        form = dict.fromkeys("fi", "bf_min(bf_max({1}, {0}), {2})")
        super().__init__(
            "clamp",
            lambda low, x, high: np.minimum(np.maximum(x, low), high),
            "ordered",
            lower=CForm({**form, "b": "bool(({1} | {0}) & {2})"}, exact=True),
            autocast="widest",
        )

    def jvp(self, primals, tangents):
        low, x, high = primals
        out = clamp(low, x, high)
        total = None
        for i, t in enumerate(tangents):
            if t.__class__ is Zero:
                continue
            if i == 1:
                mask = logical_and(gt(x, low), lt(x, high))  # 0 at the bounds, as in JAX
            else:
                mask = gt(low, x) if i == 0 else lt(high, x)
            term = mul(t, convert(mask, out.dtype))
            total = term if total is None else add_any(total, term)
        return out, zero(out.aval) if total is None else total


class _StopGradient(Elementwise):
    """The identity, and a constant to derivatives."""

    widens = False

    def transpose(self, ct, x, **params):
        """The cotangent stops here."""


select_p = _Select()
convert_p = _Convert()
bitcast_p = _Bitcast()
clamp_p = _Clamp()
stop_gradient_p = _StopGradient(
    "stop_gradient",
    lambda x: x,
    "any",
    [None],
    lower=same("{0}", "bifck", exact=True),
    linear=_FIRST,
    autocast="widest",
    cost=0,
)
stop_gradient_p.fresh, stop_gradient_p.identity = False, True  # it returns its operand
copy_p = Elementwise(
    "copy",
    np.copy,
    "any",
    [lambda t, ans, x: copy(t)],
    [lambda ct, x: ct],
    lower=same("{0}", "bifck", exact=True),
    linear=_FIRST,
    autocast="widest",
    cost=0,
)
copy_p.widens = False

# -- complex numbers -------------------------------------------------------------------------------


def _component(dtype):
    return np.dtype(f"f{dtype.itemsize // 2}") if dtypes.is_complex(dtype) else dtype


complex_p = Elementwise(
    "complex",
    lambda x, y: (x + 1j * y).astype(f"c{2 * x.dtype.itemsize}"),
    "component",
    [lambda t, ans, x, y: complex_(t, zeros_of(t)), lambda t, ans, x, y: complex_(zeros_of(t), t)],
    [lambda ct, x, y: real(ct), lambda ct, x, y: imag(neg(ct))],
    out=lambda d: np.dtype(f"c{2 * d.itemsize}"),
    lower=same("{T}{{0}, {1}}", "f"),
    linear=_BOTH,
    cost=0,
)
real_p = Elementwise(
    "real",
    np.real,
    "complex",
    [lambda t, ans, x: real(t)],
    [lambda ct, x: complex_(ct, zeros_of(ct))],
    out=_component,
    lower=same("{0}.re", "c"),
    linear=_FIRST,
    cost=0,
)
imag_p = Elementwise(
    "imag",
    np.imag,
    "complex",
    [lambda t, ans, x: imag(t)],
    [lambda ct, x: complex_(zeros_of(ct), neg(ct))],
    out=_component,
    lower=same("{0}.im", "c"),
    linear=_FIRST,
    cost=0,
)
real_p.fresh = imag_p.fresh = False  # views
# not the square root of a sum of squares, which overflows and has no derivative at 0; the derivative there is
# 0
complex_abs_p = Elementwise(
    "complex_abs",
    np.abs,
    "complex",
    [lambda t, ans, x: div(real(mul(t, conj(x))), select(eq(ans, 0), ones_of(ans), ans))],
    out=_component,
    lower=call("complex_abs", "c"),
)
conj_p = Elementwise(
    "conj",
    np.conjugate,
    "inexact",
    [lambda t, ans, x: conj(t)],
    [lambda ct, x: conj(ct)],
    lower=CForm({"f": "{0}", "c": "bf_conj({0})"}, exact=True),
    linear=_FIRST,
    cost=0,
)


# -- functions -------------------------------------------------------------------------------------


def named(function: Any, name: str, doc: str) -> Any:
    """``function`` with a name and a docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def unary_function(prim: Primitive, doc: str) -> NamedUnary:
    """The function of one operand that binds ``prim``."""

    def function(x: Any) -> Any:
        return prim.bind(x if isinstance(x, Array) else lift(x))

    return named(function, prim.name, doc)


def _binary(prim: Primitive, doc: str) -> NamedBinary:
    def function(x: Any, y: Any) -> Any:
        return binary(prim, x, y)

    return named(function, prim.name, doc)


neg = unary_function(neg_p, "``-x``.")
sign = unary_function(sign_p, "-1, 0 or 1; NaN stays NaN.")
floor = unary_function(floor_p, "The largest integer not above x.")
ceil = unary_function(ceil_p, "The smallest integer not below x.")
trunc = unary_function(trunc_p, "x rounded toward zero.")
round = unary_function(round_p, "x rounded to the nearest integer, ties to even.")
exp = unary_function(exp_p, "e to the power x.")
exp2 = unary_function(exp2_p, "2 to the power x.")
expm1 = unary_function(expm1_p, "``exp(x) - 1``, accurate near 0.")
log = unary_function(log_p, "The natural logarithm.")
log1p = unary_function(log1p_p, "``log(1 + x)``, accurate near 0.")
logistic = unary_function(logistic_p, "``1 / (1 + exp(-x))``.")
tanh = unary_function(tanh_p, "Hyperbolic tangent.")
sin = unary_function(sin_p, "Sine of x in radians.")
cos = unary_function(cos_p, "Cosine of x in radians.")
tan = unary_function(tan_p, "Tangent of x in radians.")
asin = unary_function(asin_p, "Inverse sine.")
acos = unary_function(acos_p, "Inverse cosine.")
atan = unary_function(atan_p, "Inverse tangent.")
sinh = unary_function(sinh_p, "Hyperbolic sine.")
cosh = unary_function(cosh_p, "Hyperbolic cosine.")
asinh = unary_function(asinh_p, "Inverse hyperbolic sine.")
acosh = unary_function(acosh_p, "Inverse hyperbolic cosine.")
atanh = unary_function(atanh_p, "Inverse hyperbolic tangent.")
erf = unary_function(erf_p, "The error function.")
erfc = unary_function(erfc_p, "``1 - erf(x)``, accurate for large x.")
erf_inv = unary_function(erf_inv_p, "The inverse of ``erf``.")
sqrt = unary_function(sqrt_p, "The square root.")
rsqrt = unary_function(rsqrt_p, "``1 / sqrt(x)``.")
cbrt = unary_function(cbrt_p, "The cube root.")
square = unary_function(square_p, "``x * x``.")
is_finite = unary_function(is_finite_p, "Whether x is neither infinite nor NaN.")
bitwise_not = unary_function(not_p, "Bits inverted; logical not of booleans.")
population_count = unary_function(population_count_p, "The number of bits set.")
stop_gradient = unary_function(stop_gradient_p, "x, as a constant to every derivative.")
copy = unary_function(copy_p, "x in storage of its own.")
add = _binary(add_p, "``x + y``.")
sub = _binary(sub_p, "``x - y``.")
mul = _binary(mul_p, "``x * y``.")
div = _binary(div_p, "``x / y``; integers are divided toward zero.")
rem = _binary(rem_p, "The remainder of ``div``: it has the sign of x.")
max = _binary(max_p, "The larger of x and y; NaN if either is.")
min = _binary(min_p, "The smaller of x and y; NaN if either is.")
pow = _binary(pow_p, "x to the power y; integers wrap, and truncate powers below 0.")
atan2 = _binary(atan2_p, "The angle of the point (y, x), that is of ``x`` over ``y``, in (-pi, pi].")


def nextafter(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The next float from ``x1`` towards ``x2``."""
    return binary(nextafter_p, x1, x2)


eq = _binary(eq_p, "``x == y``.")
ne = _binary(ne_p, "``x != y``.")
lt = _binary(lt_p, "``x < y``.")
le = _binary(le_p, "``x <= y``.")
gt = _binary(gt_p, "``x > y``.")
ge = _binary(ge_p, "``x >= y``.")
bitwise_and = _binary(and_p, "Bitwise and; logical and of booleans.")
bitwise_or = _binary(or_p, "Bitwise or; logical or of booleans.")
bitwise_xor = _binary(xor_p, "Bitwise exclusive or.")
logical_and = bitwise_and
shift_left = _binary(shift_left_p, "``x << y``; 0 where y is at least the width.")
shift_right_logical = _binary(shift_right_logical_p, "``x >> y`` shifting in zeros.")
shift_right_arithmetic = _binary(shift_right_arithmetic_p, "``x >> y`` shifting in the sign.")
complex_ = _binary(complex_p, "The complex number with real part x and imaginary part y.")


def abs(x: ArrayLike) -> Array:
    """The absolute value; of complex numbers, the modulus (a real number)."""
    x = lift(x)
    if dtypes.is_complex(x.dtype):
        return complex_abs_p.bind(x)
    return x if dtypes.is_unsigned(x.dtype) else abs_p.bind(x)


def real(x: ArrayLike) -> Array:
    """The real part."""
    x = lift(x)
    return real_p.bind(x) if dtypes.is_complex(x.dtype) else x


def imag(x: ArrayLike) -> Array:
    """The imaginary part."""
    x = lift(x)
    return imag_p.bind(x) if dtypes.is_complex(x.dtype) else zeros_of(x)


def conj(x: ArrayLike) -> Array:
    """The complex conjugate."""
    x = lift(x)
    return conj_p.bind(x) if dtypes.is_complex(x.dtype) else x


def integer_pow(x: ArrayLike, y: int) -> Array:
    """x to a static integer power."""
    if y.__class__ is not int:
        y = static_int(y, "integer_pow", "y")
    if y == 1:
        return lift(x)
    if y == 2:
        return square(x)
    x = lift(x)
    if y > 127 and dtypes.is_integer(x.aval.dtype):
        bits = 8 * x.aval.dtype.itemsize
        # modulo 2**bits, powers of odd numbers have a period of 2**(bits - 2), those of even ones are 0 from 2**bits
        y = (y - bits) % 2 ** (bits - 2) + bits
        if y >= 2**31:
            return pow(x, y)
    return integer_pow_p.bind(x, y=y)


def select(pred: ArrayLike, on_true: ArrayLike, on_false: ArrayLike) -> Array:
    """``on_true`` where ``pred`` holds, else ``on_false``."""
    on_true, on_false = operand(on_true, on_false), operand(on_false, on_true)
    return select_p.bind(lift(pred), on_true, on_false)


def clamp(min: ArrayLike, x: ArrayLike, max: ArrayLike) -> Array:
    """x limited to [``min``, ``max``]; ``min`` and ``max`` have x's shape or rank 0."""
    x = lift(x)
    return clamp_p.bind(operand(min, x), x, operand(max, x))


def convert(x: Any, dtype: np.dtype) -> Any:
    """x as ``dtype``."""
    x = lift(x)
    if x.aval.dtype == dtype and not x.aval.weak_type:
        return x
    return convert_p.bind(x, dtype=dtype)


def weak_as(x: Any, like: Any) -> Any:
    """x, weakly typed if the type ``like`` is, as are derivatives of values of it."""
    if not like.weak_type or x.aval.weak_type or x.aval.shape:
        return x
    return convert_p.bind(x, dtype=x.aval.dtype, weak=True)


def bitcast(x: Any, dtype: np.dtype) -> Any:
    """The bits of x as another dtype; a last axis holds the parts of a wider element."""
    return bitcast_p.bind(lift(x), dtype=dtype)


def reduce_precision(operand: ArrayLike, exponent_bits: int, mantissa_bits: int) -> Array:
    """``operand`` and tangents rounded to a float of these widths, in its dtype."""
    exponent_bits = static_int(exponent_bits, "reduce_precision", "exponent_bits")
    mantissa_bits = static_int(mantissa_bits, "reduce_precision", "mantissa_bits")
    if exponent_bits < 1 or mantissa_bits < 0:
        raise errors.ValueRangeError(
            f"reduce_precision: there is no float of {exponent_bits} exponent and {mantissa_bits} mantissa bits.",
            where=source.here(),
            fix="give at least 1 and 0: 8 and 7 are those of bfloat16",
        )
    return reduce_precision_p.bind(lift(operand), exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


def zeros_of(x: Any) -> Any:
    """A rank-0 zero of the dtype of x, weakly typed if x is."""
    return scalar(0, x.aval.dtype, x.aval.weak_type)


def ones_of(x: Any) -> Any:
    """A rank-0 one of the dtype of x, weakly typed if x is."""
    return scalar(1, x.aval.dtype, x.aval.weak_type)


def zeros_like(x: ArrayLike) -> Array:
    """Zeros of the shape and dtype of x."""
    return zeros(lift(x).aval)
