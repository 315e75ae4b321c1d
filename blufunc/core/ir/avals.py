"""Abstract values: shape, dtype and weakness of an array.

Core, before tracing: tracers and jaxpr variables carry a ``ShapedArray``, and the abstract rules of
primitives map ``ShapedArray`` to ``ShapedArray``. They are interned: equal avals are one object, so
comparison and hashing (at every dispatch) cost as much as for a pointer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir import dtypes

DEVICE, PINNED_HOST = "device", "pinned_host"
"""Kinds of memory: that of the device, and page-locked memory of its host."""


placed: Any = None
"""The type with a sharding and in a memory, which are above types.

Its arguments are those of ``parallel/partition/explicit_types.placed``. Set by ``blufunc/__init__.py``.
"""


class AbstractValue:
    """Base of the types of values; ``ShapedArray`` is the one there is."""

    __slots__ = ()


class Unsharded:
    """The sharding of types: they have none, as JAX's without explicit axes.

    Shardings are inferred when a program is compiled; those of arrays are theirs, not their types'.

    Attributes:
      spec: None for each axis.
    """

    __slots__ = ("spec",)
    is_fully_replicated = True

    def __init__(self, ndim: int):
        self.spec = (None,) * ndim

    def update(self, **changes: Any) -> Unsharded:
        """Itself: types do not get shardings."""
        return self


class ManualAxisType(NamedTuple):
    """The mesh axes over which a value in a ``shard_map`` differs between ranks.

    Attributes:
      varying: each rank has its own value.
      unreduced: the value is the sum over the ranks.
      reduced: all ranks have the value, and its cotangent is unreduced.
    """

    varying: frozenset[str] = frozenset()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()


_SAME_ON_ALL = ManualAxisType()


class ShapedArray(AbstractValue):
    """The type of an array: shape, dtype, whether the dtype is weak, and its memory.

    A weak dtype comes from a Python scalar and gives way in promotion. Only rank-0 values are ever
    weak: as soon as a value has extent, its dtype is a decision.

    ``sharding``, ``vma`` and ``memory_space`` are of the constructor that JAX's types have. With a sharding on a mesh
    with ``Explicit`` axes the type is an ``ExplicitArray``; ``memory_space`` is a ``Space`` or a kind, and gives
    ``memory``. The axes of ``vma`` are inferred in each ``shard_map``, and types here have none.

    Attributes:
      shape: tuple of int.
      dtype: ``np.dtype``.
      weak_type: bool.
      memory: the kind of memory, ``"device"`` or ``"pinned_host"``; only transfers take others than ``"device"``.
      ndim, size: rank and number of elements.
    """

    __slots__ = ("dtype", "memory", "ndim", "shape", "size", "weak_type")
    shape: tuple[int, ...]
    dtype: np.dtype
    weak_type: bool
    memory: str
    ndim: int
    size: int

    _interned: dict[tuple, ShapedArray] = {}  # noqa: RUF012  (one table for the process, on purpose)

    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: np.dtype,
        weak_type: bool = False,
        memory: str = DEVICE,
        *,
        sharding: Any = None,
        vma: frozenset[str] = frozenset(),
        memory_space: Any = None,
    ) -> ShapedArray:
        if sharding is not None or memory_space is not None:
            return placed(cls(shape, dtype, weak_type, memory), sharding, memory_space)
        key = (shape, dtype, weak_type, memory)
        try:
            known = cls._interned.get(key)
        except TypeError:  # a list, from a user
            return cls(tuple(shape), dtype, weak_type, memory)
        if known is not None:
            return known
        if not isinstance(dtype, np.dtype):
            return cls._interned.setdefault(key, cls(shape, dtypes.as_dtype(dtype), weak_type, memory))
        self = object.__new__(cls)
        self.shape, self.dtype, self.ndim, self.size = shape, dtype, len(shape), math.prod(shape)
        self.weak_type, self.memory = weak_type and not shape, memory
        canonical = (shape, dtype, self.weak_type, memory)
        return cls._interned.setdefault(key, cls._interned.setdefault(canonical, self))

    def __reduce__(self):
        return (ShapedArray, (self.shape, self.dtype, self.weak_type, self.memory))

    def __repr__(self) -> str:
        return f"ShapedArray({self})"

    def __str__(self) -> str:
        weak = "~" if self.weak_type else ""
        name = dtypes.short_name(self.dtype) + ("<host>" if self.memory == PINNED_HOST else "")
        return f"{weak}{name}[{','.join(map(str, self.shape))}]"

    @property
    def sharding(self) -> Unsharded:
        """The sharding that the type tells: none."""
        return Unsharded(self.ndim)

    @property
    def manual_axis_type(self) -> ManualAxisType:
        """The mesh axes over which the value differs: some only in a ``shard_map``."""
        return _SAME_ON_ALL

    @property
    def vma(self) -> frozenset[str]:
        """The varying manual axes: ``manual_axis_type.varying``."""
        return self.manual_axis_type.varying

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.size * self.dtype.itemsize

    def retyped(self, aval: ShapedArray, dim: int) -> ShapedArray:
        """The type ``aval`` of an element along ``dim``, on a mesh as this one is."""
        return aval

    def with_shape(self, shape: tuple[int, ...]) -> ShapedArray:
        """The same dtype and memory with another shape."""
        return ShapedArray(shape, self.dtype, self.weak_type, self.memory)

    def with_dtype(self, dtype: np.dtype) -> ShapedArray:
        """The same shape with another, strong dtype."""
        return ShapedArray(self.shape, dtype)

    def strong(self) -> ShapedArray:
        """The same shape, dtype and memory, not weak."""
        return ShapedArray(self.shape, self.dtype, False, self.memory) if self.weak_type else self

    strip_weak_type = strong

    def weak_as(self, other: ShapedArray) -> ShapedArray:
        """The same shape, dtype and memory, weak if ``other`` is."""
        if self.weak_type == other.weak_type:
            return self
        return ShapedArray(self.shape, self.dtype, other.weak_type, self.memory)

    def in_memory(self, memory: str) -> ShapedArray:
        """The same type in another kind of memory."""
        if memory == self.memory:
            return self
        return ShapedArray(self.shape, self.dtype, self.weak_type, memory)

    def update(self, **changes: Any) -> ShapedArray:
        """The type with another ``shape``, ``dtype``, ``weak_type`` or ``memory``."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        return ShapedArray(**fields | changes)

    def str_short(self, short_dtypes: bool = False) -> str:
        """The type as text, as JAX writes it, or as in a jaxpr."""
        name = dtypes.short_name(self.dtype) if short_dtypes else self.dtype.name
        return f"{name}[{','.join(map(str, self.shape))}]"

    def tangent(self) -> ShapedArray:
        """The type of this type's tangents: the same for inexact dtypes, else ``float0``.

        Tangents are in the memory of the device.
        """
        if dtypes.is_inexact(self.dtype):
            return self.in_memory(DEVICE)
        return ShapedArray(self.shape, dtypes.float0)

    to_tangent_aval = tangent

    def same_type(self, other: ShapedArray) -> bool:
        """True if shape, dtype and memory agree; weakness is ignored."""
        return self is other or (
            self.shape == other.shape and self.dtype == other.dtype and self.memory == other.memory
        )


_FIELDS = ("shape", "dtype", "weak_type", "memory")


class Typed:
    """Base of objects that have the type ``aval``."""

    __slots__ = ()
    aval: ShapedArray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, a tuple of int."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.aval.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.aval.size
