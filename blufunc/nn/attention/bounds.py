"""Bounds of attention masks over whole tiles, by interval arithmetic.

A face, below ``mods.py``. In: the jaxpr of a ``mask_mod``, (*tables, b, h, q, k) -> bool. Out: a jaxpr
(*tables, b, h, q0, q1, k0, k1) -> (possible, certain) for queries q0 to q1 and keys k0 to k1; None for a mask
that is not a comparison of sums, such as one that reads a table at ``q``. Interval arithmetic (Moore, 1966)
may leave a tile undecided, but is never wrong. Sums with values of arrays might wrap around, unless they are
clamped: ``lax.clamp(0, start[b], 4096) + q``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import blufunc.numpy as bnp
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.ops import elementwise as ew
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage

_NUMBER = 1 << 24
"""The numbers of batch entries, heads, queries and keys are less."""

_INT = 1 << 31


class _Fixed(NamedTuple):
    """A value that is constant over the tile; ``most`` bounds its magnitude."""

    value: Any
    most: int = _INT


class _Span(NamedTuple):
    """An interval of integers."""

    low: Any
    high: Any
    most: int


class _Maybe(NamedTuple):
    """A boolean: whether it may hold for some pair, and whether it holds for all."""

    possible: Any
    certain: Any


class _Open(Exception):
    """There is no rule for an operation."""


def bounds_of(mask: Jaxpr) -> Jaxpr | None:
    """The jaxpr of a tile, as described above."""
    *tables, b, h, _, k = mask.in_avals

    def tile(*args: Any) -> list[Any]:
        *held, batch, head, q0, q1, k0, k1 = args
        known: dict[Any, Any] = dict(zip(mask.invars, map(_Fixed, held), strict=False))
        numbers = (
            _Fixed(batch, _NUMBER),
            _Fixed(head, _NUMBER),
            _Span(q0, q1, _NUMBER),
            _Span(k0, k1, _NUMBER),
        )
        known |= zip(mask.invars[len(held) :], numbers, strict=True)

        def read(atom: Any) -> Any:
            if atom.__class__ is not Literal:
                return known[atom]
            integer = dtypes.is_integer(atom.aval.dtype)
            return _Fixed(bnp.asarray(atom.value), abs(int(atom.value)) if integer else _INT)

        for eqn in mask.eqns:
            operands = [read(a) for a in eqn.invars]
            if all(x.__class__ is _Fixed for x in operands):
                found = eqn.prim.bind(*[x.value for x in operands], **eqn.params)
                found = found if eqn.prim.multiple_results else [found]
                most = max(operands[0].most, operands[2].most) if eqn.prim is ew.clamp_p else _INT
                known |= zip(eqn.outvars, [_Fixed(x, most) for x in found], strict=True)
            else:
                known[eqn.outvars[0]] = _applied(eqn, operands)
        return list(_maybe(read(mask.outvars[0])))

    try:
        return simplify(stage(tile, [*tables, b, h, k, k, k, k], "mask_bounds"))
    except _Open:
        return None


def _applied(eqn: Eqn, operands: Sequence[Any]) -> Any:
    if eqn.prim is ew.select_p:
        return _select(*operands)
    boolean = dtypes.is_bool(eqn.invars[0].aval.dtype)
    rule = (_BOOLEANS if boolean else _INTEGERS).get(eqn.prim)
    if (
        rule is None
        or eqn.outvars[0].aval.shape
        or eqn.outvars[0].aval.dtype not in (dtypes.bool_, dtypes.int32)
    ):
        raise _Open
    result = rule(*[(_maybe if boolean else _span)(x) for x in operands])
    if result.__class__ is _Span and result.most >= _INT:
        raise _Open  # it may wrap around
    return result


def _span(x: Any) -> _Span:
    if x.__class__ is not _Fixed:
        return x
    if x.value.aval.dtype != dtypes.int32:
        raise _Open
    return _Span(x.value, x.value, x.most)


def _maybe(x: Any) -> _Maybe:
    return _Maybe(x.value, x.value) if x.__class__ is _Fixed else x


def _select(condition: Any, yes: Any, no: Any) -> Any:
    some, always = _maybe(condition)
    if _Maybe in (yes.__class__, no.__class__) or dtypes.is_bool(getattr(yes, "value", yes[0]).aval.dtype):
        a, b = _maybe(yes), _maybe(no)
        certain = (always & a.certain) | (~some & b.certain) | (a.certain & b.certain)
        return _Maybe((some & a.possible) | (~always & b.possible), certain)
    a, b = _span(yes), _span(no)
    low, high = bnp.minimum(a.low, b.low), bnp.maximum(a.high, b.high)
    low = bnp.where(always, a.low, bnp.where(some, low, b.low))
    return _Span(low, bnp.where(always, a.high, bnp.where(some, high, b.high)), max(a.most, b.most))


def _less(a: _Span, b: _Span) -> _Maybe:
    return _Maybe(a.low < b.high, a.high < b.low)


def _equal(a: _Span, b: _Span) -> _Maybe:
    one = (a.low == a.high) & (b.low == b.high)
    return _Maybe((a.low <= b.high) & (b.low <= a.high), one & (a.low == b.low))


def _not(x: _Maybe) -> _Maybe:
    return _Maybe(~x.certain, ~x.possible)


def _minus(x: _Span) -> _Span:
    return _Span(-x.high, -x.low, x.most)


def _plus(a: _Span, b: _Span) -> _Span:
    return _Span(a.low + b.low, a.high + b.high, a.most + b.most)


def _extremum(of: Callable) -> Callable:
    return lambda a, b: _Span(of(a.low, b.low), of(a.high, b.high), max(a.most, b.most))


def _magnitude(x: _Span) -> _Span:
    low = bnp.maximum(bnp.maximum(x.low, -x.high), 0)
    return _Span(low, bnp.maximum(-x.low, x.high), x.most)


_INTEGERS: dict[Any, Callable] = {
    ew.add_p: _plus,
    ew.sub_p: lambda a, b: _plus(a, _minus(b)),
    ew.neg_p: _minus,
    ew.abs_p: _magnitude,
    ew.max_p: _extremum(bnp.maximum),
    ew.min_p: _extremum(bnp.minimum),
    ew.lt_p: _less,
    ew.gt_p: lambda a, b: _less(b, a),
    ew.ge_p: lambda a, b: _not(_less(a, b)),
    ew.le_p: lambda a, b: _not(_less(b, a)),
    ew.eq_p: _equal,
    ew.ne_p: lambda a, b: _not(_equal(a, b)),
}
"""Rules for intervals of integers, by primitive."""

_BOOLEANS: dict[Any, Callable] = {
    ew.and_p: lambda a, b: _Maybe(a.possible & b.possible, a.certain & b.certain),
    ew.or_p: lambda a, b: _Maybe(a.possible | b.possible, a.certain | b.certain),
    ew.not_p: _not,
}
"""Rules for booleans, by primitive."""
