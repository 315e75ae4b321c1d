"""Launches: kernels with their operands.

Kernels, stage 6, the result of ``lower/region.py``. In: kernels of LoopIR. Out: launches, which ``pipeline.py`` orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from blufunc.core.ir.jaxpr import Var
from blufunc.kernels.loopir.ir import Buffer, Kernel


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory between a kernel and its finish, or private to one step."""

    dtype: np.dtype
    size: int
    label: str = "parts of a reduction"

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """A kernel and its operands.

    Attributes:
      kernel: the kernel.
      operands: the array of each buffer.
      starts: first element, for buffers that are parts of their arrays; 0 for the others.
    """

    kernel: Kernel
    operands: dict[Buffer, Var | Scratch]
    starts: Mapping[Buffer, int] = field(default_factory=dict)
