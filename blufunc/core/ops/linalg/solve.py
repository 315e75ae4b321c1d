"""``solve``: linear systems, with one LU decomposition for value and derivatives.

Core operations, above ``factor``. The derivative is implicit: where ``A x = b``, ``A dx = db - dA x``; its transpose
is a solve with the transposed matrix. The decomposition is never differentiated, and all solves share it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.common import MatrixOp, check_here, check_matrices, check_square, matmul, mT
from blufunc.core.ops.linalg.factor import lu_p
from blufunc.core.ops.linalg.triangular import batch_columns, check_system, solve_triangles
from blufunc.core.primitives.linear_ops import add_tangents
from blufunc.core.primitives.sharding import leading
from blufunc.core.primitives.tangents import Zero, is_linear, zero


class _LUSolve(MatrixOp):
    """The solution x of ``a x = b``, or of ``a^T x = b``, from the LU decomposition.

    ``a`` itself is not read: it only carries derivatives. The factors are a function of it, and their
    tangents are ignored; callers wrap them in ``stop_gradient``.
    """

    name = "lu_solve"

    shard = staticmethod(leading(2, trusted=frozenset({2})))

    def impl(self, a, lu, permutation, b, *, transposed):
        order = permutation[..., None]
        if not transposed:
            x = solve_triangles(lu, np.take_along_axis(b, order, -2), True, False, False, True)
            return solve_triangles(lu, x, False, False, False, False)
        y = solve_triangles(lu, b, False, True, False, False)
        x = np.empty_like(b)
        np.put_along_axis(x, order, solve_triangles(lu, y, True, True, False, True), -2)
        return x

    def abstract(self, a, lu, permutation, b, *, transposed):
        check_matrices(self.name, a, lu, b)
        check_square(self.name, a, lu)
        check_system(self.name, a, b, -2)
        if lu.shape != a.shape or permutation.shape != a.shape[:-1]:
            raise errors.ShapeError(f"lu_solve of {a}: {lu} and {permutation} are not its LU decomposition.")
        if not dtypes.is_integer(permutation.dtype):
            raise errors.DtypeError(f"lu_solve takes an integer permutation, not {permutation}.")
        return b.strong()

    def jvp(self, primals, tangents, *, transposed):
        a, lu, permutation, b = primals
        ta, _, _, tb = tangents
        x = self.bind(a, lu, permutation, b, transposed=transposed)
        if ta.__class__ is not Zero:
            tb = add_tangents(tb, ew.neg(matmul(mT(ta) if transposed else ta, x)))
        if tb.__class__ is Zero:
            return x, zero(x.aval)
        return x, self.bind(a, lu, permutation, tb, transposed=transposed)

    def transpose(self, ct, a, lu, permutation, b, *, transposed):
        if is_linear(a) or is_linear(lu):
            raise errors.GradError("lu_solve is linear in the right hand side only.", where=source.here())
        b.add(self.bind(a, lu, permutation, ct, transposed=not transposed))

    def batch(self, axis, args, dims, *, transposed):
        if any(d is not None for d in dims[:3]):
            return super().batch(axis, args, dims, transposed=transposed)
        return batch_columns(
            axis.size, args[3], dims[3], True, lambda b: self.bind(*args[:3], b, transposed=transposed)
        )


lu_solve_p = _LUSolve()


def solve(a: Any, b: Any) -> Any:
    """The solution x of ``a x = b``.

    Args:
      a: (..., n, n); where it is singular, the result has infinities and NaN.
      b: (..., n, k), of the same dtype and batch axes.
    """
    a, b = lift(a), lift(b)
    check_here(check_square, "solve", a)
    packed, _, permutation = lu_p.bind(ew.stop_gradient(a))
    return lu_solve_p.bind(a, packed, permutation, b, transposed=False)
