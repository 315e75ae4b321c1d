"""The losses of ``nn``, under optax's names.

A face; nothing is computed here. See ``blufunc.nn`` for what each takes and returns.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn.classification import convex_kl_divergence as convex_kl_divergence
    from blufunc.nn.classification import ctc_loss as ctc_loss
    from blufunc.nn.classification import generalized_kl_divergence as generalized_kl_divergence
    from blufunc.nn.classification import hinge_loss as hinge_loss
    from blufunc.nn.classification import kl_divergence as kl_divergence
    from blufunc.nn.classification import kl_divergence_with_log_targets as kl_divergence_with_log_targets
    from blufunc.nn.classification import multiclass_hinge_loss as multiclass_hinge_loss
    from blufunc.nn.classification import multiclass_perceptron_loss as multiclass_perceptron_loss
    from blufunc.nn.classification import perceptron_loss as perceptron_loss
    from blufunc.nn.classification import poly_loss_cross_entropy as poly_loss_cross_entropy
    from blufunc.nn.classification import safe_softmax_cross_entropy as safe_softmax_cross_entropy
    from blufunc.nn.classification import sigmoid_focal_loss as sigmoid_focal_loss
    from blufunc.nn.classification import smooth_labels as smooth_labels
    from blufunc.nn.classification import sparsemax_loss as sparsemax_loss
    from blufunc.nn.losses import huber_loss as huber_loss
    from blufunc.nn.losses import l2_loss as l2_loss
    from blufunc.nn.losses import sigmoid_binary_cross_entropy as sigmoid_binary_cross_entropy
    from blufunc.nn.losses import softmax_cross_entropy as softmax_cross_entropy
    from blufunc.nn.losses import (
        softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
    )
    from blufunc.nn.losses import squared_error as squared_error
    from blufunc.nn.similarity import cosine_distance as cosine_distance
    from blufunc.nn.similarity import cosine_similarity as cosine_similarity
    from blufunc.nn.similarity import log_cosh as log_cosh
    from blufunc.nn.similarity import ntxent as ntxent
    from blufunc.nn.similarity import triplet_margin_loss as triplet_margin_loss
