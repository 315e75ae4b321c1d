"""Early arrival: a block counts as done for the finish before it stores rows that the finish does not read.

Kernels, stage 6, a pass on the vectorized kernel. The last block of a kernel, or of a tile, runs the finish, which
reads what the first thread of each block has stored. That rows have been stored too, no block waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel, loads_in
from blufunc.kernels.loopir.ir import Reduce, Store


def arrive_early(s: ScheduledKernel) -> ScheduledKernel:
    """Decide after how many statements a block counts as done, if that is before it stores rows."""
    kernel, mapping = s.kernel, s.mapping
    if not kernel.finish or mapping.threads < mapping.block or mapping.threads == 1:
        return s
    found = {v.attr[0] for t in kernel.finish for v in loads_in(t)}
    stores = [n for n, t in enumerate(kernel.body) if isinstance(t, Store) and t.buffer in found]
    inner = [t for loop in kernel.body for t in getattr(loop, "body", ()) if not isinstance(t, Reduce)]
    if not stores or any(not isinstance(t, Store) or t.buffer in found for t in inner):
        return s
    # what the finish stores may overwrite what other blocks still read
    sizes = {b.size for b in kernel.buffers if b.name in s.aliased}
    if not _stores_of(kernel.body[stores[-1] + 1 :]) or any(
        t.buffer.size in sizes for t in _stores_of(kernel.finish)
    ):
        return s
    return replace(s, arrive_after=stores[-1] + 1)


def _stores_of(body: Sequence[Any]) -> list[Store]:
    """The stores among statements, and in their loops."""
    return [x for s in body for x in (s, *getattr(s, "body", ())) if isinstance(x, Store)]
