"""Shardings along explicit axes during a trace: ``typeof(x).sharding``.

Parallel, stage 1, on ``explicit.py``. In: a trace, and the values that its parameters stand for. Out: the types of its
values. Nothing is computed unless the function asks; then the pass of explicit axes runs over the equations so far,
each once. A function that asked is traced for the shardings of its arguments, as for their shapes (``jit``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.memories import Space, kind_of
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray, Unsharded
from blufunc.core.ir.explicit_avals import ExplicitArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var, subjaxprs
from blufunc.core.ir.trace import Array, type_of
from blufunc.core.programs.stage import StagedTracer, StageTrace
from blufunc.parallel.mesh.axis_regions import along_explicit, region
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh, current_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.explicit import Explicit, Known, given, joined_with
from blufunc.parallel.partition.propagate import divisible, has_rule
from blufunc.parallel.partition.resharding import layout_of


class ExplicitTypes:
    """The types of a trace whose function asked; see ``stage.TraceTypes``."""

    def __init__(self, values: Sequence[Any], avals: Sequence[ShapedArray]):
        self._values, self._avals = values, avals
        self._known: list[Known | None] = []
        self._layouts: _Layouts | None = None

    def type_of(self, trace: StageTrace, x: StagedTracer) -> ShapedArray:
        """The type of a value of the trace, with its sharding."""
        layouts = self._of(trace)
        return x.aval if layouts is None else layouts.type_of(x)

    def settled(self, trace: StageTrace, outs: Sequence[Atom]) -> ExplicitTypes | None:
        """The types for a second trace of a body that shards its carry ``outs`` further.

        None if it does not.
        """
        layouts = self._layouts
        if layouts is None:
            return None
        ins = [layouts.known(v) for v in trace.invars]
        carry = [joined_with(a, layouts.known(b)) for a, b in zip(ins, outs, strict=False)]
        further = [
            a if b is None else b for a, b in zip(ins, carry, strict=False)
        ]  # the compiler reports conflicts
        if further == ins[: len(further)]:
            return None
        joined = ExplicitTypes(self._values, self._avals)
        joined._known = [*further, *ins[len(further) :]]
        return joined

    def _of(self, trace: StageTrace) -> _Layouts | None:
        """The layouts of the trace; None while no mesh with explicit axes is known."""
        if self._layouts is None:
            shardings = [sharding_of(v) for v in self._values]
            mesh = _mesh_in_force(trace, shardings)
            if mesh is None:
                return None
            pairs = zip(shardings, self._avals, strict=True)
            known = self._known or [_known(s, aval, mesh) for s, aval in pairs]
            self._layouts = _Layouts(trace, mesh, known)
        return self._layouts


class _Layouts:
    """The known layouts of the values of a trace, up to its last equation."""

    def __init__(self, trace: StageTrace, mesh: AbstractMesh, known: Sequence[Known | None]):
        self.trace, self.mesh = trace, mesh
        self._known: dict[Var, Known] = {
            v: k for v, k in zip(trace.invars, known, strict=True) if k is not None
        }
        self._done = 0

    def type_of(self, x: StagedTracer) -> ShapedArray:
        known, here = self.known(x.variable), region()
        mesh = self.mesh if here is None else here.mesh
        axes = [tuple(a for a in along if a in mesh.explicit) for along in known.layout]
        if here is not None and not mesh.explicit:
            return ExplicitArray(x.aval, NamedSharding(mesh, PartitionSpec(*[None] * x.aval.ndim)))
        return along_explicit(x.aval, NamedSharding(mesh, PartitionSpec(*axes)))

    def known(self, atom: Atom) -> Known:
        """The known layout of a value; of one from outside, that of its type."""
        eqns = self.trace.eqns
        for eqn in eqns[self._done :]:
            self._step(eqn)
        self._done = len(eqns)
        return self._of(atom)

    def _of(self, atom: Atom) -> Known:
        found = self._known.get(atom)  # type: ignore[arg-type]
        if found is None:
            value = self.trace.constants.get(atom)  # type: ignore[arg-type]
            found = None if value is None else _known(sharding_of(value), atom.aval, self.mesh)
            found = found or Known(((),) * atom.aval.ndim, neutral=True)
            if isinstance(atom, Var):
                self._known[atom] = found
        return found

    def _step(self, eqn: Eqn) -> None:
        """Run the pass on one equation."""
        operands = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
        alone = Jaxpr(operands, [eqn], list(eqn.outvars), [], [], eqn.prim.name)
        if not has_rule(eqn.prim) or any(True for _ in subjaxprs(eqn.params)):
            alone = divisible(alone)  # ten times the work of the pass on one operation
        results = Explicit(alone, [self._of(v) for v in operands], self.mesh).results
        self._known.update(zip(eqn.outvars, results, strict=True))


def placed(aval: ShapedArray, sharding: Any, memory_space: Any) -> ShapedArray:
    """The type of the constructor of ``ShapedArray``; either may be None.

    Raises:
      ArgumentError: the sharding is no ``NamedSharding``.
      ValueRangeError: there is no such memory.
    """
    if memory_space is not None:
        kind = memory_space.value if isinstance(memory_space, Space) else memory_space
        aval = aval.in_memory(kind_of(kind, "ShapedArray"))
    if sharding is None or isinstance(sharding, Unsharded):
        return aval
    if not isinstance(sharding, NamedSharding):
        raise errors.ArgumentError(
            f"ShapedArray: the sharding is a {type(sharding).__name__}.",
            where=source.here(),
            why="a type tells how dimensions are sharded along the axes of a mesh.",
            fix="sharding=NamedSharding(mesh, P('data')), or leave it out",
        )
    return along_explicit(aval, sharding)


def _mesh_in_force(trace: StageTrace, shardings: Sequence[NamedSharding | None]) -> AbstractMesh | None:
    """The mesh with explicit axes: of an argument, the context or an equation."""
    found = [s.mesh.abstract for s in shardings if s is not None]
    mesh, here = current_mesh(), region()
    if mesh is not None and (mesh.explicit or here is not None):
        found.append(mesh.abstract)
    elif here is not None:
        found.append(here.mesh)
    constraints = (e.params["mesh"] for e in trace.eqns if isinstance(e.prim, ShardingConstraint))
    found += [m.abstract for m in constraints if m is not None and m.explicit]
    return next(iter(found), None)


def sharding_of(x: Any) -> NamedSharding | None:
    """The sharding of a value along explicit axes, or None."""
    found = type_of(x) if isinstance(x, Array) else None
    sharding = getattr(x if found is None else found, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.explicit:
        return NamedSharding(sharding.mesh.abstract, sharding.spec)
    return None


def _known(sharding: NamedSharding | None, aval: ShapedArray, mesh: AbstractMesh) -> Known | None:
    """The known layout of a parameter, which may be an element of the array."""
    if sharding is None or sharding.mesh.shape != mesh.shape:
        return None
    ndim = aval.ndim + (len(sharding.spec) > aval.ndim)
    return given(layout_of(sharding.spec, ndim, mesh)[ndim - aval.ndim :], mesh)
