"""Use counts of a kernel's values, and the scopes that a renderer writes into.

Kernels, stage 6, the base of ``c_renderer.py``. In: a ``Kernel``. Out: the uses of each value and the cells written,
counted before the first line; and scopes, each a block of source with the expressions of the values named in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.loopir.index import Atom, Index, Quotient, Range, Remainder
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

# -- use counts -------------------------------------------------------------------------------------


Cell = Total | Keep | Prefix | Buffer


class Survey:
    """Use counts and reads of all values of a kernel.

    Attributes:
      uses: the number of uses of each value, and of each quotient or remainder of an index.
      reads: for each value, the totals, keeps, prefixes and written buffers that it is computed from.
      largest: a bound of all integers in address computations.
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
    """The cells that a statement itself writes."""
    if isinstance(s, Store):
        return (s.buffer,)
    if isinstance(s, Reduce):
        return (s.total,)
    if isinstance(s, Scan):
        return (s.prefix,)
    return (s.keep,) if isinstance(s, (Set, Accumulate)) else ()


def written_in(body: Sequence[Any]) -> set[Cell]:
    """The cells that the statements of a body write, at any depth."""
    found: set[Cell] = set()
    pending = list(body)
    while pending:
        s = pending.pop()
        found.update(writes_of(s))
        pending.extend(getattr(s, "body", ()))
    return found


def indices_of(s: Statement) -> list[Index]:
    """The indices of a statement itself."""
    if isinstance(s, (Store, Rows)):
        return [s.index]
    return [s.position] if isinstance(s, Reduce) and s.position is not None else []


def magnitude(index: Index) -> int:
    """A bound of all intermediate integers of an index."""
    total = abs(index.constant)
    within = 0
    for atom, c in index.terms.items():
        low, high = atom.bounds()
        total += abs(c) * max(abs(low), abs(high))
        if isinstance(atom, (Quotient, Remainder)):
            within = max(within, magnitude(atom.index))
    return max(total, within)


# -- scopes -----------------------------------------------------------------------------------------


_RESERVED = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr continue
    decltype default delete do double else enum explicit export extern false float for friend goto if inline int long
    mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register return short
    signed sizeof static struct switch template this throw true try typedef typeid typename union unsigned using
    virtual void volatile while xor xor_eq""".split()
)


@dataclass
class Scope:
    """A block of the source being written.

    Attributes:
      ranges: the loop variables visible in it.
      writes: cells that the loop of this body writes: values that read them stay inside.
      lines: its source so far.
      names: the expressions of the values computed in it.
    """

    ranges: frozenset[Range]
    writes: frozenset[Cell] = frozenset()
    lines: list[str] = field(default_factory=list)
    names: dict[Value | Atom, str] = field(default_factory=dict)


class Writer:
    """Names and scopes of one function.

    Attributes:
      reserved: names that are never assigned.
      named: the identifiers of buffers, ranges, totals and keeps.
      reads: for each value, the kernel's own results that it is computed from.
    """

    reserved = _RESERVED

    def __init__(self, title: str, reads: Mapping[Value, frozenset[Cell]]):
        self.title, self.reads = title, reads
        self.scopes: list[Scope] = []
        self.taken: set[str] = {*self.reserved, title}
        self.named: dict[Any, str] = {}
        self.temporaries = 0

    # -- names ---------------------------------------------------------------------------------

    def name(self, thing: Any, wish: str) -> str:
        """The identifier of a buffer, range, total or keep, with a number if taken."""
        if thing not in self.named:
            self.named[thing] = self.fresh(wish)
        return self.named[thing]

    def fresh(self, wish: str) -> str:
        """An identifier that is not taken."""
        found, n = wish, 1
        while found in self.taken or scalar_ops.helpers(found):
            n += 1
            found = f"{wish}{'_' * wish[-1].isdigit()}{n}"
        self.taken.add(found)
        return found

    def variable(self, of: Range) -> str:
        """The identifier of a loop variable."""
        return self.name(of, of.name)

    def temporary(self) -> str:
        """The next of v0, v1, ..."""
        found = f"v{self.temporaries}"
        self.temporaries += 1
        return found if found not in self.taken else self.temporary()

    # -- scopes --------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        """The innermost scope."""
        return self.scopes[-1]

    def line(self, text: str) -> None:
        """Write a line in the innermost scope."""
        self.scope.lines.append(text)

    @contextmanager
    def block(
        self, opening: Sequence[str], ranges: Iterable[Range] = (), writes: Iterable[Cell] = ()
    ) -> Iterator[None]:
        """Write a block after ``opening``: a loop over ``ranges`` that writes ``writes``."""
        writes = frozenset(writes)
        self.scopes.append(Scope(self.scope.ranges | frozenset(ranges), writes))
        yield
        inner = self.scopes.pop()
        self.scope.lines += [*opening[:-1], opening[-1] + " {", *indented(inner.lines), "}"]
        self.forget(writes)

    def either(
        self, condition: str, ranges: Iterable[Range], yes: Callable[[], None], no: Callable[[], None]
    ) -> None:
        """Write an if and an else block. What they define in outer scopes precedes both."""
        texts = []
        for write in (yes, no):
            self.scopes.append(Scope(self.scope.ranges | frozenset(ranges)))
            write()
            texts.append(indented(self.scopes.pop().lines))
        self.scope.lines += [f"if ({condition}) {{", *texts[0], "} else {", *texts[1], "}"]

    def forget(self, written: frozenset[Cell]) -> None:
        """Drop the values computed from cells that were written."""
        if not written:
            return
        for scope in self.scopes:
            stale = [v for v in scope.names if isinstance(v, Value) and not written.isdisjoint(self.reads[v])]
            for v in stale:
                del scope.names[v]

    def depth_of(self, ranges: frozenset[Range], reads: frozenset[Cell]) -> int:
        """The outermost scope with ``ranges`` in which ``reads`` are final."""
        depth = 0
        for i, scope in enumerate(self.scopes):
            if not scope.writes.isdisjoint(reads):
                depth = i
        while not ranges <= self.scopes[depth].ranges:
            depth += 1
            if depth == len(self.scopes):
                missing = ", ".join(str(r) for r in ranges - self.scope.ranges)
                raise AssertionError(f"{self.title}: {missing} is used outside of its loop")
        return depth

    def found(self, thing: Value | Atom) -> str | None:
        """The expression of a value visible here; None if it is not computed."""
        for scope in reversed(self.scopes):
            text = scope.names.get(thing)
            if text is not None:
                return text
        return None


def indented(lines: Iterable[str]) -> list[str]:
    """Lines one level deeper, directives too."""
    return ["  " + line for line in lines]


def comment(note: str) -> str:
    """A line of comment, without a backslash at its end, which would continue it."""
    return "// " + " ".join(note.split()).rstrip("\\")
