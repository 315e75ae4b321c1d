"""Reductions by any associative function, over axes and over sliding windows.

Face: part of ``blufunc.lax``. If staging shows that the function is a sum, a product, an extremum or a
logical operation, its primitive is used. Any other function is mapped over whole arrays that are combined
pairwise, in log2(n) steps, so that derivatives are those of the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import axes_in, ints
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import reduce as reductions
from blufunc.core.ops.elementwise import operand as operand_like
from blufunc.core.ops.reduce import limit
from blufunc.core.ops.reduce_window import (
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
)
from blufunc.core.ops.shape import pad, slice_
from blufunc.core.ops.sliding import (
    Ints,
    Pads,
    check_slide,
    count,
    dilated,
    padtype_to_pads,
    read_factors,
    read_pads,
)
from blufunc.core.primitives.linear_ops import broadcast_to, reduce_sum_p, reshape, transpose
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.batching.vmap import vmap

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

T = TypeVar("T")


@overload
def reduce(
    operands: ArrayLike, init_values: ArrayLike, computation: Callable[..., Any], dimensions: Sequence[int]
) -> Array: ...
@overload
def reduce(
    operands: T, init_values: Any, computation: Callable[..., Any], dimensions: Sequence[int]
) -> T: ...


def reduce(operands: Any, init_values: Any, computation: Callable, dimensions: Sequence[int]) -> Any:
    """Reduce all elements along ``dimensions`` by an associative function.

    Args:
      operands: an array, or a pytree of arrays of one shape.
      init_values: for each a scalar, the identity of ``computation``.
      computation: ``(x, y) -> z`` on scalars, or on pytrees of them like ``operands``: associative and commutative.
      dimensions: the axes to reduce.
    Returns:
      arrays of the operands' other axes, as a pytree like ``operands``.
    Raises:
      TreeError, ShapeError, DtypeError: ``computation`` changes the structure or types, or operands and initial
        values do not match.
    """
    problem = _Reduction("reduce", operands, init_values, computation)
    axes = axes_in(tuple(ints(dimensions, "reduce", "dimensions")), problem.ndim, "reduce")
    operation = problem.operation()
    if operation is not None:
        return problem.with_init([_REDUCTIONS[operation].bind(problem.xs[0], axes=axes)], operation)
    kept = tuple([d for d in range(problem.ndim) if d not in axes])
    shape = tuple([problem.shape[d] for d in kept])
    n = math.prod([problem.shape[d] for d in axes])
    if not n or 0 in shape:
        return problem.result([broadcast_to(v, shape) for v in problem.inits])
    xs = [reshape(transpose(x, (*axes, *kept)), (n, *shape)) for x in problem.xs]
    rest = []  # leftover elements of odd lengths
    while n > 1:
        if n % 2:
            rest.append([_rows(x, n - 1, n) for x in xs])
        n //= 2
        xs = problem.combine([_rows(x, 0, n) for x in xs], [_rows(x, n, 2 * n) for x in xs])
    for row in reversed(rest):
        xs = problem.combine(xs, row)
    return problem.with_init([reshape(x, shape) for x in xs])


@overload
def reduce_window(
    operand: ArrayLike,
    init_value: ArrayLike,
    computation: Callable[..., Any],
    window_dimensions: Any,
    window_strides: Any = None,
    padding: Any = "VALID",
    base_dilation: Any = None,
    window_dilation: Any = None,
) -> Array: ...
@overload
def reduce_window(
    operand: T,
    init_value: Any,
    computation: Callable[..., Any],
    window_dimensions: Any,
    window_strides: Any = None,
    padding: Any = "VALID",
    base_dilation: Any = None,
    window_dilation: Any = None,
) -> T: ...


def reduce_window(
    operand: Any,
    init_value: Any,
    computation: Callable,
    window_dimensions: Any,
    window_strides: Any = None,
    padding: Any = "VALID",
    base_dilation: Any = None,
    window_dilation: Any = None,
) -> Any:
    """Reduce the elements of each window by an associative function.

    Args:
      operand: an array, or a pytree of arrays of one shape.
      init_value: for each a scalar, the identity of ``computation``: padding and holes hold it.
      computation: ``(x, y) -> z`` on scalars, or on pytrees of them like ``operand``: associative and commutative.
      window_dimensions: the size of a window along each axis.
      window_strides: distance between window starts along each axis; 1 by default.
      padding: 'VALID', 'SAME', 'SAME_LOWER' (see ``padtype_to_pads``) or a pair of ints for each axis, the elements
        to add before and after; negative ones crop.
      base_dilation: distance of operand elements along each axis, with holes between them.
      window_dilation: distance of a window's elements along each axis.
    Returns:
      arrays with one element per window along each axis, as a pytree like ``operand``.
    Raises:
      TreeError, ShapeError, DtypeError: ``computation`` changes the structure or types, or operands and initial
        values do not match.
    """
    name = "reduce_window"
    problem = _Reduction(name, operand, init_value, computation)
    ndim = problem.ndim
    slide: dict[str, Any] = {"window_dimensions": ints(window_dimensions, name, "window_dimensions")}
    for what, xs in (
        ("window_strides", window_strides),
        ("base_dilation", base_dilation),
        ("window_dilation", window_dilation),
    ):
        slide[what] = read_factors(xs, ndim, name, what)
    named = isinstance(padding, str)
    if not named:
        slide["padding"] = read_pads(padding, name)
    try:
        check_slide(name, ndim, slide, [k for k in slide if k != "padding"])
    except errors.BlufuncError as e:
        raise source.located(e) from None
    if named:
        reach = [
            dilated(w, d) for w, d in zip(slide["window_dimensions"], slide["window_dilation"], strict=True)
        ]
        slide["padding"] = tuple(padtype_to_pads(problem.shape, reach, slide["window_strides"], padding))
    operation = problem.operation()
    if operation in _WINDOW_REDUCTIONS:
        return problem.with_init([_WINDOW_REDUCTIONS[operation].bind(problem.xs[0], **slide)], operation)
    # padding holds the identity; for an unknown function that must be the initial value
    fill: list[Array] = problem.inits
    if operation is not None:
        dtype = problem.xs[0].dtype
        fill = [scalar(np.asarray(_IDENTITIES[operation](dtype)).item(), dtype)]
    return problem.with_init(_combined_windows(problem, fill, **slide), operation)


def _combined_windows(
    problem: _Reduction,
    fill: list[Array],
    *,
    window_dimensions: Ints,
    window_strides: Ints,
    padding: Pads,
    base_dilation: Ints,
    window_dilation: Ints,
) -> list[Array]:
    """Windows by doubling: two of size k make one of 2k, per axis, at all positions."""
    config = [(lo, hi, d - 1) for (lo, hi), d in zip(padding, base_dilation, strict=True)]
    counts = tuple(
        [
            count(*s)
            for s in zip(
                problem.shape, window_dimensions, window_strides, padding, base_dilation, window_dilation, strict=True
            )
        ]
    )  # fmt: skip
    if 0 in counts:
        return [broadcast_to(v, counts) for v in fill]
    xs = [pad(x, v, config) for x, v in zip(problem.xs, fill, strict=True)]
    lines = zip(window_dimensions, window_strides, window_dilation, counts, strict=True)
    for axis, line in enumerate(lines):
        xs = _combined_along(problem, xs, axis, *line)
    return xs


def _combined_along(
    problem: _Reduction, xs: list[Array], axis: int, window: int, stride: int, spacing: int, n: int
) -> list[Array]:
    """The first ``n`` windows along one axis."""
    size, length = 1, xs[0].aval.shape[axis]
    # windows whose size is the lower bits of the requested size; the next one begins at the offset
    done: list[Array] = []
    offset, reach = 0, (n - 1) * stride + 1
    while True:
        if window & size:
            part = [_line(x, axis, offset, offset + reach, stride) for x in xs]
            done = problem.combine(done, part) if done else part
            offset += size * spacing
        if 2 * size > window:
            return done
        length -= size * spacing
        near = [_line(x, axis, 0, length) for x in xs]
        far = [_line(x, axis, size * spacing, size * spacing + length) for x in xs]
        xs = problem.combine(near, far)
        size *= 2


def _start(value: Any, like: Array) -> Any:
    """An initial value; infinity stands for the limit of an integer dtype."""
    if isinstance(value, (float, np.floating)) and math.isinf(value) and dtypes.is_integer(like.aval.dtype):
        value = limit(like.aval.dtype, bool(value > 0))
    return operand_like(value, like)


class _Reduction:
    """Validated operands, initial values and function of a reduction.

    Attributes:
      xs: the operands.
      inits: their initial values, of rank 0.
    """

    def __init__(self, name: str, operands: Any, init_values: Any, computation: Callable):
        check_callable(computation, name)
        self.name, self.computation = name, computation
        leaves, self.tree = tree.flatten(operands)
        inits, init_tree = tree.flatten(init_values)
        if self.tree != init_tree or not leaves:
            raise errors.TreeError(
                f"{name}: operands are {self.tree} and initial values {init_tree}.",
                where=source.here(),
                fix="give one initial value for each operand, and one operand at least",
            )
        self.xs = [lift(x, f"an operand of {name}") for x in leaves]
        self.shape = self.xs[0].aval.shape
        self.ndim = len(self.shape)
        self.inits = [self._init(_start(v, x), x.aval) for v, x in zip(inits, self.xs, strict=True)]
        if any(x.aval.shape != self.shape for x in self.xs):
            raise errors.ShapeError(
                f"{name} takes operands of one shape, not {', '.join(str(x.aval) for x in self.xs)}.",
                where=source.here(),
                fix="broadcast them first: bnp.broadcast_arrays",
            )
        self.numbers = [x.aval.with_shape(()).strong() for x in self.xs]
        self.jaxpr = stage(self._flat, [*self.numbers, *self.numbers], name)

    def _init(self, value: Any, like: ShapedArray) -> Array:
        if value.aval.ndim:
            raise errors.ShapeError(
                f"{self.name}: an initial value is one number, not {value.aval}.",
                where=source.here(),
                fix="init[()]",
            )
        if value.aval.dtype != like.dtype:
            raise errors.DtypeError(
                f"{self.name}: the operand is {like}, its initial value {value.aval}.",
                where=source.here(),
                fix="give a Python number, or convert it to the operand's dtype",
            )
        return value

    def _flat(self, *args: Any) -> list[Any]:
        """The function on flat scalars."""
        n = len(args) // 2
        out = self.computation(tree.unflatten(self.tree, args[:n]), tree.unflatten(self.tree, args[n:]))
        leaves, out_tree = tree.flatten(out)
        if out_tree != self.tree:
            raise errors.TreeError(
                f"{self.name}: the function takes {self.tree} and gives {out_tree}.",
                where=source.here(),
                fix="return a pytree like its arguments",
            )
        values = [operand_like(x, like) for x, like in zip(leaves, args, strict=False)]
        for value, like in zip(values, args, strict=False):
            if value.aval.shape or value.aval.dtype != like.aval.dtype:
                raise errors.DtypeError(
                    f"{self.name}: the function takes {like.aval} and gives {value.aval}.",
                    where=source.here(),
                    fix="return numbers of the dtype of its arguments",
                )
        return values

    def operation(self) -> Primitive | None:
        """The primitive that the function consists of, if it is a binary operation."""
        if len(self.jaxpr.eqns) != 1 or len(self.xs) != 1:
            return None
        (eqn,) = self.jaxpr.eqns
        x, y = self.jaxpr.invars
        if eqn.prim not in _IDENTITIES or eqn.outvars[0] is not self.jaxpr.outvars[0]:
            return None
        return eqn.prim if (eqn.invars[0], eqn.invars[1]) in ((x, y), (y, x)) else None

    def from_identity(self, operation: Primitive) -> bool:
        """True if the initial value is known to be the identity of the operation."""
        value = self.inits[0]
        if not isinstance(value, ConcreteArray):
            return False
        return bool(np.asarray(value) == _IDENTITIES[operation](value.dtype))

    def combine(self, xs: list[Array], ys: list[Array]) -> list[Array]:
        """The function mapped over arrays of one shape."""
        shape = xs[0].aval.shape
        flat = [reshape(x, (math.prod(shape),)) for x in (*xs, *ys)]
        return [reshape(x, shape) for x in vmap(self._flat)(*flat)]

    def with_init(self, xs: list[Array], operation: Primitive | None = None) -> Any:
        """``xs`` combined with the initial values, unless those are the identity."""
        if operation is None or not self.from_identity(operation):
            xs = self.combine([broadcast_to(v, xs[0].aval.shape) for v in self.inits], xs)
        return self.result(xs)

    def result(self, xs: list[Array]) -> Any:
        """``xs`` as a pytree like the operands."""
        return tree.unflatten(self.tree, xs)


def _rows(x: Array, start: int, stop: int) -> Array:
    return slice_(x, (start, *[0] * (x.aval.ndim - 1)), (stop, *x.aval.shape[1:]))


def _line(x: Array, axis: int, start: int, stop: int, stride: int = 1) -> Array:
    """The elements from ``start`` to ``stop`` along an axis, every ``stride``-th."""
    shape = x.aval.shape
    if start == 0 and stop == shape[axis] and stride == 1:
        return x
    starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
    starts[axis], limits[axis], strides[axis] = start, stop, stride
    return slice_(x, starts, limits, strides)


_ALL_ONES = lambda dtype: np.asarray(True) if dtypes.is_bool(dtype) else np.invert(np.zeros((), dtype))

# Identity and reduction primitives of each operation.
_IDENTITIES: dict[Primitive, Callable[[np.dtype], Any]] = {
    ew.add_p: lambda dtype: 0,
    ew.mul_p: lambda dtype: 1,
    ew.max_p: lambda dtype: limit(dtype, False),
    ew.min_p: lambda dtype: limit(dtype, True),
    ew.and_p: _ALL_ONES,
    ew.or_p: lambda dtype: 0,
    ew.xor_p: lambda dtype: 0,
}
_REDUCTIONS: dict[Primitive, Primitive] = {
    ew.add_p: reduce_sum_p,
    ew.mul_p: reductions.reduce_prod_p,
    ew.max_p: reductions.reduce_max_p,
    ew.min_p: reductions.reduce_min_p,
    ew.and_p: reductions.reduce_and_p,
    ew.or_p: reductions.reduce_or_p,
    ew.xor_p: reductions.reduce_xor_p,
}
_WINDOW_REDUCTIONS: dict[Primitive, Primitive] = {
    ew.add_p: reduce_window_sum_p,
    ew.max_p: reduce_window_max_p,
    ew.min_p: reduce_window_min_p,
}
