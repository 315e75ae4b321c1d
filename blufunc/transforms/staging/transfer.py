"""Devices, transfers of pytrees to the host, and synchronization.

Transforms, before stage 1 and after stage 8. In: pytrees of arrays. Out: NumPy arrays, or the same arrays when ready.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from blufunc import errors
from blufunc.config import platform_of
from blufunc.core.arrays import backend as _backend
from blufunc.core.arrays import process_info
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree

T = TypeVar("T")


def devices(platform: str | None = None) -> list[_backend.Device]:
    """The devices of a platform (``"cpu"``, ``"cuda"``), or of the default one.

    In a job of several processes (``bf.distributed``) the devices of all of them, in order; ``device.process_index`` is
    the owner.

    Raises:
      UnsupportedError: the platform is not available; the message says why.
      ValueRangeError: an unknown platform.
    """
    if platform is not None and not isinstance(platform, str):
        raise errors.ArgumentError(
            f"a platform is a string, not {platform!r:.60}.",
            where=source.here(),
            fix='"cpu", or None',
        )
    try:
        return _backend.all_devices(platform_of(platform) if platform else _backend.default_device().platform)
    except (errors.ValueRangeError, errors.UnsupportedError) as e:
        raise source.located(e) from None


def local_devices(
    process_index: int | None = None, backend: str | None = None, host_id: int | None = None
) -> list[_backend.Device]:
    """The devices that this process, or ``process_index``, owns.

    Raises:
      ValueRangeError: there is no such process.
    """
    this = process_info.current()
    owner = this.index
    for index in (process_index, host_id):
        if index is not None:
            owner = static_int(index, "local_devices", "process_index")
    if not 0 <= owner < this.count:
        raise errors.ValueRangeError(
            f"there is no process {owner} among {this.count}: this one is {this.index}.",
            where=source.here(),
            fix="leave it out",
        )
    return [d for d in devices(backend) if d.process_index == owner]


def device_count(backend: str | None = None) -> int:
    """Number of devices of a platform, or the default one, in all processes."""
    return len(devices(backend))


def local_device_count(backend: str | None = None) -> int:
    """Number of devices of this process."""
    return len(local_devices(backend=backend))


def process_index(backend: str | None = None) -> int:
    """Index of this process; 0 without a job."""
    devices(backend)
    return process_info.current().index


def process_count(backend: str | None = None) -> int:
    """Number of processes; 1 without a job (``bf.distributed.initialize()``)."""
    devices(backend)
    return process_info.current().count


def default_backend() -> str:
    """The default platform: ``"cpu"``, or the one of ``config.default_device``."""
    return _backend.default_device().platform


def device_get(x: Any) -> Any:
    """Copy a pytree of arrays to NumPy arrays, once their values are ready."""
    return tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, ConcreteArray) else leaf, x)


def block_until_ready(x: T) -> T:
    """Wait until every array of a pytree has its value; returns the pytree."""
    tree.map(lambda leaf: leaf.block_until_ready() if isinstance(leaf, ConcreteArray) else leaf, x)
    return x
