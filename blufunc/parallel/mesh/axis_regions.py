"""The ends of regions of a program in which mesh axes have another type.

Parallel, stages 1 to 3. In: values that enter or leave a region of ``auto_axes`` or ``explicit_axes``
(``programs/axis_regions.py``). Out: identities that the pass of explicit axes reads (``partition/explicit.py``), each
the transpose of the other: along their axes, a ``Release`` leaves a value to the compiler, and a ``Claim`` says how it
is sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.explicit_avals import ExplicitArray
from blufunc.core.ir.trace import state
from blufunc.parallel.mesh.constrain import ShardingConstraint
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisType
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec, names_of


class Release(ShardingConstraint):
    """From here on the compiler decides along ``axes``.

    Params: spec, without entries, and free, all dimensions, as of a constraint that says nothing; mesh, of the program;
    axes; inside, the mesh with the types of axes in the region; enters, whether the region begins here; back, how the
    operand is sharded, which its cotangent is again, or None.
    """

    def impl(self, x, **params):
        return x

    def abstract(self, x, **params):
        return x

    def sharding_of(self, n, **params):
        return None


class Claim(ShardingConstraint):
    """A constraint that decides along ``axes``.

    Params: those of a constraint; axes, inside and enters as of a ``Release``.
    """

    def impl(self, x, **params):
        return x

    def abstract(self, x, **params):
        return x

    def sharding_of(self, n, *, spec, mesh, free, **params):
        return None if free else NamedSharding(mesh, spec)


class Region(NamedTuple):
    """The types of mesh axes in a region, in ``state.context``."""

    mesh: AbstractMesh


def region() -> Region | None:
    """The innermost region that is being traced, or None."""
    return next((entry for entry in reversed(state.context) if isinstance(entry, Region)), None)


def with_axis_types(mesh: Any, axes: tuple[str, ...], kind: AxisType) -> Any:
    """A mesh whose ``axes`` have another type."""
    types = [kind if a in axes else t for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True)]
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return type(mesh)(mesh.devices, mesh.axis_names, axis_types=types)


def along_explicit(aval: ShapedArray, sharding: Any) -> ShapedArray:
    """The type of a value with a sharding: plain if no axis is explicit."""
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit:
        return aval
    mesh = sharding.mesh.abstract
    entries = [tuple(a for a in names_of(e) if a in mesh.explicit) for e in sharding.spec.for_rank(aval.ndim)]
    return ExplicitArray(aval, NamedSharding(mesh, PartitionSpec(*map(_entry, entries))))


def _entry(axes: tuple[str, ...]) -> Any:
    return axes[0] if len(axes) == 1 else axes or None
