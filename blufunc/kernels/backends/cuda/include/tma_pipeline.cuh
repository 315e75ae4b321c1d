// Producer/consumer pipelines on Hopper: one producer thread per block, and consumer warpgroups.
//
// `instructions` wraps single PTX instructions: barriers in shared memory (mbarrier), on which copies may arrive
// by themselves, copies of boxes of a tensor whose bytes a barrier counts (TMA), reductions in memory by one
// thread, named barriers of some of a block's threads, and registers that one warpgroup releases to another.
// `rings` is C++ on top of it: ring buffers in shared memory between the producer and its consumers, without a
// barrier of the whole block.
//
// A barrier's phases are counted from 0. A thread waits for the parity of a phase, so none may lag two phases.

//# instructions
typedef unsigned long long barrier;
struct alignas(64) TensorMap { unsigned long long opaque[16]; };  // made by the driver

inline void make_barrier(barrier *b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// to those who copy, before the first copy
inline void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
inline void arrive(barrier *b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// once all copies that this thread has begun are done; the thread goes on at once
inline void arrive_behind_copies(barrier *b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
// arrives, and expects this number of bytes in the current phase
inline void expect_bytes(barrier *b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
// until a turn is over whose number is odd, or even
inline void wait_for(barrier *b, unsigned odd) {
  unsigned over;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(over)
        : "r"(shared_address(b)), "r"(odd)
        : "memory");
  } while (!over);
}

// A box of a tensor of four axes to shared memory, from these indices on, with zeros for what is outside of the tensor.
inline void copy_box(unsigned to, const TensorMap &map, int i0, int i1, int i2, int i3, barrier *b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(shared_address(b))
      : "memory");
}
// Contiguous bytes; address and size are multiples of 16.
inline void copy_bytes(unsigned to, const void *from, unsigned bytes, barrier *b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(b))
      : "memory");
}

// Four sums that one thread alone adds to, in memory past L1: it goes on at once.
inline void add_in_memory(float *to, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
inline void store_in_memory(float *to, const float (&x)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
inline void load_from_memory(float (&x)[4], const float *from) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from)
               : "memory");
}

// Named barrier of whole warps, by index: 0 is that of the block. A thread that arrives does not wait.
inline void meet(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
inline void pass(int number, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// of a thread of four warps, which all say so
template<int REGISTERS> inline void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template<int REGISTERS> inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

//# rings
// COUNT buffers for tiles of ROWS rows: the n-th fill is in n % COUNT. The last parameter is the number of extra bytes.
template<int COUNT, int ROWS, unsigned BESIDE = 0> struct Ring {
  unsigned buffers;  // where they are in shared memory
  barrier *full;     // one of each buffer, then those of free ones
  static constexpr int BARRIERS = 2 * COUNT;
  static constexpr unsigned BYTES = tile_bytes(ROWS);

  inline void make(int readers) const {  // warps
    for (int i = 0; i < COUNT; ++i) make_barrier(full + i, 1), make_barrier(full + COUNT + i, readers);
  }
  inline unsigned at(unsigned n) const { return buffers + n % COUNT * BYTES; }

  // by one thread: rows from `token` on
  inline void fill(unsigned n, const TensorMap &map, int batch, int head, int token) const {
    barrier *b = full + n % COUNT;
    wait_for(b + COUNT, n / COUNT % 2 ^ 1);
    expect_bytes(b, BYTES + BESIDE);
#pragma unroll
    for (int panel = 0; panel < CHUNKS / PANEL; ++panel)
      copy_box(at(n) + panel * row_bytes(ROWS), map, panel * PANEL * 8, head, token, batch, b);
  }

  inline void fill_beside(unsigned n, unsigned to, const void *from) const {
    copy_bytes(to, from, BESIDE, full + n % COUNT);
  }

  inline void wait_until_full(unsigned n) const { wait_for(full + n % COUNT, n / COUNT % 2); }
  inline void release(unsigned n) const {
    if (threadIdx.x % 32 == 0) arrive(full + COUNT + n % COUNT);
  }
  // what this warp does not read
  inline void pass_on(unsigned n) const {
    wait_until_full(n);
    release(n);
  }
};
