"""Factor rules: einsum-like relations between operand and result dimensions.

Core, plain data that ``prim.shard(avals, outs, **params) -> Rule`` returns for one use. Each dimension of
each operand and result consists of *factors*, major first; dimensions that share a factor are sharded the
same way. Factors of results pass through. Factors of operands only are reduced, which leaves an unreduced sum
or maximum. A dimension without factors must be replicated. ``parallel/partition`` assigns factors to mesh
axes and computes on the shards.
"""

from __future__ import annotations

import math
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray

Dims = tuple[tuple[int, ...], ...]
"""The factors of each dimension of one operand or result, major first."""

Shape = tuple[int, ...]
ShardRule = Callable[..., "Rule"]
"""``(operand types, result types, **params) -> Rule``."""

FIRST, EITHER, BOTH = (frozenset({0}),), (frozenset({0}), frozenset({1})), (frozenset({0, 1}),)
"""Groups of operands in which an operation is linear."""


@dataclass(frozen=True)
class Rule:
    """Relation between the dimensions of one use of a primitive.

    Attributes:
      operands, results: the factors of each dimension of each of them; a dimension without any must be whole.
      sizes: the size of each factor.
      reduced: factors that results lack because the operation reduces them: "sum", "max" or "min".
      linear: groups of operands in which the operation is jointly linear. If a whole group is unreduced over the
        same mesh axes, and no other operand is, the result may stay unreduced.
      partial: operands that are added once to the sum over devices, where a factor is summed over.
      harmless: operands whose padding is harmless where a factor is reduced.
      trusted: operands that are unchecked indices: their padding is set to 0.
      params: ``(params, operand shapes, result shapes) -> params`` on one device, where parameters hold shapes.
      special: the computation on a shard where it differs from the whole: a name in
        ``parallel/partition/localized_ops.py``, "iota", "gather", "scatter" or "random_bits".
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reduced: Mapping[int, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    partial: frozenset[int] = frozenset()
    harmless: frozenset[int] = frozenset()
    trusted: frozenset[int] = frozenset()
    params: Callable[[dict, list[Shape], list[Shape]], dict] | None = None
    special: str = ""

    def exact(self, shapes: Sequence[Shape]) -> frozenset[int]:
        """Factors that must be sharded evenly: parts of a dimension of ``shapes``."""
        return frozenset(
            f
            for dims, shape in zip((*self.operands, *self.results), shapes, strict=True)
            for factors, n in zip(dims, shape, strict=True)
            for f in factors
            if len(factors) > 1 or self.sizes[f] != n
        )


class Factoring:
    """Allocator of factor indices while a rule is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.reduced: dict[int, str] = {}

    def new(self, size: int, reduce: str | None = None) -> tuple[int]:
        """A dimension of one new factor."""
        self.sizes.append(size)
        if reduce is not None:
            self.reduced[len(self.sizes) - 1] = reduce
        return (len(self.sizes) - 1,)

    def each(self, shape: Shape, but: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """A new factor for each dimension except those in ``but``."""
        return [() if d in but else self.new(n) for d, n in enumerate(shape)]

    def rule(self, operands: Sequence[Any], results: Sequence[Any], **more: Any) -> Rule:
        dims = [tuple(map(tuple, ds)) for ds in (*operands, *results)]
        n = len(operands)
        return Rule(tuple(dims[:n]), tuple(dims[n:]), tuple(self.sizes), self.reduced, **more)


def common_factors(before: Shape, after: Shape, new: Callable[[int], tuple[int]]) -> tuple[list, list]:
    """The factors of two shapes of the same elements; ``new(size)`` makes one.

    Matches from the first dimension on while one size divides the other; the remaining dimensions have no factors.
    """
    dims: tuple[list, list] = ([() for _ in before], [() for _ in after])
    if 0 in before:
        return dims
    sides = [iter([(d, n) for d, n in enumerate(shape) if n > 1]) for shape in (before, after)]
    (i, a), (j, b) = (next(side, (0, 1)) for side in sides)
    while a > 1 or b > 1:
        size = min(a, b)
        if size == 1 or a % size or b % size:
            break
        factor = new(size)
        dims[0][i] += factor
        dims[1][j] += factor
        a, b = a // size, b // size
        if a == 1:
            i, a = next(sides[0], (0, 1))
        if b == 1:
            j, b = next(sides[1], (0, 1))
    return dims


def whole(avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> Rule:
    """Rule of operations that every device computes whole."""
    return Factoring().rule([((),) * a.ndim for a in avals], [((),) * a.ndim for a in outs])


def one_by_one(avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> Rule:
    """Rule of operations that map each operand to a result of its shape."""
    b = Factoring()
    dims = [b.each(a.shape) for a in avals]
    return b.rule(dims, dims)


def elementwise(
    avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], linear: tuple = (), **params: Any
) -> Rule:
    """Rule of elementwise operations; rank-0 operands are replicated."""
    b = Factoring()
    dims = b.each(outs[0].shape)
    return b.rule([dims if a.ndim else () for a in avals], [dims] * len(outs), linear=linear)


def along(parameter: str) -> ShardRule:
    """Rule of operations along one dimension, named by a parameter."""

    def rule(avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> Rule:
        b = Factoring()
        dims = b.each(avals[0].shape, [params[parameter]])
        return b.rule([dims] * len(avals), [dims] * len(outs))

    return rule


def leading(n: int, trusted: frozenset[int] = frozenset()) -> ShardRule:
    """Rule of operations on the last ``n`` dimensions; equal leading dimensions pass."""

    def rule(avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> Rule:
        b = Factoring()
        lead = avals[0].shape[: max(avals[0].ndim - n, 0)]
        if any(a.shape[: len(lead)] != lead or a.ndim < len(lead) for a in (*avals, *outs)):
            return whole(avals, outs)
        dims = b.each(lead)
        sides = [[[*dims, *[()] * (a.ndim - len(lead))] for a in side] for side in (avals, outs)]
        return b.rule(*sides, trusted=trusted)

    return rule


def shard_reduction(
    monoid: str, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any
) -> Rule:
    """Rule of a reduction over ``params["axes"]``, which need a monoid to be sharded."""
    b = Factoring()
    how = monoid if monoid in ("sum", "max", "min") else None
    if dtypes.is_bool(avals[0].dtype):
        how = {"and": "min", "or": "max"}.get(monoid, how)
    axes = params["axes"]
    dims = [
        b.new(n) if d not in axes else () if how is None else b.new(n, how)
        for d, n in enumerate(avals[0].shape)
    ]
    kept = [f for d, f in enumerate(dims) if d not in axes]
    linear = FIRST if how == "sum" and dtypes.is_inexact(outs[0].dtype) else ()
    return b.rule([dims], [kept], linear=linear)


def of_results(params: dict, operands: list[Shape], results: list[Shape]) -> dict:
    """Parameters on one device, for operations whose ``shape`` is that of the result."""
    return {**params, "shape": results[0]}


class Factors:
    """A shard rule as an einsum-like string: ``Factors("i k, k j -> i j", k="sum")``.

    Dimensions of one name are sharded the same way; ``_`` must be whole. Set it as ``shard`` of a primitive.

    Args:
      spec: operands, an arrow, and results, each a list of names.
      reduced: for each name that some result lacks, its reduction: "sum", "max" or "min". A name without one is
        whole.
    """

    def __init__(self, spec: str, **reduced: str):
        sides = [
            [side.split() for side in part.split(",")] if part.strip() else [] for part in spec.split("->")
        ]
        words = [w for side in sides for names in side for w in names]
        wrong = ""
        if len(sides) != 2 or not all(re.fullmatch(r"\w+", w) for w in words):
            wrong = f"{spec!r} is not operands -> results"
        elif unknown := [f"{n}={how!r}" for n, how in reduced.items() if how not in ("sum", "max", "min")]:
            wrong = f"{', '.join(unknown)} is not a reduction"
        elif missing := [n for n in reduced if n not in {w for names in sides[0] for w in names}]:
            wrong = f"it reduces {', '.join(missing)}, and {spec!r} names no such dimension"
        elif present := [n for n in reduced if all(n in names for names in sides[1])]:
            wrong = f"it reduces {', '.join(present)}, which every result has"
        if wrong:
            raise errors.ShardingError(
                f"Factors: {wrong}.", where=source.here(), fix='Factors("i k, k j -> i j", k="sum")'
            )
        self.spec, self.sides, self.reduced = spec, sides, reduced

    def __repr__(self) -> str:
        return f"Factors({self.spec!r}{''.join(f', {n}={how!r}' for n, how in self.reduced.items())})"

    def __call__(self, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> Rule:
        """The rule of one use."""
        b = Factoring()
        ins, results = self.sides
        passing = set.intersection(*map(set, results)) if results else set()
        known: dict[str, tuple[int, ...]] = {"_": ()}

        def dims(names: list[str], aval: ShapedArray) -> list[tuple[int, ...]]:
            if len(names) != aval.ndim:
                raise ValueError(f"names {len(names)} dimensions ({' '.join(names)}) of {aval}")
            for name, n in zip(names, aval.shape, strict=True):
                if name not in known:
                    how = self.reduced.get(name)
                    known[name] = b.new(n, how) if how or name in passing else ()
            return [known[name] for name in names]

        for side, types, what in ((ins, avals, "operands"), (results, outs, "results")):
            if len(side) != len(types):
                raise ValueError(f"is for {len(side)} {what}, and there are {len(types)}")
        return b.rule([*map(dims, ins, avals)], [*map(dims, results, outs)])


def rule_of(prim: Any, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """The rule of one use of a primitive.

    Raises:
      ShardingError: the rule names dimensions or factors that do not exist.
    """
    if prim.shard is None or hasattr(prim.shard, "reason"):
        return whole(avals, outs)
    try:
        rule = prim.shard(avals, outs, **params) if callable(prim.shard) else prim.shard
        wrong = _misfit(rule, avals, outs)
    except ValueError as e:  # of Factors
        wrong = str(e)
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        wrong = f"raises {type(e).__name__}: {e} ({os.path.basename(at.filename)}:{at.lineno})"
    if wrong:
        raise errors.ShardingError(
            f"the shard rule of {prim.name} {wrong}.",
            where=source.here(),
            why="a rule has the factors of each dimension of each operand and result, and the size of each factor.",
            fix=f'write it in words, shard = extend.Factors("i j -> i j"), as {prim.name} has its operands',
        )
    return rule


def _misfit(rule: Any, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray]) -> str:
    """The error in a rule, completing "the shard rule of sin ..."; "" if none."""
    if not isinstance(rule, Rule):
        return f"returned {rule!r:.60}, not a Rule"
    for what, sides, types in (("operand", rule.operands, avals), ("result", rule.results, outs)):
        if len(sides) != len(types):
            return f"is for {len(sides)} {what}s, and there are {len(types)}"
        for i, (dims, aval) in enumerate(zip(sides, types, strict=True)):
            if len(dims) != aval.ndim:
                return f"has factors for {len(dims)} dimensions of {what} {i}, which is {aval}"
            for d, (factors, n) in enumerate(zip(dims, aval.shape, strict=True)):
                if unknown := [f for f in factors if not 0 <= f < len(rule.sizes)]:
                    return f"names factor {unknown[0]}, and there are {len(rule.sizes)}"
                size = math.prod(rule.sizes[f] for f in factors)
                if factors and size != n:
                    return f"has factors of size {size} for dimension {d} of {what} {i}, which is {aval}"
    if unknown := [f for f in rule.reduced if not 0 <= f < len(rule.sizes)]:
        return f"reduces factor {unknown[0]}, and there are {len(rule.sizes)}"
    return ""
