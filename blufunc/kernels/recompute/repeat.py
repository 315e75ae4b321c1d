"""A program before and after its peak, and the program that recomputes values.

Kernels, between stages 5 and 7, below ``remat.py`` and ``budget_cuts.py``, which choose the values. In: a fusion, and
the position of an equation, usually at the peak of memory. Out: the program in which each chosen value is computed a
second time, right before its first reader after that position; so it need not be kept until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.kernels.fusion.fuse import Fusion


class AroundPeak:
    """A program before and after the peak of its memory.

    Args:
      fusion: the program, its equations in the order in which steps run.
      peak: the position of the last equation that has run at the peak.

    Attributes:
      position: of the equation that computes a variable.
      maker: that equation.
      results: the variables in memory that the program returns.
    """

    def __init__(self, fusion: Fusion, peak: int):
        self.fusion, self.jaxpr, self.peak = fusion, fusion.jaxpr, peak
        self.position = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}
        self.maker = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        self._leaves: dict[Var, tuple[Var, ...]] = {}
        self.results = {leaf for a in self.jaxpr.outvars for leaf in self.leaves(a)}

    def leaves(self, atom: Atom) -> tuple[Var, ...]:
        """The variables in memory that an operand is a view of."""
        if atom.__class__ is Literal:
            return ()
        v: Var = atom  # type: ignore[assignment]
        if v not in self._leaves:
            eqn = self.fusion.virtual.get(v)
            read = (v,) if eqn is None else dict.fromkeys(x for a in eqn.invars for x in self.leaves(a))
            self._leaves[v] = tuple(read)
        return self._leaves[v]

    def repeated(
        self,
        recomputed: Mapping[Var, int],
        origins: dict[Eqn, int],
        kept: Collection[Var] = (),
        instead: Mapping[Var, Sequence[Eqn]] = MappingProxyType({}),
        with_readers: bool = False,
        read: Collection[Var] = (),
    ) -> Jaxpr:
        """The program that recomputes values before their first reader after the peak.

        Args:
          recomputed: the values, each with the index that its equation gets in ``origins``.
          origins: the call that recomputes an equation, by equation; the new equations are added.
          kept: variables that are read unchanged, although they are views of recomputed ones.
          instead: for values that are recomputed by other equations than their own, those equations.
          with_readers: whether equations that are recomputed for an equation of a recomputing call may be fused with
            it: then both, and the rest of that call after the peak, get a new index.
          read: variables that the caller adds readers of.
        """
        eqns: list[Eqn] = []
        fresh: dict[Atom, Var] = {}
        position = {e: i for i, e in enumerate(self.jaxpr.eqns)}
        renewed: dict[int, int] = {}  # the new indices of calls
        unused = itertools.count(1 + max([*origins.values(), *recomputed.values()], default=0))

        def stays(atom: Atom) -> bool:
            if atom.__class__ is Literal or atom in kept:
                return True
            if self.position.get(atom, self.peak + 1) > self.peak:  # type: ignore[arg-type]
                return True
            moved = atom in self.fusion.virtual and any(x in recomputed for x in self.leaves(atom))
            return atom not in recomputed and not moved

        def recompute_for(reader: Eqn) -> list[Atom]:
            """Add the equations that a reader needs; returns its operands."""
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
                origin = next(
                    (joined or recomputed[v] for e in way for v in e.outvars if v in recomputed), None
                )
                for eqn in way:
                    outs = [DropVar(v.aval) if v.__class__ is DropVar else Var(v.aval) for v in eqn.outvars]
                    eqns.append(eqn.with_vars([fresh.get(a, a) for a in eqn.invars], outs))
                    if origin is not None:
                        origins[eqns[-1]] = origin
                    fresh.update(zip(eqn.outvars, outs, strict=True))
            return [fresh.get(a, a) for a in reader.invars]

        for i, eqn in enumerate(self.jaxpr.eqns):
            if i > self.peak and any(a.__class__ is not Literal for a in eqn.invars):
                new = eqn.with_invars(recompute_for(eqn))
                if new is not eqn and eqn in origins:
                    origins[new] = origins[eqn]
                eqn = new
            eqns.append(eqn)
        late = eqns[self.peak + 1 :]  # equations of such a call before the peak keep their index
        origins.update([(e, renewed[origins[e]]) for e in late if origins.get(e) in renewed])
        return self.jaxpr.replace(eqns=_read(eqns, [*self.jaxpr.outvars, *read]))


def _read(eqns: list[Eqn], outvars: Iterable[Atom]) -> list[Eqn]:
    """Drop the equations that only readers after the peak needed."""
    read: set[Atom] = set(outvars)
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read.update(eqn.invars)
            kept.append(eqn)
    return kept[::-1]
