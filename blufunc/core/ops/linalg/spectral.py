"""Eigenvalue and singular value decompositions: ``eigh``, ``eig`` and ``svd``.

Core operations, above ``solve``. In the basis of the vectors, the diagonal of the matrix tangent holds the
tangents of the values. Its off-diagonal elements, divided by differences of values, rotate the vectors.
Sources: M. Giles (2008), section 3.1; J. Townsend, "Differentiating the singular value decomposition" (2016);
C. Boeddeker et al., "On the computation of complex-valued gradients with application to statistically optimum
beamforming" (2017) for ``eig``. Vectors of equal values, and phases of complex vectors, are not functions of
the matrix: only functions independent of them have a derivative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import only_none
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.algorithms import (
    EighImplementation,
    EigImplementation,
    SvdAlgorithm,
    check_algorithm,
)
from blufunc.core.ops.linalg.common import (
    MatrixOp,
    adjoint,
    all_or_nan,
    check_here,
    check_matrices,
    check_square,
    complex_dtype,
    diagonal,
    differences,
    each,
    hermitian_from_lower,
    hermitian_part,
    matmul,
    off_diagonal,
    real_dtype,
    scale_columns,
    scale_rows,
    with_diagonal,
)
from blufunc.core.ops.linalg.solve import solve
from blufunc.core.ops.reduce import argmax
from blufunc.core.ops.shape import iota
from blufunc.core.primitives.linear_ops import add_any, broadcast_in_dim, reduce_sum
from blufunc.core.primitives.tangents import Zero, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

with _lazy.modules(globals()):
    import scipy

# -- Hermitian matrices ----------------------------------------------------------------------------


class _Eigh(MatrixOp):
    """Eigenvectors and ascending eigenvalues; reads the operand's lower triangle.

    The eigenvalues alone if ``compute_vectors`` is false.
    """

    name, multiple_results = "eigh", True

    def impl(self, x, *, compute_vectors):
        function = (lambda x: np.linalg.eigh(x)[::-1]) if compute_vectors else np.linalg.eigvalsh
        return all_or_nan(function, x, self._types(x, compute_vectors))

    def abstract(self, x, *, compute_vectors):
        check_square(self.name, x)
        return self._types(x, compute_vectors)

    def _types(self, x, compute_vectors) -> list[ShapedArray]:
        values = ShapedArray(x.shape[:-1], real_dtype(x.dtype))
        return [ShapedArray(x.shape, x.dtype), values] if compute_vectors else [values]

    def jvp(self, primals, tangents, *, compute_vectors):
        (x,), (t,) = primals, tangents
        if t.__class__ is Zero:
            outs = self.bind(x, compute_vectors=compute_vectors)
            return outs, [zero(out.aval) for out in outs]
        v, w = self.bind(x, compute_vectors=True)
        inner = matmul(adjoint(v), matmul(hermitian_from_lower(t), v))
        tw = ew.real(diagonal(inner))
        if not compute_vectors:
            return [w], [tw]
        gaps = with_diagonal(differences(w), ew.ones_of(w))
        return [v, w], [matmul(v, off_diagonal(ew.div(inner, ew.convert(gaps, inner.aval.dtype)))), tw]


eigh_p = _Eigh()


def eigh(
    x: ArrayLike,
    *,
    lower: bool = True,
    symmetrize_input: bool = True,
    sort_eigenvalues: bool = True,
    subset_by_index: None = None,
    implementation: EighImplementation | None = None,
) -> tuple:
    """Eigenvectors and eigenvalues of Hermitian matrices (..., n, n).

    Args:
      lower: which triangle is read, where ``symmetrize_input`` is false.
      symmetrize_input: decompose ``(x + x^H) / 2``.
      sort_eigenvalues: allow any order if false; they rise all the same.
      subset_by_index: None: all eigenvalues.
      implementation: a preference; the results are the same.
    Returns:
      ``(v, w)``: v (..., n, n) has the vectors in its columns, w (..., n) real and rising.
    """
    only_none("eigh", "subset_by_index", subset_by_index)
    check_algorithm("eigh", implementation, EighImplementation)
    return tuple(eigh_p.bind(lower_triangle_of(x, "eigh", lower, symmetrize_input), compute_vectors=True))


def eigvalsh(x: Any, *, lower: bool = True, symmetrize_input: bool = True) -> Any:
    """The rising eigenvalues (..., n) of Hermitian matrices (..., n, n); see ``eigh``."""
    x = lower_triangle_of(x, "eigvalsh", lower, symmetrize_input)
    return eigh_p.bind(x, compute_vectors=False)[0]


def lower_triangle_of(x: Any, name: str, lower: bool, symmetrize: bool) -> Any:
    """Matrices whose lower triangle is that of the user's Hermitian ones."""
    x = lift(x)
    check_here(check_square, name, x)
    if symmetrize:
        return hermitian_part(x)
    return x if lower else adjoint(x)


# -- any square matrices ---------------------------------------------------------------------------


class _Eig(MatrixOp):
    """Eigenvalues and requested eigenvectors: ``A vr = vr w``, ``vl^H A = w vl^H``.

    Vectors have norm 1, and their largest component is real: that fixes their phase.
    """

    name, multiple_results = "eig", True

    def impl(self, x, *, left, right):
        types = self._types(x, left, right)
        if left:
            return each(lambda m, types: all_or_nan(lambda m: _eig_left(m, right), m, types), x, outs=types)
        return all_or_nan(np.linalg.eig if right else np.linalg.eigvals, x, types)

    def abstract(self, x, *, left, right):
        check_square(self.name, x)
        return self._types(x, left, right)

    def _types(self, x, left, right) -> list[ShapedArray]:
        dtype = complex_dtype(x.dtype)
        return [ShapedArray(x.shape[:-1], dtype), *[ShapedArray(x.shape, dtype)] * (left + right)]

    def jvp(self, primals, tangents, *, left, right):
        (x,), (t,) = primals, tangents
        if t.__class__ is Zero:
            outs = self.bind(x, left=left, right=right)
            return outs, [zero(out.aval) for out in outs]
        w, *vectors = self.bind(x, left=left, right=True)
        t = ew.convert(t, w.aval.dtype)
        inner = solve(vectors[-1], matmul(t, vectors[-1]))
        turns = []
        if left:  # right eigenvectors of A^H
            (vl, _) = vectors
            turns.append(_turn(vl, ew.conj(w), solve(vl, matmul(adjoint(t), vl))))
        if right:
            turns.append(_turn(vectors[-1], w, inner))
        return [w, *vectors[: left + right]], [diagonal(inner), *turns]


eig_p = _Eig()


def _eig_left(x: np.ndarray, right: bool) -> tuple:
    if not np.isfinite(x).all():
        raise np.linalg.LinAlgError
    return scipy.linalg.eig(x, left=True, right=right, check_finite=False)


def _turn(v: Any, w: Any, inner: Any) -> Any:
    """The tangent of eigenvectors of norm 1 whose largest component is real."""
    n, shape = v.aval.ndim, v.aval.shape
    gaps = with_diagonal(differences(w), ew.ones_of(w))
    t = matmul(v, off_diagonal(ew.div(inner, gaps)))
    t = ew.sub(t, scale_columns(v, reduce_sum(ew.mul(ew.conj(v), t), (n - 2,))))  # keep the norm at 1
    sizes = ew.add(ew.square(ew.real(v)), ew.square(ew.imag(v)))
    largest = broadcast_in_dim(argmax(sizes, n - 2, dtypes.int32), shape, (*range(n - 2), n - 1))
    chosen = ew.eq(iota(dtypes.int32, shape, n - 2), largest)
    component = lambda x: reduce_sum(ew.select(chosen, x, ew.zeros_of(x)), (n - 2,))
    angle = ew.div(component(ew.imag(t)), component(ew.real(v)))
    return ew.sub(t, scale_columns(v, ew.complex_(ew.zeros_like(angle), angle)))


def eig(
    x: ArrayLike,
    *,
    compute_left_eigenvectors: bool = True,
    compute_right_eigenvectors: bool = True,
    enable_eigvec_derivs: bool = False,
    implementation: EigImplementation | None = None,
) -> list[Any]:
    """Eigenvalues and eigenvectors of square matrices (..., n, n), on the host.

    Returns:
      the eigenvalues (..., n) in no order; the left, then the right eigenvectors (..., n, n), in columns of norm 1, as
      asked for. All complex. Differentiable where the eigenvalues are distinct, whatever ``enable_eigvec_derivs`` says;
      ``implementation`` is a preference, and the results are the same.
    """
    check_algorithm("eig", implementation, EigImplementation)
    left, right = bool(compute_left_eigenvectors), bool(compute_right_eigenvectors)
    return list(eig_p.bind(lift(x), left=left, right=right))


# -- singular values -------------------------------------------------------------------------------


class _SVD(MatrixOp):
    """``A = U diag(s) Vh``, descending s; s alone unless ``compute_uv``."""

    name, multiple_results = "svd", True

    def impl(self, x, *, full_matrices, compute_uv):
        function = lambda x: np.linalg.svd(x, full_matrices, compute_uv)
        return all_or_nan(function, x, self._types(x, full_matrices, compute_uv))

    def abstract(self, x, *, full_matrices, compute_uv):
        check_matrices(self.name, x)
        return self._types(x, full_matrices, compute_uv)

    def _types(self, x, full_matrices, compute_uv) -> list[ShapedArray]:
        *lead, m, n = x.shape
        k = min(m, n)
        rows, columns = (m, n) if full_matrices else (k, k)
        s = ShapedArray((*lead, k), real_dtype(x.dtype))
        if not compute_uv:
            return [s]
        return [ShapedArray((*lead, m, rows), x.dtype), s, ShapedArray((*lead, columns, n), x.dtype)]

    def jvp(self, primals, tangents, *, full_matrices, compute_uv):
        (x,), (t,) = primals, tangents
        if t.__class__ is Zero:
            outs = self.bind(x, full_matrices=full_matrices, compute_uv=compute_uv)
            return outs, [zero(out.aval) for out in outs]
        m, n = x.aval.shape[-2:]
        if compute_uv and full_matrices and m != n:
            raise errors.GradError(
                f"svd of {x.aval} with full_matrices has no derivative.",
                where=source.here(),
                why="the last vectors are any basis of a null space: they are not a function of the matrix.",
                fix="full_matrices=False",
            )
        u, s, vh = self.bind(x, full_matrices=False, compute_uv=True)
        v = adjoint(vh)
        tv = matmul(t, v)
        inner = matmul(adjoint(u), tv)
        ts = ew.real(diagonal(inner))
        if not compute_uv:
            return [s], [ts]
        over = _over_gaps(s, inner.aval.dtype)
        right, left = scale_columns(inner, s), scale_rows(s, inner)
        turn_u = ew.mul(over, ew.add(right, adjoint(right)))
        turn_v = ew.mul(over, ew.add(left, adjoint(left)))
        if dtypes.is_complex(x.aval.dtype):  # the phase that both vectors share is assigned to U
            d = diagonal(inner)
            phase = ew.sub(d, ew.convert(ew.real(d), d.aval.dtype))
            turn_u = with_diagonal(turn_u, ew.div(phase, ew.convert(s, d.aval.dtype)))
        tu, tvs = matmul(u, turn_u), matmul(v, turn_v)
        one_over = ew.div(ew.ones_of(s), s)
        if m > n:  # the component outside the span of U
            tu = add_any(tu, scale_columns(ew.sub(tv, matmul(u, inner)), one_over))
        if n > m:
            out = ew.sub(matmul(adjoint(t), u), matmul(v, adjoint(inner)))
            tvs = add_any(tvs, scale_columns(out, one_over))
        return [u, s, vh], [tu, ts, adjoint(tvs)]


svd_p = _SVD()


def _over_gaps(s: Any, dtype: np.dtype) -> Any:
    """``1 / (s[j]^2 - s[i]^2)``; 0 for equal values, right for functions of s alone."""
    gaps = differences(s)
    lead = range(s.aval.ndim - 1)
    rows = broadcast_in_dim(s, gaps.aval.shape, (*lead, s.aval.ndim - 1))
    squares = ew.mul(gaps, ew.add(gaps, ew.mul(rows, 2)))
    tie = ew.eq(squares, 0)
    safe = ew.select(tie, ew.ones_of(s), squares)
    return ew.convert(ew.select(tie, ew.zeros_of(s), ew.div(ew.ones_of(s), safe)), dtype)


@overload
def svd(
    x: ArrayLike,
    *,
    full_matrices: bool = True,
    compute_uv: Literal[True] = True,
    subset_by_index: None = None,
    algorithm: SvdAlgorithm | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def svd(
    x: ArrayLike,
    *,
    full_matrices: bool = True,
    compute_uv: Literal[False],
    subset_by_index: None = None,
    algorithm: SvdAlgorithm | None = None,
) -> Array: ...
@overload
def svd(
    x: ArrayLike,
    *,
    full_matrices: bool = True,
    compute_uv: bool = True,
    subset_by_index: None = None,
    algorithm: SvdAlgorithm | None = None,
) -> Array | tuple[Array, Array, Array]: ...


def svd(
    x: ArrayLike,
    *,
    full_matrices: bool = True,
    compute_uv: bool = True,
    subset_by_index: None = None,
    algorithm: SvdAlgorithm | None = None,
) -> Any:
    """Singular value decomposition: ``x = U diag(s) Vh``.

    Args:
      x: (..., m, n).
      full_matrices: U is (..., m, m) and Vh (..., n, n), in the place of (..., m, k) and (..., k, n), k = min(m, n).
      compute_uv: otherwise the result is s alone.
      subset_by_index: None: all singular values.
      algorithm: a preference; the results are the same.
    Returns:
      ``(u, s, vh)``, s (..., k) real and falling. Differentiable in U and Vh for m = n, or without ``full_matrices``,
      where singular values are distinct.
    """
    only_none("svd", "subset_by_index", subset_by_index)
    check_algorithm("svd", algorithm, SvdAlgorithm)
    outs = svd_p.bind(lift(x), full_matrices=bool(full_matrices), compute_uv=bool(compute_uv))
    return tuple(outs) if compute_uv else outs[0]
