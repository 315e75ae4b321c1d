"""Reductions of windows as pointwise work on shifted, strided reads.

Kernels, before stage 5. In: a jaxpr. Out: an equivalent one without operations of ``core.ops.reduce_window``, except
those that ``native`` selects. An element of all windows is a slice of the operand, padded where it falls outside: a
kernel reads it under a condition, and joins all elements of a window in registers with whatever else it computes.
Larger windows are reduced axis by axis, long ones by doubling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.barrier import optimization_barrier
from blufunc.core.ops.reduce import limit, reduce_max_p, reduce_min_p
from blufunc.core.ops.reduce_window import (
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
    window_argmax_p,
    window_argmin_p,
    window_pick_p,
    window_place_p,
)
from blufunc.core.ops.shape import pad_p, slice_
from blufunc.core.ops.sliding import count, transposed_pad
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim, full, reduce_sum_p, reshape
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, put_in_place, rewrite, simplify
from blufunc.core.programs.stage import definition, stage

MOST_TERMS = 32
"""Elements of a window that one kernel reads, at most."""

MOST_CHOSEN = 64
"""Elements of a window of which positions choose one, at most.

Beyond, they are gathered and scattered.
"""

_REDUCED_FROM = 8
"""Minimum elements of a window of its own, along one axis, for a reduction of it."""

_TERMS_AT_ONCE = 10
"""Elements of a window that a kernel adds up, two loads each.
With more, registers run out.
"""

_POSITIONS_AS = {1: dtypes.int8, 2: dtypes.int16}
"""Dtypes of short positions, by the bytes of a value.
Kernels read vectors of values and of positions, of one length.
"""

_POSITIONS = {window_argmax_p: (ew.gt, False), window_argmin_p: (ew.lt, True)}
_SUMS = {reduce_window_sum_p: add_any_p, reduce_window_max_p: ew.max_p, reduce_window_min_p: ew.min_p}
_WHOLE = {
    reduce_window_sum_p: reduce_sum_p,
    reduce_window_max_p: reduce_max_p,
    reduce_window_min_p: reduce_min_p,
}
_PICKS = (window_pick_p, window_place_p)

WINDOWS = frozenset((*_SUMS, *_POSITIONS, *_PICKS))
"""Operations that this pass takes apart."""


class Slide(NamedTuple):
    """Windows along one axis; see ``core.ops.sliding``."""

    size: int
    window: int
    stride: int
    pad: tuple[int, int]
    holes: int
    spacing: int

    @property
    def count(self) -> int:
        """The number of windows."""
        return count(*self)

    @property
    def is_trivial(self) -> bool:
        """True if windows are the elements."""
        return (self.window, self.stride, self.pad, self.holes) == (1, 1, (0, 0), 1)

    @property
    def is_apart(self) -> bool:
        """True if windows divide the axis into parts."""
        gapless = self.pad == (0, 0) and self.holes == self.spacing == 1 and self.size % self.window == 0
        return gapless and (self.stride == self.window or self.size == self.window)

    @property
    def is_repeat(self) -> bool:
        """True if each window has one element, and a run of them has the same one."""
        steps = self.stride == self.spacing == 1 and self.window == self.holes > 1
        return steps and max(self.pad) < self.window and self.size > 0 and self.count > 0


class Term(NamedTuple):
    """The elements of all windows at one position: a slice, and the padding around it."""

    start: int
    limit: int
    stride: int
    pad: tuple[int, int, int]


def with_unrolled_windows(jaxpr: Jaxpr, origins: Origins, native: Callable[[Eqn], bool]) -> Jaxpr:
    """Take reductions of windows apart.

    Args:
      native: from such an equation to whether the device computes it without that.
    """

    short: dict[Atom, Atom] = {}  # positions, and the same in fewer bytes

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn.prim not in WINDOWS or is_replaced(eqn.prim, "impl") or native(eqn):
            return [eqn.with_invars(invars)]
        invars = [short.get(a, a) for a in invars]
        avals = [a.aval for a in invars]
        is_short = math.prod(eqn.params["window_dimensions"]) <= MOST_CHOSEN
        if eqn.prim in _PICKS and not is_short:
            body = definition(eqn.prim, avals, eqn.params)
            return put_in_place(eqn, simplify(body), invars, alias)
        dtype = _POSITIONS_AS.get(avals[0].dtype.itemsize, dtypes.int32) if is_short else dtypes.int32
        body = stage(lambda *xs: [_unrolled(eqn, xs, dtype)], avals, eqn.prim.name, line=eqn.source)
        if eqn.prim not in _POSITIONS or not is_short:
            return put_in_place(eqn, simplify(body), invars, alias)
        (wide,) = eqn.outvars
        found: dict[Atom, Atom] = {}
        placed = put_in_place(eqn, simplify(body), invars, found.__setitem__)
        short[wide] = found[wide]
        return [*placed, Eqn(ew.convert_p, [found[wide]], [wide], {"dtype": wide.aval.dtype}, eqn.source)]

    return dce(rewrite(jaxpr, step, origins), origins=origins)


def _slides(
    shape: Sequence[int], *, window_dimensions, window_strides, padding, base_dilation, window_dilation
) -> list[Slide]:
    every = zip(
        shape, window_dimensions, window_strides, padding, base_dilation, window_dilation, strict=True
    )
    return [Slide(n, w, s, (low, high), holes, by) for n, w, s, (low, high), holes, by in every]


def _unrolled(eqn: Eqn, xs: Sequence[Any], positions: np.dtype) -> Any:
    if eqn.prim is window_pick_p:
        t, which = xs
        return _picked(t, which, _slides(t.aval.shape, **eqn.params))
    if eqn.prim is window_place_p:
        ct, which = xs
        params = {k: v for k, v in eqn.params.items() if k != "shape"}
        return _placed(ct, which, _slides(eqn.params["shape"], **params))
    (x,), (out,) = xs, eqn.outvars
    slides = _slides(x.aval.shape, **eqn.params)
    if eqn.prim in _POSITIONS:
        beats, smallest = _POSITIONS[eqn.prim]
        start = full(x.aval.shape, 0, positions)
        join = lambda a, b: _first(a, b, beats)
        fills = (limit(x.aval.dtype, smallest), 0)
        return _reduced((x, start), slides, join, fills, None)[1]
    sums = eqn.prim is reduce_window_sum_p
    if sums and dtypes.is_floating(x.aval.dtype) and x.aval.dtype.itemsize <= 2:
        x = ew.convert(x, np.dtype(np.float32))
    fill = 0 if sums else limit(x.aval.dtype, eqn.prim is reduce_window_min_p)
    combine, whole = _SUMS[eqn.prim], _WHOLE[eqn.prim]
    join = lambda a, b: (combine.bind(*a, *b),)
    return ew.convert(_reduced((x,), slides, join, (fill,), whole)[0], out.aval.dtype)


# -- joins ------------------------------------------------------------------------------------------

State = tuple[Any, ...]
"""Result of a window: a value, or a value and its position."""


def _first(a: State, b: State, beats: Callable) -> State:
    """The extreme value of two and its position; of equal ones that of ``a``."""
    (x, at), (y, then) = a, b
    wins = beats(y, x)
    if dtypes.is_floating(x.aval.dtype):
        wins = ew.bitwise_or(wins, ew.logical_and(ew.ne(y, y), ew.eq(x, x)))
    return ew.select(wins, y, x), ew.select(wins, then, at)


def _reduced(
    state: State, slides: Sequence[Slide], join: Callable, fills: Sequence[Any], whole: Any
) -> State:
    """The reduction of all windows; ``whole`` reduces axes, and is None for positions."""
    moving = [d for d, s in enumerate(slides) if not s.is_trivial]
    if not all(s.count for s in slides):  # no windows
        return tuple(full(tuple(s.count for s in slides), 0, v.aval.dtype) for v in state)
    slides = list(slides)
    for d in moving:
        if whole is not None and slides[d].is_apart and slides[d].window >= _REDUCED_FROM:
            state, slides[d] = _over_parts(state, d, slides[d], whole)
        elif whole is not None and slides[d].is_repeat:
            state, slides[d] = _repeated(state, d, slides[d])
    moving = [d for d in moving if not slides[d].is_trivial]
    if math.prod(s.window for s in slides) <= MOST_TERMS:
        return _joined(state, slides, join, fills) if moving else state
    for d in reversed(moving):  # positions count from the innermost axis outwards
        one = [
            s if e == d else _untouched(v)
            for e, (s, v) in enumerate(zip(slides, state[0].aval.shape, strict=True))
        ]
        unit = math.prod(s.window for s in slides[d + 1 :])
        if slides[d].window <= MOST_TERMS:
            state = _joined(state, one, join, fills, unit)
        else:
            state = _doubled(state, d, slides[d], join, fills, unit)
    return state


def _untouched(n: int) -> Slide:
    return Slide(n, 1, 1, (0, 0), 1, 1)


def _over_parts(state: State, axis: int, slide: Slide, whole: Any) -> tuple[State, Slide]:
    """Windows that divide an axis, reduced over an axis of their own."""
    (x,) = state
    shape = x.aval.shape
    apart = reshape(x, (*shape[:axis], slide.count, slide.window, *shape[axis + 1 :]))
    return (whole.bind(apart, axes=(axis + 1,)),), _untouched(slide.count)


def _repeated(state: State, axis: int, slide: Slide) -> tuple[State, Slide]:
    """Windows of one element each: the elements, each several times, without the ends."""
    (x,) = state
    shape, ends = x.aval.shape, (*x.aval.shape[: axis + 1], slide.window, *x.aval.shape[axis + 1 :])
    dims = tuple(d for d in range(len(ends)) if d != axis + 1)
    long = (*shape[:axis], slide.size * slide.window, *shape[axis + 1 :])
    repeated = reshape(broadcast_in_dim(x, ends, dims), long)
    return (_along(repeated, axis, slide.window - 1 - slide.pad[0], slide.count, 1),), _untouched(slide.count)


def _joined(
    state: State,
    slides: Sequence[Slide],
    join: Callable,
    fills: Sequence[Any],
    unit: int = 1,
) -> State:
    """The reduction of windows element by element, in row-major order.

    Args:
      unit: positions that an element counts for.
    """
    out: State | None = None
    for k, terms in enumerate(_terms(slides)):
        if terms is None:  # padding only: the identity, which counts where it is first
            if out is None:
                shape = tuple(s.count for s in slides)
                out = tuple(full(shape, f, v.aval.dtype) for f, v in zip(fills, state, strict=True))
            continue
        read = tuple(_read(v, terms, f) for v, f in zip(state, fills, strict=True))
        if len(read) > 1 and k:
            read = read[0], ew.add(read[1], k * unit)
        out = read if out is None else join(out, read)
    assert out is not None
    return out


def _doubled(
    state: State,
    axis: int,
    slide: Slide,
    join: Callable,
    fills: Sequence[Any],
    unit: int,
) -> State:
    """The reduction of long windows along an axis, by joining runs of 1, 2, 4, ...."""
    pads = [(0, 0, 0)] * state[0].aval.ndim
    pads[axis] = (*slide.pad, slide.holes - 1)
    run = tuple(_padded(v, pads, f) for v, f in zip(state, fills, strict=True))
    out: State | None = None
    reach, after = 1, slide.window
    while True:
        if after & reach:  # from the end of a window to its beginning
            after -= reach
            n, step = slide.count, slide.stride
            begin = after * slide.spacing
            part = _shifted(tuple(_along(v, axis, begin, n, step) for v in run), after * unit)
            out = part if out is None else join(part, out)
        if not after:
            assert out is not None
            return out
        apart = reach * slide.spacing
        n = run[0].aval.shape[axis] - apart
        later = _shifted(tuple(_along(v, axis, apart, n, 1) for v in run), reach * unit)
        run = join(tuple(_along(v, axis, 0, n, 1) for v in run), later)
        reach *= 2


def _shifted(state: State, by: int) -> State:
    """Values, and positions further on."""
    return state if len(state) == 1 or not by else (state[0], ew.add(state[1], by))


def _along(x: Any, axis: int, start: int, n: int, step: int) -> Any:
    """``n`` elements along an axis, every ``step``-th."""
    starts, limits, strides = [0] * x.aval.ndim, list(x.aval.shape), [1] * x.aval.ndim
    starts[axis], limits[axis], strides[axis] = start, start + (n - 1) * step + 1, step
    return slice_(x, starts, limits, strides)


# -- elements of windows ----------------------------------------------------------------------------


def _terms(slides: Sequence[Slide]) -> Iterator[tuple[Term, ...] | None]:
    """The element of all windows at each position, row-major; None: all are padding."""
    for terms in itertools.product(*[[_term(s, k) for k in range(s.window)] for s in slides]):
        yield None if None in terms else terms  # type: ignore[misc]


def _term(slide: Slide, k: int) -> Term | None:
    """Element ``k`` of the windows along an axis.

    Window p reads position ``p * stride + k * spacing - low`` of the dilated axis. It is an element if it is in range
    and a multiple of ``holes``.
    """
    at, holes, n = k * slide.spacing - slide.pad[0], slide.holes, slide.count
    period = holes // math.gcd(slide.stride, holes)  # windows from one that meets an element to the next
    first = next((p for p in range(period) if (p * slide.stride + at) % holes == 0), None)
    if first is None:
        return None
    begin, step = (first * slide.stride + at) // holes, period * slide.stride // holes
    skipped = max(0, -(begin // step))  # windows that begin before the axis
    first, begin = first + skipped * period, begin + skipped * step
    if first >= n or begin >= slide.size:
        return None
    number = min(-(-(n - first) // period), -(-(slide.size - begin) // step))
    high = n - first - (number - 1) * period - 1
    return Term(begin, begin + (number - 1) * step + 1, step, (first, high, period - 1))


def _read(x: Any, terms: Sequence[Term], fill: Any) -> Any:
    part = slice_(x, [t.start for t in terms], [t.limit for t in terms], [t.stride for t in terms])
    pads = [(*t.pad[:2], t.pad[2] if n > 1 else 0) for t, n in zip(terms, part.aval.shape, strict=True)]
    return _padded(part, pads, fill)


def _padded(x: Any, pads: Sequence[tuple[int, int, int]], fill: Any) -> Any:
    if not any(map(any, pads)):
        return x
    return pad_p.bind(x, full((), fill, x.aval.dtype), padding_config=tuple(pads))


# -- positions --------------------------------------------------------------------------------------


def _picked(t: Any, which: Any, slides: Sequence[Slide]) -> Any:
    """The element of each window at its position: one of the window's, or 0."""
    out = full(which.aval.shape, 0, t.aval.dtype)
    for k, terms in enumerate(_terms(slides)):
        if terms is not None:
            out = ew.select(ew.eq(which, k), _read(t, terms, 0), out)
    return out


def _placed(ct: Any, which: Any, slides: Sequence[Slide]) -> Any:
    """The sum for each element over the windows that it is in, where they chose it."""
    back = [
        Slide(s.count, s.window, s.holes, transposed_pad(*s, s.count), s.stride, s.spacing) for s in slides
    ]
    half = dtypes.is_floating(ct.aval.dtype) and ct.aval.dtype.itemsize <= 2
    dtype = np.dtype(np.float32) if half else ct.aval.dtype
    out, number = None, 0
    last = math.prod(s.window for s in slides) - 1
    for k, terms in enumerate(_terms(back)):
        if terms is None:
            continue
        number += 1
        if number % _TERMS_AT_ONCE == 0:
            out = optimization_barrier(out)  # a kernel ends
        chosen = ew.eq(
            _read(which, terms, -1), last - k
        )  # the transposed slide counts from the end of a window
        value = ew.convert(_read(ct, terms, 0), dtype)
        term = ew.select(chosen, value, ew.zeros_of(value))
        out = term if out is None else ew.add(out, term)
    if out is None:
        return full(tuple(s.size for s in slides), 0, ct.aval.dtype)
    return ew.convert(out, ct.aval.dtype)
