"""For a budget of memory, on devices with kernels for it: the product with GELU's derivative computes GELU again.

Kernels, between stages 5 and 7, behind ``repeat.py``. In: the program of a choice for a budget, in which GELU of a
layer is computed from its argument by a call (``of_argument``), since it was not kept:

    g = gelu(x)                       right before the first reader, the product for a weight's gradient
    d = (a @ b) * gelu'(x)            before or behind that

Out: the same, in which one kernel, which reads x in any case, gives both, and what reads g comes behind it:

    d, g = (a @ b) * gelu'(x), gelu(x)

Where what reads g is wanted for the product itself, the call's body is put in its place: a kernel of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite
from blufunc.kernels.rewrites.activation_epilogue import dot_dgelu_p, from_argument


class _Again(Primitive):
    """A call of the equations of ``from_argument``; in no program that runs."""

    kind, fresh, multiple_results, body = "call", True, True, "jaxpr"

    def abstract(self, *avals: ShapedArray, jaxpr: Jaxpr) -> list[ShapedArray]:
        return [a.strong() for a in jaxpr.out_avals]


_again_p = _Again("gelu, again")


def of_argument(product: Eqn) -> Eqn:
    """A call that gives a product's activation from its other result, for a product that ``from_argument`` knows."""
    return Eqn(
        _again_p, product.outvars[1:], product.outvars[:1], {"jaxpr": _definition(product)}, product.source
    )


def result_of(product: Eqn) -> Var | None:
    """GELU's result, of a product with its derivative that gives that, too: the one of the derivative's type."""
    if product.prim is not dot_dgelu_p:
        return None
    first, *further = product.outvars
    return next((v for v in further if v.aval.same_type(first.aval)), None)


def products_with_derivative(eqns: Sequence[Eqn]) -> dict[Atom, Eqn]:
    """By GELU's arguments, the products that multiply by its derivative there: where there is only one, and it does
    not give GELU again yet.
    """
    found: dict[Atom, list[Eqn]] = {}
    for eqn in eqns:
        if eqn.prim is dot_dgelu_p:
            found.setdefault(eqn.invars[2], []).append(eqn)
    alone = {x: products[0] for x, products in found.items() if len(products) == 1}
    return {x: product for x, product in alone.items() if result_of(product) is None}


def with_result(product: Eqn, call: Eqn) -> Eqn:
    """A product with GELU's derivative that has as its last result what a call of ``of_argument`` gives."""
    body = _with_result(product.params["jaxpr"], call.params["jaxpr"])
    outvars = [*product.outvars, *call.outvars]
    return Eqn(dot_dgelu_p, product.invars, outvars, {**product.params, "jaxpr": body}, product.source)


def with_activations_again(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """The program without calls of ``of_argument``: they are results of products where that is possible.

    Args:
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    for call in [e for e in jaxpr.eqns if e.prim is _again_p]:
        jaxpr = _joined(jaxpr, call, origins) or jaxpr

    def step(eqn: Eqn, invars: list[Atom], alias: Any) -> list[Eqn]:
        if eqn.prim is _again_p:
            return put_in_place(eqn, eqn.params["jaxpr"], invars, alias)
        return [eqn.with_invars(invars)]

    return rewrite(jaxpr, step, origins) if any(e.prim is _again_p for e in jaxpr.eqns) else jaxpr


def _joined(jaxpr: Jaxpr, call: Eqn, origins: Origins) -> Jaxpr | None:
    """The program in which a product gives the result of a call; None where the product reads what is made of that."""
    product = products_with_derivative(jaxpr.eqns).get(call.invars[0])
    if product is None:
        return None
    eqns: list[Eqn] = []
    behind: list[Eqn] = []  # what was before the product, and reads what it gives now
    waiting: set[Atom] = set(call.outvars)
    done = False
    for eqn in jaxpr.eqns:
        late = not done and not waiting.isdisjoint(eqn.invars)
        if eqn is call:
            continue
        if late and (eqn is product or eqn.effects):
            return None
        if late:
            behind.append(eqn)
            waiting.update(eqn.outvars)
        elif eqn is product:
            made = with_result(product, call)
            if product in origins:
                origins[made] = origins[product]
            eqns += [made, *behind]
            done = True
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


# -- bodies, alike for alike equations, so that their costs are known --------------------------------


def _definition(product: Eqn) -> Jaxpr:
    """GELU from its argument."""
    return product.params["jaxpr"].memoised(
        "gelu, again",
        lambda: Jaxpr(product.outvars[1:], list(from_argument(product)), product.outvars[:1], name="gelu"),
    )


@functools.lru_cache(256)
def _with_result(definition: Jaxpr, gelu: Jaxpr) -> Jaxpr:
    place: dict[Any, Any] = {gelu.invars[0]: definition.invars[2]}
    more = []
    for e in gelu.eqns:
        place.update((v, Var(v.aval)) for v in e.outvars)
        more.append(e.with_vars([place.get(a, a) for a in e.invars], [place[v] for v in e.outvars]))
    return definition.replace(
        eqns=[*definition.eqns, *more], outvars=[*definition.outvars, place[gelu.outvars[0]]]
    )
