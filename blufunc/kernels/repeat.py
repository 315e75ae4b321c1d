"""A fused program on both sides of a position: what is read behind it, and how that is computed again there.

Kernels, between stages 5 and 7, below ``remat.py`` and ``budget_cuts.py``, which choose. In: a fusion, and the position
of an equation, most often where the peak of memory is. Out: the program in which chosen values are computed a second
time, each right before its first reader behind the position; so they need not be kept until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from blufunc.core.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.kernels.fuse import Fusion


class Divided:
    """A program seen from a position.

    Args:
      fusion: the program, its equations in the order in which steps run.
      peak: the position of an equation: what comes later is behind it.

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
        """The variables in memory behind an operand."""
        if atom.__class__ is Literal:
            return ()
        found = self._leaves.get(atom)  # type: ignore[arg-type]
        if found is None:
            v: Var = atom  # type: ignore[assignment]
            eqn = self.fusion.virtual.get(v)
            behind = (v,) if eqn is None else dict.fromkeys(x for a in eqn.invars for x in self.leaves(a))
            found = self._leaves[v] = tuple(behind)
        return found

    def repeated(
        self, again: Mapping[Var, int], origins: dict[Eqn, int], kept: Collection[Var] = ()
    ) -> Jaxpr:
        """The program with what is computed again before its first reader behind the peak.

        Args:
          again: the variables that are computed again, and for each the number that its equation has in ``origins``.
          origins: for equations, the call that computes them again; the new equations are added.
          kept: variables that are read as they are, although they only move what is computed again.
        """
        eqns: list[Eqn] = []
        fresh: dict[Atom, Var] = {}
        position = {e: i for i, e in enumerate(self.jaxpr.eqns)}

        def stays(atom: Atom) -> bool:
            if atom.__class__ is Literal or self.made.get(atom, self.peak + 1) > self.peak:  # type: ignore[arg-type]
                return True
            moved = atom in self.fusion.virtual and any(x in again for x in self.leaves(atom))
            return atom in kept or not (atom in again or moved)

        def bring(atoms: Iterable[Atom]) -> list[Atom]:
            """What stands for operands behind the peak."""
            missing: set[Eqn] = set()
            pending = list(atoms := list(atoms))
            while pending:
                atom = pending.pop()
                if atom in fresh or stays(atom):
                    continue
                eqn = self.maker[atom]  # type: ignore[index]
                if eqn not in missing:
                    missing.add(eqn)
                    pending.extend(eqn.invars)
            for eqn in sorted(missing, key=position.__getitem__):
                outs = [DropVar(v.aval) if v.__class__ is DropVar else Var(v.aval) for v in eqn.outvars]
                made = eqn.with_vars([fresh.get(a, a) for a in eqn.invars], outs)
                number = next((again[v] for v in eqn.outvars if v in again), None)
                if number is not None:
                    origins[made] = number
                fresh.update(zip(eqn.outvars, outs, strict=True))
                eqns.append(made)
            return [fresh.get(a, a) for a in atoms]

        for i, eqn in enumerate(self.jaxpr.eqns):
            if i > self.peak and any(a.__class__ is not Literal for a in eqn.invars):
                new = eqn.with_invars(bring(eqn.invars))
                if new is not eqn and eqn in origins:
                    origins[new] = origins[eqn]
                eqn = new
            eqns.append(eqn)
        return self.jaxpr.replace(eqns=_read(eqns, self.jaxpr.outvars))


def _read(eqns: list[Eqn], outvars: Iterable[Atom]) -> list[Eqn]:
    """Without the equations whose results nobody reads any more: those that were read behind the peak alone."""
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
