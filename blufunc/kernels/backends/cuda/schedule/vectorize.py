"""Vectorize: loop variables become vectors and their elements, so that threads load and store 16 bytes at a time.

Kernels, stage 6, two passes. ``choose_widths`` comes before the mapping of threads; it decides how a range ``k`` of
lanes, or the innermost one of a grid, becomes ``k = width * vector + element``. ``vectorize`` comes after all passes
that rewrite loops; it writes the kernel in these terms. Index algebra does the rest: what no longer depends on the
element is computed once for a vector, and an access whose index grows by 1 with the element, from a multiple of the
width, is one wide load or store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from blufunc.kernels.backends.cuda.device_model import ACCESS_BYTES
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel, Vectors, keeps_of
from blufunc.kernels.loopir.index import Index, Range, of, ranges_of
from blufunc.kernels.loopir.ir import (
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Rows,
    Store,
    Substitution,
    Value,
    post_order,
)

OfLanes = TypeVar("OfLanes", Keep, Prefix)

_WIDTHS = (16, 8, 4, 2)


def choose_widths(s: ScheduledKernel) -> ScheduledKernel:
    """Choose the vectors of the ranges of all lanes; of a kernel without lanes, of its innermost grid range.

    A scan of columns and a transpose have vectors of one element: neighbouring threads have neighbouring elements.
    """
    lanes = [t.range for t in s.kernel.statements() if isinstance(t, Lanes)]
    ranges = lanes if s.kind in ("lanes", "column scan") else [*s.kernel.grid[-1:], *lanes]
    single = s.kind in ("column scan", "transpose")
    cuts = {r: vectors_of(r, 1 if single else best_width(s.kernel, r)) for r in dict.fromkeys(ranges)}
    return replace(s, cuts=cuts)


def vectors_of(over: Range, width: int) -> Vectors:
    """A range cut in vectors of a width that divides it."""
    if width == 1:
        return Vectors(over, 1, over, None)
    vector = Range(f"{over.name}_vector", over.extent // width)
    return Vectors(over, width, vector, Range(f"{over.name}_element", width))


def is_contiguous(index: Index, element: Range | None) -> bool:
    """Whether an index runs through the elements of a vector in memory, from where a vector may begin."""
    if element is None or index.coefficient(element) != 1:
        return False
    others = [c for atom, c in index.terms.items() if atom is not element]
    return all(c % element.extent == 0 for c in (*others, index.constant))


def is_wide(index: Index, cut: Vectors) -> bool:
    """Whether an index of a range runs through the elements of its vectors in memory."""
    return is_contiguous(index.substitute({cut.range: cut.index}), cut.element)


def best_width(kernel: Kernel, over: Range) -> int:
    """The widest vectors in which all accesses are wide that can be wide at all; 1 where there are none."""
    accesses = [(b, i) for b, i in _accesses(kernel) if over in ranges_of(i)]
    wide: dict[int, list[Buffer]] = {}
    for width in _WIDTHS:
        if over.extent % width == 0 and over.extent:
            cut = vectors_of(over, width)
            wide[width] = [b for b, i in accesses if is_wide(i, cut)]
    narrowest = wide.get(2, [])
    for width, buffers in wide.items():
        sizes = [b.dtype.itemsize * width for b in buffers]
        # a vector of the smallest elements is one access, one of the largest elements at most two
        fits = sizes and min(sizes) <= ACCESS_BYTES and max(sizes) <= 2 * ACCESS_BYTES
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


def vectorize(s: ScheduledKernel) -> ScheduledKernel:
    """Write the kernel, and what was decided for it, in terms of vectors and elements."""
    cutter = _Cutter(list(s.cuts.values()))
    body, finish = (tuple(map(cutter.statement, part)) for part in (s.kernel.body, s.kernel.finish))
    staged, prefetch = s.staged, s.prefetch
    if staged is not None:
        staged = replace(staged, index=cutter.index(staged.index))
    if prefetch is not None:
        sources = {b: (cutter.index(i), ring) for b, (i, ring) in prefetch.sources.items()}
        prefetch = replace(prefetch, sources=sources)
    return replace(
        s,
        kernel=replace(s.kernel, body=body, finish=finish),
        keeps={cutter.cell(k): s.cuts[k.lanes] for k in keeps_of(s.kernel)},
        in_shared=frozenset(map(cutter.cell, s.in_shared)),
        staged=staged,
        prefetch=prefetch,
    )


class _Cutter(Substitution):
    """Writes statements in terms of vectors and elements.

    A loop over lanes keeps its range, by which its ``Vectors`` are found. The lanes of a keep or a prefix become the
    innermost variable.
    """

    def __init__(self, cuts: Sequence[Vectors]):
        super().__init__({c.range: c.index for c in cuts if c.element})
        self.cuts = {c.range: c for c in cuts}
        self.cells: dict[Any, Any] = {}

    def cell(self, cell: OfLanes) -> OfLanes:
        cut = self.cuts.get(cell.lanes)
        if cut is None or cut.element is None:
            return cell
        if cell not in self.cells:
            self.cells[cell] = replace(cell, lanes=cut.element)
        return self.cells[cell]

    def _rebuilt(self, v: Value) -> Value:
        if v.op == "read":  # of a keep or a prefix
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
