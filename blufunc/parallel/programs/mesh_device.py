"""A mesh as a device, which holds arrays and runs programs.

Parallel, stages 3 and 8. In: arrays and jaxprs, from ``jit``, eager operations and donation, which know only devices
and backends. Out: ``ShardedBuffer``s and ``MeshPrograms``, built on the backend of the mesh's devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ClassVar

import numpy as np

from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.arrays.refcounts import ALONE, references
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.ops.offload import offload_p
from blufunc.core.programs.simplify import simplify
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import NamedSharding, replicated
from blufunc.parallel.programs.mesh_program import LocalProgram, MeshProgram, local_jaxpr, reshard
from blufunc.parallel.runtime import sharded_buffer
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer


@dataclass(frozen=True)
class MeshDevice(backend.Device):
    """All devices of a mesh as one; made by ``device_on``."""

    mesh: Mesh = field(kw_only=True)
    joint: ClassVar[bool] = True

    @property
    def members(self) -> tuple[backend.Device, ...]:
        """The devices of the mesh."""
        return self.mesh.device_list

    @property
    def own(self) -> backend.Device:
        """The first device of this process."""
        return self.mesh.local_devices[0]

    def layouts(self, values: Sequence[Any]) -> tuple[NamedSharding, ...]:
        """The sharding of each argument; values not on the mesh are replicated."""

        def layout(value: Any) -> NamedSharding:
            if isinstance(value, ConcreteArray) and value.device == self:
                return value.buffer.sharding
            if isinstance(value, NamedSharding):
                return value.with_memory_kind(DEVICE)
            return replicated(self.mesh)

        return tuple(map(layout, values))

    def local(
        self, jaxpr: Jaxpr, donated: Sequence[bool], layouts: tuple[NamedSharding, ...]
    ) -> tuple[Jaxpr, Sequence[bool], backend.Device]:
        """The lowered local jaxpr with leading constants; this process's first device."""
        jaxpr = simplify(self.own.backend.chosen(jaxpr))
        local, consts, _ = local_jaxpr(jaxpr, layouts or self._all_replicated(jaxpr), self.mesh)
        return lower_collectives(local), (False,) * len(consts) + tuple(donated), self.own

    def local_program(self, program: MeshProgram, layouts: tuple[NamedSharding, ...]) -> LocalProgram:
        """The program that all devices run."""
        return program.local(layouts or self._all_replicated(program.jaxpr))

    def whole(self, buffer: ShardedBuffer) -> np.ndarray:
        """Gather the shards, including those of other processes."""
        if not buffer.is_fully_addressable:
            buffer = reshard(buffer, replicated(self.mesh))
        return sharded_buffer.gather(buffer)

    def _all_replicated(self, jaxpr: Jaxpr) -> tuple[NamedSharding, ...]:
        return (replicated(self.mesh),) * len(jaxpr.invars)

    def __str__(self) -> str:
        if self.mesh.spans_processes:
            return f"mesh({self.mesh}) of {len({d.process_index for d in self.members})} processes"
        first, last = self.members[0], self.members[-1]
        return f"mesh({self.mesh}) of {first}" + (f" to {last}" if last != first else "")


@functools.cache
def device_on(mesh: Mesh) -> MeshDevice:
    """The unique ``MeshDevice`` of a mesh."""
    return MeshBackend(mesh).device


class MeshBackend:
    """``Backend`` whose buffers are ``ShardedBuffer``s on one mesh."""

    name = "mesh"

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.device = MeshDevice("mesh", 0, self, mesh=mesh)
        self._operation = functools.lru_cache(512)(self._compile_operation)

    def devices(self) -> Sequence[backend.Device]:
        return [self.device]

    def from_host(self, x: np.ndarray, device: backend.Device, memory: str = DEVICE) -> ShardedBuffer:
        return sharded_buffer.scatter(x, replicated(self.mesh), memory)

    def to_host(self, buffer: ShardedBuffer) -> np.ndarray:
        return sharded_buffer.gather(buffer)

    def snapshots(self, buffers: Sequence[ShardedBuffer]) -> list[Callable[[], np.ndarray]]:
        return [functools.partial(sharded_buffer.gather, b) for b in buffers]

    def block_until_ready(self, buffer: ShardedBuffer) -> None:
        for device, shard in zip(buffer.devices, buffer.shards, strict=True):
            device.backend.block_until_ready(shard)

    def is_ready(self, buffer: ShardedBuffer) -> bool:
        return all(d.backend.is_ready(s) for d, s in zip(buffer.devices, buffer.shards, strict=True))

    def in_memory(self, buffer: ShardedBuffer, memory: str) -> ShardedBuffer:
        """Each shard in the memory of its device."""
        pairs = zip(buffer.devices, buffer.shards, strict=True)
        moved = [d.backend.in_memory(shard, memory) for d, shard in pairs]
        return ShardedBuffer(moved, buffer.sharding, buffer.shape, buffer.dtype)

    def run(
        self, prim: Any, buffers: Sequence[ShardedBuffer], params: dict, outs: Sequence[ShapedArray]
    ) -> Sequence[ShardedBuffer]:
        """Run one primitive as a cached program of one equation."""
        if prim is offload_p:
            return [self.in_memory(buffers[0], params["dst"])]
        avals = tuple(ShapedArray(b.shape, b.dtype, False, _memory_of(b)) for b in buffers)
        program = self._operation(prim, avals, tuple(params.items()), config.matmul_precision)
        return program(list(buffers))

    def _compile_operation(
        self, prim: Any, avals: tuple[ShapedArray, ...], params: tuple, precision: str
    ) -> MeshProgram:
        """``precision`` is part of the cache key: the program's matmuls depend on it."""
        named = dict(params)
        outs = prim.typed(avals, named)
        invars = [Var(a) for a in avals]
        outvars = [Var(a) for a in (outs if prim.multiple_results else (outs,))]
        eqn = Eqn(prim, invars, outvars, named, None)  # no source line: the program is cached
        return self.compile(Jaxpr(invars, [eqn], outvars, name=prim.name), (False,) * len(invars))

    def compile(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> MeshProgram:
        """Make a program, partitioned at each call for the shardings of its arguments."""
        return MeshProgram(jaxpr, donated, self.mesh, budget)

    def chosen(self, jaxpr: Jaxpr) -> Jaxpr:
        """Select the variants that the devices of the mesh prefer."""
        return self.device.own.backend.chosen(jaxpr)

    def claim(self, buffers: list[ShardedBuffer], donated: Sequence[bool]) -> None:
        """Copy shards of donated buffers that are referenced elsewhere."""
        n_references = list(references(compress(buffers, donated)))  # the array and ``buffers``
        places = list(compress(range(len(buffers)), donated))
        # a reference to a buffer is a reference to its shards
        seen = [[*buffers[i].shards] for i, n in zip(places, n_references, strict=True) if n > ALONE + 1]
        copies: dict[int, list[Any]] = {}
        for rank, device in enumerate(self.mesh.local_devices):
            row = [buffers[i].shards[rank] for i in places]  # the buffer holds a shard like an array does
            device.backend.claim(row, (True,) * len(row))
            for i, shard in zip(places, row, strict=True):
                if shard is not buffers[i].shards[rank]:
                    copies.setdefault(i, [*buffers[i].shards])[rank] = shard
        del seen
        for i, shards in copies.items():
            b = buffers[i]
            buffers[i] = ShardedBuffer(shards, b.sharding, b.shape, b.dtype)


def _memory_of(buffer: ShardedBuffer) -> str:
    """The memory that all shards are in; arrays of NumPy know one only."""
    return getattr(buffer.shards[0], "memory_kind", DEVICE) if buffer.shards else DEVICE
