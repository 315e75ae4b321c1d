"""Meshes: devices, or only their count, arranged along named axes.

Parallel, before stage 3. In: devices or sizes, and names of axes. Out: ``AbstractMesh``, for which programs are
partitioned, and ``Mesh``, on which they run. Partition specs refer to axes by name. The rank of a device is its
row-major position in the mesh.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.ir import source
from blufunc.core.ir.axes import ints
from blufunc.core.ir.trace import state


class AxisType(enum.Enum):
    """Who decides how values are sharded along a mesh axis.

    ``Auto``: the compiler; if operands disagree, by the priorities of ``partition/propagate.py``. ``Explicit``: the
    program. Results have the layout of their operands, and operands that disagree are an error. ``Manual``: a
    ``shard_map``, in whose function values are shards along the axis. No mesh is made with it.
    """

    Auto = enum.auto()
    Explicit = enum.auto()
    Manual = enum.auto()

    def __repr__(self) -> str:
        return f"AxisType.{self.name}"


class AxisSizes:
    """Base of meshes with and without devices: named axes and their sizes.

    Attributes:
        axis_names: the name of each axis.
        axis_sizes: its size.
        axis_types: its ``AxisType``.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_types: tuple[AxisType, ...]

    def _set_axes(self, sizes: tuple[int, ...], names: Any, types: Any, what: str) -> None:
        """Check and set the axes for the constructor ``what``."""
        self.axis_sizes, self.axis_names = sizes, _names(names, len(sizes), what)
        _check_sizes(sizes, what)
        self.axis_types = _types(types, len(sizes), what)
        self._axes = self.axis_sizes, self.axis_names, self.axis_types

    @functools.cached_property
    def explicit(self) -> frozenset[str]:
        """The names of the axes that are ``Explicit``."""
        return frozenset(self.explicit_axes)

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The names of the axes that are ``Manual``."""
        return self._of_type(AxisType.Manual)

    @property
    def auto_axes(self) -> tuple[str, ...]:
        """The names of the axes that are ``Auto``."""
        return self._of_type(AxisType.Auto)

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """The names of the axes that are ``Explicit``."""
        return self._of_type(AxisType.Explicit)

    def _of_type(self, kind: AxisType) -> tuple[str, ...]:
        pairs = zip(self.axis_names, self.axis_types, strict=True)
        return tuple(name for name, t in pairs if t is kind)

    @functools.cached_property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis by name, in the order of the axes."""
        return MappingProxyType(dict(zip(self.axis_names, self.axis_sizes, strict=True)))

    @functools.cached_property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.axis_sizes)

    @property
    def empty(self) -> bool:
        """True if there are no axes."""
        return not self.axis_names

    @property
    def are_all_axes_explicit(self) -> bool:
        """True if there are axes, and each is ``Explicit``."""
        return bool(self.axis_types) and all(kind is AxisType.Explicit for kind in self.axis_types)

    @property
    def are_all_axes_auto(self) -> bool:
        """True if there are axes, and each is ``Auto``."""
        return bool(self.axis_types) and all(kind is AxisType.Auto for kind in self.axis_types)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without its devices."""
        return AbstractMesh(self.axis_sizes, self.axis_names, axis_types=self.axis_types)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank along each axis."""
        return dict(zip(self.axis_names, map(int, np.unravel_index(rank, self.axis_sizes)), strict=True))

    def size_of(self, axes: Sequence[str]) -> int:
        """The product of the sizes of several axes."""
        return math.prod(self.shape[name] for name in axes)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.shape.items())


def index_along(axes: Sequence[str], sizes: Sequence[int], coordinates: Mapping[str, int]) -> int:
    """The row-major index along ``axes``, from that along each axis."""
    index = 0
    for name, size in zip(axes, sizes, strict=True):
        index = index * size + coordinates[name]
    return index


class AbstractMesh(AxisSizes):
    """Named axes without devices, to partition and plan programs for.

    Args:
      axis_sizes: the size of each axis.
      axis_names: its name.
      axis_types: its ``AxisType``; one for all, or one for each. ``Auto`` unless given.
    Raises:
      ArgumentError: these are not integers, strings and axis types.
      ShardingError: they do not fit each other, or a name is used twice.
    """

    def __init__(
        self,
        axis_sizes: Sequence[int],
        axis_names: Sequence[str],
        *,
        axis_types: AxisType | Sequence[AxisType] | None = None,
    ):
        self._set_axes(ints(axis_sizes, "AbstractMesh", "axis_sizes"), axis_names, axis_types, "AbstractMesh")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbstractMesh) and self._axes == other._axes

    def __hash__(self) -> int:
        return hash(self._axes)

    def __repr__(self) -> str:
        types = f", axis_types={self.axis_types}" if self.explicit else ""
        return f"AbstractMesh({self.axis_sizes}, {self.axis_names}{types})"

    def __reduce__(self):
        new = functools.partial(AbstractMesh, axis_types=self.axis_types)
        return new, (self.axis_sizes, self.axis_names)


class Mesh(AxisSizes):
    """Devices along named axes. As a context manager, the default mesh of specs.

    Args:
      devices: an array of devices, of one dimension for each axis.
      axis_names: the name of each axis.
      axis_types: its ``AxisType``; one for all, or one for each. ``Auto`` unless given.
    Raises:
      ArgumentError: ``devices`` holds something else, names are no strings, or types no axis types.
      ShardingError: names and dimensions do not fit, a name or a device is used twice, or devices are of different
        platforms.

    Attributes:
      devices: the array of devices.
        device_list: the same in the order of ranks.
        local_ranks, local_devices: the ranks and devices of this process.
        spans_processes: whether other processes own some of the devices.
    """

    def __init__(
        self,
        devices: Any,
        axis_names: Sequence[str] | str,
        *,
        axis_types: AxisType | Sequence[AxisType] | None = None,
    ):
        grid = np.array(devices, dtype=object)
        wrong = [d for d in grid.flat if not isinstance(d, backend.Device)]
        if wrong:
            raise errors.ArgumentError(
                f"Mesh takes an array of devices, and {wrong[0]!r:.60} is not a device.",
                where=source.here(),
                fix="bf.make_mesh((2, 4), ('x', 'y'))",
            )
        self._set_axes(grid.shape, axis_names, axis_types, "Mesh")
        self.device_list: tuple[backend.Device, ...] = tuple(grid.flat)
        twice = [device for device, n in Counter(self.device_list).items() if n > 1]
        if twice:
            _fail(errors.ShardingError, f"the device {twice[0]} appears twice in a mesh", "use each once")
        platforms = sorted({d.platform for d in self.device_list})
        if len(platforms) > 1:
            raise errors.ShardingError(
                f"a mesh mixes devices of {' and '.join(platforms)}.",
                where=source.here(),
                why="all devices of a mesh run the same program.",
                fix="make one mesh of each",
            )
        grid.flags.writeable = False
        self.devices: np.ndarray = grid
        self.local_ranks = tuple([r for r, d in enumerate(self.device_list) if d.process is None])
        self.local_devices = tuple([self.device_list[r] for r in self.local_ranks])
        self.spans_processes = len(self.local_ranks) < len(self.device_list)
        self._hash = hash((self.device_list, self._axes))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh)
            and self._hash == other._hash
            and self._axes == other._axes
            and self.device_list == other.device_list
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Mesh({self}, {self.device_list[0].platform})"

    def __reduce__(self):
        return functools.partial(Mesh, axis_types=self.axis_types), (self.devices, self.axis_names)

    def __enter__(self) -> Mesh:
        state.context = (*state.context, self)  # part of the cache key of traces
        return self

    def __exit__(self, *exc) -> None:
        entries = list(reversed(state.context))
        entries.remove(self)
        state.context = tuple(reversed(entries))


class ManualMesh(NamedTuple):
    """The mesh and manual axes of a ``shard_map``, in ``state.context``."""

    mesh: AxisSizes
    axes: frozenset[str]

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh with the type ``Manual`` of these axes."""
        mesh = self.mesh
        types = [
            AxisType.Manual if a in self.axes else t
            for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True)
        ]
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)


def manual_mesh() -> ManualMesh | None:
    """The mesh of the ``shard_map`` whose function is being traced, or None."""
    return next((entry for entry in reversed(state.context) if isinstance(entry, ManualMesh)), None)


def current_mesh() -> Mesh | None:
    """The mesh of the innermost open ``with mesh:`` in this thread, or None."""
    return next((entry for entry in reversed(state.context) if isinstance(entry, Mesh)), None)


def make_mesh(
    axis_sizes: Sequence[int],
    axis_names: Sequence[str] | str,
    *,
    devices: Sequence[backend.Device] | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
) -> Mesh:
    """Make a mesh of ``devices``, or of the first devices of the default platform.

    All processes of a job make the same mesh.

    Args:
      axis_sizes: the size of each axis. One may be -1: the number of devices, divided by the other sizes. A job that
        was started again with fewer processes has a smaller mesh of the same axes.
      axis_names: its name.
      devices: at least as many devices as the product of the sizes; the first are used.
      axis_types: the ``AxisType`` of each axis, or one for all; default ``Auto``.
    Raises:
      ArgumentError: sizes, names or types are not integers, strings and axis types.
      ShardingError: there are too few devices, or sizes and names do not fit each other.
    """
    sizes = ints(axis_sizes, "make_mesh", "axis_sizes")
    names = _names(axis_names, len(sizes), "make_mesh")
    explicit = devices is not None
    found = list(devices) if devices is not None else backend.all_devices(backend.default_device().platform)
    if sizes.count(-1) == 1:
        sizes = _filled(sizes, len(found))
    _check_sizes(sizes, "make_mesh")
    n_devices = math.prod(sizes)
    if n_devices > len(found):
        there = "given" if explicit else f"on {backend.default_device().platform}"
        raise errors.ShardingError(
            f"a mesh of shape {sizes} takes {n_devices} devices, and {len(found)} are {there}.",
            where=source.here(),
            fix=f"smaller axes; or, with simulated CPU devices, start Python with BLUFUNC_CPU_DEVICES={n_devices}; "
            f"or {n_devices} processes: python -m blufunc.parallel.launch -n {n_devices} script.py",
        )
    grid = np.empty(sizes, dtype=object)
    grid.flat[:] = found[:n_devices] if n_devices else []
    return Mesh(grid, names, axis_types=axis_types)


def _filled(sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Sizes with -1 replaced, so that a mesh of them has ``n`` devices."""
    others = -math.prod(sizes)
    if others < 1 or n < others or n % others:
        _fail(
            errors.ShardingError,
            f"make_mesh: {n} devices cannot be a mesh of shape {sizes}",
            f"sizes whose product divides {n}",
        )
    return tuple(n // others if size == -1 else size for size in sizes)


def _types(types: Any, n: int, what: str) -> tuple[AxisType, ...]:
    """Axis types of ``n`` axes as a tuple."""
    if types is None or isinstance(types, AxisType):
        return (types or AxisType.Auto,) * n
    if not isinstance(types, (tuple, list)) or not all(isinstance(t, AxisType) for t in types):
        fix = "axis_types=(bf.sharding.AxisType.Auto, bf.sharding.AxisType.Explicit)"
        _fail(errors.ArgumentError, f"{what}: axis_types holds axis types, not {types!r:.60}", fix)
    if len(types) != n:
        _fail(
            errors.ShardingError, f"{what}: {len(types)} axis types for {n} axes", "give each axis one type"
        )
    return tuple(types)


def _names(names: Any, n: int, what: str) -> tuple[str, ...]:
    """Names of ``n`` axes as a tuple."""
    found = (names,) if isinstance(names, str) else names
    if not isinstance(found, (tuple, list)) or not all(isinstance(name, str) and name for name in found):
        _fail(errors.ArgumentError, f"{what}: axis_names holds strings, not {names!r:.60}", "('x', 'y')")
    if len(found) != n:
        counts = f"{len(found)} names, {tuple(found)}, for {n} axes"
        _fail(errors.ShardingError, f"{what}: {counts}", "give each axis one name")
    twice = next((name for i, name in enumerate(found) if name in found[:i]), None)
    if twice is not None:
        _fail(errors.ShardingError, f"{what}: the axis name {twice!r} is used twice", "use other names")
    return tuple(found)


def _check_sizes(sizes: Sequence[int], what: str) -> None:
    if any(size < 1 for size in sizes):
        _fail(errors.ShardingError, f"{what}: axes of sizes {tuple(sizes)}", "sizes are at least 1")


def _fail(kind: type[errors.BlufuncError], what: str, fix: str) -> NoReturn:
    raise kind(f"{what}.", where=source.here(), fix=fix)
