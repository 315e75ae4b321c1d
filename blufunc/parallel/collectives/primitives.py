"""Collectives and casts over axes of a mesh, as primitives of the local program.

Parallel, stages 2 and 8: ``axis_types`` puts them into the body of a ``shard_map``, ``partition`` into the local
jaxpr; their ``impl`` asks the engine of the rank. All take ``axes``, names of axes of the mesh, and their ``sizes``;
several axes count in row-major order.

Over each axis a value has a type, of which a primitive takes one, ``src``, to another, ``dst``:

- ``V``, varying: each rank has its own;
- ``I``, invariant: all ranks have the same;
- ``U``, unreduced: the value is the sum of what the ranks have;
- ``R``, reduced: as ``I``, but its cotangent is unreduced.

The cotangent of V is V, of I is I, of R is U, and of U is R. So each primitive has one transpose, with ``src`` and
``dst`` of cotangents in the other direction. (Were psum to I transposed to a psum, gradients would be as many times
too large as there are ranks.)

| forward | transpose |
|---|---|
| psum_invariant V->I | pcast I->V |
| psum_invariant U->I | pcast I->R |
| psum_invariant U->R | itself |
| pcast V->U | pcast R->V |
| pcast R->I | keep_first I->U |
| mesh_all_gather V->V | mesh_psum_scatter V->V |
| mesh_all_gather V->I | shard_slice I->V |
| mesh_all_gather V->R | mesh_psum_scatter U->V |
| shard_slice R->V | shard_pad V->U |
| mesh_ppermute, mesh_all_to_all | with the permutation inverted, the dimensions swapped |
| mesh_axis_index | none |

The names begin with ``mesh_`` where a collective over the named axes of ``vmap`` (``named.py``) has the other.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import scalar
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.elementwise import convert, div, eq, mul
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.parallel.runtime import engine

COTANGENT = {"V": "V", "I": "I", "R": "U", "U": "R"}
"""The type of the cotangent of a value, by the type of the value."""


class MeshCollective(Primitive):
    """A kind: operations on the values of the ranks along ``axes``, linear in the one operand.

    Attributes:
      types: the pairs ``(src, dst)`` that there are.
      meets: whether the ranks exchange anything: then ``exchange`` says what.
      in_place: whether what the ranks get may take the memory of what they give.
      deferred: whether nothing waits for the results for a while: then nothing should delay the operands either.
    """

    kind, fresh, opaque, meets = "collective", True, True, True
    in_place, deferred = False, False
    types: tuple[tuple[str, str], ...] = (("V", "V"),)

    def impl(self, x, *, axes, sizes, src, dst, **params):
        kind, options = self.exchange(**params)
        return engine.current().exchange(kind, x, axes, **options)

    @staticmethod
    def engine() -> Any:
        """The engine of the rank that runs in this thread, for compiled programs."""
        return engine.current()

    def exchange(self, **params: Any) -> tuple[str, dict[str, Any]]:
        """The kind of exchange that engines know it by, and its options."""
        raise NotImplementedError

    def exchanges(self, **params: Any) -> list[tuple[str, dict[str, Any]]]:
        """``exchange`` of each operand."""
        return [self.exchange(**params)]

    def written_over(self, **params: Any) -> list[int]:
        """The operands whose memory their results may take."""
        return [0] if self.in_place else []

    def jvp(self, primals, tangents, **params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        return out, zero(out.aval) if t.__class__ is Zero else self.bind(t, **params)

    def batch(self, axis, args, dims, **params):
        """The dimensions that parameters name move up behind a batch axis; the batch axis stays."""
        (x,), (d,) = args, dims
        moved = {k: v + (v >= d) if k in _DIMENSIONS else v for k, v in params.items()}
        return self.bind(x, **moved), d

    def transpose(self, ct, x, *, src: str, dst: str, **params):
        prim, more = self.transposed(src, dst, **params)
        x.add(prim.bind(ct, src=COTANGENT[dst], dst=COTANGENT[src], **{**params, **more}))

    def transposed(self, src: str, dst: str, **params: Any) -> tuple[Primitive, dict[str, Any]]:
        """The primitive of the cotangents, and those of its parameters that are not the same."""
        raise NotImplementedError

    def check(self, src: str, dst: str) -> None:
        """Raise ValueRangeError unless the primitive takes ``src`` to ``dst``."""
        if (src, dst) not in self.types:
            listed = ", ".join(f"{s}->{d}" for s, d in self.types)
            raise errors.ValueRangeError(f"{self.name} has no {src}->{dst}.", fix=f"one of {listed}")


_DIMENSIONS = ("dim", "split_dim", "concat_dim")


def meets(eqn: Eqn) -> bool:
    """Whether an equation makes ranks exchange something."""
    return isinstance(eqn.prim, MeshCollective) and eqn.prim.meets


class _PsumInvariant(MeshCollective):
    """The sum over the ranks, the same everywhere."""

    name, in_place = "psum_invariant", True
    types = (("V", "I"), ("U", "I"), ("U", "R"))

    def exchange(self):
        return "all_reduce", {"op": "sum"}

    def abstract(self, x, *, axes, sizes, src, dst):
        self.check(src, dst)
        check_types(self.name, "number", x)
        return x.strong()

    def transposed(self, src, dst, **params):
        return (psum_invariant_p if dst == "R" else pcast_p), {}


class _Extremum(MeshCollective):
    """The maximum or minimum over the ranks: those that share it share its derivative equally."""

    in_place = True
    types = (("V", "I"),)

    def __init__(self, name: str, op: str):
        super().__init__(name)
        self.op = op

    def exchange(self):
        return "all_reduce", {"op": self.op}

    def abstract(self, x, *, axes, sizes, src, dst):
        self.check(src, dst)
        check_types(self.name, "ordered", x)
        return x.strong()

    def jvp(self, primals, tangents, *, axes, sizes, src, dst):
        (x,), (t,) = primals, tangents
        over = {"axes": axes, "sizes": sizes}
        out = self.bind(x, src=src, dst=dst, **over)
        if t.__class__ is Zero:
            return out, zero(out.aval)
        chosen = convert(eq(x, pcast_p.bind(out, src="I", dst="V", **over)), x.aval.dtype)
        total, count = (psum_invariant_p.bind(a, src="V", dst="I", **over) for a in (mul(t, chosen), chosen))
        return out, div(total, count)

    transpose = unsupported("it is not linear: it is transposed through its derivative")


class _Pcast(MeshCollective):
    """The same local values under another type; free.

    V->I is for what the user vouches to be the same everywhere; its transpose gives each rank its share. U->V is for
    values that are kept for the linear half of a derivative, and has no transpose.
    """

    name, fresh, opaque, identity, meets = "pcast", False, False, True, False
    types = (("I", "V"), ("I", "R"), ("V", "U"), ("R", "V"), ("R", "I"), ("V", "I"), ("U", "V"))

    def impl(self, x, *, axes, sizes, src, dst):
        return x

    def abstract(self, x, *, axes, sizes, src, dst):
        self.check(src, dst)
        return x

    def transpose(self, ct, x, *, axes, sizes, src, dst):
        over = {"axes": axes, "sizes": sizes}
        if (src, dst) == ("V", "I"):
            ct = pcast_p.bind(ct, src="I", dst="V", **over)
            x.add(div(ct, scalar(math.prod(sizes), ct.aval.dtype)))
        elif (src, dst) == ("U", "V"):
            raise errors.GradError(
                "the second derivative of a function of unreduced values is not there.",
                where=source.here(),
                fix="sum them first: lax.psum(x, axis_name)",
            )
        else:
            super().transpose(ct, x, src=src, dst=dst, **over)

    def transposed(self, src, dst, **params):
        if src == "I":
            return psum_invariant_p, {}
        return (keep_first_p if dst == "I" else pcast_p), {}


class _KeepFirst(MeshCollective):
    """The values of the first rank, and zeros on the others, so that their sum is what all had."""

    name, meets = "keep_first", False
    types = (("I", "U"),)

    def impl(self, x, *, axes, sizes, src, dst):
        return np.zeros_like(x) if position(axes, sizes) else x.copy()

    def abstract(self, x, *, axes, sizes, src, dst):
        self.check(src, dst)
        return x.strong()

    def transposed(self, src, dst, **params):
        return pcast_p, {}


class _AllGather(MeshCollective):
    """The values of the ranks, joined along ``dim``."""

    name = "mesh_all_gather"
    types = (("V", "V"), ("V", "I"), ("V", "R"))

    def exchange(self, dim):
        return "all_gather", {"dim": dim, "tiled": True}

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        return _scaled(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return (shard_slice_p if dst == "I" else mesh_psum_scatter_p), {}


class _PsumScatter(MeshCollective):
    """The sum over the ranks, of which each gets its part along ``dim``."""

    name = "mesh_psum_scatter"
    types = (("V", "V"), ("U", "V"))

    def exchange(self, dim):
        return "reduce_scatter", {"dim": dim, "tiled": True}

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        check_types(self.name, "number", x)
        return _divided(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return mesh_all_gather_p, {}


@dataclass(frozen=True)
class Lines:
    """The user's lines behind an equation that stands for several."""

    of: tuple[source.Source | None, ...]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(source.summary, self.of)))


class _Sums(MeshCollective):
    """Several sums over the same ranks, which cross the links as one exchange: a bucket.

    ``kinds`` has for each operand ``"all_reduce"``, or ``"reduce_scatter"`` along dimension 0, and ``lines`` the user's
    line. It is made of sums of local programs after all transforms, so it has no derivative.
    """

    name, multiple_results, deferred = "mesh_sums", True, True
    jvp = unsupported("it is made after transforms")
    transpose = unsupported("it is made after transforms")
    batch = unsupported("it is made after transforms")

    def impl(self, *xs, axes, sizes, kinds, lines):
        exchange = engine.current().exchange
        return [
            source.at(line, functools.partial(exchange, kind, x, axes, **_SUMMED[kind]))()
            for x, kind, line in zip(xs, kinds, lines.of, strict=True)
        ]

    def exchanges(self, *, kinds, lines):
        return [(kind, _SUMMED[kind]) for kind in kinds]

    def written_over(self, *, kinds, **params):
        return [n for n, kind in enumerate(kinds) if kind == "all_reduce"]

    def abstract(self, *xs, axes, sizes, kinds, lines):
        check_types(self.name, "number", *xs)
        n = math.prod(sizes)
        return [
            x.strong() if kind == "all_reduce" else _divided(self, x, 0, n)
            for x, kind in zip(xs, kinds, strict=True)
        ]


_SUMMED: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum"},
    "reduce_scatter": {"dim": 0, "tiled": True},
}


class _ShardSlice(MeshCollective):
    """Of what all ranks have, each its part along ``dim``."""

    name, meets = "shard_slice", False
    types = (("I", "V"), ("R", "V"))

    def impl(self, x, *, axes, sizes, src, dst, dim):
        size = x.shape[dim] // math.prod(sizes)
        start = position(axes, sizes) * size
        return x[(slice(None),) * dim + (slice(start, start + size),)].copy()

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        return _divided(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return (mesh_all_gather_p if src == "I" else shard_pad_p), {}


class _ShardPad(MeshCollective):
    """The values of a rank at its part along ``dim``, and zeros elsewhere."""

    name, meets = "shard_pad", False
    types = (("V", "U"),)

    def impl(self, x, *, axes, sizes, src, dst, dim):
        size = x.shape[dim]
        start = position(axes, sizes) * size
        shape = (*x.shape[:dim], size * math.prod(sizes), *x.shape[dim + 1 :])
        out = np.zeros_like(x, shape=shape)
        out[(slice(None),) * dim + (slice(start, start + size),)] = x
        return out

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        return _scaled(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return shard_slice_p, {}


class _Permute(MeshCollective):
    """Rank ``dst`` gets the values of rank ``src`` for each (src, dst) of ``perm``; the others get zeros."""

    name = "mesh_ppermute"

    def exchange(self, perm):
        return "permute", {"perm": perm}

    def abstract(self, x, *, axes, sizes, src, dst, perm):
        self.check(src, dst)
        return x.strong()

    def transposed(self, src, dst, *, perm, **params):
        return self, {"perm": tuple((b, a) for a, b in perm)}


class _AllToAll(MeshCollective):
    """Rank k gets part k along ``split_dim`` of the values of every rank, joined along ``concat_dim``."""

    name = "mesh_all_to_all"

    def exchange(self, split_dim, concat_dim):
        return "all_to_all", {"split_dim": split_dim, "concat_dim": concat_dim, "tiled": True}

    def abstract(self, x, *, axes, sizes, src, dst, split_dim, concat_dim):
        self.check(src, dst)
        n = math.prod(sizes)
        return _scaled(self, _divided(self, x, split_dim, n), concat_dim, n)

    def transposed(self, src, dst, *, split_dim, concat_dim, **params):
        return self, {"split_dim": concat_dim, "concat_dim": split_dim}


class _AxisIndex(MeshCollective):
    """The place of the rank along ``axes``, an int32; varying."""

    name, meets = "mesh_axis_index", False
    jvp = unsupported("it has no operands")
    transpose = unsupported("it has no operands")
    batch = unsupported("it has no operands")

    def impl(self, *, axes, sizes):
        return np.asarray(position(axes, sizes), np.int32)

    def abstract(self, *, axes, sizes):
        return ShapedArray((), np.dtype(np.int32))


def position(axes: tuple[str, ...], sizes: tuple[int, ...]) -> int:
    """The place of this rank along ``axes``."""
    place = engine.current().coordinates
    position = 0
    for name, size in zip(axes, sizes, strict=True):
        position = position * size + place[name]
    return position


def _scaled(prim: Primitive, x: ShapedArray, dim: int, n: int) -> ShapedArray:
    """The type with dimension ``dim`` n times as large."""
    _check_dim(prim, x, dim)
    return ShapedArray((*x.shape[:dim], x.shape[dim] * n, *x.shape[dim + 1 :]), x.dtype)


def _divided(prim: Primitive, x: ShapedArray, dim: int, n: int) -> ShapedArray:
    """The type of one of ``n`` parts along ``dim``."""
    _check_dim(prim, x, dim)
    if x.shape[dim] % n:
        raise errors.ShapeError(
            f"{prim.name}: dimension {dim} of {x} cannot be divided among {n} ranks.",
            fix=f"make it a multiple of {n}",
        )
    return ShapedArray((*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]), x.dtype)


def _check_dim(prim: Primitive, x: ShapedArray, dim: int) -> None:
    if not 0 <= dim < x.ndim:
        raise errors.ShapeError(f"{prim.name}: {x} has no dimension {dim}.")


psum_invariant_p = _PsumInvariant()
pmax_invariant_p = _Extremum("pmax_invariant", "max")
pmin_invariant_p = _Extremum("pmin_invariant", "min")
pcast_p = _Pcast()
keep_first_p = _KeepFirst()
mesh_all_gather_p = _AllGather()
mesh_psum_scatter_p = _PsumScatter()
mesh_sums_p = _Sums()
shard_slice_p = _ShardSlice()
shard_pad_p = _ShardPad()
mesh_ppermute_p = _Permute()
mesh_all_to_all_p = _AllToAll()
mesh_axis_index_p = _AxisIndex()
