"""One row for every primitive and every interesting choice of its parameters.

Above ``tests/op_table/row.py``, which says what a row is, and ``tests/op_table/references.py``, the definitions that
NumPy does not have. Out comes ``OPS``, which ``tests/core/ops/test_op_table.py`` runs: eagerly, under ``jit``, through
derivatives of both modes up to a row's order, and through ``vmap`` over every axis.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import scipy.special

from blufunc.core.ir import dtypes
from blufunc.core.ops import (
    cumulative,
    dot,
    dynamic,
    gather_scatter,
    random_bits,
    reduce,
    shape,
    sort,
    windows,
)
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops as st
from tests.op_table import barrier, effects, linalg
from tests.op_table import integers as op_table_integers
from tests.op_table import ragged as op_table_ragged
from tests.op_table import references as refs
from tests.op_table import special as op_table_special
from tests.op_table import windows as op_table_windows
from tests.op_table.references import Windows
from tests.op_table.row import ANY, BITS, COMPLEX, FLOATS, INEXACT, INTS, KEY, NUMBERS, Arg, Op


def _component(dtype: str) -> str:
    return {"complex128": "float64", "complex64": "float32"}.get(dtype, dtype)


def _of_components(dtype: str) -> str:
    return {"float64": "complex128", "float32": "complex64"}[dtype]


S, V, M = (), (3,), (2, 3)
NOT_NUMBERS = ("bool", KEY)
NOT_INEXACT = ("int32", "bool", KEY)
NOT_FLOATS = ("complex64", "int32", "bool", KEY)

# -- elementwise, one operand ----------------------------------------------------------------------


def _unary(prim, ref, low=-2.0, high=2.0, dtypes=FLOATS, grad=2, refuses=None, **kw) -> list[Op]:
    if refuses is None:
        refuses = () if kw.get("name") else NOT_INEXACT
    arg = {k: kw.pop(k) for k in ("avoid", "step", "offset") if k in kw}
    return [Op(prim, (Arg(M, low, high, **arg),), ref, grad=grad, dtypes=dtypes, refuses=refuses, **kw)]


UNARY = [
    *_unary(ew.neg_p, np.negative, dtypes=INEXACT, refuses=NOT_NUMBERS),
    *_unary(ew.neg_p, np.negative, -9, 9, dtypes=INTS, grad=0, name="integers"),
    *_unary(ew.abs_p, np.abs, avoid=(0,), refuses=("complex64", "bool", KEY)),
    *_unary(ew.abs_p, np.abs, -9, 9, dtypes=("int32", "int8"), grad=0, name="integers"),
    *_unary(ew.sign_p, np.sign, avoid=(0,), refuses=NOT_NUMBERS),
    *_unary(ew.sign_p, np.sign, -2, 2, dtypes=(*INTS, "complex64"), grad=0, name="integers"),
    *_unary(ew.square_p, lambda x: x * x, dtypes=INEXACT, refuses=NOT_NUMBERS),
    *_unary(ew.square_p, lambda x: x * x, -9, 9, dtypes=INTS, grad=0, name="integers"),
    *_unary(ew.sqrt_p, np.sqrt, 0.2, 3, dtypes=INEXACT),
    *_unary(ew.rsqrt_p, lambda x: x**-0.5, 0.2, 3, dtypes=INEXACT),
    *_unary(ew.cbrt_p, np.cbrt, avoid=(0,), refuses=NOT_FLOATS),
    *_unary(ew.exp_p, np.exp, dtypes=INEXACT),
    *_unary(ew.exp2_p, np.exp2, refuses=NOT_FLOATS),
    *_unary(ew.expm1_p, np.expm1, dtypes=INEXACT),
    *_unary(ew.log_p, np.log, 0.2, 3, dtypes=INEXACT, tol=2),
    *_unary(ew.log1p_p, np.log1p, -0.7, 2, dtypes=INEXACT),
    *_unary(ew.logistic_p, lambda x: 1 / (1 + np.exp(-x)), dtypes=INEXACT),
    *_unary(ew.sin_p, np.sin, dtypes=INEXACT),
    *_unary(ew.cos_p, np.cos, dtypes=INEXACT),
    *_unary(ew.tan_p, np.tan, -1, 1, dtypes=INEXACT),
    *_unary(ew.asin_p, np.arcsin, -0.8, 0.8, dtypes=INEXACT),
    *_unary(ew.acos_p, np.arccos, -0.8, 0.8, dtypes=INEXACT),
    *_unary(ew.atan_p, np.arctan, -0.8, 0.8, dtypes=INEXACT),
    *_unary(ew.sinh_p, np.sinh, dtypes=INEXACT),
    *_unary(ew.cosh_p, np.cosh, dtypes=INEXACT),
    *_unary(ew.tanh_p, np.tanh, -1, 1, dtypes=INEXACT),
    *_unary(ew.asinh_p, np.arcsinh, -0.8, 0.8, dtypes=INEXACT),
    *_unary(ew.acosh_p, np.arccosh, 1.3, 3, dtypes=INEXACT),
    *_unary(ew.atanh_p, np.arctanh, -0.7, 0.7, dtypes=INEXACT),
    *_unary(ew.erf_p, scipy.special.erf, refuses=NOT_FLOATS),
    *_unary(ew.erfc_p, scipy.special.erfc, refuses=NOT_FLOATS, tol=2),
    *_unary(ew.erf_inv_p, scipy.special.erfinv, -0.8, 0.8, refuses=NOT_FLOATS, tol=2),
    *_unary(ew.floor_p, np.floor, step=0.5, offset=0.2, refuses=NOT_FLOATS),
    *_unary(ew.ceil_p, np.ceil, step=0.5, offset=0.2, refuses=NOT_FLOATS),
    *_unary(ew.trunc_p, np.trunc, step=0.5, offset=0.2, refuses=NOT_FLOATS),
    *_unary(ew.round_p, np.rint, step=0.5, offset=0.2, refuses=NOT_FLOATS),
    *_unary(ew.round_p, np.rint, -4, 4, step=0.5, grad=0, name="ties"),
    *_unary(ew.is_finite_p, np.isfinite, dtypes=INEXACT, grad=0, out="bool"),
    *_unary(ew.not_p, np.invert, -9, 9, dtypes=BITS, grad=0, refuses=("float32", "complex64", KEY)),
    *_unary(ew.population_count_p, refs.integers(lambda x, bits: (x % 2**bits).bit_count()), -99, 99, dtypes=INTS,
            grad=0, refuses=("float32", "bool")),
    *_unary(ew.stop_gradient_p, lambda x: x, dtypes=ANY, grad=0, refuses=()),
    *_unary(ew.copy_p, lambda x: x, dtypes=ANY, refuses=()),
    *_unary(ew.complex_abs_p, np.abs, dtypes=COMPLEX, out=_component, refuses=("float32", *NOT_INEXACT)),
    *_unary(ew.real_p, np.real, dtypes=COMPLEX, out=_component, refuses=("float32", *NOT_INEXACT)),
    *_unary(ew.imag_p, np.imag, dtypes=COMPLEX, out=_component, refuses=("float32", *NOT_INEXACT)),
    *_unary(ew.conj_p, np.conj, dtypes=COMPLEX),
    *_unary(ew.integer_pow_p, lambda x: x**3, dtypes=INEXACT, params={"y": 3}, refuses=NOT_NUMBERS, name="cube"),
    *_unary(ew.integer_pow_p, lambda x: x**3, -4, 4, dtypes=INTS, grad=0, params={"y": 3}, name="cube-integers"),
    *_unary(ew.integer_pow_p, lambda x: x**6, 0.3, 1.3, dtypes=INEXACT, params={"y": 6}, name="sixth"),
    *_unary(ew.integer_pow_p, np.ones_like, dtypes=("float64", "bfloat16", "int32"), params={"y": 0}, name="one"),
    *_unary(ew.integer_pow_p, lambda x: x**-2.0, 0.5, 2, params={"y": -2}, name="negative"),
]  # fmt: skip

# -- elementwise, two operands and more ------------------------------------------------------------


def _binary(prim, ref, low=-2.0, high=2.0, grad=2, dtypes=FLOATS, refuses=None, args=None, **kw):
    """Rows with two arrays, and with a number on either side."""
    if refuses is None:
        refuses = () if kw.get("name") else NOT_INEXACT
    x, y = args or (Arg(M, low, high), Arg(M, low, high))
    scalar = lambda a: Arg(S, a.low, a.high, a.dtype, a.avoid, a.step, a.offset)
    name = kw.pop("name", "")
    prefix = f"{name}-" if name else ""
    row = functools.partial(Op, prim, ref=ref, grad=grad, **kw)
    return [
        row(args=(x, y), dtypes=dtypes, refuses=refuses, name=name),
        row(args=(scalar(x), y), dtypes=dtypes[:1], name=prefix + "number-left"),
        row(args=(x, scalar(y)), dtypes=dtypes[:1], name=prefix + "number-right"),
    ]


_APART = (Arg(M, step=0.5), Arg(M, step=0.5, offset=0.25))
_DIVIDE = (Arg(M), Arg(M, 0.5, 2))
_INT_DIVIDE = (Arg(M, -50, 50), Arg(M, 1, 7))
_SHIFT = (Arg(M, -99, 99), Arg(M, 0, 40))
_CLOSE = (Arg(M, -1, 1, step=1), Arg(M, -1, 1, step=1))


def _comparison(prim, ref, refuses):
    return [
        *_binary(prim, ref, dtypes=("float64", "float32", "float16", "bfloat16"), args=_CLOSE, grad=0, out="bool",
                 refuses=refuses),
        Op(prim, (Arg(M, -1, 1), Arg(M, -1, 1)), ref, dtypes=(*INTS, "bool"), out="bool", name="integers"),
    ]  # fmt: skip


BINARY = [
    *_binary(ew.add_p, np.add, dtypes=INEXACT, refuses=NOT_NUMBERS),
    *_binary(ew.add_p, np.add, -99, 99, dtypes=INTS, grad=0, name="integers"),
    *_binary(ew.sub_p, np.subtract, dtypes=INEXACT, refuses=NOT_NUMBERS),
    *_binary(ew.sub_p, np.subtract, -99, 99, dtypes=INTS, grad=0, name="integers"),
    *_binary(ew.mul_p, np.multiply, dtypes=INEXACT, refuses=NOT_NUMBERS),
    *_binary(ew.mul_p, np.multiply, -99, 99, dtypes=INTS, grad=0, name="integers"),
    *_binary(ew.div_p, np.divide, dtypes=INEXACT, refuses=NOT_NUMBERS, args=_DIVIDE),
    *_binary(ew.div_p, refs.integers(lambda x, y, bits: math.trunc(x / y)), dtypes=INTS, grad=0, args=_INT_DIVIDE,
             name="integers"),
    *_binary(ew.rem_p, np.fmod, args=(Arg(M, 2.3, 2.6), Arg(M, 0.95, 1.05)), refuses=("complex64", "bool"), tol=4),
    *_binary(ew.rem_p, refs.integers(lambda x, y, bits: int(math.fmod(x, y))), dtypes=INTS, grad=0, args=_INT_DIVIDE,
             name="integers"),
    *_binary(ew.max_p, np.maximum, args=_APART, refuses=("complex64", KEY)),
    *_binary(ew.max_p, np.maximum, -9, 9, dtypes=BITS, grad=0, name="integers"),
    *_binary(ew.min_p, np.minimum, args=_APART, refuses=("complex64", KEY)),
    *_binary(ew.min_p, np.minimum, -9, 9, dtypes=BITS, grad=0, name="integers"),
    *_binary(ew.pow_p, np.power, 0.5, 2, dtypes=INEXACT, refuses=NOT_NUMBERS, tol=2),
    *_binary(ew.pow_p, np.power, dtypes=(*INTS, "int16", "uint64"), grad=0, args=(Arg(M, -9, 9), Arg(M, 0, 90)),
             name="integers"),
    *_binary(ew.atan2_p, np.arctan2, 0.3, 2, refuses=NOT_FLOATS),
    *_binary(ew.nextafter_p, None, dtypes=("float64", "float32", "float16"), grad=0, refuses=NOT_FLOATS),
    *_comparison(ew.eq_p, np.equal, (KEY,)),
    *_comparison(ew.ne_p, np.not_equal, (KEY,)),
    *_comparison(ew.lt_p, np.less, ("complex64", KEY)),
    *_comparison(ew.le_p, np.less_equal, ("complex64", KEY)),
    *_comparison(ew.gt_p, np.greater, ("complex64", KEY)),
    *_comparison(ew.ge_p, np.greater_equal, ("complex64", KEY)),
    *_binary(ew.and_p, np.bitwise_and, -99, 99, dtypes=BITS, grad=0, refuses=("float32", "complex64")),
    *_binary(ew.or_p, np.bitwise_or, -99, 99, dtypes=BITS, grad=0, refuses=("float32", "complex64")),
    *_binary(ew.xor_p, np.bitwise_xor, -99, 99, dtypes=BITS, grad=0, refuses=("float32", "complex64")),
    *_binary(ew.shift_left_p, refs.integers(lambda x, y, bits: x << y), args=_SHIFT, dtypes=INTS, grad=0,
             refuses=("float32", "bool")),
    *_binary(ew.shift_right_logical_p, refs.integers(lambda x, y, bits: (x % 2**bits) >> y), args=_SHIFT, dtypes=INTS,
             grad=0, refuses=("float32", "bool")),
    *_binary(ew.shift_right_arithmetic_p, refs.integers(lambda x, y, bits: x >> y), args=_SHIFT, dtypes=INTS, grad=0,
             refuses=("float32", "bool")),
    *_binary(ew.complex_p, lambda x, y: x + 1j * y, dtypes=("float64", "float32"), out=_of_components,
             refuses=("float16", "bfloat16", *NOT_FLOATS)),
    Op(st.add_any_p, (Arg(M), Arg(M)), np.add, grad=2, dtypes=INEXACT, mixes=True),
]  # fmt: skip

_BOOL = functools.partial(Arg, dtype="bool")

CHOICE = [
    Op(ew.select_p, (_BOOL(M), Arg(M), Arg(M)), np.where, grad=2, dtypes=ANY, refuses=("float0",)),
    Op(ew.select_p, (_BOOL(S), Arg(M), Arg(M)), np.where, grad=2, dtypes=("float64",), name="one-predicate"),
    Op(ew.select_p, (_BOOL(M), Arg(S), Arg(M)), np.where, grad=2, dtypes=("float64",), name="number-left"),
    Op(ew.select_p, (_BOOL(M), Arg(M), Arg(S)), np.where, grad=2, dtypes=("float64",), name="number-right"),
    Op(ew.select_p, (_BOOL(M), Arg(S), Arg(S)), np.where, grad=2, dtypes=("float64",), name="numbers"),
    Op(ew.clamp_p, (Arg(S, -1, -0.5), Arg(M, step=0.5, offset=0.2), Arg(S, 0.5, 1)),
       lambda low, x, high: np.clip(x, low, high), grad=2, refuses=("complex64", KEY)),
    Op(ew.clamp_p, (Arg(M, -1, -0.9), Arg(M, step=0.5, offset=0.2), Arg(M, 0.9, 1)),
       lambda low, x, high: np.clip(x, low, high), grad=2, dtypes=("float64", "int32"), name="bounds"),
]  # fmt: skip


def _convert(source, target, name, low=-9.0, high=9.0, ref=None, grad=0):
    d = dtypes.as_dtype(target)
    ref = ref or (lambda x: np.asarray(x).astype(d))
    return Op(ew.convert_p, (Arg(M, low, high),), ref, {"dtype": d}, name, grad, source, target)


CONVERT = [
    _convert(("float32", "float16", "bfloat16", "float64"), "int32", "to-int"),
    _convert(("int32", "uint8", "bool", "int64"), "float32", "from-int"),
    _convert(("float64", "float32", "int32", "bool"), "bfloat16", "to-bf16"),
    _convert(("float64", "float16", "bfloat16"), "float64", "to-f64", grad=2),
    _convert(("float64", "float32", "complex128"), "complex128", "to-complex", grad=2),
    _convert(("complex128", "complex64"), "float64", "drop-imaginary", grad=2, ref=np.real),
    _convert(("float32", "int32", "complex64"), "bool", "to-bool", -1, 1),
    _convert(("int32", "int64"), "uint8", "wrap", -300, 300),
    _convert(("float32", "bfloat16", "float64"), "uint8", "saturate", -400, 400,
             lambda x: np.clip(np.trunc(x), 0, 255).astype(np.uint8)),
    _convert(("float32",), "float8_e4m3fn", "to-f8"),
    Op(ew.bitcast_p, (Arg(M),), lambda x: x.astype(np.float32).view(np.int32), {"dtype": dtypes.int32},
       dtypes=("float32",), out="int32"),
    Op(ew.bitcast_p, (Arg(M, -99, 99),), lambda x: x.view(np.float32), {"dtype": dtypes.float32},
       dtypes=("int32", "uint32"), out="float32", name="back", refuses=("bool", KEY)),
]  # fmt: skip

# -- structure -------------------------------------------------------------------------------------


def _broadcast(shape, target, dims, name=""):
    ref = refs.broadcast(shape, target, dims)
    return Op(st.broadcast_in_dim_p, (Arg(shape),), ref, {"shape": target, "dims": dims}, name, 2, ANY)


STRUCTURE = [
    _broadcast((3,), (2, 3), (1,)),
    _broadcast((2,), (2, 3), (0,), "in-front"),
    _broadcast((), (2, 3), (), "number"),
    _broadcast((2, 1), (2, 3), (0, 1), "stretched"),
    _broadcast((1, 3), (4, 2, 3), (1, 2), "stretched-new"),
    _broadcast((1, 1), (1, 1, 1), (0, 2), "ones"),
    Op(st.reshape_p, (Arg((2, 6)),), lambda x: x.reshape(3, 4), {"shape": (3, 4)}, "", 2, ANY),
    Op(st.reshape_p, (Arg((2, 3)),), np.ravel, {"shape": (6,)}, "flat", 2, FLOATS),
    Op(st.reshape_p, (Arg((1, 1)),), np.squeeze, {"shape": ()}, "number", 2, FLOATS),
    Op(st.transpose_p, (Arg((2, 3, 4)),), refs.permuted((2, 0, 1)), {"permutation": (2, 0, 1)}, "", 2, ANY),
    Op(st.transpose_p, (Arg((2, 3)),), np.transpose, {"permutation": (1, 0)}, "matrix", 2),
    *[
        Op(st.reduce_sum_p, (Arg((2, 3, 4)),), functools.partial(np.sum, axis=axes), {"axes": axes},
           "-".join(map(str, axes)), 2, (*INEXACT, "int32") if axes == (1,) else ("float64",),
           refuses=("bool", KEY), tol=4)
        for axes in [(1,), (0,), (2,), (0, 2), (2, 0), (0, 1, 2)]
    ],
]  # fmt: skip


# -- cutting and joining ---------------------------------------------------------------------------


def _slice(shape_, start, limit, strides, name=""):
    slices = tuple(map(slice, start, limit, strides or (None,) * len(start)))
    params = {"start_indices": start, "limit_indices": limit, "strides": strides}
    return Op(
        shape.slice_p, (Arg(shape_),), lambda x: x[slices], params, name, 2, ANY if not name else FLOATS
    )


def _pad(shape_, config, name="", **kw):
    args = (Arg(shape_), Arg(S))
    return Op(shape.pad_p, args, refs.pad(config), {"padding_config": config}, name, 2, **kw)


def _concatenate(shapes, dimension, name="", **kw):
    args = tuple(Arg(s) for s in shapes)
    ref = lambda *xs: np.concatenate(xs, dimension)
    return Op(shape.concatenate_p, args, ref, {"dimension": dimension}, name, 2, **kw)


CUTTING = [
    _slice((4, 5), (1, 0), (3, 5), None),
    _slice((4, 5), (0, 1), (4, 5), (2, 3), "strides"),
    _slice((7,), (1,), (6,), (4,), "stride-short"),
    _slice((4, 5), (2, 1), (2, 4), None, "empty"),
    _pad((2, 3), ((1, 2, 0), (0, 1, 0)), dtypes=ANY),
    _pad((2, 3), ((0, 1, 2), (1, 0, 1)), "interior"),
    _pad((4, 3), ((-1, 2, 0), (1, -2, 0)), "negative"),
    _pad((4,), ((-1, -2, 2),), "negative-interior"),
    _pad((4,), ((-3, 3, 1),), "negative-many"),
    _pad((0, 2), ((2, 0, 0), (0, 0, 0)), "empty"),
    _concatenate([(2, 3), (1, 3)], 0, dtypes=ANY),
    _concatenate([(2, 3), (2, 1), (2, 2)], 1, "three"),
    _concatenate([(2, 0), (2, 3)], 1, "empty"),
    _concatenate([(3,)], 0, "one"),
    Op(shape.rev_p, (Arg((2, 3)),), lambda x: x[:, ::-1], {"dimensions": (1,)}, "", 2, ANY),
    Op(shape.rev_p, (Arg((2, 3, 2)),), lambda x: x[::-1, :, ::-1], {"dimensions": (2, 0)}, "two", 2),
    *[
        Op(shape.iota_p, (), lambda d=d: np.repeat(np.arange(4.0).astype(d), 3).reshape(4, 3),
           {"dtype": dtypes.as_dtype(d), "shape": (4, 3), "dimension": 0}, d, 0, (d,))
        for d in ("int32", "float32", "uint8", "bfloat16")
    ],
]  # fmt: skip

# -- contractions ----------------------------------------------------------------------------------


def _dot(x, y, spec, contract, batch=((), ()), name="", grad=2, preferred=None, **kw):
    params = {"dimension_numbers": (contract, batch), "precision": None,
              "preferred_element_type": preferred and dtypes.as_dtype(preferred)}  # fmt: skip
    ref = lambda x, y: np.einsum(spec, x, y)
    kw.setdefault("dtypes", ("float64",))
    return Op(dot.dot_general_p, (Arg(x), Arg(y)), ref, params, name, grad, out=preferred, tol=4, **kw)


CONTRACTIONS = [
    _dot((2, 3), (3, 4), "ij,jk->ik", ((1,), (0,)), dtypes=(*INEXACT, *INTS), refuses=(KEY,)),
    _dot((3,), (3,), "i,i->", ((0,), (0,)), name="vectors"),
    _dot((2, 3), (3,), "ij,j->i", ((1,), (0,)), name="matrix-vector"),
    _dot((3, 2), (3, 4), "ji,jk->ik", ((0,), (0,)), name="left-transposed"),
    _dot((2, 3), (4, 3), "ij,kj->ik", ((1,), (1,)), name="right-transposed"),
    _dot((2,), (3,), "i,j->ij", ((), ()), name="outer"),
    _dot((), (3,), ",i->i", ((), ()), name="number"),
    _dot((2, 3, 4), (2, 4, 2), "bij,bjk->bik", ((2,), (1,)), ((0,), (0,)), name="batch",
         dtypes=("float64", "bfloat16", "complex128")),
    _dot((3, 2, 4), (4, 2, 2), "ibj,jkb->bik", ((2,), (0,)), ((1,), (2,)), name="batch-inside"),
    _dot((2, 3), (2, 3), "ij,ij->ij", ((), ()), ((0, 1), (0, 1)), name="batch-only"),
    _dot((2, 3, 2), (2, 3, 2), "abc,abd->bcd", ((0,), (0,)), ((1,), (1,)), name="batch-middle"),
    _dot((2, 3, 4), (4, 3, 2), "ijk,kjl->il", ((1, 2), (1, 0)), name="two-contracted"),
    _dot((3, 2, 4), (4, 3, 2), "ijk,kil->jl", ((2, 0), (0, 1)), name="two-crossed"),
    _dot((2, 3), (3, 2), "ij,jk->ik", ((1,), (0,)), name="preferred", grad=0, preferred="float32",
         dtypes=("bfloat16", "float16")),
    _dot((2, 3), (3, 2), "ij,jk->ik", ((1,), (0,)), name="preferred-int", grad=0, preferred="int32",
         dtypes=("int8",)),
]  # fmt: skip

# -- reductions ------------------------------------------------------------------------------------

_AXES = [(1,), (0,), (0, 2), (2, 0), (0, 1, 2)]


def _reduction(prim, ref, kinds, refuses, grad=2, tol=4, **arg):
    return [
        Op(prim, (Arg((2, 3, 4) if len(axes) < 3 else (2, 2, 2), **arg),), functools.partial(ref, axis=axes),
           {"axes": axes}, "-".join(map(str, axes)), grad, kinds if axes == (1,) else kinds[:1],
           refuses=refuses if axes == (1,) else (), tol=tol)
        for axes in _AXES
    ]  # fmt: skip


REDUCTIONS = [
    *_reduction(reduce.reduce_max_p, np.max, (*FLOATS, "int32", "uint8"), ("complex64", KEY), distinct=True),
    *_reduction(reduce.reduce_min_p, np.min, (*FLOATS, "int32", "uint8"), ("complex64", KEY), distinct=True),
    Op(reduce.reduce_max_p, (Arg((2, 3)),), lambda x: x.any(1), {"axes": (1,)}, "bool", 0, ("bool",)),
    Op(reduce.reduce_min_p, (Arg((2, 3)),), lambda x: x.all(1), {"axes": (1,)}, "bool", 0, ("bool",)),
    Op(reduce.reduce_max_p, (Arg((2, 0)),), lambda x: np.full(2, -np.inf), {"axes": (1,)}, "empty"),
    Op(reduce.reduce_min_p, (Arg((2, 0)),), lambda x: np.full(2, np.inf), {"axes": (1,)}, "empty"),
    *_reduction(reduce.reduce_prod_p, np.prod, INEXACT, NOT_NUMBERS, low=0.5, high=1.5),
    Op(reduce.reduce_prod_p, (Arg((2, 3), -1, 1, step=1),), lambda x: np.prod(x, 1), {"axes": (1,)}, "zeros", 2,
       ("float64", "int32")),
    Op(reduce.reduce_prod_p, (Arg((2, 0)),), lambda x: np.ones(2), {"axes": (1,)}, "empty", 2),
    *_reduction(reduce.reduce_and_p, refs.over_axes(np.bitwise_and), BITS, ("float32", "complex64"), 0,
                low=-99, high=99),
    *_reduction(reduce.reduce_or_p, refs.over_axes(np.bitwise_or), BITS, ("float32", "complex64"), 0,
                low=-99, high=99),
    *_reduction(reduce.reduce_xor_p, refs.over_axes(np.bitwise_xor), BITS, ("float32", "complex64"), 0,
                low=-99, high=99),
    *[
        Op(prim, (Arg((2, 3, 4), -3, 3),), functools.partial(ref, axis=axis),
           {"axes": (axis,), "index_dtype": dtypes.as_dtype(out)}, f"{axis}", 0,
           ("float64", "bfloat16", "int32", "bool"), out, ("complex64", KEY))
        for prim, ref in [(reduce.argmax_p, np.argmax), (reduce.argmin_p, np.argmin)]
        for axis, out in [(0, "int32"), (1, "int64"), (2, "uint8")]
    ],
]  # fmt: skip


def _cumulative(prim, accumulate, kinds, refuses, tol=4, **arg):
    ref = refs.cumulative(accumulate)
    return [
        Op(prim, (Arg((3, 5), **arg),), functools.partial(ref, axis=axis, reverse=reverse),
           {"axis": axis, "reverse": reverse}, f"{axis}" + ("-reverse" if reverse else ""), 2,
           kinds if axis else kinds[:1], refuses=refuses if axis else (), tol=tol)
        for axis in (0, 1)
        for reverse in (False, True)
    ]  # fmt: skip


CUMULATIVE = [
    *_cumulative(cumulative.cumsum_p, np.add, (*INEXACT, "int32"), NOT_NUMBERS),
    *_cumulative(cumulative.cumprod_p, np.multiply, (*INEXACT, "int32"), NOT_NUMBERS, low=0.5, high=1.5),
    *_cumulative(cumulative.cummax_p, np.maximum, (*FLOATS, "int32"), ("complex64", KEY), distinct=True),
    *_cumulative(cumulative.cummin_p, np.minimum, (*FLOATS, "int32"), ("complex64", KEY), distinct=True),
    *_cumulative(cumulative.cumlogsumexp_p, np.logaddexp, FLOATS, NOT_FLOATS),
]

# -- sorting ---------------------------------------------------------------------------------------


def _sort(args, dimension=0, num_keys=1, is_stable=True, name="", **kw):
    params = {"dimension": dimension, "is_stable": is_stable, "num_keys": num_keys}
    return Op(sort.sort_p, args, refs.lexicographic(dimension, num_keys), params, name, mixes=True, **kw)


_LINES = Arg((3, 4), distinct=True)
_POSITIONS = Arg((2, 4), 0, 2, "int32", distinct=True, axis=0)
_TIES = Arg((4, 5), 0, 1, "int32")

SORTING = [
    _sort((_LINES,), 1, grad=2, dtypes=(*FLOATS, "int32", "uint8"), refuses=(KEY,)),
    _sort((_LINES,), 0, grad=2, dtypes=("float64",), name="columns"),
    _sort((_LINES,), 1, is_stable=False, grad=2, dtypes=("float64",), name="unstable"),
    _sort((_LINES, Arg((3, 4))), 1, grad=2, dtypes=("float64", "bfloat16"), name="carries"),
    _sort((Arg((3, 4), 0, 3, "int32", distinct=True, axis=1), Arg((3, 4)), Arg((3, 4))), 1, grad=2,
          dtypes=("float64",), name="integer-key"),
    _sort((_TIES, Arg((4, 5), 0, 99, "int32")), 1, dtypes=("int32",), name="ties-are-stable"),
    _sort((_TIES, _TIES, Arg((4, 5), distinct=True)), 1, 3, grad=2, dtypes=("float64",), name="three-keys"),
    _sort((Arg((4, 5), dtype="bool"), Arg((4, 5), 0, 9)), 1, dtypes=("int32",), name="bool-key"),
    Op(sort.top_k_p, (Arg((3, 4), distinct=True),), refs.top(2), {"k": 2}, "", 2, FLOATS, refuses=("complex64", KEY)),
    Op(sort.top_k_p, (Arg((3, 4), 0, 1),), refs.top(3), {"k": 3}, "ties", 0, ("int32",)),
    Op(sort.pick_along_p, (Arg((3, 4)), _POSITIONS), lambda x, i: np.take_along_axis(x, i, 0), {"dimension": 0}, "", 2,
       ANY, refuses=()),
    Op(sort.pick_along_p, (Arg((2, 4)), Arg((2, 3), 0, 3, "int32", distinct=True, axis=1)),
       lambda x, i: np.take_along_axis(x, i, 1), {"dimension": 1}, "last", 2),
    Op(sort.place_along_p, (Arg((2, 4)), _POSITIONS), functools.partial(refs.place, dimension=0, size=3),
       {"dimension": 0, "size": 3}, "", 2, NUMBERS),
    Op(sort.place_along_p, (Arg((2, 3)), Arg((2, 3), 0, 4, "int32", distinct=True, axis=1)),
       functools.partial(refs.place, dimension=1, size=5), {"dimension": 1, "size": 5}, "last", 2),
]  # fmt: skip

# -- keys and random bits --------------------------------------------------------------------------


def _bits(width):
    join = (lambda a, b: a << 32 | b) if width == 64 else (lambda a, b: (a ^ b) % 2**width)
    ref = refs.counted(
        (2, 3), lambda blocks, s: np.array([join(*b) for b in blocks], f"u{width // 8}").reshape(s)
    )
    params = {"shape": (2, 3), "bit_width": width}
    return Op(random_bits.random_bits_p, (Arg((2,)),), ref, params, f"{width}", 0, (KEY,), f"uint{width}",
              ("uint32", "float32"))  # fmt: skip


KEYS = [
    Op(random_bits.random_seed_p, (Arg((3,), 0, 99),), lambda x: refs.keys([(0, int(i)) for i in x.flat], x.shape),
       {}, "", 0, ("int32", "uint32", "uint8", "int64"), KEY, ("float32", "bool", KEY)),
    Op(random_bits.random_seed_p, (Arg((3,), -(2**62), 2**62),),
       lambda x: refs.keys([divmod(int(i) % 2**64, 2**32) for i in x.flat], x.shape), {}, "wide", 0, ("int64",), KEY),
    *[_bits(width) for width in (8, 16, 32, 64)],
    Op(random_bits.random_split_p, (Arg((2,)),), refs.counted((3,), refs.keys), {"shape": (3,)}, "", 0, (KEY,), KEY,
       ("uint32",)),
    Op(random_bits.random_split_p, (Arg(()),), refs.counted((2, 2), refs.keys), {"shape": (2, 2)}, "one", 0,
       (KEY,), KEY),
    Op(random_bits.random_fold_in_p, (Arg((3,)), Arg((3,), 0, 99, "uint32")),
       lambda k, x: refs.keys(
           [refs.threefry(w, (0, int(i))) for w, i in zip(refs.words(k), x.flat, strict=True)], k.shape),
       {}, "", 0, (KEY,), KEY, ("uint32",)),
    Op(random_bits.random_wrap_p, (Arg((3, 2), 0, 99),), lambda x: refs.keys(x, (3,)), {}, "", 0, ("uint32",), KEY),
    Op(random_bits.random_unwrap_p, (Arg((2, 3)),), lambda k: np.array(refs.words(k), np.uint32).reshape(2, 3, 2),
       {}, "", 0, (KEY,), "uint32", ("uint32",)),
]  # fmt: skip

# -- indexing --------------------------------------------------------------------------------------


def _start(low, high, dtype="int32"):
    return Arg(S, low, high, dtype)


def _dynamic(sizes, starts, name="", kinds=FLOATS):
    args = (Arg((5, 4)), *starts)
    ref = lambda x, *at: x[refs.clamped(x.shape, sizes, at)]
    return [
        Op(dynamic.dynamic_slice_p, args, ref, {"slice_sizes": sizes}, name, 2, kinds),
        Op(dynamic.dynamic_update_slice_p, (args[0], Arg(sizes), *starts), refs.updated, {}, name, 2, kinds),
    ]


WINDOWS = {
    "rows": Windows((3, 2), (4, 1), (1, 2), (1,), (0,), (0,)),
    "outside-clips": Windows((3, 2), (4, 1), (1, 2), (1,), (0,), (0,), low=-2, high=5),
    "outside-drops": Windows((3, 2), (4, 1), (1, 2), (1,), (0,), (0,), mode="fill", low=-2, high=5),
    "elements": Windows((3, 4), (5, 2), (1, 1), (), (0, 1), (0, 1)),
    "windows": Windows((5, 4), (2, 2), (2, 3), (1, 2), (), (0, 1), low=-1, high=4),
    "windows-drop": Windows((5, 4), (3, 2), (2, 3), (1, 2), (), (0, 1), mode="fill", low=-1, high=4),
    "crossed": Windows((5, 4), (2, 3, 2), (2, 3), (0, 2), (), (1, 0), high=3),
    "middle": Windows((2, 4, 3), (2, 2, 1), (2, 1, 3), (0, 3), (1,), (1,), high=3),
    "partial": Windows((4, 3), (3, 1), (1, 2), (1,), (0,), (0,), high=3),
    "along": Windows((2, 5, 3), (2, 4, 1), (1, 1, 3), (2,), (1,), (1,), (0,), (0,), high=4),
    "along-crossed": Windows((2, 4, 3), (3, 2, 1), (1, 1, 1), (), (1,), (1,), (0, 2), (1, 0), high=3),
    "unique": Windows((5, 2), (3, 1), (1, 2), (1,), (0,), (0,), high=4, distinct=True),
    "one": Windows((3, 2), (1,), (1, 2), (0,), (0,), (0,)),
    "none": Windows((3, 2), (0, 1), (1, 2), (1,), (0,), (0,)),
}


def _index(w):
    return Arg(w.indices, w.low, w.high, "int32", distinct=w.distinct)


def _gather(name, w, fill=0, kinds=FLOATS, grad=2, **kw):
    numbers = windows.GatherDimensionNumbers(w.window, w.dropped, w.moved, w.along, w.indices_along)
    params = {"dimension_numbers": numbers, "slice_sizes": w.sizes, "indices_are_sorted": False,
              "unique_indices": w.distinct, "mode": windows.GatherScatterMode.from_any(w.mode),
              "fill_value": fill}  # fmt: skip
    ref = lambda x, i: w.gather(x, i, np.nan if fill is None and dtypes.is_inexact(x.dtype) else fill or 0)
    return Op(gather_scatter.gather_p, (Arg(w.shape), _index(w)), ref, params, name, grad, kinds, **kw)


def _scatter(prim, combine, name, w, kinds=FLOATS, x=None, updates=None, **kw):
    numbers = windows.ScatterDimensionNumbers(w.window, w.dropped, w.moved, w.along, w.indices_along)
    params = {"dimension_numbers": numbers, "indices_are_sorted": False, "unique_indices": w.distinct,
              "mode": windows.GatherScatterMode.from_any(w.mode)}  # fmt: skip
    args = (Arg(w.shape, **(x or {})), _index(w), Arg(w.result(), **(updates or {})))
    ref = lambda x, i, u: w.scatter(x, i, u, combine)
    return Op(prim, args, ref, params, name, 2, kinds, tol=4, **kw)


def _scatters(prim, combine, kinds, refuses=(), **kw):
    return [
        _scatter(prim, combine, name, w, kinds if name == "rows" else ("float64",),
                 refuses=refuses if name == "rows" else (), **kw)
        for name, w in WINDOWS.items()
    ]  # fmt: skip


def _scatters_mul():
    """The derivative in the updates exists only where no index repeats."""
    for name, w in WINDOWS.items():
        kinds = (*INEXACT, "int32", "uint8") if name in ("rows", "unique") else ("float64",)
        wrt = None if w.distinct or name in ("one", "none") else (0,)
        yield _scatter(gather_scatter.scatter_mul_p, np.multiply, name, w, kinds, refuses=(KEY,), wrt=wrt)


_EXTREME = {
    "linear": False,
    "x": {"distinct": True},
    "updates": {"low": -1.9, "high": 1.95, "distinct": True},
}

INDEXING = [
    *_dynamic((2, 3), (_start(0, 3), _start(0, 1)), kinds=ANY),
    *_dynamic((2, 3), (_start(-3, 9), _start(-3, 9)), "outside", ("float64",)),
    *_dynamic((5, 1), (_start(0, 0), _start(0, 3)), "column", ("float64",)),
    *_dynamic((5, 4), (_start(-1, 1), _start(-1, 1)), "whole", ("float64",)),
    *_dynamic((1, 2), (_start(0, 4, "uint8"), _start(0, 3, "int64")), "index-dtypes", ("float64",)),
    *[_gather(name, w, kinds=ANY[:-1] if name == "rows" else ("float64", "float32")) for name, w in WINDOWS.items()],
    _gather("rows-of-keys", WINDOWS["rows"], None, (KEY,), 0),
    _gather("fill-nan", WINDOWS["outside-drops"], None, ("float64", "float32", "bfloat16"), 0),
    _gather("fill-value", WINDOWS["windows-drop"], 7, ("float64", "int32", "bfloat16")),
    *_scatters(gather_scatter.scatter_p, lambda old, new: new, ANY),
    *_scatters(gather_scatter.scatter_add_p, np.add, (*INEXACT, "int32", "uint8"), (KEY,)),
    *_scatters_mul(),
    *_scatters(gather_scatter.scatter_min_p, np.minimum, (*FLOATS, "int32"), ("complex64", KEY), **_EXTREME),
    *_scatters(gather_scatter.scatter_max_p, np.maximum, (*FLOATS, "int32"), ("complex64", KEY), **_EXTREME),
]  # fmt: skip

SECTIONS: dict[str, list[Op]] = {
    "unary": UNARY,
    "binary": BINARY,
    "choice": CHOICE,
    "convert": CONVERT,
    "structure": STRUCTURE,
    "cutting": CUTTING,
    "contractions": CONTRACTIONS,
    "reductions": REDUCTIONS,
    "cumulative": CUMULATIVE,
    "sorting": SORTING,
    "indexing": INDEXING,
    "keys": KEYS,
    "linalg": linalg.ROWS,
    "effects": effects.ROWS,
    "integers": op_table_integers.ROWS,
    "special": op_table_special.ROWS,
    "windows": op_table_windows.ROWS,
    "ragged": op_table_ragged.ROWS,
    "barrier": barrier.ROWS,
}
OPS: list[Op] = [op for rows in SECTIONS.values() for op in rows]

assert len({op.id for op in OPS}) == len(OPS), "two rows have one name"
