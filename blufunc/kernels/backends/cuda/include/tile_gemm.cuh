// A warp-specialized bf16 GEMM for Hopper whose epilogue overlaps with the next tile's main loop.
//
// An epilogue that runs in the consumers costs a library a third of the GEMM, since the tensor cores wait for it.
// Here one producer warp copies tiles of both operands to a ring of STAGES buffers (TMA), two consumer warpgroups
// multiply and leave ROWS x COLUMNS results, rounded, in shared memory, and EPILOGUE_WARPS other warps read these
// while the consumers are at the next tile. Two blocks, a cluster, compute vertically adjacent tiles and share the
// columns of the right operand: each copies one half of them to both (multicast).
//
// Constants: M, N, K; ROWS, COLUMNS, TERMS of a stage, STAGES; EPILOGUE_WARPS, THREADS, CLUSTER; BY_ROWS: whether
// the terms of the right operand are contiguous, not its columns; BANDS: number of vertically adjacent tiles that
// are computed before the next column, so that their right operands stay in L2.

//# instructions
// a box to the same place of all blocks of the cluster, whose barriers there count the bytes
inline void copy_box_to_all(unsigned to, const TensorMap &map, int i0, int i2, barrier *b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, 0, %3, 0}], [%4], %5;"
      :
      : "r"(to), "l"(&map), "r"(i0), "r"(i2), "r"(shared_address(b)), "h"((short)((1 << CLUSTER) - 1))
      : "memory");
}
// at the barrier in the same place of another block of the cluster
inline void arrive_at(barrier *b, unsigned block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
      :
      : "r"(shared_address(b)), "r"(block)
      : "memory");
}
inline unsigned block_of_cluster() {
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
inline void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
inline void prefetch_to_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// of both halves
inline unsigned larger_of_two(unsigned x, unsigned y) {
  unsigned r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

//# gemm
typedef unsigned short element;  // bits of a bfloat16
constexpr unsigned A_BYTES = ROWS * 2 * TERMS, B_BYTES = COLUMNS * 2 * TERMS, STAGE = A_BYTES + B_BYTES;
constexpr unsigned PITCH = COLUMNS * 2 + 16,
                   TILE = STAGES * STAGE;  // staged results: bytes between rows, offset
constexpr int TILES_M = M / (ROWS * CLUSTER), TILES_N = (N + COLUMNS - 1) / COLUMNS,
              TILES = TILES_M * TILES_N;
constexpr int WORDS = COLUMNS / 64;  // of two elements, that an epilogue lane has of a row
extern __shared__ __align__(1024) unsigned char shared_memory[];

// of a cluster
struct Tile { int band, column; };
inline Tile tile_of(int i) {
  const int above = i / (BANDS * TILES_N) * BANDS, within = i % (BANDS * TILES_N),
            bands = min(BANDS, TILES_M - above);
  return {above + within % bands, within / bands};
}

// The rounded results of a block's tile, for its epilogue warps.
struct StagedTile {
  int band, panel;  // of ROWS rows, of COLUMNS columns
  int warp, lane;   // of EPILOGUE_WARPS, of 32
  barrier *staged, *drained;
  int parity;

  int row() const { return band * ROWS; }
  int column() const { return panel * COLUMNS; }
  void wait() const { wait_for(staged, parity); }
  // results of row r in the columns 2 lane + 64 j and the next
  unsigned pair(int r, int j) const {
    return *(const unsigned *)(shared_memory + TILE + r * PITCH + lane * 4 + j * 128);
  }
  // by each epilogue warp, once, when it has read what it needs: the consumers may write the next tile
  void release() const {
    __syncwarp();
    if (lane == 0) arrive(drained);
  }
  // shared memory of the epilogue's own
  float *scratch() const { return (float *)(drained + 1); }
};

// Hooks that an epilogue may leave out. It also has `void consume(const StagedTile &)`, which the epilogue warps call.
struct EpilogueHooks {
  // all threads, first; false ends the block
  bool begin() const { return true; }
  // false skips a tile
  bool wanted(Tile) const { return true; }
  // the producer warp, before it copies the operands of a tile from this row and column on
  void prefetch(int, int, int) const {}
  // the consumers, before they round: sums of the columns `column + 8 j + lane % 4 * 2` and the next
  void accumulate(float (&)[COLUMNS / 8][4], int, int) const {}
};

// 16 terms of a tile whose panels of 64 rows or columns are 8 KB apart
inline unsigned long long described(unsigned at) {
  return 1ull << 62 | 512ull << 16 | 64ull << 32 | (at & 0x3ffff) >> 4;
}

// The body of a kernel of THREADS threads and clusters of CLUSTER blocks. The maps are parameters of the kernel.
template<class Epilogue>
inline void tile_gemm(const TensorMap &a, const TensorMap &b, const Epilogue &epilogue) {
  if (!epilogue.begin()) return;
  const unsigned stages = shared_address(shared_memory);
  barrier *const full = (barrier *)(shared_memory + TILE + ROWS * PITCH), *const empty = full + STAGES,
                 *const staged = empty + STAGES, *const drained = staged + 1;
  const unsigned block = block_of_cluster();
  const int warp = threadIdx.x / 32, group = warp / 4, lane = threadIdx.x % 32;
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) make_barrier(full + i, 1), make_barrier(empty + i, 8 * CLUSTER);
    make_barrier(staged, 8);
    make_barrier(drained, EPILOGUE_WARPS);
    barriers_made();
  }
  synchronize_cluster();

  if (group < 2) {  // consumers
    take_registers<152>();
    int stage = 0, phase = 0, parity = 1;
    for (int i = first; i < TILES; i += stride) {
      const Tile tile = tile_of(i);
      if (!epilogue.wanted(tile)) continue;
      float c[COLUMNS / 8][4];
      int before = 0;
      for (int step = 0; step < K / TERMS; ++step) {
        wait_for(full + stage, phase);
        const unsigned at = stages + stage * STAGE;
        begin_products();
#pragma unroll
        for (int k = 0; k < TERMS / 16; ++k)
          multiply(c, described(at + group * 8192 + k * 32),
                   described(at + A_BYTES + k * (BY_ROWS ? 32 : 2048)), step || k);
        end_of_products();
        if (step) {
          wait_for_groups<1>();
          if (lane < CLUSTER) arrive_at(empty + before, lane);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      wait_for_groups<0>();
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; ++j) settle(c[j / 4][j % 4]);
      if (lane < CLUSTER) arrive_at(empty + before, lane);
      epilogue.accumulate(c, tile.column * COLUMNS, lane);
      wait_for(drained, parity);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned char *to = shared_memory + TILE + (warp * 16 + half * 8 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
          *(unsigned *)(to + j * 16) = pack(c[j][half * 2], c[j][half * 2 + 1]);
      }
      __syncwarp();
      if (lane == 0) arrive(staged);
      parity ^= 1;
    }
  } else {
    leave_registers<104>();
    if (warp == 8 + EPILOGUE_WARPS) {  // the producer
      int stage = 0, phase = 1;
      for (int i = first; i < TILES; i += stride) {
        const Tile tile = tile_of(i);
        if (!epilogue.wanted(tile)) continue;
        const int row = (tile.band * CLUSTER + block) * ROWS, column = tile.column * COLUMNS;
        epilogue.prefetch(row, column, lane);
        for (int step = 0; step < K / TERMS && lane == 0; ++step) {
          const unsigned to = stages + stage * STAGE;
          wait_for(empty + stage, phase);
          expect_bytes(full + stage, STAGE);
          copy_box(to, a, step * TERMS, 0, row, 0, full + stage);
          if constexpr (BY_ROWS) {
            const int mine = block * (COLUMNS / CLUSTER);
            copy_box_to_all(to + A_BYTES + mine * 128, b, step * TERMS, column + mine, full + stage);
          } else {
            const int mine = block * (TERMS / CLUSTER);
#pragma unroll
            for (int panel = 0; panel < COLUMNS / 64; ++panel)
              copy_box_to_all(to + A_BYTES + panel * 8192 + mine * 128, b, column + panel * 64,
                              step * TERMS + mine, full + stage);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        __syncwarp();
      }
    } else {
      int parity = 0;
      for (int i = first; i < TILES; i += stride) {
        const Tile tile = tile_of(i);
        if (!epilogue.wanted(tile)) continue;
        epilogue.consume(StagedTile{tile.band * CLUSTER + (int)block, tile.column, warp - 8, lane, staged,
                                    drained, parity});
        parity ^= 1;
      }
    }
  }
  synchronize_cluster();  // no block ends while others arrive at its barriers
}
