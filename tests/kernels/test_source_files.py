"""Every C++ and CUDA file compiles: each part is in one of these sources.

Tests of the launching modules check their results, and that they do not spill registers.
"""

import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import blufunc as bf
from benchmarks.harness.kernel_resources import resources
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.programs.simplify import inline_calls
from blufunc.kernels import codegen
from blufunc.kernels.backends.cpu import gemm, toolchain
from blufunc.kernels.backends.cpu.native import driver
from blufunc.kernels.backends.cpu.steps.forms import LIBRARIES
from blufunc.kernels.backends.cuda.device_model import COLLECTIVE_CLUSTER
from blufunc.kernels.backends.cuda.driver import nvrtc, sm_reservation
from blufunc.kernels.backends.cuda.library import pointwise_gemm, softmax_gemm, split_gemm
from blufunc.kernels.backends.cuda.library.attention import decode as attention_decode
from blufunc.kernels.backends.cuda.library.attention import ieee
from blufunc.kernels.backends.cuda.library.attention import kernels as attention
from blufunc.kernels.backends.cuda.library.control_flow import moves
from blufunc.kernels.backends.cuda.library.convolution import implicit_gemm
from blufunc.kernels.backends.cuda.library.decoding import quantized_gemm, skinny_gemm
from blufunc.kernels.backends.cuda.library.grouped import hopper, portable
from blufunc.kernels.backends.cuda.library.linalg import moves as large_matrices
from blufunc.kernels.backends.cuda.library.linalg import small
from blufunc.kernels.backends.cuda.library.loops import op
from blufunc.kernels.backends.cuda.library.loops import source as loop_kernels
from blufunc.kernels.backends.cuda.library.recurrence import source as recurrence
from blufunc.kernels.backends.cuda.library.scatter import atomics as scatter_atomics
from blufunc.kernels.backends.cuda.library.scatter import bins as scatter_bins
from blufunc.kernels.backends.cuda.library.scatter import partitions as scatter_partitions
from blufunc.kernels.backends.cuda.library.scatter import rows as scatter_rows
from blufunc.kernels.backends.cuda.library.sorting import rows as sorting
from blufunc.kernels.backends.cuda.render.source import KERNEL_PARTS
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE, HOST
from tests.emulation.cuda_machines import needs_nvrtc
from tests.kernels.backends.cuda.library import test_small_matrices as small_cases
from tests.kernels.backends.cuda.library.decoding.test_skinny_gemm import gemm as skinny
from tests.kernels.backends.cuda.library.decoding.test_skinny_gemm import of_rows, rows_in
from tests.kernels.backends.cuda.library.test_attention_mods import given
from tests.kernels.backends.cuda.library.test_convolution import F32, convolution
from tests.kernels.backends.cuda.library.test_grouped import gemm as grouped_gemm
from tests.kernels.backends.cuda.library.test_grouped import portable_gemm
from tests.kernels.backends.cuda.library.test_loops import case, loops
from tests.kernels.backends.cuda.library.test_pointwise_gemm import gemm as pointwise
from tests.kernels.backends.cuda.library.test_recurrence import elements, recurrences, scanned

ROOT = Path(codegen.__file__).parents[1]
FILES = sorted(str(p.relative_to(ROOT)) for end in ("h", "cuh") for p in ROOT.rglob(f"*.{end}"))
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
EMPTY = 'extern "C" __global__ void k() {}\n'


def attention_source(kernel, arch, features=16, dtype=BF16, parts=0, code=attention.NO_CODE):
    tiling = kernel.tiling(features, arch, code, parts)
    return DEVICE.with_prelude(attention.source(kernel, dtype, features, True, tiling, code, parts))


def mods_source():
    *_, code = given("both")
    return attention_source(attention.FORWARD_KERNEL.lists, "sm_80", code=code)


def sort_source():
    jaxpr = bf.make_jaxpr(lambda x: lax.top_k(x, 3))(bf.ShapeDtypeStruct((9, 9000), np.float32))
    (eqn,) = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return sorting.source(eqn, sorting.passes(eqn)[0])


def matrix_source(fun, *shapes):
    jaxpr = bf.make_jaxpr(fun)(*[bf.ShapeDtypeStruct(s, np.float32) for s in shapes])
    eqns = inline_calls(getattr(jaxpr, "jaxpr", jaxpr)).eqns
    (found,) = [small.kernel(e, small.small(e)) for e in eqns[-1:]]
    return found.text


def loop_source(dtype_name):
    (eqn,) = loops(*case("GRU", dtype_name))
    return loop_kernels.complete(*op.loop_of(eqn))


def recurrence_source():
    fn, xs = elements("state space", (64, 4096))
    (eqn,) = recurrences(scanned(fn, 1, False), *xs)
    return recurrence.source(eqn, [False, True])


def skinny_source(epilogue):
    return DEVICE.with_prelude(skinny_gemm.source(skinny(8, 64, 256, epilogue=epilogue)))


def source_of_rows():
    found, _ = rows_in(*of_rows("layer norm", 8, 256, 256, dtypes.bfloat16))
    return DEVICE.with_prelude(skinny_gemm.source(found.tiled()))


# what is compiled, for which architectures, and of what
DEVICE_SOURCES = {
    "all of the prelude": ("sm_80 sm_90a", lambda arch: DEVICE.source(DEVICE.names) + EMPTY),
    "kernel parts": (
        "sm_80 sm_90a",
        lambda arch: DEVICE.with_prelude(source_files.source(KERNEL_PARTS) + "typedef bf16 used;\n" + EMPTY),
    ),
    "loops of a graph": ("sm_80 sm_90a", lambda arch: moves.source()),
    "sorts of rows": ("sm_80", lambda arch: sort_source()),
    "scatter": ("sm_80 sm_90a", lambda arch: scatter_rows.source("add", BF16, "int32", 4, True)),
    "scatter_order": ("sm_80 sm_90a", lambda arch: scatter_rows.order_source("int64", 8, False, BF16)),
    "scatter_bins": ("sm_80 sm_90a", lambda arch: scatter_bins.source("add", BF16, "int32", True)),
    "scatter_partitions": ("sm_80 sm_90a", lambda arch: scatter_partitions.source("add", BF16, "int32", 9)),
    "scatter_atomics": (
        "sm_80",
        lambda arch: scatter_atomics.source("max", np.dtype(np.int64), "int32", True),
    ),
    "large matrices, transposes": (
        "sm_80",
        lambda arch: large_matrices.transpose_source(np.dtype(np.complex128), True),
    ),
    "large matrices, triangles": ("sm_80", lambda arch: large_matrices.triangle_source(np.dtype("c8"))),
    "large matrices, permutations": ("sm_80", lambda arch: large_matrices.permutation_source(1 << 20)),
    "a recurrence": ("sm_80 sm_90a", lambda arch: recurrence_source()),
    "Cholesky": ("sm_80", lambda arch: matrix_source(small_cases.cholesky, (5, 9, 9))),
    "LU": ("sm_80", lambda arch: matrix_source(lax.linalg.lu, (5, 9, 9))),
    "triangles": ("sm_80", lambda arch: matrix_source(lax.linalg.triangular_solve, (5, 9, 9), (5, 2, 9))),
    "LU solve": ("sm_80", lambda arch: matrix_source(small_cases.lu_solve, (5, 9, 9), (5, 9, 9))),
    "QR": ("sm_80", lambda arch: matrix_source(small_cases.qr(True), (5, 9, 9))),
    "eigenvectors": ("sm_80", lambda arch: matrix_source(small_cases.eigh, (5, 9, 9))),
    "singular vectors": ("sm_80", lambda arch: matrix_source(small_cases.svd(True), (5, 9, 4))),
    "SM reservation": (
        "sm_80 sm_90a",
        lambda arch: source_files.source(sm_reservation._FILE, CLUSTER=COLLECTIVE_CLUSTER),
    ),
    "softmax GEMM": (
        "sm_90a",
        lambda arch: softmax_gemm.source(softmax_gemm.SoftmaxGemm(256, 192, 64, by_rows=True)),
    ),
    "pointwise GEMM": (
        "sm_90a",
        lambda arch: DEVICE.with_prelude(
            pointwise_gemm.source(pointwise("squared ReLU", (256, 192, 64), True))
        ),
    ),
    "split GEMM": (
        "sm_90a",
        lambda arch: split_gemm.source(split_gemm.SplitGemm(128, 64, 64, (True, False), columns=64)),
    ),
    "a loop": ("sm_80 sm_90a", lambda arch: loop_source("bfloat16")),
    "a loop of float32": ("sm_80 sm_90a", lambda arch: loop_source("float32")),
    "attention": ("sm_80 sm_90a", lambda arch: attention_source(attention.FORWARD_KERNEL, arch)),
    "attention of two parts": (
        "sm_90a",
        lambda arch: attention_source(attention.KEY_KERNEL, arch, dtype=F16, parts=2),
    ),
    "attention to a cache": (
        "sm_90a",
        lambda arch: attention_decode.text_of(
            attention.Shape(1, 1, 1, 4, 1, 128), BF16, attention.NO_CODE, 2
        ),
    ),
    "skinny GEMM": ("sm_80 sm_90a", lambda arch: skinny_source("")),
    "skinny GEMM with an epilogue": ("sm_90a", lambda arch: skinny_source("SwiGLU")),
    "skinny GEMM that computes its rows": ("sm_80 sm_90a", lambda arch: source_of_rows()),
    "quantized GEMM": (
        "sm_80 sm_90a",
        lambda arch: DEVICE.with_prelude(
            quantized_gemm.source(quantized_gemm.QuantizedGemm(8, 64, 256, BF16, 4, 64))
        ),
    ),
    "attention's tiles": ("sm_80", lambda arch: mods_source()),
    "gradient of queries": ("sm_80 sm_90a", lambda arch: attention_source(attention.QUERY_KERNEL, arch, 48)),
    "gradients of keys, summed": (
        "sm_90a",
        lambda arch: attention_source(attention.KEY_KERNEL.summed, arch, 48),
    ),
    "implicit GEMM": ("sm_80 sm_90a", lambda arch: implicit_gemm.source(convolution("weight", n=64))),
    "implicit GEMM of float32": ("sm_80", lambda arch: implicit_gemm.source(convolution(dtype=F32, n=64))),
    "grouped GEMM": ("sm_90a", lambda arch: hopper.source(grouped_gemm(summed=True, cluster=2))),
    "grouped GEMM of any architecture": (
        "sm_80 sm_90a",
        lambda arch: portable.source(portable_gemm("float32", "float32", tf32=True)),
    ),
    "all gradients": ("sm_90a", lambda arch: attention_source(attention.PLANE_KERNEL, arch, 64)),
    **{
        kernel.entry: ("sm_90a", lambda arch, k=kernel: ieee.source(k, k.tilings[0], 32, True))
        for kernel in (ieee.FORWARD, ieee.DELTA_KERNEL, ieee.BACKWARD)
    },
}
HOST_SOURCES = {
    "all of the prelude": lambda: HOST.source(HOST.names),
    "GEMM": lambda: gemm.source(np.dtype("float32")),
    "native steps": lambda: source_files.source(driver.FILE),
    **{name: library.source for name, library in LIBRARIES.items()},
    "probe": lambda: source_files.source(toolchain._PROBE),
}
SLOW = {"attention_gradients_f32"}
CASES = [
    pytest.param(name, arch, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, (archs, _) in DEVICE_SOURCES.items()
    for arch in archs.split()
]


@pytest.mark.second
@pytest.mark.sampled(12)
@needs_nvrtc
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_device_sources_compile(name, arch):
    source = DEVICE_SOURCES[name][1](arch)
    binary = nvrtc.build(source, arch, name, ["--ptxas-options=-O1"])
    assert len(resources(binary)) == source.count('extern "C" __global__')


@pytest.mark.second
@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", HOST_SOURCES)
def test_host_sources_compile(name):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("this machine has no C++ compiler")
    command = [compiler, "-x", "c++", "-std=c++17", "-fopenmp", "-fsyntax-only", "-"]
    subprocess.run(command, input=HOST_SOURCES[name](), text=True, check=True, timeout=60)


def test_every_part_of_every_file_is_compiled():
    squeezed = lambda text: re.sub(r"\s", "", text)
    made = [maker(arch) for archs, maker in DEVICE_SOURCES.values() for arch in archs.split()]
    everything = squeezed("".join([*made, *(maker() for maker in HOST_SOURCES.values())]))
    missing = [
        (file, name) for file in FILES for name, part in source_files.parts(file).items()
        if squeezed(part) not in everything
    ]  # fmt: skip
    assert not missing
