"""``scipy.ndimage``: interpolation of arrays at coordinates.

A face above ``blufunc.numpy``. Outside the array, indices are mapped into it by the mode, so that a sample between two
elements is a weighted sum of gathers, differentiable in the array and in the coordinates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.numpy.promotion import as_value

__all__ = ["map_coordinates"]


def _mirrored(i: Array, n: int) -> Array:
    """Reflection about the centres of the first and last element."""
    period = max(2 * (n - 1), 1)
    i = bnp.mod(i, period)
    return bnp.minimum(i, period - i) if n > 1 else bnp.zeros_like(i)


def _reflected(i: Array, n: int) -> Array:
    """Reflection about the outer edges of the first and last element."""
    i = bnp.mod(i, 2 * n)
    return bnp.minimum(i, 2 * n - 1 - i)


_MODES: dict[str, Callable[[Array, int], Array]] = {
    "constant": lambda i, n: bnp.clip(i, 0, n - 1),  # and masked
    "nearest": lambda i, n: bnp.clip(i, 0, n - 1),
    "wrap": bnp.mod,
    "mirror": _mirrored,
    "reflect": _reflected,
}


def map_coordinates(
    input: Any, coordinates: Sequence[Any], order: int, mode: str = "constant", cval: Any = 0.0
) -> Array:
    """Interpolate an array at coordinates.

    Args:
      input: an array of rank r.
      coordinates: r arrays of one shape (or that broadcast), in units of elements; (r, ...) likewise.
      order: 0 (the nearest element) or 1 (linear).
      mode: how the array continues outside: ``"constant"`` (``cval``), ``"nearest"``, ``"wrap"`` (period n),
        ``"mirror"`` and ``"reflect"`` (about the centres or the edges of the outermost elements).
      cval: the value outside for ``"constant"``.
    Returns:
      an array of the coordinates' shape and the input's dtype; integers are rounded.
    """
    x = as_value(input, "map_coordinates")
    points = [bnp.asarray(c) for c in coordinates]
    if len(points) != x.aval.ndim:
        raise errors.ShapeError(
            f"map_coordinates of {x.aval} at {len(points)} coordinates.",
            where=source.here(),
            fix="give an array of coordinates for each axis",
        )
    if mode not in _MODES:
        raise errors.UnsupportedError(
            f"map_coordinates: {mode!r:.60} is not a mode.",
            where=source.here(),
            fix=f"one of {', '.join(_MODES)}",
        )
    if order not in (0, 1):
        raise errors.UnsupportedError(
            f"map_coordinates of order {order!r:.60}.", where=source.here(), fix="order=0 or order=1"
        )
    # along each axis: pairs of indices and weights
    axes = [_nodes(c, order) for c in points]
    inside = _MODES[mode]
    parts = []
    for corner in itertools.product(*axes):
        value = x[tuple([inside(i, n) for (i, _), n in zip(corner, x.aval.shape, strict=True)])]
        if mode == "constant":
            valid = [(i >= 0) & (i < n) for (i, _), n in zip(corner, x.aval.shape, strict=True)]
            if valid:
                value = bnp.where(bnp.all(bnp.stack(bnp.broadcast_arrays(*valid)), 0), value, cval)
        weights = [w for _, w in corner if w is not None]
        parts.append(math.prod(weights[1:], start=weights[0]) * value if weights else value)
    total = sum(parts[1:], start=parts[0])
    if dtypes.is_integer(x.aval.dtype) and not dtypes.is_integer(total.dtype):
        total = bnp.rint(total)
    shape = bnp.broadcast_shapes(*[c.shape for c in points])
    return bnp.broadcast_to(total.astype(x.aval.dtype), shape)


def _nodes(c: Array, order: int) -> list[tuple[Array, Array | None]]:
    """The elements that a coordinate reads, and their weights (None: 1)."""
    if dtypes.is_integer(c.aval.dtype):
        return [(c, None)]
    if order == 0:
        return [(bnp.rint(c).astype("int32"), None)]
    low = bnp.floor(c)
    upper = c - low
    i = low.astype("int32")
    return [(i, 1 - upper), (i + 1, upper)]
