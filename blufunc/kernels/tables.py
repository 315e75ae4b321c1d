"""Text tables, and sizes, counts and times in readable units.

Kernels, below every report. In: figures and rows. Out: the text that ``explain``, ``lower()`` and ``BLUFUNC_DEBUG``
print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Eqn, line_of


def _scaled(n: float, base: int, units: Sequence[str]) -> tuple[float, str]:
    for unit in units[:-1]:
        if n < base:
            return n, unit
        n /= base
    return n, units[-1]


def size(nbytes: float) -> str:
    """Bytes in a readable unit: ``1.5 MiB``."""
    n, unit = _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"


def count(n: float) -> str:
    """A number in thousands, millions or more: ``16.8 M``."""
    n, unit = _scaled(n, 1000, ("", "k", "M", "G", "T", "P"))
    return f"{n:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time in a readable unit: ``41.3 us``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns of text under their names; those named in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        shown = [
            c.rjust(w) if name in right else c.ljust(w)
            for c, w, name in zip(cells, widths, head, strict=True)
        ]
        return "  ".join(shown).rstrip()

    return "\n".join(map(line, [head, *rows]))


def run_lengths(names: Sequence[str], most: int = 12) -> str:
    """Names, run-length encoded: ``mul x3 add exp``; long lists without their middle."""
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
"""Longest table that does not merge equal rows."""


def equal_rows(keys: Sequence[Any]) -> list[list[int]]:
    """The positions of keys, one group per row: equal keys of long tables merged."""
    if len(keys) <= LONG:
        return [[n] for n in range(len(keys))]
    groups: dict[Any, list[int]] = {}
    for n, key in enumerate(keys):
        groups.setdefault(key, []).append(n)
    return list(groups.values())


class StepTable(NamedTuple):
    """A table of steps; ``str`` is its text.

    Attributes:
      head: the names of the columns.
      rows: the cells.
      groups: the positions of the steps of each row.
      right: the columns that are right-aligned.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[Sequence[int]]
    right: Sequence[str]

    def __str__(self) -> str:
        return table(self.head, self.rows, self.right)

    def cut(self, width: int) -> StepTable:
        """The table with lines of at most ``width`` columns, where that is possible."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        fixed = {i for i, name in enumerate(self.head) if name in self.right}
        while (excess := sum(widths) + 2 * (len(widths) - 1) - width) > 0:
            widest = max(
                (i for i in range(len(widths)) if i not in fixed), key=widths.__getitem__, default=None
            )
            if widest is None or widths[widest] <= _LEAST:
                break
            widths[widest] = max(_LEAST, widths[widest] - max(1, excess // 2))
        rows = [[_shortened(c, w) for c, w in zip(row, widths, strict=True)] for row in self.rows]
        return self._replace(rows=rows)


_LEAST = 12
"""Minimum width of a shortened column."""


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def step_table(
    head: Sequence[str],
    keys: Sequence[Any],
    row_of: Callable[[list[int]], Sequence[str]],
    right: Sequence[str] = (),
    numbers: Sequence[int] | None = None,
) -> StepTable:
    """A table of steps; in long tables, one row and a count for all equal keys.

    ``row_of`` returns the cells of some positions, ``numbers`` are the steps at the positions; ``head`` and ``right``
    are as for ``table``.
    """
    numbers = numbers or range(len(keys))
    groups = equal_rows(keys)
    times = ["times"] if any(len(g) > 1 for g in groups) else []
    rows = [[str(numbers[g[0]]), *(str(len(g)) for _ in times), *row_of(g)] for g in groups]
    return StepTable(["step", *times, *head], rows, groups, ["step", "times", *right])


def lines_of(eqns: Sequence[Eqn]) -> tuple[str, ...]:
    """The user's lines of equations, each once."""
    return tuple(dict.fromkeys(map(line_of, eqns)))
