"""Updates of a part of an array in place, which only rewrites make.

Kernels, below the rewrites. A ``dynamic_update_slice`` that fuses computes every element of its result; as a step of
its own it writes the window alone, if the array dies with it.
"""

from __future__ import annotations

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
"""The primitives of this file."""
