"""Layouts: the loss and the gradients of a model on a mesh.

Follows ``model.py`` and ``placement.py``. In: a configuration, and a plan of ``examples/gpt/sharded.py``, whose axes
say what they shard. Out: the functions that ``finetune.py`` makes its step of. All but pipelines are the loss of one
device with annotations; attention over sharded sequences and experts are ``shard_map`` functions in it. A pipeline is
one ``shard_map`` function, in which each rank runs its layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import P, lax, nn
from blufunc.errors import DataError
from examples.gpt import devices, sharded
from examples.gpt import model as gpt
from examples.llm import model, placement
from examples.llm.config import Config


def layout(
    asked: dict[str, int] | None, config: Config, batch: int, length: int, **how: Any
) -> placement.Layout:
    """The layout of a training run, for the axes of a mesh.

    Args:
      asked: as of ``devices.layout``, which makes the mesh.
      batch, length: windows in a step, and their tokens.
      how: the other attributes of a ``sharded.Plan``.
    Raises:
      DataError: the axes do not combine, or do not divide the model or the batch.
    """
    axes = devices.sizes(asked)
    placement.check(config, axes)
    sizes = gpt.Config(config.layers, config.heads, config.width, length, config.vocab, config.experts)
    found = devices.layout(axes, sizes, batch, **how)
    ranks = axes.get("seq", 1) * axes.get("model", 1)
    if how.get("routing") == "all_to_all" and config.key_heads % ranks:
        raise DataError(
            f"{config.key_heads} key heads cannot be divided among {ranks} devices",
            where="--routing all_to_all",
            why="it trades tokens of all heads for all tokens of some heads",
            fix="--routing ring or all_gather",
        )
    return placement.Layout(found.plan, config=placement.grouped(config, axes))


def wiring(config: Config, plan: sharded.Plan, length: int) -> model.Wiring:
    """Hooks of the model in the global view, for windows of ``length`` tokens."""
    if plan.mesh is None:
        return model.ONE_DEVICE
    rows, tokens, features = plan.among(*sharded.ROWS), plan.among("seq"), plan.among("model")
    by_rows = plan.among(*sharded.ROWS, "model")

    def lay(x: Any, what: str) -> Any:
        spec = P(rows, tokens, features)  # of heads, hidden units and logits
        if what == "stream":  # all-gathers of rows need no copies, those of tokens do
            even = not x.shape[0] % plan.mesh.size_of(by_rows or ())
            spec = P(by_rows, tokens) if even else P(rows, plan.among("seq", "model"))
        return bf.constrain(x, plan.sharding(*spec))

    changed: dict[str, Any] = {"lay": lay, "whole_logits": plan.has("model")}
    if plan.has("seq"):
        heads = P(rows, tokens, features)
        attend = _attend(plan)
        changed["order"] = sharded.order_of(length, plan)
        changed["attend"] = lambda q, k, v, mask: bf.shard_map(
            functools.partial(attend, mask=mask), mesh=plan.mesh, in_specs=heads, out_specs=heads
        )(q, k, v)
    if config.experts:
        changed["mixture"] = _mixture(plan, P(rows, tokens), (*(rows or ()), *(tokens or ())))
    return model.Wiring(**changed)


def value_and_grad(loss: Callable | None, layout: placement.Layout, length: int, low: str | None) -> Callable:
    """Function (trained, tokens) -> (loss, gradients) of a batch.

    Args:
      loss: ``loss(trained, tokens)``, made with ``wiring``; not used in a pipeline, where all parameters are trained.
      low: dtype of matmuls; None: that of the parameters.
    """
    plan = layout.plan
    lie = lambda kind, values: placement.specs(values, plan, kind)
    if not plan.has("stage"):
        return sharded.accumulated(loss, plan, lie)
    how = {
        "layers": "layers",
        "own_loss": bool(layout.config.experts),
        "order": sharded.order_of(length, plan),
    }
    parts = _parts(layout.config, plan, length)
    return sharded.of_pipeline(*[cast(part, low) for part in parts], plan, lie, **how)


def loss_of_pipeline(layout: placement.Layout, length: int, low: str | None) -> Callable:
    """Loss (params, None, tokens) of a pipeline, for evaluation in one microbatch."""
    plan = dataclasses.replace(layout.plan, microbatches=1, schedule="gpipe", chunks=1, recompute=False)
    one = dataclasses.replace(layout, plan=plan)

    def loss(params: dict, frozen: None, tokens: Any) -> Any:
        if layout.plan.chunks > 1:  # one microbatch is too few to interleave
            ranks = plan.mesh.shape["stage"]
            own = bf.parallel.deinterleave_layers(params["layers"], ranks, layout.plan.chunks)
            params = params | {"layers": own}
        return value_and_grad(None, one, length, low)(params, tokens)[0]  # unused results are not computed

    return loss


def cast(function: Callable, low: str | None) -> Callable:
    """A function that computes matmuls in the dtype ``low``."""
    return function if low is None else bf.autocast(function, low)


def keep(values: Any, plan: sharded.Plan, kind: str) -> Any:
    """Constrain new values to their shardings, inside a program."""
    return values if plan.mesh is None else bf.constrain(values, placement.shardings(values, plan, kind))


def _attend(plan: sharded.Plan) -> Callable:
    """Attention over sharded sequences, for the inside of ``shard_map``."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return bf.parallel.context_parallel_attention(
            q, k, v, "seq", routing=plan.routing, is_causal=True, mask_mod=mask
        )

    return attend


def _routed(plan: sharded.Plan, data: Iterable[str]) -> Callable:
    """``dropless_experts`` of tokens sharded along the axes ``data``: output, balance."""
    axis = "expert" if plan.has("expert") else None
    others = [a for a in data if a != axis]

    def routed(expert: Callable, params: Any, router: Any, x: Any, **how: Any) -> tuple[Any, Any]:
        out, balance, _ = bf.parallel.dropless_experts(
            expert, params, router, x, axis=axis, data_axes=others, **how
        )
        return out, balance

    return routed


def _mixture(plan: sharded.Plan, stream: P, data: Iterable[str]) -> Callable:
    """Experts in the global view: each rank's tokens go to all ranks that have some."""
    axis, route = "expert" if plan.has("expert") else None, _routed(plan, data)

    def mixture(expert: Callable, params: Any, router: Any, x: Any, **how: Any) -> Any:
        mapped = bf.shard_map(
            functools.partial(route, expert, **how),
            mesh=plan.mesh,
            in_specs=(P(axis), P(), stream),
            out_specs=(stream, P()),
        )
        return mapped(params, router, x)

    return mixture


def _parts(config: Config, plan: sharded.Plan, length: int) -> tuple[Callable, Callable, Callable]:
    """The functions of one rank of a pipeline, for ``sharded.of_pipeline``.

    Each rank has some layers, and a shard of their heads and units.
    """
    vocabulary = "model" if plan.has("model") else "stage" if plan.sharded_ends else None
    window = config.window(0)
    mask = None if window is None or window >= length else nn.masks.sliding_window(window)
    changed: dict[str, Any] = {"attend": _attend(plan)} if plan.has("seq") else {}
    if plan.has("model"):
        changed["total"] = lambda x: lax.psum(x, "model")
    if config.experts:
        changed["mixture"] = _routed(plan, (a for a in (*sharded.ROWS, "seq") if plan.has(a)))
    wired = model.Wiring(**changed)
    own = dataclasses.replace(  # the heads of one device
        config, heads=config.heads // config.groups, key_heads=config.key_heads // config.groups, groups=1
    )

    def places(here: int) -> Any:
        if plan.has("seq"):
            return bf.parallel.zigzag_positions(here, "seq")
        return jnp.arange(here, dtype="int32")

    def embed(shared: dict, batch: dict) -> Any:
        inputs = batch["inputs"]
        if vocabulary:
            x = bf.parallel.vocabulary_parallel_embedding(shared["embed"], inputs, vocabulary)
        else:
            x = shared["embed"][inputs]
        return x if config.rope is not None else x + shared["positions"][places(inputs.shape[1])]

    def stage(layers: Any, x: Any) -> Any:
        attend = lambda q, k, v: wired.attend(q, k, v, mask)
        at = places(x.shape[1])[None]

        def one(x: Any, layer: Any) -> tuple[Any, Any]:
            return model.block(layer, x, at, length, own, attend, wired)

        x, balances = lax.scan(one, x, layers)
        return (x, config.balance * balances.sum()) if config.experts else x

    def loss(shared: dict, x: Any, batch: dict) -> Any:
        x = model.norm(shared["norm"], x, config)
        if vocabulary is None:
            return model.cross_entropy(shared, x, batch["targets"])
        logits = model.logits(shared, x)
        return bf.parallel.vocabulary_parallel_cross_entropy(logits, batch["targets"], vocabulary).mean()

    return embed, stage, loss
