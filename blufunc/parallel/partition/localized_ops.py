"""Local forms of operations whose values depend on the position of a share.

Parallel, stage 3, below ``partition.py``. In: the local operands of an equation, and the layouts of its results. Out:
operations on shares, staged into the local program. Rules (``core.primitives.sharding``) name these forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.gather_scatter import gather_fill
from blufunc.core.ops.random_bits import random_fold_in_p, random_unwrap_p
from blufunc.core.ops.reduce import reduce_or_p
from blufunc.core.ops.shape import concatenate_p, iota_p, slice_in_dim
from blufunc.core.ops.windows import GatherScatterMode, window_sizes
from blufunc.core.primitives.linear_ops import broadcast_in_dim, broadcast_in_dim_p, broadcast_to, reshape
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.partition.dim_groups import Node
from blufunc.parallel.partition.resharding import Layout, Resharder


def _iota(to, eqn, node, operands, params, results):
    """Count from the start of the share."""
    d, dtype = params["dimension"], params["dtype"]
    out = eqn.prim.bind(**params)
    axes = results[0][d]
    if not axes:
        return [out]
    start = to.start(eqn.params["shape"][d], axes)
    return [ew.add(out, broadcast_to(ew.convert(start, dtype), out.aval.shape))]


def _shifted(
    to: Resharder,
    indices: Any,
    index_map: Sequence[int],
    tops: Sequence[int],
    shape: tuple[int, ...],
    layout: Layout,
    clip: bool,
) -> tuple[Any, Any]:
    """Indices relative to the table's share along sharded dimensions; absolute ones.

    ``tops`` are the last valid starts of a window in the whole table.
    """
    if indices.aval.dtype.itemsize < 4:
        indices = ew.convert(indices, dtypes.int32)
    dtype = indices.aval.dtype
    starts = [to.start(shape[d], layout[d], dtype) if layout[d] else scalar(0, dtype) for d in index_map]
    if clip:
        top = _row([scalar(n, dtype) for n in tops], indices.aval.shape)
        indices = ew.clamp(broadcast_to(scalar(0, dtype), top.aval.shape), indices, top)
    return ew.sub(indices, _row(starts, indices.aval.shape)), indices


def _tops(index_map: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The last valid start of a window of ``sizes`` along each indexed dimension."""
    return [shape[d] - sizes[d] for d in index_map]


def _row(numbers: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """An array of ``shape`` with ``numbers`` along the last dimension."""
    ones = [broadcast_in_dim_p.bind(x, shape=(*shape[:-1], 1), dims=()) for x in numbers]
    return ones[0] if len(ones) == 1 else concatenate_p.bind(*ones, dimension=len(shape) - 1)


def _gather(to, eqn, node, operands, params, results):
    """Look up a table's share; the result, 0 for rows elsewhere, is unreduced."""
    x, indices = operands
    numbers, mode = params["dimension_numbers"], params["mode"]
    shape = eqn.invars[0].aval.shape
    layout = node.layouts(node.rule.operands[:1], to.mesh)[0]
    divided = tuple(a for d in numbers.start_index_map for a in layout[d])
    if not divided:
        return [eqn.prim.bind(x, indices, **params)]
    drops = mode is GatherScatterMode.FILL_OR_DROP
    tops = _tops(numbers.start_index_map, shape, eqn.params["slice_sizes"])
    local, indices = _shifted(to, indices, numbers.start_index_map, tops, shape, layout, clip=not drops)
    how = {**params, "mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0, "indices_are_sorted": False}
    out = eqn.prim.bind(x, local, **how)
    if not drops:
        return [out]
    # out of range: the fill, once in the sum
    dtype = indices.aval.dtype
    top = _row([scalar(n, dtype) for n in tops], indices.aval.shape)
    outside = ew.bitwise_or(ew.lt(indices, ew.zeros_of(indices)), ew.gt(indices, top))
    outside = reduce_or_p.bind(outside, axes=(outside.aval.ndim - 1,))
    batch = tuple(d for d in range(out.aval.ndim) if d not in numbers.offset_dims)
    fill = scalar(gather_fill(x.aval.dtype, params["fill_value"]), x.aval.dtype)
    fill = broadcast_to(mc.keep_first_p.bind(fill, src="I", dst="U", **to.over(divided)), out.aval.shape)
    return [ew.select(broadcast_in_dim(outside, out.aval.shape, batch), fill, out)]


def _scatter(to, eqn, node, operands, params, results):
    """Update the share of a table; updates to other shares are dropped."""
    x, indices, updates = operands
    numbers = params["dimension_numbers"]
    index_map = numbers.scatter_dims_to_operand_dims
    shape, of_indices, of_updates = (v.aval.shape for v in eqn.invars)
    if any(results[0][d] for d in index_map):
        clip = params["mode"] is GatherScatterMode.CLIP
        tops = _tops(index_map, shape, window_sizes(shape, of_updates, numbers))
        indices, _ = _shifted(to, indices, index_map, tops, shape, results[0], clip)
        params = {**params, "mode": GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    layout = node.layouts(node.rule.operands[1:2], to.mesh)[0]
    if any(n % to.parts(axes) for n, axes in zip(of_indices, layout, strict=True)):
        params = {**params, "indices_are_sorted": False, "unique_indices": False}  # padding breaks both
    return [eqn.prim.bind(x, indices, updates, **params)]


def _random_bits(to, eqn, node, operands, params, results):
    """Random bits of this share, functions of the key and the global position."""
    (keys,) = operands
    shape, width, k = params["shape"], params["bit_width"], keys.aval.ndim
    layout = results[0][k:]
    if not any(layout):
        return [eqn.prim.bind(keys, **params)]
    local = to.local_shape(shape, layout)
    counter: Any = scalar(0, dtypes.uint32)
    for d, axes in enumerate(layout):
        place = iota_p.bind(dtype=dtypes.uint32, shape=local, dimension=d)
        if axes:
            place = ew.add(place, to.start(shape[d], axes, dtypes.uint32))
        counter = ew.add(counter, ew.mul(place, scalar(math.prod(shape[d + 1 :]), dtypes.uint32)))
    whole = (*keys.aval.shape, *local)
    counter = broadcast_in_dim(counter, whole, tuple(range(k, len(whole))))
    keys = broadcast_in_dim(keys, whole, tuple(range(k)))
    words = random_unwrap_p.bind(random_fold_in_p.bind(keys, counter))  # encrypt the counter, as for bits
    hi, lo = (reshape(slice_in_dim(words, i, i + 1, axis=len(whole)), whole) for i in range(2))
    dtype = eqn.outvars[0].aval.dtype
    if width < 64:
        return [ew.convert(ew.bitwise_xor(hi, lo), dtype)]
    return [ew.bitwise_or(ew.shift_left(ew.convert(hi, dtype), scalar(32, dtype)), ew.convert(lo, dtype))]


SPECIAL: dict[str, Callable[[Resharder, Eqn, Node, list, dict, list[Layout]], list]] = {
    "iota": _iota,
    "gather": _gather,
    "scatter": _scatter,
    "random_bits": _random_bits,
}
