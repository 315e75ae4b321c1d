"""Device model: limits of CUDA devices, figures of an H200, tuning constants.

Kernels, below everything else of this backend. In: nothing. Out: ``Limits``, for which sources are generated, and
constants chosen on an H200. Decisions use these instead of the device at hand, so plans are the same wherever they are
compiled. ``driver/driver.py`` queries the actual device.
"""

from __future__ import annotations

from typing import NamedTuple

from blufunc.kernels.machine import Machine

# -- every CUDA device (CUDA C++ Programming Guide, "Compute Capabilities") ------------------------

WARP = 32
"""Threads per warp."""

BLOCK_LIMIT = 1024
"""Maximum threads per block."""

SM_REGISTERS = 1 << 16
"""32-bit registers per SM, also the maximum per block."""

ACCESS_BYTES = 16
"""Bytes of the widest load or store of a thread."""

STATIC_SHARED_BYTES = 48 << 10
"""Maximum static shared memory per block; dynamic beyond this needs an opt-in."""

RESERVED_SHARED_BYTES = 4 << 10
"""Shared memory per block reserved for reductions and the system."""

LINE_BYTES = 128
"""Bytes of a line of L1, which serves one line per cycle."""

CLUSTER_LIMIT = 8
"""Maximum blocks per cluster on every device with thread block clusters."""

PARAMETER_BYTES = 32764
"""Maximum bytes of kernel parameters, from compute capability 7.0 and CUDA 12.1."""

# -- the H200, for which constants were chosen -----------------------------------------------------

SM_COUNT = 132
"""Number of SMs."""

SHARED_BYTES = 227 << 10
"""Maximum shared memory per block."""

L2_BYTES = 50 << 20
"""Bytes of L2."""

H200 = Machine(
    "an H200",
    bandwidth=4.3e12,
    flops=3e13,
    products=5e13,
    narrow_products=7e14,
    launch=2e-6,
    host_link=5e10,
    copy=5e-6,
)
"""Rates that weigh time against memory."""
# not measured: host_link, of PCIe 5.0 x16's 63 GB/s each way, and copy; benchmarks/suites/offload.py prints them

CLOCK = 1.755e9
"""Cycles of an SM per second."""

BANDWIDTH = 3e12
"""Attained bytes per second of a kernel, reads plus writes."""

MATMUL, MATMUL_TF32 = 5e14, 1.9e14
"""Attained FLOP/s of 16-bit and TF32 matmuls; float32: ``H200.products``."""
# measured: TF32 in gradients of weights, which are slower than other matmuls (H200)

L2_SPEEDUP = 3.0
"""Speedup of reads that hit L2."""

GEMM_SECONDS, GEMM_TILE_SECONDS = 2e-6, 0.3e-6
"""Extra time of our GEMM over the library's: per call, and per tile of an SM."""

GEMM_ROWS, GEMM_COLUMNS = 128, ((256, 1.0), (128, 0.75), (64, 0.4))
"""Rows of a GEMM's tile; its columns, with their rate relative to the widest."""

GEMM_WAVE_SECONDS = 2e-6
"""Latency of a wave of the widest tiles; an SM hides it with narrower ones."""
# measured: bf16 8192 x 2048 x 512 and 2048 x 512 x 8192, 54 and 75 us; the model says 47 and 66 (H100, 2026-11-28)

HIDDEN_OPERATIONS, EPILOGUE_RATE = 25, 3.1e10
"""Free operations per element of a GEMM epilogue; others per second and SM."""
# measured: benchmarks/suites/gemm_epilogues.py, 10 epilogues of 6 to 56 operations, 8 shapes (H200, 2026-11-24)

SM_BANDWIDTH = 3e10
"""Bytes per second of one SM that reads and writes partial sums."""

COLLECTIVE_SECONDS, LINK_BANDWIDTH = 15e-6, 3e11
"""Latency of a collective, and bytes per second between two GPUs of one host."""

COLLECTIVE_SMS, COLLECTIVE_CLUSTER = 24, 4
"""SMs and blocks per cluster of an NCCL collective between H200s of one host."""

# -- thread mapping ------------------------------------------------------------------------------

BLOCK = 256
"""Default threads per block."""

WARP_LANES = 1024
"""Maximum lanes of a row for one warp per row; longer rows get a block."""

THREAD_CYCLES = 28
"""Cycles of an SM for the start of a warp, its indices and addresses."""
# measured: pools of 2 x 2 and 3 x 3, strides 1 and 2, bf16[64, 64, 112, 112], by 1 to 8 elements (H100, 2026-11-27)

AHEAD_BYTES = 4 << 20
"""Maximum bytes of the arrays of a kernel that begins ahead.

They take 2 us at the bandwidth of memory, the time of a launch; of more, the launch is a small part.
"""

THREAD_VECTORS = 2
"""Approximate vectors per thread where a block has one row."""

ROWS_THREAD_VECTORS = 4
"""Vectors per thread where a block loops over long rows, to shorten reductions."""

ROW_OPERATIONS = 256
"""Operations per thread that hide the loads of a row that all threads read."""

UNROLLED_VECTORS = 16
"""Maximum vectors per thread for an unrolled loop, which holds keeps in registers."""

KEPT_REGISTERS = 160
"""Maximum registers per thread for keeps."""

WARP_KEPT_REGISTERS = 64
"""The same with a warp per row: more would leave too few warps to hide latency."""

ROWS_KEPT_REGISTERS = 80
"""The same where a block loops over rows: more leaves one vector per thread."""

BLOCK_KEPT_REGISTERS = 5 * SM_REGISTERS // 8
"""Maximum registers per block for keeps."""

OTHER_REGISTERS = 72
"""Approximate registers per thread besides keeps."""

REDUCTION_BLOCKS = 3
"""Blocks per SM that only accumulate rows; each prefetches some rows."""

VECTORS_IN_FLIGHT = 8
"""Vectors per thread in flight in loops over rows without reductions."""

FEW_POINTS = 2 * BLOCK * SM_COUNT
"""Maximum points for one per thread: SMs would idle, with two blocks at most."""

FULL_BLOCKS = 4 * SM_COUNT
"""Blocks that fill all SMs."""

# -- rows in shared memory -----------------------------------------------------------------------

STAGED_BYTES = 76 << 10
"""Minimum bytes of a row to stage; smaller rows mostly stay in L2 until reread."""

STAGING_BLOCKS = 2
"""Maximum blocks per SM that stage vector by vector, with maximum threads each."""

CLUSTER_THREADS = {1: 512, 2: 640, 3: 512}
"""Approximate threads of a bulk-staging block, by number of such blocks per SM."""

PREFETCHED_ROWS = 2, 4
"""Minimum and maximum rows in flight to shared memory per thread group."""

# -- scans of columns ----------------------------------------------------------------------------

SCANNED_ROWS = 8
"""Rows that a warp reads at once."""

SCAN_WARPS = 16, 32
"""Warps per block: with a block on every SM, and with fewer blocks."""

SCAN_REGISTERS = 40
"""Registers per thread besides those of its rows."""

# -- chunks of reductions over rows and over everything --------------------------------------------

RESIDENT_BLOCKS = ((64, 8), (512, 2), (1024, 1), (2048, 3), (8192, 2))
"""Blocks per SM that reduce rows and columns: ``(maximum lanes, blocks)``, then 1."""

CROWDED_BLOCKS = 4
"""Blocks per SM with a row each, where registers rule out a warp per row."""

CHUNK_ROWS = 64, 1024
"""Minimum and maximum rows per chunk: a block takes 16 at a time and prefetches."""

CHUNK_TILES = 384
"""Chunks of tiles that fill all SMs, subject to the minimum rows per chunk."""

TOTAL_CHUNKS, TOTAL_CHUNK = 8 * SM_COUNT, 1 << 13
"""Maximum chunks of a full reduction, and minimum elements of one."""

WIDE_TILE_ELEMENTS = 1 << 23
"""Minimum elements for wider tiles, which cost one more launch."""

FINISH_BYTES = 96 << 10
"""Bytes of partials that a tile's last block reduces in the time of a launch."""

ROW_KEEP_BYTES = 4 * SM_REGISTERS // 2
"""Maximum bytes of a row in a block: half an SM's registers, or shared memory."""


class Limits(NamedTuple):
    """Limits of a device that generated sources depend on.

    Attributes:
      shared_bytes: maximum shared memory per block.
      cluster: maximum blocks per cluster; 1 without cluster support.
    """

    shared_bytes: int = SHARED_BYTES
    cluster: int = CLUSTER_LIMIT

    @property
    def bulk(self) -> bool:
        """True if the device has bulk copies to shared memory, as with clusters."""
        return self.cluster > 1


HOPPER = Limits()
"""Limits of the H200."""


def limits_of(capability: tuple[int, int], shared_bytes: int) -> Limits:
    """Limits by compute capability and maximum shared memory per block in bytes."""
    return Limits(shared_bytes, CLUSTER_LIMIT if capability >= (9, 0) else 1)
