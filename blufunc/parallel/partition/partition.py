"""Partitioning: a global jaxpr and shardings become the jaxpr of one device, whose collectives are equations.

Parallel, stage 3, behind ``propagate.py``; what comes out goes on to stage 4 as any jaxpr. The equations are gone
through under a staging trace, and each is put into the local program on shares of its operands. A value may lie in
several ways at once: it is moved when an operation wants it otherwise than it is, and what was made is kept for the
next that wants the same. Sums over divided factors stay owed for as long as what reads them is linear and alone in
doing so, and are settled where somebody wants the value: by an all_reduce, or by a reduce_scatter where it is to be
divided along the same axes.

Padding of uneven shapes holds anything; it is masked where a sum or an extremum would see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, eval_jaxpr, subjaxprs
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.reduce import limit
from blufunc.core.primitives.linear_ops import transpose_p, zeros
from blufunc.core.programs import simplify as passes
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.shard_map import shard_map_p
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.dim_groups import Node, body_ties, distinct
from blufunc.parallel.partition.localized_ops import SPECIAL
from blufunc.parallel.partition.propagate import Propagation, layout_of
from blufunc.parallel.partition.resharding import Layout, Shard, Transitions
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p

_NONE: frozenset[str] = frozenset()


def localise(
    jaxpr: Jaxpr,
    in_shardings: Sequence[NamedSharding],
    mesh: Mesh | AbstractMesh,
    out_shardings: Sequence[NamedSharding | None] | None = None,
) -> tuple[Jaxpr, list[NamedSharding]]:
    """The program of one device.

    Args:
      jaxpr: a program of whole values.
      in_shardings: for each parameter how it lies on the mesh.
      out_shardings: the same for results; None where propagation decides.
    Returns:
      a jaxpr from shares of the parameters to shares of the results (``NamedSharding.shard_shape``), and how the
      results lie.
    Raises:
      ShardingError: a sharding is of another mesh, or of a higher rank than its value; an annotation in the program
        names an axis that the mesh has not.
    """
    names = jaxpr.arg_names or ("",) * len(jaxpr.invars)
    wanted = out_shardings if out_shardings is not None else (None,) * len(jaxpr.outvars)
    layouts = [
        _checked(s, v, mesh, f"parameter {name or i}")
        for i, (s, v, name) in enumerate(zip(in_shardings, jaxpr.invars, names, strict=True))
    ]
    ends = [
        None if s is None else _checked(s, v, mesh, f"result {i}")
        for i, (s, v) in enumerate(zip(wanted, jaxpr.outvars, strict=True))
    ]
    jaxpr = passes.inline_definitions(
        jaxpr, lambda prim: prim.shard is not None or prim.kind == "elementwise"
    )
    whole = distinct(passes.simplify(jaxpr))
    _check_constraints(whole, mesh)
    abstract = mesh.abstract
    plan = Propagation(whole, abstract, layouts, ends)
    to = Transitions(abstract)
    found: list[Layout] = [
        plan.layout(v) if end is None else end for v, end in zip(whole.outvars, ends, strict=True)
    ]
    owed_in, owed_out = (
        [_NONE if s is None else frozenset(a for a in s.spec.unreduced if mesh.shape[a] > 1) for s in side]
        for side in (in_shardings, wanted)
    )

    def run(*values: Any) -> list[Any]:
        body = _Body(plan, to, whole)
        for var, const in zip(whole.constvars, whole.consts, strict=True):
            body.write(var, Shard(const, var.aval, ((),) * var.aval.ndim))
        for var, value, layout, owed in zip(whole.invars, values, layouts, owed_in, strict=True):
            body.write(var, Shard(value, var.aval, layout, owed))
        body.run()
        return [
            body.read(v, layout, owed, exactly=True).value
            for v, layout, owed in zip(whole.outvars, found, owed_out, strict=True)
        ]

    avals = [
        v.aval.with_shape(to.local_shape(v.aval.shape, layout))
        for v, layout in zip(whole.invars, layouts, strict=True)
    ]
    local = stage(run, avals, jaxpr.name, jaxpr.arg_names)
    ways = [
        NamedSharding(mesh, PartitionSpec(*layout)) if s is None else s
        for layout, s in zip(found, wanted, strict=True)
    ]
    return passes.dce(local), ways


def _checked(sharding: NamedSharding, atom: Atom, mesh: Any, what: str) -> Layout:
    """The layout of a sharding of this mesh for a value."""
    mine, its = mesh.abstract, sharding.mesh.abstract
    if mine != its:
        raise errors.ShardingError(
            f"{what} lies on the mesh {its}, and the program is for the mesh {mine}.",
            where=source.here(),
            fix="bf.device_put it onto that mesh first",
        )
    return layout_of(sharding.spec, atom.aval.ndim, mesh)


def _check_constraints(jaxpr: Jaxpr, mesh: Mesh | AbstractMesh) -> None:
    """Raise ShardingError, at the user's line, where an annotation does not fit the mesh."""
    for eqn in jaxpr.eqns:
        of_body = eqn.prim is shard_map_p
        if of_body or isinstance(eqn.prim, ShardingConstraint):
            specs = (*eqn.params["in_specs"], *eqn.params["out_specs"]) if of_body else (eqn.params["spec"],)
            own = eqn.params["mesh"] and eqn.params["mesh"].abstract
            missing = [a for spec in specs for a in (*spec.axes, *spec.unreduced) if a not in mesh.shape]
            if missing or (own is not None and own != mesh.abstract):
                what = f"names the axis {missing[0]!r}" if missing else f"is for the mesh {own}"
                raise errors.ShardingError(
                    f"{'shard_map' if of_body else f'the annotation {specs[0]}'} {what}, and the program is for the "
                    f"mesh {mesh.abstract}.",
                    where=source.describe(eqn.source),
                    fix="use the axes of that mesh, or put the arguments on the other: bf.device_put(x, sharding)",
                )
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple) else (value,):
                if isinstance(sub, Jaxpr):
                    _check_constraints(sub, mesh)


class _Body:
    """One jaxpr on its way into the local program that is being traced."""

    def __init__(self, plan: Propagation, to: Transitions, jaxpr: Jaxpr):
        self.plan, self.to, self.jaxpr = plan, to, jaxpr
        self.versions: dict[Var, list[Shard]] = {}
        self.transposed = {e.outvars[0]: e for e in jaxpr.eqns if e.prim is transpose_p}
        self.readers = Counter(
            a
            for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars)
            for a in atoms
            if isinstance(a, Var)
        )

    # -- values --------------------------------------------------------------------------------------

    def write(self, var: Var, shard: Shard) -> None:
        """The first way in which a value lies."""
        self.versions[var] = [shard]

    def read(self, atom: Atom, layout: Layout, owed: frozenset[str] = _NONE, exactly: bool = False) -> Shard:
        """The value laid out by ``layout``, with sums owed over no more than ``owed``, or exactly these."""
        if isinstance(atom, Literal):
            shard = Shard(atom.array, atom.aval, layout, zero=_is_zero(atom))
            return self.owing(shard, owed) if exactly else shard
        versions = self.versions[atom]
        for known in versions:
            if known.layout == layout and (known.owed == owed if exactly else known.owed <= owed):
                return known
        nearest = min(versions, key=lambda s: self.to.cost(s, layout, owed))
        if atom in self.transposed and not nearest.owed and self.to.cost(nearest, layout, owed):
            made = self._transposed(atom, layout)
        else:
            made = self.to.move(nearest, layout, owed)
        if exactly:
            made = self.owing(made, owed)
        versions.append(made)
        return made

    def _transposed(self, var: Var, layout: Layout) -> Shard:
        """A transposed value in another layout: what it was made of moves, so that a tied table is gathered once."""
        eqn = self.transposed[var]
        permutation = eqn.params["permutation"]
        before = tuple(layout[permutation.index(d)] for d in range(len(layout)))
        moved = self.read(eqn.invars[0], before)
        return Shard(transpose_p.bind(moved.value, **eqn.params), var.aval, layout, zero=moved.zero)

    def owing(self, shard: Shard, owed: frozenset[str]) -> Shard:
        """The value as a sum over ``owed`` axes: one device of them has it, the others have zeros."""
        more = tuple(a for a in self.to.mesh.axis_names if a in owed - shard.owed)
        if not more:
            return shard
        value = shard.value
        if not shard.zero:
            value = mc.keep_first_p.bind(value, src="I", dst="U", **self.to.over(more))
        return replace(shard, value=value, owed=shard.owed | {*more})

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be 0 everywhere."""
        return _is_zero(atom) if isinstance(atom, Literal) else any(s.zero for s in self.versions[atom])

    def owes(self, atom: Atom) -> frozenset[str]:
        """Over which axes a value is still a sum, if it may stay one: nobody else reads it. Zero is a sum over any."""
        if self.is_zero(atom):
            return frozenset(self.to.mesh.axis_names)
        if isinstance(atom, Literal) or self.readers[atom] > 1:
            return _NONE
        return frozenset.intersection(*[s.owed for s in self.versions[atom]])

    # -- equations -----------------------------------------------------------------------------------

    def run(self) -> None:
        """All equations, each at the user's line."""
        previous = source.replay.line
        try:
            for eqn in self.jaxpr.eqns:
                source.replay.line = eqn.source
                self.equation(eqn)
        finally:
            source.replay.line = previous

    def equation(self, eqn: Eqn) -> None:
        """Put one equation into the local program."""
        if isinstance(eqn.prim, ShardingConstraint):
            self.constraint(eqn)
        elif eqn.prim in _CONTROL:
            _CONTROL[eqn.prim](self, eqn)
        elif body_ties(eqn) is not None:
            self.call(eqn)
        elif eqn.effects:
            self.effect(eqn)
        else:
            self.operation(eqn, self.plan.nodes[eqn])

    def constraint(self, eqn: Eqn) -> None:
        """The operand in the layout that is wanted; nothing is computed."""
        (x,), (out,) = eqn.invars, eqn.outvars
        says_nothing = len(eqn.params["free"]) == x.aval.ndim
        owed = self.owes(x) if says_nothing else self.owes(x) & eqn.params["spec"].unreduced
        shard = self.read(x, self.plan.layout(out), owed)
        self.write(out, shard)
        if isinstance(x, Var):
            self.versions[out] += [s for s in self.versions[x] if s is not shard and not s.owed]

    def operation(self, eqn: Eqn, node: Node) -> None:
        """An equation whose rule says how its dimensions go together."""
        rule, mesh = node.rule, self.to.mesh
        owed, group = self._stays_owed(eqn, node)
        node = node.without(owed)
        layouts = node.layouts(rule.operands, mesh)
        partial = tuple(a for a in mesh.axis_names if any(a in node.axes.get(f, ()) for f in rule.reduced))
        operands = []
        for i, (atom, layout) in enumerate(zip(eqn.invars, layouts, strict=True)):
            may_owe = owed if i in group else _NONE
            if i in rule.partial:
                shard = self.read(atom, layout, may_owe.union(partial), exactly=True)
            else:
                shard = self.read(atom, layout, may_owe)
            if i in rule.trusted:
                shard = self._with_zeros(shard)
            elif i not in rule.harmless:
                shard = self._without_padding(shard, rule.operands[i], node)
            operands.append(shard)
        results = node.layouts(rule.results, mesh)
        locals_ = [x.value for x in operands]
        out_shapes = [
            self.to.local_shape(v.aval.shape, layout) for v, layout in zip(eqn.outvars, results, strict=True)
        ]
        params = eqn.params
        if rule.params is not None:
            params = rule.params(params, [x.aval.shape for x in locals_], out_shapes)
        special = SPECIAL.get(rule.special)
        if special is not None:
            outs = special(self.to, eqn, node, locals_, params, results)
        else:
            out = eqn.prim.bind(*locals_, **params)
            outs = out if eqn.prim.multiple_results else [out]
        hows = {how for f, how in rule.reduced.items() if node.axes.get(f)}
        zero = bool(operands) and operands[0].zero and eqn.prim.kind == "movement" and len(operands) == 1
        for var, out, dims, layout in zip(eqn.outvars, outs, rule.results, results, strict=True):
            own = {a for factors in dims for f in factors for a in node.axes.get(f, ())}
            over = tuple([a for a in partial if a not in own])
            if "sum" in hows:
                shard = Shard(out, var.aval, layout, owed | {*over})
            else:
                for how in hows:
                    out = self.to.reduce(out, over, how)
                shard = Shard(out, var.aval, layout, owed, zero)
            self.write(var, shard)

    def effect(self, eqn: Eqn) -> None:
        """What acts on the world: the first rank alone does it, and the others get what it got."""
        layouts: list[Layout] = [((),) * v.aval.ndim for v in eqn.outvars]
        operands = [self.read(a, ((),) * a.aval.ndim).value for a in eqn.invars]
        axes = tuple(a for a, n in self.to.mesh.shape.items() if n > 1)
        if not axes:
            self.results(eqn, eqn.prim.bind(*operands, **eqn.params), layouts)
            return
        avals = [x.aval for x in operands]
        act = stage(lambda *xs: eqn.prim.bind(*xs, **eqn.params), avals, eqn.prim.name)
        wait = stage(lambda *xs: [zeros(v.aval) for v in eqn.outvars], avals, eqn.prim.name)
        first = ew.eq(mc.mesh_axis_index_p.bind(**self.to.over(axes)), scalar(0, dtypes.int32))
        outs = cond_p.bind(ew.convert(first, dtypes.int32), *operands, branches=(wait, act))
        hows = ["max" if dtypes.is_bool(v.aval.dtype) else "sum" for v in eqn.outvars]
        self.results(eqn, [self.to.reduce(x, axes, how) for x, how in zip(outs, hows, strict=True)], layouts)

    def _stays_owed(self, eqn: Eqn, node: Node) -> tuple[frozenset[str], frozenset[int]]:
        """The axes over which the result stays a sum because operands are, and which operands."""
        for group in node.rule.linear:
            if all(isinstance(eqn.invars[i], Literal) for i in group):
                continue
            owed = frozenset.intersection(*[self.owes(eqn.invars[i]) for i in group])
            if len(group) == 1 and eqn.prim is not transpose_p:
                owed -= node.used  # scattered before, the operation is on less; but two sums become one first
            if owed:
                return owed, group
        return _NONE, frozenset()

    def _without_padding(self, shard: Shard, dims: Sequence[tuple[int, ...]], node: Node) -> Shard:
        """The share with what is beyond the edge masked along factors that are reduced."""
        value = shard.value
        for dim, (factors, axes) in enumerate(zip(dims, shard.layout, strict=True)):
            n = shard.aval.shape[dim]
            how = next((node.rule.reduced[f] for f in factors if f in node.rule.reduced), None)
            if how is not None and n % self.to.parts(axes):
                neutral = 0 if how == "sum" else limit(shard.aval.dtype, how == "min")
                value = self.to.inside(value, n, dim, axes, neutral)
        return shard if value is shard.value else replace(shard, value=value)

    def _with_zeros(self, shard: Shard) -> Shard:
        """The share with zeros beyond the edge."""
        value = shard.value
        for dim, (n, axes) in enumerate(zip(shard.aval.shape, shard.layout, strict=True)):
            if n % self.to.parts(axes):
                value = self.to.inside(value, n, dim, axes, 0)
        return replace(shard, value=value)

    # -- bodies --------------------------------------------------------------------------------------

    def inner(self, jaxpr: Jaxpr, shards: Sequence[Shard]) -> _Body:
        """A body applied to values, in the program that is being traced."""
        body = _Body(self.plan, self.to, jaxpr)
        for var, shard in zip(jaxpr.invars, shards, strict=True):
            body.write(var, shard)
        body.run()
        return body

    def staged(
        self, jaxpr: Jaxpr, shards: Sequence[Shard], outs: Callable[[_Body], list[Any]]
    ) -> tuple[Jaxpr, tuple]:
        """A body as a local jaxpr that takes shares like ``shards``, without constants; and its constants."""

        def run(*values: Any) -> list[Any]:
            return outs(self.inner(jaxpr, [replace(s, value=v) for s, v in zip(shards, values, strict=True)]))

        return passes.dce(stage(run, [s.value.aval for s in shards], jaxpr.name)).hoist()

    def laid_like(self, atoms: Sequence[Atom], inner: Sequence[Var]) -> list[Shard]:
        """Operands as the parameters of a body lie."""
        return [
            replace(self.read(a, self.plan.layout(v)), zero=False) for a, v in zip(atoms, inner, strict=True)
        ]

    def leave(self, atoms: Sequence[Atom], layouts: Sequence[Layout]) -> list[Shard]:
        """Results as they go out of a body: a sum that nobody in it reads stays owed, for whoever reads it outside.

        A body that runs many times then has no exchange for it; but one that is to be divided is scattered in the body,
        of which no more than a share goes out.
        """
        return [
            self.read(atom, layout, self._may_leave(atom, layout))
            for atom, layout in zip(atoms, layouts, strict=True)
        ]

    def _may_leave(self, atom: Atom, layout: Layout) -> frozenset[str]:
        if self.is_zero(atom) or not dtypes.is_inexact(atom.aval.dtype):
            return _NONE
        return self.owes(atom) - {a for axes in layout for a in axes}

    def results(
        self, eqn: Eqn, outs: Sequence[Any], layouts: Sequence[Layout], owed: Sequence[frozenset] = ()
    ) -> None:
        """Write what a loop, a branch or a call returned."""
        owed = owed or [_NONE] * len(outs)
        for var, out, layout, o in zip(eqn.outvars, outs, layouts, owed, strict=True):
            self.write(var, Shard(out, var.aval, layout, o))

    def call(self, eqn: Eqn) -> None:
        """A call: one of the local body where it is to be computed again; else the body in its place."""
        jaxpr: Jaxpr = eqn.params[eqn.prim.body]
        shards = self.laid_like(eqn.invars, jaxpr.invars)
        layouts = [self.plan.layout(v) for v in eqn.outvars]
        if not eqn.prim.again:
            made = self.inner(jaxpr, shards).leave(jaxpr.outvars, layouts)
            for var, shard in zip(eqn.outvars, made, strict=True):
                self.write(var, shard)
            return
        owed: list[frozenset[str]] = []

        def outs(body: _Body) -> list[Any]:
            made = body.leave(jaxpr.outvars, layouts)
            owed[:] = [shard.owed for shard in made]
            return [shard.value for shard in made]

        local, consts = self.staged(jaxpr, shards, outs)
        params = {**eqn.params, eqn.prim.body: local}
        self.results(eqn, eqn.prim.bind(*consts, *[s.value for s in shards], **params), layouts, owed)

    def function_of_shards(self, eqn: Eqn) -> None:
        """A ``shard_map``: its local body in its place, on operands laid out by its specs."""
        p, mesh = eqn.params, self.to.mesh
        ins, outs = (
            [(layout_of(s, a.aval.ndim, mesh), s.unreduced) for a, s in zip(atoms, specs, strict=True)]
            for atoms, specs in ((eqn.invars, p["in_specs"]), (eqn.outvars, p["out_specs"]))
        )
        operands = [self.read(a, *way, exactly=True).value for a, way in zip(eqn.invars, ins, strict=True)]
        results = eval_jaxpr(p["jaxpr"], operands)
        self.results(eqn, results, [layout for layout, _ in outs], [owed for _, owed in outs])

    def cond(self, eqn: Eqn) -> None:
        """A choice: its index is the same everywhere, and all branches return values that lie alike."""
        index, *operands = eqn.invars
        branches = eqn.params["branches"]
        shards = self.laid_like(operands, branches[0].invars)
        layouts = [self.plan.layout(v) for v in eqn.outvars]

        def made(branch: Jaxpr) -> tuple[Jaxpr, tuple]:
            pairs = list(zip(branch.outvars, layouts, strict=True))
            return self.staged(branch, shards, lambda body: [body.read(v, lay).value for v, lay in pairs])

        parts = [made(b) for b in branches]
        consts = [c for _, cs in parts for c in cs]
        closed, at = [], 0
        for local, cs in parts:  # every branch takes the constants of all
            avals = [c.aval for c in consts]
            spare = [Var(a) for a in avals]
            spare[at : at + len(cs)] = local.invars[: len(cs)]
            closed.append(local.replace(invars=[*spare, *local.invars[len(cs) :]], arg_names=()))
            at += len(cs)
        outs = cond_p.bind(
            self.read(index, ()).value, *consts, *[s.value for s in shards], branches=tuple(closed)
        )
        self.results(eqn, outs, layouts)

    def while_loop(self, eqn: Eqn) -> None:
        """A loop whose condition is the same everywhere."""
        p = eqn.params
        n, m = p["n_cond"], p["n_cond"] + p["n_body"]
        cond, body = p["cond"], p["body"]
        of_cond = self.laid_like(eqn.invars[:n], cond.invars[:n])
        of_body = self.laid_like(eqn.invars[n:m], body.invars[: m - n])
        inner = body.invars[m - n :]
        layouts = [self.plan.layout(v) for v in inner]
        carry = self.laid_like(eqn.invars[m:], inner)
        test, c_consts = self.staged(cond, [*of_cond, *carry], lambda b: [b.read(cond.outvars[0], ()).value])
        step, b_consts = self.staged(
            body,
            [*of_body, *carry],
            lambda b: [b.read(v, lay).value for v, lay in zip(body.outvars, layouts, strict=True)],
        )
        ins = [*c_consts, *[s.value for s in of_cond], *b_consts, *[s.value for s in (*of_body, *carry)]]
        counts = {"n_cond": len(c_consts) + n, "n_body": len(b_consts) + m - n}
        outs = while_p.bind(*ins, cond=test, body=step, max_steps=p["max_steps"], **counts)
        self.results(eqn, outs, layouts)

    def scan(self, eqn: Eqn) -> None:
        """A loop over steps; a carry to which steps only add sums that are owed stays owed until after the last."""
        p = eqn.params
        body, n, k = p["jaxpr"], p["n_consts"], p["n_carry"]
        consts = self.laid_like(eqn.invars[:n], body.invars[:n])
        carry = self.laid_like(eqn.invars[n : n + k], body.invars[n : n + k])
        xs = []
        for atom, var in zip(eqn.invars[n + k :], body.invars[n + k :], strict=True):
            layout = self.plan.layout(var)
            stacked = self.read(atom, ((), *layout))
            one = stacked.value.aval.with_shape(stacked.value.aval.shape[1:])
            xs.append((stacked, Shard(Var(one), var.aval, layout)))
        carried = [self.plan.layout(v) for v in body.invars[n : n + k]]
        stacked_layouts = [((), *self.plan.layout(v)[1:]) for v in eqn.outvars[k:]]  # whole along the steps
        ends = [*carried, *[layout[1:] for layout in stacked_layouts]]
        owed = self._owed_carry(body, [*consts, *carry, *[x for _, x in xs]], n, k, ends)
        init = [
            self.owing(self.read(a, layout), o)
            for a, layout, o in zip(eqn.invars[n : n + k], carried, owed, strict=True)
        ]
        shards = [*consts, *[replace(s, zero=False) for s in init], *[x for _, x in xs]]
        every = [*owed]

        def outs(b: _Body) -> list[Any]:
            carry = [
                b.read(v, layout, o, exactly=True)
                for v, layout, o in zip(body.outvars[:k], carried, owed, strict=True)
            ]
            of_steps = b.leave(body.outvars[k:], ends[k:])
            every[k:] = [shard.owed for shard in of_steps]
            return [shard.value for shard in (*carry, *of_steps)]

        local, extra = self.staged(body, shards, outs)
        ins = [*extra, *[s.value for s in (*consts, *init)], *[s.value for s, _ in xs]]
        made = scan_p.bind(*ins, **{**p, "jaxpr": local, "n_consts": len(extra) + n})
        self.results(eqn, made, [*carried, *stacked_layouts], every)

    def _owed_carry(
        self, body: Jaxpr, shards: list[Shard], n: int, k: int, ends: Sequence[Layout]
    ) -> list[frozenset[str]]:
        """Over which axes each of ``k`` carries, which follow ``n`` constants, stays a sum from step to step.

        Those over which it comes out as one if it goes in as one, if that saves exchanges within a step.
        """

        def step(owed: Sequence[frozenset[str]]) -> tuple[int, list[frozenset[str]]]:
            """How many exchanges a step has if its carry owes these, and what the carry owes afterwards."""
            after: list[frozenset[str]] = []

            def outs(b: _Body) -> list[Any]:
                after.extend(b.owes(v) for v in body.outvars[:k])
                pairs = zip(body.outvars[:k], ends[:k], owed, strict=True)
                carry = [b.read(v, layout, o & b.owes(v)) for v, layout, o in pairs]
                return [shard.value for shard in (*carry, *b.leave(body.outvars[k:], ends[k:]))]

            carry = [replace(s, owed=o) for s, o in zip(shards[n : n + k], owed, strict=True)]
            local, _ = self.staged(body, [*shards[:n], *carry, *shards[n + k :]], outs)
            return _exchanges(local), after

        everywhere = frozenset(self.to.mesh.axis_names)
        owed = [
            everywhere - {a for axes in layout for a in axes}
            if out is not var and dtypes.is_inexact(var.aval.dtype)
            else _NONE
            for layout, out, var in zip(ends, body.outvars[:k], body.invars[n:], strict=False)
        ]
        while any(owed):
            exchanges, after = step(owed)
            kept = [a & b for a, b in zip(owed, after, strict=True)]
            if kept == owed:
                return owed if exchanges < step([_NONE] * k)[0] else [_NONE] * k
            owed = kept
        return owed


def _is_zero(literal: Literal) -> bool:
    return not np.any(np.asarray(literal.value).tobytes())


def _exchanges(jaxpr: Jaxpr) -> int:
    """How many equations of a local program, bodies included, make the ranks meet."""
    own = sum(map(mc.meets, jaxpr.eqns))
    return own + sum(_exchanges(sub) for e in jaxpr.eqns for sub in subjaxprs(e.params))


_CONTROL = {
    cond_p: _Body.cond,
    while_p: _Body.while_loop,
    scan_p: _Body.scan,
    shard_map_p: _Body.function_of_shards,
}
