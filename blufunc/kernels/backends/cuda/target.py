"""CUDA: the target that lowering consults for a GPU.

Kernels, stage 5, above the device model. ``program.py`` adds what its library kernels can do.
"""

from __future__ import annotations

from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.device_model import WARP
from blufunc.kernels.target import Target

_ALL = 1 << 62


def _chunk_rows(rows: int, tiles: int) -> int:
    """The rows of a tile for one block: as many as leave work for all SMs."""
    fewest, most = device.CHUNK_ROWS
    while most > fewest and tiles * -(-rows // most) < device.CHUNK_TILES:
        most //= 2
    return most


def _resident(lanes: int) -> int:
    """Blocks of an SM that reduce rows of ``lanes`` lanes, and columns too, about."""
    return next((blocks for most, blocks in device.RESIDENT_BLOCKS if lanes <= most), 1)


def _crowding(lanes: int, kept: int) -> int:
    """Factor for the number of row chunks where a row needs the registers of a block."""
    crowded = lanes <= device.WARP_LANES and -(-lanes // WARP) * kept > device.KEPT_REGISTERS
    return device.CROWDED_BLOCKS // _resident(lanes) if crowded else 1


def _even_chunks(size: int) -> int:
    """Number of chunks, which divide an array in multiples of 8 elements if possible."""
    wanted = max(1, min(device.TOTAL_CHUNKS, size // device.TOTAL_CHUNK))
    even = (n for n in range(wanted, wanted // 2, -1) if size % n == 0 and size // n % 8 == 0)
    return next(even, wanted)


CUDA = Target(
    chunks=lambda rows, lanes: min(rows, device.SM_COUNT * _resident(lanes)),
    total_chunks=_even_chunks,
    tile_chunks=lambda rows, tiles: -(-rows // _chunk_rows(rows, tiles)),
    crowding=_crowding,
    summed_lanes=1 << 14,
    interleaved=True,
    finish_bytes=device.FINISH_BYTES,
    keep_bytes=device.ROW_KEEP_BYTES,
    keep_loads=True,
    tile=64,
    scan_tile=_ALL,
    wide_tile=lambda elements: 256 if elements >= device.WIDE_TILE_ELEMENTS else 64,
    generated_columns=True,
    joined_parts=True,
    group=True,
    recompute=True,
)
"""The target of lowering, without library kernels.

Chunks are as many blocks as all SMs hold at a time. Rows longer than what a block keeps are reread from shared memory
or L2. Scanned columns are not cut: ``schedule/thread_mapping.py`` assigns them to blocks.
"""
