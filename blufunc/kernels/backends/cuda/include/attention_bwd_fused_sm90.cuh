// Attention, backward, on Hopper in one kernel: a block has all tokens of a head, and five matmuls.
//
// A block iterates over its keys, 64 for each of two warpgroups, and for these over its queries. So weights
// are computed once, and their gradients serve both sides: the sums of keys and values stay in registers, as
// in `attention_key_gradient`, and a third warpgroup, which gets the gradients of weights through shared
// memory, makes the sums of queries. Between two tiles of keys these are in shared memory, those of the last
// KEPT tiles of queries, which most tiles of keys add to, or in memory of the block's own, which stays in L2.
// One thread adds to a sum, in the order of keys.
//
// The block iterates over several planes (batch entries times heads). For those that come next, three more
// warps find the shift of scores, and delta; for the first one, the warpgroups do. One block fills an SM, so
// planes must fill the device: `fits_planes` in library/attention/kernels.py says when. A plane has at most
// MOST_QUERIES queries, there are 64 FEATURES, and scores are unchanged, with no mask but the causal one.

//# gradients
static_assert(FEATURES == 64 && COLUMNS == 64 && ROWS == 128 && BLOCKS == 1 && !MASKED && !SCORED && !WIDE,
              "");
typedef Ring<STAGES_OF_KEYS, ROWS> Keys;

// of 65536 registers, by 512 threads: of the groups of keys, of the group of queries, and of the one that copies
constexpr int OF_KEY_GROUPS = 176, OF_QUERY_GROUP = 112, OF_COPIERS = 48;
static_assert(THREADS * OF_KEY_GROUPS + 128 * (OF_QUERY_GROUP + OF_COPIERS) == 65536,
              "or some wait for ever");
constexpr int QUERY_GROUP = GROUPS;
constexpr int COPIER = THREADS + 128, FINDERS = COPIER + 32,
              FOUND = 1 + QUERY_GROUP + 1;  // threads, and a barrier

// Gradients of the weights of a tile of keys (rows) and one of queries, from the groups of keys to that of queries.
struct Slopes : Ring<STAGES_OF_KEYS, ROWS> {
  inline void make() const {
    for (int i = 0; i < STAGES_OF_KEYS; ++i)
      make_barrier(full + i, WARPS), make_barrier(full + STAGES_OF_KEYS + i, 4);
  }
  inline void wait_until_free(unsigned n) const {
    wait_for(full + STAGES_OF_KEYS + n % STAGES_OF_KEYS, n / STAGES_OF_KEYS % 2 ^ 1);
  }
  inline void filled(unsigned n) const {
    fence_for_products();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(full + n % STAGES_OF_KEYS);
  }
};

// Stores a warp's left operands, 16 rows of 64, to those rows of a tile; zeros from there_are on: keys past the
// last one may have infinite weights. (In kernels with a row per key, these are sums that are not stored.)
inline void store_left(unsigned char *tile, int row, int there_are, const unsigned (&a)[COLUMNS / 16][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; ++i)
    *(unsigned *)(tile + tile_at<ROWS>(row + i % 2 * 8 + lane / 4, i / 4 * 2 + i % 4 / 2) + lane % 4 * 4) =
        row + i % 2 * 8 + lane / 4 < there_are ? a[i / 4][i % 4] : 0;
}

// Shift of the scores and delta, of all queries of a plane: by COUNT threads, eight per row, for rows of which
// other warps have no fragments.
template<int COUNT, int AT_ONCE>
inline void find_numbers(float2 *numbers, int thread, const Problem &p, const element *out,
                         const element *dout, const float *lse) {
  static_assert(COUNT % 32 == 0, "the rows of a warp are all before the end, or none");
  const int chunk = thread % 8, end = (p.queries + COLUMNS - 1) / COLUMNS * COLUMNS;
  for (int begin = thread / 8; begin < end; begin += COUNT / 8 * AT_ONCE) {
    uint4 outs[AT_ONCE], douts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = min(begin + i * (COUNT / 8), p.queries - 1);
      outs[i] = *(const uint4 *)(out + row * p.out.token + chunk * 8);
      douts[i] = *(const uint4 *)(dout + row * p.dout.token + chunk * 8);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = begin + i * (COUNT / 8);
      const unsigned xs[4] = {outs[i].x, outs[i].y, outs[i].z, outs[i].w};
      const unsigned ys[4] = {douts[i].x, douts[i].y, douts[i].z, douts[i].w};
      float delta = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        delta += low_half(xs[j]) * low_half(ys[j]) + high_half(xs[j]) * high_half(ys[j]);
#pragma unroll
      for (int apart = 1; apart < 8; apart *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, apart);
      if (chunk == 0 && row < end) {
        const float logarithm = row < p.queries ? lse[row] : negative_infinity();
        const bool unseen = logarithm == negative_infinity();  // or past the last one
        numbers[row] = make_float2(unseen ? -negative_infinity() : logarithm * LOG2_E, delta);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 256, 1)
    attention_gradients(const element *, const element *, const element *, const element *out,
                        const float *lse, const element *dout, element *dq, element *dk, element *dv,
                        float *partial, SUMS(dq_sums) SUMS(dk_sums) SUMS(dv_sums) const Problem p, COPIED(q),
                        COPIED(k), COPIED(v), COPIED(dout)) {
  constexpr unsigned VALUES = STAGES_OF_KEYS * Keys::BYTES, SLOPES = 2 * VALUES, QUERIES = 3 * VALUES;
  constexpr unsigned DOUTS = QUERIES + STAGES * Tiles::BYTES, NUMBERS = DOUTS + STAGES * Tiles::BYTES;
  constexpr unsigned IN_SHARED = NUMBERS + 2 * MOST_QUERIES * 8;
  const unsigned memory = shared_address(shared_memory);
  barrier *barriers = (barrier *)(shared_memory + IN_SHARED + KEPT * COLUMNS * FEATURES * 4);
  const Keys keys{memory, barriers}, values{memory + VALUES, barriers += Keys::BARRIERS};
  const Slopes slopes{{memory + SLOPES, barriers += Keys::BARRIERS}};
  const Tiles queries{memory + QUERIES, barriers += Keys::BARRIERS};
  const Tiles douts{memory + DOUTS, barriers += Tiles::BARRIERS};
  // values of queries, of every other plane: whether they are there, and whether all readers are done
  barrier *const found = barriers += Tiles::BARRIERS, *const free = found + 2;
  const auto numbers_of = [](int turn) {
    return (float2 *)(shared_memory + NUMBERS) + turn % 2 * MOST_QUERIES;
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) make_barrier(found + i, 3), make_barrier(free + i, WARPS);
    keys.make(WARPS + 4), values.make(WARPS), slopes.make(), queries.make(WARPS), douts.make(WARPS);
    barriers_made();
  }
  __syncthreads();
  const int group = group_of_warp(), warp_row = threadIdx.x / 32 * 16;
  const int key_tiles = (p.keys + ROWS - 1) / ROWS, query_tiles = (p.queries + COLUMNS - 1) / COLUMNS;
  // the first tile of queries that see a tile of keys
  const auto first_seen = [](int tile) { return CAUSAL ? tile * ROWS / COLUMNS : 0; };
  // whether a group's keys, from `row` on, are seen by the queries from `start` on; all its warps say the same
  const auto is_seen = [&p](int row, int start) {
    return row < p.keys && !(CAUSAL && start + COLUMNS <= row);
  };
  unsigned m = 0, n = 0;  // tiles of keys and of queries that went round

  const auto find = [&](int plane, int turn, auto how, int thread) {
    const int batch = plane / p.heads, head = plane % p.heads;
    how(numbers_of(turn), thread, p, rows_at(out, p.out, batch, head, 0),
        rows_at(dout, p.dout, batch, head, 0), lse + (long long)plane * p.queries);
  };

  // -- the warps that copy, or find numbers
  if (group > QUERY_GROUP) {
    leave_registers<OF_COPIERS>();
    if (threadIdx.x >= FINDERS) {
      int turn = 1;
      for (int plane = blockIdx.x + gridDim.x; plane < p.planes; plane += gridDim.x, ++turn) {
        wait_for(free + turn % 2, turn / 2 % 2 ^ 1);
        find(plane, turn, find_numbers<96, 2>, threadIdx.x - FINDERS);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(found + turn % 2);
      }
      return;
    }
    if (threadIdx.x > COPIER) return;
    for (int plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
      const int batch = plane / p.heads, head = plane % p.heads;
      for (int tile = 0; tile < key_tiles; ++tile, ++m) {
        keys.fill(m, k_map, batch, head, tile * ROWS);
        values.fill(m, v_map, batch, head, tile * ROWS);
        for (int i = first_seen(tile); i < query_tiles; ++i, ++n) {
          queries.fill(n, q_map, batch, head, i * COLUMNS);
          douts.fill(n, dout_map, batch, head, i * COLUMNS);
        }
      }
    }
    return;
  }

  find(blockIdx.x, 0, find_numbers<THREADS + 128, 8>, threadIdx.x);

  // -- the group of queries
  if (group == QUERY_GROUP) {
    pass(FOUND, THREADS + 128);
    leave_registers<OF_QUERY_GROUP>();
    const int thread = threadIdx.x % 128, row = thread / 32 * 16;
    const float factor[1][2] = {{p.scale, p.scale}};
    // of each thread its own sums
    float *const mine = partial + blockIdx.x * max(query_tiles - KEPT, 0) * COLUMNS * FEATURES + thread * 4;
    float4 *const in_shared = (float4 *)(shared_memory + IN_SHARED) + thread;
    for (int plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
      const int batch = plane / p.heads, head = plane % p.heads;
      for (int tile = 0; tile < key_tiles; ++tile, ++m) {
        keys.wait_until_full(m);
        for (int i = first_seen(tile); i < query_tiles; ++i, ++n) {
          const int start = i * COLUMNS;
          const int last_tile = CAUSAL ? min((start + COLUMNS - 1) / ROWS, key_tiles - 1) : key_tiles - 1;
          const bool kept = i >= query_tiles - KEPT;
          float *const before = mine + i * COLUMNS * FEATURES;
          float4 *const here = in_shared + (i - (query_tiles - KEPT)) * 8 * 128;
          float sums[1][FEATURES / 8][4], others[FEATURES / 8][4] = {};
          if (!kept && 0 < tile && tile == last_tile) {
#pragma unroll
            for (int j = 0; j < 8; ++j) load_from_memory(others[j], before + j * 128 * 4);
          }
          slopes.wait_until_full(n);
          const unsigned left = slopes.at(n), right = keys.at(m);
          begin_products();
#pragma unroll
          for (int half = 0; half < GROUPS; ++half)
            if (is_seen(tile * ROWS + half * 64, start)) {
#pragma unroll
              for (int k = half * 4; k < half * 4 + 4; ++k)
                group_times_turned(sums[0], described<ROWS>(left, row_bytes(16 * k)),
                                   described<ROWS>(right, row_bytes(16 * k)), k > 0);
            }
          end_of_products();
          wait_for_products<0>(sums);
          if (kept && tile > 0) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const float4 x = here[j * 128];
              others[j][0] = x.x, others[j][1] = x.y, others[j][2] = x.z, others[j][3] = x.w;
            }
          }
#pragma unroll
          for (int j = 0; j < 32; ++j) sums[0][j / 4][j % 4] += others[j / 4][j % 4];
          if (tile < last_tile) {
            slopes.release(n);
#pragma unroll
            for (int j = 0; j < 8; ++j)
              if (kept) here[j * 128] = float4{sums[0][j][0], sums[0][j][1], sums[0][j][2], sums[0][j][3]};
              else if (tile == 0) store_in_memory(before + j * 128 * 4, sums[0][j]);
              else add_in_memory(before + j * 128 * 4, sums[0][j]);
          } else {
            const int there_are = p.queries - start;
            STORE_SUMS(sums_at(dq_sums, p.dq, p.queries, batch, head, start), p.dq.token, there_are, row,
                       sums, factor);
            meet_group(QUERY_GROUP);
            store_rows<ROWS>(rows_at(dq, p.dq, batch, head, start), p.dq.token, there_are,
                             shared_memory + (left - memory), row, sums, factor);
            __syncwarp();
            slopes.release(n);
          }
        }
        keys.release(m);
      }
    }
    return;
  }

  // -- the groups of keys
  meet(FOUND, THREADS + 128);
  take_registers<OF_KEY_GROUPS>();
  int turn = 0;
  const float of_products = p.scale;
  const float one[1][2] = {{1, 1}}, factor[1][2] = {{p.scale, p.scale}};
  for (int plane = blockIdx.x; plane < p.planes; plane += gridDim.x, ++turn) {
    const int batch = plane / p.heads, head = plane % p.heads;
    const Pairs pairs = PAIRS_OF(batch, head);
    if (turn) wait_for(found + turn % 2, (turn - 1) / 2 % 2);
    const float2 *const numbers = numbers_of(turn);
    for (int tile = 0; tile < key_tiles; ++tile, ++m) {
      const int first = tile * ROWS, there_are = p.keys - first, row = first + warp_row;
      float key_sums[1][FEATURES / 8][4] = {}, value_sums[1][FEATURES / 8][4] = {};
      keys.wait_until_full(m);
      values.wait_until_full(m);
      const Left<ROWS> left_keys(keys.at(m), group * 64), left_values(values.at(m), group * 64);
      for (int i = first_seen(tile); i < query_tiles; ++i, ++n) {
        const int start = i * COLUMNS;
        if (!is_seen(first + group * 64, start)) {
          queries.pass_on(n), douts.pass_on(n);
          slopes.wait_until_free(n);
          slopes.filled(n);
          continue;
        }
        float weights[1][COLUMNS / 8][4], gradients[1][COLUMNS / 8][4],
            none[1][COLUMNS / 8][4];  // a row is a key
        queries.wait_until_full(n);
        douts.wait_until_full(n);
        begin_products();
        times_rows<COLUMNS>(weights, left_keys, queries.at(n), 0);
        end_of_products();
        times_rows<COLUMNS>(gradients, left_values, douts.at(n), 0);
        end_of_products();
        wait_for_products<1>(weights);
        const float4 *two_pairs = (const float4 *)(numbers + start);
        weigh_queries(weights, none, two_pairs, pairs, p, of_products, row, start, false);
        unsigned left_weights[PARTS][1][COLUMNS / 16][4], left_gradients[PARTS][1][COLUMNS / 16][4];
        as_left(left_weights, weights);
        add_columns<COLUMNS>(value_sums, left_weights, douts.at(n), 0);
        slopes.wait_until_free(n);
        wait_for_products<1>(gradients);
        times_queries(gradients, weights, none, two_pairs);
        as_left(left_gradients, gradients);
        // before the product: what it has in registers is not to be touched then
        store_left(shared_memory + (slopes.at(n) - memory), warp_row, there_are, left_gradients[0][0]);
        slopes.filled(n);
        add_columns<COLUMNS>(key_sums, left_gradients, queries.at(n), 0);
        wait_for_products<0>(value_sums, key_sums);
        queries.release(n);
        douts.release(n);
      }
      keys.release(m);
      meet_group(group);
      // rows go out through those of this warp in the tile of values
      unsigned char *const through = shared_memory + (values.at(m) - memory);
      STORE_SUMS(sums_at(dk_sums, p.dk, p.keys, batch, head, first), p.dk.token, there_are, warp_row,
                 key_sums, factor);
      store_rows<ROWS>(rows_at(dk, p.dk, batch, head, first), p.dk.token, there_are, through, warp_row,
                       key_sums, factor);
      __syncwarp();
      STORE_SUMS(sums_at(dv_sums, p.dv, p.keys, batch, head, first), p.dv.token, there_are, warp_row,
                 value_sums, one);
      store_rows<ROWS>(rows_at(dv, p.dv, batch, head, first), p.dv.token, there_are, through, warp_row,
                       value_sums, one);
      fence_for_products();  // orders the next copy to this buffer after these reads
      __syncwarp();
      values.release(m);
    }
    if (threadIdx.x % 32 == 0) arrive(free + turn % 2);
  }
}
