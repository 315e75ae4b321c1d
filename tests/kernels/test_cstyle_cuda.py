"""Kernels as CUDA C++: on the host, block by block, against what LoopIR means; and what the compiler makes of them."""

import numpy as np
import pytest

from blufunc.core import dtypes
from blufunc.kernels.cuda_style import CudaStyle
from blufunc.kernels.loop_check import check_kernel
from blufunc.kernels.loop_interpreter import run as interpret
from blufunc.kernels.loopir import Kernel
from tests.kernels.cuda_functions import SMALL, SMALL_CASES, kernels
from tests.kernels.emulated_cuda import Device, Emulator
from tests.kernels.loop_kernels import CASES


def named(kernel, name):
    """The same kernel with another name."""
    return Kernel(name, kernel.buffers, kernel.grid, kernel.body, kernel.notes, kernel.finish)


@pytest.fixture(scope="module", params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def machine(request, tmp_path_factory):
    return Device() if request.param == "device" else Emulator(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def cases(machine):
    """All the kernels written by hand, as one source."""
    found = {}
    for i, (name, make) in enumerate(CASES.items()):
        case = make()
        case.kernel = named(case.kernel, f"{case.kernel.name}_{i}")
        found[name] = case, CudaStyle(case.kernel)
    return found, machine.compile([w for _, w in found.values()])


@pytest.mark.parametrize("name", CASES)
def test_against_numpy(machine, cases, name):
    found, library = cases
    case, writer = found[name]
    machine.run(library, writer, case.arrays)
    case.compare()


@pytest.fixture(scope="module")
def lowered(machine):
    """All the kernels of functions, as one source."""
    found = {}
    for i, (name, (function, shapes)) in enumerate(SMALL_CASES.items()):
        made = kernels(function, shapes, SMALL)
        assert made, name
        made = [named(k, f"{k.name}_{i}_{n}") for n, k in enumerate(made)]
        found[name] = [(k, CudaStyle(k)) for k in made]
    return found, machine.compile([w for some in found.values() for _, w in some])


def draw(buffer, seed):
    """What a buffer may hold: numbers that no function overflows of."""
    rng = np.random.default_rng(seed)
    if buffer.written:
        return np.full(buffer.size * buffer.dtype.itemsize, 0x5A, np.uint8).view(buffer.dtype)
    if dtypes.is_bool(buffer.dtype):
        return rng.integers(0, 2, buffer.size).astype(bool)
    if dtypes.is_integer(buffer.dtype):
        return rng.integers(0, 100, buffer.size).astype(buffer.dtype)
    x = rng.standard_normal(buffer.size)
    return (x + 1j * rng.standard_normal(buffer.size) if dtypes.is_complex(buffer.dtype) else x).astype(
        buffer.dtype
    )


def agree(kernel, got, want):
    """Hold the outputs of a kernel against others."""
    for b in kernel.buffers:
        if not b.written:
            continue
        if not dtypes.is_inexact(b.dtype):
            np.testing.assert_array_equal(got[b], want[b], err_msg=b.name)
            continue
        wide = np.complex128 if dtypes.is_complex(b.dtype) else np.float64
        a, c = got[b].astype(wide), want[b].astype(wide)
        tolerance = 2e-5 if b.dtype.itemsize >= 4 else 4 * float(dtypes.finfo(b.dtype).eps)
        np.testing.assert_allclose(
            a, c, tolerance, tolerance * max(1, np.abs(c[np.isfinite(c)]).max(initial=0))
        )


@pytest.mark.parametrize("name", SMALL_CASES)
def test_functions_against_the_interpreter(machine, lowered, name):
    found, library = lowered
    for kernel, writer in found[name]:
        check_kernel(kernel)
        got, want = ({b: draw(b, i) for i, b in enumerate(kernel.buffers)} for _ in range(2))
        interpret(kernel, want)
        machine.run(library, writer, got)
        agree(kernel, got, want)
