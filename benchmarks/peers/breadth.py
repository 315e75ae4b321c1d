"""Cases of the breadth suite in one library.

    python -m benchmarks.peers.breadth --library jax --case "sort of 4M, f32"

First all cases are compiled and called once; other processes may do the same meanwhile. The line ``{"ready": n}`` ends
that. After a line of input, each case is timed by the wall clock, over runs of back-to-back calls: by then, no other
process uses the device or the host. A row has the time of a call, seconds of the first call with its compilation,
samples of the results, and the peak memory of a call.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.cases.case import Case, samples, tolerance
from benchmarks.cases.table import models, operations
from benchmarks.peers import clock

BUDGET = 0.05  # seconds of timed calls
NARROW = {"bfloat16", "float16"}


class Library:
    """blufunc or JAX."""

    def __init__(self, name: str, platform: str):
        self.name, self.platform = name, platform
        if name == "jax":
            os.environ["JAX_PLATFORMS"] = platform
        self.lib = importlib.import_module(name)
        for face in ("numpy", "nn", "lax", "random", "ops"):
            importlib.import_module(f"{name}.{face}")
        if name == "blufunc":
            self.lib.config.update("default_device", platform)
        self.leaves, self.wait = self.lib.tree.leaves, self.lib.block_until_ready
        self.planned: dict[str, float] = {}
        self.live = 0

    def runs(self, case: Case) -> bool:
        """Every case."""
        return True

    def program(self, case: Case, args: tuple, whole: bool) -> Callable[..., Any]:
        """The jitted program; of a whole one, XLA tells the planned memory."""
        lib = self.lib
        self.configure(case, args)
        program = lambda *args: case.program(lib, *args)
        jitted = lib.jit(program, donate_argnums=tuple(range(case.carried)))
        if whole and self.name == "jax" and self.platform == "cuda":
            # the call finds what was compiled
            found = jitted.lower(*args).compile().memory_analysis()
            sizes = (f"{kind}_size_in_bytes" for kind in ("argument", "output", "temp"))
            total = sum(getattr(found, size) for size in sizes) - found.alias_size_in_bytes
            self.planned["peak_GB"] = total / 1e9
        return jitted

    def configure(self, case: Case, args: Any) -> None:
        """Matmuls of float32 in IEEE; otherwise JAX computes them in TF32."""
        if self.name == "jax":
            narrow = not case.ieee or any(str(x.dtype) in NARROW for x in self.leaves(args))
            self.lib.config.update("jax_default_matmul_precision", None if narrow else "highest")

    def put(self, case: Case, args: tuple) -> tuple:
        """The arguments on the device."""
        return self.wait(self.lib.tree.map(self.lib.numpy.asarray, args))

    def watch(self) -> None:
        """Begin to measure the peak of a call, from its arguments on."""
        if self.name == "blufunc" and self.platform == "cuda":
            from blufunc.kernels.backends.cuda.driver import memory as cuda_memory

            self.pool = cuda_memory.pool(0)
            self.pool.reset_peak()
            self.live = self.pool.live_bytes()

    def memory(self) -> dict:
        """Peak memory of a call: measured by blufunc's allocator, planned by XLA.

        What XLA's allocator measures includes the algorithms that it tries out.
        """
        if self.name == "jax" or self.platform == "cpu":
            return dict(self.planned)
        return {"peak_GB": (self.pool.peak_bytes() - self.live) / 1e9}

    def host(self, leaf: Any) -> np.ndarray:
        """A result as a NumPy array."""
        return np.asarray(leaf)


class Torch:
    """PyTorch, eager or compiled."""

    def __init__(self, compiled: bool):
        import torch
        from torch.utils import _pytree as pytree

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.torch, self.pytree, self.compiled = torch, pytree, compiled

    def leaves(self, tree: Any) -> list:
        """Leaves of a tree, dictionaries in the order of their keys as in JAX."""
        if isinstance(tree, dict):
            return [x for key in sorted(tree) for x in self.leaves(tree[key])]
        if isinstance(tree, (list, tuple)):
            return [x for part in tree for x in self.leaves(part)]
        return [tree]

    def runs(self, case: Case) -> bool:
        """Cases that PyTorch has."""
        return (case.compiled if self.compiled else case.torch) is not None

    def program(self, case: Case, args: tuple, whole: bool) -> Callable[..., Any]:
        """The function of the arguments."""
        program = case.compiled if self.compiled else case.torch
        return functools.partial(program, self.torch)

    def configure(self, case: Case, args: Any) -> None:
        """Float32 is IEEE throughout."""

    def put(self, case: Case, args: tuple) -> tuple:
        """The arguments on the device, in the layouts of PyTorch's users."""
        found = self.pytree.tree_map(self._tensor, args)
        return case.prepare(self.torch, *found) if case.prepare else found

    def _tensor(self, x: Any) -> Any:
        x = np.asarray(x)
        if str(x.dtype) == "bfloat16":
            return self.torch.from_numpy(x.view(np.int16)).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(x).cuda()

    def wait(self, out: Any) -> Any:
        """Synchronize."""
        self.torch.cuda.synchronize()
        return out

    def watch(self) -> None:
        """Begin to measure the peak of a call, from its arguments on."""
        self.torch.cuda.reset_peak_memory_stats()
        self.live = self.torch.cuda.memory_allocated()

    def memory(self) -> dict:
        """Peak of the allocator."""
        return {"peak_GB": (self.torch.cuda.max_memory_allocated() - self.live) / 1e9}

    def host(self, leaf: Any) -> np.ndarray:
        """A result as a NumPy array, without bfloat16."""
        leaf = leaf.detach()
        wide = leaf.float() if leaf.dtype == self.torch.bfloat16 else leaf
        return wide.contiguous().cpu().numpy()


def prepared(backend: Any, case: Case, name: str, whole: bool) -> Callable[[], None]:
    """Compile and call once; return what times it and emits its row."""
    args = case.make()
    begin = time.perf_counter()
    call = backend.program(case, args, whole)
    first = time.perf_counter() - begin
    backend.watch()
    given = backend.put(case, args)
    begin = time.perf_counter()
    out = backend.wait(call(*given))
    first += time.perf_counter() - begin
    memory = backend.memory() if whole else {}
    leaves = [backend.host(x) for x in backend.leaves(out)]
    limit = tolerance(case, [*backend.leaves(args), *leaves])
    row = {
        "what": name,
        "first_s": first,
        "tolerance": limit,
        "check": samples(leaves[-(case.compared or 0) :]),
        **memory,
    }
    state = list(given)
    if case.carried:
        state[: case.carried] = out[: case.carried]
    narrow = [np.empty(0, x.dtype) for x in backend.leaves(args)]
    del args, given, out, leaves

    def run(_: int) -> Any:
        out = call(*state)
        if case.carried:
            state[: case.carried] = out[: case.carried]
        return out

    def timed() -> None:
        backend.configure(case, narrow)
        clock.emit(ms=clock.wall_ms(run, backend.wait, BUDGET, least=1), **row)
        state.clear()

    return timed


def main() -> None:
    """Emit one row per case."""
    p = argparse.ArgumentParser()
    p.add_argument("--library", choices=["blufunc", "jax", "torch-eager", "torch-compile"], required=True)
    p.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--case", action="append", default=[], help="a name in cases/table.py")
    p.add_argument("--until", type=float, default=math.inf, help="UNIX time: no case is begun later")
    p.add_argument("--profile", action="store_true", help="print blufunc's device time by kernel instead")
    o = p.parse_args()
    family = o.library.partition("-")[0]
    clock.emit_versions("numpy", family, *(["cupy-cuda13x"] if family == "blufunc" else []))
    tiny = o.platform == "cpu"
    whole = models(tiny)
    cases = whole | operations(tiny)
    backend = Torch(o.library == "torch-compile") if family == "torch" else Library(o.library, o.platform)
    if o.profile:
        for name in o.case:
            profile(backend.lib, cases[name], name)
        return
    ready: list[tuple[str, Callable[[], None]]] = []

    def prepare(name: str) -> None:
        ready.append((name, prepared(backend, cases[name], name, name in whole)))

    for name in o.case:
        if backend.runs(cases[name]) and time.time() < o.until:
            clock.attempt(name, functools.partial(prepare, name))
    clock.emit(ready=len(ready))
    sys.stdin.readline()
    gc.collect()
    gc.freeze()
    while ready:
        clock.attempt(*ready.pop(0))


def profile(lib: Any, case: Case, name: str) -> None:
    """Print the device time of each step of a program, largest first."""
    args = lib.tree.map(lib.numpy.asarray, case.make())
    begin = time.perf_counter()
    lowered = lib.jit(lambda *args: case.program(lib, *args)).lower(*args)
    timings = lowered.compile().timings(*args)
    print(f"== {name} ({time.perf_counter() - begin:.1f} s)\n{timings}", flush=True)


if __name__ == "__main__":
    main()
