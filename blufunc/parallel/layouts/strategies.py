"""Candidates of a search: strategies per mesh axis, and changes of layouts.

Parallel, before stage 3, above ``groups.py``. In: groups, lines, and a mesh. Out: layouts. A strategy says two things
of each mesh axis: the lines that it shards wherever they occur, and what else it shards at rest. The batch is data
parallelism; with parameters sharded at rest, FSDP; hidden units and heads are tensor parallelism; tokens, sequence
parallelism. No operation has to be recognized for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from blufunc.parallel.layouts.activations import Boundary, annotations_of
from blufunc.parallel.layouts.groups import Dim, Groups
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.resharding import Axes, Layout

Layouts = tuple[Layout, ...]
"""The layout of each group."""

Streams = tuple[tuple[str, int], ...]
"""Axes that shard the stream between regions, each with the index of a free line."""

STORED = ("", "state", "parameter")
"""Storage along an axis: nothing, optimizer state (ZeRO), parameters too (FSDP)."""

ISLAND = 8
"""Devices with fast links among each other by default: the GPUs of a host."""

_TENSOR = 3
"""Sets of lines for tensor parallelism that are planned."""


class Along(NamedTuple):
    """The strategy of one mesh axis.

    Attributes:
      lines: indices of the lines that it shards.
      stored: one of ``STORED``.
    """

    lines: tuple[int, ...] = ()
    stored: str = ""


Strategy = tuple[Along, ...]
"""One for each axis of the mesh."""


def layouts_of(groups: Groups, mesh: AbstractMesh, strategy: Strategy) -> Layouts:
    """The layouts of a strategy; dimensions that do not divide evenly stay whole."""
    found: list[list[Axes]] = [[()] * g.aval.ndim for g in groups.groups]
    for axis, along in zip(mesh.axis_names, strategy, strict=True):
        for i in along.lines:
            for g, d in groups.lines[i].dims:
                if not _uses(found[g], axis) and _divides(groups, mesh, g, d, (*found[g][d], axis)):
                    found[g][d] += (axis,)
    for axis, along in zip(mesh.axis_names, strategy, strict=True):
        for g, group in enumerate(groups.groups):
            stored = along.stored == "parameter" or (along.stored == "state" and group.role == "state")
            if group.role != "data" and stored and not _uses(found[g], axis):
                d = _roomiest(groups, mesh, g, found[g], axis)
                if d is not None:
                    found[g][d] += (axis,)
    return tuple(map(tuple, found))


def _uses(layout: Sequence[Axes], axis: str) -> bool:
    return any(axis in axes for axes in layout)


def _divides(groups: Groups, mesh: AbstractMesh, g: int, d: int, axes: Axes) -> bool:
    """True if ``axes``, the last of them of several devices, divide a dimension."""
    return (not axes or mesh.shape[axes[-1]] > 1) and groups.groups[g].aval.shape[d] % mesh.size_of(axes) == 0


def _roomiest(groups: Groups, mesh: AbstractMesh, g: int, layout: Sequence[Axes], axis: str) -> int | None:
    """The largest dimension of a matrix that an axis can shard; None for vectors.

    Vectors stay whole: their gathers cost a latency each and save next to no memory. Dimensions that a loop
    steps through would be gathered before the loop.
    """
    aval = groups.groups[g].aval
    free = [d for d in range(aval.ndim) if (g, d) not in groups.stacked]
    if len(free) < 2:
        return None
    fits = [d for d in free if _divides(groups, mesh, g, d, (*layout[d], axis))]
    # a dimension of its own before one that is sharded already
    return max(fits, key=lambda d: (not layout[d], aval.shape[d]), default=None)


def strategies(groups: Groups, mesh: AbstractMesh, alone: bool = True) -> list[Strategy]:
    """The strategies to begin with.

    Outer axes have data parallelism, with each kind of storage; the last one also has the others.

    Args:
      alone: True if this is the only mesh; else data parallelism along all axes is left to a mesh of one axis, and
        alternatives to the changes of the best candidate.
    """
    batch = (0,) if groups.lines and groups.lines[0].of_data else ()
    data = [Along(batch, stored) for stored in (STORED if has_state(groups) else ("", "parameter"))][::-1]
    tensor = [Along(lines) for lines in tensor_lines(groups)]
    sequence = [Along((i,)) for i, k in enumerate(groups.lines) if k.of_data and i not in batch]
    wide = _wide(mesh)
    if not wide:
        return [(Along(),) * len(mesh.axis_names)]
    found: list[Strategy] = []
    if len(wide) == 1:
        others = [*tensor, *sequence] if alone or mesh.size <= ISLAND else []
        found = [(along,) for along in [*data, *others, *([] if batch else [Along()])]]
    else:
        last = [*tensor, *sequence] if alone else tensor[:1]
        for outer in data:
            same = (outer,) * (len(wide) - 1)
            found += [(*same, along) for along in ([outer, *last] if alone or not last else last)]
    among = lambda chosen: tuple(
        chosen[wide.index(n)] if n in wide else Along() for n in range(len(mesh.axis_names))
    )
    return [among(chosen) for chosen in found]


def _wide(mesh: AbstractMesh) -> list[int]:
    """The axes of several devices; there is nothing to choose along the others."""
    return [n for n, size in enumerate(mesh.axis_sizes) if size > 1]


def has_state(groups: Groups) -> bool:
    """True if there is the state of an optimizer."""
    return any(g.role == "state" for g in groups.groups)


def tensor_lines(groups: Groups) -> list[tuple[int, ...]]:
    """Sets of lines of which no two meet in a group, the largest savings first."""
    lines = groups.lines
    usable = [i for i, k in enumerate(lines) if k.saving > 0 and not k.of_data]
    found: dict[tuple[int, ...], None] = {}
    for first in usable:
        chosen = [first]
        for i in usable:
            if i not in chosen and not any(lines[i].meets(lines[j]) for j in chosen):
                chosen.append(i)
        found[tuple(sorted(chosen))] = None
    return list(found)[:_TENSOR]


def tensor_axes(groups: Groups, mesh: AbstractMesh, layouts: Layouts) -> dict[str, tuple[int, ...]]:
    """The lines of parameters that each axis without data shards: tensor parallelism."""
    found = {}
    for axis in mesh.axis_names:
        lines = [
            i
            for i, line in enumerate(groups.lines)
            if any(axis in layouts[g][d] and groups.groups[g].role != "state" for g, d in line.dims)
        ]
        if lines and mesh.shape[axis] > 1 and not any(groups.lines[i].of_data for i in lines):
            found[axis] = tuple(lines)
    return found


def stream_options(groups: Groups, mesh: AbstractMesh, layouts: Layouts) -> list[Streams]:
    """The ways to shard the stream of a layout, besides not to."""
    found: list[Streams] = []
    for axis, lines in tensor_axes(groups, mesh, layouts).items():
        found += [((axis, i),) for i in range(len(groups.regions(lines)[1]))]
    return [streams for streams in found if stream_annotations(groups, mesh, layouts, streams)]


def stream_annotations(
    groups: Groups, mesh: AbstractMesh, layouts: Layouts, streams: Streams
) -> dict[str, PartitionSpec]:
    """The annotations of activations; none if an axis does not divide the stream."""
    tensor = tensor_axes(groups, mesh, layouts)
    axes_of: dict[Any, Axes] = {}
    for axis in mesh.axis_names:
        for i, line in enumerate(groups.lines):
            used = [g for g, d in line.dims if axis in layouts[g][d]]
            roots = groups.roots_of[i]
            if not any(groups.groups[g].role == "data" for g in used):
                roots &= groups.features if used and axis in tensor else frozenset()
            axes_of.update({root: (*axes_of.get(root, ()), axis) for root in roots})
    ends: dict[Any, Boundary] = {}
    along: dict[str, Any] = {}
    for axis, i in streams:
        found, free = groups.regions(tensor[axis])
        ends.update({boundary.eqn: boundary for boundary in found})
        along[axis] = free[i]
    specs = annotations_of(list(ends.values()), mesh, axes_of, along)
    placed = {axis for key, spec in specs.items() for axis in spec.axes}
    return (
        specs
        if placed.issuperset(along) and _divides_streams(list(ends.values()), mesh, axes_of, along)
        else {}
    )


def _divides_streams(
    ends: Sequence[Boundary], mesh: AbstractMesh, axes_of: Any, along: dict[str, Any]
) -> bool:
    """True if each axis divides the stream wherever there is one."""
    return all(
        aval.shape[d] % mesh.size_of((*axes_of.get(root, ()), axis)) == 0
        for axis, root in along.items()
        for aval, roots in ((e.eqn.outvars[0].aval, e.roots) for e in ends if e.rows)
        for d, own in enumerate(roots)
        if own == root
    )


def changes(groups: Groups, mesh: AbstractMesh, strategy: Strategy) -> Iterator[Strategy]:
    """Strategies that differ in the storage or in one line along one axis."""
    choices = [(n, strategy[n]) for n in _wide(mesh)]
    for n, along in choices:
        for stored in STORED:
            if stored != along.stored and (stored != "state" or has_state(groups)):
                yield _with(strategy, n, along._replace(stored=stored))
    for i, line in enumerate(groups.lines):
        if line.saving <= 0 and not line.of_data:
            continue
        for n, along in choices:
            if i in along.lines:
                yield _with(strategy, n, along._replace(lines=tuple(j for j in along.lines if j != i)))
            else:
                apart = tuple(j for j in along.lines if not groups.lines[j].meets(line))
                yield _with(strategy, n, along._replace(lines=tuple(sorted((*apart, i)))))


def translated(strategy: Strategy, before: Groups, after: Groups) -> Strategy:
    """A strategy of one program for another one of the same arguments."""

    def of(groups: Groups, i: int) -> set[Dim]:
        return {(leaf, d) for g, d in groups.lines[i].dims for leaf in groups.groups[g].leaves}

    def line_of(i: int) -> list[int]:
        return [j for j in range(len(after.lines)) if not of(after, j).isdisjoint(of(before, i))]

    return tuple(
        along._replace(lines=tuple(dict.fromkeys(j for i in along.lines for j in line_of(i))))
        for along in strategy
    )


def _with(strategy: Strategy, n: int, along: Along) -> Strategy:
    return (*strategy[:n], along, *strategy[n + 1 :])


def options(groups: Groups, mesh: AbstractMesh, g: int) -> list[tuple[Axes, ...]]:
    """All layouts of a group: each axis along one dimension or none, evenly."""
    ndim = groups.groups[g].aval.ndim
    found = []
    axes_of = [a for a in mesh.axis_names if mesh.shape[a] > 1]
    for places in itertools.product((None, *range(ndim)), repeat=len(axes_of)):
        layout = tuple(tuple(a for a, p in zip(axes_of, places, strict=True) if p == d) for d in range(ndim))
        if all(_divides(groups, mesh, g, d, axes) for d, axes in enumerate(layout)):
            found.append(layout)
    return found


def space(groups: Groups, mesh: AbstractMesh) -> int:
    """The number of all layouts."""
    return math.prod(len(options(groups, mesh, g)) for g in range(len(groups.groups)))


def neighbours(groups: Groups, mesh: AbstractMesh, layouts: Layouts) -> Iterator[Layouts]:
    """Layouts that differ in one group; its state moves too, then stays."""
    order = sorted(range(len(layouts)), key=lambda g: -groups.groups[g].nbytes)
    for g in order:
        tied = [h for h in order if groups.groups[h].owner == g]
        for layout in options(groups, mesh, g):
            if layout == layouts[g]:
                continue
            for moved in ([g, *tied], [g]) if tied else ([g],):
                yield tuple(layout if h in moved else old for h, old in enumerate(layouts))


def label(groups: Groups, mesh: AbstractMesh, layouts: Layouts, streams: Streams = ()) -> str:
    """The kind of each axis: ``FSDP over data, tensor parallel over model``."""
    said: dict[str, list[str]] = {}
    for axis in mesh.axis_names:
        if mesh.shape[axis] > 1:
            word = _word(groups, layouts, axis)
            if axis in dict(streams):
                word = word.replace("tensor parallel", "tensor and sequence parallel")
            said.setdefault(word, []).append(axis)
    if len(mesh.axis_names) == 1 and said:
        return next(iter(said))
    return ", ".join(f"{word} over {' and '.join(axes)}" for word, axes in said.items()) or "one device"


def _word(groups: Groups, layouts: Layouts, axis: str) -> str:
    dims = [(g, d) for g, layout in enumerate(layouts) for d, axes in enumerate(layout) if axis in axes]
    of = lambda role: sum(groups.groups[g].nbytes for g, _ in dims if groups.groups[g].role == role)
    whole = sum(g.nbytes for g in groups.groups if g.role == "parameter")
    batch = set(groups.lines[0].dims) if groups.lines and groups.lines[0].of_data else set()
    rows = any(at in batch for at in dims)
    tokens = any(groups.groups[g].role == "data" and (g, d) not in batch for g, d in dims)
    params, state = of("parameter"), of("state")
    if rows:
        return (
            "data parallel"
            if not params and not state
            else "ZeRO"
            if not params
            else "FSDP"
            if 2 * params > whole
            else "partial FSDP"
        )
    words = ["sequence parallel"] * tokens + ["tensor parallel"] * (params > 0)
    return " and ".join(words) or ("sharded state" if state else "replicated")
