"""Long folds, shared among threads.

Kernels, stage 6, before ``cuda_style.py``. A fold is a loop of one thread. Where folds are long and points few, or
where a fold runs along memory, that is a poor use of a GPU. The points of such a kernel get lanes: those of the fold,
if it runs along memory; else lanes are points side by side, and the fold becomes rows, which groups of threads share.
That is what finishes a reduction over rows: each point adds up a column of the chunks' results.
"""

from __future__ import annotations

from collections.abc import Sequence

from blufunc.kernels.cuda_vectors import is_contiguous, vectors_of
from blufunc.kernels.indices import Index, Range, of
from blufunc.kernels.loopir import (
    Accumulate,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Replaced,
    Rows,
    Store,
    Substitution,
    Total,
    Value,
    post_order,
    read,
)
from blufunc.kernels.scalars import is_small_float

_LONG = 32
"""From how many values on a fold is shared."""

_FEW = 1 << 16
"""Up to how many points there are too few threads for one each."""


def with_shared_folds(kernel: Kernel) -> Kernel:
    """A kernel whose long folds are reductions over lanes or rows."""
    stores = [s for s in kernel.body if isinstance(s, Store)]
    if not kernel.grid or kernel.finish or len(stores) != len(kernel.body) or any(s.guard for s in stores):
        return kernel
    folds = _outermost_folds(kernel)
    if not folds:
        return kernel
    over = folds[0].attr[1]
    if over.extent < _LONG or any(v.attr[1].extent != over.extent for v in folds):
        return kernel
    # one range for all of them
    same = Substitution({v.attr[1]: of(over) for v in folds if v.attr[1] is not over})
    summands = [same(v.args[0]) for v in folds]
    if all(_runs_along(x, over) for x in summands):
        return _over_lanes(kernel, over, folds, summands)
    (*_, points) = kernel.grid
    if len(kernel.grid) == 1 and points.extent <= _FEW and all(_is_column(x, over, points) for x in summands):
        return _over_rows(kernel, over, folds, summands)
    return kernel


def _outermost_folds(kernel: Kernel) -> list[Value]:
    """Those in no other fold, where all of what a kernel stores can be computed of them."""
    values = post_order(kernel.roots(), lambda v: v.args if v.op != "fold" else ())
    return [v for v in values if v.op == "fold"]


def _runs_along(summand: Value, over: Range) -> bool:
    """Whether what a fold reads lies side by side in memory along its range."""
    loads = [v for v in post_order([summand]) if v.op == "load" and over in v.ranges()]
    return bool(loads) and all(_is_along(v.attr[1], over) for v in loads)


def _is_along(index: Index, over: Range) -> bool:
    if index.coefficient(over) == 1:
        return True
    for width in (n for n in (8, 4, 2) if over.extent % n == 0):
        cut = vectors_of(over, width)
        assert cut.element is not None
        if is_contiguous(index.substitute({over: of(cut.vector) * width + of(cut.element)}), cut.element):
            return True
    return False


def _over_lanes(kernel: Kernel, over: Range, folds: Sequence[Value], summands: Sequence[Value]) -> Kernel:
    totals = [Total(f"{v.attr[0]}_{n}", v.dtype, v.attr[0]) for n, v in enumerate(folds)]
    loop = Lanes(over, tuple(Reduce(t, x) for t, x in zip(totals, summands, strict=True)))
    put = Replaced({})
    put.done.update((v, read(t)) for v, t in zip(folds, totals, strict=True))
    stores = (Store(s.buffer, s.index, put(s.value)) for s in kernel.body)
    return Kernel(kernel.name, kernel.buffers, kernel.grid, (loop, *stores), kernel.notes)


def _is_column(summand: Value, over: Range, points: Range) -> bool:
    """Whether a fold adds up what points side by side read side by side."""
    if summand.op != "load" or summand.args or is_small_float(summand.dtype):
        return False
    return {over, points} <= summand.ranges()


def _over_rows(kernel: Kernel, over: Range, folds: Sequence[Value], summands: Sequence[Value]) -> Kernel:
    (points,) = kernel.grid
    width = next((n for n in (32, 16, 8) if points.extent % n == 0), points.extent)
    if width > 32:
        return kernel
    tile, lane = Range("tile", points.extent // width), Range("k", width)
    put = Replaced({points: of(tile) * width + of(lane)})
    keeps = [Keep(f"{v.attr[0]}_{n}", v.dtype, lane, v.attr[0]) for n, v in enumerate(folds)]
    sums = tuple(Accumulate(k, put(x)) for k, x in zip(keeps, summands, strict=True))
    put.done.update((v, read(k)) for k, v in zip(keeps, folds, strict=True))
    stores = tuple(Store(s.buffer, put.index(s.index), put(s.value)) for s in kernel.body)
    body = (Rows(over, (Lanes(lane, sums),), of(over), over.extent), Lanes(lane, stores))
    return Kernel(kernel.name, kernel.buffers, (tile,), body, kernel.notes)
