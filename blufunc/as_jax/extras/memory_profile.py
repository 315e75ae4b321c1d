"""The contents of a device's memory, for ``pprof``.

Under the face ``as_jax``. In: ``memory.snapshot``. Out: a gzipped protocol buffer, ``perftools.profiles.Profile``, of
allocations by type and purpose, which ``go tool pprof`` reads.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable

from blufunc.core.arrays import backend
from blufunc.memory import snapshot
from blufunc.transforms.staging import transfer

__all__ = ["device_memory_profile", "save_device_memory_profile"]

# Field numbers of the messages of pprof.
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRINGS = 1, 2, 4, 5, 6


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _number(field: int, n: int) -> bytes:
    return _varint(field << 3) + _varint(n)


def _message(field: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return _varint(field << 3 | 2) + _varint(len(body)) + body


class _Strings:
    """The table of strings: the first is empty."""

    def __init__(self) -> None:
        self.found = {"": 0}

    def __call__(self, text: str) -> int:
        return self.found.setdefault(text, len(self.found))


def _profile(rows: Iterable[tuple[str, str, int, int]]) -> bytes:
    """A profile of rows ``(type, purpose, count, bytes)``."""
    strings = _Strings()
    out = [
        _message(_SAMPLE_TYPE, _number(1, strings(kind)), _number(2, strings(unit)))
        for kind, unit in (("allocations", "count"), ("space", "bytes"))
    ]
    places: dict[str, int] = {}
    for kind, purpose, count, nbytes in rows:
        stack = [places.setdefault(name, len(places) + 1) for name in (kind, purpose)]  # the innermost first
        packed = lambda field, numbers: _message(field, b"".join(map(_varint, numbers)))
        out.append(_message(_SAMPLE, packed(1, stack), packed(2, (count, nbytes))))
    for name, n in places.items():
        out.append(_message(_LOCATION, _number(1, n), _message(4, _number(1, n))))
        out.append(_message(_FUNCTION, _number(1, n), _number(2, strings(name))))
    return b"".join([*out, *(_message(_STRINGS, text.encode()) for text in strings.found)])


def device_memory_profile(backend: str | None = None) -> bytes:
    """The live allocations of a platform, by type and purpose, for ``pprof``.

    Args:
      backend: a platform; default: that of the default device.
    """
    rows = []
    for device in _devices(backend):
        taken = snapshot(device)
        rows += [(a.type, f"{a.purpose} on {taken.device}", a.count, a.nbytes) for a in taken.allocations]
    return gzip.compress(_profile(rows))


def _devices(platform: str | None) -> list[backend.Device]:
    return list(transfer.local_devices(backend=platform or backend.default_device().platform))


def save_device_memory_profile(filename: str | os.PathLike, backend: str | None = None) -> None:
    """Write ``device_memory_profile`` to a file."""
    with open(filename, "wb") as f:
        f.write(device_memory_profile(backend))
