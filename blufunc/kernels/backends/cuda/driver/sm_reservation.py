"""Kernels that do nothing for a while: on some multiprocessors, to time others beside them, or to let others go first.

Kernels, stage 8, below ``cublaslt``. Exchanges between devices keep multiprocessors for as long as they last, in
clusters of four blocks, beside which no block of a product fits. What is quickest then is not what would be by itself:
a kernel of as many blocks as are left, in clusters for which there is no room any more, takes twice as long.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from blufunc.kernels.backends.cuda.device_model import COLLECTIVE_CLUSTER, WARP
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.codegen import source_files
from blufunc.kernels.user_kernel import CudaSource

_FILE = "backends/cuda/include/sm_reservation.cuh"


@contextlib.contextmanager
def taken(device: int, count: int, ms: float) -> Iterator[None]:
    """Context manager: ``count`` multiprocessors, in whole clusters, are kept for so many milliseconds from its
    beginning; at its end that is waited for.
    """
    blocks = count // COLLECTIVE_CLUSTER * COLLECTIVE_CLUSTER
    if not blocks:
        yield
        return
    all_of_it = driver.properties(device).shared_per_block  # so that no other block fits beside one
    launch, _ = _loaded(device, "keep_multiprocessors", blocks, all_of_it).prepare([round(1e6 * ms)])
    stream = _stream(device)
    driver.use_device(device)
    launch(stream.ptr)
    try:
        yield
    finally:
        stream.synchronize()


def pause(device: int, seconds: float) -> Callable[[int], None]:
    """A launch, to be called with the handle of a stream, which goes on so much later."""
    launch, _ = _loaded(device, "pause", 1, 0).prepare([round(1e9 * seconds)])
    return launch


@functools.cache
def _stream(device: int) -> Any:
    return driver.new_stream(device, urgent=True)


def _loaded(device: int, entry: str, blocks: int, shared: int) -> modules.Loaded:
    source = source_files.source(_FILE, CLUSTER=COLLECTIVE_CLUSTER)
    return modules.load_source(CudaSource(source, entry, (blocks, 1, 1), (WARP, 1, 1), shared), device)
