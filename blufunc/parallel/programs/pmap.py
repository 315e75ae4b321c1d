"""``pmap``: a function on one element of a batch per device.

Parallel, above ``shard_map``, which new programs should use: it maps over axes of any mesh and keeps arrays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from blufunc import errors
from blufunc.core.arrays import backend as backends
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.axes import axis_in
from blufunc.core.ops.shape import expand_dims, squeeze
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.shard_map import shard_map
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.programs.placement import device_put
from blufunc.transforms.arguments import argument_indices, check_callable
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.transfer import devices as all_devices

P = ParamSpec("P")
R = TypeVar("R")


def pmap(
    fun: Callable[P, R],
    axis_name: str | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[backends.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> Callable[P, R]:
    """Map ``fun`` over an axis of its arguments, one element per device.

    Args:
      fun: a function of pytrees of arrays.
      axis_name: the name of the axis, for collectives.
      in_axes: the mapped axis of all arguments, or a pytree prefix of the tuple of them; None: not mapped. What is
        passed by name is mapped over its first axis.
      out_axes: where the mapped axis is in all results, or a pytree prefix of them; None: they are the same on all
        devices.
      static_broadcasted_argnums: positions of arguments that are no arrays, and are passed as they are.
      devices, backend: the devices in order, or their platform; by default those of the default platform.
      axis_size: the size of the mapped axis, if no argument has it.
      donate_argnums: as of ``jit``.
    Returns:
      a function of arrays with the mapped axis, whose results are sharded along it.
    Raises:
      ArgumentError: at a call, if sizes of mapped axes differ or are not known, or there are fewer devices.
    """
    check_callable(fun, "pmap")
    name = "pmap" if axis_name is None else axis_name
    statics, donated = map(_several, (static_broadcasted_argnums, donate_argnums))
    programs: dict[tuple, tuple[Mesh, Callable]] = {}

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        static = argument_indices(statics, len(args), "static_broadcasted_argnums")
        order = [i for i in range(len(args)) if i not in static]
        axes = [_axes(a, args[i]) for i, a in zip(order, _of_arguments(in_axes, args, order), strict=True)]
        axes.append(_axes(0, kwargs))
        dynamic = [*[args[i] for i in order], kwargs]
        size = _size([p for a, x in zip(axes, dynamic, strict=True) for p in zip(a, tree.leaves(x), strict=True)],
                     axis_size)  # fmt: skip
        key = (size, tuple(axes), tuple(sorted(kwargs)), tuple([(i, args[i]) for i in sorted(static)]))
        if key not in programs:
            mesh = Mesh(_devices(size, devices, backend), (name,))
            body = _program(fun, mesh, name, axes, out_axes, {i: args[i] for i in static})
            programs[key] = mesh, jit(body, donate_argnums=[order.index(i) for i in donated if i in order])
        mesh, program = programs[key]
        put = lambda axis, x: device_put(x, NamedSharding(mesh, _spec(axis, lift(x).aval.ndim, name)))
        return program(*[_map_leaves(put, a, x) for a, x in zip(axes, dynamic, strict=True)])

    return mapped


def _several(numbers: int | Iterable[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _of_arguments(in_axes: Any, args: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The entry of ``in_axes`` for each of the arguments ``order``, of all arguments."""
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * len(order)
    if not isinstance(in_axes, (tuple, list)) or len(in_axes) != len(args):
        raise errors.ArgumentError(
            f"pmap: in_axes={in_axes!r:.60} for {len(args)} arguments.",
            where=source.here(),
            fix="give an axis, a pytree of axes, or None, for each argument",
        )
    return [in_axes[i] for i in order]


def _axes(prefix: Any, value: Any) -> tuple[int | None, ...]:
    """The axis of each leaf of a value."""
    axes = tuple(tree.broadcast_prefix(prefix, value, is_leaf=lambda x: x is None))
    if not all(a is None or isinstance(a, int) for a in axes):
        raise errors.ArgumentError(
            f"pmap: axes are ints and None, not {prefix!r:.60}.",
            where=source.here(),
            fix="give an axis, or None, for each value",
        )
    return axes


def _map_leaves(fun: Callable, axes: Sequence[int | None], value: Any) -> Any:
    """``fun(axis, leaf)`` of each leaf."""
    leaves, treedef = tree.flatten(value)
    return tree.unflatten(treedef, [fun(a, x) for a, x in zip(axes, leaves, strict=True)])


def _size(leaves: Sequence[tuple[int | None, Any]], given: int | None) -> int:
    """The size of the mapped axis, which all mapped values have."""
    values = [(a, lift(x).aval) for a, x in leaves if a is not None]
    sizes = {aval.shape[axis_in(a, aval.ndim, "pmap")] for a, aval in values}
    sizes |= set() if given is None else {given}
    if len(sizes) != 1:
        raise errors.ArgumentError(
            f"pmap: mapped axes have the sizes {sorted(sizes)}." if sizes else "pmap: no argument is mapped.",
            where=source.here(),
            fix="give arguments of one size, or axis_size= if nothing is mapped",
        )
    return sizes.pop()


def _devices(
    size: int, devices: Sequence[backends.Device] | None, platform: str | None
) -> list[backends.Device]:
    found = list(devices or all_devices(platform))
    if size > len(found):
        raise errors.ArgumentError(
            f"pmap over an axis of size {size} on {len(found)} devices.",
            where=source.here(),
            why="each element runs on a device of its own.",
            fix="use vmap, or both: pmap(vmap(f)); bf.config.cpu_devices simulates devices",
        )
    return found[:size]


def _program(
    fun: Callable,
    mesh: Mesh,
    name: str,
    axes: Sequence[tuple[int | None, ...]],
    out_axes: Any,
    static: dict[int, Any],
) -> Callable:
    """The function of whole arrays, positional ones first and then those by name."""

    out_specs = tree.map(lambda a: _out_spec(a, name), out_axes, is_leaf=lambda x: x is None)

    def program(*values: Any) -> Any:
        def one(*parts: Any) -> Any:
            *args, kwargs = [_map_leaves(_element, a, part) for a, part in zip(axes, parts, strict=True)]
            for i in sorted(static):
                args.insert(i, static[i])
            outs = fun(*args, **kwargs)
            return _map_leaves(_of_batch, _axes(out_axes, outs), outs)

        in_specs = tuple([
            _map_leaves(lambda a, x: _spec(a, lift(x).aval.ndim, name), a, value)
            for a, value in zip(axes, values, strict=True)
        ])  # fmt: skip
        mapped = shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        outs = mapped(*values)
        return _map_leaves(_counted_from_the_end, _axes(out_axes, outs), outs)

    functools.update_wrapper(program, fun)
    del program.__wrapped__  # type: ignore[attr-defined]  # its parameters are others
    return program


def _spec(axis: int | None, ndim: int, name: str) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis_in(axis, ndim, "pmap"), name)


def _out_spec(axis: Any, name: str) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    front = max(axis, 0)  # the rank, which says where an axis counted from the end is, is not known yet
    return _spec(front, front + 1, name)


def _element(axis: int | None, x: Any) -> Any:
    """The element of this device in its part of a mapped value."""
    return x if axis is None else squeeze(x, (axis_in(axis, x.ndim, "pmap"),))


def _of_batch(axis: int | None, x: Any) -> Any:
    """A result of this device as its part of the batch of results."""
    x = lift(x)
    if axis is None:
        return x
    place = axis_in(axis, x.ndim + 1, "pmap")
    return expand_dims(x, (place if axis >= 0 else 0,))


def _counted_from_the_end(axis: int | None, x: Any) -> Any:
    """Results with a mapped axis that counts from the end moved there."""
    return x if axis is None or axis >= 0 else move_dim(x, 0, axis_in(axis, x.ndim, "pmap"))
