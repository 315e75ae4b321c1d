"""``scan`` and ``while`` on a CUDA device, driven by the host or by a graph.

Kernels, stages 6 and 8. In: the equation of a loop. Out: a function of buffers. In a graph a short scan is unrolled;
longer ones and ``while`` are a node that repeats, whose condition a kernel sets. A round of a scan then runs some tens
of its steps. Outside of a graph the host launches the first rounds, which also load and tune their kernels. Then it
captures a graph of the others, for about the time that these rounds took.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import conditional, driver
from blufunc.kernels.backends.cuda.driver import graph as cuda_graph
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.library.control_flow import moves
from blufunc.kernels.backends.cuda.library.control_flow.bodies import has_collectives, nested
from blufunc.kernels.backends.cuda.library.control_flow.moves import Stack, copied
from blufunc.kernels.backends.cuda.library.library_kernel import Body, Compile

HOST_ROUNDS = 16
"""Rounds that the host drives before it captures a graph of the others."""

_PATIENT_ROUNDS = 128
"""The same, if addresses have changed since a graph was captured."""

MOST_NODES = 2048
"""Nodes of a scan that is unrolled into a graph, at most."""

_ROUND_NODES, MOST_STEPS = 256, 64
"""Nodes of a round of a longer scan, about, and its steps, at most."""
# measured: a round costs 4 us on an H100 and on an H200, a node of a graph 1.1 us

_STAGED_BYTES = 1 << 20
"""Maximum bytes of a constant that is copied for a graph.

The graph then serves calls with other ones.
"""

_ALIGNMENT = 256

Buffers = Sequence[DeviceBuffer]


def why_no_node(eqn: Eqn) -> str | None:
    """Reason that a loop or branch cannot be a node of a graph; None if it can."""
    if any(has_collectives(n.jaxpr) for n in nested(eqn)):
        return "it has collectives"
    return conditional.why_not()


class _Captured(NamedTuple):
    """A graph of a loop.

    Attributes:
      key: addresses that it holds, and what else was fixed.
      staged: its own buffers, which arguments are copied to.
      results: buffers that it writes.
    """

    key: tuple
    graph: cuda_graph.Graph
    staged: list[DeviceBuffer]
    results: list[DeviceBuffer]


class _Loop:
    """A loop of one executor.

    Attributes:
      body: its round, as a program.
      captured: whether a graph can hold it.
      launches: number of nodes that it adds to a graph, about.
    """

    def __init__(self, eqn: Eqn, device: int, body: Body):
        self.device, self.body = device, body
        self.captured = body.captured and why_no_node(eqn) is None
        self.launches = body.launches + 2
        if self.captured:
            moves.prepare(device)
        self._own: _Captured | None = None
        self._refused = False

    def _host_rounds(self, fixed: Buffers) -> int | None:
        """Rounds that the host drives before a graph; None: all."""
        if self._refused or not (self.captured and config.cuda_graphs):
            return None
        moved = self._own is not None and self._own.key[0] != _addresses(fixed)
        return _PATIENT_ROUNDS if moved else HOST_ROUNDS

    def _by_graph(
        self, moving: Buffers, fixed: Buffers, rest: Callable[[list[DeviceBuffer]], list], detail: object
    ) -> list[DeviceBuffer] | None:
        """Results of the rounds that are left, by a graph; None if it cannot be captured.

        Args:
          moving: buffers that are copied to staging buffers first.
          fixed: buffers whose addresses the graph holds.
          rest: captures the rounds, given the staging buffers, which it may overwrite.
          detail: what else the capture depends on.
        """
        key = (_addresses(fixed), detail)
        try:
            if self._own is None or self._own.key != key:
                self._own = None
                self._own = self._capture(key, moving, fixed, rest)
        except (errors.OutOfMemoryError, MemoryError) as e:
            self._refuse(e)
            return None
        except errors.BlufuncError:
            raise
        except RuntimeError as e:  # base class of CUDA errors
            self._refuse(e)
            return None
        stream = driver.compute_stream(self.device)
        for to, x in zip(self._own.staged, moving, strict=True):
            driver.copy_on_device(to.ptr, x.ptr, x.nbytes, stream)
        self._own.graph.launch()
        return [copied(x, self.body) for x in self._own.results]

    def _capture(self, key: tuple, moving: Buffers, fixed: Buffers, rest: Callable) -> _Captured:
        staged = [self.body.own(ShapedArray(x.shape, x.dtype), "what a loop carries") for x in moving]
        results: list[DeviceBuffer] = []
        kept = {x.memory for x in fixed}
        functions = [rest]  # emptied after the capture: the graph must not keep arguments alive

        def run(_: object) -> None:
            results.extend(copied(x, self.body) if x.memory in kept else x for x in functions[0](staged))

        graph = cuda_graph.capture(run, self.device)
        functions.clear()
        return _Captured(key, graph, staged, results)

    def _refuse(self, e: BaseException) -> None:
        self._refused, self._own = True, None
        if config.shows("launch"):
            config.show(f"the host drives a loop: {type(e).__name__}: {e}")

    def _counter(self) -> DeviceBuffer:
        return self.body.own(ShapedArray((), dtypes.int64), "the rounds of a loop")

    def _is_capturing(self) -> bool:
        """True if an enclosing program is being captured."""
        if not driver.is_capturing(driver.work_stream(self.device).ptr):
            return False
        self._own = None  # the graph of the program replaces it
        return True


class While(_Loop):
    """A ``while``: a round computes the next carry, and whether there is another one."""

    def __init__(self, eqn: Eqn, device: int, compile: Compile):
        condition, (jaxpr, donated) = nested(eqn)
        self._condition = compile(condition.jaxpr)
        super().__init__(eqn, device, compile(jaxpr, donated))
        self.captured &= self._condition.captured
        self.launches += self._condition.launches
        self._n_cond, self._n_consts = eqn.params["n_cond"], eqn.params["n_cond"] + eqn.params["n_body"]
        self._max_steps = eqn.params["max_steps"]
        self._donated = donated[self._n_consts :]

    def __call__(self, operands: list[DeviceBuffer]) -> list[DeviceBuffer]:
        consts, carry = operands[: self._n_consts], operands[self._n_consts :]
        if self._is_capturing():
            return self._as_node(consts, [copied(x, self.body) for x in carry], self._max_steps)
        large, small = _divided(consts)
        host_rounds = self._host_rounds(large)
        predicate = self._first(consts, carry)
        used = operands  # buffers that the next round must not overwrite
        steps = 0
        while steps != self._max_steps and bool(cuda_memory.to_host(predicate)):
            if steps == host_rounds:
                left = None if self._max_steps is None else self._max_steps - steps
                rest = functools.partial(self._rest, consts, len(small), left)
                results = self._by_graph([*small, *carry], large, rest, left)
                if results is not None:
                    return results
            carry = unaliased(used, carry, self._donated, self.body)
            used = consts
            *carry, predicate = self.body([*consts, *carry])
            steps += 1
        return carry

    def _first(self, consts: Buffers, carry: Buffers) -> DeviceBuffer:
        """Whether there is a first round."""
        return self._condition([*consts[: self._n_cond], *carry])[0]

    def _rest(
        self, consts: Buffers, n_small: int, left: int | None, staged: list[DeviceBuffer]
    ) -> list[DeviceBuffer]:
        """Put the rounds that are left into the graph that is being captured."""
        return self._as_node(_joined(consts, staged[:n_small]), staged[n_small:], left)

    def _as_node(self, consts: Buffers, carry: Buffers, max_steps: int | None) -> list[DeviceBuffer]:
        """Put the loop into the graph that is being captured, over a carry of its own."""
        stream, body, device = driver.work_stream(self.device), self.body, self.device
        rounds, handle = self._counter(), conditional.condition(stream)
        predicate = self._first(consts, carry)
        moves.next_round(handle, predicate, rounds, max_steps, device, (), body, first=True)

        def run() -> None:
            *new, predicate = body([*consts, *carry])
            pairs = list(zip(carry, new, strict=True))
            moves.next_round(handle, predicate, rounds, max_steps, device, pairs, body)

        conditional.add(stream, handle, conditional.WHILE, run, device)
        return list(carry)


class Scan(_Loop):
    """A ``scan``: inputs are views of their rows, outputs are copied into results."""

    def __init__(self, eqn: Eqn, device: int, compile: Compile):
        ((jaxpr, donated),) = nested(eqn)
        super().__init__(eqn, device, compile(jaxpr, donated))
        p = eqn.params
        self._n_consts, self._n_carry, self._length = p["n_consts"], p["n_carry"], p["length"]
        self._reverse = p["reverse"]
        self._donated = donated[self._n_consts :]
        self._ys = [ShapedArray((self._length, *a.shape), a.dtype) for a in jaxpr.out_avals[self._n_carry :]]
        rows = [v.aval for v in jaxpr.invars[self._n_consts + self._n_carry :]]
        # a copy per output, and per input whose rows are not aligned
        copies = len(self._ys) + sum(a.nbytes % _ALIGNMENT > 0 for a in rows)
        nodes = self._length * max(1, self.body.launches + copies)
        self._repeats = self.captured and nodes > MOST_NODES
        self._steps_per_round = max(1, min(MOST_STEPS, _ROUND_NODES // (self.body.launches + 1)))
        self.captured = self.body.captured  # unrolled, it needs no node that repeats
        self.launches = _ROUND_NODES if self._repeats else nodes

    def __call__(self, operands: list[DeviceBuffer]) -> list[DeviceBuffer]:
        consts, rest = operands[: self._n_consts], operands[self._n_consts :]
        carry, xs = rest[: self._n_carry], rest[self._n_carry :]
        ys = [self.body.own(aval, "results of scan") for aval in self._ys]
        if self._is_capturing() and self._repeats:
            own = [copied(x, self.body) for x in carry]
            return [*self._as_node(consts, xs, ys, 0, own), *ys]
        fixed = [*consts, *xs, *ys]
        steps = self._host_rounds(fixed) if self._repeats and not self._is_capturing() else None
        if steps is None or steps >= self._length:
            return [*self._unrolled(operands, consts, carry, xs, ys, range(self._length)), *ys]
        carry = self._unrolled(operands, consts, carry, xs, ys, range(steps))
        left = functools.partial(self._as_node, consts, xs, ys, steps)
        results = self._by_graph(carry, fixed, left, steps)
        if results is None:
            results = self._unrolled(operands, consts, carry, xs, ys, range(steps, self._length))
        return [*results, *ys]

    def _row(self, step: int) -> int:
        return self._length - 1 - step if self._reverse else step

    def _unrolled(
        self, used: Buffers, consts: Buffers, carry: Buffers, xs: Buffers, ys: Buffers, steps: range
    ) -> list[DeviceBuffer]:
        """Carry after some steps; ``used`` are not overwritten."""
        stream = driver.work_stream(self.device)
        for step in steps:
            i = self._row(step)
            carry = unaliased(used, carry, self._donated, self.body)
            used = [*consts, *xs]
            outs = self.body([*consts, *carry, *[row(x, i) for x in xs]])
            carry = list(outs[: self._n_carry])
            for y, out in zip(ys, outs[self._n_carry :], strict=True):
                driver.copy_on_device(y.ptr + i * out.nbytes, out.ptr, out.nbytes, stream)
        return list(carry)

    def _as_node(
        self, consts: Buffers, xs: Buffers, ys: Buffers, first: int, carry: Buffers
    ) -> list[DeviceBuffer]:
        """Put the steps from ``first`` on into the graph that is being captured.

        Args:
          carry: buffers of its own, which it overwrites.
        """
        stream, body, device = driver.work_stream(self.device), self.body, self.device
        count = self._steps_per_round
        rounds, handle = self._counter(), conditional.condition(stream)
        full_rounds, left = divmod(self._length - first, count)
        staged = [self._staged(x) for x in xs]
        moves.next_round(handle, None, rounds, full_rounds, device, (), body, first=True)
        direction = -1 if self._reverse else 1
        lowest = min(self._row(first), self._row(first + count - 1))

        def run() -> None:
            loads = [s for s in staged if s.array.nbytes]
            moves.move_rows(loads, rounds, lowest, direction * count, count, True, device)
            now: Buffers = carry
            for step in range(count):
                rows = [s.row(count - 1 - step if self._reverse else step) for s in staged]
                now = unaliased([*consts, *rows], now, self._donated, body)
                outs = body([*consts, *now, *rows])
                now = outs[: self._n_carry]
                pairs = zip(ys, outs[self._n_carry :], strict=True)
                stores = [Stack(y, out, out.nbytes) for y, out in pairs if y.nbytes]
                moves.move_rows(stores, rounds, self._row(first + step), direction * count, 1, False, device)
            moves.next_round(
                handle, None, rounds, full_rounds, device, list(zip(carry, now, strict=True)), body
            )

        conditional.add(stream, handle, conditional.WHILE, run, device)
        steps = range(self._length - left, self._length)
        return self._unrolled([*consts, *xs], consts, carry, xs, ys, steps)

    def _staged(self, x: DeviceBuffer) -> Stack:
        """Memory for the rows of an input that a round reads, each aligned."""
        stride = -(-x.nbytes // x.shape[0] // _ALIGNMENT) * _ALIGNMENT
        nbytes = self._steps_per_round * stride
        return Stack(x, self.body.own(ShapedArray((nbytes,), dtypes.uint8), "rows of a scan"), stride)


def _addresses(buffers: Buffers) -> tuple[int, ...]:
    return tuple(x.ptr for x in buffers)


def _divided(consts: Buffers) -> tuple[list[DeviceBuffer], list[DeviceBuffer]]:
    """Large constants, whose addresses a graph holds, and those that are staged."""
    return [x for x in consts if x.nbytes > _STAGED_BYTES], [x for x in consts if x.nbytes <= _STAGED_BYTES]


def _joined(consts: Buffers, staged: Buffers) -> list[DeviceBuffer]:
    """All constants, in order, with the small ones in staging buffers."""
    small = iter(staged)
    return [x if x.nbytes > _STAGED_BYTES else next(small) for x in consts]


def row(x: DeviceBuffer, i: int) -> DeviceBuffer:
    """``x[i]``, a view."""
    shape = x.shape[1:]
    return x.view(shape, x.dtype, i * math.prod(shape) * x.dtype.itemsize)


def unaliased(used: Buffers, carry: Buffers, donated: Sequence[bool], body: Body) -> list[DeviceBuffer]:
    """Carries whose donated buffers share memory with nothing else; others are copied."""
    pairs = list(zip(carry, donated, strict=False))
    memory = {x.memory for x in (*used, *[x for x, given in pairs if not given])} if any(donated) else set()
    out = []
    for x, given in pairs:
        if given and x.memory in memory:
            x = copied(x, body)
        memory.add(x.memory)
        out.append(x)
    return out
