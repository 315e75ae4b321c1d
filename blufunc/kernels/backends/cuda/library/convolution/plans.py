"""Choice of cuDNN's engine for a convolution: proposed, timed once, kept on disk.

Kernels, stages 6 to 8, between ``graphs`` and ``op``. In: a ``Convolution``. Out: a ``Plan`` that runs it on a stream.
Only deterministic engines are considered, and for IEEE arithmetic only those without tensor cores. Workspaces are the
ones of cuBLASLt: memory that each stream has anyway.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.library import cublaslt
from blufunc.kernels.backends.cuda.library.convolution import graphs
from blufunc.kernels.backends.cuda.library.convolution.graphs import (
    NUMERICAL_NOTES,
    Candidate,
    Device,
    Engine,
)
from blufunc.kernels.cache.autotune import fastest
from blufunc.kernels.cache.disk import DiskCache, key_of
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.ops.convolution import Convolution

_CANDIDATES = 24
"""Engines to request; those that do not qualify are dropped."""

_TIMED = 8
"""Engines to time.

measured: the first is within 3% of the fastest for 40 of 42 convolutions; two took 4 and 6 times as long (H100)
"""

_MOST_REPEATS = 200

_OPERATIONS = {"forward": graphs.FORWARD, "input": graphs.BACKWARD_DATA, "weight": graphs.BACKWARD_FILTER}

_X, _W, _Y = 1, 2, 3
"""Ids of the tensors."""

UIDS = {"forward": (_X, _W, _Y), "input": (_Y, _W, _X), "weight": (_X, _Y, _W)}
"""Ids of both operands and the result."""

_WRONG_IF_UNEVEN = {"forward": frozenset[int](), "input": frozenset((50,)), "weight": frozenset((1, 18))}
"""Engines that ignore padding that differs at both ends of an axis, by kind.

measured: those, of all plans for 96 convolutions, and none where padding is even (cuDNN 9.19, H100). As they are old
ones, no engine without tensor cores is trusted with it.
"""

_DTYPES = frozenset(("float32", "float16", "bfloat16"))


def why_not(c: Convolution) -> str | None:
    """Reason why cuDNN does not compute a convolution, as far as its type tells."""
    if c.dtype.name not in _DTYPES:
        return f"it has no engines for {c.dtype}"
    if c.out != c.dtype:
        return f"it has no engines from {c.dtype} to {c.out}"
    if len(c.strides) > 3:
        return f"it has no engines for {len(c.strides)} spatial axes"
    if not len(c.strides):
        return "there is no spatial axis"
    if is_ieee(c) and c.features_last:
        return "its float32 engines without tensor cores need features second, or copies"
    if is_ieee(c) and any(low != high for low, high in c.padding):
        return "its float32 engines without tensor cores pad both ends alike"
    return graphs.why_missing()


def is_ieee(c: Convolution) -> bool:
    """True for float32 that must not be rounded to fewer bits."""
    return c.dtype == np.float32 and not c.tf32


def graph(c: Convolution, device: Device) -> graphs.Descriptor:
    """cuDNN's description of a convolution.

    Raises:
      UnsupportedError: it cannot do it.
    """
    more = max(0, 2 - len(c.strides))  # one spatial axis is two of which one has size 1
    tensors = {}
    for name, uid, shape in (("x", _X, c.x), ("w", _W, c.w), ("y", _Y, c.y)):
        sizes = (shape[0], shape[-1], *(1,) * more, *shape[1:-1])  # the library names features second
        order = (0, *range(2, len(sizes)), 1) if c.features_last else tuple(range(len(sizes)))
        in_order = strides_of([sizes[d] for d in order])
        strides = [in_order[order.index(d)] for d in range(len(sizes))]
        tensors[name] = graphs.tensor(uid, c.dtype.name, sizes, strides)
    slide = graphs.convolution(
        "float32", (1,) * more + c.strides, ((0, 0),) * more + c.padding, (1,) * more + c.dilation
    )
    return graphs.graph(device, _OPERATIONS[c.kind], slide, **tensors)


def qualifies(c: Convolution, candidate: Candidate) -> bool:
    """True for deterministic engines of the arithmetic that was asked for."""
    barred = {"nondeterministic"}
    if any(low != high for low, high in c.padding):
        trusted = candidate.engine.number not in _WRONG_IF_UNEVEN[c.kind]
        if not trusted or NUMERICAL_NOTES["tensor core"] not in candidate.notes:
            return False
    if is_ieee(c):
        barred |= {"tensor core", "down-converted inputs", "reduced precision"}
    return not candidate.notes & {NUMERICAL_NOTES[n] for n in barred}


def candidates(c: Convolution, device: Device) -> tuple[graphs.Descriptor, list[Engine]]:
    """The graph of a convolution, and engines that qualify, the likely fastest first.

    Raises:
      UnsupportedError: there are none.
    """
    of = graph(c, device)
    found = [p.engine for p in graphs.proposed(device, of, _CANDIDATES) if qualifies(c, p)]
    if not found:
        raise errors.UnsupportedError(
            f"cuDNN has no engine for {c}.",
            why="none that is deterministic and computes in the precision that was asked for was proposed",
            fix="it runs as an implicit GEMM",
        )
    return of, found


# -- running ---------------------------------------------------------------------------------------

_lock = threading.RLock()
_handles: dict[int, int] = {}
_streams: dict[int, int] = {}
_chosen: dict[tuple[int, Convolution], Engine] = {}


def handle_of(device: int) -> int:
    """The library's context on a device."""
    with _lock:
        if device not in _handles:
            driver.use_device(device)
            _handles[device] = graphs.new_handle()
        return _handles[device]


class Plan:
    """A convolution with its engine, ready to run. Not for two threads at once.

    Args:
      c: the convolution.
      device: index of the CUDA device.
      addresses: of both operands and the result, to time engines with; the result is overwritten. Nothing runs if the
        choice is known in this process or on disk.
    Raises:
      UnsupportedError: the library has no engine for it.
    """

    def __init__(self, c: Convolution, device: int, addresses: tuple[int, int, int]):
        self.convolution, self.device = c, device
        self._handle = handle_of(device)
        self._set_stream = graphs.library().cudnnSetStream
        self._workspace = 0
        self._call: graphs.Call | None = None
        self._choose(addresses)

    def run(self, addresses: tuple[int, int, int], stream: int) -> None:
        """Put it on a stream, given addresses of both operands and of the result."""
        assert self._call is not None
        scratch = cublaslt.workspace(self.device, stream) if self._workspace else 0
        with _lock:
            if _streams.get(self._handle) != stream:
                graphs.check(self._set_stream(self._handle, stream), "use a stream")
                _streams[self._handle] = stream
            self._call(self._handle, addresses, scratch)

    # -- which engine ----------------------------------------------------------------------------------

    def _choose(self, addresses: tuple[int, int, int]) -> None:
        c, key = self.convolution, (self.device, self.convolution)
        device = Device(self._handle)
        name = driver.properties(self.device).name
        wrong = sorted(
            _WRONG_IF_UNEVEN[c.kind]
        )  # an engine that is distrusted later must not be found on disk
        cache, place = DiskCache(), key_of("cudnn", str(c), name, str(graphs.version()), str(wrong))
        kept = _chosen.get(key) or _read(cache.get(place))
        of = None
        if kept is not None:
            of = graph(c, device)
        if of is None or not self._accept(device, of, kept):  # type: ignore[arg-type]
            of, found = candidates(c, device)
            kept, report = self._tune(device, of, found, addresses)
            cache.put(place, json.dumps(kept).encode(), f"{c}\n{name}\n{report}", ".conv")
            self._accept(device, of, kept)
        _chosen[key] = kept  # type: ignore[assignment]

    def _accept(self, device: Device, of: graphs.Descriptor, engine: Engine) -> bool:
        """Plan with an engine, if it runs within the workspace."""
        try:
            made, nbytes = graphs.plan(device, of, engine)
        except errors.UnsupportedError:
            return False
        if nbytes > cublaslt.WORKSPACE_BYTES:
            return False
        self._call, self._workspace = graphs.Call(made, UIDS[self.convolution.kind]), nbytes
        return True

    def _tune(
        self, device: Device, of: graphs.Descriptor, found: Sequence[Engine], addresses: tuple[int, int, int]
    ) -> tuple[Engine, str]:
        """The fastest engine, and a table of times."""
        stream = driver.compute_stream(self.device)
        made: dict[Engine, tuple[graphs.Call, int]] = {}
        for engine in found:
            if len(made) < _TIMED and self._accept(device, of, engine):
                assert self._call is not None
                made[engine] = self._call, self._workspace
        if len(made) == 1:
            return next(iter(made)), "the only one proposed"
        begun: set[Engine] = set()

        def run() -> None:
            self.run(addresses, stream.ptr)

        def look(engine: Engine, budget: float) -> tuple[float, float] | None:
            self._call, self._workspace = made[engine]
            try:
                if engine not in begun:
                    run()  # exclude the loading of the kernel
                    begun.add(engine)
                return _timed(run, stream, budget)
            except errors.UnsupportedError:
                return None

        times = fastest(list(made), look)
        if not times:
            raise errors.UnsupportedError(
                f"cuDNN runs none of the engines that it proposes for {self.convolution}.",
                fix="it runs as an implicit GEMM",
            )
        lines = [f"{ms:10.4f} ms  engine {e.number}, {dict(e.knobs)}" for e, ms in times.items()]
        return next(iter(times)), "\n".join(lines)


def _timed(run: Callable[[], object], stream: Any, budget: float) -> tuple[float, float]:
    """Milliseconds of a run, and those spent to time it, about ``budget``."""
    ms = driver.elapsed_ms(run, stream)
    repeats = min(int(budget / ms), _MOST_REPEATS)
    return (driver.elapsed_ms(run, stream, repeats) if repeats > 1 else ms), ms * (repeats + 2)


def _read(kept: bytes | None) -> Engine | None:
    """An engine as ``Plan`` stored it."""
    if kept is None:
        return None
    try:
        index, knobs = json.loads(kept)
        return Engine(int(index), tuple((int(t), int(v)) for t, v in knobs))
    except (ValueError, TypeError):
        return None
