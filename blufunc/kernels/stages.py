"""The stages of a program that ``config.debug`` asks for, printed when a program is made.

Kernels, between stage 7 and the executables: each of them calls ``show_stages`` with its schedule.
"""

from __future__ import annotations

from blufunc.config import config
from blufunc.kernels.report import Fused
from blufunc.kernels.steps import GroupStep, OpaqueStep, Schedule


def fused(made: Schedule) -> Fused:
    """The fusion of a program, its steps numbered as they are launched."""
    numbers: dict[int, int] = {}
    for n, step in enumerate(made.steps):
        for member in step.members if isinstance(step, GroupStep) else (step,):
            numbers.setdefault(id(member.eqn if isinstance(member, OpaqueStep) else member.region), n)
    return Fused(made.fusion, numbers)


def show_stages(made: Schedule, name: str) -> None:
    """Print how a program was fused, its kernels as LoopIR, and its memory, as far as that is wanted."""
    stages = {
        "fusion": lambda: fused(made),
        "loopir": lambda: "\n".join(dict.fromkeys(map(str, made.kernels))) or "no kernels",
        "memory": made.plan.report,
    }
    for stage, text in stages.items():
        if config.shows(stage):
            config.show(f"{stage} of {name or 'program'}:\n{text()}")
