"""Pipeline parallelism: layers sharded over a mesh axis, in microbatches.

A face, for use inside ``shard_map``. In: this rank's layers, of a stacked pytree sharded over the axis
(``P("stage")``), and microbatches. Out: results, or loss and gradients. Each rank runs a *stage*, and sends its result
to the next. Two schedules:

- ``gpipe`` (Huang et al., arXiv:1811.06965): all microbatches forward, then all backward, as the derivative of the
  forward loop. Residuals of every microbatch are live.
- ``1f1b`` (Narayanan et al., arXiv:1806.03377, 2104.04473): the backward pass of a microbatch starts when its forward
  pass has left the last stage. In lock step, rank i of n runs at tick t the forward pass of microbatch t - i and the
  backward pass of microbatch t - (2n - 2 - i): n - 1 ticks forward only, M both, n - 1 backward only, as long as gpipe.
  Residuals of at most 2 (n - 1 - i) + 1 microbatches are live, for any M: in 2n - 1 slots, the same on all ranks
  (M + n - 1 if these are fewer: no more than gpipe).

Every rank runs the same program, with microbatch indices that depend on its rank. A rank without a microbatch computes
on stale data, and its results are ignored. A stage under ``checkpoint`` saves only its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal, eval_jaxpr
from blufunc.core.pytree import tree
from blufunc.parallel.recipes.gradients import BUCKET, Reducer, Reducers, count_of
from blufunc.parallel.recipes.typed import Like, current_trace, element, likes, typed_jaxpr
from blufunc.parallel.recipes.varying import Ring, ring_of, same_on_all
from blufunc.transforms.autodiff.grad import value_and_grad
from blufunc.transforms.autodiff.linearize import linearize_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr

if TYPE_CHECKING:
    from blufunc.core.ir.trace import Array


def forward_microbatch(tick: Any, rank: Any) -> Any:
    """The microbatch that a rank runs forward at a tick; none below 0 or from M on."""
    return tick - rank


def backward_microbatch(tick: Any, rank: Any, ranks: int) -> Any:
    """The microbatch that a rank runs backward at a tick of ``1f1b``; as above."""
    return tick - (2 * ranks - 2 - rank)


def schedule_1f1b(ranks: int, microbatches: int) -> np.ndarray:
    """The schedule: int [ticks, ranks, 2], forward and backward, -1 for none."""
    tick = np.arange(microbatches + 2 * ranks - 2)[:, None]
    rank = np.arange(ranks)
    both = np.stack([forward_microbatch(tick, rank), backward_microbatch(tick, rank, ranks)], -1)
    return np.where((both >= 0) & (both < microbatches), both, -1)


def pipeline(stage: Callable, layers: Any, x: Any, axis: str) -> Array:
    """Run all stages on microbatches, inside ``shard_map``; differentiable.

    Args:
      stage: ``stage(layers, x) -> x`` on one microbatch; result and argument have one shape and dtype.
      layers: this rank's layers.
      x: [M, ...], the microbatches; only the first rank's are used.
      axis: the mesh axis of stages.
    Returns:
      [M, ...], the results of the last rank, *unreduced*: ``lax.psum(y, axis)`` gives them to all ranks.
    Raises:
      ArgumentError: a stage that does not return an array.
      ShapeError: a stage changes shape or dtype; no microbatches.
    """
    ring, x = ring_of(axis, "pipeline"), bnp.asarray(x)
    count_of(x, "pipeline")
    ys = _all_forward(_of_array(stage, "a stage"), layers, x, ring)
    last = lax.axis_index(axis) == ring.size - 1
    return lax.pcast(bnp.where(last, ys, 0), axis, to="unreduced")


def pipeline_value_and_grad(
    embed: Callable,
    stage: Callable,
    loss: Callable,
    shared: Any,
    layers: Any,
    microbatches: Any,
    axis: str,
    *,
    schedule: str = "1f1b",
    data_axes: str | Sequence[str] = (),
    bytes: int = BUCKET,
) -> tuple[Any, tuple[Any, Any]]:
    """Mean loss and gradients of microbatches in a pipeline, in ``shard_map``.

    Args:
      embed: ``embed(shared, microbatch) -> x``, an array, the input of the first stage.
      stage: ``stage(layers, x) -> x``, of the same shape and dtype.
      loss: ``loss(shared, x, microbatch) -> scalar``, of the output of the last stage: a mean over the microbatch.
      shared: a pytree of floating arrays, the parameters of ``embed`` and ``loss``, the same on all ranks; both may use
        the same ones.
      layers: the parameters of this rank's stage, floating.
      microbatches: a pytree of arrays [M, ...], the same on all ranks of the axis.
      axis: the mesh axis of stages.
      schedule: ``"1f1b"`` or ``"gpipe"``.
      data_axes: axes over which microbatches are sharded. Over these a parameter is replicated, or differs by rank,
        like experts or parameters that are gathered in a stage.
      bytes: see ``bucketed_psum``: gradients are reduced once, after all microbatches.
    Returns:
      the value, and the gradients of ``shared`` and ``layers``, summed in the dtype of the parameters. Over an axis
      over which a parameter is *reduced* (``P("stage", reduced={"fsdp"})``) its gradient is left unreduced, for the
      caller to scatter.
    Raises:
      ArgumentError: an unknown schedule; an embedding or stage that does not return an array.
      DtypeError: a parameter is not floating.
      ShapeError: a stage changes shape or dtype; a loss that is not a scalar; no microbatches, or arrays with different
        numbers of them.
      ShardingError: ``shared`` or ``microbatches`` vary over the axis.
    """
    steps = {"1f1b": _one_forward_one_backward, "gpipe": _value_and_grad_of_gpipe}
    if schedule not in steps:
        raise errors.ArgumentError(
            f"pipeline_value_and_grad: schedule is one of {', '.join(steps)}, not {schedule!r:.60}.",
            where=source.here(),
        )
    data = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    ring = ring_of(axis, _NAME)
    M = count_of(microbatches, _NAME)
    _check_floating(shared, layers)
    later = _reduced(shared), _reduced(layers)
    shared, microbatches = same_on_all((shared, microbatches), axis)
    shared, layers = lax.pcast((shared, layers), axis, to="varying")
    trace = current_trace(_NAME)
    sync = Reducer(shared, data, trace), Reducer(layers, data, trace)
    shared, layers = sync[0].cast(shared, "reduced"), sync[1].cast(layers, "reduced")
    everywhere = axis, *data
    microbatches = lax.pcast(microbatches, everywhere, to="varying")  # each rank is at another one
    share = M * lax.axis_size(data)

    def share_of_loss(shared: Any, x: Any, microbatch: Any) -> Any:
        value = bnp.asarray(loss(shared, x, microbatch))
        if value.ndim:
            raise errors.ShapeError(
                f"{_NAME}: the loss of a microbatch is a scalar, not {value.aval}.",
                where=source.here(),
                fix="take its mean: .mean()",
            )
        # Cast the value to varying, so that its cotangent is per rank, whatever the loss depends on.
        return lax.pcast(value / share, everywhere, to="varying")

    model = _Model(_of_array(embed, "embed"), _of_array(stage, "a stage"), share_of_loss)
    value, (of_shared, of_layers) = steps[schedule](model, shared, layers, microbatches, M, ring, sync)
    of_shared = lax.pcast(sync[0].cast(of_shared, "unreduced"), axis, to="varying")
    of_layers = sync[1].cast(of_layers, "unreduced")
    grads = sync[0].reduce(of_shared, bytes, later[0], (axis,)), sync[1].reduce(of_layers, bytes, later[1])
    return lax.psum(value, everywhere), grads


_NAME = "pipeline_value_and_grad"


def _check_floating(*params: Any) -> None:
    for leaf in tree.leaves(params):
        if not dtypes.is_inexact(lift(leaf).aval.dtype):
            raise errors.DtypeError(
                f"{_NAME}: parameters must be floating, not {lift(leaf).aval}.",
                where=source.here(),
                why="functions of integers are not differentiable.",
                fix="close over other values, or pass them with the microbatches",
            )


def _reduced(params: Any) -> list[frozenset[str]]:
    """The axes over which each leaf is reduced."""
    trace = current_trace(_NAME)
    names = trace.mesh.axis_names
    return [
        frozenset(a for a, t in zip(names, p.types, strict=True) if t == "R")
        for p in tree.leaves(likes(params, trace))
    ]


class _Model(NamedTuple):
    embed: Callable
    stage: Callable
    loss: Callable


def _onwards(ring: Ring, step: int) -> tuple[tuple[int, int], ...]:
    """Pairs that send to the next rank, or with -1 to the previous; no ring."""
    return tuple([(i, i + step) for i in range(ring.size) if 0 <= i + step < ring.size])


def _at(xs: Any, i: Any) -> Any:
    """Element ``i``, clamped, along the first dimension of each leaf."""

    def one(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, bnp.clip(i, 0, x.shape[0] - 1), 0, keepdims=False)

    return tree.map(one, xs)


# -- all forward, then all backward ----------------------------------------------------------------


def _all_forward(stage: Callable, layers: Any, xs: Any, ring: Ring) -> Any:
    """The result of this rank for each microbatch [M, ...]; final on the last rank."""
    rank, M = lax.axis_index(ring.axis), xs.shape[0]

    def tick(received, t):
        # Until its first microbatch arrives, a rank computes on one, too: the derivative of an ignored result is zero
        # times a value, which must not be infinite.
        x = bnp.where((rank == 0) | (t < rank), _at(xs, t), received)
        y = stage(layers, x)
        _check_stage(x, y)
        return lax.ppermute(y, ring.axis, _onwards(ring, 1)), y

    ticks = bnp.arange(M + ring.size - 1, dtype=dtypes.int32)
    _, ys = lax.scan(tick, bnp.zeros_like(xs[0]), ticks)
    return ys[ring.size - 1 :]


def _value_and_grad_of_gpipe(
    model: _Model, shared: Any, layers: Any, microbatches: Any, M: int, ring: Ring, sync: Reducers
) -> tuple:
    def whole(shared, layers):
        _, xs = lax.scan(lambda _, m: (None, model.embed(shared, m)), None, microbatches)
        ys = _all_forward(model.stage, layers, xs, ring)

        _, losses = lax.scan(lambda _, ym: (None, model.loss(shared, *ym)), None, (ys, microbatches))
        return bnp.where(lax.axis_index(ring.axis) == ring.size - 1, losses.sum(), 0)

    return value_and_grad(whole, (0, 1))(shared, layers)


def _of_array(fun: Callable, what: str) -> Callable:
    """Wrap a user's function that must return one array."""

    def checked(*args: Any) -> Any:
        x = fun(*args)
        if not (len(leaves := tree.leaves(x)) == 1 and leaves[0] is x):
            raise errors.ArgumentError(
                f"pipeline: {what} returns one array, not a {type(x).__name__}.",
                where=source.here(),
                fix="stack or concatenate the values passed between stages",
            )
        return bnp.asarray(x)

    return checked


def _check_stage(x: Any, y: Any) -> None:
    if y.aval.shape != x.aval.shape or y.aval.dtype != x.aval.dtype:
        raise errors.ShapeError(
            f"pipeline: a stage takes {x.aval} and returns {y.aval}.",
            where=source.here(),
            why="the output of a stage is the input of the next.",
        )


# -- one forward, one backward ---------------------------------------------------------------------


def _one_forward_one_backward(
    model: _Model, shared: Any, layers: Any, microbatches: Any, M: int, ring: Ring, sync: Reducers
) -> tuple:
    """The loss on the last rank, and this rank's share of the gradients."""
    n, rank = ring.size, lax.axis_index(ring.axis)
    first, last = rank == 0, rank == n - 1
    halves = _Halves(model, shared, layers, microbatches, ring)
    head, _, _ = typed_jaxpr(
        value_and_grad(model.loss, (0, 1)),
        (halves.likes[0], halves.of_x, element(microbatches, current_trace(_NAME))),
        _NAME,
    )
    fixed = halves.fixed(shared, layers, first)
    slots = min(2 * n - 1, M + n - 1)  # no more than there are forward passes

    def send(x: Any, step: int) -> Any:
        return lax.ppermute(x, ring.axis, _onwards(ring, step))

    def forward(state: _State, t: Any) -> tuple[_State, Any]:
        """Send the result to the next rank, and save the residuals in this tick's slot."""
        y, saved = halves.forward(fixed, _at(microbatches, forward_microbatch(t, rank)), state.x)
        slot = lax.rem(t, slots)
        saved = [
            lax.dynamic_update_index_in_dim(s, x, slot, 0) for s, x in zip(state.saved, saved, strict=True)
        ]
        return state._replace(x=send(y, 1), saved=saved), y

    def of_loss(state: _State, t: Any, y: Any) -> _State:
        """The last rank's loss, and its cotangent in place of a received one."""
        m = _at(microbatches, t - (n - 1))
        value, *grads = eval_jaxpr(head, tree.leaves((shared, y, m)))
        *of_shared, ct = (bnp.where(last, g, 0) for g in grads)
        of_shared = sync[0].cast(of_shared, "unreduced")
        return state._replace(
            value=state.value + bnp.where(last, value, 0),
            shared=list(map(bnp.add, state.shared, of_shared)),
            ct=bnp.where(last, ct, state.ct),
        )

    def backward(state: _State, t: Any) -> _State:
        m = backward_microbatch(t, rank, n)
        saved = _at(state.saved, (t - 2 * (n - 1 - rank)) % slots)
        of_shared, of_layers, ct = halves.backward(fixed, saved, state.ct)
        there = (m >= 0) & (m < M)

        def sums(totals, grads, sync):
            return [
                a + bnp.where(there, g, 0) for a, g in zip(totals, sync.cast(grads, "unreduced"), strict=True)
            ]

        return state._replace(
            shared=sums(state.shared, of_shared, sync[0]),
            layers=sums(state.layers, of_layers, sync[1]),
            ct=send(ct, -1),
        )

    def both(state: _State, t: Any) -> _State:
        state, y = forward(state, t)
        return backward(of_loss(state, t, y), t)

    state = _State(
        x=bnp.zeros(halves.of_x.aval.shape, halves.of_x.aval.dtype),
        ct=bnp.zeros(halves.of_x.aval.shape, halves.of_x.aval.dtype),
        saved=[bnp.zeros((slots, *a.shape), a.dtype) for a in halves.saved],
        value=bnp.zeros((), head.out_avals[0].dtype),
        shared=sync[0].zeros(shared),
        layers=sync[1].zeros(layers),
    )
    phases = (n - 1, lambda s, t: forward(s, t)[0]), (M, both), (n - 1, backward)
    start = 0
    for length, step in phases:
        if length:
            ticks = bnp.arange(start, start + length, dtype=dtypes.int32)
            run: Callable[..., Any] = lambda s, t, step=step: (step(s, t), None)
            state, _ = lax.scan(run, state, ticks)
        start += length
    grads = (
        tree.unflatten(tree.structure(p), g) for p, g in ((shared, state.shared), (layers, state.layers))
    )
    return state.value, tuple(grads)


class _State(NamedTuple):
    """The state carried from tick to tick.

    Attributes:
      x, ct: received from the previous and the next rank.
      saved: for each residual, slots [min(2n - 1, M + n - 1), ...].
      value, shared, layers: the accumulated loss and gradients.
    """

    x: Any
    ct: Any
    saved: list
    value: Any
    shared: list
    layers: list


class _Halves:
    """The forward pass of a stage, and its backward pass, as equations.

    Values that depend on parameters and the rank alone, such as casts, are computed once for all microbatches
    (``fixed``) and not saved.

    Attributes:
      likes: the types of ``shared`` and ``layers``.
      of_x: the type of the values passed between stages.
      saved: the types of the residuals of a microbatch.
    """

    def __init__(self, model: _Model, shared: Any, layers: Any, microbatches: Any, ring: Ring):
        trace = current_trace(_NAME)
        names = trace.mesh.axis_names
        varying = tuple("V" if a == ring.axis else "I" for a in names)
        self.likes = likes(shared, trace), likes(layers, trace)
        self._counts = tuple(len(tree.leaves(p)) for p in self.likes)
        of_m = element(microbatches, trace)
        _, _, (x,) = typed_jaxpr(model.embed, (self.likes[0], of_m), _NAME)
        self.of_x = Like(x.aval, tuple("V" if v == "V" else t for t, v in zip(x.types, varying, strict=True)))

        def forward(shared: Any, layers: Any, first: Any, m: Any, received: Any) -> Any:
            x = bnp.where(first, model.embed(shared, m), received)
            y = model.stage(layers, x)
            _check_stage(x, y)
            return y

        of_first = Like(ShapedArray((), np.dtype(np.bool_)), varying)
        jaxpr, _, (y,) = typed_jaxpr(forward, (*self.likes, of_first, of_m, self.of_x), _NAME)
        for axis, taken, found in zip(names, self.of_x.types, y.types, strict=True):
            if taken != found:
                raise errors.ShardingError(
                    f"pipeline: the input and output of a stage have different types over {axis!r} ({taken} and "
                    f"{found}).",
                    where=source.here(),
                    fix=f"in embed, lax.pcast(x, {axis!r}, to='varying')",
                )
        self._divide(jaxpr)

    def _divide(self, jaxpr: Jaxpr) -> None:
        n = sum(self._counts)
        linear_in = [i < n for i in range(len(jaxpr.invars) - 1)] + [True]
        whole, linear, _, n_residuals = linearize_jaxpr(jaxpr, tuple(linear_in), (True,))
        flags = (False,) * n_residuals + (True,) * (n + 1)
        self._transposed, _ = transpose_jaxpr(linear, flags, (True,), (True,) * (n + 1))
        whole, self._consts = whole.hoist()
        self._once, self._each = _by_dependence(whole, len(self._consts) + n + 1)
        places = {v: i for i, v in enumerate(self._once.outvars)}
        found = [v for v in self._each.outvars[1:] if v not in places and not isinstance(v, Literal)]
        slots = {v: i for i, v in enumerate(dict.fromkeys(found))}
        self._each = self._each.replace(outvars=[whole.outvars[0], *slots])
        self.saved = [v.aval for v in slots]
        self._residuals = [
            (_CONSTANT, v.array) if isinstance(v, Literal)
            else (_FIXED, places[v]) if v in places else (_SAVED, slots[v])
            for v in whole.outvars[1:]
        ]  # fmt: skip

    def fixed(self, shared: Any, layers: Any, first: Any) -> list:
        """Values for all microbatches; ``first`` is True on the first rank."""
        return eval_jaxpr(self._once, [*self._consts, *tree.leaves((shared, layers)), first])

    def forward(self, fixed: list, microbatch: Any, received: Any) -> tuple[Any, list]:
        """The input of the next stage, and the residuals."""
        y, *saved = eval_jaxpr(self._each, [*fixed, *tree.leaves(microbatch), received])
        return y, saved

    def backward(self, fixed: list, saved: list, ct: Any) -> tuple[list, list, Any]:
        """Cotangents of ``shared``, of ``layers`` and of the received value."""
        sources = {_FIXED: fixed, _SAVED: saved}
        residuals = [x if kind == _CONSTANT else sources[kind][x] for kind, x in self._residuals]
        outs = eval_jaxpr(self._transposed, [*residuals, ct])
        n, m = self._counts
        return outs[:n], outs[n : n + m], outs[-1]


_CONSTANT, _FIXED, _SAVED = "constant", "fixed", "saved"


def _by_dependence(jaxpr: Jaxpr, n: int) -> tuple[Jaxpr, Jaxpr]:
    """Split a jaxpr by dependence on its first ``n`` parameters alone.

    The results of the first part, including parameters that are used, are the first parameters of the second.
    """
    known: dict[Any, None] = dict.fromkeys(jaxpr.invars[:n])
    once, each = [], []
    for e in jaxpr.eqns:
        if not e.effects and all(isinstance(a, Literal) or a in known for a in e.invars):
            once.append(e)
            known.update(dict.fromkeys(e.outvars))
        else:
            each.append(e)
    read = {a for e in each for a in e.invars} | set(jaxpr.outvars)
    between = [v for v in known if v in read]
    return (
        jaxpr.replace(invars=jaxpr.invars[:n], eqns=once, outvars=between, arg_names=()),
        jaxpr.replace(invars=[*between, *jaxpr.invars[n:]], eqns=each, arg_names=()),
    )
