// Scatters of scalars into bins in shared memory: each warp combines its part of the updates in bins of its own.
//
// Constants: WARPS of a block, GROUPS that combine the blocks' results, CLIP: whether rows out of range are the nearest
// in range, or left out; of partitions: BINS of one, a power of two, and CHUNK, updates of a block. Macros: the types
// Index, Storage and Wide, which elements are combined in; LOADED and STORED convert between the last two,
// COMBINED(acc, u) combines, IDENTITY is neutral.
//
// A warp goes through its part in order, and lanes with the same bin combine along a tree that only depends on which
// lanes they are. So the result does not depend on thread scheduling.

//# warps
constexpr int LANES = 32, DEPTH = 4;

// Updates from `first` to `last` combined into a warp's bins; `bin_of(j)` is that of an update, -1 for none.
template<class Bin>
__device__ void combine_updates(Wide *mine, const Storage *__restrict__ updates, int first, int last,
                                Bin bin_of) {
  const int lane = threadIdx.x % LANES;
  for (int j0 = first; j0 < last; j0 += DEPTH * LANES) {
    int bins[DEPTH];
    Wide u[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int j = j0 + d * LANES + lane;
      bins[d] = j < last ? bin_of(j) : -1;
      u[d] = j < last ? (Wide)LOADED(updates[j]) : (Wide)IDENTITY;
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int bin = bins[d];
      const bool there = bin >= 0;
      const unsigned same = __match_any_sync(~0u, bin);
      // a tree over the lanes of a bin, in their order: each round halves their number
      unsigned later = there ? same & (lane == 31 ? 0u : ~0u << (lane + 1)) : 0u;
      int rank = __popc(same & ((1u << lane) - 1));
      const bool leads = there && rank == 0;
      Wide sum = u[d];
      while (__any_sync(~0u, later != 0)) {
        const int next = __ffs(later);
        const Wide other = __shfl_sync(~0u, sum, next ? next - 1 : lane);
        if (next) sum = COMBINED(sum, other);
        later &= __ballot_sync(~0u, (rank & 1) == 0);
        rank >>= 1;
      }
      if (leads) mine[bin] = COMBINED(mine[bin], sum);
      __syncwarp();
    }
  }
}

// The bins of all warps of a block, combined in their order.
__device__ void combine_warps(const Wide *bins, Wide *partials, int height) {
  for (int r = threadIdx.x; r < height; r += WARPS * LANES) {
    Wide acc = bins[r];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) acc = COMBINED(acc, bins[w * height + r]);
    partials[r] = acc;
  }
}

// A bin of consecutive partial results and of the array: groups of threads combine some each, then the groups' results.
__device__ void combine_partials(const Storage *x, const Wide *partials, Storage *out, int count, int stride,
                                 int r, int height) {
  __shared__ Wide sums[GROUPS][LANES];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, each = (count + GROUPS - 1) / GROUPS;
  const int first = min(count, group * each), last = min(count, first + each);
  Wide acc = IDENTITY;
  if (r < height) {
#pragma unroll 8
    for (int b = first; b < last; ++b) acc = COMBINED(acc, partials[(long long)b * stride]);
  }
  sums[group][lane] = acc;
  __syncthreads();
  if (group || r >= height) return;
  Wide whole = LOADED(x[r]);
  for (int g = 0; g < GROUPS; ++g) whole = COMBINED(whole, sums[g][lane]);
  out[r] = STORED(whole);
}

//# few bins
extern "C" __global__ void __launch_bounds__(WARPS *LANES)
    combine_parts(const Index *__restrict__ rows, const Storage *__restrict__ updates, Wide *partials, int n,
                  int each, int height) {
  extern __shared__ __align__(16) unsigned char memory[];
  Wide *bins = (Wide *)memory;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  Wide *mine = bins + warp * height;
  for (int r = lane; r < height; r += LANES) mine[r] = IDENTITY;
  __syncwarp();
  const long long part = (long long)blockIdx.x * WARPS + warp;
  const int first = int(min((long long)n, part * each)), last = int(min((long long)n, (part + 1) * each));
  combine_updates(mine, updates, first, last, [=](int j) {
    Index row = rows[j];
    if (CLIP) row = row < 0 ? (Index)0 : row < height ? row : (Index)(height - 1);
    return row >= 0 && row < height ? int(row) : -1;
  });
  __syncthreads();
  combine_warps(bins, partials + (long long)blockIdx.x * height, height);
}

extern "C" __global__ void __launch_bounds__(GROUPS *LANES)
    combine_blocks(const Storage *x, const Wide *partials, Storage *out, int blocks, int height) {
  const int r = blockIdx.x * LANES + threadIdx.x % LANES;
  combine_partials(x, partials + r, out, blocks, height, r, height);
}

//# partitions
// Updates and their rows lie in partitions of BINS rows, from `starts` on. A block has a chunk of them, which may be of
// several partitions. Partial results are numbered by chunk plus partition: either grows from one to the next.
extern "C" __global__ void __launch_bounds__(WARPS *LANES)
    combine_chunks(const unsigned *__restrict__ keys, const Storage *__restrict__ updates,
                   const int *__restrict__ starts, Wide *partials, int n, int height) {
  extern __shared__ __align__(16) unsigned char memory[];
  Wide *bins = (Wide *)memory;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  Wide *mine = bins + warp * BINS;
  const int begin = int(blockIdx.x) * CHUNK, end = n - begin < CHUNK ? n : begin + CHUNK;
  for (unsigned p = keys[begin] / BINS, last_p = keys[end - 1] / BINS; p <= last_p; ++p) {
    const int from = max(begin, starts[p]), to = min(end, starts[p + 1]),
              each = (to - from + WARPS - 1) / WARPS;
    if (from >= to) continue;
    for (int r = lane; r < BINS; r += LANES) mine[r] = IDENTITY;
    __syncwarp();
    const int first = min(to, from + warp * each), last = min(to, first + each);
    combine_updates(mine, updates, first, last, [=](int j) {
      const unsigned key = keys[j];
      return key < unsigned(height) ? int(key % BINS) : -1;
    });
    __syncthreads();
    combine_warps(bins, partials + (long long)(blockIdx.x + p) * BINS, BINS);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(GROUPS *LANES)
    combine_partitions(const Storage *x, const Wide *partials, const int *__restrict__ starts, Storage *out,
                       int height) {
  const int r = blockIdx.x * LANES + threadIdx.x % LANES, p = blockIdx.x * LANES / BINS;
  const int begin = starts[p], end = starts[p + 1];
  const int first = begin / CHUNK, count = begin < end ? (end - 1) / CHUNK - first + 1 : 0;
  combine_partials(x, partials + (long long)(first + p) * BINS + r % BINS, out, count, BINS, r, height);
}
