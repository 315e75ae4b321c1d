"""Arrays taken from other libraries: DLPack, then ``__cuda_array_interface__``.

Core, ahead of stage 1, where user values become operands. In: a PyTorch tensor, a CuPy array, or any object of these
protocols. Out: an ``Array`` on the device of the values, whose memory it shares where the layout allows. The owner must
not write to shared memory while the array lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend, dlpack
from blufunc.core.arrays.array import PROTOCOLS, ConcreteArray, from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.trace import EVAL, Array, set_trace
from blufunc.core.ops.elementwise import convert
from blufunc.core.ops.reduce import reduce_max, reduce_min


def is_foreign(x: Any) -> bool:
    """True if ``x`` speaks a protocol, and is no array of NumPy or blufunc."""
    speaks = _speaks(x.__class__)
    return speaks is True or (speaks is None and hasattr(x, "__cuda_array_interface__"))


@functools.lru_cache(1024)
def _speaks(cls: type) -> bool | None:
    """True if instances of a class are foreign, None if those on a GPU are."""
    if issubclass(cls, (Array, np.ndarray, np.generic)) or any(hasattr(cls, name) for name in PROTOCOLS):
        return False
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return True
    return None if hasattr(cls, "__cuda_array_interface__") else False


def lifted(x: Any, name: str | None = None) -> ConcreteArray:
    """``x`` as an operand: 64-bit becomes 32-bit, and values on the CPU are copied."""
    values = taken(x, name)
    return (
        narrowed(values) if isinstance(values, ConcreteArray) else from_numpy(dtypes.canonical_numpy(values))
    )


def home_of(x: Any) -> backend.Device | None:
    """The GPU that ``x`` is on, or None."""
    place = _place_of(x, None)
    return None if place[0] in (dlpack.CPU, dlpack.CUDA_HOST) else _device_of(place, x, None)


def taken(x: Any, name: str | None = None) -> ConcreteArray | np.ndarray:
    """``x`` in its own dtype: an array if on a GPU, else a read-only NumPy view."""
    _check_given(x, name)
    if _place_of(x, name)[0] in (dlpack.CPU, dlpack.CUDA_HOST):
        return _memory_of(x, None, name).on_host()
    return imported(x, name)


def imported(
    x: Any, name: str | None = None, device: backend.Device | None = None, copy: bool | None = None
) -> ConcreteArray:
    """``x`` in its own dtype, on its own device or ``device``.

    Args:
      name: the argument's name or path, for the message.
      copy: True for memory of its own; False refuses to copy, None copies where the layout is not dense row-major.
    Raises:
      InteropError: its owner does not give it away, its device does not exist here, or it would have to be copied.
    """
    _check_given(x, name)
    own = _device_of(_place_of(x, name), x, name)
    memory = _memory_of(x, own, name)
    moves = device is not None and device != own
    if copy is False and (moves or not memory.is_dense):
        raise errors.InteropError(
            f"{_called(x, name)} cannot be shared: copy=False.",
            where=source.here(),
            why=f"it is on {own}."
            if moves
            else "arrays are row-major, without gaps, and its strides are others.",
            fix="leave copy out",
        )
    aval = ShapedArray(memory.shape, memory.dtype)
    array = ConcreteArray(own.lender.borrow(memory, own, bool(copy) or not memory.is_dense), aval, own)
    if copy:
        array.block_until_ready()  # from now on, the owner may write
    return array if not moves else from_numpy(np.asarray(array), device)


def narrowed(x: ConcreteArray) -> ConcreteArray:
    """``x`` with 32-bit elements instead of 64-bit ones; integers must fit."""
    dtype = x.aval.dtype
    target = dtypes.implicit(dtype)
    if target == dtype:
        return x
    with set_trace(EVAL):
        if dtypes.is_integer(dtype) and x.aval.size:
            axes = tuple(range(x.aval.ndim))
            ends = [int(reduce(x, axes)) for reduce in (reduce_min, reduce_max)]
            limits = np.iinfo(target)
            for end in ends:
                if not limits.min <= end <= limits.max:
                    raise errors.ValueRangeError(
                        f"a {dtype} array of another library holds {end}, which does not fit in {target}.",
                        where=source.here(),
                        why="arrays given without an explicit dtype become 32-bit",
                        fix=f"asarray(x, dtype='{dtype}'), or from_dlpack(x)",
                    )
        return convert(x, target)


# -- the owner ---------------------------------------------------------------------------------------------


def _called(x: Any, name: str | None) -> str:
    """Subject of a message."""
    kind = f"a {type(x).__module__.partition('.')[0]}.{type(x).__name__}"
    return f"{name}, {kind}," if name else kind


def _says(name: str) -> Callable[[Any], bool]:
    def true(x: Any) -> bool:
        method = getattr(x, name, None)
        return callable(method) and method() is True

    return true


_OBSTACLES: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        lambda x: getattr(x, "requires_grad", False) is True,
        "requires a gradient, which would be lost",
        "x.detach()",
    ),
    (_says("is_conj"), "is a view of conjugate values", "x.resolve_conj()"),
    (_says("is_neg"), "is a view of negated values", "x.resolve_neg()"),
    (lambda x: getattr(x, "is_sparse", False) is True, "is sparse", "x.to_dense()"),
    (lambda x: getattr(x, "is_quantized", False) is True, "is quantized", "x.dequantize()"),
)
"""States of tensors whose memory does not hold all that they stand for."""


def _check_given(x: Any, name: str | None) -> None:
    for holds, what, fix in _OBSTACLES:
        if holds(x):
            raise errors.InteropError(f"{_called(x, name)} {what}.", where=source.here(), fix=f"pass {fix}")


def _place_of(x: Any, name: str | None) -> tuple[int, int]:
    """DLPack type and index of the device of ``x``."""
    if not hasattr(x, "__dlpack__"):
        cuda: Any = backend.get("cuda")
        address = x.__cuda_array_interface__["data"][0]
        return dlpack.CUDA, cuda.device_of_address(address) if address else 0
    try:
        kind, index = x.__dlpack_device__()
    except (BufferError, RuntimeError, ValueError, TypeError, NotImplementedError) as e:
        raise _refused(x, name, e) from None
    return int(kind), int(index)


def _device_of(place: tuple[int, int], x: Any, name: str | None) -> backend.Device:
    kind, index = place
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        return backend.host_device()
    where = f"{dlpack.DEVICE_NAMES.get(kind, f'a device of DLPack type {kind}')}, number {index}"
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise errors.InteropError(
            f"{_called(x, name)} is on {where}.",
            where=source.here(),
            why="blufunc has CPUs and CUDA devices.",
            fix="copy it to the CPU first: x.cpu(), or np.asarray(x)",
        )
    try:
        devices = backend.get("cuda").devices()
    except errors.UnsupportedError as e:
        raise errors.InteropError(
            f"{_called(x, name)} is on {where}, and blufunc cannot use CUDA here.",
            where=source.here(),
            why=e.why,
            fix="copy it to the CPU first: x.cpu()",
        ) from None
    if index >= len(devices):
        raise errors.InteropError(
            f"{_called(x, name)} is on {where}, which is none of {', '.join(map(str, devices))}.",
            where=source.here(),
            fix="move it to one of these, or to the CPU",
        )
    return devices[index]


def _memory_of(x: Any, own: backend.Device | None, name: str | None) -> dlpack.Memory:
    """The memory of ``x``, once it is safe to read on the stream of ``own``."""
    if not hasattr(x, "__dlpack__"):
        return _described(x, own, name)
    try:
        if own is None:
            capsule = _capsule(x)
        else:
            with own.lender.reading(own) as stream:
                capsule = _capsule(x, **({} if stream is None else {"stream": stream}))
    except (BufferError, RuntimeError, ValueError, TypeError, NotImplementedError) as e:
        raise _refused(x, name, e) from None
    memory = dlpack.unpack(capsule, _called(x, None).removeprefix("a "))
    if memory.strides and max(map(abs, memory.strides)) >> 47 and hasattr(x, "__cuda_array_interface__"):
        return _described(x, own, name)  # CuPy 14 divides negative strides as if they were unsigned
    return memory


def _capsule(x: Any, **options: Any) -> Any:
    try:
        return x.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # producers of earlier versions know no max_version
        return x.__dlpack__(**options)


def _described(x: Any, own: Any, name: str | None) -> dlpack.Memory:
    """The memory of an object that has only ``__cuda_array_interface__``."""
    given = x.__cuda_array_interface__
    if given.get("mask") is not None:
        raise errors.InteropError(
            f"{_called(x, name)} has a mask.", where=source.here(), fix="fill the masked elements first"
        )
    try:
        dtype = dtypes.as_dtype(np.dtype(given["typestr"]))
    except errors.DtypeError as e:
        raise errors.DtypeError(f"{_called(x, name)}: {e.what}", where=source.here(), fix=e.fix) from None
    if given.get("stream") is not None:
        own.backend.wait_for(given["stream"], own)
    place = own.lender.dlpack_device(own)
    strides = None if given.get("strides") is None else tuple(given["strides"])
    keeps = [x]
    return dlpack.Memory(given["data"][0] or 0, tuple(given["shape"]), strides, dtype, place, keeps.clear)


def _refused(x: Any, name: str | None, e: Exception) -> errors.InteropError:
    said = str(e).splitlines()[0] if str(e) else type(e).__name__
    return errors.InteropError(
        f"{_called(x, name)} is not given away by its library: {said}",
        where=source.here(),
        fix="copy it to a NumPy array first",
    )
