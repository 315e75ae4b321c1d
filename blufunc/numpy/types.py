"""Dtypes of user code: ``bnp.float32``, kinds, limits and promotion.

Face over ``core.dtypes``. A dtype name here is usable wherever a dtype is expected, equal to the
``np.dtype`` it stands for, and callable: ``bnp.float32(3)`` is an array of rank 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.numpy.creation import asarray
from blufunc.numpy.promotion import PYTHON_SCALARS, type_of

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

ndarray = Array


class ScalarType(type):
    """A dtype under its name in this namespace: a class of scalars.

    Attributes:
      dtype: the ``np.dtype``.
    """

    dtype: np.dtype

    def __new__(cls, dtype: np.dtype, name: str | None = None) -> ScalarType:
        members = {"dtype": dtype, "__module__": __name__, "__doc__": f"Arrays of rank 0, of {dtype.name}."}
        return super().__new__(cls, name or dtype.name, (), members)

    def __init__(cls, dtype: np.dtype, name: str | None = None):
        super().__init__(cls.__name__, (), {})

    def __call__(cls, x: Any = 0) -> Array:  # type: ignore[override]
        """``x`` as an array of this dtype."""
        return asarray(x, dtype=cls.dtype)

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, cls.dtype.type)

    def __eq__(cls, other: object) -> bool:
        if isinstance(other, ScalarType):
            return cls.dtype == other.dtype
        return isinstance(other, (np.dtype, type, str)) and cls.dtype == other

    def __hash__(cls) -> int:
        return hash(cls.dtype.type)  # as NumPy's type of the same name, to which it is equal

    def __repr__(cls) -> str:
        return f"blufunc.numpy.{cls.__name__}"

    def __str__(cls) -> str:
        return cls.dtype.name

    @property
    def name(cls) -> str:
        """The name, such as ``'float32'``."""
        return cls.dtype.name

    @property
    def itemsize(cls) -> int:
        """The bytes of one element."""
        return cls.dtype.itemsize


bool_ = ScalarType(dtypes.bool_, "bool_")
int8, int16, int32, int64 = map(ScalarType, (dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64))
uint8, uint16, uint32, uint64 = map(ScalarType, (dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64))
int2, int4, uint2, uint4 = map(ScalarType, (dtypes.int2, dtypes.int4, dtypes.uint2, dtypes.uint4))
(
    float4_e2m1fn, float8_e3m4, float8_e4m3, float8_e4m3b11fnuz, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2,
    float8_e5m2fnuz, float8_e8m0fnu,
) = map(ScalarType, dtypes.SMALL_FLOATS)  # fmt: skip
float16, bfloat16, float32, float64 = map(
    ScalarType, (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)
)
complex64, complex128 = map(ScalarType, (dtypes.complex64, dtypes.complex128))
int_, uint, float_, complex_ = int32, uint32, float32, complex64
single, double, csingle, cdouble = float32, float64, complex64, complex128

# Kinds of dtypes, for issubdtype. NumPy's own classes, so that either spelling works.
generic, number, inexact = np.generic, np.number, np.inexact
integer, signedinteger, unsignedinteger = np.integer, np.signedinteger, np.unsignedinteger
floating, complexfloating = np.floating, np.complexfloating
character, flexible, object_ = np.character, np.flexible, np.object_
ComplexWarning = np.exceptions.ComplexWarning

_KINDS = {
    np.generic: lambda d: True,
    np.number: dtypes.is_numeric,
    np.inexact: dtypes.is_inexact,
    np.integer: dtypes.is_integer,
    np.signedinteger: lambda d: dtypes.is_integer(d) and not dtypes.is_unsigned(d),
    np.unsignedinteger: dtypes.is_unsigned,
    np.floating: dtypes.is_floating,
    np.complexfloating: dtypes.is_complex,
    dtypes.extended: dtypes.is_key,
    dtypes.prng_key: dtypes.is_key,
}


def issubdtype(arg1: Any, arg2: Any) -> bool:
    """True if dtype ``arg1`` is of the kind ``arg2``, or equal to a dtype ``arg2``.

    bfloat16 and the 8-bit floats count as floating.
    """
    if isinstance(arg1, type) and arg1 in _KINDS:
        return isinstance(arg2, type) and issubclass(arg1, arg2)
    d = dtypes.as_dtype(arg1)
    test = _KINDS.get(arg2) if isinstance(arg2, type) else None
    return bool(test(d)) if test is not None else d == dtypes.as_dtype(arg2)


def isdtype(dtype: Any, kind: Any) -> bool:
    """True if ``dtype`` is of a kind of the array API standard.

    ``kind`` is a name, a dtype, or a tuple of these of which one has to fit.
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    d = dtypes.as_dtype(dtype)
    names = {
        "bool": dtypes.is_bool,
        "signed integer": lambda d: dtypes.is_integer(d) and not dtypes.is_unsigned(d),
        "unsigned integer": dtypes.is_unsigned,
        "integral": dtypes.is_integer,
        "real floating": dtypes.is_floating,
        "complex floating": dtypes.is_complex,
        "numeric": dtypes.is_numeric,
    }
    if isinstance(kind, str):
        if kind in names:
            return names[kind](d)
        raise errors.ValueRangeError(
            f"isdtype: {kind!r} is not a kind of dtype.",
            where=source.here(),
            fix=f"use one of {', '.join(map(repr, names))}",
        )
    return d == dtypes.as_dtype(kind)


def _pair(x: Any) -> tuple[np.dtype, bool]:
    if isinstance(x, Array):
        return x.aval.dtype, x.aval.weak_type
    if x.__class__ in PYTHON_SCALARS:
        return PYTHON_SCALARS[x.__class__]
    if any(x is kind for kind in (bool, int, float, complex)):  # which equal dtypes such as bnp.int64
        return PYTHON_SCALARS[x]
    if isinstance(x, (str, type, np.dtype, ScalarType)):
        return dtypes.as_dtype(x), False
    aval = type_of(x, "result_type")
    return aval.dtype, aval.weak_type


def result_type(*args: Any) -> np.dtype:
    """The dtype of arithmetic between arrays, Python scalars and dtypes."""
    return common_type(*args)[0]


def common_type(*args: Any) -> tuple[np.dtype, bool]:
    """The dtype of arithmetic between arrays, scalars and dtypes; True if it is weak."""
    return dtypes.promote(*[_pair(x) for x in args])


def promote_types(a: DTypeLike, b: DTypeLike) -> np.dtype:
    """The dtype of arithmetic between two dtypes."""
    return dtypes.promote(_pair(a), _pair(b))[0]


def can_cast(from_: Any, to: Any, casting: str = "safe") -> bool:
    """True if a dtype (or an array) can be cast to ``to`` under NumPy's casting rules."""
    named = isinstance(from_, (str, type, np.dtype, ScalarType))
    frm = dtypes.as_dtype(from_) if named else _pair(from_)[0]
    return bool(np.can_cast(frm, dtypes.as_dtype(to), casting))  # type: ignore[arg-type]


def dtype(dtype: DTypeLike) -> np.dtype:
    """The ``np.dtype`` for a name, scalar type or dtype."""
    return dtypes.as_dtype(dtype)


class FloatLimits:
    """Limits of a float dtype: ``np.finfo``'s attributes as Python numbers.

    Attributes:
      dtype: the ``np.dtype``; for a complex one, the dtype of its parts.
      bits, eps, max, min, smallest_normal, tiny, smallest_subnormal, ...: as of ``np.finfo``.
    """

    __slots__ = ("_info", "dtype")

    def __init__(self, dtype: np.dtype):
        self._info = dtypes.finfo(dtype)
        self.dtype = np.dtype(self._info.dtype)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._info, name)
        # by class: None, the dtype of an int, equals float64
        return float(value) if isinstance(value, np.generic) and value.dtype == self.dtype else value

    def __repr__(self) -> str:
        return f"finfo({self.dtype.name}: eps={self.eps}, min={self.min}, max={self.max})"


def finfo(dtype: Any) -> FloatLimits:
    """Limits of a floating dtype or array: ``eps``, ``max``, ``min``, ``tiny``, ..."""
    return FloatLimits(dtype.aval.dtype if isinstance(dtype, Array) else dtypes.as_dtype(dtype))


def iinfo(int_type: Any) -> np.iinfo:
    """Limits of an integer dtype, or of an array's: ``min``, ``max``, ``bits``."""
    return dtypes.iinfo(int_type.aval.dtype if isinstance(int_type, Array) else int_type)


def iterable(y: ArrayLike) -> bool:
    """True if ``y`` is iterable: a sequence, or an array with axes."""
    if isinstance(y, Array):
        return y.aval.ndim > 0
    return bool(np.iterable(y))


def isscalar(element: Any) -> bool:
    """True if ``element`` is a scalar."""
    return isinstance(element, (bool, int, float, complex, np.generic)) or (
        isinstance(element, Array) and not element.aval.ndim
    )


def iscomplexobj(x: ArrayLike) -> bool:
    """True if x has a complex dtype."""
    return dtypes.is_complex(_pair(x)[0])


def isrealobj(x: ArrayLike) -> bool:
    """True if x has a dtype that is not complex."""
    return not iscomplexobj(x)
