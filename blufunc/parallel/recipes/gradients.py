"""Gradients of what all ranks share: summed in few, large collectives, and once for many microbatches.

A face, for the inside of ``shard_map``. A parameter that is cast to ``reduced`` (``lax.pcast(p, axis, to="reduced")``)
gets an *unreduced* gradient: the sum over the ranks is owed, and may be paid when it suits. ``bucketed_psum`` pays for
many gradients at once, in buckets as PyTorch DDP's (Li et al., arXiv:2006.15704): the links are slow at small
messages. The buckets follow the order in which the backward pass ends, so that the first could be sent while it still
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.stage import StagedTracer
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.axis_types import TypedTrace
from blufunc.parallel.recipes.typed import current_trace, element, like, likes, typed_jaxpr
from blufunc.transforms.autodiff.grad import value_and_grad

BUCKET = 25 * 2**20
"""The bytes of a bucket, as PyTorch DDP's: more than a message needs to be at the speed of the links."""


def bucketed_psum(grads: Any, axis: str | Sequence[str], *, bytes: int = BUCKET) -> Any:
    """``lax.psum(grads, axis)`` by one all-reduce a bucket. Inside of ``shard_map``, outside of loops in it.

    Each all-reduce stands in the program where the last gradient of its bucket is made, before the rest of the backward
    pass.

    Args:
      grads: a pytree of gradients that are unreduced over the axis, or vary over it.
      axis: one mesh axis, several, or none: then nothing is summed.
      bytes: a bucket is full when it has as many; a larger array is one by itself. All arrays in it have one dtype.
    Returns:
      the sums, the same values as those of ``psum``. Gradients that are known to be zero, as those of parameters that
      are not used, are not sent.
    Raises:
      ShardingError: a gradient is the same on all ranks: it is summed already.
      ValueRangeError: ``bytes`` is not positive.
    """
    if bytes <= 0:
        raise errors.ValueRangeError(
            f"bucketed_psum: a bucket has a positive number of bytes, not {bytes}.", where=source.here()
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if not axes:
        return grads
    trace = current_trace("bucketed_psum")
    leaves, structure = tree.flatten(grads)
    leaves = [lift(x) for x in leaves]
    owed = [i for i, x in enumerate(leaves) if _is_owed(x, axes, trace)]
    sums: list[Any] = [bnp.zeros_like(x) for x in leaves]
    for bucket in _buckets(leaves, owed, trace, bytes):
        start = len(trace.eqns)
        for i, total in zip(bucket, _summed([leaves[i] for i in bucket], axes), strict=True):
            sums[i] = total
        _move_up(trace, start)
    return tree.unflatten(structure, sums)


def accumulated_value_and_grad(
    loss: Callable, params: Any, microbatches: Any, axis: str | Sequence[str], *, bytes: int = BUCKET
) -> tuple[Any, Any]:
    """The mean of a loss over microbatches and ranks, and its gradient, reduced once. Inside of ``shard_map``.

    The backward pass of each microbatch follows its forward pass, in one loop: activations of one microbatch are live.

    Args:
      loss: ``loss(params, microbatch) -> scalar``, a mean over the microbatch.
      params: a pytree. A parameter is the same on all ranks of the axis, or each rank has its own, as of experts or of
        what is gathered where it is used.
      microbatches: a pytree of this rank's arrays, [M, ...].
      axis: the mesh axis, or axes, over which data are divided.
      bytes: see ``bucketed_psum``.
    Returns:
      value and gradient, summed in the dtype of the parameters; they are the same on all ranks where these are.
    Raises:
      ShapeError: microbatches of several numbers, or none.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    trace = current_trace("accumulated_value_and_grad")
    n = lax.axis_size(axes) * count_of(microbatches, "accumulated_value_and_grad")
    owed = Owed(params, axes, trace)
    params = owed.cast(params, "reduced")
    microbatches = lax.pcast(microbatches, axes, to="varying")
    step, _, (of_value, *_) = typed_jaxpr(
        # A value that varies has a cotangent of each rank's own, whatever the loss depends on.
        value_and_grad(lambda p, m: lax.pcast(loss(p, m) / n, axes, to="varying")),
        (likes(params, trace), element(microbatches, trace)),
        "accumulated_value_and_grad",
    )

    def add(total, microbatch):
        return list(map(bnp.add, total, eval_jaxpr(step, tree.leaves((params, microbatch))))), None

    zero = [bnp.zeros((), of_value.aval.dtype), *owed.zeros(params)]
    (value, *grads), _ = lax.scan(add, zero, microbatches)
    return lax.psum(value, axes), owed.paid(tree.unflatten(tree.structure(params), grads), bytes)


class Owed:
    """Over which axes the gradient of each parameter is a sum that is owed: those along which it does not vary.

    Where it varies each rank's gradient is its own, and whole: the transposes of the collectives by which others saw
    the parameter bring what they add.

    Args:
      params: a pytree, of whose form the arguments of the methods are.
      axes: those over which data are divided.
    """

    def __init__(self, params: Any, axes: Sequence[str], trace: TypedTrace):
        types = [
            dict(zip(trace.mesh.axis_names, x.types, strict=True)) for x in tree.leaves(likes(params, trace))
        ]
        self._axes = [tuple(a for a in axes if t.get(a) != "V") for t in types]

    def cast(self, xs: Any, to: str) -> Any:
        """Each leaf cast over its axes: parameters to reduced, gradients to unreduced (all are but zeros)."""
        leaves, structure = tree.flatten(xs)
        return tree.unflatten(
            structure, [lax.pcast(x, a, to=to) for x, a in zip(leaves, self._axes, strict=True)]
        )

    def zeros(self, params: Any) -> list[Any]:
        """What gradients of the leaves are added to."""
        return self.cast([bnp.zeros_like(p) for p in tree.leaves(params)], "unreduced")

    def paid(
        self, grads: Any, bytes: int, later: Sequence[frozenset[str]] = (), more: tuple[str, ...] = ()
    ) -> Any:
        """The sums, in buckets, over the axes of each gradient and ``more``, along which it varies.

        Args:
          later: for each gradient the axes over which it stays owed; none by default.
        """
        leaves, structure = tree.flatten(grads)
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, own in enumerate(self._axes):
            kept = later[i] if later else frozenset()
            leaves[i] = lax.pcast(leaves[i], tuple(a for a in more if a in kept), to="unreduced")
            groups.setdefault(tuple(a for a in more + own if a not in kept), []).append(i)
        for axes, which in groups.items():
            sums = bucketed_psum([leaves[i] for i in which], axes, bytes=bytes)
            for i, x in zip(which, sums, strict=True):
                leaves[i] = x
        return tree.unflatten(structure, leaves)


def count_of(microbatches: Any, what: str) -> int:
    """How many microbatches there are."""
    counts = {x.shape[0] if x.ndim else None for x in map(lift, tree.leaves(microbatches))}
    if len(counts) != 1 or not (found := counts.pop()):
        raise errors.ShapeError(
            f"{what}: all arrays of the microbatches have their number in front, [M, ...].",
            where=source.here(),
        )
    return found


def _is_owed(x: Any, axes: Sequence[str], trace: TypedTrace) -> bool:
    """Whether a gradient is to be summed: it is not if it is known to be zero, and must be if it is not."""
    if trace.is_zero(x):
        return False
    types = dict(zip(trace.mesh.axis_names, like(x, trace).types, strict=True))
    for axis in axes:
        if types.get(axis) in ("I", "R"):
            raise errors.ShardingError(
                f"bucketed_psum: a gradient ({x.aval}) is the same on all ranks along {axis!r} already.",
                where=source.here(),
                why="gradients of what all ranks share are summed where they arise, one by one.",
                fix=f"cast the parameters before differentiating: lax.pcast(params, {axis!r}, to='reduced')",
            )
    return True


def _buckets(leaves: Sequence[Any], owed: Sequence[int], trace: TypedTrace, limit: int) -> list[list[int]]:
    """Of the leaves that are ``owed`` which go together: in the order in which they are made, ``limit`` bytes each."""
    made = {v: i for i, e in enumerate(trace.eqns) for v in e.outvars}
    order = sorted(
        owed,
        key=lambda i: made.get(leaves[i].variable, -1) if isinstance(leaves[i], StagedTracer) else -1,
    )
    buckets: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}  # of each type: a bucket that is not full, and its bytes
    for i in order:
        x = leaves[i]
        size = x.aval.size * x.dtype.itemsize
        key = x.dtype, like(x, trace).types
        bucket, held = open_.get(key, ([], 0))
        if not bucket or held + size > limit:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_[key] = bucket, held + size
    return buckets


def _move_up(trace: TypedTrace, start: int) -> None:
    """Put the equations from number ``start`` on right behind those that they need."""
    new = trace.eqns[start:]
    needed = {a for e in new for a in e.invars}
    last = max([i for i, e in enumerate(trace.eqns[:start]) if not needed.isdisjoint(e.outvars)], default=-1)
    trace.eqns[:] = [*trace.eqns[: last + 1], *new, *trace.eqns[last + 1 : start]]


def _summed(xs: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """The sums of one bucket."""
    if len(xs) == 1:
        return [lax.psum(xs[0], axes)]
    total = lax.psum(bnp.concatenate([x.reshape(-1) for x in xs]), axes)
    outs, start = [], 0
    for x in xs:
        outs.append(total[start : start + x.size].reshape(x.shape))
        start += x.size
    return outs
