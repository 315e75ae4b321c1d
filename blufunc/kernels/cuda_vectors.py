"""Loop variables cut in vectors: how threads of a GPU read and write 16 bytes at a time.

Kernels, stage 6, below ``cstyle_cuda.py``. A range ``k`` of lanes, or the innermost one of a grid, becomes
``k = width * vector + element``. Index algebra does the rest: what no longer depends on the element is computed once
for a vector, and an access whose index grows by 1 with the element, from a multiple of the width, is one wide load
or store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, TypeVar

from blufunc.kernels.indices import Index, Range, of, ranges_of
from blufunc.kernels.loopir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Set,
    Store,
    Substitution,
    Value,
    computed_in,
    post_order,
)

OfLanes = TypeVar("OfLanes", Keep, Prefix)

_WIDTHS = (16, 8, 4, 2)
_LEAST_BYTES, _MOST_BYTES = 16, 32
"""How many bytes a vector may have of the smallest and of the largest elements: one and two memory operations."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """A range in vectors.

    Attributes:
      range: what was cut.
      width: elements of a vector.
      vector: which of the vectors; the range itself where the width is 1.
      element: which element of it; None where the width is 1.
    """

    range: Range
    width: int
    vector: Range
    element: Range | None

    @property
    def innermost(self) -> Range:
        """The loop variable that all values of the range depend on."""
        return self.vector if self.element is None else self.element


def vectors_of(over: Range, width: int) -> Vectors:
    """A range cut in vectors of a width that divides it."""
    if width == 1:
        return Vectors(over, 1, over, None)
    vector = Range(f"{over.name}_vector", over.extent // width)
    return Vectors(over, width, vector, Range(f"{over.name}_element", width))


def is_contiguous(index: Index, element: Range | None) -> bool:
    """Whether an index runs through a vector's elements in memory, from where a vector may begin."""
    if element is None or index.coefficient(element) != 1:
        return False
    others = [c for atom, c in index.terms.items() if atom is not element]
    return all(c % element.extent == 0 for c in (*others, index.constant))


def best_width(kernel: Kernel, over: Range) -> int:
    """The widest vectors in which all of the accesses that can be wide at all are; 1 where there are none."""
    accesses = [(b, i) for b, i in _accesses(kernel) if over in ranges_of(i)]
    wide: dict[int, list[Buffer]] = {}
    for width in _WIDTHS:
        if over.extent % width or not over.extent:
            continue
        cut = vectors_of(over, width)
        assert cut.element is not None
        replace = {over: of(cut.vector) * width + of(cut.element)}
        wide[width] = [b for b, i in accesses if is_contiguous(i.substitute(replace), cut.element)]
    narrowest = wide.get(2, [])
    for width, buffers in wide.items():
        sizes = [b.dtype.itemsize * width for b in buffers]
        fits = sizes and min(sizes) <= _LEAST_BYTES and max(sizes) <= _MOST_BYTES
        if fits and len(buffers) == len(narrowest):
            return width
    return 1


def _accesses(kernel: Kernel) -> Iterator[tuple[Buffer, Index]]:
    """Every load and store outside of folds, with its index."""
    bound = set(kernel.grid) | {s.range for s in kernel.statements() if isinstance(s, (Lanes, Rows))}
    for v in post_order(kernel.roots()):
        if v.op == "load" and ranges_of(v.attr[1]) <= bound:
            yield v.attr
    for s in kernel.statements():
        if isinstance(s, Store):
            yield s.buffer, s.index


class Cutter(Substitution):
    """Writes a kernel in terms of vectors and elements.

    A loop over lanes keeps its range, by which its ``Vectors`` are found. A keep or a prefix gets the innermost
    variable for its lanes.
    """

    def __init__(self, cuts: Sequence[Vectors]):
        super().__init__({c.range: of(c.vector) * c.width + of(c.element) for c in cuts if c.element})
        self.cuts = {c.range: c for c in cuts}
        self.cells: dict[Any, Any] = {}

    def kernel(self, kernel: Kernel) -> Kernel:
        """The kernel; its grid is as it was."""
        body, finish = (tuple(self.statement(s) for s in part) for part in (kernel.body, kernel.finish))
        return changed(kernel, body=body, finish=finish)

    def cell(self, cell: OfLanes) -> OfLanes:
        """The same of a keep or a prefix."""
        cut = self.cuts.get(cell.lanes)
        if cut is None or cut.element is None:
            return cell
        if cell not in self.cells:
            self.cells[cell] = changed(cell, lanes=cut.element)
        return self.cells[cell]

    def _rebuilt(self, v: Value) -> Value:
        if v.op == "read":  # of what each lane has its own
            return Value("read", (), self.cell(v.attr), v.dtype)
        v = super()._rebuilt(v)
        return self._of_vector(v) if v.op == "within" else v

    def _of_vector(self, v: Value) -> Value:
        """A condition that holds for all elements of a vector or for none, as one of the vector."""
        index, low, high = v.attr
        least, most = index.bounds()
        for cut in self.cuts.values():
            n = cut.width
            if not is_contiguous(index, cut.element):
                continue
            if (low % n == 0 or least >= low) and (high % n == 0 or most < high):
                vector = (index - of(cut.element)) // n  # type: ignore[arg-type]
                return Value("within", (), (vector, low // n, -(-high // n)), v.dtype)
        return v


def without_cheap_keeps(kernel: Kernel) -> Kernel:
    """Let loops read again what does not vary from point to point and row to row: it lies in a cache near by."""
    sets = [s for s in kernel.statements() if isinstance(s, Set)]
    times = Counter(s.keep for s in sets)
    values = post_order(kernel.roots())
    in_indices = post_order([c for v in values for i in v.indices() for c in computed_in(i)])
    needed = {v.attr for v in in_indices if v.op == "read"}
    # sizes of arrays that may lie in an input's place while points still read it
    replaced = {s.buffer.size for s in changed(kernel, finish=()).statements() if isinstance(s, Store)}
    found: dict[Keep, Value] = {}
    for s in sets:
        if s.value.op != "load" or s.value.args or s.keep in needed or times[s.keep] > 1:
            continue
        buffer, index = s.value.attr
        if buffer.size not in replaced and not buffer.written and ranges_of(index) <= {s.keep.lanes}:
            found[s.keep] = s.value
    if not found:
        return kernel
    again = _Again(found)
    body = tuple(again.statement(s) for s in kernel.body)
    return changed(kernel, body=body)


def loads_replaced(s: Lanes, found: Mapping[tuple[Buffer, Index], Value]) -> Lanes:
    """A loop in which other values stand in the place of loads without guards."""
    return _Loads(found).statement(s)


def totals_replaced(s: Any, found: Mapping[Any, Value]) -> Any:
    """A statement in which other values stand in the place of totals."""
    return _Again(found).statement(s) if found else s


class _Again:
    """Puts loads in the place of reads of keeps."""

    def __init__(self, found: Mapping[Any, Value]):
        self.found = found
        self.done: dict[Value, Value] = {}

    def instead(self, v: Value) -> Value | None:
        """What stands in the place of a value."""
        return self.found.get(v.attr) if v.op == "read" else None

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                args = tuple(self.done[a] for a in v.args)
                same = all(a is b for a, b in zip(args, v.args, strict=True))
                self.done[v] = self.instead(v) or (v if same else Value(v.op, args, v.attr, v.dtype))
        return self.done[value]

    def statement(self, s: Any) -> Any:
        if isinstance(s, (Lanes, Rows)):
            dropped = lambda x: isinstance(x, Set) and x.keep in self.found
            return changed(s, body=tuple(self.statement(x) for x in s.body if not dropped(x)))
        if isinstance(s, Store):
            return Store(s.buffer, s.index, self(s.value), s.guard and self(s.guard))
        if isinstance(s, Reduce):
            return changed(s, value=self(s.value))
        if isinstance(s, Scan):
            return Scan(s.prefix, self(s.value))
        assert isinstance(s, (Set, Accumulate))
        return type(s)(s.keep, self(s.value))


class ValuesReplaced(_Again):
    """Puts values in the place of others."""

    def instead(self, v: Value) -> Value | None:
        return self.found.get(v)


class _Loads(_Again):
    """Puts values in the place of loads."""

    def instead(self, v: Value) -> Value | None:
        return self.found.get(v.attr) if v.op == "load" and not v.args else None
