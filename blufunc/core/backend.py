"""The protocol between the core and whatever computes.

Core, crossed at stage 8 (and by eager evaluation). Buffers, devices, streams and asynchrony live
behind ``Backend``: the core only moves opaque buffers from one call to the next. Implementations
are in ``kernels/`` and register themselves here; the first one registered is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.avals import ShapedArray

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

    def compile(self, jaxpr: Any, donated: Sequence[bool]) -> Executable:
        """Compile a jaxpr without constants; ``donated`` inputs may be overwritten."""

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
      joint: whether it is several devices together.
    """

    platform: str
    index: int
    backend: Backend = field(compare=False, repr=False)
    joint: ClassVar[bool] = False

    @property
    def members(self) -> tuple[Device, ...]:
        """The single devices that it consists of."""
        return (self,)

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

    def __str__(self) -> str:
        return f"{self.platform}:{self.index}"


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


_default: dict[str, Device] = {}


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
    """The device called ``name``: ``cuda:1``; of a platform alone, its first."""
    platform, _, index = name.partition(":")
    devices = get(platform).devices()
    if not (index or "0").isdecimal() or int(index or 0) >= len(devices):
        raise errors.ValueRangeError(
            f"there is no device {name!r}.", fix=f"use one of {', '.join(map(str, devices))}"
        )
    return devices[int(index or 0)]


_host: list[Device] = []


def host_device() -> Device:
    """Where numbers are kept until an operation takes them to its own device: the CPU."""
    if not _host:
        _host.append(get("cpu").devices()[0])
    return _host[0]
