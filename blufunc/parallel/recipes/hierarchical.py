"""Collectives over two levels of links: within a host, and between hosts.

A face, for use inside ``shard_map``. In: a value, and mesh axes of which the last has the faster links. Out: what the
collective over all of them returns, by one collective over each level. What crosses the slow links is then a shard of
the fast level: 1 / n of the bytes for n ranks on each host, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.axes import axis_in

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def hierarchical_all_gather(x: ArrayLike, axis: Sequence[str], *, dim: int = 0) -> Array:
    """``lax.all_gather(x, axis, axis=dim, tiled=True)``, level by level.

    For use inside ``shard_map``. Each rank sends its shard to other hosts, then what its host has received within the
    host. The order of the parts is that of the collective over all axes. The cotangent is reduce-scattered level by
    level.

    Args:
      x: this rank's part.
      axis: mesh axes, such as ``("host", "device")``. The last is the level within a host.
      dim: the dimension along which parts are concatenated; default 0.
    Raises:
      ArgumentError: ``axis`` is not several axes, or has one twice.
      ValueRangeError: there is no such dimension.
    """
    x = bnp.asarray(x)
    outer, inner = levels(axis, "hierarchical_all_gather")
    d = axis_in(dim, x.ndim, "hierarchical_all_gather")
    parts = lax.all_gather(lax.all_gather(x, outer, axis=d), inner, axis=d + 1)
    n = parts.shape[d] * parts.shape[d + 1] * x.shape[d]  # -1 would be ambiguous for empty arrays
    return parts.reshape(*x.shape[:d], n, *x.shape[d + 1 :])


def hierarchical_psum_scatter(x: ArrayLike, axis: Sequence[str], *, dim: int = 0) -> Array:
    """``lax.psum_scatter(x, axis, tiled=True)`` along ``dim``, level by level.

    For use inside ``shard_map``. Ranks of a host add first, and sums of a shard go to other hosts. A rank gets the part
    that it gets from the collective over all axes; terms are added in another order.

    Args:
      x: this rank's term.
      axis: mesh axes, such as ``("host", "device")``. The last is the level within a host.
      dim: the dimension that is scattered; default 0.
    Raises:
      ArgumentError: ``axis`` is not several axes, or has one twice.
      ShapeError: the dimension is not a multiple of the ranks.
      ValueRangeError: there is no such dimension.
    """
    x = bnp.asarray(x)
    outer, inner = levels(axis, "hierarchical_psum_scatter")
    d = axis_in(dim, x.ndim, "hierarchical_psum_scatter")
    hosts, ranks = lax.axis_size(outer), lax.axis_size(inner)
    check_multiple(x, d, hosts * ranks, "hierarchical_psum_scatter")
    part = x.shape[d] // (hosts * ranks)
    parts = x.reshape(*x.shape[:d], hosts, ranks, part, *x.shape[d + 1 :])
    return lax.psum_scatter(
        lax.psum_scatter(parts, inner, scatter_dimension=d + 1), outer, scatter_dimension=d
    )


def hierarchical_psum(x: ArrayLike, axis: Sequence[str]) -> Array:
    """``lax.psum(x, axis)``, level by level.

    For use inside ``shard_map``: a reduce-scatter within each host, an all-reduce of the shards between hosts, and an
    all-gather within each host. Terms are added in another order.

    Args:
      x: this rank's term.
      axis: mesh axes, such as ``("host", "device")``. The last is the level within a host.
    Raises:
      ArgumentError: ``axis`` is not several axes, or has one twice.
    """
    x = bnp.asarray(x)
    outer, inner = levels(axis, "hierarchical_psum")
    ranks = lax.axis_size(inner)
    flat = x.reshape(-1)
    flat = bnp.pad(flat, (0, -x.size % ranks))
    shard = lax.psum(lax.psum_scatter(flat, inner, tiled=True), outer)
    return lax.all_gather(shard, inner, tiled=True, to="invariant")[: x.size].reshape(x.shape)


def levels(axis: Any, what: str) -> tuple[tuple[str, ...], str]:
    """The axes between hosts, and the one within a host."""
    axes = axes_of(axis, what)
    if len(axes) < 2:
        raise errors.ArgumentError(
            f"{what} takes axes of two levels, not {axis!r:.60}.",
            where=source.here(),
            why="it communicates within a host, then between hosts.",
            fix="axis=('host', 'device'), of a mesh with these axes",
        )
    return axes[:-1], axes[-1]


def axes_of(axis: Any, what: str) -> tuple[str, ...]:
    """One mesh axis, or several, as a tuple."""
    axes = (axis,) if isinstance(axis, str) or not isinstance(axis, Sequence) else tuple(axis)
    if not all(isinstance(a, str) for a in axes):
        wrong, why = f"takes names of mesh axes, not {axis!r:.60}", ""
    elif len({*axes}) < len(axes):
        wrong, why = f"takes each axis once, not {axis!r:.60}", "its ranks would be counted twice."
    else:
        return axes
    raise errors.ArgumentError(
        f"{what} {wrong}.",
        where=source.here(),
        why=why,
        fix="axis=('host', 'device'), of a mesh with these axes",
    )


def check_multiple(x: Any, dim: int, ranks: int, what: str) -> None:
    """Raise ShapeError unless a dimension can be scattered."""
    if x.shape[dim] % ranks:
        raise errors.ShapeError(
            f"{what}: dimension {dim} of {x.aval} cannot be split among {ranks} ranks.",
            where=source.here(),
            fix=f"make it a multiple of {ranks}",
        )
