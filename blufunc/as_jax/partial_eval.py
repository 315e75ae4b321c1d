"""Partial evaluation: compute what is known, and stage the rest.

Under the face ``as_jax``. ``trace_to_jaxpr_nounits`` runs a function on values, some of them unknown. An operation with
an unknown operand becomes an equation; any other runs under the trace outside. Flax finds out so which variables of a
scanned module do not depend on the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from blufunc.core.arrays.array import lift
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import Trace, new_trace, set_trace, state
from blufunc.core.programs.stage import StagedTracer, StageTrace

__all__ = ["PartialVal", "trace_to_jaxpr_nounits"]


class PartialVal(NamedTuple):
    """A known value, ``(None, value)``, or an unknown one, ``(type, None)``."""

    pval: ShapedArray | None
    const: Any

    @classmethod
    def known(cls, const: Any) -> PartialVal:
        """A value that is known."""
        return cls(None, const)

    @classmethod
    def unknown(cls, aval: ShapedArray) -> PartialVal:
        """A value of which only the type is known."""
        return cls(aval, None)

    def is_known(self) -> bool:
        """True for a value, False for a type."""
        return self.pval is None

    def get_aval(self) -> ShapedArray:
        """The type."""
        return lift(self.const).aval if self.pval is None else self.pval


class _PartialTrace(StageTrace):
    """Stages the operations on its own tracers, and sends the others outward."""

    __slots__ = ("parent",)

    def __init__(self, parent: Trace):
        super().__init__("partial evaluation")
        self.parent = parent

    def process(self, prim, args, params):
        if any(a.__class__ is StagedTracer and a.trace is self for a in args):
            return super().process(prim, args, params)
        with set_trace(self.parent):
            return prim.bind(*args, **params)


def trace_to_jaxpr_nounits(
    fun: Any, pvals: Sequence[PartialVal], instantiate: bool | Sequence[bool] = False
) -> tuple[Jaxpr, list[PartialVal], list[Any]]:
    """The jaxpr of what depends on unknown inputs, the results, and its constants.

    Args:
      fun: a ``WrappedFun`` from flat values to flat values.
      pvals: its inputs.
      instantiate: whether known results are results of the jaxpr, too; one flag, or one per result.
    """
    trace = _PartialTrace(state.trace)
    with new_trace(trace):
        ins = [lift(p.const) if p.is_known() else trace.parameter(p.get_aval()) for p in pvals]
        outs = [lift(x) for x in fun.call_wrapped(*ins)]
        flags = [instantiate] * len(outs) if isinstance(instantiate, bool) else list(instantiate)
        staged = [
            f or (x.__class__ is StagedTracer and x.trace is trace) for x, f in zip(outs, flags, strict=True)
        ]
        jaxpr = trace.finish([x for x, s in zip(outs, staged, strict=True) if s])
    known = [
        PartialVal.unknown(x.aval) if s else PartialVal.known(x) for x, s in zip(outs, staged, strict=True)
    ]
    return jaxpr, known, list(jaxpr.consts)
