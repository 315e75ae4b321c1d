"""C++ expressions of elementwise primitives: cases of the CUDA prelude's tests.

Below ``test_cuda_prelude``. A case is a function at one dtype: its kernel, its arguments and expected results, with
fair comparisons.
"""

import importlib
import math
import pkgutil
import warnings

import numpy as np

from blufunc import core
from blufunc.core.ir import dtypes
from blufunc.core.ops import numerics
from blufunc.core.primitives.kinds import TYPES, Elementwise

C_TYPES = {
    "bool": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "f16", "bfloat16": "bf16",
    "float32": "float", "float64": "double", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
STORAGE = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
COMPLEX = ["complex64", "complex128"]


def c_type(dtype):
    return C_TYPES[str(dtypes.as_dtype(dtype))]


# -- the table: what each primitive is in C++ ------------------------------------------------------

BINARY = set(
    "add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge and or xor shift_left "
    "shift_right_logical shift_right_arithmetic gcd hypot logaddexp".split()
)
WITHOUT = set(
    "bessel_i0e bessel_i1e bessel_jv betaln complex_digamma complex_lgamma cosine_integral dawsn digamma exp1 "
    "expi expn faddeeva fresnel_c fresnel_s gamma gammasgn hyp1f1 hyp1f1_slope_a hyp1f1_slope_b hyp2f1 hyp2f1_slope_a "
    "hyp2f1_slope_b hyp2f1_slope_c igamma igamma_grad_a igammac log_ndtr ndtri owens_t poch polygamma "
    "random_gamma_grad regularized_incomplete_beta sine_integral spence zeta".split()
)
"""Primitives without device code: the host computes them."""
NOT_ON_HOST = {"erf_inv", "erfcx"}  # no function of the C library
STORED = {"nextafter", "reduce_precision", "bitcast", "copy", "select"}  # taken as stored, not as float
SPECIAL = {
    "select": ("bf_select(bf_lt(x, y), x, y)", 2),
    "clamp": ("bf_clamp(z, x, y)", 3),
    "complex": ("bf_complex(x, y)", 2),
    "bitcast": ("bf_bitcast<U>(x)", 1),
}
PARAMS = {
    "integer_pow": [{"y": y} for y in (-3, -1, 0, 2, 3, 4, 7)],
    "reduce_precision": [
        {"exponent_bits": e, "mantissa_bits": m} for e, m in ((8, 7), (5, 2), (4, 3), (5, 10))
    ],
}


def log1p(z):
    """NumPy's takes the logarithm of 1 + z, and loses the real part near 0."""
    if not np.iscomplexobj(z):
        return np.log1p(z)
    return 0.5 * np.log1p(z.real * (2 + z.real) + z.imag**2) + 1j * np.arctan2(z.imag, 1 + z.real)


DEFINED = {  # otherwise than by the primitive's own definition
    "select": lambda x, y: np.where(x < y, x, y),
    "log1p": log1p,
    "erfc": np.vectorize(math.erfc, otypes=[float]),  # SciPy's loses digits in the tail
    "clamp": lambda x, y, z: np.minimum(np.maximum(x, z), y),
}
ULPS = {
    "pow": 8,
    "complex pow": 64,
    "lgamma": 16,
    "erfc": 8,
    "logaddexp": 8,
    "tanh": 4,
    "erfcx": 8,
    "erf_inv": 8,
    "logistic": 4,
}
DOMAINS = {"lgamma": (2.5, 50.0), "erfcx": (-3.0, 50.0), "erf_inv": (-0.99, 0.99), "pow": (-20.0, 20.0)}


def elementwise():
    found = {}
    for module in pkgutil.iter_modules(core.ops.__path__):
        for value in vars(importlib.import_module(f"blufunc.core.ops.{module.name}")).values():
            if isinstance(value, Elementwise):
                found[value.name] = value
    return dict(sorted(found.items()))


PRIMITIVES = elementwise()


class Case:
    """One function at one dtype: its kernel, its arguments and expected results."""

    def __init__(self, name, dtype, params=None):
        self.prim, self.name, self.dtype, self.params = (
            PRIMITIVES[name],
            name,
            dtypes.as_dtype(dtype),
            params or {},
        )
        text, self.arity = SPECIAL.get(name, (None, 2 if name in BINARY else 1))
        function = "pow_integers" if name == "pow" and dtypes.is_integer(self.dtype) else name
        self.expression = text or f"bf_{function}({', '.join('xyz'[: self.arity])}{self._extra()})"
        self.ulps = ULPS.get(f"complex {name}" if str(dtype) in COMPLEX else name, 4)
        self.out = self._out()
        self.entry = "_".join(
            ["k", name, str(dtype), *(f"{v}".replace("-", "m") for v in self.params.values())]
        )

    def _extra(self):
        return "".join(f", {v}" for v in self.params.values())

    def _out(self):
        if self.name == "bitcast":
            return np.dtype(f"u{self.dtype.itemsize}") if not dtypes.is_bool(self.dtype) else self.dtype
        out = self.prim.out
        return self.dtype if out is None else out if isinstance(out, np.dtype) else out(self.dtype)

    def loop(self):
        """The statements for element i."""
        through = str(self.dtype) in STORAGE and self.name not in STORED
        read = "to_float({}[i])" if through else "{}[i]"
        lines = [f"auto {v} = {read.format('p' + v)};" for v in "xyz"[: self.arity]]
        expression = self.expression.replace("bf_lt(x, y)", "bf_lt(to_float(x), to_float(y))") if (
            str(self.dtype) in STORAGE) else self.expression  # fmt: skip
        back = f"from_float<{c_type(self.dtype)}>" if through and self.out == self.dtype else ""
        lines.append(f"out[i] = {back}({expression.replace('<U>', f'<{c_type(self.out)}>')});")
        return " ".join(lines)

    def parameters(self):
        pointers = [f"const {c_type(self.dtype)}* p{v}" for v in "xyz"[: self.arity]]
        return ", ".join([*pointers, f"{c_type(self.out)}* out", "int n"])

    def kernel(self):
        head = f'extern "C" __global__ void {self.entry}({self.parameters()})'
        return f"{head} {{ int i = blockIdx.x * 256 + threadIdx.x; if (i < n) {{ {self.loop()} }} }}\n"

    def host(self):
        head = f'extern "C" void {self.entry}({self.parameters()})'
        return f"{head} {{ for (int i = 0; i < n; ++i) {{ {self.loop()} }} }}\n"

    def arguments(self, rng):
        xs = [values(self.dtype, rng, DOMAINS.get(self.name)) for _ in range(self.arity)]
        special = specials(self.dtype) if self.name not in DOMAINS else xs[0][:8]
        if self.arity == 1:
            return [np.concatenate([xs[0], special])]
        grid = np.meshgrid(*[special] * self.arity)
        return [np.concatenate([x, g.ravel()]) for x, g in zip(xs, grid)]

    def want(self, args):
        if self.name == "bitcast":
            return args[0].view(self.out)
        wide = self.dtype
        if str(self.dtype) in STORAGE and self.name not in STORED:
            wide = np.dtype(np.float32)  # NumPy too goes by way of float
        elif dtypes.is_complex(self.dtype) and self.out == self.dtype:
            wide = np.dtype(
                np.complex128 if self.dtype == np.complex64 else np.clongdouble
            )  # NumPy's log1p is rough
        f = DEFINED.get(self.name, self.prim.impl)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return np.asarray(f(*[a.astype(wide) for a in args], **self.params)).astype(self.out)


def cases(dtype):
    """Every function at one dtype."""
    found = []
    for name, prim in PRIMITIVES.items():
        if name in WITHOUT or name == "convert":
            continue
        accepts = TYPES[prim.types][1]
        if not accepts(dtypes.as_dtype(dtype)) or (name == "bitcast" and dtype == "complex128"):
            continue
        if name == "select" and dtype in COMPLEX:
            continue
        for params in PARAMS.get(name, [{}]):
            if params.get("y", 0) >= 0 or dtypes.is_inexact(dtypes.as_dtype(dtype)):
                found.append(Case(name, dtype, params))
    return found


def values(dtype, rng, domain=None, n=2000):
    if dtypes.is_bool(dtype):
        return rng.integers(0, 2, n).astype(bool)
    if dtypes.is_integer(dtype):
        info = np.iinfo(dtype)
        wide = rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
        near = rng.integers(0 if info.min == 0 else -9, 70, n).astype(dtype)
        return np.where(rng.random(n) < 0.5, wide, near)
    low, high = domain or (-4.0, 4.0)
    if dtypes.is_complex(dtype):
        x = rng.uniform(low, high, n) + 1j * rng.uniform(low, high, n)
        return (x * 10.0 ** rng.integers(-6, 1, n)).astype(dtype)
    x = rng.uniform(low, high, n)
    if domain is None:
        x = x * 10.0 ** rng.integers(-6, 2, n)
    return np.asarray(x, np.float64).astype(dtype)


def specials(dtype):
    """Special values that functions often get wrong."""
    if dtypes.is_bool(dtype):
        return np.array([False, True])
    if dtypes.is_integer(dtype):
        info = np.iinfo(dtype)
        return np.array([info.min, info.min + 1, 0, 1, 2, 7, 8, 31, 63, info.max - 1, info.max], dtype)
    parts = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0]
    if dtypes.is_complex(dtype):
        big, small = (1e18, 1e-18) if dtype == np.complex64 else (1e150, 1e-150)
        away = [complex(a, b) for a in (big, -big, small, -small, 0.0) for b in (big, -small, small, 0.0)]
        return np.array([complex(a, b) for a in parts for b in parts] + away, dtype)
    info = dtypes.finfo(dtype)
    ends = [float(info.max), -float(info.max), float(info.smallest_normal), float(info.smallest_subnormal)]
    with np.errstate(all="ignore"):
        return np.array([*parts, *ends, np.inf, -np.inf, np.nan, 88.0, -88.0, -104.0, 1e5]).astype(dtype)


def check(case, got, want, ulps):
    """Compare to a number of units in the last place; for complex, of the modulus."""
    with np.errstate(all="ignore"):
        if not dtypes.is_inexact(case.out):
            bad = got != want
        elif dtypes.is_complex(case.out):
            bad = ~_close_complex(got, want, ulps)
        else:
            bad = ~_close(got, want, ulps)
    if bad.any():
        i = np.flatnonzero(bad)[:5]
        raise AssertionError(
            f"{case.entry}: at {i.tolist()} {got[i]} for {want[i]}; {bad.sum()} of {bad.size}"
        )


def _close(got, want, ulps):
    if got.dtype.itemsize <= 2:
        tiny = float(dtypes.finfo(got.dtype).smallest_subnormal)
        eps = float(dtypes.finfo(got.dtype).eps)
        ulps = 1  # computed in float, one rounding away
        got, want = got.astype(np.float64), want.astype(np.float64)
    else:
        tiny, eps = float(np.finfo(got.dtype).smallest_subnormal), float(np.finfo(got.dtype).eps)
    error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    near = error <= ulps * np.maximum(eps * np.abs(want.astype(np.float64)), tiny)
    return (got == want) | (np.isnan(got) & np.isnan(want)) | near


def _close_complex(got, want, ulps):
    finite = np.isfinite(want)
    scale = np.abs(want) * np.finfo(want.real.dtype).eps + np.finfo(want.real.dtype).smallest_normal
    return ~finite | (np.abs(got - want) <= 4 * ulps * scale)


# -- conversions ----------------------------------------------------------------------------------


def conversions(dtype, qualifier):
    """From one dtype to each."""
    text = ""
    for to in C_TYPES:
        head = f'extern "C" {qualifier} to_{to}(const {C_TYPES[dtype]}* x, {C_TYPES[to]}* out, int n)'
        text += f"{head} {{ for (int i = 0; i < n; ++i) out[i] = bf_convert<{C_TYPES[to]}>(x[i]); }}\n"
    return text


def convertible(dtype, rng):
    dtype = dtypes.as_dtype(dtype)
    if dtype.itemsize <= 2 and not dtypes.is_bool(dtype):  # all there are
        return np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    xs = [values(dtype, rng), specials(dtype)]
    if dtypes.is_floating(dtype):
        bits = rng.integers(0, 256**dtype.itemsize - 1, 20000, dtype=f"u{dtype.itemsize}")
        ends = [b + d for b in (127.0, 128.0, 255.0, 464.0, 480.0, 61440.0, 65520.0, 2.0**31, 2.0**63, 2.0**64)
                for d in (-1.0, -0.5, 0.0, 0.5, 1.0)]  # fmt: skip
        ends += [1 + 2.0**-11 * (1 + 2.0**-30), 2.0**-9, 2.0**-10, 1.5 * 2.0**-10]
        xs += [bits.view(dtype), np.array(ends, dtype), -np.array(ends, dtype)]
    return np.concatenate(xs)


def assert_converted(dtype, to, x, got):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        want = numerics.convert(x, dtypes.as_dtype(to))
        equal = (got == want) | ((got != got) & (want != want))
    i = np.flatnonzero(~equal)[:5]
    assert equal.all(), f"{dtype} to {to}: {x[i]} gives {got[i]} for {want[i]}"
