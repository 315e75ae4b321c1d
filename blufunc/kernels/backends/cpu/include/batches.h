// Batches of lines or matrices for libraries of native steps; steps/forms.py writes the parameters.

//# batches
#include <stdint.h>
#include <string.h>

// The head of the parameters: count of batch positions, chunks for threads, bytes of scratch of each, and the shape.
struct Batch {
  int64_t count, chunks, bytes, ndim;
  const int64_t *shape, *rest;
  explicit Batch(const int64_t *p)
      : count(p[0]), chunks(p[1]), bytes(p[2]), ndim(p[3]), shape(p + 4), rest(p + 4 + p[3]) {}

  // The offset of a batch position, given a stride per axis.
  int64_t at(int64_t i, const int64_t *strides) const {
    int64_t offset = 0;
    for (int64_t d = ndim; d-- > 0; i /= shape[d]) offset += i % shape[d] * strides[d];
    return offset;
  }
};

// Call f(batch position, scratch) for all of them.
template<class F> static inline void each(const Batch &b, char *scratch, int threads, F f) {
  if (b.chunks < 2 || threads < 2) {
    for (int64_t i = 0; i < b.count; ++i) f(i, scratch);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t c = 0; c < b.chunks; ++c)
    for (int64_t i = b.count * c / b.chunks; i < b.count * (c + 1) / b.chunks; ++i)
      f(i, scratch + c * b.bytes);
}

// Parts of a scratch, aligned to 64 bytes.
struct Parts {
  char *at;
  template<class T> T *take(int64_t count) {
    T *const found = (T *)at;
    at += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return found;
  }
};
