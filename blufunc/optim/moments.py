"""Gradient transformations by moving averages of each element: Adam's relatives.

A face, above ``optim.base``. State and formulas are those of optax, under its names; states of half-precision
parameters are kept, and updates computed, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    bias_correction,
    corrected_mean,
    full_like,
    leafwise,
    next_count,
    number,
    real_number,
    stateless,
    steps_of,
    zero_count,
)
from blufunc.optim.transforms import ScaleByAdamState

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


class ScaleByRssState(NamedTuple):
    """``sum_of_squares``: of all gradients, like the parameters."""

    sum_of_squares: PyTree


class ScaleByRmsState(NamedTuple):
    """``nu``: the mean square of the gradients, like the parameters."""

    nu: PyTree


class ScaleByRmsWithCountState(NamedTuple):
    """``count``: the steps taken, int32. ``nu``: the gradients' mean square."""

    count: Any
    nu: PyTree


class ScaleByRStdDevState(NamedTuple):
    """``mu``, ``nu``: mean and mean square of the gradients, like the parameters."""

    mu: PyTree
    nu: PyTree


class ScaleByRStdDevWithCountState(NamedTuple):
    """``count``: the steps taken, int32. ``mu``, ``nu``: mean and mean square."""

    count: Any
    mu: PyTree
    nu: PyTree


class ScaleByAmsgradState(NamedTuple):
    """``count``, ``mu``, ``nu``: as of Adam. ``nu_max``: the largest ``nu`` so far."""

    count: Any
    mu: PyTree
    nu: PyTree
    nu_max: PyTree


class ScaleByLionState(NamedTuple):
    """``count``: the steps taken, int32. ``mu``: the mean of the gradients."""

    count: Any
    mu: PyTree


class ScaleByBeliefState(NamedTuple):
    """``count``, ``mu``: as of Adam. ``nu``: the mean of ``(gradient - mu)**2``."""

    count: Any
    mu: PyTree
    nu: PyTree


class ScaleByAdaDeltaState(NamedTuple):
    """``e_g``, ``e_x``: the mean squares of the gradients and of the updates."""

    e_g: PyTree
    e_x: PyTree


class EmaState(NamedTuple):
    """``count``: the steps taken, int32. ``ema``: the mean of the updates."""

    count: Any
    ema: PyTree


# -- first moments ---------------------------------------------------------------------------------


def ema(
    decay: ArrayLike, debias: bool = True, accumulator_dtype: DTypeLike | None = None
) -> GradientTransformation:
    """Replace updates by their average ``average * decay + update * (1 - decay)``.

    Args:
      decay: decay of the average per step.
      debias: divide the result, but not the state, by ``1 - decay**count``: the average starts at 0.
      accumulator_dtype: the dtype of the average; that of the parameters by default, and float32 for half precisions.
    """

    def init(params):
        return EmaState(zero_count(), full_like(params, 0, accumulator_dtype))

    def update(updates, state, params=None):
        count = next_count(state.count)
        correction: Any = bias_correction(decay, steps_of(count, state.ema)) if debias else None

        def one(g, m):
            mean = _mean(m, g, decay)
            new = mean / correction.astype(mean.dtype) if debias else mean
            return new.astype(g.dtype), mean.astype(m.dtype)

        new, means = leafwise(one, 2, {"grads": updates, "state.ema": state.ema})
        return new, EmaState(count, means)

    return GradientTransformation(init, update)


def scale_by_sign() -> GradientTransformation:
    """Replace each element by its sign."""
    return stateless(lambda updates, params: tree.map(bnp.sign, updates))


_LION_MODES = ("hard", "smooth", "refined")


def scale_by_lion(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    mu_dtype: DTypeLike | None = None,
    *,
    mode: str = "hard",
    smooth_beta: ArrayLike = 1.0,
) -> GradientTransformation:
    """The sign of a mix of gradient and momentum (Chen et al., arXiv:2302.06675).

    Args:
      b1: how much of the momentum goes into the mix.
      b2: decay of the momentum per step.
      mu_dtype: the dtype of its state; see ``scale_by_adam``.
      mode: ``"hard"``: the sign; ``"smooth"``: ``tanh(smooth_beta * x)``; ``"refined"``: x limited to [-1, 1].
      smooth_beta: see ``mode``.
    """
    if not isinstance(mode, str) or mode not in _LION_MODES:
        raise errors.ValueRangeError(
            f"scale_by_lion: {mode!r:.60} is not one of {', '.join(_LION_MODES)}.",
            where=source.here(),
            fix="mode='hard'",
        )

    def init(params):
        return ScaleByLionState(zero_count(), full_like(params, 0, mu_dtype))

    def update(updates, state, params=None):
        def one(g, m):
            x = m * b1 + g * (1 - b1)
            if mode == "hard":
                new = bnp.sign(x)
            else:
                new = bnp.tanh(x * smooth_beta) if mode == "smooth" else bnp.clip(x, -1, 1)
            return new.astype(g.dtype), _mean(m, g, b2).astype(m.dtype)

        new, mus = leafwise(one, 2, {"grads": updates, "state.mu": state.mu})
        return new, ScaleByLionState(next_count(state.count), mus)

    return GradientTransformation(init, update)


# -- second moments --------------------------------------------------------------------------------


def scale_by_rss(initial_accumulator_value: ArrayLike = 0.1, eps: ArrayLike = 1e-7) -> GradientTransformation:
    """Divide by the root of the sum of squares (Duchi et al., JMLR 12, 2011).

    Args:
      initial_accumulator_value: what the sums start with.
      eps: added under the root. Where a sum is 0 the update is.
    """

    def init(params):
        return ScaleByRssState(full_like(params, initial_accumulator_value))

    def update(updates, state, params=None):
        def one(g, s):
            x = g.astype(s.dtype)
            s = bnp.square(x) + s
            factor = bnp.where(s > 0, lax.rsqrt(s + eps), 0)
            return (x * factor).astype(g.dtype), s

        new, sums = leafwise(one, 2, {"grads": updates, "state.sum_of_squares": state.sum_of_squares})
        return new, ScaleByRssState(sums)

    return GradientTransformation(init, update)


def scale_by_rms(
    decay: ArrayLike = 0.9,
    eps: ArrayLike = 1e-8,
    initial_scale: ArrayLike = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Divide by the root of the mean square (Tieleman & Hinton, 2012).

    Args:
      decay: how much of the mean square survives a step.
      eps: added under the root, or, without ``eps_in_sqrt``, to it.
      initial_scale: what the mean squares start with.
      eps_in_sqrt: see ``eps``.
      bias_correction: divide the mean square by ``1 - decay**count``. The state then has a count.
    """
    return _scale_by_deviation(decay, eps, initial_scale, eps_in_sqrt, bias_correction, centred=False)


def scale_by_stddev(
    decay: ArrayLike = 0.9,
    eps: ArrayLike = 1e-8,
    initial_scale: ArrayLike = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """``scale_by_rms`` with the variance for the mean square (arXiv:1308.0850)."""
    return _scale_by_deviation(decay, eps, initial_scale, eps_in_sqrt, bias_correction, centred=True)


def _scale_by_deviation(decay, eps, initial_scale, eps_in_sqrt, corrected, centred) -> GradientTransformation:
    kinds: dict[tuple[bool, bool], type] = {
        (False, False): ScaleByRmsState,
        (False, True): ScaleByRmsWithCountState,
        (True, False): ScaleByRStdDevState,
        (True, True): ScaleByRStdDevWithCountState,
    }

    def state_of(count, mus, nus):
        parts = {"mu": mus} if centred else {}
        if corrected:
            parts["count"] = count
        return kinds[centred, bool(corrected)](nu=nus, **parts)

    def init(params):
        return state_of(zero_count(), full_like(params, 0), full_like(params, initial_scale))

    def update(updates, state, params=None):
        count = next_count(state.count) if corrected else None
        correction: Any = bias_correction(decay, steps_of(count, state.nu)) if corrected else None
        mus = state.mu if centred else state.nu

        def one(g, m, v):
            x = g.astype(v.dtype)
            nu = _mean(v, bnp.square(x), decay)
            mu = _mean(m, x, decay) if centred else m
            mean, square = mu, nu
            if corrected:
                mean, square = mu / correction.astype(nu.dtype), nu / correction.astype(nu.dtype)
            if centred:
                square = square - bnp.square(mean)
            factor = lax.rsqrt(square + eps) if eps_in_sqrt else 1 / (bnp.sqrt(square) + eps)
            return (x * factor).astype(g.dtype), mu, nu

        trees = {"grads": updates, "state.mu": mus, "state.nu": state.nu}
        new, mus, nus = leafwise(one, 3, trees)
        return new, state_of(count, mus, nus)

    return GradientTransformation(init, update)


def scale_by_adadelta(rho: ArrayLike = 0.9, eps: ArrayLike = 1e-6) -> GradientTransformation:
    """Scale by the RMS of past updates over that of gradients (arXiv:1212.5701).

    Args:
      rho: decay of the mean squares per step.
      eps: added under both roots.
    """

    def init(params):
        return ScaleByAdaDeltaState(full_like(params, 0), full_like(params, 0))

    def update(updates, state, params=None):
        def one(g, e_g, e_x):
            x = g.astype(e_g.dtype)
            e_g = _mean(e_g, bnp.square(x), rho)
            x = bnp.sqrt((e_x + eps) / (e_g + eps)) * x
            return x.astype(g.dtype), e_g, _mean(e_x, bnp.square(x), rho)

        new, e_g, e_x = leafwise(one, 3, {"grads": updates, "state.e_g": state.e_g, "state.e_x": state.e_x})
        return new, ScaleByAdaDeltaState(e_g, e_x)

    return GradientTransformation(init, update)


# -- both ------------------------------------------------------------------------------------------


def scale_by_amsgrad(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> GradientTransformation:
    """``scale_by_adam`` with the largest mean square so far (Reddi et al., ICLR 2018).

    Args:
      b1, b2, eps, eps_root, mu_dtype: see ``scale_by_adam``.
      bias_correction_mu, bias_correction_nu: whether mean and mean square are corrected for their start at 0.
    """

    def init(params):
        zeros = full_like(params, 0)
        return ScaleByAmsgradState(zero_count(), full_like(params, 0, mu_dtype), zeros, zeros)

    def update(updates, state, params=None):
        count = next_count(state.count)
        steps = steps_of(count, state.nu)
        c1 = bias_correction(b1, steps) if bias_correction_mu else 1
        c2 = bias_correction(b2, steps) if bias_correction_nu else 1

        def one(g, m, v, top):
            x = g.astype(v.dtype)
            mu, nu = _mean(m.astype(v.dtype), x, b1), _mean(v, bnp.square(x), b2)
            top = bnp.maximum(top, nu / _as(c2, v.dtype))
            new = mu / _as(c1, v.dtype) / (bnp.sqrt(top + eps_root) + eps)
            return new.astype(g.dtype), mu.astype(m.dtype), nu, top

        trees = {"grads": updates, "state.mu": state.mu, "state.nu": state.nu, "state.nu_max": state.nu_max}
        new, mus, nus, tops = leafwise(one, 4, trees)
        return new, ScaleByAmsgradState(count, mus, nus, tops)

    return GradientTransformation(init, update)


def scale_by_adamax(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-8
) -> GradientTransformation:
    """Divide the mean by a decaying maximum (Kingma & Ba, arXiv:1412.6980, section 7).

    Args:
      b1, b2: decay rates of the mean and of the maximum.
      eps: added to the size of each gradient.
    """

    def rule(steps):
        c1 = bias_correction(b1, steps)

        def one(x, m, v):
            mu, nu = _mean(m, x, b1), bnp.maximum(bnp.abs(x) + eps, v * b2)
            return mu / c1.astype(v.dtype) / nu, mu, nu

        return one

    return _adam_like(ScaleByAdamState, rule)


def scale_by_radam(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    threshold: ArrayLike = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """``scale_by_adam`` with a rectified variance of first steps (arXiv:1908.03265).

    Args:
      b1, b2, eps, eps_root, nesterov: see ``scale_by_adam``.
      threshold: below this length of the moving average of squares, the mean itself is the update.
    """
    ro_inf = 2 / (1 - real_number(b2, "scale_by_radam: b2")) - 1

    def rule(steps):
        c2 = bias_correction(b2, steps)
        ro = ro_inf - steps * (1 - c2) / c2 * 2
        # below the threshold, from 4 on, the root would be that of a negative number
        safe = bnp.where(ro >= threshold, ro, ro_inf)
        r = bnp.sqrt((safe - 4) * (safe - 2) * ro_inf / ((ro_inf - 4) * (ro_inf - 2) * safe))

        def one(x, m, v):
            mu, nu = _mean(m, x, b1), _mean(v, bnp.square(x), b2)
            mean = corrected_mean(mu, x, b1, steps, nesterov)
            rectified = mean * r.astype(v.dtype) / (bnp.sqrt(nu / c2.astype(v.dtype) + eps_root) + eps)
            return bnp.where(ro >= threshold, rectified, mean), mu, nu

        return one

    return _adam_like(ScaleByAdamState, rule)


def scale_by_belief(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-16,
    eps_root: ArrayLike = 1e-16,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Divide by the RMS distance of gradients from their mean (arXiv:2010.07468).

    Args:
      b1, b2, eps, nesterov: see ``scale_by_adam``.
      eps_root: added to the mean square of the distances in every step.
    """

    def rule(steps):
        c2 = bias_correction(b2, steps)

        def one(x, m, v):
            mu = _mean(m, x, b1)
            nu = _mean(v, bnp.square(x - mu), b2) + eps_root
            mean = corrected_mean(mu, x, b1, steps, nesterov)
            return mean / (bnp.sqrt(nu / c2.astype(v.dtype)) + eps), mu, nu

        return one

    return _adam_like(ScaleByBeliefState, rule)


def scale_by_yogi(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-3,
    eps_root: ArrayLike = 0.0,
    initial_accumulator_value: ArrayLike = 1e-6,
) -> GradientTransformation:
    """``scale_by_adam`` with bounded changes of the mean square (NeurIPS 2018).

    Args:
      b1, b2, eps, eps_root: see ``scale_by_adam``.
      initial_accumulator_value: what mean and mean square start with.
    """

    def rule(steps):
        c2 = bias_correction(b2, steps)

        def one(x, m, v):
            mu, square = _mean(m, x, b1), bnp.square(x)
            nu = v - bnp.sign(v - square) * square * (1 - b2)
            mean = corrected_mean(mu, x, b1, steps, False)
            return mean / (bnp.sqrt(nu / c2.astype(v.dtype) + eps_root) + eps), mu, nu

        return one

    return _adam_like(ScaleByAdamState, rule, initial_accumulator_value)


# -- parts -----------------------------------------------------------------------------------------


def _adam_like(kind: type, rule: Callable, initial: Any = 0) -> GradientTransformation:
    """A transformation whose state is ``kind(count, mu, nu)``, of ``initial`` moments.

    Args:
      rule: ``rule(steps) -> one``, and ``one(gradient, mu, nu) -> (update, mu, nu)`` for each leaf, in the dtype of nu.
    """

    def init(params):
        return kind(zero_count(), full_like(params, initial), full_like(params, initial))

    def update(updates, state, params=None):
        count = next_count(state.count)
        one = rule(steps_of(count, state.nu))

        def leaf(g, m, v):
            new, mu, nu = one(g.astype(v.dtype), m, v)
            return new.astype(g.dtype), mu, nu

        trees = {"grads": updates, "state.mu": state.mu, "state.nu": state.nu}
        new, mus, nus = leafwise(leaf, 3, trees)
        return new, type(state)(count, mus, nus)

    return GradientTransformation(init, update)


def _mean(mean: Any, x: Any, decay: Any) -> Any:
    return mean * decay + x * (1 - decay)


def _as(x: Any, dtype: Any) -> Any:
    x = number(x)
    return x if isinstance(x, (int, float)) else x.astype(dtype)
