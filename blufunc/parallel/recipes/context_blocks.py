"""Blocks of keys and values of other ranks, and the sum of their attention.

Shared by ``context_halves.py`` and ``context_pairs.py``. In: this rank's keys and values. Out: those of other ranks,
one after another; the way home for their cotangents; attention to a block of keys, and the sum of two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.nn.attention.mods import Mods
from blufunc.parallel.recipes.varying import Ring
from blufunc.transforms.autodiff.grad import jvp
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp


def blocks(
    ring: Ring, key: Any, value: Any, routing: str, reach: int
) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Keys and values of the preceding ranks on the ring, at distance 1 to ``reach``."""
    both = bnp.stack([key, value])
    if routing == "all_gather" and reach:
        everyone = ring.gather(both)
    for distance in range(1, reach + 1):
        if routing == "ring":
            both = ring.permute(both, ring.following())
        else:
            both = lax.dynamic_index_in_dim(everyone, (ring.rank() - distance) % ring.size, 0, keepdims=False)
        yield distance, (both[0], both[1])


class Home:
    """The way of cotangents of other ranks' blocks, in order, to their owners."""

    def __init__(self, ring: Ring, routing: str):
        self.ring, self.routing = ring, routing
        self._found: list[Any] = []
        self._sent = 0

    def send(self, d: Any) -> None:
        """Send the cotangent of the next block."""
        if self.routing == "ring" and self._found:  # with the block, which moved on by one rank
            d = self.ring.permute(self._found.pop(), self.ring.following()) + d
        self._found.append(d)
        self._sent += 1

    def added_to(self, own: Any) -> Any:
        """``own`` plus the cotangents that other ranks sent to this one."""
        if not self._sent:
            return own
        ring = self.ring
        if self.routing == "ring":
            return own + ring.permute(self._found[0], ring.following(-self._sent))
        nothing = bnp.zeros_like(self._found[0])
        by_distance = bnp.stack([nothing, *self._found, *[nothing] * (ring.size - 1 - self._sent)])
        ranks = (ring.rank() - bnp.arange(ring.size, dtype=dtypes.int32)) % ring.size
        return own + ring.scatter_sum(bnp.take(by_distance, ranks, axis=0))


@dataclass(frozen=True)
class Scores:
    """How scores count: the parameters of the attention operations.

    Attributes:
      scale: factor of the scores.
      is_causal: whether queries see the keys up to their own place in the block alone.
      mods: functions of scores and pairs; the operands of attention then end with its extras.
    """

    scale: float
    is_causal: bool = False
    mods: Mods | None = None

    @property
    def params(self) -> dict[str, Any]:
        """As parameters of the operations."""
        own = {} if self.mods is None else {"mods": self.mods}
        return {"scale": self.scale, "is_causal": self.is_causal, **own}


@functools.partial(custom_jvp, nondiff_argnums=(0, 1))
def of_rows(operation: Any, scores: Scores, *operands: Any) -> tuple:
    """Attention, or its backward pass, on one of the blocks of keys that rows see.

    The derivatives of ``operation`` assume rows that see one block: they ignore the cotangent of the log-sum-exp, and
    treat ``out`` and ``lse`` in the backward pass as functions of its other operands. Here all of these count.
    """
    return tuple(operation.at(*operands, **scores.params))


@of_rows.defjvp
def _tangents_of_rows(operation: Any, scores: Scores, primals: tuple, tangents: tuple) -> tuple:
    spelled_out = functools.partial(operation.spelled_out, **scores.params)
    _, of_results = jvp(lambda *operands: tuple(spelled_out(*operands)), primals, tangents)
    return of_rows(operation, scores, *primals), of_results


def merged(one: tuple[Any, Any], other: tuple[Any, Any], blind: bool = False) -> tuple[Any, Any]:
    """Merge attention to two sets of keys, weighted by their sums of exponentials.

    Args:
      one, other: results [..., T, N, H] and log-sum-exps [..., N, T].
      blind: whether a row may see no key of either set; its result is then zero.
    """
    lse = bnp.logaddexp(one[1], other[1])
    of = bnp.where(lse == -bnp.inf, 0, lse) if blind else lse
    first, second = (bnp.swapaxes(bnp.exp(x[1] - of), -1, -2)[..., None] for x in (one, other))
    return one[0] * first + other[0] * second, lse
