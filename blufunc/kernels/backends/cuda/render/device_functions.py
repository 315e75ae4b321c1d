"""Jaxprs of single numbers as functions of a CUDA kernel that is written by hand: what users put into attention.

Kernels, stage 6, beside the renderers of whole kernels, whose rules these are: a jaxpr is lowered to values of LoopIR
at no index (``lower/values.py``), and printed by the renderer (``c_renderer.py``). In: a jaxpr from arrays and
numbers to numbers. Out: C++ of a function of the numbers, which reads the arrays by its pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Jaxpr, Var
from blufunc.core.ops.gather_scatter import scatter_add_p
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.backends.cuda.schedule.vectorize import fast_exps, with_fast_exp
from blufunc.kernels.backends.cuda.target import CUDA
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import CStyle
from blufunc.kernels.codegen.scopes import Scope, indented
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.fusion.iteration_space import Frame, reduces, scans_by, sort_of
from blufunc.kernels.loopir.access_map import Place
from blufunc.kernels.loopir.index import ZERO, Range, of
from blufunc.kernels.loopir.ir import Buffer, Kernel, Store, Value, load, number
from blufunc.kernels.lower.values import Values
from blufunc.kernels.ops.points import POINTS

_MOST = 1 << 24
"""Integers that are given are less than this, and not negative."""


def plain(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with all calls in place, as ``why_not`` and ``function`` want it."""
    return simplify(inline_bodies(simplify(jaxpr))[0])


def why_not(jaxpr: Jaxpr) -> str | None:
    """Why there is no such function; None if there is."""
    for v in jaxpr.invars:
        if dtypes.is_key(v.aval.dtype) or dtypes.is_complex(v.aval.dtype):
            return f"it reads an array of {v.aval.dtype}"
    for eqn in jaxpr.eqns:
        if sort_of(eqn) == "opaque" or scans_by(eqn.prim) or eqn.prim in POINTS or eqn.prim is scatter_add_p:
            return f"{eqn.prim.name} has no scalar code"
        if reduces(eqn.prim) and eqn.invars[0].aval.size > 1:
            return f"{eqn.prim.name} would go over an array for each number"
    return None


def function(
    jaxpr: Jaxpr,
    name: str,
    arrays: int,
    numbers: Sequence[str],
    results: Sequence[str],
    first: int = 0,
    indices: bool = True,
) -> str:
    """The text of ``void name(const Tables &tables, <numbers>, <results by reference>)``.

    Args:
      jaxpr: ``plain``, without a reason in ``why_not``; from arrays, and numbers that are int32 or floats.
      arrays: how many of the parameters are arrays, the first ones.
      numbers: the names of the others. Integers are from 0 to 2**24 - 1.
      results: the names of the results. Whoever stores them rounds them to their dtypes.
      first: where the arrays begin among the members ``t0``, ``t1`` and so on of ``Tables``.
      indices: whether integers are indices, in the range above; else they are any values of their dtype.
    """
    values = _Numbers(jaxpr, arrays, numbers, first, indices)
    stores = [
        Store(Buffer(n, a.aval.dtype, 1, True), ZERO, values.at(a, ()))
        for n, a in zip(results, jaxpr.outvars, strict=True)
    ]
    held = [*values.arrays, *values.floats, *(s.buffer for s in stores)]
    return _Function(Kernel(name, tuple(held), (), tuple(stores)), values).render()


class _Numbers(Values):
    """The values of a jaxpr of which some parameters are numbers that are at hand."""

    def __init__(self, jaxpr: Jaxpr, arrays: int, names: Sequence[str], first: int, indices: bool):
        region = Region(Frame(1), eqns=list(jaxpr.eqns))
        super().__init__(region, Fusion(jaxpr, [region], {}, []), CUDA)
        given = jaxpr.invars[arrays:]
        self.parameters = list(zip(names, [v.aval.dtype for v in given], strict=True))
        self.ranges = {
            v: Range(n, _MOST)
            for v, n in zip(given, names, strict=True)
            if indices and dtypes.is_integer(v.aval.dtype)
        }
        self.scalars = {
            v: Buffer(n, v.aval.dtype, 1) for v, n in zip(given, names, strict=True) if v not in self.ranges
        }
        self.tables = {
            v: Buffer(f"t{first + n}", v.aval.dtype, v.aval.size) for n, v in enumerate(jaxpr.invars[:arrays])
        }
        self.inputs = dict(self.tables)

    @property
    def arrays(self) -> list[Buffer]:
        """Those that are read by their pointers."""
        return list(self.tables.values())

    @property
    def floats(self) -> list[Buffer]:
        """Numbers that are no integers, as arrays of one element."""
        return list(self.scalars.values())

    def loaded(self, v: Var, place: Place) -> Value:
        if v in self.ranges:
            return number(of(self.ranges[v]), v.aval.dtype)
        if v in self.scalars:
            key: Any = (v, "number")
            if key not in self.memo:
                self.memo[key] = load(self.scalars[v], ZERO)
            return self.memo[key]
        return super().loaded(v, place)


class _Function(CStyle):
    """Writes a function of one point."""

    def __init__(self, kernel: Kernel, values: _Numbers):
        super().__init__(kernel)
        self.values = values
        self.named |= {b: b.name for b in (*values.floats, *(s.buffer for s in kernel.body))}
        self.named |= {r: r.name for r in values.ranges.values()}
        self.fast_exps = fast_exps(kernel)

    def render(self) -> str:
        self.scopes.append(Scope(frozenset(self.values.ranges.values())))
        self.body(self.kernel.body)
        pointers = [f"const auto *{self.named[b]} = tables.{b.name};" for b in self.values.arrays]
        lines = [*pointers, *self.scopes.pop().lines]
        given = [f"{scalar_ops.register_type(d)} {n}" for n, d in self.values.parameters]
        results = [f"{scalar_ops.register_type(s.buffer.dtype)} &{s.buffer.name}" for s in self.kernel.body]
        head = f"inline void {self.kernel.name}({', '.join(['const Tables &tables', *given, *results])}) {{"
        return "\n".join([head, *indented(lines), "}"]) + "\n"

    def expression(self, v: Value) -> str:
        return with_fast_exp(super().expression(v), v, self.fast_exps)

    def load(self, buffer: Buffer, index: str) -> str:
        return buffer.name if buffer in self.values.floats else super().load(buffer, index)

    def store(self, buffer: Buffer, index: str, value: str) -> str:
        return f"{buffer.name} = {scalar_ops.unrounded(value, buffer.dtype)};"
