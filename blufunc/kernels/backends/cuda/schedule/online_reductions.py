"""Online reductions: two dependent reductions of a row in a single pass.

Kernels, stage 6. ``take_online_sums`` is a pass before the thread mapping. Softmax and cross-entropy reduce a row
twice: ``top = max x``, then ``mass = sum exp(x - top)``. A thread can do both in one pass by rescaling its sum at each
new maximum; so can the reduction across threads (M. Milakov and N. Gimelshein, "Online normalizer calculation for
softmax", 2018).

``take_moments`` is a pass after the thread mapping. A variance has two dependent sums: of the values, and of squared
deviations from their mean. Each thread can instead use the mean of its own values. Two groups of ``n`` values each
combine by

    sum, spread = sum_a + sum_b, spread_a + spread_b + (sum_a - sum_b)^2 / (2 n)

(T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
with equal counts). There is no cancellation: it is as accurate as two passes, and threads synchronize once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.codegen.scalar_ops import is_small_float
from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import (
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Set,
    Store,
    Total,
    Value,
    post_order,
    values_of,
)

# -- maximum and mass -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlineSum(Reduce):
    """Accumulates ``total``, a maximum, and ``mass``, the sum of exp below it."""

    mass: Total | None = None

    @property
    def is_narrow(self) -> bool:
        """True if the values are float32 converted from a 16-bit input."""
        v = self.value
        loaded = v.op == "apply" and v.attr[0] is ew.convert_p and v.args[0].op == "load"
        return v.dtype == dtypes.float32 and loaded and is_small_float(v.args[0].dtype)

    @property
    def suffix(self) -> str:
        """Suffix of the printed statement."""
        return f", {self.mass} sum= exp(... - {self.total})"


def take_online_sums(s: ScheduledKernel) -> ScheduledKernel:
    """Fuse sums of exponentials with their maximum, if no value is kept in between.

    Threads do not synchronize after a loop without a reduction. Such a loop must not read lane-invariant data that a
    result may overwrite; ``aliased`` inputs may be such data.
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
    """True if a loop has no reduction left and reads lane-invariant ``aliased`` data."""
    if any(isinstance(t, Reduce) for t in rest):
        return False
    loads = [v for t in rest for v in post_order(values_of(t)) if v.op == "load"]
    return any(v.attr[0].name in aliased and lanes not in v.ranges() for v in loads)


def _loads_only(v: Value) -> bool:
    """True if a value does not depend on earlier loops."""
    return dtypes.is_floating(v.dtype) and all(x.op != "read" for x in post_order([v]))


def _sum_below(later: Sequence[Any], k: Range, top: Reduce) -> tuple[Lanes, Reduce, Value] | None:
    """Loop and reduction of ``exp(x - top)``, and its ``x``; 16-bit values as float32."""
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
    """``x`` if a value is ``exp(x - top)``, where ``top`` is the maximum of ``x``."""
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
    """True if a value is the total, or its ``max`` with minus infinity."""
    if v.op == "apply" and v.attr[0] is ew.max_p:
        reads = [a for a in v.args if a.op == "read"]
        bounds = [a for a in v.args if a.op == "const" and float(a.attr) == -math.inf]
        return len(reads) == len(bounds) == 1 and _is_top(reads[0], top)
    return v.op == "read" and v.attr is top


def _needed_elsewhere(v: Value, loop: Lanes, own: Reduce) -> bool:
    """True if other statements of the loop compute the value too."""
    return v in post_order([x for s in loop.body if s is not own for x in values_of(s)])


# -- Welford moments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread(Reduce):
    """Adds squared deviations from the mean of a thread's values to ``total``.

    ``sum`` is the sum of the values; both are reduced across threads together.
    """

    sum: Total | None = None

    @property
    def suffix(self) -> str:
        """Suffix of the printed statement."""
        return f", squared about the mean of {self.sum}"


def take_moments(s: ScheduledKernel) -> ScheduledKernel:
    """Sum squared deviations as ``Spread``, if only they depend on the mean.

    Threads must have equal lane counts and belong to one block.
    """
    threads, body = s.mapping.threads, list(s.kernel.body)
    if s.mapping.cluster > 1 or threads == 1 or any(isinstance(t, Rows) for t in body):
        return s
    loops = [n for n, t in enumerate(body) if type(t) is Lanes]
    for first, second in itertools.pairwise(loops):
        for r in [r for r in body[first].body if type(r) is Reduce and r.total.op == "sum"]:
            over = body[first].range
            if body[second].range is not over or s.cuts[over].vector.extent % threads:
                continue
            found = _squares_about(r, body[first], body[second])
            if s.aliased and any(isinstance(t, Store) for t in body[first + 1 : second]):
                continue  # it may overwrite data that other threads still read: they must synchronize first
            if found is None or _is_awaited(r.total, body[first + 1 : second + 1], found[0]):
                continue
            squares, value = found
            spread = Spread(squares.total, value, None, r.total)
            statements = tuple(spread if t is squares else t for t in body[second].body)
            body[second] = replace(body[second], body=statements)
    return replace(s, kernel=replace(s.kernel, body=tuple(body)))


def sums_of_spreads(kernel: Kernel) -> dict[Total, Total]:
    """Sums that are reduced together with a spread, and their spreads."""
    found = (t for s in kernel.body if isinstance(s, Lanes) for t in s.body)
    return {t.sum: t.total for t in found if isinstance(t, Spread) and t.sum is not None}


def _squares_about(r: Reduce, first: Lanes, second: Lanes) -> tuple[Reduce, Value] | None:
    """Sum of squared deviations of the values of ``r``, and the value there."""
    dtype = r.total.dtype
    if not dtypes.is_floating(dtype) or dtype.itemsize < 4 or r.value.dtype != dtype:
        return None
    kept = {s.keep: s.value for s in first.body if isinstance(s, Set)}
    for s in second.body:
        if type(s) is not Reduce or s.total.op != "sum" or s.total.dtype != dtype:
            continue
        value = _centred(_root_of_square(s.value), r.total, first.range.extent)
        if value is not None and value.dtype == dtype and _are_same(r.value, value, kept):
            return s, value
    return None


def _root_of_square(v: Value) -> Value | None:
    if v.op != "apply":
        return None
    if v.attr[0] is ew.square_p:
        return v.args[0]
    return v.args[0] if v.attr[0] is ew.mul_p and v.args[0] is v.args[1] else None


def _centred(v: Value | None, total: Total, count: int) -> Value | None:
    """Minuend of ``v`` if it subtracts the mean ``total / count``; otherwise None."""
    if v is None or v.op != "apply" or v.attr[0] not in (ew.add_p, ew.sub_p):
        return None
    sign = 1 if v.attr[0] is ew.sub_p else -1
    sides = [(0, 1)] if sign == 1 else [(0, 1), (1, 0)]
    return next((v.args[a] for a, b in sides if _is_mean(v.args[b], total, sign * count)), None)


def _is_mean(v: Value, total: Total, count: int) -> bool:
    """True if a value is ``total / count``."""
    if v.op != "apply" or v.attr[0] not in (ew.mul_p, ew.div_p):
        return False
    by = [a.attr for a in v.args if a.op == "const"]
    of = [a for a in v.args if a.op == "read" and a.attr is total]
    if len(by) != 1 or len(of) != 1:
        return False
    if v.attr[0] is ew.div_p:
        return v.args[0] is of[0] and by[0] == v.dtype.type(count)
    return math.isclose(by[0], 1 / count, rel_tol=2 * float(dtypes.finfo(v.dtype).eps))


def _are_same(a: Value, b: Value, kept: Mapping[Keep, Value]) -> bool:
    """True if values are structurally identical after replacing keeps by their values."""
    numbers: dict[Hashable, int] = {}
    known: dict[Value, int] = {}
    for v in post_order([a, *kept.values(), b]):
        if v.op == "read" and v.attr in kept and kept[v.attr] in known:
            known[v] = known[kept[v.attr]]
            continue
        attr = (v.attr[0], *sorted(map(str, v.attr[1].items()))) if v.op == "apply" else v.attr
        simple = v.op in ("apply", "load", "number", "within", "read")
        key = (v.op, v.dtype, attr, *[known[x] for x in v.args]) if simple else v
        known[v] = numbers.setdefault(key, len(numbers))
    return known[a] == known[b]


def _is_awaited(total: Total, later: Sequence[Any], squares: Reduce) -> bool:
    """True if a statement other than ``squares`` reads a total."""
    for s in later:
        inner = [t for t in getattr(s, "body", (s,)) if t is not squares]
        values = post_order([v for t in inner for v in values_of(t)])
        if any(v.op == "read" and v.attr is total for v in values):
            return True
    return False
