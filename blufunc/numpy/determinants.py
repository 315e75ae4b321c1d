"""Determinants, with derivatives that hold for singular matrices too.

Face, part of ``bnp.linalg``. The derivative of a determinant is the adjugate (Jacobi's formula), which is a polynomial
in the elements: up to size 3 it comes of writing the determinant out, above it from a QR decomposition with pivoting,
which shows the rank. (The second derivative above size 3 divides by the determinant: it exists here for regular
matrices only.) The derivative of its logarithm is the inverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.common import (
    adjoint,
    check_here,
    check_square,
    diagonal,
    matmul,
    mT,
    real_dtype,
    with_diagonal,
)
from blufunc.core.ops.linalg.factor import lu, qr
from blufunc.core.ops.linalg.solve import lu_solve_p
from blufunc.core.ops.linalg.triangular import triangular_solve
from blufunc.core.ops.reduce import reduce_prod
from blufunc.core.ops.shape import concatenate, index_in_dim, iota, slice_in_dim
from blufunc.core.ops.sort import place_along
from blufunc.core.primitives.linear_ops import broadcast_in_dim, full, reduce_sum, reshape
from blufunc.numpy.linear import cross
from blufunc.numpy.promotion import inexact
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


class SlogdetResult(NamedTuple):
    """A determinant as ``sign * exp(logabsdet)``.

    Attributes:
      sign: of modulus 1; 0 of a singular matrix.
      logabsdet: real; -inf of a singular matrix.
    """

    sign: Array
    logabsdet: Array


def det(a: ArrayLike) -> Array:
    """Determinants of square matrices (..., n, n), singular ones differentiable too."""
    a = inexact(a, "det")
    check_here(check_square, "det", a)
    n, last = a.aval.shape[-1], a.aval.ndim - 1
    if n == 0:
        return full(a.aval.shape[:-2], 1, a.aval.dtype)
    if n == 1:
        return reshape(a, a.aval.shape[:-2])
    if n > 3:
        return _det(a)
    rows = [index_in_dim(a, i, last - 1, keepdims=False) for i in range(n)]
    if n == 3:
        return reduce_sum(ew.mul(rows[0], cross(rows[1], rows[2])), (last - 1,))
    (a, b), (c, d) = ([index_in_dim(row, j, last - 1, keepdims=False) for j in range(2)] for row in rows)
    return ew.sub(ew.mul(a, d), ew.mul(b, c))


def slogdet(a: ArrayLike, *, method: str | None = None) -> SlogdetResult:
    """Signs and log absolute values of determinants of matrices (..., n, n).

    Args:
      method: None or ``"lu"``: by LU decomposition.
    """
    a = inexact(a, "slogdet")
    check_here(check_square, "slogdet", a)
    if method not in (None, "lu"):
        raise errors.UnsupportedError(
            f"slogdet by the method {method!r:.60}.", where=source.here(), fix="method='lu', or leave it out"
        )
    return SlogdetResult(*_slogdet(a, *lu(ew.stop_gradient(a))))


# -- by elimination --------------------------------------------------------------------------------


def _parity(pivots: Any, dtype: Any) -> Any:
    """The sign of the row permutation of pivots: 1 or -1."""
    last = pivots.aval.ndim - 1
    moved = ew.convert(ew.ne(pivots, iota(dtypes.int32, pivots.aval.shape, last)), dtypes.int32)
    count = reduce_sum(moved, (last,))
    return ew.convert(ew.sub(1, ew.mul(ew.bitwise_and(count, 1), 2)), dtype)


def _product(x: Any) -> Any:
    return reduce_prod(x, (x.aval.ndim - 1,))


@custom_jvp
def _det(a):
    packed, pivots, _ = lu(a)
    return ew.mul(_parity(pivots, a.dtype), _product(diagonal(packed)))


@_det.defjvp
def _det_jvp(primals, tangents):
    (a,), (t,) = primals, tangents
    return _det(a), _inner(_adjugate(a), t)


def _inner(x: Any, y: Any) -> Any:
    """``trace(x @ y)``."""
    n = x.aval.ndim
    return reduce_sum(ew.mul(mT(x), y), (n - 2, n - 1))


@custom_jvp
def _adjugate(a):
    """The matrices with ``a @ adjugate(a) = det(a) I``, whatever the rank of ``a``."""
    q, r, order = qr(a, pivoting=True)
    n, last = a.aval.shape[-1], a.aval.ndim - 1
    # a = Q R P, and the adjugate of a product is the product of the adjugates in reverse
    columns = broadcast_in_dim(order, a.aval.shape, (*range(last - 1), last))
    packed, pivots, _ = lu(place_along(q, columns, last))
    sign = ew.mul(_parity(pivots, a.dtype), _product(diagonal(packed)))  # det(Q P)
    d = diagonal(r)
    first = _product(slice_in_dim(d, 0, n - 1, axis=last - 1))
    smallest = index_in_dim(d, n - 1, last - 1, keepdims=False)
    # with r[n-1, n-1] taken as 1, R x = y has as its solution the adjugate of R times y if y is scaled like this:
    lead = tuple(range(last - 1))
    scale = lambda s, rows: broadcast_in_dim(ew.mul(s, sign), (*a.aval.shape[:-2], rows, n), lead)
    scales = concatenate([scale(ew.mul(smallest, first), n - 1), scale(first, 1)], last - 1)
    # a rank below n - 1 makes all of that 0, and only then is another diagonal element 0
    place = iota(dtypes.int32, d.aval.shape, last - 1)
    one = ew.bitwise_or(ew.eq(d, 0), ew.eq(place, n - 1))
    safe = ew.select(one, ew.ones_of(d), d)
    x = triangular_solve(with_diagonal(r, safe), ew.mul(adjoint(q), scales), left_side=True)
    return place_along(x, broadcast_in_dim(order, a.aval.shape, (*range(last - 1), last - 1)), last - 1)


@_adjugate.defjvp
def _adjugate_jvp(primals, tangents):
    (a,), (t,) = primals, tangents
    out = _adjugate(a)
    n = a.aval.ndim
    lead = tuple(range(n - 2))
    spread = lambda s: broadcast_in_dim(s, out.aval.shape, lead)
    moved = ew.sub(ew.mul(spread(_inner(out, t)), out), matmul(out, matmul(t, out)))
    return out, ew.div(moved, spread(_det(a)))


@custom_jvp
def _slogdet(a, packed, pivots, permutation):
    """From ``a`` and its LU decomposition; only ``a`` is differentiated."""
    d = diagonal(packed)
    size = ew.abs(d)
    if dtypes.is_complex(a.dtype):
        safe = ew.select(ew.eq(size, 0), ew.ones_of(size), size)
        signs = ew.div(d, ew.convert(safe, a.dtype))
    else:
        signs = ew.sign(d)
    sign = ew.mul(_parity(pivots, a.dtype), _product(signs))
    return sign, reduce_sum(ew.log(size), (d.aval.ndim - 1,))


@_slogdet.defjvp
def _slogdet_jvp(primals, tangents):
    a, packed, pivots, permutation = primals
    sign, logabs = _slogdet(a, packed, pivots, permutation)
    x = diagonal(lu_solve_p.bind(a, packed, permutation, tangents[0], transposed=False))
    moved = reduce_sum(x, (x.aval.ndim - 1,))
    along = ew.real(moved)
    if not dtypes.is_complex(a.dtype):
        return (sign, logabs), (ew.zeros_like(sign), along)
    turned = ew.sub(moved, ew.convert(along, a.dtype))
    return (sign, logabs), (ew.mul(turned, sign), ew.convert(along, real_dtype(a.dtype)))
