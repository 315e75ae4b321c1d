// Convolutions as GEMMs whose left operand is gathered while it is loaded: no array of windows is ever in memory.
//
// A block computes BM x BN results of one group, and of a long sum one of SPLITS parts. Rows, terms and columns of the
// GEMM are products of axes (library/convolution/implicit_gemm.py), from whose indices generated functions compute
// offsets: `row_of`, `term_of`, `column_of`, `result_of`, and `locate`, which adds a row and a term to an offset in the
// left operand and is false where the window leaves it. Parts are added in order by `add_parts`, so results repeat.
//
// `gemm` computes any block of such a GEMM, from tiles of 16-bit elements or of float32 in TF32, or by plain arithmetic.
//
// Constants: M, N, T: rows, columns, terms; BM, BN, BK, THREADS; GROUPS, SPLITS, PART: terms of a part; A_GROUP, B_GROUP,
// C_GROUP: offsets of a group; A_TERMS, B_TERMS: whether terms are contiguous in an operand, not rows or columns; A_VECTOR,
// B_VECTOR: whether eight elements are at once. Types: Element, Result, Offset (of elements).

//# common
inline int lesser(int a, int b) { return a < b ? a : b; }
// Rows from `m` on, of which there are results up to `rows`, and columns from `n` on; terms from `first` to `end`. All
// three arrays begin at these offsets.
struct Block {
  int m, n, rows, first, end, group, part;
  Offset a, b, c;
};

//# block
inline Block this_block() {
  constexpr int ACROSS = (N + BN - 1) / BN, TILES = (M + BM - 1) / BM * ACROSS;
  const int tile = blockIdx.x % TILES, which = blockIdx.x / TILES, part = which % SPLITS,
            group = which / SPLITS;
  return {tile / ACROSS * BM,
          tile % ACROSS * BN,
          M,
          part * PART,
          lesser(T, part * PART + PART),
          group,
          part,
          group * (Offset)A_GROUP,
          group * (Offset)B_GROUP,
          group * (Offset)C_GROUP};
}

//# parts
// results = the sum of all parts, first to last
extern "C" __global__ void __launch_bounds__(256) add_parts(const Total *parts, Result *results) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < (long long)GROUPS * M * N;
       i += gridDim.x * 256ll) {
    const int m = i % M, n = i / M % N, group = i / M / N;
    const Total *from = parts + ((long long)group * SPLITS * M + m) * N + n;
    Total sum = 0;
    for (int part = 0; part < SPLITS; ++part) sum += from[(long long)part * M * N];
    store(results + group * (Offset)C_GROUP + result_of(m, n), sum);
  }
}

//# tensor_cores
// Warps of WM x WN results multiply fragments by mma; copies to STAGES tiles of shared memory run ahead.
constexpr int STAGES = 3, WARPS_N = BN / WN;
constexpr int CHUNK = 16 / sizeof(Element);
constexpr int A_PITCH = A_TERMS ? BK + CHUNK : BM + 8, B_PITCH = B_TERMS ? BK + CHUNK : BN + 8;
constexpr int A_SIZE = A_TERMS ? BM * A_PITCH : BK * A_PITCH, B_SIZE = B_TERMS ? BN * B_PITCH : BK * B_PITCH;
extern __shared__ __align__(16) Element tiles[];

inline Element element_of(const Element *a, bool inside, Offset at) { return inside ? a[at] : (Element)0; }

struct Loader {
  const Element *a, *b;
  Block block;
  static constexpr int OWN_A = BM * BK / CHUNK / THREADS, OWN_B = BN * BK / CHUNK / THREADS;
  Row rows[OWN_A];
  Offset columns[OWN_B];

  inline Loader(const Element *a, const Element *b, const Block &block) : a(a), b(b), block(block) {
#pragma unroll
    for (int j = 0; j < OWN_A; ++j) rows[j] = row_of(lesser(block.rows - 1, block.m + a_row(j)));
#pragma unroll
    for (int j = 0; j < OWN_B; ++j) columns[j] = column_of(lesser(N - 1, block.n + b_column(j)));
  }
  // the first row and term of this thread's j-th chunk of a tile; likewise columns
  inline int a_row(int j) const {
    const int i = threadIdx.x + j * THREADS;
    return A_TERMS ? i / (BK / CHUNK) : i % (BM / CHUNK) * CHUNK;
  }
  inline int a_term(int j) const {
    const int i = threadIdx.x + j * THREADS;
    return A_TERMS ? i % (BK / CHUNK) * CHUNK : i / (BM / CHUNK);
  }
  inline int b_column(int j) const {
    const int i = threadIdx.x + j * THREADS;
    return B_TERMS ? i / (BK / CHUNK) : i % (BN / CHUNK) * CHUNK;
  }
  inline int b_term(int j) const {
    const int i = threadIdx.x + j * THREADS;
    return B_TERMS ? i % (BK / CHUNK) * CHUNK : i / (BN / CHUNK);
  }
  inline void copy(int stage, int first) const {
    Element *const to_a = tiles + stage * (A_SIZE + B_SIZE), *const to_b = to_a + A_SIZE;
#pragma unroll
    for (int j = 0; j < OWN_A; ++j) {
      const int m = a_row(j), k = a_term(j);
      Element *const to = to_a + (A_TERMS ? m * A_PITCH + k : k * A_PITCH + m);
      if constexpr (A_VECTOR) {
        Offset at = 0;
        const bool inside =
            block.m + m < block.rows && first + k < block.end && locate(rows[j], term_of(first + k), at);
        copy16(shared_address(to), a + (inside ? at : 0), inside);
      } else {
        for (int v = 0; v < CHUNK; ++v) {
          Offset at = 0;
          const int row = block.m + m + (A_TERMS ? 0 : v), term = first + k + (A_TERMS ? v : 0);
          const bool inside = row < block.rows && term < block.end &&
                              locate(A_TERMS ? rows[j] : row_of(row), term_of(term), at);
          to[v] = element_of(a, inside, at);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < OWN_B; ++j) {
      const int n = b_column(j), k = b_term(j);
      Element *const to = to_b + (B_TERMS ? n * B_PITCH + k : k * B_PITCH + n);
      if constexpr (B_VECTOR) {
        const bool inside = block.n + n < N && first + k < block.end;
        copy16(shared_address(to), b + (inside ? columns[j] + term_of(first + k).b : 0), inside);
      } else {
        for (int v = 0; v < CHUNK; ++v) {
          const int column = block.n + n + (B_TERMS ? 0 : v), term = first + k + (B_TERMS ? v : 0);
          const bool inside = column < N && term < block.end;
          to[v] = element_of(b, inside, inside ? column_of(column) + term_of(term).b : 0);
        }
      }
    }
    end_of_copies();
  }
};

// sums += a b, of 16-bit tiles
inline void multiply_tiles(float (&sums)[WM / 16][WN / 8][4], const unsigned short *as,
                           const unsigned short *bs, int at_m, int at_n, int lane) {
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    unsigned fa[WM / 16][4], fb[WN / 16][4];
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
      const int m = at_m + i * 16 + lane / 8 % 2 * 8;
      if constexpr (A_TERMS)
        load_matrices(fa[i], shared_address(as + (m + lane % 8) * A_PITCH + k + lane / 16 * 8));
      else load_transposed(fa[i], shared_address(as + (k + lane / 16 * 8 + lane % 8) * A_PITCH + m));
    }
#pragma unroll
    for (int i = 0; i < WN / 16; ++i) {
      const int n = at_n + i * 16 + lane / 16 * 8;
      if constexpr (B_TERMS)
        load_matrices(fb[i], shared_address(bs + (n + lane % 8) * B_PITCH + k + lane / 8 % 2 * 8));
      else load_transposed(fb[i], shared_address(bs + (k + lane / 8 % 2 * 8 + lane % 8) * B_PITCH + n));
    }
#pragma unroll
    for (int i = 0; i < WM / 16; ++i)
#pragma unroll
      for (int j = 0; j < WN / 8; ++j)
        multiply_add(sums[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
  }
}

// the same of float32, rounded to TF32
inline void multiply_tiles(float (&sums)[WM / 16][WN / 8][4], const float *as, const float *bs, int at_m,
                           int at_n, int lane) {
  const int g = lane / 4, t = lane % 4;
  const auto of_a = [&](int m, int k) { return to_tf32(as[A_TERMS ? m * A_PITCH + k : k * A_PITCH + m]); };
  const auto of_b = [&](int n, int k) { return to_tf32(bs[B_TERMS ? n * B_PITCH + k : k * B_PITCH + n]); };
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned fb[WN / 8][2];
#pragma unroll
    for (int j = 0; j < WN / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) fb[j][i] = of_b(at_n + j * 8 + g, k + t + i * 4);
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
      unsigned fa[4];
#pragma unroll
      for (int v = 0; v < 4; ++v) fa[v] = of_a(at_m + i * 16 + g + v % 2 * 8, k + t + v / 2 * 4);
#pragma unroll
      for (int j = 0; j < WN / 8; ++j) multiply_add_tf32(sums[i][j], fa, fb[j][0], fb[j][1]);
    }
  }
}

static void gemm(const Element *a, const Element *b, Target *c, const Block &block) {
  const Loader loader(a + block.a, b + block.b, block);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int at_m = warp / WARPS_N * WM, at_n = warp % WARPS_N * WN;
  float sums[WM / 16][WN / 8][4] = {};
  const int steps = block.end > block.first ? (block.end - block.first + BK - 1) / BK : 0;
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < steps) loader.copy(s, block.first + s * BK);
    else end_of_copies();
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    const int next = step + STAGES - 1;
    if (next < steps) loader.copy(next % STAGES, block.first + next * BK);
    else end_of_copies();
    const Element *const as = tiles + step % STAGES * (A_SIZE + B_SIZE), *const bs = as + A_SIZE;
    multiply_tiles(sums, as, bs, at_m, at_n, lane);
  }
#pragma unroll
  for (int i = 0; i < WM / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = block.m + at_m + i * 16 + half * 8 + lane / 4;
      if (m >= block.rows) continue;
#pragma unroll
      for (int j = 0; j < WN / 8; ++j)
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int n = block.n + at_n + j * 8 + lane % 4 * 2 + v;
          if (n < N) store(c + target_of(block, m, n), sums[i][j][half * 2 + v]);
        }
    }
}

//# plain
// Threads of MICRO_M x MICRO_N results multiply and add; the next tile is loaded into registers meanwhile.
static_assert(THREADS == 256 && BM == 16 * MICRO_M && BN == 16 * MICRO_N, "16 x 16 threads");

static void gemm(const Element *a, const Element *b, Target *c, const Block &block) {
  __shared__ __align__(16) Total as[2][BK][BM + 4], bs[2][BK][BN + 4];
  a += block.a, b += block.b;
  constexpr int OWN_A = BM * BK / THREADS, OWN_B = BN * BK / THREADS;
  Row rows[OWN_A];
  Offset columns[OWN_B];
  Element next_a[OWN_A], next_b[OWN_B];
  const auto a_row = [](int j) {
    const int i = threadIdx.x + j * THREADS;
    return A_TERMS ? i / BK : i % BM;
  };
  const auto a_term = [](int j) {
    const int i = threadIdx.x + j * THREADS;
    return A_TERMS ? i % BK : i / BM;
  };
  const auto b_column = [](int j) {
    const int i = threadIdx.x + j * THREADS;
    return B_TERMS ? i / BK : i % BN;
  };
  const auto b_term = [](int j) {
    const int i = threadIdx.x + j * THREADS;
    return B_TERMS ? i % BK : i / BN;
  };
#pragma unroll
  for (int j = 0; j < OWN_A; ++j) rows[j] = row_of(lesser(block.rows - 1, block.m + a_row(j)));
#pragma unroll
  for (int j = 0; j < OWN_B; ++j) columns[j] = column_of(lesser(N - 1, block.n + b_column(j)));
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < OWN_A; ++j) {
      Offset at = 0;
      const int term = first + a_term(j);
      const bool inside =
          block.m + a_row(j) < block.rows && term < block.end && locate(rows[j], term_of(term), at);
      next_a[j] = inside ? a[at] : (Element)0;
    }
#pragma unroll
    for (int j = 0; j < OWN_B; ++j) {
      const int term = first + b_term(j);
      const bool inside = block.n + b_column(j) < N && term < block.end;
      next_b[j] = inside ? b[columns[j] + term_of(term).b] : (Element)0;
    }
  };
  const auto put = [&](int buffer) {
#pragma unroll
    for (int j = 0; j < OWN_A; ++j) as[buffer][a_term(j)][a_row(j)] = next_a[j];
#pragma unroll
    for (int j = 0; j < OWN_B; ++j) bs[buffer][b_term(j)][b_column(j)] = next_b[j];
  };
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  Total sums[MICRO_M][MICRO_N] = {};
  const int steps = block.end > block.first ? (block.end - block.first + BK - 1) / BK : 0;
  if (steps) load(block.first), put(0);
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load(block.first + (step + 1) * BK);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      Total va[MICRO_M], vb[MICRO_N];
#pragma unroll
      for (int i = 0; i < MICRO_M; ++i) va[i] = as[step % 2][k][i / 4 * 64 + y * 4 + i % 4];
#pragma unroll
      for (int i = 0; i < MICRO_N; ++i) vb[i] = bs[step % 2][k][i / 4 * 64 + x * 4 + i % 4];
#pragma unroll
      for (int i = 0; i < MICRO_M; ++i)
#pragma unroll
        for (int j = 0; j < MICRO_N; ++j) sums[i][j] += va[i] * vb[j];
    }
    if (step + 1 < steps) put((step + 1) % 2);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < MICRO_M; ++i) {
    const int m = block.m + i / 4 * 64 + y * 4 + i % 4;
    if (m >= block.rows) continue;
#pragma unroll
    for (int j = 0; j < MICRO_N; ++j) {
      const int n = block.n + j / 4 * 64 + x * 4 + j % 4;
      if (n < N) store(c + target_of(block, m, n), sums[i][j]);
    }
  }
}

//# entry
extern "C" __global__ void __launch_bounds__(THREADS)
    implicit_gemm(const Element *a, const Element *b, Target *c) {
  gemm(a, b, c, this_block());
}
