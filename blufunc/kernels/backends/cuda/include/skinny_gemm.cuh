// GEMMs with at most 16 rows, bound by reading the right operand: the weights. Those of the same rows may be one kernel.
//
// A weight is read once, straight into registers: the sum over terms may be in any order, so a lane takes terms that are
// adjacent in memory as those that a fragment of `multiply_add` has. The weights' columns are the 16 rows of its left
// operand, and the rows of x its 8 columns. A block has COLUMNS columns, and each of its warps a range of terms. Their
// sums are added up in a fixed order.
//
// Weights are loaded ahead of the wait for preceding kernels, if the launch allows both to overlap. A stage is loaded once
// the one IN_FLIGHT before it has arrived: more requests at a time would only delay those of the preceding kernels.
//
// Rows that are COMPUTED, such as normalized ones, are so by every block, into shared memory: that takes less time than a
// kernel of their own.
//
// Constants: M, N, K; WEIGHTS: matrices; BY_TERMS: whether the terms of a column are contiguous in memory, else the columns
// of a term are; COLUMNS: 16, 32 or 64, of each matrix; WARPS; DEPTH: stages of a lane that are loaded ahead; IN_FLIGHT;
// COMPUTED; WIDE: whether results are float; BIAS: whether a vector is added before results are rounded; ADDEND: whether a
// matrix is; and of the epilogue, those of pointwise_gemm.cuh.

//# instructions
// of lines in L2 that no thread reads again
inline unsigned long long evicted_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
inline void load_once(unsigned (&r)[4], const void *from, unsigned long long policy) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(from), "l"(policy));
}
inline void load_once(unsigned (&r)[2], const void *from, unsigned long long policy) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(r[0]), "=r"(r[1])
               : "l"(from), "l"(policy));
}
inline void load_once(unsigned (&r)[1], const void *from, unsigned long long policy) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.u32 %0, [%1], %2;"
               : "=r"(r[0])
               : "l"(from), "l"(policy));
}
// go on once a load has arrived: a conversion to a condition that never holds reads it
inline void wait_for_word(unsigned x) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x7fc1a2b3;\n@p nanosleep.u32 1;\n}" ::"r"(x)
               : "memory");
}
inline void load_words(unsigned (&r)[4], const void *from) {
  const uint4 x = *(const uint4 *)from;
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
inline void load_words(unsigned (&r)[2], const void *from) {
  const uint2 x = *(const uint2 *)from;
  r[0] = x.x, r[1] = x.y;
}

//# gemm
typedef unsigned short element;
template<bool> struct Result { typedef element type; };
template<> struct Result<true> { typedef float type; };
typedef Result<WIDE>::type result;
extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr int THREADS = 32 * WARPS, TILES = (M + 7) / 8, SLABS = COLUMNS / 16;
constexpr int TERMS = BY_TERMS ? 32 : 16;                         // of a stage
constexpr int LOADS = BY_TERMS ? 2 * SLABS : 4;                   // of a lane and stage
constexpr int WORDS = BY_TERMS ? 4 : SLABS, X_WORDS = TERMS / 8;  // of a load, and of x
constexpr int STAGES = (K + TERMS - 1) / TERMS;                   // of all warps
constexpr int SUM_ROW = WEIGHTS * COLUMNS + 4,
              SUMS = TILES * 8 * SUM_ROW;  // padded: two rows start in other banks
constexpr int PAIRS = M * COLUMNS / 2;     // of adjacent columns
constexpr int ROW =
    (K + 63) / 64 * 64 + 8 * X_WORDS;  // of computed rows: lanes that read at a time do of other banks

// What a lane holds of the weights, and of x, for the matmuls of some terms.
struct Stage { unsigned w[WEIGHTS][LOADS][WORDS], x[TILES][X_WORDS]; };

// Matrices whose rows are at a distance.
struct Weights {
  const element *at[WEIGHTS];
  long long row[WEIGHTS];
};

struct Factors {
  const element *x;
  long long x_row;
  Weights w;
  int column, lane;
  unsigned long long policy;

  inline void load_weights(Stage &s, int stage) const {
    const int g = lane / 4, k = stage * TERMS + lane % 4 * (TERMS / 4);
#pragma unroll
    for (int of = 0; of < WEIGHTS; ++of)
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int n = column + (BY_TERMS ? g + i * 8 : g * (2 * SLABS));
        const bool inside = (N % COLUMNS == 0 || n < N) && (K % TERMS == 0 || k < K);
        const element *from = w.at[of] + (BY_TERMS ? n * w.row[of] + k : (k + i) * w.row[of] + n);
        if (inside) load_once(s.w[of][i], from, policy);
        else
#pragma unroll
          for (int j = 0; j < WORDS; ++j) s.w[of][i][j] = 0;
      }
  }
  inline void load_x(Stage &s, int stage) const {
    const int k = stage * TERMS + lane % 4 * (TERMS / 4);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int m = min(tile * 8 + lane / 4, M - 1);  // columns beyond the last row are not stored
      if (K % TERMS == 0 || k < K) load_words(s.x[tile], x + m * x_row + k);
      else
#pragma unroll
        for (int j = 0; j < X_WORDS; ++j) s.x[tile][j] = 0;
    }
  }
};

// c += w x. Lane l has of c[i][tile], if BY_TERMS, columns i * 16 + l / 4 and 8 further; else (l / 4 * SLABS + i) * 2 and
// the next one.
typedef float Sums[SLABS][TILES][4];
inline void multiply(Sums &c, const unsigned (&w)[LOADS][WORDS], const unsigned (&x)[TILES][X_WORDS]) {
#pragma unroll
  for (int i = 0; i < SLABS; ++i) {
    if constexpr (BY_TERMS) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned a[4] = {w[i * 2][half * 2], w[i * 2 + 1][half * 2], w[i * 2][half * 2 + 1],
                               w[i * 2 + 1][half * 2 + 1]};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
          multiply_add(c[i][tile], a, x[tile][half * 2], x[tile][half * 2 + 1]);
      }
    } else {
      unsigned a[4];
#pragma unroll
      for (int half = 0; half < 2;
           ++half) {  // pairs of terms of one column, from pairs of columns of one term
        const unsigned one = w[half * 2][i], other = w[half * 2 + 1][i];
        a[half * 2] = (one & 0xffffu) | other << 16;
        a[half * 2 + 1] = one >> 16 | (other & 0xffff0000u);
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) multiply_add(c[i][tile], a, x[tile][0], x[tile][1]);
    }
  }
}

// The sums of a warp, as rows of COLUMNS columns.
inline void keep(float *sums, const Sums &c, int lane) {
  const int g = lane / 4;
#pragma unroll
  for (int i = 0; i < SLABS; ++i)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = BY_TERMS ? i * 16 + g + j / 2 * 8 : (g * SLABS + i) * 2 + j / 2;
        sums[(tile * 8 + lane % 4 * 2 + j % 2) * SUM_ROW + n] = c[i][tile][j];
      }
}

inline float as_float(element x) { return low_half(x); }
inline float as_float(float x) { return x; }

// Rows in memory.
struct Given {
  inline void compute(element *) const {}
};

template<class Rows, class Epilogue>
inline void skinny_gemm(const element *x, long long x_row, const Weights &w, const result *bias,
                        const result *addend, const Rows &rows, const Epilogue &epilogue) {
  float *const sums = (float *)shared_memory;
  element *const computed = (element *)(sums + WARPS * SUMS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * COLUMNS;
  const int begin = warp * STAGES / WARPS, end = (warp + 1) * STAGES / WARPS;
  const Factors factors = {COMPUTED ? computed : x, COMPUTED ? ROW : x_row, w, column, lane, evicted_first()};
  Sums c[WEIGHTS] = {};
  Stage stages[DEPTH];
  let_next_kernel_begin();
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    if (d >= IN_FLIGHT) wait_for_word(stages[d - IN_FLIGHT].w[WEIGHTS - 1][LOADS - 1][0]);
    if (begin + d < end) factors.load_weights(stages[d], begin + d);
  }
  wait_for_previous_kernel();
  if constexpr (COMPUTED) {
    rows.compute(computed);
    __syncthreads();
  } else {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (begin + d < end) factors.load_x(stages[d], begin + d);
  }
  for (int s = begin; s < end; s += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (s + d >= end) break;
      if constexpr (COMPUTED) factors.load_x(stages[d], s + d);
#pragma unroll
      for (int of = 0; of < WEIGHTS; ++of) multiply(c[of], stages[d].w[of], stages[d].x);
      if (s + d + DEPTH < end) {
        factors.load_weights(stages[d], s + d + DEPTH);
        if constexpr (!COMPUTED) factors.load_x(stages[d], s + d + DEPTH);
      }
    }
  }
#pragma unroll
  for (int of = 0; of < WEIGHTS; ++of) keep(sums + warp * SUMS + of * COLUMNS, c[of], lane);
  __syncthreads();
  for (int i = threadIdx.x; i < PAIRS; i += THREADS) {
    const int m = i / (COLUMNS / 2), n = i % (COLUMNS / 2) * 2;
    if (N % COLUMNS && column + n >= N) continue;
    const float *const own = sums + m * SUM_ROW + n;
    float t[WEIGHTS][2] = {};
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
#pragma unroll
      for (int of = 0; of < WEIGHTS; ++of)
#pragma unroll
        for (int j = 0; j < 2; ++j) t[of][j] += own[i * SUMS + of * COLUMNS + j];
    const long long at = (long long)m * N + column + n;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (BIAS) t[0][j] += as_float(bias[column + n + j]);
      if (ADDEND) t[0][j] += as_float(addend[at + j]);
    }
    epilogue.store(t, at, column + n);
  }
}

//# store
// Results are the sums, rounded.
struct Store {
  result *out;
  inline void store(const float (&t)[1][2], long long at, int) const {
    if constexpr (WIDE) *(float2 *)(out + at) = make_float2(t[0][0], t[0][1]);
    else *(unsigned *)(out + at) = pack(t[0][0], t[0][1]);
  }
};

//# apply
// Results are those of `apply(t, matrices, vectors, scalars, results)`, of which STORED is t[0] itself.
struct Store {
  const element *matrices[MATRICES + 1];
  const void *vectors[VECTORS + 1];
  const float *scalars[SCALARS + 1];
  element *results[RESULTS];
  inline void store(const float (&sums)[WEIGHTS][2], long long at, int column) const {
    unsigned rounded[WEIGHTS];
    float t[2][WEIGHTS];
#pragma unroll
    for (int of = 0; of < WEIGHTS; ++of) {
      rounded[of] = pack(sums[of][0], sums[of][1]);
      t[0][of] = low_half(rounded[of]), t[1][of] = high_half(rounded[of]);
    }
    float made[2][RESULTS], x[2][MATRICES + 1], of_column[2][VECTORS + 1], of_all[SCALARS + 1];
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) {
      const unsigned two = *(const unsigned *)(matrices[i] + at);
      x[0][i] = low_half(two), x[1][i] = high_half(two);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        of_column[j][i] = WIDE_VECTORS >> i & 1 ? ((const float *)vectors[i])[column + j]
                                                : low_half(((const element *)vectors[i])[column + j]);
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) of_all[i] = *scalars[i];
    apply(t[0], x[0], of_column[0], of_all, made[0]);
    apply(t[1], x[1], of_column[1], of_all, made[1]);
#pragma unroll
    for (int i = 0; i < RESULTS; ++i)
      *(unsigned *)(results[i] + at) = i == STORED ? rounded[0] : pack(made[0][i], made[1][i]);
  }
};

//# rows
// Eight elements from a place that is aligned.
inline void load_elements(float (&to)[8], const element *from) {
  unsigned words[4];
  load_words(words, from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = low_half(words[i]), to[2 * i + 1] = high_half(words[i]);
}
inline void load_elements(float (&to)[8], const float *from) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 x = ((const float4 *)from)[i];
    to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
  }
}
inline void store_elements(element *to, const float (&x)[8]) {
  *(uint4 *)to = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}
struct RowSum {
  static inline float start() { return 0; }
  static inline float join(float x, float y) { return x + y; }
};
struct RowMax {
  static inline float start() { return -INFINITY; }
  static inline float join(float x, float y) { return bf_max(x, y); }
};
struct RowMin {
  static inline float start() { return INFINITY; }
  static inline float join(float x, float y) { return bf_min(x, y); }
};
// of all lanes of a warp
template<class Of> inline float reduced(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = Of::join(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
