"""Placement: arrays on a device, or on a mesh by a sharding.

Parallel, before stage 1. In: values on the host or on devices. Out: arrays. ``device_put`` moves values; the
``make_array`` functions build arrays that are too large for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend, process_info
from blufunc.core.arrays.array import ConcreteArray, from_numpy, lift
from blufunc.core.arrays.memories import Memory, Space
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE, PINNED_HOST, ShapedArray
from blufunc.core.ir.axes import sequence, shape_of
from blufunc.core.ir.trace import Tracer
from blufunc.core.ops.offload import in_memory
from blufunc.core.primitives.linear_ops import broadcast_to
from blufunc.core.programs.stage import is_staging
from blufunc.core.pytree import paths, tree
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import Mesh, current_mesh
from blufunc.parallel.mesh.sharding import Index, NamedSharding, Sharding, SingleDeviceSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.mesh.spec_trees import on_mesh
from blufunc.parallel.programs.mesh_device import device_on
from blufunc.parallel.programs.mesh_program import reshard
from blufunc.parallel.runtime import processes
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer, check_reduced, from_parts, mesh_of, scatter

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

T = TypeVar("T")


class Place(NamedTuple):
    """Where an array goes.

    Attributes:
      layout: a device, or a sharding on a mesh; None: where it is.
      memory: the kind of memory there; None: the one that it is in.
    """

    layout: backend.Device | NamedSharding | None
    memory: str | None


@overload
def device_put(x: ArrayLike, device: Any = None) -> Array: ...
@overload
def device_put(x: T, device: Any = None) -> T: ...


def device_put(x: Any, device: Any = None) -> Any:
    """Put a pytree of arrays and scalars on a device, or on a mesh by a sharding.

    On a mesh of several processes all of them pass the same values (which is checked), and each takes its shards.

    Args:
      x: a pytree of arrays, NumPy arrays and scalars.
      device: a device, a sharding, a partition spec on the current mesh (``with mesh:``), or a memory
        (``bf.memory.Space.Host``, ``device.memory("pinned_host")``); or a pytree prefix of ``x`` of these. Default: the
        default device. An array that is already there is returned without a copy. A program moves values between
        memories only: it runs on the device of its arguments.
    Raises:
      ArgumentError: ``device`` holds something else, or a spec without a mesh.
      CollectiveError: the values differ between processes.
      ShardingError: a spec has more entries than its array has dimensions; or an array of several processes is put on
        one device.
      TreeError: ``device`` is not a pytree prefix of ``x``.
      UnsupportedError: a value is traced, or the device belongs to another process.
    """
    if device is None:
        return tree.map(lambda leaf: _put(leaf, Place(backend.default_device(), DEVICE)), x)
    places = [_place(p) for p in tree.broadcast_prefix(device, x, is_leaf=_is_place)]
    leaves, treedef = tree.flatten(x)
    if process_info.current().count > 1:
        _check_same(leaves, places, treedef)
    return tree.unflatten(treedef, [_put(leaf, place) for leaf, place in zip(leaves, places, strict=True)])


def with_sharding_constraint(x: T, shardings: Any) -> T:
    """``constrain``, by JAX's name.

    A ``SingleDeviceSharding`` puts ``x`` there, as ``device_put`` does.
    """
    if isinstance(shardings, SingleDeviceSharding):
        return device_put(x, shardings)
    return constrain(x, shardings)


def _check_same(leaves: Sequence[Any], places: Sequence[Place], treedef: tree.TreeDef) -> None:
    """Check that all processes of a mesh pass the same values."""
    of_mesh: dict[Mesh, dict[str, np.ndarray]] = {}
    for path, leaf, (place, _) in zip(paths.leaf_paths(treedef), leaves, places, strict=True):
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh) and place.mesh.spans_processes:
            value = lift(leaf)
            if isinstance(value, ConcreteArray) and not isinstance(value.buffer, ShardedBuffer):
                of_mesh.setdefault(mesh_of(place), {})[f"x{path}"] = np.asarray(value)
    for mesh, values in of_mesh.items():
        processes.check_same(values, mesh, "device_put")


def _is_place(x: Any) -> bool:
    return isinstance(x, (backend.Device, Sharding, PartitionSpec, Space, Memory))


def _place(given: Any) -> Place:
    if isinstance(given, backend.Device):
        return Place(given, DEVICE)
    if isinstance(given, (SingleDeviceSharding, NamedSharding)):
        layout = given.device if isinstance(given, SingleDeviceSharding) else given.with_memory_kind(DEVICE)
        return Place(layout, given.memory_kind)
    if isinstance(given, PartitionSpec):
        return Place(on_mesh(given, current_mesh(), str(given)), DEVICE)
    if isinstance(given, Space):
        return Place(None, None if given is Space.Any else given.value)
    if isinstance(given, Memory):
        return Place(given.device, given.kind)
    raise errors.ArgumentError(
        f"device_put takes a device, a sharding or a memory, not {given!r:.60}.",
        where=source.here(),
        fix="use one of bf.devices(), NamedSharding(mesh, P('x')), or bf.memory.Space.Host",
    )


def _put(leaf: Any, place: Place) -> Any:
    if isinstance(leaf, np.ndarray) and not is_staging() and (leaf.ndim or place.memory == PINNED_HOST):
        # by way of no other device or memory; other scalars stay on the host as literals of programs
        return _made(_canonical(leaf), place.layout or backend.default_device(), place.memory or DEVICE)
    value = lift(leaf)
    memory = value.aval.memory if place.memory is None else place.memory
    if isinstance(value, Tracer):
        moves = memory != value.aval.memory
        if isinstance(place.layout, NamedSharding) and memory == DEVICE:
            value = in_memory(value, DEVICE)  # collectives are between devices
        return in_memory(value if place.layout is None else _put_traced(value, place.layout, moves), memory)
    array: ConcreteArray = value  # type: ignore[assignment]
    if place.layout is not None:
        array = _laid_out(array, place.layout, array is leaf, DEVICE if is_staging() else memory)
    return in_memory(array, memory)


def _canonical(x: np.ndarray) -> np.ndarray:
    try:
        return dtypes.canonical_numpy(x)
    except (errors.DtypeError, errors.ValueRangeError) as e:
        raise source.located(e) from None


def _made(
    x: np.ndarray, place: backend.Device | NamedSharding, memory: str, weak_type: bool = False
) -> ConcreteArray:
    """An array of values on the host, on a device or mesh."""
    if isinstance(place, NamedSharding):
        return _wrapped(scatter(x, place, memory), weak_type, memory)
    return from_numpy(x, place, weak_type, memory)


def _laid_out(
    array: ConcreteArray, place: backend.Device | NamedSharding, stays: bool, memory: str
) -> ConcreteArray:
    """An array on a device or mesh; itself if it is there and ``stays``.

    Args:
      memory: where to put it if it passes the host; else it stays in its memory.
    """
    if isinstance(place, NamedSharding) and isinstance(array.buffer, ShardedBuffer):
        if stays and array.buffer.sharding == place:
            return array
        return _wrapped(reshard(in_memory(array, DEVICE).buffer, place), array.aval.weak_type)
    if stays and array.device == place:
        return array
    return _made(np.asarray(array), place, memory, array.aval.weak_type)


def _put_traced(value: Tracer, place: backend.Device | NamedSharding, moves: bool) -> Any:
    """A traced value on a mesh, or as it is where it will be on the device anyway.

    Args:
      moves: whether another memory is asked for: of the device of the program, whichever that is.
    """
    if isinstance(place, NamedSharding):
        return constrain(value, place)
    if place != backend.default_device() and not moves:
        raise errors.UnsupportedError(
            f"device_put of a traced value to {place}.",
            where=source.here(),
            why="a program runs where its arguments are.",
            fix="put the arguments on the device before the call, or shard the value over a mesh",
        )
    return value


def _wrapped(buffer: ShardedBuffer, weak_type: bool = False, memory: str | None = None) -> ConcreteArray:
    """An array of shards in ``memory``; default: that of their sharding."""
    memory = memory or buffer.sharding.memory_kind
    if buffer.sharding.memory_kind != DEVICE:  # buffers have layouts; the memory is part of the type
        layout = buffer.sharding.with_memory_kind(DEVICE)
        buffer = ShardedBuffer(buffer.shards, layout, buffer.shape, buffer.dtype)
    aval = ShapedArray(buffer.shape, buffer.dtype, weak_type, memory)
    return ConcreteArray(buffer, aval, device_on(buffer.sharding.mesh))  # type: ignore[arg-type]


def make_array_from_callback(
    shape: Sequence[int], sharding: NamedSharding, data_callback: Callable[[Index], Any], *, dtype: Any = None
) -> ConcreteArray:
    """Build an array shard by shard, so that no device and no host holds all of it.

    Each process builds its own shards.

    Args:
      shape: the global shape.
      sharding: the sharding on a mesh.
      data_callback: returns the part at an index, a tuple of slices, as an array-like. Called once per distinct shard
        of this process.
      dtype: the dtype; default that of the parts.
    Raises:
      ArgumentError: ``sharding`` is not a ``NamedSharding``.
      ShapeError: a part has another shape than its index.
      DtypeError: the parts have different dtypes.
    """
    name = "make_array_from_callback"
    whole, sharding = shape_of(shape, name), _named(sharding, name)
    requested = None if dtype is None else dtypes.as_dtype(dtype)

    def part(index: Index) -> np.ndarray:
        given = np.asarray(data_callback(index))
        x = dtypes.canonical_numpy(given) if requested is None else given.astype(requested)
        size = tuple(s.stop - s.start for s in index)
        if x.shape != size:
            raise errors.ShapeError(
                f"data_callback gave an array of shape {x.shape} for the index {index}.",
                where=source.here(),
                fix=f"return a part of shape {size}",
            )
        return x

    if requested is None:
        first = sharding.indices(whole)[mesh_of(sharding).local_ranks[0]]
        x = part(first)
        dtype = x.dtype
        return _wrapped(
            from_parts(
                lambda i: x if i == first else _checked(part(i), dtype),
                whole,
                dtype,
                sharding,
                sharding.memory_kind,
            )
        )
    return _wrapped(from_parts(part, whole, requested, sharding, sharding.memory_kind))


def make_array_from_process_local_data(
    sharding: NamedSharding, local_data: Any, global_shape: Sequence[int] | None = None
) -> ConcreteArray:
    """Build an array from the part of each process, such as its examples of a batch.

    Args:
      sharding: the sharding of the whole on a mesh.
      local_data: the part of this process, an array-like; of a sharded dimension only this process's part.
      global_shape: the shape of the whole. Default: each dimension of ``local_data`` times the number of its distinct
        parts over processes.
    Raises:
      ArgumentError: ``sharding`` is not a ``NamedSharding``.
      ShapeError: ``local_data`` has another shape than this process's part.
      ShardingError: the devices of this process do not hold a single block of the array.
    """
    name = "make_array_from_process_local_data"
    sharding = _named(sharding, name)
    given = dtypes.canonical_numpy(np.asarray(local_data))
    if global_shape is None:
        parts, mine = sharding.parts(given.ndim), _own_parts(sharding, given.ndim)
        whole = tuple(n * k // max(1, len(own)) for n, k, own in zip(given.shape, parts, mine, strict=True))
    else:
        whole = shape_of(global_shape, name)
    indices = sharding.indices(whole)
    mine = [indices[rank] for rank in mesh_of(sharding).local_ranks]
    starts = [min(i[d].start for i in mine) for d in range(len(whole))]
    size = tuple(max(i[d].stop for i in mine) - start for d, start in enumerate(starts))
    if given.shape != size:
        raise errors.ShapeError(
            f"{name}: local_data is of shape {given.shape}.",
            where=source.here(),
            why=f"of an array of shape {whole} with {sharding.spec} on mesh({sharding.mesh}) this process holds"
            f" {size}.",
            fix="pass that part; or global_shape=..., if dimensions do not divide evenly",
        )

    def part(index: Index) -> np.ndarray:
        return given[tuple(slice(s.start - at, s.stop - at) for s, at in zip(index, starts, strict=True))]

    return _wrapped(from_parts(part, whole, given.dtype, sharding, sharding.memory_kind))


def _own_parts(sharding: NamedSharding, ndim: int) -> list[set[int]]:
    """This process's parts along each dimension, which must be contiguous."""
    places = [sharding.position(rank, ndim) for rank in mesh_of(sharding).local_ranks]
    mine = [{place[d] for place in places} for d in range(ndim)]
    if any(max(own) - min(own) + 1 != len(own) for own in mine):
        raise errors.ShardingError(
            f"with {sharding} this process holds parts that are not contiguous.",
            where=source.here(),
            fix="make_array_from_callback, which asks for each part",
        )
    return mine


def _checked(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if x.dtype != dtype:
        raise errors.DtypeError(
            f"data_callback gave parts of {dtype} and of {x.dtype}.", where=source.here(), fix="dtype=..."
        )
    return x


def make_array_from_single_device_arrays(
    shape: Sequence[int], sharding: NamedSharding, arrays: Sequence[ConcreteArray]
) -> ConcreteArray:
    """Build an array from shards that are already on their devices, without a copy.

    Each process passes its own shards.

    Args:
      shape: the global shape, which must divide evenly.
      sharding: the sharding on a mesh.
      arrays: the shard of each device of this process, in any order.
    Raises:
      ArgumentError: a shard is not an array, or not on a device of the mesh; or a device has none.
      DtypeError: the shards have different dtypes.
      ShapeError: a shard has another shape than the sharding implies, or padding would be needed.
    """
    name = "make_array_from_single_device_arrays"
    whole, sharding = shape_of(shape, name), _named(sharding, name)
    given = sequence(arrays, name, "arrays", "arrays")

    def fail(kind: type[errors.BlufuncError], what: str, fix: str | None = None) -> NoReturn:
        raise kind(f"{name}: {what}.", where=source.here(), fix=fix)

    if wrong := [a for a in given if not isinstance(a, ConcreteArray)]:
        fail(errors.ArgumentError, f"shards are arrays, not {wrong[0]!r:.60}")
    on = {a.device: a for a in given}
    devices = mesh_of(sharding).local_devices
    if set(on) != set(devices) or len(given) != len(devices):
        expected = f"one on each of {', '.join(map(str, devices))}"
        fail(errors.ArgumentError, f"{len(given)} shards on {', '.join(map(str, on))}", expected)
    size = sharding.shard_shape(whole)
    if not sharding.is_even(whole):
        what = f"{sharding.spec} does not divide an array of shape {whole} evenly"
        fail(errors.ShapeError, what, "device_put pads arrays by itself")
    shards = [on[d] for d in devices]
    for shard in shards:
        if shard.aval.shape != size:
            fix = f"an array of shape {whole} has shards of shape {size} there"
            fail(errors.ShapeError, f"the shard on {shard.device} is of shape {shard.aval.shape}", fix)
        if shard.aval.memory != sharding.memory_kind:
            fix = f"device_put the shards into {sharding.memory_kind!r}, or with_memory_kind"
            fail(errors.ArgumentError, f"a shard is in the memory {shard.aval.memory!r}", fix)
    kinds = {s.aval.dtype for s in shards}
    if len(kinds) > 1:
        fail(errors.DtypeError, f"shards of {' and '.join(map(str, kinds))}")
    return _wrapped(ShardedBuffer([s.buffer for s in shards], sharding, whole, shards[0].aval.dtype))


def filled(shape: tuple[int, ...], value: Any, dtype: np.dtype, sharding: NamedSharding) -> ConcreteArray:
    """Make a constant array, each device its own shard, padding included.

    Raises:
      ShardingError: the spec has more entries than ``shape``, or unreduced axes; or the mesh has no devices.
    """
    check_reduced(sharding)
    number, size = np.asarray(value, dtype), sharding.shard_shape(shape)
    shards = [broadcast_to(from_numpy(number, d), size).buffer for d in mesh_of(sharding).local_devices]
    layout, memory = sharding.with_memory_kind(DEVICE), sharding.memory_kind
    return in_memory(_wrapped(ShardedBuffer(shards, layout, shape, dtype)), memory)


def _named(sharding: Any, name: str) -> NamedSharding:
    if isinstance(sharding, NamedSharding):
        return sharding
    raise errors.ArgumentError(
        f"{name} takes a NamedSharding, not {sharding!r:.60}.",
        where=source.here(),
        fix="NamedSharding(mesh, P('x'))",
    )
