"""Mixture of experts, on one device or with experts sharded over a mesh axis.

A face. In: tokens. Out: the weighted sum of their experts' results, and a load-balancing loss. A router sends each
token to the ``top_k`` experts with the highest scores (Shazeer et al., arXiv:1701.06538; GShard, arXiv:2006.16668;
Switch, arXiv:2101.03961). An expert takes at most ``capacity`` tokens of each *group*: first choices of all tokens
before second ones, and earlier tokens first. Choices beyond that are dropped, and add nothing. So shapes are static,
and routing does not depend on the number of ranks.

With an ``axis`` each rank's tokens are one group. The rank fills its slots at all E experts; an ``all_to_all`` sends
them to the ranks of the experts, and another returns the results. Without an axis, ``groups`` splits the tokens, for
the same function of global arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.pytree import tree
from blufunc.nn.activations import softmax
from blufunc.transforms.batching.vmap import vmap


def mixture_of_experts(
    expert: Callable,
    params: Any,
    router: Any,
    x: Any,
    *,
    top_k: int = 2,
    capacity_factor: float = 1.25,
    axis: str | None = None,
    data_axes: str | Sequence[str] = (),
    groups: int = 1,
) -> tuple[Any, Any]:
    """Sum of each token's ``top_k`` experts, weighted by router probabilities.

    Args:
      expert: ``expert(params of one, tokens [n, C]) -> [n, C]``, such as a transformer's MLP.
      params: a pytree of arrays with a leading expert dimension: [E, ...], or with an axis [E / n, ...], this rank's.
      router: [C, E], the weights of the scores, computed in float32; the same on all ranks.
      x: [..., C], the tokens; with an axis those of this rank.
      top_k: the number of experts per token. With one its result is weighted by the raw probability, as in Switch.
      capacity_factor: the slots of an expert per group, as a multiple of its tokens under a uniform distribution,
        rounded up; ``math.inf`` drops no tokens.
      axis: inside ``shard_map``, the mesh axis over which tokens and experts are sharded.
      data_axes: inside ``shard_map``, further axes over which tokens are sharded, and experts replicated.
      groups: without an axis, the number of groups of tokens, in order.
    Returns:
      the results, of the shape and dtype of ``x``; and the load-balancing loss (Switch, equation 4), over the tokens of
      all ranks: E times the sum over experts of the fraction of choices, dropped or not, times the mean probability; 1
      if balanced.
    Raises:
      ShapeError, ValueRangeError: inconsistent sizes; an expert that changes the shape of its tokens.
    """
    router, x = bnp.asarray(router), bnp.asarray(x)
    E = _check(params, router, x, top_k, capacity_factor, axis, groups)
    tokens = x.reshape(-1, x.shape[-1])
    if axis is None:
        per_group = tokens.reshape(groups, -1, tokens.shape[-1])
        capacity = expert_capacity(per_group.shape[1], E, top_k, capacity_factor)
        routes = [_Routes(router, group, top_k, capacity) for group in per_group]
        sent = bnp.stack(
            [r.dispatch(g) for r, g in zip(routes, per_group, strict=True)]
        )  # [groups, E, capacity, C]
        results = _by_expert(expert, params, sent)
        out = bnp.concatenate([r.combine(y) for r, y in zip(routes, results, strict=True)])
        statistics = sum(r.statistics() for r in routes) / groups
    else:
        n = lax.axis_size(axis)
        route = _Routes(router, tokens, top_k, expert_capacity(tokens.shape[0], E, top_k, capacity_factor))
        sent = route.dispatch(tokens)
        sent = lax.all_to_all(
            sent.reshape(n, E // n, *sent.shape[1:]), axis, 0, 0
        )  # from each rank, for this rank's experts
        results = lax.all_to_all(_by_expert(expert, params, sent), axis, 0, 0)
        out = route.combine(results.reshape(E, *results.shape[2:]))
        statistics = route.statistics()
    data = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    choices, probabilities = lax.pmean(statistics, (*(() if axis is None else (axis,)), *data))
    return out.reshape(x.shape).astype(x.dtype), E * bnp.sum(choices * probabilities)


def expert_capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Slots of an expert for a group of ``tokens``, at most one per token."""
    return max(1, math.ceil(min(tokens, tokens * top_k * factor / experts)))


def _by_expert(expert: Callable, params: Any, x: Any) -> Any:
    """Apply the experts to their tokens, [groups, experts, capacity, C]."""
    groups, experts, capacity, C = x.shape
    per_expert = bnp.moveaxis(x, 1, 0).reshape(experts, groups * capacity, C)
    y = vmap(expert)(params, per_expert)
    if [np.shape(leaf) for leaf in tree.leaves(y)] != [per_expert.shape]:
        found = ", ".join(str(list(np.shape(leaf)[1:])) for leaf in tree.leaves(y)) or "nothing"
        raise errors.ShapeError(
            f"mixture_of_experts: an expert takes tokens {list(per_expert.shape[1:])} and returns {found}.",
            where=source.here(),
            fix="return one array of the shape of the tokens",
        )
    return bnp.moveaxis(y.reshape(experts, groups, capacity, C), 1, 0)


class _Routes:
    """The slots of a group's tokens at the experts.

    Attributes:
      places: int32 [choices, tokens], indices below E * capacity, or E * capacity for a dropped choice.
      weights: float32 [choices, tokens].
    """

    def __init__(self, router: Any, tokens: Any, top_k: int, capacity: int):
        self.n, self.experts, self.capacity, self.top_k = tokens.shape[0], router.shape[1], capacity, top_k
        self.probabilities = softmax(tokens.astype(dtypes.float32) @ router.astype(dtypes.float32))
        weights, chosen = lax.top_k(self.probabilities, top_k)
        self.weights = weights.T if top_k == 1 else (weights / weights.sum(-1, keepdims=True)).T
        chosen = chosen.T.reshape(-1)  # all first choices, then all second ones
        experts = bnp.arange(self.experts, dtype=dtypes.int32)
        self.sent_to = (chosen[:, None] == experts).astype(dtypes.int32)  # [choices * tokens, E]
        before = bnp.cumsum(self.sent_to, 0) - self.sent_to
        place = bnp.sum(before * self.sent_to, 1)
        none = self.experts * capacity
        self.places = bnp.where(place < capacity, chosen * capacity + place, none).reshape(top_k, self.n)

    def dispatch(self, tokens: Any) -> Any:
        """Tokens in their slots, [E, capacity, C]; empty slots are zero."""
        none = self.experts * self.capacity
        numbers = bnp.tile(bnp.arange(self.n, dtype=dtypes.int32), self.top_k)
        at = bnp.full(none + 1, self.n, dtypes.int32).at[self.places.reshape(-1)].set(numbers)[:none]
        padded = bnp.concatenate([tokens, bnp.zeros((1, tokens.shape[1]), tokens.dtype)])
        return padded[at].reshape(self.experts, self.capacity, -1)

    def combine(self, results: Any) -> Any:
        """Weighted sums of the experts' results, [tokens, C], from [E, capacity, C]."""
        results = results.reshape(self.experts * self.capacity, -1)
        padded = bnp.concatenate([results, bnp.zeros((1, results.shape[1]), results.dtype)])
        return bnp.sum(padded[self.places] * self.weights[..., None].astype(results.dtype), 0)

    def statistics(self) -> Any:
        """The fraction of choices, and the mean probability, of each expert: [2, E]."""
        shares = bnp.mean(self.sent_to.astype(dtypes.float32), 0)
        return bnp.stack([shares, bnp.mean(self.probabilities, 0)])


def _check(params: Any, router: Any, x: Any, top_k: int, factor: float, axis: str | None, groups: int) -> int:
    """Check the sizes, and return the number of experts."""
    E = check_experts("mixture_of_experts", params, router, x, top_k, axis)
    tokens = math.prod(x.shape[:-1])
    problem = ""
    if not factor > 0:
        problem = f"capacity_factor is a positive number, not {factor}"
    elif axis is not None and groups != 1:
        problem = "with an axis the tokens of each rank are one group"
    elif groups < 1 or tokens % groups:
        problem = f"{tokens} tokens do not split into {groups} groups"
    if problem:
        raise errors.ValueRangeError(f"mixture_of_experts: {problem}.", where=source.here())
    return E


def check_experts(name: str, params: Any, router: Any, x: Any, top_k: int, axis: str | None) -> int:
    """Check the sizes of a mixture, for messages of ``name``; its experts."""

    def fail(kind: type[errors.BlufuncError], what: str) -> NoReturn:
        raise kind(f"{name}: {what}.", where=source.here())

    if router.ndim != 2 or not x.ndim or x.shape[-1] != router.shape[0]:
        fail(
            errors.ShapeError, f"it takes a router [C, E] and tokens [..., C], not {router.aval} and {x.aval}"
        )
    E = router.shape[1]
    n = 1 if axis is None else lax.axis_size(axis)
    if E % n:
        fail(errors.ShapeError, f"{E} experts cannot be sharded over {axis!r}, of {n} ranks")
    found = {leaf.shape[0] if np.ndim(leaf) else None for leaf in tree.leaves(params)}
    if found != {E // n}:
        own = f"the {E // n} experts{' of a rank' if axis else ''}, not {', '.join(map(str, found)) or 'nothing'}"
        fail(errors.ShapeError, f"the leading dimension of all parameters is {own}")
    if not 1 <= top_k <= E:
        fail(errors.ValueRangeError, f"top_k is between 1 and the {E} experts, not {top_k}")
    return E
