"""The function of a ``shard_map``: traced on shards under manual axes.

Parallel, stage 1, below ``shard_map.py``. In: a function of shards, their types over the mesh axes, and the specs of
its results. Out: the local jaxpr with casts, or, inside of another ``shard_map``, equations of that one's body: what
enters is sliced, and what leaves is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import Body, UntypedError, new_trace, state
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.parallel.collectives import typed_rules  # noqa: F401  (adds the types of custom derivatives)
from blufunc.parallel.collectives.primitives import (
    keep_first_p,
    mesh_all_gather_p,
    pcast_p,
    psum_invariant_p,
    shard_slice_p,
)
from blufunc.parallel.collectives.shard_map_equation import types_of_spec
from blufunc.parallel.collectives.typed_trace import TypedTrace
from blufunc.parallel.mesh.mesh import AxisSizes, ManualMesh, manual_mesh
from blufunc.parallel.mesh.spec import PartitionSpec, names_of
from blufunc.parallel.mesh.spec_trees import broadcast, check_rank
from blufunc.transforms.arguments import FlatFunction, name_of
from blufunc.transforms.batching.batch import MeshAxis


class Function:
    """A function of shards, traced under the manual axes ``names``.

    Attributes:
      specs: of its flat results, once it ran.
    """

    def __init__(
        self,
        flat: FlatFunction,
        mesh: AxisSizes,
        names: frozenset[str],
        out_specs: Any,
        labels: Sequence[str],
        check_vma: bool,
    ):
        self.flat, self.mesh, self.names = flat, mesh, names
        self.out_specs, self.labels, self.check_vma = out_specs, labels, check_vma
        self.name = name_of(flat.fun)
        self.specs: list[PartitionSpec] = []

    def trace(self, avals: Sequence[ShapedArray], specs: Sequence[PartitionSpec]) -> Jaxpr:
        """The local jaxpr, with casts."""
        trace = TypedTrace(self.mesh.abstract)
        line, scopes = source.replay.line, source.open_scopes(())
        source.replay.line = None
        try:
            with new_trace(trace):
                ins = [
                    trace.typed_parameter(aval, types_of_spec(spec, self.mesh), label)
                    for aval, spec, label in zip(avals, specs, self.labels, strict=True)
                ]
                return trace.finish(self.run(trace, ins), self.name, self.labels)
        finally:
            source.replay.line = line
            source.open_scopes(scopes)

    def run(self, trace: TypedTrace, ins: Sequence[Any]) -> list[Any]:
        """The results on shards, of the types that their specs claim."""
        mesh, context = self.mesh, state.context
        around = manual_mesh()
        manual = self.names | (around.axes if around is not None else frozenset())
        named = [MeshAxis(a, n) for a, n in mesh.shape.items() if a in self.names]
        state.context = (*context, *named, ManualMesh(mesh, manual))
        try:
            outs = self.flat(*ins)
            skeleton = tree.unflatten(self.flat.out_tree, [0] * self.flat.out_tree.num_leaves)
            self.specs = broadcast_specs(self.out_specs, skeleton, self.flat.fun, "out_specs")
            paths = treepath.leaf_paths(self.flat.out_tree)
            for i, (x, spec) in enumerate(zip(outs, self.specs, strict=True)):
                check_manual(spec, self.names, mesh, self.flat.fun, "out_specs")
                what = f"the result{paths[i]} of {self.name}"
                outs[i] = self._claimed(trace, x, spec, what)
            return outs
        finally:
            state.context = context

    def _claimed(self, trace: TypedTrace, x: Any, spec: PartitionSpec, what: str) -> Any:
        """A result cast to the types that its spec claims."""
        mesh = self.mesh
        check_rank(mesh, spec, x.aval.ndim, lambda: f"shard_map: the spec of {what}")
        atom = trace.atom(x)
        have = trace.typer.type_of(atom)
        letters = zip(mesh.axis_names, have, types_of_spec(spec, mesh), strict=True)
        required = tuple(w if a in self.names else h for a, h, w in letters)
        for axis, h, w in zip(mesh.axis_names, have, required, strict=True):
            if h == "V" and w == "I" and not self.check_vma:
                atom = trace.typer.convert(atom, [axis], "V", "I")
            elif (h, w) in (("V", "I"), ("V", "R")):
                raise errors.ShardingError(
                    f"shard_map: {what} varies over {axis!r}, and its spec {spec} does not say so.",
                    where=source.here(),
                    why="the ranks along that axis may have different values, of which only one would be kept.",
                    fix=f"lax.psum or lax.pmean over {axis!r}, or a spec that shards a dimension along it",
                )
            elif h == "U" and w != "U":
                raise errors.ShardingError(
                    f"shard_map: {what} is unreduced over {axis!r}, and its spec {spec} does not say so.",
                    where=source.here(),
                    fix=f"lax.psum(x, {axis!r}), or P(..., unreduced={{{axis!r}}})",
                )
            elif w == "U" and h == "V":
                raise errors.ShardingError(
                    f"shard_map: {what} varies over {axis!r}, and its spec {spec} says that it is unreduced.",
                    where=source.here(),
                    fix=f"lax.pcast(x, {axis!r}, to='unreduced'), if its value is the sum over the ranks",
                )
        return trace.tracer_of(trace.typer.cast(atom, required))


def nested(body: Function, values: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
    """Run a ``shard_map`` inside of another.

    Over its axes, all ranks of the outer one hold the same values.

    Arguments are sliced at the index of the rank, and results are gathered, so it needs no equation of its own.
    """

    def run(*xs):
        trace: Any = state.trace  # a TypedTrace
        ins = [_entered(x, s, body.mesh) for x, s in zip(xs, specs, strict=True)]
        outs = body.run(trace, ins)
        return [_left(x, s, body.mesh) for x, s in zip(outs, body.specs, strict=True)]

    avals = [v.aval for v in values]
    jaxpr = state.trace.typed_body(Body(run, avals, values, body.name, body.labels))
    if jaxpr is None:  # in a loop, a branch or a call, which is traced again with types
        raise UntypedError(
            f"shard_map of {body.name} in a function that is traced by itself, inside of another shard_map.",
            where=source.here(),
            why="the types of its arguments over the axes of the mesh are not known.",
            fix="call it outside of that function",
        )
    return eval_jaxpr(jaxpr, values)


def _entered(x: Any, spec: PartitionSpec, mesh: AxisSizes) -> Any:
    """The shard of a value that is the same on all ranks."""
    for dim, entry in enumerate(spec.for_rank(x.aval.ndim)):
        if entry is not None:
            x = shard_slice_p.bind(x, **_over(names_of(entry), mesh), src="I", dst="V", dim=dim)
    for axis in (*spec.unreduced, *spec.reduced):
        prim, dst = (keep_first_p, "U") if axis in spec.unreduced else (pcast_p, "R")
        x = prim.bind(x, **_over((axis,), mesh), src="I", dst=dst)
    return x


def _left(x: Any, spec: PartitionSpec, mesh: AxisSizes) -> Any:
    """The value of shards, on all ranks: the inverse of ``_entered``."""
    for axis in (*spec.unreduced, *spec.reduced):
        prim, src = (psum_invariant_p, "U") if axis in spec.unreduced else (pcast_p, "R")
        x = prim.bind(x, **_over((axis,), mesh), src=src, dst="I")
    for dim, entry in enumerate(spec.for_rank(x.aval.ndim)):
        if entry is not None:
            x = mesh_all_gather_p.bind(x, **_over(names_of(entry), mesh), src="V", dst="I", dim=dim)
    return x


def _over(axes: Sequence[str], mesh: AxisSizes) -> dict[str, Any]:
    return {"axes": tuple(axes), "sizes": tuple(mesh.shape[a] for a in axes)}


def broadcast_specs(specs: Any, whole: Any, fun: Callable, name: str) -> list[PartitionSpec]:
    """Specs with one entry per leaf."""
    found = broadcast(specs, whole, f"shard_map of {name_of(fun)}: {name}", "P() for replicated values")
    for s in found:
        if not isinstance(s, PartitionSpec):
            raise errors.ArgumentError(
                f"shard_map of {name_of(fun)}: {name} holds partition specs, not {s!r:.60}.",
                where=source.here(),
                fix="P('x'), or P() for replicated values",
            )
    return found


def check_manual(
    spec: PartitionSpec, names: frozenset[str], mesh: AxisSizes, fun: Callable, which: str
) -> None:
    """Raise ShardingError if a spec names an axis that is not manual."""
    for axis in (*spec.axes, *spec.unreduced, *spec.reduced):
        if axis in mesh.shape and axis not in names:
            raise errors.ShardingError(
                f"shard_map of {name_of(fun)}: {which} hold {spec}, and {axis!r} is not among its axis_names.",
                where=source.here(),
                why="over other axes the function sees the whole, which the compiler shards.",
                fix=f"leave {axis!r} out of the spec, or name it in axis_names",
            )
