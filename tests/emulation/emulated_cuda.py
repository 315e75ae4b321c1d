"""Machines for rendered CUDA kernels: host emulation with fibers, or a device.

Above ``cuda_machines.py``, whose stand-ins for CUDA's own names serve here for many kernels in one library, with any
number of parameters and dynamic shared memory. The host runs block after block.
"""

import ctypes

import numpy as np

from blufunc.kernels.backends.cuda.device_model import SHARED_BYTES
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.render.source import OVERLAP, function_of, source_of
from blufunc.kernels.codegen import scalar_ops, source_files
from tests.emulation.cuda_machines import BLOCK, PARTS

_MORE = source_files.declared(SHARED_BYTES=SHARED_BYTES) + PARTS["rendered"]

_PACKED_GROUP = """
extern "C" void {entry}_packed(void *p, void *, void *, void *) {{ {entry}(*({entry}_table *)p); }}
"""

_PACKED = """
extern "C" void {entry}_packed(void **p, void *, void *, void *) {{
  {entry}({arguments});
}}
"""


class Emulator:
    """Runs kernels that have been rendered.

    Args:
      host: the ``Host`` that compiles them.
      backward: whether the last warp of a block goes first: each order finds other barriers that are missing.
    """

    def __init__(self, host, backward=False):
        self.host, self.backward = host, backward

    def compile(self, schedules):
        """One library of the functions of some ``ScheduledKernel``s."""
        parts = source_files.parts("backends/cuda/include/kernel_parts.cuh")
        texts = [*map(parts.get, OVERLAP), parts["take_up"]]
        for s in schedules:
            texts.append(function_of(s))
            if s.kind == "group":
                texts.append(_PACKED_GROUP.format(entry=s.entry))
                continue
            types = [f"({scalar_ops.storage_type(b.dtype)} *)p[{i}]" for i, b in enumerate(s.kernel.buffers)]
            types += [f"(unsigned *)p[{len(types)}]"] if s.kernel.finish else []
            texts.append(_PACKED.format(entry=s.entry, arguments=", ".join(types)))
        return self.host.compile("\n".join(texts), BLOCK + _MORE)

    def launch(self, library, scheduled, arrays):
        """Run one: ``arrays`` are those of its parameters, or table, in order."""
        counters = np.zeros(scheduled.kernel.ends, np.uint32)
        data = [a.ctypes.data for a in (*arrays, counters)]
        pointers = (ctypes.c_void_p * len(data))(*data)
        mapping = scheduled.mapping
        if mapping.blocks:
            entry = getattr(library, f"{scheduled.entry}_packed")
            library.poison()
            ctypes.c_bool.in_dll(library, "backward").value = self.backward
            sizes = mapping.blocks, mapping.cluster, mapping.block
            ended = library.launch(entry, *sizes, pointers, None, None, None)
            assert ended, "the blocks of a cluster wait for each other"
        assert not counters.any(), "the counters of finished blocks are not 0 again"


class Device:
    """Runs them on a device."""

    def compile(self, schedules):
        from blufunc.kernels.backends.cuda.driver import driver

        arch = driver.properties().arch
        binary = nvrtc.build(source_of(schedules), arch)
        return driver.Module(binary.cubin)

    def launch(self, library, scheduled, arrays):
        """Run one on the arrays of its parameters or table; equal arrays are shared."""
        import cupy

        mapping, ends = scheduled.mapping, scheduled.kernel.ends
        held = {a.ctypes.data: (a, cupy.asarray(a.view(np.uint8))) for a in arrays if a.size}
        counters = cupy.zeros(ends, np.uint32)
        pointers = [held[a.ctypes.data][1].data.ptr if a.size else 0 for a in arrays]
        pointers += [counters.data.ptr] if ends else []
        given = [np.array(pointers, np.uint64).tobytes()] if scheduled.segments else pointers
        if mapping.blocks:
            sizes = (mapping.blocks, 1, 1), (mapping.block, 1, 1), scheduled.shared_bytes
            library.kernel(scheduled.entry).prepare(*sizes, given)(cupy.cuda.get_current_stream().ptr)
        for a, on_device in held.values():
            a[...] = on_device.get().view(a.dtype)
        assert not counters.get().any()
