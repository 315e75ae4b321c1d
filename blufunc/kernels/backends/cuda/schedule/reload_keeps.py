"""Reload what is the same for all points and rows, instead of keeping it.

Kernels, stage 6, a pass before the mapping of threads. A keep that only holds an element that every point and every
row reads, such as a scale of a normalisation, costs registers, while the element is in a cache nearby: loops load it
again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.loopir.index import ranges_of
from blufunc.kernels.loopir.ir import Cell, Set, Store, Value, computed_in, post_order
from blufunc.kernels.loopir.replace import reads_replaced


def reload_keeps(s: ScheduledKernel) -> ScheduledKernel:
    """Drop keeps of loads that vary with neither point nor row."""
    kernel = s.kernel
    sets = [t for t in kernel.statements() if isinstance(t, Set)]
    times = Counter(t.keep for t in sets)
    values = post_order(kernel.roots())
    in_indices = post_order([c for v in values for i in v.indices() for c in computed_in(i)])
    needed = {v.attr for v in in_indices if v.op == "read"}
    # sizes of outputs that may lie in an input's place while points still read it
    overwritten = {t.buffer.size for t in replace(kernel, finish=()).statements() if isinstance(t, Store)}
    found: dict[Cell, Value] = {}
    for t in sets:
        if t.value.op != "load" or t.value.args or t.keep in needed or times[t.keep] > 1:
            continue
        buffer, index = t.value.attr
        if buffer.size not in overwritten and not buffer.written and ranges_of(index) <= {t.keep.lanes}:
            found[t.keep] = t.value
    if not found:
        return s

    def without_sets(t: Any) -> Any:
        if not hasattr(t, "body"):
            return t
        dropped = lambda x: isinstance(x, Set) and x.keep in found
        return replace(t, body=tuple(without_sets(x) for x in t.body if not dropped(x)))

    reloaded = reads_replaced(found)
    return replace(
        s, kernel=replace(kernel, body=tuple(reloaded.statement(without_sets(t)) for t in kernel.body))
    )
