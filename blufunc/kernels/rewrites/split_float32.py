"""Float32 matmuls as sums of float16 matmuls, for devices with tensor cores.

Kernels, before ``pointwise_epilogue`` and ``rewrite``. In: a program whose matmuls request a precision that is an
``Algorithm``, or that a faster one satisfies. Out: an equivalent one. Conversions and subtractions compute the parts,
in the kernel that computes an operand if there is one. Matmuls of parts each add to the sum of the previous ones, from
small to large. The kernel that reads the result combines the sums. Matmuls that soon follow share the parts of an
operand. An algorithm of one part only rounds.

Sums. Tensor cores truncate as they accumulate (Fasi, Higham, Mikaitis and Pranesh 2021), so the error grows with the
length of a sum; Ootomo and Yokota (2022) therefore accumulate outside of them. Here, the terms of the leading matmul
are taken in chunks that float32 additions join (``dot_promoted_p``). The other matmuls, and their errors, are smaller
by the bits of a part, so their chunks are longer. They form a sum of their own: the remainder of an infinite element is
NaN, and so is this sum, which then counts as zero.

Scales. A row that is split into float16 is multiplied by ``4^j``, so that its largest finite element is between 2^13
and 2^15; the rows and columns of the result are divided by it. The result is multiplied twice by ``r``, the product of
the ``2^-j`` of its row and column, so no intermediate overflows or loses bits unless the result does. The remainder
after the first part is scaled by 2^11, and so is the sum of its matmuls: an element keeps all its bits, 11 in each
part, down to 2^-27 of the largest of its row. A row runs along the contracted axes, so forward and backward passes
scale different ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
"""Binary logarithm of the ratio of chunk lengths: remainders are smaller by 2^10."""

NEAR = 8
"""Matmuls after which the parts of an operand are recomputed for the next reader.

They are cheap; parts that are saved for the backward pass would set the memory of a training step.
"""


def with_split_products(
    jaxpr: Jaxpr,
    origins: Origins,
    pays: Callable[[str, ProductShape], bool],
    partial_sums: Callable[[ProductShape, int], int] = lambda shape, chunk: 1,
    in_one_kernel: Callable[[ProductShape], int] = lambda shape: 0,
) -> Jaxpr:
    """Split float32 matmuls into matmuls of parts.

    ``pays``, ``partial_sums`` and ``in_one_kernel`` are ``splits`` and the others of ``Target``.
    """
    asked = {e: name for e in jaxpr.eqns if (name := _precision(e)) in ALGORITHMS or name in QUICKER_BY}
    if not asked or is_replaced(dot_general_p, "impl"):
        return jaxpr
    return rewrite(jaxpr, _Splitter(asked, origins, pays, partial_sums, in_one_kernel).step, origins)


def _precision(eqn: Eqn) -> str | None:
    """The precision that a float32 matmul requests; None for other equations."""
    if eqn.prim is not dot_general_p or any(a.__class__ is Literal for a in eqn.invars):
        return None
    if any(a.aval.dtype != dtypes.float32 or not a.aval.size for a in (*eqn.invars, *eqn.outvars)):
        return None
    return resolved(eqn.params["precision"])


class _Operand(NamedTuple):
    """An operand of a matmul without its transpose, with contracted and batch axes."""

    x: Atom
    contract: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All axes, batch axes first, as libraries need them; the parts are copies anyway."""
        return (*self.batch, *(d for d in range(self.x.aval.ndim) if d not in self.batch))

    @property
    def contracted(self) -> tuple[int, ...]:
        """The contracted axes in ``order``."""
        return tuple(map(self.order.index, self.contract))

    @property
    def by_rows(self) -> bool:
        """True if the contracted axes are the last ones."""
        return all(d >= self.x.aval.ndim - len(self.contract) for d in self.contract)


def _shape(lhs: _Operand, rhs: _Operand) -> ProductShape:
    batch, k = (math.prod(lhs.x.aval.shape[d] for d in axes) for axes in (lhs.batch, lhs.contract))
    m, n = (side.x.aval.size // (batch * k) for side in (lhs, rhs))
    return ProductShape(batch, m, n, k, (lhs.by_rows, rhs.by_rows))


class _Parts(NamedTuple):
    """An operand in parts, with the batch axes first.

    Attributes:
      parts: from the largest to the smallest.
      root: 2^-j of each row, in the shape of an operand without the axes of a row.
    """

    parts: list[Atom]
    root: Atom


class _Factors(NamedTuple):
    """Parts of both operands, and the dimension numbers of their matmuls."""

    lhs: Sequence[Atom]
    rhs: Sequence[Atom]
    numbers: Any


@dataclass
class _Splitter:
    asked: dict[Eqn, str]
    origins: Origins
    pays: Callable[[str, ProductShape], bool]
    partial_sums: Callable[[ProductShape, int], int]
    in_one_kernel: Callable[[ProductShape], int]
    bodies: dict[Any, Jaxpr] = field(default_factory=dict)
    known: dict[Any, tuple[Any, int]] = field(default_factory=dict)  # parts, magnitudes; their last matmul
    makers: dict[Any, Eqn] = field(default_factory=dict)
    count: int = 0

    def step(self, eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        """The equations that replace one, for ``rewrite``."""
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
        """The algorithm of a matmul, if it is to be split."""
        name = QUICKER_BY.get(precision, precision)
        return ALGORITHMS[name] if name == precision or self.pays(name, shape) else None

    def product(self, eqn: Eqn, lhs: _Operand, rhs: _Operand, algorithm: Algorithm, made: list[Eqn]) -> Atom:
        """The result of a matmul; its equations are added to ``made``."""
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
        """Partial sums of the kernel for all parts of a matmul; 0 if there is none."""
        pairs = sorted(zip(lhs.contracted, rhs.contracted, strict=True))
        if not pairs:
            return 0
        sides = zip((lhs, rhs), zip(*pairs, strict=True), strict=True)
        matrices = all(split_dot.is_matrix(axes, side.x.aval.ndim) for side, axes in sides)
        return self.in_one_kernel(_shape(lhs, rhs)) if matrices else 0

    def whole(self, eqn: Eqn, sides: Sequence[_Parts], how: dict[str, Any], made: list[Eqn]) -> Atom:
        """The result of a matmul by one kernel for all parts."""
        lhs, rhs = sides
        operands = [*lhs.parts, *rhs.parts, lhs.root, rhs.root]
        result = Var(split_dot_p.abstract(*[a.aval for a in operands], **how))
        made.append(Eqn(split_dot_p, operands, [result], how, eqn.source))
        rank = eqn.outvars[0].aval.ndim
        return self.placed(_summed, (rank,), [result], eqn, made)[0] if how["sums"] > 1 else result

    def untransposed(self, x: Atom, contract: tuple[int, ...], batch: tuple[int, ...]) -> _Operand:
        """An operand without its transpose, if that keeps the order of the free axes.

        Then the parts are written in the order of memory, and other readers of the operand may share them.
        """
        eqn = self.makers.get(x)
        operand = _Operand(x, contract, batch)
        if eqn is None or eqn.prim is not transpose_p or is_replaced(transpose_p, "impl"):
            return operand
        if eqn.invars[0].__class__ is Literal:
            return operand
        axes = eqn.params["permutation"]
        free = [axes[d] for d in range(x.aval.ndim) if d not in (*contract, *batch)]
        if free != sorted(free):
            return operand
        to = lambda own: tuple(axes[d] for d in own)
        return self.untransposed(eqn.invars[0], to(contract), to(batch))

    def parts(self, side: _Operand, algorithm: Algorithm, eqn: Eqn, made: list[Eqn]) -> _Parts:
        """An operand in parts, those of a recent matmul if there are any."""
        along, origin = side.contracted, self.origins.get(eqn)

        def split() -> _Parts:
            # a matmul along rows and one along columns, as of a gradient, share the magnitudes
            find = lambda: self.placed(_magnitudes, (side.order,), [side.x], eqn, made)
            how = (side.order, along, algorithm)
            operands = [side.x, *self.recent((side.x, side.order, origin), find)]
            *parts, root = self.placed(_ordered_parts, how, operands, eqn, made)
            return _Parts(parts, root)

        return self.recent((side.x, side.order, frozenset(along), algorithm, origin), split)

    def recent(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value that a recent matmul used under a key, or a new one."""
        found, last = self.known.get(key, (None, 0))
        if found is None or self.count - last > NEAR:
            found = make()
        self.known[key] = found, self.count
        return found

    def divided(self, factors: _Factors, count: int, eqn: Eqn, made: list[Eqn]) -> list[_Factors]:
        """Factors of ``count`` partial sums, as a batch, and those of the remaining terms.

        Only for matmuls without a batch whose contracted axes are adjacent, so that parts are strided views.
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
        """The results of ``function(*how, *invars)``, which is traced once."""
        key = function, how, *[a.aval for a in invars]
        if key not in self.bodies:
            traced = stage(functools.partial(function, *how), [a.aval for a in invars], eqn.prim.name)
            self.bodies[key] = without_lines(simplify(traced))
        eqns, results = inlined(eqn, self.bodies[key], invars)
        made += eqns
        return results


def inlined(eqn: Eqn, body: Jaxpr, invars: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Equations and results of a body on operands, in place of an equation."""
    call = Eqn(eqn.prim, list(invars), [Var(a) for a in body.out_avals], {}, eqn.source)
    results: dict[Any, Atom] = {}
    eqns = put_in_place(call, body, invars, results.__setitem__)
    return eqns, [results[v] for v in call.outvars]


def _terms(factors: _Factors) -> int:
    return math.prod(factors.lhs[0].aval.shape[d] for d in factors.numbers[0][0])


def _sum(eqn: Eqn, order: int, algorithm: Algorithm, factors: _Factors, made: list[Eqn]) -> Var:
    """The sum of the matmuls ``xi yj`` with ``i + j == order``."""
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


# -- traced functions --------------------------------------------------------------------------------


def _ordered_parts(
    order: tuple[int, ...], contract: tuple[int, ...], algorithm: Algorithm, x: Any, magnitudes: Any
) -> list[Any]:
    return parts_of(transpose(x, order), contract, algorithm, magnitudes)


def parts_of(x: Any, contract: tuple[int, ...], algorithm: Algorithm, magnitudes: Any = None) -> list[Any]:
    """The parts of an operand, and 2^-j of its rows."""
    root, scale = _scales(finite_magnitudes(x) if magnitudes is None else magnitudes, contract)
    rows = tuple(d for d in range(x.aval.ndim) if d not in contract)
    x = ew.mul(x, broadcast_in_dim(scale, x.aval.shape, rows))
    return [*float16_parts(x, algorithm.parts, algorithm.raised), root]


def float16_parts(x: Any, parts: int, raised: int = 0) -> list[Any]:
    """One or two parts of an array in the range of float16, the second times 2^raised."""
    first = ew.convert(x, dtypes.float16)
    if parts == 1:
        return [first]
    rest = ew.sub(x, ew.convert(first, dtypes.float32))
    return [first, ew.convert(ew.mul(rest, 2.0**raised) if raised else rest, dtypes.float16)]


def _cut(axes: tuple[int, ...], count: int, size: int, x: Any) -> list[Any]:
    """``count`` pieces of an array along adjacent axes, and the rest if there is one.

    The axes become one axis of ``size`` terms; the pieces are along a new axis before it.
    """
    at, shape = axes[0], x.aval.shape
    before, after = shape[:at], shape[axes[-1] + 1 :]
    terms, whole = math.prod(shape[d] for d in axes), count * size
    x = reshape(x, (*before, terms, *after))
    pieces = [reshape(slice_in_dim(x, 0, whole, axis=at), (*before, count, size, *after))]
    return pieces + [slice_in_dim(x, whole, terms, axis=at)] * (whole < terms)


def _magnitudes(order: tuple[int, ...], x: Any) -> list[Any]:
    return [finite_magnitudes(transpose(x, order))]


def _scales(magnitudes: Any, contract: tuple[int, ...]) -> tuple[Any, Any]:
    """``2^-j`` and ``4^j`` of each row: the latter scales its maximum to 2^13 to 2^15.

    Rows of zeros or of less than 2^-112 are multiplied by 2^126, which is the largest such power of float32.
    """
    exponent = exponent_of(reduce.reduce_max(magnitudes, contract))  # the maximum is below 2^(exponent - 126)
    j = ew.min(ew.binary(ew.shift_right_arithmetic_p, ew.sub(15 + 126, exponent), 1), 63)
    return power_of_two(ew.neg(j)), power_of_two(ew.add(j, j))


def largest_finite(x: Any, axes: tuple[int, ...]) -> Any:
    """The largest finite absolute value along axes."""
    return reduce.reduce_max(finite_magnitudes(x), axes)


def finite_magnitudes(x: Any) -> Any:
    """Absolute values; 0 for infinities and NaNs."""
    return ew.select(ew.is_finite(x), ew.abs(x), 0.0)


def exponent_of(x: Any) -> Any:
    """The biased exponent of nonnegative float32 values."""
    return ew.binary(ew.shift_right_logical_p, ew.bitcast(x, dtypes.int32), 23)


def power_of_two(exponent: Any) -> Any:
    """2 to an int32 between -126 and 127, as float32."""
    return ew.bitcast(ew.binary(ew.shift_left_p, ew.add(exponent, 127), 23), dtypes.float32)


def _total(sums: Sequence[Any], rank: int) -> Any:
    """The sum of arrays, some of them stacked along a leading axis."""
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
    """The result, from the leading sum and that of the remainders.

    Args:
      before_rhs: axes of the result that the lhs has: batch and free axes.
      batch: batch axes.
      rank: axes of the result.
      each: arrays per sum.
      given: the arrays of the leading sum and, with two parts, of that of the remainders; then the roots.
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
    # in two steps, neither of which overflows unless the result does
    return [ew.mul(ew.mul(total, root), root)]
