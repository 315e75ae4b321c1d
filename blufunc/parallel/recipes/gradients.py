"""Gradients of replicated parameters: few large all-reduces per step.

A face, for use inside ``shard_map``. In: gradients of parameters cast to ``reduced`` (``lax.pcast(p, axis,
to="reduced")``), which are *unreduced*: sums pending an all-reduce. Out: reduced gradients. ``bucketed_psum`` reduces
them in buckets like PyTorch DDP's (Li et al., arXiv:2006.15704), since links are slow for small messages. Buckets
follow the order of the backward pass, so that the first can be reduced while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.config import config
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.stage import StagedTracer
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.typed_trace import TypedTrace
from blufunc.parallel.recipes.hierarchical import hierarchical_psum, levels
from blufunc.parallel.recipes.quantized import BLOCK, format_of, quantized_psum
from blufunc.parallel.recipes.typed import current_trace, element, like, likes, typed_jaxpr
from blufunc.transforms.autodiff.grad import value_and_grad

T = TypeVar("T")


def bucketed_psum(
    grads: T,
    axis: str | Sequence[str],
    *,
    bytes: int | None = None,
    hierarchical: bool = False,
    quantized: str | None = None,
) -> T:
    """``lax.psum(grads, axis)`` with one all-reduce per bucket.

    For use inside ``shard_map``, outside of loops in it. Each all-reduce is issued right after the last gradient of its
    bucket, before the rest of the backward pass.

    Args:
      grads: a pytree of gradients that are unreduced or varying over the axis.
      axis: one mesh axis, several, or none for no sum.
      bytes: the size of a full bucket, by default ``config.bucket_bytes``; a larger array is a bucket by itself. All
        arrays of a bucket have one dtype.
      hierarchical: ``axis`` is several axes, the last of ranks within a host: each bucket is reduced within hosts, then
        between them (``hierarchical_psum``).
      quantized: ``"int8"`` or ``"float8_e4m3fn"`` sends blocks of 8 bits, by ``quantized_psum_scatter`` and
        ``quantized_all_gather``, of whose errors the result has both. None, the default: exact.
    Returns:
      the same values as ``psum``. Gradients known to be zero, as of unused parameters, are not sent.
    Raises:
      ArgumentError: ``hierarchical`` with one axis, another type of quantized elements, or gradients to be quantized
        that have no float type.
      ShardingError: a gradient is replicated: it is summed already.
      ValueRangeError: ``bytes`` is not positive.
    """
    bytes = config.bucket_bytes if bytes is None else bytes
    if bytes <= 0:
        raise errors.ValueRangeError(
            f"bucketed_psum: a bucket has a positive number of bytes, not {bytes}.", where=source.here()
        )
    if quantized is not None:
        format_of(quantized, BLOCK, "bucketed_psum", "quantized")
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if not axes:
        return grads
    if hierarchical:
        levels(axes, "bucketed_psum(hierarchical=True)")
    trace = current_trace("bucketed_psum")
    leaves, structure = tree.flatten(grads)
    leaves = [lift(x) for x in leaves]
    unreduced = [i for i, x in enumerate(leaves) if _is_unreduced(x, axes, trace)]
    sums: list[Any] = [bnp.zeros_like(x) for x in leaves]
    how = _how(axes, hierarchical, quantized)
    for bucket in _buckets(leaves, unreduced, trace, bytes):
        start = len(trace.eqns)
        for i, total in zip(bucket, _summed([leaves[i] for i in bucket], how), strict=True):
            sums[i] = total
        _move_up(trace, start)
    return tree.unflatten(structure, sums)


def accumulated_value_and_grad(
    loss: Callable,
    params: Any,
    microbatches: Any,
    axis: str | Sequence[str],
    *,
    bytes: int | None = None,
    hierarchical: bool = False,
    quantized: str | None = None,
) -> tuple[Any, Any]:
    """Mean of a loss over microbatches and ranks, and its gradient, reduced once.

    For use inside ``shard_map``. One loop runs the forward and backward pass of each microbatch, so that activations of
    one microbatch are live.

    Args:
      loss: ``loss(params, microbatch) -> scalar``, a mean over the microbatch.
      params: a pytree. A parameter is replicated over the axis, or differs by rank, like experts or parameters that are
        gathered on use.
      microbatches: a pytree of this rank's arrays, [M, ...].
      axis: the mesh axis, or axes, over which data are sharded.
      bytes, hierarchical, quantized: see ``bucketed_psum``. Gradients that are reduced over one axis alone are so as
        without ``hierarchical``.
    Returns:
      value and gradient, summed in the dtype of the parameters; replicated where the parameters are.
    Raises:
      ArgumentError: as of ``bucketed_psum``.
      ShapeError: no microbatches, or arrays with different numbers of them.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    trace = current_trace("accumulated_value_and_grad")
    n = lax.axis_size(axes) * count_of(microbatches, "accumulated_value_and_grad")
    unreduced = Reducer(params, axes, trace)
    params = unreduced.cast(params, "reduced")
    microbatches = lax.pcast(microbatches, axes, to="varying")

    def mean_loss(p: Any, m: Any) -> Any:
        # Cast the value to varying, so that its cotangent is per rank, whatever the loss depends on.
        return lax.pcast(loss(p, m) / n, axes, to="varying")

    step, _, (of_value, *_) = typed_jaxpr(
        value_and_grad(mean_loss),
        (likes(params, trace), element(microbatches, trace)),
        "accumulated_value_and_grad",
    )

    def add(total, microbatch):
        return list(map(bnp.add, total, eval_jaxpr(step, tree.leaves((params, microbatch))))), None

    zero = [bnp.zeros((), of_value.aval.dtype), *unreduced.zeros(params)]
    (value, *grads), _ = lax.scan(add, zero, microbatches)
    sums = unreduced.reduce(
        tree.unflatten(tree.structure(params), grads), bytes, hierarchical=hierarchical, quantized=quantized
    )
    return lax.psum(value, axes), sums


class Reducer:
    """The axes over which each parameter is replicated and its gradient unreduced.

    Where a parameter varies, each rank's gradient is complete: the transposes of the collectives that gathered the
    parameter add the contributions of other ranks.

    Args:
      params: a pytree; the methods take pytrees of the same structure.
      axes: the axes over which data are sharded.
    """

    def __init__(self, params: Any, axes: Sequence[str], trace: TypedTrace):
        types = [
            dict(zip(trace.mesh.axis_names, x.types, strict=True)) for x in tree.leaves(likes(params, trace))
        ]
        self._axes = [tuple(a for a in axes if t.get(a) != "V") for t in types]

    def cast(self, xs: Any, to: str) -> Any:
        """Cast each leaf over its axes: parameters to reduced, gradients to unreduced."""
        leaves, structure = tree.flatten(xs)
        return tree.unflatten(
            structure, [lax.pcast(x, a, to=to) for x, a in zip(leaves, self._axes, strict=True)]
        )

    def zeros(self, params: Any) -> list[Any]:
        """Initial accumulators of the gradients."""
        return self.cast([bnp.zeros_like(p) for p in tree.leaves(params)], "unreduced")

    def reduce(
        self,
        grads: Any,
        bytes: int | None,
        later: Sequence[frozenset[str]] = (),
        more: Sequence[tuple[str, ...]] = (),
        *,
        hierarchical: bool = False,
        quantized: str | None = None,
    ) -> Any:
        """Reduce in buckets over each gradient's axes.

        Args:
          later: for each gradient the axes over which it stays unreduced; default none.
          more: for each gradient further axes, over which it varies; default none.
          hierarchical, quantized: see ``bucketed_psum``.
        """
        leaves, structure = tree.flatten(grads)
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, own in enumerate(self._axes):
            deferred = later[i] if later else frozenset()
            others = more[i] if more else ()
            leaves[i] = lax.pcast(leaves[i], tuple(a for a in others if a in deferred), to="unreduced")
            groups.setdefault(tuple(a for a in others + own if a not in deferred), []).append(i)
        for axes, which in groups.items():
            sums = bucketed_psum(
                [leaves[i] for i in which],
                axes,
                bytes=bytes,
                hierarchical=hierarchical and len(axes) > 1,
                quantized=quantized,
            )
            for i, x in zip(which, sums, strict=True):
                leaves[i] = x
        return tree.unflatten(structure, leaves)


Reducers = tuple[Reducer, Reducer]


def count_of(microbatches: Any, what: str) -> int:
    """The number of microbatches."""
    shapes = map(np.shape, tree.leaves(microbatches))
    counts = {s[0] if s else None for s in shapes}
    if len(counts) != 1 or not (found := counts.pop()):
        raise errors.ShapeError(
            f"{what}: all arrays of the microbatches have the same leading dimension, [M, ...].",
            where=source.here(),
        )
    return found


def _is_unreduced(x: Any, axes: Sequence[str], trace: TypedTrace) -> bool:
    """True if a gradient is to be summed: not a known zero, nor summed already."""
    if trace.is_zero(x):
        return False
    types = dict(zip(trace.mesh.axis_names, like(x, trace).types, strict=True))
    for axis in axes:
        if types.get(axis) in ("I", "R"):
            raise errors.ShardingError(
                f"bucketed_psum: a gradient ({x.aval}) is already the same on all ranks along {axis!r}.",
                where=source.here(),
                why="gradients of invariant parameters are summed where they arise, one by one.",
                fix=f"cast the parameters before differentiating: lax.pcast(params, {axis!r}, to='reduced')",
            )
    return True


def _buckets(
    leaves: Sequence[Any], unreduced: Sequence[int], trace: TypedTrace, limit: int
) -> list[list[int]]:
    """Group leaves by order of computation into buckets of ``limit`` bytes."""
    position = {v: i for i, e in enumerate(trace.eqns) for v in e.outvars}
    order = sorted(
        unreduced,
        key=lambda i: position.get(leaves[i].variable, -1) if isinstance(leaves[i], StagedTracer) else -1,
    )
    buckets: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}  # by type: an open bucket, and its bytes
    for i in order:
        x = leaves[i]
        size = x.aval.nbytes
        key = x.dtype, like(x, trace).types
        bucket, held = open_.get(key, ([], 0))
        if not bucket or held + size > limit:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_[key] = bucket, held + size
    return buckets


def _move_up(trace: TypedTrace, start: int) -> None:
    """Move the equations from index ``start`` on to right after their operands."""
    new = trace.eqns[start:]
    needed = {a for e in new for a in e.invars}
    last = max([i for i, e in enumerate(trace.eqns[:start]) if not needed.isdisjoint(e.outvars)], default=-1)
    trace.eqns[:] = [*trace.eqns[: last + 1], *new, *trace.eqns[last + 1 : start]]


def _how(axes: tuple[str, ...], hierarchical: bool, quantized: str | None) -> Callable[[Any], Any]:
    """The all-reduce of one array."""
    if quantized is not None:
        return lambda x: quantized_psum(x, axes, quantized, hierarchical, "bucketed_psum")
    return lambda x: hierarchical_psum(x, axes) if hierarchical else lax.psum(x, axes)


def _summed(xs: Sequence[Any], reduce: Callable[[Any], Any]) -> list[Any]:
    """Sum one bucket."""
    if len(xs) == 1:
        return [reduce(xs[0])]
    total = reduce(bnp.concatenate([x.reshape(-1) for x in xs]))
    outs, start = [], 0
    for x in xs:
        outs.append(total[start : start + x.size].reshape(x.shape))
        start += x.size
    return outs
