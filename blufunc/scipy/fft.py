"""``scipy.fft``: discrete cosine transforms of types 1 to 4.

A face above ``blufunc.numpy.fft``. Each type is one FFT of a real sequence that is rearranged, or extended by its
mirror image: J. Makhoul, "A fast cosine transform in one and two dimensions" (1980), for types 2 and 3; the definitions
of SciPy for the others. Functions take real numbers; integers become float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, ints, static_int
from blufunc.core.ir.trace import Array
from blufunc.numpy import fft
from blufunc.numpy.promotion import inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

__all__ = ["dct", "dctn", "idct", "idctn"]

_NORMS = (None, "backward", "ortho", "forward")


def _twiddle(n: int, offset: float, dtype: Any) -> Array:
    """``exp(-i pi (k + offset) / 2n)`` for k < n."""
    angle = (bnp.arange(n, dtype=dtype) + offset) * (-math.pi / (2 * n))
    return bnp.cos(angle) + 1j * bnp.sin(angle)


def _dct1(x: Array, n: int) -> Array:
    return bnp.real(fft.rfft(bnp.concatenate([x, x[..., -2:0:-1]], -1)))


def _dct2(x: Array, n: int) -> Array:
    # even elements upwards, then odd ones downwards: one FFT of n points
    z = fft.fft(bnp.concatenate([x[..., ::2], x[..., 1::2][..., ::-1]], -1))
    return 2 * bnp.real(z * _twiddle(n, 0, x.dtype))


def _dct3(x: Array, n: int) -> Array:
    # the transpose of type 2, step by step
    back = bnp.concatenate([bnp.zeros_like(x[..., :1]), x[..., :0:-1]], -1)
    z = fft.ifft((x - 1j * back) * bnp.conj(_twiddle(n, 0, x.dtype))) * n
    even = (n + 1) // 2
    spread = bnp.zeros_like(x).at[..., ::2].set(bnp.real(z[..., :even]))
    return spread.at[..., 1::2].set(bnp.real(z[..., even:][..., ::-1]))


def _dct4(x: Array, n: int) -> Array:
    padded = bnp.concatenate([x * _twiddle(n, 0, x.dtype), bnp.zeros_like(x)], -1)
    return 2 * bnp.real(fft.fft(padded)[..., :n] * _twiddle(n, 0.5, x.dtype))


_TYPES: dict[int, Callable[[Array, int], Array]] = {1: _dct1, 2: _dct2, 3: _dct3, 4: _dct4}
_INVERSE = {1: 1, 2: 3, 3: 2, 4: 4}


def _orthonormal(x: Array, kind: int, n: int, before: bool) -> Array:
    """Factors of the first and last element that make a type orthonormal."""
    root = math.sqrt(2.0)
    ends = {1: (root, root), 2: (1 / root, 1), 3: (root, 1), 4: (1, 1)}[kind]
    at = {1: True, 2: False, 3: True, 4: False}
    if at[kind] == before:
        x = x.at[..., 0].multiply(ends[0], unique_indices=True)
        if kind == 1:
            x = x.at[..., -1].multiply(ends[1], unique_indices=True)
    if kind == 1 and not before:
        x = x.at[..., 0].multiply(1 / root, unique_indices=True)
        x = x.at[..., -1].multiply(1 / root, unique_indices=True)
    return x


def _along(x: Array, kind: int, n: int | None, axis: int, norm: Any, name: str, inverse: bool) -> Array:
    if kind not in _TYPES:
        raise errors.ValueRangeError(
            f"{name}: {kind!r:.60} is not a type.", where=source.here(), fix="type=1, 2, 3 or 4"
        )
    if norm not in _NORMS:
        raise errors.ValueRangeError(
            f"{name}: {norm!r:.60} is not a normalization.",
            where=source.here(),
            fix="norm='backward', 'ortho' or 'forward'",
        )
    axis = axis_in(axis, x.aval.ndim, name)
    x = bnp.moveaxis(x, axis, -1)
    if n is not None:
        cut = x[..., :n]
        x = bnp.pad(cut, [(0, 0)] * (x.ndim - 1) + [(0, n - cut.shape[-1])])
    n = x.shape[-1]
    if n < (2 if kind == 1 else 1):
        raise errors.ValueRangeError(
            f"{name} of type {kind} over {n} points.", where=source.here(), fix="give more points"
        )
    period = 2 * (n - 1) if kind == 1 else 2 * n
    kind = _INVERSE[kind] if inverse else kind
    scaled = {None: inverse, "backward": inverse, "forward": not inverse, "ortho": False}[norm]
    if norm == "ortho":
        x = _orthonormal(x, kind, n, before=True)
    x = _TYPES[kind](x, n)
    if norm == "ortho":
        x = _orthonormal(x, kind, n, before=False) * (1 / math.sqrt(period))
    if scaled:
        x = x * (1 / period)
    return bnp.moveaxis(x, -1, axis)


def _operand(x: Any, name: str) -> Array:
    x = inexact(x, name)
    if dtypes.is_complex(x.aval.dtype):
        raise errors.DtypeError(
            f"{name} takes real numbers, not {x.aval}.",
            where=source.here(),
            fix="transform x.real and x.imag",
        )
    return x


def _one(x: Any, type: int, n: Any, axis: int, norm: Any, name: str, inverse: bool) -> Array:
    x = _operand(x, name)
    n = None if n is None else static_int(n, name, "n")
    if n is not None and n < 1:
        raise errors.ValueRangeError(f"{name} over {n} points.", where=source.here(), fix="give 1 or more")
    return _along(x, type, n, axis, norm, name, inverse)


def _several(x: Any, type: int, s: Any, axes: Any, norm: Any, name: str, inverse: bool) -> Array:
    x = _operand(x, name)
    sizes = None if s is None else ints(s, name, "s")
    if axes is None:
        count = x.aval.ndim if sizes is None else len(sizes)
        axes = range(x.aval.ndim - count, x.aval.ndim)
    axes = [axis_in(d, x.aval.ndim, name) for d in axes]
    if len(set(axes)) != len(axes) or (sizes is not None and len(sizes) != len(axes)):
        raise errors.ValueRangeError(
            f"{name} of {x.aval}: axes {tuple(axes)}, s {s}.",
            where=source.here(),
            fix="name each axis once, and give as many sizes as axes",
        )
    for i, d in enumerate(axes):
        x = _along(x, type, None if sizes is None else sizes[i], d, norm, name, inverse)
    return x


def dct(x: ArrayLike, type: int = 2, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The discrete cosine transform along an axis.

    Type 2 is ``y[k] = 2 sum_j x[j] cos(pi k (2j + 1) / 2n)``.

    Args:
      x: real numbers.
      type: 1, 2, 3 or 4.
      n: the number of points; the axis is truncated, or padded with zeros.
      axis: the axis.
      norm: ``"backward"`` (None): unscaled; ``"ortho"``: orthonormal; ``"forward"``: divided by 2n, or 2(n - 1) for
        type 1.
    """
    return _one(x, type, n, axis, norm, "dct", False)


def idct(x: ArrayLike, type: int = 2, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The inverse of ``dct`` with the same arguments."""
    return _one(x, type, n, axis, norm, "idct", True)


def dctn(
    x: ArrayLike,
    type: int = 2,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
) -> Array:
    """``dct`` along axes: all, or the last ``len(s)``, by default; s has the sizes."""
    return _several(x, type, s, axes, norm, "dctn", False)


def idctn(
    x: ArrayLike,
    type: int = 2,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
) -> Array:
    """The inverse of ``dctn`` with the same arguments."""
    return _several(x, type, s, axes, norm, "idctn", True)
