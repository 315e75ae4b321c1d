"""Polynomials as vectors of coefficients, highest power first.

Face over convolutions and linear algebra. In come vectors, or matrices of them for ``polyval``; sizes are static, so
leading zeros stay unless they are asked to go.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_number
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives.linear_ops import reduce_sum, reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy import linalg
from blufunc.numpy.creation import asarray, vander, zeros
from blufunc.numpy.editing import trim_zeros
from blufunc.numpy.indexing import getitem
from blufunc.numpy.joining import concatenate
from blufunc.numpy.linear import diag, outer
from blufunc.numpy.promotion import (
    as_value,
    cast,
    constant,
    inexact,
    promote_dtypes,
    static_int,
    stretch,
    value_of,
)
from blufunc.numpy.signals import convolve

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


class PolyfitResult(NamedTuple):
    """The result of ``polyfit(full=True)``."""

    coefficients: Array
    residuals: Array
    rank: Array
    singular_values: Array
    rcond: Array


def _coefficients(name: str, *ps: Any) -> list[Array]:
    """Vectors of one dtype; a number is a polynomial of degree 0."""
    values = promote_dtypes(name, *[asarray(p) if isinstance(p, (list, tuple)) else p for p in ps])
    for v in values:
        if v.aval.ndim > 1:
            raise errors.ShapeError(
                f"{name} takes vectors of coefficients, not {v.aval}.",
                where=source.here(),
                fix="vmap over axes",
            )
    return [reshape(v, (v.aval.size,)) for v in values]


def polyval(p: ArrayLike, x: ArrayLike, *, unroll: int = 16) -> Array:
    """The polynomial with coefficients ``p`` at x, elementwise, by Horner's rule.

    ``p`` may have further axes, which broadcast with x. ``unroll`` has no effect: the steps are one program always.
    """
    static_int(unroll, "polyval", "unroll")
    p, x = promote_dtypes("polyval", asarray(p) if isinstance(p, (list, tuple)) else p, x)
    if not p.aval.ndim:
        raise errors.ShapeError(
            f"polyval: the coefficients are {p.aval}.", where=source.here(), fix="pass a vector: p[None]"
        )
    x = cast(x, dtypes.int32) if dtypes.is_bool(x.aval.dtype) else x
    p = cast(p, x.aval.dtype)
    rows = [shape_ops.index_in_dim(p, i, 0, keepdims=False) for i in range(p.aval.shape[0])]
    result = ops.zeros_like(x)
    for row in rows:
        result = ew.add(ew.multiply(result, x), row)
    return result


def _aligned(x: Array, n: int) -> Array:
    return shape_ops.pad(x, constant(0, x.aval.dtype), [(n - x.aval.size, 0, 0)])


def polyadd(a1: ArrayLike, a2: ArrayLike) -> Array:
    """The sum of two polynomials."""
    a, b = _coefficients("polyadd", a1, a2)
    n = max(a.aval.size, b.aval.size)
    return ew.add(_aligned(a, n), _aligned(b, n))


def polysub(a1: ArrayLike, a2: ArrayLike) -> Array:
    """The difference of two polynomials."""
    a, b = _coefficients("polysub", a1, a2)
    n = max(a.aval.size, b.aval.size)
    return ew.subtract(_aligned(a, n), _aligned(b, n))


def polymul(a1: ArrayLike, a2: ArrayLike, *, trim_leading_zeros: bool = False) -> Array:
    """The product of two polynomials; ``trim_leading_zeros`` is not traceable."""
    a, b = _coefficients("polymul", a1, a2)
    if trim_leading_zeros:
        a, b = trim_zeros(a, "f"), trim_zeros(b, "f")
    parts = [v if v.aval.size else zeros((1,), v.aval.dtype) for v in (a, b)]
    return convolve(parts[0], parts[1])


def polydiv(u: ArrayLike, v: ArrayLike, *, trim_leading_zeros: bool = False) -> tuple[Array, Array]:
    """The quotient and the remainder of two polynomials, as floats.

    The remainder has as many coefficients as ``u``; with ``trim_leading_zeros``, outside of traces, none of them that
    lead and are 0.
    """
    u, v = _coefficients("polydiv", *promote_dtypes("polydiv", *_coefficients("polydiv", u, v), inexact=True))
    n, m = u.aval.size, v.aval.size
    if not n or not m:
        raise errors.ShapeError("polydiv of no coefficients.", where=source.here(), fix="pass [0.0] for 0")
    if n < m:
        return zeros((1,), u.aval.dtype), u
    scale = ops.div(constant(1, u.aval.dtype), getitem(v, 0))
    rest, quotient = u, []
    for k in range(n - m + 1):
        q = ops.mul(getitem(rest, k), scale)
        quotient.append(reshape(q, (1,)))
        line = shape_ops.pad(ops.mul(v, q), constant(0, u.aval.dtype), [(k, n - m - k, 0)])
        rest = ops.sub(rest, line)
    # divided-out coefficients are 0 by construction, up to rounding
    keep = shape_ops.pad(
        shape_ops.slice_in_dim(rest, n - m + 1, n), constant(0, u.aval.dtype), [(n - m + 1, 0, 0)]
    )
    if trim_leading_zeros:
        keep = trim_zeros(keep, "f")
        keep = keep if keep.aval.size else zeros((1,), u.aval.dtype)
    return concatenate(quotient, 0), keep


def polyder(p: ArrayLike, m: int = 1) -> Array:
    """The ``m``-th derivative of a polynomial."""
    (p,) = _coefficients("polyder", p)
    times = static_int(m, "polyder", "m")
    if times < 0:
        raise errors.ValueRangeError(f"polyder: m is {m}.", where=source.here(), fix="use polyint")
    if dtypes.is_bool(p.aval.dtype):
        p = cast(p, dtypes.int32)
    n = p.aval.size
    factors = [math.perm(n - 1 - i, times) for i in range(max(n - times, 0))]
    kept = shape_ops.slice_in_dim(p, 0, max(n - times, 0))
    return ew.multiply(kept, asarray(np.asarray(factors, np.float64), p.aval.dtype)) if factors else kept


def polyint(p: ArrayLike, m: int = 1, k: ArrayLike | None = None) -> Array:
    """The ``m``-th integral of a polynomial, as floats; ``k`` has the constants."""
    p = _coefficients("polyint", p)[0]
    p = inexact(p, "polyint")
    times = static_int(m, "polyint", "m")
    if times < 0:
        raise errors.ValueRangeError(f"polyint: m is {m}.", where=source.here(), fix="use polyder")
    k = asarray(0 if k is None else k)
    constants = _coefficients("polyint", cast(value_of(k, "polyint"), p.aval.dtype))[0]
    if constants.aval.size == 1:
        constants = stretch(constants, (times,))
    if constants.aval.shape != (times,):
        raise errors.ShapeError(
            f"polyint: {constants.aval.size} constants for {times} integrals.",
            where=source.here(),
            fix="one for each, or one for all",
        )
    line = concatenate([p, constants], 0) if times else p
    n = line.aval.size
    if not times:
        return line
    # coefficient i is integrated down to the power n - 1 - i, a constant from the step at which it comes in
    over = [math.perm(n - 1 - i, times if i < p.aval.size else n - 1 - i) for i in range(n)]
    return ew.divide(line, asarray(np.asarray(over, np.float64), p.aval.dtype))


def poly(seq_of_zeros: Any) -> Array:
    """The coefficients of the polynomial with given zeros and leading coefficient 1.

    For a square matrix, of its characteristic polynomial.
    """
    x = asarray(seq_of_zeros)
    x = inexact(x, "poly")
    if x.aval.ndim == 2 and x.aval.shape[0] == x.aval.shape[1]:
        x = linalg.eigvals(x)
    elif x.aval.ndim > 1:
        raise errors.ShapeError(f"poly of {x.aval}.", where=source.here(), fix="a vector, or a square matrix")
    x = reshape(x, (x.aval.size,))
    result = stretch(constant(1, x.aval.dtype), (1,))
    for i in range(x.aval.size):
        factor = concatenate([stretch(constant(1, x.aval.dtype), (1,)), ops.neg(x[i : i + 1])], 0)
        result = convolve(result, factor)
    return result


def roots(p: ArrayLike, *, strip_zeros: bool = True) -> Array:
    """The roots of a polynomial as complex eigenvalues of its companion matrix.

    With ``strip_zeros``, outside of traces, leading zeros are taken off; trailing ones are roots at 0. Without, the
    first coefficient must not be 0.
    """
    (p,) = _coefficients("roots", p)
    p = inexact(p, "roots")
    zero_roots = 0
    if strip_zeros:
        if not isinstance(p, ConcreteArray):
            raise errors.ConcretizationError(
                f"roots of a traced polynomial ({p.aval}): how many zeros lead it is not known.",
                where=source.here(),
                fix="strip_zeros=False",
            )
        p = trim_zeros(p, "f")
        trimmed = trim_zeros(p, "b")
        zero_roots, p = p.aval.size - trimmed.aval.size, trimmed
    kind = (
        dtypes.complex128
        if p.aval.dtype.itemsize * (1 + (p.aval.dtype.kind != "c")) > 8
        else dtypes.complex64
    )
    n = p.aval.size
    if n < 2:
        return zeros((zero_roots,), kind)
    first = ops.neg(ew.divide(p[1:], p[0]))
    below = diag(stretch(constant(1, p.aval.dtype), (n - 2,)), -1)
    companion = concatenate([reshape(first, (1, n - 1)), below[1:]], 0)
    found = cast(linalg.eigvals(companion), kind)
    return concatenate([found, zeros((zero_roots,), kind)], 0) if zero_roots else found


@overload
def polyfit(
    x: ArrayLike,
    y: ArrayLike,
    deg: int,
    rcond: float | None = None,
    full: Literal[False] = False,
    w: ArrayLike | None = None,
    cov: bool | str = False,
) -> Array: ...
@overload
def polyfit(
    x: ArrayLike,
    y: ArrayLike,
    deg: int,
    rcond: float | None = None,
    *,
    full: Literal[True],
    w: ArrayLike | None = None,
    cov: bool | str = False,
) -> tuple[Any, ...]: ...
@overload
def polyfit(
    x: ArrayLike,
    y: ArrayLike,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: ArrayLike | None = None,
    cov: bool | str = False,
) -> Array | tuple[Any, ...]: ...


def polyfit(
    x: ArrayLike,
    y: ArrayLike,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: ArrayLike | None = None,
    cov: bool | str = False,
) -> Any:
    """The polynomial of degree ``deg`` that fits points in the least squares.

    Args:
      x: the places ``(n,)``.
      y: the values ``(n,)``, or ``(n, k)`` for k polynomials.
      deg: the degree.
      rcond: singular values below this fraction of the largest count as 0; by default n times the precision.
      full: whether to return, instead, coefficients, sum of squares, rank, singular values and ``rcond``.
      w: weights of the residuals ``(n,)``, before they are squared.
      cov: whether to return also the covariance of the coefficients, scaled by the residuals; ``'unscaled'``.
    Returns:
      the coefficients ``(deg + 1,)`` or ``(deg + 1, k)``, or a tuple.
    """
    degree = static_int(deg, "polyfit", "deg")
    x, y = promote_dtypes("polyfit", as_value(x, "polyfit"), as_value(y, "polyfit"), inexact=True)
    n = x.aval.size
    if x.aval.ndim != 1 or y.aval.ndim not in (1, 2) or y.aval.shape[0] != n or not n or degree < 0:
        raise errors.ShapeError(
            f"polyfit of degree {degree} to places {x.aval} and values {y.aval}.",
            where=source.here(),
            fix="vectors of one size, not 0; y may have a second axis; deg is 0 or more",
        )
    if rcond is None:
        rcond = n * float(dtypes.finfo(x.aval.dtype).eps)
    rcond = static_number(rcond, "polyfit", "rcond")
    left, right = vander(x, degree + 1), y
    if w is not None:
        weight = cast(as_value(w, "polyfit"), x.aval.dtype)
        if weight.aval.shape != (n,):
            raise errors.ShapeError(
                f"polyfit: weights {weight.aval}.", where=source.here(), fix="one for each place"
            )
        left = ew.multiply(left, reshape(weight, (n, 1)))
        right = ew.multiply(right, weight if y.aval.ndim == 1 else reshape(weight, (n, 1)))
    scale = ops.sqrt(reduce_sum(ops.real(ops.mul(left, ops.conj(left))), (0,)))
    scale = cast(ops.select(ops.eq(scale, 0), ops.add(scale, 1), scale), left.aval.dtype)
    scaled = ew.divide(left, reshape(scale, (1, degree + 1)))
    solved, residuals, rank, values = linalg.lstsq(scaled, right, rcond)
    by = scale if y.aval.ndim == 1 else reshape(scale, (degree + 1, 1))
    c = ew.divide(solved, by)
    if full:
        return PolyfitResult(c, residuals, rank, values, asarray(rcond))
    if not cov:
        return c
    base = ew.divide(linalg.inv(scaled.mT @ scaled), outer(scale, scale))
    if cov == "unscaled":
        factor: Array = constant(1, base.aval.dtype)
    else:
        if n <= degree + 1:
            raise errors.ValueRangeError(
                f"polyfit: {n} points leave no residuals to scale the covariance by.",
                where=source.here(),
                fix="cov='unscaled', or more points",
            )
        factor = ew.divide(residuals, n - degree - 1)
    if y.aval.ndim == 1:
        return c, ew.multiply(base, reshape(factor, ()) if factor.aval.size == 1 else factor)
    return c, ew.multiply(reshape(base, (*base.aval.shape, 1)), factor)
