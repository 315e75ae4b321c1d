"""Factorizations and solves of small matrices, a group of threads for each.

Kernels, stages 6 to 8. In: an equation of ``core.ops.linalg`` whose matrices fit in shared memory. Out: one launch in
planned memory, which a graph can capture. A matrix is read once and its results written once; between, it is in shared
memory. Larger ones are libraries' (``cupy_ops.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.linalg.factor import cholesky_p, lu_p, qr_p
from blufunc.core.ops.linalg.solve import lu_solve_p
from blufunc.core.ops.linalg.spectral import eigh_p, svd_p
from blufunc.core.ops.linalg.triangular import triangular_solve_p
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.backends.cuda.device_model import SM_COUNT, WARP
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel, planned_work
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.user_kernel import CudaSource

MOST_ROWS = 128
"""Rows and columns of a matrix, at most."""

MOST_ROTATED = 32
"""Columns whose pairs one warp rotates, at most."""

_THREADS = 128
"""Threads of a block of groups, at most."""

_SHARED_BYTES = 96 << 10
"""Shared memory of a matrix, at most: every device since sm_80 has it."""

_FEW_SIDES, _SIDES = 8, 64
"""Right hand sides for which a thread has a row, at most.
Beyond, a thread has a column, and a group as many as the second number."""

_SWEEPS = 30
"""Passes over all pairs, at most: 6 to 10 converge."""

_FILES = {"small": "backends/cuda/include/small_matrices.cuh", "jacobi": "backends/cuda/include/jacobi.cuh"}

_SCALARS = {
    dtypes.float32: ("float", "float"),
    dtypes.float64: ("double", "double"),
    dtypes.complex64: ("c64", "float"),
    dtypes.complex128: ("c128", "double"),
}
"""C++ types of elements and of their parts."""


class Small(NamedTuple):
    """The kernel of an equation.

    Attributes:
      name: of its function and of its part of the source.
      parts: of ``small_matrices.cuh``.
      constants: of the source.
      lanes: of a group, before rounding.
      elements, words: of shared memory of a matrix: elements, and 4-byte words besides.
      units: groups with work of their own.
      parameters: types of pointers.
      call: arguments of the function, given a matrix ``n``, its memory ``a`` and whether it ``stores``.
    """

    name: str
    parts: tuple[str, ...]
    constants: dict[str, source_files.Constant]
    lanes: int
    elements: int
    words: int
    units: int
    parameters: tuple[str, ...]
    call: str

    @property
    def group(self) -> int:
        """Threads of a matrix: a power of two up to a warp, or whole warps."""
        return max(4, 1 << (self.lanes - 1).bit_length())

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory of a matrix."""
        size = {"float": 4, "double": 8, "c64": 8, "c128": 16}[str(self.constants["Scalar"])]
        return -(-(self.elements * size + 4 * self.words) // 16) * 16

    @property
    def per_block(self) -> int:
        """Matrices of a block: whole warps of them, and blocks for every SM."""
        if self.group > WARP:
            return 1
        fewest, most = WARP // self.group, _THREADS // self.group
        while most > fewest and (self.units // most < 2 * SM_COUNT or most * self.nbytes > _SHARED_BYTES):
            most //= 2
        return most


def _padded(n: int) -> int:
    """A distance of columns, whose groups of four elements are aligned.

    An odd number of fours: rows of a column-major matrix are stored without more than four conflicts of banks.
    """
    fours = -(-n // 4)
    return 4 * (fours + 1 - fours % 2)


def _odd(n: int) -> int:
    return n | 1


def _batch(shape: Sequence[int]) -> int:
    return math.prod(shape[:-2])


def _cholesky(eqn: Eqn) -> Small | None:
    shape = eqn.invars[0].aval.shape
    n, ld = shape[-1], _padded(shape[-1])
    call = f"cholesky(x0 + n * {n * n}, y0 + n * {n * n}, a, stores);"
    return Small("cholesky", (), {"N": n, "LD": ld}, n, n * ld, 0, _batch(shape), ("Scalar", "Scalar"), call)


def _lu(eqn: Eqn) -> Small | None:
    *_, m, n = shape = eqn.invars[0].aval.shape
    steps, ld = min(m, n), _padded(m)
    call = f"lu(x0 + n * {m * n}, y0 + n * {m * n}, y1 + n * {steps}, y2 + n * {m}, a, stores);"
    constants = {"M": m, "N": n, "STEPS": steps, "LD": ld}
    found = 32 * (
        2 if eqn.invars[0].aval.dtype.itemsize < 8 or eqn.invars[0].aval.dtype == dtypes.complex64 else 4
    )
    return Small(
        "lu", (), constants, m, n * ld, found + m, _batch(shape), ("Scalar", "Scalar", "int", "int"), call
    )


def _sides(n: int, k: int, left: bool) -> tuple[dict, int, int]:
    """Constants, lanes and elements of right hand sides of n rows."""
    by_rows = k <= _FEW_SIDES
    columns = k if by_rows else min(_SIDES, 1 << (k - 1).bit_length())
    ld = _padded(n)
    constants = {"N": n, "K": k, "COLUMNS": columns, "BY_ROWS": by_rows, "LD": ld}
    constants |= {"TO_ROW": k if left else 1, "TO_COLUMN": 1 if left else n}
    return constants, n if by_rows else columns, n * ld + n * (columns + (not by_rows))


def _sided_call(name: str, n: int, constants: dict, arguments: str) -> str:
    k, columns, step = constants["K"], constants["COLUMNS"], constants["TO_COLUMN"]
    return (
        f"const size_t chunk = n % CHUNKS, at = n / CHUNKS * {n * k} + chunk * {columns * step};\n"
        f"  const int count = {k} - int(chunk) * {columns};\n"
        f"  n /= CHUNKS;\n"
        f"  {name}({arguments}, a, stores, count < {columns} ? count : {columns});"
    )


def _triangular_solve(eqn: Eqn) -> Small | None:
    a, b = (v.aval for v in eqn.invars)
    p, n = eqn.params, a.shape[-1]
    left = p["left_side"]
    k = b.shape[-1] if left else b.shape[-2]
    constants, lanes, elements = _sides(n, k, left)
    call = _sided_call("triangular_solve", n, constants, f"x0 + n * {n * n}, x1 + at, y0 + at")
    units = _batch(a.shape) * -(-k // constants["COLUMNS"])
    # of a system with X on the left, op(A) is transposed
    transposed = p["transpose_a"] == left
    constants |= {"LOWER": p["lower"], "UNIT": p["unit_diagonal"]}
    constants |= {"TRANSPOSED": transposed, "CONJUGATED": p["conjugate_a"]}
    return Small(
        "triangular_solve", ("triangles",), constants, lanes, elements, 0, units, ("Scalar",) * 3, call
    )


def _lu_solve(eqn: Eqn) -> Small | None:
    a, _, _, b = (v.aval for v in eqn.invars)
    n, k = b.shape[-2:]
    constants, lanes, elements = _sides(n, k, True)
    call = _sided_call("lu_solve", n, constants, f"x1 + n * {n * n}, x2 + n * {n}, x3 + at, y0 + at")
    units = _batch(a.shape) * -(-k // constants["COLUMNS"])
    constants["TRANSPOSED"] = eqn.params["transposed"]
    types = ("Scalar", "Scalar", "int", "Scalar", "Scalar")
    return Small("lu_solve", ("triangles",), constants, lanes, elements, 0, units, types, call)


def _reflections(m: int, n: int, full: bool) -> dict[str, source_files.Constant]:
    basis = m if full else min(m, n)
    return {"M": m, "N": n, "STEPS": min(m, n), "BASIS": basis, "LD": _odd(n), "LDQ": _odd(basis)}


def _qr(eqn: Eqn) -> Small | None:
    if eqn.params["pivoting"]:
        return None
    *_, m, n = shape = eqn.invars[0].aval.shape
    constants = _reflections(m, n, eqn.params["full_matrices"])
    basis = int(constants["BASIS"])
    elements = m * _odd(n) + min(m, n) + m * _odd(basis)
    call = f"qr(x0 + n * {m * n}, y0 + n * {m * basis}, y1 + n * {basis * n}, a, stores);"
    return Small(
        "qr", ("reflections",), constants, max(n, basis), elements, 0, _batch(shape), ("Scalar",) * 3, call
    )


def _eigh(eqn: Eqn) -> Small | None:
    shape, dtype = eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype
    n, vectors = shape[-1], eqn.params["compute_vectors"]
    if n > MOST_ROTATED:
        return None
    constants = {"N": n, "LD": _odd(n), "VECTORS": vectors, "SWEEPS": _SWEEPS}
    words = n * (3 if dtype in (dtypes.float64, dtypes.complex128) else 2)
    outs = "y0 + n * {0}, y1 + n * {1}" if vectors else "nullptr, y0 + n * {1}"
    call = f"eigh(x0 + n * {n * n}, {outs.format(n * n, n)}, (Scalar *)a, stores);"
    types = ("Scalar", "Scalar", "Real") if vectors else ("Scalar", "Real")
    return Small("eigh", (), constants, WARP, n * _odd(n) * (1 + vectors), words, _batch(shape), types, call)


def _svd(eqn: Eqn) -> Small | None:
    *_, rows, columns = shape = eqn.invars[0].aval.shape
    m, n = max(rows, columns), min(rows, columns)
    vectors, full = eqn.params["compute_uv"], eqn.params["full_matrices"]
    if n > MOST_ROTATED:
        return None
    constants = _reflections(m, n, full and vectors)
    basis = int(constants["BASIS"])
    constants |= {"VECTORS": vectors, "SWEEPS": _SWEEPS, "TURNED": rows < columns, "TALL": _odd(m)}
    elements = m * _odd(n) + n + max(n * _odd(m), m * _odd(basis)) + n * _odd(n)
    words = 4 * n
    left, right = (n * n, basis * m) if rows < columns else (m * basis, n * n)
    outs = "y0 + n * {0}, y1 + n * {1}, y2 + n * {2}" if vectors else "nullptr, y0 + n * {1}, nullptr"
    call = f"svd(x0 + n * {m * n}, {outs.format(left, n, right)}, a, stores);"
    types = ("Scalar", "Scalar", "Real", "Scalar") if vectors else ("Scalar", "Real")
    return Small("svd", ("reflections",), constants, WARP, elements, words, _batch(shape), types, call)


_KERNELS: dict[Primitive, Callable[[Eqn], Small | None]] = {
    cholesky_p: _cholesky,
    lu_p: _lu,
    triangular_solve_p: _triangular_solve,
    lu_solve_p: _lu_solve,
    qr_p: _qr,
    eigh_p: _eigh,
    svd_p: _svd,
}


def small(eqn: Eqn) -> Small | None:
    """The kernel of an equation; None if libraries compute it."""
    find = _KERNELS.get(eqn.prim)
    if find is None:
        return None
    matrix, every = eqn.invars[0].aval, (*eqn.invars, *eqn.outvars)
    if not all(v.aval.size for v in every) or max(matrix.shape[-2:]) > MOST_ROWS:
        return None
    if any(dtypes.is_integer(v.aval.dtype) and v.aval.dtype != dtypes.int32 for v in every):
        return None
    found = find(eqn)
    if found is None:
        return None
    scalar, real = _SCALARS[matrix.dtype]
    found = found._replace(constants={**found.constants, "Scalar": scalar, "Real": real, "Wide": "double"})
    return found if found.nbytes <= _SHARED_BYTES and found.units < 1 << 31 else None


def body(found: Small, n_operands: int) -> str:
    """CUDA C++ of a kernel without prelude; its parameters: operands, results."""
    names = [f"x{i}" for i in range(n_operands)]
    names += [f"y{i}" for i in range(len(found.parameters) - n_operands)]
    parameters = [
        f"{'const ' if name[0] == 'x' else ''}{kind} *{name}"
        for kind, name in zip(found.parameters, names, strict=True)
    ]
    rotates = found.name in ("eigh", "svd")
    parts = found.parts if rotates else (*found.parts, found.name)
    files = [source_files.source(_FILES["small"], "scalars", "groups", *parts)]
    if rotates:
        files.append(source_files.source(_FILES["jacobi"], "rotations", found.name))
    constants = {**found.constants, "GROUP": found.group, "PER_BLOCK": found.per_block, "BYTES": found.nbytes}
    lines = [
        f'extern "C" __global__ void __launch_bounds__({found.group * found.per_block})',
        f"small_{found.name}({', '.join(parameters)}) {{",
        "  extern __shared__ __align__(16) unsigned char shared_memory[];",
        "  size_t n = own_unit();",
        f"  const bool stores = n < {found.units};",
        f"  if (!stores) n = {found.units - 1};",
        "  Scalar *a = (Scalar *)(shared_memory + threadIdx.x / GROUP * BYTES);",
        f"  {found.call}",
        "}",
    ]
    return source_files.declared(**constants) + "\n".join([*files, *lines]) + "\n"


def source(found: Small, n_operands: int) -> str:
    """A complete source."""
    return DEVICE.with_prelude(body(found, n_operands))


def kernel(eqn: Eqn, found: Small) -> CudaSource:
    """The launch of an equation."""
    grid = (-(-found.units // found.per_block), 1, 1)
    block = (found.group * found.per_block, 1, 1)
    text = source(found, len(eqn.invars))
    return CudaSource(text, f"small_{found.name}", grid, block, found.nbytes * found.per_block)


class Launch:
    """The launch of an equation, given addresses."""

    def __init__(self, eqn: Eqn, device: int):
        found = small(eqn)
        assert found is not None
        parameters = [0] * (len(eqn.invars) + len(eqn.outvars))
        self._launch, self._addresses = modules.load_source(kernel(eqn, found), device).prepare(parameters)

    def __call__(self, operands: Sequence[int], outs: Sequence[int], scratch: int, stream: int) -> None:
        """Put it on a stream."""
        for i, address in enumerate((*operands, *outs)):
            self._addresses[i] = address
        self._launch(stream)


class SmallMatrices(LibraryKernel):
    """Linear algebra of matrices that fit in shared memory."""

    def matches(self, eqn: Eqn) -> bool:
        return small(eqn) is not None

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        found = small(step.eqn)
        assert found is not None
        return [(source(found, len(step.eqn.invars)), f"small_{found.name}")]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        return planned_work(executor, step, operands, Launch(step.eqn, executor.device))
