"""Devices of a run: one, or a mesh along whose axes the step is sharded.

Precedes the training loop. In: the requested axes, and the processes that a launcher started. Out: a ``Layout``, which
places parameters and batches, and collects them. ``sharded.py`` defines the meaning of the axes for the step.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import blufunc as bf
from blufunc import tree
from blufunc.errors import DataError
from examples.gpt import model, sharded


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of a run's arrays: on one device, or by its plan."""

    plan: sharded.Plan = sharded.ALONE

    @property
    def leads(self) -> bool:
        """True for the process that prints and saves."""
        return bf.process_index() == 0

    def placed(self, values: Any) -> Any:
        """Place parameters, named "params", and optimizer state given for one device."""
        if self.plan.mesh is None:
            return values
        values = sharded.packed(values, self.plan)
        return bf.device_put(values, sharded.shardings(values, self.plan))

    @property
    def packed(self) -> list[str]:
        """Axes that change the form of what is placed, and thus of checkpoints.

        With the numbers of ranks and chunks, if these order the layers: "stage:4:2".
        """
        plan = self.plan
        order = f":{plan.mesh.shape['stage']}:{plan.chunks}" if plan.chunks > 1 and plan.mesh else ""
        return [axis + order * (axis == "stage") for axis in sharded.PACKING if plan.has(axis)]

    def restored(self, restore: Callable[[Any], Any], like: Any, packed: Sequence[str]) -> Any:
        """Restore and place values that another layout may have saved.

        Args:
          restore: function of a tree of types to the values, as ``io.Checkpointer.restore``.
          like: types in the form of one device.
          packed: the attribute of the layout that saved them.
        """
        if self.packed == list(packed):  # each device reads its shards
            return restore(sharded.placed_types(like, self.plan))
        their = _packing(packed)
        types = bf.eval_shape(lambda x: sharded.packed(x, their), like)
        values = restore(tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), types))
        others = {name: values.pop(name) for name in values.keys() - like.keys()}
        return self.placed(sharded.unpacked(values, their)) | others

    def whole(self, values: Any) -> Any:
        """Collect placed values as NumPy arrays in the form of one device, collectively."""
        if bf.process_count() > 1:
            values = bf.multihost.process_allgather(values)
        return sharded.unpacked(tree.map(np.asarray, values), self.plan)

    def divided(self, batch: np.ndarray) -> Any:
        """Shard the rows of a batch; each process takes its own."""
        if self.plan.mesh is None:
            return batch
        sharding = self.plan.sharding(self.plan.among(*sharded.ROWS))
        return bf.make_array_from_callback(batch.shape, sharding, lambda rows: batch[rows])

    def agreed_id(self) -> str:
        """A random id, the same in all processes."""
        words = np.frombuffer(secrets.token_bytes(8), np.uint32)
        if bf.process_count() > 1:
            words = np.asarray(bf.multihost.broadcast_one_to_all(words))
        return words.tobytes().hex()

    def any(self, flag: bool) -> bool:
        """True if any process says so: all stop at the same step, so that none waits."""
        return flag if bf.process_count() == 1 else bool(bf.multihost.process_allgather(flag).any())


def _packing(packed: Sequence[str]) -> sharded.Plan:
    """A plan that packs like the layout with this attribute."""
    axes, chunks = {}, 1
    for word in packed:
        axis, *order = word.split(":")
        axes[axis] = int(order[0]) if order else 1
        chunks = int(order[1]) if order else chunks
    if not axes:
        return sharded.ALONE
    return sharded.Plan(bf.AbstractMesh(tuple(axes.values()), tuple(axes)), chunks=chunks)


def layout(asked: dict[str, int] | None, config: model.Config, batch: int, **how: Any) -> Layout:
    """Layout for the axes of a mesh, by default "data" over all processes.

    A single process simulates the devices that it needs on the CPU.

    Args:
      asked: names and sizes of axes, of which one may be -1: as many devices as there are.
      config: of the model to be sharded.
      batch: sequences in a step.
      how: the other attributes of ``sharded.Plan``.
    """
    processes, axes = bf.process_count(), sizes(asked)
    n = math.prod(axes.values())
    if processes > 1 and n != processes:
        raise DataError(
            f"a mesh of {n} devices for {processes} processes",
            where=_flag(axes),
            why="each process has one device of the mesh",
            fix=f"{_flag({'data': processes})}, or launch {n} processes",
        )
    plan = sharded.Plan(**how)
    _check(axes, config, batch, plan)
    if not axes:
        return Layout(plan)
    if processes == 1 and bf.default_backend() == "cpu":
        bf.config.cpu_devices = max(bf.config.cpu_devices, n)
    return Layout(dataclasses.replace(plan, mesh=bf.make_mesh(tuple(axes.values()), tuple(axes))))


def sizes(asked: dict[str, int] | None) -> dict[str, int]:
    """The axes of a mesh with their sizes: that of -1, and "data" over processes."""
    processes = bf.process_count()
    axes = asked or ({"data": processes} if processes > 1 else {})
    if -1 in axes.values():
        there, others = processes if processes > 1 else bf.device_count(), -math.prod(axes.values())
        if there % others:
            raise DataError(
                f"{there} devices cannot be divided by the other axes, {others}",
                where=_flag(axes),
                fix=f"a multiple of {others} processes or devices",
            )
        axes = {axis: there // others if size == -1 else size for axis, size in axes.items()}
    return axes


def _check(axes: dict[str, int], config: model.Config, batch: int, plan: sharded.Plan) -> None:
    """Raise DataError if the axes do not combine, or a dimension is not divisible."""

    def refuse(what: str, why: str = "", fix: str = "") -> None:
        where = _flag(axes) if axes else f"--accumulate {plan.microbatches}"
        raise DataError(what, where=where, why=why, fix=fix)

    if {"zero1", "zero2"} <= axes.keys():
        refuse(
            "gradients that are divided for each microbatch, and are not",
            why="along zero1 and zero2 the same is divided; only what becomes of gradients differs",
            fix="one axis of both",
        )
    if {"stage", "zero2"} <= axes.keys():
        refuse(
            "a pipeline that is divided along zero2, too",
            why="it adds up whole gradients of its microbatches, as zero1 does",
            fix=f"--mesh {sharded.spelled({'zero1' if a == 'zero2' else a: n for a, n in axes.items()})}",
        )
    if axes.get("expert", 1) > 1 and not config.experts:
        refuse("the model has no experts", fix=f"--experts {2 * axes['expert']}")
    if "model" in axes and plan.loss_chunk:
        raise DataError(
            f"--loss-chunk {plan.loss_chunk} with an axis model",
            where=_flag(axes),
            why="the vocabulary is divided along it, and each device has its part of the logits of all its tokens",
            fix="leave out --loss-chunk",
        )
    for axis, flag, value, usual in (
        ("seq", "--routing", plan.routing, sharded.ALONE.routing),
        ("stage", "--pipeline-schedule", plan.schedule, sharded.ALONE.schedule),
        ("stage", "--chunks", plan.chunks, sharded.ALONE.chunks),
        ("stage", "--shard-vocabulary", plan.sharded_ends, False),
    ):
        if value != usual and axis not in axes:
            said = flag if value is True else f"{flag} {value}"
            raise DataError(
                f"{said} without an axis {axis}",
                where=said,
                why="it says how that axis is used",
                fix=f"{_flag(axes | {axis: 2})}, or leave {flag} out",
            )
    if "stage" in axes:
        _check_pipeline(axes, plan)
    among = lambda *names: math.prod(axes.get(name, 1) for name in names)
    rows, parts = among(*sharded.ROWS), among(*sharded.ROWS) * plan.microbatches
    if batch % parts:
        times = f" in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        refuse(
            f"a batch of {batch} cannot be divided among {rows} devices{times}",
            fix=f"--batch {-(-batch // parts) * parts}",
        )
    seq = among("seq")
    of_vocabulary = among("stage" if plan.sharded_ends else "model") if "stage" in axes else 1
    by_heads = plan.routing == "all_to_all"
    of_heads = "device along model and seq, with --routing all_to_all" if by_heads else "device along model"
    for what, size, n, of in (
        ("heads", config.heads, among("model", "seq") if by_heads else among("model"), of_heads),
        ("layers", config.layers, among("stage") * plan.chunks, "chunk of each stage"),
        ("experts", config.experts, among("expert"), "device along expert"),
        ("tokens of a vocabulary", config.vocab, of_vocabulary, "device along stage or model"),
        (
            "tokens of a context",
            config.context,
            2 * seq if seq > 1 else 1,
            "device along seq, an early and a late one",
        ),
    ):
        if size % n:
            fitting = max(k for k in range(1, n) if not size % k)
            refuse(
                f"{size} {what} cannot be divided into {n} parts",
                why=f"a part for each {of}",
                fix=f"{fitting} instead of {n}, or a size that {n} divides",
            )


def _check_pipeline(axes: dict[str, int], plan: sharded.Plan) -> None:
    """Raise DataError if the options of a pipeline do not combine."""

    def refuse(what: str, where: str, why: str, fix: str) -> None:
        raise DataError(what, where=where, why=why, fix=fix)

    interleaved = plan.schedule == "interleaved"
    if (plan.chunks > 1) != interleaved:
        refuse(
            f"--chunks {plan.chunks} with --pipeline-schedule {plan.schedule}",
            where=f"--chunks {plan.chunks}",
            why="an interleaved pipeline takes turns between chunks of layers, and the others have one",
            fix="--chunks 2" if interleaved else "--pipeline-schedule interleaved, or leave --chunks out",
        )
    if interleaved and plan.microbatches < axes["stage"]:
        refuse(
            f"{plan.microbatches} microbatches are too few to interleave on {axes['stage']} stages",
            where=f"--accumulate {plan.microbatches}",
            why="a device runs as many microbatches as there are stages before its next chunk",
            fix=f"--accumulate {axes['stage']}, or a multiple of it",
        )
    if plan.sharded_ends and ("model" in axes or plan.loss_chunk):
        other = "an axis model" if "model" in axes else f"--loss-chunk {plan.loss_chunk}"
        refuse(
            f"--shard-vocabulary with {other}",
            where="--shard-vocabulary",
            why="the logits are divided along the stages, in one piece" if plan.loss_chunk
            else "the vocabulary is divided along model already",
            fix="leave one of them out",
        )  # fmt: skip


def _flag(axes: dict[str, int]) -> str:
    return f"--mesh {sharded.spelled(axes)}"
