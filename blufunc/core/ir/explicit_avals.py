"""Types of values on a mesh with ``Explicit`` axes, with their shardings.

Core, made on demand: programs are traced, compiled and compared by ``ShapedArray``, and ``typeof`` shows these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray


class ExplicitArray(ShapedArray):
    """A ``ShapedArray`` with its sharding along explicit axes.

    Attributes:
      sharding: a ``NamedSharding`` on an abstract mesh; other axes of the mesh shard no dimension of it.
    """

    __slots__ = ("_sharding",)
    _sharding: Any

    def __new__(cls, aval: ShapedArray, sharding: Any) -> ExplicitArray:
        self = object.__new__(cls)
        for name in ShapedArray.__slots__:
            setattr(self, name, getattr(aval, name))
        self._sharding = sharding
        return self

    def __reduce__(self) -> Any:
        return (ExplicitArray, (self.with_shape(self.shape), self._sharding))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExplicitArray) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple:
        return self.shape, self.dtype, self.weak_type, self.memory, self._sharding

    def __str__(self) -> str:
        plain = ShapedArray.__str__(self)
        start = plain.index("[")
        dims = [_shown(n, e) for n, e in zip(self.shape, self._sharding.spec, strict=True)]
        return f"{plain[:start]}[{','.join(dims)}]"

    @property
    def sharding(self) -> Any:
        return self._sharding

    def retyped(self, aval: ShapedArray, dim: int) -> ShapedArray:
        entries: Sequence[Any] = tuple(self._sharding.spec)
        spec = self._sharding.spec.with_entries([*entries[:dim], *entries[dim + 1 :]])
        return ExplicitArray(aval, type(self._sharding)(self._sharding.mesh, spec))


def _shown(size: int, entry: Any) -> str:
    """A dimension with the axes that shard it."""
    if entry is None:
        return str(size)
    return f"{size}@{entry}" if isinstance(entry, str) else f"{size}@({','.join(entry)})"
