"""Partitioning: from a global jaxpr and shardings to the jaxpr of one device.

Parallel, stage 3, after ``propagate.py``. In: a global jaxpr and layouts. Out: a local jaxpr whose collectives are
equations, for stage 4. A staging trace evaluates each equation on shares of its operands. A value may exist in several
layouts: it is resharded when an operation needs another one, and the result is cached for the next. Sums over sharded
factors stay unreduced while their only consumer is linear in them. Another consumer reduces them: by an all-reduce, or
by a reduce-scatter if it needs them sharded along the same axes.

Padding of uneven shapes may hold anything; it is masked before a sum or an extremum over it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, eval_jaxpr
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.reduce import limit
from blufunc.core.primitives.linear_ops import transpose_p, zeros
from blufunc.core.primitives.sharding import Rule
from blufunc.core.programs import simplify as passes
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.dim_groups import Node, body_ties
from blufunc.parallel.partition.localized_ops import SPECIAL
from blufunc.parallel.partition.propagate import Propagation, automatic, divisible
from blufunc.parallel.partition.resharding import Layout, Resharder, Shard, layout_of
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p

_NONE: frozenset[str] = frozenset()


def localise(
    jaxpr: Jaxpr,
    in_shardings: Sequence[NamedSharding],
    mesh: Mesh | AbstractMesh,
    out_shardings: Sequence[NamedSharding | None] | None = None,
    manual: frozenset[str] = _NONE,
) -> tuple[Jaxpr, list[NamedSharding]]:
    """Partition a program.

    Args:
      jaxpr: the global program.
      in_shardings: the sharding of each parameter.
      out_shardings: the same for results; None where propagation decides.
      manual: axes that a ``shard_map`` around the program handles: it runs once for each index along them.
    Returns:
      a jaxpr from shares of the parameters to shares of the results (``NamedSharding.shard_shape``), and the shardings
      of the results.
    Raises:
        ShardingError: a sharding is of another mesh, or has more entries than its value has dimensions; an annotation
          names an axis that the mesh does not have.
    """
    names = jaxpr.arg_names or ("",) * len(jaxpr.invars)
    required = out_shardings if out_shardings is not None else (None,) * len(jaxpr.outvars)
    layouts = [
        _checked(s, v, mesh, f"parameter {name or i}")
        for i, (s, v, name) in enumerate(zip(in_shardings, jaxpr.invars, names, strict=True))
    ]
    ends = [
        None if s is None else _checked(s, v, mesh, f"result {i}")
        for i, (s, v) in enumerate(zip(required, jaxpr.outvars, strict=True))
    ]
    whole = divisible(jaxpr)
    _check_constraints(whole, mesh)
    abstract = mesh.abstract
    plan = Propagation(whole, abstract, layouts, ends)
    to = Resharder(abstract, manual)
    found: list[Layout] = [
        plan.layout(v) if end is None else end for v, end in zip(whole.outvars, ends, strict=True)
    ]
    unreduced_in, unreduced_out = (
        [_NONE if s is None else frozenset(a for a in s.spec.unreduced if mesh.shape[a] > 1) for s in side]
        for side in (in_shardings, required)
    )

    def run(*values: Any) -> list[Any]:
        body = _Body(plan, to, whole)
        for var, const in zip(whole.constvars, whole.consts, strict=True):
            body.write(var, Shard(const, var.aval, ((),) * var.aval.ndim))
        for var, value, layout, unreduced in zip(whole.invars, values, layouts, unreduced_in, strict=True):
            body.write(var, Shard(value, var.aval, layout, unreduced))
        body.run()
        return [
            body.read(v, layout, unreduced, exactly=True).value
            for v, layout, unreduced in zip(whole.outvars, found, unreduced_out, strict=True)
        ]

    avals = [
        v.aval.with_shape(to.local_shape(v.aval.shape, layout))
        for v, layout in zip(whole.invars, layouts, strict=True)
    ]
    local = stage(run, avals, jaxpr.name, jaxpr.arg_names)
    stated: dict[Any, Any] = {
        e.outvars[0]: e.params["spec"]
        for e in whole.eqns
        if isinstance(e.prim, ShardingConstraint) and not e.params["free"]
    }
    ways = [
        NamedSharding(mesh, _spec_of(layout, stated.get(v), mesh)) if s is None else s
        for v, layout, s in zip(whole.outvars, found, required, strict=True)
    ]
    return passes.dce(local), ways


def _spec_of(layout: Layout, stated: PartitionSpec | None, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec that the program states for a result, or that of its layout.

    A stated one may name axes of size 1, which layouts lack.
    """
    if stated is None or stated.unreduced or layout_of(stated, len(layout), mesh) != layout:
        return PartitionSpec(*layout)
    return stated


def _checked(sharding: NamedSharding, atom: Atom, mesh: Any, what: str) -> Layout:
    """The layout of a value with a sharding of this mesh."""
    mine, its = mesh.abstract, sharding.mesh.abstract
    if mine != its:
        raise errors.ShardingError(
            f"{what} is on the mesh {its}, and the program is for the mesh {mine}.",
            where=source.here(),
            fix="bf.device_put it onto that mesh first",
        )
    return layout_of(sharding.spec, atom.aval.ndim, mesh)


def _check_constraints(jaxpr: Jaxpr, mesh: Mesh | AbstractMesh) -> None:
    """Raise ShardingError, at the user's line, if an annotation does not fit the mesh."""
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
    """Partitions one jaxpr into the local program that is being staged."""

    def __init__(self, plan: Propagation, to: Resharder, jaxpr: Jaxpr):
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
        """Define a variable by its first share."""
        self.versions[var] = [shard]

    def read(
        self, atom: Atom, layout: Layout, unreduced: frozenset[str] = _NONE, exactly: bool = False
    ) -> Shard:
        """The value in ``layout``, unreduced over a subset of (or exactly) these axes."""
        if isinstance(atom, Literal):
            shard = Shard(atom.array, atom.aval, layout, zero=_is_zero(atom))
            return self.as_unreduced(shard, unreduced) if exactly else shard
        versions = self.versions[atom]
        for known in versions:
            if known.layout == layout and (
                known.unreduced == unreduced if exactly else known.unreduced <= unreduced
            ):
                return known
        nearest = min(versions, key=lambda s: self.to.cost(s, layout, unreduced))
        if atom in self.transposed and not nearest.unreduced and self.to.cost(nearest, layout, unreduced):
            resharded = self._transposed(atom, layout)
        else:
            resharded = self.to.move(nearest, layout, unreduced)
        if exactly:
            resharded = self.as_unreduced(resharded, unreduced)
        versions.append(resharded)
        return resharded

    def read_values(self, atoms: Sequence[Atom], layouts: Sequence[Layout]) -> list[Any]:
        """Local values in given layouts."""
        return [self.read(a, layout).value for a, layout in zip(atoms, layouts, strict=True)]

    def _transposed(self, var: Var, layout: Layout) -> Shard:
        """Reshard a transpose's operand, not its result: gather a tied table once."""
        eqn = self.transposed[var]
        permutation = eqn.params["permutation"]
        before = tuple(layout[permutation.index(d)] for d in range(len(layout)))
        moved = self.read(eqn.invars[0], before)
        return Shard(transpose_p.bind(moved.value, **eqn.params), var.aval, layout, zero=moved.zero)

    def as_unreduced(self, shard: Shard, unreduced: frozenset[str]) -> Shard:
        """Make a value unreduced over axes: one device keeps it, others get zeros."""
        more = tuple(a for a in self.to.mesh.axis_names if a in unreduced - shard.unreduced)
        if not more:
            return shard
        value = shard.value
        if not shard.zero:
            value = mc.keep_first_p.bind(value, src="I", dst="U", **self.to.over(more))
        return replace(shard, value=value, unreduced=shard.unreduced | {*more})

    def is_zero(self, atom: Atom) -> bool:
        """True if a value is known to be 0 everywhere."""
        return _is_zero(atom) if isinstance(atom, Literal) else any(s.zero for s in self.versions[atom])

    def unreduced_over(self, atom: Atom) -> frozenset[str]:
        """Axes over which a value with a single reader may stay unreduced; zero: any."""
        if self.is_zero(atom):
            return frozenset(self.to.mesh.axis_names)
        if isinstance(atom, Literal) or self.readers[atom] > 1:
            return _NONE
        return frozenset.intersection(*[s.unreduced for s in self.versions[atom]])

    # -- equations -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Partition all equations, each at the user's line."""
        previous = source.replay.line
        try:
            for eqn in self.jaxpr.eqns:
                source.replay.line = eqn.source
                self.equation(eqn)
        finally:
            source.replay.line = previous

    def equation(self, eqn: Eqn) -> None:
        """Stage one equation into the local program."""
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
        """Reshard the operand as annotated; nothing is computed."""
        (x,), (out,) = eqn.invars, eqn.outvars
        says_nothing = len(eqn.params["free"]) == x.aval.ndim
        unreduced = (
            self.unreduced_over(x) if says_nothing else self.unreduced_over(x) & eqn.params["spec"].unreduced
        )
        shard = self.read(x, self.plan.layout(out), unreduced)
        self.write(out, shard)
        if isinstance(x, Var):
            self.versions[out] += [s for s in self.versions[x] if s is not shard and not s.unreduced]

    def operation(self, eqn: Eqn, node: Node) -> None:
        """Stage an operation by its factor rule."""
        rule, mesh = node.rule, self.to.mesh
        unreduced, group = self._stays_unreduced(eqn, node)
        node = node.without(unreduced)
        layouts = node.layouts(rule.operands, mesh)
        partial = tuple(a for a in mesh.axis_names if any(a in node.axes.get(f, ()) for f in rule.reduced))
        operands = []
        for i, (atom, layout) in enumerate(zip(eqn.invars, layouts, strict=True)):
            may_stay = unreduced if i in group else _NONE
            if i in rule.partial:
                shard = self.read(atom, layout, may_stay.union(partial), exactly=True)
            else:
                shard = self.read(atom, layout, may_stay)
            if i in rule.trusted:
                shard = self._masked(shard, [0] * len(layout))
            elif i not in rule.harmless:
                shard = self._masked(shard, [_neutral(factors, rule, atom) for factors in rule.operands[i]])
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
                shard = Shard(out, var.aval, layout, unreduced | {*over})
            else:
                for how in hows:
                    out = self.to.reduce(out, over, how)
                shard = Shard(out, var.aval, layout, unreduced, zero)
            self.write(var, shard)

    def effect(self, eqn: Eqn) -> None:
        """Stage a side effect: the first rank runs it, and broadcasts its results."""
        layouts: list[Layout] = [((),) * v.aval.ndim for v in eqn.outvars]
        operands = [self.read(a, ((),) * a.aval.ndim).value for a in eqn.invars]
        axes = tuple(a for a, n in self.to.mesh.shape.items() if n > 1 and a not in self.to.manual)
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

    def _stays_unreduced(self, eqn: Eqn, node: Node) -> tuple[frozenset[str], frozenset[int]]:
        """Axes over which the result stays unreduced with its operands; these operands."""
        for group in node.rule.linear:
            if all(isinstance(eqn.invars[i], Literal) for i in group):
                continue
            unreduced = frozenset.intersection(*[self.unreduced_over(eqn.invars[i]) for i in group])
            if len(group) == 1 and eqn.prim is not transpose_p:
                unreduced -= (
                    node.used
                )  # reduce-scattered first, the operation is smaller; but combine two sums before
            if unreduced:
                return unreduced, group
        return _NONE, frozenset()

    def _masked(self, shard: Shard, values: Sequence[Any]) -> Shard:
        """Fill the padding of a share along each dimension with a value; None leaves it."""
        value = shard.value
        dims = zip(shard.aval.shape, shard.layout, values, strict=True)
        for dim, (n, axes, other) in enumerate(dims):
            if other is not None and n % self.to.parts(axes):
                value = self.to.inside(value, n, dim, axes, other)
        return replace(shard, value=value)

    # -- bodies --------------------------------------------------------------------------------------

    def inner(self, jaxpr: Jaxpr, shards: Sequence[Shard]) -> _Body:
        """Partition a body, applied to values of the program that is being staged."""
        body = _Body(self.plan, self.to, jaxpr)
        for var, shard in zip(jaxpr.invars, shards, strict=True):
            body.write(var, shard)
        body.run()
        return body

    def staged(
        self, jaxpr: Jaxpr, shards: Sequence[Shard], outs: Callable[[_Body], list[Any]]
    ) -> tuple[Jaxpr, tuple]:
        """Stage a body as a local jaxpr of ``shards``, and hoist its constants."""

        def run(*values: Any) -> list[Any]:
            return outs(self.inner(jaxpr, [replace(s, value=v) for s, v in zip(shards, values, strict=True)]))

        return passes.dce(stage(run, [s.value.aval for s in shards], jaxpr.name)).hoist()

    def read_as(self, atoms: Sequence[Atom], inner: Sequence[Var]) -> list[Shard]:
        """Operands in the layouts of a body's parameters."""
        return [
            replace(self.read(a, self.plan.layout(v)), zero=False) for a, v in zip(atoms, inner, strict=True)
        ]

    def body_results(self, atoms: Sequence[Atom], layouts: Sequence[Layout]) -> list[Shard]:
        """Results of a body: sums without a reader inside stay unreduced.

        A body that runs many times then needs no collective for them. A result that is sharded outside is
        reduce-scattered inside, so that only a share leaves the body.
        """
        return [
            self.read(atom, layout, self._may_leave(atom, layout))
            for atom, layout in zip(atoms, layouts, strict=True)
        ]

    def _may_leave(self, atom: Atom, layout: Layout) -> frozenset[str]:
        if self.is_zero(atom) or not dtypes.is_inexact(atom.aval.dtype):
            return _NONE
        return self.unreduced_over(atom) - {a for axes in layout for a in axes}

    def results(
        self, eqn: Eqn, outs: Sequence[Any], layouts: Sequence[Layout], unreduced: Sequence[frozenset] = ()
    ) -> None:
        """Define the results of a loop, a branch or a call."""
        unreduced = unreduced or [_NONE] * len(outs)
        for var, out, layout, o in zip(eqn.outvars, outs, layouts, unreduced, strict=True):
            self.write(var, Shard(out, var.aval, layout, o))

    def call(self, eqn: Eqn) -> None:
        """Partition a call: inline, unless it marks a body to be rematerialized."""
        jaxpr: Jaxpr = eqn.params[eqn.prim.body]
        shards = self.read_as(eqn.invars, jaxpr.invars)
        layouts = [self.plan.layout(v) for v in eqn.outvars]
        if not eqn.prim.recomputed:
            results = self.inner(jaxpr, shards).body_results(jaxpr.outvars, layouts)
            for var, shard in zip(eqn.outvars, results, strict=True):
                self.write(var, shard)
            return
        unreduced: list[frozenset[str]] = []

        def outs(body: _Body) -> list[Any]:
            results = body.body_results(jaxpr.outvars, layouts)
            unreduced[:] = [shard.unreduced for shard in results]
            return [shard.value for shard in results]

        local, consts = self.staged(jaxpr, shards, outs)
        params = {**eqn.params, eqn.prim.body: local}
        self.results(eqn, eqn.prim.bind(*consts, *[s.value for s in shards], **params), layouts, unreduced)

    def function_of_shards(self, eqn: Eqn) -> None:
        """Inline the local body of a ``shard_map``, on operands laid out by its specs."""
        p, mesh = eqn.params, self.to.mesh
        if p["auto"]:
            self.partly_manual(eqn)
            return
        ins, outs = (
            [(layout_of(s, a.aval.ndim, mesh), s.unreduced) for a, s in zip(atoms, specs, strict=True)]
            for atoms, specs in ((eqn.invars, p["in_specs"]), (eqn.outvars, p["out_specs"]))
        )
        operands = [self.read(a, *way, exactly=True).value for a, way in zip(eqn.invars, ins, strict=True)]
        results = eval_jaxpr(p["jaxpr"], operands)
        self.results(eqn, results, [layout for layout, _ in outs], [unreduced for _, unreduced in outs])

    def partly_manual(self, eqn: Eqn) -> None:
        """Partition the body of a ``shard_map`` over the axes that it leaves automatic.

        A dimension is sharded by the spec first, then by automatic axes, as the operand is already.
        """
        p, mesh = eqn.params, self.to.mesh
        body: Jaxpr = p["jaxpr"]
        operands, shardings = [], []
        for atom, spec, local in zip(eqn.invars, p["in_specs"], body.in_avals, strict=True):
            manual = layout_of(spec, local.ndim, mesh)
            more = self._automatic(atom, p["auto"], local.shape)
            layout = tuple(a + b for a, b in zip(manual, more, strict=True))
            operands.append(self.read(atom, layout, spec.unreduced, exactly=True).value)
            shardings.append(NamedSharding(mesh, PartitionSpec(*more)))
        layouts, ways = [], []
        for spec, var, local in zip(p["out_specs"], eqn.outvars, body.out_avals, strict=True):
            own = automatic(self.plan.layout(var), p["auto"], local.shape, mesh)
            manual = layout_of(spec, local.ndim, mesh)
            layouts.append(tuple(a + b for a, b in zip(manual, own, strict=True)))
            ways.append(NamedSharding(mesh, PartitionSpec(*own)))
        manual_axes = frozenset(mesh.axis_names) - {*p["auto"]}
        inner, _ = localise(body, shardings, mesh, ways, manual=manual_axes)
        self.results(eqn, eval_jaxpr(inner, operands), layouts, [s.unreduced for s in p["out_specs"]])

    def _automatic(self, atom: Atom, auto: Sequence[str], shape: Sequence[int]) -> Layout:
        """The automatic axes that shard an operand, where they divide its shard."""
        if isinstance(atom, Literal):
            return ((),) * len(shape)
        planned = [self.plan.layout(atom), *(s.layout for s in self.versions[atom])]
        own = [automatic(layout, auto, shape, self.to.mesh) for layout in planned]
        return next((layout for layout in own if any(layout)), own[0])

    def cond(self, eqn: Eqn) -> None:
        """Partition a branch: a replicated index, and branches with equal layouts."""
        index, *operands = eqn.invars
        branches = eqn.params["branches"]
        shards = self.read_as(operands, branches[0].invars)
        layouts = [self.plan.layout(v) for v in eqn.outvars]

        parts = [
            self.staged(
                branch, shards, functools.partial(_Body.read_values, atoms=branch.outvars, layouts=layouts)
            )
            for branch in branches
        ]
        consts = [c for _, cs in parts for c in cs]
        closed, at = [], 0
        for local, cs in parts:  # every branch takes the constants of all branches
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
        """Partition a loop with a replicated condition."""
        p = eqn.params
        n, m = p["n_cond"], p["n_cond"] + p["n_body"]
        cond, body = p["cond"], p["body"]
        of_cond = self.read_as(eqn.invars[:n], cond.invars[:n])
        of_body = self.read_as(eqn.invars[n:m], body.invars[: m - n])
        inner = body.invars[m - n :]
        layouts = [self.plan.layout(v) for v in inner]
        carry = self.read_as(eqn.invars[m:], inner)
        test, c_consts = self.staged(cond, [*of_cond, *carry], lambda b: b.read_values(cond.outvars, [()]))
        step, b_consts = self.staged(body, [*of_body, *carry], lambda b: b.read_values(body.outvars, layouts))
        ins = [*c_consts, *[s.value for s in of_cond], *b_consts, *[s.value for s in (*of_body, *carry)]]
        counts = {"n_cond": len(c_consts) + n, "n_body": len(b_consts) + m - n}
        outs = while_p.bind(*ins, cond=test, body=step, max_steps=p["max_steps"], **counts)
        self.results(eqn, outs, layouts)

    def scan(self, eqn: Eqn) -> None:
        """Partition a loop; carries that accumulate unreduced sums are reduced at its end."""
        p = eqn.params
        body, n, k = p["jaxpr"], p["n_consts"], p["n_carry"]
        consts = self.read_as(eqn.invars[:n], body.invars[:n])
        carry = self.read_as(eqn.invars[n : n + k], body.invars[n : n + k])
        xs = []
        for atom, var in zip(eqn.invars[n + k :], body.invars[n + k :], strict=True):
            layout = self.plan.layout(var)
            stacked = self.read(atom, ((), *layout))
            one = stacked.value.aval.with_shape(stacked.value.aval.shape[1:])
            xs.append((stacked, Shard(Var(one), var.aval, layout)))
        carried = [self.plan.layout(v) for v in body.invars[n : n + k]]
        stacked_layouts = [((), *self.plan.layout(v)[1:]) for v in eqn.outvars[k:]]  # whole along the steps
        ends = [*carried, *[layout[1:] for layout in stacked_layouts]]
        unreduced = self._unreduced_carry(body, [*consts, *carry, *[x for _, x in xs]], n, k, ends)
        init = [
            self.as_unreduced(self.read(a, layout), o)
            for a, layout, o in zip(eqn.invars[n : n + k], carried, unreduced, strict=True)
        ]
        shards = [*consts, *[replace(s, zero=False) for s in init], *[x for _, x in xs]]
        every = [*unreduced]

        def outs(b: _Body) -> list[Any]:
            carry = [
                b.read(v, layout, o, exactly=True)
                for v, layout, o in zip(body.outvars[:k], carried, unreduced, strict=True)
            ]
            of_steps = b.body_results(body.outvars[k:], ends[k:])
            every[k:] = [shard.unreduced for shard in of_steps]
            return [shard.value for shard in (*carry, *of_steps)]

        local, extra = self.staged(body, shards, outs)
        ins = [*extra, *[s.value for s in (*consts, *init)], *[s.value for s, _ in xs]]
        results = scan_p.bind(*ins, **{**p, "jaxpr": local, "n_consts": len(extra) + n})
        self.results(eqn, results, [*carried, *stacked_layouts], every)

    def _unreduced_carry(
        self, body: Jaxpr, shards: list[Shard], n: int, k: int, ends: Sequence[Layout]
    ) -> list[frozenset[str]]:
        """Axes over which each of ``k`` carries (after ``n`` constants) stays unreduced.

        These are axes over which a sum in gives a sum out, if that saves collectives within a step.
        """

        def step(unreduced: Sequence[frozenset[str]]) -> tuple[int, list[frozenset[str]]]:
            """Collectives of a step for these carries, and the unreduced axes of results."""
            after: list[frozenset[str]] = []

            def outs(b: _Body) -> list[Any]:
                after.extend(b.unreduced_over(v) for v in body.outvars[:k])
                pairs = zip(body.outvars[:k], ends[:k], unreduced, strict=True)
                carry = [b.read(v, layout, o & b.unreduced_over(v)) for v, layout, o in pairs]
                return [shard.value for shard in (*carry, *b.body_results(body.outvars[k:], ends[k:]))]

            carry = [replace(s, unreduced=o) for s, o in zip(shards[n : n + k], unreduced, strict=True)]
            local, _ = self.staged(body, [*shards[:n], *carry, *shards[n + k :]], outs)
            return sum(map(mc.communicates, mc.equations(local))), after

        everywhere = frozenset(self.to.mesh.axis_names)
        unreduced = [
            everywhere - {a for axes in layout for a in axes}
            if out is not var and dtypes.is_inexact(var.aval.dtype)
            else _NONE
            for layout, out, var in zip(ends, body.outvars[:k], body.invars[n:], strict=False)
        ]
        while any(unreduced):
            n_collectives, after = step(unreduced)
            common = [a & b for a, b in zip(unreduced, after, strict=True)]
            if common == unreduced:
                return unreduced if n_collectives < step([_NONE] * k)[0] else [_NONE] * k
            unreduced = common
        return unreduced


def _neutral(factors: Sequence[int], rule: Rule, atom: Atom) -> Any:
    """The neutral element of the reduction over a dimension of ``factors``, or None."""
    how = next((rule.reduced[f] for f in factors if f in rule.reduced), None)
    return None if how is None else 0 if how == "sum" else limit(atom.aval.dtype, how == "min")


def _is_zero(literal: Literal) -> bool:
    return not np.any(np.asarray(literal.value).tobytes())


_CONTROL = {
    cond_p: _Body.cond,
    while_p: _Body.while_loop,
    scan_p: _Body.scan,
    shard_map_p: _Body.function_of_shards,
}
