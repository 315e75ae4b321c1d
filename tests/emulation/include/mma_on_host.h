// The instructions of mma.cuh, tma_pipeline.cuh and tile_gemm.cuh on the host, where each thread is a fiber.
//
// A copy to shared memory is made, and a matmul of a warpgroup computed, only when it is waited for, so that a wait that is
// missing is found; or, if `eager`, copies for others are made at once, so that what is given back to them too early is
// found.
// Clusters have one block. SHARED: bytes of shared memory. A_TURNED, B_TURNED: of `multiply`, whether rows of an operand
// have a term each.

//# instructions
#undef __launch_bounds__
#define __launch_bounds__(...)
struct float2 { float x, y; };
#define __forceinline__ inline
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline int min(int x, int y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline float __shfl_xor_sync(uint32_t m, float x, int mask) {
  return __uint_as_float(__shfl_xor_sync(m, __float_as_uint(x), mask));
}
static inline float __shfl_sync(uint32_t m, float x, int lane) {
  return __uint_as_float(__shfl_sync(m, __float_as_uint(x), lane));
}
static inline int __shfl_sync(uint32_t m, int x, int lane) { return (int)__shfl_sync(m, (uint32_t)x, lane); }
static inline unsigned __ballot_sync(uint32_t m, bool vote) {
  unsigned votes = (unsigned)vote << threadIdx.x % 32;
  for (int mask = 1; mask < 32; mask *= 2) votes |= __shfl_xor_sync(m, votes, mask);
  return votes;
}
static inline bool __any_sync(uint32_t m, bool vote) { return __ballot_sync(m, vote); }
static void __syncwarp() { wait(WAITS_FOR_WARP); }
static int atomicAdd(int *p, int x) { return (*p += x) - x; }
alignas(1024) static unsigned char shared_memory[SHARED];
extern "C" {
unsigned long long multiply_adds;
}  // of warps
static bool eager;  // not a constant, so that both ways are compiled once
extern "C" void begin(int eagerly) {
  memset(shared_memory, 0xff, sizeof shared_memory);  // NaN, of all our types
  multiply_adds = 0;
  eager = eagerly;
}

static unsigned shared_address(const void *p) { return (const unsigned char *)p - shared_memory; }
// what is not done yet; its methods are few, as g++ takes long over the ones of std::vector
template<class T, unsigned MOST> struct List {
  T items[MOST];
  unsigned count;
  void add(const T &x) {
    if (count == MOST) __builtin_trap();
    items[count++] = x;
  }
  T *begin() { return items; }
  T *end() { return items + count; }
};
struct TileCopy {
  unsigned to;
  const void *from;
  bool inside;
  unsigned group;  // which ends with a later end_of_copies
  unsigned bytes;
};
static List<TileCopy, 256> tile_copies[1024];  // of each thread
static unsigned copy_groups[1024];
static void copy16(unsigned to, const void *from, bool inside) {
  tile_copies[threadIdx.x].add({to, from, inside, copy_groups[threadIdx.x], 16});
}
static void end_of_copies() { ++copy_groups[threadIdx.x]; }
static void make(const TileCopy &c) {
  if (c.inside) memcpy(shared_memory + c.to, c.from, c.bytes);
  else memset(shared_memory + c.to, 0, c.bytes);
}
static void make_tile_copies(unsigned left) {
  auto &mine = tile_copies[threadIdx.x];
  unsigned kept = 0;
  for (const TileCopy &c : mine)
    if (copy_groups[threadIdx.x] - c.group > left) make(c);
    else mine.items[kept++] = c;
  mine.count = kept;
}
template<int LEFT> static void wait_for_copies() { make_tile_copies(LEFT); }

static unsigned operands[1024][6];
static void load(unsigned (&r)[4], unsigned from, bool transposed) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  if (eager) wait(WAITS_FOR_CLUSTER);  // all others go as far as they can before this is read
  operands[threadIdx.x][0] = from;
  wait(WAITS_FOR_WARP);
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      int row = transposed ? lane % 4 * 2 + j : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + j;
      memcpy(&pair[j], shared_memory + operands[warp + i * 8 + row][0] + column * 2, 2);
    }
    r[i] = pair[0] | (unsigned)pair[1] << 16;
  }
  wait(WAITS_FOR_WARP);
}
static void load_matrices(unsigned (&r)[4], unsigned from) { load(r, from, false); }
static void load_transposed(unsigned (&r)[4], unsigned from) { load(r, from, true); }
static float low_half(unsigned);
static float high_half(unsigned);
static void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  multiply_adds += lane == 0;
  for (int i = 0; i < 4; ++i) operands[threadIdx.x][i] = a[i];
  operands[threadIdx.x][4] = b0, operands[threadIdx.x][5] = b1;
  wait(WAITS_FOR_WARP);
  auto half = [](unsigned x, int k) { return k % 2 ? high_half(x) : low_half(x); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      unsigned x = operands[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      unsigned y = operands[warp + column * 4 + k % 8 / 2][4 + k / 8];
      c[i] += half(x, k) * half(y, k);
    }
  }
  wait(WAITS_FOR_WARP);
}
static float exp2_fast(float x) { return exp2f(x); }

//# wgmma
static void fence_for_products() {}
// of N sums of four: a function of no template computes it, as g++ takes long over many instances
struct Product {
  void (*make)(const Product &);
  float (*sums)[4];
  int n;
  const unsigned *held;  // the left operand in registers, or not
  unsigned long long a, b;
  bool add;
  unsigned group;
};
static List<Product, 256> products[1024];  // of each thread
static unsigned product_groups[1024];
static void begin_product(Product p) {
  p.group = product_groups[threadIdx.x];
  products[threadIdx.x].add(p);
}
static void begin_products() {}
static void end_of_products() { ++product_groups[threadIdx.x]; }
static void make_products(unsigned left) {
  auto &mine = products[threadIdx.x];
  if (eager) wait(WAITS_FOR_CLUSTER);  // all others go as far as they can before products are computed
  unsigned made = 0;                   // all groups but the last ones
  while (made < mine.count && product_groups[threadIdx.x] - mine.items[made].group > left) {
    const Product &p = mine.items[made++];
    p.make(p);
  }
  mine.count -= made;
  memmove(mine.items, mine.items + made, mine.count * sizeof(Product));
}
template<int LEFT> static void wait_for_groups() { make_products(LEFT); }
static void settle(float &) {}
// an element of an operand, as PTX describes it: K-major, or transposed, in groups of eight rows
static float described_element(bool transposed, unsigned long long b, unsigned k, unsigned n) {
  const unsigned start = (b & 0x3fff) << 4, panels = (b >> 16 & 0x3fff) << 4,
                 groups = (b >> 32 & 0x3fff) << 4;
  const unsigned log = 4 - (b >> 62), chunks = 1 << log;  // of a row, in 16 bytes
  const unsigned panel = n >> (log + 3), element = n & (chunks * 8 - 1);
  unsigned at = transposed ? start + panel * panels + element * 2 + k / 8 * groups + k % 8 * chunks * 16
                           : start + n / 8 * groups + n % 8 * chunks * 16 + k * 2;
  at ^= (at >> 7 & (chunks - 1)) << 4;
  uint16_t bits;
  memcpy(&bits, shared_memory + at, 2);
  return low_half(bits);
}
static void times_shared(const Product &p, bool a_turned, bool b_turned) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float left[2][16];
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 2; ++i) left[i][k] = described_element(a_turned, p.a, k, row + i * 8);
  for (int n = 0; n < p.n; ++n)
    for (int j = 0; j < 2; ++j) {
      float &c0 = p.sums[n][j], &c1 = p.sums[n][2 + j];
      if (!p.add) c0 = c1 = 0;
      for (int k = 0; k < 16; ++k) {
        const float y = described_element(b_turned, p.b, k, n * 8 + lane % 4 * 2 + j);
        c0 += left[0][k] * y;
        c1 += left[1][k] * y;
      }
    }
}
template<int N>
static void group_times_rows(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  begin_product({[](const Product &p) { times_shared(p, false, false); }, c, N, nullptr, a, b, add, 0});
}
template<int N>
static void group_times_turned(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  begin_product({[](const Product &p) { times_shared(p, true, true); }, c, N, nullptr, a, b, add, 0});
}
static void times_columns(const Product &p) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) operands[threadIdx.x][i] = p.held[i];
  wait(WAITS_FOR_WARP);
  float left[2][16];
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 2; ++i) {
      const unsigned x = operands[warp + lane / 4 * 4 + k % 8 / 2][i + k / 8 * 2];
      left[i][k] = k % 2 ? high_half(x) : low_half(x);
    }
  for (int n = 0; n < p.n; ++n)
    for (int j = 0; j < 2; ++j)
      for (int k = 0; k < 16; ++k) {
        const float y = described_element(true, p.b, k, n * 8 + lane % 4 * 2 + j);
        p.sums[n][j] += left[0][k] * y;
        p.sums[n][2 + j] += left[1][k] * y;
      }
  wait(WAITS_FOR_WARP);
}
template<int N>
static void group_times_columns(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
  begin_product({times_columns, c, N, a, 0, b, true, 0});
}

//# pipeline
#define __grid_constant__
typedef unsigned long long barrier;
struct alignas(64) TensorMap {
  uint64_t address;
  int64_t strides[3];
  uint32_t sizes[4], box[4];
  uint64_t unused[8];
};
struct Counts {
  uint8_t arrivals, left;
  uint16_t turn;
  int32_t bytes;
};  // what a barrier is
static void count(barrier *b, int arrivals, int bytes) {
  Counts &counts = *(Counts *)b;
  counts.left -= arrivals, counts.bytes += bytes;
  if (!counts.left && !counts.bytes) counts.left = counts.arrivals, ++counts.turn;
}
static void make_barrier(barrier *b, int arrivals) {
  *(Counts *)b = Counts{(uint8_t)arrivals, (uint8_t)arrivals, 0, 0};
}
static void barriers_made() {}
static void arrive(barrier *b) { count(b, 1, 0); }
static void expect_bytes(barrier *b, unsigned bytes) { count(b, 1, bytes); }
// a box is copied when its barrier is waited for
struct BoxCopy {
  unsigned to;
  TensorMap map;
  int at[4];
  barrier *behind;
};
static List<BoxCopy, 256> boxes;
static void make(const BoxCopy &copy);
static void begin(const BoxCopy &copy) {
  if (eager) make(copy);
  else boxes.add(copy);
}
static void copy_box(unsigned to, const TensorMap &map, int i0, int i1, int i2, int i3, barrier *b) {
  begin({to, map, {i0, i1, i2, i3}, b});
}
static void copy_bytes(unsigned to, const void *from, unsigned bytes, barrier *b) {
  if (((uintptr_t)from | to | bytes) % 16) __builtin_trap();
  TensorMap map = {(uint64_t)from};
  map.unused[0] = bytes;
  begin({to, map, {}, b});
}
static void make(const BoxCopy &copy) {
  if (const unsigned bytes = copy.map.unused[0]) {
    memcpy(shared_memory + copy.to, (const void *)copy.map.address, bytes);
    return count(copy.behind, 0, -int(bytes));
  }
  const TensorMap &map = copy.map;
  const unsigned row = map.box[0] * 2, chunks = row / 16;
  const auto inside = [&](int axis, int i) { return copy.at[axis] + i < (int)map.sizes[axis]; };
  if (copy.to % (8 * row) || map.box[1] != 1 || map.box[3] != 1) __builtin_trap();
  for (int token = 0; token < (int)map.box[2]; ++token)
    for (unsigned i = 0; i < map.box[0]; ++i) {
      unsigned to = copy.to + token * row + i * 2;
      to ^= (to >> 7 & (chunks - 1)) << 4;
      const char *from = (const char *)map.address + (copy.at[0] + i) * 2 + copy.at[1] * map.strides[0] +
                         (copy.at[2] + token) * map.strides[1] + copy.at[3] * map.strides[2];
      if (inside(0, i) && inside(2, token)) memcpy(shared_memory + to, from, 2);
      else memset(shared_memory + to, 0, 2);
    }
  count(copy.behind, 0, -int(map.box[2] * row));
}
// so are those that a thread has begun, one by one, and then it arrives
struct Begun {
  TileCopy copy;
  bool arrives;  // in place of a copy
  barrier *behind;
};
static List<Begun, 1 << 16> begun_by_threads;
static void make_begun(barrier *b) {
  unsigned kept = 0;
  for (const Begun &x : begun_by_threads)
    if (x.behind != b) begun_by_threads.items[kept++] = x;
    else if (x.arrives) count(b, 1, 0);
    else make(x.copy);
  begun_by_threads.count = kept;
}
static void arrive_behind_copies(barrier *b) {
  auto &mine = tile_copies[threadIdx.x];
  unsigned kept = 0;
  for (const TileCopy &c : mine)
    if (c.group == copy_groups[threadIdx.x]) begun_by_threads.add({c, false, b});
    else mine.items[kept++] = c;
  mine.count = kept;
  begun_by_threads.add({{}, true, b});
  if (eager) make_begun(b);
}
static void wait_for(barrier *b, unsigned odd) {
  const volatile uint16_t &turn = ((Counts *)b)->turn;
  while (turn % 2 == odd) {
    unsigned kept = 0;
    for (const BoxCopy &copy : boxes)
      if (copy.behind == b) make(copy);
      else boxes.items[kept++] = copy;
    boxes.count = kept;
    make_begun(b);
    if (turn % 2 == odd) wait(WAITS_FOR_CLUSTER);
  }
}
static void add_in_memory(float *to, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i) to[i] += x[i];
}
static void store_in_memory(float *to, const float (&x)[4]) { memcpy(to, x, sizeof x); }
static void load_from_memory(float (&x)[4], const float *from) { memcpy(x, from, sizeof x); }
static volatile unsigned come[16], meetings[16];
static void pass(int number, int threads) {
  if (++come[number] == threads) come[number] = 0, ++meetings[number];
}
static void meet(int number, int threads) {
  const unsigned before = meetings[number];
  pass(number, threads);
  while (meetings[number] == before) wait(WAITS_FOR_CLUSTER);
}
template<int> static void leave_registers() {}
template<int> static void take_registers() {}

//# shared_products
template<int N> static void multiply(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  begin_product({[](const Product &p) { times_shared(p, A_TURNED, B_TURNED); }, c, N, nullptr, a, b, add, 0});
}
// of a cluster of one block
static void copy_box_to_all(unsigned to, const TensorMap &map, int i0, int i2, barrier *b) {
  copy_box(to, map, i0, 0, i2, 0, b);
}
static void share_box(unsigned to, const TensorMap &map, int i0, int i1, int i2, int i3, barrier *b) {
  copy_box(to, map, i0, i1, i2, i3, b);
}
static void store_words(void *to, const unsigned (&x)[4]) {
  if ((uintptr_t)to % 16) __builtin_trap();
  memcpy(to, x, 16);
}
static void arrive_at(barrier *b, unsigned) { arrive(b); }
static unsigned block_of_cluster() { return 0; }
static void synchronize_cluster() { __syncthreads(); }
static void prefetch_to_l2(const void *) {}
static float reciprocal_fast(float x) { return 1 / x; }
static unsigned larger_of_two(unsigned x, unsigned y) {
  return pack(fmaxf(low_half(x), low_half(y)), fmaxf(high_half(x), high_half(y)));
}

//# bfloat16
static unsigned pack(float x, float y) { return ptx_to_bf16(x) | (unsigned)ptx_to_bf16(y) << 16; }

//# float16
static float low_half(unsigned x) { return ptx_from_f16(x); }
static float high_half(unsigned x) { return ptx_from_f16(x >> 16); }
static unsigned pack(float x, float y) { return ptx_to_f16(x) | (unsigned)ptx_to_f16(y) << 16; }

//# overlap
static void let_next_kernel_begin() {}
static void wait_for_previous_kernel() {}

//# skinny
static unsigned long long evicted_first() { return 0; }
template<int N> static void load_once(unsigned (&r)[N], const void *from, unsigned long long) {
  if ((uintptr_t)from % (4 * N)) __builtin_trap();
  memcpy(r, from, 4 * N);
}
template<int N> static void load_words(unsigned (&r)[N], const void *from) { load_once(r, from, 0); }
static void wait_for_word(unsigned) {}

//# quantized
static unsigned permuted(unsigned x, unsigned y, unsigned of) {
  const unsigned long long bytes = x | (unsigned long long)y << 32;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)(bytes >> 8 * (of >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}

//# cluster
static unsigned rank_in_cluster() { return 0; }
static void meet_cluster() {}
static float from_block(const float *place, unsigned) { return *place; }
static unsigned __reduce_or_sync(uint32_t m, unsigned x) {
  for (int mask = 1; mask < 32; mask *= 2) x |= __shfl_xor_sync(m, x, mask);
  return x;
}
static unsigned transposed(unsigned x) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  operands[threadIdx.x][0] = x;
  wait(WAITS_FOR_WARP);
  auto at = [&](int row, int column) {
    return operands[warp + row * 4 + column / 2][0] >> column % 2 * 16 & 0xffffu;
  };
  const unsigned y = at(t * 2, g) | at(t * 2 + 1, g) << 16;
  wait(WAITS_FOR_WARP);
  return y;
}

//# pairs
typedef unsigned long long Pair;
static float even_sum(const Pair &sums) { return __uint_as_float((unsigned)(sums >> 32)); }
static float odd_sum(const Pair &sums) { return __uint_as_float((unsigned)sums); }
static Pair pair_of(float even, float odd) {
  return (Pair)__float_as_uint(even) << 32 | __float_as_uint(odd);
}
static void add_even(Pair &sums, float x, float y) { sums = pair_of(even_sum(sums) + x * y, odd_sum(sums)); }
static void add_odd(Pair &sums, float x, float y) { sums = pair_of(even_sum(sums), odd_sum(sums) + x * y); }
static void multiply(Pair &sums, float x) { sums = pair_of(even_sum(sums) * x, odd_sum(sums) * x); }
static void copy4(unsigned to, const void *from, bool inside) {
  tile_copies[threadIdx.x].add({to, from, inside, copy_groups[threadIdx.x], 4});
}
