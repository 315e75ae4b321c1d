"""Matmuls by quantized weights as one operation, whose residuals are codes.

A face, above ``formats.py``. No dequantized copy is kept. An equation holds its definition as a jaxpr: the weight is
dequantized in the dtype of x, and multiplied. Compilers inline it, unless a kernel reads the codes instead. The
operation is linear in x, and its transpose is the same one by the transposed weight, so residuals are the codes. The
barrier makes the copy depend on x: neither is it computed ahead of its matmul, nor are the copies of the two
directions merged.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ops.barrier import optimization_barrier
from blufunc.core.primitives.linear_ops import add_any, move_dim
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.nn.quantization import formats
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.control_flow.composite import Composite

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def matmul(x: ArrayLike, weight: Any, *, transposed: bool = False) -> Array:
    """``x @ weight``, or ``x @ weight.T``, by a quantized weight or an array.

    A quantized weight is dequantized in the dtype of ``x``, for this matmul only: the gradient for ``x`` dequantizes
    it again. On a GPU, a kernel for at most 16 rows reads the codes of a transposed weight directly.

    Args:
      x: floats [..., m].
      weight: [m, n], or with ``transposed`` [n, m]: an ``Int8``, an ``NF4`` or an array.
      transposed: multiply by the transpose.
    Returns:
      [..., n], of the dtype of ``x``.
    Raises:
      DtypeError: ``x`` is no array of floats.
      ShapeError: the sizes do not match.
    """
    if not isinstance(weight, formats.Quantized):
        return bnp.matmul(x, bnp.asarray(weight).T if transposed else weight)
    x, parts = bnp.asarray(x), formats.parts_of(weight)
    if not dtypes.is_floating(x.dtype):
        raise errors.DtypeError(
            f"quantization.matmul: x is {x.dtype}.",
            where=source.here(),
            why="weights are dequantized in the dtype of x.",
            fix='x.astype("float32")',
        )
    shape = weight.shape
    if len(shape) != 2 or not x.ndim or x.shape[-1] != shape[transposed]:
        raise errors.ShapeError(
            f"quantization.matmul: x of shape {tuple(x.shape)} by a weight of shape {shape}"
            f"{', transposed' if transposed else ''}.",
            where=source.here(),
            why="the last axis of x is summed with one of the two of the weight.",
            fix="bf.vmap for stacks of weights"
            if len(shape) != 2
            else f"transposed={not transposed}"
            if x.ndim and x.shape[-1] == shape[not transposed]
            else "check the layer's sizes",
        )
    (out,) = quantized_matmul_p.at(x, *parts, transposed=transposed)
    return out


def _quantized_matmul(x: Any, *parts: Any, transposed: bool) -> list[Any]:
    _, *parts = optimization_barrier((x, *parts))
    w = formats.of_parts(parts, x.dtype)
    return [bnp.matmul(x, w.T if transposed else w)]


class _QuantizedMatmul(Composite):
    name, definition = "quantized_matmul", _quantized_matmul
    linearize = split = None  # type: ignore[assignment]  # it has one result, and a jvp rule of its own

    def jvp(self, primals, tangents, *, jaxpr, transposed):
        """Linear in ``x``; the derivative by the scales is that of the definition."""
        x, *parts = primals
        dx, *of_parts = tangents
        terms = []
        if dx.__class__ is not Zero:
            terms += self.at(dx, *parts, transposed=transposed)
        if any(t.__class__ is not Zero for t in of_parts):
            terms += jit_p.jvp(primals, [zero(x.aval), *of_parts], jaxpr=jaxpr, name=self.name)[1]
        return self.bind(*primals, jaxpr=jaxpr, transposed=transposed), [functools.reduce(add_any, terms)]

    def transpose(self, cts, x, *parts, jaxpr, transposed):
        (ct,) = cts
        if is_linear(x) and ct.__class__ is not Zero:
            x.add(*self.at(ct, *parts, transposed=not transposed))

    def batch(self, axis, args, dims, *, jaxpr, transposed):
        """More rows of x; stacks of weights are matmuls of the definition."""
        if any(d is not None for d in dims[1:]):
            return super().batch(axis, args, dims, jaxpr=jaxpr, transposed=transposed)
        return self.at(move_dim(args[0], dims[0], 0), *args[1:], transposed=transposed), [0]

    def autocast(self, cells, dtype, *, jaxpr, transposed):
        """In the low dtype; codes and scales stay as they are."""
        x, *parts = cells
        return self.at(x.cast(dtype), *(part.traced() for part in parts), transposed=transposed)


quantized_matmul_p = _QuantizedMatmul()
"""x, the arrays of ``formats.parts_of`` -> x @ weight, or by its transpose."""
