"""Optimisers: the usual compositions, ready to use.

A face, last in ``optim``. A learning rate is a number, an array of rank 0, or a schedule: a function of the steps
taken.
"""

from __future__ import annotations

from typing import Any

from blufunc.optim.base import GradientTransformation, PyTree, chain
from blufunc.optim.transforms import adam_update, scale_by_learning_rate, trace


def sgd(
    learning_rate: Any, momentum: Any = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> GradientTransformation:
    """Gradient descent, with momentum if asked for.

    Args:
      learning_rate: a number or a schedule.
      momentum: the decay of the sum of past gradients; None for none.
      nesterov: look one step ahead (see ``trace``).
      accumulator_dtype: the dtype of that sum; the parameters' by default.
    """
    if momentum is None:
        return scale_by_learning_rate(learning_rate)
    return chain(trace(momentum, nesterov, accumulator_dtype), scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
) -> GradientTransformation:
    """Adam (Kingma & Ba, arXiv:1412.6980). The arguments are those of ``scale_by_adam``, after the learning rate."""
    return adam_update(learning_rate, b1, b2, eps, eps_root, mu_dtype)


def adamw(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: PyTree = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101).

    Args:
      learning_rate: a number or a schedule.
      b1, b2, eps, eps_root, mu_dtype: see ``scale_by_adam``.
      weight_decay: each step takes ``learning_rate * weight_decay`` of a parameter away.
      mask: which parameters decay: a pytree of bools that is a prefix of the parameters, or a function that makes one
        of them. All by default.
    Returns:
      a transformation whose ``update`` needs ``params``. Its state is a ``ScaleByAdamState``, the count of which also
      serves the schedule.
    """
    return adam_update(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask)
