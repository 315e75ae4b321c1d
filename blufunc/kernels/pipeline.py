"""Stages 5 to 7 for any device: a jaxpr becomes steps over planned memory.

Kernels. In: a simplified jaxpr and a ``Target``. Out: a ``Schedule``: launches of fused kernels and opaque
equations, in the order of the plan, with the place in memory of everything they touch. What is left to a backend
(``backends/cpu/program.py``, ``backends/cuda/program.py``) is to compile the kernels and to run the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blufunc import _lazy
from blufunc.config import config
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, inline_bodies
from blufunc.kernels import cost
from blufunc.kernels.fusion.fuse import Fusion, Opaque, Region, fuse
from blufunc.kernels.fusion.report import Fused
from blufunc.kernels.loopir.access_map import view_chain
from blufunc.kernels.loopir.index import Index
from blufunc.kernels.loopir.ir import Buffer, Kernel, Lanes, Reduce, Rows, Store, post_order, values_of
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.lower.horizontal_fusion import groups, structure
from blufunc.kernels.lower.region import Lowered
from blufunc.kernels.memory.plan import plan
from blufunc.kernels.memory.types import Step as PlanStep
from blufunc.kernels.memory.types import Value
from blufunc.kernels.memory.verify import check_plan
from blufunc.kernels.ops.gemm import overwritten_by
from blufunc.kernels.recompute.remat import rematerialise
from blufunc.kernels.rewrites.canonicalize import rewrite, with_columns_apart
from blufunc.kernels.rewrites.gemm_epilogue import with_epilogues
from blufunc.kernels.schedule import GroupStep, KernelStep, OpaqueStep, Schedule, Step, uncollected
from blufunc.kernels.target import Target

with _lazy.modules(globals()):  # for programs with a budget, and for targets with epilogues
    from blufunc.kernels.recompute import budget as budgets
    from blufunc.kernels.rewrites import (
        packed_outputs,
        partial_reductions,
        pointwise_epilogue,
        split_float32,
        split_float32_attention,
        user_kernel_fusion,
    )
    from blufunc.kernels.rewrites import pointwise_control_flow as point_control

Planned = Callable[[Eqn], bool]

_LEAST_SAVING = 1 << 16
"""Bytes below which nothing is computed again, however small a program is."""


_FUSED = frozenset(("elementwise", "reduce", "movement"))
"""Kinds of equations in generated kernels: programs of these alone have no library kernel to fuse or to call."""

_LARGE = 1 << 24
"""Bytes that a kernel writes in several times the time of a launch."""


def schedule(
    jaxpr: Jaxpr,
    donated: Sequence[bool],
    target: Target,
    planned: Planned,
    keep: Callable[[Eqn], bool] = lambda eqn: False,
) -> Schedule:
    """Plan a program.

    Args:
      jaxpr: simplified, without constants.
      donated: the parameters whose memory results may take.
      target: the machine.
      planned: whether an opaque equation writes its results into memory that it is given.
      keep: for which calls there is a kernel, so that they are not replaced by their bodies.
    """
    with uncollected():
        return Planning(jaxpr, donated, target, planned, keep).default()


cost.planner = schedule


def within(planning: Planning, budget: int | None) -> Schedule:
    """The schedule of a program whose planned peak is within a budget in bytes, if there is one.

    It is the default schedule where that is within the budget.

    Raises:
      MemoryBudgetError: none was found; the message says how low the peak would come, and what is alive there.
    """
    with uncollected():
        default = planning.default()
        if budget is None or default.plan.peak_bytes <= budget:
            return default
        return budgets.search(planning, budget, default)


class Planning:
    """A program for which plans can be made, and for variants of which that compute something again.

    Args:
      jaxpr, donated, target, planned, keep: as of ``schedule``.

    Attributes:
      jaxpr: what the passes before fusion made of the program.
      origins: for equations, the call that computes them again.
      notes: why passes left out what they could have done, for people.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        donated: Sequence[bool],
        target: Target,
        planned: Planned,
        keep: Callable[[Eqn], bool] = lambda eqn: False,
    ):
        self.notes: tuple[str, ...] = ()
        plain = all(e.prim.kind in _FUSED and not e.prim.body for e in jaxpr.eqns)
        if target.epilogues and not plain:
            jaxpr, origins = inline_bodies(jaxpr, keep)
            # what nobody reads of a call is known now, and may be why there is no kernel for it
            jaxpr, _ = inline_bodies(dce(jaxpr, origins=origins), keep, origins)
            jaxpr = packed_outputs.with_packed_gradients(
                split_float32_attention.with_split_attention(jaxpr, origins), origins
            )
            if target.splits is not None:
                jaxpr = split_float32.with_split_products(
                    jaxpr, origins, target.splits, target.partial_sums, target.in_one_kernel
                )
            jaxpr, self.notes = pointwise_epilogue.with_pointwise_epilogues(jaxpr, origins, target)
            jaxpr = partial_reductions.with_partial_sums(jaxpr, origins, target.rows_of_sums)
        else:
            jaxpr, origins = inline_bodies(jaxpr, keep)
        if target.epilogues and any(e.prim.kind == "kernel" for e in jaxpr.eqns):
            jaxpr = user_kernel_fusion.with_fused_user_kernels(jaxpr, origins)
        if any(e.prim.kind == "control" for e in jaxpr.eqns):
            jaxpr = point_control.with_point_control(jaxpr, origins)
        jaxpr = rewrite(jaxpr, origins, target.batch_first)
        jaxpr = with_epilogues(jaxpr, origins) if target.epilogues and not plain else jaxpr
        self.jaxpr = with_columns_apart(jaxpr, origins, target.summed_lanes)
        self.origins, self.target = origins, target
        self._donated, self._planned = donated, planned
        self._sorts: dict[Eqn, str] = {}  # variants have mostly the same equations

    def default(self) -> Schedule:
        """The schedule, with what is cheap computed again where memory is scarce."""
        if not self.target.recompute:
            return self.schedule(self.jaxpr)
        first = self.estimate(self.jaxpr, search=False)
        again = _recomputing(first, self.origins, self.target)
        if again is not self.jaxpr:
            made = self.schedule(again)
            if made.plan.peak_bytes <= first.plan.peak_bytes:
                return made  # else, what is computed again needs more than it is worth
        return self.schedule(self.jaxpr, fusion=first.fusion)

    def schedule(
        self, jaxpr: Jaxpr, origins: Origins | None = None, fusion: Fusion | None = None
    ) -> Schedule:
        """The schedule of a variant, which may have origins of its own; ``fusion`` is its own, if there is one yet."""
        return self._scheduler(jaxpr, origins, fusion).run()

    def estimate(self, jaxpr: Jaxpr, origins: Origins | None = None, search: bool = True) -> Schedule:
        """The steps of a variant, none of them a group, and their memory, but no kernels.

        ``search``: whether to look for long for a packing of it, as a schedule does.
        """
        return self._scheduler(jaxpr, origins).run(estimate=True, search=search)

    def _scheduler(self, jaxpr: Jaxpr, origins: Origins | None, fusion: Fusion | None = None) -> _Scheduler:
        common = max(self.origins.values(), default=0)
        origins = self.origins if origins is None else origins
        apart = {e: n for e, n in origins.items() if n > common}
        target = self.target
        if fusion is None:
            fusion = fuse(jaxpr, origins, self._sorts, target.summed_lanes, target.recompute)
            if target.ordered is not None:
                fusion.steps = target.ordered(fusion.steps)
        return _Scheduler(jaxpr, fusion, self._donated, self.target, self._planned, apart)


def _recomputing(first: Schedule, origins: dict[Eqn, int], target: Target) -> Jaxpr:
    """The program with what is cheap computed again behind the peak of a first plan."""
    if first.plan.peak_step is None or first.plan.peak_bytes < target.scarce_bytes:
        return first.jaxpr
    worth = max(_LEAST_SAVING, first.plan.arena_bytes >> 9)
    fusion = replace(first.fusion, jaxpr=first.fusion.in_order())
    return rematerialise(fusion, _position(first, fusion.jaxpr), origins, worth)


def _position(made: Schedule, jaxpr: Jaxpr) -> int:
    """The last equation that has run when the peak of memory is reached."""
    position = {id(e): i for i, e in enumerate(jaxpr.eqns)}
    step = made.peak
    eqns = [step.eqn] if isinstance(step, OpaqueStep) else step.region.eqns if step else []
    return max((position[id(e)] for e in eqns), default=len(position))


class _Scheduler:
    def __init__(
        self, jaxpr: Jaxpr, fusion: Fusion, donated: Sequence[bool], target: Target, planned: Planned, apart
    ):
        self.jaxpr, self.donated, self.target, self.planned = jaxpr, donated, target, planned
        self.apart: Origins = apart  # of equations of a variant: those of one origin alone are grouped
        self.fusion = fusion
        self.lowered = Lowered(self.fusion, target)
        self.values: list[Var | Scratch] = []
        self.ids: dict[Any, int] = {}
        self.steps: list[Step] = []
        self.plan_steps: list[PlanStep] = []
        self.unplanned: set[int] = set()
        self.aliases: dict[int, int] = {}
        self.passed: dict[int, int] = {}  # the plan steps that make aliases
        self.index: dict[int, int] = {}  # of the steps of the fusion: the plan step that ends it

    def run(self, estimate: bool = False, search: bool = True) -> Schedule:
        """The schedule; an estimate has the steps and their memory, but no kernels."""
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
        made = plan(self.plan_steps, values, search=search)
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
        )

    def id_of(self, v: Var | Scratch) -> int:
        """The number of a value."""
        if v not in self.ids:
            self.ids[v] = len(self.values)
            self.values.append(v)
        return self.ids[v]

    def add_region(self, region: Region) -> None:
        for launch in self.lowered.launches(region):
            buffers = launch.kernel.buffers
            ids = tuple(self.id_of(launch.operands[b]) for b in buffers)
            self.steps.append(KernelStep(launch, ids, region))
            reads = [i for b, i in zip(buffers, ids, strict=True) if not b.written]
            writes = [i for b, i in zip(buffers, ids, strict=True) if b.written]
            pairs = tuple(
                (ids[buffers.index(out)], ids[buffers.index(into)])
                for out, into in same_place(launch.kernel)
                if into not in launch.starts  # of which there is more, that others may read
            )
            self.plan_steps.append(PlanStep(tuple(reads), tuple(writes), pairs, after=self.behind(reads)))

    def behind(self, reads: Sequence[int]) -> tuple[int, ...]:
        """The steps that let values stand for others which are read: nobody writes those."""
        return tuple(dict.fromkeys(self.passed[r] for r in reads if r in self.passed))

    def estimate_region(self, region: Region) -> None:
        """A step for the plan: values of one size may be in place of each other."""
        reads, writes = ([self.id_of(v) for v in vs] for vs in (region.inputs, region.outputs))
        size = lambda i: _nbytes(self.values[i])
        pairs = tuple((w, r) for w in writes for r in reads if size(w) == size(r))
        self.steps.append(KernelStep(None, (), region))  # type: ignore[arg-type]
        self.plan_steps.append(PlanStep(tuple(reads), tuple(writes), pairs, after=self.behind(reads)))

    def group(self) -> None:
        """Put kernels of one structure together."""
        results = {a for a in self.jaxpr.outvars if a.__class__ is not Literal}
        keys = [
            None if self.is_large(p, results) else self.group_of(s)
            for s, p in zip(self.steps, self.plan_steps, strict=True)
        ]
        deferred = [n for n, s in enumerate(self.steps) if isinstance(s, OpaqueStep) and _is_deferred(s.eqn)]
        steps: list[Step] = []
        plan_steps: list[PlanStep] = []
        number: dict[int, int] = {}
        for members in groups(keys, self.plan_steps, deferred):
            number.update((i, len(steps)) for i in members)
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
                    # what others of the group read too must not be written over
                    tuple(pair for p in parts for pair in p.inplace if readers[pair[1]] == 1),
                    after=tuple(dict.fromkeys(a for p in parts for a in p.after)),
                )
            )
        self.plan_steps = [replace(p, after=tuple(number[a] for a in p.after)) for p in plan_steps]
        self.steps = steps

    def group_of(self, step: Step) -> Any:
        """What steps of one group have in common. Of what a variant computes again, each part has its own time."""
        found = structure(step.kernel) if isinstance(step, KernelStep) else None
        if found is None or not self.apart:
            return found
        return found, frozenset(self.apart.get(e, 0) for e in step.region.eqns)  # type: ignore[union-attr]

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
        passes = eqn.prim is optimization_barrier_p
        planned = passes or (self.planned(eqn) and not is_replaced(eqn.prim, "impl"))
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
        wanted = self.target.scratch_bytes(eqn) if planned else 0
        scratch = (
            self.id_of(Scratch(dtypes.uint8, wanted, f"what {eqn.prim.name} works in")) if wanted else None
        )
        beside = None if step.overlapped is None else step.overlapped.eqn
        self.steps.append(OpaqueStep(eqn, operands, results, planned and not passes, scratch, beside))
        reads = [o[0] for o in operands if isinstance(o, tuple)]
        after = [self.index[id(s)] for s in (step.after, step.overlapped) if s is not None]
        writes = [r for r in (*results, scratch) if r is not None and r not in self.aliases]
        self.passed.update((r, len(self.plan_steps)) for r in results if r in self.aliases)  # type: ignore[misc]
        pairs = self.overwritten(eqn, operands, results) if planned else ()
        self.plan_steps.append(
            PlanStep(tuple(reads), tuple(writes), pairs, after=(*after, *self.behind(reads)))
        )

    def overwritten(self, eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> tuple:
        """The results and the operands of an opaque step that may be one array."""
        read = Counter(self.root(o[0]) for o in operands if isinstance(o, tuple))
        return tuple(
            (results[m], operands[n][0])
            for m, n in overwritten_by(eqn)
            if results[m] is not None
            and isinstance(operands[n], tuple)
            and read[self.root(operands[n][0])] == 1
        )

    def root(self, value: int) -> int:
        """The value itself, or the one that it stands for."""
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def is_large(self, step: PlanStep, results: set) -> bool:
        """Whether a step writes so much besides results that a launch less is worth less than memory: in a group all
        that its members write is alive at once."""
        made = (self.values[w] for w in step.writes)
        return sum(_nbytes(v) for v in made if v not in results) > _LARGE

    def plan_values(self, inputs: set[int], outputs: Sequence[Literal | int], labels: bool) -> list[Value]:
        # what is returned stays until the end; of what stands for another value, that value
        returned = {self.root(o) for o in outputs if isinstance(o, int)}
        given = {
            self.id_of(v)
            for v, d in zip(self.jaxpr.invars, self.donated, strict=True)
            if d and v.aval.ndim  # numbers are never taken: others may hold them
        } - returned
        results = returned - inputs
        makers = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        paths = dict(
            zip(self.jaxpr.invars, self.jaxpr.arg_names, strict=False)
        )  # none where nobody gave them
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
            label = self.label(v, makers.get(v), paths.get(v)) if labels else ""
            out.append(Value(size, kind, label, self.aliases.get(i)))
        return out

    def label(self, v: Var, eqn: Eqn | None, path: str | None) -> str:
        """What a variable is, for people who read plans."""
        if eqn is None:
            return f"{v.aval} {path or 'argument'}"
        return f"{v.aval} {eqn.prim.name} at {source.summary(eqn.source)}"


def _is_deferred(eqn: Eqn) -> bool:
    """Whether it is an exchange that runs beside the steps behind it: those before it should not be delayed."""
    return eqn.prim.kind == "collective" and eqn.prim.deferred  # type: ignore[attr-defined]


def _nbytes(v: Var | Scratch) -> int:
    return v.nbytes if isinstance(v, Scratch) else v.aval.size * v.aval.dtype.itemsize


def same_place(kernel: Kernel) -> list[tuple[Buffer, Buffer]]:
    """The outputs and inputs of a kernel that may be one array, as (output, input).

    Every element of the input must be read, for the last time, where the element that takes its place is written.
    What is written once for a row, beside its lanes, must wait for all lanes that read it: they meet in reductions.
    """
    return kernel.memoised("same place", lambda: _same_place(kernel))


def _same_place(kernel: Kernel) -> list[tuple[Buffer, Buffer]]:
    stores: dict[Buffer, list[tuple[int, Store]]] = {}
    loads: dict[Buffer, list[tuple[int, Index]]] = {}
    of_lanes: set[int] = set()  # the positions of loops over lanes
    meetings: list[int] = []  # of those at whose ends all lanes have met
    position = 0

    def visit(body: Sequence[Any]) -> None:
        nonlocal position
        for s in body:
            if isinstance(s, (Lanes, Rows)):
                position += 1
                if isinstance(s, Lanes):
                    of_lanes.add(position)
                    meetings.extend([position] * any(isinstance(t, Reduce) for t in s.body))
                visit(s.body)
                position += 1
                continue
            if isinstance(s, Store):
                stores.setdefault(s.buffer, []).append((position, s))
            for v in post_order(values_of(s)):
                if v.op == "load":
                    loads.setdefault(v.attr[0], []).append((position, v.attr[1]))

    def ready(read: int, written: int) -> bool:
        alone = read not in of_lanes or written in of_lanes
        return read <= written and (alone or any(read <= m < written for m in meetings))

    visit(kernel.body)
    position = 1 << 30
    visit(kernel.finish)
    pairs = []
    for out, written in stores.items():
        if len(written) != 1 or written[0][1].guard is not None:
            continue
        at, store = written[0]
        for b in kernel.buffers:
            if b.written or b.size != out.size or b.dtype.itemsize != out.dtype.itemsize:
                continue
            if all(i == store.index and ready(p, at) for p, i in loads.get(b, ())):
                pairs.append((out, b))
    return pairs


def fused(made: Schedule) -> Fused:
    """The fusion of a program, its steps numbered as they are launched."""
    numbers: dict[int, int] = {}
    for n, step in enumerate(made.steps):
        for member in step.members if isinstance(step, GroupStep) else (step,):
            numbers.setdefault(id(member.eqn if isinstance(member, OpaqueStep) else member.region), n)
    return Fused(made.fusion, numbers)


def show_stages(made: Schedule, name: str, **more: Callable[[], str]) -> None:
    """Print how a program was fused, its kernels as LoopIR, and its memory, as far as ``config.debug`` asks for it.

    ``more``: stages that a backend adds, and their text.
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
