"""Attention of few queries to a cache: its source, and its launch.

Kernels, stages 5 to 8, above ``include/attention_decode.cuh`` and ``mods``. In: sizes, strides and mods of an
attention. Out: whether the kernel applies, CUDA C++, and a launch with the interface of ``launch.Forward``. One kernel
reads keys and values once for all queries that share a key head, and skips tiles that a mask hides.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import mods as attention_mods
from blufunc.kernels.backends.cuda.library.attention.kernels import NO_CODE, Shape, Strides
from blufunc.kernels.backends.cuda.library.attention.mods import Code
from blufunc.kernels.backends.cuda.library.decoding.skinny_gemm import overlap
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

ENTRY = "attention_decode"

_FILE = "backends/cuda/include/attention_decode.cuh"

WARPS = 8

_MOST_ROWS = 16
"""Queries of a key head: those of one matmul."""

_FEATURES = (64, 128)

_MOST_SPLITS = 8
"""Maximum blocks of a cluster."""

_FEWEST_KEYS = 512
"""Keys of a block that make up for merging it with others."""

_PROBLEM = struct.Struct("=3if")
_STRIDES = struct.Struct("=3q")


def decodes(shape: Shape, causal: bool, parts: int = 0) -> bool:
    """True if the kernel computes an attention."""
    rows = shape.queries * (shape.heads // shape.key_heads)
    return not causal and not parts and rows <= _MOST_ROWS and shape.features in _FEATURES


def splits_of(shape: Shape, arch: str) -> int:
    """Blocks that share the keys of a key head, enough to fill a device."""
    splits, planes = 1, shape.batch * shape.key_heads
    most = _MOST_SPLITS if int(arch.removeprefix("sm_").rstrip("af")) >= 90 else 1
    while splits < most and splits * planes <= SM_COUNT // 2 and shape.keys > splits * _FEWEST_KEYS:
        splits *= 2
    return splits


def instructions(dtype: np.dtype) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    return mma.instructions(dtype.name) + overlap() + source_files.source(_FILE, "instructions")


def source(shape: Shape, dtype: np.dtype, code: Code = NO_CODE, splits: int = 1) -> str:
    """CUDA C++ without prelude; lengths, heads and strides are arguments."""
    group = shape.heads // shape.key_heads
    rows = shape.queries * group
    sizes = source_files.declared(
        FEATURES=shape.features, ROWS=rows, GROUP=group, WARPS=WARPS, SPLITS=splits,
        BLOCKS=2 if rows <= 8 and not code.scored else 1,
        BLIND_IS_NAN=code.mods is not None and code.mods.blind_is_nan,
        CLUSTER_DIMS=f"__cluster_dims__({splits}, 1, 1)" if splits > 1 else "",
    )  # fmt: skip
    pairs = source_files.source(attention_mods.FILE, "none") if code is NO_CODE else code.source
    return sizes + instructions(dtype) + pairs + source_files.source(_FILE, "decode")


@functools.lru_cache(256)
def text_of(shape: Shape, dtype: np.dtype, code: Code, splits: int) -> str:
    """The complete CUDA C++; of a shape, the batch and the keys do not matter."""
    return DEVICE.with_prelude(source(shape, dtype, code, splits))


def texts(shape: Shape, dtype: np.dtype, arch: str, code: Code) -> list[tuple[str, str]]:
    """Source and name of the kernel that ``Decode`` launches."""
    return [(_text(shape, dtype, code, splits_of(shape, arch)), ENTRY)]


def _text(shape: Shape, dtype: np.dtype, code: Code, splits: int) -> str:
    return text_of(shape._replace(batch=1, keys=1), dtype, code, splits)


def problem(shape: Shape, scale: float, strides: Sequence[Strides]) -> bytes:
    """The structure ``Problem``; strides are those of q, k, v and out."""
    head = _PROBLEM.pack(shape.queries, shape.keys, shape.heads, scale)
    return head + b"".join(_STRIDES.pack(*of) for of in strides)


def shared_bytes(shape: Shape) -> int:
    """Shared memory of a block: the rows of each warp."""
    rows = -(-shape.queries * shape.heads // shape.key_heads // 8) * 8
    return 4 * WARPS * rows * (shape.features + 4)


class Decode:
    """``launch.Forward`` of few queries.

    Args:
      splits: blocks that share the keys of a key head; 0: as many as fill the device. Others are as there.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: np.dtype,
        strides: Sequence[Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code = NO_CODE,
        parts: int = 0,
        splits: int = 0,
    ):
        assert decodes(shape, causal, parts)
        splits = splits or splits_of(shape, driver.properties(device).arch)
        function = modules.module(_text(shape, dtype, code, splits), device, ENTRY).kernel(ENTRY)
        self._plain = code is NO_CODE
        extras = 0 if self._plain else len(code.operands)
        arguments = [*[0] * (5 + extras), problem(shape, scale, strides)]
        grid = shape.batch * shape.key_heads * splits
        self._launch = function.prepare((grid,), (32 * WARPS,), shared_bytes(shape), arguments)

    def __call__(
        self,
        pointers: Sequence[int],
        scratch: int,
        stream: Any,
        extras: Sequence[int] = (),
        overlaps: bool = False,
    ) -> None:
        """Put it on a stream, as ``launch.Forward``.

        Args:
          overlaps: whether it may begin ahead of the end of the preceding kernel.
        """
        rest = [] if self._plain else [*extras[:2], 0, *extras[2:]]
        self._launch.run([*pointers, *rest], stream, overlaps=overlaps)
