"""Collectives as steps of a CUDA program.

Kernels, stages 6 and 8. In: an ``OpaqueStep`` of an executor whose equation is a collective, lowered by
``parallel/collectives/lowering.py``. Out: its ``Work``, from planned memory to planned memory. The engine of the
launching thread's rank puts it on a stream (``NcclEngine.enqueue`` of ``parallel/runtime/nccl.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.schedule import OpaqueStep

WHOLE = {"all_reduce": 1, "permute": 1, "all_gather": 1, "reduce_scatter": 0, "all_to_all": 0}
"""Kinds of collective; 1 if ``count`` is the whole operand's, 0 if one rank's."""


@dataclass(frozen=True)
class Exchange:
    """A collective on contiguous memory of the current device.

    Attributes:
      kind: ``all_reduce`` of ``count`` elements; ``all_gather`` of ``count`` elements of every rank, in order of
        ranks; ``reduce_scatter`` and ``all_to_all`` of ``count`` elements for every rank; ``permute`` of ``count``
        elements, where a rank that receives nothing keeps the contents of ``receive``.
      send, receive: addresses on the device.
      count, dtype: the number of elements, and their dtype.
      op: reduction: ``sum``, ``max`` or ``min``.
      perm: (source, target) ranks.
    """

    kind: str
    send: int
    receive: int
    count: int
    dtype: np.dtype
    op: str = "sum"
    perm: Sequence[tuple[int, int]] = ()


class Collective(LibraryKernel):
    """A collective, or the index of the rank along axes of the mesh."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.kind == "collective" and not eqn.prim.identity

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        eqn = step.eqn
        results = Results(executor, step)  # the rank takes part even if it drops a result
        if not eqn.invars:
            return Work(_index(eqn, results), eqn.prim.name, step, anywhere=lambda: True)
        params = {k: v for k, v in eqn.params.items() if k not in ("axes", "sizes", "src", "dst")}
        parts = [
            _Part(eqn, kind, options, operand, x.aval)
            for (kind, options), operand, x in zip(
                eqn.prim.engine_calls(**params), operands, eqn.invars, strict=True
            )
        ]

        def run(executor: Executor) -> None:
            engine, stream = _engine(eqn), executor.work_stream()
            pairs = zip(parts, results.addresses(executor), strict=True)
            requests = [part.exchange(executor, to, stream) for part, to in pairs]
            engine.enqueue([e for e in requests if e.count], eqn.params["axes"], stream)

        return Work(
            source.at(eqn.source, run),  # for the watchdog's report of missing ranks
            eqn.prim.name,
            step,
            captured=config.nccl_graphs,
            anywhere=lambda: all(o.in_place for o in operands),
            exchanges=True,
        )


class _Part:
    """One operand of a step: its addresses, and the copies before and after."""

    def __init__(self, eqn: Eqn, kind: str, options: dict[str, Any], operand: Operand, x: Any):
        assert not any(options.get(d) for d in ("dim", "split_dim", "concat_dim")), "it is not spelled out"
        self.kind, self.operand = kind, operand
        self.dtype, self.nbytes = x.dtype, x.nbytes
        self.count = x.size if WHOLE[kind] else x.size // int(np.prod(eqn.params["sizes"]))
        self.more = {k: v for k, v in options.items() if k in ("op", "perm")}

    def exchange(self, executor: Executor, to: int, stream: Any) -> Exchange:
        """The request to the engine; copies that must precede it go onto the stream first."""
        if self.kind == "permute":
            driver.fill_zero(to, self.nbytes, stream)
        given = self.operand.buffer(executor)
        return Exchange(self.kind, given.ptr, to, self.count, self.dtype, **self.more)


def _index(eqn: Eqn, results: Results) -> Callable[[Executor], None]:
    """Writes the index of the rank along the axes."""

    def run(executor: Executor) -> None:
        kept = _number(executor.device, int(eqn.prim.impl(**eqn.params)))
        (to,) = results.addresses(executor)
        driver.copy_on_device(to, kept.ptr, kept.nbytes, executor.work_stream())

    return run


@functools.cache
def _number(device: int, number: int) -> cuda_memory.DeviceBuffer:
    """An int32 on a device, for the lifetime of the process: graphs copy from it."""
    return cuda_memory.to_device(np.asarray(number, np.int32), device, "the place of a rank")


def _engine(eqn: Eqn) -> Any:
    """The engine of this thread's rank, which must launch collectives on streams."""
    found = eqn.prim.engine()
    if not hasattr(found, "enqueue"):
        raise errors.CollectiveError(
            f"a CUDA program requires an NCCL engine, and {type(found).__name__} transfers host memory.",
            where=source.here(),
            fix="start the ranks with --engine nccl",
        )
    return found
