"""Whole CUDA kernels of the renderer, run on the host: block after block, each thread a fiber.

Above ``cuda_machines.py``, whose stand-ins for what is CUDA's own serve here for many kernels in one library, with any
number of parameters and dynamic shared memory.
"""

import ctypes

import numpy as np

from blufunc.kernels import scalars
from blufunc.kernels.cuda_schedule import SHARED_BYTES
from blufunc.kernels.cuda_style import DYNAMIC, CudaStyle
from tests.kernels.cuda_machines import BLOCK, Host

_MORE = f"""
static inline int min(int x, int y) {{ return x < y ? x : y; }}
static inline long long min(long long x, long long y) {{ return x < y ? x : y; }}
static void __syncwarp() {{ wait(WAITS_FOR_WARP); }}
alignas(16) static unsigned char shared_memory[{SHARED_BYTES}];
"""

_PACKED = """
extern "C" void {entry}_packed(void **p, void *, void *, void *) {{
  if (threadIdx.x == 0) memset(shared_memory, 0xa5, {shared});
  {entry}({arguments});
}}
"""


class Emulator:
    """Runs kernels that have been rendered.

    Args:
      folder: where libraries go.
    """

    def __init__(self, folder):
        self.host = Host(folder)

    def compile(self, writers):
        """One library of the functions of some ``CudaStyle``, and how each is launched."""
        texts = []
        for w in writers:
            text = w.render()
            types = [f"({scalars.storage_type(b.dtype)} *)p[{i}]" for i, b in enumerate(w.kernel.buffers)]
            types += [f"(unsigned *)p[{len(types)}]"] if w.kernel.finish else []
            texts.append(
                text + _PACKED.format(entry=w.entry, shared=w.shared_bytes, arguments=", ".join(types))
            )
        library = self.host.compile("\n".join(texts), BLOCK + _MORE)
        return library

    def run(self, library, writer, arrays):
        """Launch one: ``arrays`` are those of its buffers."""
        made = writer.made("")
        counter = np.zeros(1, np.uint32)
        data = [arrays[b].ctypes.data for b in writer.kernel.buffers] + [counter.ctypes.data]
        pointers = (ctypes.c_void_p * len(data))(*data)
        entry = getattr(library, f"{writer.entry}_packed")
        if made.grid[0]:
            library.launch(entry, made.grid[0], made.block[0], pointers, None, None, None)
        assert counter[0] == 0, "the counter of finished blocks is not 0 again"


def compile_one(emulator, kernel, aliased=()):
    """A writer of one kernel, and its library."""
    writer = CudaStyle(kernel, aliased)
    return writer, emulator.compile([writer])


__all__ = ["DYNAMIC", "Emulator", "compile_one"]
