"""Random numbers from explicit keys: the same key gives the same numbers, everywhere.

A face. A key is an opaque array element; functions that draw take one key and never change it, so a
key is used once and ``split`` makes more. The generator is threefry2x32, bit for bit JAX's default
(``core/ops/random_bits.py``); samplers follow the algorithms of ``jax.random``, so that programs ported
from it keep their numbers: integers, uniforms and permutations exactly, the others to rounding.

    key = random.key(0)
    key, subkey = random.split(key)
    x = random.normal(subkey, (3,))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core import dtypes, source, structure
from blufunc.core.array import from_numpy, lift, scalar
from blufunc.core.axes import static_int
from blufunc.core.ops import cumulative, gather_scatter, reduce
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import random_bits as rb
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.windows import GatherDimensionNumbers
from blufunc.core.trace import Value

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "key_data",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
    "wrap_key_data",
]

Shape = int | Sequence[int]

# -- keys ------------------------------------------------------------------------------------------


def key(seed: Any) -> Any:
    """A key from an integer.

    Args:
      seed: an int, or an integer array of rank 0. Seeds that fit in 32 bits give JAX's keys (negative ones wrap);
        wider ones, up to 64 bits, give those of JAX with x64 enabled.
    Returns:
      a key: rank 0, dtype ``key<fry>``.
    Raises:
      ArgumentError: the seed is not an integer, or has axes.
      ValueRangeError: it does not fit in 64 bits.
    """
    if isinstance(seed, (int, np.integer)):
        seed = int(seed)
        if not -(2**63) <= seed < 2**64:
            raise errors.ValueRangeError(f"the seed {seed} does not fit in 64 bits.", where=source.here())
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


def key_data(keys: Any) -> Any:
    """The words of keys of any shape: uint32, with a last axis of size 2."""
    return rb.random_unwrap_p.bind(_keys("key_data", keys))


def wrap_key_data(data: Any) -> Any:
    """Keys from their words, the reverse of ``key_data``: uint32 with a last axis of size 2."""
    data = lift(data)
    if data.dtype != dtypes.uint32 or not data.ndim or data.shape[-1] != 2:
        raise errors.ArgumentError(
            f"wrap_key_data takes uint32 words with a last axis of size 2, not {data.aval}.",
            where=source.here(),
        )
    return rb.random_wrap_p.bind(data)


def split(key: Any, num: Shape = 2) -> Any:
    """New keys from one, which is not to be used again.

    Args:
      key: one key.
      num: how many, or the shape of an array of them.
    Returns:
      keys of shape ``(num,)``, or ``num``; iterate over them or unpack them.
    """
    return rb.random_split_p.bind(_key("split", key), shape=_shape("split", num))


def fold_in(key: Any, data: Any) -> Any:
    """A new key from a key and an integer, such as the number of a step or of a layer.

    Args:
      key: one key.
      data: a non-negative int below 2**32, or an integer array of rank 0 (taken modulo 2**32).
    """
    key = _key("fold_in", key)
    if isinstance(data, int):
        if not 0 <= data < 2**32:
            raise errors.ValueRangeError(f"fold_in: {data} does not fit in uint32.", where=source.here())
        data = scalar(data, dtypes.uint32)
    data = lift(data, "data")
    if not dtypes.is_integer(data.dtype) or data.ndim:
        raise errors.ArgumentError(
            f"fold_in takes one integer, not {data.aval}.",
            where=source.here(),
            fix="for several use vmap(random.fold_in, in_axes=(None, 0))(key, data)",
        )
    return rb.random_fold_in_p.bind(key, ops.convert(data, dtypes.uint32))


# -- uniform samples -------------------------------------------------------------------------------


def bits(key: Any, shape: Shape = (), dtype: Any = "uint32") -> Any:
    """Random bits as unsigned integers of ``dtype``."""
    dtype = dtypes.as_dtype(dtype)
    if not dtypes.is_unsigned(dtype):
        raise errors.DtypeError(
            f"bits come as unsigned integers, not as {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="dtype='uint32', or randint for signed ones",
        )
    return _bits(_key("bits", key), dtype.itemsize * 8, _shape("bits", shape))


def uniform(key: Any, shape: Shape = (), dtype: Any = "float32", minval: Any = 0.0, maxval: Any = 1.0) -> Any:
    """Samples from the uniform distribution on [minval, maxval).

    Random bits become the mantissa of a number in [1, 2), from which 1 is subtracted.

    Args:
      key: one key.
      shape: of the result.
      dtype: a real floating dtype.
      minval, maxval: real numbers or arrays that broadcast to ``shape``; the result is differentiable in them.
    """
    key, shape, dtype = _key("uniform", key), _shape("uniform", shape), _float("uniform", dtype)
    minval = _parameter("uniform", "minval", minval, shape, dtype)
    maxval = _parameter("uniform", "maxval", maxval, shape, dtype)
    return _uniform(key, shape, dtype, minval, maxval)


def _uniform(key: Any, shape: tuple[int, ...], dtype: np.dtype, minval: Any, maxval: Any) -> Any:
    info = dtypes.finfo(dtype)
    # bfloat16 and float8 have fewer than 8 bits of mantissa: random bytes are enough
    drawn = 8 if info.nmant < 8 else info.bits
    unsigned = np.dtype(f"u{dtype.itemsize}")
    mantissa = ops.convert(_bits(key, drawn, shape), unsigned)
    mantissa = ops.shift_right_logical(mantissa, scalar(drawn - info.nmant, unsigned))
    one = int(np.ones((), dtype).view(unsigned))
    floats = ops.sub(ops.bitcast(ops.bitwise_or(mantissa, scalar(one, unsigned)), dtype), scalar(1, dtype))
    # rounding may give less than minval
    return ops.max(minval, ops.add(ops.mul(floats, ops.sub(maxval, minval)), minval))


def _unit(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Uniform samples of [0, 1)."""
    return _uniform(key, shape, dtype, scalar(0, dtype), scalar(1, dtype))


def _bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
    return rb.random_bits_p.bind(key, shape=shape, bit_width=width)


def randint(key: Any, shape: Shape, minval: Any, maxval: Any, dtype: Any = "int32") -> Any:
    """Uniform integers in [minval, maxval); ``minval`` where the interval is empty.

    Twice as many bits as ``dtype`` has are taken modulo the size of the interval, so the bias is at most
    about ``(maxval - minval) / 2**64`` for int32. Dtypes narrower than 32 bits are drawn as int32.

    Args:
      key: one key.
      shape: of the result.
      minval, maxval: ints, or integer arrays that broadcast to ``shape``; limited to the range of ``dtype``.
      dtype: an integer dtype.
    Raises:
      DtypeError: ``dtype``, ``minval`` or ``maxval`` is not an integer.
      ShapeError: ``minval`` or ``maxval`` does not broadcast to ``shape``.
    """
    key, shape, dtype = _key("randint", key), _shape("randint", shape), dtypes.as_dtype(dtype)
    if not dtypes.is_integer(dtype):
        raise errors.DtypeError(
            f"randint gives integers, not {dtypes.short_name(dtype)}.", where=source.here()
        )
    sampled = dtype if dtype.itemsize >= 4 else dtypes.int32
    low, _ = _bound("minval", minval, shape, sampled, dtype)
    high, beyond = _bound("maxval", maxval, shape, sampled, dtype)
    width = sampled.itemsize * 8
    unsigned = np.dtype(f"u{sampled.itemsize}")

    upper, lower = (_bits(k, width, shape) for k in _pair(key))
    empty = ops.le(high, low)
    span = ops.select(empty, scalar(1, unsigned), ops.convert(ops.sub(high, low), unsigned))
    if beyond is not None:  # maxval is one more than sampled can hold; a full range wraps to a span of 0
        grown = ops.select(ops.logical_and(beyond, ops.gt(high, low)), ops.add(span, 1), span)
        span, full_range = grown, ops.eq(grown, 0)
        divisor = ops.select(full_range, scalar(1, unsigned), span)
    else:
        full_range, divisor = None, span

    def modulo(x):
        r = ops.rem(x, divisor)
        return r if full_range is None else ops.select(full_range, x, r)

    # (a * 2**width + b) % span without wider integers, 2**width % span being (2**(width/2) % span)**2 % span
    power = modulo(scalar(2 ** (width // 2), unsigned))
    power = modulo(ops.mul(power, power))
    offset = modulo(ops.add(ops.mul(modulo(upper), power), modulo(lower)))
    return ops.convert(ops.add(low, ops.convert(offset, sampled)), dtype)


def _bound(what: str, x: Any, shape: tuple[int, ...], sampled: np.dtype, dtype: np.dtype) -> tuple[Any, Any]:
    """A bound of ``randint`` in ``sampled``, and where it was above that dtype's range (None: nowhere)."""
    info, wanted = dtypes.iinfo(sampled), dtypes.iinfo(dtype)
    # a narrow dtype may have the exclusive bound one above its range
    least, most = (wanted.min, wanted.max + 1) if sampled != dtype else (info.min, info.max)
    if isinstance(x, (int, np.integer)):
        x = int(x)
        value = least if x < least else most if x > most else x
        beyond = scalar(True, dtypes.bool_) if x > info.max and sampled == dtype else None
        return scalar(value, sampled), beyond
    x = lift(x, what)
    if not dtypes.is_integer(x.dtype):
        raise errors.DtypeError(
            f"randint takes an integer {what}, not {x.aval}.", where=source.here(), fix=f"int({what})"
        )
    x = _broadcast("randint", what, x, shape)
    given = dtypes.iinfo(x.dtype)
    beyond = None
    if sampled == dtype and given.max > info.max:
        beyond = ops.gt(x, scalar(info.max, x.dtype))
    low, high = (least if least > given.min else None), (most if most < given.max else None)
    if low is not None or high is not None:
        low = given.min if low is None else low
        high = given.max if high is None else high
        x = ops.clamp(scalar(low, x.dtype), x, scalar(high, x.dtype))
    return ops.convert(x, sampled), beyond


def bernoulli(key: Any, p: Any = 0.5, shape: Shape | None = None) -> Any:
    """Booleans that are True with probability ``p``.

    Args:
      key: one key.
      p: a float, or a floating array; samples are drawn in its dtype.
      shape: of the result, which ``p`` broadcasts to; by default that of ``p``.
    Raises:
      DtypeError: ``p`` is not floating.
    """
    key, p = _key("bernoulli", key), lift(p, "p")
    if not dtypes.is_floating(p.dtype):
        raise errors.DtypeError(
            f"bernoulli takes a floating probability p, not {p.aval}.", where=source.here(), fix="p=0.5"
        )
    shape = p.shape if shape is None else _shape("bernoulli", shape)
    return ops.lt(_unit(key, shape, p.dtype), _broadcast("bernoulli", "p", p, shape))


# -- continuous distributions ----------------------------------------------------------------------


def normal(key: Any, shape: Shape = (), dtype: Any = "float32") -> Any:
    """Samples from the standard normal distribution, by its inverse distribution function.

    Args:
      key: one key.
      shape: of the result.
      dtype: floating or complex; of complex samples, real and imaginary part have variance 1/2.
    """
    key, shape, dtype = _key("normal", key), _shape("normal", shape), dtypes.as_dtype(dtype)
    if dtypes.is_complex(dtype):
        real = np.dtype(f"f{dtype.itemsize // 2}")
        re, im = (_normal(k, shape, real) for k in _pair(key))
        return ops.div(ops.complex_(re, im), scalar(math.sqrt(2), dtype))
    return _normal(key, shape, _float("normal", dtype))


def _normal(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    above_minus_one = np.nextafter(np.asarray(-1, dtype), np.asarray(0, dtype))  # erf_inv(-1) is -inf
    u = _uniform(key, shape, dtype, scalar(float(above_minus_one), dtype), scalar(1, dtype))
    return ops.mul(scalar(math.sqrt(2), dtype), ops.erf_inv(u))


def truncated_normal(
    key: Any, lower: Any, upper: Any, shape: Shape | None = None, dtype: Any = "float32"
) -> Any:
    """Samples from the standard normal distribution restricted to the open interval (lower, upper).

    They come from the inverse of the distribution function in ``dtype``, which is 1 to all digits far from 0: an
    interval in the tails (from about 5 on, in float32) gets few values, in the end only those next to its ends.

    Args:
      key: one key.
      lower, upper: real numbers or arrays that broadcast together, and to ``shape``.
      shape: of the result; by default that of ``lower`` and ``upper`` together.
      dtype: a real floating dtype.
    """
    name = "truncated_normal"
    key, dtype = _key(name, key), _float(name, dtype)
    if shape is None:
        shape = _common_shape(name, lift(lower, "lower"), lift(upper, "upper"))
    shape = _shape(name, shape)
    lower = _parameter(name, "lower", lower, shape, dtype)
    upper = _parameter(name, "upper", upper, shape, dtype)
    root2 = scalar(math.sqrt(2), dtype)
    u = _uniform(key, shape, dtype, ops.erf(ops.div(lower, root2)), ops.erf(ops.div(upper, root2)))
    least = ops.nextafter(ops.stop_gradient(lower), scalar(math.inf, dtype))
    most = ops.nextafter(ops.stop_gradient(upper), scalar(-math.inf, dtype))
    return ops.clamp(least, ops.mul(root2, ops.erf_inv(u)), most)


def exponential(key: Any, shape: Shape = (), dtype: Any = "float32") -> Any:
    """Samples from the exponential distribution of rate 1."""
    key, shape = _key("exponential", key), _shape("exponential", shape)
    return ops.neg(ops.log1p(ops.neg(_unit(key, shape, _float("exponential", dtype)))))


def gumbel(key: Any, shape: Shape = (), dtype: Any = "float32") -> Any:
    """Samples from the standard Gumbel distribution: ``-log(-log(u))`` of uniform u."""
    key, shape, dtype = _key("gumbel", key), _shape("gumbel", shape), _float("gumbel", dtype)
    u = _uniform(key, shape, dtype, scalar(float(dtypes.finfo(dtype).tiny), dtype), scalar(1, dtype))
    return ops.neg(ops.log(ops.neg(ops.log(u))))


# -- discrete choices ------------------------------------------------------------------------------


def categorical(key: Any, logits: Any, axis: int = -1, shape: Shape | None = None) -> Any:
    """Indices drawn with probabilities ``softmax(logits, axis)``, by the largest of Gumbel noise plus logits.

    Args:
      key: one key.
      logits: a floating array.
      axis: the axis of the alternatives.
      shape: of the result: leading axes of any size, then the other axes of ``logits``, which it may broadcast.
        By default no leading axes.
    Returns:
      int32 indices.
    """
    key, logits = _key("categorical", key), lift(logits, "logits")
    if not dtypes.is_floating(logits.dtype):
        raise errors.DtypeError(
            f"categorical takes floating logits, not {logits.aval}.",
            where=source.here(),
            fix="the log of probabilities: log(p)",
        )
    axis = _axis("categorical", axis, logits.ndim)
    rest = logits.shape[:axis] + logits.shape[axis + 1 :]
    shape = rest if shape is None else _shape("categorical", shape)
    _check_broadcast("categorical", "logits without its axis of alternatives", rest, shape)
    extra = len(shape) - len(rest)
    drawn = (*shape[: extra + axis], logits.shape[axis], *shape[extra + axis :])
    noise = gumbel(key, drawn, logits.dtype)
    return reduce.argmax(ops.add(noise, structure.broadcast_to(logits, drawn)), extra + axis)


def permutation(key: Any, x: Any, axis: int = 0, independent: bool = False) -> Any:
    """``x`` in random order along an axis: sorted by random 32-bit keys, several times over for long arrays.

    Args:
      key: one key.
      x: an array; or an int n, which stands for 0, 1, ..., n - 1.
      axis: the axis to permute.
      independent: permute every line along the axis by a permutation of its own.
    """
    key = _key("permutation", key)
    if isinstance(x, (int, np.integer)):
        _axis("permutation", axis, 1)
        return _shuffle(key, shape_ops.iota(dtypes.int32, (_count("permutation", x),), 0), 0)
    x = lift(x, "x")
    if not x.ndim:
        raise errors.ArgumentError(
            f"permutation takes an int or an array with an axis to permute, not {x.aval}.",
            where=source.here(),
        )
    axis = _axis("permutation", axis, x.ndim)
    if independent or x.ndim == 1:
        return _shuffle(key, x, axis)
    order = _shuffle(key, shape_ops.iota(dtypes.int32, (x.shape[axis],), 0), 0)
    return _take(x, order, axis)


def _shuffle(key: Any, x: Any, axis: int) -> Any:
    # Two elements keep their order only if their sort keys agree in every round. With c rounds some pair of n does
    # so with a probability of about n**2 / 2**(32c + 1): the number of rounds keeps it below 1/n.
    rounds = math.ceil(3 * math.log(x.aval.size) / math.log(2**32 - 1)) if x.aval.size > 1 else 0
    for _ in range(rounds):
        key, subkey = _pair(key)
        _, x = sort_ops.sort_key_val(_bits(subkey, 32, x.aval.shape), x, axis)
    return x


def choice(key: Any, a: Any, shape: Shape = (), replace: bool = True, p: Any = None, axis: int = 0) -> Any:
    """Elements of ``a`` drawn at random along an axis.

    Args:
      key: one key.
      a: an array; or an int n, which stands for 0, 1, ..., n - 1.
      shape: how many to draw, as a shape.
      replace: whether an element may be drawn more than once.
      p: the probabilities of the elements, of rank 1 and floating; equal by default. With ``replace=False`` at
        least as many must be positive as are drawn.
      axis: the axis of ``a`` to draw along.
    Returns:
      an array of the shape of ``a`` with ``shape`` in the place of the axis.
    Raises:
      ValueRangeError: more elements are wanted than there are.
      ShapeError: ``p`` does not have one entry for each element.
      DtypeError: ``p`` is not floating.
    """
    key, shape = _key("choice", key), _shape("choice", shape)
    draws = math.prod(shape)
    if isinstance(a, (int, np.integer)):
        array, n = None, _count("choice", a)
    else:
        array = lift(a, "a")
        if not array.ndim:
            raise errors.ArgumentError(
                f"choice takes an int or an array with an axis to draw along, not {array.aval}.",
                where=source.here(),
            )
        axis = _axis("choice", axis, array.ndim)
        n = array.shape[axis]
    if draws and not n:
        raise errors.ValueRangeError("choice: there is nothing to draw from.", where=source.here())
    if not replace and draws > n:
        raise errors.ValueRangeError(
            f"choice: {draws} of {n} elements cannot be drawn without replacement.",
            where=source.here(),
            fix="replace=True",
        )
    if p is not None:
        chosen = _weighted(key, _probabilities(p, n), n, shape, replace)
    elif replace:
        chosen = randint(key, shape, 0, n)
    elif array is None:
        chosen = structure.reshape(shape_ops.slice_in_dim(permutation(key, n), 0, draws), shape)
    else:
        # the elements themselves are permuted, and the first of them taken
        drawn = shape_ops.slice_in_dim(permutation(key, array, axis), 0, draws, axis=axis)
        return structure.reshape(drawn, array.shape[:axis] + shape + array.shape[axis + 1 :])
    return chosen if array is None else _take(array, chosen, axis)


def _probabilities(p: Any, n: int) -> Any:
    p = lift(p, "p")
    if not dtypes.is_floating(p.dtype):
        raise errors.DtypeError(f"choice takes floating probabilities p, not {p.aval}.", where=source.here())
    if p.shape != (n,):
        raise errors.ShapeError(
            f"choice takes one probability for each of the {n} elements, not p of type {p.aval}.",
            where=source.here(),
        )
    return p


def _weighted(key: Any, p: Any, n: int, shape: tuple[int, ...], replace: bool) -> Any:
    """Indices drawn with probabilities ``p``."""
    draws = math.prod(shape)
    if not draws:
        return structure.full(shape, 0, dtypes.int32)
    if not replace:  # the largest of Gumbel noise plus log probabilities: without replacement, the k largest
        return structure.reshape(
            sort_ops.top_k(ops.add(gumbel(key, (n,), p.dtype), ops.log(p)), draws)[1], shape
        )
    rising = cumulative.cumsum(p)
    total = structure.reshape(shape_ops.slice_in_dim(rising, n - 1, n), ())
    return structure.reshape(
        _count_below(rising, ops.mul(total, ops.sub(1, _unit(key, (draws,), p.dtype)))), shape
    )


def _count_below(rising: Any, queries: Any) -> Any:
    """For each query, how many elements of a rising array are less: searchsorted, by one stable sort of both."""
    m, n = queries.aval.size, rising.aval.size
    is_element = shape_ops.concatenate(
        (structure.full((m,), 0, dtypes.int32), structure.full((n,), 1, dtypes.int32)), 0
    )
    merged = (
        shape_ops.concatenate((queries, rising), 0),
        is_element,
        shape_ops.iota(dtypes.int32, (m + n,), 0),
    )
    _, is_element, came_from = sort_ops.sort(
        merged
    )  # stable: a query stands before the elements that equal it
    return shape_ops.slice_in_dim(sort_ops.place_along(cumulative.cumsum(is_element), came_from, 0), 0, m)


def _take(x: Any, indices: Any, axis: int) -> Any:
    """The elements of ``x`` at ``indices``, which are in range, along an axis."""
    after = indices.aval.ndim
    offsets = (*range(axis), *range(axis + after, axis + after + x.aval.ndim - axis - 1))
    sizes = (*x.aval.shape[:axis], 1, *x.aval.shape[axis + 1 :])
    numbers = GatherDimensionNumbers(offsets, (axis,), (axis,))
    starts = structure.reshape(indices, (*indices.aval.shape, 1))
    return gather_scatter.gather(x, starts, numbers, sizes, mode="promise_in_bounds")


# -- arguments -------------------------------------------------------------------------------------


def _keys(name: str, keys: Any) -> Any:
    if isinstance(keys, Value):
        if dtypes.is_key(keys.dtype):
            return keys
        text = f"an array {keys.aval}"
    else:
        text = f"{keys!r:.60}" if isinstance(keys, (int, float, str)) else f"a {type(keys).__name__}"
    raise errors.ArgumentError(
        f"random.{name} takes a key, not {text}.",
        where=source.here(),
        fix="make one from a seed: random.key(seed), or from raw words: random.wrap_key_data(words)",
    )


def _key(name: str, key: Any) -> Any:
    key = _keys(name, key)
    if key.aval.ndim:
        raise errors.ShapeError(
            f"random.{name} takes one key, not {key.aval}.",
            where=source.here(),
            fix=f"for one result per key: vmap(lambda k: random.{name}(k, ...))(keys)",
        )
    return key


def _pair(key: Any) -> tuple[Any, Any]:
    """Two new keys."""
    both = rb.random_split_p.bind(key, shape=(2,))
    first, second = (structure.reshape(shape_ops.slice_in_dim(both, i, i + 1), ()) for i in range(2))
    return first, second


def _shape(name: str, shape: Shape) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, shape)) if isinstance(shape, (tuple, list)) else (index(shape),)  # type: ignore[arg-type]
    except errors.BlufuncError:  # a tracer, which says so itself
        raise
    except TypeError:
        raise errors.ArgumentError(
            f"random.{name}: a shape is an int or a tuple of ints, not {shape!r}.", where=source.here()
        ) from None
    if any(n < 0 for n in sizes):
        raise errors.ValueRangeError(
            f"random.{name}: the shape {sizes} has a negative size.", where=source.here()
        )
    return sizes


def _axis(name: str, axis: int, ndim: int) -> int:
    axis = static_int(axis, f"random.{name}", "axis")
    if not -ndim <= axis < ndim:
        raise errors.ShapeError(
            f"random.{name}: axis {axis} is out of range for an array of {ndim} axes.", where=source.here()
        )
    return axis % ndim


def _count(name: str, n: Any) -> int:
    if n < 0:
        raise errors.ValueRangeError(f"random.{name}: {n} elements.", where=source.here())
    return int(n)


def _float(name: str, dtype: Any) -> np.dtype:
    dtype = dtypes.as_dtype(dtype)
    if not dtypes.is_floating(dtype):
        raise errors.DtypeError(
            f"random.{name} gives floating numbers, not {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="random.randint or random.bits give integers"
            if dtypes.is_integer(dtype)
            else "dtype='float32'",
        )
    return dtype


def _parameter(name: str, what: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A real parameter of a distribution in the dtype of the samples; of rank 0 or of their shape."""
    if isinstance(x, (int, float)):
        return scalar(x, dtype)
    x = lift(x, what)
    if not (dtypes.is_floating(x.dtype) or dtypes.is_integer(x.dtype)):
        raise errors.DtypeError(f"random.{name} takes a real {what}, not {x.aval}.", where=source.here())
    return ops.convert(_broadcast(name, what, x, shape), dtype)


def _broadcast(name: str, what: str, x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` in ``shape``; rank 0 may stay."""
    _check_broadcast(name, what, x.aval.shape, shape)
    return structure.broadcast_to(x, shape) if x.aval.ndim else x


def _check_broadcast(name: str, what: str, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    aligned = shape[len(shape) - len(given) :]
    if len(given) > len(shape) or any(n not in (1, s) for n, s in zip(given, aligned, strict=True)):
        raise errors.ShapeError(
            f"random.{name}: {what} of shape {given} does not broadcast to shape={shape}.",
            where=source.here(),
            fix="shape=None takes the shape of the parameters" if name != "uniform" else None,
        )


def _common_shape(name: str, x: Any, y: Any) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise errors.ShapeError(
            f"random.{name}: parameters of shapes {x.shape} and {y.shape} do not broadcast together.",
            where=source.here(),
        ) from None
