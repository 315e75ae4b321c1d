"""Scaled dot-product attention: its definition, by two contractions and a softmax.

A face. One letter names each axis: B batch, T queries, S keys and values, N query heads, K key heads, G = N /
K query heads that share a key head, H features of a head. Contractions use the heads as batch axes in place,
without transposes, and a causal mask is added to the scores, so that the program has few passes over arrays
of size T x S. A fused kernel may replace all of it, also with ``mask_mod`` and ``score_mod``: then a bias and
a mask are functions of pairs too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.nn import masks
from blufunc.nn.activations import wide_of
from blufunc.nn.attention import call as attention_call
from blufunc.nn.attention.call import MASKED, causal, scores_of, weighed
from blufunc.nn.attention.mods import traced
from blufunc.numpy.promotion import fits
from blufunc.transforms.checkpointing.checkpoint import checkpoint

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

_LONG = 4
"""Ratio of keys to features per head above which the weights are recomputed.
There the weights of all pairs take far more memory than the operands; the backward pass recomputes them."""


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    mask_mod: Callable | None = None,
    score_mod: Callable | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array:
    """``softmax(query @ key.T * scale + bias) @ value`` per head (arXiv:1706.03762).

    Half-precision scores and their softmax are computed in float32. In a fully masked row all values have the
    same weight; with ``mask_mod`` or ``score_mod``, such a row gives zeros.

    ``mask_mod`` and ``score_mod`` are functions of one pair of a query and a key, which a kernel can inline
    (FlexAttention, Dong et al., arXiv:2412.05496). They receive int32 indices: batch entry, query head, query
    and key. They may read arrays at these indices and compute anything, but return one scalar. Under ``vmap``
    the indices are those of one example; on a mesh they are global. Predefined ones are in ``nn.masks`` and
    ``nn.score_mods``::

        nn.dot_product_attention(
            q, k, v, mask_mod=lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k])
        )
        nn.dot_product_attention(q, k, v, is_causal=True, score_mod=nn.score_mods.soft_cap(50.0))

    On a GPU a kernel computes values and the gradients of query, key and value; ``bf.explain`` reports why if
    it cannot. The gradients of arrays that ``score_mod`` reads, such as a learnt bias, have no kernel, and
    need memory for [B, N, T, S].

    Args:
      query: [B, T, N, H] or [T, N, H].
      key, value: [B, S, K, H] or [S, K, H], of the query's dtype. K divides N: query heads n * G to n * G + G - 1
        share the key head n (Ainslie et al., arXiv:2305.13245).
      bias: floats that broadcast to [B, N, T, S], added to the scores.
      mask: booleans that broadcast to [B, N, T, S]: False where a query must not see a key.
      scale: factor of the scores; ``1 / sqrt(H)`` by default.
      is_causal: let query t see keys 0 to t only.
      mask_mod: (b, h, q, k) -> boolean: whether query q of head h sees key k; combined with ``mask`` and
        ``is_causal`` by logical and.
      score_mod: (score, b, h, q, k) -> score: replaces a scaled score with its bias. Scores of -inf are masked.
      query_seq_lengths, key_value_seq_lengths: int [B]: the number of queries, or keys, of each batch entry; the
        others are padding: see ``masks.lengths``.
      local_window_size: the numbers of keys visible before and after a query's position, or one number for both: see
        ``masks.local_window``.
      return_residual: not supported.
      implementation: None or ``"xla"``: there is one.
    Returns:
      an array of the shape and dtype of ``query``.
    Raises:
      ShapeError, DtypeError: the shapes or dtypes of the arguments do not match.
      UnsupportedError: an unsupported argument is passed.
    """
    name = "dot_product_attention"
    only_none(name, "implementation", None if implementation == "xla" else implementation)
    only_none(name, "return_residual", return_residual)
    query, key, value = bnp.asarray(query), bnp.asarray(key), bnp.asarray(value)
    if query.ndim == 3:
        q, k, v = (bnp.expand_dims(x, 0) for x in (query, key, value))
        out = dot_product_attention(
            q, k, v, bias, mask, scale=scale, is_causal=is_causal, mask_mod=mask_mod, score_mod=score_mod,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
        )  # fmt: skip
        return bnp.squeeze(out, 0)
    _check(query, key, value)
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    scale = 1 / math.sqrt(H) if scale is None else scale

    if mask is not None:
        mask = bnp.asarray(mask)
        if not dtypes.is_bool(mask.dtype):
            raise errors.DtypeError(
                f"the mask must be of booleans, not {mask.dtype}.",
                where=source.here(),
                fix="pass an additive mask as bias, or compare: mask != 0",
            )
    if mask_mod is masks.causal:
        is_causal, mask_mod = True, None
    if local_window_size is not None:
        mask_mod = _and(mask_mod, masks.local_window(*masks.window_of(local_window_size, name)))
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        mask_mod = _and(mask_mod, masks.lengths(query_seq_lengths, key_value_seq_lengths))
    if mask_mod is not None or score_mod is not None:
        return _by_pairs(query, key, value, bias, mask, scale, is_causal, mask_mod, score_mod)
    if mask is not None:
        mask = _placed("mask", mask, (B, N, T, S), K)
    if bias is not None:
        bias = _placed("bias", bias, (B, N, T, S), K)
    if bias is None and mask is None and S > H and isinstance(scale, (int, float)):
        return attention_call.attention(query, key, value, scale=float(scale), is_causal=is_causal)[0]
    attend = functools.partial(_attend, scale=scale, is_causal=is_causal)
    if S > _LONG * H:
        attend = checkpoint(attend)
    return attend(query, key, value, bias, mask)


def _by_pairs(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: bool,
    mask_mod: Callable | None,
    score_mod: Callable | None,
) -> Any:
    """Attention with functions of pairs, into which bias, mask and traced scale turn."""
    scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if mask is not None:
        mask_mod = _and(mask_mod, _entries("mask", mask, scores))
    factor, added, own_score = scale, None, score_mod
    number = isinstance(scale, (int, float)) and scale > 0
    if bias is not None:
        added = _entries("bias", bias, scores)
    if added is not None or not number:

        def score_mod(score: Any, *pair: Any) -> Any:
            score = score if number else score * factor
            score = score if added is None else score + added(*pair)
            return score if own_score is None else own_score(score, *pair)

    mods, tables = traced(mask_mod, score_mod, wide_of(query))
    scale = float(scale) if number else 1.0
    out, _ = attention_call.attention(
        query, key, value, scale=scale, is_causal=is_causal, mods=mods, tables=tables
    )
    return out


def _and(one: Callable | None, other: Callable) -> Callable:
    """The conjunction of two masks; None masks nothing."""
    return other if one is None else lambda *pair: one(*pair) & other(*pair)


def _entries(name: str, x: Any, shape: tuple[int, ...]) -> Callable:
    """The function of a pair that reads ``x``, broadcast to [B, N, T, S] = ``shape``."""
    x = bnp.asarray(x)
    _check_placed(name, x, shape)
    sizes = shape[4 - x.ndim :]
    return lambda *pair: x[
        tuple([i if n == m else 0 for i, n, m in zip(pair[4 - x.ndim :], x.shape, sizes, strict=True)])
    ]


def _attend(query: Any, key: Any, value: Any, bias: Any, mask: Any, *, scale: float, is_causal: bool) -> Any:
    """Attention of checked arguments; ``bias`` and ``mask`` broadcast to the scores."""
    B, T, N, _ = query.shape
    S, K = key.shape[1:3]
    scores = scores_of(query, key, scale)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if is_causal:
        seen = _placed("causal mask", causal(T, S), (B, N, T, S), K)
    if mask is not None:
        scores = bnp.where(mask & seen if is_causal else mask, scores, MASKED)
    elif is_causal:
        # Adding is cheaper than selecting, and has no backward pass. It is right here because every query
        # sees a key: probabilities of 0 stop the gradient. A fully masked row would keep a gradient, though
        # its scores are constant.
        scores = scores + bnp.where(seen, bnp.zeros((), scores.dtype), MASKED)
    return weighed(scores, value)


def _placed(name: str, x: Any, shape: tuple[int, ...], K: int) -> Any:
    """``x``, broadcastable to [B, N, T, S] = ``shape``, in the layout of the scores."""
    x = bnp.asarray(x)
    _check_placed(name, x, shape)
    if shape[1] == K:
        return x
    b, n, t, s = (1,) * (4 - x.ndim) + tuple(x.shape)  # with shared heads the scores are [B, K, T, G, S]
    return bnp.moveaxis(bnp.reshape(x, (b, K, n // K, t, s) if n > 1 else (b, 1, 1, t, s)), 2, 3)


def _check_placed(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if not fits(x.shape, shape):
        raise errors.ShapeError(
            f"dot_product_attention: the {name} of shape {tuple(x.shape)} does not broadcast to {shape}.",
            where=source.here(),
            why="the scores are [batch, heads, queries, keys].",
        )


def _check(query, key, value) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"

    def fail(why: str):
        raise errors.ShapeError(
            f"dot_product_attention: the shapes do not match: {shapes}.",
            where=source.here(),
            why=why,
            fix="query is [batch, queries, heads, features], key and value are [batch, keys, key heads, features]; "
            "all three may lack the batch",
        )

    if not query.ndim == key.ndim == value.ndim == 4:
        fail(f"they have {query.ndim}, {key.ndim} and {value.ndim} axes instead of 4 each (or 3).")
    if tuple(key.shape) != tuple(value.shape):
        fail("key and value differ.")
    if query.shape[0] != key.shape[0]:
        fail(f"a batch of {query.shape[0]} queries meets one of {key.shape[0]} keys.")
    if query.shape[3] != key.shape[3]:
        fail(f"heads of {query.shape[3]} features meet heads of {key.shape[3]}.")
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        fail(f"{query.shape[2]} query heads cannot share {key.shape[2]} key heads evenly.")
    if not query.dtype == key.dtype == value.dtype or not dtypes.is_floating(query.dtype):
        raise errors.DtypeError(
            "dot_product_attention takes query, key and value of one floating dtype, not "
            f"{query.dtype}, {key.dtype} and {value.dtype}.",
            where=source.here(),
            fix="convert with .astype",
        )
