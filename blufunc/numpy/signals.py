"""Convolution and correlation of vectors, and window functions.

Face over products and cosines. A convolution is a product of the shorter vector with the matrix of all windows
into the longer one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.numpy.indexing import getitem
from blufunc.numpy.linear import matmul
from blufunc.numpy.promotion import as_value, constant, promote_dtypes, shape_of, static_int

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

_MODES = ("full", "same", "valid")


def _vectors(name: str, a: Any, v: Any, mode: Any) -> tuple[Array, Array]:
    if mode not in _MODES:
        raise errors.ValueRangeError(
            f"{name}: mode is {mode!r:.60}.", where=source.here(), fix="use 'full', 'same' or 'valid'"
        )
    a, v = promote_dtypes(name, as_value(a, name), as_value(v, name))
    if a.aval.ndim != 1 or v.aval.ndim != 1 or not a.aval.size or not v.aval.size:
        raise errors.ShapeError(
            f"{name} takes two vectors that have elements, not {a.aval} and {v.aval}.",
            where=source.here(),
            fix="vmap over further axes, or lax.conv_general_dilated",
        )
    return a, v


def _windowed(long: Array, weights: Array, before: int, count: int, precision: Any, preferred: Any) -> Array:
    """``count`` dot products of ``weights`` with zero-padded windows of ``long``."""
    n, m = long.aval.size, weights.aval.size
    padded = shape_ops.pad(
        long, constant(0, long.aval.dtype), [(before, max(0, count - 1 - before + m - n), 0)]
    )
    at = np.arange(count, dtype=np.int32)[:, None] + np.arange(m, dtype=np.int32)
    windows = getitem(padded, from_numpy(at))
    return matmul(windows, weights, precision=precision, preferred_element_type=preferred)


def convolve(
    a: ArrayLike,
    v: ArrayLike,
    mode: str = "full",
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """The convolution of two vectors: ``sum_j a[j] v[i - j]``.

    ``mode='full'`` gives all ``n + m - 1`` values that are not 0 by necessity, ``'same'`` the ``max(n, m)`` in the
    middle, ``'valid'`` those for which the shorter lies within the longer.
    """
    a, v = _vectors("convolve", a, v, mode)
    long, short = (a, v) if a.aval.size >= v.aval.size else (v, a)
    n, m = long.aval.size, short.aval.size
    start, count = {"full": (0, n + m - 1), "same": ((m - 1) // 2, n), "valid": (m - 1, n - m + 1)}[mode]
    return _windowed(
        long, shape_ops.rev(short, (0,)), m - 1 - start, count, precision, preferred_element_type
    )


def correlate(
    a: ArrayLike,
    v: ArrayLike,
    mode: str = "valid",
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """The correlation of two vectors: ``sum_j a[i + j] conj(v[j])``."""
    a, v = _vectors("correlate", a, v, mode)
    v = ops.conj(v)
    if a.aval.size >= v.aval.size:
        n, m = a.aval.size, v.aval.size
        start, count = {"full": (m - 1, n + m - 1), "same": (m // 2, n), "valid": (0, n - m + 1)}[mode]
        return _windowed(a, v, start, count, precision, preferred_element_type)
    n, m = v.aval.size, a.aval.size
    start, count = {"full": (m - 1, n + m - 1), "same": (m // 2, n), "valid": (0, n - m + 1)}[mode]
    return shape_ops.rev(_windowed(v, a, start, count, precision, preferred_element_type), (0,))


# -- windows ---------------------------------------------------------------------------------------


def _phase(M: Any, name: str) -> np.ndarray:
    """The positions of a window of M points between -1 and 1; of one point, 0."""
    (n,) = shape_of((static_int(M, name, "M"),), name)
    return np.linspace(-1, 1, n) if n != 1 else np.zeros(1)


def bartlett(M: int) -> Array:
    """The triangular window of M points, which is 0 at both ends; float32."""
    return from_numpy((1 - np.abs(_phase(M, "bartlett"))).astype(dtypes.default(float)))


def _cosines(M: Any, name: str, *weights: float) -> Array:
    t = _phase(M, name)
    terms = [w * np.cos(np.pi * k * t) for k, w in enumerate(weights)]
    return from_numpy(np.sum(terms, 0).astype(dtypes.default(float)))


def hanning(M: int) -> Array:
    """The Hann window of M points, ``(1 + cos(pi t)) / 2``, t from -1 to 1; float32."""
    return _cosines(M, "hanning", 0.5, 0.5)


def hamming(M: int) -> Array:
    """The Hamming window of M points, ``0.54 + 0.46 cos(pi t)``; float32."""
    return _cosines(M, "hamming", 0.54, 0.46)


def blackman(M: int) -> Array:
    """The Blackman window, ``0.42 + 0.5 cos(pi t) + 0.08 cos(2 pi t)``; float32."""
    return _cosines(M, "blackman", 0.42, 0.5, 0.08)
