"""Kernel assembly: loops of a row, values kept between them, the finish.

Kernels, stage 6, called by ``region.py``. In: the statements of a region's points: reductions and stores, as values of
LoopIR. Out: loops over lanes in dependency order, in launches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Var
from blufunc.core.ops.elementwise import mul_p, rsqrt_p, square_p
from blufunc.kernels.fusion.iteration_space import reduces, scans_by
from blufunc.kernels.loopir.index import ZERO, Range, of
from blufunc.kernels.loopir.ir import (
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Scan,
    Set,
    Store,
    Total,
    Value,
    apply,
    dependencies,
    load,
    outside,
    post_order,
    read,
    values_of,
)
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.lower.values import Values, type_text

# -- the loops of a row -----------------------------------------------------------------------------


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
    put = _Replace({v: read(new[v.attr].prefix) for v in values if v.op == "read" and v.attr in new})
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


def roots_of(body: Sequence[Any]) -> list[Value]:
    out: list[Value] = []
    for s in body:
        out.extend(values_of(s))
        out.extend(roots_of(getattr(s, "body", ())))
    return out


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
        put = _Replace(dict(have))
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


class _Replace:
    """Substitution of values in values and statements."""

    def __init__(self, by: dict[Value, Value]):
        self.by = by
        self.done: dict[Value, Value] = dict(by)

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                args = tuple(self.done[a] for a in v.args)
                same = all(a is b for a, b in zip(args, v.args, strict=True))
                self.done[v] = v if same else Value(v.op, args, v.attr, v.dtype)
        return self.done[value]

    def statement(self, s: Any) -> Any:
        if not self.by:
            return s
        if isinstance(s, Store):
            return Store(s.buffer, s.index, self(s.value), None if s.guard is None else self(s.guard))
        if isinstance(s, Reduce):
            return Reduce(s.total, self(s.value), s.position)
        if isinstance(s, Scan):
            return Scan(s.prefix, self(s.value))
        return type(s)(s.keep, self(s.value))


# -- kernels ----------------------------------------------------------------------------------------


_KEEP_COST = 8  # minimum cost of a value that is kept for the next loop rather than recomputed


class Lowering(Values):
    """The state of one region's lowering."""

    def part(self, v: Var, dtype: np.dtype, count: int) -> Buffer:
        """A buffer for partial results of the total ``v``."""
        scratch = Scratch(dtype, count)
        buffer = Buffer(f"{self.names.of(v, self.maker(v))}_parts", dtype, count, True)
        self.parts[v] = (buffer, scratch)
        return buffer

    def at_the_end(self) -> list[Any]:
        """The finish: reduce the parts of totals, in order; store what depends on them."""
        self.guard = None
        loops: dict[int, list[Any]] = {}
        for v, (buffer, _) in self.parts.items():
            e = self.producers[v]
            total = Total(self.names.of(v, e), buffer.dtype, e.prim.monoid)
            self.totals[v] = total
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
        """Keep values for later loops of the row that would recompute or reread them.

        Only a repeated scan must have operands without prefixes, so several scans of a row are always kept.
        """
        loops = [s for s in body if isinstance(s, Lanes)]
        if len(loops) < 2:
            return body
        k = loops[0].range
        shared = shared_between(loops, k, self.worth)
        if sum(k.extent * v.dtype.itemsize for v in shared) > self.target.keep_bytes:
            shared = shared_between(loops, k, is_scanned) if len(self.scans) > 1 else []
            body = with_late_stores(body)
        keeps = {v: Keep(f"{self.keep_name(v)}_{n}", v.dtype, k) for n, v in enumerate(shared)}
        return with_scans(with_keeps(body, keeps) if keeps else body)

    def keep_name(self, v: Value) -> str:
        if is_scanned(v):
            return f"{v.attr}_kept"
        op = v.attr[0] if v.op == "fold" else v.attr[0].name if v.op in ("apply", "load") else v.op
        return f"{op}_kept"

    def worth(self, v: Value) -> bool:
        """True if keeping a value is cheaper than recomputing it."""
        if v.op == "load":
            return self.target.keep_loads
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

    # -- putting it together -------------------------------------------------------------------

    def launch(
        self,
        grid: Sequence[Range],
        body: Sequence[Any],
        more: dict[Buffer, Any] | None = None,
        finish: Sequence[Any] = (),
        over: Sequence[Range] = (),
    ) -> Launch:
        """A kernel and its operands; its finish reduces the parts of totals."""
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
        """A readable name: the user's function, and the operations that stand out."""
        eqns = self.region.eqns or [self.virtual[v] for v in self.region.outputs]
        functions = [source.function_of(e.source) for e in eqns if e.source is not None]
        where = re.sub(r"\W", "", functions[-1]).strip("_") if functions else ""
        telling = [e.prim.name for e in eqns if reduces(e.prim) or scans_by(e.prim) or e.prim.cost > 1]
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
