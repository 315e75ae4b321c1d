"""Callbacks: Python functions that a program calls while it runs.

Transforms, stage 2. In: a Python function and its arguments. Out: one equation, under any number of ``vmap``s: the loop
over a batch runs on the host. ``pure_callback`` computes a value, and may be dropped or repeated like any operation;
``io_callback`` has side effects, and runs exactly as often as the program says; ``debug_callback`` reports, and is
ignored by transforms.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.trace import EVAL, set_trace
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import batched_front, move_dim, reshape
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import (
    abstract,
    as_values,
    check_callable,
    labels_of,
    name_of,
    value_or_none,
)

as_raised: Callable[[str, str, Exception, str | None], Exception] | None = None
"""The error of a program, from what a callback raised.

None: raise the original error. Its arguments are the API, the name of the callback, what it raised, and the line. Set
by ``blufunc/as_jax/__init__.py``.
"""


class HostFunction:
    """A user's function, from a list of NumPy arrays to a list of new ones.

    Args:
      fun: the function, of pytrees of arrays.
      in_tree: the structure of its arguments, ``(args, kwargs)``.
      static: the leaves of the arguments that are not arrays, by position.
      out_tree: the ``TreeDef`` of its results; None if results are ignored.
      outs: the types of their leaves.
      api: the function that the user called, for messages.
    """

    def __init__(
        self,
        fun: Callable,
        in_tree: tree.TreeDef,
        static: dict[int, Any],
        out_tree: Any,
        outs: tuple[ShapedArray, ...],
        api: str,
    ):
        self.fun, self.in_tree, self.static = fun, in_tree, static
        self.out_tree, self.outs, self.api = out_tree, outs, api
        self.source = source.current()
        self.__name__ = name_of(fun)

    def with_outs(self, outs: tuple[ShapedArray, ...]) -> HostFunction:
        """The same function with other result types."""
        changed = copy.copy(self)
        changed.outs = outs
        return changed

    def __call__(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        device = backend.host_device()
        values = iter(
            [from_numpy(np.asarray(b), device) for b in buffers]
        )  # copies, since the user may keep references
        n = self.in_tree.num_leaves
        leaves = [self.static[i] if i in self.static else next(values) for i in range(n)]
        args, kwargs = tree.unflatten(self.in_tree, leaves)
        try:
            with set_trace(EVAL), source.own_lines():
                out = self.fun(*args, **kwargs)
        except Exception as e:
            where = source.describe(self.source)
            if getattr(e, "where", None) != where:  # else the message has the line
                e.add_note(f"in {self.__name__}, which {self.api} calls, at {where}")
            raised = as_raised(self.api, self.__name__, e, where) if as_raised else e
            if raised is e:
                raise
            raise raised from e
        return self._results(out)

    def _results(self, out: Any) -> list[np.ndarray]:
        """Check the results of the function."""
        if self.out_tree is None:
            return []
        leaves, structure = tree.flatten(out)
        if structure != self.out_tree and not self._is_like_declared(out):
            names = ("result_shape_dtypes", "the result")
            raise errors.TreeError(
                f"{self.api}: {self.__name__} returned a different structure from result_shape_dtypes.",
                where=source.describe(self.source),
                why="; ".join(treepath.diff(self.out_tree, structure, *names)[:5]),
                fix="return a pytree of arrays of that structure, or correct result_shape_dtypes",
            )
        paths = treepath.leaf_paths(self.out_tree)
        return [self._checked(x, a, p) for x, a, p in zip(leaves, self.outs, paths, strict=True)]

    def _is_like_declared(self, out: Any) -> bool:
        """True if a result differs from its declaration only in lists or tuples."""
        declared = tree.unflatten(self.out_tree, [0] * self.out_tree.num_leaves)
        return tree.structure(_with_tuples(out)) == tree.structure(_with_tuples(declared))

    def _checked(self, x: Any, aval: ShapedArray, path: str) -> np.ndarray:
        """Copy one result to a new array; default 64-bit dtypes may become 32-bit."""
        what = f"{self.api}: the result{path} of {self.__name__}"
        where = source.describe(self.source)
        host = np.asarray(x)
        if host.dtype != aval.dtype:
            try:
                host = dtypes.canonical_numpy(host)
            except errors.BlufuncError as e:
                raise type(e)(f"{what}: {e.what}", where=where, why=e.why, fix=e.fix) from None
        if host.dtype != aval.dtype:
            raise errors.DtypeError(
                f"{what} is {ShapedArray(host.shape, host.dtype)}, result_shape_dtypes says {aval}.",
                where=where,
                fix=f"np.asarray(result, {aval.dtype.name!r}), or correct result_shape_dtypes",
            )
        if host.shape != aval.shape:
            raise errors.ShapeError(
                f"{what} is {ShapedArray(host.shape, host.dtype)}, result_shape_dtypes says {aval}.",
                where=where,
                fix="return an array of that shape, or correct result_shape_dtypes",
            )
        return np.array(host, order="C")


def _with_tuples(x: Any) -> Any:
    """A result with tuples for lists."""
    if x.__class__ in (list, tuple):
        return tuple(map(_with_tuples, x))
    return {k: _with_tuples(v) for k, v in x.items()} if x.__class__ is dict else x


class Repeated:
    """A host function over a batch: one call per element, in order."""

    outs: tuple[ShapedArray, ...]
    __name__: str

    def __init__(self, call: HostFunction | Repeated, size: int, batched: tuple[bool, ...]):
        self.call, self.size, self.batched = call, size, batched
        self.outs = tuple([ShapedArray((size, *a.shape), a.dtype) for a in call.outs])
        self.__name__ = call.__name__

    def __call__(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        stacked = [np.empty(a.shape, a.dtype) for a in self.outs]
        for i in range(self.size):
            outs = self.call([x[i] if b else x for x, b in zip(buffers, self.batched, strict=True)])
            for whole, out in zip(stacked, outs, strict=True):
                whole[i] = out
        return stacked


class _Callback(Primitive):
    """Base of calls of ``callback``, a ``HostFunction`` or its batched form."""

    kind, multiple_results, fresh = "callback", True, True
    shard = unsupported("the user's function is of whole values")

    def abstract(self, *avals, callback, **params):
        return list(callback.outs)

    def reference(self, compile, *, callback, **params):
        return callback

    def repeat(self, axis, args, dims, *, callback, **params):
        """Batching rule with one call per element."""
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        callback = Repeated(callback, axis.size, tuple([d is not None for d in dims]))
        return self.bind(*ins, callback=callback, **params), [0] * len(callback.outs)


# -- pure ------------------------------------------------------------------------------------------

VMAP_METHODS = {
    "sequential": "one call for each element",
    "sequential_unrolled": "the same",
    "expand_dims": "one call, arguments that are not mapped with a first axis of size 1",
    "broadcast_all": "one call, arguments that are not mapped repeated along a first axis",
    "legacy_vectorized": "one call, arguments that are not mapped as they are",
}


class _PureCallback(_Callback):
    """A Python function called for its value."""

    name = "pure_callback"

    jvp = unsupported(
        "it calls Python, which has no derivative; use custom_jvp or custom_vjp for the calling function, or "
        "call it on lax.stop_gradient of its arguments"
    )
    transpose = unsupported("it calls Python, which may not be linear")

    def batch(self, axis, args, dims, *, callback, vmap_method):
        if vmap_method is None:
            raise errors.UnsupportedError(
                f"vmap of a pure_callback of {callback.__name__} that does not say how to map it.",
                where=source.here(),
                fix="pure_callback(..., vmap_method='sequential'): "
                + "; ".join(f"{method!r}, {text}" for method, text in VMAP_METHODS.items()),
            )
        if vmap_method in ("sequential", "sequential_unrolled"):
            return self.repeat(axis, args, dims, callback=callback, vmap_method=vmap_method)
        ins = [self._in_front(axis, a, d, vmap_method) for a, d in zip(args, dims, strict=True)]
        outs = tuple([ShapedArray((axis.size, *a.shape), a.dtype) for a in callback.outs])
        results = self.bind(*ins, callback=callback.with_outs(outs), vmap_method=vmap_method)
        return results, [0] * len(outs)

    def _in_front(self, axis: Any, x: Any, d: int | None, vmap_method: str) -> Any:
        """An argument of a call for a whole batch, with the batch axis leading."""
        if d is not None:
            return move_dim(x, d, 0)
        if vmap_method == "expand_dims":
            return reshape(x, (1, *x.aval.shape))
        return batched_front(axis, x, None) if vmap_method == "broadcast_all" else x


pure_callback_p = _PureCallback()


def pure_callback(
    callback: Callable,
    result_shape_dtypes: Any,
    *args: Any,
    sharding: None = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call a Python function for its value, also under ``jit`` and in loops.

    A program may drop the call if its results are not read, or repeat it: ``callback`` must be a pure function of its
    arguments.

    Args:
      callback: takes pytrees of arrays, of which it may keep references, and returns a pytree of arrays.
      result_shape_dtypes: the result types: a pytree of ``ShapeDtypeStruct`` or of anything with a shape and a dtype.
      args, kwargs: its arguments, pytrees of arrays.
      sharding: None; a callback sees whole arrays.
      vmap_method: how ``vmap`` maps the call: ``"sequential"`` makes one call per element. The others make one call for
        the batch, with a leading batch axis: an argument that is not mapped gets an axis of size 1
        (``"expand_dims"``), is broadcast (``"broadcast_all"``), or has none (``"legacy_vectorized"``). Default
        None: ``vmap`` is an error.
    Returns:
        the callback's results, in the declared structure; lists count as tuples. NumPy's default 64-bit dtypes are
        accepted for 32-bit ones.
      Raises:
        ArgumentError: an argument is of the wrong kind.
        TreeError, ShapeError, DtypeError (when it runs): the results differ from their declaration.
        GradError (when it is differentiated): it has no derivative; give one with ``custom_jvp``.
    """
    if vmap_method is not None and vmap_method not in list(VMAP_METHODS):
        raise errors.ArgumentError(
            f"pure_callback: vmap_method={vmap_method!r} is not a method.",
            where=source.here(),
            fix=f"use None or one of {', '.join(map(repr, VMAP_METHODS))}",
        )
    host, values = _host_function(callback, result_shape_dtypes, args, kwargs, sharding, "pure_callback")
    return tree.unflatten(
        host.out_tree, pure_callback_p.bind(*values, callback=host, vmap_method=vmap_method)
    )


# -- with effects ----------------------------------------------------------------------------------


class _IOCallback(_Callback):
    """A Python function called for its side effects, and its value."""

    name = "io_callback"

    jvp = unsupported(
        "side effects have no derivative; call it on lax.stop_gradient of its arguments, or use custom_jvp for the "
        "function that makes the call"
    )
    transpose = unsupported("side effects have no transpose")

    def effects_of(self, params):
        return frozenset({effects.ORDERED_IO if params["ordered"] else effects.IO})

    def batch(self, axis, args, dims, *, callback, ordered):
        if ordered:
            raise errors.UnsupportedError(
                f"vmap of an ordered io_callback of {callback.__name__}.",
                where=source.here(),
                why="the elements of a batch are unordered, and so would be its effects.",
                fix="use ordered=False, or loop with lax.scan",
            )
        return self.repeat(axis, args, dims, callback=callback, ordered=ordered)


io_callback_p = _IOCallback()


def io_callback(
    callback: Callable,
    result_shape_dtypes: Any,
    *args: Any,
    sharding: None = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a Python function for its side effects: files, host state.

    The call runs exactly as often as in the untransformed program: never dropped, repeated or merged. ``vmap`` makes
    one call per element. ``checkpoint`` saves its results instead of repeating it. On a mesh the first device makes the
    call, and broadcasts its results; inside ``shard_map`` every device makes it.

    Args:
      callback: takes pytrees of arrays, of which it may keep references, and returns a pytree of arrays, or None.
      result_shape_dtypes: the result types, as for ``pure_callback``; None for nothing.
      args, kwargs: its arguments, pytrees of arrays.
      sharding: None; a callback sees whole arrays.
      ordered: keep the calls in program order relative to other ordered ones; default False.
    Returns:
      the callback's results.
    Raises:
      ArgumentError: an argument is of the wrong kind.
        TreeError, ShapeError, DtypeError (when it runs): the results differ from their declaration.
        GradError (when it is differentiated): an argument depends on a differentiated value.
        UnsupportedError: ``vmap`` of an ordered callback.
    """
    host, values = _host_function(callback, result_shape_dtypes, args, kwargs, sharding, "io_callback")
    return tree.unflatten(host.out_tree, io_callback_p.bind(*values, callback=host, ordered=bool(ordered)))


class _DebugCallback(_Callback):
    """A Python function that reports values: no results, and ignored by derivatives."""

    name = "debug_callback"

    def effects_of(self, params):
        return frozenset({effects.ORDERED_DEBUG if params["ordered"] else effects.DEBUG})

    def jvp(self, primals, tangents, **params):
        return self.bind(*primals, **params), []

    def transpose(self, cts, *args, **params):
        """A report of a tangent: reverse mode has no tangents, so it is dropped."""

    def batch(self, axis, args, dims, **params):
        return self.repeat(axis, args, dims, **params)


debug_callback_p = _DebugCallback()


def debug_callback(
    fun: Callable, args: tuple, kwargs: dict, ordered: bool, api: str, keep: tuple = ()
) -> None:
    """Stage or make a call of ``fun`` for its report.

    Args:
      args, kwargs: its arguments; leaves that are not arrays, or of the types ``keep``, are passed unchanged.
      api: the function that the user called, for messages.
    """
    leaves, in_tree = tree.flatten((args, kwargs))
    static, values = {}, []
    for i, x in enumerate(leaves):
        value = None if isinstance(x, keep) and not isinstance(x, np.generic) else value_or_none(x)
        if value is None:
            static[i] = x
        else:
            values.append(value)
    host = HostFunction(fun, in_tree, static, None, (), api)
    debug_callback_p.bind(*values, callback=host, ordered=bool(ordered))


def effects_barrier() -> None:
    """Wait until the side effects of all programs called so far are visible.

    The NumPy executor is synchronous; only printed output is flushed.
    """
    sys.stdout.flush()


def _host_function(
    fun: Any, result: Any, args: tuple, kwargs: dict, sharding: Any, api: str
) -> tuple[HostFunction, list]:
    """The host function of a callback with results, and its operands."""
    check_callable(fun, api)
    if sharding is not None:
        raise errors.UnsupportedError(
            f"{api} with a sharding.",
            where=source.here(),
            why="a callback sees whole arrays.",
            fix="sharding=None",
        )
    templates, out_tree = tree.flatten(result)
    paths = treepath.leaf_paths(out_tree)
    outs = tuple(
        [_declared(x, f"result_shape_dtypes{p}", api) for x, p in zip(templates, paths, strict=True)]
    )
    leaves, in_tree = tree.flatten((args, kwargs))
    values = as_values(leaves, lambda i: f"{api}: the argument {labels_of(fun, in_tree)[i]}")
    return HostFunction(fun, in_tree, {}, out_tree, outs, api), values


def _declared(x: Any, name: str, api: str) -> ShapedArray:
    """The type of one leaf of ``result_shape_dtypes``."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise errors.ArgumentError(
            f"{api}: {name} is a {type(x).__name__}, which has no shape and dtype.",
            where=source.here(),
            fix="bf.ShapeDtypeStruct(shape, dtype); None for a callback that returns nothing",
        )
    return abstract(x, f"{api}: {name}").strong()
