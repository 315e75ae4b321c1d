"""``saved_residuals``: what reverse mode stores between the forward and the backward pass, and why.

Transforms, beside stage 2: a look at what ``linearize`` and the policies of ``checkpoint`` make of a function, without
computing anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Literal, Var
from blufunc.core.programs import simplify
from blufunc.core.programs.alternatives import as_written
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import FlatFunction, abstract, check_callable, labels_of, name_of
from blufunc.transforms.autodiff.linearize import linearize_jaxpr
from blufunc.transforms.checkpointing.policies import name_p, offload_p


def saved_residuals(fun: Callable, *args: Any, **kwargs: Any) -> list[tuple[ShapedArray, str]]:
    """What ``grad`` of ``fun`` with respect to all of its arguments would store.

    Args:
      fun: a function of pytrees of arrays.
      args, kwargs: its arguments: arrays or ``ShapeDtypeStruct``.
    Returns:
      for each array that is stored its type, and where it comes from: an argument, a constant, a name
      (``checkpoint_name``) or an operation, at the user's line. It is of what was written: where a device has a kernel
      for that, as for attention, less is stored.
    """
    check_callable(fun, "saved_residuals")
    leaves, in_tree = tree.flatten((args, kwargs))
    labels = labels_of(fun, in_tree)
    avals = [abstract(x, f"the argument {label}") for x, label in zip(leaves, labels, strict=True)]
    jaxpr, consts = stage(FlatFunction(fun, in_tree), avals, name_of(fun), labels).hoist()
    nonzeros = (*[False] * len(consts), *[dtypes.is_inexact(a.dtype) for a in avals])
    with as_written():
        primal, _, _, _ = linearize_jaxpr(jaxpr, nonzeros)
    stored = primal.outvars[len(jaxpr.outvars) :]
    primal = simplify.inline_calls(primal.replace(outvars=stored))
    parameters = [*["a constant"] * len(consts), *(f"the argument {label}" for label in labels)]
    names = dict(zip(primal.invars, parameters, strict=True))
    names.update(dict.fromkeys(primal.constvars, "a constant"))
    made = {v: e for e in primal.eqns for v in e.outvars}
    distinct = dict.fromkeys(v for v in primal.outvars if v.__class__ is not Literal)
    return [(v.aval, _origin(v, names, made)) for v in distinct]  # type: ignore[arg-type]


def _origin(var: Var, names: dict[Var, str], made: dict[Var, Eqn]) -> str:
    """Where a stored value comes from, in words."""
    if var in names:
        return f"from {names[var]}"
    eqn = made[var]
    where = source.summary(eqn.source)
    if eqn.prim is name_p:
        return f"named {eqn.params['name']!r} from {where}"
    if eqn.prim is offload_p and eqn.invars[0].__class__ is not Literal:
        origin = _origin(eqn.invars[0], names, made)  # type: ignore[arg-type]
        return f"{origin}, moved from {eqn.params['src']} to {eqn.params['dst']}"
    return f"output of {eqn.prim} from {where}"


def print_saved_residuals(fun: Callable, *args: Any, **kwargs: Any) -> None:
    """Print ``saved_residuals(fun, *args, **kwargs)``, a line for each."""
    lines = [f"{aval} {why}\n" for aval, why in saved_residuals(fun, *args, **kwargs)]
    sys.stdout.write("".join(lines))
