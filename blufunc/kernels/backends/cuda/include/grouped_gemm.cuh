// Matmuls of groups of rows by the GEMM of implicit_gemm.cuh: any architecture, dtype and alignment.
//
// Sizes of groups are values on the device. The rows of a stack have PARTS: groups, and those ahead of them and beyond,
// which are 0. A block has one slot of tiles. Part i has the slots from bound(i) / BM + i on: as many as its rows need, or
// one more, so that a block finds its part by bisection, without a sum over all of them. If SUMMED, tiles are those of
// the K x N results of each group, whose terms are its rows.
//
// Constants: STACKS, M, K, N, GROUPS: sizes; MATRICES, BOUNDS: stacks of the right operand and of offsets, 1 or STACKS;
// SUMMED; A_STACK, A_ROW, B_STACK, B_GROUP, B_ROW, B_COLUMN: strides.

//# block
constexpr int PARTS = GROUPS + 2, ACROSS = (N + BN - 1) / BN;
constexpr int DOWN = SUMMED ? (K + BM - 1) / BM : M / BM + PARTS;

struct Bounds {
  const int *offsets;
  inline int operator()(int group) const {
    if (group < 0) return 0;
    if (group > GROUPS) return M;
    const int at = __ldg(offsets + group);
    return at < 0 ? 0 : lesser(at, M);
  }
};

// false if there is nothing to compute
inline bool find_block(const int *offsets, Block &block) {
  const int tile = blockIdx.x % (DOWN * ACROSS), which = blockIdx.x / (DOWN * ACROSS);
  const int down = tile / ACROSS, stack = SUMMED ? which / GROUPS : which;
  const Bounds bound{offsets + (BOUNDS > 1 ? stack * (GROUPS + 1) : 0)};
  block.n = tile % ACROSS * BN, block.group = which, block.part = 0;
  block.a = stack * (Offset)A_STACK, block.b = (MATRICES > 1 || SUMMED) * stack * (Offset)B_STACK;
  block.c = which * (Offset)(SUMMED ? K : M) * N;
  if constexpr (SUMMED) {
    block.m = down * BM, block.rows = K;
    block.first = bound(which % GROUPS), block.end = bound(which % GROUPS + 1);
    return true;
  } else {
    int low = 0, top = PARTS - 1;  // the last part that begins at this slot or before
    while (low < top) {
      const int middle = (low + top + 1) / 2;
      if (bound(middle - 1) / BM + middle <= down) low = middle;
      else top = middle - 1;
    }
    const int group = low - 1, start = bound(group);
    block.m = start + (down - start / BM - low) * BM, block.rows = bound(group + 1);
    block.first = 0, block.end = group >= 0 && group < GROUPS ? K : 0;
    block.b += block.end ? group * (Offset)B_GROUP : 0;
    return block.m < block.rows;
  }
}

struct Row { Offset offset; };
struct Term { Offset offset, b; };
inline Row row_of(int m) { return {m * (Offset)(SUMMED ? 1 : A_ROW)}; }
inline Term term_of(int t) { return {t * (Offset)(SUMMED ? A_ROW : 1), t * (Offset)B_ROW}; }
inline Offset column_of(int n) { return n * (Offset)B_COLUMN; }
inline bool locate(const Row &row, const Term &term, Offset &offset) {
  offset = row.offset + term.offset;
  return true;
}
inline Offset target_of(const Block &block, int m, int n) { return block.c + m * (Offset)N + n; }

//# entry
extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_gemm(const Element *a, const Element *b, const int *offsets, Target *c) {
  Block block;
  if (find_block(offsets, block)) gemm(a, b, c, block);
}
