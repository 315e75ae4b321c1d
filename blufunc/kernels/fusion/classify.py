"""Before stage 5: what sort an equation is: virtual, a node or opaque.

Kernels, below ``fuse``, whose module text says what the sorts are. Passes before fusion ask, too.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.dynamic import dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.ops.gather_scatter import gather_p, scatter_add_p
from blufunc.core.ops.random_bits import (
    random_bits_p,
    random_fold_in_p,
    random_seed_p,
    random_split_p,
    random_unwrap_p,
    random_wrap_p,
)
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.fusion.iteration_space import can_be_scanned, reduces, reduction_pattern, scans_by
from blufunc.kernels.loopir.access_map import Place, moves
from blufunc.kernels.loopir.index import ZERO
from blufunc.kernels.ops.points import POINTS

RANDOM = (
    frozenset(
        (random_bits_p, random_split_p, random_fold_in_p, random_seed_p, random_wrap_p, random_unwrap_p)
    )
    if sys.byteorder == "little"
    else frozenset()
)
"""The random primitives that kernels compute: on machines that store the low byte of a number first."""

READERS = frozenset((gather_p, concatenate_p, pad_p, dynamic_slice_p, dynamic_update_slice_p, *RANDOM))
"""Nodes that read their operands at other elements than their own."""


def sort_of(eqn: Eqn) -> str:
    """``virtual``, ``node`` or ``opaque``."""
    prim = eqn.prim
    if prim.multiple_results or eqn.effects or prim.opaque or len(eqn.outvars) != 1:
        return "opaque"
    if is_replaced(prim, "impl"):
        return "opaque"
    for a in (*eqn.invars, *eqn.outvars):
        if not a.aval.size or not _plain(a.aval.dtype):
            return "opaque"
    if moves(eqn) or prim is iota_p:
        return "virtual"
    if isinstance(prim, Elementwise) or prim is add_any_p:
        if not scalar_ops.known(prim, eqn.params, [a.aval.dtype for a in eqn.invars]):
            return "opaque"
        return "virtual" if eqn.outvars[0].aval.size == 1 else "node"
    if reduces(prim):
        return "opaque" if dtypes.is_complex(eqn.invars[0].aval.dtype) or _positions_apart(eqn) else "node"
    if scans_by(prim):
        return "node" if can_be_scanned(eqn) and not dtypes.is_complex(eqn.invars[0].aval.dtype) else "opaque"
    if prim in READERS or prim in POINTS or one_hot(eqn):
        return "node"
    return "opaque"


@functools.cache
def _plain(dtype: Any) -> bool:
    return dtypes.is_numeric(dtype) or dtypes.is_bool(dtype) or dtypes.is_key(dtype)


def one_hot(eqn: Eqn) -> bool:
    """Whether a ``scatter_add`` adds one number to each row at one place: then every element can look for itself."""
    if eqn.prim is not scatter_add_p:
        return False
    d = eqn.params["dimension_numbers"]
    x, indices, updates = (a.aval for a in eqn.invars)
    return (
        not d.update_window_dims
        and len(d.scatter_dims_to_operand_dims) == 1
        and d.inserted_window_dims == d.scatter_dims_to_operand_dims
        and len(d.operand_batching_dims) == x.ndim - 1
        and indices.shape[-1] == 1
        and updates.size * x.shape[d.scatter_dims_to_operand_dims[0]] == x.size
    )


def one_hot_batch(eqn: Eqn, place: Place) -> Place:
    """Where the index and the update for an element's row are."""
    d = eqn.params["dimension_numbers"]
    batch = [ZERO] * (eqn.invars[1].aval.ndim - 1)
    for a, b in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
        batch[b] = place[a]
    return tuple(batch)


def _positions_apart(eqn: Eqn) -> bool:
    """Whether it looks for positions along an axis that is not the last: those of no row."""
    if "index_dtype" not in eqn.params:
        return False
    pattern = reduction_pattern(eqn.invars[0].aval.shape, eqn.params["axes"])
    return not pattern or not pattern[-1][1] or len(pattern) > 2
