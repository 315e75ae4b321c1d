"""Copies between memories as steps of a CUDA program.

Kernels, stage 8. In: an ``OpaqueStep`` whose equation is ``offload``. Out: its ``Work``: one asynchronous copy between
planned device memory and page-locked memory of the host, on the stream of its direction (``executor.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.offload import offload_p
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.executor import IN, OUT, Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.schedule import OpaqueStep


class Transfer(LibraryKernel):
    """A copy to the memory of the host, or from it."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim is offload_p and not is_replaced(eqn.prim, "impl")

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        (operand,), nbytes = operands, step.eqn.outvars[0].aval.nbytes
        assert operand.in_place, "the operand of a copy is dense"
        results = Results(executor, step)
        # a library's allocation may be reused by what follows on the compute stream
        planned = operand.place is None or not executor.roots.is_dynamic(operand.place.root)

        def run(executor: Executor) -> None:
            (to,) = results.addresses(executor)
            driver.transfer(to, operand.address(executor), nbytes, executor.work_stream())

        out = step.eqn.params["dst"] != DEVICE
        name = f"copy {'out' if out else 'in'}"
        copies = (OUT if out else IN) if planned else 0
        return Work(run, name, step, anywhere=lambda: planned, copies=copies)
