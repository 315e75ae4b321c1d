"""Scheduling passes, in order.

Kernels, stage 6. In: a kernel of LoopIR, the inputs that may alias an output, and device limits. Out: a
``ScheduledKernel``, for ``render/source.py``. Each pass is a function of a ``ScheduledKernel``; its module states its
prerequisites.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from blufunc.kernels.backends.cuda.device_model import HOPPER, Limits
from blufunc.kernels.backends.cuda.schedule.kinds import choose_kind
from blufunc.kernels.backends.cuda.schedule.online_reductions import take_moments, take_online_sums
from blufunc.kernels.backends.cuda.schedule.reductions import read_single_lanes, share_folds
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.backends.cuda.schedule.shared_rows import prefetch_rows, stage_rows
from blufunc.kernels.backends.cuda.schedule.thread_mapping import (
    lay_out_shared_memory,
    map_threads,
    place_keeps,
    reload_keeps,
)
from blufunc.kernels.backends.cuda.schedule.vectorize import (
    arrive_early,
    choose_fast_exps,
    choose_widths,
    vectorize,
)
from blufunc.kernels.loopir.ir import Kernel

Pass = Callable[[ScheduledKernel], ScheduledKernel]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("parallel folds", share_folds),
    ("kind", choose_kind),
    ("reloaded keeps", reload_keeps),
    ("single lanes", read_single_lanes),
    ("online sums", take_online_sums),
    ("vector widths", choose_widths),
    ("thread mapping", map_threads),
    ("place of keeps", place_keeps),
    ("staged rows", stage_rows),
    ("moments", take_moments),
    ("prefetched rows", prefetch_rows),
    ("vectors", vectorize),
    ("fast exponentials", choose_fast_exps),
    ("early arrival", arrive_early),
    ("shared memory", lay_out_shared_memory),
)


def schedule(kernel: Kernel, aliased: Collection[str] = (), limits: Limits = HOPPER) -> ScheduledKernel:
    """Schedule a kernel.

    Args:
      kernel: kernel as lowered.
      aliased: names of inputs that may share memory with an output in some launch.
      limits: limits of the device.
    """
    return _scheduled(ScheduledKernel(kernel, frozenset(aliased), limits))


def schedule_group(kernels: Sequence[Kernel], name: str, aliased: Collection[str] = ()) -> ScheduledKernel:
    """Schedule kernels of one structure as one launch.

    Args:
      kernels: kernels with one ``group_key``, at most ``group_limit``.
      name: name of the kernel.
      aliased: names of inputs of the first kernel that in some kernel share memory with an output.
    """
    largest = max(kernels, key=lambda k: k.points)
    positions = {b.name: n for n, b in enumerate(kernels[0].buffers)}
    same = frozenset(largest.buffers[positions[a]].name for a in aliased)
    notes = (f"for {len(kernels)} sets of arrays:", *largest.notes)
    kernel = Kernel(name, largest.buffers, largest.grid, largest.body, notes)
    return _scheduled(ScheduledKernel(kernel, same, kind="group", segments=tuple(k.points for k in kernels)))


def _scheduled(scheduled: ScheduledKernel) -> ScheduledKernel:
    for _, run in PASSES:
        scheduled = run(scheduled)
    return scheduled
