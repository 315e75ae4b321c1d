"""Warps of a block that copy for others, and groups of warps in turns: text that kernels for Hopper stand on.

Kernels, stage 6, below ``cuda_attention_hopper``. ``INSTRUCTIONS`` wraps single PTX instructions: barriers in shared
memory (mbarrier), on which copies arrive by themselves when they are done, barriers of some of a block's threads, and
registers that one group of warps leaves to another. ``RINGS`` is C++ on top of it: buffers in shared memory that go
round between those who fill them and those who read them, without a barrier of the whole block.

A barrier's turns are counted from 0; it is waited for by whether the turn is even or odd, so that those who wait must
not be two turns behind.
"""

from __future__ import annotations

INSTRUCTIONS = r"""
typedef unsigned long long barrier;
inline void make_barrier(barrier *b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(arrivals) : "memory");
}
inline void arrive(barrier *b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(shared_address(b)) : "memory");
}
// when all copies that this thread has begun are done; the thread goes on at once
inline void arrive_behind_copies(barrier *b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared_address(b)) : "memory");
}
// until as many have arrived as are to in a turn, which is even or odd
inline void wait_for(barrier *b, unsigned odd) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(odd) : "memory");
  } while (!done);
}

// Barriers of so many threads, by number: 0 is that of the block. Whole warps come; who meets others waits for them.
inline void meet(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
inline void pass(int number, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// of a thread of four warps, which all say so
template<int REGISTERS> inline void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template<int REGISTERS> inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
"""

RINGS = r"""
// COUNT buffers, of which the n-th filling is in n % COUNT.
template<int COUNT, unsigned BYTES> struct Ring {
  unsigned buffers;  // where they are in shared memory
  barrier *full;     // one of each buffer, and behind these those of free ones
  static constexpr int BARRIERS = 2 * COUNT;

  inline void make(int fillers, int readers) const {  // threads, and warps
    for (int i = 0; i < COUNT; ++i) make_barrier(full + i, fillers), make_barrier(full + COUNT + i, readers);
  }
  inline unsigned at(unsigned n) const { return buffers + n % COUNT * BYTES; }

  inline void wait_until_free(unsigned n) const { wait_for(full + COUNT + n % COUNT, n / COUNT % 2 ^ 1); }
  inline void copies_begun(unsigned n) const { arrive_behind_copies(full + n % COUNT); }

  // Copies are writes of threads, and products of groups read otherwise: readers have fence_for_products() behind this.
  inline void wait_until_full(unsigned n) const { wait_for(full + n % COUNT, n / COUNT % 2); }
  inline void release(unsigned n) const {
    if (threadIdx.x % 32 == 0) arrive(full + COUNT + n % COUNT);
  }
};
"""
