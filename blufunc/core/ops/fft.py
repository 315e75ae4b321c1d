"""``fft``: discrete Fourier transforms over the last axes.

Core operations. All four kinds are linear, and each is transposed by a transform of the same size, so that
derivatives cost the same as values. Only the inverse ones are normalized: they divide by the number of elements.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.common import complex_dtype, real_dtype
from blufunc.core.ops.shape import iota
from blufunc.core.primitives.linear_ops import Linear, move_dim
from blufunc.core.primitives.sharding import leading

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


class FftType(enum.Enum):
    """Kind of transform: complex, or with R between reals and their half spectrum."""

    FFT = "fft"
    IFFT = "ifft"
    RFFT = "rfft"
    IRFFT = "irfft"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_any(kind: Any) -> FftType:
        """The kind for a kind, its name in either case, or its index, 0 to 3."""
        if isinstance(kind, FftType):
            return kind
        kinds = list(FftType)
        if isinstance(kind, str) and kind.upper() in FftType.__members__:
            return FftType[kind.upper()]
        if kind.__class__ is int and 0 <= kind < len(kinds):
            return kinds[kind]
        raise errors.ArgumentError(
            f"fft: {kind!r:.60} is not a type of transform.",
            where=source.here(),
            fix="lax.FftType.FFT, IFFT, RFFT or IRFFT",
        )


_DEFINITIONS: dict[FftType, Any] = {
    FftType.FFT: np.fft.fftn,
    FftType.IFFT: np.fft.ifftn,
    FftType.RFFT: np.fft.rfftn,
    FftType.IRFFT: np.fft.irfftn,
}


class _FFT(Linear):
    """The transform of ``kind`` over the last axes, of full sizes ``lengths``."""

    name, kind, fresh = "fft", "fft", True

    def shard(self, avals, outs, **params):
        return leading(len(params["lengths"]))(avals, outs)

    def impl(self, x, *, type, lengths):
        out = _DEFINITIONS[type](x, lengths, tuple(range(-len(lengths), 0)))
        return np.asarray(out, _result(x, type, lengths).dtype)

    def abstract(self, x, *, type, lengths):
        real = type is FftType.RFFT
        accepted = (dtypes.float32, dtypes.float64) if real else (dtypes.complex64, dtypes.complex128)
        if x.dtype not in accepted:
            raise errors.DtypeError(
                f"fft of type {type} takes {' and '.join(map(str, accepted))}, not {x}.",
                fix=f"convert first: x.astype('{accepted[0]}')",
            )
        last = x.shape[x.ndim - len(lengths) :]
        if not lengths or any(n < 1 for n in lengths):
            raise errors.ValueRangeError(
                f"fft of {x}: the lengths are {lengths}.", fix="give one or more lengths, of 1 at least"
            )
        want = (*lengths[:-1], lengths[-1] // 2 + 1) if type is FftType.IRFFT else lengths
        if last != want:
            raise errors.ShapeError(
                f"fft of type {type} and lengths {lengths} takes last axes of sizes {want}, not {x}.",
                fix="use bnp.fft, which pads and cuts",
            )
        return _result(x, type, lengths)

    def transpose(self, ct, x, *, type, lengths):
        # the DFT matrix is symmetric, and its conjugate is the inverse up to a factor
        if type is FftType.RFFT:
            size = math.prod(lengths)
            weighted = ew.mul(ew.conj(ct), _weights(ct, lengths[-1], size, size / 2))
            x.add(self.bind(weighted, type=FftType.IRFFT, lengths=lengths))
        elif type is FftType.IRFFT:
            size = math.prod(lengths)
            spectrum = ew.conj(self.bind(ct, type=FftType.RFFT, lengths=lengths))
            x.add(ew.mul(spectrum, _weights(spectrum, lengths[-1], 1 / size, 2 / size)))
        else:
            x.add(self.bind(ct, type=type, lengths=lengths))

    def batch(self, axis, args, dims, **params):
        return self.bind(move_dim(args[0], dims[0], 0), **params), 0


fft_p = _FFT()


def _result(x: Any, type: FftType, lengths: tuple[int, ...]) -> ShapedArray:
    lead = x.shape[: len(x.shape) - len(lengths)]
    if type is FftType.RFFT:
        return ShapedArray((*lead, *lengths[:-1], lengths[-1] // 2 + 1), complex_dtype(x.dtype))
    dtype = real_dtype(x.dtype) if type is FftType.IRFFT else x.dtype
    return ShapedArray((*lead, *lengths), dtype)


def _weights(x: Any, n: int, once: float, twice: float) -> Any:
    """Weights of a half spectrum of ``n`` points: ``twice`` at mirrored frequencies."""
    k = iota(dtypes.int32, x.aval.shape, x.aval.ndim - 1)
    alone = ew.eq(k, 0)
    if n % 2 == 0:
        alone = ew.bitwise_or(alone, ew.eq(k, n // 2))
    number = lambda v: ew.mul(ew.ones_of(x), v)
    return ew.select(alone, number(once), number(twice))


def fft(x: ArrayLike, fft_type: Any, fft_lengths: Any) -> Array:
    """Discrete Fourier transforms over the last axes.

    Args:
      x: (..., n1, ..., nk), complex; real for RFFT; for IRFFT the last axis is ``nk // 2 + 1``.
      fft_type: an ``FftType``, or its name.
      fft_lengths: (n1, ..., nk), the sizes of the axes, or for IRFFT of those of the result.
    Returns:
      (..., n1, ..., nk), complex; real for IRFFT; for RFFT the last axis is ``nk // 2 + 1``.
    """
    lengths = (fft_lengths,) if fft_lengths.__class__ is int else ints(fft_lengths, "fft", "fft_lengths")
    return fft_p.bind(lift(x), type=FftType.from_any(fft_type), lengths=lengths)
