"""Gradients of attention, written into one array by the kernels that compute them.

Kernels, before stage 5, after ``split_float32_attention``, for devices with such kernels. In: a program with
derivatives of attention. Out: the same, in which the gradient of q, k and v that are slices of one array, such as a
matmul's result, is one output: kernels write strided rows, which saves the copy that would join the three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, eval_jaxpr
from blufunc.core.ops.elementwise import add_p, convert_p
from blufunc.core.ops.shape import concatenate, pad_p
from blufunc.core.primitives.linear_ops import add_any_p, reshape, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, rewrite
from blufunc.core.programs.stage import stage
from blufunc.kernels.rewrites.split_float32_attention import attention_grad_p

_GRADIENTS = ("attention_grad", attention_grad_p.name)
_GONE = (add_p, add_any_p, convert_p, pad_p, reshape_p)
"""Operations that join gradients."""
_ALIGNED = 8
"""Alignment of a position in a row, in elements: kernels store 16 bytes at a time."""


class _Packed(Primitive):
    """The derivative of attention as one array, with a token's gradients in each row.

    Operands and parameters are those of ``attention_grad``, or of its form in parts; ``places`` are the feature
    offsets of the gradients of queries, keys and values.
    """

    name, kind, multiple_results, body = "attention_grad+packed", "call", True, "jaxpr"

    def abstract(self, *avals, jaxpr: Jaxpr, **params):
        return [a.strong() for a in jaxpr.out_avals]

    def reference(self, compile, *, jaxpr: Jaxpr, **params):
        """The definition."""
        return compile(jaxpr)


packed_p = _Packed()


class _Packing(NamedTuple):
    """One array of gradients.

    Attributes:
      total: the array.
      places: offsets of the gradients in a row.
      eqns: the equations that join them.
    """

    total: Var
    places: tuple[int, ...]
    eqns: set[Eqn]


def with_packed_gradients(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """The program with gradients in one array wherever they are joined there.

    Args:
      jaxpr: has an equation of the derivative of attention only where there is a kernel for it.
      origins: for equations, the call that recomputes them; updated for their replacements.
    """
    candidates = [e for e in jaxpr.eqns if e.prim.name in _GRADIENTS and e.prim.kind == "call"]
    if not candidates or any(is_replaced(p, "impl") for p in _GONE):
        return jaxpr
    readers: dict[Any, list[Eqn | None]] = {a: [None] for a in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        for a in eqn.invars:
            readers.setdefault(a, []).append(eqn)
    found = {e: packing for e in candidates if (packing := _packing(e, readers)) is not None}
    gone = {e for packing in found.values() for e in packing.eqns}

    narrow: dict[Any, Var] = {}  # for results of widening conversions, their operand

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn in gone:
            return []
        made = eqn.with_invars(invars)
        if eqn in found:
            return _packed(made, found[eqn], narrow)
        before = narrow.get(invars[0]) if invars else None
        if before is not None and eqn.prim is convert_p and eqn.outvars[0].aval.same_type(before.aval):
            alias(eqn.outvars[0], before)  # there and back
            return []
        if before is not None and eqn.prim is reshape_p:
            (out,) = eqn.outvars
            narrow[out] = Var(out.aval.with_dtype(before.aval.dtype))
            first = Eqn(reshape_p, [before], [narrow[out]], eqn.params, eqn.source)
            return [first, Eqn(convert_p, [narrow[out]], [out], {"dtype": out.aval.dtype}, eqn.source)]
        return [made]

    return rewrite(jaxpr, step, origins) if found else jaxpr


def _packed(eqn: Eqn, packing: _Packing, narrow: dict[Any, Var]) -> list[Eqn]:
    """The replacement of an equation; redundant widening conversions go to ``narrow``."""
    definition: Jaxpr = eqn.params["jaxpr"]
    B, T = eqn.invars[0].aval.shape[:2]
    order = sorted(range(3), key=packing.places.__getitem__)
    (total, dtype) = packing.total, eqn.outvars[0].aval.dtype

    def whole(*args: Any) -> list[Any]:
        rows = [reshape(x, (B, T, math.prod(x.aval.shape[2:]))) for x in eval_jaxpr(definition, args)]
        return [reshape(concatenate([rows[i] for i in order], 2), total.aval.shape)]

    body = stage(whole, [a.aval for a in eqn.invars], eqn.prim.name, line=eqn.source)
    made = total if total.aval.dtype == dtype else Var(total.aval.with_dtype(dtype))
    params = {**eqn.params, "jaxpr": body, "places": packing.places}
    eqns = [Eqn(packed_p, eqn.invars, [made], params, eqn.source)]
    if made is not total:
        narrow[total] = made
        eqns.append(Eqn(convert_p, [made], [total], {"dtype": total.aval.dtype}, eqn.source))
    return eqns


def _packing(eqn: Eqn, readers: dict[Any, list[Eqn | None]]) -> _Packing | None:
    """The array that joins exactly the three gradients, if there is one."""
    tokens = math.prod(eqn.invars[0].aval.shape[:2])
    eqns: set[Eqn] = set()
    places, ends = [], []
    for v in eqn.outvars:
        row = math.prod(v.aval.shape[2:])
        reader = _only_reader(v, readers)
        while reader is not None and (reader.prim is reshape_p or widens(reader)):
            eqns.add(reader)
            reader = _only_reader(reader.outvars[0], readers)
        place = None if reader is None else _place(reader, tokens, row)
        if place is None or place % _ALIGNED or row % _ALIGNED:
            return None
        eqns.add(reader)  # type: ignore[arg-type]
        places.append((place, place + row))
        ends.append(reader.outvars[0])  # type: ignore[union-attr]
    if ends[0].aval.size != tokens * sum(end - start for start, end in places):
        return None
    total = _sum_of(ends, readers, eqns)
    in_order = sorted(places)
    if total is None or in_order[0][0] or any(a[1] != b[0] for a, b in itertools.pairwise(in_order)):
        return None
    return _Packing(total, tuple(start for start, _ in places), eqns)


def _only_reader(v: Var, readers: dict[Any, list[Eqn | None]]) -> Eqn | None:
    found = readers.get(v, [])
    return found[0] if len(found) == 1 else None


def _place(eqn: Eqn, tokens: int, row: int) -> int | None:
    """Offset of a token's features in a row of a padded array; None for other padding."""
    if eqn.prim is not pad_p or not isinstance(eqn.invars[1], Literal) or eqn.invars[1].value != 0:
        return None
    config = eqn.params["padding_config"]
    axes = [d for d, padding in enumerate(config) if any(padding)]
    shape = eqn.invars[0].aval.shape
    if len(axes) != 1 or config[axes[0]][2] or min(config[axes[0]][:2]) < 0:
        return None
    if math.prod(shape[: axes[0]]) != tokens or eqn.invars[0].aval.size != tokens * row:
        return None
    return config[axes[0]][0] * math.prod(shape[axes[0] + 1 :])


def _sum_of(terms: Sequence[Var], readers: dict[Any, list[Eqn | None]], eqns: set[Eqn]) -> Var | None:
    """The sum of exactly three arrays, without other readers; adds its equations."""
    left = set(terms)
    if len(left) != len(terms) or len({(v.aval.shape, v.aval.dtype) for v in terms}) != 1:
        return None
    while len(left) > 1:
        sums = [_only_reader(v, readers) for v in left]
        both = next((e for e in sums if e is not None and _adds(e) and left.issuperset(e.invars)), None)
        if both is None:
            return None
        eqns.add(both)
        left = left - set(both.invars) | {both.outvars[0]}  # type: ignore[arg-type]
    return left.pop()


def widens(eqn: Eqn) -> bool:
    """True if an equation converts without rounding."""
    if eqn.prim is not convert_p:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return after == dtypes.float32 and before in (dtypes.bfloat16, dtypes.float16)


def _adds(eqn: Eqn) -> bool:
    return eqn.prim in (add_p, add_any_p) and len(set(eqn.invars)) == 2
