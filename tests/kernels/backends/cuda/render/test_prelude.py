"""CUDA prelude: compiled for every architecture and checked numerically.

The same table is checked twice: with a host compiler, and on a device if there is one.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.harness.kernel_resources import resources
from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.codegen.source_files import DEVICE
from tests.array_api.special_cases import COMPLEX, assert_parts, rows_of
from tests.array_api.special_cases import cases as special_cases
from tests.emulation import cuda_blocks
from tests.emulation.cuda_cases import (
    C_TYPES,
    NOT_ON_HOST,
    PRIMITIVES,
    WITHOUT,
    Case,
    assert_converted,
    cases,
    check,
    conversions,
    convertible,
)
from tests.emulation.cuda_machines import Host, launch, needs_nvrtc
from tests.pairwise import pairwise

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

# -- choosing --------------------------------------------------------------------------------------


def test_golden_smallest(golden):
    golden("cuda_prelude", DEVICE.source({"bf_logistic", "bf16", "bf_add"}))


def test_only_what_is_used():
    assert DEVICE.source(set()) == ""
    text = DEVICE.with_prelude('extern "C" __global__ void k(float* x) { *x = bf_exp(*x); /* bf16 */ }\n')
    assert text.count("bf_") == 3 and "bf16" not in text.split("__global__")[0].replace("/* bf16 */", "")
    assert "Complex" not in text
    both = DEVICE.source({"bf_exp", "c64"})
    assert "bf_exp(Complex<T> z)" in both and both.index(
        "struct alignas(2 * sizeof(T)) Complex"
    ) < both.index("bf_exp")


def test_comments_and_strings_use_nothing():
    assert DEVICE.used_names('// bf_exp\nasm("cvt.rn.bf16.f32");') == set()


def test_unknown_name():
    with pytest.raises(errors.UnsupportedError, match="bf_zeta") as caught:
        DEVICE.source({"bf_zeta", "bf_exp"})
    assert caught.value.fix


def test_every_elementwise_primitive_is_there():
    missing = {name for name in PRIMITIVES if f"bf_{name}" not in DEVICE.names}
    assert missing == WITHOUT


def test_parts_come_after_what_they_use():
    seen = set()
    for part in DEVICE.parts:
        seen |= set(part.names)
        assert part.uses <= seen, part.names


# -- compiling -------------------------------------------------------------------------------------


KINDS = {
    "functions": lambda dtype: "".join(case.kernel() for case in cases(dtype)),
    "conversions": lambda dtype: conversions(dtype, "__global__ void"),
}
BLOCKS = {"cooperative": cuda_blocks.cooperative(256), "moves": cuda_blocks.moves(), "last": cuda_blocks.LAST}
SOURCES = {f"{kind} of {dtype}": KINDS[kind](dtype) for dtype in C_TYPES for kind in KINDS} | BLOCKS
COMPILED = [(f"{kind} of {dtype}", arch) for dtype, kind, arch in pairwise(C_TYPES, KINDS, ARCHITECTURES)]
COMPILED += [(name, arch) for name in BLOCKS for arch in ARCHITECTURES]


@pytest.mark.second
@pytest.mark.sampled(6)
@needs_nvrtc
@pytest.mark.parametrize("what, arch", COMPILED)
def test_compiles_without_spills(what, arch):
    found = resources(nvrtc.build(DEVICE.with_prelude(SOURCES[what]), arch))
    assert len(found) == SOURCES[what].count("__global__")
    # trigonometric functions reduce large arguments in an array on the stack
    spilling = [k for k, r in found.items() if r.spill_stores or r.spill_loads]
    assert not spilling
    on_stack = [k for k, r in found.items() if r.stack]
    assert all(any(f in k for f in ("sin", "cos", "tan", "exp", "pow", "logistic")) for k in on_stack)


@pytest.mark.sampled(12)
@needs_nvrtc
@pytest.mark.parametrize("name", sorted(DEVICE.names))
def test_every_part_alone(name):
    """Each part compiles alone, with its dependencies."""
    if name in ("INFINITY", "NAN"):
        return
    text = DEVICE.source({name})
    nvrtc.build(text + 'extern "C" __global__ void k() {}\n', "sm_90")


@needs_nvrtc
def test_threads_compile_at_once():
    with ThreadPoolExecutor(4) as pool:
        texts = [
            DEVICE.with_prelude(f'extern "C" __global__ void k(float* x) {{ *x = bf_exp(*x) + {i}; }}')
            for i in range(8)
        ]
        assert len({b.cubin for b in pool.map(nvrtc.build, texts)}) == 8


# -- numerics --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("host"))


@pytest.mark.second
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", C_TYPES)
def test_functions_on_the_host(dtype, host, rng):
    mine = [c for c in cases(dtype) if c.name not in NOT_ON_HOST]
    source = "".join(c.host() for c in mine)
    for case in mine:
        args = case.arguments(rng)
        check(case, host.call(source, case.entry, args, case.out), case.want(args), case.ulps)


def limits(dtype):
    """Special cases of complex functions in the array API standard."""
    for name, left, right in special_cases(COMPLEX):
        rows = rows_of(left)
        case = Case("complex_abs" if name == "abs" else name, dtype)
        yield case, rows, right, np.array([complex(*row) for row in rows], dtype)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_limits_of_complex_functions_on_the_host(dtype, host):
    source = "".join({case.entry: case.host() for case, *_ in limits(dtype)}.values())
    for case, rows, right, x in limits(dtype):
        assert_parts(case.name, rows, right, host.call(source, case.entry, [x], case.out))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_limits_of_complex_functions_on_a_device(dtype):
    source = "".join({case.entry: case.kernel() for case, *_ in limits(dtype)}.values())
    for case, rows, right, x in limits(dtype):
        out = np.zeros(x.size, case.out)
        assert_parts(case.name, rows, right, launch(source, case.entry, [x], out, np.int32(x.size), grid=1))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", C_TYPES)
def test_conversions_on_the_host(dtype, host, rng):
    source, x = conversions(dtype, "void"), convertible(dtype, rng)
    for to in C_TYPES:
        assert_converted(dtype, to, x, host.call(source, f"to_{to}", [x], dtypes.as_dtype(to)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", C_TYPES)
def test_functions_on_a_device(dtype, rng):
    source = "".join(c.kernel() for c in cases(dtype))
    for case in cases(dtype):
        args = case.arguments(rng)
        if "hypot" in case.entry:  # CUDA's overflows slightly below the maximum
            args = [np.clip(a, -1e38, 1e38) if dtype == "float64" else a for a in args]
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
