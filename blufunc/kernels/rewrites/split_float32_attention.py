"""Float32 attention as attention of float16 parts, for devices with a kernel.

Kernels, before stage 5, next to ``split_float32``. In: a program with ``attention`` and ``attention_grad`` of float32
that have a kernel. Out: one that computes them from operands in one or two parts of float16. Ordinary equations
compute the parts, fused into the kernel of an operand where there is one. Both directions read the same parts: these
are the residuals, and with one part they have half of the bytes.

The number of parts follows from the precision that the matmuls of an equation request. One part has the bits of TF32,
two have 22, and three matmuls of parts are float32's (``precision.py``, ``F16_F16_F32_X3``). float16 has a smaller
range than float32: the elements of a batch entry and key head are multiplied by a power of two, which brings the
largest of them to between 2^14 and 2^15. An element of one part has all its bits down to 2^-28 of that, one of two
parts down to 2^-17. The loss in smaller ones is below 2^-39 of the largest: less than float32 rounding of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var, eval_jaxpr, subjaxprs
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import reduce
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.shape import concatenate, index_in_dim
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite, simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.precision import ACCURATE, ALGORITHMS, QUICKER_BY, is_tf32, resolved
from blufunc.kernels.rewrites.split_float32 import power_of_two

OPERANDS = {"attention": (0, 1, 2), "attention_grad": (0, 1, 2, 5)}
"""Matmul operands of each primitive (``nn/attention/call.py``): q, k, v, dout."""


class _InParts(Primitive):
    """Attention or its derivative, of operands in parts: [B, T, N, H] of float16.

    First parts take the places of the operands. After all operands of the original primitive come all second parts,
    if ``parts`` is 2, and all units [B, K], float32: they multiply the sum of parts back, for each batch entry and
    key head. Results are float32. Its jaxpr is its definition: the original primitive, of operands that are joined.
    """

    kind, multiple_results, body = "call", True, "jaxpr"

    def abstract(self, *avals, jaxpr: Jaxpr, **params):
        return [a.strong() for a in jaxpr.out_avals]

    def reference(self, compile, *, jaxpr: Jaxpr, **params):
        """The definition."""
        return compile(jaxpr)


attention_p = _InParts("attention+split")
attention_grad_p = _InParts("attention_grad+split")
_SPLIT = {"attention": attention_p, "attention_grad": attention_grad_p}


def parts_of(eqn: Eqn) -> int | str:
    """Number of parts of float32 operands, by the matmuls' precision; or why none.

    The most exact matmul of the equation decides.
    """
    body: Jaxpr = eqn.params["jaxpr"]
    wanted = tuple(body.memoised("precisions of products", lambda: tuple(_precisions(body))))
    name = resolved(wanted) if wanted else ACCURATE
    if is_tf32(name):
        return 1
    algorithm = ALGORITHMS.get(QUICKER_BY.get(name, name))
    if algorithm is not None:
        return algorithm.parts
    return (
        f"elements are float32, and its products are to have precision {name!r}: tensor-core attention has 'tf32' and "
        f"{ACCURATE!r}"
    )


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
    """The program with attention of float32 in parts.

    Args:
      jaxpr: has an equation ``attention`` or ``attention_grad`` only where there is a kernel for it.
      origins: for equations, the call that recomputes them; updated for their replacements.
    """
    made: dict[Any, Sequence[Atom]] = {}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        eqn = eqn.with_invars(invars)
        if eqn.prim.name not in OPERANDS or eqn.prim.kind != "call" or invars[0].aval.dtype != dtypes.float32:
            return [eqn]
        parts = parts_of(eqn)
        assert isinstance(parts, int), parts
        K = invars[1].aval.shape[2]
        keys = {i: (invars[i], K, parts, origins.get(eqn)) for i in OPERANDS[eqn.prim.name]}
        eqns: list[Eqn] = []
        missing = {key: invars[i] for i, key in keys.items() if key not in made}
        if missing:
            body = simplify(
                stage(
                    lambda *xs: _split(xs, K, parts),
                    [x.aval for x in missing.values()],
                    "split",
                    line=eqn.source,
                )
            )
            call = Eqn(eqn.prim, list(missing.values()), [Var(a) for a in body.out_avals], {}, eqn.source)
            results: dict[Any, Atom] = {}
            eqns = put_in_place(call, body, call.invars, results.__setitem__)
            found = [results[v] for v in call.outvars]
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
    """The definition of an equation, as one of its operands in parts."""
    places = OPERANDS[eqn.prim.name]
    whole, n = max(places) + 1, len(places)

    def of_parts(*args: Any) -> list[Any]:
        given, rest = list(args[:whole]), args[whole : whole + parts * n]
        for j, i in enumerate(places):
            *seconds, unit = rest[j::n]
            given[i] = _joined([given[i], *seconds], unit)
        return eval_jaxpr(eqn.params["jaxpr"], [*given, *args[whole + parts * n :]])

    return stage(of_parts, [a.aval for a in operands], eqn.prim.name, line=eqn.source)


# -- what the equations are traced from --------------------------------------------------------------


def _split(operands: Sequence[Any], key_heads: int, parts: int) -> list[Any]:
    """For each operand [B, T, N, H] its parts, of equal layout, and its units, [B, K]."""
    largest = [_largest_of_rows(x, key_heads) for x in operands]
    scales: list[Any] = []
    units: list[Any] = []
    for start, count in _runs([x.aval.shape[1] for x in operands]):
        # operands with equal token counts are stacked: separate kernels would cost more than their small work
        stacked = [reshape(x, (1, *x.aval.shape)) for x in largest[start : start + count]]
        top = reduce.reduce_max(concatenate(stacked, 0), (2,))
        # the value is at least 2^(exponent - 127), unless it is subnormal or 0
        exponent = ew.binary(ew.shift_right_logical_p, ew.bitcast(top, dtypes.int32), 23)
        j = ew.min(ew.sub(14 + 127, exponent), 126)
        for found, numbers in ((scales, power_of_two(j)), (units, power_of_two(ew.neg(j)))):
            found += [index_in_dim(numbers, n, 0, keepdims=False) for n in range(count)]
    results = []
    for x, scale, unit in zip(operands, scales, units, strict=True):
        results += [*_parts(ew.mul(x, _of_rows(scale, x.aval.shape)), parts), unit]
    return results


def _largest_of_rows(x: Any, key_heads: int) -> Any:
    """The largest finite element [B, T, K] of the rows that belong to a key head."""
    B, T, N, _ = x.aval.shape
    top = reduce.reduce_max(ew.select(ew.is_finite(x), ew.abs(x), 0.0), (3,))
    return reduce.reduce_max(reshape(top, (B, T, key_heads, N // key_heads)), (3,))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of each run of equal numbers."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1]]
    return [(i, j - i) for i, j in itertools.pairwise([*starts, len(numbers)])]


def _parts(x: Any, parts: int) -> list[Any]:
    """The parts of an array that fits into float16."""
    found = [ew.convert(x, dtypes.float16)]
    if parts > 1:
        found.append(ew.convert(ew.sub(x, ew.convert(found[0], dtypes.float32)), dtypes.float16))
    return found


def _joined(parts: Sequence[Any], unit: Any) -> Any:
    """An operand [B, T, N, H] of its parts."""
    whole, *rest = [ew.convert(x, dtypes.float32) for x in parts]
    for x in rest:
        whole = ew.add(whole, x)
    return ew.mul(whole, _of_rows(unit, whole.aval.shape))


def _of_rows(numbers: Any, shape: tuple[int, ...]) -> Any:
    """Scalars [B, K] for each element of an operand of shape [B, T, N, H]."""
    B, T, N, H = shape
    K = numbers.aval.shape[1]
    return reshape(broadcast_in_dim(numbers, (B, T, K, N // K, H), (0, 2)), shape)
