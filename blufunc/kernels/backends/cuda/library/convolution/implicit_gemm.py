"""Convolutions without cuDNN: a GEMM that gathers the windows while it loads them.

Kernels, stages 6 and 8, with the source of ``include/implicit_gemm.cuh``. In: a ``Convolution``. Out: CUDA C++, and its
launches. All three kinds are one GEMM of rows, columns and terms, each a product of axes:

              rows              columns    terms             gathered operand, at
    forward   batch, results    k          window, c         x, result * stride - padding + window * dilation
    input     batch, inputs     c          window, k         y, (input + padding - window * dilation) / stride
    weight    window, c         k          batch, results    x, as forward

16-bit operands are multiplied on tensor cores. Float32 is IEEE arithmetic, also where TF32 would do. Long sums with few
results (weight gradients) are split, and their parts added in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.library import cublaslt, mma
from blufunc.kernels.codegen import source_files
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.ops.convolution import Convolution
from blufunc.kernels.user_kernel import CudaSource

FILE = "backends/cuda/include/implicit_gemm.cuh"

ENTRY, ADD = "implicit_gemm", "add_parts"

_C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "unsigned short",
    "float16": "unsigned short",
}

_TILES = {"mma": (128, 128, 32), "float32": (128, 128, 16), "float64": (64, 64, 16)}
"""Rows, columns and terms of a block; registers hold the sums."""

_LEAST_PART = 256
"""Minimum terms of a part of a sum."""

_ADDERS = 1024
"""Maximum blocks of ``add_parts``."""


class Axis(NamedTuple):
    """An axis of rows, columns or terms.

    Attributes:
      extent: its size.
      gathered, other, result: stride in the gathered operand, the other one, and the result, in elements.
      along: spatial axis of the gathered operand along which it moves; -1: none.
      step: by how much.
    """

    extent: int
    gathered: int = 0
    other: int = 0
    result: int = 0
    along: int = -1
    step: int = 0


@dataclass(frozen=True)
class Gather:
    """A convolution as a GEMM.

    Attributes:
      rows, columns, terms: their axes, the innermost last.
      sizes, strides: of the spatial axes of the gathered operand.
      starts: coordinate of row 0 and term 0 along these.
      holes: coordinates are multiples of it; others are between elements.
      groups: of features, and the offsets of a group in all three arrays.
    """

    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    terms: tuple[Axis, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    starts: tuple[int, ...]
    holes: tuple[int, ...]
    groups: tuple[int, int, int, int]


def gather_of(c: Convolution) -> Gather:
    """The GEMM of a convolution."""
    (n, *sizes, _), (k, *window, depth), (_, *results, _) = c.x, c.w, c.y
    x, w, y = (_strides(shape, c.features_last) for shape in (c.x, c.w, c.y))
    per, spatial = k // c.groups, range(len(window))
    lows = tuple(low for low, _ in c.padding)
    starts, whole = tuple(-low for low in lows), (1,) * len(window)
    if c.kind == "forward":
        rows = (Axis(n, x[0], 0, y[0]), *(Axis(results[d], 0, 0, y[2 + d], d, c.strides[d]) for d in spatial))
        columns = (Axis(per, 0, w[0], y[1]),)
        taps = (Axis(window[d], 0, w[2 + d], 0, d, c.dilation[d]) for d in spatial)
        terms = (*taps, Axis(depth, x[1], w[1]))
        groups = (c.groups, depth * x[1], per * w[0], per * y[1])
        return Gather(rows, columns, terms, tuple(sizes), x[2:], starts, whole, groups)
    if c.kind == "input":
        rows = (Axis(n, y[0], 0, x[0]), *(Axis(sizes[d], 0, 0, x[2 + d], d, 1) for d in spatial))
        columns = (Axis(depth, 0, w[1], x[1]),)
        taps = (Axis(window[d], 0, w[2 + d], 0, d, -c.dilation[d]) for d in spatial)
        terms = (*taps, Axis(per, y[1], w[0]))
        groups = (c.groups, per * y[1], per * w[0], depth * x[1])
        return Gather(rows, columns, terms, tuple(results), y[2:], lows, c.strides, groups)
    taps = (Axis(window[d], 0, 0, w[2 + d], d, c.dilation[d]) for d in spatial)
    rows = (*taps, Axis(depth, x[1], 0, w[1]))
    columns = (Axis(per, 0, y[1], w[0]),)
    places = (Axis(results[d], 0, y[2 + d], 0, d, c.strides[d]) for d in spatial)
    terms = (Axis(n, x[0], y[0]), *places)
    groups = (c.groups, depth * x[1], per * y[1], per * w[0])
    return Gather(rows, columns, terms, tuple(sizes), x[2:], starts, whole, groups)


def _strides(shape: Sequence[int], features_last: bool) -> tuple[int, ...]:
    """Strides of the batch, of features, and of spatial axes."""
    first, *spatial, features = shape
    if features_last:
        own = strides_of(shape)
        return (own[0], own[-1], *own[1:-1])
    return tuple(strides_of((first, features, *spatial)))


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles, and parts of sums.

    Attributes:
      m, n, t: rows, columns and terms.
      bm, bn, bk: those of a block.
      splits, part: parts of a sum, and the terms of each.
    """

    m: int
    n: int
    t: int
    bm: int
    bn: int
    bk: int
    splits: int
    part: int


def tiling_of(c: Convolution) -> Tiling:
    """Tiles that fill a device, if the sums are long enough."""
    g = gather_of(c)
    m, n, t = (math.prod(a.extent for a in axes) for axes in (g.rows, g.columns, g.terms))
    bm, bn, bk = _TILES["mma" if _on_tensor_cores(c) else c.dtype.name]
    bn = min(bn, 64) if n <= 64 else bn
    blocks = -(-m // bm) * -(-n // bn) * c.groups
    size = 8 if c.dtype.name == "float64" else 4
    most = cublaslt.WORKSPACE_BYTES // max(1, size * m * n * c.groups)
    splits = max(1, min(2 * SM_COUNT // blocks, t // _LEAST_PART, most))
    part = -(-t // splits)
    part = -(-part // bk) * bk
    return Tiling(m, n, t, bm, bn, bk, -(-t // part) if t else 1, part)


def _on_tensor_cores(c: Convolution) -> bool:
    return c.dtype.itemsize == 2


def _decoded(axes: Sequence[Axis], index: str, adds: Sequence[tuple[str, str]]) -> list[str]:
    """Statements that add up offsets and coordinates of an index.

    Args:
      adds: fields of axes, and the variables that they are added to.
    """
    lines, rest = [], index
    for n, axis in reversed(list(enumerate(axes))):
        if axis.extent == 1:
            continue
        own = rest if n == 0 else f"{rest} % {axis.extent}"
        parts = [
            f"{to} += (Offset)({own}) * {stride};" for name, to in adds if (stride := getattr(axis, name))
        ]
        if axis.along >= 0:
            parts.append(f"r.at[{axis.along}] += ({own}) * {axis.step};")
        lines.append("  " + " ".join(parts))
        if n:
            lines.append(f"  {rest} /= {axis.extent};")
    return lines


def _functions(g: Gather) -> str:
    """The functions of indices that the kernels call."""
    spatial = len(g.sizes)
    moved = any(a.along >= 0 for a in g.rows) or any(a.along >= 0 for a in g.terms)
    rows = _decoded(g.rows, "m", [("gathered", "r.offset")])
    terms = _decoded(g.terms, "t", [("gathered", "r.offset"), ("other", "r.b")])
    columns = _decoded(g.columns, "n", [("other", "offset")])
    results = [*_decoded([a._replace(along=-1) for a in g.rows], "m", [("result", "offset")]),
               *_decoded(g.columns, "n", [("result", "offset")])]  # fmt: skip
    checks = []
    for d in range(spatial if moved else 0):
        checks.append(f"  {{ int at = row.at[{d}] + term.at[{d}];")
        if g.holes[d] > 1:
            checks.append(f"    if (at % {g.holes[d]}) return false;\n    at /= {g.holes[d]};")
        checks.append(f"    if ((unsigned)at >= {g.sizes[d]}u) return false;")
        checks.append(f"    offset += (Offset)at * {g.strides[d]}; }}")
    starts = ", ".join(map(str, g.starts)) or "0"
    zeros = ", ".join("0" for _ in g.starts) or "0"
    held = max(1, spatial)
    return "\n".join([
        f"struct Row {{ Offset offset; int at[{held}]; }};",
        f"struct Term {{ Offset offset, b; int at[{held}]; }};",
        "inline Row row_of(int m) {", f"  Row r = {{0, {{{starts}}}}};", *rows, "  return r;", "}",
        "inline Term term_of(int t) {", f"  Term r = {{0, 0, {{{zeros}}}}};", *terms, "  return r;", "}",
        "inline Offset column_of(int n) {", "  Offset offset = 0;", *columns, "  return offset;", "}",
        "inline Offset result_of(int m, int n) {", "  Offset offset = 0;", *results, "  return offset;", "}",
        "inline bool locate(const Row &row, const Term &term, Offset &offset) {",
        "  offset = row.offset + term.offset;", *checks, "  return true;", "}",
    ]) + "\n"  # fmt: skip


def _vectors(axes: Sequence[Axis], others: Sequence[Axis], field: str, more: Sequence[int]) -> bool:
    """True if eight elements along the innermost axis are adjacent and aligned."""
    last = axes[-1]
    strides = [getattr(a, field) for a in (*axes[:-1], *others)]
    return (
        getattr(last, field) == 1
        and last.along < 0
        and not any(v % 8 for v in (last.extent, *strides, *more))
    )


def source(c: Convolution) -> str:
    """The complete CUDA C++ of a convolution."""
    g, t = gather_of(c), tiling_of(c)
    partial = "((Offset)(block.group * SPLITS + block.part) * M + m) * N + n"
    target = partial if t.splits > 1 else "block.c + result_of(m, n)"
    groups, a_group, b_group, c_group = g.groups
    element, result = _C_TYPES[c.dtype.name], _C_TYPES[c.out.name]
    total = "double" if c.dtype.name == "float64" else "float"
    a_terms = g.terms[-1].gathered == 1 and g.terms[-1].along < 0
    b_terms = g.terms[-1].other == 1
    largest = max(math.prod(s) for s in (c.x, c.w, c.y))
    constants = source_files.declared(
        M=t.m, N=t.n, T=t.t, BM=t.bm, BN=t.bn, BK=t.bk, THREADS=256, GROUPS=groups, SPLITS=t.splits, PART=t.part,
        A_GROUP=a_group, B_GROUP=b_group, C_GROUP=c_group, A_TERMS=a_terms, B_TERMS=b_terms,
    )  # fmt: skip
    types = "".join(
        f"typedef {kind} {name};\n"
        for name, kind in (
            ("Element", element),
            ("Result", result),
            ("Total", total),
            ("Target", total if t.splits > 1 else result),
            ("Offset", "int" if largest < 1 << 31 else "long long"),
        )
    )
    stores = {total: f"inline void store({total} *to, {total} x) {{ *to = x; }}\n"}
    if c.out.name in ("bfloat16", "float16"):
        stores[result] = "inline void store(Result *to, float x) { *to = (unsigned short)pack(x, x); }\n"
    elif result != total:
        stores[result] = f"inline void store({result} *to, {total} x) {{ *to = ({result})x; }}\n"
    parts = [constants, types]
    if _on_tensor_cores(c):
        a_vector = _vectors(
            g.terms if a_terms else g.rows, g.rows if a_terms else g.terms, "gathered", (*g.strides, a_group)
        )
        b_vector = _vectors(
            [a._replace(along=-1) for a in (g.terms if b_terms else g.columns)],
            g.columns if b_terms else g.terms, "other", (b_group,),
        )  # fmt: skip
        wm, wn = (64, 32) if t.bn == 128 else (32, 32)
        parts += [source_files.declared(A_VECTOR=a_vector, B_VECTOR=b_vector, WM=wm, WN=wn)]
        parts += [mma.instructions(c.dtype.name)]
    else:
        parts += [source_files.declared(MICRO_M=t.bm // 16, MICRO_N=t.bn // 16)]
        if c.out.itemsize == 2:
            parts += [mma.instructions(c.out.name)]
    parts += [*stores.values(), _functions(g), source_files.source(FILE, "common", "block")]
    parts += [f"inline Offset target_of(const Block &block, int m, int n) {{ return {target}; }}\n"]
    parts += [source_files.source(FILE, "tensor_cores" if _on_tensor_cores(c) else "plain", "entry")]
    parts += [source_files.source(FILE, "parts")] if t.splits > 1 else []
    return "".join(parts)


def launches_of(c: Convolution) -> list[CudaSource]:
    """The kernels of a convolution, in order."""
    t, text = tiling_of(c), source(c)
    tiles = -(-t.m // t.bm) * -(-t.n // t.bn)
    shared = 0
    if _on_tensor_cores(c):
        g = gather_of(c)
        a_terms = g.terms[-1].gathered == 1 and g.terms[-1].along < 0
        a = t.bm * (t.bk + 8) if a_terms else t.bk * (t.bm + 8)
        b = t.bn * (t.bk + 8) if g.terms[-1].other == 1 else t.bk * (t.bn + 8)
        shared = 3 * 2 * (a + b)
    found = [CudaSource(text, ENTRY, (tiles * t.splits * c.groups, 1, 1), (256, 1, 1), shared)]
    if t.splits > 1:
        blocks = min(_ADDERS, -(-t.m * t.n * c.groups // 256))
        found.append(CudaSource(text, ADD, (blocks, 1, 1), (256, 1, 1)))
    return found


class ImplicitGemm:
    """The launches of a convolution on a device."""

    def __init__(self, c: Convolution, device: int):
        self._device = device
        made = [modules.load_source(text, device) for text in launches_of(c)]
        self._first, self._addresses = made[0].prepare([0] * 3)
        self._add = made[1].prepare([0] * 2) if len(made) > 1 else None

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Put it on a stream, given addresses of both operands and of the result."""
        first, second, out = addresses
        target = out if self._add is None else cublaslt.workspace(self._device, stream)
        for i, address in enumerate((first, second, target)):
            self._addresses[i] = address
        self._first(stream)
        if self._add is not None:
            launch, places = self._add
            places[0], places[1] = target, out
            launch(stream)
