"""Loops and branches that compute each point alone, as elementwise operations.

Kernels, before stage 5. In: a jaxpr with its calls inlined. Out: one in which a ``while``, a ``scan`` without inputs
and outputs, or a ``cond`` of elementwise operations on arrays of one shape and on scalars is one equation per result: a
``Loop`` or ``Branch`` of scalars, which fuses as other elementwise operations do. A kernel loops at each point, where
the program went through memory in each iteration.

``vmap`` makes a loop over a batch continue while any element does, and leaves the finished elements unchanged. Such a
loop is one of points that end on their own. We recognize it by evaluating its body twice: if the condition of an
element fails, each carry must come out unchanged; if it holds, the results are the next carries.

Values that a body computes from its constants alone are computed before the loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var, exact
from blufunc.core.ops.elementwise import select_p
from blufunc.core.ops.reduce import reduce_or_p
from blufunc.core.ops.shape import iota_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import Origins, dce, rewrite, simplified_body, simplify, used
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.ops.points import POINTS, Branch, Loop, _AtPoints, point_branch_p, point_loop_p
from blufunc.kernels.rewrites.loops.split_carries import with_split_carries

MOST_EQUATIONS = 128
"""Operations of a body, at most: they must fit the registers of a thread."""

_FEW_POINTS, _MANY_POINTS = 4, 32
"""Bounds of the points that run in runs: few in registers, many in vectors.

Compilers do not vectorize around a loop for fewer than two vectors of points.
"""

_RUN_COST = 1 << 23
"""Cost of a run, in additions: some milliseconds, in which no signal is seen."""


def with_point_control(jaxpr: Jaxpr, origins: Origins, least: int = 1) -> Jaxpr:
    """Replace branches and loops that run at points.

    A loop of fewer than ``least`` points becomes a loop of runs, each of many rounds in a kernel, and ends at a signal.
    """
    read = used(jaxpr)

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        rule = _RULES.get(eqn.prim.name)
        if rule is None or eqn.prim.kind != "control" or is_replaced(eqn.prim, "impl"):
            return [eqn]
        found = _at_points(eqn, rule, read)
        if found is None:
            return [eqn]
        points = max((v.aval.size for v in eqn.outvars), default=0)
        if eqn.prim.name != "cond" and points < least:
            points = max((v.aval.size for e in found for v in e.outvars if e.prim is point_loop_p), default=0)
            if _FEW_POINTS < points < _MANY_POINTS:
                return [eqn]
            return found if _is_short(eqn) else _in_runs(eqn, rule, read) if _rounds_of_run(eqn) else [eqn]
        return found

    return dce(rewrite(jaxpr, step, origins)) if any(e.prim.name in _RULES for e in jaxpr.eqns) else jaxpr


def _at_points(eqn: Eqn, rule: Callable, read: set) -> list[Eqn] | None:
    try:
        return rule(eqn, read)
    except _NotAtPointsError:
        return _in_parts(eqn, rule, read)


def _in_parts(eqn: Eqn, rule: Callable, read: set) -> list[Eqn] | None:
    """A loop whose carries are stacks of points; None if it is none."""
    for made in with_split_carries(eqn) if eqn.prim.name in ("scan", "while") else ():
        (loop,) = (e for e in made if e.prim is eqn.prim)
        try:
            replacement = rule(loop, read | {v for e in made for v in e.invars})
        except _NotAtPointsError:
            continue
        return [e for m in made for e in (replacement if m is loop else [m])]
    return None


class _NotAtPointsError(Exception):
    """A body does not compute each point alone."""


# -- loops of few points -----------------------------------------------------------------------------


def _rounds_of_run(eqn: Eqn) -> int:
    """The rounds of a loop that run in a kernel at once; 0 if one may take long."""
    points = max((v.aval.size for v in eqn.outvars), default=1)
    cost = points * _round_cost(eqn)
    most = int(_RUN_COST / max(1, cost))
    length = eqn.params.get("length") or 1
    # runs of one length need one kernel
    return most if length <= most else next((n for n in range(most, most // 2, -1) if not length % n), most)


def _round_cost(eqn: Eqn) -> float:
    """The cost of a round at one point, in additions."""
    p = eqn.params
    bodies = [p["jaxpr"]] if eqn.prim.name == "scan" else [p["cond"], p["body"]]
    return sum(_cost(e) for b in bodies for e in simplified_body(b).eqns)


def _cost(eqn: Eqn) -> float:
    """The cost at one point, in additions; infinite for a loop without a limit."""
    if _RULES.get(eqn.prim.name) is None or eqn.prim.kind != "control":
        return eqn.prim.cost
    if eqn.prim.name == "cond":
        return max(sum(map(_cost, simplified_body(b).eqns)) for b in eqn.params["branches"])
    most = eqn.params["length" if eqn.prim.name == "scan" else "max_steps"]
    return math.inf if most is None else most * _round_cost(eqn)


def _is_short(eqn: Eqn) -> bool:
    most = eqn.params["length" if eqn.prim.name == "scan" else "max_steps"]
    return most is not None and most <= _rounds_of_run(eqn)


def _in_runs(eqn: Eqn, rule: Callable, read: set) -> list[Eqn]:
    """A loop as a loop of runs; the planner of its body puts a run into a kernel."""
    p, n = eqn.params, _rounds_of_run(eqn)
    ins = [Var(a.aval) for a in eqn.invars]
    outs = [Var(v.aval) for v in eqn.outvars]
    if eqn.prim.name == "while":
        if p["max_steps"] is not None:
            return [eqn]
        first = p["n_cond"]
        body = Jaxpr(
            ins, [Eqn(eqn.prim, ins, outs, {**p, "max_steps": n}, eqn.source)], outs, name=p["body"].name
        )
        # the run tests the condition as well: its operands are constants of both
        consts = list(eqn.invars[:first])
        params = {**p, "body": body, "n_body": first + p["n_body"]}
        return [Eqn(eqn.prim, [*consts, *eqn.invars], eqn.outvars, params, eqn.source)]
    length = p["length"]
    body = Jaxpr(ins, [Eqn(eqn.prim, ins, outs, {**p, "length": n}, eqn.source)], outs, name=p["jaxpr"].name)
    whole, rest = divmod(length, n)
    middle = [Var(v.aval) for v in eqn.outvars] if rest else list(eqn.outvars)
    made = [Eqn(eqn.prim, eqn.invars, middle, {**p, "jaxpr": body, "length": whole}, eqn.source)]
    if rest:
        operands = [*eqn.invars[: p["n_consts"]], *middle]
        last = Eqn(eqn.prim, operands, eqn.outvars, {**p, "length": rest}, eqn.source)
        made += _at_points(last, rule, read) or [last]
    return made


# -- rules -------------------------------------------------------------------------------------------


def _while(eqn: Eqn, read: set) -> list[Eqn]:
    params, n, m = eqn.params, eqn.params["n_cond"], eqn.params["n_body"]
    c_consts, b_consts, inits = eqn.invars[:n], eqn.invars[n : n + m], eqn.invars[n + m :]
    return _loop(eqn, read, params["cond"], c_consts, params["body"], b_consts, inits, params["max_steps"])


def _scan(eqn: Eqn, read: set) -> list[Eqn]:
    params, n = eqn.params, eqn.params["n_consts"]
    if len(eqn.invars) != n + params["n_carry"] or len(eqn.outvars) != params["n_carry"]:
        raise _NotAtPointsError
    return _loop(eqn, read, None, (), params["jaxpr"], eqn.invars[:n], eqn.invars[n:], params["length"])


def _loop(
    eqn: Eqn,
    read: set,
    cond: Jaxpr | None,
    c_consts: Sequence[Atom],
    body: Jaxpr,
    b_consts: Sequence[Atom],
    inits: Sequence[Atom],
    most: int | None,
) -> list[Eqn]:
    """The equations that replace a loop."""
    shape = _shape_of(eqn, read)
    at = _Evaluation(shape, eqn.source)
    carries = [Var(a.aval.with_shape(())) for a in inits]
    going: Atom = _known(True)
    if cond is not None:
        (going,) = at.run(_ready(cond), [*map(at.outer, c_consts), *carries])
    step, ins = _ready(body), [*map(at.outer, b_consts), *carries]
    if going in at.any_of:
        going, _ = at.any_of[going]
        ended = at.supposing(going, _known(False))
        if ended.run(step, ins) != [ended.supposed.get(c, c) for c in carries]:
            raise _NotAtPointsError
    inside = at if going.__class__ is Literal else at.supposing(going, _known(True))
    nexts = inside.run(step, ins)
    control = Loop(inside.jaxpr(carries, [going, *nexts], body.name), len(carries), most)
    starts = [at.given(a) for a in inits]
    return [*at.before, *_results(point_loop_p, eqn, control, [*starts, *inside.operands], read)]


def _cond(eqn: Eqn, read: set) -> list[Eqn]:
    """The equations that replace a branch; only movement precedes it."""
    index, *operands = eqn.invars
    at = _Evaluation(_shape_of(eqn, read), eqn.source, only_moves=True)
    ins = [*map(at.outer, operands)]
    made = []
    for branch in map(_ready, eqn.params["branches"]):
        side = at.restarted()
        made.append((side, list(map(side.scalar, side.run(branch, ins))), branch.name))
    sides = tuple(side.jaxpr((), outs, name) for side, outs, name in made)
    return [*at.before, *_results(point_branch_p, eqn, Branch(sides), [index, *at.operands], read)]


_RULES: dict[str, Callable[[Eqn, set], list[Eqn]]] = {"while": _while, "scan": _scan, "cond": _cond}


def _shape_of(eqn: Eqn, read: set) -> tuple[int, ...]:
    """The shape of the points: that of the results that are arrays."""
    if eqn.effects or any(not v.aval.size or dtypes.is_key(v.aval.dtype) for v in eqn.outvars):
        raise _NotAtPointsError
    shapes = {v.aval.shape for v in eqn.outvars if v.aval.size > 1} or {v.aval.shape for v in eqn.outvars}
    wanted = {v.aval.shape for v in eqn.outvars if v in read and v.__class__ is not DropVar}
    if len(shapes) != 1 or wanted - shapes:
        raise _NotAtPointsError
    return shapes.pop()


def _results(prim: Primitive, eqn: Eqn, control: Any, ins: Sequence[Atom], read: set) -> list[Eqn]:
    return [
        Eqn(prim, ins, [v], {"control": control, "index": i}, eqn.source)
        for i, v in enumerate(eqn.outvars)
        if v in read
    ]


def _ready(jaxpr: Jaxpr) -> Jaxpr:
    """A body with its calls inlined, and its own loops at points."""

    def make() -> Jaxpr:
        inner = simplified_body(jaxpr)
        if len(inner.eqns) > MOST_EQUATIONS or inner.constvars:
            raise _NotAtPointsError
        return with_point_control(inner, {})

    return jaxpr.memoised("at points", make)


@functools.cache
def _known(value: bool) -> Literal:
    return Literal(scalar(value, dtypes.bool_))


@dataclass
class _Evaluation:
    """A body at one point: its equations on scalars.

    Variables of the program stay themselves until a point reads them, as ``operands``. Equations of these alone go
    ``before`` the loop.

    Attributes:
      shape: of the points.
      source: the line of the loop or branch.
      only_moves: whether only movement goes before.
      before, eqns: the equations before the loop, and those at a point.
      outside: variables of the program and of ``before``.
      places: by operand, the scalar that it is at a point.
      seen: by equation and operands, the result.
      any_of: by variable that tells whether a condition holds at any point, the condition, and the axes it keeps.
      unknown: these variables, and values that depend on them: one point does not know them.
      supposed: conditions whose value is known.
    """

    shape: tuple[int, ...]
    source: Any
    only_moves: bool = False
    before: list[Eqn] = field(default_factory=list)
    outside: set[Atom] = field(default_factory=set)
    places: dict[Atom, Var] = field(default_factory=dict)
    operands: list[Atom] = field(default_factory=list)
    eqns: list[Eqn] = field(default_factory=list)
    seen: dict[Any, Any] = field(default_factory=dict)
    any_of: dict[Atom, tuple[Atom, tuple[int, ...]]] = field(default_factory=dict)
    unknown: set[Atom] = field(default_factory=set)
    supposed: dict[Atom, Literal] = field(default_factory=dict)

    def restarted(self) -> _Evaluation:
        """Another evaluation, with the same operands."""
        return replace(self, eqns=[], seen={}, any_of={}, unknown=set(), supposed={})

    def supposing(self, condition: Atom, value: Literal) -> _Evaluation:
        """A copy of this evaluation in which a condition is known from here on."""
        return replace(
            self,
            eqns=list(self.eqns),
            seen=dict(self.seen),
            any_of=dict(self.any_of),
            unknown=set(self.unknown),
            supposed={condition: value},
        )

    def jaxpr(self, carries: Sequence[Var], outs: Sequence[Atom], name: str) -> Jaxpr:
        """The equations so far, as a jaxpr of carries and operands."""
        outs = list(map(self.scalar, outs))
        if not self.unknown.isdisjoint(outs):
            raise _NotAtPointsError
        return simplify(Jaxpr([*carries, *self.places.values()], self.eqns, outs, name=name))

    # -- operands --------------------------------------------------------------------------------

    def outer(self, atom: Atom) -> Atom:
        """A variable of the program, as an operand of a body."""
        if atom.__class__ is not Literal:
            self.outside.add(atom)
        return atom

    def given(self, atom: Atom) -> Atom:
        """A variable of the program in the shape of the points, or as a scalar."""
        shape = self.shape if atom.aval.shape == self.shape or atom.aval.size > 1 else ()
        if atom.aval.shape == shape and atom.aval.dtype in scalar_ops.STORAGE:
            return atom
        if atom.aval.size not in (1, math.prod(self.shape)) or atom.aval.dtype not in scalar_ops.STORAGE:
            raise _NotAtPointsError
        v = Var(atom.aval.with_shape(shape))
        self.before.append(Eqn(reshape_p, [atom], [v], {"shape": shape}, self.source))
        return v

    def scalar(self, atom: Atom) -> Atom:
        """The scalar of an atom at a point."""
        if atom not in self.outside:
            return atom
        if atom not in self.places:
            self.operands.append(self.given(atom))
            self.places[atom] = Var(atom.aval.with_shape(()))
        return self.places[atom]

    # -- equations -------------------------------------------------------------------------------

    def run(self, jaxpr: Jaxpr, ins: Sequence[Atom]) -> list[Atom]:
        """The results of a jaxpr."""
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, ins, strict=True))
        now = lambda a: a if a.__class__ is Literal else env[a]
        for eqn in jaxpr.eqns:
            args = [now(a) for a in eqn.invars]
            outs = self.put_before(eqn, args) if self.is_before(eqn, args) else [self.at_point(eqn, args)]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [now(a) for a in jaxpr.outvars]

    def is_before(self, eqn: Eqn, args: Sequence[Atom]) -> bool:
        """True for an equation that can run before the loop.

        Not for loops, which might not end although the loop has no iteration.
        """
        prim = eqn.prim
        if eqn.effects or prim.opaque or prim.kind in ("control", _AtPoints.kind):
            return False
        if not all(a.__class__ is Literal or a in self.outside for a in args):
            return False
        same = all(a.aval.shape == v.aval.shape for a, v in zip(args, eqn.invars, strict=True))
        if not same and not (isinstance(prim, Elementwise) or prim is add_any_p):
            return False  # a literal stands for an array of it, which only elementwise operations take
        if prim is iota_p or all(a.__class__ is Literal for a in args):
            return prim is iota_p  # a point computes equations of literals itself
        return moves(eqn) or not self.only_moves

    def put_before(self, eqn: Eqn, args: Sequence[Atom]) -> list[Atom]:
        key = self.key(eqn, args)
        if key not in self.seen:
            outs = [Var(v.aval) for v in eqn.outvars]
            self.before.append(eqn.with_vars(args, outs))
            self.seen[key] = outs
            self.outside.update(outs)
        return self.seen[key]

    def at_point(self, eqn: Eqn, args: Sequence[Atom]) -> Atom:
        """The one result of an equation at a point."""
        prim = eqn.prim
        if is_replaced(prim, "impl"):
            raise _NotAtPointsError
        args = list(map(self.scalar, args))
        if prim is reduce_or_p and dtypes.is_bool(eqn.invars[0].aval.dtype):
            return self.any(eqn, args[0])
        if moves(eqn):
            return self.moved(eqn, args[0])
        args = [self.here(a, ()) for a in args]
        if not (isinstance(prim, Elementwise) or prim is add_any_p or prim in POINTS):
            raise _NotAtPointsError
        if prim not in POINTS and not scalar_ops.known(prim, eqn.params, [a.aval.dtype for a in args]):
            raise _NotAtPointsError
        if prim is select_p:
            condition, yes, no = args
            if condition.__class__ is Literal:
                return yes if condition.value else no  # type: ignore[union-attr]
            if yes is no:
                return yes
        key = self.key(eqn, args)
        if key not in self.seen:
            (v,) = eqn.outvars
            out = Var(v.aval.with_shape(()))
            self.eqns.append(eqn.with_vars(args, [out]))
            self.seen[key] = out
            if not self.unknown.isdisjoint(args):
                self.unknown.add(out)
        return self.seen[key]

    def moved(self, eqn: Eqn, a: Atom) -> Atom:
        """The result of movement at a point: its own element, or a scalar."""
        x, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if a in self.any_of:
            if eqn.prim is not broadcast_in_dim_p or out.shape != self.shape:
                raise _NotAtPointsError
            return self.here(a, eqn.params["dims"])
        if x.size == 1 or (x.size == out.size and _in_order(eqn)):
            return a
        raise _NotAtPointsError

    def any(self, eqn: Eqn, a: Atom) -> Atom:
        """The variable that tells whether a condition holds at any point along some axes."""
        of, axes = self.any_of.get(a, (a, tuple(range(len(self.shape)))))
        if eqn.invars[0].aval.ndim != len(axes) or (a is of and eqn.invars[0].aval.shape != self.shape):
            raise _NotAtPointsError
        v = Var(eqn.outvars[0].aval)
        self.unknown.add(v)
        self.any_of[v] = of, tuple(d for i, d in enumerate(axes) if i not in eqn.params["axes"])
        return v

    def here(self, a: Atom, axes: Sequence[int]) -> Atom:
        """The value of an atom at this point.

        If it tells whether a condition holds at any point, the axes that it keeps must be ``axes``. It holds if the
        condition is supposed to hold here.
        """
        if a not in self.any_of:
            return self.supposed.get(a, a)
        of, kept = self.any_of[a]
        if kept != tuple(axes):
            raise _NotAtPointsError
        supposed = self.supposed.get(of)
        if supposed is not None and supposed.value:
            return supposed
        v = Var(a.aval)
        self.unknown.add(v)
        return v

    @staticmethod
    def key(eqn: Eqn, args: Sequence[Atom]) -> Any:
        atoms = tuple(
            (a.aval.dtype, a.value.tobytes()) if a.__class__ is Literal else a  # type: ignore[union-attr]
            for a in args
        )
        return eqn.prim, atoms, tuple((k, exact(v)) for k, v in eqn.params.items())


def _in_order(eqn: Eqn) -> bool:
    """True if a movement of as many elements keeps their order."""
    return eqn.prim.identity or eqn.prim in (broadcast_in_dim_p, reshape_p) or "axes" in eqn.params
