"""Resharding: move a value from one layout to another.

Parallel, stage 3, below ``partition.py``. In: a ``Shard``, one device's part of a global value. Out: another ``Shard``
of it; collectives and local slices are staged into the local program:

    sharded -> whole                        all_gather
    whole -> sharded                        a local slice
    one dimension -> another, same axis     all_to_all
    unreduced -> whole                      all_reduce (psum_invariant)
    unreduced -> sharded                    reduce_scatter

A dimension of n elements on p devices has shards of ``ceil(n / p)`` elements, of which the last may be padded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.dynamic import dynamic_slice_p
from blufunc.core.ops.shape import iota_p, pad_p, slice_p
from blufunc.core.primitives.linear_ops import broadcast_to
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisSizes
from blufunc.parallel.mesh.spec import PartitionSpec, names_of

Axes = tuple[str, ...]
Layout = tuple[Axes, ...]
"""For each dimension the mesh axes that shard it, major first."""


def layout_of(spec: PartitionSpec, ndim: int, mesh: AxisSizes) -> Layout:
    """The layout of a spec; mesh axes of size 1 are dropped."""
    return tuple(tuple(a for a in names_of(e) if mesh.shape[a] > 1) for e in spec.for_rank(ndim))


_COLLECTIVES = {"sum": mc.psum_invariant_p, "max": mc.pmax_invariant_p, "min": mc.pmin_invariant_p}


@dataclass(frozen=True)
class Shard:
    """One device's part of a value.

    Attributes:
      value: a tracer of the local program.
      aval: the global type.
      layout: the mesh axes of each dimension.
      unreduced: the axes over which the value is a sum over the devices.
      zero: True if the value is known to be 0 everywhere.
    """

    value: Any
    aval: ShapedArray
    layout: Layout
    unreduced: frozenset[str] = frozenset()
    zero: bool = False


class Resharder:
    """Stages the operations that reshard values on ``mesh``.

    Args:
      manual: axes of a ``shard_map`` around the program.
    """

    def __init__(self, mesh: AbstractMesh, manual: frozenset[str] = frozenset()):
        self.mesh, self.manual = mesh, manual

    def parts(self, axes: Axes) -> int:
        """The number of devices along ``axes``."""
        return self.mesh.size_of(axes)

    def share(self, n: int, axes: Axes) -> int:
        """The size of a shard of a dimension of ``n`` elements."""
        return -(-n // self.parts(axes))

    def local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """The shape of the shards of a value of a global shape."""
        return tuple(self.share(n, axes) for n, axes in zip(shape, layout, strict=True))

    def over(self, axes: Axes) -> dict[str, Any]:
        """The parameters of a collective over ``axes``."""
        return {"axes": axes, "sizes": tuple(self.mesh.shape[a] for a in axes)}

    def start(self, n: int, axes: Axes, dtype: np.dtype = dtypes.int32) -> Any:
        """The index of this device's first element along a dimension of ``n``."""
        index = ew.convert(mc.mesh_axis_index_p.bind(**self.over(axes)), dtype)
        return ew.mul(index, scalar(self.share(n, axes), dtype))

    # -- one step --------------------------------------------------------------------------------

    def reduce(self, x: Any, axes: Axes, how: str = "sum", src: str = "V") -> Any:
        """Reduce ``x`` over ``axes``."""
        return _COLLECTIVES[how].bind(x, src=src, dst="I", **self.over(axes)) if axes else x

    def inside(self, x: Any, n: int, dim: int, axes: Axes, other: Any) -> Any:
        """Replace the padding of a dimension of ``n`` elements by ``other``."""
        shape = x.aval.shape
        position = iota_p.bind(dtype=dtypes.int32, shape=shape, dimension=dim)
        valid = ew.lt(ew.add(position, broadcast_to(self.start(n, axes), shape)), scalar(n, dtypes.int32))
        return ew.select(valid, x, broadcast_to(scalar(other, x.aval.dtype), shape))

    def sized(self, x: Any, dim: int, size: int) -> Any:
        """Truncate or pad dimension ``dim`` at the end to ``size``."""
        shape = x.aval.shape
        if size == shape[dim]:
            return x
        if size < shape[dim]:
            limits = tuple(size if d == dim else n for d, n in enumerate(shape))
            return slice_p.bind(x, start_indices=(0,) * len(shape), limit_indices=limits, strides=None)
        config = tuple((0, (size - n) * (d == dim), 0) for d, n in enumerate(shape))
        return pad_p.bind(x, scalar(np.zeros((), x.aval.dtype)[()], x.aval.dtype), padding_config=config)

    def divide(self, x: Any, dim: int, n: int, axes: Axes) -> Any:
        """This device's share of dimension ``dim``, whole and of ``n`` elements."""
        size = self.share(n, axes)
        x = self.sized(x, dim, size * self.parts(axes))
        if x.aval.dtype == dtypes.key:
            starts = [scalar(0, dtypes.int32)] * x.aval.ndim
            starts[dim] = self.start(n, axes)
            sizes = tuple(size if d == dim else m for d, m in enumerate(x.aval.shape))
            return dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)
        return mc.shard_slice_p.bind(x, src="I", dst="V", dim=dim, **self.over(axes))

    def gather(self, x: Any, dim: int, n: int, axes: Axes) -> Any:
        """Gather dimension ``dim`` of ``n`` elements."""
        x = mc.mesh_all_gather_p.bind(x, src="V", dst="I", dim=dim, **self.over(axes))
        return self.sized(x, dim, n)

    # -- from one layout to another --------------------------------------------------------------

    def nests(self, n: int, outer: Axes, inner: Axes) -> bool:
        """True if sharding along ``outer``, then ``inner``, gives the shards along both."""
        return not outer or self.share(n, outer) == self.share(n, outer + inner) * self.parts(inner)

    def move(self, x: Shard, layout: Layout, unreduced: frozenset[str] = frozenset()) -> Shard:
        """Reshard ``x`` to ``layout``, with sums pending over at most ``unreduced``."""
        x = self._reduce_pending(x, layout, unreduced)
        x = self._swap(x, layout)
        for dim, (n, now, then) in enumerate(zip(x.aval.shape, x.layout, layout, strict=True)):
            prefix = _common(now, then)
            if prefix and not (
                self.nests(n, prefix, now[len(prefix) :]) and self.nests(n, prefix, then[len(prefix) :])
            ):
                prefix = ()
            size = self.share(n, prefix)
            value = x.value
            if now[len(prefix) :]:
                value = self.gather(value, dim, size, now[len(prefix) :])
            x = _with(x, value, dim, prefix)
        for dim, (n, now, then) in enumerate(zip(x.aval.shape, x.layout, layout, strict=True)):
            if then != now:
                size = self.share(n, now)
                x = _with(x, self.divide(x.value, dim, size, then[len(now) :]), dim, then)
        return x

    def cost(self, x: Shard, layout: Layout, unreduced: frozenset[str]) -> int:
        """An upper bound on the number of collectives of ``move``."""
        pairs = zip(x.layout, layout, strict=True)
        return sum(now != then[: len(now)] for now, then in pairs) + len(x.unreduced - unreduced)

    def _reduce_pending(self, x: Shard, layout: Layout, unreduced: frozenset[str]) -> Shard:
        """Reduce sums that may not stay unreduced; scatter where their axes shard."""
        pending = x.unreduced - unreduced
        for dim, (n, now, then) in enumerate(zip(x.aval.shape, x.layout, layout, strict=True)):
            more = then[len(now) :]
            if (
                now != then[: len(now)]
                or not more
                or not pending.issuperset(more)
                or not self.nests(n, now, more)
            ):
                continue
            size = self.share(n, now)
            value = self.sized(x.value, dim, self.share(size, more) * self.parts(more))
            value = mc.mesh_psum_scatter_p.bind(value, src="U", dst="V", dim=dim, **self.over(more))
            x = replace(_with(x, value, dim, then), unreduced=x.unreduced - {*more})
            pending -= {*more}
        if pending:
            axes = tuple(a for a in self.mesh.axis_names if a in pending)
            x = replace(x, value=self.reduce(x.value, axes, src="U"), unreduced=x.unreduced - pending)
        return x

    def _swap(self, x: Shard, layout: Layout) -> Shard:
        """All-to-all, if the last axes of one dimension move to the end of another."""
        for source, now in enumerate(x.layout):
            then = layout[source]
            moved = now[len(then) :]
            if not moved or now[: len(then)] != then:
                continue
            for dim, (have, want) in enumerate(zip(x.layout, layout, strict=True)):
                n, m = x.aval.shape[source], x.aval.shape[dim]
                if want != have + moved or not (self.nests(n, then, moved) and self.nests(m, have, moved)):
                    continue
                value = self.sized(x.value, dim, self.share(m, want) * self.parts(moved))
                value = mc.mesh_all_to_all_p.bind(
                    value, src="V", dst="V", split_dim=dim, concat_dim=source, **self.over(moved)
                )
                value = self.sized(value, source, self.share(n, then))
                x = _with(_with(x, value, source, then), value, dim, want)
                break
        return x


def _with(x: Shard, value: Any, dim: int, axes: Axes) -> Shard:
    layout = (*x.layout[:dim], axes, *x.layout[dim + 1 :])
    return replace(x, value=value, layout=layout)


def _common(a: Axes, b: Axes) -> Axes:
    """The common prefix of two tuples of axes."""
    return tuple(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
