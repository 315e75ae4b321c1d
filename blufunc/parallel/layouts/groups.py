"""Groups of argument leaves with one layout, and the lines of their dimensions.

Parallel, before stage 3, the first step of a search. In: a lowered function. Out: ``Groups``: leaves whose paths differ
only in indices, such as layers, with their roles; the results that become arguments of the next call; and the lines of
the program (``partition/axis_priority.py``), those of structurally identical layers as one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Var, subjaxprs
from blufunc.core.pytree import paths, tree
from blufunc.parallel.collectives.primitives import equations
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.layouts.activations import Boundary, boundaries, features, streams
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.partition.axis_priority import Lines
from blufunc.parallel.partition.partition import divisible
from blufunc.parallel.partition.propagate import Propagation
from blufunc.transforms.arguments import labels_of
from blufunc.transforms.control_flow.scan import scan_p

Dim = tuple[int, int]
"""A group and one of its dimensions."""


def pattern(name: str) -> str:
    """A path with ``*`` for indices: ``params.layers.*.up``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that get one layout.

    Attributes:
      name: their path, ``*`` for indices.
      aval: their type.
      leaves: their positions among the leaves of all arguments.
      role: ``"parameter"`` or ``"state"`` of arguments that the function returns anew, else ``"data"``.
      owner: of the state of an optimizer, the index of the parameters' group; else None.
    """

    name: str
    aval: ShapedArray
    leaves: tuple[int, ...]
    role: str
    owner: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return len(self.leaves) * self.aval.nbytes


@dataclasses.dataclass(frozen=True)
class Line:
    """Dimensions of groups that operations tie together.

    Attributes:
      name: a short name for tables.
      dims: the dimensions, at most one of each group.
      saving: bytes of operands that sharding it saves, less the bytes of collectives.
      of_data: True if a dimension of data is on it.
    """

    name: str
    dims: tuple[Dim, ...]
    saving: int
    of_data: bool

    def meets(self, other: Line) -> bool:
        """True if a group has a dimension on each."""
        return not {g for g, _ in self.dims}.isdisjoint(g for g, _ in other.dims)


class Groups:
    """Groups and lines of the arguments of a function.

    Args:
      fun: the function, for the names of its parameters.
      args: its arguments.
      jaxpr: the simplified program; the arguments are its last parameters.
      out_tree: the structure of its results.
      donated: a flag per leaf.

    Attributes:
      heads: the name of each argument with leaves, numbered where a parameter takes several: ``args0``, ``args1``.
      names: the path of each leaf.
      avals: its type.
      carried: for each result the argument leaf that it replaces in the next call, or None.
      groups: the groups.
      lines: those that save something or have data on them, the batch first, then by saving.
      stacked: the dimensions of groups that loops step through, such as one of layers.
      jaxpr, nodes, roots: the program as it is partitioned, the nodes of its equations, and the lines of all their
        dimensions.
      roots_of: the latter of each line.
      features: those of weights, which are contracted.
    """

    def __init__(self, fun: Any, args: tuple, jaxpr: Jaxpr, out_tree: Any, donated: Sequence[bool]):
        found = paths.flatten_with_path(args)[0]
        labels = labels_of(fun, tree.structure((args, {})))
        places = [path[0].idx for path, _ in found]
        by_place = dict(zip(places, (re.split(r"[.\[]", label)[0] for label in labels), strict=True))
        by_place = dict(zip(by_place, _distinct(list(by_place.values())), strict=True))
        self.heads = list(by_place.values())
        heads = [by_place[i] for i in places]
        rest = [paths.keystr(path[1:], simple=True, separator=".") for path, _ in found]
        self.names = [f"{h}.{r}" if r else h for h, r in zip(heads, rest, strict=True)]
        variables = jaxpr.invars[len(jaxpr.invars) - len(found) :]
        self.avals = [v.aval for v in variables]
        self.carried = _carried(args, self.avals, out_tree, [a.aval for a in jaxpr.outvars], donated)
        whole = divisible(jaxpr)
        nothing = [((),) * v.aval.ndim for v in whole.invars]
        plan = Propagation(whole, _one_device(whole), nothing, [None] * len(whole.outvars))
        self.jaxpr, nodes, self.nodes = whole, plan.all_nodes, plan.nodes
        self.roots = lines = Lines(nodes)
        variables = whole.invars[len(whole.invars) - len(found) :]
        root = lambda leaf, d: lines.of(variables[leaf], d)
        self.groups = _grouped(self.names, self.avals, self._roles(places), root)
        saved = lines.saved(nodes)
        steps = {lines.of(v, 0) for v in _stacks(whole)}
        self.stacked = frozenset(
            (g, d)
            for g, group in enumerate(self.groups)
            for d in range(group.aval.ndim)
            if root(group.leaves[0], d) in steps
        )
        self.lines = _lines(self.groups, root, saved, self.stacked)
        self.roots_of = [
            frozenset(root(leaf, d) for g, d in line.dims for leaf in self.groups[g].leaves)
            for line in self.lines
        ]
        of_parameters = frozenset(
            root(leaf, d)
            for group in self.groups
            if group.role != "data"
            for leaf in group.leaves
            for d in range(group.aval.ndim)
        )
        self.features = features(self.nodes, lines, of_parameters)
        self._streams: dict[tuple[int, ...], tuple[list[Boundary], list[Any]]] = {}

    def regions(self, lines: tuple[int, ...]) -> tuple[list[Boundary], list[Any]]:
        """The ends of tensor-parallel regions, and the free lines between them.

        Args:
          lines: the lines that the regions shard.
        """
        if lines not in self._streams:
            sharded = self.features & frozenset[Any]().union(*(self.roots_of[i] for i in lines))
            ends = boundaries(self.jaxpr, self.nodes, self.roots, sharded, self.features) if sharded else []
            self._streams[lines] = ends, streams(ends, self.features)
        return self._streams[lines]

    def _roles(self, argument: Sequence[int]) -> list[str]:
        """The role of each leaf: data, or something that lives longer than a call."""
        kept = {argument[i] for i in self.carried if i is not None}
        if not kept and len(set(argument)) > 1:
            kept = {argument[0]}  # a function of parameters and data
        return ["parameter" if a in kept else "data" for a in argument]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of arguments, of which no two are equal: those of ``*args`` are numbered."""
    found = list(names)
    for name in dict.fromkeys(names):
        same = [i for i, other in enumerate(names) if other == name]
        if len(same) > 1:
            numbered = ([f"{name}{'_' * j}{n}" for n in range(len(same))] for j in itertools.count())
            new = next(own for own in numbered if not set(own) & set(names))
            for i, own in zip(same, new, strict=True):
                found[i] = own
    return found


def _one_device(jaxpr: Jaxpr) -> AbstractMesh:
    """A mesh of one device with all axes that a program names.

    One that the searched mesh lacks is an error of each plan.
    """
    named: dict[str, None] = {"x": None}
    for eqn in equations(jaxpr):
        if isinstance(eqn.prim, ShardingConstraint):
            spec = eqn.params["spec"]
            named.update(dict.fromkeys((*spec.axes, *spec.unreduced)))
        elif eqn.prim is shard_map_p:
            named.update(dict.fromkeys(eqn.params["mesh"].axis_names))
    return AbstractMesh((1,) * len(named), tuple(named))


def _stacks(jaxpr: Jaxpr) -> Iterator[Var]:
    """The operands whose leading dimension a ``scan`` steps through."""
    for eqn in jaxpr.eqns:
        if eqn.prim is scan_p:
            yield from (
                a for a in eqn.invars[eqn.params["n_consts"] + eqn.params["n_carry"] :] if isinstance(a, Var)
            )
        for body in subjaxprs(eqn.params):
            yield from _stacks(body)


def _carried(
    args: tuple,
    avals: Sequence[ShapedArray],
    out_tree: Any,
    out: Sequence[ShapedArray],
    donated: Sequence[bool],
) -> list[int | None]:
    """The argument leaf that each result replaces in the next call, or None.

    An argument is found by its structure and types. A single array is not matched unless it is donated: activations
    often have the type of an input.
    """
    found: list[int | None] = [None] * len(out)
    types = [(a.shape, a.dtype) for a in avals]
    wanted: list[tuple[Any, int]] = []
    start = 0
    for arg in args:
        structure = tree.structure(arg)
        n = structure.num_leaves
        if n > 1 or (n == 1 and donated[start]):
            wanted.append((structure, start))
        start += n

    def visit(node: Any, at: int) -> None:
        n = node.num_leaves
        of = [(a.shape, a.dtype) for a in out[at : at + n]]
        for pair in wanted:
            structure, first = pair
            if structure == node and types[first : first + n] == of:
                found[at : at + n] = range(first, first + n)
                wanted.remove(pair)
                return
        for child in node.children() if node != tree.LEAF else ():
            visit(child, at)
            at += child.num_leaves

    visit(out_tree, 0)
    return found


def _grouped(
    names: Sequence[str], avals: Sequence[ShapedArray], roles: Sequence[str], root: Callable[[int, int], Any]
) -> list[Group]:
    """Groups of leaves of one pattern, type and role."""
    by_key: dict[Any, list[int]] = defaultdict(list)
    for i, (name, aval, role) in enumerate(zip(names, avals, roles, strict=True)):
        by_key[pattern(name), aval.shape, aval.dtype, role].append(i)
    parts = [part for leaves in by_key.values() for part in _apart(leaves, avals[leaves[0]].ndim, root)]
    patterns = [pattern(names[part[0]]) for part in parts]
    found = []
    for part, name in zip(parts, patterns, strict=True):
        shown = name if patterns.count(name) == 1 else ", ".join(names[i] for i in part)
        found.append(Group(shown, avals[part[0]], tuple(part), roles[part[0]]))
    owners = {}
    for i, g in enumerate(found):
        head, _, path = pattern(names[g.leaves[0]]).partition(".")
        owners[i] = (head, f".{path}" if path else "")
    for i, g in enumerate(found):
        if g.role != "parameter":
            continue
        head, path = owners[i]
        for j, owner in enumerate(found):
            other, tail = owners[j]
            if other != head and owner.role == "parameter" and owner.aval.shape == g.aval.shape:
                if len(tail) < len(path) and path.endswith(tail):
                    found[i] = dataclasses.replace(g, role="state", owner=j)
                    break
    return found


def _apart(leaves: list[int], ndim: int, root: Callable[[int, int], Any]) -> list[list[int]]:
    """The leaves of a pattern as one group, or each alone if they follow each other.

    Where the results of a layer are the inputs of the next layer's matmul, such as in an MLP of square layers, the
    best layouts of neighbours differ.
    """
    pairs = [(d, e) for d in range(ndim) for e in range(ndim) if d != e]
    chained = any(root(a, d) == root(b, e) for a, b in itertools.pairwise(leaves) for d, e in pairs)
    return [[i] for i in leaves] if chained else [leaves]


def _lines(
    groups: Sequence[Group], root: Callable[[int, int], Any], saved: Any, stacked: frozenset[Dim]
) -> list[Line]:
    """The lines of all dimensions but those of loops, joined where groups share them."""
    parent: dict[Any, Any] = {}

    def top(x: Any) -> Any:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    for g, group in enumerate(groups):
        for d in range(group.aval.ndim):
            for leaf in group.leaves:
                parent[top(("line", root(leaf, d)))] = top((g, d))
    members: Any = defaultdict(list)
    savings: dict[Any, int] = defaultdict(int)
    counted: set[Any] = set()
    for g, group in enumerate(groups):
        for d in range(group.aval.ndim):
            members[top((g, d))].append((g, d))
            for leaf in group.leaves:
                if (line := root(leaf, d)) not in counted:
                    counted.add(line)
                    savings[top((g, d))] += saved.get(line, 0)
    members = {key: dims for key, dims in members.items() if stacked.isdisjoint(dims)}
    found = list(_named(groups, members, savings))
    found.sort(key=lambda k: -k.saving)
    lead = {
        g: next((d for d in range(group.aval.ndim) if (g, d) not in stacked), None)
        for g, group in enumerate(groups)
        if group.role == "data"
    }
    leads = [k for k in found if any(lead.get(g, -1) == d for g, d in k.dims)]
    batch = max(leads, key=lambda k: sum(groups[g].role == "data" for g, _ in k.dims), default=None)
    if batch is None:
        return found
    return [dataclasses.replace(batch, name="batch"), *(k for k in found if k is not batch)]


def _named(groups: Sequence[Group], members: Any, savings: Any) -> Iterator[Line]:
    for key, dims in members.items():
        first = {g: (g, d) for g, d in reversed(dims)}  # one dimension of each group
        own = tuple(sorted(first.values()))
        of_data = any(groups[g].role == "data" for g, _ in own)
        if not of_data and not savings[key]:
            continue
        g, d = max(own, key=lambda at: (groups[at[0]].role == "parameter", groups[at[0]].nbytes))
        yield Line(f"{groups[g].name.rpartition('.')[2]}[{d}]", own, savings[key], of_data)
