"""``jax.extend.source_info_util``: stacks of names, and lines of the user.

Under the face ``as_jax``. A name that is pushed here is a ``named_scope``, so operations show it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from blufunc.core.ir import source
from blufunc.transforms.staging.named_scope import named_scope

__all__ = [
    "NameStack",
    "SourceInfo",
    "current",
    "current_name_stack",
    "extend_name_stack",
    "new_name_stack",
    "new_source_info",
    "reset_name_stack",
    "set_name_stack",
    "summarize",
    "transform_name_stack",
]


@dataclasses.dataclass(frozen=True)
class NameStack:
    """Names of scopes and of transforms, the outermost first.

    Attributes:
      stack: names of scopes as they are, those of transforms with parentheses.
    """

    stack: tuple[str, ...] = ()

    def extend(self, name: str) -> NameStack:
        """The stack with the name of a scope on top."""
        return NameStack((*self.stack, name))

    def transform(self, name: str) -> NameStack:
        """The stack with the name of a transform on top."""
        return NameStack((*self.stack, name + "()"))

    def __add__(self, other: NameStack) -> NameStack:
        return NameStack(self.stack + other.stack)

    def __getitem__(self, index: Any) -> NameStack:
        return NameStack(self.stack[index])

    def __len__(self) -> int:
        return len(self.stack)

    def __str__(self) -> str:
        """Scopes inside the transforms that follow them: ``vmap(jvp(layer))``."""
        shown = ""
        for name in reversed(self.stack):
            if name.endswith("()"):
                shown = f"{name[:-2]}({shown})"
            else:
                shown = f"{name}/{shown}" if shown else name
        return shown


@dataclasses.dataclass(frozen=True)
class SourceInfo:
    """The user's line of an operation, and the names of its scopes."""

    traceback: Any
    name_stack: NameStack

    def replace(self, **changes: Any) -> SourceInfo:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)


class _Current(threading.local):
    stack = NameStack()


_current = _Current()


def current_name_stack() -> NameStack:
    """The stack of this thread."""
    return _current.stack


def new_name_stack(name: str = "") -> NameStack:
    """A stack of one name, or of none."""
    return NameStack((name,) if name else ())


@contextlib.contextmanager
def set_name_stack(name_stack: NameStack) -> Iterator[None]:
    """Make a stack current in a block."""
    before, _current.stack = _current.stack, name_stack
    try:
        yield
    finally:
        _current.stack = before


def reset_name_stack() -> contextlib.AbstractContextManager[None]:
    """Make an empty stack current in a block."""
    return set_name_stack(NameStack())


@contextlib.contextmanager
def extend_name_stack(name: str) -> Iterator[NameStack]:
    """Push the name of a scope in a block, which gets the stack."""
    with set_name_stack(_current.stack.extend(name)), named_scope(name):
        yield _current.stack


@contextlib.contextmanager
def transform_name_stack(name: str) -> Iterator[NameStack]:
    """Push the name of a transform in a block, which gets the stack."""
    with set_name_stack(_current.stack.transform(name)):
        yield _current.stack


def new_source_info() -> SourceInfo:
    """No line, and no names."""
    return SourceInfo(None, NameStack())


def current() -> SourceInfo:
    """The user's line, and the names of this thread."""
    return SourceInfo(source.current(), _current.stack)


def summarize(source_info: Any, num_frames: int = 1) -> str:
    """The line as text: ``file.py:12 (function)``."""
    return source.summary(getattr(source_info, "traceback", source_info)) or "unknown"
