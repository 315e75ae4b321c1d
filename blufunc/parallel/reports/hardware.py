"""Figures of a device, to plan programs for.

Parallel, used by ``plan.py`` for programs that are not run. In: figures from the user. Out: a machine of the cost
model. Links between devices are in ``mesh/links.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.kernels.machine import Machine
from blufunc.parallel.mesh.links import check_positive, set_fields


@dataclass(frozen=True, init=False)  # messages would report a generated __init__ as the user's code
class DeviceSpec:
    """A device to plan programs for.

    Attributes:
      flops: floating-point operations per second in matmuls, in the program's dtype.
      bandwidth: bytes per second of its memory.
      memory: bytes of its memory, to report whether a program fits; default None.
      elementwise_flops: operations per second outside of matmuls; default ``flops``.
    Raises:
      ValueRangeError: one of them is not positive.
    """

    flops: float
    bandwidth: float
    memory: float | None
    elementwise_flops: float | None

    def __init__(
        self,
        flops: float,
        bandwidth: float,
        memory: float | None = None,
        elementwise_flops: float | None = None,
    ):
        figures = {
            "flops": flops,
            "bandwidth": bandwidth,
            "memory": memory,
            "elementwise_flops": elementwise_flops,
        }
        check_positive("DeviceSpec", **{name: x for name, x in figures.items() if x is not None})
        set_fields(self, **figures)

    @property
    def machine(self) -> Machine:
        """The device as a ``Machine`` of the cost model."""
        return Machine("the device", self.bandwidth, self.elementwise_flops or self.flops, self.flops)
