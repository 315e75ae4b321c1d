"""``check_jaxpr``: verifier of well-formed, well-typed jaxprs.

Core, after every stage in the tests (``config.check``). A failure is a bug in a rule, a pass or a transform,
never in the user's program.
"""

from __future__ import annotations

from collections.abc import Iterator

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, Var, subjaxprs
from blufunc.errors import JaxprTypeError


def check_jaxpr(jaxpr: Jaxpr) -> None:
    """Check scoping, single assignment, and each equation against its abstract rule.

    Raises:
      JaxprTypeError: names the equation and prints the whole jaxpr.
    """
    bound: set[Var] = set()

    def bind(var: Var, what: str) -> None:
        if var in bound:
            raise _error(jaxpr, f"{what} is bound twice")
        bound.add(var)

    for var in (*jaxpr.constvars, *jaxpr.invars):
        bind(var, "a parameter")
    if len(jaxpr.consts) != len(jaxpr.constvars):
        raise _error(jaxpr, f"{len(jaxpr.consts)} constants for {len(jaxpr.constvars)} variables")
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom not in bound:
                raise _error(jaxpr, f"{eqn} reads a variable that is not bound")
        _check_types(jaxpr, eqn)
        for sub in subjaxprs(eqn.params):
            if sub.consts:
                raise _error(jaxpr, f"{eqn} holds a jaxpr with attached constants")
            check_jaxpr(sub)
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                bind(var, f"an output of {eqn}")
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal) and atom not in bound:
            raise _error(jaxpr, "a result is a variable that is not bound")


def check_effects(before: Jaxpr, after: Jaxpr) -> None:
    """Check that a pass kept every equation with effects, in the same order.

    Raises:
      JaxprTypeError: prints both sequences.
    """
    old, new = (list(_effectful(j)) for j in (before, after))
    if old != new:
        raise _error(after, f"the effects were {', '.join(old)} and are now {', '.join(new) or 'none'}")


def _effectful(jaxpr: Jaxpr) -> Iterator[str]:
    """The effectful primitives, in order, through all calls."""
    for eqn in jaxpr.eqns:
        if eqn.effects:
            inside = [name for sub in subjaxprs(eqn.params) for name in _effectful(sub)]
            yield from inside or [eqn.prim.name]


def _check_types(jaxpr: Jaxpr, eqn: Eqn) -> None:
    outs = eqn.prim.typed(tuple(a.aval for a in eqn.invars), eqn.params)
    expected = outs if eqn.prim.multiple_results else (outs,)
    if len(expected) != len(eqn.outvars):
        raise _error(jaxpr, f"{eqn} has {len(eqn.outvars)} outputs, its rule gives {len(expected)}")
    for var, aval in zip(eqn.outvars, expected, strict=True):
        if not var.aval.same_type(aval):
            raise _error(jaxpr, f"{eqn} binds a {var.aval}, its rule gives {aval}")


def _error(jaxpr: Jaxpr, what: str) -> JaxprTypeError:
    return JaxprTypeError(f"{what}, in\n{jaxpr}", where=source.here(), why="a rule or transform is wrong")
