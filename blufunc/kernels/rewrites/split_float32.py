"""Before stage 5, for devices with tensor cores: float32 products as sums of products of narrower parts.

Kernels, before ``pointwise_epilogue`` and ``rewrite``. In: a program whose products ask for a precision that is an
``Algorithm``, or is met by one that is quicker. Out: one that computes them so, in equations like any other:
conversions and subtractions make the parts, in the kernel that computes an operand where there is one; products of
parts, of which each adds to the sum of those before it, from small ones to large; and what puts the result together, in
the kernel that reads it. An operand that several products read one after another is split once. What is one part is
rounded.

The sums. Tensor cores round towards zero as they accumulate (Fasi, Higham, Mikaitis and Pranesh 2021), so that the
error of a long sum grows with its length; Ootomo and Yokota (2022) therefore add outside of them. Here, terms of the
leading product are taken in chunks that float32 additions join (``dot_promoted_p``). All other products are smaller by
the bits of a part, and so are their errors: their chunks are longer. They are a sum of their own: where an operand is
infinite, its remainder is NaN, and so is this sum, which then counts as zero.

The scales. A row that is to be split into float16 is multiplied by ``4^j``, so that its largest finite element is
between 2^13 and 2^15; a result's rows and columns are divided by these. With ``r = 2^-j`` of the row times that of the
column it is multiplied by r twice, so that nothing overflows or loses bits on the way to a result that does not. What
is left of such a row behind its first part is held times 2^11, and so is the sum of the products with it: an element
has all its bits, 11 of each part, down to 2^-27 of the largest of its row.

A row runs along the contracted axes, so forward and backward passes scale different ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import reduce
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.shape import slice_in_dim
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape, transpose, transpose_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite, simplify, without_lines
from blufunc.core.programs.stage import stage
from blufunc.kernels.gemm_layout import UNIT
from blufunc.kernels.ops import split_dot
from blufunc.kernels.ops.gemm import dot_accumulate_p, dot_promoted_p
from blufunc.kernels.ops.split_dot import split_dot_p
from blufunc.kernels.precision import ALGORITHMS, QUICKER_BY, Algorithm, ProductShape, resolved

_LONGER = 4
"""Chunks of the matmuls with a remainder are 2^4 times as long: those are smaller by 2^10 or more."""

NEAR = 8
"""For how many products the parts of an operand are kept, for one that reads it too. They are quick to compute again;
what is kept from a forward to a backward pass decides how much memory a step of training takes."""

Pays = Callable[[str, ProductShape], bool]
"""From an algorithm of ``QUICKER_BY`` and a shape to whether such a product is quicker by it than without."""


PartialSums = Callable[[ProductShape, int], int]
"""From a shape and the most terms of a chunk to how many sums of terms are to be computed side by side."""


InOneKernel = Callable[[ProductShape], int]
"""From a shape to how many sums of terms one kernel for all products of two parts makes; 0 if there is none."""


def with_split_products(
    jaxpr: Jaxpr,
    origins: Origins,
    pays: Pays,
    partial_sums: PartialSums = lambda shape, chunk: 1,
    in_one_kernel: InOneKernel = lambda shape: 0,
) -> Jaxpr:
    """The program with products in parts.

    Args:
      jaxpr: simplified.
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    asked = {e: name for e in jaxpr.eqns if (name := _precision(e)) in ALGORITHMS or name in QUICKER_BY}
    if not asked or is_replaced(dot_general_p, "impl"):
        return jaxpr
    return rewrite(jaxpr, _Splitter(asked, origins, pays, partial_sums, in_one_kernel).step, origins)


def _precision(eqn: Eqn) -> str | None:
    """What a product of float32 asks for."""
    if eqn.prim is not dot_general_p or any(a.__class__ is Literal for a in eqn.invars):
        return None
    if any(a.aval.dtype != dtypes.float32 or not a.aval.size for a in (*eqn.invars, *eqn.outvars)):
        return None
    return resolved(eqn.params["precision"])


class _Operand(NamedTuple):
    """An operand, or what it is a transpose of, with its contracted axes and those of the batch."""

    x: Atom
    contract: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All axes, those of the batch first: so libraries want them, and parts are written anyway."""
        return (*self.batch, *(d for d in range(self.x.aval.ndim) if d not in self.batch))

    @property
    def contracted(self) -> tuple[int, ...]:
        """The contracted axes in that order."""
        return tuple(map(self.order.index, self.contract))

    @property
    def by_rows(self) -> bool:
        """Whether the contracted axes are the last ones."""
        return all(d >= self.x.aval.ndim - len(self.contract) for d in self.contract)


def _shape(lhs: _Operand, rhs: _Operand) -> ProductShape:
    batch, k = (math.prod(lhs.x.aval.shape[d] for d in axes) for axes in (lhs.batch, lhs.contract))
    m, n = (side.x.aval.size // (batch * k) for side in (lhs, rhs))
    return ProductShape(batch, m, n, k, (lhs.by_rows, rhs.by_rows))


class _Parts(NamedTuple):
    """An operand in parts, all with the batch axes first.

    Attributes:
      parts: from the largest to the smallest.
      roots: 2^-j of each row, in the shape of an operand without the axes of a row.
    """

    parts: list[Atom]
    root: Atom


class _Factors(NamedTuple):
    """Parts of both operands, from the largest to the smallest, and the dimension numbers of their products."""

    lhs: Sequence[Atom]
    rhs: Sequence[Atom]
    numbers: Any


class _Splitter:
    def __init__(
        self,
        asked: dict[Eqn, str],
        origins: Origins,
        pays: Pays,
        partial_sums: PartialSums,
        in_one_kernel: InOneKernel,
    ):
        self.asked, self.origins, self.pays = asked, origins, pays
        self.partial_sums, self.in_one_kernel = partial_sums, in_one_kernel
        self.bodies: dict[Any, Jaxpr] = {}
        self.known: dict[Any, tuple[Any, int]] = {}  # parts or magnitudes; the index of their last matmul
        self.count = 0
        self.makers: dict[Any, Eqn] = {}

    def step(self, eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        """The equations in the place of one, for ``core.passes.rewrite``."""
        if eqn in self.asked:
            operands = zip(invars, *eqn.params["dimension_numbers"], strict=True)
            lhs, rhs = itertools.starmap(self.untransposed, operands)
            algorithm = self.algorithm(self.asked[eqn], _shape(lhs, rhs))
            if algorithm is not None:
                made: list[Eqn] = []
                alias(eqn.outvars[0], self.product(eqn, lhs, rhs, algorithm, made))
                return made
        eqn = eqn.with_invars(invars)
        self.makers.update((v, eqn) for v in eqn.outvars)
        return [eqn]

    def algorithm(self, precision: str, shape: ProductShape) -> Algorithm | None:
        """In what way a product is to be computed in parts, if it is."""
        name = QUICKER_BY.get(precision, precision)
        return ALGORITHMS[name] if name == precision or self.pays(name, shape) else None

    def product(self, eqn: Eqn, lhs: _Operand, rhs: _Operand, algorithm: Algorithm, made: list[Eqn]) -> Atom:
        """What stands for the result of a product; the equations that compute it are added to those made."""
        self.count += 1
        n = len(lhs.batch)
        numbers = ((lhs.contracted, rhs.contracted), (tuple(range(n)),) * 2)
        sides = [self.parts(side, algorithm, eqn, made) for side in (lhs, rhs)]
        if algorithm is split_dot.ALGORITHM and (sums := self.sums_in_one_kernel(lhs, rhs)):
            return self.whole(eqn, sides, {"dimension_numbers": numbers, "sums": sums}, made)
        factors = [_Factors(sides[0].parts, sides[1].parts, numbers)]
        if algorithm.chunk is not None:
            count = self.partial_sums(_shape(lhs, rhs), algorithm.chunk)
            factors = self.divided(factors[0], count, eqn, made)
        sums = [_sum(eqn, order, algorithm, f, made) for order in range(algorithm.parts) for f in factors]
        how = (algorithm, lhs.x.aval.ndim - len(lhs.contract), n, eqn.outvars[0].aval.ndim, len(factors))
        (total,) = self.placed(_joined, how, [*sums, sides[0].root, sides[1].root], eqn, made)
        return total

    def sums_in_one_kernel(self, lhs: _Operand, rhs: _Operand) -> int:
        """How many sums of terms one kernel makes of the product; 0 if there is none."""
        pairs = sorted(zip(lhs.contracted, rhs.contracted, strict=True))
        if not pairs:
            return 0
        sides = zip((lhs, rhs), zip(*pairs, strict=True), strict=True)
        matrices = all(split_dot.is_matrix(axes, side.x.aval.ndim) for side, axes in sides)
        return self.in_one_kernel(_shape(lhs, rhs)) if matrices else 0

    def whole(self, eqn: Eqn, sides: Sequence[_Parts], how: dict[str, Any], made: list[Eqn]) -> Atom:
        """The same by one kernel."""
        lhs, rhs = sides
        operands = [*lhs.parts, *rhs.parts, lhs.root, rhs.root]
        result = Var(split_dot_p.abstract(*[a.aval for a in operands], **how))
        made.append(Eqn(split_dot_p, operands, [result], how, eqn.source))
        rank = eqn.outvars[0].aval.ndim
        return self.placed(_summed, (rank,), [result], eqn, made)[0] if how["sums"] > 1 else result

    def untransposed(self, x: Atom, contract: tuple[int, ...], batch: tuple[int, ...]) -> _Operand:
        """What an operand is a transpose of, if its free axes come in the same order there, with the axes of that.

        Then the parts are written as it lies in memory, and others that read it may have them.
        """
        eqn = self.makers.get(x)
        if eqn is None or eqn.prim is not transpose_p or is_replaced(transpose_p, "impl"):
            return _Operand(x, contract, batch)
        if eqn.invars[0].__class__ is Literal:
            return _Operand(x, contract, batch)
        axes = eqn.params["permutation"]
        free = [axes[d] for d in range(x.aval.ndim) if d not in (*contract, *batch)]
        if free != sorted(free):
            return _Operand(x, contract, batch)
        to = lambda own: tuple(axes[d] for d in own)
        return self.untransposed(eqn.invars[0], to(contract), to(batch))

    def parts(self, side: _Operand, algorithm: Algorithm, eqn: Eqn, made: list[Eqn]) -> _Parts:
        """An operand in parts, scaled along its contracted axes; the equations that compute them are added to those
        made, unless a near product has them.
        """
        along, origin = side.contracted, self.origins.get(eqn)

        def split() -> _Parts:
            # a matmul along rows and one along columns, as of a gradient, share the magnitudes
            magnitudes = self.shared(
                (side.x, origin), lambda: self.placed(_magnitudes, (), [side.x], eqn, made)
            )
            how = (side.order, along, algorithm)
            *parts, root = self.placed(_ordered_parts, how, [side.x, *magnitudes], eqn, made)
            return _Parts(parts, root)

        return self.shared((side.x, side.order, frozenset(along), algorithm, origin), split)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of a near matmul under this key, or a new one."""
        found, last = self.known.get(key, (None, 0))
        if found is None or self.count - last > NEAR:
            found = make()
        self.known[key] = found, self.count
        return found

    def divided(self, factors: _Factors, count: int, eqn: Eqn, made: list[Eqn]) -> list[_Factors]:
        """Factors of so many sums of as many terms each, as a batch, and those of the terms that are left, if any are.

        Those without a batch whose contracted axes are neighbours: then they may be one axis, and what is made of that
        has strides. Others stay as they are.
        """
        contracts, (batch, _) = factors.numbers
        contracts = list(zip(*sorted(zip(*contracts, strict=True)), strict=True))
        size = _terms(factors) // max(count, 1) // UNIT * UNIT
        adjacent = all(axes == tuple(range(axes[0], axes[0] + len(axes))) for axes in contracts)
        if count < 2 or not size or batch or not adjacent:
            return [factors]
        cut = [
            [self.placed(_cut, (axes, count, size), [part], eqn, made) for part in parts]
            for parts, axes in zip((factors.lhs, factors.rhs), contracts, strict=True)
        ]
        lhs, rhs = (axes[0] for axes in contracts)
        numbers = [(((lhs + 1,), (rhs + 1,)), ((lhs,), (rhs,))), (((lhs,), (rhs,)), ((), ()))]
        pieces = [list(zip(*parts, strict=True)) for parts in cut]
        return [_Factors(*parts) for parts in zip(*pieces, numbers, strict=False)]  # there may be no rest

    def placed(
        self, function: Callable, how: tuple, invars: Sequence[Atom], eqn: Eqn, made: list[Eqn]
    ) -> list[Atom]:
        """The results of ``function(*how, *invars)``, whose equations are added to those made; it is traced once."""
        key = function, how, *[a.aval for a in invars]
        body = self.bodies.get(key)
        if body is None:
            traced = stage(functools.partial(function, *how), [a.aval for a in invars], eqn.prim.name)
            body = self.bodies[key] = without_lines(simplify(traced))
        call = Eqn(eqn.prim, list(invars), [Var(a) for a in body.out_avals], {}, eqn.source)
        results: dict[Any, Atom] = {}
        made += put_in_place(call, body, invars, results.__setitem__)
        return [results[v] for v in call.outvars]


def _terms(factors: _Factors) -> int:
    return math.prod(factors.lhs[0].aval.shape[d] for d in factors.numbers[0][0])


def _sum(eqn: Eqn, order: int, algorithm: Algorithm, factors: _Factors, made: list[Eqn]) -> Var:
    """The sum of the matmuls ``xi yj`` with ``i + j == order``, one after another."""
    params = {
        "dimension_numbers": factors.numbers,
        "precision": None,
        "preferred_element_type": dtypes.float32,
    }
    terms = _terms(factors)
    total: list[Var] = []
    chunk = terms if algorithm.chunk is None else algorithm.chunk << _LONGER * order
    for i in range(order + 1):
        prim: Primitive = dot_accumulate_p if total else dot_general_p
        given = params
        if terms > chunk:
            prim, given = dot_promoted_p, {**params, "chunk": chunk}
        operands = [factors.lhs[i], factors.rhs[order - i], *total]
        total = [Var(prim.abstract(*[a.aval for a in operands], **given))]
        made.append(Eqn(prim, operands, total, given, eqn.source))
    return total[0]


# -- what the equations are traced from --------------------------------------------------------------


def _ordered_parts(
    order: tuple[int, ...], contract: tuple[int, ...], algorithm: Algorithm, x: Any, magnitudes: Any
) -> list[Any]:
    return parts_of(transpose(x, order), contract, algorithm, transpose(magnitudes, order))


def parts_of(x: Any, contract: tuple[int, ...], algorithm: Algorithm, magnitudes: Any = None) -> list[Any]:
    """The parts of an operand, and 2^-j of its rows."""
    root, scale = _scales(_magnitudes(x)[0] if magnitudes is None else magnitudes, contract)
    x = ew.mul(x, _spread(scale, x.aval.shape, contract))
    parts = [ew.convert(x, dtypes.float16)]
    if algorithm.parts == 2:
        rest = ew.sub(x, ew.convert(parts[0], dtypes.float32))
        parts.append(ew.convert(ew.mul(rest, 2.0**algorithm.raised), dtypes.float16))
    return [*parts, root]


def _cut(axes: tuple[int, ...], count: int, size: int, x: Any) -> list[Any]:
    """An array with neighbouring axes as one, of which so many pieces of one size are along an axis before it; and of
    that axis the rest, if there is one.
    """
    at, shape = axes[0], x.aval.shape
    before, behind = shape[:at], shape[axes[-1] + 1 :]
    terms, whole = math.prod(shape[d] for d in axes), count * size
    x = reshape(x, (*before, terms, *behind))
    pieces = [reshape(slice_in_dim(x, 0, whole, axis=at), (*before, count, size, *behind))]
    return pieces + [slice_in_dim(x, whole, terms, axis=at)] * (whole < terms)


def _magnitudes(x: Any) -> list[Any]:
    """Absolute values; 0 for infinities and NaNs."""
    return [ew.select(ew.is_finite(x), ew.abs(x), 0.0)]


def _scales(magnitudes: Any, contract: tuple[int, ...]) -> tuple[Any, Any]:
    """``2^-j`` and ``4^j`` for each row of an operand: what brings its largest element to between 2^13 and 2^15.

    Rows of zeros or of less than 2^-112 are multiplied by 2^126, which is the largest such power of float32.
    """
    top = reduce.reduce_max(magnitudes, contract)
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


def _total(sums: Sequence[Any], rank: int) -> Any:
    """The sum of arrays of a rank, some of them along an axis before the others, one after another."""
    rows = [row for x in sums for row in ([x] if x.aval.ndim == rank else _rows(x))]
    return functools.reduce(ew.add, rows)


def _summed(rank: int, x: Any) -> list[Any]:
    return [_total([x], rank)]


def _rows(x: Any) -> list[Any]:
    n, *shape = x.aval.shape
    return [reshape(slice_in_dim(x, i, i + 1), tuple(shape)) for i in range(n)]


def _joined(
    algorithm: Algorithm, before_rhs: int, batch: int, rank: int, each: int, *given: Any
) -> list[Any]:
    """The result of the leading sum and of the rest, with the scales taken out.

    Args:
      before_rhs: the number of axes of the result that are of the lhs: those of the batch, and its free ones.
      batch: the number of axes of the batch.
      rank: the number of axes of the result.
      each: how many arrays a sum is in.
      given: the arrays of the leading sum and, with two parts, of that of the rest; then the roots.
    """
    *sums, left, right = given
    total, *rest = (_total(sums[i : i + each], rank) for i in range(0, len(sums), each))
    for low in rest:
        low = ew.mul(ew.select(ew.ne(low, low), 0.0, low), 2.0**-algorithm.raised)
        total = ew.add(total, low)
    shape = total.aval.shape
    lhs = broadcast_in_dim(left, shape, tuple(range(before_rhs)))
    rhs = broadcast_in_dim(right, shape, (*range(batch), *range(before_rhs, len(shape))))
    root = ew.mul(lhs, rhs)
    return [
        ew.mul(ew.mul(total, root), root)
    ]  # in two steps, neither of which overflows if the result does not
