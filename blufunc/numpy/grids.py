"""Index grids: diagonals, triangles, flat positions, ``mgrid``, ``r_``, ``s_``.

Face over ``creation`` and joins. Sizes are static, so positions are made once, as int32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import sequence
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.primitives.linear_ops import reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import arange, asarray, linspace, meshgrid, ones, tril_indices, triu_indices
from blufunc.numpy.joining import concatenate, stack
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.picking import nonzero
from blufunc.numpy.promotion import (
    as_value,
    cast,
    constant,
    dtype_of,
    promote_dtypes,
    shape_of,
    value_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

# -- positions -------------------------------------------------------------------------------------


def diag_indices(n: int, ndim: int = 2) -> tuple[Array, ...]:
    """Positions, int32, of the diagonal of an array of ``ndim`` axes of size ``n``."""
    (n,), (rank,) = shape_of((n,), "diag_indices"), shape_of((ndim,), "diag_indices")
    return (arange(n),) * rank


def diag_indices_from(arr: ArrayLike) -> tuple[Array, ...]:
    """The positions, int32, of the main diagonal of ``arr``, whose axes have one size."""
    s = as_value(arr, "diag_indices_from").aval.shape
    if len(s) < 2 or len(set(s)) > 1:
        raise errors.ShapeError(
            f"diag_indices_from of shape {s}.", where=source.here(), fix="two axes or more, of one size"
        )
    return diag_indices(s[0], len(s))


def _matrix_shape(x: Any, name: str) -> tuple[int, ...]:
    s = as_value(x, name).aval.shape
    if len(s) != 2:
        raise errors.ShapeError(f"{name} of shape {s}.", where=source.here(), fix="pass a matrix")
    return s


def tril_indices_from(arr: ArrayLike, k: int = 0) -> tuple[Array, Array]:
    """Rows and columns, int32, of the lower triangle (to diagonal ``k``) of a matrix."""
    n, m = _matrix_shape(arr, "tril_indices_from")
    return tril_indices(n, k, m)


def triu_indices_from(arr: ArrayLike, k: int = 0) -> tuple[Array, Array]:
    """Rows and columns, int32, of the upper triangle (from ``k``) of a matrix."""
    n, m = _matrix_shape(arr, "triu_indices_from")
    return triu_indices(n, k, m)


def mask_indices(
    n: int, mask_func: Callable, k: ArrayLike = 0, *, size: int | None = None
) -> tuple[Array, ...]:
    """Positions, int32, where ``mask_func(ones((n, n)), k)`` is not 0.

    For ``size`` see ``nonzero``.
    """
    (n,) = shape_of((n,), "mask_indices")
    if not callable(mask_func):
        raise errors.ArgumentError(
            f"mask_indices: {mask_func!r:.60} is not a function.", where=source.here(), fix="bnp.triu"
        )
    return nonzero(mask_func(ones((n, n)), k), size=size)


def ravel_multi_index(
    multi_index: ArrayLike,
    dims: Any,
    mode: str = "raise",
    order: str = "C",
    *,
    dtype: DTypeLike | None = None,
) -> Array:
    """Flat positions, int32 or ``dtype``, from one array of positions per axis.

    For positions out of range, ``mode='clip'`` takes the nearest element and ``'wrap'`` counts round; ``'raise'`` is
    an error, and needs positions that are known. ``order='F'`` flattens with the first axis fastest.
    """
    sizes = shape_of(dims, "ravel_multi_index")
    if isinstance(multi_index, (Array, np.ndarray)):
        multi_index = [multi_index[i] for i in range(len(multi_index))]
    positions = sequence(multi_index, "ravel_multi_index", "the positions", "arrays")
    if len(positions) != len(sizes) or not positions:
        raise errors.ArgumentError(
            f"ravel_multi_index: {len(positions)} positions for {len(sizes)} axes.",
            where=source.here(),
            fix="one array of positions for each axis",
        )
    if mode not in ("raise", "clip", "wrap") or order not in ("C", "F"):
        raise errors.ValueRangeError(
            f"ravel_multi_index: mode={mode!r:.60}, order={order!r:.60}.",
            where=source.here(),
            fix="mode 'raise', 'clip' or 'wrap'; order 'C' or 'F'",
        )
    want = dtype_of(dtype) or dtypes.default(int)
    total: Array = constant(0, want)
    for at, n in (
        zip(positions, sizes, strict=True) if order == "C" else zip(positions[::-1], sizes[::-1], strict=True)
    ):
        at = value_of(at, "ravel_multi_index")
        if not dtypes.is_integer(at.aval.dtype):
            raise errors.DtypeError(
                f"ravel_multi_index of {at.aval}.", where=source.here(), fix="astype('int32')"
            )
        if mode == "raise":
            _check_range(at, n)
        at = ew.remainder(at, max(n, 1)) if mode == "wrap" else ops.clamp(0, at, max(n - 1, 0))
        total = ew.add(
            ew.multiply(total, n), at if at.aval.dtype.itemsize > want.itemsize else cast(at, want)
        )
    return total if dtype is None else cast(total, want)


def _check_range(at: Array, n: int) -> None:
    if not isinstance(at, ConcreteArray):
        raise errors.ConcretizationError(
            "ravel_multi_index with mode='raise' of traced positions: whether they are in range is not known.",
            where=source.here(),
            fix="mode='clip', or 'wrap'",
        )
    host = np.asarray(at)
    if ((host < 0) | (host >= n)).any():
        raise errors.IndexRangeError(
            f"ravel_multi_index: a position out of range for an axis of size {n}.",
            where=source.here(),
            fix="mode='clip', or 'wrap'",
        )


# -- objects that are indexed ----------------------------------------------------------------------


def _points(s: slice, name: str) -> Array:
    """The points of a slice: by steps, or by count for an imaginary step."""
    start = 0 if s.start is None else s.start
    step = 1 if s.step is None else s.step
    if s.stop is None:
        raise errors.ArgumentError(
            f"{name}: a slice without an end.", where=source.here(), fix=f"{name}[0:5]"
        )
    if isinstance(step, complex):
        return linspace(start, s.stop, int(abs(step)))
    return arange(start, s.stop, step)


class _Grid:
    """Indexed by slices, the coordinates of the grid that they span.

    ``a:b:c`` are the points from a, below b, in steps of c; with an imaginary step ``nj``, n points from a to b.
    """

    def __init__(self, name: str, sparse: bool):
        self._name, self._sparse = name, sparse

    def __repr__(self) -> str:
        return f"blufunc.numpy.{self._name}"

    def __getitem__(self, key: Any) -> Any:
        slices = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(s, slice) for s in slices):
            raise errors.ArgumentError(
                f"{self._name} is indexed by slices, not {key!r:.60}.",
                where=source.here(),
                fix=f"bnp.{self._name}[0:3, 0:4]",
            )
        lines = [_points(s, self._name) for s in slices]
        if not isinstance(key, tuple):
            return lines[0]
        if lines:
            lines = promote_dtypes(self._name, *lines)
        grids = meshgrid(*lines, sparse=self._sparse, indexing="ij")
        return tuple(grids) if self._sparse else stack(grids, 0)


class _Join:
    """Indexed by arrays, numbers and slices, their concatenation along an axis."""

    def __init__(self, name: str, axis: int, rank: int, place: int):
        self._name, self._default = name, (axis, rank, place)

    def __repr__(self) -> str:
        return f"blufunc.numpy.{self._name}"

    def __getitem__(self, key: Any) -> Array:
        entries = list(key) if isinstance(key, tuple) else [key]
        axis, rank, place = self._default
        matrix = None
        if entries and isinstance(entries[0], str):
            axis, rank, place, matrix = self._directive(entries.pop(0))
        if not entries:
            raise errors.ArgumentError(
                f"{self._name} of nothing.", where=source.here(), fix=f"bnp.{self._name}[0:3]"
            )
        parts = [self._part(e, rank, place) for e in entries]
        result = concatenate([reshape(x, (1,)) if not x.aval.ndim else x for x in parts], axis)
        if matrix is None or result.aval.ndim != 1:
            return result
        size = result.aval.size
        return reshape(result, (1, size) if matrix == "r" else (size, 1))

    def _part(self, entry: Any, rank: int, place: int) -> Array:
        """An entry with at least ``rank`` axes; its own stand at ``place``."""
        value = _points(entry, self._name) if isinstance(entry, slice) else asarray(entry)
        own = value.aval.ndim
        new = rank - own
        if new <= 0:
            return value
        value = reshape(value, (1,) * new + value.aval.shape)
        if not own:
            return value
        start = place if place >= 0 else place + new + 1
        if not 0 <= start <= new:
            raise errors.ValueRangeError(
                f"{self._name}: the axes of an entry of rank {own} cannot stand at {place} of {rank}.",
                where=source.here(),
                fix=f"a place from {-new - 1} to {new}",
            )
        return moveaxis(value, tuple(range(new, rank)), tuple(range(start, start + own)))

    def _directive(self, text: str) -> tuple[int, int, int, str | None]:
        """Parse axis, least rank, place of the axes of lower ranks; or row or column."""
        if text in ("r", "c"):
            return (*self._default, text)
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3:
            raise errors.ArgumentError(
                f"{self._name}: the directive {text!r:.60} cannot be read.",
                where=source.here(),
                fix="'r', 'c', or 'axis,rank,place' in numbers, such as '0,2'",
            )
        axis, rank, place = (*numbers, *self._default[len(numbers) :])
        return axis, rank, place, None


class _Index:
    """Indexed, the index itself: ``x[s_[1:3, ...]]`` is ``x[1:3, ...]``."""

    def __init__(self, name: str, always_tuple: bool):
        self._name, self._always_tuple = name, always_tuple

    def __repr__(self) -> str:
        return f"blufunc.numpy.{self._name}"

    def __getitem__(self, key: Any) -> Any:
        return (key,) if self._always_tuple and not isinstance(key, tuple) else key


mgrid, ogrid = _Grid("mgrid", False), _Grid("ogrid", True)
r_, c_ = _Join("r_", 0, 1, -1), _Join("c_", -1, 2, 0)
s_, index_exp = _Index("s_", False), _Index("index_exp", True)
