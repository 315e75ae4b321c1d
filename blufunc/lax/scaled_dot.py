"""``scaled_dot``: a contraction of block-scaled operands.

A face, above ``core/ops/dot.py``. Operands are multiplied by their scales in float32, then contracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ops.dot import dot_general
from blufunc.core.ops.elementwise import convert, mul
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

_DEFAULT = {2: (((1,), (0,)), ((), ())), 3: (((2,), (1,)), ((0,), (0,)))}


def scaled_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    lhs_scale: ArrayLike | None = None,
    rhs_scale: ArrayLike | None = None,
    dimension_numbers: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """``dot_general`` of operands whose blocks have scales.

    Args:
      lhs_scale, rhs_scale: of the rank of the operand; along each axis the operand has one or several elements for each
        scale. Default: 1.
      dimension_numbers: as of ``dot_general``; default: those of a matmul, of one or of batches.
      preferred_element_type: dtype of the result; default: bfloat16.
    Raises:
      ShapeError: scales do not divide the operand into blocks of equal size.
    """
    a, b = _scaled(lift(lhs), lhs_scale), _scaled(lift(rhs), rhs_scale)
    numbers = _DEFAULT.get(a.aval.ndim) if dimension_numbers is None else dimension_numbers
    if numbers is None:
        raise errors.ArgumentError(
            f"scaled_dot of {a.aval} needs dimension_numbers.",
            where=source.here(),
            why="its rank is not 2 or 3.",
        )
    want = dtypes.bfloat16 if preferred_element_type is None else dtypes.as_dtype(preferred_element_type)
    return convert(dot_general(a, b, numbers, preferred_element_type="float32"), want)


def _scaled(x: Array, scale: Any) -> Array:
    wide = convert(x, dtypes.float32)
    if scale is None:
        return wide
    scale = convert(lift(scale), dtypes.float32)
    shape, blocks = wide.aval.shape, scale.aval.shape
    if len(shape) != len(blocks) or any(not k or n % k for n, k in zip(shape, blocks, strict=True)):
        raise errors.ShapeError(
            f"scaled_dot: scales of shape {blocks} do not divide an operand of shape {shape}.",
            where=source.here(),
        )
    split: Sequence[int] = [size for n, k in zip(shape, blocks, strict=True) for size in (k, n // k)]
    spread = broadcast_in_dim(scale, tuple(split), tuple(range(0, len(split), 2)))
    return mul(wide, reshape(spread, shape))
