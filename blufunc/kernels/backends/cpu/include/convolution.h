// Convolutions as GEMMs whose windows are packed block by block, and reductions of windows; libraries:
// steps/convolution.py and steps/windows.py.

//# slides
#include <string.h>

// An axis of positions or of terms: extent, strides of the result (or kernel) and the operand, and by which step it
// moves along which padded axis (-1: none).
struct Dim { int64_t extent, other, x, axis, step; };

// A padded axis of the operand: coordinate of the first element of the first window, and extent.
struct Padded { int64_t start, extent; };

// Methods: windows are rows, or columns; sums of vectors of terms, or of groups.
enum { BY_ROWS, BY_COLUMNS, BY_TERMS, BY_GROUPS };

// A convolution without dilation of the operand. Positions are elements of a result feature, terms those of a sum.
struct Slide {
  int64_t groups, x_group, w_group, out_group;
  int64_t batches, x_batch, out_batch;
  int64_t features, w_feature, out_feature;
  int64_t x, w, out;       // offsets
  int64_t method, direct;  // results are not copied
  int64_t lines;           // along which axis windows are packed
  int64_t positions, block, terms, feature_block;
  int64_t parts, part;   // a sum of several parts: of each the result is in scratch
  int64_t packed, sums;  // offsets of the packed kernel (-1: packed by each block) and the parts in scratch
  int64_t n_padded, n_positions, n_terms;

  const Padded *padded() const { return (const Padded *)(this + 1); }
  const Dim *position_dims() const { return (const Dim *)(padded() + n_padded); }
  const Dim *term_dims() const { return position_dims() + n_positions; }
  const Slide *next() const { return (const Slide *)(term_dims() + n_terms); }
  int64_t blocks() const { return ceil_div(positions, block); }
  int64_t across() const { return ceil_div(features, feature_block); }
  // All groups are one task if they are lanes of vectors.
  int64_t slots() const { return (method == BY_GROUPS ? 1 : groups) * batches; }
  int64_t tasks() const { return slots() * parts * blocks() * across(); }
};

enum { AXES = 10 };

// Lines.
enum { OF_POSITIONS, OF_TERMS, NONE };

// A place among dims: its offsets, and its coordinates along padded axes.
struct Walk {
  const Dim *dims;
  int64_t n, other = 0, x = 0, at[AXES], c[AXES] = {};

  Walk(const Dim *dims, int64_t n, int64_t i) : dims(dims), n(n) {
    for (int64_t d = n - 1; d >= 0; i /= dims[d--].extent) {
      at[d] = 0;
      move(d, i % dims[d].extent);
    }
  }
  void move(int64_t d, int64_t by) {
    const Dim &dim = dims[d];
    at[d] += by, other += by * dim.other, x += by * dim.x;
    if (dim.axis >= 0) c[dim.axis] += by * dim.step;
  }
  const Dim &last() const { return dims[n - 1]; }
  int64_t run(int64_t most) const { return least(most, last().extent - at[n - 1]); }
  // Go on by a run of the last axis.
  void by(int64_t run) {
    int64_t d = n - 1;
    move(d, run);
    for (; d > 0 && at[d] == dims[d].extent; --d) {
      move(d, -dims[d].extent);
      move(d - 1, 1);
    }
  }
};

// A line of a window, or of windows: the elements from lo to hi lie in the operand.
struct Span {
  int64_t lo = 0, hi = 0;
  Span() {}
  explicit Span(int64_t run) : hi(run) {}
  Span(const Slide &s, const Dim &line, const int64_t *c, const int64_t *more, int64_t run) : lo(0), hi(run) {
    bool outside = false;
    for (int64_t d = 0; d < s.n_padded; ++d) {
      const Padded &p = s.padded()[d];
      const int64_t at = p.start + c[d] + more[d], last = at + (run - 1) * line.step;
      if (d != line.axis) outside |= (uint64_t)at >= (uint64_t)p.extent;
      else if (at < 0 || last >= p.extent) {
        if (at < 0) lo = line.step == 1 ? -at : ceil_div(-at, line.step);
        const int64_t rest = p.extent - at;
        if (last >= p.extent) hi = rest <= 0 ? 0 : line.step == 1 ? rest : ceil_div(rest, line.step);
      }
    }
    if (outside || lo >= hi) lo = hi = 0;
  }
};

// Add the distance of the last term of a window along each axis.
static inline void add_reach(const Slide &s, int64_t *reach) {
  for (int64_t d = 0; d < s.n_terms; ++d) {
    const Dim &dim = s.term_dims()[d];
    if (dim.axis >= 0) reach[dim.axis] += (dim.extent - 1) * dim.step;
  }
}

// True if windows at coordinates c, and as far as they reach, are within the operand.
static inline bool is_inside(const Slide &s, const int64_t *c, const int64_t *reach) {
  for (int64_t d = 0; d < s.n_padded; ++d) {
    const int64_t at = s.padded()[d].start + c[d];
    if (at < 0 || at + reach[d] >= s.padded()[d].extent) return false;
  }
  return true;
}

//# convolution
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
#endif
#endif

template<typename T> struct Convolution {
  typedef Gemm<T> G;

  struct Place { int64_t other, x, c[AXES]; };

  static Place place(const Walk &w, int64_t n_padded) {
    Place made;
    made.other = w.other, made.x = w.x;
    for (int64_t d = 0; d < n_padded; ++d) made.c[d] = w.c[d];
    return made;
  }

  static void list(Place *to, const Dim *dims, int64_t n, int64_t first, int64_t count, int64_t n_padded) {
    Walk w(dims, n, first);
    for (int64_t i = 0; i < count; ++i, w.by(1)) to[i] = place(w, n_padded);
  }

  // Interleave R lines of a count: element q of line i goes to t[q * W + i].
  template<int R, int W> static void transpose(T *t, const T *const *from, int64_t count) {
    int64_t q = 0;
#ifdef SHUFFLES
    if constexpr (R == 8) {
      typedef T Eight __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));
      for (; q + 8 <= count; q += 8) {
        Eight a[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) a[i] = *(const Eight *)(from[i] + q);
#pragma GCC unroll 3
        for (int round = 0; round < 3; ++round) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
          }
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) a[i] = b[i];
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) *(Eight *)(t + (q + i) * W) = a[i];
      }
    }
#endif
    for (; q < count; ++q)
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) t[q * W + i] = from[i][q];
  }

  // Panels of W windows, by lines of terms. ``zeros`` is as long as a line.
  template<int W>
  static void pack_terms(const Slide &s, T *__restrict to, const T *x, const Place *at, int64_t count,
                         int64_t first, int64_t terms, const T *zeros) {
    enum { R = W % 8 ? W : 8 };
    static thread_local T rows[R][DEPTH + 16];
    const Dim &line = s.term_dims()[s.n_terms - 1];
    int64_t reach[AXES] = {};
    add_reach(s, reach);
    for (int64_t p = 0; p < count; p += W) {
      bool inside[W];
      for (int i = 0; i < W; ++i) inside[i] = p + i < count && is_inside(s, at[p + i].c, reach);
      Walk k(s.term_dims(), s.n_terms, first);
      for (int64_t j = 0, run; j < terms; j += run, k.by(run)) {
        run = k.run(terms - j);
        for (int g = 0; g < W; g += R) {
          const T *from[R];
          Span spans[R];
          bool whole = true;
          for (int i = 0; i < R; ++i) {
            from[i] = zeros;
            if (p + g + i >= count) continue;
            const Place &place = at[p + g + i];
            spans[i] = inside[g + i] ? Span(run) : Span(s, line, place.c, k.c, run);
            if (spans[i].hi == 0) continue;
            from[i] = x + place.x + k.x;
            whole &= spans[i].hi - spans[i].lo == run;
          }
          T *const t = to + p * terms + j * W + g;
          if (line.x != 1 && whole) {
            int64_t steps[R];
            for (int i = 0; i < R; ++i) steps[i] = spans[i].hi ? line.x : 0;
            for (int64_t q = 0; q < run; ++q)
#pragma GCC unroll 8
              for (int i = 0; i < R; ++i) t[q * W + i] = from[i][q * steps[i]];
            continue;
          }
          for (int i = 0; i < R; ++i) {  // other lines are copied first
            const Span &span = spans[i];
            if (span.hi == 0 || (line.x == 1 && span.hi - span.lo == run)) continue;
            T *const row = rows[i];
            for (int64_t q = 0; q < span.lo; ++q) row[q] = T(0);
            if (line.x == 1) memcpy(row + span.lo, from[i] + span.lo, sizeof(T) * (span.hi - span.lo));
            else
              for (int64_t q = span.lo; q < span.hi; ++q) row[q] = from[i][q * line.x];
            for (int64_t q = span.hi; q < run; ++q) row[q] = T(0);
            from[i] = row;
          }
          transpose<R, W>(t, from, run);
        }
      }
    }
  }

  // The same by lines of positions; ``at`` are places of terms.
  template<int W>
  static void pack_positions(const Slide &s, T *__restrict to, const T *x, int64_t first, int64_t count,
                             const Place *at, int64_t terms) {
    Walk p(s.position_dims(), s.n_positions, first);
    const Dim &line = p.last();
    for (int64_t q = 0, run; q < count; q += run, p.by(run)) {
      run = p.run(count - q);
      for (int64_t k = 0; k < terms; ++k) {
        const Span span(s, line, p.c, at[k].c, run);
        const T *const from = x + p.x + at[k].x;
        for (int64_t i = 0, n; i < run; i += n) {
          const int64_t lane = (q + i) % W;
          n = least(W - lane, run - i);
          T *const t = to + (q + i - lane) * terms + k * W + lane;
          if (n == W && line.x == 1 && span.lo <= i && span.hi >= i + W) {
            memcpy(t, from + i, sizeof(T) * W);
            continue;
          }
          const int64_t lo = span.lo > i ? least(span.lo - i, n) : 0;
          const int64_t hi = span.hi > i ? least(span.hi - i, n) : 0;
          for (int64_t j = 0; j < lo; ++j) t[j] = T(0);
          if (line.x == 1) {
            if (hi > lo) memcpy(t + lo, from + i + lo, sizeof(T) * (hi - lo));
          } else {
            for (int64_t j = lo; j < hi; ++j) t[j] = from[(i + j) * line.x];
          }
          for (int64_t j = hi > lo ? hi : lo; j < n; ++j) t[j] = T(0);
        }
      }
    }
    for (int64_t q = count; q % W; ++q)
      for (int64_t k = 0; k < terms; ++k) to[(q - q % W) * terms + k * W + q % W] = T(0);
  }

  // The same element by element.
  template<int W>
  static void pack_elements(const Slide &s, T *__restrict to, const T *x, const Place *windows, int64_t count,
                            const Place *at, int64_t terms) {
    int32_t from[W], c[AXES][W];
    for (int64_t p = 0; p < count; p += W) {
      for (int i = 0; i < W; ++i) {  // the last window again, in place of others
        const Place &place = windows[least(p + i, count - 1)];
        from[i] = (int32_t)place.x;
        for (int64_t d = 0; d < s.n_padded; ++d) c[d][i] = (int32_t)(s.padded()[d].start + place.c[d]);
      }
      for (int64_t k = 0; k < terms; ++k) {
        T *const t = to + p * terms + k * W;
        const T *const base = x + at[k].x;
        if (s.n_padded == 0) {
          for (int i = 0; i < W; ++i) t[i] = base[from[i]];
          continue;
        }
        int32_t outside[W] = {};
        for (int64_t d = 0; d < s.n_padded; ++d) {
          const uint32_t extent = (uint32_t)s.padded()[d].extent, by = (uint32_t)at[k].c[d];
          for (int i = 0; i < W; ++i) outside[i] |= (uint32_t)c[d][i] + by >= extent;
        }
        for (int i = 0; i < W; ++i) t[i] = outside[i] ? T(0) : base[from[i]];
      }
    }
  }

  // Panels of W features of the kernel.
  template<int W>
  static void pack_kernel(const Slide &s, T *to, const T *w, int64_t features, int64_t first, int64_t terms) {
    Walk k(s.term_dims(), s.n_terms, first);
    for (int64_t j = 0, run; j < terms; j += run, k.by(run)) {
      run = k.run(terms - j);
      pack<W>(to + j * W, w + k.other, features, run, s.w_feature, k.last().other, terms);
    }
  }

  // Bytes of the packed kernel of a group.
  template<int W> static int64_t size(const Slide &s) { return s.terms * round_up(s.features, W); }

  // Some features at some positions: the terms from ``begin`` to ``end``. Windows are columns if TURNED. Results go to
  // ``sums`` unless it is null.
  template<bool TURNED>
  static void block(const Slide &s, const T *x, const T *w, const T *packed, T *out, T *sums, int64_t first,
                    int64_t count, int64_t feature, int64_t features, int64_t begin, int64_t end) {
    enum { WX = TURNED ? int(G::COLUMNS) : int(ROWS), WW = TURNED ? int(ROWS) : int(G::COLUMNS) };
    const bool direct = s.direct && !sums;
    const int64_t most = least(end - begin, DEPTH);
    const int64_t x_size = round_up(round_up(count, WX) * most, 64);
    const int64_t w_size = packed ? 0 : round_up(round_up(features, WW) * most, 64);
    const int64_t result = direct || sums ? 0 : round_up(count * features, 64);
    Parts parts{
        scratch.of(sizeof(T) * (x_size + w_size + result + DEPTH + 64) + sizeof(Place) * (count + most + 2))};
    T *const windows = parts.take<T>(x_size), *const kernel = parts.take<T>(w_size);
    T *const local = sums ? sums : parts.take<T>(result), *const zeros = parts.take<T>(DEPTH);
    Place *const at = parts.take<Place>(count), *const of_terms = parts.take<Place>(most);
    if (s.lines != OF_POSITIONS || !direct)
      list(at, s.position_dims(), s.n_positions, first, count, s.n_padded);
    for (int i = 0; i < DEPTH; ++i) zeros[i] = T(0);
    const int64_t rows = TURNED ? features : count, columns = TURNED ? count : features;
    const int64_t uniform = s.position_dims()[s.n_positions - 1].other;
    const int64_t stride = !direct ? columns : TURNED ? s.out_feature : uniform;
    T *const target = direct ? out + first * uniform + feature * s.out_feature : local;
    for (int64_t k = begin; k < end; k += DEPTH) {
      const int64_t terms = least(DEPTH, end - k);
      if (s.lines == OF_TERMS) pack_terms<WX>(s, windows, x, at, count, k, terms, zeros);
      else {
        list(of_terms, s.term_dims(), s.n_terms, k, terms, s.n_padded);
        if (s.lines == OF_POSITIONS) pack_positions<WX>(s, windows, x, first, count, of_terms, terms);
        else pack_elements<WX>(s, windows, x, at, count, of_terms, terms);
      }
      if (!packed) pack_kernel<WW>(s, kernel, w + feature * s.w_feature, features, k, terms);
      const T *const v = packed ? packed + k * round_up(s.features, WW) + feature * terms : kernel;
      const T *const a = TURNED ? v : windows, *const b = TURNED ? windows : v;
      for (int64_t j = 0; j < columns; j += G::COLUMNS)
        for (int64_t i = 0; i < rows; i += ROWS)
          G::tile(terms, a + i * terms, b + j * terms, target + i * stride + j, stride, rows - i, columns - j,
                  k > begin);
    }
    if (direct || sums) return;
    if (begin == end) memset(local, 0, sizeof(T) * count * features);
    store(s, local, TURNED, at, out + feature * s.out_feature, count, features);
  }

  // Write results to their places.
  static void store(const Slide &s, const T *from, bool turned, const Place *at, T *out, int64_t count,
                    int64_t features) {
    const int64_t along = turned ? 1 : features, apart = turned ? count : 1;
    for (int64_t p = 0; p < count; p += 16) {  // small blocks are transposed within the first cache
      const int64_t end = least(p + 16, count);
      if (turned || s.out_feature != 1) {
        for (int64_t f = 0; f < features; ++f)
          for (int64_t i = p; i < end; ++i)
            out[at[i].other + f * s.out_feature] = from[i * along + f * apart];
      } else {
        for (int64_t i = p; i < end; ++i)
          for (int64_t f = 0; f < features; ++f) out[at[i].other + f] = from[i * features + f];
      }
    }
  }

  // Add the parts of a sum.
  static void add_parts(const Slide &s, T *sums, T *out) {
    const int64_t n = s.positions * s.features;
    Place *const at = (Place *)scratch.of(sizeof(Place) * s.positions);
    list(at, s.position_dims(), s.n_positions, 0, s.positions, 0);
    for (int64_t i = 0; i < s.groups * s.batches; ++i, sums += s.parts * n) {
      for (int64_t part = 1; part < s.parts; ++part)
        for (int64_t j = 0; j < n; ++j) sums[j] += sums[part * n + j];
      store(s, sums, s.method == BY_COLUMNS, at,
            out + i / s.batches * s.out_group + i % s.batches * s.out_batch, s.positions, s.features);
    }
  }

  // F features at one position: sums of vectors, of lines of terms whose first terms are at ``lines``.
  // No term is outside of the operand if INSIDE.
  template<int F, bool INSIDE>
  static void dots(const Slide &s, const T *x, const T *w, T *out, const int64_t *c, const Place *lines,
                   int64_t count) {
    typedef typename G::Vector Vector;
    const Dim &line = s.term_dims()[s.n_terms - 1];
    Vector sum[F] = {};
    T rest[F] = {};
    for (int64_t k = 0; k < count; ++k) {
      const Span span = INSIDE ? Span(line.extent) : Span(s, line, c, lines[k].c, line.extent);
      const T *const a = x + lines[k].x, *const b = w + lines[k].other;
      int64_t q = span.lo;
      for (; q + G::LANES <= span.hi; q += G::LANES)
#pragma GCC unroll 4
        for (int f = 0; f < F; ++f)
          sum[f] += *(const Vector *)(a + q) * *(const Vector *)(b + f * s.w_feature + q);
      for (; q < span.hi; ++q)
#pragma GCC unroll 4
        for (int f = 0; f < F; ++f) rest[f] += a[q] * b[f * s.w_feature + q];
    }
    for (int f = 0; f < F; ++f)
      out[f * s.out_feature] = rest[f] + G::template sum_of<G::LANES>((const T *)&sum[f]);
  }

  // All features at a position.
  template<bool INSIDE>
  static void position(const Slide &s, const T *x, const T *w, T *out, const int64_t *c, const Place *lines,
                       int64_t count, int64_t features) {
    for (; features >= 4; features -= 4, w += 4 * s.w_feature, out += 4 * s.out_feature)
      dots<4, INSIDE>(s, x, w, out, c, lines, count);
    if (features == 3) dots<3, INSIDE>(s, x, w, out, c, lines, count);
    if (features == 2) dots<2, INSIDE>(s, x, w, out, c, lines, count);
    if (features == 1) dots<1, INSIDE>(s, x, w, out, c, lines, count);
  }

  // Few features.
  static void sums_of_terms(const Slide &s, const T *x, const T *w, T *out, int64_t first, int64_t count,
                            int64_t features) {
    const int64_t lines = s.terms / s.term_dims()[s.n_terms - 1].extent;
    Place *const at = (Place *)scratch.of(sizeof(Place) * lines);
    Walk k(s.term_dims(), s.n_terms, 0);
    for (int64_t i = 0; i < lines; ++i, k.by(k.last().extent)) at[i] = place(k, s.n_padded);
    int64_t reach[AXES] = {};
    add_reach(s, reach);
    Walk p(s.position_dims(), s.n_positions, first);
    for (int64_t i = 0; i < count; ++i, p.by(1)) {
      if (is_inside(s, p.c, reach)) position<true>(s, x + p.x, w, out + p.other, p.c, at, lines, features);
      else position<false>(s, x + p.x, w, out + p.other, p.c, at, lines, features);
    }
  }

  // N vectors of groups, each of one feature.
  template<int N>
  static void vectors(const Slide &s, const T *x, const T *w, T *out, const Place *at, const int64_t *c) {
    typedef typename G::Vector Vector;
    Vector sum[N] = {};
    for (int64_t k = 0; k < s.terms; ++k) {
      bool outside = false;
      for (int64_t d = 0; d < s.n_padded; ++d)
        outside |= (uint64_t)(s.padded()[d].start + at[k].c[d] + c[d]) >= (uint64_t)s.padded()[d].extent;
      if (outside) continue;
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v)
        sum[v] +=
            *(const Vector *)(x + at[k].x + v * G::LANES) * *(const Vector *)(w + at[k].other + v * G::LANES);
    }
    for (int v = 0; v < N; ++v) *(Vector *)(out + v * G::LANES) = sum[v];
  }

  // Groups of one feature, adjacent in memory: there are as many as a vector has lanes, or more.
  static void sums_of_groups(const Slide &s, const T *x, const T *w, T *out, int64_t first, int64_t count) {
    Place *const at = (Place *)scratch.of(sizeof(Place) * s.terms);
    list(at, s.term_dims(), s.n_terms, 0, s.terms, s.n_padded);
    Walk p(s.position_dims(), s.n_positions, first);
    for (int64_t i = 0; i < count; ++i, p.by(1)) {
      const T *const from = x + p.x;
      T *const to = out + p.other;
      int64_t g = 0;
      for (; g + 4 * G::LANES <= s.groups; g += 4 * G::LANES) vectors<4>(s, from + g, w + g, to + g, at, p.c);
      for (; g + G::LANES <= s.groups; g += G::LANES) vectors<1>(s, from + g, w + g, to + g, at, p.c);
      if (g < s.groups) {  // again some groups of the vector before, which come out the same
        g = s.groups - G::LANES;
        vectors<1>(s, from + g, w + g, to + g, at, p.c);
      }
    }
  }

  // Pack the kernel for all blocks.
  template<int WW> static void prepare(const Slide &s, const T *w, char *shared, int threads) {
    const int64_t parts = ceil_div(s.terms, DEPTH);
#pragma omp parallel for schedule(static) \
    num_threads(threads) if (threads > 1 && size<WW>(s) * s.groups > 1 << 16)
    for (int64_t n = 0; n < s.groups * parts; ++n) {
      const int64_t group = n / parts, k = n % parts * DEPTH;
      pack_kernel<WW>(s, (T *)(shared + s.packed) + group * size<WW>(s) + k * round_up(s.features, WW),
                      w + s.w + group * s.w_group, s.features, k, least(DEPTH, s.terms - k));
    }
  }

  // One block of results.
  static void task(const Slide &s, const T *x, const T *w, T *out, char *shared, int64_t n) {
    const int64_t blocks = s.blocks(), across = s.across();
    const int64_t f = n % across * s.feature_block, p = n / across % blocks * s.block;
    const int64_t part = n / across / blocks % s.parts, slot = n / across / blocks / s.parts;
    const int64_t batch = slot % s.batches, group = slot / s.batches;
    x += s.x + group * s.x_group + batch * s.x_batch, w += s.w + group * s.w_group;
    out += s.out + group * s.out_group + batch * s.out_batch;
    const int64_t count = least(s.block, s.positions - p), features = least(s.feature_block, s.features - f);
    if (s.method == BY_GROUPS) return sums_of_groups(s, x, w, out, p, count);
    if (s.method == BY_TERMS)
      return sums_of_terms(s, x, w + f * s.w_feature, out + f * s.out_feature, p, count, features);
    const T *packed = s.packed < 0 ? nullptr : (const T *)(shared + s.packed);
    T *const sums =
        s.parts == 1 ? nullptr : (T *)(shared + s.sums) + (slot * s.parts + part) * s.positions * s.features;
    const int64_t begin = part * s.part, end = least(begin + s.part, s.terms);
    if (s.method == BY_COLUMNS) {
      if (packed) packed += group * size<ROWS>(s);
      block<true>(s, x, w, packed, out, sums, p, count, f, features, begin, end);
    } else {
      if (packed) packed += group * size<G::COLUMNS>(s);
      block<false>(s, x, w, packed, out, sums, p, count, f, features, begin, end);
    }
  }

  static void run(const Slide *first, int64_t slides, const T *x, const T *w, T *out, char *shared,
                  int threads) {
    int64_t tasks = 0;
    const Slide *s = first;
    for (int64_t i = 0; i < slides; ++i, s = s->next()) {
      tasks += s->tasks();
      if (s->packed < 0) continue;
      if (s->method == BY_COLUMNS) prepare<ROWS>(*s, w, shared, threads);
      else prepare<G::COLUMNS>(*s, w, shared, threads);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < tasks; ++n) {
      const Slide *t = first;
      int64_t i = n;
      for (; i >= t->tasks(); t = t->next()) i -= t->tasks();
      task(*t, x, w, out, shared, i);
    }
    s = first;
    for (int64_t i = 0; i < slides; ++i, s = s->next()) {
      if (s->parts > 1) add_parts(*s, (T *)(shared + s->sums), out + s->out);
    }
  }
};

// Parameters: the number of slides, and the slides.
extern "C" void convolution(const int64_t *p, char *const *operands, char *const *results, char *shared,
                            int threads) {
  const Batch all(p);
  Convolution<REAL>::run((const Slide *)(all.rest + 1), all.rest[0], (const REAL *)operands[0],
                         (const REAL *)operands[1], (REAL *)results[0], shared, threads);
}

//# windows
// An element of a window, and of those before it the result (and at which place it is).
static inline void reduce(REAL &best, int32_t &place, REAL x, int32_t at) {
  if (KIND == SUM) best += x;
  else if (KIND == EXTREMUM) best = x BEATS best || x != x ? x : best;
  else {
    const bool wins = (x BEATS best) | ((x != x) & (best == best));
    best = wins ? x : best;
    place = wins ? at : place;
  }
}

template<int STEP>
static void reduce_line(REAL *__restrict best, int32_t *__restrict place, const REAL *x, int64_t step,
                        int64_t lo, int64_t hi, int32_t at) {
#pragma omp simd
  for (int64_t i = lo; i < hi; ++i) reduce(best[i], place[i], x[i * (STEP ? STEP : step)], at);
}

// A line of sums or extrema whose windows are within the operand: N vectors at a time.
template<int N, int STEP>
static int64_t reduce_inside(REAL *out, const REAL *x, const Walk *at, int64_t terms, int64_t from,
                             int64_t to) {
  typedef Gemm<REAL>::Vector Vector;
  enum { LANES = Gemm<REAL>::LANES };
  for (; from + N * LANES <= to; from += N * LANES) {
    Vector best[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) best[v] = Vector{} + REAL(IDENTITY);
    for (int64_t j = 0; j < terms; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const REAL *const base = x + at[j].x + (from + v * LANES) * STEP;
        Vector next;
        if (STEP == 1) next = *(const Vector *)base;
        else
#pragma GCC unroll 16
          for (int i = 0; i < LANES; ++i) next[i] = base[i * STEP];
        if (KIND == SUM) best[v] += next;
        else best[v] = (next BEATS best[v]) | (next != next) ? next : best[v];
      }
    for (int v = 0; v < N; ++v) *(Vector *)(out + from + v * LANES) = best[v];
  }
  return from;
}

// Lines of results.
static void reduce_lines(const Slide &s, const REAL *x, RESULT *out, int64_t first, int64_t count) {
  const int64_t extent = s.position_dims()[s.n_positions - 1].extent;
  Parts parts{scratch.of((sizeof(REAL) + sizeof(int32_t)) * (extent + 32) + sizeof(Walk) * (s.terms + 2))};
  Walk *const at = parts.take<Walk>(s.terms);
  REAL *const spare = parts.take<REAL>(extent);
  int32_t *const place = parts.take<int32_t>(extent);
  Walk k(s.term_dims(), s.n_terms, 0);
  for (int64_t j = 0; j < s.terms; ++j, k.by(1)) at[j] = k;
  Walk p(s.position_dims(), s.n_positions, first * extent);
  const int64_t step = p.last().x, apart = p.last().other;
  int64_t reach[AXES] = {};  // of the last element of a line of windows
  if (p.last().axis >= 0) reach[p.last().axis] = (extent - 1) * p.last().step;
  add_reach(s, reach);
  for (int64_t n = 0; n < count; ++n, p.by(extent)) {
    RESULT *const to = out + p.other;
    if (KIND != POSITION && (step == 1 || step == 2) && apart == 1 && is_inside(s, p.c, reach)) {
      REAL *const line = (REAL *)to;
      int64_t i = 0;
      if (step == 1) {
        i = reduce_inside<4, 1>(line, x + p.x, at, s.terms, i, extent);
        i = reduce_inside<1, 1>(line, x + p.x, at, s.terms, i, extent);
      } else i = reduce_inside<1, 2>(line, x + p.x, at, s.terms, i, extent);
      for (; i < extent; ++i) {
        REAL one = REAL(IDENTITY);
        for (int64_t j = 0; j < s.terms; ++j) reduce(one, place[0], x[p.x + at[j].x + i * step], 0);
        line[i] = one;
      }
      continue;
    }
    REAL *const best = KIND != POSITION && apart == 1 ? (REAL *)to : spare;
    for (int64_t i = 0; i < extent; ++i) best[i] = REAL(IDENTITY);
    for (int64_t i = 0; KIND == POSITION && i < extent; ++i) place[i] = 0;
    for (int64_t j = 0; j < s.terms; ++j) {
      const Span span(s, p.last(), p.c, at[j].c, extent);
      const REAL *const from = x + p.x + at[j].x;
      const int32_t index = (int32_t)(s.w + at[j].other);
      if (step == 1) reduce_line<1>(best, place, from, 1, span.lo, span.hi, index);
      else if (step == 2) reduce_line<2>(best, place, from, 2, span.lo, span.hi, index);
      else reduce_line<0>(best, place, from, step, span.lo, span.hi, index);
    }
    if (KIND == POSITION)
      for (int64_t i = 0; i < extent; ++i) to[i * apart] = RESULT(place[i]);
    else if (apart != 1)
      for (int64_t i = 0; i < extent; ++i) to[i * apart] = RESULT(best[i]);
  }
}

// Parameters: the number of slides, and the slides, whose blocks count lines.
extern "C" void windows(const int64_t *p, char *const *operands, char *const *results, char *shared,
                        int threads) {
  const Batch all(p);
  const REAL *const x = (const REAL *)operands[0];
  RESULT *const out = (RESULT *)results[0];
  const Slide *const slides = (const Slide *)(all.rest + 1);
  int64_t blocks = 0;
  const Slide *s = slides;
  for (int64_t n = all.rest[0]; n > 0; --n, s = s->next()) blocks += s->blocks();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < blocks; ++n) {
    const Slide *t = slides;
    int64_t b = n;
    for (; b >= t->blocks(); t = t->next()) b -= t->blocks();
    reduce_lines(*t, x + t->x, out + t->out, b * t->block, least(t->block, t->positions - b * t->block));
  }
}
