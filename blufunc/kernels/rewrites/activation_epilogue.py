"""Before stage 5, for devices that can: GELU and its derivative are computed by the products that go before them.

Kernels, beside ``gemm_epilogue``, and before it. In: a program in which calls of ``gelu`` and ``gelu_grad``
(``nn/gelu_call.py``) are equations still. Out: one that computes the same, in which

    y = gelu(x),          x = a @ b (+ bias)    are one equation with the results y and, where it is read, x
    d = gelu_grad(x, t),  t = a @ b             are one equation, if x is in memory before

wherever that is faster; all other calls are replaced by their definitions, and are part of kernels. An equation holds
as its body what it stands for, which is how it is run where the library refuses.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, inline_bodies
from blufunc.kernels.ops.gemm import SUMS, dot_bias_p
from blufunc.kernels.rewrites.gemm_epilogue import Products

LEAST_ELEMENTS = 4096 * 3072
"""Of a result: below, forward and backward together were not measured to gain (``docs/design/004``)."""

# -- the equations -----------------------------------------------------------------------------------


class _ProductAndActivation(Primitive):
    """A product of matrices, with its parameters, and what is computed of it: a call of these as they were."""

    kind, fresh, multiple_results, body = "call", True, True, "jaxpr"

    def abstract(self, *avals: ShapedArray, jaxpr: Jaxpr, **numbers) -> list[ShapedArray]:
        return [a.strong() for a in jaxpr.out_avals]

    def reference(self, compile, *, jaxpr: Jaxpr, **numbers):
        return compile(jaxpr)


dot_gelu_p = _ProductAndActivation("dot_general+gelu")
"""lhs, rhs -> GELU of the product, and the product if there is a second result."""

dot_bias_gelu_p = _ProductAndActivation("dot_general+bias+gelu")
"""lhs, rhs, vector -> GELU of the sum, and the sum if there is a second result."""

dot_dgelu_p = _ProductAndActivation("dot_general+dgelu")
"""lhs, rhs, x -> the product times the derivative of GELU at x; and, where kernels give them, sums of that
(``activation_sums``) and GELU of x (``recompute/epilogue``), in any order."""

WITH_ACTIVATION = (dot_gelu_p, dot_bias_gelu_p, dot_dgelu_p)
"""Products whose first two operands and parameters mean what they mean to ``dot_general``."""

_GELU, _GELU_GRAD = "gelu", "gelu_grad"


def from_argument(eqn: Eqn) -> tuple[Eqn, ...]:
    """The equations on elements that give a product's activation from its other result, the argument; none if it has
    no such results.

    They are the definition, of the argument as it is stored; a library may compute the activation before it rounds the
    argument, so that last bits differ.
    """
    if (
        eqn.prim not in (dot_gelu_p, dot_bias_gelu_p)
        or len(eqn.outvars) != 2
        or DropVar in map(type, eqn.outvars)
    ):
        return ()
    body = eqn.params["jaxpr"]
    place: dict[Any, Any] = dict(zip(body.outvars, eqn.outvars, strict=True))
    _, argument = body.outvars
    after = [e for e in body.eqns if argument not in e.outvars]
    for v in (v for e in after for v in e.outvars):
        place.setdefault(v, Var(v.aval))
    return tuple(
        e.with_vars([place.get(a, a) for a in e.invars], [place[v] for v in e.outvars]) for e in after
    )


def is_activation(eqn: Eqn) -> bool:
    """Whether an equation is a call of an activation that a product may compute."""
    return eqn.prim.pointwise and eqn.prim.name in (_GELU, _GELU_GRAD)


# -- where they are --------------------------------------------------------------------------------


def with_activations(jaxpr: Jaxpr, origins: Origins) -> tuple[Jaxpr, Origins]:
    """The program with activations in products, or replaced by their definitions.

    Args:
      jaxpr: simplified, its calls in place but for those.
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    joined = _Activations(jaxpr, origins).run()
    return inline_bodies(joined, lambda eqn: eqn.prim.body is not None and not is_activation(eqn), origins)


class _Activations(Products):
    def __init__(self, jaxpr: Jaxpr, origins: Origins):
        super().__init__(jaxpr, origins)
        self.aux: set[Any] = set()  # arguments of GELU that products store

    def run(self) -> Jaxpr:
        if any(is_replaced(p, "impl") for p in (dot_general_p, convert_p)):
            return self.jaxpr
        for eqn in self.jaxpr.eqns:
            if is_activation(eqn) and _is_large(eqn.outvars[0].aval) and not _is_redefined(eqn):
                (self.forward if eqn.prim.name == _GELU else self.backward)(eqn)
        return self.replaced() if self.made else self.jaxpr

    def forward(self, gelu: Eqn) -> None:
        """Let the product that gives the argument compute GELU as well, and store the argument for others."""
        (x,) = gelu.invars
        maker = self.makers.get(x)  # type: ignore[arg-type]
        if maker is None or maker in self.made or not self.same_origin(maker, gelu):
            return
        *before, product = [maker] if maker.prim is dot_general_p else self.biased(maker, x) or [maker]
        if product.prim not in (dot_general_p, dot_bias_p) or not _is_one_product(product, x.aval):
            return
        stored = len(self.readers[x]) > 1 or x in self.returned
        results = [gelu.outvars[0], x][: 1 + stored]
        prim = dot_gelu_p if product.prim is dot_general_p else dot_bias_gelu_p
        self.put(maker, [*before, _joined(prim, product, gelu, product.invars, results)])
        self.made[gelu] = []
        self.aux.add(x)

    def biased(self, maker: Eqn, x: Any) -> list[Eqn]:
        """The equations of a product with a bias that gives what a sum, or the conversion of one, gives."""
        total: Eqn | None = maker
        if maker.prim is convert_p:
            total = self.maker(maker.invars[0])
        if total is None or total.prim not in SUMS or not self.same_origin(total, maker):
            return []
        if any(is_replaced(p, "impl") for p in (total.prim, broadcast_in_dim_p, reshape_p)):
            return []
        for one, other in (total.invars, total.invars[::-1]):
            product = self.product(one, total)
            if product is not None and (found := self.with_bias(product, other, x)):
                return found
        return []

    def backward(self, grad: Eqn) -> None:
        """Let the product that gives the cotangent multiply it by the derivative."""
        x, t = grad.invars
        product = self.maker(t)
        if product is None or product.prim is not dot_general_p or not self.same_origin(product, grad):
            return
        if not _is_one_product(product, t.aval):
            return
        if self.in_memory_before(product, x):
            joined = _joined(dot_dgelu_p, product, grad, [*product.invars, x], grad.outvars)
            self.put(product, [])
            self.put(grad, [joined])

    def is_stored(self, v: Any) -> bool:
        return v in self.aux


def _is_large(aval: ShapedArray) -> bool:
    return aval.size >= LEAST_ELEMENTS and aval.dtype in (dtypes.bfloat16, dtypes.float16)


def _is_redefined(activation: Eqn) -> bool:
    """Whether the user gave other definitions to operations that it consists of."""
    return any(is_replaced(e.prim, "impl") for e in activation.params["jaxpr"].eqns)


def _is_one_product(product: Eqn, result: ShapedArray) -> bool:
    """Whether a product is of two matrices of the dtype of the result, whose rows are as long as epilogues want."""
    (_, contracted), (_, batch) = product.params["dimension_numbers"]
    lhs, rhs = (a.aval for a in product.invars[:2])
    free = [n for d, n in enumerate(rhs.shape) if d not in contracted]
    whole = lhs.size and rhs.size and not batch
    return bool(whole) and lhs.dtype == rhs.dtype == result.dtype and not math.prod(free) % 8


def _joined(prim: Primitive, product: Eqn, activation: Eqn, operands: Any, results: Any) -> Eqn:
    body = _body(
        product.prim,
        tuple(product.params.items()),
        activation.prim,
        activation.params["jaxpr"],
        tuple([a.aval.strong() for a in operands]),
        len(results),
    )
    params = {**product.params, "preferred_element_type": results[0].aval.dtype, "jaxpr": body}
    return Eqn(prim, operands, results, params, activation.source)


@functools.lru_cache(256)
def _body(
    product: Primitive,
    numbers: tuple,
    activation: Primitive,
    definition: Jaxpr,
    operands: tuple,
    results: int,
) -> Jaxpr:
    """A product, then an activation: alike for alike equations, so that it is compiled once if it is."""
    ins = [Var(a) for a in operands]
    ahead = ins[:2] if activation.name == _GELU_GRAD else ins
    between = Var(definition.in_avals[-1])
    y = Var(definition.out_avals[0])
    eqns = [
        Eqn(product, ahead, [between], dict(numbers), None),
        Eqn(activation, [*ins[len(ahead) :], between], [y], {"jaxpr": definition}, None),
    ]
    separate, _ = inline_bodies(
        Jaxpr(ins, eqns, [y, between][:results], name=f"{product.name}_{activation.name}")
    )
    return separate
