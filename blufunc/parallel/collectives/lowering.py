"""Lowering of collectives: to dimension 0, and to the index of the rank.

Parallel, between stages 3 and 4. In: a local jaxpr. Out: the same program, in which local operations (``shard_slice``,
``shard_pad``, ``keep_first``) are slices and selects at ``mesh_axis_index``, and collectives join and split dimension 0
only. Engines and devices then need little code, and movement fuses with its neighbours. All-reduces go into buckets
(``allreduce_buckets.py``), and matmuls overlap the last of them (``allreduce_overlap.py``).
It runs after transforms: lowered collectives have lost the types over axes that transposes depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, map_jaxprs
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.dynamic import dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.primitives.linear_ops import broadcast_to, full, reshape, transpose
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.allreduce_buckets import in_buckets
from blufunc.parallel.collectives.allreduce_overlap import with_cover


def lower_collectives(jaxpr: Jaxpr) -> Jaxpr:
    """Lower local collectives to slices, and move others to dimension 0."""

    def step(eqn: Eqn, invars: Sequence[Any], alias: Callable) -> list[Eqn]:
        eqn = eqn.with_invars(invars)
        rule = _RULES.get(eqn.prim)
        if rule is None or (rule is _at_front and not any(eqn.params.get(d) for d in mc.DIMENSIONS)):
            params = map_jaxprs(lower_collectives, eqn.params)
            return [Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source)]
        run = lambda x: [rule(eqn.prim, x, **eqn.params)]
        body = stage(run, [v.aval for v in eqn.invars], eqn.prim.name)
        return simplify.put_in_place(eqn, body, eqn.invars, alias)

    return with_cover(in_buckets(simplify.rewrite(jaxpr, step)))


def _at_front(prim: Any, x: Any, **params: Any) -> Any:
    """Run the collective along dimension 0: split to the front before, join after."""
    n = math.prod(params["sizes"])
    dims = {k: v for k, v in params.items() if k in mc.DIMENSIONS}
    dim = dims.get("dim", 0)
    if prim is not mc.mesh_all_gather_p:
        x = _split(x, dims.get("split_dim", dim), n)
    x = prim.bind(x, **{**params, **dict.fromkeys(dims, 0)})
    return x if prim is mc.mesh_psum_scatter_p else _join(x, dims.get("concat_dim", dim), n)


def _split(x: Any, dim: int, n: int) -> Any:
    """Split ``x`` into n parts along ``dim``, joined along dimension 0."""
    shape = x.aval.shape
    parts = reshape(x, (*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]))
    parts = transpose(parts, (dim, *(d for d in range(len(shape) + 1) if d != dim)))
    return reshape(parts, (n * parts.aval.shape[1], *parts.aval.shape[2:]))


def _join(x: Any, dim: int, n: int) -> Any:
    """Join the n parts of ``x`` along dimension 0 along ``dim``."""
    shape = x.aval.shape
    parts = reshape(x, (n, shape[0] // n, *shape[1:]))
    parts = transpose(parts, (*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)))
    shape = parts.aval.shape
    return reshape(parts, (*shape[:dim], n * shape[dim + 1], *shape[dim + 2 :]))


def _shard_slice(prim: Any, x: Any, axes: Any, sizes: Any, src: str, dst: str, dim: int) -> Any:
    shape = list(x.aval.shape)
    shape[dim] //= math.prod(sizes)
    return dynamic_slice_p.bind(x, *_starts(axes, sizes, dim, shape), slice_sizes=tuple(shape))


def _shard_pad(prim: Any, x: Any, axes: Any, sizes: Any, src: str, dst: str, dim: int) -> Any:
    shape = x.aval.shape
    zeros = full((*shape[:dim], shape[dim] * math.prod(sizes), *shape[dim + 1 :]), 0, x.aval.dtype)
    return dynamic_update_slice_p.bind(zeros, x, *_starts(axes, sizes, dim, shape))


def _keep_first(prim: Any, x: Any, axes: Any, sizes: Any, src: str, dst: str) -> Any:
    first = ew.eq(mc.mesh_axis_index_p.bind(axes=axes, sizes=sizes), scalar(0, dtypes.int32))
    return ew.select(broadcast_to(first, x.aval.shape), x, ew.zeros_like(x))


def _starts(axes: Any, sizes: Any, dim: int, shape: Sequence[int]) -> list[Any]:
    """Start indices of this rank's part in the whole, given the shape of a part."""
    start = ew.mul(mc.mesh_axis_index_p.bind(axes=axes, sizes=sizes), scalar(shape[dim], dtypes.int32))
    return [start if d == dim else scalar(0, dtypes.int32) for d in range(len(shape))]


_RULES: dict[Any, Callable[..., Any]] = {
    mc.mesh_all_gather_p: _at_front,
    mc.mesh_psum_scatter_p: _at_front,
    mc.mesh_all_to_all_p: _at_front,
    mc.shard_slice_p: _shard_slice,
    mc.shard_pad_p: _shard_pad,
    mc.keep_first_p: _keep_first,
}
