"""How a CUDA kernel reads and writes memory: many bytes at a time where vectors allow it.

Kernels, stage 6, below ``cuda_style.py``, which writes the loops. The elements of a vector are a loop of their own,
which the compiler writes out. What can be one wide load is written before it, what can be one wide store after it.
Inputs go through the read-only cache, unless an output may lie in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from blufunc.core import dtypes
from blufunc.kernels import cuda_prelude, scalars
from blufunc.kernels.cstyle import CStyle, Scope, written_in
from blufunc.kernels.cuda_vectors import Vectors, is_contiguous
from blufunc.kernels.indices import Index, Range, of
from blufunc.kernels.loopir import Buffer, Kernel, Store, Value, computed_in
from blufunc.kernels.scalars import bare

_LDG = frozenset(
    dtypes.as_dtype(d) for d in ("int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split())
)
"""The dtypes whose C types CUDA's own loads take."""

_NAMES = cuda_prelude.names() | frozenset(
    (
        "threadIdx blockIdx blockDim gridDim warpSize thread group finished shared_memory uint2 uint4 min max "
        "table segment block vectors step met"
    ).split()
)
"""Names that no variable of a kernel may have."""


class WideAccess(CStyle):
    """Writes loads, stores and loops over the elements of vectors.

    Args:
      kernel: what to write.
      aliased: names of inputs that may lie where an output does.
    """

    def __init__(self, kernel: Kernel, aliased: Collection[str] = ()):
        super().__init__(kernel)
        self.aliased = frozenset(aliased)
        self.threads, self.thread = 1, "thread"  # of a group, and which of them this is
        self.finishing = False
        self.readers: dict[Buffer, str] = {}  # how to read what stands for a buffer or for a part of it
        self.streamed: frozenset[Buffer] = frozenset()  # what is written past the cache
        self.held: frozenset[Buffer] = frozenset()  # what is read and stays in the cache longest
        self.inner: Vectors | None = None  # the vectors of the loop that is being written
        self.element_scope: Scope | None = None
        self.wide_loads: dict[Any, str] = {}  # loads of the vector at hand
        self.after: list[str] = []  # stores of the vector at hand

    def fresh(self, wish: str) -> str:
        """An identifier that is not taken, by CUDA either."""
        return super().fresh(f"{wish}_" if wish in _NAMES else wish)

    def vector(self, cut: Vectors | None, statements: Sequence[Any]) -> None:
        """Statements for the elements of one vector, whose number is known."""
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
                return scalars.loaded(f"{vector}.x[{self.variable(element)}]", buffer.dtype)
        return super().expression(v)

    def _wide_load(self, buffer: Buffer, index: Index, guard: str | None) -> str:
        """The name of a vector, which is read before the loop over its elements."""
        assert self.inner is not None
        key = (buffer, index, guard)
        if key not in self.wide_loads:
            inner, self.scopes = self.scopes, self.scopes[:-1]
            kind, width = scalars.storage_type(buffer.dtype), self.inner.width
            name = self.wide_loads[key] = self.fresh(f"{self.named[buffer]}_vec")
            reader = self._reader(buffer)
            if reader == "vec_ldg" and buffer in self.held and width * buffer.dtype.itemsize % 16 == 0:
                reader = "vec_ldg_held"
            text = f"{reader}<{kind}, {width}>({plus(self.named[buffer], self.index(index))})"
            if guard is not None:
                text = f"{guard} ? {text} : vec<{kind}, {width}>{{}}"
            self.line(f"const vec<{kind}, {width}> {name} = {text};")
            self.scopes = inner
        return self.wide_loads[key]

    def _reader(self, buffer: Buffer) -> str:
        """The function that reads vectors of a buffer."""
        if buffer in self.readers:
            return self.readers[buffer]
        if buffer.written:
            return "vec_ldcg" if self.finishing else "vec_load"
        return "vec_load" if buffer.name in self.aliased else "vec_ldg"

    def load(self, buffer: Buffer, index: str) -> str:
        name, reader = self.named[buffer], self._reader(buffer)
        if reader == "vec_load":
            text = f"{name}[{index}]"
        elif buffer.dtype in _LDG:
            text = f"__{reader[4:]}(&{name}[{index}])"
        else:
            text = f"{reader}<{scalars.storage_type(buffer.dtype)}, 1>({plus(name, index)}).x[0]"
        return scalars.loaded(text, buffer.dtype)

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
        """The store of an element to a vector, which is written after the loop over its elements."""
        self.need([s.value])
        value = bare(self.value(s.value))
        kind, width = scalars.storage_type(s.buffer.dtype), element.extent
        inner, self.scopes = self.scopes, self.scopes[:-1]
        self.need([*computed_in(s.index), *([] if s.guard is None else [s.guard])])
        name = self.fresh(f"{self.named[s.buffer]}_vec")
        self.line(f"vec<{kind}, {width}> {name};")
        place = plus(self.named[s.buffer], self.index(s.index - of(element)))
        guard = f"if ({bare(self.value(s.guard))}) " if s.guard is not None else ""
        writer = "vec_stcs" if s.buffer in self.streamed else "vec_store"
        self.after.append(f"{guard}{writer}<{kind}, {width}>({place}, {name});")
        self.scopes = inner
        return f"{name}.x[{self.variable(element)}] = {scalars.stored(value, s.buffer.dtype)};"


def plus(name: str, index: str) -> str:
    """The address of an element of a buffer."""
    return name if index == "0" else f"{name} + {index}" if "?" not in index else f"{name} + ({index})"
