"""Complete CUDA sources of scheduled kernels, and their launch shapes.

Kernels, end of stage 6. In: ``ScheduledKernel``s. Out: a ``CudaKernel`` each, for ``driver/nvrtc.py`` and the
executor. Rendering is a pure function of a ``ScheduledKernel``: each kind has a renderer, and none makes decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blufunc.kernels.backends.cuda.render.column_scans import ColumnScanRenderer
from blufunc.kernels.backends.cuda.render.grouped import GroupRenderer
from blufunc.kernels.backends.cuda.render.kernel import KernelRenderer
from blufunc.kernels.backends.cuda.render.transpose import TransposeRenderer
from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import Kind, ScheduledKernel
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

RENDERERS: dict[Kind, type[CudaWriter]] = {
    "points": KernelRenderer,
    "lanes": KernelRenderer,
    "column scan": ColumnScanRenderer,
    "transpose": TransposeRenderer,
    "group": GroupRenderer,
}

_DYNAMIC = "extern __shared__ __align__(128) unsigned char shared_memory[];"
# measured: a copied row that is not sector-aligned like its source takes 10% longer (H200)

KERNEL_PARTS = "backends/cuda/include/kernel_parts.cuh"
"""Device functions, prepended to sources that contain the name of their part."""

OVERLAP = ("let_next_kernel_begin", "wait_for_previous_kernel")
"""The parts for kernels that begin ahead of the end of those before them."""


@dataclass(frozen=True)
class CudaKernel:
    """A kernel as CUDA C++, and how to launch it.

    Attributes:
      source: a complete translation unit.
      entry: name of the ``extern "C" __global__`` function.
      grid: blocks along x, y and z; if one is 0, there is nothing to launch.
      block: threads per block along x, y and z.
      shared_bytes: dynamic shared memory per block; more than 48 KiB requires an opt-in.
      counters: number of block counters that the last parameter points to; 0: no such parameter.
      segments: number of kernels of a group, whose parameter is one structure of all buffer addresses; 0: no group.
      waits: whether it waits for preceding kernels by itself.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    counters: int = 0
    segments: int = 0
    waits: bool = False


def render(scheduled: ScheduledKernel) -> CudaKernel:
    """A kernel as a CUDA source with one function."""
    return render_many([scheduled])[0]


def render_many(scheduled: Sequence[ScheduledKernel]) -> list[CudaKernel]:
    """Kernels with distinct names as one source; faster to compile than several."""
    source = source_of(scheduled)
    return [
        CudaKernel(
            source,
            s.entry,
            (s.mapping.blocks, 1, 1),
            (s.mapping.block, 1, 1),
            s.shared_bytes,
            s.kernel.ends,
            len(s.segments),
            s.waits,
        )
        for s in scheduled
    ]


def function_of(scheduled: ScheduledKernel) -> str:
    """Source of one function, without its dependencies."""
    return RENDERERS[scheduled.kind](scheduled).render()


def source_of(scheduled: Sequence[ScheduledKernel]) -> str:
    """Translation unit of several functions."""
    dynamic = [_DYNAMIC] if any(s.shared_bytes for s in scheduled) else []
    text = "\n".join([*dynamic, *map(function_of, scheduled)])
    parts = [part for name, part in source_files.parts(KERNEL_PARTS).items() if name in text]
    return DEVICE.with_prelude("".join([*parts, text]))
