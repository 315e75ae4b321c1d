"""``bnp.linalg``: linear algebra of NumPy, the array standard and JAX.

Face over ``core.ops.linalg_*``: operands are promoted (integers and booleans become float32) and batch axes broadcast
here. A matrix is the last two axes of an array. Where a decomposition does not exist the result is NaN, and no error:
what values are is not known under ``jit``. Norms are in ``norms``, determinants in ``determinants``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, only_none, sequence, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg import common as matrices
from blufunc.core.ops.linalg import factor as linalg_factor
from blufunc.core.ops.linalg import reduction, spectral
from blufunc.core.ops.linalg import solve as linalg_solve
from blufunc.core.ops.linalg.common import adjoint, check_here, check_matrices, check_square, scale_columns
from blufunc.core.ops.linalg.common import matmul as _product
from blufunc.core.ops.sort import pick_along
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape
from blufunc.numpy import elementwise, linear, reductions
from blufunc.numpy.determinants import SlogdetResult, det, slogdet
from blufunc.numpy.linear import matmul, tensordot, vecdot
from blufunc.numpy.manipulation import matrix_transpose, moveaxis
from blufunc.numpy.norms import matrix_norm, norm, vector_norm
from blufunc.numpy.promotion import as_value, broadcast_shapes, inexact, promote_dtypes, stretch
from blufunc.numpy.sorting import argsort
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


class EigResult(NamedTuple):
    """Eigenvalues (..., n) and eigenvectors (..., n, n), in columns; complex."""

    eigenvalues: Array
    eigenvectors: Array


class EighResult(NamedTuple):
    """Rising real eigenvalues (..., n) and eigenvectors (..., n, n), in columns."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """QR factors: orthonormal ``Q`` (..., m, k), upper triangular ``R`` (..., k, n)."""

    Q: Array
    R: Array


class SVDResult(NamedTuple):
    """The factors of ``U @ diag(S) @ Vh``, ``S`` real and falling."""

    U: Array
    S: Array
    Vh: Array


# -- operands --------------------------------------------------------------------------------------


def _matrices(x: Any, name: str) -> Array:
    x = inexact(x, name)
    check_here(check_matrices, name, x)
    return x


def square(x: ArrayLike, name: str) -> Array:
    """``x`` as floating or complex square matrices (..., n, n)."""
    x = inexact(x, name)
    check_here(check_square, name, x)
    return x


def _number_or_array(x: Any, name: str, like: np.dtype) -> Array:
    """A tolerance, scalar or per matrix, aligned to compare with singular values."""
    value = ew.convert(inexact(x, name), like)
    return reshape(value, (*value.aval.shape, 1)) if value.aval.ndim else value


def _eps(dtype: np.dtype) -> float:
    return float(dtypes.finfo(dtype).eps)


# -- decompositions --------------------------------------------------------------------------------


def cholesky(a: ArrayLike, *, upper: bool = False, symmetrize_input: bool = True) -> Array:
    """Cholesky factor: lower, ``a = L @ L^H``, or with ``upper``, ``a = U^H @ U``.

    Args:
      a: Hermitian positive definite matrices (..., n, n); NaN for other matrices.
      symmetrize_input: decompose ``(a + a^H) / 2``; otherwise one triangle alone is read.
    """
    a = square(a, "cholesky")
    low = linalg_factor.cholesky(adjoint(a) if upper else a, symmetrize_input=symmetrize_input)
    return adjoint(low) if upper else low


def eig(a: ArrayLike) -> EigResult:
    """Eigenvalues and right eigenvectors, complex, of square matrices (..., n, n)."""
    return EigResult(*spectral.eig(square(a, "eig"), compute_left_eigenvectors=False))


def eigvals(a: ArrayLike) -> Array:
    """The complex eigenvalues (..., n) of square matrices (..., n, n), in no order."""
    matrices = square(a, "eigvals")
    return spectral.eig(matrices, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


def _lower(UPLO: Any, name: str) -> bool:
    if UPLO not in (None, "L", "U", "l", "u"):
        raise errors.ValueRangeError(
            f"{name}: UPLO is 'L' or 'U', not {UPLO!r:.60}.", where=source.here(), fix="UPLO='L'"
        )
    return UPLO in (None, "L", "l")


def eigh(a: ArrayLike, UPLO: str | None = None, symmetrize_input: bool = True) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices (..., n, n).

    Args:
      UPLO: which triangle is read, ``"L"`` or ``"U"``, where ``symmetrize_input`` is false.
      symmetrize_input: decompose ``(a + a^H) / 2``.
    """
    lower = _lower(UPLO, "eigh")
    v, w = spectral.eigh(square(a, "eigh"), lower=lower, symmetrize_input=symmetrize_input)
    return EighResult(w, v)


def eigvalsh(a: ArrayLike, UPLO: str | None = "L", *, symmetrize_input: bool = True) -> Array:
    """The rising eigenvalues (..., n) of Hermitian matrices (..., n, n); see ``eigh``."""
    lower = _lower(UPLO, "eigvalsh")
    return spectral.eigvalsh(square(a, "eigvalsh"), lower=lower, symmetrize_input=symmetrize_input)


@overload
def qr(a: ArrayLike, mode: Literal["reduced", "complete", "raw"] = "reduced") -> QRResult: ...
@overload
def qr(a: ArrayLike, mode: Literal["r"]) -> Array: ...


def qr(a: ArrayLike, mode: str = "reduced") -> Any:
    """The QR decomposition of matrices (..., m, n).

    Args:
      mode: ``"reduced"``: Q (..., m, k) and R (..., k, n), k = min(m, n); ``"complete"``: Q (..., m, m) and
        R (..., m, n); ``"r"``: the R of ``"reduced"`` alone; ``"raw"``: LAPACK's packed factors, transposed,
        (..., n, m), and taus (..., k), without a derivative.
    """
    a = _matrices(a, "qr")
    if mode not in ("reduced", "complete", "r", "raw"):
        raise errors.ValueRangeError(
            f"qr: {mode!r:.60} is not a mode.",
            where=source.here(),
            fix="mode='reduced', 'complete', 'r' or 'raw'",
        )
    if mode == "raw":
        packed, taus = reduction.geqrf_p.bind(a)
        return QRResult(matrix_transpose(packed), taus)
    q, r = linalg_factor.qr(a, full_matrices=mode == "complete")
    return r if mode == "r" else QRResult(q, r)


@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: Literal[True] = True,
    hermitian: bool = False,
    subset_by_index: None = None,
) -> SVDResult: ...
@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    *,
    compute_uv: Literal[False],
    hermitian: bool = False,
    subset_by_index: None = None,
) -> Array: ...
@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    hermitian: bool = False,
    subset_by_index: None = None,
) -> Array | SVDResult: ...


def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    hermitian: bool = False,
    subset_by_index: None = None,
) -> Any:
    """The singular value decomposition of matrices (..., m, n).

    Args:
      full_matrices: U is (..., m, m) and Vh (..., n, n), instead of (..., m, k) and (..., k, n), k = min(m, n).
      compute_uv: otherwise the result is S alone.
      hermitian: a is Hermitian: use ``eigh``.
      subset_by_index: None: all singular values are returned.
    Returns:
      an ``SVDResult``, or the singular values S (..., k), falling.
    """
    only_none("svd", "subset_by_index", subset_by_index)
    if not hermitian:
        a = _matrices(a, "svd")
        out = spectral.svd(a, full_matrices=full_matrices, compute_uv=compute_uv)
        return SVDResult(*out) if compute_uv else out
    w, v = eigh(square(a, "svd"))
    size = elementwise.abs(w)
    order = argsort(size, -1, descending=True)
    falling = pick_along(size, order, w.aval.ndim - 1)
    if not compute_uv:
        return falling
    columns = broadcast_in_dim(order, v.aval.shape, (*range(w.aval.ndim - 1), w.aval.ndim))
    u = pick_along(v, columns, v.aval.ndim - 1)
    signs = pick_along(
        ew.select(ew.lt(w, 0), ew.mul(ew.ones_of(w), -1), ew.ones_of(w)), order, w.aval.ndim - 1
    )
    return SVDResult(u, falling, adjoint(scale_columns(u, signs)))


def svdvals(x: ArrayLike, /) -> Array:
    """The singular values (..., k), falling, of matrices (..., m, n), k = min(m, n)."""
    return spectral.svd(_matrices(x, "svdvals"), compute_uv=False)


# -- systems of equations --------------------------------------------------------------------------


def system(a: ArrayLike, b: ArrayLike, name: str) -> tuple[Array, Array, bool]:
    """Square matrices and right-hand sides, batch axes broadcast; True for one vector."""
    a, b = promote_dtypes(name, a, b, inexact=True)
    check_here(check_square, name, a)
    is_vector = b.aval.ndim == 1
    if not b.aval.ndim or b.aval.shape[0 if is_vector else -2] != a.aval.shape[-1]:
        raise errors.ShapeError(
            f"{name} of {a.aval} and {b.aval}: the right hand sides have {a.aval.shape[-1]} rows.",
            where=source.here(),
            fix="b is a vector (n,), or matrices (..., n, k): for a batch of vectors, b[..., None]",
        )
    b = reshape(b, (*b.aval.shape, 1)) if is_vector else b
    lead = broadcast_shapes(a.aval.shape[:-2], b.aval.shape[:-2])
    return stretch(a, (*lead, *a.aval.shape[-2:])), stretch(b, (*lead, *b.aval.shape[-2:])), is_vector


def solution(x: Array, is_vector: bool) -> Array:
    """The solution of ``system``; of one vector, without its axis of size 1."""
    return reshape(x, x.aval.shape[:-1]) if is_vector else x


def solve(a: ArrayLike, b: ArrayLike) -> Array:
    """The x with ``a @ x = b``; infinities and NaN where a is singular.

    Args:
      a: square matrices (..., n, n).
      b: (n,) for one vector, else (..., n, k); batch axes broadcast.
    """
    a, b, is_vector = system(a, b, "solve")
    return solution(linalg_solve.solve(a, b), is_vector)


def inv(a: ArrayLike) -> Array:
    """Inverses of matrices (..., n, n); infinities and NaN where singular."""
    a = square(a, "inv")
    return linalg_solve.solve(a, matrices.identity_like(a))


def tensorsolve(a: ArrayLike, b: ArrayLike, axes: Any = None) -> Array:
    """The x with ``tensordot(a, x, x.ndim) = b``.

    Args:
      a: (*b.shape, *x.shape), with as many elements in x as in b.
      axes: axes of a to move to its end first.
    """
    a, b = promote_dtypes("tensorsolve", a, b, inexact=True)
    if axes is not None:
        moved = [axis_in(d, a.aval.ndim, "tensorsolve") for d in sequence(axes, "tensorsolve", "axes")]
        a = moveaxis(a, tuple(moved), tuple(range(a.aval.ndim - len(moved), a.aval.ndim)))
    shape, n = a.aval.shape[b.aval.ndim :], b.aval.size
    if math.prod(shape) != n or a.aval.size != n * n:
        raise errors.ShapeError(
            f"tensorsolve of {a.aval} and {b.aval}: beyond the axes of b, a has {math.prod(shape)} elements, b {n}.",
            where=source.here(),
            fix="a has the shape of b, then that of x, which has as many elements",
        )
    return reshape(solve(reshape(a, (n, n)), reshape(b, (n,))), shape)


def tensorinv(a: ArrayLike, ind: int = 2) -> Array:
    """The inverse of ``tensordot(a, ., ...)``, ``ind`` being the axes of the result."""
    a = inexact(a, "tensorinv")
    ind = static_int(ind, "tensorinv", "ind")
    if not 0 < ind <= a.aval.ndim:
        raise errors.ValueRangeError(
            f"tensorinv of {a.aval}: ind = {ind}.", where=source.here(), fix=f"ind from 1 to {a.aval.ndim}"
        )
    first, last = a.aval.shape[:ind], a.aval.shape[ind:]
    if math.prod(first) != math.prod(last):
        raise errors.ShapeError(
            f"tensorinv of {a.aval}: {math.prod(first)} and {math.prod(last)} elements in its two parts.",
            where=source.here(),
            fix="choose ind so that both parts have as many",
        )
    return reshape(inv(reshape(a, (math.prod(first), math.prod(last)))), (*last, *first))


# -- pseudoinverses --------------------------------------------------------------------------------


@custom_jvp
def _as_pinv(a, p):
    """``p``, the pseudoinverse of ``a``; differentiated in ``a`` alone."""
    return p


@_as_pinv.defjvp
def _as_pinv_jvp(primals, tangents):
    """The derivative at constant rank (G. H. Golub and V. Pereyra, 1973)."""
    (a, p), (t, _) = primals, tangents
    p = _as_pinv(a, p)
    m, n = a.aval.shape[-2:]
    out = ew.neg(_product(p, _product(t, p)))
    th, ph = adjoint(t), adjoint(p)
    # the terms  p p^H t^H (1 - a p)  and  (1 - p a) t^H p^H p,  by products of the smaller size
    if m >= n:
        w = _product(th, ph)
        left = _product(_product(p, ph), ew.sub(th, _product(_product(th, a), p)))
        right = _product(ew.sub(w, _product(p, _product(a, w))), p)
    else:
        left = _product(p, _product(ph, ew.sub(th, _product(th, _product(a, p)))))
        right = _product(ew.sub(th, _product(p, _product(a, th))), _product(ph, p))
    return p, ew.add(out, ew.add(left, right))


def _pinv_of(a: Array, factors: Sequence[Array], keep: Array) -> Array:
    """The pseudoinverse of ``a`` from its factors; values not in ``keep`` are 0."""
    u, s, vh = [ew.stop_gradient(x) for x in factors]
    safe = ew.select(keep, s, ew.ones_of(s))
    inverse = ew.select(keep, ew.div(ew.ones_of(s), safe), ew.zeros_of(s))
    p = _product(scale_columns(adjoint(vh), inverse), adjoint(u))
    return _as_pinv(a, p)


def pinv(
    a: ArrayLike, rtol: ArrayLike | None = None, hermitian: bool = False, *, rcond: ArrayLike | None = None
) -> Array:
    """The pseudoinverses (..., n, m), of Moore and Penrose, of matrices (..., m, n).

    Args:
      rtol: singular values of at most this times the largest count as 0: a number, or one for each matrix; by default
        ``10 * max(m, n) * eps``.
      hermitian: a is Hermitian: use ``eigh``.
      rcond: another name of ``rtol``.
    """
    a = matrices.hermitian_part(square(a, "pinv")) if hermitian else _matrices(a, "pinv")
    if rcond is not None:
        if rtol is not None:
            raise errors.ArgumentError(
                "pinv takes rtol or rcond, not both.", where=source.here(), fix="leave rcond out"
            )
        rtol = rcond
    m, n = a.aval.shape[-2:]
    if not m or not n:
        return matrix_transpose(a)
    u, s, vh = svd(ew.stop_gradient(a), full_matrices=False, hermitian=hermitian)
    limit = _number_or_array(10.0 * max(m, n) * _eps(s.dtype) if rtol is None else rtol, "pinv", s.dtype)
    largest = reductions.max(s, -1, keepdims=True)
    keep = elementwise.greater(s, elementwise.multiply(limit, largest))
    return _pinv_of(a, (u, s, vh), stretch(keep, s.aval.shape))


def lstsq(
    a: ArrayLike, b: ArrayLike, rcond: ArrayLike | None = None, *, numpy_resid: bool = False
) -> tuple[Array, Array, Array, Array]:
    """The least-squares solution of ``a @ x = b`` of least norm.

    Args:
      a: (m, n).
      b: (m,) or (m, k).
      rcond: singular values below this times the largest count as 0; by default, and where it is negative,
        ``eps * max(m, n)`` and ``eps``.
      numpy_resid: give no residuals, as NumPy, where a has not full rank or not more rows than columns; needs values.
    Returns:
      x (n,) or (n, k); the sums of squares of ``a @ x - b``, (1,) or (k,); the rank, int32; the singular values.
    """
    a, b = promote_dtypes("lstsq", a, b, inexact=True)
    check_here(check_matrices, "lstsq", a)
    m, n = a.aval.shape[-2:]
    if a.aval.ndim != 2 or b.aval.ndim not in (1, 2) or b.aval.shape[0] != m:
        raise errors.ShapeError(
            f"lstsq of {a.aval} and {b.aval}: a is one matrix (m, n), b a vector (m,) or a matrix (m, k).",
            where=source.here(),
            fix="use vmap for more of them",
        )
    columns = reshape(b, (m, 1)) if b.aval.ndim == 1 else b
    u, s, vh = spectral.svd(a, full_matrices=False)
    if not a.aval.size:
        x = broadcast_in_dim(ew.zeros_of(a), (n, columns.aval.shape[1]), ())
        rank = broadcast_in_dim(ew.convert(ew.zeros_of(s), dtypes.int32), (), ())
    else:
        eps = _eps(s.dtype)
        limit = _number_or_array(eps * max(m, n) if rcond is None else rcond, "lstsq", s.dtype)
        if limit.aval.ndim:
            raise errors.ShapeError("lstsq: rcond is one number.", where=source.here(), fix="rcond=1e-6")
        limit = ew.select(ew.lt(limit, 0), ew.mul(ew.ones_of(s), eps), limit)
        cut = elementwise.multiply(limit, reductions.max(s))
        keep = elementwise.logical_and(elementwise.greater(s, 0), elementwise.greater_equal(s, cut))
        rank = reductions.sum(keep, dtype=dtypes.int32)
        x = _product(_pinv_of(a, (u, s, vh), keep), columns)
    if numpy_resid and (int(rank) < n or m <= n):
        residuals = broadcast_in_dim(ew.zeros_of(s), (0,), ())
    else:
        off = ew.sub(columns, _product(a, x))
        residuals = reductions.sum(ew.real(ew.mul(off, ew.conj(off))), 0)
    return reshape(x, (n,)) if b.aval.ndim == 1 else x, residuals, rank, s


# -- ranks, conditions and powers -------------------------------------------------------------------


def cond(x: ArrayLike, p: ArrayLike | None = None) -> Array:
    """Condition numbers ``norm(x, p) * norm(inv(x), p)``; default and 2, -2 by SVD.

    Args:
      x: (..., m, n); square for other norms.
      p: a norm, as of ``matrix_norm``.
    """
    x = _matrices(x, "cond")
    if p is None or (isinstance(p, (int, float)) and abs(p) == 2):
        s = svdvals(x)
        k = s.aval.shape[-1]
        if not k:
            raise errors.ShapeError(f"cond of {x.aval}, which is empty.", where=source.here())
        first, last = s[..., 0], s[..., k - 1]
        result = ew.div(last, first) if p is not None and p < 0 else ew.div(first, last)
    else:
        check_here(check_square, "cond", x)
        result = ew.mul(matrix_norm(x, ord=p), matrix_norm(inv(x), ord=p))
    had_nan = reductions.any(elementwise.isnan(x), (-2, -1))
    lost = elementwise.logical_and(elementwise.isnan(result), elementwise.logical_not(had_nan))
    return ew.select(lost, ew.mul(ew.ones_of(result), math.inf), result)


def matrix_rank(
    M: ArrayLike, rtol: ArrayLike | None = None, *, hermitian: bool = False, tol: ArrayLike | None = None
) -> Array:
    """Rank of matrices (..., m, n), the number of nonzero singular values: int32.

    Args:
      M: matrices, or one vector, whose rank is 1 unless it is 0.
      rtol: singular values of at most this times the largest count as 0; by default ``max(m, n) * eps``.
      hermitian: M is Hermitian: use ``eigh``.
      tol: an absolute bound instead of ``rtol``.
    """
    if rtol is not None and tol is not None:
        raise errors.ArgumentError(
            "matrix_rank: rtol and tol are both given.", where=source.here(), fix="give one of them"
        )
    x = inexact(M, "matrix_rank")
    if x.aval.ndim < 2:
        return ew.convert(reductions.any(ew.ne(x, ew.zeros_of(x))), dtypes.int32)
    s = svd(x, compute_uv=False, hermitian=hermitian)
    if tol is not None:
        bound = _number_or_array(tol, "matrix_rank", s.dtype)
    elif not s.aval.shape[-1]:
        bound = ew.zeros_of(s)
    else:
        rtol = max(x.aval.shape[-2:]) * _eps(s.dtype) if rtol is None else rtol
        largest = reductions.max(s, -1, keepdims=True)
        bound = elementwise.multiply(_number_or_array(rtol, "matrix_rank", s.dtype), largest)
    return reductions.sum(elementwise.greater(s, bound), -1, dtype=dtypes.int32)


# -- products --------------------------------------------------------------------------------------


def matrix_power(a: ArrayLike, n: int) -> Array:
    """Matrix powers of (..., m, m) by an integer; a negative one of the inverses."""
    a = as_value(a, "matrix_power")
    n = static_int(n, "matrix_power", "n")
    if a.aval.ndim < 2 or a.aval.shape[-1] != a.aval.shape[-2]:
        raise errors.ShapeError(
            f"matrix_power of {a.aval}.", where=source.here(), fix="the last two axes must have one size"
        )
    if n < 0:
        a, n = inv(a), -n
    if n == 0:
        return matrices.identity_like(a)
    while not n & 1:  # by the binary digits of n, from the last one that is set
        a, n = matmul(a, a), n >> 1
    result = a
    while n := n >> 1:
        a = matmul(a, a)
        if n & 1:
            result = matmul(result, a)
    return result


def multi_dot(arrays: Sequence[ArrayLike], *, precision: Any = None) -> Array:
    """Multiply a chain of matrices in the cheapest order.

    Args:
      arrays: two or more matrices; the first and the last may be vectors, a row and a column.
    """
    chain = [as_value(x, "multi_dot") for x in sequence(arrays, "multi_dot", "arrays", "arrays")]
    ranks = [x.aval.ndim for x in chain]
    if len(chain) < 2 or any(n != 2 for n in ranks[1:-1]) or not {ranks[0], ranks[-1]} <= {1, 2}:
        raise errors.ShapeError(
            f"multi_dot of {', '.join(str(x.aval) for x in chain)}.",
            where=source.here(),
            fix="give two matrices or more, of which the first and the last may be vectors",
        )
    if any(x.aval.shape[-1] != y.aval.shape[0] for x, y in itertools.pairwise(chain)):
        raise errors.ShapeError(
            f"multi_dot of shapes {', '.join(str(x.aval.shape) for x in chain)}.",
            where=source.here(),
            fix="each has as many rows as the one before it has columns",
        )
    if len(chain) == 2:
        return matmul(chain[0], chain[1], precision=precision)
    names = [chr(ord("a") + i) if i < 26 else chr(0x100 + i) for i in range(len(chain) + 1)]
    terms = [names[i] + names[i + 1] for i in range(len(chain))]
    if ranks[0] == 1:
        terms[0] = names[1]
    if ranks[-1] == 1:
        terms[-1] = names[-2]
    ends = ("" if ranks[0] == 1 else names[0]) + ("" if ranks[-1] == 1 else names[-1])
    strategy = "optimal" if len(chain) <= 8 else "auto"
    return linear.einsum(f"{','.join(terms)}->{ends}", *chain, optimize=strategy, precision=precision)


def outer(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """The matrix of the products of each element of one vector with each of another."""
    x1, x2 = as_value(x1, "outer"), as_value(x2, "outer")
    if x1.aval.ndim != 1 or x2.aval.ndim != 1:
        raise errors.ShapeError(
            f"linalg.outer takes vectors, not {x1.aval} and {x2.aval}.",
            where=source.here(),
            fix="bnp.outer takes any shapes, and flattens them",
        )
    return linear.outer(x1, x2)


def cross(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> Array:
    """Cross products of 3-vectors along an axis; the other axes broadcast."""
    values = as_value(x1, "cross"), as_value(x2, "cross")
    if any(x.aval.shape[axis_in(axis, x.aval.ndim, "cross")] != 3 for x in values):
        raise errors.ShapeError(
            f"linalg.cross takes vectors of 3 elements along axis {axis}, not {values[0].aval} and {values[1].aval}.",
            where=source.here(),
            fix="bnp.cross takes vectors of 2, too; axis=... says along which axis they lie",
        )
    return linear.cross(*values, axis=axis)


def diagonal(x: ArrayLike, /, *, offset: int = 0) -> Array:
    """Diagonals of the matrices in the last two axes, as the last axis."""
    return linear.diagonal(x, offset, -2, -1)


def trace(x: ArrayLike, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> Array:
    """The sums of diagonals of the matrices in the last two axes."""
    return linear.trace(x, offset, -2, -1, dtype)


__all__ = [
    "EigResult", "EighResult", "QRResult", "SVDResult", "SlogdetResult", "cholesky", "cond", "cross",
    "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "lstsq", "matmul", "matrix_norm",
    "matrix_power", "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr",
    "slogdet", "solve", "svd", "svdvals", "tensordot", "tensorinv", "tensorsolve", "trace", "vecdot",
    "vector_norm",
]  # fmt: skip
