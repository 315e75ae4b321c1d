"""Convolutions on a CUDA device: plans, the implicit GEMM, and results."""

import functools
import json

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.convolution import graphs, implicit_gemm, plans
from blufunc.kernels.ops.convolution import Convolution, convolution_p
from tests.emulation.cuda_machines import needs_nvrtc
from tests.kernels.backends.cuda.test_program import on

BF16, F16, F32, F64 = (np.dtype(d) for d in (dtypes.bfloat16, "float16", "float32", "float64"))

NHWC, NCHW, NWC = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NWC", "WIO", "NWC")
NDHWC = ("NDHWC", "DHWIO", "NDHWC")


def case(x, w, strides=None, padding="SAME", numbers=NHWC, dtype="float32", **more):
    """Shapes of a convolution and its parameters."""
    n = len(x) - 2
    return x, w, dtype, {
        "window_strides": strides or (1,) * n, "padding": padding, "dimension_numbers": numbers, **more
    }  # fmt: skip


CASES = {
    "3 x 3": case((2, 12, 10, 16), (3, 3, 16, 24), dtype="bfloat16"),
    "float16": case((2, 12, 10, 16), (3, 3, 16, 24), dtype="float16"),
    "IEEE": case((2, 12, 10, 16), (3, 3, 16, 24), precision="highest"),
    "TF32": case((2, 12, 10, 16), (3, 3, 16, 24), precision="high"),
    "double": case((2, 12, 10, 4), (3, 3, 4, 6), dtype="float64"),
    "strides": case((2, 13, 10, 16), (3, 3, 16, 8), (2, 3), ((0, 1), (2, 0)), dtype="bfloat16"),
    "negative padding": case((2, 9, 8, 8), (3, 3, 8, 8), (2, 3), ((-1, 1), (2, -2)), dtype="bfloat16"),
    "wide padding": case((2, 6, 6, 8), (3, 3, 8, 8), (1, 1), ((4, 5), (2, 0)), dtype="bfloat16"),
    "dilation": case((2, 12, 12, 16), (3, 3, 16, 8), rhs_dilation=(2, 3), dtype="bfloat16"),
    "groups": case((2, 9, 8, 32), (3, 3, 8, 64), feature_group_count=4, dtype="bfloat16"),
    "groups with strides": case((2, 9, 8, 6), (3, 3, 2, 9), (2, 1), feature_group_count=3),
    "depthwise": case((2, 9, 8, 16), (3, 3, 1, 16), feature_group_count=16, dtype="bfloat16"),
    "depthwise with strides": case((2, 9, 8, 16), (5, 3, 1, 32), (2, 2), feature_group_count=16, dtype="bfloat16"),
    "transposed": case((2, 6, 5, 16), (3, 3, 16, 8), padding=((1, 2), (1, 1)), lhs_dilation=(2, 2), dtype="bfloat16"),
    "transposed in groups": case(
        (2, 6, 5, 8), (3, 3, 4, 6), padding=((1, 2), (1, 1)), lhs_dilation=(2, 2), feature_group_count=2
    ),
    "batch groups": case((4, 8, 8, 8), (3, 3, 8, 6), batch_group_count=2),
    "1 x 1": case((2, 9, 8, 16), (1, 1, 16, 8), dtype="bfloat16"),
    "1 x 1 with strides": case((2, 9, 8, 16), (1, 1, 16, 8), (2, 2), dtype="bfloat16"),
    "patches": case((2, 12, 8, 3), (4, 2, 3, 16), (4, 2), "VALID", dtype="bfloat16"),
    "few features": case((2, 20, 16, 3), (7, 7, 3, 16), (2, 2), dtype="bfloat16"),
    "odd features": case((2, 9, 8, 5), (3, 3, 5, 7), dtype="bfloat16"),
    "NCHW": case((2, 16, 9, 8), (8, 16, 3, 3), (2, 2), numbers=NCHW, dtype="bfloat16"),
    "NCHW in IEEE": case((2, 16, 9, 8), (8, 16, 3, 3), (2, 2), numbers=NCHW),
    "1-d": case((2, 30, 16), (5, 16, 8), (2,), numbers=NWC, dtype="bfloat16"),
    "causal": case((2, 30, 16), (4, 1, 16), (1,), ((3, 0),), NWC, "bfloat16", feature_group_count=16),
    "3-d": case((2, 6, 7, 8, 16), (3, 3, 2, 16, 8), (1, 2, 1), numbers=NDHWC, dtype="bfloat16"),
    "wider result": case((2, 9, 8, 16), (3, 3, 16, 8), dtype="bfloat16", preferred_element_type="float32"),
    "whole window": case((2, 9, 8, 16), (9, 8, 16, 8), padding="VALID", dtype="bfloat16"),
    "large": case((8, 28, 28, 128), (3, 3, 128, 128), dtype="bfloat16"),
}  # fmt: skip
"""Convolutions, whose values and gradients are compared."""

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5, "float64": 1e-12}


def arrays(name, dtype):
    """Random operands of a case, rounded to its dtype, as ``dtype``."""
    x, w, own, _ = CASES[name]
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32).astype(own).astype(dtype) for s in (x, w)]


def function(name, **other):
    """Value and gradients of a case, the latter of a fixed random cotangent."""
    params = {**CASES[name][3], **other}

    def run(x, w):
        y, pullback = bf.vjp(lambda x, w: lax.conv_general_dilated(x, w, **params), x, w)
        ct = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
        return y, *pullback(bnp.asarray(ct, CASES[name][2]).astype(y.dtype))

    return run


@functools.cache
def expected(name):
    """The results in float64, on the CPU."""
    wide = [bnp.asarray(a, "float64") for a in arrays(name, np.float64)]
    return [np.asarray(y) for y in function(name, preferred_element_type=None)(*wide)]


def close(got, name):
    dtype = CASES[name][2]
    scale = 10 if CASES[name][3].get("precision") == "high" else 1
    tolerance = TOLERANCE[dtype] * scale * (10 if scale > 1 else 1)
    for a, b in zip(got, expected(name), strict=True):
        a = np.asarray(a).astype(np.float64)
        assert np.isfinite(a).all()
        assert abs(a - b).max() <= tolerance * max(1.0, abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cudnn", "implicit GEMM"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_on_a_device(name, library, monkeypatch):
    if library == "implicit GEMM":
        monkeypatch.setattr(plans, "why_not", lambda c: "this test is without it")
    elif graphs.why_missing() is not None:
        pytest.skip(graphs.why_missing())
    args = on(bf.devices("cuda")[0], *(bnp.asarray(a, CASES[name][2]) for a in arrays(name, np.float64)))
    run = bf.jit(function(name))
    first = run(*args)
    close(first, name)
    for repeated, value in zip(run(*args), first, strict=True):  # replayed as a graph
        np.testing.assert_array_equal(np.asarray(repeated).view(np.uint8), np.asarray(value).view(np.uint8))


@pytest.mark.parametrize("name", [n for n in CASES if n != "large"])
def test_values_and_gradients(name, cuda):
    args = on(cuda, *(bnp.asarray(a, CASES[name][2]) for a in arrays(name, np.float64)))
    close(bf.jit(function(name))(*args), name)


KINDS = ("forward", "input", "weight")


def convolution(
    kind="forward",
    size=9,
    c=16,
    k=24,
    r=3,
    stride=1,
    dilation=1,
    groups=1,
    dtype=BF16,
    out=None,
    last=True,
    n=2,
    pads=None,
):
    """A square convolution, padded evenly unless ``pads`` says otherwise."""
    pad = (r - 1) * dilation // 2
    pads = pads or ((pad, pad),) * 2
    y = tuple((size + sum(p) - (r - 1) * dilation - 1) // stride + 1 for p in pads)
    shapes = (n, size, size, c), (k, r, r, c // groups), (n, *y, k)
    slide = (stride,) * 2, pads, (dilation,) * 2, groups
    return Convolution(kind, *shapes, *slide, dtype, out or dtype, False, last)


# -- cuDNN's plans -------------------------------------------------------------------------------------

REFUSED = {
    "no engines for float64": {"dtype": F64},
    "from bfloat16 to float32": {"out": F32},
    "need features second": {"dtype": F32},
    "pad both ends alike": {"dtype": F32, "last": False, "pads": ((0, 1), (0, 1))},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reasons_against_cudnn(reason):
    assert reason in plans.why_not(convolution(**REFUSED[reason]))


def test_four_spatial_axes_are_refused():
    c = Convolution(
        "forward", (1,) * 6, (1,) * 6, (1,) * 6, (1,) * 4, ((0, 0),) * 4, (1,) * 4, 1, BF16, BF16, False
    )
    assert "4 spatial axes" in plans.why_not(c)


def test_without_cudnn(monkeypatch):
    monkeypatch.setattr(graphs, "_loaded", lambda: (None, "libcudnn.so.9: cannot open shared object file"))
    assert "cannot open" in plans.why_not(convolution())
    assert graphs.version() == 0
    with pytest.raises(
        errors.UnsupportedError, match=r"(?s)cuDNN.*was not found.*cannot open.*blufunc.cuda13"
    ):
        graphs.library()


QUALIFIES = {
    "plain": ({}, (), True),
    "nondeterministic": ({}, ("nondeterministic", "tensor core"), False),
    "IEEE on tensor cores": ({"dtype": F32}, ("tensor core",), False),
    "IEEE of rounded operands": ({"dtype": F32}, ("down-converted inputs",), False),
    "IEEE": ({"dtype": F32}, (), True),
    "uneven padding": ({"pads": ((0, 1), (0, 1))}, ("tensor core",), True),
    "uneven padding without tensor cores": ({"pads": ((0, 1), (0, 1))}, (), False),
    "an engine that ignores uneven padding": (
        {"kind": "weight", "pads": ((0, 1),) * 2},
        ("tensor core",),
        False,
    ),
}


@pytest.mark.parametrize("name", QUALIFIES)
def test_engines_that_qualify(name):
    how, notes, found = QUALIFIES[name]
    numbers = frozenset(graphs.NUMERICAL_NOTES[n] for n in notes)
    candidate = graphs.Candidate(graphs.Engine(1, ()), numbers)
    assert plans.qualifies(convolution(**how), candidate) == found


def test_engines_are_read_back():
    engine = graphs.Engine(62, ((2, 4), (18, 0)))
    assert plans._read(json.dumps(engine).encode()) == engine
    assert plans._read(b"torn") is None
    assert plans._read(None) is None


H100 = {
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 6, "isTccDriver": 0,
    "supportCoopLaunch": 1, "totalGlobalMem": 85017493504, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000,
    "l2CacheSize": 52428800, "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "deviceName": "H100",
}  # fmt: skip
"""The properties of a device, as cuDNN reads them."""


@pytest.mark.skipif(graphs.why_missing() is not None, reason=graphs.why_missing() or "")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_plans_need_no_device(kind, dtype):
    c = convolution(kind, size=28, c=64, k=64, n=16, dtype=dtype)
    device = graphs.Device(None, json.dumps(H100))
    of, found = plans.candidates(c, device)
    assert found and all(graphs.plan(device, of, e)[1] >= 0 for e in found[:2])


# -- the implicit GEMM ---------------------------------------------------------------------------------


SOURCES = {
    "bfloat16": {},
    "float16, odd features": {"dtype": F16, "c": 5, "k": 7},
    "wider result": {"out": F32, "k": 160},
    "float32": {"dtype": F32, "stride": 2},
    "narrower result": {"dtype": F32, "out": F16},
    "float64, features second": {"dtype": F64, "groups": 4, "last": False},
}


@needs_nvrtc
@pytest.mark.parametrize("name", SOURCES)
def test_sources_compile(name):
    for kind in KINDS:
        nvrtc.compile(implicit_gemm.source(convolution(kind, **SOURCES[name])))


def on_host(c):
    """The source of a plain kernel for the host."""
    text = implicit_gemm.source(c)
    return "#define __device__\n#define __align__(n)\n" + text


HOST_CASES = {
    "float32": {"dtype": F32},
    "strides": {"dtype": F32, "stride": 2},
    "dilation in groups": {"dtype": F32, "dilation": 2, "groups": 4},
    "float64": {"dtype": F64, "c": 5, "k": 7},
    "features second": {"dtype": F32, "last": False, "stride": 3},
    "a long sum": {"dtype": F32, "n": 8, "size": 12},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOST_CASES)
def test_the_plain_kernel_on_the_host(name, kind, host):
    c = convolution(kind, **HOST_CASES[name])
    rng = np.random.default_rng(0)
    shapes = {"forward": (c.x, c.w, c.y), "input": (c.y, c.w, c.x), "weight": (c.x, c.y, c.w)}[kind]
    a, b, out = (rng.standard_normal(s).astype(c.dtype) for s in shapes)
    if not c.features_last:
        a, b, out = (np.ascontiguousarray(np.moveaxis(v, -1, 1)) for v in (a, b, out))
    want = convolution_p.impl(
        a, b, kind=kind, strides=c.strides, padding=c.padding, dilation=c.dilation, groups=c.groups,
        shape=out.shape, dtype=c.dtype, precision=None, features_last=c.features_last,
    )  # fmt: skip
    t = implicit_gemm.tiling_of(c)
    first, *more = implicit_gemm.launches_of(c)
    parts = np.zeros((c.groups * t.splits * t.m * t.n,), c.dtype) if more else out
    got = host.launch(on_host(c), first.entry, [a, b], parts, grid=first.grid[0], block=256)
    if more:
        got = host.launch(on_host(c), more[0].entry, [got], out, grid=more[0].grid[0], block=256)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
