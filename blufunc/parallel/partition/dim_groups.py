"""Nodes: groups of dimensions that must be sharded in the same way.

Parallel, stage 3, below ``propagate.py``. In: equations and the factor rules of their primitives. Out: a node per
equation, and one for each value that enters or leaves the body of a loop, a branch or a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, map_jaxprs
from blufunc.core.primitives.sharding import Dims, Rule
from blufunc.core.programs import simplify as passes
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.partition.resharding import Axes, Layout
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p


@dataclass(eq=False)
class Node:
    """Operands and results that share factors, and the mesh axes of these.

    Attributes:
      early: True if it takes part in the first rounds.
      axes: the mesh axes of each factor.
      exact: the factors that must be split evenly.
      majors: for each factor, the factors that precede it in any dimension.
    """

    rule: Rule
    operands: Sequence[Atom]
    results: Sequence[Atom]
    early: bool
    axes: dict[int, Axes] = field(default_factory=dict)
    exact: frozenset[int] = frozenset()
    majors: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.exact = self.rule.exact([a.aval.shape for a in (*self.operands, *self.results)])
        for dims in (*self.rule.operands, *self.rule.results):
            for factors in dims:
                for i, f in enumerate(factors):
                    self.majors.setdefault(f, set()).update(factors[:i])

    def may_divide(self, factor: int, mesh: AbstractMesh) -> bool:
        """True if all preceding factors of a dimension are split into single elements."""
        sizes = self.rule.sizes
        return all(mesh.size_of(self.axes.get(f, ())) == sizes[f] for f in self.majors.get(factor, ()))

    def claims(self, layout: Layout, dims: Dims, mesh: AbstractMesh) -> Iterable[tuple[int, Axes]]:
        """The mesh axes that a layout claims for each factor of its dimensions."""
        for axes, factors in zip(layout, dims, strict=True):
            rest = list(axes)
            for f in factors:
                size, used_axes = self.rule.sizes[f], ()
                while rest and (f not in self.exact or size % mesh.size_of((*used_axes, rest[0])) == 0):
                    used_axes += (rest.pop(0),)
                if used_axes:
                    yield f, used_axes
                if not rest or mesh.size_of(used_axes) != size:
                    break

    def concede(self, f: int, axes: Axes, mesh: AbstractMesh) -> bool:
        """Shard a factor along ``axes`` as far as possible; True if that changed it."""
        now = self.axes.get(f, ())
        if axes[: len(now)] != now or not self.may_divide(f, mesh):
            return False
        used = self.used
        free = list(itertools.takewhile(lambda a: a not in used, axes[len(now) :]))
        self.axes[f] = (*now, *free)
        return bool(free)

    def concede_all(self, claims: Sequence[tuple[int, Axes]], mesh: AbstractMesh) -> None:
        """Concede claims in order, again while minor factors follow from major ones."""
        while sum(self.concede(f, axes, mesh) for f, axes in claims):
            pass

    @property
    def used(self) -> frozenset[str]:
        """All mesh axes in use."""
        return frozenset(a for axes in self.axes.values() for a in axes)

    def without(self, axes: frozenset[str]) -> Node:
        """The node without some mesh axes."""
        if not axes & self.used:
            return self
        remaining = {f: tuple(a for a in own if a not in axes) for f, own in self.axes.items()}
        return replace(self, axes=remaining)

    def layouts(self, dims: Sequence[Dims], mesh: AbstractMesh) -> list[Layout]:
        """The layouts of operands or results under the node's axes."""
        return [tuple(self._along(factors, mesh) for factors in ds) for ds in dims]

    def _along(self, factors: tuple[int, ...], mesh: AbstractMesh) -> Axes:
        """Mesh axes of a dimension of factors: of minor ones once major ones are used up."""
        found: Axes = ()
        for f in factors:
            axes = self.axes.get(f, ())
            found += axes
            if mesh.size_of(axes) != self.rule.sizes[f]:
                break
        return found


def body_ties(eqn: Eqn) -> tuple[list[Node], list[Node]] | None:
    """Nodes that tie operands and results of control flow to its bodies, else None.

    Those to visit before the bodies, and those after.
    """
    p, ins, outs = eqn.params, list(eqn.invars), list(eqn.outvars)
    if eqn.prim is scan_p:
        body, n, m = p["jaxpr"], p["n_consts"], p["n_consts"] + p["n_carry"]
        carried = list(zip(ins[n:m], body.invars[n:m], body.outvars, outs, strict=False))[: p["n_carry"]]
        before = _each(ins[:n], body.invars[:n])
        before += [_tie([a], [b, d]) for a, b, _, d in carried]
        before += _each(ins[m:], body.invars[m:], stacked=True)
        after = [_tie([c], [b]) for _, b, c, _ in carried]
        k = p["n_carry"]
        return before, after + _each(outs[k:], body.outvars[k:], stacked=True)
    if eqn.prim is while_p:
        n, m = p["n_cond"], p["n_cond"] + p["n_body"]
        cond, body = p["cond"], p["body"]
        before = _each(ins[:n], cond.invars[:n]) + _each(ins[n:m], body.invars[: m - n])
        inner = zip(ins[m:], cond.invars[n:], body.invars[m - n :], outs, strict=True)
        before += [_tie([a], [*b]) for a, *b in inner]
        return before, _each(body.outvars, body.invars[m - n :])
    if eqn.prim is cond_p:
        bodies = p["branches"]
        before = [_tie([a], list(b)) for a, *b in zip(ins[1:], *[j.invars for j in bodies], strict=True)]
        return before, [_tie(list(b), [a]) for a, *b in zip(outs, *[j.outvars for j in bodies], strict=True)]
    if eqn.prim.body is not None and eqn.prim.shard is None:
        body = p[eqn.prim.body]
        return _each(ins, body.invars), _each(body.outvars, outs)
    return None


def _each(operands: Sequence[Atom], results: Sequence[Atom], stacked: bool = False) -> list[Node]:
    """Tie each operand to one result."""
    return [_tie([a], [b], stacked) for a, b in zip(operands, results, strict=True)]


def _tie(operands: Sequence[Atom], results: Sequence[Atom], stacked: bool = False) -> Node:
    """Tie values of one layout; ``stacked`` operands also have the steps of a scan."""
    shape = results[0].aval.shape
    dims = tuple((d,) for d in range(len(shape)))
    of_operands = ((), *dims) if stacked else dims
    rule = Rule((of_operands,) * len(operands), (dims,) * len(results), shape)
    return Node(rule, operands, results, early=True)


def distinct(jaxpr: Jaxpr) -> Jaxpr:
    """A simplified copy in which every variable, in bodies too, is bound once."""
    new: dict[Any, Atom] = {}

    def of(atom: Any) -> Any:
        if atom.__class__ is Literal:
            return atom
        if atom not in new:
            new[atom] = type(atom)(atom.aval)
        return new[atom]

    def inner(body: Jaxpr) -> Jaxpr:
        return distinct(passes.simplify(body))

    constvars, invars = [of(v) for v in jaxpr.constvars], [of(v) for v in jaxpr.invars]
    eqns = [
        Eqn(
            e.prim,
            [of(a) for a in e.invars],
            [of(v) for v in e.outvars],
            map_jaxprs(inner, e.params),
            e.source,
        )
        for e in jaxpr.eqns
    ]
    outvars = [of(a) for a in jaxpr.outvars]
    return jaxpr.replace(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)
