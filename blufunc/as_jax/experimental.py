"""``jax.experimental``, and private names of JAX that report on its runtime.

Under the face ``as_jax``.
"""

from __future__ import annotations

from typing import Any

from blufunc.as_jax.configuration import enable_x64
from blufunc.transforms.staging.callback import effects_barrier, io_callback
from blufunc.transforms.staging.jit import jit

__all__ = ["_backends", "backends", "enable_x64", "global_state", "io_callback", "pjit", "wait_for_tokens"]

pjit = jit
wait_for_tokens = effects_barrier

_backends: dict[str, Any] = {}
"""JAX's started backends by platform: blufunc's are no objects of XLA."""


def backends() -> dict[str, Any]:
    """The started backends of XLA: none."""
    return _backends


class _GlobalState:
    """The processes of a program, as JAX's coordination service knows them."""

    client = None
    coordinator_address = None
    process_id = 0
    num_processes = 1


global_state = _GlobalState()
