"""LoopIR as CUDA C++, complete: sources to compile, and how what is in them is launched.

Kernels, end of stage 6. In: kernels. Out: a ``CudaKernel`` each, for ``nvrtc.py`` and the executor; kernels that do the
same to many small arrays become one. ``cuda_style.py`` writes the functions. Here too is what a lowering should know of
the machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from blufunc.kernels import cuda_prelude
from blufunc.kernels.cuda_column_scans import ColumnStyle, scans_columns
from blufunc.kernels.cuda_group_style import GroupStyle
from blufunc.kernels.cuda_limits import HOPPER, SM_COUNT, Limits
from blufunc.kernels.cuda_row_passes import ONLINE
from blufunc.kernels.cuda_schedule import KEPT_REGISTERS, WARP_LANES
from blufunc.kernels.cuda_style import DYNAMIC, CudaKernel, CudaStyle
from blufunc.kernels.cuda_tile_style import TileStyle, turned_loads
from blufunc.kernels.loopir import Kernel
from blufunc.kernels.target import Target

_ALL = 1 << 62

CUDA = Target(
    chunks=lambda rows, lanes: min(rows, SM_COUNT * _resident(lanes)),
    total_chunks=lambda size: _even_chunks(size, 8 * SM_COUNT, 1 << 13),
    tile_chunks=lambda rows, tiles: -(-rows // _rows_of_chunk(rows, tiles)),
    crowding=lambda lanes, kept: _CROWDED // _resident(lanes) if _is_crowded(lanes, kept) else 1,
    summed_lanes=1 << 14,
    interleaved=True,
    finish_bytes=96 << 10,
    keep_bytes=1 << 17,
    keep_loads=True,
    tile=64,
    scan_tile=_ALL,
    wide_tile=lambda elements: 256 if elements >= _MANY else 64,
    group=True,
    recompute=True,
)
"""As many blocks as the multiprocessors hold at a time. What a row keeps is registers of 1024 threads at the most; of
longer rows, shared memory or the second-level cache has what was read. What the last block of a tile adds up, it reads
in the time that another launch would take. Columns that are scanned ``cuda_column_scans.py`` deals out to blocks."""


_ROUND = """
// the upper half of a pair of bfloat16, the lower one 0, is a float already
template<> inline float round_to<bf16>(float x) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(0.0f));
  return __uint_as_float(r);
}
"""

_PARTS = {"take_up": ONLINE, "round_to<bf16>": _ROUND}
"""What a source needs beside the prelude, if it has this in its text."""


def _rows_of_chunk(rows: int, tiles: int) -> int:
    """As many rows of a tile for one block as leave work for all multiprocessors."""
    least, most = _CHUNK_ROWS
    while most > least and tiles * -(-rows // most) < 384:
        most //= 2
    return most


_MANY = 1 << 23
"""From how many elements on wider tiles are worth a launch that finishes them."""

_CHUNK_ROWS = 64, 1024
"""The fewest and the most: a block takes 16 at a time, and reads some of each thread's ahead."""


def _resident(lanes: int) -> int:
    """About how many blocks that reduce rows of so many lanes, and columns too, a multiprocessor holds at a time."""
    return next((blocks for most, blocks in _RESIDENT if lanes <= most), 1)


def _is_crowded(lanes: int, kept: int) -> bool:
    """Whether a warp could do a row of so many lanes, if it had registers for what is kept of each: a block does it."""
    return lanes <= WARP_LANES and -(-lanes // 32) * kept > KEPT_REGISTERS


_CROWDED = 4
"""How many of these blocks a multiprocessor is to have."""

_RESIDENT = ((64, 8), (512, 2), (1024, 1), (2048, 3), (8192, 2))


def _even_chunks(size: int, most: int, least: int) -> int:
    """A number of chunks of at least ``least`` elements, if there is one that divides ``size`` in multiples of 8."""
    wanted = max(1, min(most, size // least))
    even = (n for n in range(wanted, wanted // 2, -1) if size % n == 0 and size // n % 8 == 0)
    return next(even, wanted)


def render(kernel: Kernel, name: str | None = None, aliased: Collection[str] = ()) -> CudaKernel:
    """A kernel as a CUDA source with one function.

    Args:
      kernel: what to write.
      name: another name for it.
      aliased: names of input buffers that, in the launches to come, may lie where an output does.
    """
    return render_many([kernel if name is None else renamed(kernel, name)], [aliased])[0]


def render_many(
    kernels: Sequence[Kernel],
    aliased: Sequence[Collection[str]] | None = None,
    limits: Limits = HOPPER,
) -> list[CudaKernel]:
    """The same of several kernels, which share one source: that compiles much faster than as many.

    Their names differ. ``limits`` are the device's.
    """
    given = aliased or [()] * len(kernels)
    writers = [writer_of(k, a, limits) for k, a in zip(kernels, given, strict=True)]
    source = source_of(writers)
    return [w.made(source) for w in writers]


def render_group(
    kernels: Sequence[Kernel], name: str | None = None, aliased: Collection[str] = ()
) -> CudaKernel:
    """Kernels of equal structure as one launch.

    Args:
      kernels: of one ``group_key``, and no more than ``group_limit`` allows.
      name: of the function; that of the first kernel if it is not given.
      aliased: names of input buffers of the first kernel that in any of the kernels may lie where an output does.
    """
    writer = GroupStyle(kernels, name or kernels[0].name, aliased)
    return writer.made(source_of([writer]))


def writer_of(kernel: Kernel, aliased: Collection[str] = (), limits: Limits = HOPPER) -> CudaStyle:
    """What writes a kernel."""
    style = TileStyle if turned_loads(kernel) else ColumnStyle if scans_columns(kernel) else CudaStyle
    return style(kernel, aliased, limits)


def source_of(writers: Sequence[CudaStyle]) -> str:
    """The translation unit of some functions."""
    functions = [w.render() for w in writers]
    dynamic = [DYNAMIC] if any(w.shared_bytes for w in writers) else []
    text = "\n".join([*dynamic, *functions])
    parts = [part for mark, part in _PARTS.items() if mark in text]
    return cuda_prelude.with_prelude("".join([*parts, text]))


def renamed(kernel: Kernel, name: str) -> Kernel:
    """The same kernel under another name."""
    return replace(kernel, name=name)
