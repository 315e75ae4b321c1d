"""Pictures: a program as a graph, its memory over time, a sharding, a pipeline.

Face. In: a function and its arguments, or a sharding. Out: a ``Drawing``, which notebooks show: ``svg``, ``html`` (a
page to zoom and search) and ``save(path)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.ir import source
from blufunc.kernels.inspect import memory_graph, program_graph
from blufunc.kernels.inspect.drawing import Drawing, element, group, label
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.inspect.roofline import machine_of
from blufunc.parallel.recipes.pipeline import schedule_1f1b
from blufunc.parallel.reports.visualize import sharding_svg, visualize_sharding
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.jit import Jitted, jit
from blufunc.transforms.staging.stages import device_or_default

__all__ = ["Drawing", "memory", "pipeline", "program", "sharding_svg", "visualize_sharding"]


def program(fun: Callable, *args: Any, device: backend.Device | str | None = None, **kwargs: Any) -> Drawing:
    """Draw how ``fun`` runs under ``jit``: its kernels, and the values between them.

    A box is a launch or library call, with its bytes, arithmetic and least time; the longer that is, the darker the
    box. Its tooltip lists the fused operations and the user's lines. Bodies of loops and branches follow below.

    Args:
      fun: a function, under ``jit`` or not.
      args, kwargs: its arguments: arrays, or ``ShapeDtypeStruct``.
      device: the device, or an architecture that need not be present: ``"cuda:sm_90"``; default the arguments' device,
        or the default one.
    Returns:
      a ``Drawing``.
    Raises:
      ArgumentError: ``fun`` is not a function, or ``device`` not a device.
    """
    name, sight, found = _sight(fun, args, kwargs, device, "visualize.program")
    return program_graph.draw(name, sight, machine_of(found.own))


def memory(fun: Callable, *args: Any, device: backend.Device | str | None = None, **kwargs: Any) -> Drawing:
    """Draw the memory plan of ``fun`` under ``jit``: each value over time.

    Args, returns and errors are those of ``program``.
    """
    name, sight, _ = _sight(fun, args, kwargs, device, "visualize.memory")
    return memory_graph.draw(name, sight.schedule.plan)


def _sight(
    fun: Callable, args: tuple, kwargs: dict, device: backend.Device | str | None, caller: str
) -> tuple[str, Sight, backend.Device]:
    check_callable(fun, caller)
    function = fun if isinstance(fun, Jitted) else jit(fun)
    lowered = function.lower(*args, **kwargs)
    found = device_or_default(device or lowered.traced.device, caller)
    return function.name, lowered.sight(found), found


_CELL, _ROW = 34, 44


def pipeline(ranks: int, microbatches: int) -> Drawing:
    """Draw the schedule ``"1f1b"`` of ``pipeline_value_and_grad``.

    A row is a rank, a column a tick. Blue cells are forward passes, orange ones backward passes, with the number of the
    microbatch; what is empty is the bubble.

    Args:
      ranks: the number of stages.
      microbatches: the number of microbatches.
    Returns:
      a ``Drawing``.
    Raises:
      ArgumentError: either is not a positive int.
    """
    for name, value in (("ranks", ranks), ("microbatches", microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise errors.ArgumentError(
                f"visualize.pipeline: {name} is a positive number, not {value!r:.60}.",
                where=source.here(),
                fix="4",
            )
    table = schedule_1f1b(ranks, microbatches)
    cells = [
        c for tick, row in enumerate(table) for rank, pair in enumerate(row) for c in _cells(tick, rank, pair)
    ]
    names = [label(60, 64 + _ROW * r, f"rank {r}", text_anchor="end", fill="#445") for r in range(ranks)]
    busy, all_ = int((table >= 0).sum()), table.size
    title = f"1f1b: {ranks} ranks, {microbatches} microbatches, bubble {1 - busy / all_:.0%}"
    caption = label(16, 22, title, font_weight="bold")
    return Drawing(title, 90 + _CELL * len(table), 48 + _ROW * ranks, "\n".join([caption, *names, *cells]))


def _cells(tick: int, rank: int, pair: Any) -> Iterator[str]:
    """The forward and the backward pass of a rank at a tick, one above the other."""
    for half, (kind, colour) in enumerate((("forward", "#a9c8ec"), ("backward", "#f6c28b"))):
        number = int(pair[half])
        x, y = 72 + _CELL * tick, 40 + _ROW * rank + 20 * half
        box = element("rect", x=x, y=y, width=_CELL - 2, height=18, fill=colour if number >= 0 else "#f3f5f8")
        text = [label(x + _CELL / 2 - 1, y + 13, str(number), text_anchor="middle", font_size=11)] * (
            number >= 0
        )
        about = f"rank {rank}, tick {tick}: " + (
            f"{kind} of microbatch {number}" if number >= 0 else f"no {kind}"
        )
        yield group([box, *text], about, class_="node")
