"""Equations in the form that libraries and kernels compute best.

Kernels, before stage 5. In: a simplified jaxpr, its calls inlined. Out: an equivalent one.

- A transpose of a matmul becomes the matmul of the transposes, which are free.
- A matmul that sums nothing, such as an outer product, becomes an elementwise product.
- Zeros with a scattered sum, added to an array, become a scatter-add into that array.
- A slice of a widened array is widened after slicing, and a converted table after the gather of its rows.
- A value that is only moved and then narrowed is narrowed first, and stored so.
- The position of an extremum along an axis that is not the last is the lowest position of the extreme value: kernels
  reduce columns, but do not find positions in them.
- Operands of a matmul are copied if its library needs their batch axes dense, or, of 8-bit integers, the summed axis
  last; the copy computes cheap producers.
- Column reductions over rows too long for registers get their own elementwise operands (``split_column_reductions``).
  Fusion separates such reductions from those of the rows (``Target.summed_lanes``), so an operand of both, such as the
  ``abs`` of a gradient for its maximum, would be stored for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p, bitwise_or, convert_p, copy_p, eq, mul_p, ne, select
from blufunc.core.ops.gather_scatter import gather_p, scatter_add_p
from blufunc.core.ops.reduce import argmax_p, argmin_p, reduce_max, reduce_min
from blufunc.core.ops.shape import iota, slice_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import (
    add_any_p,
    broadcast_in_dim,
    broadcast_in_dim_p,
    full,
    transpose_p,
)
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, put_in_place, rewrite
from blufunc.core.programs.stage import stage
from blufunc.kernels.fusion.iteration_space import Frame, positions_apart, reduces, role_of, sort_of
from blufunc.kernels.loopir.access_map import MOVED, is_widening, moves, view_strides
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.rewrites.readers import Readers


def canonicalize(jaxpr: Jaxpr, origins: Origins, batch_first: bool = False) -> Jaxpr:
    """Apply all rules; ``batch_first``: whether matmuls need their batch axes dense."""
    jaxpr = _positions_by_value(_narrow_early(_Rules(jaxpr).apply(origins), origins), origins)
    return _with_dense_batches(jaxpr, origins) if batch_first else jaxpr


class _Rules:
    """The rules for single equations, and the equation that computes each variable."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.makers: dict[Atom, Eqn] = {}
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars)
        self.uses.update(jaxpr.outvars)

    def apply(self, origins: Origins) -> Jaxpr:
        changed = False

        def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
            nonlocal changed
            found = next((found for rule in _RULES if (found := rule(self, eqn))), None)
            changed |= found is not None
            self.makers.update((v, e) for e in found or [eqn] for v in e.outvars)
            return found or [eqn]

        made = rewrite(self.jaxpr, step, origins)
        return dce(made) if changed else self.jaxpr

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation that computes an operand with one reader."""
        return self.makers.get(atom) if self.uses[atom] == 1 else None


def _transposed_product(r: _Rules, eqn: Eqn) -> list[Eqn] | None:
    """``transpose(dot_general(x, y))`` is ``dot_general(y, x)``.

    The transpose must swap the axes of x and of y. A conversion in between comes last.
    """
    if eqn.prim is not transpose_p:
        return None
    product, converted = r.maker(eqn.invars[0]), None
    if product is not None and product.prim is convert_p:
        product, converted = r.maker(product.invars[0]), product
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
    if converted is None:
        return [Eqn(dot_general_p, [y, x], eqn.outvars, params, product.source)]
    out = Var(eqn.outvars[0].aval.with_dtype(product.outvars[0].aval.dtype))
    swapped = Eqn(dot_general_p, [y, x], [out], params, product.source)
    return [swapped, Eqn(convert_p, [out], eqn.outvars, converted.params, converted.source)]


def _outer_product(r: _Rules, eqn: Eqn) -> list[Eqn] | None:
    """``dot_general`` that contracts no axis is an elementwise product, which fuses."""
    if eqn.prim is not dot_general_p or is_replaced(dot_general_p, "impl"):
        return None
    (lc, _), batches = eqn.params["dimension_numbers"]
    (out,) = eqn.outvars
    dtype = out.aval.dtype
    if lc or not dtypes.is_floating(dtype) or isinstance(eqn.params["precision"], tuple):
        return None
    if any(x.aval.dtype != dtype and x.aval.dtype.itemsize >= dtype.itemsize for x in eqn.invars):
        return None  # factors of the result's dtype would be rounded, where the product alone is
    made: list[Eqn] = []
    factors: list[Atom] = []
    free = len(batches[0])
    for x, along in zip(eqn.invars, batches, strict=True):
        rest = iter(range(free, out.aval.ndim))
        dims = [along.index(d) if d in along else next(rest) for d in range(x.aval.ndim)]
        free += x.aval.ndim - len(along)
        if dims != sorted(dims):
            return None
        for prim, params, aval in (
            (convert_p, {"dtype": dtype}, x.aval.with_dtype(dtype)),
            (broadcast_in_dim_p, {"shape": out.aval.shape, "dims": tuple(dims)}, out.aval),
        ):
            if not x.aval.same_type(aval):
                made.append(Eqn(prim, [x], [Var(aval)], params, eqn.source))
                (x,) = made[-1].outvars
        factors.append(x)
    return [*made, Eqn(mul_p, factors, [out], {}, eqn.source)]


def _sum_with_scattered(r: _Rules, eqn: Eqn) -> list[Eqn] | None:
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
        return [Eqn(scatter_add_p, [a, *scatter.invars[1:]], eqn.outvars, scatter.params, scatter.source)]
    return None


def _part_of_widened(r: _Rules, eqn: Eqn) -> list[Eqn] | None:
    """``slice(convert(x))`` is ``convert(slice(x))``, also with movement in between.

    Otherwise the wide array would be stored for its parts, which kernels read at other elements.
    """
    if eqn.prim is not slice_p:
        return None
    chain = [eqn]
    while (maker := r.makers.get(chain[-1].invars[0])) is not None and maker.prim in MOVED:  # type: ignore[arg-type]
        chain.append(maker)
    if maker is None or not is_widening(maker) or any(is_replaced(e.prim, "impl") for e in (maker, *chain)):
        return None
    made, x = [], maker.invars[0]
    for e in reversed(chain):
        moved = Var(e.outvars[0].aval.with_dtype(x.aval.dtype))
        made.append(Eqn(e.prim, [x], [moved], e.params, e.source))
        x = moved
    return [*made, Eqn(convert_p, [x], eqn.outvars, maker.params, maker.source)]


def _gathered_conversion(r: _Rules, eqn: Eqn) -> list[Eqn] | None:
    """``gather(convert(x))`` is ``convert(gather(x))``: a lookup in a float32 table."""
    if eqn.prim is not gather_p or eqn.outvars[0].aval.size >= eqn.invars[0].aval.size:
        return None
    conversion = r.maker(eqn.invars[0])
    if conversion is None or conversion.prim is not convert_p or is_replaced(convert_p, "impl"):
        return None
    (table,) = conversion.invars
    if eqn.params["fill_value"] is not None or not all(
        map(dtypes.is_floating, (table.aval.dtype, eqn.outvars[0].aval.dtype))
    ):
        return None
    rows = Var(eqn.outvars[0].aval.with_dtype(table.aval.dtype))
    gather = Eqn(gather_p, [table, *eqn.invars[1:]], [rows], eqn.params, eqn.source)
    return [gather, Eqn(convert_p, [rows], eqn.outvars, conversion.params, conversion.source)]


_RULES: tuple[Callable[[_Rules, Eqn], list[Eqn] | None], ...] = (
    _transposed_product,
    _outer_product,
    _sum_with_scattered,
    _part_of_widened,
    _gathered_conversion,
)


def _final_conversions(jaxpr: Jaxpr, origins: Origins) -> Callable[[Eqn], Eqn | None]:
    """From an equation to the narrowing conversion after all movement of its result."""
    readers = Readers(jaxpr)

    def ends(v: Var) -> list[Eqn] | None:
        """The conversions after movement of a variable; None if anything else reads it."""
        found = []
        for e in readers.of(v):
            after = [e] if e.prim is convert_p else ends(e.outvars[0]) if e.prim in MOVED else None
            if after is None:
                return None
            found += after
        return None if v in readers.returned else found

    def narrower(eqn: Eqn) -> Eqn | None:
        if not any(e.prim in MOVED for e in readers.of(eqn.outvars[0])) or sort_of(eqn) != "node":
            return None
        found = ends(eqn.outvars[0])
        if not found or any(origins.get(e) != origins.get(eqn) for e in found):
            return None
        before, after = eqn.outvars[0].aval.dtype, found[0].outvars[0].aval.dtype
        if any(e.outvars[0].aval.dtype != after for e in found) or after.itemsize >= before.itemsize:
            return None
        return found[0] if dtypes.is_floating(before) and dtypes.is_floating(after) else None

    return narrower


def _narrow_early(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Move narrowing conversions ahead of movement."""
    if any(is_replaced(p, "impl") for p in (convert_p, *MOVED)):
        return jaxpr
    narrower = _final_conversions(jaxpr, origins)
    narrow: dict[Any, Var] = {}  # by variable, its narrow copy

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        x = narrow.get(eqn.invars[0]) if eqn.invars else None
        if x is None:
            conversion = narrower(eqn) if eqn.outvars else None
            eqn = eqn.with_invars(invars)
            if conversion is None:
                return [eqn]
            (v,) = eqn.outvars
            narrow[v] = Var(conversion.outvars[0].aval.with_shape(v.aval.shape))
            return [eqn, Eqn(convert_p, [v], [narrow[v]], conversion.params, conversion.source)]
        (v,) = eqn.outvars
        if eqn.prim is convert_p:
            alias(v, x)
            return []
        narrow[v] = Var(v.aval.with_dtype(x.aval.dtype))
        return [Eqn(eqn.prim, [x], [narrow[v]], eqn.params, eqn.source)]

    made = rewrite(jaxpr, step, origins)
    return made if narrow else jaxpr


_POSITIONS = {argmax_p: reduce_max, argmin_p: reduce_min}
"""Positions that a kernel finds along the last axis alone, and the value there."""


def _positions_by_value(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Find positions of extrema in columns by looking for the extreme value."""
    eqns = [e for e in jaxpr.eqns if e.prim in _POSITIONS and positions_apart(e)]
    found = {
        e for e in eqns if not is_replaced(e.prim, "impl") and not dtypes.is_complex(e.invars[0].aval.dtype)
    }

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn not in found:
            return [eqn.with_invars(invars)]
        extremum, (axis,) = _POSITIONS[eqn.prim], eqn.params["axes"]
        x, dtype = eqn.invars[0].aval, eqn.params["index_dtype"]

        def position(x: Any) -> list[Any]:
            shape = x.aval.shape
            kept = tuple(d for d in range(len(shape)) if d != axis)
            hit = eq(x, broadcast_in_dim(extremum(x, (axis,)), shape, kept))
            if dtypes.is_floating(x.aval.dtype):
                hit = bitwise_or(hit, ne(x, x))  # NaN is the extreme value if there is one
            at = select(hit, iota(dtype, shape, axis), full(shape, shape[axis] - 1, dtype))
            return [reduce_min(at, (axis,))]

        return put_in_place(eqn, stage(position, [x], eqn.prim.name, line=eqn.source), invars, alias)

    return rewrite(jaxpr, step, origins) if found else jaxpr


def _with_dense_batches(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Copy the operands of matmuls that their library does not take in place."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    copies: dict[Any, Var] = {}  # shared by all matmuls of one origin

    def dense(x: Atom, order: tuple[int, ...], product: Eqn, eqns: list[Eqn]) -> Var:
        """``x`` copied to dense memory with its axes in an order."""
        key = (x, order, origins.get(product))
        if key not in copies:
            moved = x
            if order != tuple(range(x.aval.ndim)):
                moved = Var(x.aval.with_shape(tuple(x.aval.shape[d] for d in order)))
                eqns.append(Eqn(transpose_p, [x], [moved], {"permutation": order}, product.source))
            copies[key] = Var(moved.aval)
            eqns.append(Eqn(copy_p, [moved], [copies[key]], {}, product.source))
        return copies[key]

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn.prim is not dot_general_p:
            return [eqn]
        eqns: list[Eqn] = []
        operands, contracts, batches = [], [], []
        for x, contract, batch in zip(invars, *eqn.params["dimension_numbers"], strict=True):
            free = [d for d in range(x.aval.ndim) if d not in batch and d not in contract]
            if x.aval.dtype == dtypes.int8 and not _sums_last(x, contract, eqn.outvars[0].aval.size, makers):
                x = dense(x, order := (*batch, *free, *contract), eqn, eqns)
                contract, batch = tuple(map(order.index, contract)), tuple(range(len(batch)))
            elif not _in_one_stride(x, batch, makers):
                order = (*batch, *(d for d in range(x.aval.ndim) if d not in batch))
                x = dense(x, order, eqn, eqns)
                contract, batch = tuple(map(order.index, contract)), tuple(range(len(batch)))
            operands.append(x)
            contracts.append(contract)
            batches.append(batch)
        if operands == invars:
            return [eqn]
        params = {**eqn.params, "dimension_numbers": (tuple(contracts), tuple(batches))}
        return [*eqns, Eqn(dot_general_p, operands, eqn.outvars, params, eqn.source)]

    made = rewrite(jaxpr, step, origins)
    return made if copies else jaxpr


def _sums_last(x: Atom, contract: tuple[int, ...], results: int, makers: dict[Var, Eqn]) -> bool:
    """True if the summed axis is dense in memory, as integer tensor cores need it.

    A matmul of few results is bound by its operands, which a copy would read once more.
    """
    terms = math.prod([x.aval.shape[d] for d in contract])
    few = results * terms < _FEW_RESULTS * x.aval.size
    return few or x.__class__ is Literal or terms == 1 or _strides(x, makers)[contract[-1]] == 1


_FEW_RESULTS = 64
"""Multiplications per element below which int8 operands are read in place."""


def _in_one_stride(x: Atom, batch: tuple[int, ...], makers: dict[Var, Eqn]) -> bool:
    """True if one stride covers all batch axes of an operand, read in place."""
    axes = [d for d in batch if x.aval.shape[d] > 1]
    if len(axes) < 2 or x.__class__ is Literal:
        return True
    strides = _strides(x, makers)
    return all(strides[a] == x.aval.shape[b] * strides[b] for a, b in pairwise(axes))


def _strides(x: Atom, makers: dict[Var, Eqn]) -> tuple[int, ...]:
    """Strides of an operand that is read in place, or those of a dense copy."""
    virtual = {}
    v = x
    while v in makers and moves(makers[v]) and makers[v].invars[0].__class__ is not Literal:  # type: ignore[index]
        virtual[v] = makers[v]  # type: ignore[index]
        v = makers[v].invars[0]  # type: ignore[index]
    strides = view_strides(x, virtual)  # type: ignore[arg-type]
    return strides_of(x.aval.shape) if strides is None else strides


# -- reductions over long rows ----------------------------------------------------------------------


def split_column_reductions(jaxpr: Jaxpr, origins: Origins, lanes: int) -> Jaxpr:
    """Repeat the operands of reductions over rows of more than ``lanes`` lanes.

    The equations of each reduction get an origin of their own, so fusion separates them.
    """
    found = [e for e in jaxpr.eqns if (role := _reduction_of(e))[0] == "column" and role[1] > lanes]
    if not found:
        return jaxpr
    program = _Operands(jaxpr)
    new: dict[Eqn, list[Eqn]] = {}
    for eqn in found:
        chain = program.chain_of(eqn)
        fresh: dict[Any, Var] = {x.outvars[0]: Var(x.outvars[0].aval) for x in chain}
        renamed = [[fresh.get(a, a) for a in x.invars] for x in (*chain, eqn)]
        copies = [x.with_vars(a, [fresh[x.outvars[0]]]) for x, a in zip(chain, renamed, strict=False)]
        origins.update(dict.fromkeys(copies, 1 + max(origins.values(), default=0)))
        new[eqn] = [*copies, eqn.with_invars(renamed[-1])]
    return jaxpr.replace(eqns=[made for e in jaxpr.eqns for made in new.get(e, [e])])


def _reduction_of(eqn: Eqn) -> tuple[str, int]:
    """Role and lanes of a reduction; an empty role for other equations."""
    found = role_of(eqn, Frame(eqn.invars[0].aval.size)) if reduces(eqn.prim) else None
    return ("", 0) if found is None else (found[0], found[1].lanes or 0)


class _Operands(Readers):
    """The cheap elementwise operands of reductions."""

    def chain_of(self, reduction: Eqn) -> list[Eqn]:
        """The equations, in order, from one array to the operand of a reduction.

        Empty if no row reduction reads the operand, and if the equations are expensive or read several arrays.
        """
        operand = reduction.invars[0]
        roles = [_reduction_of(r)[0] for r in self.of(operand)]
        if "row" not in roles or "" in roles:
            return []
        chain: set[Eqn] = set()
        sources = {operand}
        while True:
            only = lambda v: all(r in chain for r in self.of(v))
            more = [v for v in sources if self._is_cheap(v) and (v is operand or only(v))]
            if not more:
                break
            chain.update(self.makers[v] for v in more)
            sources = {a for e in chain for a in e.invars if self._is_array(a)}
            sources -= {e.outvars[0] for e in chain}
        return sorted(chain, key=lambda e: self.position[e.outvars[0]]) if len(sources) == 1 else []

    def _is_cheap(self, v: Atom) -> bool:
        maker = self.makers.get(v)
        if maker is None or v in self.returned:  # a result is in memory
            return False
        return isinstance(maker.prim, Elementwise) and maker.prim.cost <= 1

    def _is_array(self, a: Atom) -> bool:
        """True unless an operand is a broadcast scalar."""
        while a in self.makers and a not in self.returned and moves(self.makers[a]):
            a = self.makers[a].invars[0]
        return a.aval.size > 1
