"""Registry of library kernels: equations that are not fused kernels.

Kernels, stages 5 to 8 on a CUDA device. In: an equation, or an ``OpaqueStep`` of an executor. Out: the row of ``ROWS``
that runs it, what that row compiles and allocates, and the step's ``Work``. To add a library kernel, write a
``LibraryKernel`` in a module of ``library`` and name it here. Passes query ``Library``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library import float8_gemm
from blufunc.kernels.backends.cuda.library.attention.op import Attention
from blufunc.kernels.backends.cuda.library.collectives import Collective
from blufunc.kernels.backends.cuda.library.control_flow.rows import Call, ControlFlow
from blufunc.kernels.backends.cuda.library.convolution import op as convolutions
from blufunc.kernels.backends.cuda.library.convolution.op import ConvolutionKernel
from blufunc.kernels.backends.cuda.library.cupy_ops import CUPY
from blufunc.kernels.backends.cuda.library.decoding.quantized_gemm import QuantizedMatmul
from blufunc.kernels.backends.cuda.library.decoding.skinny_gemm import SkinnyMatmul
from blufunc.kernels.backends.cuda.library.float8_gemm import Float8Matmul
from blufunc.kernels.backends.cuda.library.grouped import op as grouped
from blufunc.kernels.backends.cuda.library.grouped.op import Grouped
from blufunc.kernels.backends.cuda.library.host import HOST, Replaced
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel, unshared
from blufunc.kernels.backends.cuda.library.linalg.small import SmallMatrices
from blufunc.kernels.backends.cuda.library.loops import op as loops
from blufunc.kernels.backends.cuda.library.loops.op import LoopKernel
from blufunc.kernels.backends.cuda.library.matmul import Matmul
from blufunc.kernels.backends.cuda.library.pointwise_gemm import DotPointwise
from blufunc.kernels.backends.cuda.library.recurrence.op import Recurrence
from blufunc.kernels.backends.cuda.library.scatter.op import RowScatter
from blufunc.kernels.backends.cuda.library.softmax_gemm import LinearSoftmax
from blufunc.kernels.backends.cuda.library.sorting.rows import RowSort
from blufunc.kernels.backends.cuda.library.split_gemm import SplitDot
from blufunc.kernels.backends.cuda.library.transfers import Transfer
from blufunc.kernels.backends.cuda.library.updates import WindowUpdate
from blufunc.kernels.backends.cuda.library.user_kernel import UserKernel
from blufunc.kernels.schedule import OpaqueStep


class Barrier(LibraryKernel):
    """``optimization_barrier``: results alias operands, except literals and views."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim is optimization_barrier_p and not is_replaced(eqn.prim, "impl")

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        def run(executor: Executor) -> None:
            for value, operand in zip(step.results, operands, strict=True):
                if value is not None and value not in executor.made.aliases:
                    x = operand.buffer(executor)
                    executor.put(value, unshared(executor, x, [operand.base(executor)]))

        return Work(run, step.eqn.prim.name, step)


ROWS: tuple[LibraryKernel, ...] = (
    Replaced(),
    Barrier(),
    Collective(),
    Transfer(),
    UserKernel(),
    SplitDot(),
    Attention(),
    LinearSoftmax(),
    Recurrence(),
    SkinnyMatmul(),
    QuantizedMatmul(),
    Float8Matmul(),
    DotPointwise(),
    WindowUpdate(),
    RowScatter(),
    Matmul(),
    ConvolutionKernel(),
    Grouped(),
    RowSort(),
    SmallMatrices(),
    LoopKernel(),
    ControlFlow(),
    Call(),
    CUPY,
    HOST,
)
"""In order: the first row that matches an equation runs it."""


def kernel_of(eqn: Eqn) -> LibraryKernel:
    """The row that runs an equation."""
    return next(row for row in ROWS if row.matches(eqn))


@dataclass(frozen=True)
class Library:
    """The registry as passes see it, for an architecture such as ``sm_90a``."""

    arch: str

    def planned(self, eqn: Eqn) -> bool:
        """True if an equation's results are written into planned memory."""
        return kernel_of(eqn).planned

    def is_composite(self, eqn: Eqn) -> bool:
        """True for operations with a definition and, on some architecture, a kernel."""
        return kernel_of(eqn).composite

    def why_not(self, eqn: Eqn) -> str | None:
        """Reason why a composite has no kernel here; None if it has one."""
        return kernel_of(eqn).why_not(eqn, self.arch)

    def needs_all(self, eqn: Eqn) -> bool:
        """True if a variant requires a kernel for each of its calls of this kind."""
        return kernel_of(eqn).needs_all

    def note(self, eqn: Eqn, line: str, reason: str | None) -> str | None:
        """Line of ``explain`` on a composite at a user's line: a kernel, or why not."""
        return kernel_of(eqn).note(line, reason)

    def remark(self, eqn: Eqn) -> str | None:
        """Line of ``explain`` on how an equation of a plan runs."""
        found = loops.remark(eqn) or convolutions.remark(eqn) or grouped.remark(eqn, self.arch)
        return found or float8_gemm.remark(eqn)

    def scratch_bytes(self, eqn: Eqn) -> int:
        """Planned scratch memory of an equation, in bytes."""
        return kernel_of(eqn).scratch_bytes(eqn, self.arch)

    def rows_of_sums(self, eqn: Eqn) -> int:
        """Rows per partial column sum that a kernel can also write; 0: none."""
        return kernel_of(eqn).rows_of_sums(eqn)

    def sources(self, step: OpaqueStep) -> list[modules.Text]:
        """Sources that ``bind`` compiles for a step, and their names, without bodies."""
        return kernel_of(step.eqn).sources(step, self.arch)


def bind(executor: Executor, step: OpaqueStep, compile: Compile) -> Work:
    """A step, ready to run; ``compile`` compiles bodies of loops, branches and calls."""
    pairs = zip(step.eqn.invars, step.operands, strict=True)
    operands = [Operand(executor, atom, given) for atom, given in pairs]
    return kernel_of(step.eqn).bind(executor, step, operands, compile)
