"""Measured roofline of a device: the bounds for a program's times.

Kernels, alongside stage 8. In: a device. Out: its ``Machine``: the bandwidth of a copy of a large array, and the rate
of a large float32 GEMM, measured on first use. So a share of the roofline is relative to this very machine, not to a
data sheet.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from blufunc.core.arrays.backend import Device
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import neg_p
from blufunc.kernels.backends.cpu.toolchain import threads
from blufunc.kernels.backends.cuda.described import DescribedBackend
from blufunc.kernels.machine import Machine

_COPIED = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Elements of the float32 array that is copied: larger than any cache."""

_MULTIPLIED = {"cpu": 768, "cuda": 8192}
"""The side of the square matrices."""

_MATRICES = {
    "dimension_numbers": (((1,), (0,)), ((), ())), "precision": None, "preferred_element_type": None,
}  # fmt: skip

_REPEATS = 5

_IN_A_ROW = 8
"""Operations between synchronizations, which are slow on a GPU."""


@functools.cache
def machine_of(device: Device) -> Machine:
    """The measured speed of a device: about a tenth of a second, once per process.

    A device that is described has that of the device model.
    """
    if isinstance(device.backend, DescribedBackend):
        return device.backend.machine
    rate = _product(device)
    return Machine(str(device), (_host_copy if device.platform == "cpu" else _copy)(device), rate, rate)


def _best(run: Callable[[], Any]) -> float:
    """The least time of a few runs, in seconds."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first run touches new memory


def _host_copy(device: Device) -> float:
    """Bytes per second of a copy into mapped memory, on as many threads as kernels."""
    x = np.ones(_COPIED["cpu"], np.float32)
    y = np.empty_like(x)
    parts = list(zip(np.array_split(x, threads()), np.array_split(y, threads()), strict=True))
    with ThreadPoolExecutor(threads()) as pool:
        seconds = _best(lambda: list(pool.map(lambda p: np.copyto(p[1], p[0]), parts)))
    return 2 * x.nbytes / seconds


def _copy(device: Device) -> float:
    """Bytes per second of a negation, the cheapest kernel."""
    n = _COPIED[device.platform]
    x, y = (Var(ShapedArray((n,), dtypes.float32)) for _ in range(2))
    run = _runner(device, Jaxpr([x], [Eqn(neg_p, [x], [y], {}, None)], [y], name="measured"))
    return _IN_A_ROW * 2 * 4 * n / _best(lambda: run(_IN_A_ROW))


def _product(device: Device) -> float:
    """Operations per second of a program's GEMMs, most of which write to its arena."""
    n = _MULTIPLIED[device.platform]
    x, y, *outs = (Var(ShapedArray((n, n), dtypes.float32)) for _ in range(_IN_A_ROW + 2))
    eqns = [Eqn(dot_general_p, [v, y], [out], _MATRICES, None) for v, out in itertools.pairwise([x, *outs])]
    run = _runner(device, Jaxpr([x, y], eqns, outs[-1:], name="measured"))
    return _IN_A_ROW * 2 * n**3 / _best(lambda: run(1))


def _runner(device: Device, jaxpr: Jaxpr) -> Callable[[int], None]:
    """A function that runs a program on ones some times."""
    backend = device.backend
    program = backend.compile(jaxpr, (False,) * len(jaxpr.invars))
    buffers = [backend.from_host(np.ones(v.aval.shape, np.float32), device) for v in jaxpr.invars]

    def run(times: int) -> None:
        for _ in range(times):
            (result,) = program(list(buffers))
        backend.block_until_ready(result)

    return run
