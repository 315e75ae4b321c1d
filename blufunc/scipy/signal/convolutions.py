"""Convolution and correlation in any number of dimensions, directly or by FFT.

A face above ``blufunc.lax``. A correlation is the convolution with the conjugate reversed kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axes_in
from blufunc.core.ir.trace import Array
from blufunc.numpy import fft
from blufunc.numpy.promotion import promote_dtypes

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

__all__ = ["convolve", "convolve2d", "correlate", "correlate2d", "fftconvolve"]

_BOUNDARIES = {
    **dict.fromkeys(("fill", "pad"), "constant"),
    **dict.fromkeys(("wrap", "circular"), "wrap"),
    **dict.fromkeys(("symm", "symmetric"), "symmetric"),
}


def _operands(name: str, in1: Any, in2: Any, mode: Any, ndim: int | None = None) -> tuple[Array, Array]:
    if mode not in ("full", "same", "valid"):
        raise errors.ValueRangeError(
            f"{name}: mode is {mode!r:.60}.", where=source.here(), fix="use 'full', 'same' or 'valid'"
        )
    a, b = promote_dtypes(name, in1, in2, inexact=True)
    if a.aval.ndim != b.aval.ndim or ndim not in (None, a.aval.ndim):
        raise errors.ShapeError(
            f"{name} of {a.aval} and {b.aval}, which are not both of {f'rank {ndim}' if ndim else 'one rank'}.",
            where=source.here(),
            fix="insert axes of size 1, or vmap over further axes",
        )
    if not a.aval.size or not b.aval.size:
        raise errors.ShapeError(
            f"{name} of {a.aval} and {b.aval}, which have no elements.", where=source.here()
        )
    return a, b


def _window(mode: str, n: int, m: int, late: bool = False) -> tuple[int, int]:
    """First element and size of the part of the full convolution for a mode.

    ``late``: of the two elements in the middle of a kernel of even size, the later is the centre.
    """
    middle = m // 2 if late else (m - 1) // 2
    return {"full": (0, n + m - 1), "same": (middle, n), "valid": (m - 1, n - m + 1)}[mode]


def _in_order(name: str, a: Array, b: Array, mode: str, axes: Sequence[int]) -> tuple[Array, Array]:
    """For ``"valid"``, the larger operand first: convolution commutes."""
    if mode != "valid":
        return a, b
    sizes = [(a.aval.shape[d], b.aval.shape[d]) for d in axes]
    if all(n >= m for n, m in sizes):
        return a, b
    if all(n <= m for n, m in sizes):
        return b, a
    raise errors.ShapeError(
        f"{name} of {a.aval} and {b.aval} in mode 'valid': neither lies within the other.",
        where=source.here(),
        fix="mode='full' or 'same'",
    )


def _direct(name: str, a: Array, b: Array, mode: str, precision: Any, late: bool = False) -> Array:
    a, b = _in_order(name, a, b, mode, range(a.aval.ndim))
    pads = []
    for n, m in zip(a.aval.shape, b.aval.shape, strict=True):
        start, count = _window(mode, n, m, late)
        low = m - 1 - start
        pads.append((low, count - n - low + m - 1))
    one, strides = (None, None), (1,) * a.aval.ndim
    return lax.conv_general_dilated(a[one], bnp.flip(b)[one], strides, pads, precision=precision)[0, 0]


def _by_fft(name: str, a: Array, b: Array, mode: str, axes: Sequence[int]) -> Array:
    a, b = _in_order(name, a, b, mode, axes)
    sizes = [a.aval.shape[d] + b.aval.shape[d] - 1 for d in axes]
    points = [_fast_length(n) for n in sizes]
    if dtypes.is_complex(a.aval.dtype):
        out = fft.ifftn(fft.fftn(a, points, axes) * fft.fftn(b, points, axes), points, axes)
    else:
        out = fft.irfftn(fft.rfftn(a, points, axes) * fft.rfftn(b, points, axes), points, axes)
    at = [slice(None)] * out.ndim
    for d in axes:
        start, count = _window(mode, a.aval.shape[d], b.aval.shape[d])
        at[d] = slice(start, start + count)
    return out[tuple(at)].astype(a.aval.dtype)


def _fast_length(n: int) -> int:
    """The smallest product of powers of 2, 3 and 5 of at least n."""
    best = 1 << (n - 1).bit_length()
    for i, j in itertools.product(range(n.bit_length()), repeat=2):
        odd = 3**i * 5**j
        if odd < best:
            best = min(best, odd << max(0, (math.ceil(n / odd) - 1).bit_length()))
    return best


def convolve(
    in1: ArrayLike, in2: ArrayLike, mode: str = "full", method: str = "auto", precision: Any = None
) -> Array:
    """The convolution of two arrays of one rank.

    Args:
      in1, in2: arrays; integers become float32.
      mode: ``"full"``; ``"same"``: the middle of it, of in1's shape; ``"valid"``: where one lies within the other.
      method: ``"direct"`` (``"auto"``) or ``"fft"``.
      precision: of the direct method.
    """
    a, b = _operands("convolve", in1, in2, mode)
    return _convolved("convolve", a, b, mode, method, precision)


def _convolved(name: str, a: Array, b: Array, mode: str, method: str, precision: Any) -> Array:
    if method not in ("auto", "direct", "fft"):
        raise errors.ValueRangeError(
            f"{name}: {method!r:.60} is not a method.", where=source.here(), fix="method='direct' or 'fft'"
        )
    if not a.aval.ndim:
        return a * b
    if method == "fft":
        return _by_fft(name, a, b, mode, range(a.aval.ndim))
    return _direct(name, a, b, mode, precision)


def correlate(
    in1: ArrayLike, in2: ArrayLike, mode: str = "full", method: str = "auto", precision: Any = None
) -> Array:
    """The correlation ``sum_j in1[i + j] conj(in2[j])``; arguments of ``convolve``."""
    a, b = _operands("correlate", in1, in2, mode)
    return _convolved("correlate", a, bnp.conj(bnp.flip(b)), mode, method, precision)


def fftconvolve(
    in1: ArrayLike, in2: ArrayLike, mode: str = "full", axes: Sequence[int] | None = None
) -> Array:
    """``convolve`` by FFT, over all axes or some; the others broadcast."""
    a, b = _operands("fftconvolve", in1, in2, mode)
    dims = axes_in(axes, a.aval.ndim, "fftconvolve")
    for d, (n, m) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)):
        if d not in dims and n != m and 1 not in (n, m):
            raise errors.ShapeError(
                f"fftconvolve of {a.aval} and {b.aval} over axes {dims}: axis {d} differs.",
                where=source.here(),
            )
    return _by_fft("fftconvolve", a, b, mode, dims) if dims else a * b


def convolve2d(
    in1: ArrayLike,
    in2: ArrayLike,
    mode: str = "full",
    boundary: str = "fill",
    fillvalue: float = 0,
    precision: Any = None,
) -> Array:
    """The convolution of two matrices; see ``convolve``.

    Args:
      boundary: how in1 continues outside: ``"fill"`` (``fillvalue``), ``"wrap"`` (periodic) or ``"symm"`` (reflected).
      fillvalue: the value outside.
    """
    a, b = _operands("convolve2d", in1, in2, mode, 2)
    return _bounded("convolve2d", a, b, mode, boundary, fillvalue, precision)


def correlate2d(
    in1: ArrayLike,
    in2: ArrayLike,
    mode: str = "full",
    boundary: str = "fill",
    fillvalue: float = 0,
    precision: Any = None,
) -> Array:
    """The correlation of two matrices; arguments of ``convolve2d``."""
    a, b = _operands("correlate2d", in1, in2, mode, 2)
    return _bounded("correlate2d", a, bnp.conj(bnp.flip(b)), mode, boundary, fillvalue, precision, late=True)


def _bounded(
    name: str,
    a: Array,
    b: Array,
    mode: str,
    boundary: str,
    fillvalue: float,
    precision: Any,
    late: bool = False,
) -> Array:
    if boundary not in _BOUNDARIES:
        raise errors.ValueRangeError(
            f"{name}: {boundary!r:.60} is not a boundary.",
            where=source.here(),
            fix="boundary='fill', 'wrap' or 'symm'",
        )
    how = _BOUNDARIES[boundary]
    zeros = how == "constant" and isinstance(fillvalue, (int, float)) and fillvalue == 0
    if mode == "valid" or zeros:
        return _direct(name, a, b, mode, precision, late)
    pads = [(m - 1, m - 1) for m in b.aval.shape]
    options = {"constant_values": fillvalue} if how == "constant" else {}
    full = _direct(name, bnp.pad(a, pads, mode=how, **options), b, "valid", precision)
    (i, m), (j, n) = (_window(mode, *sizes, late) for sizes in zip(a.aval.shape, b.aval.shape, strict=True))
    return full[i : i + m, j : j + n]
