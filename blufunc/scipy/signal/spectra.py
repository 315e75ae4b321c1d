"""Short-time Fourier transforms, and spectral densities by Welch's method.

A face above ``blufunc.numpy.fft``. Overlapping segments are gathered, windowed and transformed together: P. D. Welch,
"The use of fast Fourier transform for the estimation of power spectra" (1967). Windows are static: SciPy makes those
that have a name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import _lazy, errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops.linalg.common import complex_dtype, real_dtype
from blufunc.numpy import fft
from blufunc.numpy.promotion import inexact, promote_dtypes
from blufunc.scipy.signal.trends import detrend as without_trend

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

with _lazy.modules(globals()):
    import scipy

__all__ = ["csd", "istft", "stft", "welch"]

_EXTENSIONS = {"zeros": "constant", "constant": "edge", "even": "reflect", "odd": "reflect"}


class _Plan(NamedTuple):
    """The segments of a signal.

    Attributes:
      window: float64 (nperseg,) or a vector of the user's.
      nperseg, step, nfft: the length of a segment, the distance of two, and the number of frequencies.
    """

    window: Any
    nperseg: int
    step: int
    nfft: int


def _plan(name: str, window: Any, nperseg: int | None, noverlap: Any, nfft: Any, length: int) -> _Plan:
    if isinstance(window, (str, tuple)):
        asked = 256 if nperseg is None else static_int(nperseg, name, "nperseg")
        if asked < 1:
            raise errors.ValueRangeError(
                f"{name}: nperseg = {asked}.", where=source.here(), fix="give 1 or more"
            )
        if nperseg is not None and asked > length:
            warnings.warn(
                f"{name}: segments of {asked} points of a signal of {length}: nperseg={length} is used.",
                stacklevel=3,
            )
        nperseg = min(asked, length)
        window = scipy.signal.get_window(window, nperseg)
    else:
        window = bnp.asarray(window)
        if window.ndim != 1 or nperseg not in (None, window.shape[0]) or window.shape[0] > length:
            raise errors.ShapeError(
                f"{name}: a window {window.aval} for segments of {nperseg or length} points.",
                where=source.here(),
                fix="a window is a vector of nperseg elements, no more than the signal has",
            )
        nperseg = window.shape[0]
    nfft = nperseg if nfft is None else static_int(nfft, name, "nfft")
    noverlap = nperseg // 2 if noverlap is None else static_int(noverlap, name, "noverlap")
    if nfft < nperseg or not 0 <= noverlap < nperseg:
        raise errors.ValueRangeError(
            f"{name}: nperseg = {nperseg}, noverlap = {noverlap}, nfft = {nfft}.",
            where=source.here(),
            fix="noverlap < nperseg <= nfft",
        )
    return _Plan(window, nperseg, nperseg - noverlap, nfft)


def _trend(name: str, detrend: Any) -> Callable[[Array], Array]:
    if detrend is False or detrend is None:
        return lambda x: x
    if callable(detrend):
        return detrend
    return functools.partial(without_trend, type=detrend)


def _spectrum(x: Array, plan: _Plan, trend: Callable[[Array], Array], onesided: bool) -> Array:
    """Transforms (..., segments, frequencies) of segments along the last axis."""
    count = (x.shape[-1] - plan.nperseg) // plan.step + 1
    at = np.arange(count)[:, None] * plan.step + np.arange(plan.nperseg)
    segments = trend(x[..., at]) * bnp.asarray(plan.window, dtype=real_dtype(x.dtype))
    return (fft.rfft if onesided else fft.fft)(segments, plan.nfft)


def _frequencies(n: int, fs: Any, onesided: bool, dtype: Any) -> Array:
    return (fft.rfftfreq if onesided else fft.fftfreq)(n, 1 / bnp.asarray(fs, dtype)).astype(dtype)


def _extended(x: Array, how: str, n: int) -> Array:
    """A signal with n more points at both ends of its last axis."""
    pads = [(0, 0)] * (x.ndim - 1) + [(n, n)]
    options = {"reflect_type": how} if how in ("even", "odd") else {}
    return bnp.pad(x, pads, mode=_EXTENSIONS[how], **options)


def stft(
    x: ArrayLike,
    fs: ArrayLike = 1.0,
    window: Any = "hann",
    nperseg: int = 256,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Any = False,
    return_onesided: bool = True,
    boundary: str | None = "zeros",
    padded: bool = True,
    axis: int = -1,
) -> tuple[Array, Array, Array]:
    """The short-time Fourier transform.

    Args:
      x: signals along ``axis``.
      fs: the sampling frequency.
      window: a name of SciPy's, a tuple of a name and parameters, or a vector of nperseg elements.
      nperseg: the length of a segment.
      noverlap: the points that neighbours share; ``nperseg // 2`` by default.
      nfft: the length of the FFT; nperseg by default.
      detrend: ``"constant"``, ``"linear"``, a function of segments along the last axis, or False.
      return_onesided: give the frequencies of 0 and above, for real x.
      boundary: how to extend the signal by half a segment: ``"zeros"``, ``"constant"``, ``"even"``, ``"odd"``, or None.
      padded: append zeros, so that segments cover the signal.
      axis: the axis of time.
    Returns:
      frequencies, times, and the transform: complex, with the frequencies in the place of ``axis`` and the segments
      last.
    """
    if boundary is not None and boundary not in _EXTENSIONS:
        raise errors.ValueRangeError(
            f"stft: {boundary!r:.60} is not a boundary.",
            where=source.here(),
            fix=f"one of {', '.join(_EXTENSIONS)}, or None",
        )
    x = inexact(x, "stft")
    axis = axis_in(axis, x.aval.ndim, "stft")
    x = bnp.moveaxis(x, axis, -1)
    plan = _plan("stft", window, nperseg, noverlap, nfft, x.shape[-1])
    if boundary is not None:
        x = _extended(x, boundary, plan.nperseg // 2)
    if padded:
        more = (plan.nperseg - x.shape[-1]) % plan.step
        x = bnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])
    onesided = bool(return_onesided) and not dtypes.is_complex(x.dtype)
    real = real_dtype(x.dtype)
    z = _spectrum(x, plan, _trend("stft", detrend), onesided) / bnp.sum(bnp.asarray(plan.window, real))
    count = z.shape[-2]
    start = 0 if boundary is not None else plan.nperseg / 2
    times = (bnp.arange(count, dtype=real) * plan.step + start) / fs
    z = bnp.moveaxis(z, -1, axis)  # the segments are last now
    return _frequencies(plan.nfft, fs, onesided, real), times, z


def csd(
    x: ArrayLike,
    y: ArrayLike | None,
    fs: ArrayLike = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Any = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[Array, Array]:
    """The cross spectral density of two signals, by Welch's method.

    Args:
      x, y: signals along ``axis``, the shorter one padded with zeros; y may be None for that of x with itself, which
        is real.
      scaling: ``"density"`` (per frequency) or ``"spectrum"`` (of the power).
      average: ``"mean"`` or ``"median"`` over the segments.
      fs, window, nperseg, noverlap, nfft, detrend, return_onesided, axis: as of ``stft``; segments have 256 points by
        default.
    Returns:
      frequencies, and the density with the frequencies in the place of ``axis``.
    """
    if average not in ("mean", "median") or scaling not in ("density", "spectrum"):
        raise errors.ValueRangeError(
            f"csd: average {average!r:.60}, scaling {scaling!r:.60}.",
            where=source.here(),
            fix="average='mean' or 'median', scaling='density' or 'spectrum'",
        )
    one = y is None
    x, y = promote_dtypes("csd", x, x if one else y, inexact=True)
    axis = axis_in(axis, x.aval.ndim, "csd") - x.aval.ndim
    x, y = bnp.moveaxis(x, axis, -1), bnp.moveaxis(y, axis, -1)
    n = max(x.shape[-1], y.shape[-1])
    x, y = (bnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, n - v.shape[-1])]) for v in (x, y))
    plan = _plan("csd", window, nperseg, noverlap, nfft, n)
    onesided = bool(return_onesided) and not dtypes.is_complex(x.dtype)
    real, trend = real_dtype(x.dtype), _trend("csd", detrend)
    a = _spectrum(x, plan, trend, onesided)
    p = bnp.real(a) ** 2 + bnp.imag(a) ** 2 if one else bnp.conj(a) * _spectrum(y, plan, trend, onesided)
    w = bnp.asarray(plan.window, real)
    p = p / (fs * bnp.sum(w * w) if scaling == "density" else bnp.sum(w) ** 2)
    if onesided:  # the power of the negative frequencies
        last = p.shape[-1] - (plan.nfft % 2 == 0)
        p = p.at[..., 1:last].multiply(2, unique_indices=True)
    if average == "mean":
        p = bnp.mean(p, -2)
    else:
        bias = _median_bias(p.shape[-2])
        median = functools.partial(bnp.median, axis=-2)
        p = (median(p) if one else median(bnp.real(p)) + 1j * median(bnp.imag(p))) / bias
    p = p.astype(real if one else complex_dtype(real))
    return _frequencies(plan.nfft, fs, onesided, real), bnp.moveaxis(p, -1, axis)


def _median_bias(n: int) -> float:
    """Median over mean of n exponential variates: B. Allen et al. (2005), appendix B."""
    k = 2.0 * np.arange(1, (n - 1) // 2 + 1)
    return float(1 + np.sum(1 / (k + 1) - 1 / k))


def welch(
    x: ArrayLike,
    fs: ArrayLike = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Any = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[Array, Array]:
    """The power spectral density of a signal, by Welch's method; arguments of ``csd``."""
    return csd(x, None, fs, window, nperseg, noverlap, nfft, detrend, return_onesided, scaling, axis, average)


def istft(
    Zxx: Any,
    fs: ArrayLike = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    input_onesided: bool = True,
    boundary: bool = True,
    time_axis: int = -1,
    freq_axis: int = -2,
) -> tuple[Array, Array]:
    """The signal of a short-time Fourier transform, by overlap and add.

    The least-squares solution: D. Griffin and J. Lim, "Signal estimation from modified short-time Fourier transform"
    (1984).

    Args:
      Zxx: the transform, rank 2 or more.
      fs, window, nperseg, noverlap, nfft: those of ``stft``; nperseg and nfft are known from Zxx by default.
      input_onesided: whether Zxx has the frequencies of 0 and above only.
      boundary: whether ``stft`` extended the signal; the extension is cut off.
      time_axis, freq_axis: the axes of Zxx.
    Returns:
      times, and the signal, with time in the last of the places of the two axes.
    """
    z = inexact(Zxx, "istft")
    z = z.astype(complex_dtype(z.aval.dtype))
    if z.ndim < 2:
        raise errors.ShapeError(f"istft of {z.aval}, which has rank below 2.", where=source.here())
    time_axis, freq_axis = axis_in(time_axis, z.ndim, "istft"), axis_in(freq_axis, z.ndim, "istft")
    if time_axis == freq_axis:
        raise errors.ValueRangeError(
            f"istft: axis {time_axis} is that of time and of frequencies.", where=source.here()
        )
    count, given = z.shape[time_axis], z.shape[freq_axis]
    default = 2 * (given - 1) if input_onesided else given
    if nperseg is None:
        nperseg = default if isinstance(window, (str, tuple)) else bnp.asarray(window).shape[0]
    if nfft is None:
        nfft = nperseg if input_onesided and nperseg == default + 1 else default
    plan = _plan("istft", window, nperseg, noverlap, nfft, nfft)
    nperseg, real = plan.nperseg, real_dtype(z.dtype)
    z = bnp.moveaxis(z, (time_axis, freq_axis), (-2, -1))
    w = bnp.asarray(plan.window, real)
    pieces = (fft.irfft if input_onesided else fft.ifft)(z, plan.nfft)[..., :nperseg] * (w * bnp.sum(w))
    at = np.arange(count)[:, None] * plan.step + np.arange(nperseg)
    length = nperseg + (count - 1) * plan.step
    x = bnp.zeros((*pieces.shape[:-2], length), pieces.dtype).at[..., at].add(pieces)
    weight = bnp.zeros(length, real).at[at].add(bnp.broadcast_to(w * w, at.shape))
    x = x / bnp.where(weight > 1e-10, weight, 1)
    if boundary:
        x = x[..., nperseg // 2 : length - nperseg // 2]
    times = bnp.arange(x.shape[-1], dtype=real) / fs
    place = min(time_axis, freq_axis)
    return times, bnp.moveaxis(x, -1, place)
