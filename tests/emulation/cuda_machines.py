"""Machines that run the tests' CUDA kernels: a device, or a host emulation.

A host compiler reads the same source as NVRTC, after stand-ins for CUDA's own names. Each thread of a block is a
fiber, which runs until its warp or its block must synchronize. A warp runs as far as it can before the next one
starts, so that a missing barrier is found.
"""

import ctypes
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

needs_nvrtc = pytest.mark.skipif(nvrtc.available() is not None, reason=nvrtc.available() or "")

# -- the host --------------------------------------------------------------------------------------

HEADERS = "math.h stdint.h stdlib.h string.h".split()
"""Standard headers of these sources and those above; none of one system only."""

PARTS = source_files.split((Path(__file__).parent / "include" / "device_on_host.h").read_text())
STAND_INS, BLOCK = PARTS["intrinsics"], PARTS["block"]


class Host:
    """Compiles and runs kernels on the host; skips where it cannot.

    Args:
      folder: where libraries go.
    """

    def __init__(self, folder):
        self.folder, self.libraries = folder, {}
        self.compiler = shutil.which("g++")
        if not self.compiler:
            pytest.skip("there is no g++ to compile the functions for the host")
        self.command = [self.compiler, *"-std=c++17 -O1 -ffp-contract=off -w -fPIC -U_FORTIFY_SOURCE".split()]

    def compile(self, source, before=""):
        """The library of a source, after the prelude that it needs."""
        key = before, source
        if key not in self.libraries:
            self.libraries[key] = self._compile(source, before, self.folder / f"{len(self.libraries)}.so")
        return self.libraries[key]

    def _headers(self):
        """The standard headers in one, precompiled once for all neighbouring folders."""
        path = self.folder.parent / "headers.h"
        if not path.exists():
            path.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
            subprocess.run([*self.command, "-x", "c++-header", path], check=True, timeout=120)
        return path

    def _compile(self, source, before, path):
        parts = DEVICE.chosen_parts(frozenset(DEVICE.used_names(source)))
        own = [p.source for p in parts if p.names[0] != "types" and not p.names[0].startswith("ptx_")]
        done = subprocess.run(
            [*self.command, "-include", self._headers(), "-x", "c++", "-shared", "-", "-o", path],
            input=STAND_INS + before + "".join(own) + source,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if "_Float16" in done.stderr:
            pytest.skip("this g++ has no _Float16")
        assert not done.returncode, done.stderr[:3000]
        library = ctypes.CDLL(str(path))
        if hasattr(library, "launch"):
            library.launch.restype = ctypes.c_bool
        return library

    def call(self, source, entry, arrays, out_dtype):
        """Call a function of pointers to arrays and a result, and a length."""
        out = np.zeros(arrays[0].shape, out_dtype)
        given = [np.ascontiguousarray(a) for a in arrays] + [out]
        getattr(self.compile(source), entry)(*map(_pointer, given), ctypes.c_int(out.size))
        return out

    def launch(self, source, entry, arrays, out, grid=1, block=256):
        """Run a kernel of at most four pointers in blocks of fibers."""
        if sys.platform != "linux":
            pytest.skip("fibers are those of Linux")
        library, result = self.compile(source, BLOCK), np.zeros_like(out)
        given = [np.ascontiguousarray(a) for a in (*arrays, result)]
        pointers = [*map(_pointer, given), *[None] * (4 - len(given))]
        assert library.launch(getattr(library, entry), grid, 1, block, *pointers)
        return result


def _pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


# -- a device --------------------------------------------------------------------------------------


@functools.cache
def device_module(source):
    import cupy

    number = cupy.cuda.Device().compute_capability
    module = cupy.cuda.function.Module()
    text = DEVICE.with_prelude(source)
    module.load(nvrtc.build(text, "sm_90a" if number == "90" else f"sm_{number}").cubin)
    return module


def launch(source, entry, arrays, out, *scalars, grid=1, block=256):
    """Run a kernel on ``arrays``, a result like ``out``, and ``scalars``."""
    import cupy

    given = [cupy.asarray(a.view(np.uint8)) for a in arrays]  # CuPy lacks some of blufunc's dtypes
    result = cupy.zeros(out.nbytes, np.uint8)
    device_module(source).get_function(entry)((grid,), (block,), (*given, result, *scalars))
    return result.get().view(out.dtype).reshape(out.shape)
