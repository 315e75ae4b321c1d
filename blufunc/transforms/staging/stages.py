"""The stages of a function under ``jit`` as objects: ``Traced``, ``Lowered``, ``Compiled``.

Transforms, stages 2 to 8. In: a trace of a function (``Entry``), which ``jit.py`` makes and keeps. What lowered and
compiled programs show of themselves is gathered by ``kernels/inspect/program.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blufunc import _lazy, errors
from blufunc.config import config
from blufunc.core.arrays import backend, nan_check
from blufunc.core.arrays.array import Array, Donated, arrays_of
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import Tracer
from blufunc.core.primitives import effects
from blufunc.core.primitives.primitive import concrete, device_of
from blufunc.core.programs import simplify as passes
from blufunc.core.programs.cache_key import Key, difference
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, labels_of

with _lazy.modules(globals()):
    from blufunc.kernels.inspect import program as inspection
    from blufunc.kernels.inspect import roofline

if TYPE_CHECKING:
    from blufunc.kernels.cost import Cost
    from blufunc.kernels.fusion.report import Fused
    from blufunc.kernels.inspect.program import Memory, Sight, Timings


@dataclass
class Entry:
    """A trace of a function, and the programs made from it."""

    jaxpr: Jaxpr  # closed: constants first among its parameters
    consts: tuple
    out_tree: tree.TreeDef
    out_avals: tuple[ShapedArray, ...]
    key: Key
    donated: tuple[bool, ...]  # which arguments, constants aside, are
    single: bool  # one array is all it returns
    home: backend.Device | None = None  # where its operations say that it runs
    budget: int | None = None  # bytes that the planned peak of its programs may have
    programs: dict[Any, Callable] = field(default_factory=dict)
    ran: tuple[Any, Any, Any] = (None, None, None)  # the last call: where, program, matmul_precision
    copies: dict[backend.Device, list[Array]] = field(default_factory=dict)  # what it closes over
    taken: tuple[bool, ...] = ()  # which parameters of the jaxpr lose their buffers; empty where none do

    def __post_init__(self) -> None:
        # Numbers have nothing to give, and constants of the program may be the same object.
        taken = [d and a.ndim > 0 for d, a in zip(self.donated, self.key.types, strict=True)]
        if any(taken):
            self.taken = (False,) * len(self.consts) + tuple(taken)

    def place(self, arrays: Sequence[Array], name: str) -> backend.Device:
        """Where to run it on these arguments; what it closes over decides only where they are all numbers."""
        if any(a.aval.ndim for a in arrays):
            return device_of(arrays, name, self.home)
        return device_of([*arrays, *map(concrete, self.consts)], name, self.home)

    def constants(self, device: backend.Device) -> list[Array]:
        """What it closes over, on a device; copied there at most once."""
        found = self.copies.get(device)
        if found is None:
            found = self.copies[device] = [
                c if c.device == device else Array(c.buffer_on(device), c.aval, device)
                for c in map(concrete, self.consts)
            ]
        return found

    def program_on(self, device: backend.Device, donating: bool = True) -> Callable:
        """The program for a device; not ``donating``: one that leaves all its arguments as they are."""
        key = device, donating, config.matmul_precision
        found = self.programs.get(key)
        if found is None:
            donated = (False,) * len(self.consts) + self.donated
            flags = donated if donating else (False,) * len(donated)
            budget = (
                self.budget if flags == donated else None
            )  # arguments that are kept need more than was planned
            found = self.programs[key] = device.backend.compile(self.jaxpr, flags, budget)
        return found

    def alive(self) -> bool:
        """Whether the values it closed over may still be used."""
        return not self.consts or all(c.trace.alive for c in self.consts if isinstance(c, Tracer))


def give(
    arrays: Sequence[Array], buffers: list, taken: Sequence[bool], device: backend.Device, name: str
) -> None:
    """Let the arrays that are ``taken`` lose their buffers to a call of ``name``.

    Args:
      buffers: those of all arguments, on the device; copies take the place of those that others see.
    """
    device.backend.claim(buffers, taken)
    part_with(arrays, taken, name)


def part_with(arrays: Sequence[Array], taken: Sequence[bool], name: str) -> None:
    """Mark the arrays that are ``taken`` as donated to a call of ``name``."""
    gone = Donated(name, source.current())
    for array in itertools.compress(arrays, taken):
        array._buffer = gone


def chosen(device: backend.Device | None, name: str) -> backend.Device:
    """``device``, or the default one.

    Raises:
      ArgumentError: it is something else; ``name`` says what it was given to.
    """
    found = device or backend.default_device()
    if not isinstance(found, backend.Device):
        raise errors.ArgumentError(
            f"{name} takes a device, not {found!r:.60}.", where=source.here(), fix="use one of bf.devices()"
        )
    return found


class Traced:
    """Stages 1 and 2 done: a jaxpr.

    Attributes:
      jaxpr: the jaxpr, constants first among its parameters.
      out_tree: the structure of the results.
      device: where the arrays are that it was traced with; None if it was traced with types and numbers only.
      layouts: how they lie there, where that matters.
      donated: which arguments are.
    """

    def __init__(
        self,
        owner: Any,
        entry: Entry,
        in_tree: tree.TreeDef,
        device: backend.Device | None,
        arguments: Sequence[Any],
    ):
        self.owner, self.entry, self.in_tree, self.donated = owner, entry, in_tree, entry.donated
        self.device = device
        self.layouts = device.layouts([*entry.consts, *arguments]) if device else ()
        self.jaxpr = entry.jaxpr
        self.out_tree = entry.out_tree

    def lower(self) -> Lowered:
        """Simplify."""
        return Lowered(self)


class Lowered:
    """Stage 4 done: a jaxpr with calls inlined, constants folded, and nothing computed twice or in vain.

    What it shows is for the device of the arrays that it was traced with, or for the default one if there were none;
    nothing is compiled for it on the CPU.

    Attributes:
      jaxpr: the simplified jaxpr; of what has two forms (``transforms/control_flow/platform_variants.py``) it has both
        yet.
    """

    def __init__(self, traced: Traced):
        self.traced = traced
        self.jaxpr = passes.simplify(traced.jaxpr)
        self._sights: dict[tuple[backend.Device, str], Sight] = {}

    @property
    def donated(self) -> tuple[bool, ...]:
        """Which parameters of the jaxpr give their memory to the results."""
        return (False,) * len(self.traced.entry.consts) + self.traced.donated

    def sight(self, device: backend.Device | None = None) -> Sight:
        """All that can be said of the program before it runs, for a device."""
        device = device or self.traced.device or backend.default_device()
        key = device, config.matmul_precision
        found = self._sights.get(key)
        if found is None:
            local = device.local(self.jaxpr, self.donated, self.layouts_on(device))
            found = self._sights[key] = inspection.Sight(*local, self.traced.entry.budget)
        return found

    def layouts_on(self, device: backend.Device) -> tuple:
        """How the arguments lie on a device, if that is where they are."""
        return self.traced.layouts if device == self.traced.device else ()

    @property
    def fusion(self) -> Fused:
        """Which equations run together, and why the others do not; as text, a table."""
        return self.sight().fusion

    @property
    def memory(self) -> Memory:
        """The planned peak in bytes, what it is made of, and a report of the largest values by line."""
        return self.sight().memory

    @property
    def cost(self) -> Cost:
        """Bytes moved and arithmetic done, of each step and of all."""
        return self.sight().cost

    def compile(self, device: backend.Device | None = None) -> Compiled:
        """Make the program for a device, unless given that which it shows."""
        return Compiled(self, chosen(device or self.traced.device, "compile"))

    def as_text(self) -> str:
        """The simplified jaxpr as text."""
        return str(self.jaxpr)

    def source(self) -> str:
        """The program's source, with that of the bodies of its loops and branches."""
        return self.sight().source()


class Compiled:
    """Stages 5 to 7 done: a program that takes arguments of exactly the types it was traced at."""

    def __init__(self, lowered: Lowered, device: backend.Device):
        self.traced = lowered.traced
        self.lowered = lowered
        self.device = device
        self.donated = lowered.donated
        self.program = device.backend.compile(lowered.jaxpr, self.donated, lowered.traced.entry.budget)
        self._sight = lowered.sight(device)
        self._sight.program = device.local_program(self.program, lowered.layouts_on(device))

    def source(self) -> str:
        """The generated source, with that of the bodies of its loops and branches."""
        return self._sight.source()

    def timings(self, *args, repeats: int = 5, **kwargs) -> Timings:
        """Run the program step by step on these arguments, which are left as they are, and time each step.

        Args:
          args, kwargs: as in a call.
          repeats: how often; the median is shown.
        Returns:
          for each step its name, lines, milliseconds, bytes and share of the roofline; as text, a table.
        Raises:
          ArgumentError: the arguments are not those that it was compiled for, or have no values; ``repeats`` is not
            a positive number.
        """
        if not isinstance(repeats, int) or repeats < 1:
            raise errors.ArgumentError(
                f"timings: repeats={repeats!r:.60} is no number of runs.",
                where=source.here(),
                fix="repeats=5",
            )
        buffers = [a.buffer_on(self.device) for a in self._arrays(args, kwargs)]
        return self._sight.timings(buffers, roofline.machine_of(self.device.own), repeats)

    def __call__(self, *args, **kwargs) -> Any:
        arrays = self._arrays(args, kwargs)
        name = self.traced.owner.name
        kept = (
            [self._copy(a) if d else a for a, d in zip(arrays, self.donated, strict=True)]
            if config.guards
            else []
        )
        buffers = [a.buffer_on(self.device) for a in arrays]
        if self.traced.entry.taken:
            give(arrays, buffers, self.traced.entry.taken, self.device, name)
        outs = self.program(buffers)
        if config.guards:
            jaxpr = effects.silenced(passes.inline_calls(self.traced.jaxpr))
            nan_check.check_program(name, jaxpr, kept, outs, self.device)
        return tree.unflatten(self.traced.out_tree, arrays_of(outs, self.traced.entry.out_avals, self.device))

    def _copy(self, a: Array) -> Array:
        return Array(self.device.backend.from_host(nan_check.host(a), self.device), a.aval, self.device)

    def _arrays(self, args: tuple, kwargs: dict) -> list[Array]:
        """The arguments of the program: what the function closes over, and what it is called with."""
        traced = self.traced
        call = traced.owner._split(args, kwargs)
        values = as_values(call.leaves, lambda i: f"argument leaf {i}")
        values = traced.owner._placed(call, values)
        key = Key(call.in_tree, tuple(v.aval for v in values), call.static_key, traced.entry.key.context)
        if key != traced.entry.key:
            raise errors.ArgumentError(
                f"the compiled {traced.owner.name} was called with other arguments than it was compiled for.",
                where=source.here(),
                why=difference(traced.entry.key, key, labels_of(traced.owner.fun, call.in_tree)),
                fix="call the jitted function itself, which compiles for each kind of argument",
            )
        return [*traced.entry.constants(self.device), *map(concrete, values)]
