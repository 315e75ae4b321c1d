"""Device memory: buffers, the pool that allocates them, out-of-memory errors.

Kernels, stage 8, above ``driver``. In: sizes, shapes and NumPy arrays. Out: ``DeviceBuffer`` objects. The pool
allocates from the device on demand and keeps freed blocks for reuse. A buffer's memory returns to the pool with its
last reference, and may be reused at once: work is ordered on one stream per device, so earlier readers finish before
new writers.
"""

from __future__ import annotations

import collections
import heapq
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.dlpack import Memory
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import DEVICE, PINNED_HOST
from blufunc.kernels.backends.cuda.driver import borrowed, driver, host_memory

reliefs: list[Callable[[int], None]] = []
"""Callbacks with the device index when memory runs out, to free cached memory."""

Array = tuple[tuple[int, ...], np.dtype, str]
"""An array to allocate: shape, dtype, and a label for out-of-memory reports."""

_LISTED = 6
"""Buffers that an out-of-memory error lists."""


class DeviceBuffer:
    """A dense row-major array in device memory.

    Attributes:
      ptr: device address; 0 without bytes.
      shape, dtype, nbytes: as in NumPy.
      device: index of the CUDA device.
      memory_kind: of the class: ``"device"`` or ``"pinned_host"``.
    """

    __slots__ = ("__weakref__", "_storage", "device", "dtype", "nbytes", "ptr", "shape")
    memory_kind = DEVICE

    def __init__(
        self, ptr: int, shape: tuple[int, ...], dtype: np.dtype, device: int, storage: _Storage | Any
    ):
        self.ptr, self.shape, self.dtype, self.device = ptr, shape, dtype, device
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._storage = storage

    def __repr__(self) -> str:
        return f"DeviceBuffer({dtypes.short_name(self.dtype)}{list(self.shape)} on cuda:{self.device})"

    @property
    def label(self) -> str:
        """Purpose of the memory."""
        return self._storage.label

    def shares(self, other: DeviceBuffer) -> bool:
        """True if both are in the same allocation."""
        return self._storage is other._storage

    @property
    def memory(self) -> int:
        """Identifier shared by the buffers of one allocation."""
        return id(self._storage)

    def view(self, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> DeviceBuffer:
        """Array in the same memory, ``offset`` bytes after the start of this one."""
        part = type(self)(self.ptr + offset, shape, dtype, self.device, self._storage)
        if offset < 0 or offset + part.nbytes > self.nbytes:
            raise errors.ValueRangeError(
                f"a view of {part.nbytes} bytes at {offset} is out of bounds of {self!r} of {self.nbytes} bytes.",
                fix="plan a larger arena",
            )
        return part

    def lend(self) -> None:
        """Mark the memory as seen by another library, whose streams may read it."""
        self._storage.lent = True

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.str not in _INTERFACE:
            raise AttributeError(f"{self.dtype} has no name in __cuda_array_interface__: use DLPack")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),  # not read-only: PyTorch rejects that
            "strides": None,
            "version": 3,
            "stream": driver.compute_stream(self.device).ptr,  # consumers wait for it
        }


class PinnedBuffer(DeviceBuffer):
    """A dense row-major array in page-locked memory of the host.

    Kernels could read it over the link; no step does.
    """

    __slots__ = ()
    memory_kind = PINNED_HOST

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("it is in the memory of the host: bf.device_put(x, bf.memory.Space.Device)")


class BorrowedBuffer(DeviceBuffer):
    """An array in memory of another library, which no donation reuses."""

    __slots__ = ("_also",)

    def __init__(self, ptr: int, shape: tuple[int, ...], dtype: np.dtype, device: int, storage: Any):
        super().__init__(ptr, shape, dtype, device, storage)
        self._also = storage  # a second reference: ``CudaBackend.claim`` copies what others hold


_INTERFACE = {np.dtype(c).str for c in "?bBhHiIqQefdFD"}


class _Storage:
    """An allocation of the pool; freed with its last reference.

    Attributes:
      pointer: CuPy's ``MemoryPointer``.
      lent: True if another library has seen the memory.
    """

    __slots__ = ("_pool", "label", "lent", "nbytes", "pointer")

    def __init__(self, pool: Pool, pointer: Any, nbytes: int, label: str):
        self._pool, self.pointer, self.nbytes, self.label, self.lent = pool, pointer, nbytes, label, False

    def __del__(self) -> None:
        # The garbage collector may run this inside the pool's own bookkeeping: only append a note.
        if self.lent:
            self._pool.lent.append(self.pointer)
        self._pool.gone.append((id(self), self.nbytes))


class CupySource:
    """CuPy's memory pool on a device's compute stream: free blocks are per stream."""

    def __init__(self, device: int):
        import cupy

        self._device, self._pool = device, cupy.cuda.MemoryPool()

    def malloc(self, sizes: Sequence[int]) -> list[Any]:
        """Allocate a ``cupy.cuda.MemoryPointer`` per size; ``MemoryError`` if impossible."""
        driver.use_device(self._device)
        with driver.compute_stream(self._device):
            return [self._pool.malloc(nbytes) for nbytes in sizes]

    def free_unused(self) -> None:
        """Return free blocks to the device."""
        driver.use_device(self._device)
        self._pool.free_all_blocks()

    def held_bytes(self) -> int:
        """Bytes reserved from the device."""
        driver.use_device(self._device)
        return self._pool.total_bytes()

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        return driver.free_memory(self._device)


class PinnedSource:
    """Page-locked memory of the host; freed blocks serve the same size.

    Page-locking takes about as long as a copy over the link, so blocks are kept, until another size has no room. CuPy's
    pool would round each size up to a power of two.

    Args:
      device: the device whose programs use it.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._free: dict[int, list[Any]] = collections.defaultdict(list)
        self._held = 0

    def malloc(self, sizes: Sequence[int]) -> list[_PinnedBlock]:
        """Allocate a block per size; ``MemoryError`` if impossible."""
        blocks: list[_PinnedBlock] = []
        for nbytes in sizes:
            try:
                memory = self._free[-(-nbytes // 512) * 512].pop()
            except IndexError:
                memory = self._allocate(nbytes)
            blocks.append(_PinnedBlock(self, memory))
        return blocks

    def _allocate(self, nbytes: int) -> Any:
        nbytes = -(-nbytes // 512) * 512
        if sum(size * len(kept) for size, kept in list(self._free.items())) >= nbytes:
            self.free_unused()  # blocks of other sizes
        if nbytes > self.room()[0]:  # the kernel would end a process rather than refuse
            raise MemoryError
        import cupy

        driver.use_device(self._device)
        try:
            memory = cupy.cuda.PinnedMemory(nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as e:
            raise MemoryError(str(e)) from None
        self._held += nbytes
        return memory

    def give_back(self, memory: Any) -> None:
        """Keep a block for reuse. Work that still uses it precedes later work."""
        self._free[memory.size].append(memory)

    def free_unused(self) -> None:
        """Return free blocks to the host, after the work that may still use them."""
        driver.synchronize(self._device)
        unused, self._free = self._free, collections.defaultdict(list)
        self._held -= sum(size * len(kept) for size, kept in list(unused.items()))

    def held_bytes(self) -> int:
        """Bytes page-locked."""
        return self._held

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the host, or of this process's share of it."""
        return host_memory.room()


class _PinnedBlock:
    """An allocation of a ``PinnedSource``; it returns there with its last reference."""

    __slots__ = ("_memory", "_source", "ptr")

    def __init__(self, source: PinnedSource, memory: Any):
        self._source, self._memory, self.ptr = source, memory, memory.ptr

    def __del__(self) -> None:
        self._source.give_back(self._memory)


class Pool:
    """Memory of one device, or of its host, with accounting of its buffers.

    Args:
      device: index of the CUDA device.
      source: allocator: a ``CupySource``, or an object with its methods.
      buffer: class of the buffers.
    """

    def __init__(self, device: int, source: Any, buffer: type[DeviceBuffer] = DeviceBuffer):
        self.device = device
        self._buffer = buffer
        self._count = 0
        self._largest = 0
        self.gone: collections.deque[tuple[int, int]] = collections.deque()
        self.lent: collections.deque[Any] = collections.deque()
        self._source = source
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, Array]] = {}
        self._live = self._peak = 0

    # -- giving out ------------------------------------------------------------------------------------

    def allocate(
        self, shape: tuple[int, ...], dtype: np.dtype, label: str = "", planned_peak: int | None = None
    ) -> DeviceBuffer:
        """Allocate an uninitialized array.

        Args:
          label: purpose and the user's line, for out-of-memory reports.
          planned_peak: planned peak bytes of the requesting program, for the same.
        Raises:
          OutOfMemoryError: the device has not enough memory; earlier allocations are unaffected.
        """
        (buffer,) = self.allocate_all([(shape, dtype, label)], planned_peak)
        return buffer

    def allocate_all(self, arrays: Sequence[Array], planned_peak: int | None = None) -> list[DeviceBuffer]:
        """Allocate all arrays or none."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in arrays]
        filled = iter(self._take([(n, a[2]) for n, a in zip(sizes, arrays, strict=True) if n], planned_peak))
        return self._buffers(arrays, sizes, [next(filled) if n else None for n in sizes])

    def adopt(self, x: Any, dtype: np.dtype, label: str = "") -> DeviceBuffer:
        """Buffer of the dense CuPy array ``x``, whose bits are elements of ``dtype``."""
        (buffer,) = self._buffers([(x.shape, dtype, label)], [x.nbytes], [x.data])
        return buffer

    def malloc(self, nbytes: int) -> Any:
        """CuPy allocator function for the temporaries of CuPy's functions."""
        (pointer,) = self._take([(nbytes, "temporaries of a library")], None)
        return pointer

    def _take(self, requests: Sequence[tuple[int, str]], planned_peak: int | None) -> list[Any]:
        """Allocate sizes, each with a label."""
        borrowed.settle()
        if self.lent:
            self._follow_consumers()
        try:
            return self._source.malloc([nbytes for nbytes, _ in requests])
        except MemoryError:
            for give_back in reliefs:
                give_back(self.device)
            self._source.free_unused()  # cached blocks of other sizes may hold the memory
        pointers = []
        for nbytes, label in requests:  # one by one, to find which allocation fails
            try:
                pointers += self._source.malloc([nbytes])
            except MemoryError:
                raise self._out_of_memory(nbytes, label, planned_peak) from None
        return pointers

    def _follow_consumers(self) -> None:
        """Free memory that other libraries have seen, once their streams have read it."""
        pointers = [self.lent.popleft() for _ in range(len(self.lent))]
        driver.follow(driver.LEGACY_STREAM, self.device)
        pointers.clear()

    def _buffers(
        self, arrays: Sequence[Array], sizes: Sequence[int], pointers: Sequence[Any]
    ) -> list[DeviceBuffer]:
        """Buffers of allocations, added to the accounting; empty ones have no memory."""
        out = []
        with self._lock:
            self._settle()
            for array, nbytes, pointer in zip(arrays, sizes, pointers, strict=True):
                shape, dtype, label = array
                storage: Any = _Storage(self, pointer, nbytes, label) if nbytes else _Nothing(label)
                if nbytes:
                    self._held[id(storage)] = (nbytes, array)
                out.append(self._buffer(pointer.ptr if nbytes else 0, shape, dtype, self.device, storage))
            self._live += sum(sizes)
            self._count += len(sizes)
            self._largest = max(self._largest, *sizes) if sizes else self._largest
            self._peak = max(self._peak, self._live)
        return out

    def _settle(self) -> None:
        """Account for buffers that were freed."""
        while self.gone:
            key, nbytes = self.gone.popleft()
            self._held.pop(key, None)
            self._live -= nbytes

    # -- counting --------------------------------------------------------------------------------------

    def live_bytes(self) -> int:
        """Bytes of all live buffers."""
        with self._lock:
            self._settle()
            return self._live

    def peak_bytes(self) -> int:
        """Maximum of ``live_bytes`` since the last ``reset_peak``."""
        with self._lock:
            return self._peak

    def reset_peak(self) -> None:
        """Reset the peak to the current live bytes."""
        with self._lock:
            self._settle()
            self._peak = self._live

    def largest(self, count: int = _LISTED) -> list[tuple[int, str, str]]:
        """Largest buffers as ``(bytes, type, label)``, in descending order."""
        with self._lock:
            self._settle()
            found = heapq.nlargest(count, self._held.values(), key=lambda entry: entry[0])
        return [(n, f"{dtypes.short_name(dtype)} {shape}", label) for n, (shape, dtype, label) in found]

    def held_bytes(self) -> int:
        """Bytes reserved from the device, including cached free blocks."""
        return self._source.held_bytes()

    def stats(self) -> dict[str, int]:
        """Counts for ``Device.memory_stats``."""
        live = self.live_bytes()
        with self._lock:
            return {
                "bytes_in_use": live,
                "peak_bytes_in_use": self._peak,
                "bytes_reserved": self.held_bytes(),
                "bytes_limit": self._source.room()[1],
                "num_allocs": self._count,
                "largest_alloc_size": self._largest,
            }

    def table(self) -> list[tuple[int, str, str, str]]:
        """All buffers as (bytes, memory, type, label)."""
        with self._lock:
            self._settle()
            held = list(self._held.values())
        kind = self._buffer.memory_kind
        return [(n, kind, f"{dtypes.short_name(dtype)} {shape}", label) for n, (shape, dtype, label) in held]

    def _out_of_memory(self, nbytes: int, label: str, planned_peak: int | None) -> errors.OutOfMemoryError:
        lines = []
        free, total = self._source.room()
        for size, text, where in self.largest():
            lines.append(f"  {size_text(size):>10}  {text}  {where}".rstrip())
        why = f"arrays hold {size_text(self.live_bytes())} of {size_text(total)}, and {size_text(free)} are free."
        if lines:
            why += " The largest are\n" + "\n".join(lines)
        if planned_peak is not None:
            why += f"\nThe program was planned to need {size_text(planned_peak)} at its peak."
        purpose = f", for {label}" if label else ""
        place, fix = f"cuda:{self.device}", "or checkpoint the loss"
        if self._buffer is PinnedBuffer:
            place = f"the host of cuda:{self.device}"
            fix = "or offload less: fewer names in the policy, a larger memory_budget=, config.host_memory"
        return errors.OutOfMemoryError(
            f"out of memory on {place}: cannot allocate {size_text(nbytes)}{purpose}.",
            why=why,
            fix=f"drop what you no longer need (del x), donate it (jit(f, donate_argnums=...)), {fix}",
        )


class _Nothing:
    """Storage of an array without bytes."""

    __slots__ = ("label", "lent", "pointer")

    def __init__(self, label: str):
        self.label, self.pointer, self.lent = label, None, False


def size_text(nbytes: int) -> str:
    """Human-readable size, such as ``24.0 GiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


# -- the pools of this process ---------------------------------------------------------------------

_pools: dict[int, Pool] = {}


def pool(device: int = 0) -> Pool:
    """Pool of a device."""
    found = _pools.get(device)
    if found is None:
        driver.require()
        found = _pools.setdefault(device, Pool(device, CupySource(device)))
    return found


_pinned: dict[int, Pool] = {}


def pinned_pool(device: int = 0) -> Pool:
    """Pool of page-locked memory for the programs of a device."""
    found = _pinned.get(device)
    if found is None:
        driver.require()
        found = _pinned.setdefault(device, Pool(device, PinnedSource(device), PinnedBuffer))
    return found


def pool_of(memory: str, device: int) -> Pool:
    """Pool of a kind of memory of a device."""
    return pool(device) if memory == DEVICE else pinned_pool(device)


def allocate(
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: int = 0,
    label: str = "",
    planned_peak: int | None = None,
) -> DeviceBuffer:
    """``Pool.allocate`` on a device."""
    return pool(device).allocate(shape, dtype, label, planned_peak)


def to_device(x: np.ndarray, device: int = 0, label: str = "") -> DeviceBuffer:
    """Copy ``x`` to a device asynchronously; ``x`` may change at once."""
    x = np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray gives rank 0 an axis
    buffer = allocate(x.shape, x.dtype, device, label)
    driver.copy_in(buffer.ptr, x, device)
    return buffer


def to_pinned(x: np.ndarray, device: int = 0, label: str = "") -> DeviceBuffer:
    """Copy ``x`` into page-locked memory, without the device."""
    x = np.ascontiguousarray(x).reshape(x.shape)
    buffer = pinned_pool(device).allocate(x.shape, x.dtype, label)
    driver.write_pinned(buffer.ptr, x, device)
    return buffer


def to_host(buffer: DeviceBuffer) -> np.ndarray:
    """Values as a new NumPy array; waits for them."""
    x = np.empty(buffer.shape, buffer.dtype)
    read = driver.copy_out if buffer.memory_kind == DEVICE else driver.read_pinned
    read(x, buffer.ptr, buffer.device)
    borrowed.settle()
    return x


def moved(buffer: DeviceBuffer, memory: str) -> DeviceBuffer:
    """Buffer in a kind of memory, copied on the compute stream; itself if it is there."""
    return buffer if buffer.memory_kind == memory else _copied(buffer, memory, buffer.label)


def _copied(buffer: DeviceBuffer, memory: str, label: str) -> DeviceBuffer:
    out = pool_of(memory, buffer.device).allocate(buffer.shape, buffer.dtype, label)
    driver.use_device(buffer.device)
    driver.transfer(out.ptr, buffer.ptr, buffer.nbytes, driver.work_stream(buffer.device))
    return out


def synchronize(device: int) -> None:
    """Wait for a device's work, and return the memory that it borrowed."""
    driver.synchronize(device)
    borrowed.settle()


def copy(buffer: DeviceBuffer, label: str = "") -> DeviceBuffer:
    """Copy of a buffer in an allocation of its own, in the same memory."""
    if buffer.memory_kind != DEVICE:
        return _copied(buffer, buffer.memory_kind, label)
    out = allocate(buffer.shape, buffer.dtype, buffer.device, label)
    stream = driver.work_stream(buffer.device)
    driver.copy_on_device(out.ptr, buffer.ptr, buffer.nbytes, stream)
    return out


# -- CuPy's view of it -----------------------------------------------------------------------------

_RAW: dict[np.dtype, np.dtype] = {
    dtypes.bfloat16: np.dtype(np.uint16),
    **dict.fromkeys((*dtypes.SMALL_FLOATS, *dtypes.WIDE_OF_NARROW), np.dtype(np.uint8)),
    dtypes.key: np.dtype(np.uint64),
}


def raw_dtype(dtype: np.dtype) -> np.dtype:
    """CuPy dtype for elements of ``dtype``: unsigned integers for ml_dtypes and keys."""
    return _RAW.get(dtype, dtype)


def as_cupy(buffer: DeviceBuffer) -> Any:
    """``cupy.ndarray`` view of a buffer in ``raw_dtype``, without a copy."""
    import cupy

    dtype = raw_dtype(buffer.dtype)
    if not buffer.nbytes:
        return cupy.empty(buffer.shape, dtype)
    # CuPy's memory object keeps the storage alive, and with it the live-byte count
    memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.nbytes, buffer._storage, buffer.device)
    return cupy.ndarray(buffer.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def from_cupy(x: Any, dtype: np.dtype, device: int = 0, label: str = "") -> DeviceBuffer:
    """Buffer with a CuPy array's bits as elements of ``dtype``; copied unless fresh."""
    import cupy

    dense = cupy.ascontiguousarray(x).reshape(x.shape)
    borrowed = isinstance(dense.data.mem, cupy.cuda.UnownedMemory)  # memory of another buffer
    x = dense.copy() if borrowed else dense
    return pool(device).adopt(x, dtype, label)


@contextmanager
def library_scope(device: int = 0) -> Iterator[None]:
    """Run CuPy on a device's compute stream with memory of blufunc's pool.

    During a graph capture, CuPy's work and memory belong to the graph.
    """
    import cupy

    driver.use_device(device)
    stream = driver.work_stream(device)
    if driver.is_capturing(stream.ptr):
        with stream:
            yield
    else:
        with stream, cupy.cuda.using_allocator(pool(device).malloc):
            yield


# -- memory of other libraries ---------------------------------------------------------------------


def borrow(memory: Memory, device: int, label: str, copied: bool) -> DeviceBuffer:
    """Buffer in another library's memory; a copy if ``copied`` or if it is strided."""
    storage = borrowed.Borrowed(memory, device, label)
    if memory.strides is not None:
        return _gather(memory, storage, label)
    buffer = BorrowedBuffer(memory.address, memory.shape, memory.dtype, device, storage)
    return copy(buffer, label) if copied else buffer


def _gather(memory: Memory, storage: borrowed.Borrowed, label: str) -> DeviceBuffer:
    """Dense copy of strided memory."""
    import cupy

    assert memory.strides is not None
    spans = [s * (n - 1) for s, n in zip(memory.strides, memory.shape, strict=True)]
    below = sum(s for s in spans if s < 0)
    nbytes = sum(map(abs, spans)) + memory.dtype.itemsize
    with library_scope(storage.device):
        seen = cupy.cuda.UnownedMemory(memory.address + below, nbytes, storage, storage.device)
        start = cupy.cuda.MemoryPointer(seen, -below)
        strided = cupy.ndarray(memory.shape, raw_dtype(memory.dtype), start, memory.strides)
        return from_cupy(strided, memory.dtype, storage.device, label)
