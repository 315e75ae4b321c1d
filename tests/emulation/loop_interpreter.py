"""Interpreter of LoopIR in NumPy: the reference semantics for generated code.

In: a kernel of ``ir.py`` and one flat array for each of its buffers. Out: the outputs, written in place. Grid points
run in chunks. Every loop variable is an array along an axis of its own,

    (..., fold variables, grid points, lanes)

so that all scalars of all points and lanes are computed at once, by broadcasting and the ``impl`` of primitives. Rows
run in sequence, each for the points whose loop has not ended; the finish runs at points of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ops.random_bits import threefry2x32
from blufunc.kernels.loopir.index import UNBOUNDED, Computed, Index, Range
from blufunc.kernels.loopir.ir import (
    BODIES,
    REDUCTIONS,
    Accumulate,
    Branch,
    Buffer,
    Cell,
    Keep,
    Kernel,
    Lanes,
    Loop,
    Reduce,
    Rows,
    Scan,
    Store,
    Total,
    Value,
    identity,
    outside,
    post_order,
    statement_text,
)
from blufunc.kernels.loopir.verify import wrong

_ELEMENTS = 1 << 16  # of points times lanes at a time

RANDOM_BITS = {
    8: lambda a, b: (a ^ b).astype(np.uint8),
    16: lambda a, b: (a ^ b).astype(np.uint16),
    32: lambda a, b: a ^ b,
    64: lambda a, b: (a.astype(np.uint64) << np.uint64(32)) | b,
}
"""Random bits of each width from the two words of the cipher."""


def run(
    kernel: Kernel, arrays: Mapping[Buffer, np.ndarray], *, check: bool = False, elements: int = _ELEMENTS
) -> None:
    """Run a kernel.

    Args:
      arrays: for each buffer, a contiguous array of shape ``(size,)`` and of its dtype. Outputs are written in place.
      check: also find elements that two points, or two lanes, write, elements that the finish reads of points that it
        does not wait for, and computed indices outside of their bounds.
      elements: points times lanes per chunk; a chunk holds all lanes of a point.

    Raises:
      JaxprTypeError: a load or store out of bounds, or a finding of ``check``: an invalid kernel.
    """
    for b in kernel.buffers:
        a = arrays[b]
        if a.shape != (b.size,) or a.dtype != b.dtype:
            raise wrong(kernel, f"{b} was given an array {dtypes.short_name(a.dtype)}{list(a.shape)}")
    ignoring_fp_errors(_run, kernel, arrays, check, elements)


def _run(kernel: Kernel, arrays: Mapping[Buffer, np.ndarray], check: bool, elements: int) -> None:
    lanes = max((s.range.extent for s in kernel.statements() if isinstance(s, Lanes)), default=1)
    step = max(1, elements // max(lanes, 1))
    writers = _Writers(kernel) if check else None
    for start in range(0, kernel.points, step):
        ids = np.arange(start, min(start + step, kernel.points), dtype=np.int64)
        chunk = _Chunk(kernel, arrays, writers, elements, len(ids))
        chunk.block(kernel.body, _Points(ids, np.arange(len(ids)), _grid_values(kernel.grid, ids)))
    enders = _Writers(kernel) if check else None
    for start in range(0, kernel.ends, step):
        ids = np.arange(start, min(start + step, kernel.ends), dtype=np.int64)
        chunk = _Chunk(kernel, arrays, enders, elements, len(ids), before=writers)
        chunk.block(kernel.finish, _Points(ids, np.arange(len(ids)), _grid_values(kernel.over, ids)))


def _grid_values(grid: Sequence[Range], ids: np.ndarray) -> dict[Range, Any]:
    """The loop variables of a grid at some points."""
    values: dict[Range, Any] = {}
    rest = ids[:, None]
    for r in reversed(grid):
        rest, values[r] = np.divmod(rest, r.extent)
    return values


@dataclass(frozen=True)
class _Points:
    """Points of a chunk: indices in grid and chunk, and their loop variables."""

    ids: np.ndarray
    where: np.ndarray
    values: Mapping[Range, Any]

    def only(self, mask: np.ndarray) -> _Points:
        """Those where ``mask`` holds."""
        values = {r: x[mask] if isinstance(x, np.ndarray) else x for r, x in self.values.items()}
        return _Points(self.ids[mask], self.where[mask], values)


@dataclass(frozen=True)
class _Chunk:
    """A chunk of ``count`` grid points, and their private cells.

    ``cells`` holds totals as arrays of shape (count, 1), keeps and prefixes as arrays of shape (count, lanes).
    ``before`` has the writers of the elements that a finish reads.
    """

    kernel: Kernel
    arrays: Mapping[Buffer, np.ndarray]
    writers: _Writers | None
    elements: int
    count: int
    cells: dict[Cell, np.ndarray] = field(default_factory=dict)
    before: _Writers | None = None

    def block(self, body: Sequence[Any], points: _Points) -> None:
        """The statements of the grid, or of rows, at some points."""
        for stores, run in groupby(body, lambda s: isinstance(s, Store)):
            if stores:
                _Scope(self, points, points.values, (len(points.ids), 1)).store(list(run), None)
                continue
            for s in run:
                self.lanes(s, points) if isinstance(s, Lanes) else self.rows(s, points)

    def rows(self, s: Rows, points: _Points) -> None:
        """A sequential loop, for each point until it reaches the limit."""
        for row in range(s.range.extent):
            points = replace(points, values={**points.values, s.range: row})
            scope = _Scope(self, points, points.values, (len(points.ids), 1))
            going = np.broadcast_to(scope.index(s.index) < s.limit, scope.shape)[:, 0]
            if not going.all():
                points = points.only(going)
            if not len(points.ids):
                return
            self.block(s.body, points)

    def lanes(self, s: Lanes, points: _Points) -> None:
        """All lanes at once, one statement after the other."""
        n = s.range.extent
        values = {**points.values, s.range: np.arange(n, dtype=np.int64)[None]}
        scope = _Scope(self, points, values, (len(points.ids), n))
        for t in s.body:
            if isinstance(t, Reduce):
                self.set(t.total, 1, points, scope.total(t))
            elif n and isinstance(t, Scan):
                self.set(t.prefix, n, points, scope.prefix(t))
            elif n and not isinstance(t, Store):
                new = scope.value(t.value)
                if isinstance(t, Accumulate):
                    assert t.keep.op is not None
                    old = self.get(t.keep, points)
                    new = REDUCTIONS[t.keep.op](old, new.astype(t.keep.dtype), dtype=t.keep.dtype)
                self.set(t.keep, n, points, new)
        if n:
            scope.store([t for t in s.body if isinstance(t, Store)], s.range)

    def get(self, cell: Cell, points: _Points) -> np.ndarray:
        """The contents of a total or a keep at some points."""
        if cell not in self.cells:
            if not isinstance(cell, Keep) or cell.op is None:
                raise wrong(self.kernel, f"{cell} is read before it is written")
            shape = (self.count, cell.lanes.extent)
            self.cells[cell] = np.full(shape, identity(cell.op, cell.dtype), cell.dtype)
        return self.cells[cell][points.where]

    def set(self, cell: Cell, lanes: int, points: _Points, value: np.ndarray) -> None:
        """Write a total or a keep at some points."""
        if cell not in self.cells:
            self.cells[cell] = np.zeros((self.count, lanes), value.dtype)
        self.cells[cell][points.where] = value


class _Scope:
    """Values at points and lanes: arrays that broadcast to ``shape``, computed once.

    Inside of a fold, ``shape`` has the fold's axis in front. There, and in the body of a loop or branch, ``outer``
    computes the values that do not depend on ``own``.
    """

    def __init__(
        self,
        chunk: _Chunk,
        points: _Points,
        values: Mapping[Range, Any],
        shape: tuple[int, ...],
        outer: _Scope | None = None,
        own: Range | None = None,
    ):
        self.chunk, self.points, self.values, self.shape = chunk, points, values, shape
        self.outer, self.own = outer, own
        self.done: dict[Value, np.ndarray] = {}

    # -- statements ----------------------------------------------------------------------------

    def store(self, stores: Sequence[Store], lanes: Range | None) -> None:
        """Write elements, when everything has been read that they are computed from."""
        for write in [self.write(s, lanes) for s in stores]:
            write()

    def write(self, s: Store, lanes: Range | None) -> Callable[[], None]:
        """A function that writes the elements of a store, where its guard holds."""
        array, index, value = self.chunk.arrays[s.buffer], self.index(s.index), self.value(s.value)
        if value.dtype != array.dtype:
            raise wrong(self.chunk.kernel, f"{statement_text(s)} stores {dtypes.short_name(value.dtype)}")
        mask = np.ones((1, 1), bool) if s.guard is None else self.value(s.guard)
        parts = [mask, index, value]
        writers = self.chunk.writers
        if writers is not None:
            parts.append(writers.numbers(self.points.ids, lanes))
        mask, index, value, *who = np.broadcast_arrays(*parts)
        index = index[mask]
        self.check_bounds(index, s.buffer, s)
        if writers is not None:
            writers.add(s, index, who[0][mask])
        value = value[mask]
        return lambda: array.__setitem__(index, value)

    def total(self, s: Reduce) -> np.ndarray:
        """The reduction of a value over the lanes, of shape (points, 1)."""
        if not self.shape[1]:
            if s.position is not None:
                raise wrong(self.chunk.kernel, f"{s.total} is the place of an extremum of no lanes")
            return np.full((self.shape[0], 1), identity(s.total.op, s.total.dtype), s.total.dtype)
        x = np.broadcast_to(self.value(s.value), self.shape)
        if s.position is None:
            return _reduced(s.total.op, x, 1, s.total.dtype)
        return _first(s.total, x, np.broadcast_to(self.index(s.position), self.shape))

    def prefix(self, s: Scan) -> np.ndarray:
        """A value combined along the lanes, of shape (points, lanes)."""
        p = s.prefix
        x = np.broadcast_to(self.value(s.value), self.shape).astype(p.dtype)
        acc = _accumulator(p.dtype)
        way = slice(None, None, -1 if p.reverse else 1)
        return REDUCTIONS[p.op].accumulate(x[:, way].astype(acc), axis=1, dtype=acc)[:, way].astype(p.dtype)

    # -- values --------------------------------------------------------------------------------

    def index(self, index: Index) -> np.ndarray:
        """The integers of an index."""
        return np.atleast_2d(index.at(self.values, self.computed))

    def computed(self, atom: Computed) -> np.ndarray:
        """The integers that the program computed."""
        x = self.value(atom.value).astype(np.int64)
        if self.chunk.writers is not None and not np.all((atom.low <= x) & (x <= atom.high)):
            low, high = x.min(), x.max()
            raise wrong(
                self.chunk.kernel, f"{atom} lies in {low} .. {high}, not in {atom.low} .. {atom.high}"
            )
        return x

    def value(self, root: Value) -> np.ndarray:
        """The value of ``root``, and of all that it depends on."""
        for v in post_order([root], outside):
            if v not in self.done:
                if self.outer is not None and self.own not in v.ranges():
                    self.done[v] = self.outer.value(v)
                else:
                    self.done[v] = self.computation(v)
        return self.done[root]

    def computation(self, v: Value) -> np.ndarray:
        """One operation."""
        args = [self.done[a] for a in (outside(v) if v.op in BODIES else v.args)]
        result = getattr(self, f"_{v.op}")(v, *args)
        if isinstance(result, list):  # of a loop or branch: what ``result`` takes
            return result  # type: ignore[return-value]
        if result.dtype != v.dtype:
            raise wrong(self.chunk.kernel, f"{v} is {dtypes.short_name(result.dtype)}, not of its dtype")
        return result

    def _const(self, v: Value) -> np.ndarray:
        return np.asarray(v.attr, v.dtype).reshape(1, 1)

    def _load(self, v: Value, guard: np.ndarray | None = None) -> np.ndarray:
        buffer, at = v.attr
        array, index = self.chunk.arrays[buffer], self.index(at)
        if guard is None:
            self.check_bounds(index, buffer, v)
            self.check_done(index, buffer, v)
            return array[index]
        guard, index = np.broadcast_arrays(guard, index)
        self.check_bounds(index[guard], buffer, v)
        out = np.zeros(index.shape, array.dtype)
        out[guard] = array[index[guard]]
        return out

    def _number(self, v: Value) -> np.ndarray:
        return self.index(v.attr).astype(v.dtype)

    def _within(self, v: Value) -> np.ndarray:
        index, low, high = v.attr
        x = self.index(index)
        return (low <= x) & (x < high)

    def _apply(self, v: Value, *args: np.ndarray) -> np.ndarray:
        prim, params = v.attr
        if len({a.shape for a in args}) > 1:
            args = tuple(np.broadcast_arrays(*args))
        return np.asarray(prim.impl(*args, **params))

    def _read(self, v: Value) -> np.ndarray:
        return self.chunk.get(v.attr, self.points)

    def _fold(self, v: Value) -> np.ndarray:
        op, over = v.attr
        body, rank = v.args[0], len(self.shape)
        block = max(1, self.chunk.elements // max(math.prod(self.shape), 1))
        acc, total = _accumulator(v.dtype), None
        for start in range(0, over.extent, block):
            at = np.arange(start, min(start + block, over.extent), dtype=np.int64)
            values = {**self.values, over: at.reshape(-1, *(1,) * rank)}
            x = _Scope(self.chunk, self.points, values, (len(at), *self.shape), self, over).value(body)
            x = x.reshape(*(1,) * (rank + 1 - x.ndim), *x.shape)
            part = _reduced(op, np.broadcast_to(x, (len(at), *x.shape[1:])), 0, acc)[0]
            total = part if total is None else REDUCTIONS[op](total, part, dtype=acc)
        if total is None:
            return np.full((1, 1), identity(op, v.dtype), v.dtype)
        return total.astype(v.dtype)

    def _bits(self, v: Value, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
        index, width = v.attr
        count = self.index(index).astype(np.uint64)
        words = ((count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32))
        return RANDOM_BITS[width](*threefry2x32(hi, lo, *words))

    def _loop(self, v: Value, *inits: np.ndarray) -> list[np.ndarray]:
        """All points and lanes iterate together; those that have ended keep their carries."""
        made: Loop = v.attr
        state = [
            np.broadcast_to(x, self.shape).astype(c.dtype) for c, x in zip(made.carries, inits, strict=True)
        ]
        going, turns = np.ones(self.shape, bool), 0
        while turns != made.most:
            inner = self._inside(made.turn, zip(made.carries, state, strict=True))
            going &= inner.value(made.going(v))
            if not going.any():
                break
            state = [np.where(going, inner.value(n), x) for n, x in zip(made.nexts(v), state, strict=True)]
            turns += 1
        return state

    def _branch(self, v: Value, holds: np.ndarray, *operands: np.ndarray) -> list[np.ndarray]:
        made: Branch = v.attr
        inner = self._inside(made.turn, zip(made.operands, operands, strict=True))
        yes, no = ([inner.value(x) for x in side] for side in made.sides(v))
        return [np.where(holds, y, n) for y, n in zip(yes, no, strict=True)]

    def _inside(self, turn: Range, given: Iterable[tuple[Value, np.ndarray]]) -> _Scope:
        """A scope for the body of a loop or branch, in which carries are ``given``."""
        inner = _Scope(self.chunk, self.points, {**self.values, turn: 0}, self.shape, self, turn)
        inner.done.update(given)
        return inner

    def _result(self, v: Value, whole: Any) -> np.ndarray:
        return whole[v.attr]

    def check_bounds(self, index: np.ndarray, buffer: Buffer, who: Value | Store) -> None:
        """Raise for an access outside of a buffer."""
        outside = (index < 0) | (index >= buffer.size)
        if outside.any():
            text = who if isinstance(who, Value) else statement_text(who)
            raise wrong(self.chunk.kernel, f"{text} touches element {index[outside][0]} of {buffer.size}")

    def check_done(self, index: np.ndarray, buffer: Buffer, v: Value) -> None:
        """Raise if a finish reads an element of no point, or of one it does not wait for."""
        before = self.chunk.before
        if before is None or not buffer.written:
            return
        points = before.wrote[buffer][index] // before.width
        theirs = _grid_values(self.chunk.kernel.grid, points.ravel())
        apart = points < 0
        for r in self.chunk.kernel.over:
            apart = apart | (theirs[r].reshape(points.shape) != self.values[r])
        if apart.any():
            who = np.broadcast_to(index, apart.shape)[apart][0]
            raise wrong(self.chunk.kernel, f"{v} reads element {who}, which may not have been written")


def _accumulator(dtype: np.dtype) -> np.dtype:
    """Half precisions accumulate in float32."""
    return dtypes.float32 if dtypes.is_floating(dtype) and dtype.itemsize < 4 else dtype


def _reduced(op: str, x: np.ndarray, axis: int, dtype: np.dtype) -> np.ndarray:
    """``x`` reduced over an axis, which stays with the size 1."""
    acc = _accumulator(dtype)
    return REDUCTIONS[op].reduce(x.astype(acc), axis=axis, dtype=acc, keepdims=True).astype(dtype)


def _first(total: Total, x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """First position of the extremum of ``x`` along axis 1; NaN is the most extreme."""
    assert total.position is not None
    x = x.astype(_accumulator(total.dtype))
    best = REDUCTIONS[total.op[3:]].reduce(x, axis=1, keepdims=True)
    hit = (x == best) | ((x != x) & (best != best))
    return np.where(hit, position, UNBOUNDED).min(1, keepdims=True).astype(total.position)


class _Writers:
    """Writer of each element of each output: ``point * lanes of all loops + lane``."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.lanes: dict[Range | None, int] = {None: 0}  # from ranges to the index of their first lane
        self.width = 1
        for s in kernel.statements():
            if isinstance(s, Lanes) and s.range not in self.lanes:
                self.lanes[s.range] = self.width
                self.width += s.range.extent
        self.wrote = {b: np.full(b.size, -1, np.int64) for b in kernel.buffers if b.written}

    def numbers(self, points: np.ndarray, lanes: Range | None) -> np.ndarray:
        """The index of each point and lane."""
        lane = self.lanes[lanes] + np.arange(1 if lanes is None else lanes.extent)
        return points[:, None] * self.width + lane

    def add(self, s: Store, index: np.ndarray, who: np.ndarray) -> None:
        """Record the writers of elements, and raise if one has two."""
        wrote = self.wrote[s.buffer]
        others = (wrote[index] != -1) & (wrote[index] != who)
        wrote[index] = who
        others |= wrote[index] != who
        if others.any():
            raise wrong(
                self.kernel, f"{statement_text(s)}: element {index[others][0]} is also written elsewhere"
            )
