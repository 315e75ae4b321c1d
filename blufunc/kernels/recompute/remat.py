"""Rematerialization of cheap values that would be kept for the backward pass.

Kernels, between stages 5 and 7. In: a fused and planned program. Out: a jaxpr that computes some values, which were
alive at the peak of memory, a second time after it, from smaller values or from values that are alive anyway.

Equations after the peak read values of each region before it. Within the region every value is a function of its
operands, so the saved values form a vertex cut between the region's inputs and the values that are read; a minimum cut
(L. R. Ford, D. R. Fulkerson, "Maximal Flow Through a Network", 1956) saves the fewest bytes. Only elementwise equations
are repeated: the cut must come after reductions and gathers. So a GELU saves its argument in place of its result and
derivative, and a normalization its normalized input in place of that and its result.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.repeat import AroundPeak


class Rematerializer(AroundPeak):
    """Recomputation of cheap values of a program.

    Args:
      fusion: the program, fused.
      peak: the position of an equation: values that are read after it are alive at the peak.
      origins: the call that recomputes an equation, by equation; the new equations are added.
      least: bytes that a region must save.
    """

    def __init__(self, fusion: Fusion, peak: int, origins: dict[Eqn, int], least: int):
        super().__init__(fusion, peak)
        self.origins, self.least = origins, least
        position = {id(e): i for i, e in enumerate(self.jaxpr.eqns)}
        self.regions = [r for r in fusion.regions if r.eqns and position[id(r.eqns[-1])] < peak]
        late = self.jaxpr.eqns[peak + 1 :]
        read_late = [e for e in late if not e.outvars or e.outvars[0] not in fusion.virtual]
        self.late = self.results.union(leaf for e in read_late for a in e.invars for leaf in self.leaves(a))
        self.written = set(self.results)  # and values that other steps read before the peak
        for step in fusion.steps:
            own = step.roles if isinstance(step, Region) else {}
            for eqn in step.eqns if isinstance(step, Region) else [step.eqn]:
                if position[id(eqn)] <= peak:
                    self.written.update(v for a in eqn.invars for v in self.leaves(a) if v not in own)

    def run(self) -> Jaxpr:
        """The program with cheap values recomputed."""
        recomputed: dict[Var, int] = {}
        origin = max(self.origins.values(), default=0)
        for region in self.regions:
            if chosen := self.choose(region):
                origin += 1
                recomputed.update(dict.fromkeys(chosen, origin))
        return self.repeated(recomputed, self.origins) if recomputed else self.jaxpr

    def choose(self, region: Region) -> list[Var]:
        """The values of a region that are recomputed."""
        read = [v for v in region.outputs if v in self.late and v not in self.results and v in region.roles]
        size = sum(v.aval.nbytes for v in read)
        if size < self.least:
            return []
        nodes: dict[Var, list[Var] | None] = {}
        pending = list(read)
        while pending:
            v = pending.pop()
            if v not in nodes:
                nodes[v] = self.operands(v, region)
                pending.extend(nodes[v] or ())
        flow = Network()
        for v, operands in nodes.items():
            flow.edge((v, "in"), (v, "out"), self.price(v, region))
            if not operands:
                flow.edge("source", (v, "in"), UNLIMITED)
            for x in operands or ():
                flow.edge((x, "out"), (v, "in"), UNLIMITED)
        for v in read:
            flow.edge((v, "out"), "sink", UNLIMITED)
        near = flow.near_sink("source", "sink")
        saved = [v for v in nodes if (v, "out") in near and (v, "in") not in near]
        gain = size - sum(self.price(v, region) for v in saved)
        return [v for v in nodes if (v, "in") in near] if gain >= self.least else []

    def price(self, v: Var, region: Region) -> int:
        """Bytes that saving a variable adds, a few more if no other step reads it."""
        nbytes = v.aval.nbytes
        if v not in region.roles:
            return 0 if v in self.late or v not in self.position else nbytes
        return nbytes + (0 if v in self.written else nbytes >> 6)

    def operands(self, v: Var, region: Region) -> list[Var] | None:
        """The operands of an elementwise value; None for others, which must be saved."""
        eqn = self.maker.get(v)
        if v not in region.roles or eqn is None:
            return None
        if not (isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p):
            return None
        return list(dict.fromkeys(leaf for a in eqn.invars for leaf in self.leaves(a)))
