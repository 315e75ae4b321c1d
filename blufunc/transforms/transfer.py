"""Moving pytrees of arrays: onto devices, to the host, and waiting for them.

Transforms, at both ends of a program's path (before stage 1 and after stage 8).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core import backend, source, tree
from blufunc.core.array import Array, from_numpy, lift
from blufunc.core.trace import Tracer


def devices(platform: str | None = None) -> list[backend.Device]:
    """The devices of a platform (``"cpu"``, ...), or of the default one.

    Raises:
      ValueRangeError: there is no such platform.
    """
    return list(backend.get(platform).devices())


def device_put(x: Any, device: backend.Device | None = None) -> Any:
    """A pytree of arrays, NumPy arrays and numbers as arrays on ``device`` (the default device unless given)."""
    target = device or backend.default_device()
    if not isinstance(target, backend.Device):
        raise errors.ArgumentError(
            f"device_put takes a device, not {target!r}.", where=source.here(), fix="use one of bf.devices()"
        )
    return tree.map(lambda leaf: _put(leaf, target), x)


def _put(leaf: Any, device: backend.Device) -> Any:
    value = lift(leaf)
    if isinstance(value, Tracer):
        raise errors.UnsupportedError(
            "device_put inside a traced function.",
            where=source.here(),
            why="a program runs on the one device of its arguments.",
            fix="put the arguments on a device before the call",
        )
    if value is leaf and value.device == device:
        return leaf
    return from_numpy(np.asarray(value), device, value.aval.weak_type)


def device_get(x: Any) -> Any:
    """A pytree of arrays as NumPy arrays, when their values are ready."""
    return tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, Array) else leaf, x)


def block_until_ready(x: Any) -> Any:
    """Wait until every array of a pytree has its value; returns the pytree."""
    tree.map(lambda leaf: leaf.block_until_ready() if isinstance(leaf, Array) else leaf, x)
    return x
