"""Programs for a mesh: partitioned for the shardings of their arguments, run by all ranks.

Parallel, stages 3 to 8. In comes a global jaxpr; at a call the shardings of the arguments choose, or make, the local
program. Its collectives meet those of the other ranks in an engine, which are threads here or other processes
(``runtime/processes.py``); without collectives ranks need not meet.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import Array
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, subjaxprs
from blufunc.core.primitives.primitive import concrete
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives.lowering import spell_out
from blufunc.parallel.collectives.primitives import meets
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import NamedSharding, replicated
from blufunc.parallel.partition.partition import localise
from blufunc.parallel.runtime import local_gpus, processes, sharded_buffer
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer, sharded_buffers
from blufunc.parallel.runtime.simulated import run_ranks

Shardings = tuple[NamedSharding, ...]


class MeshProgram:
    """A compiled jaxpr: call it with a list of ``ShardedBuffer``, all on its mesh.

    Attributes:
      jaxpr: the global jaxpr, simplified.
      donated: the parameters whose memory results may take.
      mesh: where it runs.
      budget: the bytes that its planned peak may have on each device; None: as it comes.
      local_programs: for the shardings of arguments that it was called with, the program of one device.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], mesh: Mesh, budget: int | None = None):
        self.jaxpr = simplify(mesh.local_devices[0].backend.chosen(jaxpr))
        self.donated = tuple(donated)
        self.mesh, self.budget = mesh, budget
        self.local_programs: dict[Shardings, LocalProgram] = {}
        self._last: tuple[Shardings, LocalProgram] | None = None  # of the last call

    def __call__(self, buffers: list[ShardedBuffer]) -> list[ShardedBuffer]:
        return self.local(tuple([b.sharding for b in buffers]))(buffers)

    def local(self, in_shardings: Shardings) -> LocalProgram:
        """The program for arguments of these shardings."""
        if self._last is not None:  # most often they are the very results of a call before
            known, program = self._last
            if len(known) == len(in_shardings) and all(map(operator.is_, known, in_shardings)):
                return program
        found = self.local_programs.get(in_shardings)
        if found is None:
            made = LocalProgram(self.jaxpr, in_shardings, self.donated, self.mesh, self.budget)
            found = self.local_programs[in_shardings] = made
        self._last = in_shardings, found
        return found

    def source(self) -> str:
        """The source of each local program, under the specs of the arguments that it is for."""
        return "\n".join(
            f"// mesh({self.mesh}): {', '.join(str(s.spec) for s in key)}\n{program.source()}"
            for key, program in self.local_programs.items()
        )

    def timings(self, buffers: Sequence[ShardedBuffer], repeats: int = 5) -> Sequence[Any]:
        """How long each step of the first rank of this process takes, while all of them run."""
        return self.local(tuple([b.sharding for b in buffers])).timings(buffers, repeats)


class LocalProgram:
    """A global jaxpr for arguments of certain shardings: one program, run by all ranks.

    Attributes:
      jaxpr: the local jaxpr, of shards and collectives.
      meets: whether ranks exchange something.
      in_shardings, out_shardings: the shardings of arguments and results.
      programs: the jaxpr compiled for each device of this process; simulated devices share one.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        in_shardings: Shardings,
        donated: Sequence[bool],
        mesh: Mesh,
        budget: int | None = None,
    ):
        self.jaxpr, consts, self.out_shardings = local_jaxpr(jaxpr, in_shardings, mesh)
        self.in_shardings = in_shardings
        self._out_types = [
            (sharding, v.aval.shape, v.aval.dtype)
            for sharding, v in zip(self.out_shardings, jaxpr.outvars, strict=True)
        ]
        self.mesh = mesh
        self.consts = [[c.buffer_on(d) for c in consts] for d in mesh.local_devices]
        self.meets = _any(self.jaxpr, meets)
        # whether the engine is asked for anything, be it the place of the rank
        self._asks = _any(self.jaxpr, lambda eqn: eqn.prim.kind == "collective")
        self._agreed = not (self.meets and mesh.spans_processes)
        self._names = jaxpr.arg_names or ("",) * len(jaxpr.invars)
        self._on_gpus = mesh.local_devices[0].platform == "cuda"
        self._plain = spell_out(self.jaxpr)  # as it runs
        self.programs = self._compiled((False,) * len(consts) + tuple(donated), budget)

    def _compiled(self, donated: Sequence[bool], budget: int | None) -> list[Any]:
        plain, devices = self._plain, self.mesh.local_devices
        if devices[0].platform == "cpu":
            return [devices[0].backend.compile(plain, donated, budget)] * len(devices)
        return [d.backend.compile(plain, donated, budget) for d in devices]

    @property
    def program(self) -> Any:
        """The program of the first device of this process."""
        return self.programs[0]

    def __call__(self, buffers: list[ShardedBuffer]) -> list[ShardedBuffer]:
        self._agree(buffers)
        ranks = self._arguments(buffers)
        buffers.clear()
        rows = self._on_all_ranks(lambda i: self.programs[i](ranks[i]))
        return sharded_buffers(rows, self._out_types)

    @property
    def schedule(self) -> Any:
        """The steps, if the program for one device has such."""
        return self.program.schedule

    def source(self) -> str:
        """The source of the program for one device."""
        return self.program.source()

    def timings(self, buffers: Sequence[ShardedBuffer], repeats: int) -> Sequence[Any]:
        """How long each step of the first rank takes; arguments that lie otherwise are moved first."""
        placed = [
            b if b.sharding == s else reshard(b, s) for b, s in zip(buffers, self.in_shardings, strict=True)
        ]
        self._agree(placed)
        ranks = self._arguments(placed)
        return self._on_all_ranks(lambda i: self.programs[i].timings(ranks[i], repeats))[0]

    def _arguments(self, buffers: Sequence[ShardedBuffer]) -> list[list]:
        """The arguments of each rank of this process."""
        rows = zip(*[b.shards for b in buffers], strict=True) if buffers else [()] * len(self.consts)
        return [[*consts, *row] for consts, row in zip(self.consts, rows, strict=True)]

    def _agree(self, buffers: Sequence[ShardedBuffer]) -> None:
        """Before the first run: all processes have this program, and give it what they should have in common.

        An argument that is on the host of each process is taken for the same in all, and would often be a mistake.
        """
        if self._agreed:
            return
        processes.check_agreement(self.jaxpr, self.mesh)  # with the user's lines
        processes.check_agreement(self._plain, self.mesh)  # buckets go by what is computed between sums, too
        common = {
            name or f"argument {i}": b.host_shard(b.ranks[0])
            for i, (name, b) in enumerate(zip(self._names, buffers, strict=True))
            if b.sharding.is_fully_replicated
        }
        processes.check_same(common, self.mesh, self.jaxpr.name or "the program")
        self._agreed = True

    def _on_all_ranks(self, function: Callable[[int], Any]) -> list[Any]:
        """What ``function(i)`` gives for the i-th rank of this process, while the others do the same."""
        if not self._asks:
            return [function(i) for i in range(len(self.consts))]
        if not self.mesh.spans_processes:
            return run_ranks(self.mesh.abstract, self._on_gpu(function) if self._on_gpus else function)
        with processes.engine_in_use(self.mesh):
            return [function(0)]

    def _on_gpu(self, function: Callable[[int], Any]) -> Callable[[int], Any]:
        def run(rank: int) -> Any:
            with local_gpus.engine_in_use(self.mesh, rank):
                return function(rank)

        return run


def reshard(buffer: ShardedBuffer, sharding: NamedSharding) -> ShardedBuffer:
    """The same array with another sharding, on the same mesh or another. All processes that have it call it together.

    Raises:
      ShardingError: as ``sharded_buffer.reshard``.
    """
    before = buffer.sharding
    if buffer.is_fully_addressable or before.is_fully_replicated:
        return sharded_buffer.reshard(buffer, sharding)
    between = sharding if sharding.mesh == before.mesh else replicated(before.mesh)
    (moved,) = _mover(ShapedArray(buffer.shape, buffer.dtype), before, between)([buffer])
    return moved if between == sharding else sharded_buffer.reshard(moved, sharding)


@functools.lru_cache(512)
def _mover(aval: ShapedArray, before: NamedSharding, after: NamedSharding) -> LocalProgram:
    """The program that has processes exchange what they lack."""
    jaxpr = stage(lambda x: [constrain(x, after)], (aval,), "reshard")
    return LocalProgram(jaxpr, (before,), (False,), sharded_buffer.mesh_of(after))


def local_jaxpr(
    jaxpr: Jaxpr, in_shardings: Shardings, mesh: Mesh
) -> tuple[Jaxpr, list[Array], list[NamedSharding]]:
    """The local jaxpr with its constants as leading parameters, these, and the shardings of the results."""
    try:
        made, out_shardings = localise(jaxpr, in_shardings, mesh)
    except errors.BlufuncError as e:  # single operations are of no line of their own
        raise source.located(e) from None
    closed, consts = made.hoist()
    return closed, [concrete(c) for c in consts], out_shardings


def _any(jaxpr: Jaxpr, is_one: Callable[[Eqn], bool]) -> bool:
    """Whether one of the equations is, those of bodies among them."""
    return any(is_one(e) or any(_any(sub, is_one) for sub in subjaxprs(e.params)) for e in jaxpr.eqns)
