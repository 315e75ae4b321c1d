"""Where the time of a program goes: ``trace`` and ``profile``.

Face. In: a block of code, or a function and its arguments. Out: a file that Perfetto opens, or a table by line of the
user's code. On the CPU the generated code reads the clock between steps; while a trace is on, a GPU runs kernel by
kernel (docs/design/028-sight.md).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blufunc import errors
from blufunc.core.arrays import recording
from blufunc.core.ir import source
from blufunc.kernels.inspect import trace_file
from blufunc.kernels.inspect.by_line import Profile, by_line
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.jit import Jitted, jit
from blufunc.transforms.staging.transfer import block_until_ready

__all__ = [
    "Profile",
    "StepTraceAnnotation",
    "TraceAnnotation",
    "annotate_function",
    "profile",
    "start_trace",
    "stop_trace",
    "trace",
]


_NOT_HERE = {
    "ProfileData": "a trace is JSON, which any program reads",
    "ProfileOptions": "a trace has no options",
    "device_memory_profile": "use blufunc.memory.snapshot()",
    "save_device_memory_profile": "use blufunc.memory.snapshot().save(path)",
    "start_server": "use trace(path), and open the file in https://ui.perfetto.dev",
    "stop_server": "there is no server; use trace(path)",
}
"""Names of JAX: what takes their place."""


def __getattr__(name: str) -> Any:
    hint = f": {_NOT_HERE[name]}" if name in _NOT_HERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


@contextlib.contextmanager
def trace(
    log_dir: str | os.PathLike[str],
    create_perfetto_link: bool = False,
    create_perfetto_trace: bool = False,
    profiler_options: Any = None,
) -> Iterator[None]:
    """Record what runs in the block, and write a file for https://ui.perfetto.dev.

    Steps of programs, compilations, transfers, operations outside of ``jit`` and annotations are recorded. It costs a
    program on the CPU about a microsecond. A GPU runs kernel by kernel meanwhile: the times of steps are their own, and
    the gaps between them are wider than without a trace.

    Args:
      log_dir: a file, ``trace.json`` or ``trace.json.gz``; any other name is a folder, in which the file is where
        TensorBoard looks for it.
      create_perfetto_link: must be False: no page is served.
      create_perfetto_trace: has no effect: the file is one.
      profiler_options: must be None.
    Raises:
      ArgumentError: a trace is on already, or an option is not as above.
    """
    start_trace(log_dir, create_perfetto_link, create_perfetto_trace, profiler_options)
    mine = recording.active
    try:
        yield
    finally:
        if recording.active is mine:  # not ended inside of the block
            stop_trace()


def start_trace(
    log_dir: str | os.PathLike[str],
    create_perfetto_link: bool = False,
    create_perfetto_trace: bool = False,
    profiler_options: Any = None,
) -> None:
    """Begin what ``stop_trace`` ends and writes; arguments and errors of ``trace``."""
    if create_perfetto_link or profiler_options is not None:
        name = "create_perfetto_link" if create_perfetto_link else "profiler_options"
        raise errors.ArgumentError(
            f"trace: {name} is not supported.",
            where=source.here(),
            fix="open the file in https://ui.perfetto.dev",
        )
    if recording.active is not None:
        raise errors.ArgumentError(
            "a trace is on already.",
            where=source.here(),
            why="a process records one at a time.",
            fix="profiler.stop_trace()",
        )
    try:
        path = Path(log_dir)
    except TypeError:
        raise errors.ArgumentError(
            f"trace writes to a path, not to {log_dir!r:.60}.", where=source.here(), fix='"trace.json.gz"'
        ) from None
    if not path.name.endswith((".json", ".json.gz")):
        run = time.strftime("%Y_%m_%d_%H_%M_%S")
        path = path / "plugins" / "profile" / run / f"{socket.gethostname()}.trace.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as e:
        raise errors.ArgumentError(
            f"trace cannot write {path}: {e.strerror or e}.", where=source.here(), fix="another path"
        ) from e
    recording.active = recording.Recording(path)


def stop_trace() -> None:
    """End the trace, wait for the devices, and write the file.

    Raises:
      ArgumentError: no trace is on.
    """
    ended = recording.active
    if ended is None:
        raise errors.ArgumentError("no trace is on.", where=source.here(), fix="profiler.start_trace(path)")
    recording.active = None
    try:
        ended.finish()
    finally:  # a device that fails leaves what the host did
        trace_file.write(ended)


class TraceAnnotation(contextlib.ContextDecorator):
    """A named span of host code in the trace; a context, or a decorator.

    Args:
      name: its name.
      facts: further values, shown with it.
    """

    def __init__(self, name: str, **facts: Any):
        self.name, self.facts = name, facts
        self._start = 0

    def _recreate_cm(self) -> TraceAnnotation:
        return type(self)(self.name, **self.facts)  # a call of a decorated function may overlap another

    def __enter__(self) -> TraceAnnotation:
        self._start = recording.clock()
        return self

    def __exit__(self, *exc: object) -> None:
        to = recording.active
        if to is not None and self._start >= to.began:
            stop = recording.clock()  # before the facts become text, which may wait for a device
            facts = {k: _plain(v) for k, v in self.facts.items()}
            event = recording.Event(str(self.name), "annotation", "Python", to.thread(), self._start, stop)
            to.events.append(event._replace(about=facts))


def _plain(x: Any) -> int | float | str:
    """A value as JSON has it."""
    try:
        return operator.index(x)
    except TypeError:
        pass
    return x if isinstance(x, float) and math.isfinite(x) else str(x)


class StepTraceAnnotation(TraceAnnotation):
    """A ``TraceAnnotation`` of a training step: ``step_num=`` is its number."""


def annotate_function(func: Callable, name: str | None = None, **facts: Any) -> Callable:
    """``func`` with a ``TraceAnnotation`` around each call, by default of its name."""
    check_callable(func, "annotate_function")
    label = name or str(getattr(func, "__qualname__", type(func).__name__))

    @functools.wraps(func)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        with TraceAnnotation(label, **facts):
            return func(*args, **kwargs)

    return annotated


def profile(fun: Callable, *args: Any, repeats: int = 5, **kwargs: Any) -> Profile:
    """Time ``fun`` under ``jit``, by line of the user's code.

    Args:
      fun: a function, under ``jit`` or not.
      args, kwargs: its arguments, arrays, which stay intact.
      repeats: the number of runs, of which the median is reported; default 5.
    Returns:
      a ``Profile``: for each line the milliseconds, bytes and arithmetic of what it computes, the largest first; prints
      as a table. The time of a step that computes several lines is split across them by the least time of each alone.
    Raises:
      ArgumentError: ``fun`` is not a function, or an argument has no values.
    """
    check_callable(fun, "profile")
    function = fun if isinstance(fun, Jitted) else jit(fun)
    block_until_ready((args, kwargs))
    compiled = function.lower(*args, **kwargs).compile()
    return by_line(function.name, compiled.sight(), compiled.timings(*args, repeats=repeats, **kwargs))
