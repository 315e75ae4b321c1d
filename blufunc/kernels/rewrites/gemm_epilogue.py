"""Sums fused into matmuls, for devices whose library can.

Kernels, before stage 5. In: a program after ``canonicalize``. Out: an equivalent one, in which a matmul adds a
vector along its columns, or an array of its shape, wherever the sum would be a kernel of its own. A kernel
that reads a sum computes it at no cost, so such sums stay. A matmul also writes the wider dtype that its result is
converted to for a collective.
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
from blufunc.kernels.rewrites.readers import Readers


def with_gemm_epilogues(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Fuse sums into matmuls."""
    return _Epilogues(jaxpr, origins).run()


class Products(Readers):
    """Matmuls of a program, and values that can be computed with them."""

    def __init__(self, jaxpr: Jaxpr, origins: Origins):
        super().__init__(jaxpr)
        self.origins = origins

    def same_origin(self, a: Eqn, b: Eqn) -> bool:
        return self.origins.get(a) == self.origins.get(b)

    def product(self, atom: Atom, total: Eqn) -> Eqn | None:
        """The matmul that a summand is, or is a widening conversion of."""
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
        """The equations of a matmul that adds a broadcast vector, if the summand is one."""
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
        """The operand of a conversion from a dtype, or else the operand itself."""
        eqn = self.makers.get(atom)  # type: ignore[arg-type]
        if eqn is not None and eqn.prim is convert_p and eqn.invars[0].aval.dtype == dtype:
            return eqn.invars[0]
        return atom

    def repeated(self, atom: Atom, product: Eqn) -> Atom | None:
        """The vector along the columns of a matmul that an operand is a broadcast of."""
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
        """True if an operand is dense in memory before a matmul without a kernel."""
        while atom in self.makers and self.makers[atom].prim is reshape_p:  # type: ignore[index]
            (atom,) = self.makers[atom].invars  # type: ignore[index]
        if atom.__class__ is Literal or self.position[atom] > self.position[product.outvars[0]]:
            return False
        maker = self.makers.get(atom)  # type: ignore[arg-type]
        if maker is None or self.is_stored(atom) or sort_of(maker) == "opaque":
            return True
        return self.precedes(atom, product)

    def precedes(self, v: Any, product: Eqn) -> bool:
        """True if a matmul depends on a value.

        What is computed of both then reads the value from memory.
        """
        place, seen = self.position[v], set[Eqn]()
        pending: list[Any] = list(product.invars)
        while pending:
            a = pending.pop()
            if a is v:
                return True
            maker = self.makers.get(a)
            if maker is not None and maker not in seen and self.position[a] > place:
                seen.add(maker)
                pending += maker.invars
        return False

    def is_stored(self, v: Any) -> bool:
        """True if a replacement stores this result."""
        return False


class _Epilogues(Products):
    def __init__(self, jaxpr: Jaxpr, origins: Origins):
        super().__init__(jaxpr, origins)
        self.replacements: dict[Eqn, list[Eqn]] = {}
        # by result: the equations that would compute it, were it stored, and the summand that they add
        self.possible: dict[Any, tuple[list[Eqn], Atom]] = {}
        self.fused: set[Eqn] = set()  # sums that matmuls will compute, so that they read stored summands

    def run(self) -> Jaxpr:
        if any(is_replaced(p, "impl") for p in (dot_general_p, convert_p, broadcast_in_dim_p, reshape_p)):
            return self.jaxpr
        for eqn in reversed(self.jaxpr.eqns):
            if eqn.prim in SUMS and sort_of(eqn) == "node" and (v := self.stored(eqn)) is not None:
                self.fused.update([eqn] * (self.fitting(eqn, v) is not None))
        for eqn in self.jaxpr.eqns:
            if eqn.prim in SUMS and sort_of(eqn) == "node":
                self.consider(eqn)
            elif eqn.prim is convert_p:
                self.widen(eqn)
        if not self.replacements:
            return self.jaxpr
        eqns = [new for e in self.jaxpr.eqns for new in self.replacements.get(e, [e])]
        return dce(self.jaxpr.replace(eqns=eqns))

    def put(self, old: Eqn, new: list[Eqn]) -> None:
        """Replace an equation; the new ones have its origin."""
        self.replacements[old] = new
        if old in self.origins:
            self.origins.update(dict.fromkeys(new, self.origins[old]))

    def widen(self, eqn: Eqn) -> None:
        """Let a matmul write the operand of a collective, without rounding before that."""
        product = self.product(eqn.outvars[0], eqn) if self.is_exchanged(eqn) else None
        if product is not None and eqn.outvars[0].aval.dtype in result_dtypes(product.invars[0].aval.dtype):
            self.put(product, [_joined(dot_general_p, product, [], eqn.outvars[0])])
            self.put(eqn, [])

    def is_exchanged(self, eqn: Eqn) -> bool:
        """True if only a collective reads a result, directly or through movement."""
        reader = self.only(eqn.outvars[0])
        return reader is not None and (
            reader.prim.kind == "collective" or (moves(reader) and self.is_exchanged(reader))
        )

    def consider(self, total: Eqn) -> None:
        """Fuse a sum into a matmul, unless a kernel that reads the sum computes it."""
        stored, reader = self.stored(total), self.only(total.outvars[0])
        is_summand = reader is not None and reader.prim in SUMS and self.same_origin(reader, total)
        if stored is None and not is_summand:  # a summand is stored if the sum that reads it is a matmul's
            return
        result: Any = total.outvars[0] if stored is None else stored
        if (found := self.fitting(total, result)) is not None:
            self.possible[result] = found
        v: Any = stored
        while v in self.possible:  # the sum, and the sums that it adds to
            eqns, summand = self.possible.pop(v)
            self.put(self.makers[v], eqns)
            v = summand

    def fitting(self, total: Eqn, result: Var) -> tuple[list[Eqn], Atom] | None:
        """A matmul that computes a sum, and the other summand; None if none can."""
        for one, other in (total.invars, total.invars[::-1]):
            product = self.product(one, total)
            if product is None:
                continue
            eqns = self.with_bias(product, other, result) or self.accumulated(product, other, result)
            if eqns:
                return eqns, other
        return None

    def stored(self, total: Eqn) -> Var | None:
        """The sum, or its conversion to another dtype, if no kernel reads it."""
        (v,) = total.outvars
        reader = self.only(v)
        if reader is not None and reader.prim is convert_p:
            if not self.same_origin(reader, total):
                return None
            (v,) = reader.outvars
        return v if self.only_stored(v) else None

    def only_stored(self, v: Var) -> bool:
        """True if no kernel can compute a variable as it reads it, also through movement.

        A kernel that reads a part of it has other points, so the variable is computed before and stored.
        """
        return all(
            e.outvars[0].aval.size < v.aval.size or self.only_stored(e.outvars[0])
            if moves(e)
            else sort_of(e) == "opaque" or e in self.fused
            for e in self.of(v)
        )

    def accumulated(self, product: Eqn, summand: Atom, result: Var) -> list[Eqn]:
        """The equation of a matmul that adds an array of its shape, if the summand is one."""
        lhs, rhs = product.invars
        dtype = result.aval.dtype
        if summand.aval.dtype != dtype or lhs.aval.dtype != rhs.aval.dtype:
            return []
        if not dtypes.is_inexact(dtype) or dtype not in result_dtypes(lhs.aval.dtype):
            return []
        if self.is_zero(summand):  # the first of a chain of sums; only the sign of zeros may differ
            return [_joined(dot_general_p, product, [], result)]
        if summand.aval.shape != result.aval.shape or not self.in_memory_before(product, summand):
            return []
        return [_joined(dot_accumulate_p, product, [summand], result)]

    def is_zero(self, atom: Atom) -> bool:
        """True if an operand is a broadcast 0."""
        while atom in self.makers and self.makers[atom].prim is broadcast_in_dim_p:  # type: ignore[index]
            (atom,) = self.makers[atom].invars  # type: ignore[index]
        return isinstance(atom, Literal) and atom.value == 0

    def is_stored(self, v: Any) -> bool:
        return v in self.possible


def _joined(prim: Primitive, product: Eqn, addend: Sequence[Atom], result: Var) -> Eqn:
    params = {**product.params, "preferred_element_type": result.aval.dtype}
    return Eqn(prim, [*product.invars, *addend], [result], params, product.source)
