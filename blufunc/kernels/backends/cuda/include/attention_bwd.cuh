// Attention, backward: two kernels without atomics, whose results are deterministic.
//
// The first has query rows and iterates over the keys, for the gradient of the queries; the second has key
// rows and iterates over the queries, for those of the keys and the values. Each recomputes the weights from
// the scores and the logarithms of their sums, and keeps all its sums in registers: seven matmuls of tiles
// where one kernel would have five, but nothing is added up by many blocks, and neither weights nor their
// gradient pass through memory. The scheme is FlashAttention-2's (Dao, arXiv:2307.08691). On Hopper, where a
// block can have all of a head, attention_bwd_fused_sm90.cuh is that one kernel.
//
// With P the weights, dP = dout v^T and delta = the sum over features of dout * out, dS = P (dP - delta), and
// the gradients are dq = scale dS k, dk = scale dS^T q, dv = P^T dout. The first kernel leaves pairs (lse
// log2(e), delta) in scratch memory for the second; rows that see nothing, and those beyond the last, have an
// infinite lse: weights of 0.
//
// Of a score that is changed (attention_mods.cuh), dS is that times the derivative of the change, its slope.
//
// Of float32, weights are multiplied by 2^14. dS fits into one part of float16 as dP - delta is multiplied by
// 2^-DOWN, so that it is below 2^15, and into two as `raise_rows` brings the largest of each row of a tile to
// there.
//
// Constants as in attention_fwd.cuh; INNER of the COLUMNS of a tile are worked on at a time. Registers do not
// hold the sums for keys and for values of more than 128 features: the second kernel then runs twice, of
// which one MAKES_K and the other MAKES_V, with one matmul more.

//# gradients
// Both kernels begin with this.
// Elements of operands in parts are at most 2^15, and so dP is at most M = 2^(30 + log2(FEATURES)). As delta is the
// mean of dP by P, P (dP - delta) is at most M / 2, which is 2^(DOWN + 1) or less.
constexpr int DOWN = 28 + (FEATURES > 128  ? 8
                           : FEATURES > 64 ? 7
                           : FEATURES > 32 ? 6
                           : FEATURES > 16 ? 5
                                           : 4);
constexpr float LOWERED = WIDE && PARTS == 1 ? 1.0f / (1ll << DOWN) : 1;
// what multiplies a sum over products with dS, but for the unit of the other operand
inline float unit_of_scores(float scale, const Units &units) {
  return (PARTS == 1 ? scale : 1) * (WIDE ? units.dout * (float)(1ll << (DOWN - 14)) * units.v : 1);
}
// Two parts have 22 bits of numbers that are not below 2^-3, and dS is far below its bound where there are many keys,
// or gradients of other tokens are larger. So each row of a tile is multiplied by a power of two of its own; `units`
// are what its products are to be multiplied by, 2^-DOWN and the scale of scores included.
template<int M, int N> inline void raise_rows(float (&x)[M][N][4], float (&units)[M][2], float scale) {
  if constexpr (PARTS == 1) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < N * 2; ++i) most = fmaxf(most, fabsf(x[m][i / 2][half * 2 + i % 2]));
      most = max_of_row(most);
      const int exponent =
          max((int)(__float_as_uint(most) >> 23), 15 + DOWN);  // so that both powers are normal
      const float power = __uint_as_float((14 + 127 + 127 - exponent) << 23);
      units[m][half] = scale * __uint_as_float((exponent - 14 - DOWN) << 23);
#pragma unroll
      for (int i = 0; i < N * 2; ++i) x[m][i / 2][half * 2 + i % 2] *= power;
    }
}

//# no_sums
// In place of `sums` where no sums of gradients over tokens are computed.
#define SUMS(name)
#define STORE_SUMS(...)

//# sums
// Sums over tokens, for the gradient of a bias of queries, keys and values.
#define SUMS(name) float *name,
#define STORE_SUMS(...) store_sums(__VA_ARGS__)
// The sums of each 16 rows of what store_rows stores, as it is stored: those of rows 16 n to 16 n + 15 go to row n.
template<int M>
inline void store_sums(float *to, long long stride, int there_are, int row,
                       const float (&sums)[M][FEATURES / 8][4], const float (&factor)[M][2]) {
  static_assert(!WIDE, "elements have two bytes");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int first = row + m * 16 + lane / 4;
    if (row + m * 16 >= there_are) break;
#pragma unroll
    for (int n = 0; n < FEATURES / 8; ++n) {
      float2 of_columns = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *pair = &sums[m][n][2 * half];
        const unsigned stored = pack(pair[0] * factor[m][half], pair[1] * factor[m][half]);
        if (first + half * 8 < there_are) of_columns.x += low_half(stored), of_columns.y += high_half(stored);
      }
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        of_columns.x += __shfl_xor_sync(0xffffffffu, of_columns.x, apart);
        of_columns.y += __shfl_xor_sync(0xffffffffu, of_columns.y, apart);
      }
      if (lane < 4) *(float2 *)(to + (row / 16 + m) * stride + n * 8 + lane * 2) = of_columns;
    }
  }
}
// where the sums of the rows from `token` on begin: a row of sums has as many numbers as a token's gradients
inline float *sums_at(float *to, const Strides &s, int tokens, int batch, int head, int token) {
  return to + (batch * ((tokens + 15) / 16) + token / 16) * s.token + head * s.head;
}

//# delta
// Kernels for the gradient of the queries begin with this.
// Rows of gradients in one part, all below 2^15, are brought to between 2^14 and there, so that dS of small ones has as
// many bits: by these powers of two, which nothing else needs.
constexpr bool BY_ROWS = WIDE && PARTS == 1;
template<int ROWS> inline void find_powers(float (&powers)[SLABS][2], unsigned tile, int first) {
  unsigned gradients[SLABS][FEATURES / 16][4];
  load_left<ROWS>(gradients, tile, first);
#pragma unroll
  for (int m = 0; m < SLABS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = 0;
#pragma unroll
      for (int i = half; i < FEATURES / 4; i += 2) {
        const unsigned x = gradients[m][i / 4][i % 4];
        most = fmaxf(most, fmaxf(fabsf(low_half(x)), fabsf(high_half(x))));
      }
      const int exponent = min(__float_as_uint(max_of_row(most)) >> 23, 127 + 14);
      powers[m][half] =
          __uint_as_float((127 + 127 + 14 - max(exponent, 127 - 24)) << 23);  // of zeros, any will do
    }
}

// delta: the sums over features of results times gradients. Results of two bytes come through a tile.
template<int ROWS>
inline void load_results(unsigned tile, const element *from, long long stride, int there_are) {
  load_tile<ROWS>(tile, from, stride, there_are);
}
template<int ROWS>
inline void times_results(float (&delta)[SLABS][2], unsigned gradients_tile, unsigned tile, const element *,
                          long long, int, int first, float) {
  unsigned outs[SLABS][FEATURES / 16][4], gradients[SLABS][FEATURES / 16][4];
  load_left<ROWS>(outs, tile, first);
  load_left<ROWS>(gradients, gradients_tile, first);
#pragma unroll
  for (int m = 0; m < SLABS; ++m)
#pragma unroll
    for (int i = 0; i < FEATURES / 4; ++i) {
      const unsigned x = outs[m][i / 4][i % 4], y = gradients[m][i / 4][i % 4];
      delta[m][i % 2] += low_half(x) * low_half(y) + high_half(x) * high_half(y);
    }
}
// float32 results are read in place; `scale` brings them to the range of values in parts, so that no sum
// overflows.
template<int ROWS> inline void load_results(unsigned, const float *, long long, int) {}
template<int ROWS>
inline void times_results(float (&delta)[SLABS][2], unsigned gradients_tile, unsigned, const float *from,
                          long long stride, int there_are, int first, float scale) {
#pragma unroll
  for (int part = PARTS - 1; part >= 0; --part) {
    unsigned gradients[SLABS][FEATURES / 16][4];
    load_left<ROWS>(gradients, gradients_tile + part * tile_bytes(ROWS), first);
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int i = 0; i < FEATURES / 4; ++i) {
        const int row = first + m * 16 + i % 2 * 8 + threadIdx.x % 32 / 4;
        if (row >= there_are) continue;
        const float2 x = *(const float2 *)(from + row * stride + i / 2 * 8 + threadIdx.x % 4 * 2);
        const unsigned y = gradients[m][i / 4][i % 4];
        delta[m][i % 2] += x.x * scale * low_half(y) + x.y * scale * high_half(y);
      }
  }
}

// What scores of rows from `row` on are lowered by: infinity where nothing is seen.
inline void load_shifts(float (&shift)[SLABS][2], const float *lse, const Problem &p, int row) {
#pragma unroll
  for (int i = 0; i < SLABS * 2; ++i) {
    const int query = row + i * 8 + threadIdx.x % 32 / 4;
    const float logarithm = query < p.queries ? lse[query] : negative_infinity();
    shift[i / 2][i % 2] =
        logarithm == negative_infinity() ? -negative_infinity() : logarithm * LOG2_E - RAISED;
  }
}

// Deltas from sums of lanes, and the other kernel's per-query values. The last block also writes those of queries
// past the last tile, which the other kernel may read as part of a tile of its own.
inline void make_numbers(const float (&shift)[SLABS][2], float (&delta)[SLABS][2], float2 *numbers,
                         const Problem &p, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < SLABS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = row + m * 16 + half * 8 + lane / 4;
      delta[m][half] = sum_of_row(delta[m][half] * (WIDE ? LOWERED : 1));
      if (lane % 4 == 0 && query < p.padded) numbers[query] = make_float2(shift[m][half], delta[m][half]);
    }
  const int end = (row / ROWS + 1) * ROWS;  // of the block's rows
  if (end >= p.queries)
    for (int query = end + threadIdx.x; query < p.padded; query += THREADS)
      numbers[query] = make_float2(-negative_infinity(), 0);
}

// Products of rows from `row` on with keys from `start` on become weights, times the slopes of scores that are changed:
// only the product of both is wanted.
template<int N>
__forceinline__ void weigh_keys(float (&weights)[SLABS][N][4], const float (&shift)[SLABS][2],
                                const Pairs &pairs, const Problem &p, float of_products, int row, int start,
                                bool partial) {
  const int lane = threadIdx.x % 32;
  const float scale = (SCORED ? 1 : of_products) * LOG2_E;
  auto key_of = [&](int i) { return start + i / 4 * 8 + lane % 4 * 2 + i % 2; };
  auto query_of = [&](int m, int i) { return row + m * 16 + i % 4 / 2 * 8 + lane / 4; };
  auto outside = [&](int m, int i) {
    const int key = key_of(i), query = query_of(m, i);
    return key >= p.keys || (CAUSAL && key > query) || !pairs.seen(query, key);
  };
  const bool edge = start + 8 * N > p.keys || (CAUSAL && start + 8 * N > row + 1) || partial;
  if (!SCORED && edge) {
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int i = 0; i < N * 4; ++i)
        if (outside(m, i)) weights[m][i / 4][i % 4] = negative_infinity();
  }
#pragma unroll
  for (int m = 0; m < SLABS; ++m)
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
      float &weight = weights[m][i / 4][i % 4], slope = 1;
      if constexpr (SCORED) weight = pairs.score(weight * of_products, query_of(m, i), key_of(i), slope);
      weight = exp2_fast(weight * scale - shift[m][i % 4 / 2]);
      if (SLOPED && weight > 0) weight *= slope;
    }
  if (SCORED && edge) {  // what is not seen has a score all the same
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int i = 0; i < N * 4; ++i)
        if (outside(m, i)) weights[m][i / 4][i % 4] = 0;
  }
}

// dP becomes dS
template<int N>
inline void times_keys(float (&gradients)[SLABS][N][4], const float (&weights)[SLABS][N][4],
                       const float (&delta)[SLABS][2], const float (&powers)[SLABS][2]) {
#pragma unroll
  for (int m = 0; m < SLABS; ++m)
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
      float &gradient = gradients[m][i / 4][i % 4];
      const float lowered = BY_ROWS ? LOWERED * powers[m][i % 4 / 2] : LOWERED;
      gradient = weights[m][i / 4][i % 4] * (gradient * lowered - delta[m][i % 4 / 2]);
    }
}

//# query_gradient
constexpr unsigned STAGE = 2 * operand_bytes(COLUMNS);
static_assert(WIDE || ROWS <= 2 * COLUMNS, "the output's tile is where the second stage will be");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_query_gradient(const element *q, const element *k, const element *v, const result *out,
                             const float *lse, const element *dout, result *dq, float2 *numbers,
                             IN_PARTS SUMS(dq_sums) EXTRAS const Problem p) {
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.queries + ROWS - 1) / ROWS, CAUSAL);
  const int batch = place.plane / p.heads, head = place.plane % p.heads, first = place.tile * ROWS;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * SLABS, there_are = p.queries - first;
  const int unit_end = first + warp_row / UNIT * UNIT + UNIT;
  const unsigned rows = shared_address(shared_memory), stages = rows + 2 * operand_bytes(ROWS);
  const long long q_apart = APART(q), k_apart = APART(k), v_apart = APART(v), dout_apart = APART(dout);
  k = rows_at(k, p.k, batch, head / p.group, 0);
  v = rows_at(v, p.v, batch, head / p.group, 0);
  int tiles = (p.keys + COLUMNS - 1) / COLUMNS;
  if (CAUSAL) tiles = min(tiles, (first + ROWS + COLUMNS - 1) / COLUMNS);
  const Visits list = visits(LISTS, p, batch, head, place.tile, tiles);
  const Pairs pairs = PAIRS_OF(batch, head);
  const Units units = UNITS_OF(batch, head / p.group);
  auto load_keys = [&](int n) {
    const unsigned stage = stages + n % 2 * STAGE;
    const int t = list.tile(n);
    load_operand<COLUMNS>(stage, k + t * COLUMNS * p.k.token, k_apart, p.k.token, p.keys - t * COLUMNS);
    load_operand<COLUMNS>(stage + STAGE / 2, v + t * COLUMNS * p.v.token, v_apart, p.v.token,
                          p.keys - t * COLUMNS);
    end_of_copies();
  };

  load_operand<ROWS>(rows, rows_at(q, p.q, batch, head, first), q_apart, p.q.token, there_are);
  load_operand<ROWS>(rows + operand_bytes(ROWS), rows_at(dout, p.dout, batch, head, first), dout_apart,
                     p.dout.token, there_are);
  load_results<ROWS>(stages + STAGE, rows_at(out, p.out, batch, head, first), p.out.token, there_are);
  end_of_copies();
  if (!MASKED || list.count) load_keys(0);
  else end_of_copies();
  wait_for_copies<1>();
  __syncthreads();
  const Left<ROWS> queries(rows, warp_row), douts(rows + operand_bytes(ROWS), warp_row);

  float shift[SLABS][2], delta[SLABS][2] = {};
  times_results<ROWS>(delta, rows + operand_bytes(ROWS), stages + STAGE,
                      rows_at(out, p.out, batch, head, first), p.out.token, there_are, warp_row, 1 / units.v);
  load_shifts(shift, lse + (long long)place.plane * p.queries, p, first + warp_row);
  make_numbers(shift, delta, numbers + (long long)place.plane * p.padded, p, first + warp_row);
  float powers[SLABS][2];
  if (BY_ROWS) {
    find_powers<ROWS>(powers, rows + operand_bytes(ROWS), warp_row);
#pragma unroll
    for (int i = 0; i < SLABS * 2; ++i) delta[i / 2][i % 2] *= powers[i / 2][i % 2];
  }

  const float of_products = scale_of_products(p.scale, units);
  float sums[SLABS][FEATURES / 8][4] = {};
  for (int n = 0; n < list.count; ++n) {
    wait_for_tile();  // the tile is there, and no thread reads the previous one, or the output's, any more
    if (n + 1 < list.count) load_keys(n + 1);
    const unsigned stage = stages + n % 2 * STAGE;
    const int t = list.tile(n);
#pragma unroll 1
    for (int inner = 0; inner < COLUMNS; inner += INNER) {
      const int start = t * COLUMNS + inner, row = first + warp_row;
      if (CAUSAL && start >= unit_end) break;  // none of these rows sees the keys
      float weights[SLABS][INNER / 8][4], gradients[SLABS][INNER / 8][4];
      begin_products();
      times_rows<COLUMNS>(weights, queries, stage, inner);
      end_of_products();
      times_rows<COLUMNS>(gradients, douts, stage + STAGE / 2, inner);
      end_of_products();
      wait_for_products<1>(weights);
      weigh_keys(weights, shift, pairs, p, of_products, row, start, list.partial(n));
      wait_for_products<0>(gradients);
      times_keys(gradients, weights, delta, powers);
      float raised[SLABS][2];
      raise_rows(gradients, raised, p.scale);
      unsigned left[PARTS][SLABS][INNER / 16][4];
      as_left(left, gradients);
      add_columns<COLUMNS>(sums, left, stage, inner, raised);
      wait_for_products<0>(sums);
    }
  }

  float factor[SLABS][2];
#pragma unroll
  for (int i = 0; i < SLABS * 2; ++i)
    factor[i / 2][i % 2] = unit_of_scores(p.scale, units) * units.k / (BY_ROWS ? powers[i / 2][i % 2] : 1);
  STORE_SUMS(sums_at(dq_sums, p.dq, p.queries, batch, head, first), p.dq.token, there_are, warp_row, sums,
             factor);
  store_rows<ROWS>(rows_at(dq, p.dq, batch, head, first), p.dq.token, there_are, shared_memory, warp_row,
                   sums, factor);
}

//# of_queries
// Kernels for the gradients of keys and values begin with this.
// Products of keys from `row` on with queries from `start` on become weights; `numbers` are shifts and deltas of pairs.
template<int N, int M>
__forceinline__ void weigh_queries(float (&weights)[SLABS][N][4], float (&slopes)[M][N][4],
                                   const float4 *numbers, const Pairs &pairs, const Problem &p,
                                   float of_products, int row, int start, bool partial) {
  const int lane = threadIdx.x % 32;
  const float scale = (SCORED ? 1 : of_products) * LOG2_E;
  auto query_of = [&](int i) { return start + i / 4 * 8 + lane % 4 * 2 + i % 2; };
  auto key_of = [&](int m, int i) { return row + m * 16 + i % 4 / 2 * 8 + lane / 4; };
  if constexpr (SCORED) {
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int i = 0; i < N * 4; ++i) {
        float &weight = weights[m][i / 4][i % 4], slope = 1;
        weight = pairs.score(weight * of_products, query_of(i), key_of(m, i), slope);
        if constexpr (SLOPED) slopes[m][i / 4][i % 4] = slope;
      }
  }
  // queries past the last are zero: their scores may be anything, NaN included
  const bool behind = SCORED && start + 8 * N > p.queries;
  if (behind || (CAUSAL && start < row + 16 * SLABS - 1) || (MASKED && partial)) {
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int i = 0; i < N * 4; ++i) {
        const int query = query_of(i), key = key_of(m, i);
        if ((SCORED && query >= p.queries) || (CAUSAL && key > query) || !pairs.seen(query, key))
          weights[m][i / 4][i % 4] = negative_infinity();
      }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 both = numbers[n * 4 + lane % 4];
#pragma unroll
    for (int i = 0; i < SLABS * 4; ++i) {
      float &weight = weights[i / 4][n][i % 4];
      weight = exp2_fast(weight * scale - (i % 2 ? both.z : both.x));
    }
  }
}

// dP becomes dS
template<int N, int M>
inline void times_queries(float (&gradients)[SLABS][N][4], const float (&weights)[SLABS][N][4],
                          const float (&slopes)[M][N][4], const float4 *numbers) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 both = numbers[n * 4 + threadIdx.x % 4];
#pragma unroll
    for (int i = 0; i < SLABS * 4; ++i) {
      float &gradient = gradients[i / 4][n][i % 4];
      const float weight = weights[i / 4][n][i % 4];
      gradient = weight * (gradient * LOWERED - (i % 2 ? both.w : both.y));
      if constexpr (SLOPED)
        if (weight > 0) gradient *= slopes[i / 4][n][i % 4];
    }
  }
}

//# key_gradient
constexpr unsigned PAIRS = COLUMNS * sizeof(float2);
constexpr unsigned STAGE = 2 * operand_bytes(COLUMNS) + 1024 * ((PAIRS + 1023) / 1024);

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_key_gradient(const element *q, const element *k, const element *v, const element *dout,
                           result *dk, result *dv, const float2 *numbers,
                           IN_PARTS SUMS(dk_sums) SUMS(dv_sums) EXTRAS const Problem p) {
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.keys + ROWS - 1) / ROWS, false);
  const int key_heads = p.heads / p.group, batch = place.plane / key_heads,
            key_head = place.plane % key_heads;
  const int warp_row = threadIdx.x / 32 * 16 * SLABS;
  const int first = place.tile * ROWS, there_are = p.keys - first, row = first + warp_row;
  const int unit_begin = first + warp_row / UNIT * UNIT;
  const unsigned rows = shared_address(shared_memory), stages = rows + 2 * operand_bytes(ROWS);
  const long long q_apart = APART(q), k_apart = APART(k), v_apart = APART(v), dout_apart = APART(dout);
  // the queries that see these keys, for each head of the group one after the other
  const int begin = CAUSAL && !MASKED ? first / COLUMNS * COLUMNS : 0;
  int next_head = key_head * p.group, next = begin, stage = 0, steps = 0, next_visit = 0;
  bool next_partial = false;
  Visits list = {};
  if constexpr (MASKED) {
    for (int i = 0; i < p.group; ++i) steps += visits(LISTS, p, batch, next_head + i, place.tile, 0).count;
    --next_head;
  } else {
    steps = max((p.queries - begin + COLUMNS - 1) / COLUMNS, 0) * p.group;
  }
  auto advance = [&] {
    if constexpr (MASKED) {
      while (next_visit == list.count) {
        list = visits(LISTS, p, batch, ++next_head, place.tile, 0);
        next_visit = 0;
      }
      next = list.tile(next_visit) * COLUMNS;
      next_partial = list.partial(next_visit++);
    } else {
      next += COLUMNS;
      if (next >= p.queries) next = begin, ++next_head;
    }
  };
  if (MASKED && steps) advance();
  auto load_queries = [&] {
    const unsigned to = stages + stage * STAGE;
    load_operand<COLUMNS>(to, rows_at(q, p.q, batch, next_head, next), q_apart, p.q.token, p.queries - next);
    load_operand<COLUMNS>(to + operand_bytes(COLUMNS), rows_at(dout, p.dout, batch, next_head, next),
                          dout_apart, p.dout.token, p.queries - next);
    const float2 *from = numbers + (long long)(batch * p.heads + next_head) * p.padded + next;
    for (int i = threadIdx.x; i < COLUMNS / 2; i += THREADS)
      copy16(to + 2 * operand_bytes(COLUMNS) + i * 16, from + i * 2, true);
    end_of_copies();
  };

  load_operand<ROWS>(rows, rows_at(k, p.k, batch, key_head, first), k_apart, p.k.token, there_are);
  if (MAKES_K)
    load_operand<ROWS>(rows + operand_bytes(ROWS), rows_at(v, p.v, batch, key_head, first), v_apart,
                       p.v.token, there_are);
  end_of_copies();
  if (steps) load_queries();
  else end_of_copies();
  wait_for_copies<1>();
  __syncthreads();
  const Left<ROWS> keys(rows, warp_row), values(rows + operand_bytes(ROWS), warp_row);

  const Units units = UNITS_OF(batch, key_head);
  const float of_products = scale_of_products(p.scale, units);
  float key_sums[SLABS][FEATURES / 8][4] = {}, value_sums[SLABS][FEATURES / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    const int query = next;
    const bool partial = next_partial;
    const Pairs pairs = PAIRS_OF(batch, next_head);
    const unsigned tile = stages + stage * STAGE;
    const float4 *two_pairs = (const float4 *)(shared_memory + (tile - rows) + 2 * operand_bytes(COLUMNS));
    if (!MASKED || step + 1 < steps) advance();
    stage ^= 1;
    wait_for_tile();  // the tile is there, and no thread reads the previous one any more
    if (step + 1 < steps) load_queries();
#pragma unroll 1
    for (int inner = 0; inner < COLUMNS; inner += INNER) {
      const int start = query + inner;
      if (CAUSAL && start + INNER <= unit_begin) continue;  // none of these queries sees the keys
      float weights[SLABS][INNER / 8][4], gradients[SLABS][INNER / 8][4];  // a row is a key
      begin_products();
      times_rows<COLUMNS>(weights, keys, tile, inner);
      end_of_products();
      if (MAKES_K) times_rows<COLUMNS>(gradients, values, tile + operand_bytes(COLUMNS), inner);
      end_of_products();
      wait_for_products<1>(weights);
      float slopes[SLOPED ? SLABS : 1][INNER / 8][4];
      weigh_queries(weights, slopes, two_pairs + inner / 2, pairs, p, of_products, row, start, partial);
      unsigned left_weights[PARTS][SLABS][INNER / 16][4], left_gradients[PARTS][SLABS][INNER / 16][4];
      if (MAKES_V) {
        as_left(left_weights, weights);
        add_columns<COLUMNS>(value_sums, left_weights, tile + operand_bytes(COLUMNS), inner);
      }
      if (!MAKES_K) {
        wait_for_products<0>(value_sums);
        continue;
      }
      wait_for_products<MAKES_V>(gradients);
      times_queries(gradients, weights, slopes, two_pairs + inner / 2);
      float raised[SLABS][2];
      raise_rows(gradients, raised, p.scale);
      as_left(left_gradients, gradients);
      add_columns<COLUMNS>(key_sums, left_gradients, tile, inner, raised);
      wait_for_products<0>(value_sums, key_sums);
    }
  }

  float factor[SLABS][2];
#pragma unroll
  for (int m = 0; m < SLABS; ++m) factor[m][0] = factor[m][1] = unit_of_scores(p.scale, units) * units.q;
  if (MAKES_K) {
    STORE_SUMS(sums_at(dk_sums, p.dk, p.keys, batch, key_head, first), p.dk.token, there_are, warp_row,
               key_sums, factor);
    store_rows<ROWS>(rows_at(dk, p.dk, batch, key_head, first), p.dk.token, there_are, shared_memory,
                     warp_row, key_sums, factor);
  }
#pragma unroll
  for (int m = 0; m < SLABS; ++m) factor[m][0] = factor[m][1] = WIDE ? units.dout / (1 << 14) : 1;
  if (MAKES_V) {
    STORE_SUMS(sums_at(dv_sums, p.dv, p.keys, batch, key_head, first), p.dv.token, there_are, warp_row,
               value_sums, factor);
    store_rows<ROWS>(rows_at(dv, p.dv, batch, key_head, first), p.dv.token, there_are,
                     shared_memory + operand_bytes(ROWS), warp_row, value_sums, factor);
  }
}
