"""Array creation: from shapes, values, and other libraries' arrays.

Face. What is made outside of a trace lies on the default device (or ``device``) in storage of its
own; inside a trace, numbers are literals and other constants are equations (``broadcast_in_dim`` of a number,
``iota``), so that programs hold no large arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from blufunc import _lazy, errors, lax
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import PROTOCOLS, ConcreteArray, from_numpy, lift, number
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import EVAL, Array, set_trace, state
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import foreign, numerics
from blufunc.core.ops.shape import concatenate, iota
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.promotion import (
    PYTHON_SCALARS,
    as_dtype_of,
    as_value,
    axis_in,
    cast,
    constant,
    dtype_of,
    fits,
    match_shapes,
    promote_dtypes,
    shape_of,
    static_int,
    stretch,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

with _lazy.modules(globals()):
    from blufunc.parallel.mesh import constrain as constraints
    from blufunc.parallel.mesh import sharding as shardings
    from blufunc.parallel.programs import placement

# -- from values -----------------------------------------------------------------------------------


def asarray(
    a: Any,
    dtype: DTypeLike | None = None,
    order: str | None = None,
    *,
    copy: bool | None = None,
    device: Any = None,
) -> Array:
    """Convert ``a``, a scalar, nested list, NumPy array or array-like, to an array.

    Without ``dtype``, Python scalars and 64-bit arrays become 32-bit; with it, 64-bit is honoured
    and no value passes through 32 bits. An array is returned as it is where nothing has to change
    and ``copy`` is not true. Arrays of other libraries stay on their device: one on a GPU shares its memory, which the
    owner must not write to from then on, and one on the CPU is copied. With ``copy=False`` any copy is an error.
    ``order`` is of no effect but for ``'F'``, which arrays do not have.
    """
    want = dtype_of(dtype)
    if order is not None:
        _check_order(order)
    x = a
    if foreign.is_foreign(x):
        x = foreign.imported(x, copy=False) if copy is False else foreign.taken(x)
        if isinstance(x, ConcreteArray) and want is None:
            want = dtypes.implicit(x.aval.dtype)
            x = x if copy is False else foreign.narrowed(x)
    if copy is False and not (isinstance(x, Array) and want in (None, x.aval.dtype)):
        raise errors.ArgumentError(
            "asarray(copy=False): these values have to be copied to become an array.",
            where=source.here(),
            why="they are not in memory that an array of this dtype can share.",
            fix="copy=None copies where it must; from_dlpack(x) shares the memory of a NumPy array",
        )
    if isinstance(x, Array):
        return _from_value(x, want, copy, device)
    if isinstance(x, (list, tuple)):
        if holds_values(x):
            return _stack_nested(x, want)
        if not x:
            x = np.zeros((0,), want or dtypes.default(float))
    if x is None or isinstance(x, (str, bytes, dict, set)):
        raise errors.ArgumentError(
            f"asarray cannot make an array of a {type(x).__name__}: {x!r:.60}",
            where=source.here(),
            fix="pass numbers, nested lists of numbers, or an array",
        )
    if any(hasattr(x, protocol) for protocol in PROTOCOLS):
        return _from_value(lift(x), want, copy, device)
    weak = want is None and x.__class__ in PYTHON_SCALARS and x.__class__ is not bool
    host = _host(x, want)
    place = parse_device(device)
    if not host.ndim and state.trace is not EVAL:
        if place is None or place == backend.default_device():
            # on the host, it is a literal of the program; on another default device, an operand of unknown value
            return number(from_numpy(host, backend.host_device(), weak))
        return lax.full((), host[()], host.dtype, device=place)
    return from_numpy(host, place, weak)


def array(
    object: Any,
    dtype: DTypeLike | None = None,
    *,
    copy: bool | None = True,
    order: str | None = "K",
    ndmin: int = 0,
    device: Any = None,
) -> Array:
    """Like ``asarray``, but always a copy, of rank ``ndmin`` at least (new axes lead)."""
    result = asarray(object, dtype, order, copy=copy or None, device=device)
    missing = static_int(ndmin, "array", "ndmin") - result.aval.ndim
    if ndmin > 64:
        raise errors.ValueRangeError(
            f"array: ndmin={ndmin}.", where=source.here(), why="arrays have 64 axes at most.", fix="ndmin=2"
        )
    return reshape(result, (1,) * missing + result.aval.shape) if missing > 0 else result


def _check_order(order: Any) -> None:
    if order not in ("C", "K", "A"):
        raise errors.ValueRangeError(
            f"the order {order!r:.60} of an array in memory.",
            where=source.here(),
            why="arrays are in row-major order always.",
            fix="order='C', or none",
        )


def parse_device(device: Any) -> backend.Device | None:
    """A ``device=`` option: a device, or its name such as ``'cpu:0'``."""
    if device is None or isinstance(device, backend.Device):
        return device
    if not isinstance(device, str):
        raise errors.ArgumentError(
            f"device is a device or its name, not {device!r:.60}.", where=source.here(), fix="device='cpu:0'"
        )
    platform, _, index = device.partition(":")
    devices = backend.get(platform).devices()
    if not (index or "0").isdecimal() or int(index or 0) >= len(devices):
        raise errors.ValueRangeError(
            f"there is no device {device!r}.",
            where=source.here(),
            fix=f"use one of {', '.join(map(str, devices))}",
        )
    return devices[int(index or 0)]


def _from_value(x: Array, want: np.dtype | None, copy: bool | None, device: Any) -> Array:
    place = parse_device(device)
    if place is not None and not isinstance(x, ConcreteArray) and place != backend.default_device():
        raise errors.UnsupportedError(
            f"device={str(place)!r} for a traced value.",
            where=source.here(),
            why="a program runs where its arguments are.",
            fix="put the arguments on a device before the call",
        )
    if place is not None and isinstance(x, ConcreteArray) and x.device != place:
        x = from_numpy(np.asarray(x), place, x.aval.weak_type)
    if want is not None and (x.aval.dtype != want or x.aval.weak_type):
        return ops.convert(x, want)
    return ops.copy_p.bind(x) if copy else x


def holds_values(x: Any) -> bool:
    """True if nested lists hold arrays, tracers, or arrays of other libraries."""
    return any(
        holds_values(e)
        if isinstance(e, (list, tuple))
        else e.__class__ not in PYTHON_SCALARS and (isinstance(e, Array) or foreign.is_foreign(e))
        for e in x
    )


def _stack_nested(x: Sequence, want: np.dtype | None) -> Array:
    rows = [asarray(e, want) if not isinstance(e, (bool, int, float, complex)) else e for e in x]
    rows = promote_dtypes("asarray", *rows)
    shapes = {r.aval.shape for r in rows}
    if len(shapes) > 1:
        raise errors.ShapeError(
            f"asarray of elements of shapes {', '.join(map(str, sorted(shapes)))}.",
            where=source.here(),
            fix="make all rows equally long",
        )
    result = concatenate([reshape(r, (1, *r.aval.shape)) for r in rows], 0)
    return result if want is None else ops.convert(result, want)


def _host(x: Any, want: np.dtype | None) -> np.ndarray:
    try:
        dtypes.check_unmasked(x)
        if want is None:
            if x.__class__ in PYTHON_SCALARS:
                return np.asarray(x, dtypes.scalar_dtype(x)[0])
            return dtypes.canonical_numpy(np.asarray(x))
        host = np.asarray(x)
        if host.dtype != want and host.dtype.kind in "iu" and not isinstance(x, (np.ndarray, np.generic)):
            if dtypes.is_narrow(want):
                dtypes.check_narrow(host, want)
            return np.asarray(x, want)  # lists and numbers: NumPy refuses integers that do not fit
        with np.errstate(all="ignore"):
            return host if host.dtype == want else numerics.convert(host, want)
    except errors.BlufuncError as e:
        raise source.located(e) from None
    except OverflowError as e:
        raise errors.ValueRangeError(
            f"asarray: {e}.", where=source.here(), fix="use a wider dtype, or convert in NumPy first"
        ) from None
    except (TypeError, ValueError) as e:
        raise errors.ArgumentError(
            f"asarray cannot make an array of a {type(x).__name__}: {e}",
            where=source.here(),
            fix="pass numbers, nested lists of numbers with rows of one length, or an array",
        ) from None


def copy(a: Any, order: str | None = None) -> Array:
    """Copy ``a``."""
    return array(a, order=order)


def astype(x: ArrayLike, dtype: DTypeLike, /, *, copy: bool = False, device: Any = None) -> Array:
    """Cast to another dtype.

    Floats become integers toward zero; complex numbers lose their imaginary part.

    Floats beyond an integer dtype become its smallest or largest integer, and NaN becomes 0.
    """
    return _from_value(as_value(x, "astype"), dtypes.as_dtype(dtype), copy, device)


# -- constants -------------------------------------------------------------------------------------


def _divides(device: Any) -> bool:
    """True for a ``NamedSharding``; meshes are imported for those who use them."""
    known = device is None or isinstance(device, (str, backend.Device))
    return not known and isinstance(device, shardings.NamedSharding)


def _filled(shape: tuple[int, ...], value: Any, dtype: np.dtype, device: Any = None) -> Array:
    if any(n < 0 for n in shape):
        raise errors.ValueRangeError(f"the shape {shape} has a negative size.", where=source.here())
    if _divides(device):
        if state.trace is EVAL:
            return placement.filled(shape, value, dtype, device)
        return constraints.constrain(lax.full(shape, value, dtype), device)
    return lax.full(shape, value, dtype, device=parse_device(device))


def zeros(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike | None = None, *, device: Any = None
) -> Array:
    """Zeros of a shape (an int or a tuple of int), float32 by default.

    ``device`` may be a ``NamedSharding``, here and in ``ones``, ``empty`` and ``full``.
    """
    return _filled(shape_of(shape, "zeros"), 0, dtype_of(dtype) or dtypes.default(float), device)


def ones(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike | None = None, *, device: Any = None
) -> Array:
    """Ones of a shape (an int or a tuple of int), float32 by default."""
    return _filled(shape_of(shape, "ones"), 1, dtype_of(dtype) or dtypes.default(float), device)


def empty(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike | None = None, *, device: Any = None
) -> Array:
    """Zeros: arrays are immutable, so one that is not initialised would be of no use."""
    return _filled(shape_of(shape, "empty"), 0, dtype_of(dtype) or dtypes.default(float), device)


def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    fill_value: ArrayLike,
    dtype: DTypeLike | None = None,
    *,
    device: Any = None,
) -> Array:
    """A constant array, of ``dtype`` or the value's (32-bit for Python scalars).

    ``fill_value`` may be an array, which is broadcast to the shape.
    """
    shape, want = shape_of(shape, "full"), dtype_of(dtype)
    if fill_value.__class__ in PYTHON_SCALARS:
        return _filled(shape, fill_value, want or dtypes.scalar_dtype(fill_value)[0], device)
    value = as_value(fill_value, "full") if want is None else as_dtype_of(fill_value, want, "full")
    place = None if _divides(device) else parse_device(device)
    if place is not None and isinstance(value, ConcreteArray):
        # moved ahead of the broadcast, which may be traced
        if not value.aval.ndim:
            return lax.full(shape, np.asarray(value)[()], value.aval.dtype, device=place)
        value = _from_value(value, None, None, place)
    (stretched,) = match_to("full", shape, value)
    if _divides(device):
        return (
            placement.device_put(stretched, device)
            if state.trace is EVAL
            else constraints.constrain(stretched, device)
        )
    return (
        stretched
        if place is None or isinstance(value, ConcreteArray)
        else _from_value(stretched, None, None, place)
    )


def match_to(name: str, shape: tuple[int, ...], *xs: Array) -> list[Array]:
    """Values broadcast to ``shape``, which they may not exceed."""
    for x in xs:
        if not fits(x.aval.shape, shape):
            raise errors.ShapeError(
                f"{name}: an array of shape {x.aval.shape} does not broadcast to {shape}.",
                where=source.here(),
                why="axes align at the right, and only axes of size 1 stretch.",
                fix="insert or drop axes first (x[:, None], x.reshape(...))",
            )
    return [stretch(x, shape) for x in xs]


def _like(x: Any, name: str, dtype: Any, shape: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of the result of a ``*_like`` function."""
    if x.__class__ in PYTHON_SCALARS:
        own_shape, kind = (), PYTHON_SCALARS[x.__class__][0]
    elif not (isinstance(x, Array) or foreign.is_foreign(x)) and hasattr(x, "shape") and hasattr(x, "dtype"):
        own_shape, kind = tuple(x.shape), dtypes.as_dtype(x.dtype)  # a ShapeDtypeStruct, or a NumPy array
        if isinstance(x, (np.ndarray, np.generic)):
            kind = dtypes.implicit(kind)
    else:
        aval = as_value(x, name).aval
        own_shape, kind = aval.shape, aval.dtype
    return own_shape if shape is None else shape_of(shape, name), dtype_of(dtype) or kind


def _weak_like(x: Array, a: Any, dtype: Any) -> Array:
    """The result of a ``*_like`` function, weak if ``a`` is and has its dtype."""
    if dtype is not None or x.aval.ndim:
        return x
    scalar = PYTHON_SCALARS.get(a.__class__)
    weak = getattr(a, "weak_type", False) if scalar is None else scalar[1]
    return ops.convert_p.bind(x, dtype=x.aval.dtype, weak=True) if weak else x


def _place_like(a: Any, shape: Any, device: Any) -> Any:
    """The placement of a ``*_like`` result: the device or sharding of ``a``."""
    if device is None and shape is None and isinstance(a, ConcreteArray) and a.device.joint:
        return a.sharding
    if state.trace is not EVAL:
        return device  # a program runs where its arguments are
    return device or (foreign.home_of(a) if foreign.is_foreign(a) else getattr(a, "device", None))


def zeros_like(
    a: ArrayLike,
    dtype: DTypeLike | None = None,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    device: Any = None,
) -> Array:
    """Zeros with the shape, dtype, device and sharding of ``a``, unless given."""
    own, kind = _like(a, "zeros_like", dtype, shape)
    return _weak_like(_filled(own, 0, kind, _place_like(a, shape, device)), a, dtype)


def ones_like(
    a: ArrayLike,
    dtype: DTypeLike | None = None,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    device: Any = None,
) -> Array:
    """Ones of the shape and dtype of ``a``, unless given."""
    own, kind = _like(a, "ones_like", dtype, shape)
    return _weak_like(_filled(own, 1, kind, _place_like(a, shape, device)), a, dtype)


def empty_like(
    prototype: ArrayLike,
    dtype: DTypeLike | None = None,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    device: Any = None,
) -> Array:
    """``zeros_like`` under the name of arrays whose elements are of no concern."""
    return zeros_like(prototype, dtype, shape, device=device)


def full_like(
    a: ArrayLike,
    fill_value: ArrayLike,
    dtype: DTypeLike | None = None,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    device: Any = None,
) -> Array:
    """An array of the shape and dtype of ``a``, unless given, filled with a value."""
    own, kind = _like(a, "full_like", dtype, shape)
    if isinstance(fill_value, complex) and not dtypes.is_complex(kind):
        raise errors.DtypeError(
            f"full_like: {fill_value} cannot become {dtypes.short_name(kind)}.",
            where=source.here(),
            fix="fill with the real part, or ask for dtype='complex64'",
        )
    return _weak_like(full(own, fill_value, kind, device=_place_like(a, shape, device)), a, dtype)


# -- sequences -------------------------------------------------------------------------------------


def arange(
    start: ArrayLike,
    stop: ArrayLike | None = None,
    step: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Any = None,
) -> Array:
    """``start``, ``start + step``, ... below ``stop``: rank 1.

    The dtype is int32, or float32 if one of them is a float.

    The length must be known while tracing, so all three are Python or NumPy numbers.
    """
    start, stop, step = (_static_number(v, "arange") for v in (start, stop, step))
    if stop is None:
        start, stop = 0, start
    step = 1 if step is None else step
    if step == 0:
        raise errors.ValueRangeError("arange: the step is 0.", where=source.here(), fix="use linspace")
    is_int = all(isinstance(v, int) for v in (start, stop, step))
    want = dtype_of(dtype) or dtypes.default(int if is_int else float)
    if state.trace is EVAL and not (is_int and start == 0 and step == 1):
        host = np.arange(start, stop, step)
        if is_int and host.size and dtypes.is_integer(want):
            _check_ends(want, host[0], host[-1])
        if dtype is None and is_int and host.size:
            for end in (host[0], host[-1]):
                dtypes.scalar_dtype(int(end))
        return from_numpy(numerics.convert(host, want), parse_device(device))
    count = max(0, -(-(stop - start) // step) if is_int else math.ceil((stop - start) / step))
    place = parse_device(device)
    if place is not None and (state.trace is EVAL or place != backend.default_device()):
        return from_numpy(numerics.convert(np.arange(start, stop, step), want), place)
    if not dtypes.is_integer(want) and not dtypes.is_inexact(want):
        raise errors.DtypeError(f"arange of dtype {dtypes.short_name(want)}.", where=source.here())
    if is_int and count and dtypes.is_integer(want) and (start or step != 1):
        _check_ends(want, start, start + (count - 1) * step)
        if count - 1 > dtypes.iinfo(want).max:  # from below 0
            return ops.convert(arange(start, stop, step, dtypes.int64), want)
    result = iota(want, (count,), 0)
    if step != 1:
        result = ops.mul_p.bind(result, constant(step, want))
    return result if start == 0 else ops.add_p.bind(result, constant(start, want))


def _check_ends(dtype: np.dtype, first: Any, last: Any) -> None:
    """Check that a range of integers fits in ``dtype``."""
    limits = dtypes.iinfo(dtype)
    for end in (int(first), int(last)):
        if not limits.min <= end <= limits.max:
            raise errors.ValueRangeError(
                f"arange: {end} does not fit in {dtypes.short_name(dtype)}.",
                where=source.here(),
                why="it would wrap around to another number.",
                fix="a wider dtype, such as dtype='int64'",
            )


def _static_number(x: Any, name: str) -> Any:
    if x is None or x.__class__ in PYTHON_SCALARS:
        return int(x) if x.__class__ is bool else x
    if isinstance(x, (np.generic, np.ndarray)) and np.ndim(x) == 0:
        return x.item()
    if isinstance(x, ConcreteArray) and not x.aval.ndim and not dtypes.is_key(x.aval.dtype):
        return x.item()
    if isinstance(x, Array):
        if x.aval.ndim or dtypes.is_key(x.aval.dtype):
            raise errors.ShapeError(f"{name} takes numbers, not {x.aval}.", where=source.here())
        return x.__index__()  # raises, and says why
    raise errors.ArgumentError(
        f"{name} takes numbers, not a {type(x).__name__}.", where=source.here(), fix="pass Python numbers"
    )


def _ends(name: str, want: np.dtype | None, *ends: Any) -> list[Array]:
    """The ends of a range, in the dtype to compute it in.

    It is the dtype of the result, or float64 for integers that float32 does not hold.
    """
    if want is not None and dtypes.is_integer(want) and want.itemsize >= 4:
        want = dtypes.float64
    if want is None or not dtypes.is_inexact(want):
        return promote_dtypes(name, *ends, inexact=True)
    return [as_dtype_of(x, want, name) for x in ends]


def _along(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """``x`` repeated along a new ``axis`` of ``shape``; rank 0 stays."""
    dims = tuple(d for d in range(len(shape)) if d != axis)
    return broadcast_in_dim_p.bind(x, shape=shape, dims=dims) if x.aval.ndim else x


@overload
def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    retstep: Literal[False] = False,
    dtype: DTypeLike | None = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Array: ...
@overload
def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    *,
    retstep: Literal[True],
    dtype: DTypeLike | None = None,
    axis: int = 0,
    device: Any = None,
) -> tuple[Array, Array]: ...
@overload
def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: DTypeLike | None = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Array | tuple[Array, Array]: ...


def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: DTypeLike | None = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Any:
    """``num`` evenly spaced floats from ``start`` to ``stop`` (if ``endpoint``).

    The ends may be arrays, which broadcast; the new axis is ``axis``. With ``retstep``, also the spacing.
    """
    place = parse_device(device)
    if place is not None and (state.trace is EVAL or place != backend.default_device()):
        return _linspace_on(place, start, stop, num, endpoint, retstep, dtype, axis)
    num = static_int(num, "linspace", "num")
    if num < 0:
        raise errors.ValueRangeError(f"linspace: num is {num}.", where=source.here(), fix="use 0 or more")
    want = dtype_of(dtype)
    lo, hi = _ends("linspace", want, start, stop)
    lo, hi = match_shapes("linspace", lo, hi)
    kind = lo.aval.dtype
    shape = lo.aval.shape or hi.aval.shape
    axis = axis_in(axis, len(shape) + 1, "linspace")
    parts = num - 1 if endpoint else num
    full_shape = (*shape[:axis], num, *shape[axis:])
    real = np.dtype(f"f{kind.itemsize // 2}") if dtypes.is_complex(kind) else kind
    t = cast(iota(dtypes.float32 if real.itemsize < 4 else real, full_shape, axis), real)
    fraction = cast(ops.div_p.bind(t, constant(max(parts, 1), real)), kind)
    # lo + f (hi - lo) may miss hi: weigh the ends instead, which is exact at both
    rest = ops.sub_p.bind(constant(1, kind), fraction)
    result = ops.add_p.bind(
        ops.mul_p.bind(_along(lo, full_shape, axis), rest),
        ops.mul_p.bind(_along(hi, full_shape, axis), fraction),
    )
    if want is not None and want != kind:
        result = ops.convert(ew.floor(result) if dtypes.is_integer(want) else result, want)
    if not retstep:
        return result
    # without a second point there is no spacing
    return result, ops.div_p.bind(ops.sub_p.bind(hi, lo), constant(parts if parts > 0 else math.nan, kind))


def _linspace_on(place: backend.Device, start: Any, stop: Any, *options: Any) -> Any:
    """``linspace`` on a device; in a program, a constant that is there."""
    if any(isinstance(x, Array) and not isinstance(x, ConcreteArray) for x in (start, stop)):
        return _from_value(linspace(start, stop, *options), None, None, place)
    with set_trace(EVAL):
        result = linspace(start, stop, *options)
        many = result if isinstance(result, tuple) else (result,)
        moved = tuple(_from_value(x, None, None, place) for x in many)
    return moved if isinstance(result, tuple) else moved[0]


def logspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    base: ArrayLike = 10.0,
    dtype: DTypeLike | None = None,
    axis: int = 0,
) -> Array:
    """``base`` to the powers ``linspace(start, stop, num)``, as floats."""
    want = dtype_of(dtype)
    base, start, stop = _ends("logspace", want, base, start, stop)
    result = ew.power(base, linspace(start, stop, num, endpoint, axis=axis))
    return result if want is None else astype(result, want)


def geomspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,
    dtype: DTypeLike | None = None,
    axis: int = 0,
) -> Array:
    """``num`` numbers from ``start`` to ``stop`` with a constant ratio.

    Real ends are of one sign. Complex ones are joined by a spiral about 0, of at most half a turn.
    """
    want = dtype_of(dtype)
    start, stop = match_shapes("geomspace", *_ends("geomspace", want, start, stop))
    num = static_int(num, "geomspace", "num")
    size = ew.abs(start)
    sign = ew.divide(start, size) if dtypes.is_complex(start.aval.dtype) else ew.sign(start)
    logs = linspace(ew.log(size), ew.log(ew.divide(stop, sign)), num, endpoint, axis=axis)
    shape = logs.aval.shape
    at = axis_in(axis, len(shape), "geomspace")
    result = ops.mul_p.bind(_along(sign, shape, at), ew.exp(logs))
    # logarithms are rounded; the ends need not be
    position = iota(dtypes.int32, shape, at)
    result = ops.select(ops.eq(position, 0), _along(start, shape, at), result)
    if endpoint and num > 1:
        result = ops.select(ops.eq(position, num - 1), _along(stop, shape, at), result)
    return result if want is None else astype(result, want)


# -- matrices --------------------------------------------------------------------------------------


def _below(rows: int, columns: int, k: int) -> Array:
    """Mask of ``column - row <= k``."""
    row, column = (iota(dtypes.int32, (rows, columns), d) for d in (0, 1))
    return ops.ge_p.bind(row if not k else ops.add_p.bind(row, constant(k, dtypes.int32)), column)


def eye(
    N: int, M: int | None = None, k: int = 0, dtype: DTypeLike | None = None, *, device: Any = None
) -> Array:
    """An ``(N, M)`` matrix, ones on diagonal ``k``, else zeros, float32 by default."""
    n = static_int(N, "eye", "N")
    m = n if M is None else static_int(M, "eye", "M")
    k = static_int(k, "eye", "k")
    n, m = shape_of((n, m), "eye")
    want = dtype_of(dtype) or dtypes.default(float)
    place = parse_device(device)
    if state.trace is EVAL or place not in (None, backend.default_device()):
        return from_numpy(np.eye(n, m, k).astype(want), place)
    row, column = (iota(dtypes.int32, (n, m), d) for d in (0, 1))
    row = row if not k else ops.add_p.bind(row, constant(k, dtypes.int32))
    return ops.convert(ops.eq_p.bind(row, column), want)


def identity(n: int, dtype: DTypeLike | None = None) -> Array:
    """The ``(n, n)`` identity matrix, float32 unless given."""
    return eye(n, dtype=dtype)


def tri(N: int, M: int | None = None, k: int = 0, dtype: DTypeLike | None = None) -> Array:
    """An ``(N, M)`` matrix, ones up to diagonal ``k``, else 0, float32 by default."""
    n = static_int(N, "tri", "N")
    mask = _below(n, n if M is None else static_int(M, "tri", "M"), static_int(k, "tri", "k"))
    return ops.convert(mask, dtype_of(dtype) or dtypes.default(float))


def _triangle(x: Any, k: int, name: str, keep_below: bool) -> Array:
    x = as_value(x, name)
    if x.aval.ndim < 2:
        raise errors.ShapeError(
            f"{name} takes matrices, not {x.aval}.", where=source.here(), fix="x[None, :]"
        )
    rows, columns = x.aval.shape[-2:]
    mask = _below(rows, columns, static_int(k, name, "k") - (not keep_below))
    mask = stretch(mask, x.aval.shape)
    zero = constant(0, x.aval.dtype)
    return ops.select_p.bind(mask, x, zero) if keep_below else ops.select_p.bind(mask, zero, x)


def tril(m: ArrayLike, k: int = 0) -> Array:
    """Matrices ``(..., n, m)`` with zeros above diagonal ``k``."""
    return _triangle(m, k, "tril", True)


def triu(m: ArrayLike, k: int = 0) -> Array:
    """Matrices ``(..., n, m)`` with zeros below diagonal ``k``."""
    return _triangle(m, k, "triu", False)


def _triangle_sizes(name: str, n: Any, k: Any, m: Any) -> tuple[int, int, int]:
    n, k = static_int(n, name, "n"), static_int(k, name, "k")
    n, m = shape_of((n, n if m is None else m), name)
    return n, k, m


def tril_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Array, Array]:
    """Rows and columns, int32, of the lower triangle of an ``(n, m)`` matrix."""
    n, k, m = _triangle_sizes("tril_indices", n, k, m)
    rows, columns = np.tril_indices(n, k, m)
    return asarray(rows), asarray(columns)


def triu_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Array, Array]:
    """Rows and columns, int32, of the upper triangle of an ``(n, m)`` matrix."""
    n, k, m = _triangle_sizes("triu_indices", n, k, m)
    rows, columns = np.triu_indices(n, k, m)
    return asarray(rows), asarray(columns)


def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> list[Array]:
    """Coordinate arrays of a grid from its coordinates along each axis.

    ``indexing='ij'`` gives arrays of shape ``(n1, n2, ...)``; ``'xy'`` swaps the first two axes. With
    ``sparse`` they keep size 1 along the axes on which they do not depend. ``copy`` has no effect.
    """
    if indexing not in ("xy", "ij"):
        raise errors.ValueRangeError(
            f"meshgrid: indexing is {indexing!r}.", where=source.here(), fix="use 'xy' or 'ij'"
        )
    values = [as_value(x, "meshgrid") for x in xi]
    values = [reshape(v, (v.aval.size,)) for v in values]
    order = list(range(len(values)))
    if indexing == "xy" and len(values) > 1:
        order[:2] = [1, 0]
    shape = [0] * len(values)
    for v, axis in zip(values, order, strict=True):
        shape[axis] = v.aval.size
    result = []
    for v, axis in zip(values, order, strict=True):
        if sparse:
            result.append(reshape(v, tuple(v.aval.size if d == axis else 1 for d in range(len(shape)))))
        else:
            result.append(broadcast_in_dim_p.bind(v, shape=tuple(shape), dims=(axis,)))
    return result


@overload
def indices(
    dimensions: Sequence[int], dtype: DTypeLike | None = None, sparse: Literal[False] = False
) -> Array: ...
@overload
def indices(
    dimensions: Sequence[int], dtype: DTypeLike | None = None, *, sparse: Literal[True]
) -> tuple[Array, ...]: ...
@overload
def indices(
    dimensions: Sequence[int], dtype: DTypeLike | None = None, sparse: bool = False
) -> Array | tuple[Array, ...]: ...


def indices(dimensions: Sequence[int], dtype: DTypeLike | None = None, sparse: bool = False) -> Any:
    """The coordinates of the elements of an array of shape ``dimensions``, int32.

    One array ``(rank, *dimensions)``; with ``sparse`` a tuple of arrays that broadcast to ``dimensions``.
    """
    shape, kind = shape_of(dimensions, "indices"), dtype_of(dtype) or dtypes.default(int)
    if sparse:
        return tuple(
            iota(kind, tuple(n if d == i else 1 for d in range(len(shape))), i) for i, n in enumerate(shape)
        )
    rows = [reshape(iota(kind, shape, d), (1, *shape)) for d in range(len(shape))]
    return concatenate(rows, 0) if rows else zeros((0, *shape), kind)


def vander(x: ArrayLike, N: int | None = None, increasing: bool = False) -> Array:
    """The powers of a vector's elements as columns ``(n, N)``, descending by default."""
    x = as_value(x, "vander")
    if x.aval.ndim != 1:
        raise errors.ShapeError(
            f"vander takes a vector, not {x.aval}.", where=source.here(), fix="flatten it first: x.ravel()"
        )
    (n,) = x.aval.shape if N is None else shape_of((N,), "vander")
    powers = range(n) if increasing else range(n - 1, -1, -1)
    columns = [reshape(ew.power(x, p), (x.aval.shape[0], 1)) for p in powers]
    return concatenate(columns, 1) if columns else zeros((x.aval.shape[0], 0), x.aval.dtype)
