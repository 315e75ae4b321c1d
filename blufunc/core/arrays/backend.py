"""The protocol between the core and whatever computes.

Core, crossed at stage 8 (and by eager evaluation). Buffers, devices, streams and asynchrony live
behind ``Backend``: the core only moves opaque buffers from one call to the next. Implementations
are in ``kernels/`` and register themselves here; the first one registered is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import process_info
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray

Buffer = Any
"""A backend's own handle of an array's storage."""


class Executable(Protocol):
    """A compiled program: what ``Backend.compile`` returns."""

    def __call__(self, buffers: list[Buffer]) -> Sequence[Buffer]:
        """Run on argument buffers, return output buffers. Empties the list, so that arguments can be freed early.

        May return before the work is done.
        """

    def source(self) -> str:
        """The generated program, for people to read."""

    def timings(self, buffers: Sequence[Buffer], repeats: int = 5) -> Sequence[Any]:
        """Run step by step on argument buffers, which stay as they are: for each step its ``name`` and its ``ms``.

        The steps are those of ``schedule``; of a program without one, its equations.
        """


class Backend(Protocol):
    """A place where arrays live and programs run."""

    name: str

    def devices(self) -> Sequence[Device]:
        """The devices of this backend that this process may use."""

    def from_host(self, x: np.ndarray, device: Device) -> Buffer:
        """A buffer with a copy of ``x``, which the caller may change afterwards."""

    def to_host(self, buffer: Buffer) -> np.ndarray:
        """The values as a read-only NumPy array, when they are ready. May share memory."""

    def block_until_ready(self, buffer: Buffer) -> None:
        """Wait until the buffer's value has been computed."""

    def run(
        self, prim: Any, buffers: Sequence[Buffer], params: dict, outs: Sequence[ShapedArray]
    ) -> Sequence[Buffer]:
        """Evaluate one primitive eagerly."""

    def compile(self, jaxpr: Any, donated: Sequence[bool], budget: int | None = None) -> Executable:
        """Compile a jaxpr without constants; ``donated`` inputs may be overwritten.

        ``budget`` is how many bytes its planned peak may be, on each device; None: as it comes.
        """

    def chosen(self, jaxpr: Any) -> Any:
        """The jaxpr with the variants that this backend prefers (``core/programs/alternatives.py``)."""

    def claim(self, buffers: list[Buffer], donated: Sequence[bool]) -> None:
        """Put a copy in the place of each donated buffer whose storage anybody sees besides one array and ``buffers``.

        Args:
          buffers: those of all arguments of a call: what is donated may be passed a second time.
        """


@dataclass(frozen=True)
class Device:
    """Where an array lies and programs run: ``cpu:0``, ``cuda:1``.

    Several devices that hold their arrays together are one ``Device`` too, of a class of their own.

    Attributes:
      platform: ``cpu`` or ``cuda``.
      index: its number in its process.
      process: the process that has it, if that is another one of the job than this.
      joint: whether it is several devices together.
    """

    platform: str
    index: int
    backend: Backend = field(compare=False, repr=False)
    process: int | None = None
    joint: ClassVar[bool] = False

    @property
    def process_index(self) -> int:
        """The process that has it."""
        return process_info.current().index if self.process is None else self.process

    @property
    def id(self) -> int:
        """Its number among the devices of all processes, which have one each; in a job of one, ``index``."""
        return self.process_index if process_info.current().count > 1 else self.index

    @property
    def members(self) -> tuple[Device, ...]:
        """The single devices that it consists of."""
        return (self,)

    @property
    def own(self) -> Device:
        """The first of these that is of this process."""
        return self

    def layouts(self, values: Sequence[Any]) -> tuple:
        """How each of these arguments lies on it, as far as programs depend on that: on one device in one way only."""
        return ()

    def local(
        self, jaxpr: Any, donated: Sequence[bool], layouts: tuple
    ) -> tuple[Any, Sequence[bool], Device]:
        """What one of its members runs, for arguments that lie like this: the jaxpr, what is donated, the member."""
        return jaxpr, donated, self

    def local_program(self, program: Any, layouts: tuple) -> Any:
        """The same of a compiled program."""
        return program

    def whole(self, buffer: Buffer) -> np.ndarray:
        """The values of a buffer, for those who look at results. Of one that other processes have parts of they fetch
        these: all processes call it together.
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
    """Make a backend known; ``factory`` is called when it is first used."""
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
    """The devices of a platform that the processes of the job have, in their order; of several processes one each.

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
    """Of the devices that this process sees, its own: those of a host may see all GPUs, or only one each."""
    return devices[process_info.current().local_index % len(devices)]


def _of_process(process: int, platform: str) -> Device:
    """The device of another process, whose number there is not known here and does not matter."""
    return Device(platform, 0, _Elsewhere(platform, process), process)  # type: ignore[arg-type]


class _Elsewhere:
    """Stands where a device of another process has its backend: nothing can be done there from here."""

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
    """Make ``us`` what this process is."""
    process_info.join(us)
    _default.clear()


def default_device() -> Device:
    """Where arrays are made when nothing says otherwise: ``config.default_device``, or the first of the CPU.

    Raises:
      UnsupportedError: it is of a platform that cannot be used here.
      ValueRangeError: there is no such device.
    """
    name = config.default_device
    found = _default.get(name)
    if found is None:
        found = _default[name] = device_named(name) if name else get().devices()[0]
    return found


def device_named(name: str) -> Device:
    """The device called ``name``: ``cuda:1``; of a platform alone, its first, or the own one among processes."""
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
    """Where numbers are kept until an operation takes them to its own device: the CPU."""
    if not _host:
        _host.append(get("cpu").devices()[0])
    return _host[0]
