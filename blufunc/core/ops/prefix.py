"""Prefix scans with any associative function, in logarithmically many steps.

Core operations, below the cumulative ones whose derivatives are such scans. In: arrays and a function that
combines two adjacent segments. Out: the inclusive scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc.core.ops.shape import concatenate, rev, slice_in_dim
from blufunc.core.primitives.linear_ops import reshape

Elements = list[Any]


def prefix_scan(
    combine: Callable[[Elements, Elements], Elements], xs: Elements, axis: int, reverse: bool
) -> Elements:
    """Inclusive scan along ``axis`` with an associative ``combine(earlier, later)``.

    Odd and even: adjacent pairs are combined, the pairs scanned, and the results combined with the elements between.
    (R. E. Ladner and M. J. Fischer, "Parallel Prefix Computation", 1980.) The work is linear in the length.
    """
    if reverse:
        # from the end: the later operand comes first
        flipped = prefix_scan(combine, [rev(x, (axis,)) for x in xs], axis, False)
        return [rev(x, (axis,)) for x in flipped]
    n = xs[0].aval.shape[axis]
    if n < 2:
        return xs
    even, odd = ([slice_in_dim(x, start, n, 2, axis) for x in xs] for start in (0, 1))
    front = [_part(x, 0, n // 2, axis) for x in even]
    odd = prefix_scan(combine, combine(front, odd), axis, False)  # the results at places 1, 3, 5, ...
    if n > 2:
        between = [_part(x, 0, (n - 1) // 2, axis) for x in odd]
        rest = combine(between, [_part(x, 1, None, axis) for x in even])
        even = [concatenate([_part(x, 0, 1, axis), y], axis) for x, y in zip(even, rest, strict=True)]
    return [_interleave(a, b, axis) for a, b in zip(even, odd, strict=True)]


def _part(x: Any, start: int, stop: int | None, axis: int) -> Any:
    """A slice of ``x`` along ``axis``; ``x`` itself if it is everything."""
    n = x.aval.shape[axis]
    stop = n if stop is None else stop
    return x if (start, stop) == (0, n) else slice_in_dim(x, start, stop, axis=axis)


def _interleave(even: Any, odd: Any, axis: int) -> Any:
    """Interleave ``even`` and ``odd``; ``even`` may have one more."""
    shape, n = even.aval.shape, odd.aval.shape[axis]
    split = lambda x: reshape(x, (*shape[:axis], n, 1, *shape[axis + 1 :]))
    pairs = concatenate([split(_part(even, 0, n, axis)), split(odd)], axis + 1)
    result = reshape(pairs, (*shape[:axis], 2 * n, *shape[axis + 1 :]))
    return result if shape[axis] == n else concatenate([result, _part(even, n, None, axis)], axis)
