"""Pipelines of a step whose layers are a loop: times and memory from schedules.

Parallel, above ``reports`` and the tables of ``recipes/pipelines``. In: a planned microbatch of a step in which a
``scan`` steps through the layers. Out: ``FoundPipeline``s. The time of a layer, forward and backward, with the
collectives inside it, is that of the planned loops; the other steps are the ends of the pipeline, or run once for all
microbatches (gradient reductions over the batch, the optimizer). The backward body is split into the cotangent of its
input and those of the weights, as ZB-H1 runs them. The tables add up phases and slots. Every pass also copies the
residuals of a slot, and adds to the sums of gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.schedule import OpaqueStep, accesses
from blufunc.kernels.tables import duration, size
from blufunc.parallel.layouts.groups import Groups
from blufunc.parallel.layouts.program import Program, spec_of
from blufunc.parallel.layouts.strategies import Layouts, Streams, label
from blufunc.parallel.mesh.links import LinkSpec
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.recipes.pipelines.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    PipelineCosts,
    Schedule,
    pipeline_schedule,
)
from blufunc.parallel.reports.plan import Forecast
from blufunc.parallel.reports.timeline import scheduled_seconds, step_seconds
from blufunc.transforms.checkpointing.split_outputs import split_outputs
from blufunc.transforms.control_flow.scan import scan_p

_CHUNKS = (2, 4)
"""Numbers of chunks of interleaved schedules."""

_CARRIES = {"1f1b": 4, "interleaved": 4, "zb-h1": 8}
"""Copies of slots and sums of gradients in the peak of a plan of the recipe."""
# measured: 0.86 to 1.1 of the peaks that bf.plan has for 18 such programs of 2 and 4 stages (design 034, 2026-11-28)

_REDUCTIONS = ("all_reduce", "reduce_scatter")


class Passes(NamedTuple):
    """Times and bytes of one microbatch on one device, of all layers.

    Attributes:
      layers: the number of layers.
      forward, backward: the seconds of the loops.
      halves: the seconds of the two halves of the backward loop.
      ends: the seconds of the other steps of a microbatch.
      once, of_layers: the seconds of what follows all microbatches: in all, and the part of the layers' parameters.
      message: bytes of the value between layers.
      residuals, kept: bytes of the residuals, and of what the first half of a backward pass keeps for the second.
      rest: bytes of the peak beyond arguments, residuals and gradients of layers.
    """

    layers: int
    forward: float
    backward: float
    halves: tuple[float, float]
    ends: float
    once: float
    of_layers: float
    message: int
    residuals: int
    kept: int
    rest: int


@dataclasses.dataclass(frozen=True, eq=False)
class FoundPipeline:
    """A pipeline with its prediction, to be written with the project's recipe.

    Attributes:
      mesh: the mesh, with an axis of stages.
      axis: that axis.
      schedule: the table: its name, ranks, microbatches and chunks.
      costs: seconds of the passes of a rank for one microbatch.
      send_seconds: seconds of a step in which ranks send activations and cotangents.
      once_seconds: seconds of what follows all microbatches.
      peak_bytes: the peak of a device.
      memory: the limit in bytes, or None.
    """

    program: Program = dataclasses.field(repr=False)
    mesh: AbstractMesh
    axis: str
    inner: AbstractMesh = dataclasses.field(repr=False)
    layouts: Layouts = dataclasses.field(repr=False)
    streams: Streams = dataclasses.field(repr=False)
    schedule: Schedule = dataclasses.field(repr=False)
    costs: PipelineCosts
    send_seconds: float
    once_seconds: float
    peak_bytes: int
    memory: float | None

    @property
    def label(self) -> str:
        """The schedule and sizes, and the kind of the other axes."""
        s = self.schedule
        chunks = f", {s.chunks} chunks" if s.chunks > 1 else ""
        inner = label(self.program.groups, self.inner, self.layouts, self.streams)
        others = "" if self.inner.size == 1 else f"; {inner}"
        return f"{s.name} of {s.ranks} stages{chunks}, {s.microbatches} microbatches{others}"

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.schedule.seconds(self.costs) + self.send_seconds + self.once_seconds

    @property
    def bubble(self) -> float:
        """The fraction of the time of the layers in which a rank idles."""
        return self.schedule.bubble(self.costs._replace(ends=0.0))

    @property
    def fits(self) -> bool:
        """True if the peak is within the limit."""
        return self.memory is None or self.peak_bytes <= self.memory

    @property
    def rank(self) -> tuple:
        """The order of pipelines: those that fit by time, then the others by memory."""
        return (not self.fits, self.seconds if self.fits else self.peak_bytes, self.peak_bytes)

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """The spec of each path that is sharded, layers along the axis of stages too."""
        groups, found = self.program.groups, {}
        for g, (group, layout) in enumerate(zip(groups.groups, self.layouts, strict=True)):
            if (g, 0) in groups.stacked and group.role != "data":
                layout = ((self.axis, *layout[0]), *layout[1:])
            if any(layout):
                found.update(dict.fromkeys(group.name.split(", "), spec_of(layout)))
        return found

    def row(self, best: float) -> list[str]:
        """The cells of a table; ``best`` is the time that it is compared with."""
        than = ""
        if self.memory is not None and not self.fits:
            than = f"does not fit in {size(self.memory)}"
        elif best:
            than = f"{abs(self.seconds / best - 1):.1%} {'slower' if self.seconds > best else 'faster'}"
        return [
            self.label,
            str(self.mesh),
            duration(self.seconds),
            f"{self.bubble:.1%}",
            duration(self.send_seconds),
            size(self.peak_bytes),
            than,
        ]

    def code(self) -> str:
        """The pipeline as the text of a program.

        It expects the parts of the step: ``embed(shared, microbatch)``, which makes the input of the first layer;
        ``stage(layers, x)``, the loop over layers; and ``loss(shared, x, microbatch)``.
        """
        s, groups = self.schedule, self.program.groups
        batch = [
            a for g, d in groups.lines[0].dims for a in self.layouts[g][d] if groups.groups[g].role == "data"
        ]
        data = tuple(dict.fromkeys(batch))
        rows = "P(None, " + (repr(data[0]) if len(data) == 1 else repr(data)) + ")" if data else "P()"
        manual = "{" + ", ".join(map(repr, (self.axis, *data))) + "}"
        given = [f'"{self.axis}"', f'schedule="{s.name}"']
        given += [f"chunks={s.chunks}"] if s.chunks > 1 else []
        given += [f"data_axes={data}"] if data else []
        order = [
            f"# layers = bf.parallel.interleave_layers(layers, {s.ranks}, {s.chunks})  # once, before the first step",
            "",
        ]
        return "\n".join(
            [
                "import blufunc as bf",
                "from blufunc import P",
                "",
                f"mesh = bf.make_mesh({self.mesh.axis_sizes}, {self.mesh.axis_names})",
                "specs = {",
                *(f'    "{path}": {spec},' for path, spec in self.specs.items()),
                "}  # * is an index; what is not here is replicated",
                "",
                f"# microbatches: the batch as [{s.microbatches}, rows, ...]",
                *(order if s.chunks > 1 else []),
                f"@bf.shard_map(mesh=mesh, axis_names={manual}, in_specs=(P(), P('{self.axis}'), {rows}),",
                f"              out_specs=(P(), (P(), P('{self.axis}'))))",
                "def value_and_grad(shared, layers, microbatches):",
                "    return bf.parallel.pipeline_value_and_grad(",
                f"        embed, stage, loss, shared, layers, microbatches, {', '.join(given)}",
                "    )",
            ]
        )

    def __str__(self) -> str:
        return (
            f"{self.label} on {self.mesh.size:,} devices ({self.mesh})\n{duration(self.seconds)} a step, bubble "
            f"{self.bubble:.1%}, {duration(self.send_seconds)} sending; {size(self.peak_bytes)} on each device"
        )


def loop_length(groups: Groups) -> int | None:
    """The number of layers that the step's loop steps through; None without one."""
    lengths = {
        groups.groups[g].aval.shape[0]
        for g, d in groups.stacked
        if d == 0 and groups.groups[g].role == "parameter"
    }
    batch = bool(groups.lines) and groups.lines[0].of_data
    return lengths.pop() if len(lengths) == 1 and batch else None


def passes(
    program: Program, mesh: AbstractMesh, layouts: Layouts, forecast: Forecast, layers: int
) -> Passes | None:
    """The parts of a planned microbatch; None without loops over layers, both ways."""
    sight, groups = forecast.sight, program.groups
    assert forecast.device is not None
    machine = forecast.device.machine
    steps = sight.schedule.steps
    loops = {
        n: s.eqn for n, s in enumerate(steps) if isinstance(s, OpaqueStep) and _steps_through(s.eqn, layers)
    }
    forward = {n: e for n, e in loops.items() if not source.is_backward(e.source)}
    backward = {n: e for n, e in loops.items() if source.is_backward(e.source)}
    if not forward or not backward:
        return None
    data = {a for g, d in groups.lines[0].dims for a in layouts[g][d] if groups.groups[g].role == "data"}

    def reduces(eqn: Eqn) -> bool:
        """True for a reduction over the batch, which runs once for all microbatches."""
        return not data.isdisjoint(eqn.params["axes"]) and _kinds(eqn).issubset(_REDUCTIONS)

    work = lambda step: step.seconds(machine)
    each = lambda eqn: 0.0 if reduces(eqn) else forecast.collective_seconds(eqn)
    sums = lambda eqn: forecast.collective_seconds(eqn) if reduces(eqn) else 0.0
    seconds, alone = step_seconds(sight, work, each)
    late, _ = step_seconds(sight, lambda step: 0.0, sums)
    carried = {
        v
        for v, i in zip(sight.schedule.outputs, groups.carried, strict=True)
        if i is not None and isinstance(v, int)
    }
    update = {n for n, s in enumerate(steps) if any(w and v in carried for v, w in accesses(s))}
    update |= {n for n, s in enumerate(steps) if alone[n] and not data.isdisjoint(s.eqn.params["axes"])}  # type: ignore[union-attr]
    update -= loops.keys()
    stacked = sum(
        nbytes for g, nbytes in _local_bytes(program, mesh, layouts).items() if _of_layers(groups, g)
    )
    kept = sum(n for g, n in _local_bytes(program, mesh, layouts).items() if groups.groups[g].role != "data")
    share = stacked / kept if kept else 0.0
    once = sum(seconds[n] for n in update)
    in_loops, outside = sum(late[n] for n in loops), sum(x for n, x in enumerate(late) if n not in loops)
    message = max(
        (v.aval.nbytes for e in forward.values() for v in e.outvars[: e.params["n_carry"]]), default=0
    )
    of_loops = lambda found: sum(
        v.aval.nbytes for e in found.values() for v in e.outvars[e.params["n_carry"] :]
    )
    halves = [_halves(e, message, forecast, work, each) for e in backward.values()]
    residuals, grads = of_loops(forward), of_loops(backward)
    return Passes(
        layers=layers,
        forward=sum(seconds[n] for n in forward),
        backward=sum(seconds[n] for n in backward),
        halves=(layers * sum(h[0] for h in halves), layers * sum(h[1] for h in halves)),
        ends=sum(x for n, x in enumerate(seconds) if n not in loops and n not in update),
        once=once + in_loops + outside,
        of_layers=once * share + in_loops,
        message=message,
        residuals=residuals,
        kept=layers * sum(h[2] for h in halves),
        rest=max(0, forecast.peak_bytes - forecast.argument_bytes - residuals - grads),
    )


def _steps_through(eqn: Eqn, layers: int) -> bool:
    """True for a loop that steps through the layers."""
    p = eqn.params
    return eqn.prim is scan_p and p["length"] == layers and len(eqn.invars) > p["n_consts"] + p["n_carry"]


def _kinds(eqn: Eqn) -> set[str]:
    """The collectives of an equation."""
    p = {k: v for k, v in eqn.params.items() if k not in ("axes", "sizes", "src", "dst")}
    return {kind for kind, _ in eqn.prim.engine_calls(**p)}  # type: ignore[attr-defined]


def _halves(eqn: Eqn, message: int, forecast: Forecast, work: Any, each: Any) -> tuple[float, float, int]:
    """The seconds of the halves of a backward body, and the bytes kept between them."""
    body, n = eqn.params["jaxpr"], eqn.params["n_carry"]
    needed = [i < n and v.aval.nbytes == message for i, v in enumerate(body.outvars)]
    if all(needed) or not any(needed):
        return 0.0, 0.0, 0
    first, second = split_outputs(body, needed)
    times = [
        scheduled_seconds(
            Sight(simplify(half), (False,) * len(half.invars), forecast.sight.device), work, each
        )
        for half in (first, second)
    ]
    return times[0], times[1], sum(v.aval.nbytes for v in first.outvars[sum(needed) :])


def _of_layers(groups: Groups, g: int) -> bool:
    return (g, 0) in groups.stacked and groups.groups[g].role != "data"


def _local_bytes(program: Program, mesh: AbstractMesh, layouts: Layouts) -> dict[int, int]:
    """The bytes of each group on one device."""
    return {
        g: group.nbytes // math.prod(mesh.size_of(axes) for axes in layout)
        for g, (group, layout) in enumerate(zip(program.groups.groups, layouts, strict=True))
    }


def pipelines(
    program: Program,
    mesh: AbstractMesh,
    axis: str,
    inner: AbstractMesh,
    layouts: Layouts,
    streams: Streams,
    found: Passes,
    forecast: Forecast,
    microbatches: int,
    links: Mapping[str, LinkSpec],
    memory: float | None,
) -> Iterator[FoundPipeline]:
    """The schedules of a number of stages and of microbatches.

    Args:
      program: the step on the whole batch.
      mesh, axis: the mesh with the axis of stages.
      inner: the mesh of each stage, on which ``forecast`` is the plan of one microbatch.
      layouts, streams: the layouts on ``inner``.
      found: the parts of that plan.
      links: the links of ``mesh``.
    """
    n, M, groups = mesh.shape[axis], microbatches, program.groups
    of = _local_bytes(program, inner, layouts)
    stacked = sum(nbytes for g, nbytes in of.items() if _of_layers(groups, g))
    grads = sum(b for g, b in of.items() if _of_layers(groups, g) and groups.groups[g].role == "parameter")
    data = sum(b for g, b in of.items() if groups.groups[g].role == "data")
    fixed = forecast.argument_bytes - stacked + stacked / n + data * (M - 1) / M + found.rest
    bandwidth = forecast.device.bandwidth  # type: ignore[union-attr]
    message = found.message / links[axis].bandwidth + links[axis].latency
    once = found.once - found.of_layers * (1 - 1 / n)
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), *(("interleaved", v) for v in _CHUNKS)):
        if chunks > 1 and (found.layers % (n * chunks) or n > M):
            continue
        if name == "zb-h1" and not found.kept:
            continue
        table = pipeline_schedule(name, n, M, chunks)
        weight = found.halves[1]
        first = found.halves[0] if name == "zb-h1" else max(found.backward - weight, 0.0)
        moved = 2 * found.residuals / bandwidth, 2 * found.kept * (name == "zb-h1") / bandwidth
        sums = 3 * grads / bandwidth
        # those of a chunk are copied out and in, and in plans of the recipe all sums of a rank twice
        of_chunk = 2 * grads * (chunks > 1) / bandwidth
        of_sums = 4 * grads * chunks * (chunks > 1) / bandwidth
        copies = (
            moved[0] + of_chunk,
            moved[0] + moved[1] + of_chunk,
            sums + of_sums + (sum(moved) if name == "zb-h1" else 0.0),
        )
        forward, first, weight = (
            (x + c) / n for x, c in zip((found.forward, first, weight), copies, strict=True)
        )
        costs = PipelineCosts(forward, first, weight, found.ends)
        kinds = [table.kinds(p) for p in range(len(table.ops))]
        sends = sum((FORWARD in k) + bool(k & {BACKWARD, INPUT}) for k in kinds)
        slots = table.slots * found.residuals / (n * chunks) + table.kept_slots * found.kept / n
        peak = int(fixed + _CARRIES[name] * (slots + grads / n))
        yield FoundPipeline(
            program,
            mesh,
            axis,
            inner,
            layouts,
            streams,
            table,
            costs,
            sends * message,
            once,
            peak,
            memory,
        )
