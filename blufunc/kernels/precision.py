"""How exactly float32 is multiplied: what the names of precisions mean to a device that has a choice.

Kernels, stage 5 for ``dot_general``; ``rewrites/split_float32`` and ``backends/cuda/library/matmul`` go by it. In: the
``precision`` of an equation, and ``config.matmul_precision`` behind it. Out: one name, and the ``Algorithm`` that it
stands for, or may be computed by where that is quicker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import dtypes


@dataclass(frozen=True)
class Algorithm:
    """Float32 products as sums of products of parts: ``x = x0 + x1 + ...``, each the rounding of what is left.

    Of the products of parts ``xi yj`` those with ``i + j < parts`` are computed; the rest is below the rounding of what
    the parts hold together. One part is rounding alone.

    Attributes:
      dtype: of the parts; that of float32 stands for TF32, which it holds exactly.
      parts: how many an operand has.
      mantissa: the bits of a part behind the first, which is always 1.
      largest: the largest finite number of a part.
      chunk: how many terms of the leading product tensor cores add up: with these, sums of terms of both signs are as
        exact as by IEEE additions. They take 16 terms at a time, 8 of TF32. None: all of them, where parts are so
        short that what sums lose does not show.
      scaled: whether rows are multiplied by powers of two first, as the parts' exponents do not reach as far.
      raised: the second of two parts is held times 2 to this, so that it has all its bits in smaller elements too.
      by_rows: whether scales are those of rows as they lie, also where it is rows that are contracted.
    """

    dtype: np.dtype
    parts: int
    mantissa: int
    largest: float
    chunk: int | None = 512
    scaled: bool = False
    raised: int = 0
    by_rows: bool = False


_LARGEST_BF16 = float.fromhex("0x1.fep127")
_LARGEST_TF32 = float.fromhex("0x1.ffcp127")

ALGORITHMS = {
    "F16_F16_F32_SHARED": Algorithm(dtypes.float16, 1, 10, 65504.0, chunk=None, scaled=True, by_rows=True),
    "F16_F16_F32_SCALED": Algorithm(dtypes.float16, 1, 10, 65504.0, chunk=None, scaled=True),
    "BF16_BF16_F32_X3": Algorithm(dtypes.bfloat16, 2, 7, _LARGEST_BF16),
    "TF32_TF32_F32_X3": Algorithm(dtypes.float32, 2, 10, _LARGEST_TF32, chunk=256),
    "F16_F16_F32_X3": Algorithm(dtypes.float16, 2, 10, 65504.0, scaled=True, raised=11),
    "BF16_BF16_F32_X6": Algorithm(dtypes.bfloat16, 3, 7, _LARGEST_BF16),
}
"""By name, which is JAX's (``DotAlgorithmPreset``) where it has one: types of operands and sums, number of products."""

_ROUNDED = ("high", "tf32", "fastest")

ACCURATE = "float32_tc"
"""As exact as float32, by the quickest way: on tensor cores where a product is large enough to gain."""

QUICKER_BY = {ACCURATE: "F16_F16_F32_X3", **dict.fromkeys(_ROUNDED, "F16_F16_F32_SCALED")}
"""The precisions that say how exact a product must be and not how it is computed: an algorithm that is so exact, for
products that are quicker by it. The others are computed in IEEE arithmetic by ``float32_tc``, else in TF32."""

_TF32 = (*_ROUNDED, "TF32_TF32_F32")
_IEEE = ("default", "highest", "F32_F32_F32")

_ONE_PART = tuple(name for name, a in ALGORITHMS.items() if a.parts == 1)  # TF32's bits, of fewer elements

_FROM_COARSE_TO_EXACT = (*_ONE_PART, *_TF32, *(n for n in ALGORITHMS if n not in _ONE_PART), ACCURATE, *_IEEE)

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
