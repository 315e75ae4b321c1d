"""``lower().per_device``: the program of one device of a mesh, to read.

Parallel, after stage 3. In: a lowered function, whose mesh comes from its arguments or annotations; the mesh may be
abstract. Out: the local jaxpr, its collectives, and the types of arguments and results with their shardings.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blufunc import errors
from blufunc.core.arrays.backend import Device
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.kernels.tables import table
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import names_of
from blufunc.parallel.reports.collectives import Collectives, collectives_of, local_of
from blufunc.transforms.staging.stages import Lowered


@dataclass(frozen=True)
class PerDevice:
    """The program of each device of a mesh; ``print`` it.

    Attributes:
      name: the name of the function.
      mesh: the mesh, without devices.
      jaxpr: the local program; constants are leading parameters. Collectives are equations.
      in_shardings, out_shardings: of arguments and results.
      labels: a name of each argument.
      global_types: the types of arguments and results, before they are divided.
    """

    name: str
    mesh: AbstractMesh
    jaxpr: Jaxpr
    in_shardings: Sequence[NamedSharding]
    out_shardings: Sequence[NamedSharding]
    labels: Sequence[str]
    global_types: tuple[Sequence[ShapedArray], Sequence[ShapedArray]]
    _whole: Jaxpr

    @functools.cached_property
    def collectives(self) -> Collectives:
        """The collectives, a row for each kind."""
        return collectives_of(self.jaxpr, self._whole)

    def __str__(self) -> str:
        rows = [*self._rows()]
        parts = [f"{self.name} on each of {self.mesh.size} devices ({self.mesh})"]
        if rows:
            parts.append(table(("", "type", "on a device"), rows))
        return "\n".join([*parts, "", self.as_text()])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def as_text(self, lines: bool = False) -> str:
        """The local jaxpr as text; with ``lines``, each equation with the user's line."""
        return self.jaxpr.pretty_print(source_info=lines)

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        ins, outs = self.global_types
        for label, aval, sharding in zip(self.labels, ins, self.in_shardings, strict=True):
            yield label, sharded_type(aval, sharding), _local(aval, sharding)
        for i, (aval, sharding) in enumerate(zip(outs, self.out_shardings, strict=True)):
            yield f"result {i}", sharded_type(aval, sharding), _local(aval, sharding)


def sharded_type(aval: ShapedArray, sharding: NamedSharding) -> str:
    """A global type with its sharding: ``f32[8@data,16]{U:model}``.

    An axis of the array is followed by the mesh axes that divide it; unreduced and reduced mesh axes come last.
    """
    spec = sharding.spec.for_rank(aval.ndim)
    axes = [
        f"{n}@{names[0]}" if len(names) == 1 else f"{n}@({','.join(names)})" if names else str(n)
        for n, names in zip(aval.shape, map(names_of, spec), strict=True)
    ]
    short = str(aval).partition("[")[0]
    marks = [f"{k}:{','.join(sorted(v))}" for k, v in (("U", spec.unreduced), ("R", spec.reduced)) if v]
    return f"{short}[{','.join(axes)}]" + (f"{{{' '.join(marks)}}}" if marks else "")


def _local(aval: ShapedArray, sharding: NamedSharding) -> str:
    return str(aval.with_shape(sharding.shard_shape(aval.shape)))


def per_device(lowered: Lowered) -> PerDevice:
    """The program of a lowered function on each device of its mesh.

    Raises:
      ShardingError: there is no mesh, or annotations do not fit it.
    """
    found = local_of(lowered, "per_device")
    if found is None:
        raise errors.ShardingError(
            f"{lowered.traced.fun_name} has no mesh.",
            where=source.here(),
            why="per_device shows the program of one device of a mesh.",
            fix="lower with arrays on a mesh, or ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))",
        )
    n, whole = len(lowered.traced.entry.consts), found.whole
    names = whole.arg_names or ("",) * len(whole.invars)
    labels = [f"constant {i}" if i < n else name or f"argument {i - n}" for i, name in enumerate(names)]
    types = [v.aval for v in whole.invars], [v.aval for v in whole.outvars]
    ins, outs = found.in_shardings, found.out_shardings
    return PerDevice(found.name, found.mesh.abstract, found.jaxpr, ins, outs, labels, types, whole)


def collectives_in(lowered: Lowered) -> Collectives:
    """The collectives of a lowered function; none without a mesh."""
    found = local_of(lowered, "collectives")
    return collectives_of(found.jaxpr, found.whole) if found else Collectives(())


def local_on(lowered: Lowered, device: Device) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The program of one device, in the forms of ``device``; of all without a mesh."""
    found = local_of(lowered, "lower", in_forms=device.backend.chosen)
    if found is None:
        return lowered.jaxpr, lowered.donated
    return lower_collectives(found.jaxpr), found.donated
