"""Base of functions with custom rules: arguments, call primitive, tracing.

Transforms, stage 2, below ``custom_jvp``, ``custom_vjp`` and ``custom_vmap``. In: a function, the arguments of a call,
and the flat form of its rules. Out: a differentiating trace runs the rules; a trace that does not differentiate stages
the function and keeps the rules with it, for a transform further out; evaluation just calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr, Var, eval_jaxpr
from blufunc.core.ir.trace import EVAL, set_trace, state
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.primitives.primitive import concrete
from blufunc.core.primitives.tangents import Zero
from blufunc.core.programs.stage import stage_body
from blufunc.core.pytree import paths, tree
from blufunc.errors import BlufuncError, ClosureError, GradError, TreeError, ValueRangeError
from blufunc.transforms.arguments import (
    FlatFunction,
    argument_names,
    argument_numbers,
    as_values,
    check_callable,
    check_structure,
    labels_of,
    name_of,
    signature_of,
)
from blufunc.transforms.autodiff.jvp import JVPTrace
from blufunc.transforms.autodiff.linearize import SplitTrace
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow.calls import Call

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class BodyFunction:
    """The body of an equation as a function, for interpreters written for JAX."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr

    def call_wrapped(self, *args: Any) -> list[Any]:
        """The results of the body, under the current trace."""
        return eval_jaxpr(self.jaxpr, args)


class RuledCall(Call):
    """A call that keeps rules for a transform; inlined by compilers.

    Attributes:
      rule: the parameter that holds them, on flat lists.
      batched_rule: ``batched_rule(rule, axis, batched)``, the rules over a batch, batch axes in front.
    """

    inline = True
    rule: str
    batched_rule: Callable
    drop_outputs = None  # type: ignore[assignment]  # the rules are for all results

    def get_bind_params(self, params):
        """The body twice: JAX has the function and its rule, which ``params`` hold here."""
        body = BodyFunction(params["jaxpr"])
        return [body, body], params

    def bind(self, *args, **params):
        if args and args[0].__class__ is BodyFunction:
            args = args[2:]
        return super().bind(*args, **params)

    def evaluate(self, args, params):
        """The operands themselves if the function only returns arguments."""
        jaxpr = params["jaxpr"]
        places = {v: i for i, v in enumerate(jaxpr.invars)} if not jaxpr.eqns else {}
        if all(v.__class__ is Var and v in places for v in jaxpr.outvars):
            return [concrete(args[places[v]]) for v in jaxpr.outvars]
        return super().evaluate(args, params)

    def rewrite(self, bodies, operands, *, jaxpr, **params):
        """The transformed function: its rules are of arrays, not of boxes."""
        return bodies.inline(jaxpr, operands)

    def batch(self, axis, args, dims, *, jaxpr, n_consts, **params):
        """All results are batched: a rule may mix what the function keeps apart."""
        batched = tuple(d is not None for d in dims)
        body, _ = batch_jaxpr(jaxpr, axis, batched, (True,) * len(jaxpr.outvars))
        body, consts = body.hoist()
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        params[self.rule] = type(self).batched_rule(params[self.rule], axis, batched[n_consts:])
        outs = self.bind(*consts, *ins, jaxpr=body, n_consts=len(consts) + n_consts, **params)
        return outs, [0] * len(outs)


class FlatRules:
    """The user's rules on flat lists.

    Attributes:
      prim: the primitive of the function's calls.
      differentiate: ``differentiate(trace, primals, tangents) -> (outs, out_tangents)``, of tangents not all zero.
      params: from the number of constants to the parameters of a call, without its jaxpr.
      out_tree, out_avals: the structure and the types of the function's result; None until it was staged, or a rule
        has run.
    """

    prim: RuledCall
    differentiate: Callable
    params: Callable

    def __init__(self, owner: Any, in_tree: tree.TreeDef, static: tuple):
        self.owner, self.in_tree, self.static = owner, in_tree, static
        self.name = name_of(owner.fun)
        self.out_tree: Any = None
        self.out_avals: Any = None

    def results(self, pair: Any, rule: str, second: str) -> tuple[list, Any]:
        """The function's result, flat and checked, and the rule's other one."""
        what = f"the {rule} rule of {self.name}"
        out, other = check_pair(pair, what, f"(out, {second})")
        leaves, structure = tree.flatten(out)
        values = as_values(leaves, lambda i: f"out of {what}")
        if self.out_tree is not None:
            check_structure(self.out_tree, structure, what, ("the function's result", "out"), error=GradError)
        for i, (got, want) in enumerate(zip(values, self.out_avals or (), strict=bool(self.out_avals))):
            if not got.aval.same_type(want):
                raise GradError(
                    f"{what} returned out{paths.leaf_paths(structure)[i]} as {got.aval}, "
                    f"where the function returns {want}.",
                    where=source.here(),
                    fix="return the value of the function itself first",
                )
        self.out_tree = structure
        return values, other


class CustomFunction(Generic[P, R]):
    """A function with custom rules: the base of the decorators.

    Attributes:
      fun: the function.
      nondiff: the positions of arguments that are not differentiated.
    """

    if TYPE_CHECKING:
        __wrapped__: Callable[P, R]

        # of each subclass
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __init__(
        self,
        fun: Callable[P, R],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ):
        check_callable(fun, type(self).__name__)
        functools.update_wrapper(self, fun)
        for name in vars(type(self)).keys() & vars(self).keys() - set(functools.WRAPPER_ASSIGNMENTS):
            del self.__dict__[name]  # rules of a wrapped custom function, which are not of this one
        self.fun: Callable[..., R] = fun
        self.nondiff = nondiff_positions(fun, nondiff_argnums, nondiff_argnames)

    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Callable[Concatenate[Any, Q], R], obj: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def undefined(self, rules: str, fix: str, error: type[BlufuncError] = GradError) -> BlufuncError:
        """The error for a call before the rules were set."""
        name = name_of(self.fun)
        return error(
            f"{name} is a {type(self).__name__} without {rules}.", where=source.here(), fix=fix.format(name)
        )

    def run(self, fun: Callable, args: tuple, rules_of: Callable[[tree.TreeDef, list], FlatRules]) -> Any:
        """Call the function under the present trace.

        Args:
          fun: the function of the differentiable arguments.
          args: these.
          rules_of: from their structure and values to the flat rules.
        """
        trace = state.trace
        if trace is EVAL:
            return fun(*args)
        in_tree, values = flat_arguments(fun, args)
        if isinstance(trace, SplitTrace) and not any(map(trace.is_tangent, values)):
            with set_trace(
                trace.parent
            ):  # a rule calls the function: its Python code runs where the rule's does
                return self.run(fun, args, rules_of)
        rules = rules_of(in_tree, values)
        if isinstance(trace, JVPTrace):
            pairs = [trace.pair(v) for v in values]
            primals, tangents = [p for p, _ in pairs], [t for _, t in pairs]
            if all(t.__class__ is Zero for t in tangents):
                with set_trace(trace.parent):
                    return self.run(fun, tree.unflatten(in_tree, primals)[0], rules_of)
            outs, out_ts = rules.differentiate(trace, primals, tangents)
            return tree.unflatten(rules.out_tree, trace.wrap(rules.prim, outs, out_ts))
        flat, jaxpr, consts = staged(fun, in_tree, values)
        rules.out_tree, rules.out_avals = flat.out_tree, jaxpr.out_avals
        outs = rules.prim.bind(*consts, *values, jaxpr=jaxpr, **rules.params(len(consts)))
        return tree.unflatten(flat.out_tree, outs)


def flat_arguments(fun: Callable, args: tuple) -> tuple[tree.TreeDef, list]:
    """The structure of ``(args, {})`` and its leaves as values."""
    leaves, in_tree = tree.flatten((args, {}))
    return in_tree, as_values(leaves, lambda i: f"the argument {labels_of(fun, in_tree)[i]}")


def staged(fun: Callable, in_tree: tree.TreeDef, values: Sequence) -> tuple[FlatFunction, Jaxpr, Sequence]:
    """The flat function, its jaxpr, and its closure, the first operands."""
    flat = FlatFunction(fun, in_tree)
    jaxpr, consts = stage_body(flat, [v.aval for v in values], values, name_of(fun)).hoist()
    return flat, jaxpr, consts


def check_closure(tangents: Sequence, name: str) -> None:
    """Raise ClosureError if the closure of a custom rule is differentiated."""
    for t in tangents:
        if t.__class__ is not Zero:
            raise ClosureError(
                f"{name} has derivative rules of its own and closes over a value that is differentiated ({t.aval}).",
                where=source.here(),
                why="its rules give derivatives with respect to its arguments only.",
                fix="pass the value as an argument",
            )


def nondiff_positions(fun: Callable, argnums: Any, argnames: Any) -> tuple[int, ...]:
    """Positions of non-differentiated arguments, in the parameters' order."""
    found = {*argument_numbers(argnums, "nondiff_argnums")}
    signature = signature_of(fun)
    parameters = list(signature.parameters) if signature else []
    for name in argument_names(argnames, "nondiff_argnames"):
        if name not in parameters:
            raise ValueRangeError(
                f"nondiff_argnames: {name_of(fun)} has no parameter {name!r}.",
                where=source.here(),
                fix=f"its parameters are {', '.join(parameters)}",
            )
        found.add(parameters.index(name))
    return tuple(sorted(found, key=lambda i: (i < 0, i)))


def check_pair(
    found: Any, rule: str, wants: str, error: type[BlufuncError] = GradError, fix: str = ""
) -> Any:
    """The result of a rule, which must be a pair."""
    if not (isinstance(found, (tuple, list)) and len(found) == 2):
        raise error(
            f"{rule} must return {wants}, it returned a {type(found).__name__}.",
            where=source.here(),
            fix=fix or None,
        )
    return found


def expand_nones(found: Any, expected: tree.TreeDef, rule: str, names: tuple[str, str]) -> list:
    """A rule's tangents or cotangents, flat; None may stand for a subtree."""
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
        check_structure(expected, tree.structure(found), rule, names, error=GradError)
    return flat
