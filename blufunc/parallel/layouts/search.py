"""``search``: shardings of a plain function's arguments, by planning candidates.

Parallel, before stage 3, above ``reports``. In: a function, shapes, a mesh or a number of devices, and hardware
figures. Out: ``FoundLayouts``. All strategies are planned; the best ones are then changed line by line, and group by
group, as long as the prediction improves. Small spaces are enumerated. The number of plans is bounded, not the time,
so a search finds the same everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.kernels.backends.cuda.device_model import (
    BANDWIDTH,
    COLLECTIVE_SECONDS,
    H200,
    LINK_BANDWIDTH,
    MATMUL,
)
from blufunc.kernels.tables import size
from blufunc.parallel.layouts.found import FoundLayout, FoundLayouts
from blufunc.parallel.layouts.program import Program, checked_arguments
from blufunc.parallel.layouts.stage_search import Stages
from blufunc.parallel.layouts.strategies import (
    ISLAND,
    Along,
    Layouts,
    Strategy,
    Streams,
    changes,
    layouts_of,
    neighbours,
    options,
    space,
    strategies,
    stream_options,
    translated,
)
from blufunc.parallel.mesh.links import LinkSpec, links_by_axis
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.reports.hardware import DeviceSpec
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.jit import Jitted
from blufunc.transforms.staging.memory_sizes import budget_in_bytes

DEVICE = DeviceSpec(flops=MATMUL, bandwidth=BANDWIDTH, elementwise_flops=H200.flops)
"""Rates that matmuls and kernels attain on an H200, in 16 bits."""

LINK = LinkSpec(LINK_BANDWIDTH, COLLECTIVE_SECONDS / 6)
"""The links of GPUs of one host."""
# the latency is that of an all-reduce of four GPUs, which has six steps

_WORK, _FEWEST, _MOST = 16_000, 16, 160
"""Number of equations in all plans of a search; the least and the most plans."""

_KEPT = 3
"""Candidates that are planned with other choices of the step, or in a budget."""

_PIPELINES = 16
"""The most plans for pipelines, at most a quarter of those of layouts."""

_DOUBLINGS = 6
"""Doublings of the devices that are planned if nothing fits."""


def search(
    step: Callable,
    *args: Any,
    mesh: AbstractMesh | Mesh | int,
    memory: int | str | None = None,
    device: DeviceSpec | None = None,
    links: LinkSpec | Mapping[Any, LinkSpec] | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    plans: int | None = None,
) -> FoundLayouts:
    """Find shardings of the arguments and results of ``step``.

    ``step`` is written for one device. Candidates are data parallelism, FSDP, ZeRO, tensor and sequence parallelism and
    their combinations over the mesh axes, found from the dimensions that operations tie together; each is planned as by
    ``bf.plan``, and ranked by ``Forecast.scheduled_seconds`` among those that fit. Nothing runs, and the time of a
    search does not depend on the size of the mesh. Results that have the structure and types of an argument, such as
    new parameters, get its layout. Between tensor-parallel regions activations may be sharded too, by annotations that
    ``code()`` writes. If the layers are a loop, ``pipelines`` has the best schedules, with a program text.

    Args:
      step: a function, under ``jit`` or not. ``donate_argnums`` of its ``jit`` count in the plans.
      args: arrays or ``ShapeDtypeStruct``, of global shapes; their placements are ignored.
      mesh: a mesh, abstract or not, of ``Auto`` axes; or a number of devices, for which meshes ``("data",)`` and
        ``("data", "model")`` are tried.
      memory: the limit on the planned peak of each device: bytes, or a string like ``"80GB"``; default that of
        ``device``. If nothing fits, layouts are planned within it as ``jit(memory_budget=)``.
      device: figures of a device; default an H200 in 16 bits, without a limit of memory.
      links: figures of the links: one for all, or by mesh axis; with a number of devices, by the number of devices that
        they connect: ``{8: fast, 4096: slow}``. Default the links between GPUs of one host.
      choices: values of keyword arguments of ``step`` to choose from, such as ``{"recompute": (False, True)}``.
      plans: the maximum number of planned layouts; default by the number of equations, 16 to 160.
    Returns:
      ``FoundLayouts``, best first: a table if printed, with ``in_shardings``, ``jit()`` and ``code()``.
    Raises:
      ArgumentError: an argument of ``step`` is not an array, or one of ``search`` something else.
      ShardingError: ``links`` do not fit the mesh, or an axis is ``Explicit``.
      MemoryBudgetError: nothing fits; the message says what would.
    """
    start = time.perf_counter()
    check_callable(step, "search")
    limit = _limit(memory, device)
    device = DEVICE if device is None else device
    _check(mesh, device, step, choices, plans)
    args = checked_arguments(args)
    places = _places(mesh, LINK if links is None else links)
    programs = [Program(step, args, dict(zip(choices or (), values, strict=True)))
                for values in itertools.product(*(choices or {}).values())]  # fmt: skip
    work = sum(p.size for p in programs) / len(programs)
    most = min(_MOST, max(_FEWEST, int(_WORK / max(work, 1)))) if plans is None else plans
    found = _Search(programs, places, device, limit, most)
    found.run()
    rows = [row for row in found.known.values() if row is not None]
    stages = Stages(rows, isinstance(mesh, int), device, limit, min(_PIPELINES, most // 4))
    stages.run()
    seconds = time.perf_counter() - start
    return FoundLayouts(rows, seconds, found.skipped, found.failed, stages.found, stages.reason)


class _Search:
    """One search.

    Attributes:
      programs: the step with each combination of choices.
      places: meshes with the links of their axes.
      memory: the limit in bytes, or None.
      left: plans that may still be made.
      known: by program, mesh and layouts, what was planned; None: not, or in vain.
      skipped, failed: as of ``FoundLayouts``.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        places: Sequence[tuple[Any, Mapping[str, LinkSpec]]],
        device: DeviceSpec,
        memory: int | None,
        most: int,
    ):
        self.programs, self.places, self.device, self.memory = programs, places, device, memory
        self.left = most
        self.known: dict[Any, FoundLayout | None] = {}
        self.skipped = 0
        self.failed: tuple[int, str] | None = None
        self._error: errors.BlufuncError | None = None

    def run(self) -> None:
        mesh = self.places[0][0]
        if len(self.places) == 1 and sum(space(p.groups, mesh) for p in self.programs) <= self.left:
            for program in self.programs:
                groups = program.groups
                for layouts in itertools.product(
                    *(options(groups, mesh, g) for g in range(len(groups.groups)))
                ):
                    self.plan(program, 0, layouts)
            self._spread(len(self.known))
        else:
            self._strategies()
            self._spread(_KEPT)
            self._change()
            self._spread(1)
            self._refine()
        if not self._rows() and self._error is not None:
            raise self._error
        if not any(row.fits for row in self._rows()):
            self._recompute()
        if not any(row.fits for row in self._rows()):
            raise self._nothing()

    def plan(
        self,
        program: Program,
        place: int,
        layouts: Layouts,
        strategy: Strategy | None = None,
        force: bool = False,
        streams: Streams = (),
    ) -> FoundLayout | None:
        """The plan of a candidate; None if it cannot fit, or if no plans are left.

        Args:
          force: plan it even if its arguments do not fit.
        """
        key = program, place, layouts, streams
        if key in self.known and not (force and self.known[key] is None):
            return self.known[key]
        mesh, links = self.places[place]
        if not force and self.memory is not None:
            if program.argument_bytes(mesh.abstract, layouts) > self.memory:
                self.skipped += 1
                self.known[key] = None
                return None
        if self.left <= 0:
            return None
        self.left -= 1
        try:
            forecast = program.plan(mesh.abstract, layouts, self.device, links, streams=streams)
        except errors.ShardingError as error:
            self._error = self._error or error
            self.failed = ((self.failed or (0, ""))[0] + 1, (self.failed or (0, error.what))[1])
            self.known[key] = None
            return None
        found = FoundLayout(program, mesh, layouts, strategy, forecast, links, self.memory, streams=streams)
        self.known[key] = found
        return found

    def _rows(self) -> list[FoundLayout]:
        return sorted((r for r in self.known.values() if r is not None), key=lambda r: r.rank)

    def _place(self, row: FoundLayout) -> int:
        return next(i for i, (mesh, _) in enumerate(self.places) if mesh is row.mesh)

    def _strategies(self) -> None:
        """Plan all strategies on all meshes, then the best ones with the other choices."""
        first = self.programs[0]
        by_mesh = [
            [(n, s) for s in strategies(first.groups, mesh.abstract, len(self.places) == 1)]
            for n, (mesh, _) in enumerate(self.places)
        ]
        for turn in itertools.zip_longest(*by_mesh):
            for n, strategy in filter(None, turn):
                self._of_strategy(first, n, strategy)
        if not self._rows():  # no axis divides the batch: begin with whole arguments
            for n, (mesh, _) in enumerate(self.places):
                self._of_strategy(first, n, (Along(),) * len(mesh.axis_names))
        for row in self._rows()[:1]:  # the others on the best mesh
            for strategy in strategies(first.groups, row.mesh.abstract):
                self._of_strategy(first, self._place(row), strategy)
        for row in self._rows()[:_KEPT]:
            for program in self.programs[1:]:
                if row.strategy is not None:
                    strategy = translated(row.strategy, row.program.groups, program.groups)
                    self._of_strategy(program, self._place(row), strategy)

    def _of_strategy(
        self, program: Program, place: int, strategy: Strategy, streams: Streams = ()
    ) -> FoundLayout | None:
        """The plan of a strategy; None also if an axis cannot divide one of its lines."""
        mesh = self.places[place][0].abstract
        layouts = layouts_of(program.groups, mesh, strategy)
        for axis, along in zip(mesh.axis_names, strategy, strict=True):
            for i in along.lines:
                if not any(axis in layouts[g][d] for g, d in program.groups.lines[i].dims):
                    return None
        if streams not in stream_options(program.groups, mesh, layouts):
            streams = ()  # that of another layout
        return self.plan(program, place, layouts, strategy, streams=streams)

    def _spread(self, kept: int) -> None:
        """Shard the stream between tensor-parallel regions.

        Args:
          kept: the number of the best candidates, and of the fastest ones, for which that is planned.
        """
        rows = [r for r in self._rows() if not r.streams]
        options_of = lambda r: stream_options(r.program.groups, r.mesh.abstract, r.layouts)
        fastest = sorted(rows, key=lambda r: r.seconds)
        for several in (rows, fastest):  # with a sharded stream, less memory is needed
            with_options = (r for r in several if options_of(r))
            for row in itertools.islice(with_options, kept):
                for streams in options_of(row):
                    self.plan(row.program, self._place(row), row.layouts, row.strategy, streams=streams)

    def _change(self) -> None:
        """Change the best strategy by a line, or by storage, while that improves it."""
        tried: set[int] = set()
        while rows := [r for r in self._rows()[:1] if id(r) not in tried and r.strategy is not None]:
            tried.add(id(rows[0]))
            for strategy in changes(rows[0].program.groups, rows[0].mesh.abstract, rows[0].strategy):  # type: ignore[arg-type]
                self._of_strategy(rows[0].program, self._place(rows[0]), strategy, rows[0].streams)

    def _refine(self) -> None:
        """Change the layout of one group of the best candidate, while that improves it."""
        tried: set[int] = set()
        while rows := [r for r in self._rows()[:1] if id(r) not in tried]:
            row = rows[0]
            tried.add(id(row))
            for layouts in neighbours(row.program.groups, row.mesh.abstract, row.layouts):
                better = self._near(row, layouts)
                if better is not None and better.rank < row.rank:
                    break

    def _near(self, row: FoundLayout, layouts: Layouts) -> FoundLayout | None:
        """The plan of other layouts with the stream of a row, if these have one."""
        has = row.streams in stream_options(row.program.groups, row.mesh.abstract, layouts)
        return self.plan(row.program, self._place(row), layouts, streams=row.streams if has else ())

    def _recompute(self) -> None:
        """Plan the smallest candidates, and the fastest, within the limit."""
        assert self.memory is not None
        rows = self._rows()
        for row in dict.fromkeys([*rows[:_KEPT], *sorted(rows, key=lambda r: r.seconds)[:1]]):
            links = self.places[self._place(row)][1]
            # bodies of loops need memory beyond the planned peak
            budget = self.memory - row.forecast.body_bytes
            try:
                forecast = row.program.plan(
                    row.mesh.abstract, row.layouts, self.device, links, budget, row.streams
                )
            except errors.MemoryBudgetError:
                continue
            key = row.program, self._place(row), row.layouts, row.streams, budget
            self.known[key] = dataclasses.replace(row, forecast=forecast, memory_budget=budget)

    def _nothing(self) -> errors.BlufuncError:
        """The error that nothing fits, with what would."""
        assert self.memory is not None
        rows = self._rows()
        if not rows:  # the arguments of all candidates are too large
            rows = [self._smallest()]
        row = min(rows, key=lambda r: r.peak_bytes)
        fixes = [f"memory={row.peak_bytes}"]
        if (enough := self._more_devices(row)) is not None:
            fixes.append(f"{enough[0]:,} devices, of which each needs {size(enough[1])}")
        if not any(p.options for p in self.programs):
            fixes.append(
                "a step that recomputes its layers (bf.checkpoint), or has microbatches, as one of `choices`"
            )
        if not row.program.donate and any(i is not None for i in row.program.groups.carried):
            fixes.append("jit(step, donate_argnums=...), so that results take the memory of arguments")
        tried = "with recomputation too; " if any(len(key) > 4 for key in self.known) else ""
        return errors.MemoryBudgetError(
            f"search: no layout of {row.forecast.name} fits memory={size(self.memory)} on {row.mesh.size:,} devices.",
            where=source.here(),
            why=f"the smallest peak that was found is {size(row.peak_bytes)} a device ({tried}{row.label}), "
            f"{size(row.forecast.argument_bytes)} of it arguments.",
            fix="; ".join(fixes),
        )

    def _smallest(self) -> FoundLayout:
        """The candidate with the fewest bytes of arguments, although it does not fit."""
        program = self.programs[0]
        pairs = [
            (n, s, layouts_of(program.groups, mesh.abstract, s))
            for n, (mesh, _) in enumerate(self.places)
            for s in strategies(program.groups, mesh.abstract)
        ]
        n, strategy, layouts = min(
            pairs, key=lambda p: program.argument_bytes(self.places[p[0]][0].abstract, p[2])
        )
        self.left = max(self.left, 1)
        found = self.plan(program, n, layouts, strategy, force=True)
        if found is None:
            assert self._error is not None
            raise self._error
        return found

    def _more_devices(self, row: FoundLayout) -> tuple[int, int] | None:
        """A number of devices at which a strategy fits, and the peak there."""
        links, mesh = self.places[self._place(row)][1], row.mesh.abstract
        n = next((n for n, size in enumerate(mesh.axis_sizes) if size > 1), None)
        strategy = row.strategy if n is not None else None
        for _ in range(_DOUBLINGS):
            sizes = list(mesh.axis_sizes)
            sizes[n or 0] *= 2
            mesh = AbstractMesh(sizes, mesh.axis_names)
            # of a layout without a strategy: FSDP, which needs the least memory
            strategy = strategy or strategies(row.program.groups, mesh)[0]
            layouts = layouts_of(row.program.groups, mesh, strategy)
            try:
                peak = row.program.plan(mesh, layouts, self.device, links).peak_bytes
            except errors.ShardingError:  # the step has a shard_map over the searched mesh
                return None
            if peak <= self.memory:  # type: ignore[operator]
                return mesh.size, peak
        return None


def _limit(memory: Any, device: DeviceSpec | None) -> int | None:
    if memory is not None:
        return budget_in_bytes(memory, "search: memory")
    if device is not None and isinstance(device, DeviceSpec) and device.memory is not None:
        return int(device.memory)
    return None


def _places(mesh: Any, links: Any) -> list[tuple[Any, Mapping[str, LinkSpec]]]:
    """The meshes to search, with the links of their axes."""
    if not isinstance(mesh, int):
        return [(mesh, links_by_axis(links, mesh.axis_names))]
    if not isinstance(links, (LinkSpec, Mapping)):
        raise errors.ArgumentError(
            f"search: links is a LinkSpec, or several by the number of devices that they connect, not {links!r:.60}.",
            where=source.here(),
            fix="links=bf.LinkSpec(400e9, 2e-6)",
        )
    islands = {mesh: links} if isinstance(links, LinkSpec) else dict(links)
    if not all(isinstance(n, int) and isinstance(k, LinkSpec) for n, k in islands.items()) or (
        max(islands, default=0) < mesh
    ):
        raise errors.ShardingError(
            f"search: links of {mesh} devices are LinkSpecs by the number of devices that they connect, not "
            f"{links!r:.60}.",
            where=source.here(),
            fix=f"links={{8: bf.LinkSpec(400e9, 2e-6), {mesh}: bf.LinkSpec(50e9, 5e-6)}}",
        )
    slowest = lambda n: islands[min(k for k in islands if k >= n)]
    found: list[tuple[Any, Mapping[str, LinkSpec]]] = [
        (AbstractMesh((mesh,), ("data",)), {"data": slowest(mesh)})
    ]
    inside = min((n for n in islands if n < mesh), default=min(ISLAND, mesh // 2))
    for inner in (n for n in range(2, inside + 1) if math.gcd(n, inside) == n and mesh % n == 0):
        both = {"data": slowest(mesh), "model": slowest(inner)}
        found.append((AbstractMesh((mesh // inner, inner), ("data", "model")), both))
    return found


def _check(mesh: Any, device: Any, step: Any, choices: Any, plans: Any) -> None:
    def wrong(what: str, fix: str, kind: Any = errors.ArgumentError) -> None:
        raise kind(f"search: {what}.", where=source.here(), fix=fix)

    if isinstance(mesh, bool) or not isinstance(mesh, (int, Mesh, AbstractMesh)):
        wrong(
            f"mesh is a mesh or a number of devices, not {mesh!r:.60}",
            "mesh=bf.AbstractMesh((512, 8), ('data', 'model')), or mesh=4096",
        )
    if isinstance(mesh, int) and mesh < 1:
        wrong(f"mesh is {mesh} devices", "a positive number")
    if not isinstance(mesh, int) and mesh.explicit:
        wrong(
            f"the axes {', '.join(sorted(mesh.explicit))} are Explicit",
            "a mesh of Auto axes: along Explicit ones the program itself decides",
            errors.ShardingError,
        )
    if not isinstance(device, DeviceSpec):
        wrong(
            f"device is a DeviceSpec, not {device!r:.60}",
            "device=bf.DeviceSpec(flops=800e12, bandwidth=3e12)",
        )
    if isinstance(step, Jitted) and (step.static_nums or step.static_names):
        wrong(
            f"{step.name} has static arguments",
            "bind them with functools.partial(step, mode='train'), or search them: choices={'mode': ('train',)}",
        )
    if choices is not None and not (
        isinstance(choices, Mapping) and all(isinstance(v, (tuple, list)) and v for v in choices.values())
    ):
        wrong(
            f"choices are sequences of values by names of parameters, not {choices!r:.60}",
            "choices={'recompute': (False, True)}",
        )
    if plans is not None and (isinstance(plans, bool) or not isinstance(plans, int) or plans < 1):
        wrong(f"plans is {plans!r:.60}", "a positive integer, or None")
