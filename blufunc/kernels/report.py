"""What the compiler did, as text: tables, and the fusion of a program with its reasons.

Kernels, beside stages 5 to 7: for people who read ``lower()``, ``explain`` and ``BLUFUNC_DEBUG``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from blufunc.core import source
from blufunc.core.jaxpr import Eqn, Literal
from blufunc.kernels.fuse import Fusion, Opaque, Region, Step


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


class Fused:
    """What of a program runs together, and why the rest does not: ``lower().fusion``.

    Args:
      numbers: by the identity of a region, or of the equation of another step, the number of the launch; the steps
        in their order without it.

    Attributes:
      steps: in the order in which they run: each a ``Region`` of equations that are one kernel (or two, where a
        reduction is finished by a second), or an ``Opaque`` equation for a library or the reference.
      regions: the steps that are regions.
      apart: pairs of equations, one of which reads what the other computes, that are in different steps; and why.
      free: equations that no step computes: they only move elements, or are arithmetic on single numbers, and
        are part of the addresses and scalars of whoever reads them.
    """

    def __init__(self, fusion: Fusion, numbers: Mapping[int, int] | None = None):
        if numbers is None:
            numbers = {_identity(s): n for n, s in enumerate(fusion.steps)}
        self._fusion, self._numbers = fusion, numbers
        self.steps: list[Step] = sorted(fusion.steps, key=self._number)
        self.regions: list[Region] = [s for s in self.steps if isinstance(s, Region)]
        written = {v for r in self.regions for v in (*r.outputs, *r.numbers)}
        self.free: list[Eqn] = [e for v, e in fusion.virtual.items() if v not in written]
        home = {id(e): s for s in self.steps for e in _eqns(s)}
        pairs: dict[tuple[int, int], tuple[Eqn, Eqn, str]] = {}
        for last, second, why in fusion.apart:
            a, b = home.get(id(last)), home.get(id(second))
            if a is None or b is None or a is b:
                continue  # what was refused at first was joined later
            pair = self._number(a), self._number(b)
            pairs.setdefault(pair, (_read_by(second, a, fusion) or last, second, why))
        self._pairs = pairs
        self.apart = list(pairs.values())

    def _number(self, step: Step) -> int:
        return self._numbers[_identity(step)]

    def __str__(self) -> str:
        rows = [_row(self._number(s), s, self._fusion) for s in self.steps]
        groups = alike([row[1:] for row in rows])
        head = ("step", *times_head(groups), "points", "computes", "lines")
        shown = [(rows[g[0]][0], *times(g, groups), *rows[g[0]][1:]) for g in groups]
        parts = [table(head, shown, ("step", "times"))] if rows else ["no steps"]
        return "\n".join([*parts, *self.reasons()])

    def reasons(self) -> list[str]:
        """Lines that say why steps are apart, pairs that are alike in one; and which equations cost nothing."""
        found: dict[str, list[tuple[int, int]]] = {}
        for pair, (first, second, why) in self._pairs.items():
            found.setdefault(f"{_named(first)} and {_named(second)}: {why}", []).append(pair)
        lines = []
        for text, pairs in found.items():
            a, b = min(pairs)
            more = f", and {len(pairs) - 1} more pairs alike," if len(pairs) > 1 else ""
            lines.append(f"steps {a} and {b}{more} are apart: {text}")
        if self.free:
            counts = Counter(e.prim.name for e in self.free)
            lines.append("free: " + ", ".join(f"{n} {name}" for name, n in counts.most_common()))
        return lines


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


def _identity(step: Step) -> int:
    """What stands for a step of a fusion in a schedule too: its region, or its equation."""
    return id(step.eqn if isinstance(step, Opaque) else step)


def equations_of(region: Region, fusion: Fusion) -> list[Eqn]:
    """What a region computes: of one that only writes out what is free, that."""
    return region.eqns or [fusion.virtual[v] for v in region.outputs if v in fusion.virtual]


def _eqns(step: Step) -> list[Eqn]:
    return [step.eqn] if isinstance(step, Opaque) else step.eqns


def _read_by(eqn: Eqn, step: Step, fusion: Fusion) -> Eqn | None:
    """The equation of a step that computes what ``eqn`` reads, itself or through equations that are free."""
    made = {v: e for e in _eqns(step) for v in e.outvars}
    pending: list[Any] = list(eqn.invars)
    seen: set[Any] = set()
    while pending:
        atom = pending.pop()
        if atom.__class__ is Literal or atom in seen:
            continue
        seen.add(atom)
        if atom in made:
            return made[atom]
        if atom in fusion.virtual:
            pending.extend(fusion.virtual[atom].invars)
    return None


def line_of(eqn: Eqn) -> str:
    """The user's line of an equation: of one that a derivative made, the forward line, marked."""
    return source.summary(eqn.source) + (" backward" if source.is_backward(eqn.source) else "")


def lines_of(eqns: Sequence[Eqn]) -> tuple[str, ...]:
    """The user's lines behind equations, each once."""
    return tuple(dict.fromkeys(map(line_of, eqns)))


def _named(eqn: Eqn) -> str:
    return f"{eqn.prim.name} at {line_of(eqn)}"


def _row(n: int, step: Step, fusion: Fusion) -> tuple[str, str, str, str]:
    if isinstance(step, Opaque):
        return str(n), "library", step.eqn.prim.name, line_of(step.eqn)
    frame, eqns = step.frame, equations_of(step, fusion)
    points = f"{frame.rows}x{frame.lanes}" if frame.lanes else str(frame.size)
    return str(n), points, run_lengths([e.prim.name for e in eqns]), "; ".join(lines_of(eqns))
