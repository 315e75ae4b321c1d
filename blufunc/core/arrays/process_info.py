"""The job: the processes that run one program together, as the core sees them.

Core. ``parallel/runtime/bootstrap.py`` sets this process's place; until then it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Place of a process in its job.

    Attributes:
      index, count: rank, and number of processes.
      local_index: rank among the processes of its host.
    """

    index: int = 0
    count: int = 1
    local_index: int = 0


_current = Job()


def current() -> Job:
    """The job of this process."""
    return _current


def join(job: Job) -> None:
    """Set the job of this process."""
    global _current
    _current = job
