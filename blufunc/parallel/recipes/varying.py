"""The ranks of a mesh axis as functions of shards need them: what they share, and typed collectives for rules.

A face's foundation. The rules of a function are traced when it is differentiated, where nothing finds types any more
(``parallel.axis_types``); so what they exchange is written as typed equations at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.trace import state
from blufunc.parallel.collectives import primitives as ops
from blufunc.transforms.batching.batch import MeshAxis, NamedAxis


def ring_of(axis: str, what: str) -> Ring:
    """The ranks along an axis of the mesh of the ``shard_map`` that is being traced.

    Raises:
      AxisNameError: there is no such axis, or it is one of a vmap.
    """
    size = lax.axis_size(axis)
    if not _of_mesh(axis):
        raise errors.AxisNameError(
            f"{what} over {axis!r:.60}, which is an axis of a vmap.",
            where=source.here(),
            fix="use shard_map over a mesh with that axis",
        )
    return Ring(axis, size)


def same_on_all(x: Any, axis: str) -> Any:
    """A pytree that must be the same on all ranks along an axis of a mesh; a ShardingError if it varies."""
    return lax.pcast(x, axis, to="invariant") if _of_mesh(axis) else x


def _of_mesh(axis: str) -> bool:
    """Whether the innermost axis of a name is one of a mesh."""
    named = (e for e in reversed(state.context) if isinstance(e, NamedAxis) and e.name == axis)
    return isinstance(next(named, None), MeshAxis)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ranks along one axis of a mesh, in a circle.

    Attributes:
      axis: the name.
      size: how many there are: rules cannot ask, since axes have names only while a function is traced.
    """

    axis: str
    size: int

    @property
    def _over(self) -> dict[str, Any]:
        return {"axes": (self.axis,), "sizes": (self.size,)}

    def rank(self) -> Any:
        """The place of this rank, an int32."""
        return ops.mesh_axis_index_p.bind(**self._over)

    def following(self, step: int = 1) -> tuple[tuple[int, int], ...]:
        """The pairs (from, to) that send each value ``step`` ranks on."""
        return tuple([(i, (i + step) % self.size) for i in range(self.size)])

    def permute(self, x: Any, perm: Sequence[tuple[int, int]]) -> Any:
        """Each rank's ``x`` sent along the pairs of ``perm``."""
        return ops.mesh_ppermute_p.bind(x, src="V", dst="V", perm=tuple(perm), **self._over)

    def gather(self, x: Any) -> Any:
        """The values of all ranks, along a new dimension in front."""
        return ops.mesh_all_gather_p.bind(x[None], src="V", dst="V", dim=0, **self._over)

    def scatter_sum(self, x: Any) -> Any:
        """Of the sum over the ranks, the element of dimension 0 that has this rank's number."""
        return ops.mesh_psum_scatter_p.bind(x, src="V", dst="V", dim=0, **self._over)[0]
