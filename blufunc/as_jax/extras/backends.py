"""``jax.extend.backend``: platforms as objects, and the caches of programs.

Under the face ``as_jax``. blufunc has no clients of XLA: a platform is named, and lists its devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blufunc.core.arrays.backend import Device, default_device
from blufunc.transforms.staging import transfer
from blufunc.transforms.staging.jit import clear_caches

__all__ = [
    "backend_xla_version",
    "backends",
    "clear_backends",
    "clear_in_memory_compilation_cache",
    "get_backend",
    "get_default_device",
    "register_backend_cache",
]

_caches: list[Any] = []


@dataclass(frozen=True)
class Platform:
    """The devices of one kind that this process may use.

    Attributes:
      platform: ``"cpu"`` or ``"gpu"``.
    """

    platform: str

    def devices(self) -> list[Device]:
        """All devices of the platform."""
        return list(transfer.devices(self.platform))

    def local_devices(self) -> list[Device]:
        """Those of this process."""
        return list(transfer.local_devices(backend=self.platform))

    def device_count(self) -> int:
        """The number of devices."""
        return transfer.device_count(self.platform)

    def local_device_count(self) -> int:
        """The number of devices of this process."""
        return len(self.local_devices())

    def process_index(self) -> int:
        """The rank of this process."""
        return transfer.process_index()

    @property
    def platform_version(self) -> str:
        """Empty: no compiler of a platform has a version of its own."""
        return ""


def get_backend(platform: str | Platform | None = None) -> Platform:
    """A platform by its name; default: that of the default device.

    Raises:
      ValueRangeError: this process has no such devices.
    """
    if isinstance(platform, Platform):
        return platform
    name = transfer.default_backend() if platform is None else platform
    transfer.devices(name)  # raises for a platform without devices
    return Platform(name)


def backends() -> dict[str, Platform]:
    """The platform in use, by name."""
    own = get_backend()
    return {own.platform: own}


def get_default_device() -> Device:
    """The device of new arrays."""
    return default_device()


def backend_xla_version(platform: str | None = None) -> int | None:
    """None: programs are not compiled by XLA."""
    return None


def register_backend_cache(cache: Any, for_what: str) -> None:
    """Clear a cache (by ``cache_clear()``) when ``clear_backends`` drops all programs."""
    _caches.append(cache)


def clear_in_memory_compilation_cache() -> None:
    """Drop the traces and programs of all jitted functions."""
    clear_caches()


def clear_backends() -> None:
    """Drop all programs, and what was registered; devices and arrays stay."""
    clear_caches()
    for cache in _caches:
        cache.cache_clear()
