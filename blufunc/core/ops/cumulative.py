"""Cumulative sum, product, extrema and logsumexp along one axis.

Core operations. ``reverse`` runs from the end of the axis to its front. The sum is linear; the others are
differentiated by a prefix scan of (value, tangent) pairs, in log2(length) steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes
from blufunc.core.ir.axes import static_int
from blufunc.core.ops.elementwise import add, div, eq, exp, gt, is_finite, log, max, mul, named, select, sub
from blufunc.core.ops.prefix import Elements, prefix_scan
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import add_any, full
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import FIRST, along
from blufunc.core.primitives.tangents import Zero, zero

if TYPE_CHECKING:
    from blufunc.core.ir.signatures import AlongAxis


class Cumulative(Primitive):
    """A kind: element i of the result combines the elements up to i along ``axis``.

    Args:
      accumulate: the ufunc that combines two elements.
      types: a key of ``kinds.TYPES``.
      monoid: what combines two elements, as kernels know it.
      autocast: its class in mixed precision.
    """

    kind, fresh, widens = "cumulative", True, True

    shard = staticmethod(along("axis"))

    def __init__(self, name: str, accumulate: np.ufunc, types: str, monoid: str, autocast: str):
        super().__init__(name)
        self.accumulate, self.types = accumulate, types
        self.monoid, self.autocast_class = monoid, autocast

    def impl(self, x, *, axis, reverse):
        dtype = x.dtype
        if dtype.itemsize <= 2 and dtypes.is_floating(dtype):
            x = x.astype(np.float32)
        if reverse:
            x = np.flip(x, axis)
        out = self.accumulate.accumulate(x, axis=axis, dtype=x.dtype)
        if reverse:
            out = np.flip(out, axis)
        return out if out.dtype == dtype else out.astype(dtype)

    def abstract(self, x, *, axis, reverse):
        check_types(self.name, self.types, x)
        if not 0 <= axis < x.ndim:
            raise errors.ShapeError(f"{self.name} of {x} along axis {axis}, which it does not have.")
        return x.strong()

    def jvp(self, primals, tangents, *, axis, reverse):
        (x,), (t,) = primals, tangents
        out = self.bind(x, axis=axis, reverse=reverse)
        if t.__class__ is Zero:
            return out, zero(out.aval)
        return out, self.tangent(x, t, axis, reverse)

    def tangent(self, x: Any, t: Any, axis: int, reverse: bool) -> Any:
        """The tangent of the result."""
        raise self._missing("jvp")

    transpose = unsupported("it is not linear: it is transposed through its derivative")

    def batch(self, axis_data, args, dims, *, axis, reverse):
        (x,), (d,) = args, dims
        return self.bind(x, axis=axis + (axis >= d), reverse=reverse), d


class _CumSum(Cumulative):
    """The cumulative sum, which is linear."""

    linear = FIRST

    def tangent(self, x, t, axis, reverse):
        return self.bind(t, axis=axis, reverse=reverse)

    def transpose(self, ct, x, *, axis, reverse):
        x.add(self.bind(ct, axis=axis, reverse=not reverse))


class _Scanned(Cumulative):
    """Differentiated by a prefix scan of (value, tangent) pairs with ``combine``."""

    def __init__(self, name: str, accumulate: np.ufunc, types: str, monoid: str, combine: Callable):
        super().__init__(name, accumulate, types, monoid, "float32")
        self.combine = combine

    def tangent(self, x, t, axis, reverse):
        return prefix_scan(self.combine, [x, t], axis, reverse)[1]


class _CumExtremum(Cumulative):
    """Cumulative maximum or minimum; tied elements share the derivative equally."""

    def __init__(self, name: str, accumulate: np.ufunc, monoid: str, later_wins: Callable):
        super().__init__(name, accumulate, "ordered", monoid, "widest")
        self.later_wins = later_wins

    def tangent(self, x, t, axis, reverse):
        # elements: the extremum, the sum of the tangents of ties, and their count
        def combine(a: Elements, b: Elements) -> Elements:
            (va, ta, na), (vb, tb, nb) = a, b
            later, tie = self.later_wins(vb, va), eq(va, vb)
            value = select(later, vb, va)
            tangent = select(later, tb, select(tie, add_any(ta, tb), ta))
            return [value, tangent, select(later, nb, select(tie, add(na, nb), na))]

        _, total, count = prefix_scan(combine, [x, t, full(x.aval.shape, 1, x.dtype)], axis, reverse)
        return div(total, count)


def _times(a: Elements, b: Elements) -> Elements:
    (x, tx), (y, ty) = a, b
    return [mul(x, y), add_any(mul(tx, y), mul(x, ty))]


def _log_add_exp(a: Elements, b: Elements) -> Elements:
    (x, tx), (y, ty) = a, b
    top = max(x, y)
    top = select(is_finite(top), top, 0.0)  # the sum of -inf and -inf is -inf, not NaN
    ex, ey = exp(sub(x, top)), exp(sub(y, top))
    total = add(ex, ey)
    safe = select(eq(total, 0.0), 1.0, total)
    return [add(log(total), top), add_any(mul(tx, div(ex, safe)), mul(ty, div(ey, safe)))]


cumsum_p = _CumSum("cumsum", np.add, "number", "sum", "float32")
cumprod_p = _Scanned("cumprod", np.multiply, "number", "prod", _times)
cummax_p = _CumExtremum("cummax", np.maximum, "max", lambda later, earlier: gt(later, earlier))
cummin_p = _CumExtremum("cummin", np.minimum, "min", lambda later, earlier: gt(earlier, later))
cumlogsumexp_p = _Scanned("cumlogsumexp", np.logaddexp, "float", "logaddexp", _log_add_exp)

# -- functions -------------------------------------------------------------------------------------


def _cumulative(prim: Primitive, doc: str) -> AlongAxis:
    def function(operand: Any, axis: int = 0, reverse: bool = False) -> Any:
        return prim.bind(lift(operand), axis=static_int(axis, prim.name, "axis"), reverse=bool(reverse))

    return named(function, prim.name, doc)


cumsum = _cumulative(cumsum_p, "Sums up to each element along ``axis``; half precisions add in float32.")
cumprod = _cumulative(
    cumprod_p, "Products up to each element along ``axis``; half precisions multiply in float32."
)
cummax = _cumulative(cummax_p, "The largest element so far along ``axis``; NaN from the first NaN on.")
cummin = _cumulative(cummin_p, "The smallest element so far along ``axis``; NaN from the first NaN on.")
cumlogsumexp = _cumulative(cumlogsumexp_p, "``log(cumsum(exp(x)))`` along ``axis``, without overflow.")
