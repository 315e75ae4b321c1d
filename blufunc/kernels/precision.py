"""Precision of float32 matmuls: the algorithm that each name stands for.

Kernels, stage 5 for ``dot_general``, used by ``rewrites/split_float32`` and ``backends/cuda/library/matmul``. In: the
``precision`` of an equation, else ``config.matmul_precision``. Out: one name, and the ``Algorithm`` that it stands for,
or that may replace it where that is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.config import config


@dataclass(frozen=True)
class Algorithm:
    """A float32 matmul as a sum of float16 matmuls: ``x = x0 + x1``.

    Each part is the rounding of the remainder. Rows are first scaled by powers of two, as float16 has fewer exponents.
    With two parts, ``x1 y1`` is below the rounding of the parts and is not computed.

    Attributes:
      parts: the number of parts of an operand.
      chunk: terms of the leading matmul that tensor cores accumulate at a time, so that sums are as exact as with
        IEEE additions; default 512. None: all, if the rounding of one part hides the loss.
      raised: the second part is scaled by 2 to this power, so that small elements keep all their bits; default 0.
    """

    parts: int
    chunk: int | None = 512
    raised: int = 0


ALGORITHMS = {
    "F16_F16_F32_SCALED": Algorithm(1, chunk=None),
    "F16_F16_F32_X3": Algorithm(2, raised=11),
}
"""By name (``DotAlgorithmPreset``): dtypes of operands and sums, and matmuls."""

_ROUNDED = ("high", "tf32", "fastest")

ACCURATE = "float32_tc"
"""As accurate as float32, on tensor cores if that is faster."""

QUICKER_BY = {ACCURATE: "F16_F16_F32_X3", **dict.fromkeys(_ROUNDED, "F16_F16_F32_SCALED")}
"""Precisions that fix only the accuracy, with a faster algorithm that suffices.

Otherwise ``float32_tc`` is IEEE arithmetic, and the others are TF32.
"""

_TF32 = (*_ROUNDED, "TF32_TF32_F32")
_IEEE = ("default", "highest", "F32_F32_F32")

_FROM_COARSE_TO_EXACT = ("F16_F16_F32_SCALED", *_TF32, "F16_F16_F32_X3", ACCURATE, *_IEEE)

PRECISIONS = frozenset(_FROM_COARSE_TO_EXACT)
"""All names."""


class ProductShape(NamedTuple):
    """Shape of a matmul, as far as its time depends on it.

    Attributes:
      batch, m, n, k: the sizes of ``batch`` matmuls of m x k by k x n matrices.
      by_rows: for each operand, whether its contracted axes are the last ones: a kernel then has the rows that it
        scales at hand, and otherwise reads the operand once more for the scales; default both.
    """

    batch: int
    m: int
    n: int
    k: int
    by_rows: tuple[bool, bool] = (True, True)


def resolved(precision: Any) -> str:
    """The name that a ``precision`` of ``dot_general`` means for float32 operands.

    ``None`` and ``'default'`` mean ``config.matmul_precision``; of two names, the more exact counts.

    Raises:
      ValueRangeError: the precision is unknown.
    """
    pair = precision if isinstance(precision, tuple) else (precision,)
    names = [config.matmul_precision if p in (None, "default") else p for p in pair]
    for name in names:
        if name not in PRECISIONS:
            raise errors.ValueRangeError(
                f"a product has no precision {name!r:.60}.",
                fix=f"use one of {', '.join(map(repr, _FROM_COARSE_TO_EXACT))}",
            )
    return max(names, key=_FROM_COARSE_TO_EXACT.index)


def is_tf32(precision: str) -> bool:
    """True if a resolved precision lets operands be rounded to 11 bits."""
    return precision in _TF32
