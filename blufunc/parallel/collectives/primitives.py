"""Collectives and casts over mesh axes, as primitives of the local program.

Parallel, stages 2 and 8. In: ``axis_types`` binds them in the body of a ``shard_map``, ``partition`` in the local
jaxpr. Out: their ``impl`` calls the engine of the rank. All take ``axes``, names of mesh axes, and their ``sizes``;
several axes are in row-major order.

Over each axis a value has a type; a primitive converts one, ``src``, to another, ``dst``:

- ``V``, varying: each rank has its own value;
- ``I``, invariant: all ranks have the same value;
- ``U``, unreduced: the value is the sum over the ranks;
- ``R``, reduced: as ``I``, but its cotangent is unreduced.

The cotangent of V is V, of I is I, of R is U, and of U is R. So each primitive has one transpose per conversion
(``MeshCollective.types``), with ``src`` and ``dst`` of the cotangents swapped. (If psum to I were its own transpose,
gradients would be too large by a factor of the number of ranks.)

The prefix ``mesh_`` marks primitives whose plain name belongs to a collective over the named axes of ``vmap``
(``named.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import scalar
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, subjaxprs
from blufunc.core.ops.elementwise import convert, div, eq, mul
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import Factoring
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.parallel.mesh.mesh import index_along
from blufunc.parallel.runtime import engine

WORDS = {"V": "varying", "I": "invariant", "U": "unreduced", "R": "reduced"}

COTANGENT = {"V": "V", "I": "I", "R": "U", "U": "R"}
"""The type of a value's cotangent, by the type of the value."""


class MeshCollective(Primitive):
    """Base of operations on the ranks along ``axes``, linear in their one operand.

    Attributes:
      types: the supported conversions ``src->dst``, with the name of the transpose of each ("" if none).
      communicates: whether ranks communicate; then ``call`` has the engine's collective and its fixed options.
      operands: the required kind of dtype (``kinds.check_types``), or None.
      in_place: whether results may reuse the memory of operands.
      deferred: whether results are read late, so that nothing should delay the operands.
    """

    kind, fresh, opaque, communicates = "collective", True, True, True
    in_place, deferred = False, False
    types: ClassVar[dict[str, str]]
    call: tuple[str, dict[str, Any]]
    operands: str | None = None

    def impl(self, x, *, axes, sizes, src, dst, **params):
        kind, options = self.engine_call(**params)
        return engine.current().collective(kind, x, axes, **options)

    @staticmethod
    def engine() -> Any:
        """The engine of the rank that runs in this thread, for compiled programs."""
        return engine.current()

    def engine_call(self, **params: Any) -> tuple[str, dict[str, Any]]:
        """The collective that engines know, and its options."""
        kind, options = self.call
        return kind, {**options, **params}

    def engine_calls(self, **params: Any) -> list[tuple[str, dict[str, Any]]]:
        """``engine_call`` for each operand."""
        return [self.engine_call(**params)]

    def written_over(self, **params: Any) -> list[int]:
        """The operands whose memory results may reuse."""
        return [0] if self.in_place else []

    def abstract(self, x, *, axes, sizes, src, dst, **params):
        if f"{src}->{dst}" not in self.types:
            raise errors.ValueRangeError(
                f"{self.name} has no {src}->{dst}.", fix=f"one of {', '.join(self.types)}"
            )
        if self.operands is not None:
            check_types(self.name, self.operands, x)
        return self.local_type(x, math.prod(sizes), **params)

    def local_type(self, x: ShapedArray, n: int, **params: Any) -> ShapedArray:
        """The type of the result on each of ``n`` ranks."""
        return x.strong()

    def shard(self, avals, outs, **params):
        """The rule over automatic axes: all dimensions but its own pass through."""
        b, own = Factoring(), [params[k] for k in DIMENSIONS if k in params]
        dims = b.each(outs[0].shape, own)
        return b.rule([dims] * len(avals), [dims])

    def jvp(self, primals, tangents, **params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        return out, zero(out.aval) if t.__class__ is Zero else self.bind(t, **params)

    def batch(self, axis, args, dims, **params):
        """Shift dimensions in parameters past a batch axis, which stays in place."""
        (x,), (d,) = args, dims
        moved = {k: v + (v >= d) if k in DIMENSIONS else v for k, v in params.items()}
        return self.bind(x, **moved), d

    def transpose(self, ct, x, *, src: str, dst: str, **params):
        prim = _TRANSPOSES[self.types[f"{src}->{dst}"]]
        x.add(prim.bind(ct, src=COTANGENT[dst], dst=COTANGENT[src], **self.transposed(**params)))

    def transposed(self, **params: Any) -> dict[str, Any]:
        """The parameters of the transpose."""
        return params


DIMENSIONS = ("dim", "split_dim", "concat_dim")
"""The parameters that are dimensions of the operand."""


def communicates(eqn: Eqn) -> bool:
    """True if ranks communicate in an equation."""
    return isinstance(eqn.prim, MeshCollective) and eqn.prim.communicates


def equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """The equations of a jaxpr, bodies included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in subjaxprs(eqn.params):
            yield from equations(body)


class _PsumInvariant(MeshCollective):
    """The sum over the ranks, the same on all of them."""

    name, in_place, operands = "psum_invariant", True, "number"
    types: ClassVar = {"V->I": "pcast", "U->I": "pcast", "U->R": "psum_invariant"}
    call = "all_reduce", {"op": "sum"}


class _Extremum(MeshCollective):
    """The maximum or minimum over the ranks; tied ranks share its derivative equally."""

    in_place, operands = True, "ordered"
    types: ClassVar = {"V->I": ""}

    def __init__(self, name: str, op: str):
        super().__init__(name)
        self.call = "all_reduce", {"op": op}

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
    types: ClassVar = {
        "I->V": "psum_invariant", "I->R": "psum_invariant", "V->U": "pcast", "R->V": "pcast", "R->I": "keep_first",
        "V->I": "", "U->V": "",
    }  # fmt: skip

    def impl(self, x, *, axes, sizes, src, dst):
        return x

    def local_type(self, x, n):
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


class _KeepFirst(MeshCollective):
    """The first rank's values, and zeros on others: their sum is the common value."""

    name, communicates = "keep_first", False
    types: ClassVar = {"I->U": "pcast"}

    def impl(self, x, *, axes, sizes, src, dst):
        return np.zeros_like(x) if position(axes, sizes) else x.copy()


class _AllGather(MeshCollective):
    """The values of the ranks, concatenated along ``dim``."""

    name = "mesh_all_gather"
    types: ClassVar = {"V->V": "mesh_psum_scatter", "V->I": "shard_slice", "V->R": "mesh_psum_scatter"}
    call = "all_gather", {}

    def local_type(self, x, n, *, dim):
        return _resized(self, x, dim, times=n)


class _PsumScatter(MeshCollective):
    """The sum over the ranks, scattered along ``dim``."""

    name, operands = "mesh_psum_scatter", "number"
    types: ClassVar = {"V->V": "mesh_all_gather", "U->V": "mesh_all_gather"}
    call = "reduce_scatter", {}

    def local_type(self, x, n, *, dim):
        return _resized(self, x, dim, parts=n)


@dataclass(frozen=True)
class Lines:
    """The user's lines of an equation that fuses several."""

    of: tuple[source.Source | None, ...]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(source.summary, self.of)))


_SUMMED: dict[str, dict[str, Any]] = {"all_reduce": {"op": "sum"}, "reduce_scatter": {"dim": 0}}
"""The kinds of sums of a bucket, with the engine's options."""


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
            x.strong() if kind == "all_reduce" else _resized(self, x, 0, parts=n)
            for x, kind in zip(xs, kinds, strict=True)
        ]


class _ShardSlice(MeshCollective):
    """Each rank's part along ``dim`` of a replicated value."""

    name, communicates = "shard_slice", False
    types: ClassVar = {"I->V": "mesh_all_gather", "R->V": "shard_pad"}

    def impl(self, x, *, axes, sizes, src, dst, dim):
        return x[_part(x.shape[dim] // math.prod(sizes), dim, axes, sizes)].copy()

    def local_type(self, x, n, *, dim):
        return _resized(self, x, dim, parts=n)


class _ShardPad(MeshCollective):
    """A rank's values at its part along ``dim``, and zeros elsewhere."""

    name, communicates = "shard_pad", False
    types: ClassVar = {"V->U": "shard_slice"}

    def impl(self, x, *, axes, sizes, src, dst, dim):
        size = x.shape[dim]
        out = np.zeros_like(x, shape=(*x.shape[:dim], size * math.prod(sizes), *x.shape[dim + 1 :]))
        out[_part(size, dim, axes, sizes)] = x
        return out

    def local_type(self, x, n, *, dim):
        return _resized(self, x, dim, times=n)


class _Permute(MeshCollective):
    """Send values by (src, dst) pairs of ``perm``; ranks without a source get zeros."""

    name, call = "mesh_ppermute", ("permute", {})
    types: ClassVar = {"V->V": "mesh_ppermute"}

    def transposed(self, *, perm, **params):
        return {**params, "perm": tuple((b, a) for a, b in perm)}


class _AllToAll(MeshCollective):
    """Send part k along ``split_dim`` to rank k; concatenate along ``concat_dim``."""

    name, call = "mesh_all_to_all", ("all_to_all", {})
    types: ClassVar = {"V->V": "mesh_all_to_all"}

    def local_type(self, x, n, *, split_dim, concat_dim):
        return _resized(self, _resized(self, x, split_dim, parts=n), concat_dim, times=n)

    def transposed(self, *, split_dim, concat_dim, **params):
        return {**params, "split_dim": concat_dim, "concat_dim": split_dim}


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
    return index_along(axes, sizes, engine.current().coordinates)


def _part(size: int, dim: int, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of this rank's part, of ``size`` elements along ``dim``, in the whole."""
    start = position(axes, sizes) * size
    return (*(slice(None),) * dim, slice(start, start + size))


def _resized(prim: Primitive, x: ShapedArray, dim: int, *, times: int = 1, parts: int = 1) -> ShapedArray:
    """The type with dimension ``dim`` times ``times``, divided into ``parts``."""
    if not 0 <= dim < x.ndim:
        raise errors.ShapeError(f"{prim.name}: {x} has no dimension {dim}.")
    if x.shape[dim] % parts:
        raise errors.ShapeError(
            f"{prim.name}: dimension {dim} of {x} cannot be divided among {parts} ranks.",
            fix=f"make it a multiple of {parts}",
        )
    return ShapedArray((*x.shape[:dim], x.shape[dim] * times // parts, *x.shape[dim + 1 :]), x.dtype)


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

_TRANSPOSES = {p.name: p for p in tuple(globals().values()) if isinstance(p, MeshCollective)}
