"""Sums of matmuls as one matmul, and with them the matmuls that share an operand.

Kernels, before ``pointwise_epilogue``. In: a program with all calls inlined. Out: an equivalent one, in which the
gradient of what several weights are multiplied by, such as queries, keys and values, is one matmul:

    sums       dq @ wq.T + dk @ wk.T + dv @ wv.T    = [dq, dk, dv] @ [wq, wk, wv].T
    gradients  x.T @ dq,  x.T @ dk,  x.T @ dv       = slices of x.T @ [dq, dk, dv]
    forward    x @ wq,  x @ wk,  x @ wv             = slices of x @ [wq, wk, wv]

One kernel accumulates the sum in registers, so terms are neither written nor read back. The other matmuls fill the SMs
with tiles. The kernel that computes elementwise operands concatenates them; operands that are in memory anyway are
copied. A cost model decides, by the tiles of a matmul (``Target.matmul_seconds``). The pass starts at sums, so programs
without gradients stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.ops.shape import concatenate_p, pad_p, slice_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.fusion.recompute_in_consumers import computed_in_copies
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.ops.gemm import SUMS
from blufunc.kernels.rewrites.readers import Readers
from blufunc.kernels.target import Target

MOST_TERMS = 8
"""Maximum terms of a sum: a kernel that concatenates has a case for each."""

_ALIGNED = 16
"""Parts begin at multiples of this many bytes, as a GEMM's vectors do."""


def with_merged_products(jaxpr: Jaxpr, origins: Origins, target: Target) -> Jaxpr:
    """Merge matmuls, where that is faster."""
    if target.matmul_seconds is None or not any(e.prim in SUMS for e in jaxpr.eqns):
        return jaxpr
    if any(is_replaced(p, "impl") for p in (dot_general_p, concatenate_p, slice_p, reshape_p, *SUMS)):
        return jaxpr
    return _Merging(jaxpr, origins, target).run()


class _Joint(NamedTuple):
    """Operands that are concatenated.

    Attributes:
      parts: the operands of matmuls, in order.
      axis: the axis along which they are joined.
      before: the arrays that all parts are reshapes of, or else the parts.
      before_axis: the axis along which these are joined.
      whole: the operand of the merged matmuls.
    """

    parts: tuple[Var, ...]
    axis: int
    before: tuple[Var, ...]
    before_axis: int
    whole: Var

    def equations(self, line: Any) -> list[Eqn]:
        """The concatenation, before the reshape of the parts: its kernel has their shapes."""
        params = {"dimension": self.before_axis}
        if self.before == self.parts:
            return [Eqn(concatenate_p, self.parts, [self.whole], params, line)]
        joined = Var(_concatenated(self.before, self.before_axis))
        reshape = Eqn(reshape_p, [joined], [self.whole], {"shape": self.whole.aval.shape}, line)
        return [Eqn(concatenate_p, self.before, [joined], params, line), reshape]


@dataclass(eq=False)
class _Sharing:
    """Matmuls of the parts of a joint with a common operand, as one.

    Attributes:
      terms: the matmuls, by part.
      merged: the one matmul.
      axis: the axis of its result that is sliced.
    """

    terms: tuple[Eqn, ...]
    merged: Eqn
    axis: int

    def equations(self) -> list[Eqn]:
        (whole,), results = self.merged.outvars, [t.outvars[0] for t in self.terms]
        return [self.merged, *_slices(whole, self.axis, results, self.merged.source)]


@dataclass(eq=False)
class _Sum:
    """A sum of matmuls as one.

    Attributes:
      terms: the matmuls.
      merged: the one matmul, whose result is the sum.
      joints: its operands.
      sharing: other matmuls of the parts of each operand.
    """

    terms: tuple[Eqn, ...]
    merged: Eqn
    joints: tuple[_Joint, _Joint]
    sharing: tuple[list[_Sharing], list[_Sharing]] = field(default_factory=lambda: ([], []))


class _Merging(Readers):
    """The matmuls of a program to merge.

    Attributes:
      taken: matmuls that are part of some candidate.
      depth: by variable, the most equations on a path to it that neither move elements nor are elementwise. What is
        joined has one depth, so no part waits for another one, or depends on a matmul of it.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Origins, target: Target):
        super().__init__(jaxpr)
        self.origins, self.target = origins, target
        self.taken: set[Eqn] = set()
        self.depth: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
        for eqn in jaxpr.eqns:
            depth = max([self.depth[a] for a in eqn.invars if a.__class__ is not Literal], default=0)
            self.depth.update(dict.fromkeys(eqn.outvars, depth + (not _is_cheap(eqn))))

    def run(self) -> Jaxpr:
        """The program with the sums that pay.

        A trial with all sums shows which operands are computed in their concatenation.
        """
        sums = self.sums()
        self.taken = {t for terms, _ in sums for t in terms}
        found = [s for terms, root in sums if (s := self.sum_of(terms, root)) is not None]
        if not found:
            return self.jaxpr
        parts = {v for s in found for joint in s.joints for v in joint.parts}
        in_copies = computed_in_copies(self.merged(found, parts))
        free = {
            v
            for s in found
            for joint in s.joints
            for v, before in zip(joint.parts, joint.before, strict=True)
            if before in in_copies and sort_of(self.makers[before]) == "node"
        }
        chosen = [s for s in found if self.pays(s, free)]
        return self.merged(chosen, free) if chosen else self.jaxpr

    # -- candidates ---------------------------------------------------------------------------------

    def sums(self) -> list[tuple[tuple[Eqn, ...], Eqn]]:
        """The matmuls of each sum of only such, and the equation of the sum."""
        terms: dict[Any, tuple[Eqn, ...]] = {}
        roots: dict[Any, Eqn] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.prim is dot_general_p and self.is_term(eqn):
                terms[eqn.outvars[0]] = (eqn,)
            elif eqn.prim in SUMS and all(a in terms and self.only(a) is eqn for a in eqn.invars):
                a, b = eqn.invars
                both = (*terms[a], *terms[b])
                if len(both) <= MOST_TERMS and len({self.key(t) for t in both}) == 1:
                    terms[eqn.outvars[0]] = both
                    roots = {v: e for v, e in roots.items() if v is not a and v is not b}
                    roots[eqn.outvars[0]] = eqn
        return [(terms[v], e) for v, e in roots.items()]

    def is_term(self, eqn: Eqn) -> bool:
        """True for a matmul of two variables without batch axes, in one dtype."""
        _, (batch, _) = eqn.params["dimension_numbers"]
        out = eqn.outvars[0].aval
        return (
            not batch
            and dtypes.is_inexact(out.dtype)
            and all(a.__class__ is Var and a.aval.size and a.aval.dtype == out.dtype for a in eqn.invars)
        )

    def key(self, eqn: Eqn) -> Any:
        """A key of terms that may be one matmul: all but the sizes that are summed."""
        frees = [
            tuple(None if d in own else n for d, n in enumerate(a.aval.shape))
            for a, own in zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True)
        ]
        depths = [self.depth[a] for a in eqn.invars]
        kind = eqn.outvars[0].aval.dtype, *frees, *depths, self.origins.get(eqn)
        return tuple(sorted(eqn.params.items(), key=lambda item: item[0])), kind

    def sum_of(self, terms: tuple[Eqn, ...], root: Eqn) -> _Sum | None:
        """The sum as one matmul; None if its operands cannot be concatenated."""
        contracted = terms[0].params["dimension_numbers"][0]
        sizes = [[t.invars[0].aval.shape[d] for d in contracted[0]] for t in terms]
        differing = [n for n, each in enumerate(zip(*sizes, strict=True)) if len(set(each)) > 1] or [0]
        if len(differing) > 1 or not contracted[0]:
            return None
        joints = tuple(
            self.joint([t.invars[side] for t in terms], contracted[side][differing[0]]) for side in (0, 1)
        )
        if None in joints:
            return None
        first = terms[0]
        merged = Eqn(first.prim, [j.whole for j in joints], root.outvars, first.params, first.source)  # type: ignore[union-attr]
        made = _Sum(terms, merged, joints)  # type: ignore[arg-type]
        for joint, found in zip(made.joints, made.sharing, strict=True):
            found += self.sharing(joint)
        return made

    def joint(self, parts: Sequence[Any], axis: int) -> _Joint | None:
        """The concatenation of operands; None if they are better read apart."""
        unit = parts[0].aval.dtype.itemsize * math.prod(parts[0].aval.shape[axis + 1 :])
        if len(set(parts)) < len(parts) or any(v.aval.shape[axis] * unit % _ALIGNED for v in parts):
            return None
        if any(self.is_exchanged(v) or self.is_epilogue(v) for v in parts):
            return None
        whole = Var(_concatenated(parts, axis))
        before, before_axis = tuple(parts), axis
        makers = [self.makers.get(v) for v in before]
        while all(m is not None and m.prim is reshape_p for m in makers):
            arrays = [m.invars[0] for m in makers]  # type: ignore[union-attr]
            found = _joined_axis(arrays, math.prod(whole.aval.shape[:axis]))
            if found is None:
                break
            before, before_axis = tuple(arrays), found
            makers = [self.makers.get(v) for v in before]
        return _Joint(tuple(parts), axis, before, before_axis, whole)  # type: ignore[arg-type]

    def is_exchanged(self, v: Any) -> bool:
        """True if a collective writes an array, which readers of others need not await."""
        while (maker := self.makers.get(v)) is not None and _is_cheap(maker) and maker.invars:
            v = maker.invars[0]
        return maker is not None and maker.prim.kind == "collective"

    def is_epilogue(self, v: Any) -> bool:
        """True if a matmul can compute an array in its epilogue, and store it as it is."""
        pending, seen, computed = [v], {v}, False
        while pending:
            maker = self.makers.get(pending.pop())
            if maker is None:
                continue
            if maker.prim is dot_general_p and computed:
                return True
            elementwise = isinstance(maker.prim, Elementwise) or maker.prim is add_any_p
            computed |= elementwise
            if elementwise or maker.prim is reshape_p:
                new = [
                    a
                    for a in maker.invars
                    if isinstance(a, Var) and a not in seen and a.aval.size == v.aval.size
                ]
                seen.update(new)
                pending += new
        return False

    def sharing(self, joint: _Joint) -> list[_Sharing]:
        """Other matmuls of all parts, each of one side and one common operand."""
        found = []
        for first in self.of(joint.parts[0]):
            if first.prim is not dot_general_p or first in self.taken or not self.is_term(first):
                continue
            side = first.invars.index(joint.parts[0])
            if joint.axis in first.params["dimension_numbers"][0][side]:
                continue
            same = [first]
            for v in joint.parts[1:]:
                same += [e for e in self.of(v) if e not in self.taken and self.is_like(e, first, v, side)][:1]
            if len(same) == len(joint.parts) and first.invars[1 - side] not in joint.parts:
                self.taken |= set(same)
                found.append(_sharing(joint, same, side))
        return found

    def is_like(self, eqn: Eqn, first: Eqn, part: Var, side: int) -> bool:
        """True for the matmul of another part with the same operand."""
        return (
            eqn.prim is dot_general_p
            and eqn.invars[side] is part
            and eqn.invars[1 - side] is first.invars[1 - side]
            and eqn.params == first.params
            and eqn.outvars[0].aval.dtype == first.outvars[0].aval.dtype
            and self.origins.get(eqn) == self.origins.get(first)
        )

    # -- cost ---------------------------------------------------------------------------------------

    def pays(self, s: _Sum, free: Set[Any]) -> bool:
        """True if a sum is worth it; matmuls that do not gain are left out of it."""
        machine = self.target.machine
        read = (len(s.terms) - 1) * s.merged.outvars[0].aval.nbytes / machine.bandwidth
        gain = self.saved(s.terms, s.merged) + read
        for joint, sharing in zip(s.joints, s.sharing, strict=True):
            copied = sum(2 * v.aval.nbytes for v in joint.parts if v not in free)
            gain -= machine.launch + copied / machine.bandwidth
            sharing[:] = [m for m in sharing if self.gain(m) > 0]
            gain += sum(map(self.gain, sharing))
        return gain > 0

    def saved(self, terms: Sequence[Eqn], merged: Eqn) -> float:
        """Seconds that the merged matmul takes less than its terms."""
        seconds = self.target.matmul_seconds
        assert seconds is not None
        return sum(map(seconds, terms)) - seconds(merged)

    def gain(self, sharing: _Sharing) -> float:
        """Seconds that the common matmul saves, less copies of its slices."""
        results = [t.outvars[0] for t in sharing.terms]
        if len({max(self.last_reads(v), default=-1) for v in results}) > 1:
            return 0.0  # a slice that is read for long would keep the others in memory
        copied = sum(2 * v.aval.nbytes for v in results if not self.is_read_in_place(v))
        return self.saved(sharing.terms, sharing.merged) - copied / self.target.machine.bandwidth

    def last_reads(self, v: Any) -> list[int]:
        """The depths of the results that are computed of an array, which may be moved."""
        return [
            depth
            for e in self.of(v)
            for depth in (
                self.last_reads(e.outvars[0]) if moves(e) else [max(self.depth[o] for o in e.outvars)]
            )
        ]

    def is_read_in_place(self, v: Any) -> bool:
        """True if only kernels and matmuls read an array: these read slices as they are."""
        return v not in self.returned and all(
            self.is_read_in_place(e.outvars[0])
            if moves(e)
            else sort_of(e) == "node" or e.prim is dot_general_p or e.prim.kind == "call"
            for e in self.of(v)
        )

    # -- the new program ------------------------------------------------------------------------------

    def merged(self, chosen: Sequence[_Sum], free: Collection[Any]) -> Jaxpr:
        """The program with merged matmuls; others read slices of free parts."""
        makers: dict[Any, Eqn] = dict(self.makers)
        gone: set[Eqn] = set()
        views: dict[Any, Any] = {}
        for s in chosen:
            new = [s.merged]
            gone |= set(s.terms)
            for joint, sharing in zip(s.joints, s.sharing, strict=True):
                for v, before in zip(joint.parts, joint.before, strict=True):
                    new += self.without_pads(before) if v in free else []
                new += joint.equations(s.merged.source)
                pieces = [Var(v.aval) for v in joint.parts]
                new += _slices(joint.whole, joint.axis, pieces, s.merged.source)
                views.update((v, x) for v, x in zip(joint.parts, pieces, strict=True) if v in free)
                for m in sharing:
                    new += m.equations()
                    gone |= set(m.terms)
            makers.update((v, e) for e in new for v in e.outvars)
            if s.terms[0] in self.origins:
                self.origins.update(dict.fromkeys(new, self.origins[s.terms[0]]))
        for eqn in self.jaxpr.eqns:
            if eqn.prim is dot_general_p and eqn not in gone and not views.keys().isdisjoint(eqn.invars):
                read = eqn.with_invars([views.get(a, a) for a in eqn.invars])
                makers[eqn.outvars[0]] = read
                if eqn in self.origins:
                    self.origins[read] = self.origins[eqn]
        return dce(self.jaxpr.replace(eqns=self.in_order(makers)))

    def without_pads(self, v: Var) -> list[Eqn]:
        """The equations of a sum of disjoint pads as a concatenation; else none.

        The gradient of a split is such a sum, as in rotary embeddings. The kernel of a concatenation computes another
        one, but no sum of pads.
        """
        maker = self.makers.get(v)
        narrow = maker is not None and maker.prim is convert_p
        pads = self.padded(maker.invars[0] if narrow else v)  # type: ignore[union-attr]
        places = sorted((place for e in pads if (place := _place(e)) is not None), key=lambda p: p[:2])
        axes, ends, size = {axis for axis, *_ in places}, [0], 0
        for axis, start, x in places:
            size += x.aval.shape[axis]
            ends.append(start + x.aval.shape[axis])
        if len(places) < max(2, len(pads)) or len(axes) > 1 or ends[:-1] != [start for _, start, _ in places]:
            return []
        (axis,) = axes
        if size != v.aval.shape[axis]:
            return []
        eqns, parts = [], [x for *_, x in places]
        if narrow:
            wide, parts = parts, [Var(x.aval.with_dtype(v.aval.dtype)) for x in parts]
            params = maker.params  # type: ignore[union-attr]
            eqns = [Eqn(convert_p, [x], [y], params, maker.source) for x, y in zip(wide, parts, strict=True)]  # type: ignore[union-attr]
        return [*eqns, Eqn(concatenate_p, parts, [v], {"dimension": axis}, maker.source)]  # type: ignore[union-attr]

    def padded(self, v: Any) -> list[Eqn]:
        """The pads that an array is the sum of; none if it is anything else."""
        maker = self.makers.get(v)
        if maker is None or maker.prim is pad_p:
            return [] if maker is None else [maker]
        found = [self.padded(a) for a in maker.invars] if maker.prim in SUMS else []
        return [e for each in found for e in each] if all(found) else []

    def in_order(self, makers: Mapping[Any, Eqn]) -> list[Eqn]:
        """The equations in their order, each after those that it depends on."""
        placed: set[Eqn] = set()
        eqns: list[Eqn] = []
        for old in self.jaxpr.eqns:
            pending = [makers[old.outvars[0]] if old.outvars else old]
            while pending:
                eqn = pending[-1]
                before = [makers[a] for a in eqn.invars if a in makers and makers[a] not in placed]
                if before and eqn not in placed:
                    pending += before
                    continue
                pending.pop()
                if eqn not in placed:
                    placed.add(eqn)
                    eqns.append(eqn)
        return eqns


def _is_cheap(eqn: Eqn) -> bool:
    """True for movement, copies and elementwise equations, which one kernel chains."""
    return moves(eqn) or isinstance(eqn.prim, Elementwise) or eqn.prim in (add_any_p, concatenate_p, pad_p)


def _place(pad: Eqn) -> tuple[int, int, Any] | None:
    """The axis of an array of zeros, and the start, at which a pad puts its operand."""
    x, zero = pad.invars
    config = pad.params["padding_config"]
    axes = [d for d, padding in enumerate(config) if any(padding)]
    if zero.__class__ is not Literal or zero.value != 0 or len(axes) != 1:
        return None
    start, end, interior = config[axes[0]]
    return None if interior or min(start, end) < 0 else (axes[0], start, x)


def _concatenated(parts: Sequence[Any], axis: int) -> ShapedArray:
    """The type of the concatenation of arrays."""
    shape = parts[0].aval.shape
    return parts[0].aval.with_shape(
        (*shape[:axis], sum(v.aval.shape[axis] for v in parts), *shape[axis + 1 :])
    )


def _joined_axis(arrays: Sequence[Any], outer: int) -> int | None:
    """The axis of arrays along which reshapes of ``outer`` rows are joined."""
    shape = arrays[0].aval.shape
    for axis, n in enumerate(shape):
        if math.prod(shape[:axis]) == outer and n > 1:
            rests = {(*v.aval.shape[:axis], *v.aval.shape[axis + 1 :]) for v in arrays}
            return axis if len(rests) == 1 and len({v.aval.ndim for v in arrays}) == 1 else None
    return None


def _slices(whole: Var, axis: int, pieces: Sequence[Var], line: Any) -> list[Eqn]:
    """The equations of consecutive slices of an array."""
    eqns, start = [], 0
    for v in pieces:
        starts, limits = [0] * whole.aval.ndim, list(whole.aval.shape)
        starts[axis], limits[axis] = start, start + v.aval.shape[axis]
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
        eqns.append(Eqn(slice_p, [whole], [v], params, line))
        start = limits[axis]
    return eqns


def _sharing(joint: _Joint, terms: Sequence[Eqn], side: int) -> _Sharing:
    """The one matmul of the parts of a joint and a common operand."""
    first = terms[0]
    contracted = first.params["dimension_numbers"][0]
    operands = list(first.invars)
    operands[side] = joint.whole
    free = [
        [d for d in range(a.aval.ndim) if d not in own] for a, own in zip(operands, contracted, strict=True)
    ]
    axis = free[side].index(joint.axis) + side * len(free[0])
    whole = Var(_concatenated([t.outvars[0] for t in terms], axis))
    return _Sharing(tuple(terms), Eqn(first.prim, operands, [whole], first.params, first.source), axis)
