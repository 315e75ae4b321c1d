"""Spin kernels that occupy SMs, to time GEMMs under contention or delay a stream.

Kernels, stage 8, below ``cublaslt``. In: a number of SMs and a duration. Out: kernels that hold them. A collective
occupies SMs for its duration, in clusters of four blocks that leave no room for blocks of a GEMM. The fastest GEMM is
then a different one: a grid of more blocks than free SMs, or of clusters that no longer fit, takes twice as long.
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
    """Context manager: occupy ``count`` SMs, in whole clusters, for ``ms`` ms.

    The time starts on entry; exit waits for its end.
    """
    blocks = count // COLLECTIVE_CLUSTER * COLLECTIVE_CLUSTER
    if not blocks:
        yield
        return
    all_of_it = driver.properties(device).shared_per_block  # all shared memory: no other block fits on the SM
    launch, _ = _loaded(device, "keep_multiprocessors", blocks, all_of_it).prepare([round(1e6 * ms)])
    stream = _stream(device)
    driver.use_device(device)
    launch(stream.ptr)
    try:
        yield
    finally:
        stream.synchronize()


def pause(device: int, seconds: float) -> Callable[[int], None]:
    """A launch, a function of a stream handle, that delays the stream by ``seconds``."""
    launch, _ = _loaded(device, "pause", 1, 0).prepare([round(1e9 * seconds)])
    return launch


@functools.cache
def _stream(device: int) -> Any:
    return driver.new_stream(device, urgent=True)


def _loaded(device: int, entry: str, blocks: int, shared: int) -> modules.Loaded:
    source = source_files.source(_FILE, CLUSTER=COLLECTIVE_CLUSTER)
    return modules.load_source(CudaSource(source, entry, (blocks, 1, 1), (WARP, 1, 1), shared), device)
