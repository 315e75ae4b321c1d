"""Device model: limits of CUDA devices, figures of an H200, and tuning constants that were chosen on one.

Kernels, below everything else of this backend. In: nothing. Out: ``Limits``, for which sources are generated, and
constants for decisions that must not depend on the device at hand, so that a program is planned the same wherever it is
compiled. ``driver/driver.py`` queries the device that is there.
"""

from __future__ import annotations

from typing import NamedTuple

from blufunc.kernels.machine import Machine

# -- every CUDA device (CUDA C++ Programming Guide, "Compute Capabilities") ------------------------

WARP = 32
"""Threads of a warp."""

BLOCK_LIMIT = 1024
"""Most threads of a block."""

SM_REGISTERS = 1 << 16
"""32-bit registers of an SM, and the most that a block may have."""

ACCESS_BYTES = 16
"""Bytes of the widest load or store of a thread."""

STATIC_SHARED_BYTES = 48 << 10
"""Most static shared memory of a block; a launch with more dynamic shared memory must opt in first."""

RESERVED_SHARED_BYTES = 4 << 10
"""Shared memory of a block that schedules leave to reductions and to the system."""

CLUSTER_LIMIT = 8
"""Most blocks of a cluster on every device that has clusters ("Thread Block Clusters")."""

PARAMETER_BYTES = 32764
"""Most bytes of a kernel's parameters, from compute capability 7.0 and CUDA 12.1 on."""

# -- the H200, for which constants were chosen -----------------------------------------------------

SM_COUNT = 132
"""SMs."""

SHARED_BYTES = 227 << 10
"""Most shared memory of a block."""

L2_BYTES = 50 << 20
"""L2."""

H200 = Machine("an H200", bandwidth=4.3e12, flops=3e13, products=5e13, narrow_products=7e14, launch=2e-6)
"""Rates that time is weighed against memory with."""

BANDWIDTH = 3e12
"""Bytes a second that a kernel reaches, reads and writes together."""

MATMUL, MATMUL_TF32 = 5e14, 1.9e14
"""FLOP/s that a matmul reaches, of 16-bit operands and in TF32; in float32 it is ``H200.products``."""
# measured: TF32 in gradients of weights, which are slower than other matmuls (H200)

L2_SPEEDUP = 3.0
"""How many times as fast an array is read that lies in L2."""

GEMM_SECONDS, GEMM_TILE_SECONDS = 2e-6, 0.8e-6
"""How much longer than a library's matmul ours takes, and for each tile of an SM."""
# measured: 15 % at 768 terms, 3 % at 2048, sustained; below 4096 x 3072 results GELU did not gain (H200)

EPILOGUE_RATE = 1.3e11
"""Instructions a second that the epilogue warps of an SM issue, by lane, about."""

SM_BANDWIDTH = 3e10
"""Bytes a second of one SM that reads and writes partial sums."""

COLLECTIVE_SECONDS, LINK_BANDWIDTH = 15e-6, 3e11
"""Latency of a collective, and bytes a second between two GPUs of one host."""

COLLECTIVE_SMS, COLLECTIVE_CLUSTER = 24, 4
"""SMs that NCCL occupies while a collective between H200s of one host runs, and blocks of its clusters."""

# -- thread mapping ------------------------------------------------------------------------------

BLOCK = 256
"""Threads of a block, unless lanes ask for another number."""

WARP_LANES = 1024
"""Lanes of a row up to which one warp has the row; above, a block has it."""

THREAD_VECTORS = 2
"""Vectors of a row that a thread has, about, where a block has the row."""

ROWS_THREAD_VECTORS = 4
"""The same where a block loops over long rows: reductions across fewer threads take less of its time."""

UNROLLED_VECTORS = 16
"""Vectors of a thread up to which its loop is unrolled, so that keeps lie in registers."""

KEPT_REGISTERS = 160
"""Registers of a thread that keeps may have."""

WARP_KEPT_REGISTERS = 64
"""The same where a warp has a row: with more there would be too few warps to hide latency."""

ROWS_KEPT_REGISTERS = 80
"""The same where a block loops over rows: with more, a thread has one vector of a row."""

BLOCK_KEPT_REGISTERS = 5 * SM_REGISTERS // 8
"""Registers of a block that keeps may have."""

OTHER_REGISTERS = 72
"""Registers of a thread besides keeps, about."""

REDUCTION_BLOCKS = 3
"""Blocks of an SM that only accumulate rows: each reads some rows ahead."""

VECTORS_IN_FLIGHT = 8
"""Vectors of a thread that are loaded before the first is used, where it loops over rows without reductions."""

FEW_POINTS = 2 * BLOCK * SM_COUNT
"""Points up to which one thread each leaves SMs idle: each has two blocks at the most."""

FULL_BLOCKS = 4 * SM_COUNT
"""Blocks that keep all SMs busy."""

# -- rows in shared memory -----------------------------------------------------------------------

STAGED_BYTES = 76 << 10
"""Bytes of a row from which on it is staged: of smaller rows, L2 still has most when they are read again."""

STAGING_BLOCKS = 2
"""Most blocks of an SM that stage rows vector by vector: each has all the threads that a block can have."""

CLUSTER_THREADS = {1: 512, 2: 640, 3: 512}
"""Threads of a block that stages in bulk, about, by the number of such blocks on an SM."""

PREFETCHED_ROWS = 2, 4
"""Fewest and most rows that a thread group has in flight to shared memory."""

# -- scans of columns ----------------------------------------------------------------------------

SCANNED_ROWS = 8
"""Rows that a warp reads at once."""

SCAN_WARPS = 16, 32
"""Warps of a block where every SM has a block, and where not."""

SCAN_REGISTERS = 40
"""Registers of a thread besides those of its rows."""

# -- chunks of reductions over rows and over everything --------------------------------------------

RESIDENT_BLOCKS = ((64, 8), (512, 2), (1024, 1), (2048, 3), (8192, 2))
"""Blocks of an SM that reduce rows and columns: ``(most lanes, blocks)``, 1 beyond the last."""

CROWDED_BLOCKS = 4
"""Blocks of an SM that have a row each, where a warp would have one if it had registers for the keeps."""

CHUNK_ROWS = 64, 1024
"""Fewest and most rows of a chunk: a block takes 16 at a time and reads some of each thread's ahead."""

CHUNK_TILES = 384
"""Chunks of tiles that keep all SMs busy, down to the fewest rows of a chunk."""

TOTAL_CHUNKS, TOTAL_CHUNK = 8 * SM_COUNT, 1 << 13
"""Most chunks of a reduction of an array to a scalar, and fewest elements of one."""

WIDE_TILE_ELEMENTS = 1 << 23
"""Elements from which on wider tiles are worth a launch that finishes them."""

FINISH_BYTES = 96 << 10
"""Bytes of partial results that the last block of a tile reduces in the time of another launch."""

ROW_KEEP_BYTES = 4 * SM_REGISTERS // 2
"""Bytes of a row that a block keeps: half of an SM's registers, or shared memory."""


class Limits(NamedTuple):
    """Limits of a device that generated sources depend on.

    Attributes:
      shared_bytes: most shared memory of a block.
      cluster: most blocks of a cluster; 1: the device has no clusters.
    """

    shared_bytes: int = SHARED_BYTES
    cluster: int = CLUSTER_LIMIT

    @property
    def bulk(self) -> bool:
        """Whether one instruction copies many bytes to shared memory: devices with clusters have it."""
        return self.cluster > 1


HOPPER = Limits()
"""Limits of the H200."""


def limits_of(capability: tuple[int, int], shared_bytes: int) -> Limits:
    """The limits of a device of a compute capability, with its most shared memory of a block in bytes."""
    return Limits(shared_bytes, CLUSTER_LIMIT if capability >= (9, 0) else 1)
