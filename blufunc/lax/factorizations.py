"""Factorizations of ``lax.linalg``: compositions, and those without derivatives.

Face: part of ``blufunc.lax.linalg``. Strict, as all of ``lax``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none, static_int
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg import reduction
from blufunc.core.ops.linalg.common import (
    adjoint,
    check_here,
    check_matrices,
    check_square,
    hermitian_part,
    identity_like,
    matmul,
    mT,
    real_dtype,
)
from blufunc.core.ops.linalg.factor import qr
from blufunc.core.ops.linalg.tridiagonal import tridiagonal_solve_p
from blufunc.core.ops.reduce import reduce_max
from blufunc.core.ops.shape import concatenate, iota, slice_in_dim
from blufunc.core.primitives.linear_ops import broadcast_in_dim, move_dim, reduce_sum, reshape
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.control_flow.while_loop import while_loop

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def schur(
    x: ArrayLike,
    *,
    compute_schur_vectors: bool = True,
    sort_eig_vals: bool = False,
    select_callable: Callable | None = None,
) -> list[Array]:
    """The Schur decomposition ``x = Z T Z^H`` of matrices (..., n, n), on the host.

    Args:
      compute_schur_vectors: False: return ``[T]`` alone.
      sort_eig_vals: False: eigenvalues stand on the diagonal in LAPACK's order.
      select_callable: of the sorted ones, so without effect.
    Returns:
      ``[T, Z]``; T is upper triangular, for real x with 2 x 2 blocks for complex eigenvalues. No derivative.
    """
    only_none("schur", "sort_eig_vals", sort_eig_vals)
    return list(reduction.schur_p.bind(lift(x), vectors=True))[: 1 + bool(compute_schur_vectors)]


def hessenberg(a: ArrayLike) -> list[Array]:
    """The Hessenberg form of matrices (..., n, n), packed, on the host.

    Returns:
      H in the upper triangle and the diagonal below it, with LAPACK's reflectors below; and taus (..., n - 1). No
      derivative.
    """
    return list(reduction.hessenberg_p.bind(lift(a)))


def tridiagonal(a: ArrayLike, *, lower: bool = True) -> list[Array]:
    """The tridiagonal form of Hermitian matrices (..., n, n), on the host.

    One triangle is read.


    Returns:
      LAPACK's reflectors, the diagonal (..., n) and the one next to it (..., n - 1), both real, and taus. No
      derivative.
    """
    return list(reduction.tridiagonal_p.bind(lift(a), lower=bool(lower)))


# -- products of reflectors --------------------------------------------------------------------------


def householder_product(a: ArrayLike, taus: ArrayLike) -> Array:
    """The first n columns of a product of reflectors in a (..., m, n); taus (..., k)."""
    a, taus = reduction.check_reflectors("householder_product", a, taus)
    v, t = reduction.reflectors(a, taus)
    n = a.aval.shape[-1]
    head = slice_in_dim(adjoint(v), 0, n, axis=a.aval.ndim - 1)
    return ew.sub(identity_like(a), matmul(v, matmul(t, head)))


def ormqr(
    a: ArrayLike, taus: ArrayLike, c: ArrayLike, *, left: bool = True, transpose: bool = False
) -> Array:
    """``Q c``, with Q (..., m, m) a product of packed reflectors, or ``c Q``.

    Args:
      a, taus: reflectors (..., m, n) and (..., k), of ``hessenberg`` or ``qr(mode="raw")``.
      c: (..., m, p), or on the right (..., p, m).
      left: on which side Q stands.
      transpose: take Q^H for Q.
    """
    a, taus = reduction.check_reflectors("ormqr", a, taus)
    c = lift(c)
    check_here(check_matrices, "ormqr", a, c)
    m = a.aval.shape[-2]
    if c.aval.ndim != a.aval.ndim or c.aval.shape[-2 if left else -1] != m:
        raise errors.ShapeError(
            f"ormqr of reflectors {a.aval} and {c.aval}.",
            where=source.here(),
            fix=f"c has {m} {'rows' if left else 'columns'}, as a has rows",
        )
    v, t = reduction.reflectors(a, taus)
    t = adjoint(t) if transpose else t
    if left:
        return ew.sub(c, matmul(v, matmul(t, matmul(adjoint(v), c))))
    return ew.sub(c, matmul(matmul(matmul(c, v), t), adjoint(v)))


# -- compositions ------------------------------------------------------------------------------------


def symmetric_product(
    a_matrix: ArrayLike,
    c_matrix: ArrayLike,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    symmetrize_output: bool = False,
) -> Array:
    """``alpha a a^T + beta c`` of matrices (..., m, n) and (..., m, m).

    ``symmetrize_output`` is JAX's; both triangles are always computed.
    """
    a, c = lift(a_matrix), lift(c_matrix)
    check_here(check_matrices, "symmetric_product", a, c)
    m = a.aval.shape[-2]
    if c.aval.shape != (*a.aval.shape[:-2], m, m):
        raise errors.ShapeError(
            f"symmetric_product of {a.aval} and {c.aval}.",
            where=source.here(),
            fix="a is (..., m, n), c (..., m, m)",
        )
    return ew.add(ew.mul(matmul(a, mT(a)), alpha), ew.mul(c, beta))


def cholesky_update(r_matrix: ArrayLike, w_vector: ArrayLike) -> Array:
    """The factor of ``r^T r + w w^T``, by rotations of each row of r with w.

    G. H. Golub and C. F. Van Loan, "Matrix Computations" (2013), section 6.5.4.

    Args:
      r_matrix: upper triangular and real, (n, n).
      w_vector: (n,).
    """
    r, w = lift(r_matrix), lift(w_vector)
    check_here(check_square, "cholesky_update", r)
    if dtypes.is_complex(r.aval.dtype) or r.aval.ndim != 2 or w.aval.shape != r.aval.shape[:1]:
        raise errors.ShapeError(
            f"cholesky_update of {r.aval} by {w.aval}.",
            where=source.here(),
            fix="r is real, (n, n), and w (n,); use vmap for batches",
        )
    place = iota(dtypes.int32, w.aval.shape, 0)

    def rotate(w, row_and_index):
        row, k = row_and_index
        here = ew.eq(place, k)
        at = lambda x: reduce_sum(ew.select(here, x, ew.zeros_of(x)), (0,))
        a, b = at(row), at(w)
        size = ew.sqrt(ew.add(ew.square(a), ew.square(b)))
        c, s = ew.div(a, size), ew.div(b, size)
        return ew.sub(ew.mul(w, c), ew.mul(row, s)), ew.add(ew.mul(row, c), ew.mul(w, s))

    return scan(rotate, w, (r, place))[1]


def qdwh(
    x: ArrayLike,
    *,
    is_hermitian: bool = False,
    max_iterations: int | None = None,
    eps: float | None = None,
    dynamic_shape: None = None,
) -> tuple[Array, Array, Array, Array]:
    """The polar decomposition ``x = u h`` of (m, n), m >= n, by QR decompositions.

    Y. Nakatsukasa, Z. Bai and F. Gygi, "Optimizing Halley's iteration for computing the matrix polar decomposition"
    (2010).

    Args:
      x: of full rank.
      is_hermitian: JAX's; h is made Hermitian in any case.
      max_iterations: 10 by default.
      eps: the precision; that of the dtype by default.
      dynamic_shape: None.
    Returns:
      u (m, n) with orthonormal columns, h (n, n), the number of iterations, and whether they converged.
    """
    only_none("qdwh", "dynamic_shape", dynamic_shape)
    x = lift(x)
    check_here(check_matrices, "qdwh", x)
    m, n = x.aval.shape[-2:]
    if x.aval.ndim != 2 or m < n:
        raise errors.ShapeError(
            f"qdwh of {x.aval}.", where=source.here(), fix="a matrix with as many rows as columns, or more"
        )
    real = real_dtype(x.aval.dtype)
    precision = float(dtypes.finfo(real).eps) if eps is None else eps
    steps = 10 if max_iterations is None else static_int(max_iterations, "qdwh", "max_iterations")
    # the 2-norm is at most the root of the product of those of rows and columns
    norms = [reduce_max(reduce_sum(ew.abs(x), (d,)), (0,)) for d in (0, 1)]
    bound = ew.sqrt(ew.mul(*norms))
    start = ew.div(x, ew.convert(ew.select(ew.gt(bound, 0), bound, ew.ones_of(bound)), x.aval.dtype))

    def step(state):
        u, low, count, _ = state
        a, b, c = _halley(low)
        wide = lambda s: ew.convert(s, x.aval.dtype)
        stacked = concatenate([ew.mul(u, wide(ew.sqrt(c))), identity_like(slice_in_dim(u, 0, n, axis=0))], 0)
        q, _ = qr(stacked, full_matrices=False)
        top, below = slice_in_dim(q, 0, m, axis=0), slice_in_dim(q, m, m + n, axis=0)
        gain = ew.div(ew.sub(a, ew.div(b, c)), ew.sqrt(c))
        new = ew.add(ew.mul(u, wide(ew.div(b, c))), ew.mul(matmul(top, adjoint(below)), wide(gain)))
        square = ew.square(low)
        low = ew.div(ew.mul(low, ew.add(a, ew.mul(b, square))), ew.add(ew.mul(c, square), 1))
        moved = ew.sub(new, u)
        change = ew.sqrt(reduce_sum(ew.real(ew.mul(moved, ew.conj(moved))), (0, 1)))
        low = ew.min(low, 1.0)
        # a step leaves large singular values alone while it raises small ones: all must be near 1, too. Convergence is
        # cubic, so that a change by the cube root of the precision is the last
        near_one = ew.gt(low, 1 - 5 * precision)
        done = ew.logical_and(near_one, ew.lt(change, (4 * precision) ** (1 / 3)))
        return new, low, ew.add(count, 1), done

    first = (start, ew.convert(precision, real), ew.convert(0, dtypes.int32), ew.convert(False, dtypes.bool_))
    u, _, count, done = while_loop(lambda s: ew.bitwise_not(s[3]), step, first, max_steps=steps)
    return u, hermitian_part(matmul(adjoint(u), x)), count, done


def _halley(low: Any) -> tuple[Any, Any, Any]:
    """The weights of a step for singular values in [low, 1]."""
    square = ew.square(low)
    d = ew.cbrt(ew.div(ew.mul(ew.sub(1.0, square), 4.0), ew.square(square)))
    root = ew.sqrt(ew.add(d, 1.0))
    inner = ew.div(ew.mul(ew.sub(2.0, square), 8.0), ew.mul(square, root))
    a = ew.add(root, ew.mul(ew.sqrt(ew.add(ew.sub(8.0, ew.mul(d, 4.0)), inner)), 0.5))
    b = ew.mul(ew.square(ew.sub(a, 1.0)), 0.25)
    return a, b, ew.sub(ew.add(a, b), 1.0)


# -- tridiagonal systems -----------------------------------------------------------------------------


def tridiagonal_solve(
    dl: ArrayLike, d: ArrayLike, du: ArrayLike, b: ArrayLike, *, perturb_singular: bool = False
) -> Array:
    """Solve ``dl[i] x[i-1] + d[i] x[i] + du[i] x[i+1] = b[i]``; NaN where singular.

    Args:
      dl, d, du: the diagonals below, on and above the main one, (..., n); ``dl[0]`` and ``du[n-1]`` are not read.
      b: (..., n, k), of the same dtype.
      perturb_singular: a pivot of 0 becomes the smallest normal number, so that the solution is large, not NaN.
    """
    operands = [lift(x) for x in (dl, d, du, b)]
    if not perturb_singular:
        return tridiagonal_solve_p.bind(*operands)
    tridiagonal_solve_p.typed(tuple([x.aval for x in operands]), {})  # checks them
    return _perturbed_solve(*operands)


def _perturbed_solve(dl: Any, d: Any, du: Any, b: Any) -> Any:
    """Elimination with partial pivoting, and substitution, as two scans over the rows."""
    n, axis = d.aval.shape[-1], d.aval.ndim - 1
    tiny = float(dtypes.finfo(real_dtype(d.aval.dtype)).tiny)
    rows = [move_dim(x, axis, 0) for x in (dl, d, du)]
    right = move_dim(b, axis, 0)
    wide = lambda x: broadcast_in_dim(x, right.aval.shape[1:], tuple(range(x.aval.ndim)))
    regular = lambda p: ew.select(ew.eq(p, 0), ew.mul(ew.ones_of(p), tiny), p)

    def eliminate(state, row):
        pivot, above, value = state
        low, own, up, rhs = row
        swap = ew.lt(ew.abs(pivot), ew.abs(low))
        pick = functools.partial(ew.select, swap)
        pivot_row = (regular(pick(low, pivot)), pick(own, above), pick(up, ew.zeros_of(up)))
        factor = ew.div(pick(pivot, low), pivot_row[0])
        wider = lambda x, y: ew.select(wide(swap), x, y)
        kept = wider(rhs, value)
        new = (
            ew.sub(pick(above, own), ew.mul(factor, pivot_row[1])),
            ew.sub(pick(ew.zeros_of(up), up), ew.mul(factor, pivot_row[2])),
            ew.sub(wider(value, rhs), ew.mul(wide(factor), kept)),
        )
        return new, (*pivot_row, kept)

    first = lambda x: reshape(slice_in_dim(x, 0, 1, axis=0), x.aval.shape[1:])
    rest = lambda x: slice_in_dim(x, 1, n, axis=0)
    start = (first(rows[1]), first(rows[2]), first(right))
    last, upper = scan(eliminate, start, (rest(rows[0]), rest(rows[1]), rest(rows[2]), rest(right)))
    end = ew.div(last[2], wide(regular(last[0])))

    def substitute(state, row):
        following, second = state
        pivot, up, up2, value = row
        x = ew.sub(value, ew.add(ew.mul(wide(up), following), ew.mul(wide(up2), second)))
        x = ew.div(x, wide(pivot))
        return (x, following), x

    _, xs = scan(substitute, (end, ew.zeros_like(end)), upper, reverse=True)
    return move_dim(concatenate([xs, reshape(end, (1, *end.aval.shape))], 0), 0, axis)


__all__ = [
    "cholesky_update", "hessenberg", "householder_product", "ormqr", "qdwh", "schur", "symmetric_product",
    "tridiagonal", "tridiagonal_solve",
]  # fmt: skip
