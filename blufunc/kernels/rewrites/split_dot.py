"""A product of float32 in two parts of float16 as one equation, where a device has a kernel for it.

Kernels, stages 5 and 6. ``split_float32`` makes the equation instead of one for each product of parts, of shapes that
``sums_of`` has a kernel for; ``backends/cuda/library/split_gemm`` has the text.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.backends.cuda.device_model import SM_BANDWIDTH, SM_COUNT
from blufunc.kernels.backends.cuda.library.split_gemm import ROWS, STEP, SplitGemm, source
from blufunc.kernels.precision import ALGORITHMS, ProductShape
from blufunc.kernels.user_kernel import CudaSource

ALGORITHM = ALGORITHMS["F16_F16_F32_X3"]
"""What the parts are of."""

_LEAST = 64
"""Rows of an operand, and terms: less than a half of a tile is not worth a kernel of its own."""

_VECTOR = 8
"""Elements are copied by so many at once."""

_STEP_TIME, _TILE_TIME = 1.4e-6, 4e-6
"""Seconds of a tile of 192 columns: for one step of terms, and for the rest."""

_MOST_SUMS = 16


class _SplitDot(Primitive):
    """``dot_general`` of two float32 operands that are given in parts, each rest times 2^11, and with their scales.

    Operands: the first part and the rest of the lhs, those of the rhs, and ``2^-j`` of the rows of both: what they
    were multiplied by is ``4^j``. The contracted axes of an operand are its first or its last ones, in the same order.
    The result is float32; if there are several ``sums`` it has an axis for them, before the others: each is a sum of
    some of the terms.
    """

    name, kind, fresh = "dot_general+parts", "contract", True

    def impl(self, lhs, lhs_rest, rhs, rhs_rest, lhs_roots, rhs_roots, *, dimension_numbers, sums):
        contracts, _ = dimension_numbers
        x, x_rest = (_matrix(part, contracts[0]) for part in (lhs, lhs_rest))
        y, y_rest = (_matrix(part, contracts[1]) for part in (rhs, rhs_rest))
        roots = lhs_roots.reshape(-1, 1) * rhs_roots.reshape(-1)
        steps = -(-x.shape[1] // STEP)
        totals = []
        with np.errstate(all="ignore"):
            for n in range(sums):
                terms = slice(steps * n // sums * STEP, steps * (n + 1) // sums * STEP)
                rest = x_rest[:, terms] @ y[:, terms].T + x[:, terms] @ y_rest[:, terms].T
                rest = np.where(np.isnan(rest), np.float32(0), rest)
                total = x[:, terms] @ y[:, terms].T + rest * np.float32(2.0**-ALGORITHM.raised)
                totals.append(total * roots * roots)
        return np.stack(totals).reshape(_shape(lhs, rhs, contracts, sums))

    def abstract(self, lhs, lhs_rest, rhs, rhs_rest, lhs_roots, rhs_roots, *, dimension_numbers, sums):
        return ShapedArray(_shape(lhs, rhs, dimension_numbers[0], sums), dtypes.float32)

    def flops(self, lhs, _rest, rhs, *_, dimension_numbers, **__) -> int:
        """Multiplications and additions of the three products."""
        terms = math.prod(lhs.shape[d] for d in dimension_numbers[0][0])
        return 6 * terms * (lhs.size // terms) * (rhs.size // terms)

    def cuda_source(self, lhs, lhs_rest, rhs, *_, dimension_numbers, sums) -> CudaSource:
        """The kernel, for Hopper."""
        contracts, _ = dimension_numbers
        k = math.prod(lhs.shape[d] for d in contracts[0])
        m, n = lhs.size // k, rhs.size // k
        by_rows = (0 not in contracts[0], 0 not in contracts[1])
        made = SplitGemm(m, n, k, by_rows, columns_of(n), sums)
        grid, block = (made.blocks, 1, 1), (made.threads, 1, 1)
        return CudaSource(source(made), "split_product", grid, block, made.shared_bytes, resident=True)


split_dot_p = _SplitDot()


def _matrix(part: Any, contract: tuple[int, ...]) -> np.ndarray:
    """A part as float32, its rows along what is contracted."""
    free = [d for d in range(part.ndim) if d not in contract]
    terms = math.prod(part.shape[d] for d in contract)
    return np.transpose(part, (*free, *contract)).reshape(-1, terms).astype(np.float32)


def _shape(lhs: Any, rhs: Any, contracts: Any, sums: int) -> tuple[int, ...]:
    free = [
        n for x, own in zip((lhs, rhs), contracts, strict=True) for d, n in enumerate(x.shape) if d not in own
    ]
    return (*(sums,) * (sums > 1), *free)


def is_matrix(contract: tuple[int, ...], rank: int) -> bool:
    """Whether contracted axes are the first or the last ones of an operand in their order, and not all."""
    first = contract[0] if contract else 0
    return (
        0 < len(contract) < rank
        and first in (0, rank - len(contract))
        and contract == tuple(range(first, first + len(contract)))
    )


def sums_of(shape: ProductShape) -> int:
    """Into how many sums of terms Hopper's kernel for two parts divides a product; 0 if it has none for the shape.

    So many that tiles fill all multiprocessors; each sum is written, and read again.
    """
    beside = [shape.k if rows else n for rows, n in zip(shape.by_rows, (shape.m, shape.n), strict=True)]
    if shape.batch != 1 or any(n % _VECTOR for n in (*beside, shape.n)):
        return 0
    if min(shape.m, shape.n, shape.k) < _LEAST:
        return 0
    columns = columns_of(shape.n)
    tiles = -(-shape.m // ROWS) * -(-shape.n // columns)
    steps = -(-shape.k // STEP)

    def seconds(sums: int) -> float:
        rounds = -(-tiles * sums // SM_COUNT)
        added = 4 * shape.m * shape.n * sums / (SM_BANDWIDTH * SM_COUNT) if sums > 1 else 0
        return rounds * (-(-steps // sums) * _STEP_TIME * columns / 192 + _TILE_TIME) + added

    return min(range(1, min(_MOST_SUMS, steps) + 1), key=seconds)


def columns_of(n: int) -> int:
    """Columns of a tile: as many as registers hold sums of, and fewer where few are wanted."""
    return next((c for c in (64, 128) if n <= c), 192)
