"""Device memory: buffers, the pool that they come from, and what is told when it runs out.

Kernels, stage 8, above ``driver``. In come sizes, shapes and NumPy arrays; out come ``DeviceBuffer`` objects.
The pool takes memory from the device as it is asked for and keeps what is freed for the next. A buffer's memory
returns to the pool when the last reference to it goes, and may be given out again at once: all work is on one stream
for each device, so whatever was already asked of the old buffer is done before the new one is written.
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
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver

reliefs: list[Callable[[int], None]] = []
"""What is called with the device when its memory runs out: to let go of memory that is kept for the next call."""

Array = tuple[tuple[int, ...], np.dtype, str]
"""An array to allocate: shape, dtype, and what it is for with the user's line, for the list in the error."""

_LISTED = 6
"""How many buffers an error lists."""


class DeviceBuffer:
    """An array in device memory, row-major and dense.

    Attributes:
      ptr: the device address; 0 if there are no bytes.
      shape, dtype, nbytes: as NumPy's.
      device: the index of the CUDA device.
    """

    __slots__ = ("__weakref__", "_storage", "device", "dtype", "nbytes", "ptr", "shape")

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
        """What the memory was taken for."""
        return self._storage.label

    def shares(self, other: DeviceBuffer) -> bool:
        """Whether both lie in one piece of memory."""
        return self._storage is other._storage

    @property
    def memory(self) -> int:
        """A number that buffers have in common while they share a piece of memory."""
        return id(self._storage)

    def view(self, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> DeviceBuffer:
        """An array in the same memory, ``offset`` bytes behind the start of this one."""
        part = DeviceBuffer(self.ptr + offset, shape, dtype, self.device, self._storage)
        if offset < 0 or offset + part.nbytes > self.nbytes:
            raise errors.ValueRangeError(
                f"a view of {part.nbytes} bytes at {offset} does not lie in {self!r} of {self.nbytes} bytes.",
                fix="plan a larger arena",
            )
        return part

    # What other libraries ask for. Both say on which stream the values are made, so that nobody reads too early.

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.str not in _INTERFACE:
            raise AttributeError(f"{self.dtype} has no name in __cuda_array_interface__: use DLPack")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),  # not marked read-only, which PyTorch does not take
            "strides": None,
            "version": 3,
            "stream": driver.compute_stream(self.device).ptr,
        }

    def __dlpack__(self, **options: Any) -> Any:
        driver.use_device(self.device)
        with driver.compute_stream(self.device):
            return as_cupy(self, raw=False).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)  # kDLCUDA


_INTERFACE = {np.dtype(c).str for c in "?bBhHiIqQefdFD"}


class _Storage:
    """A piece of the pool's memory; it goes back when this object goes.

    Attributes:
      pointer: CuPy's ``MemoryPointer``.
    """

    __slots__ = ("_pool", "label", "nbytes", "pointer")

    def __init__(self, pool: Pool, pointer: Any, nbytes: int, label: str):
        self._pool, self.pointer, self.nbytes, self.label = pool, pointer, nbytes, label

    def __del__(self) -> None:
        # The collector may call this in the middle of the pool's own bookkeeping: leave a note, and no more.
        self._pool.gone.append((id(self), self.nbytes))


class CupySource:
    """CuPy's memory pool on one device, used on the device's compute stream: free blocks belong to a stream."""

    def __init__(self, device: int):
        import cupy

        self._device, self._pool = device, cupy.cuda.MemoryPool()

    def malloc(self, sizes: Sequence[int]) -> list[Any]:
        """A ``cupy.cuda.MemoryPointer`` for each size; raises ``MemoryError`` when there is not enough."""
        driver.use_device(self._device)
        with driver.compute_stream(self._device):
            return [self._pool.malloc(nbytes) for nbytes in sizes]

    def free_unused(self) -> None:
        """Give free blocks back to the device."""
        driver.use_device(self._device)
        self._pool.free_all_blocks()

    def held_bytes(self) -> int:
        """Bytes taken from the device."""
        driver.use_device(self._device)
        return self._pool.total_bytes()

    def room(self) -> tuple[int, int]:
        """Bytes of the device that nobody has, and all of them."""
        return driver.free_memory(self._device)


class Pool:
    """The memory of one device, with what is known of its buffers.

    Args:
      device: the CUDA device.
      source: what gives memory out: a ``CupySource``, or what has its methods.
    """

    def __init__(self, device: int, source: Any):
        self.device = device
        self.gone: collections.deque[tuple[int, int]] = collections.deque()
        self._source = source
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, Array]] = {}
        self._live = self._peak = 0

    # -- giving out ------------------------------------------------------------------------------------

    def allocate(
        self, shape: tuple[int, ...], dtype: np.dtype, label: str = "", planned_peak: int | None = None
    ) -> DeviceBuffer:
        """Memory for an array; its contents are whatever was there.

        Args:
          label: what it is for and the user's line, for the list in the error.
          planned_peak: bytes that the program which asks was planned to need, for the same.
        Raises:
          OutOfMemoryError: the device has not enough; all that was allocated before is as it was.
        """
        (buffer,) = self.allocate_all([(shape, dtype, label)], planned_peak)
        return buffer

    def allocate_all(self, arrays: Sequence[Array], planned_peak: int | None = None) -> list[DeviceBuffer]:
        """``allocate`` for each shape, dtype and label, or for none of them: a program may have hundreds of results."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in arrays]
        filled = iter(self._take([(n, a[2]) for n, a in zip(sizes, arrays, strict=True) if n], planned_peak))
        return self._buffers(arrays, sizes, [next(filled) if n else None for n in sizes])

    def adopt(self, x: Any, dtype: np.dtype, label: str = "") -> DeviceBuffer:
        """A buffer with the memory of the dense CuPy array ``x``, whose bits are elements of ``dtype``."""
        (buffer,) = self._buffers([(x.shape, dtype, label)], [x.nbytes], [x.data])
        return buffer

    def malloc(self, nbytes: int) -> Any:
        """Memory as CuPy's allocators give it: for the temporaries of its functions."""
        (pointer,) = self._take([(nbytes, "temporaries of a library")], None)
        return pointer

    def _take(self, wanted: Sequence[tuple[int, str]], planned_peak: int | None) -> list[Any]:
        """Memory of these sizes, with labels."""
        try:
            return self._source.malloc([nbytes for nbytes, _ in wanted])
        except MemoryError:
            for give_back in reliefs:
                give_back(self.device)
            self._source.free_unused()  # blocks of other sizes may be what is in the way
        pointers = []
        for nbytes, label in wanted:  # one by one, to tell for which there is none
            try:
                pointers += self._source.malloc([nbytes])
            except MemoryError:
                raise self._out_of_memory(nbytes, label, planned_peak) from None
        return pointers

    def _buffers(
        self, arrays: Sequence[Array], sizes: Sequence[int], pointers: Sequence[Any]
    ) -> list[DeviceBuffer]:
        """Buffers with this memory, which is in the books from now on; those without bytes have none."""
        out = []
        with self._lock:
            self._settle()
            for array, nbytes, pointer in zip(arrays, sizes, pointers, strict=True):
                shape, dtype, label = array
                storage: Any = _Storage(self, pointer, nbytes, label) if nbytes else _Nothing(label)
                if nbytes:
                    self._held[id(storage)] = (nbytes, array)
                out.append(DeviceBuffer(pointer.ptr if nbytes else 0, shape, dtype, self.device, storage))
            self._live += sum(sizes)
            self._peak = max(self._peak, self._live)
        return out

    def _settle(self) -> None:
        """Take what has gone out of the books."""
        while self.gone:
            key, nbytes = self.gone.popleft()
            self._held.pop(key, None)
            self._live -= nbytes

    # -- counting --------------------------------------------------------------------------------------

    def live_bytes(self) -> int:
        """Bytes of all buffers that there are."""
        with self._lock:
            self._settle()
            return self._live

    def peak_bytes(self) -> int:
        """The most that ``live_bytes`` has been since the last ``reset_peak``."""
        with self._lock:
            return self._peak

    def reset_peak(self) -> None:
        """Start anew from what is live now."""
        with self._lock:
            self._settle()
            self._peak = self._live

    def largest(self, count: int = _LISTED) -> list[tuple[int, str, str]]:
        """The largest buffers: ``(bytes, type, label)``, the largest first."""
        with self._lock:
            self._settle()
            found = heapq.nlargest(count, self._held.values(), key=lambda entry: entry[0])
        return [(n, f"{dtypes.short_name(dtype)} {shape}", label) for n, (shape, dtype, label) in found]

    def held_bytes(self) -> int:
        """Bytes taken from the device, those that are free for the next buffer included."""
        return self._source.held_bytes()

    def free_unused(self) -> None:
        """Give memory that no buffer has back to the device."""
        self._source.free_unused()

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
        wanted = f", for {label}" if label else ""
        return errors.OutOfMemoryError(
            f"out of memory on cuda:{self.device}: {size_text(nbytes)} were asked for{wanted}.",
            why=why,
            fix="drop what you no longer need (del x), donate it (jit(f, donate_argnums=...)), or checkpoint the loss",
        )


class _Nothing:
    """The storage of an array without bytes."""

    __slots__ = ("label", "pointer")

    def __init__(self, label: str):
        self.label, self.pointer = label, None


def size_text(nbytes: int) -> str:
    """A number of bytes for people: ``24.0 GiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


# -- the pools of this process ---------------------------------------------------------------------

_pools: dict[int, Pool] = {}


def pool(device: int = 0) -> Pool:
    """The pool of a device."""
    found = _pools.get(device)
    if found is None:
        driver.require()
        found = _pools.setdefault(device, Pool(device, CupySource(device)))
    return found


def live_bytes(device: int = 0) -> int:
    """Bytes of all buffers on a device."""
    return pool(device).live_bytes()


def peak_bytes(device: int = 0) -> int:
    """The most that ``live_bytes`` has been since the last ``reset_peak``."""
    return pool(device).peak_bytes()


def reset_peak(device: int = 0) -> None:
    """Count the peak anew from what is live now."""
    pool(device).reset_peak()


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
    """A buffer with a copy of ``x``, which may change as soon as this returns; the copy itself need not be done yet."""
    x = np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray gives rank 0 an axis
    buffer = allocate(x.shape, x.dtype, device, label)
    driver.copy_in(buffer.ptr, x, device)
    return buffer


def to_host(buffer: DeviceBuffer) -> np.ndarray:
    """The values as a new NumPy array, when they are ready."""
    x = np.empty(buffer.shape, buffer.dtype)
    driver.copy_out(x, buffer.ptr, buffer.device)
    return x


def copy(buffer: DeviceBuffer, label: str = "") -> DeviceBuffer:
    """A buffer of its own with the same values, on the same device."""
    out = allocate(buffer.shape, buffer.dtype, buffer.device, label)
    stream = driver.work_stream(buffer.device)
    driver.copy_on_device(out.ptr, buffer.ptr, buffer.nbytes, stream)
    return out


# -- CuPy's view of it -----------------------------------------------------------------------------

_RAW: dict[np.dtype, np.dtype] = {
    dtypes.bfloat16: np.dtype(np.uint16),
    dtypes.float8_e4m3fn: np.dtype(np.uint8),
    dtypes.float8_e5m2: np.dtype(np.uint8),
    dtypes.key: np.dtype(np.uint64),
}


def raw_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which CuPy holds elements of ``dtype``: unsigned integers for those of ml_dtypes, and for keys."""
    return _RAW.get(dtype, dtype)


def as_cupy(buffer: DeviceBuffer, raw: bool = True) -> Any:
    """The buffer as a ``cupy.ndarray``, without a copy; ``raw``: in the dtype that ``raw_dtype`` says."""
    import cupy

    dtype = raw_dtype(buffer.dtype) if raw else buffer.dtype
    if not raw and dtype in (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.key):
        raise BufferError(f"{dtypes.short_name(dtype)} has no exchange format: exchange the bits")
    if not buffer.nbytes:
        return cupy.empty(buffer.shape, dtype)
    # the memory that CuPy sees keeps the storage alive, and with it the count of live bytes
    memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.nbytes, buffer._storage, buffer.device)
    return cupy.ndarray(buffer.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def from_cupy(x: Any, dtype: np.dtype, device: int = 0, label: str = "") -> DeviceBuffer:
    """A buffer of its own with a CuPy array's values, whose bits are elements of ``dtype``; no copy if it is fresh."""
    import cupy

    dense = cupy.ascontiguousarray(x).reshape(x.shape)
    borrowed = isinstance(dense.data.mem, cupy.cuda.UnownedMemory)  # another buffer's memory
    x = dense.copy() if borrowed else dense
    return pool(device).adopt(x, dtype, label)


@contextmanager
def library_scope(device: int = 0) -> Iterator[None]:
    """Within it CuPy works on a device's compute stream, with memory from our pool.

    While a graph is captured, what CuPy does goes into the graph, with memory that the capture provides.
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
