"""Elementwise functions in C: against NumPy, against a C compiler, under transforms, and what they refuse."""

import ctypes
import math
import shutil
import subprocess

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
from hypothesis import given

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.programs.simplify import simplify
from blufunc.testing import check_grads
from tests.transforms.common import arr, close, draw

LEAKY = "x > 0 ? x : alpha * x"
HUBER = """
    __device__ float huber(const float error, float delta) {
        float size = fabsf(error);          // a local variable
        if (size <= delta) return 0.5f * error * error;
        return delta * (size - 0.5f * delta);
    }"""
X, Y = np.linspace(-2.3, 2.9, 14), np.linspace(3.1, -0.7, 14)

# text of x and y, and what NumPy gives
FORMULAS = [
    ("x + y * x - y / x", lambda x, y: x + y * x - y / x),
    ("-x * -y - -1", lambda x, y: x * y + 1),
    ("(x + y) * (x - y)", lambda x, y: (x + y) * (x - y)),
    ("x - y - 1", lambda x, y: x - y - 1),
    ("x / y / 2", lambda x, y: x / y / 2),
    ("1 / 2 * x + 1.0 / 2 * y", lambda x, y: y / 2),
    ("x < y ? x : y", np.minimum),
    (
        "x < 0 ? y < 0 ? 1 : 2 : x > 1 ? 3.5 : y",
        lambda x, y: np.select([(x < 0) & (y < 0), x < 0, x > 1], [1, 2, 3.5], y),
    ),
    ("(x > 0 && y > 0 || x < -1) * x", lambda x, y: ((x > 0) & (y > 0) | (x < -1)) * x),
    ("!(x > 0) + !!x + (y == y)", lambda x, y: 1.0 * ~(x > 0) + (x != 0) + 1),
    ("fmod(x, y) + x % y", lambda x, y: 2 * np.fmod(x, y)),
    ("exp(x) + expm1f(y) - exp2(x)", lambda x, y: np.exp(x) + np.expm1(y) - np.exp2(x)),
    (
        "log(fabs(x)) * log2(y * y) + log10(x*x)",
        lambda x, y: np.log(abs(x)) * np.log2(y * y) + np.log10(x * x),
    ),
    (
        "log1p(x * x) + sqrt(abs(x)) + rsqrt(1 + x * x)",
        lambda x, y: np.log1p(x * x) + abs(x) ** 0.5 + (1 + x * x) ** -0.5,
    ),
    ("pow(x, 3) - pow(x * x, 0.7) + powf(2, y)", lambda x, y: x**3 - (x * x) ** 0.7 + 2.0**y),
    ("sin(x) * cosf(y) + tan(x / 3)", lambda x, y: np.sin(x) * np.cos(y) + np.tan(x / 3)),
    ("tanh(x) + sinh(x) / cosh(y)", lambda x, y: np.tanh(x) + np.sinh(x) / np.cosh(y)),
    (
        "asin(x / 4) + acos(x / 4) * atan(y) - atan2(x, y)",
        lambda x, y: np.arcsin(x / 4) + np.arccos(x / 4) * np.arctan(y) - np.arctan2(x, y),
    ),
    (
        "asinh(x) + acosh(2 + x * x) + atanh(x / 5)",
        lambda x, y: np.arcsinh(x) + np.arccosh(2 + x * x) + np.arctanh(x / 5),
    ),
    (
        "erf(x) - erfc(y) + erfinv(x / 4)",
        lambda x, y: scipy.special.erf(x) - scipy.special.erfc(y) + scipy.special.erfinv(x / 4),
    ),
    (
        "lgamma(x * x) + tgamma(1.5 + x * x)",
        lambda x, y: scipy.special.gammaln(x * x) + scipy.special.gamma(1.5 + x * x),
    ),
    (
        "floor(x) + 10 * ceil(x) + 100 * trunc(x) + rint(y)",
        lambda x, y: np.floor(x) + 10 * np.ceil(x) + 100 * np.trunc(x) + np.rint(y),
    ),
    (
        "max(x, y) - min(x, 0.5) + clamp(x, -1, 1)",
        lambda x, y: np.maximum(x, y) - np.minimum(x, 0.5) + np.clip(x, -1, 1),
    ),
    ("fmax(x, y) - fmin(x, 0.5f)", lambda x, y: np.maximum(x, y) - np.minimum(x, 0.5)),
    ("fma(x, y, 2) + hypot(x, y) + cbrt(y)", lambda x, y: x * y + 2 + np.hypot(x, y) + np.cbrt(y)),
    ("copysign(y, x) + fdim(x, y)", lambda x, y: np.copysign(y, x) + np.maximum(x - y, 0)),
    ("isnan(x / 0 - x / 0) * isfinite(x) + isinf(x / 0)", lambda x, y: 2.0 + 0 * x),
    ("(int)x * 1.0 + (float)0.5 * static_cast<double>(y)", lambda x, y: np.trunc(x) + 0.5 * y),
    ("x * M_PI + (x > INFINITY ? NAN : 1e-1)", lambda x, y: x * np.pi + 0.1),
    ("x /* both\n */ * y // the end", lambda x, y: x * y),
    ("2.5e-1 * x + .5 * y + 3. + 0x10", lambda x, y: 0.25 * x + 0.5 * y + 19),
]


@pytest.mark.parametrize("text, want", FORMULAS, ids=[t.split("\n")[0] for t, _ in FORMULAS])
def test_formulas_are_as_numpy_has_them(text, want):
    f = bf.elementwise(text, inputs="x, y") if "y" in text else bf.elementwise(text, inputs=["x"])
    args = (X, Y) if "y" in text else (X,)
    got = f(*map(arr, args))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(np.asarray(got, np.float64), want(X, Y), rtol=1e-13, atol=1e-13)
    close(bf.jit(f)(*map(arr, args)), got)


def test_round_goes_away_from_zero_and_not_by_adding_a_half():
    x = np.array([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999999999999994, 3.2, -3.7, np.inf, np.nan])
    want = [1.0, 2.0, 3.0, -1.0, -3.0, 0.0, 3.0, -4.0, np.inf, np.nan]
    np.testing.assert_array_equal(bf.elementwise("round(x)")(arr(x)), want)


def test_fmax_passes_over_nan_and_max_does_not():
    x, y = arr([np.nan, 1.0, np.nan]), arr([2.0, np.nan, np.nan])
    np.testing.assert_array_equal(bf.elementwise("fmax(x, y)")(x, y), [2.0, 1.0, np.nan])
    np.testing.assert_array_equal(bf.elementwise("fmin(x, y)")(x, y), [2.0, 1.0, np.nan])
    np.testing.assert_array_equal(bf.elementwise("max(x, y)")(x, y), [np.nan] * 3)


def test_signed_zeros():
    x = arr([0.0, -0.0, -1.0])
    assert np.signbit(bf.elementwise("copysign(2, x)")(x)).tolist() == [False, True, True]
    assert np.signbit(bf.elementwise("-x")(x)).tolist() == [True, False, False]


# -- against a C compiler --------------------------------------------------------------------------

INTEGERS = [
    "x + y * x - y", "x / (y * y + 1)", "-x / 3", "x % (y * y + 1)", "-x % 4", "x & y | 6 ^ x", "~x << 2", "x >> 1",
    "x << 2 >> 1", "x > y", "x < y == y < x", "x & 1 ? y : -y", "!x + !y", "(x > 0) + (y > 0) * 2", "x != y && x",
    "x == y || y", "x > 2 & y < 3", "max(x, y) - min(x, 3)", "x - -y", "+x - ~y", "1 + 2 * 3 - 4 / 3 % 2 + x * 0",
    "7 / 2 * x", "-7 / 2 + x", "-7 % 3 + x", "x * 010 + 0xFF", "abs(x) - y",
]  # fmt: skip
FLOATS = [
    "x - y - x", "x / y / 3", "x * y + x / y", "x < y ? x > 0 ? 1.5 : y : x", "-x * y", "!x + x", "x > 0 || y > 0",
    "1 / 2 + x", "1.0 / 2 + x", "7 / 2 * x", "x - 3 * -y", "x > y == y > x", "(int)(x * 3) / 2 + x", "(int)x % 2 * y",
    "x ? y : 2", "fmod(x, 0.7)", "round(x * 2)", "copysign(x, y)", "fdim(x, y)", "fmax(x, -y)", "pow(fabs(x), y)",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """All expressions as C functions, in one library."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("expressions")
    prelude = "#include <math.h>\n#include <stdlib.h>\n" + "".join(
        f"#define {f}(a, b) ((a) {op} (b) ? (a) : (b))\n" for f, op in (("max", ">"), ("min", "<"))
    )
    texts = [("int", INTEGERS), ("double", FLOATS)]
    code = [f"double {t}_{i}({t} x, {t} y) {{ return {e}; }}" for t, es in texts for i, e in enumerate(es)]
    (folder / "e.c").write_text(prelude + "\n".join(code))
    library = folder / "e.so"
    subprocess.run([cc, "-O0", "-w", "-shared", "-fPIC", "-o", library, folder / "e.c", "-lm"], check=True)
    return ctypes.CDLL(library)


def by_c(library, kind, i, xs, ys):
    function = getattr(library, f"{kind}_{i}")
    function.restype = ctypes.c_double
    function.argtypes = [getattr(ctypes, f"c_{kind}")] * 2
    return [function(x, y) for x, y in zip(xs, ys)]


@pytest.mark.parametrize("i", range(len(INTEGERS)), ids=INTEGERS)
def test_integers_are_as_c_has_them(compiled, i):
    xs = [-9, -4, -1, 0, 1, 2, 3, 5, 8, 13]
    pairs = [(x, y) for x in xs for y in xs[::2]]
    x, y = ([p[k] for p in pairs] for k in (0, 1))
    f = bf.elementwise(INTEGERS[i], inputs=("x", "y"))
    got = f(bnp.asarray(x, "int32"), bnp.asarray(y, "int32"))
    assert got.dtype in ("int32", "bool")
    assert np.asarray(got, float).tolist() == by_c(compiled, "int", i, x, y)


@pytest.mark.parametrize("i", range(len(FLOATS)), ids=FLOATS)
def test_floats_are_as_c_has_them(compiled, i):
    got = bf.elementwise(FLOATS[i], inputs=("x", "y"))(arr(X), arr(Y))
    np.testing.assert_allclose(np.asarray(got, float), by_c(compiled, "double", i, X, Y), rtol=1e-15)


# -- any expression --------------------------------------------------------------------------------

BINARY = {"+": 8, "-": 8, "*": 9, "<": 6, ">=": 6, "&&": 1, "||": 0}


def numbers(depth):
    """Pairs of a text with how tightly it binds, and its value for x, y and z as a function of NumPy's."""
    leaf = st.sampled_from("xyz").map(lambda n: ((n, 11), lambda env: env[n])) | st.sampled_from(
        [0.25, 1.5, 3]
    ).map(lambda v: ((str(v), 11), lambda env: np.float64(v)))
    if not depth:
        return leaf
    below = numbers(depth - 1)
    return leaf | st.one_of(
        st.tuples(st.sampled_from(sorted(BINARY)), below, below).map(binary),
        st.tuples(below, below, below).map(choice),
        below.map(lambda a: (("-" + within(a, 10), 10), lambda env: -a[1](env))),
        below.map(lambda a: ((f"tanh({a[0][0]})", 11), lambda env: np.tanh(a[1](env)))),
    )


def within(part, level):
    """The text of a part, in parentheses only where it binds less tightly than ``level``; - - is not --."""
    text, binds = part[0]
    return f"({text})" if binds < level or text[0] == "-" else text


def binary(drawn):
    op, a, b = drawn
    level = BINARY[op]
    apply = {
        "+": np.add, "-": np.subtract, "*": np.multiply, "<": np.less, ">=": np.greater_equal,
        "&&": np.logical_and, "||": np.logical_or,
    }[op]  # fmt: skip
    text = f"{within(a, level)} {op} {within(b, level + 1)}"
    return (text, level), lambda env: np.asarray(apply(a[1](env), b[1](env)), np.float64)


def choice(drawn):
    c, a, b = drawn
    text = f"{within(c, 0)} ? {a[0][0]} : {b[0][0]}"
    return (text, -1), lambda env: np.where(c[1](env) != 0, a[1](env), b[1](env))


@given(numbers(4))
def test_any_expression(expression):
    (text, _), value = expression
    env = {n: np.array(v) for n, v in zip("xyz", ([-1.0, 0.5, 2.0], [0.3, -0.7, 1.1], [0.0, 0.0, -2.5]))}
    f = bf.elementwise(text, inputs="x y z")
    got = f(*map(arr, env.values()))
    assert got.shape == (3,)
    want = np.broadcast_to(value(env), (3,))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-6)


# -- functions -------------------------------------------------------------------------------------

FUNCTIONS = [
    ("float f(float x, float y) { return x * y; }", lambda x, y: x * y),
    (
        "float f(float x, float y) { float a = x + 1, b; b = a * y; b += 2; b *= b; return b - a; }",
        lambda x, y: ((x + 1) * y + 2) ** 2 - (x + 1),
    ),
    (
        "float f(float x, float y) { if (x > 0) { if (y > 0) return 1; x = -x; } "
        "else if (y > 0) { x = 2 * x; } return x; }",
        lambda x, y: np.where(x > 0, np.where(y > 0, 1, -x), np.where(y > 0, 2 * x, x)),
    ),
    (
        "float f(float x, float y) { float s; if (x < y) { float t = x; s = t * t; } "
        "else { float t = y; s = t - 1; } return s; }",
        lambda x, y: np.where(x < y, x * x, y - 1),
    ),
    (
        "float f(float x, float y) { if (x > 1) return 3; if (y > 1) return 4; if (x > 0) { return x; } return y; }",
        lambda x, y: np.select([x > 1, y > 1, x > 0], [3, 4, x], y),
    ),
    (
        "template <typename T> static inline T f(T x, T y) { const T one = 1; auto z = x * one; return z + y; }",
        lambda x, y: x + y,
    ),
    (
        "float f(float x, float y) { int n = x * 2; bool big = n; return n / 2 + (big ? y : 0); }",
        lambda x, y: np.trunc(np.trunc(x * 2) / 2) + np.where(np.trunc(x * 2) != 0, y, 0),
    ),
    ("float f(float x, float y) { if (true) return x; return y; }", lambda x, y: x),
    (
        "float f(float x, float y) { { float a = x; y = a; } ; { float a = 2; y *= a; } return y; }",
        lambda x, y: 2 * x,
    ),
]


@pytest.mark.parametrize("text, want", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions(text, want):
    x, y = X.astype(np.float32), Y.astype(np.float32)
    got = bf.elementwise(text)(bnp.asarray(x), bnp.asarray(y))
    assert got.dtype == "float32"
    np.testing.assert_allclose(got, want(x, y), rtol=2e-6)


def test_a_function_has_its_own_name_and_parameters():
    huber = bf.elementwise(HUBER)
    assert huber.__name__ == "huber"
    x = bnp.asarray([-3.0, 0.5, 2.0])
    np.testing.assert_allclose(huber(x, delta=1.0), [2.5, 0.125, 1.5])
    np.testing.assert_allclose(huber(delta=1.0, error=x), huber(x, 1.0))


# -- types and shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_literals_and_numbers_take_the_dtype_of_the_arrays(dtype):
    x = bnp.asarray([-1.0, 0.5], dtype)
    f = bf.elementwise(LEAKY, alpha=0.1)
    for got in (f(x), f(x, 0.1), f(x, alpha=0.1), bf.jit(f)(x)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, bnp.where(x > 0, x, x * 0.1))


TYPES = [
    ("x + y", "int32", "float16", "float16"),
    ("x + y", "bfloat16", "float32", "float32"),
    ("x + 1", "int8", "int8", "int8"),
    ("x + 1.5", "int32", "int32", "float32"),
    ("exp(x)", "int32", "int32", "float32"),
    ("x > y", "float32", "float64", "bool"),
    ("(x > 0) + (y > 0)", "float32", "float32", "int32"),
    ("(x > 0) * y", "float32", "float16", "float16"),
    ("x > 0 ? x : y", "float16", "float32", "float32"),
    ("x > 0 ? 1 : 0", "float16", "float16", "int32"),
    ("x > 0 ? 1.0f : 0", "float16", "float16", "float32"),
    ("(double)x", "float16", "float16", "float64"),
    ("x >> 1", "uint8", "uint8", "uint8"),
    ("double f(float x, int y) { return x * y; }", "float16", "int8", "float64"),
    ("T f(T x, T y) { T a = 1; return x * a; }", "float16", "float32", "float32"),
    ("half f(half x, half y) { return x * y; }", "float16", "float16", "float16"),
    ("auto f(auto x, auto y) { return x; }", "float16", "float32", "float16"),
    ("unsigned char f(float x, float y) { return fabs(x); }", "float32", "float32", "uint8"),
]


@pytest.mark.parametrize("text, a, b, want", TYPES, ids=[f"{t[0]} of {t[1]} and {t[2]}" for t in TYPES])
def test_types_of_results(text, a, b, want):
    inputs = None if "{" in text else "x, y"
    f = bf.elementwise(text, inputs=inputs)
    assert f(bnp.asarray([1, 2], a), bnp.asarray([3, 4], b)).dtype == want


def test_out_is_the_dtype_of_an_expression():
    step = bf.elementwise("x > 0 ? 1 : 0", out="float16")
    assert step(bnp.asarray([1.0, -1.0])).dtype == "float16"


def test_shapes_broadcast():
    f = bf.elementwise("x * 10 + y")
    x, y = arr([[1.0], [2.0]]), arr([3.0, 4.0, 5.0])
    close(f(x, y), x * 10 + y)
    close(f(x, 2.0), x * 10 + 2)
    one = bf.elementwise("x > 0 ? 1.0 : 1.0")(x)
    assert one.shape == (2, 1)
    first = bf.elementwise("float f(float x, float y) { return x; }")
    assert first(bnp.ones(()), bnp.ones((2, 3))).shape == (2, 3)


def test_numbers_alone():
    assert float(bf.elementwise("x * y")(2, 3.5)) == 7.0
    assert float(bf.elementwise("2 * M_PI")()) == pytest.approx(2 * math.pi)


# -- transforms ------------------------------------------------------------------------------------

SMOOTH = [
    ("x * y + tanh(x) / (1 + y * y)", 3),
    ("pow(x, 3) * exp(-y * y)", 3),
    ("x > 0 ? x * y : sin(y)", 3),
    ("x > 0 ? (y > 0 ? x * y : x / y) : log(1 + x * x)", 2),
    ("fmax(x, y) * fmin(x, 2 * y) + fabs(x) + hypot(x, y)", 2),
    (
        "double f(double x, double y) { double a = x; if (x < y) { a *= y; } else { a -= y; } return a * a; }",
        3,
    ),
]


@pytest.mark.parametrize("text, order", SMOOTH, ids=[s[0] for s in SMOOTH])
def test_derivatives(text, order):
    f, x, y = bf.elementwise(text), arr([[-0.7], [1.3]]), arr([0.8, -1.1, 0.4])  # away from the kinks
    check_grads(f, (x[:, 0], y[:2]), order)
    check_grads(f, (x, y), 2)
    check_grads(f, (x, y[0]), 2)


BRANCHES = [
    ("x > 0 ? sqrt(x) : 0", 0.0, 0.0, 0.0),
    ("x > 0 ? x * log(x) : 0", 0.0, 0.0, 0.0),
    ("x == 0 ? 1 : sin(x) / x", 0.0, 1.0, 0.0),
    ("x > 700 ? x : log(1 + exp(x))", 1e4, 1e4, 1.0),
]


@pytest.mark.parametrize("text, at, value, slope", BRANCHES, ids=[b[0] for b in BRANCHES])
def test_the_derivative_is_that_of_the_branch_that_is_taken(text, at, value, slope):
    f = bf.elementwise(text)
    x = arr([at, 0.25])
    for transform in (bf.grad, lambda g: bf.jit(bf.grad(g)), bf.jacfwd):
        assert transform(lambda x: f(x).sum())(x)[0] == slope
    assert f(x)[0] == value
    assert np.isfinite(
        bf.grad(lambda x: bf.grad(lambda x: f(x).sum())(x).sum())(x)
    ).all()  # and of the second


def test_a_rule_of_ones_own():
    def straight_through(primals, tangents):
        (x,), (t,) = primals, tangents
        return bnp.round(x), t

    rounded = bf.elementwise("rint(x)", jvp=straight_through)
    x = arr([0.3, 1.7])
    close(rounded(x), bnp.round(x))
    close(bf.grad(lambda x: rounded(x).sum())(x), bnp.ones_like(x))
    assert bf.grad(bf.elementwise("rint(x)"))(arr(0.3)) == 0

    scaled = bf.elementwise(
        "alpha * x", alpha=2.0, jvp=lambda ps, ts: (ps[0] * ps[1], 100 * ts[1] + 0 * ts[0])
    )
    close(bf.grad(lambda x: scaled(x).sum())(x), 100 * bnp.ones_like(x))


def test_vmap_and_compositions():
    f = bf.elementwise("x * y + sin(x)")
    x, y = draw(4, 3), draw(4, seed=1)
    want = x * y[:, None] + bnp.sin(x)
    close(bf.vmap(f)(x, y), want)
    close(bf.jit(bf.vmap(f, (1, None), 1))(x, 2.0), x * 2 + bnp.sin(x))
    slope = bf.vmap(bf.grad(lambda x, y: f(x, y).sum(), (0, 1)))
    close(slope(x, y), (y[:, None] + bnp.cos(x), x.sum(1)))
    close(bf.hessian(f)(arr(0.3), arr(2.0)), -bnp.sin(arr(0.3)))


def test_rules_in_a_scope_are_seen_and_forgotten():
    f = bf.elementwise("tanh(x) * 2")
    x = arr(0.3)
    usual = bf.grad(f)(x)
    with bf.override(lax.tanh_p, jvp=lambda ps, ts: (lax.tanh_p.bind(*ps), ts[0])):
        assert bf.grad(f)(x) == 2.0
    close(bf.grad(f)(x), usual)


def test_under_autocast():
    f = bf.elementwise("x > 0 ? x * x : 0.5 * tanh(x)")
    x, w = bnp.asarray([[0.5, -1.0]]), bnp.asarray([[1.0, 2.0], [0.25, -0.5]])
    loss = lambda w: f(x @ w).sum()
    np.testing.assert_allclose(bf.grad(bf.autocast(loss))(w), bf.grad(loss)(w), rtol=2e-2, atol=1e-2)
    assert bf.grad(bf.autocast(loss))(w).dtype == "float32"


def test_integers_have_no_derivative():
    f = bf.elementwise("n * x * x")
    n, x = bnp.asarray([1, 2]), arr([3.0, 4.0])
    close(bf.grad(lambda x: f(n, x).sum())(x), 2 * n * x)
    _, t = bf.jvp(bf.elementwise("x > 0"), (x,), (x,))
    assert t.dtype == bf.float0


def test_it_becomes_operations_like_any_others():
    """Nothing is left that a fuser would have to know."""
    f = bf.elementwise(LEAKY, alpha=0.25)
    jaxpr = simplify(bf.make_jaxpr(bf.jit(lambda x: f(x * 2) + 1))(bnp.ones(3)))
    assert [e.prim for e in jaxpr.eqns] == [lax.mul_p, lax.gt_p, lax.mul_p, lax.select_p, lax.add_p]
    slope = simplify(bf.make_jaxpr(bf.grad(lambda x: f(x).sum()))(bnp.ones(3)))
    assert [e.prim.name for e in slope.eqns][-2:] == ["gt", "select"]


def test_it_is_traced_once_for_each_combination_of_dtypes():
    f = bf.elementwise(LEAKY)
    jitted = bf.jit(lambda x, a: f(x, a))
    jaxprs = [str(bf.make_jaxpr(jitted)(bnp.ones(n), 0.5)) for n in (3, 3)]
    assert jaxprs[0] == jaxprs[1]
    assert str(bf.make_jaxpr(f)(bnp.ones((2, 2)), 0.5)).count("custom_jvp_call") == 1


# -- errors ----------------------------------------------------------------------------------------

REFUSED = {
    "x > 0 ? x : ": ("column 13: a value is expected here, not the end", None),
    "x + * y": ("column 5: a value is expected here, not '*'", None),
    "(x + y": ("')' is expected here, not the end", None),
    "x y": ("column 3: the end is expected here, not 'y'", None),
    "tnah(x)": ("column 1: there is no function 'tnah'", "did you mean tan"),
    "sin(x) + frobnicate(x)": ("column 10: there is no function 'frobnicate'", "the functions are"),
    "tanh(x, y)": ("tanh takes 1 argument, not 2", None),
    "pow(x)": ("pow takes 2 arguments, not 1", None),
    "x[3]": ("column 2: arrays, pointers", "bf.cuda_kernel"),
    "x.y": ("arrays, pointers and structures", "bf.cuda_kernel"),
    "x = 3": ("column 3: the end is expected here, not '='", None),
    "x $ 3": ("column 3: '$' is no part of an expression", None),
    "1.5q + x": ("1.5q is no number", None),
    "x++": ("++ and --", None),
    "": ("a value is expected here, not the end", None),
    "float f(float x) { x = y; return x; }": ("there is no input 'y'", "the inputs are x"),
    "float f(float x) { yy = x; return x; }": ("there is no variable 'yy'", "declare it"),
    "float f(float x) { if (x > 0) return x; }": ("f can end without a return", "every path"),
    "float f(float x) { float y; return y; }": ("y has no value on some path", None),
    "float f(float x) { float y; if (x > 0) y = 1; return y; }": ("y has no value on some path", None),
    "float f(float x) { float y; y += 1; return y; }": ("y has no value yet", None),
    "float f(float x) { float x = 2; return x; }": ("the name 'x' is taken", None),
    "float f(float x) { { float y = 1; } return y; }": ("there is no input 'y'", None),
    "float f(float x) { for (int i = 0; i < 3; i++) x += 1; return x; }": (
        "loops are more",
        "bf.cuda_kernel",
    ),
    "float f(float x) { float y[3]; return x; }": ("arrays, pointers", "bf.cuda_kernel"),
    "float f(float *x) { return *x; }": ("pointers and references", "declare the element"),
    "float f(float x) { return x; } 3": ("the end is expected", None),
    "float f(float x) { return x;": ("'}' is expected here, not the end", None),
    "float f(x) { return x; }": ("the type of a parameter is expected", None),
    "f(float x) { return x; }": ("begins with the type of its result", None),
    "long float f(float x) { return x; }": ("there is no type 'long float'", "use one of"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_read_is_refused_with_its_place(text):
    what, fix = REFUSED[text]
    with pytest.raises(errors.CompileError) as caught:
        bf.elementwise(text)
    assert what in caught.value.what and (fix is None or fix in caught.value.fix)
    assert "test_elementwise.py" in caught.value.where
    shown, mark = caught.value.why.split("\n")
    assert shown in text and mark.strip() == "^"


def test_the_mark_is_under_the_place():
    with pytest.raises(errors.CompileError) as caught:
        bf.elementwise("float f(float x) {\n\tfloat a = 1;\n\treturn a + bb;\n}")
    assert "line 3, column 13" in caught.value.what
    assert caught.value.why == "\treturn a + bb;\n\t           ^"


def test_unknown_names_where_the_inputs_are_given():
    with pytest.raises(errors.CompileError, match="there is no input 'alhpa'") as caught:
        bf.elementwise("x > 0 ? x : alhpa * x", inputs="x, alpha")
    assert caught.value.fix == "did you mean alpha?"


F = bf.elementwise(LEAKY)
CALLS = {
    "too few": (lambda: F(arr(1.0)), errors.ArgumentError, "missing a required argument: 'alpha'"),
    "too many": (lambda: F(1.0, 2.0, 3.0), errors.ArgumentError, "too many"),
    "unknown": (lambda: F(1.0, beta=2.0), errors.ArgumentError, "missing|unexpected"),
    "no array": (lambda: F("a", 2.0), errors.ArgumentError, "argument x of elementwise is a str"),
    "complex": (lambda: F(arr([1j], complex), 1.0), errors.DtypeError, "real numbers"),
    "shapes": (lambda: F(bnp.ones(3), bnp.ones(4)), errors.ShapeError, r"\(3,\) and \(4,\)"),
    "bits of floats": (
        lambda: bf.elementwise("x & 1")(bnp.ones(3)),
        errors.DtypeError,
        "column 3: & of f32 and 1",
    ),
    "narrowing": (
        lambda: bf.elementwise(HUBER)(arr(1.0), 1.0),
        errors.DtypeError,
        "float error, and was given f64",
    ),
    "no text": (lambda: bf.elementwise(lambda x: x), errors.ArgumentError, "a text in C"),
    "no name": (lambda: bf.elementwise("x", name=3), errors.ArgumentError, "name=3"),
    "constant": (lambda: bf.elementwise("x", alpha=1), errors.ValueRangeError, "no such input"),
    "constant's kind": (lambda: bf.elementwise("x", x="a"), errors.ArgumentError, "x= of elementwise"),
    "inputs": (lambda: bf.elementwise("x", inputs=3), errors.ArgumentError, "no names"),
    "inputs twice": (lambda: bf.elementwise("x", inputs="x x"), errors.ValueRangeError, "twice"),
    "inputs of a function": (lambda: bf.elementwise(HUBER, inputs="x"), errors.CompileError, "given twice"),
    "out of a function": (lambda: bf.elementwise(HUBER, out="int8"), errors.ArgumentError, "leave it out"),
    "out": (lambda: bf.elementwise("x", out="blue"), errors.DtypeError, "blue"),
    "jvp": (lambda: bf.elementwise("x", jvp=3), errors.ArgumentError, "jvp=3 is no rule"),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls(case):
    call, error, match = CALLS[case]
    with pytest.raises(error, match=match) as caught:
        call()
    assert caught.value.where
