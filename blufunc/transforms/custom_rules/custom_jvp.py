"""``custom_jvp``: a function whose forward-mode rule the user gives.

Transforms, stage 2. The function reaches a differentiating trace as a call of the rule. A trace that
does not differentiate stages the function, so that the rule is still there for a transform further
out; evaluation just calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import EVAL, Tracer, set_trace, state
from blufunc.core.ops.elementwise import stop_gradient
from blufunc.core.primitives.linear_ops import add_any, all_front, instantiate, move_dim, zeros
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import paths, tree
from blufunc.errors import ArgumentError, GradError, TreeError, ValueRangeError
from blufunc.transforms.arguments import (
    FlatFunction,
    argument_indices,
    as_values,
    bind_positional,
    check_callable,
    fix_static,
    labels_of,
    name_of,
    signature_of,
)
from blufunc.transforms.autodiff.jvp import JVPTrace
from blufunc.transforms.autodiff.linearize import LinearizeTrace, SplitTrace
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero, for_rule
from blufunc.transforms.batching.batch import Axis, batch_flat, batch_jaxpr
from blufunc.transforms.control_flow.calls import Call, jit_p


class _CustomJVPCall(Call):
    """A call that is differentiated by ``rule(primals, tangents) -> (outs, out_tangents)``, on flat lists.

    The first ``n_consts`` operands are what the function closes over: the rule does not take them.
    """

    name, inline = "custom_jvp_call", True
    linearize = None  # type: ignore[assignment]  # the rule splits by itself, as any jvp rule

    def jvp(self, primals, tangents, *, jaxpr, rule, n_consts, name):
        check_closure(tangents[:n_consts], name)
        return rule(primals[n_consts:], tangents[n_consts:])

    def transpose(self, cts, *args, jaxpr, rule, n_consts, name):
        """The body's: what is transposed is linear already, so that the rule has nothing to say."""
        jit_p.transpose(cts, *args, jaxpr=jaxpr, name=name)

    def batch(self, axis, args, dims, *, jaxpr, rule, n_consts, name):
        body, consts, ins, batched = batched_call(jaxpr, axis, args, dims)
        params = {"rule": _BatchedRule(rule, axis, batched[n_consts:]), "n_consts": len(consts) + n_consts}
        outs = self.bind(*consts, *ins, jaxpr=body, name=name, **params)
        return outs, [0] * len(outs)

    def rewrite(self, bodies, operands, *, jaxpr, **params):
        """The function gone through: its rule is of arrays, not of boxes."""
        return bodies.inline(jaxpr, operands)

    drop_outputs = None  # type: ignore[assignment]  # the rules are for all results


def batched_call(jaxpr: Jaxpr, axis: Axis, args: Sequence, dims: Sequence) -> tuple:
    """A call with rules of its own over a batch: its body, constants, operands, and which of these are batched.

    All results are: a rule may mix what the function keeps apart.
    """
    batched = tuple(d is not None for d in dims)
    body, _ = batch_jaxpr(jaxpr, axis, batched, (True,) * len(jaxpr.outvars))
    body, consts = body.hoist()
    return (
        body,
        consts,
        [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)],
        batched,
    )


def check_closure(tangents: Sequence, name: str) -> None:
    """Raise GradError if a function with rules of its own closes over a value that is differentiated."""
    for t in tangents:
        if t.__class__ is not Zero:
            raise GradError(
                f"{name} has derivative rules of its own and closes over a value that is differentiated ({t.aval}).",
                where=source.here(),
                why="its rules give derivatives with respect to its arguments only.",
                fix="pass the value as an argument",
            )


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


custom_jvp_call_p = _CustomJVPCall()


def owner_of(rule: Any) -> Any:
    """The ``custom_jvp`` that the rule of an equation is of, whatever transforms made of it; None if it is of none."""
    while rule is not None and not isinstance(rule, _FlatRule):
        rule = getattr(rule, "rule", None)
    return None if rule is None else rule.owner


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
        rule first, in the order of the parameters. A traced array among them is held constant.
      nondiff_argnames: such arguments by name.
    """

    def __init__(
        self,
        fun: Callable,
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ):
        check_callable(fun, "custom_jvp")
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff = nondiff_positions(fun, nondiff_argnums, nondiff_argnames)
        self.symbolic_zeros = False
        self.rule: Any = None

    def defjvp(self, rule: Callable, symbolic_zeros: bool = False) -> Callable:
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
        """Set a rule for each argument: ``rule(tangent, out, *primals) -> tangent``; None for zero."""
        name = name_of(self.fun)
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
            out = self(*primals)
            terms = [r(t, out, *primals) for r, t in zip(rules, tangents, strict=True) if r is not None]
            nothing = tree.map(lambda x: zeros(x.aval), out)
            total = functools.reduce(lambda a, b: tree.map(add_any, a, b), terms, nothing)
            return out, total

        self.rule, self.symbolic_zeros = rule, False

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
        if not any(isinstance(a, Tracer) for a in args) or not self.nondiff:
            fun, dynamic, static = fix_static(self.fun, args, self.nondiff)
        else:
            fun, dynamic, static = self._hold(args)
        return _call_custom_jvp(self, fun, dynamic, static)

    def _hold(self, args: tuple) -> tuple[Callable, tuple, tuple]:
        """``fix_static`` where traced arrays that are not differentiated stay operands, held constant."""
        fixed = argument_indices(self.nondiff, len(args), "nondiff_argnums")
        held = [i for i in fixed if isinstance(args[i], Tracer)]
        args = tuple(stop_gradient(a) if i in held else a for i, a in enumerate(args))
        known = tuple(i for i in fixed if i not in held)
        fun, dynamic, _ = fix_static(self.fun, args, known)
        operands = [i for i in range(len(args)) if i not in known]
        return fun, dynamic, tuple(_Held(operands.index(i)) if i in held else args[i] for i in fixed)


class _Held:
    """Stands among the arguments that are not differentiated for one that is an operand."""

    __slots__ = ("place",)

    def __init__(self, place: int):
        self.place = place


def _call_custom_jvp(owner: custom_jvp, fun: Callable, args: tuple, static: tuple) -> Any:
    trace = state.trace
    if trace is EVAL:
        return fun(*args)
    leaves, in_tree = tree.flatten((args, {}))
    values = as_values(leaves, lambda i: f"the argument {labels_of(fun, in_tree)[i]}")
    rule = _FlatRule(owner, in_tree, static)
    if isinstance(trace, SplitTrace) and not any(map(trace.is_tangent, values)):
        with set_trace(trace.parent):  # a rule calls the function: its Python code runs where the rule's does
            return _call_custom_jvp(owner, fun, args, static)
    if isinstance(trace, JVPTrace):
        pairs = [trace.pair(v) for v in values]
        primals, tangents = [p for p, _ in pairs], [t for _, t in pairs]
        if all(t.__class__ is Zero for t in tangents):
            with set_trace(trace.parent):
                return _call_custom_jvp(owner, fun, tree.unflatten(in_tree, primals)[0], static)
        inner = trace.split if isinstance(trace, LinearizeTrace) else trace.parent
        with set_trace(inner):
            outs, out_ts = rule(primals, tangents)
        return tree.unflatten(rule.out_tree, trace.wrap(custom_jvp_call_p, outs, out_ts))
    flat = FlatFunction(fun, in_tree)
    jaxpr, consts = stage(flat, [v.aval for v in values], name_of(owner.fun)).hoist()
    rule.out_tree, rule.out_avals = flat.out_tree, jaxpr.out_avals
    outs = custom_jvp_call_p.bind(
        *consts, *values, jaxpr=jaxpr, rule=rule, n_consts=len(consts), name=name_of(owner.fun)
    )
    return tree.unflatten(flat.out_tree, outs)


def nondiff_positions(fun: Callable, argnums: Any, argnames: Any) -> tuple[int, ...]:
    """``nondiff_argnums`` and ``nondiff_argnames`` as one tuple of positions."""
    nums = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    names = (argnames,) if isinstance(argnames, str) else argnames
    if any(isinstance(i, bool) or not isinstance(i, int) for i in nums):
        raise ArgumentError(
            f"nondiff_argnums are ints, not {argnums!r:.60}.",
            where=source.here(),
            fix="nondiff_argnums=(0,)",
        )
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f"nondiff_argnames are names of parameters, not {argnames!r:.60}.",
            where=source.here(),
            fix="nondiff_argnames=('n',)",
        )
    found = list(nums)
    if names:
        signature = signature_of(fun)
        parameters = list(signature.parameters) if signature else []
        for name in names:
            if name not in parameters:
                raise ValueRangeError(
                    f"nondiff_argnames: {name_of(fun)} has no parameter {name!r}.",
                    where=source.here(),
                    fix=f"its parameters are {', '.join(parameters)}",
                )
            if parameters.index(name) not in found:
                found.append(parameters.index(name))
    return tuple(sorted(found, key=lambda i: (i < 0, i)))  # in the order of the parameters


class _FlatRule:
    """The user's jvp rule on flat lists, its results checked."""

    def __init__(self, owner: custom_jvp, in_tree: tree.TreeDef, static: tuple):
        self.owner, self.in_tree, self.static = owner, in_tree, static
        self.held = {s.place for s in static if s.__class__ is _Held}
        self.out_tree: Any = None  # of the function's result, where it is known, and the types
        self.out_avals: Any = None

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
        name = name_of(self.owner.fun)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise GradError(
                f"the jvp rule of {name} must return (out, out_tangent), it returned a {type(pair).__name__}.",
                where=source.here(),
            )
        outs, self.out_tree = rule_results(
            pair[0], self.out_tree, self.out_avals, f"the jvp rule of {name}", "out"
        )
        out_ts = expand_nones(pair[1], self.out_tree, f"the jvp rule of {name}", ("out", "out_tangent"))
        return outs, [_checked_tangent(o, t, name) for o, t in zip(outs, out_ts, strict=True)]


def rule_results(
    out: Any, expected: tree.TreeDef | None, avals: Sequence[ShapedArray] | None, rule: str, what: str
) -> tuple[list, tree.TreeDef]:
    """What a rule returns as the function's result, flat, and its structure; both as the function has them."""
    leaves, structure = tree.flatten(out)
    values = as_values(leaves, lambda i: f"{what} of {rule}")
    if expected is not None:
        check_rule_structure(expected, structure, rule, ("the function's result", what))
    for i, (got, want) in enumerate(zip(values, avals or (), strict=bool(avals))):
        if not got.aval.same_type(want):
            raise GradError(
                f"{rule} returned {what}{paths.leaf_paths(structure)[i]} as {got.aval}, "
                f"where the function returns {want}.",
                where=source.here(),
                fix="return the value of the function itself first",
            )
    return values, structure


def check_rule_structure(
    expected: tree.TreeDef, got: tree.TreeDef, rule: str, names: tuple[str, str]
) -> None:
    """Raise GradError with the differing paths unless two structures agree."""
    if expected != got:
        raise GradError(
            f"{rule}: {names[1]} has another structure than {names[0]}.",
            where=source.here(),
            why="; ".join(paths.diff(expected, got, *names)[:5]),
        )


def expand_nones(found: Any, expected: tree.TreeDef, rule: str, names: tuple[str, str]) -> list:
    """Tangents or cotangents that a rule returned, flat, where None may stand for a whole subtree of zeros."""
    skeleton = tree.unflatten(expected, [0] * expected.num_leaves)
    try:
        flat = tree.broadcast_prefix(found, skeleton, is_leaf=lambda x: x is None)
    except TreeError:
        flat = []
    given = tree.leaves(found)
    kept = [x for x in flat if x is not None]
    if (
        len(flat) != expected.num_leaves
        or len(kept) != len(given)
        or any(a is not b for a, b in zip(kept, given, strict=True))
    ):
        check_rule_structure(expected, tree.structure(found), rule, names)
    return flat


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
