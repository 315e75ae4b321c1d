"""Kernels that scan columns: rows follow one another, and each column combines what it has met so far.

Kernels, stage 6, below ``rows.py``. In: a region whose frame has an order of rows. Out: a launch, whose points
are tiles of columns. (Scans along the lanes are statements of a row like reductions, and stand in ``rows.py``.)
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir.jaxpr import Var
from blufunc.kernels.fusion.iteration_space import reduces, scans
from blufunc.kernels.loopir.index import Range, flat, of, unflat
from blufunc.kernels.loopir.ir import Accumulate, Keep, Lanes, Rows, Store, read
from blufunc.kernels.loopir.launch import Launch
from blufunc.kernels.lower.kernel import Lowering
from blufunc.kernels.lower.scalars import converted


def scanned_rows(low: Lowering, tile: int) -> Launch:
    """Tiles of columns, each of which goes down its rows, or up.

    A keep is what a column has combined so far: a scan reads it in every row, a reduction over rows at the end.
    """
    frame, region = low.region.frame, low.region
    assert frame.lanes and frame.outer
    low.start()
    rows = frame.rows // frame.outer
    a, t, j, k = (
        Range("a", frame.outer),
        Range("t", frame.lanes // tile),
        Range("j", rows),
        Range("k", tile),
    )
    column = of(t) * tile + of(k)
    row = of(a) * rows + (of(j) if frame.order == "down" else of(j) * -1 + (rows - 1))
    position = row * frame.lanes + column
    grown, sums = [], dict[Var, Keep]()
    for e in region.eqns:
        v = e.outvars[0]
        if not scans(e) and not reduces(e.prim):
            low.at(v, unflat(position, v.aval.shape))
            continue
        value, dtype, op = low.reduced(e, unflat(position, e.invars[0].aval.shape))
        keep = Keep(f"{low.names.of(v, e)}_so_far", dtype, k, op)
        grown.append(Accumulate(keep, value))
        if scans(e):
            low.scans[v] = position, converted(read(keep), v.aval.dtype)
        else:
            sums[v] = keep
    stores, results = [], []
    for v, b in low.outputs.items():
        if v in sums:
            place = of(a) * frame.lanes + column
            results.append(Store(b, place, converted(read(sums[v]), b.dtype)))
        else:
            place = unflat(position, v.aval.shape)
            stores.append(Store(b, flat(place, v.aval.shape), low.at(v, place)))
    body: list[Any] = [Rows(j, (Lanes(k, (*grown, *stores)),), of(j), rows)]
    body += [Lanes(k, tuple(results))] if results else []
    return low.launch([x for x in (a, t) if x.extent > 1] or [t], body)
