"""``split_dot``: a float32 matmul of operands in two float16 parts.

Kernels, below the rewrites. ``rewrites/split_float32.py`` makes it in place of one matmul per pair of parts, for shapes
with a kernel for all (``backends/cuda/library/split_gemm.py``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.precision import ALGORITHMS

ALGORITHM = ALGORITHMS["F16_F16_F32_X3"]
"""The algorithm that makes the parts."""

STEP = 64
"""Terms that tensor cores accumulate before a float32 addition: two kernel stages."""


class _SplitDot(Primitive):
    """``dot_general`` of float32 operands in parts, each remainder times 2^11.

    Operands: the first part and the remainder of the lhs, then of the rhs, and ``2^-j`` of the rows of both, which were
    multiplied by ``4^j``. The contracted axes of an operand are its first or its last ones, in the same order. The
    result is float32. Several ``sums``, each of some of the terms, are along a new first axis.
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
        """Multiplications and additions of three matmuls."""
        terms = math.prod(lhs.shape[d] for d in dimension_numbers[0][0])
        return 6 * terms * (lhs.size // terms) * (rhs.size // terms)


split_dot_p = _SplitDot()


def _matrix(part: Any, contract: tuple[int, ...]) -> np.ndarray:
    """A part as a float32 matrix, with contracted axes as columns."""
    free = [d for d in range(part.ndim) if d not in contract]
    terms = math.prod(part.shape[d] for d in contract)
    return np.transpose(part, (*free, *contract)).reshape(-1, terms).astype(np.float32)


def _shape(lhs: Any, rhs: Any, contracts: Any, sums: int) -> tuple[int, ...]:
    free = [
        n for x, own in zip((lhs, rhs), contracts, strict=True) for d, n in enumerate(x.shape) if d not in own
    ]
    return (*(sums,) * (sums > 1), *free)


def is_matrix(contract: tuple[int, ...], rank: int) -> bool:
    """True if contracted axes are the first or last ones, in order, but not all."""
    first = contract[0] if contract else 0
    return (
        0 < len(contract) < rank
        and first in (0, rank - len(contract))
        and contract == tuple(range(first, first + len(contract)))
    )
