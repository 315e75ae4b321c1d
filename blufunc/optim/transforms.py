"""Gradient transformations: the parts that optimisers are chained from.

A face, above ``optim.base``. Whatever is the same for all parameters (bias corrections, the learning rate, the norm of
all gradients) is computed once, as numbers, so that each parameter array sees as few operations as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc.core.ir import dtypes
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    Scalars,
    aligned,
    bias_correction,
    full_like,
    next_count,
    number,
    real_number,
    required,
    scaled,
    stateless,
    steps_of,
    wide_dtype,
    zero_count,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array
    from blufunc.optim.base import ScalarOrSchedule

Schedule = Callable[[Any], Any]
"""From the number of steps taken so far to a number."""


class ScaleByScheduleState(NamedTuple):
    """``count``: the steps taken, int32."""

    count: Any


class TraceState(NamedTuple):
    """``trace``: the decaying sum of past updates, like the parameters."""

    trace: PyTree


class ScaleByAdamState(NamedTuple):
    """``count``: the steps taken, int32. ``mu``, ``nu``: mean and mean square."""

    count: Any
    mu: PyTree
    nu: PyTree


# -- scaling ---------------------------------------------------------------------------------------


def scale(step_size: ScalarOrSchedule) -> GradientTransformation:
    """Multiply updates by ``step_size``, a scalar."""
    step_size = real_number(step_size, "scale: the step size")
    return stateless(lambda updates, params: scaled(updates, step_size))


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply updates by ``step_size_fn(count)``, count being the preceding steps."""

    def init(params):
        return ScaleByScheduleState(zero_count())

    def update(updates, state, params=None):
        return scaled(updates, step_size_fn(state.count)), ScaleByScheduleState(next_count(state.count))

    return GradientTransformation(init, update)


def scale_by_learning_rate(
    learning_rate: ScalarOrSchedule, *, flip_sign: bool = True
) -> GradientTransformation:
    """Multiply by minus the learning rate or schedule; plus it without ``flip_sign``."""
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        return scale_by_schedule(lambda count: learning_rate(count) * sign)
    return scale(real_number(learning_rate, "the learning rate") * sign)


def trace(
    decay: ArrayLike, nesterov: bool = False, accumulator_dtype: DTypeLike | None = None
) -> GradientTransformation:
    """Momentum: replace updates by their decaying sum ``updates + decay * trace``.

    Args:
      decay: decay of the sum per step.
      nesterov: use Nesterov momentum: return ``updates + decay * trace`` of the new trace (Sutskever et al., ICML
        2013).
      accumulator_dtype: the dtype of its state; the parameters' by default.
    """

    def init(params):
        return TraceState(
            tree.map(
                lambda p: bnp.zeros(p.shape, accumulator_dtype or p.dtype), tree.map(bnp.asarray, params)
            )
        )

    def update(updates, state, params=None):
        treedef, us, ts = aligned({"grads": updates, "state.trace": state.trace})
        sums = [u + t * decay for u, t in zip(us, ts, strict=True)]
        new = [u + s * decay for u, s in zip(us, sums, strict=True)] if nesterov else sums
        new = [n.astype(u.dtype) for n, u in zip(new, us, strict=True)]
        sums = [s.astype(t.dtype) for s, t in zip(sums, ts, strict=True)]
        return tree.unflatten(treedef, new), TraceState(tree.unflatten(treedef, sums))

    return GradientTransformation(init, update)


# -- limits ----------------------------------------------------------------------------------------


def clip(max_delta: ArrayLike) -> GradientTransformation:
    """Limit each element of the updates to [-max_delta, max_delta]."""
    return stateless(lambda updates, params: tree.map(lambda u: bnp.clip(u, -max_delta, max_delta), updates))  # type: ignore[operator]


def global_norm(updates: PyTree) -> Array:
    """The Euclidean norm of all leaves, of rank 0; half precisions sum in float32.

    The norm of an empty tree is 0.
    """
    squares = [
        bnp.sum(bnp.square(u.astype(wide_dtype(u.dtype)))) for u in map(bnp.asarray, tree.leaves(updates))
    ]
    return bnp.sqrt(sum(squares)) if squares else bnp.zeros((), dtypes.float32)


def clip_by_global_norm(max_norm: ArrayLike) -> GradientTransformation:
    """Scale all updates so that their ``global_norm`` is at most ``max_norm``.

    Updates within the limit stay as they are, to the bit (Pascanu et al., arXiv:1211.5063).
    """

    def update(updates, params):
        norm = global_norm(updates)
        return scaled(updates, bnp.where(norm < max_norm, 1, max_norm / norm))

    return stateless(update)


# -- weight decay ----------------------------------------------------------------------------------


def add_decayed_weights(weight_decay: ScalarOrSchedule = 0.0, mask: PyTree = None) -> GradientTransformation:
    """Add ``weight_decay * params`` to the updates.

    Args:
      weight_decay: a scalar or a schedule.
      mask: which parameters decay: a pytree of bools that is a prefix of the parameters, or a function that makes one
        of them. All by default.
    Raises:
      ArgumentError: ``update`` was called without ``params``.
    """

    def decayed(updates, params, weight_decay):
        treedef, us, ps = aligned({"grads": updates, "params": required(params, "add_decayed_weights")})
        decay, new = Scalars(number(weight_decay)), []
        for u, p, decays in zip(us, ps, _mask_leaves(mask, params), strict=True):
            if decays:
                (d,) = decay.of(p.dtype)
                u = (u + p * d).astype(u.dtype)
            new.append(u)
        return tree.unflatten(treedef, new)

    if not callable(weight_decay):
        return stateless(lambda updates, params: decayed(updates, params, weight_decay))

    def init(params):
        return ScaleByScheduleState(zero_count())

    def update(updates, state, params=None):
        new = decayed(updates, params, weight_decay(state.count))
        return new, ScaleByScheduleState(next_count(state.count))

    return GradientTransformation(init, update)


def _mask_leaves(mask: PyTree, params: PyTree) -> list[bool]:
    """For each leaf of the parameters whether it decays."""
    if mask is None:
        return [True] * len(tree.leaves(params))
    return [bool(m) for m in tree.broadcast_prefix(mask(params) if callable(mask) else mask, params)]


# -- adam ------------------------------------------------------------------------------------------


def scale_by_adam(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Divide the mean gradient by the root of the mean square (arXiv:1412.6980).

    Args:
      b1, b2: decay rates of the mean and of the mean square.
      eps: added to the root.
      eps_root: added under the root; positive, to differentiate through the update.
      mu_dtype: the dtype of its state. By default that of the parameters, and float32 for half
        precisions, whose 8 bits could not hold what a step changes; the mean square is always kept so.
      nesterov: estimate the mean of the step to come (Dozat, ICLR workshop 2016).
    """
    return adam_update(None, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)


def adam_update(
    learning_rate: Any, b1: Any, b2: Any, eps: Any, eps_root: Any, mu_dtype: Any, weight_decay: Any = 0.0,
    mask: PyTree = None, nesterov: bool = False,
) -> GradientTransformation:  # fmt: skip
    """``scale_by_adam``, fused with weight decay and the learning rate if given.

    With m and v the means, c1 and c2 their bias corrections, an update is ``-rate * (m / c1 / (sqrt(v / c2) + eps) +
    decay * p)``. It is computed as ``m * a / (sqrt(v) + e) + p * d``, with ``a = -rate * sqrt(c2) / c1``,
    ``e = eps * sqrt(c2)`` and ``d = -rate * decay``: 13 operations for each parameter array, with the means.
    With ``nesterov``, m / c1 gives way to ``b1 * m / c1' + (1 - b1) * g / c1``, where c1' is the next correction.
    """
    decays_any = not (isinstance(weight_decay, (int, float)) and weight_decay == 0)
    root = not (isinstance(eps_root, (int, float)) and eps_root == 0)

    def init(params):
        return ScaleByAdamState(zero_count(), full_like(params, 0, mu_dtype), full_like(params, 0))

    def update(updates, state, params=None):
        trees = {"grads": updates, "state.mu": state.mu, "state.nu": state.nu}
        if decays_any:
            trees["params"] = required(params, "weight decay")
        treedef, gs, ms, vs, *rest = aligned(trees)
        ps = rest[0] if decays_any else gs
        decays = _mask_leaves(mask, params) if decays_any else [False] * len(gs)

        count = next_count(state.count)
        steps = steps_of(count, vs)
        root_c2 = bnp.sqrt(bias_correction(b2, steps))
        a = root_c2 / bias_correction(b1, steps)
        d: Any = 0.0
        if learning_rate is not None:
            rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
            decay = weight_decay(state.count) if callable(weight_decay) else weight_decay
            a, d = a * -rate, number(rate * decay) * -1
        a_g: Any = a * (1 - b1) if nesterov else 0.0
        if nesterov:
            a = a * (bias_correction(b1, steps) / bias_correction(b1, steps + 1)) * b1
        numbers = Scalars(a, root_c2 * eps, d, bnp.square(root_c2) * eps_root if root else 0.0, a_g)

        new, mus, nus = [], [], []
        for g, m, v, p, is_decayed in zip(gs, ms, vs, ps, decays, strict=True):
            dtype = v.dtype
            a, e, d, e_root, a_g = numbers.of(dtype)
            x = g.astype(dtype)
            mu = m.astype(dtype) * b1 + x * (1 - b1)
            nu = v * b2 + bnp.square(x) * (1 - b2)
            ahead = mu * a + x * a_g if nesterov else mu * a
            u = ahead / (bnp.sqrt(nu + e_root if root else nu) + e)
            if is_decayed:
                u = u + p.astype(dtype) * d
            new.append(u.astype(g.dtype))
            mus.append(mu.astype(m.dtype))
            nus.append(nu)
        new, mus, nus = (tree.unflatten(treedef, leaves) for leaves in (new, mus, nus))
        return new, ScaleByAdamState(count, mus, nus)

    return GradientTransformation(init, update)
