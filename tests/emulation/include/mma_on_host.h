// The instructions of mma.cuh, tma_pipeline.cuh and tile_gemm.cuh on the host, where each thread is a fiber.
//
// A copy to shared memory is made, and a matmul of a warpgroup computed, only when it is waited for, so that a wait that is
// missing is found; or, EAGER, copies for others are made at once, so that what is given back to them too early is found.
// Clusters have one block. SHARED: bytes of shared memory. A_TURNED, B_TURNED: of `multiply`, whether rows of an operand
// have a term each.

//# instructions
#include <vector>
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
alignas(1024) static unsigned char shared_memory[SHARED];
extern "C" {
unsigned long long multiply_adds;
}  // of warps
extern "C" void begin() {
  memset(shared_memory, 0xff, sizeof shared_memory);  // NaN, of all our types
  multiply_adds = 0;
}

static unsigned shared_address(const void *p) { return (const unsigned char *)p - shared_memory; }
struct TileCopy {
  unsigned to;
  const void *from;
  bool inside;
};
static std::vector<std::vector<TileCopy>>
    tile_copies[1024];  // of each thread; the last vector is not ended yet
static void copy16(unsigned to, const void *from, bool inside) {
  auto &mine = tile_copies[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  mine.back().push_back({to, from, inside});
}
static void end_of_copies() {
  auto &mine = tile_copies[threadIdx.x];
  mine.resize(mine.size() + (mine.empty() ? 2 : 1));
}
template<int LEFT> static void wait_for_copies() {
  auto &mine = tile_copies[threadIdx.x];
  while (mine.size() > LEFT + 1) {
    for (auto &c : mine.front())
      if (c.inside) memcpy(shared_memory + c.to, c.from, 16);
      else memset(shared_memory + c.to, 0, 16);
    mine.erase(mine.begin());
  }
}

static unsigned operands[1024][6];
static void load(unsigned (&r)[4], unsigned from, bool transposed) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  if (EAGER) wait(WAITS_FOR_CLUSTER);  // all others go as far as they can before this is read
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
#include <functional>
static std::vector<std::vector<std::function<void()>>>
    products[1024];  // of each thread; the last vector is not ended
static std::vector<std::function<void()>> &begun_products() {
  auto &mine = products[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  return mine.back();
}
static void begin_products() {}
static void end_of_products() {
  begun_products();
  products[threadIdx.x].emplace_back();
}
template<int LEFT> static void wait_for_groups() {
  auto &mine = products[threadIdx.x];
  if (EAGER) wait(WAITS_FOR_CLUSTER);  // all others go as far as they can before products are computed
  while (mine.size() > LEFT + 1) {
    for (auto &product : mine.front()) product();
    mine.erase(mine.begin());
  }
}
static void settle(float &) {}
// an element of an operand, as PTX describes it: K-major, or transposed, in groups of eight rows
template<bool TRANSPOSED> static float described_element(unsigned long long b, unsigned k, unsigned n) {
  const unsigned start = (b & 0x3fff) << 4, panels = (b >> 16 & 0x3fff) << 4,
                 groups = (b >> 32 & 0x3fff) << 4;
  const unsigned chunks = 16 >> (b >> 62), width = chunks * 8;  // of a row, in 16 bytes and in elements
  unsigned at = TRANSPOSED ? start + n / width * panels + n % width * 2 + k / 8 * groups + k % 8 * chunks * 16
                           : start + n / 8 * groups + n % 8 * chunks * 16 + k * 2;
  at ^= (at >> 7 & (chunks - 1)) << 4;
  uint16_t bits;
  memcpy(&bits, shared_memory + at, 2);
  return low_half(bits);
}
template<bool TURNED, int N>
static void times_shared_now(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < 4; ++i) {
      if (!add) c[n][i] = 0;
      for (int k = 0; k < 16; ++k)
        c[n][i] += described_element<TURNED>(a, k, row + i / 2 * 8) *
                   described_element<TURNED>(b, k, n * 8 + lane % 4 * 2 + i % 2);
    }
}
template<int N>
static void group_times_rows(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  begun_products().push_back([&c, a, b, add] { times_shared_now<false>(c, a, b, add); });
}
template<int N>
static void group_times_turned(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  begun_products().push_back([&c, a, b, add] { times_shared_now<true>(c, a, b, add); });
}
template<int N>
static void times_columns_now(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) operands[threadIdx.x][i] = a[i];
  wait(WAITS_FOR_WARP);
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 16; ++k) {
        unsigned x = operands[warp + lane / 4 * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
        float y = described_element<true>(b, k, n * 8 + lane % 4 * 2 + i % 2);
        c[n][i] += (k % 2 ? high_half(x) : low_half(x)) * y;
      }
    }
  wait(WAITS_FOR_WARP);
}
template<int N>
static void group_times_columns(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
  begun_products().push_back([&c, &a, b] { times_columns_now(c, a, b); });
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
static std::vector<BoxCopy> boxes;
static void make(const BoxCopy &copy);
static void begin(const BoxCopy &copy) {
  if (EAGER) make(copy);
  else boxes.push_back(copy);
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
// so are those that a thread has begun, one by one
struct TileCopies {
  std::vector<TileCopy> copies;
  barrier *behind;
};
static std::vector<TileCopies> begun_by_threads;
static void make_begun(barrier *b);
static void arrive_behind_copies(barrier *b) {
  auto &mine = tile_copies[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  begun_by_threads.push_back({mine.back(), b});
  mine.back().clear();
  if (EAGER) make_begun(b);
}
static void make_begun(barrier *b) {
  std::vector<TileCopies> kept;
  for (auto &begun : begun_by_threads)
    if (begun.behind == b) {
      for (auto &c : begun.copies)
        if (c.inside) memcpy(shared_memory + c.to, c.from, 16);
        else memset(shared_memory + c.to, 0, 16);
      count(b, 1, 0);
    } else kept.push_back(begun);
  begun_by_threads = kept;
}
static void wait_for(barrier *b, unsigned odd) {
  const volatile uint16_t &turn = ((Counts *)b)->turn;
  while (turn % 2 == odd) {
    std::vector<BoxCopy> kept;
    for (auto &copy : boxes)
      if (copy.behind == b) make(copy);
      else kept.push_back(copy);
    boxes = kept;
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
template<int N>
static void multiply_now(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < 4; ++i) {
      if (!add) c[n][i] = 0;
      for (int k = 0; k < 16; ++k)
        c[n][i] += described_element<A_TURNED>(a, k, row + i / 2 * 8) *
                   described_element<B_TURNED>(b, k, n * 8 + lane % 4 * 2 + i % 2);
    }
}
template<int N> static void multiply(float (&c)[N][4], unsigned long long a, unsigned long long b, bool add) {
  begun_products().push_back([&c, a, b, add] { multiply_now(c, a, b, add); });
}
// of a cluster of one block
static void copy_box_to_all(unsigned to, const TensorMap &map, int i0, int i2, barrier *b) {
  copy_box(to, map, i0, 0, i2, 0, b);
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
