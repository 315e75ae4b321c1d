"""The text of attention's forward kernel for Hopper: warps that copy, and groups of warps that multiply in turns.

Kernels, stage 6, below ``cuda_attention``, beside ``cuda_attention_forward``, whose ``Softmax`` it has. The scheme is
FlashAttention-3 (Shah et al., arXiv:2407.08608). Each group of four warps has 64 query rows. Keys and values come in
rings of STAGES tiles that a further thread fills, so that nobody waits for a whole block. A group begins the
products of the next scores together with those of the weights that it has, and computes the next weights meanwhile;
groups take turns, so that one computes weights while another multiplies.
"""

from __future__ import annotations

PIPELINE = r"""
static_assert(PARTS == 1, "a tile has one part");
constexpr int GROUPS = THREADS / 128;
typedef Ring<STAGES, COLUMNS> Tiles;

// Of the registers, SHARE for each thread, four warps of which one copies leave most to the others.
constexpr int SHARE = 65536 / BLOCKS / (THREADS + 128) / 8 * 8, FEW = 24;
constexpr int REST = (SHARE * (GROUPS + 1) - FEW) / GROUPS / 8 * 8, MANY = REST < 240 ? REST : 240;

// The rows that a block has in a round, and the tiles that it goes through. A grid of half as many blocks as there are
// tiles of rows does two each, which together take as long for all.
struct Work {
  bool there;
  int plane, batch, head, first;
  Visits list;
  inline Work(const Problem &p, const int *lists, int round) {
    const int tiles = (p.queries + ROWS - 1) / ROWS, pairs = (tiles + 1) / 2;
    Place place = place_of(blockIdx.x, p.planes, p.section, PAIRED ? pairs : tiles, true);
    if (PAIRED && round == 0) place.tile = tiles - pairs + place.tile;
    else if (PAIRED) place.tile = pairs - 1 - place.tile;
    there = round == 0 || (PAIRED && round == 1 && place.tile < tiles - pairs);
    plane = place.plane, batch = plane / p.heads, head = plane % p.heads, first = place.tile * ROWS;
    int columns = (p.keys + COLUMNS - 1) / COLUMNS;
    if (CAUSAL) columns = min(columns, (first + ROWS + COLUMNS - 1) / COLUMNS);
    if (there) list = visits(lists, p, batch, head, place.tile, columns);
  }
  // of the tiles, those that a group sees, whose rows begin at `row`; they are before the others
  inline int seen_by(int row, const Problem &p) const {
    int count = row < p.queries ? list.count : 0;
    if (CAUSAL)
      while (count && list.tile(count - 1) * COLUMNS >= row + 64) --count;
    return count;
  }
};

// The turns in which groups multiply, as many for each.
struct Turns {
  int group, count;
  inline Turns(int group, int count) : group(group), count(count) {}
  inline void open() const {
    if (IN_TURNS && group == GROUPS - 1 && count) pass(1, 256);
  }
  inline void begin() const {
    if (IN_TURNS) meet(1 + group, 256);
  }
  inline void end(int i) const {
    if (IN_TURNS && (group < GROUPS - 1 || i < count - 1)) pass(1 + (group + 1) % GROUPS, 256);
  }
  // until all products of a group's four warps are done, so that their rows in shared memory are free
  inline void meet_own() const { meet(1 + GROUPS + group, 128); }
};
"""
"""What all kernels for Hopper begin with."""

PIPELINED_FORWARD = r"""
typedef Ring<QUERY_BUFFERS, ROWS> Queries;

extern "C" __global__ void __launch_bounds__(THREADS + 128, BLOCKS)
attention_forward(const element *, const element *, const element *, result *out, float *lse, IN_PARTS
                  EXTRAS const Problem p, const __grid_constant__ TensorMap q_map,
                  const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  constexpr unsigned KEYS = QUERY_BUFFERS * Queries::BYTES, VALUES = KEYS + STAGES * Tiles::BYTES;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + VALUES + STAGES * Tiles::BYTES);
  const Queries queries{memory, barriers};
  const Tiles keys{memory + KEYS, barriers + Queries::BARRIERS};
  const Tiles values{memory + VALUES, barriers + Queries::BARRIERS + Tiles::BARRIERS};
  if (threadIdx.x == 0) {
    queries.make(THREADS / 32), keys.make(THREADS / 32), values.make(THREADS / 32);
    barriers_made();
  }
  __syncthreads();

  unsigned n = 0;  // tiles that went round in the rounds before
  if (threadIdx.x >= THREADS) {
    leave_registers<FEW>();
    for (int round = 0; threadIdx.x == THREADS; ++round) {
      const Work work(p, LISTS, round);
      if (!work.there) break;
      const int key_head = work.head / p.group;
      queries.fill(round, q_map, work.batch, work.head, work.first);
      for (int i = 0; i <= work.list.count; ++i) {
        if (i < work.list.count) keys.fill(n + i, k_map, work.batch, key_head, work.list.tile(i) * COLUMNS);
        if (i > 0) values.fill(n + i - 1, v_map, work.batch, key_head, work.list.tile(i - 1) * COLUMNS);
      }
      n += work.list.count;
    }
    return;
  }

  take_registers<MANY>();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp_row = threadIdx.x / 32 * 16;
  for (int round = 0;; ++round) {
    const Work work(p, LISTS, round);
    if (!work.there) break;
    const int count = work.list.count, first = work.first + group * 64, row = work.first + warp_row;
    const Pairs pairs = PAIRS_OF(work.batch, work.head);
    const Units units = UNITS_OF(work.batch, work.head / p.group);
    const int mine = work.seen_by(first, p);
    const Turns turns(group, count);
    turns.open();

    Softmax softmax(p, units);
    float sums[1][FEATURES / 8][4] = {}, scores[1][COLUMNS / 8][4], kept[1][2];
    unsigned weights[PARTS][1][COLUMNS / 16][4];
    queries.wait_until_full(round);
    const Left<ROWS> left(queries.at(round), group * 64);
    auto begin_scores = [&](int i) {
      begin_products();
      times_rows<COLUMNS>(scores, left, keys.at(n + i), 0);
      end_of_products();
    };
    auto weigh = [&](int i) {
      softmax.score(scores, pairs, p, row, work.list.tile(i) * COLUMNS, work.list.partial(i));
      softmax.weigh(scores, kept);
    };
    if constexpr (AHEAD) {
      if (mine) {
        keys.wait_until_full(n);
        turns.begin();
        begin_scores(0);
        turns.end(0);
        wait_for_products<0>(scores);
        keys.release(n);
        weigh(0);
        as_left(weights, scores);
      }
      for (int i = 1; i < mine; ++i) {
        keys.wait_until_full(n + i);
        values.wait_until_full(n + i - 1);
        turns.begin();
        begin_scores(i);
        add_columns<COLUMNS>(sums, weights, values.at(n + i - 1), 0);
        turns.end(i);
        wait_for_products<1>(scores);
        keys.release(n + i);
        weigh(i);
        wait_for_products<0>(sums, scores);  // weights are read until then, so that none are made before
        values.release(n + i - 1);
        rescale(sums, kept);
        as_left(weights, scores);
      }
      if (mine) {
        values.wait_until_full(n + mine - 1);
        add_columns<COLUMNS>(sums, weights, values.at(n + mine - 1), 0);
        wait_for_products<0>(sums);
        values.release(n + mine - 1);
      }
    } else {
      for (int i = 0; i < mine; ++i) {
        keys.wait_until_full(n + i);
        turns.begin();
        begin_scores(i);
        turns.end(i);
        wait_for_products<0>(scores);
        keys.release(n + i);
        weigh(i);
        rescale(sums, kept);
        as_left(weights, scores);
        values.wait_until_full(n + i);
        add_columns<COLUMNS>(sums, weights, values.at(n + i), 0);
        wait_for_products<0>(sums);
        values.release(n + i);
      }
    }
    for (int i = mine; i < count; ++i) {  // what only other groups see goes round here, too
      turns.begin(), turns.end(i);
      keys.wait_until_full(n + i), keys.release(n + i);
      values.wait_until_full(n + i), values.release(n + i);
    }
    n += count;

    float factor[1][2];
    softmax.end(sums, factor, units, lse + (long long)work.plane * p.queries, row, p.queries);
    turns.meet_own();
    unsigned char *tile = shared_memory + (queries.at(round) - memory);
    store_rows<ROWS>(rows_at(out, p.out, work.batch, work.head, work.first), p.out.token, p.queries - work.first, tile,
                     warp_row, sums, factor);
    fence_for_products();  // what follows are copies
    queries.release(round);
  }
}
"""

PIPELINED_QUERY_GRADIENT = r"""
typedef Ring<1, ROWS> Rows;

// delta of results that are read where they lie
template<int ROWS, class T>
inline void times_results_there(float (&delta)[1][2], unsigned gradients_tile, const T *from, long long stride,
                                int there_are, int first, float scale) {
  if constexpr (WIDE) {
    times_results<ROWS>(delta, gradients_tile, 0, from, stride, there_are, first, scale);
  } else {
    unsigned gradients[1][FEATURES / 16][4];
    load_left<ROWS>(gradients, gradients_tile, first);
#pragma unroll
    for (int i = 0; i < FEATURES / 4; ++i) {
      const int row = first + i % 2 * 8 + threadIdx.x % 32 / 4;
      if (row >= there_are) continue;
      const unsigned x = *(const unsigned *)(from + row * stride + i / 2 * 8 + threadIdx.x % 4 * 2);
      const unsigned y = gradients[0][i / 4][i % 4];
      delta[0][i % 2] += low_half(x) * low_half(y) + high_half(x) * high_half(y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, BLOCKS)
attention_query_gradient(const element *, const element *, const element *, const result *out, const float *lse,
                         const element *, result *dq, float2 *numbers, IN_PARTS SUMS(dq_sums) EXTRAS
                         const Problem p, const __grid_constant__ TensorMap q_map,
                         const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                         const __grid_constant__ TensorMap dout_map) {
  constexpr unsigned KEYS = 2 * Rows::BYTES, VALUES = KEYS + STAGES * Tiles::BYTES;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + VALUES + STAGES * Tiles::BYTES);
  const Rows queries{memory, barriers}, douts{memory + Rows::BYTES, barriers + Rows::BARRIERS};
  const Tiles keys{memory + KEYS, barriers + 2 * Rows::BARRIERS};
  const Tiles values{memory + VALUES, barriers + 2 * Rows::BARRIERS + Tiles::BARRIERS};
  if (threadIdx.x == 0) {
    queries.make(THREADS / 32), douts.make(THREADS / 32), keys.make(THREADS / 32), values.make(THREADS / 32);
    barriers_made();
  }
  __syncthreads();
  const Work work(p, LISTS, 0);
  const int count = work.list.count;

  if (threadIdx.x >= THREADS) {
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
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp_row = threadIdx.x / 32 * 16;
  const int lane = threadIdx.x % 32, there_are = p.queries - work.first;
  const int first = work.first + group * 64, row = work.first + warp_row;
  const Turns turns(group, count);
  const Pairs pairs = PAIRS_OF(work.batch, work.head);
  const Units units = UNITS_OF(work.batch, work.head / p.group);
  const int mine = work.seen_by(first, p);

  queries.wait_until_full(0);
  douts.wait_until_full(0);
  float shift[1][2], delta[1][2] = {}, powers[1][2];
  times_results_there<ROWS>(delta, douts.at(0), rows_at(out, p.out, work.batch, work.head, work.first), p.out.token,
                            there_are, warp_row, 1 / units.v);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = row + half * 8 + lane / 4;
    const float logarithm = query < p.queries ? lse[(long long)work.plane * p.queries + query] : negative_infinity();
    delta[0][half] = sum_of_row(delta[0][half]) * (WIDE ? LOWERED : 1);
    shift[0][half] = logarithm == negative_infinity() ? -negative_infinity() : logarithm * LOG2_E - RAISED;
    if (lane % 4 == 0 && query < p.padded)
      numbers[(long long)work.plane * p.padded + query] = make_float2(shift[0][half], delta[0][half]);
  }
  if (there_are <= ROWS) {  // those behind the last tile, which the other kernel may read as part of one of its own
    for (int query = work.first + ROWS + threadIdx.x; query < p.padded; query += THREADS)
      numbers[(long long)work.plane * p.padded + query] = make_float2(-negative_infinity(), 0);
  }
  if (BY_ROWS) {
    find_powers<ROWS>(powers, douts.at(0), warp_row);
    delta[0][0] *= powers[0][0], delta[0][1] *= powers[0][1];
  }

  const Left<ROWS> left_queries(queries.at(0), group * 64), left_douts(douts.at(0), group * 64);
  const float of_products = scale_of_products(p.scale, units), scale = (SCORED ? 1 : of_products) * LOG2_E;
  float sums[1][FEATURES / 8][4] = {}, weights[1][COLUMNS / 8][4], gradients[1][COLUMNS / 8][4];
  unsigned left[PARTS][1][COLUMNS / 16][4];
  auto begin = [&](int i) {
    begin_products();
    times_rows<COLUMNS>(weights, left_queries, keys.at(i), 0);
    end_of_products();
    times_rows<COLUMNS>(gradients, left_douts, values.at(i), 0);
    end_of_products();
  };
  auto weigh = [&](int i) {
    const int start = work.list.tile(i) * COLUMNS;
    const bool edge = start + COLUMNS > p.keys || (CAUSAL && start + COLUMNS > row + 1) || work.list.partial(i);
    auto outside = [&](int i) {
      int key = start + i / 4 * 8 + lane % 4 * 2 + i % 2, query = row + i % 4 / 2 * 8 + lane / 4;
      return key >= p.keys || (CAUSAL && key > query) || !pairs.seen(query, key);
    };
    if (!SCORED && edge) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i)
        if (outside(i)) weights[0][i / 4][i % 4] = negative_infinity();
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      float &weight = weights[0][i / 4][i % 4], slope = 1;
      if constexpr (SCORED) {
        int key = start + i / 4 * 8 + lane % 4 * 2 + i % 2, query = row + i % 4 / 2 * 8 + lane / 4;
        weight = pairs.score(weight * of_products, query, key, slope);
      }
      weight = exp2_fast(weight * scale - shift[0][i % 4 / 2]);
      if (SLOPED && weight > 0) weight *= slope;  // only the product of both is wanted
    }
    if (SCORED && edge) {  // what is not seen has a score all the same
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i)
        if (outside(i)) weights[0][i / 4][i % 4] = 0;
    }
  };
  auto derive = [&] {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      float &gradient = gradients[0][i / 4][i % 4];
      const float lowered = BY_ROWS ? LOWERED * powers[0][i % 4 / 2] : LOWERED;
      gradient = weights[0][i / 4][i % 4] * (gradient * lowered - delta[0][i % 4 / 2]);
    }
  };
  auto add = [&](int i) { add_columns<COLUMNS>(sums, left, keys.at(i), 0); };

  turns.open();
  if constexpr (!AHEAD) {
    for (int i = 0; i < mine; ++i) {
      keys.wait_until_full(i);
      values.wait_until_full(i);
      turns.begin();
      begin(i);
      turns.end(i);
      wait_for_products<1>(weights);
      weigh(i);
      wait_for_products<0>(gradients);
      values.release(i);
      derive();
      as_left(left, gradients);
      add(i);
      wait_for_products<0>(sums);
      keys.release(i);
    }
  } else {
  if (mine) {
    keys.wait_until_full(0);
    values.wait_until_full(0);
    turns.begin();
    begin(0);
    turns.end(0);
    wait_for_products<1>(weights);
    weigh(0);
    wait_for_products<0>(gradients);
    values.release(0);
    derive();
    as_left(left, gradients);
  }
  for (int i = 1; i < mine; ++i) {
    keys.wait_until_full(i);
    values.wait_until_full(i);
    turns.begin();
    begin(i);
    add(i - 1);
    turns.end(i);
    wait_for_products<2>(weights);
    weigh(i);
    wait_for_products<1>(gradients);
    values.release(i);
    derive();
    wait_for_products<0>(sums, gradients);
    keys.release(i - 1);
    as_left(left, gradients);
  }
  if (mine) {
    add(mine - 1);
    wait_for_products<0>(sums);
    keys.release(mine - 1);
  }
  }
  for (int i = mine; i < count; ++i) {  // what only other groups see goes round here, too
    turns.begin(), turns.end(i);
    keys.wait_until_full(i), keys.release(i);
    values.wait_until_full(i), values.release(i);
  }

  float factor[1][2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    factor[0][i] = unit_of_scores(p.scale, units) * units.k / (BY_ROWS ? powers[0][i] : 1);
  STORE_SUMS(sums_at(dq_sums, p.dq, p.queries, work.batch, work.head, work.first), p.dq.token, there_are, warp_row,
             sums, factor);
  turns.meet_own();
  store_rows<ROWS>(rows_at(dq, p.dq, work.batch, work.head, work.first), p.dq.token, there_are, shared_memory, warp_row,
                   sums, factor);
}
"""

PIPELINED_KEY_GRADIENT = r"""
constexpr unsigned PAIRS = COLUMNS * sizeof(float2);
typedef Ring<1, ROWS> Rows;
typedef Ring<STAGES, COLUMNS, PAIRS> Queries;

// The tiles of queries that see a block's keys.
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
attention_key_gradient(const element *, const element *, const element *, const element *, result *dk, result *dv,
                       const float2 *numbers, IN_PARTS SUMS(dk_sums) SUMS(dv_sums) EXTRAS const Problem p,
                       const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map) {
  constexpr unsigned QUERIES = 2 * Rows::BYTES, DOUTS = QUERIES + STAGES * Queries::BYTES;
  constexpr unsigned NUMBERS = DOUTS + STAGES * Tiles::BYTES;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + NUMBERS + STAGES * PAIRS);
  const Rows keys{memory, barriers}, values{memory + Rows::BYTES, barriers + Rows::BARRIERS};
  const Queries queries{memory + QUERIES, barriers + 2 * Rows::BARRIERS};
  const Tiles douts{memory + DOUTS, barriers + 2 * Rows::BARRIERS + Queries::BARRIERS};
  if (threadIdx.x == 0) {
    keys.make(THREADS / 32), values.make(THREADS / 32), queries.make(THREADS / 32), douts.make(THREADS / 32);
    barriers_made();
  }
  __syncthreads();
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.keys + ROWS - 1) / ROWS, false);
  const int key_heads = p.heads / p.group, batch = place.plane / key_heads, key_head = place.plane % key_heads;
  const int first = place.tile * ROWS, first_head = key_head * p.group;
  auto numbers_at = [&](unsigned n) { return NUMBERS + n % STAGES * PAIRS; };

  if (threadIdx.x >= THREADS) {
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
        queries.fill_beside(n, memory + numbers_at(n),
                            numbers + (long long)(batch * p.heads + head) * p.padded + start);
        douts.fill(n, dout_map, batch, head, start);
      }
    }
    return;
  }

  take_registers<MANY>();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp_row = threadIdx.x / 32 * 16;
  const int lane = threadIdx.x % 32, there_are = p.keys - first, row = first + warp_row;
  const Units units = UNITS_OF(batch, key_head);
  const float of_products = scale_of_products(p.scale, units), scale = (SCORED ? 1 : of_products) * LOG2_E;
  keys.wait_until_full(0);
  values.wait_until_full(0);
  const Left<ROWS> left_keys(keys.at(0), group * 64), left_values(values.at(0), group * 64);

  float key_sums[1][FEATURES / 8][4] = {}, value_sums[1][FEATURES / 8][4] = {};
  float weights[1][COLUMNS / 8][4], gradients[1][COLUMNS / 8][4];  // a row is a key
  float slopes[SLOPED ? COLUMNS / 8 : 1][4];
  unsigned left_weights[PARTS][1][COLUMNS / 16][4], left_gradients[PARTS][1][COLUMNS / 16][4];
  auto begin = [&](unsigned n) {
    begin_products();
    times_rows<COLUMNS>(weights, left_keys, queries.at(n), 0);
    end_of_products();
    times_rows<COLUMNS>(gradients, left_values, douts.at(n), 0);
    end_of_products();
  };
  auto weigh = [&](unsigned n, int start, const Pairs &pairs, bool partial) {
    if constexpr (SCORED) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) {
        int query = start + i / 4 * 8 + lane % 4 * 2 + i % 2, key = row + i % 4 / 2 * 8 + lane / 4;
        float &weight = weights[0][i / 4][i % 4], slope = 1;
        weight = pairs.score(weight * of_products, query, key, slope);
        if (SLOPED) slopes[i / 4][i % 4] = slope;
      }
    }
    // queries behind the last are zero: a score of that may be anything, NaN too
    const bool behind = SCORED && start + COLUMNS > p.queries;
    if (behind || (CAUSAL && start < row + 15) || partial) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) {
        int query = start + i / 4 * 8 + lane % 4 * 2 + i % 2, key = row + i % 4 / 2 * 8 + lane / 4;
        if ((SCORED && query >= p.queries) || (CAUSAL && key > query) || !pairs.seen(query, key))
          weights[0][i / 4][i % 4] = negative_infinity();
      }
    }
    const float4 *two_pairs = (const float4 *)(shared_memory + numbers_at(n));
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float4 both = two_pairs[j * 4 + lane % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[0][j][i] = exp2_fast(weights[0][j][i] * scale - (i % 2 ? both.z : both.x));
    }
  };
  auto derive = [&](unsigned n) {
    const float4 *two_pairs = (const float4 *)(shared_memory + numbers_at(n));
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float4 both = two_pairs[j * 4 + lane % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float &gradient = gradients[0][j][i];
        const float weight = weights[0][j][i];
        gradient = weight * (gradient * LOWERED - (i % 2 ? both.w : both.y));
        if (SLOPED && weight > 0) gradient *= slopes[j][i];
      }
    }
  };
  auto add_values = [&](unsigned n) { add_columns<COLUMNS>(value_sums, left_weights, douts.at(n), 0); };
  auto add_keys = [&](unsigned n) { add_columns<COLUMNS>(key_sums, left_gradients, queries.at(n), 0); };

  unsigned n = 0;
  for (int head = first_head; head < first_head + p.group; ++head) {
    const Seen seen(p, LISTS, batch, head, place.tile);
    const Pairs pairs = PAIRS_OF(batch, head);
    const int count = seen.list.count;
    const Turns turns(group, count);
    int i = first + group * 64 < p.keys ? 0 : count;  // the first that sees this group's rows
    if (CAUSAL)
      while (i < count && seen.start(i) + COLUMNS <= first + group * 64) ++i;
    turns.open();
    for (int j = 0; j < i; ++j, ++n) {  // what only other groups see goes round here, too
      turns.begin(), turns.end(j);
      queries.wait_until_full(n), queries.release(n);
      douts.wait_until_full(n), douts.release(n);
    }
    if (i == count) continue;

    if constexpr (!AHEAD) {
      for (; i < count; ++i, ++n) {
        queries.wait_until_full(n);
        douts.wait_until_full(n);
        turns.begin();
        begin(n);
        turns.end(i);
        wait_for_products<1>(weights);
        weigh(n, seen.start(i), pairs, seen.list.partial(i));
        as_left(left_weights, weights);
        add_values(n);
        wait_for_products<1>(gradients);
        derive(n);
        as_left(left_gradients, gradients);
        add_keys(n);
        wait_for_products<0>(value_sums, key_sums);
        queries.release(n);
        douts.release(n);
      }
      continue;
    }
    queries.wait_until_full(n);
    douts.wait_until_full(n);
    turns.begin();
    begin(n);
    turns.end(i);
    wait_for_products<1>(weights);
    weigh(n, seen.start(i), pairs, seen.list.partial(i));
    as_left(left_weights, weights);
    add_values(n);
    wait_for_products<1>(gradients);
    derive(n);
    as_left(left_gradients, gradients);
    for (++i, ++n; i < count; ++i, ++n) {
      queries.wait_until_full(n);
      douts.wait_until_full(n);
      turns.begin();
      begin(n);
      add_keys(n - 1);
      turns.end(i);
      wait_for_products<2>(weights, value_sums);
      douts.release(n - 1);
      weigh(n, seen.start(i), pairs, seen.list.partial(i));
      as_left(left_weights, weights);
      add_values(n);
      wait_for_products<2>(gradients);
      derive(n);
      wait_for_products<1>(key_sums, gradients);
      queries.release(n - 1);
      as_left(left_gradients, gradients);
    }
    add_keys(n - 1);
    wait_for_products<0>(value_sums, key_sums);
    queries.release(n - 1);
    douts.release(n - 1);
  }

  meet(1 + GROUPS + group, 128);  // the products of all four warps are done, so that their rows are free
  float factor[1][2];
  factor[0][0] = factor[0][1] = unit_of_scores(p.scale, units) * units.q;
  STORE_SUMS(sums_at(dk_sums, p.dk, p.keys, batch, key_head, first), p.dk.token, there_are, warp_row, key_sums, factor);
  store_rows<ROWS>(rows_at(dk, p.dk, batch, key_head, first), p.dk.token, there_are, shared_memory, warp_row, key_sums,
                   factor);
  factor[0][0] = factor[0][1] = WIDE ? units.dout / (1 << 14) : 1;
  STORE_SUMS(sums_at(dv_sums, p.dv, p.keys, batch, key_head, first), p.dv.token, there_are, warp_row, value_sums,
             factor);
  store_rows<ROWS>(rows_at(dv, p.dv, batch, key_head, first), p.dv.token, there_are, shared_memory + Rows::BYTES,
                   warp_row, value_sums, factor);
}
"""
