"""Movement equations as index maps: the source element of each result element.

Kernels, stages 5 and 6. In: an equation, and the index of an element of its result, one ``Index`` per axis. Out: the
index of the operand's element. ``fusion/fuse.py`` asks whether an access reads a value where it is computed;
``lower/values.py`` composes accesses into the address of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Literal, Var
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.ops.reduce import reduce_max_p, reduce_min_p, reduce_prod_p
from blufunc.core.ops.shape import rev_p, slice_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reduce_sum_p, reshape_p, transpose_p
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.loopir.index import ZERO, Index, Range, flat, of, strides_of, unflat

Place = tuple[Index, ...]


def _broadcast(eqn: Eqn, at: Place) -> Place:
    shape, dims = eqn.invars[0].aval.shape, eqn.params["dims"]
    out = eqn.params["shape"]
    return tuple(at[d] if n == out[d] else ZERO for n, d in zip(shape, dims, strict=True))


def _reshape(eqn: Eqn, at: Place) -> Place:
    return unflat(flat(at, eqn.outvars[0].aval.shape), eqn.invars[0].aval.shape)


def _transpose(eqn: Eqn, at: Place) -> Place:
    place = [ZERO] * len(at)
    for i, p in enumerate(eqn.params["permutation"]):
        place[p] = at[i]
    return tuple(place)


def _slice(eqn: Eqn, at: Place) -> Place:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return tuple(i * step + start for i, step, start in zip(at, strides, starts, strict=True))


def _rev(eqn: Eqn, at: Place) -> Place:
    shape = eqn.invars[0].aval.shape
    return tuple((i * -1) + (shape[d] - 1) if d in eqn.params["dimensions"] else i for d, i in enumerate(at))


MOVED: dict[Primitive, Callable[[Eqn, Place], Place]] = {
    broadcast_in_dim_p: _broadcast,
    reshape_p: _reshape,
    transpose_p: _transpose,
    slice_p: _slice,
    rev_p: _rev,
}
"""Primitives that only move the elements of one operand, except identities."""


def moves(eqn: Eqn) -> bool:
    """True if an equation only moves elements; a reduction over axes of size 1 does."""
    return eqn.prim in MOVED or eqn.prim.identity or _drops_axes(eqn)


def is_widening(eqn: Eqn) -> bool:
    """True for a conversion to a wider float: it is exact, and its operand is smaller."""
    if eqn.prim is not convert_p:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return dtypes.is_floating(before) and dtypes.is_floating(after) and before.itemsize < after.itemsize


def source_of(eqn: Eqn, at: Place) -> Place:
    """The operand's index at index ``at`` of a movement equation's result."""
    if eqn.prim.identity:
        return at
    if eqn.prim in MOVED:
        return MOVED[eqn.prim](eqn, at)
    rest = iter(at)
    return tuple(ZERO if d in eqn.params["axes"] else next(rest) for d in range(eqn.invars[0].aval.ndim))


def gathered(eqn: Eqn, at: Place, start: Callable[[Place, int, int], Index]) -> Place:
    """The operand's index at index ``at`` of a gather's result.

    ``start(batch, component, axis)`` is the start along ``axis`` of the window of the index vector at ``batch``.
    """
    d = eqn.params["dimension_numbers"]
    batch = tuple(i for p, i in enumerate(at) if p not in d.offset_dims)
    removed = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    offsets = iter([at[p] for p in d.offset_dims])
    place = [ZERO if axis in removed else next(offsets) for axis in range(eqn.invars[0].aval.ndim)]
    for axis, b in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        place[axis] = batch[b]
    for c, axis in enumerate(d.start_index_map):
        place[axis] = place[axis] + start(batch, c, axis)
    return tuple(place)


def _drops_axes(eqn: Eqn) -> bool:
    if eqn.prim not in _PLAIN_REDUCTIONS:
        return False
    shape = eqn.invars[0].aval.shape
    return all(shape[d] == 1 for d in eqn.params["axes"])


_PLAIN_REDUCTIONS = frozenset((reduce_sum_p, reduce_prod_p, reduce_max_p, reduce_min_p))


def same_order(v: Any, makers: Mapping[Any, Eqn]) -> Any:
    """The variable with the elements of ``v`` in order; None if movement changes it.

    Args:
      v: a variable.
      makers: by variable, the equation that computes it. Movement is followed, up to other operations.
    """
    size = v.aval.size
    points = of(Range("i", size))
    place = unflat(points, v.aval.shape)
    while (eqn := makers.get(v)) is not None and moves(eqn) and eqn.invars[0].__class__ is not Literal:
        place, (v,) = source_of(eqn, place), eqn.invars
    return v if v.aval.size == size and flat(place, v.aval.shape) == points else None


def view_chain(v: Any, virtual: Mapping[Any, Eqn]) -> list[Eqn] | None:
    """The equations that make ``v`` a view of a variable in memory; None if none do.

    Strides can express transposes, slices, broadcasts and some reshapes.
    """
    chain: list[Eqn] = []
    while (eqn := virtual.get(v)) is not None:
        if not moves(eqn) or eqn.invars[0].__class__ is Literal:
            return None
        chain.append(eqn)
        (v,) = eqn.invars
    chain.reverse()
    return chain if _model(v, chain) is not None else None


def view_strides(v: Var, virtual: Mapping[Var, Eqn]) -> tuple[int, ...] | None:
    """The strides of the view ``v``, in elements; None if it is no view."""
    chain = view_chain(v, virtual)
    if chain is None:
        return None
    model = _model(chain[0].invars[0] if chain else v, chain)
    return None if model is None else tuple(model.strides)


def _model(v: Any, chain: Sequence[Eqn]) -> np.ndarray | None:
    """The view of an array like ``v`` by movement equations; no element is accessed."""
    model = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), v.aval.shape, strides_of(v.aval.shape))
    try:
        for eqn in chain:
            model = view(eqn, model)
    except ValueError:
        return None
    return model


def view(eqn: Eqn, x: Any) -> Any:
    """The result of a movement equation as a view of an array.

    Raises:
      ValueError: it requires a copy.
    """
    if eqn.prim.identity:
        return x
    if eqn.prim is broadcast_in_dim_p:
        shape, dims = eqn.params["shape"], eqn.params["dims"]
        strides = [0] * len(shape)
        for n, stride, d in zip(x.shape, x.strides, dims, strict=True):
            strides[d] = stride if n == shape[d] else 0
        return _as_strided(x, shape, strides)
    if eqn.prim is reshape_p or eqn.prim in _PLAIN_REDUCTIONS:
        return _reshaped(x, eqn.outvars[0].aval.shape)
    return eqn.prim.impl(x, **eqn.params)


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, np.ndarray):
        return np.reshape(x, shape, copy=False)
    y = x.reshape(shape)
    if y.data.ptr != x.data.ptr:
        raise ValueError("a reshape that copies")
    return y


def _as_strided(x: Any, shape: tuple[int, ...], strides: list[int]) -> Any:
    if isinstance(x, np.ndarray):
        if x.dtype.isbuiltin == 1:
            return np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)
        # as_strided does not know the dtypes of ml_dtypes
        raw = np.lib.stride_tricks.as_strided(x.view(f"u{x.dtype.itemsize}"), shape, strides, writeable=False)
        return raw.view(x.dtype)
    return type(x)(shape, x.dtype, x.data, strides)
