"""Tensor maps: what a CUDA device wants to know of an array to copy boxes of it to shared memory by itself (TMA).

Kernels, stage 8, below ``cuda_attention``. In comes a ``Box``, what is copied at a time of an array of four axes with
elements of two bytes, and the array's address; out come the 128 bytes of a kernel's parameter. The driver makes them,
without a device.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from blufunc import errors

BYTES = 128
_TWO_BYTES, _SWIZZLES = 1, {32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_*
_PROMOTED = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class Box(NamedTuple):
    """A box, and the array that it is of. The fastest axis is first.

    Rows of a box are permuted in shared memory by 16 bytes, with the period that their length has, 32 to 128 bytes.

    Attributes:
      sizes: of the array, in elements.
      strides: of the axes behind the first, in bytes, multiples of 16.
      box: its sizes, in elements.
    """

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]

    def map(self, address: int) -> bytes:
        """The tensor map of an array at an address of the device.

        Raises:
          UnsupportedError: the driver does not take it.
        """
        memory = ctypes.create_string_buffer(BYTES + 64)
        at = -(-ctypes.addressof(memory) // 64) * 64
        status = _encoder()(
            at, _TWO_BYTES, 4, address,
            (ctypes.c_uint64 * 4)(*self.sizes), (ctypes.c_uint64 * 3)(*self.strides),
            (ctypes.c_uint32 * 4)(*self.box), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            0, _SWIZZLES[2 * self.box[0]], _PROMOTED, 0,
        )  # fmt: skip
        if status:
            raise errors.UnsupportedError(
                f"the CUDA driver makes no tensor map of {self} at {address:#x}.",
                why=f"cuTensorMapEncodeTiled returned {status}.",
                fix="report it: kernels ask for what the driver takes",
            )
        return ctypes.string_at(at, BYTES)


@functools.cache
def _encoder() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint32, *[pointer] * 5, *[number] * 4]
    function.restype = number
    return function
