"""NVRTC: compilation, disk cache, logs and errors."""

import re
import sys

import numpy as np
import pytest

from benchmarks.harness.kernel_resources import Resources, resources
from blufunc import errors
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.cache.disk import DiskCache

needs_nvrtc = pytest.mark.skipif(nvrtc.available() is not None, reason=nvrtc.available() or "")

SCALE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }\n'

LOG = """\
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     40 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 40 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compile time = 5.197 ms
ptxas info    : Function properties for helper
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""


def test_log():
    assert resources(nvrtc.Binary(b"", LOG)) == {
        "first": Resources(22, 4096, 8, 12, 40),
        "second": Resources(10, 0, 0, 0, 0),
    }


def test_without_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    for function in (nvrtc._library, nvrtc.available, nvrtc.version):
        function.cache_clear()
    try:
        assert "cuda-pathfinder" in nvrtc.available()
        with pytest.raises(errors.UnsupportedError, match="cannot be compiled here") as caught:
            nvrtc.compile(SCALE, cache=DiskCache(tmp_path))
        assert "pip install" in caught.value.fix
    finally:
        for function in (nvrtc._library, nvrtc.available, nvrtc.version):
            function.cache_clear()


@needs_nvrtc
def test_version():
    major, minor = nvrtc.version()
    assert major >= 12 and minor >= 0
    assert {"sm_80", "sm_90"} <= set(nvrtc.supported_architectures())


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_build(arch):
    binary = nvrtc.build(SCALE, arch)
    assert binary.cubin.startswith(b"\x7fELF") and b"scale" in binary.cubin
    assert resources(binary)["scale"].registers > 0


@needs_nvrtc
def test_spills_are_seen():
    text = """
    extern "C" __global__ void spill(float* x) {
      float a[64];
      #pragma unroll
      for (int i = 0; i < 64; ++i) a[i] = x[i * 32];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 64; ++i) x[i * 32 + 1] = a[i] * a[(i * 7 + 3) % 64];
    }"""
    assert resources(nvrtc.build(text, "sm_90"))["spill"].spill_stores == 0
    assert resources(nvrtc.build(text, "sm_90", options=["--maxrregcount=32"]))["spill"].spill_stores > 0


@needs_nvrtc
@pytest.mark.parametrize(
    "header, type",
    [("cuda_bf16.h", "__nv_bfloat16"), ("cuda_fp16.h", "__half"), ("cuda_fp8.h", "__nv_fp8_e4m3")],
)
def test_headers(header, type):
    if nvrtc.include_directory() is None:
        pytest.skip("CUDA's headers are not installed")
    nvrtc.build(f'#include <{header}>\nextern "C" __global__ void k({type}* x) {{ x[0] = {type}(1.0f); }}\n')


RUNTIME = "cudaError_t e = cudaSuccess; x[0] = e;"


@needs_nvrtc
@pytest.mark.parametrize(
    "body, pattern, flags",
    [("x[0] = 2;", None, [True]), (RUNTIME, None, [False]), (RUNTIME, "never", [True, False])],
)
def test_the_runtime_is_declared_where_it_is_used(body, pattern, flags, monkeypatch):
    """``--minimal`` unless the source names the runtime, or does not compile."""
    found, run = [], nvrtc._run
    monkeypatch.setattr(nvrtc, "_run", lambda *a: found.append("--minimal" in a[2]) or run(*a))
    if pattern is not None:
        monkeypatch.setattr(nvrtc, "_NOT_MINIMAL", re.compile(pattern))
    assert nvrtc.build(f'extern "C" __global__ void k(int* x) {{ {body} }}', "sm_90").cubin
    assert found == (flags if nvrtc.version() >= nvrtc._MINIMAL_SINCE else [False])


@needs_nvrtc
def test_cache(tmp_path, monkeypatch):
    disk, built, build = DiskCache(tmp_path), [], nvrtc.build
    monkeypatch.setattr(nvrtc, "build", lambda source, *args: built.append(args) or build(source, *args))
    first = nvrtc.compile(SCALE, "sm_90", cache=disk)
    assert nvrtc.compile(SCALE, "sm_90", cache=DiskCache(tmp_path)) == first and len(built) == 1
    nvrtc.compile(SCALE, "sm_80", cache=disk)
    nvrtc.compile(SCALE, "sm_90", options=["--fmad=false"], cache=disk)
    nvrtc.compile(SCALE.replace("2.0f", "4.0f"), "sm_90", cache=disk)
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    nvrtc.compile(SCALE, "sm_90", cache=disk)
    assert len(built) == 5
    assert SCALE in "".join(path.read_text() for path in tmp_path.glob("*.txt"))


@needs_nvrtc
@pytest.mark.parametrize(
    "first, second, same",
    [
        (f"  // at a.py:1 (f)\n{SCALE}", f"\t// at a.py:22 (f)\n// and more\n{SCALE}", True),
        (f"{SCALE}// one\n", SCALE, True),
        (SCALE, SCALE.replace("2.0f", "3.0f"), False),
        (f"// a \\\nfloat before = 1;\n{SCALE}", f"// b \\\nfloat before = 1;\n{SCALE}", False),
        (f"// a\nstatic int line = __LINE__;\n{SCALE}", f"static int line = __LINE__;\n{SCALE}", False),
        (
            f"// a\nstatic int line = __builtin_LINE();\n{SCALE}",
            f"static int line = __builtin_LINE();\n{SCALE}",
            False,
        ),
        (f"// a \\\r\nfloat before = 1;\n{SCALE}", f"// a\r\nfloat before = 1;\n{SCALE}", False),
        (f"/*\n// */ // a\n{SCALE}", f"/*\n// */ // b\n{SCALE}", False),
    ],
)
def test_where_the_users_lines_are_does_not_matter(first, second, same, tmp_path, monkeypatch):
    built, build = [], nvrtc.build
    monkeypatch.setattr(nvrtc, "build", lambda source, *args: built.append(source) or build(source, *args))
    for text in (first, second):
        nvrtc.compile(text, "sm_90", cache=DiskCache(tmp_path))
    assert built == ([first] if same else [first, second])


@needs_nvrtc
@pytest.mark.parametrize("workers", [1, 4])
def test_many(workers, tmp_path):
    texts = [(SCALE.replace("2.0f", f"{i}.0f"), f"scale{i}") for i in range(6)]
    together = list(nvrtc.compile_many(texts, "sm_90", workers, cache=DiskCache(tmp_path)))
    assert together == [nvrtc.build(text, "sm_90", name).cubin for text, name in texts]


@needs_nvrtc
def test_many_with_a_mistake(tmp_path):
    texts = [(SCALE, "good"), ("not C++", "bad"), ("neither", "worse")]
    with pytest.raises(errors.CompileError, match="'bad'"):
        list(nvrtc.compile_many(texts, "sm_90", 2, cache=DiskCache(tmp_path)))


BROKEN = """\
extern "C" __global__ void k(float* x) {
  // at model.py:10 (loss)
  float a = x[0];
  // at model.py:12 (gelu)
  float b = tnah(a);
  // at model.py:14 (loss)
  x[1] = b;
}
"""


@needs_nvrtc
def test_error_shows_both_lines(tmp_path):
    with pytest.raises(errors.CompileError) as caught:
        nvrtc.compile(BROKEN, "sm_90", "gelu", cache=DiskCache(tmp_path))
    e = caught.value
    assert "'gelu'" in e.what and "tnah" in e.what
    assert e.where == "model.py:12 (gelu)"
    assert ">    5 |   float b = tnah(a);" in e.why and "x[1] = b" in e.why and "extern" not in e.why
    assert e.fix
    assert not list(tmp_path.glob("*.cubin"))


@needs_nvrtc
def test_error_of_the_assembler():
    """Errors of ptxas have no source line."""
    text = 'extern "C" __global__ void k(float* x) { asm("no.such.instruction;"); }\n'
    with pytest.raises(errors.CompileError, match="sm_90"):
        nvrtc.build(text, "sm_90")


@needs_nvrtc
def test_unknown_architecture():
    with pytest.raises(errors.UnsupportedError, match="sm_35") as caught:
        nvrtc.build(SCALE, "sm_35")
    assert "sm_90" in caught.value.why


@needs_nvrtc
def test_unknown_option():
    with pytest.raises(errors.CompileError, match="no-such-option"):
        nvrtc.build(SCALE, options=["--no-such-option"])


@pytest.mark.gpu
def test_denormals_and_division_on_a_device():
    """As the options promise: no flush to zero, no approximate division."""
    import cupy

    text = (
        'extern "C" __global__ void k(const float* x, float* y) { y[0] = x[0] * 0.5f; y[1] = x[1] / x[2]; }\n'
    )
    module = cupy.cuda.function.Module()
    module.load(nvrtc.compile(text, f"sm_{cupy.cuda.Device().compute_capability}"))
    x = np.array([2e-38, 1.0, 3.0], np.float32)
    y = cupy.zeros(2, np.float32)
    module.get_function("k")((1,), (1,), (cupy.asarray(x), y))
    np.testing.assert_array_equal(y.get(), [x[0] * np.float32(0.5), x[1] / x[2]])
