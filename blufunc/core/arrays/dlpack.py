"""DLPack: capsules that pass arrays between libraries, written and read.

Core, at both ends of a program's path. In: an address with its type and device, or another library's capsule. Out: a
capsule, or a ``Memory``. NumPy allocates the capsules, on whatever device: it never reads the address, and its
destructors are C, safe on any thread and at exit. What it has no name for (bfloat16, fp8, other devices, read-only
memory) is written into its structure.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, ClassVar

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Types of devices."""

DEVICE_NAMES = {CPU: "cpu", CUDA: "cuda", CUDA_HOST: "pinned CPU memory", 4: "OpenCL", 7: "Vulkan", 8: "Metal",
    10: "ROCm", CUDA_MANAGED: "managed CUDA memory", 14: "oneAPI", 15: "WebGPU"}  # fmt: skip

READ_ONLY, COPIED = 1, 2
"""Flags of versioned capsules."""

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # by NumPy's kinds
_CODES_OF: dict[np.dtype, int] = {
    dtypes.bfloat16: 4, dtypes.float8_e3m4: 7, dtypes.float8_e4m3: 8, dtypes.float8_e4m3b11fnuz: 9,
    dtypes.float8_e4m3fn: 10, dtypes.float8_e4m3fnuz: 11, dtypes.float8_e5m2: 12, dtypes.float8_e5m2fnuz: 13,
    dtypes.float8_e8m0fnu: 14,
}  # fmt: skip
"""The codes of other dtypes; those of 2 and 4 bits are packed in DLPack."""
_CODE_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 7: "float8_e3m4",
    8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2",
    13: "float8_e5m2fnuz", 14: "float8_e8m0fnu", 17: "float4_e2m1fn"}  # fmt: skip


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """``DLManagedTensor``, as of versions before 1."""

    _fields_: ClassVar = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_: ClassVar = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_KINDS: dict[bytes, type[_Managed] | type[_Versioned]] = {
    b"dltensor_versioned": _Versioned,
    b"dltensor": _Managed,
}
_USED = {name: ctypes.create_string_buffer(b"used_" + name) for name in _KINDS}  # capsules keep the address

_DELETER = ctypes.PYFUNCTYPE(
    None, ctypes.c_void_p
)  # with the GIL, which producers written in C++ may rely on


@functools.cache
def _capsule_api() -> tuple[Any, Any, Any]:
    """``PyCapsule_IsValid``, ``PyCapsule_GetPointer`` and ``PyCapsule_SetName``."""
    api, capsule, name = ctypes.pythonapi, ctypes.py_object, ctypes.c_char_p
    valid, pointer, rename = api.PyCapsule_IsValid, api.PyCapsule_GetPointer, api.PyCapsule_SetName
    valid.argtypes, valid.restype = [capsule, name], ctypes.c_int
    pointer.argtypes, pointer.restype = [capsule, name], ctypes.c_void_p
    rename.argtypes, rename.restype = [capsule, ctypes.c_void_p], ctypes.c_int
    return valid, pointer, rename


# -- writing -----------------------------------------------------------------------------------------------


def _raw(dtype: np.dtype) -> np.dtype:
    """A dtype of the same size that NumPy passes on: unsigned integers."""
    return np.dtype(np.complex128 if dtype.itemsize == 16 else f"u{dtype.itemsize}")


class _Lent:
    """Memory as NumPy sees it; the array that is made of it keeps ``owner`` alive."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: Any, dtype: np.dtype, owner: Any):
        self.owner = owner
        self.__array_interface__ = {
            "shape": shape,
            "typestr": _raw(dtype).str,
            "data": (address, False),
            "strides": strides,
            "version": 3,
        }


def pack(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: tuple[int, int],
    owner: Any,
    versioned: bool,
    flags: int = 0,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """A capsule of an array.

    Args:
      address: of the first element, on ``device``, a type and an index.
      owner: object that keeps the memory alive; the consumer's last reference drops it.
      versioned: True for a structure of version 1, which has ``flags``.
      strides: in bytes; None if the array is dense and row-major.
    """
    full = math.prod(shape) > 0
    x = np.asarray(_Lent(address, shape, strides, dtype, owner)) if full else np.empty(shape, _raw(dtype))
    capsule = x.__dlpack__(max_version=(1, 0)) if versioned else x.__dlpack__()
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = _KINDS[name].from_address(_capsule_api()[1](capsule, name))
    tensor = managed.tensor
    tensor.device_type, tensor.device_id = device
    tensor.code, tensor.bits = _code(dtype), 8 * dtype.itemsize
    if versioned:
        managed.flags = flags
    if not full:
        tensor.data = None
    return capsule


def _code(dtype: np.dtype) -> int:
    return _CODES_OF[dtype] if dtype in _CODES_OF else _CODES[dtype.kind]


def has_name(dtype: np.dtype) -> bool:
    """True if capsules can hold elements of ``dtype``."""
    return dtype in _CODES_OF or dtype.kind in _CODES


# -- reading -----------------------------------------------------------------------------------------------

_DTYPES = {(_code(d), 8 * d.itemsize): d for d in dtypes.ALL if has_name(d)}


class Memory:
    """An array in memory of another library, which stays valid until ``release``.

    Attributes:
      address: of its first element.
      shape, dtype: as in NumPy.
      strides: in bytes; None if it is dense and row-major.
      device: type and index.
    """

    __slots__ = ("_release", "address", "device", "dtype", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype,
        device: tuple[int, int],
        release: Any,
    ):
        self.address, self.shape, self.dtype, self.device = address, shape, dtype, device
        self.strides = None if strides is None or _is_dense(shape, strides, dtype.itemsize) else strides
        self._release = release

    def release(self) -> None:
        """Give the memory back to its owner."""
        release, self._release = self._release, None
        if release is not None:
            release()

    __del__ = release

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """True if it is row-major without gaps, and its elements are aligned."""
        return self.strides is None and not self.address % self.dtype.itemsize

    def on_host(self) -> np.ndarray:
        """A read-only view of memory on the CPU, which keeps this object alive."""
        return (np.asarray(self) if self.nbytes else np.empty(self.shape, _raw(self.dtype))).view(self.dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The memory as unsigned integers, read-only."""
        return {
            "shape": self.shape,
            "typestr": _raw(self.dtype).str,
            "data": (self.address, True),
            "strides": self.strides,
            "version": 3,
        }


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    step = itemsize
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return not math.prod(shape)
        step *= n
    return True


def unpack(capsule: Any, what: str) -> Memory:
    """The array in a capsule, which is consumed.

    Args:
      what: name of the producer's type, for errors.
    """
    valid, pointer, rename = _capsule_api()
    name = next((n for n in _KINDS if valid(capsule, n)), None)
    if name is None:
        raise errors.ArgumentError(
            f"the DLPack capsule of a {what} was consumed before, or is none: {capsule!r:.60}.",
            where=source.here(),
            fix="pass the array itself, from_dlpack(x): it makes a capsule for each call",
        )
    at = pointer(capsule, name)
    managed = _KINDS[name].from_address(at)
    rename(capsule, ctypes.addressof(_USED[name]))
    release = functools.partial(_DELETER(managed.deleter), at) if managed.deleter else None
    if isinstance(managed, _Versioned) and managed.major > 1:
        version = f"{managed.major}.{managed.minor}"
        if release is not None:
            release()
        raise errors.UnsupportedError(
            f"a {what} speaks DLPack {version}.",
            where=source.here(),
            why="blufunc reads version 1 and what precedes it.",
            fix="pass a NumPy array: np.asarray(x)",
        )
    tensor = managed.tensor
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:  # described ahead of the release, which frees the structure
        kind = _CODE_NAMES.get(tensor.code, f"type code {tensor.code}")
        text = f"{kind} of {tensor.bits} bits" + (f" in {tensor.lanes} lanes" if tensor.lanes != 1 else "")
        if release is not None:
            release()
        raise errors.DtypeError(
            f"a {what} has elements that arrays cannot have: {text}.",
            where=source.here(),
            fix="convert it in its own library first",
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple([s * dtype.itemsize for s in tensor.strides[: tensor.ndim]]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return Memory(address, shape, strides, dtype, (tensor.device_type, tensor.device_id), release)
