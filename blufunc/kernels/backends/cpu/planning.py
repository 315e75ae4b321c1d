"""Planning for the CPU: what it does well, and the memory of loops and branches.

Kernels, stages 5 to 7 on the CPU. In: a simplified jaxpr. Out: its ``Schedule``. Loops, branches and scatters are
native steps: C++ that ``native/`` writes, in planned memory. The scratch of a loop holds the arenas of its bodies and
the second buffers of its carries. A carry that its body replaces may be updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blufunc import _lazy
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import scatters
from blufunc.kernels.backends.cpu.steps.form import Form
from blufunc.kernels.backends.cpu.steps.forms import form_of, has_form
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.ops.gemm import overwritten_by
from blufunc.kernels.ops.updates import UPDATES
from blufunc.kernels.pipeline import Planning, within
from blufunc.kernels.schedule import OpaqueStep, Schedule
from blufunc.kernels.target import Target

with _lazy.modules(globals()):  # for programs with convolutions
    from blufunc.kernels.backends.cpu import convolutions

CONTROL = ("scan", "while", "cond")
"""Names of the primitives that run bodies."""

_LEAST_POINTS = 256
"""Minimum points of a loop inside a kernel.

A loop around kernels is as fast for fewer, and ends at a signal.
"""

ALIGNMENT = 64
"""Of the places in scratch memory, in bytes."""


def is_control(eqn: Eqn) -> bool:
    """True for a loop or a branch."""
    return eqn.prim.kind == "control" and eqn.prim.name in CONTROL and not is_replaced(eqn.prim, "impl")


def _is_matmul(eqn: Eqn) -> bool:
    return eqn.prim is dot_general_p and not is_replaced(dot_general_p, "impl")


def is_update(eqn: Eqn) -> bool:
    """True for a scatter or window update that generated loops compute."""
    return eqn.prim in UPDATES or scatters.is_native(eqn)


def is_native(eqn: Eqn) -> bool:
    """True for steps other than fused kernels and matmuls that run as C++."""
    return is_control(eqn) or is_update(eqn) or has_form(eqn)


def planned(jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Schedule:
    """Schedule of a simplified jaxpr on the CPU, within ``budget`` bytes at peak."""
    planning = Planning(_with_matmuls(jaxpr), donated, HOST, lambda e: _is_matmul(e) or is_native(e))
    return _with_inner(within(planning, budget))


def _with_matmuls(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with matmuls for the convolutions that are."""
    if any(e.prim.name == "conv_general_dilated" for e in jaxpr.eqns):
        return convolutions.with_matmuls(jaxpr)
    return jaxpr


def body_schedule(jaxpr: Jaxpr, donated: tuple[bool, ...]) -> Schedule:
    """Schedule of a body, the results of all its steps in planned memory."""
    return jaxpr.memoised(
        ("native body", donated),
        lambda: _with_inner(
            within(Planning(_with_matmuls(simplify(jaxpr)), donated, HOST, lambda e: True), None)
        ),
    )


def _with_inner(made: Schedule) -> Schedule:
    """The schedule, with the opaque equations of its bodies."""
    bodies: list[Schedule] = []
    for step in made.steps:
        if isinstance(step, OpaqueStep) and is_control(step.eqn):
            bodies += branches_of(step.eqn) if step.eqn.prim.name == "cond" else rounds_of(step.eqn).bodies
    made.inner = tuple(e for body in bodies for e in body.opaque)
    return made


# -- loops and branches ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """A loop: one body, and what is carried from round to round.

    Attributes:
      body: schedule of the body.
      cond: schedule of the condition of a ``while``; None for a ``scan``.
      n_cond: number of operands that only the condition reads.
      n_consts: number of operands of the body that stay the same.
      n_carry: number of carries.
      most: number of rounds, at most; None: no limit.
      reverse: whether the inputs are read from the last to the first.
    """

    body: Schedule
    cond: Schedule | None
    n_cond: int
    n_consts: int
    n_carry: int
    most: int | None
    reverse: bool

    @property
    def bodies(self) -> list[Schedule]:
        """The body, and the condition of a ``while``."""
        return [self.body] if self.cond is None else [self.body, self.cond]


def rounds_of(eqn: Eqn) -> Rounds:
    """The loop of a ``scan`` or ``while``."""
    p = eqn.params
    if eqn.prim.name == "scan":
        jaxpr, n_consts, n_carry = p["jaxpr"], p["n_consts"], p["n_carry"]
        body = body_schedule(jaxpr, _donated(jaxpr, n_consts, n_carry))
        return Rounds(body, None, 0, n_consts, n_carry, p["length"], p["reverse"])
    jaxpr, n_consts = p["body"], p["n_body"]
    n_carry = len(jaxpr.outvars)
    cond = body_schedule(p["cond"], (False,) * len(p["cond"].invars))
    body = body_schedule(jaxpr, _donated(jaxpr, n_consts, n_carry))
    return Rounds(body, cond, p["n_cond"], n_consts, n_carry, p["max_steps"], False)


def _donated(jaxpr: Jaxpr, n_consts: int, n_carry: int) -> tuple[bool, ...]:
    return tuple(n_consts <= i < n_consts + n_carry for i in range(len(jaxpr.invars)))


def branches_of(eqn: Eqn) -> list[Schedule]:
    """The branches of a ``cond``."""
    return [body_schedule(b, (False,) * len(b.invars)) for b in eqn.params["branches"]]


@dataclass
class Layout:
    """Places in the scratch memory of a loop, after the arena of its bodies.

    Attributes:
      spares: offset of the second buffer of each carry that has one, by its number.
      dropped: offset of each result that nothing reads, by its number.
      flag: offset of the verdict of a condition.
      nbytes: size.
    """

    spares: dict[int, int]
    dropped: dict[int, int]
    flag: int
    nbytes: int


def layout_of(eqn: Eqn) -> Layout:
    """The scratch memory of a loop or branch."""
    if eqn.prim.name == "cond":
        bodies, spare = branches_of(eqn), []
    else:
        loop = rounds_of(eqn)
        bodies, spare = loop.bodies, [k for k in range(loop.n_carry) if taken(loop, k) is None]
    at = max(_aligned(b.plan.arena_bytes) for b in bodies)

    def take(nbytes: int) -> int:
        nonlocal at
        at += _aligned(nbytes)
        return at - _aligned(nbytes)

    sizes = [v.aval.nbytes for v in eqn.outvars]
    spares = {k: take(sizes[k]) for k in spare}
    dropped = {k: take(sizes[k]) for k, v in enumerate(eqn.outvars) if isinstance(v, DropVar)}
    return Layout(spares, dropped, take(1), at)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def taken(loop: Rounds, k: int) -> int | None:
    """The carry in whose buffer a round leaves carry ``k``; None: in a second one.

    A round updates a carry in place, or moves it to another place in the list of carries.
    """
    body = loop.body
    out = body.outputs[k]
    if isinstance(out, Literal) or any(
        isinstance(o, int) and body.root(o) == body.root(out) for o in body.outputs[:k]
    ):
        return None  # two carries need two buffers
    place = body.place(out)
    if place is None or place.space != "argument" or place.offset:
        return None
    j = body.inputs.index(place.owner) - loop.n_consts
    if not 0 <= j < loop.n_carry:
        return None
    return j if bytes_of(body, out) == bytes_of(body, body.inputs[loop.n_consts + j]) else None


def bytes_of(made: Schedule, i: int) -> int:
    """The size of a value."""
    v = made.values[i]
    return v.nbytes if isinstance(v, Scratch) else v.aval.nbytes


def dropped_of(eqn: Eqn) -> dict[int, int]:
    """Offset in scratch memory of each result of a native step that nothing reads."""
    return layout_of(eqn).dropped if is_control(eqn) else _scratch_of(eqn, form_of(eqn))[0]


def _scratch_of(eqn: Eqn, form: Form) -> tuple[dict[int, int], int]:
    """Places of unread results after the scratch of a form, and the size of both."""
    at, dropped = _aligned(form.scratch_bytes), {}
    for k, v in enumerate(eqn.outvars):
        if isinstance(v, DropVar):
            dropped[k] = at
            at += _aligned(v.aval.nbytes)
    return dropped, at


def _scratch_bytes(eqn: Eqn) -> int:
    if is_control(eqn):
        return layout_of(eqn).nbytes
    return _scratch_of(eqn, form_of(eqn))[1] if has_form(eqn) else 0


def _overwritten(eqn: Eqn) -> list[tuple[int, int]]:
    """Results of a step, and the operands that they may overwrite."""
    if is_update(eqn):
        return [(0, 0)]
    if not is_control(eqn) or eqn.prim.name == "cond":
        return overwritten_by(eqn)
    p = eqn.params
    first = p["n_consts"] if eqn.prim.name == "scan" else p["n_cond"] + p["n_body"]
    n_carry = p["n_carry"] if eqn.prim.name == "scan" else len(p["body"].outvars)
    return [(k, first + k) for k in range(n_carry)]


HOST = Target(
    chunks=lambda rows, lanes: min(16, max(1, rows * lanes >> 14)),
    total_chunks=lambda size: min(64, max(1, size >> 14)),
    keep_bytes=1 << 18,
    keep_loads=False,
    tile=2048,
    scratch_bytes=_scratch_bytes,
    overwritten=_overwritten,
    native_windows=has_form,
    in_order=lambda eqn: is_control(eqn) or eqn.prim is optimization_barrier_p,
    least_points=_LEAST_POINTS,
    updates_in_place=0,
)
"""Chunk counts do not depend on the core count, so results do not either."""
