"""Host fallbacks of CUDA programs: NumPy definitions, callbacks, replacements.

Kernels, stages 6 and 8, the last rows of the registry. In: an equation without a kernel. Out: a step that copies
operands to the host and results back, which waits for the device; ``explain`` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.config import config
from blufunc.core.arrays.errstate import ignoring_fp_errors, ignoring_fp_errors_in_callbacks
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.primitives.effects import eqn_calls_back
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.rule_errors import impl_of
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, Function, FunctionKernel
from blufunc.kernels.backends.numpy.program import interpret


class Host(FunctionKernel):
    """NumPy definition of a primitive, or the ``reference`` of one with an executor."""

    on_host = True

    def matches(self, eqn: Eqn) -> bool:
        return True

    def why_not_captured(self, eqn: Eqn) -> str | None:
        return f"the host computes {eqn.prim.name}"

    def function(self, eqn: Eqn, device: int, compile: Compile) -> Function:
        if eqn.prim.reference is not None:
            return on_host(eqn, eqn.prim.reference(interpret, **eqn.params), device)
        if not eqn.invars:
            return on_host(eqn, _definition(eqn), device)
        outs, label = [v.aval for v in eqn.outvars], f"{eqn.prim.name} at {source.summary(eqn.source)}"
        return lambda given: fallback(eqn.prim, given, eqn.params, outs, label)


HOST = Host()


class Replaced(Host):
    """An operation whose definition the user replaced with a function of NumPy arrays."""

    def matches(self, eqn: Eqn) -> bool:
        return is_replaced(eqn.prim, "impl")

    def function(self, eqn: Eqn, device: int, compile: Compile) -> Function:
        return on_host(eqn, _definition(eqn), device)


def _definition(eqn: Eqn) -> Callable[[list], Sequence]:
    impl = impl_of(eqn.prim, eqn.params, [v.aval for v in eqn.outvars])

    def run(values: list) -> Sequence:
        out = impl(*values)
        return out if eqn.prim.multiple_results else (out,)

    return run


def fallback(
    prim: Any, buffers: Sequence[DeviceBuffer], params: dict, outs: Sequence[ShapedArray], label: str = ""
) -> list[DeviceBuffer]:
    """The results of a primitive by its NumPy definition, from at least one buffer."""
    if config.shows("fusion"):
        config.show(f"{prim.name} is computed on the host: no kernel or library does it here")
    impl = impl_of(prim, params, outs)
    results = ignoring_fp_errors(impl, *[cuda_memory.to_host(b) for b in buffers])
    results = results if prim.multiple_results else (results,)
    return _to_device(results, outs, buffers[0].device, label or prim.name)


def _to_device(results: Sequence, outs: Sequence[ShapedArray], device: int, label: str) -> list[DeviceBuffer]:
    return [
        cuda_memory.to_device(np.asarray(r, a.dtype), device, label)
        for r, a in zip(results, outs, strict=True)
    ]


def on_host(eqn: Eqn, function: Callable[[list], Sequence], device: int) -> Function:
    """A function of NumPy arrays as one of buffers."""
    apply = ignoring_fp_errors_in_callbacks if eqn_calls_back(eqn.prim, eqn.params) else ignoring_fp_errors
    outs, label = [v.aval for v in eqn.outvars], f"{eqn.prim.name} at {source.summary(eqn.source)}"

    def run(given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        return _to_device(apply(function, [cuda_memory.to_host(b) for b in given]), outs, device, label)

    return run
