"""One CUDA function for many kernels of equal structure: an optimiser's update of all parameters in one launch.

Kernels, stage 6, beside ``cuda_style.py``. The kernels become segments of one grid. A block finds its segment by the
numbers of the first blocks of all, and takes the addresses of that segment's arrays from a table that is the only
parameter: a structure passed by value, with the address of each buffer of each kernel, kernel after kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from blufunc.kernels import scalars
from blufunc.kernels.cuda_style import CudaKernel, CudaStyle
from blufunc.kernels.cuda_vectors import best_width
from blufunc.kernels.horizontal import structure
from blufunc.kernels.loopir import Kernel

_PARAMETER_BYTES = 32764
"""What a kernel's parameters may take, from compute capability 7.0 and CUDA 12.1 on."""

_BLOCK = 256
"""Threads of a block; each does one vector."""


def group_key(kernel: Kernel) -> tuple | None:
    """Kernels of equal keys may be a group; None for those that are not to be grouped."""
    return kernel.memoised("group key", lambda: _group_key(kernel))


def _group_key(kernel: Kernel) -> tuple | None:
    found = structure(kernel)
    return None if found is None else (best_width(kernel, kernel.grid[0]), found)


def group_limit(kernel: Kernel) -> int:
    """How many kernels like this one a group may have."""
    return _PARAMETER_BYTES // (8 * len(kernel.buffers))


class GroupStyle(CudaStyle):
    """Writes kernels of equal ``group_key`` as one function."""

    def __init__(self, kernels: Sequence[Kernel], name: str, aliased: Collection[str] = ()):
        largest = max(kernels, key=lambda k: k.points)
        positions = {b.name: n for n, b in enumerate(kernels[0].buffers)}
        same = [largest.buffers[positions[a]].name for a in aliased]
        notes = (f"for {len(kernels)} sets of arrays:", *largest.notes)
        super().__init__(Kernel(name, largest.buffers, largest.grid, largest.body, notes), same)
        self.segments = [k.points // self.cuts[largest.grid[0]].width for k in kernels]

    @property
    def starts(self) -> list[int]:
        """The first block of each segment, and the number of blocks."""
        blocks = [-(-n // _BLOCK) for n in self.segments]
        return [0, *itertools.accumulate(blocks)]

    def render(self) -> str:
        n, entry = len(self.segments), self.entry
        first, vectors = ", ".join(map(str, self.starts[:-1])), ", ".join(map(str, self.segments))
        tables = [
            f"struct {entry}_table {{ void *arrays[{n}][{len(self.kernel.buffers)}]; }};",
            f"__constant__ unsigned {entry}_first[{n}] = {{{first}}};",
            f"__constant__ unsigned {entry}_vectors[{n}] = {{{vectors}}};",
        ]
        return "\n".join([*tables, super().render()])

    def signature(self) -> str:
        parameter = f"const __grid_constant__ {self.entry}_table table"
        return f'extern "C" __global__ void __launch_bounds__({_BLOCK}) {self.entry}({parameter})'

    def parameters(self) -> None:
        n = len(self.segments)
        self.line("unsigned segment = 0;  // the last one that begins at or before this block")
        steps = 1 << max(0, (n - 1).bit_length() - 1)
        if n > 1:
            found = f"segment + step < {n} && {self.entry}_first[segment + step] <= blockIdx.x"
            self.line("#pragma unroll")
            self.line(f"for (unsigned step = {steps}; step > 0; step /= 2) if ({found}) segment += step;")
        self.line(
            f"const unsigned block = blockIdx.x - {self.entry}_first[segment], vectors = {self.entry}_vectors[segment];"
        )
        for i, b in enumerate(self.kernel.buffers):
            kind = f"{'' if b.written else 'const '}{scalars.storage_type(b.dtype)} *"
            self.line(f"{kind}{self.named[b]} = ({kind})table.arrays[segment][{i}];")

    def grid(self) -> None:
        (points,) = self.kernel.grid
        cut, point = self.cuts[points], self.fresh("point")
        self.line(f"const unsigned {point} = block * {_BLOCK} + threadIdx.x;")
        with self.block([f"if ({point} < vectors)"], [cut.vector]):
            self.line(f"const {self.index_type} {self.variable(cut.vector)} = {point};")
            self.vector(cut, self.kernel.body)

    def made(self, source: str) -> CudaKernel:
        return CudaKernel(
            source, self.entry, (self.starts[-1], 1, 1), (_BLOCK, 1, 1), segments=len(self.segments)
        )
