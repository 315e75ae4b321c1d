"""``collectives``: a table of a program's collectives and their causes.

Parallel, after stage 3. In: a function, its arguments and, from these or from annotations, a mesh. Out: a row per
collective of the local program, with its trip count in loops and the user's line that caused it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, subjaxprs
from blufunc.core.ops.elementwise import convert_p, div_p, mul_p, neg_p
from blufunc.core.ops.shape import pad_p
from blufunc.core.programs import simplify as passes
from blufunc.core.programs.alternatives import chosen
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.tables import duration, run_lengths, size, table
from blufunc.parallel.collectives.primitives import MeshCollective, communicates, equations
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.links import wire_bytes
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.sharding import NamedSharding, SingleDeviceSharding, replicated
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.partition import localise
from blufunc.parallel.programs.mesh_device import MeshDevice
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p
from blufunc.transforms.staging.jit import Jitted, jit
from blufunc.transforms.staging.stages import Lowered, placement


@dataclass(frozen=True)
class Collective:
    """A collective of a program, or several identical ones.

    Attributes:
      operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``permute``.
      axes, sizes: its mesh axes, and their sizes.
      type: the operand type on each device.
      bytes: message size as NCCL counts it: bytes of the result of an all_gather, of the operand otherwise.
      count: executions per call.
      condition: ``a round`` in a loop of unknown length, of which one iteration is counted; ``if taken`` in a branch;
        else empty.
      cause: the operation whose result is summed, or that consumes the gathered or moved value; ``asked for`` if the
        user wrote the collective.
      line: the user's line of that operation or collective; in the backward pass, the line of the forward operation.
      backward: True if a derivative made it.
      forward: in the backward pass, the forward operations on that line.
    """

    operation: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    type: str
    bytes: int
    count: int
    condition: str
    cause: str
    line: str
    backward: bool
    forward: str

    @property
    def ranks(self) -> int:
        """The number of devices that communicate with each other."""
        return math.prod(self.sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all ``count`` executions."""
        return self.bytes * self.count

    @property
    def sent(self) -> float:
        """Bytes that each device sends in all of them, on a ring."""
        return self.count * wire_bytes(self.operation, self.bytes, self.ranks)

    @property
    def because(self) -> str:
        """The cause, with the forward operations that it differentiates."""
        if not self.backward or self.forward in ("", self.cause):
            return self.cause
        return f"{self.cause}, of {self.forward}"


class Collectives(Sequence):
    """The collectives of a program, a ``Collective`` per kind; printed as a table.

    Attributes:
      rows: in the order of first execution.
    """

    def __init__(self, rows: Sequence[Collective]):
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    @property
    def count(self) -> int:
        """Collectives executed per call."""
        return sum(r.count for r in self.rows)

    @property
    def total_bytes(self) -> int:
        """Their bytes."""
        return sum(r.total_bytes for r in self.rows)

    @property
    def sent(self) -> float:
        """Bytes that each device sends."""
        return sum(r.sent for r in self.rows)

    def __str__(self) -> str:
        return self.table()

    def table(self, seconds: Callable[[Collective], float] | None = None) -> str:
        """The table; with a column of times if ``seconds`` is given."""
        if not self.rows:
            return "no collectives"
        rows = [
            (
                r.operation,
                ", ".join(r.axes),
                str(r.ranks),
                r.type,
                size(r.bytes),
                f"{r.count} {r.condition}".strip(),
                size(r.sent),
                *([duration(seconds(r))] if seconds else []),
                r.because,
                r.line + " backward" * r.backward,
            )
            for r in self.rows
        ]
        time = ("time",) if seconds else ()
        head = (
            "operation", "over", "ranks", "operand", "bytes", "count", "sent", *time, "because of", "line",
        )  # fmt: skip
        shown = table(head, rows, ("ranks", "bytes", "sent", "time"))
        many = "1 collective" if self.count == 1 else f"{self.count} collectives"
        return f"{shown}\n{many} of {size(self.total_bytes)}; each device sends {size(self.sent)}"


def collectives(fun: Callable, *args: Any, **kwargs: Any) -> Collectives:
    """List the collectives of a call of ``fun``, with bytes, counts and causes.

    Nothing is compiled or run. The mesh comes from the arguments, or else from the annotations of ``fun`` (``shard``,
    ``jit(in_shardings=)``, ``reshard``, ``shard_map``); it may be an ``AbstractMesh``.

    Args:
      fun: a function, under ``jit`` or not.
      args, kwargs: arrays, or ``ShapeDtypeStruct`` with or without a ``sharding``. An argument that is not on the mesh
        gets the sharding of its first annotation, or is replicated.
    Returns:
      ``Collectives``, a sequence of rows that prints as a table; empty if there is no mesh.
    Raises:
      ArgumentError: ``fun`` is not a function, or the ``sharding`` of a shape is not a ``NamedSharding``.
      ShardingError: annotations do not fit the mesh.
    """
    found = local_program(fun, "collectives", None, args, kwargs)
    return collectives_of(found.jaxpr, found.whole) if found else Collectives(())


class Local(NamedTuple):
    """A single-device program.

    Attributes:
      name: the name of the function.
      mesh: the mesh.
      whole: the global jaxpr, simplified.
      jaxpr: the local jaxpr, simplified, constants as leading parameters.
      donated: its donated parameters.
      in_shardings: the sharding of each parameter of ``whole``.
      out_shardings: the sharding of each result.
      budget: the limit in bytes on the planned peak, or None.
    """

    name: str
    mesh: Mesh | AbstractMesh
    whole: Jaxpr
    jaxpr: Jaxpr
    donated: tuple[bool, ...]
    in_shardings: Sequence[NamedSharding]
    out_shardings: Sequence[NamedSharding]
    budget: int | None = None


def local_program(
    fun: Callable,
    caller: str,
    mesh: Mesh | AbstractMesh | None,
    args: tuple,
    kwargs: dict,
    in_forms: Callable[[Jaxpr], Jaxpr] = chosen,
) -> Local | None:
    """The single-device program; None if there is no mesh.

    ``in_forms`` selects variants for the devices' kernels; default: the program as written.
    """
    check_callable(fun, caller)
    function = fun if isinstance(fun, Jitted) else jit(fun)
    return local_of(function.lower(*args, **kwargs), caller, mesh, in_forms)


def local_of(
    lowered: Lowered,
    caller: str,
    mesh: Mesh | AbstractMesh | None = None,
    in_forms: Callable[[Jaxpr], Jaxpr] = chosen,
) -> Local | None:
    """The single-device program of a lowered function; None if there is no mesh."""
    placements = [_checked(x, caller) for x in lowered.traced.placements]
    jaxpr = passes.simplify(in_forms(lowered.jaxpr))
    mesh = mesh or _mesh_of(lowered, placements)
    if mesh is None:
        return None
    known = [*[placement(c) for c in lowered.traced.entry.consts], *placements]
    shardings = [
        s or _annotated(v, jaxpr, mesh) or replicated(mesh) for s, v in zip(known, jaxpr.invars, strict=True)
    ]
    return partitioned(lowered, jaxpr, mesh, shardings)


def partitioned(
    lowered: Lowered,
    whole: Jaxpr,
    mesh: Mesh | AbstractMesh,
    in_shardings: Sequence[NamedSharding],
    out_shardings: Sequence[NamedSharding | None] | None = None,
) -> Local:
    """The single-device program of a lowered function, for given shardings.

    ``whole`` is its simplified jaxpr. Constants are leading parameters. None among ``out_shardings`` where propagation
    decides.
    """
    local, found = localise(whole, in_shardings, mesh, out_shardings)
    closed, consts = local.hoist()
    donated = (False,) * len(consts) + lowered.donated
    budget = lowered.traced.entry.budget
    name = lowered.traced.fun_name
    return Local(name, mesh, whole, passes.simplify(closed), donated, in_shardings, found, budget)


def _checked(sharding: Any, caller: str) -> NamedSharding | None:
    """The layout of an argument on a mesh, if it has one."""
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return None
    if isinstance(sharding, NamedSharding):
        return sharding.with_memory_kind(DEVICE)
    raise errors.ArgumentError(
        f"{caller} was given a shape whose sharding is {sharding!r:.60}.",
        where=source.here(),
        fix="ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P('x')))",
    )


def _mesh_of(lowered: Lowered, placements: Sequence[NamedSharding | None]) -> Mesh | AbstractMesh | None:
    """The mesh of a program, its arguments or its annotations."""
    device = lowered.traced.device
    if isinstance(device, MeshDevice):
        return device.mesh
    for s in placements:
        if s is not None:
            return s.mesh
    return next((m for e in equations(lowered.jaxpr) if (m := e.params.get("mesh")) is not None), None)


def _annotated(var: Var, jaxpr: Jaxpr, mesh: Mesh | AbstractMesh) -> NamedSharding | None:
    for eqn in jaxpr.eqns:
        if var not in eqn.invars:
            continue
        at = eqn.invars.index(var)
        if isinstance(eqn.prim, ShardingConstraint):
            return NamedSharding(eqn.params["mesh"] or mesh, PartitionSpec(*eqn.params["spec"]))
        if eqn.prim is shard_map_p:
            return NamedSharding(eqn.params["mesh"], PartitionSpec(*eqn.params["in_specs"][at]))
        if eqn.prim.body is not None:
            body = eqn.params[eqn.prim.body]
            found = _annotated(body.invars[at], body, mesh)
            if found is not None:
                return found
    return None


# -- the rows --------------------------------------------------------------------------------------


def collectives_of(local: Jaxpr, whole: Jaxpr) -> Collectives:
    """The collectives of a local jaxpr.

    Args:
      local: the single-device program.
      whole: its global jaxpr, for the user's collectives and the forward operations.
    """
    context = _Context(whole)
    kinds: dict[Collective, int] = {}
    for row in _rows(local, 1, "", context):
        one = replace(row, count=1)
        kinds[one] = kinds.get(one, 0) + row.count
    return Collectives([replace(row, count=n) for row, n in kinds.items()])


class _Context:
    """Facts about a global jaxpr that explain the equations of its local one.

    Attributes:
      forward: by line, the forward operations there, without duplicates.
      asked_for: the lines of collectives in the global program, in bodies of ``shard_map``.
    """

    def __init__(self, whole: Jaxpr):
        self.forward: dict[Any, dict[str, None]] = {}
        self.asked_for: set[Any] = set()
        for eqn in equations(whole):
            if isinstance(eqn.prim, MeshCollective):
                self.asked_for.add(eqn.source)
            if eqn.source is not None and not source.is_backward(eqn.source) and not eqn.prim.identity:
                self.forward.setdefault(eqn.source[:2], {})[_name(eqn)] = None


def _name(eqn: Eqn) -> str:
    """The display name of an operation; for collectives the engine's name."""
    return _kind(eqn) if communicates(eqn) else eqn.prim.name


def _kind(eqn: Eqn) -> str:
    options = {k: v for k, v in eqn.params.items() if k not in ("axes", "sizes", "src", "dst")}
    return eqn.prim.engine_call(**options)[0]  # type: ignore[attr-defined]


def _rows(jaxpr: Jaxpr, times: int, condition: str, context: _Context) -> Iterator[Collective]:
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    readers: dict[Any, list[Eqn]] = {}
    for e in jaxpr.eqns:
        for a in e.invars:
            if isinstance(a, Var):
                readers.setdefault(a, []).append(e)
    for eqn in jaxpr.eqns:
        if communicates(eqn):
            yield _row(eqn, makers, readers, times, condition, context)
        inside, when, prim = times, condition, eqn.prim
        if prim is cond_p:
            when = "if taken"
        elif prim is scan_p:
            inside *= eqn.params["length"]
        elif prim is while_p and eqn.params["max_steps"] is None:
            when = "a round"
        elif prim is while_p:
            inside *= eqn.params["max_steps"]
        for inner in subjaxprs(eqn.params):
            yield from _rows(inner, inside, when, context)


def _row(
    eqn: Eqn,
    makers: dict[Any, Eqn],
    readers: dict[Any, list[Eqn]],
    times: int,
    condition: str,
    context: _Context,
) -> Collective:
    """The row of one collective."""
    kind = _kind(eqn)
    summed = kind in ("all_reduce", "reduce_scatter")
    found = _maker(eqn.invars[0], makers) if summed else _reader(eqn, readers)
    cause = _cause(found) if found else "an argument" if summed else "a result"
    asked_for = eqn.source in context.asked_for
    line = eqn.source if asked_for or found is None or found.source is None else found.source
    backward = source.is_backward(line)
    if asked_for and not backward:
        cause = "asked for"
    (x,), (out,) = eqn.invars, eqn.outvars
    return Collective(
        kind,
        eqn.params["axes"],
        eqn.params["sizes"],
        str(x.aval),
        (out if kind == "all_gather" else x).aval.nbytes,
        times,
        condition,
        cause,
        source.summary(line),
        backward,
        run_lengths(list(context.forward.get(line[:2], ())), 4) if backward and line else "",
    )


def _cause(eqn: Eqn) -> str:
    """The name of an operation; of a branch around a callback, the callback's."""
    bodies = eqn.params["branches"] if eqn.prim is cond_p else ()
    alone = [body.eqns[0] for body in bodies if len(body.eqns) == 1 and body.eqns[0].prim.kind == "callback"]
    return alone[0].prim.name if alone else eqn.prim.name


def _maker(atom: Any, makers: dict[Any, Eqn]) -> Eqn | None:
    """The operation whose result is summed, through equations that keep it unreduced."""
    found = makers.get(atom)
    if found is None:
        return None
    if _passes_on(found):
        return _maker(found.invars[0], makers)
    if found.prim in _SCALING:
        scaled = [
            a for a in found.invars if isinstance(a, Var) and a.aval.shape == found.outvars[0].aval.shape
        ]
        if len(scaled) == 1:
            return _maker(scaled[0], makers) or found
    return found


def _reader(eqn: Eqn, readers: dict[Any, list[Eqn]]) -> Eqn | None:
    """The first operation that reads the result of a collective."""
    for found in itertools.chain.from_iterable(readers.get(v, ()) for v in eqn.outvars):
        at = _reader(found, readers) if _passes_on(found) else found
        if at is not None:
            return at
    return None


def _passes_on(eqn: Eqn) -> bool:
    return moves(eqn) or eqn.prim in (convert_p, pad_p) or isinstance(eqn.prim, MeshCollective)


_SCALING = (mul_p, div_p, neg_p)
