"""``checkpoint``: keep the arguments, recompute the rest when the derivative needs it.

Transforms, stage 2. Linearizing a checkpointed call stores its arguments (and what a policy says),
and stages as its derivative one equation that recomputes the primal and applies the tangent map.
Transposing that equation is transposing its jaxpr: the recomputation moves to the backward pass by
itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blufunc.core import passes, source, tree
from blufunc.core.avals import ShapedArray
from blufunc.core.jaxpr import Eqn, Jaxpr, Literal, Var, eval_jaxpr
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.stage import stage
from blufunc.core.tangents import Zero, zero
from blufunc.core.trace import Trace, set_trace, state
from blufunc.errors import ArgumentError
from blufunc.transforms.arguments import FlatFunction, as_values, labels_of, name_of
from blufunc.transforms.calls import Call, jit_p
from blufunc.transforms.linearize import linearize_flat

Policy = Callable[..., bool]
"""``(primitive, *input_avals, **params) -> bool``: whether the results of an equation are kept."""


def nothing_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Recompute everything: the default."""
    return False


def everything_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Keep everything that the derivative reads; only what is inside loops and other calls is recomputed."""
    return True


def dots_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Keep the results of matrix products, recompute what is cheap."""
    return prim is dot_general_p


class _Checkpoint(Call):
    """A call whose intermediate values are recomputed for its derivative.

    The tangent equation that it leaves in a linear jaxpr is a call of the same primitive: it must not be merged
    with the computation it repeats.
    """

    name = "checkpoint"

    def linearize(self, trace, primals, tangents, *, jaxpr: Jaxpr, policy: Policy, name: str):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        forward, consts, tangent, extra, reads, out_nonzeros = _split(jaxpr, nonzeros, policy)
        n = len(jaxpr.outvars)
        results = jit_p.bind(*consts, *primals, jaxpr=forward, name=name)
        outs, saved = results[:n], results[n:]
        arguments = [p for p, read in zip(primals, reads, strict=True) if read]
        ins = [*extra, *arguments, *saved, *(t for t in tangents if t.__class__ is not Zero)]
        rest = iter(trace.tangents.process(self, ins, {"jaxpr": tangent, "policy": policy, "name": name}))
        return outs, [next(rest) if nz else zero(p.aval) for p, nz in zip(outs, out_nonzeros, strict=True)]


def _split(jaxpr: Jaxpr, nonzeros: tuple[bool, ...], policy: Policy) -> tuple:
    """The forward jaxpr, which also returns what is kept, and the jaxpr of the tangent map, each with its constants.

    Both compute what linearizing computes: for a function with a rule of its own, the rule. The latter goes from the
    constants, the arguments and the kept values that it reads, and the nonzero tangents to the nonzero output
    tangents. Also returned: which arguments it reads, and which outputs have a tangent.
    """

    def make():
        body = _inline_jit(jaxpr)
        kept = [v for e in body.eqns if _keeps(policy, e) for v in e.outvars]
        out_nonzeros: tuple[bool, ...] = ()
        n, m = len(body.invars), len(kept)

        def tangent_map(*args):
            nonlocal out_nonzeros
            primals, values, tangents = args[:n], args[n : n + m], args[n + m :]
            known = dict(zip(kept, values, strict=True))
            _, nz, linear = linearize_flat(lambda *xs: _eval_knowing(body, xs, known), primals, nonzeros)
            out_nonzeros = tuple(nz)
            return eval_jaxpr(linear, tangents)

        avals = [v.aval for v in (*body.invars, *kept)]
        avals += [v.aval.tangent() for v, nz in zip(body.invars, nonzeros, strict=True) if nz]
        tangent = passes.dce(stage(tangent_map, avals, jaxpr.name))
        used = {a for e in tangent.eqns for a in e.invars}.union(tangent.outvars)
        reads = [v in used for v in tangent.invars[: n + m]]
        saved = [v for v, read in zip(kept, reads[n:], strict=True) if read]
        whole = body.replace(outvars=[*body.outvars, *saved])
        forward = stage(
            lambda *xs: linearize_flat(lambda *ys: eval_jaxpr(whole, ys), xs, nonzeros)[0],
            body.in_avals,
            jaxpr.name,
        )
        read_invars = [v for v, read in zip(tangent.invars, reads, strict=False) if read]
        tangent = tangent.replace(invars=[*read_invars, *tangent.invars[n + m :]])
        return *passes.dce(forward).hoist(), *tangent.hoist(), reads[:n], out_nonzeros

    return jaxpr.memoised(("checkpoint", nonzeros, policy), make)


def _keeps(policy: Policy, eqn: Eqn) -> bool:
    return eqn.prim.linearize is None and policy(eqn.prim, *[a.aval for a in eqn.invars], **eqn.params)


def _inline_jit(jaxpr: Jaxpr) -> Jaxpr:
    """With what jitted functions do in the place of their calls; all other calls have derivatives of their own."""
    if not any(e.prim is jit_p for e in jaxpr.eqns):
        return jaxpr

    def run(*xs):
        with set_trace(_Inlining(state.trace)):
            return eval_jaxpr(jaxpr, xs)

    return stage(run, jaxpr.in_avals, jaxpr.name)


class _Inlining(Trace):
    """Evaluates the bodies of ``jit`` equations."""

    __slots__ = ("inner",)

    def __init__(self, inner: Trace):
        super().__init__()
        self.inner = inner

    def process(self, prim, args, params):
        if prim is jit_p:
            return eval_jaxpr(params["jaxpr"], args)
        return self.inner.process(prim, args, params)


def _eval_knowing(jaxpr: Jaxpr, args: tuple, known: dict[Var, Any]) -> list[Any]:
    """``eval_jaxpr`` under a ``LinearizeTrace``, where the primal values of some variables are known already."""
    if not known:
        return eval_jaxpr(jaxpr, args)
    trace: Any = state.trace
    split = trace.split
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    previous = state.source
    try:
        for eqn in jaxpr.eqns:
            state.source = eqn.source
            values = [a.array if a.__class__ is Literal else env[a] for a in eqn.invars]
            if any(v in known for v in eqn.outvars):
                outs = [known[v] for v in eqn.outvars]
                pairs = [trace.pair(v) for v in values]
                if all(t.__class__ is Zero for _, t in pairs):
                    env.update(zip(eqn.outvars, outs, strict=True))
                    continue
                trace.split = _Known(split, eqn, [p for p, _ in pairs], outs)
            out = trace.process(eqn.prim, values, eqn.params)
            trace.split = split
            env.update(zip(eqn.outvars, out if eqn.prim.multiple_results else [out], strict=True))
    finally:
        trace.split, state.source = split, previous
    return [a.array if a.__class__ is Literal else env[a] for a in jaxpr.outvars]


class _Known(Trace):
    """While the jvp rule of one equation runs: its primal result is known, so it is not computed again."""

    __slots__ = ("args", "eqn", "inner", "outs")

    def __init__(self, inner: Trace, eqn: Eqn, args: list[Any], outs: list[Any]):
        super().__init__()
        self.inner, self.eqn, self.args, self.outs = inner, eqn, args, outs

    def process(self, prim, args, params):
        same = prim is self.eqn.prim and params == self.eqn.params and len(args) == len(self.args)
        if same and all(a is b for a, b in zip(args, self.args, strict=True)):
            return self.outs if prim.multiple_results else self.outs[0]
        return self.inner.process(prim, args, params)


checkpoint_p = _Checkpoint()


def checkpoint(fun: Callable | None = None, *, policy: Policy | None = None) -> Callable:
    """Recompute the inside of ``fun`` in the backward pass instead of storing it.

    Args:
      fun: a function of pytrees of arrays. Without it, a decorator is returned.
      policy: which intermediate results to store nevertheless: ``nothing_saveable`` (default),
        ``everything_saveable``, ``dots_saveable``, or a function ``(primitive, *input_avals, **params) -> bool``.
    Returns:
      a function with the same values and derivatives.
    """
    if fun is None:
        return functools.partial(checkpoint, policy=policy)
    if not callable(fun):
        raise ArgumentError(f"checkpoint takes a function, not {fun!r}.", where=source.here())

    @functools.wraps(fun)
    def checkpointed(*args, **kwargs):
        leaves, in_tree = tree.flatten((args, kwargs))
        labels = labels_of(fun, in_tree)
        values = as_values(leaves, lambda i: f"the argument {labels[i]}")
        flat = FlatFunction(fun, in_tree)
        jaxpr, consts = stage(flat, [v.aval for v in values], name_of(fun), labels).hoist()
        outs = checkpoint_p.bind(
            *consts, *values, jaxpr=jaxpr, policy=policy or nothing_saveable, name=name_of(fun)
        )
        return tree.unflatten(flat.out_tree, outs)

    return checkpointed
