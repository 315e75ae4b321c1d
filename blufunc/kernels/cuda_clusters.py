"""Rows that are too long for one block, kept by a cluster: a few blocks that read each other's shared memory.

Kernels, stage 6, below ``cuda_rereads.py``, which asks here whether a cluster has room for a row. On devices of compute
capability 9.0 and more the blocks of a cluster run at the same time, near each other. They are one group of threads:
each keeps its share of a row in its own shared memory, and what the row is reduced to is put together of the blocks'
results in the order of their numbers, so that it is the same each time, and for all of them.

``CLUSTERS`` is text for ``cuda_prelude``. Before a block stores anything in the memory of another, that one has begun;
nobody reads the memory of another, so that none need wait for others at its end.
"""

from __future__ import annotations

from typing import NamedTuple

SHARED_BYTES = 227 << 10
"""What a block may have of shared memory on the device that figures were chosen for."""

CLUSTER_BLOCKS = 8
"""Blocks that a cluster may have on every device that has clusters (CUDA C++ Programming Guide, Thread Block Clusters)."""


class Limits(NamedTuple):
    """What a device allows.

    Attributes:
      shared_bytes: of shared memory for a block.
      cluster: blocks of a cluster; 1: it has no clusters.
    """

    shared_bytes: int = SHARED_BYTES
    cluster: int = CLUSTER_BLOCKS


HOPPER = Limits()
"""The limits of the device that figures were chosen for."""


def limits_of(capability: tuple[int, int], shared_bytes: int) -> Limits:
    """The limits of a device of a compute capability, whose blocks may have so many bytes of shared memory."""
    return Limits(shared_bytes, CLUSTER_BLOCKS if capability >= (9, 0) else 1)


class Shape(NamedTuple):
    """How a row is dealt out.

    Attributes:
      cluster: blocks that share it.
      threads: of each of them.
      resident: how many of them there is room for on a multiprocessor.
    """

    cluster: int
    threads: int
    resident: int

    def slots(self, vectors: int) -> int:
        """How many of a row's vectors a block has room for: as many for each of its threads."""
        return -(-vectors // (self.cluster * self.threads)) * self.threads


def cluster_shape(vectors: int, vector_bytes: int, limits: Limits) -> Shape | None:
    """The clusters for rows of so many vectors; None where there is no room for a row."""
    for resident in (2, 1):
        for cluster in range(2, limits.cluster + 1):
            share = -(-vectors // cluster)
            most = 1024 // resident
            steps = -(-share // most)
            threads = -(-share // steps // 32) * 32
            made = Shape(cluster, threads, resident)
            if steps <= 16 and resident * (made.slots(vectors) * vector_bytes + 3072) <= limits.shared_bytes:
                return made
    return None


CLUSTERS = r"""
//# ptx_cluster_arrive ptx_cluster_wait
// a barrier of all threads of a cluster in two halves: this block has begun; all of them have
static inline void ptx_cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
static inline void ptx_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
//# ptx_cluster_sync
// the whole of it: what any of them stored before, all can read
static inline void ptx_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
//# ptx_in_block
// where that block of the cluster has what lies here in shared memory
template<class T> static inline T* ptx_in_block(T* p, unsigned block) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(block));
  return there;
}
//# cluster_gather
// let all BLOCKS blocks have what each of them found, which its threads know: by way of memory of its own
template<int BLOCKS, class T> inline void cluster_gather(T x, T* found) {
  if (threadIdx.x < BLOCKS) *ptx_in_block(found + blockIdx.x % BLOCKS, threadIdx.x) = x;
  ptx_cluster_sync();
}
//# cluster_reduce
// over BLOCKS blocks of THREADS threads, through shared memory for THREADS / 32 + BLOCKS values, which is not free again;
// every thread gets the result
template<class Op, int THREADS, int BLOCKS, class T> inline T cluster_reduce(T x, T* shared) {
  T* found = shared + THREADS / 32;
  cluster_gather<BLOCKS>(block_reduce<Op, THREADS, false>(x, shared), found);
  x = found[0];
#pragma unroll
  for (int i = 1; i < BLOCKS; ++i) x = Op::combine(x, found[i]);
  return x;
}
//# cluster_under_top
// the maximum of a row, and the sum of exponentials under it, of those that each block found in its share; of a share
// that is minus infinity throughout, nothing is added
template<int BLOCKS, class T> inline void cluster_under_top(T &top, T &mass, vec<T, 2>* found) {
  cluster_gather<BLOCKS>(vec<T, 2>{{top, mass}}, found);
  top = found[0].x[0];
#pragma unroll
  for (int i = 1; i < BLOCKS; ++i) top = bf_max(top, found[i].x[0]);
  mass = top - top == T(0) ? T(0) : T(NAN);
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
    if (found[i].x[0] != -INFINITY) mass += found[i].x[1] * bf_exp(found[i].x[0] - top);
}
"""
