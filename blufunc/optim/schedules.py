"""Schedules: functions from the number of steps taken to a learning rate, or to another number.

A face. A schedule takes a Python int or an integer array of rank 0, traced or not, and returns a number of rank 0;
all formulas are in float32. Names and values are those of optax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core import dtypes, source

Schedule = Callable[[Any], Any]


def constant_schedule(value: Any) -> Schedule:
    """``value``, always."""
    return lambda count: value


def polynomial_schedule(
    init_value: Any, end_value: Any, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From ``init_value`` to ``end_value`` along ``(1 - progress)**power``.

    The transition starts after ``transition_begin`` steps and takes ``transition_steps``; if it takes none, the value
    stays ``init_value``.
    """
    _not_negative(transition_steps=transition_steps, transition_begin=transition_begin)
    if transition_steps == 0:
        return constant_schedule(init_value)

    def schedule(count):
        rest = 1 - _progress(count, transition_begin, transition_steps)
        return (rest if power == 1 else rest**power) * (init_value - end_value) + end_value

    return schedule


def linear_schedule(
    init_value: Any, end_value: Any, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From ``init_value`` to ``end_value`` along a line: see ``polynomial_schedule``."""
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def cosine_decay_schedule(
    init_value: Any, decay_steps: int, alpha: Any = 0.0, exponent: float = 1.0
) -> Schedule:
    """From ``init_value`` to ``alpha * init_value`` along half a period of a cosine (arXiv:1608.03983).

    Args:
      init_value: the first value.
      decay_steps: how many steps the way down takes.
      alpha: the last value, as a fraction of the first.
      exponent: power of the cosine, which is first scaled to go from 1 to 0.
    Raises:
      ValueRangeError: ``decay_steps`` is not positive.
    """
    if decay_steps <= 0:
        raise errors.ValueRangeError(
            f"cosine_decay_schedule needs a positive decay_steps, not {decay_steps}.", where=source.here()
        )

    def schedule(count):
        fraction = bnp.cos(_progress(count, 0, decay_steps) * math.pi) * 0.5 + 0.5
        fraction = fraction if exponent == 1 else fraction**exponent
        return (fraction * (1 - alpha) + alpha) * init_value

    return schedule


def exponential_decay(
    init_value: Any,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Any = None,
) -> Schedule:
    """``init_value * decay_rate**(count / transition_steps)``.

    Args:
      init_value: the first value.
      transition_steps: how many steps multiply the value by ``decay_rate``; 0 for a constant schedule.
      decay_rate: the factor; 0 for a constant schedule.
      transition_begin: steps at ``init_value`` before the decay starts.
      staircase: decay at whole multiples of ``transition_steps`` only.
      end_value: where to stop: a lower bound for rates below 1, else an upper one.
    """
    _not_negative(transition_steps=transition_steps, transition_begin=transition_begin, decay_rate=decay_rate)
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
    init_value: Any, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """``init_value``, multiplied by ``boundaries_and_scales[b]`` from step b on, for each b.

    Raises:
      ValueRangeError: a factor is negative.
    """
    steps = sorted((boundaries_and_scales or {}).items())
    for b, factor in steps:
        _not_negative(**{f"the factor from step {b} on": factor})

    def schedule(count):
        value = init_value
        for b, factor in steps:
            value = bnp.where(bnp.asarray(count) < b, 1.0, factor) * value
        return value

    return schedule


def warmup_constant_schedule(init_value: Any, peak_value: Any, warmup_steps: int) -> Schedule:
    """From ``init_value`` to ``peak_value`` along a line, and constant from there."""
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: Any,
    peak_value: Any,
    warmup_steps: int,
    decay_steps: int,
    end_value: Any = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """From ``init_value`` to ``peak_value`` along a line, and down to ``end_value`` along half a cosine.

    Args:
      init_value, peak_value, end_value: the values at the start, after the warm-up and at the end.
      warmup_steps: the steps of the warm-up.
      decay_steps: the steps of the whole, warm-up included.
      exponent: see ``cosine_decay_schedule``.
    Raises:
      ValueRangeError: ``decay_steps`` does not exceed ``warmup_steps``.
    """
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


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Several schedules, one after the other; each counts its steps from its own start.

    Args:
      schedules: at least one.
      boundaries: the steps at which the second and later ones start, ascending.
    Raises:
      ValueRangeError: there is not one boundary fewer than schedules.
    """
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
    """How much of a transition is done, from 0 to 1."""
    count = _float(count)
    return bnp.clip((count - begin if begin else count) / steps, 0, 1)


def _not_negative(**values: Any) -> None:
    for name, value in values.items():
        if value < 0:
            raise errors.ValueRangeError(f"{name} is {value}, and must not be negative.", where=source.here())
