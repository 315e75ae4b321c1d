"""Draft of a CUDA program before compilation, as ``lower()`` shows it.

Kernels, stages 5 to 7. In: a jaxpr, an architecture and limits. Out: its schedule and sources. It needs no device.
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
    """Draft of a program for ``arch``, such as ``sm_90``, within ``budget`` bytes."""

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
        result = prepared(self.jaxpr, self.donated, self.arch, self.limits, self.budget)
        if config.shows("schedule"):
            config.show(f"schedule of {self.jaxpr.name or 'program'}:\n{result.schedules(self.limits)}")
        return result

    @property
    def schedule(self) -> Schedule:
        """Steps of the program and their memory."""
        return self._prepared.schedule

    def schedules(self) -> str:
        """Blocks, threads, vectors and memory of each kernel (``BLUFUNC_DEBUG=schedule``)."""
        return self._prepared.schedules(self.limits)

    def source(self) -> str:
        """CUDA C++ source that will be compiled."""
        return "\n".join(self._prepared.rendered.texts)
