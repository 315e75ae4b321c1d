"""Attention of IEEE float32: its sources, and its launches.

Kernels, stages 5 to 8, above ``include/attention_f32.cuh``, ``kernels`` and ``mods``. In: sizes, strides and mods of an
attention whose matmuls request IEEE arithmetic. Out: whether kernels apply, CUDA C++, and launches with the interfaces
of ``launch.Forward`` and ``launch.Backward``. Scores stay in registers and shared memory. The backward pass has five
matmuls: a block owns a tile of keys, and blocks add to the gradients of queries in the order of their keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import kernels as tensor_core_kernels
from blufunc.kernels.backends.cuda.library.attention import mods as attention_mods
from blufunc.kernels.backends.cuda.library.attention.kernels import (
    FORWARD_KERNEL,
    KEY_KERNEL,
    NAMES,
    NO_CODE,
    Shape,
    Strides,
    padded,
)
from blufunc.kernels.backends.cuda.library.attention.mods import Code
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

_FILE = "backends/cuda/include/attention_f32.cuh"

_WIDTHS = (32, 64, 128)
"""Features that kernels are compiled for; others are padded to the next."""

_FEWEST_QUERIES = 48
"""Below this, padding a tile of rows costs more than scores in memory.

By the roofline of 64 features: a padded pair costs 256 FLOPs at 45 TFLOP/s, a stored one 24 bytes at 3.3 TB/s more.
"""

_SHARED_KB = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "sm_121": 99}
"""Shared memory of a block; 227 on Hopper and data-center Blackwell."""


class Tiling(NamedTuple):
    """Work partition of a kernel.

    Attributes:
      width: padded features.
      rows: rows of a block.
      threads: those of a block.
      lanes: lanes of a warp that differ in their rows: 4 or 2.
      blocks: blocks per SM that the register budget allows.
    """

    width: int
    rows: int
    threads: int
    lanes: int
    blocks: int


COLUMNS = 64
"""Rows of the other side that a block iterates over at a time."""


class Kernel(NamedTuple):
    """Descriptor of one kernel.

    Attributes:
      entry: its name.
      parts: its source, by parts of the file.
      operands: the parameters that are arrays.
      tilings: one per width.
      of_keys: whether a block owns rows of keys.
      small: tilings of programs that would leave SMs idle.
      has_pairs: whether it evaluates masks and score functions.
    """

    entry: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    tilings: tuple[Tiling, ...]
    of_keys: bool
    small: tuple[Tiling, ...] = ()
    has_pairs: bool = True

    def tiling(self, shape: Shape) -> Tiling:
        """The tiling for some sizes."""
        which = sum(shape.features > w for w in _WIDTHS)
        found = self.tilings[which]
        if self.small and self._blocks(shape, found) < found.blocks * SM_COUNT:
            return self.small[which]
        return found

    def _blocks(self, shape: Shape, tiling: Tiling) -> int:
        tokens, heads = (shape.keys, shape.key_heads) if self.of_keys else (shape.queries, shape.heads)
        return shape.batch * heads * -(-tokens // tiling.rows)

    def grid(self, shape: Shape) -> int:
        """Blocks of the kernel."""
        tiling = self.tiling(shape)
        if self is DELTA_KERNEL:
            rows = shape.batch * shape.heads * padded(shape)
            return -(-rows * tiling.width // 4 // tiling.threads)
        return self._blocks(shape, tiling)

    def tiles(self, shape: Shape) -> tuple[int, int]:
        """Tiles of rows, and those that a block iterates over at most."""
        sides = (shape.keys, shape.queries) if self.of_keys else (shape.queries, shape.keys)
        return -(-sides[0] // self.tiling(shape).rows), -(-sides[1] // COLUMNS)

    def list_bytes(self, shape: Shape, code: Code) -> int:
        """Bytes of the tile lists of a mask, aligned."""
        ints = attention_mods.list_ints(code, shape.batch, shape.heads, *self.tiles(shape))
        return -(-4 * ints // 16) * 16

    def shared_bytes(self, shape: Shape, code: Code) -> int:
        """Dynamic shared memory of a block."""
        t, pitch, weights = self.tiling(shape), self.tiling(shape).width + 4, COLUMNS + 4
        if self is FORWARD:
            return 4 * ((t.rows + COLUMNS) * pitch + (t.rows + t.width) * weights)
        if self is BACKWARD:
            ranks = self.tiles(shape)[1] if code.masked else 0
            return 4 * (
                (t.rows + 2 * COLUMNS) * pitch + (COLUMNS + 2 * t.width) * weights + 2 * COLUMNS + ranks
            )
        return 0


FORWARD = Kernel(
    "attention_forward_f32",
    ("products", "forward"),
    ("q", "k", "v", "out", "lse"),
    (Tiling(32, 128, 128, 4, 2), Tiling(64, 128, 128, 4, 2), Tiling(128, 128, 256, 2, 1)),
    of_keys=False,
    small=(Tiling(32, 64, 128, 4, 3), Tiling(64, 64, 128, 4, 2), Tiling(128, 64, 256, 2, 1)),
)
_OF_KEYS = (Tiling(32, 64, 128, 4, 2), Tiling(64, 64, 128, 4, 2), Tiling(128, 64, 256, 4, 1))
DELTA_KERNEL = Kernel(
    "attention_delta_f32",
    ("products", "delta"),
    ("out", "dout", "lse", "numbers", "turns", "dq"),
    _OF_KEYS,
    of_keys=True,
    has_pairs=False,
)
BACKWARD = Kernel(
    "attention_gradients_f32",
    ("products", "backward"),
    ("q", "k", "v", "dout", "numbers", "turns", "dq", "dk", "dv"),
    _OF_KEYS,
    of_keys=True,
)


def refused(shape: Shape, strides: Sequence[Strides], arch: str, code: Code = NO_CODE) -> str | None:
    """The reason why there is no kernel; None if there is one."""
    most = _WIDTHS[-1]
    if shape.features % 8 or not 8 <= shape.features <= most:
        return f"features={shape.features} is not a multiple of 8 up to {most}, and elements are float32"
    if shape.queries < _FEWEST_QUERIES:
        return f"{shape.queries} queries of float32: below {_FEWEST_QUERIES}, scores in memory take less time"
    reason = tensor_core_kernels.refused(
        shape._replace(features=most), dtypes.bfloat16, strides, arch
    )  # what does not depend on elements
    if reason is not None:
        return reason
    limit = _SHARED_KB.get(arch.rstrip("af"), 227)
    needed = max(kernel.shared_bytes(shape, code) for kernel in (FORWARD, BACKWARD))
    if needed > limit << 10:
        return f"blocks of {arch} have {limit} KB of shared memory, and {needed >> 10} KB are needed"
    return None


def source(kernel: Kernel, tiling: Tiling, features: int, causal: bool, code: Code = NO_CODE) -> str:
    """CUDA C++ of a kernel without prelude; lengths, heads and strides are arguments."""
    head = source_files.declared(
        FEATURES=features, WIDTH=tiling.width, THREADS=tiling.threads, LANES_OF_ROWS=tiling.lanes,
        ROWS=tiling.rows, COLUMNS=COLUMNS, BLOCKS=tiling.blocks, CAUSAL=causal, OF_KEYS=kernel.of_keys, WIDE=False,
    )  # fmt: skip
    pairs = source_files.source(attention_mods.FILE, "none") if code is NO_CODE else code.source
    common = source_files.parts(FORWARD_KERNEL.body[0][0])["common"]
    return head + instructions() + pairs + common + source_files.source(_FILE, *kernel.parts)


def instructions() -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    return mma.instructions("float16") + source_files.source(_FILE, "pairs")


def lists_source(kernel: Kernel, tiling: Tiling, features: int, causal: bool, code: Code = NO_CODE) -> str:
    """The same of the kernel that lists the tiles which a mask leaves to another."""
    alone = source(kernel._replace(parts=("products",)), tiling, features, causal, code)
    return alone + source_files.parts(attention_mods.FILE)["tiles"]


@functools.lru_cache(256)
def text_of(kernel: Kernel, tiling: Tiling, features: int, causal: bool, code: Code) -> str:
    """The complete CUDA C++ of one kernel."""
    return DEVICE.with_prelude(source(kernel, tiling, features, causal, code))


@functools.lru_cache(256)
def _lists_text(kernel: Kernel, tiling: Tiling, features: int, causal: bool, code: Code) -> str:
    return DEVICE.with_prelude(lists_source(kernel, tiling, features, causal, code))


def _texts(kernel: Kernel, shape: Shape, causal: bool, code: Code) -> list[tuple[str, str]]:
    """Sources and names of a kernel, and before it that of its lists, if it has any."""
    how = kernel.tiling(shape), shape.features, causal, code
    lists = [(_lists_text(kernel, *how), "attention_tiles")] if kernel.has_pairs and code.masked else []
    return [*lists, (text_of(kernel, *how), kernel.entry)]


def texts(forward: bool, shape: Shape, causal: bool, code: Code) -> list[tuple[str, str]]:
    """Sources and names of the kernels that ``Forward`` or ``Backward`` launches."""
    kernels = (FORWARD,) if forward else (DELTA_KERNEL, BACKWARD)
    return [text for kernel in kernels for text in _texts(kernel, shape, causal, code)]


def scratch_bytes(forward: bool, shape: Shape, code: Code) -> tuple[int, ...]:
    """Device memory of a call in bytes: tile lists; backward also numbers and turns."""
    if forward:
        return (FORWARD.list_bytes(shape, code),)
    queries = shape.batch * shape.heads * padded(shape)
    return BACKWARD.list_bytes(shape, code), 8 * queries, -(-4 * queries // COLUMNS // 16) * 16


def problem(kernel: Kernel, shape: Shape, scale: float, strides: Mapping[str, Strides]) -> bytes:
    """The structure ``Problem``: a float32 operand has the bytes of two in 16 bits."""
    like = KEY_KERNEL if kernel.of_keys else FORWARD_KERNEL
    return tensor_core_kernels.problem(like, shape, scale, strides, parts=2)


class _Launch:
    """One kernel of a call, preceded by the one that lists its tiles if it has a mask."""

    def __init__(
        self,
        kernel: Kernel,
        shape: Shape,
        strides: Mapping[str, Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code,
    ):
        reason = refused(shape, list(strides.values()), driver.properties(device).arch, code)
        if reason is not None:
            raise errors.UnsupportedError("there is no kernel for this attention.", why=reason)
        tiling = kernel.tiling(shape)
        found = [
            modules.module(text, device, entry).kernel(entry)
            for text, entry in _texts(kernel, shape, causal, code)
        ]
        numbers, plain = problem(kernel, shape, scale, strides), code is NO_CODE or not kernel.has_pairs
        extras = [0] * (0 if plain else len(code.operands))
        self._plain, self._lists = plain, None
        if len(found) > 1:
            grid = attention_mods.lists(code, shape.batch, shape.heads, kernel.tiles(shape)[0])
            self._lists = found[0].prepare((grid,), (tiling.threads,), 0, [*extras, numbers])
        arguments = [*[0] * len(kernel.operands), *extras, numbers]
        shared = kernel.shared_bytes(shape, code)
        self._launch = found[-1].prepare((kernel.grid(shape),), (tiling.threads,), shared, arguments)

    def __call__(self, pointers: Sequence[int], extras: Sequence[int], lists: int, stream: Any) -> None:
        """Put it on a stream, as ``launch`` does."""
        rest = [] if self._plain else [*extras[:2], lists, *extras[2:]]
        if self._lists is not None:
            self._lists.run(rest, stream)
        self._launch.run([*pointers, *rest], stream)


class Forward:
    """``launch.Forward`` of IEEE float32; arguments are as there, without a dtype."""

    def __init__(
        self,
        shape: Shape,
        strides: Sequence[Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code = NO_CODE,
    ):
        named = dict(zip(NAMES[:4], strides, strict=True))
        self._kernel = _Launch(FORWARD, shape, named, scale, causal, device, code)

    def __call__(
        self, pointers: Sequence[int], scratch: int, stream: Any, extras: Sequence[int] = ()
    ) -> None:
        """Put it on a stream, as ``launch.Forward``."""
        self._kernel(pointers, extras, scratch, stream)


class Backward:
    """``launch.Backward`` of IEEE float32, bitwise deterministic."""

    def __init__(
        self,
        shape: Shape,
        strides: Sequence[Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code = NO_CODE,
    ):
        named = dict(zip(NAMES, strides, strict=True))
        self._delta, self._gradients = (
            _Launch(kernel, shape, named, scale, causal, device, code) for kernel in (DELTA_KERNEL, BACKWARD)
        )
        self._bytes = scratch_bytes(False, shape, code)

    def __call__(
        self, pointers: Sequence[int], scratch: int, stream: Any, extras: Sequence[int] = ()
    ) -> None:
        """Put it on a stream, as ``launch.Backward``."""
        q, k, v, out, lse, dout, dq, dk, dv = pointers
        numbers = scratch + self._bytes[0]
        turns = numbers + self._bytes[1]
        self._delta((out, dout, lse, numbers, turns, dq), (), 0, stream)
        self._gradients((q, k, v, dout, numbers, turns, dq, dk, dv), extras, scratch, stream)
