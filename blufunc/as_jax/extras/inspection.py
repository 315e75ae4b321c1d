"""``jax.debug.inspect_array_sharding``. Under the face ``as_jax``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.ir import source

__all__ = ["inspect_array_sharding"]


def inspect_array_sharding(value: Any, *, callback: Callable[[Any], None]) -> None:
    """Call a function with the sharding of an array or traced value.

    Raises:
      UnsupportedError: the sharding of the traced value is inferred when the program is compiled.
    """
    found = getattr(value, "sharding", None)
    if found is None:
        raise errors.UnsupportedError(
            "inspect_array_sharding of a traced value whose sharding is not stated.",
            where=source.here(),
            why="shardings are inferred when a program is compiled.",
            fix="jit(f).lower(...).compile() reports them, and visualize_sharding shows those of results",
        )
    callback(found)
