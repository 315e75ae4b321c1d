"""Reductions to simpler forms: Schur, Hessenberg, tridiagonal, packed QR.

Core operations, above ``triangular``: LAPACK's routines, on the host, and the two equations that the Schur form solves
(Sylvester's and the square root). The factors are not functions of the matrix (an eigenvalue of a Schur form may stand
anywhere on its diagonal), so they have no derivative; what is computed from them has its own. Reflectors are those of
LAPACK: ``H = I - tau v v^H`` with v 1 at its first element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.common import (
    MatrixOp,
    adjoint,
    all_or_nan,
    check_matrices,
    check_square,
    complex_dtype,
    each,
    identity_like,
    mask,
    matmul,
    mT,
    real_dtype,
    routine,
    tril,
    triu,
)
from blufunc.core.ops.linalg.triangular import triangular_solve
from blufunc.core.ops.shape import slice_
from blufunc.core.primitives.linear_ops import add_tangents, broadcast_in_dim
from blufunc.core.primitives.primitive import unsupported
from blufunc.core.primitives.tangents import Zero, is_linear, zero

with _lazy.modules(globals()):
    import scipy

_NOT_UNIQUE = "the factors are not functions of the matrix"


class _Schur(MatrixOp):
    """``A = Z T Z^H``; T is upper triangular, with 2 x 2 blocks if A is real."""

    name, multiple_results = "schur", True
    jvp = unsupported(_NOT_UNIQUE)

    def impl(self, x, *, vectors):
        return each(lambda m, types: all_or_nan(self._one, m, types), x, outs=self._types(x, vectors))

    @staticmethod
    def _one(m):
        if not np.isfinite(m).all():
            raise np.linalg.LinAlgError
        return scipy.linalg.schur(m, "complex" if m.dtype.kind == "c" else "real", check_finite=False)

    def abstract(self, x, *, vectors):
        check_square(self.name, x)
        return self._types(x, vectors)

    def _types(self, x, vectors) -> list[ShapedArray]:
        return [ShapedArray(x.shape, x.dtype)] * (1 + vectors)


class _Hessenberg(MatrixOp):
    """LAPACK's ``gehrd``: H and, below its subdiagonal, reflectors; and taus."""

    name, multiple_results = "hessenberg", True
    jvp = unsupported(_NOT_UNIQUE)

    def impl(self, x):
        if x.shape[-1] == 1:  # there are no reflectors
            return [x, np.zeros((*x.shape[:-2], 0), x.dtype)]
        return each(lambda m, types: routine("gehrd", m)(m)[:2], x, outs=self._types(x))

    def abstract(self, x):
        check_square(self.name, x)
        return self._types(x)

    def _types(self, x) -> list[ShapedArray]:
        return [ShapedArray(x.shape, x.dtype), ShapedArray((*x.shape[:-2], max(x.shape[-1] - 1, 0)), x.dtype)]


class _PackedQR(MatrixOp):
    """LAPACK's ``geqrf``: R in the upper triangle, the reflectors below it, and taus."""

    name, multiple_results = "geqrf", True
    jvp = unsupported(_NOT_UNIQUE)

    def impl(self, x):
        return each(lambda m, types: routine("geqrf", m)(m)[:2], x, outs=self._types(x))

    def abstract(self, x):
        check_matrices(self.name, x)
        return self._types(x)

    def _types(self, x) -> list[ShapedArray]:
        return [ShapedArray(x.shape, x.dtype), ShapedArray((*x.shape[:-2], min(x.shape[-2:])), x.dtype)]


class _Tridiagonal(MatrixOp):
    """LAPACK's ``sytrd`` of one triangle: reflectors, two diagonals, and taus."""

    name, multiple_results = "tridiagonal", True
    jvp = unsupported(_NOT_UNIQUE)

    def impl(self, x, *, lower):
        if x.shape[-1] == 1:  # there are no reflectors
            rest = [np.zeros(a.shape, a.dtype) for a in self._types(x)[2:]]
            return [x, np.real(x[..., 0]), *rest]

        def one(m, types):
            reduce = routine("sytrd" if m.dtype.kind == "f" else "hetrd", m)
            packed, *rest, _ = reduce(m, lower=int(lower))
            other = np.triu(m, 1) if lower else np.tril(m, -1)  # the triangle that is not read stays
            return [(np.tril(packed) if lower else np.triu(packed)) + other, *rest]

        return each(one, x, outs=self._types(x))

    def abstract(self, x, *, lower):
        check_square(self.name, x)
        return self._types(x)

    def _types(self, x) -> list[ShapedArray]:
        *lead, n, _ = x.shape
        real, less = real_dtype(x.dtype), max(n - 1, 0)
        return [
            ShapedArray(x.shape, x.dtype),
            ShapedArray((*lead, n), real),
            ShapedArray((*lead, less), real),
            ShapedArray((*lead, less), x.dtype),
        ]


schur_p = _Schur()
hessenberg_p = _Hessenberg()
geqrf_p = _PackedQR()
tridiagonal_p = _Tridiagonal()


# -- equations ---------------------------------------------------------------------------------------


class _Sylvester(MatrixOp):
    """The X with ``A X + X B = C``, linear in C: R. Bartels and G. Stewart (1972)."""

    name = "sylvester"

    def impl(self, a, b, c):
        one = lambda a, b, c, types: all_or_nan(lambda c: self._one(a, b, c), c, types)
        return each(one, a, b, c, outs=[ShapedArray(c.shape, c.dtype)])[0]

    @staticmethod
    def _one(a, b, c):
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
            raise np.linalg.LinAlgError
        return scipy.linalg.solve_sylvester(a, b, c)

    def abstract(self, a, b, c):
        check_matrices(self.name, a, b, c)
        check_square(self.name, a)
        check_square(self.name, b)
        if c.shape != (*a.shape[:-1], b.shape[-1]) or a.shape[:-2] != b.shape[:-2]:
            raise errors.ShapeError(
                f"{self.name} of {a}, {b} and {c}.", fix="a is (..., m, m), b (..., n, n) and c (..., m, n)"
            )
        return c.strong()

    def jvp(self, primals, tangents):
        a, b, c = primals
        ta, tb, tc = tangents
        x = self.bind(a, b, c)
        if ta.__class__ is not Zero:
            tc = add_tangents(tc, ew.neg(matmul(ta, x)))
        if tb.__class__ is not Zero:
            tc = add_tangents(tc, ew.neg(matmul(x, tb)))
        return x, zero(x.aval) if tc.__class__ is Zero else self.bind(a, b, tc)

    def transpose(self, ct, a, b, c):
        if is_linear(a) or is_linear(b):
            raise errors.GradError(f"{self.name} is linear in its last operand only.")
        c.add(self.bind(mT(a), mT(b), ct))


class _SquareRoot(MatrixOp):
    """The principal square root of complex matrices; NaN where there is none.

    Its derivative solves ``R dR + dR R = dA``: N. J. Higham, "Functions of Matrices" (2008), section 6.1.
    """

    name = "sqrtm"

    def impl(self, x):
        return each(
            lambda m, types: all_or_nan(_square_root, m, types), x, outs=[ShapedArray(x.shape, x.dtype)]
        )[0]

    def abstract(self, x):
        check_square(self.name, x)
        if x.dtype != complex_dtype(x.dtype):
            raise errors.DtypeError(
                f"{self.name} takes complex matrices, not {x}.", fix="x.astype('complex64')"
            )
        return x.strong()

    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        root = self.bind(x)
        return root, zero(root.aval) if t.__class__ is Zero else sylvester_p.bind(root, root, t)


def _square_root(x: np.ndarray) -> np.ndarray:
    """By superdiagonals of the Schur form: A. Bjoerck and S. Hammarling (1983)."""
    if not np.isfinite(x).all():
        raise np.linalg.LinAlgError
    t, z = scipy.linalg.schur(x, "complex", check_finite=False)
    n = len(t)
    root = np.diag(np.sqrt(np.diag(t)))
    d = np.diag(root)
    with np.errstate(all="ignore"):
        for k in range(1, n):
            i, j = np.arange(n - k), np.arange(k, n)
            inner = np.array([root[a, a + 1 : b] @ root[a + 1 : b, b] for a, b in zip(i, j, strict=True)])
            top, below = t[i, j] - inner, d[i] + d[j]
            both = (top == 0) & (below == 0)
            root[i, j] = np.where(both, 0, top / np.where(both, 1, below))
    return z @ root @ z.conj().T


sylvester_p = _Sylvester()
sqrtm_p = _SquareRoot()


# -- products of reflectors --------------------------------------------------------------------------


def reflectors(a: Any, taus: Any) -> tuple[Any, Any]:
    """V and T with ``H_1 ... H_k = I - V T V^H``, of packed reflectors and taus.

    R. Schreiber and C. Van Loan, "A storage-efficient WY representation for products of Householder transformations"
    (1989): T's inverse is ``diag(1 / tau) + striu(V^H V)``. It is a GEMM and a triangular solve, and differentiable.
    """
    *lead, m, _ = a.aval.shape
    k = taus.aval.shape[-1]
    v = slice_(a, (0,) * a.aval.ndim, (*lead, m, k))
    v = ew.add(tril(v, -1), identity_like(v))
    inner = triu(matmul(adjoint(v), v), 1)
    wide = inner.aval.shape
    rows = broadcast_in_dim(taus, wide, (*range(len(lead)), len(lead)))
    diagonal = ew.select(mask(inner, ew.eq), rows, ew.zeros_of(inner))
    system = ew.add(ew.mul(rows, inner), identity_like(inner))
    return v, triangular_solve(system, diagonal, left_side=True, unit_diagonal=True)


def check_reflectors(name: str, a: Any, taus: Any) -> tuple[Any, Any]:
    """Packed reflectors and taus, checked."""
    a, taus = lift(a), lift(taus)
    check_matrices(name, a.aval)
    m, n = a.aval.shape[-2:]
    fits = taus.aval.ndim == a.aval.ndim - 1 and taus.aval.shape[:-1] == a.aval.shape[:-2]
    if not fits or taus.aval.dtype != a.aval.dtype or not taus.aval.shape[-1] <= min(m, n):
        raise errors.ShapeError(
            f"{name} of reflectors {a.aval} and taus {taus.aval}.",
            fix="taus are (..., k), of the dtype of a (..., m, n), with k <= min(m, n)",
        )
    return a, taus
