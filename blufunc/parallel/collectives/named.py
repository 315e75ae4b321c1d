"""Collectives over named axes: ``psum``, ``all_gather``, ``ppermute``, ...

Parallel, used at stage 2. In: ``lax.psum(x, "i")`` inside a function that ``vmap`` maps over the axis ``i``, or that
``shard_map`` runs. Out: an equation. The batching rule for the axis of that name replaces the collective by an ordinary
operation on all elements of the axis.

Transposes treat all elements of the axis together, as JAX's ``vmap`` does: the cotangent of a sum goes to every term,
so ``psum`` is its own transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import axis_in, ints, sequence
from blufunc.core.ir.trace import state
from blufunc.core.ops.elementwise import add, convert, div, eq, mul
from blufunc.core.ops.reduce import reduce_max, reduce_min
from blufunc.core.ops.shape import concatenate, iota, slice_in_dim
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import batched_front, move_dim, reduce_sum, reshape, zeros
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.groups import Groups
from blufunc.parallel.collectives.primitives import WORDS, mesh_all_gather_p
from blufunc.transforms.batching.batch import MeshAxis, NamedAxis

if TYPE_CHECKING:
    from blufunc.core.ir.trace import Array

T = TypeVar("T")

_UNBOUND = "it only has a meaning inside of the vmap that names its axis"


class Collective(Primitive):
    """Base of operations over the named axes ``axes``, of lengths ``sizes``."""

    kind, communicates = "collective", True
    impl = unsupported(_UNBOUND)

    def axes_of(self, params):
        return params["axes"]

    def jvp(self, primals, tangents, **params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        return out, zero(out.aval) if t.__class__ is Zero else self.bind(t, **params)


class _Reduce(Collective):
    """A reduction over axes, with the same result at every element."""

    widens = True

    def __init__(self, name: str, reduce: Callable, repeated: Callable, types: str):
        super().__init__(name)
        self.reduce, self.repeated, self.types = reduce, repeated, types

    def abstract(self, x, *, axes, sizes):
        check_types(self.name, self.types, x)
        return x.strong()

    def batch(self, axis, args, dims, *, axes, sizes):
        (x,), (d,) = args, dims
        if axis.name not in axes:
            return self.bind(x, axes=axes, sizes=sizes), d
        x = self.repeated(x, axis.size) if d is None else self.reduce(x, (d,))
        rest = [(a, n) for a, n in zip(axes, sizes, strict=True) if a != axis.name]
        if rest:
            x = self.bind(x, axes=tuple(a for a, _ in rest), sizes=tuple(n for _, n in rest))
        return x, None


class _Sum(_Reduce):
    """The sum, which is linear."""

    def transpose(self, ct, x, **params):
        x.add(self.bind(ct, **params))


class _Extremum(_Reduce):
    """The maximum or minimum; tied elements share its derivative equally."""

    def jvp(self, primals, tangents, **params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        if t.__class__ is Zero:
            return out, zero(out.aval)
        chosen = convert(eq(x, out), x.aval.dtype)
        total, count = (psum_p.bind(a, **params) for a in (mul(t, chosen), chosen))
        return out, div(total, count)

    transpose = unsupported("it is not linear: it is transposed through its derivative")


class _AllGather(Collective):
    """The elements of an axis along a new dimension ``dim``."""

    def abstract(self, x, *, axes, sizes, dim):
        return ShapedArray((*x.shape[:dim], math.prod(sizes), *x.shape[dim:]), x.dtype)

    def transpose(self, ct, x, *, axes, sizes, dim):
        x.add(psum_scatter_p.bind(ct, axes=axes, sizes=sizes, dim=dim))

    def batch(self, axis, args, dims, *, axes, sizes, dim):
        (x,), (d,) = args, dims
        if axis.name in axes:
            return move_dim(batched_front(axis, x, d), 0, dim), None
        return self.bind(move_dim(x, d, 0), axes=axes, sizes=sizes, dim=dim + 1), 0


class _SumScatter(Collective):
    """The sum over an axis; each element gets its slice along ``dim``."""

    def abstract(self, x, *, axes, sizes, dim):
        return ShapedArray(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)

    def transpose(self, ct, x, *, axes, sizes, dim):
        x.add(all_gather_p.bind(ct, axes=axes, sizes=sizes, dim=dim))

    def batch(self, axis, args, dims, *, axes, sizes, dim):
        (x,), (d,) = args, dims
        if axis.name in axes:
            total = _times(x, axis.size) if d is None else reduce_sum(x, (d,))
            return total, dim
        return self.bind(move_dim(x, d, 0), axes=axes, sizes=sizes, dim=dim + 1), 0


class _AllToAll(Collective):
    """Transpose of slices and elements: element k gets slice k of every element.

    The slices along ``split`` are stacked along a new dimension ``join``.
    """

    def abstract(self, x, *, axes, sizes, split, join):
        rest = x.shape[:split] + x.shape[split + 1 :]
        return ShapedArray((*rest[:join], math.prod(sizes), *rest[join:]), x.dtype)

    def transpose(self, ct, x, *, axes, sizes, split, join):
        x.add(self.bind(ct, axes=axes, sizes=sizes, split=join, join=split))

    def batch(self, axis, args, dims, *, axes, sizes, split, join):
        (x,), (d,) = args, dims
        x = batched_front(axis, x, d)
        if axis.name in axes:
            x = move_dim(x, split + 1, 0)
            return move_dim(x, 1, join + 1), 0
        return self.bind(x, axes=axes, sizes=sizes, split=split + 1, join=join + 1), 0


class _Permute(Collective):
    """Send values by (src, dst) pairs of ``perm``; zeros without a source."""

    def abstract(self, x, *, axes, sizes, perm):
        return x.strong()

    def transpose(self, ct, x, *, axes, sizes, perm):
        x.add(self.bind(ct, axes=axes, sizes=sizes, perm=tuple((dst, src) for src, dst in perm)))

    def batch(self, axis, args, dims, *, axes, sizes, perm):
        (x,), (d,) = args, dims
        if axis.name not in axes:
            return self.bind(x, axes=axes, sizes=sizes, perm=perm), d
        x = batched_front(axis, x, d)
        source_of = {dst: src for src, dst in perm}
        nothing = zeros(x.aval.with_shape((1, *x.aval.shape[1:])))
        rows = [
            slice_in_dim(x, source_of[i], source_of[i] + 1) if i in source_of else nothing
            for i in range(axis.size)
        ]
        return concatenate(rows, 0), 0


class _AxisIndex(Collective):
    """The index along an axis, an int32."""

    communicates = False
    jvp = unsupported("it has no operands")
    transpose = unsupported("it has no operands")

    def abstract(self, *, axes, sizes):
        return ShapedArray((), np.dtype(np.int32))

    def batch(self, axis, args, dims, *, axes, sizes):
        return iota(np.dtype(np.int32), (axis.size,), 0), 0


class _CastTo(Collective):
    """The same value with another type over mesh axes (see ``primitives``)."""

    communicates = False
    transpose = unsupported("casts are inserted before differentiation")

    def abstract(self, x, *, axes, sizes, to):
        if to == "U":
            check_types("pcast to unreduced", "number", x)
        return x

    def batch(self, axis, args, dims, **params):
        return self.bind(*args, **params), dims[0]


def _times(x: Any, n: int) -> Any:
    return mul(x, scalar(n, x.aval.dtype))


psum_p = _Sum("psum", reduce_sum, _times, "number")
pmax_p = _Extremum("pmax", reduce_max, lambda x, n: x, "ordered")
pmin_p = _Extremum("pmin", reduce_min, lambda x, n: x, "ordered")
all_gather_p = _AllGather("all_gather")
psum_scatter_p = _SumScatter("psum_scatter")
all_to_all_p = _AllToAll("all_to_all")
ppermute_p = _Permute("ppermute")
axis_index_p = _AxisIndex("axis_index")
cast_to_p = _CastTo("cast_to")

# -- functions -------------------------------------------------------------------------------------

AxisName = Hashable
IndexGroups = Sequence[Sequence[int]] | None
"""``axis_index_groups``: a partition of the indices, with a collective for each."""


def psum(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: IndexGroups = None) -> T:
    """Sum over one or several named axes (none: ``x``); ``x`` is a pytree.

    Integers keep their dtype, bools sum to int32, and a Python scalar gives a Python scalar.

    Args:
      axis_index_groups: lists of indices along the axis, each index in one: the sum runs in each group by itself. Also
        of the other collectives, of which some need groups of one size.
    """
    within = _Within.of(axis_name, "psum", axis_index_groups, equal=False)
    axes, sizes = _axes(axis_name, "psum")

    def one(v):
        if isinstance(v, (int, float, complex)) and (within is None or within.groups.equal):
            return v * (math.prod(sizes) if within is None else within.groups.size)
        v = lift(v)
        v = convert(v, np.dtype(np.int32)) if dtypes.is_bool(v.aval.dtype) else v
        return _bound(psum_p, v, axes, sizes) if within is None else within.sum(v)

    return tree.map(one, x)


def pmean(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: IndexGroups = None) -> T:
    """Mean over one or several named axes of a pytree, float32 for integers and bools."""
    within = _Within.of(axis_name, "pmean", axis_index_groups, equal=False)
    axes, sizes = _axes(axis_name, "pmean")

    def one(v):
        v = lift(v)
        if not dtypes.is_inexact(v.aval.dtype):
            v = convert(v, np.dtype(np.float32))
        if within is None:
            return div(_bound(psum_p, v, axes, sizes), math.prod(sizes))
        return div(within.sum(v), convert(within.size, v.aval.dtype))

    return tree.map(one, x)


def pmax(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: IndexGroups = None) -> T:
    """Maximum over one or several named axes; ``x`` is a pytree."""
    within = _Within.of(axis_name, "pmax", axis_index_groups, equal=False)
    axes, sizes = _axes(axis_name, "pmax")
    if within is not None:
        return tree.map(lambda v: within.extremum(lift(v), largest=True), x)
    return tree.map(lambda v: _bound(pmax_p, lift(v), axes, sizes), x)


def pmin(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: IndexGroups = None) -> T:
    """Minimum over one or several named axes; ``x`` is a pytree."""
    within = _Within.of(axis_name, "pmin", axis_index_groups, equal=False)
    axes, sizes = _axes(axis_name, "pmin")
    if within is not None:
        return tree.map(lambda v: within.extremum(lift(v), largest=False), x)
    return tree.map(lambda v: _bound(pmin_p, lift(v), axes, sizes), x)


def all_gather(
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    *,
    axis_index_groups: IndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> T:
    """Gather the values along a named axis into every element.

    ``axis_name`` may be several axes, in row-major order, as in the functions below.

    Args:
      axis: the new dimension; or, if ``tiled``, the dimension along which values are concatenated.
      to: over mesh axes the type of the result: ``varying``; ``invariant``, whose cotangent is sliced; or ``reduced``,
        whose cotangent is reduce-scattered.
    """
    within = _Within.of(axis_name, "all_gather", axis_index_groups)
    axes, sizes = _axes(axis_name, "all_gather", some=True)
    letter = _letter(to, "VIR", "all_gather")
    if letter != "V":
        check_mesh_axes(axes, "all_gather(to=...)")
        if within is not None:
            raise errors.UnsupportedError(
                f"all_gather(to={to!r}) within groups: other groups have other values.",
                where=source.here(),
                fix="leave to= out",
            )

    def one(v):
        v = lift(v)
        dim = axis_in(axis, v.aval.ndim + (not tiled), "all_gather")
        if letter != "V":
            row = reshape(v, v.aval.shape if tiled else (*v.aval.shape[:dim], 1, *v.aval.shape[dim:]))
            return mesh_all_gather_p.bind(row, axes=axes, sizes=sizes, src="V", dst=letter, dim=dim)
        if within is not None:
            out = move_dim(within.members(v), 0, dim)
        else:
            out = v
            for names, lengths in reversed(_joint(axes, sizes)):  # the first is the outermost
                out = all_gather_p.bind(out, axes=names, sizes=lengths, dim=dim)
            shape = v.aval.shape
            out = reshape(out, (*shape[:dim], math.prod(sizes), *shape[dim:]))
        return _merged(out, dim) if tiled else out

    return tree.map(one, x)


def psum_scatter(
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    *,
    scatter_dimension: int = 0,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
) -> T:
    """Sum over a named axis; each element gets its slice along ``scatter_dimension``.

    That dimension has the size of the axis and is removed; or, if ``tiled``, is a multiple of it and is split.
    """
    within = _Within.of(axis_name, "psum_scatter", axis_index_groups)
    axes, sizes = _axes(axis_name, "psum_scatter", some=True)
    n = math.prod(sizes) if within is None else within.groups.size

    def one(v):
        v = lift(v)
        dim = axis_in(scatter_dimension, v.aval.ndim, "psum_scatter")
        v = _parts(v, dim, n, tiled, "psum_scatter")
        if within is not None:
            return reduce_sum(within.swapped(move_dim(v, dim, 0)), (0,))
        joint = _joint(axes, sizes)
        shape = v.aval.shape
        v = reshape(v, (*shape[:dim], *(math.prod(lengths) for _, lengths in joint), *shape[dim + 1 :]))
        for names, lengths in joint:
            v = psum_scatter_p.bind(v, axes=names, sizes=lengths, dim=dim)
        return v

    return tree.map(one, x)


def all_to_all(
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
) -> T:
    """Swap slices: element k gets slice k along ``split_axis`` of all elements.

    The split dimension has the size of the axis and is removed, and slices are stacked along a new ``concat_axis``; or,
    if ``tiled``, the first is split and the second extended.
    """
    within = _Within.of(axis_name, "all_to_all", axis_index_groups)
    axes, sizes = _axes(axis_name, "all_to_all", some=True)
    n = math.prod(sizes) if within is None else within.groups.size

    def one(v):
        v = lift(v)
        split, join = (axis_in(a, v.aval.ndim, "all_to_all") for a in (split_axis, concat_axis))
        v = _parts(v, split, n, tiled, "all_to_all")
        joint = _joint(axes, sizes)
        if within is not None:
            out = move_dim(within.swapped(move_dim(v, split, 0)), 0, join)
        elif len(joint) == 1:
            out = all_to_all_p.bind(v, axes=axes, sizes=sizes, split=split, join=join)
        else:
            out = move_dim(v, split, 0)
            rest = out.aval.shape[1:]
            out = reshape(out, (*(math.prod(lengths) for _, lengths in joint), *rest))
            for i, (names, lengths) in enumerate(joint):
                out = all_to_all_p.bind(out, axes=names, sizes=lengths, split=i, join=i)
            out = move_dim(reshape(out, (n, *rest)), 0, join)
        return _merged(out, join) if tiled else out

    return tree.map(one, x)


def pswapaxes(
    x: T, axis_name: AxisName | Sequence[AxisName], axis: int, *, axis_index_groups: IndexGroups = None
) -> T:
    """Swap a named axis with dimension ``axis`` of the same size, by ``all_to_all``."""
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def ppermute(x: T, axis_name: AxisName | Sequence[AxisName], perm: Sequence[tuple[int, int]]) -> T:
    """Send values by (src, dst) pairs of ``perm``; zeros without a source."""
    axes, sizes = _axes(axis_name, "ppermute", some=True)
    joint = _joint(axes, sizes)
    if len(joint) > 1:
        raise errors.UnsupportedError(
            f"ppermute over {axes}, of which {of_vmaps(axes)[0]!r:.60} is an axis of a vmap.",
            where=source.here(),
            why="only mesh axes have a joint permutation.",
            fix="use it once for each",
        )
    n = math.prod(sizes)
    pairs = [ints(pair, "ppermute", "a pair of perm") for pair in sequence(perm, "ppermute", "perm", "pairs")]
    if any(len(p) != 2 for p in pairs) or any(not 0 <= i < n for p in pairs for i in p):
        raise errors.ValueRangeError(
            f"ppermute: perm holds pairs of positions below {n}, not {perm!r:.80}.",
            where=source.here(),
            fix=f"(i, (i + 1) % n) for each i below n = {n} goes around once",
        )
    if any(len(set(side)) != len(pairs) for side in zip(*pairs, strict=True)):
        raise errors.ValueRangeError(
            f"ppermute: a position sends or receives twice in {perm!r:.80}.", where=source.here()
        )
    ordered = tuple((src, dst) for src, dst in sorted(pairs))
    return tree.map(lambda v: ppermute_p.bind(lift(v), axes=axes, sizes=sizes, perm=ordered), x)


def pshuffle(x: T, axis_name: AxisName | Sequence[AxisName], perm: Sequence[int]) -> T:
    """Permute a named axis: element i gets the value of element ``perm[i]``."""
    sources = ints(perm, "pshuffle", "perm")
    n = axis_size(axis_name)
    if sorted(sources) != list(range(n)):
        raise errors.ValueRangeError(
            f"pshuffle: {perm!r:.80} is not a permutation of the {n} positions.",
            where=source.here(),
            fix="use lax.ppermute",
        )
    return ppermute(x, axis_name, [(src, dst) for dst, src in enumerate(sources)])


def axis_index(axis_name: AxisName | Sequence[AxisName]) -> Array:
    """Index along a named axis, or row-major along several: a scalar int32."""
    axes, sizes = _axes(axis_name, "axis_index")
    position: Any = None
    for name, size in zip(axes, sizes, strict=True):
        mine = axis_index_p.bind(axes=(name,), sizes=(size,))
        position = mine if position is None else add(_times(position, size), mine)
    return scalar(0, np.dtype(np.int32)) if position is None else position


def pcast(x: T, axis_name: AxisName | Sequence[AxisName], *, to: str) -> T:
    """Cast to another type over mesh axes without communication, in ``shard_map``.

    Args:
      x: a pytree of arrays.
      axis_name: one axis, several, or none.
      to: ``varying``: each rank has its own value; ``unreduced``: the value is the sum over the ranks; ``reduced``: all
        ranks have the same value, and its cotangent is unreduced; ``invariant``: the same, from a reduced value.
    Raises (while traced):
      ShardingError: the value cannot have that type without communication.
    """
    axes, sizes = _axes(axis_name, "pcast")
    letter = _letter(to, "VURI", "pcast")
    check_mesh_axes(axes, "pcast")
    return tree.map(lambda v: _bound(cast_to_p, lift(v), axes, sizes, to=letter), x)


def pvary(x: T, axis_name: AxisName | Sequence[AxisName]) -> T:
    """``pcast(x, axis_name, to="varying")``."""
    return pcast(x, axis_name, to="varying")


def axis_size(axis_name: AxisName | Sequence[AxisName]) -> int:
    """Length of a named axis, or the product of several: a Python int."""
    return math.prod(_axes(axis_name, "axis_size")[1])


def _letter(to: Any, allowed: str, what: str) -> str:
    """The letter of a type over an axis, from its name."""
    words = {word: letter for letter, word in WORDS.items() if letter in allowed}
    if not isinstance(to, str) or to not in words:
        raise errors.ArgumentError(
            f"{what}: to is one of {', '.join(words)}, not {to!r:.60}.", where=source.here()
        )
    return words[to]


def check_mesh_axes(axes: Sequence[AxisName], what: str) -> None:
    """Raise AxisNameError unless all axes are mesh axes."""
    if wrong := of_vmaps(axes):
        raise errors.AxisNameError(
            f"{what} over {wrong[0]!r:.60}, which is an axis of a vmap.",
            where=source.here(),
            why="only values over axes of a mesh have types.",
            fix="use shard_map over a mesh with that axis",
        )


def of_vmaps(axes: Sequence[AxisName]) -> list[AxisName]:
    """The axes that are not mesh axes."""
    of_mesh = {e.name: isinstance(e, MeshAxis) for e in state.context if isinstance(e, NamedAxis)}
    return [a for a in axes if not of_mesh.get(a)]


def _axes(axis_name: Any, what: str, some: bool = False) -> tuple[tuple[AxisName, ...], tuple[int, ...]]:
    """The names and sizes of axes, which must be bound; with ``some``, at least one."""
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    known = {e.name: e.size for e in state.context if isinstance(e, NamedAxis)}
    for name in names:
        if not isinstance(name, Hashable) or name not in known:
            there = (
                f"the named axes here are {', '.join(map(repr, known))}" if known else "no axis is named here"
            )
            raise errors.AxisNameError(
                f"{what} over {name!r:.60}, and there is no axis of that name.",
                where=source.here(),
                why=f"{there}.",
                fix=f"bf.vmap(f, axis_name={name!r:.60}), or bf.shard_map over a mesh with that axis",
            )
    if len(set(names)) != len(names):
        raise errors.ArgumentError(
            f"{what}: axes are named once each, not {axis_name!r:.60}.",
            where=source.here(),
            fix="'x', or ('x', 'y') for the ranks along both",
        )
    if some and not names:
        raise errors.ArgumentError(f"{what} over no axis.", where=source.here(), fix="name one")
    return names, tuple(known[n] for n in names)


def _joint(axes: Sequence[AxisName], sizes: Sequence[int]) -> list[tuple[tuple, tuple[int, ...]]]:
    """The axes of each collective: all, if they are of a mesh; or one each."""
    if not of_vmaps(axes):
        return [(tuple(axes), tuple(sizes))]
    return [((a,), (n,)) for a, n in zip(axes, sizes, strict=True)]


class _Within:
    """The groups of a collective, and its index along the axes."""

    def __init__(self, axes: tuple, sizes: tuple[int, ...], groups: Groups):
        self.axes, self.sizes, self.groups = axes, sizes, groups
        self.index = axis_index(axes)

    @classmethod
    def of(cls, axis_name: Any, what: str, groups: IndexGroups, equal: bool = True) -> _Within | None:
        """None without groups."""
        if groups is None:
            return None
        axes, sizes = _axes(axis_name, what, some=True)
        if len(_joint(axes, sizes)) > 1:
            raise errors.UnsupportedError(
                f"{what} with axis_index_groups over {axes}, of which {of_vmaps(axes)[0]!r:.60} is an axis of a vmap.",
                where=source.here(),
                fix="name one axis",
            )
        return cls(axes, sizes, Groups(groups, math.prod(sizes), what, equal))

    @property
    def size(self) -> Any:
        """The size of the group: an int, or an int32 that differs along the axis."""
        groups = self.groups
        return (
            scalar(groups.size, np.dtype(np.int32))
            if groups.equal
            else groups.table(groups.sizes, self.index)
        )

    def permute(self, x: Any, pairs: tuple[tuple[int, int], ...]) -> Any:
        return ppermute_p.bind(x, axes=self.axes, sizes=self.sizes, perm=pairs)

    def members(self, x: Any) -> Any:
        return self.groups.members(x, self.index, self.permute)

    def swapped(self, parts: Any) -> Any:
        return self.groups.swapped(parts, self.index, self.permute)

    def sum(self, x: Any) -> Any:
        check_types("psum", "number", x.aval)
        return reduce_sum(self.members(x), (0,))

    def extremum(self, x: Any, largest: bool) -> Any:
        check_types("pmax" if largest else "pmin", "ordered", x.aval)
        members = self.groups.without_padding(self.members(x), self.index, largest)
        return (reduce_max if largest else reduce_min)(members, (0,))


def _bound(prim: Primitive, x: Any, axes: tuple, sizes: tuple, **params: Any) -> Any:
    """Bind an operation over axes; over none it is the identity."""
    return prim.bind(x, axes=axes, sizes=sizes, **params) if axes else x


def _parts(x: Any, dim: int, n: int, tiled: bool, what: str) -> Any:
    """Split ``dim`` of ``x`` into n parts: of size 1, or if tiled a dimension."""
    shape = x.aval.shape
    if shape[dim] % n if tiled else shape[dim] != n:
        raise errors.ShapeError(
            f"{what} of {x.aval}: dimension {dim} must {'be a multiple of' if tiled else 'have'} the size of the "
            f"axis, {n}.",
            where=source.here(),
            fix="pad it" if tiled else "tiled=True splits a dimension that is a multiple of it",
        )
    return reshape(x, (*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])) if tiled else x


def _merged(x: Any, dim: int) -> Any:
    """Merge dimension ``dim`` and the next one."""
    shape = x.aval.shape
    return reshape(x, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
