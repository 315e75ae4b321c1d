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
        # plain tuples, which become events at the end: an operation takes as long as making a few events
        self._spans: list[tuple[str, str, int, int, int, Mapping[str, Any]]] = []
        self._runs: list[tuple[Any, int, int, Sequence[int], int]] = []
        self._local = threading.local()
        self.finishing: list[Callable[[], None]] = []
        self.devices: dict[Any, Any] = {}
        self.lock = threading.Lock()

    def add(self, name: str, kind: str, start: int, about: Mapping[str, Any] = {}) -> None:
        """Add what began at ``start`` in this thread, and ends now."""
        self._spans.append((name, kind, self.thread(), start, clock(), about))

    def thread(self) -> int:
        """The number of this thread; 0 is the main one."""
        try:
            return self._local.number
        except AttributeError:
            pass
        current, number = threading.current_thread(), 0
        if current is not threading.main_thread():
            with self.lock:  # identities of threads are reused
                number = 1 + len(self.threads)
                self.threads[number] = current.name
        self._local.number = number
        return number

    def ran(self, program: Any, start: int, times: Sequence[int]) -> None:
        """Add a run of a program in this thread, which ends now.

        Args:
          program: it has ``name`` and ``step_names``.
          start: its beginning, nanoseconds on ``clock``.
          times: when each step began, and when the last ended; 0 for those that were not reached.
        """
        self._runs.append((program, self.thread(), start, times, clock()))

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
        """Collect what operations, programs and devices did."""
        for name, kind, thread, start, stop, about in self._spans:
            self.events.append(Event(name, kind, "Python", thread, start, stop, about=about))
        for program, thread, start, marks, stop in self._runs:
            self.events.append(Event(program.name, "program", "Python", thread, start, stop))
            times = [t for t in marks if t]
            if len(times) < len(marks):  # a step has failed
                times.append(stop)
            self.steps(program, program.step_names, "CPU", thread, times)
        self._spans, self._runs = [], []
        while self.finishing:
            self.finishing.pop()()


active: Recording | None = None
"""The recording that is on."""

OFF: AbstractContextManager[None] = contextlib.nullcontext()
"""The span where no recording is on: programs then enter no function of this file."""
