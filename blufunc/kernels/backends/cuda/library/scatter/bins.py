"""Scatters of many scalars into few bins: histograms, counts, sums of segments.

Kernels, stage 8, below ``op.py``. In: sizes and dtypes of a scatter. Out: two launches. Each warp combines a part of
the updates into bins of its own in shared memory, a block those of its warps, and the second launch those of all
blocks.
Sums of floats have one shape, whatever the scheduling: parts depend on the number of updates alone, and lanes that have
the same bin combine along a tree of their ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda import device_model
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.library.scatter import common
from blufunc.kernels.backends.cuda.library.scatter.common import Own
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.loopir.ir import identity

WARPS = 8
GROUPS = 16
_SHARED_BYTES = 192 << 10  # of an SM, for all bins
_BLOCK_BYTES = 96 << 10  # of a block, on any architecture
_LEAST_WARPS = 8  # of an SM: fewer leave it idle while they wait
_MOST_WARPS = 64
_PART = 512  # fewest updates of a warp
UPDATES_PER_BIN = 8  # fewest: bins are initialized and combined once per warp

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}

_FILE = "backends/cuda/include/scatter_bins.cuh"


def suits(how: str, dtype: np.dtype, n: int, height: int, width: int) -> bool:
    """True if the bins of a scatter fit, and updates are many enough to pay for them."""
    return fits(how, dtype, height, width) and n >= max(_PART, UPDATES_PER_BIN * height)


def fits(how: str, dtype: np.dtype, height: int, width: int) -> bool:
    """True if the warps of an SM have room for bins."""
    if width != 1 or how not in _REDUCTIONS or dtypes.is_complex(dtype) or common.wide(dtype).itemsize < 4:
        return False
    return _warps(dtype, height) >= _LEAST_WARPS


def _warps(dtype: np.dtype, height: int) -> int:
    """Warps of an SM that bins have shared memory for, whole blocks of them."""
    bins = height * common.wide(dtype).itemsize
    if WARPS * bins > _BLOCK_BYTES:
        return 0
    return min(_MOST_WARPS, _SHARED_BYTES // bins) // WARPS * WARPS


class Bins:
    """Scatter of ``n`` scalars into ``height`` bins; ``Args`` as of ``rows.Rows``."""

    def __init__(
        self, how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, device: int,
        own: Own, clip: bool = False,
    ):  # fmt: skip
        functions = _functions(how, dtype, index.name, clip, device)
        wide = common.wide(dtype)
        blocks = _warps(dtype, height) // WARPS * device_model.SM_COUNT
        blocks = max(1, min(blocks, n // (_PART * WARPS)))
        each = -(-n // (blocks * WARPS))
        self._partials = own((blocks * height,), wide)
        sizes = (np.int32(n), np.int32(each), np.int32(height))
        shared = WARPS * height * wide.itemsize
        args = (0, 0, self._partials.ptr, *sizes)
        self._parts: driver.Launch = functions["combine_parts"].prepare(
            (blocks,), (32 * WARPS,), shared, args
        )
        more = (0, self._partials.ptr, 0, np.int32(blocks), np.int32(height))
        grid = (-(-height // 32),)
        self._blocks: driver.Launch = functions["combine_blocks"].prepare(grid, (32 * GROUPS,), 0, more)

    def __call__(self, x: int, rows: int, updates: int, out: int, stream: Any) -> None:
        """Put the launches on a stream; the arrays are given by their addresses."""
        for launch, i, address in (
            (self._parts, 0, rows),
            (self._parts, 1, updates),
            (self._blocks, 0, x),
            (self._blocks, 2, out),
        ):
            launch.arguments.set_pointer(i, address)
        self._parts(stream.ptr)
        self._blocks(stream.ptr)


def texts(how: str, dtype: np.dtype, index: np.dtype, clip: bool) -> list[modules.Text]:
    """The source that ``Bins`` compiles, and its name."""
    return [(source(how, dtype, index.name, clip), f"scatter_bins_{how}")]


def source(how: str, dtype: np.dtype, index: str, clip: bool) -> str:
    """CUDA C++ of the kernels for a reduction, a dtype, and an index dtype."""
    return part("few bins", how, dtype, index, CLIP=clip)


def part(name: str, how: str, dtype: np.dtype, index: str, **constants: source_files.Constant) -> str:
    """CUDA C++ of a part of the kernels, with what it calls."""
    wide = common.wide(dtype)
    start = (
        "-0.0f"
        if how == "add" and wide == np.float32
        else "-0.0"
        if how == "add" and wide == np.float64
        else ""
    )
    start = start or scalar_ops.literal(identity(_REDUCTIONS[how], wide), wide)
    declared = common.types(index, dtype, WARPS=WARPS, GROUPS=GROUPS, **constants)
    macros = {**common.macros(how, dtype), "IDENTITY": start}
    return DEVICE.with_prelude(declared + source_files.source(_FILE, "warps", name, **macros))


@functools.lru_cache(64)
def _functions(how: str, dtype: np.dtype, index: str, clip: bool, device: int) -> dict[str, Any]:
    module = modules.module(source(how, dtype, index, clip), device, f"scatter_bins_{how}")
    return {name: module.kernel(name) for name in ("combine_parts", "combine_blocks")}
