"""Derivative rules as jaxprs, of ``custom_jvp`` and ``custom_vjp`` functions.

Below ``programs.py``. In: the rule of an equation, a function of the user's on flat lists. Out: the rule staged at the
types of the equation, and, from a file, an object that stands in the equation for it. A rule that calls its own
function has an equation with that rule again, so a file refers to rules by number; ``key_of`` says which are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr, exact
from blufunc.core.primitives.linear_ops import instantiate
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs.stage import stage
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

DEPTH = 8
"""Depth to which rules inside rules are stored: the order of an endless chain."""


class JVPRule:
    """A jvp rule from a file: ``rule(primals, tangents) -> (outs, out_tangents)``.

    Attributes:
      jaxpr: from primals and the tangents of those that are inexact, to results and the tangents of those that are.
      n_outs: the number of results.
    """

    def __init__(self, name: str, n_outs: int):
        self.__name__, self.n_outs = name, n_outs
        self.jaxpr: Any = None

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        ts = [instantiate(t) for p, t in zip(primals, tangents, strict=True) if _is_inexact(p.aval)]
        found = eval_jaxpr(self.jaxpr, [*primals, *ts])
        outs, rest = found[: self.n_outs], iter(found[self.n_outs :])
        return outs, [next(rest) if _is_inexact(x.aval) else zero(x.aval) for x in outs]


class VJPRule:
    """Forward and backward rules from a file.

    ``fwd(primals, perturbed) -> (outs, residuals, bwd)``.

    Attributes:
      forward: a jaxpr from primals to results and residuals.
      backward: a jaxpr from residuals and cotangents of inexact results to cotangents of ``given`` arguments.
      n_outs: the number of results.
      given: a flag per argument, True if it has a cotangent.
    """

    def __init__(self, name: str, n_outs: int, given: Sequence[bool]):
        self.__name__, self.n_outs, self.given = name, n_outs, tuple(given)
        self.forward: Any = None
        self.backward: Any = None

    def __call__(self, primals: Sequence, perturbed: Sequence[bool]) -> tuple[list, list, Callable]:
        found = eval_jaxpr(self.forward, primals)
        outs = found[: self.n_outs]

        def bwd(residuals: Sequence, cts: Sequence) -> list:
            values = [instantiate(ct) for o, ct in zip(outs, cts, strict=True) if _is_inexact(o.aval)]
            rest = iter(eval_jaxpr(self.backward, [*residuals, *values]))
            return [next(rest) if g else None for g in self.given]

        bwd.__name__ = self.__name__
        return outs, found[self.n_outs :], bwd


class MissingRule:
    """Stands for a rule that no file can hold: an error says why, once it is needed."""

    def __init__(self, name: str, reason: str):
        self.__name__, self.reason = name, reason

    def __call__(self, *args: Any) -> Any:
        raise errors.GradError(
            f"the derivative rule {self.__name__} is not in the exported program.",
            where=source.here(),
            why=self.reason,
            fix="export a function that differentiates, such as jit(grad(f)), in the process that has the source",
        )


def _is_inexact(aval: ShapedArray) -> bool:
    return dtypes.is_inexact(aval.dtype)


def staged_jvp(rule: Callable, avals: Sequence[ShapedArray]) -> Jaxpr:
    """The jaxpr of a ``JVPRule``."""
    n = len(avals)
    inexact = [_is_inexact(a) for a in avals]

    def both(*xs: Any) -> list:
        rest = iter(xs[n:])
        tangents = [next(rest) if i else zero(a) for i, a in zip(inexact, avals, strict=True)]
        outs, out_ts = rule(xs[:n], tangents)
        return [*outs, *(instantiate(t) for o, t in zip(outs, out_ts, strict=True) if _is_inexact(o.aval))]

    tangents = [a.tangent() for a, i in zip(avals, inexact, strict=True) if i]
    return stage(both, [*avals, *tangents], rule.__name__)


def staged_vjp(
    fwd: Callable, avals: Sequence[ShapedArray], out_avals: Sequence[ShapedArray]
) -> tuple[Jaxpr, Jaxpr, tuple[bool, ...]]:
    """The jaxprs of a ``VJPRule``, and its flags ``given``."""
    n = len(out_avals)
    bwd: Any = None
    given: tuple[bool, ...] = ()

    def forward(*xs: Any) -> list:
        nonlocal bwd
        outs, residuals, bwd = fwd(xs, [_is_inexact(a) for a in avals])
        return [*outs, *residuals]

    def backward(*xs: Any) -> list:
        nonlocal given
        residuals, rest = xs[:n_residuals], iter(xs[n_residuals:])
        cts = [next(rest) if _is_inexact(a) else zero(a) for a in out_avals]
        found = bwd(residuals, cts)
        given = tuple([ct is not None and ct.__class__ is not Zero for ct in found])
        return [ct for ct, g in zip(found, given, strict=True) if g]

    first = stage(forward, avals, fwd.__name__)
    residuals = first.out_avals[n:]
    n_residuals = len(residuals)
    cts = [a.tangent() for a in out_avals if _is_inexact(a)]
    return first, stage(backward, [*residuals, *cts], bwd.__name__), given


def key_of(rule: Any, avals: Sequence[ShapedArray]) -> tuple:
    """A key that is equal for rules of calls of one function at the same types.

    A call makes a new rule, and ``vmap`` wraps it; a rule from a file is its own.
    """
    return (type(rule), _own_key(rule), *avals)


def _own_key(rule: Any) -> Any:
    if hasattr(rule, "owner"):
        return id(rule.owner), rule.in_tree, _static_key(rule.static)
    parts = dict(vars(rule)) if not isinstance(rule, (JVPRule, VJPRule, MissingRule)) else {}
    inner = parts.pop("rule", None) or parts.pop("fwd", None)
    if inner is None:
        return id(rule)
    axis = parts.pop("axis", None)
    of_axis = None if axis is None else (axis.size, axis.name, axis.mesh_axes)
    return key_of(inner, ()), of_axis, _static_key(tuple(parts.values()))


def _static_key(static: tuple) -> Any:
    key = exact(static)
    try:
        hash(key)
        return key
    except TypeError:
        return tuple(map(id, static))


def own_function(rule: Any) -> tuple[str, str] | None:
    """The module and name of blufunc's own ``custom_jvp`` function with this rule.

    None for all others.
    """
    owner = getattr(rule, "owner", None)
    if not isinstance(owner, custom_jvp) or getattr(rule, "held", None):
        return None
    module = getattr(owner, "__module__", None) or ""
    if not module.startswith("blufunc.") or module not in sys.modules:
        return None
    return next(((module, name) for name, value in vars(sys.modules[module]).items() if value is owner), None)
