"""``custom_root``: the user's root finder, with implicit derivatives.

Transforms, stage 2, on top of ``custom_jvp``. Functions are staged here, and what they close over becomes arguments,
so that a root can be differentiated with respect to it. From ``f(x, p) = 0`` follows ``f_x x' = -f_p p'``: the
user's solver of linear systems is given the derivative of ``f`` at the root, and never how the root was found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.ops.elementwise import neg
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.autodiff.grad import linearize
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.control_flow import loop_carry
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.linear_solve import check_types, check_vector, stage_like, taking_numbers

T = TypeVar("T")


@overload
def custom_root(
    f: Callable[[T], T],
    initial_guess: T,
    solve: Callable[..., T],
    tangent_solve: Callable[..., T],
    has_aux: Literal[False] = False,
) -> T: ...
@overload
def custom_root(
    f: Callable[[T], T],
    initial_guess: T,
    solve: Callable[..., Any],
    tangent_solve: Callable[..., T],
    has_aux: Literal[True],
) -> tuple[T, Any]: ...


def custom_root(
    f: Callable, initial_guess: Any, solve: Callable, tangent_solve: Callable, has_aux: bool = False
) -> Any:
    """The x with ``f(x) = 0`` that ``solve`` finds, with the derivatives of a root.

    The root has derivatives with respect to what ``f`` closes over, and none with respect to the guess. ``solve`` is
    not differentiated, so that it may be a loop of any kind. All functions are traced.

    Args:
      f: a function from pytrees like ``initial_guess`` to pytrees like it.
      initial_guess: a pytree of floating or complex arrays.
      solve: ``solve(f, initial_guess)`` returns the root.
      tangent_solve: ``tangent_solve(g, y)``, where ``g`` is linear, returns the x with ``g(x) = y``; itself linear in y
        and, for reverse mode, transposable: ``y / g(1.0)`` for a number, or ``custom_linear_solve``.
      has_aux: whether ``solve`` returns ``(root, aux)``: the second is a pytree that has no derivative.
    Returns:
      the root, or ``(root, aux)``.
    Raises:
      TreeError, ShapeError: a function returns a structure or types different from those of the guess.
    """
    what = "custom_root"
    for function in (f, solve, tangent_solve):
        check_callable(function, what)
    leaves, in_tree = tree.flatten(initial_guess)
    paths = treepath.leaf_paths(in_tree)
    guess = as_values(leaves, lambda i: f"initial_guess{paths[i]}")
    restage = lambda avals: stage_like(f, what, name_of(f), in_tree, avals)[0]
    equations = restage([x.aval for x in guess])
    guess, equations = loop_carry.settle(guess, equations, restage)
    avals, n = [x.aval for x in guess], len(guess)
    check_vector(what, "initial_guess", paths, avals)
    check_types(what, f"f, {name_of(f)},", paths, avals, equations.out_avals)
    finder, out_tree = stage_like(lambda x: solve(f, x), what, "solve", in_tree, avals, has_aux)
    check_types(what, f"solve, {name_of(solve)},", paths, avals, finder.out_avals)

    def tangent_at(*args):
        _, derivative = linearize(f, tree.unflatten(in_tree, args[:n]))
        derivative = taking_numbers(derivative, avals)
        solver, _ = stage_like(lambda y: tangent_solve(derivative, y), what, "tangent_solve", in_tree, avals)
        check_types(what, f"tangent_solve, {name_of(tangent_solve)},", paths, avals, solver.out_avals)
        return eval_jaxpr(solver, args[n:])

    tangent = stage(tangent_at, [*avals, *avals], "tangent_solve")
    (equations, of_f), (finder, of_solve), (tangent, of_tangent) = (
        j.hoist() for j in (equations, finder, tangent)
    )

    @custom_jvp
    def root(of_f, of_solve, of_tangent, guess):
        return eval_jaxpr(finder, [*of_solve, *guess])

    @root.defjvp
    def root_jvp(primals, tangents):
        of_f, _, of_tangent, _ = primals
        outs = root(*primals)
        x = outs[:n]
        change = _change(equations, of_f, tangents[0], x)
        x_dot = [neg(t) for t in eval_jaxpr(tangent, [*of_tangent, *x, *change])]
        return outs, [*x_dot, *[None] * (len(outs) - n)]

    return tree.unflatten(out_tree, root(list(of_f), list(of_solve), list(of_tangent), list(guess)))


def _change(equations: Jaxpr, consts: list, tangents: list, x: list) -> list:
    """The tangent of ``f(x)`` where only its constants have tangents."""
    n = len(x)
    inexact = tuple(dtypes.is_inexact(c.aval.dtype) for c in consts)
    derived, moved = jvp_jaxpr(equations, inexact + (False,) * n, (False,) * n)
    ts = [t for t, nonzero in zip(tangents, inexact, strict=True) if nonzero]
    alone = derived.memoised(
        ("tangents", n), lambda: simplify.dce(derived, (False,) * n + (True,) * sum(moved))
    )
    found = iter(eval_jaxpr(alone, [*consts, *x, *ts]) if any(moved) else ())
    return [next(found) if m else zeros(a) for a, m in zip(equations.out_avals, moved, strict=True)]
