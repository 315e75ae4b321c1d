"""Where whole CUDA kernels of the renderer run: on the host, block after block, each thread a fiber; or on a device.

Above ``cuda_machines.py``, whose stand-ins for what is CUDA's own serve here for many kernels in one library, with any
number of parameters and dynamic shared memory.
"""

import ctypes

import numpy as np

from blufunc.kernels import nvrtc, scalars
from blufunc.kernels.cstyle_cuda import source_of
from blufunc.kernels.cuda_row_passes import ONLINE
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
        library = self.host.compile("\n".join([ONLINE, *texts]), BLOCK + _MORE)
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


class Device:
    """Runs them on a device."""

    def compile(self, writers):
        from blufunc.kernels import cuda_runtime

        arch = cuda_runtime.properties().arch
        binary = nvrtc.build(source_of(writers), arch)
        return cuda_runtime.Module(binary.cubin)

    def run(self, library, writer, arrays):
        import cupy

        made = writer.made("")
        held = {b: cupy.asarray(arrays[b].view(np.uint8)) for b in writer.kernel.buffers}
        counter = cupy.zeros(1, np.uint32)
        pointers = [held[b].data.ptr for b in writer.kernel.buffers]
        pointers += [counter.data.ptr] if made.finished else []
        if made.grid[0]:
            kernel = library.kernel(made.entry)
            kernel.launch(made.grid, made.block, made.shared_bytes, pointers, cupy.cuda.get_current_stream())
        for b in writer.kernel.buffers:
            arrays[b][...] = held[b].get().view(b.dtype)
        assert counter.get()[0] == 0
