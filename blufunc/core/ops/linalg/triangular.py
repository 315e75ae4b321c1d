"""``triangular_solve``: linear systems with triangular matrices.

Core operations, above ``common``; every solver and every factorization's derivative uses it. The derivative
and its transpose are solves with the same matrix: M. Giles, "An extended collection of matrix derivative
results for forward and reverse mode algorithmic differentiation" (2008), section 2.3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg import many as linalg_many
from blufunc.core.ops.linalg.common import (
    MatrixOp,
    check_matrices,
    check_square,
    each,
    matmul,
    mT,
    routine,
    tril,
    triu,
)
from blufunc.core.ops.shape import expand_dims, squeeze
from blufunc.core.primitives.linear_ops import add_tangents, move_dim, reshape
from blufunc.core.primitives.tangents import Zero, is_linear, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


class _TriangularSolve(MatrixOp):
    """The solution X of ``op(A) X = B``, or of ``X op(A) = B`` unless ``left_side``.

    A is the lower or upper triangle of the first operand, with ones on its diagonal if ``unit_diagonal``;
    only that triangle is read. ``op`` transposes if ``transpose_a`` and conjugates if ``conjugate_a``. A
    singular A gives infinities and NaN.
    """

    name = "triangular_solve"

    def impl(self, a, b, *, left_side, lower, transpose_a, conjugate_a, unit_diagonal):
        if not left_side:
            b, transpose_a = b.swapaxes(-1, -2), not transpose_a
        x = solve_triangles(a, b, lower, transpose_a, conjugate_a, unit_diagonal)
        return x if left_side else x.swapaxes(-1, -2)

    def abstract(self, a, b, *, left_side, **params):
        check_matrices(self.name, a, b)
        check_square(self.name, a)
        check_system(self.name, a, b, -2 if left_side else -1)
        return b.strong()

    def jvp(self, primals, tangents, *, left_side, lower, transpose_a, conjugate_a, unit_diagonal):
        a, b = primals
        ta, tb = tangents
        params = {"left_side": left_side, "lower": lower, "transpose_a": transpose_a, "conjugate_a": conjugate_a,
                  "unit_diagonal": unit_diagonal}  # fmt: skip
        x = self.bind(a, b, **params)
        if ta.__class__ is not Zero:
            ta = tril(ta, -unit_diagonal) if lower else triu(ta, int(unit_diagonal))
            ta = mT(ta) if transpose_a else ta
            ta = ew.conj(ta) if conjugate_a else ta
            tb = add_tangents(tb, ew.neg(matmul(ta, x) if left_side else matmul(x, ta)))
        return x, zero(x.aval) if tb.__class__ is Zero else self.bind(a, tb, **params)

    def transpose(self, ct, a, b, *, transpose_a, **params):
        if is_linear(a):
            raise errors.GradError(f"{self.name} is linear in its second operand only.", where=source.here())
        b.add(self.bind(a, ct, transpose_a=not transpose_a, **params))

    def batch(self, axis, args, dims, **params):
        if dims[0] is not None:
            return super().batch(axis, args, dims, **params)
        return batch_columns(
            axis.size, args[1], dims[1], params["left_side"], lambda b: self.bind(args[0], b, **params)
        )


triangular_solve_p = _TriangularSolve()


def solve_triangles(
    a: np.ndarray, b: np.ndarray, lower: bool, transposed: bool, conjugated: bool, unit: bool
) -> np.ndarray:
    """The solutions of ``op(a) x = b`` for batches of triangular matrices."""
    if linalg_many.is_many(a.shape):
        n, k = b.shape[-2:]
        a = a.swapaxes(-1, -2) if transposed else a
        a = a.conj() if conjugated else a
        flat = linalg_many.solve_triangles(
            a.reshape(-1, n, n), b.reshape(-1, n, k), lower != transposed, unit
        )
        return flat.reshape(b.shape)
    one = lambda a, b, types: [_solve_triangle(a, b, lower, transposed, conjugated, unit)]
    return each(one, a, b, outs=[ShapedArray(b.shape, b.dtype)])[0]


def _solve_triangle(
    a: np.ndarray, b: np.ndarray, lower: bool, transposed: bool, conjugated: bool, unit: bool
) -> Any:
    """The solution of one system ``op(a) x = b``, by BLAS."""
    # BLAS requires column-major matrices: pass x^T op(a)^T = b^T, which it can read in place
    if a.flags.c_contiguous:
        matrix, lower, turned = a.T, not lower, transposed
    else:
        matrix, turned = a, not transposed
    if conjugated and not turned:
        matrix = matrix.conj()
    code = 0 if not turned else 2 if conjugated else 1
    return routine("trsm", a)(1, matrix, b.T, side=1, lower=lower, trans_a=code, diag=unit).T


def check_system(name: str, a: ShapedArray, b: ShapedArray, d: int) -> None:
    """Raise unless square ``a`` fits axis ``d`` of ``b``, with equal batch axes."""
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[d]:
        raise errors.ShapeError(
            f"{name} of {a} and {b}: the batch axes must agree, and axis {d} of the second have size {a.shape[-1]}.",
            fix="use blufunc.numpy, which broadcasts",
        )


def batch_columns(size: int, b: Any, d: int, columns: bool, solve: Any) -> tuple[Any, int]:
    """Batching rule for batched right hand sides only: they become columns (or rows).

    The matrix is not repeated: the whole batch is one system.
    """
    n = b.aval.ndim - 1  # of one example
    to = n if columns else n - 2
    b = move_dim(b, d, to)
    *lead, i, j, k = b.aval.shape
    x = solve(reshape(b, (*lead, i, j * k) if columns else (*lead, i * j, k)))
    return reshape(x, (*lead, i, j, k)), to


def triangular_solve(
    a: ArrayLike,
    b: ArrayLike,
    *,
    left_side: bool = False,
    lower: bool = False,
    transpose_a: bool = False,
    conjugate_a: bool = False,
    unit_diagonal: bool = False,
) -> Array:
    """The solution X of ``X op(A) = B``, or with ``left_side`` of ``op(A) X = B``.

    Args:
      a: matrices, of which one triangle is read: the lower one if ``lower``, else the upper.
      b: right hand sides of the same dtype and batch axes; or one vector for each matrix, with an axis less than ``a``.
      transpose_a, conjugate_a: define ``op``.
      unit_diagonal: take the diagonal of A as ones, and do not read it.
    """
    a, b = lift(a), lift(b)
    params = {"left_side": bool(left_side), "lower": bool(lower), "transpose_a": bool(transpose_a),
              "conjugate_a": bool(conjugate_a), "unit_diagonal": bool(unit_diagonal)}  # fmt: skip
    if b.aval.ndim and b.aval.ndim == a.aval.ndim - 1:
        d = b.aval.ndim if left_side else b.aval.ndim - 1
        return squeeze(triangular_solve_p.bind(a, expand_dims(b, (d,)), **params), (d,))
    return triangular_solve_p.bind(a, b, **params)
