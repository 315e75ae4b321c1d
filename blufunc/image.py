"""``image``: resampling of images, ``resize`` and ``scale_and_translate``.

A face above ``blufunc.numpy``. Images are arrays of any rank. Along each resampled dimension an output pixel is a
weighted sum of input pixels, so a resize is one small matmul a dimension, which is linear in the image and compiles to
GEMMs. Pixel i covers the interval from i to i + 1, and its centre is i + 0.5.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.axes import axis_in, sequence, shape_of
from blufunc.core.ir.trace import Array
from blufunc.core.ops.linalg.common import real_dtype
from blufunc.numpy.promotion import as_value, inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

__all__ = ["ResizeMethod", "resize", "scale_and_translate"]


class ResizeMethod(enum.Enum):
    """Interpolation methods of ``resize``; functions take their lower-case names, too."""

    NEAREST = 0
    LINEAR = 1
    LANCZOS3 = 2
    LANCZOS5 = 3
    CUBIC = 4
    CUBIC_PYTORCH = 5
    AREA = 6

    @staticmethod
    def from_string(s: str) -> ResizeMethod:
        """The method of a name, such as ``"bilinear"``."""
        if s in _NAMES:
            return _NAMES[s]
        raise errors.ValueRangeError(
            f"resize: {s!r:.60} is not a method.", where=source.here(), fix=f"one of {', '.join(_NAMES)}"
        )


_NAMES = {
    "nearest": ResizeMethod.NEAREST,
    **dict.fromkeys(("linear", "bilinear", "trilinear", "triangle"), ResizeMethod.LINEAR),
    "lanczos3": ResizeMethod.LANCZOS3,
    "lanczos5": ResizeMethod.LANCZOS5,
    **dict.fromkeys(("cubic", "bicubic", "tricubic"), ResizeMethod.CUBIC),
    **dict.fromkeys(("cubic-pytorch", "bicubic-pytorch"), ResizeMethod.CUBIC_PYTORCH),
    "area": ResizeMethod.AREA,
}


# -- kernels: functions of the distance of a pixel from the sample, in pixels ----------------------


def _triangle(x: Array) -> Array:
    return bnp.maximum(1 - x, 0)


def _keys(a: float) -> Callable[[Array], Array]:
    """A cubic: R. Keys, "Cubic convolution interpolation" (1981), (15)."""

    def kernel(x: Array) -> Array:
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = a * (((x - 5) * x + 8) * x - 4)
        return bnp.where(x < 1, near, bnp.where(x < 2, far, 0))

    return kernel


def _lanczos(radius: int) -> Callable[[Array], Array]:
    """A sinc, windowed by the central lobe of a wider one."""
    return lambda x: bnp.where(x < radius, bnp.sinc(x) * bnp.sinc(x / radius), 0)


_KERNELS: dict[ResizeMethod, Callable[[Array], Array]] = {
    ResizeMethod.LINEAR: _triangle,
    ResizeMethod.LANCZOS3: _lanczos(3),
    ResizeMethod.LANCZOS5: _lanczos(5),
    ResizeMethod.CUBIC: _keys(-0.5),
}


def _weights(
    n: int, out: int, scale: Any, translation: Any, method: ResizeMethod, antialias: bool, dtype: Any
) -> Array:
    """Weights (n, out) of input pixels in output pixels; 0 outside the image."""
    step = 1 / bnp.asarray(scale, dtype)
    shift = bnp.asarray(translation, dtype)
    centre = (bnp.arange(out, dtype=dtype) + 0.5 - shift) * step - 0.5
    pixels = bnp.arange(n, dtype=dtype)[:, None]
    if method is ResizeMethod.CUBIC_PYTORCH and antialias:
        method = ResizeMethod.CUBIC
    if method is ResizeMethod.CUBIC_PYTORCH:
        # four taps around the sample, of which those outside read the edge
        first = bnp.floor(centre) - 1
        weights = bnp.zeros((n, out), dtype)
        for k in range(4):
            tap = bnp.clip(first + k, 0, n - 1)
            weights = weights + bnp.where(pixels == tap, _keys(-0.75)(bnp.abs(centre - first - k)), 0)
    elif method is ResizeMethod.AREA:
        # the part of the output pixel that an input pixel covers
        low = centre + 0.5 - 0.5 * step
        covered = bnp.minimum(low + step, pixels + 1) - bnp.maximum(low, pixels)
        weights = bnp.maximum(covered, 0)
    else:
        width = bnp.maximum(step, 1) if antialias else 1
        weights = _KERNELS[method](bnp.abs(centre - pixels) / width)
    total = bnp.sum(weights, 0)
    usable = bnp.abs(total) > 1000 * float(bnp.finfo(dtype).eps)
    weights = bnp.where(usable, weights / bnp.where(usable, total, 1), 0)
    return bnp.where((centre >= -0.5) & (centre <= n - 0.5), weights, 0)


def _resample(
    x: Array,
    shape: Sequence[int],
    dims: Sequence[int],
    scale: Sequence[Any],
    translation: Sequence[Any],
    method: ResizeMethod,
    antialias: bool,
    precision: Any,
) -> Array:
    wide = bnp.promote_types(real_dtype(x.aval.dtype), "float32")
    for d, s, t in zip(dims, scale, translation, strict=True):
        w = _weights(x.shape[d], shape[d], s, t, method, antialias, wide).astype(x.dtype)
        x = bnp.moveaxis(bnp.tensordot(x, w, (d, 0), precision=precision), -1, d)
    return x


# -- functions -------------------------------------------------------------------------------------


def _method(method: Any) -> ResizeMethod:
    return method if isinstance(method, ResizeMethod) else ResizeMethod.from_string(method)


def _shape(name: str, x: Array, shape: Any) -> tuple[int, ...]:
    shape = shape_of(shape, name)
    if len(shape) != x.aval.ndim:
        raise errors.ShapeError(
            f"{name} of {x.aval} to {shape}: the new shape has another rank.",
            where=source.here(),
            fix="give a size for every dimension, batch and channels included",
        )
    return shape


def resize(
    image: ArrayLike,
    shape: Sequence[int],
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
) -> Array:
    """Resize an image to ``shape``.

    Args:
      image: an array of any rank.
      shape: a size for each dimension; dimensions of unchanged size are left alone.
      method: ``"nearest"``, ``"linear"``, ``"cubic"`` (Keys, a = -1/2), ``"cubic-pytorch"`` (a = -3/4 and repeated
        edges without antialiasing), ``"lanczos3"``, ``"lanczos5"``, ``"area"`` (means of the covered pixels).
      antialias: when shrinking, widen the kernel to the size of the new pixels.
      precision: of the matmuls.
    Returns:
      an array of that shape, of the image's dtype for ``"nearest"``; otherwise integers become float32.
    """
    x, method = as_value(image, "resize"), _method(method)
    shape = _shape("resize", x, shape)
    dims = [d for d, n in enumerate(shape) if n != x.aval.shape[d]]
    if method is ResizeMethod.NEAREST:
        for d in dims:
            n, m = x.aval.shape[d], shape[d]
            at = bnp.floor((bnp.arange(m, dtype="float32") + 0.5) * n / m).astype("int32")
            x = bnp.take(x, at, axis=d)
        return x
    x = inexact(x, "resize")
    scale = [shape[d] / x.aval.shape[d] if shape[d] else 1.0 for d in dims]
    return _resample(x, shape, dims, scale, [0.0] * len(dims), method, antialias, precision)


def scale_and_translate(
    image: ArrayLike,
    shape: Sequence[int],
    spatial_dims: Sequence[int],
    scale: ArrayLike,
    translation: Any,
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
) -> Array:
    """Resample so that x in the image is at ``x * scale + translation`` in the result.

    Args:
      image: an array of any rank.
      shape: of the result, a size for each dimension.
      spatial_dims: the k dimensions to resample; sizes of the others must not change.
      scale, translation: (k,), differentiable; coordinates are those of pixel edges (centres are at half integers).
      method, antialias, precision: as of ``resize``, without ``"nearest"``.
    Returns:
      an array of that shape; 0 where the sample is outside the image.
    """
    x, method = inexact(as_value(image, "scale_and_translate"), "scale_and_translate"), _method(method)
    shape = _shape("scale_and_translate", x, shape)
    if method is ResizeMethod.NEAREST:
        raise errors.ValueRangeError(
            "scale_and_translate has no method 'nearest'.", where=source.here(), fix="method='linear'"
        )
    dims = sequence(spatial_dims, "scale_and_translate", "spatial_dims")
    dims = [axis_in(d, x.aval.ndim, "scale_and_translate") for d in dims]
    if any(n != m for d, (n, m) in enumerate(zip(x.aval.shape, shape, strict=True)) if d not in dims):
        raise errors.ShapeError(
            f"scale_and_translate of {x.aval} to {shape} over the dimensions {tuple(dims)} changes another dimension.",
            where=source.here(),
            fix="name every dimension that changes in spatial_dims",
        )
    scale, translation = bnp.asarray(scale), bnp.asarray(translation)
    if scale.shape != (len(dims),) or translation.shape != (len(dims),):
        raise errors.ShapeError(
            f"scale_and_translate over {len(dims)} dimensions, with a scale {scale.aval} and a translation "
            f"{translation.aval}.",
            where=source.here(),
            fix="give one number of each for each of spatial_dims",
        )
    return _resample(x, shape, dims, list(scale), list(translation), method, antialias, precision)
