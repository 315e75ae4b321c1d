"""``cond`` on a CUDA device: the host reads the index, or nodes of a graph do.

Kernels, stages 6 and 8. In: the equation of a branch. Out: a function of buffers. In a graph each branch is a node that
runs only if it is chosen, and copies its results to the same place as the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import conditional, driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.library.control_flow import moves
from blufunc.kernels.backends.cuda.library.control_flow.bodies import nested
from blufunc.kernels.backends.cuda.library.control_flow.loops import why_no_node
from blufunc.kernels.backends.cuda.library.library_kernel import Compile


class Cond:
    """A branch of one executor.

    Attributes:
      captured: whether a graph can hold it.
      launches: number of nodes that it adds to a graph, about.
    """

    def __init__(self, eqn: Eqn, device: int, compile: Compile):
        self.device = device
        self.bodies = [compile(n.jaxpr) for n in nested(eqn)]
        self._results = [v.aval for v in eqn.outvars]
        self.launches = 1 + sum(b.launches + 1 for b in self.bodies)
        few = len(self.bodies) <= moves.MOST
        self.captured = few and why_no_node(eqn) is None and all(b.captured for b in self.bodies)
        if self.captured:
            moves.prepare(device)

    def __call__(self, given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        index, *operands = given
        if driver.is_capturing(driver.work_stream(self.device).ptr):
            return self._as_nodes(index, operands)
        which = int(cuda_memory.to_host(index))
        return list(self.bodies[min(max(which, 0), len(self.bodies) - 1)](operands))

    def _as_nodes(self, index: DeviceBuffer, operands: Sequence[DeviceBuffer]) -> list[DeviceBuffer]:
        """Put the branches into the graph that is being captured."""
        stream = driver.work_stream(self.device)
        results = [self.bodies[0].own(a, "results of cond") for a in self._results]
        if not any(x.nbytes for x in results):
            return results  # the bodies would be empty
        handles = [conditional.condition(stream) for _ in self.bodies]
        moves.choose(index, handles, self.device)
        for handle, body in zip(handles, self.bodies, strict=True):

            def run(body=body) -> None:
                pairs = list(zip(results, body(list(operands)), strict=True))
                moves.copy_all(pairs, body, self.device)

            conditional.add(stream, handle, conditional.IF, run, self.device)
        return results
