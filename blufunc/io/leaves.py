"""Leaves as files store them: arrays, parts of sharded arrays, scalars.

Above the file format, below writing. In: a pytree. Out: for this process, each array or shard that it writes, with a
function that returns its elements on the host, and the scalars. The functions may be called later, from other threads:
they hold what they need (``Backend.snapshots``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.core.arrays import process_info
from blufunc.core.arrays.array import ConcreteArray, lift
from blufunc.core.arrays.backend import Device
from blufunc.core.ir import dtypes, source
from blufunc.io import elements
from blufunc.io.header import Stored
from blufunc.io.names import RESERVED, named_leaves
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer


class Block(NamedTuple):
    """An array or a shard that this process writes.

    Attributes:
      stored: its description, without a place yet.
      read: returns its elements on the host.
    """

    stored: Stored
    read: Callable[[], np.ndarray]


class _Held(NamedTuple):
    """An array or a shard on a device.

    Attributes:
      stored: its description.
      device, buffer: where it is.
      size: its shape without padding.
    """

    stored: Stored
    device: Device
    buffer: Any
    size: tuple[int, ...]


@dataclass(frozen=True)
class Leaves:
    """The part of a pytree that this process writes."""

    blocks: Sequence[Block]
    scalars: Mapping[str, Any]


def leaves_of(values: Any, together: bool) -> Leaves:
    """The part of a pytree that this process writes.

    Arrays of devices are held, not copied; NumPy arrays are copied.

    Args:
      together: True if all processes write: shards as they are, each once. False: whole arrays.
    Raises:
      ArgumentError: a leaf that no file can hold.
      UnsupportedError: a traced value; or, not ``together``, an array of several processes.
    """
    named, _ = named_leaves(values)
    blocks: list[Block | _Held] = []
    scalars: dict[str, Any] = {}
    here, count = process_info.current().index, process_info.current().count
    load = [0] * count  # bytes that each process writes, of which all compute the same
    taken = {*named, RESERVED}
    for name, leaf in named.items():
        if isinstance(leaf, elements.SCALARS) and not isinstance(leaf, np.generic):
            if here == 0 or not together:
                scalars[name] = leaf
            continue
        if isinstance(leaf, (np.ndarray, np.generic)):
            dtypes.check_unmasked(leaf)
            if here == 0 or not together:
                blocks.append(_of_numpy(name, np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")))
            continue
        array = _array(name, leaf)
        buffer = array.buffer
        if isinstance(buffer, ShardedBuffer) and together:
            blocks += _shards(name, array, load, taken)
        elif isinstance(buffer, ShardedBuffer) and not buffer.is_fully_addressable:
            raise errors.UnsupportedError(
                f"{name} is on the devices of several processes, and one process writes this file.",
                where=source.here(),
                fix="io.Checkpointer(folder).save(step, tree), in all processes; or bf.multihost.process_allgather "
                "first",
            )
        elif here == 0 or not together:
            shape, weak = array.aval.shape, array.aval.weak_type
            stored = _stored(name, array.aval.dtype, shape, weak=weak)
            blocks.append(_Held(stored, array.device, buffer, shape))
    return Leaves(_read_later(blocks), scalars)


def _read_later(blocks: Sequence[Block | _Held]) -> list[Block]:
    """Blocks with snapshots of what is on devices: a call per backend."""
    held: dict[int, list[_Held]] = {}
    for b in blocks:
        if isinstance(b, _Held):
            held.setdefault(id(b.device.backend), []).append(b)
    reads = {
        id(b): read if b.size == b.buffer.shape else _without_padding(read, b.size)
        for found in held.values()
        for b, read in zip(found, found[0].device.backend.snapshots([b.buffer for b in found]), strict=True)
    }
    return [Block(b.stored, reads[id(b)]) if isinstance(b, _Held) else b for b in blocks]


def _array(name: str, leaf: Any) -> ConcreteArray:
    try:
        found = lift(leaf, name)
    except errors.BlufuncError as error:
        raise errors.ArgumentError(
            f"{name} is a {type(leaf).__name__}, which no file can hold.",
            where=source.here(),
            why=error.what,
            fix="leaves are arrays, numbers, strings and bytes; register a class as a pytree, or leave it out",
        ) from error
    if not isinstance(found, ConcreteArray):
        raise errors.UnsupportedError(
            f"{name} is a traced value, which has no elements to save.",
            where=source.here(),
            fix="save outside of jit and grad, or by io_callback",
        )
    return found


def _of_numpy(name: str, x: np.ndarray) -> Block:
    return Block(_stored(name, x.dtype, x.shape), lambda: x)


def _shards(name: str, array: ConcreteArray, load: list[int], taken: set[str]) -> list[_Held]:
    """The shards of an array that this process writes.

    Args:
      load: bytes assigned to each process so far; updated.
      taken: keys of the file that are names of leaves, or of shards; updated.
    """
    buffer: ShardedBuffer = array.buffer
    sharding, shape = buffer.sharding, buffer.shape
    indices, owners = sharding.indices(shape), owners_of(sharding, shape, array.aval.dtype.itemsize, load)
    blocks = []
    for device, rank, shard in zip(buffer.devices, buffer.ranks, buffer.shards, strict=True):
        if rank not in owners:
            continue
        index = indices[rank]
        origin, size = tuple(s.start for s in index), tuple(s.stop - s.start for s in index)
        key = name
        if size != shape:
            key = f"{name}[{','.join(f'{s.start}:{s.stop}' for s in index)}]"
            while key in taken:  # the name of a leaf may look like a shard's key
                key += "'"
            taken.add(key)
        stored = _stored(name, array.aval.dtype, size, shape, origin, key, array.aval.weak_type)
        blocks.append(_Held(stored, device, shard, size))
    return blocks


def owners_of(sharding: NamedSharding, shape: tuple[int, ...], itemsize: int, load: list[int]) -> set[int]:
    """The rank that writes each shard: the replica whose process has least to do.

    Args:
      load: bytes assigned to each process so far; updated.
    """
    holders: dict[tuple, list[int]] = {}
    indices = sharding.indices(shape)
    for rank, index in enumerate(indices):
        holders.setdefault(tuple((s.start, s.stop) for s in index), []).append(rank)
    members = [d.process_index for d in sharding.concrete_mesh.device_list]
    found = set()
    for ends, ranks in holders.items():
        nbytes = itemsize * math.prod(stop - start for start, stop in ends)
        if not nbytes and shape and 0 not in shape:  # padding only
            continue
        owner = min(ranks, key=lambda rank: (load[members[rank]], rank))
        load[members[owner]] += nbytes
        found.add(owner)
    return found


def _without_padding(read: Callable[[], np.ndarray], size: tuple[int, ...]) -> Callable[[], np.ndarray]:
    return lambda: read()[tuple(slice(0, n) for n in size)]


@functools.lru_cache(maxsize=1 << 12)
def _stored(
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    whole: tuple[int, ...] | None = None,
    origin: tuple[int, ...] | None = None,
    key: str | None = None,
    weak: bool = False,
) -> Stored:
    try:
        elements.stored_as(dtype)
    except TypeError as error:
        raise errors.ArgumentError(
            f"{name} has {error}, which no file can hold.",
            where=source.here(),
            fix="save its fields as arrays of their own",
        ) from error
    start = (0,) * len(shape) if origin is None else origin
    return Stored(key or name, name, dtype, shape, 0, 0, shape if whole is None else whole, start, weak)
