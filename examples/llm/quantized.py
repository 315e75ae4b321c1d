"""Quantized models: the matrices of the layers as int8 or NF4 codes.

Follows ``model.py``, precedes ``weights.py``. In: parameters, or one of their arrays. Out: the same with quantized
weights, for ``generate`` and for adapters of ``finetune`` (QLoRA). Embeddings, norms and the weights of the logits stay
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import blufunc as bf
from blufunc import nn, tree
from blufunc.errors import DataError
from examples.llm.config import Config

FORMATS = ("int8", "nf4")
BLOCK = 64
"""Inputs that share a scale in NF4."""
MATRICES = ("qkv", "out", "gate", "up", "down")
"""Matrices of a layer that are quantized and have adapters; not of experts."""


def chosen(params: dict, matrices: Sequence[str] = MATRICES) -> dict:
    """A tree like the parameters: True for the weights of these matrices."""

    def is_chosen(path: tuple[Any, ...], _: Any) -> bool:
        *above, part, name = ["", *(str(getattr(key, "key", "")) for key in path)]
        return name == "weight" and part in matrices and "experts" not in above

    return tree.map_with_path(is_chosen, params)


@bf.jit(static_argnums=1)
def weight(w: Any, format: str) -> Any:
    """A weight [outputs, inputs], quantized.

    int8 has a scale for each output, NF4 for blocks of inputs.
    """
    return nn.quantization.quantize(w, format, block=BLOCK if format == "nf4" else None)


def quantized(params: dict, format: str) -> dict:
    """The parameters with quantized matrices, one after another."""
    return tree.map(lambda w, own: weight(w, format) if own else w, params, chosen(params))


def types(params: dict, dtype: Any = None) -> dict:
    """Shapes and dtypes of the parameters as if they were not quantized."""
    dtype = params["embed"].dtype if dtype is None else dtype
    return bf.eval_shape(lambda params: nn.quantization.dequantize(params, dtype), params)


def check(config: Config, format: str) -> None:
    """Raise DataError for an unknown format, experts, or a size without whole blocks."""
    if format not in FORMATS:
        raise DataError(f"there is no format {format!r}", where="quantize", fix=" or ".join(FORMATS))
    if config.experts:
        raise DataError(
            "matrices of experts are not quantized",
            where="config.json",
            why="rows are multiplied by the matrices of their groups, which have no kernel for codes",
            fix="the weights as they are, on several devices: --mesh fsdp=4",
        )
    for name, size in (
        ("hidden_size", config.width),
        ("num_attention_heads x head_dim", config.heads * config.features),
        ("intermediate_size", config.hidden),
    ):
        if format == "nf4" and size % BLOCK:
            raise DataError(
                f"{name} is {size}",
                where="config.json",
                why=f"the inputs of each matrix are quantized in blocks of {BLOCK}",
                fix="use int8, which has one scale for each output",
            )
