// GEMMs with at most 16 rows by quantized weights, bound by reading the codes. Functions that load are those of
// skinny_gemm.cuh, and so is the order of work: a lane takes terms that are adjacent in memory as those of a fragment.
//
// A stage has 64 terms of COLUMNS columns, and a lane 16 of them: 16 bytes of int8 codes, or 8 bytes of 4-bit ones, so
// four lanes read a sector or two of a column. Codes become elements in registers, by byte permutations. Factors of
// blocks multiply the sums of a stage, which are far fewer than its weights, and the scale of a column its final sum.
//
// Constants: M, N, K; BITS: 8 or 4 of a code; BLOCK: terms that share a factor, 0 without; COLUMNS: 16 or 32; WARPS;
// DEPTH: stages of a lane that are loaded ahead; IN_FLIGHT; SCALED: whether columns have scales.

//# instructions
// bytes of x (0 to 3) and y (4 to 7), by the four lower digits of `of`
inline unsigned permuted(unsigned x, unsigned y, unsigned of) { return __byte_perm(x, y, of); }

//# gemm
typedef unsigned short element;
extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr int THREADS = 32 * WARPS, TILES = (M + 7) / 8, SLABS = COLUMNS / 16;
constexpr int TERMS = 64, OWN = TERMS / 4, CHUNKS = OWN / 8;      // of a stage; of a lane; in eights
constexpr int LOADS = 2 * SLABS, WORDS = OWN * BITS / 32;         // columns of a lane, and words of each
constexpr int STAGES = K / TERMS, ROW_BYTES = K * BITS / 8;       // of all warps; of a column
constexpr int SUM_ROW = COLUMNS + 4, SUMS = TILES * 8 * SUM_ROW;  // padded: two rows start in other banks
constexpr int PAIRS = M * COLUMNS / 2;                            // of adjacent columns

// Values of the codes of one byte, or of 4 bits: the lower and the upper bytes of 16 elements.
struct Table {
  unsigned low[4], high[4];
  inline explicit Table(const float *values) {
    if constexpr (BITS == 4)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned a = pack(values[4 * i], values[4 * i + 1]),
                       b = pack(values[4 * i + 2], values[4 * i + 3]);
        low[i] = permuted(a, b, 0x6420u), high[i] = permuted(a, b, 0x7531u);
      }
  }
  // of four codes, one in each of the lower digits of `codes`, a byte
  static inline unsigned at(const unsigned (&bytes)[4], unsigned codes) {
    const unsigned within = codes & 0x7777u, half = 0x3210u | (codes & 0x8888u) >> 1;
    return permuted(permuted(bytes[0], bytes[1], within), permuted(bytes[2], bytes[3], within), half);
  }
  // elements of eight codes
  inline void decode(unsigned (&to)[4], const unsigned *codes) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if constexpr (BITS == 4) {
        const unsigned own = codes[0] >> 16 * i & 0xffffu, a = at(low, own), b = at(high, own);
        to[2 * i] = permuted(a, b, 0x5140u), to[2 * i + 1] = permuted(a, b, 0x7362u);
      } else {
        const unsigned own = codes[i] ^ 0x80808080u;  // + 128
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)  // 2^23 + 128 + the code
          x[j] = __uint_as_float(permuted(own, 0x4b000000u, 0x7440u | j)) - 8388736.0f;
        to[2 * i] = pack(x[0], x[1]), to[2 * i + 1] = pack(x[2], x[3]);
      }
  }
};

// Of a block of int8, its scale; of 4-bit codes, a level, of which the square is the factor.
inline float factor_of(float scale) { return scale; }
inline float factor_of(unsigned char level) { return (float)(level * level); }

template<class Level>
inline void multiply_by_codes(const element *x, const unsigned char *codes, const Level *levels,
                              const float *scale, const float *table, element *out) {
  struct Stage {
    unsigned codes[LOADS][WORDS];
    Level levels[BLOCK ? LOADS : 1];
  };
  float *const sums = (float *)shared_memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * COLUMNS;
  const int begin = warp * STAGES / WARPS, end = (warp + 1) * STAGES / WARPS;
  const int g = lane / 4, first = lane % 4 * OWN;
  const unsigned long long policy = evicted_first();
  auto load = [&](Stage &s, int stage) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const long long n = min(column + g + i * 8, N - 1);  // columns beyond the last are not stored
      load_once(s.codes[i], codes + n * ROW_BYTES + (stage * TERMS + first) * BITS / 8, policy);
      if constexpr (BLOCK) s.levels[i] = levels[n * (K / BLOCK) + stage * TERMS / BLOCK];
    }
  };
  const Table values(table);
  float c[SLABS][TILES][4] = {};
  Stage stages[DEPTH];
  let_next_kernel_begin();
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    if (d >= IN_FLIGHT) wait_for_word(stages[d - IN_FLIGHT].codes[LOADS - 1][0]);
    if (begin + d < end) load(stages[d], begin + d);
  }
  wait_for_previous_kernel();
  for (int s = begin; s < end; s += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (s + d >= end) break;
      unsigned rows[TILES][CHUNKS][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h)
          load_words(rows[tile][h],
                     x + (long long)min(tile * 8 + g, M - 1) * K + (s + d) * TERMS + first + h * 8);
#pragma unroll
      for (int i = 0; i < SLABS; ++i) {
        float own[TILES][4] = {};
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h) {
          unsigned w[2][4];
#pragma unroll
          for (int j = 0; j < 2; ++j) values.decode(w[j], stages[d].codes[i * 2 + j] + h * WORDS / CHUNKS);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned a[4] = {w[0][half * 2], w[1][half * 2], w[0][half * 2 + 1], w[1][half * 2 + 1]};
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
              multiply_add(own[tile], a, rows[tile][h][half * 2], rows[tile][h][half * 2 + 1]);
          }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if constexpr (BLOCK) c[i][tile][j] += factor_of(stages[d].levels[i * 2 + j / 2]) * own[tile][j];
            else c[i][tile][j] += own[tile][j];
          }
      }
      if (s + d + DEPTH < end) load(stages[d], s + d + DEPTH);
    }
  }
#pragma unroll
  for (int i = 0; i < SLABS; ++i)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sums[warp * SUMS + (tile * 8 + lane % 4 * 2 + j % 2) * SUM_ROW + i * 16 + g + j / 2 * 8] =
            c[i][tile][j];
  __syncthreads();
  for (int i = threadIdx.x; i < PAIRS; i += THREADS) {
    const int m = i / (COLUMNS / 2), n = i % (COLUMNS / 2) * 2;
    if (N % COLUMNS && column + n >= N) continue;
    float t[2] = {};
#pragma unroll
    for (int of = 0; of < WARPS; ++of)
#pragma unroll
      for (int j = 0; j < 2; ++j) t[j] += sums[of * SUMS + m * SUM_ROW + n + j];
    if constexpr (SCALED)
#pragma unroll
      for (int j = 0; j < 2; ++j) t[j] *= scale[column + n + j];
    *(unsigned *)(out + (long long)m * N + column + n) = pack(t[0], t[1]);
  }
}
