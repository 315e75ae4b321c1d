"""Linearization: the first half of reverse mode.

Transforms, stage 2. In: a function and primals. Out: its results, and a linear jaxpr with residuals. The function runs
once: primal operations in the parent trace, tangent operations into the linear jaxpr. No linearization rules are
needed: of a jvp rule, operations that touch a tangent go to the linear jaxpr, and all others to the parent. Residuals
are the values that the linear jaxpr reads from the parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.config import config
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import Array, Trace, new_trace, set_trace, state
from blufunc.core.primitives.linear_ops import instantiate
from blufunc.core.primitives.rule_errors import pair_of
from blufunc.core.primitives.tangents import Zero
from blufunc.core.programs import simplify
from blufunc.core.programs.alternatives import recognised
from blufunc.core.programs.refs import RefError
from blufunc.core.programs.stage import StagedTracer, StageTrace, TraceTypes, is_staging, keeps_arrays, stage
from blufunc.transforms.autodiff.jvp import JVPTrace
from blufunc.transforms.batching.batch import MeshAxis


class SplitTrace(Trace):
    """Sends operations on tangents to the linear jaxpr, and others to the parent.

    An operation that runs a jaxpr may touch tangents and still compute primal values: its ``split`` rule,
    ``(trace, args, **params) -> outs``, splits it.
    """

    __slots__ = ("parent", "tangents")

    def __init__(self, parent: Trace, tangents: StageTrace):
        super().__init__()
        self.parent = parent
        self.tangents = tangents

    def is_tangent(self, x: Any) -> bool:
        """True if a value is a variable of the linear jaxpr."""
        return x.__class__ is StagedTracer and x.trace is self.tangents

    def process(self, prim, args, params):
        tangents = self.tangents
        for a in args:
            if a.__class__ is StagedTracer and a.trace is tangents:
                if prim.split is not None:
                    return prim.split(self, args, **params)
                return tangents.process(prim, args, params)
        with set_trace(self.parent):
            return self.parent.process(prim, args, params)


class LinearizeTrace(JVPTrace):
    """A JVP trace whose tangents are variables of a linear jaxpr."""

    __slots__ = ("split", "tangents")
    name = "grad"

    def __init__(self, parent: Trace):
        super().__init__(parent)
        self.tangents = StageTrace("linearize")
        self.split = SplitTrace(parent, self.tangents)

    def process(self, prim, args, params):
        pairs = [self.pair(a) for a in args]
        primals = [p for p, _ in pairs]
        tangents = [t for _, t in pairs]
        if all(t.__class__ is Zero for t in tangents):
            with set_trace(self.parent):
                return self.parent.process(prim, primals, params)
        if prim.linearize is not None:
            with set_trace(self.parent):
                result = prim.linearize(self, primals, tangents, **params)
        else:
            with set_trace(self.split):
                result = prim.jvp(primals, tangents, **params)
        if result.__class__ is tuple and len(result) == 2:
            out, out_t = result
        else:
            out, out_t = pair_of(prim, "jvp" if prim.linearize is None else "linearize", result)
        return self.wrap(prim, out, out_t)

    def invalidate(self) -> None:
        self.alive = self.tangents.alive = False


def differentiable(fun: Callable, primals: Sequence[Any]) -> Callable:
    """Apply pattern recognizers to a flat function before ``linearize_flat``.

    Replacements must precede differentiation, which would need values that they do not compute. Outside of programs the
    function runs unchanged, since its Python code may inspect values. Inside ``shard_map`` it is typed, with casts.
    """
    if in_shard_map():
        return state.trace.typed(fun, primals)
    return _Recognising(fun) if config.recognise and is_staging() else fun


class _Recognising:
    """A flat function that is traced, rewritten by recognizers, and evaluated."""

    def __init__(self, fun: Callable):
        self.fun = fun

    def __call__(self, *args: Any) -> Sequence[Any]:
        values = [x if isinstance(x, Array) else lift(x) for x in args]
        labels: Any = [getattr(x, "label", None) for x in values]
        try:
            avals = [x.aval for x in values]
            types = TraceTypes(values, avals)
            jaxpr = stage(self.fun, avals, "grad", labels, None, types, keeps_arrays=keeps_arrays())
        except RefError:  # a jaxpr has no cells: the function runs where they live
            return self.fun(*args)
        eqns = [Eqn(e.prim, e.invars, e.outvars, e.params, source.placed_again(e.source)) for e in jaxpr.eqns]
        return eval_jaxpr(recognised(jaxpr.replace(eqns=eqns)).jaxpr, values)


def with_recognised(jaxpr: Jaxpr) -> Jaxpr:
    """Apply recognizers to a jaxpr before its linearization, within programs."""
    return recognised(jaxpr).jaxpr if is_staging() else jaxpr


def in_shard_map() -> bool:
    """True while the function of a ``shard_map`` is traced."""
    return any(isinstance(e, MeshAxis) for e in state.context)


def linearize_flat(
    fun: Callable,
    primals: Sequence[Any],
    nonzeros: Sequence[bool] | None = None,
    instantiate_outs: Sequence[bool] | None = None,
    labels: Sequence[str | None] | None = None,
) -> tuple[list, list[bool], Jaxpr]:
    """Evaluate ``fun`` on flat primals, and stage its derivative there.

    Args:
      nonzeros: a flag per input, True if it has a tangent; default all.
      instantiate_outs: a flag per output, True if its tangent must be materialized; default none.
      labels: paths of the arguments, for messages.
    Returns:
      the outputs; a flag per output, True if it has a tangent; and the linear jaxpr from nonzero input tangents to
      nonzero output tangents, with the residuals attached as constants.
    """
    trace = LinearizeTrace(state.trace)
    nonzeros = nonzeros or [True] * len(primals)
    labels = labels or [None] * len(primals)
    with new_trace(trace):
        args = [
            trace.tracer(p, trace.tangents.parameter(p.aval.tangent()), None, n) if nz else p
            for p, nz, n in zip(primals, nonzeros, labels, strict=True)
        ]
        pairs = [trace.pair(x) for x in fun(*args)]
        out_ts = [t for _, t in pairs]
        if instantiate_outs:
            with set_trace(trace.tangents):  # zeros made here are not residuals
                out_ts = [instantiate(t) if w else t for t, w in zip(out_ts, instantiate_outs, strict=True)]
        nonzero_outs = [t.__class__ is not Zero for t in out_ts]
        linear = simplify.dce(trace.tangents.finish([t for t in out_ts if t.__class__ is not Zero], "linear"))
    return [p for p, _ in pairs], nonzero_outs, linear


def linearize_jaxpr(
    jaxpr: Jaxpr, nonzeros: tuple[bool, ...], instantiate_outs: tuple[bool, ...] | None = None
) -> tuple[Jaxpr, Jaxpr, tuple[bool, ...], int]:
    """Split a jaxpr into its primal and its linear half.

    Args:
      nonzeros: a flag per input, True if it has a tangent.
      instantiate_outs: a flag per output, True if its tangent must be materialized.
    Returns:
      the primal jaxpr, from the inputs to the outputs and then the residuals; the linear jaxpr, from the residuals and
      then the nonzero input tangents to the nonzero output tangents; a flag per output, True if it has a tangent; the
      number of residuals.
    """

    def make():
        out_nonzeros: tuple[bool, ...] = ()
        linear: Any = None

        def fun(*args):
            nonlocal out_nonzeros, linear
            outs, nz, linear = linearize_flat(
                lambda *xs: eval_jaxpr(jaxpr, xs), args, nonzeros, instantiate_outs
            )
            out_nonzeros = tuple(nz)
            return [*outs, *linear.consts]

        primal = stage(fun, jaxpr.in_avals, jaxpr.name)
        closed, _ = linear.hoist()
        return primal, closed.replace(name=jaxpr.name), out_nonzeros, len(linear.consts)

    return jaxpr.memoised(("linearize", nonzeros, instantiate_outs), make)


def split_jaxpr(
    jaxpr: Jaxpr, tangents: tuple[bool, ...], tangent_outs: tuple[bool, ...]
) -> tuple[Jaxpr, Jaxpr, tuple[bool, ...]]:
    """Split a jaxpr some of whose parameters are tangents, like the jaxpr of a jvp.

    Args:
      tangents: a flag per parameter, True for tangents.
      tangent_outs: a flag per result, True to treat it as a tangent in any case.
    Returns:
      the primal jaxpr, from the other parameters to the other results and then the residuals; the linear jaxpr,
      from the residuals and then the tangents to the tangent results; and a flag per result, True for tangents.
    """

    def make():
        flags: tuple[bool, ...] = ()
        linear: Any = None

        def fun(*primals):
            nonlocal flags, linear
            trace = SplitTrace(state.trace, StageTrace("linearize"))
            rest = iter(primals)
            with new_trace(trace):
                args = [
                    trace.tangents.parameter(a) if t else next(rest)
                    for a, t in zip(jaxpr.in_avals, tangents, strict=True)
                ]
                outs = eval_jaxpr(jaxpr, args)
                flags = tuple(w or trace.is_tangent(x) for x, w in zip(outs, tangent_outs, strict=True))
                linear = simplify.dce(
                    trace.tangents.finish([x for x, t in zip(outs, flags, strict=True) if t], jaxpr.name)
                )
            return [*(x for x, t in zip(outs, flags, strict=True) if not t), *linear.consts]

        avals = [a for a, t in zip(jaxpr.in_avals, tangents, strict=True) if not t]
        primal = stage(fun, avals, jaxpr.name)
        return primal, linear.hoist()[0], flags

    return jaxpr.memoised(("split", tangents, tangent_outs), make)
