"""Gather and scatter windows: modes, dimension numbers, and their checks.

Below the operations ``gather_scatter`` and ``dynamic``. In: user-given parameters, with the types of operand
and indices. Out: the same, checked, and converted between gather and scatter. Semantics and dimension numbers
are XLA's, the names JAX's. Values are never inspected.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray


class GatherScatterMode(enum.Enum):
    """Treatment of windows outside the operand.

    CLIP moves them inside. FILL_OR_DROP fills gathered windows with a constant, and skips scattered ones.
    PROMISE_IN_BOUNDS says that there are none; if there are, gathers clip, scatters drop, and gradients are wrong.
    """

    CLIP = "clip"
    FILL_OR_DROP = "fill_or_drop"
    PROMISE_IN_BOUNDS = "promise_in_bounds"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_any(mode: str | GatherScatterMode | None) -> GatherScatterMode:
        """The mode for a mode, its name in lower case, or None (fill or drop)."""
        if isinstance(mode, GatherScatterMode):
            return mode
        try:
            return _MODES[mode]
        except (KeyError, TypeError):
            raise errors.ValueRangeError(
                f"{mode!r} is not a mode of gather and scatter.",
                where=source.here(),
                fix="use 'clip', 'fill', 'drop' or 'promise_in_bounds'",
            ) from None


_MODES = {
    None: GatherScatterMode.FILL_OR_DROP,
    "fill": GatherScatterMode.FILL_OR_DROP,
    "drop": GatherScatterMode.FILL_OR_DROP,
    "fill_or_drop": GatherScatterMode.FILL_OR_DROP,
    "clip": GatherScatterMode.CLIP,
    "promise_in_bounds": GatherScatterMode.PROMISE_IN_BOUNDS,
}


@dataclass(frozen=True, slots=True)
class GatherDimensionNumbers:
    """How the dimensions of operand, indices and result of a gather relate.

    The last dimension of the indices holds one start per entry of ``start_index_map``; the others are batch
    dimensions, each position in them names one window.

    Attributes:
      offset_dims: the result's dimensions that run within a window, rising; the others are the batch dimensions.
      collapsed_slice_dims: operand dimensions in which the window has size 1 and that the result leaves out.
      start_index_map: for each component of an index the operand dimension that it is a start in.
      operand_batching_dims: operand dimensions that go along with batch dimensions of the indices: size 1 in the
        window, left out of the result.
      start_indices_batching_dims: those dimensions of the indices.
    """

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    start_index_map: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    start_indices_batching_dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScatterDimensionNumbers:
    """Dimension numbers of a scatter: those of a gather, with updates as the result.

    Attributes:
      update_window_dims: the updates' dimensions that run within a window, rising.
      inserted_window_dims: operand dimensions in which the window has size 1 and that the updates do not have.
      scatter_dims_to_operand_dims: for each component of an index the operand dimension that it is a start in.
      operand_batching_dims: operand dimensions that go along with batch dimensions of the indices.
      scatter_indices_batching_dims: those dimensions of the indices.
    """

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    scatter_dims_to_operand_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    scatter_indices_batching_dims: tuple[int, ...] = ()


def as_gather(d: ScatterDimensionNumbers) -> GatherDimensionNumbers:
    """The gather that reads what the scatter writes."""
    return GatherDimensionNumbers(*[getattr(d, f) for f in ScatterDimensionNumbers.__slots__])


def as_scatter(d: GatherDimensionNumbers) -> ScatterDimensionNumbers:
    """The scatter that writes what the gather reads."""
    return ScatterDimensionNumbers(*[getattr(d, f) for f in GatherDimensionNumbers.__slots__])


def window_sizes(
    shape: tuple[int, ...], updates: tuple[int, ...], d: ScatterDimensionNumbers
) -> tuple[int, ...]:
    """The sizes of a scatter's windows, per operand dimension."""
    window = iter(d.update_window_dims)
    removed = (*d.inserted_window_dims, *d.operand_batching_dims)
    return tuple([1 if i in removed else updates[next(window)] for i in range(len(shape))])


def behind_batch(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dimension numbers after a new leading dimension."""
    return tuple([d + 1 for d in dims])


def check_numbers(name: str, fields: tuple[str, ...], d: Any, x: ShapedArray, indices: ShapedArray) -> None:
    """Check dimension numbers against operand and indices, in a gather's field order."""
    if not dtypes.is_integer(indices.dtype):
        raise errors.DtypeError(f"{name} takes integer indices, not {indices}.", fix="i.astype('int32')")
    if not all(hasattr(d, f) for f in fields):
        kind = "GatherDimensionNumbers" if name == "gather" else "ScatterDimensionNumbers"
        raise errors.ArgumentError(f"{name} takes {kind}, not {d!r:.60}.", fix=f"lax.{kind}(...)")
    window, removed, index_map, along, indices_along = (getattr(d, f) for f in fields)
    problem = None
    if not indices.ndim:
        problem = "the indices need at least one axis, the last, which holds the components of an index"
    elif indices.shape[-1] != len(index_map):
        problem = f"indices {indices} have {indices.shape[-1]} components, {fields[2]} has {len(index_map)}"
    elif any(a >= b for dims in (window, removed, along) for a, b in itertools.pairwise(dims)):
        problem = f"{fields[0]}, {fields[1]} and {fields[3]} must be rising"
    elif any(not 0 <= i < x.ndim for dims in (removed, index_map, along) for i in dims):
        problem = f"{fields[1]}, {fields[2]} and {fields[3]} must be axes of the operand"
    elif any(o < 0 for o in window):
        problem = f"{fields[0]} must not be negative"
    elif len({*index_map, *along}) != len(index_map) + len(along) or {*removed} & {*along}:
        problem = (
            f"{fields[3]} must not be among {fields[1]} or {fields[2]}, nor an axis twice in any of them"
        )
    elif len(along) != len(indices_along) or len(set(indices_along)) != len(indices_along):
        problem = f"{fields[3]} and {fields[4]} must pair up"
    elif any(not 0 <= k < indices.ndim - 1 for k in indices_along):
        problem = f"{fields[4]} must be axes of the indices, not the last"
    elif any(x.shape[i] != indices.shape[k] for i, k in zip(along, indices_along, strict=True)):
        problem = f"axes {along} of the operand and {indices_along} of the indices differ in size"
    if problem:
        raise errors.ShapeError(
            f"{name} of {x} at indices {indices}: {problem}.",
            why=f"the dimension numbers are {d}.",
            fix="correct the dimension numbers, or index with x[...] and x.at[...]",
        )
