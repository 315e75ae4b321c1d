"""A product of matrices on Hopper whose results other warps take up: text for kernels of a product and more.

Kernels, stage 6, below ``gelu_gemm_source`` and ``softmax_gemm_source``. As an epilogue, what is computed of a
product's results costs a library a third of the product, for products wait for it. Here a block has warps for each: one
copies tiles of both factors to a ring of stages (TMA), two groups of four multiply and leave 128 x COLUMNS results,
rounded, in shared memory, and seven others, called active, compute what is wanted of these while the groups are at the
next tile. Two blocks, a cluster, have rows below each other and share the columns of the right factor: each copies a
half of them to both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from blufunc.kernels.backends.cuda.driver.tensor_map import Box
from blufunc.kernels.backends.cuda.library import mma_source, tma_source

ROWS, COLUMNS = 128, 192
"""Of a tile. Sums of more columns leave no registers for the active warps."""

ACTIVE = 7
"""Warps that take up results."""

VECTOR = 8
"""Rows of factors and results begin at multiples of so many elements: 16 bytes."""

TERMS = 64
"""Of a stage."""

_STAGES = 4


@dataclass(frozen=True)
class TileProduct:
    """Sizes: (m, k) by (k, n).

    Attributes:
      by_rows: whether the right factor's terms lie side by side, and not its columns.
      cluster: how many blocks share columns.
    """

    m: int
    n: int
    k: int
    by_rows: bool
    cluster: int = 2

    threads: ClassVar[int] = 512
    active_bytes: ClassVar[int] = 0
    """Of shared memory, that active warps want for themselves."""

    @property
    def bands(self) -> int:
        """How many tiles of a cluster are below each other."""
        return self.m // (ROWS * self.cluster)

    @property
    def columns(self) -> int:
        """How many tiles are beside each other; the last may be cut off."""
        return -(-self.n // COLUMNS)

    @property
    def whole(self) -> bool:
        """Whether rows are those of whole tiles, and terms those of whole stages."""
        return self.k > 0 and not (self.m % (ROWS * self.cluster) or self.k % TERMS)

    def grid(self, multiprocessors: int) -> int:
        """How many blocks there are on a device: a cluster for each tile of one; with fewer, each has several."""
        return self.cluster * min(multiprocessors // self.cluster, self.bands * self.columns)

    @property
    def shared_bytes(self) -> int:
        """Of a block: stages, a tile whose rows begin in other banks each, barriers, and what active warps want."""
        tile = ROWS * (2 * COLUMNS + 16)
        return _STAGES * (ROWS + COLUMNS) * 2 * TERMS + tile + 8 * (2 * _STAGES + 2) + self.active_bytes

    def boxes(self, row: int, other_row: int) -> tuple[Box, Box]:
        """What is copied of both factors at a time, whose rows (of the right one: or terms) are so many bytes apart."""
        left = Box((self.k, 1, self.m, 1), (row,) * 3, (TERMS, 1, ROWS, 1))
        (size, rows), part = ((self.k, self.n), COLUMNS) if self.by_rows else ((self.n, self.k), TERMS)
        return left, Box((size, 1, rows, 1), (other_row,) * 3, (64, 1, part // self.cluster, 1))


class Parts(NamedTuple):
    """What makes a kernel of a product and more, as text.

    Attributes:
      entry: its name.
      parameters: behind those for the factors' tensor maps.
      active: what an active warp does with one tile. It is warp ``mine`` of ``ACTIVE``; the tile has ``ROWS`` rows from
        ``band * ROWS`` on and columns from ``column`` on. Behind ``wait_for(left, turn)`` its rows are ``PITCH`` bytes
        apart in ``shared_memory + TILE``; what has been read is given back by ``arrive(taken)``, once for each warp.
      before: functions that it calls.
      ahead: what the copying warp does before it copies a tile.
      added: what groups add to a thread's results ``c`` before they are rounded.
      begin: what all threads do first; they may end there.
      wanted: whether a ``tile`` is computed at all.
      bands: how many tiles of a cluster below each other have their turns at a column: what those read of the right
        factor is in the second-level cache then, all of which it may not hold.
    """

    entry: str
    parameters: str
    active: str
    before: str = ""
    ahead: str = ""
    added: str = ""
    begin: str = ""
    wanted: str = "true"
    bands: int = 1


def instructions(p: TileProduct) -> str:
    """What is not C++."""
    return (
        mma_source.shared_instructions("bfloat16", COLUMNS, (False, not p.by_rows))
        + tma_source.INSTRUCTIONS
        + _INSTRUCTIONS
    )


def source(p: TileProduct, parts: Parts, **flags: bool) -> str:
    """The complete CUDA C++ of one product."""
    numbers = {
        "M": p.m, "N": p.n, "K": p.k, "ROWS": ROWS, "COLUMNS": COLUMNS, "TERMS": TERMS, "STAGES": _STAGES,
        "ACTIVE": ACTIVE, "THREADS": p.threads, "CLUSTER": p.cluster, "BANDS": parts.bands,
    }  # fmt: skip
    head = "".join(f"constexpr int {name} = {value};\n" for name, value in numbers.items())
    for name, value in {"BY_ROWS": p.by_rows, **flags}.items():
        head += f"constexpr bool {name} = {str(value).lower()};\n"
    text = _KERNEL
    for name, part in parts._asdict().items():
        text = text.replace(f"@{name}@", str(part).strip("\n"))
    clustered = f"__cluster_dims__({p.cluster}, 1, 1)" if p.cluster > 1 else ""
    return head + instructions(p) + text.replace("CLUSTERED", clustered)


_INSTRUCTIONS = r"""
// a box to the same place of all blocks of the cluster, whose barriers there count the bytes
inline void copy_box_to_all(unsigned to, const TensorMap &map, int i0, int i2, barrier *b) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, 0, %3, 0}], [%4], %5;"
               :: "r"(to), "l"(&map), "r"(i0), "r"(i2), "r"(shared_address(b)), "h"((short)((1 << CLUSTER) - 1))
               : "memory");
}
// at the barrier in the same place of another block of the cluster
inline void arrive_at(barrier *b, unsigned block) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" :: "r"(shared_address(b)), "r"(block) : "memory");
}
inline unsigned block_of_cluster() {
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
inline void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// of both halves
inline unsigned larger_of_two(unsigned x, unsigned y) {
  unsigned r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
"""

_KERNEL = r"""
typedef unsigned short element;  // of bfloat16
constexpr unsigned A_BYTES = ROWS * 2 * TERMS, B_BYTES = COLUMNS * 2 * TERMS, STAGE = A_BYTES + B_BYTES;
constexpr unsigned PITCH = COLUMNS * 2 + 16, TILE = STAGES * STAGE;  // of the results' rows, and where they are
constexpr int TILES_M = M / (ROWS * CLUSTER), TILES_N = (N + COLUMNS - 1) / COLUMNS, TILES = TILES_M * TILES_N;
constexpr int WORDS = COLUMNS / 64;  // of two elements, that a lane has of a row
extern __shared__ __align__(1024) unsigned char shared_memory[];

struct Tile { int band, column; };  // of a cluster
inline Tile tile_of(int i) {
  const int above = i / (BANDS * TILES_N) * BANDS, within = i % (BANDS * TILES_N), bands = min(BANDS, TILES_M - above);
  return {above + within % bands, within / bands};
}

// 16 terms of a tile whose panels of 64 rows or columns are 8 KB apart
inline unsigned long long described(unsigned at) {
  return 1ull << 62 | 512ull << 16 | 64ull << 32 | (at & 0x3ffff) >> 4;
}
@before@
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
@entry@(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, @parameters@) {
@begin@
  const unsigned stages = shared_address(shared_memory);
  barrier *const full = (barrier *)(shared_memory + TILE + ROWS * PITCH), *const empty = full + STAGES,
                 *const left = empty + STAGES, *const taken = left + 1;
  const unsigned block = block_of_cluster();
  const int warp = threadIdx.x / 32, group = warp / 4, lane = threadIdx.x % 32;
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) make_barrier(full + i, 1), make_barrier(empty + i, 8 * CLUSTER);
    make_barrier(left, 8);
    make_barrier(taken, ACTIVE);
    barriers_made();
  }
  meet_cluster();

  if (group < 2) {  // products
    take_registers<152>();
    int stage = 0, phase = 0, turn = 1;
    for (int i = first; i < TILES; i += stride) {
      const Tile tile = tile_of(i);
      if (!(@wanted@)) continue;
      float c[COLUMNS / 8][4];
      int before = 0;
      for (int step = 0; step < K / TERMS; ++step) {
        wait_for(full + stage, phase);
        const unsigned at = stages + stage * STAGE;
        begin_products();
#pragma unroll
        for (int k = 0; k < TERMS / 16; ++k)
          multiply(c, described(at + group * 8192 + k * 32),
                   described(at + A_BYTES + k * (BY_ROWS ? 32 : 2048)), step || k);
        end_of_products();
        if (step) {
          wait_for_groups<1>();
          if (lane < CLUSTER) arrive_at(empty + before, lane);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      wait_for_groups<0>();
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; ++j) settle(c[j / 4][j % 4]);
      if (lane < CLUSTER) arrive_at(empty + before, lane);
@added@
      wait_for(taken, turn);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned char *to = shared_memory + TILE + (warp * 16 + half * 8 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) *(unsigned *)(to + j * 16) = pack(c[j][half * 2], c[j][half * 2 + 1]);
      }
      __syncwarp();
      if (lane == 0) arrive(left);
      turn ^= 1;
    }
  } else {
    leave_registers<104>();
    if (warp == 8 + ACTIVE) {  // copies
      int stage = 0, phase = 1;
      for (int i = first; i < TILES; i += stride) {
        const Tile tile = tile_of(i);
        if (!(@wanted@)) continue;
        const int row = (tile.band * CLUSTER + block) * ROWS, column = tile.column * COLUMNS;
@ahead@
        for (int step = 0; step < K / TERMS && lane == 0; ++step) {
          const unsigned to = stages + stage * STAGE;
          wait_for(empty + stage, phase);
          expect_bytes(full + stage, STAGE);
          copy_box(to, a, step * TERMS, 0, row, 0, full + stage);
          if constexpr (BY_ROWS) {
            const int mine = block * (COLUMNS / CLUSTER);
            copy_box_to_all(to + A_BYTES + mine * 128, b, step * TERMS, column + mine, full + stage);
          } else {
            const int mine = block * (TERMS / CLUSTER);
#pragma unroll
            for (int panel = 0; panel < COLUMNS / 64; ++panel)
              copy_box_to_all(to + A_BYTES + panel * 8192 + mine * 128, b, column + panel * 64, step * TERMS + mine,
                              full + stage);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        __syncwarp();
      }
    } else {
      const int mine = warp - 8;
      int turn = 0;
      for (int i = first; i < TILES; i += stride) {
        const Tile tile = tile_of(i);
        if (!(@wanted@)) continue;
        const int band = tile.band * CLUSTER + block, column = tile.column * COLUMNS;
@active@
        turn ^= 1;
      }
    }
  }
  meet_cluster();  // no block ends while others arrive at its barriers
}
"""
