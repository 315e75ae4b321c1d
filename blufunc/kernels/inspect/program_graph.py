"""A program as a graph: its steps, and the values between them.

Kernels, alongside stages 5 to 8. In: the report on a program. Out: a ``Drawing``. Steps go down in the order in which
they run. A step takes the column of its first operand if that dies there, else the first one that no live value passes
through, so a chain is a straight line, and a residual that waits for the backward pass has a column of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from blufunc.core.ir.jaxpr import Var
from blufunc.kernels.cost import StepCost
from blufunc.kernels.inspect.drawing import Drawing, element, group, label, legend, mixed, shortened, stacked
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.machine import Machine
from blufunc.kernels.schedule import Schedule, accesses
from blufunc.kernels.tables import count, duration, run_lengths, size

_WIDE, _HIGH, _ACROSS, _DOWN, _EDGE = 300.0, 62.0, 330.0, 96.0, 24.0
_STROKES = {
    "kernel": "#2f6f4f",
    "library": "#34548a",
    "control": "#7a4d9c",
    "reference": "#8a6d1f",
    "host": "#b03a2e",
}
_NAMES = {
    "kernel": "generated kernel",
    "library": "library",
    "control": "loop or branch",
    "reference": "NumPy",
    "host": "on the host",
}


@dataclass
class _Node:
    """A step.

    Attributes:
      reads: for each value that another step wrote, that step and the value.
      arguments: the labels of arguments that it reads.
      results: the numbers of the results that it writes.
      last: the last step that reads one of its values; itself if none does.
      column: its place.
    """

    cost: StepCost
    reads: list[tuple[int, int]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    last: int = 0
    column: int = 0


def draw(name: str, sight: Sight, machine: Machine) -> Drawing:
    """The graph of a program and those of its loops and branches."""
    drawings = [_graph(name, sight, machine), *_bodies(sight, machine, "")]
    return drawings[0] if len(drawings) == 1 else stacked(name, drawings)


def _bodies(sight: Sight, machine: Machine, outer: str) -> Iterator[Drawing]:
    for body in sight.bodies:
        yield _graph(f"step {outer}{body.step} runs {body.role}", body.sight, machine)
        yield from _bodies(body.sight, machine, f"{outer}{body.step}.")


def _graph(title: str, sight: Sight, machine: Machine) -> Drawing:
    nodes = _nodes(sight.schedule, sight.cost.steps)
    columns = _place(nodes)
    seconds = [n.cost.seconds(machine) for n in nodes]
    most, total = max(seconds, default=0.0), sum(seconds)
    parts = [
        _edge(nodes, n, source, sight.schedule, v) for n in range(len(nodes)) for source, v in nodes[n].reads
    ]
    parts += [_box(n, node, seconds[n], most, total) for n, node in enumerate(nodes)]
    kinds = {_NAMES[k]: c for k, c in _STROKES.items() if any(node.cost.kind == k for node in nodes)}
    height = _EDGE + 20 + _DOWN * max(len(nodes), 1)
    parts += legend(kinds, _EDGE, 16)
    if not nodes:
        parts.append(label(_EDGE, 50, "nothing is computed"))
    return Drawing(title, 2 * _EDGE + _ACROSS * max(columns, 1), height, "\n".join(parts))


def _nodes(made: Schedule, costs: Sequence[StepCost]) -> list[_Node]:
    nodes = [_Node(c) for c in costs]
    names = made.jaxpr.arg_names or ("",) * len(made.inputs)
    arguments = {
        v: name or f"argument {i}" for i, (v, name) in enumerate(zip(made.inputs, names, strict=True))
    }
    results: dict[int, list[int]] = {}
    for i, o in enumerate(made.outputs):
        if isinstance(o, int):
            results.setdefault(made.root(o), []).append(i)
    writer: dict[int, int] = {}
    for n, step in enumerate(made.steps):
        node = nodes[n]
        node.last = n
        touched = [(made.root(v), written) for v, written in accesses(step)]
        for v in dict.fromkeys(v for v, _ in touched):
            if v in writer and writer[v] != n:
                node.reads.append((writer[v], v))
                nodes[writer[v]].last = n
            elif v in arguments and v not in writer:
                node.arguments.append(arguments[v])
        for v, written in touched:
            if written:
                writer[v] = n
                node.results += results.get(v, ())
    return nodes


def _place(nodes: Sequence[_Node]) -> int:
    """Give each step a column; returns their number."""
    taken: dict[int, int] = {}  # by column, the last reader of what comes down it
    most = 0
    for n, node in enumerate(nodes):
        free = {c for c, last in taken.items() if last <= n}
        own = [nodes[source].column for source, _ in node.reads if nodes[source].last == n]
        candidates = [c for c in own if c in free] or [
            c for c in range(len(taken) + 1) if taken.get(c, -1) <= n
        ]
        node.column = candidates[0]
        taken[node.column] = max(node.last, n)
        most = max(most, node.column + 1)
    return most


def _at(n: int, node: _Node) -> tuple[float, float]:
    return _EDGE + _ACROSS * node.column, _EDGE + 20 + _DOWN * n


def _edge(nodes: Sequence[_Node], n: int, source: int, made: Schedule, value: int) -> str:
    (x1, y1), (x2, y2) = _at(source, nodes[source]), _at(n, nodes[n])
    x1, y1, x2 = x1 + _WIDE / 2, y1 + _HIGH, x2 + _WIDE / 2
    bend = min(40.0, (y2 - y1) / 2)
    if n - source > 1:  # down the column of the value, then across
        path = f"M{x1:g},{y1:g} V{y2 - 2 * bend:g} C{x1:g},{y2:g} {x2:g},{y2 - 2 * bend:g} {x2:g},{y2:g}"
    else:
        path = f"M{x1:g},{y1:g} C{x1:g},{y1 + bend:g} {x2:g},{y2 - bend:g} {x2:g},{y2:g}"
    var = made.values[value]
    about = f"{var.aval}, {size(var.aval.nbytes)}" if isinstance(var, Var) else "partial results"
    line = element("path", d=path, fill="none", stroke="#9aa7b8", stroke_width=1.6)
    return group([line], about)


def _box(n: int, node: _Node, seconds: float, most: float, total: float) -> str:
    x, y = _at(n, node)
    c = node.cost
    share = seconds / total if total else 0.0
    title = f"{n}  {c.name}" if c.kind == "kernel" else f"{n}  {c.name} ({c.kind})"
    figures = f"{c.shape}   {size(c.bytes)}   {count(c.flops)}FLOP   ≥ {duration(seconds)}, {share:.0%}"
    ends = []
    if node.arguments:
        ends.append("← " + ", ".join(node.arguments))
    if node.results:
        ends.append("→ result " + ", ".join(map(str, node.results)))
    third = "   ".join(ends) or run_lengths(c.ops)
    tooltip = "\n".join([run_lengths(c.ops, 40), *c.lines, *ends])
    box = element(
        "rect",
        x=x,
        y=y,
        width=_WIDE,
        height=_HIGH,
        rx=6,
        fill=mixed(seconds / most if most else 0.0),
        stroke=_STROKES.get(c.kind, "#778"),
        stroke_width=1.4,
    )
    texts = [
        label(x + 10, y + 18, shortened(title, 38), font_weight="bold", fill="#1c2733"),
        label(x + 10, y + 35, shortened(figures, 50), fill="#33404f", font_size=11),
        label(x + 10, y + 52, shortened(third, 44), fill="#5a6878", font_size=11),
    ]
    return group([box, *texts], tooltip, class_="node")
