"""``scan`` and ``while`` on a CUDA device, driven by the host or by a graph.

Kernels, stages 6 and 8. In: the equation of a loop. Out: a function of buffers. In a graph a short scan is its steps in
a row; longer ones and ``while`` are a node that repeats, whose condition a kernel sets. A round of a scan then runs
some tens of its steps. Outside of a graph the host launches the first rounds, which also load and tune what they
launch, and makes a graph for the others: what it costs is what the first rounds took.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

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
from blufunc.kernels.backends.cuda.library.control_flow.bodies import exchanges, nested
from blufunc.kernels.backends.cuda.library.control_flow.moves import Rows, copied
from blufunc.kernels.backends.cuda.library.library_kernel import Body, Compile

HOST_ROUNDS = 16
"""Rounds that the host drives before it makes a graph for the others."""

MOST_NODES = 2048
"""Launches of a scan whose steps a graph holds in a row."""

_ROUND_NODES, MOST_STEPS = 256, 64
"""Launches of a round of a longer scan, about, and its steps: a round costs four microseconds on an H200."""

_ALIGNMENT = 256


def why_no_node(eqn: Eqn) -> str | None:
    """Reason that a loop or branch cannot be a node of a graph; None if it can."""
    if any(exchanges(n.jaxpr) for n in nested(eqn)):
        return "it has collectives"
    return conditional.why_not()


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
        self.launches = body.launches + 1
        self._graph: tuple[tuple, cuda_graph.Graph, list, list] | None = None

    def _by_graph(
        self, moving: Sequence[DeviceBuffer], fixed: Sequence[DeviceBuffer], rest: Callable[..., list]
    ) -> list[DeviceBuffer] | None:
        """The results of ``rest(moving)`` by a graph of it; None if CUDA cannot capture that.

        The graph serves later calls with the same ``fixed`` buffers.
        """
        key = tuple(x.ptr for x in fixed)
        stream = driver.compute_stream(self.device)
        if self._graph is None or self._graph[0] != key:
            self._graph = None
            own = [self.body.own(ShapedArray(x.shape, x.dtype), "what a loop carries") for x in moving]
            results: list[DeviceBuffer] = []
            given = [(own, rest)]  # let go of after the capture: the graph keeps no argument alive
            try:
                graph = cuda_graph.capture(lambda _: results.extend(given[0][1](given[0][0])), self.device)
            except errors.BlufuncError:
                raise
            except RuntimeError as e:  # base class of CUDA errors
                self.captured = False
                if config.shows("launch"):
                    config.show(f"the host drives a loop: {type(e).__name__}: {e}")
                return None
            given.clear()
            self._graph = key, graph, own, results
        _, graph, own, results = self._graph
        for to, x in zip(own, moving, strict=True):
            driver.copy_on_device(to.ptr, x.ptr, x.nbytes, stream)
        graph.launch()
        return [copied(x, self.body) for x in results]

    def _counter(self) -> DeviceBuffer:
        return self.body.own(ShapedArray((), dtypes.int64), "the rounds of a loop")

    def _is_capturing(self) -> bool:
        return driver.is_capturing(driver.work_stream(self.device).ptr)


class While(_Loop):
    """A ``while``: a round computes the next carry, and whether there is another one."""

    def __init__(self, eqn: Eqn, device: int, compile: Compile):
        condition, (round_, self._donated) = nested(eqn)
        self._holds = compile(condition.jaxpr)
        super().__init__(eqn, device, compile(round_, self._donated))
        self.captured &= self._holds.captured
        self._n_cond, self._n_consts = eqn.params["n_cond"], eqn.params["n_cond"] + eqn.params["n_body"]
        self._most = eqn.params["max_steps"]

    def __call__(self, given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        consts, carry = given[: self._n_consts], given[self._n_consts :]
        if self._is_capturing():
            return self._as_node(consts, carry, self._most)
        holds = self._first(consts, carry)
        others = given
        steps = 0
        while steps != self._most and bool(cuda_memory.to_host(holds)):
            if steps == HOST_ROUNDS and self.captured and config.cuda_graphs:
                made = self._by_graph(carry, consts, functools.partial(self._left, consts))
                if made is not None:
                    return made
            carry = apart_from(others, carry, self._donated[self._n_consts :], self.body)
            others = consts
            *carry, holds = self.body([*consts, *carry])
            steps += 1
        return carry

    def _left(self, consts: Sequence[DeviceBuffer], start: Sequence[DeviceBuffer]) -> list[DeviceBuffer]:
        """Put the rounds that the host leaves into the graph that is being captured."""
        return self._as_node(consts, start, None if self._most is None else self._most - HOST_ROUNDS)

    def _first(self, consts: Sequence[DeviceBuffer], carry: Sequence[DeviceBuffer]) -> DeviceBuffer:
        """Whether there is a first round."""
        return self._holds([*consts[: self._n_cond], *carry])[0]

    def _as_node(
        self, consts: Sequence[DeviceBuffer], start: Sequence[DeviceBuffer], most: int | None
    ) -> list[DeviceBuffer]:
        """Put the loop into the graph that is being captured."""
        stream, body = driver.work_stream(self.device), self.body
        carry, rounds = [copied(x, body) for x in start], self._counter()
        handle = conditional.condition(stream)
        holds = self._first(consts, carry)
        moves.next_round(handle, holds, rounds, most, self.device, (), body, first=True)

        def run() -> None:
            *new, holds = body([*consts, *carry])
            pairs = list(zip(carry, new, strict=True))
            moves.next_round(handle, holds, rounds, most, self.device, pairs, body)

        conditional.add(stream, handle, conditional.WHILE, run, self.device)
        return carry


class Scan(_Loop):
    """A ``scan``: inputs are views of their rows, outputs are copied into results."""

    def __init__(self, eqn: Eqn, device: int, compile: Compile):
        ((jaxpr, self._donated),) = nested(eqn)
        super().__init__(eqn, device, compile(jaxpr, self._donated))
        p = eqn.params
        self._n_consts, self._n_carry, self._length = p["n_consts"], p["n_carry"], p["length"]
        self._reverse = p["reverse"]
        self._ys = [ShapedArray((self._length, *a.shape), a.dtype) for a in jaxpr.out_avals[self._n_carry :]]
        self._repeats = self.captured and self._length * self.body.launches > MOST_NODES
        self.captured = self.body.captured  # its steps in a row need no such node
        self.launches = _ROUND_NODES if self._repeats else self._length * self.body.launches

    def __call__(self, given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        consts, rest = given[: self._n_consts], given[self._n_consts :]
        carry, xs = rest[: self._n_carry], rest[self._n_carry :]
        ys = [self.body.own(aval, "results of scan") for aval in self._ys]
        if self._is_capturing() and self._repeats:
            return [*self._as_node(consts, carry, xs, ys, 0), *ys]
        stops = self._repeats and config.cuda_graphs and not self._is_capturing()
        steps = HOST_ROUNDS if stops else self._length
        carry = self._in_a_row(given, consts, carry, xs, ys, range(steps))
        if not stops:
            return [*carry, *ys]
        run = lambda start: self._as_node(consts, start, xs, ys, steps)
        made = self._by_graph(carry, [*consts, *xs, *ys], run)
        if made is None:
            made = self._in_a_row(given, consts, carry, xs, ys, range(steps, self._length))
        return [*made, *ys]

    def _row(self, step: int) -> int:
        return self._length - 1 - step if self._reverse else step

    def _in_a_row(
        self,
        others: Sequence[DeviceBuffer],
        consts: Sequence[DeviceBuffer],
        carry: Sequence[DeviceBuffer],
        xs: Sequence[DeviceBuffer],
        ys: Sequence[DeviceBuffer],
        steps: range,
    ) -> list[DeviceBuffer]:
        """The carry after some steps; ``others`` are not written."""
        stream = driver.work_stream(self.device)
        for step in steps:
            i = self._row(step)
            carry = apart_from(others, carry, self._donated[self._n_consts :], self.body)
            others = [*consts, *xs]
            outs = self.body([*consts, *carry, *[row(x, i) for x in xs]])
            carry = list(outs[: self._n_carry])
            for y, out in zip(ys, outs[self._n_carry :], strict=True):
                driver.copy_on_device(y.ptr + i * out.nbytes, out.ptr, out.nbytes, stream)
        return list(carry)

    def _as_node(
        self,
        consts: Sequence[DeviceBuffer],
        start: Sequence[DeviceBuffer],
        xs: Sequence[DeviceBuffer],
        ys: Sequence[DeviceBuffer],
        first: int,
    ) -> list[DeviceBuffer]:
        """Put the steps from ``first`` on into the graph that is being captured."""
        stream, body, device = driver.work_stream(self.device), self.body, self.device
        carry, rounds = [copied(x, body) for x in start], self._counter()
        together = max(1, min(MOST_STEPS, _ROUND_NODES // body.launches))
        most, left = divmod(self._length - first, together)
        loads = [x for x in xs if x.nbytes]
        inside = {id(x): self._staged(x, together) for x in loads}
        handle = conditional.condition(stream)
        moves.next_round(handle, None, rounds, most, device, (), body, first=True)
        way = -1 if self._reverse else 1
        from_last = self._row(first + together - 1) if self._reverse else self._row(first)

        def run() -> None:
            stacks = [Rows(x, inside[id(x)][0].ptr, inside[id(x)][1]) for x in loads]
            moves.move_rows(stacks, rounds, from_last, way * together, together, True, device)
            now: Sequence[DeviceBuffer] = carry
            for step in range(together):
                i = together - 1 - step if self._reverse else step
                rows = [_part(x, i, *inside[id(x)]) if x.nbytes else row(x, 0) for x in xs]
                outs = body([*consts, *now, *rows])
                now = outs[: self._n_carry]
                results = zip(ys, outs[self._n_carry :], strict=True)
                stores = [Rows(y, out.ptr, out.nbytes) for y, out in results if y.nbytes]
                moves.move_rows(stores, rounds, self._row(first + step), way * together, 1, False, device)
            moves.next_round(handle, None, rounds, most, device, list(zip(carry, now, strict=True)), body)

        conditional.add(stream, handle, conditional.WHILE, run, device)
        done = self._length - left
        return self._in_a_row([*consts, *xs], consts, carry, xs, ys, range(done, self._length))

    def _staged(self, x: DeviceBuffer, rows: int) -> tuple[DeviceBuffer, int]:
        """Memory for rows of an input, and the bytes from one to the next, which is aligned."""
        apart = -(-x.nbytes // x.shape[0] // _ALIGNMENT) * _ALIGNMENT
        return self.body.own(ShapedArray((rows * apart,), dtypes.uint8), "rows of a scan"), apart


def row(x: DeviceBuffer, i: int) -> DeviceBuffer:
    """``x[i]``, a view."""
    shape = x.shape[1:]
    return x.view(shape, x.dtype, i * math.prod(shape) * x.dtype.itemsize)


def _part(x: DeviceBuffer, i: int, staged: DeviceBuffer, apart: int) -> DeviceBuffer:
    """Row ``i`` of the rows of ``x`` in staged memory."""
    return staged.view(x.shape[1:], x.dtype, i * apart)


def apart_from(
    others: Sequence[DeviceBuffer], carry: Sequence[DeviceBuffer], donated: Sequence[bool], body: Body
) -> list[DeviceBuffer]:
    """Carries whose donated buffers alias no other argument; those that do are copied."""
    pairs = list(zip(carry, donated, strict=False))
    taken = {x.memory for x in (*others, *[x for x, given in pairs if not given])} if any(donated) else set()
    out = []
    for x, given in pairs:
        if given and x.memory in taken:
            x = copied(x, body)
        taken.add(x.memory)
        out.append(x)
    return out
