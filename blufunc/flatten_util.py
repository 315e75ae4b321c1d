"""A pytree of arrays as one vector, and back.

A face above ``blufunc.numpy``, with the name of JAX's module. In: a pytree. Out: its elements in a vector, and the
function that unflattens it. Both are differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, tree
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source


def ravel_pytree(pytree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Flatten a pytree into a vector of the promoted dtype, with the inverse function.

    Returns:
      the vector, and a function from such a vector to a pytree of the original structure, shapes and dtypes.
    """
    leaves, structure = tree.flatten(pytree)
    values = [lift(x, f"the leaf {i} of the pytree") for i, x in enumerate(leaves)]
    types = [(v.aval.shape, v.aval.dtype) for v in values]
    flat = bnp.concatenate([bnp.ravel(v) for v in values]) if values else bnp.zeros(0, "float32")
    n = flat.aval.shape[0]

    def unravel(vector: Any) -> Any:
        vector = lift(vector, "the vector")
        if vector.aval.shape != (n,):
            raise errors.ShapeError(
                f"the vector to unravel has the shape {vector.aval.shape}; the pytree had {n} elements.",
                where=source.here(),
            )
        parts, start = [], 0
        for shape, dtype in types:
            size = math.prod(shape)
            parts.append(vector[start : start + size].reshape(shape).astype(dtype))
            start += size
        return tree.unflatten(structure, parts)

    return flat, unravel


__all__ = ["ravel_pytree"]
