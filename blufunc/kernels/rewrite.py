"""Before stage 5: equations that a library or a kernel can do at once in the place of several.

Kernels. In: a simplified jaxpr, its calls in place. Out: one that computes the same.

- The transpose of a product of matrices is the product of the transposes, which cost nothing.
- What is added to zeros, to be added to something else, is added to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p
from blufunc.core.ops.gather_scatter import scatter_add_p
from blufunc.core.passes import dce
from blufunc.core.structure import add_any_p, broadcast_in_dim_p, transpose_p


def rewrite(jaxpr: Jaxpr, origins: dict[int, int]) -> Jaxpr:
    """Apply all of it; ``origins`` is kept up for equations that take the place of others."""
    return _Rewriter(jaxpr, origins).run()


class _Rewriter:
    def __init__(self, jaxpr: Jaxpr, origins: dict[int, int]):
        self.jaxpr, self.origins = jaxpr, origins
        self.makers: dict[Var, Eqn] = {}
        self.position: dict[Var, int] = dict.fromkeys(jaxpr.invars, -1)
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars if a.__class__ is not Literal)
        self.uses.update(a for a in jaxpr.outvars if a.__class__ is not Literal)

    def run(self) -> Jaxpr:
        eqns: list[Eqn] = []
        changed = False
        for i, eqn in enumerate(self.jaxpr.eqns):
            made = next((m for rule in _RULES if (m := rule(self, eqn)) is not None), eqn)
            if made is not eqn:
                changed = True
                if id(eqn) in self.origins:
                    self.origins[id(made)] = self.origins[id(eqn)]
            eqns.append(made)
            self.makers.update((v, made) for v in made.outvars)
            self.position.update((v, i) for v in made.outvars)
        return dce(self.jaxpr.replace(eqns=eqns)) if changed else self.jaxpr

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation that computes an operand which nobody else reads."""
        if atom.__class__ is Literal or self.uses[atom] != 1:
            return None
        return self.makers.get(atom)  # type: ignore[arg-type]


def _transposed_product(r: _Rewriter, eqn: Eqn) -> Eqn | None:
    """``transpose(dot_general(x, y))`` that exchanges the axes of x and those of y is ``dot_general(y, x)``."""
    if eqn.prim is not transpose_p:
        return None
    product = r.maker(eqn.invars[0])
    if product is None or product.prim is not dot_general_p:
        return None
    (xc, yc), (xb, yb) = product.params["dimension_numbers"]
    x, y = product.invars
    b, m = len(xb), x.aval.ndim - len(xb) - len(xc)
    n = y.aval.ndim - len(yb) - len(yc)
    exchanged = (*range(b), *range(b + m, b + m + n), *range(b, b + m))
    precision = product.params["precision"]
    if eqn.params["permutation"] != exchanged or isinstance(precision, tuple):
        return None
    params = {**product.params, "dimension_numbers": ((yc, xc), (yb, xb))}
    return Eqn(dot_general_p, [y, x], eqn.outvars, params, product.source)


def _sum_with_scattered(r: _Rewriter, eqn: Eqn) -> Eqn | None:
    """``a + scatter_add(zeros, i, u)`` is ``scatter_add(a, i, u)``."""
    if eqn.prim not in (add_any_p, add_p):
        return None
    for a, scattered in (eqn.invars, eqn.invars[::-1]):
        scatter = r.maker(scattered)
        if scatter is None or scatter.prim is not scatter_add_p or a.__class__ is Literal:
            continue
        zeros = r.makers.get(scatter.invars[0])  # type: ignore[arg-type]
        if zeros is None or zeros.prim is not broadcast_in_dim_p or zeros.invars[0].__class__ is not Literal:
            continue
        if zeros.invars[0].value != 0 or a.aval.shape != eqn.outvars[0].aval.shape:  # type: ignore[union-attr]
            continue
        return Eqn(scatter_add_p, [a, *scatter.invars[1:]], eqn.outvars, scatter.params, scatter.source)
    return None


_RULES: tuple[Callable[[_Rewriter, Eqn], Eqn | None], ...] = (_transposed_product, _sum_with_scattered)
