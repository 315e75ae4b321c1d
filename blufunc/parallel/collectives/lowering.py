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
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, subjaxprs
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
        function = _of(eqn)
        if function is not None:
            body = stage(function, [v.aval for v in eqn.invars], eqn.prim.name)
            return simplify.put_in_place(eqn, body, eqn.invars, alias)
        if any(True for _ in subjaxprs(eqn.params)):
            params = {k: _inner(v) for k, v in eqn.params.items()}
            return [Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source)]
        return [eqn]

    return with_cover(in_buckets(simplify.rewrite(jaxpr, step)))


def _inner(param: Any) -> Any:
    if isinstance(param, Jaxpr):
        return lower_collectives(param)
    return type(param)(map(_inner, param)) if isinstance(param, (tuple, list)) else param


def _of(eqn: Eqn) -> Callable | None:
    """The function that replaces an equation; None if it stays."""
    rule = _RULES.get(eqn.prim)
    return None if rule is None else rule(**eqn.params)


def _all_gather(axes: Any, sizes: Any, src: str, dst: str, dim: int) -> Callable | None:
    how = {"axes": axes, "sizes": sizes, "src": src, "dst": dst}
    if not dim:
        return None
    return lambda x: [_join(mc.mesh_all_gather_p.bind(x, dim=0, **how), dim, math.prod(sizes))]


def _psum_scatter(axes: Any, sizes: Any, src: str, dst: str, dim: int) -> Callable | None:
    how = {"axes": axes, "sizes": sizes, "src": src, "dst": dst}
    if not dim:
        return None
    return lambda x: [mc.mesh_psum_scatter_p.bind(_split(x, dim, math.prod(sizes)), dim=0, **how)]


def _all_to_all(
    axes: Any, sizes: Any, src: str, dst: str, split_dim: int, concat_dim: int
) -> Callable | None:
    how = {"axes": axes, "sizes": sizes, "src": src, "dst": dst}
    if not split_dim and not concat_dim:
        return None
    n = math.prod(sizes)

    def run(x: Any) -> list[Any]:
        swapped = mc.mesh_all_to_all_p.bind(_split(x, split_dim, n), split_dim=0, concat_dim=0, **how)
        return [_join(swapped, concat_dim, n)]

    return run


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


def _shard_slice(axes: Any, sizes: Any, src: str, dst: str, dim: int) -> Callable:
    def run(x: Any) -> list[Any]:
        shape = list(x.aval.shape)
        shape[dim] //= math.prod(sizes)
        return [dynamic_slice_p.bind(x, *_starts(axes, sizes, dim, shape), slice_sizes=tuple(shape))]

    return run


def _shard_pad(axes: Any, sizes: Any, src: str, dst: str, dim: int) -> Callable:
    def run(x: Any) -> list[Any]:
        shape = x.aval.shape
        whole = (*shape[:dim], shape[dim] * math.prod(sizes), *shape[dim + 1 :])
        zeros = full(whole, 0, x.aval.dtype)
        return [dynamic_update_slice_p.bind(zeros, x, *_starts(axes, sizes, dim, shape))]

    return run


def _keep_first(axes: Any, sizes: Any, src: str, dst: str) -> Callable:
    def run(x: Any) -> list[Any]:
        first = ew.eq(_place(axes, sizes), scalar(0, dtypes.int32))
        return [ew.select(broadcast_to(first, x.aval.shape), x, ew.zeros_like(x))]

    return run


def _starts(axes: Any, sizes: Any, dim: int, shape: Sequence[int]) -> list[Any]:
    """Start indices of this rank's part in the whole, given the shape of a part."""
    start = ew.mul(_place(axes, sizes), scalar(shape[dim], dtypes.int32))
    return [start if d == dim else scalar(0, dtypes.int32) for d in range(len(shape))]


def _place(axes: Any, sizes: Any) -> Any:
    return mc.mesh_axis_index_p.bind(axes=axes, sizes=sizes)


_RULES: dict[Any, Callable[..., Callable | None]] = {
    mc.mesh_all_gather_p: _all_gather,
    mc.mesh_psum_scatter_p: _psum_scatter,
    mc.mesh_all_to_all_p: _all_to_all,
    mc.shard_slice_p: _shard_slice,
    mc.shard_pad_p: _shard_pad,
    mc.keep_first_p: _keep_first,
}
