"""Counts of events, by rejection: Poisson, binomial and multinomial samples.

A face, above ``random.uniforms``. Small means are drawn by counting waiting times until they exceed the interval, large
ones by a transformed rejection; both loops run over the whole array until its last element is done, and each element
takes the one that fits its mean.

W. Hörmann, "The transformed rejection method for generating Poisson random variables" (Insurance: Mathematics and
Economics 12, 1993), algorithm PTRS, and "The generation of binomial random variates" (Journal of Statistical
Computation and Simulation 46, 1993), algorithm BTRS.
D. E. Knuth, "The Art of Computer Programming" 2, 3.4.1 (1969); L. Devroye, "Generating the maximum of independent
identically distributed random variables", "Non-Uniform Random Variate Generation", X.4 (1986).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ops import cumulative, reduce
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import random_bits as rb
from blufunc.core.primitives import linear_ops
from blufunc.random.arguments import (
    Shape,
    broadcast,
    check_broadcast,
    common_shape,
    float_dtype,
    fresh_key,
    integer_dtype,
    new_keys,
    real,
    shape_of,
)
from blufunc.random.choices import take
from blufunc.random.uniforms import unit
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.control_flow.while_loop import while_loop
from blufunc.transforms.staging.jit import jit

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


def _any(x: Any) -> Any:
    return reduce.reduce_or(x, tuple(range(x.ndim)))


# -- Poisson ---------------------------------------------------------------------------------------


def poisson(key: ArrayLike, lam: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = int) -> Array:
    """Samples from the Poisson distribution of mean ``lam``.

    Args:
      lam: numbers from 0 on that broadcast to ``shape``; they are taken in float32.
      dtype: an integer dtype, which the samples must fit in.
    """
    name = "poisson"
    key, dtype, lam = fresh_key(name, key), integer_dtype(name, dtype), real(name, "lam", lam)
    shape = lam.shape if shape is None else shape_of(name, shape)
    lam = linear_ops.broadcast_to(ops.convert(broadcast(name, "lam", lam, shape), dtypes.float32), shape)
    return _poisson(key, lam, dtype)


@functools.partial(jit, static_argnums=(2,))
def _poisson(key: Any, lam: Any, dtype: np.dtype) -> Any:
    small = ops.bitwise_or(lam != lam, lam < 10)
    # each loop gets harmless means where the other one serves
    counted = _poisson_by_counting(key, ops.select(small, lam, scalar(0.0, dtypes.float32)), dtype)
    rejected = _poisson_by_rejection(key, ops.select(small, scalar(1e5, dtypes.float32), lam), dtype)
    drawn = ops.select(small, counted, rejected)
    return ops.select(lam == 0, scalar(0, dtype), drawn)


def _steps(dtype: np.dtype) -> Any:
    """The maximum number of loop steps: the result dtype's maximum, within 32 bits."""
    return scalar(min(dtypes.iinfo(dtype).max, 2**31 - 1), dtypes.int32)


def _poisson_by_counting(key: Any, lam: Any, dtype: np.dtype) -> Any:
    """Poisson count as the number of exponential waiting times within ``lam``."""
    steps = _steps(dtype)

    def waiting(state):
        i, _, _, log_product = state
        return ops.bitwise_and(_any(log_product > -lam), i < steps)

    def wait(state):
        i, k, key, log_product = state
        key, subkey = new_keys(key)
        k = ops.select(log_product > -lam, k + 1, k)
        return i + 1, k, key, log_product + ops.log(unit(subkey, lam.shape, dtypes.float32))

    start = (
        scalar(0, dtypes.int32),
        linear_ops.full(lam.shape, 0, dtype),
        key,
        linear_ops.full(lam.shape, 0, dtypes.float32),
    )
    return while_loop(waiting, wait, start)[1] - 1


def _poisson_by_rejection(key: Any, lam: Any, dtype: np.dtype) -> Any:
    """PTRS, for means of 10 or more."""
    steps, log_lam = _steps(dtype), ops.log(lam)
    b = ops.sqrt(lam) * 2.53 + 0.931
    a = b * 0.02483 + -0.059
    inv_alpha = 1.1328 / (b - 3.4) + 1.1239
    v_r = 0.9277 - 3.6224 / (b - 2)

    def pending(state):
        i, _, accepted, _ = state
        return ops.bitwise_and(_any(ops.bitwise_not(accepted)), i < steps)

    def propose(state):
        i, k_out, accepted, key = state
        key, first, second = new_keys(key, 3)
        u = unit(first, lam.shape, lam.dtype) - 0.5
        v = unit(second, lam.shape, lam.dtype)
        us = 0.5 - ops.abs(u)
        k = ops.floor((2 * a / us + b) * u + lam + 0.43)
        s = ops.log(v * inv_alpha / (a / (us * us) + b))
        t = -lam + k * log_lam - _log_factorial(k)
        inside = ops.bitwise_and(us >= 0.07, v <= v_r)
        outside = ops.bitwise_or(k < 0, ops.bitwise_and(us < 0.013, v > us))
        accept = ops.bitwise_or(inside, ops.bitwise_and(ops.bitwise_not(outside), s <= t))
        return i + 1, ops.select(accept, k, k_out), ops.bitwise_or(accepted, accept), key

    start = (
        scalar(0, dtypes.int32),
        linear_ops.full(lam.shape, -1, lam.dtype),
        linear_ops.full(lam.shape, False, dtypes.bool_),
        key,
    )
    return ops.convert(while_loop(pending, propose, start)[1], dtype)


# Lanczos's coefficients for g = 7, by P. Godfrey
_LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894,
    -176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707,
    9.984369578019570859563e-6, 1.50563273514931155834e-7,
)  # fmt: skip


def _log_factorial(k: Any) -> Any:
    """``log(k!)`` for k >= 0 (C. Lanczos, SIAM J. Numer. Anal. B 1, 1964).

    In float32 its error is larger than the differences that decide whether a proposal of a large mean is accepted: the
    samples of JAX take this formula and no better one.
    """
    total = linear_ops.full(k.shape, 0.99999999999980993227684700473478, k.dtype)
    for i, c in enumerate(_LANCZOS):
        total = total + c / (k + (i + 1))
    t = k + 7.5
    log_t = ops.log1p(k / 7.5) + math.log(7.5)
    return math.log(2 * math.pi) / 2 + (k + 0.5 - t / log_t) * log_t + ops.log(total)


# -- binomial --------------------------------------------------------------------------------------


def binomial(
    key: ArrayLike, n: ArrayLike, p: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Binomial samples: the successes of ``n`` trials of probability ``p``.

    Args:
      n: the number of trials, from 0 on; a negative or NaN number gives NaN, an infinite one infinity.
      p: the probability of success, in [0, 1]; NaN or a number outside gives NaN.
      shape: of the result, to which ``n`` and ``p`` broadcast; by default theirs together.
      dtype: a real floating dtype; samples are drawn in the dtype of ``p``.
    """
    name = "binomial"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    n, p = real(name, "n", n), real(name, "p", p)
    p = p if dtypes.is_floating(p.dtype) else ops.convert(p, dtypes.float32)
    shape = common_shape(name, {"n": n.shape, "p": p.shape}) if shape is None else shape_of(name, shape)
    n, p = (
        linear_ops.broadcast_to(ops.convert(broadcast(name, what, x, shape), p.dtype), shape)
        for what, x in {"n": n, "p": p}.items()
    )
    return binomial_(key, n, p, dtype)


@functools.partial(jit, static_argnums=(3,))
def binomial_(key: Any, n: Any, p: Any, dtype: np.dtype) -> Any:
    """``binomial`` of checked arguments: ``n`` and ``p`` of one shape and dtype."""
    number = lambda x: scalar(x, p.dtype)
    rare = p < 0.5
    q = ops.select(rare, p, 1 - p)
    bad_n, endless = ops.bitwise_or(n != n, n < 0), ops.abs(n) == math.inf
    bad_q, no_q = ops.bitwise_or(q != q, q < 0), q != q
    q = ops.select(bad_q, number(0.01), q)
    few = ops.bitwise_or(bad_n, n * q <= 10)
    n = ops.floor(n)
    # each loop gets harmless parameters where the other one serves
    counted = _binomial_by_counting(key, ops.select(few, n, number(0)), q, dtype)
    rejected = _binomial_by_rejection(
        key, ops.select(few, number(1e4), n), ops.select(few, number(0.5), q), dtype
    )
    drawn = ops.select(few, counted, rejected)
    invalid = ops.bitwise_or(bad_q, bad_n)
    drawn = ops.select(invalid, scalar(math.nan, dtype), drawn)
    drawn = ops.select(ops.bitwise_and(endless, ops.bitwise_not(invalid)), scalar(math.inf, dtype), drawn)
    as_drawn = functools.reduce(ops.bitwise_or, (rare, bad_n, no_q, endless))
    return ops.select(as_drawn, drawn, ops.convert(n, dtype) - drawn)


def _binomial_by_counting(key: Any, n: Any, p: Any, dtype: np.dtype) -> Any:
    """Binomial count as the number of geometric waiting times within ``n`` trials."""
    log_q = ops.log1p(-p)

    def waiting(state):
        _, total, _ = state
        return _any(total <= n)

    def wait(state):
        k, total, key = state
        subkey, key = new_keys(key)
        k = ops.select(total <= n, k + 1, k)
        return k, total + ops.ceil(ops.log(unit(subkey, p.shape, p.dtype)) / log_q), key

    zero = linear_ops.full(p.shape, 0, p.dtype)
    return ops.convert(while_loop(waiting, wait, (zero, zero, key))[0] - 1, dtype)


def _binomial_by_rejection(key: Any, n: Any, p: Any, dtype: np.dtype) -> Any:
    """BTRS, for means of 10 or more."""
    deviation = ops.sqrt(n * p * (1 - p))
    b = deviation * 2.53 + 1.15
    a = b * 0.0248 + -0.0873 + p * 0.01
    c = n * p + 0.5
    v_r = 0.92 - 4.2 / b
    r = p / (1 - p)
    alpha = (5.1 / b + 2.83) * deviation
    m = ops.floor((n + 1) * p)

    def pending(state):
        _, accepted, _ = state
        return _any(ops.bitwise_not(accepted))

    def propose(state):
        k_out, accepted, key = state
        key, first, second = new_keys(key, 3)
        u = unit(first, p.shape, p.dtype) - 0.5
        v = unit(second, p.shape, p.dtype)
        us = 0.5 - ops.abs(u)
        inside = ops.bitwise_and(us >= 0.07, v <= v_r)
        k = ops.floor((2 * a / us + b) * u + c)
        outside = ops.bitwise_or(k < 0, k > n)
        v = ops.log(v * alpha / (a / (us * us) + b))
        bound = (
            (m + 0.5) * ops.log((m + 1) / (r * (n - m + 1)))
            + (n + 1) * ops.log((n - m + 1) / (n - k + 1))
            + (k + 0.5) * ops.log(r * (n - k + 1) / (k + 1))
            + _stirling_tail(m)
            + _stirling_tail(n - m)
            - _stirling_tail(k)
            - _stirling_tail(n - k)
        )
        accept = ops.bitwise_or(inside, ops.bitwise_and(ops.bitwise_not(outside), v <= bound))
        return ops.select(accept, k, k_out), ops.bitwise_or(accepted, accept), key

    start = linear_ops.full(p.shape, -1, p.dtype), linear_ops.full(p.shape, False, dtypes.bool_), key
    return ops.convert(while_loop(pending, propose, start)[0], dtype)


# log(k!) less Stirling's formula, for k from 0 to 9
_TAILS = [
    math.lgamma(k + 1) - (k + 0.5) * math.log(k + 1) + (k + 1) - 0.5 * math.log(2 * math.pi)
    for k in range(10)
]


def _stirling_tail(k: Any) -> Any:
    """``log(k!)`` minus Stirling's formula: a table up to k = 9, its series from 9.

    The series should take k itself, which makes a difference of less than 0.009; JAX's takes 9, and what is accepted,
    so which keys are used, hangs on it.
    """
    few = k <= 9
    k = ops.clamp(scalar(0, k.dtype), k, scalar(9, k.dtype))
    square = ops.square(k + 1)
    series = (1 / 12 - (1 / 360 - 1 / 1260 / square) / square) / (k + 1)
    table = from_numpy(np.asarray(_TAILS, k.dtype))
    return ops.select(few, take(table, ops.convert(ops.floor(k), dtypes.int32), 0), series)


def multinomial(
    key: ArrayLike,
    n: ArrayLike,
    p: ArrayLike,
    *,
    shape: Shape | None = None,
    dtype: DTypeLike = float,
    unroll: int | bool = 1,
) -> Array:
    """Multinomial samples: the counts of outcomes of ``n`` trials.

    Args:
      n: the number of trials, of a shape that broadcasts to ``shape`` without its last axis.
      p: the probabilities of the outcomes along the last axis; they need not add up to 1.
      shape: of the result, to which ``p`` broadcasts; by default its shape.
      unroll: a hint to compilers, see ``lax.scan``.
    Raises:
      ShapeError: ``p`` has no axis, or something does not broadcast.
    """
    name = "multinomial"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    n, p = real(name, "n", n), real(name, "p", p)
    kind = dtypes.float64 if dtypes.float64 in (n.dtype, p.dtype) else dtypes.float32
    if not p.ndim:
        raise errors.ShapeError(
            f"random.multinomial takes probabilities along an axis, not {p.aval}.",
            where=source.here(),
            fix="p = bnp.asarray([0.5, 0.5])",
        )
    shape = p.shape if shape is None else shape_of(name, shape)
    check_broadcast(name, "n", n.shape, shape[:-1])
    n = linear_ops.broadcast_to(ops.convert(n, kind), shape[:-1])
    p = linear_ops.broadcast_to(ops.convert(broadcast(name, "p", p, shape), kind), shape)
    last = p.ndim - 1
    p = linear_ops.transpose(p, (last, *range(last)))
    rest = cumulative.cumsum(p, 0, reverse=True)
    ratios = p / ops.select(rest == 0, scalar(1, kind), rest)
    ratios = ops.clamp(scalar(0, kind), ratios, scalar(1, kind))
    keys = rb.random_split_p.bind(key, shape=(shape[-1],))

    def outcome(remaining, ratio_key):
        ratio, subkey = ratio_key
        count = binomial_(subkey, remaining, ratio, kind)
        return remaining - count, count

    _, counts = scan(outcome, n, (ratios, keys), unroll=unroll)
    return ops.convert(linear_ops.transpose(counts, (*range(1, last + 1), 0)), dtype)
