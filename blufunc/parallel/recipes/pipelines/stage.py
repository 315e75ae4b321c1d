"""The passes of one pipeline stage, as equations.

Shared by the modules of pipelines. In: the model's parts, and the types of parameters and microbatches. Out: a forward
pass that returns residuals, and a backward pass that reads them, whole or in two halves. They are traced, typed and
differentiated ahead of the loop that runs them (``typed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal, eval_jaxpr
from blufunc.core.programs import simplify
from blufunc.core.pytree import tree
from blufunc.parallel.recipes.typed import Like, current_trace, element, likes, typed_jaxpr
from blufunc.parallel.recipes.varying import Ring
from blufunc.transforms.autodiff.linearize import linearize_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.checkpointing.split_outputs import Halves, split_outputs

NAME = "pipeline_value_and_grad"


class Model(NamedTuple):
    """The parts of a model, as ``pipeline_value_and_grad`` runs them.

    Attributes:
      embed: ``embed(shared, microbatch) -> x``.
      stage: ``stage(layers, x) -> (x, own)``, with the stage's own loss, a scalar, divided like ``loss``.
      loss: ``loss(shared, x, microbatch) -> scalar``, this rank's share of the mean.
      sharded_ends: whether all ranks of the axis run ``embed`` and ``loss`` together.
    """

    embed: Callable
    stage: Callable
    loss: Callable
    sharded_ends: bool


def model_of(
    embed: Callable,
    stage: Callable,
    loss: Callable,
    share: int,
    everywhere: tuple[str, ...],
    of_ends: tuple[str, ...],
    stage_loss: bool,
    sharded_ends: bool,
) -> Model:
    """The user's functions, checked, with losses as shares of the mean.

    Args:
      share: the number of microbatches of all ranks of data.
      everywhere, of_ends: the axes over which the loss of a stage, and that of a microbatch, differ by rank.
      stage_loss, sharded_ends: as of ``pipeline_value_and_grad``.
    """

    def share_of(value: Any, what: str, axes: tuple[str, ...]) -> Any:
        value = bnp.asarray(value)
        if value.ndim:
            raise errors.ShapeError(
                f"{NAME}: the loss of {what} is a scalar, not {value.aval}.",
                where=source.here(),
                fix="take its mean: .mean()",
            )
        # Cast the value to varying, so that its cotangent is per rank, whatever the loss depends on.
        return lax.pcast(value / share, axes, to="varying")

    def stage_and_loss(layers: Any, x: Any) -> tuple[Any, Any]:
        found = stage(layers, x)
        if not stage_loss:
            return _array(found, "a stage"), share_of(0.0, "a stage", everywhere)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise errors.ArgumentError(
                f"{NAME}: with stage_loss a stage returns an array and its loss, not a {type(found).__name__}.",
                where=source.here(),
                fix="return x, balance",
            )
        return _array(found[0], "a stage"), share_of(found[1], "a stage", everywhere)

    def loss_share(shared: Any, x: Any, microbatch: Any) -> Any:
        return share_of(loss(shared, x, microbatch), "a microbatch", of_ends)

    return Model(returning_array(embed, "embed"), stage_and_loss, loss_share, sharded_ends)


def returning_array(fun: Callable, what: str) -> Callable:
    """Wrap a user's function that must return one array."""
    return lambda *args: _array(fun(*args), what)


def _array(x: Any, what: str) -> Any:
    """A result of a user's function that must be one array."""
    if not (len(leaves := tree.leaves(x)) == 1 and leaves[0] is x):
        raise errors.ArgumentError(
            f"pipeline: {what} returns one array, not a {type(x).__name__}.",
            where=source.here(),
            fix="stack or concatenate the values passed between stages",
        )
    return bnp.asarray(x)


def in_chunks(x: Any, chunks: int, ranks: int) -> Any:
    """The layers of a rank, [layers, ...], as [chunks, layers, ...]."""
    if not x.ndim or x.shape[0] % chunks:
        raise uneven(NAME, x.shape[0] * ranks if x.ndim else 0, ranks * chunks)
    return x.reshape(chunks, -1, *x.shape[1:])


def uneven(name: str, layers: int, parts: int) -> errors.ShapeError:
    """The error of layers that do not divide."""
    return errors.ShapeError(
        f"{name}: {layers} layers do not divide into {parts} parts, one for each rank and chunk.",
        where=source.here(),
        fix=f"{-(-max(layers, 1) // parts) * parts} layers, or fewer ranks or chunks",
    )


def check_stage(x: Any, y: Any) -> None:
    """Raise ShapeError unless input and output of a stage have one type."""
    if y.aval.shape != x.aval.shape or y.aval.dtype != x.aval.dtype:
        raise errors.ShapeError(
            f"pipeline: a stage takes {x.aval} and returns {y.aval}.",
            where=source.here(),
            why="the output of a stage is the input of the next.",
        )


class Parameters(NamedTuple):
    """Values that do not depend on microbatches.

    Attributes:
      once: of no layers.
      layers: leaves, [chunks, ...] if there are several.
      per_chunk: of layers and rank alone, such as casts; stacked if there are several chunks.
    """

    once: list
    layers: list
    per_chunk: list


class Stage:
    """The forward pass of a stage, and its backward pass, as equations.

    Values that depend on parameters and the rank alone, such as casts, are computed once for all microbatches and not
    saved.

    Args:
      layers: the types of one chunk.
      halves: whether to split the backward pass.
    Attributes:
      of_x: the type of the values passed between stages.
      of_own: the type of the stage's own loss.
      saved: the types of the residuals of a microbatch.
      kept: the types of what the first half of a backward pass keeps for the second.
      each, transposed, halves: the forward pass, the backward pass, and the two parts of it, or None.
    """

    def __init__(
        self, model: Model, shared: Any, layers: Any, microbatches: Any, ring: Ring, *, halves: bool
    ):
        trace = current_trace(NAME)
        names = trace.mesh.axis_names
        varying = tuple("V" if a == ring.axis else "I" for a in names)
        of_shared, of_layers, of_m = likes(shared, trace), layers, element(microbatches, trace)
        _, _, (x,) = typed_jaxpr(model.embed, (of_shared, of_m), NAME)
        self.of_x = Like(x.aval, tuple("V" if v == "V" else t for t, v in zip(x.types, varying, strict=True)))
        own = () if model.sharded_ends else of_shared
        self._counts = len(tree.leaves(own)), len(tree.leaves(of_layers))

        def forward(shared: Any, layers: Any, first: Any, m: Any, received: Any) -> Any:
            x = received if model.sharded_ends else bnp.where(first, model.embed(shared, m), received)
            y, of_stage = model.stage(layers, x)
            check_stage(x, y)
            return y, of_stage

        of_first = Like(ShapedArray((), np.dtype(np.bool_)), varying)
        jaxpr, _, (y, of_own) = typed_jaxpr(forward, (own, of_layers, of_first, of_m, self.of_x), NAME)
        for axis, taken, found in zip(names, self.of_x.types, y.types, strict=True):
            if taken != found:
                raise errors.ShardingError(
                    f"pipeline: the input and output of a stage have different types over {axis!r} ({taken} and "
                    f"{found}).",
                    where=source.here(),
                    fix=f"in embed, lax.pcast(x, {axis!r}, to='varying')",
                )
        self.of_own = of_own.aval
        self._divide(jaxpr, halves)

    def _divide(self, jaxpr: Jaxpr, halves: bool) -> None:
        n = sum(self._counts)
        linear_in = [i < n for i in range(len(jaxpr.invars) - 1)] + [True]
        whole, linear, _, n_residuals = linearize_jaxpr(jaxpr, tuple(linear_in), (True, True))
        flags = (False,) * n_residuals + (True,) * (n + 1)
        self.transposed, _ = transpose_jaxpr(linear, flags, (True, True), (True,) * (n + 1))
        whole, self._consts = whole.hoist()
        n_once = len(self._consts) + self._counts[0]
        self._once, rest = _by_dependence(whole, n_once)
        of_once: dict[Any, int] = {v: i for i, v in enumerate(rest.invars[: len(self._once.outvars)])}
        of_layers: dict[Any, int] = {
            v: i for i, v in enumerate(whole.invars[n_once : n_once + self._counts[1]])
        }
        per_chunk, self.each = _by_dependence(rest, len(of_once) + self._counts[1] + 1)
        fixed = per_chunk.outvars
        made = [v for v in fixed if v not in of_once and v not in of_layers]
        self._per_chunk = per_chunk.replace(outvars=made)
        of_made: dict[Any, int] = {v: i for i, v in enumerate(made)}
        self._fixed = [
            (field, places[v])
            for v in fixed
            for field, places in (("once", of_once), ("layers", of_layers), ("per_chunk", of_made))
            if v in places
        ]
        places = {v: i for i, v in enumerate(fixed)}
        found = [v for v in self.each.outvars[2:] if v not in places and not isinstance(v, Literal)]
        slots = {v: i for i, v in enumerate(dict.fromkeys(found))}
        self.each = self.each.replace(outvars=[*whole.outvars[:2], *slots])
        self.saved = [v.aval for v in slots]
        self._residuals = [
            (_CONSTANT, v.array) if isinstance(v, Literal)
            else (_FIXED, places[v]) if v in places else (_SAVED, slots[v])
            for v in whole.outvars[2:]
        ]  # fmt: skip
        self.kept: list[Any] = []
        self.halves: Halves | None = None
        if halves:
            self.halves = split_outputs(self.transposed, (*(False,) * n, True))
            received = self.halves.second.invars[len(self._residuals)]
            self._keeps_received = received in simplify.used(self.halves.second)
            of_first = [v.aval for v in self.halves.first.outvars[1:]]
            self.kept = [received.aval] * self._keeps_received + of_first

    def parameters(self, shared: Any, layers: Any, rank: Any, chunks: int) -> Parameters:
        """Values for all microbatches, computed once."""
        own = tree.leaves(shared)[: self._counts[0]]
        once = eval_jaxpr(self._once, [*self._consts, *own])
        leaves = tree.leaves(layers)

        def of_chunk(_: None, xs: Any) -> tuple[None, list]:
            parts, chunk = xs
            return None, eval_jaxpr(self._per_chunk, [*once, *parts, (rank == 0) & (chunk == 0)])

        if chunks == 1:
            return Parameters(once, leaves, of_chunk(None, (leaves, 0))[1])
        _, stacked = lax.scan(of_chunk, None, (leaves, bnp.arange(chunks, dtype=np.int32)))
        return Parameters(once, leaves, stacked)

    def fixed(self, parameters: Parameters, chunk: Any | None) -> list:
        """The values for one chunk; None if there is only one."""
        of = lambda field, i: getattr(parameters, field)[i]
        if chunk is None:
            return [of(field, i) for field, i in self._fixed]
        return [of(f, i) if f == "once" else at(of(f, i), chunk) for f, i in self._fixed]

    def forward(self, fixed: list, microbatch: Any, received: Any) -> tuple[Any, Any, list]:
        """The input of the next stage, the stage's own loss, and the residuals."""
        y, own, *saved = eval_jaxpr(self.each, [*fixed, *tree.leaves(microbatch), received])
        return y, own, saved

    def backward(self, fixed: list, saved: list, ct: Any) -> tuple[list, list, Any]:
        """Cotangents of ``shared``, of ``layers`` and of the received value."""
        outs = eval_jaxpr(self.transposed, self._given(fixed, saved, ct))
        return *self._by_parameter(outs), outs[-1]

    def backward_of_input(self, fixed: list, saved: list, ct: Any) -> tuple[Any, list]:
        """The cotangent of the received value, and what the other half reads."""
        assert self.halves is not None
        of_x, *kept = eval_jaxpr(self.halves.first, self._given(fixed, saved, ct))
        return of_x, [ct, *kept] if self._keeps_received else kept

    def backward_of_parameters(self, fixed: list, saved: list, kept: list) -> tuple[list, list]:
        """Cotangents of ``shared`` and of ``layers``."""
        assert self.halves is not None
        received, kept = (kept[0], kept[1:]) if self._keeps_received else (None, kept)
        outs = eval_jaxpr(self.halves.second, [*self._given(fixed, saved, received), *kept])
        return self._by_parameter(outs)

    def _by_parameter(self, outs: Sequence[Any]) -> tuple[list, list]:
        n, m = self._counts
        return list(outs[:n]), list(outs[n : n + m])

    def _given(self, fixed: list, saved: list, ct: Any) -> list:
        sources = {_FIXED: fixed, _SAVED: saved}
        residuals = [x if kind == _CONSTANT else sources[kind][x] for kind, x in self._residuals]
        own = bnp.ones((), self.transposed.in_avals[-1].dtype)  # the loss of the stage is a term of the whole
        return [*residuals, ct, own]


_CONSTANT, _FIXED, _SAVED = "constant", "fixed", "saved"


def at(xs: Any, i: Any) -> Any:
    """Element ``i``, clamped, along the first dimension of each leaf."""

    def one(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, bnp.clip(i, 0, x.shape[0] - 1), 0, keepdims=False)

    return tree.map(one, xs)


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
