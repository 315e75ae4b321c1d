"""``linear_transpose``: the transpose of a linear function.

Transforms, stage 2. In: a linear function, and types of its arguments. Out: its transpose. The function is staged, and
its jaxpr transposed: nothing is linearized or evaluated. A nonlinear operation is reported here, with its line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, eval_jaxpr
from blufunc.core.ops.elementwise import weak_as
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.programs.stage import keeps_arrays, stage
from blufunc.core.pytree import paths, tree
from blufunc.transforms.arguments import (
    FlatFunction,
    abstract,
    as_values,
    check_callable,
    check_structure,
    labels_of,
    name_of,
)
from blufunc.transforms.autodiff.linearize import differentiable, in_shard_map
from blufunc.transforms.autodiff.transpose import transpose_jaxpr

_REFUSALS = (errors.BlufuncError, AttributeError, TypeError)
"""Errors of transposition.
The last two come from rules for one factor of a product, if the other is transposed too and has no value."""


def linear_transpose(fun: Callable[..., Any], *primals: Any) -> Callable[..., tuple[Any, ...]]:
    """Transpose a linear function.

    Args:
      fun: a function of pytrees of arrays, jointly linear in all its arguments. Constant parts, as in ``x + 1``, are
        not detected: they are ignored, as in the derivative.
      primals: arguments, or anything with their ``shape`` and ``dtype``; only their types are used. Inside of
        ``shard_map`` they are arrays: what a cotangent is depends on whether they vary.
    Returns:
        a function that takes a cotangent of the structure and types of the result, and returns a tuple with a cotangent
        per argument: for ``x -> A @ x`` it is ``y -> (A.T @ y,)``.
    Raises:
      GradError: ``fun`` is not linear, or maps integers to floats or floats to integers.
    """
    check_callable(fun, "linear_transpose")
    name = name_of(fun)
    leaves, in_tree = tree.flatten((primals, {}))
    labels = functools.cache(lambda: labels_of(fun, in_tree))
    in_avals = [abstract(x, labels()[i]) for i, x in enumerate(leaves)]
    flat = FlatFunction(fun, in_tree)
    local: Callable = flat
    if in_shard_map():
        local = differentiable(flat, as_values(leaves, lambda i: f"the argument {labels()[i]}"))
    jaxpr = stage(local, in_avals, name, labels(), keeps_arrays=keeps_arrays())
    out_tree, out_avals = flat.out_tree, jaxpr.out_avals
    _check_kinds(name, [*in_avals, *out_avals])
    try:
        backward, nonzeros = transpose_jaxpr(jaxpr, (True,) * len(in_avals), (True,) * len(out_avals))
    except _REFUSALS as e:
        raise _not_linear(jaxpr, name, e) from None

    @functools.wraps(fun)
    def transposed(ct):
        cts, ct_tree = tree.flatten(ct)
        check_structure(out_tree, ct_tree, "linear_transpose", ("the result", "the cotangent"))
        values = []
        for path, aval, x in zip(paths.leaf_paths(out_tree), out_avals, cts, strict=True):
            x = lift(x, f"the cotangent{path}")
            expected = aval.in_memory(DEVICE)  # as all cotangents
            if not expected.same_type(x.aval):
                raise errors.GradError(
                    f"the cotangent{path} must be {expected} like the result of {name}, not {x.aval}.",
                    where=source.here(),
                    fix="give it the result's shape and dtype",
                )
            values.append(x)
        found = iter(eval_jaxpr(backward, values))
        grads = [
            weak_as(next(found) if nz else zeros(a), a) for nz, a in zip(nonzeros, in_avals, strict=True)
        ]
        return tuple(tree.unflatten(in_tree, grads)[0])

    return transposed


def _check_kinds(name: str, avals: list[ShapedArray]) -> None:
    inexact = [a for a in avals if dtypes.is_inexact(a.dtype)]
    integers = [a for a in avals if dtypes.is_integer(a.dtype)]
    if avals not in (inexact, integers):
        other = next((a for a in avals if a not in inexact), avals[0])
        raise errors.GradError(
            f"linear_transpose of {name}, which has an argument or result {other}: all are floating or complex, or all "
            "are integers.",
            where=source.here(),
            fix="close over the other arguments: linear_transpose(lambda x: f(n, x), x)",
        )


def _not_linear(jaxpr: Jaxpr, name: str, error: Exception) -> Exception:
    """The error for the first equation without a transpose, else the original one."""
    eqn = _culprit(jaxpr)
    if eqn is None:
        return error
    prim = eqn.prim.name
    joint = sum(_is_variable(a) for a in eqn.invars) > 1 and _culprit(jaxpr, jointly=False) is not eqn
    return errors.GradError(
        f"linear_transpose of {name}, which is not linear in its arguments: see {prim}.",
        where=source.describe(eqn.source),
        why=f"{prim} is linear in each operand alone, and several of them depend on the arguments."
        if joint or not isinstance(error, errors.BlufuncError)
        else error.what,
        fix=f"close over constant operands, or take the derivative: bf.vjp({name}, x)[1]",
    )


def _is_variable(atom: Any) -> bool:
    return atom.__class__ is not Literal


def _culprit(jaxpr: Jaxpr, jointly: bool = True) -> Eqn | None:
    """The first equation that has no transpose in parameter-dependent operands.

    Without ``jointly``: with respect to any one of these operands, the others constant.
    """
    linear = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        flags = [_is_variable(a) and a in linear for a in eqn.invars]
        if not any(flags):
            continue
        linear.update(eqn.outvars)
        tries = (
            [flags] if jointly else [[i == j for j in range(len(flags))] for i, f in enumerate(flags) if f]
        )
        if not any(_transposes(eqn, tuple(t)) for t in tries):
            return eqn
    return None


def _transposes(eqn: Eqn, linear: tuple[bool, ...]) -> bool:
    def one(*xs):
        out = eqn.prim.bind(*xs, **eqn.params)
        return list(out) if eqn.prim.multiple_results else [out]

    try:
        alone = stage(one, [a.aval for a in eqn.invars])
        transpose_jaxpr(alone, linear, (True,) * len(eqn.outvars))
    except _REFUSALS:
        return False
    return True
