// Matmuls of small matrices on the tensor cores, which hand-written kernels stand on.
//
// `instructions` wraps single PTX instructions of sm_80 and later: copies to shared memory that a thread does not wait
// for, loads of fragments, and the matmul of 16 x 16 and 16 x 8 elements into float32 sums; `wgmma` those of Hopper's
// warpgroups, whose matmuls library/mma.py generates. `tiles` is C++ on top of it: tiles of rows of FEATURES elements in
// shared memory; `warp_products` or `wgmma_products` multiply fragments with such tiles.
//
// A warp holds a matrix in fragments. Of 16 x 8 sums, lane l has [0], [1] in row l / 4, columns l % 4 * 2 and the next,
// and [2], [3] eight rows below; two such fragments side by side, rounded and packed in pairs, are the left operand of
// 16 x 16 of the next matmul. So a chain of matmuls needs no shared memory in between.
//
// Float32 is multiplied as sums of float16 (rewrites/split_float32_attention.py): an operand then has PARTS arrays and
// tiles, and of the matmuls of parts all are added but that of the last two. Long sums are then accumulated outside of the
// tensor cores, which cut off what does not fit (rewrites/split_float32.py).
//
// Macro: ELEMENT, "bf16" or "f16". Constants: FEATURES, a multiple of 16, THREADS, PARTS, 1 or 2, SLICE (`slice_of`), and
// WIDE: whether results are float32.

//# instructions
inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, or zeros unless inside; the thread goes on at once
inline void copy16(unsigned to, const void *from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
inline void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// until this thread's copies are done, but for those before its LEFT last ends_of_copies
template<int LEFT> inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// four matrices of 8 x 8 elements: lane l gives the address of row l % 8 of matrix l / 8
inline void load_matrices(unsigned (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
inline void load_transposed(unsigned (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// c += a b, of 16 x 16 and 16 x 8
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// bits of a float32 rounded to the 11 bits of TF32
inline unsigned to_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
// c += a b, of 16 x 8 and 8 x 8 of these
inline void multiply_add_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// two numbers rounded to elements, the first in the lower half
inline unsigned pack(float low, float high) {
  unsigned r;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

//# unpack bf16
// the two elements of a word as floats
inline float low_half(unsigned x) { return __uint_as_float(x << 16); }
inline float high_half(unsigned x) { return __uint_as_float(x & 0xffff0000u); }

//# unpack f16
// the two elements of a word as floats
inline float half_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
inline float low_half(unsigned x) { return half_float((unsigned short)x); }
inline float high_half(unsigned x) { return half_float((unsigned short)(x >> 16)); }

//# tiles
typedef unsigned short element;  // its bits
template<bool> struct Result { typedef element type; };
template<> struct Result<true> { typedef float type; };
typedef Result<WIDE>::type result;

constexpr int CHUNKS = FEATURES / 8;                                    // of 16 bytes, in a row
constexpr int PANEL = (CHUNKS & -CHUNKS) < 8 ? (CHUNKS & -CHUNKS) : 8;  // those in a row of a panel

// Where a chunk of a row is in a tile: the tile has panels side by side, whose rows are of 32, 64 or 128 bytes. The
// chunks in a row are permuted by its number, so that the same chunk of eight rows lies in all the banks.
template<int ROWS> inline unsigned tile_at(unsigned row, unsigned chunk) {
  unsigned place = chunk % PANEL ^ row / (8 / PANEL) % PANEL;
  return (chunk / PANEL * ROWS + row) * (PANEL * 16) + place * 16;
}
constexpr unsigned row_bytes(int rows) {
  return rows * PANEL * 16;
}  // in a panel; 8 rows on, chunks lie as here
constexpr unsigned tile_bytes(int rows) { return rows * FEATURES * 2; }
constexpr unsigned operand_bytes(int rows) { return PARTS * tile_bytes(rows); }

// Begin to copy ROWS rows to a tile; from is the first of them, and those from there_are on are zeros.
template<int ROWS>
inline void load_tile(unsigned tile, const element *from, long long stride, int there_are) {
  if constexpr (THREADS % CHUNKS == 0) {  // a thread has one column: its addresses are evenly spaced
    constexpr int step = THREADS / CHUNKS;
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    from += row * stride + chunk * 8;
#pragma unroll
    for (int r = 0; r < ROWS; r += step, from += step * stride)
      if (ROWS % step == 0 || row + r < ROWS)
        copy16(tile + tile_at<ROWS>(row + r, chunk), from, row + r < there_are);
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      copy16(tile + tile_at<ROWS>(row, chunk), from + row * stride + chunk * 8, row < there_are);
    }
  }
}

// All parts of an operand: arrays of equal layout, at a constant distance in elements.
template<int ROWS>
inline void load_operand(unsigned tile, const element *from, long long apart, long long stride,
                         int there_are) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    load_tile<ROWS>(tile + part * tile_bytes(ROWS), from + part * apart, stride, there_are);
}

// Rows of a tile, 16 in each of M slabs from `row` on, as left operands.
template<int ROWS, int M> inline void load_left(unsigned (&a)[M][FEATURES / 16][4], unsigned tile, int row) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int k = 0; k < FEATURES / 16; ++k)
      load_matrices(a[m][k], tile + tile_at<ROWS>(row + m * 16 + lane % 16, 2 * k + lane / 16));
}

// Sums of N x 8 columns as left operands: the first part is what they are rounded to, the second what is left.
template<int M, int N> inline void as_left(unsigned (&a)[PARTS][M][N / 2][4], const float (&sums)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < N * 2; ++i) {
      const float *pair = &sums[m][i / 2][i % 2 * 2];
      const unsigned first = a[0][m][i / 4][i % 4] = pack(pair[0], pair[1]);
      if constexpr (PARTS > 1)
        a[1][m][i / 4][i % 4] = pack(pair[0] - low_half(first), pair[1] - high_half(first));
    }
}

// Store rows times `factor`, rounded: through those rows of a tile that this warp alone uses, so that whole chunks go
// out. `to` is the first row of the tile; rows from there_are on are left out.
template<int ROWS, int M>
inline void store_rows(element *to, long long stride, int there_are, unsigned char *tile, int row,
                       const float (&sums)[M][FEATURES / 8][4], const float (&factor)[M][2]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < FEATURES / 8; ++n) {
        const float *pair = &sums[m][n][2 * half];
        unsigned at = tile_at<ROWS>(row + m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4;
        *(unsigned *)(tile + at) = pack(pair[0] * factor[m][half], pair[1] * factor[m][half]);
      }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < M * 16 * CHUNKS; i += 32) {
    int r = row + i / CHUNKS, chunk = i % CHUNKS;
    if (r < there_are)
      *(uint4 *)(to + r * stride + chunk * 8) = *(const uint4 *)(tile + tile_at<ROWS>(r, chunk));
  }
}

// The same of float32, of which four lanes have 32 bytes side by side: they go out as they are.
template<int ROWS, int M>
inline void store_rows(float *to, long long stride, int there_are, unsigned char *, int row,
                       const float (&sums)[M][FEATURES / 8][4], const float (&factor)[M][2]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < FEATURES / 8; ++n) {
        const float *pair = &sums[m][n][2 * half];
        if (r < there_are)
          *(float2 *)(to + r * stride + n * 8 + lane % 4 * 2) =
              make_float2(pair[0] * factor[m][half], pair[1] * factor[m][half]);
      }
    }
}

// Over the four lanes that share the rows of a fragment.
inline float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
inline float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

//# warp_products
// Matmuls of a warp, with `multiply_add`.
constexpr int UNIT = 16 * SLABS;  // rows whose warps go the same way

// Rows of a tile, those of this warp from `row` on, as left operands of many products: in registers if they are few.
template<int ROWS, bool KEPT = PARTS == 1 && FEATURES <= 128> struct Left {
  unsigned rows[SLABS][FEATURES / 16][4];
  inline Left(unsigned tile, int row) { load_left<ROWS>(rows, tile, row); }
  inline void of_columns(unsigned (&a)[4], int, int m, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = rows[m][k][i];
  }
};
template<int ROWS> struct Left<ROWS, false> {
  unsigned tile;
  int row;
  inline Left(unsigned tile, int row) : tile(tile), row(row) {}
  inline void of_columns(unsigned (&a)[4], int part, int m, int k) const {
    const int lane = threadIdx.x % 32;
    load_matrices(
        a, tile + part * tile_bytes(ROWS) + tile_at<ROWS>(row + m * 16 + lane % 16, 2 * k + lane / 16));
  }
};

// The products below are done when the functions return: there is nothing to begin, and nothing to wait for.
inline void begin_products() {}
inline void end_of_products() {}
template<int LEFT, class... Sums> inline void wait_for_products(Sums &...) {}
inline void wait_for_tile() {
  wait_for_copies<0>();
  __syncthreads();
}

// sums = a (rows of a tile from `row` on)^T: 8 N of them
template<int ROWS, int LEFT_ROWS, int M, int N>
inline void times_rows(float (&sums)[M][N][4], const Left<LEFT_ROWS> &a, unsigned tile, int row) {
  int lane = threadIdx.x % 32, mine = lane / 16 * 8 + lane % 8;
  tile += row_bytes(row);
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) sums[i / 4 / N][i / 4 % N][i % 4] = 0;
#pragma unroll
  for (int of_b = PARTS - 1; of_b >= 0; --of_b)  // what is small is added first
#pragma unroll
    for (int k = 0; k < FEATURES / 16; ++k) {
      unsigned left[PARTS][M][4];
#pragma unroll
      for (int of_a = PARTS - 1 - of_b; of_a >= 0; --of_a)
#pragma unroll
        for (int m = 0; m < M; ++m) a.of_columns(left[of_a][m], of_a, m, k);
#pragma unroll
      for (int n = 0; n < N / 2; ++n) {
        unsigned b[4];
        load_matrices(b, tile + of_b * tile_bytes(ROWS) + tile_at<ROWS>(mine, 2 * k + lane / 8 % 2) +
                             row_bytes(16 * n));
#pragma unroll
        for (int of_a = PARTS - 1 - of_b; of_a >= 0; --of_a)
#pragma unroll
          for (int m = 0; m < M; ++m) {
            multiply_add(sums[m][2 * n], left[of_a][m], b[0], b[1]);
            multiply_add(sums[m][2 * n + 1], left[of_a][m], b[2], b[3]);
          }
      }
    }
}

// sums += a (rows of a tile from `row` on): 16 K of them, and of their features the 8 N from FROM on
template<int ROWS, int FROM, int M, int N, int K>
inline void times_columns(float (&sums)[M][N][4], const unsigned (&a)[PARTS][M][K][4], unsigned tile,
                          int row) {
  int lane = threadIdx.x % 32, mine = lane % 16;
  tile += row_bytes(row);
#pragma unroll
  for (int of_b = PARTS - 1; of_b >= 0; --of_b)
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int n = 0; n < N / 2; ++n) {
        unsigned b[4];
        load_transposed(b, tile + of_b * tile_bytes(ROWS) +
                               tile_at<ROWS>(mine, FROM / 8 + 2 * n + lane / 16) + row_bytes(16 * k));
#pragma unroll
        for (int of_a = PARTS - 1 - of_b; of_a >= 0; --of_a)
#pragma unroll
          for (int m = 0; m < M; ++m) {
            multiply_add(sums[m][2 * n], a[of_a][m][k], b[0], b[1]);
            multiply_add(sums[m][2 * n + 1], a[of_a][m][k], b[2], b[3]);
          }
      }
}

//# wgmma
inline void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template<int LEFT> inline void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// the compiler must not read x before, or write it after: an instruction that is under way changes it
inline void settle(float &x) { asm volatile("" : "+f"(x)::"memory"); }

//# wgmma_products
// Matmuls of a warpgroup, which go on while its warps do something else.
static_assert(SLABS == 1, "a warp of a group has 16 rows");
constexpr int UNIT = 64;  // rows whose warps go the same way

template<int M, int N> inline void settle(float (&sums)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) settle(sums[i / 4 / N][i / 4 % N][i % 4]);
}
// until all products are done but those before the LEFT last ends_of_products
template<int LEFT, class... Sums> inline void wait_for_products(Sums &...sums) {
  wait_for_groups<LEFT>();
  (settle(sums), ...);
}
inline void wait_for_tile() {
  wait_for_copies<0>();
  fence_for_products();
  __syncthreads();
}

// Matrix descriptor of a tile: its address, and the strides of panels and of groups of eight rows. All but the
// address is constant, and the offset `further` in a tile is added last: one addition between two matmuls.
template<int ROWS> inline unsigned long long described(unsigned tile, unsigned further) {
  constexpr unsigned swizzle = PANEL == 8 ? 1 : PANEL == 4 ? 2 : 3;
  constexpr unsigned high = swizzle << 30 | row_bytes(8) >> 4, panels = row_bytes(ROWS) >> 4 << 16;
  return (unsigned long long)high << 32 | ((tile >> 4) + (panels + (further >> 4)));
}

// 16 columns of a tile from `row` on
template<int ROWS> inline unsigned long long described(unsigned tile, int row, int k) {
  return described<ROWS>(tile, row_bytes(row) + 2 * k / PANEL * row_bytes(ROWS) + 2 * k % PANEL * 16);
}

// Rows of a tile, 64 of which `row` is one of this warp's, as left operands of many products: they stay where they are.
// (In registers they would be there all the time. ptxas 13.0 gave such registers to other values in a loop.)
template<int ROWS> struct Left {
  unsigned tile;  // from these rows on
  inline Left(unsigned tile, int row) : tile(tile + row_bytes(row / UNIT * UNIT)) {}
};

// sums = a (rows of a tile from `row` on)^T: 8 N of them
template<int ROWS, int LEFT_ROWS, int N>
inline void times_rows(float (&sums)[1][N][4], const Left<LEFT_ROWS> &a, unsigned tile, int row) {
#pragma unroll
  for (int of_b = PARTS - 1; of_b >= 0; --of_b)  // what is small is added first
#pragma unroll
    for (int of_a = PARTS - 1 - of_b; of_a >= 0; --of_a)
#pragma unroll
      for (int k = 0; k < FEATURES / 16; ++k)
        group_times_rows(sums[0], described<LEFT_ROWS>(a.tile + of_a * tile_bytes(LEFT_ROWS), 0, k),
                         described<ROWS>(tile + of_b * tile_bytes(ROWS), row, k), of_b < PARTS - 1 || k > 0);
}

// sums += a (rows of a tile from `row` on): 16 K of them, and of their features the 8 N from FROM on
template<int ROWS, int FROM, int N, int K>
inline void times_columns(float (&sums)[1][N][4], const unsigned (&a)[PARTS][1][K][4], unsigned tile,
                          int row) {
  static_assert(FROM / 8 % PANEL == 0, "the columns of a product begin with a panel");
  tile += FROM / 8 / PANEL * row_bytes(ROWS);
#pragma unroll
  for (int of_b = PARTS - 1; of_b >= 0; --of_b)
#pragma unroll
    for (int of_a = PARTS - 1 - of_b; of_a >= 0; --of_a)
#pragma unroll
      for (int k = 0; k < K; ++k)
        group_times_columns(sums[0], a[of_a][0][k],
                            described<ROWS>(tile + of_b * tile_bytes(ROWS), row_bytes(row + 16 * k)));
}

//# add_columns
// On top of either kind of matmul.
template<int ROWS, int FROM, int M, int K>
inline void add_slice(float (&sums)[M][FEATURES / 8][4], const unsigned (&a)[PARTS][M][K][4], unsigned tile,
                      int row, const float (&units)[M][2]) {
  float more[M][SLICE / 8][4] = {};
  begin_products();
  times_columns<ROWS, FROM>(more, a, tile, row);
  end_of_products();
  wait_for_products<0>(more);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < SLICE / 2; ++i)
      sums[m][FROM / 8 + i / 4][i % 4] += more[m][i / 4][i % 4] * units[m][i % 4 / 2];
}

// Begin to add a (rows of a tile from `row` on) to sums: 16 K of them. Sums of several parts are added up in float32, a
// slice of their features at a time; `units` are what rows of `a` are then multiplied by.
template<int ROWS, int M, int K>
inline void add_columns(float (&sums)[M][FEATURES / 8][4], const unsigned (&a)[PARTS][M][K][4], unsigned tile,
                        int row, const float (&units)[M][2]) {
  if constexpr (PARTS == 1) {
    begin_products();
    times_columns<ROWS, 0>(sums, a, tile, row);
    end_of_products();
  } else {
    add_slice<ROWS, 0>(sums, a, tile, row, units);
    if constexpr (SLICE < FEATURES) add_slice<ROWS, SLICE>(sums, a, tile, row, units);
  }
}
template<int ROWS, int M, int K>
inline void add_columns(float (&sums)[M][FEATURES / 8][4], const unsigned (&a)[PARTS][M][K][4], unsigned tile,
                        int row) {
  float ones[M][2];
#pragma unroll
  for (int i = 0; i < M * 2; ++i) ones[i / 2][i % 2] = 1;
  add_columns<ROWS>(sums, a, tile, row, ones);
}
