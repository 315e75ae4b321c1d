// Linear algebra of one SCALAR, whose real type is REAL; library: steps/linalg.py.
//
// Matrices are row-major. Strides in parameters are in bytes.

//# matrices
typedef SCALAR T;
typedef REAL R;

static inline R absolute(R x) { return x < 0 ? -x : x; }
static inline R magnitude(T x) {
  return IS_COMPLEX ? absolute(__real__ x) + absolute(__imag__ x) : absolute(__real__ x);
}
static inline T conjugate(T x) {
#if IS_COMPLEX
  return ~x;
#else
  return x;
#endif
}

// Copy a matrix with strides in bytes to one with strides in elements.
static inline void load(T *to, int64_t down, int64_t across, const char *from, int64_t m, int64_t n,
                        const int64_t *strides) {
  const int64_t sm = strides[0], sn = strides[1];
  for (int64_t i = 0; i < m; ++i) {
    if (across == 1 && sn == sizeof(T)) {
      memmove(to + i * down, from + i * sm, n * sizeof(T));
    } else {
      for (int64_t j = 0; j < n; ++j) to[i * down + j * across] = *(const T *)(from + i * sm + j * sn);
    }
  }
}

static inline void fill(T *x, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) x[i] = value;
}

// A square matrix whose rows, or if ``turned`` columns, are contiguous and ``stride`` elements apart.
struct Square {
  const T *at;
  int64_t n, stride;
  bool turned;

  Square(const char *x, int64_t n, const int64_t *strides) : at((const T *)x), n(n), turned(false) {
    const int64_t one = sizeof(T), down = strides[0], across = strides[1];
    turned = across != one && down == one;
    stride = (turned ? across : down) / one;
    if ((turned || across == one) && stride >= n && stride * one == (turned ? across : down)) return;
    T *const copy = (T *)scratch.of(n * n * sizeof(T));  // of the thread: few operands lie in such a way
    load(copy, n, 1, x, n, n, strides);
    at = copy, stride = n, turned = false;
  }
};

// The order of rows after row i was swapped with row pivots[i], for i = 0, 1, ... in turn.
static inline void permute(int32_t *order, int64_t rows, const int32_t *pivots, int64_t count) {
  for (int64_t i = 0; i < rows; ++i) order[i] = (int32_t)i;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t j = pivots[i], x = order[i];
    if (j < 0 || j >= rows) continue;
    order[i] = order[j];
    order[j] = x;
  }
}

//# elimination
// Loops of blufunc, for matrices that are too small for calls of LAPACK.

static inline void subtract(T *__restrict to, T factor, const T *__restrict from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] -= factor * from[i];
}

static void eliminate(T *a, int64_t m, int64_t n, int32_t *pivots) {
  for (int64_t j = 0; j < (m < n ? m : n); ++j) {
    int64_t best = j;
    R most = magnitude(a[j * n + j]);
    for (int64_t i = j + 1; i < m; ++i) {
      const R size = magnitude(a[i * n + j]);
      if (size > most) most = size, best = i;
    }
    pivots[j] = (int32_t)best;
    T *const row = a + j * n;
    if (best != j)
      for (int64_t i = 0; i < n; ++i) {
        const T x = row[i];
        row[i] = a[best * n + i];
        a[best * n + i] = x;
      }
    if (row[j] == T(0)) continue;  // so is the column below
    for (int64_t i = j + 1; i < m; ++i) {
      T *const other = a + i * n;
      other[j] /= row[j];
      subtract(other + j + 1, other[j], row + j + 1, n - j - 1);
    }
  }
}

// In place; false if it is not positive definite. ``column`` has room for n elements.
static bool decompose(T *a, int64_t n, T *column) {
  for (int64_t j = 0; j < n; ++j) {
    const R pivot = __real__ a[j * n + j];
    if (pivot <= 0) return false;  // NaN spreads, as in LAPACK
    const R root = (R)__builtin_sqrt(pivot);
    a[j * n + j] = root;
    for (int64_t i = j + 1; i < n; ++i) {
      a[i * n + j] /= root;
      column[i] = conjugate(a[i * n + j]);
    }
    for (int64_t i = j + 1; i < n; ++i) subtract(a + i * n + j + 1, a[i * n + j], column + j + 1, i - j);
  }
  return true;
}

static inline T dot(const T *__restrict a, const T *__restrict x, int64_t count) {
  T sum = 0;
#if !IS_COMPLEX
#pragma omp simd reduction(+ : sum)
#endif
  for (int64_t i = 0; i < count; ++i) sum += a[i] * x[i];
  return sum;
}

// op(a) x = b for one contiguous vector, in place.
static inline void solve_vector(const Square &a, T *x, bool forward, bool transposed, bool unit) {
  const int64_t n = a.n;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t p = forward ? s : n - 1 - s, first = forward ? 0 : p + 1, next = forward ? p + 1 : 0;
    const T *const row = a.at + p * a.stride;
    if (!transposed) x[p] -= dot(row + first, x + first, s);
    if (!unit) x[p] /= row[p];
    if (transposed) subtract(x + next, x[p], row + next, n - 1 - s);
  }
}

// op(a) x = b for k columns of a row-major x, in place.
static void solve_columns(const Square &a, T *x, int64_t k, bool forward, bool transposed, bool unit) {
  const int64_t n = a.n, down = transposed ? 1 : a.stride, across = transposed ? a.stride : 1;
  if (k == 1) return solve_vector(a, x, forward, transposed, unit);
  for (int64_t s = 0; s < n; ++s) {
    const int64_t p = forward ? s : n - 1 - s;
    T *const row = x + p * k;
    if (!unit) {
      const T d = a.at[p * (down + across)];
      for (int64_t j = 0; j < k; ++j) row[j] /= d;
    }
    for (int64_t i = forward ? p + 1 : 0; i < (forward ? n : p); ++i)
      subtract(x + i * k, a.at[i * down + p * across], row, k);
  }
}

// Of ``op(a)`` with a lower or upper triangle of the matrix that the caller sees; x op(a) = b if not ``left``.
static void solve_triangle(const Square &a, T *x, int64_t k, bool left, bool lower, bool transposed,
                           bool unit, T *turned) {
  const bool forward = lower != transposed;
  transposed ^= a.turned;
  if (left) return solve_columns(a, x, k, forward, transposed, unit);
  if (k == 1) return solve_vector(a, x, !forward, !transposed, unit);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < a.n; ++j) turned[j * k + i] = x[i * a.n + j];
  solve_columns(a, turned, k, !forward, !transposed, unit);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < a.n; ++j) x[i * a.n + j] = turned[j * k + i];
}

static void factor(T *a, int64_t m, int64_t n, int32_t *pivots, Parts) { eliminate(a, m, n, pivots); }
static bool factor_positive(T *a, int64_t n, Parts parts) { return decompose(a, n, parts.take<T>(n)); }

//# lapack
// Calls of LAPACK and BLAS, in the order of ``steps/linalg.py``.
extern "C" {
void *routines[8];
}
enum { GETRF, POTRF, TRSM, GEQRF, ORGQR, SYEVD, GESDD, GTSV };

template<class... P> static inline void call(int which, P *...p) {
  ((void (*)(P *...))routines[which])(p...);
}

// LAPACK factors the columns of its matrix: it gets a transposed copy.
static void factor(T *a, int64_t m, int64_t n, int32_t *pivots, Parts parts) {
  T *const copy = parts.take<T>(m * n);
  int rows = (int)m, columns = (int)n, info = 0;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) copy[i + j * m] = a[i * n + j];
  call(GETRF, &rows, &columns, copy, &rows, pivots, &info);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) a[i * n + j] = copy[i + j * m];
  for (int64_t i = 0; i < (m < n ? m : n); ++i) --pivots[i];
}

// The lower triangle of rows is an upper one of columns.
static bool factor_positive(T *a, int64_t n, Parts) {
  int size = (int)n, info = 0;
  char upper = 'U';
  call(POTRF, &upper, &size, a, &size, &info);
  return !info;
}

// BLAS sees a and x transposed.
static void solve_triangle(const Square &a, T *x, int64_t k, bool left, bool lower, bool transposed,
                           bool unit, T *) {
  char side = left ? 'R' : 'L', triangle = lower != a.turned ? 'U' : 'L';
  char turn = transposed != a.turned ? 'T' : 'N', diagonal = unit ? 'U' : 'N';
  T one = 1;
  int size = (int)a.n, stride = (int)a.stride, count = (int)k;
  int *const rows = left ? &count : &size, *const columns = left ? &size : &count;
  call(TRSM, &side, &triangle, &turn, &diagonal, rows, columns, &one, (T *)a.at, &stride, x, rows);
}

//# lu
// Factors, pivots and permutation; parameters: m, n, strides.
extern "C" void lu(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                   int threads) {
  const Batch b(p);
  const int64_t m = b.rest[0], n = b.rest[1], k = m < n ? m : n, *strides = b.rest + 2;
  each(b, scratch, threads, [&](int64_t i, char *slot) {
    T *const a = (T *)results[0] + i * m * n;
    int32_t *const pivots = (int32_t *)results[1] + i * k;
    load(a, n, 1, operands[0] + b.at(i, strides), m, n, strides + b.ndim);
    factor(a, m, n, pivots, Parts{slot});
    permute((int32_t *)results[2] + i * m, m, pivots, k);
  });
}

//# cholesky
// The lower factor of positive definite matrices, NaN of others; parameters: n, strides.
extern "C" void cholesky(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                         int threads) {
  const Batch b(p);
  const int64_t n = b.rest[0], *strides = b.rest + 1;
  each(b, scratch, threads, [&](int64_t i, char *slot) {
    T *const a = (T *)results[0] + i * n * n;
    load(a, n, 1, operands[0] + b.at(i, strides), n, n, strides + b.ndim);
    const bool ok = factor_positive(a, n, Parts{slot});
    for (int64_t u = 0; u < n; ++u) {
      if (!ok) fill(a + u * n, u + 1, T(__builtin_nanf("")));
      fill(a + u * n + u + 1, n - u - 1, T(0));
    }
  });
}

//# triangular
// Parameters: n, k, on the left, lower, transposed, conjugated, unit diagonal, strides of a and of b.
extern "C" void triangular(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                           int threads) {
  const Batch b(p);
  const int64_t n = b.rest[0], k = b.rest[1], *flags = b.rest + 2, *of_a = b.rest + 7,
                *of_b = of_a + b.ndim + 2;
  each(b, scratch, threads, [&](int64_t i, char *slot) {
    T *const x = (T *)results[0] + i * n * k;
    const Square a(operands[0] + b.at(i, of_a), n, of_a + b.ndim);
    load(x, flags[0] ? k : n, 1, operands[1] + b.at(i, of_b), flags[0] ? n : k, flags[0] ? k : n,
         of_b + b.ndim);
    if (flags[3])  // conj(a) x = b, where a conj(x) = conj(b)
      for (int64_t u = 0; u < n * k; ++u) x[u] = conjugate(x[u]);
    solve_triangle(a, x, k, flags[0], flags[1], flags[2], flags[4], (T *)slot);
    if (flags[3])
      for (int64_t u = 0; u < n * k; ++u) x[u] = conjugate(x[u]);
  });
}

//# lu_solve
// A solve from factors and permutation; parameters: n, k, transposed, strides of the factors, permutation and b.
extern "C" void lu_solve(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                         int threads) {
  const Batch b(p);
  const int64_t n = b.rest[0], k = b.rest[1], *of_a = b.rest + 3, *of_order = of_a + b.ndim + 2;
  const int64_t *const of_b = of_order + b.ndim + 1;
  const bool transposed = b.rest[2];
  each(b, scratch, threads, [&](int64_t i, char *slot) {
    T *const y = (T *)slot, *const x = (T *)results[0] + i * n * k;
    const Square a(operands[1] + b.at(i, of_a), n, of_a + b.ndim);
    const char *const order = operands[2] + b.at(i, of_order), *const from = operands[3] + b.at(i, of_b);
    const int64_t step = of_order[b.ndim], *const between = of_b + b.ndim;
    const auto place = [&](int64_t u) {
      const int64_t at = *(const int32_t *)(order + u * step);
      return at < 0 ? at + n : at;
    };
    if (!transposed) {
      for (int64_t u = 0; u < n; ++u) load(x + u * k, k, 1, from + place(u) * between[0], 1, k, between);
      solve_triangle(a, x, k, true, true, false, true, nullptr);
      solve_triangle(a, x, k, true, false, false, false, nullptr);
      return;
    }
    load(y, k, 1, from, n, k, between);
    solve_triangle(a, y, k, true, false, true, false, nullptr);
    solve_triangle(a, y, k, true, true, true, true, nullptr);
    for (int64_t u = 0; u < n; ++u) memcpy(x + place(u) * k, y + u * k, k * sizeof(T));
  });
}

//# permutation
// The order of rows that pivots make; parameters: pivots, rows, strides.
extern "C" void permutation(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                            int threads) {
  const Batch b(p);
  const int64_t k = b.rest[0], m = b.rest[1], *strides = b.rest + 2;
  each(b, scratch, 1, [&](int64_t i, char *slot) {
    int32_t *const pivots = Parts{slot}.take<int32_t>(k);
    const char *const from = operands[0] + b.at(i, strides);
    for (int64_t j = 0; j < k; ++j) pivots[j] = *(const int32_t *)(from + j * strides[b.ndim]);
    permute((int32_t *)results[0] + i * m, m, pivots, k);
  });
}

//# qr
// a = q r; parameters: m, n, columns of q, elements of the workspace, strides.
extern "C" void qr(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                   int threads) {
  const Batch b(p);
  const int64_t m = b.rest[0], n = b.rest[1], k = b.rest[2], least = m < n ? m : n, *strides = b.rest + 4;
  each(b, scratch, 1, [&](int64_t i, char *slot) {
    Parts parts{slot};
    T *const a = parts.take<T>(m * (k > n ? k : n)), *const tau = parts.take<T>(least);
    T *const work = parts.take<T>(b.rest[3]);
    T *const q = (T *)results[0] + i * m * k, *const r = (T *)results[1] + i * k * n;
    int rows = (int)m, columns = (int)n, reflectors = (int)least, made = (int)k, size = (int)b.rest[3],
        info = 0;
    load(a, 1, m, operands[0] + b.at(i, strides), m, n, strides + b.ndim);
    call(GEQRF, &rows, &columns, a, &rows, tau, work, &size, &info);
    for (int64_t u = 0; u < k; ++u)
      for (int64_t v = 0; v < n; ++v) r[u * n + v] = v < u ? T(0) : a[u + v * m];
    call(ORGQR, &rows, &made, &reflectors, a, &rows, tau, work, &size, &info);
    for (int64_t u = 0; u < m; ++u)
      for (int64_t v = 0; v < k; ++v) q[u * k + v] = a[u + v * m];
  });
}

//# eigh
// Eigenvalues of Hermitian matrices, and vectors; parameters: n, whether vectors, three workspaces, strides.
extern "C" void eigh(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                     int threads) {
  const Batch b(p);
  const int64_t n = b.rest[0], *strides = b.rest + 5;
  const bool vectors = b.rest[1];
  each(b, scratch, 1, [&](int64_t i, char *slot) {
    Parts parts{slot};
    T *const a = parts.take<T>(n * n), *const work = parts.take<T>(b.rest[2]);
    int *const integers = parts.take<int>(b.rest[4]);
    R *const reals = parts.take<R>(b.rest[3]);
    R *const w = (R *)results[vectors] + i * n;
    char job = vectors ? 'V' : 'N', lower = 'L';
    int size = (int)n, n_work = (int)b.rest[2], n_reals = (int)b.rest[3], n_integers = (int)b.rest[4],
        info = 0;
    load(a, 1, n, operands[0] + b.at(i, strides), n, n, strides + b.ndim);
#if IS_COMPLEX
    call(SYEVD, &job, &lower, &size, a, &size, w, work, &n_work, reals, &n_reals, integers, &n_integers,
         &info);
#else
    call(SYEVD, &job, &lower, &size, a, &size, w, work, &n_work, integers, &n_integers, &info);
#endif
    if (info)
      for (int64_t u = 0; u < n; ++u) w[u] = __builtin_nanf("");
    if (!vectors) return;
    T *const v = (T *)results[0] + i * n * n;
    for (int64_t u = 0; u < n; ++u)
      for (int64_t c = 0; c < n; ++c) v[u * n + c] = info ? T(__builtin_nanf("")) : a[u + c * n];
  });
}

//# svd
// a = u diag(s) vh; parameters: m, n, columns of u or 0 for s alone, rows of vh, three workspaces, strides.
extern "C" void svd(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                    int threads) {
  const Batch b(p);
  const int64_t m = b.rest[0], n = b.rest[1], k = b.rest[2], l = b.rest[3], least = m < n ? m : n;
  const int64_t *const strides = b.rest + 7;
  each(b, scratch, 1, [&](int64_t i, char *slot) {
    Parts parts{slot};
    T *const a = parts.take<T>(m * n), *const u = parts.take<T>(m * k), *const vh = parts.take<T>(l * n);
    T *const work = parts.take<T>(b.rest[4]);
    R *const reals = parts.take<R>(b.rest[5]);
    int *const integers = parts.take<int>(b.rest[6]);
    R *const s = (R *)results[k ? 1 : 0] + i * least;
    char job = !k ? 'N' : k == m && l == n ? 'A' : 'S';
    int rows = (int)m, columns = (int)n, lines = l > 0 ? (int)l : 1, size = (int)b.rest[4], info = 0;
    load(a, 1, m, operands[0] + b.at(i, strides), m, n, strides + b.ndim);
#if IS_COMPLEX
    call(GESDD, &job, &rows, &columns, a, &rows, s, u, &rows, vh, &lines, work, &size, reals, integers,
         &info);
#else
    call(GESDD, &job, &rows, &columns, a, &rows, s, u, &rows, vh, &lines, work, &size, integers, &info);
#endif
    if (info)
      for (int64_t x = 0; x < least; ++x) s[x] = __builtin_nanf("");
    if (!k) return;
    T *const left = (T *)results[0] + i * m * k, *const right = (T *)results[2] + i * l * n;
    for (int64_t x = 0; x < m; ++x)
      for (int64_t y = 0; y < k; ++y) left[x * k + y] = info ? T(__builtin_nanf("")) : u[x + y * m];
    for (int64_t x = 0; x < l; ++x)
      for (int64_t y = 0; y < n; ++y) right[x * n + y] = info ? T(__builtin_nanf("")) : vh[x + y * l];
  });
}

//# tridiagonal
// Tridiagonal systems; parameters: n, k, strides.
extern "C" void tridiagonal(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                            int threads) {
  const Batch b(p);
  const int64_t n = b.rest[0], k = b.rest[1], *strides = b.rest + 2, each_one = b.ndim + 1;
  each(b, scratch, 1, [&](int64_t i, char *slot) {
    Parts parts{slot};
    T *diagonals[3], *const x = parts.take<T>(n * k), *const result = (T *)results[0] + i * n * k;
    for (int d = 0; d < 3; ++d) {
      const int64_t *const along = strides + d * each_one;
      const char *const from = operands[d] + b.at(i, along);
      T *const to = diagonals[d] = parts.take<T>(n);
      for (int64_t j = 0; j < n; ++j) to[j] = *(const T *)(from + j * along[b.ndim]);
    }
    const int64_t *const along = strides + 3 * each_one;
    load(x, 1, n, operands[3] + b.at(i, along), n, k, along + b.ndim);
    int size = (int)n, count = (int)k, info = 0;
    if (n == 1) {
      for (int64_t j = 0; j < k; ++j) x[j] /= diagonals[1][0];
    } else {
      call(GTSV, &size, &count, diagonals[0] + 1, diagonals[1], diagonals[2], x, &size, &info);
    }
    for (int64_t u = 0; u < n; ++u)
      for (int64_t v = 0; v < k; ++v) result[u * k + v] = info ? T(__builtin_nanf("")) : x[u + v * n];
  });
}
