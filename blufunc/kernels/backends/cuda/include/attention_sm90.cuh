// Warp-specialized attention for Hopper: one TMA producer thread, independent consumer warpgroups.
//
// After FlashAttention-3 (Shah et al., arXiv:2407.08608): each warpgroup has 64 rows. What they iterate over
// comes in rings of STAGES tiles that one more thread keeps filled, by tensor maps (tma_pipeline.cuh), so
// that no barrier is of a whole block and no registers hold addresses. While one warpgroup computes weights
// another one multiplies, of the same block or the next. Weights of the forward pass are relative to the
// greatest score of a row in its first tile, until they get too large.
//
// Constants as in attention_fwd.cuh and attention_bwd.cuh, whose functions for scores these kernels call; a
// block has ROWS rows, 64 for each warpgroup, and operands are in one part.

//# pipeline
// All kernels for Hopper begin with this.
static_assert(PARTS == 1 && SLABS == 1 && INNER == COLUMNS, "a group multiplies 64 rows by a tile");
constexpr int GROUPS = THREADS / 128, WARPS = THREADS / 32;
typedef Ring<1, ROWS> Rows;
typedef Ring<STAGES, COLUMNS> Tiles;

// Of the registers, SHARE for each thread, four warps of which one thread copies leave most to the others.
constexpr int SHARE = 65536 / BLOCKS / (THREADS + 128) / 8 * 8, FEW = 24;
constexpr int REST = (SHARE * (GROUPS + 1) - FEW) / GROUPS / 8 * 8, MANY = REST < 240 ? REST : 240;

#define COPIED(name) const __grid_constant__ TensorMap name##_map
#define COPIES() (threadIdx.x >= THREADS)
// the same in all lanes, which the compiler does not know
inline int group_of_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
// until all matmuls of a warpgroup are done, so that its rows in shared memory are free
inline void meet_group(int group) { meet(1 + group, 128); }

// The query rows of a block, and the tiles of keys that it goes through.
struct Work {
  int plane, batch, head, first;
  Visits list;
  inline Work(const Problem &p, const int *lists) {
    const Place place = place_of(blockIdx.x, p.planes, p.section, (p.queries + ROWS - 1) / ROWS, CAUSAL);
    plane = place.plane, batch = plane / p.heads, head = plane % p.heads, first = place.tile * ROWS;
    int tiles = (p.keys + COLUMNS - 1) / COLUMNS;
    if (CAUSAL) tiles = min(tiles, (first + ROWS + COLUMNS - 1) / COLUMNS);
    list = visits(lists, p, batch, head, place.tile, tiles);
  }
  // number of tiles visible to a warpgroup whose rows begin at `row`: they precede the others
  inline int seen_by(int row, const Problem &p) const {
    int count = row < p.queries ? list.count : 0;
    if (CAUSAL)
      while (count && list.tile(count - 1) * COLUMNS >= row + 64) --count;
    return count;
  }
};

//# forward
// Weights of float16 elements that are raised have no room to grow: of those the greatest score is always looked for.
constexpr bool AS_BEFORE = !WIDE;
// After a weight overflows, this many tiles, its own included, are searched for the greatest score: recomputing
// the scores costs more than the search, and scores that grow may go on.
constexpr int LOOKED_AT = 4;

// As times_rows, of a warp without the other ones of its group: its rows, from `row` on, times those of a tile of keys,
// by instructions of a warp, which read shared memory.
inline void times_rows_alone(float (&sums)[1][COLUMNS / 8][4], unsigned rows, int row, unsigned tile) {
  const int lane = threadIdx.x % 32, mine = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) sums[0][i / 4][i % 4] = 0;
#pragma unroll
  for (int k = 0; k < FEATURES / 16; ++k) {
    unsigned a[4];
    load_matrices(a, rows + tile_at<ROWS>(row + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
      unsigned b[4];
      load_matrices(b, tile + tile_at<COLUMNS>(mine, 2 * k + lane / 8 % 2) + row_bytes(16 * n));
      multiply_add(sums[0][2 * n], a, b[0], b[1]);
      multiply_add(sums[0][2 * n + 1], a, b[2], b[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, BLOCKS)
    attention_forward(const element *, const element *, const element *, result *out, float *lse,
                      IN_PARTS EXTRAS const Problem p, COPIED(q), COPIED(k), COPIED(v)) {
  constexpr unsigned KEYS = Rows::BYTES, VALUES = KEYS + STAGES * Tiles::BYTES;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + VALUES + STAGES * Tiles::BYTES);
  const Rows queries{memory, barriers};
  const Tiles keys{memory + KEYS, barriers += Rows::BARRIERS},
      values{memory + VALUES, barriers += Tiles::BARRIERS};
  if (threadIdx.x == 0) {
    queries.make(WARPS), keys.make(WARPS), values.make(WARPS);
    barriers_made();
  }
  __syncthreads();
  const Work work(p, LISTS);
  const int count = work.list.count;

  if (COPIES()) {
    leave_registers<FEW>();
    if (threadIdx.x > THREADS) return;
    const int key_head = work.head / p.group;
    queries.fill(0, q_map, work.batch, work.head, work.first);
    for (int i = 0; i < count; ++i) {
      keys.fill(i, k_map, work.batch, key_head, work.list.tile(i) * COLUMNS);
      values.fill(i, v_map, work.batch, key_head, work.list.tile(i) * COLUMNS);
    }
    return;
  }

  take_registers<MANY>();
  const int group = group_of_warp(), warp_row = threadIdx.x / 32 * 16, row = work.first + warp_row;
  const Pairs pairs = PAIRS_OF(work.batch, work.head);
  const Units units = UNITS_OF(work.batch, work.head / p.group);
  const int mine = work.seen_by(work.first + group * 64, p);
  Softmax softmax(p, units);
  float sums[1][FEATURES / 8][4] = {};
  queries.wait_until_full(0);
  const Left<ROWS> left(queries.at(0), group * 64);
  int look_until = 1;  // in tiles before this one the greatest scores are looked for
  for (int i = 0; i < mine; ++i) {
    float scores[1][COLUMNS / 8][4], kept[1][2];
    keys.wait_until_full(i);
    begin_products();
    times_rows<COLUMNS>(scores, left, keys.at(i), 0);
    end_of_products();
    wait_for_products<0>(scores);
    if (!AS_BEFORE) keys.release(i);
    softmax.score(scores, pairs, p, row, work.list.tile(i) * COLUMNS, work.list.partial(i));
    if (AS_BEFORE && i >= look_until && !softmax.weigh_as_before(scores)) {
      // the scores are lost: registers cannot hold both them and their weights
      times_rows_alone(scores, queries.at(0), warp_row, keys.at(i));
      softmax.score(scores, pairs, p, row, work.list.tile(i) * COLUMNS, work.list.partial(i));
      look_until = i + LOOKED_AT;
    }
    if (!AS_BEFORE || i < look_until) {
      softmax.weigh(scores, kept);
      rescale(sums, kept);
      // a row without a score would have the next tile multiplied once more
      if (AS_BEFORE && MASKED && softmax.some_saw_nothing()) look_until = max(look_until, i + 2);
    }
    if (AS_BEFORE) keys.release(i);
    unsigned weights[PARTS][1][COLUMNS / 16][4];
    as_left(weights, scores);
    values.wait_until_full(i);
    add_columns<COLUMNS>(sums, weights, values.at(i), 0);
    wait_for_products<0>(sums);
    values.release(i);
  }
  for (int i = mine; i < count; ++i) keys.pass_on(i), values.pass_on(i);

  float factor[1][2];
  softmax.end(sums, factor, units, lse + (long long)work.plane * p.queries, row, p.queries);
  meet_group(group);
  store_rows<ROWS>(rows_at(out, p.out, work.batch, work.head, work.first), p.out.token,
                   p.queries - work.first, shared_memory, warp_row, sums, factor);
}

//# query_gradient
// Results of a warp's rows from `first` on, to be multiplied by their gradients. They are read in place: two-byte
// elements are loaded at once, overlapped with the loads of the gradients.
template<class T> struct Results {
  T *from;
  long long stride;
  int there_are, first;
  inline Results(T *from, long long stride, int there_are, int first)
      : from(from), stride(stride), there_are(there_are), first(first) {}
  inline void times(float (&delta)[1][2], unsigned gradients_tile, float scale) const {
    times_results<ROWS>(delta, gradients_tile, 0, from, stride, there_are, first, scale);
  }
};
template<> struct Results<const element> {
  int first;
  unsigned outs[FEATURES / 4];
  inline Results(const element *from, long long stride, int there_are, int first) : first(first) {
#pragma unroll
    for (int i = 0; i < FEATURES / 4; ++i) {
      const int row = first + i % 2 * 8 + threadIdx.x % 32 / 4;
      const element *of_row = from + row * stride + threadIdx.x % 4 * 2;
      outs[i] = row < there_are ? *(const unsigned *)(of_row + i / 2 * 8) : 0;
    }
  }
  inline void times(float (&delta)[1][2], unsigned gradients_tile, float) const {
    unsigned gradients[1][FEATURES / 16][4];
    load_left<ROWS>(gradients, gradients_tile, first);
#pragma unroll
    for (int i = 0; i < FEATURES / 4; ++i) {
      const unsigned y = gradients[0][i / 4][i % 4];
      delta[0][i % 2] += low_half(outs[i]) * low_half(y) + high_half(outs[i]) * high_half(y);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 128, BLOCKS)
    attention_query_gradient(const element *, const element *, const element *, const result *out,
                             const float *lse, const element *, result *dq, float2 *numbers,
                             IN_PARTS SUMS(dq_sums) EXTRAS const Problem p, COPIED(q), COPIED(k), COPIED(v),
                             COPIED(dout)) {
  constexpr unsigned KEYS = 2 * Rows::BYTES, VALUES = KEYS + STAGES * Tiles::BYTES;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + VALUES + STAGES * Tiles::BYTES);
  const Rows queries{memory, barriers}, douts{memory + Rows::BYTES, barriers += Rows::BARRIERS};
  const Tiles keys{memory + KEYS, barriers += Rows::BARRIERS},
      values{memory + VALUES, barriers += Tiles::BARRIERS};
  if (threadIdx.x == 0) {
    queries.make(WARPS), douts.make(WARPS), keys.make(WARPS), values.make(WARPS);
    barriers_made();
  }
  __syncthreads();
  const Work work(p, LISTS);
  const int count = work.list.count;

  if (COPIES()) {
    leave_registers<FEW>();
    if (threadIdx.x > THREADS) return;
    const int key_head = work.head / p.group;
    queries.fill(0, q_map, work.batch, work.head, work.first);
    douts.fill(0, dout_map, work.batch, work.head, work.first);
    for (int i = 0; i < count; ++i) {
      keys.fill(i, k_map, work.batch, key_head, work.list.tile(i) * COLUMNS);
      values.fill(i, v_map, work.batch, key_head, work.list.tile(i) * COLUMNS);
    }
    return;
  }

  take_registers<MANY>();
  const int group = group_of_warp(), warp_row = threadIdx.x / 32 * 16;
  const int row = work.first + warp_row, there_are = p.queries - work.first;
  const Pairs pairs = PAIRS_OF(work.batch, work.head);
  const Units units = UNITS_OF(work.batch, work.head / p.group);
  const int mine = work.seen_by(work.first + group * 64, p);

  float shift[1][2], delta[1][2] = {}, powers[1][2];
  load_shifts(shift, lse + (long long)work.plane * p.queries, p, row);
  const Results<const result> results(rows_at(out, p.out, work.batch, work.head, work.first), p.out.token,
                                      there_are, warp_row);
  queries.wait_until_full(0);
  douts.wait_until_full(0);
  results.times(delta, douts.at(0), 1 / units.v);
  make_numbers(shift, delta, numbers + (long long)work.plane * p.padded, p, row);
  if (BY_ROWS) {
    find_powers<ROWS>(powers, douts.at(0), warp_row);
    delta[0][0] *= powers[0][0], delta[0][1] *= powers[0][1];
  }

  const Left<ROWS> left_queries(queries.at(0), group * 64), left_douts(douts.at(0), group * 64);
  const float of_products = scale_of_products(p.scale, units);
  float sums[1][FEATURES / 8][4] = {};
  for (int i = 0; i < mine; ++i) {
    float weights[1][COLUMNS / 8][4], gradients[1][COLUMNS / 8][4];
    keys.wait_until_full(i);
    values.wait_until_full(i);
    begin_products();
    times_rows<COLUMNS>(weights, left_queries, keys.at(i), 0);
    end_of_products();
    times_rows<COLUMNS>(gradients, left_douts, values.at(i), 0);
    end_of_products();
    wait_for_products<1>(weights);
    weigh_keys(weights, shift, pairs, p, of_products, row, work.list.tile(i) * COLUMNS, work.list.partial(i));
    wait_for_products<0>(gradients);
    values.release(i);
    times_keys(gradients, weights, delta, powers);
    unsigned left[PARTS][1][COLUMNS / 16][4];
    as_left(left, gradients);
    add_columns<COLUMNS>(sums, left, keys.at(i), 0);
    wait_for_products<0>(sums);
    keys.release(i);
  }
  for (int i = mine; i < count; ++i) keys.pass_on(i), values.pass_on(i);

  float factor[1][2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    factor[0][i] = unit_of_scores(p.scale, units) * units.k / (BY_ROWS ? powers[0][i] : 1);
  STORE_SUMS(sums_at(dq_sums, p.dq, p.queries, work.batch, work.head, work.first), p.dq.token, there_are,
             warp_row, sums, factor);
  meet_group(group);
  store_rows<ROWS>(rows_at(dq, p.dq, work.batch, work.head, work.first), p.dq.token, there_are, shared_memory,
                   warp_row, sums, factor);
}

//# key_gradient
constexpr unsigned PAIRS = COLUMNS * sizeof(float2);
typedef Ring<STAGES, COLUMNS, PAIRS> Queries;

// The tiles of queries of one head that see a block's keys.
struct Seen {
  Visits list;
  int from;
  inline Seen(const Problem &p, const int *lists, int batch, int head, int tile) {
    from = CAUSAL && !MASKED ? tile * ROWS / COLUMNS : 0;
    list = visits(lists, p, batch, head, tile, max((p.queries + COLUMNS - 1) / COLUMNS - from, 0));
  }
  inline int start(int i) const { return (from + list.tile(i)) * COLUMNS; }
};

extern "C" __global__ void __launch_bounds__(THREADS + 128, BLOCKS)
    attention_key_gradient(const element *, const element *, const element *, const element *, result *dk,
                           result *dv, const float2 *numbers,
                           IN_PARTS SUMS(dk_sums) SUMS(dv_sums) EXTRAS const Problem p, COPIED(q), COPIED(k),
                           COPIED(v), COPIED(dout)) {
  constexpr unsigned QUERIES = 2 * Rows::BYTES, DOUTS = QUERIES + STAGES * Queries::BYTES;
  constexpr unsigned NUMBERS = DOUTS + STAGES * Tiles::BYTES;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + NUMBERS + STAGES * PAIRS);
  const Rows keys{memory, barriers}, values{memory + Rows::BYTES, barriers += Rows::BARRIERS};
  const Queries queries{memory + QUERIES, barriers += Rows::BARRIERS};
  const Tiles douts{memory + DOUTS, barriers += Queries::BARRIERS};
  if (threadIdx.x == 0) {
    keys.make(WARPS), values.make(WARPS), queries.make(WARPS), douts.make(WARPS);
    barriers_made();
  }
  __syncthreads();
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.keys + ROWS - 1) / ROWS, false);
  const int key_heads = p.heads / p.group, batch = place.plane / key_heads,
            key_head = place.plane % key_heads;
  const int first = place.tile * ROWS, first_head = key_head * p.group;

  if (COPIES()) {
    leave_registers<FEW>();
    if (threadIdx.x > THREADS) return;
    keys.fill(0, k_map, batch, key_head, first);
    values.fill(0, v_map, batch, key_head, first);
    unsigned n = 0;
    for (int head = first_head; head < first_head + p.group; ++head) {
      const Seen seen(p, LISTS, batch, head, place.tile);
      for (int i = 0; i < seen.list.count; ++i, ++n) {
        const int start = seen.start(i);
        queries.fill(n, q_map, batch, head, start);
        queries.fill_beside(n, memory + NUMBERS + n % STAGES * PAIRS,
                            numbers + (long long)(batch * p.heads + head) * p.padded + start);
        douts.fill(n, dout_map, batch, head, start);
      }
    }
    return;
  }

  take_registers<MANY>();
  const int group = group_of_warp(), warp_row = threadIdx.x / 32 * 16;
  const int there_are = p.keys - first, row = first + warp_row, row_of_group = first + group * 64;
  const Units units = UNITS_OF(batch, key_head);
  const float of_products = scale_of_products(p.scale, units);
  keys.wait_until_full(0);
  values.wait_until_full(0);
  const Left<ROWS> left_keys(keys.at(0), group * 64), left_values(values.at(0), group * 64);
  float key_sums[1][FEATURES / 8][4] = {}, value_sums[1][FEATURES / 8][4] = {};
  unsigned n = 0;  // tiles that went round
  for (int head = first_head; head < first_head + p.group; ++head) {
    const Seen seen(p, LISTS, batch, head, place.tile);
    const Pairs pairs = PAIRS_OF(batch, head);
    const int count = seen.list.count;
    int i = 0;
    for (; i < count && (row_of_group >= p.keys || (CAUSAL && seen.start(i) + COLUMNS <= row_of_group));
         ++i, ++n)
      queries.pass_on(n), douts.pass_on(n);  // only other groups see these
    for (; i < count; ++i, ++n) {
      const int start = seen.start(i);
      float weights[1][COLUMNS / 8][4], gradients[1][COLUMNS / 8][4];  // a row is a key
      float slopes[1][COLUMNS / 8][4];
      queries.wait_until_full(n);
      douts.wait_until_full(n);
      begin_products();
      times_rows<COLUMNS>(weights, left_keys, queries.at(n), 0);
      end_of_products();
      times_rows<COLUMNS>(gradients, left_values, douts.at(n), 0);
      end_of_products();
      wait_for_products<1>(weights);
      const float4 *two_pairs = (const float4 *)(shared_memory + NUMBERS + n % STAGES * PAIRS);
      weigh_queries(weights, slopes, two_pairs, pairs, p, of_products, row, start, seen.list.partial(i));
      unsigned left_weights[PARTS][1][COLUMNS / 16][4], left_gradients[PARTS][1][COLUMNS / 16][4];
      as_left(left_weights, weights);
      add_columns<COLUMNS>(value_sums, left_weights, douts.at(n), 0);
      wait_for_products<1>(gradients);
      times_queries(gradients, weights, slopes, two_pairs);
      as_left(left_gradients, gradients);
      add_columns<COLUMNS>(key_sums, left_gradients, queries.at(n), 0);
      wait_for_products<0>(value_sums, key_sums);
      queries.release(n);
      douts.release(n);
    }
  }

  meet_group(group);
  float factor[1][2];
  factor[0][0] = factor[0][1] = unit_of_scores(p.scale, units) * units.q;
  STORE_SUMS(sums_at(dk_sums, p.dk, p.keys, batch, key_head, first), p.dk.token, there_are, warp_row,
             key_sums, factor);
  store_rows<ROWS>(rows_at(dk, p.dk, batch, key_head, first), p.dk.token, there_are, shared_memory, warp_row,
                   key_sums, factor);
  factor[0][0] = factor[0][1] = WIDE ? units.dout / (1 << 14) : 1;
  STORE_SUMS(sums_at(dv_sums, p.dv, p.keys, batch, key_head, first), p.dv.token, there_are, warp_row,
             value_sums, factor);
  store_rows<ROWS>(rows_at(dv, p.dv, batch, key_head, first), p.dv.token, there_are,
                   shared_memory + Rows::BYTES, warp_row, value_sums, factor);
}
