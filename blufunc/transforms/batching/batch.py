"""Batching: the trace of ``vmap``.

Transforms, stage 2. In: a function and batch axes. Out: batched results. A ``BatchTracer`` is an array with one axis
more than the user sees; each operation on it is replaced by its batched form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from blufunc.config import config
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr, named_axes
from blufunc.core.ir.trace import Array, Trace, Tracer, leak_error, new_trace, set_trace, state, type_of
from blufunc.core.primitives.kinds import example_aval
from blufunc.core.primitives.linear_ops import batched_front
from blufunc.core.primitives.primitive import Primitive, derived
from blufunc.core.primitives.rule_errors import check_batch, check_example, check_lists, pair_of
from blufunc.core.programs.stage import definition, stage


class Axis:
    """The mapped axis of a ``vmap``.

    Attributes:
      size: its length.
      name: its name for collectives, or None.
      mesh_axes: the mesh axes over which it is sharded.
    """

    __slots__ = ("mesh_axes", "name", "size")

    def __init__(self, size: int, name: Hashable = None, mesh_axes: tuple[str, ...] = ()):
        self.size = size
        self.name = name
        self.mesh_axes = mesh_axes


class NamedAxis(NamedTuple):
    """A named axis in ``state.context`` while the mapped function runs."""

    name: Hashable
    size: int


class MeshAxis(NamedAxis):
    """A mesh axis in ``state.context`` while the function of a ``shard_map`` runs."""


class BatchTracer(Tracer):
    """One element of a batch: ``value`` has the batch axis at ``dim``."""

    __slots__ = ("dim", "value")

    def __init__(self, trace: Trace, value: Any, dim: int, source=None, label=None):
        aval = value.aval
        self.trace = trace
        self.value = value
        self.dim = dim
        self.aval = aval.with_shape(aval.shape[:dim] + aval.shape[dim + 1 :])
        self.source = source
        self.label = label


class BatchTrace(Trace):
    """Replaces operations by their batched forms."""

    __slots__ = ("axis", "parent")
    name = "vmap"

    def __init__(self, parent: Trace, axis: Axis):
        super().__init__()
        self.parent = parent
        self.axis = axis

    def typed(self, fun, primals):
        return self.parent.typed(fun, primals)

    def typed_body(self, body):
        return self.parent.typed_body(body)

    def typed_cotangent(self, ct, primal):
        return self.parent.typed_cotangent(ct, primal)

    def type_of(self, x):
        return type_of(x.value).retyped(x.aval, x.dim)

    def split(self, x: Any) -> tuple[Any, int | None]:
        """The value and its batch dimension; None for constants."""
        if x.__class__ is BatchTracer:
            if x.trace is self:
                return x.value, x.dim
            if not x.trace.alive:
                raise leak_error(x)
        return (x if isinstance(x, Array) else lift(x)), None

    def process(self, prim, args, params):
        pairs = [self.split(a) for a in args]
        values = [v for v, _ in pairs]
        dims = [d for _, d in pairs]
        with set_trace(self.parent):
            if all(d is None for d in dims):
                name = self.axis.name
                if name is None or name not in named_axes(prim, params):
                    return self.parent.process(prim, values, params)
            result = prim.batch(self.axis, values, dims, **params)
        out, out_dims = (
            result if result.__class__ is tuple and len(result) == 2 else pair_of(prim, "batch", result)
        )
        line = source.replay.line or source.current()
        if config.check:
            self.check(prim, values, dims, params, out, out_dims)
        if prim.multiple_results:
            check_lists(prim, "batch", out, out_dims)
            for v, d in zip(out, out_dims, strict=True):
                check_batch(prim, v, d, self.axis.size)
            return [self.tracer(v, d, line) for v, d in zip(out, out_dims, strict=True)]
        try:
            fits = out_dims == 0 and out.aval.shape[0] == self.axis.size
        except (AttributeError, IndexError):
            fits = False
        if not fits:
            check_batch(prim, out, out_dims, self.axis.size)
        return self.tracer(out, out_dims, line)

    def check(self, prim, values, dims, params, out, out_dims):
        """Check types of one example against the primitive's ``abstract``."""
        if prim.reference is not None or named_axes(prim, params):
            return  # their types come from bodies, or depend on the whole axis
        outs, out_dims = (out, out_dims) if prim.multiple_results else ([out], [out_dims])
        check_lists(prim, "batch", outs, out_dims)
        for v, d in zip(outs, out_dims, strict=True):
            check_batch(prim, v, d, self.axis.size)
        avals = tuple(
            v.aval if d is None else v.aval.with_shape(v.aval.shape[:d] + v.aval.shape[d + 1 :])
            for v, d in zip(values, dims, strict=True)
        )
        expected = prim.typed(avals, params)
        for v, d, aval in zip(outs, out_dims, expected if prim.multiple_results else [expected], strict=True):
            check_example(prim, v, d, aval)

    def tracer(self, value: Any, dim: int | None, line: Any = None, label: str | None = None) -> Any:
        """A tracer, or the value itself if it is not batched."""
        return value if dim is None else BatchTracer(self, value, dim, line, label)


def batch_flat(
    fun: Callable, axis: Axis, args: Sequence[Any], dims: Sequence[int | None], labels=None
) -> tuple[list[Any], list[int | None]]:
    """Batch a flat function; its results and their batch dimensions, or None."""
    trace = BatchTrace(state.trace, axis)
    labels = labels or [None] * len(args)
    context = state.context
    if axis.name is not None:
        state.context = (*context, NamedAxis(axis.name, axis.size))
    try:
        with new_trace(trace):
            outs = fun(*[trace.tracer(a, d, None, n) for a, d, n in zip(args, dims, labels, strict=True)])
            pairs = [trace.split(x) for x in outs]
    finally:
        state.context = context
    return [v for v, _ in pairs], [d for _, d in pairs]


def batch_jaxpr(
    jaxpr: Jaxpr, axis: Axis, batched: tuple[bool, ...], batched_outs: tuple[bool, ...] | None = None
) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The batched jaxpr. Batch axes are leading, in and out.

    Args:
      batched: a flag per parameter, True if it has the axis.
      batched_outs: a flag per result, True if it must have the axis, broadcast if necessary.
    Returns:
      the jaxpr, and a flag per result, True if it has the axis.
    """
    required = batched_outs or (False,) * len(jaxpr.outvars)

    def make():
        out_batched: tuple[bool, ...] = ()

        def fun(*args):
            nonlocal out_batched
            dims = [0 if b else None for b in batched]
            outs, out_dims = batch_flat(lambda *xs: eval_jaxpr(jaxpr, xs), axis, args, dims)
            out_batched = tuple(d is not None or w for d, w in zip(out_dims, required, strict=True))
            return [
                batched_front(axis, x, d) if b else x
                for x, d, b in zip(outs, out_dims, out_batched, strict=True)
            ]

        avals = [
            a.with_shape((axis.size, *a.shape)) if b else a
            for a, b in zip(jaxpr.in_avals, batched, strict=True)
        ]
        return stage(fun, avals, jaxpr.name), out_batched

    return jaxpr.memoised(("batch", axis.size, axis.name, axis.mesh_axes, batched, required), make)


def _of_definition(
    prim: Primitive, axis: Axis, args: Sequence[Any], dims: Sequence[int | None], params: dict
) -> tuple:
    jaxpr = definition(prim, [example_aval(a.aval, d) for a, d in zip(args, dims, strict=True)], params)
    outs, out_dims = batch_flat(lambda *xs: eval_jaxpr(jaxpr, xs), axis, args, dims)
    return (outs, out_dims) if prim.multiple_results else (outs[0], out_dims[0])


derived["batch"] = _of_definition
