"""Read one lane instead of summing a row under a condition that one lane alone fulfils.

Kernels, stage 6, a pass before online sums and the mapping of threads. A gather of one logit is such a sum. Where a
block has a row, all its threads read that lane before the first loop, and so before an output may be stored in place
of the row. Elsewhere the thread that has the lane reads it, and the reduction tells the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda.device_model import WARP_LANES
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.loopir.index import Index, Range, of
from blufunc.kernels.loopir.ir import (
    Cell,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Rows,
    Substitution,
    Value,
    computed_in,
    post_order,
)
from blufunc.kernels.loopir.replace import reads_replaced


@dataclass(frozen=True)
class OneLane(Lanes):
    """A loop over one of the lanes; its body is one reduction, at the position of that lane."""

    @property
    def lane(self) -> Index:
        """The index of the lane."""
        lane = self.body[0].position
        assert lane is not None
        return lane

    @property
    def head(self) -> str:
        """The first line in the text of a kernel."""
        return f"lane {self.range} = {self.lane}:"


def read_single_lanes(s: ScheduledKernel) -> ScheduledKernel:
    """Replace sums of one lane, which is not kept, by that lane."""
    kernel = s.kernel
    values = post_order(kernel.roots())
    computed = post_order([c for v in values for i in v.indices() for c in computed_in(i)])
    in_indices = {v.attr for v in computed if v.op == "read"}
    body: list[Any] = []
    known: dict[Cell, Value] = {}
    for t in kernel.body:
        t = reads_replaced(known).statement(t) if known else t
        if not isinstance(t, Lanes):
            body.append(t)
            continue
        single = [(r, *found) for r in t.body if (found := _one_lane(r, t.range)) is not None]
        rest = tuple(r for r in t.body if not any(r is x for x, _, _ in single))
        if rest:
            body.append(replace(t, body=rest))
        for r, lane, value in single:
            if _is_of_block(kernel, t) and body and only_reduces(body[0]) and r.total not in in_indices:
                known[r.total] = Substitution({t.range: lane})(value)
            else:
                body.append(OneLane(t.range, (replace(r, value=value, position=lane),), t.note))
    return replace(s, kernel=replace(kernel, body=tuple(body)))


def only_reduces(s: Any) -> bool:
    """Whether a statement is a loop after which threads have synchronized, and before which nothing is stored."""
    return type(s) is Lanes and all(isinstance(t, Reduce) for t in s.body)


def _is_of_block(kernel: Kernel, s: Lanes) -> bool:
    """Whether a block has each of the rows of a loop."""
    return s.range.extent > WARP_LANES and not any(isinstance(t, Rows) for t in kernel.body)


def _one_lane(s: Any, k: Range) -> tuple[Index, Value] | None:
    """The lane, and its value, of a sum of values that are 0 in all other lanes."""
    if type(s) is not Reduce or s.total.op != "sum":
        return None
    v = s.value
    if v.op != "apply" or v.attr[0] is not ew.select_p or v.args[0].op != "within":
        return None
    condition, value, other = v.args
    index, low, high = condition.attr
    if other.op != "const" or other.attr != 0 or high - low != 1 or index.coefficient(k) != 1:
        return None
    if any(x.op == "read" and isinstance(x.attr, (Keep, Prefix)) for x in post_order([value])):
        return None
    lane = of(k) - index + low
    least, most = lane.bounds()
    return (lane, value) if least >= 0 and most < k.extent else None
