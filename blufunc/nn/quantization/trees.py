"""Quantization of the weights in a tree of parameters.

A face, above ``formats.py``. Masks are those of ``optim.masked`` and ``nn.lora``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import paths, tree
from blufunc.nn.quantization import formats
from blufunc.nn.reparametrize.chosen import PyTree, chosen

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import DTypeLike

BLOCK = 64
"""Elements of a block of NF4, unless the caller chooses."""


def quantize(
    params: PyTree, format: str = "nf4", *, mask: PyTree = None, block: int | None = None, axis: int = -1
) -> PyTree:
    """``params`` with an ``Int8`` or ``NF4`` in the place of each chosen weight.

    Codes are the nearest ones. The largest error of an element is half a step: for int8 1/254 of the largest element
    that shares its scale. For NF4 it is 0.152 of it, and for the quantized scale 1/255 more, or sqrt(r)/255 in a block
    whose largest element is r times smaller than its row's.

    Args:
      params: a pytree of arrays, or one array.
      format: "int8", 8 bits and a float32 scale per row; or "nf4", 4 bits, 8 bits per block and a float32 per row.
      mask: which weights: a pytree of bools that is a prefix of the parameters, or a function that makes one of them.
        By default all of two axes or more.
      block: elements along the last axis that share a scale; default: for NF4 64, and for int8 all of ``axis``.
      axis: of int8 without blocks, the axis whose elements share a scale. The default suits weights [outputs, inputs];
        -2 has one scale for each output of [inputs, outputs].
    Raises:
      ArgumentError: the format is unknown, or NF4 is asked for another axis than the last.
      DtypeError: a chosen weight is no array of floats.
      ShapeError: a chosen weight has fewer than two axes, or blocks do not divide its last one.
    """
    if format not in formats.FORMATS:
        raise errors.ArgumentError(
            f"quantization.quantize: there is no format {format!r}.",
            where=source.here(),
            fix=" or ".join(f'"{name}"' for name in formats.FORMATS),
        )
    if axis not in (-1, -2) or (axis == -2 and (format == "nf4" or block is not None)):
        raise errors.ArgumentError(
            f"quantization.quantize: axis={axis}, of {format}{'' if block is None else f' with block={block}'}.",
            where=source.here(),
            why="blocks are along the last axis, and scales without blocks along one of the last two.",
            fix="axis=-1" if axis in (-1, -2) else "axis=-1 or axis=-2",
        )
    size = BLOCK if block is None and format == "nf4" else block
    if size is not None:
        size = static_int(size, "quantization.quantize", "block")
    leaves, flags, treedef = chosen("quantization.quantize", params, mask, 2)
    names = paths.leaf_paths(treedef)

    def one(w: Any, name: str) -> Any:
        w = bnp.asarray(w)
        if not dtypes.is_floating(w.dtype):
            raise errors.DtypeError(
                f"quantization.quantize: params{name} is {w.dtype}.",
                where=source.here(),
                why="weights of floats are quantized.",
                fix="a mask that is False for it",
            )
        n = w.shape[-1]
        if size is not None and (size < 1 or n % size or (format == "nf4" and size % 2)):
            raise errors.ShapeError(
                f"quantization.quantize: params{name} of shape {tuple(w.shape)} has no blocks of {size}.",
                where=source.here(),
                why="blocks divide the last axis"
                + (", and hold pairs of 4-bit codes." if format == "nf4" else "."),
                fix="another block, or a mask that is False for it",
            )
        return formats.to_nf4(w, size) if format == "nf4" else formats.to_int8(w, axis, size)  # type: ignore[arg-type]

    return tree.unflatten(
        treedef, [one(w, n) if flag else w for w, flag, n in zip(leaves, flags, names, strict=True)]
    )


def dequantize(params: PyTree, dtype: DTypeLike = "float32") -> PyTree:
    """``params`` with an array in the place of each quantized weight.

    ``bf.eval_shape(dequantize, params)`` has the shapes that ``nn.lora.init`` needs, and computes nothing.

    Args:
      params: what ``quantize`` returned.
      dtype: the dtype of these arrays, computed in float32; other leaves keep theirs.
    """
    is_quantized = lambda x: isinstance(x, formats.Quantized)
    return tree.map(
        lambda x: formats.of_parts(formats.parts_of(x), dtype) if is_quantized(x) else x,
        params,
        is_leaf=is_quantized,
    )
