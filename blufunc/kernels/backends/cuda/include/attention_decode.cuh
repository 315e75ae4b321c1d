// Attention of a token, or of few: all queries that share a key head are rows of one block, which reads keys and values
// once.
//
// Warps of a block take tiles of 16 keys in turns, as do the SPLITS blocks of a cluster. Keys and values go straight into
// registers, as in skinny_gemm.cuh: keys are the left operand of the scores' matmul, and transposed values that of the
// results'. A tile in which no pair is seen is not read: its bounds, or the mask itself, are evaluated first. So a mask that
// compares positions with a length makes the kernel read the valid part of a cache.
//
// Each warp has the maximum and the sum of its weights; at the end, warps and then blocks are merged in a fixed order.
//
// Constants: FEATURES, 64 or 128; ROWS, at most 16, of which GROUP share a token; WARPS, SPLITS; BLOCKS
// of an SM; BLIND_IS_NAN: whether rows that see nothing are NaN, not 0. What users do with scores is in `Pairs`
// (attention_mods.cuh).

//# instructions
// the transpose of a matrix of 8 x 8 elements, of which a lane has a pair
inline unsigned transposed(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
inline void load_words(unsigned (&r)[4], const void *from) {
  const uint4 x = *(const uint4 *)from;
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
inline unsigned rank_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// all threads of all blocks of the cluster are here, and see what the others wrote to shared memory
inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// a float of another block of the cluster, where this one has `place`
inline float from_block(const float *place, unsigned rank) {
  unsigned from;
  float x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(from)
      : "r"((unsigned)__cvta_generic_to_shared(place)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

//# decode
typedef unsigned short element;  // its bits
extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int THREADS = 32 * WARPS, KEYS = 16, TILES = (ROWS + 7) / 8, PADDED = TILES * 8;
constexpr int SUM_ROW = FEATURES + 4, SUMS = PADDED * SUM_ROW;  // of a warp
inline float negative_infinity() { return __uint_as_float(0xff800000u); }

// Keys and values of a tile, and which pairs are seen: bit (tile * 2 + j) * 2 + i of row tile * 8 + lane % 4 * 2 + j and
// key lane / 4 + i * 8.
struct Stage {
  int tile;
  unsigned seen, k[2][FEATURES / 32][4], v[4][FEATURES / 64][4];
};

struct Cache {
  const element *k, *v;
  long long k_token, v_token;
  int keys, lane;

  inline void load(Stage &s) const {
    const int g = lane / 4, t = lane % 4, first = s.tile * KEYS;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < FEATURES / 32; ++c)
        load_words(s.k[i][c], k + min(first + g + i * 8, keys - 1) * k_token + c * 32 + t * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < FEATURES / 64; ++c)
        load_words(s.v[i][c],
                   v + min(first + t * 2 + i % 2 + i / 2 * 8, keys - 1) * v_token + c * 64 + g * 8);
  }
};

// The rows of a lane: TILES times two.
struct Rows {
  Pairs pairs[2 * TILES];
  int query[2 * TILES];

  // Find the next tile with a pair that is seen, from `tile` on; true if there is one.
  inline bool find(Stage &s, int tile, int step, int keys, int lane) const {
    for (; tile * KEYS < keys; tile += step) {
      const int first = tile * KEYS, last = min(first + KEYS, keys) - 1;
      unsigned state = 1;
      if constexpr (MASKED) {
        state = 0;
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r) state |= pairs[r].seen(query[r], query[r], first, last);
        state = __reduce_or_sync(0xffffffffu, state);
      }
      if (!(state & 1)) continue;
      unsigned seen = ~0u;
      if ((state & 2) || first + KEYS > keys) {
        seen = 0;
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first + lane / 4 + i * 8;
            if (key < keys && pairs[r].seen(query[r], key)) seen |= 1u << (r * 2 + i);
          }
        if (!__any_sync(0xffffffffu, seen)) continue;
      }
      s.tile = tile, s.seen = seen;
      return true;
    }
    s.tile = -1;
    return false;
  }
};

inline float max_of_column(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
inline float sum_of_column(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

struct Softmax {
  float scale, unit;  // of scores, in powers of two; of products
  float top[2 * TILES], total[2 * TILES];
  float sums[FEATURES / 16][TILES][4];

  __forceinline__ void add(const Stage &s, const unsigned (&q)[TILES][FEATURES / 32][4], const Rows &rows,
                           int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float c[4] = {};  // key lane / 4, two rows; then the key 8 further
#pragma unroll
      for (int i = 0; i < FEATURES / 32; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned a[4] = {s.k[0][i][half * 2], s.k[1][i][half * 2], s.k[0][i][half * 2 + 1],
                                 s.k[1][i][half * 2 + 1]};
          multiply_add(c, a, q[tile][i][half * 2], q[tile][i][half * 2 + 1]);
        }
      float kept[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = tile * 2 + j;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &score = c[i * 2 + j];
          if (SCORED)
            score = rows.pairs[r].score(score * unit, rows.query[r], s.tile * KEYS + lane / 4 + i * 8);
          if (!(s.seen >> (r * 2 + i) & 1)) score = negative_infinity();
        }
        const float before = top[r];
        const float now = top[r] = fmaxf(before, max_of_column(fmaxf(c[j], c[2 + j])));
        const float shift = now == negative_infinity() ? 0 : now * scale;
        kept[j] = exp2_fast(before * scale - shift);
        c[j] = exp2_fast(c[j] * scale - shift), c[2 + j] = exp2_fast(c[2 + j] * scale - shift);
        total[r] = total[r] * kept[j] + (c[j] + c[2 + j]);
      }
      const unsigned b0 = transposed(pack(c[0], c[1])), b1 = transposed(pack(c[2], c[3]));
#pragma unroll
      for (int n = 0; n < FEATURES / 16; ++n) {
        float (&own)[4] = sums[n][tile];
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] *= kept[i % 2];
        unsigned a[4];
#pragma unroll
        for (int half = 0; half < 2;
             ++half) {  // pairs of keys of one feature, from pairs of features of one key
          const unsigned one = s.v[half * 2][n / 4][n % 4], other = s.v[half * 2 + 1][n / 4][n % 4];
          a[half * 2] = (one & 0xffffu) | other << 16;
          a[half * 2 + 1] = one >> 16 | (other & 0xffff0000u);
        }
        multiply_add(own, a, b0, b1);
      }
    }
  }

  // Store what this warp has: rows of sums, then the maxima and the totals of all rows.
  __forceinline__ void keep(float *to, int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = tile * 8 + t * 2 + j;
#pragma unroll
        for (int n = 0; n < FEATURES / 16; ++n)
          *(float2 *)(to + row * SUM_ROW + n / 4 * 64 + g * 8 + n % 4 * 2) =
              make_float2(sums[n][tile][j], sums[n][tile][2 + j]);
        const float sum = sum_of_column(total[tile * 2 + j]);
        if (g == 0) {
          float *const own = to + row * SUM_ROW + FEATURES;
          own[0] = top[tile * 2 + j], own[1] = sum;
        }
      }
  }
};

// A row of COUNT warps, or blocks, of which `of(n, i)` is the i-th float: the sum of weights of all, the greatest score, and
// the weighted sums of two features.
struct Merged { float top, total, sums[2]; };
template<int COUNT, class Of> inline Merged merge(const Of &of, float scale, int feature) {
  Merged m = {negative_infinity(), 0, {0, 0}};
#pragma unroll 4
  for (int n = 0; n < COUNT; ++n) m.top = fmaxf(m.top, of(n, FEATURES));
  const float shift = m.top == negative_infinity() ? 0 : m.top;
#pragma unroll 4
  for (int n = 0; n < COUNT; ++n) {
    const float factor = exp2_fast((of(n, FEATURES) - shift) * scale);
    m.total += factor * of(n, FEATURES + 1);
    m.sums[0] += factor * of(n, feature), m.sums[1] += factor * of(n, feature + 1);
  }
  return m;
}

struct Strides { long long batch, token, head; };
struct Problem {
  int queries, keys, heads;
  float scale;
  Strides q, k, v, out;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) CLUSTER_DIMS
    attention_decode(const element *q, const element *k, const element *v, element *out, float *lse,
                     EXTRAS const Problem p) {
  let_next_kernel_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = SPLITS > 1 ? rank_in_cluster() : 0;
  const int key_heads = p.heads / GROUP, plane = blockIdx.x / SPLITS;
  const int batch = plane / key_heads, key_head = plane % key_heads;
  const Cache cache = {k + batch * p.k.batch + key_head * p.k.head,
                       v + batch * p.v.batch + key_head * p.v.head,
                       p.k.token,
                       p.v.token,
                       p.keys,
                       lane};
  wait_for_previous_kernel();
  Rows rows;
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r) {
    const int row = min(r / 2 * 8 + t * 2 + r % 2, ROWS - 1);
    rows.query[r] = row / GROUP;
    rows.pairs[r] = PAIRS_OF(batch, key_head * GROUP + row % GROUP);
  }
  Softmax softmax;
  softmax.unit = p.scale, softmax.scale = (SCORED ? 1 : p.scale) * LOG2_E;
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r) softmax.top[r] = negative_infinity(), softmax.total[r] = 0;
#pragma unroll
  for (int i = 0; i < FEATURES / 16 * TILES * 4; ++i) softmax.sums[i / (TILES * 4)][i / 4 % TILES][i % 4] = 0;

  unsigned queries[TILES][FEATURES / 32][4];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int row = min(tile * 8 + g, ROWS - 1);
    const element *from =
        q + batch * p.q.batch + row / GROUP * p.q.token + (key_head * GROUP + row % GROUP) * p.q.head;
#pragma unroll
    for (int i = 0; i < FEATURES / 32; ++i) load_words(queries[tile][i], from + i * 32 + t * 8);
  }
  // other warps hide the latency of loads: code that runs once or twice takes as long to be fetched as to be run
  Stage stage;
#pragma unroll 1
  for (int next = warp * SPLITS + rank; rows.find(stage, next, WARPS * SPLITS, p.keys, lane);
       next = stage.tile + WARPS * SPLITS) {
    cache.load(stage);
    softmax.add(stage, queries, rows, lane);
  }
  float *const sums = (float *)shared_memory;
  softmax.keep(sums + warp * SUMS, lane);
  __syncthreads();
  const float scale = softmax.scale;
  constexpr int HALF = FEATURES / 2, EACH = (ROWS * HALF + THREADS - 1) / THREADS;
  auto of_warp = [&](int row) { return [=](int n, int at) { return sums[n * SUMS + row * SUM_ROW + at]; }; };
  auto store = [&](int i, const Merged &m) {
    const int row = i / HALF, feature = i % HALF * 2, query = row / GROUP,
              head = key_head * GROUP + row % GROUP;
    const float factor = m.total > 0 ? 1 / m.total : BLIND_IS_NAN ? __uint_as_float(0x7fc00000u) : 0;
    *(unsigned *)(out + batch * p.out.batch + query * p.out.token + head * p.out.head + feature) =
        pack(m.sums[0] * factor, m.sums[1] * factor);
    if (feature == 0)
      lse[((long long)batch * p.heads + head) * p.queries + query] =
          m.total > 0 ? m.top * (SCORED ? 1 : softmax.unit) + logf(m.total) : negative_infinity();
  };
  if constexpr (SPLITS == 1) {
    for (int i = threadIdx.x; i < ROWS * HALF; i += THREADS)
      store(i, merge<WARPS>(of_warp(i / HALF), scale, i % HALF * 2));
  } else {  // the merged sums of a block replace those of its first warp
    Merged own[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int i = threadIdx.x + e * THREADS;
      if (i < ROWS * HALF) own[e] = merge<WARPS>(of_warp(i / HALF), scale, i % HALF * 2);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int i = threadIdx.x + e * THREADS, feature = i % HALF * 2;
      if (i >= ROWS * HALF) break;
      float *const row = sums + i / HALF * SUM_ROW;
      row[feature] = own[e].sums[0], row[feature + 1] = own[e].sums[1];
      if (feature == 0) row[FEATURES] = own[e].top, row[FEATURES + 1] = own[e].total;
    }
    meet_cluster();
    for (int i = threadIdx.x + rank * THREADS; i < ROWS * HALF; i += THREADS * SPLITS) {
      const float *const row = sums + i / HALF * SUM_ROW;
      auto of_block = [=](int n, int at) { return from_block(row + at, n); };
      store(i, merge<SPLITS>(of_block, scale, i % HALF * 2));
    }
    meet_cluster();  // others read what this block has
  }
}
