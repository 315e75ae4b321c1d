"""Prodigy: Adam that estimates its learning rate.

A face, above ``optim.transforms``. State and formulas are those of ``optax.contrib``; sums of half-precision parameters
are kept in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    aligned,
    bias_correction,
    full_like,
    next_count,
    number,
    real_number,
    required,
    steps_of,
    zero_count,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.optim.base import ScalarOrSchedule


class ProdigyState(NamedTuple):
    """``exp_avg``, ``exp_avg_sq``: mean and mean square of scaled gradients.

    ``grad_sum``: their sum; ``params0``: the first parameters; ``estim_lr``: the estimate of the learning rate;
    ``numerator_weighted``: its numerator; ``count``: the steps taken, int32.
    """

    exp_avg: PyTree
    exp_avg_sq: PyTree
    grad_sum: PyTree
    params0: PyTree
    estim_lr: Any
    numerator_weighted: Any
    count: Any


def prodigy(
    learning_rate: ScalarOrSchedule = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: ArrayLike = 1e-8,
    estim_lr0: float = 1e-6,
    estim_lr_coef: ArrayLike = 1.0,
    weight_decay: ArrayLike = 0.0,
    safeguard_warmup: bool = False,
) -> GradientTransformation:
    """AdamW that estimates its rate (Mishchenko & Defazio, arXiv:2306.06101).

    The estimate is a lower bound of the distance to the solution, and only grows.

    Args:
      learning_rate: a factor of the estimate: 1, or a schedule that falls from 1.
      betas: decay rates of the mean and of the mean square.
      beta3: decay rate of the sums of the estimate; None for the root of the second of ``betas``.
      eps: added to the root, times the estimate.
      estim_lr0: the first estimate, too small rather than too large.
      estim_lr_coef: a factor of all others.
      weight_decay: each step takes this part of a parameter, times its rate.
      safeguard_warmup: leave the learning rate out of the estimate's denominator, for a long warm-up.
    Returns:
      a transformation whose ``update`` needs ``params``.
    Raises:
      ArgumentError: ``betas`` are not two numbers.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise errors.ArgumentError(
            f"prodigy: betas are a pair of numbers, not {betas!r:.60}.",
            where=source.here(),
            fix="betas=(0.9, 0.999)",
        )
    beta1, beta2 = (real_number(b, "prodigy: a decay rate") for b in betas)
    decay = math.sqrt(beta2) if beta3 is None else beta3

    def init(params):
        params = tree.map(bnp.asarray, params)
        zeros = lambda: full_like(params, 0)
        wide = any(p.dtype == dtypes.float64 for p in tree.leaves(params))
        scalar = lambda x: bnp.asarray(x, dtype=dtypes.float64 if wide else dtypes.float32)
        first = tree.map(bnp.copy, params)  # which may be donated apart
        return ProdigyState(zeros(), zeros(), zeros(), first, scalar(estim_lr0), scalar(0), zero_count())

    def update(updates, state, params=None):
        trees = {"grads": updates, "params": required(params, "prodigy")}
        trees |= {f"state.{name}": getattr(state, name) for name in ProdigyState._fields[:4]}
        treedef, gs, ps, ms, vs, sums, firsts = aligned(trees)
        count = next_count(state.count)
        steps = steps_of(count, vs)
        rate = number(learning_rate(state.count) if callable(learning_rate) else learning_rate)
        estimate = state.estim_lr
        correction = bnp.sqrt(bias_correction(beta2, steps)) / bias_correction(beta1, steps)
        step = (estimate * rate * correction).astype(estimate.dtype)
        weight = (estimate if safeguard_warmup else step) / estim_lr0

        means, squares, new_sums, products = [], [], [], []
        for g, p, m, v, s, p0 in zip(gs, ps, ms, vs, sums, firsts, strict=True):
            dtype = v.dtype
            x, d = g.astype(dtype), estimate.astype(dtype)
            products.append(bnp.sum(x * (p0.astype(dtype) - p.astype(dtype))).astype(estimate.dtype))
            x = x * d
            means.append(m * beta1 + x * (1 - beta1))
            squares.append(v * beta2 + bnp.square(x) * (1 - beta2))
            new_sums.append(s * decay + x * weight.astype(dtype))
        numerator = state.numerator_weighted * decay + estimate / estim_lr0 * step * sum(products, 0)
        denominator = sum(
            [bnp.sum(bnp.abs(s)).astype(estimate.dtype) for s in new_sums], bnp.zeros_like(estimate)
        )
        found = bnp.where(
            denominator == 0, 0, numerator * estim_lr_coef / denominator
        )  # 0: no gradients so far
        estimate = bnp.maximum(estimate, found)

        def moved(g: Any, p: Any, m: Any, v: Any) -> Any:
            dtype = v.dtype
            root = bnp.sqrt(v) + estimate.astype(dtype) * eps
            safe = bnp.where(root == 0, 1, root)  # of an eps of 0, where gradients have been 0
            return ((m / safe + p.astype(dtype) * weight_decay) * -step.astype(dtype)).astype(g.dtype)

        columns = (
            [moved(*row) for row in zip(gs, ps, means, squares, strict=True)],
            means,
            squares,
            new_sums,
        )
        new, means, squares, new_sums = (tree.unflatten(treedef, leaves) for leaves in columns)
        return new, ProdigyState(means, squares, new_sums, state.params0, estimate, numerator, count)

    return GradientTransformation(init, update)
