"""The model: a decoder-only transformer (GPT-2's) as pure functions over a pytree of parameters.

Stands first in the program and knows nothing of data, files or training. In: parameters and token ids.
Out: logits, or one number to minimise. There are no layer objects: ``init`` makes a nested dict of arrays,
and every function below takes its own part of that dict as its first argument.

Shapes are written with one letter an axis: B sequences, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import blufunc.numpy as bnp
from blufunc import nn, random


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes that decide every shape. Frozen, hence hashable: it may be a static argument of ``jit``."""

    layers: int
    heads: int
    width: int
    context: int
    vocab: int


PRESETS = {
    "tiny": Config(layers=2, heads=2, width=128, context=64, vocab=256),
    "small": Config(layers=6, heads=6, width=384, context=256, vocab=256),
    "gpt2-124m": Config(layers=12, heads=12, width=768, context=1024, vocab=50304),  # 50257, padded to 128s
}


def init(key, config: Config) -> dict:
    """Fresh parameters, by GPT-2's recipe.

    Weights are normal with deviation 0.02 at GPT-2's width of 768; narrower models get more, so that the
    logits start out alike at every width. The two projections of a block that add to the residual stream are
    smaller by sqrt(2 * layers), so that the stream's variance does not grow with depth.
    """
    C = config.width
    usual = 0.02 * math.sqrt(768 / C)
    residual = usual / math.sqrt(2 * config.layers)

    def block(key):
        qkv, out, up, down = random.split(key, 4)
        return {
            "norm1": _norm(C),
            "attention": {"qkv": _linear(qkv, C, 3 * C, usual), "out": _linear(out, C, C, residual)},
            "norm2": _norm(C),
            "mlp": {"up": _linear(up, C, 4 * C, usual), "down": _linear(down, 4 * C, C, residual)},
        }

    tokens, positions, *blocks = random.split(key, 2 + config.layers)
    return {
        "tokens": usual * random.normal(tokens, (config.vocab, C)),
        "positions": usual * random.normal(positions, (config.context, C)),
        "blocks": [block(key) for key in blocks],
        "norm": _norm(C),
    }


def _linear(key, inputs: int, outputs: int, deviation: float) -> dict:
    return {"weight": deviation * random.normal(key, (inputs, outputs)), "bias": bnp.zeros(outputs)}


def _norm(width: int) -> dict:
    return {"scale": bnp.ones(width), "bias": bnp.zeros(width)}


def forward(params: dict, tokens, config: Config):
    """The logits [B, T, V] of the token that follows each of ``tokens`` [B, T]."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"]:
        x = x + attention(block["attention"], norm(block["norm1"], x), config.heads)
        x = x + mlp(block["mlp"], norm(block["norm2"], x))
    return norm(params["norm"], x) @ params["tokens"].T  # the embedding once more: the weights are tied


def loss(params: dict, tokens, config: Config):
    """The mean cross-entropy, in nats a token, of predicting ``tokens[:, 1:]`` from what comes before."""
    logits = forward(params, tokens[:, :-1], config)
    return nn.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def attention(params: dict, x, heads: int):
    """Causal self-attention: every token gathers from itself and from what stands before it."""
    B, T, C = x.shape
    qkv = linear(params["qkv"], x).reshape(B, T, 3, heads, C // heads)
    q, k, v = (qkv[:, :, i] for i in range(3))
    gathered = nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(params["out"], gathered.reshape(B, T, C))


def mlp(params: dict, x):
    """The two-layer network that every token goes through alone."""
    return linear(params["down"], nn.gelu(linear(params["up"], x), approximate=True))


def norm(params: dict, x):
    return nn.layer_norm(x, params["scale"], params["bias"])


def linear(params: dict, x):
    return x @ params["weight"] + params["bias"]
