"""Universal functions: reductions and updates by a function of scalars.

Face. The functions that are ``ufunc``s in JAX have these methods as attributes, and stay functions, so
that calls cost no more; ``frompyfunc`` makes objects with them. Functions with an identity are associative, and reduce
by trees or as the reductions that exist; all else runs from the left, element by element.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.primitives.linear_ops import broadcast_to, reshape
from blufunc.lax.windowed import reduce as lax_reduce
from blufunc.numpy import elementwise as ew
from blufunc.numpy import picking, reductions
from blufunc.numpy.functional import vectorize
from blufunc.numpy.indexing import getitem
from blufunc.numpy.joining import append
from blufunc.numpy.manipulation import expand_dims, moveaxis
from blufunc.numpy.promotion import (
    as_value,
    axes_in,
    axis_in,
    broadcast_shapes,
    cast,
    constant,
    dtype_of,
    value_of,
)
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.control_flow.loops import fori_loop
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.staging.eval_shape import eval_shape


class _Kind(type):
    def __instancecheck__(cls, x: object) -> bool:
        return type(x) is ufunc or hasattr(x, "reduceat")


class ufunc(metaclass=_Kind):
    """A function of scalars, applied elementwise, as ``numpy.ufunc``.

    ``isinstance(f, ufunc)`` also holds for the functions of this namespace that have these methods.

    Args:
      func: from ``nin`` scalars to ``nout`` scalars; it is traced.
      nin, nout: the number of operands and results.
      name: in messages; by default that of ``func``.
      nargs: the number of arguments; default ``nin``.
      identity: the scalar that changes nothing, if there is one.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        /,
        nin: int,
        nout: int,
        *,
        name: str | None = None,
        nargs: int | None = None,
        identity: Any = None,
        call: Callable[..., Any] | None = None,
    ):
        self._func, self.nin, self.nout = func, operator.index(nin), operator.index(nout)
        self.nargs = operator.index(nargs or nin)
        self.identity = identity
        self.__name__ = str(name or getattr(func, "__name__", "function"))
        self.__doc__ = func.__doc__
        self._call = call or vectorize(func)

    def __repr__(self) -> str:
        return f"<blufunc.numpy.ufunc {self.__name__!r}>"

    def _key(self) -> tuple:
        return self._func, self.__name__, self.identity, self.nin, self.nout, self.nargs

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return type(other) is ufunc and self._key() == other._key()

    def __call__(self, *args: Any, out: None = None, where: None = None) -> Any:
        only_none(self.__name__, "out", out)
        only_none(self.__name__, "where", where)
        if len(args) != self.nin:
            raise errors.ArgumentError(
                f"{self.__name__} takes {self.nin} operands, not {len(args)}.", where=source.here()
            )
        return self._call(*args)

    def reduce(
        self,
        a: Any,
        axis: Any = 0,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = None,
    ) -> Array:
        """The function applied along an axis, from the left: ``f(f(a[0], a[1]), a[2])``.

        Args:
          axis: an axis; None reduces all, and functions with an identity take tuples.
          dtype: of the computation; by default that of the function's result.
          initial: a first operand; by default the identity, if there is one.
          where: a mask of the elements that count.
        """
        name = self._binary("reduce", out)
        x = self._operand(a, name)
        if where is not None and initial is None and self.identity is None:
            raise errors.ArgumentError(
                f"{name}: {self.__name__} has no identity.",
                where=source.here(),
                why="where nothing is selected there would be no result.",
                fix="pass initial=",
            )
        if where is not None and not dtypes.is_bool(as_value(where, name).aval.dtype):
            raise errors.DtypeError(
                f"{name}: where is a mask of booleans.", where=source.here(), fix="mask != 0"
            )
        if self in _ALREADY:
            x = x if dtype is None else cast(x, dtypes.as_dtype(dtype))
            return _ALREADY[self](x, axis, keepdims=keepdims, initial=initial, where=where)
        x = cast(x, dtype_of(dtype) or self._result_dtype(x))
        mask: Any = None
        if where is not None:
            fill = self._identity(x) if self.identity is not None else constant(0, x.aval.dtype)
            mask = broadcast_to(as_value(where, name), x.aval.shape)
        if self in _ASSOCIATIVE and self.identity is not None:
            axes = axes_in(axis, x.aval.ndim, name)
            y = x if where is None else ew.choose(mask, x, fill)
            y = lax_reduce(y, self._identity(x), self._func, axes)
            y = y if initial is None else self(cast(value_of(initial, name), x.aval.dtype), y)
            return expand_dims(y, axes) if keepdims else y
        shape = x.aval.shape
        if axis is None:
            x, d, kept = reshape(x, (x.aval.size,)), 0, (1,) * len(shape)
            mask = None if where is None else reshape(mask, (x.aval.size,))
        else:
            d = axis_in(axis, x.aval.ndim, name)
            kept = (*shape[:d], 1, *shape[d + 1 :])
        x = moveaxis(x, d, 0)
        mask = None if where is None else moveaxis(mask, d, 0)
        start = self.identity if initial is None else initial
        if start is None and not x.aval.shape[0]:
            raise errors.ArgumentError(
                f"{name}: an axis of size 0, and {self.__name__} has no identity.",
                where=source.here(),
                fix="pass initial=",
            )
        first = getitem(x, 0) if start is None else cast(value_of(start, name), x.aval.dtype)

        def body(i: Any, y: Any) -> Any:
            z = cast(self(y, getitem(x, i)), x.aval.dtype)
            return z if mask is None else ew.choose(getitem(mask, i), z, y)

        y = fori_loop(int(start is None), x.aval.shape[0], body, broadcast_to(first, x.aval.shape[1:]))
        return reshape(y, kept) if keepdims else y

    def accumulate(self, a: Any, axis: int = 0, dtype: Any = None, out: None = None) -> Array:
        """The results of ``reduce`` over the first 1, 2, 3, ... elements along an axis."""
        name = self._binary("accumulate", out)
        x = self._operand(a, name)
        if self in _ACCUMULATED:
            return _ACCUMULATED[self](x, axis, dtype=dtype)
        x = cast(x, dtype_of(dtype) or self._result_dtype(x))
        d = axis_in(axis, x.aval.ndim, name)
        if not x.aval.size:
            return x
        x = moveaxis(x, d, 0)

        def step(y: Any, each: Any) -> Any:
            y = cast(self(y, each), x.aval.dtype)
            return y, y

        rest = scan(step, getitem(x, 0), getitem(x, slice(1, None)))[1]
        return moveaxis(append(getitem(x, slice(0, 1)), rest, 0), 0, d)

    def at(self, a: Any, indices: Any, b: Any = None, /, *, inplace: bool = True) -> Array:
        """``a`` updated at ``indices``, one after another, by the function.

        Args:
          b: the second operands, which broadcast to ``a[indices]``; None for functions of one operand.
          inplace: False, as arrays are immutable: the result is a new one.
        """
        name = f"{self.__name__}.at"
        if inplace:
            raise errors.UnsupportedError(
                f"{name} in place: arrays are immutable.",
                where=source.here(),
                fix=f"a = {name}(a, indices, {'' if b is None else 'b, '}inplace=False)",
            )
        if self.nin != 1 + (b is not None) or self.nout != 1:
            raise errors.ArgumentError(f"{name} takes {self.nin} operands.", where=source.here())
        x = self._operand(a, name)
        update = _UPDATES.get(self)
        if update is not None and not dtypes.is_bool(x.aval.dtype):
            return getattr(x.at[indices], update)(b)
        operands = [] if b is None else [value_of(b, name)]
        kind = self._result_dtype(x, *operands)
        x, operands = cast(x, kind), [cast(v, kind) for v in operands]
        parts = indices if isinstance(indices, tuple) else (indices,)
        shape = broadcast_shapes(*[i.shape for i in parts if hasattr(i, "shape")])
        flat = math.prod(shape)
        if not shape or any(hasattr(i, "dtype") and dtypes.is_bool(i.dtype) for i in parts):
            return x.at[indices].set(self(x.at[indices].get(), *operands))  # no place occurs twice
        spread = lambda i: reshape(broadcast_to(value_of(i, name), shape), (flat,))
        parts = tuple([spread(i) if hasattr(i, "shape") else i for i in parts])
        if operands:
            tail = operands[0].aval.shape[len(shape) :]
            operands = [reshape(broadcast_to(operands[0], (*shape, *tail)), (flat, *tail))]

        def body(n: Any, y: Any) -> Any:
            place = tuple([getitem(i, n) if hasattr(i, "shape") else i for i in parts])
            return y.at[place].set(cast(self(y.at[place].get(), *[getitem(v, n) for v in operands]), kind))

        return fori_loop(0, flat, body, x)

    def reduceat(self, a: Any, indices: Any, axis: int = 0, dtype: Any = None, out: None = None) -> Array:
        """``reduce`` of each part ``a[indices[i]:indices[i + 1]]`` along an axis.

        The last part reaches to the end; one that has no elements is ``a[indices[i]]``.
        """
        name = self._binary("reduceat", out)
        x = self._operand(a, name)
        places = as_value(indices, name)
        d = axis_in(axis, x.aval.ndim, name)
        if places.aval.ndim != 1:
            raise errors.ShapeError(f"{name}: indices {places.aval}, not of rank 1.", where=source.here())
        x = x if dtype is None else cast(x, dtypes.as_dtype(dtype))
        n = x.aval.shape[d]
        others = tuple([i for i in range(x.aval.ndim) if i != d])
        start, stop = (expand_dims(v, others) for v in (places, append(getitem(places, slice(1, None)), n)))

        def body(i: Any, y: Any) -> Any:
            each = expand_dims(picking.take(x, i, d), d)
            inside = ew.logical_and(ew.greater(i, start), ew.less(i, stop))
            return ew.choose(inside, cast(self(y, each), x.aval.dtype), y)

        return fori_loop(0, n, body, picking.take(x, places, d))

    def outer(self, A: Any, B: Any, /) -> Array:
        """The function of all pairs of elements of A and B."""
        name = self._binary("outer", None)
        x, y = value_of(A, name), value_of(B, name)
        n, m = x.aval.ndim, y.aval.ndim
        x = reshape(x, (*x.aval.shape, *[1] * m)) if m else x  # what has rank 0 may be weak
        return self(x, reshape(y, (*[1] * n, *y.aval.shape)) if n and m else y)

    # -- checks ------------------------------------------------------------------------------------

    def _binary(self, method: str, out: Any) -> str:
        name = f"{self.__name__}.{method}"
        only_none(name, "out", out)
        if self.nin != 2 or self.nout != 1:
            raise errors.ArgumentError(
                f"{name}: the function has {self.nin} operands and {self.nout} results.",
                where=source.here(),
                why="only functions from two scalars to one are applied to one result after another.",
            )
        return name

    def _identity(self, x: Array) -> Array:
        """The identity in the dtype of x, where -1 is all bits set."""
        return constant(np.asarray(self.identity).astype(x.aval.dtype)[()].item(), x.aval.dtype)

    def _operand(self, a: Any, name: str) -> Array:
        return value_of(a, name)

    def _result_dtype(self, *operands: Array) -> Any:
        """The dtype of the function; a missing second operand is as the first."""
        kinds = [x.aval.dtype for x in operands]
        kinds += kinds[:1] * (self.nin - len(kinds))
        return eval_shape(self._func, *[ShapeDtypeStruct((), kind) for kind in kinds]).dtype


def frompyfunc(func: Callable[..., Any], /, nin: int, nout: int, *, identity: Any = None) -> ufunc:
    """A ``ufunc`` of a function from ``nin`` scalars to ``nout`` scalars.

    Args:
      func: a function of arrays of rank 0, which is traced.
      identity: the scalar that changes nothing, at which reductions begin; default None.
    """
    if not callable(func):
        raise errors.ArgumentError(
            f"frompyfunc takes a function, not {func!r:.60}.", where=source.here(), fix="pass a function"
        )
    return ufunc(func, nin, nout, identity=identity)


_OF = {f: ufunc(f, 2, 1, identity=identity, call=f) for f, identity in ew.IDENTITIES.items()}
_OF[ew.negative] = ufunc(ew.negative, 1, 1, call=ew.negative)
_ASSOCIATIVE = frozenset(_OF.values())
_ALREADY: dict[ufunc, Callable[..., Array]] = {
    _OF[ew.add]: reductions.sum,
    _OF[ew.multiply]: reductions.prod,
    _OF[ew.maximum]: reductions.max,
    _OF[ew.minimum]: reductions.min,
}
_ACCUMULATED: dict[ufunc, Callable[..., Array]] = {
    _OF[ew.add]: reductions.cumsum,
    _OF[ew.multiply]: reductions.cumprod,
}
_UPDATES = {
    _OF[ew.add]: "add",
    _OF[ew.subtract]: "subtract",
    _OF[ew.multiply]: "multiply",
    _OF[ew.maximum]: "max",
    _OF[ew.minimum]: "min",
}


def of(function: Callable) -> ufunc:
    """The ``ufunc`` that has the methods of a function of this namespace."""
    return _OF[function]
