"""Values of variables at indices, their names, and the kernels of a region.

Kernels, stage 6, used by ``region.py``. In: a region, and a variable with the index of an element. Out: its value; from
the statements of all points, a launch.

Movement maps the index to the operand's, arithmetic evaluates its operands at the same index, a variable in memory
becomes a load. So a transpose of a slice of a broadcast costs one address computation and no copy. Values are memoized
by index. Buffers and values are named after the user's arguments and the operations that computed them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Literal, Var
from blufunc.core.ops.elementwise import add_p, convert_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.fusion.iteration_space import RANDOM, reduces, scans, scans_by
from blufunc.kernels.loopir.access_map import Place, moves, source_of
from blufunc.kernels.loopir.index import ZERO, Index, Range, flat, of, unflat
from blufunc.kernels.loopir.ir import (
    Buffer,
    Kernel,
    Lanes,
    Reduce,
    Store,
    Total,
    Value,
    apply,
    both,
    const,
    converted,
    fold,
    held_as,
    load,
    post_order,
    read,
    values_of,
    wide_for,
)
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.lower import random
from blufunc.kernels.lower.control_flow import Control
from blufunc.kernels.lower.indexed_reads import RULES
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.target import Target

# -- names ------------------------------------------------------------------------------------------


class Names:
    """Names of buffers and values: the user's arguments, operations for the others."""

    def __init__(self, invars: Sequence[Var], arg_names: Sequence[str]):
        self.paths = dict(zip(invars, arg_names, strict=False))
        self.names: dict[Var, str] = {}
        self.taken: dict[str, int] = {}

    def of(self, v: Var, eqn: Eqn | None) -> str:
        """The name of a variable: a C identifier."""
        name = self.names.get(v)
        if name is None:
            stem = eqn.prim.name if eqn is not None else stem_of(self.paths.get(v))
            name = self.names[v] = self.fresh(re.sub(r"\W+", "_", stem).strip("_") or "x")
        return name

    def fresh(self, stem: str) -> str:
        """``stem``, with a number if it is taken."""
        if stem[0].isdigit():
            stem = f"x{stem}"
        count = self.taken[stem] = self.taken.get(stem, 0) + 1
        return f"{stem}_" if count == 1 and stem in _RESERVED else stem if count == 1 else f"{stem}_{count}"

    def text(self, atom: Any, maker: Callable[[Var], Eqn | None]) -> str:
        """An operand as text."""
        return str(atom.value) if atom.__class__ is Literal else self.of(atom, maker(atom))


_RESERVED = frozenset(
    "and or not xor double float int long short char bool auto const static for if else while do switch case "
    "return void register signed unsigned new delete this class struct union template operator public private "
    "max min abs exp log sin cos tan sqrt floor ceil round pow select i k r g j a t".split()
)


def stem_of(path: str | None) -> str:
    """The last name in the path of an argument; ``x`` for other variables."""
    names = re.findall(r"[A-Za-z_]\w*", path) if path else None
    return names[-1] if names else "x"


def type_text(v: Var) -> str:
    return str(v.aval)


# -- values -----------------------------------------------------------------------------------------


class Values:
    """The values of one region.

    Attributes:
      inputs: the buffers of the variables read so far.
      outputs: the buffers of the variables that the region writes.
      totals: the total of each reduction over lanes.
      scans: the position and the value there of each cumulative operation.
      columns: for each reduction over rows: its operation, its accumulator's dtype, and the value that it accumulates.
      parts: for each full reduction, the buffer of the points' partial results.
      guard: the condition under which memory may be read now; None: always.
    """

    def __init__(self, region: Region, fusion: Fusion, target: Target):
        self.region, self.virtual, self.target = region, fusion.virtual, target
        self.names = Names(fusion.jaxpr.invars, fusion.jaxpr.arg_names)
        self.producers = {v: e for e in region.eqns for v in e.outvars}
        self.inputs: dict[Var, Buffer] = {}
        self.outputs = {
            v: Buffer(self.names.of(v, self.maker(v)), held_as(v.aval.dtype), v.aval.size, True, type_text(v))
            for v in region.outputs
        }
        self.start()

    def start(self) -> None:
        """Forget all values: they belong to loop variables."""
        self.memo: dict[Any, Value] = {}
        self.control: Control | None = None
        self.totals: dict[Var, Total] = {}
        self.scans: dict[Var, tuple[Index, Value]] = {}
        self.columns: dict[Var, tuple[str, np.dtype, Value]] = {}
        self.parts: dict[Var, tuple[Buffer, Scratch]] = {}
        self.guard: Value | None = None

    def maker(self, v: Var) -> Eqn | None:
        """The equation that computes a variable."""
        return self.producers.get(v) or self.virtual.get(v)

    def at(self, atom: Any, place: Place) -> Value:
        """The value of a variable or literal at an index."""
        if atom.__class__ is Literal:
            return const(atom.value, atom.aval.dtype)
        key = (atom, place, self.guard)
        found = self.memo.get(key)
        if found is None:
            eqn = self.maker(atom)
            found = self.loaded(atom, place) if eqn is None else self.computed(eqn, atom, place)
            self.memo[key] = found
        return found

    def loaded(self, v: Var, place: Place) -> Value:
        """An element of a variable in memory."""
        buffer = self.inputs.get(v)
        if buffer is None:
            dtype = held_as(v.aval.dtype)
            buffer = self.inputs[v] = Buffer(self.names.of(v, None), dtype, v.aval.size, note=type_text(v))
        index = flat(place, v.aval.shape)
        key = (buffer, index, self.guard)
        if key not in self.memo:
            self.memo[key] = load(buffer, index, self.guard)
        return self.memo[key]

    def computed(self, eqn: Eqn, v: Var, place: Place) -> Value:
        """An element of an equation's result."""
        if v in self.totals:
            return self.at_total(v)
        if moves(eqn):
            return self.at(eqn.invars[0], source_of(eqn, place))
        prim = eqn.prim
        if reduces(prim):
            return self.folded(eqn, place)
        if scans_by(prim):
            if not scans(eqn):
                return self.at(eqn.invars[0], place)
            position, value = self.scans[v]
            assert flat(place, v.aval.shape) == position, "a scan is read where it is computed"
            return value
        if prim in RULES:
            return RULES[prim](self, eqn, place)
        if prim in RANDOM:
            return random.RULES[prim](eqn, place, self.at)
        if prim in POINTS:
            self.control = self.control or Control()
            return self.control.at(eqn, place, self.guard, self.at)
        assert isinstance(prim, Elementwise) or prim is add_any_p, prim
        args = [self.at(a, place if a.aval.ndim else ()) for a in eqn.invars]
        if prim is convert_p and args[0].dtype == v.aval.dtype:
            return args[0]
        return apply(add_p if prim is add_any_p else prim, args, eqn.params, held_as(v.aval.dtype))

    def guarded(self, condition: Value | None, make: Callable[[], Value]) -> Value:
        """The result of ``make``, which reads memory only where a condition holds."""
        if condition is None:
            return make()
        before = self.guard
        self.guard = both(before, condition)
        try:
            return make()
        finally:
            self.guard = before

    def at_total(self, v: Var) -> Value:
        """A reduction over lanes, converted to its variable's dtype."""
        key = (v, "total")
        if key not in self.memo:
            self.memo[key] = converted(read(self.totals[v]), v.aval.dtype)
        return self.memo[key]

    def folded(self, eqn: Eqn, place: Place) -> Value:
        """A sequential reduction in one lane, for reductions that fit no frame."""
        x, op = eqn.invars[0], eqn.prim.monoid
        axes = sorted(eqn.params["axes"])
        shape = x.aval.shape
        over = Range(f"j{len(self.memo)}", math.prod([shape[d] for d in axes]))
        inner = iter(unflat(of(over), [shape[d] for d in axes]))
        outer = iter(place)
        at = tuple(next(inner) if d in axes else next(outer) for d in range(len(shape)))
        value = self.at(x, at)
        return converted(
            fold(op, over, converted(value, wide_for(eqn.outvars[0].aval.dtype, op))),
            eqn.outvars[0].aval.dtype,
        )

    def reduced(self, eqn: Eqn, element: Place) -> tuple[Value, np.dtype, str]:
        """A reduction's operand at an element, its accumulator's dtype, its operation."""
        op = eqn.prim.monoid
        value = self.at(eqn.invars[0], element)
        dtype = value.dtype if op.startswith("arg") else wide_for(eqn.outvars[0].aval.dtype, op)
        return converted(value, dtype), dtype, op


# -- launches ---------------------------------------------------------------------------------------


class Lowering(Values):
    """Values of one region, and the kernels that compute them."""

    def part(self, v: Var, dtype: np.dtype, count: int) -> Buffer:
        """A buffer for partial results of the total ``v``."""
        scratch = Scratch(dtype, count)
        buffer = Buffer(f"{self.names.of(v, self.maker(v))}_parts", dtype, count, True)
        self.parts[v] = (buffer, scratch)
        return buffer

    def at_the_end(self) -> list[Any]:
        """The finish: reduce the parts of totals, in order; store what depends on them."""
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

    def launch(
        self,
        grid: Sequence[Range],
        body: Sequence[Any],
        more: dict[Buffer, Any] | None = None,
        finish: Sequence[Any] = (),
        over: Sequence[Range] = (),
    ) -> Launch:
        """A kernel and its operands; its finish reduces the parts of totals."""
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
        """A readable name: the user's function, and the operations that stand out."""
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


def roots_of(body: Sequence[Any]) -> list[Value]:
    out: list[Value] = []
    for s in body:
        out.extend(values_of(s))
        out.extend(roots_of(getattr(s, "body", ())))
    return out
