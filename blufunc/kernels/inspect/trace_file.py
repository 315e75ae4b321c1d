"""Files of recordings, which Perfetto opens.

Kernels, alongside stage 8. In: a ``Recording``. Out: JSON in Chrome's trace event format: a row per thread, device and
stream; for each step of a program the user's lines, what it computes, bytes, arithmetic and the least time for these;
and as a counter the memory that the plan of the running program holds.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blufunc.core.arrays.recording import Event, Recording
from blufunc.kernels.backends.cuda.dispatch import kernel_of
from blufunc.kernels.backends.cuda.program import CudaProgram
from blufunc.kernels.cost import Cost, StepCost, cost_of, cost_of_equations
from blufunc.kernels.schedule import Schedule
from blufunc.kernels.tables import run_lengths

_MOST_LINES = 8


def write(recording: Recording) -> None:
    """Write a recording to its path; a name that ends in ``.gz`` is compressed."""
    path: Path = recording.path
    trace = {"displayTimeUnit": "ns", "traceEvents": [*_events(recording)]}
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    path.write_bytes(gzip.compress(data, 3, mtime=0) if path.suffix == ".gz" else data)


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    pid = os.getpid()
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "blufunc"}}
    rows: dict[tuple[str, int], _Row] = {}
    programs: dict[int, _Program] = {}
    for event in sorted(recording.events, key=lambda e: (e.start, -e.stop)):
        row = rows.get((event.row, event.thread))
        if row is None:
            thread = recording.threads.get(event.thread)
            name = f"{event.row}, {thread}" if thread else event.row
            row = rows[event.row, event.thread] = _Row(pid, len(rows) + 1, name, recording.began)
            yield from row.named()
        if event.program is None:
            yield row.slice(event, event.kind, event.about)
            continue
        program = programs.get(id(event.program))
        if program is None:
            program = programs[id(event.program)] = _Program(event.program)
        yield from row.held(event, program.held(event.step))
        yield row.slice(event, *program.about(event.step))
    for row in rows.values():
        yield from row.ended(None)


class _Row:
    """A row of the picture.

    Args:
      tid: its number.
      began: the start of the recording, nanoseconds.
    """

    def __init__(self, pid: int, tid: int, name: str, began: int):
        self.pid, self.tid, self.name, self.began = pid, tid, name, began
        self._running: list[tuple[int, int]] = []  # end and bytes of the steps that the present one is in

    def named(self) -> Iterator[dict[str, Any]]:
        """The name and the place of the row."""
        for what, value in (
            ("thread_name", {"name": self.name}),
            ("thread_sort_index", {"sort_index": self.tid}),
        ):
            yield {"ph": "M", "pid": self.pid, "tid": self.tid, "name": what, "args": value}

    def slice(self, event: Event, kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """An event as a slice."""
        return {
            "ph": "X",
            "pid": self.pid,
            "tid": self.tid,
            "name": event.name,
            "cat": kind,
            "ts": (event.start - self.began) / 1e3,
            "dur": (event.stop - event.start) / 1e3,
            "args": dict(about),
        }

    def held(self, event: Event, nbytes: int | None) -> Iterator[dict[str, Any]]:
        """The memory while a step runs, and what has changed since the last one."""
        yield from self.ended(event.start)
        if nbytes is not None:
            self._running.append((event.stop, nbytes))
            yield self._counter(event.start, nbytes)

    def ended(self, now: int | None) -> Iterator[dict[str, Any]]:
        """The memory after steps that end before ``now``; None: after all."""
        while self._running and (now is None or self._running[-1][0] <= now):
            end, _ = self._running.pop()
            if end != now:  # else the next step begins here
                yield self._counter(end, self._running[-1][1] if self._running else 0)

    def _counter(self, at: int, nbytes: int) -> dict[str, Any]:
        name = f"planned memory, {self.name}"
        return {
            "ph": "C",
            "pid": self.pid,
            "name": name,
            "ts": (at - self.began) / 1e3,
            "args": {"bytes": nbytes},
        }


class _Program:
    """Facts about the steps of a program, computed when the first is written."""

    def __init__(self, program: Any):
        self.name = program.jaxpr.name or "program"
        self.schedule: Schedule | None = getattr(program, "schedule", None)
        on_host = (lambda eqn: kernel_of(eqn).on_host) if isinstance(program, CudaProgram) else None
        if self.schedule is None:
            self.cost = cost_of_equations(program.jaxpr)
        else:
            self.cost = cost_of(self.schedule, on_host)
        self.about = functools.cache(self._about)
        self.held = functools.cache(self._held)

    def _about(self, step: int) -> tuple[str, Mapping[str, Any]]:
        """The kind of a step, and facts; of a program that runs as one, about all of it."""
        if self.schedule is None:
            ops = [op for s in self.cost.steps for op in s.ops]
            lines = dict.fromkeys(line for s in self.cost.steps for line in s.lines)
            return "NumPy calls", self._facts(ops, [*lines], self.cost)
        s = self.cost.steps[step]
        return s.kind, {**self._facts(s.ops, s.lines, s), "points": s.shape}

    def _facts(self, ops: Sequence[str], lines: Sequence[str], cost: StepCost | Cost) -> dict[str, Any]:
        shown = [*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])]
        return {
            "program": self.name,
            "computes": run_lengths(ops),
            "lines": "; ".join(shown),
            "bytes": cost.bytes,
            "flops": cost.flops,
        }

    def _held(self, step: int) -> int | None:
        """The bytes of the plan that are in use while a step runs; None without a plan."""
        if self.schedule is None:
            return None
        plan = self.schedule.plan
        return sum(n for _, n in plan.live_at(plan.order[step]))
