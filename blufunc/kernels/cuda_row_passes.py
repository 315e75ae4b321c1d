"""Fewer passes over rows that are too long to be kept.

Kernels, stage 6, before ``cuda_style.py``. Softmax and cross-entropy reduce a row twice, the second time with what the
first found: ``top = max x``, ``mass = sum exp(x - top)``. A thread can do both at once. It scales what it has summed up
whenever it meets a new maximum, and threads do the same when they meet (M. Milakov and N. Gimelshein, "Online
normalizer calculation for softmax", 2018). And where a row is summed up under a condition that one lane alone
fulfils, only that lane need be read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blufunc.core import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.cuda_schedule import WARP_LANES
from blufunc.kernels.cuda_vectors import totals_replaced
from blufunc.kernels.indices import Index, Range, of
from blufunc.kernels.loopir import (
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Rows,
    Substitution,
    Total,
    Value,
    computed_in,
    post_order,
    values_of,
)
from blufunc.kernels.scalars import is_small_float

ONLINE = """
// takes up some values in their maximum, and in the sum of their exponentials under it. NARROW: they were of 16 bits;
// what is too small to be a normal number is nothing beside the exponential of the maximum, which is 1
template<bool NARROW = false, int V, class T> static inline void take_up(T &top, T &mass, const T (&x)[V]) {
  T most = top;
#pragma unroll
  for (int i = 0; i < V; ++i) most = bf_max(most, x[i]);
  if (!(most <= top)) {
    mass *= bf_exp(top - most);
    top = most;
  }
  const T under = top == -INFINITY ? T(0) : top;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (NARROW) mass += ptx_exp_ftz(x[i] - under);
    else mass += bf_exp(x[i] - under);
  }
}
// the sum under a maximum that others have raised; without bounds there is none
template<class T> static inline T under_top(T mass, T own, T top) {
  return top - top == T(0) ? mass * bf_exp(own - top) : T(NAN);
}
"""


@dataclass(frozen=True)
class OneLane(Lanes):
    """For one of the lanes; the body is one reduction, whose position that lane is."""

    @property
    def lane(self) -> Index:
        """The number of the lane."""
        lane = self.body[0].position
        assert lane is not None
        return lane


@dataclass(frozen=True)
class OnlineSum(Reduce):
    """In lanes: ``total``, a maximum, and ``mass``, the sum of exponentials under it, take up the lane's value."""

    mass: Total | None = None


def with_online_sums(kernel: Kernel, aliased: Collection[str] = ()) -> Kernel:
    """A kernel in which sums of exponentials under a maximum are taken with the maximum, where nothing of the row is
    kept from the loop of the one to that of the other.

    Threads do not meet behind a loop that is left without a reduction: it may not read, whatever the lane, what a row's
    result may be written over. Of ``aliased`` inputs that is not known.
    """
    body = list(kernel.body)
    for at, first in enumerate(body):
        if not isinstance(first, Lanes):
            continue
        for top in [
            r for r in first.body if type(r) is Reduce and r.total.op == "max" and _loads_only(r.value)
        ]:
            found = _sum_under(body[at + 1 :], first.range, top)
            if found is not None:
                second, mass, value = found
                if _reads_for_all(second, mass, aliased):
                    continue
                online = OnlineSum(top.total, value, None, mass.total)
                body[at] = first = replace(first, body=_swapped(first.body, top, online))
                body[body.index(second)] = replace(
                    second, body=tuple(s for s in second.body if s is not mass)
                )
    body = [s for s in body if not isinstance(s, Lanes) or s.body]
    return replace(kernel, body=tuple(body))


def _reads_for_all(second: Lanes, mass: Reduce, aliased: Collection[str]) -> bool:
    """Whether a loop without its sum has no reduction, and reads of these inputs what is one for all lanes."""
    rest = [s for s in second.body if s is not mass]
    if any(isinstance(s, Reduce) for s in rest):
        return False
    loads = [v for s in rest for v in post_order(values_of(s)) if v.op == "load"]
    return any(v.attr[0].name in aliased and second.range not in v.ranges() for v in loads)


def with_single_lanes(kernel: Kernel) -> Kernel:
    """A kernel in which sums of one lane read no others, where these are not kept.

    Where a block does a row, such a sum is the value of that lane to all its threads: they can read it before the first
    loop, and so before an output is written in the place of the row.
    """
    values = post_order(kernel.roots())
    in_indices = {
        v.attr
        for v in post_order([c for v in values for i in v.indices() for c in computed_in(i)])
        if v.op == "read"
    }
    body: list[Any] = []
    known: dict[Total, Value] = {}
    for s in kernel.body:
        s = totals_replaced(s, known)
        if not isinstance(s, Lanes):
            body.append(s)
            continue
        alone = [(t, *found) for t in s.body if (found := _one_lane(t, s.range)) is not None]
        rest = tuple(t for t in s.body if not any(t is x for x, _, _ in alone))
        if rest:
            body.append(replace(s, body=rest))
        for t, lane, value in alone:
            if _is_of_block(kernel, s) and body and only_reduces(body[0]) and t.total not in in_indices:
                known[t.total] = Substitution({s.range: lane})(value)
            else:
                body.append(OneLane(s.range, (replace(t, value=value, position=lane),), s.note))
    return replace(kernel, body=tuple(body))


def only_reduces(s: Any) -> bool:
    """Whether a statement is a loop after which threads have met, and before which nothing is stored."""
    return type(s) is Lanes and all(isinstance(t, Reduce) for t in s.body)


def _is_of_block(kernel: Kernel, s: Lanes) -> bool:
    """Whether a block does each of the rows of a loop."""
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


def _swapped(body: Sequence[Any], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple(new if s is old else s for s in body)


def _loads_only(v: Value) -> bool:
    """Whether a value can be had before other loops have run."""
    return dtypes.is_floating(v.dtype) and all(x.op != "read" for x in post_order([v]))


def _sum_under(later: Sequence[Any], k: Range, top: Reduce) -> tuple[Lanes, Reduce, Value] | None:
    """The loop and the reduction that sums ``exp(x - top)``, and ``x`` there: of narrow numbers, as float32."""
    for loop in later:
        if not isinstance(loop, Lanes) or loop.range is not k:
            continue
        for s in loop.body:
            x = _under(s.value, top) if type(s) is Reduce and s.total.op == "sum" else None
            if x is None or x.dtype.itemsize < 4:
                continue
            if s.value.dtype == s.total.dtype == x.dtype and not _needed_elsewhere(s.value, loop, s):
                return loop, s, x
    return None


def _under(v: Value, top: Reduce) -> Value | None:
    """What a value is the exponential of, less the maximum, if it is one."""
    if v.op != "apply" or v.attr[0] is not ew.exp_p or v.args[0].op != "apply":
        return None
    under = v.args[0]
    if under.attr[0] is not ew.sub_p:
        return None
    x, most = under.args
    if is_small_float(top.value.dtype) and x.op == most.op == "apply" and x.attr == most.attr:
        if x.attr[0] is not ew.convert_p or x.args[0] is not top.value:
            return None
        most = most.args[0]
    elif x is not top.value:
        return None
    return x if _is_top(most, top.total) else None


def _is_top(v: Value, top: Total) -> bool:
    """Whether a value is the total; what is no less than minus infinity is what it was."""
    if v.op == "apply" and v.attr[0] is ew.max_p:
        reads = [a for a in v.args if a.op == "read"]
        bounds = [a for a in v.args if a.op == "const" and float(a.attr) == -math.inf]
        return len(reads) == len(bounds) == 1 and _is_top(reads[0], top)
    return v.op == "read" and v.attr is top


def _needed_elsewhere(v: Value, loop: Lanes, own: Reduce) -> bool:
    """Whether the loop computes the value, or reads the row, all the same."""
    others = [x for s in loop.body if s is not own for x in values_of(s)]
    return v in post_order(others)
