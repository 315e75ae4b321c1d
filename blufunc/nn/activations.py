"""Activations: elementwise functions, and softmax with its variants.

A face. Each takes an array-like of any shape, and returns an array of its shape and dtype; integers become
float32, except in ``relu`` and others with integer results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axes_in, axis_in
from blufunc.nn import gelu_call
from blufunc.numpy.promotion import PYTHON_SCALARS, as_value, inexact, promote_dtypes
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

Axis = int | Sequence[int] | None


def as_inexact(x: Any) -> Any:
    """``x`` as a floating or complex array: integers and booleans become float32."""
    return inexact(bnp.asarray(x), "an activation")


def wide_of(x: Any) -> Any:
    """The dtype of softmax and losses of ``x``, and of their sums: float32 at least."""
    return bnp.promote_types(x.dtype, dtypes.float32)


def number(x: Any, name: str) -> Any:
    """A scalar or array option of the function called ``name``."""
    return x if x.__class__ in PYTHON_SCALARS else as_value(x, name)


def _sloped(value_and_slope: Callable[[Any], tuple[Any, Callable[[], Any]]]) -> Callable:
    """An elementwise function from its value and slope, with shared intermediates.

    The slope comes as a function, called only where a derivative is taken. Reverse mode then keeps one array,
    the slope, and multiplies once.
    """

    @custom_jvp
    def f(x):
        return value_and_slope(x)[0]

    @f.defjvp
    def f_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        value, slope = value_and_slope(x)
        return value, t * slope()

    return f


# -- rectifiers ------------------------------------------------------------------------------------


def _limited(value: Callable[[Any], Any], passes: Callable[[Any], Any]) -> Callable:
    """A clipping function that passes tangents where ``passes(x)`` holds."""

    @custom_jvp
    def f(x):
        return value(x)

    @f.defjvp
    def f_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        # the primal is f itself: the formula has other derivatives at the limits, which matter where x f(x)
        # is differentiated twice; select, since an infinite t times 0 is NaN
        return f(x), bnp.where(passes(x), t, 0)

    return f


_relu = _limited(lambda x: bnp.maximum(x, 0), lambda x: x > 0)
_relu6 = _limited(lambda x: bnp.clip(x, 0, 6), lambda x: (x > 0) & (x < 6))
_hard_tanh = _limited(lambda x: bnp.clip(x, -1, 1), lambda x: bnp.abs(x) <= 1)


def relu(x: ArrayLike) -> Array:
    """``max(x, 0)``. The derivative at 0 is 0, and NaN stays NaN."""
    return _relu(bnp.asarray(x))


def relu6(x: ArrayLike) -> Array:
    """``min(max(x, 0), 6)``. The derivative at 0 and at 6 is 0."""
    return _relu6(as_inexact(x))


def leaky_relu(x: ArrayLike, negative_slope: ArrayLike = 0.01) -> Array:
    """``x`` where ``x >= 0``, else ``negative_slope * x``."""
    x, negative_slope = as_inexact(x), number(negative_slope, "leaky_relu")
    return bnp.where(x >= 0, x, x * negative_slope)


def elu(x: ArrayLike, alpha: ArrayLike = 1.0) -> Array:
    """``x`` if ``x > 0``, else ``alpha * (exp(x) - 1)`` (Clevert et al., 1511.07289)."""
    x, alpha = as_inexact(x), number(alpha, "elu")
    above = x > 0
    # exp never gets a positive x: an infinity in the unselected branch would make the derivative NaN
    return bnp.where(above, x, bnp.expm1(bnp.where(above, 0, x)) * alpha)


def selu(x: ArrayLike) -> Array:
    """``elu`` scaled to preserve mean 0 and variance 1 (Klambauer, arXiv:1706.02515)."""
    return elu(x, 1.6732632423543772) * 1.0507009873554805


def celu(x: ArrayLike, alpha: ArrayLike = 1.0) -> Array:
    """``max(x, 0) + min(0, alpha * (exp(x / alpha) - 1))`` (Barron, arXiv:1704.07483).

    Smooth for every alpha.
    """
    x, alpha = as_inexact(x), number(alpha, "celu")
    return bnp.maximum(x, 0) + bnp.expm1(bnp.minimum(x, 0) / alpha) * alpha


def hard_tanh(x: ArrayLike) -> Array:
    """``x`` limited to [-1, 1]. The derivative at either bound is 1."""
    return _hard_tanh(bnp.asarray(x))


# -- smooth ones -----------------------------------------------------------------------------------


@_sloped
def _gelu_erf(x):
    gate = lax.erfc(x * -math.sqrt(0.5)) * 0.5
    density = lambda: bnp.exp(bnp.square(x) * -0.5) * (1 / math.sqrt(2 * math.pi))
    return x * gate, lambda: x * density() + gate


@_sloped
def _silu(x):
    gate = lax.logistic(x)
    value = x * gate
    return value, lambda: value * (1 - gate) + gate


@custom_jvp
def _softplus(x):
    return bnp.log1p(bnp.exp(-bnp.abs(x))) + bnp.maximum(x, 0)


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    # the primal is _softplus itself: its formula has parts with kinks at 0, wrong for higher derivatives
    (x,), (t,) = primals, tangents
    return _softplus(x), t * lax.logistic(x)


def gelu(x: ArrayLike, approximate: bool = True) -> Array:
    """``x * Phi(x)`` with the normal CDF Phi (Hendrycks & Gimpel, arXiv:1606.08415).

    Args:
      x: an array.
      approximate: use the paper's tanh formula, as GPT-2 does, instead of the error function. They differ by less
        than 5e-4.
    """
    return (gelu_call.gelu if approximate else _gelu_erf)(as_inexact(x))


def sigmoid(x: ArrayLike) -> Array:
    """``1 / (1 + exp(-x))``."""
    return lax.logistic(as_inexact(x))


def silu(x: ArrayLike) -> Array:
    """``x * sigmoid(x)``, also called swish (Elfwing et al., arXiv:1702.03118)."""
    return _silu(as_inexact(x))


swish = silu


def softplus(x: ArrayLike) -> Array:
    """``log(1 + exp(x))``, for every finite x without overflow."""
    return _softplus(as_inexact(x))


def log_sigmoid(x: ArrayLike) -> Array:
    """``log(sigmoid(x))``, for every finite x without overflow."""
    return -softplus(-as_inexact(x))


def soft_sign(x: ArrayLike) -> Array:
    """``x / (1 + abs(x))``."""
    x = as_inexact(x)
    return x / (bnp.abs(x) + 1)


def tanh(x: ArrayLike) -> Array:
    """The hyperbolic tangent."""
    return bnp.tanh(as_inexact(x))


def mish(x: ArrayLike) -> Array:
    """``x * tanh(softplus(x))`` (Misra, arXiv:1908.08681)."""
    x = as_inexact(x)
    return x * bnp.tanh(softplus(x))


def glu(x: ArrayLike, axis: int = -1) -> Array:
    """One half of ``x`` times the sigmoid of the other (Dauphin, arXiv:1612.08083).

    Raises:
      ShapeError: ``axis`` is of odd size.
    """
    x = as_inexact(x)
    axis = axis_in(axis, x.ndim, "glu")
    if x.shape[axis] % 2:
        raise errors.ShapeError(
            f"glu halves axis {axis} of an array of shape {tuple(x.shape)}, and {x.shape[axis]} is odd.",
            where=source.here(),
            fix="give the axis an even size: the first half is the value, the second the gate",
        )
    value, gate = bnp.split(x, 2, axis)
    return value * lax.logistic(gate)


# -- piecewise ones --------------------------------------------------------------------------------


def identity(x: ArrayLike) -> Array:
    """``x`` itself, as an array."""
    return bnp.asarray(x)


def hard_sigmoid(x: ArrayLike) -> Array:
    """``relu6(x + 3) / 6``: a piecewise linear sigmoid."""
    return relu6(as_inexact(x) + 3) / 6


def hard_silu(x: ArrayLike) -> Array:
    """``x * hard_sigmoid(x)``, also called hard_swish (Howard, arXiv:1905.02244)."""
    x = as_inexact(x)
    return x * hard_sigmoid(x)


hard_swish = hard_silu


def sparse_plus(x: ArrayLike) -> Array:
    """0 up to -1, ``x`` from 1 on, ``(x + 1)**2 / 4`` between: a sparse ``softplus``."""
    x = as_inexact(x)
    above = x >= 1
    # by selects: at -1 two clips would each pass half of a tangent
    between = bnp.where(x <= -1, -1, bnp.where(above, 1, x))
    return bnp.where(above, x, bnp.square(between + 1) / 4)


def sparse_sigmoid(x: ArrayLike) -> Array:
    """``clip(x + 1, 0, 2) / 2``, the derivative of ``sparse_plus``."""
    return bnp.clip(as_inexact(x) + 1, 0, 2) * 0.5


def squareplus(x: ArrayLike, b: ArrayLike = 4) -> Array:
    """``(x + sqrt(x**2 + b)) / 2`` (Barron, arXiv:2112.11687)."""
    x = as_inexact(x)
    return (bnp.sqrt(bnp.square(x) + number(b, "squareplus")) + x) * 0.5


@_sloped
def _log1mexp(x):
    near = x < math.log(2)
    # each branch gets values that are harmless where the other is selected
    small, large = bnp.where(near, x, 1), bnp.where(near, 1, x)
    value = bnp.where(near, bnp.log(-bnp.expm1(-small)), bnp.log1p(-bnp.exp(-large)))
    return value, lambda: 1 / bnp.expm1(x)


def log1mexp(x: ArrayLike) -> Array:
    """``log(1 - exp(-x))`` for x >= 0, to full precision (Mächler, log1mexp note)."""
    return _log1mexp(as_inexact(x))


# -- softmax and its variants ----------------------------------------------------------------------


def spread(x: Any, shape: Sequence[int], axes: tuple[int, ...]) -> Any:
    """``x``, reduced over ``axes``, broadcast back along them in one operation."""
    return lax.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d not in axes])


def shifted(x: Any, axes: tuple[int, ...]) -> Any:
    """``x`` minus its maximum over ``axes``, a constant: softmax is shift-invariant."""
    return x - spread(bnp.max(lax.stop_gradient(x), axis=axes, initial=-math.inf), x.shape, axes)


def _softmax_value(x, axes):
    unnormalized = bnp.exp(shifted(x, axes))
    return unnormalized / spread(bnp.sum(unnormalized, axis=axes), x.shape, axes)


softmax_over = custom_jvp(_softmax_value, nondiff_argnums=(1,))


@softmax_over.defjvp
def _softmax_jvp(axes, primals, tangents):
    (x,), (t,) = primals, tangents
    p = _softmax_value(x, axes)
    pt = p * t
    return p, pt + p * spread(-bnp.sum(pt, axis=axes), x.shape, axes)


def softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None) -> Array:
    """``exp(x) / sum(exp(x))`` over ``axis``.

    Args:
      x: an array.
      axis: an axis, several, or None for all of them.
      where: booleans that broadcast against ``x``. Elements where they are False count as minus infinity: their
        probability is 0, and so is every probability where they are False along the whole axis.
    """
    x = as_inexact(x)
    axes = axes_in(axis, x.ndim, "softmax")
    if where is None:
        return softmax_over(x, axes)
    return bnp.where(where, softmax_over(bnp.where(where, x, -math.inf), axes), 0)


def log_softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None) -> Array:
    """Logarithm of ``softmax``, accurate for small values; -inf where masked."""
    x = as_inexact(x)
    axes = axes_in(axis, x.ndim, "log_softmax")
    x = shifted(x if where is None else bnp.where(where, x, -math.inf), axes)
    # adding a negated small array: the backward pass of a subtraction would negate the large one
    result = x + spread(-bnp.log(bnp.sum(bnp.exp(x), axis=axes)), x.shape, axes)
    return result if where is None else bnp.where(where, result, -math.inf)


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
) -> Array: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> Array | tuple[Array, Array]: ...


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> Any:
    """``log(sum(b * exp(a)))`` over ``axis``, without overflow.

    Args:
      a: an array.
      axis: an axis, several, or None for all of them.
      b: factors that broadcast against ``a``; 1 by default. A negative sum gives NaN, unless its sign is asked for.
      keepdims: keep the summed axes, with size 1.
      return_sign: return the logarithm of the sum's absolute value, and its sign.
      where: booleans that broadcast against ``a``: which elements to sum. A sum of none is minus infinity.
    """
    a = as_inexact(a)
    if b is not None:
        a, b = bnp.broadcast_arrays(*promote_dtypes("logsumexp", a, number(b, "logsumexp"), inexact=True))
    if return_sign and dtypes.is_complex(a.dtype):
        raise errors.DtypeError(
            f"logsumexp with a sign takes real numbers, not {a.aval}.",
            where=source.here(),
            fix="leave return_sign out: the logarithm is complex",
        )
    # a term that does not count has no part in the maximum either: the others would vanish, or it would overflow
    if b is not None:
        counts = bnp.not_equal(b, 0)
        where = counts if where is None else bnp.logical_and(counts, where)
    if where is not None:
        a = bnp.where(where, a, -math.inf)
    axes = axes_in(axis, a.ndim, "logsumexp")
    # a real shift: that of a complex maximum would move the phase out of (-pi, pi]
    top = bnp.max(lax.stop_gradient(bnp.real(a)), axis=axes, initial=-math.inf)
    top = bnp.where(bnp.isfinite(top), top, 0)
    terms = bnp.exp(a - spread(top, a.shape, axes))
    total = bnp.sum(terms if b is None else terms * b, axis=axes)
    results = [bnp.log(bnp.abs(total) if return_sign else total) + top]
    if return_sign:
        results.append(bnp.sign(total))
    if keepdims:
        results = [bnp.expand_dims(x, axes) for x in results]
    return tuple(results) if return_sign else results[0]


def logmeanexp(
    x: ArrayLike, axis: Axis = None, where: ArrayLike | None = None, keepdims: bool = False
) -> Array:
    """``log(mean(exp(x)))`` over ``axis``, without overflow.

    Args:
      x: an array.
      axis: an axis, several, or None for all of them.
      where: booleans that broadcast against ``x``: which elements to average.
      keepdims: keep the axes, with size 1.
    """
    x = as_inexact(x)
    axes = axes_in(axis, x.ndim, "logmeanexp")
    total = logsumexp(x, axes, keepdims=keepdims, where=where)
    if where is None:
        return total - math.log(max(math.prod([x.shape[d] for d in axes]), 1))
    count = bnp.sum(bnp.broadcast_to(where, x.shape).astype(total.dtype), axis=axes, keepdims=keepdims)
    return total - bnp.log(count)


def one_hot(x: ArrayLike, num_classes: int, *, dtype: DTypeLike = float, axis: int = -1) -> Array:
    """One-hot vectors of the integers in ``x``; all zeros for those out of range.

    Args:
      x: an array of integers, of any shape; of floats, those that are whole.
      num_classes: the length of the vectors.
      dtype: the dtype of the result.
      axis: where the new axis stands in the result.
    Returns:
      an array of one more axis than ``x``, of size ``num_classes``.
    Raises:
      DtypeError: ``x`` does not hold real numbers.
      ValueRangeError: the result has no axis ``axis``.
    """
    x = bnp.asarray(x)
    if not (dtypes.is_integer(x.dtype) or dtypes.is_floating(x.dtype)):
        raise errors.DtypeError(
            f"one_hot takes integers, not {x.dtype}.",
            where=source.here(),
            fix="convert first: x.astype('int32')",
        )
    axis = axis_in(axis, x.ndim + 1, "one_hot")
    if x.dtype.itemsize < 4:
        # int8 would count the classes from 128 on as negative, and float16 round those from 2048 on
        x = x.astype(dtypes.int32 if dtypes.is_integer(x.dtype) else dtypes.float32)
    classes = lax.broadcasted_iota(x.dtype, (1,) * axis + (num_classes,) + (1,) * (x.ndim - axis), axis)
    return bnp.equal(bnp.expand_dims(x, axis), classes).astype(dtype)
