"""Users' kernels on the host, to test them against references without a device."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from blufunc.transforms.extension.kernel_call import cuda_kernel_p

AS_HOST = """
#include <cmath>
#define __global__
#define __device__
#define __launch_bounds__(n)
#define __syncthreads()
struct place { unsigned x, y, z; };
static place threadIdx, blockIdx, blockDim, gridDim;
"""

RUNS = """
extern "C" void run(void (*kernel)(%s), void** a, place grid, place block) {
    gridDim = grid; blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
    for (threadIdx.z = 0; threadIdx.z < block.z; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < block.y; ++threadIdx.y)
    for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel(%s);
}
"""


class Place(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def launch_of(kernel, *avals):
    """The source and launch that the executor would get."""
    typed = kernel.typed(tuple(kernel._avals(avals, {})))
    return cuda_kernel_p.cuda_source(*typed.in_avals, kernel=typed)


def run_on_host(kernel, args, folder):
    """Results of a kernel whose threads run in sequence, so they must not synchronize."""
    typed = kernel.typed(tuple(kernel._avals(args, {})))
    given = [np.asarray(a, v.dtype) for a, v in zip(args, typed.in_avals)]
    return run_source(launch_of(kernel, *args), given, typed.out_avals, folder)


def run_source(found, args, out_avals, folder):
    """The results of a kernel's source, as ``run_on_host``."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    buffers = [np.ascontiguousarray(a) for a in args] + [np.zeros(a.shape, a.dtype) for a in out_avals]
    n = len(buffers)
    runs = RUNS % (", ".join(["void*"] * n), ", ".join(f"a[{k}]" for k in range(n)))
    (folder / "kernel.cpp").write_text(AS_HOST + found.text + runs)
    library = folder / "kernel.so"
    command = [compiler, "-std=c++17", "-w", "-shared", "-fPIC", "-o", library, folder / "kernel.cpp"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(library)
    pointers = (ctypes.c_void_p * n)(*[b.ctypes.data for b in buffers])
    entry = ctypes.cast(getattr(loaded, found.entry), ctypes.c_void_p)
    loaded.run(entry, pointers, Place(*found.grid), Place(*found.block))
    return buffers[len(args) :]
