"""The text of a product of matrices and GELU, or its derivative, on Hopper: all of it in one kernel.

Kernels, stage 6, below ``cuda_gelu_step``. As epilogues, activations cost a library a third of a product, for products
wait for them. Here a block has warps for each: one copies tiles of both factors to a ring of stages (TMA), two groups
of four multiply and leave 128 x COLUMNS results, rounded, in shared memory, and seven others compute the activation of
these while the groups are at the next tile. Two blocks, a cluster, have rows below each other and share the columns of
the right factor: each copies a half of them to both.

Results are, of ``t`` the product, rounded to bfloat16:

    GELU:            x = t + bias, and y = GELU(x)
    its derivative:  d = t GELU'(x), and the sums of d over ROWS rows, which whoever wants that over all rows adds up,
                     and GELU(x) again, for whoever did not keep it: bit for bit the y that was made with this x

GELU is ``x s`` with ``s = 1 / (1 + exp(-2 u))`` and ``u = sqrt(2 / pi) (x + 0.044715 x^3)``, which is its form with the
hyperbolic tangent (Hendrycks and Gimpel, arXiv:1606.08415) without the cancellation where x is negative; its derivative
is ``s + 2 x s (1 - s) u'``.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.kernels import cuda_mma, cuda_pipeline
from blufunc.kernels.tensor_maps import Box

ROWS, COLUMNS = 128, 192
"""Of a tile. Sums of more columns leave no registers for the warps of the activation."""

_TERMS, _STAGES, _ACTIVE = 64, 4, 7


@dataclass(frozen=True)
class GeluProduct:
    """Sizes and flags: (m, k) by (k, n).

    Attributes:
      by_rows: whether the right factor's terms lie side by side, and not its columns.
      derivative: whether the product is multiplied by GELU's derivative at an array.
      bias: whether a vector is added first; only without ``derivative``.
      stored: whether the argument of GELU is wanted, too; only without ``derivative``.
      summed: whether sums of rows are wanted; only with ``derivative``.
      again: whether GELU of that array is wanted, too; only with ``derivative``.
      cluster: how many blocks share columns.
    """

    m: int
    n: int
    k: int
    by_rows: bool
    derivative: bool
    bias: bool = False
    stored: bool = False
    summed: bool = False
    again: bool = False
    cluster: int = 2

    threads = 512

    @property
    def fits(self) -> bool:
        """Whether there is a kernel: for whole tiles and stages only."""
        return not (self.m % (ROWS * self.cluster) or self.n % COLUMNS or self.k % _TERMS)

    @property
    def clusters(self) -> int:
        """As many as there are tiles of a cluster; with fewer, each has several tiles."""
        return self.m // (ROWS * self.cluster) * (self.n // COLUMNS)

    @property
    def shared_bytes(self) -> int:
        """Of a block: stages, a tile whose rows begin in other banks each, barriers, and sums of each warp."""
        tile = ROWS * (2 * COLUMNS + 16)
        return _STAGES * (ROWS + COLUMNS) * 2 * _TERMS + tile + 8 * (2 * _STAGES + 2) + 4 * _ACTIVE * COLUMNS

    def boxes(self, row: int, other_row: int) -> tuple[Box, Box]:
        """What is copied of both factors at a time, whose rows (of the right one: or terms) are so many bytes apart."""
        left = Box((self.k, 1, self.m, 1), (row,) * 3, (_TERMS, 1, ROWS, 1))
        (size, rows), part = ((self.k, self.n), COLUMNS) if self.by_rows else ((self.n, self.k), _TERMS)
        return left, Box((size, 1, rows, 1), (other_row,) * 3, (64, 1, part // self.cluster, 1))


def instructions(p: GeluProduct) -> str:
    """What is not C++."""
    return (
        cuda_mma.shared_instructions("bfloat16", COLUMNS, (False, not p.by_rows))
        + cuda_pipeline.INSTRUCTIONS
        + _INSTRUCTIONS
    )


def source(p: GeluProduct) -> str:
    """The complete CUDA C++ of one product."""
    numbers = {
        "M": p.m, "N": p.n, "K": p.k, "ROWS": ROWS, "COLUMNS": COLUMNS, "TERMS": _TERMS, "STAGES": _STAGES,
        "ACTIVE": _ACTIVE, "THREADS": p.threads, "CLUSTER": p.cluster,
    }  # fmt: skip
    flags = {
        "BY_ROWS": p.by_rows, "DERIVATIVE": p.derivative, "BIAS": p.bias, "STORED": p.stored, "SUMMED": p.summed,
        "AGAIN": p.again,
    }  # fmt: skip
    head = "".join(f"constexpr int {name} = {value};\n" for name, value in numbers.items())
    head += "".join(f"constexpr bool {name} = {str(value).lower()};\n" for name, value in flags.items())
    clustered = f"__cluster_dims__({p.cluster}, 1, 1)" if p.cluster > 1 else ""
    return head + instructions(p) + _KERNEL.replace("CLUSTERED", clustered)


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
"""

_KERNEL = r"""
typedef unsigned short element;  // of bfloat16
constexpr unsigned A_BYTES = ROWS * 2 * TERMS, B_BYTES = COLUMNS * 2 * TERMS, STAGE = A_BYTES + B_BYTES;
constexpr unsigned PITCH = COLUMNS * 2 + 16, TILE = STAGES * STAGE;  // of the results' rows, and where they are
constexpr int TILES_N = N / COLUMNS, TILES = M / (ROWS * CLUSTER) * TILES_N;
constexpr int WORDS = COLUMNS / 64;                      // of two elements, that a lane has of a row
constexpr int MINE = (ROWS + ACTIVE - 1) / ACTIVE;       // rows of a warp
extern __shared__ __align__(1024) unsigned char shared_memory[];

// 1 / (1 + exp(-2 u)), and the slope of 2 u
inline float gate(float x, float &slope) {
  constexpr float ROOT = 1.5957691216057308f, CUBE = 0.044715f;  // 2 sqrt(2 / pi)
  const float square = x * x;
  slope = fmaf(3 * ROOT * CUBE, square, ROOT);
  return reciprocal_fast(1 + exp2_fast(-1.4426950408889634f * x * fmaf(ROOT * CUBE, square, ROOT)));
}
inline float gelu(float x) {
  float slope;
  return x * gate(x, slope);
}
inline float gelu_slope(float x, float &value) {
  float slope;
  const float s = gate(x, slope);
  value = x * s;  // as gelu
  return fmaf(x * fmaf(-s, s, s), slope, s);  // in this order: far out the first factor is 0, and the others large
}

// 16 terms of a tile whose panels of 64 rows or columns are 8 KB apart
inline unsigned long long described(unsigned at) {
  return 1ull << 62 | 512ull << 16 | 64ull << 32 | (at & 0x3ffff) >> 4;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
gelu_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
             const element *__restrict__ given, element *__restrict__ out, element *__restrict__ argument,
             float *__restrict__ sums, element *__restrict__ again) {
  const unsigned stages = shared_address(shared_memory);
  barrier *const full = (barrier *)(shared_memory + TILE + ROWS * PITCH), *const empty = full + STAGES,
                 *const left = empty + STAGES, *const taken = left + 1;
  float *const partial = (float *)(taken + 1);
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
    for (int i = first; i < TILES; i += stride, turn ^= 1) {
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
      if constexpr (BIAS) {
        const element *bias = given + i % TILES_N * COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
          const unsigned two = *(const unsigned *)(bias + j * 8);
#pragma unroll
          for (int half = 0; half < 2; ++half) c[j][half * 2] += low_half(two), c[j][half * 2 + 1] += high_half(two);
        }
      }
      wait_for(taken, turn);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned char *to = shared_memory + TILE + (warp * 16 + half * 8 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) *(unsigned *)(to + j * 16) = pack(c[j][half * 2], c[j][half * 2 + 1]);
      }
      __syncwarp();
      if (lane == 0) arrive(left);
    }
  } else {
    leave_registers<104>();
    if (warp == 8 + ACTIVE) {  // copies
      int stage = 0, phase = 1;
      for (int i = first; i < TILES; i += stride) {
        const int row = (i / TILES_N * CLUSTER + block) * ROWS, column = i % TILES_N * COLUMNS;
        if constexpr (DERIVATIVE)  // lines of 128 bytes to the second-level cache: the others will want them soon
          for (int line = lane; line < ROWS * WORDS; line += 32)
            prefetch(given + (long long)(row + line / WORDS) * N + column + line % WORDS * 64);
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
    } else {  // the activation: a warp has every seventh row, a lane three pairs of columns
      const int mine = warp - 8;
      int turn = 0;
      for (int i = first; i < TILES; i += stride, turn ^= 1) {
        const int band = i / TILES_N * CLUSTER + block, column = i % TILES_N * COLUMNS;
        const long long at = ((long long)(band * ROWS + mine) * N + column) / 2 + lane;
        constexpr long long further = ACTIVE * (N / 2);
        unsigned x[MINE][WORDS];
        if constexpr (DERIVATIVE) {  // all of them, before there is anything to multiply
#pragma unroll
          for (int r = 0; r < MINE; ++r)
#pragma unroll
            for (int j = 0; j < WORDS; ++j)
              x[r][j] = r < ROWS / ACTIVE || mine + r * ACTIVE < ROWS  // only of the last row is it in doubt
                            ? __ldcs((const unsigned *)given + at + r * further + j * 32) : 0;
        }
        float total[WORDS][2] = {};
        wait_for(left, turn);
#pragma unroll
        for (int r = 0; r < MINE; ++r) {
          if (mine + r * ACTIVE >= ROWS) break;  // for each: what is begun before it is known would want registers
#pragma unroll
          for (int j = 0; j < WORDS; ++j) {
            const unsigned t =
                *(const unsigned *)(shared_memory + TILE + (mine + r * ACTIVE) * PITCH + lane * 4 + j * 128);
            unsigned made;
            if constexpr (DERIVATIVE) {
              float value[2];
              const float low = low_half(t) * gelu_slope(low_half(x[r][j]), value[0]);
              made = pack(low, high_half(t) * gelu_slope(high_half(x[r][j]), value[1]));
              if constexpr (AGAIN)
                __stcs((unsigned *)again + at + r * further + j * 32, pack(value[0], value[1]));
              total[j][0] += low_half(made), total[j][1] += high_half(made);
            } else {
              made = pack(gelu(low_half(t)), gelu(high_half(t)));
              if constexpr (STORED) __stcs((unsigned *)argument + at + r * further + j * 32, t);
            }
            __stcg((unsigned *)out + at + r * further + j * 32, made);
          }
        }
        __syncwarp();
        if (lane == 0) arrive(taken);
        if constexpr (SUMMED) {
#pragma unroll
          for (int j = 0; j < WORDS; ++j)
            *(float2 *)(partial + mine * COLUMNS + j * 64 + lane * 2) = make_float2(total[j][0], total[j][1]);
          meet(1, 32 * ACTIVE);
          const int own = threadIdx.x - 256;
          if (own < COLUMNS) {
            float sum = partial[own];
            for (int w = 1; w < ACTIVE; ++w) sum += partial[w * COLUMNS + own];
            sums[(long long)band * N + column + own] = sum;
          }
          meet(1, 32 * ACTIVE);
        }
      }
    }
  }
  meet_cluster();  // no block ends while others arrive at its barriers
}
"""
