"""The losses of ``nn``, under optax's names.

A face; nothing is computed here. See ``blufunc.nn`` for what each takes and returns.
"""

from blufunc.nn.classification import (
    convex_kl_divergence,
    ctc_loss,
    generalized_kl_divergence,
    hinge_loss,
    kl_divergence,
    kl_divergence_with_log_targets,
    multiclass_hinge_loss,
    multiclass_perceptron_loss,
    perceptron_loss,
    poly_loss_cross_entropy,
    safe_softmax_cross_entropy,
    sigmoid_focal_loss,
    smooth_labels,
    sparsemax_loss,
)
from blufunc.nn.losses import (
    huber_loss,
    l2_loss,
    sigmoid_binary_cross_entropy,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
    squared_error,
)
from blufunc.nn.similarity import cosine_distance, cosine_similarity, log_cosh, ntxent, triplet_margin_loss

__all__ = [
    "convex_kl_divergence", "cosine_distance", "cosine_similarity", "ctc_loss", "generalized_kl_divergence",
    "hinge_loss", "huber_loss", "kl_divergence", "kl_divergence_with_log_targets", "l2_loss", "log_cosh",
    "multiclass_hinge_loss", "multiclass_perceptron_loss", "ntxent", "perceptron_loss", "poly_loss_cross_entropy",
    "safe_softmax_cross_entropy", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "smooth_labels",
    "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "sparsemax_loss", "squared_error",
    "triplet_margin_loss",
]  # fmt: skip
