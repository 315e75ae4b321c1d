"""Names of ``jax.dtypes`` and of JAX's registry of pytrees.

Under the face ``as_jax``.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blufunc import dtypes
from blufunc.core.pytree import tree
from blufunc.core.pytree.nodes import KINDS
from blufunc.tree_util import register_pytree_node

__all__ = ["DType", "ExtendedDType", "_registry", "bfloat16", "canonicalize_dtype", "default_registry"]

DType = np.dtype
bfloat16 = ml_dtypes.bfloat16  # NumPy's scalars: those of ``jax.numpy`` make arrays


def canonicalize_dtype(dtype: Any, allow_extended_dtype: bool = False) -> np.dtype:
    """The dtype that an array of ``dtype`` has in the mode in force; None is float."""
    return dtypes.canonicalize_dtype(float if dtype is None else dtype, allow_extended_dtype)


class ExtendedDType:
    """Base of dtypes that libraries declare for JAX; no array of blufunc has one."""


class _Registry:
    """The classes that are pytree nodes."""

    def __contains__(self, cls: type) -> bool:
        return KINDS[cls] is not None


_registry = _Registry()


class _TreeRegistry:
    """The registry of pytrees as an object with functions."""

    flatten = staticmethod(tree.flatten)
    register_node = staticmethod(register_pytree_node)

    def flatten_one_level(self, x: Any) -> tuple[list[Any], Any] | None:
        """The children of a node and its structure without theirs; None of a leaf."""
        leaves, structure = tree.flatten(x, is_leaf=lambda y: y is not x)
        return None if len(leaves) == 1 and leaves[0] is x else (leaves, structure)


default_registry = _TreeRegistry()
