"""Updates of a few windows of an array, in its memory where it dies.

Kernels, stages 6 to 8, for ``scatter``, ``scatter_add`` and window updates, joined ones too. In: arrays, starts of
windows, and what to write there. Out: one launch that writes the windows alone, after a copy of the array unless the
plan puts the result where it was. A thread takes the same element of every window, in their order, so results are
deterministic; of windows that are promised to be different, each element has a thread. Scatters of many windows
without that promise are sorted (``scatter``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.gather_scatter import scatter_add_p, scatter_p
from blufunc.core.ops.windows import GatherScatterMode, window_sizes
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Strided, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel, layout_of
from blufunc.kernels.backends.cuda.render.source import KERNEL_PARTS, OVERLAP
from blufunc.kernels.codegen import source_files
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.ops.gemm import overwritten_by
from blufunc.kernels.ops.updates import UPDATES, joined_updates_p, operands_of, update_in_place_p
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.user_kernel import CudaSource

ENTRY = "update"

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
    if eqn.prim in (*UPDATES, joined_updates_p):
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
    few = count <= MOST_WINDOWS or _is_unique(eqn)
    return few and disjoint and not numbers.operand_batching_dims


def _is_unique(eqn: Eqn) -> bool:
    """True if no two windows are the same, so that their order does not matter."""
    return eqn.prim is scatter_p and eqn.params["unique_indices"]


def overwritten(eqn: Eqn) -> list[tuple[int, int]]:
    """Results of a step, and the operands that they may overwrite."""
    if not is_update(eqn):
        return overwritten_by(eqn)
    return list(enumerate(itertools.accumulate([len(u.invars) for u in _each(eqn)[:-1]], initial=0)))


def _each(eqn: Eqn) -> list[Eqn]:
    """The updates of an equation, one per array."""
    if eqn.prim is not joined_updates_p:
        return [eqn]
    pairs = zip(operands_of(eqn.invars), eqn.outvars, strict=True)
    return [Eqn(update_in_place_p, invars, [v], eqn.params, eqn.source) for invars, v in pairs]


class Kernel:
    """The launch of an equation, which works on copies of its arrays.

    Args:
      layouts: of what is written, by array.
    """

    def __init__(self, eqn: Eqn, layouts: Sequence[Strided], device: int):
        each = _each(eqn)
        blocks = max(max(1, min(_BLOCKS, -(-_elements(e) // THREADS))) for e in each)
        text = CudaSource(source(eqn, layouts), ENTRY, (blocks, len(each), 1), (THREADS, 1, 1))
        self._launch, self._addresses = modules.load_source(text, device).prepare([0] * len(eqn.invars))

    def __call__(self, addresses: Sequence[int], stream: int, overlaps: bool = False) -> None:
        """Put it on a stream.

        Args:
          addresses: of each array in turn the other operands, and the result.
          overlaps: whether it may begin ahead of the end of the preceding kernel.
        """
        for i, address in enumerate(addresses):
            self._addresses[i] = address
        self._launch(stream, overlaps)


class WindowUpdate(LibraryKernel):
    """A few windows of an array, or of several."""

    def matches(self, eqn: Eqn) -> bool:
        return is_update(eqn)

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        return [(source(step.eqn, [layout_of(step, n) for n in _written(step.eqn)]), ENTRY)]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        written = _written(step.eqn)
        kernel = Kernel(step.eqn, [operands[n].layout for n in written], executor.device)
        sizes = [e.invars[0].aval.nbytes for e in _each(step.eqn)]
        results = Results(executor, step)
        arrays = [n for _, n in overwritten(step.eqn)]
        strided = [(o, n in written or o.in_place) for n, o in enumerate(operands)]
        in_place = all(direct for _, direct in strided)

        def run(executor: Executor) -> None:
            located = [
                o.located(executor, direct) for o, direct in strided
            ]  # copies live until they are read
            outs, overlaps = results.addresses(executor), executor.follows_kernel and in_place
            addresses = [address for address, _ in located]
            for n, out, nbytes in zip(arrays, outs, sizes, strict=True):
                if addresses[n] != out:
                    driver.copy_on_device(out, addresses[n], nbytes, executor.work_stream())
                    overlaps = False
            for n, end, out in zip(arrays, [*arrays[1:], len(addresses)], outs, strict=True):
                addresses[n:end] = [*addresses[n + 1 : end], out]
            kernel(addresses, executor.stream, overlaps)

        return Work(run, step.eqn.prim.name, step, anywhere=lambda: in_place, ends_in_kernel=True)


def _written(eqn: Eqn) -> list[int]:
    """Positions of the operands that are written to windows."""
    after = 1 if eqn.prim in (*UPDATES, joined_updates_p) else 2
    return [n + after for _, n in overwritten(eqn)]


def _elements(eqn: Eqn) -> int:
    """Elements that have a thread: those of a window, or of all."""
    if eqn.prim in UPDATES:
        return eqn.invars[1].aval.size
    _, indices, updates = (v.aval for v in eqn.invars)
    return updates.size if _is_unique(eqn) else updates.size // math.prod(indices.shape[:-1])


def source(eqn: Eqn, layouts: Sequence[Strided]) -> str:
    """CUDA C++ of the kernel of an equation.

    Its parameters are, of each array, the operands but the first, and the result.

    Args:
      layouts: of what is written, by array.
    """
    each = _each(eqn)
    parameters, lines = [], []
    for n, (e, layout) in enumerate(zip(each, layouts, strict=True)):
        own, body = _update(e, layout, f"_{n}" if len(each) > 1 else "")
        parameters += own
        lines += (
            [f"  if (blockIdx.y == {n}) {{", *(f"  {line}" for line in body), "  }"]
            if len(each) > 1
            else body
        )
    overlap = source_files.source(KERNEL_PARTS, *OVERLAP)
    begin = f'extern "C" __global__ void {ENTRY}({", ".join(parameters)}) {{'
    return (
        "\n".join(
            [overlap, begin, "  let_next_kernel_begin();", "  wait_for_previous_kernel();", *lines, "}"]
        )
        + "\n"
    )


def _update(eqn: Eqn, layout: Strided, suffix: str) -> tuple[list[str], list[str]]:
    """Parameters of one array, whose names end in ``suffix``, and its statements."""
    x, *others = (v.aval for v in eqn.invars)
    x_strides = strides_of(x.shape)
    kind = _ADDED[x.dtype] if eqn.prim is scatter_add_p else _RAW[x.dtype.itemsize]
    updates = others[0] if eqn.prim in UPDATES else others[1]
    given = f"const {kind} *updates{suffix}"
    if eqn.prim in UPDATES:
        sizes, axes, batch = updates.shape, tuple(range(x.ndim)), ()
        window_dims = axes
        starts = [f"const {_index(a.dtype)} *start{d}{suffix}" for d, a in enumerate(others[1:])]
        parameters = [given, *starts]
        loaded = {d: f"*start{d}{suffix}" for d in axes}
        drops = False
    else:
        indices, _ = others
        numbers = eqn.params["dimension_numbers"]
        sizes, batch = window_sizes(x.shape, updates.shape, numbers), indices.shape[:-1]
        axes = numbers.scatter_dims_to_operand_dims
        window_dims = numbers.update_window_dims
        parameters = [f"const {_index(indices.dtype)} *indices{suffix}", given]
        loaded = {axis: f"indices{suffix}[b * {len(axes)} + {k}]" for k, axis in enumerate(axes)}
        drops = eqn.params["mode"] is not GatherScatterMode.CLIP
    adds = eqn.prim is scatter_add_p
    kept = [a for a in range(x.ndim) if eqn.prim in UPDATES or a not in numbers.inserted_window_dims]
    batch_dims = [d for d in range(updates.ndim) if d not in window_dims]
    window = [
        (sizes[a], f"{x_strides[a]}LL", f"{layout.strides[u]}LL")
        for a, u in zip(kept, window_dims, strict=True)
    ]
    count, size = math.prod(batch), math.prod(sizes)
    together = _is_unique(eqn)
    lines = [
        f"  for (long long w = blockIdx.x * {THREADS}LL + threadIdx.x; w < {size * count if together else size}LL; "
        f"w += gridDim.x * {THREADS}LL) {{",
        f"    long long rest = {f'w % {size}' if together else 'w'}, inside = 0, from = 0;",
        *_decoded(window, ("inside", "from")),
        f"    for (int b = w / {size}, end = b + 1; b < end; ++b) {{"
        if together
        else f"    for (int b = 0; b < {count}; ++b) {{",
        "      long long at = inside, source = from;",
    ]
    if count > 1:
        lines.append("      int rest = b;")
        lines += _decoded(
            [(n, f"{layout.strides[d]}LL") for n, d in zip(batch, batch_dims, strict=True)], ("source",)
        )
    for axis in axes:
        bound = x.shape[axis] - sizes[axis]
        lines.append(f"      long long s{axis} = {_signed(loaded[axis], eqn, axis)};")
        if drops:
            lines.append(f"      if (s{axis} < 0 || s{axis} > {bound}) continue;")
        else:
            lines.append(f"      s{axis} = s{axis} < 0 ? 0 : s{axis} > {bound} ? {bound} : s{axis};")
        lines.append(f"      at += s{axis} * {x_strides[axis]}LL;")
    lines += [f"      out{suffix}[at] {'+=' if adds else '='} updates{suffix}[source];", "    }", "  }"]
    return [*parameters, f"{kind} *out{suffix}"], lines


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
