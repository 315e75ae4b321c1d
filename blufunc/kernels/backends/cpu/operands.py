"""Operands of native steps: where they begin and how they lie in memory.

Kernels, stage 6 on the CPU. In: an operand of an ``OpaqueStep``. Out: a value with an offset and strides in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.loopir.index import strides_of


class Strided(NamedTuple):
    """A view of a value in memory.

    Attributes:
      value: id of the value.
      offset: of the first element, in bytes.
      model: an array with the shape and strides of the view; its elements are never read.
    """

    value: int
    offset: int
    model: np.ndarray

    @property
    def in_order(self) -> bool:
        """Whether it is contiguous and row-major."""
        return self.model.flags.c_contiguous


def strided(operand: tuple[int, list[Eqn]], values: Sequence[Any]) -> Strided:
    """The view that movement equations make of a value.

    Args:
      operand: the id of a value, and the equations.
      values: the values that ids refer to.
    """
    i, movements = operand
    aval = values[i].aval
    # one element stands for all: only strides and offset matter
    raw = np.empty(1, np.dtype((np.void, aval.dtype.itemsize)))
    strides = [s * aval.dtype.itemsize for s in strides_of(aval.shape)]
    whole = x = np.lib.stride_tricks.as_strided(raw, aval.shape, strides)
    for movement in movements:
        x = view(movement, x)
    offset = x.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return Strided(i, offset, x)
