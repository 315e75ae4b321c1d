"""``ensure_compile_time_eval``: eager evaluation of known values while tracing.

Transforms, stage 1. In: operations on concrete values. Out: concrete values: the evaluating trace is current in the
block, inside any other trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from blufunc.core.ir import source
from blufunc.core.ir.trace import EVAL, set_trace


@contextlib.contextmanager
def ensure_compile_time_eval() -> Iterator[None]:
    """Context manager for eager evaluation inside ``jit`` and other transforms.

    For values that a traced function derives from known ones alone: tables, positions, shapes. The results are
    concrete, so Python may branch on them, and the program holds them as constants. Also a decorator.

    Raises (in the block):
      LeakedTracerError: an operand is a traced value, which has no concrete value.
    """
    with set_trace(EVAL), source.own_lines():
        yield
