"""Recordings: what ran when, while ``profiler.trace`` is on.

Core, consulted at every stage that takes time. In: spans of host code, and the steps of programs, which backends report
while ``active`` is a recording. Out: events in the order in which they ended, for ``kernels/inspect/trace_file.py``.
Where no recording is active, a program pays for reading ``active``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

clock = time.perf_counter_ns


class Event(NamedTuple):
    """Something that ran.

    Attributes:
      name: what ran.
      row: the row of the picture: a thread, the steps of a device, a stream.
      start, stop: nanoseconds on ``clock``.
      program, step: the program and the index of its step, if it is one; else None and -1.
      about: further facts: bytes, a category.
    """

    name: str
    row: str
    start: int
    stop: int
    program: Any = None
    step: int = -1
    about: Mapping[str, Any] = {}


class Recording:
    """The events of a trace.

    Attributes:
      began: when it began, nanoseconds on ``clock``.
      events: what has ended; threads append to it.
      finishing: functions that add what devices did; each is called once, at the end.
    """

    def __init__(self) -> None:
        self.began = clock()
        self.events: list[Event] = []
        self.finishing: list[Callable[[], None]] = []
        self.devices: dict[Any, Any] = {}
        self.lock = threading.Lock()

    def add(self, name: str, start: int, about: Mapping[str, Any] = {}) -> None:
        """Add what began at ``start`` in this thread, and ends now."""
        self.events.append(Event(name, _thread(), start, clock(), about=about))

    def steps(self, program: Any, names: Sequence[str], row: str, times: Sequence[int]) -> None:
        """Add the steps of a program that ran one after another.

        Args:
          times: when each began, and when the last ended: nanoseconds on ``clock``.
        """
        for n, name in enumerate(names):
            self.events.append(Event(name, row, times[n], times[n + 1], program, n))

    def finish(self) -> None:
        """Collect what devices did."""
        for function in self.finishing:
            function()
        self.finishing.clear()


active: Recording | None = None
"""The recording that is on."""


def row_of(device: str) -> str:
    """The row of a device's steps: ranks of a simulated mesh are threads."""
    thread = threading.current_thread()
    return device if thread is threading.main_thread() else f"{device}, {thread.name}"


def _thread() -> str:
    thread = threading.current_thread()
    return "Python" if thread is threading.main_thread() else f"Python, {thread.name}"


def span(name: str, **about: Any) -> AbstractContextManager[None]:
    """Context of host code that takes time, such as a compilation."""
    return _NOTHING if active is None else _span(active, name, about)


@contextlib.contextmanager
def _span(to: Recording, name: str, about: Mapping[str, Any]) -> Iterator[None]:
    start = clock()
    try:
        yield
    finally:
        to.add(name, start, about)


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
