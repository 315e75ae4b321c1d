"""Default rematerialization: recompute cheap values in the backward pass.

Kernels, between stages 5 and 7, before the final plan. In: a fused and planned program. Out: a jaxpr that recomputes
some values alive at the peak of memory after it, from others that are smaller or alive anyway.

For each region before the peak there are values that steps after it read. Inside of the region every value is a
function of its operands, so the saved values are a vertex cut between the region's inputs and those values; a minimum
cut (L. R. Ford, D. R. Fulkerson, "Maximal Flow Through a Network", 1956) saves the fewest bytes. Only elementwise
equations are repeated: the cut may not precede a reduction or a gather. So a GELU saves its input instead of its
result and derivative, and a normalization saves its normalized input instead of that and its result.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.repeat import Divided, nbytes


def rematerialise(fusion: Fusion, peak: int, origins: dict[Eqn, int], worth: int) -> Jaxpr:
    """The program with cheap values recomputed after the peak.

    Args:
      fusion: the program, fused.
      peak: the position of an equation: values read after it are alive at the peak.
      origins: for equations, the call that recomputes them; the new equations are added.
      worth: bytes that a region must save at least.
    """
    return _Rematerialiser(fusion, peak, origins, worth).run()


class _Rematerialiser(Divided):
    def __init__(self, fusion: Fusion, peak: int, origins: dict[Eqn, int], worth: int):
        super().__init__(fusion, peak)
        self.origins, self.worth = origins, worth
        self.position = {id(e): i for i, e in enumerate(self.jaxpr.eqns)}
        self.late = self.read_late()
        self.written = self.results | self.read_early()
        self.recomputed: dict[Var, int] = {}  # recomputed values, and the index of the region of each
        self.next_origin = max(origins.values(), default=0)

    def run(self) -> Jaxpr:
        for region in self.fusion.regions:
            if region.eqns and self.position[id(region.eqns[-1])] < self.peak:
                self.choose(region)
        return self.repeated(self.recomputed, self.origins) if self.recomputed else self.jaxpr

    def read_late(self) -> set[Var]:
        """The variables in memory that equations after the peak read, and results."""
        late = set(self.results)
        for eqn in self.jaxpr.eqns[self.peak + 1 :]:
            if eqn.outvars and eqn.outvars[0] in self.fusion.virtual:
                continue
            late.update(leaf for a in eqn.invars for leaf in self.leaves(a))
        return late

    def read_early(self) -> set[Var]:
        """The variables in memory that steps up to the peak read but do not compute."""
        early: set[Var] = set()
        for step in self.fusion.steps:
            own = step.roles if isinstance(step, Region) else {}
            for eqn in step.eqns if isinstance(step, Region) else [step.eqn]:
                if self.position[id(eqn)] <= self.peak:
                    early.update(v for a in eqn.invars for v in self.leaves(a) if v not in own)
        return early

    # -- what to keep --------------------------------------------------------------------------

    def choose(self, region: Region) -> None:
        """Mark the values of a region to recompute."""
        late = lambda v: v in self.late and v not in self.results
        wanted = [v for v in region.outputs if late(v) and v in region.roles]
        if sum(map(nbytes, wanted)) < self.worth:
            return
        cut = self.cut(region, wanted)
        gain = sum(map(nbytes, wanted)) - sum(self.price(v, region) for v in cut)
        if gain < self.worth:
            return
        self.next_origin += 1
        for v in wanted:
            if v not in cut:
                self.recomputed[v] = self.next_origin
        # values between the cut and the targets are recomputed on the way
        self.recomputed.update((v, self.next_origin) for v in self.between(region, wanted, cut))

    def price(self, v: Var, region: Region) -> int:
        """Additional bytes of saving a variable; a little more if stored only for that."""
        if v not in region.roles:
            return 0 if v in self.late or v not in self.made else nbytes(v)
        return nbytes(v) + (0 if v in self.written else nbytes(v) >> 6)

    def operands(self, v: Var, region: Region) -> list[Var] | None:
        """The elementwise operands of a value; None if it must be saved."""
        eqn = self.maker.get(v)
        if v not in region.roles or eqn is None:
            return None
        if not (isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p):
            return None
        return list(dict.fromkeys(leaf for a in eqn.invars for leaf in self.leaves(a)))

    def cut(self, region: Region, wanted: list[Var]) -> set[Var]:
        """The cheapest variables from which all wanted ones can be computed."""
        nodes: dict[Var, list[Var] | None] = {}
        pending = list(wanted)
        while pending:
            v = pending.pop()
            if v not in nodes:
                nodes[v] = self.operands(v, region)
                pending.extend(nodes[v] or ())
        flow = Network()
        for v, operands in nodes.items():
            flow.edge((v, "in"), (v, "out"), self.price(v, region))
            if operands is None or not operands:
                flow.edge("source", (v, "in"), UNLIMITED)
            for x in operands or ():
                flow.edge((x, "out"), (v, "in"), UNLIMITED)
        for v in wanted:
            flow.edge((v, "out"), "sink", UNLIMITED)
        late = flow.near_sink("source", "sink")
        return {v for v in nodes if (v, "out") in late and (v, "in") not in late}

    def between(self, region: Region, wanted: list[Var], cut: set[Var]) -> list[Var]:
        found: dict[Var, None] = {}
        pending = [v for v in wanted if v not in cut]
        while pending:
            v = pending.pop()
            if v in cut or v in found:
                continue
            found[v] = None
            pending.extend(x for x in self.operands(v, region) or () if x in region.roles)
        return list(found)
