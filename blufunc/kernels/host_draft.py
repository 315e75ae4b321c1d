"""A program of the CPU before anything is compiled: what ``lower()`` shows.

Kernels, stages 5 to 7 without the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from blufunc.config import config
from blufunc.core.jaxpr import Jaxpr
from blufunc.core.passes import simplify
from blufunc.kernels import host_compiler
from blufunc.kernels.host_program import planned, source_of, why_as_numpy
from blufunc.kernels.numpy_program import Program
from blufunc.kernels.steps import Schedule


class Draft:
    """What ``compile`` would make of a jaxpr.

    Attributes:
      why_not_compiled: why the program runs as NumPy calls; empty if it will be compiled.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None):
        self.jaxpr, self.donated, self.budget = simplify(jaxpr), donated, budget
        self.why_not_compiled = why_as_numpy(jaxpr)
        if budget is not None and self.schedule.bought is not None and config.host_compiler == "auto":
            self.why_not_compiled = "" if host_compiler.find() is not None else host_compiler.why_none()

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its steps and their memory, if it is compiled."""
        return planned(self.jaxpr, self.donated, self.budget)

    def source(self) -> str:
        """The text that will run."""
        if self.why_not_compiled:
            return Program(self.jaxpr, self.donated).source()
        return source_of(self.schedule)[0]
