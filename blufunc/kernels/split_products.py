"""Before stage 5, for devices with tensor cores: float32 products as sums of products of narrower parts.

Kernels, before ``activation_epilogue`` and ``rewrite``. In: a program whose products ask for a precision that is an
``Algorithm``. Out: one that computes them so, in equations like any other: conversions and subtractions make the parts,
in the kernel that computes an operand where there is one; products of parts, of which each adds to the sum of those
before it, from small ones to large; and what puts the result together, in the kernel that reads it. Operands that
several products read are split once.

The sums. Tensor cores round towards zero as they accumulate (Fasi, Higham, Mikaitis and Pranesh 2021), so that the error
of a long sum grows with its length; Ootomo and Yokota (2022) therefore add outside of them. Here, terms of the leading
product are taken in chunks that float32 additions join (``dot_promoted_p``). All other products are smaller by the bits
of a part, and so are their errors: their chunks are longer. They are a sum of their own: where an operand is infinite,
its remainder is NaN, and so is this sum, which then counts as zero.

The scales. A row that is to be split into float16 is multiplied by ``4^j``, so that its largest finite element is
between 2^13 and 2^15; a result's rows and columns are divided by these. With ``r = 2^-j`` of the row times that of the
column it is multiplied by r twice, so that nothing overflows or loses bits on the way to a result that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core import dtypes
from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import reduce
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.override import is_replaced
from blufunc.core.passes import Origins, put_in_place, rewrite, simplify
from blufunc.core.primitive import Primitive
from blufunc.core.stage import stage
from blufunc.core.structure import broadcast_in_dim, transpose
from blufunc.kernels.epilogue import dot_accumulate_p, dot_promoted_p
from blufunc.kernels.precisions import ACCURATE, ACCURATE_BY, ALGORITHMS, Algorithm, resolved

CHUNK = 512
"""How many terms of the leading product tensor cores add up: with these, results are as exact as by IEEE additions."""

_LONGER = 4
"""Chunks of the products behind it are 2^4 times as long for each order: those are smaller by 2^7 or more."""

Pays = Callable[[int, int, int, int], bool]
"""From batch, m, n and k to whether such a product is quicker by ``ACCURATE_BY`` than in IEEE arithmetic."""


def with_split_products(jaxpr: Jaxpr, origins: Origins, pays: Pays) -> Jaxpr:
    """The program with products in parts.

    Args:
      jaxpr: simplified.
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    split = {e: how for e in jaxpr.eqns if (how := _algorithm(e, pays)) is not None}
    if not split or is_replaced(dot_general_p, "impl"):
        return jaxpr
    return rewrite(jaxpr, _Splitter(split, origins).step, origins)


def _algorithm(eqn: Eqn, pays: Pays) -> Algorithm | None:
    """In what way an equation is to be computed in parts."""
    if eqn.prim is not dot_general_p or any(a.__class__ is Literal for a in eqn.invars):
        return None
    if any(a.aval.dtype != dtypes.float32 or not a.aval.size for a in (*eqn.invars, *eqn.outvars)):
        return None
    name = resolved(eqn.params["precision"])
    if name != ACCURATE:
        return ALGORITHMS.get(name)
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (a.aval for a in eqn.invars)
    b, k = (math.prod(lhs.shape[d] for d in axes) for axes in (batch, contract))
    return ALGORITHMS[ACCURATE_BY] if pays(b, lhs.size // (b * k), rhs.size // (b * k), k) else None


class _Side:
    """An operand in parts.

    Attributes:
      parts: from the largest to the smallest, with the batch axes first.
      roots: 2^-j of each row, in the shape of an operand without its contracted axes; None: it is not scaled.
      contract: the contracted axes of the parts.
    """

    def __init__(self, made: Sequence[Atom], algorithm: Algorithm, contract: tuple[int, ...]):
        self.parts = made[: algorithm.parts]
        self.roots = made[algorithm.parts] if algorithm.scaled else None
        self.contract = contract


class _Splitter:
    def __init__(self, split: dict[Eqn, Algorithm], origins: Origins):
        self.split, self.origins = split, origins
        self.sides: dict[Any, _Side] = {}  # what is split already

    def step(self, eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        """The equations in the place of one, for ``core.passes.rewrite``."""
        algorithm = self.split.get(eqn)
        if algorithm is None:
            return [eqn.with_invars(invars)]
        made: list[Eqn] = []
        numbers = zip(invars, *eqn.params["dimension_numbers"], strict=True)
        lhs, rhs = (self.side(x, contract, batch, algorithm, eqn, made) for x, contract, batch in numbers)
        nb = tuple(range(len(eqn.params["dimension_numbers"][1][0])))
        params = {
            "dimension_numbers": ((lhs.contract, rhs.contract), (nb, nb)),
            "precision": "high" if algorithm.dtype == dtypes.float32 else None,  # parts that TF32 holds exactly
            "preferred_element_type": dtypes.float32,
        }
        sums = [self.sum_of(orders, lhs, rhs, eqn, params, made) for orders in _orders(algorithm)]
        roots = [side.roots for side in (lhs, rhs) if side.roots is not None]
        rank = len(lhs.parts[0].aval.shape) - len(lhs.contract)
        (total,) = _placed(lambda *xs: [_joined(rank, len(nb), *xs)], [*sums, *roots], eqn, made)
        alias(eqn.outvars[0], total)
        return made

    def side(
        self, x: Atom, contract: tuple, batch: tuple, algorithm: Algorithm, eqn: Eqn, made: list[Eqn]
    ) -> _Side:
        """An operand in parts, whose equations are added to those made unless there are some of before."""
        order = (*batch, *(d for d in range(x.aval.ndim) if d not in batch))
        inner = tuple(order.index(d) for d in contract)
        key = (x, order, frozenset(inner) if algorithm.scaled else None, algorithm, self.origins.get(eqn))
        found = self.sides.get(key)
        if found is None:
            function = lambda v: _parts(transpose(v, order), inner, algorithm)
            found = self.sides[key] = _Side(_placed(function, [x], eqn, made), algorithm, inner)
        return _Side([*found.parts, found.roots], algorithm, inner)  # type: ignore[list-item]

    def sum_of(
        self, orders: Sequence[int], lhs: _Side, rhs: _Side, eqn: Eqn, params: dict, made: list[Eqn]
    ) -> Var:
        """The sum of the products of some orders, one after another."""
        aval = eqn.outvars[0].aval
        terms = math.prod(lhs.parts[0].aval.shape[d] for d in lhs.contract)
        total: list[Var] = []
        for order in orders:
            chunk = CHUNK << _LONGER * order
            for i in range(order + 1):
                prim: Primitive = dot_accumulate_p if total else dot_general_p
                given = params
                if terms > chunk:
                    prim, given = dot_promoted_p, {**params, "chunk": chunk}
                operands = [lhs.parts[i], rhs.parts[order - i], *total]
                total = [Var(aval)]
                made.append(Eqn(prim, operands, total, given, eqn.source))
        return total[0]


def _orders(algorithm: Algorithm) -> list[list[int]]:
    """The orders ``i + j`` of the products of parts that are one sum: the leading one, and from small to large the rest."""
    return [[0], list(range(algorithm.parts - 1, 0, -1))]


def _placed(function: Callable, invars: Sequence[Atom], eqn: Eqn, made: list[Eqn]) -> list[Atom]:
    """The results of a function of values, whose equations are added to those made."""
    body = simplify(stage(function, [a.aval for a in invars], eqn.prim.name))
    call = Eqn(eqn.prim, list(invars), [Var(a) for a in body.out_avals], {}, eqn.source)
    results: dict[Any, Atom] = {}
    made += put_in_place(call, body, invars, results.__setitem__)
    return [results[v] for v in call.outvars]


# -- what the equations are traced from --------------------------------------------------------------


def _parts(x: Any, contract: tuple[int, ...], algorithm: Algorithm) -> list[Any]:
    """The parts of an operand, and 2^-j of its rows where they are scaled."""
    roots = []
    if algorithm.scaled:
        root, scale = _scales(x, contract)
        roots.append(root)
        x = ew.mul(x, _spread(scale, x.aval.shape, contract))
    parts: list[Any] = []
    for n in range(algorithm.parts):
        leading = x if n or algorithm.scaled else _bounded(x, algorithm.largest)
        if algorithm.dtype == dtypes.float32:
            parts.append(ew.reduce_precision(leading, 8, algorithm.mantissa))
        else:
            parts.append(ew.convert(leading, algorithm.dtype))
        if n + 1 < algorithm.parts:
            x = ew.sub(x, ew.convert(parts[-1], dtypes.float32))
    return [*parts, *roots]


def _bounded(x: Any, largest: float) -> Any:
    """``x`` where it is infinite or NaN; else no farther from zero than a number, so that it is not rounded to infinity."""
    return ew.select(ew.is_finite(x), ew.clamp(-largest, x, largest), x)


def _scales(x: Any, contract: tuple[int, ...]) -> tuple[Any, Any]:
    """``2^-j`` and ``4^j`` for each row of an operand: what brings its largest element to between 2^13 and 2^15.

    Rows of zeros or of less than 2^-112 are multiplied by 2^126, which is the largest such power of float32.
    """
    top = reduce.reduce_max(ew.select(ew.is_finite(x), ew.abs(x), 0.0), contract)
    exponent = ew.binary(ew.shift_right_logical_p, ew.bitcast(top, dtypes.int32), 23)  # the number is below 2^(exponent - 126)
    j = ew.min(ew.binary(ew.shift_right_arithmetic_p, ew.sub(15 + 126, exponent), 1), 63)
    return _power(ew.neg(j)), _power(ew.add(j, j))


def _power(exponent: Any) -> Any:
    """2 to an int32 between -126 and 127, as float32."""
    return ew.bitcast(ew.binary(ew.shift_left_p, ew.add(exponent, 127), 23), dtypes.float32)


def _spread(rows: Any, shape: tuple[int, ...], contract: tuple[int, ...]) -> Any:
    """An array without the contracted axes, repeated along them."""
    return broadcast_in_dim(rows, shape, tuple(d for d in range(len(shape)) if d not in contract))


def _joined(rank: int, batch: int, high: Any, low: Any, *roots: Any) -> Any:
    """The result of the leading sum and of the rest, with the scales taken out.

    Args:
      rank: the axes of the result that are of the lhs: those of the batch, and its free ones.
      batch: the number of axes of the batch.
    """
    total = ew.add(high, ew.select(ew.ne(low, low), 0.0, low))
    if not roots:
        return total
    shape, both = total.aval.shape, tuple(range(batch))
    lhs = broadcast_in_dim(roots[0], shape, tuple(range(rank)))
    rhs = broadcast_in_dim(roots[1], shape, (*both, *range(rank, len(shape))))
    root = ew.mul(lhs, rhs)
    return ew.mul(ew.mul(total, root), root)
