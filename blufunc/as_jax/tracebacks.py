"""Names of JAX's filters of tracebacks.

Under the face ``as_jax``. Each accepts what libraries give it; ``include_frame`` tells them which frames are theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from blufunc.core.ir import source

__all__ = ["_exclude_paths", "api_boundary", "current", "include_frame", "register_exclusion", "user_context"]

_exclude_paths: list[str] = []


def register_exclusion(path: str) -> None:
    """Leave a library's file out of what ``include_frame`` admits."""
    _exclude_paths.append(path)


def include_frame(frame: FrameType) -> bool:
    """True for a frame of the user's code."""
    return frame.f_code.co_filename not in _exclude_paths and not source.is_internal(frame.f_code)


def api_boundary(fun: Callable, **options: Any) -> Callable:
    """The function itself."""
    return fun


def current() -> Any:
    """The user's line."""
    return source.current()


@contextlib.contextmanager
def user_context(*args: Any, **options: Any) -> Iterator[None]:
    """A block whose errors name the user's line, as all do."""
    yield
