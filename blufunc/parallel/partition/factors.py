"""Factor rules: how the dimensions of an operation's operands and results go together, like an einsum.

Parallel, stage 3. In comes one use of a primitive, out comes a ``Rule``: each dimension of each operand and result is
made of *factors*, major first, and dimensions that share a factor are divided alike. Factors of results pass through;
those of operands only are reduced, which leaves a sum owed, or a maximum. A dimension of no factor must be whole.
``propagate.py`` decides along which mesh axes factors are divided, ``partition.py`` computes on the shares.

A primitive of above brings its rule as ``prim.shard(avals, outs, **params) -> Rule``. What has no rule is computed
whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.ops.convolution import conv_general_dilated_p
from blufunc.core.ops.cumulative import Cumulative
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.dynamic import dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.ops.fft import fft_p
from blufunc.core.ops.gather_scatter import (
    gather_p,
    scatter_add_p,
    scatter_max_p,
    scatter_min_p,
    scatter_mul_p,
    scatter_p,
)
from blufunc.core.ops.linalg.common import MatrixOp
from blufunc.core.ops.linalg.factor import lu_pivots_to_permutation_p
from blufunc.core.ops.linalg.solve import lu_solve_p
from blufunc.core.ops.random_bits import (
    random_bits_p,
    random_fold_in_p,
    random_seed_p,
    random_split_p,
    random_unwrap_p,
    random_wrap_p,
)
from blufunc.core.ops.reduce import (
    argmax_p,
    argmin_p,
    reduce_and_p,
    reduce_max_p,
    reduce_min_p,
    reduce_or_p,
)
from blufunc.core.ops.reduce_window import WindowReduction
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p, rev_p, slice_p
from blufunc.core.ops.sort import pick_along_p, place_along_p, sort_p, top_k_p
from blufunc.core.ops.windows import as_gather, window_sizes
from blufunc.core.primitives.kinds import Reduction
from blufunc.core.primitives.linear_ops import (
    add_any_p,
    broadcast_in_dim_p,
    reduce_sum_p,
    reshape_p,
    transpose_p,
)
from blufunc.core.primitives.primitive import Primitive
from blufunc.transforms.checkpointing.policies import name_p, offload_p

Dims = tuple[tuple[int, ...], ...]
"""The factors of each dimension of one operand or result, major first."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """How the dimensions of one use of a primitive go together.

    Attributes:
      operands, results: the factors of each dimension of each of them; a dimension without any must be whole.
      sizes: the size of each factor.
      reduced: factors that the operation sums over, or takes the extremum over, in the results that do not have them:
        "sum", "max" or "min".
      linear: groups of operands in which the operation is linear together: where all of a group are sums still
        owed by the same mesh axes, and no other operand is, the result may stay one.
      partial: operands that count once in the sum of what the devices compute where a factor is summed over.
      harmless: operands of which the padding does no harm where a factor is reduced.
      trusted: operands that are indices, which the operation takes at their word: their padding is made 0.
      params: ``(params, operand shapes, result shapes) -> params`` on one device, where parameters hold shapes.
      special: how it is computed on a share where that is otherwise than on the whole: a name in ``localized_ops.py``,
        "iota", "gather", "scatter" or "random_bits".
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reduced: Mapping[int, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    partial: frozenset[int] = frozenset()
    harmless: frozenset[int] = frozenset()
    trusted: frozenset[int] = frozenset()
    params: Callable[[dict, list[Shape], list[Shape]], dict] | None = None
    special: str = ""

    def exact(self, shapes: Sequence[Shape]) -> frozenset[int]:
        """The factors that can only be divided evenly: those that are a part of a dimension of ``shapes``."""
        return frozenset(
            f
            for dims, shape in zip((*self.operands, *self.results), shapes, strict=True)
            for factors, n in zip(dims, shape, strict=True)
            for f in factors
            if len(factors) > 1 or self.sizes[f] != n
        )


def rule_of(prim: Primitive, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """The rule of one use of a primitive on operands of types ``avals`` with results of types ``outs``."""
    own = prim.shard
    if own is not None:
        return own(avals, outs, **params)
    rule = _RULES.get(prim)
    if rule is None:
        rule = next((r for base, r in _FAMILIES if isinstance(prim, base)), None)
    if rule is None and prim.kind == "elementwise":
        rule = _elementwise
    return (rule or whole)(prim, list(avals), list(outs), params)


def whole(prim: Primitive, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """The rule of what every device computes in whole."""
    return _Builder().rule([((),) * a.ndim for a in avals], [((),) * a.ndim for a in outs])


class _Builder:
    """Numbers factors while a rule is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.reduced: dict[int, str] = {}

    def new(self, size: int, reduce: str | None = None) -> tuple[int]:
        """A dimension that is one new factor."""
        self.sizes.append(size)
        if reduce is not None:
            self.reduced[len(self.sizes) - 1] = reduce
        return (len(self.sizes) - 1,)

    def each(self, shape: Shape, but: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """A factor for each dimension, but none for those in ``but``."""
        return [() if d in but else self.new(n) for d, n in enumerate(shape)]

    def rule(self, operands: Sequence[Any], results: Sequence[Any], **more: Any) -> Rule:
        dims = [tuple(map(tuple, ds)) for ds in (*operands, *results)]
        n = len(operands)
        return Rule(tuple(dims[:n]), tuple(dims[n:]), tuple(self.sizes), self.reduced, **more)


_ONE = (frozenset({0}),)
_BOTH = (frozenset({0, 1}),)


def _linear_in(prim: Primitive, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray]) -> tuple:
    """The groups of operands in which an elementwise operation is linear."""
    if prim is ew.convert_p:
        # to convert downwards before the sum would round every part of it
        a, b = avals[0].dtype, outs[0].dtype
        return _ONE if dtypes.is_floating(a) and dtypes.is_floating(b) and b.itemsize >= a.itemsize else ()
    return _LINEAR.get(prim, ())


_LINEAR: dict[Primitive, tuple[frozenset[int], ...]] = {
    ew.add_p: _BOTH,
    ew.sub_p: _BOTH,
    add_any_p: _BOTH,
    ew.mul_p: (frozenset({0}), frozenset({1})),
    ew.div_p: _ONE,
    ew.neg_p: _ONE,
    ew.copy_p: _ONE,
    ew.stop_gradient_p: _ONE,
}


def _elementwise(prim, avals, outs, params):
    b = _Builder()
    dims = b.each(outs[0].shape)
    linear = _linear_in(prim, avals, outs) if dtypes.is_inexact(outs[0].dtype) else ()
    return b.rule([dims if a.ndim else () for a in avals], [dims] * len(outs), linear=linear)


def _bitcast(prim, avals, outs, params):
    b = _Builder()
    n = min(avals[0].ndim, outs[0].ndim)  # to another width it adds a last dimension, or takes it away
    dims = b.each(avals[0].shape[:n])
    return b.rule(*[[[*dims, *[()] * (a.ndim - n)]] for a in (avals[0], outs[0])])


def _one_by_one(prim, avals, outs, params):
    b = _Builder()
    dims = [b.each(a.shape) for a in avals]
    return b.rule(dims, dims)


# -- movement --------------------------------------------------------------------------------------


def _shape_param(params, operands, results):
    return {**params, "shape": results[0]}


def _broadcast_in_dim(prim, avals, outs, params):
    b = _Builder()
    dims = b.each(outs[0].shape)
    x = [
        dims[d] if n == outs[0].shape[d] else () for n, d in zip(avals[0].shape, params["dims"], strict=True)
    ]
    linear = _ONE if avals[0].size == outs[0].size else ()
    return b.rule([x], [dims], params=_shape_param, linear=linear)


def _reshape(prim, avals, outs, params):
    b = _Builder()
    before, after = common_factors(avals[0].shape, outs[0].shape, b.new)
    return b.rule([before], [after], params=_shape_param, linear=_ONE)


def common_factors(before: Shape, after: Shape, new: Callable[[int], tuple[int]]) -> tuple[list, list]:
    """The factors of each dimension of two shapes of the same elements; ``new(size)`` makes one.

    From the first dimension on, as far as one size divides the other. What does not come out is without factors.
    """
    dims: tuple[list, list] = ([() for _ in before], [() for _ in after])
    if 0 in before:
        return dims
    sides = [iter([(d, n) for d, n in enumerate(shape) if n > 1]) for shape in (before, after)]
    (i, a), (j, b) = (next(side, (0, 1)) for side in sides)
    while a > 1 or b > 1:
        size = min(a, b)
        if size == 1 or a % size or b % size:
            break
        factor = new(size)
        dims[0][i] += factor
        dims[1][j] += factor
        a, b = a // size, b // size
        if a == 1:
            i, a = next(sides[0], (0, 1))
        if b == 1:
            j, b = next(sides[1], (0, 1))
    return dims


def _transpose(prim, avals, outs, params):
    b = _Builder()
    dims = b.each(avals[0].shape)
    return b.rule([dims], [[dims[p] for p in params["permutation"]]], linear=_ONE)


def _slice(prim, avals, outs, params):
    b = _Builder()
    x, out = avals[0].shape, outs[0].shape
    dims = b.each(x, [d for d in range(len(x)) if x[d] != out[d]])

    def local(params, operands, results):
        limits = [
            m if f else limit for m, f, limit in zip(operands[0], dims, params["limit_indices"], strict=True)
        ]
        return {**params, "limit_indices": tuple(limits)}

    return b.rule([dims], [dims], params=local, linear=_ONE)


def _pad(prim, avals, outs, params):
    b = _Builder()
    dims = b.each(
        avals[0].shape, [d for d, c in enumerate(params["padding_config"]) if tuple(c) != (0, 0, 0)]
    )
    return b.rule(
        [dims, ()], [dims], linear=_BOTH
    )  # a sum that is owed is padded with zeros only, which any sum is


def _concatenate(prim, avals, outs, params):
    b = _Builder()
    dims = b.each(outs[0].shape, [params["dimension"]])
    return b.rule([dims] * len(avals), [dims], linear=(frozenset(range(len(avals))),))


def _rev(prim, avals, outs, params):
    b = _Builder()
    dims = b.each(avals[0].shape, params["dimensions"])
    return b.rule([dims], [dims], linear=_ONE)


def _iota(prim, avals, outs, params):
    b = _Builder()
    return b.rule([], [b.each(outs[0].shape)], params=_shape_param, special="iota")


# -- reductions and contractions -------------------------------------------------------------------

_COMBINE = {reduce_sum_p: "sum", reduce_max_p: "max", reduce_min_p: "min"}
_COMBINE_BOOL = {reduce_and_p: "min", reduce_or_p: "max"}


def _reduction(prim, avals, outs, params):
    b = _Builder()
    how = _COMBINE.get(prim)
    if dtypes.is_bool(avals[0].dtype):
        how = _COMBINE_BOOL.get(prim, how)
    axes = params["axes"]
    dims = [
        b.new(n) if d not in axes else () if how is None else b.new(n, how)
        for d, n in enumerate(avals[0].shape)
    ]
    kept = [f for d, f in enumerate(dims) if d not in axes]
    linear = _ONE if how == "sum" and dtypes.is_inexact(outs[0].dtype) else ()
    return b.rule([dims], [kept], linear=linear)


def _window_reduction(prim, avals, outs, params):
    b = _Builder()
    still = [
        (w, s, tuple(p)) == (1, 1, (0, 0)) and bd == 1
        for w, s, p, bd in zip(
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params["base_dilation"],
            strict=True,
        )
    ]
    dims = b.each(avals[0].shape, [d for d, s in enumerate(still) if not s])
    return b.rule([dims] * len(avals), [dims] * len(outs))


def _dot_general(prim, avals, outs, params):
    b = _Builder()
    x, y = avals
    (xc, yc), (xb, yb) = params["dimension_numbers"]
    dx: list[Any] = [None] * x.ndim
    dy: list[Any] = [None] * y.ndim
    summed = not dtypes.is_bool(x.dtype)
    for i, j in zip(xb, yb, strict=True):
        dx[i] = dy[j] = b.new(x.shape[i])
    for i, j in zip(xc, yc, strict=True):
        dx[i] = dy[j] = b.new(x.shape[i], "sum") if summed else ()
    for dims, aval in ((dx, x), (dy, y)):
        for d, n in enumerate(aval.shape):
            if dims[d] is None:
                dims[d] = b.new(n)
    free = [[f for d, f in enumerate(dims) if d not in used] for dims, used in ((dx, xc + xb), (dy, yc + yb))]
    return b.rule([dx, dy], [[dx[i] for i in xb] + free[0] + free[1]])


def _convolution(prim, avals, outs, params):
    b = _Builder()
    numbers = params["dimension_numbers"]
    dims: list[list] = [[()] * a.ndim for a in (*avals, *outs)]
    lhs, rhs, out = dims
    (n, c), (o, i), (on, oc) = (s[:2] for s in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    if params["batch_group_count"] == 1:
        lhs[n] = out[on] = b.new(avals[0].shape[n])
        if params["feature_group_count"] == 1:
            rhs[o] = out[oc] = b.new(avals[1].shape[o])
            lhs[c] = rhs[i] = b.new(avals[0].shape[c], "sum")
    return b.rule([lhs, rhs], [out])


# -- indexing --------------------------------------------------------------------------------------


def _gather(prim, avals, outs, params):
    """Batch dimensions pass, and whole window dimensions; a table may be divided along the rows that are looked up."""
    b = _Builder()
    x, indices = avals
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    table = dtypes.is_numeric(x.dtype) and not dtypes.is_bool(x.dtype)
    dx, di, out, _ = _windows(
        b, x.shape, indices.shape, numbers, sizes, outs[0].ndim, "sum" if table else None
    )

    def local(params, operands, results):
        return {**params, "slice_sizes": tuple(map(min, params["slice_sizes"], operands[0]))}

    return b.rule([dx, di], [out], params=local, special="gather", harmless=frozenset({0}))


def _scatter(prim, avals, outs, params):
    """Whole window dimensions pass, and rows; of sums the batch may be divided, each device adding its part."""
    b = _Builder()
    x, indices, updates = avals
    numbers = as_gather(params["dimension_numbers"])
    sizes = window_sizes(x.shape, updates.shape, params["dimension_numbers"])
    adds = prim is scatter_add_p and dtypes.is_inexact(x.dtype)
    dx, di, du, own = _windows(b, x.shape, indices.shape, numbers, sizes, updates.ndim, "")
    if adds:
        b.reduced.update(dict.fromkeys(own, "sum"))
    else:
        di = [() if set(f) & own else f for f in di]
        du = [() if set(f) & own else f for f in du]
    partial, linear = (frozenset({0}), (frozenset({0, 2}),)) if adds else (frozenset(), ())
    return b.rule(
        [dx, di, du], [dx], special="scatter", partial=partial, linear=linear, harmless=frozenset({1})
    )


def _windows(b: _Builder, x: Shape, indices: Shape, numbers: Any, sizes: Shape, ndim: int, rows: str | None):
    """The factors of operand, indices, and windows of a gather or scatter, and those of the batch of indices alone.

    ``rows`` says what dividing the rows that indices choose does: "sum", "" for nothing, or None if it cannot be.
    """
    dx: list[Any] = [()] * len(x)
    di: list[Any] = [()] * len(indices)
    batch = [d for d in range(ndim) if d not in numbers.offset_dims]
    for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        dx[d] = di[i] = b.new(x[d])
    own = set()
    for i, n in enumerate(indices[:-1]):
        if not di[i]:
            di[i] = b.new(n)
            own |= {*di[i]}
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(x)) if d not in removed]
    for d in range(len(x)):
        if d in numbers.start_index_map:
            if d in numbers.collapsed_slice_dims and rows is not None and x[d] > 1:
                dx[d] = b.new(x[d], rows or None)
        elif d in window and sizes[d] == x[d]:
            dx[d] = b.new(x[d])
    out: list[Any] = [()] * ndim
    for place, d in zip(numbers.offset_dims, window, strict=True):
        out[place] = dx[d] if d not in numbers.start_index_map else ()
    for place, f in zip(batch, di[:-1], strict=True):
        out[place] = f
    return dx, di, out, own


def _dynamic_slice(prim, avals, outs, params):
    b = _Builder()
    x, *starts = avals
    dims = b.each(x.shape, [d for d, n in enumerate(outs[0].shape) if n != x.shape[d]])

    def local(params, operands, results):
        return {**params, "slice_sizes": results[0]}

    return b.rule([dims, *[()] * len(starts)], [dims], params=local)


def _dynamic_update_slice(prim, avals, outs, params):
    b = _Builder()
    x, update, *starts = avals
    dims = b.each(x.shape, [d for d, n in enumerate(update.shape) if n != x.shape[d]])
    return b.rule([dims, dims, *[()] * len(starts)], [dims])


def _along(parameter: str) -> Callable:
    """The rule of operations along the one dimension of which a parameter has the number."""

    def rule(prim, avals, outs, params):
        b = _Builder()
        dims = b.each(avals[0].shape, [params[parameter]])
        return b.rule([dims] * len(avals), [dims] * len(outs))

    return rule


def _by_places(prim, avals, outs, params):
    """The rule of what picks elements of a line by their places, which are the second operand."""
    b = _Builder()
    dims = b.each(avals[0].shape, [params["dimension"]])
    return b.rule([dims, dims], [dims], trusted=frozenset({1}))


def _leading(n: int, trusted: frozenset[int] = frozenset()) -> Callable:
    """The rule of operations on the last ``n`` dimensions: those before pass, where all operands have the same."""

    def rule(prim, avals, outs, params):
        b = _Builder()
        lead = avals[0].shape[: max(avals[0].ndim - n, 0)]
        if any(a.shape[: len(lead)] != lead or a.ndim < len(lead) for a in (*avals, *outs)):
            return whole(prim, avals, outs, params)
        dims = b.each(lead)
        sides = [[[*dims, *[()] * (a.ndim - len(lead))] for a in side] for side in (avals, outs)]
        return b.rule(*sides, trusted=trusted)

    return rule


def _random_bits(prim, avals, outs, params):
    if math.prod(params["shape"]) >= 2**32:  # shares count their elements in one word
        return _leading(0)(prim, avals, outs, params)
    b = _Builder()
    dims = b.each(outs[0].shape)
    return b.rule([dims[: avals[0].ndim]], [dims], special="random_bits")


def _fft(prim, avals, outs, params):
    return _leading(len(params["lengths"]))(prim, avals, outs, params)


_RULES: dict[Primitive, Callable[..., Rule]] = {
    ew.bitcast_p: _bitcast,
    broadcast_in_dim_p: _broadcast_in_dim,
    reshape_p: _reshape,
    transpose_p: _transpose,
    slice_p: _slice,
    pad_p: _pad,
    concatenate_p: _concatenate,
    rev_p: _rev,
    iota_p: _iota,
    dot_general_p: _dot_general,
    conv_general_dilated_p: _convolution,
    gather_p: _gather,
    **dict.fromkeys((scatter_p, scatter_add_p, scatter_mul_p, scatter_min_p, scatter_max_p), _scatter),
    dynamic_slice_p: _dynamic_slice,
    dynamic_update_slice_p: _dynamic_update_slice,
    pick_along_p: _by_places,
    place_along_p: _by_places,
    sort_p: _along("dimension"),
    top_k_p: _leading(1),
    fft_p: _fft,
    argmax_p: _reduction,
    argmin_p: _reduction,
    reduce_sum_p: _reduction,
    optimization_barrier_p: _one_by_one,
    name_p: _one_by_one,
    offload_p: _one_by_one,
    lu_pivots_to_permutation_p: _leading(1, trusted=frozenset({0})),
    lu_solve_p: _leading(2, trusted=frozenset({2})),
    random_seed_p: _elementwise,
    random_fold_in_p: _elementwise,
    random_bits_p: _random_bits,
    random_split_p: _leading(0),
    random_wrap_p: _leading(1),
    random_unwrap_p: _leading(0),
}

_FAMILIES: tuple[tuple[type, Callable[..., Rule]], ...] = (
    (WindowReduction, _window_reduction),
    (Reduction, _reduction),
    (Cumulative, _along("axis")),
    (MatrixOp, _leading(2)),
)
