"""``bnp.fft``: discrete Fourier transforms along any axes, with NumPy's options.

Face over ``lax.fft``. Operands are promoted (float64 to complex128, all other real numbers to complex64), cut or padded
with zeros to the sizes asked for, and results scaled by ``norm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axes_in, axis_in, ints, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.fft import FftType, fft_p
from blufunc.core.ops.linalg.common import complex_dtype
from blufunc.core.ops.shape import iota, pad
from blufunc.numpy import elementwise
from blufunc.numpy.creation import asarray
from blufunc.numpy.joining import roll
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.promotion import as_value, cast, inexact, named

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.signatures import FourierOne, FourierSeveral

_INVERSES = (FftType.IFFT, FftType.IRFFT)
_SWAPPED = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


def _transform(
    x: Any, kind: FftType, sizes: Sequence[int] | None, axes: tuple[int, ...], norm: Any, name: str
) -> Array:
    """Transform over axes in order; real kinds halve the last one."""
    if not _is_norm(norm):
        raise errors.ValueRangeError(
            f"{name}: {norm!r:.60} is not a normalization.",
            where=source.here(),
            fix="norm='backward', 'ortho' or 'forward'",
        )
    x = _operand(x, kind, name)
    if not axes:
        return x
    halved = kind is FftType.IRFFT
    if sizes is None:
        shape = [x.aval.shape[d] for d in axes]
        sizes = [*shape[:-1], 2 * (shape[-1] - 1)] if halved else shape
    for n in sizes:
        if n < 1:
            raise errors.ValueRangeError(
                f"{name} of {x.aval} over {n} points.", where=source.here(), fix="give sizes of 1 or more"
            )
    input_sizes = [*sizes[:-1], sizes[-1] // 2 + 1] if halved else sizes
    config = [(0, 0, 0)] * x.aval.ndim
    for d, n in zip(axes, input_sizes, strict=True):
        config[d] = (0, n - x.aval.shape[d], 0)  # a negative count cuts
    x = pad(x, ew.zeros_of(x), config)
    last = tuple(range(x.aval.ndim - len(axes), x.aval.ndim))
    out = fft_p.bind(moveaxis(x, axes, last), type=kind, lengths=tuple(sizes))
    return moveaxis(_scaled(out, math.prod(sizes), kind in _INVERSES, norm), last, axes)


def _operand(x: Any, kind: FftType, name: str) -> Array:
    x = inexact(x, name)
    real = kind is FftType.RFFT
    if real and dtypes.is_complex(x.aval.dtype):
        raise errors.DtypeError(
            f"{name} takes real numbers, not {x.aval}.", where=source.here(), fix="x.real, or the complex fft"
        )
    single = dtypes.is_floating(x.aval.dtype) and x.aval.dtype.itemsize < 4
    dtype = dtypes.float32 if single else x.aval.dtype
    return cast(x, dtype if real else complex_dtype(dtype))


def _scaled(x: Array, size: int, inverse: bool, norm: str | None) -> Array:
    """A transform, which is normalized backward, under another normalization."""
    if norm == "ortho":
        return ew.mul(x, math.sqrt(size) if inverse else 1 / math.sqrt(size))
    if norm == "forward":
        return ew.mul(x, float(size) if inverse else 1 / size)
    return x


def _one(x: Any, kind: FftType, n: Any, axis: Any, norm: Any, name: str) -> Array:
    x = inexact(x, name)
    sizes = None if n is None else (static_int(n, name, "n"),)
    return _transform(x, kind, sizes, (axis_in(axis, x.aval.ndim, name),), norm, name)


def _several(x: Any, kind: FftType, s: Any, axes: Any, norm: Any, name: str) -> Array:
    x = inexact(x, name)
    sizes = None if s is None else ints(s, name, "s")
    if axes is None:
        count = x.aval.ndim if sizes is None else len(sizes)
        if count > x.aval.ndim:
            raise errors.ValueRangeError(
                f"{name} of {x.aval}: s has {count} sizes.",
                where=source.here(),
                fix="one for each axis at most",
            )
        places = tuple(range(x.aval.ndim - count, x.aval.ndim))
    else:
        places = tuple([axis_in(d, x.aval.ndim, name) for d in ints(axes, name, "axes")])
    if len(set(places)) != len(places) or (sizes is not None and len(sizes) != len(places)):
        raise errors.ValueRangeError(
            f"{name} of {x.aval}: axes {axes}, s {s}.",
            where=source.here(),
            fix="name each axis once, and give as many sizes as axes",
        )
    return _transform(x, kind, sizes, places, norm, name)


# -- transforms ------------------------------------------------------------------------------------


def _along_one(name: str, kind: FftType, doc: str) -> FourierOne:
    def function(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
        return _one(a, kind, n, axis, norm, name)

    return named(function, name, doc + _ONE, "blufunc.numpy.fft")


def _along_several(
    name: str, kind: FftType, doc: str, default: tuple[int, ...] | None = None
) -> FourierSeveral:
    def function(a: Any, s: Any = None, axes: Any = default, norm: str | None = None) -> Array:
        if default is not None and (not isinstance(axes, Sequence) or len(axes) != len(default)):
            raise errors.ArgumentError(
                f"{name} is over two axes, not {axes!r:.60}.",
                where=source.here(),
                fix=f"bnp.fft.{name[:-1]}n",
            )
        return _several(a, kind, s, axes, norm, name)

    return named(function, name, doc + _SEVERAL, "blufunc.numpy.fft")


_ONE = """

    Args:
      a: an array.
      n: the number of points; the axis is truncated, or padded with zeros.
      axis: the axis.
      norm: the direction that divides by the number of points: ``"backward"`` (None), in the inverse; ``"forward"``; or
        ``"ortho"``, by its root in both.
    """
_SEVERAL = """

    Args:
      a: an array.
      s: the number of points along each axis, which are truncated or padded with zeros.
      axes: the axes; by default all, or as many last ones as ``s`` has sizes.
      norm: as of ``fft``.
    """


_HALF = "of real numbers: the half of the spectrum, ``n // 2 + 1`` points, that determines it"
_WHOLE = "of the half spectrum of real numbers: these, ``n`` points, by default twice those given less two"

fft = _along_one("fft", FftType.FFT, "The discrete Fourier transform along an axis.")
ifft = _along_one("ifft", FftType.IFFT, "The inverse discrete Fourier transform along an axis.")
rfft = _along_one("rfft", FftType.RFFT, f"The discrete Fourier transform along an axis {_HALF}.")
irfft = _along_one("irfft", FftType.IRFFT, f"The inverse transform along an axis {_WHOLE}.")
fft2 = _along_several("fft2", FftType.FFT, "The discrete Fourier transform over two axes.", (-2, -1))
ifft2 = _along_several("ifft2", FftType.IFFT, "The inverse Fourier transform over two axes.", (-2, -1))
rfft2 = _along_several("rfft2", FftType.RFFT, f"The Fourier transform over two axes {_HALF}.", (-2, -1))
irfft2 = _along_several("irfft2", FftType.IRFFT, f"The inverse transform over two axes {_WHOLE}.", (-2, -1))
fftn = _along_several("fftn", FftType.FFT, "The discrete Fourier transform over axes.")
ifftn = _along_several("ifftn", FftType.IFFT, "The inverse discrete Fourier transform over axes.")
rfftn = _along_several("rfftn", FftType.RFFT, f"The discrete Fourier transform over axes {_HALF}.")
irfftn = _along_several("irfftn", FftType.IRFFT, f"The inverse transform over axes {_WHOLE}.")


def hfft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The real ``n``-point spectrum of half a Hermitian signal; see ``irfft``."""
    return _one(elementwise.conj(a), FftType.IRFFT, n, axis, _swapped(norm), "hfft")


def ihfft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Half (``n // 2 + 1``) of the Hermitian signal of a real spectrum; see ``rfft``."""
    return ew.conj(_one(a, FftType.RFFT, n, axis, _swapped(norm), "ihfft"))


def _is_norm(norm: Any) -> bool:
    return isinstance(norm, (str, type(None))) and norm in _SWAPPED


def _swapped(norm: Any) -> Any:
    """The inverse transform's normalization; an invalid one stays, to be refused."""
    return _SWAPPED[norm] if _is_norm(norm) else norm


# -- frequencies -----------------------------------------------------------------------------------


def _frequencies(n: Any, d: Any, dtype: Any, name: str, positions: Callable[[int], tuple[int, int]]) -> Array:
    n = static_int(n, name, "n")
    if n < 1:
        raise errors.ValueRangeError(f"{name} of {n} points.", where=source.here(), fix="n is 1 or more")
    spacing = inexact(d, name)
    kind = (
        dtypes.as_dtype(dtype)
        if dtype is not None
        else dtypes.default(float)
        if spacing.weak_type
        else spacing.dtype
    )
    if dtype is not None and not dtypes.is_floating(kind):
        raise errors.DtypeError(
            f"{name}: frequencies are real numbers, not {kind}.", where=source.here(), fix="dtype='float32'"
        )
    if spacing.aval.ndim:
        raise errors.ShapeError(
            f"{name}: d is one number, not {spacing.aval}.", where=source.here(), fix="d=1.0"
        )
    size, first = positions(n)
    k = iota(dtypes.int32, (size,), 0)
    if first:  # from the middle on, frequencies are negative
        k = ew.select(ew.lt(k, first), k, ew.sub(k, n))
    return ew.div(ew.convert(k, kind), ew.mul(ew.convert(spacing, kind), n))


def fftfreq(n: int, d: ArrayLike = 1.0, *, dtype: DTypeLike | None = None, device: Any = None) -> Array:
    """The frequencies of ``fft``: ``0, 1, ..., -2, -1`` over ``n * d``.

    ``d`` is the spacing of samples.
    """
    return asarray(_frequencies(n, d, dtype, "fftfreq", lambda n: (n, (n + 1) // 2)), device=device)


def rfftfreq(n: int, d: ArrayLike = 1.0, *, dtype: DTypeLike | None = None, device: Any = None) -> Array:
    """The frequencies of ``rfft``: ``0, 1, ..., n // 2`` over ``n * d``."""
    return asarray(_frequencies(n, d, dtype, "rfftfreq", lambda n: (n // 2 + 1, 0)), device=device)


def fftshift(x: ArrayLike, axes: Any = None) -> Array:
    """Move frequency 0 from the start to the middle of axes (by default all)."""
    x = as_value(x, "fftshift")
    places = axes_in(axes, x.aval.ndim, "fftshift")
    return roll(x, tuple([x.aval.shape[d] // 2 for d in places]), places) if places else x


def ifftshift(x: ArrayLike, axes: Any = None) -> Array:
    """The inverse of ``fftshift``."""
    x = as_value(x, "ifftshift")
    places = axes_in(axes, x.aval.ndim, "ifftshift")
    return roll(x, tuple([-(x.aval.shape[d] // 2) for d in places]), places) if places else x


__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2", "ifftn", "ifftshift", "ihfft",
    "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip
