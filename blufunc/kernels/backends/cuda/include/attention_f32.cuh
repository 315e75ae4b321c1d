// Attention of IEEE float32, forward and backward: every matmul is computed by fused multiply-adds in registers.
//
// The scheme is FlashAttention-2's (Dao, arXiv:2307.08691), without tensor cores. A thread owns a tile of up to 8 x 8
// sums. Its factors come from shared memory 16 bytes at a time. The right one is a vector of four columns of one term: keys
// and values of the first two matmuls are therefore copied transposed. The left one is four terms of a row, or a vector
// of four rows of one term. Rows are padded, so that the same 16 bytes of eight successive rows cover all banks.
//
// Constants: FEATURES, of a head; WIDTH, the features padded with zeros to 32, 64 or 128; THREADS, LANES_OF_ROWS, ROWS,
// COLUMNS, BLOCKS, CAUSAL, OF_KEYS. `instructions` of mma.cuh, `Pairs` of attention_mods.cuh and `common` of
// attention_fwd.cuh precede these parts.

//# pairs
// Two sums in an aligned pair of registers. A multiply-add reads one register from each of two banks, those of even and
// of odd numbers, in a cycle: a factor from a vector of four, whose parity is known, goes to the sum in the other bank.
typedef unsigned long long Pair;
inline void add_even(Pair &sums, float x, float y) {
  asm("{.reg .f32 low, high;\n mov.b64 {low, high}, %0;\n fma.rn.f32 high, %1, %2, high;\n mov.b64 %0, {low, "
      "high};}"
      : "+l"(sums)
      : "f"(x), "f"(y));
}
inline void add_odd(Pair &sums, float x, float y) {
  asm("{.reg .f32 low, high;\n mov.b64 {low, high}, %0;\n fma.rn.f32 low, %1, %2, low;\n mov.b64 %0, {low, "
      "high};}"
      : "+l"(sums)
      : "f"(x), "f"(y));
}
inline float even_sum(const Pair &sums) { return __uint_as_float((unsigned)(sums >> 32)); }
inline float odd_sum(const Pair &sums) { return __uint_as_float((unsigned)sums); }
inline void multiply(Pair &sums, float x) {
  sums = (unsigned long long)__float_as_uint(even_sum(sums) * x) << 32 | __float_as_uint(odd_sum(sums) * x);
}

// 4 bytes from global to shared memory, or zeros unless inside, as `copy16`
inline void copy4(unsigned to, const void *from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}

//# products
constexpr int WARPS = THREADS / 32, LANES_OF_COLUMNS = 32 / LANES_OF_ROWS;
constexpr int PITCH = WIDTH + 4, WEIGHTS_PITCH = COLUMNS + 4;

// Lanes of a warp in rows and columns of its tile. Neighbours in bit 0 share their row and those in bit 1 their column:
// a load of 16 bytes then takes two cycles for a warp, not four, for operands of rows and of columns.
inline int lane_row() {
  const int lane = threadIdx.x % 32;
  return LANES_OF_ROWS == 2 ? lane >> 1 & 1 : (lane >> 1 & 1) | (lane >> 2 & 2);
}
inline int lane_column() {
  const int lane = threadIdx.x % 32;
  return LANES_OF_ROWS == 2 ? (lane & 1) | (lane >> 2) * 2 : (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4);
}
inline float component(const float4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
inline const float4 &vector_at(const float *x) { return *(const float4 *)x; }
inline float4 vector_of(const Pair *sums) {
  return {even_sum(sums[0]), odd_sum(sums[0]), even_sum(sums[1]), odd_sum(sums[1])};
}
inline float sum_at(const Pair *sums, int j) { return j % 2 ? odd_sum(sums[j / 2]) : even_sum(sums[j / 2]); }
inline void add_to(Pair *sums, int j, float x, float y) {
  if (j % 2) add_odd(sums[j / 2], x, y);
  else add_even(sums[j / 2], x, y);
}
// The n-th of N columns on a way there and back, so that two successive multiply-adds share a factor. With a parity, it is
// that of both ends: the sum there is in another bank than a left factor of this parity.
template<int N> inline int turning(int n, bool back) { return back ? N - 1 - n : n; }
template<int N> inline int turning(int n, bool back, int parity) {
  if (back) n = N - 1 - n;
  const int j = n == 0          ? 0
                : n < N / 2 + 1 ? 2 * n - 1
                                : 2 * (N - n);  // 0, all odd ones, and the even ones down to 2
  return j ^ parity;                            // pairs of columns swap
}

// sums += a b: of every LANES_OF_ROWS-th row from a on, with TERMS elements, and vectors of 4 columns of b, which are
// LANES_OF_COLUMNS apart.
template<int TERMS, int A_PITCH, int B_PITCH, int M, int N>
__forceinline__ void add_rows(Pair (&sums)[M][N], const float *a, const float *b) {
#pragma unroll 2
  for (int t = 0; t < TERMS; t += 4) {
    float4 x[M];
#pragma unroll
    for (int i = 0; i < M; ++i) x[i] = vector_at(a + i * LANES_OF_ROWS * A_PITCH + t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float4 y[N / 2];
#pragma unroll
      for (int j = 0; j < N / 2; ++j) y[j] = vector_at(b + (t + c) * B_PITCH + j * 4 * LANES_OF_COLUMNS);
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) {
          const int j = turning<2 * N>(n, i % 2, c % 2);
          add_to(sums[i], j, component(x[i], c), component(y[j / 4], j % 4));
        }
    }
  }
}

// sums += a^T b, of vectors of 4 columns of both, those of a LANES_OF_ROWS apart.
template<int TERMS, int M, int N>
__forceinline__ void add_columns(Pair (&sums)[M][N], const float *a, const float *b) {
#pragma unroll 8
  for (int t = 0; t < TERMS; ++t) {
    float4 x[M / 4], y[N / 2];
#pragma unroll
    for (int i = 0; i < M / 4; ++i) x[i] = vector_at(a + t * WEIGHTS_PITCH + i * 4 * LANES_OF_ROWS);
#pragma unroll
    for (int j = 0; j < N / 2; ++j) y[j] = vector_at(b + t * PITCH + j * 4 * LANES_OF_COLUMNS);
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) {
        const int j = turning<2 * N>(n, i % 2);
        add_to(sums[i], j, component(x[i / 4], i % 4), component(y[j / 4], j % 4));
      }
  }
}

// Begin to copy COLUMNS rows to columns of a tile, WEIGHTS_PITCH apart; what is missing is zero, as in `load_rows`.
inline void load_columns(float *tile, const float *from, long long stride, int there_are) {
  const int lane = threadIdx.x % 32, row = lane / 8;  // 8 columns of 4 rows: 32 banks
#pragma unroll
  for (int first = 0; first < WIDTH; first += 8 * WARPS) {
    const int column = first + threadIdx.x / 32 * 8 + lane % 8;
    const float *source = from + row * stride + column;
    const unsigned to = shared_address(tile + column * WEIGHTS_PITCH + row);
    if (WIDTH % (8 * WARPS) == 0 || column < WIDTH)
#pragma unroll
      for (int r = 0; r < COLUMNS; r += 4, source += 4 * stride)
        copy4(to + r * 4, source, row + r < there_are && column < FEATURES);
  }
}

// Begin to copy COUNT rows; those from there_are on, and features that only pad, are zeros.
template<int COUNT> inline void load_rows(float *tile, const float *from, long long stride, int there_are) {
  constexpr int CHUNKS = WIDTH / 4, STEP = THREADS / CHUNKS;
  static_assert(THREADS % CHUNKS == 0 && COUNT % STEP == 0, "a thread has one column");
  const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * 4;
  from += row * stride + column;
  const unsigned to = shared_address(tile + row * PITCH + column);
#pragma unroll
  for (int r = 0; r < COUNT; r += STEP, from += STEP * stride)
    copy16(to + r * PITCH * 4, from, row + r < there_are && column < FEATURES);
}
inline void store_vector(float *to, const float4 &x) { *(float4 *)to = x; }

//# forward
constexpr int WARP_ROWS = ROWS / WARPS;
constexpr int M = WARP_ROWS / LANES_OF_ROWS, N = COLUMNS / LANES_OF_COLUMNS,
              OF_RESULT = WIDTH / LANES_OF_COLUMNS / 2;

// combine values of the lanes that share a row
template<class F> inline float of_row(float x, F combine) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2)
    if (mask != 2 && (LANES_OF_ROWS == 2 || mask != 8)) x = combine(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_forward_f32(const float *q, const float *k, const float *v, float *out, float *lse,
                          EXTRAS const Problem p) {
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.queries + ROWS - 1) / ROWS, CAUSAL);
  const int batch = place.plane / p.heads, head = place.plane % p.heads, first = place.tile * ROWS;
  const int warp_row = threadIdx.x / 32 * WARP_ROWS, row = warp_row + lane_row(), column = lane_column();
  float *queries = (float *)shared_memory, *keys = queries + ROWS * PITCH,
        *values = keys + WIDTH * WEIGHTS_PITCH;
  float *weights = values + COLUMNS * PITCH;  // rows of a warp are its own; keys are columns
  k = rows_at(k, p.k, batch, head / p.group, 0);
  v = rows_at(v, p.v, batch, head / p.group, 0);
  int tiles = (p.keys + COLUMNS - 1) / COLUMNS;
  if (CAUSAL) tiles = min(tiles, (first + ROWS + COLUMNS - 1) / COLUMNS);
  const Visits list = visits(LISTS, p, batch, head, place.tile, tiles);
  const Pairs pairs = PAIRS_OF(batch, head);
  auto load_keys = [&](int n) {
    const int start = list.tile(n) * COLUMNS;
    load_columns(keys, k + start * p.k.token, p.k.token, p.keys - start);
    end_of_copies();
  };
  auto load_values = [&](int n) {
    const int start = list.tile(n) * COLUMNS;
    load_rows<COLUMNS>(values, v + start * p.v.token, p.v.token, p.keys - start);
    end_of_copies();
  };

  load_rows<ROWS>(queries, rows_at(q, p.q, batch, head, first), p.q.token, p.queries - first);
  end_of_copies();
  if (list.count) {
    load_keys(0);
    wait_for_copies<0>();
    __syncthreads();
    load_values(0);
  }

  const float unit = SCORED ? 1 : p.scale, scale = unit * LOG2_E;
  float top[M], total[M] = {};
  Pair sums[M][OF_RESULT] = {};
#pragma unroll
  for (int i = 0; i < M; ++i) top[i] = negative_infinity();

  for (int n = 0; n < list.count; ++n) {
    const int start = list.tile(n) * COLUMNS;
    const bool sees = !CAUSAL || start < first + warp_row + WARP_ROWS;  // some of these rows see the keys
    if (sees) {
      Pair products[M][N / 2] = {};
      add_rows<WIDTH, PITCH, WEIGHTS_PITCH>(products, queries + row * PITCH, keys + column * 4);
      float scores[M][N];
#pragma unroll
      for (int i = 0; i < M * N; ++i) scores[i / N][i % N] = sum_at(products[i / N], i % N);
      const int query = first + row, key = start + column * 4;
      auto key_of = [&](int j) { return key + j / 4 * 4 * LANES_OF_COLUMNS + j % 4; };
      if constexpr (SCORED) {
#pragma unroll
        for (int i = 0; i < M * N; ++i) {
          float &score = scores[i / N][i % N];
          score = pairs.score(score * p.scale, query + i / N * LANES_OF_ROWS, key_of(i % N));
        }
      }
      if (start + COLUMNS > p.keys || (CAUSAL && start + COLUMNS > first + warp_row + 1) || list.partial(n)) {
#pragma unroll
        for (int i = 0; i < M * N; ++i) {
          const int y = query + i / N * LANES_OF_ROWS, x = key_of(i % N);
          if (x >= p.keys || (CAUSAL && x > y) || !pairs.seen(y, x))
            scores[i / N][i % N] = negative_infinity();
        }
      }
      float kept[M];
      bool rescaled = false;
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const float before = top[i];
        float most = before;
#pragma unroll
        for (int j = 0; j < N; ++j) most = fmaxf(most, scores[i][j]);
        const float now = top[i] = of_row(most, [](float x, float y) { return fmaxf(x, y); });
        const float shift = now == negative_infinity() ? 0 : now * scale;  // of a row that sees nothing yet
        kept[i] = exp2_fast(before * scale - shift);
        rescaled = rescaled || now != before;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          scores[i][j] = exp2_fast(scores[i][j] * scale - shift);
          sum += scores[i][j];
        }
        float *to = weights + (row + i * LANES_OF_ROWS) * WEIGHTS_PITCH + column * 4;
#pragma unroll
        for (int j = 0; j < N; j += 4)
          store_vector(to + j * LANES_OF_COLUMNS,
                       {scores[i][j], scores[i][j + 1], scores[i][j + 2], scores[i][j + 3]});
        total[i] = total[i] * kept[i] + sum;
      }
      if (__any_sync(0xffffffffu, rescaled)) {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
          for (int j = 0; j < OF_RESULT; ++j) multiply(sums[i][j], kept[i]);
      }
    }
    wait_for_copies<0>();
    __syncthreads();  // the values are there, and no thread reads the keys any more
    if (n + 1 < list.count) load_keys(n + 1);
    if (sees)
      add_rows<COLUMNS, WEIGHTS_PITCH, PITCH>(sums, weights + row * WEIGHTS_PITCH, values + column * 4);
    wait_for_copies<0>();
    __syncthreads();  // the next keys are there, and no thread reads the values any more
    if (n + 1 < list.count) load_values(n + 1);
  }

  wait_for_copies<0>();
  lse += (long long)place.plane * p.queries;
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const int query = first + row + i * LANES_OF_ROWS;
    const float sum = of_row(total[i], [](float x, float y) { return x + y; }),
                factor = sum > 0 ? 1 / sum : 0;
    if (query < p.queries) {
      float *to = rows_at(out, p.out, batch, head, query);
#pragma unroll
      for (int j = 0; j < OF_RESULT; ++j) multiply(sums[i][j], factor);
#pragma unroll
      for (int j = 0; j < OF_RESULT; j += 2) {
        const int at = (column + j / 2 * LANES_OF_COLUMNS) * 4;
        if (at < FEATURES) store_vector(to + at, vector_of(&sums[i][j]));
      }
      if (column == 0) lse[query] = sum > 0 ? top[i] * unit + logf(sum) : negative_infinity();
    }
  }
}

//# delta
// For each query, the shift of its exponents, of base 2, and delta, the sum over features of dout * out. A row that
// sees nothing, or beyond the last, has an infinite shift: its weights are zero. Turns begin at 0. With a mask, gradients
// of queries do, too: no block may visit them.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_delta_f32(const float *out, const float *dout, const float *lse, float2 *numbers, int *turns,
                        float *dq, const Problem p) {
  constexpr int LANES = WIDTH / 4;
  const long long all = (long long)(p.planes / (p.heads / p.group)) * p.padded * p.heads;
  const long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) / LANES;
  if (i - i % (32 / LANES) >= all) return;  // no row of this warp
  const int head = i % p.heads, query = i / p.heads % p.padded, batch = i / p.heads / p.padded;
  const int column = threadIdx.x % LANES * 4;
  const bool inside = i < all && query < p.queries;
  float delta = 0;
  if (inside && column < FEATURES) {
    const float4 x = vector_at(rows_at(out, p.out, batch, head, query) + column);
    const float4 y = vector_at(rows_at(dout, p.dout, batch, head, query) + column);
    delta = x.x * y.x + x.y * y.y + (x.z * y.z + x.w * y.w);
    if (MASKED) *(float4 *)(rows_at(dq, p.dq, batch, head, query) + column) = {0, 0, 0, 0};
  }
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, mask);
  if (i < all && column == 0) {
    const long long plane = (long long)batch * p.heads + head;
    const float of_row = inside ? lse[plane * p.queries + query] : negative_infinity();
    const float shift = of_row == negative_infinity() ? -of_row : of_row * LOG2_E;
    numbers[plane * p.padded + query] = make_float2(shift, delta);
    if (query % COLUMNS == 0) turns[plane * (p.padded / COLUMNS) + query / COLUMNS] = 0;
  }
}

//# backward
// A block has a tile of keys, whose gradients stay in registers, and iterates over the queries: five matmuls. The blocks
// of a head add to the gradient of a tile of queries in the order of their keys, one after the other: `turns` has the
// number of those that did. A block waits only for blocks with smaller indices, which have begun, and usually ended.
constexpr int OF_ROWS = 2 * ROWS / WARPS / LANES_OF_ROWS;  // of scores: two warps share a row
constexpr int ACROSS = WIDTH / 32;                         // warps side by side of a gradient
constexpr int M = ROWS * ACROSS / WARPS / LANES_OF_ROWS;   // of a gradient
static_assert(LANES_OF_ROWS == 4 && ROWS == 64 && COLUMNS == 64,
              "warps have 32 columns of scores and gradients");

inline void wait_for_turn(const int *turn, int of) {
  while (*(const volatile int *)turn != of) {}
  __threadfence();
}
inline void end_turn(int *turn, int of) {
  __threadfence();
  *(volatile int *)turn = of + 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_gradients_f32(const float *q, const float *k, const float *v, const float *dout,
                            const float2 *numbers, int *turns, float *dq, float *dk, float *dv,
                            EXTRAS const Problem p) {
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.keys + ROWS - 1) / ROWS, false);
  const int key_heads = p.heads / p.group, batch = place.plane / key_heads,
            key_head = place.plane % key_heads;
  const int first = place.tile * ROWS, tiles = (p.queries + COLUMNS - 1) / COLUMNS;
  const int warp = threadIdx.x / 32, column = lane_column();
  float *keys = (float *)shared_memory, *queries = keys + ROWS * PITCH, *douts = queries + COLUMNS * PITCH;
  float *weights = douts + COLUMNS * PITCH;  // then the gradients of scores; rows are queries
  float *key_columns = weights + COLUMNS * WEIGHTS_PITCH,
        *value_columns = key_columns + WIDTH * WEIGHTS_PITCH;
  float2 *numbers_here = (float2 *)(value_columns + WIDTH * WEIGHTS_PITCH);
  int *ranks = (int *)(numbers_here + COLUMNS);  // of this block among those that visit a tile, with a mask

  // rows and columns of the scores of a thread, and of its gradients
  const int score_row = warp / 2 * OF_ROWS * LANES_OF_ROWS + lane_row(),
            score_column = warp % 2 * 32 + column * 4;
  const int group_row = warp / ACROSS * M * LANES_OF_ROWS, feature = warp % ACROSS * 32 + column * 4;
  const float scale = (SCORED ? 1 : p.scale) * LOG2_E;

  load_rows<ROWS>(keys, rows_at(k, p.k, batch, key_head, first), p.k.token, p.keys - first);
  load_columns(key_columns, rows_at(k, p.k, batch, key_head, first), p.k.token, p.keys - first);
  load_columns(value_columns, rows_at(v, p.v, batch, key_head, first), p.v.token, p.keys - first);
  end_of_copies();
  Pair dk_sums[M][2] = {}, dv_sums[M][2] = {};
  for (int head = key_head * p.group; head < (key_head + 1) * p.group; ++head) {
    const int begin = CAUSAL && !MASKED ? min(place.tile, tiles) : 0;
    const Visits list = visits(LISTS, p, batch, head, place.tile, tiles - begin);
    const Pairs pairs = PAIRS_OF(batch, head);
    const long long plane = (long long)batch * p.heads + head;
    if constexpr (MASKED) {
      __syncthreads();
      for (int i = threadIdx.x; i < tiles; i += THREADS) ranks[i] = 0;
      __syncthreads();
      for (int tile = warp; tile < place.tile; tile += WARPS) {
        const Visits other = visits(LISTS, p, batch, head, tile, 0);
        for (int n = threadIdx.x % 32; n < other.count; n += 32) atomicAdd(&ranks[other.tile(n)], 1);
      }
      __syncthreads();
    }
    auto load = [&](int tile) {
      const int start = tile * COLUMNS, there_are = p.queries - start;
      load_rows<COLUMNS>(queries, rows_at(q, p.q, batch, head, start), p.q.token, there_are);
      load_rows<COLUMNS>(douts, rows_at(dout, p.dout, batch, head, start), p.dout.token, there_are);
      if (threadIdx.x < COLUMNS / 2)
        copy16(shared_address(numbers_here + 2 * threadIdx.x),
               numbers + plane * p.padded + start + 2 * threadIdx.x, true);
      end_of_copies();
    };
    if (list.count) load(begin + list.tile(0));
    int *turn = nullptr, rank = 0;  // those of the tile before
    for (int n = 0; n < list.count; ++n) {
      const int tile = begin + list.tile(n), start = tile * COLUMNS;
      wait_for_copies<0>();
      __syncthreads();  // the tile is there, and the gradient of the queries before is stored
      if (turn && threadIdx.x == 0) end_turn(turn, rank);
      turn = turns + plane * (p.padded / COLUMNS) + tile, rank = MASKED ? ranks[tile] : place.tile;

      Pair products[OF_ROWS][2] = {};
      add_rows<WIDTH, PITCH, WEIGHTS_PITCH>(products, queries + score_row * PITCH,
                                            key_columns + score_column);
      const bool partial = first + ROWS > p.keys || (CAUSAL && start < first + ROWS - 1) || list.partial(n) ||
                           (SCORED && start + COLUMNS > p.queries);
      float weight[OF_ROWS][4], slope[OF_ROWS][SLOPED ? 4 : 1];
      float *scores_here = weights + score_row * WEIGHTS_PITCH + score_column;
#pragma unroll
      for (int i = 0; i < OF_ROWS; ++i) {
        const int query = start + score_row + i * LANES_OF_ROWS;
        const float shift = numbers_here[score_row + i * LANES_OF_ROWS].x;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = first + score_column + j;
          float score = sum_at(products[i], j);
          if constexpr (SCORED) {
            float own = 1;
            score = pairs.score(score * p.scale, query, key, own);
            if constexpr (SLOPED) slope[i][j] = own;
          }
          if (partial && (key >= p.keys || (CAUSAL && key > query) || !pairs.seen(query, key) ||
                          (SCORED && query >= p.queries)))
            score = negative_infinity();
          weight[i][j] = exp2_fast(score * scale - shift);
        }
        store_vector(scores_here + i * LANES_OF_ROWS * WEIGHTS_PITCH,
                     {weight[i][0], weight[i][1], weight[i][2], weight[i][3]});
      }
      Pair gradient[OF_ROWS][2] = {};
      add_rows<WIDTH, PITCH, WEIGHTS_PITCH>(gradient, douts + score_row * PITCH,
                                            value_columns + score_column);
#pragma unroll
      for (int i = 0; i < OF_ROWS; ++i) {
        const float delta = numbers_here[score_row + i * LANES_OF_ROWS].y;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float &of_pair = weight[i][j];
          const float found = of_pair * (sum_at(gradient[i], j) - delta) * p.scale;
          if constexpr (SLOPED)
            of_pair = of_pair > 0 ? found * slope[i][j] : 0;  // that of others may be anything
          else of_pair = found;
        }
      }
      __syncthreads();  // all weights are there
      add_columns<COLUMNS>(dv_sums, weights + group_row + lane_row() * 4, douts + feature);
      __syncthreads();  // no thread reads them any more
#pragma unroll
      for (int i = 0; i < OF_ROWS; ++i)
        store_vector(scores_here + i * LANES_OF_ROWS * WEIGHTS_PITCH,
                     {weight[i][0], weight[i][1], weight[i][2], weight[i][3]});
      __syncthreads();  // the gradients of scores are there
      add_columns<COLUMNS>(dk_sums, weights + group_row + lane_row() * 4, queries + feature);
      if (rank && threadIdx.x == 0) wait_for_turn(turn, rank);
      __syncthreads();  // no thread reads the queries any more, and the gradient of this tile may be added to
      if (n + 1 < list.count) load(begin + list.tile(n + 1));

      const int row = group_row + lane_row();
      Pair sums[M][2] = {};
      float4 before[M];
      float *to = rows_at(dq, p.dq, batch, head, start + row) + feature;
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const bool inside = rank && start + row + i * LANES_OF_ROWS < p.queries && feature < FEATURES;
        before[i] =
            inside ? __ldcg((const float4 *)(to + i * LANES_OF_ROWS * p.dq.token)) : float4{0, 0, 0, 0};
      }
      add_rows<ROWS, WEIGHTS_PITCH, PITCH>(sums, weights + row * WEIGHTS_PITCH, keys + feature);
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const float4 more = vector_of(sums[i]);
        if (start + row + i * LANES_OF_ROWS < p.queries && feature < FEATURES)
          store_vector(to + i * LANES_OF_ROWS * p.dq.token, {before[i].x + more.x, before[i].y + more.y,
                                                             before[i].z + more.z, before[i].w + more.w});
      }
    }
    __syncthreads();
    if (turn && threadIdx.x == 0) end_turn(turn, rank);
  }

  wait_for_copies<0>();
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const int key = first + group_row + i / 4 * 4 * LANES_OF_ROWS + lane_row() * 4 + i % 4;
    if (key < p.keys && feature < FEATURES) {
      store_vector(rows_at(dk, p.dk, batch, key_head, key) + feature, vector_of(dk_sums[i]));
      store_vector(rows_at(dv, p.dv, batch, key_head, key) + feature, vector_of(dv_sums[i]));
    }
  }
}
