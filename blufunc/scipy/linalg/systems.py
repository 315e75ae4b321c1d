"""Factorizations and solvers of ``scipy.linalg``.

Face over ``core.ops.linalg_*`` and ``bnp.linalg``. As in SciPy a triangle that is not asked for is not read, and
derivatives are with respect to the one that is. Functions take batches of matrices in leading axes. ``overwrite_a``,
``overwrite_b``, ``check_finite``, ``debug`` and ``lapack_driver`` are there for programs written for SciPy, and change
nothing: arrays are immutable, and what is not finite gives NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg import common as matrices
from blufunc.core.ops.linalg import factor as linalg_factor
from blufunc.core.ops.linalg import spectral, triangular
from blufunc.core.ops.linalg.common import (
    adjoint,
    check_here,
    check_matrices,
    check_square,
    matmul,
    mT,
    tril,
    triu,
)
from blufunc.core.ops.linalg.factor import lu_pivots_to_permutation, take_rows
from blufunc.core.ops.shape import iota, slice_
from blufunc.core.ops.sort import place_along
from blufunc.core.primitives.linear_ops import broadcast_in_dim, broadcast_to
from blufunc.numpy import linalg as bnp_linalg
from blufunc.numpy.linalg import solution, square, system
from blufunc.numpy.linear import matmul as bnp_matmul
from blufunc.numpy.promotion import as_value, inexact, promote_dtypes
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

# -- operands --------------------------------------------------------------------------------------


def _pair(x: Any, name: str, what: str) -> tuple[Any, Any]:
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise errors.ArgumentError(
            f"{name}: the first argument is the pair {what}, not {x!r:.60}.",
            where=source.here(),
            fix=f"pass what {name.replace('solve', 'factor')} returned",
        )
    return x[0], x[1]


# -- factorizations, and solving with them ---------------------------------------------------------


def cholesky(
    a: ArrayLike, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> Array:
    """Cholesky factor: upper, ``a = U^H @ U``, or with ``lower``, ``a = L @ L^H``.

    It is NaN where there is none.

    Args:
      a: Hermitian positive definite matrices (..., n, n), of which only that triangle is read.
    """
    a = square(a, "cholesky")
    low = linalg_factor.cholesky(a if lower else adjoint(a), symmetrize_input=False)
    return low if lower else adjoint(low)


def cho_factor(
    a: ArrayLike, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[Array, bool]:
    """``(cholesky(a, lower), lower)``, for ``cho_solve``."""
    return cholesky(a, lower), bool(lower)


def cho_solve(c_and_lower: Any, b: ArrayLike, overwrite_b: bool = False, check_finite: bool = True) -> Array:
    """The x with ``a @ x = b``, given ``cho_factor(a)``; b is (n,) or (..., n, k)."""
    c, lower = _pair(c_and_lower, "cho_solve", "(c, lower)")
    c, b, vector = system(c, b, "cho_solve")
    adjoint_first = {"transpose_a": not lower, "conjugate_a": not lower}
    adjoint_then = {"transpose_a": bool(lower), "conjugate_a": bool(lower)}
    x = triangular.triangular_solve(c, b, left_side=True, lower=lower, **adjoint_first)
    x = triangular.triangular_solve(c, x, left_side=True, lower=lower, **adjoint_then)
    return solution(x, vector)


def lu_factor(a: ArrayLike, overwrite_a: bool = False, check_finite: bool = True) -> tuple[Array, Array]:
    """Packed LU decomposition of matrices (..., n, n), and pivots, for ``lu_solve``."""
    packed, pivots, _ = linalg_factor.lu(square(a, "lu_factor"))
    return packed, pivots


_TRANSPOSED = {0: (False, False), 1: (True, False), 2: (True, True), "N": (False, False), "T": (True, False),
               "C": (True, True)}  # fmt: skip


def _transposed(trans: Any, name: str) -> tuple[bool, bool]:
    if not isinstance(trans, (int, str)) or trans not in _TRANSPOSED:
        raise errors.ValueRangeError(
            f"{name}: trans is 0 (a), 1 (its transpose) or 2 (its conjugate transpose), not {trans!r:.60}.",
            where=source.here(),
            fix="trans=0",
        )
    return _TRANSPOSED[trans]


def lu_solve(
    lu_and_piv: Any, b: ArrayLike, trans: int = 0, overwrite_b: bool = False, check_finite: bool = True
) -> Array:
    """The x with ``a @ x = b``, given ``lu_factor(a)``; b is (n,) or (..., n, k).

    ``trans``: solve with the transpose (1) or the conjugate transpose (2) of a.
    """
    packed, pivots = _pair(lu_and_piv, "lu_solve", "(lu, piv)")
    packed, b, vector = system(packed, b, "lu_solve")
    pivots = as_value(pivots, "lu_solve")
    transposed, conjugated = _transposed(trans, "lu_solve")
    n = packed.aval.shape[-1]
    order = lu_pivots_to_permutation(pivots, n)
    order = broadcast_to(order, (*packed.aval.shape[:-2], n))
    triangle = lambda x, lower: triangular.triangular_solve(
        packed,
        x,
        left_side=True,
        lower=lower,
        unit_diagonal=lower,
        transpose_a=transposed,
        conjugate_a=conjugated,
    )
    if not transposed:
        return solution(triangle(triangle(take_rows(b, order), True), False), vector)
    x = triangle(triangle(b, False), True)
    rows = broadcast_in_dim(order, x.aval.shape, tuple(range(x.aval.ndim - 1)))
    return solution(place_along(x, rows, x.aval.ndim - 2), vector)


def lu(a: ArrayLike, permute_l: bool = False, overwrite_a: bool = False, check_finite: bool = True) -> tuple:
    """The LU decomposition ``a = p @ l @ u`` of matrices (..., m, n).

    Returns:
      ``(p, l, u)``: (..., m, m), (..., m, k) and (..., k, n), k = min(m, n); with ``permute_l``, ``(p @ l, u)``.
    """
    a = inexact(a, "lu")
    check_here(check_matrices, "lu", a)
    packed, _, order = linalg_factor.lu(a)
    *lead, m, n = a.aval.shape
    k, start = min(m, n), (0,) * a.aval.ndim
    low = tril(slice_(packed, start, (*lead, m, k)), -1)
    low = ew.add(low, matrices.identity_like(low))
    up = triu(slice_(packed, start, (*lead, k, n)))
    # row i of a[order] is row order[i] of a
    square = (*lead, m, m)
    rows = broadcast_in_dim(order, square, tuple(range(a.aval.ndim - 1)))
    p = ew.convert(ew.eq(mT(rows), iota(dtypes.int32, square, a.aval.ndim - 2)), a.aval.dtype)
    return (matmul(p, low), up) if permute_l else (p, low, up)


def qr(
    a: ArrayLike,
    overwrite_a: bool = False,
    lwork: Any = None,
    mode: str = "full",
    pivoting: bool = False,
    check_finite: bool = True,
) -> tuple:
    """QR decomposition: ``a = q @ r``, or with ``pivoting`` ``a[:, p] = q @ r``.

    Args:
      mode: ``"full"``: q (..., m, m); ``"economic"``: q (..., m, min(m, n)); ``"r"``: as full, without q.
    Returns:
      ``(q, r)``, ``(q, r, p)``, ``(r,)`` or ``(r, p)``.
    """
    a = inexact(a, "qr")
    check_here(check_matrices, "qr", a)
    if mode not in ("full", "economic", "r"):
        raise errors.ValueRangeError(
            f"qr: {mode!r:.60} is not a mode.", where=source.here(), fix="mode='full', 'economic' or 'r'"
        )
    out = linalg_factor.qr(a, pivoting=pivoting, full_matrices=mode != "economic")
    return out[1:] if mode == "r" else out


def qr_multiply(
    a: ArrayLike,
    c: ArrayLike,
    mode: str = "right",
    pivoting: bool = False,
    conjugate: bool = False,
    overwrite_a: bool = False,
    overwrite_c: bool = False,
) -> tuple:
    """``c @ q`` for the economic ``qr(a)``, or with ``mode="left"`` ``q @ c``.

    Args:
      a: (m, n); q is (m, k), k = min(m, n).
      c: (p, m) or (m,) on the left of q; (k, p) or (k,) on its right.
      mode: ``"right"`` or ``"left"``: the side of q.
      pivoting: permute the columns of a.
      conjugate: take the conjugate of q.
    Returns:
      ``(product, r)``, or ``(product, r, p)``.
    """
    if mode not in ("left", "right"):
        raise errors.ValueRangeError(
            f"qr_multiply: {mode!r:.60} is not a mode.", where=source.here(), fix="mode='left' or 'right'"
        )
    a, c = promote_dtypes("qr_multiply", a, c, inexact=True)
    q, *rest = qr(a, mode="economic", pivoting=pivoting)
    q = ew.conj(q) if conjugate else q
    m, k = q.aval.shape[-2:]
    if not c.aval.ndim >= 1 or c.aval.shape[-1 if mode == "right" or c.aval.ndim == 1 else -2] != (
        m if mode == "right" else k
    ):
        raise errors.ShapeError(
            f"qr_multiply of {a.aval} and {c.aval}, on the {mode}.",
            where=source.here(),
            fix=f"c is (p, {m})" if mode == "right" else f"c is ({k}, p)",
        )
    return (bnp_matmul(c, q) if mode == "right" else bnp_matmul(q, c), *rest)


@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: Literal[True] = True,
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> tuple[Array, Array, Array]: ...
@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    *,
    compute_uv: Literal[False],
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> Array: ...
@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> Array | tuple[Array, Array, Array]: ...


def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> Any:
    """Singular value decomposition: ``(u, s, vh)``, or s; see ``bnp.linalg.svd``."""
    out = bnp_linalg.svd(a, full_matrices, compute_uv)
    return tuple(out) if compute_uv else out


@overload
def eigh(
    a: ArrayLike,
    b: ArrayLike | None = None,
    lower: bool = True,
    eigvals_only: Literal[False] = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    turbo: bool = True,
    eigvals: None = None,
    type: int = 1,
    check_finite: bool = True,
) -> tuple[Array, Array]: ...
@overload
def eigh(
    a: ArrayLike,
    b: ArrayLike | None = None,
    lower: bool = True,
    *,
    eigvals_only: Literal[True],
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    turbo: bool = True,
    eigvals: None = None,
    type: int = 1,
    check_finite: bool = True,
) -> Array: ...
@overload
def eigh(
    a: ArrayLike,
    b: ArrayLike | None = None,
    lower: bool = True,
    eigvals_only: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    turbo: bool = True,
    eigvals: None = None,
    type: int = 1,
    check_finite: bool = True,
) -> tuple[Array, Array] | Array: ...


def eigh(
    a: ArrayLike,
    b: ArrayLike | None = None,
    lower: bool = True,
    eigvals_only: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    turbo: bool = True,
    eigvals: None = None,
    type: int = 1,
    check_finite: bool = True,
) -> Any:
    """Ascending eigenvalues (..., n) and eigenvectors (columns) of Hermitian matrices.

    Args:
      a: (..., n, n), of which one triangle is read: the lower one unless ``lower`` is false.
      b: a Hermitian positive definite matrix, for the problem ``a @ v = b @ v * w``; its vectors are orthonormal in the
        inner product of b.
      eigvals_only: give w alone.
    Returns:
      ``(w, v)``, or w.
    """
    if eigvals is not None or type != 1:
        raise errors.UnsupportedError(
            "eigh with eigvals=, or of another type than 1.",
            where=source.here(),
            fix="leave them out, and select from all eigenvalues",
        )
    if b is None:
        a = square(a, "eigh")
        if eigvals_only:
            return spectral.eigvalsh(a, lower=lower, symmetrize_input=False)
        v, w = spectral.eigh(a, lower=lower, symmetrize_input=False)
        return w, v
    a, b = promote_dtypes("eigh", a, b, inexact=True)
    check_here(check_square, "eigh", a, b)
    low = cholesky(b, lower=True) if lower else adjoint(cholesky(b))
    solve = lambda x, **options: triangular.triangular_solve(low, x, lower=True, **options)
    a = matrices.hermitian_from_lower(a if lower else adjoint(a))
    if a.aval.shape != b.aval.shape:
        raise errors.ShapeError(
            f"eigh of {a.aval} and {b.aval}, which are not of one shape.", where=source.here()
        )
    inner = solve(solve(a, left_side=True), transpose_a=True, conjugate_a=True)
    if eigvals_only:
        return spectral.eigvalsh(inner)
    v, w = spectral.eigh(inner)
    return w, solve(v, left_side=True, transpose_a=True, conjugate_a=True)


# -- polar decomposition ---------------------------------------------------------------------------


def polar(
    a: ArrayLike,
    side: str = "right",
    *,
    method: str = "svd",
    eps: float | None = None,
    max_iterations: int | None = None,
) -> tuple[Array, Array]:
    """Polar decomposition of (..., m, n): ``a = u @ p``, or on the left ``a = p @ u``.

    Args:
      side: ``"right"`` or ``"left"``.
      method: by singular values, ``"svd"``; JAX's ``"qdwh"`` gives the same and is taken for it.
      eps, max_iterations: of JAX's iteration; without effect.
    Returns:
      u (..., m, n), with orthonormal columns (or rows, if there are fewer); p, Hermitian and without negative
      eigenvalues, (..., n, n) or (..., m, m). Differentiable where a has full rank.
    """
    a = inexact(a, "polar")
    check_here(check_matrices, "polar", a)
    if side not in ("right", "left") or method not in ("svd", "qdwh"):
        raise errors.ValueRangeError(
            f"polar: side {side!r:.60}, method {method!r:.60}.",
            where=source.here(),
            fix="side='right' or 'left', method='svd'",
        )
    m, n = a.aval.shape[-2:]
    u = _unitary_factor(a) if m >= n else adjoint(_unitary_factor(adjoint(a)))
    return u, matrices.hermitian_part(matmul(adjoint(u), a) if side == "right" else matmul(a, adjoint(u)))


def _unitary_factor(a: Array) -> Array:
    w, s, vh = spectral.svd(ew.stop_gradient(a), full_matrices=False)
    return _as_unitary_factor(a, matmul(w, vh), s, vh)


@custom_jvp
def _as_unitary_factor(a, u, s, vh):
    """``u`` of ``a = u p``, ``p = vh^H s vh``; differentiated in ``a`` alone."""
    return u


@_as_unitary_factor.defjvp
def _as_unitary_factor_jvp(primals, tangents):
    """Solve ``u^H da - da^H u = p y + y p`` for the skew-Hermitian ``y = u^H du``.

    This divides by sums of singular values, not by differences, so equal ones are harmless.
    """
    a, u, s, vh = primals
    t = tangents[0]
    u = _as_unitary_factor(a, u, s, vh)
    p, inner = matmul(adjoint(u), a), matmul(adjoint(u), t)
    moved = matmul(u, _lyapunov(p, ew.sub(inner, adjoint(inner)), s, vh))
    m, n = a.aval.shape[-2:]
    if m > n:
        outside = ew.sub(t, matmul(u, inner))
        moved = ew.add(moved, adjoint(bnp_linalg.solve(adjoint(p), adjoint(outside))))
    return u, moved


@custom_jvp
def _lyapunov(p, k, s, vh):
    """The y with ``p y + y p = k``, ``p = vh^H s vh``; differentiated in p and k."""
    v = adjoint(vh)
    columns = broadcast_in_dim(s, k.aval.shape, (*range(s.aval.ndim - 1), s.aval.ndim))
    sums = ew.convert(ew.add(columns, mT(columns)), k.aval.dtype)
    return matmul(v, matmul(ew.div(matmul(vh, matmul(k, v)), sums), vh))


@_lyapunov.defjvp
def _lyapunov_jvp(primals, tangents):
    p, k, s, vh = primals
    tp, tk, _, _ = tangents
    y = _lyapunov(p, k, s, vh)
    return y, _lyapunov(p, ew.sub(tk, ew.add(matmul(tp, y), matmul(y, tp))), s, vh)


# -- systems of equations --------------------------------------------------------------------------


def solve(
    a: ArrayLike,
    b: ArrayLike,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    debug: bool = False,
    check_finite: bool = True,
    assume_a: str = "gen",
) -> Array:
    """The x with ``a @ x = b``.

    Args:
      a: square matrices (..., n, n).
      b: (n,) or (..., n, k).
      lower: which triangle is read where ``assume_a`` is ``"pos"``.
      assume_a: ``"gen"``; ``"sym"`` and ``"her"``, solved as that; ``"pos"``: Hermitian positive definite, solved by a
        Cholesky decomposition.
    """
    if assume_a not in ("gen", "sym", "her", "pos"):
        raise errors.ValueRangeError(
            f"solve: assume_a is 'gen', 'sym', 'her' or 'pos', not {assume_a!r:.60}.",
            where=source.here(),
            fix="assume_a='gen'",
        )
    if assume_a == "pos":
        a, b = promote_dtypes("solve", a, b, inexact=True)
        return cho_solve(cho_factor(a, lower), b)
    return bnp_linalg.solve(a, b)


def solve_triangular(
    a: ArrayLike,
    b: ArrayLike,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    debug: Any = None,
    check_finite: bool = True,
) -> Array:
    """The x with ``a @ x = b`` for triangular a.

    Args:
      a: (..., n, n), of which one triangle is read: the upper one unless ``lower``.
      b: (n,) or (..., n, k).
      trans: solve with the transpose (1 or ``"T"``) or the conjugate transpose (2 or ``"C"``) of a.
      unit_diagonal: take the diagonal of a as ones.
    """
    transposed, conjugated = _transposed(trans, "solve_triangular")
    a, b, vector = system(a, b, "solve_triangular")
    x = triangular.triangular_solve(
        a, b, left_side=True, lower=lower, unit_diagonal=unit_diagonal, transpose_a=transposed,
        conjugate_a=conjugated,
    )  # fmt: skip
    return solution(x, vector)


def inv(a: ArrayLike, overwrite_a: bool = False, check_finite: bool = True) -> Array:
    """The inverses of square matrices; see ``bnp.linalg.inv``."""
    return bnp_linalg.inv(a)


def det(a: ArrayLike, overwrite_a: bool = False, check_finite: bool = True) -> Array:
    """The determinants of square matrices; see ``bnp.linalg.det``."""
    return bnp_linalg.det(a)


__all__ = [
    "cho_factor", "cho_solve", "cholesky", "det", "eigh", "inv", "lu", "lu_factor", "lu_solve", "polar", "qr",
    "qr_multiply", "solve", "solve_triangular", "svd",
]  # fmt: skip
