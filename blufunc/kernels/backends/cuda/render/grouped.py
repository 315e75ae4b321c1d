"""Grouped kernels: kernels of one structure as a single CUDA function.

Kernels, stage 6. In: a ``ScheduledKernel`` of kind "group", such as an optimizer's update of all parameters. Out: the
source of its function. The kernels are segments of one grid. A block finds its segment by the first block of each. It
reads its addresses from a table, the only parameter: a structure passed by value with the address of each buffer,
kernel after kernel.
"""

from __future__ import annotations

from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.codegen import scalar_ops


class GroupRenderer(CudaWriter):
    """Renderer of groups of kernels."""

    def render(self) -> str:
        entry, vectors = self.scheduled.entry, self.scheduled.segment_vectors
        n, first = len(vectors), ", ".join(map(str, self.scheduled.segment_starts[:-1]))
        tables = [
            f"struct {entry}_table {{ void *arrays[{n}][{len(self.kernel.buffers)}]; }};",
            f"__constant__ unsigned {entry}_first[{n}] = {{{first}}};",
            f"__constant__ unsigned {entry}_vectors[{n}] = {{{', '.join(map(str, vectors))}}};",
        ]
        return "\n".join([*tables, super().render()])

    def signature(self) -> str:
        return self.head(f"const __grid_constant__ {self.scheduled.entry}_table table")

    def parameters(self) -> None:
        super().parameters()
        entry, n = self.scheduled.entry, len(self.scheduled.segments)
        self.line("unsigned segment = 0;  // the last one that begins at or before this block")
        steps = 1 << max(0, (n - 1).bit_length() - 1)
        if n > 1:
            found = f"segment + step < {n} && {entry}_first[segment + step] <= blockIdx.x"
            self.line("#pragma unroll")
            self.line(f"for (unsigned step = {steps}; step > 0; step /= 2) if ({found}) segment += step;")
        block, vectors = f"blockIdx.x - {entry}_first[segment]", f"{entry}_vectors[segment]"
        self.line(f"const unsigned block = {block}, vectors = {vectors};")
        for i, b in enumerate(self.kernel.buffers):
            kind = f"{'' if b.written else 'const '}{scalar_ops.storage_type(b.dtype)} *"
            self.line(f"{kind}{self.named[b]} = ({kind})table.arrays[segment][{i}];")

    def grid(self) -> None:
        (points,) = self.kernel.grid
        cut, point = self.cuts[points], self.fresh("point")
        self.line(f"const unsigned {point} = block * {self.mapping.block} + threadIdx.x;")
        with self.block([f"if ({point} < vectors)"], [cut.vector]):
            self.line(f"const {self.index_type} {self.variable(cut.vector)} = {point};")
            self.vector(cut, self.kernel.body)
