"""Loops and branches of grid points inside SIMD loops of the CPU.

Kernels, stage 6, below ``renderer.py``. In: a kernel whose points have loops or branches. Out: C++ that compilers
vectorize. They do not vectorize a loop that calls functions, or whose trip count differs from point to point. So
points run in strips, in lock step: the carries are small arrays, each iteration is a SIMD loop over the strip that
leaves the carries of finished points alone, and the loop ends when all points are finished. A branch with a uniform
condition is evaluated once, before the loops over points; each side has its own loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import CStyle, turns_of
from blufunc.kernels.codegen.scalar_ops import bare
from blufunc.kernels.codegen.scopes import Cell, written_in
from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import (
    BODIES,
    Kernel,
    Loop,
    Replaced,
    Value,
    dependencies,
    outside,
    post_order,
    values_of,
)

_ARITHMETIC = 4
"""Cost of a division; anything more expensive is a function call."""

STRIP = 64
"""Points in lock step: several vectors, to hide latency."""


def loops_in_lock_step(w: CStyle, over: Range, body: Sequence[Any]) -> list[Value]:
    """Loops in a body that compilers do not vectorize, in order of dependence."""
    values = post_order([v for s in body for v in values_of(s)], outside)
    loops = [v for v in values if v.op == "loop" and over in v.ranges() and not _is_simple(v)]
    written = written_in(body)  # values that read what the body writes must stay in place
    return [v for v in loops if written.isdisjoint(w.reads[v])]


def write_strips(
    w: CStyle,
    threads: Sequence[str],
    over: Range,
    loops: Sequence[Value],
    pragma: str,
    writes: Iterable[Cell],
    body: Sequence[Any],
    bounds: tuple[str, str] = ("0", ""),
) -> None:
    """Write a body with its loops in lock step; ``threads`` precedes the strips."""
    writes = frozenset(writes)
    first, last = w.fresh("first"), w.fresh("last")
    start, end = bounds[0], bounds[1] or str(over.extent)
    head = f"for ({w.index_type} {first} = {start}; {first} < {end}; {first} += {STRIP})"
    with w.block([*threads, head], [], writes):
        rest = f"{end} - {first} < {STRIP} ? {end} : {first} + {STRIP}"
        w.line(f"const {w.index_type} {last} = {rest};")
        strip = _Strip(w, over, first, last, writes, _results_in(body))
        for v in loops:
            strip.loop(v)
        with w.block([*[pragma] * bool(pragma), w.loop(over, first, last)], [over], writes):
            w.scope.names.update(strip.known)
            w.body(body)


class _Strip:
    """Loops of one strip; ``known`` maps values in its arrays to expressions."""

    def __init__(
        self,
        style: CStyle,
        over: Range,
        first: str,
        last: str,
        writes: frozenset[Cell],
        results: Sequence[Value],
    ):
        self.style, self.over, self.writes, self.results = style, over, writes, results
        self.head = style.loop(over, first, last)
        self.at = f"[{style.variable(over)} - {first}]"
        self.known: dict[Any, str] = {}

    def array(self, v: Value) -> str:
        """Declare an array and return its element for the current point."""
        name = self.style.temporary()
        # compilers vectorize loads of bytes, but not of booleans
        kind = "uint8_t" if dtypes.is_bool(v.dtype) else scalar_ops.register_type(v.dtype)
        self.style.line(f"alignas(64) {kind} {name}[{STRIP}];")
        return f"{name}{self.at}"

    def read(self, element: str, v: Value) -> str:
        return f"({element} != 0)" if dtypes.is_bool(v.dtype) else element

    def loop(self, v: Value) -> None:
        """Write one loop."""
        loop: Loop = v.attr
        style = self.style
        begin = [*zip(loop.carries, loop.inits(v), strict=True), *((x, x) for x in self.constants(v))]
        elements = {c: self.array(c) for c, _ in begin}
        with style.block(["#pragma omp simd", self.head], [self.over], self.writes):
            style.scope.names.update(self.known)
            style.need([x for _, x in begin])
            style.scope.lines += [f"{elements[c]} = {bare(style.value(x))};" for c, x in begin]
        turn, on = style.temporary(), style.temporary()
        with style.block([turns_of(turn, loop.most)]):
            always = loop.going(v).op == "const" and loop.going(v).attr
            head = ["#pragma omp simd", self.head]
            if not always:
                style.line(f"int {on} = 0;")
                head[0] += f" reduction(| : {on})"
            with style.block(head, [self.over, loop.turn], self.writes):
                self.turn(v, {c: (elements[c], style.temporary()) for c, _ in begin}, "" if always else on)
            if not always:
                style.line(f"if (!{on}) break;")
        ends = {r: elements[loop.carries[r.attr]] for r in self.results if r.args[0] is v}
        self.known.update((r, self.read(e, r)) for r, e in ends.items())

    def turn(self, v: Value, elements: dict[Value, tuple[str, str]], on: str) -> None:
        """Write one iteration of a point; ``on`` names the flag that any point continues."""
        style, loop = self.style, v.attr
        for x, (element, name) in elements.items():
            style.line(f"const {scalar_ops.register_type(x.dtype)} {name} = {self.read(element, x)};")
            style.scope.names[x] = name
        going = style.copied(loop.going(v)) if on else ""
        style.need(loop.nexts(v))
        changed = [(c, x) for c, x in zip(loop.carries, loop.nexts(v), strict=True) if c is not x]
        news = [style.named_value(x) for _, x in changed]
        texts = [
            f"{going} ? {n} : {elements[c][1]}" if on else n for n, (c, _) in zip(news, changed, strict=True)
        ]
        style.scope.lines += [f"{elements[c][0]} = {t};" for (c, _), t in zip(changed, texts, strict=True)]
        if on:
            style.line(f"{on} |= {going} ? 1 : 0;")

    def constants(self, v: Value) -> list[Value]:
        """Loop-invariant values that the body reads and that vary from point to point."""
        # not those of this loop's iterations, nor of loops inside
        known, found, seen = {self.over, *self.style.scope.ranges}, dict[Value, None](), set[Value]()
        stack = list(v.args[len(v.attr.carries) :])
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if not x.ranges() <= known:
                stack.extend(dependencies(x))
            elif self.over in x.ranges() and x not in self.known:
                found[x] = None
        return list(found)


def _is_simple(v: Value) -> bool:
    """True for loops of fixed trip count and plain arithmetic: these vectorize."""
    body = post_order(v.args[len(v.attr.carries) :])
    calls = any(x.op in BODIES or (x.op == "apply" and x.attr[0].cost > _ARITHMETIC) for x in body)
    return v.attr.going(v).op == "const" and not calls


def _results_in(body: Sequence[Any]) -> list[Value]:
    return [v for v in post_order([v for s in body for v in values_of(s)]) if v.op == "result"]


# -- branches ----------------------------------------------------------------------------------------


def uniform_branch(kernel: Kernel) -> Value | None:
    """A branch whose condition is uniform over all points of a kernel."""
    roots = [v for s in kernel.statements() for v in values_of(s)]
    for v in post_order(roots, outside):
        if (
            v.op == "branch"
            and v.ranges()
            and all(x.op != "read" and not x.ranges() for x in post_order(v.args[:1]))
        ):
            return v
    return None


def with_sides(kernel: Kernel, branch: Value) -> list[tuple[Any, ...]]:
    """Two bodies of a kernel, with each side substituted for a branch."""
    results = [v for v in post_order(kernel.roots()) if v.op == "result" and v.args[0] is branch]
    bodies = []
    for side in branch.attr.sides(branch):
        put = Replaced({})
        put.done.update(zip(branch.attr.operands, outside(branch)[1:], strict=True))
        put.done.update([(r, put(side[r.attr])) for r in results])
        bodies.append(tuple(map(put.statement, kernel.body)))
    return bodies
