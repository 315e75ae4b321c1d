// Scatters of scalars into few bins: each warp combines its part of the updates in shared memory.
//
// Constants: WARPS of a block, GROUPS that combine the blocks' results, CLIP: whether rows out of range are the nearest
// in range, or left out. Macros: the types Index, Storage and Wide, which elements are combined in; LOADED and STORED
// convert between the last two, COMBINED(acc, u) combines, IDENTITY is neutral.
//
// A warp goes through its part in order, and lanes with the same bin combine along a tree that only depends on which
// lanes they are. So the result does not depend on thread scheduling.

//# kernels
constexpr int LANES = 32, DEPTH = 4;

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
  for (int j0 = first; j0 < last; j0 += DEPTH * LANES) {
    Index row[DEPTH];
    Wide u[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int j = j0 + d * LANES + lane;
      row[d] = j < last ? rows[j] : (Index)-1;
      u[d] = j < last ? (Wide)LOADED(updates[j]) : (Wide)IDENTITY;
      if (CLIP && j < last) row[d] = row[d] < 0 ? (Index)0 : row[d] < height ? row[d] : (Index)(height - 1);
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const bool there = row[d] >= 0 && row[d] < height;
      const int bin = there ? int(row[d]) : -1;
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
  __syncthreads();
  for (int r = threadIdx.x; r < height; r += WARPS * LANES) {
    Wide acc = bins[r];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) acc = COMBINED(acc, bins[w * height + r]);
    partials[(long long)blockIdx.x * height + r] = acc;
  }
}

// The results of all blocks, and the array: groups of threads combine consecutive blocks, then the groups' results.
extern "C" __global__ void __launch_bounds__(GROUPS *LANES)
    combine_blocks(const Storage *x, const Wide *partials, Storage *out, int blocks, int height) {
  __shared__ Wide sums[GROUPS][LANES];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, each = (blocks + GROUPS - 1) / GROUPS;
  const int r = blockIdx.x * LANES + lane, first = min(blocks, group * each),
            last = min(blocks, first + each);
  Wide acc = IDENTITY;
  if (r < height) {
#pragma unroll 8
    for (int b = first; b < last; ++b) acc = COMBINED(acc, partials[(long long)b * height + r]);
  }
  sums[group][lane] = acc;
  __syncthreads();
  if (group || r >= height) return;
  Wide whole = LOADED(x[r]);
  for (int g = 0; g < GROUPS; ++g) whole = COMBINED(whole, sums[g][lane]);
  out[r] = STORED(whole);
}
