"""Generated C++, CUDA and plans of the model families, as text.

``python -m tests.kernels.golden_programs DIR`` writes all of it, to compare two versions of the compiler with ``diff
-r``; ``test_golden_programs.py`` keeps a digest of each source, and each plan, as golden files. CUDA is for ``sm_90a``;
no device is needed. Lines of source files are masked, so that editing a family moves nothing.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import blufunc as bf
from benchmarks.suites.families import FAMILIES
from blufunc.config import config
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.inspect.program import Sight, cost_table
from blufunc.kernels.machine import Machine

ARCH = "sm_90a"
MACHINE = Machine("one machine for all", bandwidth=1e12, flops=1e13, products=1e14)


def generated(name: str) -> dict[str, str]:
    """The file names and texts of one family at its tiny size."""
    step, make = FAMILIES[name](bf, "tiny")
    traced = bf.jit(step).trace(*make())
    lowered = traced.lower()
    device = traced.device
    local = device.local(lowered.jaxpr, lowered.donated, traced.layouts)

    def draft(jaxpr, donated, budget):
        return Draft(jaxpr, donated, ARCH, budget=budget)

    cuda = SimpleNamespace(platform="cuda", backend=SimpleNamespace(draft=draft))
    host = Sight(*local)
    gpu = Sight(*local[:2], cuda)
    texts = {"cpp": host.source(), "cu": gpu.source()}
    for suffix, sight in (("cpu.plan", host), ("cuda.plan", gpu)):
        parts = [sight.memory.report(4), str(cost_table(sight.cost, MACHINE))]
        parts += [f"-- {b.title}\n{b.sight.memory.report(2)}" for b in sight.bodies]
        texts[suffix] = "\n".join(parts)
    return {f"{name}.{suffix}": masked(text) for suffix, text in texts.items()}


def masked(text: str) -> str:
    """Without the lines of source files, and trailing spaces of tables."""
    return re.sub(r" +$", "", re.sub(r"\b[\w./]+\.py:\d+", "FILE", text), flags=re.M) + "\n"


def every() -> dict[str, str]:
    """All families' texts."""
    return {file: text for name in FAMILIES for file, text in generated(name).items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the texts")
    folder = parser.parse_args().folder
    config.plan_cache = False
    config.host_compiler = "always"
    config.cpu_devices = 8
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in every().items():
        (folder / file).write_text(text, encoding="utf-8")
