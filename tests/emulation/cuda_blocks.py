"""Kernels of whole blocks and their expected results, given a way to launch them.

Below ``test_cuda_cooperative``. ``launch(source, entry, arrays, out, grid=1, block=256)`` returns the array like
``out`` that the kernel ``entry`` of ``source`` writes.
"""

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops import random_bits
from tests.emulation.cuda_cases import C_TYPES, values

COOPERATIVE = """
extern "C" __global__ void __launch_bounds__({n}) reduce_{op}_{name}(const {t}* x, {t}* out) {{
  __shared__ {t} memory[{n} / 32];
  out[threadIdx.x] = block_reduce<{op}, {n}>(x[threadIdx.x], memory);
}}
extern "C" __global__ void __launch_bounds__({n}) scan_{op}_{name}(const {t}* x, {t}* out) {{
  __shared__ {t} memory[{n} / 32];
  {t} mine[1] = {{x[threadIdx.x]}}, carry = {op}::identity<{t}>();
  block_scan<{op}, {n}>(mine, carry, memory);
  out[threadIdx.x] = mine[0];
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
  float mine[1] = {x[threadIdx.x]}, carry = -1;
  block_scan<First, 96>(mine, carry, memory);
  out[threadIdx.x] = mine[0];
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
MOMENTS = """
extern "C" __global__ void __launch_bounds__({n}) moments_{name}(const {t}* x, {t}* out) {{
  __shared__ vec<{t}, 2> memory[{n} / 32];
  {t} sum = 0, spread = 0;
  for (int i = 0; i < 3; ++i) sum += x[3 * threadIdx.x + i];
  for (int i = 0; i < 3; ++i) spread += (x[3 * threadIdx.x + i] - sum / 3) * (x[3 * threadIdx.x + i] - sum / 3);
  block_moments<3, {n}>(sum, spread, memory);
  out[2 * threadIdx.x] = sum;
  out[2 * threadIdx.x + 1] = spread;
}}
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
                first, second = (launch(source, entry, [x], x, block=threads) for _ in range(2))
                assert first.tobytes() == second.tobytes()
                if op in ("Sum", "Prod") and dtypes.is_inexact(x.dtype):
                    tolerance = 1e-5 if x.real.dtype == np.float32 else 1e-13
                    np.testing.assert_allclose(
                        first, want, tolerance, tolerance * np.abs(x).sum(), err_msg=entry
                    )
                else:
                    np.testing.assert_array_equal(first, want, err_msg=entry)


def check_moments(launch, threads, rng):
    """Sums, and centred squares that a pass over x * x would lose to cancellation."""
    for name in ("float32", "float64"):
        x = (rng.standard_normal(3 * threads) + 1000).astype(name)
        source = MOMENTS.format(n=threads, name=name, t=C_TYPES[name])
        out = launch(source, f"moments_{name}", [x], np.zeros((threads, 2), name), block=threads)
        exact = x.astype(np.float64)
        assert (out == out[0]).all(), "every thread has the same"
        tolerance = 40 * np.finfo(name).eps
        np.testing.assert_allclose(out[0, 0], exact.sum(), tolerance)
        np.testing.assert_allclose(out[0, 1], ((exact - exact.mean()) ** 2).sum(), 1000 * tolerance)


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
