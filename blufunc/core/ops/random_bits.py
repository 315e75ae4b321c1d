"""Random bits: threefry2x32 in NumPy, and the primitives on the opaque key dtype.

Core operations. A key is two uint32 words. Everything random is the cipher applied to counters under a
key, so element i of a result depends on the key and on i alone: it is the same on one device and on a
thousand. Bit for bit this is JAX's default generator (``jax_threefry_partitionable``).

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.linear_ops import all_front
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import Factoring, elementwise, leading
from blufunc.core.primitives.tangents import zero

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_BLOCK = 1 << 15  # counters per block: the working set of the rounds then fits in the cache


def threefry2x32(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[np.ndarray, np.ndarray]:
    """The 20-round threefry cipher of counters (``x0``, ``x1``) by a key.

    All are uint32 arrays that broadcast together.
    """
    k0, k1, x0, x1 = (np.asarray(a, np.uint32) for a in (k0, k1, x0, x1))
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    shape = np.broadcast_shapes(k0.shape, x0.shape, k1.shape, x1.shape)
    a, b = (np.array(np.broadcast_to(x, shape)) for x in (x0, x1))
    spare = np.empty(shape, np.uint32)
    # all in place; ufuncs because, unlike operators, they wrap without a warning at rank 0 too
    np.add(a, k0, out=a)
    np.add(b, k1, out=b)
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            np.add(a, b, out=a)
            np.left_shift(b, np.uint32(r), out=spare)
            np.right_shift(b, np.uint32(32 - r), out=b)
            np.bitwise_or(b, spare, out=b)
            np.bitwise_xor(b, a, out=b)
        np.add(a, schedule[(group + 1) % 3], out=a)
        np.add(b, np.add(schedule[(group + 2) % 3], np.uint32(group + 1)), out=b)
    return a, b


def _encipher_counters(keys: np.ndarray, size: int, out: np.ndarray, emit: Callable) -> None:
    """Write ``emit(cipher of counter i)`` to ``out[key, i]``, block by block."""
    few = max(1, _BLOCK // max(size, 1))
    for start in range(0, len(keys), few):
        block = keys[start : start + few, None]
        for first in range(0, size, _BLOCK):
            count = np.arange(first, min(first + _BLOCK, size), dtype=np.uint64)
            lo = count.astype(np.uint32)
            hi = (count >> np.uint64(32)).astype(np.uint32)
            out[start : start + few, first : first + _BLOCK] = emit(
                *threefry2x32(block["hi"], block["lo"], hi, lo)
            )


def _pack(hi: Any, lo: Any) -> np.ndarray:
    out = np.empty(np.shape(hi), dtypes.key)
    out["hi"], out["lo"] = hi, lo
    return out


_EMIT: dict[int, Callable] = {
    8: lambda a, b: (a ^ b).astype(np.uint8),
    16: lambda a, b: (a ^ b).astype(np.uint16),
    32: lambda a, b: a ^ b,
    64: lambda a, b: (a.astype(np.uint64) << np.uint64(32)) | b,
}
"""Conversion of two words to random bits, by width."""


class _Random(Primitive):
    """A kind: maps each integer or key to keys or bits, possibly with trailing axes."""

    kind, fresh = "random", True

    def jvp(self, primals, tangents, **params):
        out = self.bind(*primals, **params)
        return out, zero(out.aval)

    transpose = unsupported("keys and random bits have no derivative")

    def batch(self, axis, args, dims, **params):
        return self.bind(*all_front(axis, args, dims), **params), 0

    def check_keys(self, keys: ShapedArray) -> None:
        """Raise unless ``keys`` are keys."""
        if not dtypes.is_key(keys.dtype):
            raise errors.DtypeError(
                f"{self.name} takes keys, not {keys}.", fix="make one with blufunc.random.key(seed)"
            )

    def check_integers(self, x: ShapedArray, what: str) -> None:
        """Raise unless ``x`` holds integers."""
        if not dtypes.is_integer(x.dtype):
            raise errors.DtypeError(f"{self.name} takes {what} of an integer dtype, not {x}.")


class _Seed(_Random):
    """Keys from integers: high and low word of each; narrow ones have high word 0."""

    name = "random_seed"

    shard = staticmethod(elementwise)

    def impl(self, x):
        x = np.asarray(x)
        lo = x.astype(np.uint32)
        if x.dtype.itemsize < 8:
            return _pack(np.zeros_like(lo), lo)
        return _pack((x.astype(np.uint64) >> np.uint64(32)).astype(np.uint32), lo)

    def abstract(self, x):
        self.check_integers(x, "seeds")
        return ShapedArray(x.shape, dtypes.key)


class _Bits(_Random):
    """Random unsigned integers of ``bit_width`` bits, an array of ``shape`` per key."""

    name = "random_bits"

    def shard(self, avals, outs, **params):
        if math.prod(params["shape"]) >= 2**32:  # shards count their elements in one word
            return leading(0)(avals, outs)
        b = Factoring()
        dims = b.each(outs[0].shape)
        return b.rule([dims[: avals[0].ndim]], [dims], special="random_bits")

    def impl(self, keys, *, shape, bit_width):
        keys = np.asarray(keys)
        size = math.prod(shape)
        out = np.empty((keys.size, size), f"u{bit_width // 8}")
        _encipher_counters(keys.reshape(-1), size, out, _EMIT[bit_width])
        return out.reshape(keys.shape + shape)

    def abstract(self, keys, *, shape, bit_width):
        self.check_keys(keys)
        if bit_width not in _EMIT:
            raise errors.ValueRangeError(f"random_bits has widths of 8, 16, 32 and 64 bits, not {bit_width}.")
        return ShapedArray(keys.shape + shape, np.dtype(f"u{bit_width // 8}"))


class _Split(_Random):
    """New keys: an array of ``shape`` per key."""

    name = "random_split"

    shard = staticmethod(leading(0))

    def impl(self, keys, *, shape):
        keys = np.asarray(keys)
        size = math.prod(shape)
        out = np.empty((keys.size, size), dtypes.key)
        _encipher_counters(keys.reshape(-1), size, out, _pack)
        return out.reshape(keys.shape + shape)

    def abstract(self, keys, *, shape):
        self.check_keys(keys)
        return ShapedArray(keys.shape + shape, dtypes.key)


class _FoldIn(_Random):
    """A new key from each pair of a key and a uint32."""

    name = "random_fold_in"

    shard = staticmethod(elementwise)

    def impl(self, keys, data):
        keys, data = np.asarray(keys), np.asarray(data)
        return _pack(*threefry2x32(keys["hi"], keys["lo"], np.uint32(0), data))

    def abstract(self, keys, data):
        self.check_keys(keys)
        if data.dtype != dtypes.uint32:
            raise errors.DtypeError(f"random_fold_in takes uint32 data, not {data}.")
        if keys.shape != data.shape:
            raise errors.ShapeError(
                f"random_fold_in takes keys and data of one shape, not {keys} and {data}."
            )
        return keys


class _Wrap(_Random):
    """Keys from pairs of uint32 words along the last axis."""

    name = "random_wrap"

    shard = staticmethod(leading(1))

    def impl(self, words):
        return _pack(words[..., 0], words[..., 1])

    def abstract(self, words):
        if words.dtype != dtypes.uint32 or not words.ndim or words.shape[-1] != 2:
            raise errors.ShapeError(f"a key is two uint32 words along the last axis, not {words}.")
        return ShapedArray(words.shape[:-1], dtypes.key)


class _Unwrap(_Random):
    """The two uint32 words of each key, along a new last axis."""

    name = "random_unwrap"

    shard = staticmethod(leading(0))

    def impl(self, keys):
        keys = np.asarray(keys)
        return np.stack([keys["hi"], keys["lo"]], -1)

    def abstract(self, keys):
        self.check_keys(keys)
        return ShapedArray((*keys.shape, 2), dtypes.uint32)


random_seed_p = _Seed()
random_bits_p = _Bits()
random_split_p = _Split()
random_fold_in_p = _FoldIn()
random_wrap_p = _Wrap()
random_unwrap_p = _Unwrap()
