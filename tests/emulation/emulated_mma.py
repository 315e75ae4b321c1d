"""Host stand-ins for the instructions of ``mma.cuh``; each thread is a fiber.

Next to ``emulated_cuda.py``, above ``cuda_machines.py``. Copies to shared memory and warpgroup matmuls run only when
a kernel waits for them, so that a missing wait is found. With ``eager``, TMA copies run at once, so that a stage
released too early is found. Clusters have one block here.
"""

import ctypes
from pathlib import Path

import numpy as np

from blufunc.kernels.backends.cuda.driver import tensor_map as tensor_maps
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.codegen import source_files
from tests.emulation.cuda_machines import BLOCK, Host

SHARED = 1 << 18
_PARTS = source_files.split((Path(__file__).parent / "include" / "mma_on_host.h").read_text())


def maps(kernel, shape, strides, tiling, arrays):
    """A kernel's last parameters: stand-ins for tensor maps, by operand."""
    boxes = cuda_attention.boxes(kernel, shape, strides, tiling)
    return [("TensorMap", tensor_map(box, arrays[name])) for name, box in boxes.items()]


def tensor_map(box, array):
    """Stand-in for the driver's tensor map of a box."""
    of, sizes = np.array(box.strides, np.int64), np.array([*box.sizes, *box.box], np.uint32)
    made = np.uint64(array.ctypes.data).tobytes() + of.tobytes() + sizes.tobytes()
    return made.ljust(tensor_maps.BYTES, b"\0")


_PACKED = 'extern "C" void run(void **p, void *, void *, void *) {{ {entry}({arguments}); }}\n'
_DYNAMIC = "extern __shared__ __align__(1024) unsigned char shared_memory[];"


class Emulator:
    """Runs kernels on the host.

    Args:
      folder: where libraries go.
    """

    def __init__(self, folder):
        self.host = Host(folder)

    def launch(
        self,
        source,
        instructions,
        dtype_name,
        entry,
        parameters,
        grid,
        block,
        shared,
        turned=None,
        eager=False,
        parts=(),
    ):
        """Run a kernel; returns the number of calls of ``multiply_add`` by warps.

        Args:
          instructions: the result of ``mma.instructions`` for the source.
          parameters: pairs of C type and value, an array or the bytes of a structure.
          shared: bytes of dynamic shared memory; the emulation needs more.
          turned: as of ``mma.shared_instructions``, if that gave the instructions.
          eager: run TMA copies when they are issued, and matmuls and reads as late as possible: a stage released too
            early is found. Else copies are as late as possible, and a missing wait is found.
          parts: further stand-ins of ``mma_on_host.h``, by name.
        """
        assert instructions in source
        assert _DYNAMIC in source
        assert shared <= SHARED
        stand_ins = _PARTS[dtype_name]
        if dtype_name == "bfloat16":
            stand_ins = source_files.parts(mma.MMA)["unpack bf16"] + stand_ins
        stand_ins += "".join(_PARTS[name] for name in parts)
        if "wgmma" in instructions:
            stand_ins += _PARTS["wgmma"]
        if turned is not None:
            stand_ins += _PARTS["pipeline"] + source_files.declared(A_TURNED=turned[0], B_TURNED=turned[1])
            stand_ins += _PARTS["shared_products"]
        text = source.replace(instructions, stand_ins).replace(_DYNAMIC, "")
        text = text.replace(source_files.source(mma.TMA, "instructions"), _PARTS["pipeline"])
        given = [
            f"*({t} *)&p[{i}]" if t.endswith("*") else f"*({t} *)p[{i}]"
            for i, (t, _) in enumerate(parameters)
        ]
        text += _PACKED.format(entry=entry, arguments=", ".join(given))
        before = source_files.declared(SHARED=SHARED) + BLOCK + _PARTS["instructions"]
        library = self.host.compile(text, before)
        held = [np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v for _, v in parameters]
        pointers = (ctypes.c_void_p * len(held))(*[a.ctypes.data for a in held])
        library.begin(int(eager))
        assert library.launch(library.run, grid, 1, block, pointers, None, None, None)
        return ctypes.c_ulonglong.in_dll(library, "multiply_adds").value
