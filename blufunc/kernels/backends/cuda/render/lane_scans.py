"""Scans along lanes, as CUDA C++.

Kernels, stage 6, functions of a ``CudaWriter`` for ``kernel.py``. In: a loop over lanes with scans. Out: lines of
CUDA. The threads of a group take neighboring vectors, one each per step, as in other loops over lanes. In each step a
thread scans its vector, threads combine by shuffles and warps through shared memory, and the result carries over to
the next step. So a row of any length is read once. With ``reverse``, steps and lanes are reversed but threads keep
their vectors, where other loops expect their keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blufunc.kernels.backends.cuda.device_model import WARP
from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import Vectors
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import start_of, written_in
from blufunc.kernels.loopir.ir import Lanes, Prefix, Scan

REDUCERS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And", "or": "Or", "xor": "Xor"}
REDUCERS |= {"argmax": "ArgMax", "argmin": "ArgMin", "logaddexp": "LogAddExp"}
"""Names of reductions in the prelude."""


def scanned_lanes(w: CudaWriter, s: Lanes, scans: Sequence[Scan], cut: Vectors) -> None:
    """Write a loop over lanes with scans."""
    threads, steps = w.threads, cut.steps(w.threads)
    prefixes = [x.prefix for x in scans]
    own = {p: _declare(w, p) for p in prefixes}
    t, q = w.fresh("t"), w.variable(cut.vector)
    loop = f"for (int {t} = 0; {t} < {steps}; ++{t})"
    if prefixes[0].reverse:
        loop = f"for (int {t} = {steps - 1}; {t} >= 0; --{t})"
    writes, rest = written_in([s]), [x for x in s.body if not isinstance(x, Scan)]
    unroll = "#pragma unroll" if cut.is_unrolled(threads) else "#pragma unroll 1"
    outside, w.step = w.step, t
    with w.block([unroll, loop], (), writes):
        place = t if threads == 1 else f"{t} * {threads} + {w.thread}"
        w.line(f"const {w.index_type} {q} = {place};")
        for p in prefixes:
            kind, name = scalar_ops.register_type(p.dtype), w.named[p]
            start = start_of(p.op, p.dtype)
            others = f" = {{{', '.join([start] * cut.width)}}}" if cut.vector.extent % threads else ""
            w.line(f"{kind} {name}[{cut.width}]{others};")
        with _if_there(w, cut, writes):
            w.vector(cut, scans)
        for p, (carry, memory) in own.items():
            way = "true" if p.reverse else "false"
            # double buffering: one barrier per step
            place = f"{memory} + ({t} & 1) * {threads // WARP}" if memory else f"&{carry}"
            call = f"block_scan<{REDUCERS[p.op]}, {threads}, {way}>"
            w.line(f"{call}({w.named[p]}, {carry}, {place});")
        with _if_there(w, cut, writes):
            w.vector(cut, rest)
    w.step = outside
    if w.in_rows and threads > WARP:
        w.line("__syncthreads();")


def _declare(w: CudaWriter, p: Prefix) -> tuple[str, str]:
    """Names of a scan's carry, and of its warps' shared memory if there are several."""
    kind, name = scalar_ops.register_type(p.dtype), w.name(p, p.name)
    carry = w.fresh(f"{name}_carry")
    w.line(f"{kind} {carry} = {start_of(p.op, p.dtype)};")
    if w.threads <= WARP:
        return carry, ""
    memory = w.fresh(f"{name}_shared")
    w.line(f"__shared__ {kind} {memory}[{2 * (w.threads // WARP)}];")
    return carry, memory


@contextmanager
def _if_there(w: CudaWriter, cut: Vectors, writes: set) -> Iterator[None]:
    """Block for threads whose vector is in the row."""
    q, n = w.variable(cut.vector), cut.vector.extent
    opening = f"if ({q} < {n})" if n % w.threads else ""
    with w.block([opening], [cut.vector], writes):
        yield
