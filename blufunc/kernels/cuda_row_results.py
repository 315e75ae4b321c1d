"""What is computed of a row that lies in shared memory, in the place of the row.

Kernels, stage 6, below ``cuda_rereads.py``. Several loops read a row that has been copied to shared memory, and compute
the same of it again, or of it and others that lie in memory: logits of their parts and scales, the gradient of which
the largest is found first. A loop that computes a value which later ones need, and through which alone they need the
row, stores it where the row's own elements were: each thread for the lanes that it reads, so that nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from blufunc.kernels.cuda_row_passes import OneLane
from blufunc.kernels.cuda_vectors import ValuesReplaced
from blufunc.kernels.indices import Index, Range
from blufunc.kernels.loopir import (
    BODIES,
    Buffer,
    Lanes,
    Store,
    Value,
    dependencies,
    load,
    post_order,
    values_of,
)
from blufunc.kernels.scalars import cost

_LEAST_COST = 3
"""Operations from which on a value is stored rather than computed again."""


def with_results_kept(
    body: Sequence[Any], lanes: Range, row: Buffer, place: Index, of_row: Callable[[Value], bool]
) -> list[Any]:
    """The statements of a point, in which loops find results of earlier ones in the place of a row.

    Args:
      lanes: of the row.
      row, place: the copy, and where it has the element of each lane.
      of_row: whether a load reads the row, or another one.
    """
    out = list(body)
    loops = [n for n, s in enumerate(body) if isinstance(s, Lanes) and s.range is lanes]
    if any(isinstance(s, OneLane) for s in body):
        return out  # it may read the row
    kept = load(row, place)
    for at, n in enumerate(loops[:-1]):
        later = loops[at + 1 :]
        found = _through_all(out[n], [out[m] for m in later], row, lambda v: v is kept or of_row(v))
        if found is None:
            continue
        out[n] = replace(out[n], body=(*out[n].body, Store(row, place, found)))
        put = ValuesReplaced({found: kept})
        for m in later:
            out[m] = put.statement(out[m])
    return out


def _through_all(
    loop: Lanes, later: Sequence[Lanes], row: Buffer, of_row: Callable[[Value], bool]
) -> Value | None:
    """The last value that a loop computes through which alone later ones need rows, if it is worth its place."""
    here = set(post_order(_values_in([loop])))
    wanted = _values_in(later)
    if any(v.op in BODIES for v in post_order(wanted)):
        return None  # not all that is in there belongs to a lane
    for v in reversed(post_order(wanted)):
        fits = v in here and v.op == "apply" and v.dtype == row.dtype
        if fits and any(of_row(x) for x in post_order([v])) and not any(map(of_row, _without(wanted, v))):
            operations = sum(cost(x.attr[0]) for x in post_order([v]) if x.op == "apply")
            return v if operations >= _LEAST_COST else None
    return None


def _values_in(loops: Iterable[Lanes]) -> list[Value]:
    return [v for s in loops for t in s.body for v in values_of(t)]


def _without(roots: Sequence[Value], known: Value) -> list[Value]:
    """What is computed for values where one is known."""
    return post_order(
        [v for v in roots if v is not known], lambda v: [d for d in dependencies(v) if d is not known]
    )
