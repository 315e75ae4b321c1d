"""Graphs: work that was put on a stream once, to be run again as a whole.

Kernels, stage 8. In come a function that launches a program's kernels on a stream, and the buffers that it works on;
out comes a ``Graph``, whose launches cost the host one call however many kernels there are. A graph remembers
addresses: it is right for as long as the buffers stay where they are, and it keeps them alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.kernels.backends.cuda.driver import driver


class Graph:
    """Captured work of one device.

    Attributes:
      device: the index of the CUDA device.
    """

    def __init__(self, executable: Any, device: int, keep: tuple):
        self._executable, self.device, self._keep = executable, device, keep
        executable.upload(driver.compute_stream(device))

    def launch(self) -> None:
        """Put the work on the compute stream."""
        driver.use_device(self.device)
        self._executable.launch(driver.compute_stream(self.device))


def capture(
    run: Callable[[Sequence[Any]], object], device: int = 0, keep: Any = (), urgent: Sequence[bool] = (False,)
) -> Graph:
    """The work that ``run(streams)`` puts on streams, which is recorded and not done.

    Args:
      run: launches kernels on the streams it is given (``cupy.cuda.Stream``): on the first, and on others after they
        waited for an event of it; in the end the first waits for them. It must not wait for the device, copy to or
        from the host, or run anything for the first time that loads or allocates as it does so.
      keep: what must live as long as the graph: the buffers whose addresses are in it.
      urgent: for each stream, whether its kernels go before those of the others where both are ready.
    Raises:
      RuntimeError: CUDA's errors where ``run`` does what cannot be captured.
    """
    import cupy

    # A stream for each capture: one that failed cannot be used again. Memory that CuPy's functions take for themselves
    # comes from a pool of the graph's own, so that nobody else is given it between two launches.
    stream, *beside = [driver.new_stream(device, u) for u in urgent]
    own = cupy.cuda.MemoryPool()
    driver.use_device(device)
    with driver.redirected(device, stream, beside), stream, cupy.cuda.using_allocator(own.malloc):
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            run([stream, *beside])
        except BaseException:
            _abandon(stream)
            raise
        executable = stream.end_capture()
    return Graph(executable, device, (keep, own, run))


def _abandon(stream: Any) -> None:
    """End a capture that failed; that this fails too is no news."""
    try:
        stream.end_capture()
    except RuntimeError:
        return
