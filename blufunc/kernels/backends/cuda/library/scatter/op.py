"""Row scatters on a CUDA device: equations, and the choice of an algorithm.

Kernels, stage 8, below ``cupy_ops``. In: an array, row indices and rows of updates. Out: a ``Work``, or the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.gather_scatter import (
    scatter_add_p,
    scatter_max_p,
    scatter_min_p,
    scatter_mul_p,
    scatter_p,
)
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.library.scatter import atomics, bins, partitions, rows
from blufunc.kernels.backends.cuda.library.scatter.common import Own, takes
from blufunc.kernels.backends.cuda.library.scatter.rows import Rows
from blufunc.kernels.schedule import OpaqueStep


def prepared(
    how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, device: int, own: Own,
    clip: bool = False,
) -> Rows | bins.Bins | atomics.Atomics | partitions.Partitions:  # fmt: skip
    """Scratch and launches of a scatter; ``Args`` as of ``rows.Rows``."""
    made: Any = Rows
    if bins.suits(how, dtype, n, height, width):
        made = bins.Bins
    elif atomics.suits(how, dtype):
        made = atomics.Atomics
    elif partitions.suits(how, dtype, n, height, width):
        made = partitions.Partitions
    return made(how, dtype, index, n, height, width, device, own, clip)


def texts(
    how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, clip: bool
) -> list[modules.Text]:
    """The sources that ``prepared`` compiles, and their names."""
    if bins.suits(how, dtype, n, height, width):
        return bins.texts(how, dtype, index, clip)
    if atomics.suits(how, dtype):
        return atomics.texts(how, dtype, index, clip)
    if partitions.suits(how, dtype, n, height, width):
        return partitions.texts(how, dtype, index, height, clip)
    return rows.texts(how, dtype, index, n, height, width, clip)


def rows_of(eqn: Eqn) -> tuple[str, int] | None:
    """Reduction and row width of an equation on whole rows; None for any other."""
    if eqn.prim not in _WAYS or not takes(_WAYS[eqn.prim], eqn.invars[0].aval.dtype):
        return None
    x, indices, updates = (a.aval for a in eqn.invars)
    if indices.dtype not in (dtypes.int32, dtypes.int64):
        return None
    d = eqn.params["dimension_numbers"]
    rest = tuple(range(updates.ndim - (x.ndim - 1), updates.ndim))
    plain = (
        d.scatter_dims_to_operand_dims == (0,)
        and d.inserted_window_dims == (0,)
        and not d.operand_batching_dims
        and d.update_window_dims == rest
        and updates.shape[len(updates.shape) - len(rest) :] == x.shape[1:]
        and indices.shape[-1] == 1
        and x.size
        and updates.size
        and max(indices.size, x.shape[0], x.size // x.shape[0]) < 1 << 31  # kernels count in int32
    )
    return (_WAYS[eqn.prim], x.size // x.shape[0]) if plain else None


_WAYS = {
    scatter_p: "set",
    scatter_add_p: "add",
    scatter_mul_p: "mul",
    scatter_max_p: "max",
    scatter_min_p: "min",
}


class RowScatter(LibraryKernel):
    """Updates of whole rows, combined in their order."""

    def matches(self, eqn: Eqn) -> bool:
        return rows_of(eqn) is not None

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        how, width = rows_of(step.eqn)  # type: ignore[misc]
        x, indices, _ = (a.aval for a in step.eqn.invars)
        return texts(how, x.dtype, indices.dtype, indices.size, x.shape[0], width, _clips(step.eqn))

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        eqn = step.eqn
        how, width = rows_of(eqn)  # type: ignore[misc]
        x, indices, _ = (a.aval for a in eqn.invars)
        own = lambda shape, dtype: executor.own(ShapedArray(shape, dtype), "the order of a scatter")
        scatter = prepared(
            how, x.dtype, indices.dtype, indices.size, x.shape[0], width, executor.device, own, _clips(eqn)
        )
        (result,) = step.results
        assert result is not None
        place = executor.roots.place(result)

        def run(executor: Executor) -> None:
            given = [o.buffer(executor) for o in operands]  # copies live until they have been read
            x, at, updates = (b.ptr for b in given)
            scatter(x, at, updates, executor.address(place), executor.work_stream())

        return Work(run, eqn.prim.name, step, anywhere=lambda: all(o.in_place for o in operands))


def _clips(eqn: Eqn) -> bool:
    """True if an index out of range means the nearest row."""
    return eqn.params["mode"] is GatherScatterMode.CLIP


def scatter(x: Any, at: Any, updates: Any, how: str, dtype: np.dtype, library: Any, device: int) -> Any:
    """``x`` (height, width) with ``updates`` (n, width) combined into rows.

    Args:
      x, updates: CuPy arrays, contiguous, holding the bits of ``dtype``.
      at: CuPy array (n,): rows, of int32 or int64; indices out of range are dropped.
      how: a key of ``COMBINE``.
      library: CuPy, for memory.
    Returns:
      a CuPy array like ``x``.
    """
    own = lambda shape, of: _Array(library.xp.empty(shape, of))
    height, width = x.shape
    run = prepared(how, dtype, at.dtype, len(at), height, width, device, own)
    out = library.xp.empty_like(x)
    array, rows, given, result = (int(a.data.ptr) for a in (x, at, updates, out))
    run(array, rows, given, result, driver.work_stream(device))
    return out


class _Array:
    """A CuPy array as scratch memory."""

    def __init__(self, array: Any):
        self.array, self.ptr, self.nbytes = array, int(array.data.ptr), array.nbytes
