"""Shapes of results without computation: ``eval_shape``.

Transforms, stage 2. In: a function and its arguments, or their types. Out: the types of its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blufunc.core.ops.elementwise import weak_as
from blufunc.core.ops.offload import in_memory
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.programs.refs import RefError
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import ShapeDtypeStruct, abstract
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr


def eval_shape(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """Shapes and dtypes of ``fun(*args, **kwargs)``, without computing anything.

    Args:
      fun: a function of pytrees of arrays.
      args, kwargs: its arguments; arrays, or anything with ``shape`` and ``dtype`` as ``ShapeDtypeStruct``.
    Returns:
      the results, with ``ShapeDtypeStruct`` instead of arrays. Refs keep their values.
    """

    @functools.wraps(fun)
    def of_arrays(*xs, **kw):
        return tree.map(_array_of, fun(*xs, **kw))

    try:
        return make_jaxpr(of_arrays, return_shape=True)(*args, **kwargs)[1]
    except RefError:
        return jit(of_arrays).eval_shape(*args, **kwargs)


def _array_of(x: Any) -> Any:
    """A value for a type among the results."""
    return weak_as(in_memory(zeros(abstract(x)), x.memory), x) if isinstance(x, ShapeDtypeStruct) else x
