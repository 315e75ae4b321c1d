"""Before the final plan: what is cheap to compute again is not kept for the backward pass.

Kernels, between stages 5 and 7. In: a fused and planned program. Out: a jaxpr in which some values that were alive
at the peak of memory are computed a second time, behind it, from others that are smaller or alive anyway.

For each region before the peak there are values that steps behind it read. Inside of the region every value is a
function of its operands, so what has to be kept is a vertex cut between the region's inputs and those values; a
minimum cut (L. R. Ford, D. R. Fulkerson, "Maximal Flow Through a Network", 1956) keeps the fewest bytes. Only
elementwise equations are repeated: the cut may not lie before a reduction or a gather. So a GELU keeps what goes into
it in the place of its result and its derivative, and a normalisation its normalised input in the place of that and its
result.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.repeat import Divided, nbytes


def rematerialise(fusion: Fusion, peak: int, origins: dict[Eqn, int], worth: int) -> Jaxpr:
    """The program with cheap values computed again.

    Args:
      fusion: the program, fused.
      peak: the position of an equation: what is read behind it is alive at the peak.
      origins: for equations, the call that computes them again; the new equations are added.
      worth: how many bytes a region must save.
    """
    return _Rematerialiser(fusion, peak, origins, worth).run()


class _Rematerialiser(Divided):
    def __init__(self, fusion: Fusion, peak: int, origins: dict[Eqn, int], worth: int):
        super().__init__(fusion, peak)
        self.origins, self.worth = origins, worth
        self.position = {id(e): i for i, e in enumerate(self.jaxpr.eqns)}
        self.late = self.read_late()
        self.written = self.results | self.read_early()
        self.again: dict[Var, int] = {}  # what is computed again, and the number of the region it is from
        self.next_origin = max(origins.values(), default=0)

    def run(self) -> Jaxpr:
        for region in self.fusion.regions:
            if region.eqns and self.position[id(region.eqns[-1])] < self.peak:
                self.choose(region)
        return self.repeated(self.again, self.origins) if self.again else self.jaxpr

    def read_late(self) -> set[Var]:
        """The variables in memory that equations behind the peak read, and results."""
        late = set(self.results)
        for eqn in self.jaxpr.eqns[self.peak + 1 :]:
            if eqn.outvars and eqn.outvars[0] in self.fusion.virtual:
                continue
            late.update(leaf for a in eqn.invars for leaf in self.leaves(a))
        return late

    def read_early(self) -> set[Var]:
        """The variables in memory that steps up to the peak read which do not compute them."""
        early: set[Var] = set()
        for step in self.fusion.steps:
            own = step.roles if isinstance(step, Region) else {}
            for eqn in step.eqns if isinstance(step, Region) else [step.eqn]:
                if self.position[id(eqn)] <= self.peak:
                    early.update(v for a in eqn.invars for v in self.leaves(a) if v not in own)
        return early

    # -- what to keep --------------------------------------------------------------------------

    def choose(self, region: Region) -> None:
        """Mark what of a region is computed again."""
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
                self.again[v] = self.next_origin
        # what lies between the cut and what is wanted is found again when that is written
        self.again.update((v, self.next_origin) for v in self.between(region, wanted, cut))

    def price(self, v: Var, region: Region) -> int:
        """The bytes that keeping a variable takes beyond what is kept anyway; a little more for what would not be
        written if it were not kept.
        """
        if v not in region.roles:
            return 0 if v in self.late or v not in self.made else nbytes(v)
        return nbytes(v) + (0 if v in self.written else nbytes(v) >> 6)

    def operands(self, v: Var, region: Region) -> list[Var] | None:
        """What a value is computed of, element by element; None where it must be kept."""
        eqn = self.maker.get(v)
        if v not in region.roles or eqn is None:
            return None
        if not (isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p):
            return None
        return list(dict.fromkeys(leaf for a in eqn.invars for leaf in self.leaves(a)))

    def cut(self, region: Region, wanted: list[Var]) -> set[Var]:
        """The cheapest variables of which all wanted ones can be computed."""
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
        behind = flow.near_sink("source", "sink")
        return {v for v in nodes if (v, "out") in behind and (v, "in") not in behind}

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
