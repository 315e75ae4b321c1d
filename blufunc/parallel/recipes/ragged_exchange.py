"""A broadcast from one rank, and an all-to-all of ragged rows.

Parallel, a face. As compositions they have the derivatives and the batching of their parts. ``ragged_all_to_all``
gathers the operands of all ranks, and so takes their memory: no collective here has data-dependent sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.named import all_gather, axis_index, psum

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["pbroadcast", "ragged_all_to_all"]

T = TypeVar("T")


def pbroadcast(x: T, axis_name: Any, source: int) -> T:
    """Give every rank along a named axis the value of the rank ``source``."""
    own = axis_index(axis_name) == source

    def one(v):
        v = bnp.asarray(v)
        wide = v.astype("int32") if v.dtype == bool else v
        return psum(bnp.where(own, wide, bnp.zeros_like(wide)), axis_name).astype(v.dtype)

    return tree.map(one, x)


def ragged_all_to_all(
    operand: ArrayLike,
    output: ArrayLike,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: Any,
    axis_index_groups: None = None,
) -> Array:
    """Send rows to the ranks along a named axis, as many to each as it is due.

    Rank ``i`` sends ``send_sizes[j]`` rows, from ``input_offsets[j]`` on, to rank ``j``, which has them from
    ``output_offsets[j]`` on: offsets and sizes are those of the sender.

    Args:
      operand: rows to send.
      output: the result where no row arrives.
      input_offsets, send_sizes, output_offsets, recv_sizes: an integer for each rank.
    Raises:
      UnsupportedError: ``axis_index_groups`` are given.
      ShapeError: rows of operand and output differ in shape.
    """
    x, out = bnp.asarray(operand), bnp.asarray(output)
    if axis_index_groups is not None:
        raise errors.UnsupportedError("ragged_all_to_all with axis_index_groups.", where=source.here())
    if x.shape[1:] != out.shape[1:] or x.dtype != out.dtype:
        raise errors.ShapeError(
            f"ragged_all_to_all from {x.aval} to {out.aval}: rows differ.", where=source.here()
        )
    me = axis_index(axis_name)
    rows = all_gather(x, axis_name)
    begin, size, place = (
        all_gather(bnp.asarray(a, "int32"), axis_name)[:, me]
        for a in (input_offsets, send_sizes, output_offsets)
    )
    row = bnp.arange(out.shape[0], dtype="int32")
    offset = row[None] - place[:, None]  # of each row of the result in what each rank sends
    comes = (offset >= 0) & (offset < size[:, None])
    sender = bnp.argmax(comes, 0)
    position = bnp.take_along_axis(offset + begin[:, None], sender[None], 0)[0]
    arrived = rows[sender, bnp.clip(position, 0, max(x.shape[0] - 1, 0))]
    return bnp.where(comes.any(0).reshape(-1, *[1] * (out.ndim - 1)), arrived, out)
