"""Stage 6: a fused region becomes kernels of LoopIR.

Kernels. In: a ``Region`` of a ``Fusion`` and a ``Target``. Out: ``Launch``es: one kernel; where a reduction over rows
was cut in chunks that found too much to be added up at its end, a second that does.

The value of a variable at an element is asked for by index (``Lowering.at``). Movement turns the index into that
of an operand, arithmetic asks for its operands at the same index, a variable in memory becomes a load. So a
transpose of a slice of a broadcast costs one address computation, and nothing is copied. What is asked for twice
at one index is one value.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc.core import dtypes, source
from blufunc.core.jaxpr import Eqn, Literal, Var
from blufunc.core.kinds import Elementwise
from blufunc.core.ops.dynamic import dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.ops.elementwise import add_p, and_p, clamp_p, convert_p, mul_p, select_p
from blufunc.core.ops.gather_scatter import gather_fill, gather_p, scatter_add_p
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.core.structure import add_any_p
from blufunc.kernels import scalars
from blufunc.kernels.access import Place, gathered, moves, source_of
from blufunc.kernels.frames import REDUCES
from blufunc.kernels.fuse import Fusion, Region, one_hot_batch
from blufunc.kernels.indices import UNBOUNDED, ZERO, Computed, Index, Range, flat, of, ranges_of, unflat
from blufunc.kernels.indices import constant as fixed
from blufunc.kernels.kernel_names import Names, type_text
from blufunc.kernels.loopir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Store,
    Total,
    Value,
    apply,
    const,
    fold,
    identity,
    load,
    number,
    outside,
    post_order,
    read,
    within,
)
from blufunc.kernels.lower_control import Control
from blufunc.kernels.lower_random import RANDOM, held, held_as
from blufunc.kernels.point_control import POINTS
from blufunc.kernels.row_loops import Levels, in_generations, root_apart, roots_of, shared_between, with_keeps


@dataclass(frozen=True)
class Target:
    """What a lowering must know of the machine.

    Attributes:
      chunks: from the rows and the lanes of a reduction over rows to the number of chunks that rows are cut in.
      total_chunks: from the elements of a reduction over everything to the number of chunks.
      tile_chunks: the same where no number of a whole row is needed, from the rows and the number of tiles that each is
        cut in; None: as ``chunks``.
      interleaved: whether chunks of rows take rows in turns, so that what all of them read at a time lies side by side;
        else each takes rows that follow each other.
      finish_bytes: up to how much chunks of rows find for one tile of columns, to be added up at the kernel's end.
      keep_bytes: how much a grid point may keep of its row between loops.
      keep_loads: whether what was read is kept too: not where a cache does that.
      tile: up to how many columns a chunk adds up at a time.
      wide_tile: from how many elements there are to the same, where elements are stored too; None: as ``tile``.
      batch_first: whether products want their batch axes side by side in memory.
      epilogues: whether products can add something to what they compute.
      group: whether kernels that do the same to different arrays are launched as one.
      recompute: whether what is cheap to compute again is not kept for later, where memory is scarcer than time.
      scarce_bytes: from which peak on memory is scarce: smaller programs compute nothing again.
    """

    chunks: Callable[[int, int], int]
    total_chunks: Callable[[int], int]
    keep_bytes: int
    keep_loads: bool
    tile: int
    tile_chunks: Callable[[int, int], int] | None = None
    interleaved: bool = False
    finish_bytes: int = 0
    wide_tile: Callable[[int], int] | None = None
    batch_first: bool = False
    epilogues: bool = False
    group: bool = False
    recompute: bool = False
    scarce_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory between a kernel and its finish."""

    dtype: np.dtype
    size: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """A kernel, and what its buffers are."""

    kernel: Kernel
    operands: dict[Buffer, Var | Scratch]


def lower(region: Region, fusion: Fusion, target: Target) -> list[Launch]:
    """The kernels of a region."""
    return Lowering(region, fusion, target).run()


_KEEP_COST = 8  # operations from which on a value is kept for the next loop rather than computed again


class Lowering:
    """One region on its way to LoopIR."""

    def __init__(self, region: Region, fusion: Fusion, target: Target):
        self.region, self.virtual, self.target = region, fusion.virtual, target
        self.names = Names(fusion.jaxpr.invars, fusion.jaxpr.arg_names)
        self.producers = {v: e for e in region.eqns for v in e.outvars}
        self.inputs: dict[Var, Buffer] = {}
        self.outputs: dict[Var, Buffer] = {}
        self.start()

    def start(self) -> None:
        """Forget all values: they belong to loop variables."""
        self.memo: dict[Any, Value] = {}
        self.control = Control()
        self.totals: dict[Var, tuple[Total, Value, Index | None]] = {}
        self.columns: dict[Var, tuple[str, np.dtype, Value]] = {}
        self.parts: dict[Var, tuple[Buffer, Scratch]] = {}
        self.guard: Value | None = None

    def run(self) -> list[Launch]:
        """The kernels."""
        for v in self.region.outputs:
            self.outputs[v] = Buffer(
                self.names.of(v, self.maker(v)), held_as(v.aval.dtype), v.aval.size, True, type_text(v)
            )
        frame = self.region.frame
        if frame.total:
            launches = self.in_total()
        elif frame.lanes:
            launches = self.in_rows()
        else:
            launches = [self.pointwise()]
        return launches

    def maker(self, v: Var) -> Eqn | None:
        """The equation that computes a variable."""
        return self.producers.get(v) or self.virtual.get(v)

    # -- values --------------------------------------------------------------------------------

    def at(self, atom: Any, place: Place) -> Value:
        """The value of a variable or literal at an index."""
        if atom.__class__ is Literal:
            return const(held(atom.value, atom.aval.dtype), held_as(atom.aval.dtype))
        key = (atom, place, self.guard)
        found = self.memo.get(key)
        if found is None:
            eqn = self.maker(atom)
            found = self.loaded(atom, place) if eqn is None else self.computed(eqn, atom, place)
            self.memo[key] = found
        return found

    def loaded(self, v: Var, place: Place) -> Value:
        """An element of what is in memory."""
        buffer = self.inputs.get(v)
        if buffer is None:
            dtype = held_as(v.aval.dtype)
            buffer = self.inputs[v] = Buffer(self.names.of(v, None), dtype, v.aval.size, note=type_text(v))
        index = flat(place, v.aval.shape)
        key = (buffer, index, self.guard)
        if key not in self.memo:
            self.memo[key] = load(buffer, index, self.guard)
        return self.memo[key]

    def computed(self, eqn: Eqn, v: Var, place: Place) -> Value:
        """An element of what an equation computes."""
        if v in self.totals:
            return self.at_total(v)
        if moves(eqn):
            return self.at(eqn.invars[0], source_of(eqn, place))
        prim = eqn.prim
        if prim in REDUCES:
            return self.folded(eqn, place)
        if prim in _RULES:
            return _RULES[prim](self, eqn, place)
        if prim in RANDOM:
            return RANDOM[prim](eqn, place, self.at)
        if prim in POINTS:
            return self.control.at(eqn, place, self.guard, self.at)
        assert isinstance(prim, Elementwise) or prim is add_any_p, prim
        args = [self.at(a, place if a.aval.ndim else ()) for a in eqn.invars]
        if prim is convert_p and args[0].dtype == v.aval.dtype:
            return args[0]
        return apply(add_p if prim is add_any_p else prim, args, eqn.params, held_as(v.aval.dtype))

    def guarded(self, condition: Value | None, make: Callable[[], Value]) -> Value:
        """What ``make`` returns, reading memory only where a condition holds."""
        if condition is None:
            return make()
        before = self.guard
        self.guard = both(before, condition)
        try:
            return make()
        finally:
            self.guard = before

    def at_total(self, v: Var) -> Value:
        """A reduction that lanes have done, as a value of its variable's dtype."""
        key = (v, "total")
        if key not in self.memo:
            self.memo[key] = converted(read(self.totals[v][0]), v.aval.dtype)
        return self.memo[key]

    def folded(self, eqn: Eqn, place: Place) -> Value:
        """A reduction done by one lane alone, in order: where it fits no frame."""
        x, op = eqn.invars[0], REDUCES[eqn.prim]
        axes = sorted(eqn.params["axes"])
        shape = x.aval.shape
        over = Range(f"j{len(self.memo)}", math.prod([shape[d] for d in axes]))
        inner = iter(unflat(of(over), [shape[d] for d in axes]))
        outer = iter(place)
        at = tuple(next(inner) if d in axes else next(outer) for d in range(len(shape)))
        value = self.at(x, at)
        return converted(
            fold(op, over, converted(value, _wide(eqn.outvars[0].aval.dtype, op))), eqn.outvars[0].aval.dtype
        )

    def reduced(self, eqn: Eqn, element: Place) -> tuple[Value, np.dtype, str]:
        """What a reduction takes up at an element, in the dtype in which it adds up."""
        op = REDUCES[eqn.prim]
        value = self.at(eqn.invars[0], element)
        dtype = value.dtype if op.startswith("arg") else _wide(eqn.outvars[0].aval.dtype, op)
        return converted(value, dtype), dtype, op

    # -- kernels without reductions ------------------------------------------------------------

    def pointwise(self) -> Launch:
        """One value at each point."""
        shape = self.shape()
        sizes = [n for n in shape if n > 1] or [1]
        if len(sizes) > 1:
            if not self.reorders():
                sizes = [math.prod(sizes)]
            else:
                sizes = self.joined(sizes)
        return self.pointwise_over(sizes)

    def reorders(self) -> bool:
        """Whether some operand is not read in the very order in which points are numbered."""
        if not self.region.eqns:
            return True
        size = self.region.frame.size
        for e in self.region.eqns:
            if not (isinstance(e.prim, Elementwise) or e.prim is add_any_p):
                return True
            for a in e.invars:
                if a in self.virtual and a.aval.size > 1:
                    return True
                if a.aval.size not in (1, size):
                    return True
        return False

    def shape(self) -> tuple[int, ...]:
        """The shape with most axes among those of the values at points."""
        shapes = [v.aval.shape for v, role in self.region.roles.items() if role == "element"]
        return max(shapes or [self.region.outputs[0].aval.shape], key=len)

    def points(self, sizes: Sequence[int]) -> tuple[list[Range], Index]:
        ranges = [Range(f"i{d}" if len(sizes) > 1 else "i", n) for d, n in enumerate(sizes)]
        return ranges, flat([of(r) for r in ranges], sizes)

    def pointwise_over(self, sizes: Sequence[int]) -> Launch:
        """The kernel with the given ranges for its grid."""
        self.start()
        ranges, position = self.points(sizes)
        for e in self.region.eqns:
            self.at(e.outvars[0], unflat(position, e.outvars[0].aval.shape))
        body = [
            Store(b, flat(place, v.aval.shape), self.at(v, place))
            for v, b in self.outputs.items()
            for place in [unflat(position, v.aval.shape)]
        ]
        return self.launch(ranges, body)

    def joined(self, sizes: list[int]) -> list[int]:
        """``sizes`` with neighbours joined wherever every access steps through both as through one."""
        launch = self.pointwise_over(sizes)
        ranges = launch.kernel.grid
        indices = [i for v in post_order(launch.kernel.roots()) for i in v.indices()]
        indices += [s.index for s in launch.kernel.body]
        out = [sizes[0]]
        for a, b, n in zip(ranges, ranges[1:], sizes[1:], strict=False):
            if all(_as_one(i, a, b, n) for i in indices):
                out[-1] *= n
            else:
                out.append(n)
        return out

    # -- kernels with rows ---------------------------------------------------------------------

    def in_rows(self) -> list[Launch]:
        """Rows of lanes, with reductions over lanes, over rows, or both."""
        frame, region = self.region.frame, self.region
        assert frame.lanes
        column_outs = [v for v, role in region.roles.items() if role == "column"]
        k = Range("k", frame.lanes)
        if not column_outs:
            r = Range("r", frame.rows)
            return [self.launch([r], self.row_body(of(r), k))]
        outer = frame.outer or 1
        rows = frame.rows // outer
        chunks, tiles, width = self.target.chunks(rows, frame.lanes), 1, frame.lanes
        interleaved = self.target.interleaved
        if all(role != "row" for role in region.roles.values()):
            interleaved = False
            tile, wide = self.target.tile, self.target.wide_tile
            if wide is not None and len(column_outs) < len(self.outputs):
                tile = wide(frame.rows * frame.lanes)
            width = _divisor(frame.lanes, tile)
            tiles = frame.lanes // width
            if self.target.tile_chunks is not None and tile == self.target.tile:
                chunks = self.target.tile_chunks(rows, outer * tiles)
        chunks = max(1, min(rows, chunks))
        per = -(-rows // chunks)
        chunks = chunks if interleaved else -(-rows // per)
        a, g, j = Range("a", outer), Range("g", chunks), Range("j", per)
        t, k = Range("t", tiles), Range("k", width)
        column = of(t) * width + of(k)
        row_in_outer = of(j) * chunks + of(g) if interleaved else of(g) * per + of(j)
        row = of(a) * rows + row_in_outer
        body = self.row_body(row, k, column)
        keeps = {
            v: Keep(f"{self.names.of(v, self.maker(v))}_sum", dtype, k, op)
            for v, (op, dtype, _) in self.columns.items()
        }
        inner = self.with_columns(body, keeps, k)
        whole: list[Any] = [Rows(j, tuple(inner), row_in_outer, rows)]
        grid = [x for x in (a, g, t) if x.extent > 1] or [g]
        results = tuple(
            Store(self.outputs[v], of(a) * frame.lanes + column, converted(read(keep), self.outputs[v].dtype))
            for v, keep in keeps.items()
        )
        if chunks == 1:
            return [self.launch(grid, [*whole, Lanes(k, results)])]
        scratch: dict[Var, tuple[Buffer, Scratch]] = {}
        stores, sums, q = [], [], Range("q", chunks)
        for v, keep in keeps.items():
            part = Scratch(keep.dtype, outer * chunks * frame.lanes)
            buffer = Buffer(f"{self.outputs[v].name}_parts", part.dtype, part.size, True)
            scratch[v] = (buffer, part)
            place = lambda chunk: (of(a) * chunks + of(chunk)) * frame.lanes + column
            stores.append(Store(buffer, place(g), read(keep)))
            sums.append(Accumulate(keep, load(buffer, place(q))))
        whole.append(Lanes(k, tuple(stores), "the sums of this chunk of rows"))
        found = chunks * width * sum(keep.dtype.itemsize for keep in keeps.values())
        if found <= self.target.finish_bytes and not self.parts:
            finish = [Rows(q, (Lanes(k, tuple(sums)),), of(q), chunks), Lanes(k, results, "the sums of all")]
            over = [x for x in (a, t) if x.extent > 1]
            return [self.launch(grid, whole, dict(scratch.values()), finish, over)]
        finished = {v: self.outputs.pop(v) for v in scratch}
        first = self.launch(grid, whole, dict(scratch.values()))
        return [first, self.finish_columns(finished, scratch, outer, chunks, frame.lanes)]

    def with_columns(self, body: list[Any], keeps: dict[Var, Keep], k: Range) -> list[Any]:
        """Put the sums over rows into the first loop that knows their summands."""
        level = Levels(body)
        loops = [i for i, s in enumerate(body) if isinstance(s, Lanes)]
        added: dict[int, list[Any]] = {}
        for v, (_, _, value) in self.columns.items():
            at = level.of(value)
            added.setdefault(at, []).append(Accumulate(keeps[v], value))
        out = list(body)
        for at, statements in added.items():
            if at < len(loops):
                loop = out[loops[at]]
                out[loops[at]] = Lanes(loop.range, (*loop.body, *statements), loop.note)
            else:
                out.append(Lanes(k, tuple(statements)))
        return self.kept(out)

    def finish_columns(self, outputs, scratch, outer: int, chunks: int, lanes: int) -> Launch:
        """Add up what the chunks found, in order."""
        self.start()
        i, g = Range("i", outer * lanes), Range("g", chunks)
        a, column = of(i) // lanes, of(i) % lanes
        body, operands = [], {}
        for v, (buffer, part) in scratch.items():
            op = REDUCES[self.producers[v].prim]
            source_buffer = Buffer(buffer.name, buffer.dtype, buffer.size)
            operands[source_buffer] = part
            value = fold(op, g, load(source_buffer, (a * chunks + of(g)) * lanes + column))
            body.append(Store(outputs[v], of(i), converted(value, outputs[v].dtype)))
        operands.update((outputs[v], v) for v in scratch)
        name = f"{self.name()}_finish"
        kernel = Kernel(
            name, tuple(operands), (i,), tuple(body), ("adds up the chunks of the kernel before",)
        )
        return Launch(kernel, operands)

    def row_body(self, row: Index, k: Range, column: Index | None = None) -> list[Any]:
        """The statements for one row: loops over its lanes, one for each generation of reductions, and its stores."""
        self.start()
        frame, region = self.region.frame, self.region
        lanes = frame.lanes
        assert lanes
        position = row * lanes + (of(k) if column is None else column)
        reduces: list[tuple[Total, Value, Index | None]] = []
        for e in region.eqns:
            v = e.outvars[0]
            role = region.roles[v]
            if e.prim in REDUCES and role in ("row", "column"):
                value, dtype, op = self.reduced(e, unflat(position, e.invars[0].aval.shape))
                if role == "column":
                    self.columns[v] = (op, dtype, value)
                    continue
                positional = op.startswith("arg")
                apart = root_apart(value, k) if op == "sum" else None
                value = value if apart is None else apart[0]
                total = Total(self.names.of(v, e), dtype, op, v.aval.dtype if positional else None)
                self.totals[v] = (total, value, of(k) if positional else None)
                reduces.append(self.totals[v])
                if apart is not None:
                    product = apply(mul_p, (read(total), apart[1]), {}, dtype)
                    self.memo[v, "total"] = converted(product, v.aval.dtype)
            elif role == "row" and e.prim is gather_p and self.picks(e, row):
                self.pick(e, row, of(k) if column is None else column, position, reduces)
            elif role != "total":
                self.at(v, unflat(position if role == "element" else row, v.aval.shape))
        lane_stores, row_stores = [], []
        for e in region.eqns:
            v = e.outvars[0]
            if region.roles[v] == "total":
                value, dtype, _ = self.reduced(e, unflat(row, e.invars[0].aval.shape))
                row_stores.append(Store(self.part(v, dtype, frame.rows), row, value))
        for v, b in self.outputs.items():
            role = region.roles.get(v)
            if v in region.numbers:
                if not self.parts:  # one row: its end is the end
                    row_stores.append(Store(b, ZERO, self.at(v, (ZERO,) * v.aval.ndim)))
            elif role == "element":
                place = unflat(position, v.aval.shape)
                lane_stores.append(Store(b, flat(place, v.aval.shape), self.at(v, place)))
            elif role == "row":
                place = unflat(row, v.aval.shape)
                row_stores.append(Store(b, flat(place, v.aval.shape), self.at(v, place)))
        body = in_generations(reduces, lane_stores, row_stores, k)
        return body if self.columns else self.kept(body)

    def picks(self, gather: Eqn, row: Index) -> bool:
        """Whether a gather of one number for each row takes it from what the row's lanes read anyway."""
        x, frame = gather.invars[0], self.region.frame
        if x in self.region.roles:
            return True
        elements = [e for e in self.region.eqns if e is not gather and x in e.invars]
        if not any(e.outvars[0].aval.size == x.aval.size or e.prim in REDUCES for e in elements):
            return False
        found, _ = _placed(self, gather, unflat(row, gather.outvars[0].aval.shape))
        assert frame.lanes
        return x.aval.size == frame.size and flat(found, x.aval.shape) // frame.lanes == row

    def pick(self, gather: Eqn, row: Index, column: Index, position: Index, reduces: list) -> None:
        """Let the lane that has the number of a gather bring it, as a sum to which the others add nothing.

        So every element is read by its own lane only, and what is computed may be written over what is read.
        """
        x, v = gather.invars[0].aval, gather.outvars[0]
        lanes = self.region.frame.lanes
        assert lanes
        found, inside = _placed(self, gather, unflat(row, v.aval.shape))
        chosen = flat(found, x.shape) - row * lanes
        hit = within(column - chosen, 0, 1)
        value = self.at(gather.invars[0], unflat(position, x.shape))
        if hit is not None:
            value = choose(hit, value, const(0, value.dtype), value.dtype)
        total = Total(self.names.of(v, gather), value.dtype, "or" if dtypes.is_bool(value.dtype) else "sum")
        self.totals[v] = (total, value, None)
        reduces.append(self.totals[v])
        if inside is not None:
            fill = gather_fill(x.dtype, gather.params["fill_value"])
            self.memo[v, "total"] = choose(inside, read(total), const(fill, value.dtype), value.dtype)

    # -- reductions of everything --------------------------------------------------------------

    def in_total(self) -> list[Launch]:
        """Every chunk of points adds up its own; when all have, the chunks are added up."""
        size = self.region.frame.size
        chunks = max(1, min(size, self.target.total_chunks(size)))
        per = -(-size // chunks)
        chunks = -(-size // per)
        g, k = Range("g", chunks), Range("k", per)
        self.start()
        position = of(g) * per + of(k)
        inside = within(position, 0, size)
        self.guard = inside
        reduces, part_stores = [], []
        for e in self.region.eqns:
            v = e.outvars[0]
            if self.region.roles[v] != "total":
                self.at(v, unflat(position, v.aval.shape))
                continue
            value, dtype, op = self.reduced(e, unflat(position, e.invars[0].aval.shape))
            if inside is not None:
                value = choose(inside, value, const(identity(op, dtype), dtype), dtype)
            total = Total(f"{self.names.of(v, e)}_part", dtype, op)
            reduces.append((total, value, None))
            part_stores.append(Store(self.part(v, dtype, chunks), of(g), read(total)))
        stores = []
        for v, b in self.outputs.items():
            if self.region.roles.get(v) == "element":
                place = unflat(position, v.aval.shape)
                stores.append(Store(b, flat(place, v.aval.shape), self.at(v, place), inside))
        return [self.launch([g], in_generations(reduces, stores, part_stores, k))]

    def part(self, v: Var, dtype: np.dtype, count: int) -> Buffer:
        """Memory for what is added up at the end to ``v``."""
        scratch = Scratch(dtype, count)
        buffer = Buffer(f"{self.names.of(v, self.maker(v))}_parts", dtype, count, True)
        self.parts[v] = (buffer, scratch)
        return buffer

    def at_the_end(self) -> list[Any]:
        """What is done when all points are: totals are added up, in order, and what is computed of them is stored."""
        self.guard = None
        loops: dict[int, list[Any]] = {}
        for v, (buffer, _) in self.parts.items():
            e = self.producers[v]
            total = Total(self.names.of(v, e), buffer.dtype, REDUCES[e.prim])
            self.totals[v] = (total, read(total), None)
            loops.setdefault(buffer.size, []).append((total, buffer))
        body: list[Any] = []
        for count, totals in loops.items():
            q = Range("q", count)
            body.append(Lanes(q, tuple(Reduce(t, load(b, of(q))) for t, b in totals)))
        for v, b in self.outputs.items():
            if v in self.parts or v in self.region.numbers:
                body.append(Store(b, ZERO, self.at(v, (ZERO,) * v.aval.ndim)))
        return body

    # -- what a row keeps ----------------------------------------------------------------------

    def kept(self, body: list[Any]) -> list[Any]:
        """Let loops keep for later loops of the row what these would have to compute, or read, again."""
        loops = [s for s in body if isinstance(s, Lanes)]
        if len(loops) < 2:
            return body
        k = loops[0].range
        wanted = shared_between(loops, k, self.worth)
        total = sum(k.extent * v.dtype.itemsize for v in wanted)
        if not wanted or total > self.target.keep_bytes:
            return body
        keeps = {v: Keep(f"{self.keep_name(v)}_{n}", v.dtype, k) for n, v in enumerate(wanted)}
        return with_keeps(body, keeps)

    def keep_name(self, v: Value) -> str:
        op = v.attr[0] if v.op == "fold" else v.attr[0].name if v.op in ("apply", "load") else v.op
        return f"{op}_kept"

    def worth(self, v: Value) -> bool:
        """Whether a value is better kept than computed again."""
        if v.op == "load":
            return self.target.keep_loads
        if v.op not in ("apply", "fold", "bits", "result"):
            return False
        cost = 0
        for x in post_order([v], outside):
            if x.op in ("fold", "bits", "result"):
                return True
            if x.op == "apply":
                cost += scalars.cost(x.attr[0])
        return cost >= _KEEP_COST

    # -- putting it together -------------------------------------------------------------------

    def launch(
        self,
        grid: Sequence[Range],
        body: Sequence[Any],
        more: dict[Buffer, Any] | None = None,
        finish: Sequence[Any] = (),
        over: Sequence[Range] = (),
    ) -> Launch:
        """A kernel; where there are parts of totals, its finish adds them up."""
        finish = self.at_the_end() if self.parts else finish
        used = {v.attr[0] for v in post_order([*roots_of(body), *roots_of(finish)]) if v.op == "load"}
        operands: dict[Buffer, Any] = {b: v for v, b in self.inputs.items() if b in used}
        operands.update((b, v) for v, b in self.outputs.items())
        operands.update(self.parts.values())
        operands.update(more or {})
        buffers = tuple(operands)
        name, notes = self.name(), self.notes()
        kernel = Kernel(name, buffers, tuple(grid), tuple(body), notes, tuple(finish), tuple(over))
        return Launch(kernel, operands)

    def name(self) -> str:
        """A name for people: the user's function, and the operations that are not everywhere."""
        eqns = self.region.eqns or [self.virtual[v] for v in self.region.outputs]
        functions = [source.function_of(e.source) for e in eqns if e.source is not None]
        where = re.sub(r"\W", "", functions[-1]).strip("_") if functions else ""
        telling = [e.prim.name for e in eqns if e.prim in REDUCES or scalars.cost(e.prim) > 1]
        telling = list(dict.fromkeys(telling))[:3] or [eqns[-1].prim.name]
        return re.sub(r"\W", "_", "_".join([where, *telling] if where else telling))

    def notes(self) -> tuple[str, ...]:
        """The equations, with the user's lines."""
        lines = []
        for e in self.region.eqns or [self.virtual[v] for v in self.region.outputs]:
            ins = " ".join(self.names.text(a, self.maker) for a in e.invars)
            out = e.outvars[0]
            lines.append(
                f"{self.names.of(out, e)}: {type_text(out)} = {e.prim.name} {ins}  # at {source.summary(e.source)}"
            )
        return tuple(lines)


# -- reading at other elements -----------------------------------------------------------------------


def _iota(low: Lowering, eqn: Eqn, place: Place) -> Value:
    dtype = eqn.outvars[0].aval.dtype
    return number(place[eqn.params["dimension"]], dtype)


def _concatenate(low: Lowering, eqn: Eqn, place: Place) -> Value:
    d, dtype = eqn.params["dimension"], held_as(eqn.outvars[0].aval.dtype)
    offset, cases = 0, []
    for x in eqn.invars:
        n = x.aval.shape[d]
        condition = within(place[d], offset, offset + n)
        at = (*place[:d], place[d] - offset, *place[d + 1 :])
        cases.append((condition, x, at))
        offset += n
    value: Value | None = None
    for condition, x, at in reversed(cases):
        mine = low.guarded(condition, functools.partial(low.at, x, at))
        value = mine if condition is None or value is None else choose(condition, mine, value, dtype)
    assert value is not None
    return value


def _pad(low: Lowering, eqn: Eqn, place: Place) -> Value:
    x, padding = eqn.invars
    condition: Value | None = None
    at = []
    # outside, indices may be anything: the guard keeps them from being used
    for i, n, (lo, _, interior) in zip(place, x.aval.shape, eqn.params["padding_config"], strict=True):
        step = interior + 1
        offset = i - lo
        condition = both(condition, within(offset, 0, (n - 1) * step + 1))
        if step > 1:
            condition = both(condition, within(offset % step, 0, 1))
        at.append(offset // step)
    value = low.guarded(condition, lambda: low.at(x, tuple(at)))
    if condition is None:
        return value
    return choose(condition, value, low.at(padding, ()), value.dtype)


def _start(low: Lowering, value: Value, most: int) -> tuple[Index, Value]:
    """A start that the program computed, clamped to 0 ... most, as an index; and itself, wide enough to compare."""
    wide = np.dtype(np.int32)
    if value.dtype.itemsize == 8 or value.dtype == np.uint32 or most + 1 >= 1 << 31:
        wide = np.dtype(np.int64)
    if value.dtype.itemsize == 8:  # no number beyond those that indices may be: positions are added to it
        low = 0 if dtypes.is_unsigned(value.dtype) else -UNBOUNDED
        bounds = const(low, value.dtype), const(UNBOUNDED, value.dtype)
        value = apply(clamp_p, (bounds[0], value, bounds[1]), {}, value.dtype)
    value = converted(value, wide)
    clamped = apply(clamp_p, (const(0, wide), value, const(most, wide)), {}, wide)
    return of(Computed(clamped, 0, most)), value


def _start_or_none(value: Value, most: int) -> Index:
    """A start that ``_start`` has made wide, where it is one of 0 ... most; else a number outside of them."""
    clamped = apply(clamp_p, (const(-1, value.dtype), value, const(most + 1, value.dtype)), {}, value.dtype)
    return of(Computed(clamped, -1, most + 1))


def _dynamic_slice(low: Lowering, eqn: Eqn, place: Place) -> Value:
    x, *starts = eqn.invars
    at = []
    for i, s, n, m in zip(place, starts, x.aval.shape, eqn.params["slice_sizes"], strict=True):
        at.append(i if n == m else i + _start(low, low.at(s, ()), n - m)[0])
    return low.at(x, tuple(at))


def _dynamic_update_slice(low: Lowering, eqn: Eqn, place: Place) -> Value:
    x, update, *starts = eqn.invars
    condition: Value | None = None
    at = []
    for i, s, n, m in zip(place, starts, x.aval.shape, update.aval.shape, strict=True):
        if n == m:
            at.append(i)
            continue
        offset = i - _start(low, low.at(s, ()), n - m)[0]
        condition = both(condition, within(offset, 0, m))
        at.append(offset)
    value = low.guarded(condition, lambda: low.at(update, tuple(at)))
    if condition is None:
        return value
    return choose(condition, value, low.at(x, place), value.dtype)


def _placed(low: Lowering, eqn: Eqn, place: Place) -> tuple[Place, Value | None]:
    """Where a gather finds an element of its result, and whether that is inside of the operand, if it asks."""
    x, indices = eqn.invars
    inside: Value | None = None
    fills = eqn.params["mode"] is GatherScatterMode.FILL_OR_DROP

    def start(batch: Place, c: int, axis: int) -> Index:
        nonlocal inside
        most = x.aval.shape[axis] - eqn.params["slice_sizes"][axis]
        index, value = _start(low, low.at(indices, (*batch, fixed(c))), most)
        if fills:
            inside = both(inside, within(_start_or_none(value, most), 0, most + 1))
        return index

    return gathered(eqn, place, start), inside


def _gather(low: Lowering, eqn: Eqn, place: Place) -> Value:
    x = eqn.invars[0]
    at, inside = _placed(low, eqn, place)
    result = low.guarded(inside, lambda: low.at(x, at))
    if inside is None:
        return result
    fill = gather_fill(x.aval.dtype, eqn.params["fill_value"])
    return choose(inside, result, const(held(fill, x.aval.dtype), result.dtype), result.dtype)


def _one_hot_add(low: Lowering, eqn: Eqn, place: Place) -> Value:
    x, indices, updates = eqn.invars
    axis = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims[0]
    batch = one_hot_batch(eqn, place)
    start = low.at(indices, (*batch, ZERO))
    most = x.aval.shape[axis] - 1
    index, wide = _start(low, start, most)
    if eqn.params["mode"] is not GatherScatterMode.CLIP:
        index = _start_or_none(wide, most)
    hit = within(place[axis] - index, 0, 1)
    assert hit is not None
    dtype = x.aval.dtype
    added = choose(hit, low.at(updates, batch), const(0, dtype), dtype)
    return apply(add_p, (low.at(x, place), added), {}, dtype)


_RULES: dict[Any, Callable[[Lowering, Eqn, Place], Value]] = {
    iota_p: _iota,
    concatenate_p: _concatenate,
    pad_p: _pad,
    dynamic_slice_p: _dynamic_slice,
    dynamic_update_slice_p: _dynamic_update_slice,
    gather_p: _gather,
    scatter_add_p: _one_hot_add,
}


def both(a: Value | None, b: Value | None) -> Value | None:
    """The conjunction; None is true."""
    if a is None or b is None:
        return b if a is None else a
    return apply(and_p, (a, b), {}, dtypes.bool_)


def choose(condition: Value, yes: Value, no: Value, dtype: np.dtype) -> Value:
    """One of two values."""
    return apply(select_p, (condition, yes, no), {}, dtype)


def converted(value: Value, dtype: np.dtype) -> Value:
    """A value in another dtype."""
    return value if value.dtype == dtype else apply(convert_p, (value,), {"dtype": dtype}, dtype)


def _wide(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype in which a reduction adds up."""
    if op in ("sum", "prod") and dtype.itemsize <= 2 and dtypes.is_floating(dtype):
        return np.dtype(np.float32)
    return dtype


# -- sizes -------------------------------------------------------------------------------------------


def _as_one(index: Index, a: Range, b: Range, n: int) -> bool:
    """Whether an index steps through the ranges a and b (of n) as through one."""
    if a.extent == 1 or b.extent == 1:
        return a not in ranges_of(index) and b not in ranges_of(index)
    ca, cb = index.coefficient(a), index.coefficient(b)
    return ca is not None and cb is not None and ca == cb * n


def _divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` that is no more than ``most``; ``n`` itself if that is small."""
    if n <= most:
        return n
    best = max(d for d in range(1, most + 1) if n % d == 0)
    return best if best * 8 >= most else n
