"""Parallelism of reductions: folds shared across threads, and single-lane sums.

Kernels, stage 6, two passes before the thread mapping. ``share_folds``: a fold is a loop of one thread, which leaves a
GPU idle if folds are long and points few, and is uncoalesced if the fold is contiguous in memory. The points of such a
kernel get lanes: those of the fold if it is contiguous. Otherwise lanes are neighboring points, and the fold becomes
rows, which thread groups share. The kernel that finishes a reduction over rows is an example: each point accumulates a
column of partials.

``read_single_lanes``: a row sum under a condition that one lane fulfills, such as the gather of one logit, becomes a
read of that lane. Where a block has a row, all threads read that lane before the first loop, and so before an output
may overwrite the row. Otherwise the thread with the lane reads it, and a reduction broadcasts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.device_model import WARP, WARP_LANES
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.backends.cuda.schedule.vectorize import is_wide, vectors_of
from blufunc.kernels.codegen.scalar_ops import is_small_float
from blufunc.kernels.loopir.index import Index, Range, of
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Cell,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Replaced,
    Replacement,
    Rows,
    Store,
    Substitution,
    Total,
    Value,
    computed_in,
    post_order,
    read,
    reads_replaced,
)

# -- parallel folds ---------------------------------------------------------------------------------


def share_folds(s: ScheduledKernel) -> ScheduledKernel:
    """Turn long folds into reductions over lanes or rows."""
    return replace(s, kernel=_with_shared_folds(s.kernel))


def _with_shared_folds(kernel: Kernel) -> Kernel:
    stores = [s for s in kernel.body if isinstance(s, Store)]
    if not kernel.grid or kernel.finish or len(stores) != len(kernel.body) or any(s.guard for s in stores):
        return kernel
    folds = _outermost_folds(kernel)
    if not folds:
        return kernel
    over = folds[0].attr[1]
    if over.extent < WARP or any(v.attr[1].extent != over.extent for v in folds):
        return kernel
    # one range for all of them
    same = Substitution({v.attr[1]: of(over) for v in folds if v.attr[1] is not over})
    summands = [same(v.args[0]) for v in folds]
    if all(_is_contiguous(x, over) for x in summands):
        return _over_lanes(kernel, over, folds, summands)
    (*_, points) = kernel.grid
    columns = len(kernel.grid) == 1 and all(_is_column(x, over, points) for x in summands)
    return (
        _over_rows(kernel, over, folds, summands)
        if columns and points.extent <= device.FEW_POINTS
        else kernel
    )


def _outermost_folds(kernel: Kernel) -> list[Value]:
    """Folds that are not nested in another fold."""
    values = post_order(kernel.roots(), lambda v: v.args if v.op != "fold" else ())
    return [v for v in values if v.op == "fold"]


def _is_contiguous(summand: Value, over: Range) -> bool:
    """True if all loads of a fold are contiguous along its range."""
    loads = [v for v in post_order([summand]) if v.op == "load" and over in v.ranges()]
    return bool(loads) and all(_is_along(v.attr[1], over) for v in loads)


def _is_along(index: Index, over: Range) -> bool:
    widths = [n for n in (8, 4, 2) if over.extent % n == 0]
    return index.coefficient(over) == 1 or any(is_wide(index, vectors_of(over, n)) for n in widths)


def _over_lanes(kernel: Kernel, over: Range, folds: Sequence[Value], summands: Sequence[Value]) -> Kernel:
    totals = [Total(f"{v.attr[0]}_{n}", v.dtype, v.attr[0]) for n, v in enumerate(folds)]
    loop = Lanes(over, tuple(Reduce(t, x) for t, x in zip(totals, summands, strict=True)))
    put = Replacement({v: read(t) for v, t in zip(folds, totals, strict=True)}.get)
    stores = map(put.statement, kernel.body)
    return Kernel(kernel.name, kernel.buffers, kernel.grid, (loop, *stores), kernel.notes)


def _is_column(summand: Value, over: Range, points: Range) -> bool:
    """True if neighboring points load neighboring elements of a fold."""
    if summand.op != "load" or summand.args or is_small_float(summand.dtype):
        return False
    return {over, points} <= summand.ranges()


def _over_rows(kernel: Kernel, over: Range, folds: Sequence[Value], summands: Sequence[Value]) -> Kernel:
    (points,) = kernel.grid
    width = next((n for n in (WARP, 16, 8) if points.extent % n == 0), points.extent)
    if width > WARP:
        return kernel
    tile, lane = Range("tile", points.extent // width), Range("k", width)
    put = Replaced({points: of(tile) * width + of(lane)})
    keeps = [Keep(f"{v.attr[0]}_{n}", v.dtype, lane, v.attr[0]) for n, v in enumerate(folds)]
    sums = tuple(Accumulate(k, put(x)) for k, x in zip(keeps, summands, strict=True))
    put.done.update((v, read(k)) for k, v in zip(keeps, folds, strict=True))
    stores = tuple(Store(s.buffer, put.index(s.index), put(s.value)) for s in kernel.body)
    body = (Rows(over, (Lanes(lane, sums),), of(over), over.extent), Lanes(lane, stores))
    return Kernel(kernel.name, kernel.buffers, (tile,), body, kernel.notes)


# -- single lanes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneLane(Lanes):
    """A loop over a single lane; its body is one reduction, at that lane's position."""

    @property
    def lane(self) -> Index:
        """Index of the lane."""
        lane = self.body[0].position
        assert lane is not None
        return lane

    @property
    def head(self) -> str:
        """First line of the printed statement."""
        return f"lane {self.range} = {self.lane}:"


def read_single_lanes(s: ScheduledKernel) -> ScheduledKernel:
    """Replace sums of a single lane that is not kept by that lane."""
    kernel = s.kernel
    values = post_order(kernel.roots())
    computed = post_order([c for v in values for i in v.indices() for c in computed_in(i)])
    in_indices = {v.attr for v in computed if v.op == "read"}
    body: list[Any] = []
    known: dict[Cell, Value] = {}
    for t in kernel.body:
        t = reads_replaced(known).statement(t) if known else t
        if not isinstance(t, Lanes):
            body.append(t)
            continue
        single = [(r, *found) for r in t.body if (found := _one_lane(r, t.range)) is not None]
        rest = tuple(r for r in t.body if not any(r is x for x, _, _ in single))
        if rest:
            body.append(replace(t, body=rest))
        for r, lane, value in single:
            if _is_of_block(kernel, t) and body and only_reduces(body[0]) and r.total not in in_indices:
                known[r.total] = Substitution({t.range: lane})(value)
            else:
                body.append(OneLane(t.range, (replace(r, value=value, position=lane),), t.note))
    return replace(s, kernel=replace(kernel, body=tuple(body)))


def only_reduces(s: Any) -> bool:
    """True for a loop that ends synchronized and stores nothing."""
    return type(s) is Lanes and all(isinstance(t, Reduce) for t in s.body)


def _is_of_block(kernel: Kernel, s: Lanes) -> bool:
    """True if each row of a loop belongs to a whole block."""
    return s.range.extent > WARP_LANES and not any(isinstance(t, Rows) for t in kernel.body)


def _one_lane(s: Any, k: Range) -> tuple[Index, Value] | None:
    """Lane and value of a sum whose other lanes are all 0."""
    if type(s) is not Reduce or s.total.op != "sum":
        return None
    v = s.value
    if v.op != "apply" or v.attr[0] is not ew.select_p or v.args[0].op != "within":
        return None
    condition, value, other = v.args
    index, low, high = condition.attr
    if other.op != "const" or other.attr != 0 or high - low != 1 or index.coefficient(k) != 1:
        return None
    if any(x.op == "read" and isinstance(x.attr, (Keep, Prefix)) for x in post_order([value])):
        return None
    lane = of(k) - index + low
    least, most = lane.bounds()
    return (lane, value) if least >= 0 and most < k.extent else None
