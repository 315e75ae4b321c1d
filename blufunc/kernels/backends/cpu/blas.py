"""Products on the CPU that ``gemm.py`` leaves to BLAS: each thread has a share of one, and a BLAS of one thread.

Kernels, stage 8 on the CPU. A BLAS with threads of its own keeps them spinning between its calls, where they stand in
the way of a program's other kernels, and of other programs. So while a compiled program runs, BLAS has one thread, and
what a large product computes is divided by rows, or by batches, among threads that sleep in between.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from blufunc.core.arrays.errstate import quietly
from blufunc.core.ops.dot import dot_general_p
from blufunc.kernels.backends.cpu import toolchain

WORTH_SHARING = 1 << 22
"""From how many multiplications on waking a thread, which takes some 20 microseconds, pays."""


class _OneThreadEach:
    """Context manager: while it is open, calls of BLAS use the thread that makes them and no other.

    The number of BLAS's threads belongs to the process, and OpenBLAS does not always let one thread undo what another
    set. So the thread that found BLAS unlimited restores it, when the outermost of its programs ends; programs of other
    threads at that time leave it alone.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.depth = 0
        self.limit: Any = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self.lock:
            if self.owner is None:
                self.owner, self.limit = me, _controller().limit(limits=1, user_api="blas")
            self.depth += self.owner == me

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            if self.owner != threading.get_ident():
                return
            self.depth -= 1
            if not self.depth:
                self.limit.restore_original_limits()
                self.owner = self.limit = None


one_thread_each = _OneThreadEach()


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def product_into(out: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, params: dict[str, Any]) -> None:
    """``dot_general`` of two arrays, written to ``out``, a contiguous array; divided along its first axis."""
    shares = _shares(out, lhs, params)
    if len(shares) == 1:
        dot_general_p.impl_into(out, lhs, rhs, **params)
        return
    (lc, _), (lb, rb) = params["dimension_numbers"]
    axis = lb[0] if lb else next(d for d in range(lhs.ndim) if d not in lc)

    def part(span: slice) -> None:
        x = lhs[(slice(None),) * axis + (span,)]
        y = rhs[(slice(None),) * rb[0] + (span,)] if lb else rhs
        dot_general_p.impl_into(out[span], x, y, **params)

    others = [_threads().submit(quietly, part, span) for span in shares[1:]]
    part(shares[0])
    for other in others:
        other.result()


def _shares(out: np.ndarray, lhs: np.ndarray, params: dict[str, Any]) -> list[slice]:
    """The parts of the first axis of the result that threads take; all of it where one is enough."""
    (lc, _), (lb, _) = params["dimension_numbers"]
    multiplications = out.size * math.prod([lhs.shape[d] for d in lc])
    by_lhs = out.ndim and (lb or len(lc) < lhs.ndim)  # else the first axis of the result is one of the rhs
    count = min(toolchain.threads(), out.shape[0]) if by_lhs else 1
    if multiplications < WORTH_SHARING or count < 2:
        return [slice(None)]
    edges = [round(i * out.shape[0] / count) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(toolchain.threads() - 1, 1), thread_name_prefix="blufunc")


if hasattr(os, "register_at_fork"):
    # the threads stay with the parent, and so does one that was within
    os.register_at_fork(after_in_child=_threads.cache_clear)
    os.register_at_fork(after_in_child=one_thread_each.__init__)  # type: ignore[misc]
