"""``custom_jvp``: a function whose forward-mode rule the user gives.

Transforms, stage 2, on ``custom_call``. The function reaches a differentiating trace as a call of the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Tracer, set_trace
from blufunc.core.ops.elementwise import stop_gradient
from blufunc.core.primitives.linear_ops import add_any, all_front, instantiate, zeros
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.pytree import tree
from blufunc.errors import GradError
from blufunc.transforms.arguments import (
    argument_indices,
    as_values,
    bind_positional,
    check_callable,
    fix_static,
    name_of,
)
from blufunc.transforms.autodiff.linearize import LinearizeTrace
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero, for_rule
from blufunc.transforms.batching.batch import Axis, batch_flat
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.custom_rules.custom_call import (
    CustomFunction,
    FlatRules,
    RuledCall,
    check_closure,
    expand_nones,
)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class _BatchedRule:
    """A jvp rule over a batch: batch axes in front."""

    def __init__(self, rule: Callable, axis: Axis, batched: tuple[bool, ...]):
        self.rule, self.axis, self.batched = rule, axis, batched
        self.__name__ = rule.__name__

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        dims = [0 if b else None for b in self.batched]
        given = [t.__class__ is not Zero for t in tangents]

        def both(*xs):
            ps, rest = xs[: len(dims)], iter(xs[len(dims) :])
            ts = [next(rest) if g else zero(p.aval) for p, g in zip(ps, given, strict=True)]
            outs, out_ts = self.rule(ps, ts)
            return [*outs, *map(instantiate, out_ts)]

        t_dims = [d for d, g in zip(dims, given, strict=True) if g]
        t_values = [t for t, g in zip(tangents, given, strict=True) if g]
        results, out_dims = batch_flat(both, self.axis, [*primals, *t_values], [*dims, *t_dims])
        results = all_front(self.axis, results, out_dims)
        n = len(results) // 2
        return results[:n], results[n:]


class _CustomJVPCall(RuledCall):
    """A call with a jvp rule on flat lists.

    ``rule(primals, tangents)`` returns ``(outs, out_tangents)``. The first ``n_consts`` operands are the closure of the
    function: the rule does not take them.
    """

    name, rule, batched_rule = "custom_jvp_call", "rule", _BatchedRule
    linearize = None  # type: ignore[assignment]  # the rule splits by itself, as any jvp rule

    def jvp(self, primals, tangents, *, jaxpr, rule, n_consts, name):
        check_closure(tangents[:n_consts], name)
        return rule(primals[n_consts:], tangents[n_consts:])

    def transpose(self, cts, *args, jaxpr, rule, n_consts, name):
        """Transpose the body: it is linear already, so the rule does not apply."""
        jit_p.transpose(cts, *args, jaxpr=jaxpr, name=name)


custom_jvp_call_p = _CustomJVPCall()


def owner_of(rule: Any) -> Any:
    """The ``custom_jvp`` of an equation's rule, through transforms; None if none."""
    while rule is not None and not isinstance(rule, _FlatRule):
        rule = getattr(rule, "rule", None)
    return None if rule is None else rule.owner


class custom_jvp(CustomFunction[P, R]):
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
        rule first, in the order of the parameters. A traced array among them is held constant.
      nondiff_argnames: such arguments by name.
    """

    symbolic_zeros = False
    rule: Any = None

    def defjvp(self, rule: F, symbolic_zeros: bool = False) -> F:
        """Set the rule, and return it.

        Args:
          rule: ``rule(*nondiff, primals, tangents) -> (out, out_tangent)``.
          symbolic_zeros: whether the rule is to get a ``SymbolicZero`` for each tangent that is zero by construction,
            instead of zeros. It may return them for tangents, as it may return None in any case.
        """
        check_callable(rule, "defjvp")
        self.rule = rule
        self.symbolic_zeros = bool(symbolic_zeros)
        return rule

    def defjvps(self, *rules: Callable | None) -> None:
        """Set a rule per argument: ``rule(tangent, out, *primals)``; None for zero."""
        name, call = name_of(self.fun), cast(Callable[..., R], self)
        if self.nondiff:
            raise GradError(
                f"defjvps of {name}, which has nondiff_argnums.",
                where=source.here(),
                fix=f"@{name}.defjvp, whose rule is given those arguments first",
            )

        def rule(primals, tangents):
            if len(rules) != len(primals):
                raise GradError(
                    f"defjvps gave {name} {len(rules)} rules, and it is called with {len(primals)} arguments.",
                    where=source.here(),
                    fix="give one rule for each argument, None where the derivative is zero",
                )
            out = call(*primals)
            terms = [r(t, out, *primals) for r, t in zip(rules, tangents, strict=True) if r is not None]
            nothing = tree.map(lambda x: zeros(x.aval), out)
            total = functools.reduce(lambda a, b: tree.map(add_any, a, b), terms, nothing)
            return out, total

        self.rule, self.symbolic_zeros = rule, False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.rule is None:
            raise self.undefined("a rule", "@{}.defjvp")
        args = bind_positional(self.fun, args, kwargs)
        if not any(isinstance(a, Tracer) for a in args) or not self.nondiff:
            fun, dynamic, static = fix_static(self.fun, args, self.nondiff)
        else:
            fun, dynamic, static = self._hold(args)
        return self.run(fun, dynamic, lambda in_tree, values: _FlatRule(self, in_tree, static))

    def _hold(self, args: tuple) -> tuple[Callable, tuple, tuple]:
        """``fix_static`` that keeps traced nondiff arguments as constant operands."""
        fixed = argument_indices(self.nondiff, len(args), "nondiff_argnums")
        held = [i for i in fixed if isinstance(args[i], Tracer)]
        args = tuple(stop_gradient(a) if i in held else a for i, a in enumerate(args))
        known = tuple(i for i in fixed if i not in held)
        fun, dynamic, _ = fix_static(self.fun, args, known)
        operands = [i for i in range(len(args)) if i not in known]
        return fun, dynamic, tuple(_Held(operands.index(i)) if i in held else args[i] for i in fixed)


class _Held:
    """Placeholder of a nondiff argument that is an operand."""

    __slots__ = ("place",)

    def __init__(self, place: int):
        self.place = place


class _FlatRule(FlatRules):
    """The user's jvp rule on flat lists, its results checked."""

    prim = custom_jvp_call_p

    def __init__(self, owner: custom_jvp, in_tree: tree.TreeDef, static: tuple):
        super().__init__(owner, in_tree, static)
        self.held = {s.place for s in static if s.__class__ is _Held}

    @property
    def __name__(self) -> str:
        return name_of(self.owner.rule)

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        ps, _ = tree.unflatten(self.in_tree, primals)
        ts, _ = tree.unflatten(self.in_tree, for_rule(tangents, self.owner.symbolic_zeros))
        static = self.static
        if self.held:
            static = tuple(ps[s.place] if s.__class__ is _Held else s for s in static)
            ps, ts = (tuple(x for i, x in enumerate(xs) if i not in self.held) for xs in (ps, ts))
        with source.own_lines():
            pair = self.owner.rule(*static, ps, ts)
        outs, found = self.results(pair, "jvp", "out_tangent")
        out_ts = expand_nones(found, self.out_tree, f"the jvp rule of {self.name}", ("out", "out_tangent"))
        return outs, [_checked_tangent(o, t, self.name) for o, t in zip(outs, out_ts, strict=True)]

    def differentiate(self, trace, primals, tangents):
        with set_trace(trace.split if isinstance(trace, LinearizeTrace) else trace.parent):
            return self(primals, tangents)

    def params(self, n_consts):
        return {"rule": self, "n_consts": n_consts, "name": self.name}


def _checked_tangent(out: Any, t: Any, name: str) -> Any:
    expected = out.aval.tangent()
    if t is None or t.__class__ is SymbolicZero or expected.dtype == dtypes.float0:
        return zero(out.aval)
    (t,) = as_values([t], lambda i: f"the tangent from the jvp rule of {name}")
    if not expected.same_type(t.aval):
        raise GradError(
            f"the jvp rule of {name} returned a tangent {t.aval} for a result {out.aval}.",
            where=source.here(),
            fix="give the tangent the shape and dtype of the result",
        )
    return t
