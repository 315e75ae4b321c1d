"""``plan``: a program for devices that are not there, with its memory, exchanges and times.

Parallel, after stage 3, with stages 4 to 7 of the compiler but without a compiler or a device: the program of one
device is partitioned, fused and laid out in memory as for a GPU, as large as the mesh may be. Times follow from figures
that the user gives: the roofline of each step (``kernels/inspect/cost.py``) and rings for exchanges (``hardware.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.arrays.backend import Device
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.kernels.backends.cuda.dispatch import Library
from blufunc.kernels.backends.cuda.lowered import Draft
from blufunc.kernels.cost import Cost
from blufunc.kernels.inspect.program import Memory, Sight
from blufunc.kernels.rewrites.select_variant import select_variants
from blufunc.kernels.tables import count, duration, size
from blufunc.parallel.collectives import primitives
from blufunc.parallel.collectives.lowering import spell_out
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.reports.collectives import Collective, Collectives, collectives_of, local_program
from blufunc.parallel.reports.hardware import DeviceSpec, LinkSpec, exchange_seconds, links_by_axis

_ARCH = "sm_90"

_EXCHANGES = frozenset(
    [p.name for p in vars(primitives).values() if isinstance(p, primitives.MeshCollective) and p.meets]
)
"""The names of operations that wait for links and not for memory."""


@dataclass(frozen=True)
class Forecast:
    """What a program will be on a mesh; ``print`` it.

    Attributes:
      name: of the function.
      mesh: the mesh without its devices.
      collectives: what the devices exchange.
      cost: bytes and arithmetic of each step of one device.
      memory: where the bytes of one device are.
      body_bytes: what loops and branches need besides while they run, at most.
      device, links: the figures, if they were given.
    """

    name: str
    mesh: AbstractMesh
    collectives: Collectives
    cost: Cost
    memory: Memory
    body_bytes: int
    device: DeviceSpec | None
    links: Mapping[str, LinkSpec] | None

    @property
    def argument_bytes(self) -> int:
        """What one device holds of the arguments."""
        return self.memory.argument_bytes

    @property
    def peak_bytes(self) -> int:
        """The most memory that one device needs: arguments, results, and what is between. An upper bound where there
        are loops, whose results are counted as if all were alive at once."""
        return self.memory.peak_bytes + self.memory.unplanned_bytes + self.body_bytes

    @property
    def fits(self) -> bool | None:
        """Whether that is in the memory of the device; None if this was not given."""
        if self.device is None or self.device.memory is None:
            return None
        return self.peak_bytes <= self.device.memory

    @property
    def compute_seconds(self) -> float | None:
        """The time that one device takes at least for its steps, one after another; None without a device.

        Operands and results of exchanges are left out: these are bytes of links.
        """
        if self.device is None:
            return None
        machine = self.device.machine
        return sum(step.seconds(machine) for step in self.cost.steps if step.name not in _EXCHANGES)

    @property
    def exchange_seconds(self) -> float | None:
        """The time that exchanges take by rings, one after another; None without links."""
        if self.links is None:
            return None
        return sum(map(self._exchange, self.collectives))

    def _exchange(self, r: Collective) -> float:
        """The time of a row."""
        assert self.links is not None
        links = [self.links[a] for a in r.axes]
        return r.count * exchange_seconds(r.operation, r.bytes, r.sizes, links)

    @property
    def seconds(self) -> float | None:
        """Both, if nothing overlaps; None without both figures."""
        compute, exchange = self.compute_seconds, self.exchange_seconds
        return None if compute is None or exchange is None else compute + exchange

    @property
    def overlapped_seconds(self) -> float | None:
        """The longer of both: no schedule is faster on these figures. None without both."""
        compute, exchange = self.compute_seconds, self.exchange_seconds
        return None if compute is None or exchange is None else max(compute, exchange)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.name} on {self.mesh.size:,} devices ({self.mesh})",
                *self._memory_lines(),
                *self._time_lines(),
                "",
                self.collectives.table(self._exchange if self.links is not None else None),
            ]
        )

    def _memory_lines(self) -> Iterator[str]:
        line = f"memory of each: {size(self.peak_bytes)}, {size(self.argument_bytes)} of it arguments"
        if self.device is not None and self.device.memory is not None:
            line += f"; {'fits' if self.fits else 'does not fit'} in {size(self.device.memory)}"
        yield line

    def _time_lines(self) -> Iterator[str]:
        c = self.cost
        line = f"work of each: {c.launches} steps, {size(c.bytes)} moved, {count(c.flops)} operations"
        if self.compute_seconds is not None:
            line += f": at least {duration(self.compute_seconds)}"
        yield line
        if self.exchange_seconds is not None:
            yield f"exchanges: {duration(self.exchange_seconds)}"
        if self.seconds is not None and self.overlapped_seconds is not None:
            yield (
                f"a call: {duration(self.seconds)} if nothing overlaps, "
                f"at least {duration(self.overlapped_seconds)} if all does"
            )
        if any(s.unbounded for s in c.steps) or any(r.condition == "a round" for r in self.collectives):
            yield "of loops without a known end one round is counted"


def plan(
    fun: Callable,
    mesh: AbstractMesh | Mesh,
    *args: Any,
    device: DeviceSpec | None = None,
    links: LinkSpec | Mapping[str, LinkSpec] | None = None,
) -> Forecast:
    """Compile ``fun`` for the devices of ``mesh``, of which none has to be there, and say what it needs.

    The program of one device is partitioned, fused and planned as for a GPU of compute capability 9.0; no source is
    compiled, and nothing is run. So the time that it takes does not depend on the size of the mesh.

    Args:
      fun: a function, under ``jit`` or not. What ``jit(donate_argnums=)`` donates gives its memory to results.
      mesh: an ``AbstractMesh``, or a mesh.
      args: arrays, or ``ShapeDtypeStruct``, of global shapes. How they lie is said by the ``sharding`` of these, or by
        annotations: ``bf.shard(fun, mesh, in_specs, out_specs)``, or the first ``constrain`` or ``reshard`` of an
        argument. Else they are whole on each device.
      device: the figures of a device, for times and to say whether the program fits.
      links: those of the links along each axis, by name; or of all.
    Returns:
      a ``Forecast``: peak bytes of a device, collectives, and times from the figures; its text says all.
    Raises:
      ArgumentError: ``fun`` is not a function, ``mesh`` no mesh, ``device`` or ``links`` something else.
      ShardingError: annotations do not fit the mesh, or ``links`` its axes.
    """
    if not isinstance(mesh, (AbstractMesh, Mesh)):
        raise errors.ArgumentError(
            f"plan takes a mesh, not {mesh!r:.60}.",
            where=source.here(),
            fix="bf.plan(f, bf.AbstractMesh((512, 8), ('data', 'model')), *shapes)",
        )
    if device is not None and not isinstance(device, DeviceSpec):
        raise errors.ArgumentError(
            f"plan: device is a DeviceSpec, not {device!r:.60}.",
            where=source.here(),
            fix="device=bf.DeviceSpec(flops=800e12, bandwidth=3e12, memory=80e9)",
        )
    by_axis = None if links is None else links_by_axis(links, mesh.axis_names)
    local = local_program(
        fun, "plan", mesh, args, {}, lambda jaxpr: select_variants(jaxpr, Library(_ARCH))[0]
    )
    assert local is not None  # there is a mesh
    device_of_mesh = Device("cuda", 0, _Drafts())  # type: ignore[arg-type]
    sight = Sight(spell_out(local.jaxpr), local.donated, device_of_mesh, local.budget)
    return Forecast(
        local.name,
        mesh.abstract,
        collectives_of(local.jaxpr, local.whole),
        sight.cost,
        sight.memory,
        _body_bytes(sight),
        device,
        by_axis,
    )


class _Drafts:
    """As much of the backend of a GPU as it takes to plan for one."""

    name = "cuda"

    def draft(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Draft:
        """What the backend would make of a jaxpr."""
        return Draft(jaxpr, donated, _ARCH, budget=budget)


def _body_bytes(sight: Sight) -> int:
    """The most memory that a body has for itself: only one of them runs at a time."""
    return max(
        (
            b.sight.memory.arena_bytes
            + b.sight.memory.output_bytes
            + b.sight.memory.unplanned_bytes
            + _body_bytes(b.sight)
            for b in sight.bodies
        ),
        default=0,
    )
