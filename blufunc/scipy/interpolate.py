"""``scipy.interpolate``: interpolation on rectangular grids.

A face above ``blufunc.numpy``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import Array
from blufunc.numpy.promotion import inexact
from blufunc.tree_util import register_pytree_node_class

__all__ = ["RegularGridInterpolator"]

_METHODS = ("linear", "nearest")


@register_pytree_node_class
class RegularGridInterpolator:
    """A function given by values on a grid; a pytree of the grid and the values.

    Args:
      points: for each axis, the increasing coordinates of the grid.
      values: (n_1, ..., n_k, ...), the values there; further axes are those of the results.
      method: ``"linear"`` or ``"nearest"``.
      bounds_error: False: points are not known while a function is traced, and none is an error.
      fill_value: what the function is outside the grid; None extrapolates.
    """

    def __init__(
        self,
        points: Sequence[Any],
        values: Any,
        method: str = "linear",
        bounds_error: bool = False,
        fill_value: Any = np.nan,
    ):
        _check_method(method)
        if bounds_error:
            raise errors.UnsupportedError(
                "RegularGridInterpolator(bounds_error=True).",
                where=source.here(),
                why="no error depends on values, which are unknown while a function is traced.",
                fix="bounds_error=False, and fill_value=bnp.nan marks points outside",
            )
        values = bnp.asarray(values)
        if len(points) > values.ndim:
            raise errors.ShapeError(
                f"RegularGridInterpolator: {len(points)} axes of points for values {values.aval}.",
                where=source.here(),
                fix="give points for the leading axes of values",
            )
        self.grid = tuple([bnp.asarray(p) for p in points])
        self.values = inexact(values, "RegularGridInterpolator")
        self.method, self.bounds_error, self.fill_value = method, bounds_error, fill_value
        for d, (p, n) in enumerate(zip(self.grid, values.shape, strict=False)):
            if p.ndim != 1 or p.shape[0] != n:
                raise errors.ShapeError(
                    f"RegularGridInterpolator: the points of axis {d} are {p.aval}, the values {values.aval}.",
                    where=source.here(),
                    fix="one coordinate, in increasing order, for each value along the axis",
                )
            if isinstance(points[d], np.ndarray) and not np.all(np.diff(points[d]) > 0):
                raise errors.ValueRangeError(
                    f"RegularGridInterpolator: the points of axis {d} do not increase.",
                    where=source.here(),
                    fix="sort them, and the values with them",
                )

    def __call__(self, xi: Any, method: str | None = None) -> Array:
        """The values at points (..., k), or at a tuple of k arrays of coordinates."""
        method = method or self.method
        _check_method(method)
        k = len(self.grid)
        if isinstance(xi, tuple):
            xi = bnp.stack(bnp.broadcast_arrays(*[bnp.asarray(x) for x in xi]), -1)
        xi = inexact(bnp.asarray(xi), "RegularGridInterpolator")
        if k == 1 and xi.ndim == 1:
            xi = xi[:, None]
        if not xi.ndim or xi.shape[-1] != k:
            raise errors.ShapeError(
                f"RegularGridInterpolator with {k} axes at points {xi.aval}.",
                where=source.here(),
                fix=f"the last axis of the points has {k} coordinates",
            )
        flat = xi.reshape(-1, k)
        outside = bnp.zeros(flat.shape[0], bool)
        cells, fractions = [], []
        for d, p in enumerate(self.grid):
            x = flat[:, d]
            i = bnp.clip(bnp.searchsorted(p, x) - 1, 0, max(p.shape[0] - 2, 0))
            width = p[bnp.minimum(i + 1, p.shape[0] - 1)] - p[i]
            fractions.append(bnp.where(width == 0, 0, (x - p[i]) / bnp.where(width == 0, 1, width)))
            cells.append(i)
            outside = outside | (x < p[0]) | (x > p[-1])
        tail = self.values.ndim - k
        if method == "nearest":
            at = [bnp.where(f <= 0.5, i, i + 1) for i, f in zip(cells, fractions, strict=True)]
            result = self.values[tuple(at)]
        else:
            parts = []
            for corner in itertools.product((0, 1), repeat=k):
                ws = [f if upper else 1 - f for upper, f in zip(corner, fractions, strict=True)]
                weight = math.prod(ws[1:], start=ws[0]).reshape(-1, *[1] * tail)
                at = [i + upper for upper, i in zip(corner, cells, strict=True)]
                parts.append(self.values[tuple(at)] * weight)
            result = sum(parts[1:], start=parts[0])
        if self.fill_value is not None:
            result = bnp.where(outside.reshape(-1, *[1] * tail), self.fill_value, result)
        return result.reshape(*xi.shape[:-1], *self.values.shape[k:])

    def tree_flatten(self):
        """Children and static data, as a pytree node."""
        return (self.grid, self.values, self.fill_value), (self.method, self.bounds_error)

    @classmethod
    def tree_unflatten(cls, options, children):
        """The inverse of ``tree_flatten``."""
        made = object.__new__(cls)
        made.grid, made.values, made.fill_value = children
        made.method, made.bounds_error = options
        return made


def _check_method(method: Any) -> None:
    if method not in _METHODS:
        raise errors.ValueRangeError(
            f"RegularGridInterpolator: {method!r:.60} is not a method.",
            where=source.here(),
            fix="method='linear' or 'nearest'",
        )
