"""The base of sparse arrays, and the errors and warnings of the package."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any

from blufunc import errors
from blufunc.core.ir import source

__all__ = ["CuSparseEfficiencyWarning", "JAXSparse", "SparseEfficiencyError", "SparseEfficiencyWarning"]


class SparseEfficiencyError(ValueError):
    """A change of layout would store many zeros."""


class SparseEfficiencyWarning(UserWarning):
    """A change of layout stores many zeros."""


class CuSparseEfficiencyWarning(SparseEfficiencyWarning):
    """An operation is not one of cuSPARSE: no operation is."""


def refused(what: str, fix: str) -> errors.UnsupportedError:
    """The error for a use that is not supported."""
    return errors.UnsupportedError(f"{what}.", where=source.here(), fix=fix)


def shape_of_children(shape: tuple[int, ...], n_batch: int, indices: Any, rank: int) -> tuple[int, ...]:
    """The shape of an array whose children have other leading dimensions.

    Args:
      shape, n_batch: of the array that was flattened.
      indices: its new child.
      rank: the number of dimensions of ``indices`` that are not of batches.
    """
    if not hasattr(indices, "shape"):
        return shape
    more = indices.ndim - rank - n_batch
    return (*indices.shape[:more], *shape) if more > 0 else shape[-more:]


class JAXSparse:
    """An array of which some elements are specified, and the others are zero.

    Attributes:
      shape: the shape.
      data: the specified elements.
    """

    data: Any
    shape: tuple[int, ...]
    __array_priority__ = 100
    __matmul__: Callable[..., Any]  # ``products.py`` sets them
    __rmatmul__: Callable[..., Any]
    __hash__ = None  # type: ignore[assignment]

    def _compared(self, other: Any) -> Any:
        if not isinstance(other, JAXSparse | numbers.Number) and not hasattr(other, "shape"):
            return NotImplemented
        raise refused("a comparison of a sparse array, which is true of most zeros", "x.todense() == y")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape

    ndim = property(lambda self: len(self.shape), doc="The number of dimensions.")
    size = property(lambda self: math.prod(self.shape), doc="The number of elements, the zeros among them.")
    T = property(lambda self: self.transpose(), doc="The transposed array.")

    @property
    def nse(self) -> int:
        """The number of specified elements."""
        return self.data.shape[0]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))  # type: ignore[index]

    def __repr__(self) -> str:
        dtype = getattr(self.data, "dtype", None)
        return f"{type(self).__name__}({dtype}{list(self.shape)}, nse={self.nse})"

    def transpose(self, axes: Any = None) -> Any:
        """The array with its dimensions in another order."""
        raise NotImplementedError

    def todense(self) -> Any:
        """The array with all elements."""
        raise NotImplementedError

    def to_bcoo(self) -> Any:
        """The array in coordinates."""
        raise NotImplementedError

    def block_until_ready(self) -> Any:
        """Wait for the elements, and return the array."""
        self.data.block_until_ready()
        return self
