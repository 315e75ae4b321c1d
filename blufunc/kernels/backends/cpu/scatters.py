"""Scatters and window updates as C++ loops, in the operand's memory where it dies.

Kernels, stage 6 on the CPU. In: the equation of a scatter of any kind or of a window update, and how its operands lie
in memory. Out: statements. Updates are applied in row-major order of the indices, as by NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.gather_scatter import (
    scatter_add_p,
    scatter_max_p,
    scatter_min_p,
    scatter_mul_p,
    scatter_p,
)
from blufunc.core.ops.windows import GatherScatterMode, as_gather, window_sizes
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.loopir.index import strides_of

_COMBINED = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "uint32", "uint64")))
"""Dtypes that are combined natively; NumPy sums smaller ones in a wider type."""

_COMBINATIONS = {
    scatter_p: "",
    scatter_add_p: "to[i] += from[i];",
    scatter_mul_p: "to[i] *= from[i];",
    # an update that is NaN wins, and a NaN stays
    scatter_min_p: "to[i] = from[i] < to[i] || from[i] != from[i] ? from[i] : to[i];",
    scatter_max_p: "to[i] = from[i] > to[i] || from[i] != from[i] ? from[i] : to[i];",
}
"""Statements that combine an element with an update; empty: it is replaced."""


def is_native(eqn: Eqn) -> bool:
    """True for a scatter that ``scattered`` can write."""
    if eqn.prim not in _COMBINATIONS or is_replaced(eqn.prim, "impl"):
        return False
    if not all(v.aval.size for v in eqn.invars):
        return False
    return eqn.prim is scatter_p or eqn.invars[0].aval.dtype in _COMBINED


class Place(NamedTuple):
    """An operand in memory.

    Attributes:
      address: C++ expression of the address of its first element, a ``char *``.
      strides: in bytes.
    """

    address: str
    strides: tuple[int, ...]


def scattered(eqn: Eqn, x: Place, indices: Place, updates: Place, result: str) -> Iterator[str]:
    """Statements of a scatter; ``result`` is the address of its result, in order."""
    p = eqn.params
    x_aval, i_aval, u_aval = (v.aval for v in eqn.invars)
    numbers = p["dimension_numbers"]
    sizes = window_sizes(x_aval.shape, u_aval.shape, numbers)
    gathers = as_gather(numbers)
    to = _bytes_between(x_aval)
    yield from copied(x, result, x_aval.shape, x_aval.dtype.itemsize)
    batch = i_aval.shape[:-1]
    batch_axes = [a for a in range(u_aval.ndim) if a not in numbers.update_window_dims]
    base, source = [result], [updates.address]
    for d, (n, axis) in enumerate(zip(batch, batch_axes, strict=True)):
        yield f"for (int64_t b{d} = 0; b{d} < {n}; ++b{d})"
        source.append(f"b{d} * {updates.strides[axis]}")
    along = zip(gathers.operand_batching_dims, gathers.start_indices_batching_dims, strict=True)
    base.extend(f"b{d} * {to[axis]}" for axis, d in along)
    at = [f"b{d} * {indices.strides[d]}" for d in range(len(batch))]
    starts = []
    for c, axis in enumerate(gathers.start_index_map):
        where = " + ".join([indices.address, *at, str(c * indices.strides[-1])])
        starts.append((axis, _loaded(i_aval.dtype, where)))
    windows = [
        (sizes[axis], to[axis], updates.strides[u])
        for u, axis in zip(numbers.update_window_dims, _window_axes(x_aval.ndim, numbers), strict=True)
    ]
    bounds = {axis: x_aval.shape[axis] - sizes[axis] for axis, _ in starts}
    drops = p["mode"] is not GatherScatterMode.CLIP
    combines = _COMBINATIONS[eqn.prim]
    dtype = _c_type(x_aval.dtype, eqn.prim in (scatter_min_p, scatter_max_p)) if combines else ""
    yield "{"
    yield from _window(
        starts, bounds, to, base, source, windows, x_aval.dtype.itemsize, drops, dtype, combines
    )
    yield "}"


def updated(eqn: Eqn, x: Place, update: Place, starts: Sequence[Place], result: str) -> Iterator[str]:
    """Statements of a ``dynamic_update_slice``."""
    x_aval, u_aval, *s_avals = (v.aval for v in eqn.invars)
    to = _bytes_between(x_aval)
    yield from copied(x, result, x_aval.shape, x_aval.dtype.itemsize)
    given = [(d, _loaded(a.dtype, s.address)) for d, (s, a) in enumerate(zip(starts, s_avals, strict=True))]
    bounds = {d: n - m for d, (n, m) in enumerate(zip(x_aval.shape, u_aval.shape, strict=True))}
    windows = list(zip(u_aval.shape, to, update.strides, strict=True))
    yield from _window(given, bounds, to, [result], [update.address], windows, x_aval.dtype.itemsize, False)


def copied(x: Place, result: str, shape: tuple[int, ...], itemsize: int) -> Iterator[str]:
    """Statements that copy an operand to the result, if it is not there."""
    windows = list(zip(shape, [s * itemsize for s in strides_of(shape)], x.strides, strict=True))
    loops, run = _loops(windows, itemsize)
    if not loops:
        yield f"copy({result}, {x.address}, {run});"
        return
    heads, to, source = _heads(loops, [result], [x.address])
    yield from heads
    yield f"memcpy({to}, {source}, {run});"


def _c_type(dtype: np.dtype, signed: bool) -> str:
    """The C type of elements; unsigned where sums and products wrap around."""
    if dtype.kind == "f":
        return "float" if dtype.itemsize == 4 else "double"
    return f"{'' if signed and dtype.kind == 'i' else 'u'}int{8 * dtype.itemsize}_t"


def _bytes_between(aval) -> list[int]:
    return [s * aval.dtype.itemsize for s in strides_of(aval.shape)]


def _window_axes(ndim: int, numbers) -> list[int]:
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return [axis for axis in range(ndim) if axis not in removed]


def _loaded(dtype: np.dtype, address: str) -> str:
    """An index as int64; unsigned ones beyond it are the largest."""
    kind = f"{'u' if dtypes.is_unsigned(dtype) else ''}int{8 * dtype.itemsize}_t"
    value = f"*(const {kind} *)({address})"
    return (
        f"(int64_t)({value} > INT64_MAX ? INT64_MAX : {value})"
        if kind == "uint64_t"
        else f"(int64_t)({value})"
    )


Window = tuple[int, int, int]
"""Extent of an axis, and strides in bytes of the destination and of the source."""


def _window(
    starts: Sequence[tuple[int, str]],
    bounds: dict[int, int],
    to: Sequence[int],
    base: Sequence[str],
    source: Sequence[str],
    windows: Sequence[Window],
    itemsize: int,
    drops: bool,
    dtype: str = "",
    combines: str = "",
) -> Iterator[str]:
    """Statements that write one window, or combine it with updates of a C type."""
    base = list(base)
    inside = []
    for n, (axis, start) in enumerate(starts):
        bound = bounds[axis]
        if drops:
            yield f"const int64_t s{n} = {start};"
            inside.append(f"s{n} >= 0 && s{n} <= {bound}")
        else:
            yield f"int64_t s{n} = {start};"
            yield f"s{n} = s{n} < 0 ? 0 : s{n} > {bound} ? {bound} : s{n};"
        base.append(f"s{n} * {to[axis]}")
    if inside:
        yield f"if ({' && '.join(inside)})"
    loops, run = _loops(windows, itemsize)
    heads, target, origin = _heads(loops, base, source)
    yield "{"
    yield from heads
    if not combines:
        yield f"memcpy({target}, {origin}, {run});"
    else:
        yield f"{{ {dtype} *to = ({dtype} *)({target}); const {dtype} *from = (const {dtype} *)({origin});"
        yield f"for (int64_t i = 0; i < {run // itemsize}; ++i) {combines} }}"
    yield "}"


def _loops(windows: Sequence[Window], itemsize: int) -> tuple[list[Window], int]:
    """The loops of a window, and the bytes of the contiguous run inside of them."""
    loops, run = [w for w in windows if w[0] != 1], itemsize
    while loops and loops[-1][1] == loops[-1][2] == run:
        run *= loops.pop()[0]
    return loops, run if math.prod(w[0] for w in windows) else 0


def _heads(loops: Sequence[Window], to: Sequence[str], source: Sequence[str]) -> tuple[list[str], str, str]:
    heads = [f"for (int64_t w{d} = 0; w{d} < {n}; ++w{d})" for d, (n, _, _) in enumerate(loops)]
    to = [*to, *(f"w{d} * {a}" for d, (_, a, _) in enumerate(loops))]
    source = [*source, *(f"w{d} * {b}" for d, (_, _, b) in enumerate(loops))]
    return heads, " + ".join(to), " + ".join(source)
