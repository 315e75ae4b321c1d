"""Formats of floats: any exponent and mantissa, and blocks that share exponents.

A face, below ``rounding.py``. A format is a description: its numbers are held in arrays of wider dtypes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int

SPECIALS = ("ieee", "nan", "none")


@dataclass(frozen=True)
class Format:
    """A binary float: sign, exponent and mantissa, with subnormal numbers.

    Attributes:
      exponent: bits of the exponent, 1 to 8.
      mantissa: bits of the mantissa, 0 to 22.
      bias: of the exponent; default: ``2 ** (exponent - 1) - 1``.
      specials: "ieee": the largest exponent is of infinities and NaN; "nan": there are no infinities, and only the
        largest code is NaN (as of float8_e4m3fn); "none": all codes are numbers.
    Raises:
      ValueRangeError: float32 does not hold its numbers, or it has none.
      ArgumentError: a number of bits or the bias is no integer.
    """

    exponent: int
    mantissa: int
    bias: int | None = None
    specials: str = "ieee"

    def __post_init__(self) -> None:
        for name in ("exponent", "mantissa"):
            object.__setattr__(self, name, static_int(getattr(self, name), "Format", name))
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent - 1) - 1)
        else:
            object.__setattr__(self, "bias", static_int(self.bias, "Format", "bias"))
        fits = 1 <= self.exponent <= 8 and 0 <= self.mantissa <= 22 and self.specials in SPECIALS
        if not fits or self.least < -126 or self.most > 127 or self.most < self.least:
            raise errors.ValueRangeError(
                f"{self} is no format of numbers that float32 holds.",
                where=source.here(),
                why="exponents have 1 to 8 bits, mantissas 0 to 22, and numbers lie in the range of float32; 'ieee' "
                "leaves one exponent to infinities, and 'nan' one code.",
                fix=f"Format(4, 3), and specials one of {', '.join(map(repr, SPECIALS))}",
            )

    @property
    def least(self) -> int:
        """The exponent of the smallest normal number, and of subnormal ones."""
        return 1 - self.bias  # type: ignore[operator]

    @property
    def most(self) -> int:
        """The exponent of the largest number."""
        reserved = 1 + (self.specials == "ieee" or (self.specials == "nan" and self.mantissa == 0))
        return 2**self.exponent - reserved - self.bias  # type: ignore[operator]

    @property
    def largest(self) -> float:
        """The largest finite number."""
        units = 2 ** (self.mantissa + 1) - 1 - (self.specials == "nan" and self.mantissa > 0)
        return math.ldexp(units, self.most - self.mantissa)

    @property
    def smallest(self) -> float:
        """The smallest number above 0."""
        return math.ldexp(1, self.least - self.mantissa)

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 1 + self.exponent + self.mantissa


E2M1 = Format(2, 1, specials="none")
E2M3 = Format(2, 3, specials="none")
E3M2 = Format(3, 2, specials="none")
E4M3 = Format(4, 3, specials="nan")
E5M2 = Format(5, 2)


@dataclass(frozen=True)
class MX:
    """Blocks of numbers that share a power of two.

    They are those of the OCP Microscaling specification 1.0.

    Attributes:
      element: the format of numbers: ``E2M1`` (MXFP4), ``E2M3`` and ``E3M2`` (MXFP6), ``E4M3`` and ``E5M2`` (MXFP8).
      block: numbers that share a scale.
      clip: True: the scale is that of the specification, which brings the largest exponent of a block to that of the
        format; numbers above the largest one of the format are clipped. False: the least scale that clips none.
    Raises:
      ValueRangeError: a block is shorter than 1.
    """

    element: Format
    block: int = 32
    clip: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", static_int(self.block, "MX", "block"))
        if self.block < 1 or not isinstance(self.element, Format):
            raise errors.ValueRangeError(
                f"{self} is no format.", where=source.here(), fix="MX(nn.low_precision.E2M1, block=32)"
            )
