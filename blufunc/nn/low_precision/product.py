"""``float8_dot``: the matmul of two fp8 matrices with scales, as one operation.

A face, above ``scaling.py``. An equation holds its definition as a jaxpr: both operands as bfloat16 times their scales,
which is exact, contracted with sums in float32. Compilers inline it, unless a kernel reads fp8: cuBLASLt on NVIDIA GPUs
(``kernels/backends/cuda/library/float8_gemm.py``), which says in ``explain`` why it does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.nn.low_precision.scaling import Scaled, of_elements
from blufunc.transforms.control_flow.composite import Composite

_TRANSPOSED = (((1,), (1,)), ((), ()))


def dot(a: Scaled, b: Scaled, dtype: np.dtype, scaling: str, fast: bool = False) -> Any:
    """``a @ b.T``, of [m, k] and [n, k]: an array [m, n].

    Args:
      dtype: of the result.
      scaling: "tensor", "row" or "block", of both.
      fast: allow sums of fewer than 24 bits, as Hopper's tensor cores do.
    """
    (out,) = float8_dot_p.at(*a, *b, dtype=dtype, scaling=scaling, fast=fast)
    return out


def _float8_dot(
    a: Any, scale_a: Any, b: Any, scale_b: Any, *, dtype: Any, scaling: str, fast: bool
) -> list[Any]:
    def whole(values: Any, scale: Any) -> Any:
        scale = of_elements(scale.mT if scaling == "block" else scale, values.shape[-1])
        return (values.astype(dtypes.float32) * scale).astype(dtypes.bfloat16)

    wide = dtypes.float32
    out = lax.dot_general(whole(a, scale_a), whole(b, scale_b), _TRANSPOSED, preferred_element_type=wide)
    return [out.astype(dtype)]


class _Float8Dot(Composite):
    name, definition = "float8_dot", _float8_dot

    def batch(self, axis, args, dims, *, jaxpr, dtype, scaling, fast):
        """A batch of one operand is more rows of it, with scales of their own.

        Batches of both are the definition.
        """
        of_a, of_b = (any(d is not None for d in dims[i : i + 2]) for i in (0, 2))
        if (of_a and of_b) or scaling == "block":
            return super().batch(axis, args, dims, jaxpr=jaxpr, dtype=dtype, scaling=scaling, fast=fast)
        first, at = args[:2], dims[:2]
        other = args[2:]
        if of_b:
            first, at, other = args[2:], dims[2:], args[:2]
        values, scale = (
            bnp.broadcast_to(x, (axis.size, *x.shape)) if d is None else move_dim(x, d, 0)
            for x, d in zip(first, at, strict=True)
        )
        n, m, k = values.shape
        rows = Scaled(values.reshape((n * m, k)), bnp.broadcast_to(scale, (n, m, 1)).reshape((n * m, 1)))
        kept = Scaled(other[0], bnp.broadcast_to(other[1], (other[0].shape[0], 1)))
        if of_b:
            return [dot(kept, rows, dtype, "row", fast).reshape((kept.values.shape[0], n, m))], [1]
        return [dot(rows, kept, dtype, "row", fast).reshape((n, m, kept.values.shape[0]))], [0]

    def autocast(self, cells, low, *, jaxpr, **params):
        """As it is: operands are narrower than the low dtype."""
        return self.at(*(cell.traced() for cell in cells), **params)


float8_dot_p = _Float8Dot()
"""a [m, k], its scale, b [n, k], its scale -> a @ b.T [m, n]."""
