"""Kernel modules: render LoopIR, compile it in parallel, and load it.

Kernels, stages 6 to 8. In: the kernels of a schedule, and the sources of its other steps. Out: ``Loaded`` functions,
of which executors make launches. Kernels with identical source share a function. Compilation runs on all cores, and the
kernels of large programs share modules to amortize parsing the prelude.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
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
"""Maximum kernels per module, which costs NVRTC 20 ms; a kernel costs 20 to 500."""

_ALONE = 8
"""Maximum kernels of a program that are modules of their own.

They compile side by side, and other programs reuse each.
"""


Text = tuple[str, str]
"""A source, and its name in messages."""


class Addresses(Protocol):
    """Mutable addresses of a launch: assignments apply to the next run."""

    def __setitem__(self, i: int, address: int, /) -> None: ...


class Launch(Protocol):
    """A launch: a call puts it on a stream, by handle.

    It may overlap with the end of the preceding kernel if its function waits for that.
    """

    def __call__(self, stream: int, overlaps: bool = False) -> None: ...


@dataclass(frozen=True)
class Loaded:
    """A function on a device, and its launch shape.

    Attributes:
      counters: number of 32-bit counters, whose address follows those of its buffers. They are 0 before and after each
        launch.
      table: True if its parameter is one structure of all addresses, passed by value.
      waits: True if it waits for preceding kernels by itself, so that a launch may begin ahead of their end.
    """

    function: driver.Kernel
    grid: Sequence[int]
    block: Sequence[int]
    shared: int
    counters: int = 0
    table: bool = False
    waits: bool = False

    def prepare(self, addresses: Sequence[int]) -> tuple[Launch, Addresses]:
        """Prepare a launch; also returns its addresses."""
        values = [b"".join(a.to_bytes(8, "little") for a in addresses)] if self.table else addresses
        launch = self.function.prepare(self.grid, self.block, self.shared, values)
        return launch, launch.arguments.words


class Wanted(NamedTuple):
    """One launch.

    Attributes:
      kernels: one kernel, or several of one structure on different arrays.
      values: the values of their buffers, kernel after kernel.
      offsets: byte offset of each buffer in its value.
      aliased: positions of a kernel's buffers that may share memory with another of its buffers.
    """

    kernels: tuple[Kernel, ...]
    values: tuple[int, ...]
    offsets: tuple[int, ...]
    aliased: frozenset[int]

    @property
    def names(self) -> list[str]:
        """Names of the first kernel's aliased buffers."""
        return [self.kernels[0].buffers[i].name for i in sorted(self.aliased)]

    @property
    def key(self) -> tuple:
        """Key that launches of one function share."""
        return tuple([k.key for k in self.kernels]), self.aliased


def wanted_by(made: Schedule, step: KernelStep | GroupStep) -> list[Wanted]:
    """Launches of a step; a group is one launch where possible."""
    if isinstance(step, KernelStep):
        return [_joined(made, [step])]
    groups: dict[tuple, list[KernelStep]] = {}
    for n, member in enumerate(step.members):
        key = group_key(member.kernel)
        groups.setdefault((n,) if key is None else (None, key), []).append(member)
    out = []
    for members in groups.values():
        limit = group_limit(members[0].kernel)
        out += [_joined(made, members[i : i + limit]) for i in range(0, len(members), limit)]
    return out


def _joined(made: Schedule, members: Sequence[KernelStep]) -> Wanted:
    aliased = frozenset[int]().union(*[_aliased(made, m) for m in members])
    values = itertools.chain.from_iterable([m.values for m in members])
    offsets = itertools.chain.from_iterable([m.offsets for m in members])
    return Wanted(tuple(m.kernel for m in members), tuple(values), tuple(offsets), aliased)


def _aliased(made: Schedule, step: KernelStep) -> frozenset[int]:
    """Positions of a kernel's buffers that share memory with another of its buffers."""
    places: dict[object, list[int]] = {}
    for i, value in enumerate(step.values):
        place = made.place(value)
        places.setdefault(value if place is None else place, []).append(i)
    return frozenset(i for together in places.values() if len(together) > 1 for i in together)


# -- rendering and compiling -----------------------------------------------------------------------


class Entry(NamedTuple):
    """A function of a module, with the launch shape of ``Loaded``.

    Attributes:
      module: index of its module.
      name: name of the function.
    """

    module: int
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    counters: int
    table: bool
    waits: bool


@dataclass(frozen=True)
class Rendered:
    """Kernels of a program as sources.

    Attributes:
      texts: sources of its modules.
      entries: functions in them.
      launched: for each launch, in program order, the index of its function.
    """

    texts: tuple[str, ...]
    entries: tuple[Entry, ...]
    launched: tuple[int, ...]


def rendered(wanted: Sequence[Wanted], limits: Limits = HOPPER) -> Rendered:
    """Sources of a program's launches, for a device with these limits."""
    keys = [w.key for w in wanted]
    distinct = dict(zip(keys, wanted, strict=True))
    texts, kernels = _render(list(distinct.values()), limits)
    entries = [
        Entry(module, k.entry, k.grid, k.block, k.shared_bytes, k.counters, k.segments > 0, k.waits)
        for module, k in kernels
    ]
    numbers = {key: n for n, key in enumerate(distinct)}
    return Rendered(tuple(texts), tuple(entries), tuple([numbers[key] for key in keys]))


def schedules(wanted: Iterable[Wanted], limits: Limits = HOPPER) -> str:
    """Readable schedules of a program's launches, each distinct one once."""
    return "\n".join(map(str, scheduled({w.key: w for w in wanted}.values(), limits))) or "no kernels"


def load(
    wanted: Sequence[Wanted],
    device: int,
    name: str,
    others: Iterable[Text] = (),
    made: Rendered | None = None,
) -> tuple[list[str], list[Loaded]]:
    """Compile and load a program's modules.

    Args:
      others: sources that its steps will request from ``module``, to compile in parallel.
      made: result of ``rendered``, if available.
    Returns:
      the sources of the modules, and the functions of the launches, in order.
    """
    made = made or rendered(wanted, limits_on(device))
    if config.shows("source"):
        config.show("\n".join(made.texts))
    modules = _compiled([*((text, name) for text in made.texts), *others], device)
    functions = [Loaded(modules[e.module].kernel(e.name), *e[2:]) for e in made.entries]
    return list(made.texts), [functions[n] for n in made.launched]


def limits_on(device: int) -> Limits:
    """Limits of a device of this process."""
    found = driver.properties(device)
    return limits_of(found.capability, found.shared_per_block)


def scheduled(wanted: Iterable[Wanted], limits: Limits) -> list[ScheduledKernel]:
    """Schedules of launches; distinct kernels of one name get numeric suffixes."""
    counts: Counter[str] = Counter()
    out = []
    for w in wanted:
        first, *rest = w.kernels
        counts[first.name] += 1
        if counts[first.name] > 1:
            first = replace(first, name=f"{first.name}_{counts[first.name]}")
        if rest:
            out.append(passes.schedule_group([first, *rest], f"{first.name}_group", w.names))
        else:
            out.append(passes.schedule(first, w.names, limits))
    return out


def _render(wanted: Sequence[Wanted], limits: Limits) -> tuple[list[str], list[tuple[int, CudaKernel]]]:
    """Sources of modules, and for each launch its module's index and its kernel."""
    schedules = scheduled(wanted, limits)
    single = [n for n, s in enumerate(schedules) if s.kind != "group"]
    count = len(single) if len(single) <= _ALONE else -(-len(single) // _PER_MODULE)
    # strided assignment balances modules: neighbors are similar and take equally long
    together = [single[first::count] for first in range(count)]
    together += [[n] for n, s in enumerate(schedules) if s.kind == "group"]
    kernels: dict[int, CudaKernel] = {}
    for some in together:
        kernels.update(zip(some, render_many([schedules[n] for n in some]), strict=True))
    texts = list(dict.fromkeys(kernels[n].source for n in range(len(wanted))))
    return texts, [(texts.index(kernels[n].source), kernels[n]) for n in range(len(wanted))]


_lock = threading.Lock()
_modules: dict[tuple[int, str], Future[driver.Module]] = {}


def _compiled(texts: Sequence[Text], device: int) -> list[driver.Module]:
    """Modules of sources, some of which another thread may be compiling."""
    with _lock:
        new = {text: name for text, name in texts if (device, text) not in _modules}
        for text in new:
            _modules[device, text] = Future()
        found = [_modules[device, text] for text, _ in texts]
        own = [_modules[device, text] for text in new]
    try:
        if new:
            driver.use_device(device)
            cubins = nvrtc.compile_many(new.items(), driver.properties(device).arch)
            for module, cubin in zip(own, cubins, strict=True):
                module.set_result(driver.Module(cubin))
    except BaseException as e:
        with _lock:
            for text, module in zip(new, own, strict=True):
                if not module.done():
                    del _modules[device, text]
                    module.set_exception(e)
        raise
    return [module.result() for module in found]


def module(text: str, device: int, name: str) -> driver.Module:
    """Module of a complete source; ``name`` is for messages."""
    return _compiled([(text, name)], device)[0]


def load_source(text: CudaSource, device: int) -> Loaded:
    """Function of a kernel that a user wrote."""
    if config.shows("source"):
        config.show(text.text)
    function = module(text.text, device, text.entry).kernel(text.entry)
    return Loaded(function, grid_of(text, driver.properties(device).sm_count), text.block, text.shared)


def grid_of(text: CudaSource, sms: int) -> Sequence[int]:
    """Grid of a user's kernel on a device with ``sms`` SMs."""
    x, y, z = text.grid
    return (min(x, sms) if text.resident else x, y, z)
