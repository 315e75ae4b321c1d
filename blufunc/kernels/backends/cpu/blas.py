"""Matmuls on the CPU that ``gemm.py`` leaves to a single-threaded BLAS.

Kernels, stage 8 on the CPU. In: arrays and the parameters of ``dot_general``. Out: the result, written in place. The
threads of a BLAS spin between its calls and delay the program's other kernels, and other programs. So BLAS has one
thread while a compiled program runs. A large matmul is split by rows, or by batches, across threads that sleep between
calls.
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

from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ops.dot import dot_general_p
from blufunc.kernels.backends.cpu import toolchain

WORTH_SHARING = 1 << 22
"""Minimum multiplications per extra thread; waking one takes about 20 us."""


class _OneThreadEach:
    """Context manager that restricts BLAS to the calling thread.

    The thread count of BLAS belongs to the process, and OpenBLAS does not always let one thread undo what another set.
    So the thread that found BLAS unrestricted restores it when its outermost program ends. Programs that run in other
    threads meanwhile leave the count alone.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.depth = 0
        self.limited: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self.lock:
            if self.owner is None:
                self.owner = me
                found = [
                    (c, c.get_num_threads()) for c in _controller().lib_controllers if c.user_api == "blas"
                ]
                self.limited = [(c, n) for c, n in found if n != 1]
                for c, _ in self.limited:
                    c.set_num_threads(1)
            self.depth += self.owner == me

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            if self.owner != threading.get_ident():
                return
            self.depth -= 1
            if not self.depth:
                for c, n in self.limited:
                    c.set_num_threads(n)
                self.owner = None


one_thread_each = _OneThreadEach()


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def find_again() -> None:
    """Forget which libraries there are: one was loaded."""
    _controller.cache_clear()


def product_into(out: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, params: dict[str, Any]) -> None:
    """``dot_general`` into contiguous ``out``, split along its first axis."""
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

    others = [_threads().submit(ignoring_fp_errors, part, span) for span in shares[1:]]
    part(shares[0])
    for other in others:
        other.result()


def _shares(out: np.ndarray, lhs: np.ndarray, params: dict[str, Any]) -> list[slice]:
    """Slices of the result's first axis, one per thread."""
    (lc, _), (lb, _) = params["dimension_numbers"]
    multiplications = out.size * math.prod([lhs.shape[d] for d in lc])
    # otherwise the first axis of the result is one of the rhs
    by_lhs = out.ndim and (lb or len(lc) < lhs.ndim)
    count = min(toolchain.threads(), out.shape[0]) if by_lhs else 1
    if multiplications < WORTH_SHARING or count < 2:
        return [slice(None)]
    edges = [round(i * out.shape[0] / count) for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(toolchain.threads() - 1, 1), thread_name_prefix="blufunc")


if hasattr(os, "register_at_fork"):
    # a child has neither the parent's threads nor the lock's owner
    os.register_at_fork(after_in_child=_threads.cache_clear)
    os.register_at_fork(after_in_child=one_thread_each.__init__)  # type: ignore[misc]
