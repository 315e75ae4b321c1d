"""Speculative decoding: a small model drafts tokens, a large one verifies.

Follows ``generate.py``. In: two models of one vocabulary and prompts. Out: tokens of the distribution of the large
model, a few for each of its steps (Leviathan et al., arXiv:2211.17192). Rows accept different numbers of tokens: each
has its own length in both caches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import nn, random
from blufunc.errors import DataError, UnsupportedError
from examples.llm import generate, model
from examples.llm.config import Config

Model = tuple[dict, Config]
"""Parameters and configuration."""


def stream(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    n: int,
    *,
    ahead: int = 4,
    sampling: generate.Sampling = generate.Sampling(),
    top_k: int | None = None,
    key: Any = None,
    stop: Sequence[int] | None = None,
) -> Iterator[list[list[int]]]:
    """Yield the next tokens of each prompt: 1 to ``ahead + 1`` in a round.

    Args:
      target, draft: the model whose distribution counts, and the one that drafts.
      prompts: token ids, for each row at least one.
      n: tokens of each row.
      ahead: tokens that are drafted in a round.
      sampling, top_k: how tokens are chosen; greedily by default: the tokens are then those of ``generate.stream``.
      key: of the random choices; ``random.key(0)`` by default.
      stop: tokens that end a row; default: those of the target's configuration.
    Raises:
      DataError: see ``generate.stream``; or the models have different vocabularies.
      UnsupportedError: a repetition penalty.
    """
    (params, config), (small, small_config) = target, draft
    if sampling.repetition_penalty is not None:
        raise UnsupportedError(
            "speculative decoding has no repetition penalty.",
            why="the distribution of a drafted token would depend on those drafted ahead of it",
            fix="leave out the penalty, or the draft",
        )
    if config.vocab != small_config.vocab:
        raise DataError(
            f"the draft has {small_config.vocab} tokens, and the target {config.vocab}",
            where="vocab_size of the two config.json",
            why="a token must mean the same to both",
            fix="draft with a smaller model of the same family",
        )
    # a last round writes up to `ahead` positions more than it needs
    tokens, lengths = generate.padded(prompts, n + ahead, min(config, small_config, key=lambda c: c.context))
    slots = generate.rounded(int(lengths.max()) + n + ahead, min(config.context, small_config.context))
    key = random.key(0) if key is None else key
    stop = config.eos if stop is None else tuple(stop)
    configs = {"config": config, "small_config": small_config, "ahead": ahead, "top_k": top_k}
    sampling = generate.Sampling(*[None if x is None else np.asarray(x, np.float32) for x in sampling])
    token, *state = _first(params, small, tokens, lengths, key, sampling, slots=slots, **configs)
    left, ended = np.full(len(prompts), n), np.zeros(len(prompts), bool)
    found, count, step = np.asarray(token)[:, None], np.ones(len(prompts), np.int32), 0
    while True:
        out = []
        for row in range(len(prompts)):
            new = [] if ended[row] else found[row, : min(count[row], left[row])].tolist()
            at = next((i for i, t in enumerate(new) if t in stop), None)
            new = new if at is None else new[: at + 1]
            left[row] -= len(new)
            ended[row] |= at is not None or left[row] == 0
            out.append(new)
        yield out
        if ended.all():
            break
        step += 1
        found, count, token, *state = _round(
            params, small, token, *state, np.asarray(ended), np.int32(step), key, sampling, **configs
        )
        found, count = np.asarray(found), np.asarray(count)


_STATIC = ("config", "small_config", "ahead", "top_k")


@functools.partial(bf.jit, static_argnames=(*_STATIC, "slots"))
def _first(params, small, tokens, lengths, key, sampling, *, config, small_config, ahead, top_k, slots):
    logits, cache = model.prefill(params, tokens, lengths, config, slots, ahead + 1)
    _, small_cache = model.prefill(small, tokens, lengths, small_config, slots, ahead + 1)
    p = _probabilities(logits, sampling, top_k)
    return _drawn(random.fold_in(key, 0), p), cache, small_cache


@functools.partial(bf.jit, static_argnames=_STATIC, donate_argnums=(3, 4))
def _round(
    params,
    small,
    token,
    cache,
    small_cache,
    ended,
    step,
    key,
    sampling,
    *,
    config,
    small_config,
    ahead,
    top_k,
):
    """Draft, verify, and go back to the accepted tokens.

    Returns:
      tokens [B, ahead + 1], of which the first ``count`` [B] count, ``count``, the last of these, and both caches.
    """
    keys = random.split(random.fold_in(key, step), ahead + 2)
    lengths, drafted, q, last = cache.lengths, [], [], token
    for i in range(ahead):
        logits, small_cache = model.extend(small, small_cache, last[:, None], small_config)
        q.append(_probabilities(logits[:, 0], sampling, top_k))
        last = _drawn(keys[i], q[-1])
        drafted.append(last)
    _, small_cache = model.extend(
        small, small_cache, last[:, None], small_config
    )  # its key, if all are accepted
    drafted, q = jnp.stack(drafted, 1), jnp.stack(q, 1)

    logits, cache = model.extend(params, cache, jnp.concatenate([token[:, None], drafted], 1), config)
    p = _probabilities(logits, sampling, top_k)
    of = lambda p: jnp.take_along_axis(p[:, :ahead], drafted[..., None], axis=2)[..., 0]
    accepted = random.uniform(keys[ahead], drafted.shape) * of(q) < of(p)
    n = jnp.cumprod(accepted.astype("int32"), axis=1).sum(1)  # int32 [B]

    # where a draft was rejected, from what the target has more of; after the last one, from all
    at = n[:, None, None]
    rest = jnp.take_along_axis(p, at, axis=1)[:, 0]
    drawn_from = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], 1)
    rest = jnp.maximum(rest - jnp.take_along_axis(drawn_from, at, axis=1)[:, 0], 0)
    last = _drawn(keys[ahead + 1], rest)
    out = jnp.concatenate([drafted, last[:, None]], 1)
    out = jnp.where(jnp.arange(ahead + 1) == n[:, None], last[:, None], out)
    lengths = jnp.where(ended, lengths, lengths + n + 1)  # rows that have ended stay in their slots
    return out, n + 1, last, cache._replace(lengths=lengths), small_cache._replace(lengths=lengths)


def _probabilities(logits: Any, sampling: generate.Sampling, top_k: int | None) -> Any:
    """The distribution that ``nn.sample`` draws from."""
    return nn.softmax(nn.filtered_logits(logits, **sampling._asdict(), top_k=top_k), -1)


def _drawn(key: Any, weights: Any) -> Any:
    """A token of each row, int32 [B], by weights [B, V] that need not add up to 1."""
    return random.categorical(key, jnp.log(weights)).astype("int32")
