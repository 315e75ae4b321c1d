"""Layouts of key-value caches, and empty ones.

A face. Of each layout: which arrays it has, and at which slot of them a position lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


class Contiguous(NamedTuple):
    """``keys`` and ``values`` [B, S, K, H]: position p lies at p."""

    keys: Any
    values: Any


class Ring(NamedTuple):
    """``keys`` and ``values`` [B, S, K, H]: position p lies at ``p % S``.

    The last S positions are kept, for sliding windows.
    """

    keys: Any
    values: Any


class Paged(NamedTuple):
    """Pools ``keys``, ``values`` [P, size, K, H]; ``tables`` of pages int32 [B, n].

    Position p of entry b lies in page ``tables[b, p // size]`` at ``p % size``. A negative number stands for no page:
    what is written there is dropped.
    """

    keys: Any
    values: Any
    tables: Any


Cache = Contiguous | Ring | Paged

C = TypeVar("C", Contiguous, Ring, Paged)


def contiguous(
    batch: int, length: int, key_heads: int, features: int, dtype: DTypeLike = "float32"
) -> Contiguous:
    """An empty cache of ``length`` positions.

    Args:
      batch: B, the number of sequences.
      length: S, the number of positions of prompt and reply together.
      key_heads: K.
      features: H, of a head.
      dtype: the dtype of keys and values.
    Raises:
      ValueRangeError: a size is less than 1.
    """
    return Contiguous(*_empty("contiguous", batch, length, key_heads, features, dtype))


def ring(batch: int, length: int, key_heads: int, features: int, dtype: DTypeLike = "float32") -> Ring:
    """An empty cache of the last ``length`` positions.

    A prompt that is longer attends to its own keys: ``dot_product_attention(..., local_window_size=(window - 1, 0))``;
    ``update`` keeps its end.

    Args:
      batch: B, the number of sequences.
      length: S: the window, and one position less than the queries of a call to ``attention``.
      key_heads: K.
      features: H, of a head.
      dtype: the dtype of keys and values.
    Raises:
      ValueRangeError: a size is less than 1.
    """
    return Ring(*_empty("ring", batch, length, key_heads, features, dtype))


def paged(
    tables: ArrayLike, pages: int, size: int, key_heads: int, features: int, dtype: DTypeLike = "float32"
) -> Paged:
    """An empty cache of ``pages`` pages, which sequences share (arXiv:2309.06180).

    Which pages a sequence has is the caller's to decide: ``cache._replace(tables=...)`` between steps gives it more,
    or those of a sequence that has ended.

    Args:
      tables: the pages of each sequence, in order, integers [B, n]; negative for none.
      pages: P, the number of pages in the pool.
      size: the number of positions of a page.
      key_heads: K.
      features: H, of a head.
      dtype: the dtype of keys and values.
    Raises:
      ShapeError, DtypeError: ``tables`` is not of integers [B, n].
      ValueRangeError: a size is less than 1.
    """
    tables = bnp.asarray(tables)
    if tables.ndim != 2:
        raise errors.ShapeError(
            f"paged: tables of shape {tuple(tables.shape)} are not [batch, pages of a sequence].",
            where=source.here(),
            fix="tables = arange(B * n).reshape(B, n)",
        )
    if not dtypes.is_integer(tables.dtype):
        raise errors.DtypeError(
            f"paged: tables hold integers, not {tables.dtype}.",
            where=source.here(),
            fix="tables.astype('int32')",
        )
    arrays = _empty("paged", pages, size, key_heads, features, dtype)
    return Paged(*arrays, tables.astype(dtypes.int32))


def _empty(name: str, *given: Any) -> tuple[Any, Any]:
    *sizes, dtype = given
    shape = tuple([static_int(n, name, "a size") for n in sizes])
    if min(shape) < 1:
        raise errors.ValueRangeError(
            f"{name}: a cache of the shape {shape}.", where=source.here(), fix="sizes from 1 on"
        )
    return bnp.zeros(shape, dtype), bnp.zeros(shape, dtype)


# -- checks ----------------------------------------------------------------------------------------


def check_is_cache(name: str, cache: Any) -> None:
    """Raise ArgumentError unless ``cache`` is one."""
    if not isinstance(cache, (Contiguous, Ring, Paged)):
        raise errors.ArgumentError(
            f"{name}: a {type(cache).__name__} is no cache.",
            where=source.here(),
            fix="cache = nn.cache.contiguous(batch, length, key_heads, features)",
        )


def checked(name: str, cache: Any, batch: int, heads: int, features: int) -> None:
    """Raise unless ``cache`` is one, of this batch, key heads and features."""
    check_is_cache(name, cache)
    own = cache.tables.shape[0] if isinstance(cache, Paged) else cache.keys.shape[0]
    if (own, *cache.keys.shape[2:]) != (batch, heads, features):
        raise errors.ShapeError(
            f"{name}: a batch of {batch} with {heads} key heads of {features} features meets a cache of {own}, "
            f"{cache.keys.shape[2]} and {cache.keys.shape[3]}.",
            where=source.here(),
        )


def per_entry(name: str, what: str, x: Any, batch: int) -> Any:
    """``x``, an integer or one for each batch entry, as int32 of rank 0 or 1."""
    x = bnp.asarray(x)
    if x.shape not in ((), (batch,)) or not dtypes.is_integer(x.dtype):
        raise errors.ArgumentError(
            f"{name}: {what} is {x.aval}.",
            where=source.here(),
            why=f"it is an integer, or one for each of the {batch} batch entries.",
            fix=f"{what}.astype('int32')" if x.shape in ((), (batch,)) else None,
        )
    return x.astype(dtypes.int32)
