"""``vmap`` for users: from a function of one example to a function of a batch.

Transforms, stage 2. In: a function, and its mapped axes. Out: the batched function. A thin wrapper of ``batch_flat``
that resolves ``in_axes``, and moves batch axes of results to ``out_axes``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.core.primitives.linear_ops import batched_front, move_dim
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import (
    FlatFunction,
    LazyLabels,
    as_values,
    check_callable,
    labels_of,
    name_of,
)
from blufunc.transforms.batching.batch import Axis, batch_flat

P = ParamSpec("P")
R = TypeVar("R")

_NUMBERS = frozenset({bool, int, float, complex})


def _is_axis(x: Any) -> bool:
    return x is None


def vmap(
    fun: Callable[P, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: str | tuple[str, ...] | None = None,
) -> Callable[P, R]:
    """Map ``fun`` over an axis of its arguments, as one batched computation.

    Args:
      fun: a function of pytrees of arrays.
      in_axes: the axis to map of every argument: an int, None (not mapped), or a tuple with an entry per positional
        argument, each an int, None, or a pytree prefix of the argument. Keyword arguments are mapped over axis 0.
        Default 0.
      out_axes: the position of the mapped axis in the results: an int, None (for results that are not mapped), or a
        pytree prefix of the results. Default 0.
      axis_name: a name of the axis for collectives in ``fun`` (``lax.psum`` and others).
      axis_size: its size, required only if no argument is mapped.
      spmd_axis_name: the mesh axes over which the mapped axis is sharded; shardings in ``fun`` gain them.
    Returns:
      a function of the same arguments with one more axis.
    Raises (when called):
      VmapSizeError: mapped axes differ in size, do not exist, or there is none.
      TreeError: ``in_axes`` or ``out_axes`` is not a pytree prefix.
    """
    check_callable(fun, "vmap")
    if not isinstance(in_axes, (int, np.integer, tuple, list)) and in_axes is not None:
        raise errors.ArgumentError(
            f"in_axes must be an int, None or a tuple with one entry for each argument, not {in_axes!r}.",
            where=source.here(),
            fix=f"in_axes=({in_axes!r},)",
        )
    if axis_size is not None and (axis_size := static_int(axis_size, "vmap", "axis_size")) < 0:
        raise errors.ValueRangeError(f"vmap: axis_size={axis_size} is negative.", where=source.here())
    if not isinstance(axis_name, Hashable):
        raise errors.ArgumentError(
            f"vmap: axis_name is a string or another hashable value, not {axis_name!r:.60}.",
            where=source.here(),
        )
    mesh_axes: Any = () if spmd_axis_name is None else spmd_axis_name
    mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    if not isinstance(mesh_axes, tuple) or not all(isinstance(a, str) for a in mesh_axes):
        raise errors.ArgumentError(
            f"spmd_axis_name names mesh axes, not {spmd_axis_name!r:.60}.", where=source.here()
        )

    @functools.wraps(fun)
    def vmap_fun(*args, **kwargs):
        if isinstance(in_axes, (tuple, list)) and len(in_axes) != len(args):
            raise errors.TreeError(
                f"vmap of {name_of(fun)}: in_axes has {len(in_axes)} entries for {len(args)} positional arguments.",
                where=source.here(),
                fix="give one entry for each argument, None for those that are not mapped",
            )
        leaves, in_tree = tree.flatten((args, kwargs))
        axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        dims = [
            *_broadcast(axes, args, fun, "in_axes", "the arguments"),
            *[0] * tree.structure(kwargs).num_leaves,
        ]
        labels = functools.cache(lambda: labels_of(fun, in_tree))
        # what is not mapped stays as it is: a Python number also where operations are traced, and any object
        kept = [
            d is None and (x.__class__ in _NUMBERS or not _is_array(x))
            for x, d in zip(leaves, dims, strict=True)
        ]
        arrays = iter(
            as_values(
                [x for x, k in zip(leaves, kept, strict=True) if not k],
                lambda i: f"the argument {labels()[[n for n, k in enumerate(kept) if not k][i]]}",
            )
        )
        inputs = [x if k else next(arrays) for x, k in zip(leaves, kept, strict=True)]
        dims = [_normal_dim(d, v, labels, i, fun) for i, (d, v) in enumerate(zip(dims, inputs, strict=True))]
        axis = Axis(_axis_size(fun, inputs, dims, labels, axis_size), axis_name, mesh_axes)
        flat = FlatFunction(fun, in_tree)
        outs, out_dims = batch_flat(flat, axis, inputs, dims, LazyLabels(labels, len(inputs)))
        out_tree = flat.out_tree
        skeleton = tree.unflatten(out_tree, [0] * out_tree.num_leaves)
        target = _broadcast(out_axes, skeleton, fun, "out_axes", "the results")
        paths = treepath.leaf_paths(out_tree)
        placed = [
            _place(axis, x, d, w, p, fun) for x, d, w, p in zip(outs, out_dims, target, paths, strict=True)
        ]
        return tree.unflatten(out_tree, placed)

    return vmap_fun


def _broadcast(axes: Any, whole: Any, fun: Callable, name: str, what: str) -> list:
    """``in_axes`` or ``out_axes`` with one entry per leaf."""
    try:
        return tree.broadcast_prefix(axes, whole, is_leaf=_is_axis)
    except errors.TreeError as e:
        raise errors.TreeError(
            f"vmap of {name_of(fun)}: {name} is not a pytree prefix of {what}.",
            where=source.here(),
            why=e.why or e.what,
            fix="use a nested entry for a container whose leaves differ; None means not mapped",
        ) from None


def _is_array(x: Any) -> bool:
    try:
        lift(x)
    except errors.ArgumentError:
        return False
    return True


def _normal_dim(d: Any, x: Any, labels: Callable[[], list[str]], i: int, fun: Callable) -> int | None:
    if d is None:
        return None
    aval = x.aval
    if not isinstance(d, (int, np.integer)) or isinstance(d, bool):
        raise errors.ArgumentError(
            f"in_axes holds {d!r} for {labels()[i]}; axes are ints or None.", where=source.here()
        )
    if not -aval.ndim <= d < aval.ndim:
        raise errors.VmapSizeError(
            f"vmap of {name_of(fun)}: in_axes maps axis {d} of {labels()[i]}, which is {aval}.",
            where=source.here(),
            fix="correct in_axes, or use None to pass the argument unmapped",
        )
    return int(d) % aval.ndim


def _axis_size(fun, values, dims, labels, axis_size: int | None) -> int:
    sizes = {i: v.aval.shape[d] for i, (v, d) in enumerate(zip(values, dims, strict=True)) if d is not None}
    distinct = set(sizes.values()) | ({axis_size} if axis_size is not None else set())
    if len(distinct) > 1:
        listed = [f"{labels()[i]} has {n} along axis {dims[i]} ({values[i].aval})" for i, n in sizes.items()]
        if axis_size is not None:
            listed.append(f"axis_size is {axis_size}")
        raise errors.VmapSizeError(
            f"vmap of {name_of(fun)}: mapped axes have different sizes.",
            where=source.here(),
            why="; ".join(listed[:6]),
            fix="correct in_axes: None passes an argument unmapped",
        )
    if not distinct:
        raise errors.VmapSizeError(
            f"vmap of {name_of(fun)}: no argument is mapped.",
            where=source.here(),
            fix="set in_axes for at least one argument, or give axis_size",
        )
    return distinct.pop()


def _place(axis: Axis, x: Any, d: int | None, target: Any, path: str, fun: Callable) -> Any:
    if target is None:
        if d is not None:
            raise errors.VmapSizeError(
                f"vmap of {name_of(fun)}: out_axes is None for the result{path}, but it differs along the axis.",
                where=source.here(),
                fix="give out_axes an int there, or reduce over the axis",
            )
        return x
    if d is None:
        x, d = batched_front(axis, x, None), 0
    if not isinstance(target, (int, np.integer)) or not -x.aval.ndim <= target < x.aval.ndim:
        raise errors.VmapSizeError(
            f"vmap of {name_of(fun)}: out_axes {target!r} is not an axis of the result{path}, "
            f"which is {x.aval} with the batch axis.",
            where=source.here(),
        )
    return move_dim(x, d, int(target) % x.aval.ndim)
