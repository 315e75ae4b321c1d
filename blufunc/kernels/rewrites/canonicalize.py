"""Canonicalization: several equations become one that a library or kernel runs.

Kernels, before stage 5. In: a simplified jaxpr, its calls inlined. Out: an equivalent one.

- The transpose of a matmul is the matmul of the transposes, which cost nothing.
- A scatter-add into zeros, whose result is added to an array, scatters into that array.
- A slice of a widened array is widened after it is cut out, and a converted table after rows of it are gathered.
- Values that a kernel computes only to be moved and then rounded to a narrower dtype are rounded first, and stored
  so.
- Where a library requires the batch axes of a matmul to be contiguous, its operands are copied into that order, and
  cheap operations on them are computed in the copy.
- Reductions over rows too long for registers get equations of their own for their elementwise operands
  (``split_column_reductions``). Fusion separates such reductions from those of the rows (``Target.summed_lanes``): an
  operand that both read, as ``abs`` of a gradient for its maximum, would be stored for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p, convert_p, copy_p
from blufunc.core.ops.gather_scatter import gather_p, scatter_add_p
from blufunc.core.ops.shape import slice_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p, transpose_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce
from blufunc.kernels.fusion.iteration_space import Frame, reduces, role_of, sort_of
from blufunc.kernels.loopir.access_map import MOVED, is_widening, moves, view_strides
from blufunc.kernels.loopir.index import strides_of

# -- rules ------------------------------------------------------------------------------------------


def rewrite(jaxpr: Jaxpr, origins: dict[Eqn, int], batch_first: bool = False) -> Jaxpr:
    """Apply all rules.

    Args:
      jaxpr: the program.
      origins: for equations, the call that recomputes them; updated for their replacements.
      batch_first: whether matmuls require contiguous batch axes.
    """
    jaxpr = _narrowed_early(_Rewriter(jaxpr, origins).run(), origins)
    return _with_dense_batches(jaxpr, origins) if batch_first else jaxpr


class _Rewriter:
    def __init__(self, jaxpr: Jaxpr, origins: dict[Eqn, int]):
        self.jaxpr, self.origins = jaxpr, origins
        self.makers: dict[Var, Eqn] = {}
        self.position: dict[Var, int] = dict.fromkeys(jaxpr.invars, -1)
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars if a.__class__ is not Literal)
        self.uses.update(a for a in jaxpr.outvars if a.__class__ is not Literal)

    def run(self) -> Jaxpr:
        eqns: list[Eqn] = []
        changed = False
        for i, eqn in enumerate(self.jaxpr.eqns):
            made = next((m for rule in _RULES if (m := rule(self, eqn))), [eqn])
            if made != [eqn]:
                changed = True
                if eqn in self.origins:
                    self.origins.update((m, self.origins[eqn]) for m in made)
            eqns.extend(made)
            self.makers.update((v, m) for m in made for v in m.outvars)
            self.position.update((v, i) for m in made for v in m.outvars)
        return dce(self.jaxpr.replace(eqns=eqns)) if changed else self.jaxpr

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation that computes an operand with a single reader."""
        if atom.__class__ is Literal or self.uses[atom] != 1:
            return None
        return self.makers.get(atom)  # type: ignore[arg-type]


def _transposed_product(r: _Rewriter, eqn: Eqn) -> list[Eqn] | None:
    """``transpose(dot_general(x, y))`` with all of y's axes first is ``dot(y, x)``.

    A conversion to another dtype in between then comes last.
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


def _sum_with_scattered(r: _Rewriter, eqn: Eqn) -> list[Eqn] | None:
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


def _part_of_widened(r: _Rewriter, eqn: Eqn) -> list[Eqn] | None:
    """``slice(convert(x))`` to a wider dtype is ``convert(slice(x))``.

    Otherwise the wide array would be stored for its parts, which other elements of a kernel read. Movement in between
    is allowed, as in ``x.astype(float32).reshape(...)[..., :n]``.
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


def _gathered_conversion(r: _Rewriter, eqn: Eqn) -> list[Eqn] | None:
    """Convert fewer elements, after a gather: a lookup in a table stored in float32."""
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


_RULES: tuple[Callable[[_Rewriter, Eqn], list[Eqn] | None], ...] = (
    _transposed_product,
    _sum_with_scattered,
    _part_of_widened,
    _gathered_conversion,
)


def _final_conversions(jaxpr: Jaxpr, origins: dict[Eqn, int]) -> Callable[[Eqn], Eqn | None]:
    """Lookup of the narrowing conversion that ends all movement of an equation."""
    readers: dict[Any, list[Eqn]] = {}
    for e in jaxpr.eqns:
        for a in e.invars:
            readers.setdefault(a, []).append(e)
    returned = set(jaxpr.outvars)

    def ends(v: Var) -> list[Eqn] | None:
        """The conversions that movement of a variable ends in; None if not all ends are."""
        found = []
        for e in readers.get(v, ()):
            more = [e] if e.prim is convert_p else ends(e.outvars[0]) if e.prim in MOVED else None
            if more is None:
                return None
            found += more
        return None if v in returned else found

    def narrower(eqn: Eqn) -> Eqn | None:
        if not any(e.prim in MOVED for e in readers.get(eqn.outvars[0], ())) or sort_of(eqn) != "node":
            return None
        found = ends(eqn.outvars[0])
        if not found or any(origins.get(e) != origins.get(eqn) for e in found):
            return None
        before, after = eqn.outvars[0].aval.dtype, found[0].outvars[0].aval.dtype
        if any(e.outvars[0].aval.dtype != after for e in found) or after.itemsize >= before.itemsize:
            return None
        return found[0] if dtypes.is_floating(before) and dtypes.is_floating(after) else None

    return narrower


def _narrowed_early(jaxpr: Jaxpr, origins: dict[Eqn, int]) -> Jaxpr:
    """Move narrowing conversions ahead of movement, if all readers need that dtype."""
    if any(is_replaced(p, "impl") for p in (convert_p, *MOVED)):
        return jaxpr
    narrower = _final_conversions(jaxpr, origins)
    narrow: dict[Any, Var] = {}  # variables to their narrower versions
    ended: dict[Any, Var] = {}  # results of removed conversions to their replacements
    eqns: list[Eqn] = []

    def add(eqn: Eqn, old: Eqn) -> None:
        eqns.append(eqn)
        if old in origins:
            origins[eqn] = origins[old]

    for eqn in jaxpr.eqns:
        x = narrow.get(eqn.invars[0]) if eqn.invars else None
        if x is None:
            converted = any(a in ended for a in eqn.invars)
            new = eqn.with_vars([ended.get(a, a) for a in eqn.invars], eqn.outvars) if converted else eqn
            add(new, eqn)
            conversion = narrower(eqn) if eqn.outvars else None
            if conversion is not None:
                (v,) = eqn.outvars
                narrow[v] = Var(conversion.outvars[0].aval.with_shape(v.aval.shape))
                add(Eqn(convert_p, [v], [narrow[v]], conversion.params, conversion.source), conversion)
        elif eqn.prim is convert_p:
            ended[eqn.outvars[0]] = x
        else:
            (v,) = eqn.outvars
            narrow[v] = Var(v.aval.with_dtype(x.aval.dtype))
            add(Eqn(eqn.prim, [x], [narrow[v]], eqn.params, eqn.source), eqn)
    if not narrow:
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=[ended.get(a, a) for a in jaxpr.outvars])


def _with_dense_batches(jaxpr: Jaxpr, origins: dict[Eqn, int]) -> Jaxpr:
    """With copies of matmul operands whose batch axes have no single stride."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    eqns: list[Eqn] = []
    made: dict[Any, Var] = {}

    def dense(x: Any, batch: tuple[int, ...], origin: int, source: Any) -> Any:
        """``x`` with its batch axes first, dense; shared by all matmuls of one origin."""
        order = (*batch, *(d for d in range(x.aval.ndim) if d not in batch))
        key = (x, order, origin)
        if key not in made:
            shape = tuple(x.aval.shape[d] for d in order)
            turned = x
            if order != tuple(range(x.aval.ndim)):
                turned = Var(x.aval.with_shape(shape))
                add(Eqn(transpose_p, [x], [turned], {"permutation": order}, source), origin)
            made[key] = Var(turned.aval)
            add(Eqn(copy_p, [turned], [made[key]], {}, source), origin)
        return made[key]

    def add(eqn: Eqn, origin: int) -> None:
        eqns.append(eqn)
        if origin:
            origins[eqn] = origin

    for eqn in jaxpr.eqns:
        if eqn.prim is not dot_general_p:
            eqns.append(eqn)
            continue
        (xc, yc), (xb, yb) = eqn.params["dimension_numbers"]
        origin = origins.get(eqn, 0)
        operands, numbers = [], []
        for x, contract, batch in zip(eqn.invars, (xc, yc), (xb, yb), strict=True):
            if _in_one_stride(x, batch, makers):
                operands.append(x)
                numbers.append((contract, batch))
                continue
            operands.append(dense(x, batch, origin, eqn.source))
            order = (*batch, *(d for d in range(x.aval.ndim) if d not in batch))
            numbers.append((tuple(order.index(d) for d in contract), tuple(range(len(batch)))))
        if operands == list(eqn.invars):
            eqns.append(eqn)
            continue
        (xc, xb), (yc, yb) = numbers
        params = {**eqn.params, "dimension_numbers": ((xc, yc), (xb, yb))}
        add(Eqn(dot_general_p, operands, eqn.outvars, params, eqn.source), origin)
    return jaxpr.replace(eqns=eqns) if len(eqns) > len(jaxpr.eqns) else jaxpr


def _in_one_stride(x: Atom, batch: tuple[int, ...], makers: dict[Var, Eqn]) -> bool:
    """True if one stride goes through all batch axes of an operand in place."""
    axes = [d for d in batch if x.aval.shape[d] > 1]
    if len(axes) < 2 or x.__class__ is Literal:
        return True
    virtual = {}
    v = x
    while v in makers and moves(makers[v]) and makers[v].invars[0].__class__ is not Literal:  # type: ignore[index]
        virtual[v] = makers[v]  # type: ignore[index]
        v = makers[v].invars[0]  # type: ignore[index]
    strides = view_strides(x, virtual)  # type: ignore[arg-type]
    if strides is None:  # it will be copied in its present layout
        strides = strides_of(x.aval.shape)
    return all(strides[a] == x.aval.shape[b] * strides[b] for a, b in pairwise(axes))


# -- reductions over long rows ----------------------------------------------------------------------


def split_column_reductions(jaxpr: Jaxpr, origins: Origins, lanes: int) -> Jaxpr:
    """Private operands for reductions over rows of more than ``lanes`` lanes.

    Args:
      origins: receives the new equations, each reduction's under an index of its own: fusion separates them from the
        original ones.
    """
    found = [e for e in jaxpr.eqns if _reduces_columns(e, lanes)]
    if not found:
        return jaxpr
    program = _Program(jaxpr)
    new: dict[Eqn, list[Eqn]] = {}
    for eqn in found:
        chain = program.chain_of(eqn)
        fresh: dict[Any, Var] = {x.outvars[0]: Var(x.outvars[0].aval) for x in chain}
        renamed = [[fresh.get(a, a) for a in x.invars] for x in (*chain, eqn)]
        copies = [x.with_vars(a, [fresh[x.outvars[0]]]) for x, a in zip(chain, renamed, strict=False)]
        origins.update(dict.fromkeys(copies, 1 + max(origins.values(), default=0)))
        new[eqn] = [*copies, eqn.with_invars(renamed[-1])]
    return jaxpr.replace(eqns=[made for e in jaxpr.eqns for made in new.get(e, [e])])


def _reduces_columns(eqn: Eqn, lanes: int) -> bool:
    """True if an equation reduces rows of more than ``lanes`` lanes, lane by lane."""
    role, most = _reduction_of(eqn)
    return role == "column" and most > lanes


def _reduction_of(eqn: Eqn) -> tuple[str, int]:
    """The role of a reduction's result, if it has one, and the lanes of its rows."""
    found = role_of(eqn, Frame(eqn.invars[0].aval.size)) if reduces(eqn.prim) else None
    return ("", 0) if found is None else (found[0], found[1].lanes or 0)


class _Program:
    """Makers and readers of the variables of a program."""

    def __init__(self, jaxpr: Jaxpr):
        self.makers: dict[Any, Eqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.position = {e: i for i, e in enumerate(jaxpr.eqns)}
        self.readers: dict[Any, list[Eqn]] = {}
        for e in jaxpr.eqns:
            for a in e.invars:
                if not isinstance(a, Literal):
                    self.readers.setdefault(a, []).append(e)
        for a in jaxpr.outvars:
            self.makers.pop(a, None)  # a result is in memory

    def chain_of(self, reduction: Eqn) -> list[Eqn]:
        """Equations, in order, from one shared array to the operands of reductions.

        None if they reduce across lanes, are expensive, or read several arrays.
        """
        operand = reduction.invars[0]
        roles = [_reduction_of(r)[0] for r in self.readers.get(operand, [])]
        if "row" not in roles or "" in roles:
            return []
        chain: set[Eqn] = set()
        sources = {operand}
        while True:
            more = [v for v in sources if self._is_inside(v, chain) or (v is operand and self._is_cheap(v))]
            if not more:
                break
            chain.update(self.makers[v] for v in more)
            sources = {a for e in chain for a in e.invars if self._is_array(a)}
            sources -= {e.outvars[0] for e in chain}
        return sorted(chain, key=self.position.__getitem__) if len(sources) == 1 else []

    def _is_inside(self, v: Atom, chain: set[Eqn]) -> bool:
        """True if only a chain reads a value that is cheap."""
        return self._is_cheap(v) and all(r in chain for r in self.readers[v])

    def _is_cheap(self, v: Atom) -> bool:
        maker = self.makers.get(v)
        return maker is not None and isinstance(maker.prim, Elementwise) and maker.prim.cost <= 1

    def _is_array(self, a: Atom) -> bool:
        """True if an operand is not a broadcast scalar."""
        while not isinstance(a, Literal) and a in self.makers and moves(self.makers[a]):
            a = self.makers[a].invars[0]
        return a.aval.size > 1
