"""A program of a CUDA device before anything is compiled: what ``lower()`` shows. It takes nothing of the device.

Kernels, stages 5 to 7 without the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from blufunc.core.jaxpr import Jaxpr
from blufunc.core.passes import simplify
from blufunc.kernels import cuda_modules, cuda_program
from blufunc.kernels.cuda_limits import HOPPER, Limits
from blufunc.kernels.steps import OpaqueStep, Schedule


class Draft:
    """What ``compile`` would make of a jaxpr, on a device of an architecture such as ``sm_90`` with these limits, its
    planned peak within a budget in bytes.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        donated: Sequence[bool],
        arch: str,
        limits: Limits = HOPPER,
        budget: int | None = None,
    ):
        self.jaxpr, self.donated, self.arch = simplify(jaxpr), donated, arch
        self.limits, self.budget = limits, budget

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its steps and their memory."""
        return cuda_program.planned(self.jaxpr, self.donated, self.arch, self.budget)

    def source(self) -> str:
        """The CUDA C++ that will be compiled."""
        steps = [s for s in self.schedule.steps if not isinstance(s, OpaqueStep)]
        wanted = [w for s in steps for w in cuda_modules.wanted_by(self.schedule, s)]
        return "\n".join(cuda_modules.texts_of(wanted, self.limits))
