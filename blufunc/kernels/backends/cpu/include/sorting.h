// Stable sorts of lines by unsigned keys; library: steps/sorting.py. Strides in parameters are in bytes.

//# keys
// How the bits of a dtype compare: bytes, whether signed, and for floats the bits of infinity.
struct Kind { int64_t bytes, is_signed, infinity; };

// Bits whose unsigned order is the order of values: NaN is last, -0 equals 0.
template<class U> static inline U float_key(U bits, U infinity) {
  const U sign = (U)((U)1 << (8 * sizeof(U) - 1)), size = (U)(bits & (U)~sign);
  const U flipped = (U)(bits ^ (U)((U)0 - (U)(bits >> (8 * sizeof(U) - 1)) | sign));
  return size > infinity ? (U) ~(U)0 : size ? flipped : sign;
}
template<class U> static inline U signed_key(U bits) { return (U)(bits ^ (U)((U)1 << (8 * sizeof(U) - 1))); }
template<class U> static inline U key_of(U bits, const Kind &kind) {
  return kind.infinity ? float_key(bits, (U)kind.infinity) : kind.is_signed ? signed_key(bits) : bits;
}

template<class U> static inline U bits_at(const char *x) {
  U bits;
  memcpy(&bits, x, sizeof(U));
  return bits;
}

// A key with the position of its element.
struct Short {
  uint64_t both;
  void set(uint64_t key, uint32_t place) { both = key << 32 | place; }
  uint64_t key() const { return both >> 32; }
  uint32_t place() const { return (uint32_t)both; }
};
struct Long {
  uint64_t all;
  uint32_t at;
  void set(uint64_t key, uint32_t place) { all = key, at = place; }
  uint64_t key() const { return all; }
  uint32_t place() const { return at; }
};

enum { FEW = 40, MANY = 8192 };

// Sort by digits of BITS bits, from the least; a digit that is the same everywhere takes no pass.
template<int BITS, class E> static E *by_digits(E *from, E *to, int64_t n, int bytes) {
  enum { DIGITS = 1 << BITS };
  const int passes = (8 * bytes + BITS - 1) / BITS;
  uint32_t counts[(64 + BITS - 1) / BITS][DIGITS];
  memset(counts, 0, sizeof(counts[0]) * passes);
  for (int64_t i = 0; i < n; ++i) {
    uint64_t key = from[i].key();
    for (int d = 0; d < passes; ++d, key >>= BITS) ++counts[d][key & (DIGITS - 1)];
  }
  for (int d = 0; d < passes; ++d) {
    uint32_t *const at = counts[d], shift = d * BITS;
    if (at[from[0].key() >> shift & (DIGITS - 1)] == n) continue;
    uint32_t sum = 0;
    for (int v = 0; v < DIGITS; ++v) {
      const uint32_t count = at[v];
      at[v] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; ++i) to[at[from[i].key() >> shift & (DIGITS - 1)]++] = from[i];
    E *const other = from;
    from = to;
    to = other;
  }
  return from;
}

// Sorted pairs, in one of two buffers.
template<class E> static E *sorted(E *x, E *other, int64_t n, int bytes) {
  if (n > MANY) return by_digits<11>(x, other, n, bytes);
  if (n > FEW) return by_digits<8>(x, other, n, bytes);
  for (int64_t i = 1; i < n; ++i) {
    const E e = x[i];
    int64_t j = i;
    for (; j > 0 && x[j - 1].key() > e.key(); --j) x[j] = x[j - 1];
    x[j] = e;
  }
  return x;
}

// Call f with an unsigned integer of some bytes.
template<class F> static inline void with_bits(int64_t bytes, F f) {
  if (bytes == 1) f((uint8_t)0);
  else if (bytes == 2) f((uint16_t)0);
  else if (bytes == 4) f((uint32_t)0);
  else f((uint64_t)0);
}

// Elements of a line in the order of pairs.
template<class E>
static void permuted(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t bytes,
                     const E *e, int64_t n) {
  if (bytes == 16) {
    for (int64_t i = 0; i < n; ++i) memcpy(to + i * to_step, from + e[i].place() * from_step, 16);
    return;
  }
  with_bits(bytes, [&](auto zero) {
    for (int64_t i = 0; i < n; ++i) memcpy(to + i * to_step, from + e[i].place() * from_step, sizeof(zero));
  });
}

//# sort
struct Sorted {
  const Batch &b;
  int64_t n, count, keys;
  const int64_t *kinds, *strides;  // of each operand, and then the strides of its results

  // Sort one line of all operands; E holds the keys of all of them.
  template<class E> void line(int64_t i, char *slot, char *const *operands, char *const *results) const {
    Parts parts{slot};
    E *x = parts.take<E>(n), *other = parts.take<E>(n);
    for (int64_t k = keys; k-- > 0;) {
      const Kind kind{kinds[3 * k], kinds[3 * k + 1], kinds[3 * k + 2]};
      const int64_t *const along = strides + k * 2 * (b.ndim + 1), step = along[b.ndim];
      const char *const from = operands[k] + b.at(i, along);
      const bool first = k == keys - 1;
      with_bits(kind.bytes, [&](auto zero) {
        typedef decltype(zero) U;
        for (int64_t j = 0; j < n; ++j) {
          const uint32_t place = first ? (uint32_t)j : x[j].place();
          x[j].set(key_of(bits_at<U>(from + place * step), kind), place);
        }
      });
      E *const found = sorted(x, other, n, (int)kind.bytes);
      other = found == x ? other : x;
      x = found;
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t *const along = strides + k * 2 * (b.ndim + 1), *const to = along + b.ndim + 1;
      permuted(results[k] + b.at(i, to), to[b.ndim], operands[k] + b.at(i, along), along[b.ndim],
               kinds[3 * k], x, n);
    }
  }
};

// Parameters: length of lines, operands, keys, whether any key is long, kinds, strides of operands and results.
extern "C" void sort(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                     int threads) {
  const Batch b(p);
  const int64_t count = b.rest[1];
  const Sorted s{b, b.rest[0], count, b.rest[2], b.rest + 4, b.rest + 4 + 3 * count};
  each(b, scratch, threads, [&](int64_t i, char *slot) {
    if (b.rest[3]) s.line<Long>(i, slot, operands, results);
    else s.line<Short>(i, slot, operands, results);
  });
}

//# top_k
enum { SELECTED = 64, BLOCK = 32 };

// The k largest of a line into e, descending; the first of equal ones first.
template<class U, class E, class Key>
static void select(const char *x, int64_t step, int64_t n, int64_t k, E *e, Key key_at) {
  int64_t have = 0;
  const auto consider = [&](U key, int64_t j) {
    if (have == k && key <= (U)e[k - 1].key()) return;
    int64_t at = have < k ? have++ : k - 1;
    for (; at > 0 && (U)e[at - 1].key() < key; --at) e[at] = e[at - 1];
    e[at].set(key, (uint32_t)j);
  };
  int64_t j = 0;
  for (; j < k; ++j) consider(key_at(x + j * step), j);
  for (; j + BLOCK <= n; j += BLOCK) {  // most blocks have none of them
    U keys[BLOCK];
    const U least = (U)e[k - 1].key();
    U any = 0;
    if (step == sizeof(U)) {
      for (int i = 0; i < BLOCK; ++i) keys[i] = key_at(x + (j + i) * (int64_t)sizeof(U));
    } else {
      for (int i = 0; i < BLOCK; ++i) keys[i] = key_at(x + (j + i) * step);
    }
    for (int i = 0; i < BLOCK; ++i) any |= keys[i] > least;
    if (!any) continue;
    for (int i = 0; i < BLOCK; ++i)
      if (keys[i] > least) consider(keys[i], j + i);
  }
  for (; j < n; ++j) consider(key_at(x + j * step), j);
}

// Of lines whose elements have the bits of U; E holds a key.
typedef WORD U;
typedef PAIR E;

// Parameters: length of lines, k, strides of the operand.
extern "C" void top_k(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                      int threads) {
  const Batch b(p);
  const int64_t n = b.rest[0], k = b.rest[1], *const along = b.rest + 2, step = along[b.ndim];
  const auto key_at = [](const char *at) {
    const U bits = bits_at<U>(at);
    return INFINITE ? float_key(bits, (U)INFINITE) : IS_SIGNED ? signed_key(bits) : bits;
  };
  each(b, scratch, threads, [&](int64_t i, char *slot) {
    const char *const from = operands[0] + b.at(i, along);
    Parts parts{slot};
    E *x = parts.take<E>(n), *const other = parts.take<E>(n);
    if (k <= SELECTED && (k <= 16 || 8 * k <= n)) {
      select<U>(from, step, n, k, x, key_at);
    } else {
      for (int64_t j = 0; j < n; ++j) x[j].set((U)~key_at(from + j * step), (uint32_t)j);
      x = sorted(x, other, n, BYTES);
    }
    char *const values = results[0] + i * k * BYTES;
    int32_t *const places = (int32_t *)results[1] + i * k;
    for (int64_t j = 0; j < k; ++j) {
      places[j] = (int32_t)x[j].place();
      memcpy(values + j * BYTES, from + x[j].place() * step, BYTES);
    }
  });
}
