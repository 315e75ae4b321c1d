"""Choice of the next token: temperature, filters of unlikely tokens, penalties.

A face, above ``blufunc.random``. Filters apply in the order of Hugging Face's ``generate``: penalty, temperature,
``top_k``, ``top_p``, ``min_p``. Only ``top_p`` without ``top_k`` sorts the whole vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ops.rows import wide_dtype
from blufunc.nn.activations import softmax
from blufunc.numpy.promotion import fits

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def sample(
    key: ArrayLike | None,
    logits: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    repetition_penalty: ArrayLike | None = None,
    previous: ArrayLike | None = None,
) -> Array:
    """Tokens drawn from ``softmax(logits / temperature)`` without unlikely ones.

    Args but ``top_k`` may be traced, and differ between rows: one program serves requests of different settings.

    Args:
      key: one key for all rows; may be None if ``temperature`` is the number 0.
      logits: floats [..., V].
      temperature: a number, or one for each row [...], from 0 on; 0 takes the largest logit.
      top_k: keep the ``top_k`` largest; None for all. Of equal ones, those of lower index.
      top_p: keep the fewest of the largest whose probabilities sum up to ``top_p`` or more, at least one (Holtzman
        et al., arXiv:1904.09751).
      min_p: keep those of a probability of at least ``min_p`` times the largest (arXiv:2407.01082).
      repetition_penalty: divides positive logits of ``previous`` tokens, multiplies negative ones (arXiv:1909.05858).
      previous: the tokens that are penalized: integers [..., L], of which negative ones count for nothing, or a mask
        [..., V] of booleans.
    Returns:
      int32 [...].
    Raises:
      ArgumentError: there is no key, or a penalty without ``previous``.
      DtypeError: logits are not floats, or ``previous`` holds floats.
      ShapeError: shapes do not match.
      ValueRangeError: a number is out of its range.
    """
    name = "sample"
    logits = _penalized(name, logits, repetition_penalty, previous)
    if isinstance(temperature, (int, float)) and temperature == 0:
        return bnp.argmax(logits, axis=-1).astype(dtypes.int32)
    if key is None:
        raise errors.ArgumentError(
            "sample needs a key unless the temperature is 0.",
            where=source.here(),
            fix="temperature=0, or key=random.key(0)",
        )
    kept = _filtered(name, logits, temperature, top_k, top_p, min_p)
    drawn = random.categorical(key, kept.values)
    if kept.tokens is not None:
        drawn = bnp.take_along_axis(kept.tokens, drawn[..., None], axis=-1)[..., 0]
    if kept.greedy is not None:
        drawn = bnp.where(kept.greedy, _largest(logits, kept), drawn)
    return drawn.astype(dtypes.int32)


def filtered_logits(
    logits: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    repetition_penalty: ArrayLike | None = None,
    previous: ArrayLike | None = None,
) -> Array:
    """Logits of the distribution that ``sample`` draws from: -inf for excluded tokens.

    For speculative decoding (arXiv:2211.17192), beam search, or the probabilities of tokens. At temperature 0, the
    largest logit is 0 and all others are excluded.

    Args:
      logits, temperature, top_k, top_p, min_p, repetition_penalty, previous: see ``sample``.
    Returns:
      floats [..., V], float32 at least.
    """
    name = "filtered_logits"
    logits = _penalized(name, logits, repetition_penalty, previous)
    kept = _filtered(name, logits, temperature, top_k, top_p, min_p)
    values = kept.values
    if kept.tokens is not None:
        excluded = bnp.full(logits.shape, -bnp.inf, values.dtype)
        values = bnp.put_along_axis(excluded, kept.tokens, values, axis=-1, inplace=False)
    if kept.greedy is None:
        return values
    places = bnp.arange(logits.shape[-1], dtype=dtypes.int32)
    only = bnp.where(places == _largest(logits, kept)[..., None], 0.0, -bnp.inf).astype(values.dtype)
    return bnp.where(kept.greedy[..., None], only, values)


# -- parts -----------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """Logits after the filters.

    Attributes:
      values: [..., n], -inf where excluded.
      tokens: the tokens of these logits, largest first; None for all in order.
      greedy: True for rows of temperature 0; None for none.
    """

    values: Any
    tokens: Any
    greedy: Any


def _filtered(name: str, logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> _Kept:
    rows, vocabulary = logits.shape[:-1], logits.shape[-1]
    fixed = isinstance(temperature, (int, float)) and temperature > 0
    temperature = _per_row(name, "temperature", temperature, rows, 0, None)
    greedy = None if fixed else bnp.broadcast_to(temperature == 0, rows)
    values = logits / (temperature if fixed else bnp.where(temperature == 0, 1, temperature))[..., None]
    tokens = None
    if top_k is not None:
        top_k = static_int(top_k, name, "top_k")
        if top_k < 1:
            raise errors.ValueRangeError(
                f"{name}: top_k={top_k} keeps no token.", where=source.here(), fix="top_k=50, or None for all"
            )
    if top_k is not None and top_k < vocabulary:
        values, tokens = lax.top_k(values, top_k)
    elif top_p is not None:
        places = lax.broadcasted_iota(dtypes.int32, values.shape, values.ndim - 1)
        values, tokens = lax.sort_key_val(-values, places)
        values = -values
    largest = None if tokens is None else values[..., :1]
    if top_p is not None:
        top_p = _per_row(name, "top_p", top_p, rows, 0, 1)
        shares = softmax(values)
        first = bnp.arange(values.shape[-1]) == 0  # at least one token remains
        values = bnp.where(first | (bnp.cumsum(shares, -1) - shares < top_p[..., None]), values, -bnp.inf)
    if min_p is not None:
        min_p = _per_row(name, "min_p", min_p, rows, 0, 1)
        largest = bnp.max(values, axis=-1, keepdims=True) if largest is None else largest
        values = bnp.where(values >= largest + bnp.log(min_p)[..., None], values, -bnp.inf)
    return _Kept(values, tokens, greedy)


def _largest(logits: Any, kept: _Kept) -> Any:
    """The token of the largest logit."""
    return bnp.argmax(logits, axis=-1).astype(dtypes.int32) if kept.tokens is None else kept.tokens[..., 0]


def _penalized(name: str, logits: Any, penalty: Any, previous: Any) -> Any:
    """Logits, float32 at least, with those of ``previous`` reduced."""
    logits = bnp.asarray(logits)
    if not dtypes.is_floating(logits.dtype):
        raise errors.DtypeError(
            f"{name} takes floating logits, not {logits.aval}.",
            where=source.here(),
            fix="logits.astype('float32')",
        )
    if not logits.ndim or not logits.shape[-1]:
        raise errors.ShapeError(
            f"{name}: logits of shape {tuple(logits.shape)} have no tokens.",
            where=source.here(),
            fix="logits of [..., V]",
        )
    logits = logits.astype(wide_dtype(logits.dtype))
    if penalty is None:
        return logits
    if previous is None:
        raise errors.ArgumentError(
            f"{name}: a repetition_penalty without the previous tokens.",
            where=source.here(),
            fix="previous=tokens[:, :n]",
        )
    penalty = _per_row(name, "repetition_penalty", penalty, logits.shape[:-1], 0, None)[..., None]
    changed = bnp.where(logits > 0, logits / penalty, logits * penalty)
    return bnp.where(_occurs(name, bnp.asarray(previous), logits.shape), changed, logits)


def _occurs(name: str, previous: Any, shape: tuple[int, ...]) -> Any:
    """True for the tokens of ``previous``, [..., V]."""
    is_mask, (*rows, vocabulary) = dtypes.is_bool(previous.dtype), shape
    if not is_mask and not dtypes.is_integer(previous.dtype):
        raise errors.DtypeError(
            f"{name}: previous tokens are integers, not {previous.aval}.",
            where=source.here(),
            fix="previous.astype('int32'), or a mask of booleans [..., V]",
        )
    if not previous.ndim or previous.shape[:-1] != tuple(rows) or (is_mask and previous.shape != shape):
        raise errors.ShapeError(
            f"{name}: previous of shape {tuple(previous.shape)} does not go with logits of shape {shape}.",
            where=source.here(),
            fix="previous of [..., L] with the leading axes of the logits",
        )
    if is_mask:
        return previous
    tokens = previous.reshape((-1, previous.shape[-1]))
    n = tokens.shape[0]
    tokens = bnp.where(tokens < 0, vocabulary, tokens)
    return (
        bnp.zeros((n, vocabulary), bool)
        .at[bnp.arange(n)[:, None], tokens]
        .set(True, mode="drop")
        .reshape(shape)
    )


def _per_row(name: str, what: str, x: Any, rows: tuple[int, ...], least: float, most: float | None) -> Any:
    """``x``, a number or one per row, in float32; numbers are checked."""
    if isinstance(x, (int, float)) and (x < least or (most is not None and x > most) or x != x):
        raise errors.ValueRangeError(
            f"{name}: {what}={x} is out of range.",
            where=source.here(),
            fix=f"{what} from {least} on" if most is None else f"{least} <= {what} <= {most}",
        )
    x = bnp.asarray(x, dtype=dtypes.float32)
    if not fits(x.shape, rows):
        raise errors.ShapeError(
            f"{name}: {what} of shape {tuple(x.shape)} is not one number for each row of {tuple(rows)}.",
            where=source.here(),
        )
    return x
