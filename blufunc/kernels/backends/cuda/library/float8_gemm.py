"""GEMMs of scaled fp8 matrices by cuBLASLt.

Kernels, stages 5 to 8, above ``cublaslt.py``. In: an equation of ``nn/low_precision/product.py``, whose definition runs
wherever this module has no kernel. Out: the step, ready to run. Operands are [m, k] and [n, k], with the contracted
axis innermost, as Hopper's tensor cores read fp8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir.jaxpr import Eqn, line_of
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.executor import ALIGNMENT, Executor, Operand, Work
from blufunc.kernels.backends.cuda.library import cublaslt
from blufunc.kernels.backends.cuda.library.library_kernel import (
    Compile,
    LibraryKernel,
    planned_work,
    run_function,
)
from blufunc.kernels.gemm_layout import Gemm, Layout
from blufunc.kernels.schedule import OpaqueStep

NAME = "float8_dot"

_SCALINGS = {"tensor": "sm_89", "row": "sm_90", "block": "sm_90"}
"""The first architecture on which cuBLASLt has a scaling; blocks are Hopper's."""


def gemm_of(eqn: Eqn) -> Gemm:
    """The GEMM of an equation, which ``why_not`` may refuse."""
    a, _, b, _ = (x.aval for x in eqn.invars)
    (m, k), n = a.shape, b.shape[0]
    layout = Layout(m, n, k, False, True, k, k, n)
    scaling, fast = eqn.params["scaling"], eqn.params["fast"]
    out = eqn.outvars[0].aval.dtype
    return Gemm(layout, a.dtype, b.dtype, out, alignment=ALIGNMENT, scaling=scaling, fast=fast)


def why_not(eqn: Eqn, arch: str) -> str | None:
    """Reason that cuBLASLt does not compute an equation, or None."""
    if eqn.invars[0].aval.ndim != 2:
        return "each matrix of a batch has scales of its own"
    scaling = eqn.params["scaling"]
    number = lambda name: int("".join(filter(str.isdigit, name)))
    if number(arch) < number(_SCALINGS[scaling]):
        return f"{arch} has no fp8 GEMM with scales of each {scaling}"
    if scaling == "block" and number(arch) // 10 != 9:
        return f"{arch} has scales of other blocks than of 128 elements"
    return gemm_of(eqn).refused()


def remark(eqn: Eqn) -> str | None:
    """Line of ``explain`` on an fp8 GEMM."""
    if eqn.prim.name != NAME:
        return None
    gemm = gemm_of(eqn)
    kinds = " x ".join(d.name.removeprefix("float8_") for d in (gemm.a, gemm.b))
    sums = ", sums of fewer bits" if gemm.fast else ""
    return f"{NAME} at {line_of(eqn)} runs as an fp8 GEMM of cuBLASLt: {kinds}, a scale for each {gemm.scaling}{sums}"


class Float8Matmul(LibraryKernel):
    """``float8_dot`` by cuBLASLt."""

    composite = True

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.name == NAME and eqn.prim.kind == "call"

    def why_not(self, eqn: Eqn, arch: str) -> str | None:
        return why_not(eqn, arch)

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        product = _Product(gemm_of(step.eqn), executor.device)
        work = planned_work(executor, step, operands, product)
        plain: list[Callable[[Executor], None]] = []

        def run(executor: Executor) -> None:
            if not product.refused:
                work.run(executor)
            if product.refused:  # no algorithm: known at the first run, ahead of capturing
                if driver.is_capturing(executor.work_stream().ptr):
                    raise RuntimeError("an fp8 GEMM without an algorithm is a program of its own")  # no graph
                if not plain:
                    plain.append(run_function(compile(step.eqn.params["jaxpr"]), step, operands))
                plain[0](executor)

        return dataclasses.replace(work, run=run)


class _Product:
    """Launches of a GEMM, whose algorithm the first run chooses.

    Attributes:
      refused: whether the library has turned out to have no algorithm.
    """

    def __init__(self, gemm: Gemm, device: int):
        self._gemm, self._device = gemm, device
        self._plan: Any = None
        self.refused = False

    def __call__(self, operands: Sequence[int], outs: Sequence[int], scratch: int, stream: int) -> None:
        a, scale_a, b, scale_b = operands
        if self._plan is None:
            try:
                # not shared with other steps: it holds addresses of scales
                self._plan = cublaslt.Plan(self._gemm, self._device, (a, b, outs[0]))
            except errors.UnsupportedError as e:
                self.refused = True
                if config.shows("fusion"):
                    config.show(f"an fp8 GEMM runs without cuBLASLt: {e}")
                return
        self._plan.run(a, b, 0, outs[0], stream=stream, scales=(scale_a, scale_b))
