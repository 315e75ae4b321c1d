"""The job: the processes that run one program together, as far as the core must know of them.

Core. ``parallel/runtime/bootstrap.py`` says which of them this one is; until then it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """What a process is among others.

    Attributes:
      index, count: its number, and how many there are.
      local_index: its number among those of its host.
    """

    index: int = 0
    count: int = 1
    local_index: int = 0


_current = Job()


def current() -> Job:
    """The job of this process."""
    return _current


def join(job: Job) -> None:
    """Make ``job`` that of this process."""
    global _current
    _current = job
