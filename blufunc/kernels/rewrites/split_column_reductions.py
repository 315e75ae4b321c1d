"""Before stage 5: what long rows are reduced to over rows is computed of what is in memory.

Kernels, before ``fusion/fuse.py``. A kernel has no room for what it finds for each column beside a row that is too long
for registers, so that ``fuse`` keeps such reductions apart (``Target.summed_lanes``). They may take up what is computed
of one array element by element, as ``abs`` of a gradient for its largest number, and so may reductions of the rows:
then that would be stored for them, beside the array. Here they get equations of their own for it, which read the array.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.programs.simplify import Origins
from blufunc.kernels.fusion.iteration_space import Frame, reduces, role_of
from blufunc.kernels.loopir.access_map import moves


def with_columns_apart(jaxpr: Jaxpr, origins: Origins, lanes: int) -> Jaxpr:
    """The program in which reductions over rows of more than ``lanes`` lanes compute of one array what they take up.

    Args:
      origins: to which the new equations are added, each reduction's under a number of its own: fusion keeps them from
        the first ones.
    """
    found = [e for e in jaxpr.eqns if _reduces_columns(e, lanes)]
    if not found:
        return jaxpr
    program = _Program(jaxpr)
    new: dict[Eqn, list[Eqn]] = {}
    for eqn in found:
        chain = program.chain_of(eqn)
        fresh: dict[Any, Var] = {x.outvars[0]: Var(x.outvars[0].aval) for x in chain}
        renamed = [[fresh.get(a, a) for a in x.invars] for x in (*chain, eqn)]
        copies = [x.with_vars(a, [fresh[x.outvars[0]]]) for x, a in zip(chain, renamed, strict=False)]
        origins.update(dict.fromkeys(copies, 1 + max(origins.values(), default=0)))
        new[eqn] = [*copies, eqn.with_invars(renamed[-1])]
    return jaxpr.replace(eqns=[made for e in jaxpr.eqns for made in new.get(e, [e])])


def _reduces_columns(eqn: Eqn, lanes: int) -> bool:
    """Whether an equation reduces rows of more than so many lanes, each lane for itself."""
    role, most = _reduction_of(eqn)
    return role == "column" and most > lanes


def _reduction_of(eqn: Eqn) -> tuple[str, int]:
    """The role of a reduction's result, and how many lanes its rows have; no role where it is none."""
    found = role_of(eqn, Frame(eqn.invars[0].aval.size)) if reduces(eqn.prim) else None
    return ("", 0) if found is None else (found[0], found[1].lanes or 0)


class _Program:
    """Who makes the variables of a program, and who reads them."""

    def __init__(self, jaxpr: Jaxpr):
        self.makers: dict[Any, Eqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.position = {e: i for i, e in enumerate(jaxpr.eqns)}
        self.readers: dict[Any, list[Eqn]] = {}
        for e in jaxpr.eqns:
            for a in e.invars:
                if not isinstance(a, Literal):
                    self.readers.setdefault(a, []).append(e)
        for a in jaxpr.outvars:
            self.makers.pop(a, None)  # a result is in memory

    def chain_of(self, reduction: Eqn) -> list[Eqn]:
        """The equations, in order, that compute what reductions take up of one array that others read too. None where
        lanes of rows do not meet in it, or where they are dear or read several arrays.
        """
        operand = reduction.invars[0]
        roles = [_reduction_of(r)[0] for r in self.readers.get(operand, [])]
        if "row" not in roles or "" in roles:
            return []
        chain: set[Eqn] = set()
        sources = {operand}
        while True:
            more = [v for v in sources if self._is_inside(v, chain) or (v is operand and self._is_cheap(v))]
            if not more:
                break
            chain.update(self.makers[v] for v in more)
            sources = {a for e in chain for a in e.invars if self._is_array(a)}
            sources -= {e.outvars[0] for e in chain}
        return sorted(chain, key=self.position.__getitem__) if len(sources) == 1 else []

    def _is_inside(self, v: Atom, chain: set[Eqn]) -> bool:
        """Whether only a chain reads a value that is cheap."""
        return self._is_cheap(v) and all(r in chain for r in self.readers[v])

    def _is_cheap(self, v: Atom) -> bool:
        maker = self.makers.get(v)
        return maker is not None and isinstance(maker.prim, Elementwise) and maker.prim.cost <= 1

    def _is_array(self, a: Atom) -> bool:
        """Whether an operand is more than one number that is spread."""
        while not isinstance(a, Literal) and a in self.makers and moves(self.makers[a]):
            a = self.makers[a].invars[0]
        return a.aval.size > 1
