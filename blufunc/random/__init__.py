"""Random numbers from explicit keys: one key, the same numbers everywhere.

A face. A key is an opaque array element; functions that draw take one key and never change it, so a
key is used once and ``split`` makes more. The generator is threefry2x32, bit for bit JAX's default
(``core/ops/random_bits.py``); samplers follow the algorithms of ``jax.random``, so that programs ported
from it keep their numbers: integers, uniforms and permutations exactly, the others to rounding.

    key = random.key(0)
    key, subkey = random.split(key)
    x = random.normal(subkey, (3,))

Samplers take one key, then the parameters of the distribution, the ``shape`` of the result and its ``dtype``, real
floating (or integer, of integers) unless a docstring says otherwise. Parameters broadcast to ``shape``, by default to
one another, and results are differentiable in real ones, counts excepted.

With ``config.debug_key_reuse`` a key that is used twice is an error.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.random.choices import categorical as categorical
    from blufunc.random.choices import choice as choice
    from blufunc.random.choices import geometric as geometric
    from blufunc.random.choices import permutation as permutation
    from blufunc.random.continuous import cauchy as cauchy
    from blufunc.random.continuous import double_sided_maxwell as double_sided_maxwell
    from blufunc.random.continuous import exponential as exponential
    from blufunc.random.continuous import gumbel as gumbel
    from blufunc.random.continuous import laplace as laplace
    from blufunc.random.continuous import logistic as logistic
    from blufunc.random.continuous import lognormal as lognormal
    from blufunc.random.continuous import maxwell as maxwell
    from blufunc.random.continuous import normal as normal
    from blufunc.random.continuous import pareto as pareto
    from blufunc.random.continuous import rayleigh as rayleigh
    from blufunc.random.continuous import triangular as triangular
    from blufunc.random.continuous import truncated_normal as truncated_normal
    from blufunc.random.continuous import wald as wald
    from blufunc.random.continuous import weibull_min as weibull_min
    from blufunc.random.counts import binomial as binomial
    from blufunc.random.counts import multinomial as multinomial
    from blufunc.random.counts import poisson as poisson
    from blufunc.random.gammas import ball as ball
    from blufunc.random.gammas import beta as beta
    from blufunc.random.gammas import chisquare as chisquare
    from blufunc.random.gammas import dirichlet as dirichlet
    from blufunc.random.gammas import f as f
    from blufunc.random.gammas import gamma as gamma
    from blufunc.random.gammas import generalized_normal as generalized_normal
    from blufunc.random.gammas import loggamma as loggamma
    from blufunc.random.gammas import t as t
    from blufunc.random.keys import PRNGKey as PRNGKey
    from blufunc.random.keys import clone as clone
    from blufunc.random.keys import fold_in as fold_in
    from blufunc.random.keys import key as key
    from blufunc.random.keys import key_data as key_data
    from blufunc.random.keys import key_impl as key_impl
    from blufunc.random.keys import split as split
    from blufunc.random.keys import wrap_key_data as wrap_key_data
    from blufunc.random.matrices import multivariate_normal as multivariate_normal
    from blufunc.random.matrices import orthogonal as orthogonal
    from blufunc.random.uniforms import bernoulli as bernoulli
    from blufunc.random.uniforms import bits as bits
    from blufunc.random.uniforms import rademacher as rademacher
    from blufunc.random.uniforms import randint as randint
    from blufunc.random.uniforms import uniform as uniform
