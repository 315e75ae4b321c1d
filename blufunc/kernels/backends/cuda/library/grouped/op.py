"""``ragged_dot`` and ``ragged_contract`` as steps: a grouped GEMM.

Kernels, stages 5 to 8. In: an equation, and the layouts of its operands. Out: a step that is ready to run. On Hopper,
16-bit operands whose rows are aligned to 16 bytes have a kernel of their own (``hopper``); the others are multiplied by
``portable``, complex numbers on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, line_of
from blufunc.core.ops.ragged_dot import ragged_contract_p, ragged_dot_p
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver.tensor_map import BYTES, Mapped
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Strided, Work, strided
from blufunc.kernels.backends.cuda.library.grouped import hopper, portable
from blufunc.kernels.backends.cuda.library.grouped.hopper import GroupedGemm
from blufunc.kernels.backends.cuda.library.grouped.portable import PortableGemm
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel, layout_of
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.precision import is_tf32, resolved
from blufunc.kernels.schedule import OpaqueStep

_HALVES = ("bfloat16", "float16")


def why_not(eqn: Eqn) -> str | None:
    """Reason why no kernel computes an equation, or None."""
    out = eqn.outvars[0].aval
    if not out.size or not all(a.aval.size for a in eqn.invars):
        return "it has no elements"
    if (
        max(a.aval.size for a in (*eqn.invars, eqn.outvars[0])) >= 1 << 40
        or eqn.invars[0].aval.shape[-2] >= 1 << 30
    ):
        return "it has too many rows"
    return portable.why_not(eqn.invars[0].aval.dtype, out.dtype)


def plan(eqn: Eqn, layouts: Sequence[Strided], arch: str) -> tuple[GroupedGemm | PortableGemm, list[bool]]:
    """The GEMM of an equation, and which of both factors it reads in place.

    Args:
      layouts: of both factors in memory; another layout than the GEMM reads becomes a dense copy.
    """
    lhs, rhs, bounds = (a.aval for a in eqn.invars)
    out, summed = eqn.outvars[0].aval, eqn.prim is ragged_contract_p
    views = [
        _is_matrices(layout, a.dtype.itemsize, turned=n == 1 and not summed)
        for n, (layout, a) in enumerate(zip(layouts, (lhs, rhs), strict=True))
    ]
    x, y = (
        _strides(layout.strides if view else strides_of(a.shape), a.shape, rank)
        for layout, view, a, rank in zip(layouts, views, (lhs, rhs), (2, 2 if summed else 3), strict=True)
    )
    stacks = lhs.shape[0] if lhs.ndim == 3 else 1
    (m, k), n, groups = lhs.shape[-2:], rhs.shape[-1], bounds.shape[-1] - 1
    matrices = stacks if summed or rhs.ndim == 4 else 1
    sizes = (stacks, m, k, n, groups, matrices, stacks if bounds.ndim == 2 else 1, summed)
    y = [y[0], 0, *y[1:]] if summed else y
    if _is_hopper(eqn, arch):
        by_rows = y[3] != 1
        rows = y[3] if by_rows else y[2]
        gemm = GroupedGemm(
            *sizes, by_rows, lhs.dtype.name, out.dtype != lhs.dtype, x[1], x[0], y[1], rows, y[0]
        )
        aligned = not any(s % hopper.VECTOR for s in (*gemm.strides, k if by_rows else n, n, k))
        if aligned and gemm.parts <= hopper.MOST_PARTS:
            return gemm.tiled(), views
    tf32 = lhs.dtype == dtypes.float32 and is_tf32(resolved(eqn.params["precision"]))
    a, b = (x[0], x[1]), (y[0], y[1], y[2], y[3])
    return PortableGemm(*sizes, a, b, lhs.dtype.name, out.dtype.name, tf32), views


def _strides(strides: Sequence[int], shape: Sequence[int], rank: int) -> list[int]:
    """Strides of stacks and of ``rank`` axes.

    They are 0 for what stacks share, and for stacks or groups of one.
    """
    of_axes = [
        s if n > 1 or d >= len(shape) - 2 else 0 for d, (s, n) in enumerate(zip(strides, shape, strict=True))
    ]
    return [0] * (rank + 1 - len(shape)) + of_axes


def _is_hopper(eqn: Eqn, arch: str) -> bool:
    """True if Hopper's kernel computes an equation, if its operands are aligned."""
    dtype, out = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return arch == "sm_90a" and dtype.name in _HALVES and out in (dtype, dtypes.float32)


def _is_matrices(layout: Strided, itemsize: int, turned: bool) -> bool:
    """True if rows of an operand are contiguous, or, if ``turned``, columns."""
    (rows, columns), (row, column) = layout.shape[-2:], layout.strides[-2:]
    by_rows, by_columns = column == 1 and row >= columns, row == 1 and column >= rows
    stacks = zip(layout.strides[:-2], layout.shape[:-2], strict=True)
    positive = all(s > 0 or n == 1 for s, n in stacks)
    return (by_rows or (turned and by_columns)) and positive and not layout.offset * itemsize % 16


def remark(eqn: Eqn, arch: str) -> str | None:
    """Line of ``explain`` on matmuls of groups: what computes them."""
    if eqn.prim not in (ragged_dot_p, ragged_contract_p):
        return None
    reason = why_not(eqn)
    if reason is not None:
        by = f"on the host: there is no kernel, as {reason}"
    else:
        dense = [strided(a.aval.shape, []) for a in eqn.invars[:2]]
        gemm, _ = plan(eqn, dense, arch)
        kind = (
            "Hopper's grouped GEMM" if isinstance(gemm, GroupedGemm) else "a grouped GEMM of any architecture"
        )
        by = f"by {kind}, which reads sizes of groups on the device"
    return f"{eqn.prim.name} at {line_of(eqn)} runs {by}"


class Grouped(LibraryKernel):
    """Matmuls of groups of rows."""

    def matches(self, eqn: Eqn) -> bool:
        groups = eqn.prim in (ragged_dot_p, ragged_contract_p)
        return groups and not is_replaced(eqn.prim, "impl") and why_not(eqn) is None

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        gemm, _ = plan(step.eqn, [layout_of(step, n) for n in range(2)], arch)
        return [_text(gemm)]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        arch = driver.properties(executor.device).arch
        gemm, views = plan(step.eqn, [o.layout for o in operands[:2]], arch)
        kernel = prepared(gemm, executor.device)
        results = Results(executor, step)

        def run(executor: Executor) -> None:
            # copies live until they are read
            factors = [o.located(executor, view) for o, view in zip(operands[:2], views, strict=True)]
            offsets = operands[2].buffer(executor)
            (out,) = results.addresses(executor)
            kernel([address for address, _ in factors], offsets.ptr, out, executor.work_stream())

        read = [view or o.in_place for o, view in zip(operands[:2], views, strict=True)]
        anywhere = all(read) and operands[2].in_place
        return Work(run, step.eqn.prim.name, step, anywhere=lambda: anywhere)


@functools.lru_cache(256)
def _text(gemm: GroupedGemm | PortableGemm) -> modules.Text:
    if isinstance(gemm, GroupedGemm):
        return hopper.source(gemm), hopper.ENTRY
    return portable.source(gemm), portable.ENTRY


Kernel = Callable[[Sequence[int], int, int, Any], None]
"""Puts a GEMM on a stream: addresses of both factors, offsets and result."""


def prepared(gemm: GroupedGemm | PortableGemm, device: int) -> Kernel:
    """A grouped GEMM, ready to be put on streams of a device."""
    source, entry = _text(gemm)
    function = modules.module(source, device, entry).kernel(entry)
    if not isinstance(gemm, GroupedGemm):
        shared = portable.shared_bytes(gemm)
        plain = function.prepare((gemm.grid,), (portable.THREADS,), shared, [0] * 4)
        return lambda factors, offsets, out, stream: plain.run((*factors, offsets, out), stream)
    grid = gemm.grid(driver.properties(device).sm_count)
    arguments = [bytes(BYTES), bytes(BYTES), 0, 0]
    launch = function.prepare((grid,), (gemm.threads,), gemm.shared_bytes, arguments)
    maps = [Mapped(i, i, box) for i, box in enumerate(gemm.boxes())]

    def run(factors: Sequence[int], offsets: int, out: int, stream: Any) -> None:
        for mapped in maps:
            mapped.set(launch.arguments, factors)
        launch.run((offsets, out), stream, first=2)

    return run
