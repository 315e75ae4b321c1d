"""Direct linearization: the first half of reverse mode.

Transforms, stage 2. The function runs once: primal operations in the parent trace, tangent
operations into a linear jaxpr. No rule of its own is needed: a jvp rule splits by itself when each
operation that it makes goes to the linear jaxpr if it touches a tangent, and to the parent
otherwise. Values that the linear jaxpr takes from the parent are its residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.config import config
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import Trace, Value, new_trace, set_trace, state
from blufunc.core.primitives.linear_ops import instantiate
from blufunc.core.primitives.rule_errors import pair_of
from blufunc.core.primitives.tangents import Zero
from blufunc.core.programs import simplify
from blufunc.core.programs.alternatives import recognised
from blufunc.core.programs.stage import StagedTracer, StageTrace, is_staging, stage
from blufunc.transforms.autodiff.jvp import JVPTrace
from blufunc.transforms.batching.batch import MeshAxis


class SplitTrace(Trace):
    """Sends what touches a tangent to the linear jaxpr, and the rest to the parent.

    What runs a jaxpr may touch tangents and still compute primal values: it is divided by its own ``split`` rule,
    ``(trace, args, **params) -> outs``.
    """

    __slots__ = ("parent", "tangents")

    def __init__(self, parent: Trace, tangents: StageTrace):
        super().__init__()
        self.parent = parent
        self.tangents = tangents

    def is_tangent(self, x: Any) -> bool:
        """Whether a value is a variable of the linear jaxpr."""
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
    """A jvp whose tangents are variables of a linear jaxpr."""

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
    """A user's function of flat lists, ready for ``linearize_flat``: with the better forms of what is recognised in it.

    These are put in before derivatives are taken, which would need values that the better forms do not have. Outside
    of programs the function runs as it is, as there its Python code may look at values. Inside of ``shard_map`` it gets
    its casts.
    """
    if in_shard_map():
        return state.trace.typed(fun, primals)
    return _Recognising(fun) if config.recognise and is_staging() else fun


class _Recognising:
    """A function of flat lists that is traced first, and then evaluated with what was recognised in it."""

    def __init__(self, fun: Callable):
        self.fun = fun

    def __call__(self, *args: Any) -> list[Any]:
        values = [x if isinstance(x, Value) else lift(x) for x in args]
        labels: Any = [getattr(x, "label", None) for x in values]
        jaxpr = stage(self.fun, [x.aval for x in values], "grad", labels)
        eqns = [Eqn(e.prim, e.invars, e.outvars, e.params, source.placed_again(e.source)) for e in jaxpr.eqns]
        return eval_jaxpr(recognised(jaxpr.replace(eqns=eqns)).jaxpr, values)


def with_recognised(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr that is to be linearized, with the better forms of what is recognised in it, within programs."""
    return recognised(jaxpr).jaxpr if is_staging() else jaxpr


def in_shard_map() -> bool:
    """Whether the function of a ``shard_map`` is being traced."""
    return any(isinstance(e, MeshAxis) for e in state.context)


def linearize_flat(
    fun: Callable,
    primals: Sequence[Any],
    nonzeros: Sequence[bool] | None = None,
    instantiate_outs: Sequence[bool] | None = None,
    labels: Sequence[str | None] | None = None,
) -> tuple[list, list[bool], Jaxpr]:
    """Evaluate ``fun`` on flat primals and stage its derivative there.

    Args:
      nonzeros: which inputs have a tangent; all of them by default.
      instantiate_outs: which outputs must have one, zeros if need be; none by default.
      labels: paths of the arguments, for messages.
    Returns:
      the outputs, which of them have a tangent, and the linear jaxpr from nonzero input tangents to
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
      nonzeros: which inputs have a tangent.
      instantiate_outs: which outputs must have one, zeros if need be.
    Returns:
      the primal jaxpr, from the inputs to the outputs and then the residuals; the linear jaxpr, from
      the residuals and then the nonzero input tangents to the nonzero output tangents; which outputs
      have a tangent; the number of residuals.
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
    """Divide a jaxpr in which some parameters are tangents already, as the jaxpr of a jvp.

    Args:
      tangents: which parameters are tangents.
      tangent_outs: which results to count among them in any case.
    Returns:
      the primal jaxpr, from the other parameters to the other results and then the residuals; the linear jaxpr,
      from the residuals and then the tangents to the tangents among the results; which results those are.
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
