"""Schedule-free optimization: an average of iterates instead of a decaying rate.

A face, above ``optim.transforms`` and ``schedules``. State and formulas are those of ``optax.contrib``; sums and
iterates of half-precision parameters are kept in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    aligned,
    chain,
    check_transformation,
    leafwise,
    next_count,
    required,
    wide_dtype,
    zero_count,
)
from blufunc.optim.moments import scale_by_rms
from blufunc.optim.schedules import warmup_constant_schedule
from blufunc.optim.transforms import add_decayed_weights, scale_by_learning_rate

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.optim.base import ScalarOrSchedule

T = TypeVar("T")


class ScheduleFreeState(NamedTuple):
    """``z``: the iterates of the base optimizer, of which parameters are an average.

    ``weight_sum``: of the weights of the iterates so far; ``max_lr``: the largest learning rate; ``step_count``: int32,
    from 1 on.
    """

    b1: Any
    weight_sum: Any
    step_count: Any
    max_lr: Any
    base_optimizer_state: Any
    z: PyTree


def schedule_free(
    base_optimizer: Any,
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    weight_lr_power: ArrayLike = 2.0,
    state_dtype: DTypeLike | None = None,
) -> GradientTransformation:
    """Average the iterates of ``base_optimizer`` (Defazio et al., arXiv:2405.15682).

    With iterates z and their weighted average x, gradients are taken at ``y = b1 * x + (1 - b1) * z``: y are the
    parameters that updates lead to, and x, of ``schedule_free_eval_params``, those to evaluate and to save. The base
    optimizer must have no momentum, which the average replaces, and its rate a warm-up but no decay.

    Args:
      base_optimizer: a transformation.
      learning_rate: the learning rate of ``base_optimizer``, a number or a schedule.
      b1: the weight of the average, more than 0.
      weight_lr_power: an iterate has the weight of the largest rate so far to this power.
      state_dtype: the dtype of z. By default that of the parameters, and float32 for half precisions.
    Returns:
      a transformation whose ``update`` needs ``params``.
    Raises:
      ValueRangeError: ``b1`` is not in (0, 1].
    """
    check_transformation(base_optimizer, "the first argument of schedule_free")
    if not isinstance(b1, (int, float)) or not 0 < b1 <= 1:
        raise errors.ValueRangeError(
            f"schedule_free: b1={b1!r:.60} is not the weight of an average.",
            where=source.here(),
            fix="0 < b1 <= 1",
        )

    def init(params):
        params = tree.map(bnp.asarray, params)
        start = lambda p: bnp.copy(p).astype(state_dtype or wide_dtype(p.dtype))  # which may be donated apart
        number = lambda x: bnp.asarray(x, dtype=_number_dtype(params))
        return ScheduleFreeState(
            number(b1), number(0), zero_count() + 1, number(0), base_optimizer.init(params), tree.map(start, params)
        )  # fmt: skip

    def update(updates, state, params=None):
        params = required(params, "schedule_free")
        rate = learning_rate(state.step_count) if callable(learning_rate) else learning_rate
        max_lr = bnp.maximum(state.max_lr, bnp.asarray(rate, dtype=state.max_lr.dtype))
        weight = bnp.power(max_lr, weight_lr_power).astype(max_lr.dtype)
        total = state.weight_sum + weight
        share = bnp.where(total == 0, 0, weight / total)  # 0 as long as the rate is
        steps, inner_state = base_optimizer.update(updates, state.base_optimizer_state, params)

        def one(p, u, z, g):
            wide = wide_dtype(p.dtype)
            y, old, c = p.astype(wide), z.astype(wide), share.astype(wide)
            z = (old + u.astype(wide)).astype(z.dtype)
            new = z.astype(wide)
            x = (y - old * (1 - b1)) / b1
            x = x * (1 - c) + new * c
            return (x * b1 + new * (1 - b1) - y).astype(g.dtype), z

        trees = {"params": params, "steps": steps, "state.z": state.z, "grads": updates}
        new, z = leafwise(one, 2, trees)
        count = next_count(state.step_count)
        return new, ScheduleFreeState(state.b1, total, count, max_lr, inner_state, z)

    return GradientTransformation(init, update)


def schedule_free_eval_params(state: Any, params: T) -> T:
    """The average x of the iterates: the parameters to evaluate and to save.

    Args:
      state: the ``ScheduleFreeState``.
      params: the parameters y that updates led to.
    Raises:
      ArgumentError: ``state`` is another one, such as that of a chain.
    """
    if not hasattr(state, "z") or not hasattr(state, "b1"):
        raise errors.ArgumentError(
            f"schedule_free_eval_params takes a ScheduleFreeState, not a {type(state).__name__}.",
            where=source.here(),
            fix="the state of schedule_free in that of a chain: state[-1]",
        )
    treedef, ys, zs = aligned({"params": params, "state.z": state.z})

    def one(y: Any, z: Any) -> Any:
        wide = wide_dtype(y.dtype)
        b1 = state.b1.astype(wide)
        return ((y.astype(wide) - z.astype(wide) * (1 - b1)) / b1).astype(y.dtype)

    return tree.unflatten(treedef, [one(y, z) for y, z in zip(ys, zs, strict=True)])


def schedule_free_sgd(
    learning_rate: float = 1.0,
    warmup_steps: int | None = None,
    b1: float = 0.9,
    weight_decay: ArrayLike | None = None,
    weight_lr_power: ArrayLike = 2.0,
    state_dtype: DTypeLike | None = None,
) -> GradientTransformation:
    """``schedule_free`` on gradient descent.

    Args:
      learning_rate: the learning rate after the warm-up.
      warmup_steps: number of steps in which it rises from 0; None for none.
      b1, weight_lr_power, state_dtype: see ``schedule_free``.
      weight_decay: see ``add_decayed_weights``; None for none.
    """
    rate = _warmed_up(learning_rate, warmup_steps)
    base = scale_by_learning_rate(rate)
    if weight_decay is not None:
        base = chain(add_decayed_weights(weight_decay), base)
    return schedule_free(base, rate, b1, weight_lr_power, state_dtype)


def schedule_free_adamw(
    learning_rate: float = 0.0025,
    warmup_steps: int | None = None,
    b1: float = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_lr_power: ArrayLike = 2.0,
    state_dtype: DTypeLike | None = None,
) -> GradientTransformation:
    """``schedule_free`` on ``adamw`` without a mean of gradients.

    Args:
      learning_rate: the learning rate after the warm-up.
      warmup_steps: number of steps in which it rises from 0; None for none.
      b1, weight_lr_power, state_dtype: see ``schedule_free``.
      b2, eps: see ``scale_by_adam``.
      weight_decay: see ``add_decayed_weights``.
    """
    rate = _warmed_up(learning_rate, warmup_steps)
    base = chain(
        scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(rate),
    )
    return schedule_free(base, rate, b1, weight_lr_power, state_dtype)


def _warmed_up(rate: Any, steps: int | None) -> Any:
    return rate if steps is None else warmup_constant_schedule(0.0, rate, steps)


def _number_dtype(params: PyTree) -> Any:
    """float64 if a parameter is, else float32."""
    wide = any(p.dtype == dtypes.float64 for p in tree.leaves(params))
    return dtypes.float64 if wide else dtypes.float32
