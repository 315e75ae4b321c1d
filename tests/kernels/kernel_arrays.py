"""Arrays to run LoopIR kernels on, and comparison of results."""

import numpy as np

from blufunc.core.ir import dtypes


def draw(buffer, seed):
    """Contents of a buffer: values that overflow in no function; outputs are not 0."""
    rng = np.random.default_rng(seed)
    if buffer.written:
        return np.full(buffer.size * buffer.dtype.itemsize, 0x5A, np.uint8).view(buffer.dtype)
    if dtypes.is_bool(buffer.dtype):
        return rng.integers(0, 2, buffer.size).astype(bool)
    if dtypes.is_integer(buffer.dtype):
        return rng.integers(0, 100, buffer.size).astype(buffer.dtype)
    x = rng.standard_normal(buffer.size)
    if dtypes.is_complex(buffer.dtype):
        x = x + 1j * rng.standard_normal(buffer.size)
    return x.astype(buffer.dtype)


def arrays_for(kernel, places=()):
    """Arrays for the buffers of a kernel; some outputs alias inputs."""
    arrays = {b: draw(b, i) for i, b in enumerate(kernel.buffers)}
    return arrays | {out: arrays[into].view(out.dtype) for out, into in places}


def agree(kernel, got, want):
    """Hold the outputs of a kernel against others."""
    for b in kernel.buffers:
        if not b.written:
            continue
        if not dtypes.is_inexact(b.dtype):
            np.testing.assert_array_equal(got[b], want[b], err_msg=b.name)
            continue
        wide = np.complex128 if dtypes.is_complex(b.dtype) else np.float64
        x, y = got[b].astype(wide), want[b].astype(wide)
        rtol = 2e-5 if b.dtype.itemsize >= 4 else 4 * float(dtypes.finfo(b.dtype).eps)
        size = max(1, np.abs(y[np.isfinite(y)]).max(initial=0))
        np.testing.assert_allclose(x, y, rtol, rtol * size, err_msg=b.name)


def launch(machine, library, scheduled, arrays):
    """Run a kernel of a library on one of the machines of ``emulated_cuda``."""
    machine.launch(library, scheduled, [arrays[b] for b in scheduled.kernel.buffers])
