"""``jax.config``: flags under JAX's names, and the precision of what has no dtype.

Under the face ``as_jax``. ``jax_enable_x64`` is a mode of the name ``jax`` alone: it decides whether Python numbers,
and values made without a dtype, have 64 bits. An explicit dtype is honoured in both.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from blufunc import errors
from blufunc.config import config as flags
from blufunc.core.ir import dtypes
from blufunc.transforms.staging.jit import swap_caches

__all__ = ["config", "enable_x64"]

_X64 = "jax_enable_x64"

# Flags of JAX that change no result, here or there, or only the form of messages.
_READ = {
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_legacy_prng_key": "allow",
    "jax_disable_jit": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_platforms": None,
    "jax_platform_name": "",
    "jax_traceback_filtering": "auto",
    "jax_check_tracer_leaks": False,
    "jax_default_matmul_precision": None,
    "jax_default_device": None,
    "jax_log_compiles": False,
    "jax_compilation_cache_dir": None,
    "jax_array_garbage_collection_guard": "allow",
}


class JaxConfig:
    """The flags of JAX; setting one that blufunc lacks is an error."""

    def update(self, name: str, value: Any) -> None:
        """Set a flag by JAX's name."""
        if name == _X64:
            set_x64(bool(value))
        elif name in _READ and value == self.read(name):
            return
        else:
            flags.update(name, value)

    def read(self, name: str) -> Any:
        """The value of a flag."""
        if name == _X64:
            return dtypes.is_wide()
        own = name.removeprefix("jax_")
        if own in flags.__dataclass_fields__:
            return getattr(flags, own)
        if name not in _READ:
            raise AttributeError(f"jax.config has no flag {name!r} in blufunc")
        return _READ[name]

    def __getattr__(self, name: str) -> Any:
        if name == "x64_enabled":
            return dtypes.is_wide()
        if not name.startswith("jax_"):
            raise AttributeError(f"jax.config has no attribute {name!r} in blufunc")
        return self.read(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.update(name, value)

    @property
    def values(self) -> dict[str, Any]:
        """All flags by JAX's names."""
        return {name: self.read(name) for name in (_X64, *_READ)}

    def parse_flags_with_absl(self) -> None:
        """Flags of the command line are absl's own: blufunc defines none."""

    config_with_absl = parse_flags_with_absl


config = JaxConfig()


def set_x64(on: bool) -> None:
    """Give 64 bits to what has no dtype, or 32."""
    with _lock:
        _values[0] = on
        _apply()


_lock = threading.RLock()
_values: list[Any] = [False]
"""The mode outside of all blocks, then those of open blocks of all threads."""


def _apply() -> None:
    on = bool(_values[-1])
    if on != dtypes.is_wide():
        dtypes.set_wide(on)
        swap_caches()  # traces hold the dtypes of their numbers


@contextlib.contextmanager
def enable_x64(new_val: bool = True) -> Iterator[None]:
    """``jax_enable_x64`` for a block.

    The mode is that of the process: of blocks in several threads, the last to begin decides.
    """
    own: Any = _Block(new_val)
    with _lock:
        _values.append(own)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _values[:] = [v for v in _values if v is not own]
            _apply()


class _Block:
    """The mode of an open block."""

    def __init__(self, on: bool):
        self.on = bool(on)

    def __bool__(self) -> bool:
        return self.on


def from_environment(environ: Any = os.environ) -> None:
    """Read ``JAX_ENABLE_X64``, which scripts set before they import JAX.

    Raises:
      ValueRangeError: it is neither true nor false.
    """
    text = environ.get("JAX_ENABLE_X64", "").lower()
    if text not in ("", "0", "1", "true", "false"):
        raise errors.ValueRangeError(f"JAX_ENABLE_X64 is {text!r:.60}.", fix="use 0 or 1")
    if text in ("1", "true"):
        set_x64(True)
