"""Before stage 5, for devices with tensor cores: float32 products as sums of products of narrower parts.

Kernels, before ``activation_epilogue`` and ``rewrite``. In: a program whose products ask for a precision that is an
``Algorithm``. Out: one that computes them so, in equations like any other: conversions and subtractions make the parts,
in the kernel that computes an operand where there is one; products of parts, of which each adds to the sum of those
before it, from small ones to large; and what puts the result together, in the kernel that reads it. An operand that
several products read one after another is split once.

The sums. Tensor cores round towards zero as they accumulate (Fasi, Higham, Mikaitis and Pranesh 2021), so that the
error of a long sum grows with its length; Ootomo and Yokota (2022) therefore add outside of them. Here, terms of the
leading product are taken in chunks that float32 additions join (``dot_promoted_p``). All other products are smaller by
the bits of a part, and so are their errors: their chunks are longer. They are a sum of their own: where an operand is
infinite, its remainder is NaN, and so is this sum, which then counts as zero.

The scales. A row that is to be split into float16 is multiplied by ``4^j``, so that its largest finite element is
between 2^13 and 2^15; a result's rows and columns are divided by these. With ``r = 2^-j`` of the row times that of the
column it is multiplied by r twice, so that nothing overflows or loses bits on the way to a result that does not. What
is left of such a row behind its first part is held times 2^11, and so is the sum of the products with it: an element
has all its bits down to 2^-28 of the largest of its row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from blufunc.core import dtypes
from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import reduce
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.override import is_replaced
from blufunc.core.passes import Origins, put_in_place, rewrite, simplify
from blufunc.core.primitive import Primitive
from blufunc.core.stage import stage
from blufunc.core.structure import broadcast_in_dim, transpose, transpose_p
from blufunc.kernels.epilogue import dot_accumulate_p, dot_promoted_p
from blufunc.kernels.precisions import ACCURATE, ACCURATE_BY, ALGORITHMS, Algorithm, resolved

_LONGER = 4
"""Chunks of the products behind it are 2^4 times as long for each order: those are smaller by 2^7 or more."""

NEAR = 8
"""For how many products the parts of an operand are kept, for one that reads it too. They are quick to compute again;
what is kept from a forward to a backward pass decides how much memory a step of training takes."""

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


class _Parts(NamedTuple):
    """An operand in parts, all with the batch axes first.

    Attributes:
      parts: from the largest to the smallest.
      roots: 2^-j of each row, in the shape of an operand without its contracted axes; none where it is not scaled.
    """

    parts: list[Atom]
    roots: list[Atom]


class _Splitter:
    def __init__(self, split: dict[Eqn, Algorithm], origins: Origins):
        self.split, self.origins = split, origins
        self.known: dict[Any, tuple[_Parts, int]] = {}  # what is in parts, and the number of its last product
        self.count = 0
        self.makers: dict[Any, Eqn] = {}

    def step(self, eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        """The equations in the place of one, for ``core.passes.rewrite``."""
        algorithm = self.split.get(eqn)
        if algorithm is None:
            eqn = eqn.with_invars(invars)
            self.makers.update((v, eqn) for v in eqn.outvars)
            return [eqn]
        self.count += 1
        made: list[Eqn] = []
        operands = zip(invars, *eqn.params["dimension_numbers"], strict=True)
        invars, contracts, batches = zip(*itertools.starmap(self.untransposed, operands), strict=True)
        orders = [_batch_first(x.aval.ndim, batch) for x, batch in zip(invars, batches, strict=True)]
        contracts = [
            tuple(order.index(d) for d in contract) for order, contract in zip(orders, contracts, strict=True)
        ]
        sides = [
            self.parts(*side, algorithm, eqn, made) for side in zip(invars, orders, contracts, strict=True)
        ]
        n = len(batches[0])
        numbers = (tuple(contracts), (tuple(range(n)),) * 2)
        leading = _sum(eqn, [0], algorithm, sides, numbers, made)
        rest = _sum(eqn, range(algorithm.parts - 1, 0, -1), algorithm, sides, numbers, made)
        before_rhs = invars[0].aval.ndim - len(contracts[0])
        roots = [*sides[0].roots, *sides[1].roots]
        function = lambda *xs: [_joined(algorithm, before_rhs, n, *xs)]
        (total,) = _placed(function, [leading, rest, *roots], eqn, made)
        alias(eqn.outvars[0], total)
        return made

    def untransposed(
        self, x: Atom, contract: tuple[int, ...], batch: tuple[int, ...]
    ) -> tuple[Atom, tuple[int, ...], tuple[int, ...]]:
        """What an operand is a transpose of, if its free axes come in the same order there, with the axes of that.

        Then the parts are written as it lies in memory, and others that read it may have them.
        """
        eqn = self.makers.get(x)
        if eqn is None or eqn.prim is not transpose_p or eqn.invars[0].__class__ is Literal:
            return x, contract, batch
        axes = eqn.params["permutation"]
        free = [axes[d] for d in range(x.aval.ndim) if d not in (*contract, *batch)]
        if free != sorted(free):
            return x, contract, batch
        to = lambda own: tuple(axes[d] for d in own)
        return self.untransposed(eqn.invars[0], to(contract), to(batch))

    def parts(
        self,
        x: Atom,
        order: tuple[int, ...],
        contract: tuple[int, ...],
        algorithm: Algorithm,
        eqn: Eqn,
        made: list[Eqn],
    ) -> _Parts:
        """An operand in parts; what computes them is added to the equations made, unless a near product has them."""
        scaled_along = frozenset(contract) if algorithm.scaled else None
        key = (x, order, scaled_along, algorithm, self.origins.get(eqn))
        found, last = self.known.get(key, (None, 0))
        if found is None or self.count - last > NEAR:
            function = lambda v: _parts(transpose(v, order), contract, algorithm)
            placed = _placed(function, [x], eqn, made)
            found = _Parts(placed[: algorithm.parts], placed[algorithm.parts :])
        self.known[key] = found, self.count
        return found


def _batch_first(ndim: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """All axes, those of the batch first: so libraries want them, and parts are written anyway."""
    return (*batch, *(d for d in range(ndim) if d not in batch))


def _sum(
    eqn: Eqn,
    orders: Iterable[int],
    algorithm: Algorithm,
    sides: Sequence[_Parts],
    numbers: tuple,
    made: list[Eqn],
) -> Var:
    """The sum of the products ``xi yj`` where ``i + j`` is one of some orders, one after another."""
    params = {
        "dimension_numbers": numbers,
        "precision": "high" if algorithm.dtype == dtypes.float32 else None,  # TF32, which holds parts exactly
        "preferred_element_type": dtypes.float32,
    }
    lhs, rhs = sides
    terms = math.prod(lhs.parts[0].aval.shape[d] for d in numbers[0][0])
    total: list[Var] = []
    for order in orders:
        chunk = algorithm.chunk << _LONGER * order
        for i in range(order + 1):
            prim: Primitive = dot_accumulate_p if total else dot_general_p
            given = params
            if terms > chunk:
                prim, given = dot_promoted_p, {**params, "chunk": chunk}
            operands = [lhs.parts[i], rhs.parts[order - i], *total]
            total = [Var(eqn.outvars[0].aval)]
            made.append(Eqn(prim, operands, total, given, eqn.source))
    return total[0]


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
            x = ew.mul(ew.sub(x, ew.convert(parts[-1], dtypes.float32)), 2.0**algorithm.raised)
    return [*parts, *roots]


def _bounded(x: Any, largest: float) -> Any:
    """``x``, but what is finite no farther from zero than a number, so that it is not rounded to infinity."""
    return ew.select(ew.is_finite(x), ew.clamp(-largest, x, largest), x)


def _scales(x: Any, contract: tuple[int, ...]) -> tuple[Any, Any]:
    """``2^-j`` and ``4^j`` for each row of an operand: what brings its largest element to between 2^13 and 2^15.

    Rows of zeros or of less than 2^-112 are multiplied by 2^126, which is the largest such power of float32.
    """
    top = reduce.reduce_max(ew.select(ew.is_finite(x), ew.abs(x), 0.0), contract)
    exponent = ew.binary(
        ew.shift_right_logical_p, ew.bitcast(top, dtypes.int32), 23
    )  # the number is below 2^(exponent - 126)
    j = ew.min(ew.binary(ew.shift_right_arithmetic_p, ew.sub(15 + 126, exponent), 1), 63)
    return power_of_two(ew.neg(j)), power_of_two(ew.add(j, j))


def power_of_two(exponent: Any) -> Any:
    """2 to an int32 between -126 and 127, as float32."""
    return ew.bitcast(ew.binary(ew.shift_left_p, ew.add(exponent, 127), 23), dtypes.float32)


def _spread(rows: Any, shape: tuple[int, ...], contract: tuple[int, ...]) -> Any:
    """An array without the contracted axes, repeated along them."""
    return broadcast_in_dim(rows, shape, tuple(d for d in range(len(shape)) if d not in contract))


def _joined(algorithm: Algorithm, before_rhs: int, batch: int, high: Any, low: Any, *roots: Any) -> Any:
    """The result of the leading sum and of the rest, with the scales taken out.

    Args:
      before_rhs: the number of axes of the result that are of the lhs: those of the batch, and its free ones.
      batch: the number of axes of the batch.
      high, low: the sums.
      roots: of both operands, where they are scaled.
    """
    low = ew.mul(ew.select(ew.ne(low, low), 0.0, low), 2.0**-algorithm.raised)
    total = ew.add(high, low)
    if not roots:
        return total
    shape = total.aval.shape
    lhs = broadcast_in_dim(roots[0], shape, tuple(range(before_rhs)))
    rhs = broadcast_in_dim(roots[1], shape, (*range(batch), *range(before_rhs, len(shape))))
    root = ew.mul(lhs, rhs)
    return ew.mul(ew.mul(total, root), root)
