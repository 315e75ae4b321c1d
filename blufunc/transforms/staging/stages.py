"""The stages of ``jit`` as objects: ``Traced``, ``Lowered``, ``Compiled``.

Transforms, stages 2 to 8. In: a trace of a function (``Entry``), made and cached by ``jit.py``. Out: programs, and
reports on them, which ``kernels/inspect/program.py`` collects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blufunc import _lazy, errors
from blufunc.config import config
from blufunc.core.arrays import backend, nan_check, recording
from blufunc.core.arrays.array import ConcreteArray, Donated, arrays_of
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import Tracer
from blufunc.core.primitives import effects
from blufunc.core.primitives.primitive import concrete, device_of
from blufunc.core.programs import simplify as passes
from blufunc.core.programs.cache_key import Key, difference
from blufunc.core.programs.stage import TraceTypes
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import ShapeDtypeStruct, as_values, labels_of
from blufunc.transforms.staging.signatures import Analysed, Signed

with _lazy.modules(globals()):
    from blufunc.kernels.backends.cuda import described
    from blufunc.kernels.inspect import program as inspection
    from blufunc.kernels.inspect import roofline

if TYPE_CHECKING:
    from blufunc.kernels.cost import Cost
    from blufunc.kernels.fusion.report import Fused
    from blufunc.kernels.inspect.program import Memory, Sight, Timings


mesh_reports: Any = None
"""Reports on meshes, which are above this package.

The module ``parallel/reports/per_device.py``; set by ``blufunc/__init__.py``.
"""


@dataclass
class Entry:
    """A trace of a function, and the programs made from it."""

    jaxpr: Jaxpr  # closed: constants are leading parameters
    consts: tuple
    out_tree: tree.TreeDef
    out_avals: tuple[ShapedArray, ...]
    key: Key
    donated: tuple[bool, ...]  # a flag per argument, constants aside
    single: bool  # returns a single array
    home: backend.Device | None = None  # the device its operations require
    budget: int | None = None  # limit in bytes on the planned peak
    programs: dict[Any, Callable] = field(default_factory=dict)
    ran: tuple[Any, Any, Any] = (None, None, None)  # the last call: where, program, matmul_precision
    copies: dict[backend.Device, list[ConcreteArray]] = field(default_factory=dict)  # its constants
    donates: tuple[bool, ...] = ()  # a flag per parameter that loses its buffer; empty if none

    def __post_init__(self) -> None:
        # Scalars have no buffer to reuse, and constants of the program may be the same object.
        donates = [d and a.ndim > 0 for d, a in zip(self.donated, self.key.types, strict=True)]
        if any(donates):
            self.donates = (False,) * len(self.consts) + tuple(donates)

    def place(self, arrays: Sequence[ConcreteArray], name: str) -> backend.Device:
        """The device for these arguments; constants decide if all are scalars."""
        if any(a.aval.ndim for a in arrays):
            return device_of(arrays, name, self.home)
        return device_of([*arrays, *map(concrete, self.consts)], name, self.home)

    def constants(self, device: backend.Device) -> list[ConcreteArray]:
        """The constants on a device; copied there at most once."""
        found = self.copies.get(device)
        if found is None:
            found = self.copies[device] = [
                c if c.device == device else ConcreteArray(c.buffer_on(device), c.aval, device)
                for c in map(concrete, self.consts)
            ]
        return found

    def program_on(self, device: backend.Device, donating: bool = True) -> Callable:
        """The program for a device; without ``donating`` it keeps its arguments."""
        key = device, donating, config.matmul_precision
        found = self.programs.get(key)
        if found is None:
            donated = (False,) * len(self.consts) + self.donated
            flags = donated if donating else (False,) * len(donated)
            budget = self.budget if flags == donated else None  # without donation the plan needs more memory
            with (
                to.span(f"compile {self.jaxpr.name or 'program'}", "compilation")
                if (to := recording.active)
                else recording.OFF
            ):
                found = self.programs[key] = device.backend.compile(self.jaxpr, flags, budget)
        return found

    def alive(self) -> bool:
        """True if its constants are still valid."""
        return not self.consts or all(c.trace.alive for c in self.consts if isinstance(c, Tracer))


def donate(
    arrays: Sequence[ConcreteArray], buffers: list, donates: Sequence[bool], device: backend.Device, name: str
) -> None:
    """Donate the flagged arrays' buffers to a call of ``name``.

    Args:
      buffers: of all arguments, on the device; referenced ones are replaced by copies.
    """
    device.backend.claim(buffers, donates)
    mark_donated(arrays, donates, name)


def mark_donated(arrays: Sequence[ConcreteArray], donates: Sequence[bool], name: str) -> None:
    """Mark the flagged arrays as donated to a call of ``name``."""
    gone = Donated(name, source.current())
    for array in itertools.compress(arrays, donates):
        array._buffer = gone


def device_or_default(device: backend.Device | str | None, name: str) -> backend.Device:
    """``device``, or the default one; text names an architecture: ``cuda:sm_90``.

    Raises:
      ArgumentError: it is not a device; ``name`` is the function that got it.
    """
    found = device or backend.default_device()
    if isinstance(found, str) and found.startswith("cuda:sm_"):
        return described.described(found)
    if not isinstance(found, backend.Device):
        raise errors.ArgumentError(
            f"{name} takes a device, not {found!r:.60}.", where=source.here(), fix="use one of bf.devices()"
        )
    return found


def placement(x: Any) -> Any:
    """The sharding of an argument on a mesh, of a shape that has one, or itself."""
    if isinstance(x, ConcreteArray):
        return x.buffer.sharding if x.device.joint else None
    return x.sharding if isinstance(x, ShapeDtypeStruct) else x if hasattr(x, "spec") else None


class Traced(Signed):
    """The result of stages 1 and 2: a jaxpr.

    Attributes:
        jaxpr: the jaxpr, constants as leading parameters.
        device: the device of the arrays it was traced with; None for types and scalars only.
        layouts: their layouts there, where relevant.
        placements: the sharding of each argument that has one on a mesh, else None.
        donated: a flag per argument.
    """

    def __init__(
        self,
        owner: Any,
        entry: Entry,
        in_tree: tree.TreeDef,
        device: backend.Device | None,
        arguments: Sequence[Any],
        static: Mapping[int | str, Any],
    ):
        self.owner, self.entry, self.donated = owner, entry, entry.donated
        self._in_tree, self._static = in_tree, static
        self.device = device
        self.layouts = device.layouts([*entry.consts, *arguments]) if device else ()
        self.placements = tuple(map(placement, arguments))
        self.jaxpr = entry.jaxpr

    def _trace(self) -> Traced:
        return self

    def with_static(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a call with the static ones, if it has only the others."""
        places = sorted(i for i in self._static if isinstance(i, int))
        whole = list(args)
        if places and len(args) + len(places) == len(self._in_tree.children()[0].children()):
            for i in places:
                whole.insert(i, self._static[i])
        names = {k: v for k, v in self._static.items() if isinstance(k, str)}
        return tuple(whole), {**names, **kwargs}

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return self.owner.name

    def lower(self, *, platform: str | None = None) -> Lowered:
        """Simplify.

        Args:
          platform: an architecture whose sources and costs to show, present or not: ``"cuda:sm_90"``; default that of
            the arguments.
        Raises:
          ValueRangeError: there is no such architecture.
        """
        return Lowered(self, None if platform is None else described.described(platform))


class Lowered(Analysed):
    """The result of stage 4: a jaxpr after inlining, folding, CSE and DCE.

    Its reports are for the platform it was lowered for, of one device if there is a mesh; else for the device of the
    arrays it was traced with, or for the default one. Nothing is compiled for them on the CPU.

    Attributes:
      jaxpr: the simplified jaxpr, with both variants where there are two
        (``transforms/control_flow/platform_variants.py``).
    """

    def __init__(self, traced: Traced, device: backend.Device | None = None):
        self.traced = traced
        self._device = device or traced.device  # of the reports
        self.jaxpr = passes.simplify(traced.jaxpr)
        self._sights: dict[tuple[backend.Device, str], Sight] = {}

    @property
    def donated(self) -> tuple[bool, ...]:
        """A flag per parameter of the jaxpr, True if results may reuse its memory."""
        return (False,) * len(self.traced.entry.consts) + self.traced.donated

    def sight(self, device: backend.Device | None = None) -> Sight:
        """The report on the program before it runs, for a device."""
        device = device or self._device or backend.default_device()
        key = device, config.matmul_precision
        found = self._sights.get(key)
        if found is None:
            if isinstance(device, described.DescribedDevice):
                jaxpr, donated = mesh_reports.local_on(self, device)
                found = inspection.Sight(jaxpr, donated, device, self.traced.entry.budget)
            else:
                local = device.local(self.jaxpr, self.donated, self.layouts_on(device))
                found = inspection.Sight(*local, self.traced.entry.budget)
            self._sights[key] = found
        return found

    def layouts_on(self, device: backend.Device) -> tuple:
        """The layouts of the arguments on a device, if they are there."""
        return self.traced.layouts if device == self.traced.device else ()

    @property
    def fusion(self) -> Fused:
        """The fused regions, and why other equations do not fuse; prints as a table."""
        return self.sight().fusion

    @property
    def memory(self) -> Memory:
        """The planned peak in bytes, its composition, and the largest values by line."""
        return self.sight().memory

    @property
    def per_device(self) -> Any:
        """The program that each device of the mesh runs, with its collectives.

        A ``PerDevice``: ``jaxpr``, ``collectives``, shardings of arguments and results; prints as text.

        Raises:
          ShardingError: there is no mesh.
        """
        return mesh_reports.per_device(self)

    @property
    def collectives(self) -> Any:
        """The collectives of the program, as ``bf.collectives`` lists them."""
        return mesh_reports.collectives_in(self)

    @property
    def cost(self) -> Cost:
        """Bytes moved and arithmetic, per step and in total."""
        return self.sight().cost

    def compile(
        self, device: backend.Device | None = None, *, compiler_options: Mapping[str, Any] | None = None
    ) -> Compiled:
        """Compile for a device; default the device of the reports.

        Args:
          compiler_options: None or empty, as no compiler here has options of JAX's.
        Raises:
          UnsupportedError: there are ``compiler_options``.
        """
        if compiler_options:
            raise errors.UnsupportedError(
                f"compile(compiler_options={dict(compiler_options)!r:.60}).",
                where=source.here(),
                why="they are options of XLA.",
                fix="leave them out; bf.config has the settings of blufunc's compilers",
            )
        return Compiled(self, device_or_default(device or self._device, "compile"))

    def as_text(self) -> str:
        """The simplified jaxpr as text."""
        return str(self.jaxpr)

    def _repr_html_(self) -> str:
        return self.jaxpr._repr_html_()

    def source(self) -> str:
        """The program's source, including bodies of loops and branches."""
        return self.sight().source()


class Compiled(Analysed):
    """The result of stages 5 to 7: a program for the traced argument types."""

    def __init__(self, lowered: Lowered, device: backend.Device):
        self.traced = lowered.traced
        self.lowered = lowered
        self.device = device
        self.donated = lowered.donated
        self.program = device.backend.compile(lowered.jaxpr, self.donated, lowered.traced.entry.budget)
        self._sight = lowered.sight(device)
        self._sight.program = device.local_program(self.program, lowered.layouts_on(device))

    def sight(self) -> Sight:
        """The report on the program."""
        return self._sight

    @property
    def jaxpr(self) -> Jaxpr:
        """The simplified jaxpr."""
        return self.lowered.jaxpr

    def as_text(self) -> str:
        """The simplified jaxpr as text."""
        return self.lowered.as_text()

    def source(self) -> str:
        """The generated source, including bodies of loops and branches."""
        return self._sight.source()

    def timings(self, *args, repeats: int = 5, **kwargs) -> Timings:
        """Time each step of the program on these arguments, which stay intact.

        Args:
          args, kwargs: as in a call.
          repeats: the number of runs, of which the median is reported; default 5.
        Returns:
          for each step its name, lines, milliseconds, bytes and share of the roofline; prints as a table.
        Raises:
          ArgumentError: the arguments are not of the compiled types, or have no values; ``repeats`` is not a positive
            number.
        """
        if not isinstance(repeats, int) or repeats < 1:
            raise errors.ArgumentError(
                f"timings: repeats={repeats!r:.60} is not a number of runs.",
                where=source.here(),
                fix="repeats=5",
            )
        buffers = [a.buffer_on(self.device) for a in self._arrays(args, kwargs)]
        return self._sight.timings(buffers, roofline.machine_of(self.device.own), repeats)

    def __call__(self, *args, **kwargs) -> Any:
        arrays = self._arrays(args, kwargs)
        name = self.traced.owner.name
        inputs = (
            [self._copy(a) if d else a for a, d in zip(arrays, self.donated, strict=True)]
            if config.guards
            else []
        )
        buffers = [a.buffer_on(self.device) for a in arrays]
        if self.traced.entry.donates:
            donate(arrays, buffers, self.traced.entry.donates, self.device, name)
        outs = self.program(buffers)
        if config.guards:
            jaxpr = effects.silenced(passes.inline_calls(self.traced.jaxpr))
            nan_check.check_program(name, jaxpr, inputs, outs, self.device)
        return tree.unflatten(self.traced.out_tree, arrays_of(outs, self.traced.entry.out_avals, self.device))

    def _copy(self, a: ConcreteArray) -> ConcreteArray:
        return ConcreteArray(
            self.device.backend.from_host(nan_check.host(a), self.device), a.aval, self.device
        )

    def _arrays(self, args: tuple, kwargs: dict) -> list[ConcreteArray]:
        """The arguments of the program: constants, and the arguments of the call."""
        traced = self.traced
        call = traced.owner._split(*traced.with_static(args, kwargs))
        values = as_values(call.leaves, lambda i: f"argument leaf {i}")
        # as of a call of the jitted function: before arguments are moved to their ``in_shardings``
        shardings = TraceTypes(values, traced.entry.key.types).key if traced.entry.key.shardings else ()
        values = traced.owner._placed(call, values)
        types = tuple(v.aval for v in values)
        key = Key(call.in_tree, types, call.static_key, traced.entry.key.context, shardings)
        if key != traced.entry.key:
            raise errors.ArgumentError(
                f"the compiled {traced.owner.name} was called with arguments of other types than it was compiled for.",
                where=source.here(),
                why=difference(traced.entry.key, key, labels_of(traced.owner.fun, call.in_tree)),
                fix="call the jitted function itself, which compiles for each kind of argument",
            )
        return [*traced.entry.constants(self.device), *map(concrete, values)]
