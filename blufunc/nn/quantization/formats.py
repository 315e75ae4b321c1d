"""Formats of quantized arrays: codes, their scales, and conversions.

A face, below ``product.py``. Shapes hold all that a reader must know, so the arrays are plain leaves: transforms,
checkpoints and shardings treat them as parameters, and a slice of a stack of weights is a slice of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp

QUANTILES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of NF4's codes: quantiles of a normal distribution, and 0.

They are those of arXiv:2305.14314, appendix E.
"""

LEVELS = 255
"""Largest code of a scale of NF4."""

LIMIT = 127
"""Largest code of int8; -128 is not used, so that codes are symmetric."""


class Int8(NamedTuple):
    """A weight as int8 codes, times a scale for each row, column or block.

    Attributes:
      codes: int8 [..., m, n].
      scale: float32, of as many axes. Its size along an axis divides that of the codes: 1 where all codes of an axis
        share a scale, and n / b along the last axis for blocks of b.
    """

    codes: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.codes.shape)


class NF4(NamedTuple):
    """A weight as 4-bit codes of normal quantiles, with quantized scales.

    Blocks are along the last axis. The scale of a block is ``scale * level ** 2``. Levels are spaced quadratically, so
    that the blocks of a row with one outlier keep theirs.

    Attributes:
      codes: uint8 [..., m, n / 2]; the lower four bits are the earlier code.
      levels: uint8 [..., m, n / b], of blocks of b.
      scale: float32 [..., m, 1].
    """

    codes: Any
    levels: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def block(self) -> int:
        """Elements that share a level."""
        return self.shape[-1] // self.levels.shape[-1]


Quantized = Int8 | NF4

FORMATS: dict[str, type[Int8] | type[NF4]] = {"int8": Int8, "nf4": NF4}


# -- to codes --------------------------------------------------------------------------------------


def to_int8(w: Any, axis: int, block: int | None) -> Int8:
    """Nearest codes; the largest of a row, column or block is 127 in size."""
    w = w.astype("float32")
    if block is None:
        scale = bnp.max(bnp.abs(w), axis=axis, keepdims=True) / LIMIT
        return Int8(_rounded(w, scale), scale)
    blocks = in_blocks(w, block)
    scale = bnp.max(bnp.abs(blocks), axis=-1, keepdims=True) / LIMIT
    return Int8(_rounded(blocks, scale).reshape(w.shape), scale[..., 0])


def _rounded(w: Any, scale: Any) -> Any:
    return bnp.clip(bnp.round(w / bnp.where(scale > 0, scale, 1.0)), -LIMIT, LIMIT).astype("int8")


def to_nf4(w: Any, block: int) -> NF4:
    """Nearest codes, given the scales of blocks as they are decoded."""
    blocks = in_blocks(w.astype("float32"), block)
    largest = bnp.max(bnp.abs(blocks), axis=-1)
    scale = bnp.max(largest, axis=-1, keepdims=True) / LEVELS**2
    safe = bnp.where(scale > 0, scale, 1.0)
    levels = bnp.round(bnp.sqrt(largest / safe)).astype("uint8")
    of_block = _of_levels(levels, scale)[..., None]
    values = blocks / bnp.where(of_block > 0, of_block, 1.0)
    codes = sum((values > limit).astype("uint8") for limit in _limits()).reshape(w.shape)
    pairs = codes.reshape((*w.shape[:-1], w.shape[-1] // 2, 2))
    return NF4(pairs[..., 0] | (pairs[..., 1] << np.uint8(4)), levels, scale)


def _limits() -> list[float]:
    """Numbers halfway between neighbouring quantiles."""
    return [(a + b) / 2 for a, b in itertools.pairwise(QUANTILES)]


def in_blocks(w: Any, block: int) -> Any:
    """[..., n] as [..., n / b, b]."""
    return w.reshape((*w.shape[:-1], w.shape[-1] // block, block))


# -- from codes ------------------------------------------------------------------------------------


def parts_of(w: Quantized) -> tuple[Any, ...]:
    """The arrays of a format, and for an ``NF4`` the quantiles."""
    table = (np.array(QUANTILES, np.float32),) if isinstance(w, NF4) else ()
    return tuple(map(bnp.asarray, (*w, *table)))


def of_parts(parts: Sequence[Any], dtype: Any) -> Any:
    """The weight of ``parts_of``, computed in float32 and rounded once to ``dtype``."""
    return (_from_int8(*parts) if len(parts) == 2 else _from_nf4(*parts)).astype(dtype)


def _from_int8(codes: Any, scale: Any) -> Any:
    blocks = scale.shape[-1]
    wide = codes.astype("float32")
    if blocks in (1, codes.shape[-1]):
        return wide * scale
    return (in_blocks(wide, codes.shape[-1] // blocks) * scale[..., None]).reshape(codes.shape)


def _from_nf4(codes: Any, levels: Any, scale: Any, table: Any) -> Any:
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    shifts = bnp.arange(2, dtype="uint8") * np.uint8(4)
    each = ((codes[..., None] >> shifts) & np.uint8(15)).reshape(shape)
    blocks = in_blocks(table[each], shape[-1] // levels.shape[-1])
    # scales for each element, which take no time next to its bytes: for each block, they would be a kernel of their own
    of_elements = bnp.broadcast_to(levels[..., None], blocks.shape)
    return (blocks * _of_levels(of_elements, scale[..., None])).reshape(shape)


def _of_levels(levels: Any, scale: Any) -> Any:
    """Scales of blocks."""
    wide = levels.astype("float32")
    return wide * wide * scale


def bits(w: Quantized) -> float:
    """Bits per element of the weight, with its scales."""
    return 8 * sum(x.size * np.dtype(x.dtype).itemsize for x in w) / max(math.prod(w.shape), 1)
