"""Kernels without rows: one value per point, or a full reduction to a scalar.

Kernels, stage 6, called by ``region.py``. In: a region whose iteration space has no lanes. Out: a launch with the
fewest grid ranges that the accesses allow; for a total, one whose points are chunks and whose finish reduces them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from blufunc.core.ir.jaxpr import Eqn, Var
from blufunc.core.ops.shape import concatenate_p, pad_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.loopir.index import ZERO, Index, Range, flat, of, ranges_of, unflat
from blufunc.kernels.loopir.ir import (
    BODIES,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Store,
    Total,
    or_identity,
    post_order,
    read,
    within,
)
from blufunc.kernels.loopir.launch import Launch
from blufunc.kernels.lower.rows import in_generations
from blufunc.kernels.lower.values import Lowering

# -- points -----------------------------------------------------------------------------------------


def pointwise(low: Lowering) -> Launch:
    """The kernel of a region with one value per point."""
    sizes = [n for n in widest(low) if n > 1] or [1]
    if len(sizes) > 1:
        runs = joined(pointwise_over(low, sizes).kernel) if reorders(low) else [sizes]
        sizes = [math.prod(run) for run in runs]
    return in_columns(low, sizes) or in_parts(low, sizes) or pointwise_over(low, sizes)


def reorders(low: Lowering) -> bool:
    """True if some operand is not read in the order of the points."""
    if not low.region.eqns:
        return True
    size = low.region.frame.size
    for e in low.region.eqns:
        if not (isinstance(e.prim, Elementwise) or e.prim is add_any_p):
            return True
        for a in e.invars:
            if a in low.virtual and a.aval.size > 1:
                return True
            if a.aval.size not in (1, size):
                return True
    return False


def widest(low: Lowering) -> tuple[int, ...]:
    """The shape with most axes among the values at points."""
    shapes = [v.aval.shape for v, role in low.region.roles.items() if role == "element"]
    return max(shapes or [low.region.outputs[0].aval.shape], key=len)


def points(sizes: Sequence[int]) -> tuple[list[Range], Index]:
    """Ranges of these sizes, and the position of a point."""
    ranges = [Range(f"i{d}" if len(sizes) > 1 else "i", n) for d, n in enumerate(sizes)]
    return ranges, flat([of(r) for r in ranges], sizes)


def pointwise_over(low: Lowering, sizes: Sequence[int]) -> Launch:
    """The kernel with the given sizes for its grid."""
    low.start()
    ranges, position = points(sizes)
    for e in low.region.eqns:
        low.at(e.outvars[0], unflat(position, e.outvars[0].aval.shape))
    body = [
        Store(b, flat(place, v.aval.shape), low.at(v, place))
        for v, b in low.outputs.items()
        for place in [unflat(position, v.aval.shape)]
    ]
    return low.launch(ranges, body)


def in_parts(low: Lowering, sizes: Sequence[int]) -> Launch | None:
    """The kernel of parts joined: a point stores an element of each equal piece.

    Parts that read the same elements, such as the halves of rotary embeddings, read them once, and no piece is guarded.
    None if no array is joined, or if that would not save loads.
    """
    if not low.target.joined_parts:
        return None
    found = _pieces(low)
    if found is None:
        return None
    whole = pointwise_over(low, sizes).kernel
    shape, each = found
    axes = [[d] for d, n in enumerate(each) if n > 1]
    made = _pieces_over(low, shape, each, axes)
    if _loads(made.kernel) >= math.prod(shape) // math.prod(each) * _loads(whole):
        return None
    rest = iter(axes)
    runs = [[d for _ in run for d in next(rest)] for run in joined(made.kernel)]
    return made if runs == axes else _pieces_over(low, shape, each, runs)


def _pieces_over(
    low: Lowering, shape: Sequence[int], each: Sequence[int], axes: Sequence[Sequence[int]]
) -> Launch:
    """The kernel of pieces of the shape ``each``, with a range for each run of axes."""
    low.start()
    ranges, _ = points([math.prod([each[d] for d in run]) for run in axes])
    inside = [ZERO] * len(shape)
    for r, run in zip(ranges, axes, strict=True):
        inside[run[0] : run[-1] + 1] = unflat(of(r), each[run[0] : run[-1] + 1])
    body = []
    for piece in itertools.product(*(range(n // size) for n, size in zip(shape, each, strict=True))):
        place = [i + part * size for i, part, size in zip(inside, piece, each, strict=True)]
        position = flat(place, shape)
        for e in low.region.eqns:
            low.at(e.outvars[0], unflat(position, e.outvars[0].aval.shape))
        for v, b in low.outputs.items():
            at = unflat(position, v.aval.shape)
            body.append(Store(b, flat(at, v.aval.shape), low.at(v, at)))
    return low.launch(ranges, body)


def _loads(kernel: Kernel) -> int:
    return sum(v.op == "load" for v in post_order(kernel.roots()))


def _pieces(low: Lowering) -> tuple[tuple[int, ...], list[int]] | None:
    """The shape of the first array joined from parts, and that of equal pieces.

    Parts are of whole pieces, also those of joined arrays that the array is computed from elementwise.
    """
    for e in low.region.eqns:
        shape = e.outvars[0].aval.shape
        if e.outvars[0].aval.size != low.region.frame.size or not _parts(e):
            continue
        each = list(shape)
        pending = [e]
        while pending:
            made = pending.pop()
            for axis, n in _parts(made):
                each[axis] = math.gcd(each[axis], n)
            if made.prim in (concatenate_p, pad_p, add_any_p) or isinstance(made.prim, Elementwise):
                before = [low.maker(a) for a in made.invars if isinstance(a, Var)]
                pending += [m for m in before if m is not None and m.outvars[0].aval.ndim == len(shape)]
        cut = [axis for axis, n in enumerate(shape) if each[axis] < n]
        if math.prod(shape) <= _MOST_PIECES * math.prod(each) and all(
            math.prod(each[axis:]) % _VECTOR == 0 for axis in cut
        ):
            return shape, each
    return None


def _parts(eqn: Eqn) -> list[tuple[int, int]]:
    """The axis and the size of each part that an equation joins, if it does.

    A pad does if its zeros are whole parts.
    """
    if eqn.prim is concatenate_p:
        axis = eqn.params["dimension"]
        return [(axis, x.aval.shape[axis]) for x in eqn.invars]
    if eqn.prim is not pad_p:
        return []
    config = eqn.params["padding_config"]
    axes = [d for d, (before, after, _) in enumerate(config) if before or after]
    if len(axes) != 1 or any(interior for *_, interior in config):
        return []
    (axis,) = axes
    before, after, _ = config[axis]
    n = eqn.invars[0].aval.shape[axis]
    return [(axis, n)] if n and min(before, after) >= 0 and not before % n and not after % n else []


_MOST_PIECES = 16
"""Maximum stores of a point: more would hold too many values."""

_VECTOR = 16
"""Pieces begin at multiples of this: no vector has elements of two."""


def in_columns(low: Lowering, sizes: Sequence[int]) -> Launch | None:
    """The kernel of an array generated from its rows and columns, as columns.

    A point has some rows of a tile of columns. Its lanes read what depends on columns once, and strided reads of it,
    such as the coordinates of points, cost little. None if the array is not generated, or reads nothing strided.
    """
    if not low.target.generated_columns or len(sizes) < 2:
        return None
    *others, n, columns = sizes
    per, width = _divisor(n, _ROWS), _divisor(columns, _COLUMNS)
    if per < _ROWS // 4 or width < _COLUMNS // 4 or not _is_generated(pointwise_over(low, sizes).kernel):
        return None
    low.start()
    outer, place = points(others)
    g, t, j, k = Range("g", n // per), Range("t", columns // width), Range("j", per), Range("k", width)
    row = of(g) * per + of(j)
    position = (place * n + row) * columns + of(t) * width + of(k)
    for e in low.region.eqns:
        low.at(e.outvars[0], unflat(position, e.outvars[0].aval.shape))
    stores = []
    for v, b in low.outputs.items():
        at = unflat(position, v.aval.shape)
        stores.append(Store(b, flat(at, v.aval.shape), low.at(v, at)))
    return low.launch([*outer, g, t], [Rows(j, (Lanes(k, tuple(stores)),), row, n)])


_ROWS, _COLUMNS = 16, 1024
"""Maximum rows and columns of a point: a block has a vector per thread."""


def _divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``."""
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def _is_generated(kernel: Kernel) -> bool:
    """True if each load depends on rows or on columns, and one is strided."""
    *_, row, column = kernel.grid
    strided = False
    for v in post_order(kernel.roots()):
        if v.op in BODIES or (v.args and v.op == "load"):
            return False
        if v.op == "load":
            step = v.attr[1].coefficient(column)
            if step is None or (step and v.attr[1].coefficient(row) != 0):
                return False
            strided |= abs(step) > 1
    return strided and all(s.index.coefficient(column) == 1 for s in kernel.body)


def joined(kernel: Kernel) -> list[list[int]]:
    """The sizes of the grid in runs that every access strides through as one range."""
    ranges = kernel.grid
    indices = [i for v in post_order(kernel.roots()) for i in v.indices()]
    indices += [s.index for s in kernel.body]
    runs = [[ranges[0].extent]]
    for a, b in itertools.pairwise(ranges):
        if all(_as_one(i, a, b, b.extent) for i in indices):
            runs[-1].append(b.extent)
        else:
            runs.append([b.extent])
    return runs


def _as_one(index: Index, a: Range, b: Range, n: int) -> bool:
    """True if an index strides through the ranges a and b (of n) as through one."""
    if a.extent == 1 or b.extent == 1:
        return a not in ranges_of(index) and b not in ranges_of(index)
    ca, cb = index.coefficient(a), index.coefficient(b)
    return ca is not None and cb is not None and ca == cb * n


# -- totals -----------------------------------------------------------------------------------------


def in_total(low: Lowering) -> Launch:
    """The kernel of a full reduction: points reduce chunks, the finish their parts."""
    size = low.region.frame.size
    chunks = max(1, min(size, low.target.total_chunks(size)))
    per = -(-size // chunks)
    chunks = -(-size // per)
    g, k = Range("g", chunks), Range("k", per)
    low.start()
    position = of(g) * per + of(k)
    inside = within(position, 0, size)
    low.guard = inside
    reduces, part_stores = [], []
    for e in low.region.eqns:
        v = e.outvars[0]
        if low.region.roles[v] != "total":
            low.at(v, unflat(position, v.aval.shape))
            continue
        value, dtype, op = low.reduced(e, unflat(position, e.invars[0].aval.shape))
        total = Total(f"{low.names.of(v, e)}_part", dtype, op)
        reduces.append(Reduce(total, or_identity(inside, value, op)))
        part_stores.append(Store(low.part(v, dtype, chunks), of(g), read(total)))
    stores = []
    for v, b in low.outputs.items():
        if low.region.roles.get(v) == "element":
            place = unflat(position, v.aval.shape)
            stores.append(Store(b, flat(place, v.aval.shape), low.at(v, place), inside))
    return low.launch([g], in_generations(reduces, stores, part_stores, k))
