"""Sums over ranks as early as they can be, and several as one: what is computed then need not wait for them.

Parallel, between stages 3 and 4, the last pass over a local jaxpr that is spelled out. In: sums where transforms left
them. Out: each where its operand is there. Those that nothing reads for a while, as gradients, are collected until a
bucket is full (Li et al., "PyTorch Distributed", 2020, section 3.2.3): links are slow with small pieces.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.kernels.access import moves
from blufunc.parallel import mesh_collectives as mc

BUCKET_BYTES = 25 << 20
"""From how many bytes on a bucket is full: links reach their full speed from about here on."""

_KINDS = {mc.psum_invariant_p: "all_reduce", mc.mesh_psum_scatter_p: "reduce_scatter"}


def in_buckets(jaxpr: Jaxpr) -> Jaxpr:
    """The program with sums over ranks where their operands are there, or behind the last operand of their bucket.

    Movement of what is summed goes with it. What gathers stays where it is wanted, for it makes values larger.
    """
    return _Buckets(jaxpr).run()


class _Buckets:
    """One pass over a jaxpr.

    Attributes:
      order: the equations so far.
      known: the variables that they and the parameters have.
      waiting: by the axes of the ranks, the sums of the bucket that is being filled.
      sum_of: for a variable that waits, its sum.
      readers: of variables, the sums, and the movement of what is summed.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.order: list[Eqn] = []
        self.seen: set[Eqn] = set()
        self.known: set[Any] = {*jaxpr.constvars, *jaxpr.invars}
        self.waiting: dict[Any, list[Eqn]] = {}
        self.sum_of: dict[Any, Eqn] = {}
        self.readers: dict[Any, list[Eqn]] = {}
        early = _early(jaxpr)
        for eqn in jaxpr.eqns:
            for a in dict.fromkeys(a for a in eqn.invars if a.__class__ is Var and eqn in early):
                self.readers.setdefault(a, []).append(eqn)

    def run(self) -> Jaxpr:
        for eqn in self.jaxpr.eqns:
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
        axes = eqn.params["axes"], eqn.params["sizes"]
        bucket = self.waiting.setdefault(axes, [])
        bucket.append(eqn)
        self.sum_of[eqn.outvars[0]] = eqn
        if sum(e.invars[0].aval.nbytes for e in bucket) >= BUCKET_BYTES:
            self.flush(axes)

    def emit(self, eqn: Eqn) -> None:
        self.order.append(eqn)
        self.known.update(eqn.outvars)
        for reader in (r for v in eqn.outvars for r in self.readers.get(v, ())):
            if reader not in self.seen and all(
                a.__class__ is Literal or a in self.known for a in reader.invars
            ):
                self.take(reader)

    def want(self, eqn: Eqn) -> None:
        """A sum is read now: one that came last goes by itself, another takes all of its bucket along."""
        axes = eqn.params["axes"], eqn.params["sizes"]
        if eqn is not self.waiting[axes][-1]:
            self.flush(axes)
            return
        self.waiting[axes].pop()
        del self.sum_of[eqn.outvars[0]]
        self.emit(eqn)

    def flush(self, axes: Any) -> None:
        """The sums of a bucket become one equation."""
        bucket = self.waiting.pop(axes)
        if not bucket:
            return
        invars, outvars = [e.invars[0] for e in bucket], [e.outvars[0] for e in bucket]
        for v in outvars:
            del self.sum_of[v]
        lines = mc.Lines(tuple([e.source for e in bucket]))
        kinds = tuple([_KINDS[e.prim] for e in bucket])
        params = {"axes": axes[0], "sizes": axes[1], "kinds": kinds, "lines": lines}
        self.emit(Eqn(mc.mesh_sums_p, invars, outvars, params, bucket[0].source))


def _early(jaxpr: Jaxpr) -> set[Eqn]:
    """The sums, and movement that only makes their operands."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    early: set[Eqn] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn.prim in _KINDS or (moves(eqn) and eqn in early):
            early.add(eqn)
            early.update(makers[a] for a in eqn.invars if a in makers and moves(makers[a]))
    return early
