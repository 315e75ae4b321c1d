"""Propagation: from the shardings that are given to those of all values and operations of a program.

Parallel, stage 3, above ``factors.py`` and below ``partition.py``. In comes a global jaxpr whose variables are all
distinct, and the layouts of its parameters (and, if given, results); out comes for each variable a layout, and for each
equation the mesh axes along which its factors are divided.

Every equation is a *node* that ties dimensions by its factors; so is each way of a value into the body of a loop,
a branch or a call, and out. Layouts only ever grow, until nothing changes: first from the user's constraints through
elementwise and moving operations, then from parameters too, then through all operations.

Where an equation's operands and results do not agree, the decision goes to what an operand has before what only a
result has; then to the larger tensors; then to factors that pass before those that are reduced; then to more shards.
What has lost is moved to the layout that has won.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, subjaxprs
from blufunc.parallel.constrain import sharding_constraint_p
from blufunc.parallel.factors import Dims, Rule, rule_of
from blufunc.parallel.mesh import AbstractMesh, Mesh
from blufunc.parallel.shard_map import shard_map_p
from blufunc.parallel.spec import PartitionSpec, names_of
from blufunc.parallel.transitions import Axes, Layout
from blufunc.transforms.cond import cond_p
from blufunc.transforms.scan import scan_p
from blufunc.transforms.while_loop import while_p


@dataclass(eq=False)
class Node:
    """Operands and results that share factors, and the axes along which these are divided.

    Attributes:
      early: whether it takes part in the first rounds.
      axes: by factor.
    """

    rule: Rule
    operands: Sequence[Atom]
    results: Sequence[Atom]
    early: bool
    axes: dict[int, Axes] = field(default_factory=dict)
    exact: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.exact = self.rule.exact([a.aval.shape for a in (*self.operands, *self.results)])

    @property
    def used(self) -> frozenset[str]:
        """All axes along which it is divided."""
        return frozenset(a for axes in self.axes.values() for a in axes)

    def without(self, axes: frozenset[str]) -> Node:
        """The node divided along other axes only."""
        if not axes & self.used:
            return self
        kept = {f: tuple(a for a in own if a not in axes) for f, own in self.axes.items()}
        return replace(self, axes=kept)

    def layouts(self, dims: Sequence[Dims], mesh: AbstractMesh) -> list[Layout]:
        """The layouts of operands or results that go with its axes."""
        return [tuple(self._along(factors, mesh) for factors in ds) for ds in dims]

    def _along(self, factors: tuple[int, ...], mesh: AbstractMesh) -> Axes:
        """The axes that divide a dimension of these factors: of a minor one only if the major are used up."""
        found: Axes = ()
        for f in factors:
            axes = self.axes.get(f, ())
            found += axes
            if mesh.size_of(axes) != self.rule.sizes[f]:
                break
        return found


class Propagation:
    """The layouts of the variables of ``jaxpr``, bodies included, and the nodes of its equations.

    Args:
      jaxpr: a jaxpr of which no body is run by two equations: see ``distinct``.
      given: layouts of parameters, which stay; None where one is free.
      wanted: the same of results.
    Attributes:
      layouts: by variable.
      nodes: by equation, for those that are no loop, branch or call.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        mesh: AbstractMesh,
        given: Sequence[Layout | None],
        wanted: Sequence[Layout | None],
    ):
        self.mesh = mesh
        self.layouts: dict[Var, Layout] = {}
        self.nodes: dict[Eqn, Node] = {}
        self._fixed: set[Var] = set(jaxpr.constvars)
        self._all: list[Node] = []
        self._fixed.update(v for v, layout in zip(jaxpr.invars, given, strict=True) if layout is not None)
        self._visit(jaxpr)
        self._run(early=True)
        for atom, layout in (
            *zip(jaxpr.invars, given, strict=True),
            *zip(jaxpr.outvars, wanted, strict=True),
        ):
            if layout is not None and isinstance(atom, Var) and (atom in jaxpr.invars or self._free(atom)):
                self.layouts[atom] = layout
        self._run(early=True)
        while self._sweep(self._all) | self._run(early=True) or self._sweep(self._all[::-1]) | self._run(
            early=True
        ):
            pass

    def layout(self, atom: Atom) -> Layout:
        """How a value lies."""
        whole: Layout = ((),) * atom.aval.ndim
        return whole if isinstance(atom, Literal) else self.layouts.get(atom, whole)

    def _free(self, var: Var) -> bool:
        return var not in self._fixed and not any(self.layout(var))

    # -- nodes ---------------------------------------------------------------------------------------

    def _visit(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.prim is sharding_constraint_p:
                self._constraint(eqn)
            elif eqn.prim is shard_map_p:
                self._manual(eqn)
            elif (ties := body_ties(eqn)) is not None:
                before, after = ties
                self._all.extend(before)
                for sub in subjaxprs(eqn.params):
                    self._visit(sub)
                self._all.extend(after)
            else:
                self.nodes[eqn] = self._node(eqn)

    def _node(self, eqn: Eqn) -> Node:
        rule = rule_of(eqn.prim, [a.aval for a in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)
        node = Node(rule, eqn.invars, eqn.outvars, eqn.prim.kind in ("elementwise", "movement", "call"))
        self._all.append(node)
        return node

    def _constraint(self, eqn: Eqn) -> None:
        """A constraint is the layout of its result; what it leaves free goes through."""
        spec, free = eqn.params["spec"], eqn.params["free"]
        (out,) = eqn.outvars
        self.layouts[out] = layout_of(spec, out.aval.ndim, self.mesh)
        node = self._node(eqn)
        self.nodes[eqn] = node
        if not free:
            self._fixed.add(out)

    def _manual(self, eqn: Eqn) -> None:
        """A function of shards: its specs are the layouts of its operands, where these are free, and of its results."""
        for atom, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
            if isinstance(atom, Var) and atom not in self._fixed:
                self._grow(atom, layout_of(spec, atom.aval.ndim, self.mesh))
        for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
            self.layouts[var] = layout_of(spec, var.aval.ndim, self.mesh)
            self._fixed.add(var)

    # -- rounds --------------------------------------------------------------------------------------

    def _run(self, early: bool) -> bool:
        """Propagate through the nodes of the first rounds until nothing changes; whether anything did."""
        nodes = [node for node in self._all if node.early]
        changed = False
        while self._sweep(nodes) | self._sweep(nodes[::-1]):
            changed = True
        return changed

    def _sweep(self, nodes: Iterable[Node]) -> bool:
        changed = False
        for node in nodes:
            self._decide(node)
            dims = (*node.rule.operands, *node.rule.results)
            for atom, layout in zip(
                (*node.operands, *node.results), node.layouts(dims, self.mesh), strict=True
            ):
                if isinstance(atom, Var) and atom not in self._fixed:
                    changed |= self._grow(atom, layout)
        return changed

    def _grow(self, var: Var, layout: Layout) -> bool:
        """Divide a value further, as far as ``layout`` does."""
        now = self.layout(var)
        used = {a for axes in now for a in axes}
        grown = []
        for old, new in zip(now, layout, strict=True):
            more = new[len(old) :] if new[: len(old)] == old else ()
            more = () if used.intersection(more) else more
            used.update(more)
            grown.append(old + more)
        if tuple(grown) == now:
            return False
        self.layouts[var] = tuple(grown)
        return True

    def _decide(self, node: Node) -> None:
        """Divide the factors of a node further, as far as its operands and results say and agree."""
        support: dict[tuple[int, Axes], list] = {}
        sides = ((True, node.operands, node.rule.operands), (False, node.results, node.rule.results))
        for of_operand, atoms, dims in sides:
            for atom, ds in zip(atoms, dims, strict=True):
                for f, axes in self._claims(node, self.layout(atom), ds):
                    entry = support.setdefault((f, axes), [False, 0])
                    entry[0] |= of_operand
                    entry[1] += atom.aval.size
        if not support:
            return

        def weight(claim: tuple[int, Axes]) -> tuple:
            f, axes = claim
            of_operand, size = support[claim]
            return of_operand, size, f not in node.rule.reduced, self.mesh.size_of(axes), -f

        used = set(node.used)
        for f, axes in sorted(support, key=weight, reverse=True):
            now = node.axes.get(f, ())
            if axes[: len(now)] != now:
                continue
            for axis in axes[len(now) :]:
                if axis in used:
                    break
                node.axes[f] = (*node.axes.get(f, ()), axis)
                used.add(axis)

    def _claims(self, node: Node, layout: Layout, dims: Dims) -> Iterable[tuple[int, Axes]]:
        """Along which axes a layout wants each factor divided."""
        for axes, factors in zip(layout, dims, strict=True):
            rest = list(axes)
            for f in factors:
                size, taken = node.rule.sizes[f], ()
                while rest and (f not in node.exact or size % self.mesh.size_of((*taken, rest[0])) == 0):
                    taken += (rest.pop(0),)
                if taken:
                    yield f, taken
                if not rest or self.mesh.size_of(taken) != size:
                    break


def layout_of(spec: PartitionSpec, ndim: int, mesh: Mesh | AbstractMesh) -> Layout:
    """The layout of a spec; axes of one device divide nothing."""
    return tuple(tuple(a for a in names_of(e) if mesh.shape[a] > 1) for e in spec.for_rank(ndim))


def body_ties(eqn: Eqn) -> tuple[list[Node], list[Node]] | None:
    """How operands and results of a loop, a branch or a call go together with those of its bodies; else None.

    Those to look at before the bodies, and those after.
    """
    p, ins, outs = eqn.params, list(eqn.invars), list(eqn.outvars)
    if eqn.prim is scan_p:
        body, n, m = p["jaxpr"], p["n_consts"], p["n_consts"] + p["n_carry"]
        carried = list(zip(ins[n:m], body.invars[n:m], body.outvars, outs, strict=False))[: p["n_carry"]]
        before = [_tie([a], [b]) for a, b in zip(ins[:n], body.invars[:n], strict=True)]
        before += [_tie([a], [b, d]) for a, b, _, d in carried]
        before += [_tie_scanned(a, b) for a, b in zip(ins[m:], body.invars[m:], strict=True)]
        after = [_tie([c], [b]) for _, b, c, _ in carried]
        k = p["n_carry"]
        after += [_tie_scanned(a, b) for a, b in zip(outs[k:], body.outvars[k:], strict=True)]
        return before, after
    if eqn.prim is while_p:
        n, m = p["n_cond"], p["n_cond"] + p["n_body"]
        cond, body = p["cond"], p["body"]
        before = [_tie([a], [b]) for a, b in zip(ins[:n], cond.invars[:n], strict=True)]
        before += [_tie([a], [b]) for a, b in zip(ins[n:m], body.invars[: m - n], strict=True)]
        inner = zip(ins[m:], cond.invars[n:], body.invars[m - n :], outs, strict=True)
        before += [_tie([a], [*b]) for a, *b in inner]
        return before, [_tie([a], [b]) for a, b in zip(body.outvars, body.invars[m - n :], strict=True)]
    if eqn.prim is cond_p:
        bodies = p["branches"]
        before = [_tie([a], list(b)) for a, *b in zip(ins[1:], *[j.invars for j in bodies], strict=True)]
        return before, [_tie(list(b), [a]) for a, *b in zip(outs, *[j.outvars for j in bodies], strict=True)]
    if eqn.prim.body is not None and eqn.prim.shard is None:
        body = p[eqn.prim.body]
        before = [_tie([a], [b]) for a, b in zip(ins, body.invars, strict=True)]
        return before, [_tie([a], [b]) for a, b in zip(body.outvars, outs, strict=True)]
    return None


def _tie(operands: Sequence[Atom], results: Sequence[Atom]) -> Node:
    """Values that lie alike."""
    shape = operands[0].aval.shape
    dims = tuple((d,) for d in range(len(shape)))
    rule = Rule((dims,) * len(operands), (dims,) * len(results), shape)
    return Node(rule, operands, results, early=True)


def _tie_scanned(stacked: Atom, one: Atom) -> Node:
    """The inputs or results of all steps, which are whole along the steps, and that of one."""
    shape = one.aval.shape
    dims = tuple((d,) for d in range(len(shape)))
    return Node(Rule((((), *dims),), (dims,), shape), [stacked], [one], early=True)


def distinct(jaxpr: Jaxpr) -> Jaxpr:
    """A copy in which every variable, those of bodies too, is bound once."""
    new: dict[Any, Atom] = {}

    def of(atom: Any) -> Any:
        if atom.__class__ is Literal:
            return atom
        if atom not in new:
            new[atom] = type(atom)(atom.aval)
        return new[atom]

    def param(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            return distinct(value)
        if isinstance(value, tuple) and any(isinstance(v, Jaxpr) for v in value):
            return tuple(map(param, value))
        return value

    constvars, invars = map(of, jaxpr.constvars), [of(v) for v in jaxpr.invars]
    constvars = list(constvars)
    eqns = [
        Eqn(e.prim, [of(a) for a in e.invars], [of(v) for v in e.outvars],
            {k: param(v) for k, v in e.params.items()}, e.source)
        for e in jaxpr.eqns
    ]  # fmt: skip
    outvars = [of(a) for a in jaxpr.outvars]
    return jaxpr.replace(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)
