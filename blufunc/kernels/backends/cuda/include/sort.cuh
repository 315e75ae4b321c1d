// Sorts of rows by blocks: bitonic, in shared memory, by keys that order as unsigned integers, then by position.
//
// Constants: LENGTH of a row, PART: elements of a row that a block sorts, a power of two, PARTS of a row, KEPT: elements
// that remain of a part, STRIDE between elements of a row, THREADS, DESCENDING, FROM_KEYS: whether elements are those of
// an earlier pass, TO_KEYS: whether this one's are for a later pass. Macros: Storage, the type of an element, LOADED(x)
// as a number, Ordered, the type of keys as integers.

//# kernels
// Integers in the order of numbers; NaN comes last, and zeros are equal.
__device__ unsigned ordered(float x) {
  if (x != x) return 0xffffffffu;
  unsigned bits = x == 0 ? 0 : __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ unsigned long long ordered(double x) {
  if (x != x) return ~0ull;
  unsigned long long bits = x == 0 ? 0 : __double_as_longlong(x);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ unsigned ordered(bool x) { return x; }
__device__ unsigned ordered(signed char x) { return (unsigned)x ^ 0x80000000u; }
__device__ unsigned ordered(short x) { return (unsigned)x ^ 0x80000000u; }
__device__ unsigned ordered(int x) { return (unsigned)x ^ 0x80000000u; }
__device__ unsigned ordered(unsigned char x) { return x; }
__device__ unsigned ordered(unsigned short x) { return x; }
__device__ unsigned ordered(unsigned x) { return x; }
__device__ unsigned long long ordered(long long x) { return (unsigned long long)x ^ 1ull << 63; }
__device__ unsigned long long ordered(unsigned long long x) { return x; }

struct Element {
  Ordered key;
  unsigned place;
};

__device__ bool before(Element a, Element b) {
  return a.key < b.key || (a.key == b.key && a.place < b.place);
}

// One block sorts a part of a row, and gives the first elements to `take`.
template<class Take> __device__ void sort_part(const void *given, Element *part, Take take) {
  unsigned row = blockIdx.x / PARTS, first = blockIdx.x % PARTS * PART;
  for (unsigned i = threadIdx.x; i < PART; i += THREADS) {
    unsigned at = first + i;
    Element e = {(Ordered) ~(Ordered)0, 0xffffffffu};  // after all others
    if (at < LENGTH) {
      if (FROM_KEYS) {
        e = ((const Element *)given)[(size_t)row * LENGTH + at];
      } else {
        Storage x = ((const Storage *)given)[((size_t)row / STRIDE * LENGTH + at) * STRIDE + row % STRIDE];
        e.key = ordered(LOADED(x));
        if (DESCENDING) e.key = ~e.key;
        e.place = at;
      }
    }
    part[i] = e;
  }
  for (unsigned size = 2; size <= PART; size *= 2)
    for (unsigned step = size / 2; step; step /= 2) {
      __syncthreads();
      for (unsigned t = threadIdx.x; t < PART / 2; t += THREADS) {
        unsigned i = 2 * t - (t & (step - 1)), j = i + step;
        Element a = part[i], b = part[j];
        if (before(b, a) == !(i & size)) {
          part[i] = b;
          part[j] = a;
        }
      }
    }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < KEPT; i += THREADS) take(row, i, part[i]);
}
