"""``jax.experimental.layout``: the order of elements in memory.

Under the face ``as_jax``. Arrays are row-major wherever a program can see them, so a layout is accepted if it says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import tree

__all__ = ["Format", "Layout", "with_layout_constraint"]


@dataclass(frozen=True)
class Layout:
    """The dimensions of an array from the slowest to the fastest in memory.

    Attributes:
      major_to_minor: the dimensions in this order.
    Raises:
      UnsupportedError: another order than ``0, 1, ...``, or tiles.
    """

    major_to_minor: tuple[int, ...]
    tiling: Any = None
    sub_byte_element_size_in_bits: int = 0

    def __post_init__(self) -> None:
        in_order = tuple(self.major_to_minor) == tuple(range(len(self.major_to_minor)))
        if not in_order or self.tiling or self.sub_byte_element_size_in_bits:
            raise errors.UnsupportedError(
                f"{self!r}: arrays are row-major and not packed.",
                where=source.here(),
                why="layouts inside of a program are chosen when it is compiled.",
                fix="transpose the array, or leave out the layout",
            )


@dataclass(frozen=True)
class Format:
    """A layout and a sharding, either of which may be left open."""

    layout: Layout | None = None
    sharding: Any = None


def with_layout_constraint(x: Any, layouts: Any) -> Any:
    """The value itself, whose layout is row-major.

    Args:
      layouts: a ``Layout`` of as many dimensions, or a tree of them.
    Raises:
      ShapeError: the numbers of dimensions differ.
    """
    is_layout = lambda v: isinstance(v, Layout)

    def one(v: Any, layout: Layout) -> Any:
        if len(layout.major_to_minor) != v.ndim:
            raise errors.ShapeError(f"{layout!r} of an array of {v.ndim} dimensions.", where=source.here())
        return v

    if is_layout(layouts):
        return tree.map(lambda v: one(v, layouts), x)
    return tree.map(lambda layout, v: one(v, layout), layouts, x, is_leaf=is_layout)
