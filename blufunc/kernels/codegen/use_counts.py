"""What a renderer must know of a whole kernel before it writes the first line.

Kernels, stage 6, below ``c_renderer.py``. In: a ``Kernel``. Out: how often each value is used, which of the kernel's
own results it reads, and how large indices become.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from blufunc.kernels.loopir.index import Atom, Index, Quotient, Remainder
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Set,
    Statement,
    Store,
    Total,
    Value,
    dependencies,
    post_order,
    values_of,
)

Cell = Total | Keep | Prefix | Buffer


class Survey:
    """A walk over all that a kernel holds.

    Attributes:
      uses: how often each value, and each quotient or remainder of an index, is written where it is used.
      reads: for each value, the totals, keeps, prefixes and written buffers that it is computed from.
      largest: a bound of every number that addresses are computed with.
    """

    def __init__(self, kernel: Kernel):
        written: set[Cell] = set()
        indices: list[Index] = []
        roots: list[Value] = []
        for s in kernel.statements():
            written.update(writes_of(s))
            roots += values_of(s)
            indices += indices_of(s)
        self.uses: Counter[Value | Atom] = Counter(roots)
        self.reads: dict[Value, frozenset[Cell]] = {}
        for v in post_order(roots):
            needs = dependencies(v)
            self.uses.update(needs)
            indices += v.indices()
            own = {v.attr} if v.op == "read" else {v.attr[0]} & written if v.op == "load" else set()
            self.reads[v] = frozenset(own).union(*[self.reads[d] for d in needs])
        self._count_atoms(indices)
        sizes = [kernel.points, *[b.size for b in kernel.buffers], *[r.extent for r in kernel.grid]]
        self.largest = max([*sizes, *map(magnitude, indices)])

    def _count_atoms(self, indices: Sequence[Index]) -> None:
        pending: list[Atom] = [atom for index in indices for atom in index.terms]
        while pending:
            atom = pending.pop()
            self.uses[atom] += 1
            if isinstance(atom, (Quotient, Remainder)) and self.uses[atom] == 1:
                pending += atom.index.terms


def writes_of(s: Statement) -> tuple[Cell, ...]:
    """What a statement itself writes."""
    if isinstance(s, Store):
        return (s.buffer,)
    if isinstance(s, Reduce):
        return (s.total,)
    if isinstance(s, Scan):
        return (s.prefix,)
    return (s.keep,) if isinstance(s, (Set, Accumulate)) else ()


def written_in(body: Sequence[Any]) -> set[Cell]:
    """What the statements of a body write, at any depth."""
    found: set[Cell] = set()
    pending = list(body)
    while pending:
        s = pending.pop()
        found.update(writes_of(s))
        pending.extend(getattr(s, "body", ()))
    return found


def indices_of(s: Statement) -> list[Index]:
    """The indices that a statement itself holds."""
    if isinstance(s, (Store, Rows)):
        return [s.index]
    return [s.position] if isinstance(s, Reduce) and s.position is not None else []


def magnitude(index: Index) -> int:
    """A bound of everything that is computed on the way to an index."""
    total = abs(index.constant)
    within = 0
    for atom, c in index.terms.items():
        low, high = atom.bounds()
        total += abs(c) * max(abs(low), abs(high))
        if isinstance(atom, (Quotient, Remainder)):
            within = max(within, magnitude(atom.index))
    return max(total, within)
