"""Loops and branches at points, as values of LoopIR.

Kernels, stage 6, used by ``values.py``. In: an equation of ``rewrites/loops/pointwise_control_flow.py``, and the values
of its operands at a point. Out: the value of its result there. The results of one loop share one value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.ops.elementwise import add_p, convert_p, le_p, sub_p
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.loopir.access_map import Place
from blufunc.kernels.loopir.index import ZERO, Range
from blufunc.kernels.loopir.ir import Branch, Loop, Value, apply, branch, carried, const, held_as, loop
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.ops.points import Loop as PointLoop

Evaluate = Callable[[Any, Place], Value]


class Control:
    """The loops and branches of one kernel; ``results`` memoizes their values."""

    def __init__(self) -> None:
        self.results: dict[Any, list[Value]] = {}
        self.turns = itertools.count()

    def at(self, eqn: Eqn, place: Place, guard: Value | None, at: Evaluate) -> Value:
        """The result of an equation at a place; ``at`` evaluates operands under ``guard``."""
        control = eqn.params["control"]
        key = (control, place, guard)
        if key not in self.results:
            shape = eqn.outvars[0].aval.shape
            places = [place if a.aval.shape == shape else (ZERO,) * a.aval.ndim for a in eqn.invars]
            self.results[key] = self.lowered(control, list(map(at, eqn.invars, places)))
        return self.results[key][eqn.params["index"]]

    def lowered(self, control: Any, args: Sequence[Value]) -> list[Value]:
        """The results of a loop or branch of scalars."""
        return (
            self.loop(control, args) if isinstance(control, PointLoop) else self.branch(control.sides, args)
        )

    def loop(self, control: PointLoop, args: Sequence[Value]) -> list[Value]:
        inits, operands = args[: control.carries], args[control.carries :]
        turn = self.turn(control.most or 1)
        carries = [carried(f"c{n}", turn, x.dtype) for n, x in enumerate(inits)]
        going, *nexts = self.body(control.body, [*carries, *operands])
        return loop(Loop(tuple(carries), turn, control.most), inits, going, nexts)

    def branch(self, sides: Sequence[Jaxpr], args: Sequence[Value]) -> list[Value]:
        """The first side if the index is at most 0, else one of the others."""
        index, *operands = args
        if len(sides) == 1:
            return self.body(sides[0], operands)
        turn = self.turn(1)
        inner = [carried(f"x{n}", turn, x.dtype) for n, x in enumerate(args)]
        first, *rest = sides
        no = self.branch(rest, [apply(sub_p, (inner[0], const(1, index.dtype)), {}, index.dtype), *inner[1:]])
        holds = apply(le_p, (index, const(0, index.dtype)), {}, dtypes.bool_)
        return branch(Branch(tuple(inner), turn), holds, args, self.body(first, inner[1:]), no)

    def turn(self, times: int) -> Range:
        return Range(f"t{next(self.turns)}", times)

    def body(self, jaxpr: Jaxpr, args: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr of scalars."""
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        inner: dict[Any, list[Value]] = {}

        def now(a: Any) -> Value:
            if a.__class__ is Literal:
                return const(a.value, a.aval.dtype)
            return env[a]

        for e in jaxpr.eqns:
            values, (out,) = list(map(now, e.invars)), e.outvars
            if e.prim in POINTS:
                control = e.params["control"]
                if control not in inner:
                    inner[control] = self.lowered(control, values)
                env[out] = inner[control][e.params["index"]]
            elif e.prim is convert_p and values[0].dtype == out.aval.dtype:
                env[out] = values[0]
            else:
                prim = add_p if e.prim is add_any_p else e.prim
                env[out] = apply(prim, values, e.params, held_as(out.aval.dtype))
        return list(map(now, jaxpr.outvars))
