"""Sorting of several operands, and permutation of elements along an axis.

Core operations. The derivative of a sort permutes the tangents: an additional iota operand comes out as the
permutation, which ``pick_along`` applies to the tangents. ``pick_along`` and ``place_along`` are transposes
of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import static_int
from blufunc.core.ops.shape import canonical_axis, check_positions, iota
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import Linear, all_front, move_dim
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import Factoring, along, leading
from blufunc.core.primitives.tangents import Zero, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

# -- permutations ----------------------------------------------------------------------------------


class _Along(Linear):
    """A kind: operations that move elements along ``dimension`` by distinct indices."""

    kind, fresh = "index", True
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        """Rule of picking elements of a line by their positions, the second operand."""
        b = Factoring()
        dims = b.each(avals[0].shape, [params["dimension"]])
        return b.rule([dims, dims], [dims], trusted=frozenset({1}))

    def _check(self, x: ShapedArray, index: ShapedArray, dimension: int) -> None:
        rest = [s[:dimension] + s[dimension + 1 :] for s in (x.shape, index.shape)]
        if x.ndim != index.ndim or not 0 <= dimension < x.ndim or rest[0] != rest[1]:
            raise errors.ShapeError(
                f"{self.name} of {x} by {index} along axis {dimension}: the shapes must agree on the other axes."
            )
        if not dtypes.is_integer(index.dtype):
            raise errors.DtypeError(f"{self.name} takes an integer index, not {index}.")

    def batch(self, axis, args, dims, *, dimension, **params):
        return self.bind(*all_front(axis, args, dims), dimension=dimension + 1, **params), 0


class _PickAlong(_Along):
    """``out[..., i, ...] = x[..., index[..., i, ...], ...]``, distinct indices."""

    name = "pick_along"

    def impl(self, x, index, *, dimension):
        return np.take_along_axis(x, index, dimension)

    def abstract(self, x, index, *, dimension):
        self._check(x, index, dimension)
        return ShapedArray(index.shape, x.dtype)

    def transpose(self, ct, x, index, *, dimension):
        x.add(place_along_p.bind(ct, index, dimension=dimension, size=x.aval.shape[dimension]))


class _PlaceAlong(_Along):
    """``out[..., index[..., i, ...], ...] = x[..., i, ...]``, else 0, of ``size``."""

    name, widens = "place_along", True

    def impl(self, x, index, *, dimension, size):
        out = np.zeros((*x.shape[:dimension], size, *x.shape[dimension + 1 :]), x.dtype)
        np.put_along_axis(out, index, x, dimension)
        return out

    def abstract(self, x, index, *, dimension, size):
        self._check(x, index, dimension)
        if x.shape != index.shape:
            raise errors.ShapeError(f"place_along takes operands of one shape, not {x} and {index}.")
        return ShapedArray((*x.shape[:dimension], size, *x.shape[dimension + 1 :]), x.dtype)

    def transpose(self, ct, x, index, *, dimension, size):
        x.add(pick_along_p.bind(ct, index, dimension=dimension))


pick_along_p = _PickAlong()
place_along_p = _PlaceAlong()

# -- sorting ---------------------------------------------------------------------------------------


class _Sort(Primitive):
    """Sorts all operands by the first ``num_keys`` of them, in lexicographic order.

    Ascending; NaN comes last, and -0.0 equals 0.0.
    """

    name, kind, multiple_results, fresh, widens = "sort", "sort", True, True, True

    shard = staticmethod(along("dimension"))

    def impl(self, *xs, dimension, is_stable, num_keys):
        if len(xs) == 1 and not _by_way_of_float32(xs[0].dtype):
            return [np.sort(xs[0], dimension, stable=is_stable)]
        keys = [x.astype(np.float32) if _by_way_of_float32(x.dtype) else x for x in xs[:num_keys]]
        if num_keys == 1:
            order = np.argsort(keys[0], dimension, stable=is_stable)
        else:
            order = np.lexsort(keys[::-1], dimension)
        return [np.take_along_axis(x, order, dimension) for x in xs]

    def abstract(self, *xs, dimension, is_stable, num_keys):
        first = xs[0]
        if any(x.shape != first.shape for x in xs):
            raise errors.ShapeError(f"sort takes operands of one shape, not {', '.join(map(str, xs))}.")
        if not 0 <= dimension < first.ndim:
            raise errors.ShapeError(f"sort of {first} along axis {dimension}, which it does not have.")
        if not 1 <= num_keys <= len(xs):
            raise errors.ValueRangeError(f"sort of {len(xs)} operands by {num_keys} keys.")
        check_types("sort", "numeric", *xs[:num_keys])
        return [x.strong() for x in xs]

    def jvp(self, primals, tangents, *, dimension, is_stable, num_keys):
        positions = iota(dtypes.int32, primals[0].aval.shape, dimension)
        *outs, order = self.bind(
            *primals, positions, dimension=dimension, is_stable=is_stable, num_keys=num_keys
        )
        out_ts = [
            zero(out.aval) if t.__class__ is Zero else pick_along_p.bind(t, order, dimension=dimension)
            for out, t in zip(outs, tangents, strict=True)
        ]
        return outs, out_ts

    transpose = unsupported("it is not linear: it is transposed through its derivative")

    def batch(self, axis, args, dims, *, dimension, **params):
        if len(set(dims)) == 1:  # all operands have the batch axis in one place: keep it there
            d = dims[0]
            outs = self.bind(*args, dimension=dimension + (dimension >= d), **params)
            return outs, [d] * len(outs)
        outs = self.bind(*all_front(axis, args, dims), dimension=dimension + 1, **params)
        return outs, [0] * len(outs)


class _TopK(Primitive):
    """The ``k`` largest elements along the last axis, descending, and their indices.

    Of equal elements the first comes first. NaN counts as largest.
    """

    name, kind, multiple_results, fresh, widens = "top_k", "sort", True, True, True
    autocast_class = "widest"

    shard = staticmethod(leading(1))

    def impl(self, x, *, k):
        narrow = x.dtype.itemsize <= 2 and dtypes.is_floating(x.dtype)
        keys = x.astype(np.float32) if narrow else x  # NumPy compares float16 one by one
        if 0 < 4 * k <= x.shape[-1] and x.size >= _SELECTED and keys.itemsize > 2:
            chosen = _largest(keys, k)
            index = np.take_along_axis(chosen, _descending(np.take_along_axis(keys, chosen, -1)), -1)
        else:
            index = _descending(keys)[..., :k]
        return [np.take_along_axis(x, index, -1), index.astype(np.int32)]

    def abstract(self, x, *, k):
        check_types("top_k", "ordered", x)
        if not x.ndim or not 0 <= k <= x.shape[-1]:
            raise errors.ShapeError(f"top_k of {x}: k = {k} must be between 0 and the size of the last axis.")
        out = (*x.shape[:-1], k)
        check_positions("top_k", x.shape[-1], dtypes.int32)
        return [ShapedArray(out, x.dtype), ShapedArray(out, dtypes.int32)]

    def jvp(self, primals, tangents, *, k):
        (x,), (t,) = primals, tangents
        values, index = self.bind(x, k=k)
        if t.__class__ is Zero:
            return [values, index], [zero(values.aval), zero(index.aval)]
        tangent = pick_along_p.bind(t, index, dimension=x.aval.ndim - 1)
        return [values, index], [tangent, zero(index.aval)]

    transpose = unsupported("it is not linear: it is transposed through its derivative")

    def batch(self, axis, args, dims, *, k):
        return self.bind(*all_front(axis, args, dims), k=k), [0, 0]


_SELECTED = 2048
"""The least size of an array that is selected from: sorting fewer is faster.
So it is for integers of 16 bits or less, which NumPy sorts by their digits, and for more than a fourth of a line."""

sort_p = _Sort()
top_k_p = _TopK()


def _by_way_of_float32(dtype: np.dtype) -> bool:
    """True if NumPy's order of a dtype differs: ml_dtypes put NaN anywhere."""
    return dtype.itemsize <= 2 and dtypes.is_floating(dtype) and dtype != dtypes.float16


def _descending(keys: np.ndarray) -> np.ndarray:
    """The indices that sort lines in descending order, NaN first; stable."""
    # a stable ascending sort of the reversed line, read backwards, is a stable descending one
    return keys.shape[-1] - 1 - np.argsort(keys[..., ::-1], axis=-1, stable=True)[..., ::-1]


def _largest(keys: np.ndarray, k: int) -> np.ndarray:
    """The ascending indices of the ``k`` largest elements of each line.

    Of elements equal to the least of these, the first ones are taken. NaN is largest.
    """
    n = keys.shape[-1]
    lines = keys.reshape(-1, n)
    least = np.partition(lines, n - k, axis=-1)[:, n - k, None]
    taken = ~(lines < least)  # k per line, and more if several equal the least, or if that is NaN
    tied = np.flatnonzero(np.count_nonzero(taken, axis=-1) > k)
    if tied.size:
        some, least = lines[tied], least[tied]
        nan, least_nan = some != some, least != least
        above = (some > least) | (nan & ~least_nan)
        equal = (some == least) | (nan & least_nan)
        wanted = k - np.count_nonzero(above, axis=-1, keepdims=True)
        taken[tied] = above | (equal & (np.cumsum(equal, axis=-1, dtype=np.int32) <= wanted))
    places = np.flatnonzero(taken).reshape(-1, k) - n * np.arange(len(lines))[:, None]
    return places.reshape(*keys.shape[:-1], k)


# -- functions -------------------------------------------------------------------------------------


@overload
def sort(operand: ArrayLike, dimension: int = -1, is_stable: bool = True, num_keys: int = 1) -> Array: ...
@overload
def sort(
    operand: Sequence[ArrayLike], dimension: int = -1, is_stable: bool = True, num_keys: int = 1
) -> tuple[Array, ...]: ...


def sort(operand: Any, dimension: int = -1, is_stable: bool = True, num_keys: int = 1) -> Any:
    """``operand`` in ascending order along an axis; NaN last.

    Args:
      operand: an array, or a sequence of arrays of one shape, permuted together by the first ``num_keys`` of them.
      dimension: the axis.
      is_stable: whether equal elements keep their order.
      num_keys: number of arrays that are compared.
    Returns:
      an array, or a tuple of arrays if ``operand`` is a sequence.
    """
    several = isinstance(operand, (tuple, list))
    xs = [lift(a) for a in operand] if several else [lift(operand)]
    if not xs:
        raise errors.ArgumentError("sort takes at least one array.")
    d = canonical_axis(dimension, xs[0].aval.ndim, "sort")
    num_keys = static_int(num_keys, "sort", "num_keys")
    outs = sort_p.bind(*xs, dimension=d, is_stable=is_stable, num_keys=num_keys)
    return tuple(outs) if several else outs[0]


def sort_key_val(
    keys: ArrayLike, values: ArrayLike, dimension: int = -1, is_stable: bool = True
) -> tuple[Array, Array]:
    """``keys`` in ascending order along an axis, and ``values`` permuted with them."""
    keys, values = sort((keys, values), dimension, is_stable)
    return keys, values


def argsort(x: Any, dimension: int = -1, is_stable: bool = True) -> Any:
    """The int32 indices that sort ``x`` along an axis."""
    x = lift(x)
    positions = iota(dtypes.int32, x.aval.shape, canonical_axis(dimension, x.aval.ndim, "argsort"))
    return sort((x, positions), dimension, is_stable)[1]


def top_k(operand: ArrayLike, k: int, *, axis: int = -1) -> tuple[Array, Array]:
    """The ``k`` largest elements along an axis, descending, and their int32 indices.

    Of equal elements the first comes first; NaN counts as largest.
    """
    x = lift(operand)
    last = x.aval.ndim - 1
    axis = canonical_axis(axis, x.aval.ndim, "top_k") if x.aval.ndim else 0
    values, index = top_k_p.bind(move_dim(x, axis, last), k=static_int(k, "top_k", "k"))
    return move_dim(values, last, axis), move_dim(index, last, axis)


def pick_along(x: ArrayLike, index: ArrayLike, dimension: int) -> Any:
    """``take_along_axis`` with distinct indices per line."""
    return pick_along_p.bind(lift(x), lift(index), dimension=dimension)


def place_along(x: Any, index: Any, dimension: int, size: int | None = None) -> Any:
    """The inverse of ``pick_along``: ``x`` written to ``index`` along an axis, else 0."""
    x = lift(x)
    size = x.aval.shape[dimension] if size is None else size
    return place_along_p.bind(x, lift(index), dimension=dimension, size=size)
