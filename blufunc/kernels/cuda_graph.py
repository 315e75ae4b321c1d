"""Graphs: work that was put on a stream once, to be run again as a whole.

Kernels, stage 8. In come a function that launches a program's kernels on a stream, and the buffers that it works on;
out comes a ``Replay``, whose calls cost the host one call however many kernels there are. A graph remembers addresses:
it is right for as long as the buffers stay where they are, and it keeps them alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.config import config
from blufunc.kernels import cuda_runtime


class Graph:
    """Captured work of one device.

    Attributes:
      device: the index of the CUDA device.
    """

    def __init__(self, executable: Any, device: int, keep: tuple):
        self._executable, self.device, self._keep = executable, device, keep
        executable.upload(cuda_runtime.compute_stream(device))

    def launch(self) -> None:
        """Put the work on the compute stream."""
        cuda_runtime.use_device(self.device)
        self._executable.launch(cuda_runtime.compute_stream(self.device))


def capture(run: Callable[[Any], object], device: int = 0, keep: Any = ()) -> Graph:
    """The work that ``run(stream)`` puts on a stream, which is recorded and not done.

    Args:
      run: launches kernels on the stream it is given (``cupy.cuda.Stream``). It must not wait for the device, copy to
        or from the host, or run anything for the first time that loads or allocates as it does so.
      keep: what must live as long as the graph: the buffers whose addresses are in it.
    Raises:
      RuntimeError: CUDA's errors where ``run`` does what cannot be captured.
    """
    import cupy

    # A stream for each capture: one that failed cannot be used again. Memory that CuPy's functions take for themselves
    # comes from a pool of the graph's own, so that nobody else is given it between two launches.
    stream, own = cuda_runtime.new_stream(device), cupy.cuda.MemoryPool()
    cuda_runtime.use_device(device)
    with cuda_runtime.redirected(device, stream), stream, cupy.cuda.using_allocator(own.malloc):
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            run(stream)
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


class Replay:
    """A program that becomes a graph once it has run.

    The first ``warm`` calls launch kernel by kernel, which loads and chooses whatever there is to load and choose; then
    it is captured. If that cannot be done, all calls launch kernel by kernel, and ``why`` says for what reason.

    Attributes:
      graph: the ``Graph``, when there is one.
      why: why there can be none, or None.
    """

    def __init__(
        self,
        run: Callable[[Any], object],
        device: int = 0,
        keep: Any = (),
        warm: int = 1,
        name: str = "program",
    ):
        self._run, self._device, self._keep, self._warm, self._name = run, device, keep, warm, name
        self.graph: Graph | None = None
        self.why: str | None = None

    def __call__(self) -> None:
        """Put the program on the compute stream once."""
        if self.graph is not None:
            self.graph.launch()
            return
        if self._warm <= 0 and self.why is None:
            self._capture()
            if self.graph is not None:
                self.graph.launch()
                return
        self._warm -= 1
        cuda_runtime.use_device(self._device)
        self._run(cuda_runtime.compute_stream(self._device))

    def _capture(self) -> None:
        try:
            self.graph = capture(self._run, self._device, self._keep)
        except errors.BlufuncError:
            raise
        except RuntimeError as e:  # the class of all errors of CUDA
            self.why = f"{type(e).__name__}: {e}"
            if config.shows("launch"):
                config.show(f"{self._name} runs kernel by kernel, not as a graph: {self.why}")
