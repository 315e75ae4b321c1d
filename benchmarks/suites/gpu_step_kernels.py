"""Generated kernels of GPT-2's training step, each timed alone.

    python -m benchmarks.suites.gpu_step_kernels

The step is planned as in ``benchmarks.peers.gpt2_blufunc``, and every kernel that moves more than L2 holds is
launched alone, on its own buffers with random values, to compare its time with that of the bytes it must move.
``lost`` is what a step would gain if the kernel reached ``--rate``.

``--set MODULE.NAME=VALUE`` changes a constant of ``blufunc.kernels.MODULE`` ahead of planning, to measure the
compiler's assumptions about a device; use one process per value. Without a device, ``--plan`` reports the SM resources
of each kernel.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

import blufunc as bf
from benchmarks.harness.kernel_resources import resources
from benchmarks.peers import gpt2_blufunc
from blufunc.core.ir import dtypes
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.driver import driver, modules, nvrtc
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.render.source import CudaKernel, render
from blufunc.kernels.backends.cuda.schedule.passes import schedule, schedule_group
from blufunc.kernels.cost import cost_of
from blufunc.kernels.loopir.ir import Buffer
from blufunc.kernels.schedule import OpaqueStep, Schedule
from examples.gpt import model

_REPEATS = 20
_LEAST_BYTES = 100e6


class Case(NamedTuple):
    """A kernel of the step.

    Attributes:
      calls: launches per step.
      reads, writes: bytes that one launch must move.
      buffers, places: its buffers, and keys of those that share memory.
    """

    wanted: modules.Wanted
    calls: int
    reads: float
    writes: float
    buffers: list[Buffer]
    places: list[Any]

    @property
    def nbytes(self) -> float:
        """Bytes of one launch."""
        return self.reads + self.writes


def main() -> None:
    """Print a line per kernel, the largest loss first."""
    o = _parser().parse_args()
    for text in o.set:
        change(*text.split("=", 1))
    chosen = [
        c for c in cases(planned(o)) if o.kernel in c.wanted.kernels[0].name and c.nbytes >= _LEAST_BYTES
    ]
    kernels = [rendered(c) for c in chosen]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(lambda k: nvrtc.build(k.source, o.arch, k.entry), kernels))
    lines = []
    for case, kernel, binary in zip(chosen, kernels, built, strict=True):
        us = float("nan") if o.plan else timed(case, kernel, binary.cubin)
        lost = case.calls * (0 if o.plan else us - case.nbytes / o.rate / 1e6) / 1e3
        used = resources(binary).get(kernel.entry)  # when many compile at once, the log may lack some
        registers, spilt = (used.registers, used.spill_stores) if used else ("?", "?")
        shared = (used.shared if used else 0) + kernel.shared_bytes
        lines.append(
            (lost, f"{lost:8.3f} {case.calls:5d} {us:8.1f} {case.nbytes / us / 1e6:6.2f}"
            f"  {case.reads / 1e9:7.3f} {case.writes / 1e9:7.3f}  {kernel.grid[0]:6d} x {kernel.block[0]:4d}"
            f" {registers!s:>4} {spilt!s:>6} {shared >> 10:4d}  {kernel.entry}")
        )  # fmt: skip
    print(" ms lost calls       us   TB/s  GB read written   grid x block regs spilt  KiB  kernel")
    for _, line in sorted(lines, key=lambda pair: -pair[0]):
        print(line)


def change(name: str, value: str) -> None:
    """Override a constant of a module of ``blufunc.kernels``, or a field of one.

    The plan cache does not know the override: from here on it is off.
    """
    bf.config.update("plan_cache", False)
    parts = name.split(".")
    n = next(i for i, part in enumerate(parts) if part.isupper())
    constant, fields = parts[n], parts[n + 1 :]
    found = importlib.import_module(".".join(["blufunc.kernels", *parts[:n]]))
    old = getattr(found, constant)
    new = ast.literal_eval(value)
    setattr(found, constant, dataclasses.replace(old, **{fields[0]: new}) if fields else new)


def _parser() -> argparse.ArgumentParser:
    p = gpt2_blufunc.parser()
    p.add_argument("--kernel", default="", help="those with this in their names")
    p.add_argument("--set", action="append", default=[], help="MODULE.NAME[.FIELD]=VALUE, of blufunc.kernels")
    p.add_argument("--rate", type=float, default=4.1, help="TB/s that can be reached")
    p.add_argument("--arch", default="sm_90a")
    p.add_argument("--plan", action="store_true", help="launch nothing")
    return p


def planned(o: argparse.Namespace) -> Schedule:
    """The training step, as the options request."""
    config = model.Config(o.layers, o.heads, o.width, o.context, o.vocab)
    wiring = model.Wiring(recompute=bool(o.recompute), loss_chunk=None if o.chunk == "auto" else int(o.chunk))
    _, optimizer, train_step = gpt2_blufunc.training(o, config, wiring)
    params = bf.eval_shape(lambda key: model.init(key, config), bf.random.key(0))
    state = bf.eval_shape(optimizer.init, params)
    tokens = bf.ShapeDtypeStruct((o.batch, o.context + 1), np.int32)
    traced = bf.jit(train_step, donate_argnums=(0, 1)).trace(params, state, tokens)
    return cuda_program.planned(simplify(traced.jaxpr), traced.lower().donated, o.arch)


def cases(made: Schedule) -> Iterator[Case]:
    """Distinct kernels of a schedule; those that differ in a constant count as one."""
    calls: Counter[Any] = Counter()
    found: dict[Any, Case] = {}
    for step, cost in zip(made.steps, cost_of(made).steps, strict=True):
        if isinstance(step, OpaqueStep):
            continue
        some = modules.wanted_by(made, step)
        for w in some:
            buffers = [b for k in w.kernels for b in k.buffers]
            key = w.kernels[0].name, w.kernels[0].grid[0].extent, [(b.dtype, b.size) for b in buffers]
            calls[str(key)] += 1
            places = [v if (place := made.place(v)) is None else place for v in w.values]
            share = sum(b.size * b.dtype.itemsize for b in buffers)
            every = sum(b.size * b.dtype.itemsize for x in some for k in x.kernels for b in k.buffers)
            reads, writes = cost.reads * share / every, cost.writes * share / every
            found.setdefault(str(key), Case(w, 0, reads, writes, buffers, places))
    for key, case in found.items():
        yield case._replace(calls=calls[key])


def rendered(case: Case) -> CudaKernel:
    """Source and launch shape of the kernel."""
    kernels, aliased = case.wanted.kernels, case.wanted.names
    if len(kernels) > 1:
        return render(schedule_group(kernels, kernels[0].name, aliased))
    return render(schedule(kernels[0], aliased))


def timed(case: Case, kernel: CudaKernel, cubin: bytes) -> float:
    """Microseconds per launch: the mean of several back-to-back launches."""
    driver.use_device(0)
    stream = driver.compute_stream(0)
    arrays: dict[Any, DeviceBuffer] = {}
    for b, place in zip(case.buffers, case.places, strict=True):
        if place not in arrays or arrays[place].nbytes < b.size * b.dtype.itemsize:
            arrays[place] = filled(b)
    counters = cuda_memory.to_device(np.zeros(max(1, kernel.counters), np.uint32))
    loaded = modules.Loaded(
        driver.Module(cubin).kernel(kernel.entry),
        kernel.grid, kernel.block, kernel.shared_bytes, kernel.counters, kernel.segments > 0,
    )  # fmt: skip
    trailing = [counters.ptr] if kernel.counters else []
    launch, _ = loaded.prepare([*(arrays[place].ptr for place in case.places), *trailing])
    for _ in range(3):
        launch(stream.ptr)
    return 1e3 * driver.elapsed_ms(lambda: launch(stream.ptr), stream, _REPEATS)


def filled(b: Buffer) -> DeviceBuffer:
    """Memory of a buffer: repeated random values for floats, otherwise zeros."""
    stream = driver.compute_stream(0)
    buffer = cuda_memory.allocate((b.size,), b.dtype)
    if not dtypes.is_floating(b.dtype):
        driver.fill_zero(buffer.ptr, buffer.nbytes, stream)
        return buffer
    some = np.random.default_rng(b.size).standard_normal(min(b.size, 1 << 20)).astype(b.dtype)
    driver.copy_in(buffer.ptr, some)
    done = some.nbytes
    while done < buffer.nbytes:
        more = min(done, buffer.nbytes - done)
        driver.copy_on_device(buffer.ptr + done, buffer.ptr, more, stream)
        done += more
    stream.synchronize()
    return buffer


if __name__ == "__main__":
    main()
