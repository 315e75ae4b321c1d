"""Explicit axes: layouts follow from operands, and ambiguity is an error.

Parallel, stage 3, above ``dim_groups.py`` and below ``propagate.py``. In: layouts of parameters along ``Explicit`` mesh
axes. Out: those of all values. Nothing is guessed: the layout of a result follows from the operands by the rule of the
operation, loops and branches included, and only ``reshard`` and ``constrain`` change it. Operands that claim an axis
for two dimensions of one operation, or different axes for one dimension, are an error with the candidates. A whole
operand agrees with a sharded one, and consumers reduce sums over sharded dimensions, as along all axes.

The cotangent of a resharded value is *loose*: the layout of its origin is unknown at transposition, so it adopts the
layout of the operands it combines with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.dim_groups import Node
from blufunc.parallel.partition.resharding import Axes, Layout, layout_of
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p


class Explicit:
    """The layouts of all values of ``jaxpr`` along the explicit axes of ``mesh``.

    Args:
      jaxpr: a jaxpr whose variables, those of bodies too, are bound once.
      nodes: the node of each equation other than loops, branches and calls. Their factors get the explicit axes.
      layouts_in: layouts of parameters.
      mesh: the mesh.
    Raises:
      ShardingError: operands of an operation disagree.
    Attributes:
      layouts: by variable.
    """

    def __init__(
        self, jaxpr: Jaxpr, nodes: Mapping[Eqn, Node], layouts_in: Sequence[Layout | None], mesh: AbstractMesh
    ):
        self.nodes, self.mesh = nodes, mesh
        self.layouts: dict[Var, Layout] = {}
        self._loose: set[Var] = set()
        ins = [self._explicit(g) if g is not None else None for g in layouts_in]
        self._body(jaxpr, ins)

    def _explicit(self, layout: Iterable[Axes]) -> Layout:
        """The explicit axes of a layout, up to the first other axis per dimension."""
        explicit = self.mesh.explicit
        return tuple(tuple(itertools.takewhile(explicit.__contains__, axes)) for axes in layout)

    def _of(self, atom: Atom) -> Layout:
        return self.layouts.get(atom, ((),) * atom.aval.ndim)  # type: ignore[arg-type]

    def _is_loose(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self._loose

    def _set(self, var: Var, layout: Layout, loose: bool = False) -> None:
        self.layouts[var] = layout
        (self._loose.add if loose else self._loose.discard)(var)

    def _spec(self, spec: PartitionSpec, ndim: int) -> Layout:
        return self._explicit(layout_of(spec, ndim, self.mesh))

    # -- equations -----------------------------------------------------------------------------------

    def _body(self, jaxpr: Jaxpr, ins: Sequence[Layout | None], loose: Sequence[bool] = ()) -> list[Layout]:
        """Propagate layouts ``ins`` through a body; the layouts of its results."""
        for var, layout, free in zip(jaxpr.invars, ins, loose or [False] * len(ins), strict=True):
            if layout is not None:
                self._set(var, layout, free)
        for eqn in jaxpr.eqns:
            if isinstance(eqn.prim, ShardingConstraint):
                self._constraint(eqn)
            elif eqn.prim is shard_map_p:
                for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
                    self._set(var, self._spec(spec, var.aval.ndim))
            elif eqn.prim is scan_p:
                self._scan(eqn)
            elif eqn.prim is while_p:
                self._while(eqn)
            elif eqn.prim is cond_p:
                self._cond(eqn)
            elif eqn in self.nodes:
                self._operation(eqn, self.nodes[eqn])
            else:
                self._results(eqn, self._call(eqn.params[eqn.prim.body], eqn.invars))
        return [self._of(v) for v in jaxpr.outvars]

    def _call(self, body: Jaxpr, args: Sequence[Atom]) -> list[Layout]:
        return self._body(body, [self._of(a) for a in args], [self._is_loose(a) for a in args])

    def _results(self, eqn: Eqn, layouts: Sequence[Layout]) -> None:
        for var, layout in zip(eqn.outvars, layouts, strict=True):
            self._set(var, layout)

    def _constraint(self, eqn: Eqn) -> None:
        (x,), (out,) = eqn.invars, eqn.outvars
        free, required = eqn.params["free"], self._spec(eqn.params["spec"], out.aval.ndim)
        chosen = [a if d in free else b for d, (a, b) in enumerate(zip(self._of(x), required, strict=True))]
        used = {a for axes in required for a in axes}
        chosen = [
            tuple(itertools.takewhile(lambda a: a not in used, k)) if d in free else k
            for d, k in enumerate(chosen)
        ]
        self._set(out, tuple(chosen), loose=len(free) == out.aval.ndim)

    def _operation(self, eqn: Eqn, node: Node) -> None:
        """Derive the layout of the results from the operands, which must agree."""
        sides = list(zip(eqn.invars, node.rule.operands, strict=True))
        claimed = [(atom, list(node.claims(self._of(atom), dims, self.mesh))) for atom, dims in sides]
        strict = [w for w in claimed if not self._is_loose(w[0])]
        if _disagree([claim for _, claims in strict for claim in claims]):
            raise self._ambiguous(eqn, node, strict)
        loose = [w for w in claimed if self._is_loose(w[0])]
        node.concede_all([claim for _, claims in (*strict, *loose) for claim in claims], self.mesh)
        free = not any(claims for _, claims in strict)
        for var, layout in zip(eqn.outvars, node.layouts(node.rule.results, self.mesh), strict=True):
            self._set(var, layout, loose=free and any(layout))

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
        specs_of_operands = " and ".join(str(PartitionSpec(*self._of(a))) for a, claims in claimed if claims)
        return self._error(
            eqn, f"{eqn.prim.name} of operands sharded as {specs_of_operands} is ambiguous", list(candidates)
        )

    def _error(self, eqn: Eqn, what: str, candidates: Sequence[PartitionSpec]) -> errors.ShardingError:
        names = ", ".join(map(repr, sorted(self.mesh.explicit)))
        return errors.ShardingError(
            f"{what}; the result could be sharded as {' or as '.join(map(str, candidates))}.",
            where=source.describe(eqn.source),
            why=f"along Explicit axes ({names}) layouts follow from the operands, and nothing is guessed.",
            fix=f"bf.reshard an operand before, for {candidates[0]}; or make_mesh(..., axis_types=AxisType.Auto)",
        )

    # -- bodies --------------------------------------------------------------------------------------

    def _join_each(
        self, eqn: Eqn, some: Sequence[Layout], others: Sequence[Layout], what: str
    ) -> list[Layout]:
        """Merge layouts pairwise; ``what`` says what has them, given an index."""
        pairs = zip(some, others, strict=True)
        return [self._join(eqn, a, b, what.format(i)) for i, (a, b) in enumerate(pairs)]

    def _join(self, eqn: Eqn, a: Layout, b: Layout, what: str) -> Layout:
        """Merge two layouts: each fills the gaps of the other."""
        joined = tuple(x if len(x) >= len(y) else y for x, y in zip(a, b, strict=True))
        prefixes = all(j[: len(x)] == x for side in (a, b) for j, x in zip(joined, side, strict=True))
        used = [axis for axes in joined for axis in axes]
        if not prefixes or len(used) > len(set(used)):
            specs = [PartitionSpec(*a), PartitionSpec(*b)]
            raise self._error(eqn, f"{what} is sharded as {specs[0]} and as {specs[1]}", specs)
        return joined

    def _loop(
        self, eqn: Eqn, carry: list[Layout], step: Callable[[list[Layout]], list[Layout]]
    ) -> list[Layout]:
        """The layouts of carries at a fixpoint: a step may only shard them further."""
        while True:
            joined = self._join_each(eqn, carry, step(carry), f"carry {{}} of {eqn.prim.name}")
            if joined == carry:
                return carry
            carry = joined

    def _scan(self, eqn: Eqn) -> None:
        body, n, k = eqn.params["jaxpr"], eqn.params["n_consts"], eqn.params["n_carry"]
        consts = [self._of(a) for a in eqn.invars[:n]]
        xs = [self._of(a)[1:] for a in eqn.invars[n + k :]]
        outs: list[Layout] = []

        def step(carry: list[Layout]) -> list[Layout]:
            outs[:] = self._body(body, [*consts, *carry, *xs])
            return outs[:k]

        carry = self._loop(eqn, [self._of(a) for a in eqn.invars[n : n + k]], step)
        self._results(eqn, [*carry, *[((), *layout) for layout in outs[k:]]])

    def _while(self, eqn: Eqn) -> None:
        p = eqn.params
        n, m = p["n_cond"], p["n_cond"] + p["n_body"]
        layouts = [self._of(a) for a in eqn.invars]
        carry = self._loop(eqn, layouts[m:], lambda carry: self._body(p["body"], [*layouts[n:m], *carry]))
        self._body(p["cond"], [*layouts[:n], *carry])
        self._results(eqn, carry)

    def _cond(self, eqn: Eqn) -> None:
        results = [self._call(branch, eqn.invars[1:]) for branch in eqn.params["branches"]]
        joined = results[0]
        for other in results[1:]:
            joined = self._join_each(eqn, joined, other, "result {} of the branches of cond")
        self._results(eqn, joined)


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
