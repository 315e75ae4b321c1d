"""fp8 GEMMs on a CUDA device: which matmuls, their descriptors, results, sources."""

import ctypes

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library import cublaslt, float8_gemm
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.gemm_layout import Gemm, Layout
from blufunc.kernels.schedule import OpaqueStep
from blufunc.nn.low_precision import Float8, delayed_float8, float8
from tests.emulation.cuda_machines import needs_nvrtc
from tests.kernels.backends.cuda.library.test_cublaslt import lib  # noqa: F401
from tests.kernels.backends.cuda.test_program import on

SCALINGS = ["tensor", "row", "block"]
E4M3, E5M2, BF16 = dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.bfloat16


def loss(w, x):
    return bnp.sum(bnp.tanh(x @ w / 4) ** 2)


def operands(m=32, k=160, n=48):
    rng = np.random.default_rng(m)
    return rng.standard_normal((k, n)).astype(np.float32), rng.standard_normal((m, k)).astype(np.float32)


def described(fun, *args, arch="sm_90a"):
    return str(bf.explain(fun, *args, device=f"cuda:{arch}"))


# -- which matmuls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_three_matmuls_read_fp8_on_hopper(scaling):
    gradient = bf.value_and_grad(float8(bf.autocast(loss), Float8(scaling=scaling)), (0, 1))
    text = described(gradient, *operands())
    kinds = [line.split("cuBLASLt: ")[1] for line in text.splitlines() if "an fp8 GEMM of cuBLASLt" in line]
    each = f"a scale for each {scaling}"
    assert kinds == [
        f"e4m3fn x e4m3fn, {each}, sums of fewer bits", f"e5m2 x e4m3fn, {each}", f"e4m3fn x e5m2, {each}",
    ]  # fmt: skip
    assert text.count("(library)") == 3 and "dot_general" not in text and "no kernel" not in text


def test_a_history_saves_the_pass_for_the_largest_element():
    """One kernel computes an operand, measures and rounds it."""
    args = operands()
    scaled = delayed_float8(bf.autocast(loss))
    text = described(bf.value_and_grad(scaled, (0, 1)), scaled.init(*args), *args)
    assert any("is_finite" in line and "reduce_max" in line for line in text.splitlines())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_operands_and_scales_are_read_in_place(scaling):
    """No copy turns an operand around ahead of a GEMM."""
    w, x = operands()
    jaxpr = bf.jit(bf.grad(float8(bf.autocast(loss), Float8(scaling=scaling)), (0, 1))).trace(w, x).jaxpr
    steps = Draft(jaxpr, (False, False), "sm_90a").schedule.steps
    gemms = [s for s in steps if isinstance(s, OpaqueStep) and s.eqn.prim.name == float8_gemm.NAME]
    assert len(gemms) == 3 and not any(chain for s in gemms for _, chain in s.operands)


REFUSED = {  # sizes, recipe, architecture, and the reason
    "columns": ((32, 160, 40), {}, "sm_90a", "multiples of 16"),
    "terms": ((32, 72, 48), {}, "sm_90a", "multiples of 16"),
    "an old device": ((32, 160, 48), {}, "sm_80", "sm_80 has no fp8 GEMM"),
    "rows on Ada": ((32, 160, 48), {"scaling": "row"}, "sm_89", "sm_89 has no fp8 GEMM with scales of each row"),
    "blocks on Blackwell": ((32, 160, 48), {"scaling": "block"}, "sm_100", "scales of other blocks"),
    "rows of blocks": ((30, 160, 48), {"scaling": "block"}, "sm_90a", "a multiple of 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_matmuls_are_dequantized_and_named(name):
    sizes, recipe, arch, reason = REFUSED[name]
    text = described(float8(bf.autocast(loss), Float8(**recipe)), *operands(*sizes), arch=arch)
    (line,) = [x for x in text.splitlines() if "no kernel for float8_dot" in x]
    assert reason in line and "test_float8_gemm.py" in line
    assert "dot_general" in text and "fp8 GEMM of cuBLASLt" not in text


def test_batches_with_scales_of_their_own_are_dequantized():
    w, x = operands()
    each = bf.vmap(lambda w, x: float8(bnp.matmul)(x, w))
    assert "dot_general" in described(each, np.stack([w, w]), np.stack([x, x]))
    shared = bf.vmap(lambda x: float8(bnp.matmul)(x, w))
    assert "a scale for each row" in described(shared, np.stack([x, x]))


# -- descriptors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
def test_descriptors_have_scales(lib, scaling):  # noqa: F811
    gemm = Gemm(Layout(32, 64, 128, False, True, 128, 128, 64), E4M3, E5M2, BF16, scaling=scaling, fast=True)
    made = cublaslt.Descriptors(gemm)
    made.set_scales(0xA0, 0xB0)  # the library is column-major: its A is the second operand
    assert [made.get(n, ctypes.c_uint64()) for n in (17, 18)] == [0xB0, 0xA0]
    assert [made.get(n, ctypes.c_int32()) for n in (31, 32)] == [
        {"tensor": 0, "row": 3, "block": 4}[scaling]
    ] * 2
    assert made.get(25, ctypes.c_int8()) == 1


REFUSED_GEMMS = {
    "scales of bfloat16": Gemm(Layout(32, 64, 128, False, True, 128, 128, 64), BF16, BF16, BF16, scaling="row"),
    "scales of a batch": Gemm(
        Layout(32, 64, 128, False, True, 128, 128, 64, 2, 4096, 8192, 2048), E4M3, E4M3, BF16, scaling="tensor"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_GEMMS)
def test_gemms_without_scales(name):
    assert "scales" in REFUSED_GEMMS[name].refused()


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
def test_results_on_an_emulated_device(scaling, fake, cuda):
    """Scales in the layouts of the library, of operands that are written transposed."""
    w, x = operands()
    x *= np.exp2(np.arange(32) % 7 - 3)[:, None].astype(np.float32)
    x[:, :128] *= 32
    gradient = bf.jit(bf.value_and_grad(float8(bf.autocast(loss), Float8(scaling=scaling)), (0, 1)))
    want = gradient(w, x)
    for _ in range(3):  # eager, captured, replayed
        before = fake.products
        got = gradient(*on(cuda, w, x))
    assert fake.products - before == 3
    bf.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2), got, want)


def test_a_refused_gemm_is_dequantized(fake, cuda, monkeypatch):
    def refuse(*args):
        raise bf.errors.UnsupportedError("none")

    w, x = operands()
    plain = cublaslt.Plan
    monkeypatch.setattr(cublaslt, "Plan", lambda gemm, *a: refuse() if gemm.scaling else plain(gemm, *a))
    f = bf.jit(float8(bnp.matmul))
    for _ in range(4):  # of which one tries to capture it
        np.testing.assert_allclose(f(*on(cuda, x, w)), f(x, w), rtol=1e-5, atol=1e-5)


START = "typedef signed char int8_t;"


@pytest.mark.slow
@needs_nvrtc
def test_the_casts_compile():
    w, x = operands()
    for recipe in (Float8(), Float8(scaling="block")):
        jaxpr = bf.jit(bf.grad(float8(bf.autocast(loss), recipe), (0, 1))).trace(w, x).jaxpr
        source = Draft(jaxpr, (False, False), "sm_90a").source()
        assert "e4m3" in source and "e5m2" in source
        for kernels in source.split(START)[1:]:  # a module each
            nvrtc.build(START + kernels, "sm_90a", "casts", ["--ptxas-options=-O1"])


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
def test_results_on_a_device(scaling):
    device = bf.devices("cuda")[0]
    if float8_gemm._SCALINGS[scaling] == "sm_90" and device.capability < (9, 0):
        pytest.skip("scales of rows and blocks need a newer device")
    w, x = operands(128, 512, 256)
    gradient = bf.jit(bf.value_and_grad(float8(bf.autocast(loss), Float8(scaling=scaling)), (0, 1)))
    want, got = gradient(w, x), gradient(*on(device, w, x))
    bf.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=5e-2), got, want)
