"""Generation: continue a prompt, token by token.

Follows training. In: parameters and a prompt. Out: generated tokens. Every step runs one compiled program of fixed
shape: the last ``context`` tokens, padded at the end, where causal attention ignores the padding. There is a single
trace, however long the text grows.
"""

from __future__ import annotations

import functools

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, random
from examples.gpt import model


def generate(params, config: model.Config, prompt, steps: int, key, temperature=0.8, top_k=None) -> list[int]:
    """Generate ``steps`` tokens after the tokens ``prompt``.

    Args:
      temperature: below 1 favours likely tokens, above 1 flattens the distribution.
      top_k: if given, sample only from the k likeliest tokens; 1 is greedy.
    """
    tokens = list(prompt)
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token")
    for step in range(steps):
        recent = tokens[-config.context :]
        window = np.zeros((1, config.context), np.int32)
        window[0, : len(recent)] = recent
        here = np.int32(len(recent) - 1)
        drawn = _draw(params, window, here, random.fold_in(key, step), np.float32(temperature), config, top_k)
        tokens.append(int(drawn))
    return tokens[len(prompt) :]


@functools.partial(bf.jit, static_argnums=(5, 6))
def _draw(params, window, here, key, temperature, config, top_k):
    """The token after position ``here`` of ``window``."""
    logits = model.forward(params, window, config)[0]
    logits = lax.dynamic_index_in_dim(logits, here, keepdims=False) / temperature
    if top_k is not None:
        least = bnp.sort(logits)[-min(top_k, config.vocab)]
        logits = bnp.where(logits >= least, logits, -bnp.inf)
    return random.categorical(key, logits)
