"""LoopIR as C++ for the CPU: OpenMP threads over the grid, SIMD over lanes.

Kernels, stage 6. In: a ``Kernel``. Out: C++ source for ``toolchain.py``. Its function takes a table of buffer pointers
and a thread count. Results do not depend on that count: threads share no reduction. SIMD loops run over lanes, or over
the innermost range of the grid in kernels without lanes.

No pointer is ``restrict``: an output may alias an input. ``omp simd`` declares the iterations of each loop
independent.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cpu.lockstep import loops_in_lock_step, uniform_branch, with_sides, write_strips
from blufunc.kernels.backends.cpu.loop_splitting import split_innermost
from blufunc.kernels.backends.cpu.scans import Scans
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.c_renderer import (
    CStyle,
    accumulator,
    comment,
    is_arg,
    reducing,
    start_of,
    update,
    written_in,
)
from blufunc.kernels.codegen.scalar_ops import bare, grouped
from blufunc.kernels.codegen.scopes import Cell, Survey
from blufunc.kernels.codegen.source_files import HOST
from blufunc.kernels.loopir.index import Range, of
from blufunc.kernels.loopir.ir import (
    BODIES,
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Scan,
    Statement,
    Total,
    Value,
    computed_in,
    post_order,
    values_of,
)

PARALLEL_WORK = 1 << 20
"""Minimum operations to wake threads: about 20 us of work; a wake takes 5 us."""

_STACK_BYTES = 1 << 16
"""Maximum bytes of a point's keeps on the stack."""

_BLOCK = 1 << 13
"""Innermost elements per thread iteration where the outer ranges are small."""

_CACHE_LINE, _TILE = 64, 64
"""Bytes of a cache line; elements of the other axis of a tile."""

_POINTS_FOR_THREADS = 64
"""Minimum points for even load balance across threads."""

_UNROLLED = 16
"""Maximum elements of an unrolled fold, whose enclosing loop then vectorizes."""

_CHEAP = 4
"""Maximum operations to compute twice rather than in a scalar loop."""

_ROWS_AT_ONCE = 4
"""Rows that a loop over lanes accumulates in registers before it writes back."""

_LIGHT = 8
"""Maximum operations per element for which memory traffic of keeps dominates."""

_TURNS = 16
"""Assumed trip count of loops without a bound."""

_VERSIONS = 8
"""Maximum kernel versions, one per combination of uniform branch sides."""

_CLAUSES = {"sum": "+", "prod": "*", "max": "max", "min": "min", "and": "&", "or": "|", "xor": "^"}
"""OpenMP names of reductions."""

_BOOLEAN = {"max": "or", "min": "and"}

_BETTER = {"argmax": ">", "argmin": "<"}

_ALONE = re.compile(r"\b(bf_(?:sin|cos))\(")
"""Functions with a variant for one value, which need not be vectorized."""

SCRATCH = "backends/cpu/include/scratch.h"


class HostStyle(Scans):
    """Writer of one kernel for the CPU."""

    reserved = CStyle.reserved | {"buffers", "threads", "scratch", "Scratch", "main", "free", "aligned_alloc"}

    def __init__(self, kernel: Kernel, exported: bool = True):
        super().__init__(kernel)
        self.exported = exported
        self.reductions: set[str] = set()  # declarations of reductions that OpenMP lacks
        self.lane: Range | None = None
        statements = list(kernel.statements())
        # contiguous folds vectorize better than the grid
        self.vector_grid = not (
            any(isinstance(s, (Lanes, Rows)) for s in statements)
            or any(v.op == "fold" and _along_memory(v) for v in self.reads)
        )
        # loops and branches of points, which need strips and versions
        self.has_loops, self.has_branches = (any(v.op == op for v in self.reads) for op in ("loop", "branch"))
        self.uses_scratch = False
        self.held: dict[Keep, str] = {}  # keeps that are in registers at the moment
        self.versions = 1

    # -- the function, the grid ----------------------------------------------------------------

    def render(self) -> str:
        text = super().render()
        if self.kernel.points > 1 or not self.vector_grid or any(v.op == "fold" for v in self.reads):
            return text
        return _ALONE.sub(r"\1_alone(", text)

    def signature(self) -> str:
        linkage = 'extern "C"' if self.exported else "static"
        return f"{linkage} void {self.kernel.name}(void **buffers, int threads)"

    def parameters(self) -> None:
        for i, b in enumerate(self.kernel.buffers):
            # compilers vectorize loads of bytes compared with 0, but not of booleans
            element = "uint8_t" if dtypes.is_bool(b.dtype) else scalar_ops.storage_type(b.dtype)
            kind = f"{'' if b.written else 'const '}{element} *"
            note = f"  {comment(b.note)}" if b.note else ""
            self.line(f"{kind}{self.named[b]} = ({kind})buffers[{i}];{note}")

    def grid(self) -> None:
        may_split = self.has_branches and self.versions < _VERSIONS
        chosen = uniform_branch(self.kernel) if may_split else None
        if chosen is None:
            self._whole_grid()
            return
        # a uniform branch is tested once, and each side has its own SIMD loops
        self.versions += 1

        def write(kernel: Kernel) -> None:
            with self._as(kernel):
                self.grid()

        sides = [replace(self.kernel, body=body) for body in with_sides(self.kernel, chosen)]
        self.either(bare(self.value(chosen.args[0])), [], *[functools.partial(write, k) for k in sides])

    @contextmanager
    def _as(self, kernel: Kernel) -> Iterator[None]:
        """Write a variant of the kernel."""
        before, uses = self.kernel, self.uses
        survey = Survey(kernel)
        self.kernel, self.uses, self.reads = kernel, survey.uses, {**self.reads, **survey.reads}
        yield
        self.kernel, self.uses = before, uses

    def _whole_grid(self) -> None:
        kernel = self.kernel
        writes = written_in(kernel.body)
        parallel = kernel.points > 1 and work(kernel) >= PARALLEL_WORK
        if not kernel.grid:
            self.point()
        elif not self.vector_grid:
            with self.block(self._threads(parallel, [*map(self.loop, kernel.grid)]), kernel.grid, writes):
                self.point()
        else:
            self._vector_grid(parallel, writes)

    def _vector_grid(self, parallel: bool, writes: set) -> None:
        """Threads over the outer ranges, SIMD over the innermost; tiled if faster."""
        *outer, inner = self.kernel.grid
        tiles = self._tiles(parallel)
        if not outer:
            loops = self._lock_step(inner, self.kernel.body)
            if loops:
                threads = self._threads(parallel, [])
                write_strips(self, threads, inner, loops, "#pragma omp simd", writes, self.kernel.body)
                return
            shared = "parallel for simd schedule(static) num_threads(threads)" if parallel else "simd"
            for part in split_innermost(self.kernel):
                inner = part.grid[-1]
                with self._as(part), self.block([f"#pragma omp {shared}", self.loop(inner)], [inner], writes):
                    self.body(part.body)
            return
        whole = [r for r in outer if r not in tiles]
        ends: dict[Range, tuple[str, str]] = {r: (self.fresh("start"), self.fresh("end")) for r in tiles}
        strips = [
            f"for ({self.index_type} {ends[r][0]} = 0; {ends[r][0]} < {r.extent}; {ends[r][0]} += {n})"
            for r, n in tiles.items()
        ]
        with ExitStack() as stack:
            heads = [*map(self.loop, whole), *strips]
            stack.enter_context(self.block(self._threads(parallel, heads), whole, writes))
            for r, n in tiles.items():
                start, end = ends[r]
                rest = f"{r.extent} - {start} < {n} ? {r.extent} : {start} + {n}"
                self.line(f"const {self.index_type} {end} = {rest};")
            for r in (r for r in outer if r in tiles):
                stack.enter_context(self.block([self.loop(r, *ends[r])], [r], writes))
            for part in [self.kernel] if inner in tiles else split_innermost(self.kernel):
                with self._as(part):
                    self.vector_loop(
                        "#pragma omp simd", part.grid[-1], writes, part.body, ends.get(inner, ("0", ""))
                    )

    def vector_loop(
        self,
        pragma: str,
        over: Range,
        writes: Iterable[Cell],
        body: Sequence[Any],
        bounds: tuple[str, str] = ("0", ""),
    ) -> None:
        """Write the statements of a body for a range, or for its part between ``bounds``."""
        loops = self._lock_step(over, body)
        if loops:
            write_strips(self, [], over, loops, pragma, writes, body, bounds)
            return
        with self.block([*[pragma] * bool(pragma), self.loop(over, *bounds)], [over], writes):
            self.body(body)

    def _lock_step(self, over: Range, body: Sequence[Any]) -> list[Value]:
        return loops_in_lock_step(self, over, body) if self.has_loops else []

    def _tiles(self, parallel: bool) -> dict[Range, int]:
        """Tile sizes of the ranges to tile.

        Reads that are contiguous along an outer range use each cache line at once. Where rows are few and long,
        threads split them.
        """
        *outer, inner = self.kernel.grid
        for v in self.reads:
            if v.op == "load" and v.attr[1].coefficient(inner) not in (0, 1, None):
                line = _CACHE_LINE // v.dtype.itemsize
                along = [r for r in outer if v.attr[1].coefficient(r) == 1 and r.extent >= line]
                if along and inner.extent >= _TILE:
                    return {along[0]: line, inner: _TILE}
        few = math.prod(r.extent for r in outer) < _POINTS_FOR_THREADS
        return {inner: _BLOCK} if outer and parallel and few and inner.extent >= 2 * _BLOCK else {}

    def _threads(self, parallel: bool, loops: Sequence[str]) -> list[str]:
        """Loop heads, parallelized across threads."""
        if not parallel:
            return list(loops)
        collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
        # loops in points make the work per point uneven
        kind = "dynamic" if self.has_loops else "static"
        return [f"#pragma omp parallel for{collapse} schedule({kind}) num_threads(threads)", *loops]

    def point(self) -> None:
        """Write one point of the grid."""
        self._declare_keeps(self.kernel.body)
        self.body(self.kernel.body)

    def finish(self) -> None:
        self.line("// when all points are done")
        over = self.kernel.over
        heads = self._threads(work(self.kernel) >= PARALLEL_WORK, [*map(self.loop, over)])
        with self.block(heads, over, written_in(self.kernel.finish)) if over else nullcontext():
            self._declare_keeps(self.kernel.finish)
            super().finish()

    def _declare_keeps(self, body: Sequence[Any]) -> None:
        """Declare arrays for the keeps of a body; large ones in per-thread scratch memory."""
        keeps = _keeps_of(body)
        size = sum(map(_bytes_of, keeps))
        at = 0
        for keep in keeps:
            kind, name = scalar_ops.register_type(keep.dtype), self.name(keep, keep.name)
            if size > _STACK_BYTES:
                self.line(f"{kind} *{name} = ({kind} *)(scratch.of({size}) + {at});")
                self.uses_scratch = True
            else:
                self.line(f"alignas(64) {kind} {name}[{max(keep.lanes.extent, 1)}];")
            at += _bytes_of(keep)
            if keep.op is not None:
                self.line(
                    f"{self.loop(keep.lanes)} {self.read_keep(keep)} = {start_of(keep.op, keep.dtype)};"
                )

    # -- lanes and their totals ----------------------------------------------------------------

    def lanes(self, s: Lanes) -> None:
        if s.note:
            self.line(comment(s.note))
        self.lane = s.range
        searches = _searches(s)
        body = [x for x in s.body if x not in searches]
        if body:
            self._lanes(s, body)
        for r in searches:
            self._search(s, r, body)

    def _lanes(self, s: Lanes, body: Sequence[Statement]) -> None:
        """One loop of some statements."""
        totals = list(dict.fromkeys(r.total for r in body if isinstance(r, Reduce)))
        for total in totals:
            self._declare(total)
        pragma = ""
        if not any(is_arg(t) or dtypes.is_complex(t.dtype) for t in totals):
            clauses = [
                f" reduction({self._clause(t.op, _accumulator(t.dtype))} : {self.named[t]})" for t in totals
            ]
            pragma = f"#pragma omp simd{''.join(clauses)}"
        scans = [x for x in body if isinstance(x, Scan)]
        if scans:
            self.scanned_lanes(s, scans, pragma)
        else:
            self.vector_loop(pragma, s.range, written_in([s]), body)
        for total in totals:
            if scalar_ops.is_small_float(total.dtype) and not is_arg(total):
                name = self.named[total]
                self.line(f"{name} = round_to<{scalar_ops.storage_type(total.dtype)}>({name});")

    def _search(self, s: Lanes, r: Reduce, before: Sequence[Statement]) -> None:
        """SIMD loops for the extremum, unless known, and its lowest position.

        NaN is an extremum.

        Args:
          before: the statements of the loop whose totals are known.
        """
        assert r.position is not None
        total, dtype = r.total, _accumulator(r.total.dtype)
        own = self.name(total, total.name)
        extremum = Total(own, dtype, total.op[3:])
        known = (x.total for x in before if isinstance(x, Reduce) and x.value is r.value)
        same = next((t for t in known if t.op == extremum.op and t.dtype == dtype), None)
        if same is not None:
            name = self.named[same]
        else:
            self.named[extremum] = name = own
            self._declare(extremum)
            clause = f"#pragma omp simd reduction({self._clause(extremum.op, dtype)} : {name})"
            with self.block([clause, self.loop(s.range)], [s.range], [total]):
                self.reduce(Reduce(extremum, r.value))
        at = self.name((total, "at"), f"{own}_position")
        self.line(f"{self.index_type} {at} = {2**63 - 1 if self.wide else 2**31 - 1};")
        with self.block([f"#pragma omp simd reduction(min : {at})", self.loop(s.range)], [s.range], [total]):
            self.need(values_of(r))
            value, position = self.named_value(r.value), grouped(self.index(r.position))
            nan = f" || {value} != {value}" if dtypes.is_floating(dtype) else ""
            self.line(f"{at} = ({value} == {name}{nan}) && {position} < {at} ? {position} : {at};")

    def _declare(self, total: Total) -> None:
        dtype = _accumulator(total.dtype)
        name = self.name(total, total.name)
        if is_arg(total):
            self.line(f"{scalar_ops.register_type(dtype)} {name}{{}};")
            self.line(f"{self.index_type} {self.name((total, 'at'), f'{name}_position')} = -1;")
        else:
            self.line(f"{scalar_ops.register_type(dtype)} {name} = {start_of(total.op, total.dtype)};")

    def _clause(self, op: str, dtype: np.dtype) -> str:
        """OpenMP name of a reduction in an accumulator.

        Float reductions that OpenMP lacks are declared.
        """
        if dtypes.is_bool(dtype):
            return _CLAUSES[_BOOLEAN.get(op, op)]
        if op in ("max", "min", "logaddexp") and dtypes.is_floating(dtype):
            kind = scalar_ops.register_type(dtype)
            start = start_of(op, dtype)
            combine = f"omp_out = bf_{op}(omp_out, omp_in)"
            self.reductions.add(
                f"#pragma omp declare reduction(nan_{op} : {kind} : {combine}) initializer(omp_priv = {start})"
            )
            return f"nan_{op}"
        return _CLAUSES[op]

    def reduce(self, s: Reduce) -> None:
        name = self.named[s.total]
        if not is_arg(s.total):
            value = self.value(s.value)
            text = reducing(s.total.op, _accumulator(s.total.dtype), name, value, s.value.dtype)
            self.line(update(name, bare(text)))
            return
        self.need(values_of(s))
        value = self.named_value(s.value)
        assert s.position is not None and self.lane is not None
        at, position, better = self.named[(s.total, "at")], self.index(s.position), _BETTER[s.total.op]
        floating = dtypes.is_floating(s.total.dtype)
        beats = [f"{at} < 0", f"{value} {better} {name}"]
        if floating:
            beats.append(f"({value} != {value} && {name} == {name})")
        if (s.position.coefficient(self.lane) or -1) < 0:  # otherwise later iterations have larger positions
            tie = (
                f"({value} == {name} || ({value} != {value} && {name} != {name}))"
                if floating
                else f"{value} == {name}"
            )
            beats.append(f"({tie} && {position} < {at})")
        with self.block([f"if ({' || '.join(beats)})"]):
            self.line(f"{name} = {value};")
            self.line(f"{at} = {position};")

    def read_total(self, total: Total) -> str:
        if total.position is None:
            return self.named[total]
        return f"{scalar_ops.register_type(total.position)}({self.named[(total, 'at')]})"

    def read_keep(self, keep: Keep) -> str:
        return self.held.get(keep) or f"{self.named[keep]}[{self.variable(keep.lanes)}]"

    # -- rows ----------------------------------------------------------------------------------

    def rows(self, s: Rows) -> None:
        if not _only_adds(s):
            super().rows(s)
            return
        # several rows at once, each lane in row order: sums are bitwise those of one row at a time
        (lanes,) = s.body
        keeps, writes, step = [a.keep for a in lanes.body], written_in(s.body), _ROWS_AT_ONCE
        self.need(computed_in(s.index))
        start, end = self.fresh("first"), str(s.range.extent)
        if s.index.bounds()[1] >= s.limit:
            rest = self.index(of(s.range) - s.index + s.limit)
            end = self.fresh("end")
            self.line(
                f"const {self.index_type} {end} = {rest} < {s.range.extent} ? {rest} : {s.range.extent};"
            )
        self.line(f"{self.index_type} {start} = 0;")
        with self.block([f"for (; {start} + {step} <= {end}; {start} += {step})"], [], writes):
            with self.block(["#pragma omp simd", self.loop(lanes.range)], [lanes.range], writes):
                places = {keep: self.read_keep(keep) for keep in keeps}
                for keep, place in places.items():
                    self.held[keep] = held = self.temporary()
                    self.line(f"{scalar_ops.register_type(keep.dtype)} {held} = {place};")
                row = self.loop(s.range, start, f"{start} + {step}")
                with self.block([f"#pragma GCC unroll {step}", row], [s.range], writes):
                    self.body(lanes.body)
                for keep, place in places.items():
                    self.line(f"{place} = {self.held.pop(keep)};")
        with self.block([self.loop(s.range, start, end)], [s.range], writes):
            self.body(s.body)

    def load(self, buffer: Buffer, index: str) -> str:
        text = super().load(buffer, index)
        return f"{text} != 0" if dtypes.is_bool(buffer.dtype) else text

    # -- folds ---------------------------------------------------------------------------------

    def fold_loop(self, v: Value, total: str) -> list[str]:
        op, over = v.attr
        loop = self.loop(over)
        if over.extent <= _UNROLLED:
            return [f"#pragma GCC unroll {max(over.extent, 1)}", loop]
        if self.vector_grid or not _along_memory(v) or dtypes.is_complex(v.dtype):
            return [loop]
        return [f"#pragma omp simd reduction({self._clause(op, accumulator(v.dtype))} : {total})", loop]


def _accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype that a loop over lanes reduces in.

    measured: GCC reduces 40,000 booleans in 13 us, and as int32 in 3 us (2026-11-27)
    """
    return np.dtype(np.int32) if dtypes.is_bool(dtype) else accumulator(dtype)


def _searches(s: Lanes) -> list[Reduce]:
    """The reductions to positions, if values are cheap to compute twice."""
    found = [r for r in s.body if isinstance(r, Reduce) and r.position is not None]
    in_order = any(isinstance(x, Scan) for x in s.body)  # values may read a prefix at their lane
    return [] if in_order or _work(found, set()) > _CHEAP else found


def _only_adds(s: Rows) -> bool:
    """True if a loop over rows only accumulates them into keeps, lane by lane."""
    lanes = s.body[0]
    return (
        len(s.body) == 1
        and isinstance(lanes, Lanes)
        and s.range.extent >= _ROWS_AT_ONCE
        and s.index.coefficient(s.range) == 1
        and all(isinstance(a, Accumulate) and not dtypes.is_complex(a.keep.dtype) for a in lanes.body)
        and _work(lanes.body, set()) <= _LIGHT
    )


def _keeps_of(body: Sequence[Any]) -> list[Keep]:
    return sorted((c for c in written_in(body) if isinstance(c, Keep)), key=lambda keep: keep.name)


def _bytes_of(keep: Keep) -> int:
    size = 8 if keep.dtype.itemsize > 4 else 4
    return -(-max(keep.lanes.extent, 1) * max(size, keep.dtype.itemsize) // 64) * 64


def _along_memory(fold: Value) -> bool:
    """True if a fold reads memory contiguously along its range."""
    over = fold.attr[1]
    if over.extent <= _UNROLLED:
        return False
    loads = [v for v in post_order(fold.args) if v.op == "load" and over in v.ranges()]
    return bool(loads) and all(v.attr[1].coefficient(over) == 1 for v in loads)


def work(kernel: Kernel) -> int:
    """Estimated operations of a kernel."""
    return kernel.points * _work(kernel.body, set())


def _work(body: Sequence[Any], seen: set[Value]) -> int:
    total = 0
    for s in body:
        if isinstance(s, (Lanes, Rows)):
            total += s.range.extent * _work(s.body, seen)
            continue
        for v in post_order(values_of(s)):
            if v not in seen:
                seen.add(v)
                total += _body_work(v) if v.op in BODIES else _cost(v)
    return total


def _body_work(v: Value) -> int:
    """Estimated operations of a fold, loop or branch body."""
    times = v.attr[1].extent if v.op == "fold" else _TURNS if v.op == "loop" and v.attr.most is None else 1
    if v.op == "loop" and v.attr.most is not None:
        times = v.attr.most
    return times * sum(_body_work(x) if x.op in BODIES else 1 for x in post_order(v.args))


def _cost(v: Value) -> int:
    if v.op == "bits":
        return 80  # 20 rounds of the cipher
    return v.attr[0].cost if v.op == "apply" else int(v.op == "load")


# -- sources ---------------------------------------------------------------------------------------


def render(kernel: Kernel) -> str:
    """C++ source of one kernel: ``extern "C" void NAME(void **buffers, int threads)``.

    ``buffers`` points to the data of ``kernel.buffers``, in order; ``threads`` is the maximum thread count.
    """
    return render_many([kernel])


def render_many(kernels: Sequence[Kernel], callers: str = "", inner: Collection[str] = ()) -> str:
    """One source with a function per kernel; faster to compile than several.

    ``callers``: source of functions that call them; ``inner``: the names of kernels that only these call.
    """
    writers = [HostStyle(kernel, kernel.name not in inner) for kernel in kernels]
    functions = "\n".join(writer.render() for writer in writers)
    reductions = sorted(set[str]().union(*[writer.reductions for writer in writers]))
    scratch = [source_files.source(SCRATCH)] if any(writer.uses_scratch for writer in writers) else []
    return HOST.with_prelude("\n".join([*scratch, *reductions, functions, *[callers] * bool(callers)]))
