// Cooperative functions: reductions and scans of a warp or a block, wide loads and stores.
//
// Results do not depend on timing: every combination is made in an order fixed by the threads' indices, without
// floating-point atomics. Blocks are one-dimensional and of whole warps; all threads of the block, or of the warp, call.

//# Sum
struct Sum {
  template<class T> static T identity() { return T{}; }
  template<class T> static T combine(T x, T y) { return bf_add(x, y); }
};
//# Prod
struct Prod {
  template<class T> static T identity() {
    if constexpr (kind_of<T>::value == KIND_COMPLEX) return T{1, 0};
    else return T(1);
  }
  template<class T> static T combine(T x, T y) { return bf_mul(x, y); }
};
//# Max
struct Max {
  template<class T> static T identity() { return lowest<T>(); }
  template<class T> static T combine(T x, T y) { return bf_max(x, y); }
};
//# Min
struct Min {
  template<class T> static T identity() { return highest<T>(); }
  template<class T> static T combine(T x, T y) { return bf_min(x, y); }
};
//# And
struct And {
  template<class T> static T identity() { return bf_not(T(0)); }
  template<class T> static T combine(T x, T y) { return bf_and(x, y); }
};
//# Or
struct Or {
  template<class T> static T identity() { return T(0); }
  template<class T> static T combine(T x, T y) { return bf_or(x, y); }
};
//# Xor
struct Xor {
  template<class T> static T identity() { return T(0); }
  template<class T> static T combine(T x, T y) { return bf_xor(x, y); }
};

//# LogAddExp
struct LogAddExp {
  template<class T> static T identity() { return -T(INFINITY); }
  template<class T> static T combine(T x, T y) { return bf_logaddexp(x, y); }
};

//# Arg
// a value and where it stood; an index of -1 is no element
template<class T, class I = int32_t> struct Arg {
  T value;
  I index;
};
//# ArgMax
// NumPy's rule: the first of equal values, and the first NaN before all else
struct ArgMax {
  template<class P> static P identity() { return P{decltype(P::value)(0), decltype(P::index)(-1)}; }
  template<class P> static P combine(P a, P b) {
    bool nan_a = a.value != a.value, nan_b = b.value != b.value, first = b.index < a.index;
    bool second = nan_a ? nan_b && first : nan_b || b.value > a.value || (b.value == a.value && first);
    return a.index < 0 ? b : b.index < 0 ? a : second ? b : a;
  }
};
//# ArgMin
struct ArgMin {
  template<class P> static P identity() { return P{decltype(P::value)(0), decltype(P::index)(-1)}; }
  template<class P> static P combine(P a, P b) {
    bool nan_a = a.value != a.value, nan_b = b.value != b.value, first = b.index < a.index;
    bool second = nan_a ? nan_b && first : nan_b || b.value < a.value || (b.value == a.value && first);
    return a.index < 0 ? b : b.index < 0 ? a : second ? b : a;
  }
};
//# Each
// several values of one type at once, T being a vec: one shuffle instead of several
template<class Op> struct Each {
  template<class T> static T identity() {
    T r;
#pragma unroll
    for (auto &x : r.x) x = Op::template identity<typename T::element>();
    return r;
  }
  template<class T> static T combine(T a, T b) {
#pragma unroll
    for (int i = 0; i < T::size; ++i) a.x[i] = Op::combine(a.x[i], b.x[i]);
    return a;
  }
};

//# vec
// V elements that are loaded and stored together; 16 bytes are the most that one instruction moves
template<class T, int V> struct alignas(sizeof(T) * V) vec {
  typedef T element;
  static constexpr int size = V;
  T x[V];
};
//# shuffle_words shuffle_xor shuffle_up shuffle_from
// values of any type, four bytes at a time
template<class T, class F> inline T shuffle_words(T x, F exchange) {
  constexpr int n = (sizeof(T) + 3) / 4;
  uint32_t words[n] = {};
  memcpy(words, &x, sizeof(T));
#pragma unroll
  for (int i = 0; i < n; ++i) words[i] = exchange(words[i]);
  memcpy(&x, words, sizeof(T));
  return x;
}
template<class T> inline T shuffle_xor(T x, int mask) {
  return shuffle_words(x, [=](uint32_t w) { return __shfl_xor_sync(0xffffffffu, w, mask); });
}
template<class T> inline T shuffle_up(T x, int distance) {
  return shuffle_words(x, [=](uint32_t w) { return __shfl_up_sync(0xffffffffu, w, distance); });
}
template<class T> inline T shuffle_from(T x, int lane) {
  return shuffle_words(x, [=](uint32_t w) { return __shfl_sync(0xffffffffu, w, lane); });
}

//# warp_reduce
// over groups of WIDTH lanes, a power of two; every lane gets the result
template<class Op, int WIDTH = 32, class T> inline T warp_reduce(T x) {
#pragma unroll
  for (int mask = WIDTH / 2; mask > 0; mask /= 2) x = Op::combine(x, shuffle_xor(x, mask));
  return x;
}
//# block_reduce
// over THREADS threads, through shared memory for THREADS / 32 values; every thread gets the result.
// REUSED: the memory is free again on return; without it the caller gives other memory next time, and saves a barrier
template<class Op, int THREADS, bool REUSED = true, class T> inline T block_reduce(T x, T *shared) {
  static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is 1 to 32 whole warps");
  constexpr int warps = THREADS / 32;
  x = warp_reduce<Op>(x);
  if constexpr (warps == 1) return x;
  int lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  if constexpr ((warps & (warps - 1)) == 0) {
    x = warp_reduce<Op, warps>(shared[lane % warps]);
  } else {
    x = warp_reduce<Op>(lane < warps ? shared[lane] : Op::template identity<T>());
  }
  if constexpr (REUSED) __syncthreads();
  return x;
}

//# warp_moments
// sums, and sums of squares about the mean, of N values each, of groups of WIDTH lanes; every lane gets those of all
// (Chan, Golub and LeVeque 1979)
template<int N, int WIDTH = 32, class T> inline void warp_moments(T &sum, T &spread) {
#pragma unroll
  for (int mask = WIDTH / 2, n = N; mask > 0; mask /= 2, n *= 2) {
    const T other = shuffle_xor(sum, mask), apart = sum - other;
    spread = (spread + shuffle_xor(spread, mask)) + apart * (apart * (T(0.5) / T(n)));
    sum += other;
  }
}
//# block_moments
// the same of THREADS threads; the memory, for THREADS / 32 pairs, has to be other memory the next time
template<int N, int THREADS, class T> inline void block_moments(T &sum, T &spread, vec<T, 2> *shared) {
  static_assert(THREADS % 32 == 0 && THREADS <= 1024, "a block is 1 to 32 whole warps");
  constexpr int warps = THREADS / 32;
  warp_moments<N>(sum, spread);
  if constexpr (warps == 1) return;
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = {{sum, spread}};
  __syncthreads();
  if constexpr ((warps & (warps - 1)) == 0) {
    sum = shared[lane % warps].x[0];
    spread = shared[lane % warps].x[1];
    warp_moments<32 * N, warps>(sum, spread);
  } else {
    const vec<T, 2> own = lane < warps ? shared[lane] : vec<T, 2>{{T(0), T(0)}};
    sum = warp_reduce<Sum>(own.x[0]);
    const T apart = lane < warps ? own.x[0] - sum / T(warps) : T(0);
    spread = warp_reduce<Sum>(own.x[1] + apart * (apart / T(32 * N)));
  }
}

//# warp_scan
// inclusive, over groups of WIDTH lanes, a power of two, in the order of the lanes or in the REVERSE one
template<class Op, int WIDTH = 32, bool REVERSE = false, class T> inline T warp_scan(T x) {
  const int lane = threadIdx.x % WIDTH, rank = REVERSE ? WIDTH - 1 - lane : lane;
#pragma unroll
  for (int distance = 1; distance < WIDTH; distance *= 2) {
    T before = REVERSE ? shuffle_from(x, (threadIdx.x + distance) % 32) : shuffle_up(x, distance);
    if (rank >= distance) x = Op::combine(before, x);
  }
  return x;
}
//# block_scan
// inclusive, over V values of each of THREADS threads (whole warps, or a power of two of a warp's), in the order
// of the threads or in the REVERSE one; carry precedes all of them, and becomes the total. Several warps reduce
// through THREADS / 32 values of shared memory: other memory than the last time, or after another barrier
template<class Op, int THREADS, bool REVERSE = false, int V, class T>
inline void block_scan(T (&x)[V], T &carry, T *shared) {
  static_assert(THREADS <= 32 || (THREADS % 32 == 0 && THREADS <= 1024), "a block is 1 to 32 whole warps");
  constexpr int width = THREADS < 32 ? THREADS : 32, warps = (THREADS + 31) / 32;
#pragma unroll
  for (int i = 1; i < V; ++i) {
    if constexpr (REVERSE) x[V - 1 - i] = Op::combine(x[V - i], x[V - 1 - i]);
    else x[i] = Op::combine(x[i - 1], x[i]);
  }
  T before = carry, upto = x[REVERSE ? 0 : V - 1];
  if constexpr (THREADS == 1) {
    carry = Op::combine(carry, upto);
  } else {
    const int lane = threadIdx.x % 32, own = threadIdx.x % width, rank = REVERSE ? width - 1 - own : own;
    const int first = lane - own;  // of the group
    upto = warp_scan<Op, width, REVERSE>(upto);
    T previous = shuffle_from(upto, (lane + (REVERSE ? 1 : 31)) % 32);
    if constexpr (warps == 1) {
      carry = Op::combine(carry, shuffle_from(upto, REVERSE ? first : first + width - 1));
    } else {
      const int warp = REVERSE ? warps - 1 - threadIdx.x / 32 : threadIdx.x / 32;
      if (rank == 31) shared[warp] = upto;
      __syncthreads();
      T sums = warp_scan<Op>(lane < warps ? shared[lane] : Op::template identity<T>());
      T others = shuffle_from(sums, warp ? warp - 1 : 0);
      if (warp) before = Op::combine(before, others);
      carry = Op::combine(carry, shuffle_from(sums, warps - 1));
    }
    if (rank) before = Op::combine(before, previous);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = Op::combine(before, x[i]);
}

//# column_scan
// down the columns of a tile of 32, a lane of each of WARPS warps each: inclusive, over the V rows of each warp, one
// warp's after the other's; carry comes before all, and becomes what all combine to. Shared memory is for a value of
// each thread: other memory than the last time
template<class Op, int WARPS, int V, class T> inline void column_scan(T (&x)[V], T &carry, T *shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < V; ++i) x[i] = Op::combine(x[i - 1], x[i]);
  shared[threadIdx.x] = x[V - 1];
  __syncthreads();
  T before = carry;
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) before = carry;
    carry = Op::combine(carry, shared[i * 32 + lane]);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = Op::combine(before, x[i]);
}
//# column_reduce
// over WARPS warps, for each of their 32 lanes, in their order
template<class Op, int WARPS, class T> inline T column_reduce(T x, T *shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  T total = shared[threadIdx.x % 32];
  for (int i = 1; i < WARPS; ++i) total = Op::combine(total, shared[i * 32 + threadIdx.x % 32]);
  return total;
}

//# ptx_arrive
// increments a counter, which wraps from its greatest count to 0, and returns the count before. Stores of this
// thread before the call are visible to threads that observe the count (release); it does not wait for them itself
static inline unsigned ptx_arrive(unsigned *counter, unsigned greatest) {
  unsigned before;
  asm volatile("atom.release.gpu.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(greatest)
               : "memory");
  return before;
}
//# came_last
// the same as last_block, where one thread alone stored what is to be read, and has arrived since: the others give more
// than any count
static inline bool came_last(unsigned before, unsigned n) {
  const bool last = __syncthreads_or(before == n - 1);
  if (last) __threadfence();
  return last;
}

//# last_block
// whether this is the last of n blocks to arrive, so that it can read earlier stores of the others (by vec_ldcg,
// past the L1 of this SM); which block it is varies, what it reads does not. A counter starts at 0 and is 0 again
// for the next launch
static inline bool last_block(unsigned *counter, unsigned n) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(counter, n - 1) == n - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

//# word_of
template<int BYTES> struct word_of { typedef uint4 type; };
template<> struct word_of<1> { typedef unsigned char type; };
template<> struct word_of<2> { typedef unsigned short type; };
template<> struct word_of<4> { typedef unsigned int type; };
template<> struct word_of<8> { typedef uint2 type; };
//# read_words
template<class T, int V, class F> inline vec<T, V> read_words(const T *p, F read) {
  typedef typename word_of<sizeof(T) * V>::type W;
  vec<T, V> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(r) / sizeof(W)); ++i) {
    W word = read(reinterpret_cast<const W *>(p) + i);
    memcpy(reinterpret_cast<char *>(&r) + i * sizeof(W), &word, sizeof(W));
  }
  return r;
}
//# write_words
template<class T, int V, class F> inline void write_words(T *p, vec<T, V> x, F write) {
  typedef typename word_of<sizeof(T) * V>::type W;
#pragma unroll
  for (int i = 0; i < int(sizeof(x) / sizeof(W)); ++i) {
    W word;
    memcpy(&word, reinterpret_cast<const char *>(&x) + i * sizeof(W), sizeof(W));
    write(reinterpret_cast<W *>(p) + i, word);
  }
}
//# vec_load
template<class T, int V> inline vec<T, V> vec_load(const T *p) {
  return read_words<T, V>(p, [](auto word) { return *word; });
}
//# vec_ldg
// memory that is constant while the kernel runs
template<class T, int V> inline vec<T, V> vec_ldg(const T *p) {
  return read_words<T, V>(p, [](auto word) { return __ldg(word); });
}
//# ptx_ldg_held
static inline uint4 ptx_ldg_held(const uint4 *p) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  uint4 r;
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p), "l"(policy));
  return r;
}
//# vec_ldg_held
// the same of 16 bytes or a multiple, which stay in L2 longer than stores do
template<class T, int V> inline vec<T, V> vec_ldg_held(const T *p) {
  static_assert(sizeof(T) * V % 16 == 0, "reads are of 16 bytes");
  return read_words<T, V>(p, [](auto word) { return ptx_ldg_held(word); });
}
//# vec_ldcs
// memory that is read once: it need not stay in the cache
template<class T, int V> inline vec<T, V> vec_ldcs(const T *p) {
  return read_words<T, V>(p, [](auto word) { return __ldcs(word); });
}
//# vec_ldcg
// memory that other blocks have written
template<class T, int V> inline vec<T, V> vec_ldcg(const T *p) {
  return read_words<T, V>(p, [](auto word) { return __ldcg(word); });
}
//# Copying ALONE LONG
// LONG: the 256 bytes around are going to be copied too
enum Copying { ALONE, LONG };
//# ptx_copy ptx_commit_copies ptx_wait_copies
// asynchronous copies of 16 bytes from global to shared memory, bypassing registers. A thread can read its copies
// after it has waited: here until at most a constant number of the groups that it committed are pending
template<Copying HOW> inline void ptx_copy(void *to, const void *from) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (HOW == LONG)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  else asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}
static inline void ptx_commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
static inline void ptx_wait_copies(int left) {
  switch (left) {
    case 15:
      asm volatile("cp.async.wait_group 15;" ::: "memory");
      break;
    case 14:
      asm volatile("cp.async.wait_group 14;" ::: "memory");
      break;
    case 13:
      asm volatile("cp.async.wait_group 13;" ::: "memory");
      break;
    case 12:
      asm volatile("cp.async.wait_group 12;" ::: "memory");
      break;
    case 11:
      asm volatile("cp.async.wait_group 11;" ::: "memory");
      break;
    case 10:
      asm volatile("cp.async.wait_group 10;" ::: "memory");
      break;
    case 9:
      asm volatile("cp.async.wait_group 9;" ::: "memory");
      break;
    case 8:
      asm volatile("cp.async.wait_group 8;" ::: "memory");
      break;
    case 7:
      asm volatile("cp.async.wait_group 7;" ::: "memory");
      break;
    case 6:
      asm volatile("cp.async.wait_group 6;" ::: "memory");
      break;
    case 5:
      asm volatile("cp.async.wait_group 5;" ::: "memory");
      break;
    case 4:
      asm volatile("cp.async.wait_group 4;" ::: "memory");
      break;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}
//# vec_copy
// to shared memory, as ptx_copy does; of 16 bytes or a multiple
template<class T, int V, Copying HOW> inline void vec_copy(T *to, const T *from) {
  static_assert(sizeof(T) * V % 16 == 0, "copies are of 16 bytes");
#pragma unroll
  for (int i = 0; i < int(sizeof(T) * V / 16); ++i)
    ptx_copy<HOW>((char *)to + 16 * i, (const char *)from + 16 * i);
}
//# vec_store
template<class T, int V> inline void vec_store(T *p, vec<T, V> x) {
  write_words(p, x, [](auto to, auto word) { *to = word; });
}
//# vec_stcs
// memory that this kernel does not read again
template<class T, int V> inline void vec_stcs(T *p, vec<T, V> x) {
  write_words(p, x, [](auto to, auto word) { __stcs(to, word); });
}
