"""Search of pipelines: numbers of stages and of microbatches.

Parallel, above ``stages.py``, the end of a search. In: the layouts that were planned. Out: ``FoundPipeline``s. An axis
of the mesh becomes that of stages; given a number of devices, a part of the axis of data does. The other axes keep the
strategy of the best layouts. For each number of stages a microbatch is planned, and all schedules follow from its
tables; more numbers of microbatches are planned for the best number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from blufunc import errors
from blufunc.parallel.layouts.found import FoundLayout
from blufunc.parallel.layouts.groups import Groups
from blufunc.parallel.layouts.program import Program
from blufunc.parallel.layouts.stages import FoundPipeline, loop_length, passes, pipelines
from blufunc.parallel.layouts.strategies import (
    Strategy,
    Streams,
    has_state,
    layouts_of,
    stream_options,
    translated,
)
from blufunc.parallel.mesh.links import LinkSpec
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.reports.hardware import DeviceSpec

STAGE = "stage"

_PER_STAGE = (4, 1, 2, 8)
"""Microbatches per stage, in the order in which they are planned.

The first is planned for each number of stages.
"""

_KEPT = 4
"""Layouts whose strategies are planned within stages.

They are the best, the fastest of any memory, and the best of other meshes.
"""


class Place(NamedTuple):
    """A mesh with an axis of stages, and the mesh of each stage."""

    mesh: AbstractMesh
    axis: str
    inner: AbstractMesh
    links: Mapping[str, LinkSpec]
    program: Program
    strategy: Strategy
    streams: Streams

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.mesh.shape[self.axis]


def _whole_parameters(strategy: Strategy, groups: Groups) -> Strategy:
    """A strategy with ZeRO in place of FSDP, if there is a state.

    FSDP would gather parameters for each microbatch.
    """
    stored = "state" if has_state(groups) else ""
    return tuple(a._replace(stored=stored) if a.stored == "parameter" else a for a in strategy)


class Stages:
    """The pipelines of a search.

    Args:
      rows: the layouts that were planned.
      numbered: True if the search has a number of devices instead of a mesh.
      left: the number of plans that may be made.

    Attributes:
      found: the pipelines.
      reason: why there are none, if a step has a loop over layers.
    """

    def __init__(
        self,
        rows: Sequence[FoundLayout],
        numbered: bool,
        device: DeviceSpec,
        memory: float | None,
        left: int,
    ):
        self.rows, self.numbered, self.device, self.memory, self.left = rows, numbered, device, memory, left
        self.found: list[FoundPipeline] = []
        self.reason = ""

    def run(self) -> None:
        """Plan one number of microbatches for all stages, then others for the best."""
        places = [(place, list(self._microbatches(place))) for place in self._places()]
        for place, counts in places:
            for count in counts[:1]:
                self._plan(place, count)
        best = [p.mesh for p in sorted(self.found, key=lambda p: p.rank)]
        for place, counts in sorted(
            places, key=lambda p: best.index(p[0].mesh) if p[0].mesh in best else len(best)
        ):
            for count in counts[1:]:
                self._plan(place, count)

    def _places(self) -> Iterator[Place]:
        """The meshes with stages, those of the best layouts first."""
        rows = [r for r in self.rows if r.memory_budget is None and r.strategy is not None]
        meshes = {r.mesh: r for r in sorted(rows, key=lambda r: r.rank, reverse=True)}  # the best of each
        best = sorted(meshes.values(), key=lambda r: r.rank)
        several = [*best[:1], *sorted(rows, key=lambda r: r.seconds)[:1], *best[1:]][:_KEPT]
        seen = set()
        for row in several:
            layers = loop_length(row.program.groups)
            if layers is None or row.strategy is None:
                continue
            strategy = _whole_parameters(row.strategy, row.program.groups)
            for mesh, axis, inner in self._meshes(row.mesh.abstract, layers):
                streams = tuple(s for s in row.streams if inner.shape[s[0]] > 1)
                layouts = layouts_of(row.program.groups, inner, strategy)
                if (key := (mesh, axis, layouts, streams, row.program)) not in seen:
                    seen.add(key)
                    given = row.links
                    links = {**given, STAGE: given[mesh.axis_names[1]]} if self.numbered else given
                    yield Place(mesh, axis, inner, links, row.program, strategy, streams)

    def _meshes(self, mesh: AbstractMesh, layers: int) -> Iterator[tuple[AbstractMesh, str, AbstractMesh]]:
        """Meshes of which an axis of stages divides the layers, and those of a stage."""
        names, sizes = mesh.axis_names, mesh.axis_sizes
        if self.numbered:
            for n in range(2, min(layers, sizes[0]) + 1):
                if layers % n == 0 and sizes[0] % n == 0:
                    inner = AbstractMesh((sizes[0] // n, *sizes[1:]), names)
                    yield AbstractMesh((n, *inner.axis_sizes), (STAGE, *names)), STAGE, inner
            return
        for i, (name, n) in enumerate(zip(names, sizes, strict=True)):
            if n > 1 and layers % n == 0:
                yield mesh, name, AbstractMesh((*sizes[:i], 1, *sizes[i + 1 :]), names)

    def _microbatches(self, place: Place) -> Iterator[int]:
        """Numbers of microbatches that divide the rows of a replica."""
        groups = place.program.groups
        layouts = layouts_of(groups, place.inner, place.strategy)
        rows = min(
            groups.groups[g].aval.shape[d] // place.inner.size_of(layouts[g][d])
            for g, d in groups.lines[0].dims
            if groups.groups[g].role == "data"
        )
        for k in _PER_STAGE:
            if rows % (k * place.stages) == 0:
                yield k * place.stages

    def _plan(self, place: Place, count: int) -> None:
        """Plan a microbatch, and all schedules of it."""
        if self.left <= 0:
            return
        self.left -= 1
        whole = place.program
        layouts = layouts_of(whole.groups, place.inner, place.strategy)
        try:
            part = whole.microbatch(count)
            strategy = translated(place.strategy, whole.groups, part.groups)
            own = layouts_of(part.groups, place.inner, strategy)
            has = place.streams in stream_options(part.groups, place.inner, own)
            streams = place.streams if has else ()
            forecast = part.plan(place.inner, own, self.device, place.links, streams=streams)
        except errors.BlufuncError as error:
            self.reason = self.reason or error.what
            return
        layers = loop_length(whole.groups)
        assert layers is not None
        found = passes(part, place.inner, own, forecast, layers)
        if found is None:
            self.reason = self.reason or (
                "the step has no loops over its layers, forward and backward, outside of other loops"
            )
            return
        self.found += pipelines(
            whole, place.mesh, place.axis, place.inner, layouts, streams, found, forecast, count, place.links,
            self.memory,
        )  # fmt: skip
