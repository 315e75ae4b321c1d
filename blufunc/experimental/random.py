"""A random generator with state, under JAX's names.

A face, above ``blufunc.random``. The state is a Ref that counts the keys that were drawn: each is the base key with the
count folded in. Functions under ``jit`` take generators as arguments, or close over them.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import dtypes, source
from blufunc.ref import new_ref
from blufunc.tree_util import register_dataclass

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

__all__ = ["StatefulPRNG", "stateful_rng"]

Size = int | Sequence[int] | None


def _shape(size: Size, *parameters: Any) -> tuple[int, ...]:
    if size is None:
        return np.broadcast_shapes(*[bnp.shape(p) for p in parameters])
    return (size,) if isinstance(size, int) else tuple(size)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class StatefulPRNG:
    """A generator whose every draw has another key; ``stateful_rng`` makes one."""

    _base_key: Any
    _counter: Any

    def key(self, shape: int | Sequence[int] = ()) -> Array:
        """A new key, or an array of them."""
        if getattr(self._base_key, "ndim", 0):
            raise errors.ShapeError(
                "a generator that was split draws nothing.", where=source.here(), fix="spawn(n) gives a list"
            )
        key = random.fold_in(self._base_key, self._counter[...])
        self._counter.addupdate(..., 1)
        sizes = _shape(shape)
        return random.split(key, sizes) if sizes else key

    def random(self, size: Size = None, dtype: DTypeLike = float) -> Array:
        """Floats from the uniform distribution on [0, 1)."""
        return random.uniform(self.key(), _shape(size), dtype)

    def uniform(
        self, low: ArrayLike = 0, high: ArrayLike = 1, size: Size = None, *, dtype: DTypeLike = float
    ) -> Array:
        """Floats from the uniform distribution on [low, high)."""
        return random.uniform(self.key(), _shape(size, low, high), dtype, low, high)

    def normal(
        self, loc: ArrayLike = 0, scale: ArrayLike = 1, size: Size = None, *, dtype: DTypeLike = float
    ) -> Array:
        """Floats from the normal distribution."""
        drawn = random.normal(self.key(), _shape(size, loc, scale), dtype)
        return (bnp.asarray(loc) + bnp.asarray(scale) * drawn).astype(drawn.dtype)

    def integers(
        self, low: ArrayLike, high: ArrayLike | None = None, size: Size = None, *, dtype: DTypeLike = int
    ) -> Array:
        """Integers in [low, high), or in [0, low)."""
        low, high = (0, low) if high is None else (low, high)
        return random.randint(self.key(), _shape(size, low, high), low, high, dtype)

    def spawn(self, n_children: int) -> list[StatefulPRNG]:
        """Independent generators."""
        return [StatefulPRNG(key, new_ref(0)) for key in self.key(n_children)]

    def split(self, num: int | Sequence[int]) -> StatefulPRNG:
        """Independent generators in one object, which draws nothing itself."""
        return StatefulPRNG(self.key(num), new_ref(bnp.zeros(num, "int32")))


def stateful_rng(seed: ArrayLike | None = None, *, impl: Any = None) -> StatefulPRNG:
    """A generator with state from a seed; default: one of the operating system.

    Raises:
      UnsupportedError: ``impl`` names another generator than threefry2x32.
    """
    if impl not in (None, "threefry2x32", dtypes.key):
        raise errors.UnsupportedError(
            f"stateful_rng(impl={impl!r:.60}): there is one generator.", where=source.here()
        )
    return StatefulPRNG(random.key(secrets.randbits(31) if seed is None else seed), new_ref(0))
