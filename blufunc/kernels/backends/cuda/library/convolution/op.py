"""Convolutions as steps: by cuDNN, else by an implicit GEMM.

Kernels, stages 5 to 8. In: equations of ``ops/convolution.py``. Out: steps that are ready to run. cuDNN computes what
it has engines for; whether it has any for a shape shows at the first run, which also times them. Otherwise, and
without cuDNN, the kernel of ``implicit_gemm`` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir.jaxpr import Eqn, line_of
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.convolution import plans
from blufunc.kernels.backends.cuda.library.convolution.implicit_gemm import ENTRY, ImplicitGemm, source
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.ops.convolution import convolution_of, convolution_p
from blufunc.kernels.schedule import OpaqueStep

Run = Callable[[tuple[int, int, int], int], None]
"""Enqueues a convolution, given addresses and a stream."""


def remark(eqn: Eqn) -> str | None:
    """Line of ``explain`` on a convolution: what computes it, and why."""
    if eqn.prim is not convolution_p:
        return None
    kind = {
        "forward": "convolution",
        "input": "gradient or transposed convolution",
        "weight": "weight gradient",
    }
    c = convolution_of(eqn)
    reason = plans.why_not(c)
    by = (
        "by cuDNN, where it has an engine for it"
        if reason is None
        else f"by an implicit GEMM: cuDNN does not compute it ({reason})"
    )
    return f"{kind[c.kind]} at {line_of(eqn)} runs {by}"


class ConvolutionKernel(LibraryKernel):
    """Convolutions of any kind."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim is convolution_p

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        c = convolution_of(step.eqn)
        return [] if plans.why_not(c) is None else [(source(c), ENTRY)]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        (value,) = step.results
        assert value is not None
        place = executor.roots.place(value)
        kernel = Kernel(step.eqn, executor.device)

        def run(executor: Executor) -> None:
            located = [o.located(executor, o.in_place) for o in operands]  # copies live until they are read
            first, second = (address for address, _ in located)
            kernel((first, second, executor.address(place)), executor.work_stream().ptr)

        in_place = all(o.in_place for o in operands)
        return Work(run, step.eqn.prim.name, step, anywhere=lambda: in_place)


class Kernel:
    """The convolution of an equation; its first run chooses what computes it."""

    def __init__(self, eqn: Eqn, device: int):
        self._convolution, self._device = convolution_of(eqn), device
        self._run: Run | None = None

    def __call__(self, addresses: tuple[int, int, int], stream: int) -> None:
        """Put it on a stream, given addresses of both operands and of the result."""
        if self._run is None:
            self._run = self._choose(addresses)
        self._run(addresses, stream)

    def _choose(self, addresses: tuple[int, int, int]) -> Run:
        c = self._convolution
        if plans.why_not(c) is None:
            try:
                return plans.Plan(c, self._device, addresses).run
            except errors.UnsupportedError as e:
                if config.shows("fusion"):
                    config.show(f"a convolution runs as an implicit GEMM: {e}")
        return ImplicitGemm(c, self._device)
