"""Scans along lanes as CUDA C++.

Kernels, stage 6, below ``cuda_style.py``. The threads of a group take a vector each at a time, side by side, as they do
in other loops over lanes. In each turn a thread combines the elements of its vector, threads combine their vectors by
shuffles and warps through shared memory, and what has been combined so far is carried to the next turn: a row is read
once, however long it is. With ``reverse`` all of this goes the other way, but a thread has the same vectors, so that
what it keeps of them is where other loops look for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blufunc.kernels import scalars
from blufunc.kernels.cstyle import written_in
from blufunc.kernels.cuda_access import WideAccess
from blufunc.kernels.cuda_schedule import is_unrolled, steps_of
from blufunc.kernels.cuda_vectors import Vectors
from blufunc.kernels.loopir import Lanes, Prefix, Scan, identity
from blufunc.kernels.scalars import bare

REDUCERS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And", "or": "Or", "xor": "Xor"}
REDUCERS |= {"argmax": "ArgMax", "argmin": "ArgMin", "logaddexp": "LogAddExp"}
"""What the prelude calls reductions."""

_WARP = 32


class LaneScans(WideAccess):
    """The loops over lanes in which these are scanned."""

    step = ""  # which vector of its thread's a loop is at
    in_rows = False  # whether loops over lanes come again and again

    def scanned_lanes(self, s: Lanes, scans: Sequence[Scan], cut: Vectors) -> None:
        """A loop with scans over lanes that have been cut."""
        threads, steps = self.threads, steps_of(cut, self.threads)
        prefixes = [x.prefix for x in scans]
        own = {p: self._declare_scan(p) for p in prefixes}
        t, q = self.fresh("t"), self.variable(cut.vector)
        loop = f"for (int {t} = 0; {t} < {steps}; ++{t})"
        if prefixes[0].reverse:
            loop = f"for (int {t} = {steps - 1}; {t} >= 0; --{t})"
        writes, rest = written_in([s]), [x for x in s.body if not isinstance(x, Scan)]
        unroll = "#pragma unroll" if is_unrolled(cut, threads) else "#pragma unroll 1"
        outside, self.step = self.step, t
        with self.block([unroll, loop], (), writes):
            place = t if threads == 1 else f"{t} * {threads} + {self.thread}"
            self.line(f"const {self.index_type} {q} = {place};")
            for p in prefixes:
                kind, name = scalars.register_type(p.dtype), self.named[p]
                start = scalars.literal(identity(p.op, p.dtype), p.dtype)
                others = f" = {{{', '.join([start] * cut.width)}}}" if cut.vector.extent % threads else ""
                self.line(f"{kind} {name}[{cut.width}]{others};")
            with self._if_there(cut, writes):
                self.vector(cut, scans)
            for p, (carry, memory) in own.items():
                way = "true" if p.reverse else "false"
                # two places in turn: one barrier for each exchange
                place = f"{memory} + ({t} & 1) * {threads // _WARP}" if memory else f"&{carry}"
                call = f"block_scan<{REDUCERS[p.op]}, {threads}, {way}>"
                self.line(f"{call}({self.named[p]}, {carry}, {place});")
            with self._if_there(cut, writes):
                self.vector(cut, rest)
        self.step = outside
        if self.in_rows and threads > _WARP:
            self.line("__syncthreads();")

    def _declare_scan(self, p: Prefix) -> tuple[str, str]:
        """The names of what a scan carries, and of the shared memory in which its warps meet, if there are several."""
        kind, name = scalars.register_type(p.dtype), self.name(p, p.name)
        carry = self.fresh(f"{name}_carry")
        self.line(f"{kind} {carry} = {scalars.literal(identity(p.op, p.dtype), p.dtype)};")
        if self.threads <= _WARP:
            return carry, ""
        memory = self.fresh(f"{name}_shared")
        self.line(f"__shared__ {kind} {memory}[{2 * (self.threads // _WARP)}];")
        return carry, memory

    @contextmanager
    def _if_there(self, cut: Vectors, writes: set) -> Iterator[None]:
        """A block for threads whose vector is one of the row's."""
        q, n = self.variable(cut.vector), cut.vector.extent
        opening = f"if ({q} < {n})" if n % self.threads else ""
        with self.block([opening], [cut.vector], writes):
            yield

    def take(self, s: Scan) -> None:
        value = bare(self.value(s.value))
        if s.value.dtype != s.prefix.dtype:
            value = f"{scalars.register_type(s.prefix.dtype)}({value})"
        self.line(f"{self.read_prefix(s.prefix)} = {value};")

    def read_prefix(self, prefix: Prefix) -> str:
        element = self.inner.element if self.inner is not None else None
        return f"{self.named[prefix]}[{'0' if element is None else self.variable(element)}]"
