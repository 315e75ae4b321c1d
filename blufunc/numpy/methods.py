"""Operators and methods of arrays and tracers, on their common base class.

Face. ``install`` runs when ``blufunc.numpy`` is imported: the core knows no promotion, so its ``Array``
gets ``+``, ``[]``, ``.sum``, ``.at`` and printing from here. Operators between values of one type bind their
primitive at once; all else takes the way of the function of the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.arrays.array import PROTOCOLS, ConcreteArray, Donated, from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.trace import Array, Tracer
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import foreign
from blufunc.core.ops.offload import in_memory
from blufunc.core.primitives.linear_ops import reshape as reshape_to
from blufunc.core.primitives.primitive import Primitive
from blufunc.numpy import (
    creation,
    joining,
    linear,
    manipulation,
    picking,
    reductions,
    searching,
    sorting,
    ufunc_methods,
)
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import parse_device
from blufunc.numpy.indexing import getitem
from blufunc.numpy.promotion import PYTHON_SCALARS, broadcast_shapes
from blufunc.numpy.updating import At

with _lazy.modules(globals()):
    from blufunc.numpy import editing
    from blufunc.parallel.mesh import constrain as constraints

# -- operators -------------------------------------------------------------------------------------


def _foreign(y: Any) -> bool:
    """True if an operand's class should handle it: no array, scalar or sequence."""
    return not (
        y.__class__ in PYTHON_SCALARS
        or isinstance(y, (Array, np.ndarray, np.generic, bool, int, float, complex, list, tuple))
        or hasattr(y, "__array__")
        or any(hasattr(y, protocol) for protocol in PROTOCOLS)
        or foreign.is_foreign(y)
    )


def _operator(prim: Primitive, function: Callable, indirect: str) -> Callable:
    """A binary operator that binds ``prim`` for two values of one type.

    All other operands, and dtypes of the characters ``indirect``, go to the function.
    """
    bind = prim.bind

    def method(self: Array, other: Any) -> Any:
        if other.__class__ is self.__class__:
            aval = self.aval
            if aval is other.aval and aval.dtype.char not in indirect:
                return bind(self, other)
        elif other.__class__ not in PYTHON_SCALARS and _foreign(other):
            return NotImplemented
        return function(self, other)

    return method


def _from_function(function: Callable) -> Callable:
    def method(self: Array, other: Any) -> Any:
        if other.__class__ not in PYTHON_SCALARS and _foreign(other):
            return NotImplemented
        return function(self, other)

    return method


def _reflected(function: Callable) -> Callable:
    return _from_function(lambda self, other: function(other, self))


_COMPLEX = "".join(d.char for d in dtypes.ALL if dtypes.is_complex(d))
# NumPy has two 64-bit integers of one size, equal and with characters of their own
_INEXACT_QUOTIENTS = "qQ" + "".join(d.char for d in dtypes.ALL if dtypes.is_integer(d) or dtypes.is_bool(d))

_BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (_operator(ops.add_p, ew.add, "?"), ew.add),
    "sub": (_operator(ops.sub_p, ew.subtract, "?"), ew.subtract),
    "mul": (_operator(ops.mul_p, ew.multiply, "?"), ew.multiply),
    "truediv": (_operator(ops.div_p, ew.divide, _INEXACT_QUOTIENTS), ew.divide),
    "floordiv": (_from_function(ew.floor_divide), ew.floor_divide),
    "mod": (_from_function(ew.remainder), ew.remainder),
    "divmod": (_from_function(ew.divmod), ew.divmod),
    "matmul": (_from_function(linear.matmul), linear.matmul),
    "and": (_operator(ops.and_p, ew.bitwise_and, ""), ew.bitwise_and),
    "or": (_operator(ops.or_p, ew.bitwise_or, ""), ew.bitwise_or),
    "xor": (_operator(ops.xor_p, ew.bitwise_xor, ""), ew.bitwise_xor),
    "lshift": (_from_function(ew.left_shift), ew.left_shift),
    "rshift": (_from_function(ew.right_shift), ew.right_shift),
    "pow": (_from_function(ew.power), ew.power),
}
"""For each operator that has a reflected form: the method, and the function."""


def _comparison(function: Callable, of_nothing: bool) -> Callable:
    """The comparison of arrays, float0 among them: its elements are all zero."""

    def compare(x: Array, y: Any) -> Array:
        if x.aval.dtype == dtypes.float0 == getattr(y, "dtype", None):
            return creation.full(broadcast_shapes(x.shape, y.shape), of_nothing)
        return function(x, y)

    return compare


_COMPARISONS: dict[str, Callable] = {
    "eq": _operator(ops.eq_p, _comparison(ew.equal, True), "V"),
    "ne": _operator(ops.ne_p, _comparison(ew.not_equal, False), "V"),
    "lt": _operator(ops.lt_p, ew.less, _COMPLEX),
    "le": _operator(ops.le_p, ew.less_equal, _COMPLEX),
    "gt": _operator(ops.gt_p, ew.greater, _COMPLEX),
    "ge": _operator(ops.ge_p, ew.greater_equal, _COMPLEX),
}


def _iterate(self: Array) -> Iterator[Array]:
    if not self.aval.ndim:
        raise errors.ArgumentError(
            f"iteration over an array of rank 0 ({self.aval}).",
            where=source.here(),
            fix="x.item() is its element, if it is concrete",
        )
    return iter([getitem(self, i) for i in range(self.aval.shape[0])])


def _contains(self: Array, x: Any) -> bool:
    return bool(reductions.any(ew.equal(self, x)))


# -- methods ---------------------------------------------------------------------------------------


def _reshape(self: Array, *shape: Any, order: str = "C", out_sharding: Any = None) -> Array:
    """Reshape to a tuple or several ints, one of which may be -1."""
    new_shape = shape[0] if len(shape) == 1 else shape
    out = manipulation.reshape(self, new_shape, order)
    return out if out_sharding is None else constraints.constrain(out, out_sharding)


def _transpose(self: Array, *axes: Any) -> Array:
    """Permute the axes by a tuple or several ints; reverse them by default."""
    order = None if not axes else axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
    return manipulation.transpose(self, order)


def _astype(self: Array, dtype: Any, copy: bool = False) -> Array:
    """The array in another dtype; see ``blufunc.numpy.astype``."""
    return creation.astype(self, dtype, copy=copy)


def _view(self: Array, dtype: Any = None, *shape: Any) -> Array:
    """The bits of the elements as another dtype; widths change the last axis."""
    if shape or isinstance(dtype, (int, tuple, list)):
        raise errors.ArgumentError(
            "view takes a dtype, not a shape.", where=source.here(), fix=f"x.reshape({dtype!r:.40}, ...)"
        )
    if dtype is None:
        return self
    new = dtypes.as_dtype(dtype)
    old, *head = self.aval.dtype.itemsize, *self.aval.shape[:-1]
    if not self.aval.ndim or new.itemsize == old:
        return ops.bitcast(self, new)
    if new.itemsize < old:
        return reshape_to(ops.bitcast(self, new), (*head, self.aval.shape[-1] * (old // new.itemsize)))
    parts, n = new.itemsize // old, self.aval.shape[-1]
    if n % parts:
        raise errors.ShapeError(
            f"view of {self.aval} as {dtypes.short_name(new)}: {parts} elements make one, and the last axis has {n}.",
            where=source.here(),
            fix="pad or slice the last axis",
        )
    return ops.bitcast(reshape_to(self, (*head, n // parts, parts)), new)


def _to_device(self: Array, device: Any, *, stream: Any = None) -> Array:
    """The array on a device (or its name, such as ``'cpu:0'``)."""
    place = parse_device(device)
    if isinstance(self, Tracer) or place is None or self.device == place:  # type: ignore[attr-defined]
        return self
    return from_numpy(np.asarray(self), place, self.aval.weak_type)


def _compress(
    self: Array, condition: Any, axis: int | None = None, *, size: int | None = None, fill_value: Any = 0
) -> Array:
    """The slices along an axis that ``condition`` selects."""
    return editing.compress(condition, self, axis, size=size, fill_value=fill_value)


def _choose(self: Array, choices: Any, out: None = None, mode: str = "raise") -> Array:
    """The element of the choice that each integer names; see ``blufunc.numpy.choose``."""
    return editing.choose(self, choices, out, mode)


_API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")


def _array_namespace(self: Array, *, api_version: str | None = None) -> Any:
    """The namespace of the array API standard, ``blufunc.numpy``."""
    if api_version is not None and api_version not in _API_VERSIONS:
        raise errors.ValueRangeError(
            f"the array API standard has no version {api_version!r:.60} that is known here.",
            where=source.here(),
            fix=f"use one of {', '.join(_API_VERSIONS)}",
        )
    return sys.modules["blufunc.numpy"]


def _pow(self: Array, other: Any, modulus: Any = None) -> Any:
    if modulus is not None:
        return NotImplemented
    return _BINARY["pow"][0](self, other)


def _round(self: Array, ndigits: int | None = None) -> Array:
    return ew.round(self, ndigits or 0)


_SPECIAL: dict[str, Callable] = {
    "neg": ew.negative,
    "pos": ew.positive,
    "abs": ew.abs,
    "invert": ew.bitwise_not,
    "pow": _pow,
    "round": _round,
    "getitem": lambda self, index: getitem(self, index),
    "iter": _iterate,
    "contains": _contains,
    "array_namespace": _array_namespace,
    "copy": lambda self: self,
}

# No method ``trace``: a tracer's ``trace`` is the run that it belongs to. ``bnp.trace(x)`` is the sum.
_METHODS: dict[str, Callable] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "flatten": manipulation.ravel,
    "astype": _astype,
    "view": _view,
    "to_device": _to_device,
    "ravel": manipulation.ravel,
    "squeeze": manipulation.squeeze,
    "swapaxes": manipulation.swapaxes,
    "repeat": joining.repeat,
    "take": picking.take,
    "nonzero": picking.nonzero,
    "copy": creation.copy,
    "clip": ew.clip,
    "conj": ew.conj,
    "conjugate": ew.conj,
    "round": ew.round,
    "sum": reductions.sum,
    "prod": reductions.prod,
    "mean": reductions.mean,
    "var": reductions.var,
    "std": reductions.std,
    "max": reductions.max,
    "min": reductions.min,
    "ptp": reductions.ptp,
    "all": reductions.all,
    "any": reductions.any,
    "argmax": reductions.argmax,
    "argmin": reductions.argmin,
    "cumsum": reductions.cumsum,
    "cumprod": reductions.cumprod,
    "sort": sorting.sort,
    "argsort": sorting.argsort,
    "argpartition": sorting.argpartition,
    "choose": _choose,
    "clone": creation.copy,
    "compress": _compress,
    "searchsorted": searching.searchsorted,
    "dot": linear.dot,
    "diagonal": linear.diagonal,
}

# -- printing --------------------------------------------------------------------------------------


def _shown(x: ConcreteArray) -> np.ndarray:
    """The values as NumPy can print them."""
    host = np.asarray(x)
    narrow = dtypes.is_floating(host.dtype) and host.dtype not in (dtypes.float32, dtypes.float64)
    return host.astype(np.float32) if narrow and host.dtype != dtypes.float16 else host


def _array_deepcopy(self: ConcreteArray, memo: dict) -> Array:
    """A copy in storage of its own, in the same memory."""
    return in_memory(creation.copy(in_memory(self, DEVICE)), self.aval.memory)


def _array_repr(self: ConcreteArray) -> str:
    aval = self.aval
    if self._buffer.__class__ is Donated:
        return f"Array(shape={aval.shape}, dtype={aval.dtype.name}, donated)"
    if dtypes.is_key(aval.dtype):
        return f"Array({aval.shape}) key<fry>"
    if aval.dtype == dtypes.float0:
        return f"Array(shape={aval.shape}, dtype=float0)"
    suffix = f", dtype={aval.dtype.name}" + (", weak_type=True" if aval.weak_type else "")
    if not _is_here(self):
        return f"Array(shape={aval.shape}{suffix}, on {self.device})"
    if not aval.size:
        return f"Array([], shape={aval.shape}{suffix})"
    text = np.array2string(_shown(self), separator=", ", prefix="Array(", suffix=suffix + ")")
    return f"Array({text}{suffix})"


def _is_here(x: Any) -> bool:
    """True if this process has all values: an array may span several processes."""
    return x.is_fully_addressable or x.is_fully_replicated


def _array_str(self: ConcreteArray) -> str:
    if self._buffer.__class__ is Donated or self.aval.dtype.fields is not None or not _is_here(self):
        return _array_repr(self)
    return str(_shown(self))


def _array_format(self: ConcreteArray, spec: str) -> str:
    if not spec:
        return str(self)
    if self.aval.ndim:
        raise errors.ArgumentError(
            f"the format {spec!r} is for numbers, this is {self.aval}.",
            where=source.here(),
            fix="format the elements, or np.array2string(np.asarray(x), ...)",
        )
    return format(self.item(), spec)


def _tracer_format(self: Tracer, spec: str) -> str:
    if not spec:
        return str(self)
    raise self._not_concrete(
        f"the format {spec!r}", "f'{x}' shows the type; print values outside the transform"
    )


def _needs_values(name: str) -> Callable:
    def method(self: Tracer) -> Any:
        raise self._not_concrete(f"{name}()", "keep it an array, or compute it outside the transform")

    method.__doc__ = f"An error: ``{name}`` needs values, which a traced array does not have."
    return method


# -- installation ----------------------------------------------------------------------------------


def install() -> None:
    """Give arrays and tracers their operators and methods, and functions theirs."""
    ufunc_methods.install()
    for name, (method, function) in _BINARY.items():
        setattr(Array, f"__{name}__", method)
        setattr(Array, f"__r{name}__", _reflected(function))
    for name, method in (_COMPARISONS | _SPECIAL).items():
        setattr(Array, f"__{name}__", method)
    for name, function in _METHODS.items():
        setattr(Array, name, function)
    for name, (getter, doc) in {
        "at": (
            At,
            "Updates: ``x.at[index].set(values)``, and ``add``, ``multiply``, ``min``, ``max``, ``get``.",
        ),
        "T": (lambda self: manipulation.transpose(self), "The array with all axes reversed."),
        "mT": (lambda self: manipulation.matrix_transpose(self), "The array with its last two axes swapped."),
        "real": (ew.real, "The real part."),
        "imag": (ew.imag, "The imaginary part."),
        "itemsize": (lambda self: self.aval.dtype.itemsize, "The number of bytes of an element."),
        "flat": (lambda self: iter(reshape_to(self, (self.aval.size,))), "An iterator over the elements."),
    }.items():
        setattr(Array, name, property(getter, doc=doc))
    for name, function in {
        "__repr__": _array_repr,
        "__str__": _array_str,
        "__format__": _array_format,
        "__deepcopy__": _array_deepcopy,
    }.items():
        setattr(ConcreteArray, name, function)
    for name, function in {
        "__format__": _tracer_format,
        # where a traced value will be is not known: None, which as ``device=`` leaves the choice open
        "device": property(lambda self: None, doc="None: the device of a traced array is not known."),
        "item": _needs_values("item"),
        "tolist": _needs_values("tolist"),
        "__deepcopy__": lambda self, memo: self,
    }.items():
        setattr(Tracer, name, function)
