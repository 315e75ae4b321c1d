"""``fori_loop`` and ``map``, in terms of ``scan`` and ``while_loop``.

Transforms, stage 2. In: a user's loop. Out: equivalent loop primitives; there are no primitives here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ops.elementwise import add, convert, lt
from blufunc.core.ops.shape import concatenate, slice_in_dim
from blufunc.core.primitives.linear_ops import reshape
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.control_flow.while_loop import while_loop

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")


@overload
def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[Any, Array], ArrayLike],
    init_val: ArrayLike,
    *,
    unroll: int | None = None,
) -> Array: ...
@overload
def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | None = None,
) -> T: ...
@overload
def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[Any, T], T],
    init_val: Any,
    *,
    unroll: int | None = None,
) -> T: ...


def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[..., Any], init_val: Any, *, unroll: int | None = None
) -> Any:
    """``for i in range(lower, upper): val = body_fun(i, val)``.

    With static bounds (Python integers, or arrays that are not traced) it is a scan, differentiable in both modes;
    otherwise a ``while_loop``, which has no reverse mode.

    Args:
      lower, upper: integer scalars.
      body_fun: from (i, val) to the next val, of the same structure, shapes and dtypes; i is an int32, weakly
        typed as a Python int is, or has the dtype of the bounds if they are arrays of another.
      init_val: the initial val, a pytree.
      unroll: for static bounds, a hint to compilers: the number of steps to unroll.
    Returns:
      the last val; ``init_val`` if ``upper <= lower``.
    """
    check_callable(body_fun, "fori_loop")
    bounds = [lift(b, f"the {what} bound of fori_loop") for b, what in ((lower, "lower"), (upper, "upper"))]
    for b in bounds:
        if b.aval.ndim or not dtypes.is_integer(b.aval.dtype):
            raise errors.ArgumentError(
                f"the bounds of fori_loop are integer scalars, not {b.aval}.", where=source.here()
            )
    kinds = [(b.aval.dtype, b.aval.weak_type) for b in bounds]
    dtype = dtypes.promote(*kinds)[0]
    # a counter from static bounds is like a Python int, and one from traced bounds as its first value
    static = all(isinstance(b, ConcreteArray) for b in bounds)
    weak = dtype == dtypes.scalar_dtype(0)[0] if static else kinds[0] == (kinds[1][0], True)
    if static:
        start, stop = (int(np.asarray(b)) for b in bounds)

        def step(carry, _):
            i, val = carry
            return (add(i, scalar(1, dtype, weak)), body_fun(i, val)), None

        step.__name__ = name_of(body_fun)
        hint = 1 if unroll is None else static_int(unroll, "fori_loop", "unroll")
        first = scalar(start, dtype, weak)
        return scan(step, (first, init_val), None, length=max(stop - start, 0), unroll=hint)[0][1]
    if unroll is not None:
        raise errors.ArgumentError(
            "fori_loop: unroll needs static bounds, and these are traced.",
            where=source.here(),
            fix="pass Python integers, or leave unroll out",
        )

    def advance(carry):
        i, end, val = carry
        return add(i, scalar(1, dtype, weak)), end, body_fun(i, val)

    advance.__name__ = name_of(body_fun)
    first, last = bounds if weak else (convert(b, dtype) for b in bounds)
    return while_loop(lambda c: lt(c[0], c[1]), advance, (first, last, init_val))[2]


@overload
def map(f: Callable[[X], Y], xs: X, *, batch_size: int | None = None) -> Y: ...
@overload
def map(f: Callable[[X], Y], xs: Any, *, batch_size: int | None = None) -> Y: ...


def map(f: Callable[..., Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """Apply ``f`` along the first axis of ``xs`` sequentially; stack the results.

    Args:
      f: from an element, a pytree, to a pytree.
      xs: a pytree of arrays with one leading axis size.
      batch_size: the number of elements to run at once by ``vmap``: faster, for more memory. Default 1.
    """
    check_callable(f, "map")
    if batch_size is None:
        return scan(lambda _, x: ((), f(x)), (), xs)[1]
    size = static_int(batch_size, "map", "batch_size")
    if size < 1:
        raise errors.ValueRangeError(f"map: batch_size={size} is not positive.", where=source.here())
    leaves, in_tree = tree.flatten(xs)
    paths = treepath.leaf_paths(in_tree)
    values = as_values(leaves, lambda i: f"xs{paths[i]}")
    if not values or any(not v.aval.ndim or v.aval.shape[0] != values[0].aval.shape[0] for v in values):
        listed = ", ".join(f"xs{p} {v.aval}" for p, v in zip(paths, values, strict=True))
        raise errors.ShapeError(
            f"map takes arrays with one leading axis size, not {listed or 'none'}.",
            where=source.here(),
        )
    n = values[0].aval.shape[0]
    whole = n - n % size
    many = vmap(f)
    parts = []
    if whole or not n:
        batches = [
            reshape(slice_in_dim(v, 0, whole), (whole // size, size, *v.aval.shape[1:])) for v in values
        ]
        stacked = scan(lambda _, x: ((), many(x)), (), tree.unflatten(in_tree, batches))[1]
        parts.append(tree.map(lambda y: reshape(y, (whole, *y.aval.shape[2:])), stacked))
    if whole < n:
        parts.append(many(tree.unflatten(in_tree, [slice_in_dim(v, whole, n) for v in values])))
    return parts[0] if len(parts) == 1 else tree.map(lambda *ys: concatenate(ys, 0), *parts)
