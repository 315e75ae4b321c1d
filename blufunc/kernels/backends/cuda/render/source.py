"""Scheduled kernels as CUDA C++: complete sources, and how their functions are launched.

Kernels, end of stage 6. In: ``ScheduledKernel``s. Out: a ``CudaKernel`` each, for ``driver/nvrtc.py`` and the
executor. Rendering is a pure function of a ``ScheduledKernel``: each kind has a renderer, and none decides anything.
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
from blufunc.kernels.codegen.prelude import DEVICE

RENDERERS: dict[Kind, type[CudaWriter]] = {
    "points": KernelRenderer,
    "lanes": KernelRenderer,
    "column scan": ColumnScanRenderer,
    "transpose": TransposeRenderer,
    "group": GroupRenderer,
}

_DYNAMIC = "extern __shared__ __align__(128) unsigned char shared_memory[];"
# measured: where a copied row is not aligned to sectors as the row is, it takes a tenth more time

_FILE = "backends/cuda/include/kernel_parts.cuh"
"""Functions that precede a source which contains the name of their part."""


@dataclass(frozen=True)
class CudaKernel:
    """A kernel as CUDA C++, and how to launch it.

    Attributes:
      source: a complete translation unit.
      entry: the name of the ``extern "C" __global__`` function.
      grid: blocks along x, y and z; where one is 0 there is nothing to launch.
      block: threads of a block along x, y and z.
      shared_bytes: dynamic shared memory of a block; beyond 48 KiB the driver must be told.
      counters: the number of counters of finished blocks that the last parameter points to; 0: no such parameter.
      segments: the number of kernels of a group; its parameter is one structure, of the addresses of the buffers of
        each. 0: no group.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    counters: int = 0
    segments: int = 0


def render(scheduled: ScheduledKernel) -> CudaKernel:
    """A kernel as a CUDA source with one function."""
    return render_many([scheduled])[0]


def render_many(scheduled: Sequence[ScheduledKernel]) -> list[CudaKernel]:
    """Kernels of different names as one source, which compiles much faster than one source each."""
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
        )
        for s in scheduled
    ]


def function_of(scheduled: ScheduledKernel) -> str:
    """The source of one function, without what it needs."""
    return RENDERERS[scheduled.kind](scheduled).render()


def source_of(scheduled: Sequence[ScheduledKernel]) -> str:
    """The translation unit of some functions."""
    dynamic = [_DYNAMIC] if any(s.shared_bytes for s in scheduled) else []
    text = "\n".join([*dynamic, *map(function_of, scheduled)])
    parts = [part for name, part in source_files.parts(_FILE).items() if name in text]
    return DEVICE.with_prelude("".join([*parts, text]))
