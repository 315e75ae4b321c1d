// Attention, forward: a block of threads has some query rows and iterates over the keys.
//
// The scheme is FlashAttention-2 (Dao, arXiv:2307.08691): scores of a tile of keys, their running maximum and sum, and the
// weighted sum of the values are all in the registers of the warps that have the rows. The backward kernels begin with
// `common` too, and so do those of attention_f32.cuh.
//
// Constants: FEATURES, CAUSAL, THREADS; a block has ROWS query rows, SLABS times 16 for each warp, and loads COLUMNS keys
// at a time, which are copied while it works on those before. What users do with scores is in `Pairs`
// (attention_mods.cuh): whether a pair is seen, and the score that counts; with a mask, a block iterates over a list of
// tiles.
//
// Float32 attention (rewrites/split_float32_attention.py) has operands in PARTS of float16, multiplied by powers of two;
// `Units` multiply them back, scalars of a batch entry and key head. Results are then float32, as WIDE says.

//# plain
// In place of `split` where operands have one part as they are.
struct Units { static constexpr float q = 1, k = 1, v = 1, dout = 1; };
#define IN_PARTS
#define APART(operand) 0
#define UNITS_OF(batch, key_head) \
  Units {}
inline float scale_of_products(float scale, const Units &) { return scale; }

//# split
// The second parts of operands and their units, as parameters of a kernel. Where there is one part, the former are not
// read; neither is what has to do with ``dout`` by the forward kernel.
struct Units { float q, k, v, dout; };
#define IN_PARTS                                                                                 \
  const element *q_rest, const element *k_rest, const element *v_rest, const element *dout_rest, \
      const float *q_units, const float *k_units, const float *v_units, const float *dout_units,
#define APART(operand) ((long long)operand##_rest - (long long)operand) / (long long)sizeof(element)
#define UNITS_OF(batch, key_head) \
  units_at(q_units, k_units, v_units, dout_units, batch *(p.heads / p.group) + key_head)
inline Units units_at(const float *q, const float *k, const float *v, const float *dout, int i) {
  return {q[i], k[i], v[i], dout ? dout[i] : 1};
}
// of scores; not zero, so that a score of minus infinity times this is one too
inline float scale_of_products(float scale, const Units &units) {
  return fmaxf(scale * (units.q * units.k), 1e-36f);
}

//# rows
constexpr int ROWS = 16 * SLABS * THREADS / 32;

//# common
struct Strides { long long batch, token, head; };

struct Problem {
  int queries, keys, heads, group;  // `group` query heads share a key head
  int planes;                       // batches times heads of the rows that a block has
  int section;                      // planes that are worked on together
  int padded;                       // queries in scratch memory
  float scale;
  Strides q, k, v, out, dout, dq, dk, dv;
};

constexpr float LOG2_E = 1.4426950408889634f;
extern __shared__ __align__(1024) unsigned char shared_memory[];

// The plane (batch and head) of a block and its tile. Sections of planes run in sequence, so that the common
// operands of their blocks stay in L2; in a section the tiles with the most work go first.
struct Place { int plane, tile; };
inline Place place_of(int block, int planes, int section, int tiles, bool last_tile_first) {
  int begun = block / (tiles * section), i = block - begun * tiles * section;
  int size = min(section, planes - begun * section);
  int tile = i / size;
  return {begun * section + i % size, last_tile_first ? tiles - 1 - tile : tile};
}
template<class T> inline T *rows_at(T *x, const Strides &s, int batch, int head, int token) {
  return x + batch * s.batch + head * s.head + token * s.token;
}

constexpr float RAISED =
    WIDE ? 14 : 0;  // weights are multiplied by 2 to this, so that small ones have all their bits

inline float negative_infinity() { return __uint_as_float(0xff800000u); }

// The tiles of the other side that a block goes through: all up to the end, or those of a list. A list has its length,
// and then of each tile twice its number, and one more where not all pairs in it are seen.
struct Visits {
  const int *list;
  int count;
  inline int tile(int n) const { return MASKED ? list[1 + n] >> 1 : n; }
  inline bool partial(int n) const { return MASKED && list[1 + n] & 1; }
};
inline Visits visits(const int *lists, const Problem &p, int batch, int head, int tile, int all) {
  if (!MASKED) return {nullptr, all};
  const int all_rows = OF_KEYS ? p.keys : p.queries, all_columns = OF_KEYS ? p.queries : p.keys;
  const int tiles = (all_rows + ROWS - 1) / ROWS, columns = (all_columns + COLUMNS - 1) / COLUMNS;
  const int plane = (BY_BATCH ? batch : 0) * (BY_HEAD ? p.heads : 1) + (BY_HEAD ? head : 0);
  const int *list = lists + ((long long)plane * tiles + tile) * (columns + 1);
  return {list, list[0]};
}

//# softmax
// What all kernels of the forward pass do with scores.
// What weights of a lane may add up to in a tile while their row keeps its score. None is then too large for float16;
// of bfloat16 values beyond 2^100 sums may be too large for float32, where the result is not.
constexpr float MOST_OF_LANE = 1 << 14;

// The softmax of a warp's rows over tiles of keys: the score of each row that has the weight one, and the sum of the
// weights. That score is the greatest so far, or was when it was last looked for.
struct Softmax {
  float of_products, unit, scale;  // of products, of scores, and of those in powers of two, one instruction
  float top[SLABS][2], total[SLABS][2];

  inline Softmax(const Problem &p, const Units &units) : of_products(scale_of_products(p.scale, units)) {
    unit = SCORED ? 1 : of_products, scale = unit * LOG2_E;
#pragma unroll
    for (int i = 0; i < 2 * SLABS; ++i) top[i / 2][i % 2] = negative_infinity(), total[i / 2][i % 2] = 0;
  }

  // Products of rows from `row` on and keys from `start` on become scores: minus infinity where a pair is not seen.
  __forceinline__ void score(float (&scores)[SLABS][COLUMNS / 8][4], const Pairs &pairs, const Problem &p,
                             int row, int start, bool partial) const {
    const int lane = threadIdx.x % 32;
    if constexpr (SCORED) {
#pragma unroll
      for (int m = 0; m < SLABS; ++m)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) {
          int key = start + i / 4 * 8 + lane % 4 * 2 + i % 2, query = row + m * 16 + i % 4 / 2 * 8 + lane / 4;
          float &score = scores[m][i / 4][i % 4];
          score = pairs.score(score * of_products, query, key);
        }
    }
    if (start + COLUMNS > p.keys || (CAUSAL && start + COLUMNS > row + 1) || partial) {
#pragma unroll
      for (int m = 0; m < SLABS; ++m)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) {
          int key = start + i / 4 * 8 + lane % 4 * 2 + i % 2, query = row + m * 16 + i % 4 / 2 * 8 + lane / 4;
          if (key >= p.keys || (CAUSAL && key > query) || !pairs.seen(query, key))
            scores[m][i / 4][i % 4] = negative_infinity();
        }
    }
  }

  // Scores become weights; what was summed up by weights before is to be multiplied by `kept`.
  __forceinline__ void weigh(float (&scores)[SLABS][COLUMNS / 8][4], float (&kept)[SLABS][2]) {
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = top[m][half];
        float most[4] = {before, before, before,
                         before};  // of every fourth: none waits for the one before it
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i)
          most[i % 4] = fmaxf(most[i % 4], scores[m][i / 2][half * 2 + i % 2]);
        const float now = top[m][half] = max_of_row(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
        const float shift = now == negative_infinity() ? 0 : now * scale;  // of a row that sees nothing yet
        kept[m][half] = exp2_fast(before * scale - shift);
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i) {
          float &score = scores[m][i / 2][half * 2 + i % 2];
          score = exp2_fast(score * scale - (shift - RAISED));
          sum[i % 4] += score;
        }
        total[m][half] = total[m][half] * kept[m][half] + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      }
  }

  // Whether a row of this warp has seen nothing yet, and so has no score to begin with.
  __forceinline__ bool some_saw_nothing() const {
    bool some = false;
#pragma unroll
    for (int i = 0; i < SLABS * 2; ++i) some = some || top[i / 2][i % 2] == negative_infinity();
    return __any_sync(0xffffffffu, some);
  }

  // As `weigh`, by the scores that rows have, so that nothing is rescaled. True if all weights of the warp are small
  // enough and were added to the totals; false, in all lanes, if not: then the scores are lost, and nothing else has
  // changed. Weights of rows that saw nothing are infinite or NaN.
  __forceinline__ bool weigh_as_before(float (&scores)[SLABS][COLUMNS / 8][4]) {
    float sums[SLABS][2];
    bool fits = true;
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = top[m][half] * scale;
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i) {
          float &score = scores[m][i / 2][half * 2 + i % 2];
          score = exp2_fast(score * scale - shift);
          sum[i % 4] += score;
        }
        sums[m][half] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        fits = fits && sums[m][half] <= MOST_OF_LANE;  // which is false of what is not a number
      }
    if (__any_sync(0xffffffffu, !fits)) return false;
#pragma unroll
    for (int i = 0; i < SLABS * 2; ++i) total[i / 2][i % 2] += sums[i / 2][i % 2];
    return true;
  }

  // Divide by the sums of the weights: `factor` is what is left of that to do. Lines of lse are those of `first` on.
  __forceinline__ void end(float (&sums)[SLABS][FEATURES / 8][4], float (&factor)[SLABS][2],
                           const Units &units, float *lse, int first, int queries) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < SLABS; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(total[m][half]);
        const int query = first + m * 16 + half * 8 + lane / 4;
        factor[m][half] = sum > 0 ? 1 / sum : 0;
        if (WIDE) {  // one after the other, for their product may be too small to have all its bits
#pragma unroll
          for (int i = 0; i < FEATURES / 4; ++i) sums[m][i / 2][half * 2 + i % 2] *= factor[m][half];
          factor[m][half] = units.v;
        }
        if (lane % 4 == 0 && query < queries)
          lse[query] = sum > 0 ? top[m][half] * unit + (logf(sum) - RAISED / LOG2_E) : negative_infinity();
      }
  }
};
inline void rescale(float (&sums)[SLABS][FEATURES / 8][4], const float (&kept)[SLABS][2]) {
#pragma unroll
  for (int m = 0; m < SLABS; ++m)
#pragma unroll
    for (int i = 0; i < FEATURES / 2; ++i) sums[m][i / 4][i % 4] *= kept[m][i % 4 / 2];
}

//# forward
constexpr unsigned STAGE = 2 * operand_bytes(COLUMNS);

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_forward(const element *q, const element *k, const element *v, result *out, float *lse,
                      IN_PARTS EXTRAS const Problem p) {
  const Place place = place_of(blockIdx.x, p.planes, p.section, (p.queries + ROWS - 1) / ROWS, CAUSAL);
  const int batch = place.plane / p.heads, head = place.plane % p.heads, first = place.tile * ROWS;
  const int warp_row = threadIdx.x / 32 * 16 * SLABS;
  const int unit_end = first + warp_row / UNIT * UNIT + UNIT;
  const unsigned rows = shared_address(shared_memory), stages = rows + operand_bytes(ROWS);
  const long long q_apart = APART(q), k_apart = APART(k), v_apart = APART(v);
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

  load_operand<ROWS>(rows, rows_at(q, p.q, batch, head, first), q_apart, p.q.token, p.queries - first);
  end_of_copies();
  if (!MASKED || list.count) load_keys(0);
  else end_of_copies();
  wait_for_copies<1>();
  __syncthreads();
  const Left<ROWS> queries(rows, warp_row);

  Softmax softmax(p, units);
  float sums[SLABS][FEATURES / 8][4] = {};

  for (int n = 0; n < list.count; ++n) {
    wait_for_tile();  // the tile is there, and no thread reads the previous one any more
    if (n + 1 < list.count) load_keys(n + 1);
    const unsigned stage = stages + n % 2 * STAGE;
    const int start = list.tile(n) * COLUMNS, row = first + warp_row;
    if (CAUSAL && start >= unit_end) continue;  // none of these rows sees the keys

    float scores[SLABS][COLUMNS / 8][4];
    begin_products();
    times_rows<COLUMNS>(scores, queries, stage, 0);
    end_of_products();
    wait_for_products<0>(scores);
    softmax.score(scores, pairs, p, row, start, list.partial(n));
    float kept[SLABS][2];
    softmax.weigh(scores, kept);
    rescale(sums, kept);
    unsigned weights[PARTS][SLABS][COLUMNS / 16][4];
    as_left(weights, scores);
    add_columns<COLUMNS>(sums, weights, stage + STAGE / 2, 0);
    wait_for_products<0>(sums);
  }

  float factor[SLABS][2];
  softmax.end(sums, factor, units, lse + (long long)place.plane * p.queries, first + warp_row, p.queries);
  store_rows<ROWS>(rows_at(out, p.out, batch, head, first), p.out.token, p.queries - first, shared_memory,
                   warp_row, sums, factor);
}
