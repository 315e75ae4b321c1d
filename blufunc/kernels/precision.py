"""How exactly float32 is multiplied: what the names of precisions mean to a device that has a choice.

Kernels, stage 5 for ``dot_general``; ``rewrites/split_float32`` and ``backends/cuda/library/matmul`` go by it. In: the
``precision`` of an equation, and ``config.matmul_precision`` behind it. Out: one name, and the ``Algorithm`` that it
stands for, or may be computed by where that is quicker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.config import config


@dataclass(frozen=True)
class Algorithm:
    """Float32 matmuls as sums of float16 matmuls: ``x = x0 + x1``, each part the rounding of the remainder.

    Rows are first multiplied by powers of two, since float16 has fewer exponents. One part is rounding alone; of two,
    ``x1 y1`` is below the rounding of the parts and is not computed.

    Attributes:
      parts: the number of parts of an operand.
      chunk: the terms of the leading matmul that tensor cores accumulate: with these, sums of terms of both signs are
        as exact as by IEEE additions. None: all of them, where one part is so short that the loss does not show.
      raised: the second part is held times 2 to this power, so that smaller elements have all their bits too.
    """

    parts: int
    chunk: int | None = 512
    raised: int = 0


ALGORITHMS = {
    "F16_F16_F32_SCALED": Algorithm(1, chunk=None),
    "F16_F16_F32_X3": Algorithm(2, raised=11),
}
"""By name (``DotAlgorithmPreset``): types of operands and sums, number of matmuls."""

_ROUNDED = ("high", "tf32", "fastest")

ACCURATE = "float32_tc"
"""As exact as float32, by the quickest way: on tensor cores where a product is large enough to gain."""

QUICKER_BY = {ACCURATE: "F16_F16_F32_X3", **dict.fromkeys(_ROUNDED, "F16_F16_F32_SCALED")}
"""The precisions that say how exact a product must be and not how it is computed: an algorithm that is so exact, for
products that are quicker by it. The others are computed in IEEE arithmetic by ``float32_tc``, else in TF32."""

_TF32 = (*_ROUNDED, "TF32_TF32_F32")
_IEEE = ("default", "highest", "F32_F32_F32")

_FROM_COARSE_TO_EXACT = ("F16_F16_F32_SCALED", *_TF32, "F16_F16_F32_X3", ACCURATE, *_IEEE)

PRECISIONS = frozenset(_FROM_COARSE_TO_EXACT)
"""All names."""


class ProductShape(NamedTuple):
    """What the time of a product depends on.

    Attributes:
      batch, m, n, k: so many products of m x k by k x n matrices.
      by_rows: of each operand, whether its contracted axes are the last ones: a kernel has the rows then that a scale
        is wanted of, and else reads everything once for the scales.
    """

    batch: int
    m: int
    n: int
    k: int
    by_rows: tuple[bool, bool] = (True, True)


def resolved(precision: Any) -> str:
    """The one name that a ``precision`` of ``dot_general`` means, for operands of float32.

    ``None`` and ``'default'`` mean what ``config.matmul_precision`` says; of two, the more exact counts.

    Raises:
      ValueRangeError: there is no such precision.
    """
    pair = precision if isinstance(precision, tuple) else (precision,)
    return max(map(_one, pair), key=_FROM_COARSE_TO_EXACT.index)


def _one(precision: str | None) -> str:
    if precision in (None, "default"):
        precision = config.matmul_precision
    if precision not in PRECISIONS:
        raise errors.ValueRangeError(
            f"a product has no precision {precision!r:.60}.",
            fix=f"use one of {', '.join(map(repr, _FROM_COARSE_TO_EXACT))}",
        )
    return precision


def is_tf32(precision: str) -> bool:
    """Whether a resolved precision lets operands be rounded to 11 bits."""
    return precision in _TF32
