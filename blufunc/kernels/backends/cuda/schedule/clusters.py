"""Clusters: the blocks that share a staged row, or one block where that is enough.

Kernels, stage 6, below ``shared_rows.py``. On devices of compute capability 9.0 and more the blocks of a cluster run
at the same time, close to each other. They are one thread group: each keeps its share of a row in its own shared
memory, and reductions combine the blocks' results in the order of their ranks, so that they are deterministic and the
same for all blocks.

``include/cluster.cuh`` has the functions that blocks of a cluster call.
"""

# measured: barriers of the cluster take 5% more time. Bulk copies: 16384 rows of 128256 floats, with loss and gradient,
# at 94% of the speed of a plain copy instead of 91%, and 8192 rows of 50304 at 96% instead of 93% (H200)

from __future__ import annotations

from typing import NamedTuple

from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.device_model import WARP, Limits


class Shape(NamedTuple):
    """The blocks of a row.

    Attributes:
      cluster: blocks that share it.
      threads: of each block.
      resident: blocks that an SM has room for.
    """

    cluster: int
    threads: int
    resident: int

    def slots(self, vectors: int) -> int:
        """Vectors that a block has room for: all of a row, or of its share as many for each thread."""
        if self.cluster == 1:
            return vectors
        return -(-vectors // (self.cluster * self.threads)) * self.threads


def cluster_shape(vectors: int, vector_bytes: int, limits: Limits) -> Shape | None:
    """The clusters for rows of ``vectors`` vectors; None where there is no room for a row.

    While the blocks of a cluster wait for each other, another cluster has memory to itself: so an SM should hold more
    than one block, and use as much of its shared memory as it can. Then the cluster should be small, as all of its
    blocks must find a place at the same time: one block, if two rows have room.
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
                # a block that is alone on its SM had better be small
                found.setdefault((True, used) if resident > 1 else (False, cluster), shape)
    return found[max(found)] if found else None
