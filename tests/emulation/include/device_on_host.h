// CUDA on the host: what host compilers read in the place of CUDA's own.
//
// `intrinsics` stands in for functions of one value; `block` runs the threads of a block, and the blocks of a cluster, as
// fibers: a warp runs as far as it can before the next one starts, so that a barrier that is missing is found.

//# intrinsics
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float ptx_rcp(float x) { return 1.0f / x; }
static inline float ptx_exp(float x) { return exp2f(x * 1.44269504f); }
static inline float ptx_exp_ftz(float x) { return ptx_exp(x); }
static inline float ptx_logistic(float x) { return 1.0f / (1.0f + ptx_exp(-x)); }
static inline float ptx_max(float x, float y) { return x > y || x != x ? x : y; }
static inline float ptx_min(float x, float y) { return x < y || x != x ? x : y; }
static inline float ptx_from_f16(uint16_t x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return y;
}
static inline uint16_t ptx_to_f16(float x) {
  _Float16 y = x;
  uint16_t z;
  memcpy(&z, &y, 2);
  return z;
}
static inline uint16_t ptx_to_f16(double x) {
  _Float16 y = x;
  uint16_t z;
  memcpy(&z, &y, 2);
  return z;
}
static inline uint16_t ptx_to_bf16(float x) {
  uint32_t b = __float_as_uint(x);
  return x != x ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

//# block
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#define __global__
#define __shared__ static __attribute__((section("of_block")))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, gridDim;
enum {
  MOST_BLOCKS = 8,
  MOST_THREADS = 1024,
  STACK_BYTES = 1 << 16
};  // of a cluster, of a block, of a thread
// a context makes a fiber; from then on jumps switch to it and back, as they need no call of the system
static jmp_buf scheduler, fibers[MOST_BLOCKS * MOST_THREADS];
static bool made[MOST_BLOCKS * MOST_THREADS];
static char *stacks;
enum State { RUNS, WAITS_FOR_WARP, WAITS_FOR_BLOCK, WAITS_FOR_CLUSTER, DONE };
static State state[MOST_BLOCKS * MOST_THREADS];
static uint32_t slots[MOST_BLOCKS * MOST_THREADS];

// the blocks of a cluster take turns, each with the shared memory that it had
static unsigned rank, blocks;  // of the block that runs, of its cluster
static char *memories[MOST_BLOCKS];
extern char __start_of_block[], __stop_of_block[];
__shared__ __attribute__((used)) int of_block_begins;  // so that there is something
static unsigned self() { return rank * MOST_THREADS + threadIdx.x; }
static unsigned fiber_of(unsigned thread) { return rank * MOST_THREADS + thread; }

static void wait(State s) {
  state[self()] = s;
  if (!_setjmp(fibers[self()])) _longjmp(scheduler, 1);
}
static void __syncthreads() { wait(WAITS_FOR_BLOCK); }
static int __syncthreads_or(int vote) {
  __shared__ int votes;
  votes |= vote;
  __syncthreads();
  const int some = votes;
  __syncthreads();
  votes = 0;
  __syncthreads();
  return some;
}
static uint32_t exchanged(uint32_t x, unsigned lane) {
  slots[self()] = x;
  wait(WAITS_FOR_WARP);
  uint32_t y = slots[self() / 32 * 32 + lane];
  wait(WAITS_FOR_WARP);
  return y;
}
static uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int mask) {
  return exchanged(x, threadIdx.x % 32 ^ mask);
}
static uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return exchanged(x, lane); }
static uint32_t __shfl_up_sync(uint32_t, uint32_t x, int distance) {
  int lane = threadIdx.x % 32 - distance;
  return exchanged(x, lane < 0 ? threadIdx.x % 32 : lane);
}
static void __threadfence() {}
static unsigned atomicInc(unsigned *p, unsigned top) {
  unsigned old = *p;
  *p = old >= top ? 0 : old + 1;
  return old;
}
static unsigned ptx_arrive(unsigned *counter, unsigned greatest) { return atomicInc(counter, greatest); }
template<class W> static W __ldg(const W *p) { return *p; }
template<class W> static W ptx_ldg_held(const W *p) { return *p; }
template<class W> static W __ldcs(const W *p) { return *p; }
template<class W> static W __ldcg(const W *p) { return *p; }
template<class W> static void __stcs(W *p, W x) { *p = x; }
template<class W> static void __stcg(W *p, W x) { *p = x; }

// copies are made when they are waited for, and not before
struct Copy {
  void *to;
  const void *from;
  unsigned group;
};
static Copy copies[MOST_BLOCKS * MOST_THREADS][64];
static unsigned copied[MOST_BLOCKS * MOST_THREADS], groups[MOST_BLOCKS * MOST_THREADS];
template<int HOW> static void ptx_copy(void *to, const void *from) {
  copies[self()][copied[self()]++] = Copy{to, from, groups[self()]};
}
static void ptx_commit_copies() { ++groups[self()]; }
static void ptx_wait_copies(int left) {
  unsigned me = self(), kept = 0;
  for (unsigned i = 0; i < copied[me]; ++i)
    if (int(groups[me] - copies[me][i].group) > left) memcpy(copies[me][i].to, copies[me][i].from, 16);
    else copies[me][kept++] = copies[me][i];
  copied[me] = kept;
}

// barriers count what is still to come, and whether it is known how much that is; their turns end at 0
static const int64_t UNKNOWN = int64_t(1) << 32;
struct Barrier {
  int32_t turn;
  int32_t made;
  int64_t left;
};
static Barrier barriers[MOST_BLOCKS][64];
static uint64_t *places[MOST_BLOCKS][64];
static Barrier &barrier_of(uint64_t *place, unsigned block) {
  for (unsigned i = 0; i < 64; ++i)
    if (places[block][i] == place || !places[block][i]) return places[block][i] = place, barriers[block][i];
  __builtin_trap();
}
static void count(Barrier &b, int64_t change) {
  b.left += change;
  if (!b.left) ++b.turn, b.left = UNKNOWN;
}
static unsigned begun[MOST_BLOCKS], threads_of_block;  // number of a block's threads that have
static void ptx_barrier_init(uint64_t *place) { barrier_of(place, rank) = Barrier{0, 1, UNKNOWN}; }
static void ptx_barrier_expect(uint64_t *place, unsigned bytes) {
  count(barrier_of(place, rank), bytes - UNKNOWN);
}
static void ptx_barriers_made() {}
// copies in bulk too are made when they are waited for
struct Bulk {
  void *to;
  const void *from;
  unsigned bytes;
  uint64_t *barrier;
};
static Bulk bulks[MOST_BLOCKS][64];
static unsigned bulks_made[MOST_BLOCKS];
static void ptx_bulk_copy(void *to, const void *from, unsigned bytes, uint64_t *barrier) {
  if (((uintptr_t)to | (uintptr_t)from | bytes) % 16 || !bytes) __builtin_trap();
  bulks[rank][bulks_made[rank]++] = Bulk{to, from, bytes, barrier};
}
static void copy_bulks(uint64_t *place) {
  unsigned kept = 0;
  for (unsigned i = 0; i < bulks_made[rank]; ++i) {
    const Bulk b = bulks[rank][i];
    if (b.barrier != place) {
      bulks[rank][kept++] = b;
      continue;
    }
    memcpy(b.to, b.from, b.bytes);
    count(barrier_of(place, rank), -int64_t(b.bytes));
  }
  bulks_made[rank] = kept;
}
static void ptx_barrier_wait(uint64_t *place, unsigned turn) {  // not all threads of a warp need come
  copy_bulks(place);
  while (barrier_of(place, rank).turn % 2 == int(turn % 2)) wait(WAITS_FOR_CLUSTER);
}
static void ptx_send(uint32_t *place, unsigned block, uint32_t word, uint64_t *barrier) {
  if (begun[block] < threads_of_block) __builtin_trap();  // that block's memory may be another one's still
  char *there = block == rank ? (char *)place : memories[block] + ((char *)place - __start_of_block);
  memcpy(there, &word, 4);
  count(barrier_of(barrier, block), -4);
}
static void ptx_cluster_arrive() { ++begun[rank]; }
static void ptx_cluster_wait() {
  wait(WAITS_FOR_WARP);
  for (unsigned b = 0; b < blocks; ++b)
    while (begun[b] < threads_of_block) wait(WAITS_FOR_CLUSTER);
}

typedef void (*Entry)(void *, void *, void *, void *);
static Entry entry;
static void *arguments[4];
static void fiber() {
  for (;;) {  // of a thread of each block in turn
    entry(arguments[0], arguments[1], arguments[2], arguments[3]);
    wait(DONE);
  }
}
static void resume() {
  if (_setjmp(scheduler)) return;
  const unsigned me = self();
  if (made[me]) _longjmp(fibers[me], 1);
  made[me] = true;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = stacks + size_t(me) * STACK_BYTES;
  first.uc_stack.ss_size = STACK_BYTES;
  makecontext(&first, fiber, 0);
  setcontext(&first);
}
static bool some(unsigned start, unsigned end, State s) {
  bool found = false;
  for (unsigned t = start; t < end; ++t) found |= state[fiber_of(t)] == s;
  return found;
}
static bool waits(unsigned start, unsigned end, State s) {  // and lets them run
  if (!some(start, end, s) || (s != WAITS_FOR_CLUSTER && some(start, end, WAITS_FOR_CLUSTER))) return false;
  for (unsigned t = start; t < end; ++t)
    if (state[fiber_of(t)] == s) state[fiber_of(t)] = RUNS;
  return true;
}
static void begin(unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) state[fiber_of(t)] = RUNS;
}
extern "C" {
bool backward;
}  // whether the last warp of a block goes first: each order finds other barriers that are missing
static void run(unsigned threads) {  // until all are done, or wait for other blocks
  const unsigned warps = (threads + 31) / 32;
  waits(0, threads, WAITS_FOR_CLUSTER);
  do {
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned warp = 32 * (backward ? warps - 1 - i : i);
      do
        for (unsigned t = warp; t < warp + 32; ++t)
          if (state[fiber_of(t)] == RUNS) {
            threadIdx.x = t;
            resume();
          }
      while (waits(warp, warp + 32, WAITS_FOR_WARP));
    }
  } while (waits(0, threads, WAITS_FOR_BLOCK));
}
extern "C" bool launch(Entry e, unsigned grid, unsigned cluster, unsigned threads, void *a, void *b, void *c,
                       void *d) {
  void *given[4] = {a, b, c, d};
  memcpy(arguments, given, sizeof given);
  entry = e;
  gridDim.x = grid;
  blocks = cluster;
  threads_of_block = threads;
  if (!stacks)  // of which only what is touched is memory
    stacks = (char *)mmap(0, size_t(MOST_BLOCKS * MOST_THREADS) * STACK_BYTES, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const size_t size = __stop_of_block - __start_of_block;
  for (unsigned first = 0; first < grid; first += cluster) {
    memset(begun, 0, sizeof begun);
    memset(places, 0, sizeof places);
    for (rank = 0; rank < cluster; ++rank) {
      begin(threads);
      if (cluster > 1) memories[rank] = (char *)memcpy(realloc(memories[rank], size), __start_of_block, size);
    }
    unsigned done = 0, turns = 0;
    while (done < cluster) {
      if (++turns > 2000) return false;  // they wait for each other
      for (rank = done = 0; rank < cluster; ++rank) {
        blockIdx.x = first + rank;
        if (cluster > 1) memcpy(__start_of_block, memories[rank], size);
        run(threads);
        if (cluster > 1) memcpy(memories[rank], __start_of_block, size);
        done += !some(0, threads, WAITS_FOR_CLUSTER);
      }
    }
  }
  return true;
}

//# rendered
#define __grid_constant__
#define __constant__ static
static inline int min(int x, int y) { return x < y ? x : y; }
static inline long long min(long long x, long long y) { return x < y ? x : y; }
static void __syncwarp() { wait(WAITS_FOR_WARP); }
alignas(128) __shared__ unsigned char shared_memory[SHARED_BYTES];
extern "C" void poison() { memset(shared_memory, 0xa5, sizeof shared_memory); }
