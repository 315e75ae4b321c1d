"""Kernels that set conditions of a graph's nodes, and copy what a round carries.

Kernels, stage 8. In: addresses. Out: launches on the device's work stream. Small arrays are copied by one block, which
reads all before it writes any, together with the condition: another node would cost more than the copies.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir.avals import ShapedArray
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.library.library_kernel import Body
from blufunc.kernels.codegen import source_files
from blufunc.kernels.user_kernel import CudaSource

_FILE = "backends/cuda/include/control_flow.cuh"

MOST = 40
"""Arrays of one launch, at most."""

STAGED = 1 << 14
"""Bytes that one block copies, at most."""

_SMALL = STAGED // 4
"""Bytes of an array that a block copies, at most."""

_THREADS, _BLOCKS = 256, 264

Pair = tuple[DeviceBuffer, DeviceBuffer]
"""Destination and source of a copy."""


class Stack(NamedTuple):
    """A stacked array, and the memory of some of its rows outside of it.

    Attributes:
      array: the stacked array.
      outside: memory of the rows, from the first on.
      stride: bytes from one row outside to the next.
    """

    array: DeviceBuffer
    outside: DeviceBuffer
    stride: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.array.nbytes // self.array.shape[0]

    def row(self, i: int) -> DeviceBuffer:
        """Row ``i`` of those outside."""
        return self.outside.view(self.array.shape[1:], self.array.dtype, i * self.stride)


def copied(x: DeviceBuffer, body: Body, label: str = "what a loop carries") -> DeviceBuffer:
    """A copy in its own memory."""
    out = body.own(ShapedArray(x.shape, x.dtype), label)
    driver.copy_on_device(out.ptr, x.ptr, x.nbytes, driver.work_stream(x.device))
    return out


def copy_all(pairs: Sequence[Pair], body: Body, device: int) -> None:
    """Copy all pairs as if at once: a source may be the target of another."""
    for chunk in _chunks(pairs, body, device):
        _launch("copy_all", 1, device, _copies(chunk))


def next_round(
    handle: int,
    predicate: DeviceBuffer | None,
    rounds: DeviceBuffer,
    max_steps: int | None,
    device: int,
    pairs: Sequence[Pair],
    body: Body,
    first: bool = False,
) -> None:
    """Copy all pairs as if at once, and decide on another round.

    Args:
      handle: of the condition of the loop's node.
      predicate: whether the condition holds; None: there is none.
      rounds: an int64, the rounds so far.
      max_steps: maximum number of rounds; None: no limit.
      body: the program that allocates memory for copies.
      first: whether none has been run yet.
    """
    chunk, *others = _chunks(pairs, body, device) or [[]]
    at = 0 if predicate is None else predicate.ptr
    limit = np.int64(np.iinfo(np.int64).max if max_steps is None else max_steps)
    values = [at, rounds.ptr, np.uint64(handle), limit, np.int32(first)]
    _launch("next_round", 1, device, *values, _copies(chunk))
    for chunk in others:
        _launch("copy_all", 1, device, _copies(chunk))


def choose(index: DeviceBuffer, handles: Sequence[int], device: int) -> None:
    """Set the conditions of branches: that of ``index`` holds."""
    _launch("choose", 1, device, index.ptr, _structs(np.uint64(h).tobytes() for h in handles))


def move_rows(
    stacks: Sequence[Stack], rounds: DeviceBuffer, start: int, step: int, count: int, load: bool, device: int
) -> None:
    """Load rows of stacked arrays to memory outside, or store them there.

    Args:
      rounds: the number of rounds so far.
      start, step: the first row in the first round, and how much further it is in each round.
      count: the number of rows, from the first on.
    """
    for first in range(0, len(stacks), MOST):
        some = stacks[first : first + MOST]
        images = (struct.pack("<4q", s.array.ptr, s.outside.ptr, s.row_bytes, s.stride) for s in some)
        largest = max(s.row_bytes for s in some) * count
        blocks = max(1, min(_BLOCKS, largest // (16 * _THREADS)))
        numbers = [np.int64(start), np.int64(step), np.int32(count), np.int32(load)]
        _launch("move_rows", (blocks, len(some)), device, rounds.ptr, *numbers, _structs(images, 32))


@functools.cache
def source() -> str:
    """CUDA C++ of all kernels."""
    return source_files.source(_FILE, MOST=MOST, STAGED=STAGED, THREADS=_THREADS)


def prepare(device: int) -> None:
    """Compile and load all kernels: a capture must not."""
    for entry in ("copy_all", "next_round", "choose", "move_rows"):
        _loaded(entry, 1, 1, device)


# -- launches ----------------------------------------------------------------------------------------


def _chunks(pairs: Iterable[Pair], body: Body, device: int) -> list[list[Pair]]:
    """Parts that one block can stage, in any order; larger arrays are copied at once."""
    pairs = [(to, x) for to, x in pairs if to.ptr != x.ptr and x.nbytes]
    chunks, large = _divided(pairs)
    if len(chunks) + len(large) > 1:  # they follow one another: none may read what another has written
        written = {to.memory for to, _ in pairs}
        chunks, large = _divided([(to, copied(x, body) if x.memory in written else x) for to, x in pairs])
    for to, x in large:
        driver.copy_on_device(to.ptr, x.ptr, x.nbytes, driver.work_stream(device))
    return chunks


def _divided(pairs: Sequence[Pair]) -> tuple[list[list[Pair]], list[Pair]]:
    """Parts that one block can stage, and the pairs of large arrays."""
    chunks: list[list[Pair]] = []
    held = STAGED
    for to, x in pairs:
        if x.nbytes > _SMALL:
            continue
        size = -(-x.nbytes // 16) * 16
        if held + size > STAGED or len(chunks[-1]) == MOST:
            chunks.append([])
            held = 0
        chunks[-1].append((to, x))
        held += size
    return chunks, [(to, x) for to, x in pairs if x.nbytes > _SMALL]


def _copies(pairs: Sequence[Pair]) -> bytes:
    return _structs((struct.pack("<3q", to.ptr, x.ptr, x.nbytes) for to, x in pairs), 24)


def _structs(images: Iterable[bytes], size: int = 8) -> bytes:
    """A parameter: the number of structures, and these."""
    found = list(images)
    return len(found).to_bytes(8, "little") + b"".join(found).ljust(MOST * size, b"\0")


def _launch(entry: str, grid: int | tuple[int, int], device: int, *values: Any) -> None:
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    launch, _ = _loaded(entry, x, y, device).prepare(values)
    launch(driver.work_stream(device).ptr)


def _loaded(entry: str, x: int, y: int, device: int) -> modules.Loaded:
    return modules.load_source(CudaSource(source(), entry, (x, y, 1), (_THREADS, 1, 1)), device)
