"""A program of a CUDA device before anything is compiled: what ``lower()`` shows. It takes nothing of the device.

Kernels, stages 5 to 7 without the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from blufunc.config import config
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.programs.simplify import inline_definitions, simplify
from blufunc.kernels.backends.cuda.device_model import HOPPER, Limits
from blufunc.kernels.backends.cuda.program import Prepared, prepared
from blufunc.kernels.schedule import Schedule


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
        self.jaxpr, self.donated, self.arch = simplify(inline_definitions(jaxpr)), donated, arch
        self.limits, self.budget = limits, budget

    @functools.cached_property
    def _prepared(self) -> Prepared:
        made = prepared(self.jaxpr, self.donated, self.arch, self.limits, self.budget)
        if config.shows("schedule"):
            config.show(f"schedule of {self.jaxpr.name or 'program'}:\n{made.schedules(self.limits)}")
        return made

    @property
    def schedule(self) -> Schedule:
        """Its steps and their memory."""
        return self._prepared.schedule

    def schedules(self) -> str:
        """Blocks, threads, vectors and memory of each kernel, as ``BLUFUNC_DEBUG=schedule`` prints them."""
        return self._prepared.schedules(self.limits)

    def source(self) -> str:
        """The CUDA C++ that will be compiled."""
        return "\n".join(self._prepared.rendered.texts)
