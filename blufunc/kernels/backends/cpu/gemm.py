"""Products of matrices on the CPU in C++, for the vector instructions of the machine that compiles it.

Kernels, stage 8 on the CPU: in come the shapes and strides of ``dot_general``'s operands, out goes what the one
library of this file takes to multiply them as they lie. A product costs a call of some microseconds, threads are
those of OpenMP that run the fused kernels too, and the result does not depend on how many there are: threads share the
result's rows and columns, and each element is summed in an order that the length of the sum alone decides.

The method is the usual one. Blocks of both operands are copied to where a core's second cache holds them, as panels in
the order of use; a tile of the result that fits in registers goes along two panels.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir.jaxpr import Literal
from blufunc.kernels.backends.cpu.renderer import SCRATCH
from blufunc.kernels.backends.cpu.toolchain import Compiler
from blufunc.kernels.codegen import source_files
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.schedule import OpaqueStep

_AXES = 8
"""The most batch axes of a product."""

_LEAST_ROWS, _LEAST_COLUMNS = 16, 32
"""Of narrower results a tile would be half empty, and copying takes as long as multiplying."""

_WORTH_SHARING = 1 << 19
"""From how many multiplications on it pays to wake other threads."""

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))

_OPTIONS = ("-ffp-contract=fast",)
"""Multiply and add are one instruction, as in any BLAS."""

_FILE = "backends/cpu/include/gemm.h"


class Layout(ctypes.Structure):
    """How the matrices of a product lie in memory; ``Product`` of the C++ text."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "inner", "batches", "axes")),
        *((name, ctypes.c_int64) for name in ("lhs_row", "lhs_inner", "rhs_inner", "rhs_column")),
        *((name, ctypes.c_int64 * _AXES) for name in ("extent", "lhs_batch", "rhs_batch")),
    ]

    def threads(self, most: int) -> int:
        """How many of at most so many threads are worth waking."""
        return most if self.batches * self.rows * self.columns * self.inner >= _WORTH_SHARING else 1


class Product(NamedTuple):
    """A product that is ready to run.

    Attributes:
      function: multiplies, of a layout, the addresses of lhs, rhs and result, and a number of threads.
      layout: for the function.
      lhs, rhs: the ids of the values in which the operands lie, and how many bytes behind their beginnings.
    """

    function: Any
    layout: Layout
    lhs: tuple[int, int]
    rhs: tuple[int, int]


def product_of(step: OpaqueStep, values: Sequence[Any], compiler: Compiler) -> Product | None:
    """What a step multiplies, if it is ours to multiply; None for what is better left to BLAS.

    Args:
      step: a ``dot_general`` of planned memory.
      values: what stands behind the ids of its operands.
      compiler: a compiler that works.

    Raises:
      CompileError: it does not work any more.
    """
    eqn = step.eqn
    dtype = eqn.outvars[0].aval.dtype
    if not compiler.openmp or any(v.aval.dtype != dtype for v in eqn.invars) or dtype not in _DTYPES:
        return None
    views, places = [], []
    for operand in step.operands:
        if isinstance(operand, Literal):
            return None
        i, movements = operand
        shape = values[i].aval.shape
        # the view that the movements make of memory which nobody touches
        strides = [s * dtype.itemsize for s in strides_of(shape)]
        x = whole = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
        for movement in movements:
            x = view(movement, x)
        views.append(x)
        places.append((i, x.__array_interface__["data"][0] - whole.__array_interface__["data"][0]))
    layout = layout_of(views[0], views[1], eqn.params)
    return None if layout is None else Product(_function_for(compiler, dtype), layout, *places)


def _source() -> str:
    """The complete C++."""
    return source_files.source(SCRATCH) + source_files.source(_FILE)


def _function_for(compiler: Compiler, dtype: np.dtype) -> Any:
    library = compiler.compile(_source(), "products of matrices", _OPTIONS)
    function = getattr(library, f"product_{dtype.name}")
    function.argtypes = [ctypes.POINTER(Layout), *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


def layout_of(lhs: np.ndarray, rhs: np.ndarray, params: dict[str, Any]) -> Layout | None:
    """The layout of a ``dot_general``'s matrices; None if it has few rows or columns, or no strides can describe them.

    Args:
      lhs, rhs: views with the operands' shapes and strides, whose elements are not read.
      params: those of the equation.
    """
    if not lhs.size or not rhs.size:
        return None
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    size = lhs.itemsize
    of_lhs = [(n, (s // size, 0)) for n, s in zip(lhs.shape, lhs.strides, strict=True)]
    of_rhs = [(n, (0, s // size)) for n, s in zip(rhs.shape, rhs.strides, strict=True)]
    both = lambda i, j: (of_lhs[i][0], (of_lhs[i][1][0], of_rhs[j][1][1]))
    inner = _joined(sorted((both(i, j) for i, j in zip(lc, rc, strict=True)), key=lambda a: -abs(a[1][0])))
    rows = _joined([a for d, a in enumerate(of_lhs) if d not in (*lc, *lb)])
    columns = _joined([a for d, a in enumerate(of_rhs) if d not in (*rc, *rb)])
    # rows that are not side by side are so many products
    batches = [*(both(i, j) for i, j in zip(lb, rb, strict=True)), *rows[:-1]]
    if len(rows) < 1 or len(inner) != 1 or len(columns) != 1 or len(batches) > _AXES:
        return None
    ((m, (lhs_row, _)), (n, (_, rhs_column)), (k, (lhs_inner, rhs_inner))) = rows[-1], columns[0], inner[0]
    if m < _LEAST_ROWS or n < _LEAST_COLUMNS:
        return None
    count = math.prod(a[0] for a in batches)
    layout = Layout(m, n, k, count, len(batches), lhs_row, lhs_inner, rhs_inner, rhs_column)
    for d, (extent, (left, right)) in enumerate(batches):
        layout.extent[d], layout.lhs_batch[d], layout.rhs_batch[d] = extent, left, right
    return layout


_Axis = tuple[int, tuple[int, int]]
"""An extent, and the strides of the lhs and of the rhs."""


def _joined(axes: Sequence[_Axis]) -> list[_Axis]:
    """The axes, those that follow each other in memory as one."""
    out: list[_Axis] = []
    for n, strides in axes:
        if n == 1:
            continue
        if out and out[-1][1] == (n * strides[0], n * strides[1]):
            out[-1] = (out[-1][0] * n, strides)
        else:
            out.append((n, strides))
    return out
