// A recurrent loop in one kernel: matmuls whose weights stay on chip, and pointwise work between them.
//
// A block owns ROWS rows and UNITS units of the state for all steps. It has the columns of all weights that belong to
// its units, so pointwise work reads only columns that the block computed. The left operands of matmuls go through
// global memory, which all blocks of the same rows read: they synchronize there once per level of matmuls.
//
// The warps of a block share the terms of a matmul, in SPLIT parts, and its columns. Partial sums meet in shared memory.
// `load` arranges weights once, as lanes read them; `multiply` leaves the partial sums of a step.
//
// Constants: ROWS, a multiple of 16; UNITS, a multiple of 8; THREADS, BLOCKS of the same rows; STAGE, the elements that
// a warp stages. Macro: ELEMENT of mma.cuh.

//# instructions
struct alignas(16) Words { unsigned x, y, z, w; };
// 16 bytes that other blocks wrote, from L2
inline Words read_words(const void *p) {
  Words r;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}
inline void add_release(unsigned *counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
inline unsigned read_acquire(const unsigned *counter) {
  unsigned r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(counter) : "memory");
  return r;
}

//# grid
constexpr int WARPS = THREADS / 32;
extern __shared__ __align__(1024) unsigned char shared_memory[];

// All threads of a block have written what others read.
inline void arrive_at_step(unsigned *counter) {
  __syncthreads();
  if (BLOCKS > 1 && threadIdx.x == 0) add_release(counter);
}
// until all blocks of the same rows have arrived, `count` times in all since the start
inline void wait_for_step(const unsigned *counter, unsigned count) {
  if constexpr (BLOCKS > 1) {
    if (threadIdx.x == 0)
      while (int(read_acquire(counter) - count) < 0);
    __syncthreads();
  }
}
// the partial sums of one element
template<int SPLIT, int PITCH> inline float sum_of(const float *partial, int row, int column) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < SPLIT; ++i) sum += partial[(i * ROWS + row) * PITCH + column];
  return sum;
}

//# tensor cores
// TERMS: padded, a multiple of 32 * SPLIT. COLUMNS: of the block, a multiple of 8. KEPT: in registers, not shared memory.
template<int TERMS, int COLUMNS, int SPLIT, bool KEPT> struct TensorWeights {
  static constexpr int CHUNKS = TERMS / (32 * SPLIT), TILES = COLUMNS / 8,
                       PITCH = COLUMNS / 8 % 2 ? COLUMNS : COLUMNS + 8;
  static constexpr int OTHERS = WARPS / SPLIT, OWN = (TILES + OTHERS - 1) / OTHERS;
  // of 16 rows, whose sums a warp has in registers at a time
  static constexpr int BANDS = OWN * ROWS / 16 <= 16   ? ROWS / 16
                               : OWN * ROWS / 32 <= 16 ? ROWS / 32
                                                       : ROWS / 64;
  static constexpr int CHAINS = BANDS * OWN <= 4 ? 2 : 1;  // of dependent instructions
  static constexpr int BATCH = 8 / BANDS ? (CHUNKS < 8 / BANDS ? CHUNKS : 8 / BANDS) : 1;  // chunks in flight
  Words kept[KEPT ? CHUNKS : 1][KEPT ? OWN : 1];
  Words *shared;

  template<class Weight> inline void load(void *memory, const Weight &weight) {
    shared = (Words *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (KEPT) {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) kept[i][j] = words(weight, warp, lane, i, j);
    } else {
#pragma unroll 1
      for (int i = 0; i < CHUNKS; ++i)
#pragma unroll 1
        for (int j = 0; j < OWN; ++j)
          if (warp / SPLIT + j * OTHERS < TILES)
            shared[place(warp, lane, i, j)] = words(weight, warp, lane, i, j);
    }
  }
  // the first of the 8 consecutive terms of a lane's words, which are a permutation of those of two instructions
  static inline int term(int warp, int lane, int chunk) {
    return (warp % SPLIT * CHUNKS + chunk) * 32 + lane % 4 * 8;
  }
  static inline int place(int warp, int lane, int chunk, int own) {
    return ((warp % SPLIT * CHUNKS + chunk) * TILES + warp / SPLIT + own * OTHERS) * 32 + lane;
  }
  template<class Weight>
  static inline Words words(const Weight &weight, int warp, int lane, int chunk, int own) {
    const int tile = warp / SPLIT + own * OTHERS, k = term(warp, lane, chunk), n = tile * 8 + lane / 4;
    if (tile >= TILES) return Words{0, 0, 0, 0};
    return Words{pack(weight(k, n), weight(k + 1, n)), pack(weight(k + 2, n), weight(k + 3, n)),
                 pack(weight(k + 4, n), weight(k + 5, n)), pack(weight(k + 6, n), weight(k + 7, n))};
  }
  inline Words at(int warp, int lane, int chunk, int own) const {
    if constexpr (KEPT) return kept[chunk][own];
    return shared[place(warp, lane, chunk, own)];
  }

  // `left` has ROWS rows of TERMS elements
  inline void multiply(const unsigned short *left, float *partial, void *) const {
    if constexpr (BANDS == ROWS / 16) {
      multiply_bands(left, partial);
    } else {
#pragma unroll 1
      for (int row = 0; row < ROWS; row += BANDS * 16)
        multiply_bands(left + row * TERMS, partial + row * PITCH);
    }
  }
  inline void multiply_bands(const unsigned short *left, float *partial) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[CHAINS][BANDS][OWN][4];
#pragma unroll
    for (int i = 0; i < CHAINS * BANDS * OWN * 4; ++i)
      sums[i / (BANDS * OWN * 4)][i / (OWN * 4) % BANDS][i / 4 % OWN][i % 4] = 0;
#pragma unroll
    for (int first = 0; first < CHUNKS; first += BATCH) {
      Words rows[BATCH][BANDS][2];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int m = 0; m < BANDS * 2; ++m)
          if (first + i < CHUNKS)
            rows[i][m / 2][m % 2] =
                read_words(left + (m * 8 + lane / 4) * TERMS + term(warp, lane, first + i));
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j)
          if (first + i < CHUNKS && (TILES % OTHERS == 0 || warp / SPLIT + j * OTHERS < TILES)) {
            const Words w = at(warp, lane, first + i, j);
#pragma unroll
            for (int m = 0; m < BANDS; ++m) {
              const Words &x = rows[i][m][0], &y = rows[i][m][1];
              const unsigned low[4] = {x.x, y.x, x.y, y.y}, high[4] = {x.z, y.z, x.w, y.w};
              multiply_add(sums[0][m][j], low, w.x, w.y);
              multiply_add(sums[CHAINS - 1][m][j], high, w.z, w.w);
            }
          }
    }
    float *const to = partial + (warp % SPLIT * ROWS + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int tile = warp / SPLIT + j * OTHERS;
      if (TILES % OTHERS == 0 || tile < TILES)
#pragma unroll
        for (int i = 0; i < BANDS * 4; ++i) {
          float sum = sums[0][i / 4][j][i % 4];
          if constexpr (CHAINS > 1) sum += sums[CHAINS - 1][i / 4][j][i % 4];
          to[(i / 4 * 16 + i % 4 / 2 * 8) * PITCH + tile * 8 + i % 2] = sum;
        }
    }
  }
};

//# float32
// TERMS: padded, a multiple of 32. All warps share the terms, and the lanes of a warp the columns, or columns and rows.
template<int TERMS, int COLUMNS> struct FloatWeights {
  static constexpr int SPLIT = WARPS, OWN = TERMS / WARPS, PITCH = COLUMNS / 8 % 2 ? COLUMNS : COLUMNS + 8;
  static constexpr int ACROSS = COLUMNS % 32 == 0   ? 32
                                : COLUMNS % 16 == 0 ? 16
                                                    : 8;                    // lanes with different columns
  static constexpr int WIDE = COLUMNS / ACROSS, HIGH = ROWS * ACROSS / 32;  // results of a lane
  static constexpr int STAGED = OWN + 4;  // elements between rows of a warp's terms in shared memory
  float *shared;

  template<class Weight> inline void load(void *memory, const Weight &weight) {
    shared = (float *)memory;
#pragma unroll 1
    for (int i = threadIdx.x; i < TERMS * COLUMNS; i += THREADS) shared[i] = weight(i / COLUMNS, i % COLUMNS);
  }
  inline void multiply(const float *left, float *partial, void *staging) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = lane % ACROSS, down = lane / ACROSS;
    float *const rows = (float *)staging + warp * STAGE;
#pragma unroll 4
    for (int i = lane; i < ROWS * OWN / 4; i += 32) {
      const int row = i / (OWN / 4), k = i % (OWN / 4) * 4;
      *(Words *)(rows + row * STAGED + k) = read_words(left + row * TERMS + warp * OWN + k);
    }
    __syncwarp();
    float sums[HIGH][WIDE];
#pragma unroll
    for (int i = 0; i < HIGH * WIDE; ++i) sums[i / WIDE][i % WIDE] = 0;
#pragma unroll 1
    for (int k = 0; k < OWN; k += 4) {
      float w[4][WIDE];
#pragma unroll
      for (int i = 0; i < 4 * WIDE; ++i)
        w[i / WIDE][i % WIDE] = shared[(warp * OWN + k + i / WIDE) * COLUMNS + i % WIDE * ACROSS + across];
#pragma unroll
      for (int m = 0; m < HIGH; ++m) {
        const Words x = *(const Words *)(rows + (down * HIGH + m) * STAGED + k);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
          sums[m][j] += __uint_as_float(x.x) * w[0][j];
          sums[m][j] += __uint_as_float(x.y) * w[1][j];
          sums[m][j] += __uint_as_float(x.z) * w[2][j];
          sums[m][j] += __uint_as_float(x.w) * w[3][j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < HIGH * WIDE; ++i)
      partial[(warp * ROWS + down * HIGH + i / WIDE) * PITCH + i % WIDE * ACROSS + across] =
          sums[i / WIDE][i % WIDE];
    __syncwarp();
  }
};
