"""What lowering gives: kernels with their operands.

Kernels, stage 6, behind ``lower/region.py``. In: kernels of LoopIR. Out: launches, which ``pipeline.py`` puts in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from blufunc.core.ir.jaxpr import Var
from blufunc.kernels.loopir.ir import Buffer, Kernel


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory between a kernel and its finish, or that a step of its own works in; ``label`` is for people."""

    dtype: np.dtype
    size: int
    label: str = "parts of a reduction"

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """A kernel, and what its buffers are.

    Attributes:
      operands: for each buffer the array that it is.
      starts: of buffers that are parts of their arrays, the element with which they begin.
    """

    kernel: Kernel
    operands: dict[Buffer, Var | Scratch]
    starts: Mapping[Buffer, int] = field(default_factory=dict)
