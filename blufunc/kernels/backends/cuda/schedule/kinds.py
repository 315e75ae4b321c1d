"""Kinds of kernels: the renderer of each kernel.

Kernels, stage 6, a pass after folds have lanes and before all passes that depend on the thread mapping.

- **points**: no lanes; a thread has a vector of the innermost grid range.
- **lanes**: threads share the lanes of a point.
- **column scan**: rows are sequential, and lanes are independent columns.
- **transpose**: results are contiguous along one range of the grid, some operands along another.
- **group**: kernels of one structure over different arrays, as segments of one grid (``passes.schedule_group``).
"""

from __future__ import annotations

from dataclasses import replace

from blufunc.kernels.backends.cuda.device_model import PARAMETER_BYTES
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel, keeps_read_in, lane_loops
from blufunc.kernels.backends.cuda.schedule.vectorize import best_width
from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import Accumulate, Keep, Kernel, Lanes, Rows, Store, Value, post_order
from blufunc.kernels.lower.horizontal_fusion import structure

_LEAST_TURNED = 16
"""Minimum extent of both ranges of a tile, for it to pay for its barrier."""


def choose_kind(s: ScheduledKernel) -> ScheduledKernel:
    """Choose the kind of a kernel that is not a group."""
    if s.kind == "group":
        return s
    if turned_loads(s.kernel) is not None:
        return replace(s, kind="transpose")
    if _scans_columns(s.kernel):
        return replace(s, kind="column scan")
    return replace(s, kind="lanes" if any(lane_loops(s.kernel.body)) else "points")


def turned_loads(kernel: Kernel) -> tuple[Range, list[Value]] | None:
    """Range along which uncoalesced operands are contiguous, and their loads."""
    if len(kernel.grid) < 2 or kernel.finish or not all(isinstance(s, Store) for s in kernel.body):
        return None
    inner = kernel.grid[-1]
    found: dict[Range, list[Value]] = {}
    values = post_order(kernel.roots())
    if any(v.op == "fold" for v in values):
        return None
    for v in values:
        if v.op == "load" and not v.args and v.attr[1].coefficient(inner) not in (0, 1, None):
            for r in kernel.grid[:-1]:
                if v.attr[1].coefficient(r) == 1 and r.extent > 1:
                    found.setdefault(r, []).append(v)
    if len(found) != 1 or not all(s.index.coefficient(inner) == 1 for s in kernel.body):
        return None
    ((outer, loads),) = found.items()
    return (outer, loads) if min(outer.extent, inner.extent) >= _LEAST_TURNED else None


def _scans_columns(kernel: Kernel) -> bool:
    """True if all of a kernel's rows are sequential and read what they accumulate."""
    if kernel.finish or not kernel.body or not isinstance(kernel.body[0], Rows):
        return False
    rows, *rest = kernel.body
    if any(not isinstance(s, Lanes) for s in (*rows.body, *rest)) or len(rows.body) > 1 or len(rest) > 1:
        return False
    (lanes,) = rows.body
    if any(not isinstance(s, (Accumulate, Store)) for s in lanes.body):
        return False
    scanned = scanned_keeps(lanes)
    if any(not isinstance(t, Store) or keeps_read_in(t) & set(scanned) for s in rest for t in s.body):
        return False
    return rows.index.bounds()[1] < rows.limit and bool(scanned)


def scanned_keeps(lanes: Lanes) -> list[Keep]:
    """Keeps that rows accumulate and read, in order."""
    reads = keeps_read_in(lanes)
    found = [s.keep for s in lanes.body if isinstance(s, Accumulate) and s.keep in reads]
    return list(dict.fromkeys(found))


def group_key(kernel: Kernel) -> tuple | None:
    """Key of kernels that can form a group; None if the kernel cannot be in one."""
    return kernel.memoised("group key", lambda: _group_key(kernel))


def _group_key(kernel: Kernel) -> tuple | None:
    found = structure(kernel)
    return None if found is None else (best_width(kernel, kernel.grid[0]), found)


def group_limit(kernel: Kernel) -> int:
    """Maximum kernels per group: their addresses must fit one parameter."""
    return PARAMETER_BYTES // (8 * len(kernel.buffers))
