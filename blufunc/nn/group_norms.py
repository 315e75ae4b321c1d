"""Batch, group, instance, weight and spectral normalisation.

A face, above ``nn.normalization``. Features are the last axis. Half-precision input is normalised in float32,
and only the result is rounded. No state is kept between calls: running statistics are passed in and returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.axes import axis_in, static_int
from blufunc.nn.activations import as_inexact, number
from blufunc.nn.normalization import affine, normalized, widened

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


class BatchNormResult(NamedTuple):
    """Normalised array ``out``, and updated running ``mean`` and ``variance``."""

    out: Any
    mean: Any
    variance: Any


def batch_norm(
    x: ArrayLike,
    mean: ArrayLike,
    variance: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    training: bool,
    momentum: ArrayLike = 0.99,
    eps: ArrayLike = 1e-5,
    axis: int = -1,
) -> BatchNormResult:
    """``(x - mean) / sqrt(variance + eps) * scale + bias`` (arXiv:1502.03167).

    Args:
      x: an array of batch, spatial and feature axes.
      mean, variance: the running statistics, one number for each feature. Begin with zeros and ones.
      scale, bias: one number for each feature; or None.
      training: normalise by the statistics of ``x`` and update the running ones; else by the running ones.
      momentum: weight of the old running statistics in the update.
      eps: added to the variance.
      axis: the axis of the features.
    Raises:
      ShapeError: statistics or parameters are not one number for each feature.
    """
    name = "batch_norm"
    x = as_inexact(x)
    axis, eps, momentum = axis_in(axis, x.ndim, name), number(eps, name), number(momentum, name)
    y = widened(x)
    shape = [n if d == axis else 1 for d, n in enumerate(x.shape)]
    old_mean, old_variance = (
        _of_features(name, what, p, y, axis) for what, p in (("mean", mean), ("variance", variance))
    )
    if training:
        axes = tuple([d for d in range(x.ndim) if d != axis])
        new_mean = bnp.mean(y, axis=axes)
        new_variance = bnp.mean(bnp.square(y - new_mean.reshape(shape)), axis=axes)
        y = normalized(y, axes, eps, True)
        old_mean = old_mean * momentum + lax.stop_gradient(new_mean) * (1 - momentum)
        old_variance = old_variance * momentum + lax.stop_gradient(new_variance) * (1 - momentum)
    else:
        y = (y - old_mean.reshape(shape)) * lax.rsqrt(old_variance + eps).reshape(shape)
    if scale is not None:
        y = y * _of_features(name, "scale", scale, y, axis).reshape(shape)
    if bias is not None:
        y = y + _of_features(name, "bias", bias, y, axis).reshape(shape)
    return BatchNormResult(y.astype(x.dtype), old_mean, old_variance)


def _of_features(name: str, what: str, p: Any, x: Any, axis: int) -> Any:
    p = bnp.asarray(p)
    if tuple(p.shape) != (x.shape[axis],):
        raise errors.ShapeError(
            f"{name}: {what} has shape {tuple(p.shape)}, and axis {axis} of x has {x.shape[axis]} features.",
            where=source.here(),
            fix=f"give {what} the shape ({x.shape[axis]},)",
        )
    return p.astype(x.dtype)


def group_norm(
    x: ArrayLike,
    num_groups: int,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: ArrayLike = 1e-6,
) -> Array:
    """Normalise each example over spatial axes and feature groups (arXiv:1803.08494).

    Args:
      x: [batch, ..., features].
      num_groups: number of groups of consecutive features.
      scale, bias: one number for each feature; or None.
      eps: added to the variance.
    Raises:
      ShapeError: the number of features is no multiple of ``num_groups``, or there is no batch axis.
    """
    x, num_groups = as_inexact(x), static_int(num_groups, "group_norm", "num_groups")
    if x.ndim < 2 or num_groups < 1 or x.shape[-1] % num_groups:
        raise errors.ShapeError(
            f"group_norm cannot divide the last axis of {tuple(x.shape)} into {num_groups} groups.",
            why="there must be a batch axis, and the number of groups must divide that of the features."
            if x.ndim < 2
            else None,
            where=source.here(),
            fix="give a number of groups that divides the number of features",
        )
    y = widened(x).reshape((x.shape[0], -1, num_groups, x.shape[-1] // num_groups))
    y = normalized(y, (1, 3), number(eps, "group_norm"), True).reshape(x.shape)
    return affine("group_norm", y, scale, bias).astype(x.dtype)


def instance_norm(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, eps: ArrayLike = 1e-6
) -> Array:
    """Normalise each feature of each example over spatial axes (arXiv:1607.08022).

    Arguments, result and errors are those of ``group_norm``.
    """
    x = as_inexact(x)
    return group_norm(x, max(x.shape[-1], 1) if x.ndim else 1, scale, bias, eps)


def weight_norm(
    weight: ArrayLike, scale: ArrayLike | None = None, *, axis: int = -1, eps: ArrayLike = 1e-12
) -> Array:
    """Weights rescaled to norm ``scale``, or 1, per feature (arXiv:1602.07868).

    Args:
      weight: an array.
      scale: one number for each feature; or None.
      axis: the axis of the features; lengths are taken over all others.
      eps: added to the squares of the lengths.
    """
    w = as_inexact(weight)
    axis = axis_in(axis, w.ndim, "weight_norm")
    axes = tuple([d for d in range(w.ndim) if d != axis])
    square = bnp.sum(bnp.square(w), axis=axes, keepdims=True) + number(eps, "weight_norm")
    w = w * lax.rsqrt(square)
    if scale is None:
        return w
    shape = [n if d == axis else 1 for d, n in enumerate(w.shape)]
    return w * _of_features("weight_norm", "scale", scale, w, axis).reshape(shape)


class SpectralNormResult(NamedTuple):
    """Normalised ``weight``, next estimate ``u``, largest singular value ``sigma``."""

    weight: Any
    u: Any
    sigma: Any


def spectral_norm(
    weight: ArrayLike, u: ArrayLike, *, n_steps: int = 1, eps: ArrayLike = 1e-12
) -> SpectralNormResult:
    """Weights divided by their largest singular value (Miyato et al., 1802.05957).

    Args:
      weight: an array, seen as a matrix whose columns are the features, the last axis.
      u: an estimate of the right singular vector, [features]: random at first, and then what the last call returned.
      n_steps: steps of the iteration.
      eps: added to the squares of lengths.
    """
    w, name = as_inexact(weight), "spectral_norm"
    if not w.ndim:
        raise errors.ShapeError(
            "spectral_norm takes weights of at least one axis.", where=source.here(), fix="weight[None]"
        )
    matrix, eps = w.reshape((-1, w.shape[-1])), number(eps, name)
    u = _of_features(name, "u", u, w, w.ndim - 1)
    constant = lax.stop_gradient(matrix)
    unit = lambda x: x * lax.rsqrt(bnp.sum(bnp.square(x)) + eps)
    v = unit(constant @ u)
    for i in range(static_int(n_steps, name, "n_steps")):
        v = unit(constant @ u) if i else v
        u = unit(v @ constant)
    u, v = lax.stop_gradient(u), lax.stop_gradient(v)
    sigma = v @ (matrix @ u)
    return SpectralNormResult(w / bnp.where(sigma == 0, 1, sigma), u, sigma)
