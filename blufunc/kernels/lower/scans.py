"""Scan kernels: columns row by row, and long rows in chunks.

Kernels, stage 6, called by ``rows.py``. In: a region whose iteration space orders its rows, or with a scan of few long
rows. Out: launches. Columns: points are tiles. Long rows: points are chunks, in two launches. The first reduces each
chunk; the second scans it from the combined chunks before. It recomputes the operand, so that all SMs have work. (G. E.
Blelloch, "Prefix Sums and Their Applications", 1990.) Scans along the lanes of a row are statements like reductions, in
``rows.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from blufunc.core.ir.jaxpr import Var
from blufunc.core.ops.elementwise import add_p, max_p, min_p
from blufunc.core.ops.special import logaddexp_p
from blufunc.kernels.fusion.iteration_space import reduces, scans
from blufunc.kernels.loopir.index import Range, flat, of, unflat
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Lanes,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Store,
    Total,
    Value,
    apply,
    converted,
    load,
    or_identity,
    read,
    within,
)
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.lower.values import Lowering

# -- columns ----------------------------------------------------------------------------------------


def scanned_rows(low: Lowering, tile: int) -> Launch:
    """The kernel of tiles of columns, each scanned down or up its rows.

    A keep accumulates each column: a scan reads it in every row, a reduction over rows at the end.
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


# -- long rows --------------------------------------------------------------------------------------


_COMBINES = {"sum": add_p, "max": max_p, "min": min_p, "logaddexp": logaddexp_p}


def scanned_chunks(low: Lowering) -> list[Launch]:
    """The kernel that reduces chunks, and the one that scans them."""
    frame, region = low.region.frame, low.region
    assert frame.lanes
    (scan,) = filter(scans, region.eqns)
    v, reverse = scan.outvars[0], scan.params["reverse"]
    chunks = max(1, min(frame.lanes, low.target.total_chunks(frame.lanes)))
    per = -(-frame.lanes // chunks)
    chunks = -(-frame.lanes // per)
    r, g, k, q = Range("r", frame.rows), Range("g", chunks), Range("k", per), Range("q", chunks)
    column = of(g) * per + of(k)
    position = of(r) * frame.lanes + column
    inside = within(column, 0, frame.lanes)

    def operand() -> tuple[Value, np.dtype, str]:
        low.start()
        low.guard = inside
        value, dtype, op = low.reduced(scan, unflat(position, v.aval.shape))
        return or_identity(inside, value, op), dtype, op

    value, dtype, op = operand()
    name = low.names.of(v, scan)
    scratch = Scratch(dtype, frame.rows * chunks)
    parts, part = Buffer(f"{name}_parts", dtype, scratch.size, True), Total(f"{name}_part", dtype, op)
    outputs, low.outputs = low.outputs, {}
    body = [Lanes(k, (Reduce(part, value),)), Store(parts, of(r) * chunks + of(g), read(part))]
    first = low.launch([r, g], body, {parts: scratch})
    first = replace(first, kernel=replace(first.kernel, name=f"{first.kernel.name}_chunks"))

    low.outputs = outputs
    value, _, _ = operand()
    found, before = Buffer(parts.name, dtype, scratch.size), Total(f"{name}_before", dtype, op)
    distance = of(q) - of(g) if reverse else of(g) - of(q)
    other = or_identity(within(distance, 1, chunks), load(found, of(r) * chunks + of(q)), op)
    prefix = Prefix(name, dtype, k, op, reverse)
    whole = apply(_COMBINES[op], (read(before), read(prefix)), {}, dtype)
    low.scans[v] = position, converted(whole, v.aval.dtype)
    stores = []
    for x, b in low.outputs.items():
        place = unflat(position, x.aval.shape)
        stores.append(Store(b, flat(place, x.aval.shape), low.at(x, place), inside))
    body = [Lanes(q, (Reduce(before, other),)), Lanes(k, (Scan(prefix, value), *stores))]
    return [first, low.launch([r, g], body, {found: scratch})]
