"""CudaWriter: memory accesses of every CUDA kernel, vectorized where possible.

Kernels, stage 6, below the renderers of each kind, which write the grid. In: a ``ScheduledKernel``. Out: lines of
CUDA. The elements of a vector are an unrolled loop; wide loads precede it, wide stores follow it. Inputs go through
the read-only cache unless an output may alias them, or the kernel begins ahead. ``async_copies.py``, ``reductions.py``
and ``lane_scans.py`` are functions of a writer that add lines to its kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.device_model import ACCESS_BYTES
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel, Vectors
from blufunc.kernels.backends.cuda.schedule.vectorize import is_contiguous, with_fast_exp
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import CStyle, Scope, written_in
from blufunc.kernels.codegen.scalar_ops import bare
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.loopir.index import Index, Range, of
from blufunc.kernels.loopir.ir import Buffer, Store, Total, Value, computed_in

_LDG = frozenset(
    dtypes.as_dtype(d) for d in ("int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split())
)
"""Dtypes whose C types CUDA's own loads accept."""

_NAMES = frozenset(
    (
        "threadIdx blockIdx blockDim gridDim warpSize thread group finished shared_memory uint2 uint4 min max "
        "table segment block vectors step met"
    ).split()
)
"""Identifiers reserved in kernels, besides those of the prelude."""


class CudaWriter(CStyle):
    """Writer of one scheduled kernel; subclasses write the grid of their kind.

    Attributes:
      scheduled, mapping, cuts: the decisions.
      threads, thread: threads of a group, and the expression of a thread's index in its group.
      step: expression of the index of a thread's current vector.
      finishing: True while the finish is written.
      in_rows, repeated: True if loops over lanes are in a loop over rows; if one reduction repeats without another.
      cluster_reductions: number of reductions across the blocks of a cluster so far.
      own_means: for each spread, the variable of the mean of a thread's values.
      pieces: barriers for the pieces of a bulk-staged row.
    """

    def __init__(self, scheduled: ScheduledKernel):
        super().__init__(scheduled.kernel)
        self.scheduled, self.mapping, self.cuts = scheduled, scheduled.mapping, scheduled.cuts
        self.threads, self.thread, self.step = self.mapping.threads, "thread", ""
        self.finishing = self.in_rows = self.repeated = False
        self.cluster_reductions, self.own_means, self.pieces = 0, dict[Total, str](), ""
        self.inner: Vectors | None = None  # vectors of the current loop
        self.element_scope: Scope | None = None
        self.wide_loads: dict[Any, str] = {}  # loads of the current vector
        self.after: list[str] = []  # stores of the current vector
        self.readers = dict.fromkeys(scheduled.copies, "vec_load")  # of stand-ins for buffers
        for copy in scheduled.copies:
            self.name(copy, copy.name)
        for buffer, last in scheduled.last_reads.items():
            self.named[last], self.readers[last] = self.named[buffer], "vec_ldcs"

    def fresh(self, wish: str) -> str:
        """An unused identifier, also distinct from CUDA's."""
        return super().fresh(f"{wish}_" if wish in _NAMES or wish in DEVICE.names else wish)

    def signature(self) -> str:
        pointers = [
            f"{'' if b.written else 'const '}{scalar_ops.storage_type(b.dtype)} *{self.named[b]}"
            for b in self.kernel.buffers
        ]
        if self.kernel.finish:
            pointers.append("unsigned *finished")
        return self.head(", ".join(pointers))

    def parameters(self) -> None:
        """Let the next kernel begin, if it waits for the end of this one by itself."""
        self.line("let_next_kernel_begin();")
        if self.scheduled.waits:
            self.line("wait_for_previous_kernel();")

    def head(self, parameters: str) -> str:
        """Head of the function."""
        mapping = self.mapping
        bounds = f"__launch_bounds__({mapping.block}{f', {mapping.resident}' if mapping.resident else ''})"
        if mapping.cluster > 1:
            bounds = f"__cluster_dims__({mapping.cluster}, 1, 1) {bounds}"
        return f'extern "C" __global__ void {bounds} {self.scheduled.entry}({parameters})'

    def vector(self, cut: Vectors | None, statements: Sequence[Any]) -> None:
        """Write statements for the elements of one vector at a known index."""
        self.inner, outside = cut, self.inner
        if cut is None or cut.element is None:
            self.body(statements)
        else:
            e = self.variable(cut.element)
            loop = f"for (int {e} = 0; {e} < {cut.width}; ++{e})"
            with self.block(["#pragma unroll", loop], [cut.element], written_in(statements)):
                self.element_scope = self.scope
                self.body(statements)
            self.element_scope = None
            self.scope.lines += self.after
            self.after.clear()
            self.wide_loads.clear()
        self.inner = outside

    # -- memory ----------------------------------------------------------------------------------

    def expression(self, v: Value) -> str:
        if v.op == "load" and self.scope is self.element_scope and self.inner is not None:
            buffer, index = v.attr
            element = self.inner.element
            if element and is_contiguous(index, element) and not any(element in a.ranges() for a in v.args):
                guard = self.found(v.args[0]) if v.args else None
                vector = self._wide_load(buffer, index - of(element), guard)
                return scalar_ops.loaded(f"{vector}.x[{self.variable(element)}]", buffer.dtype)
        return with_fast_exp(super().expression(v), v, self.scheduled.fast_exps)

    def _wide_load(self, buffer: Buffer, index: Index, guard: str | None) -> str:
        """Name of a vector, loaded before the loop over its elements."""
        assert self.inner is not None
        key = (buffer, index, guard)
        if key not in self.wide_loads:
            inner, self.scopes = self.scopes, self.scopes[:-1]
            kind, width = scalar_ops.storage_type(buffer.dtype), self.inner.width
            name = self.wide_loads[key] = self.fresh(f"{self.named[buffer]}_vec")
            reader, held = self._reader(buffer), buffer in self.scheduled.held
            if reader == "vec_ldg" and held and width * buffer.dtype.itemsize % ACCESS_BYTES == 0:
                reader = "vec_ldg_held"
            text = f"{reader}<{kind}, {width}>({plus(self.named[buffer], self.index(index))})"
            if guard is not None:
                text = f"{guard} ? {text} : vec<{kind}, {width}>{{}}"
            self.line(f"const vec<{kind}, {width}> {name} = {text};")
            self.scopes = inner
        return self.wide_loads[key]

    def _reader(self, buffer: Buffer) -> str:
        """Function that loads vectors of a buffer."""
        if buffer in self.readers:
            return self.readers[buffer]
        if buffer.written:
            return "vec_ldcg" if self.finishing else "vec_load"
        aliased = self.scheduled.waits or buffer.name in self.scheduled.aliased
        return "vec_load" if aliased else "vec_ldg"

    def load(self, buffer: Buffer, index: str) -> str:
        name, reader = self.named[buffer], self._reader(buffer)
        if reader == "vec_load":
            text = f"{name}[{index}]"
        elif buffer.dtype in _LDG:
            text = f"__{reader[4:]}(&{name}[{index}])"
        else:
            text = f"{reader}<{scalar_ops.storage_type(buffer.dtype)}, 1>({plus(name, index)}).x[0]"
        return scalar_ops.loaded(text, buffer.dtype)

    def _store(self, s: Store) -> str:
        element = self.inner.element if self.inner is not None else None
        if element and self.element_scope is not None and is_contiguous(s.index, element):
            together = s.guard is None or element not in s.guard.ranges()
            if together:
                return self._wide_store(s, element)
        text = super()._store(s)
        if self.inner is None and self.threads > 1:
            return f"if ({self.thread} == 0) {{ {text} }}"
        return text

    def _wide_store(self, s: Store, element: Range) -> str:
        """Store of an element to a vector, which is stored after the loop."""
        self.need([s.value])
        value = bare(self.value(s.value))
        kind, width = scalar_ops.storage_type(s.buffer.dtype), element.extent
        inner, self.scopes = self.scopes, self.scopes[:-1]
        self.need([*computed_in(s.index), *([] if s.guard is None else [s.guard])])
        name = self.fresh(f"{self.named[s.buffer]}_vec")
        self.line(f"vec<{kind}, {width}> {name};")
        place = plus(self.named[s.buffer], self.index(s.index - of(element)))
        guard = f"if ({bare(self.value(s.guard))}) " if s.guard is not None else ""
        writer = "vec_stcs" if s.buffer in self.scheduled.streamed else "vec_store"
        self.after.append(f"{guard}{writer}<{kind}, {width}>({place}, {name});")
        self.scopes = inner
        return f"{name}.x[{self.variable(element)}] = {scalar_ops.stored(value, s.buffer.dtype)};"

    def shared_pointer(self, name: str, kind: str, offset: int, group: str = "") -> None:
        """Declare a pointer to dynamic shared memory."""
        self.line(f"{kind} *{name} = ({kind} *)(shared_memory + {offset}){group};")


def plus(name: str, index: str) -> str:
    """Address of an element of a buffer."""
    return name if index == "0" else f"{name} + {index}" if "?" not in index else f"{name} + ({index})"
