"""Factorizations by elimination and reflection: ``cholesky``, ``lu`` and ``qr``.

Core operations, above ``triangular``. Each derivative transforms the tangent of A by the factors, then splits
it into their tangents by its triangles. Sources: I. Murray, "Differentiation of the Cholesky decomposition"
(2016); S. F. Walter and L. Lehmann, "Algorithmic differentiation of linear algebra functions with application
in optimum experimental design" (2010) for QR; M. Seeger et al., "Auto-differentiating linear algebra" (2017);
M. Giles (2008) for the algebra in all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import static_int
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg import many as linalg_many
from blufunc.core.ops.linalg.common import (
    MatrixOp,
    adjoint,
    all_or_nan,
    check_here,
    check_matrices,
    check_square,
    diagonal,
    each,
    hermitian_from_lower,
    hermitian_part,
    identity_like,
    mask,
    matmul,
    mT,
    routine,
    tril,
    triu,
    with_diagonal,
)
from blufunc.core.ops.linalg.triangular import triangular_solve
from blufunc.core.ops.shape import pad, slice_
from blufunc.core.ops.sort import pick_along
from blufunc.core.primitives.linear_ops import add_any, batched_front, broadcast_in_dim
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import leading
from blufunc.core.primitives.tangents import Zero, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

# -- Cholesky --------------------------------------------------------------------------------------


class _Cholesky(MatrixOp):
    """Lower triangular L with ``A = L L^H``; reads A's lower triangle."""

    name = "cholesky"

    def impl(self, x):
        (out,) = all_or_nan(np.linalg.cholesky, x, [ShapedArray(x.shape, x.dtype)])
        return np.tril(out)  # after a failure, still zeros above the diagonal

    def abstract(self, x):
        check_square(self.name, x)
        return x.strong()

    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        low = self.bind(x)
        if t.__class__ is Zero:
            return low, zero(low.aval)
        inner = triangular_solve(low, hermitian_from_lower(t), left_side=True, lower=True)
        inner = triangular_solve(low, inner, lower=True, transpose_a=True, conjugate_a=True)
        half = with_diagonal(tril(inner), ew.mul(diagonal(inner), 0.5))
        return low, matmul(low, half)


cholesky_p = _Cholesky()


def cholesky(x: ArrayLike, *, symmetrize_input: bool = True) -> Array:
    """Lower triangular L with ``x = L L^H``; NaN unless Hermitian positive definite.

    Args:
      x: (..., n, n).
      symmetrize_input: factor ``(x + x^H) / 2``; otherwise the lower triangle alone is read.
    """
    x = lift(x)
    if symmetrize_input:
        check_here(check_square, "cholesky", x)
        x = hermitian_part(x)
    return cholesky_p.bind(x)


# -- LU --------------------------------------------------------------------------------------------


class _LU(MatrixOp):
    """``A[permutation] = L U``, partial pivoting: packed factors, pivots, permutation.

    The first result has U in its upper triangle and, below the diagonal, L, whose diagonal is ones.
    ``pivots[i]`` is the row swapped with row i. A is (..., m, n), of any rank.
    """

    name, multiple_results = "lu", True

    def impl(self, x):
        types = _lu_types(x)
        if linalg_many.is_many(x.shape):
            results = linalg_many.lu(x.reshape(-1, *x.shape[-2:]))
            return [r.reshape(t.shape) for r, t in zip(results, types, strict=True)]
        return each(_lu_of_one, x, outs=types)

    def abstract(self, x):
        check_matrices(self.name, x)
        return _lu_types(x)

    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        lu, pivots, permutation = self.bind(x)
        nothing = [zero(pivots.aval), zero(permutation.aval)]
        if t.__class__ is Zero:
            return [lu, pivots, permutation], [zero(lu.aval), *nothing]
        *lead, m, n = x.aval.shape
        k = min(m, n)
        # both factors as square matrices, extended by the identity
        lower = _grown(slice_(lu, (0,) * x.aval.ndim, (*lead, m, k)), (*lead, m, m))
        upper = _grown(slice_(lu, (0,) * x.aval.ndim, (*lead, k, n)), (*lead, n, n))
        inner = triangular_solve(
            lower, take_rows(t, permutation), left_side=True, lower=True, unit_diagonal=True
        )
        inner = triangular_solve(upper, inner)
        lower = with_diagonal(tril(lower), ew.ones_of(lower))
        left, right = matmul(lower, tril(inner, -1)), matmul(triu(inner), triu(upper))
        return [lu, pivots, permutation], [ew.add(left, right), *nothing]


def _lu_of_one(x: np.ndarray, types: Any) -> tuple:
    lu, pivots, _ = routine("getrf", x)(x)
    return lu, pivots, _permutation(pivots, len(x))


def _lu_types(x: Any) -> list[ShapedArray]:
    *lead, m, n = x.shape
    pivots = ShapedArray((*lead, min(m, n)), dtypes.int32)
    return [ShapedArray(x.shape, x.dtype), pivots, ShapedArray((*lead, m), dtypes.int32)]


def _grown(x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` at the top left of an identity matrix."""
    config = [(0, n - m, 0) for m, n in zip(x.aval.shape, shape, strict=True)]
    grown = pad(x, ew.zeros_of(x), config)
    if grown is x:
        return x
    (m, n) = (x.aval.shape[-2], x.aval.shape[-1])
    inside = mask(grown, lambda column, row: ew.lt(column if n < shape[-1] else row, min(m, n)))
    return ew.select(inside, grown, identity_like(grown))


def take_rows(x: Any, permutation: Any) -> Any:
    """The rows of matrices in the order of a permutation for each."""
    index = broadcast_in_dim(permutation, x.aval.shape, tuple(range(x.aval.ndim - 1)))
    return pick_along(x, index, x.aval.ndim - 2)


class _PivotsToPermutation(Primitive):
    """The permutation for row swaps: i with ``pivots[i]``, for i = 0, 1, ... in turn."""

    name, kind, fresh = "lu_pivots_to_permutation", "linalg", True

    shard = staticmethod(leading(1, trusted=frozenset({0})))

    def impl(self, pivots, *, permutation_size):
        out = np.empty((*pivots.shape[:-1], permutation_size), np.int32)
        for i in np.ndindex(pivots.shape[:-1]):
            out[i] = _permutation(pivots[i], permutation_size)
        return out

    def abstract(self, pivots, *, permutation_size):
        if pivots.dtype != dtypes.int32:
            raise errors.DtypeError(f"{self.name} takes int32, not {pivots}.", fix="x.astype('int32')")
        if not pivots.ndim or permutation_size < pivots.shape[-1]:
            raise errors.ShapeError(
                f"{self.name} of {pivots} into {permutation_size} rows: pivots are vectors, no longer than that.",
                fix="pass the number of rows of the matrix",
            )
        return ShapedArray((*pivots.shape[:-1], permutation_size), dtypes.int32)

    def jvp(self, primals, tangents, **params):
        out = self.bind(*primals, **params)
        return out, zero(out.aval)

    transpose = unsupported("integers have no derivative")

    def batch(self, axis, args, dims, **params):
        return self.bind(batched_front(axis, args[0], dims[0]), **params), 0


def _permutation(pivots: np.ndarray, rows: int) -> np.ndarray:
    order = list(range(rows))
    for i, j in enumerate(pivots.tolist()):
        if 0 <= j < rows:
            order[i], order[j] = order[j], order[i]
    return np.array(order, np.int32)


lu_p = _LU()
lu_pivots_to_permutation_p = _PivotsToPermutation()


def lu(x: ArrayLike) -> tuple[Array, Array, Array]:
    """LU decomposition with partial pivoting: ``x[permutation] = L U``.

    Args:
      x: (..., m, n), of any rank.
    Returns:
      the packed factors (..., m, n): U in the upper triangle, L without its diagonal of ones below; the pivots, int32
      (..., min(m, n)): row i was swapped with row ``pivots[i]``; the permutation, int32 (..., m).
    """
    packed, pivots, permutation = lu_p.bind(lift(x))
    return packed, pivots, permutation


def lu_pivots_to_permutation(pivots: ArrayLike, permutation_size: int) -> Array:
    """The permutation (..., permutation_size) for ``lu``'s pivots (..., k); int32."""
    size = static_int(permutation_size, "lu_pivots_to_permutation", "permutation_size")
    return lu_pivots_to_permutation_p.bind(lift(pivots), permutation_size=size)


# -- QR --------------------------------------------------------------------------------------------


class _QR(MatrixOp):
    """``A = Q R`` by Householder reflections; R has a real diagonal.

    With ``pivoting``, ``A[:, p] = Q R``, the diagonal of R falls in absolute value, and p is the third result.
    """

    name, multiple_results = "qr", True

    def impl(self, x, *, full_matrices, pivoting):
        types = self._types(x, full_matrices, pivoting)
        if pivoting:
            return each(lambda m, types: _qr_pivoted(m, full_matrices), x, outs=types)
        return all_or_nan(lambda x: np.linalg.qr(x, "complete" if full_matrices else "reduced"), x, types)

    def abstract(self, x, *, full_matrices, pivoting):
        check_matrices(self.name, x)
        return self._types(x, full_matrices, pivoting)

    def _types(self, x, full_matrices, pivoting) -> list[ShapedArray]:
        *lead, m, n = x.shape
        k = m if full_matrices else min(m, n)
        types = [ShapedArray((*lead, m, k), x.dtype), ShapedArray((*lead, k, n), x.dtype)]
        return [*types, ShapedArray((*lead, n), dtypes.int32)] if pivoting else types

    def jvp(self, primals, tangents, *, full_matrices, pivoting):
        (x,), (t,) = primals, tangents
        q, r, *order = self.bind(x, full_matrices=full_matrices, pivoting=pivoting)
        nothing = [zero(p.aval) for p in order]
        if t.__class__ is Zero:
            return [q, r, *order], [zero(q.aval), zero(r.aval), *nothing]
        *lead, m, n = x.aval.shape
        if full_matrices and m > n:
            raise errors.GradError(
                f"qr of {x.aval} with full_matrices has no derivative.",
                where=source.here(),
                why="the last columns of Q are any basis of what A does not reach: they are not a function of A.",
                fix="full_matrices=False, or mode='reduced'",
            )
        if order:
            t = mT(take_rows(mT(t), order[0]))
        # the first m columns of a wide A determine Q; the rest affect R only
        k, start = min(m, n), (0,) * x.aval.ndim
        square, t_first = slice_(r, start, (*lead, k, k)), slice_(t, start, (*lead, m, k))
        moved = triangular_solve(square, t_first)
        inner = matmul(adjoint(q), moved)
        # Q^H dQ is skew-Hermitian, and R's part of ``inner`` is upper triangular with a real diagonal
        low = tril(inner, -1)
        turn = ew.sub(low, adjoint(low))
        if dtypes.is_complex(x.aval.dtype):
            d = diagonal(inner)
            turn = with_diagonal(turn, ew.sub(d, ew.convert(ew.real(d), d.aval.dtype)))
        tq = add_any(matmul(q, ew.sub(turn, inner)), moved)
        tr = triu(matmul(adjoint(q), ew.sub(t, matmul(tq, r))))
        return [q, r, *order], [tq, tr, *nothing]


def _qr_pivoted(x: np.ndarray, full_matrices: bool) -> tuple:
    m, n = x.shape
    k = min(m, n)
    packed, order, tau, _, _ = routine("geqp3", x)(x)
    columns = m if full_matrices else k
    reflectors = np.zeros((m, columns), x.dtype, "F")
    reflectors[:, :k] = packed[:, :k]
    generate = routine("orgqr" if x.dtype.kind == "f" else "ungqr", x)
    q, _, _ = generate(reflectors, tau)
    return q, np.triu(packed[:columns]), order - 1


qr_p = _QR()


def qr(x: ArrayLike, *, pivoting: bool = False, full_matrices: bool = True) -> tuple[Array, ...]:
    """QR decomposition: ``x = Q R``, or with ``pivoting`` ``x[:, p] = Q R``.

    Args:
      x: (..., m, n).
      pivoting: permute columns so that the diagonal of R falls in absolute value.
      full_matrices: Q is (..., m, m) and R (..., m, n), in the place of (..., m, k) and (..., k, n), k = min(m, n).
    Returns:
      ``(q, r)``, or with ``pivoting`` ``(q, r, p)``, p int32 (..., n). Differentiable for m <= n, or without
      ``full_matrices``, where the first k columns are linearly independent.
    """
    return tuple(qr_p.bind(lift(x), full_matrices=bool(full_matrices), pivoting=bool(pivoting)))
