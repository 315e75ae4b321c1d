"""``checkpoint``: save the arguments, rematerialize in the backward pass.

Transforms, stage 2. In: a function and a policy. Out: a call whose linearization saves its arguments (and values that
the policy names), and stages one equation that recomputes the primal and applies the tangent map. Its transpose is the
transposed jaxpr, which moves the recomputation to the backward pass.

Recomputation has no side effects: ``debug.print`` and other reports run in the forward pass only, and results of
``io_callback`` are saved under any policy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var, eval_jaxpr
from blufunc.core.ir.trace import Trace, set_trace, state
from blufunc.core.ops.offload import in_memory
from blufunc.core.primitives import effects
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.alternatives import recognised
from blufunc.core.programs.stage import stage, stage_body
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError, UnsupportedError
from blufunc.transforms.arguments import (
    FlatFunction,
    argument_indices,
    argument_names,
    as_values,
    labels_of,
    name_of,
    signature_of,
)
from blufunc.transforms.autodiff.linearize import linearize_flat
from blufunc.transforms.checkpointing.policies import Offload, Policy, Verdict, nothing_saveable
from blufunc.transforms.control_flow.calls import Call, jit_p

P = ParamSpec("P")
R = TypeVar("R")


class _Checkpoint(Call):
    """A call whose intermediate values are rematerialized for its derivative.

    Its tangent equation in a linear jaxpr is a call of the same primitive, which must not be merged with the forward
    computation.
    """

    name, recomputed = "checkpoint", True

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
    """The forward jaxpr with saved values, the tangent map's, and their constants.

    Both apply custom derivative rules, as linearization does. The second maps its constants, the arguments and saved
    values it reads, and the nonzero tangents to the nonzero output tangents. Also returned: a flag per argument, True
    if it is read, and a flag per output, True if it has a tangent.
    """

    def make():
        body = simplify.inline_calls(jaxpr, only=jit_p)  # all other calls have their own derivatives
        if policy is nothing_saveable:  # a policy refers to the program as written
            body = recognised(body).jaxpr  # both halves are here, so recognizers apply
        verdicts = {v: verdict for e in body.eqns if (verdict := _verdict(policy, e)) for v in e.outvars}
        saved_vars = list(verdicts)
        out_nonzeros: tuple[bool, ...] = ()
        n, m, n_out = len(body.invars), len(saved_vars), len(body.outvars)

        def tangent_map(*args):
            nonlocal out_nonzeros
            primals, values, tangents = args[:n], args[n : n + m], args[n + m :]
            known = {v: _fetched(x, verdicts[v]) for v, x in zip(saved_vars, values, strict=True)}
            with set_trace(_Silent(state.trace)):
                _, nz, linear = linearize_flat(lambda *xs: _eval_knowing(body, xs, known), primals, nonzeros)
            out_nonzeros = tuple(nz)
            return eval_jaxpr(linear, tangents)

        avals = [v.aval for v in body.invars]
        avals += [v.aval.in_memory(_memory_of(verdicts[v], v.aval.memory)) for v in saved_vars]
        avals += [v.aval.tangent() for v, nz in zip(body.invars, nonzeros, strict=True) if nz]
        tangent = simplify.dce(stage(tangent_map, avals, jaxpr.name))
        used = simplify.used(tangent)
        reads = [v in used for v in tangent.invars[: n + m]]
        saved = [v for v, read in zip(saved_vars, reads[n:], strict=True) if read]
        whole = body.replace(outvars=[*body.outvars, *saved])

        def forward_map(*xs):
            outs, _, _ = linearize_flat(lambda *ys: eval_jaxpr(whole, ys), xs, nonzeros)
            return [
                *outs[:n_out],
                *(_stored(x, verdicts[v]) for v, x in zip(saved, outs[n_out:], strict=True)),
            ]

        forward = stage(forward_map, body.in_avals, jaxpr.name)
        read_invars = [v for v, read in zip(tangent.invars, reads, strict=False) if read]
        tangent = tangent.replace(invars=[*read_invars, *tangent.invars[n + m :]])
        return *simplify.dce(forward).hoist(), *tangent.hoist(), reads[:n], out_nonzeros

    return jaxpr.memoised(("checkpoint", nonzeros, policy), make)


def _verdict(policy: Policy, eqn: Eqn) -> Verdict:
    """The policy's verdict on the results of an equation."""
    if effects.acts(eqn):
        return True
    if eqn.prim.linearize is not None:
        return False
    verdict = policy(eqn.prim, *[a.aval for a in eqn.invars], **eqn.params)
    if not isinstance(verdict, (bool, np.bool_, Offload)):
        raise ArgumentError(
            f"the policy {name_of(policy)} of checkpoint returned {verdict!r} for {eqn.prim}.",
            where=source.here(),
            fix="return True to store the results of the equation, or False",
        )
    return verdict if isinstance(verdict, Offload) else bool(verdict)


def _stored(x: Any, verdict: Verdict) -> Any:
    """Move a value to the memory where it waits for the backward pass."""
    return in_memory(x, _memory_of(verdict, x.aval.memory))


def _memory_of(verdict: Verdict, here: str) -> str:
    """The memory in which a value waits that is computed ``here``."""
    return verdict.dst if isinstance(verdict, Offload) else here


def _fetched(x: Any, verdict: Verdict) -> Any:
    """Move a value back for the backward pass."""
    return in_memory(x, verdict.src) if isinstance(verdict, Offload) else x


class _Silent(Trace):
    """Recomputes without side effects."""

    __slots__ = ("inner",)

    def __init__(self, inner: Trace):
        super().__init__()
        self.inner = inner

    def process(self, prim, args, params):
        if prim.effects_of(params):
            if prim.multiple_results and not prim.typed(tuple([lift(a).aval for a in args]), params):
                return []
            params = effects.silenced_params(params)
            if prim.effects_of(params):
                raise UnsupportedError(
                    f"checkpoint would repeat the effect of {prim} when it recomputes it.",
                    where=source.describe(source.replay.line or source.current()),
                    why="the results of an io_callback are saved, but not inside of a loop, a branch, another "
                    "checkpoint or a function with custom derivative rules.",
                    fix="move the io_callback out of it, or checkpoint that part separately",
                )
        return self.inner.process(prim, args, params)


def _eval_knowing(jaxpr: Jaxpr, args: tuple, known: dict[Var, Any]) -> list[Any]:
    """``eval_jaxpr`` under a ``LinearizeTrace``, with some known primal values."""
    if not known:
        return eval_jaxpr(jaxpr, args)
    trace: Any = state.trace
    split = trace.split
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    previous = source.replay.line
    try:
        for eqn in jaxpr.eqns:
            source.replay.line = eqn.source
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
        trace.split, source.replay.line = split, previous
    return [a.array if a.__class__ is Literal else env[a] for a in jaxpr.outvars]


class _Known(Trace):
    """Supplies an equation's known primal result to its jvp rule."""

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
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@overload
def checkpoint(
    fun: Callable[P, R],
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    concrete: bool = False,
) -> Callable[P, R]: ...
@overload
def checkpoint(
    fun: None = None,
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    concrete: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    concrete: bool = False,
) -> Any:
    """Rematerialize intermediate values of ``fun`` in the backward pass.

    Side effects are not repeated: ``debug.print`` prints in the forward pass only.

    Args:
      fun: a function of pytrees of arrays. Without it, a decorator is returned.
      prevent_cse: True or False has no effect: recomputation is never merged with the forward pass.
      policy: the intermediate results to save nevertheless: one of ``policies``, default ``nothing_saveable``,
        or a hashable function ``(primitive, *input_avals, **params) -> bool``.
      static_argnums, static_argnames: arguments that are Python values, passed unchanged. A name also applies to
        a positional argument, if the signature has it.
      concrete: must be False; use static arguments for values that Python code inspects.
    Returns:
      a function with the same values and derivatives.
    Raises:
      ArgumentError: ``fun`` or ``policy`` is not a function, or an argument is not a pytree of arrays.
      UnsupportedError: ``concrete=True``.
      UnsupportedError (when it is differentiated): an ``io_callback`` inside of a loop in ``fun`` would be repeated.
    """
    if concrete is not False:
        raise UnsupportedError(
            f"checkpoint takes no concrete={concrete!r:.60}.",
            where=source.here(),
            why="the function is traced, so that it can be recomputed.",
            fix="static_argnums=... for arguments whose values Python code inspects",
        )
    names = argument_names(static_argnames, "checkpoint: static_argnames")
    if fun is None:
        return functools.partial(
            checkpoint,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise ArgumentError(f"checkpoint takes a function, not {fun!r}.", where=source.here())
    if policy is not None and not (callable(policy) and isinstance(policy, Hashable)):
        raise ArgumentError(
            f"checkpoint: the policy is {policy!r}, which is not a hashable function.",
            where=source.here(),
            fix="policy=bf.checkpoint_policies.dots_saveable",
        )

    signature = signature_of(fun) if names else None
    parameters = signature.parameters.values() if signature else ()
    named_positions = [i for i, p in enumerate(parameters) if p.kind in _POSITIONAL and p.name in names]

    @functools.wraps(fun)
    def checkpointed(*args, **kwargs):
        static = argument_indices(static_argnums, len(args), "static_argnums")
        static = tuple(sorted({*static, *(i for i in named_positions if i < len(args))}))
        named = {k: v for k, v in kwargs.items() if k in names}
        kwargs = {k: v for k, v in kwargs.items() if k not in names}
        call = _with_static(fun, args, static, named) if static or named else fun
        leaves, in_tree = tree.flatten((tuple([a for i, a in enumerate(args) if i not in static]), kwargs))
        labels = labels_of(call, in_tree)
        values = as_values(leaves, lambda i: f"the argument {labels[i]}")
        flat = FlatFunction(call, in_tree)
        jaxpr, consts = stage_body(flat, [v.aval for v in values], values, name_of(fun), labels).hoist()
        outs = checkpoint_p.bind(
            *consts, *values, jaxpr=jaxpr, policy=policy or nothing_saveable, name=name_of(fun)
        )
        return tree.unflatten(flat.out_tree, outs)

    return checkpointed


remat = checkpoint


def _with_static(fun: Callable, args: tuple, static: tuple[int, ...], named: dict[str, Any]) -> Callable:
    """``fun`` of the dynamic arguments only."""

    def call(*dynamic, **kwargs):
        rest = iter(dynamic)
        return fun(*[a if i in static else next(rest) for i, a in enumerate(args)], **kwargs, **named)

    call.__name__ = name_of(fun)
    return call
