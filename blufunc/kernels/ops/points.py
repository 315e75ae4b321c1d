"""Loops and branches at one point: primitives that only ``rewrites/pointwise_control_flow.py`` makes.

Kernels, below fusion. A ``PointLoop`` or ``PointBranch`` of scalars fuses as elementwise operations do; a kernel loops
at each point.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import Primitive


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop at one point. ``body`` is of scalars: from the carries and operands to whether there is another turn,
    and the next carries, of which there are ``carries``. ``most`` bounds the turns, None where nothing does.
    """

    body: Jaxpr
    carries: int
    most: int | None

    def __str__(self) -> str:
        return str(self.body)


@dataclass(frozen=True, eq=False)
class Branch:
    """A choice at one point: of jaxprs of scalars from the operands to the results, by the index before them."""

    sides: tuple[Jaxpr, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.sides))


class _AtPoints(Primitive):
    """One result, the one with number ``index``, of the ``Loop`` or ``Branch`` that is ``control``."""

    kind = "points"

    def abstract(self, *avals, control, index):
        body, first = (control.body, 1) if isinstance(control, Loop) else (control.sides[0], 0)
        shapes = [a.shape for a in avals if a.ndim]
        return body.outvars[first + index].aval.with_shape(shapes[0] if shapes else ())


point_loop_p, point_branch_p = _AtPoints("loop"), _AtPoints("branch")


POINTS = frozenset((point_loop_p, point_branch_p))
