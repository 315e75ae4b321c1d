"""Mask and score functions of attention: traced functions of one query-key pair.

A face, below ``call.py``. In: the user's ``mask_mod`` and ``score_mod``. Out: ``Mods``, scalar jaxprs that a
kernel can inline, and the arrays that the functions close over, as operands (**tables**). ``over_pairs``
evaluates one for all pairs, which is the definition: by a ``vmap`` per axis, so that each value is computed
once per axis that it depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal, eval_jaxpr, exact
from blufunc.core.ops.elementwise import clamp_p
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.nn.attention.bounds import bounds_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.batching.batch import Axis, batch_flat

NUMBERS = ("b", "h", "q", "k")
"""Names of a pair's indices: batch entry, query head, query, key."""


@dataclass(frozen=True)
class Mods:
    """Mask and score functions, applied to a pair's score before the softmax.

    Attributes:
      mask: a jaxpr (*tables, b, h, q, k) -> bool: whether the pair is visible. None: always.
      score: a jaxpr (*tables, score, b, h, q, k) -> score. None: unchanged.
      mask_tables: the number of tables of the mask; those of ``score`` follow.
      blind_is_nan: whether queries that see no key give NaN, as a softmax of -inf does; default False: 0.
    """

    mask: Jaxpr | None
    score: Jaxpr | None
    mask_tables: int
    blind_is_nan: bool = False

    def __repr__(self) -> str:
        return " and ".join(
            n for n, j in (("mask_mod", self.mask), ("score_mod", self.score)) if j is not None
        )

    @property
    def slope(self) -> Jaxpr | None:
        """A jaxpr from the operands of ``score`` to the score and its derivative."""
        score = self.score
        return None if score is None else score.memoised("slope", lambda: _with_slope(score))

    @property
    def bounds(self) -> Jaxpr | None:
        """The mask's bounds over tiles, where intervals decide them: see ``bounds.py``."""
        mask = self.mask
        return None if mask is None else mask.memoised("bounds", lambda: [bounds_of(mask)])[0]

    def split(self, tables: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tables of the mask, and those of the score."""
        return tables[: self.mask_tables], tables[self.mask_tables :]


def traced(
    mask_mod: Callable | None, score_mod: Callable | None, score_dtype: np.dtype
) -> tuple[Mods | None, tuple]:
    """The functions as jaxprs, and their tables; None without a function.

    Args:
      mask_mod: (b, h, q, k) -> a boolean.
      score_mod: (score, b, h, q, k) -> a float.
      score_dtype: dtype of the scores.
    Raises:
      ShapeError: a function does not return a scalar.
      DtypeError: ``mask_mod`` does not return a boolean, or ``score_mod`` returns a complex value.
    """
    if mask_mod is None and score_mod is None:
        return None, ()
    numbers = [ShapedArray((), dtypes.int32)] * len(NUMBERS)
    score = ShapedArray((), score_dtype)
    mask, mask_tables = _staged("mask_mod", mask_mod, numbers, _boolean)
    scored, score_tables = _staged(
        "score_mod", score_mod, [score, *numbers], functools.partial(_real, dtype=score_dtype)
    )
    return Mods(mask, scored, len(mask_tables)), (*mask_tables, *score_tables)


def _staged(
    name: str, fun: Callable | None, avals: Sequence[ShapedArray], result: Callable
) -> tuple[Jaxpr | None, tuple]:
    if fun is None:
        return None, ()

    def one(*numbers: Any) -> list[Any]:
        out = bnp.asarray(fun(*numbers))
        if out.ndim:
            raise errors.ShapeError(
                f"dot_product_attention: {name} returns an array of shape {tuple(out.shape)}.",
                where=source.here(),
                why="it is a function of one pair of a query and a key, and its arguments are single numbers.",
                fix="return one number, as table[h, q - k] is",
            )
        return [result(out)]

    jaxpr, tables = stage(one, avals, name).hoist()
    jaxpr, tables = _prepared(simplify(jaxpr), tables)
    return _one_for_all(_Spelled(jaxpr)), tables


def _prepared(jaxpr: Jaxpr, tables: tuple) -> tuple[Jaxpr, tuple]:
    """Hoist pair-independent computations on tables into new tables."""
    n = len(tables)
    known = dict.fromkeys(jaxpr.invars[:n])
    before: list[Any] = []
    after: list[Any] = []
    for eqn in jaxpr.eqns:
        fixed = not eqn.effects and all(a.__class__ is Literal or a in known for a in eqn.invars)
        fixed = fixed and eqn.prim is not clamp_p  # its bounds are those of a mask over tiles
        (before if fixed else after).append(eqn)
        known |= dict.fromkeys(eqn.outvars if fixed else ())
    if not before:
        return jaxpr, tables
    reads = {a for e in after for a in e.invars}.union(jaxpr.outvars)
    kept = [v for v in known if v in reads]
    first = jaxpr.replace(invars=jaxpr.invars[:n], eqns=before, outvars=kept, arg_names=())
    rest = jaxpr.replace(invars=(*kept, *jaxpr.invars[n:]), eqns=after, arg_names=())
    return rest, tuple(eval_jaxpr(first, tables))


def _boolean(x: Any) -> Any:
    if not dtypes.is_bool(x.dtype):
        raise errors.DtypeError(
            f"dot_product_attention: mask_mod returns {x.dtype}, and not a boolean.",
            where=source.here(),
            fix="compare, as in q >= k; what changes scores is a score_mod",
        )
    return x


def _real(x: Any, dtype: np.dtype) -> Any:
    if dtypes.is_complex(x.dtype) or dtypes.is_bool(x.dtype):
        raise errors.DtypeError(
            f"dot_product_attention: score_mod returns {x.dtype}, and not a real number.",
            where=source.here(),
            fix="return the score that counts; whether a pair is seen is said by a mask_mod",
        )
    return x.astype(dtype)


def _with_slope(jaxpr: Jaxpr) -> Jaxpr:
    place = len(jaxpr.invars) - len(NUMBERS) - 1
    nonzeros = tuple(i == place for i in range(len(jaxpr.invars)))
    both, _ = jvp_jaxpr(jaxpr, nonzeros, (True,))
    one = scalar(1, jaxpr.in_avals[place].dtype)
    return simplify(stage(lambda *args: eval_jaxpr(both, [*args, one]), jaxpr.in_avals, "score_mod"))


class _Spelled:
    """A jaxpr of scalars with structural equality."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        numbers: dict[Any, int] = {v: n for n, v in enumerate(jaxpr.invars)}

        def operand(atom: Any) -> Any:
            return (atom.aval, atom.value.tobytes()) if atom.__class__ is Literal else numbers[atom]

        parts: list[Any] = [tuple(jaxpr.in_avals)]
        for eqn in jaxpr.eqns:
            params = tuple((k, exact(v)) for k, v in sorted(eqn.params.items()))
            parts.append((eqn.prim, params, *map(operand, eqn.invars)))
            numbers |= {v: len(numbers) + n for n, v in enumerate(eqn.outvars)}
        self.key = (*parts, *map(operand, jaxpr.outvars))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spelled) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(512)
def _one_for_all(spelled: _Spelled) -> Jaxpr:
    """The first of structurally identical jaxprs, whose memos and programs all share."""
    return spelled.jaxpr


# -- all pairs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Index arrays of all pairs, in the layout of the scores.

    Scores are [B, K, T, S], or [B, K, T, G, S] with shared heads.

    Attributes:
      batch: indices of the batch entries, int32 [B].
      heads: indices of the query heads, int32 [N].
      queries, keys: their counts.
      key_heads: K.
    """

    batch: Any
    heads: Any
    queries: int
    keys: int
    key_heads: int


def over_pairs(fun: Callable, pairs: Pairs, score: Any = None) -> Any:
    """``fun(b, h, q, k)`` or ``fun(score, b, h, q, k)`` of all pairs, broadcastable."""
    N, K = pairs.heads.shape[0], pairs.key_heads
    shared = N != K
    heads = bnp.reshape(pairs.heads, (K, N // K)) if shared else pairs.heads
    queries, keys = (bnp.arange(n, dtype=dtypes.int32) for n in (pairs.queries, pairs.keys))
    args = [pairs.batch, heads, queries, keys]
    axes = [
        (pairs.batch.shape[0], 0),
        (K, 1),
        (pairs.queries, 2),
        *([(N // K, 1)] if shared else []),
        (pairs.keys, 3),
    ]
    levels = [(size, tuple([n == which for n in range(len(args))])) for size, which in axes]
    if score is not None:
        args, levels = [score, *args], [(size, (True, *mapped)) for size, mapped in levels]
    return _mapped(fun, levels, args)


def _mapped(fun: Callable, levels: Sequence[tuple[int, tuple[bool, ...]]], args: Sequence[Any]) -> Any:
    """``fun`` under a ``vmap`` per level; axes without influence have size 1."""
    if not levels:
        return fun(*args)
    (size, mapped), *inner = levels
    dims = [0 if m else None for m in mapped]
    (out,), (dim,) = batch_flat(lambda *xs: [_mapped(fun, inner, xs)], Axis(size), args, dims)
    return bnp.expand_dims(out, 0) if dim is None else move_dim(out, dim, 0)


def seen(mods: Mods, tables: Sequence[Any], pairs: Pairs) -> Any:
    """The mask as booleans that broadcast to the scores; None: all visible."""
    mask = mods.mask
    if mask is None:
        return None
    held, _ = mods.split(tables)
    return over_pairs(lambda *numbers: eval_jaxpr(mask, [*held, *numbers])[0], pairs)


def modified(mods: Mods, tables: Sequence[Any], pairs: Pairs, scores: Any) -> Any:
    """The modified scores, of the dtype and shape of ``scores``."""
    change = mods.score
    if change is None:
        return scores
    _, held = mods.split(tables)
    own = change.in_avals[len(held)].dtype  # autocast may have changed the dtype since tracing

    def one(score: Any, *numbers: Any) -> Any:
        return eval_jaxpr(change, [*held, score.astype(own), *numbers])[0].astype(scores.dtype)

    return bnp.broadcast_to(over_pairs(one, pairs, scores), scores.shape)
