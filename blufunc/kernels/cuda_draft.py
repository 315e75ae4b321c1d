"""A program of a CUDA device before anything is compiled: what ``lower()`` shows. It takes nothing of the device.

Kernels, stages 5 to 7 without the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from blufunc.core.jaxpr import Jaxpr
from blufunc.core.passes import simplify
from blufunc.kernels.cuda_limits import HOPPER, Limits
from blufunc.kernels.cuda_program import Prepared, prepared
from blufunc.kernels.steps import Schedule


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
    def _prepared(self) -> Prepared:
        return prepared(self.jaxpr, self.donated, self.arch, self.limits, self.budget)

    @property
    def schedule(self) -> Schedule:
        """Its steps and their memory."""
        return self._prepared.schedule

    def source(self) -> str:
        """The CUDA C++ that will be compiled."""
        return "\n".join(self._prepared.rendered.texts)
