"""Restoring: leaves from files, as a pytree of given types on given devices.

Above reading. In: open files, and a pytree that says what is expected (``like``). Out: that pytree with the values of
the files. Each process reads what its devices hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.pytree import tree
from blufunc.io import elements
from blufunc.io.header import Stored
from blufunc.io.names import named_leaves
from blufunc.io.reading import File, Index
from blufunc.parallel.mesh.sharding import NamedSharding, SingleDeviceSharding
from blufunc.parallel.programs.mesh_device import device_on
from blufunc.parallel.runtime.sharded_buffer import from_parts
from blufunc.transforms.arguments import ShapeDtypeStruct


@dataclass
class Leaf:
    """An array of one or several files.

    Attributes:
      name, dtype, shape, weak: of the whole.
      parts: in which files it is.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    weak: bool
    parts: list[tuple[File, Stored]] = field(default_factory=list)

    def read(self, index: Index | None = None) -> np.ndarray:
        """The elements at an index, read-only.

        Raises:
          DataError: a part is damaged.
        """
        index = tuple(slice(0, n) for n in self.shape) if index is None else index
        if len(self.parts) == 1 and self.parts[0][1].shape == self.shape:
            file, stored = self.parts[0]
            return file.read(stored, index)
        out = np.empty([s.stop - s.start for s in index], self.dtype)
        for file, stored in self.parts:
            if (common := _overlap(index, stored)) is not None:
                out[common[0]] = file.read(stored, common[1])
        out.flags.writeable = False
        return out


def _overlap(index: Index, stored: Stored) -> tuple[Index, Index] | None:
    """The overlap of an index and a part, relative to each; None without one."""
    common = [
        (max(s.start, at), min(s.stop, at + n))
        for s, at, n in zip(index, stored.origin, stored.shape, strict=True)
    ]
    if any(start >= stop for start, stop in common):
        return None
    to = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(common, index, strict=True))
    of = tuple(slice(a - at, b - at) for (a, b), at in zip(common, stored.origin, strict=True))
    return to, of


class Source:
    """The leaves of files that belong together.

    Args:
      files: all of them.
      path: of what they are, for messages.
    Raises:
      DataError: parts of an array are missing or contradict each other.

    Attributes:
      arrays, scalars: leaves by name.
    """

    def __init__(self, files: Sequence[File], path: str):
        self.path = path
        self.arrays: dict[str, Leaf] = {}
        self.scalars: dict[str, Any] = {}
        for file in files:
            self.scalars |= file.header.scalars
            for stored in file.header.arrays:
                leaf = self.arrays.setdefault(
                    stored.leaf, Leaf(stored.leaf, stored.dtype, stored.whole, stored.weak)
                )
                if (leaf.dtype, leaf.shape) != (stored.dtype, stored.whole):
                    raise self._broken(leaf, f"parts of it are of {stored.dtype} {list(stored.whole)}")
                leaf.parts.append((file, stored))
        for leaf in self.arrays.values():
            n = sum(math.prod(stored.shape) for _, stored in leaf.parts)
            if n != math.prod(leaf.shape):
                raise self._broken(leaf, f"{n:,} of its {math.prod(leaf.shape):,} elements are there")

    def _broken(self, leaf: Leaf, why: str) -> errors.DataError:
        return errors.DataError(
            f"{leaf.name} is incomplete in {self.path}",
            where=self.path,
            why=why,
            fix="restore the whole checkpoint: io.Checkpointer(folder).restore(like)",
        )

    def flat(self) -> dict[str, Any]:
        """All leaves by name: NumPy arrays, if possible mapped, and Python scalars."""
        return {name: leaf.read() for name, leaf in self.arrays.items()} | self.scalars

    def restored(self, like: Any) -> Any:
        """A pytree like ``like`` with these values.

        Raises:
          DataError: names, kinds, shapes or dtypes differ, or a leaf is damaged.
        """
        wanted, treedef = named_leaves(like)
        self._check_names(set(wanted))
        for name, leaf in wanted.items():
            self._check(name, leaf)
        return tree.unflatten(treedef, [self._made(name, leaf) for name, leaf in wanted.items()])

    def _check_names(self, wanted: set[str]) -> None:
        found = self.arrays.keys() | self.scalars.keys()
        both = (("lacks", sorted(wanted - found)), ("also has", sorted(found - wanted)))
        if differences := ", and ".join(f"{verb} {_some(names)}" for verb, names in both if names):
            raise errors.DataError(
                f"{self.path} holds other leaves than `like`",
                where=self.path,
                why=f"it {differences}",
                fix="pass a tree of the structure that was saved; load(path) without `like` returns what there is",
            )

    def _check(self, name: str, like: Any) -> None:
        if _is_scalar(like) != (name in self.scalars):
            there = type(self.scalars[name]).__name__ if name in self.scalars else "array"
            raise self._other(name, "is of another kind", f"a Python {there}", f"a {type(like).__name__}")
        if name in self.scalars:
            value = self.scalars[name]
            if elements.kind_of(like) is not type(value):
                kinds = f"a {type(value).__name__}", f"a {type(like).__name__}"
                raise self._other(name, "is of another type", *kinds)
            return
        leaf = self.arrays[name]
        if not hasattr(like, "shape") or not hasattr(like, "dtype"):
            raise errors.ArgumentError(
                f"`like` has {like!r:.60} for {name}.",
                fix="arrays, bf.ShapeDtypeStruct, NumPy arrays or Python scalars",
            )
        if leaf.shape != tuple(like.shape):
            raise self._other(name, "has another shape", f"of shape {leaf.shape}", f"of {tuple(like.shape)}")
        if leaf.dtype != np.dtype(like.dtype).newbyteorder("="):
            raise self._other(name, "has another dtype", f"of {leaf.dtype}", f"of {np.dtype(like.dtype)}")

    def _other(self, name: str, what: str, there: str, wanted: str) -> errors.DataError:
        return errors.DataError(
            f"{name} {what} in {self.path} than in `like`",
            where=self.path,
            why=f"{name} is {there} in the file, and {wanted} in `like`",
            fix="restore with the model and settings that were saved",
        )

    def _made(self, name: str, like: Any) -> Any:
        if name in self.scalars:
            return self.scalars[name]
        leaf = self.arrays[name]
        if isinstance(like, (np.ndarray, np.generic)):
            found = np.array(leaf.read())
            return found[()] if isinstance(like, np.generic) else found
        if leaf.dtype not in dtypes.ALL:
            raise errors.DataError(
                f"{name} is of {leaf.dtype}, which arrays of blufunc cannot have",
                where=self.path,
                fix=f"a NumPy array in its place in `like`: np.empty({leaf.shape}, {leaf.dtype.name!r})",
            )
        sharding = getattr(like, "sharding", None)
        if isinstance(sharding, NamedSharding):
            layout, memory = sharding.with_memory_kind(DEVICE), sharding.memory_kind
            buffer = from_parts(leaf.read, leaf.shape, leaf.dtype, layout, memory)
            aval = ShapedArray(leaf.shape, leaf.dtype, leaf.weak, memory)
            return ConcreteArray(buffer, aval, device_on(sharding.concrete_mesh))
        if isinstance(sharding, SingleDeviceSharding):
            return from_numpy(leaf.read(), sharding.device, leaf.weak, sharding.memory_kind)
        memory = like.memory if isinstance(like, ShapeDtypeStruct) else DEVICE
        return from_numpy(leaf.read(), backend.default_device(), leaf.weak, memory)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, elements.SCALARS) and not isinstance(x, np.generic)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
