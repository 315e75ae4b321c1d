"""Registry row of a library kernel: runs equations that no fused kernel computes.

Kernels, stages 5 to 8 on a CUDA device; ``dispatch.py`` lists the rows in order. In: an equation. Out: whether the
row runs it, the sources it compiles, its scratch memory, and its step as a ``Work`` on a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.driver.modules import Text
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Strided, Work, strided
from blufunc.kernels.schedule import OpaqueStep

Function = Callable[[list[DeviceBuffer]], Sequence[DeviceBuffer]]


class Body(Protocol):
    """A program as a step of another one runs it.

    Attributes:
      captured: whether a graph can capture it.
      launches: number of nodes that a call adds to a graph, about.
    """

    captured: bool
    launches: int

    def __call__(self, buffers: list[DeviceBuffer]) -> Sequence[DeviceBuffer]:
        """The results."""

    def own(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        """Memory for a value."""


class Compile(Protocol):
    """Compiles the bodies of loops, branches and calls."""

    def __call__(self, jaxpr: Jaxpr, donated: tuple[bool, ...] = ()) -> Body:
        """The program of a body, which may overwrite donated arguments (default: none)."""


class LibraryKernel:
    """One row: subclasses override ``matches``, ``bind`` and others as needed.

    Attributes:
      planned: whether results are written into memory of the plan; else the row allocates them.
      composite: whether the operation has a definition, which replaces it wherever ``why_not`` gives a reason.
      needs_all: for a composite, whether a platform variant is taken only if all of its calls have kernels.
      on_host: whether the host computes the equation, with copies there and back.
    """

    planned = True
    composite = False
    needs_all = False
    on_host = False

    def matches(self, eqn: Eqn) -> bool:
        """True if the row runs an equation."""
        raise NotImplementedError

    def why_not(self, eqn: Eqn, arch: str) -> str | None:
        """Reason why a composite has no kernel on an architecture (``sm_90a``), or None."""
        return None

    def why_not_captured(self, eqn: Eqn) -> str | None:
        """Reason that no graph can hold the step of an equation; None if one can."""
        return None

    def note(self, line: str, reason: str | None) -> str | None:
        """Line of ``explain`` on a composite at a user's line: a kernel, or why not."""
        return None

    def scratch_bytes(self, eqn: Eqn, arch: str) -> int:
        """Bytes of planned memory that a step works in."""
        return 0

    def rows_of_sums(self, eqn: Eqn) -> int:
        """Rows per partial column sum that the kernel can also write; 0: none."""
        return 0

    def sources(self, step: OpaqueStep, arch: str) -> list[Text]:
        """Sources that ``bind`` compiles, and their names, without those of bodies."""
        return []

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        """The step, ready to run.

        Args:
          compile: compiles the body of a loop, branch or call to a function of buffers.
        """
        raise NotImplementedError


class FunctionKernel(LibraryKernel):
    """A row whose steps are functions from buffers to buffers that they allocate."""

    planned = False

    def function(self, eqn: Eqn, device: int, compile: Compile) -> Function:
        """The function of an equation.

        One that runs bodies has ``captured`` and ``launches``, as ``Body`` has.
        """
        raise NotImplementedError

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        function = self.function(step.eqn, executor.device, compile)
        captured = self.why_not_captured(step.eqn) is None and getattr(function, "captured", True)
        run, launches = run_function(function, step, operands), getattr(function, "launches", 1)
        return Work(run, step.eqn.prim.name, step, captured=captured, launches=launches)


class PlannedLaunch(Protocol):
    """Launches of a step, given addresses of operands, results and scratch memory."""

    def __call__(
        self, operands: Sequence[int], outs: Sequence[int], scratch: int, stream: int, /
    ) -> None: ...


def planned_work(
    executor: Executor, step: OpaqueStep, operands: Sequence[Operand], launch: PlannedLaunch
) -> Work:
    """A step with planned results; unread ones get memory of their own."""
    places = [None if r is None else executor.roots.place(r) for r in step.results]
    pairs = zip(step.eqn.outvars, places, strict=True)
    unread = [executor.own(v.aval, "an unread result") if p is None else None for v, p in pairs]
    executor.keep(unread)
    scratch = None if step.scratch is None else executor.roots.place(step.scratch)

    def run(executor: Executor) -> None:
        located = [o.located(executor, o.in_place) for o in operands]  # copies live until they are read
        both = zip(places, unread, strict=True)
        outs = [executor.address(p) if b is None else b.ptr for p, b in both]  # type: ignore[arg-type]
        working = 0 if scratch is None else executor.address(scratch)
        launch([address for address, _ in located], outs, working, executor.stream)

    return Work(run, step.eqn.prim.name, step, anywhere=lambda: all(o.in_place for o in operands))


def run_function(
    function: Function, step: OpaqueStep, operands: Sequence[Operand]
) -> Callable[[Executor], None]:
    """A launch that calls a function of buffers and hands its results to the executor."""

    def run(executor: Executor) -> None:
        given = [o.buffer(executor) for o in operands]
        for value, result in zip(step.results, function(given), strict=True):
            if value is not None:
                executor.put(value, unshared(executor, result, given))

    return run


def layout_of(step: OpaqueStep, n: int) -> Strided:
    """The layout of an operand of a step that is not loaded yet."""
    atom, given = step.eqn.invars[n], step.operands[n]
    chain = [] if isinstance(given, Literal) else given[1]
    return strided(chain[0].invars[0].aval.shape if chain else atom.aval.shape, chain)


def unshared(executor: Executor, result: DeviceBuffer, given: Sequence[DeviceBuffer]) -> DeviceBuffer:
    """A result in memory of its own: the plan may reuse that of operands."""
    shared = result.nbytes and any(result.shares(x) for x in given)
    return executor.copied(result) if shared else result
