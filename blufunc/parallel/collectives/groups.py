"""Collectives within groups of a named axis: ``axis_index_groups``.

Parallel, used at stage 2, below ``named``. In: a value, named axes, and a partition of their indices into groups. Out:
permutations along the axes and local operations, each with its derivative and its type, over axes of ``vmap`` and of a
mesh. In a group of g members each sends g - 1 times. Values are combined in the order of the members, so
all of a group have the same result, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import source
from blufunc.core.ir.axes import ints, sequence
from blufunc.core.ops.dynamic import dynamic_index_in_dim, dynamic_slice_in_dim
from blufunc.core.ops.elementwise import lt, select
from blufunc.core.ops.reduce import limit
from blufunc.core.ops.shape import concatenate, index_in_dim, iota
from blufunc.core.primitives.linear_ops import broadcast_in_dim, broadcast_to, reshape

Permute = Callable[[Any, tuple[tuple[int, int], ...]], Any]
"""``(x, pairs) -> x``: a ``ppermute`` along the axes."""


class Groups:
    """A partition of the ``n`` indices along an axis.

    Args:
      groups: lists of indices: each index is in one of them.
      n: the length of the axis.
      what: the collective, for messages.
      equal: whether the groups must be of one size.
    Attributes:
      size: the size of the largest group.
      sizes: per index the size of its group.
      places: per index its place in its group.
    """

    def __init__(self, groups: Any, n: int, what: str, equal: bool):
        self.groups = [
            ints(g, what, "axis_index_groups") for g in sequence(groups, what, "axis_index_groups", "groups")
        ]
        flat = [i for g in self.groups for i in g]
        if sorted(flat) != list(range(n)) or not all(self.groups):
            raise errors.ValueRangeError(
                f"{what}: axis_index_groups hold each index below {n} once, not {groups!r:.80}.",
                where=source.here(),
                fix="[[0, 1], [2, 3]] for the halves of an axis of length 4",
            )
        lengths = {len(g) for g in self.groups}
        if equal and len(lengths) > 1:
            raise errors.ValueRangeError(
                f"{what}: the groups of axis_index_groups have one size, not {sorted(lengths)}.",
                where=source.here(),
                why="the shape of the result is the same everywhere.",
                fix="psum, pmean, pmax and pmin take groups of different sizes",
            )
        self.size, self.equal = max(lengths), len(lengths) == 1
        self.sizes, self.places = [0] * n, [0] * n
        for g in self.groups:
            for place, i in enumerate(g):
                self.sizes[i], self.places[i] = len(g), place

    def table(self, values: Sequence[int], index: Any) -> Any:
        """The entry for the index along the axis, an int32."""
        return dynamic_index_in_dim(
            lift(np.asarray(values, np.int32)), index, keepdims=False, allow_negative_indices=False
        )

    def shift(self, offset: int) -> tuple[tuple[int, int], ...]:
        """From each member to the one ``offset`` places on; a ring in equal groups."""
        pairs = []
        for g in self.groups:
            for place, i in enumerate(g):
                to = place + offset
                if self.equal or 0 <= to < len(g):
                    pairs.append((i, g[to % len(g)]))
        return tuple(sorted(pairs))

    def members(self, x: Any, index: Any, permute: Permute) -> Any:
        """The values of all members of the group, [size, ...], padded by zeros."""
        last = self.size - 1
        if self.equal:
            around = [x, *(permute(x, self.shift(k)) for k in range(1, self.size))]
            window = [around[-k % self.size] for k in range(-last, self.size)]
        else:
            window = [permute(x, self.shift(-k)) if k else x for k in range(-last, self.size)]
        return self._from_first(window, index)

    def swapped(self, parts: Any, index: Any, permute: Permute) -> Any:
        """Send to each member its part of [size, ...]; those received, by sender."""
        doubled = concatenate([parts, parts], 0)
        place = self.table(self.places, index)
        onward = dynamic_slice_in_dim(
            doubled, place, self.size, allow_negative_indices=False
        )  # [k]: for the member k places on
        received = [
            permute(index_in_dim(onward, k, 0, keepdims=False), self.shift(k)) for k in range(self.size)
        ]
        last = self.size - 1
        return self._from_first([received[-k % self.size] for k in range(-last, self.size)], index)

    def _from_first(self, window: Sequence[Any], index: Any) -> Any:
        """Values from the first member on, of those up to ``size - 1`` places away."""
        rows = concatenate([reshape(x, (1, *x.aval.shape)) for x in window], 0)
        start = self.table([self.size - 1 - p for p in self.places], index)
        return dynamic_slice_in_dim(rows, start, self.size, allow_negative_indices=False)

    def without_padding(self, members: Any, index: Any, largest: bool) -> Any:
        """``members`` with, past the end of a smaller group, what an extremum ignores."""
        if self.equal:
            return members
        aval = members.aval
        there = lt(iota(np.dtype(np.int32), (self.size,), 0), self.table(self.sizes, index))
        nothing = broadcast_to(scalar(limit(aval.dtype, not largest), aval.dtype), aval.shape)
        return select(broadcast_in_dim(there, aval.shape, (0,)), members, nothing)
