"""Elementwise functions against NumPy: values, dtypes, broadcasting, gradients."""

import operator

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.common import boolean, check, f32, i32, same

# name, lower and upper end of the domain
UNARY_FLOAT = [
    ("sin", -4, 4), ("cos", -4, 4), ("tan", -1, 1), ("arcsin", -1, 1), ("arccos", -1, 1), ("arctan", -4, 4),
    ("sinh", -2, 2), ("cosh", -2, 2), ("tanh", -2, 2), ("arcsinh", -2, 2), ("arccosh", 1, 4), ("arctanh", -0.9, 0.9),
    ("exp", -2, 2), ("exp2", -2, 2), ("expm1", -2, 2), ("log", 0.1, 4), ("log2", 0.1, 4), ("log10", 0.1, 4),
    ("log1p", -0.5, 4), ("sqrt", 0, 4), ("cbrt", -4, 4), ("sinc", -4, 4),
    ("deg2rad", -180, 180), ("rad2deg", -4, 4), ("degrees", -4, 4), ("radians", -90, 90), ("fabs", -4, 4),
]  # fmt: skip
UNARY_ANY = ["negative", "positive", "abs", "absolute", "sign", "square", "isfinite", "isinf", "isnan", "signbit",
             "isposinf", "isneginf", "conj", "real", "imag", "isreal", "iscomplex", "logical_not", "nan_to_num",
             "floor", "ceil", "trunc", "rint", "round"]  # fmt: skip
SPECIAL = np.array([0.0, -0.0, 1.5, -2.5, 0.5, np.inf, -np.inf, np.nan, 3.0], np.float32)


@pytest.mark.parametrize("name, low, high", UNARY_FLOAT)
def test_unary_float(name, low, high):
    for shape in ((), (7,), (2, 3), (0,)):
        check(getattr(bnp, name), getattr(np, name), f32(*shape, low=low, high=high), traced=shape != ())
    whole = np.array([1, 1], np.int32)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(whole.astype(np.float32))
        same(getattr(bnp, name)(bnp.asarray(whole)), want)
        same(getattr(bnp, name)(1), want[0])


@pytest.mark.parametrize("name", UNARY_ANY)
def test_unary_any(name):
    ref = getattr(np, name)
    check(getattr(bnp, name), ref, SPECIAL)
    check(getattr(bnp, name), ref, f32(2, 3))
    if name in ("floor", "ceil", "trunc", "rint", "round", "isposinf", "isneginf"):
        return
    check(getattr(bnp, name), ref, i32(5))


def test_complex():
    z = (f32(5) + 1j * f32(5, seed=1)).astype(np.complex64)
    for name in ("abs", "conj", "real", "imag", "angle", "exp", "sin", "negative", "square", "isnan", "isfinite",
                 "isinf", "sqrt", "log", "sign", "tanh", "isreal"):  # fmt: skip
        check(getattr(bnp, name), getattr(np, name), z)
    check(lambda x: bnp.round(x, 1), lambda x: np.round(x, 1), z)
    check(operator.mul, operator.mul, z, z)
    same(bnp.asarray(z) * 2.0, z * np.complex64(2))
    same(bnp.ones(2) * 1j, np.ones(2, np.complex64) * 1j)


BINARY = ["add", "subtract", "multiply", "divide", "true_divide", "floor_divide", "remainder", "mod", "fmod", "maximum",
          "minimum", "fmax", "fmin", "arctan2", "hypot", "logaddexp", "logaddexp2", "copysign", "nextafter", "equal",
          "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
          "heaviside", "float_power", "isclose"]  # fmt: skip
SHAPES = [
    ((3,), (3,)),
    ((), (3,)),
    ((2, 3), (3,)),
    ((2, 1), (1, 3)),
    ((4, 1, 3), (2, 1)),
    ((0, 3), (1,)),
    ((), ()),
]


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    f, ref = getattr(bnp, name), getattr(np, name)
    for a, b in SHAPES:
        x, y = f32(*a), f32(*b, seed=1)
        if name == "float_power":
            x = np.abs(x)
        check(f, lambda p, q: ref(p, q), x, y, traced=len(a) != 1)
    if name in (
        "arctan2",
        "hypot",
        "logaddexp",
        "logaddexp2",
        "copysign",
        "nextafter",
        "heaviside",
        "float_power",
    ):
        return
    x, y = i32(4, 1), i32(5, seed=1)
    y[y == 0] = 3
    check(f, ref, x, y)


INTEGER = ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"]


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int16", "uint32"])
def test_bits(name, dtype):
    x, y = np.arange(12).astype(dtype).reshape(3, 4) * 7, np.array([0, 1, 3, 2], dtype)
    check(getattr(bnp, name), getattr(np, name), x, y)
    check(bnp.bitwise_not, np.bitwise_not, x)
    check(bnp.bitwise_count, np.bitwise_count, x)


def test_division_by_zero_and_signs():
    x = np.array([5.0, -5.0, 0.0, 7.5, -7.5, 1.0], np.float32)
    y = np.array([0.0, 0.0, 0.0, -2.0, 2.0, 0.1], np.float32)
    check(bnp.floor_divide, np.floor_divide, x, y)
    check(bnp.remainder, np.remainder, x, y)
    a, b = np.meshgrid(np.array([-7, -6, 0, 6, 7], np.int32), np.array([-3, -2, 2, 3], np.int32))
    check(bnp.floor_divide, np.floor_divide, a, b)
    check(bnp.remainder, np.remainder, a, b)
    same(divmod(bnp.asarray(a), 4), tuple(divmod(a, 4)))
    same(100 // bnp.asarray(b), 100 // b)


def test_power():
    x = f32(2, 3, low=0.5)
    for n in (0, 1, 2, 3, -1, -2, 7):
        check(lambda v, n=n: v**n, lambda v, n=n: v ** np.float32(n), x, rtol=1e-4)
    check(lambda v: v**0.5, lambda v: v ** np.float32(0.5), x)
    check(lambda v: 2.0**v, lambda v: np.float32(2) ** v, x)
    check(bnp.power, np.power, i32(6), np.array([0, 1, 2, 3, 5, 9], np.int32))
    check(lambda v: v**3, lambda v: v**3, i32(5))
    check(lambda v: 2**v, lambda v: 2**v, np.arange(5, dtype=np.int32))
    with pytest.raises(errors.ValueRangeError, match="negative power"):
        bnp.arange(3) ** -1


def test_round_and_nan_to_num():
    x = np.array([0.5, 1.5, -2.567, 1234.5678], np.float32)
    for d in (-2, 0, 1, 2):
        check(lambda v, d=d: bnp.round(v, d), lambda v, d=d: np.round(v, d), x)
    check(lambda v: bnp.round(v, -1), lambda v: np.round(v, -1), np.array([14, 15, 16, 25], np.int32))
    check(lambda v: bnp.nan_to_num(v, nan=1.0, posinf=2.0, neginf=3.0),
          lambda v: np.nan_to_num(v, nan=1.0, posinf=2.0, neginf=3.0), SPECIAL)  # fmt: skip


def test_extremes():
    big = np.array([3e38, 1e-30, 0.0, np.inf], np.float32)
    check(bnp.hypot, np.hypot, big, big[::-1].copy())
    infinities = np.array([np.inf, -np.inf, 0.0, np.nan], np.float32)
    check(bnp.logaddexp, np.logaddexp, infinities, infinities[::-1].copy())
    check(bnp.logaddexp, np.logaddexp, infinities, infinities)
    check(bnp.fmax, np.fmax, infinities, np.ones(4, np.float32))
    check(bnp.fmin, np.fmin, np.ones(4, np.float32), infinities)


def test_where_and_clip():
    x, y = f32(2, 3), f32(3, seed=1)
    check(bnp.where, np.where, boolean(2, 1), x, y)
    check(bnp.where, np.where, boolean(4, 1, 3), x, y)
    check(lambda v: bnp.where(v > 0, v, 0.0), lambda v: np.where(v > 0, v, np.float32(0)), x)
    check(lambda c: bnp.where(c, 1, 0), lambda c: np.where(c, 1, 0), boolean(5))
    check(lambda v: bnp.where(True, v, 0), lambda v: v, x)
    check(lambda v: bnp.clip(v, -1, 1), lambda v: np.clip(v, -1, 1), x)
    check(lambda v: bnp.clip(v, min=0), lambda v: np.clip(v, 0, None), x)
    check(lambda v: bnp.clip(v, max=0), lambda v: np.clip(v, None, 0), x)
    check(lambda v, m: bnp.clip(v, m, 1.0), lambda v, m: np.clip(v, m, np.float32(1)), x, y)
    check(lambda v: bnp.clip(v, 0.5, 2), lambda v: np.clip(v, np.float32(0.5), 2), i32(4), dtype=False)
    assert bnp.clip(bnp.arange(3), 0.5, 2).dtype == np.float32


OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
             operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_with_everything(op):
    x, y = f32(2, 3, low=0.5), f32(3, low=0.5, seed=1)
    a, b = bnp.asarray(x), bnp.asarray(y)
    same(op(a, a), op(x, x))
    same(op(a, b), op(x, y))
    same(op(a, y), op(x, y))
    same(op(x, b), op(x, y))  # NumPy on the left gives way
    same(op(a, 2), op(x, np.float32(2)))
    same(op(2, a), op(np.float32(2), x))
    same(op(a, 1.5), op(x, np.float32(1.5)))
    same(op(np.float32(1.5), a), op(np.float32(1.5), x))
    same(op(a, np.float32(1.5)), op(x, np.float32(1.5)))
    same(jit(op)(a, b), op(x, y))
    same(jit(lambda v: op(np.float32(1.5), v))(a), op(np.float32(1.5), x))
    same(jit(lambda v: op(x, v))(b), op(x, y))


def test_more_operators():
    n, m = i32(5), i32(5, seed=2)
    for op in (operator.and_, operator.or_, operator.xor):
        check(op, op, n, m)
        check(op, op, n > 0, m > 0)
        same(op(5, bnp.asarray(n)), op(np.int32(5), n))
    check(operator.lshift, operator.lshift, np.abs(n), np.abs(m))
    check(operator.rshift, operator.rshift, n, np.abs(m))
    for op in (operator.neg, operator.pos, operator.abs, operator.invert):
        check(op, op, n)
    check(round, np.round, f32(4))
    check(lambda v: round(v, 1), lambda v: np.round(v, 1), f32(4))
    same(bnp.asarray(n > 0) + bnp.asarray(m > 0), (n > 0) + (m > 0))
    same(bnp.asarray(n > 0) * bnp.asarray(m > 0), (n > 0) * (m > 0))


def test_foreign_operands():
    x = bnp.ones(2)
    assert (x == None) is False  # noqa: E711
    assert (x != "a") is True
    with pytest.raises(TypeError):
        x + object()
    with pytest.raises(TypeError):
        x < "a"
    with pytest.raises(errors.ArgumentError, match="asarray"):
        x + [1, 2]

    class Other:
        def __radd__(self, other):
            return "mine"

    assert x + Other() == "mine"


def test_half_precision():
    x = bnp.asarray(f32(4), dtype="bfloat16")
    assert (x + 1).dtype == (x * 2.0).dtype == (x / 3).dtype == bnp.exp(x).dtype == bnp.bfloat16
    assert (x + np.float32(1)).dtype == bnp.float32


@pytest.mark.parametrize(
    "f, count",
    [
        (lambda x, y: x + y, 1),
        (lambda x, y: x * 2.0, 1),
        (lambda x, y: 2 * x, 1),
        (lambda x, y: 1.0 / x, 1),
        (lambda x, y: x**2, 1),
        (lambda x, y: bnp.maximum(x, 0), 1),
        (lambda x, y: bnp.where(x > 0, x, 0.0), 2),
        (lambda x, y: bnp.clip(x, 0, 1), 2),
        (lambda x, y: x + y[0], 4),
        (lambda x, y: x / x.sum(), 2),
        (lambda x, y: x - x.mean(-1, keepdims=True), 5),
        (lambda x, y: x[None] + y, 3),
        (lambda x, y: x.T, 1),
        (lambda x, y: x.reshape(x.shape), 0),
        (lambda x, y: x.astype("float32"), 0),
        (lambda x, y: x @ y.T, 2),
        (lambda x, y: bnp.einsum("ij,kj->ik", x, y), 1),
        (lambda x, y: x[0], 2),
        (lambda x, y: x[:, 0], 2),
        (lambda x, y: x[..., :2], 1),
        (lambda x, y: x[::-1], 1),
        (lambda x, y: bnp.sin(x) * bnp.cos(y), 3),
        (lambda x, y: x.at[0].set(1.0), 2),
    ],
)
def test_equations(f, count):
    """The number of equations of typical expressions."""
    x = np.ones((3, 3), np.float32)
    assert len(make_jaxpr(f)(x, x).eqns) == count, make_jaxpr(f)(x, x)


def test_gradients():
    assert float(grad(lambda x: bnp.sqrt(x * x + 1.0))(2.0)) == pytest.approx(2 / 5**0.5)
    g = grad(lambda x: (bnp.where(x > 0, x, 0.0) ** 2).sum())
    same(g(bnp.asarray([1.0, -1.0, 3.0])), np.array([2, 0, 6], np.float32))
    same(grad(lambda x: bnp.logaddexp(x, 1.0))(1.0), np.float32(0.5))


def test_errors():
    with pytest.raises(errors.ShapeError) as e:
        bnp.ones((2, 3)) + bnp.ones(4)
    assert (
        "(2, 3) and (4,)" in str(e.value) and "fix:" in str(e.value) and "test_elementwise.py" in str(e.value)
    )
    with pytest.raises(errors.ArgumentError, match=r"asarray"):
        bnp.sin([1.0, 2.0])
    with pytest.raises(errors.ArgumentError, match="str"):
        bnp.add("a", 1)
    with pytest.raises(errors.DtypeError):
        bnp.asarray([True]) - bnp.asarray([True])
    with pytest.raises(errors.DtypeError):
        -bnp.asarray([True])
    with pytest.raises(errors.ValueRangeError, match="does not fit"):
        bnp.ones(3, "uint8") + 300
    with pytest.raises(errors.ValueRangeError, match="does not fit"):
        bnp.ones(3, "int32") + 2**40
    with pytest.raises(errors.DtypeError, match="no implicit promotion"):
        bnp.ones(3, "float8_e5m2") + bnp.ones(3, "float32")
    with pytest.raises(errors.ConcretizationError, match="where"):
        jit(lambda x: x if x > 0 else -x)(1.0)


@pytest.mark.parametrize("x, y", [(-3, -3), (2, -1), (True, -1), (np.int32(3), -1), (np.arange(1, 4), -2)])
def test_integers_to_negative_powers(x, y):
    with pytest.raises(errors.ValueRangeError, match="negative power"):
        bnp.power(x, y)


def test_integers_to_arrays_of_negative_powers():
    x = np.array([0, 1, 1, -1, -1, 2, -3, 2**31 - 1, 2], np.int32)
    y = np.array([-1, -1, -2, -3, -2, -1, -70, -1, 5], np.int32)
    check(bnp.power, lambda x, y: np.array([0, 1, 1, -1, 1, 0, 0, 0, 32], np.int32), x, y)


def test_special_values():
    x = np.array([np.inf, np.nan, -np.inf, np.nan, 1], np.float32)
    y = np.array([np.nan, -np.inf, 1, 1, np.nan], np.float32)
    check(bnp.hypot, np.hypot, x, y)
    with pytest.raises(errors.DtypeError, match="hypot of complex"):
        bnp.hypot(1j, 2.0)
    check(bnp.angle, np.angle, np.array([0.0, -0.0, -2, 3, np.nan, -np.inf], np.float32))
    check(bnp.rint, lambda x: x.astype(np.float32), np.array([1, -2], np.int32))
    check(bnp.rint, lambda x: x.astype(np.float32), np.array([True, False]))
