// A GEMM and elementwise operations on its results: an epilogue of tile_gemm.cuh around a generated function.
//
// Constants: BIAS: whether a vector is added before results are rounded; MATRICES, VECTORS, SCALARS: operands of the
// function besides the result of the GEMM; WIDE_VECTORS: a bit for each vector, whether it is float; RESULTS of the
// function, of which STORED is the GEMM's own, and SUMMED has its column sums of ROWS rows written (-1: none).
// `apply(t, matrices, vectors, scalars, results)` is the function, on scalars and arrays of scalars.

//# epilogue
constexpr int OWN_ROWS = (ROWS + EPILOGUE_WARPS - 1) / EPILOGUE_WARPS;  // of a warp: every seventh
// Rows of all matrices that a lane holds: those of one matrix are all loaded before there is anything to compute, if
// tiles are whole, for those that are not take more registers.
constexpr int HELD_ROWS = (N % COLUMNS == 0 ? OWN_ROWS : 12) / (MATRICES ? MATRICES : 1);

struct PointwiseEpilogue : EpilogueHooks {
  const element *__restrict__ bias;
  const element *__restrict__ matrices[MATRICES + 1];
  const void *__restrict__ vectors[VECTORS + 1];
  const float *__restrict__ scalars[SCALARS + 1];
  element *__restrict__ results[RESULTS];
  float *__restrict__ sums;

  // whether the last tile of a row of tiles has these 64 columns
  static bool inside(int column) { return N % COLUMNS == 0 || column < N; }

  void prefetch(int row, int column, int lane) const {
#pragma unroll
    for (int i = 0; i < MATRICES; ++i)
      for (int line = lane; line < ROWS * WORDS; line += 32) {  // of 128 bytes
        const int at = column + line % WORDS * 64;
        if (inside(at)) prefetch_to_l2(matrices[i] + (long long)(row + line / WORDS) * N + at);
      }
  }

  void accumulate(float (&c)[COLUMNS / 8][4], int column, int lane) const {
    if constexpr (BIAS) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        if (!inside(column + j * 8)) continue;
        const unsigned two = *(const unsigned *)(bias + column + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          c[j][half * 2] += low_half(two), c[j][half * 2 + 1] += high_half(two);
      }
    }
  }

  // A lane has three pairs of columns.
  void consume(const StagedTile &tile) const {
    const int lane = tile.lane, warp = tile.warp, column = tile.column();
    const long long at = ((long long)(tile.row() + warp) * N + column) / 2 + lane;
    constexpr long long further = EPILOGUE_WARPS * (N / 2);
    unsigned held[HELD_ROWS][WORDS][MATRICES + 1];
    auto load_row = [&](int r) {
#pragma unroll
      for (int j = 0; j < WORDS; ++j)
#pragma unroll
        for (int i = 0; i < MATRICES; ++i)
          held[r % HELD_ROWS][j][i] =
              // only of the last row is it in doubt
              (r < ROWS / EPILOGUE_WARPS || warp + r * EPILOGUE_WARPS < ROWS) && inside(column + j * 64)
                  ? __ldcs((const unsigned *)matrices[i] + at + r * further + j * 32)
                  : 0;
    };
#pragma unroll
    for (int r = 0; r < HELD_ROWS; ++r) load_row(r);
    float of_columns[WORDS][2][VECTORS + 1], of_all[SCALARS + 1];
#pragma unroll
    for (int i = 0; i < VECTORS * WORDS * 2; ++i) {
      const int v = i / (WORDS * 2), j = i / 2 % WORDS, from = column + j * 64 + lane * 2 + i % 2;
      if (!inside(column + j * 64)) continue;
      of_columns[j][i % 2][v] = WIDE_VECTORS >> v & 1 ? ((const float *)vectors[v])[from]
                                                      : low_half(((const element *)vectors[v])[from]);
    }
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) of_all[i] = *scalars[i];
    float total[WORDS][2] = {};
    tile.wait();
#pragma unroll
    for (int r = 0; r < OWN_ROWS; ++r) {
      if (warp + r * EPILOGUE_WARPS >= ROWS)
        break;  // for each: what is begun before it is known takes registers
#pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        if (!inside(column + j * 64)) break;
        const unsigned t = tile.pair(warp + r * EPILOGUE_WARPS, j);
        float x[2][MATRICES + 1], made[2][RESULTS];
#pragma unroll
        for (int i = 0; i < MATRICES; ++i)
          x[0][i] = low_half(held[r % HELD_ROWS][j][i]), x[1][i] = high_half(held[r % HELD_ROWS][j][i]);
        apply(low_half(t), x[0], of_columns[j][0], of_all, made[0]);
        apply(high_half(t), x[1], of_columns[j][1], of_all, made[1]);
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) {
          const unsigned two = i == STORED ? t : pack(made[0][i], made[1][i]);
          if (i == SUMMED) total[j][0] += low_half(two), total[j][1] += high_half(two);
          __stcs((unsigned *)results[i] + at + r * further + j * 32, two);
        }
      }
      if (r + HELD_ROWS < OWN_ROWS) load_row(r + HELD_ROWS);
    }
    tile.release();
    if constexpr (SUMMED >= 0) {
      float *const partial = tile.scratch();
#pragma unroll
      for (int j = 0; j < WORDS; ++j)
        *(float2 *)(partial + warp * COLUMNS + j * 64 + lane * 2) = make_float2(total[j][0], total[j][1]);
      meet(1, 32 * EPILOGUE_WARPS);
      const int own = threadIdx.x - 256;
      if (own < COLUMNS && inside(column + own)) {
        float sum = partial[own];
        for (int w = 1; w < EPILOGUE_WARPS; ++w) sum += partial[w * COLUMNS + own];
        sums[(long long)tile.band * N + column + own] = sum;
      }
      meet(1, 32 * EPILOGUE_WARPS);
    }
  }
};
