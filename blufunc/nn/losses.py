"""Losses, one value per example: reduce them as needed, usually by ``.mean()``.

A face. Names are those of optax, or of JAX. Cross-entropies are in nats. Half-precision logits are converted
to float32 first, and the losses stay float32: a sum of thousands of exponentials is not safe in 8 or 11 bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in
from blufunc.nn.activations import Axis, as_inexact, log_softmax, shifted, softplus
from blufunc.nn.normalization import widened

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def softmax_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> Array:
    """``-sum(labels * log_softmax(logits))``, for labels that are probabilities.

    Args:
      logits: unnormalised log-probabilities.
      labels: the probability of each class, of a shape that broadcasts with the logits.
      axis: the axis, or axes, of the classes.
      where: booleans that broadcast against the logits: which classes there are.
    Returns:
      an array of the logits' shape without ``axis``.
    """
    log_p = log_softmax(widened(as_inexact(logits)), axis, where)
    if where is not None:
        log_p = bnp.where(where, log_p, 0)
    labels = bnp.asarray(labels).astype(log_p.dtype)
    return -bnp.sum(labels * log_p, axis=axis)


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: int = -1, where: ArrayLike | None = None
) -> Array:
    """``-log_softmax(logits)[label]``, without materializing all probabilities.

    Args:
      logits: unnormalised log-probabilities. Classes with -inf are impossible; with a +inf among them, the loss is
        NaN.
      labels: integers, the classes; of the shape of the logits without ``axis``. A label out of range has no
        defined loss.
      axis: the axis of the classes.
      where: booleans that broadcast against the logits: which classes there are.
    Returns:
      an array of the labels' shape.
    Raises:
      DtypeError: the labels are not integers.
      ShapeError: the shapes of logits and labels do not go together.
      ValueRangeError: the logits have no axis ``axis``.
    """
    logits, labels = widened(as_inexact(logits)), bnp.asarray(labels)
    if not dtypes.is_integer(labels.dtype):
        raise errors.DtypeError(
            f"the labels must be integers, not {labels.dtype}.",
            where=source.here(),
            fix="use softmax_cross_entropy for labels that are probabilities",
        )
    axis = axis_in(axis, logits.ndim, "softmax_cross_entropy_with_integer_labels") if logits.ndim else 0
    expected = tuple(logits.shape[:axis]) + tuple(logits.shape[axis + 1 :])
    if not logits.ndim or tuple(labels.shape) != expected:
        raise errors.ShapeError(
            f"logits of shape {tuple(logits.shape)} need labels of shape {expected}, not {tuple(labels.shape)}.",
            where=source.here(),
            why=f"each label names one of the classes along axis {axis} of the logits.",
        )
    if where is not None:
        logits = bnp.where(where, logits, -math.inf)
    logits = shifted(logits, (axis,))
    picked = bnp.take_along_axis(logits, bnp.expand_dims(labels, axis), axis)
    return bnp.log(bnp.sum(bnp.exp(logits), axis=axis)) - bnp.squeeze(picked, axis)


def sigmoid_binary_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> Array:
    """Binary cross-entropy, ``-labels * log(p) - (1 - labels) * log(1 - p)``.

    Args:
      logits: unnormalised log-odds.
      labels: numbers in [0, 1], of a shape that broadcasts with the logits.
    """
    logits = widened(as_inexact(logits))
    labels = bnp.asarray(labels).astype(logits.dtype)
    # both terms are small for confident correct predictions: softplus minus a product would cancel there
    return labels * softplus(-logits) + (1 - labels) * softplus(logits)


def squared_error(predictions: ArrayLike, targets: ArrayLike | None = None) -> Array:
    """``(predictions - targets)**2``; the targets are 0 by default.

    Raises:
      ShapeError: the shapes differ.
    """
    return bnp.square(difference("squared_error", predictions, targets))


def l2_loss(predictions: ArrayLike, targets: ArrayLike | None = None) -> Array:
    """Half the ``squared_error``, so that the derivative is the error."""
    return bnp.square(difference("l2_loss", predictions, targets)) * 0.5


def huber_loss(predictions: ArrayLike, targets: ArrayLike | None = None, delta: ArrayLike = 1.0) -> Array:
    """Half the squared error up to ``delta``, and linear beyond (Huber, 1964).

    Raises:
      ShapeError: the shapes differ.
    """
    size = bnp.abs(difference("huber_loss", predictions, targets))
    quadratic = bnp.minimum(size, delta)
    return bnp.square(quadratic) * 0.5 + (size - quadratic) * delta


def difference(name: str, predictions: Any, targets: Any) -> Any:
    """``predictions - targets`` of one shape; targets default to 0."""
    predictions = as_inexact(predictions)
    if targets is None:
        return predictions
    targets = bnp.asarray(targets)
    if tuple(targets.shape) != tuple(predictions.shape):
        raise errors.ShapeError(
            f"{name}: predictions of shape {tuple(predictions.shape)}, targets of shape {tuple(targets.shape)}.",
            where=source.here(),
            why="broadcasting one against the other is a common mistake: (n,) with (n, 1) gives n * n losses.",
            fix="reshape one of them to the shape of the other",
        )
    return predictions - targets
