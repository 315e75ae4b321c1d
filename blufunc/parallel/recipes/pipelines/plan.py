"""``plan_pipeline``: times, bubbles and memory of a pipeline's schedules.

A face, used before a job is started. In: the parts of a model, the number of stages, and figures of a device. Out: a
``PipelinePlan``. The passes of a stage (``stage.py``) are fused and planned as for a GPU, their times follow
from the roofline of each step (``kernels/cost.py``), and the tables (``schedule.py``) add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.programs import simplify
from blufunc.core.pytree import tree
from blufunc.kernels.backends.cuda.described import described
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.machine import Machine
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.tables import duration, size, table
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.collectives.shard_map import shard_map
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.recipes.gradients import count_of
from blufunc.parallel.recipes.pipelines.schedule import PipelineCosts, Schedule, check_size, pipeline_schedule
from blufunc.parallel.recipes.pipelines.stage import NAME, Stage, in_chunks, model_of
from blufunc.parallel.recipes.typed import current_trace, element, likes, typed_jaxpr
from blufunc.parallel.recipes.varying import ring_of
from blufunc.parallel.reports.hardware import DeviceSpec
from blufunc.transforms.autodiff.grad import value_and_grad
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.staging.eval_shape import eval_shape

_GPU, _AXIS = "cuda:sm_90", "stage"


@dataclass(frozen=True)
class PlannedSchedule:
    """One schedule of a model.

    Attributes:
      schedule: its table.
      costs: the times of the passes, in seconds; ``ends`` is that of loss and gradient on one device.
      sharded_ends: whether all ranks share the ends.
      slot_bytes, kept_bytes: the bytes of a slot of residuals, and of one of values between the halves.
    """

    schedule: Schedule
    costs: PipelineCosts
    sharded_ends: bool
    slot_bytes: int
    kept_bytes: int

    @property
    def seconds(self) -> float:
        """The time of a step, without communication."""
        return self.schedule.seconds(self._of_tick)

    @property
    def bubble(self) -> float:
        """The fraction of idle time, with no time for the ends."""
        return self.schedule.bubble(self.costs._replace(ends=0.0))

    @property
    def formula(self) -> float:
        """The papers' fraction, see ``Schedule.formula``."""
        return self.schedule.formula(self.costs._replace(ends=0.0))

    @property
    def residual_bytes(self) -> int:
        """Bytes of all slots of a rank."""
        s = self.schedule
        return s.slots * self.slot_bytes + s.kept_slots * self.kept_bytes

    @property
    def _of_tick(self) -> PipelineCosts:
        ranks = self.schedule.ranks if self.sharded_ends else 1
        return self.costs._replace(ends=self.costs.ends / ranks)


@dataclass(frozen=True)
class PipelinePlan:
    """The schedules of a model; ``print`` it.

    Attributes:
      planned: the schedules, with whole and with sharded ends.
    """

    planned: tuple[PlannedSchedule, ...]

    @property
    def fastest(self) -> PlannedSchedule:
        """The one that takes the least time."""
        return min(self.planned, key=lambda p: p.seconds)

    def __str__(self) -> str:
        first = self.planned[0]
        s, c = first.schedule, first.costs
        head = "schedule", "chunks", "ends", "a step", "bubble", "formula", "slots", "residuals"
        rows = [
            (
                p.schedule.name,
                str(p.schedule.chunks),
                "sharded" if p.sharded_ends else "whole",
                duration(p.seconds),
                f"{p.bubble:.1%}",
                f"{p.formula:.1%}",
                f"{p.schedule.slots}" + f" + {p.schedule.kept_slots}" * (p.schedule.kept_slots > 0),
                size(p.residual_bytes),
            )
            for p in self.planned
        ]
        times = (
            f"forward {duration(c.forward)}, backward {duration(c.input + c.weight)}, loss {duration(c.ends)}"
        )
        return "\n".join(
            [
                f"{s.ranks} ranks, {s.microbatches} microbatches; the layers of a rank: {times}",
                table(head, rows, head[3:]),
            ]
        )


def plan_pipeline(
    embed: Callable,
    stage: Callable,
    loss: Callable,
    shared: Any,
    layers: Any,
    microbatches: Any,
    ranks: int,
    *,
    device: DeviceSpec,
    chunks: int | Sequence[int] = (2,),
    stage_loss: bool = False,
) -> PipelinePlan:
    """Plan the schedules of a pipeline, none of whose devices needs to exist.

    The passes of one rank are fused and planned as for a GPU of compute capability 9.0; nothing is compiled or run.

    Args:
      embed, stage, loss, stage_loss: as for ``pipeline_value_and_grad``, without collectives.
      shared, layers, microbatches: arrays, or ``ShapeDtypeStruct``: all layers of the model along the first dimension,
        and the microbatches of one replica.
      ranks: the number of stages.
      device: figures of a device.
      chunks: the number of chunks of an interleaved schedule, or several to compare. Those that do not divide the
        layers, and those of fewer microbatches than ranks, are left out.
    Returns:
      a ``PipelinePlan``; print it for a table. Times are of computation alone.
    Raises:
      ArgumentError: ``device`` is not a DeviceSpec, or ``ranks`` or one of ``chunks`` not a positive int.
      ShapeError: layers without a first dimension, or none.
      ShardingError: layers that cannot be sharded over the ranks.
    """
    if not isinstance(device, DeviceSpec):
        raise errors.ArgumentError(
            f"plan_pipeline: device is a DeviceSpec, not {device!r:.60}.",
            where=source.here(),
            fix="device=bf.DeviceSpec(flops=800e12, bandwidth=3e12)",
        )
    M = count_of(microbatches, "plan_pipeline")
    tables = [pipeline_schedule(name, ranks, M) for name in ("gpipe", "1f1b", "zb-h1")]
    count = _count(layers)
    tables += [
        pipeline_schedule("interleaved", ranks, M, v)
        for v in _chunks(chunks)
        if M >= ranks > 1 and not count % (ranks * v) and v > 1
    ]
    seconds = lambda jaxpr: _seconds(jaxpr, device)
    passes = {
        v: _traced(embed, stage, loss, shared, layers, microbatches, ranks, v, stage_loss)
        for v in {t.chunks for t in tables}
    }
    whole, head = passes[1]
    assert whole.halves is not None
    forward, backward, weight = seconds(whole.each), seconds(whole.transposed), seconds(whole.halves.second)
    together = PipelineCosts(forward, max(backward - weight, 0.0), weight, seconds(head))
    apart = together._replace(input=seconds(whole.halves.first))
    found = []
    for t in tables:
        own = passes[t.chunks][0]
        saved, kept = (sum(a.nbytes for a in avals) for avals in (own.saved, own.kept))
        costs = apart if t.kept_slots else together
        found += [PlannedSchedule(t, costs, sharded, saved, kept) for sharded in (False, True)]
    return PipelinePlan(tuple(found))


def _chunks(chunks: Any) -> list[int]:
    """The numbers of chunks to plan."""
    several = isinstance(chunks, Iterable) and not isinstance(chunks, (str, bytes))
    found = list(chunks) if several else [chunks]
    for v in found:
        check_size("chunks", v, "plan_pipeline")
    return found


def _count(layers: Any) -> int:
    """The number of layers."""
    shapes = [np.shape(x) for x in tree.leaves(layers)]
    if not shapes or not all(shapes):
        raise errors.ShapeError(
            f"plan_pipeline: layers are arrays [L, ...], not {layers!r:.60}.",
            where=source.here(),
            why="each stage gets its share of the first dimension, that of layers.",
            fix="stack the parameters of the layers: bf.tree.map(lambda *xs: bnp.stack(xs), *layers)",
        )
    return shapes[0][0]


def _traced(
    embed: Callable,
    stage: Callable,
    loss: Callable,
    shared: Any,
    layers: Any,
    microbatches: Any,
    ranks: int,
    chunks: int,
    stage_loss: bool,
) -> tuple[Stage, Jaxpr]:
    """The passes of one chunk, and the derivative of the loss."""
    found: list[tuple[Stage, Jaxpr]] = []

    def local(shared: Any, layers: Any, microbatches: Any) -> Any:
        ring, trace = ring_of(_AXIS, "plan_pipeline"), current_trace("plan_pipeline")
        model = model_of(embed, stage, loss, 1, (_AXIS,), (_AXIS,), stage_loss, False)
        shared, microbatches = lax.pcast((shared, microbatches), _AXIS, to="varying")
        if chunks > 1:
            layers = tree.map(lambda x: in_chunks(x, chunks, ranks), layers)
        of_chunk = (element if chunks > 1 else likes)(layers, trace)
        passes = Stage(model, shared, of_chunk, microbatches, ring, halves=True)
        of_head = likes(shared, trace), passes.of_x, element(microbatches, trace)
        head, _, _ = typed_jaxpr(value_and_grad(model.loss, (0, 1)), of_head, NAME)
        found.append((passes, head))
        return bnp.zeros(())

    mesh, whole = AbstractMesh((ranks,), (_AXIS,)), PartitionSpec()
    mapped = shard_map(local, mesh=mesh, in_specs=(whole, PartitionSpec(_AXIS), whole), out_specs=whole)
    eval_shape(mapped, shared, layers, microbatches)
    return found[0]


def _seconds(jaxpr: Jaxpr, device: DeviceSpec) -> float:
    """The roofline of a jaxpr's steps, one after another."""
    gpu = described(_GPU)
    closed, _ = jaxpr.hoist()
    program = simplify.simplify(gpu.backend.chosen(simplify.simplify(lower_collectives(closed))))
    return _of_steps(Sight(program, (False,) * len(program.invars), gpu), device.machine)


def _of_steps(sight: Sight, machine: Machine) -> float:
    """Seconds of a program's steps; those of loops by their planned bodies."""
    bodies = {b.step: b.sight for b in sight.bodies}
    total = 0.0
    for n, (step, cost) in enumerate(zip(sight.schedule.steps, sight.cost.steps, strict=True)):
        if n in bodies and isinstance(step, OpaqueStep) and step.eqn.prim is scan_p:
            total += step.eqn.params["length"] * _of_steps(bodies[n], machine)
        else:
            total += cost.seconds(machine)
    return total
