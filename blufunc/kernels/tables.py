"""Tables as text, and sizes, counts and times in units that fit.

Kernels, below every report: what ``explain``, ``lower()`` and ``BLUFUNC_DEBUG`` print is laid out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, line_of


def size(nbytes: float) -> str:
    """Bytes in the unit that fits: ``1.5 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


def count(n: float) -> str:
    """A number in thousands, millions or more: ``16.8 M``."""
    unit = ""
    for larger in ("k", "M", "G", "T", "P"):
        if n < 1000:
            break
        n, unit = n / 1000, larger
    return f"{n:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time in the unit that fits: ``41.3 us``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns of text under their names; those named in ``right`` end where the column ends."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        shown = [
            c.rjust(w) if name in right else c.ljust(w)
            for c, w, name in zip(cells, widths, head, strict=True)
        ]
        return "  ".join(shown).rstrip()

    return "\n".join(map(line, [head, *rows]))


def run_lengths(names: Sequence[str], most: int = 12) -> str:
    """Names in a row, repeated ones once with their number: ``mul x3 add exp``; the middle of long rows is left out."""
    found: list[tuple[str, int]] = []
    for name in names:
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    parts = [n if k == 1 else f"{n} x{k}" for n, k in found]
    if len(parts) > most:
        parts = [*parts[: most // 2], f"... ({len(names)} in all)", *parts[-most // 2 :]]
    return " ".join(parts)


LONG = 64
"""Rows from which on a table shows alike ones once."""


def alike(keys: Sequence[Any]) -> list[list[int]]:
    """The positions of keys, those of equal ones together if there are many: a row of a table each."""
    if len(keys) <= LONG:
        return [[n] for n in range(len(keys))]
    groups: dict[Any, list[int]] = {}
    for n, key in enumerate(keys):
        groups.setdefault(key, []).append(n)
    return list(groups.values())


def times_head(groups: Sequence[list[int]]) -> tuple[str, ...]:
    """The name of the column that says how often a row is there, where there is one."""
    return ("times",) if any(len(g) > 1 for g in groups) else ()


def times(group: list[int], groups: Sequence[list[int]]) -> tuple[str, ...]:
    """How often a row is there, where there is a column for it."""
    return (str(len(group)),) if times_head(groups) else ()


def lines_of(eqns: Sequence[Eqn]) -> tuple[str, ...]:
    """The user's lines behind equations, each once."""
    return tuple(dict.fromkeys(map(line_of, eqns)))
