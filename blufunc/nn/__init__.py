"""Neural network functions: activations, norms, attention, pooling, losses.

A face, above ``blufunc.numpy``. There are no layers and no modules: a model is a function of a pytree of
parameters. Each function is its plain definition, in few passes over memory. Where the whole derivative is
simpler than those of the parts, it has a ``custom_jvp``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn import cache as cache
    from blufunc.nn import initializers as initializers
    from blufunc.nn import lora as lora
    from blufunc.nn import low_precision as low_precision
    from blufunc.nn import masks as masks
    from blufunc.nn import quantization as quantization
    from blufunc.nn import reparametrize as reparametrize
    from blufunc.nn import score_mods as score_mods
    from blufunc.nn.activations import celu as celu
    from blufunc.nn.activations import elu as elu
    from blufunc.nn.activations import gelu as gelu
    from blufunc.nn.activations import glu as glu
    from blufunc.nn.activations import hard_sigmoid as hard_sigmoid
    from blufunc.nn.activations import hard_silu as hard_silu
    from blufunc.nn.activations import hard_swish as hard_swish
    from blufunc.nn.activations import hard_tanh as hard_tanh
    from blufunc.nn.activations import identity as identity
    from blufunc.nn.activations import leaky_relu as leaky_relu
    from blufunc.nn.activations import log1mexp as log1mexp
    from blufunc.nn.activations import log_sigmoid as log_sigmoid
    from blufunc.nn.activations import log_softmax as log_softmax
    from blufunc.nn.activations import logmeanexp as logmeanexp
    from blufunc.nn.activations import logsumexp as logsumexp
    from blufunc.nn.activations import mish as mish
    from blufunc.nn.activations import one_hot as one_hot
    from blufunc.nn.activations import relu as relu
    from blufunc.nn.activations import relu6 as relu6
    from blufunc.nn.activations import selu as selu
    from blufunc.nn.activations import sigmoid as sigmoid
    from blufunc.nn.activations import silu as silu
    from blufunc.nn.activations import soft_sign as soft_sign
    from blufunc.nn.activations import softmax as softmax
    from blufunc.nn.activations import softplus as softplus
    from blufunc.nn.activations import sparse_plus as sparse_plus
    from blufunc.nn.activations import sparse_sigmoid as sparse_sigmoid
    from blufunc.nn.activations import squareplus as squareplus
    from blufunc.nn.activations import swish as swish
    from blufunc.nn.activations import tanh as tanh
    from blufunc.nn.attention.dot_product import dot_product_attention as dot_product_attention
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
    from blufunc.nn.group_norms import BatchNormResult as BatchNormResult
    from blufunc.nn.group_norms import SpectralNormResult as SpectralNormResult
    from blufunc.nn.group_norms import batch_norm as batch_norm
    from blufunc.nn.group_norms import group_norm as group_norm
    from blufunc.nn.group_norms import instance_norm as instance_norm
    from blufunc.nn.group_norms import spectral_norm as spectral_norm
    from blufunc.nn.group_norms import weight_norm as weight_norm
    from blufunc.nn.language.rope import RopeFrequencies as RopeFrequencies
    from blufunc.nn.language.rope import rope as rope
    from blufunc.nn.language.rope import rope_frequencies as rope_frequencies
    from blufunc.nn.language.sampling import filtered_logits as filtered_logits
    from blufunc.nn.language.sampling import sample as sample
    from blufunc.nn.lookup import dropout as dropout
    from blufunc.nn.lookup import embedding_lookup as embedding_lookup
    from blufunc.nn.losses import huber_loss as huber_loss
    from blufunc.nn.losses import l2_loss as l2_loss
    from blufunc.nn.losses import sigmoid_binary_cross_entropy as sigmoid_binary_cross_entropy
    from blufunc.nn.losses import softmax_cross_entropy as softmax_cross_entropy
    from blufunc.nn.losses import (
        softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
    )
    from blufunc.nn.losses import squared_error as squared_error
    from blufunc.nn.normalization import layer_norm as layer_norm
    from blufunc.nn.normalization import rms_norm as rms_norm
    from blufunc.nn.normalization import standardize as standardize
    from blufunc.nn.pooling import avg_pool as avg_pool
    from blufunc.nn.pooling import max_pool as max_pool
    from blufunc.nn.pooling import min_pool as min_pool
    from blufunc.nn.pooling import pool as pool
    from blufunc.nn.scaled_matmul import BlockScaleConfig as BlockScaleConfig
    from blufunc.nn.scaled_matmul import get_scaled_dot_general_config as get_scaled_dot_general_config
    from blufunc.nn.scaled_matmul import scaled_dot_general as scaled_dot_general
    from blufunc.nn.scaled_matmul import scaled_matmul as scaled_matmul
    from blufunc.nn.similarity import cosine_distance as cosine_distance
    from blufunc.nn.similarity import cosine_similarity as cosine_similarity
    from blufunc.nn.similarity import log_cosh as log_cosh
    from blufunc.nn.similarity import ntxent as ntxent
    from blufunc.nn.similarity import triplet_margin_loss as triplet_margin_loss
    from blufunc.nn.vocabulary_loss import linear_cross_entropy as linear_cross_entropy
