"""``elementwise``: a function of scalars applied to the elements of arrays.

Transforms, before stage 1. In: a function and broadcastable arrays. Out: the operations that it traces to, mapped over
every axis, so that later stages see elementwise primitives only and fuse them with their neighbours.

The derivative is that of the branch taken. With f_i the partial derivative with respect to input i, itself such a
function, and t_i the tangents,

    f'(x) t  =  sum_i f_i(x) t_i,

and the selection between branches is part of f_i, before the multiplication. So ``where(x > 0, sqrt(x), 0)`` has the
gradient 0 at 0, where the usual derivative multiplies 0 by the infinite slope of the other branch and gives NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ops import elementwise as ops
from blufunc.core.primitives.linear_ops import add_any, broadcast_to, instantiate
from blufunc.core.primitives.tangents import zero
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError, DtypeError, ShapeError
from blufunc.transforms.arguments import FlatFunction, as_values, check_callable, labels_of, name_of
from blufunc.transforms.autodiff.jvp import jvp_flat
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

P = ParamSpec("P")
R = TypeVar("R")


def elementwise(fun: Callable[P, R]) -> Callable[P, R]:
    """Apply a function of scalars to each element of arrays.

        @bf.elementwise
        def entropy(p):
            return bnp.where(p > 0, -p * bnp.log(p), 0.0)

        entropy(p), bf.grad(lambda p: entropy(p).sum())(p)  # finite where p is 0

    The function is traced with arrays of rank 0, whatever the shape of the arguments, and becomes operations like any
    others: it runs on every device, is fused with its neighbours, and works under every transform. ``where`` computes
    both branches; the derivative is that of the branch taken. To give a derivative by hand, use ``custom_jvp``.

    Args:
      fun: a function of real scalars that returns one scalar.
    Returns:
      a function of arrays, whose shapes broadcast. Python numbers stay constants of full precision.
    Raises:
      ArgumentError: ``fun`` is not a function.
      DtypeError, ShapeError (when it is called): an argument is complex; the shapes do not broadcast; the result is
        not one scalar.
    """
    if isinstance(fun, str):
        raise ArgumentError(
            f"elementwise takes a Python function, not C source: {fun!r:.60}.",
            where=source.here(),
            why="blufunc traces formulas from Python, and generates the same kernels as it did from C.",
            fix="bf.elementwise(lambda x, alpha=0.01: bnp.where(x > 0, x, alpha * x)); or bf.cuda_kernel for CUDA C++",
        )
    check_callable(fun, "elementwise")
    name = name_of(fun)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, in_tree = tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if x.__class__ not in (bool, int, float)]
        labels = functools.cache(lambda: labels_of(fun, in_tree))
        values = as_values([leaves[i] for i in places], lambda i: f"the argument {labels()[places[i]]}")
        for i, v in zip(places, values, strict=True):
            if not (dtypes.is_numeric(v.aval.dtype) or dtypes.is_bool(v.aval.dtype)) or dtypes.is_complex(
                v.aval.dtype
            ):
                raise DtypeError(
                    f"{name} takes real numbers, and its argument {labels()[i]} is {v.aval}.",
                    where=source.here(),
                    fix="pass the real and the imaginary part of complex numbers",
                )

        def of_scalars(*xs: Any) -> Any:
            given = dict(zip(places, xs, strict=True))
            flat = FlatFunction(fun, in_tree)
            outs = flat(*[given.get(i, x) for i, x in enumerate(leaves)])
            if len(outs) != 1 or outs[0].aval.shape:
                raise ShapeError(
                    f"{name} returned {', '.join(str(o.aval) for o in outs) or 'no array'} for scalars.",
                    where=source.here(),
                    why="an elementwise function gives one scalar for each element.",
                    fix="use bf.vmap for functions that return arrays, or several of them",
                )
            return outs[0]

        of_scalars.__name__ = name
        call: Callable = _branch_taken(of_scalars)
        shape = _common_shape([v.aval.shape for v in values], name)
        values = [broadcast_to(v, shape) if v.aval.ndim else v for v in values]
        axes = tuple(0 if v.aval.ndim else None for v in values)
        for _ in shape:
            call = vmap(call, axes)
        return call(*values)

    return mapped


def _branch_taken(fun: Callable) -> Callable:
    """``fun`` with a derivative that selects branches before it multiplies."""
    call = custom_jvp(fun)

    @functools.cache
    def partial(i: int) -> Callable:
        def slope(*xs: Any) -> Any:
            tangents = [scalar(1, x.aval.dtype) if j == i else zero(x.aval) for j, x in enumerate(xs)]
            return instantiate(jvp_flat(lambda *ys: [fun(*ys)], xs, tangents)[1][0])

        slope.__name__ = fun.__name__
        return _branch_taken(slope)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out = call(*primals)
        if not dtypes.is_inexact(out.aval.dtype):
            return out, None
        terms = [
            ops.mul(partial(i)(*primals), ops.convert(t, out.aval.dtype))
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero)
        ]
        return out, functools.reduce(add_any, terms) if terms else None

    call.defjvp(derivative, symbolic_zeros=True)
    return call


def _common_shape(shapes: Sequence[tuple[int, ...]], name: str) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(
            f"{name}: the shapes {' and '.join(map(str, dict.fromkeys(shapes)))} do not broadcast.",
            where=source.here(),
            fix="insert an axis where one is missing (x[:, None]), or reshape one of them",
        ) from None
