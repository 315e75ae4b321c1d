"""The devices there are; pytrees of arrays to the host, and waiting for them.

Transforms, at both ends of a program's path (before stage 1 and after stage 8).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend as _backend
from blufunc.core.arrays import process_info
from blufunc.core.arrays.array import Array
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree


def devices(platform: str | None = None) -> list[_backend.Device]:
    """The devices of a platform (``"cpu"``, ``"cuda"``), or of the one on which arrays are made.

    In a job of several processes (``bf.distributed``) those of all of them, in their order; ``device.process_index``
    says whose each is.

    Raises:
      UnsupportedError: the platform cannot be used here; the message says why.
      ValueRangeError: there is no such platform.
    """
    if platform is not None and not isinstance(platform, str):
        raise errors.ArgumentError(
            f"a platform is named by a string, not {platform!r:.60}.",
            where=source.here(),
            fix='"cpu", or None',
        )
    try:
        return _backend.all_devices(platform or _backend.default_device().platform)
    except (errors.ValueRangeError, errors.UnsupportedError) as e:
        raise source.located(e) from None


def local_devices(
    process_index: int | None = None, backend: str | None = None, host_id: int | None = None
) -> list[_backend.Device]:
    """Those of ``devices(backend)`` that this process has, or the one that is named.

    Raises:
      ValueRangeError: there is no such process.
    """
    us = process_info.current()
    wanted = us.index
    for index in (process_index, host_id):
        if index is not None:
            wanted = static_int(index, "local_devices", "process_index")
    if not 0 <= wanted < us.count:
        raise errors.ValueRangeError(
            f"there is no process {wanted} among {us.count}: this one is {us.index}.",
            where=source.here(),
            fix="leave it out",
        )
    return [d for d in devices(backend) if d.process_index == wanted]


def device_count(backend: str | None = None) -> int:
    """How many devices a platform, or the default one, has in all processes."""
    return len(devices(backend))


def local_device_count(backend: str | None = None) -> int:
    """How many of them this process has."""
    return len(local_devices(backend=backend))


def process_index(backend: str | None = None) -> int:
    """The number of this process: 0 where it is alone."""
    devices(backend)
    return process_info.current().index


def process_count(backend: str | None = None) -> int:
    """How many processes there are: 1 unless this one has joined a job (``bf.distributed.initialize()``)."""
    devices(backend)
    return process_info.current().count


def default_backend() -> str:
    """The platform on which arrays are made when nothing says otherwise: ``"cpu"``, or ``config.default_device``'s."""
    return _backend.default_device().platform


def device_get(x: Any) -> Any:
    """A pytree of arrays as NumPy arrays, when their values are ready."""
    return tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, Array) else leaf, x)


def block_until_ready(x: Any) -> Any:
    """Wait until every array of a pytree has its value; returns the pytree."""
    tree.map(lambda leaf: leaf.block_until_ready() if isinstance(leaf, Array) else leaf, x)
    return x
