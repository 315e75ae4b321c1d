"""``plan``: memory, collectives and times of a program, without its devices.

Parallel, after stage 3, with stages 4 to 7 of the compiler but no C++ compiler or device. In: a function, a mesh of any
size, and hardware figures from the user. Out: a ``Forecast``. The single-device program is partitioned, fused and
planned as for a GPU. Times follow from a roofline of each step (``kernels/cost.py``) and rings for collectives
(``hardware.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc import errors
from blufunc.core.arrays.backend import Device
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.described import planner
from blufunc.kernels.cost import Cost
from blufunc.kernels.inspect.program import Memory, Sight
from blufunc.kernels.tables import count, duration, size
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.links import LinkSpec, exchange_seconds, links_by_axis
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.reports.collectives import Collective, Collectives, Local, collectives_of, local_program
from blufunc.parallel.reports.hardware import DeviceSpec
from blufunc.parallel.reports.timeline import scheduled_seconds

_GPU = "cuda:sm_90"


@dataclass(frozen=True)
class Forecast:
    """The plan of a program on a mesh; ``print`` it.

    Attributes:
      name: the name of the function.
      mesh: the mesh without its devices.
      collectives: the collectives.
      cost: bytes and arithmetic of each step of one device.
      memory: the memory of one device by use, in bytes.
      body_bytes: additional bytes that loops and branches need while they run, at most.
      device, links: the hardware figures, or None.
      sight: the report on the program of one device.
    """

    name: str
    mesh: AbstractMesh
    collectives: Collectives
    cost: Cost
    memory: Memory
    body_bytes: int
    device: DeviceSpec | None
    links: Mapping[str, LinkSpec] | None
    sight: Sight = field(repr=False, compare=False)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments on one device."""
        return self.memory.argument_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of one device: arguments, results and intermediates.
        An upper bound if there are loops, whose results are counted as live at once."""
        return self.memory.peak_bytes + self.memory.unplanned_bytes + self.body_bytes

    @property
    def fits(self) -> bool | None:
        """True if the peak fits in the device's memory; None if that is unknown."""
        if self.device is None or self.device.memory is None:
            return None
        return self.peak_bytes <= self.device.memory

    @functools.cached_property
    def compute_seconds(self) -> float | None:
        """Lower bound in seconds of one device's steps in sequence, or None.

        Operands and results of collectives are not counted: these are bytes of links.
        """
        if self.device is None:
            return None
        machine = self.device.machine
        return scheduled_seconds(self.sight, lambda step: step.seconds(machine), lambda eqn: 0.0)

    @property
    def exchange_seconds(self) -> float | None:
        """Seconds of all collectives on rings, in sequence; None without links."""
        if self.links is None:
            return None
        return sum(map(self._exchange, self.collectives))

    def _exchange(self, r: Collective) -> float:
        """The time of a row."""
        return r.count * self._ring(r.operation, r.bytes, r.axes, r.sizes)

    def _ring(self, operation: str, nbytes: int, axes: Sequence[str], sizes: Sequence[int]) -> float:
        assert self.links is not None
        return exchange_seconds(operation, nbytes, sizes, [self.links[a] for a in axes])

    def collective_seconds(self, eqn: Eqn) -> float:
        """The time of a collective of the local program.

        The sums of a bucket are one, of all their bytes.
        """
        p, by_kind = eqn.params, dict[str, int]()
        calls = eqn.prim.engine_calls(  # type: ignore[attr-defined]
            **{k: v for k, v in p.items() if k not in ("axes", "sizes", "src", "dst")}
        )
        for (kind, _), x, out in zip(calls, eqn.invars, eqn.outvars, strict=True):
            by_kind[kind] = by_kind.get(kind, 0) + (out if kind == "all_gather" else x).aval.nbytes
        return sum(self._ring(kind, n, p["axes"], p["sizes"]) for kind, n in by_kind.items())

    @functools.cached_property
    def scheduled_seconds(self) -> float | None:
        """Seconds with collectives overlapped with computation; None without both figures.

        Collectives start as early as the plan lets them. Neither slows the other in this estimate (``timeline.py``).
        """
        if self.device is None or self.links is None:
            return None
        machine = self.device.machine
        return scheduled_seconds(self.sight, lambda step: step.seconds(machine), self.collective_seconds)

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of ``scheduled_seconds`` that wait for collectives, or None."""
        scheduled, compute = self.scheduled_seconds, self.compute_seconds
        return None if scheduled is None or compute is None else scheduled - compute

    @property
    def seconds(self) -> float | None:
        """Seconds without any overlap; None without both figures."""
        compute, exchange = self.compute_seconds, self.exchange_seconds
        return None if compute is None or exchange is None else compute + exchange

    @property
    def overlapped_seconds(self) -> float | None:
        """Seconds with perfect overlap, a lower bound; None without both figures."""
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
            yield f"collectives: {duration(self.exchange_seconds)}"
        if self.seconds is not None and self.overlapped_seconds is not None:
            assert self.scheduled_seconds is not None
            yield (
                f"a call: {duration(self.seconds)} if nothing overlaps, {duration(self.scheduled_seconds)} as planned, "
                f"at least {duration(self.overlapped_seconds)} if all does"
            )
        if any(s.unbounded for s in c.steps) or any(r.condition == "a round" for r in self.collectives):
            yield "loops of unknown length count as one iteration"


def plan(
    fun: Callable,
    mesh: AbstractMesh | Mesh,
    *args: Any,
    device: DeviceSpec | None = None,
    links: LinkSpec | Mapping[str, LinkSpec] | None = None,
) -> Forecast:
    """Plan ``fun`` for the devices of ``mesh``, none of which needs to exist.

    The single-device program is partitioned, fused and planned as for a GPU of compute capability 9.0; no source is
    compiled, and nothing runs. So the time this takes does not depend on the size of the mesh.

    Args:
      fun: a function, under ``jit`` or not. Arguments that ``jit(donate_argnums=)`` donates give their memory to
        results.
      mesh: an ``AbstractMesh``, or a mesh.
      args: arrays, or ``ShapeDtypeStruct``, of global shapes. Shardings come from the ``sharding`` of these, or from
        annotations: ``bf.shard(fun, mesh, in_specs, out_specs)``, or the first ``constrain`` or ``reshard`` of an
        argument. Otherwise arguments are replicated.
      device: figures of a device, for times and to report whether the program fits; default None.
      links: figures of the links, by mesh axis, or one for all; default None.
    Returns:
      a ``Forecast``: peak bytes of a device, collectives, and times from the figures; print it for a summary.
    Raises:
      ArgumentError: ``fun`` is not a function, ``mesh`` not a mesh, ``device`` or ``links`` something else.
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
    local = local_program(fun, "plan", mesh, args, {}, planning_device().backend.chosen)
    assert local is not None  # there is a mesh
    return forecast(local, device, by_axis)


def planning_device() -> Device:
    """The described device that programs are planned for."""
    return planner(_GPU)


def forecast(local: Local, device: DeviceSpec | None, links: Mapping[str, LinkSpec] | None) -> Forecast:
    """The plan of a partitioned program; ``links`` by mesh axis."""
    sight = Sight(lower_collectives(local.jaxpr), local.donated, planning_device(), local.budget)
    return Forecast(
        local.name,
        local.mesh.abstract,
        collectives_of(local.jaxpr, local.whole),
        sight.cost,
        sight.memory,
        _body_bytes(sight),
        device,
        links,
        sight,
    )


def _body_bytes(sight: Sight) -> int:
    """Peak bytes of a single body: only one runs at a time."""
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
