"""``closure_convert``: hoist the closure of a function to arguments.

Transforms, stage 1. A function with derivative rules of its own may not close over a value that is being
differentiated. A higher-order function that has such rules (a solver, an integrator) converts the function it is
given: staging finds the values that it closes over, and those that may carry a derivative are handed out, to be
passed back in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.stage import keeps_arrays, stage
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError
from blufunc.transforms.arguments import (
    FlatFunction,
    abstract,
    as_values,
    check_callable,
    check_structure,
    labels_of,
    name_of,
)

R = TypeVar("R")


def closure_convert(fun: Callable[..., R], *example_args: Any) -> tuple[Callable[..., R], list[Any]]:
    """Make the traced values that ``fun`` closes over its last arguments.

        def integrate(f, x0, *args): ...      # a custom_vjp with nondiff_argnums=(0,)

        def solve(f, x0):
            converted, hoisted = bf.closure_convert(f, x0)
            return integrate(converted, x0, *hoisted)

    Args:
      fun: a function of pytrees of arrays. It is traced here, once: what is returned does what it did for arguments of
        these types.
      example_args: positional arguments, or anything with their ``shape`` and ``dtype``.
    Returns:
      ``(converted, hoisted)``: the list of the floating and complex traced values that ``fun`` closes over, and a
      function ``converted(*args, *hoisted)``. Other values (concrete arrays, integers) cannot be perturbed by a
      derivative and stay closed over, so outside of any transform the list is empty.
    Raises (when the converted function is called):
      ArgumentError, TreeError: the arguments are not of the number, structure or types of the examples.
    """
    check_callable(fun, "closure_convert")
    name = name_of(fun)
    leaves, in_tree = tree.flatten((example_args, {}))
    labels = labels_of(fun, in_tree)
    in_avals = [abstract(x, label).strong() for x, label in zip(leaves, labels, strict=True)]
    flat = FlatFunction(fun, in_tree)
    jaxpr = stage(flat, in_avals, name, labels, keeps_arrays=keeps_arrays())
    closed, consts = jaxpr.hoist()
    perturbed = [c.__class__ is not ConcreteArray and dtypes.is_inexact(c.aval.dtype) for c in consts]
    hoisted = [c for c, p in zip(consts, perturbed, strict=True) if p]
    kept = [None if p else c for c, p in zip(consts, perturbed, strict=True)]
    avals = [*in_avals, *(h.aval for h in hoisted)]
    n_args, n_hoisted, out_tree = len(example_args), len(hoisted), flat.out_tree

    def converted(*args):
        if len(args) != n_args + n_hoisted:
            raise ArgumentError(
                f"the converted {name} takes {n_args} arguments and {n_hoisted} hoisted values, "
                f"it was given {len(args)}.",
                where=source.here(),
                fix="converted(*args, *hoisted), as closure_convert returned them",
            )
        xs, given_tree = tree.flatten((args[:n_args], {}))
        check_structure(in_tree, given_tree, f"the converted {name}", ("the example", "the argument"))
        values = as_values([*xs, *args[n_args:]], lambda i: f"argument leaf {i} of the converted {name}")
        for i, (x, aval) in enumerate(zip(values, avals, strict=True)):
            if not aval.same_type(x.aval):
                what = f"the argument {labels[i]}" if i < len(labels) else f"hoisted value {i - len(labels)}"
                raise ArgumentError(
                    f"{what} of the converted {name} is {x.aval}, and it was converted for {aval}.",
                    where=source.here(),
                    fix="convert the function for each kind of argument",
                )
        rest = iter(values[len(xs) :])
        constants = [next(rest) if k is None else k for k in kept]
        return tree.unflatten(out_tree, eval_jaxpr(closed, [*constants, *values[: len(xs)]]))

    converted.__name__ = f"converted_{name}"
    return converted, hoisted
