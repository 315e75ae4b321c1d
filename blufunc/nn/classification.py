"""Classification losses: margins, divergences, focal loss, poly loss, CTC.

A face, above ``nn.losses``: one value per example, under optax's names and with its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axes_in, axis_in
from blufunc.nn.activations import (
    Axis,
    as_inexact,
    log_sigmoid,
    logsumexp,
    number,
    one_hot,
    softmax,
    sparse_plus,
)
from blufunc.nn.losses import sigmoid_binary_cross_entropy, softmax_cross_entropy
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

# -- margins ---------------------------------------------------------------------------------------


def hinge_loss(predictor_outputs: ArrayLike, targets: ArrayLike) -> Array:
    """``max(0, 1 - output * target)`` for targets of -1 and 1."""
    return bnp.maximum(1 - as_inexact(predictor_outputs) * number(targets, "hinge_loss"), 0)


def perceptron_loss(predictor_outputs: ArrayLike, targets: ArrayLike) -> Array:
    """``max(0, -output * target)`` for targets of -1 and 1."""
    return bnp.maximum(-as_inexact(predictor_outputs) * number(targets, "perceptron_loss"), 0)


def sparsemax_loss(logits: ArrayLike, labels: ArrayLike) -> Array:
    """The loss of ``sparse_sigmoid`` (arXiv:1602.02068), for labels of 0 and 1."""
    logits = as_inexact(logits)
    return sparse_plus(bnp.where(bnp.not_equal(bnp.asarray(labels), 0), -logits, logits))


def multiclass_hinge_loss(scores: ArrayLike, labels: ArrayLike) -> Array:
    """Shortfall of the label's score from the best other plus 1 (JMLR 2, 2001).

    Args:
      scores: of shape [..., classes].
      labels: integers, of shape [...].
    """
    scores, right = _scores("multiclass_hinge_loss", scores, labels)
    return bnp.max(scores + 1 - right, axis=-1) - bnp.sum(scores * right, axis=-1)


def multiclass_perceptron_loss(scores: ArrayLike, labels: ArrayLike) -> Array:
    """Shortfall of the label's score from the best: see ``multiclass_hinge_loss``."""
    scores, right = _scores("multiclass_perceptron_loss", scores, labels)
    return bnp.max(scores, axis=-1) - bnp.sum(scores * right, axis=-1)


def _scores(name: str, scores: Any, labels: Any) -> tuple[Any, Any]:
    scores, labels = as_inexact(scores), bnp.asarray(labels)
    if not scores.ndim or tuple(labels.shape) != tuple(scores.shape[:-1]):
        raise errors.ShapeError(
            f"{name} takes scores of shape [..., classes] and labels of shape [...], not {tuple(scores.shape)} and "
            f"{tuple(labels.shape)}.",
            where=source.here(),
            fix="one integer label for each row of scores",
        )
    return scores, one_hot(labels, scores.shape[-1], dtype=scores.dtype)


# -- cross-entropies -------------------------------------------------------------------------------


def smooth_labels(
    labels: ArrayLike, alpha: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> Array:
    """Label smoothing: ``(1 - alpha) * labels + alpha / classes`` (arXiv:1512.00567).

    Args:
      labels: probabilities.
      alpha: weight of the uniform distribution.
      axis: the axis, or axes, of the classes.
      where: booleans that broadcast against the labels: which classes there are.
    """
    labels, alpha = as_inexact(labels), number(alpha, "smooth_labels")
    axes = axes_in(axis, labels.ndim, "smooth_labels")
    if where is None:
        classes: Any = 1
        for d in axes:
            classes *= labels.shape[d]
        return labels * (1 - alpha) + alpha / max(classes, 1)
    where = bnp.asarray(where)
    present = bnp.broadcast_to(where, bnp.broadcast_shapes(tuple(where.shape), tuple(labels.shape)))
    classes = bnp.maximum(bnp.sum(present.astype(labels.dtype), axis=axes, keepdims=True), 1)
    return bnp.where(where, labels * (1 - alpha) + alpha / classes, 0)


@custom_jvp
def _weighted_log_softmax(logits, labels):
    log_p = logits - logsumexp(logits, -1, keepdims=True)
    return bnp.where(labels == 0, 0, labels * log_p)


@_weighted_log_softmax.defjvp
def _weighted_log_softmax_jvp(primals, tangents):
    (logits, labels), (t, t_labels) = primals, tangents
    log_p = logits - logsumexp(logits, -1, keepdims=True)
    mean = bnp.sum(t * softmax(logits), axis=-1, keepdims=True)
    # an impossible class has an infinite logarithm: only the change of its label counts
    slope = bnp.where(t_labels == 0, 0, t_labels * log_p)
    return _weighted_log_softmax(logits, labels), labels * (t - mean) + slope


def safe_softmax_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> Array:
    """``softmax_cross_entropy`` for logits of -inf with label 0: 0 times inf is 0.

    Args:
      logits: unnormalised log-probabilities, of shape [..., classes].
      labels: probabilities, of the same shape.
    """
    logits = as_inexact(logits)
    labels = bnp.broadcast_to(bnp.asarray(labels).astype(logits.dtype), logits.shape)
    return -bnp.sum(_weighted_log_softmax(logits, labels), axis=-1)


def poly_loss_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    epsilon: ArrayLike = 2.0,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> Array:
    """Cross-entropy plus ``epsilon`` times the missed probability (arXiv:2204.12511).

    Args:
      logits, labels, axis, where: see ``softmax_cross_entropy``.
      epsilon: factor of the first term of the expansion.
    """
    missed = bnp.asarray(labels) * (1 - softmax(logits, axis, where))
    if where is not None:
        missed = bnp.where(where, missed, 0)
    loss = softmax_cross_entropy(logits, labels, axis, where)
    return loss + bnp.sum(missed, axis=axis) * number(epsilon, "poly_loss_cross_entropy")


def sigmoid_focal_loss(
    logits: ArrayLike, labels: ArrayLike, *, alpha: ArrayLike | None = None, gamma: ArrayLike = 2.0
) -> Array:
    """Binary cross-entropy times ``(1 - p_t)**gamma`` (arXiv:1708.02002).

    ``p_t`` is the probability of the label.

    Args:
      logits: unnormalised log-odds.
      labels: values in [0, 1], of a shape that broadcasts with the logits.
      alpha: weight of the label 1; that of 0 is ``1 - alpha``. None for no weights.
      gamma: focusing exponent: larger values down-weight easy examples more.
    """
    logits = as_inexact(logits)
    labels = bnp.asarray(labels).astype(logits.dtype)
    logits, labels = bnp.broadcast_arrays(logits, labels)
    log_missed = logsumexp(
        bnp.stack([log_sigmoid(logits), log_sigmoid(-logits)], axis=-1),
        axis=-1,
        b=bnp.stack([1 - labels, labels], axis=-1),
    )
    loss = sigmoid_binary_cross_entropy(logits, labels) * bnp.exp(
        log_missed * number(gamma, "sigmoid_focal_loss")
    )
    if alpha is None:
        return loss
    alpha = number(alpha, "sigmoid_focal_loss")
    return loss * (labels * alpha + (1 - labels) * (1 - alpha))


# -- divergences -----------------------------------------------------------------------------------


def kl_divergence(
    log_predictions: ArrayLike, targets: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> Array:
    """KL divergence, ``sum(targets * (log(targets) - log_predictions))``.

    Args:
      log_predictions: logarithms of probabilities.
      targets: probabilities, of a shape that broadcasts; terms of probability 0 are 0.
      axis: the axis, or axes, of the classes.
      where: booleans that broadcast: which classes there are.
    """
    log_predictions, targets = as_inexact(log_predictions), as_inexact(targets)
    none = targets == 0
    log_targets = bnp.where(none, 0, bnp.log(bnp.where(none, 1, targets)))
    return _sum(targets * (log_targets - log_predictions), axis, where)


def kl_divergence_with_log_targets(
    log_predictions: ArrayLike, log_targets: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> Array:
    """``kl_divergence`` with targets as log-probabilities."""
    log_predictions, log_targets = as_inexact(log_predictions), as_inexact(log_targets)
    return _sum(bnp.exp(log_targets) * (log_targets - log_predictions), axis, where)


def generalized_kl_divergence(
    log_predictions: ArrayLike, targets: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> Array:
    """Unnormalized KL divergence: adds ``sum(exp(log_predictions) - targets)``."""
    excess = bnp.exp(as_inexact(log_predictions)) - as_inexact(targets)
    return kl_divergence(log_predictions, targets, axis, where) + _sum(excess, axis, where)


convex_kl_divergence = generalized_kl_divergence


def _sum(x: Any, axis: Axis, where: Any) -> Any:
    return bnp.sum(x if where is None else bnp.where(where, x, 0), axis=axis)


# -- sequences -------------------------------------------------------------------------------------


def ctc_loss(
    logits: ArrayLike,
    logit_paddings: ArrayLike,
    labels: ArrayLike,
    label_paddings: ArrayLike,
    *,
    blank_id: int = 0,
    log_epsilon: float = -1e5,
) -> Array:
    """Connectionist temporal classification: -log p(labels), over all alignments.

    A. Graves et al., ICML 2006. The forward algorithm: the probability of each prefix of the labels, with
    blanks between, after each frame.

    Args:
      logits: [batch, frames, classes].
      logit_paddings: [batch, frames]: 1 for padding frames, which come last, and 0 for others.
      labels: integers, [batch, n], none of them ``blank_id``.
      label_paddings: [batch, n]: 1 for padding labels, which come last, and 0 for others.
      blank_id: the class of the blank.
      log_epsilon: stand-in for the logarithm of 0.
    Returns:
      [batch]; about ``-log_epsilon`` if there are too few frames for the labels.
    Raises:
      ShapeError: the shapes do not match.
    """
    logits, labels = as_inexact(logits), bnp.asarray(labels)
    pads, label_pads = bnp.asarray(logit_paddings), bnp.asarray(label_paddings)
    shapes = tuple(labels.shape) == tuple(label_pads.shape) and tuple(logits.shape[:2]) == tuple(pads.shape)
    if logits.ndim != 3 or labels.ndim != 2 or not shapes or labels.shape[0] != logits.shape[0]:
        raise errors.ShapeError(
            "ctc_loss takes logits [batch, frames, classes] with paddings [batch, frames], and labels [batch, n] with "
            f"paddings like them, not {logits.aval}, {pads.aval}, {labels.aval} and {label_pads.aval}.",
            where=source.here(),
            fix="zeros of the right shape stand for no padding",
        )
    batch, n = labels.shape
    log_p = logits - logsumexp(logits, -1, keepdims=True)
    blanks = bnp.full((batch, n + 1), axis_in(blank_id, logits.shape[-1], "ctc_loss"), labels.dtype)
    # blank, label, blank, ..., label, blank
    states = bnp.concatenate(
        [bnp.stack([blanks[:, :-1], labels], -1).reshape((batch, 2 * n)), blanks[:, -1:]], 1
    )
    emitted = bnp.take_along_axis(log_p, bnp.broadcast_to(states[:, None], (*log_p.shape[:2], 2 * n + 1)), 2)
    # a blank may be skipped between two labels that differ
    skips = (states[:, 2:] != states[:, :-2]) & (states[:, 2:] != blanks[:, :1])
    skip = bnp.concatenate([bnp.zeros((batch, min(2, 2 * n + 1)), bool), skips], 1)
    none = bnp.full((batch, 2), log_epsilon, log_p.dtype)

    def frame(alpha, x):
        emitted, pad = x
        shifted = [bnp.concatenate([none[:, :k], alpha], 1)[:, : 2 * n + 1] for k in (0, 1, 2)]
        shifted[2] = bnp.where(skip, shifted[2], log_epsilon)
        new = bnp.logaddexp(bnp.logaddexp(shifted[0], shifted[1]), shifted[2]) + emitted
        return bnp.where(pad[:, None] != 0, alpha, new), None

    start = bnp.concatenate(
        [bnp.zeros((batch, 1), log_p.dtype), bnp.full((batch, 2 * n), log_epsilon, log_p.dtype)], 1
    )
    alpha, _ = scan(frame, start, (bnp.swapaxes(emitted, 0, 1), bnp.swapaxes(pads, 0, 1)))
    length = n - bnp.sum(label_pads, axis=1).astype(dtypes.int32)
    last = bnp.take_along_axis(alpha, 2 * length[:, None], 1)[:, 0]
    before = bnp.take_along_axis(alpha, bnp.maximum(2 * length[:, None] - 1, 0), 1)[:, 0]
    return -bnp.where(length == 0, last, bnp.logaddexp(last, before))
