"""A memory plan over time.

Kernels, alongside stage 7. In: a plan. Out: a ``Drawing``: time goes right, a step at a time, memory goes up. A block
is a value at its place: arguments below, results above them, the arena on top. The line is what is in use at each step.
The memory of the host is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable

from blufunc.kernels.inspect.drawing import Drawing, element, group, label, legend
from blufunc.kernels.memory.types import Placement, Plan
from blufunc.kernels.tables import size

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900.0, 420.0, 84.0, 34.0, 30.0
_SPACES = {"argument": "#cfd8e3", "output": "#a8d5ba", "arena": "#f6c28b"}
_NAMES = {"argument": "arguments", "output": "results", "arena": "temporary"}


def draw(name: str, plan: Plan) -> Drawing:
    """The plan of a program."""
    steps, total = max(len(plan.order), 1), max(plan.peak_bytes, 1)
    across, up = _WIDTH / steps, _HEIGHT / total
    floors = _floors(plan)
    parts = list(legend({_NAMES[s]: c for s, c in _SPACES.items()}, _LEFT, 16))
    for k in range(5):
        y = _TOP + _HEIGHT * (1 - k / 4)
        parts.append(element("line", x1=_LEFT, x2=_LEFT + _WIDTH, y1=y, y2=y, stroke="#e3e8ee"))
        parts.append(label(_LEFT - 8, y + 4, size(plan.peak_bytes * k / 4), text_anchor="end", fill="#445"))
    for value, (start, end) in sorted(plan.spans.items()):
        info, place = plan.values[value], plan.placement[value]
        if not info.nbytes or info.alias_of is not None or info.on_host:
            continue
        bottom = floors(place) + place.offset
        block = element(
            "rect",
            x=_LEFT + across * max(start, 0),
            y=_TOP + _HEIGHT - up * (bottom + info.nbytes),
            width=max(across * (min(end, steps - 1) - max(start, 0) + 1), 0.5),
            height=max(up * info.nbytes, 0.4),
            fill=_SPACES[place.space],
            stroke="#ffffff",
            stroke_width=0.5,
        )
        about = f"{info.label or f'value {value}'}\n{size(info.nbytes)}, steps {max(start, 0)} to {end}"
        parts.append(group([block], about, class_="node"))
    used = [sum(n for _, n in plan.live_at(i)) for i in plan.order]
    points = " ".join(
        f"{_LEFT + across * (n + 0.5):g},{_TOP + _HEIGHT - up * b:g}" for n, b in enumerate(used)
    )
    parts.append(element("polyline", points=points, fill="none", stroke="#1c2733", stroke_width=1.2))
    parts.append(label(_LEFT, _TOP + _HEIGHT + 20, f"steps 0 to {steps - 1}", fill="#445"))
    peak = f"peak {size(plan.peak_bytes)}"
    parts.append(label(_LEFT + _WIDTH, _TOP + _HEIGHT + 20, peak, text_anchor="end", fill="#445"))
    return Drawing(f"memory of {name}", _LEFT + _WIDTH + 24, _TOP + _HEIGHT + _BOTTOM, "\n".join(parts))


def _floors(plan: Plan) -> Callable[[Placement], int]:
    """Where the block of a placement begins, in bytes."""
    bases: dict[tuple[str, int], int] = {}
    at = 0
    arguments = [v for v, p in plan.placement.items() if p.space == "argument" and p.owner == v]
    for v in arguments:
        if plan.values[v].on_host:
            continue
        bases["argument", v] = at
        at += plan.values[v].nbytes
    at = plan.argument_bytes
    for v, nbytes in plan.allocations.items():
        if plan.values[v].on_host:
            continue
        bases["output", v] = at
        at += nbytes
    arena = plan.argument_bytes + plan.output_bytes

    def floor(place: Placement) -> int:
        return arena if place.space == "arena" else bases[place.space, place.owner]

    return floor
