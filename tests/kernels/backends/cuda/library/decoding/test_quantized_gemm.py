"""GEMMs of few rows by quantized weights: conditions, source, host results."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import nn
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.decoding.quantized_gemm import (
    ENTRY,
    QuantizedGemm,
    gemm_of,
    instructions,
    parameters_of,
    source,
)
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.nn.quantization import formats
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("quantized"))


def operands(m, n, k, format, block=None, dtype=BF16):
    """x, and weights of which each row has another size."""
    rng = np.random.default_rng([m, n, k])
    x = rng.standard_normal((m, k)).astype(dtype)
    w = rng.standard_normal((n, k)).astype(F32) * np.exp(rng.standard_normal((n, 1))).astype(F32)
    return x, nn.quantization.quantize(w, format, block=block)


def gemm(x, w):
    fun = lambda x, w: nn.quantization.matmul(x, w, transposed=True)
    (eqn,) = bf.jit(fun).trace(x, w).jaxpr.eqns
    return gemm_of(eqn)


# -- which matmuls it runs -------------------------------------------------------------------------

FOUND = {  # rows, columns, terms, format, block; bits and block of the kernel
    "int8": ((8, 72, 192, "int8"), (8, 0)),
    "int8 in blocks": ((1, 64, 256, "int8", 128), (8, 128)),
    "nf4": ((16, 64, 256, "nf4"), (4, 64)),
    "nf4 of one block": ((3, 64, 128, "nf4", 128), (4, 128)),
    "float16": ((3, 64, 128, "nf4", None, F16), (4, 64)),
}
OTHERS = {
    "17 rows": (17, 64, 256, "nf4"),
    "float32": (8, 64, 256, "nf4", None, F32),
    "small blocks": (8, 64, 256, "nf4", 32),
    "an odd number of columns": (8, 63, 256, "int8"),
    "terms that are no multiple of 64": (8, 64, 96, "int8"),
}


@pytest.mark.parametrize("name", FOUND)
def test_which_matmuls_it_runs(name):
    given, (bits, block) = FOUND[name]
    found = gemm(*operands(*given))
    assert (found.m, found.n, found.k, found.bits, found.block) == (*given[:3], bits, block)


@pytest.mark.parametrize("name", OTHERS)
def test_which_matmuls_it_leaves_to_others(name):
    assert isinstance(gemm(*operands(*OTHERS[name])), str)


# -- the kernel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("bits, block", [(8, 0), (8, 64), (4, 64)])
@pytest.mark.parametrize("rows, columns", [(1, 4096), (16, 11008)])
@needs_nvrtc
def test_it_compiles_without_spills(rows, columns, bits, block, arch):
    p = QuantizedGemm(rows, columns, 4096, BF16, bits, block)
    found = resources(nvrtc.build(DEVICE.with_prelude(source(p)), arch, ENTRY))[ENTRY]
    assert found.spill_stores == 0 and found.registers > 32  # fewer: nothing was left of it


@pytest.mark.parametrize("name", FOUND)
def test_results_on_the_host(name, emulator):
    given, _ = FOUND[name]
    x, w = operands(*given)
    p = gemm(x, w)
    out = np.full((p.m, p.n), np.nan, x.dtype)
    arrays = [np.array(a) for a in (x, *formats.parts_of(w), out)]
    types = {"element": "unsigned short *", "float": "float *", "unsigned char": "unsigned char *"}
    parameters = []
    for (kind, _), a in zip(parameters_of(p), arrays, strict=True):
        halves = a.dtype in (BF16, F16)
        parameters.append((types[kind.removeprefix("const ")], a.view(np.uint16) if halves else a))
    emulator.launch(
        source(p), instructions(p), p.dtype.name, ENTRY, parameters, p.grid, p.threads, p.shared_bytes,
        parts=("overlap", "skinny", "quantized"),
    )  # fmt: skip
    want = x.astype(np.float64) @ np.asarray(nn.quantization.dequantize(w)).T
    got = arrays[-1].astype(np.float64)
    # measured: codes and results round to neighbours of bfloat16
    assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()
    assert np.abs(got - want).mean() <= 2**-8 * np.abs(want).mean()


PROGRAMS = {  # rows, format; the kernel's launches
    "a token": (1, "nf4", ["quantized"] * 2),
    "eight": (8, "int8", ["quantized"] * 2),
    "many": (32, "nf4", []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_a_device(name, fake, cuda):
    rows, format, launches = PROGRAMS[name]
    x, w = operands(rows, 128, 128, format)
    place = lambda tree: bf.device_put(tree, cuda)
    fun = lambda x, w: (
        bnp.tanh(nn.quantization.matmul(x, w, transposed=True) / 16) @ bnp.ones((128, 1), x.dtype)
    )
    twice = lambda x, w: fun(nn.quantization.matmul(bnp.tanh(x), w, transposed=True) / 16, w)
    got = np.asarray(bf.jit(twice)(place(x), place(w))).astype(F32)
    assert [e for e in fake.epilogues if e == "quantized"] == launches
    want = np.asarray(twice(bnp.asarray(x), w)).astype(F32)
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02 * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FOUND)
def test_results_on_a_device(name):
    given, _ = FOUND[name]
    x, w = operands(*given)
    fun = bf.jit(lambda x, w: nn.quantization.matmul(x, w, transposed=True))
    got = np.asarray(fun(*bf.device_put((x, w), bf.devices("cuda")[0]))).astype(np.float64)
    want = x.astype(np.float64) @ np.asarray(nn.quantization.dequantize(w)).T
    assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()
