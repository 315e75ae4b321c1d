"""All-reduce bucketing: issue sums over ranks early, and fuse small ones.

Parallel, between stages 3 and 4, the last pass over a lowered local jaxpr. In: sums where transforms left them. Out:
each sum right after its operand. Sums whose results are not read for a while, such as gradients, share a bucket (Li et
al., "PyTorch Distributed", 2020, section 3.2.3), because links are slow for small messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from blufunc.config import config
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import convert_p
from blufunc.kernels.loopir.access_map import moves
from blufunc.parallel.collectives import primitives as mc

_KINDS = {mc.psum_invariant_p: "all_reduce", mc.mesh_psum_scatter_p: "reduce_scatter"}


def in_buckets(jaxpr: Jaxpr) -> Jaxpr:
    """Move each sum after its operand, or after the last operand of its bucket.

    Equations that move or convert a gradient move with its sum: a program that casts its parameters once converts all
    gradients at its end. All-gathers stay at their first use, because they make values larger.
    """
    return _Buckets(jaxpr).run()


class _Buckets:
    """One pass over a jaxpr.

    Attributes:
        order: the equations emitted so far.
        known: the variables that these and the parameters define.
        waiting: the sums of the bucket being filled, by mesh axes.
        nbytes: the size in bytes of their operands, by mesh axes.
        left: the number of sums still to come, by mesh axes.
        sum_of: the sum that a waiting variable depends on.
        followers: the equations that pass on a waiting sum, and wait with it.
        readers: the sums that read a variable, directly or through equations that pass it on.
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
        self.followers: dict[Eqn, list[Eqn]] = {}
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
        """Emit an equation whose operands are known, or add it to a bucket."""
        self.seen.add(eqn)
        if eqn.prim not in _KINDS:
            self.emit(eqn)
            return
        axes = _axes(eqn)
        self.waiting.setdefault(axes, []).append(eqn)
        self.nbytes[axes] += eqn.invars[0].aval.nbytes
        self.left[axes] -= 1
        self.sum_of[eqn.outvars[0]] = eqn
        if self.nbytes[axes] >= config.bucket_bytes:
            self.flush(axes)

    def wait(self, eqn: Eqn, sum_: Eqn) -> None:
        """Delay an equation together with the sum that it reads."""
        self.seen.add(eqn)
        self.followers.setdefault(sum_, []).append(eqn)
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
        """Emit a sum that is read now: alone if newest and more follow, else its bucket."""
        axes = _axes(eqn)
        if eqn is not self.waiting[axes][-1] or not self.left[axes]:
            self.flush(axes)
            return
        self.waiting[axes].pop()
        self.nbytes[axes] -= eqn.invars[0].aval.nbytes
        self.settle([eqn], eqn)

    def flush(self, axes: Any) -> None:
        """Fuse the sums of a bucket into one equation."""
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
        """Emit ``eqn``, which computes ``sums``, then the equations that waited for them."""
        followers = [e for s in sums for e in self.followers.pop(s, ())]
        for e in (*sums, *followers):
            del self.sum_of[e.outvars[0]]
        for e in (eqn, *followers):
            self.emit(e)


def _axes(eqn: Eqn) -> tuple[Any, Any]:
    return eqn.params["axes"], eqn.params["sizes"]


def passes_on(eqn: Eqn) -> bool:
    """True if an equation only moves or converts the elements of its operand."""
    return moves(eqn) or eqn.prim is convert_p


def _early(jaxpr: Jaxpr) -> set[Eqn]:
    """The sums, and the equations that only pass on their operands."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    early: set[Eqn] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn.prim in _KINDS or (passes_on(eqn) and eqn in early):
            early.add(eqn)
            early.update(makers[a] for a in eqn.invars if a in makers and passes_on(makers[a]))
    return early
