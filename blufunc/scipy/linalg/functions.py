"""Functions of matrices: exponentials, roots, others; Sylvester's equation.

Face over ``core.ops.linalg`` and ``bnp.linalg``. Functions take batches of matrices in leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg import common as matrices
from blufunc.core.ops.linalg import reduction, triangular
from blufunc.core.ops.linalg.common import adjoint, check_here, check_square, complex_dtype, matmul, triu
from blufunc.core.primitives.linear_ops import broadcast_in_dim
from blufunc.numpy import linalg as bnp_linalg
from blufunc.numpy import reductions
from blufunc.numpy.elementwise import ceil, log2, maximum
from blufunc.numpy.linalg import square
from blufunc.numpy.promotion import broadcast_shapes, promote_dtypes, stretch
from blufunc.transforms.autodiff.grad import jvp
from blufunc.transforms.control_flow.loops import fori_loop
from blufunc.transforms.control_flow.while_loop import while_loop

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

# -- the exponential -------------------------------------------------------------------------------

# The degree of the approximation, and the largest 1-norm for which its backward error is below the rounding error:
# N. J. Higham, "The scaling and squaring method for the matrix exponential revisited" (2005), table 2.3 and section 2.
_PADE = {dtypes.float32: (7, 3.925724783138660), dtypes.float64: (13, 5.371920351148152)}


def expm(A: ArrayLike, *, upper_triangular: bool = False, max_squarings: int = 16) -> Array:
    """The exponentials of square matrices (..., n, n).

    By scaling, a Padé approximation, and repeated squaring; every step is differentiable, to any order.

    Args:
      A: square matrices.
      upper_triangular: A is upper triangular: nothing below its diagonal is read.
      max_squarings: the result is NaN where the norm of A asks for more.
    """
    A = square(A, "expm")
    max_squarings = static_int(max_squarings, "expm", "max_squarings")
    if max_squarings < 0:
        raise errors.ValueRangeError(
            f"expm: max_squarings = {max_squarings}.", where=source.here(), fix="give 0 or more"
        )
    if not A.aval.size:
        return A
    A = triu(A) if upper_triangular else A
    real = matrices.real_dtype(A.aval.dtype)
    degree, limit = _PADE[real]
    lead = tuple(range(A.aval.ndim - 2))
    spread = lambda s: broadcast_in_dim(s, A.aval.shape, lead)
    size = bnp_linalg.matrix_norm(ew.stop_gradient(A), ord=1)
    needed = maximum(ceil(log2(ew.div(size, limit))), 0)
    times = ew.convert(ew.clamp(0.0, needed, float(max_squarings)), dtypes.int32)
    scaled = ew.mul(A, ew.convert(spread(ew.exp2(ew.neg(ew.convert(times, real)))), A.aval.dtype))
    even, odd = _pade(scaled, degree)
    solve = _solve_upper if upper_triangular else bnp_linalg.solve
    result = solve(ew.sub(even, odd), ew.add(even, odd))
    squarings = reductions.max(times)

    def squared(state):
        i, x = state
        return ew.add(i, 1), ew.select(spread(ew.lt(i, times)), matmul(x, x), x)

    start = ew.convert(0, dtypes.int32)
    _, result = while_loop(
        lambda s: ew.lt(s[0], squarings), squared, (start, result), max_steps=max_squarings
    )
    too_large = spread(ew.gt(needed, float(max_squarings)))
    return ew.select(too_large, ew.mul(ew.ones_of(result), math.nan), result)


def _solve_upper(a: Array, b: Array) -> Array:
    return triangular.triangular_solve(a, b, left_side=True)


def _pade(a: Array, degree: int) -> tuple[Array, Array]:
    """Even and odd part of the Padé numerator of exp, of degree 7 or 13."""
    # the coefficients, over the first: quotients of factorials
    c = [
        math.comb(degree, j) * math.factorial(2 * degree - j) / math.factorial(2 * degree)
        for j in range(degree + 1)
    ]
    a2 = matmul(a, a)
    a4 = matmul(a2, a2)
    powers = [matrices.identity_like(a), a2, a4, matmul(a4, a2)]

    def part(first: int) -> Array:
        low = _combined([c[first + 2 * k] for k in range(4)], powers)
        if degree == 7:
            return low
        high = _combined([c[first + 6 + 2 * k] for k in range(1, 4)], powers[1:])
        return ew.add(low, matmul(powers[3], high))

    return part(0), matmul(a, part(1))


def _combined(factors: list[float], xs: list[Array]) -> Array:
    total = ew.mul(xs[0], factors[0])
    for f, x in zip(factors[1:], xs[1:], strict=True):
        total = ew.add(total, ew.mul(x, f))
    return total


@overload
def expm_frechet(
    A: ArrayLike, E: Any, *, method: str | None = None, compute_expm: Literal[True] = True
) -> tuple[Array, Array]: ...
@overload
def expm_frechet(
    A: ArrayLike, E: Any, *, method: str | None = None, compute_expm: Literal[False]
) -> Array: ...
@overload
def expm_frechet(
    A: ArrayLike, E: Any, *, method: str | None = None, compute_expm: bool = True
) -> Array | tuple[Array, Array]: ...


def expm_frechet(A: ArrayLike, E: Any, *, method: str | None = None, compute_expm: bool = True) -> Any:
    """The derivative of ``expm`` at A in direction E: ``(expm(A), derivative)``.

    Without ``compute_expm``, the derivative alone.

    ``method`` is there for programs written for SciPy; the derivative is that of ``expm``'s own steps.
    """
    A, E = promote_dtypes("expm_frechet", A, E, inexact=True)
    check_here(check_square, "expm_frechet", A, E)
    if A.aval.shape != E.aval.shape:
        raise errors.ShapeError(
            f"expm_frechet of {A.aval} and {E.aval}, which are not of one shape.", where=source.here()
        )
    value, tangent = jvp(expm, (A,), (E,))
    return (value, tangent) if compute_expm else tangent


# -- the square root, any function, Sylvester's equation ---------------------------------------------


def sqrtm(A: ArrayLike, blocksize: int = 1) -> Array:
    """Principal square roots of matrices (..., n, n); complex, NaN without one.

    ``blocksize`` is there for programs written for SciPy, and is 1. Differentiable where the root is regular.
    """
    if blocksize != 1:
        raise errors.UnsupportedError(
            f"sqrtm with blocksize={blocksize!r:.60}.", where=source.here(), fix="leave blocksize out"
        )
    A = square(A, "sqrtm")
    return reduction.sqrtm_p.bind(ew.convert(A, complex_dtype(A.aval.dtype)))


def solve_sylvester(A: ArrayLike, B: Any, C: Any, *, method: str = "schur", tol: float = 1e-8) -> Array:
    """The X with ``A X + X B = C``; NaN where eigenvalues of A and -B coincide.

    Args:
      A, B: square matrices (..., m, m) and (..., n, n).
      C: (..., m, n).
      method: ``"schur"``; JAX's ``"eigen"`` gives the same and is taken for it.
      tol: of JAX's second method; without effect.
    """
    if method not in ("schur", "eigen"):
        raise errors.ValueRangeError(
            f"solve_sylvester: {method!r:.60} is not a method.", where=source.here(), fix="method='schur'"
        )
    A, B, C = promote_dtypes("solve_sylvester", A, B, C, inexact=True)
    check_here(check_square, "solve_sylvester", A, B)
    lead = broadcast_shapes(*[x.aval.shape[:-2] for x in (A, B, C)])
    return reduction.sylvester_p.bind(*[stretch(x, (*lead, *x.aval.shape[-2:])) for x in (A, B, C)])


@overload
def funm(A: ArrayLike, func: Callable, disp: Literal[True] = True) -> Array: ...
@overload
def funm(A: ArrayLike, func: Callable, *, disp: Literal[False]) -> tuple[Array, Array]: ...
@overload
def funm(A: ArrayLike, func: Callable, disp: bool = True) -> tuple[Array, Array] | Array: ...


def funm(A: ArrayLike, func: Callable, disp: bool = True) -> Any:
    """A function of a matrix (n, n), given as a function of eigenvalues; complex.

    By Parlett's recurrence on the Schur form, one superdiagonal at a time: G. H. Golub and C. F. Van Loan, "Matrix
    Computations" (2013), section 9.1.4. It is inaccurate where eigenvalues are near each other, and has no derivative.

    Args:
      func: an elementwise function of complex numbers.
      disp: False: return an estimate of the relative error, too.
    """
    A = square(A, "funm")
    if A.aval.ndim != 2:
        raise errors.ShapeError(
            f"funm of {A.aval}.", where=source.here(), fix="a matrix; use vmap for batches"
        )
    n = A.aval.shape[0]
    t, z = reduction.schur_p.bind(ew.convert(A, complex_dtype(A.aval.dtype)), vectors=True)
    eigenvalues = matrices.diagonal(t)
    values = bnp.diag(func(eigenvalues)).astype(t.dtype)
    gaps = matrices.differences(eigenvalues)
    gaps = bnp.where(gaps == 0, 1, gaps)
    at = bnp.arange(n) - bnp.arange(n)[:, None]

    def diagonal(k, f):
        # f and t commute: the rest of the products gives what is missing on diagonal k
        return bnp.where(at == k, (matmul(t, f) - matmul(f, t)) / gaps, f)

    f = fori_loop(1, n, diagonal, values)
    result = matmul(matmul(z, f), adjoint(z))
    if disp:
        return result
    real = matrices.real_dtype(t.aval.dtype)
    precision = float(dtypes.finfo(real).eps)
    smallest = bnp.min(bnp.where(at > 0, bnp.abs(gaps), bnp.inf), initial=1.0)
    size = bnp_linalg.norm(triu(t, 1), 1)
    error = bnp.minimum(1, bnp.maximum(precision, precision / smallest * size))
    return result, bnp.where(bnp.all(~bnp.isfinite(result)), bnp.inf, error).astype(real)


__all__ = ["expm", "expm_frechet", "funm", "solve_sylvester", "sqrtm"]
