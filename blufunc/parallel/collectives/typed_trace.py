"""Tracing of ``shard_map`` bodies: each equation is typed as it is staged.

Parallel, stage 1, on ``axis_types``. In: a function of shards, and the types of its arguments over the mesh axes. Out:
a jaxpr with casts and typed collectives. What a loop, a branch or a call traces by itself is typed when it is finished,
unless it needs types meanwhile: then it is traced here, too (``typed_body``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Atom, Jaxpr, Literal, eval_jaxpr
from blufunc.core.ir.local_avals import LocalArray
from blufunc.core.ir.trace import Body, Tracer, new_trace
from blufunc.core.programs.stage import StagedTracer, StageTrace
from blufunc.parallel.collectives.axis_casts import Types, invariant
from blufunc.parallel.collectives.axis_types import Typer
from blufunc.parallel.collectives.named import cast_to_p
from blufunc.parallel.collectives.primitives import COTANGENT
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.transforms.autodiff.jvp import JVPTracer
from blufunc.transforms.batching.batch import BatchTracer


class TypedTrace(StageTrace):
    """A staging trace that types each equation; its tracers have types.

    Args:
      mesh: the axes.
      floor: types that outer values are joined with; of a body that ranks choose to run, those of the predicate.
    """

    __slots__ = ("floor", "mesh", "typer")

    def __init__(self, mesh: AbstractMesh, name: str = "shard_map", floor: Types | None = None):
        super().__init__(name)
        self.mesh, self.floor = mesh, floor
        self.typer = Typer(mesh)
        self.eqns = self.typer.eqns

    def typed_parameter(self, aval, types: Types, label: str | None = None) -> StagedTracer:
        """Add a parameter with the given types to the jaxpr."""
        tracer = self.parameter(aval, label)
        self.typer.types[tracer.variable] = types
        return tracer

    def type_of(self, x):
        return LocalArray(x.aval, self.mesh.axis_names, self.typer.types[x.variable])

    def sharding_of(self, x):
        axes = self.type_of(x).manual_axis_type
        spec = PartitionSpec(*[None] * x.aval.ndim, unreduced=axes.unreduced, reduced=axes.reduced)
        return NamedSharding(self.mesh, spec)

    def tracer_of(self, atom: Atom) -> Any:
        """The value that an atom of this trace represents."""
        if atom.__class__ is Literal:
            return atom.array  # type: ignore[union-attr]
        return StagedTracer(self, atom, source.current())  # type: ignore[arg-type]

    def process(self, prim, args, params):
        out = super().process(prim, args, params)
        self.typer.step(self.eqns.pop())
        return out

    def atom(self, x):
        found = super().atom(x)
        if found.__class__ is not Literal and found not in self.typer.types:
            self.typer.types[found] = self.known(x)
        return found

    def is_zero(self, x: Any) -> bool:
        """True if a value is known to be zero on all ranks."""
        return self.typer.is_zero(self.atom(x))

    def typed(self, fun: Callable, primals: Sequence[Any]) -> Callable:
        """Type and cast ``fun``, to be differentiated at ``primals`` under this trace."""
        types = [self.known(p) for p in primals]
        jaxpr, _ = self._staged(Body(fun, [p.aval for p in primals], primals, self.name), types, self.floor)
        return lambda *xs: eval_jaxpr(jaxpr, xs)

    def typed_cotangent(self, ct, primal):
        required = [COTANGENT[t] for t in self.known(primal)]
        for to in "VU":
            pairs = zip(self.mesh.axis_names, self.known(ct), required, strict=True)
            if axes := [a for a, have, want in pairs if have != want == to]:
                ct = cast_to_p.bind(ct, **self.typer.over(axes), to=to)
        return ct

    def known(self, x: Any) -> Types:
        """The types of a value; one from outside of the ``shard_map`` is invariant."""
        staged = _staged_in(x)
        types = types_of(x, self.mesh) or invariant(self.mesh)
        if self.floor is None or (staged is not None and staged.trace is self):
            return types
        return self.typer.among_ways(types, self.floor)

    def typed_body(self, body):
        """As ``Trace.typed_body``; types of a carry are found by iteration."""
        floor = outer = self.floor or invariant(self.mesh)
        if body.chosen_by is not None and not callable(body.chosen_by):
            floor = self.typer.among_ways(self.known(lift(body.chosen_by)), outer)
        n, carry = body.n_carry, [self.known(x) for x in body.values]
        zeros = [
            self.is_zero(x) if isinstance(x, StagedTracer) and x.trace is self else False
            for x in body.values[:n]
        ]
        while True:
            if callable(body.chosen_by):
                _, (verdict,) = self._staged(body._replace(fun=body.chosen_by), carry, floor)
                floor = self.typer.among_ways(verdict, outer)
            ins = [self.typer.among_ways(t, floor) for t in carry]
            jaxpr, outs = self._staged(body, ins, floor, zeros)
            joined = [*map(self.typer.joined, ins[:n], outs), *ins[n:]]
            if joined == carry and not any(zeros):
                return jaxpr
            if joined == carry:
                zeros = []  # they only helped to infer the types, which hold for the carry of every step
            carry = joined

    def _staged(
        self, body: Body, types: Sequence[Types], floor: Types | None = None, zeros: Sequence[bool] = ()
    ) -> tuple[Jaxpr, list[Types]]:
        """Trace a function for the types of its parameters; the types of its results.

        Args:
          floor: what outer values are joined with.
          zeros: which parameters are known to be zero.
        """
        trace = TypedTrace(self.mesh, body.name, floor)
        with new_trace(trace):
            labels: Sequence[Any] = body.labels or [None] * len(body.avals)
            ins = [trace.typed_parameter(*p) for p in zip(body.avals, types, labels, strict=True)]
            trace.typer.zeros.update(x.variable for x, z in zip(ins, zeros, strict=False) if z)
            jaxpr = trace.finish(body.fun(*ins), body.name, body.labels or ())
        return jaxpr, [trace.typer.type_of(v) for v in jaxpr.outvars]


def types_of(x: Any, mesh: AbstractMesh) -> Types | None:
    """Types of a value in a ``shard_map`` body; None for a value from outside."""
    staged = _staged_in(x)
    if staged is None or not isinstance(staged.trace, TypedTrace):
        return None
    return staged.trace.typer.types[staged.variable]


def _staged_in(x: Any) -> StagedTracer | None:
    """The value of a program below the tracers of other transforms, or None."""
    while isinstance(x, Tracer):
        if isinstance(x, StagedTracer):
            return x
        if isinstance(x, JVPTracer):
            x = x.primal
        elif isinstance(x, BatchTracer):
            x = x.value
        else:
            return None
    return None
