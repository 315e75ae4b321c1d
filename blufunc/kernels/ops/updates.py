"""Updates of a part of an array in place, which only rewrites make.

Kernels, below the rewrites. A ``dynamic_update_slice`` that fuses computes every element of its result; as a step of
its own it writes the window alone, if the array dies with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops.dynamic import dynamic_update_slice_p
from blufunc.core.primitives.primitive import Primitive


class _UpdateInPlace(Primitive):
    """``dynamic_update_slice`` as a step of its own."""

    name, kind, fresh = "dynamic_update_slice+in_place", "index", True

    def impl(self, x, update, *starts, **params):
        return dynamic_update_slice_p.impl(x, update, *starts, **params)

    def abstract(self, x, update, *starts, **params) -> ShapedArray:
        return dynamic_update_slice_p.abstract(x, update, *starts, **params)


update_in_place_p = _UpdateInPlace()

UPDATES = (update_in_place_p,)
"""The primitives that update one array."""


class _JoinedUpdates(Primitive):
    """Updates of several arrays as one step: the operands of each, array after array."""

    name, kind, fresh, multiple_results = "dynamic_update_slices+in_place", "index", True, True

    def impl(self, *operands, **params):
        return [dynamic_update_slice_p.impl(*own, **params) for own in operands_of(operands)]

    def abstract(self, *operands, **params) -> list[ShapedArray]:
        return [dynamic_update_slice_p.abstract(*own, **params) for own in operands_of(operands)]


joined_updates_p = _JoinedUpdates()


def operands_of(operands: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The operands of each update: an array, what to write, and a start per axis.

    ``operands`` are those of all, as variables, types or arrays.
    """
    first = 0
    while first < len(operands):
        count = 2 + len(getattr(operands[first], "aval", operands[first]).shape)
        yield operands[first : first + count]
        first += count
