"""Grouped GEMM for any architecture, dtype and alignment.

Kernels, stages 6 and 8, with the sources of ``include/grouped_gemm.cuh`` and ``include/implicit_gemm.cuh``. In: the
sizes and strides of a ``ragged_dot`` or ``ragged_contract``. Out: CUDA C++ and its launch. 16 bits, and float32 where
TF32 will do, use tensor cores; others are multiplied by plain arithmetic, integers modulo their range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.convolution import implicit_gemm
from blufunc.kernels.codegen import source_files

FILE = "backends/cuda/include/grouped_gemm.cuh"

ENTRY = "grouped_gemm"

THREADS = 256

_STAGES = 3
"""Tiles in shared memory, as in ``include/implicit_gemm.cuh``."""

_TYPES = {
    "float64": "double", "float32": "float", "bfloat16": "unsigned short", "float16": "unsigned short",
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long long",
}  # fmt: skip
"""C types of elements in memory, by dtype."""

_HALVES = ("bfloat16", "float16")

_TILES = {"tensor": (128, 128, 32), 4: (128, 128, 16), 8: (64, 64, 16)}
"""Rows, columns and terms of a block: on tensor cores, and by the bytes of a sum."""


@dataclass(frozen=True)
class PortableGemm:
    """Sizes as of ``hopper.GroupedGemm``, and strides in elements.

    Attributes:
      a: strides of stacks and rows of the left operand; its columns are contiguous.
      b: strides of stacks, groups, rows (terms, if not ``summed``) and columns of the right one.
      dtype, out: names of the dtypes of operands and results.
      tf32: whether float32 may be rounded to 11 bits.
    """

    stacks: int
    m: int
    k: int
    n: int
    groups: int
    matrices: int
    bounds: int
    summed: bool
    a: tuple[int, int]
    b: tuple[int, int, int, int]
    dtype: str
    out: str
    tf32: bool = False

    @property
    def on_tensor_cores(self) -> bool:
        """True for 16-bit floats, and float32 in TF32."""
        return self.dtype in _HALVES or self.tf32

    @property
    def total(self) -> str:
        """C type of sums."""
        if self.dtype in (*_HALVES, "float32"):
            return "double" if self.out == "float64" else "float"
        if self.dtype == "float64":
            return "double"
        return "unsigned long long" if max(map(_size, (self.dtype, self.out))) == 8 else "unsigned"

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows, columns and terms of a block."""
        if self.on_tensor_cores:
            return _TILES["tensor"]
        return _TILES[8 if self.total in ("double", "unsigned long long") else 4]

    @property
    def by_terms(self) -> bool:
        """True if the terms of the right operand are contiguous."""
        return self.b[2] == 1 and not self.summed

    @property
    def grid(self) -> int:
        """Blocks, some of which have nothing to do."""
        rows, columns, _ = self.tile
        across = -(-self.n // columns)
        if self.summed:
            return self.stacks * self.groups * -(-self.k // rows) * across
        return self.stacks * (self.m // rows + self.groups + 2) * across


def why_not(dtype: np.dtype, out: np.dtype) -> str | None:
    """Reason why there is no kernel for these dtypes, or None."""
    floats = ("float64", "float32", *_HALVES)
    if dtype.name not in _TYPES or out.name not in _TYPES or (dtype.name in floats) != (out.name in floats):
        return f"there is none of {dtype.name} to {out.name}"
    if dtype.name in _HALVES and out.name not in (dtype.name, "float32"):
        return f"results of {dtype.name} are that or float32"
    if dtype.name == "float64" and out.name in _HALVES:
        return "results of float64 are that or float32"
    return None


def _size(name: str) -> int:
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def source(p: PortableGemm) -> str:
    """The complete CUDA C++ of one GEMM."""
    bm, bn, bk = p.tile
    largest = max(
        p.stacks * max(p.a[0], p.m * p.a[1], p.m * p.n),
        p.matrices * max(p.b[0], p.groups * p.b[1], (p.m if p.summed else p.k) * p.b[2], p.n * p.b[3]),
        p.stacks * p.groups * p.k * p.n,
    )
    constants = source_files.declared(
        STACKS=p.stacks, M=p.m, K=p.k, N=p.n, GROUPS=p.groups, MATRICES=p.matrices, BOUNDS=p.bounds, SUMMED=p.summed,
        A_STACK=p.a[0], A_ROW=p.a[1], B_STACK=p.b[0], B_GROUP=p.b[1], B_ROW=p.b[2], B_COLUMN=p.b[3],
        BM=bm, BN=bn, BK=bk, THREADS=THREADS, A_TERMS=not p.summed, B_TERMS=p.by_terms,
    )  # fmt: skip
    types = {
        "Element": _TYPES[p.dtype], "Result": _TYPES[p.out], "Total": p.total, "Target": _TYPES[p.out],
        "Offset": "int" if largest < 1 << 31 else "long long",
    }  # fmt: skip
    parts = [constants, *(f"typedef {kind} {name};\n" for name, kind in types.items())]
    if p.on_tensor_cores:
        chunk = 16 // _size(p.dtype)
        a = (p.k, *p.a)
        b = (p.k if p.by_terms else p.n, p.b[0], p.b[1], p.b[3] if p.by_terms else p.b[2])
        aligned = lambda sizes: not any(s % chunk for s in sizes)
        b_vector = (p.by_terms or p.b[3] == 1) and aligned(b)
        parts += [source_files.declared(A_VECTOR=aligned(a), B_VECTOR=b_vector, WM=64, WN=32)]
        kind = "tensor_cores"
    else:
        parts += [source_files.declared(MICRO_M=bm // 16, MICRO_N=bn // 16)]
        kind = "plain"
    rounded = p.out in _HALVES
    if rounded or p.on_tensor_cores:
        parts += [mma.instructions(next((d for d in (p.dtype, p.out) if d in _HALVES), "bfloat16"))]
    store = "(unsigned short)pack(x, x)" if rounded else "(Result)x"
    parts += [f"inline void store(Result *to, Total x) {{ *to = {store}; }}\n"]
    parts += [source_files.source(implicit_gemm.FILE, "common"), source_files.source(FILE, "block")]
    parts += [source_files.source(implicit_gemm.FILE, kind), source_files.source(FILE, "entry")]
    return "".join(parts)


def shared_bytes(p: PortableGemm) -> int:
    """Dynamic shared memory of a block."""
    if not p.on_tensor_cores:
        return 0
    (bm, bn, bk), size = p.tile, _size(p.dtype)
    a = bk * (bm + 8) if p.summed else bm * (bk + 16 // size)
    b = bn * (bk + 16 // size) if p.by_terms else bk * (bn + 8)
    return _STAGES * size * (a + b)
