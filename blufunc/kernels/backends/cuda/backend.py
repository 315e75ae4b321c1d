"""The CUDA backend: arrays in device memory, programs as kernels.

Kernels, stage 8, beside ``backends/cpu/backend.py``. Nothing of CUDA is loaded before a device is asked for. A call
returns when its work is on the device's one compute stream; only reading a value waits for it. A single operation takes
the same path as a program: it is a jaxpr of one equation, whose program is kept.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np

from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.refcounts import ALONE, references
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, exact
from blufunc.core.primitives.linear_ops import reshape_p
from blufunc.core.programs.simplify import inline_definitions
from blufunc.kernels.backends.cuda.device_model import limits_of
from blufunc.kernels.backends.cuda.dispatch import Library
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.lowered import Draft
from blufunc.kernels.backends.cuda.program import CudaProgram
from blufunc.kernels.rewrites.select_variant import select_variants

_OPERATIONS_KEPT = 4096
_STORAGE = operator.attrgetter("_storage")


class CudaBackend:
    """``Backend`` whose buffers are ``DeviceBuffer`` objects: that of one device.

    Args:
      index: the number of the device.
      devices: the list of all devices, which the first to be asked for it fills.

    Attributes:
      name: ``cuda``.
    """

    name = "cuda"

    def __init__(self, index: int = 0, devices: list[backend.Device] | None = None):
        self.index = index
        self._devices: list[backend.Device] = [] if devices is None else devices
        self._operations: OrderedDict[tuple, CudaProgram] = OrderedDict()

    def devices(self) -> Sequence[backend.Device]:
        """The devices that CUDA shows to this process.

        Raises:
          UnsupportedError: CUDA cannot be used here; the message says why, and the remedy.
        """
        if not self._devices:
            driver.require()
            for i in range(driver.device_count()):
                own = self if i == self.index else CudaBackend(i, self._devices)
                self._devices.append(backend.Device("cuda", i, own))
        return self._devices

    # -- values ----------------------------------------------------------------------------------------

    def from_host(self, x: np.ndarray, device: backend.Device) -> DeviceBuffer:
        """A copy, which goes through page-locked memory if it is small."""
        return cuda_memory.to_device(x, device.index, f"an array made at {source.summary(source.current())}")

    def to_host(self, buffer: DeviceBuffer) -> np.ndarray:
        """A copy, read-only, when the values are ready."""
        x = cuda_memory.to_host(buffer)
        x.flags.writeable = False
        return x

    def block_until_ready(self, buffer: DeviceBuffer) -> None:
        """Wait for all that the device was asked for so far, which is on one stream."""
        driver.synchronize(buffer.device)

    def claim(self, buffers: list[DeviceBuffer], donated: Sequence[bool]) -> None:
        """Copy the donated buffers that another array, or whose memory another buffer or library, still sees."""

        def counts() -> tuple[Iterator[int], Iterator[int]]:
            return references(compress(buffers, donated)), references(
                map(_STORAGE, compress(buffers, donated))
            )

        holders, sharers = counts()  # the array and ``buffers`` hold a buffer, which alone has its storage
        if max(holders) <= ALONE + 1 and max(sharers) <= ALONE:
            return
        for i, n, m in zip(compress(range(len(buffers)), donated), *counts(), strict=True):
            if n > ALONE + 1 or m > ALONE:
                buffers[i] = cuda_memory.copy(buffers[i], buffers[i].label)

    # -- programs --------------------------------------------------------------------------------------

    def compile(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> CudaProgram:
        """A program for the device."""
        return CudaProgram(inline_definitions(jaxpr), donated, self.index, budget)

    def chosen(self, jaxpr: Jaxpr) -> Jaxpr:
        """In the forms that the device has kernels for."""
        return select_variants(jaxpr, Library(driver.properties(self.index).arch))[0]

    def draft(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Draft:
        """What ``compile`` would make of a jaxpr, without compiling it."""
        found = driver.properties(self.index)
        limits = limits_of(found.capability, found.shared_per_block)
        return Draft(jaxpr, donated, found.arch, limits, budget)

    def run(
        self, prim: Any, buffers: Sequence[DeviceBuffer], params: dict, outs: Sequence[ShapedArray]
    ) -> Sequence[DeviceBuffer]:
        """One operation, by the program of a jaxpr that has this equation alone."""
        if prim.identity or prim is reshape_p:  # the same elements in the same order: the same memory
            return [buffers[0].view(outs[0].shape, outs[0].dtype)]
        types = tuple([(b.shape, b.dtype) for b in buffers])
        key = (prim, types, tuple([(k, exact(v)) for k, v in params.items()]), config.matmul_precision)
        program = self._operations.get(key)
        if program is None:
            jaxpr = _one_equation(prim, buffers, params, outs)
            program = self._operations[key] = self.compile(jaxpr, (False,) * len(buffers))
            if len(self._operations) > _OPERATIONS_KEPT:
                self._operations.popitem(last=False)
        return program(list(buffers))


def _one_equation(
    prim: Any, buffers: Sequence[DeviceBuffer], params: dict, outs: Sequence[ShapedArray]
) -> Jaxpr:
    ins = [Var(ShapedArray(b.shape, b.dtype)) for b in buffers]
    results = [Var(a.strong()) for a in outs]
    return Jaxpr(ins, [Eqn(prim, ins, results, params, source.current())], results, name=prim.name)
