"""``shard_map`` by the parameters of ``jax.experimental``.

Under the face ``as_jax``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc.parallel.collectives import shard_map as maps

__all__ = ["shard_map"]


def shard_map(f: Callable, mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool = True) -> Callable:
    """``blufunc.shard_map`` by the parameters of ``jax.experimental.shard_map``."""
    return maps.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_rep)
