"""Neural network functions: activations, norms, attention, pooling, losses.

A face, above ``blufunc.numpy``. There are no layers and no modules: a model is a function of a pytree of
parameters. Each function is its plain definition, in few passes over memory. Where the whole derivative is
simpler than those of the parts, it has a ``custom_jvp``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn import initializers as initializers
    from blufunc.nn import masks as masks
    from blufunc.nn import score_mods as score_mods
    from blufunc.nn.activations import (
        celu,
        elu,
        gelu,
        glu,
        hard_sigmoid,
        hard_silu,
        hard_swish,
        hard_tanh,
        identity,
        leaky_relu,
        log1mexp,
        log_sigmoid,
        log_softmax,
        logmeanexp,
        logsumexp,
        mish,
        one_hot,
        relu,
        relu6,
        selu,
        sigmoid,
        silu,
        soft_sign,
        softmax,
        softplus,
        sparse_plus,
        sparse_sigmoid,
        squareplus,
        swish,
        tanh,
    )
    from blufunc.nn.attention.dot_product import dot_product_attention
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
    from blufunc.nn.group_norms import (
        BatchNormResult,
        SpectralNormResult,
        batch_norm,
        group_norm,
        instance_norm,
        spectral_norm,
        weight_norm,
    )
    from blufunc.nn.lookup import dropout, embedding_lookup
    from blufunc.nn.losses import (
        huber_loss,
        l2_loss,
        sigmoid_binary_cross_entropy,
        softmax_cross_entropy,
        softmax_cross_entropy_with_integer_labels,
        squared_error,
    )
    from blufunc.nn.normalization import layer_norm, rms_norm, standardize
    from blufunc.nn.pooling import avg_pool, max_pool, min_pool, pool
    from blufunc.nn.similarity import (
        cosine_distance,
        cosine_similarity,
        log_cosh,
        ntxent,
        triplet_margin_loss,
    )
    from blufunc.nn.vocabulary_loss import linear_cross_entropy

__all__ = [
    "celu", "elu", "gelu", "glu", "hard_tanh", "leaky_relu", "log_sigmoid", "mish", "relu", "relu6", "selu",
    "sigmoid", "silu", "soft_sign", "softplus", "swish", "tanh",
    "hard_sigmoid", "hard_silu", "hard_swish", "identity", "log1mexp", "sparse_plus", "sparse_sigmoid", "squareplus",
    "log_softmax", "logmeanexp", "logsumexp", "one_hot", "softmax",
    "layer_norm", "rms_norm", "standardize",
    "BatchNormResult", "SpectralNormResult", "batch_norm", "group_norm", "instance_norm", "spectral_norm",
    "weight_norm",
    "dropout", "embedding_lookup",
    "dot_product_attention",
    "avg_pool", "max_pool", "min_pool", "pool",
    "huber_loss", "l2_loss", "linear_cross_entropy", "sigmoid_binary_cross_entropy", "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels", "squared_error",
    "convex_kl_divergence", "ctc_loss", "generalized_kl_divergence", "hinge_loss", "kl_divergence",
    "kl_divergence_with_log_targets", "multiclass_hinge_loss", "multiclass_perceptron_loss", "perceptron_loss",
    "poly_loss_cross_entropy", "safe_softmax_cross_entropy", "sigmoid_focal_loss", "smooth_labels", "sparsemax_loss",
    "cosine_distance", "cosine_similarity", "log_cosh", "ntxent", "triplet_margin_loss",
    "initializers", "masks", "score_mods",
]  # fmt: skip
