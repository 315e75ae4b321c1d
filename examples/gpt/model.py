"""The model: a decoder-only transformer (GPT-2) as pure functions over a pytree.

The first module; it knows nothing of data, files or training. In: parameters and token ids. Out: logits, or one number
to minimize. There are no layer objects: ``init`` makes a nested dict of arrays, and every function below takes its own
part of that dict as its first argument.

Shapes use one letter per axis: B sequences, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn, random


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model. Frozen, hence hashable: may be a static argument of ``jit``."""

    layers: int
    heads: int
    width: int
    context: int
    vocab: int
    experts: int = 0  # replace each layer's MLP; 0: one MLP


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Hooks for meshes of devices, set by ``sharded.py``; defaults are one device's.

    Attributes:
      lay: ``lay(x, what)`` returns ``x``, and may constrain the sharding of a "stream", "heads", "hidden" or "logits".
      attend: causal attention, of q, k and v [B, T, H, D].
      mixture: a function like ``bf.parallel.mixture_of_experts``.
      total: the sum of a matmul whose terms are on several devices.
      order: order of tokens in the stream, int32 [T], or the original order (``...``).
      recompute: rematerialize each layer in the backward pass.
      loss_chunk: number of tokens whose logits exist at a time; None: chosen by ``nn.linear_cross_entropy``; 0: all,
        which can then be sharded.
    """

    lay: Callable = lambda x, what: x
    attend: Callable = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)
    mixture: Callable = bf.parallel.mixture_of_experts
    total: Callable = lambda x: x
    order: Any = ...
    recompute: bool = False
    loss_chunk: int | None = 0


ONE_DEVICE = Wiring()
BALANCE = 0.01  # weight of the load-balancing loss, as in Switch


PRESETS = {
    "tiny": Config(layers=2, heads=2, width=128, context=64, vocab=256),
    "small": Config(layers=6, heads=6, width=384, context=256, vocab=256),
    "gpt2-124m": Config(layers=12, heads=12, width=768, context=1024, vocab=50304),  # 50257 padded to 128s
}


def init(key, config: Config) -> dict:
    """Fresh parameters, by GPT-2's recipe.

    Weights are normal with standard deviation 0.02 at GPT-2's width of 768; narrower models use a larger one, so that
    initial logits have the same scale at every width. The two projections of a block that add to the residual stream
    are smaller by sqrt(2 * layers), so that the stream's variance does not grow with depth.
    """
    C = config.width
    usual = 0.02 * math.sqrt(768 / C)
    residual = usual / math.sqrt(2 * config.layers)

    def block(key):
        qkv, out, up, down = random.split(key, 4)
        return {
            "norm1": _norm(C),
            "attention": {
                "qkv": _linear(qkv, C, 3 * C, deviation=usual),
                "out": _linear(out, C, C, deviation=residual),
            },
            "norm2": _norm(C),
            **({"experts": experts(up, down)} if config.experts else {"mlp": network(up, down)}),
        }

    def network(up, down, *count):
        return {
            "up": _linear(up, *count, C, 4 * C, deviation=usual),
            "down": _linear(down, *count, 4 * C, C, deviation=residual),
        }

    def experts(up, down):
        router = usual * random.normal(random.fold_in(up, 0), (C, config.experts))
        return {"router": {"weight": router}, **network(up, down, config.experts)}

    tokens, positions, *blocks = random.split(key, 2 + config.layers)
    return {
        "tokens": usual * random.normal(tokens, (config.vocab, C)),
        "positions": usual * random.normal(positions, (config.context, C)),
        "blocks": [block(key) for key in blocks],
        "norm": _norm(C),
    }


def _linear(key, *shape: int, deviation: float) -> dict:
    return {
        "weight": deviation * random.normal(key, shape),
        "bias": bnp.zeros((*shape[:-2], shape[-1])),
    }


def _norm(width: int) -> dict:
    return {"scale": bnp.ones(width), "bias": bnp.zeros(width)}


def forward(params: dict, tokens, config: Config):
    """Logits [B, T, V] of the token that follows each of ``tokens`` [B, T]."""
    return head(params, stream(params, tokens, config)[0])


def loss(params: dict, tokens, config: Config, wiring: Wiring = ONE_DEVICE):
    """Mean cross-entropy, nats per token, of ``tokens[:, 1:]`` given their prefixes.

    With experts, the load-balancing loss is added.
    """
    x, balance = stream(params, tokens[:, :-1], config, wiring)
    entropy = cross_entropy(params, x, tokens[:, 1:][:, wiring.order], wiring)
    return entropy + BALANCE * balance if config.experts else entropy


def stream(params: dict, tokens, config: Config, wiring: Wiring = ONE_DEVICE):
    """Final activations [B, T, C] of ``tokens`` [B, T], and the sum of balance losses."""
    x = wiring.lay(embed(params, tokens, wiring.order), "stream")
    layer = lambda params, x: block(params, x, config, wiring)
    layer = bf.checkpoint(layer) if wiring.recompute else layer
    balance = 0.0
    for params_of_layer in params["blocks"]:
        x, more = layer(params_of_layer, x)
        balance += more
    return x, balance


def embed(params: dict, tokens, order: Any = ...):
    """Embeddings [B, T, C] of tokens and their positions."""
    return params["tokens"][tokens[:, order]] + params["positions"][: tokens.shape[1]][order]


def block(params: dict, x, config: Config, wiring: Wiring = ONE_DEVICE):
    """One layer, and the balance loss of its experts (0 without experts)."""
    x = x + attention(params["attention"], norm(params["norm1"], x), config.heads, wiring)
    x = wiring.lay(x, "stream")
    y, balance = norm(params["norm2"], x), 0.0
    if config.experts:
        experts = {name: params["experts"][name] for name in ("up", "down")}
        y, balance = wiring.mixture(mlp, experts, params["experts"]["router"]["weight"], y)
    else:
        y = mlp(params["mlp"], y, wiring)
    return wiring.lay(x + y, "stream"), balance


def head(params: dict, x):
    """Logits: final activations times the embeddings. The weights are tied."""
    return norm(params["norm"], x) @ params["tokens"].T


def cross_entropy(params: dict, x, targets, wiring: Wiring = ONE_DEVICE):
    """Mean cross-entropy of ``targets`` [B, T], from the final activations [B, T, C]."""
    if wiring.loss_chunk == 0:
        logits = wiring.lay(head(params, x), "logits")
        return nn.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    x = norm(params["norm"], x)
    return nn.linear_cross_entropy(x, params["tokens"], targets, chunk=wiring.loss_chunk)


def attention(params: dict, x, heads: int, wiring: Wiring = ONE_DEVICE):
    """Causal self-attention over each token and its predecessors."""
    B, T, C = x.shape
    qkv = linear(params["qkv"], x).reshape(B, T, 3, -1, C // heads)
    q, k, v = (wiring.lay(qkv[:, :, i], "heads") for i in range(3))
    gathered = wiring.attend(q, k, v)
    return linear(params["out"], gathered.reshape(B, T, -1), wiring.total)


def mlp(params: dict, x, wiring: Wiring = ONE_DEVICE):
    """The two-layer MLP, applied to each token."""
    hidden = wiring.lay(nn.gelu(linear(params["up"], x), approximate=True), "hidden")
    return linear(params["down"], hidden, wiring.total)


def norm(params: dict, x):
    return nn.layer_norm(x, params["scale"], params["bias"])


def linear(params: dict, x, total: Callable = lambda x: x):
    """``x @ weight + bias``; a weight [inputs, m, n] gives [..., m, n]."""
    return total(bnp.tensordot(x, params["weight"], 1)) + params["bias"]
