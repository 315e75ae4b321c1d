"""Collectives as steps of a program on a CUDA device: exchanges that the engine of the rank puts on a stream.

Kernels, stages 6 and 8. In: an ``OpaqueStep`` of an executor whose equation is a collective of ``blufunc.parallel``,
spelled out. Out: its ``Work``, from planned memory to planned memory. The engine is that of the thread which launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core import source
from blufunc.core.jaxpr import Eqn
from blufunc.kernels import cuda_memory, cuda_runtime
from blufunc.kernels.cuda_executor import Executor, Operand, Work
from blufunc.kernels.steps import OpaqueStep

WHOLE = {"all_reduce": 1, "permute": 1, "all_gather": 1, "reduce_scatter": 0, "all_to_all": 0}
"""Kinds of exchange; whether their ``count`` is that of the operand, or that of one rank's part of it."""


def is_collective(eqn: Eqn) -> bool:
    """Whether an equation is an exchange, or asks for the place of the rank."""
    return eqn.prim.kind == "collective" and not eqn.prim.identity


def work(executor: Executor, step: OpaqueStep, operands: Sequence[Operand]) -> Work:
    """The step, ready to run."""
    eqn = step.eqn
    (value,) = step.results
    if value is None:  # it takes part all the same
        (out,) = eqn.outvars
        unused = executor.own(out.aval, "a result that nobody wants")
        executor.keep([unused])
    place = None if value is None else executor.roots.place(value)

    def target(executor: Executor) -> int:
        return unused.ptr if place is None else executor.address(place)

    if not eqn.invars:
        return Work(_index(eqn, target), eqn.prim.name, step, anywhere=lambda: True)
    params = {k: v for k, v in eqn.params.items() if k not in ("axes", "sizes", "src", "dst")}
    kind, options = eqn.prim.exchange(**params)
    assert not any(options.get(d) for d in ("dim", "split_dim", "concat_dim")), "it is not spelled out"
    (operand,), (x, out) = operands, (eqn.invars[0].aval, eqn.outvars[0].aval)
    count = x.size if WHOLE[kind] else x.size // int(np.prod(eqn.params["sizes"]))
    more = {k: v for k, v in options.items() if k in ("op", "perm")}

    def run(executor: Executor) -> None:
        engine = _engine(eqn)
        stream, to = executor.work_stream(), target(executor)
        if kind == "permute":
            cuda_runtime.fill_zero(to, out.nbytes, stream)
        given = operand.buffer(executor)
        if count:
            engine.enqueue(kind, given.ptr, to, count, x.dtype, eqn.params["axes"], stream, **more)

    return Work(run, eqn.prim.name, step, anywhere=lambda: operand.in_place, exchanges=True)


def _index(eqn: Eqn, target: Callable[[Executor], int]) -> Callable[[Executor], None]:
    """Writes the place of the rank along the axes."""

    def run(executor: Executor) -> None:
        kept = _number(executor.device, int(eqn.prim.impl(**eqn.params)))
        cuda_runtime.copy_on_device(target(executor), kept.ptr, kept.nbytes, executor.work_stream())

    return run


@functools.cache
def _number(device: int, number: int) -> cuda_memory.DeviceBuffer:
    """An int32 on a device, for as long as the process lives: graphs copy from it."""
    return cuda_memory.to_device(np.asarray(number, np.int32), device, "the place of a rank")


def _engine(eqn: Eqn) -> Any:
    """The engine of this thread's rank, which must be one that puts exchanges on streams."""
    found = eqn.prim.engine()
    if not hasattr(found, "enqueue"):
        raise errors.CollectiveError(
            f"a program on a CUDA device meets ranks through {type(found).__name__}, which exchanges host memory.",
            where=source.here(),
            fix="start the ranks with --engine nccl",
        )
    return found
