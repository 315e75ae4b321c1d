"""Tensor maps: descriptors for TMA copies of boxes to shared memory.

Kernels, stage 8, below ``backends/cuda/library/attention/launch`` and ``backends/cuda/library/tile_gemm``. In: a
``Box``, the part of a four-axis array of two-byte elements that one copy transfers, and the array's address. Out: 128
bytes of a kernel's parameter. The driver encodes them, without a device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.kernels.backends.cuda.driver import driver

BYTES = 128
_TWO_BYTES, _SWIZZLES = 1, {32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_*
_PROMOTED = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_LEAST_STRIDE = 16


class Box(NamedTuple):
    """A box and its array; the fastest axis is first.

    Rows of a box are swizzled in shared memory in units of 16 bytes, with a period of their length, 32 to 128 bytes.

    Attributes:
      sizes: sizes of the array, in elements.
      strides: strides of the axes after the first, in bytes, multiples of 16.
      box: sizes of the box, in elements.
    """

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]

    def map(self, address: int) -> bytes:
        """Encode the tensor map of an array at a device address.

        Raises:
          UnsupportedError: the driver rejects it.
        """
        # axes of size one may have any stride: views have such, and it is never used
        strides = [
            s if s or n > 1 else _LEAST_STRIDE for s, n in zip(self.strides, self.sizes[1:], strict=True)
        ]
        memory = ctypes.create_string_buffer(BYTES + 64)
        at = -(-ctypes.addressof(memory) // 64) * 64
        status = _encoder()(
            at, _TWO_BYTES, 4, address,
            (ctypes.c_uint64 * 4)(*self.sizes), (ctypes.c_uint64 * 3)(*strides),
            (ctypes.c_uint32 * 4)(*self.box), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            0, _SWIZZLES[2 * self.box[0]], _PROMOTED, 0,
        )  # fmt: skip
        if status:
            raise errors.UnsupportedError(
                f"the CUDA driver rejected a tensor map of {self} at {address:#x}.",
                why=f"cuTensorMapEncodeTiled returned {status}.",
                fix="report it: blufunc generates only maps that the driver should accept",
            )
        return ctypes.string_at(at, BYTES)


class Mapped:
    """Tensor-map parameter of a kernel, re-encoded when its operand's address changes.

    Args:
      parameter: index of the parameter.
      operand: index of the operand.
    """

    def __init__(self, parameter: int, operand: int, box: Box):
        self._parameter, self._operand, self._box = parameter, operand, box
        self._address = -1

    def set(self, arguments: driver.Arguments, pointers: Sequence[int]) -> None:
        """Update the parameter for operands at these addresses."""
        address = pointers[self._operand]
        if address != self._address:
            arguments.set(self._parameter, self._box.map(address))
            self._address = address


@functools.cache
def _encoder() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint32, *[pointer] * 5, *[number] * 4]
    function.restype = number
    return function
