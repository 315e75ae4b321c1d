"""Kernels that reduce everything to a number: points are chunks of all elements.

Kernels, stage 6, below ``region.py``. In: a region whose frame is a total. Out: a launch whose finish adds up the
chunks.
"""

from __future__ import annotations

from blufunc.kernels.loopir.index import Range, flat, of, unflat
from blufunc.kernels.loopir.ir import (
    Reduce,
    Store,
    Total,
    const,
    identity,
    read,
    within,
)
from blufunc.kernels.loopir.launch import Launch
from blufunc.kernels.lower.kernel import Lowering
from blufunc.kernels.lower.row_loops import in_generations
from blufunc.kernels.lower.scalars import choose


def in_total(low: Lowering) -> Launch:
    """Every chunk of points adds up its own; when all have, the chunks are added up."""
    size = low.region.frame.size
    chunks = max(1, min(size, low.target.total_chunks(size)))
    per = -(-size // chunks)
    chunks = -(-size // per)
    g, k = Range("g", chunks), Range("k", per)
    low.start()
    position = of(g) * per + of(k)
    inside = within(position, 0, size)
    low.guard = inside
    reduces, part_stores = [], []
    for e in low.region.eqns:
        v = e.outvars[0]
        if low.region.roles[v] != "total":
            low.at(v, unflat(position, v.aval.shape))
            continue
        value, dtype, op = low.reduced(e, unflat(position, e.invars[0].aval.shape))
        if inside is not None:
            value = choose(inside, value, const(identity(op, dtype), dtype), dtype)
        total = Total(f"{low.names.of(v, e)}_part", dtype, op)
        reduces.append(Reduce(total, value))
        part_stores.append(Store(low.part(v, dtype, chunks), of(g), read(total)))
    stores = []
    for v, b in low.outputs.items():
        if low.region.roles.get(v) == "element":
            place = unflat(position, v.aval.shape)
            stores.append(Store(b, flat(place, v.aval.shape), low.at(v, place), inside))
    return low.launch([g], in_generations(reduces, stores, part_stores, k))
