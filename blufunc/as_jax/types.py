"""Names of ``jax.dtypes`` and of JAX's registry of pytrees.

Under the face ``as_jax``.
"""

from __future__ import annotations

import numpy as np

from blufunc.core.pytree.nodes import KINDS

__all__ = ["_registry", "DType", "ExtendedDType"]

DType = np.dtype


class ExtendedDType:
    """Base of dtypes that libraries declare for JAX; no array of blufunc has one."""


class _Registry:
    """The classes that are pytree nodes."""

    def __contains__(self, cls: type) -> bool:
        return KINDS[cls] is not None


_registry = _Registry()
