"""Online reductions: a maximum and the sum of exponentials below it, in one pass over a row.

Kernels, stage 6, a pass before the mapping of threads. Softmax and cross-entropy reduce a row twice, the second time
with the result of the first: ``top = max x``, ``mass = sum exp(x - top)``. A thread can do both at once: it rescales
its sum whenever it meets a new maximum, and threads do the same when they reduce (M. Milakov and N. Gimelshein,
"Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.codegen.scalar_ops import is_small_float
from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import Lanes, Reduce, Total, Value, post_order, values_of


@dataclass(frozen=True)
class OnlineSum(Reduce):
    """In lanes: ``total``, a maximum, and ``mass``, the sum of exponentials below it, accumulate the lane's value."""

    mass: Total | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether the values are float32 that were converted from a 16-bit input."""
        v = self.value
        loaded = v.op == "apply" and v.attr[0] is ew.convert_p and v.args[0].op == "load"
        return v.dtype == dtypes.float32 and loaded and is_small_float(v.args[0].dtype)

    @property
    def suffix(self) -> str:
        """The end of the statement in the text of a kernel."""
        return f", {self.mass} sum= exp(... - {self.total})"


def take_online_sums(s: ScheduledKernel) -> ScheduledKernel:
    """Take sums of exponentials below a maximum with the maximum, where nothing of the row is kept between the loops.

    Threads do not synchronize after a loop that is left without a reduction: it must not read, whatever the lane, what
    a result of the row may overwrite. Of ``aliased`` inputs that is not known.
    """
    body = list(s.kernel.body)
    for at, first in enumerate(body):
        if not isinstance(first, Lanes):
            continue
        for top in [
            r for r in first.body if type(r) is Reduce and r.total.op == "max" and _loads_only(r.value)
        ]:
            found = _sum_below(body[at + 1 :], first.range, top)
            if found is not None:
                second, mass, value = found
                rest = tuple(t for t in second.body if t is not mass)
                if _reads_for_all(rest, second.range, s.aliased):
                    continue
                online = OnlineSum(top.total, value, None, mass.total)
                body[at] = first = replace(first, body=tuple(online if t is top else t for t in first.body))
                body[body.index(second)] = replace(second, body=rest)
    body = [t for t in body if not isinstance(t, Lanes) or t.body]
    return replace(s, kernel=replace(s.kernel, body=tuple(body)))


def _reads_for_all(rest: Sequence[Any], lanes: Range, aliased: Collection[str]) -> bool:
    """Whether the rest of a loop has no reduction, and reads of these inputs what is the same for all lanes."""
    if any(isinstance(t, Reduce) for t in rest):
        return False
    loads = [v for t in rest for v in post_order(values_of(t)) if v.op == "load"]
    return any(v.attr[0].name in aliased and lanes not in v.ranges() for v in loads)


def _loads_only(v: Value) -> bool:
    """Whether a value can be computed before other loops have run."""
    return dtypes.is_floating(v.dtype) and all(x.op != "read" for x in post_order([v]))


def _sum_below(later: Sequence[Any], k: Range, top: Reduce) -> tuple[Lanes, Reduce, Value] | None:
    """The loop and the reduction that sums ``exp(x - top)``, and ``x`` there: of 16-bit values, as float32."""
    for loop in later:
        if not isinstance(loop, Lanes) or loop.range is not k:
            continue
        for s in loop.body:
            x = _exponent(s.value, top) if type(s) is Reduce and s.total.op == "sum" else None
            if x is None or x.dtype.itemsize < 4:
                continue
            if s.value.dtype == s.total.dtype == x.dtype and not _needed_elsewhere(s.value, loop, s):
                return loop, s, x
    return None


def _exponent(v: Value, top: Reduce) -> Value | None:
    """``x``, if a value is ``exp(x - top)`` of the value ``x`` that ``top`` is the maximum of."""
    if v.op != "apply" or v.attr[0] is not ew.exp_p or v.args[0].op != "apply":
        return None
    difference = v.args[0]
    if difference.attr[0] is not ew.sub_p:
        return None
    x, most = difference.args
    if is_small_float(top.value.dtype) and x.op == most.op == "apply" and x.attr == most.attr:
        if x.attr[0] is not ew.convert_p or x.args[0] is not top.value:
            return None
        most = most.args[0]
    elif x is not top.value:
        return None
    return x if _is_top(most, top.total) else None


def _is_top(v: Value, top: Total) -> bool:
    """Whether a value is the total; ``max`` of it and minus infinity is the total too."""
    if v.op == "apply" and v.attr[0] is ew.max_p:
        reads = [a for a in v.args if a.op == "read"]
        bounds = [a for a in v.args if a.op == "const" and float(a.attr) == -math.inf]
        return len(reads) == len(bounds) == 1 and _is_top(reads[0], top)
    return v.op == "read" and v.attr is top


def _needed_elsewhere(v: Value, loop: Lanes, own: Reduce) -> bool:
    """Whether other statements of the loop compute the value too."""
    return v in post_order([x for s in loop.body if s is not own for x in values_of(s)])
