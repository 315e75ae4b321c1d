"""What products with active warps have in common as steps of a program: factors where they lie.

Kernels, stages 5 and 8, above ``tile_gemm_source``, below ``gelu_gemm`` and ``softmax_gemm``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from blufunc.core.ir.jaxpr import Literal
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Strided, strided
from blufunc.kernels.backends.cuda.library.tile_gemm_source import VECTOR
from blufunc.kernels.schedule import OpaqueStep


def by_rows_of(step: OpaqueStep, n: int, contract: Sequence[int]) -> bool:
    """Whether a factor of a step that is not loaded yet will be read by rows of terms."""
    atom, given = step.eqn.invars[n], step.operands[n]
    shape, chain = atom.aval.shape, [] if isinstance(given, Literal) else given[1]
    layout = strided(chain[0].invars[0].aval.shape if chain else shape, chain)
    return matrix_of(layout, shape, contract)[0]


class Factor:
    """A factor where it lies, if that is a matrix with rows or columns side by side; or a dense copy.

    Attributes:
      by_rows: whether the contracted axes are those that lie side by side.
      row: how many elements apart the others are.
    """

    def __init__(self, operand: Operand, contract: Sequence[int]):
        self._operand, self.copied = operand, False
        self.by_rows, self.row, in_place = matrix_of(operand.layout, operand.aval.shape, contract)
        if not in_place:
            self.copy(self.by_rows, self.row)

    def copy(self, by_rows: bool, row: int) -> None:
        """Let it be a dense copy."""
        self.copied, self.by_rows, self.row = not self._operand.in_place, by_rows, row

    def address(self, executor: Executor) -> tuple[int, DeviceBuffer | None]:
        """Where its first element is, and what must live until it is read."""
        if not self.copied:
            return self._operand.address(executor), None
        made = self._operand.buffer(executor)
        return made.ptr, made


def factors_of(
    operands: Sequence[Operand], contracts: Sequence[Sequence[int]], k: int
) -> tuple[Factor, Factor]:
    """Both factors of a product of so many terms, the left one by rows."""
    left, right = (Factor(o, own) for o, own in zip(operands, contracts, strict=True))
    if not left.by_rows:
        left.copy(by_rows=True, row=k)
    return left, right


class Results:
    """Where the results of a step lie; what nobody wants has memory of its own, as kernels write it."""

    def __init__(self, executor: Executor, step: OpaqueStep):
        self._places = [None if r is None else executor.roots.place(r) for r in step.results]
        pairs = zip(step.eqn.outvars, self._places, strict=True)
        self._spare = [
            executor.own(v.aval, "a result that nobody wants") if p is None else None for v, p in pairs
        ]
        executor.keep(self._spare)

    def addresses(self, executor: Executor) -> list[int]:
        """Of each result."""
        pairs = zip(self._places, self._spare, strict=True)
        return [b.ptr if b is not None else executor.address(p) for p, b in pairs]  # type: ignore[arg-type]


def matrix_of(layout: Strided, shape: Sequence[int], contract: Sequence[int]) -> tuple[bool, int, bool]:
    """Whether contracted axes lie side by side, how many elements apart the others are, and whether that is so where an
    operand lies; else it is so of a dense copy.
    """
    contract = sorted(contract)
    free = [d for d in range(len(shape)) if d not in contract]
    terms, others = (_as_one(layout, axes) for axes in (contract, free))
    row = others if terms == 1 else terms
    if row is not None and 1 in (terms, others) and row > 0 and not (row % VECTOR or layout.offset % VECTOR):
        return terms == 1, row, True
    by_rows = 0 not in contract
    return by_rows, math.prod(shape[d] for d in (contract if by_rows else free)), False


def _as_one(layout: Strided, axes: Sequence[int]) -> int | None:
    """How far apart elements along some axes are, if these are like one axis."""
    own = [(layout.shape[d], layout.strides[d]) for d in axes if layout.shape[d] > 1]
    if any(stride != inner * n for (_, stride), (n, inner) in itertools.pairwise(own)):
        return None
    return own[-1][1] if own else 1
