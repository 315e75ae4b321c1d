"""The CUDA backend: arrays in device memory, programs as kernels.

Kernels, stage 8, the counterpart of ``backends/cpu/backend.py``. In: a jaxpr and device buffers. Out: a program, or
the results of one primitive. CUDA is loaded when a device is first requested. A call returns once its work is on the
device's compute stream; only reading a value synchronizes. A single operation is a cached program of one equation.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import backend, dlpack, recording
from blufunc.core.arrays.refcounts import ALONE, references
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, exact
from blufunc.core.ops.offload import offload_p
from blufunc.core.primitives.linear_ops import reshape_p
from blufunc.core.programs.simplify import inline_definitions
from blufunc.kernels.backends.cuda.device_model import limits_of
from blufunc.kernels.backends.cuda.dispatch import Library
from blufunc.kernels.backends.cuda.driver import driver, snapshot
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.program import CudaProgram, Draft
from blufunc.kernels.rewrites.select_variant import select_variants
from blufunc.kernels.rewrites.unrolled_windows import WINDOWS

_OPERATIONS_KEPT = 4096
_STORAGE = operator.attrgetter("_storage")


class CudaBackend:
    """``Backend`` of one device, whose buffers are ``DeviceBuffer`` objects.

    Args:
      index: index of the device.
      devices: list of all devices, shared by their backends and filled on first use.

    Attributes:
      name: ``cuda``.
    """

    name = "cuda"

    def __init__(self, index: int = 0, devices: list[backend.Device] | None = None):
        self.index = index
        self._devices: list[backend.Device] = [] if devices is None else devices
        self._operations: OrderedDict[tuple, CudaProgram] = OrderedDict()

    def devices(self) -> Sequence[backend.Device]:
        """CUDA devices visible to this process.

        Raises:
          UnsupportedError: CUDA is unavailable; the message says why and how to fix it.
        """
        if not self._devices:
            driver.require()
            for i in range(driver.device_count()):
                own = self if i == self.index else CudaBackend(i, self._devices)
                self._devices.append(backend.Device("cuda", i, own))
        return self._devices

    # -- values ----------------------------------------------------------------------------------------

    def from_host(self, x: np.ndarray, device: backend.Device, memory: str = DEVICE) -> DeviceBuffer:
        """Copy to the device, through page-locked memory if small; or within the host."""
        label = f"an array made at {source.summary(source.current())}"
        if memory != DEVICE:
            return cuda_memory.to_pinned(x, device.index, label)
        with (
            to.span("to the device", "transfer", bytes=x.nbytes)
            if (to := recording.active)
            else recording.OFF
        ):
            return cuda_memory.to_device(x, device.index, label)

    def to_host(self, buffer: DeviceBuffer) -> np.ndarray:
        """Read-only host copy; waits for the values."""
        with (
            to.span("to the host", "transfer", bytes=buffer.nbytes)
            if (to := recording.active)
            else recording.OFF
        ):
            x = cuda_memory.to_host(buffer)
        x.flags.writeable = False
        return x

    def snapshots(self, buffers: Sequence[DeviceBuffer]) -> list[Callable[[], np.ndarray]]:
        """Host copies that overlap later work, on a stream of their own."""
        return [*snapshot.snapshots(buffers)]

    def block_until_ready(self, buffer: DeviceBuffer) -> None:
        """Synchronize with the device's compute stream."""
        cuda_memory.synchronize(buffer.device)

    def is_ready(self, buffer: DeviceBuffer) -> bool:
        """True if the device's compute stream has nothing to do."""
        return driver.is_idle(buffer.device)

    def in_memory(self, buffer: DeviceBuffer, memory: str) -> DeviceBuffer:
        """The buffer in a kind of memory, copied in the order of the compute stream."""
        return cuda_memory.moved(buffer, memory)

    def memory_stats(self, device: backend.Device) -> dict[str, int]:
        """Counts of the pools; those of page-locked memory begin with ``host_``."""
        stats = cuda_memory.pool(device.index).stats()
        pinned = cuda_memory.pinned_pool(device.index).stats()
        return stats | {f"host_{key}": n for key, n in pinned.items()}

    def memory_table(self, device: backend.Device) -> list[tuple[int, str, str, str]]:
        """The allocations of both pools."""
        return cuda_memory.pool(device.index).table() + cuda_memory.pinned_pool(device.index).table()

    def claim(self, buffers: list[DeviceBuffer], donated: Sequence[bool]) -> None:
        """Copy donated buffers that are shared with another array, buffer or library."""

        def counts() -> tuple[Iterator[int], Iterator[int]]:
            return references(compress(buffers, donated)), references(
                map(_STORAGE, compress(buffers, donated))
            )

        # one reference each from the array and ``buffers``; one owner of the storage
        def alone() -> bool:
            holders, sharers = counts()
            return max(holders) <= ALONE + 1 and max(sharers) <= ALONE

        if alone():
            return
        snapshot.make_way([*compress(buffers, donated)])
        if alone():
            return
        for i, n, m in zip(compress(range(len(buffers)), donated), *counts(), strict=True):
            if n > ALONE + 1 or m > ALONE:
                buffers[i] = cuda_memory.copy(buffers[i], buffers[i].label)

    # -- other libraries -------------------------------------------------------------------------------

    def dlpack_device(self, device: backend.Device) -> tuple[int, int]:
        """The device in DLPack's terms."""
        return dlpack.CUDA, device.index

    def copy(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """A copy in memory of its own."""
        return cuda_memory.copy(buffer, "a copy for another library")

    def lend(self, buffer: DeviceBuffer, stream: Any) -> tuple[int, None]:
        """The address, once a consumer's stream waits for the values."""
        handle = driver.LEGACY_STREAM if stream is None else stream
        if handle.__class__ is not int or handle == 0 or handle < -1:
            raise errors.InteropError(
                f"__dlpack__(stream={stream!r:.60}) for a CUDA device.",
                where=source.here(),
                why="0 could be either default stream.",
                fix="pass 1 (legacy default stream), 2 (per-thread), a handle, or -1 to wait for nothing",
            )
        if handle != -1:
            driver.followed_by(handle, buffer.device)
        buffer.lend()
        return buffer.ptr, None

    @contextmanager
    def reading(self, device: backend.Device) -> Iterator[int]:
        """The compute stream, which a producer lets wait for its values."""
        with driver.on_device(device.index):  # PyTorch exports tensors of the current device only
            yield driver.compute_stream(device.index).ptr

    def wait_for(self, stream: int, device: backend.Device) -> None:
        """Let the compute stream wait for a producer's."""
        driver.follow(stream, device.index)

    def device_of_address(self, address: int) -> int:
        """Index of the device that an address is on."""
        return driver.device_of_address(address)

    def borrow(self, memory: dlpack.Memory, device: backend.Device, copied: bool) -> DeviceBuffer:
        """A buffer in a producer's memory, or a copy of it."""
        label = f"an array of another library, taken at {source.summary(source.current())}"
        return cuda_memory.borrow(memory, device.index, label, copied)

    # -- programs --------------------------------------------------------------------------------------

    def compile(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> CudaProgram:
        """Compile a program for the device."""
        return CudaProgram(inline_definitions(jaxpr, WINDOWS.__contains__), donated, self.index, budget)

    def chosen(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr with variants selected for which the device has kernels."""
        return select_variants(jaxpr, Library(driver.properties(self.index).arch))[0]

    def draft(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Draft:
        """Draft of the program that ``compile`` would build."""
        found = driver.properties(self.index)
        limits = limits_of(found.capability, found.shared_per_block)
        return Draft(jaxpr, donated, found.arch, limits, budget)

    def run(
        self, prim: Any, buffers: Sequence[DeviceBuffer], params: dict, outs: Sequence[ShapedArray]
    ) -> Sequence[DeviceBuffer]:
        """Run one operation, as a program of one equation."""
        if prim is offload_p:
            return [self.in_memory(buffers[0], params["dst"])]
        if prim.identity or prim is reshape_p:  # same elements in the same order: share the memory
            return [buffers[0].view(outs[0].shape, outs[0].dtype)]
        types = tuple([(b.shape, b.dtype, b.memory_kind) for b in buffers])
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
    ins = [Var(ShapedArray(b.shape, b.dtype, False, b.memory_kind)) for b in buffers]
    results = [Var(a.strong()) for a in outs]
    return Jaxpr(ins, [Eqn(prim, ins, results, params, source.current())], results, name=prim.name)
