"""``rng_bit_generator``: the generator of ``random`` under XLA's signature.

A face over the random operations of the core.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import shape_of
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import random_bits as rb
from blufunc.core.ops.shape import slice_
from blufunc.core.primitives.linear_ops import reshape


class RandomAlgorithm(enum.IntEnum):
    """The generators of ``rng_bit_generator``: threefry, by default too."""

    RNG_DEFAULT = 0
    RNG_THREE_FRY = 1
    RNG_PHILOX = 2


def rng_bit_generator(
    key: Any,
    shape: Sequence[int],
    dtype: Any = dtypes.uint32,
    algorithm: RandomAlgorithm = RandomAlgorithm.RNG_DEFAULT,
    *,
    out_sharding: None = None,
) -> tuple[Any, Any]:
    """Random unsigned integers, and the key of the next call.

    They are the same on every device, and not XLA's, which depend on it.

    Args:
      key: uint32 of shape (4,) or (2,), or uint64 of shape (2,).
      shape: of the result.
      dtype: uint8, uint16, uint32 or uint64.
      algorithm: ``RNG_DEFAULT`` or ``RNG_THREE_FRY``, which are the same.
      out_sharding: None.
    Returns:
      a key like ``key``, and the integers.
    Raises:
      ArgumentError: the key is something else.
      DtypeError: ``dtype`` is something else.
      UnsupportedError: the algorithm is ``RNG_PHILOX``, or ``out_sharding`` is given.
    """
    if (
        algorithm not in (RandomAlgorithm.RNG_DEFAULT, RandomAlgorithm.RNG_THREE_FRY)
        or out_sharding is not None
    ):
        raise errors.UnsupportedError(
            f"rng_bit_generator: algorithm={algorithm!r}, out_sharding={out_sharding!r:.60}.",
            where=source.here(),
            why="threefry is the one generator, and its results are sharded as what reads them.",
            fix="leave both out",
        )
    words, wanted = lift(key, "the key"), dtypes.as_dtype(dtype)
    if not dtypes.is_unsigned(wanted):
        raise errors.DtypeError(
            f"rng_bit_generator makes unsigned integers, not {wanted}.",
            where=source.here(),
            fix="dtype='uint32'",
        )
    kind = (words.aval.dtype, words.aval.shape)
    if kind not in ((dtypes.uint32, (4,)), (dtypes.uint32, (2,)), (dtypes.uint64, (2,))):
        raise errors.ArgumentError(
            f"rng_bit_generator takes a key of uint32[4], uint32[2] or uint64[2], not {words.aval}.",
            where=source.here(),
            fix="random.key_data(random.key(0))",
        )
    narrow = ew.bitcast(words, dtypes.uint32) if words.aval.dtype == dtypes.uint64 else words
    flat = reshape(narrow, (narrow.aval.size,))
    drawn = rb.random_wrap_p.bind(slice_(flat, (0,), (2,), None))
    for i in range(2, flat.aval.size):  # the other words choose a stream of the same key
        drawn = rb.random_fold_in_p.bind(drawn, _element(flat, i))
    keys = rb.random_split_p.bind(drawn, shape=(2,))
    width = 8 * wanted.itemsize
    bits = rb.random_bits_p.bind(
        _element(keys, 0), shape=shape_of(shape, "rng_bit_generator"), bit_width=width
    )
    new = rb.random_bits_p.bind(_element(keys, 1), shape=narrow.aval.shape, bit_width=32)
    return ew.bitcast(new, words.aval.dtype) if new.aval.shape != words.aval.shape else new, bits


def _element(x: Any, i: int) -> Any:
    return reshape(slice_(x, (i,), (i + 1,), None), ())
