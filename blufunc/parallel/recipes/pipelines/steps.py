"""The loop over the phases of a pipeline's schedule.

Shared by ``pipeline.py``. In: a table (``schedule.py``), the passes of a stage (``stage.py``), and
microbatches. Out: loss and gradients of this rank. Ticks with the same kinds of operations are rounds of one loop. Rows
of the table say which microbatch, chunk and slots a rank has. In a phase of one kind every rank computes; one that has
nothing to do computes on stale data, and its results are ignored. Where ranks differ, each runs its branch. Collectives
over the axis of stages run outside of these branches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.programs import simplify
from blufunc.core.pytree import tree
from blufunc.parallel.recipes.gradients import Reducers
from blufunc.parallel.recipes.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from blufunc.parallel.recipes.pipelines.stage import NAME, Model, Stage, at
from blufunc.parallel.recipes.typed import Like, current_trace, element, likes, typed_jaxpr
from blufunc.parallel.recipes.varying import Ring
from blufunc.transforms.autodiff.grad import value_and_grad, vjp


class _State(NamedTuple):
    """The state carried from tick to tick.

    Attributes:
      x, ct: received from the previous and the next rank.
      saved, kept: for each residual, and each value between the halves of a backward pass, its slots.
      value, shared, layers: the accumulated loss and gradients.
    """

    x: Any
    ct: Any
    saved: list
    kept: list
    value: Any
    shared: list
    layers: list


class _Row(NamedTuple):
    """The operation of this rank in a phase: int32 scalars; see ``Schedule``."""

    op: Any
    chunk: Any
    microbatch: Any
    written: Any
    read: Any
    kept: Any
    taken: Any


class _Ends(NamedTuple):
    """The state of the pipeline's ends in a phase, the same on all ranks.

    Attributes:
      at_end: whether the last rank finishes a microbatch, which is ``leaving``.
      at_start: whether the first rank starts a microbatch, or has its cotangent; it is ``entering``.
    """

    at_end: Any
    leaving: Any
    at_start: Any
    entering: Any


def run(
    schedule: Schedule,
    model: Model,
    shared: Any,
    layers: Any,
    microbatches: Any,
    ring: Ring,
    sync: Reducers,
) -> tuple:
    """The loss on the last rank, and this rank's share of the gradients.

    Args:
      layers: leaves [chunks, ...] if there are several chunks.
    """
    return _Steps(schedule, model, shared, layers, microbatches, ring, sync).run()


class _Steps:
    """The phases of a schedule on one rank."""

    def __init__(
        self,
        schedule: Schedule,
        model: Model,
        shared: Any,
        layers: Any,
        microbatches: Any,
        ring: Ring,
        sync: Reducers,
    ):
        self.schedule, self.model, self.ring, self.sync = schedule, model, ring, sync
        self.shared, self.layers, self.microbatches = shared, layers, microbatches
        self.rank = lax.axis_index(ring.axis)
        trace = current_trace(NAME)
        chunk = (likes if schedule.chunks == 1 else element)(layers, trace)
        halves = bool((schedule.ops == WEIGHT).any())
        self.stage = Stage(model, shared, chunk, microbatches, ring, halves=halves)
        of_x = self.stage.of_x
        if model.sharded_ends:
            at_axis = trace.mesh.axis_names.index(ring.axis)
            of_x = Like(of_x.aval, tuple("I" if i == at_axis else t for i, t in enumerate(of_x.types)))
        of_shared, of_m = likes(shared, trace), element(microbatches, trace)
        self.head, _, _ = typed_jaxpr(value_and_grad(model.loss, (0, 1)), (of_shared, of_x, of_m), NAME)
        self.tail = self._transposed_embedding(of_shared, of_m, of_x) if model.sharded_ends else None
        self.parameters = self.stage.parameters(shared, layers, self.rank, schedule.chunks)

    def _transposed_embedding(self, of_shared: Any, of_m: Any, of_x: Like) -> Jaxpr:
        def transposed(shared: Any, m: Any, ct: Any) -> Any:
            return vjp(lambda p: self.model.embed(p, m), shared)[1](ct)[0]

        return simplify.dce(typed_jaxpr(transposed, (of_shared, of_m, of_x), NAME)[0])

    def run(self) -> tuple:
        """Run all phases."""
        of_x, n_slots = self.stage.of_x.aval, (self.schedule.slots, self.schedule.kept_slots)
        slots = lambda avals, n: [bnp.zeros((n, *a.shape), a.dtype) for a in avals]
        state = _State(
            x=bnp.zeros(of_x.shape, of_x.dtype),
            ct=bnp.zeros(of_x.shape, of_x.dtype),
            saved=slots(self.stage.saved, n_slots[0]),
            kept=slots(self.stage.kept, n_slots[1]),
            value=bnp.zeros((), self.head.out_avals[0].dtype),
            shared=self.sync[0].zeros(self.shared),
            layers=self.sync[1].zeros(self.layers),
        )
        for ticks in _grouped(self.schedule):
            state = self._loop(state, np.array(ticks))
        of_shared = tree.unflatten(tree.structure(self.shared), state.shared)
        return state.value, (of_shared, tree.unflatten(tree.structure(self.layers), state.layers))

    def _loop(self, state: _State, phases: np.ndarray) -> _State:
        """Ticks of the same kinds; ``phases`` has their numbers, [ticks, phases of one]."""
        s = self.schedule
        kinds = [s.kinds(p) for p in phases[0]]
        ops, chunk, microbatch = s.ops[phases], s.chunk[phases], s.microbatch[phases]
        last = (ops[..., -1] == FORWARD) & (chunk[..., -1] == s.chunks - 1)
        first = (ops[..., 0] != -1) & (ops[..., 0] != WEIGHT) & (chunk[..., 0] == 0)
        ends = _Ends(last, microbatch[..., -1] * last, first, microbatch[..., 0] * first)
        fields = ops, chunk, microbatch, s.written[phases], s.read[phases], s.kept[phases], s.taken[phases]
        table = bnp.asarray(np.stack(fields).astype(np.int32))
        mine = lax.dynamic_index_in_dim(
            table, self.rank, table.ndim - 1, keepdims=False
        )  # [fields, ticks, phases]
        often = [_Ends(_often(last[:, i]), None, _often(first[:, i]), None) for i in range(len(kinds))]

        def tick(state: _State, xs: Any) -> tuple[_State, None]:
            mine, common = xs
            for i, of_phase in enumerate(kinds):
                row, ends = _Row(*(mine[f, i] for f in range(len(fields)))), _Ends(*(x[i] for x in common))
                state = self._phase(state, of_phase, row, ends, often[i])
            return state, None

        common = _Ends(*(bnp.asarray(x.astype(np.int32)) for x in ends))
        return lax.scan(tick, state, (bnp.moveaxis(mine, 1, 0), common))[0]

    def _phase(self, state: _State, kinds: frozenset[int], row: _Row, ends: _Ends, often: _Ends) -> _State:
        if FORWARD in kinds:
            state = self._embedded(state, ends, often)
        results = self._results(state, kinds, row)
        if FORWARD in kinds:
            y, own, saved = results[FORWARD]
            state = state._replace(
                x=self._sent(y, 1),
                saved=[_put(s, x, row.written) for s, x in zip(state.saved, saved, strict=True)],
                value=state.value + bnp.where(row.op == FORWARD, own, 0),
            )
            state = self._of_loss(state, y, ends, often)
        if INPUT in kinds:
            ct, kept = results[INPUT]
            kept = [_put(s, x, row.kept) for s, x in zip(state.kept, kept, strict=True)]
            state = self._of_embedding(state, ct, ends, often)._replace(ct=self._sent(ct, -1), kept=kept)
        if BACKWARD in kinds:
            of_shared, of_layers, ct = results[BACKWARD]
            state = self._added(state, of_shared, of_layers, row, BACKWARD)
            state = self._of_embedding(state, ct, ends, often)._replace(ct=self._sent(ct, -1))
        if WEIGHT in kinds:
            of_shared, of_layers = results[WEIGHT]
            state = self._added(state, of_shared, of_layers, row, WEIGHT)
        return state

    def _results(self, state: _State, kinds: frozenset[int], row: _Row) -> dict[int, Any]:
        """The results of each kind of operation in a phase; in a branch if ranks differ."""
        stage = self.stage
        fixed = stage.fixed(self.parameters, None if self.schedule.chunks == 1 else row.chunk)

        def forward() -> Any:
            return stage.forward(fixed, at(self.microbatches, row.microbatch), state.x)

        def backward() -> Any:
            of_shared, of_layers, ct = stage.backward(fixed, at(state.saved, row.read), state.ct)
            return *self._unreduced(of_shared, of_layers), ct

        def of_input() -> Any:
            return stage.backward_of_input(fixed, at(state.saved, row.read), state.ct)

        def of_weights() -> Any:
            saved, kept = at(state.saved, row.read), at(state.kept, row.taken)
            return self._unreduced(*stage.backward_of_parameters(fixed, saved, kept))

        operations: dict[int, Callable] = {
            FORWARD: forward, BACKWARD: backward, INPUT: of_input, WEIGHT: of_weights
        }  # fmt: skip
        if len(kinds) == 1:
            return {kind: operations[kind]() for kind in kinds}
        # What a rank does not compute is left as it is: slots are written back, and sums are of zeros.
        unused: dict[int, Callable] = {
            FORWARD: lambda: (state.x, self._no_loss(), at(state.saved, row.written)),
            INPUT: lambda: (state.ct, at(state.kept, row.kept)),
            WEIGHT: lambda: (
                [] if self.model.sharded_ends else self.sync[0].zeros(self.shared),
                self.sync[1].zeros(self.layers),
            ),
        }
        order = sorted(kinds)

        def branch(chosen: int | None) -> Callable[[], list]:
            return lambda: [(operations if k == chosen else unused)[k]() for k in order]

        index = sum(((i + 1) * (row.op == k) for i, k in enumerate(order)), bnp.zeros((), dtypes.int32))
        return dict(zip(order, lax.switch(index, [branch(None), *map(branch, order)]), strict=True))

    def _no_loss(self) -> Any:
        return bnp.zeros((), self.stage.of_own.dtype)

    def _unreduced(self, of_shared: list, of_layers: list) -> tuple[list, list]:
        of_shared = self.sync[0].cast(of_shared, "unreduced") if of_shared else []
        return of_shared, self.sync[1].cast(of_layers, "unreduced")

    def _added(self, state: _State, of_shared: list, of_layers: list, row: _Row, kind: int) -> _State:
        """Add the gradients of a backward pass, unless this rank has none."""
        there = row.op == kind

        def plus(total: Any, g: Any) -> Any:
            return total + bnp.where(there, g, 0)

        def plus_of_chunk(total: Any, g: Any) -> Any:
            return _put(total, plus(at(total, row.chunk), g), row.chunk)

        add = plus if self.schedule.chunks == 1 else plus_of_chunk
        shared = list(map(plus, state.shared, of_shared)) if of_shared else state.shared
        return state._replace(shared=shared, layers=list(map(add, state.layers, of_layers)))

    # -- the ends ------------------------------------------------------------------------------

    def _embedded(self, state: _State, ends: _Ends, often: _Ends) -> _State:
        """The input of the first stage, if all ranks compute it."""
        if not self.model.sharded_ends or often.at_start == _NEVER:
            return state  # a stage embeds by itself

        def embedded() -> list:
            return [self.model.embed(self.shared, at(self.microbatches, ends.entering))]

        (x,) = self._sometimes(often.at_start, ends.at_start, embedded, [self.stage.of_x.aval])
        return state._replace(x=bnp.where((self.rank == 0) & (ends.at_start == 1), x, state.x))

    def _of_loss(self, state: _State, y: Any, ends: _Ends, often: _Ends) -> _State:
        """The last rank's loss, and its cotangent in place of a received one."""
        if often.at_end == _NEVER:
            return state
        last = self.rank == self.ring.size - 1

        def losses() -> list:
            x = lax.psum(bnp.where(last, y, 0), self.ring.axis) if self.model.sharded_ends else y
            m = at(self.microbatches, ends.leaving)
            return eval_jaxpr(self.head, tree.leaves((self.shared, x, m)))

        there = last & (ends.at_end == 1)
        value, *of_shared, ct = self._sometimes(often.at_end, ends.at_end, losses, self.head.out_avals)
        if not self.model.sharded_ends:
            of_shared = [bnp.where(there, g, 0) for g in of_shared]
        elif often.at_end == _SOMETIMES:
            of_shared = [bnp.where(ends.at_end == 1, g, 0) for g in of_shared]
        of_shared = self.sync[0].cast(of_shared, "unreduced")
        return state._replace(
            value=state.value + bnp.where(there, value, 0),
            shared=list(map(bnp.add, state.shared, of_shared)),
            ct=bnp.where(there, ct, state.ct),
        )

    def _of_embedding(self, state: _State, ct: Any, ends: _Ends, often: _Ends) -> _State:
        """Gradients of the embedding, if all ranks compute it."""
        tail = self.tail
        if tail is None or often.at_start == _NEVER:
            return state

        def grads() -> list:
            mine = (self.rank == 0) & (ends.at_start == 1)
            total = lax.psum(bnp.where(mine, ct, 0), self.ring.axis)
            return eval_jaxpr(tail, tree.leaves((self.shared, at(self.microbatches, ends.entering), total)))

        of_shared = self._sometimes(often.at_start, ends.at_start, grads, tail.out_avals)
        of_shared = self.sync[0].cast(of_shared, "unreduced")
        return state._replace(shared=list(map(bnp.add, state.shared, of_shared)))

    def _sometimes(self, often: str, now: Any, compute: Callable[[], list], avals: Sequence[Any]) -> list:
        """The results of a function, or zeros in ticks that do not need them."""
        if often == _ALWAYS or self.schedule.chunks == 1:
            return compute()  # without interleaving, few ticks of a loop do without
        return lax.cond(now == 1, compute, lambda: [bnp.zeros(a.shape, a.dtype) for a in avals])

    def _sent(self, x: Any, step: int) -> Any:
        """Send to the next rank, or with -1 to the previous; chunks need a ring."""
        n, ring = self.ring.size, self.schedule.chunks > 1
        pairs = [(i, (i + step) % n) for i in range(n) if ring or 0 <= i + step < n]
        return lax.ppermute(x, self.ring.axis, pairs)


_NEVER, _SOMETIMES, _ALWAYS = "never", "sometimes", "always"


def _often(flags: np.ndarray) -> str:
    return _ALWAYS if flags.all() else _SOMETIMES if flags.any() else _NEVER


def _grouped(schedule: Schedule) -> list[list[list[int]]]:
    """Runs of ticks whose phases have the same kinds, as numbers of phases."""
    ticks = [list(g) for _, g in itertools.groupby(range(len(schedule.ticks)), lambda p: schedule.ticks[p])]
    by_kinds: Callable[[Sequence[int]], Any] = lambda phases: [schedule.kinds(p) for p in phases]
    return [list(g) for _, g in itertools.groupby(ticks, by_kinds)]


def _put(slots: Any, x: Any, i: Any) -> Any:
    return lax.dynamic_update_index_in_dim(slots, x, i, 0)
