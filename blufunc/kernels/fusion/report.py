"""Fusion reports: a table of the steps, and why equations are not fused.

Kernels, after stage 5. In: a ``Fusion``. Out: text for readers of ``lower()``, ``explain`` and ``BLUFUNC_DEBUG``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Literal, line_of
from blufunc.kernels.fusion.fuse import Fusion, Opaque, Region, Step
from blufunc.kernels.tables import lines_of, run_lengths, step_table


class Fused:
    """Fused steps of a program, and why the rest is apart: ``lower().fusion``.

    Args:
      fusion: the steps.
      numbers: the launch index by identity of a region, or of another step's equation; default: the order of the steps.

    Attributes:
      steps: in the order in which they run: each a ``Region`` of equations that are one kernel (or two, if a second one
        finishes a reduction), or an ``Opaque`` equation for a library or the reference.
      regions: the steps that are regions.
      apart: pairs of dependent equations in different steps, with the reason.
      free: equations that no step computes: movement, or arithmetic on scalars, which become part of the addresses
        and scalars of their readers.
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
                continue  # refused at first, joined later
            pair = self._number(a), self._number(b)
            pairs.setdefault(pair, (_read_by(second, a, fusion) or last, second, why))
        self._pairs = pairs
        self.apart = list(pairs.values())

    def _number(self, step: Step) -> int:
        return self._numbers[_identity(step)]

    def __str__(self) -> str:
        rows = [_row(s, self._fusion) for s in self.steps]
        if not rows:
            return "\n".join(["no steps", *self.reasons()])
        numbers = list(map(self._number, self.steps))
        table = str(step_table(("points", "computes", "lines"), rows, lambda g: rows[g[0]], numbers=numbers))
        return "\n".join([table, *self.reasons()])

    def reasons(self) -> list[str]:
        """One line per reason that keeps steps apart, and the free equations."""
        found: dict[str, list[tuple[int, int]]] = {}
        for pair, (first, second, why) in self._pairs.items():
            found.setdefault(f"{_named(first)} and {_named(second)}: {why}", []).append(pair)
        lines = []
        for text, pairs in found.items():
            a, b = min(pairs)
            more = f", and {len(pairs) - 1} more such pairs," if len(pairs) > 1 else ""
            lines.append(f"steps {a} and {b}{more} are apart: {text}")
        if self.free:
            counts = Counter(e.prim.name for e in self.free)
            lines.append("free: " + ", ".join(f"{n} {name}" for name, n in counts.most_common()))
        return lines


def _identity(step: Step) -> int:
    """The key of a step, also in a schedule: the id of its region, or of its equation."""
    return id(step.eqn if isinstance(step, Opaque) else step)


def equations_of(region: Region, fusion: Fusion) -> list[Eqn]:
    """The equations of a region; for a copy, the virtual equations that it writes out."""
    return region.eqns or [fusion.virtual[v] for v in region.outputs if v in fusion.virtual]


def _eqns(step: Step) -> list[Eqn]:
    return [step.eqn] if isinstance(step, Opaque) else step.eqns


def _read_by(eqn: Eqn, step: Step, fusion: Fusion) -> Eqn | None:
    """The equation of a step that ``eqn`` reads, directly or through free equations."""
    makers = {v: e for e in _eqns(step) for v in e.outvars}
    pending: list[Any] = list(eqn.invars)
    seen: set[Any] = set()
    while pending:
        atom = pending.pop()
        if atom.__class__ is Literal or atom in seen:
            continue
        seen.add(atom)
        if atom in makers:
            return makers[atom]
        if atom in fusion.virtual:
            pending.extend(fusion.virtual[atom].invars)
    return None


def _named(eqn: Eqn) -> str:
    return f"{eqn.prim.name} at {line_of(eqn)}"


def _row(step: Step, fusion: Fusion) -> tuple[str, str, str]:
    if isinstance(step, Opaque):
        return "library", step.eqn.prim.name, line_of(step.eqn)
    frame, eqns = step.frame, equations_of(step, fusion)
    points = f"{frame.rows}x{frame.lanes}" if frame.lanes else str(frame.size)
    return points, run_lengths([e.prim.name for e in eqns]), "; ".join(lines_of(eqns))
