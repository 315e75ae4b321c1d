"""Files of recordings, which Perfetto opens.

Kernels, alongside stage 8. In: a ``Recording``. Out: JSON in Chrome's trace event format: a row per thread, device and
stream; for each step of a program the user's lines, what it computes, bytes, arithmetic and the least time for these;
and as a counter the memory that the plan of the running program holds.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blufunc.core.arrays.recording import Event, Recording
from blufunc.kernels.backends.cuda.dispatch import kernel_of
from blufunc.kernels.backends.cuda.program import CudaProgram
from blufunc.kernels.cost import Cost, cost_of, cost_of_equations
from blufunc.kernels.schedule import Schedule
from blufunc.kernels.tables import run_lengths

_MOST_LINES = 8


def write(recording: Recording, path: Path) -> None:
    """Write a recording; a name that ends in ``.gz`` is compressed."""
    trace = {"displayTimeUnit": "ns", "traceEvents": [*_events(recording)]}
    data = json.dumps(trace, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, 3, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    pid = os.getpid()
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "blufunc"}}
    rows: dict[str, int] = {}
    programs: dict[int, _Program] = {}
    for event in sorted(recording.events, key=lambda e: (e.start, -e.stop)):
        tid = rows.get(event.row)
        if tid is None:
            tid = rows[event.row] = len(rows) + 1
            yield _named(pid, tid, "thread_name", name=event.row)
            yield _named(pid, tid, "thread_sort_index", sort_index=tid)
        found = None
        if event.program is not None:
            found = programs.get(id(event.program))
            if found is None:
                found = programs[id(event.program)] = _Program(event.program)
        yield _slice(event, found, pid, tid, recording.began)
        if found is not None and (held := found.held(event.step)) is not None:
            yield _counter(event.row, held, pid, event.start - recording.began)


def _named(pid: int, tid: int, what: str, **value: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": value}


def _slice(event: Event, program: _Program | None, pid: int, tid: int, began: int) -> dict[str, Any]:
    about = dict(event.about) if program is None else program.about(event.step)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": event.name,
        "cat": about.pop("kind", "program"),
        "ts": (event.start - began) / 1e3,
        "dur": (event.stop - event.start) / 1e3,
        "args": about,
    }


def _counter(row: str, held: int, pid: int, at: int) -> dict[str, Any]:
    name = f"planned memory, {row}"
    return {"ph": "C", "pid": pid, "name": name, "ts": at / 1e3, "args": {"bytes": held}}


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
        self._held: dict[int, int] = {}

    def about(self, step: int) -> dict[str, Any]:
        """The facts about a step; of a program that runs as one, about all of it."""
        if self.schedule is None:
            ops = [op for s in self.cost.steps for op in s.ops]
            lines = dict.fromkeys(line for s in self.cost.steps for line in s.lines)
            return self._facts("NumPy calls", ops, [*lines], self.cost)
        s = self.cost.steps[step]
        return self._facts(s.kind, s.ops, s.lines, s) | {"points": s.shape}

    def _facts(self, kind: str, ops: Any, lines: Any, cost: Any | Cost) -> dict[str, Any]:
        shown = [*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])]
        return {
            "kind": kind,
            "program": self.name,
            "computes": run_lengths(ops),
            "lines": "; ".join(shown),
            "bytes": cost.bytes,
            "flops": cost.flops,
        }

    def held(self, step: int) -> int | None:
        """The bytes of the plan that are in use while a step runs; None without a plan."""
        if self.schedule is None:
            return None
        found = self._held.get(step)
        if found is None:
            plan = self.schedule.plan
            found = self._held[step] = sum(n for _, n in plan.live_at(plan.order[step]))
        return found
