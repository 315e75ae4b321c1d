// GEMMs on the CPU, for the vector instructions of the machine that compiles this; library: gemm.py.

//# layout
#include <stdint.h>

// Stacks of matrices: extents, and strides in elements. The result is in order.
struct Product {
  int64_t rows, columns, inner, batches, axes;
  int64_t lhs_row, lhs_inner, rhs_inner, rhs_column;
  int64_t extent[8], lhs_batch[8], rhs_batch[8];
};

//# gemm
// The bytes of a vector register, and the rows of a tile: two vectors of each row stay in registers.
#if defined(__AVX512F__)
enum { WIDTH = 64, ROWS = 8 };
#elif defined(__aarch64__)
enum { WIDTH = 16, ROWS = 8 };
#elif defined(__AVX__)
enum { WIDTH = 32, ROWS = 6 };
#else
enum { WIDTH = 16, ROWS = 6 };
#endif

// The most rows and columns of a block of the result, and how much of the sum a block of the operands covers.
enum { BLOCK_ROWS = 256, BLOCK_COLUMNS = 512, DEPTH = 256 };

// Panels that are packed together: as many streams as a first cache holds lines of one set.
enum { STREAMS = 8 };

// Fewer rows or columns are multiplied in place: copying them to panels would take longer.
enum { LEAST_ROWS = 16, LEAST_COLUMNS = 32 };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Panels of W rows (or columns): of each its W elements at position 0 of the sum, then those at 1, and so on.
// The last panel is filled up with zeros. Panels hold ``pitch`` positions, of which these are the first ``inner``.
template<int W, typename T>
static void pack(T *__restrict to, const T *__restrict from, int64_t count, int64_t inner, int64_t across,
                 int64_t along, int64_t pitch) {
  const int64_t whole = count / W * W;
  if (across == 1) {
    for (int64_t group = 0; group < whole; group += STREAMS * W)
      for (int64_t k = 0; k < inner; ++k)
        for (int64_t p = group; p < least(group + STREAMS * W, whole); p += W)
          for (int i = 0; i < W; ++i) to[p * pitch + k * W + i] = from[p + i + k * along];
  } else {
    for (int64_t p = 0; p < whole; p += W)
      for (int64_t k = 0; k < inner; k += 8)  // small blocks are transposed within the first cache
        for (int i = 0; i < W; ++i)
          for (int64_t j = k; j < least(k + 8, inner); ++j)
            to[p * pitch + j * W + i] = from[(p + i) * across + j * along];
  }
  for (int64_t k = 0; whole < count && k < inner; ++k)
    for (int i = 0; i < W; ++i)
      to[whole * pitch + k * W + i] = whole + i < count ? from[(whole + i) * across + k * along] : T(0);
}

template<typename T> struct Gemm {
  typedef T Vector __attribute__((vector_size(WIDTH), aligned(sizeof(T)), may_alias));
  enum { LANES = WIDTH / sizeof(T), COLUMNS = 2 * LANES, WIDE = 8 * LANES };

  // One tile of the result, of which the first ``rows`` rows and ``columns`` columns are wanted.
  static void tile(int64_t inner, const T *__restrict a, const T *__restrict b, T *__restrict out,
                   int64_t stride, int64_t rows, int64_t columns, bool add) {
    Vector sum[ROWS][2] = {};
    for (int64_t k = 0; k < inner; ++k, a += ROWS, b += COLUMNS) {
      const Vector left = *(const Vector *)b, right = *(const Vector *)(b + LANES);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        sum[i][0] += a[i] * left;
        sum[i][1] += a[i] * right;
      }
    }
    if (rows >= ROWS && columns >= COLUMNS) {
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        Vector *to = (Vector *)(out + i * stride);
        to[0] = add ? to[0] + sum[i][0] : sum[i][0];
        to[1] = add ? to[1] + sum[i][1] : sum[i][1];
      }
      return;
    }
    T all[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      *(Vector *)all[i] = sum[i][0];
      *(Vector *)(all[i] + LANES) = sum[i][1];
    }
    for (int i = 0; i < least(rows, ROWS); ++i)
      for (int j = 0; j < least(columns, COLUMNS); ++j) {
        T *to = out + i * stride + j;
        *to = add ? *to + all[i][j] : all[i][j];
      }
  }

  // One block of the result.
  static void block(const Product &p, const T *lhs, const T *rhs, T *out, int64_t rows, int64_t columns) {
    const int64_t most = least(p.inner, DEPTH);
    const int64_t a_size = round_up(rows, ROWS) * most, b_size = round_up(columns, COLUMNS) * most;
    T *a = (T *)scratch.of(sizeof(T) * (round_up(a_size, 64) + b_size)), *b = a + round_up(a_size, 64);
    for (int64_t k = 0; k < p.inner; k += DEPTH) {
      const int64_t inner = least(DEPTH, p.inner - k);
      pack<ROWS>(a, lhs + k * p.lhs_inner, rows, inner, p.lhs_row, p.lhs_inner, inner);
      pack<COLUMNS>(b, rhs + k * p.rhs_inner, columns, inner, p.rhs_column, p.rhs_inner, inner);
      for (int64_t j = 0; j < columns; j += COLUMNS)
        for (int64_t i = 0; i < rows; i += ROWS)
          tile(inner, a + i * inner, b + j * inner, out + i * p.columns + j, p.columns, rows - i, columns - j,
               k > 0);
    }
  }

  // -- few rows or columns ---------------------------------------------------------------------------

  // R rows of the result by V vectors of N columns, ``apart`` elements apart; the columns of the rhs are contiguous.
  // K sums of every K-th term hide the latency of an addition where R and V are small.
  template<int R, int V, int K = 1, int N = LANES>
  static void strip(const Product &p, const T *lhs, const T *rhs, T *out, int64_t apart = N) {
    typedef T Part __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias));
    Part sum[K][R][V] = {};
    int64_t k = 0;
    for (; k + K <= p.inner; k += K)
#pragma GCC unroll 8
      for (int c = 0; c < K; ++c, lhs += p.lhs_inner, rhs += p.rhs_inner)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const Part right = *(const Part *)(rhs + v * apart);
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i) sum[c][i][v] += lhs[i * p.lhs_row] * right;
        }
    for (; k < p.inner; ++k, lhs += p.lhs_inner, rhs += p.rhs_inner)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) sum[0][i][v] += lhs[i * p.lhs_row] * *(const Part *)(rhs + v * apart);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        Part total = sum[0][i][v];
#pragma GCC unroll 8
        for (int c = 1; c < K; ++c) total += sum[c][i][v];
        *(Part *)(out + i * p.columns + v * apart) = total;
      }
  }

  // The same of fewer columns than a vector has lanes.
  static void narrow(const Product &p, const T *lhs, const T *rhs, T *out, int64_t columns) {
    T sum[LANES] = {};
    for (int64_t k = 0; k < p.inner; ++k, lhs += p.lhs_inner, rhs += p.rhs_inner)
      for (int64_t j = 0; j < columns; ++j) sum[j] += *lhs * rhs[j];
    for (int64_t j = 0; j < columns; ++j) out[j] = sum[j];
  }

  // One or two vectors of all columns: the last may overlap the first, and both compute the same. False if there are
  // more columns, or fewer than a short vector has.
  template<int R, int N = LANES>
  static bool few_columns(const Product &p, const T *lhs, const T *rhs, T *out) {
    if (p.columns == N) strip<R, 1, R == 1 ? 8 : 2, N>(p, lhs, rhs, out);
    else if (p.columns > N && p.columns <= 2 * N)
      strip<R, 2, R == 1 ? 4 : 1, N>(p, lhs, rhs, out, p.columns - N);
    else if constexpr (N > 16 / sizeof(T)) return p.columns < N && few_columns<R, N / 2>(p, lhs, rhs, out);
    else return false;
    return true;
  }

  template<int R> static void strips(const Product &p, const T *lhs, const T *rhs, T *out, int64_t columns) {
    if (few_columns<R>(p, lhs, rhs, out)) return;  // then this thread multiplies all of them
    int64_t j = 0;
    for (; R < 4 && j + 8 * LANES <= columns; j += 8 * LANES)
      strip<R, 8 / (R > 1 ? 2 : 1)>(p, lhs, rhs + j, out + j);
    for (; j + 2 * LANES <= columns; j += 2 * LANES) strip<R, 2>(p, lhs, rhs + j, out + j);
    for (; j + LANES <= columns; j += LANES) strip<R, 1>(p, lhs, rhs + j, out + j);
    if (j < columns &&
        columns >= LANES) {  // again some columns of the vector before, which come out the same
      j = columns - LANES;
      return strip<R, 1>(p, lhs, rhs + j, out + j);
    }
    for (int i = 0; j < columns && i < R; ++i)
      narrow(p, lhs + i * p.lhs_row, rhs + j, out + i * p.columns + j, columns - j);
  }

  // The rows of a lhs, or the elements of one, times columns that are contiguous in memory.
  static void by_columns(const Product &p, const T *lhs, const T *rhs, T *out, int64_t columns) {
    int64_t i = 0;
    for (; i + 4 <= p.rows; i += 4) strips<4>(p, lhs + i * p.lhs_row, rhs, out + i * p.columns, columns);
    for (; i < p.rows; ++i) strips<1>(p, lhs + i * p.lhs_row, rhs, out + i * p.columns, columns);
  }

  // The sum of N elements, by halves.
  template<int N> static T sum_of(const T *x) {
    if constexpr (N == 1) {
      return *x;
    } else {
      typedef T Half __attribute__((vector_size(N / 2 * sizeof(T)), aligned(sizeof(T)), may_alias));
      T sum[N / 2];
      *(Half *)sum = *(const Half *)x + *(const Half *)(x + N / 2);
      return sum_of<N / 2>(sum);
    }
  }

  // The sums of the products of R rows and a contiguous vector.
  template<int R> static void dots(const Product &p, const T *lhs, const T *rhs, T *out) {
    enum { K = R == 1 ? 4 : 1 };
    Vector sum[R][K] = {};
    const int64_t n = p.inner;
    int64_t k = 0;
    for (; k + K * LANES <= n; k += K * LANES)
#pragma GCC unroll 4
      for (int c = 0; c < K; ++c) {
        const Vector right = *(const Vector *)(rhs + k + c * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
          sum[i][c] += *(const Vector *)(lhs + i * p.lhs_row + k + c * LANES) * right;
      }
    for (; k + LANES <= n; k += LANES)
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i)
        sum[i][0] += *(const Vector *)(lhs + i * p.lhs_row + k) * *(const Vector *)(rhs + k);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const Vector all = K == 1 ? sum[i][0] : (sum[i][0] + sum[i][1 % K]) + (sum[i][2 % K] + sum[i][3 % K]);
      T total = sum_of<LANES>((const T *)&all);
      for (int64_t j = k; j < n; ++j) total += lhs[i * p.lhs_row + j] * rhs[j];
      out[i * p.columns] = total;
    }
  }

  // Rows times one column, both contiguous.
  static void by_rows(const Product &p, const T *lhs, const T *rhs, T *out) {
    int64_t i = 0;
    for (; i + 4 <= p.rows; i += 4) dots<4>(p, lhs + i * p.lhs_row, rhs, out + i * p.columns);
    for (; i < p.rows; ++i) dots<1>(p, lhs + i * p.lhs_row, rhs, out + i * p.columns);
  }

  // Columns ``from`` to ``to`` of a product. How it sums depends on all columns, not on those of this thread.
  static void small(const Product &p, const T *lhs, const T *rhs, T *out, int64_t from, int64_t to) {
    rhs += from * p.rhs_column;
    out += from;
    const int64_t columns = to - from;
    if (p.rhs_column == 1 || p.columns == 1) {
      if (p.columns > 1) return by_columns(p, lhs, rhs, out, columns);
      if (p.rhs_inner == 1 && p.lhs_inner == 1) {
        return by_rows(p, lhs, rhs, out);
      }
      if (p.lhs_row == 1) {  // the transposed product has contiguous columns
        Product q = p;
        q.rows = 1, q.columns = p.rows;
        q.lhs_row = 0, q.lhs_inner = p.rhs_inner, q.rhs_inner = p.lhs_inner, q.rhs_column = 1;
        return by_columns(q, rhs, lhs, out, p.rows);
      }
    } else if (p.rhs_inner == 1 && p.lhs_inner == 1 && p.inner >= LANES) {
      for (int64_t j = 0; j < columns; ++j) by_rows(p, lhs, rhs + j * p.rhs_column, out + j);
      return;
    }
    // columns that are apart are copied, some at a time
    T *b = (T *)scratch.of(sizeof(T) * p.inner * least(columns, WIDE));
    for (int64_t j = 0; j < columns; j += WIDE) {
      const int64_t count = least(columns - j, WIDE);
      for (int64_t k = 0; k < p.inner; ++k)
        for (int64_t i = 0; i < count; ++i) b[k * count + i] = rhs[k * p.rhs_inner + (j + i) * p.rhs_column];
      Product q = p;
      q.rhs_inner = count, q.rhs_column = 1;
      by_columns(q, lhs, b, out + j, count);
    }
  }

  // The operands of a batch.
  static void batch_of(const Product &p, int64_t batch, const T *&x, const T *&y) {
    for (int64_t d = p.axes - 1; d >= 0; batch /= p.extent[d--]) {
      x += batch % p.extent[d] * p.lhs_batch[d];
      y += batch % p.extent[d] * p.rhs_batch[d];
    }
  }

  // Columns of one thread are whole vectors, so that sums have one order.
  static void run_small(const Product &p, const T *lhs, const T *rhs, T *out, int threads) {
    if (threads == 1) {  // without OpenMP, whose calls take longer than a small product
      for (int64_t batch = 0; batch < p.batches; ++batch) {
        const T *x = lhs, *y = rhs;
        batch_of(p, batch, x, y);
        small(p, x, y, out + batch * p.rows * p.columns, 0, p.columns);
      }
      return;
    }
    const int64_t parts = p.batches >= threads ? 1 : least(threads, ceil_div(p.columns, WIDE));
    const int64_t columns = round_up(ceil_div(p.columns, parts), WIDE);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t at = 0; at < p.batches * parts; ++at) {
      const T *x = lhs, *y = rhs;
      batch_of(p, at / parts, x, y);
      const int64_t from = at % parts * columns, to = least(from + columns, p.columns);
      if (from < to) small(p, x, y, out + at / parts * p.rows * p.columns, from, to);
    }
  }

  // -- all products ------------------------------------------------------------------------------------

  static void run(const Product &p, const T *lhs, const T *rhs, T *out, int threads) {
    if (p.rows < LEAST_ROWS || p.columns < LEAST_COLUMNS) return run_small(p, lhs, rhs, out, threads);
    int64_t down = ceil_div(p.rows, BLOCK_ROWS), across = ceil_div(p.columns, BLOCK_COLUMNS);
    // a few blocks are cut further, until all threads have as many
    const bool tall = p.rows > p.columns;
    int64_t &cuts = tall ? down : across;
    const int64_t most = tall ? ceil_div(p.rows, ROWS) : ceil_div(p.columns, COLUMNS);
    while (cuts < most && p.batches * down * across < 4 * threads && p.batches * down * across % threads)
      ++cuts;
    const int64_t rows = round_up(ceil_div(p.rows, down), ROWS);
    const int64_t columns = round_up(ceil_div(p.columns, across), COLUMNS);
    down = ceil_div(p.rows, rows);
    across = ceil_div(p.columns, columns);
    const int64_t blocks = p.batches * down * across;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t at = 0; at < blocks; ++at) {
      const int64_t batch = at / (down * across), i = at / across % down * rows, j = at % across * columns;
      const T *x = lhs + i * p.lhs_row, *y = rhs + j * p.rhs_column;
      batch_of(p, batch, x, y);
      T *to = out + (batch * p.rows + i) * p.columns + j;
      block(p, x, y, to, least(rows, p.rows - i), least(columns, p.columns - j));
    }
  }
};

//# products
extern "C" void product(const Product *p, const REAL *lhs, const REAL *rhs, REAL *out, int threads) {
  Gemm<REAL>::run(*p, lhs, rhs, out, threads);
}
