"""Wrappers: masks, every k-th step, finite gradients only, hyperparameters.

A face, above ``optim.base``. The wrapped transformation may be any pair ``(init, update)``, from here or elsewhere.
Names and states are those of optax.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import sequence
from blufunc.core.ir.trace import Array
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    check_transformation,
    next_count,
    real_number,
    required,
    stateless,
    with_extra_args_support,
    zero_count,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


class MaskedState(NamedTuple):
    """``inner_state``: the wrapped transformation's."""

    inner_state: Any


class MaskedNode(NamedTuple):
    """Stands in a pytree where a parameter is masked out: a node without leaves."""


class PartitionState(NamedTuple):
    """``inner_states``: by label, the ``MaskedState`` of each transformation."""

    inner_states: Mapping[Hashable, Any]


class ApplyIfFiniteState(NamedTuple):
    """``notfinite_count``, ``total_notfinite``: counts of non-finite gradients.

    The first counts successive steps. ``last_finite``: True if the last gradients were finite.
    """

    notfinite_count: Any
    last_finite: Any
    total_notfinite: Any
    inner_state: Any


class MultiStepsState(NamedTuple):
    """``mini_step``: gradients since the last update; ``gradient_step``: updates.

    ``acc_grads``: the mean, or sum, of the gradients since the last update.
    """

    mini_step: Any
    gradient_step: Any
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any = ()


class ConditionallyTransformState(NamedTuple):
    """``inner_state``: the wrapped transformation's; ``step``: the steps taken, int32."""

    inner_state: Any
    step: Any


class ConditionallyMaskState(NamedTuple):
    """``step``: the steps taken, int32; ``inner_state``: the wrapped transformation's."""

    step: Any
    inner_state: Any


class InjectHyperparamsState(NamedTuple):
    """``count``: the steps taken, int32; ``hyperparams``: current values by name."""

    count: Any
    hyperparams: dict[str, Any]
    inner_state: Any


class LookaheadState(NamedTuple):
    """``fast_state``: of the fast optimiser; ``steps_since_sync``: int32."""

    fast_state: Any
    steps_since_sync: Any


class LookaheadParams(NamedTuple):
    """``fast``: the parameters to take gradients at; ``slow``: those to use."""

    fast: PyTree
    slow: PyTree

    @classmethod
    def init_synced(cls, params: PyTree) -> LookaheadParams:
        """Both from the same parameters."""
        return cls(fast=params, slow=params)


class ZeroNansState(NamedTuple):
    """``found_nan``: for each parameter, whether the last gradient had a NaN."""

    found_nan: PyTree


# -- part of the parameters ------------------------------------------------------------------------


def masked(inner: Any, mask: PyTree) -> GradientTransformation:
    """Apply ``inner`` to some parameters, and pass the other updates through.

    Args:
      inner: a transformation; it sees a ``MaskedNode`` instead of the others.
      mask: a pytree of bools that is a prefix of the parameters, or a function from the parameters to one.
    """
    check_transformation(inner, "the first argument of masked")
    inner = with_extra_args_support(inner)

    def mask_of(params):
        return mask(params) if callable(mask) else mask

    def cut(flags, params):
        return tree.map(lambda m, p: p if m else MaskedNode(), flags, params)

    def init(params):
        return MaskedState(inner.init(cut(mask_of(params), params)))

    def update(updates, state, params=None, **extra):
        flags = mask_of(updates)
        kept = None if params is None else cut(flags, params)
        new, inner_state = inner.update(cut(flags, updates), state.inner_state, kept, **extra)
        return tree.map(lambda m, n, u: n if m else u, flags, new, updates), MaskedState(inner_state)

    return GradientTransformation(init, update)


def partition(transforms: Mapping[Hashable, Any], param_labels: PyTree) -> GradientTransformation:
    """Apply a different transformation to each group of parameters.

    Args:
      transforms: transformations by label.
      param_labels: a pytree of labels that is a prefix of the parameters, or a function from the parameters to one.
    Raises:
      ArgumentError: ``init`` met a label that has no transformation.
    """
    if not isinstance(transforms, Mapping):
        raise errors.ArgumentError(
            f"partition takes a dict of transformations by label, not a {type(transforms).__name__}.",
            where=source.here(),
            fix='partition({"fast": sgd(0.1), "slow": sgd(0.01)}, labels)',
        )
    for label, t in transforms.items():
        check_transformation(t, f"partition: the transformation of {label!r}")

    def labels_of(params):
        return param_labels(params) if callable(param_labels) else param_labels

    def groups(labels):
        for label, t in transforms.items():
            yield label, masked(t, tree.map(lambda x, label=label: x == label, labels))

    def init(params):
        labels = labels_of(params)
        unknown = sorted({str(x) for x in tree.leaves(labels) if x not in transforms})
        if unknown:
            raise errors.ArgumentError(
                f"partition: no transformation for the label {', '.join(unknown)}.",
                where=source.here(),
                why=f"there are transformations for {', '.join(map(str, transforms))}.",
                fix="set_to_zero() leaves parameters as they are",
            )
        return PartitionState({label: t.init(params) for label, t in groups(labels)})

    def update(updates, state, params=None, **extra):
        states = {}
        for label, t in groups(labels_of(updates)):
            updates, states[label] = t.update(updates, state.inner_states[label], params, **extra)
        return updates, PartitionState(states)

    return GradientTransformation(init, update)


multi_transform = partition


def set_to_zero() -> GradientTransformation:
    """Replace updates by zeros: parameters stay as they are."""
    return stateless(lambda updates, params: _zeros(updates))


def freeze(mask: PyTree) -> GradientTransformation:
    """Zero updates for the parameters where ``mask`` (see ``masked``) is True."""
    return masked(set_to_zero(), mask)


# -- some of the steps -----------------------------------------------------------------------------


class MultiSteps:
    """Gradient accumulation: ``opt`` acts on the mean of k successive gradients.

    The steps between return zeros.

    Args:
      opt: a transformation.
      every_k_schedule: k, or a function from the updates so far to it.
      use_grad_mean: use the mean of the gradients; else their sum.
      should_skip_update_fn: from (gradients, updates so far, parameters) to whether to leave these gradients out, a
        boolean array of rank 0, and a pytree to keep in the state: ``skip_not_finite``, or one's own.
      accumulator_dtype: the dtype of the mean.
    """

    def __init__(
        self,
        opt: Any,
        every_k_schedule: int | Callable[[Any], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable | None = None,
        accumulator_dtype: Any = dtypes.float32,
    ):
        check_transformation(opt, "the first argument of MultiSteps")
        if not callable(every_k_schedule) and not (
            isinstance(every_k_schedule, int) and every_k_schedule > 0
        ):
            raise errors.ValueRangeError(
                f"MultiSteps takes a positive number of steps, not {every_k_schedule!r:.60}.",
                where=source.here(),
                fix="every_k_schedule=4",
            )
        self.inner_opt = with_extra_args_support(opt)
        self._every = every_k_schedule if callable(every_k_schedule) else lambda step: every_k_schedule
        self._use_mean = use_grad_mean
        self._skips = should_skip_update_fn
        self._dtype = dtypes.as_dtype(accumulator_dtype)

    def init(self, params: PyTree) -> MultiStepsState:
        """The state before the first step."""
        means = tree.map(lambda p: bnp.zeros(bnp.shape(p), self._dtype), params)
        skip_state = () if self._skips is None else self._skips(_zeros(params), zero_count(), params)[1]
        return MultiStepsState(zero_count(), zero_count(), self.inner_opt.init(params), means, skip_state)

    def update(
        self, updates: PyTree, state: MultiStepsState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, MultiStepsState]:
        """Accumulate gradients; update by ``opt`` in every k-th step, else by zeros."""
        if self._skips is None:
            return self._step(updates, state, params, extra)
        skips, skip_state = self._skips(updates, state.gradient_step, params)
        return lax.cond(
            skips,
            lambda: (_zeros(updates), state._replace(skip_state=skip_state)),
            lambda: self._step(updates, state._replace(skip_state=skip_state), params, extra),
        )

    def _step(self, updates, state, params, extra):
        def taken_in(g, mean):
            g = bnp.asarray(g)
            return mean + (g - mean) / (state.mini_step + 1) if self._use_mean else mean + g

        means = tree.map(lambda g, m: taken_in(g, m).astype(m.dtype), updates, state.acc_grads)
        k = self._every(state.gradient_step)

        def emit():
            ready = tree.map(lambda m, g: m.astype(bnp.asarray(g).dtype), means, updates)
            new, inner = self.inner_opt.update(ready, state.inner_opt_state, params, **extra)
            return new, zero_count(), next_count(state.gradient_step), inner, _zeros(means)

        def wait():
            return _zeros(updates), state.mini_step + 1, state.gradient_step, state.inner_opt_state, means

        new, mini, step, inner, means = lax.cond(state.mini_step + 1 >= k, emit, wait)
        return new, MultiStepsState(mini, step, inner, means, state.skip_state)

    def has_updated(self, state: MultiStepsState) -> Any:
        """True if ``opt`` ran in the last step."""
        return (state.mini_step == 0) & (state.gradient_step > 0)

    def gradient_transformation(self) -> GradientTransformation:
        """The pair of functions."""
        return GradientTransformation(self.init, self.update)


def accumulate(
    opt: Any, every: int | Callable[[Any], Any], use_grad_mean: bool = True
) -> GradientTransformation:
    """``opt`` on the mean or sum of ``every`` successive gradients: ``MultiSteps``."""
    return MultiSteps(opt, every, use_grad_mean).gradient_transformation()


def skip_not_finite(updates: PyTree, gradient_step: Any, params: PyTree) -> tuple[Array, dict[str, Any]]:
    """For ``MultiSteps``: leave out gradients that hold an infinity or a NaN."""
    counts = [bnp.sum(~bnp.isfinite(u), dtype=dtypes.int32) for u in tree.leaves(updates)]
    count = sum(counts, zero_count())
    return count > 0, {"should_skip": count > 0, "num_not_finite": count}


def skip_large_updates(
    updates: PyTree, gradient_step: Any, params: PyTree, max_squared_norm: float
) -> tuple[Array, dict[str, Any]]:
    """For ``MultiSteps``: skip gradients of squared norm ``max_squared_norm`` or more."""
    max_squared_norm = real_number(max_squared_norm, "skip_large_updates: the limit")
    square = sum([bnp.sum(bnp.square(u)) for u in tree.leaves(updates)], bnp.zeros(()))
    skips = ~(square < max_squared_norm)
    return skips, {"should_skip": skips, "norm_squared": square}


def apply_if_finite(inner: Any, max_consecutive_errors: int) -> GradientTransformation:
    """Skip steps with non-finite gradients: zero updates, unchanged state.

    Args:
      inner: a transformation.
      max_consecutive_errors: the number of skipped steps in a row after which the next one is taken anyway.
    """
    check_transformation(inner, "the first argument of apply_if_finite")
    inner = with_extra_args_support(inner)

    def init(params):
        return ApplyIfFiniteState(zero_count(), bnp.asarray(True), zero_count(), inner.init(params))

    def update(updates, state, params=None, **extra):
        finite = functools.reduce(
            bnp.logical_and, [bnp.all(bnp.isfinite(u)) for u in tree.leaves(updates)], bnp.asarray(True)
        )
        count = bnp.where(finite, 0, next_count(state.notfinite_count))
        new, inner_state = lax.cond(
            finite | (count > max_consecutive_errors),
            lambda: inner.update(updates, state.inner_state, params, **extra),
            lambda: (_zeros(updates), state.inner_state),
        )
        total = bnp.where(finite, state.total_notfinite, next_count(state.total_notfinite))
        return new, ApplyIfFiniteState(count, finite, total, inner_state)

    return GradientTransformation(init, update)


def conditionally_transform(inner: Any, should_transform_fn: Callable[[Any], Any]) -> GradientTransformation:
    """Apply ``inner`` where ``should_transform_fn(step)`` holds; else keep updates."""
    return _conditional(inner, should_transform_fn, lambda updates: updates, ConditionallyTransformState)


def conditionally_mask(inner: Any, should_transform_fn: Callable[[Any], Any]) -> GradientTransformation:
    """Apply ``inner`` where ``should_transform_fn(step)`` holds; else return zeros."""
    return _conditional(inner, should_transform_fn, _zeros, ConditionallyMaskState)


def _conditional(inner, holds, otherwise, kind) -> GradientTransformation:
    check_transformation(inner, "the first argument of a conditional transformation")
    inner = with_extra_args_support(inner)

    def init(params):
        return kind(inner_state=inner.init(params), step=zero_count())

    def update(updates, state, params=None, **extra):
        new, inner_state = lax.cond(
            holds(state.step),
            lambda: inner.update(updates, state.inner_state, params, **extra),
            lambda: (otherwise(updates), state.inner_state),
        )
        return new, kind(inner_state=inner_state, step=next_count(state.step))

    return GradientTransformation(init, update)


def lookahead(
    fast_optimizer: Any, sync_period: int, slow_step_size: ArrayLike, reset_state: bool = False
) -> GradientTransformation:
    """Slow parameters that follow fast ones (arXiv:1907.08610).

    Both are given as ``LookaheadParams``.

    Args:
      fast_optimizer: a transformation, for the fast parameters.
      sync_period: number of steps until the slow ones move towards the fast ones, which then start from there.
      slow_step_size: how much of the way they move.
      reset_state: start the fast optimiser anew each time.
    """
    check_transformation(fast_optimizer, "the first argument of lookahead")
    if sync_period < 1:
        raise errors.ValueRangeError(
            f"lookahead: sync_period={sync_period} is less than 1.", where=source.here(), fix="sync_period=5"
        )

    def init(params):
        return LookaheadState(fast_optimizer.init(getattr(params, "fast", params)), zero_count())

    def update(updates, state, params=None):
        if not isinstance(required(params, "lookahead"), LookaheadParams):
            raise errors.ArgumentError(
                f"lookahead updates LookaheadParams, not a {type(params).__name__}.",
                where=source.here(),
                fix="params = optim.LookaheadParams.init_synced(params)",
            )
        new, fast_state = fast_optimizer.update(updates, state.fast_state, params.fast)
        syncs = state.steps_since_sync == sync_period - 1
        way = tree.map(lambda f, u, s: f + u - s, params.fast, new, params.slow)
        slow = tree.map(lambda d: bnp.where(syncs, d * slow_step_size, 0), way)
        fast = tree.map(lambda u, d: bnp.where(syncs, u - d * (1 - slow_step_size), u), new, way)
        if reset_state:
            start = fast_optimizer.init(params.fast)
            fast_state = tree.map(lambda x, y: bnp.where(syncs, y, x), fast_state, start)
        return LookaheadParams(fast, slow), LookaheadState(
            fast_state, (state.steps_since_sync + 1) % sync_period
        )

    return GradientTransformation(init, update)


# -- hyperparameters in the state ------------------------------------------------------------------


def inject_hyperparams(
    inner_factory: Callable[..., Any],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: DTypeLike | None = None,
) -> Callable[..., GradientTransformation]:
    """An optimiser with its hyperparameters in its state, where steps can change them.

        opt = optim.inject_hyperparams(optim.adam)(learning_rate=1e-3)
        state = opt.init(params)
        state.hyperparams["learning_rate"] = bnp.asarray(1e-4)

    Args:
      inner_factory: the factory of the optimiser.
      static_args: names of arguments to leave alone.
      hyperparam_dtype: the dtype of the hyperparameters; default float32.
    Returns:
      a function with the arguments of ``inner_factory``; schedules among them give their value in each step.
    """
    if not callable(inner_factory):
        raise errors.ArgumentError(
            f"inject_hyperparams takes what makes an optimiser, not a {type(inner_factory).__name__}.",
            where=source.here(),
            fix="inject_hyperparams(adam)(learning_rate=1e-3)",
        )
    if not isinstance(static_args, str):
        static_args = sequence(static_args, "inject_hyperparams", "static_args", "names")
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(inner_factory)
    if not static <= set(signature.parameters):
        raise errors.ArgumentError(
            f"inject_hyperparams: {', '.join(sorted(map(str, static - set(signature.parameters))))} is no argument of "
            f"{getattr(inner_factory, '__name__', inner_factory)}.",
            where=source.here(),
            fix=f"its arguments are {', '.join(signature.parameters)}",
        )
    dtype = dtypes.float32 if hyperparam_dtype is None else dtypes.as_dtype(hyperparam_dtype)

    def number(x):
        x = bnp.asarray(x)
        return x.astype(dtype) if dtypes.is_floating(x.dtype) else x

    @functools.wraps(inner_factory)
    def make(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        schedules, numbers, others = {}, {}, {}
        for name, value in bound.arguments.items():
            if name in static or isinstance(value, bool):
                others[name] = value
            elif callable(value):
                schedules[name] = value
            elif isinstance(value, (int, float, Array)) or hasattr(value, "__array__"):
                numbers[name] = value
            else:
                others[name] = value

        def scheduled(count):
            return {name: number(f(count)) for name, f in schedules.items()}

        def init(params):
            values = {name: number(x) for name, x in numbers.items()} | scheduled(zero_count())
            return InjectHyperparamsState(
                zero_count(), values, inner_factory(**others, **values).init(params)
            )

        def update(updates, state, params=None):
            values = dict(state.hyperparams) | scheduled(state.count)
            new, inner_state = inner_factory(**others, **values).update(updates, state.inner_state, params)
            return new, InjectHyperparamsState(next_count(state.count), values, inner_state)

        return GradientTransformation(init, update)

    return make


# -- constraints -----------------------------------------------------------------------------------


def zero_nans() -> GradientTransformation:
    """Replace NaNs by 0; the state says where there were any."""

    def init(params):
        return ZeroNansState(tree.map(lambda p: bnp.asarray(False), params))

    def update(updates, state, params=None):
        found = tree.map(lambda u: bnp.any(bnp.isnan(u)), updates)
        return tree.map(lambda u: bnp.where(bnp.isnan(u), 0, u), updates), ZeroNansState(found)

    return GradientTransformation(init, update)


def keep_params_nonnegative() -> GradientTransformation:
    """Limit updates so that no parameter becomes negative."""

    def update(updates, params):
        params = required(params, "keep_params_nonnegative")
        return tree.map(lambda p, u: bnp.where(p + u < 0, -p, u), params, updates)

    return stateless(update)


def _zeros(x: PyTree) -> PyTree:
    return tree.map(bnp.zeros_like, x)
