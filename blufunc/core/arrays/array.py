"""The immutable array type and its construction from Python and NumPy values.

Core, at both ends of a program's path: arguments enter through ``lift``, results leave as ``Array``. An array
is a backend's buffer with its type and device. ``blufunc.numpy`` installs operators, methods and ``.at``; it
is the only place where user values are promoted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.arrays import backend
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.trace import Array, state

with _lazy.modules(globals()):
    from blufunc.core.arrays import interop

shards: Any = None
"""The module that knows how arrays are sharded; ``blufunc/__init__.py`` sets it."""

notebooks: Any = None
"""The module that shows arrays in notebooks; ``blufunc/__init__.py`` sets it."""

foreign: Any = None
"""Conversion of other libraries' arrays; ``blufunc/__init__.py`` sets it."""


class Donated:
    """Placeholder for donated buffers: the donating function and the user's line."""

    __slots__ = ("line", "name")

    def __init__(self, name: str, line: source.Source | None):
        self.name, self.line = name, line

    def __str__(self) -> str:
        return f"{self.name} at {source.summary(self.line)}"


class ConcreteArray(Array):
    """An array with elements, on a device."""

    __slots__ = ("__weakref__", "_buffer", "aval", "device")

    def __init__(self, buffer: backend.Buffer, aval: ShapedArray, device: backend.Device):
        self._buffer = buffer
        self.aval = aval
        self.device = device

    @property
    def buffer(self) -> backend.Buffer:
        """The backend's buffer.

        Raises:
          DonatedArrayError: the array was donated.
        """
        if self._buffer.__class__ is Donated:
            raise self._donated_error()
        return self._buffer

    def buffer_on(self, device: backend.Device) -> backend.Buffer:
        """The buffer on ``device``, copied through the host if it is elsewhere."""
        if self.device is device or self.device == device:
            return self.buffer
        return device.backend.from_host(self.device.backend.to_host(self.buffer), device, self.aval.memory)

    def _donated_error(self) -> errors.DonatedArrayError:
        return errors.DonatedArrayError(
            f"this array ({self.aval}) was donated to {self._buffer} and its memory has been reused.",
            where=source.here(),
            why="jit(donate_argnums=...) gives the argument's memory to the results, and delete() gives it back.",
            fix="use the array that the call returned, or do not donate this argument",
        )

    def devices(self) -> set[backend.Device]:
        """The devices that hold the array or a shard of it."""
        return set(self.device.members)

    def is_deleted(self) -> bool:
        """True if the array was donated."""
        return self._buffer.__class__ is Donated

    def delete(self) -> None:
        """Give the memory back, so that later uses are errors.

        Arrays of rank 0 may be shared constants, and stay.
        """
        if self.aval.ndim and self._buffer.__class__ is not Donated:
            self._buffer = Donated("delete()", source.current())

    def is_ready(self) -> bool:
        """True if the value has been computed, so that reading it does not wait."""
        return self.device.backend.is_ready(self.buffer)

    def copy_to_host_async(self) -> None:
        """Begin a copy to the host ahead of its use: a hint that changes nothing here."""

    def on_device_size_in_bytes(self) -> int:
        """The bytes that the elements take."""
        return self.aval.nbytes

    def platform(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.device.platform

    @property
    def committed(self) -> bool:
        """True if the array is sharded, or not on the default device."""
        return self.device.joint or self.device != backend.default_device()

    _committed = committed

    def unsafe_buffer_pointer(self) -> int:
        """The address of the first element, on the device that has all of them."""
        return interop.address_of(self)

    def tobytes(self, order: str = "C") -> bytes:
        """The bytes of the elements in an order, ``'C'`` or ``'F'``."""
        return np.asarray(self).tobytes(order)  # type: ignore[arg-type]

    def byteswap(self) -> ConcreteArray:
        """The array with the bytes of each element reversed."""
        return from_numpy(np.asarray(self).byteswap(), self.device)

    def block_until_ready(self) -> ConcreteArray:
        """Wait for the value to be computed, and return the array."""
        self.device.backend.block_until_ready(self.buffer)
        return self

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        x = self.device.backend.to_host(self.buffer)
        if dtype is not None and x.dtype != dtype:
            if copy is False:
                raise ValueError(f"a {self.aval} array cannot be seen as {np.dtype(dtype)} without a copy")
            return x.astype(dtype)
        return x.copy() if copy else x

    # -- other libraries: see ``interop`` ---------------------------------------------------------------

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of the array's memory, which consumers must not write to."""
        return interop.capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack type and index of the device."""
        return interop.place_of(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address and type of an array on a CUDA device."""
        return interop.cuda_array_interface(self)

    def __reduce__(self):
        return (_unpickle, (np.asarray(self), self.aval.weak_type, self.aval.memory))

    def __hash__(self) -> int:
        raise errors.ArgumentError(
            "blufunc arrays are not hashable: they compare elementwise",
            where=source.here(),
            fix="use id(x), or the value as a Python number: x.item()",
        )

    def _scalar(self, kind: str):
        if self.aval.size != 1:
            raise errors.ArgumentError(
                f"{kind} needs an array of one element, this one is {self.aval}.",
                where=source.here(),
                fix="index it first, or reduce it (x.any(), x.all(), x.sum())",
            )
        return np.asarray(self).reshape(())[()]

    def __bool__(self) -> bool:
        return bool(self._scalar("a truth value"))

    def __int__(self) -> int:
        return int(self._scalar("int()"))

    def __float__(self) -> float:
        return float(self._scalar("float()"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex()"))

    def __index__(self) -> int:
        if not dtypes.is_integer(self.aval.dtype) or self.aval.ndim:
            raise errors.ArgumentError(
                f"only integer arrays of rank 0 can be used as a Python int or index, this one is {self.aval}.",
                where=source.here(),
                fix="pass a Python int, or take one element of an integer array: int(x[0])",
            )
        return int(self._scalar("an index"))

    # -- sharding: see ``shards`` ------------------------------------------------------------------------

    @property
    def sharding(self) -> Any:
        """The sharding: a ``NamedSharding`` or a ``SingleDeviceSharding``."""
        return shards.sharding_of(self)

    @property
    def full_type(self) -> ShapedArray:
        """The type, with the sharding if the array is on a mesh with explicit axes."""
        return shards.type_of(self) if self.device.joint else self.aval

    @property
    def addressable_shards(self) -> list[Any]:
        """The shards on this process's devices, in mesh order."""
        return shards.addressable_shards(self)

    def addressable_data(self, index: int) -> ConcreteArray:
        """The shard on device ``index`` of this process."""
        return shards.addressable_shards(self)[index].data

    @property
    def global_shards(self) -> list[Any]:
        """The shards on all devices, of an array whose devices are all of this process."""
        if not self.is_fully_addressable:
            raise errors.UnsupportedError(
                "global_shards of an array on several processes.",
                where=source.here(),
                fix="x.addressable_shards has those of this process",
            )
        return self.addressable_shards

    @property
    def is_fully_replicated(self) -> bool:
        """True if each device holds the whole array."""
        return shards.sharding_of(self).is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        """True if this process owns all devices of the array."""
        return shards.sharding_of(self).is_fully_addressable

    def _repr_html_(self) -> str:
        return notebooks.html_of(self)

    def item(self):
        """The one element, as a Python scalar."""
        return self._scalar("item()").item()

    def tolist(self):
        """The elements as nested Python lists."""
        return np.asarray(self).tolist()


def arrays_of(
    buffers: Sequence[backend.Buffer], avals: Sequence[ShapedArray], device: backend.Device
) -> list[ConcreteArray]:
    """Wrap each buffer in an array: the fast path for a program's results."""
    new, out = ConcreteArray.__new__, []
    for buffer, aval in zip(buffers, avals, strict=True):
        array = new(ConcreteArray)  # inlined __init__: a third faster
        array._buffer, array.aval, array.device = buffer, aval, device
        out.append(array)
    return out


def _unpickle(x: np.ndarray, weak_type: bool, memory: str = DEVICE) -> ConcreteArray:
    return from_numpy(x, weak_type=weak_type, memory=memory)


def from_numpy(
    x: np.ndarray, device: backend.Device | None = None, weak_type: bool = False, memory: str = DEVICE
) -> ConcreteArray:
    """An array with a copy of ``x``, of exactly its dtype, in a memory of a device."""
    device = device or backend.default_device()
    aval = ShapedArray(x.shape, x.dtype, weak_type, memory)
    return ConcreteArray(device.backend.from_host(x, device, memory), aval, device)


_scalars: dict[tuple, ConcreteArray] = {}
_scalar_ids: set[int] = set()  # of the arrays in ``_scalars``, which live as long as the process
_SCALAR_LIMIT = 4096


def scalar(value: Any, dtype: np.dtype, weak_type: bool = False) -> ConcreteArray:
    """A rank-0 array, memoized: rules request the same few constants repeatedly."""
    # repr distinguishes values that == does not: 0.0 and -0.0, also as complex parts
    key = (
        repr(value) if not value or value.__class__ is complex else value,
        value.__class__,
        dtype,
        weak_type,
    )
    known = _scalars.get(key)
    if known is not None:
        return known
    if value.__class__ is int and dtypes.is_narrow(dtype):
        dtypes.check_narrow(value, dtype)
    array = from_numpy(np.asarray(value, dtype=dtype), backend.host_device(), weak_type)
    if len(_scalars) < _SCALAR_LIMIT:
        _scalars[key] = array
        _scalar_ids.add(id(array))
        return array
    return number(array)


def number(array: ConcreteArray) -> ConcreteArray:
    """Note that the function that ``make_jaxpr`` traces made this rank-0 array itself."""
    if state.numbers is not None:
        state.numbers[id(array)] = array
    return array


def is_number(array: ConcreteArray) -> bool:
    """True of a Python or NumPy number, or one that the traced function made."""
    return id(array) in _scalar_ids or (state.numbers is not None and id(array) in state.numbers)


PROTOCOLS = ("__blufunc_array__", "__jax_array__")
"""Methods of users' classes that give an array."""


def lift(x: Any, name: str | None = None) -> Array:
    """Convert ``x`` to a value: Python scalars are weak, 64-bit NumPy arrays narrowed.

    Args:
      x: an ``Array``, a tracer, a Python scalar, an array of another library, or anything NumPy sees as an array.
      name: the argument's name or path, for the message.
    Raises:
      ArgumentError: ``x`` is none of these.
      InteropError: the other library does not give the array away.
    """
    if isinstance(x, Array):
        return x
    try:
        if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
            dtype, weak = dtypes.scalar_dtype(x)
            return scalar(x, dtype, weak)
        if isinstance(x, (np.ndarray, np.generic)):
            # a scalar's home is the host, as that of a Python scalar: traces make literals of them
            if x.ndim:
                return from_numpy(dtypes.canonical_numpy(x))
            return number(from_numpy(dtypes.canonical_numpy(x), backend.host_device()))
        for protocol in PROTOCOLS:
            if hasattr(x, protocol):
                return lift(getattr(x, protocol)())
        if foreign.is_foreign(x):
            return foreign.lifted(x, name)
        if hasattr(x, "__array__"):
            return from_numpy(dtypes.canonical_numpy(np.asarray(x)))
    except (errors.DtypeError, errors.ValueRangeError) as e:
        raise source.located(e) from None
    what = f"{name or 'a value'} is a {type(x).__name__}"
    text = repr(x)
    raise errors.ArgumentError(
        f"{what}, which is not an array: {text if len(text) < 60 else text[:57] + '...'}",
        where=source.here(),
        fix="decorate the class with tree.register_dataclass: its fields are then arguments"
        if dataclasses.is_dataclass(x)
        else "pass a NumPy array, a blufunc array or a Python number; mark other arguments static "
        "(jit(f, static_argnums=...)), or close over them",
    )
