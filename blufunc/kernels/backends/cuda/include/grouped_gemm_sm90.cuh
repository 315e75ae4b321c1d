// Matmuls of groups of rows on Hopper, in one persistent kernel: 16-bit operands, sums in float32.
//
// Sizes of groups are values on the device, so blocks find their tiles themselves. Of ragged_dot, a tile is ROWS rows of
// one group and COLUMNS columns. The first warp of each block counts the tiles of all groups; a block then takes every
// gridDim-th tile and finds its group by bisection. A tile may reach into the next group, whose rows are computed and
// not stored. Rows without a group form two more groups, of no terms. If SUMMED (ragged_contract), a group has K x N
// results and as many terms as rows; rows of the next group in the last stage are overwritten by zeros, as an infinity
// would spoil the sums.
//
// One producer thread copies both operands to a ring of STAGES buffers (TMA), and two consumer warpgroups have 64 rows
// each. Four lanes transpose what they hold before they store, so that each writes 16 bytes. A cluster of two blocks has
// adjacent tiles of a group and shares the columns of the right operand, half of which each copies to both (multicast).
//
// Constants: STACKS, M, K, N, GROUPS: sizes; MATRICES, BOUNDS: stacks of the right operand of ragged_dot and of offsets,
// 1 or STACKS; SUMMED; BY_ROWS: whether the terms of the right operand are contiguous, not its columns; ROWS, COLUMNS,
// TERMS of a stage, STAGES, BAND: vertically adjacent tiles that are computed before the next column; CLUSTER; THREADS;
// WIDE: whether results are float32.

//# instructions
// a box to the same place of all blocks of the cluster, whose barriers there count the bytes
inline void share_box(unsigned to, const TensorMap &map, int i0, int i1, int i2, int i3, barrier *b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
      :
      : "r"(to), "l"(&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(shared_address(b)),
        "h"((short)((1 << CLUSTER) - 1))
      : "memory");
}

// 16 bytes by one instruction: the compiler splits a store of what it has in four registers
inline void store_words(void *to, const unsigned (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
}

//# gemm
typedef unsigned short element;  // its bits
template<bool> struct Result { typedef element type; };
template<> struct Result<true> { typedef float type; };
typedef Result<WIDE>::type result;

constexpr unsigned A_BYTES = ROWS * 2 * TERMS, B_BYTES = COLUMNS * 2 * TERMS, STAGE = A_BYTES + B_BYTES;
constexpr int PANEL = 64;          // columns of a box whose rows are terms: 8 KB
constexpr int PARTS = GROUPS + 2;  // of the rows of a stack: groups, and what is ahead of them and beyond
constexpr int ACROSS = (N + COLUMNS - 1) / COLUMNS, TALL = ROWS * CLUSTER, DOWN = (K + TALL - 1) / TALL;
extern __shared__ __align__(1024) unsigned char shared_memory[];

// where a group begins; -1: the rows ahead of all of them
inline int bound(const int *offsets, int stack, int group) {
  if (group < 0) return 0;
  if (group > GROUPS) return M;
  return min(max(__ldg(offsets + (BOUNDS > 1 ? stack * (GROUPS + 1) : 0) + group), 0), M);
}
// the rows of a part
inline int rows_of(const int *offsets, int part) {
  const int stack = part / PARTS, group = part % PARTS - 1;
  return max(bound(offsets, stack, group + 1) - bound(offsets, stack, group), 0);
}

// by one warp: the number of tiles of all parts up to each one
inline void count_tiles(const int *offsets, int *ends) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int from = 0; from < STACKS * PARTS; from += 32) {
    const int part = from + lane;
    int count = part < STACKS * PARTS ? (rows_of(offsets, part) + TALL - 1) / TALL : 0;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_sync(0xffffffffu, count, lane < by ? lane : lane - by);
      if (lane >= by) count += other;
    }
    count += before;
    if (part < STACKS * PARTS) ends[part] = count;
    before = __shfl_sync(0xffffffffu, count, 31);
  }
}

// Results of a block: `rows` of them from `row` on, none or less if negative. Terms begin at `first`.
struct Tile { int stack, group, row, rows, column, first, terms; };
inline Tile tile_of(int i, const int *offsets, const int *ends, int block) {
  if constexpr (SUMMED) {
    const int which = i / (DOWN * ACROSS), within = i % (DOWN * ACROSS), stack = which / GROUPS,
              group = which % GROUPS;
    const int row = within % DOWN * TALL + block * ROWS, first = bound(offsets, stack, group);
    const int terms = max(bound(offsets, stack, group + 1) - first, 0);
    return {stack, group, row, K - row, within / DOWN * COLUMNS, first, terms};
  } else {
    const int all = ends[STACKS * PARTS - 1], band = i / (BAND * ACROSS) * BAND, within = i % (BAND * ACROSS);
    const int high = min(BAND, all - band), down = band + within % high;
    int low = 0, top = STACKS * PARTS - 1;  // the first part that ends beyond this row of tiles
    while (low < top) {
      const int middle = (low + top) / 2;
      if (ends[middle] > down) top = middle;
      else low = middle + 1;
    }
    const int stack = low / PARTS, group = low % PARTS - 1;
    const int begun = (down - (low ? ends[low - 1] : 0)) * TALL + block * ROWS;
    const int rows = bound(offsets, stack, group + 1) - bound(offsets, stack, group) - begun;
    return {stack,
            group,
            bound(offsets, stack, group) + begun,
            rows,
            within / high * COLUMNS,
            0,
            group >= 0 && group < GROUPS ? K : 0};
  }
}
inline int tiles(const int *ends) {
  return ACROSS * (SUMMED ? STACKS * GROUPS * DOWN : ends[STACKS * PARTS - 1]);
}

// matrix descriptor of 16 terms of a tile whose panels are 8 KB apart
inline unsigned long long described(unsigned at) {
  return 1ull << 62 | 512ull << 16 | 64ull << 32 | (at & 0x3ffff) >> 4;
}

// by the consumers: zeros in place of the terms of a stage from `terms` on
inline void clear(unsigned stage, int terms, int group) {
  const int thread = threadIdx.x % 128;
  for (int i = thread; i < (TERMS - terms) * 8; i += 128) {
    const unsigned at = stage + terms * 128 + i * 16;
    *(int4 *)(shared_memory + at + group * 8192) = int4{0, 0, 0, 0};
#pragma unroll
    for (int panel = 0; panel < COLUMNS / PANEL; panel += 2)
      if (panel + group < COLUMNS / PANEL)
        *(int4 *)(shared_memory + at + A_BYTES + (panel + group) * 8192) = int4{0, 0, 0, 0};
  }
  fence_for_products();
  meet(1, 256);
}

// word `lane` of each of the four words of a lane, in a group of four lanes
inline void transpose(unsigned (&x)[4], int lane) {
#pragma unroll
  for (int by = 1; by < 4; by *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & by)) {
        const bool upper = lane & by;
        const unsigned sent = upper ? x[i] : x[i + by];
        const unsigned got = __shfl_xor_sync(0xffffffffu, sent, by);
        if (upper) x[i] = got;
        else x[i + by] = got;
      }
}

inline result *place_of(result *out, const Tile &tile) {
  return out + (SUMMED ? ((long long)(tile.stack * GROUPS + tile.group) * K + tile.row) * N
                       : ((long long)tile.stack * M + tile.row) * N);
}
// zeros, by the consumers
inline void store_zeros(result *to, const Tile &tile) {
  constexpr int WORDS = 16 / sizeof(result), OWN = COLUMNS / WORDS;
  for (int i = threadIdx.x; i < ROWS * OWN; i += 256) {
    const int row = i / OWN, column = tile.column + i % OWN * WORDS;
    if (row < tile.rows && column < N) *(int4 *)(to + (long long)row * N + column) = int4{0, 0, 0, 0};
  }
}
inline void store(result *out, const Tile &tile, const float (&c)[COLUMNS / 8][4], int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + half * 8 + lane / 4;
    result *const to = out + (long long)row * N;
    if constexpr (WIDE) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const int column = tile.column + j * 8 + lane % 4 * 2;
        if (row < tile.rows && column < N)
          *(float2 *)(to + column) = make_float2(c[j][half * 2], c[j][half * 2 + 1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j += 4) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pack(c[j + i][half * 2], c[j + i][half * 2 + 1]);
        transpose(words, lane);
        const int column = tile.column + (j + lane % 4) * 8;
        if (row < tile.rows && column < N) store_words(to + column, words);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const int *offsets,
                 result *out) {
  const unsigned stages = shared_address(shared_memory);
  barrier *const full = (barrier *)(shared_memory + STAGES * STAGE), *const empty = full + STAGES;
  int *const ends = (int *)(empty + STAGES);
  const int block = block_of_cluster(), warp = threadIdx.x / 32, group = warp / 4, lane = threadIdx.x % 32;
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) make_barrier(full + i, 1), make_barrier(empty + i, 8 * CLUSTER);
    barriers_made();
  }
  if (!SUMMED && warp == 1) count_tiles(offsets, ends);
  synchronize_cluster();

  if (group == 2) {  // the producer
    leave_registers<56>();
    if (warp == 8) {
      int stage = 0, phase = 1;
      for (int i = first; i < tiles(ends); i += stride) {
        const Tile tile = tile_of(i, offsets, ends, block);
        const int matrix = SUMMED         ? tile.stack
                           : MATRICES > 1 ? tile.stack
                                          : 0,
                  of_group = SUMMED ? 0 : tile.group;
        for (int term = 0; term < tile.terms && lane == 0; term += TERMS) {
          const unsigned to = stages + stage * STAGE;
          barrier *const done = full + stage;
          wait_for(empty + stage, phase);
          expect_bytes(done, STAGE);
          if constexpr (SUMMED) {
#pragma unroll
            for (int panel = 0; panel < ROWS / PANEL; ++panel)
              copy_box(to + panel * 8192, a, tile.row + panel * PANEL, 0, tile.first + term, tile.stack,
                       done);
          } else {
            copy_box(to, a, term, 0, tile.row, tile.stack, done);
          }
          if constexpr (BY_ROWS) {
            const int mine = block * (COLUMNS / CLUSTER);
            share_box(to + A_BYTES + mine * 128, b, term, of_group, tile.column + mine, matrix, done);
          } else {
            const int mine = block * (TERMS / CLUSTER);
#pragma unroll
            for (int panel = 0; panel < COLUMNS / PANEL; ++panel)
              share_box(to + A_BYTES + panel * 8192 + mine * 128, b, tile.column + panel * PANEL, of_group,
                        tile.first + term + mine, matrix, done);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        __syncwarp();
      }
    }
  } else {
    take_registers<224>();
    int stage = 0, phase = 0;
    for (int i = first; i < tiles(ends); i += stride) {
      const Tile tile = tile_of(i, offsets, ends, block);
      if (tile.terms == 0) {
        store_zeros(place_of(out, tile), tile);
        continue;
      }
      float c[COLUMNS / 8][4];
      int before = 0;
      for (int term = 0; term < tile.terms; term += TERMS) {
        wait_for(full + stage, phase);
        if (SUMMED && tile.terms - term < TERMS) clear(stage * STAGE, tile.terms - term, group);
        const unsigned at = stages + stage * STAGE;
        begin_products();
#pragma unroll
        for (int k = 0; k < TERMS / 16; ++k)
          multiply(c, described(at + group * 8192 + k * (SUMMED ? 2048 : 32)),
                   described(at + A_BYTES + k * (BY_ROWS ? 32 : 2048)), term || k);
        end_of_products();
        if (term) {
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
      store(place_of(out, tile), tile, c, warp, lane);
    }
  }
  synchronize_cluster();  // no block ends while others arrive at its barriers
}
