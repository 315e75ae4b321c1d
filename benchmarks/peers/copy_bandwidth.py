"""Copy bandwidth of the device's memory: the ceiling of memory-bound kernels."""

from __future__ import annotations

import statistics

import cupy

from benchmarks.peers import clock

SIZES = (64 << 20, 256 << 20, 1 << 30, 4 << 30)  # bytes of one side


def main() -> None:
    """Emit one row per size."""
    clock.emit_versions("cupy-cuda13x", "cupy-cuda12x")
    stream = cupy.cuda.Stream(non_blocking=True)
    for nbytes in SIZES:
        with stream:
            source, target = (cupy.full(nbytes // 4, i, dtype=cupy.float32) for i in range(2))

        def copy(_, source=source, target=target, nbytes=nbytes):
            cupy.cuda.runtime.memcpyAsync(
                target.data.ptr, source.data.ptr, nbytes, cupy.cuda.runtime.memcpyDeviceToDevice, stream.ptr
            )

        ms = statistics.median(clock.event_ms(copy, stream, 20) for _ in range(3))
        clock.emit(what=f"copy of {nbytes >> 20} MiB", ms=ms, GB_s=2 * nbytes / ms / 1e6)


if __name__ == "__main__":
    main()
