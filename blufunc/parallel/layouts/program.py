"""A step with undecided layouts: traced once, planned for each candidate.

Parallel, stages 1 to 7, above ``reports/plan.py``. In: a function, its arguments and options. Out: a ``Program``, whose
``plan`` returns the forecast of a layout: a spec per group of leaves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.jaxpr import Jaxpr, subjaxprs
from blufunc.core.programs.simplify import simplify
from blufunc.core.pytree import paths, tree
from blufunc.parallel.layouts.activations import keys_in, with_annotations
from blufunc.parallel.layouts.groups import Groups
from blufunc.parallel.layouts.strategies import Layouts, Streams, stream_annotations
from blufunc.parallel.mesh.links import LinkSpec
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding, replicated
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.resharding import Layout
from blufunc.parallel.reports.collectives import partitioned
from blufunc.parallel.reports.hardware import DeviceSpec
from blufunc.parallel.reports.plan import Forecast, forecast, planning_device
from blufunc.transforms.arguments import ShapeDtypeStruct, abstract
from blufunc.transforms.staging.jit import Jitted, jit


class Program:
    """A step with one set of options, in which layouts of arguments are open.

    Args:
      step: the function, under ``jit`` or not.
      args: arrays or shapes; their placements are ignored.
      options: keyword arguments of the step.

    Attributes:
      options: these.
      fun: the function with them.
      donate: the positions of donated arguments.
      budget: the step's own ``memory_budget`` in bytes, or None.
      in_tree, out_tree: the structures of arguments and of results.
      groups: what is decided.
      size: the number of equations, bodies included.
    """

    def __init__(self, step: Callable, args: tuple, options: Mapping[str, Any]):
        self.options = dict(options)
        self._step, self._args = step, args
        self._parts: dict[int, Program] = {}
        own = step.fun if isinstance(step, Jitted) else step
        self.fun = functools.update_wrapper(functools.partial(own, **options), own) if options else own
        self.donate = tuple(sorted(step.donate_nums)) if isinstance(step, Jitted) else ()
        self.budget = step.budget if isinstance(step, Jitted) else None
        self._lowered = jit(self.fun, donate_argnums=self.donate, memory_budget=self.budget).lower(*args)
        self._whole = simplify(planning_device().backend.chosen(self._lowered.jaxpr))
        self._annotated: dict[Any, Jaxpr] = {}
        self._annotations: dict[Any, dict[str, PartitionSpec]] = {}
        self.in_tree, self.out_tree = tree.structure(args), self._lowered.traced.entry.out_tree
        self.groups = Groups(self.fun, args, self._whole, self.out_tree, self._lowered.traced.donated)
        self.size = _equations(self._whole)

    def plan(
        self,
        mesh: AbstractMesh,
        layouts: Layouts,
        device: DeviceSpec,
        links: Mapping[str, LinkSpec],
        budget: int | None = None,
        streams: Streams = (),
    ) -> Forecast:
        """The forecast of layouts; within a budget in bytes, if there is one.

        Raises:
          MemoryBudgetError: no plan meets the budget.
        """
        leaves = self.shardings(mesh, layouts)
        whole = self._with(self.annotations(mesh, layouts, streams))
        ins = [replicated(mesh)] * (len(whole.invars) - len(leaves)) + leaves
        local = partitioned(self._lowered, whole, mesh, ins, self.results(leaves))
        return forecast(local if budget is None else local._replace(budget=budget), device, links)

    def annotations(self, mesh: AbstractMesh, layouts: Layouts, streams: Streams) -> dict[str, PartitionSpec]:
        """The specs of activations if axes shard the stream between their regions."""
        if not streams:
            return {}
        key = mesh, layouts, streams
        if key not in self._annotations:
            known = keys_in(self._lowered.traced.jaxpr)
            found = stream_annotations(self.groups, mesh, layouts, streams)
            self._annotations[key] = {k: spec for k, spec in found.items() if k in known}
        return self._annotations[key]

    def _with(self, specs: Mapping[str, PartitionSpec]) -> Jaxpr:
        """The program with annotations."""
        if not specs:
            return self._whole
        key = tuple(specs.items())
        if key not in self._annotated:
            jaxpr = with_annotations(self._lowered.traced.jaxpr, specs)
            self._annotated[key] = simplify(planning_device().backend.chosen(simplify(jaxpr)))
        return self._annotated[key]

    def microbatch(self, n: int) -> Program:
        """The step on one of ``n`` equal parts of the batch.

        Raises:
          BlufuncError: the step cannot be traced with it.
        """
        if n not in self._parts:
            batch = {
                leaf: d
                for g, d in self.groups.lines[0].dims
                if self.groups.groups[g].role == "data"
                for leaf in self.groups.groups[g].leaves
            }
            leaves = tree.leaves(self._args)
            for i, d in batch.items():
                x = leaves[i]
                shape = (*x.shape[:d], x.shape[d] // n, *x.shape[d + 1 :])
                leaves[i] = ShapeDtypeStruct(shape, x.dtype, weak_type=abstract(x).weak_type)
            self._parts[n] = Program(self._step, tree.unflatten(self.in_tree, leaves), self.options)
        return self._parts[n]

    def shardings(self, mesh: Any, layouts: Layouts) -> list[NamedSharding]:
        """The sharding of each argument leaf."""
        found: dict[int, NamedSharding] = {}
        for group, layout in zip(self.groups.groups, layouts, strict=True):
            sharding = NamedSharding(mesh, spec_of(layout))
            found.update(dict.fromkeys(group.leaves, sharding))
        return [found[i] for i in range(len(found))]

    def results(self, leaves: Sequence[Any]) -> list[Any]:
        """The entry of the argument leaf that each result replaces, else None."""
        return [None if i is None else leaves[i] for i in self.groups.carried]

    def argument_bytes(self, mesh: AbstractMesh, layouts: Layouts) -> int:
        """The bytes of the arguments on one device, a lower bound of its peak."""
        return sum(
            len(g.leaves) * g.aval.nbytes // math.prod(mesh.size_of(axes) for axes in layout)
            for g, layout in zip(self.groups.groups, layouts, strict=True)
        )


def spec_of(layout: Layout) -> PartitionSpec:
    """The spec of a layout, without trailing entries that say nothing."""
    entries = [axes or None for axes in layout]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def checked_arguments(args: tuple) -> tuple:
    """The arguments as shapes without placements.

    Raises:
      ArgumentError: one of them is not an array.
    """

    def shape(path: Any, x: Any) -> Any:
        if isinstance(x, (bool, int, float, complex)):
            return x
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise errors.ArgumentError(
                f"search: the argument args{paths.keystr(path)} is {x!r:.60}, not an array.",
                where=source.here(),
                why="layouts are those of arrays.",
                fix="bf.ShapeDtypeStruct(shape, dtype); bind other arguments: functools.partial(step, mode='train'), "
                "or search them: choices={'mode': (...)}",
            )
        aval = abstract(x)
        if aval.memory != DEVICE:
            raise errors.ArgumentError(
                f"search: the argument args{paths.keystr(path)} is in the memory of the host.",
                where=source.here(),
                why="layouts of offloaded arguments are not searched.",
                fix="search with it on the device, and offload it afterwards",
            )
        return ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    return paths.map_with_path(shape, args)


def _equations(jaxpr: Jaxpr) -> int:
    return sum(1 + sum(map(_equations, subjaxprs(e.params))) for e in jaxpr.eqns)
