"""Pictures: a program as a graph, its memory over time, a sharding, a pipeline.

Face. In: a function and its arguments, or a sharding. Out: a ``Drawing``, which notebooks show: ``svg``, ``html`` (a
page to zoom and search) and ``save(path)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.core.arrays import backend
from blufunc.kernels.inspect import memory_graph, program_graph
from blufunc.kernels.inspect.drawing import Drawing, element, group, label, legend
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.inspect.roofline import machine_of
from blufunc.parallel.recipes.pipelines.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    PipelineCosts,
    Schedule,
    pipeline_schedule,
)
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


_UNIT, _ROW, _LEFT, _TOP = 28, 26, 72, 56

_COLOURS = {
    FORWARD: ("forward", ("#a9c8ec", "#7fa8d9")),
    BACKWARD: ("backward", ("#f6c28b", "#e59f56")),
    INPUT: ("backward, of the input", ("#f6c28b", "#e59f56")),
    WEIGHT: ("backward, of the weights", ("#b5d9a8", "#8fbf7f")),
}
"""Names and colours of the operations; the second colour is of later chunks."""


def pipeline(
    ranks: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    costs: PipelineCosts = PipelineCosts(),
) -> Drawing:
    """Draw a schedule of ``pipeline_value_and_grad``.

    A row is a rank, and time goes to the right. Cells are passes, with the number of the microbatch. Those of all
    chunks but the first are darker, and what is empty is the bubble.

    Args:
      ranks, microbatches, schedule, chunks: as for ``parallel.pipeline_schedule``.
      costs: the times of the passes; default 1 each.
    Returns:
      a ``Drawing``.
    Raises:
      ArgumentError, ValueRangeError: as ``parallel.pipeline_schedule``.
    """
    table = pipeline_schedule(schedule, ranks, microbatches, chunks)
    lengths = table.lengths(costs)
    unit = _UNIT * 3 / costs.total
    starts = np.concatenate([[0.0], np.cumsum(lengths)]) * unit + _LEFT
    cells = [
        _cell(table, p, r, starts[p], starts[p + 1] - starts[p])
        for p in range(len(lengths))
        for r in range(ranks)
    ]
    names = [
        label(_LEFT - 10, _TOP + _ROW * r + 15, f"rank {r}", text_anchor="end", fill="#445")
        for r in range(ranks)
    ]
    of_chunks = f", {chunks} chunks" * (chunks > 1)
    bubble = f"bubble {table.bubble(costs):.1%}"
    title = f"{schedule}: {ranks} ranks, {microbatches} microbatches{of_chunks}, {bubble}"
    caption = label(16, 22, title, font_weight="bold")
    found = {k: v for k, v in _COLOURS.items() if (table.ops == k).any()}
    key = legend({what: colours[0] for what, colours in found.values()}, _LEFT, 46)
    width, height = max(float(starts[-1]) + 16, 560.0), _TOP + _ROW * ranks + 12
    return Drawing(title, width, height, "\n".join([caption, *key, *names, *cells]))


def _cell(table: Schedule, phase: int, rank: int, x: float, width: float) -> str:
    """The operation of a rank in a phase."""
    op, chunk, number = (int(a[phase, rank]) for a in (table.ops, table.chunk, table.microbatch))
    y, when = _TOP + _ROW * rank, f"rank {rank}, tick {table.ticks[phase]}"
    shape: dict[str, Any] = {"x": float(x), "y": y, "width": float(width) - 1, "height": _ROW - 4}
    if op not in _COLOURS:
        return group([element("rect", **shape, fill="#f3f5f8")], f"{when}: nothing", class_="node")
    what, colours = _COLOURS[op]
    of_chunk = f", chunk {chunk}" * (table.chunks > 1)
    parts = [
        element("rect", **shape, fill=colours[chunk > 0]),
        label(
            float(x + width / 2 - 0.5),
            y + 15,
            str(number),
            text_anchor="middle",
            font_size=9 if width < 20 else 11,
        ),
    ]
    return group(parts, f"{when}: {what} of microbatch {number}{of_chunk}", class_="node")
