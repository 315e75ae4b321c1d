"""Gamma samples, by rejection, and distributions derived from them.

A face, above ``random.continuous``. A gamma sample is drawn by a loop of a length that chance decides, with a key of
its own; an array of them is that loop under ``vmap``. Its derivative with respect to the shape parameter is implicit:
moving the parameter moves the sample so that its distribution function stays what it is.

G. Marsaglia, W. W. Tsang, "A Simple Method for Generating Gamma Variables" (ACM TOMS 26, 2000).
M. Figurnov, S. Mohamed, A. Mnih, "Implicit Reparameterization Gradients", arXiv:1805.08498.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from blufunc import errors, lax
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import random_bits as rb
from blufunc.core.ops import reduce
from blufunc.core.primitives import linear_ops
from blufunc.random.arguments import (
    Shape,
    check_broadcast,
    float_dtype,
    fresh_key,
    new_keys,
    parameter,
    parameters,
    shape_of,
)
from blufunc.random.continuous import exponential_, normal_
from blufunc.random.uniforms import signs, unit
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.while_loop import while_loop
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.staging.jit import jit

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


def gamma(key: ArrayLike, a: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Samples from the gamma distribution of shape ``a`` and scale 1.

    Args:
      a: the shape parameter, positive: values that broadcast to ``shape``; the result is differentiable in it, once.
    """
    key, dtype = fresh_key("gamma", key), float_dtype("gamma", dtype)
    shape, (a,) = parameters("gamma", shape, dtype, a=a)
    return _gamma(key, a, False)


def loggamma(key: ArrayLike, a: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Logarithms of samples of ``gamma``: for small ``a``, where those would be 0."""
    key, dtype = fresh_key("loggamma", key), float_dtype("loggamma", dtype)
    shape, (a,) = parameters("loggamma", shape, dtype, a=a)
    return _gamma(key, a, True)


@functools.partial(custom_jvp, nondiff_argnums=(2,))
def _gamma(key: Any, a: Any, log_space: bool) -> Any:
    return _gammas(key, a, log_space)


@_gamma.defjvp
def _gamma_jvp(log_space, primals, tangents):
    key, a = primals
    sample = _gamma(key, a, log_space)
    x = sample
    if log_space:
        x = ops.exp(sample)
        x = ops.select(x == 0, scalar(float(dtypes.finfo(x.dtype).tiny), x.dtype), x)
    slope = lax.random_gamma_grad(a, x)
    return sample, tangents[1] * (slope / x if log_space else slope)


@functools.partial(jit, static_argnums=(2,))
def _gammas(key: Any, a: Any, log_space: bool) -> Any:
    shape = a.shape
    keys = rb.random_split_p.bind(key, shape=(a.size,))
    drawn = vmap(functools.partial(_one_gamma, log_space))(keys, linear_ops.reshape(a, (a.size,)))
    return linear_ops.reshape(drawn, shape)


def _one_gamma(log_space: bool, key: Any, a: Any) -> Any:
    """One sample, for ``a`` of rank 0: for those below 1 from a sample of ``a + 1``."""
    dtype = a.dtype
    number = lambda x: scalar(x, dtype)
    third = number(1 / 3)
    large = a >= 1
    d = ops.select(large, a, a + 1) - third
    c = third / ops.sqrt(d)

    def rejected(state):
        _, square, v, u = state
        # the first test needs no logarithm, and nearly always decides
        return ops.bitwise_and(
            u >= 1 - square * square * number(0.0331),
            ops.log(u) >= square * 0.5 + d * ((1 - v) + ops.log(v)),
        )

    def proposal(state):
        key, normal_key, uniform_key = new_keys(state[0], 3)
        _, x, v = while_loop(lambda s: s[2] <= 0, positive_cube_root, (normal_key, number(0), number(-1)))
        return key, x * x, v * v * v, unit(uniform_key, (), dtype)

    def positive_cube_root(state):
        key, subkey = new_keys(state[0])
        x = normal_(subkey, (), dtype)
        return key, x, 1 + x * c

    key, subkey = new_keys(key)
    _, _, v, _ = while_loop(rejected, proposal, (key, number(0), number(1), number(2)))
    if log_space:
        minus = -exponential_(subkey, (), dtype)
        boost = ops.select(ops.bitwise_or(large, minus == 0), number(0), minus * (1 / a))
        return ops.log(d) + ops.log(v) + boost
    boost = ops.select(large, number(1), ops.pow(1 - unit(subkey, (), dtype), 1 / a))
    return d * v * boost


# -- made of gamma samples -------------------------------------------------------------------------


def beta(
    key: ArrayLike, a: ArrayLike, b: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Samples from the beta distribution on (0, 1).

    Its density is proportional to ``x**(a - 1) * (1 - x)**(b - 1)``.

    Args:
      a, b: positive values.
    """
    key, dtype = fresh_key("beta", key), float_dtype("beta", dtype)
    shape, (a, b) = parameters("beta", shape, dtype, a=a, b=b)
    first, second = new_keys(key)
    x, y = _gamma(first, a, True), _gamma(second, b, True)
    top = ops.max(x, y)  # the larger of both becomes 1: neither overflows
    x, y = ops.exp(x - top), ops.exp(y - top)
    return x / (x + y)


def dirichlet(
    key: ArrayLike, alpha: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Samples from the Dirichlet distribution: positive vectors of sum 1.

    Args:
      alpha: the concentrations, positive, of shape [..., n]; the result is differentiable in them.
      shape: of the result without its last axis, to which the leading axes of ``alpha`` broadcast; by default these.
    Raises:
      ShapeError: ``alpha`` has no axis, or does not broadcast.
    """
    name = "dirichlet"
    key, dtype, alpha = fresh_key(name, key), float_dtype(name, dtype), lift(alpha, "alpha")
    if not alpha.ndim:
        raise errors.ShapeError(
            f"random.dirichlet takes concentrations along an axis, not {alpha.aval}.",
            where=source.here(),
            fix="alpha = bnp.ones(3)",
        )
    batch, n = alpha.shape[:-1], alpha.shape[-1]
    shape = batch if shape is None else shape_of(name, shape)
    check_broadcast(name, "alpha without its last axis", batch, shape)
    alpha = linear_ops.broadcast_to(parameter(name, "alpha", alpha, (*shape, n), dtype), (*shape, n))
    return _softmax(_gamma(key, alpha, True))


def _softmax(x: Any) -> Any:
    if not x.size:
        return x
    last = (x.ndim - 1,)
    spread = lambda y: linear_ops.broadcast_in_dim(y, x.shape, tuple(range(x.ndim - 1)))
    x = ops.exp(x - spread(ops.stop_gradient(reduce.reduce_max(x, last))))
    return x / spread(linear_ops.reduce_sum(x, last))


def chisquare(key: ArrayLike, df: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Samples from the chi-square distribution of ``df`` degrees of freedom.

    Args:
      df: positive values.
    """
    key, dtype = fresh_key("chisquare", key), float_dtype("chisquare", dtype)
    shape, (df,) = parameters("chisquare", shape, dtype, df=df)
    return _chisquare(key, df)


def _chisquare(key: Any, df: Any) -> Any:
    return ops.exp(_gamma(key, df / 2, True)) * 2


def f(
    key: ArrayLike, dfnum: ArrayLike, dfden: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Samples from the F distribution: ratios of mean squares of normal numbers.

    Args:
      dfnum, dfden: positive values.
    """
    key, dtype = fresh_key("f", key), float_dtype("f", dtype)
    shape, (dfnum, dfden) = parameters("f", shape, dtype, dfnum=dfnum, dfden=dfden)
    below, above = new_keys(key)
    return _chisquare(above, dfnum) / dfnum / (_chisquare(below, dfden) / dfden)


def t(key: ArrayLike, df: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Samples from Student's t distribution of ``df`` degrees of freedom.

    Args:
      df: positive values.
    """
    key, dtype = fresh_key("t", key), float_dtype("t", dtype)
    shape, (df,) = parameters("t", shape, dtype, df=df)
    first, second = new_keys(key)
    half = df / 2
    return normal_(first, shape, dtype) * ops.sqrt(half / _gamma(second, half, False))


def generalized_normal(
    key: ArrayLike, p: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Samples of density proportional to ``exp(-abs(x)**p)``: generalised normal.

    Args:
      p: positive values.
    """
    name = "generalized_normal"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    shape, (p,) = parameters(name, shape, dtype, p=p)
    return _generalized_normal(key, p)


def _generalized_normal(key: Any, p: Any) -> Any:
    first, second = new_keys(key)
    return signs(second, p.shape, p.dtype) * ops.pow(_gamma(first, 1 / p, False), 1 / p)


def ball(key: ArrayLike, d: int, p: ArrayLike = 2, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Uniform points in the unit ball of ``d`` dimensions of the p-norm.

    F. Barthe, O. Guedon, S. Mendelson, A. Naor, "A probabilistic approach to the geometry of the l_p^n-ball" (2005).

    Args:
      d: the number of dimensions.
      p: the norm, a positive number.
      shape: of the array of points.
    Returns:
      an array of shape ``(*shape, d)``.
    """
    key, dtype, shape = fresh_key("ball", key), float_dtype("ball", dtype), shape_of("ball", shape)
    d = static_int(d, "random.ball", "d")
    if d < 0:
        raise errors.ValueRangeError(
            f"random.ball: d={d} is negative.", where=source.here(), fix="give 0 or more dimensions"
        )
    p = parameter("ball", "p", p, (), dtype)
    first, second = new_keys(key)
    x = _generalized_normal(first, linear_ops.broadcast_to(p, (*shape, d)))
    power = linear_ops.reduce_sum(ops.pow(ops.abs(x), p), (len(shape),)) + exponential_(second, shape, dtype)
    radius = ops.pow(power, 1 / p)
    return x / linear_ops.broadcast_in_dim(radius, (*shape, d), tuple(range(len(shape))))
