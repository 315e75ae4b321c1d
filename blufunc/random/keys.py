"""Keys: created from seeds or words, split, and folded with integers.

A face, above ``random.arguments``. A key is an element of an opaque dtype of two 32-bit words, so arrays of keys are
indexed, stacked and mapped over like any array, and arithmetic on them is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy, lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import random_bits as rb
from blufunc.random.arguments import Shape, any_keys, fresh_key, is_words, one_key, shape_of

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

IMPL = "threefry2x32"
"""The name of the one generator."""


def key(seed: Any, *, impl: Any = None, dtype: DTypeLike | None = None) -> Array:
    """A key from an integer.

    Args:
      seed: an int, or an integer array of rank 0. Seeds that fit in 32 bits give JAX's keys (negative ones wrap);
        wider ones, up to 64 bits, give those of JAX with x64 enabled.
      impl: the generator: None or ``"threefry2x32"``, the only one there is.
      dtype: the dtype of the key, instead of ``impl``.
    Returns:
      a key: rank 0, dtype ``key<fry>``.
    Raises:
      ArgumentError: the seed is not an integer, or has axes.
      ValueRangeError: it does not fit in 64 bits, or there is no such generator.
    """
    _check_impl("key", impl if dtype is None else dtype)
    if isinstance(seed, (int, np.integer)):
        seed = int(seed)
        if not -(2**63) <= seed < 2**64:
            raise errors.ValueRangeError(
                f"the seed {seed} does not fit in 64 bits.", where=source.here(), fix="seed % 2**64"
            )
        wide = np.uint64 if seed >= 2**63 else np.int64 if seed >= 2**31 or seed < -(2**31) else np.int32
        return rb.random_seed_p.bind(from_numpy(np.asarray(seed, wide)))
    seed = lift(seed, "the seed")
    if not dtypes.is_integer(seed.dtype) or seed.ndim:
        raise errors.ArgumentError(
            f"a seed is one integer, not {seed.aval}.",
            where=source.here(),
            fix="random.key(0); for several keys, split one: random.split(random.key(0), n)",
        )
    return rb.random_seed_p.bind(seed)


def PRNGKey(seed: Any, *, impl: Any = None) -> Array:
    """``key``, by its older name.

    In JAX this gives a uint32 array; here keys are never plain numbers, and the functions that take keys take this
    one. ``key_data`` gives its words.
    """
    _check_impl("PRNGKey", impl)
    return key(seed)


def key_impl(keys: ArrayLike) -> str:
    """The name of the generator that keys are for: ``"threefry2x32"``."""
    any_keys("key_impl", keys)
    return IMPL


def key_data(keys: ArrayLike) -> Array:
    """The words of keys of any shape: uint32, with a last axis of size 2."""
    return rb.random_unwrap_p.bind(any_keys("key_data", keys))


def wrap_key_data(key_bits_array: ArrayLike, *, impl: Any = None, dtype: DTypeLike | None = None) -> Array:
    """Keys from uint32 words, a last axis of size 2: the inverse of ``key_data``."""
    _check_impl("wrap_key_data", impl if dtype is None else dtype)
    data = lift(key_bits_array)
    if data.dtype != dtypes.uint32 or not data.ndim or data.shape[-1] != 2:
        raise errors.ArgumentError(
            f"wrap_key_data takes uint32 words with a last axis of size 2, not {data.aval}.",
            where=source.here(),
            fix="random.key(seed) makes a key; words.astype('uint32') are words",
        )
    return rb.random_wrap_p.bind(data)


def split(key: ArrayLike, num: Shape = 2) -> Array:
    """New keys from one, which is not to be used again.

    Args:
      num: the number of keys, or the shape of an array of them.
    Returns:
      keys of shape ``(num,)``, or ``num``; iterate over them or unpack them. Words, if ``key`` is two uint32 words.
    """
    keys = rb.random_split_p.bind(fresh_key("split", key), shape=shape_of("split", num))
    return key_data(keys) if is_words(key) else keys


def fold_in(key: ArrayLike, data: ArrayLike) -> Array:
    """A new key from a key and an integer, such as the number of a step or of a layer.

    Args:
      data: a non-negative int below 2**32, or an integer array of rank 0 (taken modulo 2**32).
    """
    words, key = is_words(key), one_key("fold_in", key)
    if isinstance(data, int):
        if not 0 <= data < 2**32:
            raise errors.ValueRangeError(
                f"fold_in: {data} does not fit in uint32.", where=source.here(), fix="data % 2**32"
            )
        data = scalar(data, dtypes.uint32)
    data = lift(data, "data")
    if not dtypes.is_integer(data.dtype) or data.ndim:
        raise errors.ArgumentError(
            f"fold_in takes one integer, not {data.aval}.",
            where=source.here(),
            fix="for several use vmap(random.fold_in, in_axes=(None, 0))(key, data)",
        )
    folded = rb.random_fold_in_p.bind(key, ops.convert(data, dtypes.uint32))
    return key_data(folded) if words else folded


def clone(key: ArrayLike) -> Array:
    """Clone a key, of any shape, to draw the same values again on purpose.

    The check for keys that are used twice (``config.debug_key_reuse``) takes it for another key.
    """
    return ops.copy(any_keys("clone", key))


def _check_impl(name: str, impl: Any) -> None:
    if impl is None or (isinstance(impl, str) and impl in (IMPL, "fry")):
        return
    if isinstance(impl, np.dtype) and dtypes.is_key(impl):
        return
    raise errors.ValueRangeError(
        f"random.{name}: there is no generator {impl!r:.60}.",
        where=source.here(),
        fix=f"leave impl out, or impl={IMPL!r}",
    )
