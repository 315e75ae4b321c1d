"""Where whole CUDA kernels of the renderer run: on the host, block after block, each thread a fiber; or on a device.

Above ``cuda_machines.py``, whose stand-ins for what is CUDA's own serve here for many kernels in one library, with any
number of parameters and dynamic shared memory.
"""

import ctypes

import numpy as np

from blufunc.kernels import nvrtc, scalars
from blufunc.kernels.cstyle_cuda import source_of
from blufunc.kernels.cuda_group_style import GroupStyle
from blufunc.kernels.cuda_limits import SHARED_BYTES
from blufunc.kernels.cuda_row_passes import ONLINE
from tests.kernels.cuda_machines import BLOCK, Host

_MORE = f"""
#define __grid_constant__
#define __constant__ static
static inline int min(int x, int y) {{ return x < y ? x : y; }}
static inline long long min(long long x, long long y) {{ return x < y ? x : y; }}
static void __syncwarp() {{ wait(WAITS_FOR_WARP); }}
alignas(128) __shared__ unsigned char shared_memory[{SHARED_BYTES}];
extern "C" void poison() {{ memset(shared_memory, 0xa5, sizeof shared_memory); }}
"""

_PACKED_GROUP = """
extern "C" void {entry}_packed(void *p, void *, void *, void *) {{ {entry}(*({entry}_table *)p); }}
"""

_PACKED = """
extern "C" void {entry}_packed(void **p, void *, void *, void *) {{
  {entry}({arguments});
}}
"""


_FORWARD = "for (unsigned warp = 0; warp < threads; warp += 32)"
_BACKWARD = "for (unsigned warp = (threads + 31) / 32 * 32; warp && ((warp -= 32), true);)"


class Emulator:
    """Runs kernels that have been rendered.

    Args:
      folder: where libraries go.
      backward: whether the last warp of a block goes first: each order finds other barriers that are missing.
    """

    def __init__(self, folder, backward=False):
        self.host = Host(folder)
        assert _FORWARD in BLOCK
        self.block = (BLOCK.replace(_FORWARD, _BACKWARD) if backward else BLOCK) + _MORE

    def compile(self, writers):
        """One library of the functions of some ``CudaStyle``."""
        texts = [ONLINE]
        for w in writers:
            texts.append(w.render())
            if isinstance(w, GroupStyle):
                texts.append(_PACKED_GROUP.format(entry=w.entry))
                continue
            types = [f"({scalars.storage_type(b.dtype)} *)p[{i}]" for i, b in enumerate(w.kernel.buffers)]
            types += [f"(unsigned *)p[{len(types)}]"] if w.kernel.finish else []
            texts.append(_PACKED.format(entry=w.entry, arguments=", ".join(types)))
        return self.host.compile("\n".join(texts), self.block)

    def launch(self, library, writer, arrays):
        """Run one: ``arrays`` are those of its parameters, or table, in order."""
        made = writer.made("")
        counters = np.zeros(made.counters, np.uint32)
        data = [a.ctypes.data for a in (*arrays, counters)]
        pointers = (ctypes.c_void_p * len(data))(*data)
        if made.grid[0]:
            entry = getattr(library, f"{writer.entry}_packed")
            library.poison()
            cluster = writer.schedule.cluster
            ended = library.launch(entry, made.grid[0], cluster, made.block[0], pointers, None, None, None)
            assert ended, "the blocks of a cluster wait for each other"
        assert not counters.any(), "the counters of finished blocks are not 0 again"


class Device:
    """Runs them on a device."""

    def compile(self, writers):
        from blufunc.kernels import cuda_runtime

        arch = cuda_runtime.properties().arch
        binary = nvrtc.build(source_of(writers), arch)
        return cuda_runtime.Module(binary.cubin)

    def launch(self, library, writer, arrays):
        """Run one: ``arrays`` are those of its parameters, or table, in order; equal ones are one on the device."""
        import cupy

        made = writer.made("")
        held = {a.ctypes.data: (a, cupy.asarray(a.view(np.uint8))) for a in arrays if a.size}
        counters = cupy.zeros(made.counters, np.uint32)
        pointers = [held[a.ctypes.data][1].data.ptr if a.size else 0 for a in arrays]
        pointers += [counters.data.ptr] if made.counters else []
        given = [np.array(pointers, np.uint64).tobytes()] if made.segments else pointers
        if made.grid[0]:
            kernel = library.kernel(made.entry)
            kernel.launch(made.grid, made.block, made.shared_bytes, given, cupy.cuda.get_current_stream())
        for a, on_device in held.values():
            a[...] = on_device.get().view(a.dtype)
        assert not counters.get().any()
