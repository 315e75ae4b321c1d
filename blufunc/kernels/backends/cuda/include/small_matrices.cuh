// Factorizations and solves of small matrices in shared memory: a group of threads for each matrix.
//
// Constants: GROUP, threads of a matrix: a power of two, one warp or less, or a whole block; PER_BLOCK, matrices of a block;
// BATCH, matrices; BYTES of shared memory of a matrix. Macros: Scalar, the type of an element, Real, that of its parts,
// Wide, that of sums of squares. Every part names its other constants. A group past the last matrix repeats that one and
// stores nothing, so all threads synchronize.

//# scalars
template<class R> inline R conjugate(R x) { return x; }
template<class R> inline Complex<R> conjugate(Complex<R> z) { return {z.re, -z.im}; }
template<class R> inline R real_part(R x) { return x; }
template<class R> inline R real_part(Complex<R> z) { return z.re; }
template<class R> inline R imaginary_part(R x) { return 0; }
template<class R> inline R imaginary_part(Complex<R> z) { return z.im; }
// the norm by which BLAS chooses pivots
template<class R> inline R size_of(R x) { return x < 0 ? -x : x; }
template<class R> inline R size_of(Complex<R> z) { return size_of(z.re) + size_of(z.im); }
template<class R> inline Wide squared(R x) { return Wide(x) * Wide(x); }
template<class R> inline Wide squared(Complex<R> z) { return squared(z.re) + squared(z.im); }
inline Real times(Real s, Real x) { return s * x; }
inline Complex<Real> times(Real s, Complex<Real> z) { return {s * z.re, s * z.im}; }
// a - x * y, and a + x * y, fused
inline Real minus_product(Real a, Real x, Real y) { return a - x * y; }
inline Complex<Real> minus_product(Complex<Real> a, Complex<Real> x, Complex<Real> y) {
  return {a.re - x.re * y.re + x.im * y.im, a.im - x.re * y.im - x.im * y.re};
}
inline Real plus_product(Real a, Real x, Real y) { return a + x * y; }
inline Complex<Real> plus_product(Complex<Real> a, Complex<Real> x, Complex<Real> y) {
  return {a.re + x.re * y.re - x.im * y.im, a.im + x.re * y.im + x.im * y.re};
}
template<class S> struct from_parts;
template<> struct from_parts<Real> {
  static Real of(Real re, Real) { return re; }
};
template<> struct from_parts<Complex<Real>> {
  static Complex<Real> of(Real re, Real im) { return {re, im}; }
};
static inline Scalar scalar(Real re, Real im = 0) { return from_parts<Scalar>::of(re, im); }
// four elements that are loaded together
struct alignas(4 * sizeof(Scalar) > 16 ? 16 : 4 * sizeof(Scalar)) Four { Scalar x[4]; };

//# groups
static inline int own_lane() { return threadIdx.x % GROUP; }
static inline unsigned own_unit() { return blockIdx.x * PER_BLOCK + threadIdx.x / GROUP; }
static inline void together() {
  if constexpr (GROUP > 32) __syncthreads();
  else __syncwarp();
}
template<class X> inline X exchanged_with(X x, int mask) {
  uint32_t words[sizeof(X) / 4];
  memcpy(words, &x, sizeof(X));
#pragma unroll
  for (int i = 0; i < int(sizeof(X) / 4); ++i) words[i] = __shfl_xor_sync(0xffffffffu, words[i], mask);
  memcpy(&x, words, sizeof(X));
  return x;
}

//# cholesky
// Constants: N, rows; LD, the distance of columns, a multiple of 4. Left-looking by four columns: a thread has a row.
static inline void cholesky(const Scalar *x, Scalar *out, Scalar *a, bool stores) {
  const int lane = own_lane(), i = lane < N ? lane : N - 1;
  for (int e = lane; e < N * N; e += GROUP) a[e % N * LD + e / N] = x[e];
  together();
  bool good = true;
  const int last_of_warp = lane | 31;
  for (int j = 0; j < N; j += 4) {
    Scalar row[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) row[c] = j + c < N ? a[(j + c) * LD + i] : scalar(0);
    if (last_of_warp >= j)  // other warps have no rows left
#pragma unroll 4
      for (int k = 0; k < j; ++k) {
        const Four l = *(const Four *)(a + k * LD + j);
        const Scalar v = a[k * LD + i];
#pragma unroll
        for (int c = 0; c < 4; ++c) row[c] = minus_product(row[c], v, conjugate(l.x[c]));
      }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int p = j + c;
      if (p >= N) break;
      if (lane == p) {
        const Real pivot = real_part(row[c]);
        a[p * LD + p] = scalar(pivot > 0 ? bf_sqrt(pivot) : Real(NAN));
      }
      together();
      const Real root = real_part(a[p * LD + p]);
      good = good && root == root;
      if (lane > p && lane < N) a[p * LD + lane] = row[c] = times(Real(1) / root, row[c]);
      together();
#pragma unroll
      for (int d = c + 1; d < 4; ++d)
        if (j + d < N) row[d] = minus_product(row[d], row[c], conjugate(a[p * LD + j + d]));
    }
  }
  together();
  if (!stores) return;
  for (int e = lane; e < N * N; e += GROUP) {
    const int r = e / N, c = e % N;
    out[e] = c > r ? scalar(0) : good ? a[c * LD + r] : scalar(Real(NAN));
  }
}

//# lu
// Constants: M x N matrices; STEPS, the smaller; LD, as above. By panels of four columns: a thread has a row. Pivots are the
// largest elements, of equal ones the first; a NaN is never one where there are numbers.
struct Pivot {
  Real size;
  int row;
};
static inline Pivot better(Pivot a, Pivot b) {
  return b.size > a.size || (b.size == a.size && b.row < a.row) ? b : a;
}
static inline int pivot_of(Pivot own, Pivot *found) {
  for (int mask = (GROUP < 32 ? GROUP : 32) / 2; mask; mask /= 2) {
    const Pivot other = {exchanged_with(own.size, mask), exchanged_with(own.row, mask)};
    own = better(own, other);
  }
  if constexpr (GROUP > 32) {
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = own;
    __syncthreads();
    own = found[0];
    for (int w = 1; w < GROUP / 32; ++w) own = better(own, found[w]);
  }
  return own.row;
}
static inline void lu(const Scalar *x, Scalar *out, int *pivots, int *permutation, Scalar *a, bool stores) {
  const int lane = own_lane();
  Pivot *found = (Pivot *)(a + N * LD);
  int *order = (int *)(found + 32);
  for (int e = lane; e < M * N; e += GROUP) a[e % N * LD + e / N] = x[e];
  for (int i = lane; i < M; i += GROUP) order[i] = i;
  together();
  for (int j = 0; j < STEPS; j += 4) {
    const int end = j + 4 < STEPS ? j + 4 : STEPS;
    for (int p = j; p < end; ++p) {
      Real size = -2;
      if (lane >= p && lane < M) {
        size = size_of(a[p * LD + lane]);
        size = size >= 0 ? size : Real(-1);
      }
      const int at = pivot_of(Pivot{size, lane}, found);
      if (lane == 0) {
        if (stores) pivots[p] = at;
        const int row = order[p];
        order[p] = order[at];
        order[at] = row;
      }
      if (at != p)
        for (int k = lane; k < N; k += GROUP) {
          const Scalar v = a[k * LD + p];
          a[k * LD + p] = a[k * LD + at];
          a[k * LD + at] = v;
        }
      together();
      if (lane > p && lane < M) {
        const Scalar pivot = a[p * LD + p];
        Scalar l = a[p * LD + lane];
        if (pivot != scalar(0)) l = l / pivot;
        a[p * LD + lane] = l;
        for (int k = p + 1; k < end; ++k)
          a[k * LD + lane] = minus_product(a[k * LD + lane], l, a[k * LD + p]);
      }
      together();
    }
    if (end == N) continue;
    for (int k = end + lane; k < N; k += GROUP)
      for (int p = j + 1; p < end; ++p) {
        Scalar v = a[k * LD + p];
        for (int q = j; q < p; ++q) v = minus_product(v, a[q * LD + p], a[k * LD + q]);
        a[k * LD + p] = v;
      }
    together();
    if (lane >= end && lane < M) {  // then the panel is whole
      Scalar l[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) l[c] = a[(j + c) * LD + lane];
#pragma unroll 4
      for (int k = end; k < N; ++k) {
        const Four u = *(const Four *)(a + k * LD + j);
        Scalar v = a[k * LD + lane];
#pragma unroll
        for (int c = 0; c < 4; ++c) v = minus_product(v, l[c], u.x[c]);
        a[k * LD + lane] = v;
      }
    }
    together();
  }
  if (!stores) return;
  for (int e = lane; e < M * N; e += GROUP) out[e] = a[e % N * LD + e / N];
  for (int i = lane; i < M; i += GROUP) permutation[i] = order[i];
}

//# triangles
// Constants: N rows; K right hand sides; COLUMNS of them for a group; BY_ROWS: whether a thread has a row of all, else a
// column; LD, a multiple of 4; TO_ROW and TO_COLUMN, the distances of right hand sides' elements. Triangles are lower ones:
// those of upper ones come from the end.
constexpr int CHUNKS = (K + COLUMNS - 1) / COLUMNS, TO_SIDE = BY_ROWS ? COLUMNS : COLUMNS + 1;
template<bool TRANSPOSED, bool CONJUGATED, bool REVERSED>
inline void load_triangle(const Scalar *x, Scalar *a) {
  for (int e = own_lane(); e < N * N; e += GROUP) {
    int i = TRANSPOSED ? e % N : e / N, k = TRANSPOSED ? e / N : e % N;
    if (REVERSED) i = N - 1 - i, k = N - 1 - k;
    if (k <= i) a[BY_ROWS ? k * LD + i : i * LD + k] = CONJUGATED ? conjugate(x[e]) : x[e];
  }
}
// right hand sides (or solutions) in shared memory, of which row i is row `place(i)` of the array
template<bool STORES, class Array, class Place>
inline void move_sides(Array *b, Scalar *sides, int count, Place place) {
  for (int e = own_lane(); e < N * COLUMNS; e += GROUP) {
    const int i = TO_ROW == 1 ? e % N : e / COLUMNS, c = TO_ROW == 1 ? e / N : e % COLUMNS;
    if (c >= count) continue;
    Array &there = b[(size_t)place(i) * TO_ROW + (size_t)c * TO_COLUMN];
    if constexpr (STORES) there = sides[i * TO_SIDE + c];
    else sides[i * TO_SIDE + c] = there;
  }
}
template<bool UNIT, bool REVERSED> inline void substitute(const Scalar *a, Scalar *sides) {
  const int lane = own_lane();
  auto row = [](int i) { return REVERSED ? N - 1 - i : i; };
  if constexpr (BY_ROWS) {
    // four rows at a time: their threads share what they have, and every thread solves for them
    Scalar own[COLUMNS], solved[4][COLUMNS];
    if (lane < N)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) own[c] = sides[row(lane) * TO_SIDE + c];
    for (int j = 0; j < N; j += 4) {
      if (lane >= j && lane < j + 4 && lane < N)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sides[row(lane) * TO_SIDE + c] = own[c];
      together();
      if (lane < j || lane >= N) continue;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int p = j + q;
        if (p >= N) break;
        const Scalar inverse = UNIT ? scalar(1) : scalar(1) / a[p * LD + p];
        const bool below = lane > p;
        const Scalar l = below ? a[p * LD + lane] : scalar(0);
        Scalar before[4];  // of this row, elements left of the diagonal
#pragma unroll
        for (int r = 0; r < q; ++r) before[r] = a[(j + r) * LD + p];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          Scalar v = sides[row(p) * TO_SIDE + c];
#pragma unroll
          for (int r = 0; r < q; ++r) v = minus_product(v, before[r], solved[r][c]);
          solved[q][c] = v = UNIT ? v : v * inverse;
          own[c] = lane == p ? v : below ? minus_product(own[c], l, v) : own[c];
        }
      }
    }
    together();
    if (lane < N)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) sides[row(lane) * TO_SIDE + c] = own[c];
  } else if (lane < COLUMNS) {
    for (int j = 0; j < N; j += 4) {
      Scalar x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (j + c >= N) break;
        Scalar v = sides[row(j + c) * TO_SIDE + lane];
#pragma unroll
        for (int q = 0; q < c; ++q) v = minus_product(v, a[(j + c) * LD + j + q], x[q]);
        if (!UNIT) v = v / a[(j + c) * LD + j + c];
        x[c] = sides[row(j + c) * TO_SIDE + lane] = v;
      }
#pragma unroll 4
      for (int i = j + 4; i < N; ++i) {
        const Four l = *(const Four *)(a + i * LD + j);
        Scalar v = sides[row(i) * TO_SIDE + lane];
#pragma unroll
        for (int c = 0; c < 4; ++c) v = minus_product(v, l.x[c], x[c]);
        sides[row(i) * TO_SIDE + lane] = v;
      }
    }
  }
  together();
}

//# triangular_solve
// Constants: LOWER, TRANSPOSED, CONJUGATED, UNIT.
static inline void triangular_solve(const Scalar *x, const Scalar *b, Scalar *out, Scalar *a, bool stores,
                                    int count) {
  constexpr bool REVERSED = LOWER == TRANSPOSED;
  Scalar *sides = a + N * LD;
  auto straight = [](int i) { return i; };
  load_triangle<TRANSPOSED, CONJUGATED, REVERSED>(x, a);
  move_sides<false>(b, sides, count, straight);
  together();
  substitute<UNIT, REVERSED>(a, sides);
  if (stores) move_sides<true>(out, sides, count, straight);
}

//# lu_solve
// Constants: TRANSPOSED. The lower triangle has ones on its diagonal.
static inline void lu_solve(const Scalar *x, const int *permutation, const Scalar *b, Scalar *out, Scalar *a,
                            bool stores, int count) {
  Scalar *sides = a + N * LD;
  auto straight = [](int i) { return i; };
  auto permuted = [=](int i) { return permutation[i]; };
  load_triangle<TRANSPOSED, false, false>(x, a);
  if (TRANSPOSED) move_sides<false>(b, sides, count, straight);
  else move_sides<false>(b, sides, count, permuted);
  together();
  substitute<!TRANSPOSED, false>(a, sides);
  load_triangle<TRANSPOSED, false, true>(x, a);
  together();
  substitute<TRANSPOSED, true>(a, sides);
  if (!stores) return;
  if (TRANSPOSED) move_sides<true>(out, sides, count, permuted);
  else move_sides<true>(out, sides, count, straight);
}

//# reflections
// Constants: M x N matrices; STEPS, the smaller; BASIS, columns of Q; LD, the distance of rows, and LDQ that of Q's. A
// thread has a column; vectors of reflections replace what they annihilate, as in LAPACK.
static inline Wide norm_below(const Scalar *a, int j) {  // every thread computes it
  Wide sum = 0;
#pragma unroll 4
  for (int i = j + 1; i < M; ++i) sum += squared(a[i * LD + j]);
  if (sizeof(Real) < sizeof(Wide) || (sum > Wide(1e-280) && sum < Wide(1e280))) return bf_sqrt(sum);
  Real largest = 0;
  for (int i = j + 1; i < M; ++i) largest = bf_max(largest, size_of(a[i * LD + j]));
  if (!(largest > 0)) return largest;
  sum = 0;
  for (int i = j + 1; i < M; ++i) sum += squared(times(Real(1) / largest, a[i * LD + j]));
  return largest * bf_sqrt(sum);
}
// column c of b, of rows at distance `to_row`, reflected; `tau` is of the reflection, or its conjugate
static inline void reflect(const Scalar *a, int j, Scalar tau, Scalar *b, int to_row, int c) {
  Scalar w = b[j * to_row + c];
#pragma unroll 4
  for (int i = j + 1; i < M; ++i) w = plus_product(w, conjugate(a[i * LD + j]), b[i * to_row + c]);
  w = tau * w;
  b[j * to_row + c] = b[j * to_row + c] - w;
#pragma unroll 4
  for (int i = j + 1; i < M; ++i) b[i * to_row + c] = minus_product(b[i * to_row + c], a[i * LD + j], w);
}
static inline void to_triangle(Scalar *a, Scalar *taus) {
  const int lane = own_lane();
  for (int j = 0; j < STEPS; ++j) {
    const Scalar alpha = a[j * LD + j];
    const Wide below = norm_below(a, j);
    Scalar tau = scalar(0), divisor = scalar(1), beta = scalar(real_part(alpha));
    if (!(below == 0 && imaginary_part(alpha) == 0)) {
      const Wide norm = bf_hypot(bf_hypot(Wide(real_part(alpha)), Wide(imaginary_part(alpha))), below);
      const Real turned = real_part(alpha) < 0 ? Real(norm) : -Real(norm);
      tau = scalar((turned - real_part(alpha)) / turned, -imaginary_part(alpha) / turned);
      divisor = alpha - scalar(turned);  // its inverse overflows if it is tiny
      beta = scalar(turned);
    }
    together();
    for (int i = j + 1 + lane; i < M; i += GROUP) a[i * LD + j] = a[i * LD + j] / divisor;
    if (lane == 0) {
      a[j * LD + j] = beta;
      taus[j] = tau;
    }
    together();
    for (int c = lane; c < N; c += GROUP)
      if (c > j) reflect(a, j, conjugate(tau), a, LD, c);
    together();
  }
}
static inline void to_basis(const Scalar *a, const Scalar *taus, Scalar *q) {
  for (int c = own_lane(); c < BASIS; c += GROUP) {
    for (int i = 0; i < M; ++i) q[i * LDQ + c] = scalar(i == c);
    for (int j = STEPS - 1; j >= 0; --j) reflect(a, j, taus[j], q, LDQ, c);
  }
  together();
}

//# qr
static inline void qr(const Scalar *x, Scalar *out, Scalar *triangle, Scalar *a, bool stores) {
  const int lane = own_lane();
  Scalar *taus = a + M * LD, *q = taus + STEPS;
  for (int e = lane; e < M * N; e += GROUP) a[e / N * LD + e % N] = x[e];
  together();
  to_triangle(a, taus);
  to_basis(a, taus, q);
  if (!stores) return;
  for (int e = lane; e < M * BASIS; e += GROUP) out[e] = q[e / BASIS * LDQ + e % BASIS];
  for (int e = lane; e < BASIS * N; e += GROUP)
    triangle[e] = e / N <= e % N ? a[e / N * LD + e % N] : scalar(0);
}
