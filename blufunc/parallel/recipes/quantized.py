"""Collectives that send 8-bit blocks, of weights and gradients, as in ZeRO++.

A face, for use inside ``shard_map`` (Wang et al., arXiv:2306.10209). In: values of a float type. Out: those of
``all_gather`` and ``psum_scatter``, of which each block of consecutive elements was sent as integers or floats of 8
bits with one scale, in one message. A sum is an all-to-all of quantized parts, which are added in the dtype of the
operand (at least float32): each term is rounded once for each level of links, not once for each rank on a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, static_int
from blufunc.parallel.collectives.primitives import pcast_p
from blufunc.parallel.recipes.hierarchical import axes_of, check_multiple, levels
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.make_jaxpr import typeof

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

BLOCK = 256
"""Elements with one scale.

Its 4 bytes are 1.6% more. Smaller blocks have smaller extremes, and so smaller errors.
"""

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The types of elements that are sent, and their largest values."""


_SHIFTS = np.arange(0, 32, 8, dtype=np.uint32)
"""Of the bytes of a scale.

A bitcast to elements of another size would be a step of its own, on the host.
"""


class Format(NamedTuple):
    """The type of the elements that are sent, and the number of these with one scale."""

    dtype: str
    block: int


def quantized_all_gather(
    x: ArrayLike,
    axis: str | Sequence[str],
    *,
    dim: int = 0,
    dtype: str = "int8",
    block: int = BLOCK,
    gradient: str | None = None,
    hierarchical: bool = False,
) -> Array:
    """``lax.all_gather(x, axis, axis=dim, tiled=True)`` of blocks of 8 bits.

    For use inside ``shard_map``, for parameters that are sharded over the ranks and gathered on use (FSDP). All ranks,
    the owner included, get the same rounded values: of a block whose largest absolute value is m an element is off by
    at most m / 254 in int8, and in float8_e4m3fn by 1/16 of itself, or m / 458752 if that is more. A block with a NaN
    or a value beyond float32 becomes NaN. The cotangent is that of the exact gather: rounding counts as the identity.

    Args:
      x: this rank's part, of a float type.
      axis: one mesh axis, or several.
      dim: the dimension along which parts are concatenated; default 0.
      dtype: ``"int8"`` or ``"float8_e4m3fn"``.
      block: the number of consecutive elements with one scale.
      gradient: as ``dtype``: sends the cotangent by ``quantized_psum_scatter``. None, the default: exact.
      hierarchical: gather between hosts, then within each; ``axis`` is then several axes, the last within a host.
    Returns:
      the parts of all ranks, in the dtype of ``x``.
    Raises:
      ArgumentError: one of the options is something else, or ``x`` has no float type.
      ValueRangeError: no such dimension, or ``block`` is not positive.
    """
    x = _float(x, "quantized_all_gather")
    d = axis_in(dim, x.ndim, "quantized_all_gather")
    how = format_of(dtype, block, "quantized_all_gather")
    back = None if gradient is None else format_of(gradient, block, "quantized_all_gather", "gradient")
    return _gather(x, _hops(axis, hierarchical, "quantized_all_gather"), d, how, back)


def quantized_psum_scatter(
    x: ArrayLike,
    axis: str | Sequence[str],
    *,
    dim: int = 0,
    dtype: str = "int8",
    block: int = BLOCK,
    hierarchical: bool = False,
) -> Array:
    """``lax.psum_scatter(x, axis, tiled=True)`` along ``dim``, of blocks of 8 bits.

    For use inside ``shard_map``, for gradients that are sharded over the ranks (FSDP, ZeRO). A sum is off by at most
    the sum over the ranks of the errors of their terms: m / 254 in int8 for a block of the term whose largest absolute
    value is m. Hierarchical, sums of each host are rounded once more. Sums are rounded to the dtype of ``x`` at the
    end. The cotangent is gathered exactly.

    Args:
      x: this rank's term, of a float type.
      axis: one mesh axis, or several.
      dim: the dimension that is scattered; default 0.
      dtype, block: see ``quantized_all_gather``.
      hierarchical: add within each host, then between hosts; ``axis`` is then several axes, the last within a host.
    Returns:
      this rank's part of the sum, in the dtype of ``x``.
    Raises:
      ArgumentError: one of the options is something else, or ``x`` has no float type.
      ShapeError: the dimension is not a multiple of the ranks.
      ValueRangeError: no such dimension, or ``block`` is not positive.
    """
    x = _float(x, "quantized_psum_scatter")
    d = axis_in(dim, x.ndim, "quantized_psum_scatter")
    how = format_of(dtype, block, "quantized_psum_scatter")
    hops = _hops(axis, hierarchical, "quantized_psum_scatter")
    check_multiple(x, d, lax.axis_size(sum(hops, ())), "quantized_psum_scatter")
    x = of_unreduced(x, sum(hops, ()))
    return _scatter(x, hops, d, how)


def quantized_psum(x: Array, axis: Sequence[str], dtype: str, hierarchical: bool, what: str) -> Array:
    """``lax.psum(x, axis)`` as a quantized reduce-scatter and a quantized all-gather.

    All ranks read the same blocks, so that the sum is the same on all.
    """
    x = _float(x, what, "quantized=None")
    hops, how = _hops(axis, hierarchical, what), format_of(dtype, BLOCK, what, "quantized")
    x = of_unreduced(x, axis)
    n = lax.axis_size(sum(hops, ()))
    flat = bnp.pad(x.reshape(-1), (0, -x.size % n))
    shard = _scattered(flat, hops, 0, how)
    return _gathered(shard, hops, 0, how, "invariant")[: x.size].reshape(x.shape).astype(x.dtype)


Hops = tuple[tuple[str, ...], ...]
"""The axes of each level of links, the outermost first."""


@functools.partial(custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: Any, hops: Hops, dim: int, how: Format, back: Format | None) -> Any:
    return _gathered(x, hops, dim, how, "varying").astype(x.dtype)


def _gather_forward(x: Any, hops: Hops, dim: int, how: Format, back: Format | None) -> tuple[Any, None]:
    return _gather(x, hops, dim, how, back), None


def _gather_backward(hops: Hops, dim: int, how: Format, back: Format | None, _: None, ct: Any) -> tuple[Any]:
    return (_scattered(ct, hops, dim, back).astype(ct.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(custom_vjp, nondiff_argnums=(1, 2, 3))
def _scatter(x: Any, hops: Hops, dim: int, how: Format) -> Any:
    return _scattered(x, hops, dim, how).astype(x.dtype)


def _scatter_forward(x: Any, hops: Hops, dim: int, how: Format) -> tuple[Any, None]:
    return _scatter(x, hops, dim, how), None


def _scatter_backward(hops: Hops, dim: int, how: Format, _: None, ct: Any) -> tuple[Any]:
    return (_gathered(ct, hops, dim, None, "varying"),)


_scatter.defvjp(_scatter_forward, _scatter_backward)


# -- messages ------------------------------------------------------------------------------------------


def _gathered(x: Any, hops: Hops, dim: int, how: Format | None, to: str) -> Any:
    """All parts along ``dim``; exact without a format.

    A message is quantized once, and passed on as it is.
    """
    message = x if how is None else _message(x.reshape(1, -1), how)
    new = dim if how is None else 0
    for level, axes in enumerate(hops):
        message = lax.all_gather(message, axes, axis=new + level, to=to)
    sizes = [lax.axis_size(axes) for axes in hops]
    n = int(np.prod(sizes))
    if how is None:
        return message.reshape(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    parts = _values(message.reshape(n, -1), x.size, how, x.dtype).reshape(n, *x.shape)
    return bnp.moveaxis(parts, 0, dim).reshape(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])


def _scattered(x: Any, hops: Hops, dim: int, how: Format | None) -> Any:
    """This rank's part of the sum; the innermost level adds first."""
    sizes = [lax.axis_size(axes) for axes in hops]
    part = x.shape[dim] // int(np.prod(sizes))
    parts = x.reshape(*x.shape[:dim], *sizes, part, *x.shape[dim + 1 :])
    for level in reversed(range(len(hops))):
        if how is None:
            parts = lax.psum_scatter(parts, hops[level], scatter_dimension=dim + level)
        else:
            parts = _summed(bnp.moveaxis(parts, dim + level, 0), hops[level], how)
    return parts


def _summed(terms: Any, axes: tuple[str, ...], how: Format) -> Any:
    """Send element i of ``terms`` to rank i, which adds what it receives."""
    n, shape = terms.shape[0], terms.shape[1:]
    received = lax.all_to_all(_message(terms.reshape(n, -1), how), axes, 0, 0, tiled=True)
    return _values(received, int(np.prod(shape)), how, terms.dtype).sum(0).reshape(shape)


def _message(rows: Any, how: Format) -> Any:
    """Rows of values as bytes: the elements of the blocks, then their scales."""
    n, size = rows.shape
    blocks = bnp.pad(rows, ((0, 0), (0, -size % how.block))).reshape(n, -1, how.block)
    blocks = blocks.astype(bnp.float32)
    largest = abs(blocks).max(-1, keepdims=True)
    top = _LARGEST[how.dtype]
    scales = (largest / top).astype(bnp.float32)
    scales = bnp.where(scales == 0, 1.0, scales)
    elements = bnp.clip(blocks / scales, -top, top)  # subnormal scales are inexact
    if how.dtype == "int8":  # the scale of a block with a NaN is NaN, as are its values then
        elements = bnp.where(bnp.isnan(elements), 0.0, bnp.round(elements))
    elements = lax.bitcast_convert_type(elements.astype(how.dtype), bnp.uint8).reshape(n, -1)
    words = lax.bitcast_convert_type(scales, bnp.uint32)
    return bnp.concatenate([elements, (words >> _SHIFTS).astype(bnp.uint8).reshape(n, -1)], 1)


def _values(message: Any, size: int, how: Format, dtype: Any) -> Any:
    """The values of a message, ``size`` of each row, at least in float32."""
    n = message.shape[0]
    many = message.shape[1] // (how.block + 4)
    words = message[:, many * how.block :].reshape(n, many, 4).astype(bnp.uint32) << _SHIFTS
    scales = lax.bitcast_convert_type(
        words[..., 0] | words[..., 1] | words[..., 2] | words[..., 3], bnp.float32
    )
    elements = lax.bitcast_convert_type(message[:, : many * how.block], how.dtype)
    wide = np.promote_types(dtypes.as_dtype("float32"), dtype)
    blocks = elements.reshape(n, many, how.block).astype(wide) * scales.astype(wide)[..., None]
    return blocks.reshape(n, -1)[:, :size]


def of_unreduced(x: Any, axes: Sequence[str]) -> Any:
    """Each rank's own term of a value that is unreduced, to be rounded."""
    pending = typeof(x).manual_axis_type.unreduced
    over = tuple(a for a in axes if a in pending)
    if not over:
        return x
    sizes = tuple(lax.axis_size(a) for a in over)
    return pcast_p.bind(x, axes=over, sizes=sizes, src="U", dst="V")


# -- options -------------------------------------------------------------------------------------------


def _hops(axis: str | Sequence[str], hierarchical: bool, what: str) -> Hops:
    if hierarchical:
        outer, inner = levels(axis, f"{what}(hierarchical=True)")
        return outer, (inner,)
    return (axes_of(axis, what),)


def format_of(dtype: str, block: int, what: str, option: str = "dtype") -> Format:
    """The format that an option asks for."""
    if not isinstance(dtype, str) or dtype not in _LARGEST:
        raise errors.ArgumentError(
            f"{what} sends elements of {' or '.join(_LARGEST)}, not {dtype!r:.60}.",
            where=source.here(),
            fix=f'{option}="int8"',
        )
    block = static_int(block, what, "block")
    if block < 1:
        raise errors.ValueRangeError(
            f"{what}: a block has a positive number of elements, not {block}.", where=source.here()
        )
    return Format(dtype, block)


def _float(x: Any, what: str, fix: str = "lax.all_gather, or lax.psum_scatter") -> Any:
    x = bnp.asarray(x)
    if not dtypes.is_floating(x.dtype):
        raise errors.ArgumentError(
            f"{what} takes floats, not {x.aval}.",
            where=source.here(),
            why="they are rounded to 8 bits.",
            fix=fix,
        )
    return x
