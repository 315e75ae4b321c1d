"""``ensure_compile_time_eval``: computing with known values while a function is traced.

Transforms, stage 1. In its block the evaluating trace is current, whatever trace is around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from blufunc.core.ir import source
from blufunc.core.ir.trace import EVAL, set_trace


@contextlib.contextmanager
def ensure_compile_time_eval() -> Iterator[None]:
    """A block in which operations are computed at once, under ``jit``, ``grad`` and other transforms too.

    For what a traced function derives from known values alone: tables, positions, shapes. The results are concrete,
    so Python may branch on them, and the program holds them as constants. Also a decorator.

    Raises (in the block):
      LeakedTracerError: an operation is given a traced value: it has no value to compute with.
    """
    with set_trace(EVAL), source.own_lines():
        yield
