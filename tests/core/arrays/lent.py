"""Producers of DLPack for tests, which record what happens to their memory."""

import numpy as np

from blufunc.core.arrays import dlpack
from blufunc.core.ir import dtypes


class Lent:
    """A tensor of another library, over the memory of a NumPy array.

    Attributes:
      streams: the consumers' streams, one for each capsule.
      alive: number of capsules, or of what was made of them, that hold the memory.
    """

    def __init__(self, values, device=(dlpack.CPU, 0), versioned=True, read_only=False, address=None):
        self.values, self.device, self.versioned, self.read_only = (
            np.asarray(values),
            device,
            versioned,
            read_only,
        )
        self.address = self.values.ctypes.data if address is None else address
        self.streams, self.holders = [], []

    @property
    def alive(self):
        return sum(holder.count for holder in self.holders)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        if options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        assert options in ({}, {"max_version": (1, 0)})
        self.streams.append(stream)
        v, holder = self.values, Holder()
        self.holders.append(holder)
        return dlpack.pack(
            self.address, v.shape, v.dtype, self.device, Held(self.values, holder), self.versioned,
            dlpack.READ_ONLY * self.read_only, v.strides,
        )  # fmt: skip


class Holder:
    count = 0


class Held:
    """Keeps memory, and counts itself while it lives."""

    def __init__(self, values, holder):
        self.values, self.holder = values, holder
        holder.count += 1

    def __del__(self):
        self.holder.count -= 1


NAMED = sorted((d for d in dtypes.ALL if dlpack.has_name(d)), key=dtypes.short_name)


def values_of(dtype, shape=(2, 3)):
    """Small values that every dtype has."""
    return (np.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype)
