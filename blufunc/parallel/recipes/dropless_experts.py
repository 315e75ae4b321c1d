"""Mixture of experts that drops no token, on one device or over a mesh axis.

A face. In: tokens. Out: the weighted sum of their experts' results. The tokens of an expert are a *group of rows*:
sorted by expert, with sizes that are values of the program, they are multiplied by ``lax.ragged_dot`` (Gale et al.,
arXiv:2211.15841). With an ``axis``, each rank gathers the tokens of all ranks, computes its own experts' rows and
reduce-scatters the sums: exact with static shapes, and a token travels once to each rank however many experts it chose.

Experts are balanced by a loss, or without one by a bias of the scores that only selection sees (Wang et al.,
arXiv:2408.15664): ``balanced_bias`` moves it against the load after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.nn.activations import sigmoid, softmax
from blufunc.parallel.recipes.expert_parallel import check_experts

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

_SCORES: dict[str, Callable] = {"softmax": softmax, "sigmoid": sigmoid}


class Mixture(NamedTuple):
    """The result of ``dropless_experts``.

    Attributes:
      out: the sums, of the shape and dtype of the tokens.
      balance: float32, the load-balancing loss over the tokens of all ranks (Switch, arXiv:2101.03961, equation 4):
        1 if balanced.
      counts: int32 [E], the choices of each expert by the tokens of all ranks.
    """

    out: Any
    balance: Any
    counts: Any


def dropless_experts(
    expert: Callable,
    params: Any,
    router: Any,
    x: Any,
    *,
    top_k: int = 2,
    scores: str = "softmax",
    bias: Any = None,
    axis: str | None = None,
    data_axes: str | Sequence[str] = (),
) -> Mixture:
    """Sum of each token's ``top_k`` experts, none of them dropped.

    A shared expert, which every token visits, is an ordinary function added to the result.

    Args:
      expert: ``expert(params, rows [R, C], sizes) -> [R, C]``: row i goes through the expert of its group, by
        ``lax.ragged_dot(rows, params["up"], sizes)``. Rows after the last group belong to none, and are ignored.
      params: a pytree of arrays with a leading expert dimension: [E, ...], or with an axis [E / n, ...], this rank's.
      router: [C, E], the weights of the scores, computed in float32; the same on all ranks.
      x: [..., C], the tokens; with an axis those of this rank.
      top_k: k, the number of experts per token. Their weights are scores, for k > 1 divided by their sum.
      scores: ``"softmax"`` over experts, or ``"sigmoid"``, as in DeepSeek-V3 (arXiv:2412.19437).
      bias: float [E], added to the scores to select experts, not to weigh them; no gradient.
      axis: inside ``shard_map``, the mesh axis over which tokens and experts are sharded. Each rank then has a buffer
        of n * tokens * min(k, E / n) rows, of which only those of its experts are computed.
      data_axes: inside ``shard_map``, further axes over which tokens are sharded, and experts replicated.
    Returns:
      a ``Mixture``.
    Raises:
      ArgumentError: unknown scores.
      ShapeError, ValueRangeError: inconsistent sizes; an expert that changes the shape of its rows.
    """
    if scores not in _SCORES:
        raise errors.ArgumentError(
            f"dropless_experts: scores are one of {', '.join(_SCORES)}, not {scores!r:.60}.",
            where=source.here(),
        )
    router, x = bnp.asarray(router), bnp.asarray(x)
    E = check_experts("dropless_experts", params, router, x, top_k, axis)
    tokens = x.reshape(-1, x.shape[-1])
    share = _SCORES[scores](tokens.astype(dtypes.float32) @ router.astype(dtypes.float32))
    chosen, weights = _chosen(share, top_k, bias, E)
    counts = bnp.bincount(chosen.reshape(-1), length=E)
    if axis is None:
        out = _summed(expert, params, tokens, chosen, weights, E)
    else:
        first = lax.axis_index(axis) * (E // lax.axis_size(axis))
        everyone = [lax.all_gather(a, axis, tiled=True) for a in (tokens, chosen, weights)]
        out = _summed(expert, params, everyone[0], everyone[1] - first, everyone[2], E // lax.axis_size(axis))
        out = lax.psum_scatter(out, axis, tiled=True)
    over = (*(() if axis is None else (axis,)), *((data_axes,) if isinstance(data_axes, str) else data_axes))
    probability = bnp.mean(share / bnp.sum(share, -1, keepdims=True), 0)
    if over:
        counts, probability = lax.psum(counts, over), lax.pmean(probability, over)
    fractions = counts.astype(dtypes.float32) / bnp.sum(counts)
    return Mixture(out.reshape(x.shape).astype(x.dtype), E * bnp.sum(fractions * probability), counts)


def balanced_bias(bias: ArrayLike, counts: ArrayLike, rate: float = 1e-3) -> Array:
    """The bias of the next step: higher for experts below the mean load.

    Args:
      bias: float [E], zeros at first.
      counts: [E], of ``Mixture``.
      rate: the size of the change.
    Returns:
      [E], ``bias + rate * sign(mean(counts) - counts)`` (arXiv:2408.15664, algorithm 1).
    """
    counts = bnp.asarray(counts).astype(dtypes.float32)
    return bnp.asarray(bias) + rate * bnp.sign(bnp.mean(counts) - counts)


def _chosen(share: Any, top_k: int, bias: Any, experts: int) -> tuple[Any, Any]:
    """The experts of each token, int32 [tokens, k], and their weights."""
    if bias is None:
        weights, chosen = lax.top_k(share, top_k)
    else:
        bias = bnp.asarray(bias)
        if bias.shape != (experts,):
            raise errors.ShapeError(
                f"dropless_experts: the bias has one number for each of {experts} experts, not {bias.aval}.",
                where=source.here(),
            )
        _, chosen = lax.top_k(lax.stop_gradient(share + bias.astype(share.dtype)), top_k)
        weights = bnp.take_along_axis(share, chosen, axis=-1)
    return chosen, weights if top_k == 1 else weights / bnp.sum(weights, -1, keepdims=True)


def _summed(expert: Callable, params: Any, tokens: Any, chosen: Any, weights: Any, experts: int) -> Any:
    """Weighted sums over the choices between 0 and ``experts``, else zero."""
    n, k = chosen.shape
    flat = chosen.reshape(-1)
    group = bnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = bnp.argsort(group)[: n * min(k, experts)]  # a token chooses an expert once
    sizes = bnp.bincount(group, length=experts + 1)[:experts]
    rows = order // k
    y = bnp.asarray(expert(params, tokens[rows], sizes))
    if y.shape != (order.size, tokens.shape[1]):
        raise errors.ShapeError(
            f"dropless_experts: the expert takes rows [{order.size}, {tokens.shape[1]}] and returns {y.aval}.",
            where=source.here(),
            fix="return one row of the same length for each row",
        )
    computed = bnp.arange(order.size, dtype=dtypes.int32) < bnp.sum(sizes)
    y = bnp.where(
        computed[:, None], y, 0
    )  # first: the weight of a row that is no number would have no gradient
    return (
        bnp.zeros(tokens.shape, y.dtype).at[rows].add(y * weights.reshape(-1)[order][:, None].astype(y.dtype))
    )
