"""Optimisers in the shape of optax: ``init(params) -> state``, ``update(grads, state, params) -> updates, state``.

A face, above ``blufunc.numpy``. States are pytrees of arrays, made of NamedTuples, so that they pass through ``jit``,
checkpoints and shardings like parameters do. Names and numbers are those of optax; a transformation written for
optax's interface, by whomever, goes into ``chain`` unchanged.
"""

from blufunc.optim.base import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    chain,
    identity,
)
from blufunc.optim.optimizers import adam, adamw, sgd
from blufunc.optim.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
)
from blufunc.optim.transforms import (
    ScaleByAdamState,
    ScaleByScheduleState,
    TraceState,
    add_decayed_weights,
    clip,
    clip_by_global_norm,
    global_norm,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
)

__all__ = [
    "EmptyState", "GradientTransformation", "apply_updates", "chain", "identity",
    "adam", "adamw", "sgd",
    "ScaleByAdamState", "ScaleByScheduleState", "TraceState", "add_decayed_weights", "clip", "clip_by_global_norm",
    "global_norm", "scale", "scale_by_adam", "scale_by_learning_rate", "scale_by_schedule", "trace",
    "constant_schedule", "cosine_decay_schedule", "exponential_decay", "join_schedules", "linear_schedule",
    "piecewise_constant_schedule", "polynomial_schedule", "warmup_constant_schedule", "warmup_cosine_decay_schedule",
]  # fmt: skip
