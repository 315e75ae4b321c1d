"""Score modifiers for ``dot_product_attention(score_mod=...)``.

A face. Each returns a user-style function (score, b, h, q, k) -> score of a scaled dot product and the
indices of batch entry, query head, query and key. To combine two, write a function that calls both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source

__all__ = ["alibi", "alibi_slopes", "relative_bias", "soft_cap"]


def alibi(slopes: Any) -> Callable:
    """``score - slopes[h] * |q - k|``: far keys count less (arXiv:2108.12409).

    Args:
      slopes: floats [N], one for each query head; those of the paper are ``alibi_slopes(N)``.
    """
    slopes = _table("alibi", "slopes", slopes, 1)
    return lambda score, b, h, q, k: score - slopes[h] * abs(q - k)


def alibi_slopes(heads: int) -> Any:
    """The slopes of the paper, float32 [heads]: ``2 ** (-8 * i / heads)``, i >= 1."""
    return bnp.asarray(np.exp2(-8 * np.arange(1, heads + 1, dtype=np.float32) / heads))


def soft_cap(c: float) -> Callable:
    """``c * tanh(score / c)``: bounds scores by ``c`` (Gemma 2, arXiv:2408.00118, 2).

    Raises:
      ValueRangeError: ``c`` is not positive.
    """
    if not c > 0:
        raise errors.ValueRangeError(
            f"soft_cap: a bound of {c}.", where=source.here(), fix="a positive number"
        )
    return lambda score, b, h, q, k: c * bnp.tanh(score / c)


def relative_bias(table: Any) -> Callable:
    """``score + table[h, k - q + R]``, a learnable relative position bias.

    Shaw et al., arXiv:1803.02155; as scalars, Raffel et al., arXiv:1910.10683.

    Args:
      table: floats [N, 2 * R + 1]; keys farther away than R use the last entry on their side.
    Raises:
      ShapeError: the table is not of rank 2, or has an even number of distances.
    """
    table = _table("relative_bias", "table", table, 2)
    if table.shape[1] % 2 == 0:
        raise errors.ShapeError(
            f"relative_bias: a table of shape {tuple(table.shape)}.",
            where=source.here(),
            why="the distances are -R to R, an odd number.",
        )
    far = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[h, bnp.clip(k - q, -far, far) + far]


def _table(name: str, what: str, x: Any, ndim: int) -> Any:
    x = bnp.asarray(x)
    if x.ndim != ndim or not dtypes.is_floating(x.dtype):
        raise errors.ShapeError(
            f"{name}: {what} of shape {tuple(x.shape)} and dtype {x.dtype}.",
            where=source.here(),
            fix=f"{what} are floats with {ndim} {'axis' if ndim == 1 else 'axes'}",
        )
    return x
