"""Fusion: group the equations of a simplified jaxpr into one region per kernel.

Kernels, stage 5. In: a jaxpr. Out: a ``Fusion``: its steps in dependency order, each a ``Region`` of equations that
``lower/region.py`` turns into LoopIR, or an ``Opaque`` equation that a library or the reference runs.

Equations are of three sorts. Movement and arithmetic on single scalars are **virtual**: each reader recomputes them, as
an index or a scalar. Elementwise operations, reductions, cumulative operations and gathers are **nodes**: each joins
the region of an operand if it can be computed in the same pass, at the element (or row) of the operand. All others are
**opaque**.

A region works on a frame of ``outer * rows * lanes`` points. An ``element`` has one scalar per point, a ``row`` one per
row (a reduction over the lanes), a ``column`` one per lane (a reduction over the rows). A ``total`` reduces all points,
or all rows. Columns and totals are read by other steps, or by the region at its very end. Cumulative operations yield
elements: they run along the lanes, or over the rows, which are then sequential. Softmax has elements and rows; the
backward pass of a layer norm has elements, rows and columns.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, communicates
from blufunc.core.ops.gather_scatter import gather_p
from blufunc.core.ops.offload import offload_p
from blufunc.core.ops.shape import iota_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.fusion import iteration_space
from blufunc.kernels.fusion.iteration_space import (
    READERS,
    Canonical,
    Frame,
    canonical_of,
    common,
    one_hot,
    one_hot_batch,
    reduces,
    role_of,
    scans,
    sort_of,
    sums_of_long_rows,
)
from blufunc.kernels.fusion.reachability import Reachability
from blufunc.kernels.fusion.recompute_in_consumers import (
    COPIES,
    computed_by_readers,
    computed_in_copies,
    position_tables,
)
from blufunc.kernels.loopir.access_map import Place, gathered, moves, same_order, view_chain
from blufunc.kernels.loopir.index import ZERO, Computed, Index, flat, of
from blufunc.kernels.loopir.index import constant as fixed
from blufunc.kernels.ops.points import POINTS

NUMBER_COST = 96  # operations on single scalars that every reader may repeat
MOST_BUFFERS = 48  # parameters of one kernel
_SCANNED_TWICE = 1 << 13  # longest row, in lanes, that a kernel scans more than once


@dataclass(eq=False)
class Region:
    """Equations that one kernel computes.

    Attributes:
      eqns: the nodes, in order of dependence. Virtual equations are found through ``Fusion.virtual``.
      roles: what each of their results is in the frame.
      outputs: the results that other steps read; for a region without nodes, the virtual variables that it writes.
      recomputed: the rematerializing call that some of it belongs to, a value of ``origins``; 0: none.
      numbers: virtual scalars that it computes from its totals and writes at its end.
      inputs: the variables in memory that it reads.
    """

    frame: Frame
    eqns: list[Eqn] = field(default_factory=list)
    roles: dict[Var, str] = field(default_factory=dict)
    recomputed: int = 0
    outputs: list[Var] = field(default_factory=list)
    numbers: list[Var] = field(default_factory=list)
    inputs: list[Var] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Region({', '.join(e.prim.name for e in self.eqns) or 'copy'})"


@dataclass(eq=False)
class Opaque:
    """One equation that is not compiled here.

    Attributes:
      eqn: the equation.
      inputs: what it reads in memory: for an operand that is a view of a variable, that variable.
      after: a step whose effects or collectives come first.
      overlapped: a collective that starts with this step, because no step needs its result sooner.
    """

    eqn: Eqn
    inputs: list[Var] = field(default_factory=list)
    after: Any = None
    overlapped: Any = None

    @property
    def outputs(self) -> list[Var]:
        """The variables that the equation computes."""
        return list(self.eqn.outvars)

    def __repr__(self) -> str:
        return f"Opaque({self.eqn.prim.name})"


Step = Region | Opaque


@dataclass
class Fusion:
    """A program as steps.

    Attributes:
      jaxpr: the program.
      steps: in an order of dependence.
      virtual: the equations of virtual variables.
      apart: pairs of dependent equations in different steps, with the reason.
    """

    jaxpr: Jaxpr
    steps: list[Step]
    virtual: dict[Var, Eqn]
    apart: list[tuple[Eqn, Eqn, str]]

    @property
    def regions(self) -> list[Region]:
        """The steps that are fused regions."""
        return [s for s in self.steps if isinstance(s, Region)]

    def in_order(self) -> Jaxpr:
        """The program with the equations of each step adjacent."""
        order: dict[Eqn, None] = {}

        def add(eqn: Eqn) -> None:
            pending = [eqn]
            while pending:
                views = [self.virtual[a] for a in pending[-1].invars if a in self.virtual]  # type: ignore[index]
                missing = [v for v in views if v not in order]
                pending.extend(missing)
                if not missing:
                    order[pending.pop()] = None

        for step in self.steps:
            for eqn in step.eqns if isinstance(step, Region) else [step.eqn]:
                add(eqn)
        for eqn in self.jaxpr.eqns:  # views that are results
            order.setdefault(eqn)
        return self.jaxpr.replace(eqns=list(order))

    def __str__(self) -> str:
        return "\n".join(_describe(i, s) for i, s in enumerate(self.steps))


def _describe(i: int, step: Step) -> str:
    if isinstance(step, Opaque):
        return f"{i:4} {step.eqn.prim.name:<20} {source.summary(step.eqn.source)}"
    names = " ".join(e.prim.name for e in step.eqns) or "copy"
    frame = step.frame
    shape = f"{frame.rows}x{frame.lanes}" if frame.lanes else f"{frame.size}"
    lines = list(dict.fromkeys(source.summary(e.source) for e in step.eqns))
    return f"{i:4} [{shape}] {names}  # {'; '.join(lines)}"


def fuse(
    jaxpr: Jaxpr,
    origins: Mapping[Eqn, int] | None = None,
    sorts: dict[Eqn, str] | None = None,
    summed_lanes: int = sys.maxsize,
    read_again: bool = False,
    in_order: Callable[[Eqn], bool] = lambda eqn: False,
) -> Fusion:
    """Group the equations of a simplified jaxpr.

    Args:
      jaxpr: the program, its calls in place.
      origins: the rematerializing call of each recomputed equation: it does not join the original computation.
      sorts: ``sort_of`` of equations, as far as known; missing ones are added.
      summed_lanes: the longest rows, in lanes, that are also reduced over rows when their lanes are reduced.
      read_again: whether consumers recompute cheap values instead of one step storing them; default False.
      in_order: whether an opaque equation needs its operands contiguous in memory; default: none does.
    """
    return _Fuser(
        jaxpr, origins or {}, {} if sorts is None else sorts, summed_lanes, read_again, in_order
    ).run()


# -- grouping ----------------------------------------------------------------------------------------


class _Fuser:
    def __init__(
        self,
        jaxpr: Jaxpr,
        origins: Mapping[Eqn, int],
        sorts: dict[Eqn, str],
        summed_lanes: int,
        read_again: bool,
        in_order: Callable[[Eqn], bool],
    ):
        self.jaxpr, self.summed_lanes, self.in_order_operands = jaxpr, summed_lanes, in_order
        self.origins = origins
        self.sorts = sorts
        self.position = {id(e): i for i, e in enumerate(jaxpr.eqns)}
        self.virtual: dict[Var, Eqn] = {}
        self.costs: dict[Var, int] = {}
        self.steps: list[Step | None] = []  # None: merged into another
        self.reads: dict[Step, dict[Var, None]] = {}  # what regions read that they do not compute
        self.home: dict[Var, int] = {}  # the step that computes a variable
        self.order = Reachability()
        self.apart: list[tuple[Eqn, Eqn, str]] = []
        self._leaves: dict[Var, tuple[Var, ...]] = {}
        self.scalars: dict[frozenset[int], int] = {}  # by what they wait for, the steps that write scalars
        self.last_effect: int | None = None
        self.first_result: dict[Any, Var] = {}  # of loops and branches at points
        prims = {e.prim for e in jaxpr.eqns}
        self.tables = position_tables(jaxpr) if iota_p in prims else set()
        self.results = {a for a in jaxpr.outvars if a.__class__ is not Literal}
        moved = any(moves(e) and e.outvars[0] in self.results for e in jaxpr.eqns)
        self.by_readers = computed_in_copies(jaxpr, self.tables) if moved or prims & COPIES else set()
        if read_again:
            for eqn in jaxpr.eqns:
                if eqn not in sorts:
                    sorts[eqn] = sort_of(eqn)
            self.by_readers |= computed_by_readers(jaxpr, sorts)
        self.readers: dict[Any, list[Eqn]] = {}
        for eqn in jaxpr.eqns:
            for a in eqn.invars:
                if a.__class__ is not Literal:
                    self.readers.setdefault(a, []).append(eqn)

    def run(self) -> Fusion:
        for eqn in self.jaxpr.eqns:
            self.place(eqn)
        self.join_rows()
        self.join_siblings()
        self.write_out()
        return Fusion(self.jaxpr, self.in_order(), self.virtual, self.apart)

    # -- where values come from ----------------------------------------------------------------

    def leaves(self, atom: Any) -> tuple[Var, ...]:
        """The variables in memory that an operand depends on through virtual equations."""
        if atom.__class__ is Literal:
            return ()
        eqn = self.virtual.get(atom)
        if eqn is None:
            return (atom,)
        found = self._leaves.get(atom)
        if found is None:
            found = self._leaves[atom] = tuple(
                dict.fromkeys(leaf for a in eqn.invars for leaf in self.leaves(a))
            )
        return found

    def homes(self, eqn: Eqn) -> set[int]:
        """The steps that an equation depends on."""
        found: set[int] = set()
        for a in eqn.invars:
            if a in self.virtual:
                found.update([self.home[v] for v in self.leaves(a) if v in self.home])
            elif a in self.home:
                found.add(self.home[a])  # type: ignore[index]
        return found

    # -- placing equations ---------------------------------------------------------------------

    def place(self, eqn: Eqn) -> None:
        sort = self.sorts.get(eqn)
        if sort is None:
            sort = self.sorts[eqn] = sort_of(eqn)
        if (sort == "virtual" or self.not_stored(eqn, sort)) and self.affordable(eqn):
            self.virtual[eqn.outvars[0]] = eqn
            return
        homes = self.homes(eqn)
        if sort == "opaque":
            self.new_step(Opaque(eqn), eqn, homes)
            return
        candidates = sorted([s for s in homes if isinstance(self.steps[s], Region)], reverse=True)
        if eqn.prim in POINTS:  # the results of one loop belong together
            first = self.first_result.setdefault(eqn.params["control"], eqn.outvars[0])
            if first in self.home:
                candidates = list(dict.fromkeys((self.home[first], *candidates)))
        joined = next((s for s in candidates if self.join(eqn, s, homes)), None)
        if joined is None:
            region = self.region_of(eqn)
            self.reads[region] = dict.fromkeys(self.read_by(region.eqns, region.roles))
            self.new_step(region, eqn, homes)
            return
        for other in candidates:
            if other != joined and self.steps[other] is not None:
                self.merge(other, joined)

    def not_stored(self, eqn: Eqn, sort: str) -> bool:
        """True if storing gains nothing: masks, scaled GEMM operands, cheap values."""
        (v,) = eqn.outvars if sort == "node" else (None,)
        if v is None or eqn.prim in COPIES:
            return v in self.by_readers
        if not isinstance(eqn.prim, Elementwise) and eqn.prim is not add_any_p:
            return False
        return v in self.by_readers or (v not in self.tables and not any(map(self.leaves, eqn.invars)))

    def affordable(self, eqn: Eqn) -> bool:
        """True if readers may repeat a virtual equation; expensive scalars are stored."""
        if moves(eqn) or eqn.prim is iota_p:
            return True
        cost = eqn.prim.cost + sum(self.costs.get(a, 0) for a in eqn.invars if isinstance(a, Var))
        self.costs[eqn.outvars[0]] = cost
        return cost <= NUMBER_COST

    def region_of(self, eqn: Eqn) -> Region:
        out = eqn.outvars[0]
        points = eqn.invars[0] if reduces(eqn.prim) else out
        role, frame = role_of(eqn, Frame(points.aval.size)) or ("element", Frame(out.aval.size))
        return Region(frame, [eqn], {out: role}, self.origin(eqn))

    def new_step(self, step: Step, eqn: Eqn, homes: set[int]) -> None:
        number = len(self.steps)
        self.steps.append(step)
        self.order.add()
        for v in eqn.outvars:
            self.home[v] = number
        for s in homes:
            self.order.wait(number, s)
        if isinstance(step, Opaque) and (
            eqn.effects or communicates(eqn)
        ):  # all ranks run collectives in one order
            if self.last_effect is not None:
                self.order.wait(number, self.last_effect)
                step.after = self.steps[self.last_effect]  # type: ignore[union-attr]
            self.last_effect = number

    def join(self, eqn: Eqn, number: int, homes: set[int]) -> bool:
        """Add an equation to a region if it can be computed there."""
        region = self.steps[number]
        assert isinstance(region, Region)
        others = homes - {number}
        fitted = role_of(eqn, region.frame)
        why = self.obstacle(eqn, region, number, others) or self.misfit(eqn, fitted, region)
        if why is not None:
            self.apart.append((region.eqns[-1], eqn, why))
            return False
        assert fitted is not None
        role, region.frame = fitted
        roles, reads = region.roles, self.reads[region]
        for a in eqn.invars:
            if a not in roles:
                reads.update((v, None) for v in self.leaves(a) if v not in roles)
        region.eqns.append(eqn)
        out = eqn.outvars[0]
        region.roles[out] = role
        self.home[out] = number
        for s in others:
            self.order.wait(number, s)
        return True

    def misfit(self, eqn: Eqn, fitted: tuple[str, Frame] | None, region: Region) -> str | None:
        """Reason that an equation cannot have a role in a region; None if it can."""
        if fitted is None:
            return "their points differ"
        if _is_second_long_scan(eqn, fitted[1], region):
            return "two scans of a long row, one of which may have to keep its results for the other"
        if sums_of_long_rows(fitted[1], self.summed_lanes):
            return "a long row leaves no memory for reductions over rows"
        if not self.meets(eqn, fitted, region):
            return "it reads other elements than its own, or the result of a reduction"
        return None

    def obstacle(self, eqn: Eqn, region: Region, number: int, others: set[int]) -> str | None:
        if self.origin(eqn) not in (0, region.recomputed):
            return "it is rematerialized later, on purpose"
        if any(self.order.waits(s, number) for s in others):
            return "another step must run between them"
        if len(region.eqns) >= 4 * MOST_BUFFERS or self.buffers(region, eqn) > MOST_BUFFERS:
            return "the kernel would have too many parameters"
        return None

    def origin(self, eqn: Eqn) -> int:
        return self.origins.get(eqn, 0)

    def buffers(self, region: Region, eqn: Eqn) -> int:
        """An upper bound on the parameters of a kernel, cheap to count."""
        if len(region.eqns) < MOST_BUFFERS // 2:
            return 0
        return len({*self.reads[region], *self.read_by([eqn], region.roles)})

    def meets(self, eqn: Eqn, fitted: tuple[str, Frame], region: Region) -> bool:
        """True if an equation reads the region's values at the points that compute them."""
        role, frame = fitted
        if eqn.prim is gather_p and role in ("row", "element"):
            return self.meets_where_gathered(eqn, role, frame, region, canonical_of(frame))
        if role == "element" and one_hot(eqn):
            canonical = canonical_of(frame)
            element = canonical.place("element", eqn.outvars[0].aval.shape)
            batch = one_hot_batch(eqn, element)
            places = (element, (*batch, ZERO), batch)
            return all(self.reaches(a, p, region, canonical) for a, p in zip(eqn.invars, places, strict=True))
        if eqn.prim in READERS or one_hot(eqn):
            return not any(self.reads_of(region, a) for a in eqn.invars)
        reads = role
        if reduces(eqn.prim):
            over_rows = role == "total" and eqn.invars[0].aval.size != frame.size
            reads = "row" if over_rows else "element"
        place: Place | None = None
        for a in eqn.invars:
            if a.__class__ is Literal or region.roles.get(a) == reads:  # type: ignore[arg-type]
                continue  # a value of the same shape, computed for the same point
            if not self.reads_of(region, a):
                continue
            if place is None:
                canonical = canonical_of(frame)
                place = canonical.place(reads, max([x.aval.shape for x in eqn.invars], key=len))
            if not self.reaches(a, place if a.aval.ndim else (), region, canonical):
                return False
        return True

    def reads_of(self, region: Region, operand: Atom) -> bool:
        """True if an operand depends on a value that the region computes."""
        if operand not in self.virtual:
            return operand in region.roles
        return not region.roles.keys().isdisjoint(self.leaves(operand))

    def meets_where_gathered(
        self, eqn: Eqn, role: str, frame: Frame, region: Region, canonical: Canonical
    ) -> bool:
        """True if a gather reads indices that the region has at its points.

        It gathers from memory, or one scalar per row of that very row, which recomputes it.
        """
        x, indices = eqn.invars
        place = canonical.place(role, eqn.outvars[0].aval.shape)
        batch: list[Place] = []

        def start(at: Place, c: int, axis: int) -> Index:
            batch.append((*at, fixed(c)))
            return of(Computed(None, 0, x.aval.shape[axis] - eqn.params["slice_sizes"][axis]))

        at = gathered(eqn, place, start)
        if not all(self.reaches(indices, b, region, canonical) for b in batch):
            return False
        if x not in region.roles or role == "element":
            return not self.reads_of(region, x)
        assert frame.lanes
        return region.roles[x] == "element" and flat(at, x.aval.shape) // frame.lanes == canonical["row"]

    def reaches(self, operand: Atom, place: Place, region: Region, canonical: Canonical) -> bool:
        """True if ``place`` of an operand is computed there, or in memory already."""
        atom: Any = operand
        while True:
            if atom.__class__ is Literal:
                return True
            role = region.roles.get(atom)
            if role is not None:
                return role in canonical and canonical.meets(role, place, atom.aval.shape)
            eqn = self.virtual.get(atom)
            if eqn is None or not eqn.invars:
                return True
            if not moves(eqn):  # scalars, and values of positions alone
                mine = [region.roles[v] for v in self.leaves(atom) if v in region.roles]
                # in a region of one row, every point knows the row's values
                if not mine or (set(mine) == {"row"} and canonical.get("row") == ZERO):
                    return True
                if not (isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p):
                    return False
                places = [place if a.aval.ndim else () for a in eqn.invars]
                return all(
                    self.reaches(a, p, region, canonical) for a, p in zip(eqn.invars, places, strict=True)
                )
            place = canonical.source_of(eqn, place)
            atom = eqn.invars[0]

    def merge(self, other: int, into: int) -> bool:
        """Merge two regions, if no step is between and all can be computed there."""
        a, b = self.steps[into], self.steps[other]
        assert isinstance(a, Region) and isinstance(b, Region)
        if self.order.between(other, into) or self.order.between(into, other):
            return False
        if not self.at_one_time(a, b):
            return False
        if len(a.eqns) + len(b.eqns) > 4 * MOST_BUFFERS:
            return False
        frame = common(a.frame, b.frame)
        if frame is None:
            return False
        trial = Region(frame, recomputed=a.recomputed or b.recomputed)
        for e in self.by_position([*a.eqns, *b.eqns]):
            fitted = role_of(e, trial.frame)
            if self.misfit(e, fitted, trial) is not None:
                return False
            assert fitted is not None
            role, trial.frame = fitted
            trial.eqns.append(e)
            trial.roles[e.outvars[0]] = role
        reads = self.read_by(trial.eqns, trial.roles)
        if len(reads) > MOST_BUFFERS:
            return False
        self.reads[trial] = dict.fromkeys(reads)
        self.steps[into], self.steps[other] = trial, None
        for e in b.eqns:
            self.home[e.outvars[0]] = into
        self.order.merge(other, into)
        return True

    def at_one_time(self, a: Region, b: Region) -> bool:
        """True if merging two regions undoes no rematerialization.

        Both or neither belong to one rematerializing call, or the plain one may wait: it is read later, at no cost in
        memory.
        """
        if a.recomputed == b.recomputed:
            return True
        if a.recomputed and b.recomputed:
            return False
        plain, repeated = (b, a) if a.recomputed else (a, b)
        begin = min(self.position[id(e)] for e in repeated.eqns if self.origin(e))
        reads = {v: self.reads_outside(v, plain) for v in plain.roles}
        if any(min(found, default=begin + 1) <= begin for found in reads.values()):
            return False
        if max(self.position[id(e)] for e in plain.eqns) > begin:
            return True  # it runs later anyway
        held = [
            v
            for v in self.read_by(plain.eqns, plain.roles)
            if v in self.home and max(self.reads_outside(v, plain), default=-1) < begin
        ]
        return sum(map(_bytes, held)) <= sum(_bytes(v) for v, found in reads.items() if found)

    def reads_outside(self, v: Var, inside: Region) -> list[int]:
        """Positions of the equations outside a region that read a variable or its views.

        A result is read at the very end.
        """
        found = [len(self.position)] if v in self.results else []
        for e in self.readers.get(v, ()):
            if e.outvars and e.outvars[0] in self.virtual:
                found += self.reads_outside(e.outvars[0], inside)
            elif not e.outvars or e.outvars[0] not in inside.roles:
                found.append(self.position[id(e)])
        return found

    def by_position(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        return sorted(eqns, key=lambda e: self.position[id(e)])

    # -- regions that read the same ------------------------------------------------------------

    def join_rows(self) -> None:
        """Merge regions with one scalar per row into the row regions that read them."""
        for number, step in enumerate(self.steps):
            if not isinstance(step, Region) or not step.frame.lanes:
                continue
            for home in dict.fromkeys(self.home[v] for v in self.reads[step] if v in self.home):
                other, into = self.steps[home], self.steps[number]
                if home == number or not isinstance(other, Region) or not isinstance(into, Region):
                    continue
                frame = other.frame
                if not frame.lanes and not frame.total and frame.size == into.frame.rows:
                    self.merge(home, number)

    def join_siblings(self) -> None:
        """Merge regions that read a large array in common, so that it is read once."""
        readers: dict[Var, list[int]] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, Region):
                for v in self.reads[step]:
                    if v.aval.size > iteration_space.ONE_ROW // 16:
                        readers.setdefault(v, []).append(number)
        for v in sorted(readers, key=lambda v: -v.aval.size * v.aval.dtype.itemsize):
            numbers = [s for s in dict.fromkeys(readers[v]) if self.steps[s] is not None]
            for i, first in enumerate(numbers):
                for second in numbers[i + 1 :]:
                    a, b = self.steps[first], self.steps[second]
                    if isinstance(a, Region) and isinstance(b, Region) and a.frame.size == b.frame.size:
                        self.merge(second, first)

    def read_by(self, eqns: Sequence[Eqn], computed: Mapping[Var, str]) -> list[Var]:
        """The variables that equations read, except those computed among them."""
        operands = dict.fromkeys(itertools.chain.from_iterable([e.invars for e in eqns]))
        found = dict.fromkeys(v for a in operands if a not in computed for v in self.leaves(a))
        return [v for v in found if v not in computed]

    # -- what must be in memory ----------------------------------------------------------------

    def write_out(self) -> None:
        """Decide which variables are written, and add copies of virtual ones."""
        needed: dict[Var, None] = {}
        for step in list(self.live()):
            if isinstance(step, Region):
                step.inputs = list(self.reads[step])
                continue
            for a in dict.fromkeys(step.eqn.invars):
                if a.__class__ is Literal:
                    continue
                in_order = self.in_order_operands(step.eqn)
                if step.eqn.prim is offload_p:  # it copies bytes
                    in_order = same_order(a, self.virtual) is None
                if a in self.virtual and (in_order or view_chain(a, self.virtual) is None):
                    needed[a] = None
                    step.inputs.append(a)
                else:
                    step.inputs.extend(self.leaves(a))
        needed.update((a, None) for a in self.jaxpr.outvars if a in self.virtual)  # type: ignore[misc]
        for v in needed:
            if not self.written_reshaped(v) and not self.at_the_end(v):
                self.copy_out(v)
        for region in self.live():
            if isinstance(region, Region):
                more = [x for v in region.numbers for x in self.leaves(v) if x not in region.roles]
                region.inputs = list(dict.fromkeys((*region.inputs, *more)))
        needed_later = {v for step in self.live() for v in step.inputs}
        needed_later.update(a for a in self.jaxpr.outvars if a.__class__ is not Literal)  # type: ignore[misc]
        for step in self.live():
            if isinstance(step, Region) and step.eqns:
                step.outputs = [v for v in step.roles if v in needed_later] + step.numbers

    def written_reshaped(self, v: Var) -> bool:
        """Let the region that computes an array write it under another shape.

        The elements must be in the same order, as those of a reshape are.
        """
        x = same_order(v, self.virtual)
        region = self.steps[self.home[x]] if x in self.home else None
        if not isinstance(region, Region) or (role := region.roles.get(x)) not in ("element", "row"):
            return False
        region.roles[v], self.home[v] = role, self.home[x]
        return True

    def at_the_end(self, v: Var) -> bool:
        """Let the region that computes a scalar also do the arithmetic on it, at its end."""
        if v.aval.size != 1:
            return False
        for number in sorted({self.home[x] for x in self.leaves(v) if x in self.home}, reverse=True):
            region = self.steps[number]
            if not isinstance(region, Region) or not region.eqns:
                continue
            mine = [x for x in self.leaves(v) if x in region.roles]
            others = {self.home[x] for x in self.leaves(v) if x in self.home} - {number}
            if any(self.order.waits(s, number) for s in others):
                continue
            ends = ("total", "row") if region.frame.rows == 1 else ("total",)
            if all(region.roles[x] in ends for x in mine):
                region.numbers.append(v)
                self.home[v] = number
                for s in others:
                    self.order.wait(number, s)
                return True
        return False

    def copy_out(self, v: Var) -> None:
        """Add a step that writes a virtual variable.

        Scalars that wait for the same steps share one.
        """
        waits = frozenset(self.home[leaf] for leaf in self.leaves(v) if leaf in self.home)
        together = self.steps[self.scalars[waits]] if v.aval.size == 1 and waits in self.scalars else None
        if isinstance(together, Region):
            inputs = list(dict.fromkeys((*together.inputs, *self.leaves(v))))
            if len(together.outputs) + len(inputs) < MOST_BUFFERS:
                together.outputs.append(v)
                together.inputs = inputs
                self.home[v] = self.scalars[waits]
                return
        number = len(self.steps)
        if v.aval.size == 1:
            self.scalars[waits] = number
        self.steps.append(Region(Frame(v.aval.size), outputs=[v], inputs=list(self.leaves(v))))
        self.order.add()
        for leaf in self.leaves(v):
            if leaf in self.home:
                self.order.wait(number, self.home[leaf])
        self.home[v] = number

    def live(self) -> Iterator[Step]:
        return (s for s in self.steps if s is not None)

    def in_order(self) -> list[Step]:
        """The steps in dependency order, otherwise as early as their equations were."""
        makers: dict[Var, Step] = {v: s for s in self.live() for v in s.outputs}
        done: dict[int, None] = {}
        order: list[Step] = []

        def key(step: Step) -> int:
            eqns = [step.eqn] if isinstance(step, Opaque) else step.eqns
            return max((self.position[id(e)] for e in eqns), default=len(self.position))

        def visit(step: Step) -> None:
            stack = [(step, False)]
            while stack:
                s, ready = stack.pop()
                if id(s) in done:
                    continue
                if ready:
                    done[id(s)] = None
                    order.append(s)
                    continue
                stack.append((s, True))
                stack.extend((makers[v], False) for v in reversed(s.inputs) if v in makers)
                if isinstance(s, Opaque) and s.after is not None:
                    stack.append((s.after, False))

        for step in sorted(self.live(), key=key):
            visit(step)
        return [s for s in order if s.outputs or isinstance(s, Opaque)]


def _bytes(v: Var) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _is_second_long_scan(eqn: Eqn, frame: Frame, region: Region) -> bool:
    """True for a second scan of a row too long to keep, or scanned in chunks."""
    long = frame.order == "chunks" or (frame.order == "whole" and (frame.lanes or 0) > _SCANNED_TWICE)
    return long and scans(eqn) and any(map(scans, region.eqns))
