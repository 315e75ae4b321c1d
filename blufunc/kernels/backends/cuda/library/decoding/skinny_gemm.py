"""GEMMs of at most 16 rows, such as a token's: bound by reading the weights.

Kernels, stages 5 to 8, above ``include/skinny_gemm.cuh``. In: an equation of ``kernels/ops/gemm``,
``kernels/ops/pointwise_gemm`` or ``kernels/ops/row_gemm``. Out: whether the kernel runs it, from the sizes alone; CUDA
C++; and the step, ready to run. Matmuls of vectors, of either operand, are GEMMs of one row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Strided, Work
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.decoding import row_source
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel, layout_of
from blufunc.kernels.backends.cuda.library.tile_gemm import VECTOR, matrix_of
from blufunc.kernels.backends.cuda.render import device_functions
from blufunc.kernels.backends.cuda.render.source import KERNEL_PARTS, OVERLAP
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.ops.gemm import dot_accumulate_p, dot_bias_p
from blufunc.kernels.ops.pointwise_gemm import Epilogue, dot_pointwise_p
from blufunc.kernels.ops.row_gemm import Rows, dot_rows_p, matmul_of, split
from blufunc.kernels.ops.split_dot import is_matrix
from blufunc.kernels.schedule import OpaqueStep

ENTRY = "skinny_gemm"

FILE = "backends/cuda/include/skinny_gemm.cuh"

_COLUMNS = ((64, 300), (32, 0)), ((32, 160), (16, 0))
"""Columns of a block, and minimum blocks: not ``by_terms``, and ``by_terms``."""
# measured: benchmarks/suites/skinny_gemms.py, 5 shapes, 16 to 64 columns (H100, 2026-11-27)

_WARPS = 8, 16
"""Warps of a block, which share its terms: of several blocks per SM, and of one."""

_MOST_ROWS = 16

_FEWEST_WEIGHTS = 1 << 16
"""Minimum elements of the weights: below, a launch takes longer than reading them."""

IN_FLIGHT = 2
"""Stages that a warp requests at a time ahead of the wait for preceding kernels."""
# measured: 1, 2, 3, 4 and 8 take 0.472, 0.460, 0.462, 0.468 and 0.470 ms of a token (H100, 2026-11-27)

_ROW_BYTES = 96 << 10
"""Maximum shared memory of computed rows, which leaves room for a second block."""

ROW_SECONDS = 0.7e-6
"""Time in which a block computes its rows, beyond that of its weights."""
# estimated; measured: a token of 8 layers takes 0.460 ms, and 0.478 with rows of kernels (H100, 2026-11-27)

_LOADED = 64, 48
"""Registers of a lane for weights that are loaded ahead: up to 8 rows, and more."""

_DTYPES = (dtypes.bfloat16, dtypes.float16)


@dataclass(frozen=True)
class SkinnyGemm:
    """Sizes (m, k) by (k, n), and the epilogue.

    Attributes:
      dtype, out: of the operands, and of the results.
      by_terms: whether the terms of a column of the weights are contiguous, not the columns of a term.
      columns, warps: of a block; 0: not chosen yet.
      swapped: whether the weights are the left operand.
      bias, addend: whether a vector, or a matrix, is added before results are rounded.
      epilogue: what is computed of an element; None: nothing.
      kinds: of the epilogue's further operands: 'matrix', 'vector', 'float32', a vector of that, or 'scalar'.
      weights: number of matrices of weights, of whose matmuls the epilogue reads an element each.
      rows: how x is computed; None: it is an operand.
      wide: of the arrays that it is computed of, whether they are float32.
    """

    m: int
    n: int
    k: int
    dtype: np.dtype
    out: np.dtype
    by_terms: bool = False
    columns: int = 0
    warps: int = 0
    swapped: bool = False
    bias: bool = False
    addend: bool = False
    epilogue: Epilogue | None = None
    kinds: tuple[str, ...] = ()
    weights: int = 1
    rows: Rows | None = None
    wide: tuple[bool, ...] = ()

    @property
    def grid(self) -> int:
        """Blocks of the grid."""
        return -(-self.n // self.columns)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the padded sums of each warp, and computed rows."""
        sums = 4 * self.warps * -(-self.m // 8) * 8 * (self.weights * self.columns + 4)
        return sums + (0 if self.rows is None else self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows, padded as if ``by_terms``."""
        return 2 * self.m * (-(-self.k // 64) * 64 + 32)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def depth(self) -> int:
        """Stages that a lane loads ahead."""
        own = self.weights * (self.columns // 16) * (8 if self.by_terms else 4)
        x = 0 if self.rows is not None else -(-self.m // 8) * (4 if self.by_terms else 2)
        loaded = _LOADED[self.m > 8]
        return max(1, min(loaded // own, 3 * loaded // 2 // (own + x)))

    def places(self, *kinds: str) -> list[int]:
        """The operands of some kinds."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]

    def tiled(self) -> SkinnyGemm:
        """The same with columns and warps that keep enough loads in flight."""
        found = (c for c, fewest in _COLUMNS[self.by_terms] if -(-self.n // c) >= fewest)
        columns = self.columns or next(found)
        return replace(self, columns=columns, warps=self.warps or _WARPS[-(-self.n // columns) <= SM_COUNT])


def gemm_of(eqn: Eqn) -> SkinnyGemm | str:
    """Kernel for an equation, or the reason why there is none."""
    if eqn.prim is dot_rows_p:
        return _of_rows(eqn)
    if eqn.prim not in (dot_general_p, dot_bias_p, dot_accumulate_p, dot_pointwise_p):
        return "it is no GEMM"
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (a.aval for a in eqn.invars[:2])
    dtype, out = lhs.dtype, eqn.outvars[0].aval.dtype
    if batch or not left or not lhs.size or not rhs.size:
        return "it is no matmul of two matrices"
    if dtype not in _DTYPES or rhs.dtype != dtype or out not in (dtype, dtypes.float32):
        return f"operands are {dtype} and {rhs.dtype}"
    k = math.prod(lhs.shape[d] for d in left)
    m, n = lhs.size // k, rhs.size // k
    swapped = n == 1
    if swapped:
        m, n = n, m
    if m > _MOST_ROWS:
        return f"it has {m} rows, and at most {_MOST_ROWS} are read at once"
    if not _are_matrices(eqn, m, swapped):
        return "its operands are no matrices as they lie, the terms of a row of x last"
    if n % VECTOR or k % VECTOR or n * k < _FEWEST_WEIGHTS:
        return f"weights of {k} x {n} are few, or no multiples of {VECTOR}"
    found = SkinnyGemm(m, n, k, dtype, out, swapped=swapped)
    if eqn.prim is dot_general_p:
        return found
    if swapped:
        return "its vector is the right operand"
    if eqn.prim is not dot_pointwise_p:
        return replace(found, bias=eqn.prim is dot_bias_p, addend=eqn.prim is dot_accumulate_p)
    return _with_epilogue(found, eqn)


def _are_matrices(eqn: Eqn, m: int, swapped: bool) -> bool:
    """True if dense copies of the operands are matrices that the kernel reads."""
    (left, right), _ = eqn.params["dimension_numbers"]
    pairs = sorted(zip(left, right, strict=True))
    sides = [(tuple(p[i] for p in pairs), atom.aval.ndim) for i, atom in enumerate(eqn.invars[:2])]
    x = sides[swapped][0]
    is_vector = lambda contract, rank: contract == tuple(range(rank))
    return all(is_vector(*side) or is_matrix(*side) for side in sides) and (m == 1 or 0 not in x)


def _of_rows(eqn: Eqn) -> SkinnyGemm | str:
    """The GEMMs of an equation of ``dot_rows_p``, or the reason why there are none."""
    found, weights, rows = gemm_of(matmul_of(eqn)), eqn.params["weights"], eqn.params["rows"]
    if isinstance(found, str):
        return found
    arrays, matrices, _ = split([a.aval for a in eqn.invars], eqn.params)
    if found.swapped or any(w != matrices[0] for w in matrices):
        return "its weights are not right operands of one shape"
    if weights > 1 and (found.epilogue is None or found.bias):
        return "no epilogue reads all of its matmuls"
    found = replace(found, weights=weights, kinds=found.kinds[weights - 1 :])
    if rows is None:
        return found
    reasons = (device_functions.why_not(j) for j in (*rows.passes, rows.result))
    if (reason := next((r for r in reasons if r is not None), None)) is not None:
        return reason
    if any(a.dtype not in (found.dtype, dtypes.float32) for a in arrays):
        return "its rows are computed of other dtypes"
    found = replace(found, rows=rows, wide=tuple(a.dtype == dtypes.float32 for a in arrays))
    scalars = (wide for wide, kind in zip(found.wide, rows.kinds, strict=True) if kind == "scalar")
    if not all(scalars):
        return "its rows are computed of a scalar in 16 bits"
    if found.row_bytes > _ROW_BYTES:
        return f"its rows take {found.row_bytes} bytes of shared memory"
    return found


def row_seconds(eqn: Eqn) -> float | None:
    """Seconds to compute the rows of an equation of ``dot_rows_p``; None: no kernel."""
    gemm = gemm_of(eqn)
    if isinstance(gemm, str) or is_replaced(dot_general_p, "impl"):
        return None
    waves = -(-gemm.tiled().grid // (2 * SM_COUNT))
    return 0.0 if gemm.rows is None else waves * ROW_SECONDS


def _with_epilogue(gemm: SkinnyGemm, eqn: Eqn) -> SkinnyGemm | str:
    """The GEMM with the epilogue of an equation, or the reason why there is none."""
    epilogue: Epilogue = eqn.params["epilogue"]
    if (reason := epilogue.why_not() or device_functions.why_not(epilogue.jaxpr)) is not None:
        return reason
    if epilogue.summed is not None:
        return "it also sums columns"
    kinds = []
    for a in eqn.invars[2 + epilogue.bias :]:
        kind = "scalar" if a.aval.size == 1 else "vector" if a.aval.size == gemm.n else "matrix"
        wide = a.aval.dtype == dtypes.float32
        if not (a.aval.dtype == gemm.dtype or wide) or (wide and kind == "matrix"):
            return f"there is no {kind} of {a.aval.dtype}"
        if kind == "scalar" and not wide:
            return f"there is no scalar of {a.aval.dtype}"
        kinds.append("float32" if wide and kind == "vector" else kind)
    outs = eqn.outvars[: len(epilogue.jaxpr.outvars)]
    if any(v.aval.dtype != gemm.dtype for v in outs):
        return "its results have several dtypes"
    return replace(gemm, bias=epilogue.bias, epilogue=epilogue, kinds=tuple(kinds))


def runs(eqn: Eqn) -> bool:
    """True if the kernel runs an equation."""
    return isinstance(gemm_of(eqn), SkinnyGemm)


# -- source ------------------------------------------------------------------------------------------


def overlap() -> str:
    """The functions of kernels that begin ahead of the end of those before them."""
    return source_files.source(KERNEL_PARTS, *OVERLAP)


def instructions(p: SkinnyGemm) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    return mma.instructions(p.dtype.name) + overlap() + source_files.source(FILE, "instructions")


def source(p: SkinnyGemm) -> str:
    """The CUDA C++ of one GEMM, but for the prelude."""
    sizes = source_files.declared(
        M=p.m, N=p.n, K=p.k, WEIGHTS=p.weights, BY_TERMS=p.by_terms, COLUMNS=p.columns, WARPS=p.warps, DEPTH=p.depth,
        IN_FLIGHT=min(IN_FLIGHT, p.depth), COMPUTED=p.rows is not None, WIDE=p.out == dtypes.float32, BIAS=p.bias,
        ADDEND=p.addend,
    )  # fmt: skip
    parameters = parameters_of(p)
    listed = ", ".join(f"{kind} *{name}" for kind, name in parameters)
    bias, addend = ("bias" if p.bias else "nullptr"), ("addend" if p.addend else "nullptr")
    own = range(p.weights)
    weights = f"Weights{{{{{', '.join(f'w{i}' for i in own)}}}, {{{', '.join(f'w{i}_row' for i in own)}}}}}"
    rows = f"Rows{{{', '.join(f'r{i}' for i in range(len(p.wide)))}}}" if p.rows is not None else "Given{}"
    x, strides = ("nullptr" if p.rows is not None else "x"), ", ".join(f"long long w{i}_row" for i in own)
    kernel = f"""
extern "C" __global__ void __launch_bounds__(THREADS, {512 // p.threads})
    {ENTRY}({listed}, long long x_row, {strides}) {{
  skinny_gemm({x}, x_row, {weights}, {bias}, {addend}, {rows}, Store{{{_members(p)}}});
}}
"""
    parts = [source_files.source(FILE, "gemm"), "struct Tables {};\n"]
    parts += (
        [source_files.source(FILE, "rows"), row_source.structure(p.rows, p.wide)]
        if p.rows is not None
        else []
    )
    parts.append(_epilogue(p) if p.epilogue else source_files.source(FILE, "store"))
    return sizes + instructions(p) + "".join(parts) + kernel


def _epilogue(p: SkinnyGemm) -> str:
    """The function of an element, and what stores its results."""
    assert p.epilogue is not None
    jaxpr, stored = p.epilogue.jaxpr, p.epilogue.stored
    outs = range(len(jaxpr.outvars))
    computed = [i for i in outs if i != stored]
    held = _held(p)
    given = {i: f"{name}[{n}]" for name, own in held.items() for n, i in enumerate(own)}
    tiles = [f"t{i}" for i in range(p.weights)]
    arguments = [
        "Tables{}",
        *(f"t[{i}]" for i in range(p.weights)),
        *(given[i] for i in range(len(p.kinds))),
        *(f"results[{i}]" for i in computed),
    ]
    function = device_functions.function(
        jaxpr.replace(outvars=[jaxpr.outvars[i] for i in computed]), "of_element", 0,
        [*tiles, *(f"x{i}" for i in range(len(p.kinds)))], [f"r{i}" for i in computed],
    )  # fmt: skip
    constants = source_files.declared(
        MATRICES=len(held["matrices"]), VECTORS=len(held["vectors"]), SCALARS=len(held["scalars"]),
        WIDE_VECTORS=sum(1 << n for n, i in enumerate(held["vectors"]) if p.kinds[i] == "float32"),
        RESULTS=len(outs), STORED=-1 if stored is None else stored,
    )  # fmt: skip
    return f"""{constants}{function}inline void apply(const float *t, const float *matrices, const float *vectors,
                  const float *scalars, float *results) {{
  of_element({", ".join(arguments)});
}}
{source_files.source(FILE, "apply")}"""


def _held(p: SkinnyGemm) -> dict[str, list[int]]:
    return {
        "matrices": p.places("matrix"),
        "vectors": p.places("vector", "float32"),
        "scalars": p.places("scalar"),
    }


def _members(p: SkinnyGemm) -> str:
    """The initializers of the structure ``Store``."""
    if p.epilogue is None:
        return "out0"
    listed = [", ".join(f"x{i}" for i in own) for own in _held(p).values()]
    listed.append(", ".join(f"out{i}" for i in range(len(p.epilogue.jaxpr.outvars))))
    return ", ".join(f"{{{names}}}" for names in listed)


def parameters_of(p: SkinnyGemm) -> list[tuple[str, str]]:
    """C types and names of the pointer parameters: operands, then results."""
    types = {"matrix": "element", "vector": "element", "float32": "float", "scalar": "float"}
    outs = 1 if p.epilogue is None else len(p.epilogue.jaxpr.outvars)
    arrays = [("const element", "x")]
    if p.rows is not None:
        arrays = [(f"const {'float' if wide else 'element'}", f"r{i}") for i, wide in enumerate(p.wide)]
    return [
        *arrays,
        *(("const element", f"w{i}") for i in range(p.weights)),
        *[("const result", "bias")] * p.bias,
        *[("const result", "addend")] * p.addend,
        *((f"const {types[kind]}", f"x{i}") for i, kind in enumerate(p.kinds)),
        *(("result", f"out{i}") for i in range(outs)),
    ]


@functools.lru_cache(256)
def _text(p: SkinnyGemm) -> modules.Text:
    return DEVICE.with_prelude(source(p)), ENTRY


# -- steps -------------------------------------------------------------------------------------------


class _Layout:
    """How a factor is read: in place, or as a dense copy.

    Attributes:
      by_terms: whether the contracted axes are contiguous.
      row: stride of the other ones in elements.
    """

    def __init__(
        self, layout: Strided, shape: Sequence[int], contract: Sequence[int], k: int, by_terms: bool = False
    ):
        one_row = math.prod(shape) == k
        self.by_terms, self.row, self.in_place = matrix_of(layout, shape, contract)
        if one_row:
            contiguous = all(
                s == e or n == 1 for s, e, n in zip(layout.strides, _dense(shape), layout.shape, strict=True)
            )
            self.by_terms, self.row = True, k
            self.in_place = contiguous and not layout.offset % VECTOR
        elif by_terms and not self.by_terms:
            self.by_terms, self.row, self.in_place = True, k, False


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _factors(p: SkinnyGemm, eqn: Eqn) -> list[tuple[int, int]]:
    """Positions of x, unless it is computed, and of the weights.

    With each comes the operand of the matmul that it is.
    """
    if eqn.prim is not dot_rows_p:
        return [(1, 1), (0, 0)] if p.swapped else [(0, 0), (1, 1)]
    arrays, weights, _ = split(range(len(eqn.invars)), eqn.params)
    return [(n, 0) for n in arrays if p.rows is None] + [(n, 1) for n in weights]


def _planned(p: SkinnyGemm, eqn: Eqn, layouts: Sequence[Strided]) -> tuple[list[_Layout], SkinnyGemm]:
    """Layouts of x, unless computed, and of the weights; the GEMM that reads them."""
    contracts, _ = eqn.params["dimension_numbers"]
    sides = _factors(p, eqn)
    found = [
        _Layout(
            layouts[i], eqn.invars[i].aval.shape, contracts[side], p.k, by_terms=p.rows is None and n == 0
        )
        for n, (i, side) in enumerate(sides)
    ]
    weights = found[-p.weights :]
    assert all(w.by_terms == weights[0].by_terms for w in weights), "rewrites join weights of one layout"
    return found, replace(p, by_terms=weights[0].by_terms).tiled()


class SkinnyMatmul(LibraryKernel):
    """Matmuls of few rows by ``SkinnyGemm``."""

    def matches(self, eqn: Eqn) -> bool:
        return runs(eqn)

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        gemm = gemm_of(step.eqn)
        assert isinstance(gemm, SkinnyGemm), gemm
        _, gemm = _planned(gemm, step.eqn, [layout_of(step, n) for n in range(len(step.operands))])
        return [_text(gemm)]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        gemm = gemm_of(step.eqn)
        assert isinstance(gemm, SkinnyGemm), gemm
        factors, arrays = _factors(gemm, step.eqn), len(gemm.wide)
        layouts, gemm = _planned(gemm, step.eqn, [o.layout for o in operands])
        rows = [layout.row for layout in layouts]
        kernel = Kernel(gemm, rows if gemm.rows is None else [0, *rows], executor.device)
        results = Results(executor, step)
        sides = [(operands[i], layout.in_place) for (i, _), layout in zip(factors, layouts, strict=True)]
        rest = operands[arrays + len(sides) :]

        def run(executor: Executor) -> None:
            computed_of = [o.buffer(executor) for o in operands[:arrays]]
            located = [operand.located(executor, in_place) for operand, in_place in sides]
            given = [o.buffer(executor) for o in rest]
            addresses = [*(b.ptr for b in computed_of), *(address for address, _ in located)]
            others = [*(b.ptr for b in given), *results.addresses(executor)]
            kernel(addresses, others, executor.work_stream(), executor.follows_kernel and constant)

        copied = any(not (in_place or o.in_place) for o, in_place in sides)
        copied = copied or not all(o.in_place for o in (*operands[:arrays], *rest))
        constant = not copied and all(executor.is_constant(o) for o, _ in sides[-gemm.weights :])
        return Work(run, ENTRY, step, anywhere=lambda: not copied, ends_in_kernel=True)


class Kernel:
    """A kernel, ready to be put on streams of a device.

    Args:
      rows: strides between the rows of x, or 0 if it is computed, and of the weights, in elements.
    """

    def __init__(self, gemm: SkinnyGemm, rows: Sequence[int], device: int):
        source, entry = _text(gemm)
        function = modules.module(source, device, entry).kernel(entry)
        pointers = len(parameters_of(gemm))
        arguments = [*[0] * pointers, *rows]
        self._launch = function.prepare((gemm.grid,), (gemm.threads,), gemm.shared_bytes, arguments)

    def __call__(
        self,
        factors: Sequence[int],
        others: Sequence[int],
        stream: Any,
        overlaps: bool = False,
    ) -> None:
        """Put it on a stream.

        Args:
          others: addresses in the order of the equation.
          overlaps: load weights ahead of the end of the preceding kernel, which does not write them.
        """
        self._launch.run([*factors, *others], stream, overlaps=overlaps)
