"""Distance losses: log-cosh, cosine similarity, triplets, contrastive pairs.

A face, above ``nn.losses``: under optax's names and with its values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.nn.activations import Axis, as_inexact, number
from blufunc.nn.losses import difference

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def log_cosh(predictions: ArrayLike, targets: ArrayLike | None = None) -> Array:
    """``log(cosh(predictions - targets))``: quadratic near 0, linear far from it.

    Raises:
      ShapeError: the shapes differ.
    """
    error = difference("log_cosh", predictions, targets)
    return bnp.logaddexp(error, -error) - math.log(2)


def cosine_similarity(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    epsilon: ArrayLike = 0.0,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> Array:
    """The cosine of the angle between vectors along ``axis``.

    Args:
      predictions, targets: arrays that broadcast together.
      epsilon: a lower bound of the squares of their lengths; positive, to differentiate at vectors of length 0.
      axis: the axis, or axes, of the vectors.
      where: booleans that broadcast: which elements there are.
    """
    a, b = as_inexact(predictions), as_inexact(targets)
    if where is not None:
        a, b = bnp.where(where, a, 0), bnp.where(where, b, 0)
    return bnp.sum(_unit(a, epsilon, axis) * _unit(b, epsilon, axis), axis=axis)


def _unit(x: Any, epsilon: Any, axis: Axis) -> Any:
    square = bnp.sum(bnp.square(x), axis=axis, keepdims=True)
    return x * lax.rsqrt(bnp.maximum(square, number(epsilon, "cosine_similarity")))


def cosine_distance(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    epsilon: ArrayLike = 0.0,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> Array:
    """``1 - cosine_similarity``."""
    return 1 - cosine_similarity(predictions, targets, epsilon=epsilon, axis=axis, where=where)


def triplet_margin_loss(
    anchors: ArrayLike,
    positives: ArrayLike,
    negatives: ArrayLike,
    axis: Axis = -1,
    norm_degree: ArrayLike = 2,
    margin: ArrayLike = 1.0,
    eps: ArrayLike = 1e-6,
) -> Array:
    """Hinge on the distances anchor-positive and anchor-negative (arXiv:1503.03832).

    Args:
      anchors, positives, negatives: vectors along ``axis``.
      axis: the axis, or axes, of the vectors.
      norm_degree: the power of the differences in a distance; an even number, since their signs are kept.
      margin: required difference of the two distances.
      eps: added to the sum of the powers.
    """
    name = "triplet_margin_loss"
    anchors, positives, negatives = map(as_inexact, (anchors, positives, negatives))
    degree, margin, eps = (number(x, name) for x in (norm_degree, margin, eps))

    def distance(x):
        return (bnp.sum((anchors - x) ** degree, axis=axis) + eps) ** (1 / degree)

    return bnp.maximum(distance(positives) - distance(negatives) + margin, 0)


def ntxent(embeddings: ArrayLike, labels: ArrayLike, temperature: ArrayLike = 0.07) -> Array:
    """Normalised temperature-scaled cross-entropy of pairs (arXiv:2002.05709).

    Each pair of embeddings of one label is contrasted with the pairs of its first one and those of other labels.

    Args:
      embeddings: [n, features].
      labels: integers, [n].
      temperature: the similarities are divided by it.
    Returns:
      the mean over all pairs of one label, a number.
    Raises:
      ShapeError: the shapes do not go together.
    """
    x, labels = as_inexact(embeddings), bnp.asarray(labels)
    if x.ndim != 2 or tuple(labels.shape) != (x.shape[0],):
        raise errors.ShapeError(
            f"ntxent takes embeddings [n, features] and labels [n], not {x.aval} and {labels.aval}.",
            where=source.here(),
            fix="flatten the embeddings of each example",
        )
    unit = _unit(x, float(dtypes.finfo(x.dtype).eps), -1)
    scores = unit @ unit.T / number(temperature, "ntxent")
    same = labels[:, None] == labels[None, :]
    pairs = same & ~bnp.eye(x.shape[0], dtype=bool)
    relevant = bnp.where(same & ~pairs, -math.inf, scores)
    top = bnp.max(lax.stop_gradient(relevant), axis=1, keepdims=True)
    scores = scores - bnp.where(bnp.isfinite(top), top, 0)
    others = bnp.sum(bnp.where(same, 0, bnp.exp(bnp.where(same, 0, scores))), axis=1, keepdims=True)
    mine = bnp.where(pairs, scores, 0)
    log_p = mine - bnp.log(others + bnp.exp(mine))
    count = bnp.sum(pairs)
    return -bnp.sum(bnp.where(pairs, log_p, 0)) / count
