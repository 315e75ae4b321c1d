"""Schedules: functions of the step count, such as learning rates.

A face. A schedule takes a Python int or an integer scalar array, traced or not, and returns a scalar;
all formulas are in float32. Names and values are those of optax.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import sequence, static_number
from blufunc.optim.base import real_number

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

Schedule = Callable[[Any], Any]


def constant_schedule(value: ArrayLike) -> Schedule:
    """``value``, always."""
    return lambda count: value


def polynomial_schedule(
    init_value: ArrayLike,
    end_value: ArrayLike,
    power: float,
    transition_steps: int,
    transition_begin: int = 0,
) -> Schedule:
    """From ``init_value`` to ``end_value`` along ``(1 - progress)**power``.

    The transition starts after ``transition_begin`` steps and takes ``transition_steps``; if it takes none, the value
    stays ``init_value``.
    """
    _not_negative(transition_steps=transition_steps, transition_begin=transition_begin)
    _numbers(init_value=init_value, end_value=end_value, power=power)
    if transition_steps == 0:
        return constant_schedule(init_value)

    def schedule(count):
        rest = 1 - _progress(count, transition_begin, transition_steps)
        return (rest if power == 1 else rest**power) * (init_value - end_value) + end_value  # type: ignore[operator]

    return schedule


def linear_schedule(
    init_value: ArrayLike, end_value: ArrayLike, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """Linear from ``init_value`` to ``end_value``: see ``polynomial_schedule``."""
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def cosine_decay_schedule(
    init_value: ArrayLike, decay_steps: int, alpha: ArrayLike = 0.0, exponent: float = 1.0
) -> Schedule:
    """Half a cosine from ``init_value`` to ``alpha * init_value`` (arXiv:1608.03983).

    Args:
      init_value: the first value.
      decay_steps: the number of steps of the decay.
      alpha: the last value, as a fraction of the first.
      exponent: power of the cosine, which is first scaled to go from 1 to 0.
    Raises:
      ValueRangeError: ``decay_steps`` is not positive.
    """
    _positive("cosine_decay_schedule", decay_steps=decay_steps)
    _numbers(init_value=init_value, alpha=alpha, exponent=exponent)

    def schedule(count):
        fraction = bnp.cos(_progress(count, 0, decay_steps) * math.pi) * 0.5 + 0.5
        fraction = fraction if exponent == 1 else fraction**exponent
        return (fraction * (1 - alpha) + alpha) * init_value

    return schedule


def exponential_decay(
    init_value: ArrayLike,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: ArrayLike | None = None,
) -> Schedule:
    """``init_value * decay_rate**(count / transition_steps)``.

    Args:
      init_value: the first value.
      transition_steps: the number of steps per factor ``decay_rate``; 0 for a constant schedule.
      decay_rate: the factor; 0 for a constant schedule.
      transition_begin: steps at ``init_value`` before the decay starts.
      staircase: decay at whole multiples of ``transition_steps`` only.
      end_value: where to stop: a lower bound for rates below 1, else an upper one.
    """
    _not_negative(transition_steps=transition_steps, transition_begin=transition_begin, decay_rate=decay_rate)
    _numbers(init_value=init_value, end_value=0 if end_value is None else end_value)
    if transition_steps == 0 or decay_rate == 0:
        return constant_schedule(init_value)

    def schedule(count):
        periods = bnp.maximum(_float(count) - transition_begin, 0) / transition_steps
        if staircase:
            periods = bnp.floor(periods)
        value = bnp.exp(periods * math.log(decay_rate)) * init_value
        if end_value is None:
            return value
        return bnp.maximum(value, end_value) if decay_rate < 1 else bnp.minimum(value, end_value)

    return schedule


def piecewise_constant_schedule(
    init_value: ArrayLike, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """``init_value`` times ``boundaries_and_scales[b]`` from step b on, for each b.

    Raises:
      ValueRangeError: a factor is negative.
    """
    steps = _factors(init_value, boundaries_and_scales)

    def schedule(count):
        value = init_value
        for b, factor in steps:
            value = bnp.where(bnp.asarray(count) < b, 1.0, factor) * value
        return value

    return schedule


def warmup_constant_schedule(init_value: ArrayLike, peak_value: ArrayLike, warmup_steps: int) -> Schedule:
    """Linear from ``init_value`` to ``peak_value``, then constant."""
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: ArrayLike,
    peak_value: ArrayLike,
    warmup_steps: int,
    decay_steps: int,
    end_value: ArrayLike = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """Linear warm-up to ``peak_value``, then half a cosine down to ``end_value``.

    Args:
      init_value, peak_value, end_value: the values at the start, after the warm-up and at the end.
      warmup_steps: the steps of the warm-up.
      decay_steps: the steps of the whole, warm-up included.
      exponent: see ``cosine_decay_schedule``.
    Raises:
      ValueRangeError: ``decay_steps`` does not exceed ``warmup_steps``.
    """
    for what, n in (("warmup_steps", warmup_steps), ("decay_steps", decay_steps)):
        static_number(n, "warmup_cosine_decay_schedule", what)
    _numbers(init_value=init_value, peak_value=peak_value, end_value=end_value)
    if decay_steps <= warmup_steps:
        raise errors.ValueRangeError(
            f"warmup_cosine_decay_schedule: decay_steps={decay_steps} must exceed warmup_steps={warmup_steps}.",
            where=source.here(),
            why="decay_steps is the length of the whole schedule, warm-up included.",
        )
    alpha = 0.0 if peak_value == 0 else end_value / peak_value
    rise = linear_schedule(init_value, peak_value, warmup_steps)
    fall = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([rise, fall], [warmup_steps])


def warmup_exponential_decay_schedule(
    init_value: ArrayLike,
    peak_value: ArrayLike,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: ArrayLike | None = None,
) -> Schedule:
    """A line from ``init_value`` to ``peak_value``, then ``exponential_decay``."""
    rise = linear_schedule(init_value, peak_value, warmup_steps)
    fall = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return join_schedules([rise, fall], [warmup_steps])


def sgdr_schedule(cosine_kwargs: Sequence[Mapping[str, Any]]) -> Schedule:
    """Several ``warmup_cosine_decay_schedule``: warm restarts (arXiv:1608.03983).

    Args:
      cosine_kwargs: the arguments of each, by name.
    """
    cosine_kwargs = sequence(cosine_kwargs, "sgdr_schedule", "cosine_kwargs", "dicts")
    if not cosine_kwargs or not all(isinstance(k, Mapping) and "decay_steps" in k for k in cosine_kwargs):
        raise errors.ArgumentError(
            "sgdr_schedule takes one or more dicts of the arguments of warmup_cosine_decay_schedule.",
            where=source.here(),
            fix="[{'init_value': 0, 'peak_value': 1, 'warmup_steps': 10, 'decay_steps': 100}]",
        )
    parts = [warmup_cosine_decay_schedule(**kwargs) for kwargs in cosine_kwargs]
    ends = itertools.accumulate([kwargs["decay_steps"] for kwargs in cosine_kwargs])
    return join_schedules(parts, list(ends)[:-1])


_INTERPOLATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda start, end, done: (end - start) * done + start,
    "cosine": lambda start, end, done: (bnp.cos(done * math.pi) + 1) * ((start - end) / 2) + end,
}


def piecewise_interpolate_schedule(
    interpolate_type: str, init_value: ArrayLike, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """Interpolation from ``init_value`` through values at given steps; then constant.

    Args:
      interpolate_type: ``"linear"`` or ``"cosine"``.
      init_value: the value at step 0.
      boundaries_and_scales: for each step, by what the value there differs, as a factor, from that at the step before.
    Raises:
      ValueRangeError: an unknown type, or a negative factor.
    """
    if not isinstance(interpolate_type, str) or interpolate_type not in _INTERPOLATIONS:
        raise errors.ValueRangeError(
            f"piecewise_interpolate_schedule: {interpolate_type!r:.60} is not a way to interpolate.",
            where=source.here(),
            fix="use 'linear' or 'cosine'",
        )
    interpolated = _INTERPOLATIONS[interpolate_type]
    steps = _factors(init_value, boundaries_and_scales)

    def schedule(count):
        count = _float(count)
        begin, start, value = 0, init_value, init_value * bnp.ones((), dtypes.float32)
        for b, factor in steps:
            end = start * factor
            piece = interpolated(start, end, (count - begin) / max(b - begin, 1))
            value = bnp.where(count >= b, end, bnp.where(count >= begin, piece, value))
            begin, start = b, end
        return value

    return schedule


def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: ArrayLike,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """One cycle: linear up, down, and further down (Smith & Topin, arXiv:1708.07120).

    Args:
      transition_steps: the steps of the cycle.
      peak_value: the largest value.
      pct_start, pct_final: the fractions of the steps at which the peak is reached, and the first value again.
      div_factor: the peak over the first value.
      final_div_factor: the first value over the last.
    """
    _numbers(peak_value=peak_value)
    _positive(
        "linear_onecycle_schedule", transition_steps=transition_steps, pct_start=pct_start, pct_final=pct_final,
        div_factor=div_factor, final_div_factor=final_div_factor,
    )  # fmt: skip
    return piecewise_interpolate_schedule(
        "linear",
        peak_value / div_factor,
        {
            int(pct_start * transition_steps): div_factor,
            int(pct_final * transition_steps): 1 / div_factor,
            transition_steps: 1 / final_div_factor,
        },
    )


def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: ArrayLike,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """``linear_onecycle_schedule`` along halves of a cosine, and down in one go."""
    _numbers(peak_value=peak_value)
    _positive(
        "cosine_onecycle_schedule", transition_steps=transition_steps, pct_start=pct_start, div_factor=div_factor,
        final_div_factor=final_div_factor,
    )  # fmt: skip
    return piecewise_interpolate_schedule(
        "cosine",
        peak_value / div_factor,
        {
            int(pct_start * transition_steps): div_factor,
            int(transition_steps): 1 / (div_factor * final_div_factor),
        },
    )


def _factors(init_value: Any, factors: Mapping[int, float] | None) -> list[tuple[int, float]]:
    """Factors by step, in order and checked."""
    _numbers(init_value=init_value)
    if factors is not None and not isinstance(factors, Mapping):
        raise errors.ArgumentError(
            f"a piecewise schedule takes a dict of factors by step, not a {type(factors).__name__}.",
            where=source.here(),
            fix="{1000: 0.1, 2000: 0.1}",
        )
    for b, factor in (factors or {}).items():
        static_number(b, "a piecewise schedule", "a step")
        _not_negative(**{f"the factor from step {b} on": factor})
    return sorted((factors or {}).items())


def _numbers(**values: Any) -> None:
    for name, value in values.items():
        real_number(value, f"a schedule: {name}")


def _positive(schedule: str, **values: Any) -> None:
    for name, value in values.items():
        if static_number(value, schedule, name) <= 0:
            raise errors.ValueRangeError(
                f"{schedule} needs a positive {name}, not {value}.",
                where=source.here(),
                fix=f"give a number above 0, such as {name}=1000, or leave out what is optional",
            )


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Several schedules in sequence; each counts its steps from its own start.

    Args:
      schedules: at least one.
      boundaries: the steps at which the second and later ones start, ascending.
    Raises:
      ValueRangeError: there is not one boundary fewer than schedules.
    """
    schedules = sequence(schedules, "join_schedules", "schedules", "schedules")
    boundaries = sequence(boundaries, "join_schedules", "boundaries", "steps")
    if not all(map(callable, schedules)):
        raise errors.ArgumentError(
            "join_schedules: one of the schedules is not a function.",
            where=source.here(),
            fix="constant_schedule(x) for a number",
        )
    if len(boundaries) != len(schedules) - 1:
        raise errors.ValueRangeError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} boundaries, not {len(boundaries)}.",
            where=source.here(),
        )

    def schedule(count):
        count = bnp.asarray(count)
        value = schedules[0](count)
        for start, later in zip(boundaries, schedules[1:], strict=True):
            value = bnp.where(count < start, value, later(count - start))
        return value

    return schedule


def _float(count: Any) -> Any:
    return bnp.asarray(count).astype(dtypes.float32)


def _progress(count: Any, begin: int, steps: int) -> Any:
    """Progress of a transition, from 0 to 1."""
    count = _float(count)
    return bnp.clip((count - begin if begin else count) / steps, 0, 1)


def _not_negative(**values: Any) -> None:
    for name, value in values.items():
        static_number(value, "a schedule", name)
        if value < 0:
            raise errors.ValueRangeError(
                f"{name} is {value}, and must not be negative.", where=source.here(), fix="give 0 or more"
            )
