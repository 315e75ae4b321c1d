"""Normalisation over axes: ``layer_norm``, ``rms_norm``, ``standardize``.

A face. Half-precision input is normalised, scaled and shifted in float32, and only the result is rounded:
squares of half-precision numbers overflow or vanish too easily.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.axes import axes_in
from blufunc.core.ops.rows import wide_dtype
from blufunc.nn.activations import Axis, as_inexact, number, spread
from blufunc.numpy.promotion import fits
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    axis: Axis = -1,
) -> Array:
    """``(x - mean) / sqrt(variance + eps) * scale + bias`` (arXiv:1607.06450).

    Args:
      x: an array.
      scale, bias: arrays that broadcast against ``x`` without widening it, usually of the shape of the normalised
        axes; or None.
      eps: added to the variance.
      axis: the axis, or axes, over which mean and variance are taken.
    Returns:
      an array of the shape and dtype of ``x``.
    Raises:
      ShapeError: ``scale`` or ``bias`` does not broadcast against ``x``.
    """
    return _norm("layer_norm", x, scale, bias, eps, axis, True)


def rms_norm(x: ArrayLike, scale: ArrayLike | None = None, eps: float = 1e-6, axis: Axis = -1) -> Array:
    """``x / sqrt(mean(x**2) + eps) * scale`` (Zhang & Sennrich, arXiv:1910.07467).

    Arguments, result and errors are those of ``layer_norm``; the usual ``eps`` is smaller.
    """
    return _norm("rms_norm", x, scale, None, eps, axis, False)


def standardize(
    x: ArrayLike,
    axis: Axis = -1,
    mean: ArrayLike | None = None,
    variance: ArrayLike | None = None,
    epsilon: float = 1e-5,
    where: ArrayLike | None = None,
    *,
    algorithm: str = "fast",
) -> Array:
    """``(x - mean) / sqrt(variance + epsilon)``, by default with the moments of ``x``.

    Given moments broadcast against ``x``; ``where``, booleans that do too, masks elements out of the others.
    Unlike in JAX, the variance is that of the centred values for either ``algorithm``, ``"fast"`` or
    ``"stable"``: the mean of squares minus the square of the mean cancels for data far from 0.
    """
    if algorithm not in ("fast", "stable"):
        raise errors.ValueRangeError(
            f"standardize: {algorithm!r:.60} is not an algorithm.",
            where=source.here(),
            fix="algorithm='stable'",
        )
    x, epsilon = as_inexact(x), number(epsilon, "standardize")
    if mean is None and variance is None and where is None:
        return _norm("standardize", x, None, None, epsilon, axis, True)
    if mean is None:
        mean = bnp.mean(x, axis=axis, keepdims=True, where=where)
    centred = x - number(mean, "standardize")
    if variance is None:
        variance = bnp.mean(bnp.square(centred), axis=axis, keepdims=True, where=where)
    return centred * lax.rsqrt(bnp.asarray(variance) + epsilon)


def _norm(name: str, x, scale, bias, eps, axis, centred: bool):
    x = as_inexact(x)
    axes, eps = axes_in(axis, x.ndim, name), number(eps, name)
    return affine(name, normalized(widened(x), axes, eps, centred), scale, bias).astype(x.dtype)


def affine(name: str, y: Any, scale: Any, bias: Any) -> Any:
    """``y * scale + bias``; None leaves either out."""
    if scale is not None:
        y = y * _parameter(name, "scale", scale, y)
    return y if bias is None else y + _parameter(name, "bias", bias, y)


def _moments(x, axes, eps, centred):
    """Normalised x, and the factor 1 / sqrt(second moment + eps), of the shape of x."""
    n = max(math.prod([x.shape[d] for d in axes]), 1)
    if centred:
        x = x + spread(bnp.sum(x, axis=axes) * (-1 / n), x.shape, axes)
    factor = lax.rsqrt(bnp.sum(bnp.square(x), axis=axes) * (1 / n) + eps)
    factor = spread(factor, x.shape, axes)
    return x * factor, factor


def _normalized_value(x, axes, eps, centred):
    return _moments(x, axes, eps, centred)[0]


normalized = custom_jvp(_normalized_value, nondiff_argnums=(1, 2, 3))


@normalized.defjvp
def _normalized_jvp(axes, eps, centred, primals, tangents):
    # The derivative removes changes of mean and length: two projections. It needs only the result, so reverse
    # mode keeps one residual; the derivatives of the steps would keep three.
    (x,), (t,) = primals, tangents
    y, factor = _moments(x, axes, eps, centred)
    per_element = -1 / math.prod([x.shape[d] for d in axes])
    t = t * factor
    out = t + y * spread(bnp.sum(y * t, axis=axes) * per_element, x.shape, axes)
    if centred:
        out = out + spread(bnp.sum(t, axis=axes) * per_element, x.shape, axes)
    return y, out


def widened(x: Any) -> Any:
    """``x`` in a dtype wide enough for sums of squares: half precisions as float32."""
    wide = wide_dtype(x.dtype)
    return x if wide == x.dtype else x.astype(wide)


def _parameter(name: str, role: str, p: Any, y: Any) -> Any:
    """A scale or bias in the dtype of ``y``, checked to broadcast against it."""
    p = bnp.asarray(p).astype(y.dtype)
    if not fits(p.shape, y.shape):
        raise errors.ShapeError(
            f"{name}: {role} of shape {tuple(p.shape)} does not broadcast against x of shape {tuple(y.shape)}.",
            where=source.here(),
            fix=f"give {role} the shape of the normalised axes, {tuple(y.shape[-1:])} for the last one",
        )
    return p
