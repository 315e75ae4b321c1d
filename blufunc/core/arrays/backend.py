"""Protocol between the core and the backends.

Core, crossed at stage 8 and by eager evaluation. ``Backend`` hides buffers, devices, streams and asynchrony:
the core only passes opaque buffers from one call to the next. Implementations live in ``kernels/`` and
register themselves here; the first one registered is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import memories, process_info
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE, ShapedArray

Buffer = Any
"""A backend's handle to an array's storage."""


class Executable(Protocol):
    """A compiled program: what ``Backend.compile`` returns."""

    def __call__(self, buffers: list[Buffer]) -> Sequence[Buffer]:
        """Run on argument buffers and return output buffers; may return before completion.

        Empties the list, so that arguments can be freed early.
        """

    def source(self) -> str:
        """The generated program, for people to read."""

    def timings(self, buffers: Sequence[Buffer], repeats: int = 5) -> Sequence[Any]:
        """Time each step on argument buffers, which stay valid: its ``name`` and ``ms``.

        The steps are those of ``schedule``, or the equations of a program without one.
        """


class Backend(Protocol):
    """Owner of arrays and executor of programs on one platform."""

    name: str

    def devices(self) -> Sequence[Device]:
        """The devices of this backend that this process may use."""

    def from_host(self, x: np.ndarray, device: Device, memory: str = DEVICE) -> Buffer:
        """A buffer with a copy of ``x``, which the caller may change afterwards.

        ``memory`` is the kind of memory of ``device`` that it is in.
        """

    def to_host(self, buffer: Buffer) -> np.ndarray:
        """The values as a read-only NumPy array, once ready. May share memory."""

    def snapshots(self, buffers: Sequence[Buffer]) -> list[Callable[[], np.ndarray]]:
        """Host copies of buffers, each by a function to be called once.

        It returns the values of now, read-only. Any thread may call it. Neither this method nor later work waits for
        the copies: until then the functions hold the buffers, and ``claim`` lets donated ones be overwritten
        nevertheless.
        """

    def block_until_ready(self, buffer: Buffer) -> None:
        """Wait until the buffer's value has been computed."""

    def is_ready(self, buffer: Buffer) -> bool:
        """True if the buffer's value has been computed."""

    def run(
        self, prim: Any, buffers: Sequence[Buffer], params: dict, outs: Sequence[ShapedArray]
    ) -> Sequence[Buffer]:
        """Evaluate one primitive eagerly."""

    def in_memory(self, buffer: Buffer, memory: str) -> Buffer:
        """The buffer in a kind of memory of its device; itself if it is there."""

    def compile(self, jaxpr: Any, donated: Sequence[bool], budget: int | None = None) -> Executable:
        """Compile a jaxpr without constants; ``donated`` inputs may be overwritten.

        ``budget`` is the peak memory per device, in bytes, that the plan must meet; None: no limit.
        """

    def chosen(self, jaxpr: Any) -> Any:
        """The jaxpr with this backend's preferred variants (``programs/alternatives.py``)."""

    def claim(self, buffers: list[Buffer], donated: Sequence[bool]) -> None:
        """Replace each donated buffer whose storage is shared by a copy.

        Args:
          buffers: the buffers of all arguments of a call; a donated one may occur twice.
        """


class Lender(Protocol):
    """Backend of a single device, which shares memory with other libraries."""

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        """DLPack type and index of a device."""

    def copy(self, buffer: Buffer) -> Buffer:
        """A copy in memory of its own."""

    def lend(self, buffer: Buffer, stream: Any) -> tuple[int, tuple[int, ...] | None]:
        """Address for a consumer, and strides in bytes unless it is dense.

        ``stream`` is the consumer's, as DLPack has it: the values are ready for its later work.
        """

    def reading(self, device: Device) -> AbstractContextManager[int | None]:
        """Context in which a producer gives its values to the stream of this handle."""

    def borrow(self, memory: Any, device: Device, copied: bool) -> Buffer:
        """A buffer in another library's ``dlpack.Memory``, or a copy of it."""

    def memory_stats(self, device: Device) -> dict[str, int]:
        """Bytes in use and numbers of allocations, for ``Device.memory_stats``."""

    def memory_table(self, device: Device) -> list[tuple[int, str, str, str]]:
        """Allocations as (bytes, memory, type, purpose and user's line)."""


@dataclass(frozen=True)
class Device:
    """Location of arrays and execution of programs: ``cpu:0``, ``cuda:1``.

    Several devices that jointly hold arrays are a ``Device`` too, of a subclass.

    Attributes:
      platform: ``cpu`` or ``cuda``.
      index: index within its process.
      process: rank of the owning process, if it is not this one.
      joint: True for several devices together.
    """

    platform: str
    index: int
    backend: Backend = field(compare=False, repr=False)
    process: int | None = None
    joint: ClassVar[bool] = False

    @property
    def lender(self) -> Lender:
        """The backend, to share memory: of a single device of this process."""
        return self.backend  # type: ignore[return-value]

    @property
    def process_index(self) -> int:
        """Rank of the owning process."""
        return process_info.current().index if self.process is None else self.process

    @property
    def id(self) -> int:
        """Global index over all processes (one device each), or ``index`` in a lone one."""
        return self.process_index if process_info.current().count > 1 else self.index

    def addressable_memories(self) -> list[memories.Memory]:
        """The memories that its programs reach; the default one first."""
        return [memories.Memory(kind, self) for kind in memories.KINDS]

    def default_memory(self) -> memories.Memory:
        """The memory of arrays that are not put elsewhere."""
        return memories.Memory(memories.DEVICE, self)

    def memory(self, kind: str) -> memories.Memory:
        """The memory of a kind, ``"device"`` or ``"pinned_host"``.

        Raises:
          ValueRangeError: there is no such memory.
        """
        return memories.Memory(memories.kind_of(kind, f"{self}.memory"), self)

    def memory_stats(self) -> dict[str, int]:
        """Bytes and numbers of allocations of this process.

        ``docs/performance.md`` lists the keys.

        Raises:
          UnsupportedError: it is several devices, or of another process.
        """
        if self.joint or self.process is not None:
            raise errors.UnsupportedError(
                f"memory_stats of {self}.",
                where=source.here(),
                why="each process counts the memory of its own devices, one by one.",
                fix="[d.memory_stats() for d in bf.local_devices()]",
            )
        return self.lender.memory_stats(self)

    @property
    def members(self) -> tuple[Device, ...]:
        """The single devices that it comprises."""
        return (self,)

    @property
    def own(self) -> Device:
        """The first of these that this process owns."""
        return self

    def layouts(self, values: Sequence[Any]) -> tuple:
        """The layouts of arguments, as far as programs depend on them."""
        return ()

    def local(
        self, jaxpr: Any, donated: Sequence[bool], layouts: tuple
    ) -> tuple[Any, Sequence[bool], Device]:
        """The jaxpr, donation flags and device of one member, for these layouts."""
        return jaxpr, donated, self

    def local_program(self, program: Any, layouts: tuple) -> Any:
        """The same for a compiled program."""
        return program

    def whole(self, buffer: Buffer) -> np.ndarray:
        """All values of a buffer, for inspection.

        Collective where other processes hold shards: all processes call it together.
        """
        return self.backend.to_host(buffer)

    def __repr__(self) -> str:
        of = "" if self.process is None else f", process={self.process}"
        return f"Device(platform={self.platform!r}, index={self.index}{of})"

    def __str__(self) -> str:
        of = f" of process {self.process_index}" if process_info.current().count > 1 else ""
        return f"{self.platform}:{self.index}{of}"


_factories: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}


def register(name: str, factory: Callable[[], Backend]) -> None:
    """Register a backend; ``factory`` is called at its first use."""
    _factories[name] = factory


def get(name: str | None = None) -> Backend:
    """The backend called ``name`` (the default one for None).

    Raises:
      ValueRangeError: no such backend is registered.
    """
    if name is None:
        name = next(iter(_factories))
    found = _backends.get(name)
    if found is None:
        if name not in _factories:
            raise errors.ValueRangeError(
                f"no backend is called {name!r}.", fix=f"use one of {', '.join(map(repr, _factories))}"
            )
        found = _backends[name] = _factories[name]()
    return found


def all_devices(platform: str) -> list[Device]:
    """The devices of a platform over all processes, one per process if several.

    Raises:
      UnsupportedError: this process, one of several, simulates more than one device.
      ValueRangeError: no such backend is registered.
    """
    here = list(get(platform).devices())
    us = process_info.current()
    if us.count == 1:
        return here
    if platform == "cpu" and len(here) > 1:
        raise errors.UnsupportedError(
            f"process {us.index} of {us.count} has {len(here)} simulated devices.",
            why="each process of a job has one device of a mesh.",
            fix=f"leave BLUFUNC_CPU_DEVICES out; or one process with BLUFUNC_CPU_DEVICES={us.count * len(here)}",
        )
    own = _own(here)
    return [own if i == us.index else _of_process(i, platform) for i in range(us.count)]


def _own(devices: Sequence[Device]) -> Device:
    """This process's own device: a process may see all GPUs of its host, or only one."""
    return devices[process_info.current().local_index % len(devices)]


def _of_process(process: int, platform: str) -> Device:
    """A device of another process; its local index is unknown and irrelevant."""
    return Device(platform, 0, _Elsewhere(platform, process), process)  # type: ignore[arg-type]


class _Elsewhere:
    """Stand-in for the backend of another process's device: every use raises."""

    def __init__(self, name: str, process: int):
        self.name, self._process = name, process

    def __getattr__(self, method: str) -> NoReturn:
        raise errors.UnsupportedError(
            f"a {self.name} device of process {self._process} was used in process {process_info.current().index}.",
            where=source.here(),
            why="a process reaches its own devices only.",
            fix="bf.local_devices()[0]; or a mesh of all devices: bf.device_put(x, NamedSharding(mesh, spec))",
        )


_default: dict[str, Device] = {}


def join(us: process_info.Job) -> None:
    """Set this process's place in the job."""
    process_info.join(us)
    _default.clear()


def default_device() -> Device:
    """Default placement of new arrays: ``config.default_device``, or ``cpu:0``.

    Raises:
      UnsupportedError: its platform is not available here.
      ValueRangeError: the device does not exist.
    """
    name = config.default_device
    found = _default.get(name)
    if found is None:
        found = _default[name] = device_named(name) if name else get().devices()[0]
    return found


def device_named(name: str) -> Device:
    """The device of this name, as ``cuda:1``; a platform alone means its first."""
    platform, _, index = name.partition(":")
    devices = get(platform).devices()
    if not index:
        return _own(devices)
    if not index.isdecimal() or int(index) >= len(devices):
        raise errors.ValueRangeError(
            f"there is no device {name!r}.", fix=f"use one of {', '.join(map(str, devices))}"
        )
    return devices[int(index)]


_host: list[Device] = []


def host_device() -> Device:
    """Home of scalars until an operation moves them to its own device: the CPU."""
    if not _host:
        _host.append(get("cpu").devices()[0])
    return _host[0]
