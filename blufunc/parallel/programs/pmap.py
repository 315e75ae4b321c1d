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
    in_axes: int | Sequence[int | None] | None = 0,
    out_axes: int | None = 0,
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
      in_axes: the mapped axis of all arguments, or a sequence with that of each; None: the argument is not mapped.
        What is passed by name is mapped over its first axis.
      out_axes: where the mapped axis is in all results; None: they are the same on all devices.
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
        axes = _axes(in_axes, len(args))
        dynamic = [(a, x) for i, (a, x) in enumerate(zip(axes, args, strict=True)) if i not in static]
        dynamic += [(0, kwargs)]
        size = _size(dynamic, axis_size)
        key = (size, tuple(axes), tuple(sorted(kwargs)), tuple([(i, args[i]) for i in sorted(static)]))
        if key not in programs:
            mesh = Mesh(_devices(size, devices, backend), (name,))
            order = [i for i in range(len(args)) if i not in static]
            body = _program(fun, mesh, name, [a for a, _ in dynamic], out_axes, {i: args[i] for i in static})
            programs[key] = mesh, jit(body, donate_argnums=[order.index(i) for i in donated if i in order])
        mesh, program = programs[key]
        put = lambda axis, x: device_put(x, NamedSharding(mesh, _spec(axis, lift(x).aval.ndim, name)))
        return program(*[tree.map(functools.partial(put, axis), x) for axis, x in dynamic])

    return mapped


def _several(numbers: int | Iterable[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _axes(in_axes: Any, n: int) -> list[int | None]:
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * n
    axes = list(in_axes)
    if len(axes) != n or not all(a is None or isinstance(a, int) for a in axes):
        raise errors.ArgumentError(
            f"pmap: in_axes={in_axes!r:.60} for {n} arguments.",
            where=source.here(),
            fix="give an axis, or None, for each argument",
        )
    return axes


def _size(dynamic: Sequence[tuple[int | None, Any]], given: int | None) -> int:
    """The size of the mapped axis, which all arguments have."""
    values = [(a, lift(x)) for a, value in dynamic if a is not None for x in tree.leaves(value)]
    sizes = {x.aval.shape[axis_in(a, x.aval.ndim, "pmap")] for a, x in values}
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
    axes: Sequence[int | None],
    out_axes: int | None,
    static: dict[int, Any],
) -> Callable:
    """The function of whole arrays, positional ones first and then those by name."""

    def program(*values: Any) -> Any:
        def specs(axis: int | None, value: Any) -> Any:
            return tree.map(lambda x: _spec(axis, lift(x).aval.ndim, name), value)

        def one(*parts: Any) -> Any:
            given: list[Any] = [
                part
                if axis is None
                else tree.map(lambda x, a=axis: squeeze(x, (axis_in(a, x.ndim, "pmap"),)), part)
                for axis, part in zip(axes, parts, strict=True)
            ]
            *args, kwargs = given
            for i in sorted(static):
                args.insert(i, static[i])
            outs = fun(*args, **kwargs)
            if out_axes is None:
                return outs
            return tree.map(
                lambda x: expand_dims(lift(x), (axis_in(out_axes, lift(x).ndim + 1, "pmap"),)), outs
            )

        in_specs = tuple([specs(a, v) for a, v in zip(axes, values, strict=True)])
        if out_axes is None or out_axes >= 0:
            out_specs = PartitionSpec() if out_axes is None else _spec(out_axes, out_axes + 1, name)
        else:
            raise errors.UnsupportedError(
                f"pmap with out_axes={out_axes}.", where=source.here(), fix="count the axis from the front"
            )
        return shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*values)

    functools.update_wrapper(program, fun)
    del program.__wrapped__  # type: ignore[attr-defined]  # its parameters are others
    return program


def _spec(axis: int | None, ndim: int, name: str) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis_in(axis, ndim, "pmap"), name)
