"""``custom_gradient``: a function that returns its value and backward rule.

Transforms, stage 2. The shortest way to write a ``custom_vjp``: the rule is a closure, and what it closes over
are the residuals. They are found by staging the rule, which then travels with them from the forward to the
backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import nodes, tree
from blufunc.errors import GradError
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp

P = ParamSpec("P")
R = TypeVar("R")


class _StagedRule:
    """A staged backward rule: a pytree of the residuals that it closes over.

    Its structure compares by identity of the jaxpr.
    """

    def __init__(self, consts: list, static: tuple[Jaxpr, tree.TreeDef]):
        self.consts = consts
        self.static = static

    def __call__(self, ct: Any) -> Any:
        jaxpr, out_tree = self.static
        found = tree.unflatten(out_tree, eval_jaxpr(jaxpr, [*self.consts, *tree.leaves(ct)]))
        return found if isinstance(found, (tuple, list)) else (found,)


nodes.register_node(
    _StagedRule,
    lambda rule: (rule.consts, rule.static),
    lambda static, consts: _StagedRule(list(consts), static),
)


def custom_gradient(fun: Callable[P, tuple[R, Any]]) -> Callable[P, R]:
    """A function whose backward rule is a closure that it returns.

        @bf.custom_gradient
        def f(x):
            return bnp.sin(x), lambda ct: ct * bnp.cos(x)

    Args:
      fun: from pytrees of arrays to a pair ``(out, rule)``. ``rule`` takes the cotangent of ``out`` and returns the
        tuple of the cotangents of the arguments, or the cotangent alone if there is one argument; None is zero. It is
        traced, at the types of ``out``.
    Returns:
      a function of the same arguments that returns ``out``.
    Raises (when called):
      GradError: ``fun`` does not return a pair, or its rule not what the arguments need.
    """
    check_callable(fun, "custom_gradient")
    name, call = name_of(fun), cast(Callable[..., tuple[R, Any]], fun)

    def pair_of(args: tuple) -> tuple:
        pair = call(*args)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and callable(pair[1])):
            raise GradError(
                f"{name} has custom_gradient and must return (out, rule), it returned a {type(pair).__name__}.",
                where=source.here(),
                fix="return out, lambda ct: ct * derivative",
            )
        return pair[0], pair[1]

    @functools.wraps(fun)
    def value(*args):
        return pair_of(args)[0]

    def fwd(*args):
        out, rule = pair_of(args)
        leaves, out_tree = tree.flatten(out)
        outs = as_values(leaves, lambda i: f"the result of {name}")
        ct_tree: Any = None

        def flat_rule(*cts):
            nonlocal ct_tree
            found, ct_tree = tree.flatten(rule(tree.unflatten(out_tree, cts)))
            return as_values(found, lambda i: f"a cotangent from the rule of {name}")

        jaxpr, consts = stage(flat_rule, [o.aval.tangent().strong() for o in outs], name).hoist()
        return out, _StagedRule(list(consts), (jaxpr, ct_tree))

    def bwd(rule, ct):
        return rule(ct)

    custom = custom_vjp(value)
    custom.defvjp(fwd, bwd)
    return cast(Callable[P, R], custom)
