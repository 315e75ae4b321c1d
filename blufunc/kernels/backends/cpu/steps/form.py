"""The native form of an equation, and the libraries that forms are functions of.

Kernels, stages 6 and 8 on the CPU. In: C++ sources. Out: compiled libraries, and the addresses of their functions:

    void f(const int64_t *parameters, char *const *operands, char *const *results, char *scratch, int threads)

The parameters begin with the batch: its positions, chunks for threads, bytes of scratch of a chunk, rank and shape
(``include/batches.h``). Results are in row-major order; operands have strides.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blufunc.kernels.backends.cpu.renderer import SCRATCH
from blufunc.kernels.backends.cpu.steps import lapack
from blufunc.kernels.backends.cpu.toolchain import Compiler
from blufunc.kernels.codegen import source_files

BATCHES = "backends/cpu/include/batches.h"

_OPTIONS = ("-ffp-contract=fast",)
"""Contract multiply and add into FMA, as any LAPACK does."""

_WORTH_SHARING = 100_000
"""Minimum estimated nanoseconds that justify waking other threads."""

_CHUNKS = 16
"""Maximum number of parts of a batch."""


class Library(NamedTuple):
    """A function in C++ that is compiled once for a machine.

    Attributes:
      file: path of its source.
      parts: parts of the file.
      function: name of the function.
      constants: macros and constants of the source.
      routines: names of the routines that it calls by pointers.
      resolve: from the name of a routine to its address.
      before: files that its source uses, each with the names of parts.
      options: more options of the compiler.
    """

    file: str
    parts: tuple[str, ...]
    function: str
    constants: tuple[tuple[str, source_files.Constant], ...] = ()
    routines: tuple[str, ...] = ()
    resolve: Callable[[str], int] = lapack.address
    before: tuple[tuple[str, tuple[str, ...]], ...] = ()
    options: tuple[str, ...] = ()

    def source(self) -> str:
        """Complete C++ source."""
        head = source_files.source(BATCHES) + source_files.source(SCRATCH)
        head += "".join(source_files.source(file, *parts) for file, parts in self.before)
        return head + source_files.source(self.file, *self.parts, **dict(self.constants))

    def address(self, compiler: Compiler) -> int:
        """Address of the function; compiles the library if necessary."""
        options = (*_OPTIONS, *self.options)
        loaded = compiler.compile(self.source(), f"{self.function} for the CPU", options, [self.function])
        if self.routines:
            table = (ctypes.c_void_p * len(self.routines)).in_dll(loaded, "routines")
            table[:] = [self.resolve(name) for name in self.routines]
        found = ctypes.cast(getattr(loaded, self.function), ctypes.c_void_p).value
        assert found is not None
        return found


class Form(NamedTuple):
    """The native form of an equation.

    Attributes:
      library: name of the library, in ``LIBRARIES``.
      batch: shape of the batch.
      sizes: parameters after the batch.
      strides: from arrays with the strides of all operands to the last parameters.
      nanoseconds: estimated time.
      scratch: bytes for each chunk.
      shared: whether threads may share the batch.
      common: bytes of scratch that all chunks use together.
    """

    library: str
    batch: tuple[int, ...]
    sizes: Sequence[int]
    strides: Callable[[Sequence[np.ndarray]], Sequence[int]]
    nanoseconds: float
    scratch: int = 0
    shared: bool = True
    common: int = 0

    @property
    def chunks(self) -> int:
        """Number of parts of the batch that threads may run at once."""
        count = math.prod(self.batch)
        return min(_CHUNKS, count) if self.shared and self.nanoseconds > _WORTH_SHARING else 1

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory of all chunks."""
        return self.chunks * self.scratch + self.common

    def parameters(self, operands: Sequence[np.ndarray]) -> list[int]:
        """Parameters for operands with the strides of these arrays."""
        head = [math.prod(self.batch), self.chunks, self.scratch, len(self.batch), *self.batch]
        return [*head, *self.sizes, *self.strides(operands)]


def bytes_of(*parts: tuple[int, int]) -> int:
    """Bytes of arrays of a count and an item size, each aligned to 64."""
    return sum(-(-count * size // 64) * 64 for count, size in parts)
