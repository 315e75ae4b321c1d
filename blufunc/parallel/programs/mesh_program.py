"""Programs for a mesh: partitioned by argument shardings, run by all ranks.

Parallel, stages 3 to 8. In: a global jaxpr; at a call, shardings of arguments, which select or compile the local
program. Out: sharded results. Ranks communicate through an engine, in threads or with other processes
(``runtime/processes.py``); without collectives they run independently.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays import recording
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import concrete
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.collectives.primitives import communicates, equations
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import NamedSharding, replicated
from blufunc.parallel.partition.partition import localise
from blufunc.parallel.runtime import nccl, processes, sharded_buffer
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer, sharded_buffers
from blufunc.parallel.runtime.simulated import run_ranks

Shardings = tuple[NamedSharding, ...]


class MeshProgram:
    """A compiled jaxpr: call it with a list of ``ShardedBuffer``, all on its mesh.

    Attributes:
        jaxpr: the global jaxpr, simplified.
        donated: the parameters whose memory results may reuse.
        mesh: the mesh.
        budget: the limit in bytes on the planned peak of each device, or None.
        local_programs: the single-device program for each tuple of argument shardings.
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
        if self._last is not None:  # usually the arguments are results of the previous call
            known, program = self._last
            if len(known) == len(in_shardings) and all(map(operator.is_, known, in_shardings)):
                return program
        found = self.local_programs.get(in_shardings)
        if found is None:
            with (
                to.span(f"partition and compile {self.jaxpr.name or 'program'}", "compilation")
                if (to := recording.active)
                else recording.OFF
            ):
                program = LocalProgram(self.jaxpr, in_shardings, self.donated, self.mesh, self.budget)
            found = self.local_programs[in_shardings] = program
        self._last = in_shardings, found
        return found

    def source(self) -> str:
        """The source of each local program, under the specs of its arguments."""
        return "\n".join(
            f"// mesh({self.mesh}): {', '.join(str(s.spec) for s in key)}\n{program.source()}"
            for key, program in self.local_programs.items()
        )

    def timings(self, buffers: Sequence[ShardedBuffer], repeats: int = 5) -> Sequence[Any]:
        """Time each step of this process's first rank, while all ranks run."""
        return self.local(tuple([b.sharding for b in buffers])).timings(buffers, repeats)


class LocalProgram:
    """A global jaxpr for given argument shardings: one program for all ranks.

    Attributes:
      jaxpr: the local jaxpr, of shards and collectives.
      communicates: True if it has collectives that communicate.
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
        self.communicates = any(map(communicates, equations(self.jaxpr)))
        # True if it uses the engine at all, if only for the rank's index
        self._asks = any(eqn.prim.kind == "collective" for eqn in equations(self.jaxpr))
        self._agreed = not (self.communicates and mesh.spans_processes)
        self._names = jaxpr.arg_names or ("",) * len(jaxpr.invars)
        self._on_gpus = mesh.local_devices[0].platform == "cuda"
        self._plain = lower_collectives(self.jaxpr)  # lowered
        donated, devices = (False,) * len(consts) + tuple(donated), mesh.local_devices
        compiled = devices[:1] if devices[0].platform == "cpu" else devices
        self.programs = [d.backend.compile(self._plain, donated, budget) for d in compiled]
        self.programs *= len(devices) // len(compiled)

    @property
    def program(self) -> Any:
        """The program of the first device of this process."""
        return self.programs[0]

    def __call__(self, buffers: list[ShardedBuffer]) -> list[ShardedBuffer]:
        if recording.active is None:
            return self._run(buffers)
        with (
            to.span(f"{self.jaxpr.name or 'program'} on {self.mesh}", "program")
            if (to := recording.active)
            else recording.OFF
        ):
            return self._run(buffers)

    def _run(self, buffers: list[ShardedBuffer]) -> list[ShardedBuffer]:
        self._agree(buffers)
        ranks = self._arguments(buffers)
        buffers.clear()
        rows = self._on_all_ranks(lambda i: self.programs[i](ranks[i]))
        return sharded_buffers(rows, self._out_types)

    @property
    def schedule(self) -> Any:
        """The schedule, if the single-device program has one."""
        return self.program.schedule

    def source(self) -> str:
        """The source of the program for one device."""
        return self.program.source()

    def timings(self, buffers: Sequence[ShardedBuffer], repeats: int) -> Sequence[Any]:
        """Time each step of the first rank; arguments are resharded first if necessary."""
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
        """Check before the first run that all processes have one program and equal inputs.

        Arguments on the host are assumed equal in all processes, and would often not be, by mistake.
        """
        if self._agreed:
            return
        processes.check_agreement(self.jaxpr, self.mesh)  # with the user's lines
        processes.check_agreement(
            self._plain, self.mesh
        )  # buckets depend on the computation between sums, too
        common = {
            name or f"argument {i}": b.host_shard(b.ranks[0])
            for i, (name, b) in enumerate(zip(self._names, buffers, strict=True))
            if b.sharding.is_fully_replicated
        }
        processes.check_same(common, self.mesh, self.jaxpr.name or "the program")
        self._agreed = True

    def _on_all_ranks(self, function: Callable[[int], Any]) -> list[Any]:
        """Run ``function(i)`` for each rank i of this process, concurrently."""
        if not self._asks:
            return [function(i) for i in range(len(self.consts))]
        if self.mesh.spans_processes:
            with processes.engine_in_use(self.mesh):
                return [function(0)]

        def on_gpu(rank: int) -> Any:
            with nccl.engine_in_use(self.mesh, rank):
                return function(rank)

        return run_ranks(self.mesh.abstract, on_gpu if self._on_gpus else function)


def reshard(buffer: ShardedBuffer, sharding: NamedSharding) -> ShardedBuffer:
    """Change sharding or mesh; all processes of both meshes call it together.

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
    """A program that moves missing shards between processes."""
    jaxpr = stage(lambda x: [constrain(x, after)], (aval,), "reshard")
    return LocalProgram(jaxpr, (before,), (False,), sharded_buffer.mesh_of(after))


def local_jaxpr(
    jaxpr: Jaxpr, in_shardings: Shardings, mesh: Mesh
) -> tuple[Jaxpr, list[ConcreteArray], list[NamedSharding]]:
    """The local jaxpr with leading constants; these; the shardings of results."""
    try:
        program, out_shardings = localise(jaxpr, in_shardings, mesh)
    except errors.BlufuncError as e:  # single operations have no source line
        raise source.located(e) from None
    closed, consts = program.hoist()
    return closed, [concrete(c) for c in consts], out_shardings
