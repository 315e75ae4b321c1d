"""Vectorization: 16-byte loads and stores, by splitting loops into vectors.

Kernels, stage 6. ``choose_widths`` precedes the thread mapping; it splits a range ``k`` of lanes, or the innermost one
of a grid, as ``k = width * vector + element``. ``vectorize`` follows all passes that rewrite loops; it writes the
kernel in these terms. Index algebra does the rest: element-invariant values are computed once per vector, and an
aligned access whose index has unit stride in the element is one wide load or store.

Two choices follow. ``choose_fast_exps``: a float32-accurate exponential takes ten instructions, that of the special
function unit two, and kernels on 16-bit elements are bound by arithmetic as much as by memory. The fast one's error is
far below the resolution of such elements. ``arrive_early``: the last block of a kernel, or of a tile, runs the finish,
which reads what the first thread of each block has stored. A block counts as done before it stores rows that the
finish does not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda.device_model import (
    ACCESS_BYTES,
    BANDWIDTH,
    CLOCK,
    LINE_BYTES,
    SM_COUNT,
    THREAD_CYCLES,
    WARP,
)
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import (
    ScheduledKernel,
    Vectors,
    keeps_of,
    loads_in,
)
from blufunc.kernels.codegen.scalar_ops import is_small_float
from blufunc.kernels.loopir.index import Index, Range, of, ranges_of
from blufunc.kernels.loopir.ir import (
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Rows,
    Store,
    Substitution,
    Value,
    dependencies,
    post_order,
    values_of,
)

# -- vectors ----------------------------------------------------------------------------------------


OfLanes = TypeVar("OfLanes", Keep, Prefix)

_WIDTHS = (16, 8, 4, 2)

_NOT_WORSE = 4 / 3
"""Excess of predicted time up to which vectors remain as wide as possible.
measured: x[:, ::2] + x[:, 1::2] in bfloat16, 22 us by 8, predicted 20 cycles; 30 by 4, predicted 15 (H100, 2026-11-27)
"""


def choose_widths(s: ScheduledKernel) -> ScheduledKernel:
    """Choose vector widths for lanes, or for the innermost grid range without lanes.

    Column scans and transposes have width 1: neighboring threads have neighboring elements.
    """
    lanes = [t.range for t in s.kernel.statements() if isinstance(t, Lanes)]
    ranges = lanes if s.kind in ("lanes", "column scan") else [*s.kernel.grid[-1:], *lanes]
    single = s.kind in ("column scan", "transpose")
    cuts = {r: vectors_of(r, 1 if single else best_width(s.kernel, r)) for r in dict.fromkeys(ranges)}
    return replace(s, cuts=cuts)


def vectors_of(over: Range, width: int) -> Vectors:
    """A range split into vectors of a width that divides it."""
    if width == 1:
        return Vectors(over, 1, over, None)
    vector = Range(f"{over.name}_vector", over.extent // width)
    return Vectors(over, width, vector, Range(f"{over.name}_element", width))


def is_contiguous(index: Index, element: Range | None) -> bool:
    """True if an index has unit stride over an aligned vector's elements."""
    if element is None or index.coefficient(element) != 1:
        return False
    others = [c for atom, c in index.terms.items() if atom is not element]
    return all(c % element.extent == 0 for c in (*others, index.constant))


def is_wide(index: Index, cut: Vectors) -> bool:
    """True if an index of a range is contiguous over its vectors."""
    return is_contiguous(index.substitute({cut.range: cut.index}), cut.element)


def best_width(kernel: Kernel, over: Range) -> int:
    """Widest vectors for which all vectorizable accesses are wide; 1 if none are.

    Along the grid, narrower ones where L1 would take much longer than it has to: elements that are not wide are
    accesses of their own, in more lines the wider vectors are.
    """
    accesses = list(dict.fromkeys((b, i) for b, i in _accesses(kernel) if over in ranges_of(i)))
    wide: dict[int, list[bool]] = {}
    for width in _WIDTHS:
        if over.extent % width == 0 and over.extent:
            cut = vectors_of(over, width)
            wide[width] = [is_wide(i, cut) for _, i in accesses]
    narrowest = sum(wide.get(2, []))
    possible = []
    for width, found in wide.items():
        vectors = [
            (b, b.dtype.itemsize * width) for (b, _), is_one in zip(accesses, found, strict=True) if is_one
        ]
        sizes = [size for _, size in vectors]
        # a vector is one access of the smallest elements, at most two of the largest
        fits = sizes and min(sizes) <= ACCESS_BYTES and max(sizes) <= 2 * ACCESS_BYTES
        if over in kernel.grid and any(b.written and size > ACCESS_BYTES for b, size in vectors):
            fits = (
                False  # two stores to each sector: AdamW in place at 2.39 TB/s, not 2.86 (H100, 2026-11-28)
            )
        if fits and len(sizes) == narrowest:
            possible.append(width)
    if not possible or all(wide[possible[0]]) or over not in kernel.grid:
        return possible[0] if possible else 1
    memory = _memory_cycles(kernel)
    cycles = {
        w: max(memory, _l1_cycles(accesses, wide.get(w, [False] * len(accesses)), over, w))
        for w in (*possible, 1)
    }
    best = min(cycles, key=lambda w: cycles[w])
    return possible[0] if cycles[possible[0]] <= _NOT_WORSE * cycles[best] else best


def _l1_cycles(
    accesses: Sequence[tuple[Buffer, Index]], wide: Sequence[bool], over: Range, width: int
) -> float:
    """Cycles of L1 in which a warp accesses one element per thread, and begins.

    A cycle serves one line. A wide access is one access of a whole vector; others are an access for each element, in
    which neighboring threads are a vector apart.
    """
    total = THREAD_CYCLES / width
    for (buffer, index), is_one in zip(accesses, wide, strict=True):
        apart = (index.coefficient(over) or 0) * width * buffer.dtype.itemsize
        lines = max(1, min(WARP, WARP * abs(apart) // LINE_BYTES))
        total += lines / width if is_one else lines
    return total


def _memory_cycles(kernel: Kernel) -> float:
    """Cycles in which memory moves all arrays once, for a warp of points of an SM."""
    size = sum(b.size * b.dtype.itemsize for b in kernel.buffers)
    return size / kernel.points * WARP / (BANDWIDTH / SM_COUNT / CLOCK)


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
    """Write the kernel and its decisions in terms of vectors and elements."""
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
    """Rewriter of statements in terms of vectors and elements.

    A loop over lanes keeps its range, which is the key of its ``Vectors``. The lanes of a keep or a prefix become the
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
        """Condition per vector, if it holds for all elements of a vector or for none."""
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


# -- fast exponentials for 16-bit results -----------------------------------------------------------


_PASSING_ON = frozenset((ew.mul_p, ew.add_p, ew.sub_p, ew.neg_p, ew.select_p))
"""Operations that do not amplify relative error, measured against the operands."""


_FAST = {ew.exp_p: "bf_exp(", ew.logistic_p: "bf_logistic("}
"""Operations that have a fast form, and their functions in the prelude."""


def choose_fast_exps(s: ScheduledKernel) -> ScheduledKernel:
    """Choose the exponentials whose results are only used as 16-bit floats."""
    return replace(s, fast_exps=fast_exps(s.kernel))


def fast_exps(kernel: Kernel) -> frozenset[Value]:
    """Values of a kernel for which a fast exponential is accurate enough."""
    roots: list[Value] = []
    exact: set[Value] = set()
    for t in kernel.statements():
        found = values_of(t)
        roots += found
        if not isinstance(t, Store) or not is_small_float(t.buffer.dtype):
            exact.update(found)
    values = post_order(roots)
    for v in reversed(values):
        narrows = v.op == "apply" and is_small_float(v.dtype)
        passes_on = v.op == "apply" and v.attr[0] in _PASSING_ON and v not in exact and not _is_remainder(v)
        if not narrows and not passes_on:
            exact.update(dependencies(v))
    exps = (v for v in values if v.op == "apply" and v.attr[0] in _FAST)
    return frozenset(
        v for v in exps if is_small_float(v.dtype) or (v.dtype == dtypes.float32 and v not in exact)
    )


def with_fast_exp(text: str, v: Value, fast: frozenset[Value]) -> str:
    """The expression of a value, by a fast exponential if it is one of these."""
    return text.replace(name := _FAST[v.attr[0]], name.replace("bf_", "ptx_"), 1) if v in fast else text


def _is_remainder(v: Value) -> bool:
    """True for the remainder of rounding to 16 bits, which exposes lower digits."""
    if v.attr[0] is not ew.sub_p or v.args[1].op != "apply" or v.args[1].attr[0] is not ew.convert_p:
        return False
    (rounded,) = v.args[1].args
    return rounded.op == "apply" and rounded.attr[0] is ew.convert_p and rounded.args[0] is v.args[0]


# -- early arrival ----------------------------------------------------------------------------------


def arrive_early(s: ScheduledKernel) -> ScheduledKernel:
    """Decide after which statement a block counts as done, if before it stores rows."""
    kernel, mapping = s.kernel, s.mapping
    if not kernel.finish or mapping.threads < mapping.block or mapping.threads == 1:
        return s
    found = {v.attr[0] for t in kernel.finish for v in loads_in(t)}
    stores = [n for n, t in enumerate(kernel.body) if isinstance(t, Store) and t.buffer in found]
    inner = [t for loop in kernel.body for t in getattr(loop, "body", ()) if not isinstance(t, Reduce)]
    if not stores or any(not isinstance(t, Store) or t.buffer in found for t in inner):
        return s
    # stores of the finish may overwrite data that other blocks still read
    sizes = {b.size for b in kernel.buffers if b.name in s.aliased}
    if not _stores_of(kernel.body[stores[-1] + 1 :]) or any(
        t.buffer.size in sizes for t in _stores_of(kernel.finish)
    ):
        return s
    return replace(s, arrive_after=stores[-1] + 1)


def _stores_of(body: Sequence[Any]) -> list[Store]:
    """Stores in statements, including nested loops."""
    return [x for s in body for x in (s, *getattr(s, "body", ())) if isinstance(x, Store)]
