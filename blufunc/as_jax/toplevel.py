"""Names of the module ``jax`` that blufunc spells otherwise.

Under the face ``as_jax``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from blufunc import errors
from blufunc.as_jax.configuration import config, enable_x64
from blufunc.contexts import checking_leaks
from blufunc.transforms.staging import transfer

__all__ = [
    "__version__",
    "__version_info__",
    "check_tracer_leaks",
    "config",
    "device_count",
    "devices",
    "enable_custom_prng",
    "enable_x64",
    "local_device_count",
    "local_devices",
]

__version__ = "0.10.2"
__version_info__ = (0, 10, 2)
check_tracer_leaks = checking_leaks


class MissingBackendError(errors.BlufuncError, RuntimeError):
    """A platform without devices: libraries look for one by catching ``RuntimeError``."""


def _of_platform(function: Callable) -> Callable:
    @functools.wraps(function)
    def found(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except errors.BlufuncError as e:
            if isinstance(e, MissingBackendError):
                raise
            what = f"Unknown backend: {e.what}"  # the words by which programs tell it from other errors
            raise MissingBackendError(what, where=e.where, why=e.why, fix=e.fix) from None

    return found


devices = _of_platform(transfer.devices)
local_devices = _of_platform(transfer.local_devices)
device_count = _of_platform(transfer.device_count)
local_device_count = _of_platform(transfer.local_device_count)


@contextlib.contextmanager
def enable_custom_prng(on: bool = True) -> Iterator[None]:
    """A block in which ``PRNGKey`` makes typed keys: it always does."""
    yield
