"""Shared base of linear algebra: the primitive kind, and matrix algebra for rules.

Core operations, below ``triangular``, ``factor``, ``solve`` and the rest. A matrix is the last two axes of an
array; leading axes are a batch. In: strict operands (float32, float64, complex64 or complex128, all of one
dtype). The NumPy definitions call LAPACK through NumPy or SciPy. A failed factorization yields NaN: no error
may depend on values, which are unknown under ``jit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.dot import dot_general
from blufunc.core.ops.shape import iota, slice_in_dim
from blufunc.core.primitives.linear_ops import all_front, broadcast_in_dim, broadcast_to, reshape, transpose
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import leading

with _lazy.modules(globals()):
    import scipy

MATRIX_DTYPES = (dtypes.float32, dtypes.float64, dtypes.complex64, dtypes.complex128)


class MatrixOp(Primitive):
    """A kind: operations on matrices in the last two axes, batched over the others."""

    kind, fresh = "linalg", True

    transpose = unsupported("it is not linear: it is transposed through its derivative")

    shard = staticmethod(leading(2))

    def batch(self, axis, args, dims, **params):
        outs = self.bind(*all_front(axis, args, dims), **params)
        return (outs, [0] * len(outs)) if self.multiple_results else (outs, 0)


# -- checks ----------------------------------------------------------------------------------------


def check_matrices(name: str, *avals: ShapedArray) -> None:
    """Raise unless all are (batches of) matrices of one dtype that LAPACK supports."""
    for a in avals:
        if a.dtype not in MATRIX_DTYPES:
            raise errors.DtypeError(
                f"{name} takes float32, float64, complex64 and complex128, not {a}.",
                fix="convert first: x.astype('float32')",
            )
        if a.dtype != avals[0].dtype:
            raise errors.DtypeError(
                f"{name} takes operands of one dtype, not {', '.join(map(str, avals))}.",
                fix="use blufunc.numpy, which promotes, or convert with .astype",
            )
        if a.ndim < 2:
            raise errors.ShapeError(
                f"{name} takes matrices, in the last two axes, not {a}.", fix="give it axes: x[:, None]"
            )


def check_square(name: str, *avals: ShapedArray) -> None:
    """``check_matrices``, and raise unless the last two axes have equal size."""
    check_matrices(name, *avals)
    for a in avals:
        if a.shape[-1] != a.shape[-2]:
            raise errors.ShapeError(
                f"{name} takes square matrices, not {a}.", fix="the last two axes must have one size"
            )


def check_here(check: Any, name: str, *xs: Any) -> None:
    """Check operands before any computation, with the user's line in errors."""
    try:
        check(name, *[x.aval for x in xs])
    except errors.BlufuncError as e:
        raise source.located(e) from None


def real_dtype(dtype: np.dtype) -> np.dtype:
    """The real dtype of singular values and the like."""
    return {dtypes.complex64: dtypes.float32, dtypes.complex128: dtypes.float64}.get(dtype, dtype)


def complex_dtype(dtype: np.dtype) -> np.dtype:
    """The complex dtype of eigenvalues."""
    return {dtypes.float32: dtypes.complex64, dtypes.float64: dtypes.complex128}.get(dtype, dtype)


# -- definitions in NumPy --------------------------------------------------------------------------


def routine(name: str, x: np.ndarray) -> Callable:
    """The BLAS or LAPACK routine for an array's dtype, as ``dtrsm`` for "trsm".

    SciPy loads its linear algebra lazily, so importing blufunc does not pay for it.
    """
    full = {"f": "s", "d": "d", "F": "c", "D": "z"}[x.dtype.char] + name
    blas = scipy.linalg.blas
    return getattr(blas, full) if hasattr(blas, full) else getattr(scipy.linalg.lapack, full)


def all_or_nan(function: Callable, x: np.ndarray, outs: Sequence[ShapedArray]) -> list[np.ndarray]:
    """``function(x)`` as arrays of types ``outs``, with NaN where it fails.

    ``function`` takes matrices in batches, and raises ``LinAlgError`` if any of them fails.
    """
    try:
        return _as_types(function(x), outs)
    except np.linalg.LinAlgError:
        pass
    if x.ndim == 2:
        return [np.full(a.shape, np.nan if dtypes.is_inexact(a.dtype) else 0, a.dtype) for a in outs]
    # bisect the batch to find the failing matrix
    lead = x.ndim - 2
    flat = x.reshape(-1, *x.shape[-2:])
    if len(flat) == 1:
        parts = [all_or_nan(function, flat[0], [ShapedArray(a.shape[lead:], a.dtype) for a in outs])]
    else:
        half = len(flat) // 2
        parts = [
            all_or_nan(function, part, [ShapedArray((len(part), *a.shape[lead:]), a.dtype) for a in outs])
            for part in (flat[:half], flat[half:])
        ]
    joined = [xs[0] if len(xs) == 1 else np.concatenate(xs) for xs in zip(*parts, strict=True)]
    return [x.reshape(a.shape) for x, a in zip(joined, outs, strict=True)]


def _as_types(results: Any, outs: Sequence[ShapedArray]) -> list[np.ndarray]:
    results = results if isinstance(results, (tuple, list)) else [results]
    return [np.asarray(r, a.dtype) for r, a in zip(results, outs, strict=True)]


def each(function: Callable, *xs: np.ndarray, outs: Sequence[ShapedArray]) -> list[np.ndarray]:
    """``function(*matrices, types)`` for each batch position, stacked."""
    results = [np.zeros(a.shape, a.dtype) for a in outs]
    lead = xs[0].shape[:-2]
    types = [ShapedArray(a.shape[len(lead) :], a.dtype) for a in outs]
    if all(a.size for a in types):
        for i in np.ndindex(lead):
            for r, value in zip(results, function(*[x[i] for x in xs], types), strict=True):
                r[i] = value
    return results


# -- matrix algebra, for rules ---------------------------------------------------------------------


def matmul(x: Any, y: Any) -> Any:
    """Matmul with equal batch axes."""
    n = x.aval.ndim
    lead = tuple(range(n - 2))
    return dot_general(x, y, (((n - 1,), (n - 2,)), (lead, lead)))


def mT(x: Any) -> Any:
    """Transposes of matrices."""
    n = x.aval.ndim
    return transpose(x, (*range(n - 2), n - 1, n - 2))


def adjoint(x: Any) -> Any:
    """Conjugate transposes of matrices."""
    return ew.conj(mT(x))


def scale_rows(s: Any, x: Any) -> Any:
    """``diag(s) @ x``."""
    return ew.mul(x, _along(ew.convert(s, x.aval.dtype), x, x.aval.ndim - 2))


def scale_columns(x: Any, s: Any) -> Any:
    """``x @ diag(s)``."""
    return ew.mul(x, _along(ew.convert(s, x.aval.dtype), x, x.aval.ndim - 1))


def _along(s: Any, x: Any, d: int) -> Any:
    return broadcast_in_dim(s, x.aval.shape, (*range(x.aval.ndim - 2), d))


def differences(w: Any) -> Any:
    """The matrix of ``w[j] - w[i]``."""
    n, shape = w.aval.ndim, (*w.aval.shape, w.aval.shape[-1])
    lead = range(n - 1)
    return ew.sub(broadcast_in_dim(w, shape, (*lead, n)), broadcast_in_dim(w, shape, (*lead, n - 1)))


def mask(x: Any, compare: Callable, offset: int = 0) -> Any:
    """Where ``compare(column, row + offset)`` holds in matrices of the shape of ``x``."""
    shape = x.aval.shape[-2:]
    row, column = iota(dtypes.int32, shape, 0), iota(dtypes.int32, shape, 1)
    return broadcast_to(compare(column, ew.add(row, offset) if offset else row), x.aval.shape)


def tril(x: Any, offset: int = 0) -> Any:
    """``x`` on diagonal ``offset`` and below, 0 elsewhere."""
    return ew.select(mask(x, ew.le, offset), x, ew.zeros_of(x))


def triu(x: Any, offset: int = 0) -> Any:
    """``x`` on diagonal ``offset`` and above, 0 elsewhere."""
    return ew.select(mask(x, ew.ge, offset), x, ew.zeros_of(x))


def diagonal(x: Any) -> Any:
    """The diagonals of matrices, square or not."""
    *lead, m, n = x.aval.shape
    k = min(m, n)
    x = slice_in_dim(slice_in_dim(x, 0, k, axis=len(lead)), 0, k, axis=len(lead) + 1)
    if not k:
        return reshape(x, (*lead, 0))
    # in row-major order the elements of a diagonal are k + 1 apart
    return slice_in_dim(reshape(x, (*lead, k * k)), 0, k * k, k + 1, axis=len(lead))


def with_diagonal(x: Any, d: Any) -> Any:
    """Square ``x`` with the diagonal ``d``, given as a vector or as a number."""
    if d.aval.ndim:
        d = broadcast_in_dim(d, x.aval.shape, tuple(range(x.aval.ndim - 1)))
    return ew.select(mask(x, ew.eq), d, x)


def off_diagonal(x: Any) -> Any:
    """``x`` with zeros on its diagonal."""
    return ew.select(mask(x, ew.eq), ew.zeros_of(x), x)


def identity_like(x: Any) -> Any:
    """Identity matrices of the shape and dtype of ``x``."""
    return ew.convert(mask(x, ew.eq), x.aval.dtype)


def hermitian_part(x: Any) -> Any:
    """``(x + x^H) / 2``."""
    return ew.mul(ew.add(x, adjoint(x)), 0.5)


def hermitian_from_lower(x: Any) -> Any:
    """The Hermitian matrix with the lower triangle and real diagonal of ``x``."""
    low = tril(x, -1)
    return with_diagonal(ew.add(low, adjoint(low)), ew.convert(ew.real(diagonal(x)), x.aval.dtype))
