"""Classes that state accuracy: of elementary functions, and of matmuls.

A face. Elementary functions have one accuracy here, which is the highest; ``AccuracyMode`` and ``Tolerance`` name
others in JAX. A ``DotAlgorithm`` is a ``DotAlgorithmPreset`` by its dtypes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ops.dot import DotAlgorithmPreset

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import DTypeLike


class AccuracyMode(enum.Enum):
    """Accuracy of an elementary function: functions have one, whatever is requested."""

    DEFAULT = 1
    HIGHEST = 2


@dataclass(frozen=True)
class Tolerance:
    """A bound on the error of an elementary function.

    Attributes:
      atol, rtol: absolute and relative.
      ulps: in units of the last place.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulps: int = 0

    def __post_init__(self) -> None:
        if min(self.atol, self.rtol, self.ulps) < 0:
            raise errors.ValueRangeError(f"{self}: tolerances are not negative.", where=source.here())


_PRESETS: dict[tuple[str, str, int], DotAlgorithmPreset] = {
    ("float32", "float32", 1): DotAlgorithmPreset.F32_F32_F32,
    ("tf32", "float32", 1): DotAlgorithmPreset.TF32_TF32_F32,
}


class DotAlgorithm(NamedTuple):
    """The algorithm of a matmul by the dtypes of operands and sums.

    Attributes:
      lhs_precision_type, rhs_precision_type: what operands are rounded to.
      accumulation_type: of sums.
      lhs_component_count, rhs_component_count, num_primitive_operations: parts of operands, and products of them.
      allow_imprecise_accumulation: whether sums may be less precise.
    """

    lhs_precision_type: DTypeLike
    rhs_precision_type: DTypeLike
    accumulation_type: DTypeLike
    lhs_component_count: int = 1
    rhs_component_count: int = 1
    num_primitive_operations: int = 1
    allow_imprecise_accumulation: bool = False

    @property
    def preset(self) -> DotAlgorithmPreset:
        """The preset of this algorithm, which matmuls take as their ``precision``.

        Raises:
          UnsupportedError: none of the presets is this algorithm.
        """
        name = lambda d: "tf32" if str(d) == "tf32" else dtypes.as_dtype(d).name
        found = None
        if name(self.lhs_precision_type) == name(self.rhs_precision_type):
            key = (name(self.lhs_precision_type), name(self.accumulation_type), self.num_primitive_operations)
            found = _PRESETS.get(key)
        if found is None:
            raise errors.UnsupportedError(
                f"{self!r} is not an algorithm of this library.",
                where=source.here(),
                fix="one of " + ", ".join(f"DotAlgorithmPreset.{p.name}" for p in DotAlgorithmPreset),
            )
        return found
