"""Kernels put together: names, notes and operands, what loops keep, and what is done when all points are done.

Kernels, stage 6, below ``region.py``. In: the statements of a region's points. Out: launches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Var
from blufunc.kernels.fusion.iteration_space import reduces, scans_by
from blufunc.kernels.loopir.index import ZERO, Range, of
from blufunc.kernels.loopir.ir import (
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Store,
    Total,
    Value,
    load,
    outside,
    post_order,
)
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.lower.names import type_text
from blufunc.kernels.lower.row_loops import (
    is_scanned,
    roots_of,
    shared_between,
    with_keeps,
    with_late_stores,
    with_scans,
)
from blufunc.kernels.lower.values import Values

_KEEP_COST = 8  # operations from which on a value is kept for the next loop rather than computed again


class Lowering(Values):
    """One region on its way to LoopIR."""

    def part(self, v: Var, dtype: np.dtype, count: int) -> Buffer:
        """Memory for what is added up at the end to ``v``."""
        scratch = Scratch(dtype, count)
        buffer = Buffer(f"{self.names.of(v, self.maker(v))}_parts", dtype, count, True)
        self.parts[v] = (buffer, scratch)
        return buffer

    def at_the_end(self) -> list[Any]:
        """What is done when all points are: totals are added up, in order, and what is computed of them is stored."""
        self.guard = None
        loops: dict[int, list[Any]] = {}
        for v, (buffer, _) in self.parts.items():
            e = self.producers[v]
            total = Total(self.names.of(v, e), buffer.dtype, e.prim.monoid)
            self.totals[v] = total
            loops.setdefault(buffer.size, []).append((total, buffer))
        body: list[Any] = []
        for count, totals in loops.items():
            q = Range("q", count)
            body.append(Lanes(q, tuple(Reduce(t, load(b, of(q))) for t, b in totals)))
        for v, b in self.outputs.items():
            if v in self.parts or v in self.region.numbers:
                body.append(Store(b, ZERO, self.at(v, (ZERO,) * v.aval.ndim)))
        return body

    # -- what a row keeps ----------------------------------------------------------------------

    def kept(self, body: list[Any]) -> list[Any]:
        """Let loops keep for later loops of the row what these would have to compute, or read, again.

        What is scanned again stands alone in its loop. So where a row is scanned several times, scans are kept.
        """
        loops = [s for s in body if isinstance(s, Lanes)]
        if len(loops) < 2:
            return body
        k = loops[0].range
        wanted = shared_between(loops, k, self.worth)
        if sum(k.extent * v.dtype.itemsize for v in wanted) > self.target.keep_bytes:
            wanted = shared_between(loops, k, is_scanned) if len(self.scans) > 1 else []
            body = with_late_stores(body)
        keeps = {v: Keep(f"{self.keep_name(v)}_{n}", v.dtype, k) for n, v in enumerate(wanted)}
        return with_scans(with_keeps(body, keeps) if keeps else body)

    def keep_name(self, v: Value) -> str:
        if is_scanned(v):
            return f"{v.attr}_kept"
        op = v.attr[0] if v.op == "fold" else v.attr[0].name if v.op in ("apply", "load") else v.op
        return f"{op}_kept"

    def worth(self, v: Value) -> bool:
        """Whether a value is better kept than computed again."""
        if v.op == "load":
            return self.target.keep_loads
        if is_scanned(v):
            return True
        if v.op not in ("apply", "fold", "bits", "result"):
            return False
        cost = 0
        for x in post_order([v], outside):
            if x.op in ("fold", "bits", "result") or is_scanned(x):
                return True
            if x.op == "apply":
                cost += x.attr[0].cost
        return cost >= _KEEP_COST

    # -- putting it together -------------------------------------------------------------------

    def launch(
        self,
        grid: Sequence[Range],
        body: Sequence[Any],
        more: dict[Buffer, Any] | None = None,
        finish: Sequence[Any] = (),
        over: Sequence[Range] = (),
    ) -> Launch:
        """A kernel; where there are parts of totals, its finish adds them up."""
        finish = self.at_the_end() if self.parts else finish
        used = {v.attr[0] for v in post_order([*roots_of(body), *roots_of(finish)]) if v.op == "load"}
        operands: dict[Buffer, Any] = {b: v for v, b in self.inputs.items() if b in used}
        operands.update((b, v) for v, b in self.outputs.items())
        operands.update(self.parts.values())
        operands.update(more or {})
        buffers = tuple(operands)
        name, notes = self.name(), self.notes()
        kernel = Kernel(name, buffers, tuple(grid), tuple(body), notes, tuple(finish), tuple(over))
        return Launch(kernel, operands)

    def name(self) -> str:
        """A name for people: the user's function, and the operations that are not everywhere."""
        eqns = self.region.eqns or [self.virtual[v] for v in self.region.outputs]
        functions = [source.function_of(e.source) for e in eqns if e.source is not None]
        where = re.sub(r"\W", "", functions[-1]).strip("_") if functions else ""
        telling = [e.prim.name for e in eqns if reduces(e.prim) or scans_by(e.prim) or e.prim.cost > 1]
        telling = list(dict.fromkeys(telling))[:3] or [eqns[-1].prim.name]
        return re.sub(r"\W", "_", "_".join([where, *telling] if where else telling))

    def notes(self) -> tuple[str, ...]:
        """The equations, with the user's lines."""
        lines = []
        for e in self.region.eqns or [self.virtual[v] for v in self.region.outputs]:
            ins = " ".join(self.names.text(a, self.maker) for a in e.invars)
            out = e.outvars[0]
            lines.append(
                f"{self.names.of(out, e)}: {type_text(out)} = {e.prim.name} {ins}  # at {source.summary(e.source)}"
            )
        return tuple(lines)
