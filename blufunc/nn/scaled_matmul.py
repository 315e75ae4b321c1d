"""Matmuls of block-scaled operands, and quantization to MXFP8 and NVFP4.

A face, above ``blufunc.numpy``. An operand is an array of a narrow float and one scale for each block along the
contracted axis. The matmul multiplies in float32, which holds each element times its scale exactly; no kernel here
reads the narrow operands in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.eval_shape import eval_shape

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

_OUTPUTS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


@dataclass(eq=False)
class BlockScaleConfig:
    """How an operand is quantized.

    Attributes:
      mode: ``"mxfp8"`` or ``"nvfp4"``.
      block_size: elements with one scale.
      data_type, scale_type: dtypes of elements and scales.
      global_scale: of ``nvfp4``: what elements are divided by before their blocks are scaled.
      infer_only: accepted for compatibility.
    """

    mode: str
    block_size: int
    data_type: Any
    scale_type: Any
    global_scale: Any = None
    infer_only: bool = False


def get_scaled_dot_general_config(mode: str, global_scale: Array | None = None) -> BlockScaleConfig:
    """A configuration of ``scaled_dot_general``: ``"mxfp8"`` or ``"nvfp4"``.

    Args:
      global_scale: of ``"nvfp4"``; default 1.
    Raises:
      ValueRangeError: there is no such mode.
    """
    if mode == "nvfp4":
        scale = bnp.ones(1) if global_scale is None else global_scale
        return BlockScaleConfig(mode, 16, bnp.float4_e2m1fn, bnp.float8_e4m3fn, scale)
    if mode == "mxfp8":
        return BlockScaleConfig(mode, 32, bnp.float8_e4m3fn, bnp.float8_e8m0fnu)
    raise errors.ValueRangeError(
        f"get_scaled_dot_general_config: there is no mode {mode!r:.60}.",
        where=source.here(),
        fix="'mxfp8' or 'nvfp4'",
    )


def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    lhs_scales: ArrayLike,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = "float32",
) -> Array:
    """``lhs @ rhs.mT`` of operands whose blocks along the last axis have scales.

    Args:
      lhs, rhs: of shapes (b, m, k) and (b, n, k).
      lhs_scales, rhs_scales: of shapes (b, m, k / size of a block) and (b, n, k / size of a block).
      preferred_element_type: dtype of the result.
    Returns:
      An array of shape (b, m, n), of sums in float32.
    Raises:
      ShapeError: the shapes do not fit.
    """
    a, b = _scaled(lhs, lhs_scales, "lhs"), _scaled(rhs, rhs_scales, "rhs")
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[2]:
        raise errors.ShapeError(
            f"scaled_matmul takes (b, m, k) and (b, n, k), not {a.shape} and {b.shape}.", where=source.here()
        )
    return lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,)))).astype(preferred_element_type)


def _scaled(x: Any, scales: Any, name: str) -> Array:
    x, scales = bnp.asarray(x), bnp.asarray(scales)
    if (
        not x.ndim
        or not scales.ndim
        or x.shape[:-1] != scales.shape[:-1]
        or not scales.shape[-1]
        or x.shape[-1] % scales.shape[-1]
    ):
        raise errors.ShapeError(
            f"scaled_matmul: scales of shape {scales.shape} do not divide {name} of shape {x.shape} into blocks.",
            where=source.here(),
            why="each row has one scale for every block of equal size.",
        )
    size = x.shape[-1] // scales.shape[-1]
    blocks = x.astype("float32").reshape(*scales.shape, size) * scales.astype("float32")[..., None]
    return blocks.reshape(x.shape)


def quantized(x: Array, config: BlockScaleConfig) -> tuple[Array, Array]:
    """Elements in blocks along the last axis, and the scales of the blocks."""
    if x.shape[-1] % config.block_size:
        raise errors.ShapeError(
            f"scaled_dot_general in {config.mode}: the contracted axis has {x.shape[-1]} elements, which is no "
            f"multiple of {config.block_size}.",
            where=source.here(),
            fix="pad the contracted axis with zeros",
        )
    blocks = x.astype("float32").reshape(*x.shape[:-1], -1, config.block_size)
    top = float(bnp.finfo(config.data_type).max)
    largest = bnp.max(bnp.abs(blocks), axis=-1)
    if config.mode == "mxfp8":
        # the least power of two that brings the block into range
        powers = bnp.ceil(bnp.log2(bnp.maximum(largest, 2.0**-126) / top))
        scales = bnp.exp2(powers).astype(config.scale_type)
        divisor = scales.astype("float32")
    else:
        outer = bnp.asarray(config.global_scale, "float32").reshape(())
        limits = bnp.finfo(config.scale_type)
        ratio = bnp.clip(largest / (top * outer), float(limits.tiny), float(limits.max))
        scales = ratio.astype(config.scale_type)
        divisor = scales.astype("float32") * outer
    data = bnp.clip(blocks / divisor[..., None], -top, top).astype(config.data_type)
    return data.reshape(x.shape), scales


def _as_rows(x: Array, contract: Sequence[int], batch: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """An operand as (batch, rows, contracted), and the shape of its rows."""
    kept = [d for d in range(x.ndim) if d not in (*contract, *batch)]
    shape = [[x.shape[d] for d in part] for part in (batch, kept, contract)]
    return bnp.transpose(x, (*batch, *kept, *contract)).reshape(*map(math.prod, shape)), tuple(shape[1])


def _multiplied(lhs: Array, rhs: Array, left: BlockScaleConfig, right: BlockScaleConfig, dtype: Any) -> Array:
    (a, a_scales), (b, b_scales) = quantized(lhs, left), quantized(rhs, right)
    out = scaled_matmul(a, b, a_scales, b_scales)
    for config in (left, right):
        if config.mode == "nvfp4":
            out = out * bnp.asarray(config.global_scale, "float32").reshape(())
    return out.astype(dtype)


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _quantized_dot(lhs: Array, rhs: Array, configs: tuple, dtype: Any) -> Array:
    return _multiplied(lhs, rhs, configs[0], configs[1], dtype)


def _forward(lhs: Array, rhs: Array, configs: tuple, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return _quantized_dot(lhs, rhs, configs, dtype), (lhs, rhs)


def _backward(configs: tuple, dtype: Any, residuals: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    """Gradients as if rounding were the identity; 0 where ``nvfp4`` clips."""
    lhs, rhs = residuals
    left, right, outer = configs
    if outer.mode == "nvfp4":
        wide = ct.astype("float32")
        grads = [wide @ rhs.astype("float32"), wide.mT @ lhs.astype("float32")]
        reach = float(bnp.finfo(left.data_type).max) * float(bnp.finfo(left.scale_type).max)
        scales = [bnp.asarray(c.global_scale, "float32").reshape(()) for c in (left, right)]
        kept = [bnp.abs(x) <= reach * s for x, s in zip((lhs, rhs), scales, strict=True)]
        grads = [bnp.where(k, g, 0) for k, g in zip(kept, grads, strict=True)]
    else:
        grads = [
            _multiplied(ct, rhs.mT, outer, right, "float32"),
            _multiplied(ct.mT, lhs.mT, outer, left, "float32"),
        ]
    return grads[0].astype(lhs.dtype), grads[1].astype(rhs.dtype)


_quantized_dot.defvjp(_forward, _backward)


def scaled_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    preferred_element_type: DTypeLike = "float32",
    configs: Sequence[BlockScaleConfig] | None = None,
    implementation: str | None = None,
) -> Array:
    """``lax.dot_general`` of operands that are quantized in blocks.

    The derivative quantizes the cotangent, too, but for ``nvfp4``.

    Args:
      dimension_numbers: as of ``lax.dot_general``.
      preferred_element_type: dtype of the result: float32, bfloat16 or float16.
      configs: of lhs, rhs and cotangents; default: MXFP8.
      implementation: accepted for compatibility, and ignored.
    Raises:
      DtypeError: another dtype of the result.
      ShapeError: a contracted axis is no multiple of the size of a block.
    """
    dtype = dtypes.as_dtype(preferred_element_type)
    if dtype not in _OUTPUTS:
        raise errors.DtypeError(
            f"scaled_dot_general of preferred_element_type {dtype}.",
            where=source.here(),
            fix="float32, bfloat16 or float16",
        )
    given = [get_scaled_dot_general_config("mxfp8")] * 3 if configs is None else configs
    if not isinstance(given, (list, tuple)) or [isinstance(c, BlockScaleConfig) for c in given] != [True] * 3:
        raise errors.ArgumentError(
            f"scaled_dot_general: configs are three configurations, not {configs!r:.60}.",
            where=source.here(),
            fix='nn.get_scaled_dot_general_config("mxfp8"), of lhs, rhs and cotangents',
        )
    x, y = bnp.asarray(lhs), bnp.asarray(rhs)
    eval_shape(lambda x, y: lax.dot_general(x, y, dimension_numbers), x, y)  # raises where they do not fit
    (left, right), (left_batch, right_batch) = dimension_numbers
    a, a_rows = _as_rows(x, left, left_batch)
    b, b_rows = _as_rows(y, right, right_batch)
    out = _quantized_dot(a, b, tuple(given), dtype)
    return out.reshape(*[x.shape[d] for d in left_batch], *a_rows, *b_rows)
