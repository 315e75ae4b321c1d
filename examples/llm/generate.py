"""Generation: continue prompts, token by token.

Follows ``model.py``. In: parameters and prompts of different lengths. Out: tokens as they come. Two programs run: one
reads the prompts, one makes the next token of each row. Lengths of prompts and caches are rounded up, so that the
programs of one request serve most others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import nn, random
from blufunc.errors import DataError
from examples.llm import model
from examples.llm.config import Config

SHORTEST = 16
"""Least length that programs are compiled for; longer ones are powers of 2."""


class Sampling(NamedTuple):
    """Choice of the next token: arguments of ``nn.sample``.

    Each is a number, or one for each row.

    Another number does not compile another program.

    Attributes:
      temperature: 0 takes the likeliest token.
      top_p, min_p, repetition_penalty: see ``nn.sample``; None: none of it.
    """

    temperature: Any = 0.0
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


def generate(
    params: dict, config: Config, prompts: Sequence[Sequence[int]], n: int, **how: Any
) -> list[list[int]]:
    """At most ``n`` tokens after each prompt; see ``stream`` for the arguments."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(params, config, prompts, n, **how):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    params: dict,
    config: Config,
    prompts: Sequence[Sequence[int]],
    n: int,
    *,
    sampling: Sampling = Sampling(),
    top_k: int | None = None,
    key: Any = None,
    stop: Sequence[int] | None = None,
    slots: int | None = None,
    page: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, until ``n`` of them or the end of all rows.

    The device computes a step while the caller reads the one before.

    Args:
      prompts: token ids, for each row at least one.
      sampling, top_k: how tokens are chosen; greedily by default.
      key: of the random choices; ``random.key(0)`` by default.
      stop: tokens that end a row; default: those of the configuration.
      slots: least positions of the cache, for a caller who will ask for more; rounded up. Default: what is needed.
      page: positions of a page, for a cache of pages: each row has as many as its own prompt and ``n`` tokens need.
        Default: all rows have the positions of the longest.
    Yields:
      a token per row; None for rows that have ended.
    Raises:
      DataError: an empty prompt, one with unknown tokens, or no room for it and ``n`` tokens.
    """
    tokens, lengths = padded(prompts, n, config)
    slots = rounded(max(int(lengths.max()) + n, slots or 0), config.context)
    key = random.key(0) if key is None else key
    stop = config.eos if stop is None else tuple(stop)
    static = {"config": config, "greedy": not np.any(sampling.temperature), "top_k": top_k}
    sampling = bf.device_put(Sampling(*[None if x is None else np.asarray(x, np.float32) for x in sampling]))
    pages = None if page is None else pages_of(lengths, n, page, config)
    tables, pool = (None, 0) if pages is None else pages[:2]
    given = {"slots": slots, "pool": pool, "page": page}
    token, state = _first(params, tokens, lengths, key, sampling, tables, **given, **static)
    ended = np.zeros(len(prompts), bool)
    for i in range(n):
        following = None
        if i + 1 < n:
            following, state = _next(params, state, token, key, sampling, **static)
        found = np.asarray(token)
        yield [None if over else int(t) for over, t in zip(ended, found, strict=True)]
        ended |= np.isin(found, stop)
        if ended.all():
            break
        token = following


class State(NamedTuple):
    """State that stays on the device: nothing is sent to it between steps.

    Attributes:
      cache: of the model.
      seen: tokens of each row so far, [B, V], if there is a penalty for them.
      step: number of the next step.
    """

    cache: model.Cache
    seen: Any
    step: Any


_STATIC = ("config", "greedy", "top_k")


@functools.partial(bf.jit, static_argnames=(*_STATIC, "slots", "pool", "page"))
def _first(params, tokens, lengths, key, sampling, tables, *, config, greedy, top_k, slots, pool, page):
    """The first token of each row, and the state."""
    pages = None if page is None else model.Pages(tables, pool, page)
    logits, cache = model.prefill(params, tokens, lengths, config, slots, 1, pages)
    seen = None
    if sampling.repetition_penalty is not None:
        prompt = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)
        seen = _with(jnp.zeros(logits.shape, bool), prompt)
    token = draw(random.fold_in(key, 0), logits, sampling, greedy, top_k, seen)
    return token, State(cache, seen, jnp.ones((), "int32"))


@functools.partial(bf.jit, static_argnames=_STATIC, donate_argnums=1)
def _next(params, state, token, key, sampling, *, config, greedy, top_k):
    """The next token of each row, and the state."""
    logits, cache = model.extend(params, state.cache, token[:, None], config)
    seen = None if state.seen is None else _with(state.seen, token[:, None])
    drawn = draw(random.fold_in(key, state.step), logits[:, 0], sampling, greedy, top_k, seen)
    return drawn, State(cache, seen, state.step + 1)


def draw(key: Any, logits: Any, sampling: Sampling, greedy: bool, top_k: int | None, seen: Any = None) -> Any:
    """A token of each row, int32 [B], by its logits [B, V].

    ``greedy`` says that no row has a temperature.
    """
    how = sampling._asdict() | ({"temperature": 0} if greedy else {})
    return nn.sample(None if greedy else key, logits, **how, top_k=top_k, previous=seen)


def _with(seen: Any, tokens: Any) -> Any:
    """The mask ``seen`` [B, V] with more tokens [B, T]; -1 for none."""
    rows = jnp.arange(seen.shape[0])[:, None]
    return seen.at[rows, jnp.where(tokens < 0, seen.shape[1], tokens)].set(True, mode="drop")


# -- prompts ---------------------------------------------------------------------------------------


def padded(prompts: Sequence[Sequence[int]], n: int, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T], zeros at their ends, and their lengths [B].

    Raises:
      DataError: see ``stream``.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise DataError(
            "a prompt is empty", where="prompts", fix="begin with at least one token, as the model's bos"
        )
    longest = max(map(len, prompts))
    if longest + n > config.context:
        raise DataError(
            f"a prompt of {longest} tokens and {n} new ones do not fit the context of {config.context}",
            where=f"prompt {max(range(len(prompts)), key=lambda i: len(prompts[i]))}",
            why="config.json has that many positions",
            fix=f"ask for at most {config.context - longest} tokens"
            if longest < config.context
            else f"keep its last tokens: prompt[-{config.context - n}:]",
        )
    for i, prompt in enumerate(prompts):
        if wrong := [token for token in prompt if not 0 <= token < config.vocab]:
            raise DataError(
                f"token {wrong[0]} is outside the vocabulary of {config.vocab}",
                where=f"prompt {i}",
                why="the tokenizer belongs to another model",
                fix="use the tokenizer.json in the folder of the weights",
            )
    tokens = np.zeros((len(prompts), rounded(longest, config.context)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def pages_of(lengths: np.ndarray, n: int, size: int, config: Config) -> model.Pages:
    """Pages for prompts and ``n`` tokens each, one row's after another's.

    The pool has a power of 2 of pages, and tables have the length of the longest row's, so that programs serve most
    requests.

    Raises:
      DataError: ``size`` is less than 1.
    """
    if size < 1:
        raise DataError(f"pages of {size} positions", where="page", fix="page=64")
    counts = -(-(lengths + n) // size)
    longest = -(-rounded(int(lengths.max()) + n, config.context) // size)
    tables = np.full((len(lengths), longest), -1, np.int32)
    ends = np.cumsum(counts)
    for row, count, end in zip(tables, counts, ends, strict=True):
        row[:count] = np.arange(end - count, end)
    return model.Pages(tables, 1 << int(ends[-1] - 1).bit_length(), size)


def rounded(n: int, most: int) -> int:
    """The length that programs are compiled for: a power of 2, ``most`` at most."""
    return min(max(SHORTEST, 1 << (n - 1).bit_length()), most)
