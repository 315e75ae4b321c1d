"""Native forms of linear algebra: loops for small matrices, LAPACK for the others.

Kernels, stage 6 on the CPU. In: equations of ``core.ops.linalg``. Out: their forms. Matrices are row-major, so LAPACK
gets transposed copies where a factorization depends on the order. A batch is a loop over matrices; threads share it
where blufunc computes, as LAPACK has threads of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.linalg.common import MATRIX_DTYPES
from blufunc.core.ops.linalg.factor import cholesky_p, lu_p, lu_pivots_to_permutation_p, qr_p
from blufunc.core.ops.linalg.solve import lu_solve_p
from blufunc.core.ops.linalg.spectral import eigh_p, svd_p
from blufunc.core.ops.linalg.triangular import triangular_solve_p
from blufunc.core.ops.linalg.tridiagonal import tridiagonal_solve_p
from blufunc.kernels.backends.cpu.steps import lapack
from blufunc.kernels.backends.cpu.steps.form import Form, Library, bytes_of

FILE = "backends/cpu/include/linalg.h"

_SMALL = {"f": 96, "c": 8}
"""Maximum extent of matrices that blufunc factors itself, by kind of dtype.

measured: LU of 64 x 64 in float32 takes 17 us either way, complex 107 us and 34 us by LAPACK (Xeon, 2026-11-27)
"""

_ONE_THREAD = (24, 512)
"""Extents of matrices for which LAPACK gets one thread.

measured: a triangular solve of 48 x 48 by OpenBLAS took 7 ms next to another busy process, and on one thread 13 us
(2 cores, 2026-11-27)
"""

_C_TYPES = {
    "float32": ("float", "float", False),
    "float64": ("double", "double", False),
    "complex64": ("__complex__ float", "float", True),
    "complex128": ("__complex__ double", "double", True),
}


def _library(part: str, function: str, dtype: np.dtype) -> Library:
    scalar, real, is_complex = _C_TYPES[dtype.name]
    constants = (("SCALAR", scalar), ("REAL", real), ("IS_COMPLEX", str(int(is_complex))))
    routines = tuple(lapack.routine(name, dtype) for name in lapack.ROUTINES) if part == "lapack" else ()
    return Library(FILE, ("matrices", part, function), function, constants, routines)


_FUNCTIONS = {
    "elimination": ("lu", "cholesky", "triangular", "lu_solve"),
    "lapack": ("lu", "cholesky", "triangular", "lu_solve", "qr", "eigh", "svd", "tridiagonal"),
}
"""Functions of ``include/linalg.h`` by the part that they are built upon."""

LIBRARIES = {
    f"{part}_{function}_{dtype.name}": _library(part, function, dtype)
    for part, functions in _FUNCTIONS.items()
    for function in functions
    for dtype in MATRIX_DTYPES
}
LIBRARIES["permutation"] = LIBRARIES["elimination_lu_float32"]._replace(
    parts=("matrices", "permutation"), function="permutation"
)
"""Libraries by name."""


def _strides(*operands: int) -> Callable[[Sequence[np.ndarray]], list[int]]:
    """The strides of some operands, those of the batch first."""
    return lambda models: [s for n in operands for s in models[n].strides]


def _of(part: str, function: str, eqn: Eqn) -> str:
    return f"{part}_{function}_{eqn.invars[0].aval.dtype.name}"


def _part(dtype: np.dtype, *extents: int) -> str:
    return "elimination" if max(extents) <= _SMALL[dtype.kind] else "lapack"


def _time(eqn: Eqn, flops: float) -> float:
    """Estimated nanoseconds for a batch of matrices."""
    aval = eqn.invars[-1].aval
    each = 4 if aval.dtype.kind == "c" else 1
    return math.prod(aval.shape[:-2]) * (50 + each * flops / 4)


def _lu(eqn: Eqn) -> Form:
    x = eqn.invars[0].aval
    *batch, m, n = x.shape
    part = _part(x.dtype, m, n)
    scratch = bytes_of((m * n, x.dtype.itemsize)) if part == "lapack" else 0
    time = _time(eqn, m * n * min(m, n))
    return Form(_of(part, "lu", eqn), tuple(batch), (m, n), _strides(0), time, scratch, part != "lapack")


def _cholesky(eqn: Eqn) -> Form:
    x = eqn.invars[0].aval
    *batch, n, _ = x.shape
    part = _part(x.dtype, n)
    scratch, time = bytes_of((n, x.dtype.itemsize)), _time(eqn, n**3 / 3)
    return Form(_of(part, "cholesky", eqn), tuple(batch), (n,), _strides(0), time, scratch, part != "lapack")


def _triangular_solve(eqn: Eqn) -> Form:
    a, b = (v.aval for v in eqn.invars)
    *batch, n, _ = a.shape
    p = eqn.params
    k = b.shape[-1 if p["left_side"] else -2]
    flags = [int(p[f]) for f in ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")]
    part, time = _part(a.dtype, n), _time(eqn, n * n * k)
    sizes, scratch = (n, k, *flags), 0 if p["left_side"] else bytes_of((n * k, a.dtype.itemsize))
    strides, shared = _strides(0, 1), part != "lapack"
    return Form(_of(part, "triangular", eqn), tuple(batch), sizes, strides, time, scratch, shared)


def _lu_solve(eqn: Eqn) -> Form:
    b = eqn.invars[3].aval
    *batch, n, k = b.shape
    part, time = _part(b.dtype, n), _time(eqn, 2 * n * n * k)
    sizes, scratch = (n, k, int(eqn.params["transposed"])), bytes_of((n * k, b.dtype.itemsize))
    strides, shared = _strides(1, 2, 3), part != "lapack"
    return Form(_of(part, "lu_solve", eqn), tuple(batch), sizes, strides, time, scratch, shared)


def _permutation(eqn: Eqn) -> Form:
    *batch, k = eqn.invars[0].aval.shape
    m = eqn.params["permutation_size"]
    scratch, time = bytes_of((k, 4)), math.prod(batch) * (k + m)
    return Form("permutation", tuple(batch), (k, m), _strides(0), time, scratch, False)


def _qr(eqn: Eqn) -> Form:
    x = eqn.invars[0].aval
    *batch, m, n = x.shape
    k, size = eqn.outvars[0].aval.shape[-1], x.dtype.itemsize
    least = min(m, n)
    work = max(
        *lapack.workspaces("geqrf", x.dtype, m, n, None, m, None, "work", -1),
        *lapack.workspaces("orgqr", x.dtype, m, k, least, None, m, None, "work", -1),
    )
    scratch = bytes_of((m * max(k, n), size), (least, size), (work, size))
    time = _time(eqn, 4 * m * n * least) + 3_000
    return Form(_of("lapack", "qr", eqn), tuple(batch), (m, n, k, work), _strides(0), time, scratch, False)


def _eigh(eqn: Eqn) -> Form:
    x = eqn.invars[0].aval
    *batch, n, _ = x.shape
    vectors, real = eqn.params["compute_vectors"], np.zeros(0, x.dtype).real.dtype
    reals = ("reals", -1) if x.dtype.kind == "c" else ()
    job = "V" if vectors else "N"
    found = lapack.workspaces(
        "syevd", x.dtype, job, "L", n, None, n, None, "work", -1, *reals, "integers", -1
    )
    work, *middle, integers = found
    size, n_reals = x.dtype.itemsize, middle[0] if middle else 1
    scratch = bytes_of((n * n, size), (work, size), (integers, 4), (n_reals, real.itemsize))
    sizes = (n, int(vectors), work, n_reals, integers)
    time = _time(eqn, 10 * n**3) + 5_000
    return Form(_of("lapack", "eigh", eqn), tuple(batch), sizes, _strides(0), time, scratch, False)


def _svd(eqn: Eqn) -> Form:
    x = eqn.invars[0].aval
    *batch, m, n = x.shape
    p, real = eqn.params, np.zeros(0, x.dtype).real.dtype
    least, most = min(m, n), max(m, n)
    k, l = (m, n) if p["full_matrices"] else (least, least)
    job = "A" if p["full_matrices"] else "S"
    if not p["compute_uv"]:
        k, l, job = 0, 0, "N"
    is_complex = x.dtype.kind == "c"
    rest = (None, None) if is_complex else (None,)
    (work,) = lapack.workspaces(
        "gesdd", x.dtype, job, m, n, None, m, None, None, m, None, max(l, 1), "work", -1, *rest
    )
    reals = 1
    if is_complex:  # the documented minimum
        both = max(5 * least**2 + 5 * least, 2 * most * least + 2 * least**2 + least)
        reals = both if p["compute_uv"] else 7 * least
    size = x.dtype.itemsize
    scratch = bytes_of(
        (m * n, size), (m * k, size), (l * n, size), (work, size), (reals, real.itemsize), (8 * least, 4)
    )
    sizes = (m, n, k, l, work, reals, 8 * least)
    time = _time(eqn, 10 * m * n * least) + 10_000
    return Form(_of("lapack", "svd", eqn), tuple(batch), sizes, _strides(0), time, scratch, False)


def _tridiagonal(eqn: Eqn) -> Form:
    b = eqn.invars[3].aval
    *batch, n, k = b.shape
    scratch = bytes_of((n * k, b.dtype.itemsize), *[(n, b.dtype.itemsize)] * 3)
    time, strides = _time(eqn, 10 * n * k), _strides(0, 1, 2, 3)
    return Form(_of("lapack", "tridiagonal", eqn), tuple(batch), (n, k), strides, time, scratch, False)


def limits_threads(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that calls LAPACK on one thread."""
    if eqn.prim is lu_pivots_to_permutation_p:
        return False
    extents = eqn.invars[-1].aval.shape[-2:]
    least, most = _ONE_THREAD
    return least <= max(extents) <= most and LIBRARIES[FORMS[eqn.prim](eqn).library].routines != ()


def accepts(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that its form computes."""
    if eqn.prim is qr_p and eqn.params["pivoting"]:
        return False
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if any(max(a.shape, default=1) > np.iinfo(np.int32).max for a in avals):
        return False
    if eqn.prim is lu_solve_p and avals[2].dtype != np.int32:
        return False
    matrices = eqn.invars[-1].aval
    return 0 not in (matrices.shape[-1:] if eqn.prim is lu_pivots_to_permutation_p else matrices.shape[-2:])


FORMS = {
    lu_p: _lu,
    lu_solve_p: _lu_solve,
    lu_pivots_to_permutation_p: _permutation,
    cholesky_p: _cholesky,
    triangular_solve_p: _triangular_solve,
    tridiagonal_solve_p: _tridiagonal,
    qr_p: _qr,
    eigh_p: _eigh,
    svd_p: _svd,
}
"""Makers of the forms of primitives."""
