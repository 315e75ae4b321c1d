"""Loop splitting: divide the innermost loop where its guards change.

Kernels, stage 6, below ``renderer.py``. In: a kernel without lanes. Out: kernels over parts of its innermost range, in
which concatenations and pads have no branches left. A compiler vectorizes each part, but no loop with conditional
loads.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops.elementwise import and_p, select_p
from blufunc.kernels.loopir.index import Range, Remainder, of
from blufunc.kernels.loopir.ir import Kernel, Substitution, Value, const, load, post_order

_MOST_PARTS = 4
_LEAST = 8
"""Minimum iterations of a part: one vector of float32."""


def split_innermost(kernel: Kernel) -> list[Kernel]:
    """Kernels over parts of the innermost range; the kernel itself if nothing splits.

    Parts are intervals. Where guards select every n-th element, parts are residue classes modulo n.
    """
    if not kernel.grid:
        return [kernel]
    *outer, inner = kernel.grid
    ends, steps = {0, inner.extent}, {1}
    for v in post_order(kernel.roots()):
        if v.op != "within":
            continue
        index, low, high = v.attr
        start = index - of(inner)
        if not start.terms:
            ends.update(e for e in (low - start.constant, high - start.constant) if 0 < e < inner.extent)
        for atom in index.terms:
            if isinstance(atom, Remainder) and not (atom.index - of(inner)).terms:
                steps.add(atom.divisor)
    step = max(steps)
    if step > 1:
        parts = [(Range(inner.name, inner.extent // step), n) for n in range(step)]
    else:
        parts = [(Range(inner.name, high - low), low) for low, high in pairwise(sorted(ends))]
    few = 2 <= len(parts) <= _MOST_PARTS and all(part.extent >= _LEAST for part, _ in parts)
    if not few or inner.extent % step:
        return [kernel]
    kernels = []
    for part, first in parts:
        put = _Resolved({inner: of(part) * step + first})
        kernels.append(replace(kernel, grid=(*outer, part), body=tuple(map(put.statement, kernel.body))))
    return kernels


class _Resolved(Substitution):
    """Substitute indices for loop variables and fold conditions that bounds decide."""

    def _rebuilt(self, v: Value) -> Value:
        v = super()._rebuilt(v)
        if v.op == "within":
            index, low, high = v.attr
            least, most = index.bounds()
            if low <= least and most < high:
                return const(True, dtypes.bool_)
            return const(False, dtypes.bool_) if most < low or high <= least else v
        if v.op == "load" and v.args and (guard := _known(v.args[0])) is not None:
            return load(*v.attr) if guard else const(np.zeros((), v.dtype)[()], v.dtype)
        if v.op == "apply":
            return _folded(v)
        return v


def _folded(v: Value) -> Value:
    """Fold a select with a known condition, or a conjunction with a known operand."""
    prim: Any = v.attr[0]
    first = _known(v.args[0]) if v.args else None
    if prim is select_p and first is not None:
        return v.args[1] if first else v.args[2]
    if prim is and_p and dtypes.is_bool(v.dtype):
        for mine, other in (v.args, v.args[::-1]):
            known = _known(mine)
            if known is not None:
                return other if known else mine
    return v


def _known(v: Value) -> bool | None:
    return bool(v.attr) if v.op == "const" else None
