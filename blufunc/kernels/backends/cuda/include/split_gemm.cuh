// Float32 GEMM on Hopper's tensor cores: all matmuls of float16 parts in one kernel.
//
// rewrites/split_float32.py says what parts, scales and sums are. A block has a tile of the result at a time,
// 128 rows and COLUMNS columns. Four of its warps copy parts of both operands to a ring of stages in shared
// memory; two consumer warpgroups have 64 rows each and multiply. A warpgroup accumulates STEP terms on
// tensor cores, first those of the matmuls with second parts, then those of first parts, and adds both to
// float32 sums, so that what tensor cores cut off does not grow with the number of terms, and results are
// written once. The warpgroups multiply in turns: while one adds, the other's matmuls run.
//
// The terms of an operand are contiguous (A_BY_ROWS, B_BY_ROWS), or its rows are: then a row of a stage has
// rows of the operand, and the instruction is told so.
//
// Blocks stay for all tiles that they have, one after another, and begin to copy a tile before that before it
// is written. Few tiles are cut along the terms: then several results are to be added up.
//
// Constants: M, N, K; ROWS, COLUMNS, TERMS of a stage, STAGES, THREADS; SUMS: results, each of a part of the
// terms; GROUP: tiles along M, with all along N, that follow each other: what they read stays in L2.

//# kernel
typedef unsigned short element;  // of float16
constexpr unsigned A_BYTES = ROWS * 4 * TERMS, B_BYTES = COLUMNS * 4 * TERMS, STAGE = A_BYTES + B_BYTES;
constexpr int TILES_M = (M + ROWS - 1) / ROWS, TILES_N = (N + COLUMNS - 1) / COLUMNS,
              TILES = TILES_M * TILES_N;
constexpr int STEPS = (K + 2 * TERMS - 1) / (2 * TERMS);
constexpr float OF_REST = 1.0f / 2048;  // second parts are held times 2^11
extern __shared__ __align__(1024) unsigned char shared_memory[];

struct Tile { int row, column, sum, first_step, steps; };
inline Tile tile_of(int i) {
  const int sum = i / TILES, within = i % TILES, band = within / (GROUP * TILES_N);
  const int high = min(GROUP, TILES_M - band * GROUP), at = within - band * GROUP * TILES_N;
  const int first = (int)((long long)STEPS * sum / SUMS), end = (int)((long long)STEPS * (sum + 1) / SUMS);
  return {(band * GROUP + at % high) * ROWS, at / high * COLUMNS, sum, first, end - first};
}

// Copies of one operand: a thread has every 16th row of a stage, and of it 16 bytes, permuted by the row's number.
template<bool BY_ROWS, int SIZE, int LIMIT> struct Copies {
  const element *first, *rest;
  int row, chunk;
  unsigned to;  // in a stage
  inline Copies(const element *first_part, const element *second_part, int thread) {
    row = thread / 8;
    chunk = thread % 8;
    to = row * 128 + (chunk ^ row % 8) * 16;
    // by rows: a stage has SIZE rows of 32 first parts and 32 second ones; else panels of 64 columns: first 32 terms of
    // first parts, then 32 of second ones
    first = BY_ROWS && chunk >= 4 ? second_part : first_part;
    rest = second_part;
  }
  inline void operator()(unsigned stage, int begin, int term) const {
    if constexpr (BY_ROWS) {
      const int k = term + chunk % 4 * 8;
      const element *from = first + (long long)(begin + row) * K + k;
#pragma unroll
      for (int i = 0; i < SIZE / 16; ++i)
        copy16(stage + to + i * 2048, from + (long long)i * 16 * K,
               (K % (2 * TERMS) == 0 || k < K) && (LIMIT % SIZE == 0 || begin + row + i * 16 < LIMIT));
    } else {
      const long long offset = (long long)(term + row) * LIMIT + begin + chunk * 8;
#pragma unroll
      for (int panel = 0; panel < SIZE / 64; ++panel)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy16(stage + to + panel * 8192 + i * 2048,
                 (i < 2 ? first : rest) + offset + (long long)i % 2 * 16 * LIMIT + panel * 64,
                 (K % (2 * TERMS) == 0 || term + row + i % 2 * 16 < K) &&
                     (LIMIT % SIZE == 0 || begin + panel * 64 + chunk * 8 < LIMIT));
    }
  }
};

// matrix descriptor of 16 terms of a tile: their address, and the strides of panels and rows
template<bool BY_ROWS> inline unsigned long long described(unsigned tile, int part, int k) {
  const unsigned at = tile + (BY_ROWS ? part * 64 + k * 32 : part * 4096 + k * 2048);
  constexpr unsigned long long how = 1ull << 62 | 512ull << 16 | 64ull << 32;
  return how | (at & 0x3ffff) >> 4;
}

// sums += part times a unit. Where part is NaN, as second parts of what is infinite are, it counts as zero if told so.
template<bool REST> inline void add_part(float (&sums)[COLUMNS / 8][4], float (&part)[COLUMNS / 8][4]) {
  if constexpr (REST) {
    float probe[4] = {};  // NaN if any is NaN or infinite
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) probe[i % 4] = fmaf(part[i / 4][i % 4], 0.0f, probe[i % 4]);
    if (!((probe[0] + probe[1]) + (probe[2] + probe[3]) == 0)) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) {
        float &x = part[i / 4][i % 4];
        x = x == x ? x : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
      sums[i / 4][i % 4] = fmaf(part[i / 4][i % 4], OF_REST, sums[i / 4][i % 4]);
  } else {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i / 4][i % 4] += part[i / 4][i % 4];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    split_product(const element *a, const element *a_rest, const element *b, const element *b_rest,
                  const float *__restrict__ a_roots, const float *__restrict__ b_roots,
                  float *__restrict__ out) {
  const unsigned stages = shared_address(shared_memory);
  barrier *const full = (barrier *)(shared_memory + STAGES * STAGE), *const empty = full + STAGES;
  const int warp = threadIdx.x / 32, group = warp / 4;
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; ++i) {
      make_barrier(full + i, 128);
      make_barrier(empty + i, 8);
    }
  __syncthreads();

  if (group == 2) {
    leave_registers<40>();
    const Copies<A_BY_ROWS, ROWS, M> copy_a(a, a_rest, threadIdx.x % 128);
    const Copies<B_BY_ROWS, COLUMNS, N> copy_b(b, b_rest, threadIdx.x % 128);
    int stage = 0, phase = 1;
    for (int i = blockIdx.x; i < TILES * SUMS; i += gridDim.x) {
      const Tile tile = tile_of(i);
      for (int n = 0; n < 2 * tile.steps; ++n) {
        const int term = (2 * tile.first_step + n) * TERMS;
        wait_for(empty + stage, phase);
        copy_a(stages + stage * STAGE, tile.row, term);
        copy_b(stages + stage * STAGE + A_BYTES, tile.column, term);
        arrive_behind_copies(full + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    return;
  }

  take_registers<232>();
  const int lane = threadIdx.x % 32;
  const unsigned rows = stages + group * 8192;
  int stage = 0, phase = 0;
  if (group == 1) pass(1, 256);  // the first turn is that of the first group
  for (int i = blockIdx.x; i < TILES * SUMS; i += gridDim.x) {
    const Tile tile = tile_of(i);
    float sums[COLUMNS / 8][4] = {}, part[COLUMNS / 8][4];
    for (int step = 0; step < tile.steps; ++step) {
      unsigned at[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wait_for(full + stage, phase);
        at[half] = stage * STAGE;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      fence_for_products();
#pragma unroll
      for (int rest = 1; rest >= 0; --rest) {
        meet(1 + group, 256);
        begin_products();
#pragma unroll
        for (int of_a = rest; of_a >= 0; --of_a)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int k = 0; k < TERMS / 16; ++k)
              multiply(part, described<A_BY_ROWS>(rows + at[half], of_a, k),
                       described<B_BY_ROWS>(stages + A_BYTES + at[half], rest - of_a, k),
                       of_a < rest || half || k);
        end_of_products();
        pass(2 - group, 256);
        wait_for_groups<0>();
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) settle(part[i / 4][i % 4]);
        if (rest) add_part<true>(sums, part);
      }
      if (lane == 0) {
        arrive(empty + (stage + STAGES - 2) % STAGES);
        arrive(empty + (stage + STAGES - 1) % STAGES);
      }
      add_part<false>(sums, part);
    }
    int again = i;  // its tile need not be in registers until now
    asm("" : "+r"(again));
    const Tile done = tile_of(again);
    float2 roots[COLUMNS / 8];  // of this thread's columns
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const int column = done.column + j * 8 + lane % 4 * 2;
      roots[j] = N % COLUMNS && column >= N ? make_float2(0, 0) : *(const float2 *)(b_roots + column);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = done.row + warp * 16 + half * 8 + lane / 4;
      if (M % ROWS && row >= M) continue;
      const float root = a_roots[row];
      float *to = out + ((long long)done.sum * M + row) * N;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const int column = done.column + j * 8 + lane % 4 * 2;
        if (N % COLUMNS && column >= N) continue;
        const float left = root * roots[j].x,
                    right = root * roots[j].y;  // twice: neither step overflows on the way
        const float *pair = &sums[j][half * 2];
        // past L1: through it, such pieces of eight lines cost a fifth of a short GEMM's time
        __stcg((float2 *)(to + column), make_float2(pair[0] * left * left, pair[1] * right * right));
      }
    }
  }
  if (group == 0) meet(1, 256);
}
