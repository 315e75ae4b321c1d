"""``dot_general``: the one contraction primitive, over any axes of two arrays.

Core operations. Matmuls, einsum and attention all become ``dot_general`` equations. The NumPy definition
turns each into one ``np.matmul`` of views, so that BLAS handles transposes as flags instead of copies. The
transpose rule orders operands so that this holds in backward passes too.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints
from blufunc.core.ops.elementwise import convert
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import add_tangents, transpose
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import EITHER, Factoring
from blufunc.core.primitives.tangents import Zero, is_linear

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

Axes = tuple[int, ...]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class Precision(enum.StrEnum):
    """Precision of float32 matmuls on devices with a choice."""

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"


class DotAlgorithmPreset(enum.StrEnum):
    """Tensor core algorithm of a float32 matmul: operand and sum dtypes, and passes.

    Names as in JAX, except for those that begin with ``F16``. With ``_X3`` an operand is split into 2 parts
    rounded to that dtype, and 3 partial products are summed; without, it is rounded. Operands of other
    dtypes, and devices without tensor cores, ignore it. ``docs/design/006-headline.md`` lists the errors.
    """

    F32_F32_F32 = "F32_F32_F32"
    TF32_TF32_F32 = "TF32_TF32_F32"
    F16_F16_F32_SCALED = "F16_F16_F32_SCALED"
    """Rows and columns are scaled by powers of two to similar largest elements.
    Elements are rounded to 11 bits as by ``TF32_TF32_F32`` if above 2^-27 of the largest in their sum."""
    F16_F16_F32_X3 = "F16_F16_F32_X3"
    """On rows and columns scaled as by ``F16_F16_F32_SCALED``."""


PRECISIONS = (None, "default", "high", "highest", "fastest", "tf32", "float32_tc", *DotAlgorithmPreset)


class Contraction(Primitive):
    """A kind: sums of products, linear in each of two operands."""

    kind, fresh, widens = "contract", True, True
    linear, autocast_class = EITHER, "low"

    def jvp(self, primals, tangents, **params):
        x, y = primals
        tx, ty = tangents
        out = self.bind(x, y, **params)
        left = tx if tx.__class__ is Zero else self.bind(tx, y, **params)
        right = ty if ty.__class__ is Zero else self.bind(x, ty, **params)
        return out, add_tangents(left, right)


class _DotGeneral(Contraction):
    """Contraction; result axes are the batch, lhs free and rhs free ones."""

    name = "dot_general"

    def flops(self, lhs, rhs, *_, dimension_numbers, **__) -> int:
        (contracted, _), (batch, _) = dimension_numbers
        shared = math.prod(lhs.shape[d] for d in (*contracted, *batch))
        return 2 * lhs.size * rhs.size // max(1, shared) * (4 if dtypes.is_complex(lhs.dtype) else 1)

    def shard(self, avals, outs, **params):
        b = Factoring()
        x, y = avals
        (xc, yc), (xb, yb) = params["dimension_numbers"]
        dx: list[Any] = [None] * x.ndim
        dy: list[Any] = [None] * y.ndim
        summed = not dtypes.is_bool(x.dtype)
        for i, j in zip(xb, yb, strict=True):
            dx[i] = dy[j] = b.new(x.shape[i])
        for i, j in zip(xc, yc, strict=True):
            dx[i] = dy[j] = b.new(x.shape[i], "sum") if summed else ()
        for dims, aval in ((dx, x), (dy, y)):
            for d, n in enumerate(aval.shape):
                if dims[d] is None:
                    dims[d] = b.new(n)
        free = [
            [f for d, f in enumerate(dims) if d not in used] for dims, used in ((dx, xc + xb), (dy, yc + yb))
        ]
        return b.rule([dx, dy], [[dx[i] for i in xb] + free[0] + free[1]])

    def impl(self, lhs, rhs, *, dimension_numbers, precision, preferred_element_type):
        out = preferred_element_type or lhs.dtype
        (lc, rc), (lb, rb) = dimension_numbers
        compute = compute_dtype(lhs.dtype, out)
        return rounded(_matmul(_as(lhs, compute), _as(rhs, compute), lc, rc, lb, rb), out)

    def impl_into(self, out, lhs, rhs, *, dimension_numbers, precision, preferred_element_type):
        """``impl`` with the result written to ``out``, a contiguous array."""
        (lc, rc), (lb, rb) = dimension_numbers
        compute = compute_dtype(lhs.dtype, out.dtype)
        if compute == out.dtype:
            _matmul(_as(lhs, compute), _as(rhs, compute), lc, rc, lb, rb, out)
        else:
            numbers = {"dimension_numbers": dimension_numbers, "precision": precision}
            out[...] = self.impl(lhs, rhs, **numbers, preferred_element_type=preferred_element_type)

    def abstract(self, lhs, rhs, *, dimension_numbers, precision, preferred_element_type):
        (lc, rc), (lb, rb) = dimension_numbers
        _check_axes("lhs", lhs, lc, lb)
        _check_axes("rhs", rhs, rc, rb)
        for what, la, ra in (("contracts", lc, rc), ("batches", lb, rb)):
            if len(la) != len(ra):
                raise errors.ShapeError(
                    f"dot_general {what} {len(la)} axes of the lhs {la} with {len(ra)} of the rhs {ra}.",
                    fix="dimension_numbers = ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))",
                )
            for i, j in zip(la, ra, strict=True):
                if lhs.shape[i] != rhs.shape[j]:
                    raise errors.ShapeError(
                        f"dot_general {what} axis {i} of {lhs} (size {lhs.shape[i]}) with axis {j} of {rhs} "
                        f"(size {rhs.shape[j]})."
                    )
        check_types("dot_general", "numeric", lhs, rhs)
        mixes = lhs.dtype.itemsize == rhs.dtype.itemsize == 1 and _floats(lhs.dtype, rhs.dtype)
        out = result_dtype("dot_general", lhs.dtype, rhs.dtype, preferred_element_type, mixes)
        check_precision("dot_general", precision, PRECISIONS)
        shape = (
            *(lhs.shape[d] for d in lb),
            *(lhs.shape[d] for d in _free(lhs.ndim, lc, lb)),
            *(rhs.shape[d] for d in _free(rhs.ndim, rc, rb)),
        )
        return ShapedArray(shape, out)

    def transpose(self, ct, x, y, *, dimension_numbers, precision, preferred_element_type):
        (xc, yc), (xb, yb) = dimension_numbers
        batch = tuple(range(len(xb)))
        x_free, y_free = _free(x.aval.ndim, xc, xb), _free(y.aval.ndim, yc, yb)
        ct_x = tuple(range(len(batch), len(batch) + len(x_free)))
        ct_y = tuple(range(ct.aval.ndim - len(y_free), ct.aval.ndim))
        if is_linear(x):
            x.add(_cotangent(ct, ct_y, batch, y, y_free, yb, yc, xc, xb, x_free, x.aval, precision, True))
        if is_linear(y):
            y.add(_cotangent(ct, ct_x, batch, x, x_free, xb, xc, yc, yb, y_free, y.aval, precision, False))

    def batch(self, axis, args, dims, *, dimension_numbers, **params):
        x, y = args
        dx, dy = dims
        (xc, yc), (xb, yb) = dimension_numbers
        if dx is not None:
            xc, xb = _shifted(xc, dx), _shifted(xb, dx)
        if dy is not None:
            yc, yb = _shifted(yc, dy), _shifted(yb, dy)
        if dx is not None and dy is not None:
            numbers = ((xc, yc), ((dx, *xb), (dy, *yb)))
            return self.bind(x, y, dimension_numbers=numbers, **params), 0
        # a batch axis of one operand becomes a free axis: the other operand is not repeated along it
        out = self.bind(x, y, dimension_numbers=((xc, yc), (xb, yb)), **params)
        x_free = _free(x.aval.ndim, xc, xb)
        if dx is not None:
            return out, len(xb) + x_free.index(dx)
        return out, len(xb) + len(x_free) + _free(y.aval.ndim, yc, yb).index(dy)


dot_general_p = _DotGeneral()


def _cotangent(ct, ct_contract, batch, other, free, other_batch, other_contract, contract, own_batch, own_free,
               aval, precision, ct_first):  # fmt: skip
    """The cotangent of one operand of ``dot_general``, in the operand's axis order.

    The contraction of ``ct`` with the other operand over the other's free axes has the operand's batch axes,
    then its free and contracted ones, in an order that follows the operands'. If one order matches the
    operand, no transposition is needed: gradients of weights are written directly.
    """
    # the remaining axes of the other operand keep their order
    contract = tuple(contract[i] for i in np.argsort(other_contract))
    for first in (ct_first, not ct_first):
        layout = (*own_batch, *own_free, *contract) if first else (*own_batch, *contract, *own_free)
        if layout == tuple(range(aval.ndim)):
            break
    else:
        first = ct_first
        layout = (*own_batch, *own_free, *contract) if first else (*own_batch, *contract, *own_free)
    other = convert(other, ct.dtype) if other.dtype != ct.dtype else other
    if first:
        numbers = ((ct_contract, free), (batch, other_batch))
        out = dot_general(ct, other, numbers, precision, aval.dtype)
    else:
        numbers = ((free, ct_contract), (other_batch, batch))
        out = dot_general(other, ct, numbers, precision, aval.dtype)
    return transpose(out, tuple(layout.index(d) for d in range(aval.ndim)))


def _check_axes(side: str, x: ShapedArray, contract: Axes, batch: Axes) -> None:
    both = (*contract, *batch)
    if len(set(both)) != len(both) or any(not 0 <= d < x.ndim for d in both):
        raise errors.ShapeError(
            f"dot_general: contracted axes {contract} and batch axes {batch} of the {side} {x} must be distinct "
            f"and between 0 and {x.ndim - 1}."
        )


def plain(precision: Any) -> Any:
    """A precision, or one for each operand, as stored in jaxprs: a string or None."""
    if hasattr(precision, "preset"):  # a DotAlgorithm
        return plain(precision.preset)
    if isinstance(precision, (tuple, list)):
        return tuple(map(plain, precision))
    return precision.value if isinstance(precision, (Precision, DotAlgorithmPreset)) else precision


def check_precision(name: str, precision: Any, known: Sequence[str | None]) -> None:
    """Raise ArgumentError unless ``precision``, or each of a pair, is known."""
    for p in precision if isinstance(precision, tuple) else (precision,):
        if p not in known:
            raise errors.ArgumentError(
                f"{name}: {p!r:.60} is not a precision.",
                fix=f"one of {', '.join(repr(str(p)) for p in known if p)}, or a pair",
            )


def result_dtype(
    name: str, lhs: np.dtype, rhs: np.dtype, preferred: np.dtype | None, mixes: bool = False
) -> np.dtype:
    """The dtype of a contraction; raises if the operands' are incompatible.

    Args:
      mixes: whether the operands may differ in dtype, given ``preferred``.
    """
    if lhs != rhs and not (mixes and preferred):
        raise errors.DtypeError(
            f"{name} takes operands of one dtype, not {dtypes.short_name(lhs)} and {dtypes.short_name(rhs)}.",
            why="only the two float8 formats may be mixed, by dot_general with preferred_element_type.",
            fix="use blufunc.numpy, which promotes, or convert one of them with .astype",
        )
    if preferred is None or preferred == lhs:
        return lhs
    same_kind = any(
        is_kind(lhs) and is_kind(preferred)
        for is_kind in (dtypes.is_integer, dtypes.is_floating, dtypes.is_complex)
    )
    if not same_kind and not (dtypes.is_integer(lhs) and dtypes.is_floating(preferred)):
        raise errors.DtypeError(
            f"{name} of {dtypes.short_name(lhs)} cannot give {dtypes.short_name(preferred)}.",
            fix="convert the operands first",
        )
    return preferred


def rounded(result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The sums as ``dtype``; integers wrap around."""
    if result.dtype == dtype:
        return result
    return (result.astype(np.int64) if dtypes.is_integer(dtype) else result).astype(dtype)


def _floats(*kinds: np.dtype) -> bool:
    return all(dtypes.is_floating(d) for d in kinds)


@functools.cache
def compute_dtype(lhs: np.dtype, out: np.dtype) -> np.dtype:
    """Dtype for multiplication and accumulation: float32 for the half precisions."""
    wide = max(lhs, out, key=lambda d: d.itemsize)
    if dtypes.is_floating(out):
        return wide if dtypes.is_floating(wide) and wide.itemsize >= 4 else dtypes.float32
    # NumPy has no BLAS for integers; dot products of bytes are exact in float64
    if wide.itemsize == 1 and dtypes.is_integer(wide):
        return dtypes.float64
    return wide


def _as(x: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(x) if x.dtype == dtype else np.asarray(x, dtype)


@functools.cache
def _free(ndim: int, contract: Axes, batch: Axes) -> Axes:
    """The axes that are neither contracted nor batch axes."""
    return tuple(d for d in range(ndim) if d not in contract and d not in batch)


def _shifted(axes: Axes, new: int) -> Axes:
    """``axes`` after an axis was inserted at ``new``."""
    return tuple(d + (d >= new) for d in axes)


def _matmul(
    x: np.ndarray, y: np.ndarray, xc: Axes, yc: Axes, xb: Axes, yb: Axes, out: np.ndarray | None = None
) -> np.ndarray:
    """``dot_general`` in the dtype of x and y, as one (batched) matmul, into ``out``."""
    if x.ndim == y.ndim == 2 and not xb and xc == (1,) and yc == (0,):
        return np.matmul(_for_blas(x), _for_blas(y), out=out)
    x_free, y_free = _free(x.ndim, xc, xb), _free(y.ndim, yc, yb)
    batch = tuple([x.shape[d] for d in xb])
    rows = tuple([x.shape[d] for d in x_free])
    columns = tuple([y.shape[d] for d in y_free])
    if len(xc) > 1:
        # contracted axes commute: the stride order of the larger operand makes its matrix a view
        strides = [x.strides[d] for d in xc] if x.size >= y.size else [y.strides[d] for d in yc]
        order = sorted(range(len(xc)), key=lambda i: -strides[i])
        xc, yc = tuple([xc[i] for i in order]), tuple([yc[i] for i in order])
    inner, m, n = math.prod([x.shape[d] for d in xc]), math.prod(rows), math.prod(columns)
    a = x.transpose(xb + x_free + xc).reshape(*batch, m, inner)
    b = y.transpose(yb + yc + y_free).reshape(*batch, inner, n)
    into = None if out is None else out.reshape(*batch, m, n)
    if not xc and batch:  # batches of outer products: one multiply instead of one BLAS call each
        return np.multiply(a, b, out=into).reshape(batch + rows + columns)
    return np.matmul(_for_blas(a), _for_blas(b), out=into).reshape(batch + rows + columns)


def _for_blas(a: np.ndarray) -> np.ndarray:
    """``a`` itself if BLAS can read it in place, in either order; else a copy."""
    m, n = a.shape[-2:]
    size = a.itemsize
    s, t = a.strides[-2:]
    by_rows = (t == size or n == 1) and (s >= n * size or m == 1) and s % size == 0
    by_columns = (s == size or m == 1) and (t >= m * size or n == 1) and t % size == 0
    return a if by_rows or by_columns else np.ascontiguousarray(a)


# -- functions -------------------------------------------------------------------------------------


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Sequence,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Contraction of ``lhs`` and ``rhs``, batched over the batch axes.

    Args:
      lhs, rhs: arrays of one dtype.
      dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
      precision: how exactly devices that have a choice must multiply float32; one, or one for each operand. None or
        'default': as ``config.matmul_precision`` says; 'high' or 'tf32': operands rounded to 11 bits, in TF32 or in
        float16 with a scale for each row and column, whichever is quicker; 'highest': in IEEE arithmetic; 'float32_tc':
        with the errors of that, on tensor cores where they are quicker; or a ``DotAlgorithmPreset``.
      preferred_element_type: the dtype of the result; the operands' by default. Half precisions are summed in
        float32 either way.
    Returns:
      an array of the batch axes, then the lhs' other axes, then the rhs' other axes.
    """
    try:
        (lc, rc), (lb, rb) = dimension_numbers
    except (TypeError, ValueError):
        raise errors.ArgumentError(
            f"dot_general: dimension_numbers are two pairs of axes, not {dimension_numbers!r:.60}.",
            where=source.here(),
            fix="give ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)): (((1,), (0,)), ((), ()))",
        ) from None
    numbers = ((_axes(lc), _axes(rc)), (_axes(lb), _axes(rb)))
    dtype = None if preferred_element_type is None else dtypes.as_dtype(preferred_element_type)
    precision = plain(precision)
    lhs, rhs = lift(lhs), lift(rhs)
    if dtype == lhs.dtype == rhs.dtype:
        dtype = None
    return dot_general_p.bind(
        lhs, rhs, dimension_numbers=numbers, precision=precision, preferred_element_type=dtype
    )


def dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    dimension_numbers: Any = None,
) -> Array:
    """Matmul of vectors and matrices: last axis of ``lhs`` with first of ``rhs``.

    With ``dimension_numbers`` it is ``dot_general``.
    """
    if dimension_numbers is not None:
        return dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    lhs, rhs = lift(lhs), lift(rhs)
    if not 1 <= lhs.ndim <= 2 or not 1 <= rhs.ndim <= 2:
        raise errors.ShapeError(
            f"dot takes operands of rank 1 or 2, not {lhs.aval} and {rhs.aval}.",
            fix="use dot_general or matmul",
        )
    numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    return dot_general(lhs, rhs, numbers, precision, preferred_element_type)


def _axes(axes: Sequence) -> Axes:
    return ints(axes, "dot_general", "dimension_numbers")
