"""Library operations in terms that NumPy and CuPy share.

Kernels, below ``cupy_ops``, whose table names them. In: a context (the array module ``c.xp``, ``c.library`` for
functions that differ between the modules, the operands' dtypes ``c.operands`` and the results' types ``c.outs``),
arrays and the primitive's parameters. Out: arrays. No entry reads values, and tests run all of them on NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops.fft import FftType
from blufunc.core.ops.gather_scatter import gather_fill
from blufunc.core.ops.rows import Plan, plan_for
from blufunc.core.ops.sliding import count, dilated
from blufunc.core.ops.windows import GatherScatterMode, as_gather, window_sizes

_SCRATCH = 1 << 28
"""Bytes of a convolution's windows to copy at a time."""


# -- half precisions ----------------------------------------------------------------------------------


def widened(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """Half precisions as float32 (bfloat16 is its upper half), all else unchanged."""
    if dtype == dtypes.bfloat16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32) if dtype == dtypes.float16 else x


def narrowed(xp: Any, x: Any, dtype: np.dtype, raw: np.dtype) -> Any:
    """A result of ``dtype`` in ``raw``, the dtype of its buffer."""
    if dtype == dtypes.bfloat16 and x.dtype != np.uint16:
        bits = x.astype(np.float32).view(np.uint32)
        # to nearest, ties to even: the cut bits carry above a half, or at a half if the kept part is odd
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return xp.where(xp.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return x.astype(raw, copy=False)


# -- special functions -----------------------------------------------------------------------------


def special(name: str) -> Callable:
    """The function called ``name`` in ``scipy.special`` and ``cupyx.scipy.special``."""
    return lambda c, *xs: getattr(c.library.special, name)(*xs)


def digamma(c: Any, x: Any) -> Any:
    """NaN at all poles, 0 included."""
    return c.xp.where(x == 0, x.dtype.type(np.nan), c.library.special.digamma(x))


# -- scans -----------------------------------------------------------------------------------------


def _reversible(scan: Callable[[Any, Any, int], Any]) -> Callable:
    """An entry of a scan along an axis, which may start at the end."""

    def run(c: Any, x: Any, *, axis: int, reverse: bool) -> Any:
        out = scan(c, c.xp.flip(x, axis) if reverse else x, axis)
        return c.xp.flip(out, axis) if reverse else out

    return run


def cumulative(function: str) -> Callable:
    """Sums and products by CuPy, along an axis in one fixed order."""
    return _reversible(lambda c, x, axis: getattr(c.xp, function)(x, axis=axis, dtype=x.dtype))


def doubling(function: str) -> Callable:
    """Doubling scan of an associative function: runs of 1, 2, 4, ... are joined."""

    def scan(c: Any, x: Any, axis: int) -> Any:
        combine, n, reach = getattr(c.xp, function), x.shape[axis], 1
        out = c.xp.moveaxis(x, axis, 0)
        while reach < n:
            out = c.xp.concatenate([out[:reach], combine(out[:-reach], out[reach:])])
            reach *= 2
        return c.xp.moveaxis(out, 0, axis)

    return _reversible(scan)


# -- Fourier transforms ----------------------------------------------------------------------------

_TRANSFORMS = {FftType.FFT: "fftn", FftType.IFFT: "ifftn", FftType.RFFT: "rfftn", FftType.IRFFT: "irfftn"}


def fft(c: Any, x: Any, *, type: FftType, lengths: tuple[int, ...]) -> Any:
    return getattr(c.xp.fft, _TRANSFORMS[type])(x, lengths, tuple(range(-len(lengths), 0)))


# -- sorting ---------------------------------------------------------------------------------------


def _key(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """A sort key: half precisions as float32, and one NaN, which comes last.

    CuPy sorts arrays of rank 1 by their bits, in which a NaN with a sign comes before all numbers.
    """
    key = widened(xp, x, dtype)
    return xp.where(xp.isnan(key), key.dtype.type(np.nan), key) if key.dtype.kind == "f" else key


def _keys(xp: Any, x: Any, dtype: np.dtype) -> list[Any]:
    """Keys that order ``x`` as NumPy does, the first one first.

    Complex numbers with a NaN follow all others, by which of their parts it is; CuPy takes them for equal.
    """
    if not dtypes.is_complex(dtype):
        return [_key(xp, x, dtype)]
    nans = [xp.isnan(part) for part in (x.real, x.imag)]
    parts = [
        xp.where(nan, part.dtype.type(0), part) for nan, part in zip(nans, (x.real, x.imag), strict=True)
    ]
    return [nans[0].astype(np.uint8) * np.uint8(2) + nans[1].astype(np.uint8), *parts]


def sort(c: Any, *xs: Any, dimension: int, is_stable: bool, num_keys: int) -> list[Any]:
    xp = c.xp
    keys = [k for x, d in zip(xs[:num_keys], c.operands, strict=False) for k in _keys(xp, x, d)]
    if len(xs) == len(keys) == 1 and keys[0].dtype == xs[0].dtype:
        return [xp.sort(keys[0], dimension)]
    # from the last key to the first, each sort stable
    order = c.library.order(keys[-1], dimension)
    for key in keys[-2::-1]:
        resorted = c.library.order(xp.take_along_axis(key, order, dimension), dimension)
        order = xp.take_along_axis(order, resorted, dimension)
    return [xp.take_along_axis(x, order, dimension) for x in xs]


def top_k(c: Any, x: Any, *, k: int) -> list[Any]:
    # a stable ascending sort of the reversed line, read backwards, is a stable descending one
    keys = _key(c.xp, x, c.operands[0])
    order = c.library.order(keys[..., ::-1], -1)[..., ::-1][..., :k]
    index = x.shape[-1] - 1 - order
    return [c.xp.take_along_axis(x, index, -1), index]


def pick_along(c: Any, x: Any, index: Any, *, dimension: int) -> Any:
    return c.xp.take_along_axis(x, index.astype(np.int64), dimension)


def place_along(c: Any, x: Any, index: Any, *, dimension: int, size: int) -> Any:
    out = c.xp.zeros((*x.shape[:dimension], size, *x.shape[dimension + 1 :]), x.dtype)
    rank = x.ndim
    grid = [c.xp.arange(n).reshape(-1, *[1] * (rank - d - 1)) for d, n in enumerate(x.shape)]
    grid[dimension] = index.astype(np.int64)
    out[tuple(grid)] = x
    return out


# -- windows at positions that are operands --------------------------------------------------------


def _starts(c: Any, plan: Plan, indices: Any, drop: bool) -> tuple[Any, Any]:
    """Start row of each window, clamped; with ``drop`` also which were in range."""
    xp = c.xp
    if indices.dtype == np.uint64:
        indices = xp.minimum(indices, np.uint64(np.iinfo(np.int64).max))
    at = indices.reshape(math.prod(plan.batch), len(plan.bounds)).astype(np.int64)
    bounds = c.library.constant(plan.bounds)
    inside = ((at >= 0) & (at <= bounds)).all(1) if drop else None
    rows = (xp.minimum(xp.maximum(at, 0), bounds) * c.library.constant(plan.strides)).sum(1)
    for k, stride in plan.along:
        line = xp.arange(plan.batch[k]) * stride
        rows = (rows.reshape(plan.batch) + line.reshape(-1, *[1] * (len(plan.batch) - k - 1))).reshape(-1)
    return rows, inside


def _window_rows(c: Any, plan: Plan, starts: Any) -> Any:
    return (
        starts if plan.offsets is None else (starts[:, None] + c.library.constant(plan.offsets)).reshape(-1)
    )


def gather(
    c: Any, x: Any, indices: Any, *, dimension_numbers: Any, slice_sizes: tuple[int, ...], mode: Any,
    fill_value: Any, **_: Any,
) -> Any:  # fmt: skip
    plan = plan_for(x.shape, indices.shape, dimension_numbers, slice_sizes)
    starts, inside = _starts(c, plan, indices, mode is GatherScatterMode.FILL_OR_DROP)
    table = x.reshape(plan.outer, plan.rows, plan.inner)
    out = table.take(_window_rows(c, plan, starts), axis=1)
    if inside is not None:
        dtype = c.operands[0]
        fill = np.asarray(gather_fill(dtype, fill_value)).astype(dtype)
        out = out.reshape(plan.outer, len(starts), plan.per_window * plan.inner)
        out = c.xp.where(inside[:, None], out, c.library.constant(fill.view(x.dtype)))
    out = out.reshape(plan.natural)
    return out if plan.order is None else out.transpose(plan.order)


def scatter(how: str) -> Callable:
    def run(
        c: Any, x: Any, indices: Any, updates: Any, *, dimension_numbers: Any, mode: Any, **_: Any
    ) -> Any:
        xp = c.xp
        sizes = window_sizes(x.shape, updates.shape, dimension_numbers)
        plan = plan_for(x.shape, indices.shape, as_gather(dimension_numbers), sizes)
        starts, inside = _starts(c, plan, indices, mode is not GatherScatterMode.CLIP)
        rows, total = _window_rows(c, plan, starts), plan.outer * plan.rows
        if plan.outer > 1:
            rows = (xp.arange(plan.outer)[:, None] * plan.rows + rows).reshape(-1)
        if inside is not None:
            # not by ``repeat``, which launches once per element in CuPy
            kept = xp.broadcast_to(inside[:, None], (plan.outer, len(inside), plan.per_window)).reshape(-1)
            rows = xp.where(kept, rows, total)
        if plan.inverse is not None:
            updates = updates.transpose(plan.inverse)
        updates = updates.reshape(len(rows), plan.inner)
        table = x.reshape(total, plan.inner)
        return c.library.scatter(table, rows, updates, how, c.operands[0]).reshape(x.shape)

    return run


def _positions(xp: Any, shape: tuple[int, ...], sizes: tuple[int, ...], starts: Sequence[Any]) -> Any:
    """The flat positions of a window clamped into range: an array of its shape."""
    out: Any = 0
    stride = math.prod(shape)
    for d, (n, size, start) in enumerate(zip(shape, sizes, starts, strict=True)):
        stride //= n
        start = xp.minimum(xp.maximum(start.astype(np.int64), 0), n - size)
        line = (start + xp.arange(size)) * stride
        out = out + line.reshape(-1, *[1] * (len(shape) - d - 1))
    return out


def dynamic_slice(c: Any, x: Any, *starts: Any, slice_sizes: tuple[int, ...]) -> Any:
    return x if not starts else x.reshape(-1)[_positions(c.xp, x.shape, slice_sizes, starts)]


def dynamic_update_slice(c: Any, x: Any, update: Any, *starts: Any) -> Any:
    if not starts:
        return update
    out = x.copy()
    out.reshape(-1)[_positions(c.xp, x.shape, update.shape, starts)] = update
    return out


# -- contractions ----------------------------------------------------------------------------------


def dot_general(
    c: Any, x: Any, y: Any, *, dimension_numbers: Any, precision: Any, preferred_element_type: Any
) -> Any:
    (xc, yc), (xb, yb) = dimension_numbers
    x_free = tuple(d for d in range(x.ndim) if d not in (*xc, *xb))
    y_free = tuple(d for d in range(y.ndim) if d not in (*yc, *yb))
    out = c.outs[0]
    if not (dtypes.is_floating(out.dtype) and out.dtype.itemsize <= 2):  # float32 operands give float32 sums
        x, y = x.astype(out.dtype, copy=False), y.astype(out.dtype, copy=False)
    batch = math.prod(x.shape[d] for d in xb)
    inner = math.prod(x.shape[d] for d in xc)
    a = x.transpose(xb + x_free + xc).reshape(batch, -1, inner)
    b = y.transpose(yb + yc + y_free).reshape(batch, inner, -1)
    return c.xp.matmul(a, b).reshape(out.shape)


def dot_and_sum(c: Any, x: Any, y: Any, addend: Any, **params: Any) -> Any:
    """Matmul plus an array of its shape, or a vector with an element per row."""
    product = dot_general(c, x, y, **params)
    return (product.reshape(-1, addend.size) + addend.reshape(-1)).reshape(product.shape)


def dot_promoted(c: Any, x: Any, y: Any, *addend: Any, chunk: int, **params: Any) -> Any:
    """Matmul plus an array. Operands come widened: float32 sums need no chunks."""
    product = dot_general(c, x, y, **params)
    return product + addend[0] if addend else product


def convolution(
    c: Any, lhs: Any, rhs: Any, *, dimension_numbers: Any, window_strides: Any, padding: Any, lhs_dilation: Any,
    rhs_dilation: Any, feature_group_count: int, batch_group_count: int, **_: Any,
) -> Any:  # fmt: skip
    """im2col: windows as a matrix, and a matmul with the filter for each group."""
    xp, d, out = c.xp, dimension_numbers, c.outs[0]
    if not (dtypes.is_floating(out.dtype) and out.dtype.itemsize <= 2):
        lhs, rhs = lhs.astype(out.dtype, copy=False), rhs.astype(out.dtype, copy=False)
    x, w = lhs.transpose(d.lhs_spec), rhs.transpose(d.rhs_spec)
    kernel, groups = w.shape[2:], feature_group_count * batch_group_count
    slides = zip(x.shape[2:], kernel, window_strides, padding, lhs_dilation, rhs_dilation, strict=True)
    counts = tuple(count(*slide) for slide in slides)
    x = _padded(xp, x, padding, lhs_dilation, 0)
    n, rest = x.shape[0] // batch_group_count, x.shape[2:]
    if batch_group_count > 1:
        x = x.reshape(groups, n, x.shape[1], *rest)
    else:
        x = xp.moveaxis(x.reshape(n, groups, x.shape[1] // groups, *rest), 1, 0)
    kernels = w.reshape(groups, 1, len(w) // groups, math.prod(w.shape[1:]))
    windows = _windows(xp, x, kernel, counts, window_strides, rhs_dilation)
    each = windows.size // n * windows.dtype.itemsize
    step = max(1, _SCRATCH // max(1, each))
    parts = []
    for i in range(
        0, n, step
    ):  # (group, batch, features, window, count) as matrices (features and window, count)
        part = windows[:, i : i + step]
        matrix = part.reshape(groups, part.shape[1], kernels.shape[-1], math.prod(counts))
        parts.append(xp.matmul(kernels, matrix))
    product = parts[0] if len(parts) == 1 else xp.concatenate(parts, 1)
    product = xp.moveaxis(product, 0, 1).reshape(n, len(w), *counts)
    return product.transpose(tuple(int(i) for i in np.argsort(d.out_spec)))


def _padded(xp: Any, x: Any, pads: Any, dilations: Any, fill: Any) -> Any:
    """``x`` (batch, features, ...), dilated and padded along its spatial axes."""
    sizes = [
        dilated(n, hole) + low + high
        for n, hole, (low, high) in zip(x.shape[2:], dilations, pads, strict=True)
    ]
    out = xp.full((*x.shape[:2], *[max(0, n) for n in sizes]), fill, x.dtype)
    to, source = [slice(None)] * 2, [slice(None)] * 2
    for n, hole, (low, _), size in zip(x.shape[2:], dilations, pads, sizes, strict=True):
        first = max(0, -(low // hole))  # what negative padding cuts off is not copied
        last = min(n, -(-(size - low) // hole))
        source.append(slice(first, max(first, last)))
        begin = low + first * hole
        to.append(slice(begin, begin + max(0, last - first) * hole, hole))
    out[tuple(to)] = x[tuple(source)]
    return out


def _windows(xp: Any, x: Any, kernel: Any, counts: Any, strides: Any, dilations: Any) -> Any:
    """View (group, batch, features, window, count) of x (group, batch, features, ...)."""
    steps = x.strides[3:]
    shape = (*x.shape[:3], *kernel, *counts)
    inside = [s * by for s, by in zip(steps, dilations, strict=True)]
    between = [s * by for s, by in zip(steps, strides, strict=True)]
    return xp.lib.stride_tricks.as_strided(x, shape, (*x.strides[:3], *inside, *between))


# -- linear algebra --------------------------------------------------------------------------------


def _finite(xp: Any, x: Any) -> tuple[Any, Any]:
    """Matrices with non-finite ones zeroed, and a mask: some libraries hang on NaN."""
    good = xp.isfinite(x).all((-2, -1))
    return xp.where(good[..., None, None], x, x.dtype.type(0)), good


def _or_nan(xp: Any, good: Any, x: Any) -> Any:
    """NaN for the matrices (or vectors) that are not ``good``."""
    return xp.where(good.reshape(good.shape + (1,) * (x.ndim - good.ndim)), x, x.dtype.type(np.nan))


def _adjoint(x: Any) -> Any:
    return x.conj().swapaxes(-1, -2)


def cholesky(c: Any, x: Any) -> Any:
    return c.library.cholesky(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)


def _hermitian(xp: Any, x: Any) -> Any:
    """Hermitian matrices from the lower triangles of x; the upper ones are not read."""
    low, n = xp.tril(x, -1), x.shape[-1]
    return xp.where(xp.eye(n, dtype=bool), x.real.astype(x.dtype), low + _adjoint(low))


def lu(c: Any, x: Any) -> list[Any]:
    m, n = x.shape[-2:]
    factors, pivots = c.library.lu(x.reshape(-1, m, n))
    order = c.library.permutation(pivots, m)
    results = (factors, pivots, order)
    return [r.reshape(a.shape) for r, a in zip(results, c.outs, strict=True)]


def pivots_to_permutation(c: Any, pivots: Any, *, permutation_size: int) -> Any:
    return c.library.permutation(pivots.reshape(-1, pivots.shape[-1]), permutation_size).reshape(
        c.outs[0].shape
    )


def lu_solve(c: Any, a: Any, lu: Any, permutation: Any, b: Any, *, transposed: bool) -> Any:
    xp, solve = c.xp, c.library.solve_triangles
    order = xp.broadcast_to(permutation[..., None].astype(np.int64), b.shape)
    if not transposed:
        x = solve(lu, xp.take_along_axis(b, order, -2), True, False, False, True)
        return solve(lu, x, False, False, False, False)
    y = solve(lu, b, False, True, False, False)
    # undo the row permutation
    return xp.take_along_axis(solve(lu, y, True, True, False, True), xp.argsort(order, -2), -2)


def triangular_solve(
    c: Any, a: Any, b: Any, *, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool,
    unit_diagonal: bool,
) -> Any:  # fmt: skip
    if not left_side:
        b, transpose_a = b.swapaxes(-1, -2), not transpose_a
    x = c.library.solve_triangles(a, b, lower, transpose_a, conjugate_a, unit_diagonal)
    return x if left_side else x.swapaxes(-1, -2)


def qr(c: Any, x: Any, *, full_matrices: bool, pivoting: bool) -> list[Any]:
    x, good = _finite(c.xp, x)
    q, r = c.xp.linalg.qr(x, "complete" if full_matrices else "reduced")
    return [_or_nan(c.xp, good, q), _or_nan(c.xp, good, r)]


def eigh(c: Any, x: Any, *, compute_vectors: bool) -> list[Any]:
    x, good = _finite(c.xp, _hermitian(c.xp, x))
    if not compute_vectors:
        return [_or_nan(c.xp, good, c.xp.linalg.eigvalsh(x))]
    w, v = c.xp.linalg.eigh(x)
    return [_or_nan(c.xp, good, v), _or_nan(c.xp, good, w)]


def svd(c: Any, x: Any, *, full_matrices: bool, compute_uv: bool) -> list[Any]:
    x, good = _finite(c.xp, x)
    out = c.xp.linalg.svd(x, full_matrices, compute_uv)
    return [_or_nan(c.xp, good, r) for r in (out if compute_uv else (out,))]
