"""Linear operands: the operands of each primitive that may be unreduced.

Parallel, below ``axis_types``. An unreduced value is a sum over the ranks, so a linear operation may be applied to its
terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops import cumulative, dynamic, elementwise, gather_scatter, reduce_window, shape
from blufunc.core.ops.convolution import conv_general_dilated_p
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.core.primitives.linear_ops import (
    add_any_p,
    broadcast_in_dim_p,
    reduce_sum_p,
    reshape_p,
    transpose_p,
)
from blufunc.transforms.checkpointing.policies import name_p

# sets of operands in which a primitive is jointly linear, as a sum is
_FIRST, _EITHER, _BOTH = [{0}], [{0}, {1}], [{0, 1}]
_LINEAR: dict[Any, list[set[int]]] = {
    elementwise.neg_p: _FIRST,
    elementwise.convert_p: _FIRST,
    elementwise.copy_p: _FIRST,
    elementwise.real_p: _FIRST,
    elementwise.imag_p: _FIRST,
    elementwise.conj_p: _FIRST,
    elementwise.div_p: _FIRST,
    elementwise.mul_p: _EITHER,
    elementwise.add_p: _BOTH,
    elementwise.sub_p: _BOTH,
    elementwise.complex_p: _BOTH,
    elementwise.select_p: [{1, 2}],
    add_any_p: _BOTH,
    reduce_sum_p: _FIRST,
    broadcast_in_dim_p: _FIRST,
    reshape_p: _FIRST,
    transpose_p: _FIRST,
    shape.slice_p: _FIRST,
    shape.rev_p: _FIRST,
    shape.pad_p: _BOTH,
    cumulative.cumsum_p: _FIRST,
    reduce_window.reduce_window_sum_p: _FIRST,
    dot_general_p: _EITHER,
    conv_general_dilated_p: _EITHER,
    dynamic.dynamic_slice_p: _FIRST,
    dynamic.dynamic_update_slice_p: _BOTH,
    gather_scatter.gather_p: _FIRST,
    gather_scatter.scatter_add_p: [{0, 2}],
    name_p: _FIRST,
}


def linear_in(eqn: Eqn) -> Sequence[set[int]]:
    """The sets of operands in which one use of a primitive is jointly linear."""
    prim, x, out = eqn.prim, eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if prim is shape.concatenate_p:
        return [set(range(len(eqn.invars)))]
    if prim is elementwise.convert_p and not dtypes.is_inexact(out):
        # rounding the terms to integers would change the sum
        return _FIRST if dtypes.is_integer(x) and dtypes.is_integer(out) else []
    if prim is elementwise.div_p and not dtypes.is_inexact(out):
        return []
    if prim is gather_scatter.gather_p and eqn.params["mode"] is GatherScatterMode.FILL_OR_DROP:
        fill = gather_scatter.gather_fill(x, eqn.params["fill_value"])
        return _FIRST if not fill or np.isnan(fill) else []  # every term would contribute the fill
    return _LINEAR.get(prim, [])
