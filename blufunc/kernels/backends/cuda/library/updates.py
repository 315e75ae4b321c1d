"""Updates of a few windows of an array, in its memory where it dies.

Kernels, stages 6 to 8, for ``scatter``, ``scatter_add`` and window updates. In: an array, starts of windows, and what
to write there. Out: one launch that writes the windows alone, after a copy of the array unless the plan puts the result
where it was. A thread takes the same element of every window, in their order, so results are deterministic. Scatters of
many windows are sorted (``scatter.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.gather_scatter import scatter_add_p, scatter_p
from blufunc.core.ops.windows import GatherScatterMode, window_sizes
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.render.source import KERNEL_PARTS
from blufunc.kernels.codegen import source_files
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.ops.gemm import overwritten_by
from blufunc.kernels.ops.updates import UPDATES
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.user_kernel import CudaSource

MOST_WINDOWS = 64
"""Windows that one thread writes in turn, at most."""

THREADS, _BLOCKS = 256, 1056

_RAW = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "longlong2"}
"""C++ types of elements that are moved."""

_ADDED = {
    np.dtype(name): kind
    for name, kind in (
        ("float32", "float"), ("float64", "double"), ("int32", "unsigned"), ("uint32", "unsigned"),
        ("int64", "unsigned long long"), ("uint64", "unsigned long long"),
    )
}  # fmt: skip
"""C++ types of sums, by dtype.

Shorter floats are summed in float32, which takes more memory than the result has.
"""


def is_update(eqn: Eqn) -> bool:
    """True for equations that this kernel computes."""
    if eqn.prim in UPDATES:
        return all(v.aval.size for v in eqn.invars)
    if eqn.prim not in (scatter_p, scatter_add_p) or not all(v.aval.size for v in eqn.invars):
        return False
    x, indices, updates = (v.aval for v in eqn.invars)
    if eqn.prim is scatter_add_p and x.dtype not in _ADDED:
        return False
    numbers = eqn.params["dimension_numbers"]
    count = math.prod(indices.shape[:-1])
    sizes = window_sizes(x.shape, updates.shape, numbers)
    # of windows that could overlap in part, an element would belong to several threads
    disjoint = count == 1 or all(sizes[axis] == 1 for axis in numbers.scatter_dims_to_operand_dims)
    return count <= MOST_WINDOWS and disjoint and not numbers.operand_batching_dims


def overwritten(eqn: Eqn) -> list[tuple[int, int]]:
    """Results of a step, and the operands that they may overwrite."""
    return [(0, 0)] if is_update(eqn) else overwritten_by(eqn)


class Kernel:
    """The launch of an equation, which works on a copy of its first operand."""

    def __init__(self, eqn: Eqn, device: int):
        blocks = max(1, min(_BLOCKS, -(-_window(eqn) // THREADS)))
        text = CudaSource(source(eqn), "update", (blocks, 1, 1), (THREADS, 1, 1))
        self._launch, self._addresses = modules.load_source(text, device).prepare([0] * len(eqn.invars))

    def __call__(self, operands: Sequence[int], out: int, stream: int) -> None:
        """Put it on a stream, given addresses of the operands but the first."""
        for i, address in enumerate((*operands, out)):
            self._addresses[i] = address
        self._launch(stream)


class WindowUpdate(LibraryKernel):
    """A few windows of an array."""

    def matches(self, eqn: Eqn) -> bool:
        return is_update(eqn)

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        return [(source(step.eqn), "update")]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        kernel = Kernel(step.eqn, executor.device)
        (result,) = step.results
        assert result is not None
        place, nbytes = executor.roots.place(result), step.eqn.invars[0].aval.nbytes
        in_place = all(o.in_place for o in operands)

        def run(executor: Executor) -> None:
            located = [o.located(executor, o.in_place) for o in operands]  # copies live until they are read
            x, *others = (address for address, _ in located)
            out = executor.address(place)
            if x != out:
                driver.copy_on_device(out, x, nbytes, executor.work_stream())
            kernel(others, out, executor.stream)

        return Work(run, step.eqn.prim.name, step, anywhere=lambda: in_place, ends_in_kernel=True)


def _window(eqn: Eqn) -> int:
    """Elements of a window."""
    if eqn.prim in UPDATES:
        return eqn.invars[1].aval.size
    _, indices, updates = (v.aval for v in eqn.invars)
    return updates.size // math.prod(indices.shape[:-1])


def source(eqn: Eqn) -> str:
    """CUDA C++ of the kernel of an equation.

    Its parameters are the operands but the first, and the result.
    """
    x, *others = (v.aval for v in eqn.invars)
    x_strides = strides_of(x.shape)
    if eqn.prim in UPDATES:
        updates, *starts = others
        sizes, axes, batch = updates.shape, tuple(range(x.ndim)), ()
        window_dims = axes
        given = [f"const {_index(a.dtype)} *start{d}" for d, a in enumerate(starts)]
        parameters = ["const T *updates", *given]
        loaded = {d: f"*start{d}" for d in axes}
        drops = False
    else:
        indices, updates = others
        numbers = eqn.params["dimension_numbers"]
        sizes, batch = window_sizes(x.shape, updates.shape, numbers), indices.shape[:-1]
        axes = numbers.scatter_dims_to_operand_dims
        window_dims = numbers.update_window_dims
        parameters = [f"const {_index(indices.dtype)} *indices", "const T *updates"]
        loaded = {axis: f"indices[b * {len(axes)} + {k}]" for k, axis in enumerate(axes)}
        drops = eqn.params["mode"] is not GatherScatterMode.CLIP
    adds = eqn.prim is scatter_add_p
    kept = [a for a in range(x.ndim) if eqn.prim in UPDATES or a not in numbers.inserted_window_dims]
    update_strides = strides_of(updates.shape)
    batch_dims = [d for d in range(updates.ndim) if d not in window_dims]
    window = [
        (sizes[a], f"{x_strides[a]}LL", f"{update_strides[u]}LL")
        for a, u in zip(kept, window_dims, strict=True)
    ]
    count = math.prod(batch)
    overlap = source_files.source(KERNEL_PARTS, "let_next_kernel_begin")
    lines = [
        overlap,
        f"typedef {_ADDED[x.dtype] if adds else _RAW[x.dtype.itemsize]} T;",
        f'extern "C" __global__ void update({", ".join(parameters)}, T *out) {{',
        "  let_next_kernel_begin();",
        f"  for (long long w = blockIdx.x * {THREADS}LL + threadIdx.x; w < {math.prod(sizes)}LL; "
        f"w += gridDim.x * {THREADS}LL) {{",
        "    long long rest = w, inside = 0, from = 0;",
        *_decoded(window, ("inside", "from")),
        f"    for (int b = 0; b < {count}; ++b) {{",
        "      long long at = inside, source = from;",
    ]
    if count > 1:
        lines.append("      int rest = b;")
        lines += _decoded(
            [(n, f"{update_strides[d]}LL") for n, d in zip(batch, batch_dims, strict=True)], ("source",)
        )
    for axis in axes:
        bound = x.shape[axis] - sizes[axis]
        lines.append(f"      long long s{axis} = {_signed(loaded[axis], eqn, axis)};")
        if drops:
            lines.append(f"      if (s{axis} < 0 || s{axis} > {bound}) continue;")
        else:
            lines.append(f"      s{axis} = s{axis} < 0 ? 0 : s{axis} > {bound} ? {bound} : s{axis};")
        lines.append(f"      at += s{axis} * {x_strides[axis]}LL;")
    lines += [f"      out[at] {'+=' if adds else '='} updates[source];", "    }", "  }", "}"]
    return "\n".join(lines) + "\n"


def _decoded(dims: Sequence[tuple], names: Sequence[str]) -> list[str]:
    """Statements that add the offsets of element ``rest`` of a box to variables."""
    lines = []
    for n, *strides in reversed(dims):
        if n == 1:
            continue
        adds = " ".join(
            f"{name} += rest % {n} * {stride};" for name, stride in zip(names, strides, strict=True)
        )
        lines.append(f"    {adds} rest /= {n};")
    return lines


def _index(dtype: np.dtype) -> str:
    kind = {1: "char", 2: "short", 4: "int", 8: "long long"}[dtype.itemsize]
    return f"{'unsigned' if dtypes.is_unsigned(dtype) else 'signed'} {kind}"


def _signed(value: str, eqn: Eqn, axis: int) -> str:
    """An index as a signed number; those beyond are the largest."""
    dtype = (eqn.invars[2 + axis] if eqn.prim in UPDATES else eqn.invars[1]).aval.dtype
    if dtype != np.dtype(np.uint64):
        return value
    return f"(long long)({value} > 0x7fffffffffffffffULL ? 0x7fffffffffffffffULL : {value})"
