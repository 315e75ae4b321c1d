"""Gradient transformations of Adam's kind: ADOPT, and two means in AdEMAMix.

A face, above ``optim.base``. State and formulas are those of ``optax.contrib``, under its names; states of
half-precision parameters are kept, and updates computed, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    bias_correction,
    full_like,
    leafwise,
    next_count,
    number,
    steps_of,
    zero_count,
)
from blufunc.optim.transforms import ScaleByAdamState

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.optim.base import ScalarOrSchedule


class ScaleByAdemamixState(NamedTuple):
    """``count``, ``count_m2``: the steps taken, int32.

    ``m1``, ``m2``: the fast and the slow mean of gradients; ``nu``: their mean square.
    """

    count: Any
    count_m2: Any
    m1: PyTree
    m2: PyTree
    nu: PyTree


def fourth_root(steps: Any) -> Any:
    """``steps**0.25``, the bound of ``scale_by_adopt``."""
    return bnp.power(steps, 0.25)


def scale_by_adopt(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.9999,
    eps: ArrayLike = 1e-6,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    use_clipping: bool = True,
    clip_value_fn: Callable[[Any], Any] = fourth_root,
) -> GradientTransformation:
    """Divide gradients by the RMS of those before them (Taniguchi et al., 2411.02853).

    The mean is one of normalized gradients, so that ``b2`` may have any value. The first step only begins the state.

    Args:
      b1, b2, mu_dtype: see ``scale_by_adam``.
      eps: the least root to divide by.
      nesterov: use Nesterov momentum.
      use_clipping: limit normalized gradients by ``clip_value_fn``.
      clip_value_fn: from the steps taken so far, as a float, to the largest size of an element.
    """

    def init(params):
        return ScaleByAdamState(zero_count(), full_like(params, 0, mu_dtype), full_like(params, 0))

    def update(updates, state, params=None):
        steps = steps_of(state.count, state.nu)
        begun = state.count > 0
        d1, d2 = bnp.where(begun, b1, 1), bnp.where(begun, b2, 0)
        limit = bnp.asarray(clip_value_fn(steps)) if use_clipping else None

        def one(g, m, v):
            dtype = v.dtype
            x, first, second = g.astype(dtype), d1.astype(dtype), d2.astype(dtype)
            normal = x / bnp.maximum(bnp.sqrt(v), eps)
            if limit is not None:
                bound = limit.astype(dtype)
                normal = bnp.clip(normal, -bound, bound)
            mu = m.astype(dtype) * first + normal * (1 - first)
            new = mu * first + normal * (1 - first) if nesterov else mu
            return new.astype(g.dtype), mu.astype(m.dtype), v * second + bnp.square(x) * (1 - second)

        new, mus, nus = leafwise(one, 3, {"grads": updates, "state.mu": state.mu, "state.nu": state.nu})
        return new, ScaleByAdamState(next_count(state.count), mus, nus)

    return GradientTransformation(init, update)


def scale_by_ademamix(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    b3: ScalarOrSchedule = 0.9999,
    alpha: ScalarOrSchedule = 6.0,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
) -> GradientTransformation:
    """``scale_by_adam`` with a second, slow mean (Pagliardini et al., 2409.03137).

    Args:
      b1, b2, eps, eps_root: see ``scale_by_adam``.
      b3: decay rate of the slow mean, a number or a schedule. The slow mean is not corrected for its start at 0.
      alpha: the factor of the slow mean, a number or a schedule.
      mu_dtype: the dtype of both means; see ``scale_by_adam``.
    """

    def init(params):
        fast, slow = (full_like(params, 0, mu_dtype) for _ in range(2))
        return ScaleByAdemamixState(zero_count(), zero_count(), fast, slow, full_like(params, 0))

    def update(updates, state, params=None):
        slow, factor = (bnp.asarray(number(x(state.count_m2) if callable(x) else x)) for x in (b3, alpha))
        count = next_count(state.count)
        steps = steps_of(count, state.nu)
        c1, c2 = bias_correction(b1, steps), bias_correction(b2, steps)

        def one(g, fast, mean, v):
            dtype = v.dtype
            x, d3 = g.astype(dtype), slow.astype(dtype)
            m1 = fast.astype(dtype) * b1 + x * (1 - b1)
            m2 = mean.astype(dtype) * d3 + x * (1 - d3)
            nu = v * b2 + bnp.square(x) * (1 - b2)
            root = bnp.sqrt(nu / c2.astype(dtype) + eps_root) + eps
            new = (m1 / c1.astype(dtype) + m2 * factor.astype(dtype)) / root
            return new.astype(g.dtype), m1.astype(fast.dtype), m2.astype(mean.dtype), nu

        trees = {"grads": updates, "state.m1": state.m1, "state.m2": state.m2, "state.nu": state.nu}
        new, m1, m2, nu = leafwise(one, 4, trees)
        return new, ScaleByAdemamixState(count, next_count(state.count_m2), m1, m2, nu)

    return GradientTransformation(init, update)
