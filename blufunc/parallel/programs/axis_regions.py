"""``auto_axes`` and ``explicit_axes``: regions with other types of mesh axes.

Parallel, stage 1. In: a function, and the axes. Out: the function between equations that leave values to the compiler,
and that say how they are sharded (``mesh/axis_regions.py``). Eager arrays move to the mesh with other types instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.explicit_avals import ExplicitArray
from blufunc.core.ir.trace import state, type_of
from blufunc.core.primitives.primitive import concrete
from blufunc.core.programs.stage import is_staging
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.axis_regions import Claim, Region, Release, region, with_axis_types
from blufunc.parallel.mesh.mesh import AxisSizes, AxisType, Mesh, current_mesh, manual_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec, names_of
from blufunc.parallel.mesh.spec_trees import broadcast, check_rank
from blufunc.parallel.programs.mesh_device import device_on
from blufunc.parallel.programs.placement import device_put
from blufunc.transforms.arguments import check_callable, name_of


def _home(mesh: Any) -> backend.Device | None:
    return device_on(mesh) if isinstance(mesh, Mesh) else None


class _Release(Release):
    name = "release"

    def home(self, *, mesh, **params) -> backend.Device | None:
        return _home(mesh)

    def evaluate(self, args, params):
        return _moved(args, params, params["spec"], params["free"])

    def transpose(self, ct, x, *, back, free, enters, **params):
        spec = PartitionSpec() if back is None else back
        free = tuple(range(ct.aval.ndim)) if back is None else ()
        x.add(claim_p.bind(ct, **{**params, "spec": spec}, free=free, enters=not enters))

    def batch(self, axis, args, dims, *, back, free, **params):
        (x,), (d,) = args, dims
        back = None if back is None else _with_dim(back, d, x.aval.ndim)
        return self.bind(x, back=back, free=tuple(range(x.aval.ndim)), **params), d


class _Claim(Claim):
    name = "claim"

    def home(self, *, mesh, **params) -> backend.Device | None:
        return _home(mesh)

    def evaluate(self, args, params):
        return _moved(args, params, params["spec"], params["free"])

    def transpose(self, ct, x, *, spec, free, enters, **params):
        back = None if free else spec
        everywhere = tuple(range(ct.aval.ndim))
        x.add(
            release_p.bind(ct, back=back, spec=PartitionSpec(), free=everywhere, enters=not enters, **params)
        )

    def batch(self, axis, args, dims, *, spec, free, **params):
        (x,), (d,) = args, dims
        free = (*[f + (f >= d) for f in free], d)
        spec = _with_dim(spec, d, x.aval.ndim)
        return self.bind(x, spec=spec, free=tuple(sorted(free)), **params), d


release_p, claim_p = _Release(), _Claim()


def _with_dim(spec: PartitionSpec, d: int, ndim: int) -> PartitionSpec:
    entries = list(spec.for_rank(ndim - 1))
    entries.insert(d, None)
    return spec.with_entries(entries)


def _moved(args: Sequence[Any], params: dict, spec: PartitionSpec, free: Sequence[int]) -> Any:
    """An eager array on the mesh of the other side of an end of a region.

    Args:
      spec: how it is sharded there.
      free: the dimensions that are not said: they stay as they are, unless another one has their axes.
    """
    (x,) = map(concrete, args)
    mesh = params["inside"] if params["enters"] else params["mesh"]
    if not isinstance(mesh, Mesh):  # no mesh is in force: it is that of arguments, known by their types
        if not x.device.joint:
            return x
        mesh = Mesh(x.buffer.sharding.mesh.devices, mesh.axis_names, axis_types=mesh.axis_types)
    here = x.buffer.sharding.spec if x.device.joint else PartitionSpec()
    said = spec.for_rank(x.aval.ndim)
    used = {a for d, entry in enumerate(said) if d not in free for a in names_of(entry)}
    entries = [
        entry if d not in free else now if used.isdisjoint(names_of(now)) else None
        for d, (entry, now) in enumerate(zip(said, here.for_rank(x.aval.ndim), strict=True))
    ]
    whole = here if free and len(free) == x.aval.ndim else said  # of pending sums too
    return device_put(x, NamedSharding(mesh, whole.with_entries(entries)))


def auto_axes(
    f: Callable | None = None, /, *, axes: str | tuple[str, ...] | None = None, out_sharding: Any = None
) -> Any:
    """Leave sharding along ``Explicit`` axes to the compiler inside of a function.

    Args:
      f: a function of pytrees of arrays. Without it, a decorator is returned.
      axes: a mesh axis, or several; all unless given.
      out_sharding: for the results a ``PartitionSpec`` or ``NamedSharding``, or a pytree prefix of these. If it is left
        out, it is an argument of each call: ``auto_axes(f)(x, out_sharding=P("x"))``.
    Returns:
      a function like ``f``. Where no mesh is in force and no argument is on one, or all axes are ``Auto``, it is ``f``.
    Raises (when called):
      ArgumentError: there is no ``out_sharding``.
      ShardingError: the mesh has no such axis, or a ``shard_map`` around the call has made it manual; a spec does not
        fit.
      TreeError: ``out_sharding`` is not a prefix of the results.
    """
    if f is None:
        return functools.partial(auto_axes, axes=axes, out_sharding=out_sharding)
    check_callable(f, "auto_axes")

    @functools.wraps(f)
    def function(*args: Any, **kwargs: Any) -> Any:
        out = _given("out_sharding", out_sharding, kwargs, f, "auto_axes")
        mesh = _mesh_of([out, *map(_explicit_sharding, tree.leaves(args))])
        if mesh is None:
            return f(*args, **kwargs)
        names = _axes_of(axes, mesh, "auto_axes")
        if not _types_now(mesh).explicit & {*names}:
            return f(*args, **kwargs)
        ends = _Ends(mesh, names, AxisType.Auto)
        entered = tree.map(lambda x: ends.release(x, enters=True), args)
        result = ends.inside(f, entered, kwargs)
        return ends.claim(result, out, f"out_sharding of auto_axes of {name_of(f)}", enters=False)

    return function


def explicit_axes(
    f: Callable | None = None, /, *, axes: str | tuple[str, ...] | None = None, in_sharding: Any = None
) -> Any:
    """Derive layouts along ``Auto`` axes from operands inside of a function.

    Args:
      f: a function of pytrees of arrays. Without it, a decorator is returned.
      axes: a mesh axis, or several; all unless given.
      in_sharding: for the positional arguments a ``PartitionSpec`` or ``NamedSharding``, or a pytree prefix of the
        tuple of these. If it is left out, it is an argument of each call.
    Returns:
      a function like ``f``.
    Raises (when called):
      ArgumentError: there is no ``in_sharding``, or no mesh.
      ShardingError: as of ``auto_axes``; or operands inside disagree.
      TreeError: ``in_sharding`` is not a prefix of the arguments.
    """
    if f is None:
        return functools.partial(explicit_axes, axes=axes, in_sharding=in_sharding)
    check_callable(f, "explicit_axes")

    @functools.wraps(f)
    def function(*args: Any, **kwargs: Any) -> Any:
        into = _given("in_sharding", in_sharding, kwargs, f, "explicit_axes")
        mesh = _mesh_of([into])
        if mesh is None:
            raise errors.ArgumentError(
                f"explicit_axes of {name_of(f)} has no mesh.",
                where=source.here(),
                fix="call it in `with mesh:`",
            )
        ends = _Ends(mesh, _axes_of(axes, mesh, "explicit_axes"), AxisType.Explicit)
        entered = ends.claim(args, into, f"in_sharding of explicit_axes of {name_of(f)}", enters=True)
        result = ends.inside(f, entered, kwargs, lambda x: ends.release(x, enters=False))
        return result

    return function


class _Ends:
    """The two ends of a region on ``mesh`` in which ``axes`` are of one kind."""

    def __init__(self, mesh: Any, axes: tuple[str, ...], kind: AxisType):
        self.mesh, self.axes = mesh, axes
        self.staged = is_staging()
        types = _types_now(mesh)
        self.types = with_axis_types(types if self.staged else mesh, axes, kind)
        self.params = {"mesh": mesh, "axes": axes, "inside": self.types}

    def release(self, x: Any, enters: bool) -> Any:
        """Leave a value to the compiler."""
        x = lift(x)
        found = type_of(x)
        back = found.sharding.spec if isinstance(found, ExplicitArray) else None
        free = tuple(range(x.aval.ndim))
        return release_p.bind(x, back=back, spec=PartitionSpec(), free=free, enters=enters, **self.params)

    def claim(self, x: Any, shardings: Any, what: str, enters: bool) -> Any:
        """Say how values are sharded."""
        leaves, structure = tree.flatten(x)
        given = broadcast(shardings, x, what, "P() for whole values")
        return tree.unflatten(
            structure, [self._claimed(leaf, s, what, enters) for leaf, s in zip(leaves, given, strict=True)]
        )

    def _claimed(self, x: Any, sharding: Any, what: str, enters: bool) -> Any:
        if not isinstance(sharding, (PartitionSpec, NamedSharding)):
            raise errors.ArgumentError(
                f"{what} holds {sharding!r:.60}.",
                where=source.here(),
                fix="P('x', None), or P() for whole values",
            )
        x = lift(x)
        spec = sharding if isinstance(sharding, PartitionSpec) else sharding.spec
        check_rank(self.mesh, spec, x.aval.ndim, lambda: what)
        return claim_p.bind(x, spec=spec.for_rank(x.aval.ndim), free=(), enters=enters, **self.params)

    def inside(self, f: Callable, args: tuple, kwargs: dict, leave: Callable = lambda x: x) -> Any:
        """Run the function of the region, and ``leave`` on its results."""
        context = state.context
        state.context = (*context, Region(self.types.abstract) if self.staged else self.types)
        try:
            return tree.map(leave, f(*args, **kwargs))
        finally:
            state.context = context


def _given(name: str, default: Any, kwargs: dict, f: Callable, what: str) -> Any:
    """The shardings of a region: of its decorator, or of the call."""
    if default is not None:
        return default
    if name in kwargs:
        return kwargs.pop(name)
    raise errors.ArgumentError(
        f"{what} of {name_of(f)} takes {name}=, which is missing.",
        where=source.here(),
        why="at its ends the program says how values are sharded.",
        fix=f"{what}(f, {name}=P('x')), or in the call: {what}(f)(x, {name}=P('x'))",
    )


def _explicit_sharding(x: Any) -> Any:
    """The sharding that the type of an argument tells, or None."""
    found = type_of(lift(x))
    return found.sharding if isinstance(found, ExplicitArray) else None


def _mesh_of(shardings: Sequence[Any]) -> Any:
    """The mesh in force, or else that of a sharding; None if there is none."""
    manual = manual_mesh()
    if manual is not None:
        return manual.mesh
    found = [s.mesh for s in tree.leaves(shardings) if isinstance(s, NamedSharding)]
    mesh = current_mesh()
    wrong = next((m for m in found if mesh is not None and m.shape != mesh.shape), None)
    if wrong is not None:
        raise errors.ShardingError(
            f"a sharding is on the mesh ({wrong}), and the mesh in force is ({mesh}).",
            where=source.here(),
            fix="use P('x') for axes of the mesh in force",
        )
    return mesh if mesh is not None else next(iter(found), None)


def _types_now(mesh: AxisSizes) -> Any:
    """The mesh with the types of axes in the region around, if there is one."""
    here = region()
    return mesh.abstract if here is None else here.mesh


def _axes_of(axes: Any, mesh: AxisSizes, what: str) -> tuple[str, ...]:
    """The axes of a region."""
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    manual = manual_mesh()
    for name in names:
        if name not in mesh.shape or (manual is not None and name in manual.axes):
            which = (
                "is manual in the shard_map around it" if name in mesh.shape else f"is no axis of ({mesh})"
            )
            raise errors.ShardingError(
                f"{what}: the axis {name!r} {which}.",
                where=source.here(),
                fix="name axes of the mesh that are Auto or Explicit",
            )
    return names
