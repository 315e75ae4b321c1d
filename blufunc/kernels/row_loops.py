"""The loops of a row: which statement stands in which, and what one loop keeps for the next.

Kernels, stage 6, below ``lower.py``. In: reductions and stores, as values of LoopIR. Out: loops over lanes in an order
in which every total is there before it is read, stores as early as they can be, and what a later loop wants is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ops.elementwise import mul_p, rsqrt_p
from blufunc.kernels.indices import Range
from blufunc.kernels.loopir import (
    Keep,
    Lanes,
    Reduce,
    Set,
    Store,
    Total,
    Value,
    apply,
    dependencies,
    outside,
    post_order,
    read,
    values_of,
)


class Levels:
    """How many loops must be over before a value can be computed."""

    def __init__(self, body: Sequence[Any]):
        self.of_total: dict[Any, int] = {}
        loop = 0
        for s in body:
            if isinstance(s, Lanes):
                self.of_total.update((x.total, loop + 1) for x in s.body if isinstance(x, Reduce))
                loop += 1
        self.known: dict[Value, int] = {}

    def of(self, value: Value) -> int:
        for v in post_order([value]):
            if v not in self.known:
                level = self.of_total.get(v.attr, 0) if v.op == "read" else 0
                self.known[v] = max([level, *[self.known[d] for d in dependencies(v)]])
        return self.known[value]


def in_generations(reduces, lane_stores, row_stores, k: Range) -> list[Any]:
    """Loops over lanes: in each the reductions that depend on those before, and every store as soon as it can be."""
    level = Levels(())
    loops: list[list[Any]] = []
    for total, value, position in reduces:  # in order of dependence
        at = level.of(value)
        while len(loops) <= at:
            loops.append([])
        loops[at].append(Reduce(total, value, position))
        level.of_total[total] = at + 1
        level.known = {}
    after: dict[int, list[Any]] = {}
    for s in lane_stores:
        at = level.of(s.value)
        while len(loops) <= at:
            loops.append([])
        loops[at].append(s)
    for s in row_stores:
        after.setdefault(max(level.of(s.value) - 1, 0), []).append(s)
    body: list[Any] = []
    for i, statements in enumerate(loops):
        # stores last: what a reduction of the loop reads may be what a store writes over
        body.append(Lanes(k, tuple(sorted(statements, key=lambda s: isinstance(s, Store)))))
        body.extend(after.get(i, ()))
    return body if loops else [*after.get(0, ())]


def root_apart(value: Value, k: Range) -> tuple[Value, Value] | None:
    """A product as ``(rest, root)``: a reciprocal root of what lanes over ``k`` have added up, and the other factors.

    The sum of the products is the sum of the rests times the root, and need not wait for what is under the root: so the
    gradient of a normalisation has one generation of reductions less. Sums of squares under a root that are finite
    leave room for the sum of the rests. None for other values, and where the rest would have to wait as long.
    """
    if value.op != "apply" or value.attr[0] is not mul_p:
        return None
    for n, factor in enumerate(value.args):
        rest = value.args[1 - n]
        if factor.op == "apply" and factor.attr[0] is rsqrt_p and k not in factor.ranges():
            return (rest, factor) if _totals_in(factor) - _totals_in(rest) else None
    for n, factor in enumerate(value.args):
        found = root_apart(factor, k)
        if found is not None:
            rest = apply(
                mul_p, (found[0], value.args[1]) if n == 0 else (value.args[0], found[0]), {}, value.dtype
            )
            return (rest, found[1]) if _totals_in(found[1]) - _totals_in(rest) else None
    return None


def _totals_in(value: Value) -> set[Total]:
    return {v.attr for v in post_order([value]) if v.op == "read" and isinstance(v.attr, Total)}


def roots_of(body: Sequence[Any]) -> list[Value]:
    out: list[Value] = []
    for s in body:
        out.extend(values_of(s))
        out.extend(roots_of(getattr(s, "body", ())))
    return out


def shared_between(loops: Sequence[Lanes], k: Range, worth: Callable[[Value], bool]) -> list[Value]:
    """The values that a loop needs which an earlier one has computed: of nested ones, the outermost worth keeping."""
    seen: set[Value] = set()
    wanted: dict[Value, None] = {}
    for loop in loops:
        stack = [v for s in loop.body for v in values_of(s)]
        visited: set[Value] = set()
        while stack:
            v = stack.pop()
            if v in visited:
                continue
            visited.add(v)
            if v in seen and k in v.ranges() and worth(v):
                wanted[v] = None
                continue
            stack.extend(outside(v))
        seen.update(post_order([v for s in loop.body for v in values_of(s)]))
    return list(wanted)


def with_keeps(body: Sequence[Any], keeps: dict[Value, Keep]) -> list[Any]:
    """The loops, where the first that computes a value keeps it and later ones read it."""
    have: dict[Value, Value] = {}
    out: list[Any] = []
    for s in body:
        if not isinstance(s, Lanes):
            out.append(s)
            continue
        needed = set(post_order([v for x in s.body for v in values_of(x)]))
        replace = _Replace(dict(have))
        statements = [replace.statement(x) for x in s.body]
        still = set(post_order([v for x in statements for v in values_of(x)]))
        new = [v for v in keeps if v not in have and v in needed and (v in still or replace(v) in still)]
        statements += [Set(keeps[v], replace(v)) for v in new]
        # what is kept is kept before anything is stored over it
        statements.sort(key=lambda x: isinstance(x, Store))
        have.update((v, read(keeps[v])) for v in new)
        out.append(Lanes(s.range, tuple(statements), s.note))
    return out


class _Replace:
    """Puts values in the place of others, in values and statements."""

    def __init__(self, by: dict[Value, Value]):
        self.by = by
        self.done: dict[Value, Value] = dict(by)

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                args = tuple(self.done[a] for a in v.args)
                same = all(a is b for a, b in zip(args, v.args, strict=True))
                self.done[v] = v if same else Value(v.op, args, v.attr, v.dtype)
        return self.done[value]

    def statement(self, s: Any) -> Any:
        if not self.by:
            return s
        if isinstance(s, Store):
            return Store(s.buffer, s.index, self(s.value), None if s.guard is None else self(s.guard))
        if isinstance(s, Reduce):
            return Reduce(s.total, self(s.value), s.position)
        return type(s)(s.keep, self(s.value))
