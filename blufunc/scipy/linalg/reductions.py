"""Schur and Hessenberg forms, and eigenvalues of tridiagonal matrices.

Face over ``lax.linalg``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops.linalg import reduction
from blufunc.core.ops.linalg.common import complex_dtype, triu
from blufunc.numpy import linalg as bnp_linalg
from blufunc.numpy.linalg import square
from blufunc.numpy.promotion import promote_dtypes

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


def schur(a: ArrayLike, output: str = "real") -> tuple[Array, Array]:
    """The Schur decomposition ``a = z @ t @ z^H`` of (..., n, n); no derivative.

    Args:
      output: ``"real"``: of real a, t is real, with 2 x 2 blocks for complex eigenvalues; ``"complex"``: t is upper
        triangular.
    """
    if output not in ("real", "complex"):
        raise errors.ValueRangeError(
            f"schur: {output!r:.60} is not an output.", where=source.here(), fix="output='real' or 'complex'"
        )
    a = square(a, "schur")
    if output == "complex":
        a = a.astype(complex_dtype(a.aval.dtype))
    t, z = reduction.schur_p.bind(a, vectors=True)
    return t, z


def rsf2csf(T: ArrayLike, Z: Any, check_finite: bool = True) -> tuple[Array, Array]:
    """The complex Schur form of a real one, by a rotation for each 2 x 2 block.

    Args:
      T, Z: (n, n), of ``schur``.
    """
    T, Z = promote_dtypes("rsf2csf", T, Z, inexact=True)
    if T.aval.ndim != 2 or T.aval.shape != Z.aval.shape or T.aval.shape[0] != T.aval.shape[1]:
        raise errors.ShapeError(
            f"rsf2csf of {T.aval} and {Z.aval}.",
            where=source.here(),
            fix="square matrices of one shape; use vmap for batches",
        )
    n = T.aval.shape[0]
    dtype = complex_dtype(T.aval.dtype)
    eps = float(dtypes.finfo(dtype).eps)

    def rotate(i, state):
        t, z = state
        m = n - 1 - i  # the lower row of a block
        block = lax.dynamic_slice(t, (m - 1, m - 1), (2, 2))
        (a, b), (c, d) = block
        half = (a - d) / 2
        mu = half + bnp.sqrt(half * half + b * c)  # an eigenvalue, less d
        size = bnp.sqrt(bnp.abs(mu) ** 2 + bnp.abs(c) ** 2)
        small = bnp.abs(c) <= eps * (bnp.abs(a) + bnp.abs(d))
        size = bnp.where(small, 1, size)
        cos, sin = bnp.where(small, 1, mu / size), bnp.where(small, 0, c / size)
        g = bnp.stack([bnp.stack([bnp.conj(cos), sin]), bnp.stack([-sin, cos])])
        back = bnp.conj(g.T)
        rows = g @ lax.dynamic_slice(t, (m - 1, 0), (2, n))
        t = lax.dynamic_update_slice(t, rows, (m - 1, 0))
        turned = lambda x: lax.dynamic_update_slice(
            x, lax.dynamic_slice(x, (0, m - 1), (n, 2)) @ back, (0, m - 1)
        )
        t = turned(t)
        return t.at[m, m - 1].set(0), turned(z)

    t, z = T.astype(dtype), Z.astype(dtype)
    if n > 1:
        t, z = lax.fori_loop(0, n - 1, rotate, (t, z))
    return triu(t), z


@overload
def hessenberg(
    a: ArrayLike, *, calc_q: Literal[False] = False, overwrite_a: bool = False, check_finite: bool = True
) -> Array: ...
@overload
def hessenberg(
    a: ArrayLike, *, calc_q: Literal[True], overwrite_a: bool = False, check_finite: bool = True
) -> tuple[Array, Array]: ...
@overload
def hessenberg(
    a: ArrayLike, *, calc_q: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> Array | tuple[Array, Array]: ...


def hessenberg(
    a: ArrayLike, *, calc_q: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> Any:
    """The Hessenberg form h of (..., n, n), ``a = q @ h @ q^H``; no derivative.

    ``calc_q``: return ``(h, q)``.
    """
    a = square(a, "hessenberg")
    packed, taus = reduction.hessenberg_p.bind(a)
    h = triu(packed, -1)
    if not calc_q:
        return h
    n = a.aval.shape[-1]
    q = bnp.broadcast_to(bnp.eye(n, dtype=a.dtype), a.aval.shape)
    if n > 1:
        q = q.at[..., 1:, 1:].set(lax.linalg.householder_product(packed[..., 1:, :-1], taus))
    return h, q


@overload
def eigh_tridiagonal(
    d: ArrayLike,
    e: Any,
    *,
    eigvals_only: Literal[False] = False,
    select: str = "a",
    select_range: tuple[float, float] | None = None,
    tol: float | None = None,
    key: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def eigh_tridiagonal(
    d: ArrayLike,
    e: Any,
    *,
    eigvals_only: Literal[True],
    select: str = "a",
    select_range: tuple[float, float] | None = None,
    tol: float | None = None,
    key: ArrayLike | None = None,
) -> Array: ...
@overload
def eigh_tridiagonal(
    d: ArrayLike,
    e: Any,
    *,
    eigvals_only: bool = False,
    select: str = "a",
    select_range: tuple[float, float] | None = None,
    tol: float | None = None,
    key: ArrayLike | None = None,
) -> tuple[Array, Array] | Array: ...


def eigh_tridiagonal(
    d: ArrayLike,
    e: Any,
    *,
    eigvals_only: bool = False,
    select: str = "a",
    select_range: tuple[float, float] | None = None,
    tol: float | None = None,
    key: ArrayLike | None = None,
) -> Any:
    """Ascending eigenvalues of Hermitian tridiagonal matrices, and their eigenvectors.

    Args:
      d: the diagonals (n,), real.
      e: the ones next to it (n - 1,).
      eigvals_only: give the eigenvalues alone.
      select: ``"a"``: all; ``"i"``: those at the indices ``select_range``, both included.
      tol, key: of JAX's method; without effect.
    Returns:
      ``(w, v)``, or w.
    """
    d, e = promote_dtypes("eigh_tridiagonal", d, e, inexact=True)
    n = d.aval.shape[-1] if d.aval.ndim else 0
    if d.aval.ndim != 1 or e.aval.shape != (n - 1,):
        raise errors.ShapeError(
            f"eigh_tridiagonal of {d.aval} and {e.aval}.",
            where=source.here(),
            fix="d is (n,), e (n - 1,); use vmap for batches",
        )
    if select not in ("a", "i"):
        raise errors.UnsupportedError(
            f"eigh_tridiagonal(select={select!r:.60}).",
            where=source.here(),
            why="the number of eigenvalues between two values is not known while a function is traced"
            if select == "v"
            else None,
            fix="select='a', or select='i' with indices",
        )
    first, last = 0, n - 1
    if select == "i":
        if select_range is None:
            raise errors.ArgumentError(
                "eigh_tridiagonal(select='i') without select_range.",
                where=source.here(),
                fix="select_range=(0, 3)",
            )
        first, last = (static_int(i, "eigh_tridiagonal", "select_range") for i in select_range)
        if not 0 <= first <= last < n:
            raise errors.ValueRangeError(
                f"eigh_tridiagonal: indices {first} to {last} of {n} eigenvalues.", where=source.here()
            )
    matrix = bnp.diag(bnp.real(d).astype(d.dtype)) + bnp.diag(e, -1)
    matrix = matrix + bnp.diag(bnp.conj(e), 1)
    if eigvals_only:
        return bnp_linalg.eigvalsh(matrix)[first : last + 1]
    w, v = bnp_linalg.eigh(matrix)
    return w[first : last + 1], v[:, first : last + 1]


__all__ = ["eigh_tridiagonal", "hessenberg", "rsf2csf", "schur"]
