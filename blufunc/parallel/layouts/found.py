"""The layouts that a search found: tables, specs, and code to keep.

Parallel, the end of a search. In: planned candidates. Out: ``FoundLayouts``, best first, which prints as a table; for
each layout the step compiled with it, or the text of a program that says the same.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blufunc.core.pytree import tree
from blufunc.kernels.tables import duration, size, table
from blufunc.parallel.layouts.activations import annotated
from blufunc.parallel.layouts.program import Program, spec_of
from blufunc.parallel.layouts.stages import FoundPipeline
from blufunc.parallel.layouts.strategies import Layouts, Strategy, Streams, label, tensor_axes
from blufunc.parallel.mesh.links import LinkSpec
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.reports.plan import Forecast
from blufunc.transforms.arguments import name_of, signature_of
from blufunc.transforms.staging.jit import jit

_SHOWN = 10
"""Rows of the printed table."""

_PIPELINES = 5
"""Pipelines of it."""

_OWN = {"arguments", "functools", "re", "bf", "P", "mesh", "specs", "activations", "shardings", "in_shardings",
        "out_shardings", "compiled"}  # fmt: skip
"""The names of the written program."""


@dataclasses.dataclass(frozen=True, eq=False)
class FoundLayout:
    """A layout with its prediction; ``print`` it.

    Attributes:
      mesh: the mesh.
      links: the links of its axes.
      forecast: the plan: memory, collectives and times of a device, as of ``bf.plan``.
      memory: the limit in bytes on the peak of a device, or None.
      memory_budget: the budget in bytes that the plan is within, to be passed to ``jit``; None: none is needed.
    """

    program: Program = dataclasses.field(repr=False)
    mesh: AbstractMesh | Mesh
    layouts: Layouts = dataclasses.field(repr=False)
    strategy: Strategy | None = dataclasses.field(repr=False)
    forecast: Forecast = dataclasses.field(repr=False)
    links: Mapping[str, LinkSpec] = dataclasses.field(repr=False)
    memory: float | None
    memory_budget: int | None = None
    streams: Streams = dataclasses.field(default=(), repr=False)

    @functools.cached_property
    def label(self) -> str:
        """The kind of each mesh axis: ``FSDP over data, tensor parallel over model``."""
        return label(self.program.groups, self.mesh.abstract, self.layouts, self.streams)

    @property
    def activations(self) -> Mapping[str, PartitionSpec]:
        """The specs of activations by source line, for ``annotated``."""
        return self.program.annotations(self.mesh.abstract, self.layouts, self.streams)

    @property
    def lines(self) -> str:
        """The lines that tensor and sequence parallelism shard, by a parameter on each."""
        groups = self.program.groups
        batch = set(groups.lines[0].dims) if groups.lines and groups.lines[0].of_data else set()
        axes = {
            a
            for g, layout in enumerate(self.layouts)
            for d, own in enumerate(layout)
            if (g, d) in batch
            for a in own
        }
        others = {
            (g, d)
            for g, layout in enumerate(self.layouts)
            for d, own in enumerate(layout)
            if not axes.issuperset(own)
        }
        names = [k.name for k in groups.lines if others.intersection(k.dims)]
        tensor = tensor_axes(groups, self.mesh.abstract, self.layouts)
        for axis, i in self.streams:
            ends, free = groups.regions(tensor[axis])
            d = next(e.roots.index(free[i]) for e in ends if e.rows and free[i] in e.roots)
            names.append(f"activations[{d}]")
        return ", ".join(names)

    @property
    def options(self) -> Mapping[str, Any]:
        """The chosen keyword arguments of the step."""
        return self.program.options

    @property
    def seconds(self) -> float:
        """The predicted time of a call: ``forecast.scheduled_seconds``."""
        found = self.forecast.scheduled_seconds
        assert found is not None  # a search has both figures
        return found

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a device in bytes."""
        return self.forecast.peak_bytes

    @property
    def fits(self) -> bool:
        """True if the peak is within the limit."""
        return self.memory is None or self.peak_bytes <= self.memory

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which a device waits for collectives."""
        return max(0.0, self.seconds - (self.forecast.compute_seconds or 0.0))

    @property
    def rank(self) -> tuple:
        """The order of layouts: those that fit by time, then the others by memory."""
        return (not self.fits, self.seconds if self.fits else self.peak_bytes, self.peak_bytes)

    @functools.cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """The spec of each path that is sharded, ``*`` for indices."""
        found = {}
        for group, layout in zip(self.program.groups.groups, self.layouts, strict=True):
            if any(layout):
                found.update(dict.fromkeys(group.name.split(", "), spec_of(layout)))
        return found

    @property
    def in_specs(self) -> tuple:
        """The specs of the arguments, as a tree like them."""
        return self._tree(self.mesh, lambda s: s.spec)[0]

    @property
    def out_specs(self) -> Any:
        """The specs of the results, as a tree like them; None where propagation decides."""
        return self._tree(self.mesh, lambda s: s.spec)[1]

    @property
    def in_shardings(self) -> tuple:
        """The shardings of the arguments, for ``jit`` and ``device_put``."""
        return self._tree(self.mesh, lambda s: s)[0]

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results; None where propagation decides."""
        return self._tree(self.mesh, lambda s: s)[1]

    def jit(self, mesh: Mesh | AbstractMesh | None = None) -> Any:
        """The step compiled with this layout.

        Args:
          mesh: a mesh of the same axes; default that of the search.
        Returns:
          ``jit`` of the step with the chosen options, the shardings, and the donations of the step; within
          ``memory_budget``, or the budget of the step if that is None.
        """
        ins, outs = self._tree(self.mesh if mesh is None else mesh, lambda s: s)
        return jit(
            annotated(self.program.fun, self.activations) if self.activations else self.program.fun,
            in_shardings=ins,
            out_shardings=outs,
            donate_argnums=self.program.donate,
            memory_budget=self._budget,
        )

    @property
    def _budget(self) -> int | None:
        """The budget of the compiled step: that of the plan, or else its own."""
        return self.program.budget if self.memory_budget is None else self.memory_budget

    def _tree(self, mesh: Any, of: Any) -> tuple[tuple, Any]:
        leaves = [of(s) for s in self.program.shardings(mesh, self.layouts)]
        ins = tree.unflatten(self.program.in_tree, leaves)
        return ins, tree.unflatten(self.program.out_tree, self.program.results(leaves))

    def code(self) -> str:
        """The layout as the text of a program, to read and to keep.

        It expects the step under its name, or as ``step`` if it has none that can be written; its arguments under the
        names of its parameters, those of ``*args`` as ``args0`` and so on; and so what is bound to it, unless that is
        written as a literal.
        """
        # an argument without leaves has no name of its own
        names = iter(self.program.groups.heads)
        heads = [next(names) if child.num_leaves else "None" for child in self.program.in_tree.children()]
        parts = [h if h == "None" else f'shardings("{h}", arguments[{i}])' for i, h in enumerate(heads)]
        options = [f"donate_argnums={self.program.donate}"] if self.program.donate else []
        options += [f"memory_budget={self._budget}"] if self._budget is not None else []
        step, binds = _step_code(self.program.fun)
        # ahead of all names that the program makes, which may be those of parameters, or of the step
        taken = [f"arguments = {_tuple_code(heads)}"]
        if step in _OWN:
            taken, step = [f"step, arguments = {step}, {_tuple_code(heads)}"], "step"
        activations = self.activations
        if activations:
            step = f"bf.parallel.annotated({step}, activations)"
        shardings = ["in_shardings=in_shardings", "out_shardings=out_shardings"]
        return "\n".join(
            [
                *taken,
                "",
                *(["import functools"] if binds else []),
                "import re",
                "",
                "import blufunc as bf",
                "from blufunc import P",
                "",
                f"mesh = bf.make_mesh({self.mesh.axis_sizes}, {self.mesh.axis_names})",
                "specs = {",
                *(f"    {json.dumps(path)}: {spec}," for path, spec in self.specs.items()),
                "}  # * is an index; what is not here is replicated",
                *(["activations = {  # or bf.constrain(value, spec) on these lines"] if activations else []),
                *(f"    {json.dumps(key)}: {spec}," for key, spec in activations.items()),
                *(["}"] if activations else []),
                "",
                "",
                "def shardings(name, argument):",
                "    def of(path, x):",
                '        keys = bf.tree.keystr(path, simple=True, separator=".")',
                '        where = f"{name}.{keys}" if keys else name',
                '        found = specs.get(where) or specs.get(re.sub(r"\\.\\d+(?=\\.|$)", ".*", where))',
                "        return bf.NamedSharding(mesh, found or P())",
                "",
                "    return bf.tree.map_with_path(of, argument)",
                "",
                "",
                f"in_shardings = {_tuple_code(parts)}",
                f"out_shardings = {self._results_code(self.program.out_tree, 0)}",
                "compiled = bf.jit(",
                *(f"    {part}," for part in (step, *shardings, *options)),
                ")",
            ]
        )

    def _results_code(self, node: tree.TreeDef, at: int) -> str:
        """The code of the shardings of results from leaf ``at``, a tree like ``node``."""
        carried, n = self.program.groups.carried[at : at + node.num_leaves], node.num_leaves
        start = 0
        for i, child in enumerate(self.program.in_tree.children()):
            if n and child == node and carried == list(range(start, start + n)):
                return f"in_shardings[{i}]"
            start += child.num_leaves
        if all(i is None for i in carried):
            return "None"
        parts = []
        for child in node.children():
            parts.append(self._results_code(child, at))
            at += child.num_leaves
        kind, data = node.node_data()  # type: ignore[misc]
        if kind is dict:
            return "{" + ", ".join(f"{k!r}: {p}" for k, p in zip(data, parts, strict=True)) + "}"
        if kind is list:
            return f"[{', '.join(parts)}]"
        return f"{'' if kind is tuple else kind.__name__}({', '.join(parts)}{',' * (len(parts) == 1)})"

    def __str__(self) -> str:
        rows = [(path, str(spec)) for path, spec in (*self.specs.items(), *self.activations.items())]
        said = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        head = f"{self.label} on {self.mesh.size:,} devices ({self.mesh})" + (
            f", with {said}" if said else ""
        )
        head += f", within memory_budget={self.memory_budget}" if self.memory_budget is not None else ""
        figures = (
            f"{duration(self.seconds)} a call, {duration(self.exposed_seconds)} of it waiting for collectives; "
            f"{size(self.peak_bytes)} on each device"
        )
        return "\n".join(
            [
                head,
                figures,
                table(("argument" + " or value" * bool(self.activations), "spec"), rows)
                if rows
                else "all arguments are replicated",
            ]
        )


def _tuple_code(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _step_code(fun: Any) -> tuple[str, bool]:
    """The code of a step, and whether it binds arguments."""
    args: tuple = ()
    keywords: dict[str, Any] = {}
    while isinstance(fun, functools.partial):
        args, keywords = (*fun.args, *args), {**fun.keywords, **keywords}
        fun = fun.func
    name = name_of(fun) if hasattr(fun, "__name__") else "step"  # an object has only the name of its class
    name = name if name.isidentifier() and not keyword.iskeyword(name) else "step"
    if not args and not keywords:
        return name, False
    signature = signature_of(fun)
    names = list(signature.parameters) if signature else []
    names += [f"bound{i}" for i in range(len(names), len(args))]
    positional = [_value_code(n, v) for n, v in zip(names, args, strict=False)]
    by_name = [f"{k}={_value_code(k, v)}" for k, v in keywords.items()]
    return f"functools.partial({', '.join([name, *positional, *by_name])})", True


def _value_code(name: str, value: Any) -> str:
    """A literal of a bound value, or the name of its parameter."""
    text = repr(value)
    try:
        found = ast.literal_eval(text)
        return text if type(found) is type(value) and found == value else name
    except (ValueError, SyntaxError):
        return name


class FoundLayouts(Sequence):
    """The layouts that a search planned, best first; ``print`` it for a table.

    The attributes and methods of the best one are found here too: ``found.jit()``.

    Attributes:
      rows: all layouts.
      search_seconds: how long the search took.
      skipped: the number of layouts that were not planned, since their arguments alone do not fit.
      failed: the number of layouts that could not be partitioned, and the first reason; None if there are none.
      pipelines: the pipelines of a step whose layers are a loop, best first. They change the program, so they are no
        layouts: ``pipelines[0].code()`` says how to write one.
      why_no_pipelines: the reason if none could be planned of such a step; else empty.
    """

    def __init__(
        self,
        rows: Sequence[FoundLayout],
        search_seconds: float,
        skipped: int,
        failed: tuple[int, str] | None,
        pipelines: Sequence[FoundPipeline] = (),
        why_no_pipelines: str = "",
    ):
        self.rows = tuple(sorted(rows, key=lambda r: r.rank))
        self.search_seconds, self.skipped, self.failed = search_seconds, skipped, failed
        self.pipelines = tuple(sorted(pipelines, key=lambda p: p.rank))
        self.why_no_pipelines = why_no_pipelines

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.rows[0], name)

    @property
    def best(self) -> FoundLayout:
        """The layout that fits with the least predicted time."""
        return self.rows[0]

    @property
    def kinds(self) -> list[FoundLayout]:
        """The best layout of each kind: label, lines, mesh and options."""
        found: dict[Any, FoundLayout] = {}
        for row in self.rows:
            found.setdefault((row.label, row.lines, str(row.mesh), str(row.options)), row)
        return list(found.values())

    def __str__(self) -> str:
        return "\n".join([str(self.best), "", *self._lines()])

    def _lines(self) -> Iterator[str]:
        shown = self.kinds[:_SHOWN]
        many = len({str(r.mesh) for r in self.rows}) > 1
        asked = any(r.options for r in self.rows)
        head = [
            "layout",
            "sharded",
            *["mesh"] * many,
            *["options"] * asked,
            "a call",
            "computes",
            "waits",
            "memory",
            "than the best",
        ]
        rows = [
            [
                row.label + " (recomputing)" * (row.memory_budget is not None),
                row.lines,
                *[str(row.mesh)] * many,
                *[", ".join(f"{k}={v!r}" for k, v in row.options.items())] * asked,
                duration(row.seconds),
                duration(row.forecast.compute_seconds or 0.0),
                duration(row.exposed_seconds),
                size(row.peak_bytes),
                self._reason(row),
            ]
            for row in shown
        ]
        yield table(head, rows, ("a call", "computes", "waits", "memory"))
        more = f"; {self.skipped} more not, whose arguments alone do not fit" if self.skipped else ""
        yield f"{len(self)} layouts planned{more}"
        if self.failed is not None:
            yield f"{self.failed[0]} layouts could not be partitioned: {self.failed[1]}"
        if self.pipelines:
            head = ["pipeline", "mesh", "a call", "bubble", "sends", "memory", "than the best layout"]
            best = self.best.seconds
            yield ""
            yield table(head, [p.row(best) for p in self.pipelines[:_PIPELINES]], head[2:6])
            yield f"{len(self.pipelines)} pipelines; .pipelines[0].code() writes the first"
        elif self.why_no_pipelines:
            yield f"no pipeline: {self.why_no_pipelines}"

    def _reason(self, row: FoundLayout) -> str:
        """Why a layout is not the best one."""
        best = self.best
        if row is best:
            return ""
        if not row.fits:
            assert row.memory is not None
            return f"does not fit in {size(row.memory)}"
        slower = row.seconds / best.seconds - 1 if best.seconds else 0.0
        waits = row.exposed_seconds - best.exposed_seconds
        computes = (row.forecast.compute_seconds or 0.0) - (best.forecast.compute_seconds or 0.0)
        if slower < 5e-4:
            return f"as fast, {size(row.peak_bytes - best.peak_bytes)} more memory"
        cause = (
            f"waits {duration(waits)} more" if waits >= computes else f"computes {duration(computes)} more"
        )
        return f"{slower:.1%} slower: {cause}"
