"""Kernels that do the same to arrays of different sizes: a renderer may write them as one launch.

Kernels, between lowering and rendering. An optimiser's update is the same few operations on every parameter; launched
one by one, small arrays cost more in launches than in work. In: kernels. Out: which of them have equal structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.kernels.indices import Index, Range
from blufunc.kernels.loopir import Buffer, Kernel, Store, Value, post_order


def structure(kernel: Kernel) -> tuple | None:
    """What a kernel does, apart from the names and sizes of its arrays; None where it is not of a kind to be grouped.

    Those are kernels over one range that store, at each point, values computed of elements at that point and of
    elements whose place is fixed.
    """
    if len(kernel.grid) != 1 or kernel.finish or not all(isinstance(s, Store) for s in kernel.body):
        return None
    (points,) = kernel.grid
    buffers = {b: n for n, b in enumerate(kernel.buffers)}
    numbers: dict[Value, int] = {}
    parts: list[Any] = [tuple((b.dtype, b.written) for b in kernel.buffers)]
    for v in post_order(kernel.roots()):
        attr = _attribute(v, buffers, points)
        if attr is None:
            return None
        parts.append((v.op, attr, v.dtype, tuple(numbers[a] for a in v.args)))
        numbers[v] = len(numbers)
    for s in kernel.body:
        place = _place(s.index, points)
        if place is None:
            return None
        guard = None if s.guard is None else numbers[s.guard]
        parts.append((buffers[s.buffer], place, numbers[s.value], guard))
    return tuple(parts)


def same_structure(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels do the same, to arrays that may be of different sizes."""
    found = structure(a)
    return found is not None and found == structure(b)


def grouped(kernels: Sequence[Kernel]) -> list[list[int]]:
    """The positions of kernels, those of equal structure together; groups in the order of their first."""
    groups: dict[Any, list[int]] = {}
    for n, kernel in enumerate(kernels):
        found = structure(kernel)
        groups.setdefault((n,) if found is None else (None, found), []).append(n)
    return list(groups.values())


def _place(index: Index, points: Range) -> tuple | None:
    """An index that is the point, or fixed."""
    if not index.terms:
        return ("fixed", index.constant)
    return ("point",) if index.terms == {points: 1} and index.constant == 0 else None


def _attribute(v: Value, buffers: dict[Buffer, int], points: Range) -> tuple | None:
    """The attribute of a value, apart from names and sizes."""
    if v.op == "const":
        return (np.asarray(v.attr).tobytes(),)
    if v.op == "load":
        place = _place(v.attr[1], points)
        return None if place is None else (buffers[v.attr[0]], *place)
    if v.op == "apply":
        prim, params = v.attr
        return (prim, tuple(sorted((k, str(x)) for k, x in params.items())))
    if v.op == "number":
        return _place(v.attr, points)
    return None
