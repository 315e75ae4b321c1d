"""Named cache keys, and the explanation of a cache miss.

Core, before stage 1: ``jit`` looks its arguments up under a ``Key``. When a function is retraced, the
difference from its previous key is reported in one line.
"""

from __future__ import annotations

from typing import NamedTuple

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import shown
from blufunc.core.pytree import paths, tree


class Key(NamedTuple):
    """The dependencies of a trace."""

    structure: tree.TreeDef
    types: tuple[ShapedArray, ...]
    static: tuple  # for each: kind, position or name, class, and ``exact`` key
    context: tuple = ()
    shardings: tuple = ()  # along explicit axes, if the traced function asked for them


def difference(old: Key, new: Key, labels: list[str]) -> str:
    """One line on how ``new`` differs from ``old``; ``labels`` name the new leaves."""
    if old.structure != new.structure:
        return "the arguments have a different structure: " + "; ".join(
            paths.diff(old.structure, new.structure, "before", "now")[:3]
        )
    parts = [
        f"{label}: {a} -> {b}"
        for label, a, b in zip(labels, old.types, new.types, strict=False)
        if a is not b
    ]
    parts += [
        f"static argument {b[1]}: {shown(a[-1])} -> {shown(b[-1])}"
        for a, b in zip(old.static, new.static, strict=False)
        if a != b
    ]
    if old.context != new.context:
        parts.append(f"named axes and overridden rules: {old.context} -> {new.context}")
    if old.shardings != new.shardings:
        parts += [
            f"{label}: sharded as {a and a.spec} -> {b and b.spec}"
            for label, a, b in zip(labels, old.shardings, new.shardings, strict=False)
            if a != b
        ]
    more = f" (and {len(parts) - 3} more)" if len(parts) > 3 else ""
    return "; ".join(parts[:3]) + more
