"""Initialisers of parameters: ``init(key, shape, dtype=float32) -> array``.

A face. ``zeros`` and ``ones`` are initialisers; the other functions here return them. The variance-preserving
schemes (glorot, he, lecun) are ``variance_scaling`` with fixed options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import dtypes, source
from blufunc.numpy.promotion import named

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

Axes = int | Sequence[int]


class Initializer(Protocol):
    """A function ``(key, shape, dtype)`` that makes weights."""

    def __call__(self, key: ArrayLike, shape: Sequence[int], dtype: DTypeLike = ...) -> Array:
        """Weights of a shape and dtype."""


class Recipe(Protocol):
    """A function that makes initialisers for weights with these axes."""

    def __call__(
        self, in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = (), dtype: DTypeLike = ...
    ) -> Initializer:
        """The initialiser."""


__all__ = [
    "constant", "normal", "ones", "truncated_normal", "uniform", "zeros",
    "glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "kaiming_normal", "kaiming_uniform", "lecun_normal",
    "lecun_uniform", "orthogonal", "delta_orthogonal", "variance_scaling", "xavier_normal", "xavier_uniform",
]  # fmt: skip


def zeros(key: ArrayLike, shape: Sequence[int], dtype: DTypeLike = float) -> Array:
    """Zeros; the key is not used."""
    return bnp.zeros(shape, dtype)


def ones(key: ArrayLike, shape: Sequence[int], dtype: DTypeLike = float) -> Array:
    """Ones; the key is not used."""
    return bnp.ones(shape, dtype)


def constant(value: ArrayLike, dtype: DTypeLike = float) -> Initializer:
    """An initialiser of arrays filled with ``value``."""
    return lambda key, shape, dtype=dtype: bnp.full(shape, value, dtype)


def normal(stddev: float = 1e-2, dtype: DTypeLike = float) -> Initializer:
    """An initialiser of normal values of mean 0."""
    return lambda key, shape, dtype=dtype: random.normal(key, tuple(shape), dtype) * stddev


def truncated_normal(
    stddev: float = 1e-2, dtype: DTypeLike = float, lower: float = -2.0, upper: float = 2.0
) -> Initializer:
    """An initialiser of ``stddev`` times normal values in [``lower``, ``upper``].

    ``stddev`` is the deviation before truncation; between -2 and 2 that of the result is 0.88 of it.
    """
    return lambda key, shape, dtype=dtype: (
        random.truncated_normal(key, lower, upper, tuple(shape), dtype) * stddev
    )


def uniform(scale: float = 1e-2, dtype: DTypeLike = float) -> Initializer:
    """An initialiser of uniform values in [0, ``scale``)."""
    return lambda key, shape, dtype=dtype: random.uniform(key, tuple(shape), dtype) * scale


def variance_scaling(
    scale: float,
    mode: str,
    distribution: str,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    dtype: DTypeLike = float,
) -> Initializer:
    """An initialiser of random weights of variance ``scale / fan``.

    Args:
      scale: the variance that one layer gives to its outputs, for inputs of variance 1.
      mode: which fan: ``fan_in`` (inputs summed for one output), ``fan_out``, ``fan_avg`` or ``fan_geo_avg`` (their
        arithmetic and geometric mean).
      distribution: ``truncated_normal`` (at two deviations), ``normal`` or ``uniform``.
      in_axis, out_axis: the axes of inputs and outputs. All others, but ``batch_axis``, are a receptive field.
      batch_axis: axes along which layers are stacked.
      dtype: the default dtype of the result of ``init``.
    Raises:
      ValueRangeError: an unknown mode or distribution.
      ShapeError: ``init`` was asked for a shape that has no such axes.
    """
    _choice("mode", mode, _FANS)
    _choice("distribution", distribution, ("truncated_normal", "normal", "uniform"))

    def init(key: Any, shape: Sequence[int], dtype: Any = dtype) -> Any:
        shape = tuple(shape)
        variance = scale / max(1.0, _FANS[mode](*_fans(shape, in_axis, out_axis, batch_axis)))
        if dtypes.is_complex(dtypes.as_dtype(dtype)) and distribution != "normal":
            return _in_a_disk(key, shape, dtype, distribution == "uniform", variance)
        if distribution == "uniform":
            limit = math.sqrt(3 * variance)
            return random.uniform(key, shape, dtype, -1) * limit
        if distribution == "normal":
            return random.normal(key, shape, dtype) * math.sqrt(variance)
        return random.truncated_normal(key, -2, 2, shape, dtype) * (
            math.sqrt(variance) / _TRUNCATED_DEVIATION
        )

    return init


def _in_a_disk(key: Any, shape: tuple[int, ...], dtype: Any, even: bool, variance: float) -> Any:
    """Complex weights of a variance: ``even`` in a disk, or truncated normal."""
    of_radius, of_angle = random.split(key)
    real = np.dtype(f"f{dtypes.as_dtype(dtype).itemsize // 2}")
    u = random.uniform(of_radius, shape, real)
    radius = bnp.sqrt(u if even else -bnp.log1p(u * math.expm1(-4)))
    angle = 2 * math.pi * random.uniform(of_angle, shape, real)
    scale = math.sqrt(variance) / (math.sqrt(1 / 2) if even else _TRUNCATED_COMPLEX_DEVIATION)
    return (radius * bnp.exp(1j * angle)).astype(dtype) * scale


def _recipe(name: str, scale: float, mode: str, distribution: str, doc: str) -> Recipe:
    def make(
        in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = (), dtype: Any = float
    ) -> Initializer:
        return variance_scaling(scale, mode, distribution, in_axis, out_axis, batch_axis, dtype)

    return named(make, name, doc, "blufunc.nn.initializers")


_GLOROT = "Variance 2 / (inputs + outputs), {} (Glorot & Bengio, AISTATS 2010)."
_HE = "Variance 2 / inputs, for rectifiers, {} (He et al., arXiv:1502.01852)."
_LECUN = "Variance 1 / inputs, {} (LeCun et al., Efficient BackProp, 1998)."
_NORMAL, _UNIFORM = "truncated normal", "uniform"
glorot_normal = _recipe("glorot_normal", 1.0, "fan_avg", "truncated_normal", _GLOROT.format(_NORMAL))
glorot_uniform = _recipe("glorot_uniform", 1.0, "fan_avg", "uniform", _GLOROT.format(_UNIFORM))
he_normal = _recipe("he_normal", 2.0, "fan_in", "truncated_normal", _HE.format(_NORMAL))
he_uniform = _recipe("he_uniform", 2.0, "fan_in", "uniform", _HE.format(_UNIFORM))
lecun_normal = _recipe("lecun_normal", 1.0, "fan_in", "truncated_normal", _LECUN.format(_NORMAL))
lecun_uniform = _recipe("lecun_uniform", 1.0, "fan_in", "uniform", _LECUN.format(_UNIFORM))
xavier_normal, xavier_uniform = glorot_normal, glorot_uniform
kaiming_normal, kaiming_uniform = he_normal, he_uniform

_FANS: dict[str, Callable[[float, float], float]] = {
    "fan_in": lambda fan_in, fan_out: fan_in,
    "fan_out": lambda fan_in, fan_out: fan_out,
    "fan_avg": lambda fan_in, fan_out: (fan_in + fan_out) / 2,
    "fan_geo_avg": lambda fan_in, fan_out: math.sqrt(fan_in * fan_out),
}
_TRUNCATED_DEVIATION = 0.8796256610342398
"""The standard deviation of a standard normal distribution truncated at -2 and 2."""
_TRUNCATED_COMPLEX_DEVIATION = 0.9531116438049121
"""JAX's divisor for complex ones of at most 2; their deviation is 0.962."""


def _fans(shape: tuple[int, ...], in_axis: Axes, out_axis: Axes, batch_axis: Axes) -> tuple[float, float]:
    """Fan-in and fan-out: the number of inputs per output, and outputs per input."""
    if len(shape) < 2:
        raise errors.ShapeError(
            f"an initialiser that scales by fan-in or fan-out needs a shape of at least 2 axes, not {shape}.",
            where=source.here(),
            fix="use zeros, constant or normal for vectors",
        )
    groups = [(a,) if isinstance(a, int) else tuple(a) for a in (in_axis, out_axis, batch_axis)]
    for d in sum(groups, ()):
        if not -len(shape) <= d < len(shape):
            raise errors.ShapeError(f"the shape {shape} has no axis {d}.", where=source.here())
    inputs, outputs, batch = (math.prod([shape[d] for d in group]) for group in groups)
    field = math.prod(shape) / max(1, inputs * outputs * batch)
    return inputs * field, outputs * field


def _choice(name: str, choice: str, known: Any) -> None:
    if choice not in known:
        raise errors.ValueRangeError(
            f"{choice!r} is not a {name} of variance_scaling.",
            where=source.here(),
            fix=f"use one of {', '.join(known)}",
        )


def orthogonal(scale: float = 1.0, column_axis: int = -1, dtype: DTypeLike = float) -> Initializer:
    """An initialiser of ``scale`` times uniform orthogonal matrices (arXiv:1312.6120).

    Args:
      scale: factor of the matrices.
      column_axis: the axis of the columns; all others together are the rows. The smaller of both is orthonormal.
      dtype: the default dtype of the result of ``init``.
    Raises:
      ShapeError: ``init`` was asked for fewer than two axes.
    """

    def init(key: Any, shape: Sequence[int], dtype: Any = dtype) -> Any:
        shape = tuple(shape)
        if len(shape) < 2 or not -len(shape) <= column_axis < len(shape):
            raise errors.ShapeError(
                f"an orthogonal initialiser needs a shape of at least 2 axes with an axis {column_axis}, not {shape}.",
                where=source.here(),
                fix="use zeros, constant or normal for vectors",
            )
        if not math.prod(shape):
            return bnp.zeros(shape, dtype)
        columns, axis = shape[column_axis], column_axis % len(shape)
        rows = shape[:axis] + shape[axis + 1 :]
        q = random.orthogonal(key, math.prod(rows), (), dtype, columns).reshape((*rows, columns))
        return bnp.moveaxis(q, -1, axis) * scale

    return init


def delta_orthogonal(scale: float = 1.0, column_axis: int = -1, dtype: DTypeLike = float) -> Initializer:
    """An initialiser of convolutions, ``orthogonal`` at the centre (arXiv:1806.05393).

    Args:
      scale, column_axis, dtype: see ``orthogonal``.
    Raises:
      ShapeError: ``init`` was asked for a shape other than ``(*spatial, inputs, outputs)``, of one to three spatial
        axes and at least as many outputs as inputs.
    """

    def init(key: Any, shape: Sequence[int], dtype: Any = dtype) -> Any:
        shape = tuple(shape)
        if not 3 <= len(shape) <= 5 or shape[-1] < shape[-2]:
            raise errors.ShapeError(
                f"a delta-orthogonal initialiser makes no kernels of shape {shape}.",
                where=source.here(),
                why="kernels have one to three spatial axes, inputs, and at least as many outputs.",
                fix="orthogonal() for other shapes",
            )
        matrix = orthogonal(scale, column_axis, dtype)(key, shape[-2:])
        centre = tuple([(n - 1) // 2 for n in shape[:-2]])
        return bnp.zeros(shape, dtype).at[centre].set(matrix)

    return init
