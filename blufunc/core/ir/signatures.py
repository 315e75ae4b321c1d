"""Types of the functions that are made from tables of primitives.

Core, never imported by a program. A factory such as ``unary_inexact`` of ``numpy/promotion.py`` says by one of
these protocols what it returns, so that type checkers know ``jnp.sin`` as if it were written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


class Unary(Protocol):
    """A function of one array, made from a table of primitives."""

    def __call__(self, x: ArrayLike, /) -> Array: ...


class NamedUnary(Protocol):
    """A function of one array, which may be passed by name."""

    def __call__(self, x: ArrayLike) -> Array: ...


class Binary(Protocol):
    """A function of two arrays, made from a table of primitives."""

    def __call__(self, x: ArrayLike, y: ArrayLike, /) -> Array: ...


class NamedBinary(Protocol):
    """A function of two arrays, which may be passed by name."""

    def __call__(self, x: ArrayLike, y: ArrayLike) -> Array: ...


class Ufunc(Binary, Protocol):
    """A function of two arrays with the methods and attributes of NumPy's ufuncs."""

    nin: int
    nout: int
    nargs: int
    identity: float | bool | None

    def reduce(
        self,
        a: ArrayLike,
        axis: int | None = 0,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
    ) -> Array: ...

    def accumulate(
        self, a: ArrayLike, axis: int = 0, dtype: DTypeLike | None = None, out: None = None
    ) -> Array: ...

    def at(
        self, a: ArrayLike, indices: object, b: ArrayLike | None = None, /, *, inplace: bool = True
    ) -> Array: ...

    def reduceat(
        self,
        a: ArrayLike,
        indices: ArrayLike,
        axis: int = 0,
        dtype: DTypeLike | None = None,
        out: None = None,
    ) -> Array: ...

    def outer(self, A: ArrayLike, B: ArrayLike, /) -> Array: ...


class Extremum(Protocol):
    """``max`` and its kind."""

    def __call__(
        self,
        a: ArrayLike,
        axis: int | Sequence[int] | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
    ) -> Array: ...


class Total(Protocol):
    """``nansum`` and its kind."""

    def __call__(
        self,
        a: ArrayLike,
        axis: int | Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: ArrayLike | None = None,
        where: ArrayLike | None = None,
    ) -> Array: ...


class Quantifier(Protocol):
    """``all`` and ``any``."""

    def __call__(
        self,
        a: ArrayLike,
        axis: int | Sequence[int] | None = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: ArrayLike | None = None,
    ) -> Array: ...


class Position(Protocol):
    """``argmax`` and its kind."""

    def __call__(
        self, a: ArrayLike, axis: int | None = None, out: None = None, keepdims: bool = False
    ) -> Array: ...


class Running(Protocol):
    """``cumsum`` and its kind in ``blufunc.numpy``."""

    def __call__(
        self, a: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, out: None = None
    ) -> Array: ...


class FourierOne(Protocol):
    """A Fourier transform over one axis."""

    def __call__(
        self, a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None
    ) -> Array: ...


class FourierSeveral(Protocol):
    """A Fourier transform over several axes."""

    def __call__(
        self,
        a: ArrayLike,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = ...,
        norm: str | None = None,
    ) -> Array: ...


class Reduce(Protocol):
    """A reduction of ``lax``."""

    def __call__(self, operand: ArrayLike, axes: Sequence[int]) -> Array: ...


class AlongAxis(Protocol):
    """``cumsum`` and its kind in ``lax``."""

    def __call__(self, operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Array: ...


class Scatter(Protocol):
    """A scatter of ``lax``."""

    def __call__(
        self,
        operand: ArrayLike,
        scatter_indices: ArrayLike,
        updates: ArrayLike,
        dimension_numbers: Any,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: Any = None,
    ) -> Array: ...


A = TypeVar("A", contravariant=True)
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class OfArray(Protocol[A, P, R]):
    """A derivative with respect to an array, the first argument.

    Not a ``Callable``, which derivatives with respect to a pytree are: of a lambda either may hold, and mypy then
    takes the result for ``Any``, where of two callables it makes one that ``--strict`` forbids to call.
    """

    def __call__(self, x: A, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
