"""User values become operands: lifting, dtype promotion, broadcasting.

Face, at the mouth of a program's path: everything in ``blufunc.numpy`` goes through here before it
binds a primitive, and nothing below promotes. In: arrays, tracers, NumPy arrays and Python scalars;
out go values of one dtype whose shapes agree. Rank-0 operands are left alone, since elementwise
primitives broadcast them; Python scalars become constants of the other operand's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.config import Memo, config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy, lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import axes_in as axes_in
from blufunc.core.ir.axes import axis_in as axis_in
from blufunc.core.ir.axes import shape_of as shape_of
from blufunc.core.ir.axes import static_int as static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape
from blufunc.core.primitives.primitive import Primitive

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import Binary, Ufunc, Unary

# -- operands ---------------------------------------------------------------------------------------


PYTHON_SCALARS = dtypes.SCALARS
"""The dtype of a Python scalar in promotion, and whether it is weak, by class."""

_BOOL = dtypes.bool_


def as_value(x: ArrayLike, name: str = "this function") -> Array:
    """An argument of the function called ``name`` as a value; sequences are refused."""
    if isinstance(x, Array):
        return x
    if isinstance(x, (list, tuple, set, dict, str, bytes)) or x is None:
        text = repr(x)
        raise errors.ArgumentError(
            f"{name} takes arrays and numbers, not a {type(x).__name__}: "
            f"{text if len(text) < 60 else text[:57] + '...'}",
            where=source.here(),
            why="turning a sequence into an array copies it element by element: it has to be asked for."
            if isinstance(x, (list, tuple))
            else None,
            fix="pass bnp.asarray(...)" if isinstance(x, (list, tuple)) else "pass an array or a number",
        )
    return lift(x, f"an argument of {name}")


_zeros: dict[tuple[np.dtype, bool], Array] = {}


def constant(x: Any, dtype: np.dtype, weak: bool = False) -> Array:
    """The rank-0 constant for a Python number as ``dtype``."""
    if x == 0 and str(x)[0] != "-":  # zeros are everywhere; the one with a sign is another number
        zero = _zeros.get((dtype, weak))
        if zero is None:
            zero = _zeros[dtype, weak] = scalar(0, dtype, weak)
        return zero
    try:
        return scalar(x, dtype, weak)
    except OverflowError:
        raise errors.ValueRangeError(
            f"the Python int {x} does not fit in {dtypes.short_name(dtype)}.",
            where=source.here(),
            why="a Python number takes the dtype of the array that it meets.",
            fix=f"convert the array first (x.astype('int64')), or bnp.asarray({x}, dtype='int64')",
        ) from None


def constant_like(x: Any, like: Array) -> Array:
    """The rank-0 constant for a Python number in the type of a value, weak if that is."""
    return constant(x, like.aval.dtype, like.aval.weak_type)


def value_of(x: Any, name: str) -> Array:
    """An argument of function ``name`` as a value; Python scalars are weak."""
    kind = PYTHON_SCALARS.get(x.__class__)
    return as_value(x, name) if kind is None else constant(x, *kind)


def type_of(x: Any, name: str) -> ShapedArray:
    """The type of an argument, or of an object that has shape and dtype."""
    try:
        return value_of(x, name).aval
    except errors.ArgumentError:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise
    return ShapedArray(tuple(x.shape), dtypes.as_dtype(x.dtype), bool(getattr(x, "weak_type", False)))


def as_dtype_of(x: Any, dtype: np.dtype, name: str) -> Array:
    """An argument as ``dtype``; numbers of Python and NumPy exactly."""
    if isinstance(x, (np.ndarray, np.generic)) and np.can_cast(x.dtype, dtype, "same_kind"):
        dtypes.check_unmasked(x)
        return from_numpy(np.asarray(x, dtype), None if x.ndim else backend.host_device())
    kind = PYTHON_SCALARS.get(x.__class__)
    if kind is not None and (dtype == kind[0] or dtypes.is_inexact(dtype) >= dtypes.is_inexact(kind[0])):
        if not dtypes.is_complex(kind[0]) or dtypes.is_complex(dtype):
            return constant(x, dtype)
    return cast(value_of(x, name), dtype)


def to_inexact(dtype: np.dtype, weak: bool) -> tuple[np.dtype, bool]:
    """The dtype of functions of real numbers: float32 for integers and booleans."""
    return (dtype, weak) if dtypes.is_inexact(dtype) else (dtypes.default(float), weak)


def summed_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of sums and products: integers have the default width at least."""
    least = dtypes.default(int)
    if dtypes.is_bool(dtype):
        return least
    if dtypes.is_integer(dtype) and dtype.itemsize < least.itemsize:
        return np.dtype(f"u{least}") if dtypes.is_unsigned(dtype) else least
    return dtype


def cast(x: Array, dtype: np.dtype, weak: bool = False) -> Array:
    """``x`` as ``dtype``; only rank-0 values can be weak."""
    aval = x.aval
    if aval.dtype == dtype:
        return x
    if weak and not aval.ndim:
        return convert_p.bind(x, dtype=dtype, weak=True)
    return convert_p.bind(x, dtype=dtype)


def positions(x: Array) -> Array:
    """Positions or counts in the dtype of integers: int32, or int64 in the wide mode."""
    return cast(x, dtypes.default(int))


def inexact(x: ArrayLike, name: str) -> Array:
    """``x`` as a floating or complex value."""
    kind = PYTHON_SCALARS.get(x.__class__)
    if kind is not None:
        return constant(x, *to_inexact(kind[0], kind[1]))
    x = as_value(x, name)
    return cast(x, *to_inexact(x.aval.dtype, x.aval.weak_type))


# -- two operands: their promotion depends on their types only, and is cached       ---------------

_Plan = tuple[np.dtype | None, np.dtype | None, bool, Any, Any]
_FLAGS = "numpy_rank_promotion", "numpy_dtype_promotion"
_plans: dict[tuple[ShapedArray, ShapedArray, bool], _Plan] = Memo(*_FLAGS)
_scalar_plans: dict[tuple[ShapedArray, type, bool], tuple[np.dtype | None, np.dtype, bool]] = Memo(*_FLAGS)
dtypes.forgotten_with_mode(_plans.clear)
dtypes.forgotten_with_mode(_scalar_plans.clear)


def meet(x: Any, y: Any, name: str, inexact: bool = False) -> tuple[Array, Array]:
    """Two operands of one dtype, and of one shape or rank 0.

    Args:
      name: the function, for messages.
      inexact: whether integers and booleans become floats.
    """
    if isinstance(x, Array):
        if isinstance(y, Array):
            return _meet_values(x, y, name, inexact)
        if y.__class__ in PYTHON_SCALARS:
            to, dtype, weak = _scalar_plan(x.aval, y.__class__, inexact)
            return x if to is None else cast(x, to, weak), constant(y, dtype, weak)
    elif x.__class__ in PYTHON_SCALARS:
        if y.__class__ in PYTHON_SCALARS:
            dtype, weak = dtypes.promote(PYTHON_SCALARS[x.__class__], PYTHON_SCALARS[y.__class__])
            if inexact:
                dtype, weak = to_inexact(dtype, weak)
            return constant(x, dtype, weak), constant(y, dtype, weak)
        y = as_value(y, name)
        to, dtype, weak = _scalar_plan(y.aval, x.__class__, inexact)
        return constant(x, dtype, weak), y if to is None else cast(y, to, weak)
    return _meet_values(as_value(x, name), as_value(y, name), name, inexact)


def _scalar_plan(aval: ShapedArray, cls: type, inexact: bool) -> tuple[np.dtype | None, np.dtype, bool]:
    """``(the array's new dtype or None, the constant's dtype, weak)``."""
    key = (aval, cls, inexact)
    plan = _scalar_plans.get(key)
    if plan is None:
        try:
            dtype, weak = dtypes.promote((aval.dtype, aval.weak_type), PYTHON_SCALARS[cls])
        except errors.DtypeError as e:
            raise source.located(e) from None
        if inexact:
            dtype, weak = to_inexact(dtype, weak)
        weak = weak and not aval.ndim
        plan = _scalar_plans[key] = (None if aval.dtype == dtype else dtype, dtype, weak)
    return plan


def _meet_values(x: Array, y: Array, name: str, inexact: bool) -> tuple[Array, Array]:
    a, b = x.aval, y.aval
    key = (a, b, inexact)
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(a, b, name, inexact)
        if config.numpy_rank_promotion != "warn":  # each place warns
            _plans[key] = plan
    to_x, to_y, weak, shape_x, shape_y = plan
    if to_x is not None:
        x = cast(x, to_x, weak)
    if to_y is not None:
        y = cast(y, to_y, weak)
    if shape_x is not None:
        x = broadcast_in_dim_p.bind(x, shape=shape_x[0], dims=shape_x[1])
    if shape_y is not None:
        y = broadcast_in_dim_p.bind(y, shape=shape_y[0], dims=shape_y[1])
    return x, y


def _plan(a: ShapedArray, b: ShapedArray, name: str, inexact: bool) -> _Plan:
    dtype, weak = _promote(name, a, b)
    if inexact:
        dtype, weak = to_inexact(dtype, weak)
    shape = a.shape if a.shape == b.shape else _promoted_shape((a.shape, b.shape), name)
    return (
        None if a.dtype == dtype else dtype,
        None if b.dtype == dtype else dtype,
        weak,
        _stretch(a.shape, shape),
        _stretch(b.shape, shape),
    )


def _promote(name: str, *avals: ShapedArray) -> tuple[np.dtype, bool]:
    try:
        if len(avals) == 2 and avals[0].dtype == avals[1].dtype:
            return avals[0].dtype, avals[0].weak_type and avals[
                1
            ].weak_type  # also where there is no arithmetic
        return dtypes.promote(*[(a.dtype, a.weak_type) for a in avals])
    except errors.DtypeError as e:
        raise errors.DtypeError(
            f"{name} of {', '.join(map(str, avals))}: {e.what}.", where=source.here(), why=e.why, fix=e.fix
        ) from None


def _stretch(shape: tuple[int, ...], to: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Parameters of the broadcast from a shape to another; None where none is needed."""
    if not shape or shape == to:
        return None
    return to, tuple(range(len(to) - len(shape), len(to)))


# -- any number of operands ------------------------------------------------------------------------


def promote_dtypes(name: str, *xs: Any, inexact: bool = False) -> list[Array]:
    """The operands as values of one dtype; shapes are left as they are.

    Args:
      name: the function, for messages.
      inexact: whether integers and booleans become floats.
    """
    operands = [x if x.__class__ in PYTHON_SCALARS else as_value(x, name) for x in xs]
    pairs = [
        (x.aval.dtype, x.aval.weak_type) if isinstance(x, Array) else PYTHON_SCALARS[x.__class__]
        for x in operands
    ]
    if all(pair[0] == pairs[0][0] for pair in pairs):
        dtype, weak = pairs[0][0], all(pair[1] for pair in pairs)
    else:
        try:
            dtype, weak = dtypes.promote(*pairs)
        except errors.DtypeError as e:
            raise errors.DtypeError(f"{name}: {e.what}.", where=source.here(), why=e.why, fix=e.fix) from None
    if inexact:
        dtype, weak = to_inexact(dtype, weak)
    return [cast(x, dtype, weak) if isinstance(x, Array) else constant(x, dtype, weak) for x in operands]


def match_shapes(name: str, *xs: Array) -> list[Array]:
    """Values broadcast to their common shape, except those of rank 0."""
    shapes = [x.aval.shape for x in xs]
    shape = _promoted_shape(shapes, name)
    return [x if not s else stretch(x, shape) for x, s in zip(xs, shapes, strict=True)]


def fits(shape: Sequence[int], to: Sequence[int]) -> bool:
    """True if an array of ``shape`` broadcasts to the shape ``to``."""
    aligned = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(m in (1, n) for m, n in aligned)


def stretch(x: Array, shape: tuple[int, ...]) -> Array:
    """``x`` broadcast to ``shape``, which is known to be possible."""
    if x.aval.shape == shape:
        return x
    ndim = x.aval.ndim
    return broadcast_in_dim_p.bind(x, shape=shape, dims=tuple(range(len(shape) - ndim, len(shape))))


def _promoted_shape(shapes: Sequence[tuple[int, ...]], name: str) -> tuple[int, ...]:
    """The common shape of operands, if ``numpy_rank_promotion`` allows it."""
    if config.numpy_rank_promotion != "allow" and len({len(s) for s in shapes} - {0}) > 1:
        error = errors.ShapeError(
            f"{name} of the shapes {' and '.join(map(str, shapes))}, whose ranks differ.",
            where=source.here(),
            why=f"numpy_rank_promotion is {config.numpy_rank_promotion!r}.",
            fix="insert an axis where one is missing: x[None]",
        )
        if config.numpy_rank_promotion == "raise":
            raise error
        source.warn(str(error))
    return _common_shape(shapes, name)


def _common_shape(shapes: Sequence[tuple[int, ...]], name: str) -> tuple[int, ...]:
    first = shapes[0]
    if all(s == first for s in shapes):
        return first
    rank = max(map(len, shapes))
    result = []
    for d in range(-rank, 0):
        sizes = {s[d] for s in shapes if len(s) >= -d} - {1}
        if len(sizes) > 1:
            raise errors.ShapeError(
                f"{name}: the shapes {' and '.join(map(str, dict.fromkeys(shapes)))} do not broadcast.",
                where=source.here(),
                why=f"axis {d} has the sizes {' and '.join(map(str, sorted(sizes)))}, and neither is 1.",
                fix="insert an axis where one is missing (x[:, None]), or reshape one of them",
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def line_axis(x: Array, axis: Any, name: str) -> tuple[Array, int]:
    """``x`` and a valid axis of it; flattened, and 0, if the axis is None."""
    if axis is None:
        return reshape(x, (x.aval.size,)), 0
    return x, axis_in(axis, x.aval.ndim, name)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that arrays of the given shapes broadcast to: a tuple of int."""
    return _common_shape([shape_of(s, "broadcast_shapes") for s in shapes] or [()], "broadcast_shapes")


# -- static arguments ------------------------------------------------------------------------------


def dtype_of(dtype: Any) -> np.dtype | None:
    """A ``dtype=`` option; None stays None."""
    return None if dtype is None else dtypes.as_dtype(dtype)


# -- families of elementwise functions: a primitive becomes a function with a public name -----------


def named(function: Callable, name: str, doc: str, module: str = "blufunc.numpy") -> Any:
    """The function under its public name."""
    function.__module__ = module
    return ops.named(function, name, doc)


def unary_inexact(prim: Primitive, name: str, doc: str) -> Unary:
    """A function of real or complex numbers: integers become float32."""

    def function(x: Any, /) -> Array:
        if isinstance(x, Array) and dtypes.is_inexact(x.aval.dtype):
            return prim.bind(x)
        return prim.bind(inexact(x, name))

    return named(function, name, f"{doc} Elementwise; integers and booleans are computed in float32.")


def binary(prim: Primitive, name: str, doc: str, on_bool: Primitive | None = None) -> Ufunc:
    """Make a function of two operands; ``on_bool`` defines it for booleans."""
    bind = prim.bind

    def function(x: Any, y: Any, /) -> Array:
        if not (isinstance(x, Array) and isinstance(y, Array) and x.aval is y.aval):
            x, y = meet(x, y, name)
        if on_bool is not None and x.aval.dtype is dtypes.bool_:
            return on_bool.bind(x, y)
        return bind(x, y)

    return named(function, name, f"{doc} Elementwise, with promotion and broadcasting.")


def ordering(prim: Primitive, strict: Primitive, name: str, doc: str) -> Binary:
    """Make an order comparison; complex: by real, then imaginary part."""
    bind = prim.bind

    def function(x: Any, y: Any, /) -> Array:
        if not (isinstance(x, Array) and isinstance(y, Array) and x.aval is y.aval):
            x, y = meet(x, y, name)
        if x.aval.dtype.kind != "c":
            return bind(x, y)
        (a, b), (c, d) = [(ops.real(v), ops.imag(v)) for v in (x, y)]
        return ops.or_p.bind(strict.bind(a, c), ops.and_p.bind(ops.eq_p.bind(a, c), bind(b, d)))

    return named(function, name, f"{doc} Elementwise, with promotion and broadcasting.")


def extremum(prim: Primitive, stays: Callable, name: str, doc: str) -> Ufunc:
    """Make the function that selects an operand by ``stays(x, y)``."""
    bind = prim.bind

    def function(x: Any, y: Any, /) -> Array:
        if not (isinstance(x, Array) and isinstance(y, Array) and x.aval is y.aval):
            x, y = meet(x, y, name)
        if x.aval.dtype.kind != "c":
            return bind(x, y)
        x, y = match_shapes(name, x, y)
        return ops.select(ops.or_p.bind(stays(x, y), ops.ne_p.bind(x, x)), x, y)

    return named(function, name, f"{doc} Elementwise, with promotion and broadcasting.")


def binary_inexact(prim: Primitive, name: str, doc: str) -> Binary:
    """A function of two real numbers: integers become float32."""

    def function(x: Any, y: Any, /) -> Array:
        x, y = meet(x, y, name, inexact=True)
        return prim.bind(x, y)

    return named(function, name, f"{doc} Elementwise, with promotion (to floats) and broadcasting.")
