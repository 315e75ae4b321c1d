// A GEMM and the softmax of its rows: an epilogue of tile_gemm.cuh whose logits are never in memory, and the kernel
// that completes the rows. library/softmax_gemm.py says what is computed.
//
// Constants: FAR, BELOW: how far logits may be above and below the shift; SHARES: threads of a row in softmax_settle.

//# epilogue
// Of FEW values of each lane, the combinations over all lanes: those of the value `place_of(lane)`, in all its lanes.
template<int FEW, class T, class Combine> inline T combined(T (&x)[FEW], Combine combine) {
  int far = 16;
#pragma unroll
  for (int n = FEW / 2; n; n /= 2, far /= 2)  // each half of the lanes goes on with a half of the values
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const bool upper = threadIdx.x & far;
      const T given = upper ? x[i] : x[i + n];
      x[i] = combine(upper ? x[i + n] : x[i], __shfl_xor_sync(~0u, given, far));
    }
#pragma unroll
  for (; far; far /= 2) x[0] = combine(x[0], __shfl_xor_sync(~0u, x[0], far));
  return x[0];
}
constexpr int FEW = 4;  // rows at a time
inline int place_of(int lane) { return lane / 8; }

struct SoftmaxEpilogue : EpilogueHooks {
  const int *__restrict__ classes;
  const unsigned char *__restrict__ live;
  const float *__restrict__ shift;
  const int *__restrict__ again;  // null: all bands; else only those of which this is not 0
  element *__restrict__ slopes;
  float *__restrict__ own, *__restrict__ sums, *__restrict__ tops;

  bool begin() const {
    if (again == nullptr) return true;
    int any = 0;
    for (int i = threadIdx.x; i < TILES_M; i += THREADS) any |= again[i];
    return __syncthreads_or(any);
  }
  bool wanted(Tile tile) const { return again == nullptr || again[tile.band]; }

  // A warp has few rows at a time, a lane three pairs of columns.
  void consume(const StagedTile &tile) const {
    constexpr float LOG2E = 1.4426950408889634f;
    constexpr unsigned NONE = 0xff80ff80u;  // two logits of -infinity
    const int lane = tile.lane, column = tile.column();
    tile.wait();
    for (int top_row = tile.warp * FEW; top_row < ROWS; top_row += EPILOGUE_WARPS * FEW) {
      const int from = tile.row() + top_row;
      const float4 four = *(const float4 *)(shift + from);
      const int4 its = *(const int4 *)(classes + from);
      const unsigned lives = *(const unsigned *)(live + from);
      const float shifts[] = {four.x, four.y, four.z, four.w};
      const int hits[] = {its.x, its.y, its.z, its.w};
      float sums_of[FEW];
      unsigned tops_of[FEW];
#pragma unroll
      for (int r = 0; r < FEW; ++r) {
        const float down = shifts[r] * LOG2E;
        const int hit = hits[r] - column;
        const unsigned keep = lives >> r * 8 & 1 ? ~0u : 0u;
        unsigned t[WORDS];
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
          t[j] = tile.pair(top_row + r, j);
          if (N % COLUMNS != 0 && column + j * 64 + lane * 2 >= N) t[j] = NONE;  // there are no such classes
        }
        if (hit >= 0 && hit < COLUMNS) {
#pragma unroll
          for (int j = 0; j < WORDS; ++j)
            if (hit / 2 == lane + j * 32) {
              own[from + r] = hit % 2 ? high_half(t[j]) : low_half(t[j]);
              const unsigned half = hit % 2 ? 0xffff0000u : 0xffffu;
              t[j] = (t[j] & ~half) | (NONE & half);
            }
        }
        unsigned *const to = (unsigned *)slopes + ((long long)(from + r) * N + column) / 2 + lane;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
          const float x = exp2_fast(fmaf(low_half(t[j]), LOG2E, -down));
          const float y = exp2_fast(fmaf(high_half(t[j]), LOG2E, -down));
          sum += x + y;
          if (N % COLUMNS == 0 || column + j * 64 + lane * 2 < N) __stcs(to + j * 32, pack(x, y) & keep);
        }
        sums_of[r] = sum;
        tops_of[r] = larger_of_two(larger_of_two(t[0], t[1]), t[2]);
      }
      const float sum = combined(sums_of, [](float x, float y) { return x + y; });
      const unsigned top = combined(tops_of, larger_of_two);
      if (lane % 8 == 0) {
        const long long at = (long long)tile.panel * M + from + place_of(lane);
        sums[at] = sum;
        tops[at] = fmaxf(low_half(top), high_half(top));
      }
    }
    tile.release();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    softmax_gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                 const int *__restrict__ classes, const unsigned char *__restrict__ live,
                 const float *__restrict__ shift, const int *__restrict__ again, element *__restrict__ slopes,
                 float *__restrict__ own, float *__restrict__ sums, float *__restrict__ tops) {
  tile_gemm(a, b, SoftmaxEpilogue{{}, classes, live, shift, again, slopes, own, sums, tops});
}

//# settle
constexpr int BAND = ROWS * CLUSTER;

// A block for each band, SHARES threads for each of its rows.
extern "C" __global__ void __launch_bounds__(BAND *SHARES)
    softmax_settle(const float *__restrict__ sums, const float *__restrict__ tops,
                   const float *__restrict__ near, const int *__restrict__ classes,
                   const unsigned char *__restrict__ live, const float *__restrict__ own,
                   element *__restrict__ slopes, float *__restrict__ losses, float *__restrict__ factors,
                   float *__restrict__ shift, int *__restrict__ again, int second) {
  if (second && !again[blockIdx.x]) return;
  __shared__ float found_sums[SHARES][BAND], found_tops[SHARES][BAND];
  const int in_band = threadIdx.x % BAND, share = threadIdx.x / BAND, row = blockIdx.x * BAND + in_band;
  float others = 0, top = __uint_as_float(0xff800000u);
#pragma unroll 8
  for (int tile = share; tile < TILES_N; tile += SHARES) {
    others += sums[(long long)tile * M + row];
    top = fmaxf(top, tops[(long long)tile * M + row]);
  }
  found_sums[share][in_band] = others, found_tops[share][in_band] = top;
  __syncthreads();
  bool far = false;
  if (share == 0) {
    for (int s = 1; s < SHARES; ++s)
      others += found_sums[s][in_band], top = fmaxf(top, found_tops[s][in_band]);
    const int its_class = classes[row];
    const bool known = its_class >= 0 && its_class < N;
    const float its = known ? own[row] : near[row];
    if (!second) {
      top = fmaxf(top, its);
      far = known && live[row] && (top > near[row] + FAR || its < near[row] - BELOW);
      shift[row] = far ? top : near[row];
    }
    const float above = its - shift[row];  // 0 but for rounding, or what the largest is above it
    losses[row] = above >= -BELOW ? log1pf(others * expf(-above)) : logf(others + expf(above)) - above;
    factors[row] = 1 / (others + expf(above));
    if (known && live[row]) slopes[(long long)row * N + its_class] = pack(-others, 0) & 0xffff;
  }
  if (!second) {
    const int any = __syncthreads_or(far);
    if (threadIdx.x == 0) again[blockIdx.x] = any;
  }
}
