"""Time of a planned program on two streams: computation and collectives.

Parallel, above the planner, used by ``plan.py``. In: the report on a local program, and times of its steps. Out:
seconds. Steps begin as in the graph that the CUDA executor captures: computation in order, collectives in order, and
each step after those that touch the same bytes (``streams.dependencies``), so memory that the plan reuses delays a
collective too. A loop is one step; where its body communicates, it takes the time of the body on both streams, once
per iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc.core.ir.jaxpr import Eqn, subjaxprs
from blufunc.kernels.backends.cuda.library.control_flow.bodies import nested
from blufunc.kernels.backends.cuda.streams import Access, Task, dependencies
from blufunc.kernels.cost import StepCost
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.schedule import OpaqueStep, Schedule, Step, accesses
from blufunc.parallel.collectives.primitives import communicates, equations

Work = Callable[[StepCost], float]
Communicate = Callable[[Eqn], float]


def scheduled_seconds(sight: Sight, work: Work, communicate: Communicate) -> float:
    """Seconds of a program whose collectives overlap with its computation.

    Args:
      sight: the report on the local program.
      work: the seconds of a step that computes.
      communicate: the seconds of a collective.
    """
    return _makespan(sight.schedule, *step_seconds(sight, work, communicate))


def step_seconds(sight: Sight, work: Work, communicate: Communicate) -> tuple[list[float], list[bool]]:
    """The seconds of each step, and whether it is a collective by itself."""
    collective = [
        isinstance(s, OpaqueStep) and s.eqn.prim.kind == "collective" and communicates(s.eqn)
        for s in sight.schedule.steps
    ]
    seconds = [
        communicate(s.eqn) if alone else _seconds(s, row, sight, work, communicate)  # type: ignore[union-attr]
        for s, row, alone in zip(sight.schedule.steps, sight.cost.steps, collective, strict=True)
    ]
    return seconds, collective


def _makespan(schedule: Schedule, seconds: Sequence[float], collective: Sequence[bool]) -> float:
    """The end of the last step: computation on one stream, collectives on the other."""
    roots: dict[tuple, int] = {}
    tasks = [
        Task(_accesses(s, schedule, roots), n, c)
        for s, n, c in zip(schedule.steps, seconds, collective, strict=True)
    ]
    free = [0.0, 0.0]
    done: list[float] = []
    for task, needed in zip(tasks, dependencies(tasks), strict=True):
        begin = max(free[task.collective], *(done[m] for m in needed), 0.0)
        done.append(begin + task.seconds)
        free[task.collective] = done[-1]
    return max(done, default=0.0)


def _accesses(step: Step, schedule: Schedule, roots: dict[tuple, int]) -> tuple[Access, ...] | None:
    """The bytes that a step touches, by root; None if it waits for all others."""
    if _runs_collectives(step):
        return None
    found = []
    for value, written in accesses(step):
        place = schedule.plan.placement.get(value)
        v = schedule.values[value]
        nbytes = v.nbytes if isinstance(v, Scratch) else v.aval.nbytes
        # memory that a step allocates itself is touched under the value alone
        key, start = (("value", value), 0) if place is None else ((place.space, place.owner), place.offset)
        found.append(Access(roots.setdefault(key, len(roots)), start, start + nbytes, written))
    return tuple(found)


def _runs_collectives(step: Step) -> bool:
    """True for a loop, branch or call whose bodies communicate."""
    return isinstance(step, OpaqueStep) and any(
        communicates(e) for body in subjaxprs(step.eqn.params) for e in equations(body)
    )


def _seconds(step: Step, row: StepCost, sight: Sight, work: Work, communicate: Communicate) -> float:
    """Seconds of a step: its roofline; of a loop or branch, those of its bodies."""
    if not isinstance(step, OpaqueStep):
        return work(row)
    of = {id(b.jaxpr): b.sight for b in sight.bodies}
    params, name = step.eqn.params, step.eqn.prim.name
    programs = [id(n.jaxpr) for n in nested(step.eqn)]
    if not programs or not all(p in of for p in programs):
        return work(row)  # no body, or a kernel or the host runs it whole
    bodies = [scheduled_seconds(of[p], work, communicate) for p in programs]
    times = params["length"] if name == "scan" else params.get("max_steps") or 1
    return times * (max(bodies) if name == "cond" else sum(bodies))
