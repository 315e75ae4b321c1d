// Reductions and bulk copies of the blocks of a cluster, which share a staged row (schedule/shared_rows.py).
//
// Blocks send each other their results, and each waits for them at a barrier that counts bytes; a barrier of the cluster
// would wait for all memory operations of its threads too. Before a block sends anything, the others have begun; and as no
// block reads the memory of another, and each receives everything before it ends, none waits for others at its end. One
// thread copies a block's share of a row in bulk, a piece for each vector of a thread: that takes few registers and no
// other thread's time.

//# ptx_barrier_init ptx_barrier_expect ptx_barrier_wait
// a barrier in shared memory for bytes that other blocks send, in phases: one thread sets the count, any may wait
static inline void ptx_barrier_init(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(barrier))
               : "memory");
}
static inline void ptx_barrier_expect(uint64_t *barrier, unsigned bytes) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(bytes) : "memory");
}
static inline void ptx_barrier_wait(uint64_t *barrier, unsigned turn) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(barrier);
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(place), "r"(turn % 2)
        : "memory");
  } while (!done);
}
//# ptx_send
// stores a word where that block of the cluster has what lies here in shared memory; its barrier counts 4 bytes
static inline void ptx_send(uint32_t *place, unsigned block, uint32_t word, uint64_t *barrier) {
  unsigned to, counted;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(to)
      : "r"((unsigned)__cvta_generic_to_shared(place)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(counted)
      : "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(block));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(word), "r"(counted)
               : "memory");
}
//# ptx_cluster_arrive ptx_cluster_wait
// this block has begun, with its barriers; all blocks of the cluster have
static inline void ptx_cluster_arrive() {
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
static inline void ptx_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
//# ptx_barriers_made
// what copies to this block's memory may count at the barriers that this thread has made
static inline void ptx_barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
//# ptx_bulk_copy
// bytes, a multiple of 16 as the addresses are, from global to shared memory, counted at a barrier as they come
static inline void ptx_bulk_copy(void *to, const void *from, unsigned bytes, uint64_t *barrier) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const unsigned counted = (unsigned)__cvta_generic_to_shared(barrier);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place),
      "l"(from), "r"(bytes), "r"(counted)
      : "memory");
}
//# bulk_row
// begins to copy what a block has of a row of N vectors of V elements: of each STRIDE of them THREADS, from the first
// on. Each such piece has a barrier, to be waited for once
template<int V, int N, int THREADS, int STRIDE, int PIECES, class T>
inline void bulk_row(T *to, const T *from, int first, uint64_t (&came)[PIECES]) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < PIECES; ++i) ptx_barrier_init(came + i);
    ptx_barriers_made();
    for (int i = 0; i < PIECES; ++i, to += THREADS * V, first += STRIDE) {
      const int left = N - first, bytes = (left < THREADS ? left : THREADS) * V * int(sizeof(T));
      if (left <= 0) break;
      ptx_barrier_expect(came + i, bytes);
      ptx_bulk_copy(to, from + first * V, bytes, came + i);
    }
  }
  __syncthreads();
}
//# cluster_begin
// the two barriers of a block, used in turn: no block sends in one gather before all have received the data of the
// last but one
static inline void cluster_begin(uint64_t (&met)[2]) {
  if (threadIdx.x == 0) {
    ptx_barrier_init(met);
    ptx_barrier_init(met + 1);
  }
  ptx_cluster_arrive();
}
//# Sent
template<class T> struct alignas(sizeof(T) % 8 ? 4 : 8) Sent {
  uint32_t words[(sizeof(T) + 3) / 4];
  operator T() const {
    T x;
    memcpy(&x, words, sizeof(T));
    return x;
  }
};
//# cluster_gather
// all-gather of each block's result, which all of its threads hold, to all BLOCKS blocks, in the N-th gather
template<int N, int BLOCKS, class T>
inline void cluster_gather(T x, Sent<T> (&found)[BLOCKS], uint64_t (&met)[2]) {
  uint64_t *barrier = met + N % 2;
  if (threadIdx.x == 0) ptx_barrier_expect(barrier, sizeof(found));
  if (threadIdx.x < BLOCKS) {
    Sent<T> sent = {};
    memcpy(sent.words, &x, sizeof(T));
#pragma unroll
    for (int i = 0; i < int(sizeof(sent) / 4); ++i)
      ptx_send(found[blockIdx.x % BLOCKS].words + i, threadIdx.x, sent.words[i], barrier);
  }
  ptx_barrier_wait(barrier, N / 2);
}
//# cluster_reduce
// over blocks of THREADS threads, through shared memory for THREADS / 32 values and for one of each block; every thread
// gets the result
template<class Op, int THREADS, int N, int BLOCKS, class T>
inline T cluster_reduce(T x, T *shared, Sent<T> (&found)[BLOCKS], uint64_t (&met)[2]) {
  cluster_gather<N>(block_reduce<Op, THREADS, false>(x, shared), found, met);
  x = found[0];
#pragma unroll
  for (int i = 1; i < BLOCKS; ++i) x = Op::combine(x, T(found[i]));
  return x;
}
//# cluster_under_top
// the maximum of a row, and the sum of exponentials under it, of those that each block found in its share; of a share
// that is minus infinity throughout, nothing is added
template<int N, int BLOCKS, class T>
inline void cluster_under_top(T &top, T &mass, Sent<vec<T, 2>> (&found)[BLOCKS], uint64_t (&met)[2]) {
  cluster_gather<N>(vec<T, 2>{{top, mass}}, found, met);
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) top = bf_max(top, vec<T, 2>(found[i]).x[0]);
  mass = top - top == T(0) ? T(0) : T(NAN);
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    const vec<T, 2> share = found[i];
    if (share.x[0] != -INFINITY) mass += share.x[1] * bf_exp(share.x[0] - top);
  }
}
