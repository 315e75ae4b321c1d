"""Named cache keys, and why one was not found.

Core, before stage 1: ``jit`` looks its arguments up under a ``Key``. When a function is traced
again, the difference to the key it was traced with before is one line to print.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from blufunc.core import tree, treepath
from blufunc.core.avals import ShapedArray


class Key(NamedTuple):
    """What a trace depends on."""

    structure: tree.TreeDef
    types: tuple[ShapedArray, ...]
    static: tuple  # of each its kind, its position or name, its class, and ``exact`` of it
    context: tuple = ()


def exact(value: Any) -> Any:
    """A key that tells apart what ``==`` does not: 1, 1.0 and True; 0.0 and -0.0; also inside tuples."""
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return (value.__class__, repr(value))
    if isinstance(value, tuple):
        return (value.__class__, *map(exact, value))
    return value


def _shown(key: Any) -> str:
    """The value that ``exact`` made a key of, as it is written."""
    if not isinstance(key, tuple):
        return repr(key)
    kind, *rest = key
    if issubclass(kind, tuple):
        return f"({', '.join(map(_shown, rest))}{',' * (len(rest) == 1)})"
    return rest[0]


def difference(old: Key, new: Key, labels: list[str]) -> str:
    """One line that says how ``new`` differs from ``old``; ``labels`` name the new leaves."""
    if old.structure != new.structure:
        return "the arguments have another structure: " + "; ".join(
            treepath.diff(old.structure, new.structure, "before", "now")[:3]
        )
    parts = [
        f"{label}: {a} -> {b}"
        for label, a, b in zip(labels, old.types, new.types, strict=False)
        if a is not b
    ]
    parts += [
        f"static argument {b[1]}: {_shown(a[-1])} -> {_shown(b[-1])}"
        for a, b in zip(old.static, new.static, strict=False)
        if a != b
    ]
    if old.context != new.context:
        parts.append(f"named axes and overridden rules: {old.context} -> {new.context}")
    more = f" (and {len(parts) - 3} more)" if len(parts) > 3 else ""
    return "; ".join(parts[:3]) + more
