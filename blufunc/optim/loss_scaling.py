"""Dynamic loss scaling, for gradients in float16.

A face, above ``optim.base``. Small gradients vanish in float16, whose smallest number is 6e-8. The loss is multiplied
by a scale that is as large as gradients allow; what overflows is skipped, and halves the scale (Micikevicius et al.,
arXiv:1710.03740).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    check_transformation,
    next_count,
    wide_dtype,
    with_extra_args_support,
    zero_count,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


class DynamicLossScaleState(NamedTuple):
    """``scale``: the factor of the next loss, float32.

    ``growth_count``: finite steps since the scale last changed. ``skipped``: steps that were skipped, int32 both.
    """

    scale: Any
    growth_count: Any
    skipped: Any
    inner_state: Any


def scale_loss(loss: ArrayLike, state: DynamicLossScaleState) -> Array:
    """The loss times the scale, to differentiate; float32 if it is narrower.

    Args:
      loss: a float.
      state: the state of ``dynamic_loss_scale``.
    Raises:
      ArgumentError: ``state`` is another one.
    """
    if not isinstance(state, DynamicLossScaleState):
        raise errors.ArgumentError(
            f"scale_loss takes the state of dynamic_loss_scale, not a {type(state).__name__}.",
            where=source.here(),
            fix="its part of the state of a chain: state[0]",
        )
    loss = bnp.asarray(loss)
    wide = wide_dtype(loss.dtype)
    return loss.astype(wide) * state.scale.astype(wide)


def dynamic_loss_scale(
    inner: Any,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> GradientTransformation:
    """``inner`` on gradients of a scaled loss, which are divided by the scale.

    A step whose gradients hold an infinity or a NaN is skipped: updates are 0, and the state of ``inner`` stays::

        optimizer = optim.dynamic_loss_scale(optim.adamw(1e-3))
        state = optimizer.init(params)
        grads = bf.grad(lambda p: optim.scale_loss(loss(p), state))(params)
        updates, state = optimizer.update(grads, state, params)

    Gradients are divided in float32 at least, and ``inner`` gets them so. All gradients of a step are tested, those of
    all devices of a mesh; in ``shard_map``, sum them over the devices first.

    Args:
      inner: a transformation.
      init_scale: the first scale.
      growth_interval: the number of finite steps in a row after which the scale grows.
      factor: by which it grows, and shrinks after gradients that are not finite.
      min_scale, max_scale: its bounds.
    Raises:
      ValueRangeError: the factor is not more than 1, the interval less than 1, or the bounds exclude ``init_scale``.
    """
    check_transformation(inner, "the first argument of dynamic_loss_scale")
    if not (factor > 1 and growth_interval >= 1 and 0 < min_scale <= init_scale <= max_scale):
        raise errors.ValueRangeError(
            f"dynamic_loss_scale: factor={factor}, growth_interval={growth_interval}, and a scale of {init_scale} in "
            f"[{min_scale}, {max_scale}].",
            where=source.here(),
            fix="factor > 1, growth_interval >= 1 and 0 < min_scale <= init_scale <= max_scale",
        )

    inner = with_extra_args_support(inner)

    def init(params):
        scale = bnp.asarray(init_scale, dtype=dtypes.float32)
        return DynamicLossScaleState(scale, zero_count(), zero_count(), inner.init(params))

    def update(updates, state, params=None, **extra):
        def unscaled(g):
            g = bnp.asarray(g)
            wide = wide_dtype(g.dtype)
            return g.astype(wide) / state.scale.astype(wide)

        given = tree.map(unscaled, updates)
        finite = functools.reduce(
            bnp.logical_and, [bnp.all(bnp.isfinite(g)) for g in tree.leaves(given)], bnp.asarray(True)
        )
        new, inner_state = lax.cond(
            finite,
            lambda: inner.update(given, state.inner_state, params, **extra),
            lambda: (tree.map(bnp.zeros_like, given), state.inner_state),
        )
        new = tree.map(lambda u, g: u.astype(bnp.asarray(g).dtype), new, updates)
        count = bnp.where(finite, state.growth_count + 1, 0)
        grows = count >= growth_interval
        scale = bnp.where(finite, bnp.where(grows, state.scale * factor, state.scale), state.scale / factor)
        skipped = bnp.where(finite, state.skipped, next_count(state.skipped))
        scale = bnp.clip(scale, min_scale, max_scale)
        return new, DynamicLossScaleState(scale, bnp.where(grows, 0, count), skipped, inner_state)

    return GradientTransformation(init, update)
