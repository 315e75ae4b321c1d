"""The models: decoder-only transformers as pure functions over a tree.

Follows ``config.py``; it knows nothing of files. In: parameters, tokens, and for generation a cache. Out: logits, or
one number to minimize. ``forward`` is for training; ``prefill`` and ``extend`` are for generation.

Shapes use one letter per axis: B rows, T tokens, S slots of a cache, C width, N query heads, K key heads, D features of
a head, V vocabulary. Weights are [outputs, inputs].
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, nn, random
from examples.llm.config import Config


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Hooks for meshes of devices, set by ``layouts.py``; defaults are one device's.

    Attributes:
      lay: ``lay(x, what)`` returns ``x``, and may constrain the sharding of a "stream", "heads", "hidden" or "logits".
      attend: causal attention of q, k and v [B, T, heads, D], by a mask of pairs or None.
      mixture: a function like ``bf.parallel.dropless_experts``, of which out and balance count.
      total: the sum of a matmul whose terms are on several devices.
      order: order of tokens in the stream, int32 [T], or the original order (``...``).
      whole_logits: logits of all tokens exist at once, so that their vocabulary can be sharded.
    """

    lay: Callable = lambda x, what: x
    attend: Callable = lambda q, k, v, mask: nn.dot_product_attention(q, k, v, is_causal=True, mask_mod=mask)
    mixture: Callable = bf.parallel.dropless_experts
    total: Callable = lambda x: x
    order: Any = ...
    whole_logits: bool = False


ONE_DEVICE = Wiring()


def init(key: Any, config: Config, dtype: Any = "float32") -> dict:
    """Fresh parameters.

    Weights are normal with standard deviation 0.02 at a width of 768, and larger for narrower models; the projections
    that add to the residual stream are smaller by sqrt(2 * layers), as in GPT-2.
    """
    C, D = config.width, config.features
    usual = 0.02 * math.sqrt(768 / C)
    added = usual / math.sqrt(2 * config.layers)

    def linear(key: Any, rows: int, columns: int, bias: bool, deviation: float = usual) -> dict:
        weight = deviation * random.normal(key, (rows, columns))
        return _cast({"weight": weight, **({"bias": jnp.zeros(rows)} if bias else {})}, dtype)

    def norm(size: int) -> dict:
        return _cast(
            {"scale": jnp.ones(size), **({"bias": jnp.zeros(size)} if config.norm == "layer" else {})}, dtype
        )

    def layer(key: Any) -> dict:
        qkv, out, gate, up, down = random.split(key, 5)
        attention = {
            "qkv": linear(qkv, (config.heads + 2 * config.key_heads) * D, C, config.qkv_bias),
            "out": linear(out, C, config.heads * D, config.out_bias, added),
        }
        if config.qk_norm:
            attention |= {
                "q_norm": _cast({"scale": jnp.ones(D)}, dtype),
                "k_norm": _cast({"scale": jnp.ones(D)}, dtype),
            }
        if config.experts:
            E, F = config.experts, config.hidden
            matrix = lambda key, *shape, deviation=usual: _cast(
                {"weight": deviation * random.normal(key, (E, *shape))}, dtype
            )
            experts = {
                "router": matrix(random.fold_in(up, 0), C),
                "gate": matrix(gate, F, C),
                "up": matrix(up, F, C),
                "down": matrix(down, C, F, deviation=added),
            }
            return {"norm1": norm(C), "attention": attention, "norm2": norm(C), "experts": experts}
        mlp = {"gate": linear(gate, config.hidden, C, config.mlp_bias)} if config.mlp == "swiglu" else {}
        mlp |= {
            "up": linear(up, config.hidden, C, config.mlp_bias),
            "down": linear(down, C, config.hidden, config.mlp_bias, added),
        }
        return {"norm1": norm(C), "attention": attention, "norm2": norm(C), "mlp": mlp}

    embed, positions, head, *layers = random.split(key, 3 + config.layers)
    table = lambda key, rows: (usual * random.normal(key, (rows, C))).astype(dtype)
    params = {"embed": table(embed, config.vocab)}
    if config.rope is None:
        params["positions"] = table(positions, config.context)
    params |= {"layers": [layer(key) for key in layers], "norm": norm(C)}
    if not config.tied:
        params["head"] = linear(head, config.vocab, C, False)
    return params


def _cast(values: dict, dtype: Any) -> dict:
    return {name: value.astype(dtype) for name, value in values.items()}


# -- training --------------------------------------------------------------------------------------


def forward(params: dict, tokens: Any, config: Config) -> Any:
    """Logits [B, T, V] of the token that follows each of ``tokens`` [B, T]."""
    return logits(params, stream(params, tokens, config)[0])


def loss(
    params: dict,
    tokens: Any,
    config: Config,
    chunk: int | None = None,
    *,
    recompute: bool = False,
    wiring: Wiring = ONE_DEVICE,
) -> Any:
    """Mean cross-entropy, nats per token, of ``tokens[:, 1:]`` given their prefixes.

    With experts, their load-balancing loss is added, times its weight.

    Args:
      chunk: tokens whose logits exist at a time; None: chosen by ``nn.linear_cross_entropy``.
      recompute: keep the inputs of the layers only, and compute each layer again for its gradient.
    """
    x, balance = stream(params, tokens[:, :-1], config, recompute=recompute, wiring=wiring)
    entropy = cross_entropy(params, x, tokens[:, 1:][:, wiring.order], wiring, chunk)
    return entropy + config.balance * balance if config.experts else entropy


def cross_entropy(
    params: dict, x: Any, targets: Any, wiring: Wiring = ONE_DEVICE, chunk: int | None = None
) -> Any:
    """Mean cross-entropy of ``targets`` [B, T], from normalized activations [B, T, C]."""
    if wiring.whole_logits:
        every = wiring.lay(logits(params, x), "logits")
        return nn.softmax_cross_entropy_with_integer_labels(every, targets).mean()
    return nn.linear_cross_entropy(x, _head(params), targets, chunk=chunk)


def stream(
    params: dict, tokens: Any, config: Config, *, recompute: bool = False, wiring: Wiring = ONE_DEVICE
) -> tuple[Any, Any]:
    """Normalized final activations [B, T, C], in the order of the wiring.

    Returns:
      them, and the sum of the layers' balance losses (0 without experts). ``recompute`` as of ``loss``.
    """

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        return within(q, k, v, config.window(layer), wiring)

    T = tokens.shape[1]
    positions = jnp.arange(T, dtype="int32")[wiring.order][None]
    return _stream(params, tokens[:, wiring.order], positions, T, config, attend, recompute, wiring)


# -- generation ------------------------------------------------------------------------------------


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    Attributes:
      layers: of each layer a cache of ``nn.cache``: a ring where the layer has a window that is shorter than the rows,
        or the pages of its own pool.
      lengths: int32 [B], the positions of each row.
    """

    layers: tuple[Any, ...]
    lengths: Any


class Pages(NamedTuple):
    """Pages of the rows, the same in each layer.

    Attributes:
      tables: int32 [B, n], the pages of each row, in order; negative for none.
      pool: pages of a layer.
      size: positions of a page.
    """

    tables: Any
    pool: int
    size: int


def prefill(
    params: dict,
    tokens: Any,
    lengths: Any,
    config: Config,
    slots: int,
    at_once: int = 1,
    pages: Pages | None = None,
) -> tuple[Any, Cache]:
    """Read prompts.

    Args:
      tokens: int32 [B, T], prompts that are padded at the end.
      lengths: int32 [B], their lengths, 1 at least.
      slots: positions of the cache, T at least.
      at_once: the most tokens that a call of ``extend`` will have.
      pages: for caches of pages, which ``slots`` does not limit. Padding is not written, and needs no pages.
    Returns:
      logits [B, V] after the last token of each prompt, and the cache.
    """
    lengths, layers = jnp.asarray(lengths), []
    B, T = tokens.shape

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        window = config.window(layer)
        if pages is not None:
            paged = nn.cache.paged(*pages, config.key_heads, config.features, k.dtype)
            layers.append(nn.cache.update(paged, k, v, 0, lengths=lengths))
            return within(q, k, v, window)
        size = slots if window is None else min(slots, window + at_once - 1)
        empty = nn.cache.contiguous if size == slots else nn.cache.ring
        padding = (
            None if size == slots else lengths
        )  # of a contiguous cache, it is overwritten before it is seen
        cache = empty(B, size, config.key_heads, config.features, k.dtype)
        layers.append(nn.cache.update(cache, k, v, 0, lengths=padding))
        return within(q, k, v, window)  # padding comes last, so causality hides it

    positions = jnp.arange(T, dtype="int32")[None]
    x, _ = _stream(params, tokens, positions, jnp.max(lengths), config, attend)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return logits(params, last), Cache(tuple(layers), lengths)


def extend(params: dict, cache: Cache, tokens: Any, config: Config) -> tuple[Any, Cache]:
    """Logits [B, T, V] after each of ``tokens`` [B, T], which follow the cache.

    ``lengths`` grow by T. A smaller number of them, set by the caller, discards the last tokens.
    """
    B, T = tokens.shape
    start = (
        cache.lengths[0] if B == 1 else cache.lengths
    )  # one position is written as a slice, several by a scatter
    positions = cache.lengths[:, None] + jnp.arange(T, dtype="int32")
    layers = list(cache.layers)

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        layers[layer] = nn.cache.update(layers[layer], k, v, start)
        return nn.cache.attention(q, layers[layer], start, window=config.window(layer))

    x, _ = _stream(params, tokens, positions, jnp.max(cache.lengths) + T, config, attend)
    return logits(params, x), Cache(tuple(layers), cache.lengths + T)


# -- the transformer -------------------------------------------------------------------------------


def _stream(
    params: dict,
    tokens: Any,
    positions: Any,
    length: Any,
    config: Config,
    attend: Callable,
    recompute: bool = False,
    wiring: Wiring = ONE_DEVICE,
) -> tuple[Any, Any]:
    """Normalized final activations [B, T, C], and the sum of balance losses.

    Args:
      positions: int32 [1 or B, T].
      length: of the longest row, for rotary positions that depend on it.
      attend: attention of a layer's queries, keys and values [B, T, heads, D].
    """
    x = params["embed"][tokens]
    if config.rope is None:
        x = x + params["positions"][positions]
    x, balance = wiring.lay(x, "stream"), 0.0
    for i, layer in enumerate(params["layers"]):
        own = functools.partial(attend, i)
        step = lambda layer, x, own=own: block(layer, x, positions, length, config, own, wiring)
        x, more = (bf.checkpoint(step) if recompute else step)(layer, x)
        balance += more
    return norm(params["norm"], x, config), balance


def block(
    params: dict,
    x: Any,
    positions: Any,
    length: Any,
    config: Config,
    attend: Callable,
    wiring: Wiring = ONE_DEVICE,
) -> tuple[Any, Any]:
    """One layer: attention, and an MLP or experts, each added to the residual stream.

    Returns:
      the stream, and the balance loss of the experts (0 without).
    """
    y = norm(params["norm1"], x, config)
    x = wiring.lay(x + attention(params["attention"], y, positions, length, config, attend, wiring), "stream")
    y, balance = norm(params["norm2"], x, config), 0.0
    if config.experts:
        y, balance = experts(params["experts"], y, config, wiring)
    else:
        y = mlp(params["mlp"], y, config, wiring)
    return wiring.lay(x + y, "stream"), balance


def attention(
    params: dict,
    x: Any,
    positions: Any,
    length: Any,
    config: Config,
    attend: Callable,
    wiring: Wiring = ONE_DEVICE,
) -> Any:
    """Projections around ``attend``.

    Rows of "qkv" are, for each of ``config.groups``, queries, keys and values. Queries and keys are normalized and
    turned together, in one kernel, of which the results are read in place.
    """
    B, T, _ = x.shape
    M, D = config.groups, config.features
    N, K = config.heads // M, config.key_heads // M  # of a group
    qkv = linear(params["qkv"], x).reshape(B, T, M, N + 2 * K, D)
    qk, v = qkv[:, :, :, : N + K], qkv[:, :, :, N + K :]
    if config.qk_norm:
        scales = [
            jnp.broadcast_to(params[f"{part}_norm"]["scale"], (n, D)) for part, n in (("q", N), ("k", K))
        ]
        qk = norm({"scale": jnp.concatenate(scales)}, qk, config)
    if config.rope is not None:
        how = {"scaling": dict(config.rope), "max_positions": config.context, "length": length}
        qk = nn.rope(qk.reshape(B, T, M * (N + K), D), positions, **how).reshape(B, T, M, N + K, D)
    heads = lambda y: wiring.lay(y.reshape(B, T, -1, D), "heads")
    out = attend(heads(qk[:, :, :, :N]), heads(qk[:, :, :, N:]), heads(v))
    return linear(params["out"], out.reshape(B, T, M * N * D), wiring.total)


def within(q: Any, k: Any, v: Any, window: int | None, wiring: Wiring = ONE_DEVICE) -> Any:
    """Causal attention of tokens to one another."""
    mask = None if window is None or window >= q.shape[1] else nn.masks.sliding_window(window)
    return wiring.attend(q, k, v, mask)


def mlp(params: dict, x: Any, config: Config, wiring: Wiring = ONE_DEVICE) -> Any:
    """The MLP of each token."""
    up = wiring.lay(linear(params["up"], x), "hidden")
    if config.mlp == "swiglu":
        hidden = nn.silu(wiring.lay(linear(params["gate"], x), "hidden")) * up
    else:
        hidden = nn.gelu(up, approximate=True)
    return linear(params["down"], hidden, wiring.total)


def experts(params: dict, x: Any, config: Config, wiring: Wiring = ONE_DEVICE) -> tuple[Any, Any]:
    """The weighted sum of the MLPs that each token chooses, and their balance loss.

    Rows are sorted by expert, so that each matrix is multiplied by the rows of its expert; no token is dropped.
    """

    def expert(own: dict, rows: Any, sizes: Any) -> Any:
        by = lambda name, rows: lax.ragged_dot(rows, own[name]["weight"].swapaxes(1, 2), sizes)
        return by("down", nn.silu(by("gate", rows)) * by("up", rows))

    own = {name: params[name] for name in ("gate", "up", "down")}
    out, balance, *_ = wiring.mixture(expert, own, params["router"]["weight"].T, x, top_k=config.chosen)
    return out, balance


def norm(params: dict, x: Any, config: Config) -> Any:
    """The norm over the last axis."""
    if config.norm == "layer":
        return nn.layer_norm(x, params["scale"], params["bias"], eps=config.eps)
    return nn.rms_norm(x, params["scale"], eps=config.eps)


def linear(params: dict, x: Any, total: Callable = lambda x: x) -> Any:
    """``x @ weight.T + bias``, the former summed by ``total``.

    The weight may be quantized, and have an adapter of ``nn.lora.apply``.
    """
    multiply = functools.partial(nn.quantization.matmul, transposed=True)
    y = total(nn.lora.matmul(x, params["weight"], matmul=multiply))
    return y + params["bias"] if "bias" in params else y


def logits(params: dict, x: Any) -> Any:
    """Logits [..., V] of final activations [..., C]."""
    return x @ _head(params).T


def _head(params: dict) -> Any:
    return params["head"]["weight"] if "head" in params else params["embed"]
