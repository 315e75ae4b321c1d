"""C forms: C and CUDA expressions of elementwise primitives.

Core, plain data on an ``Elementwise`` primitive. Renderers (``kernels/codegen/scalar_ops.py``) fill in the
templates; this module is independent of dialects. In a template ``{0}``, ``{1}`` and ``{2}`` are the
operands, ``{T}`` is the register type of the result, ``{U}`` the unsigned type for integer arithmetic, and
``{name}`` the parameter of that name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = {"b": "booleans", "i": "integers", "f": "floats", "c": "complex numbers", "k": "random keys"}
"""Operand kinds, each with its own template."""


@dataclass(frozen=True, eq=False)
class CForm:
    """C expression of one application, by the kind of the last operand.

    Attributes:
      templates: an expression for each supported kind of ``KINDS``.
      exact: whether results need no rounding: they are representable in the dtype of the operands.
      stored: whether the expression works on bits: floats are passed in their storage format.
      special: the renderer's function that writes it, where the expression depends on parameters.
      repeats: whether ``special`` writes an operand more than once; templates are counted.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    stored: bool = False
    special: str = ""
    repeats: bool = False

    def operands(self) -> int:
        """The number of operands that the templates use."""
        return 1 + max(
            (int(n) for t in self.templates.values() for n in re.findall(r"\{(\d)\}", t)), default=0
        )

    def names(self) -> set[str]:
        """The names in the templates: of parameters, and of types."""
        return {
            n for t in self.templates.values() for n in re.findall(r"\{([A-Za-z_]\w*)\}", t.replace("{{", ""))
        }

    def holds_twice(self) -> bool:
        """True if an expression uses an operand more than once."""
        slots = [re.findall(r"\{(\d)\}", t) for t in self.templates.values()]
        return self.repeats or any(len(s) > len(set(s)) for s in slots)


def same(template: str, kinds: str, exact: bool = False) -> CForm:
    """One template for several operand kinds."""
    return CForm(dict.fromkeys(kinds, template), exact)


def arithmetic(op: str) -> CForm:
    """A binary operator; integers wrap around."""
    plain = f"{{0}} {op} {{1}}"
    return CForm({"f": plain, "c": plain, "i": f"{{T}}({{U}}({{0}}) {op} {{U}}({{1}}))"})


def comparison(op: str, kinds: str = "bif") -> CForm:
    """A comparison."""
    return same(f"{{0}} {op} {{1}}", kinds)


def bitwise(op: str) -> CForm:
    """A bitwise operator."""
    return CForm({"i": f"{{T}}({{0}} {op} {{1}})", "b": f"bool({{0}} {op} {{1}})"})


def call(name: str, kinds: str, operands: int = 1, exact: bool = False) -> CForm:
    """A call of the prelude's function ``bf_<name>``."""
    return same(f"bf_{name}({', '.join(f'{{{i}}}' for i in range(operands))})", kinds, exact)
