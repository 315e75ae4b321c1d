"""Verifier of LoopIR: scopes, dtypes and bounds of a kernel.

Kernels, stage 6. In: a kernel, after lowering, if ``config.check`` is set. Out: an error if it breaks a rule, which is
a bug in lowering, never in the user's program. The rules:

- a loop variable is used only where a loop over it, or over the grid, is open; rows are loops of the grid, lanes of
  the grid or of rows; folds, loops and branches have their own range, and their carries are used only inside;
- a total is reduced by one statement, and read only after its loop, in the block that holds the loop;
- results of scans are read after them, by the lanes of the same loop; the scans of a loop go in one direction, and
  read none of its prefixes;
- a keep is written and read by the lanes of loops over its range, and read after it is written; one that has an
  ``op`` is only accumulated. A read of a keep is one value: it is not used both before and after the keep changes;
- inputs are read and outputs are written, in bounds unless guarded, and no two points or lanes write the same
  element; the finish runs over a part of the grid, may read what points have written, and writes other buffers;
- dtypes match: an ``apply`` has the dtype of its primitive's abstract rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.kinds import TYPES
from blufunc.errors import BlufuncError, JaxprTypeError
from blufunc.kernels.loopir.index import Index, Range, ranges_of
from blufunc.kernels.loopir.ir import (
    ARG_REDUCTIONS,
    REDUCTIONS,
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
    Total,
    Value,
    computed_in,
    outside,
    post_order,
    statement_text,
    values_of,
)

_TAKES = {"sum": "number", "prod": "number", "max": "ordered", "min": "ordered", "and": "bits", "or": "bits",
          "xor": "bits", "logaddexp": "float", "argmax": "ordered", "argmin": "ordered"}  # fmt: skip
"""The operand dtypes of each reduction: keys of ``kinds.TYPES``."""

_TRIED = 1 << 16  # places at which indices are evaluated when their bounds are too loose
_WIDTHS = (8, 16, 32, 64)  # of random bits


def wrong(kernel: Kernel, what: str) -> JaxprTypeError:
    """The error for a kernel that breaks a rule of LoopIR, with the printed kernel."""
    return JaxprTypeError(f"{what}, in\n{kernel}", why="lowering built a wrong kernel")


def check_kernel(kernel: Kernel) -> None:
    """Check scopes, dtypes and bounds.

    Raises:
      JaxprTypeError: naming the statement, with the whole kernel in its text.
    """
    _Check(kernel).run()


class _Check:
    """A walk over statements; ``bound`` are open loops, ``totals`` readable ones."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.statement: Any = None
        self.typed: set[Value] = set()
        self.reduced: set[Total] = set()
        self.scanned: set[Prefix] = set()
        self.prefixes: dict[Prefix, None] = {}  # of the open loop
        self.written: dict[Keep, int] = {}  # statements that have written each keep so far
        self.seen: dict[Value, int] = {}  # reads of keeps by these lanes, and ``written`` at that time
        self.limits: list[Rows] = []  # open rows that may stop early
        self.grid = kernel.grid
        self.finished: frozenset[Buffer] = frozenset()  # outputs that the finish can read

    def fail(self, what: str) -> None:
        """Raise for the statement being checked."""
        at = "" if self.statement is None else f"{statement_text(self.statement)}: "
        raise wrong(self.kernel, at + what)

    def run(self) -> None:
        """Check the kernel."""
        names = [b.name for b in self.kernel.buffers]
        for name in names:
            if names.count(name) > 1:
                self.fail(f"two buffers are called {name}")
        if len(set(self.kernel.grid)) < len(self.kernel.grid):
            self.fail("a range is twice in the grid")
        self.block(self.kernel.body, frozenset(self.grid), frozenset(), "the grid")
        self.statement = None
        if not frozenset(self.kernel.over) <= frozenset(self.grid):
            self.fail("the finish is done over a range that is not of the grid")
        self.grid, self.written, self.seen = self.kernel.over, {}, {}
        before, after = (_stored(body) for body in (self.kernel.body, self.kernel.finish))
        self.finished = before - after
        self.block(self.kernel.finish, frozenset(self.grid), frozenset(), "the grid")

    # -- statements ----------------------------------------------------------------------------

    def block(
        self, body: Sequence[Any], bound: frozenset[Range], totals: frozenset[Total], place: str
    ) -> None:
        """Check the statements of the grid or of rows."""
        for s in body:
            self.statement = s
            if isinstance(s, Store):
                self.store(s, bound, totals, None)
            elif isinstance(s, Lanes):
                totals |= self.lanes(s, bound, totals)
            elif isinstance(s, Rows) and place == "the grid":
                self.rows(s, bound, totals)
            else:
                self.fail(f"{type(s).__name__} cannot stand in {place}")

    def rows(self, s: Rows, bound: frozenset[Range], totals: frozenset[Total]) -> None:
        """Check a sequential loop; its writes do not count afterwards: it may be empty."""
        bound = self.open(s.range, bound)
        self.values(values_of(s), bound, totals, None)
        self.index(s.index, bound)
        stops = s.index.bounds()[1] >= s.limit
        if stops:
            self.limits.append(s)
        before = frozenset(self.written)
        self.block(s.body, bound, totals, "rows")
        self.written = {k: n for k, n in self.written.items() if k in before or k.op is not None}
        if stops:
            self.limits.pop()

    def lanes(self, s: Lanes, bound: frozenset[Range], totals: frozenset[Total]) -> frozenset[Total]:
        """Check a cooperative loop, and return the totals that it reduces."""
        bound = self.open(s.range, bound)
        self.seen, self.prefixes = {}, {}
        mine: set[Total] = set()
        for t in s.body:
            self.statement = t
            if isinstance(t, Store):
                self.store(t, bound, totals, s.range)
                continue
            if not isinstance(t, (Reduce, Scan, Set, Accumulate)):
                self.fail(f"{type(t).__name__} cannot stand in lanes")
            self.values(values_of(t), bound, totals, s.range)
            if isinstance(t, Reduce):
                self.reduce(t, bound, s.range)
                mine.add(t.total)
            elif isinstance(t, Scan):
                self.scan(t, s.range)
            else:
                self.keep(t, s.range)
        return frozenset(mine)

    def open(self, r: Range, bound: frozenset[Range]) -> frozenset[Range]:
        """The open loops inside of one over ``r``."""
        if r in bound:
            self.fail(f"a loop over {r} is open already")
        return bound | {r}

    def store(self, s: Store, bound: frozenset[Range], totals: frozenset[Total], lanes: Range | None) -> None:
        """Check a store: dtype, bounds, and that each point and lane has its own elements."""
        self.values(values_of(s), bound, totals, lanes)
        self.index(s.index, bound)
        self.buffer(s.buffer, written=True)
        if s.value.dtype != s.buffer.dtype:
            self.fail(f"{_short(s.value)} is stored to {_short(s.buffer)}")
        self.boolean(s.guard)
        if s.guard is None:
            self.inside(s.index, s.buffer, bound)
        distinct = ranges_of(s.index) | (frozenset() if s.guard is None else s.guard.ranges())
        for r in (*self.grid, *([] if lanes is None else [lanes])):
            if r.extent > 1 and r not in distinct:
                self.fail(f"every {r} writes the same element")

    def reduce(self, s: Reduce, bound: frozenset[Range], lanes: Range) -> None:
        """Check a reduction over lanes."""
        t = s.total
        if t in self.reduced:
            self.fail(f"{t} is reduced by another statement too")
        self.reduced.add(t)
        arg = t.op in ARG_REDUCTIONS
        if not arg and t.op not in REDUCTIONS:
            self.fail(f"{t.op} is no reduction")
        if arg != (t.position is not None) or arg != (s.position is not None):
            self.fail("an arg-extremum has a position, other reductions have none")
        if arg and not lanes.extent:
            self.fail("an extremum of no lanes has no position")
        if s.position is not None:
            self.index(s.position, bound)
        self.accumulates(t.op, s.value.dtype, t.dtype)

    def scan(self, s: Scan, lanes: Range) -> None:
        """Check a scan over lanes."""
        p = s.prefix
        if p.lanes is not lanes:
            self.fail(f"{p} belongs to the lanes {p.lanes}, not {lanes}")
        if p.op not in REDUCTIONS:
            self.fail(f"{p.op} is no reduction")
        if p in self.scanned:
            self.fail(f"{p} is scanned by another statement too")
        self.scanned.add(p)
        if any(other.reverse != p.reverse for other in self.prefixes):
            self.fail("the scans of a loop go one way")
        if any(isinstance(v.attr, Prefix) for v in post_order([s.value])):
            self.fail("a scan takes no prefix of its own loop")
        self.accumulates(p.op, s.value.dtype, p.dtype)
        self.prefixes[p] = None

    def keep(self, s: Set | Accumulate, lanes: Range) -> None:
        """Check a write to a keep."""
        if s.keep.lanes is not lanes:
            self.fail(f"{s.keep} belongs to the lanes {s.keep.lanes}, not {lanes}")
        if isinstance(s, Set):
            if s.keep.op is not None:
                self.fail(f"{s.keep} grows by {s.keep.op}, and is not set")
            if s.value.dtype != s.keep.dtype:
                self.fail(f"{_short(s.value)} is kept as {_short(s.keep)}")
        elif s.keep.op not in REDUCTIONS:
            self.fail(f"{s.keep} does not accumulate")
        else:
            self.accumulates(s.keep.op, s.value.dtype, s.keep.dtype)
        self.written[s.keep] = self.written.get(s.keep, 0) + 1

    def accumulates(self, op: str, dtype: np.dtype, into: np.dtype) -> None:
        """Check a reduction's operand and accumulator: the same dtype or a wider float."""
        text, accepts = TYPES[_TAKES[op]]
        if not accepts(dtype):
            self.fail(f"{op} takes {text}, not {dtypes.short_name(dtype)}")
        wider = dtypes.is_floating(dtype) and dtypes.is_floating(into) and into.itemsize > dtype.itemsize
        if dtype != into and not wider:
            self.fail(f"{dtypes.short_name(dtype)} is accumulated in {dtypes.short_name(into)}")

    # -- values --------------------------------------------------------------------------------

    def values(
        self,
        roots: Sequence[Value],
        bound: frozenset[Range],
        totals: frozenset[Total],
        lanes: Range | None,
    ) -> None:
        """Check values where they are used."""
        for v in post_order(roots, outside):
            if v not in self.typed:
                self.types(v)
                self.typed.add(v)
            if missing := v.ranges() - bound:
                self.fail(f"{v} needs {_names(missing)}, and no loop over it is open")
            if v.op == "fold":
                self.values(v.args, self.open(v.attr[1], bound), totals, lanes)
            elif v.op in ("loop", "branch"):
                inside = v.args[len(outside(v)) :]
                self.carries(v, inside)
                self.values(inside, self.open(v.attr.turn, bound), totals, lanes)
            elif v.op == "load":
                self.buffer(v.attr[0], written=False)
                if not v.args:
                    self.inside(v.attr[1], v.attr[0], bound)
            elif isinstance(v.attr, Total) and v.attr not in totals:
                self.fail(f"{v.attr} is read where no loop before has reduced it")
            elif isinstance(v.attr, Keep):
                self.reads_keep(v, lanes)
            elif isinstance(v.attr, Prefix) and v.attr not in self.prefixes:
                self.fail(f"{v.attr} is read where no scan of the loop has found it")

    def carries(self, v: Value, inside: Sequence[Value]) -> None:
        """Check that the carries in the body of a loop or branch are its own."""
        own = v.attr.carries if v.op == "loop" else v.attr.operands
        for x in post_order(inside):
            if x.op == "carry" and x.attr[1] is v.attr.turn and x not in own:
                self.fail(f"{x} is no carry of {v}")

    def reads_keep(self, v: Value, lanes: Range | None) -> None:
        """Check a read of a keep."""
        keep = v.attr
        if keep.lanes is not lanes:
            self.fail(f"{keep} belongs to the lanes {keep.lanes}, not to {lanes or 'the grid'}")
        if keep.op is None and keep not in self.written:
            self.fail(f"{keep} is read before it is set")
        version = self.written.get(keep, 0)
        if self.seen.setdefault(v, version) != version:
            self.fail(f"one read of {keep} is used both before and after it changes")

    def types(self, v: Value) -> None:
        """Check the dtype of one operation."""
        for index in v.indices():
            self.integers(index)
        rule: Callable[[Value], np.dtype | None] | None = getattr(self, f"_{v.op}", None)
        if rule is None:
            self.fail(f"{v.op} is no operation")
        else:
            expected = rule(v)
            if expected != v.dtype:
                correct = "another dtype" if expected is None else dtypes.short_name(expected)
                self.fail(f"{v} is {_short(v)}, where its operation gives {correct}")

    def _const(self, v: Value) -> np.dtype:
        return np.asarray(v.attr).dtype

    def _load(self, v: Value) -> np.dtype:
        self.boolean(v.args[0] if v.args else None)
        return v.attr[0].dtype

    def _number(self, v: Value) -> np.dtype | None:
        return v.dtype if dtypes.is_numeric(v.dtype) else None

    def _within(self, v: Value) -> np.dtype:
        return dtypes.bool_

    def _apply(self, v: Value) -> np.dtype:
        prim, params = v.attr
        try:
            out = prim.typed(tuple(ShapedArray((), a.dtype) for a in v.args), params)
        except BlufuncError as e:
            raise wrong(self.kernel, f"{statement_text(self.statement)}: {v}: {e.what}") from e
        if not isinstance(out, ShapedArray) or out.shape:
            self.fail(f"{prim.name} is not elementwise")
        return out.dtype

    def _read(self, v: Value) -> np.dtype:
        return (v.attr.position if isinstance(v.attr, Total) else None) or v.attr.dtype

    def _fold(self, v: Value) -> np.dtype:
        op = v.attr[0]
        if op not in REDUCTIONS:
            self.fail(f"{op} is no reduction of a fold")
        self.accumulates(op, v.args[0].dtype, v.dtype)
        return v.args[0].dtype

    def _bits(self, v: Value) -> np.dtype | None:
        if [a.dtype for a in v.args] != [dtypes.uint32] * 2 or v.attr[1] not in _WIDTHS:
            self.fail(
                f"{v} does not have two uint32 words of a key, and a width among {', '.join(map(str, _WIDTHS))}"
            )
        return np.dtype(f"u{v.attr[1] // 8}")

    def _carry(self, v: Value) -> np.dtype:
        return v.dtype

    def _loop(self, v: Value) -> np.dtype:
        loop = v.attr
        if len(v.args) != 2 * len(loop.carries) + 1:
            self.fail(f"{v} has {len(v.args)} arguments for {len(loop.carries)} carries")
        self.same(v, loop.carries, loop.inits(v))
        self.same(v, loop.carries, loop.nexts(v))
        self.boolean(loop.going(v))
        return dtypes.bool_

    def _branch(self, v: Value) -> np.dtype:
        self.boolean(v.args[0])
        self.same(v, v.attr.operands, outside(v)[1:])
        self.same(v, *v.attr.sides(v))
        return dtypes.bool_

    def _result(self, v: Value) -> np.dtype | None:
        (whole,) = v.args
        if whole.op not in ("loop", "branch"):
            self.fail(f"{v} is a result of {whole}, which is no loop or branch")
        results = whole.attr.carries if whole.op == "loop" else whole.attr.sides(whole)[0]
        return results[v.attr].dtype if v.attr < len(results) else None

    def same(self, v: Value, expected: Sequence[Value], values: Sequence[Value]) -> None:
        """Check that values have the expected dtypes."""
        if [x.dtype for x in expected] != [x.dtype for x in values]:
            texts = (", ".join(map(_short, part)) for part in (expected, values))
            self.fail(f"{v} takes {next(texts)} and is given {next(texts)}")

    def boolean(self, guard: Value | None) -> None:
        """Check a guard."""
        if guard is not None and guard.dtype != dtypes.bool_:
            self.fail(f"the guard {guard} is {_short(guard)}")

    # -- places --------------------------------------------------------------------------------

    def buffer(self, b: Buffer, *, written: bool) -> None:
        """Check that a buffer is a parameter, and an output or an input."""
        if b not in self.kernel.buffers:
            self.fail(f"{b.name} is no buffer of the kernel")
        if b.written != written and (written or b not in self.finished):
            self.fail(
                f"the {'output' if b.written else 'input'} {b.name} is {'written' if written else 'read'}"
            )

    def integers(self, index: Index) -> None:
        """Check that an index is computed from integers."""
        for v in computed_in(index):
            if not dtypes.is_integer(v.dtype):
                self.fail(f"an index is computed from {v}, which is {_short(v)}")

    def index(self, index: Index, bound: frozenset[Range]) -> None:
        """Check the loop variables of an index."""
        self.integers(index)
        if missing := ranges_of(index) - bound:
            self.fail(f"the index {index} needs {_names(missing)}, and no loop over it is open")

    def inside(self, index: Index, b: Buffer, bound: frozenset[Range]) -> None:
        """Check that an index is in bounds at all places that the open loops reach."""
        if any(not r.extent for r in bound):
            return
        low, high = index.bounds()
        if low >= 0 and high < b.size:
            return
        exact = _extremes(index, self.limits)
        if exact is None:
            if self.limits:
                return  # the interpreter checks that rows end in time
        elif not exact or (exact[0] >= 0 and exact[1] < b.size):
            return
        else:
            low, high = exact
        self.fail(f"{b.name}[{index}] reaches {low} .. {high}, of {b.size} elements")


def _extremes(index: Index, limits: Sequence[Rows]) -> tuple[int, ...] | None:
    """The least and the greatest value of an index in rows with limits, by evaluation.

    Bounds are loose if an index's terms depend on one another. Empty if no row runs; None if the program computes a
    part of the index, so that it cannot be evaluated.
    """
    parts = [index, *(s.index for s in limits)]
    if any(computed_in(p) for p in parts):
        return None
    values = _places(frozenset[Range]().union(*map(ranges_of, parts)))
    going = np.array(True)
    for s in limits:
        going = going & (s.index.at(values) < s.limit)
    x, going = np.broadcast_arrays(index.at(values), going)
    return (int(x[going].min()), int(x[going].max())) if going.any() else ()


def _places(ranges: Iterable[Range]) -> dict[Range, np.ndarray]:
    """Loop variables at all places; if these are too many, at a sample rich in edges."""
    ranges = sorted(ranges, key=str)
    if math.prod(r.extent for r in ranges) <= _TRIED:
        return dict(zip(ranges, np.ix_(*[np.arange(r.extent) for r in ranges]), strict=True))
    rng = np.random.default_rng(0)
    edge = {r: rng.integers(0, 3, _TRIED) for r in ranges}
    return {
        r: np.choose(e, (np.zeros_like(e), np.full_like(e, r.extent - 1), rng.integers(0, r.extent, _TRIED)))
        for r, e in edge.items()
    }


def _stored(body: Sequence[Any]) -> frozenset[Buffer]:
    """The buffers that statements write."""
    found = [{s.buffer} if isinstance(s, Store) else _stored(getattr(s, "body", ())) for s in body]
    return frozenset[Buffer]().union(*found)


def _short(x: Value | Buffer | Keep) -> str:
    return dtypes.short_name(x.dtype)


def _names(ranges: frozenset[Range]) -> str:
    return ", ".join(sorted(r.name for r in ranges))
