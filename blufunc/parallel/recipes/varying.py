"""Rings of ranks, with collectives that can be used in custom derivative rules.

Shared by recipes. In: a mesh axis. Out: a ``Ring``. Custom rules are traced at differentiation, after types are
inferred (``collectives/axis_types.py``), so their collectives are written as typed equations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from blufunc import lax
from blufunc.parallel.collectives import primitives as ops
from blufunc.parallel.collectives.named import check_mesh_axes, of_vmaps


def ring_of(axis: str, what: str) -> Ring:
    """The ranks along a mesh axis of the current ``shard_map``.

    Raises:
      AxisNameError: no such axis, or the axis of a vmap.
    """
    size = lax.axis_size(axis)
    check_mesh_axes([axis], what)
    return Ring(axis, size)


def same_on_all(x: Any, axis: str) -> Any:
    """A pytree that must be replicated along a mesh axis; ShardingError if it varies."""
    return lax.pcast(x, axis, to="invariant") if not of_vmaps([axis]) else x


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ranks along one mesh axis, as a ring.

    Attributes:
      axis: the name.
      size: the number of ranks; stored, since rules cannot look up axes, which are bound only during tracing.
    """

    axis: str
    size: int

    @property
    def _over(self) -> dict[str, Any]:
        return {"axes": (self.axis,), "sizes": (self.size,)}

    def rank(self) -> Any:
        """The index of this rank, an int32."""
        return ops.mesh_axis_index_p.bind(**self._over)

    def following(self, step: int = 1) -> tuple[tuple[int, int], ...]:
        """The (from, to) pairs that shift values by ``step`` ranks."""
        return tuple([(i, (i + step) % self.size) for i in range(self.size)])

    def permute(self, x: Any, perm: Sequence[tuple[int, int]]) -> Any:
        """Send each rank's ``x`` along the pairs of ``perm``."""
        return ops.mesh_ppermute_p.bind(x, src="V", dst="V", perm=tuple(perm), **self._over)

    def gather(self, x: Any) -> Any:
        """Stack the values of all ranks along a new leading dimension."""
        return ops.mesh_all_gather_p.bind(x[None], src="V", dst="V", dim=0, **self._over)

    def scatter_sum(self, x: Any) -> Any:
        """Reduce-scatter: element ``rank`` of dimension 0 of the sum over the ranks."""
        return ops.mesh_psum_scatter_p.bind(x, src="V", dst="V", dim=0, **self._over)[0]
