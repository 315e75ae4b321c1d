"""Precedence: which layouts go first where the same mesh axis is asked for along several dimensions.

Parallel, stage 3, above ``dim_groups.py`` and below ``propagate.py``. In come the nodes of a program and the layouts
that are given; out comes the part of these layouts that is propagated before all others.

Dimensions that the nodes tie together, through the whole program, are one *line*: the batch, the width of the stream,
the vocabulary. A batch divided along ``data`` and parameters divided along ``data`` (FSDP, ZeRO) ask for one axis along
several lines, and a value that has two of them can be divided along one only: one operation at a time would settle
this here for the batch and there for the parameter, and move activations back and forth. So each axis goes first to
one line, that along which it saves most: the bytes of the operands that it divides, of all operations that are neither
elementwise nor mere movement, less the bytes that must be exchanged, which are those of operands that an operation
wants whole along the line and of results that become sums over it. With more tokens in a
batch than the model is wide that is the batch, and parameters are gathered where they are used; with few, as in
decoding, it is a dimension of the parameters, and activations are exchanged.
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
"""One dimension or factor of a line stands for all of it."""


def first(
    nodes: Sequence[Node], given: Mapping[Var, Layout], said: Mapping[Var, Layout], explicit: Set[str]
) -> dict[Var, Layout]:
    """The part of the layouts ``given`` to parameters that goes first.

    Args:
      nodes: those of the whole program.
      given: layouts of parameters.
      said: layouts that the user constrains values to: an axis that is in one of these goes first to lines of these.
      explicit: axes that need no precedence.
    """
    lines = _Lines(nodes)
    asked = _asked(lines, given)
    several = {axis: group for axis, group in asked.items() if len(group) > 1}
    if several:
        saved = lines.saved(nodes)
        for axis, group in several.items():
            asked[axis] = [max(group, key=lambda line: saved[line])]
    asked |= _asked(lines, said)

    def kept(var: Var, d: int, axes: Axes) -> Axes:
        line = lines.of(var, d)
        return tuple(itertools.takewhile(lambda axis: axis in explicit or line in asked[axis], axes))

    return {var: tuple(kept(var, d, axes) for d, axes in enumerate(layout)) for var, layout in given.items()}


def _asked(lines: _Lines, layouts: Mapping[Var, Layout]) -> dict[str, list[Line]]:
    """For each axis the lines along which layouts have it, in the order of these."""
    found: dict[str, dict[Line, None]] = defaultdict(dict)
    for var, layout in layouts.items():
        for d, axes in enumerate(layout):
            for axis in axes:
                found[axis][lines.of(var, d)] = None
    return {axis: list(group) for axis, group in found.items()}


class _Lines:
    """The dimensions of values and the factors of nodes, joined into lines: of a compound dimension the major one."""

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
        """For each line the bytes of operands that are divided with it, less those that would have to be exchanged.

        These are operands that must be whole along the line, and results that would be sums over it.
        """
        total: dict[Line, int] = defaultdict(int)
        for node in nodes:
            if not node.early:
                pairs = list(zip(node.results, node.rule.results, strict=True))
                for f in node.rule.reduced:
                    sums = [v for v, ds in pairs if not any(f in factors for factors in ds)]
                    total[self.of(node, f)] -= sum(map(_bytes, sums))
            for atom, ds in zip(node.operands, node.rule.operands, strict=True):
                if not isinstance(atom, Var):
                    continue
                whole = [self.of(atom, d) for d, factors in enumerate(ds) if not factors]
                divided = [] if node.early else [self.of(node, factors[0]) for factors in ds if factors]
                for line in dict.fromkeys(whole):
                    total[line] -= _bytes(atom)
                for line in dict.fromkeys(divided):
                    total[line] += _bytes(atom)
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


def _bytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize
