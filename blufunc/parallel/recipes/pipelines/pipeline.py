"""Pipeline parallelism: layers sharded over a mesh axis, in microbatches.

A face, for use inside ``shard_map``. In: this rank's layers, of a stacked pytree sharded over the axis
(``P("stage")``), and microbatches. Out: results, or loss and gradients. Each rank runs a *stage*, or several chunks of
layers in turns, and sends its result to the next. The schedules:

- ``gpipe`` (Huang et al., arXiv:1811.06965): all microbatches forward, then all backward, as the derivative of the
  forward loop. Residuals of every microbatch are live.
- ``1f1b``, ``interleaved`` and ``zb-h1``: the backward pass of a microbatch starts when its forward pass has left the
  last stage. Their table is in ``schedule.py``, the loop over it in ``steps.py``.

Every rank runs the same program, with microbatch indices that depend on its rank. A rank without a microbatch computes
on stale data, and its results are ignored. A stage under ``checkpoint`` saves only its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.pytree import tree
from blufunc.parallel.recipes.gradients import Reducer, count_of
from blufunc.parallel.recipes.pipelines.schedule import check_name, check_size, pipeline_schedule
from blufunc.parallel.recipes.pipelines.stage import (
    NAME,
    Model,
    at,
    check_stage,
    in_chunks,
    model_of,
    returning_array,
    uneven,
)
from blufunc.parallel.recipes.pipelines.steps import run
from blufunc.parallel.recipes.typed import current_trace, likes
from blufunc.parallel.recipes.varying import Ring, ring_of, same_on_all
from blufunc.transforms.autodiff.grad import value_and_grad, vjp

if TYPE_CHECKING:
    from blufunc.core.ir.trace import Array

T = TypeVar("T")


def pipeline(stage: Callable, layers: Any, x: Any, axis: str) -> Array:
    """Run all stages on microbatches, inside ``shard_map``; differentiable.

    Args:
      stage: ``stage(layers, x) -> x`` on one microbatch; result and argument have one shape and dtype.
      layers: this rank's layers.
      x: [M, ...], the microbatches; only the first rank's are used.
      axis: the mesh axis of stages.
    Returns:
      [M, ...], the results of the last rank, *unreduced*: ``lax.psum(y, axis)`` gives them to all ranks.
    Raises:
      ArgumentError: a stage that does not return an array.
      ShapeError: a stage changes shape or dtype; no microbatches.
    """
    ring, x = ring_of(axis, "pipeline"), bnp.asarray(x)
    count_of(x, "pipeline")
    of_array = returning_array(stage, "a stage")
    ys, _ = _all_forward(lambda layers, x: (of_array(layers, x), 0.0), layers, x, ring)
    last = lax.axis_index(axis) == ring.size - 1
    return lax.pcast(bnp.where(last, ys, 0), axis, to="unreduced")


def pipeline_value_and_grad(
    embed: Callable,
    stage: Callable,
    loss: Callable,
    shared: Any,
    layers: Any,
    microbatches: Any,
    axis: str,
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    stage_loss: bool = False,
    sharded_ends: bool = False,
    data_axes: str | Sequence[str] = (),
    bytes: int | None = None,
) -> tuple[Any, tuple[Any, Any]]:
    """Mean loss and gradients of microbatches in a pipeline, in ``shard_map``.

    Args:
      embed: ``embed(shared, microbatch) -> x``, an array, the input of the first stage.
      stage: ``stage(layers, x) -> x``, of the same shape and dtype.
      loss: ``loss(shared, x, microbatch) -> scalar``, of the output of the last stage: a mean over the microbatch.
      shared: a pytree of floating arrays, the parameters of ``embed`` and ``loss``, the same on all ranks; both may use
        the same ones.
      layers: the parameters of this rank's stage, floating.
      microbatches: a pytree of arrays [M, ...], the same on all ranks of the axis.
      axis: the mesh axis of stages.
      schedule: ``"1f1b"``; ``"interleaved"``, with a smaller bubble and more communication, of several ``chunks``;
        ``"zb-h1"``, whose bubble is a third, with memory for the deferred gradients of weights; ``"gpipe"``.
      chunks: the number of chunks of consecutive layers that this rank has in turns. ``layers`` then has the layers of
        all of them along the first dimension, as ``interleave_layers`` orders them.
      stage_loss: whether ``stage`` returns ``(x, own)``, with a scalar to add to the loss of the microbatch, as the
        balance loss of experts.
      sharded_ends: whether all ranks of the axis run ``embed`` and ``loss`` together, each on its shard of the
        vocabulary: parameters in ``shared`` may be sharded over the axis, and the functions communicate over it
        (``vocabulary_parallel_embedding``, ``vocabulary_parallel_cross_entropy``). Otherwise every rank spends the time
        of both, and only those of the first and the last rank count.
      data_axes: axes over which microbatches are sharded. Over these a parameter is replicated, or differs by rank,
        like experts or parameters that are gathered in a stage.
      bytes: see ``bucketed_psum``: gradients are reduced once, after all microbatches.
    Returns:
      the value, and the gradients of ``shared`` and ``layers``, summed in the dtype of the parameters. Over an axis
      over which a parameter is *reduced* (``P("stage", reduced={"fsdp"})``) its gradient is left unreduced, for the
      caller to scatter.
    Raises:
      ArgumentError: an unknown schedule; an embedding or stage that does not return an array, or that and its loss.
      DtypeError: a parameter is not floating.
      ShapeError: a stage changes shape or dtype; a loss that is not a scalar; no microbatches, or arrays with different
        numbers of them; layers that do not divide into the chunks.
      ShardingError: ``shared`` or ``microbatches`` vary over the axis.
      ValueRangeError: chunks or microbatches that do not fit the schedule.
    """
    check_name(schedule, NAME)
    data = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    ring = ring_of(axis, NAME)
    M = count_of(microbatches, NAME)
    _check_floating(shared, layers)
    table = pipeline_schedule(schedule, ring.size, M, chunks)
    later = _reduced(shared), _reduced(layers)
    microbatches = same_on_all(microbatches, axis)
    everywhere = axis, *data
    if sharded_ends:
        shared, sharded = _of_ends(shared, axis)
        of_ends = data  # all ranks of the axis are at the same microbatch
    else:
        shared, sharded = lax.pcast(same_on_all(shared, axis), axis, to="varying"), []
        of_ends = everywhere
    microbatches = lax.pcast(microbatches, of_ends, to="varying")
    layers = lax.pcast(layers, axis, to="varying")
    shapes = [x.shape for x in tree.leaves(layers)]
    if chunks > 1:
        layers = tree.map(lambda x: in_chunks(x, chunks, ring.size), layers)
    trace = current_trace(NAME)
    sync = Reducer(shared, data, trace), Reducer(layers, data, trace)
    shared, layers = sync[0].cast(shared, "reduced"), sync[1].cast(layers, "reduced")
    model = model_of(
        embed, stage, loss, M * lax.axis_size(data), everywhere, of_ends, stage_loss, sharded_ends
    )
    if schedule == "gpipe":
        value, (of_shared, of_layers) = _value_and_grad_of_gpipe(model, shared, layers, microbatches, ring)
    else:
        value, (of_shared, of_layers) = run(table, model, shared, layers, microbatches, ring, sync)
    of_shared, of_layers = sync[0].cast(of_shared, "unreduced"), sync[1].cast(of_layers, "unreduced")
    if sharded_ends:
        of_shared, more = _once(of_shared, sharded, later[0], ring)
    else:
        of_shared, more = lax.pcast(of_shared, axis, to="varying"), [(axis,)] * len(later[0])
    if chunks > 1:
        leaves, structure = tree.flatten(of_layers)
        of_layers = tree.unflatten(structure, [x.reshape(s) for x, s in zip(leaves, shapes, strict=True)])
    grads = sync[0].reduce(of_shared, bytes, later[0], more), sync[1].reduce(of_layers, bytes, later[1])
    return lax.psum(value, everywhere), grads


def interleave_layers(layers: T, ranks: int, chunks: int) -> T:
    """Order stacked layers so that consecutive shards have the chunks of a rank.

    Chunk c of rank r is part c * ranks + r of the model: with two ranks and two chunks rank 0 gets the first and third
    quarter of the layers, rank 1 the second and fourth.

    Args:
      layers: a pytree of arrays [L, ...], in the order of the model.
      ranks: the size of the mesh axis of stages.
      chunks: the number of chunks of each rank.
    Raises:
      ArgumentError: ``ranks`` or ``chunks`` is not a positive int.
      ShapeError: L is not a multiple of ``ranks * chunks``.
    """
    _check_sizes(ranks, chunks, "interleave_layers")
    return _reordered(layers, (chunks, ranks), "interleave_layers")


def deinterleave_layers(layers: T, ranks: int, chunks: int) -> T:
    """The inverse of ``interleave_layers``, also for gradients.

    Raises:
      ArgumentError: ``ranks`` or ``chunks`` is not a positive int.
      ShapeError: L is not a multiple of ``ranks * chunks``.
    """
    _check_sizes(ranks, chunks, "deinterleave_layers")
    return _reordered(layers, (ranks, chunks), "deinterleave_layers")


def _check_sizes(ranks: int, chunks: int, name: str) -> None:
    check_size("ranks", ranks, name)
    check_size("chunks", chunks, name)


def _reordered(layers: T, parts: tuple[int, int], name: str) -> T:
    """Swap the two outer indices of the leading dimension."""

    def one(x: Any) -> Any:
        x = bnp.asarray(x)
        if not x.ndim or x.shape[0] % (parts[0] * parts[1]):
            raise uneven(name, x.shape[0] if x.ndim else 0, parts[0] * parts[1])
        return x.reshape(*parts, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    return tree.map(one, layers)


def _of_ends(shared: Any, axis: str) -> tuple[Any, list[bool]]:
    """Parameters that all ranks use at once, and which are sharded over the axis."""
    trace = current_trace(NAME)
    at_axis = trace.mesh.axis_names.index(axis)
    sharded = [x.types[at_axis] == "V" for x in tree.leaves(likes(shared, trace))]
    leaves, structure = tree.flatten(shared)
    cast = [x if v else lax.pcast(x, axis, to="invariant") for x, v in zip(leaves, sharded, strict=True)]
    return tree.unflatten(structure, cast), sharded


def _once(
    grads: Any, sharded: Sequence[bool], later: Sequence[frozenset[str]], ring: Ring
) -> tuple[Any, list[tuple[str, ...]]]:
    """Gradients that are equal on all ranks, on one rank if the caller sums them.

    Also returned: for each the axes over which that sum is pending.
    """
    leaves, structure = tree.flatten(grads)
    pending = [ring.axis in deferred and not v for deferred, v in zip(later, sharded, strict=True)]
    first = lax.axis_index(ring.axis) == 0
    leaves = [bnp.where(first, g, 0) if p else g for g, p in zip(leaves, pending, strict=True)]
    return tree.unflatten(structure, leaves), [(ring.axis,) if p else () for p in pending]


def _check_floating(*params: Any) -> None:
    for leaf in tree.leaves(params):
        if not dtypes.is_inexact(lift(leaf).aval.dtype):
            raise errors.DtypeError(
                f"{NAME}: parameters must be floating, not {lift(leaf).aval}.",
                where=source.here(),
                why="functions of integers are not differentiable.",
                fix="close over other values, or pass them with the microbatches",
            )


def _reduced(params: Any) -> list[frozenset[str]]:
    """The axes over which each leaf is reduced."""
    trace = current_trace(NAME)
    names = trace.mesh.axis_names
    return [
        frozenset(a for a, t in zip(names, p.types, strict=True) if t == "R")
        for p in tree.leaves(likes(params, trace))
    ]


# -- all forward, then all backward ----------------------------------------------------------------


def _all_forward(stage: Callable, layers: Any, xs: Any, ring: Ring) -> tuple[Any, Any]:
    """The results of this rank for each microbatch [M, ...]; final on the last rank.

    Also returned: the sum of the own losses of this rank's stage.
    """
    rank, M = lax.axis_index(ring.axis), xs.shape[0]
    pairs = [(i, i + 1) for i in range(ring.size - 1)]

    def tick(received, t):
        # Until its first microbatch arrives, a rank computes on one, too: the derivative of an ignored result is zero
        # times a value, which must not be infinite.
        x = bnp.where((rank == 0) | (t < rank), at(xs, t), received)
        y, own = stage(layers, x)
        check_stage(x, y)
        there = (t >= rank) & (t < rank + M)
        return lax.ppermute(y, ring.axis, pairs), (y, bnp.where(there, own, 0))

    ticks = bnp.arange(M + ring.size - 1, dtype=dtypes.int32)
    _, (ys, own) = lax.scan(tick, bnp.zeros_like(xs[0]), ticks)
    return ys[ring.size - 1 :], own.sum()


def _value_and_grad_of_gpipe(model: Model, shared: Any, layers: Any, microbatches: Any, ring: Ring) -> tuple:
    last = lax.axis_index(ring.axis) == ring.size - 1

    def stages(shared, layers):
        _, xs = lax.scan(lambda _, m: (None, model.embed(shared, m)), None, microbatches)
        return _all_forward(model.stage, layers, xs, ring)

    def of_losses(shared, ys):
        _, losses = lax.scan(lambda _, ym: (None, model.loss(shared, *ym)), None, (ys, microbatches))
        return losses.sum()

    (ys, own), pullback = vjp(stages, shared, layers)
    results = lax.psum(bnp.where(last, ys, 0), ring.axis) if model.sharded_ends else ys
    value, (of_loss, cts) = value_and_grad(of_losses, (0, 1))(shared, results)
    # The other ranks' losses are of values that are no results, so their gradients may not be finite: they are replaced
    # by zeros, not multiplied by them, as differentiating a masked loss would.
    cts = bnp.where(last, cts, 0)
    if not model.sharded_ends:
        of_loss = tree.map(lambda g: bnp.where(last, g, 0), of_loss)
    of_shared, of_layers = pullback((cts, bnp.ones_like(own)))
    return bnp.where(last, value, 0) + own, (tree.map(bnp.add, of_shared, of_loss), of_layers)
