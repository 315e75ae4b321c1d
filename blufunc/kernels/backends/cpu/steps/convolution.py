"""Native form of convolutions: GEMMs whose windows are packed block by block.

Kernels, stage 6 on the CPU. In: ``conv_general_dilated`` in float32 or float64. Out: its form, a list of slides. A
slide is a convolution without dilation of the operand: with one, the results at every n-th position see every m-th
element of the kernel. A slide sums terms (input features and kernel elements) for each position (batch and spatial
axes) and output feature; groups of features or of the batch are an outer loop. Threads share blocks of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.convolution import conv_general_dilated_p
from blufunc.kernels.backends.cpu.steps.form import Form, Library, bytes_of
from blufunc.kernels.loopir.index import strides_of

FILE, GEMM = "backends/cpu/include/convolution.h", "backends/cpu/include/gemm.h"

_REALS = {"float32": "float", "float64": "double"}

LIBRARIES = {
    f"convolution_{dtype}": Library(
        FILE,
        ("slides", "convolution"),
        "convolution",
        (("REAL", real),),
        before=((GEMM, ("layout", "gemm")),),
        options=("-O2",),
    )
    for dtype, real in _REALS.items()
}
"""Libraries by name.

Vectors are written out, so -O3 gains nothing. measured (GCC 12, 10 convolutions and gradients): equal times, and 2.1 s
of compilation instead of 5.2
"""

_TILE = (8, 128)
"""Rows of the largest register tile of the GEMM, and bytes of its columns."""

_FEATURES = 192
"""Maximum output features of a block: a multiple of each tile's rows and columns."""

_POSITIONS = (64, 384)
"""Minimum and maximum positions of a block, where there are as many."""

_BLOCKS = 8
"""Preferred number of blocks, of at least the minimum of positions."""

_MOST_PACKED = 1 << 23
"""Maximum bytes of a kernel that is packed once for all blocks."""

_MOST_SLIDES = 64
"""Maximum number of slides of a convolution."""

_DEPTH = 256
"""Terms of a block of the GEMM."""

_PACKED, _COPIED, _VECTOR = 12, 16, 3
"""Costs in multiplications of the GEMM: to pack, copy and multiply an element."""

_LINE = 10
"""Minimum elements of a line that is packed as such."""

_BY_ROWS, _BY_COLUMNS, _BY_TERMS, _BY_GROUPS = range(4)
_OF_POSITIONS, _OF_TERMS, _NO_LINES = range(3)


def _ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def _round_up(n: int, to: int) -> int:
    return _ceil_div(n, to) * to


class _Dim(NamedTuple):
    """An axis of positions or terms: ``Dim`` in the C++ source."""

    extent: int
    other: int
    x: int
    axis: int = -1
    step: int = 0


class _Taps(NamedTuple):
    """A spatial axis of a slide.

    Attributes:
      positions: results of the slide, the first result, and the distance of the next.
      taps: elements of the kernel, the first, and the distance of the next.
      start: coordinate of the first element of the first window.
      steps: by which a position, and an element of the kernel, moves in the operand.
    """

    positions: tuple[int, int, int]
    taps: tuple[int, int, int]
    start: int
    steps: tuple[int, int]


class _Plan(NamedTuple):
    """How to compute a slide.

    Attributes:
      cost: estimated multiplications of the GEMM that take as long.
      method: number of the method in the C++ source.
      batches: number of images that are apart; otherwise positions include the batch.
      n: number of positions.
      direct: whether results have one distance from position to position.
      lines: along which axis windows are packed.
      positions: the axes of positions.
    """

    cost: float
    method: int
    batches: int
    n: int
    direct: bool
    lines: int
    positions: list[_Dim]


def accepts(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that its form computes."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if avals[0].dtype.name not in _REALS or len({a.dtype for a in avals}) > 1:
        return False
    p = eqn.params
    phases = math.prod(
        h // math.gcd(s, h) for s, h in zip(p["window_strides"], p["lhs_dilation"], strict=True)
    )
    return all(a.size for a in avals) and avals[0].ndim <= 9 and phases <= _MOST_SLIDES


def phases(n: int, kernel: int, stride: int, low: int, holes: int, dilation: int) -> list[_Taps]:
    """The slides along one axis."""
    every, apart = holes // math.gcd(stride, holes), holes // math.gcd(dilation, holes)
    found = []
    for first in range(min(every, n)):
        # the first element of the kernel that meets an element of the operand
        tap = next(
            (k for k in range(min(apart, kernel)) if (first * stride - low + k * dilation) % holes == 0), None
        )
        start = 0 if tap is None else (first * stride - low + tap * dilation) // holes
        taps = (0, 0, 1) if tap is None else (-(-(kernel - tap) // apart), tap, apart)
        steps = every * stride // holes, apart * dilation // holes
        found.append(_Taps((_ceil_div(n - first, every), first, every), taps, start, steps))
    return found


class Axes(NamedTuple):
    """The spatial axes of a slide.

    Attributes:
      padded: start and extent of axes along which windows leave the operand.
      positions, terms: dims of results and of elements of the kernel.
      offsets: of the first element of the operand, of the kernel and of the results.
    """

    padded: list[tuple[int, int]]
    positions: list[_Dim]
    terms: list[_Dim]
    offsets: tuple[int, int, int]


def axes_of(
    taps: Sequence[_Taps], sizes: Sequence[int], x: Sequence[int], w: Sequence[int], y: Sequence[int]
) -> Axes:
    """Axes of a slide, given extents of the operand and strides of all arrays."""
    padded: list[tuple[int, int]] = []
    positions, terms = [], []
    starts = [0, 0, 0]
    for t, size, sx, sw, sy in zip(taps, sizes, x, w, y, strict=True):
        (n, first, every), (k, tap, apart) = t.positions, t.taps
        starts = [a + b for a, b in zip(starts, (t.start * sx, tap * sw, first * sy), strict=True)]
        last = t.start + (n - 1) * t.steps[0] + (k - 1) * t.steps[1]
        axis, along = -1, (0, 0)
        if t.start < 0 or last >= size:
            axis, along = len(padded), t.steps
            padded.append((t.start, size))
        positions.append(_Dim(n, every * sy, t.steps[0] * sx, axis, along[0]))
        terms.append(_Dim(k, apart * sw, t.steps[1] * sx, axis, along[1]))
    return Axes(padded, positions, terms, (starts[0], starts[1], starts[2]))


def joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """Dims with neighbors merged that are contiguous; at least one."""
    out: list[_Dim] = []
    for d in dims:
        if d.extent == 1:
            continue
        if out and out[-1][1:] == (d.extent * d.other, d.extent * d.x, d.axis, d.extent * d.step):
            out[-1] = d._replace(extent=out[-1].extent * d.extent)
        else:
            out.append(d)
    return out or [_Dim(1, 0, 0)]


def _is_uniform(dims: Sequence[_Dim]) -> bool:
    """True if the results of all positions have one distance."""
    return all(a.other == b.extent * b.other for a, b in itertools.pairwise(dims))


class _Slides:
    """The slides of an equation.

    Args:
      eqn: a convolution.
      x, w: strides of operand and kernel in elements.
    """

    def __init__(self, eqn: Eqn, x: Sequence[int], w: Sequence[int]):
        self.eqn, self.p = eqn, eqn.params
        lhs, rhs, out = (v.aval for v in (*eqn.invars, *eqn.outvars))
        d = self.p["dimension_numbers"]
        by = lambda spec, of: [of[a] for a in spec]
        (self.n, self.c, *self.sizes), self.x = by(d.lhs_spec, lhs.shape), by(d.lhs_spec, x)
        (_, self.terms, *self.kernel), self.w = by(d.rhs_spec, rhs.shape), by(d.rhs_spec, w)
        (self.batch, self.features, *self.out), self.y = (
            by(d.out_spec, out.shape),
            by(d.out_spec, strides_of(out.shape)),
        )
        self.item = out.dtype.itemsize
        self.groups = self.p["feature_group_count"] * self.p["batch_group_count"]
        self.features //= self.groups
        in_batch = self.p["batch_group_count"] > 1
        self.x_group = self.batch * self.x[0] if in_batch else self.terms * self.x[1]
        self.scratch = 0

    def all(self) -> list[list[int]]:
        """Parameters of all slides."""
        p = self.p
        axes = zip(
            self.out, self.kernel, p["window_strides"], [low for low, _ in p["padding"]], p["lhs_dilation"],
            p["rhs_dilation"], strict=True,
        )  # fmt: skip
        return [self.slide(taps) for taps in itertools.product(*(phases(*axis) for axis in axes))]

    def slide(self, taps: Sequence[_Taps]) -> list[int]:
        """Parameters of one slide; ``Slide`` in the C++ source."""
        found = axes_of(taps, self.sizes, self.x[2:], self.w[2:], self.y[2:])
        padded, places, (x, w, out) = found.padded, found.positions, found.offsets
        terms = [_Dim(self.terms, self.w[1], self.x[1]), *found.terms]
        n_terms = math.prod(d.extent for d in terms)
        of_terms = joined(sorted(terms, key=lambda d: -abs(d.x))) if n_terms else [_Dim(1, 0, 0)]
        plan = self.plan(places, of_terms, n_terms)
        n, gemm = plan.n, plan.method in (_BY_ROWS, _BY_COLUMNS)
        slots = plan.batches * (1 if plan.method == _BY_GROUPS else self.groups)
        tasks = slots * _ceil_div(self.features, _FEATURES)
        least, most = _POSITIONS if gemm else (1, _POSITIONS[1])
        blocks = max(_ceil_div(n, most), min(_ceil_div(n, least), _ceil_div(_BLOCKS, tasks)))
        block = _ceil_div(n, blocks)
        block = min(n, _round_up(block, 32)) if gemm else block
        # a long sum has parts instead of many blocks
        parts, part, packed, sums = 1, n_terms, -1, 0
        if gemm and slots < _BLOCKS and n <= most and self.features <= _FEATURES and n_terms >= 4 * _DEPTH:
            part = _ceil_div(n_terms, min(_ceil_div(_BLOCKS, slots), n_terms // _DEPTH))
            part = _round_up(part, _DEPTH)
            parts, block = _ceil_div(n_terms, part), n
            sums = self.place(slots * parts * n * self.features)
        elif gemm and n_terms and plan.batches * _ceil_div(n, block) > 1:
            columns = _TILE[1] // self.item
            width = _round_up(self.features, columns) if plan.method == _BY_ROWS else self.features + _TILE[0]
            size = self.groups * n_terms * width
            if size * self.item <= _MOST_PACKED:
                packed = self.place(size)
        numbers = [
            *(self.groups, self.x_group, self.features * self.w[0], self.features * self.y[1]),
            *(plan.batches, self.x[0], self.y[0]),
            *(self.features, self.w[0], self.y[1]),
            *(x, w, out, plan.method, int(plan.direct), plan.lines),
            *(n, block, n_terms, _FEATURES, parts, part, packed, sums),
            *(len(padded), len(plan.positions), len(of_terms)),
        ]
        return [*numbers, *itertools.chain(*padded, *plan.positions, *of_terms)]

    def place(self, count: int) -> int:
        """Offset in scratch of a new array."""
        at = self.scratch
        self.scratch += bytes_of((count, self.item))
        return at

    def plan(self, places: Sequence[_Dim], terms: Sequence[_Dim], n_terms: int) -> _Plan:
        """The plan of least estimated cost, in multiplications of the GEMM."""
        rows, columns = _TILE[0], _TILE[1] // self.item
        found: list[_Plan] = []
        for apart in (False, True):
            images = _Dim(self.batch, self.y[0], self.x[0])
            dims = joined(sorted([*places, *[images] * (not apart)], key=lambda d: -d.other))
            n, batches = math.prod(d.extent for d in dims), self.batch if apart else 1
            line, lane = _worth(terms[-1]), _worth(dims[-1])
            lines = _OF_TERMS if line > lane else _OF_POSITIONS
            if max(line, lane) < _LINE and sum(d.extent * abs(d.x) for d in dims) < 1 << 31:
                lines = _NO_LINES  # their offsets are 32 bits wide
            for method, unit in ((_BY_ROWS, self.y[1]), (_BY_COLUMNS, dims[-1].other)):
                a, b = (n, self.features) if method == _BY_ROWS else (self.features, n)
                direct = n_terms > 0 and _is_uniform(dims) and (unit == 1 or b == 1)
                each = (
                    _round_up(a, rows) * _round_up(b, columns) * n_terms
                    + _PACKED * _round_up(n, rows) * n_terms
                )
                each += _COPIED * n * self.features * (not direct)
                found.append(_Plan(self.groups * batches * each, method, batches, n, direct, lines, dims))
            if apart or not n_terms:
                continue
            lanes, cost = columns // 2, _VECTOR * n * self.features * n_terms
            if (terms[-1].x, terms[-1].other) == (1, 1) and terms[-1].extent >= lanes:
                found.append(_Plan(self.groups * cost, _BY_TERMS, 1, n, True, lines, dims))
            w, y = self.w[0], self.y[1]
            if self.features == 1 and self.groups >= lanes and (self.x_group, w, y) == (1, 1, 1):
                found.append(_Plan(_round_up(self.groups, lanes) * cost, _BY_GROUPS, 1, n, True, lines, dims))
        return min(found, key=lambda plan: plan.cost)


def _worth(d: _Dim) -> float:
    """Benefit of packing along an axis."""
    return min(d.extent, 32) / min(abs(d.x) or 1, 3)


def _convolution(eqn: Eqn) -> Form:
    out = eqn.outvars[0].aval
    multiplications = conv_general_dilated_p.flops(*(v.aval for v in eqn.invars), **eqn.params) // 2
    nanoseconds = 200 + multiplications * out.dtype.itemsize / 100 + out.size
    size = out.dtype.itemsize

    def strides(models: Sequence[np.ndarray]) -> list[int]:
        slides = _Slides(eqn, *([s // size for s in m.strides] for m in models)).all()
        return [len(slides), *itertools.chain(*slides)]

    made = _Slides(eqn, *(strides_of(v.aval.shape) for v in eqn.invars))
    made.all()
    blocks = (max(1, out.size // 256),)
    return Form(f"convolution_{out.dtype.name}", blocks, (), strides, nanoseconds, common=made.scratch)


FORMS = {conv_general_dilated_p: _convolution}
"""Makers of the forms of primitives."""
