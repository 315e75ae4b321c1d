"""``jax.extend.random``: the one generator, and its hash.

Under the face ``as_jax``. Keys are threefry's; JAX's other generators are XLA's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.as_jax.extras.composed import Composed
from blufunc.core.ir import dtypes, source

__all__ = [
    "key_dtype",
    "random_seed",
    "seed_with_impl",
    "threefry2x32_p",
    "threefry_2x32",
    "threefry_prng_impl",
]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


@dataclass(frozen=True)
class PRNGImpl:
    """A generator: the shape of its keys in words, and its functions of words."""

    key_shape: tuple[int, ...]
    seed: Callable
    split: Callable
    random_bits: Callable
    fold_in: Callable
    name: str = "threefry2x32"
    tag: str = "fry"


def _words(function: Callable) -> Callable:
    """A function of a key as one of its words."""
    return lambda key, *args: random.key_data(function(random.wrap_key_data(key), *args))


def _bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    return random.bits(random.wrap_key_data(key), shape, f"uint{bit_width}")


threefry_prng_impl = PRNGImpl(
    (2,), lambda seed: random.key_data(random.key(seed)), _words(random.split), _bits, _words(random.fold_in)
)


def key_dtype(impl_spec: Any = None) -> Any:
    """The dtype of keys, of which there is one.

    Raises:
      UnsupportedError: another generator.
    """
    name = getattr(impl_spec, "name", impl_spec)
    if name not in (None, "threefry2x32", dtypes.key):
        raise errors.UnsupportedError(
            f"key_dtype({name!r:.60}): threefry2x32 is the only generator.", where=source.here()
        )
    return dtypes.key


def random_seed(seeds: Any, impl: PRNGImpl) -> Any:
    """Keys of seeds."""
    key_dtype(impl)
    seeds = bnp.asarray(seeds)
    keys = [random.key_data(random.key(int(s))) for s in seeds.reshape(-1)] if seeds.ndim else None
    if keys is None:
        return random.key(seeds)
    return random.wrap_key_data(bnp.stack(keys).reshape(*seeds.shape, 2))


def seed_with_impl(impl: PRNGImpl, seed: Any) -> Any:
    """The key of a seed."""
    return random_seed(seed, impl)


def _hash(k0: Any, k1: Any, x0: Any, x1: Any) -> list[Any]:
    """Threefry-2x32 with 20 rounds.

    J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    schedule = (k0, k1, k0 ^ k1 ^ bnp.uint32(_PARITY))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << rotation) | (x1 >> (32 - rotation)))
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + bnp.uint32(group + 1)
    return [x0, x1]


threefry2x32_p = Composed("threefry2x32", _hash, multiple_results=True)


def threefry_2x32(keypair: Any, count: Any) -> Any:
    """The hash of counters by a key: the first half of the counters with the second.

    Args:
      keypair: two words, uint32.
      count: uint32 counters, of any shape; an odd number is padded with a zero.
    """
    k0, k1 = (bnp.asarray(k, "uint32") for k in keypair)
    flat = bnp.asarray(count).reshape(-1)
    if flat.dtype != "uint32":
        raise errors.DtypeError(f"threefry_2x32 hashes uint32, not {flat.dtype}.", where=source.here())
    size = flat.size
    padded = bnp.concatenate([flat, bnp.zeros(size % 2, "uint32")])
    x0, x1 = bnp.split(padded, 2)
    return bnp.concatenate(_hash(k0, k1, x0, x1))[:size].reshape(bnp.shape(count))
