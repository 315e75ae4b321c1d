"""``saved_residuals``: the residuals of reverse mode, and their origins.

Transforms, after stage 2. In: a function and its arguments. Out: the list of what ``linearize`` and the policies of
``checkpoint`` save, without computing anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Literal, Var
from blufunc.core.ops.offload import offload_p
from blufunc.core.programs import simplify
from blufunc.core.programs.alternatives import as_written
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import FlatFunction, abstract, check_callable, labels_of, name_of
from blufunc.transforms.autodiff.linearize import linearize_jaxpr
from blufunc.transforms.checkpointing.policies import name_p


def saved_residuals(fun: Callable, *args: Any, **kwargs: Any) -> list[tuple[ShapedArray, str]]:
    """List the residuals of ``grad`` of ``fun`` with respect to all arguments.

    Args:
      fun: a function of pytrees of arrays.
      args, kwargs: its arguments: arrays or ``ShapeDtypeStruct``.
    Returns:
      for each residual its type and origin: an argument, a constant, a name (``checkpoint_name``) or an operation, at
      the user's line. It describes the program as written: a device with a fused kernel, as for attention, saves less.
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
    producers = {v: e for e in primal.eqns for v in e.outvars}
    distinct = dict.fromkeys(v for v in primal.outvars if v.__class__ is not Literal)
    return [(v.aval, _origin(v, names, producers)) for v in distinct]  # type: ignore[arg-type]


def _origin(var: Var, names: dict[Var, str], producers: dict[Var, Eqn]) -> str:
    """The origin of a residual, in words."""
    if var in names:
        return f"from {names[var]}"
    eqn = producers[var]
    where = source.summary(eqn.source)
    if eqn.prim is name_p:
        return f"named {eqn.params['name']!r} from {where}"
    if eqn.prim is offload_p and eqn.invars[0].__class__ is not Literal:
        origin = _origin(eqn.invars[0], names, producers)  # type: ignore[arg-type]
        return f"{origin}, moved from {eqn.params['src']} to {eqn.params['dst']}"
    return f"output of {eqn.prim} from {where}"


def print_saved_residuals(fun: Callable, *args: Any, **kwargs: Any) -> None:
    """Print ``saved_residuals(fun, *args, **kwargs)``, one per line."""
    lines = [f"{aval} {why}\n" for aval, why in saved_residuals(fun, *args, **kwargs)]
    sys.stdout.write("".join(lines))
