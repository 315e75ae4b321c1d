"""Functions of the host prelude against their primitives, in every dtype."""

import ctypes
import dataclasses
import math
import os
import re
import subprocess

import ml_dtypes
import numpy as np
import pytest
import scipy.special

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise, integers, numerics, special
from blufunc.core.ops.random_bits import threefry2x32
from blufunc.core.primitives.kinds import TYPES, Elementwise
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.codegen.source_files import HOST

C_TYPES = {
    "bool": "bool",
    "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "f16", "bfloat16": "bf16",
    "float32": "float", "float64": "double", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
STORAGE = {"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"}
ON_STORAGE = {"nextafter", "reduce_precision", "select", "copy", "stop_gradient"}
"""Primitives on stored values; all others work on floats."""
PARAMS = {
    "integer_pow": [{"y": y} for y in (0, 1, 2, 3, 5, -1, -2)],
    "reduce_precision": [
        {"exponent_bits": e, "mantissa_bits": m} for e, m in ((8, 7), (5, 10), (4, 3), (11, 52))
    ],
}
ELSEWHERE = {"convert", "bitcast"}  # templates of two types, with tests of their own

PRIMITIVES = {
    p.name: p
    for module in (elementwise, integers, special)
    for p in vars(module).values()
    if isinstance(p, Elementwise) and f"bf_{p.name}" in HOST.names and p.name not in ELSEWHERE
}
_BINARY = """add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge and or xor shift_left shift_right_logical
shift_right_arithmetic complex gcd logaddexp hypot"""
ARITY = dict.fromkeys(_BINARY.split(), 2) | {"select": 3, "clamp": 3}


@pytest.fixture(scope="module")
def compiler():
    found = toolchain.find()
    if found is None:
        pytest.skip("this machine has no C++ compiler")
    return found


def as_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def pointer(x):
    return ctypes.c_void_p(x.ctypes.data)


def call(function, xs, out_dtype, c_type=None):
    out = np.empty(xs[0].shape, out_dtype)
    function(*map(pointer, xs), pointer(out), ctypes.c_long(out.size))
    return out


def loop(name, in_types, out_type, expression):
    operands = "".join(f"const {t}* x{i}, " for i, t in enumerate(in_types))
    return (
        f'extern "C" void {name}({operands}{out_type}* out, long n) {{\n'
        f"  for (long i = 0; i < n; ++i) out[i] = {expression};\n}}\n"
    )


def values(dtype, rng, count=3000):
    """Special values, then random ones of all magnitudes; all values of 8 and 16 bits."""
    if dtype == np.bool_:
        return np.array([True, False] * 8)
    if dtypes.is_complex(dtype):
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return (rng.normal(size=count) + 1j * rng.normal(size=count)).astype(dtype) * part.type(2)
    width = dtype.itemsize * 8
    if width <= 16:
        return np.arange(2**width).astype(f"u{width // 8}").view(dtype)
    bits = rng.integers(0, 2**width, count, dtype=f"u{width // 8}").view(dtype)
    if dtypes.is_integer(dtype):
        info = np.iinfo(dtype)
        edges = [0, 1, 2, 3, 31, 32, 63, 64, 100, info.max, info.max - 1, info.min, info.min + 1]
        signed = [-1, -2, -3, -64] if info.min else []
        small = rng.integers(0, 70, count).astype(dtype)
        return np.concatenate([np.array(edges + signed, dtype), bits, small])
    info = np.finfo(dtype)
    edges = [
        0.0,
        1.0,
        0.5,
        2.0,
        3.0,
        np.inf,
        np.nan,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        1e-20,
        1e20,
    ]
    edges = np.array(edges, dtype)
    scaled = [(rng.normal(size=count) * s).astype(dtype) for s in (1e-3, 1, 30)]
    return np.concatenate([edges, -edges, bits, *scaled])


def operands(prim, dtype, rng):
    x = values(dtype, rng)
    arity = ARITY.get(prim.name, 1)
    if arity == 1:
        return [x]
    if x.size <= 24 or x.size > 30000:  # for 16 bits, not all pairs
        y = rng.permutation(x)
    else:
        y = np.concatenate([np.repeat(x[:24], 24), rng.permutation(x[24:])])[: x.size]
        x = np.concatenate([np.tile(x[:24], 24), x[24:]])[: x.size]
        y = y[: x.size]
    if prim.name == "complex":  # the definition turns infinities into NaN
        x, y = (np.where(np.isfinite(a), a, np.ones_like(a)) for a in (x, y))
    if prim.name == "select":
        return [rng.integers(0, 2, x.size).astype(bool), x, y]
    return [x, y, rng.permutation(y)][:arity]


def expression(prim, name, params):
    args = [f"x{i}[i]" for i in range(ARITY.get(prim.name, 1))]
    extra = [str(v) for v in params.values()]
    if name in STORAGE and prim.name not in ON_STORAGE:
        return f"bf_{prim.name}({', '.join([f'to_float({a})' for a in args] + extra)})"
    function = "pow_integers" if prim.name == "pow" and dtypes.is_integer(as_dtype(name)) else prim.name
    return f"bf_{function}({', '.join(args + extra)})"


def cases(name):
    """Primitives that accept a dtype, with their parameters."""
    dtype = as_dtype(name)
    for prim in PRIMITIVES.values():
        if not TYPES[prim.types][1](dtype):
            continue
        for params in PARAMS.get(prim.name, [{}]):
            if dtypes.is_integer(dtype) and params.get("y", 0) < 0:
                continue
            yield prim, params


def case_name(prim, params):
    return "_".join([f"k_{prim.name}", *(str(v).replace("-", "m") for v in params.values())])


ULPS = {
    "float32": {"default": 1, "rsqrt": 2, "tan": 2, "logistic": 3, "expm1": 2, "sin": 2, "cos": 2, "tanh": 2,
                "erf": 2, "erf_inv": 4, },
    "float64": {"default": 2, "tanh": 3, "logistic": 3, "erf_inv": 6, "cbrt": 4, "erf": 4, "sin": 1, "cos": 1,
               "hypot": 2, "sinh": 3, "erfc": 1},
}  # fmt: skip
EXACT = set(
    "neg add sub mul div rem max min abs sign square sqrt floor ceil trunc round is_finite eq ne lt le gt ge nextafter "
    "reduce_precision select clamp copy stop_gradient".split()
)


WIDER = {
    "float32": np.float64,
    "float64": np.longdouble,
    "complex64": np.complex128,
    "complex128": np.clongdouble,
}


def _lgamma(x):
    # SciPy's is infinite at the smallest values
    return np.where(np.abs(x) < 1e-300, -np.log(np.abs(x)), special.lgamma_p.impl(x))


BY_SCIPY = {"erf": scipy.special.erf, "erf_inv": scipy.special.erfinv, "lgamma": _lgamma}


def exact_reference(prim, xs):
    """The primitive in higher precision than the function under test, where possible."""
    if prim.name in BY_SCIPY:
        return BY_SCIPY[prim.name](xs[0].astype(np.float64))
    if prim.name == "erfc":  # SciPy's loses digits, all of them above 26.6
        return np.vectorize(math.erfc)(xs[0].astype(np.float64))
    xs = [x.astype(WIDER[x.dtype.name]) for x in xs]
    if prim.name == "logistic":  # the definition loses subnormals
        return np.exp(np.minimum(xs[0], 0)) / (1 + np.exp(-np.abs(xs[0])))
    return prim.impl(*xs)


def ulps_between(got, want):
    """Distance in ULPs of ``got``'s dtype; 0 for equal values and for two NaN."""
    nearest = want.astype(got.dtype)
    unit = np.spacing(np.maximum(np.abs(nearest), np.finfo(got.dtype).tiny))
    distance = np.abs(got.astype(np.longdouble) - want) / unit
    same = (got == nearest) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))


def assert_agrees(prim, name, xs, got, params):
    want = np.asarray(prim.impl(*xs, **params))
    label = f"{prim.name} {params} of {name}"
    if want.dtype.kind in "biu":
        wrong = got != want
    elif dtypes.is_complex(want.dtype):
        eps = 40 * np.finfo(want.dtype).eps
        scale = np.maximum(np.abs(want), 1e-3)
        if prim.name in ("pow", "tan", "tanh", "expm1", "log1p"):
            eps *= 10
        wrong = ~((np.abs(got - want) <= eps * scale) | (got == want) | (np.isnan(got) & np.isnan(want)))
    elif params.get("y") == 0:  # NumPy's half precision produces NaN
        wrong = got != 1
    elif prim.name in EXACT:
        wrong = ~((got == want) | ((got != got) & (want != want)))
        if prim.name not in ("max", "min", "clamp", "sign"):  # NumPy differs in signed zeros
            wrong |= (want == 0) & (np.signbit(got) != np.signbit(want))
    elif want.dtype.name in ULPS:
        if prim.name in ("logaddexp", "lgamma"):  # cancellation near 0
            want = exact_reference(prim, xs)
            size = np.fmax(1, np.fmax(np.abs(want), np.abs(xs[0]))).astype(got.dtype)
            same = (got == want.astype(got.dtype)) | (np.isnan(got) & np.isnan(want))
            error, limit = np.where(same, 0, np.abs(got - want) / np.spacing(size)), 4
        elif prim.name == "integer_pow":
            error, limit = ulps_between(got, want), 2 + abs(params["y"])
        else:
            error = ulps_between(got, exact_reference(prim, xs))
            limit = ULPS[want.dtype.name].get(prim.name, ULPS[want.dtype.name]["default"])
        wrong = error > limit
    else:  # rounded from float: a neighbor if the float is near a tie
        singles = [x.astype(np.float32) for x in xs]
        want = exact_reference(prim, singles) if prim.name == "logistic" else prim.impl(*singles, **params)
        want = want.astype(got.dtype)
        a, b = got.astype(np.float32), want.astype(np.float32)
        up, down = (np.nextafter(want, as_dtype(name).type(s)).astype(np.float32) for s in (np.inf, -np.inf))
        wrong = ~((a == b) | (a == up) | (a == down) | (np.isnan(a) & np.isnan(b)))
    if wrong.any():
        at = np.flatnonzero(wrong)[:5]
        shown = [f"{[x[i] for x in xs]}: {got[i]!r}, not {want[i]!r}" for i in at]
        pytest.fail(f"{label}, {wrong.sum()} of {wrong.size} differ:\n" + "\n".join(shown))


@pytest.mark.second
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", C_TYPES)
def test_primitives(compiler, rng, name):
    dtype = as_dtype(name)
    source, made = "", []
    for prim, params in cases(name):
        out = C_TYPES[prim.out_dtype(dtype, **params).name]
        in_types = [C_TYPES[name]] * ARITY.get(prim.name, 1)
        if prim.name == "select":
            in_types[0] = "bool"
        text = expression(prim, name, params)
        if out in ("bf16", "f16", "e4m3", "e5m2") and prim.name not in ON_STORAGE:
            text = f"from_float<{out}>({text})"
        source += loop(case_name(prim, params), in_types, out, text)
        made.append((prim, params))
    if name in STORAGE:  # computed in float, which is tested as it is used
        compiler = dataclasses.replace(compiler, flags=(*compiler.flags, "-O1"))
    library = compiler.compile(HOST.with_prelude(source), f"all primitives of {name}")
    with np.errstate(all="ignore"):
        for prim, params in made:
            xs = operands(prim, dtype, rng)
            got = call(getattr(library, case_name(prim, params)), xs, prim.out_dtype(dtype, **params))
            assert_agrees(prim, name, xs, got, params)


def test_every_primitive_is_there():
    """Primitives without a host function are listed; they run in NumPy."""
    missing = {
        p.name
        for module in (elementwise, integers)
        for p in vars(module).values()
        if isinstance(p, Elementwise) and f"bf_{p.name}" not in HOST.names
    }
    assert not missing
    assert {"lgamma", "logaddexp", "hypot"} <= set(PRIMITIVES)


@pytest.mark.parametrize("name", C_TYPES)
def test_convert(compiler, rng, name):
    x = values(as_dtype(name), rng)
    if x.dtype.kind == "f" and x.dtype.itemsize >= 4:  # ties of the narrow types, and extreme integers
        with np.errstate(all="ignore"):
            narrow = [np.arange(2**16, dtype=np.uint16).view(as_dtype(t)) for t in ("float16", "bfloat16")]
            ties = np.concatenate([n.astype(x.dtype) for n in narrow])
            steps = [
                np.ldexp(1.0, e) + d for e in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, -0.5, 0, 0.5, 1)
            ]
            steps = np.array([*steps, *(-s for s in steps)], x.dtype)
            x = np.concatenate([x, ties, ties * x.dtype.type(1 + 2**-9), steps])
    source = "".join(
        loop(f"to_{t}", [C_TYPES[name]], c, f"bf_convert<{c}>(x0[i])") for t, c in C_TYPES.items()
    )
    if name not in ULPS:
        compiler = dataclasses.replace(compiler, flags=(*compiler.flags, "-O1"))
    library = compiler.compile(HOST.with_prelude(source), f"conversions of {name}")
    with np.errstate(all="ignore"):
        for t in C_TYPES:
            to = as_dtype(t)
            got, want = call(library[f"to_{t}"], [x], to), np.asarray(numerics.convert(x, to))
            same = (got == want) | ((got != got) & (want != want))
            if t not in ("bool",) and to.kind not in "iuc":
                same &= (np.signbit(got) == np.signbit(want)) | (got != got)
            wrong = np.flatnonzero(~same)
            assert not wrong.size, (
                f"{name} to {t}: {x[wrong[:5]]} gives {got[wrong[:5]]}, not {want[wrong[:5]]}"
            )


def test_bitcast(compiler, rng):
    x = values(np.dtype(np.float32), rng)
    source = loop("f", ["float"], "int32_t", "bf_bitcast<int32_t>(x0[i])")
    library = compiler.compile(HOST.with_prelude(source), "bitcast")
    np.testing.assert_array_equal(call(library.f, [x], np.int32), x.view(np.int32))


def test_sine_of_every_size(compiler):
    """The argument is reduced by as many bits of pi as its exponent requires."""
    x = np.concatenate([np.ldexp(np.linspace(1, 1.999, 4000), e) for e in range(-30, 128)]).astype(np.float32)
    near = (np.arange(1, 200000, dtype=np.float64) * (np.pi / 2)).astype(np.float32)  # near the zeros
    x = np.concatenate([x, near, -near])
    source = loop("s", ["float"], "float", "bf_sin(x0[i])") + loop("c", ["float"], "float", "bf_cos(x0[i])")
    library = compiler.compile(HOST.with_prelude(source), "sine")
    assert ulps_between(call(library.s, [x], np.float32), np.sin(x.astype(np.float64))).max() < 1.6
    assert ulps_between(call(library.c, [x], np.float32), np.cos(x.astype(np.float64))).max() < 1.6


def test_threefry(compiler, rng):
    words = rng.integers(0, 2**32, (4, 1000), dtype=np.uint32)
    source = loop("a", ["uint32_t"] * 4, "uint32_t", "bf_threefry2x32(x0[i], x1[i], x2[i], x3[i]).a")
    source += loop("b", ["uint32_t"] * 4, "uint32_t", "bf_threefry2x32(x0[i], x1[i], x2[i], x3[i]).b")
    library = compiler.compile(HOST.with_prelude(source), "threefry")
    a, b = threefry2x32(*words)
    np.testing.assert_array_equal(call(library.a, list(words), np.uint32), a)
    np.testing.assert_array_equal(call(library.b, list(words), np.uint32), b)


_SINGLE = """exp exp2 expm1 log log1p tanh logistic erf erfc erf_inv sin cos tan atan asin acos sinh cosh asinh acosh
atanh cbrt sqrt rsqrt floor ceil trunc round abs sign neg square"""
_DOUBLE = "exp exp2 expm1 log log1p tanh logistic sqrt rsqrt floor round abs"
LOOPS = {
    **{f"{name}_single": ("float", f"bf_{name}(x0[i])") for name in _SINGLE.split()},
    **{f"{name}_double": ("double", f"bf_{name}(x0[i])") for name in _DOUBLE.split()},
    **{
        f"{name}_single": ("float", f"bf_{name}(x0[i], 2.5f)")
        for name in ("pow", "atan2", "max", "min", "hypot")
    },
    **{f"{t}_storage": (t, f"from_float<{t}>(to_float(x0[i]) * 2)") for t in ("f16", "bf16")},
}
"""Loops by name: element type and expression."""


@pytest.mark.slow
def test_loops_become_vector_instructions(compiler):
    """According to the compiler's vectorization report."""
    if "avx2" not in compiler.cpu or "clang" in compiler.version:
        pytest.skip("the compiler is not GCC, or the processor lacks AVX2")
    source = "".join(loop(name, [t], t, text) for name, (t, text) in LOOPS.items())
    source = HOST.with_prelude(source)
    command = [
        *compiler.command,
        *compiler.flags,
        "-fopt-info-vec-optimized",
        "-S",
        "-x",
        "c++",
        "-",
        "-o",
        os.devnull,
    ]
    said = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stderr
    done = {int(line) for line in re.findall(r"<stdin>:(\d+):\d+: optimized: .*loop vectorized", said)}
    lines = source.splitlines()
    starts = {name: next(i for i, line in enumerate(lines) if f" {name}(const" in line) for name in LOOPS}
    assert not [name for name, start in starts.items() if start + 2 not in done]


CHAIN = 60
"""Calls in a loop: more than GCC inlines within its limits on growth."""


@pytest.mark.slow
@pytest.mark.parametrize("of", ["bf_sin", "bf_tanh", "bf_atan", "bf_erf", "bf_exp"])
def test_all_calls_of_a_long_kernel_are_inlined(compiler, of):
    """A call left over would prevent the vectorization of its loop."""
    calls = "\n".join(f"y = {of}(y) + {k}.5f;" for k in range(CHAIN))
    loop = f"for (long i = 0; i < n; ++i) {{\nfloat y = x[i];\n{calls}\nx[i] = y;\n}}"
    source = HOST.with_prelude(f'extern "C" void chain(float *x, long n) {{\n{loop}\n}}')
    command = [*compiler.command, *compiler.flags, "-S", "-x", "c++", "-", "-o", "-"]
    made = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert "chain" in made and not re.findall(r"\w*_GLOBAL__N\w*bf_\w+", made)


def test_prelude_has_what_is_needed_and_no_more():
    assert HOST.source(set()).split() == (
        "namespace { #define inline inline __attribute__((always_inline)) #undef inline }".split()
    )
    text = HOST.source({"bf_add"})
    assert "bf_add" in text and "wrapping" in text and "bf_exp" not in text
    assert "Complex" not in HOST.source({"bf_exp"}) and "c64 bf_exp" in HOST.source({"bf_exp", "c64"})
    assert len(HOST.source({"bf_tanh"})) < 5000
    assert HOST.used_names("y = bf_exp(x); // bf_log") == {"bf_exp"}


def test_unknown_name():
    with pytest.raises(errors.UnsupportedError, match="no bf_sinc"):
        HOST.source({"bf_sinc"})


def test_the_table_of_two_over_pi():
    """``2^e 2/pi`` modulo 4 in two parts, the first with 26 fraction bits."""
    bits = 300
    two_over_pi = (2 << 2 * bits) // pi_in_units(bits)
    (source,) = (part.source for part in HOST.parts if "two_over_pi_high" in part.names)
    found = {
        name: list(map(float, row.split(",")))
        for name, row in re.findall(r"(high|low)\[106\] = {(.*?)}", source, re.S)
    }
    for e in range(105):
        value = (two_over_pi << e) % (4 << bits)
        first = value >> (bits - 26)
        assert found["high"][e] == first / 2**26
        assert found["low"][e] == (value - (first << (bits - 26))) / 2**bits
    assert found["high"][105:] == found["low"][105:] == [0.0]  # infinity and NaN


def pi_in_units(bits):
    """Pi in units of ``2**-bits``: 16 atan(1/5) - 4 atan(1/239)."""
    unit = 1 << (bits + 16)  # the last bits are lost to rounding

    def atan_inverse(n):
        total, power, k = 0, unit // n, 0
        while power:
            total += (-1) ** k * (power // (2 * k + 1))
            power //= n * n
            k += 1
        return total

    return (16 * atan_inverse(5) - 4 * atan_inverse(239)) >> 16
