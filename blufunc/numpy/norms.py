"""Norms of vectors and matrices.

Face, part of ``bnp.linalg``. Which norm is a static choice (``ord``), as is which axes it is taken over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, static_number
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.common import real_dtype
from blufunc.core.ops.linalg.spectral import svd
from blufunc.core.primitives.linear_ops import reduce_sum
from blufunc.numpy import elementwise, reductions
from blufunc.numpy.manipulation import expand_dims, moveaxis
from blufunc.numpy.promotion import inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

_MATRIX_ORDERS = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)


def norm(
    x: ArrayLike, ord: Any = None, axis: int | Sequence[int] | None = None, keepdims: bool = False
) -> Array:
    """A norm of vectors or matrices.

    Args:
      x: an array; integers and booleans become float32.
      ord: for vectors any number, as of ``vector_norm``; for matrices as of ``matrix_norm``; None is the root of the
        sum of squares of either.
      axis: one axis for vectors, two for matrices; None is all axes of x, which then has one or two unless ``ord`` is
        None too.
      keepdims: whether the axes stay, with size 1.
    """
    x = inexact(x, "norm")
    if axis is None:
        if ord is None:
            return _root_of_squares(x, tuple(range(x.aval.ndim)), keepdims)
        axes = tuple(range(x.aval.ndim))
    else:
        axes = _axes(axis, x.aval.ndim, "norm")
    if len(axes) == 1:
        return _vector(x, axes, static_number(2 if ord is None else ord, "norm", "ord"), keepdims)
    if len(axes) == 2:
        return _matrix(x, axes, "fro" if ord is None else ord, keepdims, "norm")
    raise errors.ShapeError(
        f"norm of {x.aval} over {len(axes)} axes.",
        where=source.here(),
        fix="give axis=, one axis for norms of vectors or two for those of matrices; or leave ord out",
    )


def vector_norm(
    x: ArrayLike, /, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, ord: Any = 2
) -> Array:
    """``sum(abs(x)**ord)**(1/ord)`` over one axis, several, or all (None).

    ``ord`` may be any number, infinity (the largest absolute value), minus infinity (the smallest), or 0 (the count of
    elements are not 0).
    """
    x = inexact(x, "vector_norm")
    axes = tuple(range(x.aval.ndim)) if axis is None else _axes(axis, x.aval.ndim, "vector_norm")
    return _vector(x, axes, static_number(ord, "vector_norm", "ord"), keepdims)


def matrix_norm(x: ArrayLike, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """A norm of the matrices in the last two axes.

    ``ord`` is ``"fro"``: the root of the sum of squares; ``"nuc"``: the sum of singular values; 2 or -2: the largest or
    smallest of them; 1 or -1: the largest or smallest sum of absolute values in a column; inf or -inf: in a row.
    """
    x = inexact(x, "matrix_norm")
    if x.aval.ndim < 2:
        raise errors.ShapeError(
            f"matrix_norm of {x.aval}, which is no matrix.", where=source.here(), fix="use vector_norm"
        )
    return _matrix(x, (x.aval.ndim - 2, x.aval.ndim - 1), ord, keepdims, "matrix_norm")


def _axes(axis: Any, ndim: int, name: str) -> tuple[int, ...]:
    """Distinct axes in the order given: for matrices, that of rows first."""
    axes = tuple([axis_in(a, ndim, name) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))])
    if len(set(axes)) != len(axes):
        raise errors.ValueRangeError(
            f"{name}: axis {axis} names an axis twice.", where=source.here(), fix="name each axis once"
        )
    return axes


def _root_of_squares(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    squares = ew.square(x)
    if dtypes.is_complex(x.aval.dtype):
        squares = ew.add(ew.square(ew.real(x)), ew.square(ew.imag(x)))
    return ew.sqrt(reductions.sum(squares, axes, keepdims=keepdims))


def _vector(x: Array, axes: tuple[int, ...], ord: float, keepdims: bool) -> Array:
    if ord == 2:
        return _root_of_squares(x, axes, keepdims)
    if ord == 0:
        count = reductions.count_nonzero(x, axes, keepdims=keepdims)
        return ew.convert(count, real_dtype(x.aval.dtype))
    size = elementwise.abs(x)
    if ord == math.inf:
        return reductions.max(size, axes, keepdims=keepdims)
    if ord == -math.inf:
        return reductions.min(size, axes, keepdims=keepdims)
    if ord == 1:
        return reductions.sum(size, axes, keepdims=keepdims)
    total = reductions.sum(elementwise.power(size, float(ord)), axes, keepdims=keepdims)
    return elementwise.power(total, 1 / ord)


def _matrix(x: Array, axes: tuple[int, ...], ord: Any, keepdims: bool, name: str) -> Array:
    known = isinstance(ord, (str, int, float)) and ord in _MATRIX_ORDERS
    if not known:
        raise errors.ValueRangeError(
            f"{name}: {ord!r:.60} is not a norm of matrices.",
            where=source.here(),
            why=f"there are {', '.join(map(repr, _MATRIX_ORDERS))}.",
            fix="choose one of them, or use vector_norm",
        )
    if ord == "fro":
        return _root_of_squares(x, axes, keepdims)
    if ord == "nuc" or abs(ord) == 2:
        s = svd(moveaxis(x, axes, (-2, -1)), full_matrices=False, compute_uv=False)
        last = (s.aval.ndim - 1,)
        result = reduce_sum(s, last) if ord == "nuc" else _extreme(s, last, ord > 0)
    else:
        summed, chosen = axes if abs(ord) == 1 else axes[::-1]
        sums = reduce_sum(elementwise.abs(x), (summed,))
        result = _extreme(sums, (chosen - (chosen > summed),), ord > 0)
    return expand_dims(result, tuple(sorted(axes))) if keepdims else result


def _extreme(x: Array, axes: tuple[int, ...], largest: bool) -> Array:
    return reductions.max(x, axes) if largest else reductions.min(x, axes)
