"""User source lines, for equations and error messages.

Core, before tracing: a staged equation or an error asks here for the innermost frame outside blufunc, and
gets a ``Source``. Capture runs for every equation and must be cheap: it stores the frame's code object and
instruction index, and computes the line lazily. A source also carries the open scopes (``named_scope``), so
transforms that keep lines keep scopes.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from blufunc.errors import BlufuncError

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_STDLIB_WRAPPERS = ("functools.py", "contextlib.py")
_is_internal: dict[str, bool] = {}  # file name -> True for files of blufunc

Source = tuple[CodeType, int] | tuple[CodeType, int, tuple[str, ...]]
"""Code object, index of the running instruction, and the open scopes, if any."""


class _Open(threading.local):
    scopes: tuple[str, ...] = ()


_opened = _Open()  # the open scopes of the running code, outermost first
# Whether any scope was ever opened: until then, an equation reads a global instead of a thread-local.
_scopes_in_use = False


class _Replay(threading.local):
    line: Source | None = None


replay = _Replay()
"""Line of the equation being replayed, which its new equations and errors get."""


class Backward(tuple):
    """A ``Source`` of an equation made by transposition of the one written there."""

    __slots__ = ()


def backward(source: Source | None) -> Source | None:
    """``source``, marked as part of the backward pass."""
    return source if source is None else Backward(source)  # type: ignore[return-value]


def is_backward(source: Source | None) -> bool:
    """True if an equation with this source was made by transposition."""
    return source.__class__ is Backward


class at_line:
    """Context manager for rules of blufunc: their equations get the line given."""

    __slots__ = ("line", "previous")

    def __init__(self, line: Source | None):
        self.line = line

    def __enter__(self) -> None:
        self.previous, replay.line = replay.line, self.line

    def __exit__(self, *exc) -> None:
        replay.line = self.previous


class own_lines:
    """Context manager for user code that runs during a replay: its own lines count.

    The scopes of the replayed equation stay open.
    """

    __slots__ = ("replayed", "scopes")

    def __enter__(self) -> None:
        self.replayed, replay.line = replay.line, None
        self.scopes = _opened.scopes if self.replayed is None else open_scopes(scopes_of(self.replayed))

    def __exit__(self, *exc) -> None:
        replay.line = self.replayed
        open_scopes(self.scopes)


def open_scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Set the open scopes of this thread; returns the previous ones."""
    global _scopes_in_use
    before, _opened.scopes = _opened.scopes, scopes
    _scopes_in_use = _scopes_in_use or bool(scopes)
    return before


def placed_again(source: Source | None) -> Source | None:
    """The source of an equation staged elsewhere, moved to the current replay."""
    return within(_opened.scopes, source) if replay.line is None else replay.line


def _classify(filename: str) -> bool:
    internal = filename.startswith("<blufunc") or os.path.abspath(filename).startswith(
        _PACKAGE
    )  # a program, or blufunc's own code
    internal = internal or (
        os.path.basename(filename) in _STDLIB_WRAPPERS
        and os.path.dirname(filename) == os.path.dirname(os.__file__)
    )
    _is_internal[filename] = internal
    return internal


def is_internal(code: CodeType) -> bool:
    """True for code of blufunc."""
    internal = _is_internal.get(code.co_filename)
    return _classify(code.co_filename) if internal is None else internal


def _is_ours(frame: FrameType) -> bool:
    """True for code that blufunc generated, as the ``__init__`` of a dataclass.

    User code that is run from a string has the same file name.
    """
    return str(frame.f_globals.get("__name__", "")).startswith("blufunc.")


def current() -> Source | None:
    """The innermost frame outside blufunc, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        internal = _is_internal.get(filename)
        if internal is None:
            internal = _classify(filename)
        if not internal and not (filename == "<string>" and _is_ours(frame)):
            if _scopes_in_use and _opened.scopes:
                return code, frame.f_lasti, _opened.scopes
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None


def scopes_of(source: Source | None) -> tuple[str, ...]:
    """The scopes that were open at ``source``, outermost first."""
    return source[2] if source is not None and len(source) > 2 else ()  # type: ignore[misc]


def within(scopes: tuple[str, ...], source: Source | None) -> Source | None:
    """``source`` with ``scopes`` around its own."""
    if not scopes or source is None:
        return source
    moved = source[0], source[1], scopes + scopes_of(source)
    return backward(moved) if is_backward(source) else moved


def line_of(source: Source) -> int:
    """The line number of ``source`` in its file."""
    line = position_of(source)[0]
    return source[0].co_firstlineno if line is None else line


def position_of(source: Source) -> tuple[int | None, ...]:
    """First and last line, and first and last column.

    Interpreters specialize hot instructions, at the same position, so positions are compared.
    """
    code, lasti = source[:2]
    return _positions(code)[lasti // 2]


def function_of(source: Source) -> str:
    """The name of the function that ``source`` is in."""
    return source[0].co_name


@functools.lru_cache(maxsize=256)
def _positions(code: CodeType) -> list[tuple[int | None, ...]]:
    """The position of each instruction."""
    return list(code.co_positions())


def summary(source: Source | None) -> str:
    """``file.py:12 (function)``, with the file's base name; then ``in outer/inner``."""
    if source is None:
        return "<unknown>"
    code, scopes = source[0], scopes_of(source)
    text = f"{os.path.basename(code.co_filename)}:{line_of(source)} ({code.co_name})"
    return printable(f"{text} in {'/'.join(scopes)}" if scopes else text)


def printable(text: str) -> str:
    """Escape line breaks and bytes that are not UTF-8: a path may hold any.

    Summaries are comments of generated sources, where a line would end.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe(source: Source | None) -> str | None:
    """``path/file.py:12 (function): source line``, or None if the frame is unknown."""
    if source is None:
        return None
    code, line = source[0], line_of(source)
    text = linecache.getline(code.co_filename, line).strip()
    return f"{printable(code.co_filename)}:{line} ({code.co_name})" + (f": {text}" if text else "")


def here() -> str | None:
    """The user's line for error messages: the replayed line, or else the running one."""
    return describe(replay.line or current())


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line."""
    where = replay.line or current()
    if where is None:
        warnings.warn(message, category, stacklevel=2)
    else:
        warnings.warn_explicit(message, category, where[0].co_filename, line_of(where))


def at(line: Source | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with ``line`` as the user's line in errors and reports."""

    def run(*args: Any) -> Any:
        before, replay.line = replay.line, line
        try:
            return function(*args)
        finally:
            replay.line = before

    return run


def located(error: BlufuncError) -> BlufuncError:
    """The error with the user's line added, if it has none."""
    if error.where or not (where := here()):
        return error
    return type(error)(error.what, where=where, why=error.why, fix=error.fix)
