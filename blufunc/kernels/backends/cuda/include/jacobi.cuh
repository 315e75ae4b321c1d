// Eigenvalues and singular values of small matrices by rotations of pairs (Jacobi): a warp for each matrix.
//
// After `small_matrices.cuh`, whose constants hold. N, columns; SWEEPS, the most passes over all pairs; VECTORS, whether they
// are computed. Rounds of disjoint pairs follow the schedule of a tournament. Matrices are scaled by a power of two, so that
// nothing overflows; one with an infinity or NaN gives NaN.

//# rotations
constexpr int PLAYERS = N + N % 2, PAIRS = PLAYERS / 2;
constexpr Real EPSILON = sizeof(Real) == 4 ? Real(1.1920929e-07) : Real(2.220446049250313e-16);
constexpr int LANES = PAIRS > 8 ? 2 : PAIRS > 4 ? 4 : PAIRS > 2 ? 8 : PAIRS > 1 ? 16 : 32;  // of a pair
struct Rotation {
  Real c, s;
  Scalar phase;
};
static inline void pair_of(int round, int pair, int &a, int &b) {
  a = (round + pair) % (PLAYERS - 1);
  b = pair ? (round + PLAYERS - 1 - pair) % (PLAYERS - 1) : PLAYERS - 1;
}
// that makes the product of two columns zero, given their square norms and the product
template<class W> inline Rotation rotation(W alpha, W beta, W re, W im) {
  constexpr bool COMPLEX = sizeof(Scalar) > sizeof(Real);
  const W size = COMPLEX ? bf_hypot(re, im) : bf_abs(re);  // whose square may underflow
  const Real tau = Real((beta - alpha) / (2 * size));
  const Real t = (tau < 0 ? Real(-1) : Real(1)) / (bf_abs(tau) + bf_sqrt(1 + tau * tau));
  const Real c = 1 / bf_sqrt(1 + t * t);
  return {c, t * c, COMPLEX ? scalar(Real(re / size), -Real(im / size)) : scalar(re < 0 ? -1 : 1)};
}
// x, y := c x - s f y, s x + c f y
static inline void rotate(Scalar &x, Scalar &y, Real c, Real s, Scalar phase) {
  const Scalar turned = phase * y, before = x;
  x = times(c, before) - times(s, turned);
  y = times(s, before) + times(c, turned);
}
template<class X> inline X sum_of(X x, int lanes) {
  for (int mask = lanes / 2; mask; mask /= 2) x = x + exchanged_with(x, mask);
  return x;
}
static inline bool any_of(bool x) {
  int found = x;
  for (int mask = 16; mask; mask /= 2) found |= exchanged_with(found, mask);
  return found;
}
static inline Real greatest_of(Real x) {
  for (int mask = 16; mask; mask /= 2) x = bf_max(x, exchanged_with(x, mask));
  return x;
}
// the power of two that brings the largest element near 1
static inline Real scale_of(Real largest) {
  constexpr int MOST = sizeof(Real) == 4 ? 120 : 1000;
  int exponent = 0;
  if (largest > 0) frexp(largest, &exponent);
  exponent = exponent > MOST ? MOST : exponent < -MOST ? -MOST : exponent;
  return ldexp(Real(1), -exponent);
}
// position i of N values in order, rising or falling, to `order[its rank]`
static inline void order_of(const Real *values, int *order, bool falls) {
  for (int i = own_lane(); i < N; i += GROUP) {
    int before = 0;
    for (int j = 0; j < N; ++j) {
      const bool ahead = falls ? values[j] > values[i] : values[j] < values[i];
      before += ahead || (values[j] == values[i] && j < i);
    }
    order[before] = i;
  }
  together();
}

//# eigh
// Constants: LD, odd: the distance of columns.
static inline void eigh(const Scalar *x, Scalar *vectors, Real *values, Scalar *m, bool stores) {
  const int lane = own_lane(), part = lane % LANES;
  Scalar *v = m + N * LD;
  Real *w = (Real *)(v + (VECTORS ? N * LD : 0));
  int *order = (int *)(w + N);
  Real largest = 0;
  for (int e = lane; e < N * N; e += GROUP)
    if (e % N <= e / N) largest = bf_max(largest, size_of(x[e]));
  largest = greatest_of(largest);
  const bool finite = largest < Real(INFINITY);
  const Real scale = scale_of(largest);
  for (int e = lane; e < N * N; e += GROUP) {
    const int r = e / N, c = e % N;
    if (VECTORS) v[c * LD + r] = scalar(r == c);
    if (c > r) continue;
    const Scalar element = times(scale, x[e]);
    m[c * LD + r] = c == r ? scalar(real_part(element)) : element;
    if (c < r) m[r * LD + c] = conjugate(element);
  }
  together();
  for (int sweep = 0; finite && sweep < SWEEPS; ++sweep) {
    bool rotated = false;
    for (int round = 0; round < PLAYERS - 1; ++round) {
      int i, j;
      pair_of(round, lane / LANES, i, j);
      bool plays = lane / LANES < PAIRS && i < N && j < N;
      Rotation t{};
      if (plays) {
        const Scalar g = m[j * LD + i];
        const Real re = real_part(g), im = imaginary_part(g);
        plays = size_of(g) > EPSILON;
        if (plays) t = rotation<Real>(real_part(m[i * LD + i]), real_part(m[j * LD + j]), re, im);
        rotated = rotated || plays;
      }
      together();
      if (plays)
#pragma unroll 4
        for (int r = part; r < N; r += LANES) {
          rotate(m[i * LD + r], m[j * LD + r], t.c, t.s, t.phase);
          if (VECTORS) rotate(v[i * LD + r], v[j * LD + r], t.c, t.s, t.phase);
        }
      together();
      if (plays)
#pragma unroll 4
        for (int r = part; r < N; r += LANES) {
          Scalar p = m[r * LD + i], q = m[r * LD + j];
          rotate(p, q, t.c, t.s, conjugate(t.phase));
          m[r * LD + i] = r == j ? scalar(0) : r == i ? scalar(real_part(p)) : p;
          m[r * LD + j] = r == i ? scalar(0) : r == j ? scalar(real_part(q)) : q;
        }
      together();
    }
    if (!any_of(rotated)) break;
  }
  for (int i = lane; i < N; i += GROUP) w[i] = finite ? real_part(m[i * LD + i]) / scale : Real(NAN);
  for (int i = lane; i < N; i += GROUP) order[i] = i;
  together();
  if (finite) order_of(w, order, false);
  if (!stores) return;
  for (int i = lane; i < N; i += GROUP) values[i] = w[order[i]];
  if (VECTORS)
    for (int e = lane; e < N * N; e += GROUP)
      vectors[e] = finite ? v[order[e % N] * LD + e / N] : scalar(Real(NAN));
}

//# svd
// After `reflections`, whose constants hold: M x N matrices, M >= N. TURNED: they are the adjoints of the operand's, N x M. TALL,
// odd: the distance of columns of M elements. The columns of A V are made orthogonal; their lengths are the values, and a QR
// decomposition of them in falling order gives the left vectors, of values that are 0 as well.
static inline void svd(const Scalar *x, Scalar *left, Real *values, Scalar *right, Scalar *a, bool stores) {
  const int lane = own_lane(), part = lane % LANES;
  Scalar *taus = a + M * LD;
  Scalar *columns = taus + N, *q = columns;  // Q takes the place of the columns
  Scalar *v = columns + (N * TALL > M * LDQ ? N * TALL : M * LDQ);
  Real *w = (Real *)(v + N * LD);
  int *order = (int *)(w + N);
  Real largest = 0;
  for (int e = lane; e < M * N; e += GROUP) largest = bf_max(largest, size_of(x[e]));
  largest = greatest_of(largest);
  const bool finite = largest < Real(INFINITY);
  const Real scale = scale_of(largest);
  for (int e = lane; e < M * N; e += GROUP) {
    const Scalar element = times(scale, x[e]);
    if (TURNED) columns[e / M * TALL + e % M] = conjugate(element);
    else columns[e % N * TALL + e / N] = element;
  }
  for (int e = lane; e < N * N; e += GROUP) v[e / N * LD + e % N] = scalar(e / N == e % N);
  together();
  for (int sweep = 0; finite && sweep < SWEEPS; ++sweep) {
    bool rotated = false;
    for (int round = 0; round < PLAYERS - 1; ++round) {
      int i, j;
      pair_of(round, lane / LANES, i, j);
      const bool plays = lane / LANES < PAIRS && i < N && j < N;
      Wide alpha = 0, beta = 0, re = 0, im = 0;
      if (plays)
        for (int r = part; r < M; r += LANES) {
          const Scalar p = columns[i * TALL + r], s = columns[j * TALL + r];
          alpha += squared(p);
          beta += squared(s);
          re += Wide(real_part(p)) * Wide(real_part(s)) + Wide(imaginary_part(p)) * Wide(imaginary_part(s));
          im += Wide(real_part(p)) * Wide(imaginary_part(s)) - Wide(imaginary_part(p)) * Wide(real_part(s));
        }
      alpha = sum_of(alpha, LANES);
      beta = sum_of(beta, LANES);
      re = sum_of(re, LANES);
      if (sizeof(Scalar) > sizeof(Real)) im = sum_of(im, LANES);
      if (plays && re * re + im * im > M * Wide(EPSILON) * Wide(EPSILON) * alpha * beta) {
        const Rotation t = rotation<Wide>(alpha, beta, re, im);
#pragma unroll 4
        for (int r = part; r < M; r += LANES)
          rotate(columns[i * TALL + r], columns[j * TALL + r], t.c, t.s, t.phase);
        if (VECTORS)
          for (int r = part; r < N; r += LANES) rotate(v[i * LD + r], v[j * LD + r], t.c, t.s, t.phase);
        rotated = true;
      }
      together();
    }
    if (!any_of(rotated)) break;
  }
  for (int i = lane; i < N; i += GROUP) {
    Wide sum = 0;
    for (int r = 0; r < M; ++r) sum += squared(columns[i * TALL + r]);
    w[i] = finite ? Real(bf_sqrt(sum)) / scale : Real(NAN);
    order[i] = i;
  }
  together();
  if (finite) order_of(w, order, true);
  if (stores)
    for (int i = lane; i < N; i += GROUP) values[i] = w[order[i]];
  if constexpr (VECTORS) {
    for (int e = lane; e < M * N; e += GROUP) a[e / N * LD + e % N] = columns[order[e % N] * TALL + e / N];
    together();
    to_triangle(a, taus);
    to_basis(a, taus, q);
    if (!stores) return;
    auto basis = [=](int r, int c) {
      const Scalar u = q[r * LDQ + c];
      return c < N && real_part(a[c * LD + c]) < 0 ? scalar(0) - u : u;
    };
    const Scalar nan = scalar(Real(NAN));
    if (TURNED) {
      for (int e = lane; e < N * N; e += GROUP) left[e] = finite ? v[order[e % N] * LD + e / N] : nan;
      for (int e = lane; e < BASIS * M; e += GROUP) right[e] = finite ? conjugate(basis(e % M, e / M)) : nan;
    } else {
      for (int e = lane; e < M * BASIS; e += GROUP) left[e] = finite ? basis(e / BASIS, e % BASIS) : nan;
      for (int e = lane; e < N * N; e += GROUP)
        right[e] = finite ? conjugate(v[order[e / N] * LD + e % N]) : nan;
    }
  }
}
