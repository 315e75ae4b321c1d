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
from blufunc.core import dtypes, passes, source
from blufunc.core.array import scalar
from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.gather_scatter import gather_fill
from blufunc.core.ops.reduce import limit, reduce_or_p
from blufunc.core.ops.shape import concatenate_p
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.core.stage import stage
from blufunc.core.structure import broadcast_in_dim, broadcast_in_dim_p, broadcast_to
from blufunc.parallel import mesh_collectives as mc
from blufunc.parallel.constrain import sharding_constraint_p
from blufunc.parallel.mesh import AbstractMesh, Mesh
from blufunc.parallel.propagate import Node, Propagation, body_ties, distinct
from blufunc.parallel.sharding import NamedSharding
from blufunc.parallel.spec import PartitionSpec, names_of
from blufunc.parallel.transitions import Axes, Layout, Shard, Transitions
from blufunc.transforms.cond import cond_p
from blufunc.transforms.scan import scan_p
from blufunc.transforms.while_loop import while_p

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
    whole = distinct(passes.dce(passes.inline_calls(jaxpr)))
    _check_constraints(whole, mesh)
    abstract = mesh.abstract if isinstance(mesh, Mesh) else mesh
    plan = Propagation(whole, abstract, layouts, ends)
    to = Transitions(abstract)
    found: list[Layout] = [
        plan.layout(v) if end is None else end for v, end in zip(whole.outvars, ends, strict=True)
    ]
    owed_out = [_NONE if s is None else s.spec.unreduced for s in wanted]

    def run(*values: Any) -> list[Any]:
        body = _Body(plan, to, whole)
        for var, const in zip(whole.constvars, whole.consts, strict=True):
            body.write(var, Shard(const, var.aval, ((),) * var.aval.ndim))
        for var, value, layout, s in zip(whole.invars, values, layouts, in_shardings, strict=True):
            body.write(var, Shard(value, var.aval, layout, s.spec.unreduced))
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
    specs = [
        PartitionSpec(*layout, unreduced=owed) for layout, owed in zip(found, owed_out, strict=True)
    ]
    return passes.dce(local), [NamedSharding(mesh, spec) for spec in specs]


def _checked(sharding: NamedSharding, atom: Atom, mesh: Any, what: str) -> Layout:
    """The layout of a sharding of this mesh for a value."""
    mine, its = (m.abstract if isinstance(m, Mesh) else m for m in (mesh, sharding.mesh))
    if mine != its:
        raise errors.ShardingError(
            f"{what} lies on the mesh {its}, and the program is for the mesh {mine}.",
            where=source.here(),
            fix="bf.device_put it onto that mesh first",
        )
    return tuple(names_of(e) for e in sharding.spec.for_rank(atom.aval.ndim))


def _check_constraints(jaxpr: Jaxpr, mesh: Mesh | AbstractMesh) -> None:
    """Raise ShardingError, at the user's line, where an annotation does not fit the mesh."""
    for eqn in jaxpr.eqns:
        if eqn.prim is sharding_constraint_p:
            own, abstract = eqn.params["mesh"], mesh.abstract if isinstance(mesh, Mesh) else mesh
            missing = [a for a in eqn.params["spec"].axes if a not in mesh.shape]
            if missing or (own is not None and own != abstract):
                what = f"names the axis {missing[0]!r}" if missing else f"is for the mesh {own}"
                raise errors.ShardingError(
                    f"the annotation {eqn.params['spec']} {what}, and the program is for the mesh {abstract}.",
                    where=source.describe(eqn.source),
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
        self.readers = Counter(
            a for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars) for a in atoms if isinstance(a, Var)
        )

    # -- values --------------------------------------------------------------------------------------

    def write(self, var: Var, shard: Shard) -> None:
        """The first way in which a value lies."""
        self.versions[var] = [shard]

    def read(self, atom: Atom, layout: Layout, owed: frozenset[str] = _NONE, exactly: bool = False) -> Shard:
        """The value laid out by ``layout``, with sums owed over no more than ``owed``, or exactly these."""
        if isinstance(atom, Literal):
            shard = Shard(atom.array, atom.aval, layout, zero=not np.any(np.asarray(atom.value).tobytes()))
            return self.owing(shard, owed) if exactly else shard
        versions = self.versions[atom]
        for known in versions:
            if known.layout == layout and (known.owed == owed if exactly else known.owed <= owed):
                return known
        nearest = min(versions, key=lambda s: self.to.cost(s, layout, owed))
        made = self.to.move(nearest, layout, owed)
        if exactly:
            made = self.owing(made, owed)
        versions.append(made)
        return made

    def owing(self, shard: Shard, owed: frozenset[str]) -> Shard:
        """The value as a sum over ``owed`` axes: one device of them has it, the others have zeros."""
        more = tuple(a for a in self.to.mesh.axis_names if a in owed - shard.owed)
        if not more:
            return shard
        value = shard.value
        if not shard.zero:
            value = mc.keep_first_p.bind(value, src="I", dst="U", **self.to.over(more))
        return replace(shard, value=value, owed=shard.owed | {*more})

    def owes(self, atom: Atom) -> frozenset[str]:
        """Over which axes a value is still a sum, if it may stay one: nobody else reads it."""
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
        if eqn.prim is sharding_constraint_p:
            self.constraint(eqn)
        elif eqn.prim in _CONTROL:
            _CONTROL[eqn.prim](self, eqn)
        elif body_ties(eqn) is not None:
            self.call(eqn)
        else:
            self.operation(eqn, self.plan.nodes[eqn])

    def constraint(self, eqn: Eqn) -> None:
        """The operand in the layout that is wanted; nothing is computed."""
        (x,), (out,) = eqn.invars, eqn.outvars
        shard = self.read(x, self.plan.layout(out))
        self.write(out, shard)
        if isinstance(x, Var):
            self.versions[out] += [s for s in self.versions[x] if s is not shard and not s.owed]

    def operation(self, eqn: Eqn, node: Node) -> None:
        """An equation whose rule says how its dimensions go together."""
        rule, mesh = node.rule, self.to.mesh
        owed, group = self._stays_owed(eqn, node)
        layouts = node.layouts(rule.operands, mesh)
        partial = tuple(a for a in mesh.axis_names if any(a in node.axes.get(f, ()) for f in rule.reduced))
        operands = []
        for i, (atom, layout) in enumerate(zip(eqn.invars, layouts, strict=True)):
            if i in rule.partial:
                shard = self.read(atom, layout, frozenset(partial), exactly=True)
            else:
                shard = self.read(atom, layout, owed if i in group else _NONE)
            operands.append(self._without_padding(shard, rule.operands[i], node))
        results = node.layouts(rule.results, mesh)
        locals_ = [x.value for x in operands]
        out_shapes = [
            self.to.local_shape(v.aval.shape, layout) for v, layout in zip(eqn.outvars, results, strict=True)
        ]
        params = eqn.params
        if rule.params is not None:
            params = rule.params(params, [x.aval.shape for x in locals_], out_shapes)
        special = _SPECIAL.get(rule.special)
        if special is not None:
            outs = special(self, eqn, node, locals_, params, results)
        else:
            out = eqn.prim.bind(*locals_, **params)
            outs = out if eqn.prim.multiple_results else [out]
        hows = {how for f, how in rule.reduced.items() if node.axes.get(f)}
        zero = bool(operands) and operands[0].zero and eqn.prim.kind == "movement" and len(operands) == 1
        for var, out, layout in zip(eqn.outvars, outs, results, strict=True):
            if "sum" in hows:
                shard = Shard(out, var.aval, layout, owed | {*partial})
            else:
                for how in hows:
                    out = self.to.reduce(out, partial, how)
                shard = Shard(out, var.aval, layout, owed, zero)
            self.write(var, shard)

    def _stays_owed(self, eqn: Eqn, node: Node) -> tuple[frozenset[str], frozenset[int]]:
        """The axes over which the result stays a sum because operands are, and which operands."""
        for group in node.rule.linear:
            owed = frozenset.intersection(*[self.owes(eqn.invars[i]) for i in group]) - node.used
            if owed:
                return owed, group
        return _NONE, frozenset()

    def _without_padding(self, shard: Shard, dims: Sequence[tuple[int, ...]], node: Node) -> Shard:
        """The share with what is beyond the edge masked along factors that are reduced."""
        value = shard.value
        for dim, (factors, axes) in enumerate(zip(dims, shard.layout, strict=True)):
            n = shard.aval.shape[dim]
            how = next((node.rule.reduced[f] for f in factors if f in node.rule.reduced), None)
            if how is None or n % self.to.parts(axes) == 0 or (node.rule.special and shard.aval.ndim == 0):
                continue
            if node.rule.special == "gather" or not dtypes.is_numeric(shard.aval.dtype):
                continue
            neutral = 0 if how == "sum" else limit(shard.aval.dtype, how == "min")
            value = self.to.inside(value, n, dim, axes, neutral)
        return shard if value is shard.value else replace(shard, value=value)

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

    def results(self, eqn: Eqn, outs: Sequence[Any], layouts: Sequence[Layout], owed: Sequence[frozenset] = ()) -> None:
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
            body = self.inner(jaxpr, shards)
            for var, inside, layout in zip(eqn.outvars, jaxpr.outvars, layouts, strict=True):
                self.write(var, body.read(inside, layout))
            return
        local, consts = self.staged(
            jaxpr,
            shards,
            lambda body: [body.read(v, lay).value for v, lay in zip(jaxpr.outvars, layouts, strict=True)],
        )
        params = {**eqn.params, eqn.prim.body: local}
        self.results(eqn, eqn.prim.bind(*consts, *[s.value for s in shards], **params), layouts)

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
        stacked_layouts = [self.plan.layout(v) for v in eqn.outvars[k:]]
        ends = [*carried, *[layout[1:] for layout in stacked_layouts]]
        owed = self._owed_carry(body, [*consts, *carry, *[x for _, x in xs]], n, k, ends)
        init = [
            self.owing(self.read(a, layout), o)
            for a, layout, o in zip(eqn.invars[n : n + k], carried, owed, strict=True)
        ]
        shards = [*consts, *[replace(s, zero=False) for s in init], *[x for _, x in xs]]
        every = [*owed, *[_NONE] * (len(ends) - k)]

        def outs(b: _Body) -> list[Any]:
            return [
                b.read(v, layout, o, exactly=True).value
                for v, layout, o in zip(body.outvars, ends, every, strict=True)
            ]

        local, extra = self.staged(body, shards, outs)
        ins = [*extra, *[s.value for s in (*consts, *init)], *[s.value for s, _ in xs]]
        made = scan_p.bind(*ins, **{**p, "jaxpr": local, "n_consts": len(extra) + n})
        self.results(eqn, made, [*carried, *stacked_layouts], every)

    def _owed_carry(
        self, body: Jaxpr, shards: list[Shard], n: int, k: int, ends: Sequence[Layout]
    ) -> list[frozenset[str]]:
        """Over which axes each carry can stay owed: those over which it comes out a sum if it goes in as one."""
        owed = [_NONE] * k
        for attempt in range(2):
            seen: list[frozenset[str]] = []

            def look(b: _Body) -> list[Any]:
                seen.extend(self._owing_over(b, body, i + n, v) for i, v in enumerate(body.outvars[:k]))
                return []

            trial = [
                replace(s, owed=owed[i - n]) if n <= i < n + k else s for i, s in enumerate(shards)
            ]
            self.staged(body, trial, look)
            divided = [{a for axes in layout for a in axes} for layout in ends[:k]]
            seen = [s - d for s, d in zip(seen, divided, strict=True)]
            owed = seen if attempt == 0 else [a & b for a, b in zip(owed, seen, strict=True)]
        return owed

    def _owing_over(self, b: _Body, body: Jaxpr, place: int, out: Atom) -> frozenset[str]:
        """The axes that one addend of a carry owes: found in the sum that makes it, if it makes nothing else."""
        if isinstance(out, Literal) or b.readers[out] > 1 or b.readers[body.invars[place]] > 1:
            return _NONE
        made = b.owes(out)
        if made:
            return made
        eqn = next((e for e in body.eqns if out in e.outvars), None)
        if eqn is None or body.invars[place] not in eqn.invars:
            return _NONE
        if frozenset({0, 1}) not in self.plan.nodes[eqn].rule.linear if eqn in self.plan.nodes else True:
            return _NONE
        (other,) = [a for a in eqn.invars if a is not body.invars[place]] or [None]
        if not isinstance(other, Var) or b.readers[other] > 1:
            return _NONE
        return b.versions[other][0].owed


# -- what has to be computed otherwise on a share -----------------------------------------------------


def _local_iota(body, eqn, node, operands, params, results):
    """Counting from where the share begins."""
    d, dtype = params["dimension"], params["dtype"]
    out = eqn.prim.bind(**params)
    axes = results[0][d]
    if not axes:
        return [out]
    start = body.to.start(eqn.params["shape"][d], axes)
    return [ew.add(out, broadcast_to(ew.convert(start, dtype), out.aval.shape))]


def _shifted(body, indices, numbers_map, shape, layout, clip):
    """Indices counted from where the share of the table begins, along the dimensions that are divided."""
    if indices.aval.dtype.itemsize < 4:
        indices = ew.convert(indices, dtypes.int32)
    dtype = indices.aval.dtype
    starts, tops = [], []
    for d in numbers_map:
        starts.append(body.to.start(shape[d], layout[d], dtype) if layout[d] else scalar(0, dtype))
        tops.append(scalar(shape[d] - 1, dtype))
    if clip:
        top = _row(tops, indices.aval.shape)
        indices = ew.clamp(broadcast_to(scalar(0, dtype), top.aval.shape), indices, top)
    return ew.sub(indices, _row(starts, indices.aval.shape)), indices


def _row(numbers, shape):
    """An array of ``shape`` that has ``numbers`` along the last dimension."""
    ones = [broadcast_in_dim_p.bind(x, shape=(*shape[:-1], 1), dims=()) for x in numbers]
    return ones[0] if len(ones) == 1 else concatenate_p.bind(*ones, dimension=len(shape) - 1)


def _local_gather(body, eqn, node, operands, params, results):
    """A lookup in the share of a table: what lies in another gives 0, and the sum over the shares is owed."""
    x, indices = operands
    numbers, mode = params["dimension_numbers"], params["mode"]
    shape = eqn.invars[0].aval.shape
    layout = node.layouts(node.rule.operands[:1], body.to.mesh)[0]
    divided = tuple(a for d in numbers.start_index_map for a in layout[d])
    if not divided:
        return [eqn.prim.bind(x, indices, **params)]
    drops = mode is GatherScatterMode.FILL_OR_DROP
    local, indices = _shifted(body, indices, numbers.start_index_map, shape, layout, clip=not drops)
    how = {**params, "mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0, "indices_are_sorted": False}
    out = eqn.prim.bind(x, local, **how)
    if not drops:
        return [out]
    # outside of the whole table: the fill, once in the sum
    dtype = indices.aval.dtype
    tops = _row([scalar(shape[d], dtype) for d in numbers.start_index_map], indices.aval.shape)
    outside = ew.bitwise_or(ew.lt(indices, ew.zeros_of(indices)), ew.ge(indices, tops))
    outside = reduce_or_p.bind(outside, axes=(outside.aval.ndim - 1,))
    batch = tuple(d for d in range(out.aval.ndim) if d not in numbers.offset_dims)
    fill = scalar(gather_fill(x.aval.dtype, params["fill_value"]), x.aval.dtype)
    fill = broadcast_to(mc.keep_first_p.bind(fill, src="I", dst="U", **body.to.over(divided)), out.aval.shape)
    return [ew.select(broadcast_in_dim(outside, out.aval.shape, batch), fill, out)]


def _local_scatter(body, eqn, node, operands, params, results):
    """Updates of the share of a table: those of other shares are dropped."""
    x, indices, updates = operands
    numbers = params["dimension_numbers"]
    divided = [d for d in numbers.scatter_dims_to_operand_dims if results[0][d]]
    if divided:
        clip = params["mode"] is GatherScatterMode.CLIP
        shape = eqn.invars[0].aval.shape
        indices, _ = _shifted(body, indices, numbers.scatter_dims_to_operand_dims, shape, results[0], clip)
        params = {**params, "mode": GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    return [eqn.prim.bind(x, indices, updates, **params)]


_SPECIAL = {"iota": _local_iota, "gather": _local_gather, "scatter": _local_scatter}
_CONTROL = {cond_p: _Body.cond, while_p: _Body.while_loop, scan_p: _Body.scan}
