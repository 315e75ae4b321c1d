"""Loops and branches at one point.

Kernels, below fusion; only ``rewrites/loops/pointwise_control_flow.py`` makes them. A ``Loop`` or ``Branch`` of scalars
fuses as elementwise operations do; a kernel loops at each point.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import Primitive


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of scalars.

    Attributes:
      body: from carries and operands to whether there is another iteration, and the next carries.
      carries: their number.
      most: the maximum of iterations; None: no limit.
    """

    body: Jaxpr
    carries: int
    most: int | None

    def __str__(self) -> str:
        return str(self.body)


@dataclass(frozen=True, eq=False)
class Branch:
    """A choice between jaxprs of scalars; the first operand is the index."""

    sides: tuple[Jaxpr, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.sides))


class _AtPoints(Primitive):
    """The result ``index`` of the ``Loop`` or ``Branch`` that is ``control``."""

    kind = "points"

    def abstract(self, *avals, control, index):
        body, first = (control.body, 1) if isinstance(control, Loop) else (control.sides[0], 0)
        shapes = [a.shape for a in avals if a.ndim]
        return body.outvars[first + index].aval.with_shape(shapes[0] if shapes else ())


point_loop_p, point_branch_p = _AtPoints("loop"), _AtPoints("branch")


POINTS = frozenset((point_loop_p, point_branch_p))
