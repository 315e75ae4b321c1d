"""Quantized weights: int8 and NF4 in trees of parameters, and their matmuls.

A face, above ``blufunc.numpy``. A quantized weight is a subtree of arrays in the place of the weight. ``matmul``
reads its codes, and ``nn.lora`` puts adapters next to it (QLoRA, arXiv:2305.14314)::

    params = nn.quantization.quantize(params, "nf4")
    y = nn.quantization.matmul(x, params["w"])
    y = nn.lora.matmul(x, adapted, matmul=nn.quantization.matmul)
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn.quantization.formats import NF4 as NF4
    from blufunc.nn.quantization.formats import Int8 as Int8
    from blufunc.nn.quantization.product import matmul as matmul
    from blufunc.nn.quantization.trees import dequantize as dequantize
    from blufunc.nn.quantization.trees import quantize as quantize
