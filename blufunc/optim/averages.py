"""Averages of parameters over steps, for evaluation and target networks.

A face, above ``optim.base``. In: parameters, and older ones. Out: their averages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    aligned,
    leafwise,
    next_count,
    real_number,
    required,
    wide_dtype,
    zero_count,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.optim.base import ScalarOrSchedule

T = TypeVar("T")


class ParamsEmaState(NamedTuple):
    """``count``: the steps taken, int32. ``ema``: the average, like the parameters."""

    count: Any
    ema: PyTree


def params_ema(
    decay: ScalarOrSchedule = 0.999, *, warmup: bool = True, dtype: DTypeLike | None = None
) -> GradientTransformation:
    """Average the parameters that updates lead to, in the state.

    The last link of a chain: updates pass through unchanged::

        optimizer = optim.chain(optim.adamw(1e-3), optim.params_ema(0.9999))
        averaged = state[-1].ema  # for evaluation

    Args:
      decay: how much of the average survives a step: a number, or a schedule.
      warmup: use ``min(decay, (1 + t) / (10 + t))`` after t steps, as the average begins with the first parameters.
      dtype: the dtype of the average. By default that of the parameters, and float32 for half precisions, which could
        not hold what a step changes.
    Returns:
      a transformation whose ``update`` needs ``params``.
    """
    if not callable(decay):
        decay = real_number(decay, "params_ema: the decay")

    def init(params):
        start = lambda p: bnp.copy(p).astype(dtype or wide_dtype(p.dtype))  # which may be donated apart
        return ParamsEmaState(zero_count(), tree.map(start, tree.map(bnp.asarray, params)))

    def update(updates, state, params=None):
        now: Any = decay(state.count) if callable(decay) else decay
        if warmup:
            t = state.count.astype(dtypes.float32)
            now = bnp.minimum(now, (t + 1) / (t + 10))

        def one(p, u, mean):
            new = (p + u).astype(p.dtype).astype(mean.dtype)
            return (mean + (new - mean) * bnp.asarray(1 - now, dtype=mean.dtype),)

        trees = {"params": required(params, "params_ema"), "updates": updates, "state.ema": state.ema}
        (means,) = leafwise(one, 1, trees)
        return updates, ParamsEmaState(next_count(state.count), means)

    return GradientTransformation(init, update)


def incremental_update(new_tensors: T, old_tensors: PyTree, step_size: ArrayLike) -> T:
    """``step_size * new + (1 - step_size) * old``, each in the dtype of the old one.

    Args:
      new_tensors: a pytree of arrays, such as the parameters.
      old_tensors: their average, or those of a target network, a pytree of the same structure.
      step_size: how far to go, from 0 to 1.
    Raises:
      TreeError, ShapeError: structures or shapes differ.
    """
    step_size = real_number(step_size, "incremental_update: the step size")
    treedef, news, olds = aligned({"new_tensors": new_tensors, "old_tensors": old_tensors})
    means = [(n * step_size + o * (1 - step_size)).astype(o.dtype) for n, o in zip(news, olds, strict=True)]
    return tree.unflatten(treedef, means)


def periodic_update(new_tensors: T, old_tensors: PyTree, steps: ArrayLike, update_period: ArrayLike) -> T:
    """New arrays in every ``update_period``-th step, else the old ones.

    Args:
      new_tensors: a pytree of arrays.
      old_tensors: a pytree of the same structure, shapes and dtypes.
      steps: the number of steps so far.
      update_period: the number of steps from one change to the next.
    Raises:
      TreeError, ShapeError: structures or shapes differ.
    """
    treedef, news, olds = aligned({"new_tensors": new_tensors, "old_tensors": old_tensors})
    steps, period = (real_number(n, "periodic_update: a number of steps") for n in (steps, update_period))
    found = lax.cond(
        bnp.asarray(steps % period) == 0,
        lambda: [n.astype(o.dtype) for n, o in zip(news, olds, strict=True)],
        lambda: olds,
    )
    return tree.unflatten(treedef, found)
