"""GPUs that are described, not present: programs are planned and written for them.

Kernels, stages 5 to 7. In: the name of an architecture, ``cuda:sm_90``. Out: a ``Device`` whose backend drafts
programs, for ``lower(platform=)``, ``explain(device=)`` and ``plan``. It holds no arrays and runs nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

from blufunc import errors
from blufunc.core.arrays.backend import Device
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.programs.simplify import inline_definitions, simplify
from blufunc.kernels.backends.cuda.device_model import H200, limits_of
from blufunc.kernels.backends.cuda.dispatch import Library
from blufunc.kernels.backends.cuda.program import Draft, planned
from blufunc.kernels.machine import Machine
from blufunc.kernels.rewrites.select_variant import select_variants
from blufunc.kernels.rewrites.unrolled_windows import WINDOWS

_SHARED_KIB = {"80": 163, "86": 99, "87": 163, "89": 99, "90": 227, "100": 227, "103": 227, "120": 99}
"""Shared memory of a block in KiB, by compute capability.

CUDA C++ Programming Guide, technical specifications per compute capability.
"""


class DescribedBackend:
    """The part of a GPU's backend that needs no GPU.

    Attributes:
      arch: the architecture that sources are written for: ``sm_90a``.
      machine: the speeds that reports compare with: those of the device model, an H200's.
    """

    name = "cuda"
    machine: Machine = H200

    def __init__(self, number: str):
        self.arch = f"sm_{number}" + ("a" if number == "90" else "")
        self._limits = limits_of((int(number[:-1]), int(number[-1])), _SHARED_KIB[number] << 10)

    def draft(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Draft:
        """Draft of the program that a GPU of this architecture would run."""
        return Draft(jaxpr, donated, self.arch, self._limits, budget)

    def chosen(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr with variants selected for which the architecture has kernels."""
        return select_variants(jaxpr, Library(self.arch))[0]

    def __getattr__(self, method: str) -> NoReturn:
        if method.startswith("_"):
            raise AttributeError(method)
        raise errors.UnsupportedError(
            f"cuda:{self.arch} is a description, without a GPU.",
            where=source.here(),
            why="lower(platform=) shows what a GPU would run; it neither compiles nor runs it.",
            fix="compile on a machine with a GPU, or leave out the platform",
        )


class PlanningBackend(DescribedBackend):
    """The same for plans alone: its drafts have a schedule and no source."""

    def draft(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Any:
        """The schedule that a GPU of this architecture would run."""
        plain = simplify(inline_definitions(jaxpr, WINDOWS.__contains__))
        return SimpleNamespace(schedule=planned(plain, donated, self.arch, budget))


@dataclass(frozen=True)
class DescribedDevice(Device):
    """An architecture as a device; its index is its compute capability."""

    def __str__(self) -> str:
        return f"cuda:{self.backend.arch}"  # type: ignore[attr-defined]


def planner(name: str) -> Device:
    """The device of ``described(name)`` for plans alone, without sources."""
    found = described(name)
    return DescribedDevice("cuda", found.index, _planning(found.index))  # type: ignore[arg-type]


@functools.cache
def _planning(number: int) -> PlanningBackend:
    return PlanningBackend(str(number))


def described(name: str) -> Device:
    """The device of an architecture: ``cuda:sm_90``, or ``cuda`` for the same.

    Raises:
      ValueRangeError: there is no such architecture.
    """
    found = re.fullmatch(r"cuda(?::sm_(\d+)(a?))?", name) if isinstance(name, str) else None
    number = (found[1] or "90") if found else ""
    if found is None or number not in _SHARED_KIB or (found[2] and number != "90"):
        raise errors.ValueRangeError(
            f"there is no architecture {name!r:.60}.",
            where=source.here(),
            fix=f"cuda:sm_90, or another of {', '.join(_SHARED_KIB)}",
        )
    return _device(number)


@functools.cache
def _device(number: str) -> Device:
    return DescribedDevice("cuda", int(number), DescribedBackend(number))  # type: ignore[arg-type]
