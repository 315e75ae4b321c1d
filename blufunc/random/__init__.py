"""Random numbers from explicit keys: the same key gives the same numbers, everywhere.

A face. A key is an opaque array element; functions that draw take one key and never change it, so a
key is used once and ``split`` makes more. The generator is threefry2x32, bit for bit JAX's default
(``core/ops/random_bits.py``); samplers follow the algorithms of ``jax.random``, so that programs ported
from it keep their numbers: integers, uniforms and permutations exactly, the others to rounding.

    key = random.key(0)
    key, subkey = random.split(key)
    x = random.normal(subkey, (3,))

With ``config.debug_key_reuse`` a key that is used twice is an error.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.random.choices import categorical, choice, geometric, permutation
    from blufunc.random.continuous import (
        cauchy,
        double_sided_maxwell,
        exponential,
        gumbel,
        laplace,
        logistic,
        lognormal,
        maxwell,
        normal,
        pareto,
        rayleigh,
        triangular,
        truncated_normal,
        wald,
        weibull_min,
    )
    from blufunc.random.counts import binomial, multinomial, poisson
    from blufunc.random.gammas import (
        ball,
        beta,
        chisquare,
        dirichlet,
        f,
        gamma,
        generalized_normal,
        loggamma,
        t,
    )
    from blufunc.random.keys import PRNGKey, clone, fold_in, key, key_data, key_impl, split, wrap_key_data
    from blufunc.random.matrices import multivariate_normal, orthogonal
    from blufunc.random.uniforms import bernoulli, bits, rademacher, randint, uniform

__all__ = [
    "PRNGKey", "clone", "fold_in", "key", "key_data", "key_impl", "split", "wrap_key_data",
    "bernoulli", "bits", "rademacher", "randint", "uniform",
    "cauchy", "double_sided_maxwell", "exponential", "gumbel", "laplace", "logistic", "lognormal", "maxwell",
    "normal", "pareto", "rayleigh", "triangular", "truncated_normal", "wald", "weibull_min",
    "ball", "beta", "chisquare", "dirichlet", "f", "gamma", "generalized_normal", "loggamma", "t",
    "multivariate_normal", "orthogonal",
    "binomial", "multinomial", "poisson",
    "categorical", "choice", "geometric", "permutation",
]  # fmt: skip
