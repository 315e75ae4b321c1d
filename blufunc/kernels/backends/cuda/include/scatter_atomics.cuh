// Scatters of integers by atomics: their results do not depend on the order of updates.
//
// Constants: THREADS of a block, CLIP: whether rows out of range are the nearest in range, or left out. Macros: the types
// Index, Storage and Word, which ATOMIC(place, u) takes.

//# kernels
extern "C" __global__ void __launch_bounds__(THREADS)
    update(const Index *__restrict__ rows, const Storage *__restrict__ updates, Storage *out, long long size,
           int width, int height) {
  const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (i >= size) return;
  Index row = rows[i / width];
  if (CLIP) row = row < 0 ? (Index)0 : row < height ? row : (Index)(height - 1);
  if (row < 0 || row >= height) return;
  ATOMIC((Word *)out + row * (long long)width + i % width, (Word)updates[i]);
}
