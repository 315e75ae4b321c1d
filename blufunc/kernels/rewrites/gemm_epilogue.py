"""Before stage 5, for devices that can: what is added to a product of matrices is added by the product itself.

Kernels. In: a program after ``rewrite``. Out: one that computes the same, in which a product and its sum with a vector
along the columns, or with an array of its shape, are one equation wherever the sum would be a kernel of its own. A sum
that a kernel reads is part of that kernel, where it costs nothing, and stays as it is. So with the conversion of a
product to a wider dtype that other ranks get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, dce
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.gemm_layout import has_bias_epilogue, result_dtypes
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.ops.gemm import SUMS, dot_accumulate_p, dot_bias_p

# -- the equations -----------------------------------------------------------------------------------


# -- where they are --------------------------------------------------------------------------------


def with_epilogues(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """The program with sums in products.

    Args:
      jaxpr: simplified.
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    return _Epilogues(jaxpr, origins).run()


class Products:
    """Looks for products of matrices, and for what could be computed with them.

    Attributes:
      makers: the equation behind each variable.
      position: the place of that equation; -1 for parameters.
      readers: the equations that read a variable.
      returned: the variables that are results.
      made: for equations, what takes their place.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Origins):
        self.jaxpr, self.origins = jaxpr, origins
        self.makers: dict[Var, Eqn] = {}
        self.position: dict[Any, int] = dict.fromkeys(jaxpr.invars, -1)
        self.readers: dict[Any, list[Eqn]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self.makers.update((v, eqn) for v in eqn.outvars)
            self.position.update((v, i) for v in eqn.outvars)
            for a in eqn.invars:
                if a.__class__ is not Literal:
                    self.readers.setdefault(a, []).append(eqn)
        self.returned = {a for a in jaxpr.outvars if a.__class__ is not Literal}
        self.made: dict[Eqn, list[Eqn]] = {}

    def put(self, old: Eqn, new: list[Eqn]) -> None:
        """Let equations take the place, and the origin, of another one."""
        self.made[old] = new
        if old in self.origins:
            self.origins.update(dict.fromkeys(new, self.origins[old]))

    def replaced(self) -> Jaxpr:
        """The program with what was put in places."""
        return dce(self.jaxpr.replace(eqns=[new for e in self.jaxpr.eqns for new in self.made.get(e, [e])]))

    def same_origin(self, a: Eqn, b: Eqn) -> bool:
        return self.origins.get(a) == self.origins.get(b)

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation of an operand that nobody else reads."""
        if atom.__class__ is Literal or atom in self.returned or len(self.readers[atom]) != 1:
            return None
        return self.makers.get(atom)  # type: ignore[arg-type]

    def product(self, atom: Atom, total: Eqn) -> Eqn | None:
        """The product that a summand is, or is the conversion of to a wider dtype."""
        eqn = self.maker(atom)
        if eqn is not None and eqn.prim is convert_p:
            types = eqn.invars[0].aval.dtype, atom.aval.dtype
            if not all(map(dtypes.is_floating, types)) or types[0].itemsize >= types[1].itemsize:
                return None
            eqn = self.maker(eqn.invars[0])
        if eqn is None or eqn.prim is not dot_general_p:
            return None
        sizes = all(a.aval.size for a in eqn.invars)
        return eqn if sizes and self.same_origin(eqn, total) else None

    def with_bias(self, product: Eqn, summand: Atom, result: Var) -> list[Eqn]:
        """The equations of a product that adds a vector, where the summand is one repeated."""
        lhs, rhs = product.invars
        dtype = result.aval.dtype
        if not has_bias_epilogue(lhs.aval.dtype, rhs.aval.dtype, dtype):
            return []
        vector = self.repeated(self.without_conversion(summand, dtype), product)
        if vector is None:
            return []
        vector = self.without_conversion(vector, dtype)
        eqns = []
        if vector.aval.dtype != dtype:
            converted = Var(vector.aval.with_dtype(dtype))
            eqns.append(Eqn(convert_p, [vector], [converted], {"dtype": dtype}, product.source))
            vector = converted
        return [*eqns, _joined(dot_bias_p, product, [vector], result)]

    def without_conversion(self, atom: Atom, dtype: np.dtype) -> Atom:
        """What was converted from a dtype, or the operand as it is."""
        eqn = self.makers.get(atom)  # type: ignore[arg-type]
        if eqn is not None and eqn.prim is convert_p and eqn.invars[0].aval.dtype == dtype:
            return eqn.invars[0]
        return atom

    def repeated(self, atom: Atom, product: Eqn) -> Atom | None:
        """What is repeated to give an operand that has the same free axes of the rhs at every row of the product."""
        eqn = self.makers.get(atom)  # type: ignore[arg-type]
        if eqn is None or eqn.prim is not broadcast_in_dim_p or eqn.invars[0].__class__ is Literal:
            return None
        (_, contracted), (_, batch) = product.params["dimension_numbers"]
        rhs, (vector,), out = product.invars[1].aval, eqn.invars, eqn.outvars[0].aval
        columns = rhs.ndim - len(contracted) - len(batch)
        if vector.aval.size != math.prod(out.shape[out.ndim - columns :]) or vector.aval.size == 1:
            return None
        axes = [d for d, n in zip(eqn.params["dims"], vector.aval.shape, strict=True) if n > 1]
        return vector if axes == sorted(axes) and axes[0] >= out.ndim - columns else None

    def in_memory_before(self, product: Eqn, atom: Atom) -> bool:
        """Whether an operand lies dense in memory before a product runs, and no kernel has to put it there."""
        while atom in self.makers and self.makers[atom].prim is reshape_p:  # type: ignore[index]
            (atom,) = self.makers[atom].invars  # type: ignore[index]
        if atom.__class__ is Literal or self.position[atom] > self.position[product.outvars[0]]:
            return False
        maker = self.makers.get(atom)  # type: ignore[arg-type]
        return maker is None or self.is_stored(atom) or sort_of(maker) == "opaque"

    def is_stored(self, v: Any) -> bool:
        """Whether what takes the place of an equation stores its result."""
        return False


class _Epilogues(Products):
    def __init__(self, jaxpr: Jaxpr, origins: Origins):
        super().__init__(jaxpr, origins)
        # by result: what would, were it stored, and what that adds
        self.possible: dict[Any, tuple[list[Eqn], Atom]] = {}

    def run(self) -> Jaxpr:
        if any(is_replaced(p, "impl") for p in (dot_general_p, convert_p, broadcast_in_dim_p, reshape_p)):
            return self.jaxpr
        for eqn in self.jaxpr.eqns:
            if eqn.prim in SUMS and sort_of(eqn) == "node":
                self.consider(eqn)
            elif eqn.prim is convert_p:
                self.widen(eqn)
        return self.replaced() if self.made else self.jaxpr

    def widen(self, eqn: Eqn) -> None:
        """Let a product write what ranks exchange in the dtype that it is converted to before: no kernel has to.

        It is not rounded to the narrower dtype then, as what is added to a product is not.
        """
        product = self.product(eqn.outvars[0], eqn) if self.is_exchanged(eqn) else None
        if product is not None and eqn.outvars[0].aval.dtype in result_dtypes(product.invars[0].aval.dtype):
            self.put(product, [_joined(dot_general_p, product, [], eqn.outvars[0])])
            self.put(eqn, [])

    def is_exchanged(self, eqn: Eqn) -> bool:
        """Whether a result goes nowhere but to other ranks, by way of movement too."""
        readers = self.readers.get(eqn.outvars[0], [])
        if len(readers) != 1 or eqn.outvars[0] in self.returned:
            return False
        return readers[0].prim.kind == "collective" or (moves(readers[0]) and self.is_exchanged(readers[0]))

    def consider(self, total: Eqn) -> None:
        """Let a product compute a sum if it can, and if no kernel would compute more of it."""
        stored = self.stored(total)
        if stored is None and not self.is_summand(total):
            return
        result: Any = total.outvars[0] if stored is None else stored
        for one, other in (total.invars, total.invars[::-1]):
            product = self.product(one, total)
            if product is None:
                continue
            eqns = self.with_bias(product, other, result) or self.accumulated(product, other, result)
            if eqns:
                self.possible[result] = (eqns, other)
                break
        v: Any = stored
        while v in self.possible:  # it, and the sums that it adds to
            eqns, summand = self.possible.pop(v)
            self.put(self.makers[v], eqns)
            v = summand

    def is_summand(self, total: Eqn) -> bool:
        """Whether only another sum reads a sum: if that is a product's, this one is stored for it."""
        readers = self.readers.get(total.outvars[0], [])
        alone = len(readers) == 1 and total.outvars[0] not in self.returned
        return alone and readers[0].prim in SUMS and self.same_origin(readers[0], total)

    def stored(self, total: Eqn) -> Var | None:
        """What of a sum is in memory if nothing is computed of it: itself, or it in another dtype."""
        (v,) = total.outvars
        readers = self.readers.get(v, [])
        if len(readers) == 1 and readers[0].prim is convert_p and v not in self.returned:
            if not self.same_origin(readers[0], total):
                return None
            (v,) = readers[0].outvars
        return v if self.only_stored(v) else None

    def only_stored(self, v: Var) -> bool:
        """Whether no kernel computes a variable where it reads it, by way of movement either.

        One that reads a part of it has other points: that is computed before, and stored.
        """
        return all(
            e.outvars[0].aval.size < v.aval.size or self.only_stored(e.outvars[0])
            if moves(e)
            else sort_of(e) == "opaque"
            for e in self.readers.get(v, ())
        )

    def accumulated(self, product: Eqn, summand: Atom, result: Var) -> list[Eqn]:
        """The equation of a product that adds an array which is in memory before it, in the order of its elements."""
        lhs, rhs = product.invars
        dtype = result.aval.dtype
        if summand.aval.dtype != dtype or lhs.aval.dtype != rhs.aval.dtype:
            return []
        if not dtypes.is_inexact(dtype) or dtype not in result_dtypes(lhs.aval.dtype):
            return []
        if self.is_zero(summand):  # as sums begin: only the sign of zeros may be another without it
            return [_joined(dot_general_p, product, [], result)]
        if summand.aval.shape != result.aval.shape or not self.in_memory_before(product, summand):
            return []
        return [_joined(dot_accumulate_p, product, [summand], result)]

    def is_zero(self, atom: Atom) -> bool:
        """Whether an operand is the number 0 everywhere."""
        while atom in self.makers and self.makers[atom].prim is broadcast_in_dim_p:  # type: ignore[index]
            (atom,) = self.makers[atom].invars  # type: ignore[index]
        return isinstance(atom, Literal) and atom.value == 0

    def is_stored(self, v: Any) -> bool:
        return v in self.possible


def _joined(prim: Primitive, product: Eqn, addend: Sequence[Atom], result: Var) -> Eqn:
    params = {**product.params, "preferred_element_type": result.aval.dtype}
    return Eqn(prim, [*product.invars, *addend], [result], params, product.source)
