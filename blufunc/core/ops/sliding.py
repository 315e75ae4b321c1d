"""Sliding windows over an array: count, padding, and views.

Below the operations ``convolution`` and ``reduce_window``. Along an axis the operand has ``base_dilation -
1`` holes between elements, then padding at its ends (negative padding crops). Windows of ``window`` elements,
``window_dilation`` apart, start every ``stride`` positions. Semantics are XLA's, the names JAX's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import ints, sequence
from blufunc.core.ops.shape import pad_p

Ints = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]

_PADDINGS = ("VALID", "SAME", "SAME_LOWER")


def dilated(n: int, dilation: int) -> int:
    """Extent of ``n`` elements with ``dilation - 1`` holes between them."""
    return (n - 1) * dilation + 1 if n else 0


def count(
    n: int, window: int, stride: int, pad: tuple[int, int], base_dilation: int, window_dilation: int
) -> int:
    """The number of windows along an axis of ``n`` elements."""
    room = dilated(n, base_dilation) + sum(pad) - dilated(window, window_dilation)
    return room // stride + 1 if room >= 0 else 0


def transposed_pad(
    n: int,
    window: int,
    stride: int,
    pad: tuple[int, int],
    base_dilation: int,
    window_dilation: int,
    windows: int,
) -> tuple[int, int]:
    """Padding of the transposed slide, from ``windows`` results to ``n`` elements.

    Window p reads, at its position k, the element i with ``p * stride + k * window_dilation == i *
    base_dilation + low``. With k counted from the other end of the window this is a slide over the results in
    which strides and base dilation are swapped.
    """
    reach = (window - 1) * window_dilation
    low = reach - pad[0]
    return low, dilated(n, base_dilation) + reach - dilated(windows, stride) - low


def padtype_to_pads(
    in_shape: Sequence[int], window_shape: Sequence[int], window_strides: Sequence[int], padding: str
) -> list[tuple[int, int]]:
    """The padding ``(low, high)`` per axis for a name.

    Args:
      in_shape: the sizes of the operand.
      window_shape: the sizes of the windows, with their dilation.
      window_strides: distance between window starts.
      padding: 'VALID' for none; 'SAME' for as many windows as the size divided by the stride, rounded up, where an
        odd element goes to the end; 'SAME_LOWER' likewise, where it goes to the front.
    Raises:
      ValueRangeError: ``padding`` is another name.
    """
    name = padding.upper() if isinstance(padding, str) else padding
    if not isinstance(name, str) or name not in _PADDINGS:
        raise errors.ValueRangeError(
            f"{padding!r:.60} is not a padding.",
            where=source.here(),
            fix="use 'VALID', 'SAME', 'SAME_LOWER', or a pair (low, high) for each axis",
        )
    sizes = [
        ints(xs, "padtype_to_pads", what)
        for xs, what in (
            (in_shape, "in_shape"),
            (window_shape, "window_shape"),
            (window_strides, "window_strides"),
        )
    ]
    if len({len(s) for s in sizes}) != 1 or any(s < 1 for s in sizes[2]):
        raise errors.ArgumentError(
            f"padtype_to_pads takes a size, a window and a positive stride for each axis, not {sizes}.",
            where=source.here(),
            fix="give three sequences of one length",
        )
    if name == "VALID":
        return [(0, 0)] * len(sizes[0])
    pads = []
    for n, window, stride in zip(*sizes, strict=True):
        total = max((-(-n // stride) - 1) * stride + window - n, 0)
        small, large = total // 2, total - total // 2
        pads.append((small, large) if name == "SAME" else (large, small))
    return pads


def read_pads(padding: Any, name: str) -> Pads:
    """Explicit padding as a user gives it: a pair for each axis."""
    pads = tuple([ints(p, name, "a pair of padding") for p in sequence(padding, name, "padding", "pairs")])
    if any(len(p) != 2 for p in pads):
        raise errors.ArgumentError(
            f"{name}: padding is one pair (low, high) for each axis, not {padding!r:.60}.",
            where=source.here(),
            fix="use 'VALID', 'SAME', 'SAME_LOWER', or a pair for each axis: [(1, 1), (0, 2)]",
        )
    return pads  # type: ignore[return-value]


def read_factors(factors: Any, ndim: int, name: str, what: str) -> Ints:
    """User-given strides or dilations: a positive int per axis, or None for ones."""
    if factors is None:
        return (1,) * ndim
    return ints(factors, name, what)


def check_slide(name: str, ndim: int, fields: dict[str, Any], positive: Sequence[str]) -> None:
    """Check for an entry per axis, and that ``positive`` fields are at least 1."""
    for what, xs in fields.items():
        if len(xs) != ndim:
            raise errors.ShapeError(
                f"{name} slides along {ndim} axes, {what} has {len(xs)} entries: {xs}.",
                fix="give one entry for each axis",
            )
        if what in positive and any(x < 1 for x in xs):
            raise errors.ValueRangeError(
                f"{name}: {what} must be at least 1, not {xs}.", fix="use 1 where nothing is skipped"
            )


def padded(x: np.ndarray, pads: Pads, dilations: Ints, fill: Any) -> np.ndarray:
    """``x`` with holes between elements and padding at the ends, of one value."""
    config = tuple([(lo, hi, d - 1) for (lo, hi), d in zip(pads, dilations, strict=True)])
    if not any(map(any, config)):
        return x
    return pad_p.impl(x, np.asarray(fill, x.dtype), padding_config=config)


def window_view(
    x: np.ndarray, axes: Sequence[int], windows: Ints, counts: Ints, strides: Ints, dilations: Ints
) -> np.ndarray:
    """A view in which ``axes`` count windows, and new last axes run within them."""
    shape, steps = list(x.shape), list(x.strides)
    for axis, n, stride in zip(axes, counts, strides, strict=True):
        shape[axis], steps[axis] = n, x.strides[axis] * stride
    shape += windows
    steps += [x.strides[axis] * d for axis, d in zip(axes, dilations, strict=True)]
    return np.lib.stride_tricks.as_strided(x, shape, steps, writeable=False)
