"""Functions lifted to arrays: along an axis, by signature, piecewise.

Face over ``vmap``. The function is traced once for all of the parts, and what it returns decides the result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import sequence
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.primitives.linear_ops import reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import asarray
from blufunc.numpy.indexing import getitem
from blufunc.numpy.manipulation import moveaxis, squeeze
from blufunc.numpy.promotion import (
    as_dtype_of,
    as_value,
    axis_in,
    broadcast_shapes,
    shape_of,
    stretch,
    value_of,
)
from blufunc.transforms.batching.vmap import vmap

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

R = TypeVar("R")


def _callable(f: Any, name: str, what: str) -> Callable:
    if not callable(f):
        raise errors.ArgumentError(
            f"{name}: {what} is a function, not {f!r:.60}.", where=source.here(), fix="pass a function"
        )
    return f


def apply_along_axis(func1d: Callable, axis: int, arr: ArrayLike, *args: Any, **kwargs: Any) -> Array:
    """``func1d(line, *args, **kwargs)`` of each line of ``arr`` along an axis."""
    _callable(func1d, "apply_along_axis", "func1d")
    x = as_value(arr, "apply_along_axis")
    d = axis_in(axis, x.aval.ndim, "apply_along_axis")

    def f(line: Array) -> Array:
        return asarray(func1d(line, *args, **kwargs))

    others = x.aval.ndim - 1
    lines = moveaxis(x, d, -1)
    for _ in range(others):
        f = vmap(f)
    out = f(lines)
    own_rank = out.aval.ndim - others
    return moveaxis(out, tuple(range(others, others + own_rank)), tuple(range(d, d + own_rank)))


def apply_over_axes(func: Callable, a: ArrayLike, axes: Any) -> Array:
    """``func(a, axis)`` for each of ``axes`` in turn; a dropped axis is restored."""
    _callable(func, "apply_over_axes", "func")
    x = as_value(a, "apply_over_axes")
    for axis in axes if isinstance(axes, (tuple, list)) else (axes,):
        d = axis_in(axis, x.aval.ndim, "apply_over_axes")
        out = as_value(func(x, d), "apply_over_axes")
        if out.aval.ndim == x.aval.ndim - 1:
            out = reshape(out, (*out.aval.shape[:d], 1, *out.aval.shape[d:]))
        if out.aval.ndim != x.aval.ndim:
            raise errors.ShapeError(
                f"apply_over_axes: the function returned {out.aval} for {x.aval}.",
                where=source.here(),
                fix="return an array of the same rank, or of one less",
            )
        x = out
    return x


def fromfunction(function: Callable[..., R], shape: Any, *, dtype: DTypeLike = float, **kwargs: Any) -> R:
    """The values of a function of positions at all positions of ``shape``.

    The function is given one number of ``dtype`` (float32 unless given) for each axis, and traced once.
    """
    _callable(function, "fromfunction", "function")
    sizes, kind = shape_of(shape, "fromfunction"), dtypes.as_dtype(dtype)
    f = functools.partial(function, **kwargs)
    for d in reversed(range(len(sizes))):
        f = vmap(f, in_axes=tuple([0 if i == d else None for i in range(len(sizes))]))
    return f(*[asarray(np.arange(n), kind) for n in sizes])


def piecewise(x: ArrayLike, condlist: Any, funclist: Any, *args: Any, **kw: Any) -> Array:
    """A piecewise function: the last condition that holds decides.

    Args:
      x: an array.
      condlist: boolean arrays that broadcast to the shape of x; the rows of one array; or one vector.
      funclist: for each condition a number, or a function of x (and ``args`` and ``kw``); one more is for where none
        of them holds, instead of 0.
    Returns:
      an array of the shape and dtype of x. All functions are computed everywhere: see ``where`` on gradients.
    """
    x = value_of(x, "piecewise")
    conditions = [ew.truth(asarray(c), "piecewise") for c in _conditions(condlist)]
    pieces = list(sequence(funclist, "piecewise", "funclist", "functions and numbers"))
    if len(pieces) == len(conditions):
        pieces.append(0)
    if len(pieces) != len(conditions) + 1:
        raise errors.ArgumentError(
            f"piecewise: {len(pieces)} pieces for {len(conditions)} conditions.",
            where=source.here(),
            fix="one for each condition, or one more for where none holds",
        )
    shape = x.aval.shape

    def value(piece: Any) -> Array:
        y = as_dtype_of(piece(x, *args, **kw) if callable(piece) else piece, x.aval.dtype, "piecewise")
        if broadcast_shapes(y.aval.shape, shape) != shape:
            raise errors.ShapeError(
                f"piecewise: a piece is {y.aval}, of x {x.aval}.",
                where=source.here(),
                fix="return the shape of x",
            )
        return y

    result = stretch(value(pieces[-1]), shape)
    for c, piece in zip(conditions, pieces, strict=False):
        if broadcast_shapes(c.aval.shape, shape) != shape:
            raise errors.ShapeError(
                f"piecewise: a condition is {c.aval}, of x {x.aval}.",
                where=source.here(),
                fix="compare x itself",
            )
        result = ops.select(stretch(c, shape), stretch(value(piece), shape), result)
    return result


def _conditions(condlist: Any) -> Sequence:
    """The conditions one by one; a vector of booleans is one condition."""
    if getattr(condlist, "ndim", 0) < 2 and isinstance(condlist, (Array, np.ndarray, bool, np.bool_)):
        return [condlist]
    if isinstance(condlist, (Array, np.ndarray)):
        return [condlist[i] for i in range(len(condlist))]
    conditions = sequence(condlist, "piecewise", "condlist", "boolean arrays")
    return [list(conditions)] if conditions and all(isinstance(c, bool) for c in conditions) else conditions


# -- vectorize -------------------------------------------------------------------------------------

_NAME = r"[A-Za-z_]\w*"
_CORE = rf"\((?:\s*(?:{_NAME}|\d+)\s*(?:,\s*(?:{_NAME}|\d+)\s*)*,?)?\s*\)"
_SIGNATURE = re.compile(rf"\s*(?:{_CORE}\s*(?:,\s*{_CORE}\s*)*)?->\s*{_CORE}\s*(?:,\s*{_CORE}\s*)*")


def _parsed(signature: Any) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The core axes of each argument and of each result."""
    if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
        raise errors.ArgumentError(
            f"vectorize: the signature {signature!r:.60} cannot be read.",
            where=source.here(),
            fix="'(m,n),(n)->(m)': the names of the axes that the function itself takes and gives",
        )
    sides = signature.split("->")
    left, right = [
        [tuple(re.findall(r"\w+", core)) for core in re.findall(r"\([^)]*\)", side)] for side in sides
    ]
    return left, right


def vectorize(
    pyfunc: Callable, *, excluded: Collection[int | str] = frozenset(), signature: str | None = None
) -> Callable:
    """Vectorize a function of scalars, or of small arrays, to arrays that broadcast.

    Args:
      pyfunc: the function; it is mapped by ``vmap``, so it is traced, and has to be made of operations on arrays.
      excluded: positions and names of arguments that are passed on as they are.
      signature: the axes that the function itself takes and gives, such as ``'(m,n),(n)->(m)'``, by default none.
    Returns:
      a function of the same arguments, of which those given by name are passed on as they are.
    """
    _callable(pyfunc, "vectorize", "pyfunc")
    left_out = frozenset(sequence(excluded, "vectorize", "excluded", "positions and names"))
    if any(not isinstance(e, (int, str)) or (isinstance(e, int) and e < 0) for e in left_out):
        raise errors.ArgumentError(
            f"vectorize: excluded is {excluded!r:.60}.",
            where=source.here(),
            fix="positions from 0 on, and names of arguments",
        )
    cores = None if signature is None else _parsed(signature)

    @functools.wraps(pyfunc)
    def vectorized(*args: Any, **kwargs: Any) -> Any:
        mapped = [i for i in range(len(args)) if i not in left_out]
        values = [value_of(args[i], "vectorize") for i in mapped]
        inputs, outputs = cores if cores is not None else ([()] * len(values), None)
        if len(inputs) != len(values):
            raise errors.ArgumentError(
                f"vectorize: {len(values)} arguments for the signature {signature!r}.",
                where=source.here(),
                fix="one for each part of the signature's left side; name others as excluded",
            )
        sizes: dict[str, int] = {}
        leads = [_lead(v, core, sizes, i) for i, (v, core) in enumerate(zip(values, inputs, strict=True))]
        lead = broadcast_shapes(*leads) if leads else ()

        def core_function(*cores: Array) -> Any:
            call_args = list(args)
            for i, v in zip(mapped, cores, strict=True):
                call_args[i] = v
            out = pyfunc(*call_args, **kwargs)
            if outputs is not None:
                _check_results(out, outputs, sizes)
            return out

        f: Callable = core_function
        # an argument is mapped over its axes, except those of size 1
        for axis in reversed(range(len(lead))):
            at = axis - len(lead)
            in_axes = [0 if len(own) >= -at and own[at] != 1 else None for own in leads]
            if any(a is not None for a in in_axes):
                f = vmap(f, in_axes=tuple(in_axes))
            else:
                f = _with_axis(f)
        flat = []
        for v, own in zip(values, leads, strict=True):
            ones = tuple([k for k, n in enumerate(own) if n == 1])
            flat.append(squeeze(v, ones) if ones else v)
        return f(*flat)

    return vectorized


def _with_axis(f: Callable) -> Callable:
    def wrapped(*args: Any) -> Any:
        out = f(*args)
        if isinstance(out, (tuple, list)):
            return type(out)([getitem(asarray(o), None) for o in out])
        return getitem(asarray(out), None)

    return wrapped


def _lead(v: Array, core: tuple[str, ...], sizes: dict[str, int], i: int) -> tuple[int, ...]:
    """The shape of an argument before its core axes, whose sizes are noted."""
    shape = v.aval.shape
    if len(shape) < len(core):
        raise errors.ShapeError(
            f"vectorize: argument {i} is {v.aval} and has not the axes ({','.join(core)}).",
            where=source.here(),
            fix="insert axes, or correct the signature",
        )
    at = len(shape) - len(core)
    _note(core, shape[at:], sizes, f"argument {i}")
    return shape[:at]


def _note(core: Sequence[str], shape: tuple[int, ...], sizes: dict[str, int], what: str) -> None:
    for name, n in zip(core, shape, strict=True):
        known = int(name) if name.isdigit() else sizes.setdefault(name, n)
        if n != known:
            raise errors.ShapeError(
                f"vectorize: axis {name!r} of {what} has size {n}, not {known}.",
                where=source.here(),
                why="axes of one name in the signature have one size.",
                fix="correct the shapes, or the signature",
            )


def _check_results(out: Any, cores: list[tuple[str, ...]], sizes: dict[str, int]) -> None:
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(results) != len(cores) or (len(cores) > 1) != isinstance(out, (tuple, list)):
        raise errors.ArgumentError(
            f"vectorize: the function returned {len(results)} results, and the signature has {len(cores)}.",
            where=source.here(),
            fix="return a tuple of as many as the signature names",
        )
    for i, (r, core) in enumerate(zip(results, cores, strict=True)):
        shape = np.shape(r) if not isinstance(r, Array) else r.aval.shape
        if len(shape) != len(core):
            raise errors.ShapeError(
                f"vectorize: result {i} has shape {shape}, and in the signature the axes ({','.join(core)}).",
                where=source.here(),
                fix="correct the signature",
            )
        _note(core, shape, sizes, f"result {i}")
