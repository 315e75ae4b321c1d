"""Rows of the registry for loops, branches and calls.

Kernels, stages 6 and 8. In: an equation whose bodies become programs. Out: its step, which a graph can capture unless a
body involves the host.
"""

from __future__ import annotations

from collections.abc import Callable

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.library.control_flow import branches, loops
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, Function, FunctionKernel

_FUNCTIONS: dict[str, Callable[[Eqn, int, Compile], Function]] = {
    "scan": loops.Scan,
    "while": loops.While,
    "cond": branches.Cond,
}
"""Builders of functions of buffers, by name of the primitive."""


class ControlFlow(FunctionKernel):
    """Loops and branches."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.name in _FUNCTIONS

    def function(self, eqn: Eqn, device: int, compile: Compile) -> Function:
        return _FUNCTIONS[eqn.prim.name](eqn, device, compile)


class Call(FunctionKernel):
    """A call of a body that has no kernel: the body as a program."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.kind == "call" and eqn.prim.reference is not None

    def why_not_captured(self, eqn: Eqn) -> str | None:
        return f"{eqn.prim.name} may involve the host"

    def function(self, eqn: Eqn, device: int, compile: Compile) -> Function:
        return eqn.prim.reference(compile, **eqn.params)  # type: ignore[misc]
