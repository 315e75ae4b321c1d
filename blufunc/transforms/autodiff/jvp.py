"""Forward-mode differentiation: the trace of ``jvp``.

Transforms, stage 2. In: a function, primals and tangents. Out: results and their tangents. A ``JVPTracer`` pairs a
primal with its tangent. Rules run under the parent trace, so outer transforms see their operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import Array, Trace, Tracer, leak_error, new_trace, set_trace, state, type_of
from blufunc.core.primitives.linear_ops import instantiate
from blufunc.core.primitives.primitive import Primitive, derived
from blufunc.core.primitives.rule_errors import check_lists, check_tangent, pair_of
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs.stage import definition, stage


class JVPTracer(Tracer):
    """A primal value and its tangent."""

    __slots__ = ("primal", "tangent")

    def __init__(self, trace: Trace, primal: Any, tangent: Any, source=None, label=None):
        self.trace = trace
        self.primal = primal
        self.tangent = tangent
        self.aval = primal.aval
        self.source = source
        self.label = label


class JVPTrace(Trace):
    """Propagates primals and tangents together."""

    __slots__ = ("parent",)
    name = "jvp"

    def __init__(self, parent: Trace):
        super().__init__()
        self.parent = parent

    def type_of(self, x):
        return type_of(x.primal)

    def sharding_of(self, x):
        return getattr(x.primal, "sharding", None)

    def pair(self, x: Any) -> tuple[Any, Any]:
        """The primal and tangent of a value; constants have the tangent ``Zero``."""
        if x.__class__ is JVPTracer:
            if x.trace is self:
                return x.primal, x.tangent
            if not x.trace.alive:
                raise leak_error(x)
        if not isinstance(x, Array):
            x = lift(x)
        return x, zero(x.aval)

    def typed(self, fun, primals):
        return self.parent.typed(fun, primals)

    def typed_body(self, body):
        return self.parent.typed_body(body)

    def typed_cotangent(self, ct, primal):
        return self.parent.typed_cotangent(ct, primal)

    def process(self, prim, args, params):
        pairs = [self.pair(a) for a in args]
        primals = [p for p, _ in pairs]
        tangents = [t for _, t in pairs]
        with set_trace(self.parent):
            if all(t.__class__ is Zero for t in tangents):
                return prim.bind(*primals, **params)
            result = prim.jvp(primals, tangents, **params)
        out, out_t = (
            result if result.__class__ is tuple and len(result) == 2 else pair_of(prim, "jvp", result)
        )
        return self.wrap(prim, out, out_t)

    def wrap(self, prim, out, out_t):
        """Check the results of a rule, and wrap them in tracers."""
        line = source.replay.line or source.current()
        if prim.multiple_results:
            check_lists(prim, "jvp", out, out_t)
            for p, t in zip(out, out_t, strict=True):
                check_tangent(prim, "jvp", p, t)
            return [self.tracer(p, t, line) for p, t in zip(out, out_t, strict=True)]
        try:
            fits = out_t.aval is out.aval
        except AttributeError:
            fits = False
        if not fits:
            check_tangent(prim, "jvp", out, out_t)
        return self.tracer(out, out_t, line)

    def tracer(self, primal: Any, tangent: Any, line: Any = None, label: str | None = None) -> Any:
        """A tracer, or the primal itself if the tangent is ``Zero``."""
        return primal if tangent.__class__ is Zero else JVPTracer(self, primal, tangent, line, label)


def jvp_flat(
    fun: Callable, primals: Sequence[Any], tangents: Sequence[Any], labels=None
) -> tuple[list, list]:
    """``jvp`` of a function of flat lists. Tangents may be ``Zero``, in and out."""
    trace = JVPTrace(state.trace)
    labels = labels or [None] * len(primals)
    with new_trace(trace):
        args = [trace.tracer(p, t, None, n) for p, t, n in zip(primals, tangents, labels, strict=True)]
        outs = [trace.pair(x) for x in fun(*args)]
    return [p for p, _ in outs], [t for _, t in outs]


def jvp_jaxpr(
    jaxpr: Jaxpr, nonzeros: tuple[bool, ...], instantiate_outs: tuple[bool, ...]
) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The jaxpr of the derivative, of primals and nonzero tangents, in and out.

    Args:
      nonzeros: a flag per input, True if it has a tangent.
      instantiate_outs: a flag per output, True if its tangent must be materialized.
    Returns:
      the jaxpr, and a flag per output, True if it has a tangent.
    """

    def make():
        out_nonzeros: tuple[bool, ...] = ()

        def fun(*args):
            nonlocal out_nonzeros
            primals, rest = args[: len(nonzeros)], iter(args[len(nonzeros) :])
            tangents = [next(rest) if nz else zero(p.aval) for p, nz in zip(primals, nonzeros, strict=True)]
            outs, out_ts = jvp_flat(lambda *xs: eval_jaxpr(jaxpr, xs), primals, tangents)
            out_ts = [instantiate(t) if i else t for t, i in zip(out_ts, instantiate_outs, strict=True)]
            out_nonzeros = tuple(t.__class__ is not Zero for t in out_ts)
            return [*outs, *(t for t in out_ts if t.__class__ is not Zero)]

        avals = [
            *jaxpr.in_avals,
            *(a.tangent() for a, nz in zip(jaxpr.in_avals, nonzeros, strict=True) if nz),
        ]
        return stage(fun, avals, jaxpr.name), out_nonzeros

    return jaxpr.memoised(("jvp", nonzeros, instantiate_outs), make)


def _of_definition(prim: Primitive, primals: Sequence[Any], tangents: Sequence[Any], params: dict) -> tuple:
    jaxpr = definition(prim, [p.aval for p in primals], params)
    outs, out_tangents = jvp_flat(lambda *xs: eval_jaxpr(jaxpr, xs), primals, tangents)
    return (outs, out_tangents) if prim.multiple_results else (outs[0], out_tangents[0])


derived["jvp"] = _of_definition
