"""Fake CUDA device in host memory; the LoopIR interpreter runs its kernels.

``install(monkeypatch)`` replaces the driver, the compiler and the libraries, to test placement and scheduling without
a device. It is strict: freed memory is overwritten, and access to it fails. During a capture nothing runs, copies from
or to the host fail, and memory belongs to the graph. Page-locked memory is apart: only copies between memories reach
it. Streams that run side by side do so as far apart as events let them, each launch the other way round, so that a copy
runs at its earliest moment or at its latest.
"""

import collections
import contextlib
import ctypes
import functools
import json
import re
import struct
import weakref
from collections import Counter

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import DropVar, eval_jaxpr
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.ragged_dot import ragged_contract_p, ragged_dot_p
from blufunc.kernels.backends.cuda import backend as cuda_backend
from blufunc.kernels.backends.cuda import executor
from blufunc.kernels.backends.cuda.driver import borrowed, conditional, driver, modules
from blufunc.kernels.backends.cuda.driver import graph as cuda_graph
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library import (
    collectives,
    cublaslt,
    cupy_ops,
    host,
    pointwise_gemm,
    softmax_gemm,
    tile_gemm,
    updates,
)
from blufunc.kernels.backends.cuda.library.attention import decode as attention_decode
from blufunc.kernels.backends.cuda.library.attention import ieee as ieee_attention
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention import launch as cuda_attention_launch
from blufunc.kernels.backends.cuda.library.attention.kernels import ROWS_OF_SUM
from blufunc.kernels.backends.cuda.library.control_flow import moves
from blufunc.kernels.backends.cuda.library.convolution import implicit_gemm
from blufunc.kernels.backends.cuda.library.convolution import op as convolutions
from blufunc.kernels.backends.cuda.library.decoding import quantized_gemm, skinny_gemm
from blufunc.kernels.backends.cuda.library.grouped import op as grouped
from blufunc.kernels.backends.cuda.library.linalg import small as small_matrices
from blufunc.kernels.backends.cuda.library.loops import op as loops
from blufunc.kernels.backends.cuda.library.recurrence import op as recurrence
from blufunc.kernels.backends.cuda.library.scatter import op as scatter
from blufunc.kernels.backends.cuda.library.sorting import rows as sorting
from blufunc.kernels.ops import split_dot
from blufunc.kernels.ops.convolution import convolution_of
from blufunc.kernels.ops.gemm import dot_accumulate_p, dot_bias_p
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.ops.row_gemm import dot_rows_p
from blufunc.nn import vocabulary_loss_call
from blufunc.nn.attention import call as attention_call
from tests.emulation import loop_interpreter
from tests.kernels.backends.cuda.library.test_cupy_ops import NumpyLibrary


class Block:
    """An allocation; once freed, it is overwritten and reused for the same size."""

    def __init__(self, source, raw, nbytes):
        self.source, self.raw, self.nbytes = source, raw, nbytes
        self.ptr = -(-raw.ctypes.data // 512) * 512
        source.live[self.ptr] = nbytes

    def __del__(self):
        if self.source.fake.lines is not None:  # what is queued still uses it
            self.source.fake.lines.freed.append((self.source, self.raw, self.ptr, self.nbytes))
        else:
            self.source.take_back(self.raw, self.ptr, self.nbytes)


class Source:
    """``CupySource`` in host memory; it reuses freed blocks of the same size first."""

    def __init__(self, fake, total=1 << 30):
        self.fake, self.total, self.live, self.free = fake, total, {}, {}
        fake.sources.add(self)

    def malloc(self, sizes):
        assert self.fake.captures() == (self is not self.fake.source), "memory of the wrong pool"
        return [self._block(nbytes) for nbytes in sizes]

    def _block(self, nbytes):
        size = -(-nbytes // 512) * 512
        if sum(self.live.values()) + size > self.total:
            raise MemoryError
        kept = self.free.get(size)
        return Block(self, kept.pop() if kept else np.full(size + 512, 0xCD, np.uint8), size)

    def take_back(self, raw, ptr, nbytes):
        if self is self.fake.source or self is self.fake.pinned:  # else a graph's, whose work comes again
            raw[:] = 0xCD
            del self.live[ptr]
        self.free.setdefault(nbytes, []).append(raw)

    def free_unused(self):
        self.free.clear()

    def held_bytes(self):
        return sum(self.live.values()) + sum(n * len(raws) for n, raws in self.free.items())

    def room(self):
        return self.total - sum(self.live.values()), self.total


class PinnedSource(Source):
    """``PinnedSource`` of the driver: memory that only copies between memories reach."""

    def __init__(self, fake):
        self.fake, self.total, self.live, self.free = fake, 1 << 40, {}, {}

    def malloc(self, sizes):
        assert not self.fake.captures(), "page-locked memory in a capture"
        return [self._block(nbytes) for nbytes in sizes]


class Stream:
    """A stream is where work is put; here it is done at once, or recorded."""

    def __init__(self, ptr, fake=None):
        self.ptr, self.fake = ptr, fake

    def synchronize(self):
        pass

    def wait_event(self, event):
        self.fake.recorded_work()[self.ptr].append(event)


class Aside:
    """The stream of copies to the host; what they wait for is done."""

    ptr = 1

    def wait_event(self, event):
        pass


class Event:
    """Event of a stream: it completes with the preceding work."""

    def __init__(self, stream):
        self.stream, self.place = stream.ptr, len(stream.fake.recorded_work()[stream.ptr])


class Lines:
    """Work of streams that run side by side, and how far each has come."""

    def __init__(self, work):
        self.work, self.done, self.freed = work, dict.fromkeys(work, 0), []

    def run(self, order):
        """Run all, the first stream that need not wait first."""
        while any(self.done[s] < len(self.work[s]) for s in order):
            assert any(map(self.go, order)), "streams wait for each other"

    def run_one(self, stream):
        """Run one stream to its end, and the others no further than it needs."""
        while self.done[stream] < len(self.work[stream]):
            assert self.go(stream) or any(self.go(s) for s in self.work), "streams wait for each other"

    def go(self, stream):
        """Run what comes next on a stream, if it need not wait."""
        if self.done[stream] == len(self.work[stream]):
            return False
        what = self.work[stream][self.done[stream]]
        if isinstance(what, Event):
            if self.done[what.stream] < what.place:
                return False
        else:
            what()
        self.done[stream] += 1
        return True

    def check_joined(self, first):
        """Hold that the first stream waited for all that the others do."""
        joined = {
            e.stream for e in self.work[first] if isinstance(e, Event) and e.place == len(self.work[e.stream])
        }
        busy = {s for s in self.work if self.work[s]} - {first}
        assert joined >= busy, "there are streams that go on"


class Signal:
    """Event between libraries, done or not."""

    def __init__(self, done):
        self.done = done


class Graph:
    """Recorded work by streams, and what keeps its memory alive.

    Each launch lets another stream run as far ahead as events let it: what was not waited for is seen.
    """

    def __init__(self, fake, work, keep):
        self.fake, self.work, self.keep = fake, work, keep
        self.launched = 0

    def launch(self):
        self.fake.replays += 1
        self.launched += 1
        lines = Lines(self.work)
        lines.run(sorted(self.work, reverse=self.launched % 2 == 1))
        lines.check_joined(min(self.work))


class Launch:
    """A kernel with its addresses, which are read at launch."""

    def __init__(self, fake, run, pointers):
        self.fake, self.run, self.pointers = fake, run, list(pointers)

    def __call__(self, stream, overlaps=False):
        pointers = tuple(self.pointers)
        self.fake.launches += 1
        self.fake.do(lambda: self.run(pointers), stream)


class Loaded:
    """``modules.Loaded`` of a Python function of addresses."""

    counters, waits = 0, False

    def __init__(self, fake, run):
        self.fake, self.run = fake, run

    def prepare(self, pointers):
        launch = Launch(self.fake, self.run, pointers)
        return launch, launch.pointers


class FakeCuda:
    """The device.

    Attributes:
      launches, replays, products: number of kernels, graphs and GEMMs that were put on streams.
      pauses: number of pauses of streams.
      conditions: by handle, the values of conditions of graphs' nodes; None: not set.
      copies: by size in bytes, the number of copies on the device.
      nodes: number of runs of the bodies of such nodes.
      transfers: of each copy between memories that ran, its stream and bytes.
      side_by_side: number of launches on several streams that are no graphs.
      fewer: for each GEMM with a reduced number of SMs, its stream and that number.
      epilogues: the epilogue of each GEMM that has one.
      overlapped: for each GEMM of few rows, whether it may begin ahead of the end of the kernel before it.
      compiled: the names of the kernels that were compiled.
      ordered: streams of other libraries that waited for the compute stream ("after"), or it for them ("before").
      busy: whether what is recorded from now on stays undone.
      sources_of_users: by entry, what a user's kernel does with the addresses of its parameters.
    """

    def __init__(self):
        self.sources, self.recording = weakref.WeakSet(), None
        self.source = Source(self)
        self.pool = cuda_memory.Pool(0, self.source)
        self.pinned = PinnedSource(self)
        self.pinned_pool = cuda_memory.Pool(0, self.pinned, cuda_memory.PinnedBuffer)
        self.stream, self.own = Stream(1, self), None
        self.copy_streams = Stream(10, self), Stream(11, self)
        self.lines, self.side_by_side = None, 0
        self.transfers: list[tuple[int, int]] = []
        self.launches = self.replays = self.products = self.loops = self.recurrences = self.pauses = 0
        self.conditions: list[bool | None] = []
        self.nodes, self.copies = 0, Counter()
        self.aside = np.empty(1 << 20, np.uint8)  # a slot of copies to the host
        self.fewer: list[tuple[int, int]] = []
        self.compiled, self.epilogues, self.overlapped, self.sources_of_users = [], [], [], {}
        self.ordered: list[tuple[str, int]] = []
        self.busy = False

    # -- memory --------------------------------------------------------------------------------------

    def array(self, address, shape, dtype):
        """The memory at an address as an array; it must be that of one live buffer."""
        n = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not n:
            return np.empty(shape, dtype)
        inside = (
            a <= address and address + n <= a + size for s in self.sources for a, size in s.live.items()
        )
        assert any(inside), f"{n} bytes at {address:#x} are nobody's"
        return np.ndarray(shape, dtype, (ctypes.c_char * n).from_address(address))

    def copy(self, to, source, nbytes, stream):
        def run():
            one = np.dtype(np.uint8)
            self.array(to, (nbytes,), one)[:] = self.array(source, (nbytes,), one).copy()
            self.copies[nbytes] += 1

        if nbytes:
            self.do(run, stream.ptr)

    def pinned_array(self, address, nbytes):
        """Bytes of page-locked memory; None if the address is not there."""
        if address == self.aside.ctypes.data:
            return self.aside[:nbytes]
        inside = (a <= address and address + nbytes <= a + size for a, size in self.pinned.live.items())
        if not any(inside):
            return None
        return np.ndarray((nbytes,), np.uint8, (ctypes.c_char * nbytes).from_address(address))

    def transfer(self, to, source, nbytes, stream):
        def run():
            one = np.dtype(np.uint8)
            ends = [self.pinned_array(address, nbytes) for address in (to, source)]
            ends = [
                self.array(address, (nbytes,), one) if end is None else end
                for end, address in zip(ends, (to, source), strict=True)
            ]
            ends[0][:] = ends[1].copy()
            self.transfers.append((stream.ptr, nbytes))

        if nbytes:
            self.do(run, stream.ptr)

    def read_pinned(self, x, address, index=0):
        assert not self.captures()
        self.settle()
        x.reshape(-1).view(np.uint8)[...] = self.pinned_array(address, x.nbytes)

    def write_pinned(self, address, x, index=0):
        assert not self.captures()
        self.settle()
        if x.nbytes:
            self.pinned_array(address, x.nbytes)[...] = x.reshape(-1).view(np.uint8)

    def fill_zero(self, address, nbytes, stream):
        def run():
            self.array(address, (nbytes,), np.dtype(np.uint8))[:] = 0

        if nbytes:
            self.do(run, stream.ptr)

    def copy_in(self, address, x, index=0):
        self._not_in_capture()
        self.settle()
        self.array(address, x.shape, x.dtype)[...] = x

    def copy_out(self, x, address, index=0):
        self._not_in_capture()
        self.settle()
        x[...] = self.array(address, x.shape, x.dtype)

    def copy_out_aside(self, x, enqueue, index):
        raw = x.reshape(-1).view(np.uint8)
        for start in range(0, raw.size, self.aside.size):
            size = min(self.aside.size, raw.size - start)
            enqueue(self.aside.ctypes.data, start, size, Aside())
            raw[start : start + size] = self.aside[:size]

    def _not_in_capture(self):
        if self.captures():
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    def captured(self, aval, device, label):
        return self.own.allocate(aval.shape, aval.dtype, label)

    # -- work ----------------------------------------------------------------------------------------

    def captures(self):
        """Whether work of this thread is recorded now."""
        return self.recording is not None and driver.is_capturing(driver.work_stream(0).ptr)

    def do(self, run, stream):
        if self.captures():
            self.recording[stream].append(run)
        elif self.lines is not None:
            self.lines.work[stream].append(run)
        else:
            assert stream == 1, "work for a stream that is not the current one"
            run()

    def recorded(self, stream):
        """An event; outside of a capture a number that grows with work, for times."""
        alone = not self.captures() and self.lines is None
        return self.launches + self.products if alone else Event(stream)

    def recorded_work(self):
        """The work that is recorded by streams: of a capture, or side by side."""
        return self.lines.work if self.lines is not None else self.recording

    def settle(self):
        """Run the work of the compute stream, and what that needs of others."""
        if self.lines is not None:
            self.lines.run_one(self.stream.ptr)

    @contextlib.contextmanager
    def side_streams(self, index, streams):
        """Streams side by side: what they do is queued, and runs at the end of the block."""
        self.lines = lines = Lines({s.ptr: [] for s in streams})
        self.side_by_side += 1
        try:
            yield
            lines.run(sorted(lines.work, reverse=self.side_by_side % 2 == 1))
            lines.check_joined(self.stream.ptr)
        finally:
            self.lines = None
            for source, *block in lines.freed:
                source.take_back(*block)

    def capture(self, run, device=0, keep=(), urgent=(False,)):
        made, own = [Stream(2 + i, self) for i in range(len(urgent))], Source(self)
        self.recording, self.own = {s.ptr: [] for s in made}, cuda_memory.Pool(0, own)
        try:
            with driver.redirected(device, made[0], made[1:]):
                run(made)
            return Graph(self, self.recording, (keep, self.own, run))
        finally:
            self.recording = None

    # -- other libraries -----------------------------------------------------------------------------

    def followed_by(self, stream, index):
        self.ordered.append(("after", stream))
        return Signal(not self.busy)

    def gather(self, memory, storage, label):
        """Dense copy of strided memory, which lies within one live allocation."""
        spans = [s * (n - 1) for s, n in zip(memory.strides, memory.shape, strict=True)]
        below = sum(s for s in spans if s < 0)
        nbytes = sum(map(abs, spans)) + memory.dtype.itemsize
        raw = self.array(memory.address + below, (nbytes,), np.dtype(np.uint8))
        strided = np.ndarray(memory.shape, memory.dtype, raw.data, -below, memory.strides)
        return cuda_memory.to_device(strided, storage.device, label)

    # -- loops and branches of graphs ----------------------------------------------------------------

    def condition(self, stream):
        """A new condition, which no kernel has set."""
        assert self.captures()
        self.conditions.append(None)
        return len(self.conditions) - 1

    def conditional(self, stream, handle, kind, body, device=0):
        """Record a node, and what its body puts on a stream of its own."""
        inner = Stream(100 + len(self.recording), self)
        self.recording[inner.ptr] = []
        with driver.redirected(0, inner):
            body()
        work = self.recording.pop(inner.ptr)

        def run():
            assert self.conditions[handle] is not None, "nothing has set the condition"
            while self.conditions[handle]:
                for what in work:
                    what()
                self.nodes += 1
                if kind == conditional.IF:
                    break
            self.conditions[handle] = None

        self.do(run, stream.ptr)

    def move_all(self, copies):
        count, *rest = struct.unpack(f"<q{(len(copies) - 8) // 8}q", copies)
        one = np.dtype(np.uint8)
        found = [rest[3 * i : 3 * i + 3] for i in range(count)]
        sources = [self.array(source, (n,), one).copy() for _, source, n in found]
        assert sum(-(-n // 16) * 16 for _, _, n in found) <= moves.STAGED
        for (to, _, n), x in zip(found, sources, strict=True):
            self.array(to, (n,), one)[:] = x

    def next_round(self, values):
        predicate, rounds, handle, most, first, copies = values
        goes_on = not predicate or bool(self.array(predicate, (), np.dtype(bool)))
        self.move_all(copies)
        done = self.array(rounds, (), np.dtype(np.int64))
        done[...] = 0 if first else done + 1
        self.conditions[int(handle)] = goes_on and done < most

    def choose(self, values):
        index, handles = values
        count, *found = struct.unpack(f"<{len(handles) // 8}Q", handles)
        chosen = min(max(int(self.array(index, (), np.dtype(np.int32))), 0), count - 1)
        for i, handle in enumerate(found[:count]):
            self.conditions[handle] = i == chosen

    def move_rows(self, values):
        rounds, start, step, rows, load, stacks = values
        count, *rest = struct.unpack(f"<q{(len(stacks) - 8) // 8}q", stacks)
        first, one = start + int(self.array(rounds, (), np.dtype(np.int64))) * step, np.dtype(np.uint8)
        for i in range(count):
            array, outside, n, stride = rest[4 * i : 4 * i + 4]
            for row in range(rows):
                inside = self.array(int(array + (first + row) * n), (n,), one)
                other = self.array(outside + row * stride, (n,), one)
                to, x = (other, inside) if load else (inside, other)
                to[:] = x

    def load(self, wanted, device, name, others=(), made=None):
        self.compiled += [w.kernels[0].name for w in wanted]
        functions = [Loaded(self, lambda pointers, w=w: self.interpret(w, pointers)) for w in wanted]
        return [str(k) for w in wanted for k in w.kernels], functions

    def load_source(self, text, device):
        if text.entry == "split_product":
            return Loaded(self, functools.partial(self.split_product, constants_of(text.text)))
        if text.entry in ("next_round", "choose", "move_rows"):
            return Loaded(self, getattr(self, text.entry))
        if text.entry == "copy_all":
            return Loaded(self, lambda values: self.move_all(*values))
        if text.entry == "pause":
            return Loaded(self, self.pause)
        return Loaded(self, lambda pointers: self.sources_of_users[text.entry](self, pointers))

    def split_product(self, c, pointers):
        """The kernel of ``split_gemm`` by the definition of ``split_dot_p``."""
        shapes = [(c["M"], c["K"]) if c["A_BY_ROWS"] else (c["K"], c["M"])] * 2
        shapes += [(c["N"], c["K"]) if c["B_BY_ROWS"] else (c["K"], c["N"])] * 2
        arrays = [self.array(p, s, np.dtype(np.float16)) for p, s in zip(pointers, shapes, strict=False)]
        roots = [
            self.array(p, (n,), np.dtype(np.float32))
            for p, n in zip(pointers[4:6], (c["M"], c["N"]), strict=True)
        ]
        contracts = ((int(c["A_BY_ROWS"]),), (int(c["B_BY_ROWS"]),))
        how = {"dimension_numbers": (contracts, ((), ())), "sums": c["SUMS"]}
        out = split_dot.split_dot_p.impl(*arrays, *roots, **how)
        self.array(pointers[6], out.shape, out.dtype)[...] = out
        self.products += 1

    def pause(self, pointers):
        self.pauses += 1

    def interpret(self, wanted, pointers):
        rest = iter(pointers)
        for kernel in wanted.kernels:
            arrays = {b: self.array(next(rest), (b.size,), b.dtype) for b in kernel.buffers}
            loop_interpreter.run(kernel, arrays)

    # -- libraries -----------------------------------------------------------------------------------

    def library(self, prim, buffers, params, outs, label=""):
        if any(not b.nbytes for b in buffers) or any(not a.size for a in outs):
            return host.fallback(prim, buffers, params, outs, label)
        if cupy_ops.is_host_fallback(prim, [b.dtype for b in buffers], params):
            return host.fallback(prim, buffers, params, outs, label)
        pool = self.own if self.captures() else self.pool
        results = [pool.allocate(a.shape, a.dtype, label) for a in outs]
        sources, targets = ([(b.ptr, b.shape, b.dtype) for b in list_] for list_ in (buffers, results))

        def run():
            arrays = [self.array(p, s, cuda_memory.raw_dtype(d)) for p, s, d in sources]
            operands = [d for _, _, d in sources]
            made = ignoring_fp_errors(
                lambda: cupy_ops.evaluate(NumpyLibrary(), prim, arrays, operands, params, outs)
            )
            for (p, s, d), x in zip(targets, made, strict=True):
                self.array(p, s, cuda_memory.raw_dtype(d))[...] = np.asarray(x)

        self.do(run, driver.work_stream(0).ptr)
        return results


class Plan:
    """``cublaslt.Plan`` by NumPy: row-major matrices at addresses."""

    def __init__(self, fake, gemm, addresses):
        assert gemm.refused() is None
        self.fake, self.gemm = fake, gemm
        if not fake.captures():  # the choice is made by running some algorithms, not all of them right
            g, (_, _, d) = gemm.layout, addresses
            if d is not None:
                self._matrices(d, gemm.d, g.m, g.n, g.ldd, g.stride_d)[...] = 77

    def run(self, a, b, c, d, bias=0, alpha=1, beta=0, stream=0, scales=None):
        self.fake.products += 1
        assert (scales is not None) == bool(self.gemm.scaling)
        self.fake.fewer += [(stream, self.gemm.sms)] * (self.gemm.sms > 0)
        self.fake.epilogues += ["bias"] * self.gemm.bias or ["accumulate"] * self.gemm.reads_c
        for address in (a, b, c, d, bias):
            assert address % self.gemm.alignment == 0
        assert (c != 0, bias != 0, beta) == (self.gemm.reads_c, self.gemm.bias, self.gemm.reads_c)
        self.fake.do(lambda: ignoring_fp_errors(self._multiply, a, b, c, d, bias, scales), stream)

    def _multiply(self, a, b, c, d, bias, scales):
        g = self.gemm.layout
        rows_a, columns_a = (g.k, g.m) if g.trans_a else (g.m, g.k)
        rows_b, columns_b = (g.n, g.k) if g.trans_b else (g.k, g.n)
        x = self._matrices(a, self.gemm.a, rows_a, columns_a, g.lda, g.stride_a)
        y = self._matrices(b, self.gemm.b, rows_b, columns_b, g.ldb, g.stride_b)
        wide = np.int32 if dtypes.is_integer(self.gemm.a) else np.promote_types(self.gemm.d, np.float32)
        if self.gemm.d in (dtypes.bfloat16, dtypes.float16):
            wide = np.float32
        x, y = (
            m.astype(wide).swapaxes(1, 2) if t else m.astype(wide)
            for m, t in ((x, g.trans_a), (y, g.trans_b))
        )
        if scales:
            x = x * self._elements(scales[0], g.m)
            y = y * self._elements(scales[1], g.n).T
        out = np.matmul(x, y)
        if c:
            out = out + self._matrices(c, self.gemm.d, g.m, g.n, g.ldd, g.stride_d).astype(wide)
        if bias:
            out = out + self.fake.array(bias, (g.n,), self.gemm.d).astype(wide)
        self._matrices(d, self.gemm.d, g.m, g.n, g.ldd, g.stride_d)[...] = out.astype(self.gemm.d)

    def _elements(self, address, rows):
        """Scales of the elements of rows, from the layouts of cuBLASLt."""
        k, blocks = self.gemm.layout.k, -(-self.gemm.layout.k // 128)
        shape = {"tensor": (1, 1), "row": (1, rows), "block": (blocks, rows)}[self.gemm.scaling]
        return (
            self.fake.array(address, shape, np.dtype(np.float32))
            .repeat(-(-k // shape[0]) if shape[0] == 1 else 128, 0)[:k]
            .T
        )

    def _matrices(self, address, dtype, rows, columns, ld, stride):
        extent = (self.gemm.layout.batch - 1) * stride + (rows - 1) * ld + columns
        flat = self.fake.array(address, (extent,), np.dtype(f"V{dtype.itemsize}"))
        strides = [s * dtype.itemsize for s in (stride, ld, 1)]
        shape = (self.gemm.layout.batch, rows, columns)
        return np.lib.stride_tricks.as_strided(flat, shape, strides).view(dtype)


class Scatter:
    """``scatter.op.prepared`` by NumPy."""

    def __init__(self, fake, how, dtype, index, n, height, width, device, own, clip=False):
        self.fake, self.how, self.dtype, self.index, self.clip = fake, how, dtype, index, clip
        self.sizes = n, height, width
        self.scratch = own((height,), np.dtype(np.int32))

    def __call__(self, x, rows, updates, out, stream):
        self.fake.do(lambda: ignoring_fp_errors(self._combine, x, rows, updates, out), stream.ptr)

    def _combine(self, x, rows, updates, out):
        n, height, width = self.sizes
        wide = np.float32 if dtypes.is_floating(self.dtype) and self.dtype.itemsize < 4 else self.dtype
        found = self.fake.array(x, (height, width), self.dtype).astype(wide)
        given = self.fake.array(updates, (n, width), self.dtype).astype(wide)
        combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}.get(self.how)
        for row, update in zip(self.fake.array(rows, (n,), self.index), given):
            row = min(max(row, 0), height - 1) if self.clip else row
            if 0 <= row < height:
                found[row] = combine(found[row], update) if combine else update
        self.fake.array(out, (height, width), self.dtype)[...] = found.astype(self.dtype)


def assert_disjoint(written, read):
    """Hold that written bytes, by address and size, are not read too."""
    for n, (start, size) in enumerate(written):
        for other, length in (*read, *written[:n]):
            assert start + size <= other or other + length <= start, "a kernel overwrites what it reads"


class Update:
    """``updates.Kernel`` by the definition of its primitive."""

    def __init__(self, fake, eqn, layouts, device):
        assert updates.source(eqn, layouts)
        self.fake, self.eqn, self.layouts = fake, eqn, layouts

    def __call__(self, addresses, stream, overlaps=False):
        self.fake.launches += 1
        self.fake.do(lambda: ignoring_fp_errors(self._run, addresses), stream)

    def _run(self, addresses):
        rest = iter(addresses)
        for eqn, layout in zip(updates._each(self.eqn), self.layouts, strict=True):
            x, *others = (v.aval for v in eqn.invars)
            written = updates._written(eqn)[0] - 1
            *operands, out = [next(rest) for _ in eqn.invars]
            given = [
                self.strided(p, a, layout) if n == written else self.fake.array(p, a.shape, a.dtype)
                for n, (p, a) in enumerate(zip(operands, others, strict=True))
            ]
            result = self.fake.array(out, x.shape, x.dtype)
            assert not any(np.shares_memory(result, a) for a in given), "a kernel overwrites what it reads"
            result[...] = eqn.prim.impl(result.copy(), *given, **eqn.params)

    def strided(self, address, aval, layout):
        """An operand in place; all of its elements must be of one live buffer."""
        size, strides = aval.dtype.itemsize, layout.strides
        last = sum(s * (n - 1) for s, n in zip(strides, aval.shape, strict=True) if s > 0)
        flat = self.fake.array(address, (last + 1,), aval.dtype)
        return np.lib.stride_tricks.as_strided(flat, aval.shape, [s * size for s in strides])


class Planned:
    """The launch of a planned step by the definition of its primitive."""

    def __init__(self, fake, eqn, device):
        self.fake, self.eqn = fake, eqn
        self._check(eqn)

    def __call__(self, operands, outs, scratch, stream):
        self.fake.launches += 1
        self.fake.do(lambda: self._run(operands, outs), stream)

    def _run(self, operands, outs):
        arrays = lambda addresses, variables: [
            self.fake.array(p, v.aval.shape, v.aval.dtype) for p, v in zip(addresses, variables, strict=True)
        ]
        sizes = lambda addresses, variables: [
            (p, v.aval.nbytes) for p, v in zip(addresses, variables, strict=True)
        ]
        assert_disjoint(sizes(outs, self.eqn.outvars), sizes(operands, self.eqn.invars))
        results = self.eqn.prim.impl(*arrays(operands, self.eqn.invars), **self.eqn.params)
        results = results if self.eqn.prim.multiple_results else [results]
        for to, x in zip(arrays(outs, self.eqn.outvars), results, strict=True):
            to[...] = x


class Sort(Planned):
    """``sorting.rows.Sort``."""

    def _check(self, eqn):
        assert all(sorting.source(eqn, p) for p in sorting.passes(eqn))


class SmallMatrix(Planned):
    """``linalg.small.Launch``."""

    def _check(self, eqn):
        assert small_matrices.kernel(eqn, small_matrices.small(eqn))


def matrix_at(fake, address, shape, row, dtype=dtypes.bfloat16):
    """A matrix of two-byte elements, with the stride ``row`` of its rows in elements."""
    flat = fake.array(address, ((shape[0] - 1) * row + shape[1],), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, (2 * row, 2))


class PointwiseKernel:
    """``pointwise_gemm.Kernel`` by the definition of its primitive."""

    def __init__(self, fake, gemm, rows, device):
        assert gemm.whole and not gemm.n % 64
        assert all(row > 0 and not row % tile_gemm.VECTOR for row in rows)
        self.fake, self.gemm, self.rows = fake, gemm, rows

    def __call__(self, factors, others, stream):
        self.fake.products += 1
        self.fake.epilogues.append("pointwise")
        self.fake.do(lambda: ignoring_fp_errors(self._run, factors, others), stream.ptr)

    def _run(self, factors, others):
        p, e = self.gemm, self.gemm.epilogue
        shapes = (p.m, p.k), (p.n, p.k) if p.by_rows else (p.k, p.n)
        given_rows = zip(factors, shapes, self.rows, strict=True)
        a, b = (matrix_at(self.fake, *of) for of in given_rows)
        shape_of = {"matrix": (p.m, p.n), "scalar": ()}
        dtypes_of = {"float32": np.dtype(np.float32), "scalar": np.dtype(np.float32)}
        held = ["bfloat16"] * e.bias + list(p.kinds)
        operands = [
            self.fake.array(at, shape_of.get(kind, (p.n,)), dtypes_of.get(kind, dtypes.bfloat16))
            for at, kind in zip(others, held, strict=False)
        ]
        results = dot_pointwise_p.impl(
            a, b.T if p.by_rows else b, *operands, epilogue=e, dimension_numbers=(((1,), (0,)), ((), ())),
            precision=None, preferred_element_type=dtypes.bfloat16,
        )  # fmt: skip
        for at, result in zip(others[len(held) :], results, strict=True):
            self.fake.array(at, result.shape, result.dtype)[...] = result


class SkinnyKernel:
    """``skinny_gemm.Kernel`` by the definitions of its primitives."""

    def __init__(self, fake, gemm, rows, device):
        assert gemm.m <= 16 and not gemm.n % tile_gemm.VECTOR and not gemm.k % tile_gemm.VECTOR
        assert len(rows) == 1 + gemm.weights and (rows[0] == 0) == (gemm.rows is not None)
        assert all(row >= 0 and not row % tile_gemm.VECTOR for row in rows)
        self.fake, self.gemm, self.rows = fake, gemm, rows

    def __call__(self, factors, others, stream, overlaps=False):
        self.fake.products += 1
        self.fake.epilogues.append("skinny")
        self.fake.overlapped.append(overlaps)
        self.fake.do(lambda: ignoring_fp_errors(self._run, factors, others), stream.ptr)

    def _run(self, factors, others):
        p = self.gemm
        array = lambda at, kind, wide: self.fake.array(
            at, shape_of(p, kind), np.dtype(np.float32) if wide else p.dtype
        )
        if p.rows is None:
            arrays = [matrix_at(self.fake, factors[0], (p.m, p.k), self.rows[0], p.dtype)]
        else:
            arrays = [array(*given) for given in zip(factors, p.rows.kinds, p.wide, strict=False)]
        shape = (p.n, p.k) if p.by_terms else (p.k, p.n)
        weights = [
            matrix_at(self.fake, at, shape, row, p.dtype)
            for at, row in zip(factors[len(arrays) :], self.rows[1:], strict=True)
        ]
        wide = [p.out == np.float32] * (p.bias + p.addend) + [
            kind in ("float32", "scalar") for kind in p.kinds
        ]
        kinds = ["columns"] * p.bias + ["results"] * p.addend
        kinds += [{"matrix": "results", "scalar": "scalar"}.get(kind, "columns") for kind in p.kinds]
        operands = [array(*given) for given in zip(others, kinds, wide, strict=False)]
        results = skinny_results(p, arrays, [w.T if p.by_terms else w for w in weights], operands)
        for at, result in zip(others[len(kinds) :], results, strict=True):
            self.fake.array(at, result.shape, result.dtype)[...] = result


class QuantizedKernel:
    """``quantized_gemm.Kernel`` in NumPy."""

    def __init__(self, fake, gemm, device):
        assert 0 < gemm.m <= 16 and not gemm.k % quantized_gemm.TERMS and not gemm.n % 8
        self.fake, self.gemm = fake, gemm

    def __call__(self, addresses, stream, overlaps=False):
        self.fake.products += 1
        self.fake.epilogues.append("quantized")
        self.fake.overlapped.append(overlaps)
        self.fake.do(lambda: ignoring_fp_errors(self._run, addresses), stream.ptr)

    def _run(self, addresses):
        p, f32 = self.gemm, np.dtype(np.float32)
        shapes = {
            "x": ((p.m, p.k), p.dtype), "scale": ((p.n, 1), f32), "table": ((16,), f32), "out": ((p.m, p.n), p.dtype),
            "codes": ((p.n, p.k * p.bits // 8), np.dtype("uint8" if p.bits == 4 else "int8")),
            "levels": ((p.n, p.k // (p.block or p.k), 1), np.dtype("uint8") if p.bits == 4 else f32),
        }  # fmt: skip
        names = [name for _, name in quantized_gemm.parameters_of(p)]
        held = {name: self.fake.array(at, *shapes[name]) for name, at in zip(names, addresses, strict=True)}
        w = held["codes"]
        if p.bits == 4:
            w = held["table"][np.stack([w & 15, w >> 4], -1).reshape(p.n, p.k)]
        if p.block:
            levels = held["levels"].astype(f32) ** (2 if p.bits == 4 else 1)
            w = (w.reshape(p.n, -1, p.block) * levels).reshape(p.n, p.k)
        w = (w * held.get("scale", f32.type(1))).astype(p.dtype).astype(f32)
        held["out"][...] = (held["x"].astype(f32) @ w.T).astype(p.dtype)


def shape_of(p, kind):
    """The shape of an operand of a GEMM of few rows, by kind."""
    return {"matrix": (p.m, p.k), "vector": (p.k,), "scalar": (), "columns": (p.n,), "results": (p.m, p.n)}[
        kind
    ]


def skinny_results(p, arrays, weights, operands):
    """Results of a GEMM of few rows, by definition."""
    product = dot_pointwise_p if p.epilogue else dot_bias_p if p.bias else dot_accumulate_p
    how = {"epilogue": p.epilogue} if p.epilogue else {}
    return dot_rows_p.impl(
        *arrays, *weights, *operands, rows=p.rows, shape=(p.m, p.k), weights=p.weights,
        product=product if p.epilogue or p.bias or p.addend else dot_general_p,
        dimension_numbers=(((1,), (0,)), ((), ())), precision=None, preferred_element_type=p.out, **how,
    )  # fmt: skip


class SoftmaxKernel:
    """``cuda_softmax_step.Kernel`` by the definition of ``nn``."""

    def __init__(self, fake, product, rows, device):
        assert product.whole and not product.n % tile_gemm.VECTOR
        assert all(row > 0 and not row % tile_gemm.VECTOR for row in rows)
        self.fake, self.product, self.rows = fake, product, rows

    def __call__(self, factors, given, results, scratch, stream):
        self.fake.products += 1
        self.fake.epilogues.append("softmax")
        self.fake.do(lambda: ignoring_fp_errors(self._run, factors, given, results), stream.ptr)

    def _run(self, factors, given, results):
        p, f32 = self.product, np.dtype(np.float32)
        a = matrix_at(self.fake, factors[0], (p.m, p.k), self.rows[0])
        b = matrix_at(self.fake, factors[1], (p.n, p.k) if p.by_rows else (p.k, p.n), self.rows[1])
        types = (np.dtype(np.int32), np.dtype(bool), f32)
        known = [self.fake.array(at, (p.m,), t) for at, t in zip(given, types, strict=True)]
        found = vocabulary_loss_call._softmax(*map(bnp.asarray, (a, b, *known)), features=int(p.by_rows))
        for at, x in zip(results, found, strict=True):
            self.fake.array(at, x.shape, x.dtype)[...] = np.asarray(x)


class ConvolutionKernel:
    """``convolution.op.Kernel`` by the definition of its primitive."""

    def __init__(self, fake, eqn, device):
        assert implicit_gemm.source(convolution_of(eqn))
        self.fake, self.eqn = fake, eqn

    def __call__(self, addresses, stream):
        self.fake.products += 1
        self.fake.do(lambda: ignoring_fp_errors(self._run, addresses), stream)

    def _run(self, addresses):
        avals = [v.aval for v in (*self.eqn.invars, *self.eqn.outvars)]
        *operands, out = (
            self.fake.array(at, a.shape, a.dtype) for at, a in zip(addresses, avals, strict=True)
        )
        out[...] = self.eqn.prim.impl(*operands, **self.eqn.params)


class GroupedKernel:
    """``grouped.op.prepared`` by the definitions of its primitives."""

    def __init__(self, fake, gemm, device):
        assert grouped._text(gemm)
        self.fake, self.gemm, self.is_hopper = fake, gemm, isinstance(gemm, grouped.GroupedGemm)

    def __call__(self, factors, offsets, out, stream):
        self.fake.products += 1
        self.fake.epilogues.append("grouped on Hopper" if self.is_hopper else "grouped")
        self.fake.do(lambda: ignoring_fp_errors(self._run, factors, offsets, out), stream.ptr)

    def _run(self, factors, offsets, out):
        p = self.gemm
        if self.is_hopper:
            result = "float32" if p.wide else p.dtype
            rows = (1, p.other_row) if p.by_rows else (p.other_row, 1)
            a, b = (p.stack, p.row, 1), (p.other_stack, p.other_group, *rows)
        else:
            result, a, b = p.out, (*p.a, 1), p.b
        shapes = (p.stacks, p.m, p.k), (p.matrices, p.groups, p.k, p.n)
        if p.summed:
            shapes, b = (shapes[0], (p.stacks, p.m, p.n)), (b[0], *b[2:])
        dtype, result = dtypes.as_dtype(p.dtype), dtypes.as_dtype(result)
        given = zip(factors, shapes, (a, b), strict=True)
        operands = [self._array(at, shape, strides, dtype) for at, shape, strides in given]
        bounds = self.fake.array(offsets, (p.bounds, p.groups + 1), np.dtype(np.int32))
        operands = [*operands[:1], operands[1][0] if p.matrices == 1 and not p.summed else operands[1]]
        prim = ragged_contract_p if p.summed else ragged_dot_p
        bounds = bounds[0] if p.bounds == 1 else bounds
        found = prim.impl(*operands, bounds, precision=None, preferred_element_type=result)
        self.fake.array(out, found.shape, result)[...] = found

    def _array(self, at, shape, strides, dtype):
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self.fake.array(at, (last + 1,), dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, [dtype.itemsize * s for s in strides])


class LoopKernel:
    """``loops.op.Kernel`` by the definition of ``scan``."""

    def __init__(self, fake, eqn, device):
        self.fake, self.eqn = fake, eqn
        _, self.tiling = loops.loop_of(eqn)

    def __call__(self, addresses, scratch, stream):
        self.fake.loops += 1
        self.fake.do(lambda: ignoring_fp_errors(self._run, addresses, scratch), stream.ptr)

    def _run(self, addresses, scratch):
        eqn, n = self.eqn, len(self.eqn.invars)
        array = lambda at, aval: self.fake.array(at, aval.shape, aval.dtype)
        given = [array(at, a.aval).copy() for at, a in zip(addresses[:n], eqn.invars, strict=True)]
        array(scratch, ShapedArray((self.tiling.left_starts[-1],), dtypes.uint8))[...] = 0xCD
        on_host = [from_numpy(x, backend.host_device()) for x in given]
        found = eqn.prim.bind(*on_host, **eqn.params)
        for at, v, x in zip(addresses[n:], eqn.outvars, found, strict=True):
            array(at, v.aval)[...] = np.asarray(x)


class Recurrence:
    """``recurrence.op.Kernel`` by the definition of its primitive."""

    def __init__(self, fake, eqn, device):
        assert recurrence.source.source(eqn, recurrence._read(eqn))
        self.fake, self.eqn = fake, eqn

    def __call__(self, operands, chunks, results, stream):
        self.fake.recurrences += 1
        self.fake.do(lambda: ignoring_fp_errors(self._run, operands, results), stream.ptr)

    def _run(self, operands, results):
        eqn = self.eqn
        array = lambda at, v: self.fake.array(at, v.aval.shape, v.aval.dtype)
        given = [array(at, a).copy() for at, a in zip(operands, eqn.invars, strict=True)]
        body = eqn.params["jaxpr"]
        found = eval_jaxpr(body, [from_numpy(x, backend.host_device()) for x in given])
        read = [(v, x) for v, x in zip(eqn.outvars, found, strict=True) if not isinstance(v, DropVar)]
        for at, (v, x) in zip(results, read, strict=True):
            array(at, v)[...] = np.asarray(x)


class Attention:
    """``launch.Forward`` and ``Backward`` by the definitions of ``nn``, in float32."""

    def __init__(
        self, fake, backward, shape, dtype, strides, scale, causal, device, code, parts, summed=False
    ):
        assert cuda_attention.refused(shape, dtype, strides, "sm_90a", parts) is None
        self.parts, self.summed = parts, summed
        decodes = not backward and attention_decode.decodes(shape, causal, parts)
        sizes = cuda_attention.scratch_bytes(not backward, shape, "sm_90a", code, parts)
        self.needed = 0 if decodes else sum(sizes)
        self._start(fake, backward, shape, dtype, strides, scale, causal, code)

    def _start(self, fake, backward, shape, dtype, strides, scale, causal, code):
        self.fake, self.backward, self.shape, self.dtype, self.strides = fake, backward, shape, dtype, strides
        self.how = {"scale": scale, "is_causal": causal} | ({} if code.mods is None else {"mods": code.mods})
        s = shape
        numbers = [ShapedArray((n,), dtypes.int32) for n in (s.batch, s.heads)]
        self.extras = [] if code.mods is None else [*numbers, *code.tables]
        queries = (s.batch, s.queries, s.heads, s.features)
        keys = (s.batch, s.keys, s.key_heads, s.features)
        self.shapes = [queries, keys, keys, queries, queries, queries, keys, keys][: len(strides)]

    def __call__(self, addresses, scratch, stream, extras=(), overlaps=False):
        self.fake.products += 1
        self.fake.do(lambda: ignoring_fp_errors(self._run, addresses, scratch, extras), stream.ptr)

    def _run(self, addresses, scratch, extras):
        s = self.shape
        if self.needed:  # the kernel's own scratch memory
            self.fake.array(scratch, (self.needed,), np.dtype(np.uint8))[...] = 0xFF
        sums = addresses[-3:] if self.summed else []
        if self.backward:
            *given, dq, dk, dv = addresses[: len(addresses) - len(sums)]
            q, k, v, out, lse, dout, *split = given
            places, in_parts = [q, k, v, out, dout, dq, dk, dv], (0, 1, 2, 4)
        else:
            *given, out, lse = addresses
            q, k, v, *split = given
            places, in_parts = [q, k, v, out], (0, 1, 2)
        lse = self.fake.array(lse, (s.batch, s.heads, s.queries), np.dtype(np.float32))
        result = np.dtype(np.float32) if self.parts else self.dtype
        arrays, wide = [], []
        for i, (place, shape, strides) in enumerate(zip(places, self.shapes, self.strides, strict=True)):
            if self.parts and i in in_parts:
                *rest, unit = split[in_parts.index(i) :: len(in_parts)]
                parts = [self._view(p, shape, strides, self.dtype) for p in (place, *rest)]
                assert len(parts) == self.parts
                units = np.repeat(
                    self.fake.array(unit, (s.batch, s.key_heads), result), shape[2] // s.key_heads, 1
                )
                arrays.append(parts[0])
                wide.append(sum(p.astype(np.float32) for p in parts) * units[:, None, :, None])
            else:
                arrays.append(self._view(place, shape, strides, result))
                wide.append(arrays[-1].astype(np.float32))
        on_host = lambda x: bf.device_put(x, backend.host_device())
        wide = [on_host(x) for x in wide]
        tables = [
            on_host(self.fake.array(a, t.shape, t.dtype)) for a, t in zip(extras, self.extras, strict=True)
        ]
        if self.backward:
            q, k, v, out, dout = wide[:5]
            results = attention_call._backward(q, k, v, out, on_host(lse), dout, *tables, **self.how)
            for to, x in zip(arrays[5:], results, strict=True):
                to[...] = np.asarray(x).astype(result)
            for place, of, strides in zip(sums, arrays[5:], self.strides[5:], strict=bool(sums)):
                self._sum(place, of.astype(np.float32), strides)
            return
        out, sums = attention_call._forward(*wide[:3], *tables, **self.how)
        arrays[3][...] = np.asarray(out).astype(result)
        lse[...] = np.asarray(sums)

    def _sum(self, place, x, strides):
        """Write the sums of each 16 tokens, in rows like those of the gradients."""
        groups = -(-x.shape[1] // ROWS_OF_SUM)
        shape = (x.shape[0], groups, *x.shape[2:])
        to = self._view(place, shape, strides._replace(batch=groups * strides.token), np.dtype(np.float32))
        for group in range(groups):
            to[:, group] = x[:, group * ROWS_OF_SUM :][:, :ROWS_OF_SUM].sum(1)

    def _view(self, address, shape, strides, dtype):
        """An operand where its strides say."""
        last = sum((n - 1) * s for n, s in zip(shape, (*strides, 1), strict=True)) + 1
        flat = self.fake.array(address, (last,), dtype)
        steps = [s * dtype.itemsize for s in (*strides, 1)]
        return np.lib.stride_tricks.as_strided(flat, shape, steps)


class IeeeAttention(Attention):
    """``ieee.Forward`` and ``Backward`` by the definitions of ``nn``."""

    def __init__(self, fake, backward, shape, strides, scale, causal, device, code):
        assert ieee_attention.refused(shape, strides, "sm_90a", code) is None
        self.parts, self.summed = 0, False
        self.needed = sum(ieee_attention.scratch_bytes(not backward, shape, code))
        self._start(fake, backward, shape, np.dtype(np.float32), strides, scale, causal, code)


def constants_of(text):
    """The numbers that a text defines, by name."""
    found = re.findall(r"constexpr (?:int|bool) (\w+) = (\w+);", text)
    return {name: json.loads(value) for name, value in found if value.isdigit() or value in ("true", "false")}


def install(monkeypatch):
    """Put a ``FakeCuda`` in the place of CUDA, and return it."""
    fake = FakeCuda()
    properties = driver.DeviceProperties(0, "fake", (9, 0), 132, 1 << 30, 50 << 20, 227 << 10)
    for module, name, value in (
        (driver, "available", lambda: None),
        (driver, "require", lambda: None),
        (driver, "device_count", lambda: 1),
        (driver, "properties", lambda index=0: properties),
        (driver, "use_device", lambda index: None),
        (driver, "compute_stream", lambda index=0: fake.stream),
        (driver, "synchronize", lambda index=0: None),
        (driver, "copy_in", fake.copy_in),
        (driver, "copy_out", fake.copy_out),
        (driver, "copy_out_aside", fake.copy_out_aside),
        (driver, "follow_aside", lambda index: None),
        (driver, "copy_on_device", fake.copy),
        (driver, "copy_all_on_device", lambda copies, stream: [fake.copy(*c, stream) for c in copies]),
        (driver, "fill_zero", fake.fill_zero),
        (driver, "transfer", fake.transfer),
        (driver, "read_pinned", fake.read_pinned),
        (driver, "write_pinned", fake.write_pinned),
        (driver, "copy_streams", lambda index=0: fake.copy_streams),
        (driver, "side_streams", fake.side_streams),
        (cuda_memory, "_pinned", {0: fake.pinned_pool}),
        (driver, "recorded", fake.recorded),
        (driver, "on_device", lambda index: contextlib.nullcontext()),
        (driver, "followed_by", fake.followed_by),
        (driver, "follow", lambda stream, index: fake.ordered.append(("before", stream))),
        (driver, "device_of_address", lambda address: 0),
        (driver, "seconds_between", lambda start, stop: (stop - start) / 1e3),
        (cuda_memory, "_pools", {0: fake.pool}),
        (cuda_memory, "_gather", fake.gather),
        (borrowed, "_waiting", collections.deque()),
        (cupy_ops, "run", fake.library),
        (executor, "_captured", fake.captured),
        (cuda_graph, "capture", fake.capture),
        (conditional, "why_not", lambda: None),
        (conditional, "condition", fake.condition),
        (conditional, "add", fake.conditional),
        (cublaslt, "Plan", lambda gemm, device, addresses: Plan(fake, gemm, addresses)),
        (sorting, "Sort", functools.partial(Sort, fake)),
        (small_matrices, "Launch", functools.partial(SmallMatrix, fake)),
        (convolutions, "Kernel", functools.partial(ConvolutionKernel, fake)),
        (grouped, "prepared", functools.partial(GroupedKernel, fake)),
        (updates, "Kernel", functools.partial(Update, fake)),
        (scatter, "prepared", functools.partial(Scatter, fake)),
        (pointwise_gemm, "Kernel", functools.partial(PointwiseKernel, fake)),
        (skinny_gemm, "Kernel", functools.partial(SkinnyKernel, fake)),
        (quantized_gemm, "Kernel", functools.partial(QuantizedKernel, fake)),
        (softmax_gemm, "Kernel", functools.partial(SoftmaxKernel, fake)),
        (attention_decode, "Decode", functools.partial(Attention, fake, False)),
        (loops, "Kernel", functools.partial(LoopKernel, fake)),
        (recurrence, "Kernel", functools.partial(Recurrence, fake)),
        (cuda_attention_launch, "Forward", functools.partial(Attention, fake, False)),
        (cuda_attention_launch, "Backward", functools.partial(Attention, fake, True)),
        (ieee_attention, "Forward", functools.partial(IeeeAttention, fake, False)),
        (ieee_attention, "Backward", functools.partial(IeeeAttention, fake, True)),
        (modules, "load", fake.load),
        (modules, "load_source", fake.load_source),
        (backend, "_backends", {**backend._backends, "cuda": cuda_backend.CudaBackend()}),
        (backend, "_default", {}),
        (collectives, "_number", functools.cache(collectives._number.__wrapped__)),
    ):
        monkeypatch.setattr(module, name, value)
    return fake
