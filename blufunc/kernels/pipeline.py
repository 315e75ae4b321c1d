"""Stages 5 to 7 for any device: plan a jaxpr as steps over planned memory.

Kernels. In: a simplified jaxpr and a ``Target``. Out: a ``Schedule``: launches of fused kernels and opaque equations in
the order of the plan, with the memory of all their values. Backends (``backends/cpu/program.py``,
``backends/cuda/program.py``) compile the kernels and run the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blufunc import _lazy
from blufunc.config import config
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, Var, uses_host
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.ops.offload import offload_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, inline_bodies, keeps_none
from blufunc.kernels import cost
from blufunc.kernels.fusion.fuse import Fusion, Opaque, Region, fuse
from blufunc.kernels.fusion.report import Fused
from blufunc.kernels.loopir.access_map import view_chain
from blufunc.kernels.loopir.index import Index
from blufunc.kernels.loopir.ir import Buffer, Kernel, Lanes, Reduce, Rows, Store, post_order, values_of
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.lower.horizontal_fusion import groups, structure
from blufunc.kernels.lower.region import Lowered
from blufunc.kernels.memory.overlap import Copy, Overlap, order_with_copies, overlapped
from blufunc.kernels.memory.plan import plan
from blufunc.kernels.memory.types import Step as PlanStep
from blufunc.kernels.memory.types import Value
from blufunc.kernels.memory.verify import check_plan
from blufunc.kernels.recompute.remat import Rematerializer
from blufunc.kernels.rewrites.canonicalize import canonicalize, split_column_reductions
from blufunc.kernels.rewrites.gemm_epilogue import with_gemm_epilogues
from blufunc.kernels.rewrites.loops.memories import with_moves_outside, without_moves
from blufunc.kernels.rewrites.loops.unrolled_scans import with_unrolled_scans
from blufunc.kernels.rewrites.unrolled_windows import WINDOWS, with_unrolled_windows
from blufunc.kernels.rewrites.updates_in_place import with_joined_updates, with_updates_in_place
from blufunc.kernels.schedule import GroupStep, KernelStep, OpaqueStep, Schedule, Step, uncollected
from blufunc.kernels.target import Target

with _lazy.modules(
    globals()
):  # for programs with a budget or large reductions, and for targets with epilogues
    from blufunc.kernels.recompute import budget as budgets
    from blufunc.kernels.rewrites import (
        packed_outputs,
        pointwise_epilogue,
        row_gemm,
        split_float32,
        split_float32_attention,
        user_kernel_fusion,
    )
    from blufunc.kernels.rewrites.convolutions import canonical
    from blufunc.kernels.rewrites.loops import branches_to_selects, hoisted_matmuls, loop_invariants
    from blufunc.kernels.rewrites.loops import pointwise_control_flow as point_control
    from blufunc.kernels.rewrites.matmuls import merged_products
    from blufunc.kernels.rewrites.reductions import (
        generated_operands,
        group_reductions,
        partial_reductions,
        short_axes,
    )

Planned = Callable[[Eqn], bool]

_LEAST_SAVING = 1 << 16
"""Bytes that a region must save for rematerialization, in any program."""

_FUSED = frozenset(("elementwise", "reduce", "movement"))
"""Kinds of equations in generated kernels; no library kernel is called for these."""

_REDUCED = 1 << 16
"""Elements of a reduction that takes longer than its launch."""

_ROOMS = 3
"""Plans that are tried to use the room that a budget leaves."""

_COPIED = 1 << 20
"""Bytes up to which values that are copied between memories are grouped.

In a group all values are on the device at once; the copy of larger ones takes several times a launch.
"""

_LARGE = 1 << 24
"""Bytes that a kernel writes in several times the time of a launch."""


def schedule(
    jaxpr: Jaxpr,
    donated: Sequence[bool],
    target: Target,
    planned: Planned,
    keep: Callable[[Eqn], bool] = keeps_none,
) -> Schedule:
    """Plan a program.

    Args:
      jaxpr: simplified, without constants.
      donated: the parameters whose memory results may take.
      target: the machine.
      planned: from an opaque equation to whether it writes its results into planned memory.
      keep: from a call to whether there is a kernel for it, so that it is not inlined; default: for none.
    """
    with uncollected():
        return Planning(jaxpr, donated, target, planned, keep).default()


cost.planner = schedule


def within(planning: Planning, budget: int | None) -> Schedule:
    """The schedule of a program within a budget in bytes, the default one if it fits.

    Raises:
      MemoryBudgetError: none was found; the message says how low the peak would come, and what is alive there.
    """
    with uncollected():
        default = planning.default()
        if budget is None:
            return default
        if default.plan.peak_bytes <= budget:
            return _with_room(planning, budget, default)
        return budgets.Search(planning, budget, default).run()


def _with_room(planning: Planning, budget: int, default: Schedule) -> Schedule:
    """A schedule that fits, whose copies begin earlier if steps would wait for them."""
    if default.overlap is None or not default.overlap.exposed_seconds:
        return default
    best, planning.room = default, budget - default.plan.peak_bytes
    for _ in range(_ROOMS):
        made = planning.schedule(default.jaxpr, fusion=default.fusion)
        if made.plan.peak_bytes <= budget:
            best = min(best, made, key=lambda m: m.overlap.exposed_seconds)  # type: ignore[union-attr]
            break
        planning.room = planning.room * 3 // 4 - (made.plan.peak_bytes - budget)
        if planning.room <= 0:
            break
    planning.room = 0
    return best


class Planning:
    """Planner of a program and its recomputing variants.

    Args:
      jaxpr, donated, target, planned, keep: as of ``schedule``.
      rows: plan the rows of residuals that scans stack, as a budget needs them.

    Attributes:
      jaxpr: the program after the passes that precede fusion.
      origins: the call that recomputes an equation, by equation.
      notes: for reports: optimizations that passes left out, and why.
      room: bytes beyond the peak that copies in may take to begin earlier.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        donated: Sequence[bool],
        target: Target,
        planned: Planned,
        keep: Callable[[Eqn], bool] = keeps_none,
        rows: bool = False,
    ):
        self.target = target
        self.notes: tuple[str, ...] = ()
        self.room = 0
        crosses = uses_host(jaxpr)
        if crosses and not target.machine.host_link:
            jaxpr, crosses = without_moves(jaxpr), False
        plain = all(e.prim.kind in _FUSED and not e.prim.body for e in jaxpr.eqns)
        if target.epilogues and not plain:
            jaxpr, origins = inline_bodies(jaxpr, keep)
            if crosses or rows:
                jaxpr = self._with_rows(jaxpr, origins, rows, keep)
            # unread results of a call are known now, and without them there may be a kernel for it
            jaxpr, _ = inline_bodies(dce(jaxpr, origins=origins), keep, origins)
            jaxpr = _with_hoisted(jaxpr, origins, keep)
            if target.convolutions is not None and any(
                e.prim.name == "conv_general_dilated" for e in jaxpr.eqns
            ):
                jaxpr = canonical.with_convolutions(jaxpr, origins, target.convolutions)
            jaxpr = packed_outputs.with_packed_gradients(
                split_float32_attention.with_split_attention(jaxpr, origins), origins
            )
            if target.splits is not None:
                jaxpr = split_float32.with_split_products(
                    jaxpr, origins, target.splits, target.partial_sums, target.in_one_kernel
                )
            jaxpr = merged_products.with_merged_products(jaxpr, origins, target)
            jaxpr, notes = pointwise_epilogue.with_pointwise_epilogues(jaxpr, origins, target)
            self.notes = (*self.notes, *notes)
            jaxpr = partial_reductions.with_partial_sums(jaxpr, origins, target.rows_of_sums)
        else:
            jaxpr, origins = inline_bodies(jaxpr, keep)
            if crosses or rows:
                jaxpr = self._with_rows(jaxpr, origins, rows, keep)
            jaxpr = _with_hoisted(jaxpr, origins, keep)
        if not WINDOWS.isdisjoint([e.prim for e in jaxpr.eqns]):
            jaxpr = with_unrolled_windows(jaxpr, origins, target.native_windows)
        if target.epilogues and any(e.prim.kind == "kernel" for e in jaxpr.eqns):
            jaxpr = user_kernel_fusion.with_fused_user_kernels(jaxpr, origins)
        if any(e.prim.kind == "control" for e in jaxpr.eqns):
            jaxpr = point_control.with_point_control(jaxpr, origins, target.least_points)
            jaxpr = branches_to_selects.with_selects(jaxpr, origins, target.selected_elements)
        jaxpr = canonicalize(jaxpr, origins, target.batch_first)
        if target.updates_in_place is not None and any(donated):
            jaxpr = with_updates_in_place(jaxpr, donated, origins, target.updates_in_place)
            jaxpr = with_joined_updates(jaxpr, origins) if target.group else jaxpr
        if target.epilogues and not plain:
            jaxpr = row_gemm.with_row_gemms(with_gemm_epilogues(jaxpr, origins), origins, target)
        if any(e.prim.kind == "reduce" and e.invars[0].aval.size >= _REDUCED for e in jaxpr.eqns):
            jaxpr = short_axes.with_unrolled_short_axes(jaxpr, origins)
            if target.generated_columns:
                jaxpr = generated_operands.with_generated_operands(jaxpr, origins, target.machine)
                jaxpr = group_reductions.with_columns_first(jaxpr, origins, target.machine)
        self.jaxpr = split_column_reductions(jaxpr, origins, target.summed_lanes)
        self.origins = origins
        self.donated, self.planned = donated, planned
        self._sorts: dict[Eqn, str] = {}  # variants share most equations

    def _with_rows(self, jaxpr: Jaxpr, origins: Origins, rows: bool, keep: Callable[[Eqn], bool]) -> Jaxpr:
        """The program with moves, and the rows of scans that it moves, outside of bodies."""
        unrolled = with_unrolled_scans(jaxpr, origins, self.target.machine if rows else None)
        if unrolled is not jaxpr:
            jaxpr, _ = inline_bodies(unrolled, keep, origins)
        jaxpr, self.notes = with_moves_outside(jaxpr, origins)
        return jaxpr

    def default(self) -> Schedule:
        """The schedule; it recomputes cheap values if memory is scarce."""
        if not self.target.recompute:
            return self.schedule(self.jaxpr)
        first = self.schedule(self.jaxpr, estimate=True, search=False)
        recomputing = _recomputing(first, self.origins, self.target)
        if recomputing is not self.jaxpr:
            made = self.schedule(recomputing)
            if made.plan.peak_bytes <= first.plan.peak_bytes:
                return made  # otherwise recomputation needs more than it saves
        return self.schedule(self.jaxpr, fusion=first.fusion)

    def schedule(
        self,
        jaxpr: Jaxpr,
        origins: Origins | None = None,
        fusion: Fusion | None = None,
        estimate: bool = False,
        search: bool = True,
    ) -> Schedule:
        """The schedule of a variant; default: with the origins of the program, fused here.

        Args:
          estimate: plan the ungrouped steps and their memory, without kernels.
          search: search for the best packing.
        """
        common = max(self.origins.values(), default=0)
        origins = self.origins if origins is None else origins
        target = self.target
        if fusion is None:
            fusion = fuse(jaxpr, origins, self._sorts, target.summed_lanes, target.recompute, target.in_order)
            if target.ordered is not None:
                fusion.steps = target.ordered(fusion.steps)
        chosen = {e: n for e, n in origins.items() if n > common}
        return _Scheduler(self, jaxpr, fusion, chosen).run(estimate, search)


def _with_hoisted(jaxpr: Jaxpr, origins: Origins, keep: Callable[[Eqn], bool]) -> Jaxpr:
    """A program with what need not run in its loops taken out of them."""
    if not any(e.prim.kind == "control" for e in jaxpr.eqns):
        return jaxpr
    jaxpr = loop_invariants.with_hoisted_invariants(jaxpr, origins, keep)
    return hoisted_matmuls.with_hoisted_matmuls(jaxpr, origins, keep)


def _recomputing(first: Schedule, origins: dict[Eqn, int], target: Target) -> Jaxpr:
    """The program of a first plan, with cheap values recomputed after its peak."""
    if first.plan.peak_step is None or first.plan.peak_bytes < target.scarce_bytes:
        return first.jaxpr
    fusion = replace(first.fusion, jaxpr=first.fusion.in_order())
    position = {id(e): i for i, e in enumerate(fusion.jaxpr.eqns)}
    step = first.peak
    at_peak = [step.eqn] if isinstance(step, OpaqueStep) else step.region.eqns if step else []
    last = max((position[id(e)] for e in at_peak), default=len(position))
    return Rematerializer(fusion, last, origins, max(_LEAST_SAVING, first.plan.arena_bytes >> 9)).run()


class _Scheduler:
    def __init__(self, planning: Planning, jaxpr: Jaxpr, fusion: Fusion, chosen: Origins):
        self.jaxpr, self.donated, self.target = jaxpr, planning.donated, planning.target
        self.planned, self.room = planning.planned, planning.room
        self.chosen = chosen  # origins of a variant's recomputed equations: only those of one are grouped
        self.fusion = fusion
        self.lowered = Lowered(fusion, self.target)
        self.values: list[Var | Scratch] = []
        self.ids: dict[Any, int] = {}
        self.steps: list[Step] = []
        self.plan_steps: list[PlanStep] = []
        self.unplanned: set[int] = set()
        self.aliases: dict[int, int] = {}
        self.passed: dict[int, int] = {}  # by alias, the plan step that makes it
        self.index: dict[int, int] = {}  # by step of the fusion, its last plan step

    def run(self, estimate: bool, search: bool) -> Schedule:
        inputs = [self.id_of(v) for v in self.jaxpr.invars]
        for step in self.fusion.steps:
            if isinstance(step, Region):
                self.estimate_region(step) if estimate else self.add_region(step)
            else:
                self.add_opaque(step)
            self.index[id(step)] = len(self.plan_steps) - 1
        outputs: list[Literal | int] = [
            a if isinstance(a, Literal) else self.id_of(a) for a in self.jaxpr.outvars
        ]
        if self.target.group and not estimate:
            self.group()
        values = self.plan_values(set(inputs), outputs, labels=not estimate)
        copies = self.copies()
        price = self.overlap(copies, values) if copies else None
        made = plan(self.plan_steps, values, reorder=not copies, search=search)
        if config.check:
            check_plan(made, self.plan_steps, values)
        return Schedule(
            self.jaxpr,
            self.fusion,
            [self.steps[i] for i in made.order],
            self.values,
            {v: i for v, i in self.ids.items() if isinstance(v, Var)},
            made,
            inputs,
            outputs,
            self.unplanned,
            self.aliases,
            None if made.peak_step is None else self.steps[made.peak_step],
            overlap=price,
        )

    def copies(self) -> dict[int, Copy]:
        """The steps that copy between memories, by index."""
        found = {}
        for n, step in enumerate(self.steps):
            if isinstance(step, OpaqueStep) and step.eqn.prim is offload_p and step.results[0] is not None:
                out = step.eqn.params["dst"] != DEVICE
                (operand,) = step.operands
                if not out:
                    value = step.results[0]
                elif isinstance(operand, tuple):
                    value = operand[0]
                else:
                    continue  # a constant
                nbytes, machine = step.eqn.outvars[0].aval.nbytes, self.target.machine
                found[n] = Copy(out, value, nbytes, machine.copy + nbytes / machine.host_link)
        return found

    def overlap(self, copies: dict[int, Copy], values: list[Value]) -> Overlap:
        """Put the steps in an order in which copies overlap with the others."""
        launches = Counter(id(s.region) for s in self.steps if isinstance(s, KernelStep))
        share = lambda s: launches[id(s.region)] if isinstance(s, KernelStep) else 1
        seconds = [
            0.0 if n in copies else cost.step_seconds(s, self.target.machine) / share(s)
            for n, s in enumerate(self.steps)
        ]
        order = order_with_copies(self.plan_steps, values, copies)
        order, self.plan_steps, price = overlapped(order, self.plan_steps, values, copies, seconds, self.room)
        self.steps = [self.steps[i] for i in order]
        return price

    def id_of(self, v: Var | Scratch) -> int:
        """The id of a value."""
        if v not in self.ids:
            self.ids[v] = len(self.values)
            self.values.append(v)
        return self.ids[v]

    def add_region(self, region: Region) -> None:
        for launch in self.lowered.launches(region):
            buffers = launch.kernel.buffers
            ids = tuple(self.id_of(launch.operands[b]) for b in buffers)
            reads, writes = (
                [i for b, i in zip(buffers, ids, strict=True) if b.written is w] for w in (False, True)
            )
            pairs = [
                (ids[buffers.index(out)], ids[buffers.index(into)])
                for out, into in same_place(launch.kernel)
                if into not in launch.starts  # a part of a value: other steps may read the rest
            ]
            self.add(KernelStep(launch, ids, region), reads, writes, pairs)

    def add(
        self,
        step: Step,
        reads: Sequence[int],
        writes: Sequence[int],
        pairs: Sequence[tuple[int, int]],
        after: Sequence[int] = (),
    ) -> None:
        """Add a step; it also waits for the steps that make the aliases that it reads."""
        self.steps.append(step)
        passed = dict.fromkeys(self.passed[r] for r in reads if r in self.passed)
        self.plan_steps.append(PlanStep(tuple(reads), tuple(writes), tuple(pairs), after=(*after, *passed)))

    def estimate_region(self, region: Region) -> None:
        """Add a step whose results may overwrite operands of the same size."""
        reads, writes = ([self.id_of(v) for v in vs] for vs in (region.inputs, region.outputs))
        size = lambda i: _nbytes(self.values[i])
        pairs = [(w, r) for w in writes for r in reads if size(w) == size(r)]
        self.add(KernelStep(None, (), region), reads, writes, pairs)  # type: ignore[arg-type]

    def group(self) -> None:
        """Group structurally identical kernels."""
        results = {a for a in self.jaxpr.outvars if a.__class__ is not Literal}
        moved = {c.value for c in self.copies().values() if c.nbytes > _COPIED}
        keys = [
            None
            if self.is_large(p, results) or not moved.isdisjoint((*p.reads, *p.writes))
            else self.group_of(s)
            for s, p in zip(self.steps, self.plan_steps, strict=True)
        ]
        deferred = [n for n, s in enumerate(self.steps) if isinstance(s, OpaqueStep) and _is_deferred(s.eqn)]
        steps: list[Step] = []
        plan_steps: list[PlanStep] = []
        index: dict[int, int] = {}
        for members in groups(keys, self.plan_steps, deferred):
            index.update((i, len(steps)) for i in members)
            if len(members) == 1:
                steps.append(self.steps[members[0]])
                plan_steps.append(self.plan_steps[members[0]])
                continue
            steps.append(GroupStep(tuple(self.steps[i] for i in members)))  # type: ignore[misc]
            parts = [self.plan_steps[i] for i in members]
            readers = Counter(r for p in parts for r in set(p.reads))
            plan_steps.append(
                PlanStep(
                    tuple(dict.fromkeys(r for p in parts for r in p.reads)),
                    tuple(w for p in parts for w in p.writes),
                    # a value that another member reads must not be overwritten
                    tuple(pair for p in parts for pair in p.inplace if readers[pair[1]] == 1),
                    after=tuple(dict.fromkeys(a for p in parts for a in p.after)),
                )
            )
        self.plan_steps = [replace(p, after=tuple(index[a] for a in p.after)) for p in plan_steps]
        self.steps = steps

    def group_of(self, step: Step) -> Any:
        """The key of steps that may be grouped; parts of one origin, for a variant."""
        found = structure(step.kernel) if isinstance(step, KernelStep) else None
        if found is None or not self.chosen:
            return found
        return found, frozenset(self.chosen.get(e, 0) for e in step.region.eqns)  # type: ignore[union-attr]

    def add_opaque(self, step: Opaque) -> None:
        eqn = step.eqn
        operands: list[Literal | tuple[int, list[Eqn]]] = []
        for a in eqn.invars:
            if a.__class__ is Literal:
                operands.append(a)  # type: ignore[arg-type]
                continue
            in_memory = a in step.inputs or a not in self.fusion.virtual
            chain = [] if in_memory else view_chain(a, self.fusion.virtual)  # type: ignore[arg-type]
            assert chain is not None
            operands.append((self.id_of(chain[0].invars[0] if chain else a), chain))  # type: ignore[arg-type]
        passes = eqn.prim is optimization_barrier_p and not is_replaced(eqn.prim, "impl")
        planned = passes or self.planned(eqn)
        results: list[int | None] = []
        for n, v in enumerate(eqn.outvars):
            if isinstance(v, DropVar):
                results.append(None)
                continue
            results.append(self.id_of(v))
            if passes and operands[n].__class__ is tuple and not operands[n][1]:  # type: ignore[index]
                self.aliases[self.id_of(v)] = operands[n][0]  # type: ignore[index]
            elif not planned or passes:
                self.unplanned.add(self.id_of(v))
        nbytes = self.target.scratch_bytes(eqn) if planned else 0
        scratch = self.id_of(Scratch(dtypes.uint8, nbytes, f"scratch of {eqn.prim.name}")) if nbytes else None
        overlapped = None if step.overlapped is None else step.overlapped.eqn
        reads = [o[0] for o in operands if isinstance(o, tuple)]
        after = [self.index[id(s)] for s in (step.after, step.overlapped) if s is not None]
        writes = [r for r in (*results, scratch) if r is not None and r not in self.aliases]
        self.passed.update((r, len(self.plan_steps)) for r in results if r in self.aliases)  # type: ignore[misc]
        pairs = self.overwritten(eqn, operands, results) if planned else ()
        opaque = OpaqueStep(eqn, operands, results, planned and not passes, scratch, overlapped)
        self.add(opaque, reads, writes, pairs, after)

    def overwritten(self, eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> tuple:
        """Results of an opaque step, and operands that they may overwrite."""
        read = Counter(self.root(o[0]) for o in operands if isinstance(o, tuple))
        return tuple(
            (results[m], operands[n][0])
            for m, n in self.target.overwritten(eqn)
            if results[m] is not None
            and isinstance(operands[n], tuple)
            and not operands[n][1]
            and read[self.root(operands[n][0])] == 1
        )

    def root(self, value: int) -> int:
        """The value itself, or the one that it is an alias of."""
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def is_large(self, step: PlanStep, results: set) -> bool:
        """True if a step writes too much, besides results, to be grouped.

        In a group all that its members write is alive at once, which costs more than a launch.
        """
        made = (self.values[w] for w in step.writes)
        return sum(_nbytes(v) for v in made if v not in results) > _LARGE

    def plan_values(self, inputs: set[int], outputs: Sequence[Literal | int], labels: bool) -> list[Value]:
        # results stay until the end; of an alias, its root
        returned = {self.root(o) for o in outputs if isinstance(o, int)}
        given = {
            self.id_of(v)
            for v, d in zip(self.jaxpr.invars, self.donated, strict=True)
            if d and v.aval.ndim  # scalars may be shared
        } - returned
        results = returned - inputs
        makers = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        paths = dict(zip(self.jaxpr.invars, self.jaxpr.arg_names, strict=False))  # names may be missing
        out = []
        for i, v in enumerate(self.values):
            if isinstance(v, Scratch):
                out.append(Value(v.nbytes, "temp", v.label))
                continue
            size = 0 if self.root(i) in self.unplanned else _nbytes(v)
            kind = "temp"
            if i in inputs:
                kind = "donated" if i in given else "argument"
            elif i in results and i not in self.unplanned:
                kind = "output"
            label, eqn = "", makers.get(v)
            if labels and eqn is None:
                label = f"{v.aval} {paths.get(v) or 'argument'}"
            elif labels:
                label = f"{v.aval} {eqn.prim.name} at {source.summary(eqn.source)}"  # type: ignore[union-attr]
            out.append(Value(size, kind, label, self.aliases.get(i), v.aval.memory != DEVICE))
        return out


def _is_deferred(eqn: Eqn) -> bool:
    """True for a collective that overlaps later steps: nothing may delay it."""
    return eqn.prim.kind == "collective" and eqn.prim.deferred  # type: ignore[attr-defined]


def _nbytes(v: Var | Scratch) -> int:
    return v.nbytes if isinstance(v, Scratch) else v.aval.nbytes


def same_place(kernel: Kernel) -> list[tuple[Buffer, Buffer]]:
    """The outputs and inputs of a kernel that may be one array, as (output, input).

    Every element of the input must be read for the last time where its replacement is written. A write once per row,
    outside its lanes, must follow all lanes' reads: lanes synchronize in reductions.
    """
    return kernel.memoised("same place", lambda: _same_place(kernel))


def _same_place(kernel: Kernel) -> list[tuple[Buffer, Buffer]]:
    stores: dict[Buffer, list[tuple[int, Store]]] = {}
    loads: dict[Buffer, list[tuple[int, Index, Any]]] = {}
    of_lanes: set[int] = set()  # positions of loops over lanes
    barriers: list[int] = []  # positions of those at whose ends all lanes have synchronized
    position = 0

    def visit(body: Sequence[Any]) -> None:
        nonlocal position
        for s in body:
            if isinstance(s, (Lanes, Rows)):
                position += 1
                if isinstance(s, Lanes):
                    of_lanes.add(position)
                    barriers.extend([position] * any(isinstance(t, Reduce) for t in s.body))
                visit(s.body)
                position += 1
                continue
            if isinstance(s, Store):
                stores.setdefault(s.buffer, []).append((position, s))
            for v in post_order(values_of(s)):
                if v.op == "load":
                    loads.setdefault(v.attr[0], []).append((position, v.attr[1], s))

    def ready(read: int, written: int) -> bool:
        alone = read not in of_lanes or written in of_lanes
        return read <= written and (alone or any(read <= m < written for m in barriers))

    def replaced(written: Sequence[tuple[int, Store]], load: tuple[int, Index, Any]) -> bool:
        read, index, user = load
        if len(written) == 1:
            at, store = written[0]
            return index == store.index and ready(read, at)
        # each part of a joined array replaces what it alone was computed from
        return pointwise and any(user is store and index == store.index for _, store in written)

    pointwise = all(isinstance(s, Store) for s in kernel.body) and not kernel.finish
    visit(kernel.body)
    position = 1 << 30
    visit(kernel.finish)
    pairs = []
    for out, written in stores.items():
        if any(store.guard is not None for _, store in written):
            continue
        for b in kernel.buffers:
            if b.written or b.size != out.size or b.dtype.itemsize != out.dtype.itemsize:
                continue
            if all(replaced(written, load) for load in loads.get(b, ())):
                pairs.append((out, b))
    return pairs


def fused(made: Schedule) -> Fused:
    """The fusion of a program, its steps indexed in launch order."""
    numbers: dict[int, int] = {}
    for n, step in enumerate(made.steps):
        for member in step.members if isinstance(step, GroupStep) else (step,):
            numbers.setdefault(id(member.eqn if isinstance(member, OpaqueStep) else member.region), n)
    return Fused(made.fusion, numbers)


def show_stages(made: Schedule, name: str, **more: Callable[[], str]) -> None:
    """Print the stages of a program that ``config.debug`` names.

    ``more``: the stages that a backend adds, and their text.
    """
    stages: dict[str, Callable[[], object]] = {
        "fusion": lambda: fused(made),
        "loopir": lambda: "\n".join(dict.fromkeys(map(str, made.kernels))) or "no kernels",
        **more,
        "memory": made.plan.report,
    }
    for stage, text in stages.items():
        if config.shows(stage):
            config.show(f"{stage} of {name or 'program'}:\n{text()}")
