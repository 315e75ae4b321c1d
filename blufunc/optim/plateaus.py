"""Learning rates that fall when the loss stops falling.

A face, above ``optim.base``. State and formulas are those of ``optax.contrib``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.optim.base import GradientTransformation, real_number, scaled, zero_count

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


class ReduceLROnPlateauState(NamedTuple):
    """``scale``: the factor of updates. ``best_value``: the least mean of losses.

    ``plateau_count``: means in a row that were no better; ``cooldown_count``: means for which that does not count;
    ``count``, ``avg_value``: the losses of the next mean, and their mean so far.
    """

    scale: Any
    best_value: Any
    plateau_count: Any
    cooldown_count: Any
    count: Any
    avg_value: Any


def reduce_on_plateau(
    factor: float = 0.1,
    patience: int = 10,
    rtol: float = 1e-4,
    atol: float = 0.0,
    cooldown: int = 0,
    accumulation_size: int = 1,
    min_scale: ArrayLike = 0.0,
) -> GradientTransformation:
    """Scale updates by a factor that falls when the loss has stopped falling.

    ``update`` takes the loss as ``value``, which ``chain`` passes on::

        optimizer = optim.chain(
            optim.adam(1e-3), optim.reduce_on_plateau(patience=5, accumulation_size=100)
        )
        updates, state = optimizer.update(grads, state, params, value=loss)

    Args:
      factor: what the scale is multiplied by, in (0, 1).
      patience: the number of means in a row that are no better.
      rtol, atol: a mean is better if it is less than ``(1 - rtol) * best - atol``.
      cooldown: the number of means after a change for which patience does not count.
      accumulation_size: the number of losses of a mean.
      min_scale: the least scale.
    Raises:
      ValueRangeError: a number is out of its range, or both tolerances are 0.
    """
    sizes = {"patience": patience, "cooldown": cooldown, "accumulation_size": accumulation_size}
    for what, n in (*sizes.items(), ("factor", factor), ("rtol", rtol), ("atol", atol)):
        if not isinstance(n, (int, float)):
            raise errors.ArgumentError(
                f"reduce_on_plateau: {what} is a number, not {n!r:.60}.", where=source.here(), fix=f"{what}=1"
            )
    if not 0 < factor < 1 or not 0 <= rtol <= 1 or atol < 0 or rtol == atol == 0 or accumulation_size < 1:
        raise errors.ValueRangeError(
            f"reduce_on_plateau: factor={factor}, rtol={rtol}, atol={atol}, accumulation_size={accumulation_size}.",
            where=source.here(),
            fix="0 < factor < 1, rtol or atol more than 0, and accumulation_size from 1 on",
        )
    min_scale = real_number(min_scale, "reduce_on_plateau: the least scale")

    def init(params):
        number = lambda x: bnp.asarray(x, dtype=dtypes.float32)
        return ReduceLROnPlateauState(
            number(1), number(bnp.inf), zero_count(), zero_count(), zero_count(), number(0)
        )

    def update(updates, state, params=None, *, value=None, **extra):
        if value is None:
            raise errors.ArgumentError(
                "reduce_on_plateau: update was called without the loss.",
                where=source.here(),
                fix="optimizer.update(grads, state, params, value=loss)",
            )
        count = state.count + 1
        mean = state.avg_value + (bnp.asarray(value).astype(dtypes.float32) - state.avg_value) / count
        full = count == accumulation_size
        better = mean < (1 - rtol) * state.best_value - atol
        waiting = bnp.where(better, 0, state.plateau_count + 1)
        cooling = state.cooldown_count > 0
        falls = ~cooling & (waiting == patience)
        lower = bnp.maximum(state.scale * factor, min_scale).astype(dtypes.float32)
        now = ReduceLROnPlateauState(
            bnp.where(falls, lower, bnp.where(cooling, state.scale, bnp.maximum(state.scale, min_scale))),
            bnp.where(better, mean, state.best_value),
            bnp.where(falls | cooling, 0, waiting),
            bnp.where(cooling, state.cooldown_count - 1, bnp.where(falls, cooldown, 0)),
            zero_count(),
            bnp.zeros_like(mean),
        )
        later = state._replace(count=count, avg_value=mean)
        new = ReduceLROnPlateauState(
            *[bnp.where(full, a, b).astype(b.dtype) for a, b in zip(now, later, strict=True)]
        )
        return scaled(updates, new.scale), new

    return GradientTransformation(init, update)
