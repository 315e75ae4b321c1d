"""Sums over ranks as early as they can be, and several as one: what is computed then need not wait for them.

Parallel, between stages 3 and 4, the last pass over a local jaxpr that is spelled out. In: sums where transforms left
them. Out: each where its operand is there. Those that nothing computes with for a while, as gradients, are collected
until a bucket is full (Li et al., "PyTorch Distributed", 2020, section 3.2.3): links are slow with small pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import convert_p
from blufunc.kernels.loopir.access_map import moves
from blufunc.parallel.collectives import primitives as mc

BUCKET_BYTES = 25 << 20
"""From how many bytes on a bucket is full: links reach their full speed from about here on."""

_KINDS = {mc.psum_invariant_p: "all_reduce", mc.mesh_psum_scatter_p: "reduce_scatter"}


def in_buckets(jaxpr: Jaxpr) -> Jaxpr:
    """The program with sums over ranks where their operands are there, or behind the last operand of their bucket.

    What moves or converts a gradient goes with its sum, on both sides: a program that casts its parameters once has the
    conversions of all gradients at its end. What gathers stays where it is wanted, for it makes values larger.
    """
    return _Buckets(jaxpr).run()


class _Buckets:
    """One pass over a jaxpr.

    Attributes:
      order: the equations so far.
      known: the variables that they and the parameters have.
      waiting: by the axes of the ranks, the sums of the bucket that is being filled.
      nbytes: of the operands of these.
      left: by the same, how many sums are not there yet.
      sum_of: for a variable that waits, its sum.
      behind: for a sum that waits, what passes it on, which waits too.
      readers: of variables, the sums, and what passes on what is summed.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.order: list[Eqn] = []
        self.seen: set[Eqn] = set()
        self.known: set[Any] = {*jaxpr.constvars, *jaxpr.invars}
        self.waiting: dict[Any, list[Eqn]] = {}
        self.nbytes: Counter[Any] = Counter()
        self.left = Counter(_axes(e) for e in jaxpr.eqns if e.prim in _KINDS)
        self.sum_of: dict[Any, Eqn] = {}
        self.behind: dict[Eqn, list[Eqn]] = {}
        self.readers: dict[Any, list[Eqn]] = {}
        early = _early(jaxpr)
        for eqn in jaxpr.eqns:
            for a in dict.fromkeys(a for a in eqn.invars if a.__class__ is Var and eqn in early):
                self.readers.setdefault(a, []).append(eqn)

    def run(self) -> Jaxpr:
        for eqn in self.jaxpr.eqns:
            if eqn in self.seen:
                continue
            if passes_on(eqn) and eqn.invars[0] in self.sum_of:
                self.wait(eqn, self.sum_of[eqn.invars[0]])
                continue
            for a in eqn.invars:
                if a.__class__ is Var and a in self.sum_of:
                    self.want(self.sum_of[a])
            if eqn not in self.seen:
                self.take(eqn)
        for axes in list(self.waiting):
            self.flush(axes)
        return self.jaxpr.replace(eqns=self.order)

    def take(self, eqn: Eqn) -> None:
        """Put an equation whose operands are known behind the others, or into a bucket."""
        self.seen.add(eqn)
        if eqn.prim not in _KINDS:
            self.emit(eqn)
            return
        axes = _axes(eqn)
        self.waiting.setdefault(axes, []).append(eqn)
        self.nbytes[axes] += eqn.invars[0].aval.nbytes
        self.left[axes] -= 1
        self.sum_of[eqn.outvars[0]] = eqn
        if self.nbytes[axes] >= BUCKET_BYTES:
            self.flush(axes)

    def wait(self, eqn: Eqn, sum_: Eqn) -> None:
        """Let an equation wait with the sum that it reads."""
        self.seen.add(eqn)
        self.behind.setdefault(sum_, []).append(eqn)
        self.sum_of[eqn.outvars[0]] = sum_

    def emit(self, eqn: Eqn) -> None:
        self.order.append(eqn)
        self.known.update(eqn.outvars)
        for reader in (r for v in eqn.outvars for r in self.readers.get(v, ())):
            if reader not in self.seen and all(
                a.__class__ is Literal or a in self.known for a in reader.invars
            ):
                self.take(reader)

    def want(self, eqn: Eqn) -> None:
        """A sum is read now: the newest goes by itself, unless no more will come; another takes its bucket along."""
        axes = _axes(eqn)
        if eqn is not self.waiting[axes][-1] or not self.left[axes]:
            self.flush(axes)
            return
        self.waiting[axes].pop()
        self.nbytes[axes] -= eqn.invars[0].aval.nbytes
        self.settle([eqn], eqn)

    def flush(self, axes: Any) -> None:
        """The sums of a bucket become one equation."""
        bucket = self.waiting.pop(axes)
        del self.nbytes[axes]
        if not bucket:
            return
        invars, outvars = [e.invars[0] for e in bucket], [e.outvars[0] for e in bucket]
        lines = mc.Lines(tuple([e.source for e in bucket]))
        kinds = tuple([_KINDS[e.prim] for e in bucket])
        params = {"axes": axes[0], "sizes": axes[1], "kinds": kinds, "lines": lines}
        self.settle(bucket, Eqn(mc.mesh_sums_p, invars, outvars, params, bucket[0].source))

    def settle(self, sums: Sequence[Eqn], eqn: Eqn) -> None:
        """Sums are made by an equation here, and what waits with them follows."""
        behind = [e for s in sums for e in self.behind.pop(s, ())]
        for e in (*sums, *behind):
            del self.sum_of[e.outvars[0]]
        for e in (eqn, *behind):
            self.emit(e)


def _axes(eqn: Eqn) -> tuple[Any, Any]:
    return eqn.params["axes"], eqn.params["sizes"]


def passes_on(eqn: Eqn) -> bool:
    """Whether an equation only moves or converts the elements of its operand."""
    return moves(eqn) or eqn.prim is convert_p


def _early(jaxpr: Jaxpr) -> set[Eqn]:
    """The sums, and what only passes their operands on."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    early: set[Eqn] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn.prim in _KINDS or (passes_on(eqn) and eqn in early):
            early.add(eqn)
            early.update(makers[a] for a in eqn.invars if a in makers and passes_on(makers[a]))
    return early
