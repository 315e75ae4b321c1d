"""Inspection without computation: ``make_jaxpr`` and ``typeof``.

Transforms, stage 1. In: a function and its arguments, or a value. Out: a jaxpr, or types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.local_avals import LocalArray
from blufunc.core.ir.trace import Tracer, state, type_of
from blufunc.core.programs.stage import TraceTypes, stage
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import (
    FlatFunction,
    abstract,
    argument_indices,
    labels_of,
    name_of,
    struct_of,
)
from blufunc.transforms.batching.batch import MeshAxis, NamedAxis


def make_jaxpr(
    fun: Callable,
    static_argnums: int | Sequence[int] = (),
    return_shape: bool = False,
    *,
    axis_env: Sequence[tuple[Any, int]] | None = None,
) -> Callable:
    """Return a function that traces ``fun`` and returns its jaxpr.

    Args:
      fun: a function of pytrees of arrays.
      static_argnums: positional arguments to pass unchanged; default none.
      return_shape: return the pair of the jaxpr and the results as ``ShapeDtypeStruct``; default False.
      axis_env: names and sizes of axes that the function may use, as under ``vmap``; default none.
    """
    axes = tuple(NamedAxis(name, size) for name, size in axis_env or ())

    @functools.wraps(fun)
    def make(*args, **kwargs) -> Jaxpr | tuple[Jaxpr, Any]:
        static = argument_indices(static_argnums, len(args), "static_argnums")
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)

        def call(*xs, **kw):
            rest = iter(xs)
            return fun(*[a if i in static else next(rest) for i, a in enumerate(args)], **kw)

        call = functools.wraps(fun)(call) if not static else call
        leaves, in_tree = tree.flatten((dynamic, kwargs))
        flat = FlatFunction(call, in_tree)
        labels = labels_of(call, in_tree)
        avals = [abstract(x, label) for x, label in zip(leaves, labels, strict=True)]
        context, state.context = state.context, (*state.context, *axes)
        numbers, state.numbers = state.numbers, {}
        try:
            types = TraceTypes(leaves, avals)
            jaxpr = stage(flat, avals, name_of(fun), labels, None, types, keeps_arrays=True)
        finally:
            state.context, state.numbers = context, numbers
        if return_shape:
            return jaxpr, tree.unflatten(flat.out_tree, [struct_of(a) for a in jaxpr.out_avals])
        return jaxpr

    return make


def typeof(x: Any) -> ShapedArray:
    """Type of an array, traced value or scalar: shape, dtype and weak type.

    It prints as ``f32[3]``, with a ``~`` in front if the type is weak. In the function of a ``shard_map`` it has
    the axes of the mesh over which the value varies, ``typeof(x).vma``, and prints as ``f32[3]{V:data}``. On a mesh
    with ``Explicit`` axes ``typeof(x).sharding`` is the sharding along these, and it prints as ``f32[4@data,3]``.

    Raises:
      ArgumentError: ``x`` is not an array, scalar or ``ShapeDtypeStruct``.
    """
    if not isinstance(x, Tracer):
        return x.full_type if isinstance(x, ConcreteArray) else abstract(x)
    found, axes = type_of(x), tuple(str(e.name) for e in state.context if isinstance(e, MeshAxis))
    return LocalArray(found, axes, None) if axes and not isinstance(found, LocalArray) else found
