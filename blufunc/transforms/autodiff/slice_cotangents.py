"""Cotangents of slices, joined into the cotangent of the sliced array.

Transforms, stage 2. In: the cotangents of windows of an array. Out: the cotangent of the array. A sum of padded windows
takes time proportional to the array for each window; concatenation takes it once for all windows that do not overlap.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ops.shape import concatenate, embedded, replace
from blufunc.core.primitives.linear_ops import add_any, full

Windows = dict[tuple[tuple[int, ...], tuple[int, ...]], Any]
"""Cotangents by the starts and the shape of their windows."""


def joined(windows: Windows, shape: tuple[int, ...]) -> Any:
    """The sum of the windows in zeros of ``shape``."""
    if len(windows) == 1:
        (((starts, size), ct),) = windows.items()
        return ct if size == shape else embedded(ct, starts, shape)
    axis = next(d for d, n in enumerate(shape) if any(size[d] != n for _, size in windows))
    groups: dict[tuple[int, int], Windows] = {}
    for (starts, size), ct in windows.items():
        group = groups.setdefault((starts[axis], size[axis]), {})
        group[replace(starts, axis, 0), size] = ct
    total = None
    for layer in _layers(sorted(groups)):
        blocks = [joined(groups[lo, n], replace(shape, axis, n)) for lo, n in layer]
        part = _along(axis, layer, blocks, shape)
        total = part if total is None else add_any(total, part)
    return total


def _layers(intervals: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Sorted intervals ``(start, length)``, in the fewest lists without overlaps."""
    layers: list[list[tuple[int, int]]] = []
    for lo, n in intervals:
        for layer in layers:
            if layer[-1][0] + layer[-1][1] <= lo:
                layer.append((lo, n))
                break
        else:
            layers.append([(lo, n)])
    return layers


def _along(axis: int, layer: list[tuple[int, int]], blocks: list[Any], shape: tuple[int, ...]) -> Any:
    """Blocks in their places along ``axis``, with zeros between them."""
    if len(layer) == 1:
        starts = replace((0,) * len(shape), axis, layer[0][0])
        return blocks[0] if layer[0][1] == shape[axis] else embedded(blocks[0], starts, shape)
    parts, end = [], 0
    for (lo, n), block in [*zip(layer, blocks, strict=True), ((shape[axis], 0), None)]:
        if lo > end:
            parts.append(full(replace(shape, axis, lo - end), 0, blocks[0].aval.dtype))
        if block is not None:
            parts.append(block)
        end = lo + n
    return concatenate(parts, axis)
