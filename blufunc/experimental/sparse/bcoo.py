"""Batched coordinates: the class ``BCOO``, and changes of its structure.

A face, above ``blufunc.numpy``. An array of shape (batch..., sparse..., dense...) is its specified elements ``data``,
of shape (batch..., nse, dense...), and their ``indices`` in the sparse dimensions, of shape (batch..., nse, n_sparse).
Elements with one index add up; those whose index is out of bounds are padding. All functions are compositions of
gathers and scatters, so they have derivatives and batch.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array, Tracer
from blufunc.experimental.sparse.base import JAXSparse, refused, shape_of_children
from blufunc.transforms.batching.vmap import vmap
from blufunc.tree_util import register_pytree_with_keys_class

__all__ = [
    "BCOO", "bcoo_broadcast_in_dim", "bcoo_concatenate", "bcoo_dynamic_slice", "bcoo_extract", "bcoo_fromdense",
    "bcoo_multiply_dense", "bcoo_multiply_sparse", "bcoo_reduce_sum", "bcoo_reshape", "bcoo_rev", "bcoo_slice",
    "bcoo_sort_indices", "bcoo_squeeze", "bcoo_sum_duplicates", "bcoo_todense", "bcoo_transpose",
    "bcoo_update_layout",
]  # fmt: skip


class Layout(NamedTuple):
    """The numbers of dimensions of each kind, and of elements in each batch."""

    n_batch: int
    n_sparse: int
    n_dense: int
    nse: int


def mapped(function: Callable, n: int) -> Callable:
    """A function of one batch as one of ``n`` leading dimensions."""
    return functools.reduce(lambda f, _: vmap(f), range(n), function)


@register_pytree_with_keys_class
class BCOO(JAXSparse):
    """A batched sparse array in coordinates.

    Args:
      args: ``(data, indices)``.
      shape: of the array.
      indices_sorted: whether the indices of each batch are in order.
      unique_indices: whether no index occurs twice.
    Raises:
      ShapeError: the shapes do not fit.
    """

    def __init__(
        self,
        args: tuple[Any, Any],
        *,
        shape: Sequence[int],
        indices_sorted: bool = False,
        unique_indices: bool = False,
    ):
        self.data, self.indices = (x if _is_opaque(x) else bnp.asarray(x) for x in args)
        self.indices_sorted, self.unique_indices = indices_sorted, unique_indices
        super().__init__(tuple(shape))
        if not any(_is_opaque(x) for x in args):
            self._check()

    def _check(self) -> None:
        n_batch, n_sparse, n_dense, nse = self.layout
        fits = n_batch >= 0 and n_dense >= 0 and self.ndim == n_batch + n_sparse + n_dense
        batch, dense = self.shape[:n_batch], self.shape[n_batch + n_sparse :]
        if not fits or self.data.shape != (*batch, nse, *dense) or self.indices.shape[:-2] != batch:
            raise errors.ShapeError(
                f"BCOO: data of shape {self.data.shape} and indices of shape {self.indices.shape} are no array of "
                f"shape {self.shape}.",
                where=source.here(),
                why="data has the shape (batch..., nse, dense...), indices (batch..., nse, n_sparse).",
            )

    @property
    def layout(self) -> Layout:
        """The numbers of dimensions of each kind, and of elements."""
        n_batch, n_sparse = self.indices.ndim - 2, self.indices.shape[-1]
        return Layout(n_batch, n_sparse, self.data.ndim - 1 - n_batch, self.indices.shape[-2])

    nse = property(lambda self: self.layout.nse, doc="The number of specified elements in each batch.")
    n_batch = property(lambda self: self.layout.n_batch, doc="The number of leading batch dimensions.")
    n_sparse = property(lambda self: self.layout.n_sparse, doc="The number of sparse dimensions.")
    n_dense = property(lambda self: self.layout.n_dense, doc="The number of trailing dense dimensions.")
    dtype = property(lambda self: self.data.dtype, doc="The dtype of the elements.")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple]:
        """The arrays, which are its children."""
        n_batch = 0 if _is_opaque(self.indices) else self.n_batch
        aux = (self.shape, n_batch, self.indices_sorted, self.unique_indices)
        return [("data", self.data), ("indices", self.indices)], aux

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Sequence[Any]) -> BCOO:
        """The array of children."""
        shape, n_batch, indices_sorted, unique = aux
        shape = shape_of_children(shape, n_batch, children[1], 2)
        return cls(tuple(children), shape=shape, indices_sorted=indices_sorted, unique_indices=unique)

    @classmethod
    def fromdense(cls, mat: Any, **options: Any) -> BCOO:
        """As ``bcoo_fromdense``."""
        return bcoo_fromdense(mat, **options)

    @classmethod
    def from_scipy_sparse(
        cls, mat: Any, *, index_dtype: Any = None, n_dense: int = 0, n_batch: int = 0
    ) -> BCOO:
        """A matrix of SciPy."""
        if n_dense or n_batch:
            raise refused("from_scipy_sparse with n_dense or n_batch", "bcoo_update_layout of the result")
        mat = mat.tocoo()
        indices = np.stack([mat.row, mat.col], 1)
        return cls((mat.data, bnp.asarray(indices, index_dtype or "int32")), shape=mat.shape)

    def todense(self) -> Array:
        """The array with all elements."""
        return bcoo_todense(self)

    def sum_duplicates(self, nse: int | None = None, remove_zeros: bool = True) -> BCOO:
        """As ``bcoo_sum_duplicates``."""
        return bcoo_sum_duplicates(self, nse)

    def sort_indices(self) -> BCOO:
        """As ``bcoo_sort_indices``."""
        return bcoo_sort_indices(self)

    def update_layout(
        self, *, n_batch: int | None = None, n_dense: int | None = None, **options: Any
    ) -> BCOO:
        """As ``bcoo_update_layout``."""
        return bcoo_update_layout(self, n_batch=n_batch, n_dense=n_dense)

    def transpose(self, axes: Sequence[int] | None = None) -> BCOO:
        """The array with its dimensions in another order; default: reversed."""
        order = tuple(range(self.ndim))[::-1] if axes is None else tuple(axes)
        return bcoo_transpose(self, permutation=order)

    def reshape(self, *shape: Any) -> BCOO:
        """As ``bcoo_reshape``."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return bcoo_reshape(self, new_sizes=sizes)

    def sum(self, axis: Any = None) -> Any:
        """The sum over dimensions, sparse if any is left."""
        axes = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        out = bcoo_reduce_sum(self, axes=tuple(a % self.ndim for a in axes))
        return out if out.ndim else out.todense()

    def astype(self, dtype: Any) -> BCOO:
        """The array with elements of a dtype."""
        return self.with_data(self.data.astype(dtype))

    def with_data(self, data: Any) -> BCOO:
        """The array with other elements at its indices."""
        return BCOO(
            (data, self.indices),
            shape=self.shape,
            indices_sorted=self.indices_sorted,
            unique_indices=self.unique_indices,
        )

    def __getitem__(self, index: Any) -> BCOO:
        index = self._without_ellipsis(index if isinstance(index, tuple) else (index,))
        rows = [
            i.indices(n) if isinstance(i, slice) else _row(i, n, axis)
            for axis, (i, n) in enumerate(zip(index, self.shape, strict=False))
        ]
        rows += [(0, n, 1) for n in self.shape[len(index) :]]
        if any(step < 1 for *_, step in rows):
            raise refused("BCOO with a negative step", "bcoo_rev(x, dimensions=...)")
        starts, limits, strides = zip(*rows, strict=True)
        out = bcoo_slice(self, start_indices=starts, limit_indices=limits, strides=strides)
        return bcoo_squeeze(out, dimensions=[d for d, i in enumerate(index) if isinstance(i, int)])

    def _without_ellipsis(self, index: tuple) -> tuple[int | slice, ...]:
        """The index as integers and slices, of the first dimensions or all."""
        ellipses = [n for n, i in enumerate(index) if i is ...]
        static: list[Any] = [i if i is ... or isinstance(i, slice) else _static_int(i) for i in index]
        if None in static or len(ellipses) > 1 or len(index) - len(ellipses) > self.ndim:
            raise refused(f"BCOO[{index!r:.60}]", "integers and slices, or x.todense()[index]")
        for n in ellipses:
            static[n : n + 1] = [slice(None)] * (self.ndim - len(index) + 1)
        return tuple(static)

    def __pow__(self, exponent: Any) -> BCOO:
        if not (_is_known_real(exponent) and exponent > 0):
            raise refused("a power of a sparse array whose zeros are not zero", "x.todense() ** y")
        unique = self if self.unique_indices else self.sum_duplicates(self.nse)
        return unique.with_data(unique.data**exponent)

    def __neg__(self) -> BCOO:
        return self.with_data(-self.data)

    def __mul__(self, other: Any) -> BCOO:
        if isinstance(other, BCOO):
            return bcoo_multiply_sparse(self, other)
        if np.ndim(other) == 0:
            return self.with_data(self.data * other)
        return self.with_data(bcoo_multiply_dense(self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> BCOO:
        if isinstance(other, JAXSparse):
            raise refused("the quotient of sparse arrays, whose zeros have none", "x / y.todense()")
        if np.ndim(other):
            return self.with_data(bcoo_multiply_dense(self, 1 / bnp.asarray(other)))
        return self.with_data(self.data / other)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, BCOO):
            return self.todense() + other
        if other.shape != self.shape:
            raise errors.ShapeError(
                f"the sum of BCOO of shapes {self.shape} and {other.shape}.", where=source.here()
            )
        n_batch, n_dense = min(self.n_batch, other.n_batch), min(self.n_dense, other.n_dense)
        a, b = (bcoo_update_layout(x, n_batch=n_batch, n_dense=n_dense) for x in (self, other))
        return BCOO(
            (
                bnp.concatenate([a.data, b.data], n_batch),
                bnp.concatenate([a.indices, b.indices], n_batch),
            ),
            shape=self.shape,
        )

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other


def _static_int(i: Any) -> int | None:
    """The number of an index; None for other indices."""
    if isinstance(i, Tracer | bool):
        return None
    if isinstance(i, Array | np.ndarray):
        return operator.index(i) if not i.ndim and dtypes.is_integer(i.dtype) else None
    return int(i) if isinstance(i, int | np.integer) else None


def _row(i: int, n: int, axis: int) -> tuple[int, int, int]:
    """The number of an index as bounds and step."""
    if not -n <= i < n:
        what = f"index {i} is out of range for axis {axis} of a BCOO, of size {n}."
        raise errors.IndexRangeError(
            what, where=source.here(), fix=f"an index from {-n} to {n - 1}" if n else None
        )
    return i % n, i % n + 1, 1


def _is_known_real(x: Any) -> bool:
    """True for a real number, or an array of rank 0 of one, whose value is known."""
    if isinstance(x, Array | np.ndarray):
        real = dtypes.is_integer(x.dtype) or dtypes.is_floating(x.dtype)
        return real and not x.ndim and not isinstance(x, Tracer)
    return isinstance(x, numbers.Real)


def _is_opaque(x: Any) -> bool:
    """True for a placeholder of a pytree's leaf, which has no shape."""
    return not hasattr(x, "shape") or not hasattr(x, "dtype")


# -- conversions -----------------------------------------------------------------------------------------


def bcoo_todense(mat: BCOO) -> Array:
    """The array with all elements."""
    n_batch, n_sparse, _, _ = mat.layout
    shape = mat.shape[n_batch:]

    def one(data, indices):
        if not n_sparse:
            return data.sum(0)
        zeros = bnp.zeros(shape, data.dtype)
        return zeros.at[_columns(indices)].add(data, mode="drop")

    return mapped(one, n_batch)(mat.data, mat.indices)


def _columns(indices: Array) -> tuple[Array, ...]:
    return tuple(indices[:, d] for d in range(indices.shape[-1]))


def bcoo_fromdense(
    mat: Any, *, nse: int | None = None, n_batch: int = 0, n_dense: int = 0, index_dtype: Any = "int32"
) -> BCOO:
    """The elements of an array that are not zero.

    Args:
      nse: their number in each batch; default: the largest of all batches. Under ``jit`` it must be given.
      n_batch, n_dense: the numbers of leading and of trailing dimensions that are not sparse.
    Raises:
      ConcretizationError: under ``jit``, without ``nse``.
    """
    mat = bnp.asarray(mat)
    n_sparse = mat.ndim - n_batch - n_dense
    if n_sparse < 0:
        raise errors.ValueRangeError(
            f"bcoo_fromdense: {n_batch} batch and {n_dense} dense dimensions of {mat.ndim}.",
            where=source.here(),
        )
    mask = mat != 0
    if n_dense:
        mask = mask.any(tuple(range(-n_dense, 0)))
    if nse is None:
        nse = int(mask.sum(tuple(range(n_batch, mask.ndim))).max(initial=0)) if n_sparse else 1
    sparse_shape = mat.shape[n_batch : n_batch + n_sparse]

    def one(part, where):
        if not n_sparse:
            return part[None], bnp.zeros((1, 0), index_dtype)
        flat = bnp.nonzero(where.reshape(-1), size=nse, fill_value=where.size)[0]
        within = flat < where.size
        columns = bnp.unravel_index(bnp.where(within, flat, 0), sparse_shape)
        indices = [bnp.where(within, c, n) for c, n in zip(columns, sparse_shape, strict=True)]
        indices = bnp.stack(indices, -1).astype(index_dtype)
        return part.at[_columns(indices)].get(mode="fill", fill_value=0), indices

    data, indices = mapped(one, n_batch)(mat, mask)
    return BCOO((data, indices), shape=mat.shape, indices_sorted=True, unique_indices=True)


def bcoo_extract(sparr: BCOO, arr: Any, *, assume_unique: bool | None = None) -> BCOO:
    """The elements of an array at the indices of a sparse one.

    Where an index occurs twice, the first takes the element and the others are 0, unless ``assume_unique``.
    """
    arr = bnp.asarray(arr)
    unique = sparr.unique_indices if assume_unique is None else assume_unique
    if arr.shape != sparr.shape:
        raise errors.ShapeError(
            f"bcoo_extract of an array of shape {arr.shape} at indices of one of shape {sparr.shape}.",
            where=source.here(),
        )
    data = at_indices(sparr, arr)
    if not unique:
        data = bnp.where(
            _firsts(sparr).reshape(*data.shape[: sparr.n_batch + 1], *[1] * sparr.n_dense), data, 0
        )
    return sparr.with_data(data)


def at_indices(sparr: BCOO, arr: Array) -> Array:
    """The elements of an array at the indices, 0 for padding."""
    if not sparr.n_sparse:
        return bnp.broadcast_to(bnp.expand_dims(arr, sparr.n_batch), sparr.data.shape)
    one = lambda part, indices: part.at[_columns(indices)].get(mode="fill", fill_value=0)
    return mapped(one, sparr.n_batch)(arr, sparr.indices)


def _firsts(sparr: BCOO) -> Array:
    """Of each index, whether none before it is equal."""

    def one(indices):
        same = (indices[:, None] == indices[None]).all(-1)
        return bnp.argmax(same, 1) == bnp.arange(indices.shape[0])

    return mapped(one, sparr.n_batch)(sparr.indices)


# -- order and duplicates --------------------------------------------------------------------------------


def bcoo_sort_indices(mat: BCOO) -> BCOO:
    """The same array with indices in order."""

    def one(data, indices):
        order = (
            bnp.lexsort(bnp.stack(_columns(indices)[::-1]))
            if indices.shape[-1]
            else bnp.arange(indices.shape[0])
        )
        return data[order], indices[order]

    data, indices = mapped(one, mat.n_batch)(mat.data, mat.indices)
    return BCOO((data, indices), shape=mat.shape, indices_sorted=True, unique_indices=mat.unique_indices)


def bcoo_sum_duplicates(mat: BCOO, nse: int | None = None) -> BCOO:
    """The same array in which no index occurs twice, in order.

    Args:
      nse: the number of elements in each batch; default: those that are needed, or all of them under ``jit``.
    """
    ordered = bcoo_sort_indices(mat)
    n_batch, n_sparse, _, count = ordered.layout
    bounds = bnp.asarray(mat.shape[n_batch : n_batch + n_sparse], ordered.indices.dtype)

    def groups(indices):
        new = bnp.concatenate([bnp.ones(min(count, 1), bool), (indices[1:] != indices[:-1]).any(-1)])
        valid = (indices < bounds).all(-1)
        return bnp.where(valid, bnp.cumsum(new & valid) - 1, count), (new & valid).sum()

    group, needed = mapped(groups, n_batch)(ordered.indices)
    if nse is None:
        nse = count if isinstance(needed, Tracer) else int(bnp.max(needed, initial=0))

    def one(data, indices, group):
        sums = bnp.zeros((nse, *data.shape[1:]), data.dtype).at[group].add(data, mode="drop")
        blank = bnp.broadcast_to(bounds, (nse, n_sparse))
        return sums, blank.at[group].set(indices, mode="drop")

    data, indices = mapped(one, n_batch)(ordered.data, ordered.indices, group)
    return BCOO((data, indices), shape=mat.shape, indices_sorted=True, unique_indices=True)


# -- layout ----------------------------------------------------------------------------------------------


def bcoo_update_layout(
    mat: BCOO, *, n_batch: int | None = None, n_dense: int | None = None, on_inefficient: str | None = None
) -> BCOO:
    """The same array with other numbers of batch and dense dimensions.

    More of them repeat or pad elements. ``on_inefficient`` is accepted for compatibility.
    """
    batch = mat.n_batch if n_batch is None else n_batch
    dense = mat.n_dense if n_dense is None else n_dense
    if min(batch, dense) < 0 or batch + dense > mat.ndim:
        raise errors.ValueRangeError(
            f"bcoo_update_layout: {batch} batch and {dense} dense dimensions of {mat.ndim}.",
            where=source.here(),
        )
    while mat.n_dense > dense:
        mat = _dense_to_sparse(mat)
    while mat.n_batch > batch:
        mat = _batch_to_sparse(mat)
    while mat.n_batch < batch:
        mat = _sparse_to_batch(mat)
    while mat.n_dense < dense:
        mat = _sparse_to_dense(mat)
    return mat


def _dense_to_sparse(mat: BCOO) -> BCOO:
    """The first dense dimension as the last sparse one."""
    n_batch, n_sparse, _, nse = mat.layout
    size = mat.shape[n_batch + n_sparse]
    data = mat.data.reshape(*mat.data.shape[:n_batch], nse * size, *mat.data.shape[n_batch + 2 :])
    column = bnp.tile(bnp.arange(size, dtype=mat.indices.dtype), nse)[:, None]
    column = bnp.broadcast_to(column, (*mat.indices.shape[:-2], nse * size, 1))
    return BCOO((data, bnp.concatenate([bnp.repeat(mat.indices, size, -2), column], -1)), shape=mat.shape)


def _batch_to_sparse(mat: BCOO) -> BCOO:
    """The last batch dimension as the first sparse one."""
    n_batch, n_sparse, _, nse = mat.layout
    size = mat.shape[n_batch - 1]
    outer = mat.data.shape[: n_batch - 1]
    data = mat.data.reshape(*outer, size * nse, *mat.data.shape[n_batch + 1 :])
    inside = (mat.indices < bnp.asarray(mat.shape[n_batch : n_batch + n_sparse], mat.indices.dtype)).all(-1)
    column = bnp.broadcast_to(bnp.arange(size, dtype=mat.indices.dtype)[:, None], (*outer, size, nse))
    column = bnp.where(inside, column, size)[..., None]  # padding is out of bounds everywhere
    indices = bnp.concatenate([column, mat.indices], -1)
    return BCOO((data, indices.reshape(*outer, size * nse, n_sparse + 1)), shape=mat.shape)


def _sparse_to_batch(mat: BCOO) -> BCOO:
    """The first sparse dimension as the last batch one.

    Each batch has all elements, or padding for them.
    """
    n_batch, n_sparse, n_dense, _ = mat.layout
    if not n_sparse:
        raise refused("more batch dimensions than sparse ones", "n_batch + n_dense <= x.ndim")
    size = mat.shape[n_batch]
    bounds = bnp.asarray(mat.shape[n_batch + 1 : n_batch + n_sparse], mat.indices.dtype)

    def one(data, indices):
        def row(i):
            own = indices[:, 0] == i
            kept = bnp.where(own.reshape(-1, *[1] * n_dense), data, 0)
            return kept, bnp.where(own[:, None], indices[:, 1:], bounds)

        return vmap(row)(bnp.arange(size, dtype=indices.dtype))

    data, indices = mapped(one, n_batch)(mat.data, mat.indices)
    return BCOO((data, indices), shape=mat.shape)


def _sparse_to_dense(mat: BCOO) -> BCOO:
    """The last sparse dimension as the first dense one."""
    n_batch, n_sparse, n_dense, _ = mat.layout
    size = mat.shape[n_batch + n_sparse - 1]

    def one(data, indices):
        own = indices[:, -1:] == bnp.arange(size, dtype=indices.dtype)
        return bnp.where(own.reshape(*own.shape, *[1] * n_dense), data[:, None], 0), indices[:, :-1]

    data, indices = mapped(one, n_batch)(mat.data, mat.indices)
    return BCOO((data, indices), shape=mat.shape)


# -- dimensions ------------------------------------------------------------------------------------------


def bcoo_transpose(mat: BCOO, *, permutation: Sequence[int]) -> BCOO:
    """The array with its dimensions in another order, within those of a kind.

    Raises:
      UnsupportedError: a dimension would change its kind.
    """
    n_batch, n_sparse, _, _ = mat.layout
    order = [d % mat.ndim for d in permutation]
    ends = (n_batch, n_batch + n_sparse)
    kind = lambda d: (d >= ends[0]) + (d >= ends[1])
    if sorted(order) != list(range(mat.ndim)) or any(kind(d) != kind(n) for n, d in enumerate(order)):
        raise refused(
            f"bcoo_transpose of {n_batch} batch and {n_sparse} sparse dimensions by {tuple(permutation)}",
            "bcoo_update_layout(x, n_batch=0, n_dense=0) first",
        )
    batch, columns = order[:n_batch], [d - n_batch for d in order[n_batch : ends[1]]]
    dense = [d - n_sparse + 1 for d in order[ends[1] :]]
    data = bnp.transpose(mat.data, (*batch, n_batch, *dense))
    indices = bnp.transpose(mat.indices, (*batch, n_batch, n_batch + 1))[..., np.asarray(columns, int)]
    return BCOO((data, indices), shape=[mat.shape[d] for d in order], unique_indices=mat.unique_indices)


def bcoo_reshape(mat: BCOO, *, new_sizes: Any, dimensions: Any = None, sharding: Any = None) -> BCOO:
    """The array in another shape, with batch and dense parts of equal sizes."""
    n_batch, n_sparse, n_dense, nse = mat.layout
    sizes = [new_sizes] if isinstance(new_sizes, int) else list(new_sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(mat.shape) // max(-math.prod(sizes), 1)
    ends = [mat.shape[:n_batch], mat.shape[n_batch + n_sparse :]]
    first = _prefix(sizes, math.prod(ends[0])) if n_batch else 0
    last = _prefix(sizes[::-1], math.prod(ends[1])) if n_dense else 0
    if first is None or last is None or first + last > len(sizes) or math.prod(sizes) != math.prod(mat.shape):
        raise refused(
            f"bcoo_reshape from {mat.shape} to {tuple(sizes)} with {n_batch} batch and {n_dense} dense dimensions",
            "bcoo_update_layout(x, n_batch=0, n_dense=0) first",
        )
    inner = sizes[first : len(sizes) - last]
    data = mat.data.reshape(*sizes[:first], nse, *sizes[len(sizes) - last :])
    indices = mat.indices.reshape(*sizes[:first], nse, n_sparse)
    before = mat.shape[n_batch : n_batch + n_sparse]
    flat = bnp.zeros(indices.shape[:-1], indices.dtype)
    inside = bnp.ones(indices.shape[:-1], bool)
    for d, n in enumerate(before):
        flat, inside = flat * n + indices[..., d], inside & (indices[..., d] < n)
    columns = []
    for n in reversed(inner):
        columns.append(bnp.where(inside, flat % n, n))
        flat = flat // n
    blank = [bnp.zeros((*indices.shape[:-1], 0), indices.dtype)]
    stacked = bnp.concatenate([*blank, *[c[..., None].astype(indices.dtype) for c in reversed(columns)]], -1)
    return BCOO((data, stacked), shape=sizes, unique_indices=mat.unique_indices)


def _prefix(sizes: Sequence[int], product: int) -> int | None:
    """The number of leading sizes with a product, or None."""
    products = np.cumprod([1, *sizes]).tolist()
    return products.index(product) if product in products else None


def bcoo_squeeze(arr: BCOO, *, dimensions: Sequence[int]) -> BCOO:
    """The array without some dimensions of size 1."""
    drop = {d % arr.ndim for d in dimensions}
    if any(arr.shape[d] != 1 for d in drop):
        raise errors.ShapeError(f"bcoo_squeeze of {tuple(drop)} in {arr.shape}.", where=source.here())
    n_batch, n_sparse, _, _ = arr.layout
    batch = tuple(d for d in drop if d < n_batch)
    columns = [d for d in range(n_sparse) if d + n_batch not in drop]
    dense = tuple(d - n_sparse + 1 for d in drop if d >= n_batch + n_sparse)
    indices = bnp.squeeze(arr.indices, batch)[..., np.asarray(columns, int)]
    shape = [n for d, n in enumerate(arr.shape) if d not in drop]
    return BCOO(
        (bnp.squeeze(arr.data, batch + dense), indices), shape=shape, unique_indices=arr.unique_indices
    )


def bcoo_rev(operand: BCOO, dimensions: Sequence[int]) -> BCOO:
    """The array with some dimensions reversed."""
    n_batch, n_sparse, _, _ = operand.layout
    data, indices = operand.data, operand.indices
    for d in (d % operand.ndim for d in dimensions):
        if d < n_batch:
            data, indices = bnp.flip(data, d), bnp.flip(indices, d)
        elif d < n_batch + n_sparse:
            size, column = operand.shape[d], indices[..., d - n_batch]
            indices = indices.at[..., d - n_batch].set(bnp.where(column < size, size - 1 - column, size))
        else:
            data = bnp.flip(data, d - n_sparse + 1)
    return BCOO((data, indices), shape=operand.shape, unique_indices=operand.unique_indices)


def bcoo_broadcast_in_dim(
    mat: BCOO, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None
) -> BCOO:
    """As ``lax.broadcast_in_dim``: new dimensions in front are of batches."""
    n_batch, n_sparse, n_dense, nse = mat.layout
    places = list(broadcast_dimensions)
    kinds = [places[:n_batch], places[n_batch : n_batch + n_sparse], places[n_batch + n_sparse :]]
    first_sparse = min(kinds[1], default=(max(kinds[0], default=-1) + 1))
    first_dense = min(kinds[2], default=len(shape))
    is_batch = lambda d: d < first_sparse
    dense = [d for d in range(len(shape)) if d >= first_dense]
    batch = [d for d in range(len(shape)) if is_batch(d)]
    sparse = [d for d in range(len(shape)) if d not in batch and d not in dense]
    position = {d: n for n, d in enumerate(batch)}
    new_batch = [shape[d] for d in batch]
    to_batch = [position[d] for d in kinds[0]]
    dense_at = [len(batch) + 1 + dense.index(d) for d in kinds[2]]
    data = lax.broadcast_in_dim(
        mat.data, (*new_batch, nse, *[shape[d] for d in dense]), (*to_batch, len(batch), *dense_at)
    )
    indices = lax.broadcast_in_dim(
        mat.indices, (*new_batch, nse, n_sparse), (*to_batch, len(batch), len(batch) + 1)
    )
    columns, count = {}, nse
    for column, d in enumerate(kinds[1]):
        columns[d] = indices[..., column]
    for d in sparse:
        size = shape[d]
        if d in columns and mat.shape[n_batch + kinds[1].index(d)] == size:
            continue
        # each element is repeated, once for every position along the new dimension
        was = columns.pop(d, None)
        columns = {k: bnp.repeat(c, size, -1) for k, c in columns.items()}
        data = bnp.repeat(data, size, len(batch))
        own = bnp.broadcast_to(
            bnp.tile(bnp.arange(size, dtype=indices.dtype), count), (*new_batch, count * size)
        )
        columns[d] = own if was is None else bnp.where(bnp.repeat(was, size, -1) < 1, own, size)
        count *= size
    blank = bnp.zeros((*new_batch, count, 0), indices.dtype)
    stacked = bnp.concatenate([blank, *[columns[d][..., None] for d in sparse]], -1)
    return BCOO((data, stacked), shape=shape)


def bcoo_concatenate(operands: Sequence[BCOO], *, dimension: int) -> BCOO:
    """Arrays one after another along a dimension that is of batches, or sparse."""
    first = operands[0]
    n_batch, n_sparse, n_dense, _ = first.layout
    if any(x.layout[:3] != first.layout[:3] for x in operands):
        raise refused("bcoo_concatenate of arrays of different layouts", "bcoo_update_layout")
    shape = list(first.shape)
    shape[dimension] = sum(x.shape[dimension] for x in operands)
    if dimension >= n_batch + n_sparse:
        raise refused("bcoo_concatenate along a dense dimension", "bcoo_update_layout(x, n_dense=0)")
    if dimension < n_batch:
        nse = max(x.nse for x in operands)
        padded = [_padded(x, nse) for x in operands]
        data, indices = (bnp.concatenate(parts, dimension) for parts in zip(*padded, strict=True))
        return BCOO((data, indices), shape=shape)
    column, offset, parts = dimension - n_batch, 0, []
    for x in operands:
        inside = x.indices[..., column] < x.shape[dimension]
        moved = bnp.where(inside, x.indices[..., column] + offset, shape[dimension])
        parts.append(x.indices.at[..., column].set(moved))
        offset += x.shape[dimension]
    data = bnp.concatenate([x.data for x in operands], n_batch)
    return BCOO((data, bnp.concatenate(parts, n_batch)), shape=shape)


def _padded(x: BCOO, nse: int) -> tuple[Array, Array]:
    """Data and indices of ``nse`` elements."""
    more = nse - x.nse
    bounds = bnp.asarray(x.shape[x.n_batch : x.n_batch + x.n_sparse], x.indices.dtype)
    data = bnp.pad(x.data, [(0, more if d == x.n_batch else 0) for d in range(x.data.ndim)])
    blank = bnp.broadcast_to(bounds, (*x.indices.shape[:-2], more, x.n_sparse))
    return data, bnp.concatenate([x.indices, blank], -2)


def bcoo_slice(
    mat: BCOO,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> BCOO:
    """As ``lax.slice``; elements outside become padding."""
    steps = [1] * mat.ndim if strides is None else strides
    rows = list(zip(start_indices, limit_indices, steps, strict=True))
    return _sliced(mat, [s for s, *_ in rows], [len(range(*row)) for row in rows], list(steps), lax.slice)


def bcoo_dynamic_slice(mat: BCOO, start_indices: Sequence[Any], slice_sizes: Sequence[int]) -> BCOO:
    """As ``lax.dynamic_slice``; elements outside become padding."""
    starts = [
        bnp.clip(bnp.where(bnp.asarray(s) < 0, s + n, s), 0, n - k)
        for s, n, k in zip(start_indices, mat.shape, slice_sizes, strict=True)
    ]
    return _sliced(mat, starts, list(slice_sizes), [1] * mat.ndim, lax.dynamic_slice)


def _sliced(
    mat: BCOO, starts: Sequence[Any], sizes: Sequence[int], steps: Sequence[int], cut: Callable
) -> BCOO:
    n_batch, n_sparse, _, nse = mat.layout

    def along(x: Array, dims: Sequence[int | None]) -> Array:
        """The part of an array whose axes are dimensions, or None for all of an axis."""
        begin = [0 if d is None else starts[d] for d in dims]
        count = [x.shape[n] if d is None else sizes[d] for n, d in enumerate(dims)]
        if cut is lax.dynamic_slice:
            return lax.dynamic_slice(x, begin, count)
        step = [1 if d is None else steps[d] for d in dims]
        limit = [b + (c - 1) * s + 1 if c else b for b, c, s in zip(begin, count, step, strict=True)]
        return lax.slice(x, begin, limit, step)

    batch, dense = list(range(n_batch)), list(range(n_batch + n_sparse, mat.ndim))
    data, indices = along(mat.data, [*batch, None, *dense]), along(mat.indices, [*batch, None, None])
    kept, columns = bnp.ones(indices.shape[:-1], bool), []
    for n in range(n_sparse):
        d = n + n_batch
        offset = indices[..., n] - starts[d]
        position = offset // steps[d]
        kept = kept & (offset >= 0) & (offset % steps[d] == 0) & (position < sizes[d])
        kept = kept & (indices[..., n] < mat.shape[d])
        columns.append(position)
    columns = [bnp.where(kept, c, sizes[n + n_batch]).astype(indices.dtype) for n, c in enumerate(columns)]
    if columns:
        indices = bnp.stack(columns, -1)
        data = bnp.where(kept.reshape(*kept.shape, *[1] * len(dense)), data, 0)
    return BCOO((data, indices), shape=sizes, unique_indices=False)


def bcoo_reduce_sum(mat: BCOO, *, axes: Sequence[int]) -> BCOO:
    """The sum over some dimensions."""
    n_batch, n_sparse, _, nse = mat.layout
    over = {d % mat.ndim for d in axes}
    dense = tuple(d - n_sparse + 1 for d in over if d >= n_batch + n_sparse)
    data, indices = mat.data.sum(dense), mat.indices
    columns = [d for d in range(n_sparse) if d + n_batch not in over]
    bounds = bnp.asarray(mat.shape[n_batch : n_batch + n_sparse], indices.dtype)
    inside = (indices < bounds).all(-1)
    data = bnp.where(inside.reshape(*inside.shape, *[1] * (data.ndim - n_batch - 1)), data, 0)
    indices = indices[..., np.asarray(columns, int)]
    batch = [d for d in range(n_batch) if d in over]
    kept = [d for d in range(n_batch) if d not in over]
    merged = math.prod([mat.shape[d] for d in batch]) * nse

    def joined(x):
        moved = bnp.transpose(x, (*kept, *batch, *range(n_batch, x.ndim)))
        return moved.reshape(*[mat.shape[d] for d in kept], merged, *x.shape[n_batch + 1 :])

    shape = [n for d, n in enumerate(mat.shape) if d not in over]
    return BCOO((joined(data), joined(indices)), shape=shape)


# -- elementwise products --------------------------------------------------------------------------------


def bcoo_multiply_dense(sp_mat: BCOO, v: Any) -> Array:
    """The data of the product with an array, which broadcasts to the shape."""
    v = bnp.broadcast_to(bnp.asarray(v), sp_mat.shape)
    return sp_mat.data * at_indices(sp_mat, v)


def bcoo_multiply_sparse(lhs: BCOO, rhs: BCOO) -> BCOO:
    """The product, element by element: at the indices of ``lhs``."""
    if lhs.shape != rhs.shape:
        raise errors.ShapeError(
            f"the product of BCOO of shapes {lhs.shape} and {rhs.shape}.", where=source.here()
        )
    rhs = bcoo_update_layout(rhs, n_batch=lhs.n_batch, n_dense=lhs.n_dense)

    def one(data, indices, other, places):
        same = (indices[:, None] == places[None]).all(-1).astype(other.dtype)
        return data * bnp.tensordot(same, other, 1)

    data = mapped(one, lhs.n_batch)(lhs.data, lhs.indices, rhs.data, rhs.indices)
    return BCOO((data, lhs.indices), shape=lhs.shape, unique_indices=lhs.unique_indices)
