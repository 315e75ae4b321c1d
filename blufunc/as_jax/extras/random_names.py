"""Names of ``jax.random`` with other spellings. Under the face ``as_jax``."""

from blufunc.as_jax.extras.composed import random_gamma_p
from blufunc.as_jax.extras.prng import key_dtype

__all__ = ["key_dtype", "random_gamma_p"]
