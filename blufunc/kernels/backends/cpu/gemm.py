"""GEMM on the CPU in C++, for the vector instructions of the build machine.

Kernels, stage 8 on the CPU. In: shapes and strides of ``dot_general``'s operands. Out: the function of one library
that multiplies them in place, without copies. A call costs some microseconds. It runs on the OpenMP threads of the
fused kernels, and its result does not depend on their count: threads split rows and columns, and the summation order
of an element depends only on the length of the sum.

The method is the usual one: blocks of both operands are packed into panels that fit a core's L2, and a register tile
of the result accumulates along two panels.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir.jaxpr import Literal
from blufunc.kernels.backends.cpu.operands import Strided, strided
from blufunc.kernels.backends.cpu.renderer import SCRATCH
from blufunc.kernels.backends.cpu.toolchain import Compiler
from blufunc.kernels.codegen import source_files
from blufunc.kernels.schedule import OpaqueStep

_AXES = 8
"""Maximum number of batch axes."""

_WORTH_SHARING = 1 << 19
"""Minimum multiplications that justify waking other threads."""

_REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
"""A library each: a program of one dtype compiles half as long.

measured: 2.1 s instead of 4.2 (GCC 12, 2026-11-27)
"""

_OPTIONS = ("-ffp-contract=fast",)
"""Contract multiply and add into FMA, as any BLAS does."""

FILE = "backends/cpu/include/gemm.h"


class Layout(ctypes.Structure):
    """Memory layout of the matrices of a GEMM; ``Product`` in the C++ source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "inner", "batches", "axes")),
        *((name, ctypes.c_int64) for name in ("lhs_row", "lhs_inner", "rhs_inner", "rhs_column")),
        *((name, ctypes.c_int64 * _AXES) for name in ("extent", "lhs_batch", "rhs_batch")),
    ]

    def initializer(self) -> str:
        """The C++ initializer of the structure."""
        names = [field[0] for field in self._fields_]
        numbers, arrays = ([getattr(self, name) for name in part] for part in (names[:9], names[9:]))
        texts = [*map(str, numbers), *(f"{{{', '.join(map(str, a))}}}" for a in arrays)]
        return f"{{{', '.join(texts)}}}"

    def threads(self, most: int) -> int:
        """Number of threads worth waking, at most ``most``."""
        return most if self.batches * self.rows * self.columns * self.inner >= _WORTH_SHARING else 1


class Product(NamedTuple):
    """A GEMM that is ready to run.

    Attributes:
      function: called with a layout, the addresses of lhs, rhs and result, and a number of threads.
      layout: argument of the function.
      lhs, rhs: for each operand, the id of its value and the offset into it in bytes.
    """

    function: Any
    layout: Layout
    lhs: tuple[int, int]
    rhs: tuple[int, int]


def product_of(step: OpaqueStep, values: Sequence[Any], compiler: Compiler) -> Product | None:
    """Compile the GEMM of a step; None if BLAS should compute it.

    Args:
      step: a ``dot_general`` of planned memory.
      values: the values that the ids of its operands refer to.
      compiler: a working compiler.

    Raises:
      CompileError: the compiler no longer works.
    """
    if not compiler.openmp:
        return None
    found = layout_of_step(step, values)
    if found is None:
        return None
    layout, lhs, rhs = found
    function = function_for(compiler, step.eqn.outvars[0].aval.dtype)
    return Product(function, layout, (lhs.value, lhs.offset), (rhs.value, rhs.offset))


def layout_of_step(step: OpaqueStep, values: Sequence[Any]) -> tuple[Layout, Strided, Strided] | None:
    """Layout and operands of a matmul; None if this library does not compute it."""
    eqn = step.eqn
    dtype = eqn.outvars[0].aval.dtype
    if any(v.aval.dtype != dtype for v in eqn.invars) or dtype not in _REALS:
        return None
    if any(isinstance(o, Literal) for o in step.operands):
        return None
    lhs, rhs = (strided(o, values) for o in step.operands)  # type: ignore[arg-type]
    layout = layout_of(lhs.model, rhs.model, eqn.params)
    return None if layout is None else (layout, lhs, rhs)


def source(dtype: np.dtype) -> str:
    """Complete C++ source of the library of a dtype."""
    return source_files.source(SCRATCH) + source_files.source(FILE, REAL=_REALS[dtype])


def function_for(compiler: Compiler, dtype: np.dtype) -> Any:
    """The function of all matmuls of a dtype."""
    name = f"products of {dtype.name} matrices"
    function = compiler.compile(source(dtype), name, _OPTIONS, ["product"]).product
    function.argtypes = [ctypes.POINTER(Layout), *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


def layout_of(lhs: np.ndarray, rhs: np.ndarray, params: dict[str, Any]) -> Layout | None:
    """Layout of a ``dot_general``'s matrices; None if empty or not strided.

    Args:
      lhs, rhs: views with the operands' shapes and strides; their elements are not read.
      params: parameters of the equation.
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
    # rows that are not contiguous become batches
    batches = [*(both(i, j) for i, j in zip(lb, rb, strict=True)), *rows[:-1]]
    if len(inner) > 1 or len(columns) > 1 or len(batches) > _AXES:
        return None
    one = [(1, (1, 1))]
    ((m, (lhs_row, _)), (n, (_, rhs_column)), (k, (lhs_inner, rhs_inner))) = (
        (axes or one)[-1] for axes in (rows, columns, inner)
    )
    count = math.prod(a[0] for a in batches)
    layout = Layout(m, n, k, count, len(batches), lhs_row, lhs_inner, rhs_inner, rhs_column)
    for d, (extent, (left, right)) in enumerate(batches):
        layout.extent[d], layout.lhs_batch[d], layout.rhs_batch[d] = extent, left, right
    return layout


_Axis = tuple[int, tuple[int, int]]
"""An extent, and the strides of the lhs and of the rhs."""


def _joined(axes: Sequence[_Axis]) -> list[_Axis]:
    """Axes with neighbors that are contiguous in memory merged."""
    out: list[_Axis] = []
    for n, strides in axes:
        if n == 1:
            continue
        if out and out[-1][1] == (n * strides[0], n * strides[1]):
            out[-1] = (out[-1][0] * n, strides)
        else:
            out.append((n, strides))
    return out
