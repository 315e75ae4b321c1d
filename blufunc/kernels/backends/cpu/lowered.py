"""A program of the CPU before anything is compiled: what ``lower()`` shows.

Kernels, stages 5 to 7 without the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from blufunc.config import config
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.program import planned, source_of, why_as_numpy
from blufunc.kernels.backends.numpy.program import Program
from blufunc.kernels.schedule import Schedule


class Draft:
    """What ``compile`` would make of a jaxpr.

    Attributes:
      why_not_compiled: why the program runs as NumPy calls; empty if it will be compiled.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None):
        self.jaxpr, self.donated, self.budget = simplify(jaxpr), donated, budget
        self.why_not_compiled = why_as_numpy(jaxpr)
        if budget is not None and self.schedule.bought is not None and config.host_compiler == "auto":
            self.why_not_compiled = "" if toolchain.find() is not None else toolchain.why_none()

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its steps and their memory, if it is compiled."""
        return planned(self.jaxpr, self.donated, self.budget)

    def source(self) -> str:
        """The text that will run."""
        if self.why_not_compiled:
            return Program(self.jaxpr, self.donated).source()
        return source_of(self.schedule)[0]
