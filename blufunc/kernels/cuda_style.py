"""LoopIR as CUDA C++: threads over points and lanes, wide loads and stores, reductions through shuffles.

Kernels, stage 6. In: a ``Kernel``. Out: the text of one function, for ``cstyle_cuda.py``.
``cuda_vectors.py`` cuts the lanes in vectors and ``cuda_schedule.py`` deals them out to threads; this page writes it
down. Loops over a row's vectors are written out by the compiler, so that what a row keeps lies in registers. Every
result is the same each time: reductions combine threads in the order of their numbers, and there are no atomics
but the count of blocks that are done.

The parameters of a kernel are a pointer for each buffer, in order, each to memory aligned to 16 bytes; after them, where
a kernel has a finish, one to an ``unsigned`` that is 0 before the first launch, and again after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blufunc.core import dtypes
from blufunc.kernels import cuda_prelude, cuda_schedule, scalars
from blufunc.kernels.cstyle import CStyle, Scope, accumulator, comment, is_arg, reducing, update, written_in
from blufunc.kernels.cuda_row_passes import OneLane, OnlineSum, with_online_sums, with_single_lanes
from blufunc.kernels.cuda_schedule import is_unrolled, shared_size, steps_of
from blufunc.kernels.cuda_vectors import (
    Cutter,
    Vectors,
    best_width,
    is_contiguous,
    vectors_of,
    without_cheap_keeps,
)
from blufunc.kernels.indices import Index, Range, of
from blufunc.kernels.loopir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Set,
    Store,
    Total,
    Value,
    computed_in,
    identity,
)
from blufunc.kernels.scalars import bare

_OPS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And", "or": "Or", "xor": "Xor"}
_OPS |= {"argmax": "ArgMax", "argmin": "ArgMin"}

_LDG = frozenset(
    dtypes.as_dtype(d) for d in ("int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split())
)
"""The dtypes whose C types CUDA's own loads take."""

_NAMES = cuda_prelude.names() | frozenset(
    "threadIdx blockIdx blockDim gridDim warpSize thread group finished shared_memory uint2 uint4 min max table segment block vectors step".split()
)
"""Names that no variable of a kernel may have."""

DYNAMIC = "extern __shared__ __align__(16) unsigned char shared_memory[];"
_ROWS_AHEAD = 8
"""Vectors of rows to come that are read before what was read is used."""


@dataclass(frozen=True)
class CudaKernel:
    """A kernel as CUDA C++, and how to launch it.

    Attributes:
      source: a complete translation unit.
      entry: the name of the ``extern "C" __global__`` function.
      grid: blocks along x, y and z; where one is 0 there is nothing to launch.
      block: threads of a block along x, y and z.
      shared_bytes: dynamic shared memory of a block; beyond 48 KiB the driver must be told.
      finished: whether the last parameter is the counter of blocks that are done.
      segments: of a group, how many kernels it is; its parameter is one structure, of the addresses of the buffers of
        each. 0 for what is no group.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    finished: bool = False
    segments: int = 0


class CudaStyle(CStyle):
    """Writes one kernel for a GPU.

    Args:
      kernel: what to write.
      aliased: names of inputs that may lie where an output does; the others are read through the read-only cache.
    """

    def __init__(self, kernel: Kernel, aliased: Collection[str] = ()):
        kernel = without_cheap_keeps(cuda_schedule.with_folds_as_rows(kernel))
        kernel = with_online_sums(with_single_lanes(kernel))
        self.cuts = _cut(kernel)
        self.schedule = cuda_schedule.schedule(kernel, self.cuts)
        cutter = Cutter(list(self.cuts.values()))
        super().__init__(cutter.kernel(kernel))
        self.aliased = frozenset(aliased)
        self.cut_of_keep = {
            cutter.keep(s.keep): self.cuts[s.keep.lanes] for s in kernel.statements() if _keeps(s)
        }
        self.in_shared = [cutter.keep(k) for k in self.schedule.in_shared]
        self.threads, self.thread = self.schedule.threads, "thread"
        self.shared_bytes = 0
        self.inner: Vectors | None = None  # the vectors of the loop that is being written
        self.step = ""  # which vector of its thread's that loop is at
        self.element_scope: Scope | None = None
        self.wide_loads: dict[Any, str] = {}  # loads of the vector at hand
        self.after: list[str] = []  # stores of the vector at hand
        self.many = False  # whether block reductions come again without another one between
        self.repeated = False
        self.rows_of: Range | None = None
        self.finishing = False

    def fresh(self, wish: str) -> str:
        """An identifier that is not taken, by CUDA either."""
        return super().fresh(f"{wish}_" if wish in _NAMES else wish)

    # -- the function, the grid ----------------------------------------------------------------

    @property
    def entry(self) -> str:
        """The name of the function: no function of CUDA is called so."""
        return f"{self.kernel.name}_kernel"

    @property
    def blocks(self) -> int:
        """How many blocks are launched."""
        made = self.schedule
        return -(-self.places() // (made.points * made.unrolled))

    def places(self) -> int:
        """The number of points, or of vectors of points."""
        return math.prod([r.extent for r in self.grid_ranges()])

    def grid_ranges(self) -> list[Range]:
        """The ranges of the grid, where its innermost one is cut in vectors the range of these."""
        return [self.cuts[r].vector if r in self.cuts else r for r in self.kernel.grid]

    def signature(self) -> str:
        pointers = [
            f"{'' if b.written else 'const '}{scalars.storage_type(b.dtype)} *{self.named[b]}"
            for b in self.kernel.buffers
        ]
        if self.kernel.finish:
            pointers.append("unsigned *finished")
        bounds = f"__launch_bounds__({self.schedule.block})"
        return f'extern "C" __global__ void {bounds} {self.entry}({", ".join(pointers)})'

    def grid(self) -> None:
        made = self.schedule
        if not any(True for _ in cuda_schedule.loops_of(self.kernel.body)):
            self._points()
            return
        if made.threads == made.block:
            self.line("const int thread = threadIdx.x;")
        else:
            self.line(
                f"const int thread = threadIdx.x % {made.threads}, group = threadIdx.x / {made.threads};"
            )
        place = "int(blockIdx.x)" if made.points == 1 else f"int(blockIdx.x) * {made.points} + group"
        with self._at_point(place, self.blocks * made.points):
            self.point()

    def _points(self) -> None:
        """A kernel without lanes: a thread does one vector, or some that lie a block's apart."""
        n, made = self.fresh("n"), self.schedule
        start = f"blockIdx.x * {made.points * made.unrolled}u + threadIdx.x"
        last = self.cuts.get(self.kernel.grid[-1]) if self.kernel.grid else None
        if made.unrolled == 1:
            with self._at_point(start, self.blocks * made.points):
                self._vector(last, self.kernel.body)
            return
        writes = written_in(self.kernel.body)
        loop = f"for (int {n} = 0; {n} < {made.unrolled}; ++{n})"
        with self.block(["#pragma unroll", loop], (), writes):
            place = f"{start} + {n} * {made.points}u"
            with self._at_point(place, self.blocks * made.points * made.unrolled):
                self._vector(last, self.kernel.body)

    @contextmanager
    def _at_point(self, place: str, reached: int) -> Iterator[None]:
        """A place of the grid, of which the first ``places()`` are points: its loop variables."""
        ranges = [r for r in self.grid_ranges() if r.extent > 1]
        point = self.fresh("point")
        if ranges or reached > self.places():
            self.line(f"const unsigned {point} = {place};")
        for i, r in enumerate(ranges):
            inner = math.prod([x.extent for x in ranges[i + 1 :]])
            text = f"{point} / {inner}u" if inner > 1 else point
            text = f"{text} % {r.extent}u" if i else text
            self.line(f"const {self.index_type} {self.variable(r)} = {text};")
        if reached > self.places():
            with self.block([f"if ({point} < {self.places()}u)"], ranges, written_in(self.kernel.body)):
                yield
        else:
            self.scope.ranges |= frozenset(ranges)
            yield

    def _vector(self, cut: Vectors | None, statements: Sequence[Any]) -> None:
        """Statements for the elements of one vector, whose number is known."""
        self.inner, outside = cut, self.inner
        if cut is None or cut.element is None:
            self.body(statements)
        else:
            e = self.variable(cut.element)
            loop = f"for (int {e} = 0; {e} < {cut.width}; ++{e})"
            with self.block(["#pragma unroll", loop], [cut.element], written_in(statements)):
                self.element_scope = self.scope
                self.body(statements)
            self.element_scope = None
            self.scope.lines += self.after
            self.after.clear()
            self.wide_loads.clear()
        self.inner = outside

    # -- points ----------------------------------------------------------------------------------

    def point(self) -> None:
        """One point of the grid: its keeps, and its statements."""
        for keep in self.cut_of_keep:
            self._declare_keep(keep)
        body = self.kernel.body
        if self.schedule.sharing == 1:
            self.body(body)
            return
        at = next(i for i, s in enumerate(body) if isinstance(s, Rows))
        self.body(body[: at + 1])
        grown = dict.fromkeys(
            s.keep for s in Kernel("", (), (), (body[at],)).statements() if isinstance(s, Accumulate)
        )
        self._combine(list(grown))
        with self.block(["if (group == 0)"], (), written_in(body[at + 1 :])):
            self.body(body[at + 1 :])

    def _declare_keep(self, keep: Keep) -> None:
        cut, made = self.cut_of_keep[keep], self.schedule
        kind, name = scalars.register_type(keep.dtype), self.name(keep, keep.name)
        if keep in self.in_shared:
            original = Keep(keep.name, keep.dtype, cut.range)
            group = f" + group * {cut.range.extent}" if made.block > made.threads else ""
            self.line(f"{kind} *{name} = ({kind} *)(shared_memory + {self.shared_bytes}){group};")
            self.shared_bytes += shared_size(original, cut, made)
        else:
            self.line(f"{kind} {name}[{max(1, steps_of(cut, self.threads) * cut.width)}];")
        if keep.op is not None:
            start = scalars.literal(identity(keep.op, keep.dtype), keep.dtype)
            self._for_all(cut, lambda: self.line(f"{self.read_keep(keep)} = {start};"))

    def _for_all(self, cut: Vectors, each: Callable[[], None]) -> None:
        """What is done for every lane, without values."""
        with self._vectors(cut, ()):
            self.inner, outside = cut, self.inner
            if cut.element is None:
                each()
            else:
                e = self.variable(cut.element)
                with self.block(["#pragma unroll", f"for (int {e} = 0; {e} < {cut.width}; ++{e})"]):
                    each()
            self.inner = outside

    def _combine(self, keeps: Sequence[Keep]) -> None:
        """Let the first group have what all groups accumulated, combined in their order."""
        made = self.schedule
        sizes = [self.cut_of_keep[k].range.extent * max(4, k.dtype.itemsize) for k in keeps]
        start = self.shared_bytes
        self.shared_bytes += max(sizes, default=0) * (made.sharing - 1)
        for n, keep in enumerate(keeps):
            cut, kind = self.cut_of_keep[keep], scalars.register_type(keep.dtype)
            parts, g = self.fresh("parts"), self.fresh("g")
            extent = cut.range.extent
            if n:
                self.line("__syncthreads();")
            self.line(f"{kind} *{parts} = ({kind} *)(shared_memory + {start});")
            lane = lambda cut=cut: self.index(
                of(cut.vector) * cut.width + (of(cut.element) if cut.element else 0)
            )
            with self.block(["if (group > 0)"]):
                self._for_all(
                    cut,
                    lambda: self.line(
                        f"{parts}[(group - 1) * {extent} + {lane()}] = {self.read_keep(keep)};"
                    ),
                )
            self.line("__syncthreads();")
            with self.block(["if (group == 0)"]):

                def add(keep: Keep = keep, parts: str = parts, g: str = g, extent: int = extent) -> None:
                    place = self.read_keep(keep)
                    assert keep.op is not None
                    other = f"{parts}[{g} * {extent} + {lane()}]"
                    text = reducing(keep.op, keep.dtype, place, other, keep.dtype)
                    with self.block([f"for (int {g} = 0; {g} < {made.sharing - 1}; ++{g})"]):
                        self.line(update(place, bare(text)))

                self._for_all(cut, add)

    # -- rows ------------------------------------------------------------------------------------

    def rows(self, s: Rows) -> None:
        j = self.variable(s.range)
        sharing = self.schedule.sharing
        start, step = ("group", f"{j} += {sharing}") if sharing > 1 else ("0", f"++{j}")
        count = str(s.range.extent)
        condition = ""
        if s.index.bounds()[1] >= s.limit:
            first = s.index - of(s.range)
            if s.index.coefficient(s.range) == 1 and s.range not in first.terms:
                count = self.fresh("rows")
                left = f"{s.limit} - ({self.index(first)})"
                self.line(
                    f"const {self.index_type} {count} = min({left}, {self.index_type}({s.range.extent}));"
                )
            else:
                condition = f" && {self.index(s.index)} < {s.limit}"
        loops = list(cuda_schedule.loops_of(s.body))
        sites = [x for x in loops if any(isinstance(t, Reduce) for t in x.body)]
        vectors = max([steps_of(self.cuts[x.range], self.threads) for x in loops], default=1)
        ahead = 1 if sites else max(1, _ROWS_AHEAD // max(1, vectors))
        loop = f"for ({self.index_type} {j} = {start}; {j} < {count}{condition}; {step})"
        self.repeated = len(sites) == 1
        with self.block([f"#pragma unroll {ahead}", loop], [s.range], written_in(s.body)):
            self.body(s.body)
        self.repeated = False

    # -- lanes and their totals ------------------------------------------------------------------

    @contextmanager
    def _vectors(self, cut: Vectors, writes: Collection[Any]) -> Iterator[None]:
        """A loop over the vectors that are this thread's, of those of a range."""
        q, n, threads = self.variable(cut.vector), cut.vector.extent, self.threads
        start = "0" if threads == 1 else self.thread
        outside = self.step
        if not is_unrolled(cut, threads):
            loop = f"for ({self.index_type} {q} = {start}; {q} < {n}; {q} += {threads})"
            self.step = f"{q}"
            with self.block(["#pragma unroll 4", loop], [cut.vector], writes):
                yield
        else:
            t, steps = self.fresh("t"), steps_of(cut, threads)
            self.step = t
            with self.block(["#pragma unroll", f"for (int {t} = 0; {t} < {steps}; ++{t})"], (), writes):
                place = t if threads == 1 else f"{t} * {threads} + {start}"
                self.line(f"const {self.index_type} {q} = {place};")
                if n % threads:
                    with self.block([f"if ({q} < {n})"], [cut.vector], writes):
                        yield
                else:
                    self.scope.ranges |= {cut.vector}
                    yield
        self.step = outside

    def lanes(self, s: Lanes) -> None:
        if s.note:
            self.line(comment(s.note))
        cut = self.cuts[s.range]
        totals = list(dict.fromkeys(r.total for r in s.body if isinstance(r, Reduce)))
        online = {r.total: r.mass for r in s.body if isinstance(r, OnlineSum) and r.mass is not None}
        for total in (*totals, *online.values()):
            self._declare(total)
        if isinstance(s, OneLane):
            self._one_lane(s)
        elif s.body:
            with self._vectors(cut, written_in([s])):
                self._vector(cut, s.body)
        owns = {top: self.fresh(f"{self.named[top]}_own") for top in online}
        for top, own in owns.items():
            self.line(f"const {scalars.register_type(top.dtype)} {own} = {self.named[top]};")
        self._reduce_threads(totals)
        for top, mass in online.items():
            name = self.named[mass]
            self.line(f"{name} = under_top({name}, {owns[top]}, {self.named[top]});")
        self._reduce_threads(list(online.values()))

    def _one_lane(self, s: OneLane) -> None:
        """The body of a loop for one of its lanes, by the thread whose lane it is."""
        cut = self.cuts[s.range]
        self.need(computed_in(s.lane))
        owner = f"({self.index(s.lane // cut.width)}) % {self.threads} == {self.thread}"
        inner = [cut.vector] if cut.element is None else [cut.vector, cut.element]
        with self.block([f"if ({owner})" if self.threads > 1 else ""], inner, written_in([s])):
            self.line(f"const {self.index_type} {self.variable(cut.vector)} = {self.index(s.lane // cut.width)};")
            if cut.element is not None:
                text = self.index(s.lane % cut.width)
                self.line(f"const {self.index_type} {self.variable(cut.element)} = {text};")
            self.body(s.body)

    def _declare(self, total: Total) -> None:
        dtype = accumulator(total.dtype)
        name, kind = self.name(total, total.name), scalars.register_type(dtype)
        if is_arg(total):
            self.line(f"Arg<{kind}, {self.index_type}> {name} = {{{kind}(0), -1}};")
        else:
            self.line(f"{kind} {name} = {scalars.literal(identity(total.op, total.dtype), total.dtype)};")

    def _reduce_threads(self, totals: Sequence[Total]) -> None:
        """Let every thread of the group have the totals of all."""
        kinds: dict[tuple[str, str], list[Total]] = {}
        for total in totals:
            kind = scalars.register_type(accumulator(total.dtype))
            kind = f"Arg<{kind}, {self.index_type}>" if is_arg(total) else kind
            kinds.setdefault((_OPS[total.op], kind), []).append(total)
        for (op, kind), some in kinds.items():
            names = [self.named[t] for t in some]
            if self.threads > 32:
                while len(names) > 1:
                    self._block_reduce(op, kind, names[:2])
                    names = names[2:]
                if names:
                    self._block_reduce(op, kind, names)
            elif self.threads > 1:
                for name in names:
                    self.line(f"{name} = warp_reduce<{op}, {self.threads}>({name});")
        for total in totals:
            if scalars.is_small_float(total.dtype) and not is_arg(total):
                name = self.named[total]
                self.line(f"{name} = round_to<{scalars.storage_type(total.dtype)}>({name});")

    def _block_reduce(self, op: str, kind: str, names: Sequence[str]) -> None:
        """One exchange, of one total or of two."""
        memory, threads = self.fresh(f"{names[0]}_shared"), self.threads
        reused = "true" if self.repeated else "false"
        if len(names) == 1:
            self.line(f"__shared__ {kind} {memory}[{threads // 32}];")
            self.line(f"{names[0]} = block_reduce<{op}, {threads}, {reused}>({names[0]}, {memory});")
            return
        both = self.fresh(f"{names[0]}_both")
        pair = f"vec<{kind}, 2>"
        self.line(f"__shared__ {pair} {memory}[{threads // 32}];")
        self.line(f"{pair} {both} = {{{{{', '.join(names)}}}}};")
        self.line(f"{both} = block_reduce<Each<{op}>, {threads}, {reused}>({both}, {memory});")
        for i, name in enumerate(names):
            self.line(f"{name} = {both}.x[{i}];")

    def reduce(self, s: Reduce) -> None:
        name, value = self.named[s.total], self.value(s.value)
        if isinstance(s, OnlineSum):
            self._reduce_online(s, value)
            return
        if not is_arg(s.total):
            text = reducing(s.total.op, accumulator(s.total.dtype), name, value, s.value.dtype)
            self.line(update(name, bare(text)))
            return
        assert s.position is not None
        kind = scalars.register_type(accumulator(s.total.dtype))
        here = f"Arg<{kind}, {self.index_type}>{{{bare(value)}, {self.index(s.position)}}}"
        self.line(f"{name} = {_OPS[s.total.op]}::combine({name}, {here});")

    def _reduce_online(self, s: OnlineSum, value: str) -> None:
        """Put a value beside those of the vector's other elements, which are taken up together."""
        assert s.mass is not None
        kind, both = scalars.register_type(s.value.dtype), f"{self.named[s.total]}, {self.named[s.mass]}"
        values = self.fresh(f"{self.named[s.total]}_of")
        if self.inner is None or self.inner.element is None:
            self.line(f"const {kind} {values}[1] = {{{bare(value)}}};")
            self.line(f"take_up({both}, {values});")
            return
        self.scopes[-2].lines.append(f"{kind} {values}[{self.inner.width}];")
        self.line(f"{values}[{self.variable(self.inner.element)}] = {bare(value)};")
        self.after.append(f"take_up({both}, {values});")

    def read_total(self, total: Total) -> str:
        if total.position is None:
            return self.named[total]
        return f"{scalars.register_type(total.position)}({self.named[total]}.index)"

    def read_keep(self, keep: Keep) -> str:
        cut = self.cut_of_keep[keep]
        if keep in self.in_shared:
            return f"{self.named[keep]}[{self.index(_lane(cut))}]"
        parts = (
            [self.step] if cut.width == 1 else [f"{self.step} * {cut.width}", self.variable(cut.innermost)]
        )
        return f"{self.named[keep]}[{' + '.join(parts)}]"

    # -- memory ----------------------------------------------------------------------------------

    def expression(self, v: Value) -> str:
        if v.op == "load" and self.scope is self.element_scope and self.inner is not None:
            buffer, index = v.attr
            element = self.inner.element
            if is_contiguous(index, element) and not any(element in a.ranges() for a in v.args):
                guard = self.found(v.args[0]) if v.args else None
                text = f"{self._wide_load(buffer, index - of(element), guard)}.x[{self.variable(element)}]"  # type: ignore
                return scalars.loaded(text, buffer.dtype)
        return super().expression(v)

    def _wide_load(self, buffer: Buffer, index: Index, guard: str | None) -> str:
        """The name of a vector, which is read before the loop over its elements."""
        assert self.inner is not None
        key = (buffer, index, guard)
        if key not in self.wide_loads:
            inner, self.scopes = self.scopes, self.scopes[:-1]
            kind, width = scalars.storage_type(buffer.dtype), self.inner.width
            name = self.wide_loads[key] = self.fresh(f"{self.named[buffer]}_vec")
            text = f"{self._reader(buffer)}<{kind}, {width}>({_plus(self.named[buffer], self.index(index))})"
            if guard is not None:
                text = f"{guard} ? {text} : vec<{kind}, {width}>{{}}"
            self.line(f"const vec<{kind}, {width}> {name} = {text};")
            self.scopes = inner
        return self.wide_loads[key]

    def _reader(self, buffer: Buffer) -> str:
        """The function that reads vectors of a buffer."""
        if buffer.written:
            return "vec_ldcg" if self.finishing else "vec_load"
        return "vec_load" if buffer.name in self.aliased else "vec_ldg"

    def load(self, buffer: Buffer, index: str) -> str:
        name, reader = self.named[buffer], self._reader(buffer)
        if reader == "vec_load":
            text = f"{name}[{index}]"
        elif buffer.dtype in _LDG:
            text = f"__{reader[4:]}(&{name}[{index}])"
        else:
            text = f"{reader}<{scalars.storage_type(buffer.dtype)}, 1>({_plus(name, index)}).x[0]"
        return scalars.loaded(text, buffer.dtype)

    def _store(self, s: Store) -> str:
        element = self.inner.element if self.inner is not None else None
        if self.element_scope is not None and is_contiguous(s.index, element):
            if s.guard is None or element not in s.guard.ranges():
                return self._wide_store(s)
        text = super()._store(s)
        if self.inner is None and self.threads > 1:
            self._before_store_of_one(s)
            return f"if ({self.thread} == 0) {{ {text} }}"
        return text

    def _wide_store(self, s: Store) -> str:
        """The store of an element to a vector, which is written after the loop over its elements."""
        assert self.inner is not None
        self.need([s.value])
        value = bare(self.value(s.value))
        kind, width = scalars.storage_type(s.buffer.dtype), self.inner.width
        inner, self.scopes = self.scopes, self.scopes[:-1]
        self.need([x for x in _needed(s)])
        name = self.fresh(f"{self.named[s.buffer]}_vec")
        self.line(f"vec<{kind}, {width}> {name};")
        place = _plus(self.named[s.buffer], self.index(s.index - of(self.inner.element)))  # type: ignore[arg-type]
        guard = f"if ({bare(self.value(s.guard))}) " if s.guard is not None else ""
        self.after.append(f"{guard}vec_store<{kind}, {width}>({place}, {name});")
        self.scopes = inner
        return f"{name}.x[{self.variable(self.inner.element)}] = {scalars.stored(value, s.buffer.dtype)};"  # type: ignore

    def _before_store_of_one(self, s: Store) -> None:
        """What one thread stores for all may lie where all have read: they must be done reading."""
        size = s.buffer.size, s.buffer.dtype.itemsize
        taken = [b for b in self.kernel.buffers if not b.written and (b.size, b.dtype.itemsize) == size]
        if taken:
            self.line("__syncwarp();" if self.threads <= 32 else "__syncthreads();")

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        self.threads, self.thread, self.finishing = self.schedule.block, "int(threadIdx.x)", True
        with self.block(["if (last_block(finished, gridDim.x))"], (), written_in(self.kernel.finish)):
            self.body(self.kernel.finish)

    def made(self, source: str) -> CudaKernel:
        """The kernel, written, in a source."""
        return CudaKernel(
            source,
            self.entry,
            (self.blocks, 1, 1),
            (self.schedule.block, 1, 1),
            self.shared_bytes,
            bool(self.kernel.finish),
        )


def _keeps(s: Any) -> bool:
    return isinstance(s, (Set, Accumulate))


def _needed(s: Store) -> list[Value]:
    return [*computed_in(s.index), *([] if s.guard is None else [s.guard])]


def _lane(cut: Vectors) -> Index:
    """A lane in terms of its vector and element."""
    return of(cut.vector) * cut.width + (of(cut.element) if cut.element is not None else 0)


def _plus(name: str, index: str) -> str:
    return name if index == "0" else f"{name} + {index}" if "?" not in index else f"{name} + ({index})"


def _cut(kernel: Kernel) -> dict[Range, Vectors]:
    """Vectors of the ranges of all lanes; of a kernel without lanes, of its innermost grid range."""
    lanes = [s.range for s in kernel.statements() if isinstance(s, Lanes)]
    cut = lanes if any(True for _ in cuda_schedule.loops_of(kernel.body)) else [*kernel.grid[-1:], *lanes]
    return {r: vectors_of(r, best_width(kernel, r)) for r in dict.fromkeys(cut)}
