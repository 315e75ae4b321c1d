"""``sort`` by one key and ``top_k`` of rows, by blocks.

Kernels, stages 6 to 8. In: an equation. Out: launches in planned memory. Ties keep their order: elements are sorted by
key, then by position. A ``top_k`` of longer rows keeps the best of each part, until what is left fits one. CuPy sorts
longer rows and by several keys; that waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.sort import sort_p, top_k_p
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel, planned_work
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.user_kernel import CudaSource

LONGEST = 4096
"""Elements that a block sorts, at most; half as many with keys of 64 bits."""

MOST_KEPT = 1024
"""Elements of a ``top_k`` of rows longer than that, at most."""

MOST_OPERANDS = 8

_MOST_BLOCKS = (1 << 31) - 1

_SELECTED_FROM = 256
"""Minimum elements that a block selects from: blocks run side by side."""

_FILE = "backends/cuda/include/sort.cuh"
_MOVED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "longlong2"}


class Pass(NamedTuple):
    """One launch.

    Attributes:
      length: elements of a row.
      part: elements that a block sorts, a power of two.
      kept: elements that remain of each part.
      from_keys, to_keys: whether it reads elements of an earlier pass, and writes those of a later one.
    """

    length: int
    part: int
    kept: int
    from_keys: bool
    to_keys: bool

    @property
    def parts(self) -> int:
        """Blocks of a row."""
        return -(-self.length // self.part)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return min(1024, max(32, self.part // 2))


class _Rows(NamedTuple):
    """The rows of an array along an axis.

    Attributes:
      number, length: of rows, and of elements of each.
      stride: between elements of a row.
    """

    number: int
    length: int
    stride: int


def _rows_of(eqn: Eqn) -> _Rows:
    shape = eqn.invars[0].aval.shape
    axis = len(shape) - 1 if eqn.prim is top_k_p else eqn.params["dimension"]
    return _Rows(math.prod(shape) // shape[axis], shape[axis], math.prod(shape[axis + 1 :]))


def _is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize == 8


def passes(eqn: Eqn) -> list[Pass] | None:
    """The launches of an equation; None if these kernels do not compute it."""
    if eqn.prim not in (sort_p, top_k_p):
        return None
    key = eqn.invars[0].aval
    if not key.size or dtypes.is_complex(key.dtype) or dtypes.is_key(key.dtype):
        return None
    if key.dtype not in scalar_ops.STORAGE or key.dtype.itemsize > 8:
        return None
    longest = LONGEST >> _is_wide(key.dtype)
    rows = _rows_of(eqn)
    if eqn.prim is sort_p:
        one_key = eqn.params["num_keys"] == 1 and len(eqn.invars) <= MOST_OPERANDS
        held = rows.length <= longest and rows.number <= _MOST_BLOCKS
        return (
            [Pass(rows.length, _power(rows.length), rows.length, False, False)] if one_key and held else None
        )
    k = eqn.params["k"]
    if not k or (rows.length > longest and k > MOST_KEPT):
        return None
    part = min(longest, max(_SELECTED_FROM, _power(8 * k)))
    found, length = [], rows.length
    while length > min(2 * part, longest):
        found.append(Pass(length, part, k, bool(found), True))
        length = found[-1].parts * k
    found.append(Pass(length, _power(length), k, bool(found), False))
    return found if rows.number * found[0].parts <= _MOST_BLOCKS else None


def _power(n: int) -> int:
    return 1 << max(1, (n - 1).bit_length())


class RowSort(LibraryKernel):
    """Sorts and selections by one key."""

    def matches(self, eqn: Eqn) -> bool:
        return passes(eqn) is not None

    def scratch_bytes(self, eqn: Eqn, arch: str) -> int:
        return sum(_between(eqn))

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        return [(source(step.eqn, p), "sort_rows") for p in passes(step.eqn) or ()]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        return planned_work(executor, step, operands, Sort(step.eqn, executor.device))


def _between(eqn: Eqn) -> list[int]:
    """Bytes that each pass hands to the next."""
    found = passes(eqn) or []
    each = 16 if _is_wide(eqn.invars[0].aval.dtype) else 8
    return [each * _rows_of(eqn).number * p.parts * p.kept for p in found[:-1]]


class Sort:
    """The launches of an equation."""

    def __init__(self, eqn: Eqn, device: int):
        self._launches = []
        rows = _rows_of(eqn).number
        for p in passes(eqn) or ():
            grid = (rows * p.parts, 1, 1)
            text = CudaSource(source(eqn, p), "sort_rows", grid, (p.threads, 1, 1))
            parameters = 2 if p.to_keys else 1 + len(eqn.invars) + len(eqn.outvars)
            self._launches.append(modules.load_source(text, device).prepare([0] * parameters))
        self._between = _between(eqn)

    def __call__(self, operands: Sequence[int], outs: Sequence[int], scratch: int, stream: int) -> None:
        """Put it on a stream, given addresses."""
        given = operands[0]
        for (launch, addresses), size in zip(self._launches, [*self._between, None], strict=True):
            to = [*operands, *outs] if size is None else [scratch]
            for i, address in enumerate((given, *to)):
                addresses[i] = address
            launch(stream)
            if size is not None:
                given, scratch = scratch, scratch + size


def source(eqn: Eqn, p: Pass) -> str:
    """CUDA C++ of one launch.

    Its parameters are what it sorts, then elements for the next pass, or all operands and results.
    """
    key, rows = eqn.invars[0].aval, _rows_of(eqn)
    constants = source_files.declared(
        LENGTH=p.length, PART=p.part, PARTS=p.parts, KEPT=p.kept, STRIDE=rows.stride, THREADS=p.threads,
        DESCENDING=eqn.prim is top_k_p, FROM_KEYS=p.from_keys,
        Storage=scalar_ops.storage_type(key.dtype),
        Ordered="unsigned long long" if _is_wide(key.dtype) else "unsigned",
    )  # fmt: skip
    number = {"int64": "(long long)x", "uint64": "(unsigned long long)x"}.get(key.dtype.name)
    loaded = number or scalar_ops.loaded("x", key.dtype)
    text = constants + source_files.source(_FILE, **{"LOADED(x)": loaded})
    return DEVICE.with_prelude(text + _kernel(eqn, p, rows))


def _kernel(eqn: Eqn, p: Pass, rows: _Rows) -> str:
    if p.to_keys:
        parameters = ["Element *out"]
        takes = [f"out[((size_t)row * {p.parts} + blockIdx.x % {p.parts}) * {p.kept} + i] = e;"]
    else:
        moved = [_MOVED[v.aval.dtype.itemsize] for v in eqn.invars]
        parameters = [f"const {t} *x{n}" for n, t in enumerate(moved)]
        length, inner = rows.length, rows.stride
        takes = [
            f"size_t from = ((size_t)row / {inner} * {length} + e.place) * {inner} + row % {inner};",
            f"size_t to = ((size_t)row / {inner} * {p.kept} + i) * {inner} + row % {inner};",
            *(f"out{n}[to] = x{n}[from];" for n in range(len(moved))),
        ]
        parameters += [f"{t} *out{n}" for n, t in enumerate(moved)]
        if eqn.prim is top_k_p:
            parameters.append("int *index")
            takes.append("index[to] = e.place;")
    lines = [
        f'extern "C" __global__ void __launch_bounds__({p.threads})',
        f"sort_rows(const void *given, {', '.join(parameters)}) {{",
        f"  __shared__ Element part[{p.part}];",
        "  sort_part(given, part, [&](unsigned row, unsigned i, Element e) {",
        *(f"    {line}" for line in takes),
        "  });",
        "}",
    ]
    return "\n".join(lines) + "\n"
