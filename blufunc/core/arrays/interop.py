"""Arrays given in place to other libraries: DLPack, ``__cuda_array_interface__``.

Core, after stage 8. In: an array, and what the consumer says of its stream and device. Out: a capsule, or the
description of memory on a CUDA device. The consumer keeps the buffer alive, so a donation copies it instead of reusing
its memory. Arrays are immutable: capsules that can say so are read-only.
"""

from __future__ import annotations

import weakref
from typing import Any

from blufunc import errors
from blufunc.core.arrays import dlpack
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE


def place_of(array: Any) -> tuple[int, int]:
    """DLPack type and index of an array's device.

    Raises:
      InteropError: several devices, or another process, hold the array.
    """
    if array.device.joint or array.device.process is not None:
        raise errors.InteropError(
            f"a {array.aval} array on {array.device} is not on one device of this process.",
            where=source.here(),
            why="other libraries take arrays of one device.",
            fix="x.addressable_data(i), which is the shard on device i; or np.asarray(x)",
        )
    if array.aval.memory != DEVICE and array.device.platform != "cpu":
        raise errors.InteropError(
            f"a {array.aval} array is in the memory of the host of {array.device}.",
            where=source.here(),
            why="other libraries take arrays of the device, or of the CPU.",
            fix="bf.device_put(x, bf.memory.Space.Device); or np.asarray(x)",
        )
    return array.device.lender.dlpack_device(array.device)


def capsule(array: Any, stream: Any, max_version: Any, dl_device: Any, copy: bool | None) -> Any:
    """A DLPack capsule of an array.

    Args:
      stream: the consumer's stream on a CUDA device, which waits for the values: None and 1 are the legacy default
        stream, 2 the per-thread one, -1 does not wait; else a handle.
      max_version: the newest version of DLPack that the consumer reads; None is one before 1.
      dl_device: device that the consumer asks for: the array's own, or the CPU.
      copy: True for memory of the consumer's own; False refuses to copy.
    Raises:
      InteropError: the array cannot be given in this way.
    """
    own, aval, home = place_of(array), array.aval, array.device.lender
    if not dlpack.has_name(aval.dtype):
        raise errors.InteropError(
            f"{dtypes.short_name(aval.dtype)} arrays cannot be given to other libraries.",
            where=source.here(),
            why="DLPack has no name for the dtype.",
            fix="random.key_data(x)"
            if dtypes.is_key(aval.dtype)
            else "convert the array first: x.astype('float32')",
        )
    versioned = max_version is not None and max_version[0] >= 1
    wanted = own if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
    if wanted != own:
        if wanted != (dlpack.CPU, 0) or copy is False:
            raise errors.InteropError(
                f"a {aval} array on {array.device} was requested on {_device_name(wanted)}"
                + (" with copy=False." if copy is False else "."),
                where=source.here(),
                fix="move it first: bf.device_put(x, device)",
            )
        host = array.device.backend.to_host(array.buffer)
        return dlpack.pack(host.ctypes.data, aval.shape, aval.dtype, wanted, host, versioned, dlpack.COPIED)
    if copy is None and not aval.ndim:
        copy = True  # programs share scalars (``array.scalar``), and some consumers let their users write
    buffer = home.copy(array.buffer) if copy else array.buffer
    address, strides = home.lend(buffer, stream)
    flags = dlpack.COPIED if copy else dlpack.READ_ONLY
    return dlpack.pack(address, aval.shape, aval.dtype, own, buffer, versioned, flags, strides)


def address_of(array: Any) -> int:
    """The address of an array's first element, which its holder keeps alive.

    Raises:
      InteropError: several devices, or another process, hold the array.
    """
    place_of(array)
    return array.device.lender.lend(array.buffer, -1)[0]


def _device_name(place: tuple[int, int]) -> str:
    return f"{dlpack.DEVICE_NAMES.get(place[0], f'a device of DLPack type {place[0]},')}:{place[1]}"


_seen: dict[int, tuple[Any, Any]] = {}
"""Buffers that consumers know, by the identity of their array while it lives."""


def cuda_array_interface(array: Any) -> dict[str, Any]:
    """Version 3 of ``__cuda_array_interface__``.

    Raises:
      AttributeError: the array is not on a CUDA device.
    """
    if array.device.platform != "cuda":
        raise AttributeError(f"a {array.aval} array on {array.device} has no __cuda_array_interface__")
    buffer, key = array.buffer, id(array)
    description = buffer.__cuda_array_interface__
    if key not in _seen:
        _seen[key] = weakref.ref(array, lambda _: _seen.pop(key, None)), buffer
    array.device.lender.lend(buffer, -1)  # the consumer waits for the stream that the description names
    return description
