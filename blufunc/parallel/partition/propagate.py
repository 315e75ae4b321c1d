"""Propagation: shardings of all values and operations from a few annotated ones.

Parallel, stage 3, below ``partition.py``, by the rules of primitives. In: a global jaxpr whose variables are distinct,
and the layouts of its parameters (and, if given, results). Out: a layout per variable, and per equation the mesh axes
of its factors.

Every equation is a *node* that ties dimensions by its factors; so is each value that enters or leaves the body of a
loop, a branch or a call. Layouts only grow, to a fixpoint: first from the user's constraints through elementwise and
movement operations, then from parameters too, then through all operations.

If operands and results of an equation disagree, operands win over results; then larger tensors; then factors that pass
through over reduced ones; then more shards. The loser is resharded. Along explicit mesh axes nothing is decided here:
``explicit.py`` derives the layouts, and raises an error if they are ambiguous.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var, subjaxprs
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs import simplify
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.partition.axis_priority import first
from blufunc.parallel.partition.dim_groups import Node, body_ties, distinct
from blufunc.parallel.partition.explicit import Explicit, given, node_of, regions
from blufunc.parallel.partition.resharding import Axes, Layout, layout_of


class Propagation:
    """Layouts of the variables of ``jaxpr``, with bodies, and nodes of its equations.

    Args:
      jaxpr: a jaxpr in which no two equations share a body: see ``distinct``.
      in_layouts: fixed layouts of parameters, or None.
      out_layouts: the same of results.
    Attributes:
      layouts: by variable.
      nodes: by equation, other than loops, branches and calls.
      all_nodes: these, and the ties of values that enter or leave bodies, in order.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        mesh: AbstractMesh,
        in_layouts: Sequence[Layout | None],
        out_layouts: Sequence[Layout | None],
    ):
        self.mesh = mesh
        self._explicit: Explicit | None = None
        self.layouts: dict[Var, Layout] = {}
        self.nodes: dict[Eqn, Node] = {}
        self._fixed: set[Var] = set(jaxpr.constvars)
        self.all_nodes: list[Node] = []
        self._partly: list[Eqn] = []
        self._clock = 0  # number of changes of layouts
        self._changed: dict[Atom, int] = {}
        self._visited: dict[Node, int] = {}
        of_parameters = {
            v: layout for v, layout in zip(jaxpr.invars, in_layouts, strict=True) if layout is not None
        }
        self._fixed.update(of_parameters)
        self._visit(jaxpr)
        begin, end = self._ends(jaxpr, of_parameters)
        of_parameters |= begin
        said = {v: layout for v, layout in self.layouts.items() if v not in begin and v not in end}
        self.layouts = dict(said)
        if mesh.explicit or regions(jaxpr):
            ins = [None if g is None else given(g, mesh) for g in in_layouts]
            self._explicit = Explicit(jaxpr, ins, mesh, self.nodes)
            for var, known in self._explicit.known.items():
                if var not in self._fixed and (any(known.layout) or not known.undecided):
                    self.layouts[var] = known.layout
        self._early()
        self._visited.clear()
        self.layouts.update(first(self.all_nodes, of_parameters, said, mesh.explicit))
        self._everywhere()
        self._visited.clear()
        self.layouts.update(of_parameters | end)
        for atom, layout in zip(jaxpr.outvars, out_layouts, strict=True):
            if layout is not None and isinstance(atom, Var) and self._free(atom):
                self.layouts[atom] = layout
        self._everywhere()
        for eqn in self._partly:
            self._automatic_results(eqn)
            self._everywhere()

    def layout(self, atom: Atom) -> Layout:
        """The layout of a value."""
        return self.layouts.get(atom, ((),) * atom.aval.ndim)  # type: ignore[arg-type]

    def _free(self, var: Var) -> bool:
        return var not in self._fixed and not any(self.layout(var))

    def _ends(
        self, jaxpr: Jaxpr, in_layouts: dict[Var, Layout]
    ) -> tuple[dict[Var, Layout], dict[Var, Layout]]:
        """Constraints at both ends of a program, on arguments or results, by ``shard``.

        They are not preferences for values in between, so they propagate like given layouts. A constraint that reshards
        an argument is a preference of the user, unless it shards a whole value.
        """
        readers = Counter(a for eqn in jaxpr.eqns for a in eqn.invars if isinstance(a, Var))
        fixed = [e for e in jaxpr.eqns if isinstance(e.prim, ShardingConstraint) and not e.params["free"]]
        begin: dict[Var, Layout] = {}
        for eqn in fixed:
            (x,), (out,) = eqn.invars, eqn.outvars
            before = begin.get(x, in_layouts.get(x)) if isinstance(x, Var) else None
            if before is not None and (not any(before) or before == self.layouts[out]):
                begin[out] = self.layouts[out]
        results = {v for v in jaxpr.outvars if isinstance(v, Var)}
        end = {v: self.layouts[v] for e in fixed for v in e.outvars if v in results and not readers[v]}
        for eqn in reversed(fixed):
            (x,), (out,) = eqn.invars, eqn.outvars
            if out in end and x in self.layouts and self.layouts[x] == end[out] and readers[x] == 1:
                end[x] = end[out]
        return begin, end

    # -- nodes ---------------------------------------------------------------------------------------

    def _visit(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if isinstance(eqn.prim, ShardingConstraint):
                self._constraint(eqn)
            elif eqn.prim is shard_map_p:
                self._manual(eqn)
            elif (ties := body_ties(eqn)) is not None:
                before, after = ties
                self.all_nodes.extend(before)
                for sub in subjaxprs(eqn.params):
                    self._visit(sub)
                self.all_nodes.extend(after)
            else:
                self.nodes[eqn] = self._node(eqn)

    def _node(self, eqn: Eqn) -> Node:
        node = node_of(eqn)
        self.all_nodes.append(node)
        return node

    def _constraint(self, eqn: Eqn) -> None:
        """A constraint fixes the layout of its result, except for the free dimensions."""
        spec, free = eqn.params["spec"], eqn.params["free"]
        (out,) = eqn.outvars
        self.layouts[out] = layout_of(spec, out.aval.ndim, self.mesh)
        node = self._node(eqn)
        self.nodes[eqn] = node
        if not free:
            self._fixed.add(out)

    def _manual(self, eqn: Eqn) -> None:
        """A ``shard_map``: its specs are the layouts of its results, and of free operands."""
        for atom, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
            if isinstance(atom, Var) and atom not in self._fixed:
                self._grow(atom, layout_of(spec, atom.aval.ndim, self.mesh))
        for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
            self.layouts[var] = layout_of(spec, var.aval.ndim, self.mesh)
            if not eqn.params["auto"]:
                self._fixed.add(var)
        if eqn.params["auto"]:
            self._partly.append(eqn)

    def _automatic_results(self, eqn: Eqn) -> None:
        """The layouts of results over automatic axes of a ``shard_map``."""
        p = eqn.params
        body = divisible(p["jaxpr"])
        ins = [
            automatic(self.layout(a), p["auto"], v.aval.shape, self.mesh)
            for a, v in zip(eqn.invars, body.invars, strict=True)
        ]
        plan = Propagation(body, self.mesh, ins, [None] * len(body.outvars))
        for var, spec, atom in zip(eqn.outvars, p["out_specs"], body.outvars, strict=True):
            manual = layout_of(spec, var.aval.ndim, self.mesh)
            if self.layout(var) == manual:
                own = automatic(plan.layout(atom), p["auto"], atom.aval.shape, self.mesh)
                self._grow(var, tuple(a + b for a, b in zip(manual, own, strict=True)))

    # -- rounds --------------------------------------------------------------------------------------

    def _early(self) -> bool:
        """Propagate through early nodes to a fixpoint; True if anything changed."""
        nodes = [node for node in self.all_nodes if node.early]
        changed = False
        while self._sweep(nodes) | self._sweep(nodes[::-1]):
            changed = True
        return changed

    def _everywhere(self) -> None:
        """Propagate to a fixpoint: through early nodes as far as possible, then all."""
        self._early()
        while (
            self._sweep(self.all_nodes) | self._early() or self._sweep(self.all_nodes[::-1]) | self._early()
        ):
            pass

    def _sweep(self, nodes: Iterable[Node]) -> bool:
        changed = False
        for node in nodes:
            if self._settled(node):
                continue
            self._visited[node] = self._clock
            self._decide(node)
            dims = (*node.rule.operands, *node.rule.results)
            for atom, layout in zip(
                (*node.operands, *node.results), node.layouts(dims, self.mesh), strict=True
            ):
                if isinstance(atom, Var) and atom not in self._fixed:
                    changed |= self._grow(atom, layout)
        return changed

    def _settled(self, node: Node) -> bool:
        """True if a visit would change nothing: no layout is new since the last one."""
        last = self._visited.get(node)
        if last is None:
            return False
        return not any(self._changed.get(a, 0) > last for a in (*node.operands, *node.results))

    def _grow(self, var: Var, layout: Layout) -> bool:
        """Shard a value further, as far as ``layout`` does."""
        now = self.layout(var)
        decided = self._explicit.decided(var) if self._explicit is not None else self.mesh.explicit
        used = {a for axes in now for a in axes}
        grown = []
        for old, new in zip(now, layout, strict=True):
            more = new[len(old) :] if new[: len(old)] == old else ()
            more = () if used.intersection(more) else more
            more = tuple(itertools.takewhile(lambda a: a not in decided, more))
            used.update(more)
            grown.append(old + more)
        if tuple(grown) == now:
            return False
        self.layouts[var] = tuple(grown)
        self._clock += 1
        self._changed[var] = self._clock
        return True

    def _decide(self, node: Node) -> None:
        """Shard the factors of a node further, as far as its operands and results agree."""
        support: dict[tuple[int, Axes], list] = {}
        sides = ((True, node.operands, node.rule.operands), (False, node.results, node.rule.results))
        for of_operand, atoms, dims in sides:
            for atom, ds in zip(atoms, dims, strict=True):
                for f, axes in node.claims(self.layout(atom), ds, self.mesh):
                    entry = support.setdefault((f, axes), [False, 0])
                    entry[0] |= of_operand
                    entry[1] += atom.aval.size
        if not support:
            return

        def weight(claim: tuple[int, Axes]) -> tuple:
            f, axes = claim
            of_operand, size = support[claim]
            return of_operand, size, f not in node.rule.reduced, self.mesh.size_of(axes), -f

        node.concede_all(sorted(support, key=weight, reverse=True), self.mesh)


def divisible(jaxpr: Jaxpr) -> Jaxpr:
    """A program as it is partitioned: simplified, and of primitives that have rules."""
    return distinct(simplify.simplify(simplify.inline_definitions(jaxpr, has_rule)))


def has_rule(prim: Primitive) -> bool:
    """True if a primitive says how its dimensions are sharded."""
    return prim.shard is not None or prim.kind == "elementwise"


def automatic(layout: Layout, auto: Sequence[str], shape: Sequence[int], mesh: AbstractMesh) -> Layout:
    """The part of a layout over automatic axes that divide ``shape``."""
    own = [tuple(a for a in axes if a in auto) for axes in layout]
    return tuple(() if n % mesh.size_of(axes) else axes for n, axes in zip(shape, own, strict=True))
