"""The text of attention's forward kernel for Hopper: warps that copy, and groups of warps that multiply in turns.

Kernels, stage 6, below ``cuda_attention``, beside ``cuda_attention_forward``, whose ``Softmax`` it has. The scheme is
FlashAttention-3 (Shah et al., arXiv:2407.08608). Each group of four warps has 64 query rows. Keys and values come in
rings of STAGES tiles that a further thread fills, so that nobody waits for a whole block. A group begins the
products of the next scores together with those of the weights that it has, and computes the next weights meanwhile;
groups take turns, so that one computes weights while another multiplies.
"""

from __future__ import annotations

PIPELINED_FORWARD = r"""
static_assert(PARTS == 1, "a tile has one part");
constexpr int GROUPS = THREADS / 128;
typedef Ring<QUERY_BUFFERS, ROWS> Queries;
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
};

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
  const int turn = 1 + group, next_turn = 1 + (group + 1) % GROUPS, own = 1 + GROUPS + group;  // barriers' numbers
  for (int round = 0;; ++round) {
    const Work work(p, LISTS, round);
    if (!work.there) break;
    const int count = work.list.count, first = work.first + group * 64, row = work.first + warp_row;
    const Pairs pairs = PAIRS_OF(work.batch, work.head);
    const Units units = UNITS_OF(work.batch, work.head / p.group);
    int mine = first < p.queries ? count : 0;  // the tiles that this group sees, those before others
    if (CAUSAL)
      while (mine && work.list.tile(mine - 1) * COLUMNS >= first + 64) --mine;
    auto begin_turn = [&] {
      if (IN_TURNS) meet(turn, 256);
    };
    auto end_turn = [&](int i) {
      if (IN_TURNS && (group < GROUPS - 1 || i < count - 1)) pass(next_turn, 256);
    };
    if (IN_TURNS && group == GROUPS - 1 && count > AHEAD) pass(next_turn, 256);

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
        begin_scores(0);
        wait_for_products<0>(scores);
        keys.release(n);
        weigh(0);
        as_left(weights, scores);
      }
      for (int i = 1; i < mine; ++i) {
        keys.wait_until_full(n + i);
        values.wait_until_full(n + i - 1);
        begin_turn();
        begin_scores(i);
        add_columns<COLUMNS>(sums, weights, values.at(n + i - 1), 0);
        end_turn(i);
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
        begin_turn();
        begin_scores(i);
        end_turn(i);
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
      if (!AHEAD || i) begin_turn(), end_turn(i);
      keys.wait_until_full(n + i), keys.release(n + i);
      values.wait_until_full(n + i), values.release(n + i);
    }
    n += count;

    float factor[1][2];
    softmax.end(sums, factor, units, lse + (long long)work.plane * p.queries, row, p.queries);
    meet(own, 128);  // the products of all four warps are done, and so their rows are free
    unsigned char *tile = shared_memory + (queries.at(round) - memory);
    store_rows<ROWS>(rows_at(out, p.out, work.batch, work.head, work.first), p.out.token, p.queries - work.first, tile,
                     warp_row, sums, factor);
    fence_for_products();  // what follows are copies
    queries.release(round);
  }
}
"""
