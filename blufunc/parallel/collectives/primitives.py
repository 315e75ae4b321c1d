"""Collectives and casts over mesh axes, as primitives of the local program.

Parallel, stages 2 and 8. In: ``axis_types`` binds them in the body of a ``shard_map``, ``partition`` in the local
jaxpr. Out: their ``impl`` calls the engine of the rank. All take ``axes``, names of mesh axes, and their ``sizes``;
several axes are in row-major order.

Over each axis a value has a type; a primitive converts one, ``src``, to another, ``dst``:

- ``V``, varying: each rank has its own value;
- ``I``, invariant: all ranks have the same value;
- ``U``, unreduced: the value is the sum over the ranks;
- ``R``, reduced: as ``I``, but its cotangent is unreduced.

The cotangent of V is V, of I is I, of R is U, and of U is R. So each primitive has one transpose, with ``src`` and
``dst`` of the cotangents swapped. (If psum to I were its own transpose, gradients would be too large by a factor of
the number of ranks.)

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

The prefix ``mesh_`` marks primitives whose plain name belongs to a collective over the named axes of ``vmap``
(``named.py``).
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
"""The type of a value's cotangent, by the type of the value."""


class MeshCollective(Primitive):
    """Base of operations on the ranks along ``axes``, linear in their one operand.

    Attributes:
      types: the supported pairs ``(src, dst)``.
      communicates: whether ranks communicate; then ``engine_call`` names the collective.
      in_place: whether results may reuse the memory of operands.
      deferred: whether results are read late, so that nothing should delay the operands.
    """

    kind, fresh, opaque, communicates = "collective", True, True, True
    in_place, deferred = False, False
    types: tuple[tuple[str, str], ...] = (("V", "V"),)

    def impl(self, x, *, axes, sizes, src, dst, **params):
        kind, options = self.engine_call(**params)
        return engine.current().collective(kind, x, axes, **options)

    @staticmethod
    def engine() -> Any:
        """The engine of the rank that runs in this thread, for compiled programs."""
        return engine.current()

    def engine_call(self, **params: Any) -> tuple[str, dict[str, Any]]:
        """The kind of collective that engines know, and its options."""
        raise NotImplementedError

    def engine_calls(self, **params: Any) -> list[tuple[str, dict[str, Any]]]:
        """``engine_call`` for each operand."""
        return [self.engine_call(**params)]

    def written_over(self, **params: Any) -> list[int]:
        """The operands whose memory results may reuse."""
        return [0] if self.in_place else []

    def jvp(self, primals, tangents, **params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        return out, zero(out.aval) if t.__class__ is Zero else self.bind(t, **params)

    def batch(self, axis, args, dims, **params):
        """Shift dimensions in parameters past a batch axis, which stays in place."""
        (x,), (d,) = args, dims
        moved = {k: v + (v >= d) if k in _DIMENSIONS else v for k, v in params.items()}
        return self.bind(x, **moved), d

    def transpose(self, ct, x, *, src: str, dst: str, **params):
        prim, more = self.transposed(src, dst, **params)
        x.add(prim.bind(ct, src=COTANGENT[dst], dst=COTANGENT[src], **{**params, **more}))

    def transposed(self, src: str, dst: str, **params: Any) -> tuple[Primitive, dict[str, Any]]:
        """The primitive of the cotangents, and its parameters that differ."""
        raise NotImplementedError

    def check(self, src: str, dst: str) -> None:
        """Raise ValueRangeError unless the primitive converts ``src`` to ``dst``."""
        if (src, dst) not in self.types:
            listed = ", ".join(f"{s}->{d}" for s, d in self.types)
            raise errors.ValueRangeError(f"{self.name} has no {src}->{dst}.", fix=f"one of {listed}")


_DIMENSIONS = ("dim", "split_dim", "concat_dim")


def communicates(eqn: Eqn) -> bool:
    """True if ranks communicate in an equation."""
    return isinstance(eqn.prim, MeshCollective) and eqn.prim.communicates


class _PsumInvariant(MeshCollective):
    """The sum over the ranks, the same on all of them."""

    name, in_place = "psum_invariant", True
    types = (("V", "I"), ("U", "I"), ("U", "R"))

    def engine_call(self):
        return "all_reduce", {"op": "sum"}

    def abstract(self, x, *, axes, sizes, src, dst):
        self.check(src, dst)
        check_types(self.name, "number", x)
        return x.strong()

    def transposed(self, src, dst, **params):
        return (psum_invariant_p if dst == "R" else pcast_p), {}


class _Extremum(MeshCollective):
    """The maximum or minimum over the ranks; tied ranks share its derivative equally."""

    in_place = True
    types = (("V", "I"),)

    def __init__(self, name: str, op: str):
        super().__init__(name)
        self.op = op

    def engine_call(self):
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
    """The same local values under another type; no communication.

    V->I asserts that a value is the same on all ranks; its transpose gives each rank its share. U->V is for residuals
    of the linear half of a derivative, and has no transpose.
    """

    name, fresh, opaque, identity, communicates = "pcast", False, False, True, False
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
                "second derivatives of functions of unreduced values are not supported.",
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
    """The first rank's values, and zeros on others: their sum is the common value."""

    name, communicates = "keep_first", False
    types = (("I", "U"),)

    def impl(self, x, *, axes, sizes, src, dst):
        return np.zeros_like(x) if position(axes, sizes) else x.copy()

    def abstract(self, x, *, axes, sizes, src, dst):
        self.check(src, dst)
        return x.strong()

    def transposed(self, src, dst, **params):
        return pcast_p, {}


class _AllGather(MeshCollective):
    """The values of the ranks, concatenated along ``dim``."""

    name = "mesh_all_gather"
    types = (("V", "V"), ("V", "I"), ("V", "R"))

    def engine_call(self, dim):
        return "all_gather", {"dim": dim, "tiled": True}

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        return _scaled(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return (shard_slice_p if dst == "I" else mesh_psum_scatter_p), {}


class _PsumScatter(MeshCollective):
    """The sum over the ranks, scattered along ``dim``."""

    name = "mesh_psum_scatter"
    types = (("V", "V"), ("U", "V"))

    def engine_call(self, dim):
        return "reduce_scatter", {"dim": dim, "tiled": True}

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        check_types(self.name, "number", x)
        return _split_type(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return mesh_all_gather_p, {}


@dataclass(frozen=True)
class Lines:
    """The user's lines of an equation that fuses several."""

    of: tuple[source.Source | None, ...]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(source.summary, self.of)))


class _Sums(MeshCollective):
    """A bucket: several sums over the same ranks, as one collective.

    Per operand, ``kinds`` has ``"all_reduce"``, or ``"reduce_scatter"`` along dimension 0, and ``lines`` the user's
    line. It fuses sums of local programs after all transforms, so it has no derivative.
    """

    name, multiple_results, deferred = "mesh_sums", True, True
    jvp = unsupported("it is made after transforms")
    transpose = unsupported("it is made after transforms")
    batch = unsupported("it is made after transforms")

    def impl(self, *xs, axes, sizes, kinds, lines):
        collective = engine.current().collective
        return [
            source.at(line, functools.partial(collective, kind, x, axes, **_SUMMED[kind]))()
            for x, kind, line in zip(xs, kinds, lines.of, strict=True)
        ]

    def engine_calls(self, *, kinds, lines):
        return [(kind, _SUMMED[kind]) for kind in kinds]

    def written_over(self, *, kinds, **params):
        return [n for n, kind in enumerate(kinds) if kind == "all_reduce"]

    def abstract(self, *xs, axes, sizes, kinds, lines):
        check_types(self.name, "number", *xs)
        n = math.prod(sizes)
        return [
            x.strong() if kind == "all_reduce" else _split_type(self, x, 0, n)
            for x, kind in zip(xs, kinds, strict=True)
        ]


_SUMMED: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum"},
    "reduce_scatter": {"dim": 0, "tiled": True},
}


class _ShardSlice(MeshCollective):
    """Each rank's part along ``dim`` of a replicated value."""

    name, communicates = "shard_slice", False
    types = (("I", "V"), ("R", "V"))

    def impl(self, x, *, axes, sizes, src, dst, dim):
        size = x.shape[dim] // math.prod(sizes)
        start = position(axes, sizes) * size
        return x[(slice(None),) * dim + (slice(start, start + size),)].copy()

    def abstract(self, x, *, axes, sizes, src, dst, dim):
        self.check(src, dst)
        return _split_type(self, x, dim, math.prod(sizes))

    def transposed(self, src, dst, **params):
        return (mesh_all_gather_p if src == "I" else shard_pad_p), {}


class _ShardPad(MeshCollective):
    """A rank's values at its part along ``dim``, and zeros elsewhere."""

    name, communicates = "shard_pad", False
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
    """Send values by (src, dst) pairs of ``perm``; ranks without a source get zeros."""

    name = "mesh_ppermute"

    def engine_call(self, perm):
        return "permute", {"perm": perm}

    def abstract(self, x, *, axes, sizes, src, dst, perm):
        self.check(src, dst)
        return x.strong()

    def transposed(self, src, dst, *, perm, **params):
        return self, {"perm": tuple((b, a) for a, b in perm)}


class _AllToAll(MeshCollective):
    """Send part k along ``split_dim`` to rank k; concatenate along ``concat_dim``."""

    name = "mesh_all_to_all"

    def engine_call(self, split_dim, concat_dim):
        return "all_to_all", {"split_dim": split_dim, "concat_dim": concat_dim, "tiled": True}

    def abstract(self, x, *, axes, sizes, src, dst, split_dim, concat_dim):
        self.check(src, dst)
        n = math.prod(sizes)
        return _scaled(self, _split_type(self, x, split_dim, n), concat_dim, n)

    def transposed(self, src, dst, *, split_dim, concat_dim, **params):
        return self, {"split_dim": concat_dim, "concat_dim": split_dim}


class _AxisIndex(MeshCollective):
    """The index of the rank along ``axes``, a varying int32."""

    name, communicates = "mesh_axis_index", False
    jvp = unsupported("it has no operands")
    transpose = unsupported("it has no operands")
    batch = unsupported("it has no operands")

    def impl(self, *, axes, sizes):
        return np.asarray(position(axes, sizes), np.int32)

    def abstract(self, *, axes, sizes):
        return ShapedArray((), np.dtype(np.int32))


def position(axes: tuple[str, ...], sizes: tuple[int, ...]) -> int:
    """The index of this rank along ``axes``."""
    place = engine.current().coordinates
    position = 0
    for name, size in zip(axes, sizes, strict=True):
        position = position * size + place[name]
    return position


def _scaled(prim: Primitive, x: ShapedArray, dim: int, n: int) -> ShapedArray:
    """The type with dimension ``dim`` multiplied by n."""
    _check_dim(prim, x, dim)
    return ShapedArray((*x.shape[:dim], x.shape[dim] * n, *x.shape[dim + 1 :]), x.dtype)


def _split_type(prim: Primitive, x: ShapedArray, dim: int, n: int) -> ShapedArray:
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
