"""The operations that programs are made of, under the names of JAX's ``lax``.

Face. Functions here are strict: operands of one dtype, equal shapes or rank 0, axes and sizes static.
They neither promote nor broadcast; ``blufunc.numpy`` does. Each is one primitive, or close to it: the
equation that it makes has the name of its primitive (``add_p`` and so on, for rules of one's own).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core import backend, dtypes, source, structure
from blufunc.core.array import from_numpy, lift, scalar
from blufunc.core.axes import ints, shape_of, static_int
from blufunc.core.ops.cumulative import (
    cumlogsumexp,
    cumlogsumexp_p,
    cummax,
    cummax_p,
    cummin,
    cummin_p,
    cumprod,
    cumprod_p,
    cumsum,
    cumsum_p,
)
from blufunc.core.ops.dot import Precision, dot, dot_general, dot_general_p
from blufunc.core.ops.dynamic import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_slice_p,
    dynamic_update_index_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
    dynamic_update_slice_p,
)
from blufunc.core.ops.elementwise import (
    abs,
    abs_p,
    acos,
    acos_p,
    acosh,
    acosh_p,
    add,
    add_p,
    and_p,
    asin,
    asin_p,
    asinh,
    asinh_p,
    atan,
    atan2,
    atan2_p,
    atan_p,
    atanh,
    atanh_p,
    bitcast_p,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    cbrt,
    cbrt_p,
    ceil,
    ceil_p,
    clamp,
    clamp_p,
    complex_p,
    conj,
    conj_p,
    convert_p,
    copy_p,
    cos,
    cos_p,
    cosh,
    cosh_p,
    div,
    div_p,
    eq,
    eq_p,
    erf,
    erf_inv,
    erf_inv_p,
    erf_p,
    erfc,
    erfc_p,
    exp,
    exp2,
    exp2_p,
    exp_p,
    expm1,
    expm1_p,
    floor,
    floor_p,
    ge,
    ge_p,
    gt,
    gt_p,
    imag,
    imag_p,
    integer_pow,
    integer_pow_p,
    is_finite,
    is_finite_p,
    le,
    le_p,
    log,
    log1p,
    log1p_p,
    log_p,
    logistic,
    logistic_p,
    lt,
    lt_p,
    max,
    max_p,
    min,
    min_p,
    mul,
    mul_p,
    ne,
    ne_p,
    neg,
    neg_p,
    nextafter,
    nextafter_p,
    not_p,
    or_p,
    population_count,
    population_count_p,
    pow,
    pow_p,
    real,
    real_p,
    reduce_precision,
    reduce_precision_p,
    rem,
    rem_p,
    round,
    round_p,
    rsqrt,
    rsqrt_p,
    select,
    select_p,
    shift_left,
    shift_left_p,
    shift_right_arithmetic,
    shift_right_arithmetic_p,
    shift_right_logical,
    shift_right_logical_p,
    sign,
    sign_p,
    sin,
    sin_p,
    sinh,
    sinh_p,
    sqrt,
    sqrt_p,
    square,
    square_p,
    stop_gradient_p,
    sub,
    sub_p,
    tan,
    tan_p,
    tanh,
    tanh_p,
    trunc,
    trunc_p,
    xor_p,
    zeros_like,
)
from blufunc.core.ops.elementwise import bitcast as _bitcast
from blufunc.core.ops.elementwise import complex_ as complex
from blufunc.core.ops.elementwise import convert as _convert
from blufunc.core.ops.elementwise import stop_gradient as _stop_gradient
from blufunc.core.ops.fft import FftType, fft, fft_p
from blufunc.core.ops.gather_scatter import (
    gather,
    gather_p,
    scatter,
    scatter_add,
    scatter_add_p,
    scatter_max,
    scatter_max_p,
    scatter_min,
    scatter_min_p,
    scatter_mul,
    scatter_mul_p,
    scatter_p,
    scatter_sub,
)
from blufunc.core.ops.reduce import (
    argmax,
    argmax_p,
    argmin,
    argmin_p,
    reduce_and,
    reduce_and_p,
    reduce_max,
    reduce_max_p,
    reduce_min,
    reduce_min_p,
    reduce_or,
    reduce_or_p,
    reduce_prod,
    reduce_prod_p,
    reduce_xor,
    reduce_xor_p,
)
from blufunc.core.ops.shape import (
    concatenate,
    concatenate_p,
    expand_dims,
    index_in_dim,
    iota_p,
    pad,
    pad_p,
    rev,
    rev_p,
    slice_in_dim,
    slice_p,
    squeeze,
)
from blufunc.core.ops.shape import iota as _iota
from blufunc.core.ops.shape import slice_ as slice
from blufunc.core.ops.sort import sort, sort_key_val, sort_p, top_k, top_k_p
from blufunc.core.ops.windows import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers
from blufunc.core.structure import (
    add_any_p,
    broadcast_in_dim_p,
    reduce_sum_p,
    reshape_p,
    transpose_p,
)
from blufunc.core.trace import EVAL, Value, state
from blufunc.core.tree import map as _tree_map
from blufunc.lax import linalg
from blufunc.lax.convolution import (
    ConvDimensionNumbers,
    conv,
    conv_dimension_numbers,
    conv_general_dilated,
    conv_general_dilated_local,
    conv_general_dilated_p,
    conv_general_dilated_patches,
    conv_transpose,
    conv_with_general_padding,
    padtype_to_pads,
)
from blufunc.lax.special import (
    bessel_i0e,
    bessel_i0e_p,
    bessel_i1e,
    bessel_i1e_p,
    betainc,
    digamma,
    digamma_p,
    igamma,
    igamma_grad_a,
    igamma_grad_a_p,
    igamma_p,
    igammac,
    igammac_p,
    lgamma,
    lgamma_p,
    polygamma,
    polygamma_p,
    random_gamma_grad,
    random_gamma_grad_p,
    regularized_incomplete_beta_p,
    zeta,
    zeta_p,
)
from blufunc.lax.windowed import (
    reduce,
    reduce_window,
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
    window_argmax_p,
    window_argmin_p,
)
from blufunc.lax.derived import (
    approx_max_k,
    approx_min_k,
    broadcast_shapes,
    clz,
    dtype,
    reciprocal,
    scatter_apply,
    split,
    stack,
    tile,
)
from blufunc.parallel.collectives import (
    all_gather,
    all_gather_p,
    all_to_all,
    all_to_all_p,
    axis_index,
    axis_index_p,
    axis_size,
    pmax,
    pmax_p,
    pmean,
    pmin,
    pmin_p,
    ppermute,
    ppermute_p,
    pshuffle,
    psum,
    psum_p,
    psum_scatter,
    psum_scatter_p,
)
from blufunc.transforms.associative_scan import associative_scan
from blufunc.transforms.cond import cond, cond_p, switch
from blufunc.transforms.custom_root import custom_root
from blufunc.transforms.linear_solve import custom_linear_solve, linear_solve_p
from blufunc.transforms.loops import fori_loop, map
from blufunc.transforms.scan import scan, scan_p
from blufunc.transforms.while_loop import while_loop, while_p

# -- conversion ------------------------------------------------------------------------------------


def convert_element_type(operand: Any, new_dtype: Any) -> Value:
    """The operand as another dtype; floats become integers toward zero, complex numbers lose their imaginary part."""
    return _convert(operand, dtypes.as_dtype(new_dtype))


def bitcast_convert_type(operand: Any, new_dtype: Any) -> Value:
    """The bits of the operand as another dtype: narrower ones get a last axis of parts, wider ones join one."""
    return _bitcast(operand, dtypes.as_dtype(new_dtype))


def stop_gradient(x: Any) -> Any:
    """x, a pytree, as a constant to every derivative."""
    return _tree_map(_stop_gradient, x)


def select_n(which: Any, *cases: Any) -> Value:
    """Elementwise ``cases[which]``: ``which`` is boolean, for two cases, or an int32 for any number."""
    which = lift(which)
    if dtypes.is_bool(which.aval.dtype):
        if len(cases) != 2:
            raise errors.ArgumentError(
                f"select_n by a boolean takes 2 cases, not {len(cases)}.",
                where=source.here(),
                fix="convert which to int32",
            )
        return select(which, cases[1], cases[0])
    if not cases:
        raise errors.ArgumentError("select_n needs a case.", where=source.here())
    result = lift(cases[-1])
    for i in range(len(cases) - 2, -1, -1):
        result = select(eq(which, i), cases[i], result)
    return result


# -- shapes ----------------------------------------------------------------------------------------


def broadcast_in_dim(operand: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Value:
    """The operand with its axis i as axis ``broadcast_dimensions[i]`` of ``shape``, repeated along the others."""
    return structure.broadcast_in_dim(
        lift(operand),
        shape_of(ints(shape, "broadcast_in_dim", "shape"), "broadcast_in_dim"),
        ints(broadcast_dimensions, "broadcast_in_dim", "broadcast_dimensions"),
    )


def broadcast(operand: Any, sizes: Sequence[int]) -> Value:
    """The operand repeated along new leading axes of the given sizes."""
    x, sizes = lift(operand), shape_of(ints(sizes, "broadcast", "sizes"), "broadcast")
    n = len(sizes)
    return structure.broadcast_in_dim(x, (*sizes, *x.aval.shape), tuple(range(n, n + x.aval.ndim)))


def reshape(operand: Any, new_sizes: Sequence[int], dimensions: Sequence[int] | None = None) -> Value:
    """The elements in row-major order (of the axes in the order ``dimensions``) in another shape."""
    x = lift(operand)
    if dimensions is not None:
        x = structure.transpose(x, ints(dimensions, "reshape", "dimensions"))
    return structure.reshape(x, ints(new_sizes, "reshape", "new_sizes"))


def transpose(operand: Any, permutation: Sequence[int]) -> Value:
    """The operand with its axes in another order: axis i of the result is axis ``permutation[i]``."""
    return structure.transpose(lift(operand), ints(permutation, "transpose", "permutation"))


def collapse(operand: Any, start_dimension: int, stop_dimension: int | None = None) -> Value:
    """The operand with its axes from ``start_dimension`` up to ``stop_dimension`` merged into one."""
    x = lift(operand)
    s, n = x.aval.shape, x.aval.ndim
    start_dimension = static_int(start_dimension, "collapse", "start_dimension")
    if stop_dimension is not None:
        stop_dimension = static_int(stop_dimension, "collapse", "stop_dimension")
    stop = (
        n
        if stop_dimension is None
        else stop_dimension % (n + 1)
        if stop_dimension >= 0
        else n + stop_dimension
    )
    start = start_dimension if start_dimension >= 0 else n + start_dimension
    return structure.reshape(x, (*s[:start], math.prod(s[start:stop]), *s[stop:]))


def reduce_sum(operand: Any, axes: Sequence[int]) -> Value:
    """The sum over ``axes``, in the operand's dtype; half precisions add in float32."""
    return structure.reduce_sum(lift(operand), ints(axes, "reduce_sum", "axes"))


def batch_matmul(lhs: Any, rhs: Any, precision: Any = None) -> Value:
    """The matrix products of the last two axes; the other axes agree."""
    x, y = lift(lhs), lift(rhs)
    n = x.aval.ndim
    if n < 2 or y.aval.ndim != n:
        raise errors.ShapeError(
            f"batch_matmul takes two arrays of one rank, of 2 or more, not {x.aval} and {y.aval}.",
            where=source.here(),
            fix="use bnp.matmul, which broadcasts",
        )
    lead = tuple(range(n - 2))
    return dot_general(x, y, (((n - 1,), (n - 2,)), (lead, lead)), precision)


# -- creation --------------------------------------------------------------------------------------


def full(shape: Sequence[int], fill_value: Any, dtype: Any = None, *, device: Any = None) -> Value:
    """An array of ``shape`` filled with a number, of its dtype (32-bit for Python numbers) or ``dtype``."""
    shape = shape_of(ints(shape, "full", "shape"), "full")
    if isinstance(fill_value, Value):
        value = fill_value if dtype is None else convert_element_type(fill_value, dtype)
        return structure.broadcast_to(value, shape)
    own = lift(fill_value, "the fill value").aval
    kind = dtypes.as_dtype(dtype) if dtype is not None else own.dtype
    if own.ndim:
        raise errors.ShapeError(
            f"full takes one number, not {own}.", where=source.here(), fix="use bnp.broadcast_to(x, shape)"
        )
    if dtypes.is_complex(own.dtype) and not dtypes.is_complex(kind):
        raise errors.DtypeError(
            f"full: {fill_value!r:.60} is complex and cannot become {dtypes.short_name(kind)}.",
            where=source.here(),
            fix="fill with the real part, or ask for dtype='complex64'",
        )
    if state.trace is EVAL:
        # the number on its device first, so that the array is made there; never the memoised constant itself
        place = device or backend.default_device()
        return structure.broadcast_to(from_numpy(np.asarray(fill_value, kind), place), shape)
    return broadcast_in_dim_p.bind(scalar(np.asarray(fill_value).item(), kind), shape=shape, dims=())


def full_like(x: Any, fill_value: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> Value:
    """An array of the shape and dtype of x, unless given, filled with a number."""
    aval = lift(x).aval
    return full(aval.shape if shape is None else shape, fill_value, aval.dtype if dtype is None else dtype)


def iota(dtype: Any, size: int) -> Value:
    """``0, 1, ..., size - 1``: an array of rank 1."""
    return _iota(dtypes.as_dtype(dtype), (size,), 0)


def broadcasted_iota(dtype: Any, shape: Sequence[int], dimension: int) -> Value:
    """An array of ``shape`` whose elements are their position along ``dimension``."""
    return _iota(dtypes.as_dtype(dtype), shape, dimension)


__all__ = [
    # functions
    "GatherDimensionNumbers", "GatherScatterMode", "ScatterDimensionNumbers", "abs", "acos",
    "acosh", "add", "argmax", "argmin", "asin", "asinh", "atan", "atan2", "atanh", "batch_matmul",
    "bitcast_convert_type", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "broadcast",
    "broadcast_in_dim", "broadcasted_iota", "cbrt", "ceil", "clamp", "collapse", "complex",
    "concatenate", "conj", "convert_element_type", "cos", "cosh", "cumlogsumexp", "cummax",
    "cummin", "cumprod", "cumsum", "div", "dot", "dot_general", "dynamic_index_in_dim",
    "dynamic_slice", "dynamic_slice_in_dim", "dynamic_update_index_in_dim", "dynamic_update_slice",
    "dynamic_update_slice_in_dim", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims",
    "expm1", "floor", "full", "full_like", "gather", "ge", "gt", "imag", "index_in_dim",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "pad", "population_count", "pow", "real", "reduce_and", "reduce_max",
    "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor", "rem", "reshape", "rev",
    "round", "rsqrt", "scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul",
    "scatter_sub", "select", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "slice", "slice_in_dim", "sort", "sort_key_val",
    "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "top_k", "transpose",
    "trunc", "zeros_like",
    # linear algebra and Fourier transforms
    "FftType", "fft", "linalg", "fft_p",
    # convolutions, windows, special functions
    "ConvDimensionNumbers", "conv", "conv_dimension_numbers", "conv_general_dilated", "conv_general_dilated_local",
    "conv_general_dilated_patches", "conv_transpose", "conv_with_general_padding", "padtype_to_pads", "reduce",
    "reduce_precision", "reduce_window", "bessel_i0e", "bessel_i1e", "betainc", "digamma", "igamma", "igamma_grad_a",
    "igammac", "lgamma", "polygamma", "random_gamma_grad", "zeta", "conv_general_dilated_p", "reduce_precision_p",
    "reduce_window_max_p", "reduce_window_min_p", "reduce_window_sum_p", "window_argmax_p", "window_argmin_p",
    "bessel_i0e_p", "bessel_i1e_p", "digamma_p", "igamma_p", "igamma_grad_a_p", "igammac_p", "lgamma_p", "polygamma_p",
    "random_gamma_grad_p", "regularized_incomplete_beta_p", "zeta_p",
    "Precision",
    # compositions
    "approx_max_k", "approx_min_k", "broadcast_shapes", "clz", "dtype", "reciprocal", "scatter_apply", "split", "stack",
    "tile",
    # collectives
    "all_gather", "all_to_all", "axis_index", "axis_size", "pmax", "pmean", "pmin", "ppermute", "pshuffle",
    "psum", "psum_scatter", "all_gather_p", "all_to_all_p", "axis_index_p", "pmax_p", "pmin_p", "ppermute_p",
    "psum_p", "psum_scatter_p",
    # control flow
    "associative_scan", "cond", "custom_linear_solve", "custom_root", "fori_loop", "map", "scan", "switch",
    "while_loop",
    # primitives
    "cond_p", "linear_solve_p", "scan_p", "while_p",
    "abs_p", "acos_p", "acosh_p", "add_any_p", "add_p", "and_p", "argmax_p", "argmin_p", "asin_p",
    "asinh_p", "atan2_p", "atan_p", "atanh_p", "bitcast_p", "broadcast_in_dim_p", "cbrt_p",
    "ceil_p", "clamp_p", "complex_p", "concatenate_p", "conj_p", "convert_p", "copy_p", "cos_p",
    "cosh_p", "cumlogsumexp_p", "cummax_p", "cummin_p", "cumprod_p", "cumsum_p", "div_p",
    "dot_general_p", "dynamic_slice_p", "dynamic_update_slice_p", "eq_p", "erf_inv_p", "erf_p",
    "erfc_p", "exp2_p", "exp_p", "expm1_p", "floor_p", "gather_p", "ge_p", "gt_p", "imag_p",
    "integer_pow_p", "iota_p", "is_finite_p", "le_p", "log1p_p", "log_p", "logistic_p", "lt_p",
    "max_p", "min_p", "mul_p", "ne_p", "neg_p", "nextafter_p", "not_p", "or_p", "pad_p",
    "population_count_p", "pow_p", "real_p", "reduce_and_p", "reduce_max_p", "reduce_min_p",
    "reduce_or_p", "reduce_prod_p", "reduce_sum_p", "reduce_xor_p", "rem_p", "reshape_p", "rev_p",
    "round_p", "rsqrt_p", "scatter_add_p", "scatter_max_p", "scatter_min_p", "scatter_mul_p",
    "scatter_p", "select_p", "shift_left_p", "shift_right_arithmetic_p", "shift_right_logical_p",
    "sign_p", "sin_p", "sinh_p", "slice_p", "sort_p", "sqrt_p", "square_p", "stop_gradient_p",
    "sub_p", "tan_p", "tanh_p", "top_k_p", "transpose_p", "trunc_p", "xor_p",
]  # fmt: skip
