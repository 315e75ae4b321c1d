"""CUDA driver calls: devices, streams, events, copies, modules and launches.

Kernels, bottom of stage 8. In: binaries of stage 6 and addresses of stage 7. Out: work on a device. All calls go
through CuPy's thin wrappers, imported when a device is first requested. Each device has one compute stream, which all
threads share. It runs work in order, so neither freed and reused memory nor values of other threads need events.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from blufunc import errors
from blufunc.kernels.backends.cuda.device_model import BLOCK_LIMIT, STATIC_SHARED_BYTES

_SLOTS, _SLOT_BYTES = 16, 1 << 18


# -- what there is ---------------------------------------------------------------------------------


def available() -> str | None:
    """Reason that CUDA is unavailable, with a fix; None if it is available."""
    found = problem()
    return None if found is None else f"{found[0]}. To mend it: {found[1]}."


@functools.cache
def problem() -> tuple[str, str] | None:
    """Reason that CUDA is unavailable, and the fix; None if it is available."""
    if importlib.util.find_spec("cupy") is None:
        return (
            "CuPy is not installed",
            "pip install 'blufunc[cuda13]', or [cuda12] for a driver older than 580",
        )
    try:
        import cupy

        runtime = cupy.cuda.runtime
        needed, driver = runtime.runtimeGetVersion(), runtime.driverGetVersion()
    except Exception as e:  # broken installations fail in many ways, and all mean that there is no CUDA
        return f"CuPy cannot be loaded: {e}", "pip install --force-reinstall 'blufunc[cuda13]'"
    if driver == 0:
        return "there is no CUDA driver on this machine", "install NVIDIA's"
    if driver // 1000 < needed // 1000:
        return (
            f"the driver supports CUDA {_version(driver)}, and the installed CuPy needs {_version(needed)}",
            f"update the driver, or pip install 'blufunc[cuda{driver // 1000}]'",
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as e:
        return f"the CUDA driver does not answer: {e}", "try nvidia-smi"
    return (
        None if count else ("this process sees no CUDA device", "look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def require() -> None:
    """Raise ``UnsupportedError`` unless CUDA is available."""
    reason = available()
    if reason is not None:
        raise errors.UnsupportedError(
            "CUDA cannot be used here.", why=reason, fix='run on the CPU: bf.devices("cpu")[0]'
        )


def device_count() -> int:
    """Number of CUDA devices visible to this process; 0 without CUDA."""
    if available() is not None:
        return 0
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


@dataclass(frozen=True)
class DeviceProperties:
    """Device properties for the compiler and reports; sizes in bytes.

    Attributes:
      index: index of the device in this process.
      name: product name.
      capability: major and minor compute capability; (9, 0) is Hopper.
      sm_count: number of SMs.
      total_memory: device memory.
      l2_bytes: size of L2.
      shared_per_block: maximum shared memory per block.
    """

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    total_memory: int
    l2_bytes: int
    shared_per_block: int

    @property
    def arch(self) -> str:
        """Architecture to compile for, such as ``sm_80``; ``sm_90a`` on Hopper."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.capability == (9, 0) else "")


@functools.cache
def properties(index: int = 0) -> DeviceProperties:
    """Properties of a device."""
    require()
    import cupy

    p = cupy.cuda.runtime.getDeviceProperties(index)
    name = p["name"]
    return DeviceProperties(
        index,
        name.decode() if isinstance(name, bytes) else name,
        (p["major"], p["minor"]),
        p["multiProcessorCount"],
        p["totalGlobalMem"],
        p["l2CacheSize"],
        p["sharedMemPerBlockOptin"],
    )


def free_memory(index: int = 0) -> tuple[int, int]:
    """Free and total bytes of device memory."""
    import cupy

    with cupy.cuda.Device(index):
        return cupy.cuda.runtime.memGetInfo()


# -- streams and time ------------------------------------------------------------------------------

_lock = threading.Lock()
_streams: dict[int, Any] = {}
_MOST_URGENT = -5
"""Highest stream priority; devices with fewer levels clamp it."""


def compute_stream(index: int = 0) -> Any:
    """Compute stream (``cupy.cuda.Stream``) of a device, which runs all its work."""
    stream = _streams.get(index)
    if stream is None:
        with _lock:
            if index not in _streams:
                _streams[index] = new_stream(index)
            stream = _streams[index]
    return stream


def new_stream(index: int = 0, urgent: bool = False) -> Any:
    """New stream of a device, for communication or capture; it waits for no other.

    Args:
      urgent: True for the highest priority: its blocks get free SMs first.
    """
    require()
    import cupy

    with cupy.cuda.Device(index):
        return cupy.cuda.Stream(non_blocking=True, priority=_MOST_URGENT if urgent else 0)


def use_device(index: int) -> None:
    """Make a device current in this thread, as launches on its streams require."""
    import cupy

    cupy.cuda.runtime.setDevice(index)


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make a device current in a block; users rely on the one that was before."""
    import cupy

    before = cupy.cuda.runtime.getDevice()
    use_device(index)
    try:
        yield
    finally:
        use_device(before)


class _Redirected(threading.local):
    stream: Any = None
    others: tuple[Any, ...] = ()
    device = -1


_redirected = _Redirected()


_copy_streams: dict[int, tuple[Any, Any]] = {}


def copy_streams(index: int = 0) -> tuple[Any, Any]:
    """Streams of a device for copies to the host and from it, one per direction."""
    found = _copy_streams.get(index)
    if found is None:
        with _lock:
            found = _copy_streams.setdefault(index, (new_stream(index), new_stream(index)))
    return found


@contextmanager
def side_streams(index: int, streams: Sequence[Any]) -> Iterator[None]:
    """Put a program's work on several streams of a device, the compute stream first.

    In the block work that follows no event may run in any order; at its end the compute stream must have waited for the
    others. Emulations rely on it.
    """
    assert streams[0] is compute_stream(index)
    yield


@contextmanager
def redirected(index: int, stream: Any, others: Sequence[Any] = ()) -> Iterator[None]:
    """Redirect this thread's work for a device to ``stream``, as a capture does.

    Args:
      stream: stream that replaces the compute stream.
      others: further streams of the same capture, for work that may overlap.
    """
    before = _redirected.device, _redirected.stream, _redirected.others
    _redirected.device, _redirected.stream, _redirected.others = index, stream, tuple(others)
    try:
        yield
    finally:
        _redirected.device, _redirected.stream, _redirected.others = before


def work_stream(index: int = 0) -> Any:
    """Stream for this thread's work: the compute stream or the captured one."""
    return _redirected.stream if _redirected.device == index else compute_stream(index)


def is_capturing(stream: int) -> bool:
    """True if this thread captures the stream with this handle."""
    return stream in _captured()


def _captured() -> list[int]:
    """Handles of the streams that this thread captures; the main one first."""
    return [s.ptr for s in (_redirected.stream, *_redirected.others) if s is not None]


def lane(index: int, stream: int) -> int:
    """Key of per-stream state such as scratch memory, from a stream's handle.

    A capture's streams replay on the compute stream and alongside it: their keys are its handle and negative indices.
    """
    captured = _captured()
    if stream not in captured:
        return stream
    number = captured.index(stream)
    return -number if number else int(compute_stream(index).ptr)


def synchronize(index: int = 0) -> None:
    """Wait for all work on a device's compute stream."""
    compute_stream(index).synchronize()


def is_idle(index: int = 0) -> bool:
    """True if all work on a device's compute stream has ended."""
    return bool(compute_stream(index).done)


def elapsed_ms(run: Callable[[], object], stream: Any, repeats: int = 1) -> float:
    """Mean device milliseconds of ``run()`` over ``repeats`` back-to-back runs."""
    import cupy

    use_device(stream.device_id)  # events belong to a device
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    for _ in range(repeats):
        run()
    stop.record(stream)
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / repeats


def recorded(stream: Any) -> Any:
    """Event recorded on a stream."""
    import cupy

    event = cupy.cuda.Event()
    event.record(stream)
    return event


def is_done(event: Any) -> bool:
    """True if all work that precedes an event has ended."""
    return event.done


LEGACY_STREAM = 1
"""Handle of the default stream, on which PyTorch and CuPy work by default."""


def followed_by(stream: int, index: int) -> Any:
    """Let another library's stream wait for the compute stream's work so far.

    Args:
      stream: handle.
    Returns:
      the event that it waits for.
    """
    import cupy

    with on_device(index):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(compute_stream(index))
        cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)
    return event


def follow(stream: int, index: int) -> None:
    """Let the compute stream wait for the work so far of another library's stream."""
    import cupy

    with on_device(index):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
        compute_stream(index).wait_event(event)


def device_of_address(address: int) -> int:
    """Index of the device that an address is on."""
    require()
    import cupy

    return cupy.cuda.runtime.pointerGetAttributes(address).device


def seconds_between(start: Any, stop: Any) -> float:
    """Device seconds between two completed events."""
    import cupy

    return cupy.cuda.get_elapsed_time(start, stop) / 1e3


# -- copies ----------------------------------------------------------------------------------------


class _Staging:
    """Page-locked ring buffer of a device's small copies; events guard its slots."""

    def __init__(self) -> None:
        import cupy

        self.lock = threading.Lock()
        self.slots = [cupy.cuda.alloc_pinned_memory(_SLOT_BYTES) for _ in range(_SLOTS)]
        self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(_SLOTS)]
        self.next = 0

    def take(self) -> tuple[int, Any]:
        """Address of a free slot, and the event to record after its next use."""
        i = self.next
        self.next = (i + 1) % _SLOTS
        self.events[i].synchronize()  # an event that was never recorded has completed
        return self.slots[i].ptr, self.events[i]


_stagings: dict[int, _Staging] = {}


def _staging(index: int) -> _Staging:
    found = _stagings.get(index)
    if found is None:
        import cupy

        with _lock, cupy.cuda.Device(index):
            found = _stagings.setdefault(index, _Staging())
    return found


def copy_in(address: int, x: np.ndarray, index: int = 0) -> None:
    """Copy the C-contiguous ``x`` to a device address, on the compute stream.

    ``x`` may change as soon as this returns.
    """
    import cupy

    runtime = cupy.cuda.runtime
    n, stream = x.nbytes, compute_stream(index)
    if not n:
        return
    use_device(index)
    if n > _SLOT_BYTES:  # from pageable memory, the driver has staged a copy when the call returns
        runtime.memcpyAsync(address, x.ctypes.data, n, runtime.memcpyHostToDevice, stream.ptr)
        return
    ring = _staging(index)
    with ring.lock:
        slot, event = ring.take()
        ctypes.memmove(slot, x.ctypes.data, n)
        runtime.memcpyAsync(address, slot, n, runtime.memcpyHostToDevice, stream.ptr)
        event.record(stream)


def copy_out(x: np.ndarray, address: int, index: int = 0) -> None:
    """Fill the C-contiguous ``x`` from the device, after the compute stream's work."""
    import cupy

    runtime = cupy.cuda.runtime
    n, stream = x.nbytes, compute_stream(index)
    if not n:
        return
    use_device(index)
    if n > _SLOT_BYTES:
        runtime.memcpyAsync(x.ctypes.data, address, n, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        return
    ring = _staging(index)
    with ring.lock:
        slot, event = ring.take()
        runtime.memcpyAsync(slot, address, n, runtime.memcpyDeviceToHost, stream.ptr)
        event.record(stream)
        event.synchronize()
        ctypes.memmove(x.ctypes.data, slot, n)


def read_pinned(x: np.ndarray, address: int, index: int = 0) -> None:
    """Fill the C-contiguous ``x`` from page-locked memory, once it is written."""
    synchronize(index)
    ctypes.memmove(x.ctypes.data, address, x.nbytes)


def write_pinned(address: int, x: np.ndarray, index: int = 0) -> None:
    """Copy the C-contiguous ``x`` to page-locked memory.

    Pending work may still read it for its last owner, and is waited for.
    """
    synchronize(index)
    ctypes.memmove(address, x.ctypes.data, x.nbytes)


_ASIDE_SLOTS, _ASIDE_BYTES = 4, 1 << 23


class _Aside:
    """Stream and page-locked slots of copies to the host that overlap work."""

    def __init__(self, index: int) -> None:
        import cupy

        self.lock = threading.Lock()
        self.stream = new_stream(index)
        self.slots = [cupy.cuda.alloc_pinned_memory(_ASIDE_BYTES) for _ in range(_ASIDE_SLOTS)]
        self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(_ASIDE_SLOTS)]


_asides: dict[int, _Aside] = {}


def copy_out_aside(x: np.ndarray, enqueue: Callable[[int, int, int, Any], None], index: int) -> None:
    """Fill the C-contiguous ``x`` from either memory.

    The compute stream goes on: the copy runs on another stream, through page-locked slots.

    Args:
      enqueue: called with an address, an offset in bytes, a number of bytes and a stream, for each part.
    """
    import cupy

    n = x.nbytes
    if not n:
        return
    use_device(index)
    aside = _asides.get(index)
    if aside is None:
        with _lock, cupy.cuda.Device(index):
            aside = _asides.setdefault(index, _Aside(index))
    with aside.lock:
        starts = range(0, n, _ASIDE_BYTES)
        for k in range(len(starts) + _ASIDE_SLOTS):
            i = k % _ASIDE_SLOTS
            if k >= _ASIDE_SLOTS:  # the copy that this slot got last time
                at = starts[k - _ASIDE_SLOTS]
                aside.events[i].synchronize()
                ctypes.memmove(x.ctypes.data + at, aside.slots[i].ptr, min(_ASIDE_BYTES, n - at))
            if k < len(starts):
                enqueue(aside.slots[i].ptr, starts[k], min(_ASIDE_BYTES, n - starts[k]), aside.stream)
                aside.events[i].record(aside.stream)


def follow_aside(index: int) -> None:
    """Let the compute stream wait for the parts that ``copy_out_aside`` has enqueued."""
    aside = _asides.get(index)
    if aside is not None:
        with on_device(index):
            compute_stream(index).wait_event(recorded(aside.stream))


def transfer(to: int, source: int, nbytes: int, stream: Any) -> None:
    """Copy bytes between memories, or within page-locked memory, on ``stream``."""
    import cupy

    runtime = cupy.cuda.runtime
    if nbytes:
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, stream.ptr)


def copy_all_on_device(copies: Iterable[tuple[int, int, int]], stream: Any) -> None:
    """``copy_on_device`` for many addresses: ``(to, source, nbytes)``.

    It keeps the GIL: other threads, such as those that write a checkpoint, would take it at each copy.
    """
    copy, handle = _copy_with_gil(), stream.ptr
    for to, source, nbytes in copies:
        if nbytes and (status := copy(to, source, nbytes, handle)):
            raise RuntimeError(f"cuMemcpyDtoDAsync: CUDA error {status}")


@functools.cache
def _copy_with_gil() -> Any:
    function = ctypes.PyDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def copy_on_device(to: int, source: int, nbytes: int, stream: Any) -> None:
    """Copy bytes between device addresses, on ``stream``."""
    import cupy

    runtime = cupy.cuda.runtime
    if nbytes:
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)


def fill_zero(address: int, nbytes: int, stream: Any) -> None:
    """Zero bytes at a device address, on ``stream``."""
    import cupy

    if nbytes:
        cupy.cuda.runtime.memsetAsync(address, 0, nbytes, stream.ptr)


# -- launches --------------------------------------------------------------------------------------


class Module:
    """Cubin loaded on the thread's current device.

    Args:
      cubin: result of ``nvrtc.compile`` for the device's architecture.
    """

    def __init__(self, cubin: bytes):
        require()
        import cupy

        self._module = cupy.cuda.function.Module()
        self._module.load(cubin)

    def kernel(self, name: str) -> Kernel:
        """Kernel of an ``extern "C" __global__`` function."""
        return Kernel(name, self._module.get_function(name))


class Kernel:
    """Kernel function of a module.

    Attributes:
      name: name of the function.
      pointer: driver handle.
    """

    def __init__(self, name: str, function: Any):
        self.name, self._function = name, function  # CuPy's handle, which keeps the module loaded
        self.pointer: int = function.ptr
        self._shared = 0  # dynamic shared memory that is allowed so far

    def prepare(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        args: Sequence[Any],
        cooperative: bool = False,
    ) -> Launch:
        """Prepare a launch to run many times.

        Args:
          grid: number of blocks along up to three axes.
          block: number of threads along up to three axes.
          shared: dynamic shared memory per block, in bytes.
          args: the arguments, as in ``Arguments``.
          cooperative: True if blocks wait for each other: all must be resident.
        Raises:
          ValueRangeError: grid, block or shared memory exceed device limits.
        """
        self.allow_shared(shared)
        shape = _three(grid, "grid"), _three(block, "block")
        return Launch(self, *shape, shared, Arguments(args), cooperative)

    def allow_shared(self, nbytes: int) -> None:
        """Allow ``nbytes`` of dynamic shared memory per block.

        Beyond 48 KiB, static shared memory included, the driver requires an opt-in.
        """
        if not nbytes or nbytes <= self._shared:
            return
        import cupy

        driver = cupy.cuda.driver
        own = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.pointer)
        if nbytes + own <= STATIC_SHARED_BYTES:
            self._shared = nbytes
            return
        limit = properties(cupy.cuda.runtime.getDevice()).shared_per_block - own
        if nbytes > limit:
            raise errors.ValueRangeError(
                f"the kernel {self.name} requires {nbytes} bytes of shared memory per block.",
                why=f"the limit of this device is {limit}.",
                fix="use smaller tiles or fewer stages",
            )
        driver.funcSetAttribute(self.pointer, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)
        self._shared = nbytes


_LIMITS = {"grid": ((1 << 31) - 1, 65535, 65535), "block": (BLOCK_LIMIT, BLOCK_LIMIT, 64)}


def _three(sizes: Sequence[int], what: str) -> tuple[int, int, int]:
    """Sizes along three axes, checked: the driver's error does not name the wrong one."""
    x, y, z = (*map(int, sizes), 1, 1, 1)[:3]
    full = (x, y, z)
    within = all(1 <= n <= limit for n, limit in zip(full, _LIMITS[what], strict=True))
    if not within or len(sizes) > 3 or (what == "block" and x * y * z > BLOCK_LIMIT):
        most = f"{BLOCK_LIMIT} threads in all" if what == "block" else "65535 along the second and third axis"
        raise errors.ValueRangeError(
            f"invalid launch {what} {tuple(sizes)}.",
            why=f"sizes are at least 1, along at most three axes, with {most}.",
            fix="give each thread more work, or use the first axis of the grid",
        )
    return full


class Arguments:
    """Kernel arguments in the driver's layout: values, and a table of their addresses.

    The driver copies the values at launch, so they may be changed in place for the next one. Not thread-safe.

    Args:
      values: for each parameter a device address (``int``, or an object with ``ptr``), a NumPy scalar of the
        parameter's type, or ``bytes`` for a structure passed by value.

    Attributes:
      words: writable values, 8 bytes each; consecutive address parameters are contiguous.
    """

    def __init__(self, values: Sequence[Any]):
        images = [_image(v) for v in values]
        offsets, size = [], 0
        for image in images:
            align = 64 if len(image) >= 64 else 16 if len(image) >= 16 else 8  # tensor maps require 64
            size = -(-size // align) * align
            offsets.append(size)
            size += -(-len(image) // 8) * 8
        self._memory = ctypes.create_string_buffer(max(1, size // 8) * 8 + 64)
        base = -(-ctypes.addressof(self._memory) // 64) * 64
        start = base - ctypes.addressof(self._memory)
        self.words = (ctypes.c_uint64 * max(1, size // 8)).from_buffer(self._memory, start)
        self._table = (ctypes.c_void_p * max(1, len(images)))(*[base + o for o in offsets])
        self._base, self._offsets, self._sizes = base, offsets, [len(image) for image in images]
        for offset, image in zip(offsets, images, strict=True):
            ctypes.memmove(base + offset, image, len(image))
        self.address = ctypes.addressof(self._table)

    def set_pointer(self, i: int, address: int) -> None:
        """Set parameter ``i``, a device address."""
        self.words[self._offsets[i] >> 3] = address

    def set(self, i: int, value: Any) -> None:
        """Set parameter ``i`` to a value of the same size."""
        image = _image(value)
        if len(image) != self._sizes[i]:
            raise errors.ArgumentError(
                f"parameter {i} of a kernel has {self._sizes[i]} bytes, {value!r:.60} has {len(image)}.",
                fix="pass a NumPy scalar of the parameter's type",
            )
        ctypes.memmove(self._base + self._offsets[i], image, len(image))


def _image(value: Any) -> bytes:
    """Bytes of a parameter."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, np.generic):
        return value.tobytes()
    pointer = getattr(value, "ptr", value)
    if isinstance(pointer, int) and not isinstance(pointer, bool):
        return pointer.to_bytes(8, "little")
    raise errors.ArgumentError(
        f"a kernel cannot take {value!r:.60}, a {type(value).__name__}, as a parameter.",
        why="its width is not known.",
        fix="pass a buffer, an address, or a NumPy scalar: np.float32(x)",
    )


class Launch:
    """A kernel with grid and arguments: ``launch(stream.ptr)`` enqueues it.

    Attributes:
      arguments: may be changed between runs.
    """

    __slots__ = ("_call", "_fixed", "_options", "_overlapping", "arguments", "kernel")

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        arguments: Arguments,
        cooperative: bool = False,
    ):
        import cupy

        self.kernel, self.arguments = kernel, arguments
        own = cupy.cuda.driver
        self._call = own.launchCooperativeKernel if cooperative else own.launchKernel
        self._options = () if cooperative else (0,)
        self._fixed = (kernel.pointer, *grid, *block, shared)
        self._overlapping: OverlappingLaunch | None = None

    def run(self, addresses: Sequence[int], stream: Any, first: int = 0, overlaps: bool = False) -> None:
        """Set the address parameters from ``first`` on, and enqueue one run on a stream.

        Args:
          overlaps: let it begin ahead of the end of the kernel that precedes it on the stream, for which it waits
            itself (``include/kernel_parts.cuh``). No copy or event may be between them.
        """
        for i, address in enumerate(addresses, first):
            self.arguments.set_pointer(i, address)
        self(stream.ptr, overlaps)

    def __call__(self, stream: int, overlaps: bool = False) -> None:
        """Enqueue one run on a stream, by handle; its device must be current."""
        if overlaps:
            if self._overlapping is None:
                self._overlapping = OverlappingLaunch(*self._fixed)
            self._overlapping(stream, self.arguments.address, self.kernel.name)
            return
        try:
            self._call(*self._fixed, stream, self.arguments.address, *self._options)
        except Exception as e:
            e.add_note(f"while launching the kernel {self.kernel.name}")
            raise


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: an identifier, and a union of 64 bytes."""

    _fields_: ClassVar = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_: ClassVar = [
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@functools.cache
def _launch_kernel_ex() -> Any:
    """``cuLaunchKernelEx`` of the driver, which CuPy has no function for."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3]
    function.restype = ctypes.c_int
    return function


class OverlappingLaunch:
    """Launch that may overlap with the end of the preceding kernel."""

    def __init__(self, function: int, *sizes: int):
        self._function = function
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
        self._config = _Config((ctypes.c_uint * 7)(*sizes), None, ctypes.pointer(self._attribute), 1)
        self._call = _launch_kernel_ex()

    def __call__(self, stream: int, arguments: int, name: str) -> None:
        """Enqueue one run on a stream, by handle.

        Args:
          arguments: address of the table of the arguments' addresses.
          name: of the kernel, for errors.
        """
        self._config.stream = stream
        status = self._call(ctypes.byref(self._config), self._function, arguments, None)
        if status:
            raise RuntimeError(f"CUDA error {status} while launching the kernel {name}")
