"""GEMM epilogues: bias and residual additions inside the GEMM.

Kernels, before stage 5, for devices that support them. In: a program after ``rewrite``. Out: an equivalent one, in
which a matmul and its sum with a vector along the columns, or with an array of its shape, are one equation wherever
the sum would be a kernel of its own. A sum that a kernel reads stays part of that kernel, where it costs nothing. The
same holds for the conversion of a matmul to a wider dtype that a collective sends.
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
    """The program with sums in matmuls.

    Args:
      jaxpr: simplified.
      origins: for equations, the call that recomputes them; updated for their replacements.
    """
    return _Epilogues(jaxpr, origins).run()


class Products:
    """Matcher of matmuls and the operations that they can absorb.

    Attributes:
      makers: the equation that computes each variable.
      position: the index of that equation; -1 for parameters.
      readers: the equations that read a variable.
      returned: the variables that are results.
      made: for equations, their replacements.
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
        """Replace an equation; the new ones inherit its origin."""
        self.made[old] = new
        if old in self.origins:
            self.origins.update(dict.fromkeys(new, self.origins[old]))

    def replaced(self) -> Jaxpr:
        """The program with the replacements."""
        return dce(self.jaxpr.replace(eqns=[new for e in self.jaxpr.eqns for new in self.made.get(e, [e])]))

    def same_origin(self, a: Eqn, b: Eqn) -> bool:
        return self.origins.get(a) == self.origins.get(b)

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation of an operand with a single reader."""
        if atom.__class__ is Literal or atom in self.returned or len(self.readers[atom]) != 1:
            return None
        return self.makers.get(atom)  # type: ignore[arg-type]

    def product(self, atom: Atom, total: Eqn) -> Eqn | None:
        """The matmul that computes a summand, directly or through a widening conversion."""
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
        """The equations of a matmul with a bias vector, if the summand is a broadcast one."""
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
        """The operand of a conversion from a dtype, or the operand itself."""
        eqn = self.makers.get(atom)  # type: ignore[arg-type]
        if eqn is not None and eqn.prim is convert_p and eqn.invars[0].aval.dtype == dtype:
            return eqn.invars[0]
        return atom

    def repeated(self, atom: Atom, product: Eqn) -> Atom | None:
        """The vector that is broadcast to an operand, along the rhs's free axes."""
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
        """True if an operand is dense in memory before a matmul, without another kernel."""
        while atom in self.makers and self.makers[atom].prim is reshape_p:  # type: ignore[index]
            (atom,) = self.makers[atom].invars  # type: ignore[index]
        if atom.__class__ is Literal or self.position[atom] > self.position[product.outvars[0]]:
            return False
        maker = self.makers.get(atom)  # type: ignore[arg-type]
        return maker is None or self.is_stored(atom) or sort_of(maker) == "opaque"

    def is_stored(self, v: Any) -> bool:
        """True if the replacement of an equation stores its result."""
        return False


class _Epilogues(Products):
    def __init__(self, jaxpr: Jaxpr, origins: Origins):
        super().__init__(jaxpr, origins)
        # by result: the replacement if it were stored, and its addend
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
        """Let a matmul write directly in the wider dtype that a collective sends.

        This saves a kernel and the rounding to the narrower dtype, as for an added array.
        """
        product = self.product(eqn.outvars[0], eqn) if self.is_exchanged(eqn) else None
        if product is not None and eqn.outvars[0].aval.dtype in result_dtypes(product.invars[0].aval.dtype):
            self.put(product, [_joined(dot_general_p, product, [], eqn.outvars[0])])
            self.put(eqn, [])

    def is_exchanged(self, eqn: Eqn) -> bool:
        """True if only collectives read a result, possibly through movement."""
        readers = self.readers.get(eqn.outvars[0], [])
        if len(readers) != 1 or eqn.outvars[0] in self.returned:
            return False
        return readers[0].prim.kind == "collective" or (moves(readers[0]) and self.is_exchanged(readers[0]))

    def consider(self, total: Eqn) -> None:
        """Let a matmul compute a sum if it can, and if no kernel would compute more of it."""
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
        """True if only another sum reads a sum: a matmul that takes that stores this one."""
        readers = self.readers.get(total.outvars[0], [])
        alone = len(readers) == 1 and total.outvars[0] not in self.returned
        return alone and readers[0].prim in SUMS and self.same_origin(readers[0], total)

    def stored(self, total: Eqn) -> Var | None:
        """The stored form of a sum without further computation: itself, or its conversion."""
        (v,) = total.outvars
        readers = self.readers.get(v, [])
        if len(readers) == 1 and readers[0].prim is convert_p and v not in self.returned:
            if not self.same_origin(readers[0], total):
                return None
            (v,) = readers[0].outvars
        return v if self.only_stored(v) else None

    def only_stored(self, v: Var) -> bool:
        """True if no kernel inlines a variable where it reads it, through movement either.

        A kernel that reads a slice iterates over other points: the variable is computed before, and stored.
        """
        return all(
            e.outvars[0].aval.size < v.aval.size or self.only_stored(e.outvars[0])
            if moves(e)
            else sort_of(e) == "opaque"
            for e in self.readers.get(v, ())
        )

    def accumulated(self, product: Eqn, summand: Atom, result: Var) -> list[Eqn]:
        """The equation of a matmul that adds an array of equal layout, already in memory."""
        lhs, rhs = product.invars
        dtype = result.aval.dtype
        if summand.aval.dtype != dtype or lhs.aval.dtype != rhs.aval.dtype:
            return []
        if not dtypes.is_inexact(dtype) or dtype not in result_dtypes(lhs.aval.dtype):
            return []
        if self.is_zero(summand):  # the initial value of a sum: dropping it changes at most the sign of zeros
            return [_joined(dot_general_p, product, [], result)]
        if summand.aval.shape != result.aval.shape or not self.in_memory_before(product, summand):
            return []
        return [_joined(dot_accumulate_p, product, [summand], result)]

    def is_zero(self, atom: Atom) -> bool:
        """True if an operand is 0 everywhere."""
        while atom in self.makers and self.makers[atom].prim is broadcast_in_dim_p:  # type: ignore[index]
            (atom,) = self.makers[atom].invars  # type: ignore[index]
        return isinstance(atom, Literal) and atom.value == 0

    def is_stored(self, v: Any) -> bool:
        return v in self.possible


def _joined(prim: Primitive, product: Eqn, addend: Sequence[Atom], result: Var) -> Eqn:
    params = {**product.params, "preferred_element_type": result.aval.dtype}
    return Eqn(prim, [*product.invars, *addend], [result], params, product.source)
