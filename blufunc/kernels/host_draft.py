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
from blufunc.kernels.host_program import planned, source_of, worth_compiling
from blufunc.kernels.numpy_program import Program
from blufunc.kernels.steps import Schedule


class Draft:
    """What ``compile`` would make of a jaxpr.

    Attributes:
      why_not_compiled: why the program runs as NumPy calls; empty if it will be compiled.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool]):
        self.jaxpr, self.donated = simplify(jaxpr), donated
        self.why_not_compiled = _why_not_compiled(jaxpr)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its steps and their memory, if it is compiled."""
        return planned(self.jaxpr, self.donated)

    def source(self) -> str:
        """The text that will run."""
        if self.why_not_compiled:
            return Program(self.jaxpr, self.donated).source()
        return source_of(self.schedule)[0]


def _why_not_compiled(jaxpr: Jaxpr) -> str:
    if config.host_compiler == "never":
        return "config.host_compiler is 'never'"
    if config.host_compiler == "auto" and not worth_compiling(jaxpr):
        return "its arrays are too small to gain from compiling; config.host_compiler = 'always' does so all the same"
    return "" if host_compiler.find() is not None else host_compiler.why_none()
