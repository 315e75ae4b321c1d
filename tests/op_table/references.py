"""Reference definitions in NumPy and Python, where NumPy has no function.

Below ``tests/op_table/rows.py``, whose rows name them. Each is written from the definition and not from the code that
it
checks: element by element, in loops. In come NumPy arrays, and so do they go out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from blufunc.core.ir import dtypes

# -- numbers and axes ------------------------------------------------------------------------------


def integers(f: Callable[..., int]) -> Callable:
    """A reference by a function of Python integers and width, wrapped to the dtype."""

    def ref(*xs: np.ndarray) -> np.ndarray:
        d = np.asarray(xs[0]).dtype
        bits = d.itemsize * 8
        out = np.vectorize(lambda *v: f(*map(int, v), bits) % 2**bits, otypes=[object])(*xs)
        return out.astype(np.uint64).astype(f"u{d.itemsize}").view(d)

    return ref


def broadcast(shape, target, dims):
    """``broadcast_in_dim``, by repeating."""

    def ref(x):
        expanded = np.ones(len(target), int)
        expanded[list(dims)] = shape
        return np.tile(x.reshape(expanded), np.array(target) // expanded)

    return ref


def permuted(permutation):
    """``transpose``."""
    return lambda x: np.moveaxis(x, permutation, range(x.ndim))


def pad(config):
    """``pad``, with edges and interior, both perhaps negative."""

    def ref(x, value):
        """Element by element: where each one goes, if that is inside."""
        size = [lo + hi + n + max(n - 1, 0) * k for n, (lo, hi, k) in zip(x.shape, config, strict=True)]
        out = np.full(size, value)
        for i in np.ndindex(*x.shape):
            to = tuple(lo + j * (k + 1) for j, (lo, _, k) in zip(i, config, strict=True))
            if all(0 <= t < n for t, n in zip(to, size, strict=True)):
                out[to] = x[i]
        return out

    return ref


def over_axes(ufunc):
    """``ufunc.reduce`` over several axes."""
    return lambda x, axis: functools.reduce(
        lambda y, a: ufunc.reduce(y, axis=a), sorted(axis, reverse=True), x
    )


def cumulative(accumulate):
    """Each element of a line, with all before it, through ``accumulate``."""

    def ref(x, axis, reverse):
        x = np.flip(x, axis) if reverse else x
        slices = np.moveaxis(x, axis, 0)
        out = np.stack([functools.reduce(accumulate, slices[: i + 1]) for i in range(len(slices))], axis)
        return np.flip(out, axis) if reverse else out

    return ref


# -- sorting ---------------------------------------------------------------------------------------


def lexicographic(dimension, num_keys):
    """Stable sort of lines by their first ``num_keys`` operands."""

    def ref(*xs):
        order = np.lexsort([np.moveaxis(x, dimension, -1) for x in xs[num_keys - 1 :: -1]], -1)
        return [
            np.moveaxis(np.take_along_axis(np.moveaxis(x, dimension, -1), order, -1), -1, dimension)
            for x in xs
        ]

    return ref


def top(k):
    """The k largest and their positions, of equal ones the first."""

    def ref(x):
        index = np.argsort(-x, axis=-1, kind="stable")[..., :k]
        return [np.take_along_axis(x, index, -1), index]

    return ref


def place(x, index, dimension, size):
    """``place_along``, through a one-hot array."""
    one_hot = np.equal(np.expand_dims(index, dimension), np.expand_dims(
        np.arange(size).reshape([-1 if d == dimension else 1 for d in range(x.ndim)]), dimension + 1))  # fmt: skip
    return np.sum(np.expand_dims(x, dimension) * one_hot, dimension + 1)


# -- keys and random bits --------------------------------------------------------------------------


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry2x32 with 20 rounds, a word at a time."""
    mask = 2**32 - 1
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    a, b = ((c + k) & mask for c, k in zip(counter, key, strict=True))
    for i in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        a = (a + b) & mask
        b = a ^ ((b << r | b >> (32 - r)) & mask)
        if i % 4 == 3:
            n = i // 4 + 1
            a, b = (a + schedule[n % 3]) & mask, (b + schedule[(n + 1) % 3] + n) & mask
    return a, b


def keys(pairs, shape_) -> np.ndarray:
    """Keys from pairs of words."""
    return np.array(pairs, np.uint32).reshape(*shape_, 2).copy().view(dtypes.key)[..., 0]


def words(keys) -> list[tuple[int, int]]:
    """The two words of each key."""
    return [(int(k["hi"]), int(k["lo"])) for k in np.ravel(keys)]


def counted(shape_, emit):
    """``emit`` of the cipher of 0, 1, 2, ... under each key."""

    def ref(keys):
        blocks = [threefry(k, (0, i)) for k in words(keys) for i in range(math.prod(shape_))]
        return emit(blocks, keys.shape + shape_)

    return ref


# -- windows ---------------------------------------------------------------------------------------


def clamped(shape_, sizes, starts):
    """A window, moved so that it fits."""
    return tuple(
        slice(at, at + size)
        for n, size, s in zip(shape_, sizes, starts, strict=True)
        for at in [min(max(int(s), 0), n - size)]
    )


def updated(x, update, *starts):
    """``dynamic_update_slice``."""
    x = x.copy()
    x[clamped(x.shape, update.shape, starts)] = update
    return x


@dataclass(frozen=True)
class Windows:
    """Gather and scatter addressing: dimension numbers, and a definition in loops.

    Attributes:
      shape, indices: of the operand and of the index array.
      sizes: of a window, per axis of the operand.
      window: the axes of the result (or updates) that run within a window.
      dropped: operand axes that the result does not have.
      moved: the operand axis of each component of an index.
      along, indices_along: axes of operand and indices that go together.
      mode: what becomes of windows outside.
      low, high: the range of the indices.
    """

    shape: tuple[int, ...]
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    window: tuple[int, ...]
    dropped: tuple[int, ...]
    moved: tuple[int, ...]
    along: tuple[int, ...] = ()
    indices_along: tuple[int, ...] = ()
    mode: str = "clip"
    low: int = 0
    high: int = 2
    distinct: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """The sizes of a window without the axes that the result lacks."""
        removed = {*self.dropped, *self.along}
        return tuple(n for i, n in enumerate(self.sizes) if i not in removed)

    def result(self) -> tuple[int, ...]:
        """The shape of what is gathered, or of the updates."""
        batch, kept = list(self.indices[:-1]), list(self.kept)
        rank = len(batch) + len(kept)
        return tuple(kept.pop(0) if i in self.window else batch.pop(0) for i in range(rank))

    def places(self, indices):
        """For each batch position the window's slices; None if it is dropped."""
        for b in np.ndindex(*self.indices[:-1]):
            at = [0] * len(self.shape)
            for axis, i in zip(self.moved, indices[b], strict=True):
                at[axis] = int(i)
            for axis, k in zip(self.along, self.indices_along, strict=True):
                at[axis] = b[k]
            window = clamped(self.shape, self.sizes, at)
            inside = all(s.start == i for s, i in zip(window, at, strict=True))
            yield b, window if inside or self.mode == "clip" else None

    def front(self, x):
        """Updates with their window axes last."""
        n = len(self.indices) - 1
        return np.moveaxis(x, self.window, range(n, n + len(self.window)))

    def gather(self, x, indices, fill):
        out = np.full(self.indices[:-1] + self.kept, fill, x.dtype)
        for b, window in self.places(indices):
            if window is not None:
                out[b] = x[window].reshape(self.kept)
        n = len(self.indices) - 1
        return np.moveaxis(out, range(n, out.ndim), self.window)

    def scatter(self, x, indices, updates, combine):
        out, updates = x.copy(), self.front(updates)
        for b, window in self.places(indices):
            if window is not None:
                out[window] = combine(out[window], updates[b].reshape(out[window].shape))
        return out
