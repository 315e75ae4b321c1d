"""The text of a product of matrices and GELU, or its derivative, on Hopper: all of it in one kernel.

Kernels, stage 6, below ``gelu_gemm``, above ``tile_gemm``, whose epilogue warps compute the activation.
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
from typing import ClassVar

from blufunc.kernels.backends.cuda.library import tile_gemm
from blufunc.kernels.backends.cuda.library.tile_gemm import COLUMNS, EPILOGUE_WARPS, TileGemm

ENTRY = "gelu_product"


@dataclass(frozen=True)
class GeluProduct(TileGemm):
    """Sizes and flags.

    Attributes:
      derivative: whether the product is multiplied by GELU's derivative at an array.
      bias: whether a vector is added first; only without ``derivative``.
      stored: whether the argument of GELU is wanted, too; only without ``derivative``.
      summed: whether sums of rows are wanted; only with ``derivative``.
      again: whether GELU of that array is wanted, too; only with ``derivative``.
    """

    derivative: bool = False
    bias: bool = False
    stored: bool = False
    summed: bool = False
    again: bool = False

    epilogue_bytes: ClassVar[int] = 4 * EPILOGUE_WARPS * COLUMNS
    """Sums of each warp."""

    @property
    def fits(self) -> bool:
        """Whether there is a kernel: for whole tiles and stages only."""
        return self.whole and not self.n % COLUMNS


def source(p: GeluProduct) -> str:
    """The complete CUDA C++ of one product."""
    flags = {
        "DERIVATIVE": p.derivative, "BIAS": p.bias, "STORED": p.stored, "SUMMED": p.summed, "AGAIN": p.again,
    }  # fmt: skip
    return tile_gemm.source(p, _EPILOGUE, **flags)


_EPILOGUE = r"""
constexpr int MINE = (ROWS + EPILOGUE_WARPS - 1) / EPILOGUE_WARPS;  // rows of a warp

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

struct GeluEpilogue : EpilogueHooks {
  const element *__restrict__ given;
  element *__restrict__ out, *__restrict__ argument;
  float *__restrict__ sums;
  element *__restrict__ again;

  void prefetch(int row, int column, int lane) const {
    if constexpr (DERIVATIVE)  // lines of 128 bytes to the second-level cache: the others will want them soon
      for (int line = lane; line < ROWS * WORDS; line += 32)
        prefetch_to_l2(given + (long long)(row + line / WORDS) * N + column + line % WORDS * 64);
  }
  void accumulate(float (&c)[COLUMNS / 8][4], int column, int lane) const {
    if constexpr (BIAS) {
      const element *bias = given + column + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const unsigned two = *(const unsigned *)(bias + j * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) c[j][half * 2] += low_half(two), c[j][half * 2 + 1] += high_half(two);
      }
    }
  }
  void consume(const StagedTile &tile) const {
    const int lane = tile.lane, mine = tile.warp, column = tile.column();
    // a warp has every seventh row, a lane three pairs of columns
    const long long at = ((long long)(tile.row() + mine) * N + column) / 2 + lane;
    constexpr long long further = EPILOGUE_WARPS * (N / 2);
    unsigned x[MINE][WORDS];
    if constexpr (DERIVATIVE) {  // all of them, before there is anything to multiply
#pragma unroll
      for (int r = 0; r < MINE; ++r)
#pragma unroll
        for (int j = 0; j < WORDS; ++j)
          x[r][j] = r < ROWS / EPILOGUE_WARPS || mine + r * EPILOGUE_WARPS < ROWS  // for sure but for the last row
                        ? __ldcs((const unsigned *)given + at + r * further + j * 32) : 0;
    }
    float total[WORDS][2] = {};
    tile.wait();
#pragma unroll
    for (int r = 0; r < MINE; ++r) {
      if (mine + r * EPILOGUE_WARPS >= ROWS) break;  // for each: what is begun before it is known would want registers
#pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        const unsigned t = tile.pair(mine + r * EPILOGUE_WARPS, j);
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
        __stcs((unsigned *)out + at + r * further + j * 32, made);
      }
    }
    tile.release();
    if constexpr (SUMMED) {
      float *const partial = tile.scratch();
#pragma unroll
      for (int j = 0; j < WORDS; ++j)
        *(float2 *)(partial + mine * COLUMNS + j * 64 + lane * 2) = make_float2(total[j][0], total[j][1]);
      meet(1, 32 * EPILOGUE_WARPS);
      const int own = threadIdx.x - 256;
      if (own < COLUMNS) {
        float sum = partial[own];
        for (int w = 1; w < EPILOGUE_WARPS; ++w) sum += partial[w * COLUMNS + own];
        sums[(long long)tile.band * N + column + own] = sum;
      }
      meet(1, 32 * EPILOGUE_WARPS);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
gelu_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
             const element *__restrict__ given, element *__restrict__ out, element *__restrict__ argument,
             float *__restrict__ sums, element *__restrict__ again) {
  tile_gemm(a, b, GeluEpilogue{{}, given, out, argument, sums, again});
}
"""
