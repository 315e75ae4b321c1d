"""Axis priority: which dimension gets a mesh axis that several dimensions claim.

Parallel, stage 3, above ``dim_groups.py`` and below ``propagate.py``. In: the nodes of a program and the layouts of its
parameters. Out: the part of these layouts that propagates first.

Dimensions that nodes tie together through the program form a *line*: the batch, the width of the model, the vocabulary.
A batch sharded along ``data`` and parameters sharded along ``data`` (FSDP, ZeRO) claim one axis on several lines, and a
value with two of these lines can be sharded along one only. Decided operation by operation, the batch would win here
and the parameter there, and activations would move back and forth. So each axis first goes to one line, the one with
the largest saving: the bytes of the operands that it shards, over all operations that are neither elementwise nor mere
movement, less the bytes of collectives, for operands that an operation needs whole along the line and for results that
become sums over it. If a batch has more tokens than the model is wide, the batch wins, and parameters are gathered on
use. With few tokens, as in decoding, a dimension of the parameters wins, and collectives move activations.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

from blufunc.core.ir.jaxpr import Var
from blufunc.parallel.partition.dim_groups import Node
from blufunc.parallel.partition.resharding import Axes, Layout

Line = Any
"""The representative dimension or factor of a line."""


def first(
    nodes: Sequence[Node],
    parameter_layouts: Mapping[Var, Layout],
    constraints: Mapping[Var, Layout],
    explicit: Set[str],
) -> dict[Var, Layout]:
    """The part of the parameter layouts that propagates first.

    Args:
      nodes: the nodes of the whole program.
      parameter_layouts: layouts of parameters.
      constraints: layouts of the user's constraints: an axis in one of these first goes to its lines.
      explicit: axes that need no priority.
    """
    lines = Lines(nodes)
    claims = _claims(lines, parameter_layouts)
    several = {axis: group for axis, group in claims.items() if len(group) > 1}
    if several:
        saved = lines.saved(nodes)
        for axis, group in several.items():
            claims[axis] = [max(group, key=lambda line: saved[line])]
    claims |= _claims(lines, constraints)

    def prefix(var: Var, d: int, axes: Axes) -> Axes:
        line = lines.of(var, d)
        return tuple(itertools.takewhile(lambda axis: axis in explicit or line in claims[axis], axes))

    return {
        var: tuple(prefix(var, d, axes) for d, axes in enumerate(layout))
        for var, layout in parameter_layouts.items()
    }


def _claims(lines: Lines, layouts: Mapping[Var, Layout]) -> dict[str, list[Line]]:
    """For each axis the lines on which layouts use it, in the order of the layouts."""
    found: dict[str, dict[Line, None]] = defaultdict(dict)
    for var, layout in layouts.items():
        for d, axes in enumerate(layout):
            for axis in axes:
                found[axis][lines.of(var, d)] = None
    return {axis: list(group) for axis, group in found.items()}


class Lines:
    """Dimensions of values and factors of nodes, joined into lines by major factor."""

    def __init__(self, nodes: Sequence[Node]):
        self._parent: dict[Any, Any] = {}
        for node in nodes:
            for atoms, dims in ((node.operands, node.rule.operands), (node.results, node.rule.results)):
                for atom, ds in zip(atoms, dims, strict=True):
                    for d, factors in enumerate(ds):
                        if factors and isinstance(atom, Var):
                            self._join((atom, d), (node, factors[0]))

    def of(self, owner: Var | Node, part: int) -> Line:
        """The line of a dimension of a value, or of a factor of a node."""
        return self._root((owner, part))

    def saved(self, nodes: Sequence[Node]) -> dict[Line, int]:
        """Bytes that sharding each line saves, less the bytes of its collectives.

        The latter are operands that must be whole along the line, and results that become sums over it.
        """
        total: dict[Line, int] = defaultdict(int)
        for node in nodes:
            if not node.early:
                pairs = list(zip(node.results, node.rule.results, strict=True))
                for f in node.rule.reduced:
                    sums = [v for v, ds in pairs if not any(f in factors for factors in ds)]
                    total[self.of(node, f)] -= sum(v.aval.nbytes for v in sums)
            for atom, ds in zip(node.operands, node.rule.operands, strict=True):
                if not isinstance(atom, Var):
                    continue
                whole = [self.of(atom, d) for d, factors in enumerate(ds) if not factors]
                divided = [] if node.early else [self.of(node, factors[0]) for factors in ds if factors]
                for line in dict.fromkeys(whole):
                    total[line] -= atom.aval.nbytes
                for line in dict.fromkeys(divided):
                    total[line] += atom.aval.nbytes
        return total

    def _root(self, x: Any) -> Any:
        while (up := self._parent.get(x, x)) != x:
            self._parent[x] = self._parent.get(up, up)
            x = up
        return x

    def _join(self, a: Any, b: Any) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[a] = b
