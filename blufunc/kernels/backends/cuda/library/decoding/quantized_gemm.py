"""GEMMs of at most 16 rows by quantized weights, decoded in registers.

Kernels, stages 5 to 8, above ``include/quantized_gemm.cuh``. In: an equation of ``nn/quantization/product.py``, whose
definition runs wherever this module has no kernel. Out: CUDA C++, and the step, ready to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.decoding import skinny_gemm
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.schedule import OpaqueStep

NAME, ENTRY = "quantized_matmul", "quantized_gemm"

_FILE = "backends/cuda/include/quantized_gemm.cuh"

TERMS = 64
"""Terms of a stage: blocks have a multiple of them."""

_MOST_ROWS = 16

_DTYPES = (dtypes.bfloat16, dtypes.float16)

_LOADED = 48
"""Registers of a lane for codes that are loaded ahead."""

_WIDE_BLOCKS = 160
"""Minimum blocks of the grid if a block has 32 columns.

As in ``skinny_gemm``: fewer blocks have 16.
"""


@dataclass(frozen=True)
class QuantizedGemm:
    """Sizes (m, k) by (n, k), transposed.

    Attributes:
      dtype: of x and of the results.
      bits: of a code.
      block: terms that share a level or scale; 0: none, columns have scales only.
    """

    m: int
    n: int
    k: int
    dtype: np.dtype
    bits: int
    block: int

    @property
    def scaled(self) -> bool:
        """True if columns have scales, rather than only blocks."""
        return self.bits == 4 or not self.block

    @property
    def columns(self) -> int:
        """Columns of a block of the grid."""
        return 32 if -(-self.n // 32) >= _WIDE_BLOCKS else 16

    @property
    def grid(self) -> int:
        """Blocks of the grid."""
        return -(-self.n // self.columns)

    @property
    def threads(self) -> int:
        """Threads of a block: more where an SM has one block."""
        return 32 * (16 if self.grid <= SM_COUNT else 8)

    @property
    def depth(self) -> int:
        """Stages that a lane loads ahead."""
        return max(1, min(8, _LOADED // (self.columns // 8 * (self.bits // 2 + bool(self.block)))))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the padded sums of each warp."""
        return 4 * self.threads // 32 * -(-self.m // 8) * 8 * (self.columns + 4)


def gemm_of(eqn: Eqn) -> QuantizedGemm | str:
    """Kernel for an equation, or the reason why there is none."""
    x, codes, *rest = (a.aval for a in eqn.invars)
    if not eqn.params["transposed"]:
        return "weights [inputs, outputs] are dequantized first"
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}"
    n, k = codes.shape[0], x.shape[-1]
    m = math.prod(x.shape[:-1])
    if not 0 < m <= _MOST_ROWS:
        return f"it has {m} rows, and at most {_MOST_ROWS} are read at once"
    bits = 8 * codes.shape[1] // k if k else 8
    scale = rest[0]  # levels of 4-bit codes
    if bits == 8 and scale.shape[0] != n:
        return "rows of codes share scales"
    block = 0 if scale.shape[1] == 1 and bits == 8 else k // scale.shape[1]
    if n % 8 or not k or k % TERMS or block % TERMS:
        return f"codes of {n} x {k} in blocks of {block or k} are no multiples of 8 x {TERMS}"
    return QuantizedGemm(m, n, k, x.dtype, bits, block)


# -- source ------------------------------------------------------------------------------------------


def instructions(p: QuantizedGemm) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    shared = source_files.source(skinny_gemm.FILE, "instructions")
    return (
        mma.instructions(p.dtype.name)
        + skinny_gemm.overlap()
        + shared
        + source_files.source(_FILE, "instructions")
    )


def source(p: QuantizedGemm) -> str:
    """The CUDA C++ of one GEMM, but for the prelude."""
    sizes = source_files.declared(
        M=p.m, N=p.n, K=p.k, BITS=p.bits, BLOCK=p.block, COLUMNS=p.columns, WARPS=p.threads // 32, DEPTH=p.depth,
        IN_FLIGHT=min(skinny_gemm.IN_FLIGHT, p.depth), SCALED=p.scaled,
    )  # fmt: skip
    listed = ", ".join(f"{kind} *{name}" for kind, name in parameters_of(p))
    scale = "scale" if p.scaled else "nullptr"
    levels = "levels" if p.block else "(const float *)nullptr"
    table = "table" if p.bits == 4 else "nullptr"
    kernel = f"""
extern "C" __global__ void __launch_bounds__(THREADS, {512 // p.threads})
    {ENTRY}({listed}) {{
  multiply_by_codes(x, codes, {levels}, {scale}, {table}, out);
}}
"""
    return sizes + instructions(p) + source_files.source(_FILE, "gemm") + kernel


def parameters_of(p: QuantizedGemm) -> list[tuple[str, str]]:
    """C types and names of the parameters: operands, then the result."""
    levels = (
        [("const unsigned char", "levels")] if p.bits == 4 else [("const float", "levels")] * bool(p.block)
    )
    return [
        ("const element", "x"),
        ("const unsigned char", "codes"),
        *levels,
        *[("const float", "scale")] * p.scaled,
        *[("const float", "table")] * (p.bits == 4),
        ("element", "out"),
    ]


@functools.lru_cache(256)
def _text(p: QuantizedGemm) -> modules.Text:
    return DEVICE.with_prelude(source(p)), ENTRY


# -- steps -------------------------------------------------------------------------------------------


class QuantizedMatmul(LibraryKernel):
    """``quantized_matmul`` of few rows by ``QuantizedGemm``."""

    composite = True

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.name == NAME and eqn.prim.kind == "call"

    def why_not(self, eqn: Eqn, arch: str) -> str | None:
        found = gemm_of(eqn)
        return found if isinstance(found, str) else None

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        return [_text(_planned(step.eqn))]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        kernel = Kernel(_planned(step.eqn), executor.device)
        results = Results(executor, step)
        copied = not all(o.in_place for o in operands)
        constant = not copied and all(executor.is_constant(o) for o in operands[1:])

        def run(executor: Executor) -> None:
            given = [o.buffer(executor) for o in operands]  # copies live until they are read
            addresses = [*(b.ptr for b in given), *results.addresses(executor)]
            kernel(addresses, executor.work_stream(), executor.follows_kernel and constant)

        return Work(run, ENTRY, step, anywhere=lambda: not copied, ends_in_kernel=True)


def _planned(eqn: Eqn) -> QuantizedGemm:
    gemm = gemm_of(eqn)
    assert isinstance(gemm, QuantizedGemm), gemm
    return gemm


class Kernel:
    """A kernel, ready to be put on streams of a device."""

    def __init__(self, gemm: QuantizedGemm, device: int):
        source, entry = _text(gemm)
        function = modules.module(source, device, entry).kernel(entry)
        arguments = [0] * len(parameters_of(gemm))
        self._launch = function.prepare((gemm.grid,), (gemm.threads,), gemm.shared_bytes, arguments)

    def __call__(self, addresses: Sequence[int], stream: Any, overlaps: bool = False) -> None:
        """Put it on a stream.

        Args:
          addresses: of the operands and the result, in the order of ``parameters_of``.
          overlaps: load codes ahead of the end of the preceding kernel, which does not write them.
        """
        self._launch.run(addresses, stream, overlaps=overlaps)
