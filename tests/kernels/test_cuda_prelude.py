"""The CUDA prelude: chosen to measure, compiled for every architecture, and right.

What the functions compute is checked twice over the same table: here by a compiler for the host, which reads the
same text behind stand-ins for what is CUDA's own, and on a device where there is one.
"""

import ctypes
import functools
import importlib
import math
import pkgutil
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from blufunc import core, errors
from blufunc.core import dtypes
from blufunc.core.kinds import TYPES, Elementwise
from blufunc.core.ops import numerics, random_bits
from blufunc.kernels import cuda_prelude, nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

C_TYPES = {
    "bool": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "f16", "bfloat16": "bf16",
    "float32": "float", "float64": "double", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
STORAGE = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
REAL = [name for name in C_TYPES if not name.startswith("complex")]
COMPLEX = ["complex64", "complex128"]


def c_type(dtype):
    return C_TYPES[str(dtypes.as_dtype(dtype))]


# -- the table: what each primitive is in C++ ------------------------------------------------------

BINARY = set(
    "add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge and or xor shift_left "
    "shift_right_logical shift_right_arithmetic gcd hypot logaddexp".split()
)
WITHOUT = set(
    "bessel_i0e bessel_i1e betaln dawsn digamma exp1 expi expn gamma gammasgn igamma igamma_grad_a igammac log_ndtr "
    "ndtri poch polygamma random_gamma_grad regularized_incomplete_beta spence zeta".split()
)
"""What has no device code: the host computes it."""
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
    """One function at one dtype: its kernel, its arguments and what it should give."""

    def __init__(self, name, dtype, params=None):
        self.prim, self.name, self.dtype, self.params = (
            PRIMITIVES[name],
            name,
            dtypes.as_dtype(dtype),
            params or {},
        )
        text, self.arity = SPECIAL.get(name, (None, 2 if name in BINARY else 1))
        self.expression = text or f"bf_{name}({', '.join('xyz'[: self.arity])}{self._extra()})"
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
    """What functions get wrong."""
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
    """Equal, or within some units in the last place; of complex numbers, in that of the modulus."""
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


# -- choosing --------------------------------------------------------------------------------------


def test_golden_smallest(golden):
    golden("cuda_prelude", cuda_prelude.prelude({"bf_logistic", "bf16", "bf_add"}))


def test_only_what_is_used():
    assert cuda_prelude.prelude(set()) == ""
    text = cuda_prelude.with_prelude(
        'extern "C" __global__ void k(float* x) { *x = bf_exp(*x); /* bf16 */ }\n'
    )
    assert text.count("bf_") == 3 and "bf16" not in text.split("__global__")[0].replace("/* bf16 */", "")
    assert "Complex" not in text
    both = cuda_prelude.prelude({"bf_exp", "c64"})
    assert "bf_exp(Complex<T> z)" in both and both.index(
        "struct alignas(2 * sizeof(T)) Complex"
    ) < both.index("bf_exp")


def test_comments_and_strings_use_nothing():
    assert cuda_prelude.used_names('// bf_exp\nasm("cvt.rn.bf16.f32");') == set()


def test_unknown_name():
    with pytest.raises(errors.UnsupportedError, match="bf_zeta") as caught:
        cuda_prelude.prelude({"bf_zeta", "bf_exp"})
    assert caught.value.fix


def test_every_elementwise_primitive_is_there():
    missing = {name for name in PRIMITIVES if f"bf_{name}" not in cuda_prelude.names()}
    assert missing == WITHOUT


def test_parts_come_after_what_they_use():
    seen = set()
    for part in cuda_prelude.parts():
        seen |= set(part.names)
        assert part.uses <= seen, part.names


# -- compiling -------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(nvrtc.available() is not None, reason=nvrtc.available() or "")

COOPERATIVE = """
extern "C" __global__ void __launch_bounds__({n}) reduce_{op}_{name}(const {t}* x, {t}* out) {{
  __shared__ {t} memory[{n} / 32];
  out[threadIdx.x] = block_reduce<{op}, {n}>(x[threadIdx.x], memory);
}}
extern "C" __global__ void __launch_bounds__({n}) scan_{op}_{name}(const {t}* x, {t}* out) {{
  __shared__ {t} memory[{n} / 32];
  out[threadIdx.x] = block_scan<{op}, {n}>(x[threadIdx.x], memory);
}}
"""
ARG = """
extern "C" __global__ void __launch_bounds__({n}) arg_{op}_{name}(const {t}* x, int32_t* out) {{
  __shared__ Arg<{t}> memory[{n} / 32];
  Arg<{t}> mine = {{x[threadIdx.x], (int32_t)threadIdx.x}};
  out[threadIdx.x] = block_reduce<{op}, {n}>(mine, memory).index;
}}
"""
MOVES = """
extern "C" __global__ void move_{name}_{v}(const {t}* x, {t}* out) {{
  int i = (blockIdx.x * 64 + threadIdx.x) * 4 * {v};
  vec_store(out + i, vec_load<{t}, {v}>(x + i));
  vec_stcs(out + i + {v}, vec_ldg<{t}, {v}>(x + i + {v}));
  vec_store(out + i + 2 * {v}, vec_ldcs<{t}, {v}>(x + i + 2 * {v}));
  vec_stcs(out + i + 3 * {v}, vec_ldcg<{t}, {v}>(x + i + 3 * {v}));
}}
"""
LAST = """
extern "C" __global__ void __launch_bounds__(256) total(const float* x, float* partial, unsigned* counter, float* out) {
  __shared__ float memory[8];
  float sum = block_reduce<Sum, 256>(x[blockIdx.x * 256 + threadIdx.x], memory);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
  if (last_block(counter, gridDim.x)) {
    float mine = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += 256) mine += vec_ldcg<float, 1>(partial + i).x[0];
    mine = block_reduce<Sum, 256>(mine, memory);
    if (threadIdx.x == 0) *out = mine;
  }
}
extern "C" __global__ void __launch_bounds__(96) several(const vec<float, 2>* x, vec<float, 2>* out) {
  __shared__ vec<float, 2> memory[3];
  out[threadIdx.x] = block_reduce<Each<Sum>, 96, false>(x[threadIdx.x], memory);
}
struct First {  // which does not commute
  template<class T> static T identity() { return T(-1); }
  template<class T> static T combine(T x, T y) { return x < T(0) ? y : x; }
};
extern "C" __global__ void __launch_bounds__(96) order(const float* x, float* out) {
  __shared__ float memory[3];
  out[threadIdx.x] = block_scan<First, 96>(x[threadIdx.x], memory);
}
extern "C" __global__ void __launch_bounds__(96) twice(const float* x, float* out) {
  __shared__ float memory[3];
  float sum = block_reduce<Sum, 96>(x[threadIdx.x], memory);
  out[threadIdx.x] = sum + block_reduce<Max, 96>(x[threadIdx.x] - sum, memory);
}
extern "C" __global__ void narrow(const float* x, float* out) {
  out[threadIdx.x] = warp_reduce<Max, 8>(x[threadIdx.x]);
}
extern "C" __global__ void cipher(const uint32_t* x, uint32_t* out) {
  Bits2 r = bf_threefry2x32(x[0], x[1], x[2], x[3] + threadIdx.x);
  out[2 * threadIdx.x] = r.a;
  out[2 * threadIdx.x + 1] = r.b;
}
"""
REDUCED = {  # op: its dtypes
    "Sum": ["float32", "float64", "int32", "int64", "uint8", "complex64", "complex128"],
    "Prod": ["float32", "float64", "int64", "complex64"],
    "Max": ["float32", "float64", "int8", "int32", "uint64", "bool"],
    "Min": ["float32", "float64", "int16", "int64", "uint32", "bool"],
    "And": ["int32", "uint8", "bool"],
    "Or": ["int64", "uint16", "bool"],
    "Xor": ["uint32", "int8", "bool"],
}
EXTREMA = ["float32", "float64", "int32", "uint8", "int64"]


def cooperative(threads):
    text = "".join(
        COOPERATIVE.format(op=op, name=name, t=C_TYPES[name], n=threads)
        for op, group in REDUCED.items()
        for name in group
    )
    return text + "".join(
        ARG.format(op=op, name=name, t=C_TYPES[name], n=threads)
        for op in ("ArgMax", "ArgMin")
        for name in EXTREMA
    )


def moves():
    widths = [(n, v) for n in C_TYPES for v in (1, 2, 4, 8, 16) if v * dtypes.as_dtype(n).itemsize <= 64]
    return "".join(MOVES.format(name=n, t=C_TYPES[n], v=v) for n, v in widths)


def conversions(dtype, qualifier):
    """From one dtype to each."""
    text = ""
    for to in C_TYPES:
        head = f'extern "C" {qualifier} to_{to}(const {C_TYPES[dtype]}* x, {C_TYPES[to]}* out, int n)'
        text += f"{head} {{ for (int i = 0; i < n; ++i) out[i] = bf_convert<{C_TYPES[to]}>(x[i]); }}\n"
    return text


def sources():
    # double is left to a test of its own: each of its functions is long
    for dtype in C_TYPES:
        yield f"functions of {dtype}", "".join(case.kernel() for case in cases(dtype))
        yield f"conversions of {dtype}", conversions(dtype, "__global__ void")
    yield "cooperative", cooperative(256)
    yield "moves", moves()
    yield "last", LAST


SOURCES = dict(sources())


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("what", SOURCES)
def test_compiles_without_spills(what, arch):
    resources = nvrtc.build(cuda_prelude.with_prelude(SOURCES[what]), arch).resources()
    assert len(resources) == SOURCES[what].count("__global__")
    # the trigonometric functions reduce large arguments in an array of their own, on the stack
    spilling = [k for k, r in resources.items() if r.spill_stores or r.spill_loads]
    assert not spilling
    on_stack = [k for k, r in resources.items() if r.stack]
    assert all(any(f in k for f in ("sin", "cos", "tan", "exp", "pow", "logistic")) for k in on_stack)


@needs_nvrtc
@pytest.mark.parametrize("name", sorted(cuda_prelude.names()))
def test_every_part_alone(name):
    """A part brings what it needs, and compiles in the company of nothing else."""
    if name in ("INFINITY", "NAN"):
        return
    text = cuda_prelude.prelude({name})
    nvrtc.build(text + 'extern "C" __global__ void k() {}\n', "sm_90")


# -- numerics on the host --------------------------------------------------------------------------

STAND_INS = """
#include <math.h>
#include <stdint.h>
#include <string.h>
static inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
static inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float ptx_rcp(float x) { return 1.0f / x; }
static inline float ptx_max(float x, float y) { return x > y || x != x ? x : y; }
static inline float ptx_min(float x, float y) { return x < y || x != x ? x : y; }
static inline float ptx_from_f16(uint16_t x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static inline uint16_t ptx_to_f16(float x) { _Float16 y = x; uint16_t z; memcpy(&z, &y, 2); return z; }
static inline uint16_t ptx_to_f16(double x) { _Float16 y = x; uint16_t z; memcpy(&z, &y, 2); return z; }
static inline uint16_t ptx_to_bf16(float x) {
  uint32_t b = __float_as_uint(x);
  return x != x ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
"""


@pytest.fixture(scope="module")
def host_library(tmp_path_factory):
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("there is no g++ to compile the functions for the host")
    folder = tmp_path_factory.mktemp("host")

    def build(name, source, before=""):
        parts = cuda_prelude.chosen_parts(frozenset(cuda_prelude.used_names(source)))
        own = [p.text for p in parts if p.names[0] != "types" and not p.names[0].startswith("ptx_")]
        text = STAND_INS + before + "".join(own).replace("erfinv(x)", "x").replace("erfinvf(x)", "x")
        path = folder / f"{name}.so"  # a new name for each: a library is loaded once
        command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, "-", "-o", str(path)], input=text + source, capture_output=True, text=True, timeout=120
        )
        if "_Float16" in done.stderr:
            pytest.skip("this g++ has no _Float16")
        assert not done.returncode, done.stderr[:3000]
        return ctypes.CDLL(str(path))

    return build


def call(library, entry, args, out_dtype):
    out = np.zeros(args[0].shape, out_dtype)
    pointers = [np.ascontiguousarray(a) for a in args] + [out]
    getattr(library, entry)(*(ctypes.c_void_p(p.ctypes.data) for p in pointers), ctypes.c_int(out.size))
    return out


@pytest.mark.parametrize("dtype", C_TYPES)
def test_functions_on_the_host(dtype, host_library, rng):
    mine = [c for c in cases(dtype) if c.name not in NOT_ON_HOST]
    library = host_library(f"functions_{dtype}", "".join(c.host() for c in mine))
    for case in mine:
        args = case.arguments(rng)
        check(case, call(library, case.entry, args, case.out), case.want(args), case.ulps)


@pytest.mark.parametrize("dtype", C_TYPES)
def test_conversions_on_the_host(dtype, host_library, rng):
    library = host_library(f"conversions_{dtype}", conversions(dtype, "void"))
    x = convertible(dtype, rng)
    for to in C_TYPES:
        got = call(library, f"to_{to}", [x], dtypes.as_dtype(to))
        assert_converted(dtype, to, x, got)


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


# -- what many threads compute, given a way to launch them -----------------------------------------

NUMPY_OPS = {"Sum": np.add, "Prod": np.multiply, "Max": np.maximum, "Min": np.minimum,
             "And": np.bitwise_and, "Or": np.bitwise_or, "Xor": np.bitwise_xor}  # fmt: skip
EXTREMUM_CASES = ["ties", "nan", "late nan", "all equal", "lowest"]


def check_reductions(launch, threads, rng):
    source = cooperative(threads)
    for op, group in REDUCED.items():
        for name in group:
            x = values(dtypes.as_dtype(name), rng, n=threads)
            if op == "Prod" and dtypes.is_inexact(x.dtype):
                x = np.exp(1e-2 * x.real).astype(x.dtype)
            f = NUMPY_OPS[op]
            for kind, want in (
                ("reduce", np.full(threads, f.reduce(x, dtype=x.dtype))),
                ("scan", f.accumulate(x, dtype=x.dtype)),
            ):
                entry = f"{kind}_{op}_{name}"
                first, again = (launch(source, entry, [x], x, block=threads) for _ in range(2))
                assert first.tobytes() == again.tobytes()
                if op in ("Sum", "Prod") and dtypes.is_inexact(x.dtype):
                    tolerance = 1e-5 if x.real.dtype == np.float32 else 1e-13
                    np.testing.assert_allclose(
                        first, want, tolerance, tolerance * np.abs(x).sum(), err_msg=entry
                    )
                else:
                    np.testing.assert_array_equal(first, want, err_msg=entry)


def check_extrema(launch, name, case):
    dtype = dtypes.as_dtype(name)
    x = np.random.default_rng(0).integers(0, 5, 256).astype(dtype)
    if case == "all equal":
        x[:] = 3
    elif case == "lowest":
        x[:] = -np.inf if dtypes.is_floating(dtype) else np.iinfo(dtype).min
    elif "nan" in case and dtypes.is_floating(dtype):
        x[[255] if case == "late nan" else [200, 77, 78]] = np.nan
    for op, f in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
        got = launch(cooperative(256), f"arg_{op}_{name}", [x], np.zeros(256, np.int32))
        assert (got == f(x)).all()


def check_moves(launch, rng):
    for name in C_TYPES:
        for v in (1, 2, 4, 8, 16):
            dtype = dtypes.as_dtype(name)
            if v * dtype.itemsize <= 64:
                bits = rng.integers(0, 255, 2 * 64 * 4 * v * dtype.itemsize).astype(np.uint8)
                if dtypes.is_bool(dtype):
                    bits %= 2
                assert (launch(moves(), f"move_{name}_{v}", [bits], bits, grid=2, block=64) == bits).all()


def check_others(launch, rng):
    x = rng.standard_normal((96, 2)).astype(np.float32)
    got = launch(LAST, "several", [x], x, block=96)
    np.testing.assert_allclose(got, np.broadcast_to(x.sum(0), x.shape), rtol=1e-4, atol=1e-5)
    z = np.arange(7, 103, dtype=np.float32)
    assert (launch(LAST, "order", [z], z, block=96) == 7).all()
    assert (launch(LAST, "twice", [z], z, block=96) == 102).all()
    y = rng.standard_normal(32).astype(np.float32)
    assert (launch(LAST, "narrow", [y], y, block=32) == np.repeat(y.reshape(4, 8).max(1), 8)).all()
    words = np.array([1, 2, 3, 4], np.uint32)
    a, b = random_bits.threefry2x32(1, 2, 3, np.arange(4, 36, dtype=np.uint32))
    assert (
        launch(LAST, "cipher", [words], np.zeros((32, 2), np.uint32), block=32) == np.stack([a, b], 1)
    ).all()


# -- many threads on the host: each a fiber, which runs until all must meet --------------------------

BLOCK = """
#include <ucontext.h>
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, gridDim;
static ucontext_t scheduler, fibers[1024];
static char stacks[1024][1 << 16];
static bool done[1024];
static uint32_t slots[1024];

static void __syncthreads() {
  unsigned self = threadIdx.x;
  swapcontext(&fibers[self], &scheduler);
}
static uint32_t exchanged(uint32_t x, unsigned lane) {
  slots[threadIdx.x] = x;
  __syncthreads();
  uint32_t y = slots[threadIdx.x / 32 * 32 + lane];
  __syncthreads();
  return y;
}
static uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int mask) { return exchanged(x, threadIdx.x % 32 ^ mask); }
static uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return exchanged(x, lane); }
static uint32_t __shfl_up_sync(uint32_t, uint32_t x, int distance) {
  int lane = threadIdx.x % 32 - distance;
  return exchanged(x, lane < 0 ? threadIdx.x % 32 : lane);
}
static void __threadfence() {}
static unsigned atomicInc(unsigned* p, unsigned top) { unsigned old = *p; *p = old >= top ? 0 : old + 1; return old; }
template<class W> static W __ldg(const W* p) { return *p; }
template<class W> static W __ldcs(const W* p) { return *p; }
template<class W> static W __ldcg(const W* p) { return *p; }
template<class W> static void __stcs(W* p, W x) { *p = x; }

typedef void (*Entry)(void*, void*, void*, void*);
static Entry entry;
static void* arguments[4];
static void fiber() {
  entry(arguments[0], arguments[1], arguments[2], arguments[3]);
  done[threadIdx.x] = true;
}
extern "C" void launch(Entry e, unsigned grid, unsigned threads, void* a, void* b, void* c, void* d) {
  void* given[4] = {a, b, c, d};
  memcpy(arguments, given, sizeof given);
  entry = e;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (unsigned t = 0; t < threads; ++t) {
      done[t] = false;
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks[t];
      fibers[t].uc_stack.ss_size = sizeof stacks[t];
      fibers[t].uc_link = &scheduler;
      makecontext(&fibers[t], fiber, 0);
    }
    for (unsigned left = threads; left;)
      for (unsigned t = left = 0; t < threads; ++t)
        if (!done[t]) {
          threadIdx.x = t;
          swapcontext(&scheduler, &fibers[t]);
          left += !done[t];
        }
  }
}
"""


@pytest.fixture(scope="module")
def host_blocks(host_library):
    if sys.platform != "linux":
        pytest.skip("fibers are those of Linux")

    @functools.cache
    def library(source):
        return host_library(f"blocks{hash(source)}", source, BLOCK)

    def launch(source, entry, arrays, out, grid=1, block=256):
        built, result = library(source), np.zeros_like(out)
        given = [np.ascontiguousarray(a) for a in (*arrays, result)]
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in given] + [None] * (4 - len(given))
        built.launch(getattr(built, entry), grid, block, *pointers)
        return result

    return launch


@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_reductions_and_scans_on_the_host(threads, host_blocks, rng):
    check_reductions(host_blocks, threads, rng)


@pytest.mark.parametrize("case", EXTREMUM_CASES)
@pytest.mark.parametrize("name", EXTREMA)
def test_extrema_on_the_host(name, case, host_blocks):
    check_extrema(host_blocks, name, case)


def test_moves_on_the_host(host_blocks, rng):
    check_moves(host_blocks, rng)


def test_others_on_the_host(host_blocks, rng):
    check_others(host_blocks, rng)


def test_last_block_finishes_on_the_host(host_blocks, rng):
    x, partial, counter = (
        rng.standard_normal((7, 256)).astype(np.float32),
        np.zeros(7, np.float32),
        np.zeros(1, np.uint32),
    )
    for _ in range(2):  # the counter is 0 again each time
        out = host_blocks(LAST, "total", [x, partial, counter], np.zeros(1, np.float32), grid=7)
        np.testing.assert_allclose(out, x.sum(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(partial, x.sum(1), rtol=1e-4, atol=1e-4)
        assert counter[0] == 0


# -- on a device -----------------------------------------------------------------------------------


@functools.cache
def device_module(source):
    import cupy

    number = cupy.cuda.Device().compute_capability
    module = cupy.cuda.function.Module()
    text = cuda_prelude.with_prelude(source)
    module.load(nvrtc.build(text, "sm_90a" if number == "90" else f"sm_{number}").cubin)
    return module


def launch(source, entry, arrays, out, *scalars, grid=1, block=256):
    """Run a kernel on ``arrays`` and a result like ``out``, which is returned; ``scalars`` come after it."""
    import cupy

    given = [cupy.asarray(a.view(np.uint8)) for a in arrays]  # CuPy has not all of our dtypes
    result = cupy.zeros(out.nbytes, np.uint8)
    device_module(source).get_function(entry)((grid,), (block,), (*given, result, *scalars))
    return result.get().view(out.dtype).reshape(out.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", C_TYPES)
def test_functions_on_a_device(dtype, rng):
    source = "".join(c.kernel() for c in cases(dtype))
    for case in cases(dtype):
        args = case.arguments(rng)
        n = args[0].size
        got = launch(source, case.entry, args, np.zeros(n, case.out), np.int32(n), grid=-(-n // 256))
        check(case, got, case.want(args), 2 * case.ulps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", C_TYPES)
def test_conversions_on_a_device(dtype, rng):
    source, x = conversions(dtype, "__global__ void"), convertible(dtype, rng)
    for to in C_TYPES:
        got = launch(
            source, f"to_{to}", [x], np.zeros(x.size, dtypes.as_dtype(to)), np.int32(x.size), block=1
        )
        assert_converted(dtype, to, x, got)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_reductions_and_scans_on_a_device(threads, rng):
    check_reductions(launch, threads, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EXTREMUM_CASES)
@pytest.mark.parametrize("name", EXTREMA)
def test_extrema_on_a_device(name, case):
    check_extrema(launch, name, case)


@pytest.mark.gpu
def test_moves_on_a_device(rng):
    check_moves(launch, rng)


@pytest.mark.gpu
def test_others_on_a_device(rng):
    check_others(launch, rng)


@pytest.mark.gpu
def test_last_block_finishes_on_a_device(rng):
    import cupy

    x = rng.standard_normal(256 * 700).astype(np.float32)
    given, partial, counter = cupy.asarray(x), cupy.zeros(700, np.float32), cupy.zeros(1, np.uint32)
    seen = set()
    for _ in range(20):  # the counter is 0 again each time
        out = cupy.zeros(1, np.float32)
        device_module(LAST).get_function("total")((700,), (256,), (given, partial, counter, out))
        seen.add(float(out[0]))
        assert int(counter[0]) == 0
    assert len(seen) == 1
    np.testing.assert_allclose(seen.pop(), x.astype(np.float64).sum(), atol=1e-2)


@needs_nvrtc
def test_threads_compile_at_once():
    with ThreadPoolExecutor(4) as pool:
        texts = [
            cuda_prelude.with_prelude(f'extern "C" __global__ void k(float* x) {{ *x = bf_exp(*x) + {i}; }}')
            for i in range(8)
        ]
        assert len({b.cubin for b in pool.map(nvrtc.build, texts)}) == 8
