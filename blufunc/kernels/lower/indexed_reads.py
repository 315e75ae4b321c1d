"""Indexed reads: rules for operations that read other elements than their own.

Kernels, stage 6, the rules of ``values.py``. In: an equation and a place in its result. Out: the value there, from
elements of the operands whose indices the program may compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.dynamic import dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.ops.elementwise import add_p, clamp_p
from blufunc.core.ops.gather_scatter import gather_fill, gather_p, scatter_add_p
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.kernels.fusion.iteration_space import one_hot_batch
from blufunc.kernels.loopir.access_map import Place, gathered
from blufunc.kernels.loopir.index import UNBOUNDED, ZERO, Computed, Index, of
from blufunc.kernels.loopir.index import constant as fixed
from blufunc.kernels.loopir.ir import (
    Value,
    apply,
    both,
    choose,
    const,
    converted,
    number,
    or_identity,
    within,
)


class Reader(Protocol):
    """The interface of ``values.Values`` that the rules use."""

    def at(self, atom: Any, place: Place) -> Value:
        """The value of a variable or literal at an index."""

    def guarded(self, condition: Value | None, make: Callable[[], Value]) -> Value:
        """The result of ``make``, which reads memory only where a condition holds."""


def _read_or(
    low: Reader, condition: Value | None, read: Callable[[], Value], other: Callable[[], Value]
) -> Value:
    """The result of ``read`` where a condition holds, elsewhere that of ``other``."""
    value = low.guarded(condition, read)
    return value if condition is None else choose(condition, value, other())


def _is_outside(index: Index, start: int, stop: int) -> bool:
    """True if an index is never in ``start`` ... ``stop - 1``."""
    least, most = index.bounds()
    return most < start or least >= stop


def _iota(low: Reader, eqn: Eqn, place: Place) -> Value:
    dtype = eqn.outvars[0].aval.dtype
    return number(place[eqn.params["dimension"]], dtype)


def _concatenate(low: Reader, eqn: Eqn, place: Place) -> Value:
    d = eqn.params["dimension"]
    offset, cases = 0, []
    for x in eqn.invars:
        n = x.aval.shape[d]
        if not _is_outside(place[d], offset, offset + n):
            condition = within(place[d], offset, offset + n)
            at = (*place[:d], place[d] - offset, *place[d + 1 :])
            cases.append((condition, x, at))
        offset += n
    value: Value | None = None
    for condition, x, at in reversed(cases):
        mine = low.guarded(condition, functools.partial(low.at, x, at))
        value = mine if condition is None or value is None else choose(condition, mine, value)
    assert value is not None
    return value


def _pad(low: Reader, eqn: Eqn, place: Place) -> Value:
    x, padding = eqn.invars
    condition: Value | None = None
    at = []
    # in the padding, indices are out of bounds: the guard prevents the read
    for i, n, (lo, _, interior) in zip(place, x.aval.shape, eqn.params["padding_config"], strict=True):
        step = interior + 1
        offset = i - lo
        if _is_outside(offset, 0, (n - 1) * step + 1):
            return low.at(padding, ())
        condition = both(condition, within(offset, 0, (n - 1) * step + 1))
        if step > 1:
            condition = both(condition, within(offset % step, 0, 1))
        at.append(offset // step)
    return _read_or(low, condition, lambda: low.at(x, tuple(at)), lambda: low.at(padding, ()))


def _start(low: Reader, value: Value, most: int) -> tuple[Index, Value]:
    """A computed start, clamped to 0 ... most, as an index; and its value, widened."""
    wide = np.dtype(np.int32)
    if value.dtype.itemsize == 8 or value.dtype == np.uint32 or most + 1 >= 1 << 31:
        wide = np.dtype(np.int64)
    if value.dtype.itemsize == 8:  # clamp to the range of indices: positions are added to it
        low = 0 if dtypes.is_unsigned(value.dtype) else -UNBOUNDED
        bounds = const(low, value.dtype), const(UNBOUNDED, value.dtype)
        value = apply(clamp_p, (bounds[0], value, bounds[1]), {}, value.dtype)
    value = converted(value, wide)
    clamped = apply(clamp_p, (const(0, wide), value, const(most, wide)), {}, wide)
    return of(Computed(clamped, 0, most)), value


def _start_or_none(value: Value, most: int) -> Index:
    """A start widened by ``_start`` as an index; out of bounds if not in 0 ... most."""
    clamped = apply(clamp_p, (const(-1, value.dtype), value, const(most + 1, value.dtype)), {}, value.dtype)
    return of(Computed(clamped, -1, most + 1))


def _dynamic_slice(low: Reader, eqn: Eqn, place: Place) -> Value:
    x, *starts = eqn.invars
    at = []
    for i, s, n, m in zip(place, starts, x.aval.shape, eqn.params["slice_sizes"], strict=True):
        at.append(i if n == m else i + _start(low, low.at(s, ()), n - m)[0])
    return low.at(x, tuple(at))


def _dynamic_update_slice(low: Reader, eqn: Eqn, place: Place) -> Value:
    x, update, *starts = eqn.invars
    condition: Value | None = None
    at = []
    for i, s, n, m in zip(place, starts, x.aval.shape, update.aval.shape, strict=True):
        if n == m:
            at.append(i)
            continue
        offset = i - _start(low, low.at(s, ()), n - m)[0]
        condition = both(condition, within(offset, 0, m))
        at.append(offset)
    return _read_or(low, condition, lambda: low.at(update, tuple(at)), lambda: low.at(x, place))


def placed(low: Reader, eqn: Eqn, place: Place) -> tuple[Place, Value | None]:
    """The operand's place for an element of a gather, and its bounds check, if any."""
    x, indices = eqn.invars
    inside: Value | None = None
    fills = eqn.params["mode"] is GatherScatterMode.FILL_OR_DROP

    def start(batch: Place, c: int, axis: int) -> Index:
        nonlocal inside
        most = x.aval.shape[axis] - eqn.params["slice_sizes"][axis]
        index, value = _start(low, low.at(indices, (*batch, fixed(c))), most)
        if fills:
            inside = both(inside, within(_start_or_none(value, most), 0, most + 1))
        return index

    return gathered(eqn, place, start), inside


def _gather(low: Reader, eqn: Eqn, place: Place) -> Value:
    x = eqn.invars[0]
    at, inside = placed(low, eqn, place)
    fill = lambda: const(gather_fill(x.aval.dtype, eqn.params["fill_value"]), x.aval.dtype)
    return _read_or(low, inside, lambda: low.at(x, at), fill)


def _one_hot_add(low: Reader, eqn: Eqn, place: Place) -> Value:
    x, indices, updates = eqn.invars
    axis = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims[0]
    batch = one_hot_batch(eqn, place)
    start = low.at(indices, (*batch, ZERO))
    most = x.aval.shape[axis] - 1
    index, wide = _start(low, start, most)
    if eqn.params["mode"] is not GatherScatterMode.CLIP:
        index = _start_or_none(wide, most)
    hit = within(place[axis] - index, 0, 1)
    dtype = x.aval.dtype
    added = low.at(updates, batch)
    return apply(add_p, (low.at(x, place), or_identity(hit, added, "sum")), {}, dtype)


RULES: dict[Any, Callable[[Reader, Eqn, Place], Value]] = {
    iota_p: _iota,
    concatenate_p: _concatenate,
    pad_p: _pad,
    dynamic_slice_p: _dynamic_slice,
    dynamic_update_slice_p: _dynamic_update_slice,
    gather_p: _gather,
    scatter_add_p: _one_hot_add,
}
