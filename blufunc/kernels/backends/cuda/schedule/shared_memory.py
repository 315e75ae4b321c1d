"""Layout of dynamic shared memory: where keeps, copies of rows and partial accumulations of groups lie.

Kernels, stage 6, the last but one pass. It needs to know which keeps lie in shared memory, and the staged or
prefetched rows. Space for reductions is static: the renderer declares it.
"""

from __future__ import annotations

from dataclasses import replace

from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import (
    ScheduledKernel,
    accumulated_in,
    keep_bytes,
)
from blufunc.kernels.backends.cuda.schedule.thread_mapping import shared_size
from blufunc.kernels.loopir.ir import Buffer, Keep, Rows


def lay_out_shared_memory(s: ScheduledKernel) -> ScheduledKernel:
    """Give keeps and copies of rows their offsets, multiples of 16 bytes."""
    mapping = s.mapping
    sizes: dict[Keep | Buffer, int] = {
        k: shared_size(k, cut, mapping) for k, cut in s.keeps.items() if k in s.in_shared
    }
    # each group has a ring of rows; the groups of a block share a staged row
    sizes |= {b: -(-b.size * b.dtype.itemsize * mapping.sharing // 16) * 16 for b in s.copies}
    offsets, size = {}, 0
    for thing, nbytes in sizes.items():
        offsets[thing] = size
        size += nbytes
    bodies = [
        s.kernel.body,
        *([s.kernel.finish] if any(isinstance(t, Rows) for t in s.kernel.finish) else ()),
    ]
    combined = [s.keeps[k].range.extent * keep_bytes(k) for body in bodies for k in accumulated_in(body)]
    most = max(combined, default=0) * (mapping.sharing - 1) if s.kind == "lanes" else 0
    return replace(s, shared=offsets, combine_at=size, shared_bytes=size + most)
