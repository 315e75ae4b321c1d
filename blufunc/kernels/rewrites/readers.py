"""Producers and readers of the variables of a jaxpr, for rewrites.

Kernels, below the rewrites. In: a jaxpr. Out: ``Readers``, of the jaxpr as it was.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal


class Readers:
    """The equations that compute and read the variables of a jaxpr.

    Attributes:
      makers: by variable, the equation that computes it.
      position: by variable, the position of that equation; -1 for parameters.
      returned: the variables that are results.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.makers: dict[Any, Eqn] = {}
        self.position: dict[Any, int] = dict.fromkeys(jaxpr.invars, -1)
        self.readers: dict[Any, list[Eqn]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self.makers.update(dict.fromkeys(eqn.outvars, eqn))
            self.position.update(dict.fromkeys(eqn.outvars, i))
            self.read(eqn)
        self.returned: set[Any] = {a for a in jaxpr.outvars if a.__class__ is not Literal}

    def read(self, eqn: Eqn) -> None:
        """Add an equation to the readers of its operands, once per operand."""
        for a in eqn.invars:
            if a.__class__ is not Literal:
                self.readers.setdefault(a, []).append(eqn)

    def of(self, v: Atom) -> list[Eqn]:
        """The equations that read a variable."""
        return self.readers.get(v, [])

    def only(self, v: Atom) -> Eqn | None:
        """The one equation that reads a variable, if no result or other equation does."""
        readers = self.of(v)
        return readers[0] if len(readers) == 1 and v not in self.returned else None

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation of an operand that only one equation reads."""
        return None if self.only(atom) is None else self.makers.get(atom)
