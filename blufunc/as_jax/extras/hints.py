"""Hints to XLA, which change no result. Under the face ``as_jax``."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["set_xla_metadata"]


class _NoMetadata(contextlib.ContextDecorator):
    """A block, or a decorator, that changes nothing."""

    def __enter__(self) -> None:
        """Nothing begins."""

    def __exit__(self, *exc: object) -> None:
        """Nothing ends."""


def set_xla_metadata(x: Any = None, **metadata: Any) -> Any:
    """Attach facts to operations, for passes of XLA: the value itself, or a block."""
    return _NoMetadata() if x is None else x
