"""Functions of neural networks: activations, norms, attention, losses and initialisers.

A face, above ``blufunc.numpy``. There are no layers and no modules: a model is a function of a pytree of
parameters, and these are the parts that every model needs. Each is the plain definition, in few passes over
memory; those whose derivative is simpler than the derivatives of their parts say so by ``custom_jvp``.
"""

from blufunc.nn import initializers as initializers
from blufunc.nn.activations import (
    celu,
    elu,
    gelu,
    glu,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
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
    swish,
    tanh,
)
from blufunc.nn.attention import dot_product_attention
from blufunc.nn.losses import (
    huber_loss,
    l2_loss,
    sigmoid_binary_cross_entropy,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
    squared_error,
)
from blufunc.nn.normalization import layer_norm, rms_norm, standardize

__all__ = [
    "celu", "elu", "gelu", "glu", "hard_tanh", "leaky_relu", "log_sigmoid", "mish", "relu", "relu6", "selu",
    "sigmoid", "silu", "soft_sign", "softplus", "swish", "tanh",
    "log_softmax", "logsumexp", "one_hot", "softmax",
    "layer_norm", "rms_norm", "standardize",
    "dot_product_attention",
    "huber_loss", "l2_loss", "sigmoid_binary_cross_entropy", "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels", "squared_error",
    "initializers",
]  # fmt: skip
