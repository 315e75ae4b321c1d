"""Replacement of values in statements of LoopIR.

Kernels, stage 6, for passes that rewrite kernels. In: statements, and a rule for values. Out: the statements with other
values; indices, and the values that they are computed from, stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from blufunc.kernels.loopir.index import Index
from blufunc.kernels.loopir.ir import Buffer, Cell, Lanes, Reduce, Rows, Scan, Store, Value, post_order


class Replacement:
    """Replace each value for which ``rule`` gives another; shared values stay shared."""

    def __init__(self, rule: Callable[[Value], Value | None]):
        self.rule = rule
        self.done: dict[Value, Value] = {}

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                args = tuple(self.done[a] for a in v.args)
                same = all(a is b for a, b in zip(args, v.args, strict=True))
                self.done[v] = self.rule(v) or (v if same else Value(v.op, args, v.attr, v.dtype))
        return self.done[value]

    def statement(self, s: Any) -> Any:
        """The statement with its values replaced, those of nested statements too."""
        if isinstance(s, (Lanes, Rows)):
            return replace(s, body=tuple(map(self.statement, s.body)))
        if isinstance(s, Store):
            return Store(s.buffer, s.index, self(s.value), s.guard and self(s.guard))
        if isinstance(s, Reduce):
            return replace(s, value=self(s.value))
        if isinstance(s, Scan):
            return Scan(s.prefix, self(s.value))
        return type(s)(s.keep, self(s.value))


def loads_replaced(s: Lanes, found: Mapping[tuple[Buffer, Index], Value]) -> Lanes:
    """The loop with other values in place of loads without guards."""
    return Replacement(lambda v: found.get(v.attr) if v.op == "load" and not v.args else None).statement(s)


def reads_replaced(found: Mapping[Cell, Value]) -> Replacement:
    """A replacement of reads of totals, keeps and prefixes."""
    return Replacement(lambda v: found.get(v.attr) if v.op == "read" else None)
