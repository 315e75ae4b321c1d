"""``custom_jvp``: a function whose forward-mode rule the user gives.

Transforms, stage 2. The function reaches a differentiating trace as a call of the rule. A trace that
does not differentiate stages the function, so that the rule is still there for a transform further
out; evaluation just calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core import dtypes, source, tree
from blufunc.core.primitive import unsupported
from blufunc.core.stage import stage
from blufunc.core.structure import add_any, batched_front, instantiate, move_dim, zeros
from blufunc.core.tangents import Zero, zero
from blufunc.core.trace import EVAL, set_trace, state
from blufunc.errors import GradError
from blufunc.transforms.arguments import (
    FlatFunction,
    as_values,
    bind_positional,
    check_structure,
    fix_static,
    labels_of,
    name_of,
)
from blufunc.transforms.batch import Axis, batch_flat, batch_jaxpr
from blufunc.transforms.calls import Call
from blufunc.transforms.jvp import JVPTrace
from blufunc.transforms.linearize import LinearizeTrace


class _CustomJVPCall(Call):
    """A call that is differentiated by ``rule(primals, tangents) -> (outs, out_tangents)``, on flat lists."""

    name, inline = "custom_jvp_call", True
    linearize = None  # type: ignore[assignment]  # the rule splits by itself, as any jvp rule

    def jvp(self, primals, tangents, *, jaxpr, rule, name):
        return rule(primals, [instantiate(t) for t in tangents])

    transpose = unsupported("it is differentiated by its own jvp rule before anything is transposed")

    def batch(self, axis, args, dims, *, jaxpr, rule, name):
        batched = tuple(d is not None for d in dims)
        body, out_batched = batch_jaxpr(jaxpr, axis, batched)
        body, consts = body.hoist()
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        n = len(consts)
        rule = _BatchedRule(rule, axis, batched, out_batched, n)
        outs = self.bind(*consts, *ins, jaxpr=body, rule=rule, name=name)
        return outs, [0 if b else None for b in out_batched]


class _BatchedRule:
    """A jvp rule over a batch: batch axes in front, on the outputs named by ``out_batched``."""

    def __init__(self, rule: Callable, axis: Axis, batched: tuple, out_batched: tuple, n_consts: int):
        self.rule, self.axis, self.batched, self.out_batched, self.n = (
            rule,
            axis,
            batched,
            out_batched,
            n_consts,
        )

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        primals, tangents = primals[self.n :], tangents[self.n :]
        dims = [0 if b else None for b in self.batched]

        def both(*xs):
            outs, out_ts = self.rule(xs[: len(dims)], xs[len(dims) :])
            return [*outs, *map(instantiate, out_ts)]

        results, out_dims = batch_flat(both, self.axis, [*primals, *tangents], [*dims, *dims])
        placed = [
            batched_front(self.axis, x, d) if b else x
            for x, d, b in zip(results, out_dims, self.out_batched * 2, strict=True)
        ]
        n = len(self.out_batched)
        return placed[:n], placed[n:]


custom_jvp_call_p = _CustomJVPCall()


class custom_jvp:
    """A function whose forward-mode rule the user gives; reverse mode follows from it.

        @bf.custom_jvp
        def f(x, y): ...

        @f.defjvp
        def f_jvp(primals, tangents):
            x, y = primals
            x_dot, y_dot = tangents
            return f(x, y), ...   # the second of f's structure, linear in the tangents

    Args:
      fun: a function of pytrees of arrays.
      nondiff_argnums: positional arguments that are not differentiated: Python values or functions, handed to the
        rule first.
    """

    def __init__(self, fun: Callable, nondiff_argnums: Sequence[int] = ()):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff = tuple(nondiff_argnums)
        self.rule: Any = None

    def defjvp(self, rule: Callable) -> Callable:
        """Set the rule: ``rule(*nondiff, primals, tangents) -> (out, out_tangent)``. Returns it."""
        self.rule = rule
        return rule

    def defjvps(self, *rules: Callable | None) -> None:
        """Set a rule for each argument: ``rule(tangent, out, *primals) -> tangent``; None for zero."""

        def rule(primals, tangents):
            out = self(*primals)
            terms = [r(t, out, *primals) for r, t in zip(rules, tangents, strict=True) if r is not None]
            nothing = tree.map(lambda x: zeros(x.aval), out)
            total = functools.reduce(lambda a, b: tree.map(add_any, a, b), terms, nothing)
            return out, total

        self.rule = rule

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        if self.rule is None:
            raise GradError(
                f"{name_of(self.fun)} is a custom_jvp without a rule.",
                where=source.here(),
                fix=f"@{name_of(self.fun)}.defjvp",
            )
        args = bind_positional(self.fun, args, kwargs)
        fun, dynamic, static = fix_static(self.fun, args, self.nondiff)
        return _call_custom_jvp(self, fun, dynamic, static)


def _call_custom_jvp(owner: custom_jvp, fun: Callable, args: tuple, static: tuple) -> Any:
    trace = state.trace
    if trace is EVAL:
        return fun(*args)
    leaves, in_tree = tree.flatten((args, {}))
    values = as_values(leaves, lambda i: f"the argument {labels_of(fun, in_tree)[i]}")
    rule = _FlatRule(owner, in_tree, static)
    if isinstance(trace, JVPTrace):
        pairs = [trace.pair(v) for v in values]
        primals, tangents = [p for p, _ in pairs], [t for _, t in pairs]
        if all(t.__class__ is Zero for t in tangents):
            with set_trace(trace.parent):
                return _call_custom_jvp(owner, fun, tree.unflatten(in_tree, primals)[0], static)
        inner = trace.split if isinstance(trace, LinearizeTrace) else trace.parent
        with set_trace(inner):
            outs, out_ts = rule(primals, [instantiate(t) for t in tangents])
        return tree.unflatten(rule.out_tree, trace.wrap(custom_jvp_call_p, outs, out_ts))
    flat = FlatFunction(fun, in_tree)
    jaxpr, consts = stage(flat, [v.aval for v in values], name_of(owner.fun)).hoist()
    rule.n_consts, rule.out_tree = len(consts), flat.out_tree
    outs = custom_jvp_call_p.bind(*consts, *values, jaxpr=jaxpr, rule=rule, name=name_of(owner.fun))
    return tree.unflatten(flat.out_tree, outs)


class _FlatRule:
    """The user's jvp rule on flat lists, its results checked. Closed-over values get no derivative from it."""

    def __init__(self, owner: custom_jvp, in_tree: tree.TreeDef, static: tuple):
        self.owner, self.in_tree, self.static = owner, in_tree, static
        self.n_consts = 0
        self.out_tree: Any = None

    @property
    def __name__(self) -> str:
        return name_of(self.owner.rule)

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        n = self.n_consts
        ps, _ = tree.unflatten(self.in_tree, primals[n:])
        ts, _ = tree.unflatten(self.in_tree, tangents[n:])
        pair = self.owner.rule(*self.static, ps, ts)
        name = name_of(self.owner.fun)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise GradError(
                f"the jvp rule of {name} must return (out, out_tangent), it returned a {type(pair).__name__}.",
                where=source.here(),
            )
        outs, out_tree = tree.flatten(pair[0])
        out_ts, t_tree = tree.flatten(pair[1], is_leaf=lambda x: x is None)
        if self.out_tree is not None:
            check_structure(
                self.out_tree, out_tree, f"the jvp rule of {name}", ("the function's result", "out")
            )
        check_structure(out_tree, t_tree, f"the jvp rule of {name}", ("out", "out_tangent"))
        self.out_tree = out_tree
        outs = as_values(outs, lambda i: "out of the jvp rule")
        return outs, [_checked_tangent(o, t, name) for o, t in zip(outs, out_ts, strict=True)]


def _checked_tangent(out: Any, t: Any, name: str) -> Any:
    expected = out.aval.tangent()
    if t is None or expected.dtype == dtypes.float0:
        return zero(out.aval)
    (t,) = as_values([t], lambda i: f"the tangent from the jvp rule of {name}")
    if not expected.same_type(t.aval):
        raise GradError(
            f"the jvp rule of {name} returned a tangent {t.aval} for a result {out.aval}.",
            where=source.here(),
            fix="give the tangent the shape and dtype of the result",
        )
    return t
