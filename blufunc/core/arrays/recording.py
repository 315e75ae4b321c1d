"""Recordings: what ran when, while ``profiler.trace`` is on.

Core, consulted at every stage that takes time. In: spans of host code, and the steps of programs, which backends report
while ``active`` is a recording. Out: events in the order in which they ended, for ``kernels/inspect/trace_file.py``.
Where no recording is active, a program pays for reading ``active``.
"""

from __future__ import annotations

import contextlib
import itertools
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
      kind: its category: ``program``, ``operation``, ``compilation``, ``transfer`` or ``annotation``.
      row: the row of the picture: ``Python``, or a device.
      thread: the thread, where each has a row of its own; else 0.
      start, stop: nanoseconds on ``clock``.
      program, step: the program and the index of its step, if it is one; else None and -1.
      about: further facts, such as bytes.
    """

    name: str
    kind: str
    row: str
    thread: int
    start: int
    stop: int
    program: Any = None
    step: int = -1
    about: Mapping[str, Any] = {}


class Recording:
    """The events of a trace.

    Args:
      path: the file that it is for.

    Attributes:
      began: when it began, nanoseconds on ``clock``.
      events: what has ended; threads append to it.
      threads: the name of each thread that did something.
      finishing: functions that add what devices did; each is called once, at the end.
      devices: by device, what a backend keeps for it; guarded by ``lock``.
    """

    def __init__(self, path: Any):
        self.path = path
        self.began = clock()
        self.events: list[Event] = []
        self.threads: dict[int, str] = {}
        self.finishing: list[Callable[[], None]] = []
        self.devices: dict[Any, Any] = {}
        self.lock = threading.Lock()

    def add(self, name: str, kind: str, start: int, about: Mapping[str, Any] = {}) -> None:
        """Add what began at ``start`` in this thread, and ends now."""
        self.events.append(Event(name, kind, "Python", self.thread(), start, clock(), about=about))

    def thread(self) -> int:
        """The number of this thread; 0 is the main one."""
        current = threading.current_thread()
        if current is threading.main_thread():
            return 0
        number = threading.get_ident()
        self.threads[number] = current.name
        return number

    def steps(self, program: Any, names: Sequence[str], row: str, thread: int, times: Sequence[int]) -> None:
        """Add the steps of a program that ran one after another.

        Args:
          times: when each began, and when the last ended, nanoseconds on ``clock``; fewer if the program failed.
        """
        for n, (start, stop) in enumerate(itertools.pairwise(times)):
            self.events.append(Event(names[n], "step", row, thread, start, stop, program, n))

    @contextlib.contextmanager
    def span(self, name: str, kind: str, **about: Any) -> Iterator[None]:
        """Context of host code that takes time, such as a compilation."""
        start = clock()
        try:
            yield
        finally:
            self.add(name, kind, start, about)

    def finish(self) -> None:
        """Collect what devices did."""
        while self.finishing:
            self.finishing.pop()()


active: Recording | None = None
"""The recording that is on."""

OFF: AbstractContextManager[None] = contextlib.nullcontext()
"""The span where no recording is on: programs then enter no function of this file."""
