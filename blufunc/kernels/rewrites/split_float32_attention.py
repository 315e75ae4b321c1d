"""Float32 attention in float16 parts, for devices with kernels.

Kernels, next to ``split_float32``. In: a program with float32 ``attention`` and ``attention_grad`` that have a kernel.
Out: an equivalent one, with operands in one or two float16 parts, computed in the kernel that computes an operand if
there is one. Both directions read the same parts, so these are the saved values: with one part, half of the bytes.

The precision of an equation's matmuls sets the number of parts. One part has the bits of TF32; two have 22 bits, and
three matmuls of parts are as exact as float32 (``precision.py``, ``F16_F16_F32_X3``). The exponents of float16 are
fewer: the elements of a batch entry and key head are multiplied by a power of two that brings their maximum to between
2^14 and 2^15. An element of one part keeps all its bits down to 2^-28 of the maximum, one of two parts down to 2^-17.
Smaller ones lose less than 2^-39 of the maximum, which is less than float32 loses of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, eval_jaxpr, subjaxprs
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import reduce
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.shape import concatenate, index_in_dim
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape
from blufunc.core.programs.simplify import Origins, rewrite, simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.ops.defined_call import DefinedCall
from blufunc.kernels.precision import ACCURATE, ALGORITHMS, QUICKER_BY, is_tf32, resolved
from blufunc.kernels.rewrites.split_float32 import (
    exponent_of,
    float16_parts,
    inlined,
    largest_finite,
    power_of_two,
)

OPERANDS = {"attention": (0, 1, 2), "attention_grad": (0, 1, 2, 5)}
"""Indices of queries, keys, values, cotangents, by primitive of ``nn/attention``."""


attention_p = DefinedCall("attention+split")
"""Attention of the first parts of operands, float16 [B, T, N, H].

After the operands of ``attention`` come all second parts, if ``parts`` is 2, and all float32 units [B, K]: the factor
of the sum of parts, for each batch entry and key head. Results are float32.
"""
attention_grad_p = DefinedCall("attention_grad+split")
"""The derivative of attention, with the operands of ``attention_grad`` so split."""
_SPLIT = {"attention": attention_p, "attention_grad": attention_grad_p}


def parts_of(eqn: Eqn) -> int:
    """The number of parts that the matmuls of an equation request; 0: IEEE arithmetic.

    The most exact of its matmuls counts.
    """
    body: Jaxpr = eqn.params["jaxpr"]
    requested = body.memoised("precisions of products", lambda: tuple(_precisions(body)))
    name = resolved(requested) if requested else ACCURATE
    if is_tf32(name):
        return 1
    algorithm = ALGORITHMS.get(QUICKER_BY.get(name, name))
    return 0 if algorithm is None else algorithm.parts


def _precisions(jaxpr: Jaxpr) -> set[Any]:
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.prim is dot_general_p:
            precision = eqn.params["precision"]
            found |= set(precision) if isinstance(precision, tuple) else {precision}
        for inner in subjaxprs(eqn.params):
            found |= _precisions(inner)
    return found


def with_split_attention(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Compute float32 attention from float16 parts.

    There is a kernel for each ``attention`` and ``attention_grad`` in the jaxpr; others have been inlined.
    """
    made: dict[Any, Sequence[Atom]] = {}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        eqn = eqn.with_invars(invars)
        if eqn.prim.name not in OPERANDS or eqn.prim.kind != "call" or invars[0].aval.dtype != dtypes.float32:
            return [eqn]
        parts = parts_of(eqn)
        if not parts:
            return [eqn]  # its kernels compute in IEEE arithmetic
        K = invars[1].aval.shape[2]
        keys = {i: (invars[i], K, parts, origins.get(eqn)) for i in OPERANDS[eqn.prim.name]}
        eqns: list[Eqn] = []
        missing = {key: invars[i] for i, key in keys.items() if key not in made}
        if missing:
            avals = [x.aval for x in missing.values()]
            body = simplify(stage(lambda *xs: _split(xs, K, parts), avals, "split", line=eqn.source))
            eqns, found = inlined(eqn, body, list(missing.values()))
            made.update((key, found[n * (parts + 1) :][: parts + 1]) for n, key in enumerate(missing))
        firsts, *rest = zip(*[made[key] for key in keys.values()], strict=True)
        first = dict(zip(keys, firsts, strict=True))
        whole = max(keys) + 1
        operands = [first.get(i, a) for i, a in enumerate(invars[:whole])]
        operands += [*itertools.chain(*rest), *invars[whole:]]
        params = {**eqn.params, "jaxpr": _definition(eqn, operands, parts), "parts": parts}
        return [*eqns, Eqn(_SPLIT[eqn.prim.name], operands, eqn.outvars, params, eqn.source)]

    if not any(e.prim.name in OPERANDS and e.prim.kind == "call" for e in jaxpr.eqns):
        return jaxpr
    return rewrite(jaxpr, step, origins)


def _definition(eqn: Eqn, operands: list[Atom], parts: int) -> Jaxpr:
    """The definition of an equation as a function of operands in parts."""
    places = OPERANDS[eqn.prim.name]
    whole, n = max(places) + 1, len(places)

    def of_parts(*args: Any) -> list[Any]:
        given, more = list(args[:whole]), args[whole : whole + parts * n]
        for j, i in enumerate(places):
            *rest, unit = more[j::n]
            given[i] = _joined([given[i], *rest], unit)
        return eval_jaxpr(eqn.params["jaxpr"], [*given, *args[whole + parts * n :]])

    return stage(of_parts, [a.aval for a in operands], eqn.prim.name, line=eqn.source)


# -- traced functions --------------------------------------------------------------------------------


def _split(operands: Sequence[Any], key_heads: int, parts: int) -> list[Any]:
    """For each operand [B, T, N, H], its parts and its units [B, K]."""
    maxima = [_row_maxima(x, key_heads) for x in operands]
    scales: list[Any] = []
    units: list[Any] = []
    # operands of equal length together: kernels of their own would take longer than the work
    for _, group in itertools.groupby(maxima, lambda x: x.aval.shape[1]):
        same = [reshape(x, (1, *x.aval.shape)) for x in group]
        # the maximum is at least 2^(exponent - 127), unless it is subnormal or 0
        exponent = exponent_of(reduce.reduce_max(concatenate(same, 0), (2,)))
        j = ew.min(ew.sub(14 + 127, exponent), 126)
        for found, powers in ((scales, power_of_two(j)), (units, power_of_two(ew.neg(j)))):
            found += [index_in_dim(powers, n, 0, keepdims=False) for n in range(len(same))]
    results = []
    for x, scale, unit in zip(operands, scales, units, strict=True):
        results += [*float16_parts(ew.mul(x, _of_rows(scale, x.aval.shape)), parts), unit]
    return results


def _row_maxima(x: Any, key_heads: int) -> Any:
    """The largest finite element [B, T, K] of the rows of each key head."""
    B, T, N, _ = x.aval.shape
    return reduce.reduce_max(reshape(largest_finite(x, (3,)), (B, T, key_heads, N // key_heads)), (3,))


def _joined(parts: Sequence[Any], unit: Any) -> Any:
    """An operand [B, T, N, H] from its parts."""
    whole, *rest = [ew.convert(x, dtypes.float32) for x in parts]
    for x in rest:
        whole = ew.add(whole, x)
    return ew.mul(whole, _of_rows(unit, whole.aval.shape))


def _of_rows(values: Any, shape: tuple[int, ...]) -> Any:
    """Values [B, K] broadcast to the shape [B, T, N, H] of an operand."""
    B, T, N, H = shape
    K = values.aval.shape[1]
    return reshape(broadcast_in_dim(values, (B, T, K, N // K, H), (0, 2)), shape)
