"""Recomputation of chosen values after a position of a fused program.

Kernels, between stages 5 and 7, below ``remat.py`` and ``budget_cuts.py``, which choose. In: a fusion, and the
position of an equation, most often that of the peak of memory. Out: the program that recomputes chosen values, each
right before its first reader after the position; so they need not be saved until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.kernels.fusion.fuse import Fusion


class Divided:
    """A program split at a position.

    Args:
      fusion: the program, its equations in execution order.
      peak: the position of an equation, after which the program is split.

    Attributes:
      made: the position at which each variable is computed.
      maker: the equation that does so.
      results: the variables in memory that the program returns.
    """

    def __init__(self, fusion: Fusion, peak: int):
        self.fusion, self.jaxpr, self.peak = fusion, fusion.jaxpr, peak
        self.made = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}
        self.maker = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        self._leaves: dict[Var, tuple[Var, ...]] = {}
        self.results = {leaf for a in self.jaxpr.outvars for leaf in self.leaves(a)}

    def leaves(self, atom: Atom) -> tuple[Var, ...]:
        """The variables in memory from which an operand is computed."""
        if atom.__class__ is Literal:
            return ()
        found = self._leaves.get(atom)  # type: ignore[arg-type]
        if found is None:
            v: Var = atom  # type: ignore[assignment]
            eqn = self.fusion.virtual.get(v)
            leaves = (v,) if eqn is None else dict.fromkeys(x for a in eqn.invars for x in self.leaves(a))
            found = self._leaves[v] = tuple(leaves)
        return found

    def repeated(
        self,
        recomputed: Mapping[Var, int],
        origins: dict[Eqn, int],
        kept: Collection[Var] = (),
        instead: Mapping[Var, Sequence[Eqn]] = MappingProxyType({}),
        with_readers: bool = False,
    ) -> Jaxpr:
        """The program that recomputes values before their first readers after the peak.

        Args:
          recomputed: the variables that are recomputed, and for each the origin of its equation.
          origins: for equations, the call that recomputes them; the new equations are added.
          kept: variables that are read from memory, although they only move a recomputed value.
          instead: for variables that are recomputed in another way, the equations for that.
          with_readers: whether recomputed equations may be fused with a reader that is a recomputation itself: then
            both, and the rest of that call after the peak, get a new origin.
        """
        eqns: list[Eqn] = []
        fresh: dict[Atom, Var] = {}
        position = {e: i for i, e in enumerate(self.jaxpr.eqns)}
        renewed: dict[int, int] = {}  # old to new origins
        unused = itertools.count(1 + max([*origins.values(), *recomputed.values()], default=0))

        def stays(atom: Atom) -> bool:
            if atom.__class__ is Literal or self.made.get(atom, self.peak + 1) > self.peak:  # type: ignore[arg-type]
                return True
            moved = atom in self.fusion.virtual and any(x in recomputed for x in self.leaves(atom))
            return atom in kept or not (atom in recomputed or moved)

        def bring(reader: Eqn) -> list[Atom]:
            """The operands of an equation after the peak, recomputed where needed."""
            missing: dict[int, Sequence[Eqn]] = {}
            pending = list(reader.invars)
            while pending:
                atom = pending.pop()
                if atom in fresh or stays(atom):
                    continue
                maker = self.maker[atom]  # type: ignore[index]
                if position[maker] not in missing:
                    missing[position[maker]] = way = instead.get(atom, (maker,))  # type: ignore[arg-type]
                    own = {v for e in way for v in e.outvars}
                    pending.extend(a for e in way for a in e.invars if a not in own)
            joined = None
            if missing and with_readers and reader in origins:
                joined = renewed.get(origins[reader]) or next(unused)
                renewed[origins[reader]] = joined
            for _, way in sorted(missing.items()):
                number = next(
                    (joined or recomputed[v] for e in way for v in e.outvars if v in recomputed), None
                )
                for eqn in way:
                    outs = [DropVar(v.aval) if v.__class__ is DropVar else Var(v.aval) for v in eqn.outvars]
                    made = eqn.with_vars([fresh.get(a, a) for a in eqn.invars], outs)
                    if number is not None:
                        origins[made] = number
                    fresh.update(zip(eqn.outvars, outs, strict=True))
                    eqns.append(made)
            return [fresh.get(a, a) for a in reader.invars]

        for i, eqn in enumerate(self.jaxpr.eqns):
            if i > self.peak and any(a.__class__ is not Literal for a in eqn.invars):
                new = eqn.with_invars(bring(eqn))
                if new is not eqn and eqn in origins:
                    origins[new] = origins[eqn]
                eqn = new
            eqns.append(eqn)
        late = eqns[self.peak + 1 :]  # the part of such a call before the peak keeps its origin
        origins.update([(e, renewed[origins[e]]) for e in late if origins.get(e) in renewed])
        return self.jaxpr.replace(eqns=_read(eqns, self.jaxpr.outvars))


def _read(eqns: list[Eqn], outvars: Iterable[Atom]) -> list[Eqn]:
    """Without the equations whose results are no longer read."""
    read: set[Atom] = set(outvars)
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read.update(eqn.invars)
            kept.append(eqn)
    return kept[::-1]


def nbytes(v: Var) -> int:
    """The size of a variable in memory."""
    return v.aval.size * v.aval.dtype.itemsize
