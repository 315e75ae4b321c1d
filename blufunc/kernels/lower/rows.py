"""Kernels with rows: points are rows of lanes, reduced over lanes and rows.

Kernels, stage 6, called by ``region.py``. In: a region whose frame has lanes. Out: one launch, or two if a reduction
over rows is cut in chunks whose partial results are too large for the kernel's finish. A row has one loop over lanes
for each generation of reductions; what later loops would recompute is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Var
from blufunc.core.ops.elementwise import mul_p, rsqrt_p, square_p
from blufunc.core.ops.gather_scatter import gather_fill, gather_p
from blufunc.kernels.fusion.iteration_space import reduces, scans
from blufunc.kernels.loopir.index import ZERO, Index, Range, flat, of, unflat
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Replacement,
    Rows,
    Scan,
    Set,
    Store,
    Total,
    Value,
    apply,
    choose,
    const,
    converted,
    dependencies,
    fold,
    load,
    or_identity,
    outside,
    post_order,
    read,
    values_of,
    within,
)
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.lower.indexed_reads import placed
from blufunc.kernels.lower.scans import scanned_chunks, scanned_rows
from blufunc.kernels.lower.values import Lowering
from blufunc.kernels.target import Target


def in_rows(low: Lowering) -> list[Launch]:
    """Launches of a region with rows."""
    frame, region = low.region.frame, low.region
    assert frame.lanes
    column_outs = [v for v, role in region.roles.items() if role == "column"]
    k = Range("k", frame.lanes)
    if frame.order in ("down", "up"):
        return [scanned_rows(low, _divisor(frame.lanes, low.target.scan_tile))]
    if frame.order == "chunks":
        return scanned_chunks(low)
    if not column_outs:
        r = Range("r", frame.rows)
        return [low.launch([r], row_body(low, of(r), k))]
    outer = frame.outer or 1
    rows = frame.rows // outer
    cut = _cut_rows(low, rows, outer, len(column_outs))
    loops = _in_chunks(low, rows, outer, cut)
    if frame.order is not None and low.target.crowding is not None:
        times = low.target.crowding(frame.lanes, _values_kept(loops))
        if times > 1:
            cut = cut._replace(chunks=min(rows, cut.chunks * times))
            loops = _in_chunks(low, rows, outer, cut)
    chunks, width = cut.chunks, cut.width
    a, g, t, k, column, keeps = loops.outer, loops.chunk, loops.tile, loops.lane, loops.column, loops.keeps
    whole: list[Any] = [loops.rows]
    grid = [x for x in (a, g, t) if x.extent > 1] or [g]
    results = tuple(
        Store(low.outputs[v], of(a) * frame.lanes + column, converted(read(keep), low.outputs[v].dtype))
        for v, keep in keeps.items()
    )
    if chunks == 1:
        return [low.launch(grid, [*whole, Lanes(k, results)])]
    scratch: dict[Var, tuple[Buffer, Scratch]] = {}
    stores, sums, q = [], [], Range("q", chunks)
    for v, keep in keeps.items():
        part = Scratch(keep.dtype, outer * chunks * frame.lanes)
        buffer = Buffer(f"{low.outputs[v].name}_parts", part.dtype, part.size, True)
        scratch[v] = (buffer, part)
        place = lambda chunk: (of(a) * chunks + of(chunk)) * frame.lanes + column
        stores.append(Store(buffer, place(g), read(keep)))
        sums.append(Accumulate(keep, load(buffer, place(q))))
    whole.append(Lanes(k, tuple(stores), "the sums of this chunk of rows"))
    found = chunks * width * sum(keep.dtype.itemsize for keep in keeps.values())
    if found <= low.target.finish_bytes and not low.parts:
        finish = [Rows(q, (Lanes(k, tuple(sums)),), of(q), chunks), Lanes(k, results, "the sums of all")]
        over = [x for x in (a, t) if x.extent > 1]
        return [low.launch(grid, whole, dict(scratch.values()), finish, over)]
    finished = {v: low.outputs.pop(v) for v in scratch}
    first = low.launch(grid, whole, dict(scratch.values()))
    return [first, finish_columns(low, finished, scratch, outer, chunks, frame.lanes)]


class _Cut(NamedTuple):
    """The partition of rows among points.

    Attributes:
      chunks: number of chunks of rows.
      width: columns of a tile.
      interleaved: whether the rows of a chunk are strided, not contiguous.
    """

    chunks: int
    width: int
    interleaved: bool


class _Chunks(NamedTuple):
    """The loops over a chunk of rows.

    Attributes:
      rows: the loop over the rows of the chunk.
      outer, chunk, tile: the grid's ranges.
      lane: the range of lanes in the tile.
      column: the column of a lane.
      keeps: the accumulators of the columns.
    """

    rows: Rows
    outer: Range
    chunk: Range
    tile: Range
    lane: Range
    column: Index
    keeps: dict[Var, Keep]


def _in_chunks(low: Lowering, rows: int, outer: int, cut: _Cut) -> _Chunks:
    """The loops over the rows of a chunk, and over their lanes."""
    lanes = low.region.frame.lanes
    assert lanes
    per = -(-rows // cut.chunks)
    a, g, j = Range("a", outer), Range("g", cut.chunks), Range("j", per)
    t, k = Range("t", lanes // cut.width), Range("k", cut.width)
    column = of(t) * cut.width + of(k)
    row_in_outer = of(j) * cut.chunks + of(g) if cut.interleaved else of(g) * per + of(j)
    body = row_body(low, of(a) * rows + row_in_outer, k, column)
    keeps = {
        v: Keep(f"{low.names.of(v, low.maker(v))}_sum", dtype, k, op)
        for v, (op, dtype, _) in low.columns.items()
    }
    inner = with_columns(low, body, keeps, k)
    return _Chunks(Rows(j, tuple(inner), row_in_outer, rows), a, g, t, k, column, keeps)


def _values_kept(loops: _Chunks) -> int:
    """The number of values per lane kept from row to row, and from loop to loop."""
    sets = [s.value for loop in loops.rows.body for s in getattr(loop, "body", ()) if isinstance(s, Set)]
    own = [v for v in sets if v.op != "load" or v.ranges() != {loops.lane}]  # others are reloaded
    return len(own) + len(loops.keeps)


def _cut_rows(low: Lowering, rows: int, outer: int, columns: int) -> _Cut:
    """The partition of the rows of a region.

    Args:
      low: the region.
      rows: of each of ``outer``.
      outer: number of row groups.
      columns: number of results that are reductions over rows.
    """
    frame, target = low.region.frame, low.target
    assert frame.lanes
    chunks, width, interleaved = target.chunks(rows, frame.lanes), frame.lanes, target.interleaved
    if frame.order is None:  # rows may be split
        interleaved, tile = False, target.tile
        if target.wide_tile is not None and columns < len(low.outputs):
            tile = target.wide_tile(frame.rows * frame.lanes)
        width = _divisor(frame.lanes, tile)
        if target.tile_chunks is not None and tile == target.tile:
            chunks = target.tile_chunks(rows, outer * (frame.lanes // width))
    chunks = max(1, min(rows, chunks))
    per = -(-rows // chunks)
    return _Cut(chunks if interleaved else -(-rows // per), width, interleaved)


def with_columns(low: Lowering, body: list[Any], keeps: dict[Var, Keep], k: Range) -> list[Any]:
    """Accumulate each column in the first loop in which its operand is available."""
    level = Levels(body)
    loops = [i for i, s in enumerate(body) if isinstance(s, Lanes)]
    added: dict[int, list[Any]] = {}
    for v, (_, _, value) in low.columns.items():
        at = level.of(value)
        added.setdefault(at, []).append(Accumulate(keeps[v], value))
    out = list(body)
    for at, statements in added.items():
        if at < len(loops):
            loop = out[loops[at]]
            out[loops[at]] = Lanes(loop.range, (*loop.body, *statements), loop.note)
        else:
            out.append(Lanes(k, tuple(statements)))
    return kept(low, out)


def finish_columns(low: Lowering, outputs, scratch, outer: int, chunks: int, lanes: int) -> Launch:
    """The launch that reduces the chunks' partial results, in order."""
    low.start()
    i, g = Range("i", outer * lanes), Range("g", chunks)
    a, column = of(i) // lanes, of(i) % lanes
    body, operands = [], {}
    for v, (buffer, part) in scratch.items():
        op = low.producers[v].prim.monoid
        source_buffer = Buffer(buffer.name, buffer.dtype, buffer.size)
        operands[source_buffer] = part
        value = fold(op, g, load(source_buffer, (a * chunks + of(g)) * lanes + column))
        body.append(Store(outputs[v], of(i), converted(value, outputs[v].dtype)))
    operands.update((outputs[v], v) for v in scratch)
    name = f"{low.name()}_finish"
    kernel = Kernel(name, tuple(operands), (i,), tuple(body), ("adds up the chunks of the kernel before",))
    return Launch(kernel, operands)


# -- the loops of a row -----------------------------------------------------------------------------


def row_body(low: Lowering, row: Index, k: Range, column: Index | None = None) -> list[Any]:
    """The statements of a row: a loop over lanes per generation of reductions."""
    low.start()
    frame, region = low.region.frame, low.region
    lanes = frame.lanes
    assert lanes
    position = row * lanes + (of(k) if column is None else column)
    meetings: list[Reduce | Scan] = []
    for e in region.eqns:
        v = e.outvars[0]
        role = region.roles[v]
        if reduces(e.prim) and role in ("row", "column"):
            value, dtype, op = low.reduced(e, unflat(position, e.invars[0].aval.shape))
            if role == "column":
                low.columns[v] = (op, dtype, value)
                continue
            positional = op.startswith("arg")
            summed = {m.total: m.value for m in meetings if isinstance(m, Reduce)}
            factored = factor_out_rsqrt(value, k, summed) if op == "sum" else None
            value = value if factored is None else factored[0]
            total = Total(low.names.of(v, e), dtype, op, v.aval.dtype if positional else None)
            low.totals[v] = total
            meetings.append(Reduce(total, value, of(k) if positional else None))
            if factored is not None:
                product = apply(mul_p, (read(total), factored[1]), {}, dtype)
                low.memo[v, "total"] = converted(product, v.aval.dtype)
        elif scans(e):
            value, dtype, op = low.reduced(e, unflat(position, v.aval.shape))
            prefix = Prefix(low.names.of(v, e), dtype, k, op, e.params["reverse"])
            low.scans[v] = position, converted(read(prefix), v.aval.dtype)
            meetings.append(Scan(prefix, value))
        elif role == "row" and e.prim is gather_p and picks(low, e, row):
            pick(low, e, row, of(k) if column is None else column, position, meetings)
        elif role != "total":
            low.at(v, unflat(position if role == "element" else row, v.aval.shape))
    body = in_generations(meetings, *_stores(low, row, position), k)
    return body if low.columns else kept(low, body)


def _stores(low: Lowering, row: Index, position: Index) -> tuple[list[Store], list[Store]]:
    """The stores of each lane of a row, and of the row; ``position`` is the element's."""
    region = low.region
    lane_stores, row_stores = [], []
    for e in region.eqns:
        v = e.outvars[0]
        if region.roles[v] == "total":
            value, dtype, _ = low.reduced(e, unflat(row, e.invars[0].aval.shape))
            row_stores.append(Store(low.part(v, dtype, region.frame.rows), row, value))
    for v, b in low.outputs.items():
        role = region.roles.get(v)
        if v in region.numbers:
            if not low.parts:  # one row: no finish follows
                row_stores.append(Store(b, ZERO, low.at(v, (ZERO,) * v.aval.ndim)))
        elif role == "element":
            place = unflat(position, v.aval.shape)
            lane_stores.append(Store(b, flat(place, v.aval.shape), low.at(v, place)))
        elif role == "row":
            place = unflat(row, v.aval.shape)
            row_stores.append(Store(b, flat(place, v.aval.shape), low.at(v, place)))
    return lane_stores, row_stores


def picks(low: Lowering, gather: Eqn, row: Index) -> bool:
    """True if a gather of a scalar per row reads what the row's lanes read anyway."""
    x, frame = gather.invars[0], low.region.frame
    if x in low.region.roles:
        return True
    elements = [e for e in low.region.eqns if e is not gather and x in e.invars]
    if not any(e.outvars[0].aval.size == x.aval.size or reduces(e.prim) for e in elements):
        return False
    found, _ = placed(low, gather, unflat(row, gather.outvars[0].aval.shape))
    assert frame.lanes
    return x.aval.size == frame.size and flat(found, x.aval.shape) // frame.lanes == row


def pick(
    low: Lowering, gather: Eqn, row: Index, column: Index, position: Index, meetings: list[Reduce | Scan]
) -> None:
    """Compute a gather of a scalar per row as a sum with one nonzero lane.

    Each element is then read by its own lane only, so that an output may alias the operand.
    """
    x, v = gather.invars[0].aval, gather.outvars[0]
    lanes = low.region.frame.lanes
    assert lanes
    found, inside = placed(low, gather, unflat(row, v.aval.shape))
    chosen = flat(found, x.shape) - row * lanes
    hit = within(column - chosen, 0, 1)
    value = low.at(gather.invars[0], unflat(position, x.shape))
    total = Total(low.names.of(v, gather), value.dtype, "or" if dtypes.is_bool(value.dtype) else "sum")
    low.totals[v] = total
    meetings.append(Reduce(total, or_identity(hit, value, total.op)))
    if inside is not None:
        fill = gather_fill(x.dtype, gather.params["fill_value"])
        low.memo[v, "total"] = choose(inside, read(total), const(fill, value.dtype))


def _divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``; ``n`` itself if that is small."""
    if n <= most:
        return n
    best = max(d for d in range(1, most + 1) if n % d == 0)
    return best if best * 8 >= most else n


class Levels:
    """The number of loops that must finish before each value can be computed."""

    def __init__(self, body: Sequence[Any]):
        self.of_cell: dict[Any, int] = {}
        loop = 0
        for s in body:
            if isinstance(s, Lanes):
                for x in s.body:
                    self.found_by(x, loop)
                loop += 1
        self.known: dict[Value, int] = {}

    def found_by(self, s: Any, loop: int) -> None:
        """Record a statement's cell: a total is known after its loop, a prefix in it."""
        if isinstance(s, Reduce):
            self.of_cell[s.total] = loop + 1
        elif isinstance(s, Scan):
            self.of_cell[s.prefix] = loop

    def of(self, value: Value) -> int:
        for v in post_order([value]):
            if v not in self.known:
                level = self.of_cell.get(v.attr, 0) if v.op == "read" else 0
                self.known[v] = max([level, *[self.known[d] for d in dependencies(v)]])
        return self.known[value]


def in_generations(
    meetings: Sequence[Reduce | Scan], lane_stores: Sequence[Store], row_stores: Sequence[Store], k: Range
) -> list[Any]:
    """Loops over lanes: reductions and scans after those they depend on, stores early.

    ``meetings``, the reductions and scans, are in dependency order.
    """
    level = Levels(())
    loops: list[list[Any]] = []
    for s in meetings:
        at = level.of(s.value)
        while isinstance(s, Scan) and at < len(loops) and not _takes(loops[at], s):
            at += 1
        while len(loops) <= at:
            loops.append([])
        loops[at].append(s)
        level.found_by(s, at)
        level.known = {}
    after: dict[int, list[Any]] = {}
    for s in lane_stores:
        at = level.of(s.value)
        while len(loops) <= at:
            loops.append([])
        loops[at].append(s)
    for s in row_stores:
        after.setdefault(max(level.of(s.value) - 1, 0), []).append(s)
    body: list[Any] = []
    for i, statements in enumerate(loops):
        # stores last: a store may overwrite the operand of a reduction of the loop
        body.append(Lanes(k, tuple(sorted(statements, key=lambda s: isinstance(s, Store)))))
        body.extend(after.get(i, ()))
    return body if loops else [*after.get(0, ())]


def _takes(loop: Sequence[Any], scan: Scan) -> bool:
    """True if a loop can do a scan too: one direction, no prefix read by another."""
    there = {s.prefix for s in loop if isinstance(s, Scan)}
    return all(p.reverse == scan.prefix.reverse for p in there) and there.isdisjoint(prefixes_of([scan]))


def prefixes_of(statements: Sequence[Any]) -> dict[Prefix, None]:
    """The prefixes that statements of a loop read."""
    values = post_order([v for s in statements for v in values_of(s)])
    return {v.attr: None for v in values if is_scanned(v)}


def with_scans(body: Sequence[Any]) -> list[Any]:
    """The loops, repeating earlier scans whose results they read, unless kept."""
    scans: dict[Prefix, Scan] = {}
    out: list[Any] = []
    for s in body:
        if isinstance(s, Lanes):
            mine = {x.prefix: x for x in s.body if isinstance(x, Scan)}
            repeated = [scans[p] for p in prefixes_of(s.body) if p not in mine]
            scans.update(mine)
            if repeated:
                s = _with_repeated(s, repeated)
        out.append(s)
    return out


def _with_repeated(s: Lanes, scans: Sequence[Scan]) -> Lanes:
    assert not any(prefixes_of([x]) for x in scans), "a scan that reads another scan is kept"
    new = {x.prefix: Scan(replace(x.prefix), x.value) for x in scans}
    values = post_order([v for x in s.body for v in values_of(x)])
    put = Replacement({v: read(new[v.attr].prefix) for v in values if v.op == "read" and v.attr in new}.get)
    return Lanes(s.range, (*new.values(), *[put.statement(x) for x in s.body]), s.note)


def factor_out_rsqrt(value: Value, k: Range, summed: Mapping[Total, Value]) -> tuple[Value, Value] | None:
    """A product as ``(rest, root)``, its rsqrt of a sum of squares factored out.

    The sum of the products is the sum of the rests times the root, and need not wait for the root: the gradient of a
    normalization has one generation of reductions less. One of the other factors must be what was squared, so that the
    rest is finite unless cotangents are near the largest float divided by that factor. None for other values, and if
    the rest would have to wait as long.

    Args:
      value: the product.
      k: the range of the lanes.
      summed: the operand of each total.
    """
    found = _factor_out_rsqrt(value, k)
    if found is None:
        return None
    rest, root = found
    factors = _factors(rest)
    waits = _totals_in(root) - _totals_in(rest)
    squares = [_square_root(summed[t]) for t in waits if t in summed]
    return found if any(s is f for s in squares if s is not None for f in factors) else None


def _factor_out_rsqrt(value: Value, k: Range) -> tuple[Value, Value] | None:
    if value.op != "apply" or value.attr[0] is not mul_p:
        return None
    for n, factor in enumerate(value.args):
        rest = value.args[1 - n]
        if factor.op == "apply" and factor.attr[0] is rsqrt_p and k not in factor.ranges():
            return rest, factor
    for n, factor in enumerate(value.args):
        found = _factor_out_rsqrt(factor, k)
        if found is not None:
            pair = (found[0], value.args[1]) if n == 0 else (value.args[0], found[0])
            return apply(mul_p, pair, {}, value.dtype), found[1]
    return None


def _factors(value: Value) -> list[Value]:
    """The product and its factors, nested ones included."""
    found, pending = [], [value]
    while pending:
        v = pending.pop()
        found.append(v)
        if v.op == "apply" and v.attr[0] is mul_p:
            pending.extend(v.args)
    return found


def _square_root(value: Value) -> Value | None:
    """The value whose square this is; None if it is no square."""
    if value.op != "apply" or value.attr[0] not in (square_p, mul_p):
        return None
    return value.args[0] if value.args[0] is value.args[-1] else None


def _totals_in(value: Value) -> set[Total]:
    return {v.attr for v in post_order([value]) if v.op == "read" and isinstance(v.attr, Total)}


def shared_between(loops: Sequence[Lanes], k: Range, worth: Callable[[Value], bool]) -> list[Value]:
    """Values that an earlier loop computed: the outermost worth keeping."""
    seen: set[Value] = set()
    scanned: set[Prefix] = set()
    shared: dict[Value, None] = {}
    for loop in loops:
        stack = [v for s in loop.body for v in values_of(s)]
        visited: set[Value] = set()
        while stack:
            v = stack.pop()
            if v in visited:
                continue
            visited.add(v)
            if (v in seen or _reads(v, scanned)) and k in v.ranges() and worth(v):
                shared[v] = None
                continue
            stack.extend(outside(v))
        seen.update(post_order([v for s in loop.body for v in values_of(s)]))
        scanned.update(s.prefix for s in loop.body if isinstance(s, Scan))
    return list(shared)


def with_keeps(body: Sequence[Any], keeps: dict[Value, Keep]) -> list[Any]:
    """The loops; the first to compute a value keeps it, later ones read it."""
    have: dict[Value, Value] = {}
    out: list[Any] = []
    for s in body:
        if not isinstance(s, Lanes):
            out.append(s)
            continue
        needed = set(post_order([v for x in s.body for v in values_of(x)]))
        scanned = {x.prefix for x in s.body if isinstance(x, Scan)}
        put = Replacement(dict(have).get)
        statements = [put.statement(x) for x in s.body]
        still = set(post_order([v for x in statements for v in values_of(x)]))
        found = [v for v in keeps if _reads(v, scanned) or (v in needed and (v in still or put(v) in still))]
        new = [v for v in found if v not in have]
        statements += [Set(keeps[v], put(v)) for v in new]
        # keeps are set before a store can overwrite their operands
        statements.sort(key=lambda x: isinstance(x, Store))
        have.update((v, read(keeps[v])) for v in new)
        out.append(Lanes(s.range, tuple(statements), s.note))
    return out


def with_late_stores(body: Sequence[Any]) -> list[Any]:
    """The loops of a reread row, each store in the last loop with its value.

    No statement reads the row after the store, whose buffer may then alias it.
    """
    late: dict[Store, Lanes] = {}
    for loop in (s for s in body if isinstance(s, Lanes)):
        computed = set(post_order([v for x in loop.body for v in values_of(x)]))
        stores = [x for x in loop.body if isinstance(x, Store)]
        late.update((x, loop) for x in [*late, *stores] if x.value in computed)
    out: list[Any] = []
    for s in body:
        if isinstance(s, Lanes):
            stays = [x for x in s.body if late.get(x, s) is s]
            s = Lanes(
                s.range, (*stays, *(x for x, loop in late.items() if loop is s and x not in stays)), s.note
            )
        out.append(s)
    return out


def is_scanned(v: Value) -> bool:
    """True for a read of a prefix."""
    return v.op == "read" and isinstance(v.attr, Prefix)


def _reads(v: Value, prefixes: Collection[Prefix]) -> bool:
    return v.op == "read" and v.attr in prefixes


_KEEP_COST = 8  # minimum cost of a value that is kept for the next loop rather than recomputed


def kept(low: Lowering, body: list[Any]) -> list[Any]:
    """Keep values for later loops of the row that would recompute or reread them.

    Only a repeated scan must have operands without prefixes, so several scans of a row are always kept.
    """
    loops = [s for s in body if isinstance(s, Lanes)]
    if len(loops) < 2:
        return body
    k = loops[0].range
    shared = shared_between(loops, k, functools.partial(_is_worth_keeping, low.target))
    if sum(k.extent * v.dtype.itemsize for v in shared) > low.target.keep_bytes:
        shared = shared_between(loops, k, is_scanned) if len(low.scans) > 1 else []
        body = with_late_stores(body)
    keeps = {v: Keep(f"{_keep_name(v)}_{n}", v.dtype, k) for n, v in enumerate(shared)}
    return with_scans(with_keeps(body, keeps) if keeps else body)


def _keep_name(v: Value) -> str:
    if is_scanned(v):
        return f"{v.attr}_kept"
    op = v.attr[0] if v.op == "fold" else v.attr[0].name if v.op in ("apply", "load") else v.op
    return f"{op}_kept"


def _is_worth_keeping(target: Target, v: Value) -> bool:
    """True if keeping a value is cheaper than recomputing it."""
    if v.op == "load":
        return target.keep_loads
    if is_scanned(v):
        return True
    if v.op not in ("apply", "fold", "bits", "result"):
        return False
    cost = 0
    for x in post_order([v], outside):
        if x.op in ("fold", "bits", "result") or is_scanned(x):
            return True
        if x.op == "apply":
            cost += x.attr[0].cost
    return cost >= _KEEP_COST
