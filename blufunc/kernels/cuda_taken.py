"""Kernels that do nothing for a while: on some multiprocessors, to time others beside them, or to let others go first.

Kernels, stage 8, below ``cublaslt``. Exchanges between devices keep multiprocessors for as long as they last, in
clusters of four blocks, beside which no block of a product fits. What is quickest then is not what would be by itself:
a kernel of as many blocks as are left, in clusters for which there is no room any more, takes twice as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from blufunc.kernels import cuda_modules, cuda_runtime
from blufunc.kernels.cuda_source import CudaSource

CLUSTER = 4
"""How many blocks NCCL keeps together on devices that have clusters."""

_TEXT = """\
#if __CUDA_ARCH__ >= 900
#define TOGETHER __cluster_dims__(4, 1, 1)
#else
#define TOGETHER
#endif
static __device__ unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
static __device__ void wait(unsigned long long ns) {
  for (const unsigned long long end = now() + ns; now() < end;) __nanosleep(200);
}
extern "C" __global__ void TOGETHER keep_multiprocessors(unsigned long long ns) { wait(ns); }
extern "C" __global__ void pause(unsigned long long ns) { wait(ns); }
"""


@contextlib.contextmanager
def taken(device: int, count: int, ms: float) -> Iterator[None]:
    """Context manager: so many multiprocessors are kept for so many milliseconds from its beginning; at its end that
    is waited for.
    """
    stream = cuda_runtime.new_stream(device, urgent=True)
    blocks = -(-count // CLUSTER) * CLUSTER
    all_of_it = cuda_runtime.properties(device).shared_per_block  # so that no other block fits beside one
    keep = _prepared(device, "keep_multiprocessors", blocks, all_of_it, ms / 1e3)
    cuda_runtime.use_device(device)
    keep(stream.ptr)
    try:
        yield
    finally:
        stream.synchronize()


def pause(device: int, seconds: float) -> Callable[[int], None]:
    """A launch, to be called with the handle of a stream, which goes on so much later."""
    return _prepared(device, "pause", 1, 0, seconds)


def _prepared(device: int, entry: str, blocks: int, shared: int, seconds: float) -> Callable[[int], None]:
    text = CudaSource(_TEXT, entry, (blocks, 1, 1), (32, 1, 1), shared)
    launch, _ = cuda_modules.load_source(text, device).prepare([round(1e9 * seconds)])
    return launch
