// Updates in the order of their rows: a stable radix sort of row indices, a digit at a time.
//
// Constants: WARPS of a block, BITS of a digit, CLIP: whether rows out of range are the nearest in range, or come after
// all rows. Types: Index, and Payload: what is sorted along with the rows, positions or the updates themselves; the
// macro PAYLOAD(updates, j) is that of an update. A block has a part of the updates, which it goes through in tiles. It
// sorts each tile in shared memory, so that updates of one digit are written side by side.

//# kernels
constexpr int DIGITS = 1 << BITS, LANES = 32, THREADS = WARPS * LANES, ITEMS = 16, TILE = THREADS * ITEMS;
static_assert(DIGITS <= THREADS, "a thread has a digit");

// The key of an update: its row, or `height` if there is no such row.
__device__ unsigned key_of(Index row, int height) {
  if (CLIP) return row < 0 ? 0 : row < height ? unsigned(row) : unsigned(height - 1);
  return row >= 0 && row < height ? unsigned(row) : unsigned(height);
}

// Number of keys with each digit in the part of each block.
template<class Key> __device__ void count_digits(Key key, unsigned *counts, int n, int each, int shift) {
  __shared__ unsigned counters[WARPS][DIGITS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  for (int d = lane; d < DIGITS; d += LANES) counters[warp][d] = 0;
  __syncwarp();
  const long long first = (long long)blockIdx.x * each;
  const int last = int(min((long long)n, first + each));
#pragma unroll 8
  for (int j = int(first) + threadIdx.x; j < last; j += THREADS)
    atomicAdd(&counters[warp][key(j) >> shift & (DIGITS - 1)], 1u);
  __syncthreads();
  if (threadIdx.x >= DIGITS) return;
  unsigned sum = 0;
  for (int w = 0; w < WARPS; ++w) sum += counters[w][threadIdx.x];
  counts[blockIdx.x * DIGITS + threadIdx.x] = sum;
}

// The sum of a value over the threads before this one.
__device__ unsigned sum_before(unsigned x) {
  __shared__ unsigned sums[WARPS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  unsigned sum = x;
#pragma unroll
  for (int d = 1; d < LANES; d *= 2) {
    const unsigned other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == LANES - 1) sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w];
  return sum - x;
}

// Keys and payloads to their places: after those of smaller digits, of parts before, and of the part so far.
template<class Key, class Value>
__device__ void place_digits(Key key, Value value, const unsigned *counts, const int *bases, unsigned *keys,
                             Payload *payloads, int n, int each, int shift) {
  __shared__ unsigned counters[WARPS][DIGITS], starts[DIGITS], offsets[DIGITS], tile_keys[TILE];
  __shared__ Payload tile_payloads[TILE];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, own = threadIdx.x;
  unsigned next = own < DIGITS ? bases[own] + counts[blockIdx.x * DIGITS + own] : 0;
  const long long first = (long long)blockIdx.x * each;
  const int last = int(min((long long)n, first + each));
  for (long long tile = first; tile < last; tile += TILE) {
    for (int d = lane; d < DIGITS; d += LANES) counters[warp][d] = 0;
    unsigned k[ITEMS], rank[ITEMS];
    Payload p[ITEMS];
    const int count = int(min((long long)TILE, last - tile)), mine = warp * (TILE / WARPS) + lane;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int at = mine + i * LANES;
      k[i] = at < count ? key(int(tile) + at) : 0;
      if (at < count) p[i] = value(int(tile) + at);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const bool there = mine + i * LANES < count;
      const unsigned digit = k[i] >> shift & (DIGITS - 1);
      const unsigned same = __match_any_sync(~0u, there ? digit : unsigned(DIGITS));
      const unsigned before = same & ((1u << lane) - 1), start = counters[warp][digit];
      rank[i] = start + __popc(before);
      __syncwarp();
      if (there && !before) counters[warp][digit] = start + __popc(same);
      __syncwarp();
    }
    __syncthreads();
    unsigned total = 0;
    if (own < DIGITS)
      for (int w = 0; w < WARPS; ++w) {
        const unsigned of_warp = counters[w][own];
        counters[w][own] = total;
        total += of_warp;
      }
    const unsigned start = sum_before(total);
    if (own < DIGITS) {
      starts[own] = start;
      offsets[own] = next - start;
      next += total;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (mine + i * LANES >= count) continue;
      const unsigned digit = k[i] >> shift & (DIGITS - 1),
                     at = starts[digit] + counters[warp][digit] + rank[i];
      tile_keys[at] = k[i];
      tile_payloads[at] = p[i];
    }
    __syncthreads();
    for (int t = own; t < count; t += THREADS) {
      const unsigned sorted = tile_keys[t], at = offsets[sorted >> shift & (DIGITS - 1)] + t;
      keys[at] = sorted;
      payloads[at] = tile_payloads[t];
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    count_rows(const Index *rows, unsigned *counts, int n, int each, int shift, int height) {
  count_digits([=](int j) { return key_of(rows[j], height); }, counts, n, each, shift);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    place_rows(const Index *rows, const Payload *updates, const unsigned *counts, const int *bases,
               unsigned *keys, Payload *payloads, int n, int each, int shift, int height) {
  place_digits([=](int j) { return key_of(rows[j], height); }, [=](int j) { return PAYLOAD(updates, j); },
               counts, bases, keys, payloads, n, each, shift);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    count_keys(const unsigned *keys, unsigned *counts, int n, int each, int shift) {
  count_digits([=](int j) { return keys[j]; }, counts, n, each, shift);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    place_keys(const unsigned *from, const Payload *before, const unsigned *counts, const int *bases,
               unsigned *keys, Payload *payloads, int n, int each, int shift) {
  place_digits([=](int j) { return from[j]; }, [=](int j) { return before[j]; }, counts, bases, keys,
               payloads, n, each, shift);
}

// Per digit, the number of keys in the parts before each, in place, and in all. A block has a warp of digits.
extern "C" __global__ void __launch_bounds__(1024) sum_parts(unsigned *counts, int *totals, int parts) {
  __shared__ unsigned sums[32][LANES];
  const int lane = threadIdx.x % LANES, segment = threadIdx.x / LANES, each = (parts + 31) / 32;
  const int first = min(parts, segment * each), last = min(parts, first + each);
  unsigned *column = counts + blockIdx.x * LANES + lane, sum = 0;
#pragma unroll 8
  for (int p = first; p < last; ++p) sum += column[(long long)p * DIGITS];
  sums[segment][lane] = sum;
  __syncthreads();
  unsigned before = 0;
  for (int s = 0; s < segment; ++s) before += sums[s][lane];
#pragma unroll 8
  for (int p = first; p < last; ++p) {
    const unsigned count = column[(long long)p * DIGITS];
    column[(long long)p * DIGITS] = before;
    before += count;
  }
  if (segment == 31) totals[blockIdx.x * LANES + lane] = before;
}

// Where the updates of each row begin in the order, and after the last row where they end.
extern "C" __global__ void bounds(const unsigned *keys, int *starts, int n, int height) {
  const long long j = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (j > n) return;
  const int from = j == 0 ? -1 : int(keys[j - 1]), to = j == n ? height : int(keys[j]);
  for (int row = from + 1; row <= to; ++row) starts[row] = int(j);
}
