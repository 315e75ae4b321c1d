// `mask_mod` and `score_mod` in the kernels of attention: `Pairs`, which the kernels call at the indices of a
// query and a key, and a kernel that lists the tiles which a mask leaves.
//
// library/attention/mods.py generates the functions, the structure Tables of their arrays, and as macros the
// calls: MASK, BOUNDS, SCORE and SLOPE are statements, TABLE_PARAMETERS declares the arrays, each followed by
// a comma, and TABLES lists them.

//# none
constexpr bool MASKED = false, SCORED = false, SLOPED = false, BY_BATCH = false, BY_HEAD = false;
struct Pairs {
  inline bool seen(int, int) const { return true; }
  inline unsigned seen(int, int, int, int) const { return 1; }
  inline float score(float score, int, int) const { return score; }
  inline float score(float score, int, int, float &) const { return score; }
};
#define EXTRAS
#define LISTS nullptr
#define PAIRS_OF(batch, head) \
  Pairs {}

//# pairs
struct
    Pairs {  // those of one batch entry and head; beyond the last query or key it is that one that is asked for
  Tables tables;
  int b, h, queries, keys;
  inline bool seen(int q, int k) const {
    bool seen = true;
    MASK return seen;
  }
  // in a whole tile: 1: a pair is seen, 2: one is not, 3: both, or it is to be asked for each
  inline unsigned seen(int q0, int q1, int k0, int k1) const {
    bool possible = true, certain = false;
    BOUNDS
    return (possible ? 1 : 0) | (certain ? 0 : 2);
  }
  inline float score(float score, int q, int k) const {
    SCORE
    return score;
  }
  inline float score(float score, int q, int k, float &slope) const {
    SLOPE
    return score;
  }
};
#define EXTRAS const int *batch_numbers, const int *head_numbers, const int *lists, TABLE_PARAMETERS
#define LISTS lists
#define PAIRS_OF(batch, head) \
  Pairs { {TABLES}, batch_numbers[batch], head_numbers[head], p.queries, p.keys }

//# tiles
// For each tile of rows, the tiles of the other side in which a pair is seen; see Visits.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tiles(EXTRAS const Problem p) {
  const int all_rows = OF_KEYS ? p.keys : p.queries, all_columns = OF_KEYS ? p.queries : p.keys;
  const int tiles = (all_rows + ROWS - 1) / ROWS, columns = (all_columns + COLUMNS - 1) / COLUMNS;
  const int plane = blockIdx.x / tiles, first = blockIdx.x % tiles * ROWS, heads = BY_HEAD ? p.heads : 1;
  const Pairs pairs = PAIRS_OF(plane / heads, plane % heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int *list = (int *)LISTS + (long long)blockIdx.x * (columns + 1), length = 0;
  __shared__ unsigned found[THREADS / 32];
  for (int begin = 0; begin < columns; begin += THREADS / 32) {
    const int first_column = (begin + warp) * COLUMNS, end = min(first + ROWS, all_rows) - 1;
    const int end_column = min(first_column + COLUMNS, all_columns) - 1;
    const int q0 = OF_KEYS ? first_column : first, q1 = OF_KEYS ? end_column : end;
    const int k0 = OF_KEYS ? first : first_column, k1 = OF_KEYS ? end : end_column;
    unsigned state = first_column < all_columns ? pairs.seen(q0, q1, k0, k1) : 0;
    if (CAUSAL && state) state = k0 > q1 ? 2 : k1 > q0 ? state | 2 : state;
    const bool known = state != 3;
    if (!known) state = 0;
    for (int j = lane; j < COLUMNS && !known; j += 32)
      for (int i = 0; i < ROWS; ++i) {
        const int row = first + i, column = first_column + j;
        const int query = OF_KEYS ? column : row, key = OF_KEYS ? row : column;
        if (query < p.queries && key < p.keys)
          state |= pairs.seen(query, key) && (!CAUSAL || key <= query) ? 1 : 2;
      }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) state |= __shfl_xor_sync(0xffffffffu, state, mask);
    if (lane == 0) found[warp] = state;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 0; w < THREADS / 32; ++w)
        if (found[w] & 1) list[++length] = (begin + w) * 2 + found[w] / 2;
    __syncthreads();
  }
  if (threadIdx.x == 0) list[0] = length;
}
