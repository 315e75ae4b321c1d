"""Attention kernels for tensor cores: tilings, sources, grids and scratch memory.

Kernels, stages 5 and 6, above the sources ``include/attention_*.cuh`` and ``mods``, which generates the source of
users' score and mask functions. In: sizes, strides and an architecture. Out: kernels, their sources, grids,
parameters and scratch memory; ``launch`` puts them on streams. Nothing here queries a device.

Elements are bfloat16 or float16; or, with ``parts``, float32 split into that many float16 arrays
(``rewrites/split_float32_attention.py``) of equal layout. Results are then float32.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver.tensor_map import Box
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import mods as cuda_attention_mods
from blufunc.kernels.backends.cuda.library.attention.mods import Code
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

_FORWARD, _BACKWARD, _SM90, _FUSED = (
    f"backends/cuda/include/attention_{name}.cuh" for name in ("fwd", "bwd", "sm90", "bwd_fused_sm90")
)
Parts = tuple[tuple[str, str], ...]
"""Source files and their parts."""

ROWS_OF_SUM = 16
"""Tokens per partial sum of gradients: one warp's rows, so no two warps share one."""

MOST_QUERIES = 1024
"""Shared memory holds two values of each query, twice, and L2 holds 64 sums."""

FEWEST_TOKENS = 512
"""Minimum queries and keys of a plane: at 256, two kernels take the same time."""

KEPT = 5
"""Tiles of queries whose sums stay in shared memory: as many as fit."""

STAGES_OF_KEYS = 2
"""Stages of key, value and weight-gradient tiles that fit into shared memory."""

_MOST_FEATURES, _MOST_OF_TWO_PARTS = 256, 128
_SECTION_BYTES = 16 << 20
"""Bytes that the planes of a section read together: a part of L2."""

NAMES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
"""Operands that have strides, in the order of the structure ``Problem``."""

_GRADIENTS = ("dq", "dk", "dv")

IN_PARTS = ("q", "k", "v", "dout")
"""Operands that may be in parts.
Kernels then take the addresses of their second parts, 0 if there are none, and of their units: float32 arrays (batch,
key_heads) of factors that restore the scale.
"""

_STRIDES = struct.Struct("=3q")
_NUMBERS = struct.Struct("=7if")


NO_CODE = Code("")
"""Code of attention without user functions."""


class Shape(NamedTuple):
    """Sizes: q (batch, queries, heads, features), k and v (..., key_heads, features)."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    features: int


class Strides(NamedTuple):
    """Strides of an operand in elements; features are contiguous."""

    batch: int
    token: int
    head: int


class Tiling(NamedTuple):
    """Work partition of a kernel.

    Attributes:
      slabs: 16-row slabs per warp.
      threads: consumer threads of a block.
      columns: rows of the other side per shared-memory stage.
      inner: rows of a stage that are processed at a time.
      blocks: blocks per SM that the register budget allows.
      groups: whether warpgroups compute matmuls with Hopper's instructions.
      stages: stages of each operand in shared memory, which a producer fills; 0: two, which all threads fill.
      extra: threads of a block that have no rows, if there are stages: four warps, of which one thread is the
        producer and others have work of their own.
      turned: whether there are matmuls in which both operands are stored with the contracted axis as rows.
    """

    slabs: int
    threads: int
    columns: int
    inner: int
    blocks: int
    groups: bool = False
    stages: int = 0
    extra: int = 128
    turned: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.slabs * self.threads // 2

    @property
    def launched(self) -> int:
        """Threads of a block, including those without rows."""
        return self.threads + (self.extra if self.stages else 0)


class Kernel(NamedTuple):
    """Descriptor of one kernel.

    Attributes:
      entry: its name.
      body: its source, which follows the common part.
      operands: the parameters that are arrays.
      of_keys: whether a block owns rows of keys and iterates over the queries.
      tiles: shared-memory tiles with as many rows as a block has, or as it processes at a time.
      warps: tilings for warp matmuls: up to 64 features, up to 128, and more.
      groups: the same for warpgroup matmuls.
      two_warps, two_groups: the same for operands in two parts, up to 64 features, and more.
      makes: which gradients of keys (k) and values (v) a kernel for these computes.
      sums: the parameters that receive sums of gradients over tokens, on request.
      begin: parts that precede the bodies of this kernel and its pipelined form.
      pipelined: its body for Hopper (``attention_sm90.cuh``).
      pipelines: tilings there, up to 64 features and up to 128, in one part, with unmodified scores.
      masked: the same with a mask, if that exceeds the register budget.
      one_part: the same for float32 in one part, if another tiling is faster.
      beyond: the number of features up to which the other forms are faster.
      by_planes: whether a block owns all rows of a plane and iterates over planes.
    """

    entry: str
    body: Parts
    operands: tuple[str, ...]
    of_keys: bool
    tiles: int
    warps: tuple[Tiling, ...]
    groups: tuple[Tiling, ...]
    two_warps: tuple[Tiling, ...]
    two_groups: tuple[Tiling, ...]
    makes: str = "kv"
    sums: tuple[str, ...] = ()
    begin: Parts = ()
    pipelined: Parts = ()
    pipelines: tuple[Tiling, ...] = ()
    masked: tuple[Tiling, ...] = ()
    one_part: tuple[Tiling, ...] = ()
    beyond: int = 0
    by_planes: bool = False

    def tiling(self, features: int, arch: str, code: Code = NO_CODE, parts: int = 0) -> Tiling:
        """The tiling for an architecture; score functions need registers, too."""
        size = (features > 64) + (features > 128)
        fits = parts < 2 and not code.scored and size < len(self.pipelines)
        if arch == "sm_90a" and fits and features > self.beyond:
            own = (self.one_part if parts else ()) or (self.masked if code.masked else ())
            return (own or self.pipelines)[size]
        groups, warps = (self.two_groups, self.two_warps) if parts == 2 else (self.groups, self.warps)
        tiling = (groups if arch == "sm_90a" else warps)[size]
        if code is NO_CODE:
            return tiling
        # of sums, which stay in registers
        full = tiling.groups and self.of_keys and (features > 64 or parts == 2)
        return tiling._replace(blocks=max(1, tiling.blocks - 1), inner=32 if full else tiling.inner)

    @property
    def lists(self) -> Kernel:
        """The kernel that builds the tile lists for this one, with the same tiling."""
        return self._replace(
            entry="attention_tiles",
            body=cuda_attention_mods.TILES,
            operands=(),
            sums=(),
            begin=(),
            pipelined=(),
        )

    @property
    def summed(self) -> Kernel:
        """The variant that also computes sums of its gradients over tokens."""
        return self._replace(sums=tuple(f"{name}_sums" for name in self.operands if name in _GRADIENTS))

    def planes(self, shape: Shape) -> int:
        """Batch size times the number of heads of its rows."""
        return shape.batch * (shape.key_heads if self.of_keys else shape.heads)

    def blocks(self, shape: Shape, tiling: Tiling, sms: int = SM_COUNT) -> int:
        """Blocks of its grid."""
        planes = self.planes(shape)
        if self.by_planes:
            return min(planes, sms, SM_COUNT)
        return planes * self.tiles_of(shape, tiling)[0]

    def tiles_of(self, shape: Shape, tiling: Tiling) -> tuple[int, int]:
        """The number of row tiles, and of the tiles that a block iterates over."""
        sides = (shape.keys, shape.queries) if self.of_keys else (shape.queries, shape.keys)
        return -(-sides[0] // tiling.rows), -(-sides[1] // tiling.columns)

    def list_bytes(self, shape: Shape, tiling: Tiling, code: Code) -> int:
        """Bytes of the tile lists."""
        return 4 * cuda_attention_mods.list_ints(
            code, shape.batch, shape.heads, *self.tiles_of(shape, tiling)
        )

    def shared_bytes(self, features: int, tiling: Tiling, parts: int = 0) -> int:
        """Shared memory of a block in bytes: its tiles, and all stages of the other side."""
        if tiling.stages:
            rows = self.tiles * tiling.rows + 2 * tiling.stages * tiling.columns
            barriers = 2 * self.tiles + 4 * tiling.stages
            numbers = tiling.stages * tiling.columns if self.of_keys else 0
            kept = 0
            if self.by_planes:
                numbers, kept = 2 * MOST_QUERIES, 4 * features * KEPT * tiling.columns
                barriers += 4
            return 2 * features * rows + kept + 8 * (numbers + barriers)
        # two values per column; the tiles after them are aligned to 1024 bytes
        pairs = -(-8 * tiling.columns // 1024) * 1024 if self.of_keys else 0
        return max(parts, 1) * 2 * features * (self.tiles * tiling.rows + 4 * tiling.columns) + 2 * pairs


FORWARD_KERNEL = Kernel(
    "attention_forward",
    ((_FORWARD, "forward"),),
    ("q", "k", "v", "out", "lse"),
    of_keys=False,
    tiles=1,
    warps=(Tiling(2, 128, 64, 64, 2), Tiling(1, 128, 64, 64, 2), Tiling(1, 128, 32, 32, 1)),
    groups=(
        Tiling(1, 128, 64, 64, 4, groups=True),
        Tiling(1, 128, 64, 64, 2, groups=True),
        Tiling(1, 256, 64, 64, 1, groups=True),
    ),
    two_warps=(Tiling(1, 128, 64, 64, 2), Tiling(1, 128, 32, 32, 1)),
    two_groups=(Tiling(1, 128, 64, 64, 2, groups=True), Tiling(1, 256, 64, 64, 1, groups=True)),
    begin=((_FORWARD, "softmax"),),
    pipelined=((_SM90, "pipeline"), (_SM90, "forward")),
    pipelines=(Tiling(1, 128, 64, 64, 4, True, 2), Tiling(1, 384, 96, 96, 1, True, 2)),
    one_part=(Tiling(1, 128, 64, 64, 4, True, 2), Tiling(1, 384, 112, 112, 1, True, 2)),
)
QUERY_KERNEL = Kernel(
    "attention_query_gradient",
    ((_BACKWARD, "query_gradient"),),
    ("q", "k", "v", "out", "lse", "dout", "dq", "scratch"),
    of_keys=False,
    tiles=2,
    warps=(Tiling(2, 128, 64, 32, 2), Tiling(1, 128, 64, 32, 2), Tiling(1, 64, 16, 16, 2)),
    groups=(
        Tiling(1, 128, 64, 64, 4, groups=True),
        Tiling(1, 128, 64, 64, 2, groups=True),
        Tiling(1, 128, 64, 32, 1, groups=True),
    ),
    two_warps=(Tiling(1, 128, 64, 32, 2), Tiling(1, 128, 16, 16, 1)),
    two_groups=(Tiling(1, 128, 64, 64, 2, groups=True), Tiling(1, 256, 32, 32, 1, groups=True)),
    begin=((_BACKWARD, "gradients"), (_BACKWARD, "delta")),
    pipelined=((_SM90, "pipeline"), (_SM90, "query_gradient")),
    pipelines=(Tiling(1, 128, 64, 64, 3, True, 3), Tiling(1, 384, 64, 64, 1, True, 2)),
    masked=(Tiling(1, 128, 64, 64, 3, True, 3), Tiling(1, 256, 64, 64, 1, True, 2)),
    beyond=32,
)
KEY_KERNEL = Kernel(
    "attention_key_gradient",
    ((_BACKWARD, "key_gradient"),),
    ("q", "k", "v", "dout", "dk", "dv", "scratch"),
    of_keys=True,
    tiles=2,
    warps=(Tiling(1, 128, 64, 16, 3), Tiling(1, 128, 64, 16, 2), Tiling(1, 64, 16, 16, 2)),
    groups=(
        Tiling(1, 128, 128, 64, 2, groups=True),
        Tiling(1, 128, 64, 64, 2, groups=True),
        Tiling(1, 256, 32, 32, 1, groups=True),
    ),
    two_warps=(Tiling(1, 128, 64, 16, 2), Tiling(1, 128, 16, 16, 1)),
    two_groups=(Tiling(1, 128, 64, 64, 2, groups=True), Tiling(1, 256, 32, 32, 1, groups=True)),
    begin=((_BACKWARD, "gradients"), (_BACKWARD, "of_queries")),
    pipelined=((_SM90, "pipeline"), (_SM90, "key_gradient")),
    pipelines=(Tiling(1, 128, 64, 64, 2, True, 3), Tiling(1, 256, 64, 64, 1, True, 2)),
    beyond=32,
)
PLANE_KERNEL = Kernel(
    "attention_gradients",
    (),
    ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "partial"),
    of_keys=True,
    tiles=3 * STAGES_OF_KEYS,
    warps=(),
    groups=(),
    two_warps=(),
    two_groups=(),
    begin=((_BACKWARD, "gradients"), (_BACKWARD, "of_queries")),
    pipelined=((_SM90, "pipeline"), (_FUSED, "gradients")),
    pipelines=(Tiling(1, 256, 64, 64, 1, True, 2, extra=256, turned=True),),
    by_planes=True,
)
"""All gradients in one kernel, for shapes that satisfy ``fits_planes``."""

_FILLED = 0.8
"""Minimum mean share of busy SMs over all waves: above this, planes are faster."""


def fits_planes(shape: Shape, arch: str, code: Code = NO_CODE, parts: int = 0) -> bool:
    """True if ``PLANE_KERNEL`` applies: planes are large and fill the device."""
    if arch != "sm_90a" or parts or code is not NO_CODE or shape.heads != shape.key_heads:
        return False
    if shape.features != 64 or shape.queries > MOST_QUERIES or min(shape.queries, shape.keys) < FEWEST_TOKENS:
        return False
    planes = shape.batch * shape.heads
    return planes >= _FILLED * -(-planes // SM_COUNT) * SM_COUNT


def key_kernels(features: int) -> tuple[Kernel, ...]:
    """Kernels for dk and dv: one, or two where registers cannot hold both sums."""
    if features <= 128:
        return (KEY_KERNEL,)
    return KEY_KERNEL._replace(makes="k"), KEY_KERNEL._replace(makes="v")


def gradient_kernels(shape: Shape, arch: str, code: Code = NO_CODE, parts: int = 0) -> tuple[Kernel, ...]:
    """The kernels that compute all gradients."""
    if fits_planes(shape, arch, code, parts):
        return (PLANE_KERNEL,)
    return (QUERY_KERNEL, *key_kernels(shape.features))


_PADDING = 128
"""Row padding of scratch memory, a multiple of all tiles."""


def refused_everywhere(sizes: tuple[int, ...], dtype: np.dtype) -> str | None:
    """The reason why no device has a kernel for a ``Shape``; None if one has."""
    return refused(Shape(*sizes), dtype, (), "sm_90a")  # the architecture with all kernels


def refused(
    shape: Shape, dtype: np.dtype, strides: Sequence[Strides], arch: str, parts: int = 0
) -> str | None:
    """The reason why there is no kernel; None if there is one.

    Args:
      strides: those of all operands and results.
      arch: as ``sm_90a``.
      parts: number of float16 parts per float32 element; 0 for elements of two bytes.
    """
    if not parts and dtype not in (dtypes.bfloat16, dtypes.float16):
        return f"elements are {dtype.name}, and tensor-core attention has bfloat16 and float16"
    if int(arch.removeprefix("sm_").rstrip("af")) < 80:
        return f"the device is {arch}, and the kernels are for sm_80 and later"
    most = _MOST_OF_TWO_PARTS if parts > 1 else _MOST_FEATURES
    if shape.features % 16 or not 16 <= shape.features <= most:
        return f"features={shape.features} is not a multiple of 16 up to {most}" + " in two parts" * (
            parts > 1
        )
    if min(shape) < 1:
        return f"{shape} is empty"
    if shape.heads % shape.key_heads:
        return f"heads={shape.heads} is not a multiple of key_heads={shape.key_heads}"
    if max(shape.queries, shape.keys) > 1 << 24:
        return f"more than {1 << 24} tokens"
    if any(s % 8 for of in strides for s in of):
        return "a stride is not a multiple of 8 elements: 16 bytes are read at once"
    return None


def source(
    kernel: Kernel,
    dtype: np.dtype,
    features: int,
    causal: bool,
    tiling: Tiling,
    code: Code = NO_CODE,
    parts: int = 0,
) -> str:
    """CUDA C++ of a kernel without prelude; lengths, heads and strides are arguments."""
    constants = {
        "FEATURES": features,
        "PARTS": max(parts, 1),
        "SLICE": mma.slice_of(features, parts),
        "THREADS": tiling.threads,
        "SLABS": tiling.slabs,
        "COLUMNS": tiling.columns,
        "INNER": tiling.inner,
        "BLOCKS": tiling.blocks,
    }
    if tiling.stages:
        constants["STAGES"] = tiling.stages
    if kernel.by_planes:
        constants |= {"MOST_QUERIES": MOST_QUERIES, "STAGES_OF_KEYS": STAGES_OF_KEYS, "KEPT": KEPT}
    makes = {f"MAKES_{name.upper()}": name in kernel.makes for name in "kv"}
    flags = {"CAUSAL": causal, "OF_KEYS": kernel.of_keys, "WIDE": parts > 0} | makes
    head = source_files.declared(**constants, **flags)
    products = mma.source(dtype.name, group_sizes(features, tiling, parts))
    common = _joined(
        (_FORWARD, "split" if parts else "plain"),
        (_FORWARD, "rows"),
        (_FORWARD, "common"),
        (_BACKWARD, "sums" if kernel.sums else "no_sums"),
    )
    body = kernel.body
    if tiling.stages and kernel.pipelined:
        products += source_files.source(mma.TMA)
        body = kernel.pipelined
    pairs = code.source if code is not NO_CODE else source_files.source(cuda_attention_mods.FILE, "none")
    return head + products + pairs + common + _joined(*kernel.begin, *body)


def _joined(*parts: tuple[str, str]) -> str:
    return "".join(source_files.parts(file)[name] for file, name in parts)


def group_sizes(features: int, tiling: Tiling, parts: int = 0) -> mma.GroupSizes | None:
    """Columns of the warpgroup matmuls; None if there are none."""
    if not tiling.groups:
        return None
    turned = features if tiling.turned else 0
    return mma.GroupSizes(tiling.inner, mma.slice_of(features, parts), turned)


def problem(
    kernel: Kernel, shape: Shape, scale: float, strides: Mapping[str, Strides], parts: int = 0
) -> bytes:
    """The structure ``Problem``; ``strides`` are those of the operands, by name."""
    planes = kernel.planes(shape)
    # bytes that the blocks of a plane read repeatedly
    read = 4 * max(parts, 1) * shape.features * (shape.queries if kernel.of_keys else shape.keys)
    section = max(1, min(planes, _SECTION_BYTES // read))
    group = shape.heads // shape.key_heads
    numbers = _NUMBERS.pack(
        shape.queries, shape.keys, shape.heads, group, planes, section, padded(shape), scale
    )
    none = Strides(0, 0, 0)
    return numbers + b"".join(_STRIDES.pack(*strides.get(name, none)) for name in NAMES)


def padded(shape: Shape) -> int:
    """Queries of a plane in scratch memory."""
    return -(-shape.queries // _PADDING) * _PADDING


def scratch_bytes(
    forward: bool, shape: Shape, arch: str, code: Code = NO_CODE, parts: int = 0
) -> tuple[int, ...]:
    """Device memory of a call in bytes: scratch, and the tile lists of each kernel."""
    first, *others = (FORWARD_KERNEL,) if forward else gradient_kernels(shape, arch, code, parts)
    own = 0 if forward else 8 * shape.batch * shape.heads * padded(shape)
    if first.by_planes:
        tiling = first.pipelines[0]
        tiles = max(-(-shape.queries // tiling.columns) - KEPT, 0)
        own = 4 * shape.features * tiling.columns * tiles * first.blocks(shape, tiling)
    lists = []
    for kernel in (first, *others[:1]):
        tiling = kernel.tiling(shape.features, arch, code, parts)
        lists.append(-(-kernel.list_bytes(shape, tiling, code) // 16) * 16)
    return own, *lists


@functools.lru_cache(256)
def text_of(
    kernel: Kernel, dtype: np.dtype, features: int, causal: bool, tiling: Tiling, code: Code, parts: int
) -> str:
    """The complete CUDA C++ of one kernel."""
    return DEVICE.with_prelude(source(kernel, dtype, features, causal, tiling, code, parts))


def texts(
    forward: bool,
    dtype: np.dtype,
    shape: Shape,
    causal: bool,
    arch: str,
    code: Code = NO_CODE,
    parts: int = 0,
    summed: bool = False,
) -> list[tuple[str, str]]:
    """Sources and names of the kernels that ``Forward`` or ``Backward`` launches."""
    found, features = [], shape.features
    for kernel in (FORWARD_KERNEL,) if forward else gradient_kernels(shape, arch, code, parts):
        kernel = kernel.summed if summed else kernel
        tiling = kernel.tiling(features, arch, code, parts)
        for part in (kernel.lists, kernel) if code.masked else (kernel,):
            found.append((text_of(part, dtype, features, causal, tiling, code, parts), part.entry))
    return found


def boxes(kernel: Kernel, shape: Shape, strides: Mapping[str, Strides], tiling: Tiling) -> dict[str, Box]:
    """Operands with tensor maps, a kernel's last parameters, and the box of each copy."""
    if not (tiling.stages and kernel.pipelined):
        return {}
    panel, found = mma.panel_of(shape.features), {}
    for name in IN_PARTS:
        if name in kernel.operands:
            of, is_key = strides[name], name in "kv"
            tokens, heads = (shape.keys, shape.key_heads) if is_key else (shape.queries, shape.heads)
            rows = tiling.rows if is_key == kernel.of_keys else tiling.columns
            sizes = shape.features, heads, tokens, shape.batch
            found[name] = Box(sizes, (2 * of.head, 2 * of.token, 2 * of.batch), (panel, 1, rows, 1))
    return found


def operands_of(kernel: Kernel, code: Code, parts: int = 0) -> tuple[str, ...]:
    """The parameters that are arrays."""
    found = list(kernel.operands)
    if parts and found:
        found += [f"{name}_{what}" for what in ("rest", "units") for name in IN_PARTS]
    return (*found, *kernel.sums, *(() if code is NO_CODE else code.operands))
