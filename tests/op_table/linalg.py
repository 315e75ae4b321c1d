"""The rows of linear algebra and of the Fourier transforms.

``tests/op_table/rows.py`` takes ``ROWS``. Arguments are made into matrices whose factors are well
separated, so that finite differences of the factors converge: vectors of nearly equal values turn too fast for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from blufunc.core.ops import fft
from blufunc.core.ops.linalg import factor as linalg_factor
from blufunc.core.ops.linalg import reduction, spectral, triangular, tridiagonal
from blufunc.core.ops.linalg import solve as linalg_solve
from tests.op_table.row import COMPLEX, KEY, Arg, Op

KINDS = ("float64", "float32", "complex128", "complex64")
REALS = ("float64", "float32")
DOUBLE = ("float64", "complex128")
REFUSED = ("float16", "bfloat16", "int32", "bool", KEY)


@dataclass(frozen=True)
class Matrix(Arg):
    """An argument that ``make`` turns into matrices with a property."""

    make: Callable | None = None

    def sample(self, rng, dtype, batch=()):
        x = super().sample(rng, dtype, batch)
        return np.asarray(self.make(x), x.dtype)


def H(x):
    return np.conj(np.swapaxes(x, -1, -2))


def _positive(x):
    return x @ H(x) / 4 + np.eye(x.shape[-1])


def _regular(x):
    m, n = x.shape[-2:]
    return x / 2 + 3 * np.eye(m, n)


def _spread(x):
    """With values near 1, 3, 5, ...: rectangular too."""
    m, n = x.shape[-2:]
    d = np.zeros((m, n))
    np.fill_diagonal(d, 1 + 2 * np.arange(min(m, n)))
    return x / 5 + d


def _hermitian(x):
    x = _spread(x)
    return (x + H(x)) / 2


def _crooked(x):
    """Not symmetric, with real eigenvalues that are far apart."""
    return _spread(x) @ np.triu(np.ones(x.shape[-2:])) / 2


def _rotating(x):
    """Real, with two complex eigenvalues."""
    return np.array([[1, -2, 0], [2, 1, 0], [0, 0, 4]]) + x / 5


# -- triangular solves -----------------------------------------------------------------------------


def _triangular_row(left, lower, transposed, conjugated, unit, b, name, kinds):
    params = {"left_side": left, "lower": lower, "transpose_a": transposed, "conjugate_a": conjugated,
              "unit_diagonal": unit}  # fmt: skip

    def ref(a, b):
        a = np.tril(a, -unit) if lower else np.triu(a, int(unit))
        a = a + np.eye(len(a)) if unit else a
        a = a.T if transposed else a
        a = a.conj() if conjugated else a
        return np.linalg.solve(a, b) if left else np.linalg.solve(a.T, b.T).T

    args = (Matrix((3, 3), make=_regular), Arg(b))
    refuses = REFUSED if name == "left" else ()
    return Op(triangular.triangular_solve_p, args, ref, params, name, 2, kinds, refuses=refuses, tol=4)


TRIANGULAR = [
    _triangular_row(True, True, False, False, False, (3, 2), "left", KINDS),
    _triangular_row(False, True, False, False, False, (2, 3), "right", KINDS),
    *[
        _triangular_row(left, lower, transposed, conjugated, unit, (3, 3),
                        f"{'left' if left else 'right'}-{'lower' if lower else 'upper'}-"
                        f"{int(transposed)}{int(conjugated)}{int(unit)}",
                        ("complex128",))
        for left, lower, transposed, conjugated, unit in itertools.product((True, False), repeat=5)
        if (left + lower + transposed + conjugated + unit) % 2 == 0
    ],
]  # fmt: skip


def _tridiagonal(dl, d, du, b):
    return np.linalg.solve(np.diag(d) + np.diag(dl[1:], -1) + np.diag(du[:-1], 1), b)


def _tridiagonal_row(n, name, kinds, **kw):
    args = (Arg((n,)), Arg((n,), 4, 6), Arg((n,)), Arg((n, 2)))
    return Op(tridiagonal.tridiagonal_solve_p, args, _tridiagonal, {}, name, 2, kinds, tol=4, **kw)


TRIANGULAR += [_tridiagonal_row(4, "", KINDS, refuses=REFUSED), _tridiagonal_row(1, "one", DOUBLE)]

# -- factorizations --------------------------------------------------------------------------------


def _lu(x):
    m, n = x.shape
    permutation, lower, upper = scipy.linalg.lu(x, p_indices=True)
    k = min(m, n)
    packed = np.zeros((m, n), x.dtype)
    packed[:, :k] += np.tril(lower, -1)
    packed[:k] += upper
    order = np.argsort(permutation)
    rows, pivots = list(range(m)), []
    for i in range(k):
        j = rows.index(order[i])
        rows[i], rows[j] = rows[j], rows[i]
        pivots.append(j)
    return packed, np.array(pivots), order


def _factors(prim, shape, make, ref, name, kinds, grad=2, params=None, **kw):
    return Op(prim, (Matrix(shape, make=make),), ref, params or {}, name, grad, kinds, tol=16, **kw)


def _qr(shape, name, kinds, full=False, grad=2, **kw):
    ref = lambda x: np.linalg.qr(x, "complete" if full else "reduced")
    params = {"full_matrices": full, "pivoting": False}
    return _factors(linalg_factor.qr_p, shape, _spread, ref, name, kinds, grad, params, **kw)


def _qr_pivoted(x):
    return scipy.linalg.qr(x, pivoting=True, mode="economic")


PIVOTED = {"full_matrices": False, "pivoting": True}

FACTORS = [
    _factors(linalg_factor.cholesky_p, (3, 3), _positive, np.linalg.cholesky, "", KINDS, refuses=REFUSED),
    _factors(linalg_factor.cholesky_p, (1, 1), _positive, np.sqrt, "one", REALS),
    _factors(linalg_factor.lu_p, (3, 3), lambda x: x, _lu, "", KINDS, refuses=REFUSED),
    _factors(linalg_factor.lu_p, (4, 2), lambda x: x, _lu, "tall", DOUBLE),
    _factors(linalg_factor.lu_p, (2, 4), lambda x: x, _lu, "wide", DOUBLE),
    Op(linalg_factor.lu_pivots_to_permutation_p, (Arg((3,), 3, 4, "int32"),), None, {"permutation_size": 5}, "", 0,
       ("int32",), refuses=()),
    _qr((3, 3), "", KINDS, refuses=REFUSED),
    _qr((4, 3), "tall", KINDS),
    _qr((2, 4), "wide", DOUBLE),
    _qr((3, 3), "complete", ("float64",), full=True),
    _qr((4, 2), "tall-complete", KINDS, full=True, grad=0),
    _qr((2, 4), "wide-complete", ("float64",), full=True),
    _factors(linalg_factor.qr_p, (4, 3), _spread, _qr_pivoted, "pivoting", KINDS, params=PIVOTED),
    _factors(linalg_factor.qr_p, (3, 4), _spread, _qr_pivoted, "wide-pivoting", ("float64",), params=PIVOTED),
    _factors(linalg_factor.qr_p, (4, 2), _spread, None, "pivoting-complete", ("float64",), 0,
             {"full_matrices": True, "pivoting": True}),
]  # fmt: skip


def _lu_solve(transposed):
    def ref(a, lu, order, b):
        lower, upper = np.tril(lu, -1) + np.eye(3), np.triu(lu)
        a = np.empty_like(lu)
        a[order] = lower @ upper
        return np.linalg.solve(a.T if transposed else a, b)

    args = (Arg((3, 3)), Matrix((3, 3), make=_regular), Arg((3,), 0, 2, "int32", distinct=True), Arg((3, 2)))
    # the factors are a function of a: the derivative in it is tested through ``solve``
    return Op(linalg_solve.lu_solve_p, args, ref, {"transposed": transposed}, "transposed" if transposed else "", 2,
              KINDS, refuses=() if transposed else REFUSED, tol=16, wrt=(3,))  # fmt: skip


# -- eigenvalues and singular values ---------------------------------------------------------------


def _signs_of(x):
    return np.linalg.eigh(x)[::-1]


def _eigh(name, kinds, vectors=True, grad=2, **kw):
    ref = _signs_of if vectors else lambda x: [np.linalg.eigvalsh(x)]
    params = {"compute_vectors": vectors}
    return _factors(spectral.eigh_p, (3, 3), _hermitian, ref, name, kinds, grad, params, **kw)


def _eig(name, kinds, left, right, make=_crooked, compare=True, **kw):
    params = {"left": left, "right": right}

    def ref(x):
        w, *vectors = scipy.linalg.eig(x, left=left, right=right) if left or right else [np.linalg.eigvals(x)]
        return [w, *vectors]

    ref = ref if compare else None  # signs in single precision are not those in double
    return _factors(spectral.eig_p, (3, 3), make, ref, name, kinds, 2, params, **kw)


def _svd(shape, name, kinds, full=False, uv=True, grad=2, **kw):
    def ref(x):
        out = np.linalg.svd(x, full, uv)
        return out if uv else [out]

    params = {"full_matrices": full, "compute_uv": uv}
    return _factors(spectral.svd_p, shape, _spread, ref, name, kinds, grad, params, **kw)


# the phases of complex vectors are LAPACK's choice, which has no derivative: see tests/numpy/test_linalg.py
SPECTRAL = [
    _eigh("", REALS, refuses=REFUSED),
    _eigh("complex", COMPLEX, grad=0),
    _eigh("values", KINDS, vectors=False),
    _eig("values", KINDS, False, False, refuses=REFUSED),
    _eig("right", DOUBLE, False, True),
    _eig("left", DOUBLE, True, False),
    _eig("single", ("float32", "complex64"), True, True, compare=False),
    _eig("both", DOUBLE, True, True),
    _eig("rotating", ("float64",), False, True, _rotating),
    _svd((3, 3), "", REALS, refuses=REFUSED),
    _svd((3, 3), "complex", COMPLEX, grad=0),
    _svd((4, 3), "tall", REALS),
    _svd((2, 4), "wide", REALS),
    _svd((3, 3), "square-complete", ("float64",), full=True),
    _svd((4, 2), "complete", KINDS, full=True, grad=0),
    _svd((2, 4), "wide-complete", KINDS, full=True, grad=0),
    _svd((4, 3), "values", KINDS, uv=False),
    _svd((2, 4), "wide-values", DOUBLE, full=True, uv=False),
]  # fmt: skip

# -- Fourier transforms ----------------------------------------------------------------------------


def _fft(kind, shape, lengths, kinds, name="", **kw):
    axes = tuple(range(-len(lengths), 0))
    ref = lambda x: getattr(np.fft, f"{kind}n")(x, lengths, axes)
    params = {"type": fft.FftType.from_any(kind), "lengths": lengths}
    return Op(fft.fft_p, (Arg(shape),), ref, params, f"{kind}{name}", 2, kinds, tol=2, **kw)


_TO_COMPLEX = {"out": lambda d: {"float64": "complex128", "float32": "complex64"}[d]}
_TO_REAL = {"out": lambda d: {"complex128": "float64", "complex64": "float32"}[d]}

FFT = [
    _fft("fft", (2, 5), (5,), COMPLEX, refuses=("float32", *REFUSED)),
    _fft("ifft", (2, 4), (4,), COMPLEX, refuses=("float32", *REFUSED)),
    _fft("rfft", (2, 5), (5,), REALS, **_TO_COMPLEX, refuses=("complex64", *REFUSED)),
    _fft("irfft", (2, 3), (5,), COMPLEX, **_TO_REAL, refuses=("float32", *REFUSED)),
    _fft("rfft", (2, 6), (6,), ("float64",), "-even", **_TO_COMPLEX),
    _fft("irfft", (2, 4), (6,), ("complex128",), "-even", **_TO_REAL),
    _fft("fft", (2, 3), (2, 3), ("complex128",), "-2d"),
    _fft("ifft", (2, 3, 2), (2, 3, 2), ("complex128",), "-3d"),
    _fft("rfft", (2, 3, 4), (3, 4), ("float64",), "-2d", **_TO_COMPLEX),
    _fft("irfft", (2, 3, 3), (3, 4), ("complex128",), "-2d", **_TO_REAL),
    _fft("irfft", (1, 1), (1,), ("complex128",), "-one", **_TO_REAL),
]  # fmt: skip

# -- reductions ------------------------------------------------------------------------------------


def _lapack(name, x, *options, **more):
    """A routine's results, for one of its names of real and of complex numbers."""
    real, full = name
    routine = getattr(scipy.linalg.lapack, ("d" + real) if x.dtype.kind == "f" else ("z" + full))
    return list(routine(x, *options, **more))


def _tridiagonal_of(x):
    packed, *rest, _ = _lapack(("sytrd", "hetrd"), x, lower=1)
    return [np.tril(packed) + np.triu(x, 1), *rest]


_CROOKED = Matrix((3, 3), make=_crooked)
_TRIANGLE = Matrix((3, 3), make=lambda x: np.triu(_spread(x)))
REDUCTIONS = [
    # of a triangle the form is unique; tests/scipy/test_linalg_more.py has others
    Op(reduction.schur_p, (_TRIANGLE,), lambda x: list(scipy.linalg.schur(x)), {"vectors": True}, dtypes=KINDS,
       refuses=REFUSED, tol=64),
    Op(reduction.hessenberg_p, (_CROOKED,), lambda x: _lapack(("gehrd",) * 2, x)[:2], dtypes=KINDS, refuses=REFUSED,
       tol=64),
    Op(reduction.geqrf_p, (Matrix((4, 3), make=_spread),), lambda x: _lapack(("geqrf",) * 2, x)[:2], dtypes=KINDS,
       refuses=REFUSED, tol=64),
    Op(reduction.tridiagonal_p, (_CROOKED,), _tridiagonal_of, {"lower": True}, dtypes=KINDS, refuses=REFUSED, tol=64),
    Op(reduction.sylvester_p, (_CROOKED, Matrix((2, 2), make=_crooked), Arg((3, 2))),
       lambda a, b, c: scipy.linalg.solve_sylvester(a, b, c), dtypes=KINDS, refuses=REFUSED, grad=2, tol=64),
    Op(reduction.sqrtm_p, (_CROOKED,), lambda x: scipy.linalg.sqrtm(x), dtypes=COMPLEX, grad=2, tol=64),
]  # fmt: skip

ROWS: list[Op] = [*TRIANGULAR, *FACTORS, _lu_solve(False), _lu_solve(True), *SPECTRAL, *REDUCTIONS, *FFT]
