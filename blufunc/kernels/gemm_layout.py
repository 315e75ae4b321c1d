"""GEMM layout of a contraction: sizes, transposes, leading dimensions, batch.

Kernels, stage 5 for ``dot_general``, used by ``cublaslt``. In: shapes and strides of operands in memory. Out: a
``Layout``, or which operand must be copied first; with dtypes and an epilogue it is a ``Gemm``. No device or library is
needed. The library is column-major: a row-major matrix is its transpose, so that ``D = A B`` is requested as ``D^T =
B^T A^T``, with the operands swapped (``column_major``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir import dtypes

Ints = tuple[int, ...]

# -- from a contraction to one GEMM ----------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A batch of row-major GEMMs ``D (m, n) = op(A) op(B)``; strides in elements.

    Attributes:
      trans_a, trans_b: whether A is stored as (k, m), B as (n, k).
      lda, ldb, ldd: from one stored row to the next.
      stride_a, stride_b, stride_d: from one matrix of the batch to the next.
    """

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    lda: int
    ldb: int
    ldd: int
    batch: int = 1
    stride_a: int = 0
    stride_b: int = 0
    stride_d: int = 0

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    def terms(self, start: int, size: int) -> tuple[Layout, int, int]:
        """The GEMM of a range of k, and the offsets of its A and B, in elements."""
        return (
            replace(self, k=size),
            start * (self.lda if self.trans_a else 1),
            start * (1 if self.trans_b else self.ldb),
        )


UNIT = 64
"""Ranges of k start at multiples of it: their addresses are aligned."""


def chunks_of(terms: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of the fewest, about equal, chunks of at most ``most`` terms."""
    count = -(-terms // most)
    size = min(most, -(-terms // count // UNIT) * UNIT)
    return [(start, min(size, terms - start)) for start in range(0, terms, size)]


class Copies(NamedTuple):
    """The axis order of the dense copy of each operand; None: use it in place."""

    lhs: Ints | None
    rhs: Ints | None


class _Axis(NamedTuple):
    size: int
    stride: int


def plan_dot_general(
    lhs_shape: Ints, lhs_strides: Ints, rhs_shape: Ints, rhs_strides: Ints, dimension_numbers: Any
) -> Layout | Copies:
    """``dot_general`` of strided operands as one GEMM, or the copies that make it one.

    Args:
      lhs_shape, rhs_shape: of the operands.
      lhs_strides, rhs_strides: in elements, at least 0.
      dimension_numbers: of the primitive.

    Returns:
      the ``Layout`` of the GEMM, whose result is dense in the order of the primitive's result; or ``Copies``, after
      which planning with the copied operands (axes in their new order) succeeds. Sizes may be 0: then there is nothing
      to run.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    x = [_Axis(*axis) for axis in zip(lhs_shape, lhs_strides, strict=True)]
    y = [_Axis(*axis) for axis in zip(rhs_shape, rhs_strides, strict=True)]
    x_free = tuple(d for d in range(len(x)) if d not in (*lc, *lb))
    y_free = tuple(d for d in range(len(y)) if d not in (*rc, *rb))
    # contracted axes may be in any order that is the same for both operands
    orders = [tuple(range(len(lc))), _falling(x, lc), _falling(y, rc)]
    plans = []
    for order in dict.fromkeys(orders):
        xc, yc = tuple(lc[i] for i in order), tuple(rc[i] for i in order)
        a, b = _matrix(x, lb, x_free, xc), _matrix(y, rb, yc, y_free)
        if a is not None and b is not None:
            return _layout(a, b)
        plans.append(
            Copies((*lb, *x_free, *xc) if a is None else None, (*rb, *yc, *y_free) if b is None else None)
        )
    elements = math.prod(lhs_shape), math.prod(rhs_shape)
    return min(
        plans, key=lambda plan: sum(n for n, order in zip(elements, plan, strict=True) if order is not None)
    )


def _falling(axes: Sequence[_Axis], chosen: Ints) -> Ints:
    return tuple(sorted(range(len(chosen)), key=lambda i: -axes[chosen[i]].stride))


class _Matrix(NamedTuple):
    batch: _Axis
    rows: int
    columns: int
    transposed: bool
    ld: int


def _matrix(axes: Sequence[_Axis], batch: Ints, rows: Ints, columns: Ints) -> _Matrix | None:
    """Groups of axes as a batch of matrices; None if neither direction is contiguous."""
    b, r, c = (_merged([axes[d] for d in group]) for group in (batch, rows, columns))
    if b is None or r is None or c is None:
        return None
    if (c.stride == 1 or c.size <= 1) and (r.stride >= c.size or r.size <= 1):
        return _Matrix(b, r.size, c.size, False, max(r.stride if r.size > 1 else 0, c.size, 1))
    if (r.stride == 1 or r.size <= 1) and (c.stride >= r.size or c.size <= 1):
        return _Matrix(b, r.size, c.size, True, max(c.stride if c.size > 1 else 0, r.size, 1))
    return None


def _merged(axes: Sequence[_Axis]) -> _Axis | None:
    """Adjacent axes merged into one; None if their strides do not allow it."""
    size = math.prod(axis.size for axis in axes)
    kept = [axis for axis in axes if axis.size != 1]
    if not kept or not size:
        return _Axis(size, 1 if not kept else kept[-1].stride)
    for outer, inner in itertools.pairwise(kept):
        if outer.stride != inner.stride * inner.size:
            return None
    return _Axis(size, kept[-1].stride)


def _layout(a: _Matrix, b: _Matrix) -> Layout:
    m, k, n = a.rows, a.columns, b.columns
    batch = a.batch.size
    several = batch > 1
    return Layout(
        m, n, k, a.transposed, b.transposed, a.ld, b.ld, max(n, 1), batch,
        a.batch.stride if several else 0, b.batch.stride if several else 0, m * n if several else 0,
    )  # fmt: skip


# -- one GEMM with its dtypes ----------------------------------------------------------------------

_HALF = (dtypes.float16, dtypes.bfloat16)
_FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)

# By the operands' dtype: the dtypes of results, and the compute types.
_TYPES: dict[np.dtype, tuple[tuple[np.dtype, ...], tuple[str, ...]]] = {
    dtypes.float32: ((dtypes.float32,), ("f32", "tf32")),
    dtypes.float64: ((dtypes.float64,), ("f64",)),
    dtypes.complex64: ((dtypes.complex64,), ("f32", "tf32")),
    dtypes.complex128: ((dtypes.complex128,), ("f64",)),
    dtypes.float16: ((dtypes.float16, dtypes.float32), ("f32",)),
    dtypes.bfloat16: ((dtypes.bfloat16, dtypes.float32), ("f32",)),
    dtypes.int8: ((dtypes.int32,), ("i32",)),
    **dict.fromkeys(_FP8, ((*_HALF, dtypes.float32), ("f32",))),
}

_WITH_BIAS = (dtypes.float32, *_HALF)


def result_dtypes(operands: np.dtype) -> tuple[np.dtype, ...]:
    """The result dtypes of GEMMs with operands of a dtype."""
    return _TYPES.get(operands, ((), ()))[0]


def has_bias_epilogue(lhs: np.dtype, rhs: np.dtype, out: np.dtype) -> bool:
    """True if a GEMM of these dtypes can add a bias of the result's."""
    return lhs == rhs and lhs in _WITH_BIAS and out in result_dtypes(lhs)


@dataclass(frozen=True)
class Gemm:
    """``D = alpha op(A) op(B) + beta C``, plus a bias; C may alias D, in its layout.

    Attributes:
      layout: sizes and strides.
      a, b, d: the dtypes of A, of B, and of C and D. The operands' differ only between the two float8 formats.
      compute: accumulator type: 'f32', 'tf32' (float32 operands rounded to 11 bits), 'f64' or 'i32'; default 'f32'.
      bias: whether a vector (n) of the dtype of D is added to each row; default False.
      reads_c: whether beta is nonzero; default False.
      alignment: of all addresses, in bytes; default 256.
      sms: number of SMs that it may use; default 0: all.
      scaling: of float8 operands, by float32 scales in device memory: "tensor", one each; "row", one for each row of A
        and column of B; "block", one for 128 elements along k; default "": none.
      fast: whether sums of float8 products may have fewer than 24 bits; default False.
    """

    layout: Layout
    a: np.dtype
    b: np.dtype
    d: np.dtype
    compute: str = "f32"
    bias: bool = False
    reads_c: bool = False
    alignment: int = 256
    sms: int = field(default=0, repr=False)  # the repr is the key of choices on disk
    scaling: str = ""
    fast: bool = False

    def refused(self) -> str | None:
        """The reason that the library does not support it, or None."""
        outs, computes = _TYPES.get(self.a, ((), ()))
        if self.a != self.b and not (self.a in _FP8 and self.b in _FP8):
            return f"operands are {self.a} and {self.b}"
        if self.d not in outs:
            return f"{self.a} operands do not give {self.d}"
        if self.compute not in computes:
            return f"{self.a} is not computed in {self.compute}"
        layout = self.layout
        if not (layout.m and layout.n and layout.k and layout.batch):
            return "there is nothing to multiply"
        if self.a in (*_FP8, dtypes.int8):
            # operands must have k innermost, and rows aligned to 16 bytes (4 for int8)
            unit = 4 if self.a == dtypes.int8 else 16
            if layout.trans_a or not layout.trans_b:
                return f"{self.a} operands must both have k innermost"
            if layout.lda % unit or layout.ldb % unit or layout.n % unit or layout.k % unit:
                return f"{self.a} operands need sizes that are multiples of {unit}"
        if self.a == self.b == dtypes.float8_e5m2:
            return "at least one operand must be float8_e4m3fn"
        if (self.scaling or self.fast) and self.a not in _FP8:
            return f"{self.a} operands have no scales"
        if self.scaling and layout.batch > 1:
            return "scales are those of one GEMM, not of a batch"
        if self.scaling == "block" and layout.m % 4:
            return "scales of blocks need rows that are a multiple of 4"
        return None


class Side(NamedTuple):
    """A matrix as the library sees it: column-major, with leading dimension ``ld``."""

    rows: int
    columns: int
    ld: int
    stride: int
    dtype: np.dtype


class Call(NamedTuple):
    """The library's GEMM ``d = op(a) op(b)``: ``a`` is B of ``Gemm``, ``b`` its A."""

    a: Side
    b: Side
    d: Side
    trans_a: bool
    trans_b: bool
    batch: int


def column_major(gemm: Gemm) -> Call:
    """The library call for ``gemm``: the transposed GEMM, column-major."""
    g = gemm.layout
    rows_a, columns_a = (g.k, g.n) if g.trans_b else (g.n, g.k)
    rows_b, columns_b = (g.m, g.k) if g.trans_a else (g.k, g.m)
    return Call(
        Side(rows_a, columns_a, g.ldb, g.stride_b, gemm.b),
        Side(rows_b, columns_b, g.lda, g.stride_a, gemm.a),
        Side(g.n, g.m, g.ldd, g.stride_d, gemm.d),
        g.trans_b,
        g.trans_a,
        g.batch,
    )
