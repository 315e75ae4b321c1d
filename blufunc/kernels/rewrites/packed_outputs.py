"""Gradients of queries, keys and values in one array, for devices with kernels.

Kernels, after ``split_float32_attention``. In: a program with derivatives of attention. Out: an equivalent one. If
queries, keys and values come from one array, such as the result of one matmul, their gradient is one array too. Kernels
write rows at any stride, so no copy has to concatenate the three gradients.
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
from blufunc.core.programs.simplify import Origins, rewrite
from blufunc.core.programs.stage import stage
from blufunc.kernels.ops.defined_call import DefinedCall
from blufunc.kernels.rewrites.readers import Readers
from blufunc.kernels.rewrites.split_float32_attention import attention_grad_p

_GRADIENTS = ("attention_grad", attention_grad_p.name)
_REMOVED = (add_p, add_any_p, convert_p, pad_p, reshape_p)
"""Primitives that concatenate gradients."""
_ALIGNED = 8
"""Unit of offsets in a row, in elements: kernels write 16 bytes at once."""

packed_p = DefinedCall("attention_grad+packed")
"""The derivative of attention as one array, all gradients of a token in a row.

Operands and parameters are those of ``attention_grad``, or of its split form; ``places`` are the features at which the
gradients of queries, keys and values begin.
"""


class _Packing(NamedTuple):
    """The array of all gradients.

    Attributes:
      total: its variable.
      places: the features at which gradients begin in a row.
      eqns: the equations that concatenate it.
    """

    total: Var
    places: tuple[int, ...]
    eqns: set[Eqn]


def with_packed_gradients(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Pack gradients that end in one array.

    There is a kernel for each derivative of attention in the jaxpr; others have been inlined.
    """
    candidates = [e for e in jaxpr.eqns if e.prim.name in _GRADIENTS and e.prim.kind == "call"]
    if not candidates or any(is_replaced(p, "impl") for p in _REMOVED):
        return jaxpr
    readers = Readers(jaxpr)
    found = {e: packing for e in candidates if (packing := _packing(e, readers)) is not None}
    gone = {e for packing in found.values() for e in packing.eqns}

    narrow: dict[Any, Var] = {}  # by widened variable, the variable before the conversion

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn in gone:
            return []
        made = eqn.with_invars(invars)
        if eqn in found:
            return _packed(made, found[eqn], narrow)
        before = narrow.get(invars[0]) if invars else None
        if before is not None and eqn.prim is convert_p and eqn.outvars[0].aval.same_type(before.aval):
            alias(eqn.outvars[0], before)  # a round trip
            return []
        if before is not None and eqn.prim is reshape_p:
            (out,) = eqn.outvars
            narrow[out] = Var(out.aval.with_dtype(before.aval.dtype))
            first = Eqn(reshape_p, [before], [narrow[out]], eqn.params, eqn.source)
            return [first, Eqn(convert_p, [narrow[out]], [out], {"dtype": out.aval.dtype}, eqn.source)]
        return [made]

    return rewrite(jaxpr, step, origins) if found else jaxpr


def _packed(eqn: Eqn, packing: _Packing, narrow: dict[Any, Var]) -> list[Eqn]:
    """The equations of a packed derivative; its conversion is recorded in ``narrow``."""
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


def _packing(eqn: Eqn, readers: Readers) -> _Packing | None:
    """The array of the three gradients, if it contains only these."""
    tokens = math.prod(eqn.invars[0].aval.shape[:2])
    eqns: set[Eqn] = set()
    places, ends = [], []
    for v in eqn.outvars:
        row = math.prod(v.aval.shape[2:])
        reader = readers.only(v)
        while reader is not None and (reader.prim is reshape_p or widens(reader)):
            eqns.add(reader)
            reader = readers.only(reader.outvars[0])
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


def _place(eqn: Eqn, tokens: int, row: int) -> int | None:
    """The offset in a row at which a pad equation puts the features of a token."""
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


def _sum_of(terms: Sequence[Var], readers: Readers, eqns: set[Eqn]) -> Var | None:
    """The sum of only these arrays, without other readers; its equations are added."""
    left = set(terms)
    if len(left) != len(terms) or len({(v.aval.shape, v.aval.dtype) for v in terms}) != 1:
        return None
    while len(left) > 1:
        sums = [readers.only(v) for v in left]
        both = next((e for e in sums if e is not None and _adds(e) and left.issuperset(e.invars)), None)
        if both is None:
            return None
        eqns.add(both)
        left = left - set(both.invars) | {both.outvars[0]}  # type: ignore[arg-type]
    return left.pop()


def widens(eqn: Eqn) -> bool:
    """True for a conversion from 16 bits to float32."""
    if eqn.prim is not convert_p:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return after == dtypes.float32 and before in (dtypes.bfloat16, dtypes.float16)


def _adds(eqn: Eqn) -> bool:
    return eqn.prim in (add_p, add_any_p) and len(set(eqn.invars)) == 2
