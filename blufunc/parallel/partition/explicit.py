"""Explicit axes: layouts follow from operands, and ambiguity is an error.

Parallel, stage 3, above ``dim_groups.py`` and below ``propagate.py``. In: layouts of parameters along ``Explicit`` mesh
axes. Out: those of all values. Nothing is guessed: the layout of a result follows from the operands by the rule of the
operation, loops and branches included, and only ``reshard`` and ``constrain`` change it. Operands that claim an axis
for two dimensions of one operation, or different axes for one dimension, are an error with the candidates. A whole
operand agrees with a sharded one, and consumers reduce sums over sharded dimensions, as along all axes.

The cotangent of a resharded value is *loose*: the layout of its origin is unknown at transposition, so it adopts the
layout of the operands it combines with.

Along some axes a value may be *undecided*: along all that are not explicit, and, inside of ``auto_axes``, along those
of the region. What is computed from an undecided operand is undecided, too, until a ``Claim`` says how it is sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var, subjaxprs
from blufunc.core.primitives.sharding import rule_of
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.axis_regions import Claim, Release
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.dim_groups import Node, body_ties
from blufunc.parallel.partition.resharding import Axes, Layout, layout_of
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p

_NONE: frozenset[str] = frozenset()


class Known(NamedTuple):
    """The known layout of a value.

    Attributes:
      layout: along the axes that are decided.
      loose: the layout gives way to that of other operands.
      undecided: the axes along which the compiler chooses.
      neutral: made from numbers alone: it agrees with whatever it is combined with.
    """

    layout: Layout
    loose: bool = False
    undecided: frozenset[str] = _NONE
    neutral: bool = False


def regions(jaxpr: Jaxpr) -> bool:
    """True if a program decides axes only in parts of it (``explicit_axes``)."""
    return jaxpr.memoised(
        "explicit regions",
        lambda: any(isinstance(e.prim, Claim) or any(map(regions, subjaxprs(e.params))) for e in jaxpr.eqns),
    )


class Explicit:
    """The layouts of all values of ``jaxpr`` along the explicit axes of ``mesh``.

    Args:
      jaxpr: a jaxpr whose variables, those of bodies too, are bound once.
      known: of each parameter; None where nothing is.
      mesh: the mesh.
      nodes: the node of each equation other than loops, branches and calls. Their factors get the explicit axes.
    Raises:
      ShardingError: operands of an operation disagree.
    Attributes:
      known: by variable.
      results: what is known of the results.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        known: Sequence[Known | None],
        mesh: AbstractMesh,
        nodes: dict[Eqn, Node] | None = None,
    ):
        self.nodes, self.mesh = nodes if nodes is not None else {}, mesh
        self.known: dict[Var, Known] = {}
        self._auto = frozenset(mesh.axis_names) - mesh.explicit
        self.results = self._body(jaxpr, known)

    def decided(self, var: Var) -> frozenset[str]:
        """The axes along which the layout of a variable follows from the program."""
        known = self.known.get(var)
        if known is None or known.neutral:
            return self.mesh.explicit
        return frozenset(self.mesh.axis_names) - known.undecided

    def _of(self, atom: Atom) -> Known:
        found = self.known.get(atom)  # type: ignore[arg-type]
        return found if found is not None else Known(((),) * atom.aval.ndim, neutral=True)

    def _spec(self, spec: PartitionSpec, ndim: int, undecided: frozenset[str]) -> Layout:
        return _without(layout_of(spec, ndim, self.mesh), undecided)

    # -- equations -----------------------------------------------------------------------------------

    def _body(self, jaxpr: Jaxpr, ins: Sequence[Known | None]) -> list[Known]:
        """Propagate through a body; what is known of its results."""
        for var, known in zip(jaxpr.invars, ins, strict=True):
            if known is not None:
                self.known[var] = known
        for eqn in jaxpr.eqns:
            if isinstance(eqn.prim, ShardingConstraint):
                self.known[eqn.outvars[0]] = self._constraint(eqn)
            elif eqn.prim is shard_map_p:
                for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
                    undecided = self._hidden(eqn.invars) or self._auto
                    self.known[var] = Known(self._spec(spec, var.aval.ndim, undecided), undecided=undecided)
            elif eqn.prim is scan_p:
                self._scan(eqn)
            elif eqn.prim is while_p:
                self._while(eqn)
            elif eqn.prim is cond_p:
                self._cond(eqn)
            elif body_ties(eqn) is None:
                self._operation(eqn)
            else:
                self._results(eqn, self._call(eqn.params[eqn.prim.body], eqn.invars))
        return [self._of(v) for v in jaxpr.outvars]

    def _call(self, body: Jaxpr, args: Sequence[Atom]) -> list[Known]:
        return self._body(body, [self._of(a) for a in args])

    def _results(self, eqn: Eqn, known: Sequence[Known]) -> None:
        for var, k in zip(eqn.outvars, known, strict=True):
            self.known[var] = k._replace(loose=False)

    def _hidden(self, atoms: Sequence[Atom]) -> frozenset[str]:
        """The axes along which a result of these operands is undecided."""
        each = [k.undecided for k in map(self._of, atoms) if not k.neutral]
        return frozenset().union(*each)

    def _constraint(self, eqn: Eqn) -> Known:
        (x,), (out,) = eqn.invars, eqn.outvars
        known, free = self._of(x), eqn.params["free"]
        undecided = known.undecided if not known.neutral else self._auto
        if isinstance(eqn.prim, Release):
            undecided |= {*eqn.params["axes"]}
            return Known(_without(known.layout, undecided), undecided=undecided)
        if isinstance(eqn.prim, Claim):
            undecided -= {*eqn.params["axes"]}
        required = self._spec(eqn.params["spec"], out.aval.ndim, undecided)
        chosen = [a if d in free else b for d, (a, b) in enumerate(zip(known.layout, required, strict=True))]
        used = {a for axes in required for a in axes}
        chosen = [
            tuple(itertools.takewhile(lambda a: a not in used, k)) if d in free else k
            for d, k in enumerate(chosen)
        ]
        return Known(tuple(chosen), len(free) == out.aval.ndim, undecided)

    def _operation(self, eqn: Eqn) -> None:
        """Derive the layout of the results from the operands, which must agree."""
        node = self.nodes.get(eqn) or node_of(eqn)
        hidden = self._hidden(eqn.invars)
        sides = list(zip(eqn.invars, node.rule.operands, strict=True))
        claimed = [
            (atom, list(node.claims(_without(self._of(atom).layout, hidden), dims, self.mesh)))
            for atom, dims in sides
        ]
        strict = [w for w in claimed if not self._of(w[0]).loose]
        if _disagree([claim for _, claims in strict for claim in claims]):
            raise self._ambiguous(eqn, node, strict)
        loose = [w for w in claimed if self._of(w[0]).loose]
        node.concede_all([claim for _, claims in (*strict, *loose) for claim in claims], self.mesh)
        free = not any(claims for _, claims in strict)
        neutral = all(self._of(a).neutral for a in eqn.invars)
        for var, layout in zip(eqn.outvars, node.layouts(node.rule.results, self.mesh), strict=True):
            self.known[var] = Known(layout, free and any(layout), hidden, neutral)

    def _ambiguous(
        self, eqn: Eqn, node: Node, claimed: Sequence[tuple[Atom, Sequence]]
    ) -> errors.ShardingError:
        """The error of operands that disagree, with their layouts as candidates."""
        candidates: dict[PartitionSpec, None] = {}
        for first in range(len(claimed)):
            if claimed[first][1]:
                choice = replace(node, axes={})
                order = claimed[first], *claimed[:first], *claimed[first + 1 :]
                choice.concede_all([claim for _, claims in order for claim in claims], self.mesh)
                layout = choice.layouts(node.rule.results[:1], self.mesh)[0]
                candidates[PartitionSpec(*layout)] = None
        specs_of_operands = " and ".join(
            str(PartitionSpec(*self._of(a).layout)) for a, claims in claimed if claims
        )
        return self._error(
            eqn, f"{eqn.prim.name} of operands sharded as {specs_of_operands} is ambiguous", list(candidates)
        )

    def _error(self, eqn: Eqn, what: str, candidates: Sequence[PartitionSpec]) -> errors.ShardingError:
        axes = sorted(self.mesh.explicit) or sorted({a for spec in candidates for a in spec.axes})
        return errors.ShardingError(
            f"{what}; the result could be sharded as {' or as '.join(map(str, candidates))}.",
            where=source.describe(eqn.source),
            why=f"along Explicit axes ({', '.join(map(repr, axes))}) layouts follow from the operands, and nothing "
            "is guessed.",
            fix=f"bf.reshard an operand before, for {candidates[0]}; or leave it to the compiler: "
            "bf.sharding.auto_axes, or make_mesh(..., axis_types=AxisType.Auto)",
        )

    # -- bodies --------------------------------------------------------------------------------------

    def _join_each(self, eqn: Eqn, some: Sequence[Known], others: Sequence[Known], what: str) -> list[Known]:
        """Merge pairwise; ``what`` says what has the layouts, given an index."""
        pairs = zip(some, others, strict=True)
        return [self._join(eqn, a, b, what.format(i)) for i, (a, b) in enumerate(pairs)]

    def _join(self, eqn: Eqn, one: Known, other: Known, what: str) -> Known:
        joined = joined_with(one, other)
        if joined is None:
            specs = [PartitionSpec(*one.layout), PartitionSpec(*other.layout)]
            raise self._error(eqn, f"{what} is sharded as {specs[0]} and as {specs[1]}", specs)
        return joined

    def _loop(self, eqn: Eqn, carry: list[Known], step: Callable[[list[Known]], list[Known]]) -> list[Known]:
        """The known layouts of carries at a fixpoint: a step only shards them further."""
        carry = [k._replace(loose=False) for k in carry]
        while True:
            joined = self._join_each(eqn, carry, step(carry), f"carry {{}} of {eqn.prim.name}")
            if joined == carry:
                return carry
            carry = joined

    def _scan(self, eqn: Eqn) -> None:
        body, n, k = eqn.params["jaxpr"], eqn.params["n_consts"], eqn.params["n_carry"]
        known = [self._of(a)._replace(loose=False) for a in eqn.invars]
        xs = [x._replace(layout=x.layout[1:]) for x in known[n + k :]]
        outs: list[Known] = []

        def step(carry: list[Known]) -> list[Known]:
            outs[:] = self._body(body, [*known[:n], *carry, *xs])
            return outs[:k]

        carry = self._loop(eqn, known[n : n + k], step)
        self._results(eqn, [*carry, *[y._replace(layout=((), *y.layout)) for y in outs[k:]]])

    def _while(self, eqn: Eqn) -> None:
        p = eqn.params
        n, m = p["n_cond"], p["n_cond"] + p["n_body"]
        known = [self._of(a)._replace(loose=False) for a in eqn.invars]
        carry = self._loop(eqn, known[m:], lambda carry: self._body(p["body"], [*known[n:m], *carry]))
        self._body(p["cond"], [*known[:n], *carry])
        self._results(eqn, carry)

    def _cond(self, eqn: Eqn) -> None:
        results = [self._call(branch, eqn.invars[1:]) for branch in eqn.params["branches"]]
        joined = results[0]
        for other in results[1:]:
            joined = self._join_each(eqn, joined, other, "result {} of the branches of cond")
        self._results(eqn, joined)


def given(layout: Layout, mesh: AbstractMesh) -> Known:
    """An argument of a program, which is undecided along automatic axes."""
    auto = frozenset(mesh.axis_names) - mesh.explicit
    return Known(_without(layout, auto), undecided=auto)


def node_of(eqn: Eqn) -> Node:
    """The node of an operation."""
    avals, outs = [a.aval for a in eqn.invars], [v.aval for v in eqn.outvars]
    rule = source.at(eqn.source, rule_of)(eqn.prim, avals, outs, eqn.params)
    return Node(rule, eqn.invars, eqn.outvars, eqn.prim.kind in ("elementwise", "movement", "call"))


def joined_with(one: Known, other: Known) -> Known | None:
    """Merge two layouts of one value: each fills the gaps of the other.

    None if they disagree.
    """
    undecided = one.undecided | other.undecided
    a, b = _without(one.layout, undecided), _without(other.layout, undecided)
    joined = tuple(x if len(x) >= len(y) else y for x, y in zip(a, b, strict=True))
    prefixes = all(j[: len(x)] == x for side in (a, b) for j, x in zip(joined, side, strict=True))
    used = [axis for axes in joined for axis in axes]
    if not prefixes or len(used) > len(set(used)):
        return None
    return Known(joined, False, undecided, one.neutral and other.neutral)


def _without(layout: Iterable[Axes], undecided: frozenset[str]) -> Layout:
    """A layout up to the first undecided axis of each dimension."""
    return tuple(tuple(itertools.takewhile(lambda a: a not in undecided, axes)) for axes in layout)


def _disagree(claims: Sequence[tuple[int, Axes]]) -> bool:
    """True if claims put an axis on two factors, or different axes on one factor."""
    where: dict[str, int] = {}
    axes_of: dict[int, Axes] = {}
    for f, axes in claims:
        if any(where.setdefault(a, f) != f for a in axes):
            return True
        known = axes_of.get(f, ())
        n = min(len(known), len(axes))
        if known[:n] != axes[:n]:
            return True
        axes_of[f] = max(known, axes, key=len)
    return False
