"""Names for the buffers and values of kernels: of the user's arguments, and of the operations that made the others.

Kernels, stage 6, below ``region.py``. In: variables and equations; out: identifiers of C that a person recognises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Literal, Var


class Names:
    """Names for buffers and values: those of the user's arguments, and of the operations that made the others."""

    def __init__(self, invars: Sequence[Var], arg_names: Sequence[str]):
        self.paths = dict(zip(invars, arg_names, strict=False))
        self.given: dict[Var, str] = {}
        self.taken: dict[str, int] = {}

    def of(self, v: Var, eqn: Eqn | None) -> str:
        """The name of a variable: an identifier of C."""
        name = self.given.get(v)
        if name is None:
            stem = eqn.prim.name if eqn is not None else stem_of(self.paths.get(v))
            name = self.given[v] = self.fresh(re.sub(r"\W+", "_", stem).strip("_") or "x")
        return name

    def fresh(self, stem: str) -> str:
        """``stem``, with a number if it is taken."""
        if stem[0].isdigit():
            stem = f"x{stem}"
        count = self.taken[stem] = self.taken.get(stem, 0) + 1
        return f"{stem}_" if count == 1 and stem in _RESERVED else stem if count == 1 else f"{stem}_{count}"

    def text(self, atom: Any, maker: Callable[[Var], Eqn | None]) -> str:
        """An operand as text."""
        return str(atom.value) if atom.__class__ is Literal else self.of(atom, maker(atom))


_RESERVED = frozenset(
    "and or not xor double float int long short char bool auto const static for if else while do switch case "
    "return void register signed unsigned new delete this class struct union template operator public private "
    "max min abs exp log sin cos tan sqrt floor ceil round pow select i k r g j a t".split()
)


def stem_of(path: str | None) -> str:
    """The last name in the path of an argument; ``x`` for what is none."""
    names = re.findall(r"[A-Za-z_]\w*", path) if path else None
    return names[-1] if names else "x"


def type_text(v: Var) -> str:
    return str(v.aval)
