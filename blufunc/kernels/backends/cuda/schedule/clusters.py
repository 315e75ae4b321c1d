"""Clusters: shapes of the thread-block clusters that share a staged row.

Kernels, stage 6, below ``shared_rows.py``. In: the size of a row and device limits. Out: blocks per cluster and
threads per block. From compute capability 9.0 the blocks of a cluster are co-scheduled and form one thread group: each
keeps its share of a row in its own shared memory. Reductions combine the blocks' results in rank order, so they are
deterministic and the same in all blocks.

``include/cluster.cuh`` has the device functions.
"""

# measured: barriers of the cluster take 5% more time. Bulk copies: 16384 rows of 128256 floats, with loss and gradient,
# at 94% of the speed of a plain copy instead of 91%, and 8192 rows of 50304 at 96% instead of 93% (H200)

from __future__ import annotations

from typing import NamedTuple

from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.device_model import WARP, Limits


class Shape(NamedTuple):
    """Blocks of a row.

    Attributes:
      cluster: blocks that share it.
      threads: threads per block.
      resident: blocks that fit on an SM.
    """

    cluster: int
    threads: int
    resident: int

    def slots(self, vectors: int) -> int:
        """Vectors that a block has space for: a whole row, or an even share per thread."""
        if self.cluster == 1:
            return vectors
        return -(-vectors // (self.cluster * self.threads)) * self.threads


def cluster_shape(vectors: int, vector_bytes: int, limits: Limits) -> Shape | None:
    """Cluster shape for rows of ``vectors`` vectors; None if a row does not fit.

    While the blocks of a cluster synchronize, another cluster uses the memory system. So several blocks per SM are
    best, with as much of its shared memory as possible; then small clusters, which are easier to place: one block if
    two rows fit.
    """
    found: dict[tuple[bool, int], Shape] = {}
    for cluster in range(1, limits.cluster + 1):
        share = -(-vectors // cluster)
        for resident, wanted in device.CLUSTER_THREADS.items():
            steps = min(device.UNROLLED_VECTORS, -(-share // wanted))
            shape = Shape(cluster, -(-share // (WARP * steps)) * WARP, resident)
            room = resident * (shape.slots(vectors) * vector_bytes + device.RESERVED_SHARED_BYTES)
            if room <= limits.shared_bytes and shape.threads <= device.BLOCK_LIMIT:
                used = 16 * resident * share * vector_bytes // limits.shared_bytes  # in sixteenths
                # a block alone on its SM prefers a small cluster
                found.setdefault((True, used) if resident > 1 else (False, cluster), shape)
    return found[max(found)] if found else None
