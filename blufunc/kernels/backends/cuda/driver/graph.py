"""CUDA graphs: work captured from streams once and replayed as a whole.

Kernels, stage 8. In: a function that enqueues a program's kernels, and the buffers that it uses. Out: a ``Graph``,
which costs the host one call per launch. A graph holds addresses: it is valid while its buffers stay in place, and it
keeps them alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.kernels.backends.cuda.driver import driver


class Graph:
    """Captured work of one device.

    Attributes:
      device: index of the CUDA device.
    """

    def __init__(self, executable: Any, device: int, keep: tuple):
        self._executable, self.device, self._keep = executable, device, keep
        executable.upload(driver.compute_stream(device))

    def launch(self) -> None:
        """Launch on the compute stream."""
        driver.use_device(self.device)
        self._executable.launch(driver.compute_stream(self.device))


def capture(
    run: Callable[[Sequence[Any]], object], device: int = 0, keep: Any = (), urgent: Sequence[bool] = (False,)
) -> Graph:
    """Capture the work that ``run(streams)`` enqueues, without running it.

    Args:
      run: launches kernels on the given ``cupy.cuda.Stream`` objects: on the first, and on others once they waited for
        an event of it. At the end the first must wait for them. It must not synchronize the device, copy to or from
        the host, or initialize anything lazily that loads or allocates.
      keep: objects to keep alive with the graph: the buffers whose addresses it holds.
      urgent: for each stream, True for high priority.
    Raises:
      RuntimeError: CUDA's error if ``run`` does something that cannot be captured.
    """
    import cupy

    # Each capture has new streams: after a failure they are unusable. CuPy's temporaries come from a pool
    # of the graph's own, so that no other allocation reuses them between launches.
    stream, *others = [driver.new_stream(device, u) for u in urgent]
    own = cupy.cuda.MemoryPool()
    driver.use_device(device)
    with driver.redirected(device, stream, others), stream, cupy.cuda.using_allocator(own.malloc):
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            run([stream, *others])
        except BaseException:
            _abandon(stream)
            raise
        executable = stream.end_capture()
    return Graph(executable, device, (keep, own, run))


def _abandon(stream: Any) -> None:
    """End a failed capture; errors are ignored, since it has failed already."""
    try:
        stream.end_capture()
    except RuntimeError:
        return
