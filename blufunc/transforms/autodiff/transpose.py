"""Transposition of linear jaxprs: the second half of reverse mode.

Transforms, stage 2. In: a linear jaxpr and cotangents of its results. Out: cotangents of its arguments. Equations are
visited in reverse. Each linear variable has an accumulator; a rule gets the cotangent of its result, and adds to the
accumulators of its linear operands. Equations without a cotangent are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal
from blufunc.core.ops.shape import embedded
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import add_any, instantiate
from blufunc.core.primitives.primitive import Primitive, derived
from blufunc.core.primitives.rule_errors import described, misfit, rule_error
from blufunc.core.primitives.tangents import Accumulator, Zero, is_linear, zero
from blufunc.core.programs.stage import definition, is_staging, stage
from blufunc.transforms.autodiff import slice_cotangents


class _Misfit(Exception):
    """A cotangent of the wrong type; ``args`` are the type and the cotangent."""


class SumAccumulator(Accumulator):
    """Sums the cotangents of a variable as they arrive.

    Outside of programs those of its windows wait until all have arrived. Programs sum padded windows in one kernel.
    """

    __slots__ = ("total", "windows")

    def __init__(self, aval: ShapedArray):
        self.aval = aval
        self.total: Any = None
        self.windows: slice_cotangents.Windows | None = None

    def add(self, ct: Any) -> None:
        if ct is None or ct.__class__ is Zero:
            return
        aval = getattr(ct, "aval", None)
        if aval is not self.aval and (aval is None or not aval.same_type(self.aval.tangent())):
            raise _Misfit(self.aval, ct)
        self.total = ct if self.total is None else add_any(self.total, ct)

    def add_window(self, ct: Any, starts: tuple[int, ...]) -> None:
        if is_staging():
            return self.add(embedded(ct, starts, self.aval.shape))
        if self.windows is None:
            self.windows = {}
        key = starts, ct.aval.shape
        before = self.windows.get(key)
        self.windows[key] = ct if before is None else add_any(before, ct)

    def result(self) -> Any:
        """The sum, or ``Zero`` if nothing was added."""
        if self.windows is not None:
            found, self.windows = self.windows, None
            self.add(slice_cotangents.joined(found, self.aval.shape))
        return zero(self.aval) if self.total is None else self.total


def backward_pass(jaxpr: Jaxpr, args: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
    """Transpose ``jaxpr`` with respect to some arguments and evaluate the result.

    Args:
      jaxpr: linear in the arguments to transpose.
        args: a value per parameter, or None for those to transpose with respect to.
        cts: the cotangents of the results; ``Zero`` or None where there is none.
      Returns:
        the cotangents of the linear arguments, in order; ``Zero`` where there is none.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update((v, a) for v, a in zip(jaxpr.invars, args, strict=True) if a is not None)
    previous = source.replay.line
    try:
        linear: dict[Any, SumAccumulator] = {
            v: SumAccumulator(v.aval) for v, a in zip(jaxpr.invars, args, strict=True) if a is None
        }
        pending = []
        for eqn in jaxpr.eqns:
            if any(a.__class__ is not Literal and a in linear for a in eqn.invars):
                pending.append(eqn)
                for v in eqn.outvars:
                    linear[v] = SumAccumulator(v.aval)
            else:  # without a tangent: a constant of the linear map
                source.replay.line = eqn.source
                ins = [a.array if a.__class__ is Literal else values[a] for a in eqn.invars]
                out = eqn.prim.bind(*ins, **eqn.params)
                values.update(zip(eqn.outvars, out if eqn.prim.multiple_results else [out], strict=True))
        for v, ct in zip(jaxpr.outvars, cts, strict=True):
            if v.__class__ is not Literal and v in linear:
                linear[v].add(ct)
        while pending:
            eqn = pending.pop()
            source.replay.line = source.backward(eqn.source)
            outs = [linear.pop(v).result() for v in eqn.outvars]
            if all(ct.__class__ is Zero for ct in outs) and eqn.effects <= effects.REPORTS:
                continue  # operations with side effects raise instead of being skipped
            ins = [
                a.array if a.__class__ is Literal else linear[a] if a in linear else values[a]
                for a in eqn.invars
            ]
            try:
                returned = eqn.prim.transpose(
                    outs if eqn.prim.multiple_results else outs[0], *ins, **eqn.params
                )
            except _Misfit as e:
                raise misfit(eqn.prim, *e.args) from None
            if returned is not None:
                raise rule_error(eqn.prim, "transpose", f"returned {described(returned)}")
        return [linear[v].result() for v, a in zip(jaxpr.invars, args, strict=True) if a is None]
    finally:
        source.replay.line = previous


def transpose_jaxpr(
    jaxpr: Jaxpr,
    linear: tuple[bool, ...],
    ct_nonzeros: tuple[bool, ...],
    instantiate_outs: tuple[bool, ...] | None = None,
) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The jaxpr from other arguments and cotangents to linear arguments' cotangents.

    Args:
      linear: a flag per argument, True to transpose with respect to it.
      ct_nonzeros: a flag per result, True if it has a cotangent.
      instantiate_outs: a flag per linear argument, True if its cotangent must be materialized; default none.
    Returns:
      the jaxpr, whose results are the nonzero cotangents only, and a flag per linear argument for these.
    """
    required = instantiate_outs or (False,) * sum(linear)

    def make():
        out_nonzeros: tuple[bool, ...] = ()

        def fun(*args):
            nonlocal out_nonzeros
            values = iter(args)
            ins = [None if lin else next(values) for lin in linear]
            cts = [next(values) if nz else None for nz in ct_nonzeros]
            outs = backward_pass(jaxpr, ins, cts)
            outs = [instantiate(ct) if w else ct for ct, w in zip(outs, required, strict=True)]
            out_nonzeros = tuple(ct.__class__ is not Zero for ct in outs)
            return [ct for ct in outs if ct.__class__ is not Zero]

        avals = [a for a, lin in zip(jaxpr.in_avals, linear, strict=True) if not lin]
        avals += [a for a, nz in zip(jaxpr.out_avals, ct_nonzeros, strict=True) if nz]
        return stage(fun, avals, jaxpr.name), out_nonzeros

    return jaxpr.memoised(("transpose", linear, ct_nonzeros, required), make)


def _of_definition(prim: Primitive, ct: Any, args: Sequence[Any], params: dict) -> None:
    jaxpr = definition(prim, [a.aval for a in args], params)
    values = [None if is_linear(a) else a for a in args]
    cotangents = iter(backward_pass(jaxpr, values, ct if prim.multiple_results else [ct]))
    for a in filter(is_linear, args):
        a.add(next(cotangents))


derived["transpose"] = _of_definition
