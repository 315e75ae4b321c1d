"""``dot_pointwise`` on Hopper: a GEMM with an epilogue generated from a jaxpr.

Kernels, stages 5 to 8, above ``tile_gemm`` and ``include/pointwise_gemm.cuh``. In: an equation of
``rewrites/pointwise_epilogue``. Out: why there is no kernel for it, and its time beyond the matmul; CUDA C++; and the
step, ready to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.device_model import (
    EPILOGUE_RATE,
    GEMM_SECONDS,
    GEMM_TILE_SECONDS,
    HIDDEN_OPERATIONS,
    SM_COUNT,
)
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver.tensor_map import BYTES, Mapped
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library import tile_gemm
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.library.tile_gemm import (
    COLUMNS,
    EPILOGUE_WARPS,
    ROWS,
    TileGemm,
    by_rows_of,
    factors_of,
)
from blufunc.kernels.backends.cuda.render import device_functions
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.ops.pointwise_gemm import Epilogue, columns_of, dot_pointwise_p
from blufunc.kernels.ops.split_dot import is_matrix
from blufunc.kernels.schedule import OpaqueStep

ENTRY = "pointwise_gemm"

_FILE = "backends/cuda/include/pointwise_gemm.cuh"

_PANEL = 64
"""Columns are a multiple of this: partial tiles end at panels."""

_MOST_OPERANDS = 4
"""Matrices that an epilogue reads: lanes prefetch rows of all into registers."""

_DTYPES = {"vector": (dtypes.bfloat16, dtypes.float32), "scalar": (dtypes.float32,)}
_C_TYPES = {"matrix": "element", "bfloat16": "element", "float32": "float", "scalar": "float"}


@dataclass(frozen=True)
class PointwiseGemm(TileGemm):
    """Sizes, and the epilogue.

    Attributes:
      epilogue: what is computed of an element.
      kinds: of the jaxpr's further operands: 'matrix'; 'bfloat16' or 'float32', a vector of that; or 'scalar'.
    """

    epilogue: Epilogue = None  # type: ignore[assignment]  # dataclasses have no fields without defaults after others
    kinds: tuple[str, ...] = ()

    epilogue_bytes: ClassVar[int] = 4 * EPILOGUE_WARPS * COLUMNS
    """Column sums of each warp."""

    def places(self, *kinds: str) -> list[int]:
        """The operands of some kinds."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def gemm_of(eqn: Eqn, arch: str) -> PointwiseGemm | str:
    """Kernel for an equation on an architecture (``sm_90a``), or why there is none."""
    if arch != "sm_90a":
        return "there are kernels for Hopper only"
    (left, right), _ = eqn.params["dimension_numbers"]
    lhs, rhs = (a.aval for a in eqn.invars[:2])
    pairs = sorted(zip(left, right, strict=True))
    left, right = zip(*pairs, strict=True) if pairs else ((), ())
    if not (pairs and is_matrix(left, lhs.ndim) and is_matrix(right, rhs.ndim)) or 0 in left:
        return "its operands are no matrices as they lie, rows first on the left"
    epilogue: Epilogue = eqn.params["epilogue"]
    if (reason := epilogue.why_not() or device_functions.why_not(epilogue.jaxpr)) is not None:
        return reason
    k, n = math.prod(lhs.shape[d] for d in left), columns_of(rhs.shape, eqn.params["dimension_numbers"])
    m = lhs.size // k
    operands = eqn.invars[2 + epilogue.bias :]
    kinds = ["scalar" if a.aval.size == 1 else "vector" if a.aval.size == n else "matrix" for a in operands]
    matrices = [*eqn.invars[: 2 + epilogue.bias], *eqn.outvars[: len(epilogue.jaxpr.outvars)]]
    matrices += [a for a, kind in zip(operands, kinds, strict=True) if kind == "matrix"]
    if (other := next((a for a in matrices if a.aval.dtype != dtypes.bfloat16), None)) is not None:
        return f"matrices are bfloat16 there, and one is {other.aval.dtype}"
    for i, (a, kind) in enumerate(zip(operands, kinds, strict=True)):
        if kind != "matrix" and a.aval.dtype not in _DTYPES[kind]:
            return f"there are no {kind}s of {a.aval.dtype}"
        kinds[i] = str(a.aval.dtype) if kind == "vector" else kind
    if kinds.count("matrix") > _MOST_OPERANDS:
        return f"it reads {kinds.count('matrix')} matrices, and registers hold {_MOST_OPERANDS}"
    if m % (2 * ROWS) or n % _PANEL or k % tile_gemm.TERMS:
        least = f"{2 * ROWS} x {_PANEL} x {tile_gemm.TERMS}"
        return f"{m} x {n} x {k} is not of whole tiles, which are multiples of {least}"
    return PointwiseGemm(m, n, k, by_rows=0 not in right, epilogue=epilogue, kinds=tuple(kinds))


def why_not(eqn: Eqn, arch: str) -> str | None:
    """Why there is no kernel for an equation; None if there is one."""
    found = gemm_of(eqn, arch)
    return found if isinstance(found, str) else None


def extra_seconds(eqn: Eqn) -> float:
    """Seconds that the kernel takes beyond the library's matmul.

    A constant per tile of an SM, and the instructions that the next tile's matmul does not hide.
    """
    n = columns_of(eqn.invars[1].aval.shape, eqn.params["dimension_numbers"])
    m = eqn.outvars[0].aval.size // n
    tiles = -(-m // ROWS) * -(-n // COLUMNS)
    operations = sum(map(_operations, eqn.params["epilogue"].jaxpr.eqns))
    exposed = ROWS * COLUMNS * max(0, operations - HIDDEN_OPERATIONS) / EPILOGUE_RATE
    return GEMM_SECONDS + -(-tiles // SM_COUNT) * (GEMM_TILE_SECONDS + exposed)


def _operations(eqn: Eqn) -> int:
    """Instructions of an equation: its function's, and two to round to 16 bits."""
    return eqn.prim.cost + 2 * scalar_ops.is_small_float(eqn.outvars[0].aval.dtype)


# -- source ------------------------------------------------------------------------------------------


def source(p: PointwiseGemm) -> str:
    """The CUDA C++ of one GEMM, but for the prelude."""
    jaxpr, stored = p.epilogue.jaxpr, p.epilogue.stored
    outs = range(len(jaxpr.outvars))
    computed = [i for i in outs if i != stored]
    matrices, vectors, scalars = p.places("matrix"), p.places("bfloat16", "float32"), p.places("scalar")
    held = {"matrices": matrices, "vectors": vectors, "scalars": scalars}
    given = {i: f"{name}[{n}]" for name, own in held.items() for n, i in enumerate(own)}
    arguments = [
        "Tables{}",
        "t",
        *(given[i] for i in range(len(p.kinds))),
        *(f"results[{i}]" for i in computed),
    ]
    names = ["t", *(f"x{i}" for i in range(len(p.kinds)))]
    function = device_functions.function(
        jaxpr.replace(outvars=[jaxpr.outvars[i] for i in computed]), "of_element", 0, names,
        [f"r{i}" for i in computed],
    )  # fmt: skip
    parameters = [f"{kind} *__restrict__ {name}" for kind, name in _parameters(p)]
    listed = lambda names: f"{{{', '.join(names)}}}"
    members = [
        "bias" if p.epilogue.bias else "nullptr", *(listed(f"x{i}" for i in own) for own in held.values()),
        listed(f"result{i}" for i in outs), "nullptr" if p.epilogue.summed is None else "sums",
    ]  # fmt: skip
    epilogue = f"""struct Tables {{}};
{function}inline void apply(float t, const float *matrices, const float *vectors, const float *scalars,
                  float *results) {{
  of_element({", ".join(arguments)});
}}
{source_files.source(_FILE, "epilogue")}
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    {ENTRY}(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, {", ".join(parameters)}) {{
  tile_gemm(a, b, PointwiseEpilogue{{{{}}, {", ".join(members)}}});
}}
"""
    constants = {
        "BIAS": p.epilogue.bias, "MATRICES": len(matrices), "VECTORS": len(vectors), "SCALARS": len(scalars),
        "WIDE_VECTORS": sum(1 << n for n, i in enumerate(vectors) if p.kinds[i] == "float32"),
        "RESULTS": len(outs), "STORED": -1 if stored is None else stored,
        "SUMMED": -1 if p.epilogue.summed is None else p.epilogue.summed,
    }  # fmt: skip
    return tile_gemm.source(p, epilogue, **constants)


def _parameters(p: PointwiseGemm) -> list[tuple[str, str]]:
    """C types and names of the pointer parameters: operands, then results."""
    return [
        *[("const element", "bias")] * p.epilogue.bias,
        *((f"const {_C_TYPES[kind]}", f"x{i}") for i, kind in enumerate(p.kinds)),
        *(("element", f"result{i}") for i in range(len(p.epilogue.jaxpr.outvars))),
        *[("float", "sums")] * (p.epilogue.summed is not None),
    ]


# -- steps -------------------------------------------------------------------------------------------


class DotPointwise(LibraryKernel):
    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim is dot_pointwise_p

    def rows_of_sums(self, eqn: Eqn) -> int:
        return ROWS

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        gemm = gemm_of(step.eqn, arch)
        assert isinstance(gemm, PointwiseGemm), gemm
        contracts, _ = step.eqn.params["dimension_numbers"]
        return [_text(replace(gemm, by_rows=by_rows_of(step, 1, contracts[1])))]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        gemm = gemm_of(step.eqn, driver.properties(executor.device).arch)
        assert isinstance(gemm, PointwiseGemm), gemm
        contracts, _ = step.eqn.params["dimension_numbers"]
        left, right = factors_of(operands[:2], contracts, gemm.k)
        gemm = replace(gemm, by_rows=right.by_rows)
        kernel = Kernel(gemm, (left.row, right.row), executor.device)
        results = Results(executor, step)

        def run(executor: Executor) -> None:
            factors = [side.address(executor) for side in (left, right)]
            given = [o.buffer(executor) for o in operands[2:]]
            others = [*(b.ptr for b in given), *results.addresses(executor)]
            kernel([address for address, _ in factors], others, executor.work_stream())

        copied = left.copied or right.copied or not all(o.in_place for o in operands[2:])
        return Work(run, dot_pointwise_p.name, step, anywhere=lambda: not copied)


@functools.lru_cache(256)
def _text(gemm: PointwiseGemm) -> modules.Text:
    return DEVICE.with_prelude(source(gemm)), ENTRY


class Kernel:
    """A kernel, ready to be put on streams of a device.

    Args:
      rows: strides between the rows of both factors in elements (of the right one's terms, if not ``by_rows``).
    """

    def __init__(self, gemm: PointwiseGemm, rows: Sequence[int], device: int):
        source, entry = _text(gemm)
        grid = gemm.grid(driver.properties(device).sm_count)
        function = modules.module(source, device, entry).kernel(entry)
        arguments = [bytes(BYTES), bytes(BYTES), *[0] * len(_parameters(gemm))]
        self._launch = function.prepare((grid,), (gemm.threads,), gemm.shared_bytes, arguments)
        self._maps = [Mapped(i, i, box) for i, box in enumerate(gemm.boxes(*(2 * row for row in rows)))]

    def __call__(self, factors: Sequence[int], others: Sequence[int], stream: Any) -> None:
        """Put it on a stream; ``others`` are addresses in the order of the equation."""
        for mapped in self._maps:
            mapped.set(self._launch.arguments, factors)
        self._launch.run(others, stream, first=2)
