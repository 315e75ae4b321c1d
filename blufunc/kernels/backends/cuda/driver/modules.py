"""Stages 6 to 8 for kernels on a CUDA device: LoopIR is rendered, compiled in threads, and loaded.

Kernels. In: the kernels of a schedule, and the texts that its other steps are written in. Out: ``Loaded`` functions, of
which executors make launches. Kernels with one text are one function. A program's texts are compiled side by side, one
a processor core; a few kernels share a module, since each has the prelude to be read.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from blufunc.config import config
from blufunc.kernels.backends.cuda.device_model import HOPPER, Limits, limits_of
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.render.source import CudaKernel, render_many
from blufunc.kernels.backends.cuda.schedule import passes
from blufunc.kernels.backends.cuda.schedule.kinds import group_key, group_limit
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.loopir.ir import Kernel
from blufunc.kernels.schedule import GroupStep, KernelStep, Schedule
from blufunc.kernels.user_kernel import CudaSource

_PER_MODULE = 4
"""Kernels of a module at the most: NVRTC takes 20 ms for one without any, and 20 to 500 for a kernel."""


Text = tuple[str, str]
"""A source, and a name for it in messages."""


class Addresses(Protocol):
    """The addresses that a launch takes: what is assigned to one is what the next run gets."""

    def __setitem__(self, i: int, address: int, /) -> None: ...


@dataclass(frozen=True)
class Loaded:
    """A function on a device, and how it is launched.

    Attributes:
      counters: how many 32-bit counters it uses; their address comes behind those of its buffers. They are 0 before
        each launch, and after it.
      table: whether it takes one structure of all addresses by value, and not each for itself.
    """

    function: driver.Kernel
    grid: Sequence[int]
    block: Sequence[int]
    shared: int
    counters: int = 0
    table: bool = False

    def prepare(self, addresses: Sequence[int]) -> tuple[Callable[[int], None], Addresses]:
        """A launch with these addresses, to be called with the handle of a stream; and the addresses, to change."""
        values = [b"".join(a.to_bytes(8, "little") for a in addresses)] if self.table else addresses
        launch = self.function.prepare(self.grid, self.block, self.shared, values)
        return launch, launch.arguments.words


class Wanted(NamedTuple):
    """One launch.

    Attributes:
      kernels: one; or several that do the same to different arrays.
      values: what their buffers are, kernel after kernel.
      offsets: how many bytes behind the beginning of its value each begins.
      aliased: the positions of the buffers of a kernel that may lie where another of its buffers does.
    """

    kernels: tuple[Kernel, ...]
    values: tuple[int, ...]
    offsets: tuple[int, ...]
    aliased: frozenset[int]

    @property
    def names(self) -> list[str]:
        """The names of the first kernel's buffers that are aliased."""
        return [self.kernels[0].buffers[i].name for i in sorted(self.aliased)]

    @property
    def key(self) -> tuple:
        """What two launches of one function have in common."""
        return tuple([k.key for k in self.kernels]), self.aliased


def wanted_by(made: Schedule, step: KernelStep | GroupStep) -> list[Wanted]:
    """The launches of a step: one, if kernels that are together can be."""
    if isinstance(step, KernelStep):
        return [_joined(made, [step])]
    apart: dict[tuple, list[KernelStep]] = {}
    for n, member in enumerate(step.members):
        key = group_key(member.kernel)
        apart.setdefault((n,) if key is None else (None, key), []).append(member)
    out = []
    for members in apart.values():
        limit = group_limit(members[0].kernel)
        out += [_joined(made, members[i : i + limit]) for i in range(0, len(members), limit)]
    return out


def _joined(made: Schedule, members: Sequence[KernelStep]) -> Wanted:
    aliased = frozenset[int]().union(*[_aliased(made, m) for m in members])
    values = itertools.chain.from_iterable([m.values for m in members])
    offsets = itertools.chain.from_iterable([m.offsets for m in members])
    return Wanted(tuple(m.kernel for m in members), tuple(values), tuple(offsets), aliased)


def _aliased(made: Schedule, step: KernelStep) -> frozenset[int]:
    """The positions of the buffers of a kernel that lie where another of its buffers lies."""
    places: dict[object, list[int]] = {}
    for i, value in enumerate(step.values):
        place = made.place(value)
        places.setdefault(value if place is None else place, []).append(i)
    return frozenset(i for together in places.values() if len(together) > 1 for i in together)


# -- rendering and compiling -----------------------------------------------------------------------


class Entry(NamedTuple):
    """A function of a module, and how it is launched: as ``Loaded`` has it.

    Attributes:
      module: the number of its text.
      name: its own.
    """

    module: int
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    counters: int
    table: bool


@dataclass(frozen=True)
class Rendered:
    """The kernels of a program as sources.

    Attributes:
      texts: of its modules.
      entries: the functions in them.
      launched: for each launch, in the order of the program, the number of its function.
    """

    texts: tuple[str, ...]
    entries: tuple[Entry, ...]
    launched: tuple[int, ...]


def rendered(wanted: Sequence[Wanted], limits: Limits = HOPPER) -> Rendered:
    """The sources of the launches of a program, for a device with these limits."""
    keys = [w.key for w in wanted]
    distinct = dict(zip(keys, wanted, strict=True))
    texts, kernels = _render(list(distinct.values()), limits)
    entries = [
        Entry(module, k.entry, k.grid, k.block, k.shared_bytes, k.counters, k.segments > 0)
        for module, k in kernels
    ]
    numbers = {key: n for n, key in enumerate(distinct)}
    return Rendered(tuple(texts), tuple(entries), tuple([numbers[key] for key in keys]))


def schedules(wanted: Iterable[Wanted], limits: Limits = HOPPER) -> str:
    """The schedules of the launches of a program as text, each distinct one once."""
    return "\n".join(map(str, scheduled({w.key: w for w in wanted}.values(), limits))) or "no kernels"


def load(
    wanted: Sequence[Wanted],
    device: int,
    name: str,
    others: Iterable[Text] = (),
    made: Rendered | None = None,
) -> tuple[list[str], list[Loaded]]:
    """The sources of a program's modules, and the functions for its launches, in their order.

    Args:
      others: what its steps will ask ``module`` for, to be compiled beside these.
      made: what ``rendered`` made of the launches, if it did.
    """
    made = made or rendered(wanted, limits_on(device))
    if config.shows("source"):
        config.show("\n".join(made.texts))
    modules = _compiled([*((text, name) for text in made.texts), *others], device)
    functions = [Loaded(modules[e.module].kernel(e.name), *e[2:]) for e in made.entries]
    return list(made.texts), [functions[n] for n in made.launched]


def limits_on(device: int) -> Limits:
    """The limits of a device that is there."""
    found = driver.properties(device)
    return limits_of(found.capability, found.shared_per_block)


def scheduled(wanted: Iterable[Wanted], limits: Limits) -> list[ScheduledKernel]:
    """The schedules of launches; structurally different kernels of one name get numbers."""
    taken: Counter[str] = Counter()
    out = []
    for w in wanted:
        first, *rest = w.kernels
        taken[first.name] += 1
        if taken[first.name] > 1:
            first = replace(first, name=f"{first.name}_{taken[first.name]}")
        if rest:
            out.append(passes.schedule_group([first, *rest], f"{first.name}_group", w.names))
        else:
            out.append(passes.schedule(first, w.names, limits))
    return out


def _render(wanted: Sequence[Wanted], limits: Limits) -> tuple[list[str], list[tuple[int, CudaKernel]]]:
    """Sources of modules, and for each launch its module's index and its kernel."""
    schedules = scheduled(wanted, limits)
    single = [n for n, s in enumerate(schedules) if s.kind != "group"]
    count = -(-len(single) // _PER_MODULE)
    # dealt out: kernels that are alike, and take as long, come one after another
    together = [single[first::count] for first in range(count)]
    together += [[n] for n, s in enumerate(schedules) if s.kind == "group"]
    made: dict[int, CudaKernel] = {}
    for some in together:
        made.update(zip(some, render_many([schedules[n] for n in some]), strict=True))
    texts = list(dict.fromkeys(made[n].source for n in range(len(wanted))))
    return texts, [(texts.index(made[n].source), made[n]) for n in range(len(wanted))]


_lock = threading.Lock()
_modules: dict[tuple[int, str], driver.Module] = {}


def _compiled(texts: Sequence[Text], device: int) -> list[driver.Module]:
    """The modules of texts; those that this process has are taken as they are."""
    with _lock:
        new = {text: name for text, name in texts if (device, text) not in _modules}
        if new:
            arch = driver.properties(device).arch
            driver.use_device(device)
            for text, cubin in zip(new, nvrtc.compile_many(new.items(), arch), strict=True):
                _modules[device, text] = driver.Module(cubin)
        return [_modules[device, text] for text, _ in texts]


def module(text: str, device: int, name: str) -> driver.Module:
    """The module of a complete text; ``name`` is for messages."""
    return _compiled([(text, name)], device)[0]


def load_source(text: CudaSource, device: int) -> Loaded:
    """The function of a kernel that a user wrote."""
    if config.shows("source"):
        config.show(text.text)
    function = module(text.text, device, text.entry).kernel(text.entry)
    return Loaded(function, grid_of(text, driver.properties(device).sm_count), text.block, text.shared)


def grid_of(text: CudaSource, multiprocessors: int) -> Sequence[int]:
    """The blocks that a kernel is launched with."""
    x, y, z = text.grid
    return (min(x, multiprocessors) if text.resident else x, y, z)
