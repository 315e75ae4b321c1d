"""Mesh axes: sharding of parameters, optimizer state and batches, and the step.

Between the model and the training loop. The name of an axis says what it shards:

    data      the sequences of a batch; parameters are replicated
    zero1     the same, with sharded optimizer state (ZeRO-1): each device accumulates the full gradients of its
              microbatches, and reduce-scatters them once
    zero2     the same, with sharded gradient sums (ZeRO-2): the gradients of each microbatch are reduce-scattered
    fsdp      the same, with sharded parameters, all-gathered where they are used (ZeRO-3)
    model     heads, hidden units and the vocabulary (tensor parallel), and between these the sequences of a batch, or
              the tokens of each if there are too few (sequence parallel)
    seq       the tokens of each sequence, also in attention (context parallel), in zigzag order
    expert    the experts of a mixture; outside of these, the sequences of a batch
    stage     the layers (pipeline parallel)

All but pipelines are the step of one device with annotations: the *global view*, in which ``jit`` partitions the
program and inserts collectives. Attention over sharded sequences and mixtures of experts are ``shard_map`` functions
in it. A pipeline is one ``shard_map`` function, which combines with all axes but "zero2": sharded parameters are
all-gathered ahead of it and gradients reduce-scattered after it, once for all microbatches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, lax, tree
from examples.gpt import model

ROWS = ("data", "zero1", "zero2", "fsdp", "expert")  # the axes that shard sequences in all layers
AXES = (*ROWS, "model", "seq", "stage")

# The dimension of a parameter sharded along "model" or "expert", counted from the end: there may be leading ones.
TENSOR = {
    "tokens": -2, "qkv.weight": -1, "qkv.bias": -1, "out.weight": -2,
    "mlp.up.weight": -1, "mlp.up.bias": -1, "mlp.down.weight": -2,
}  # fmt: skip
EXPERT = {
    "experts.up.weight": -3, "experts.up.bias": -2, "experts.down.weight": -3, "experts.down.bias": -2,
}  # fmt: skip

# Axes that shard parameters, at rest and inside a stage; everything else is sharded like the state.
DIVIDED = {"params": ("fsdp",), "gathered": (), "state": ("fsdp", "zero1", "zero2")}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sharding of a step; by default one device.

    Attributes:
      mesh: axes of ``AXES``.
      microbatches: number per batch, one after the other; in a pipeline, overlapped.
      routing: of context parallel attention: "ring", "all_gather", "all_to_all".
      schedule: of a pipeline: "1f1b", "interleaved", "zb-h1", "gpipe".
      chunks: of layers on each rank of an interleaved pipeline.
      sharded_ends: in a pipeline, shard the vocabulary over the stages, which compute embeddings and logits together.
      recompute: rematerialize each layer in the backward pass (and with "fsdp" all-gather its parameters again).
      loss_chunk: tokens per device whose logits exist at a time, see ``model.Wiring``; not with "model", which shards
        their vocabulary.
      memory_budget: limit of the step's planned peak on each device, as for ``bf.jit``.
    """

    mesh: bf.Mesh | bf.AbstractMesh | None = None
    microbatches: int = 1
    routing: str = "ring"
    schedule: str = "1f1b"
    chunks: int = 1
    sharded_ends: bool = False
    recompute: bool = False
    loss_chunk: int | None = 0
    memory_budget: str | None = None

    def has(self, axis: str) -> bool:
        """True if the mesh has this axis."""
        return self.mesh is not None and axis in self.mesh.shape

    def among(self, *axes: str) -> Any:
        """Entry of a partition spec for a dimension sharded along the axes that exist."""
        return tuple(filter(self.has, axes)) or None

    def sharding(self, *entries: Any) -> bf.NamedSharding:
        """Sharding by a spec on the mesh, which must exist."""
        return bf.NamedSharding(self.mesh, P(*entries))


ALONE = Plan()
PACKING = ("model", "stage")  # the axes that change the form of parameters: see ``packed``


def spelled(axes: Mapping[str, int]) -> str:
    """As on the command line: data=2,model=4."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


# -- placement of arrays ---------------------------------------------------------------------------


def packed(values: Any, plan: Plan) -> Any:
    """Pack parameters, or a tree that contains them, into their shardable form.

    QKV columns get a separate dimension, [..., 3, C], which keeps heads together; layers of a pipeline are stacked, in
    the order of their ranks.
    """
    if plan.has("model"):
        values = _named(_of_qkv(3), values)
    if plan.has("stage"):

        def stacked(params):
            blocks = tree.map(lambda *xs: bnp.stack(xs), *params["blocks"])
            return params | {
                "blocks": bf.parallel.interleave_layers(blocks, plan.mesh.shape["stage"], plan.chunks)
            }

        values = _in_params(stacked, values)
    return values


def unpacked(values: Any, plan: Plan) -> Any:
    """Restore the form of one device, which files use."""
    if plan.has("stage"):

        def apart(params):
            blocks = in_order(params["blocks"], plan)
            one = lambda i: tree.map(lambda x: x[i], blocks)
            return params | {"blocks": [one(i) for i in range(len(tree.leaves(blocks)[0]))]}

        values = _in_params(apart, values)
    if plan.has("model"):
        values = _named(_of_qkv(1), values)
    return values


def in_order(blocks: Any, plan: Plan) -> Any:
    """Stacked layers in the order of the model."""
    return bf.parallel.deinterleave_layers(blocks, plan.mesh.shape["stage"], plan.chunks)


def specs(values: Any, plan: Plan) -> Any:
    """Specs of packed values, as a tree.

    Names at the root: "params", sharded along "fsdp"; "gathered", replicated parameters; and any other name,
    optimizer state and its inputs, sharded along "zero1" and "zero2" too.
    """
    return _named(lambda name, x: _spec(name, np.shape(x), plan), values)


def shardings(values: Any, plan: Plan) -> Any:
    """``specs`` of packed values with the mesh."""
    return _on(plan, specs(values, plan))


def placed_types(types: Any, plan: Plan) -> Any:
    """Types in the form of one device as those of placed values, with their shardings."""
    if plan.mesh is None:
        return types
    types = bf.eval_shape(lambda x: packed(x, plan), types)
    with_sharding = lambda x, s: bf.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return tree.map(with_sharding, types, shardings(types, plan))


def keep(values: Any, plan: Plan) -> Any:
    """Constrain packed values to their shardings, inside a program."""
    if plan.mesh is None:
        return values
    return bf.constrain(values, shardings(values, plan))


def _on(plan: Plan, lie: Any) -> Any:
    """Specs with the mesh."""
    return tree.map(lambda spec: plan.sharding(*spec), lie)


def _marked(lie: Any, kind: str, axes: Iterable[str]) -> Any:
    """Add the ``axes`` that shard nothing as a ``kind``: "unreduced" or "reduced"."""
    return tree.map(lambda spec: P(*spec, **{kind: set(axes).difference(spec.axes)}), lie)


def _spec(name: str, shape: tuple[int, ...], plan: Plan) -> P:
    entries: list[Any] = [None] * len(shape)
    if plan.has("stage") and "blocks." in name:
        entries[0] = "stage"
    if plan.sharded_ends and name.endswith("tokens"):
        entries[-2] = "stage"
    for axis, dimensions in (("model", TENSOR), ("expert", EXPERT)):
        for end, d in dimensions.items():
            if plan.has(axis) and name.endswith(end):
                entries[d] = axis
    axes = plan.among(*DIVIDED.get(name.partition(".")[0], DIVIDED["state"]))
    if whole := [d for d, entry in enumerate(entries) if entry is None]:
        entries[max(whole, key=lambda d: shape[d])] = axes  # the largest of the other dimensions
    return P(*entries)


def _named(f: Callable, values: Any) -> Any:
    """Map ``f(name, leaf)`` over a tree; names like "params.blocks.0.mlp.up.weight"."""
    name = lambda where: tree.keystr(where, simple=True, separator=".")
    return tree.map_with_path(lambda where, x: f(name(where), x), values)


def _of_qkv(parts: int) -> Callable:
    """Split QKV columns into this number of parts in a separate dimension; 1 merges."""

    def reshaped(name: str, x: Any) -> Any:
        if ".qkv." not in name:
            return x
        return x.reshape(*x.shape[:-1], parts, -1) if parts > 1 else x.reshape(*x.shape[:-2], -1)

    return reshaped


def _in_params(f: Callable, values: Any) -> Any:
    """Apply ``f`` to each subtree that has the structure of parameters."""
    of_params = lambda x: isinstance(x, dict) and "blocks" in x
    return tree.map(lambda x: f(x) if of_params(x) else x, values, is_leaf=of_params)


def even(windows: np.ndarray, config: model.Config, plan: Plan) -> np.ndarray:
    """As many windows as shard evenly; some are repeated if there are too few."""
    n = plan.mesh.size_of(plan.among(*ROWS) or ()) if plan.mesh is not None else 1
    if plan.has("stage") or plan.has("seq") or config.experts:
        return np.resize(windows, (max(1, len(windows) // n) * n, *windows.shape[1:]))
    return windows


# -- the step --------------------------------------------------------------------------------------


def value_and_grad(
    config: model.Config, plan: Plan = ALONE, cast: Callable[[Callable], Callable] = lambda f: f
) -> Callable:
    """Function (packed parameters, tokens [B, T + 1]) -> (loss, gradients) of a batch.

    Args:
      cast: changes the precision of a function, as ``bf.autocast``.
    """
    lie = lambda kind, values: specs({kind: values}, plan)[kind]
    if plan.has("stage"):
        embed, stage, loss = map(cast, _parts(config, plan))
        order = order_of(config.context, plan)
        own_loss = bool(config.experts)
        return of_pipeline(embed, stage, loss, plan, lie, layers="blocks", own_loss=own_loss, order=order)
    wired = wiring(config, plan)
    return accumulated(cast(lambda params, tokens: model.loss(params, tokens, config, wired)), plan, lie)


def accumulated(loss: Callable, plan: Plan, lie: Callable) -> Callable:
    """Function (parameters, tokens) -> (loss, gradients), in the plan's microbatches.

    Args:
      loss: ``loss(params, tokens)``, a mean over tokens.
      lie: ``lie(kind, values)``, the specs of a tree like the parameters, of a kind of ``DIVIDED``.
    """
    if plan.microbatches == 1:
        return bf.value_and_grad(loss)

    def of_batch(params, tokens):
        def add(total, rows):
            value, grads = bf.value_and_grad(loss)(params, rows)
            return tree.map(lambda t, g: t + g / plan.microbatches, total, grads), value

        zeros = tree.map(bnp.zeros_like, params)
        grads, values = lax.scan(add, zeros, _microbatches(tokens, plan))
        if plan.has("zero1"):  # up to here each device has its own sums, sharded like the parameters
            own = _marked(lie("params", grads), "unreduced", plan.mesh.shape)
            grads = bf.constrain(bf.constrain(grads, own), _on(plan, lie("gradients", grads)))
        return values.mean(), grads

    return of_batch


def of_pipeline(
    embed: Callable,
    stage: Callable,
    loss: Callable,
    plan: Plan,
    lie: Callable,
    *,
    layers: str,
    own_loss: bool,
    order: Any,
) -> Callable:
    """Function (packed parameters, tokens) -> (loss, gradients), by a pipeline.

    Args:
      embed, stage, loss: of a rank, as of ``parallel.pipeline_value_and_grad``; a microbatch has inputs and targets.
      lie: as of ``accumulated``.
      layers: the name of the stacked layers among the parameters.
      own_loss: a stage returns a loss of its own, too.
      order: of the tokens of a sequence.
    """
    data = _data_axes(plan)
    # Gradients of parameters sharded outside stay unreduced until then; others are all-reduced in buckets here.
    later = ("stage", *data) if plan.among("zero1", "fsdp") else ()

    def local(params, microbatches):
        shared = {name: part for name, part in params.items() if name != layers}
        value, (of_shared, of_layers) = bf.parallel.pipeline_value_and_grad(
            embed, bf.checkpoint(stage) if plan.recompute else stage, loss, shared, params[layers], microbatches,
            "stage", schedule=plan.schedule, chunks=plan.chunks, stage_loss=own_loss,
            sharded_ends=plan.sharded_ends, data_axes=data,
        )  # fmt: skip
        return value, of_shared | {layers: of_layers}

    def of_batch(params, tokens):
        gathered = lie("gathered", params)
        mapped = bf.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(_marked(gathered, "reduced", later), P(None, plan.among(*ROWS), plan.among("seq"))),
            out_specs=(P(), _marked(gathered, "unreduced", later)),
        )
        rows = _microbatches(tokens, plan)
        sides = {"inputs": rows[:, :, :-1], "targets": rows[:, :, 1:]}
        value, grads = mapped(params, {name: tokens[:, :, order] for name, tokens in sides.items()})
        return value, bf.constrain(grads, _on(plan, lie("gradients", grads)))

    return of_batch


def _data_axes(plan: Plan) -> tuple[str, ...]:
    """The axes of a pipeline over which gradients are summed."""
    return plan.among(*ROWS, "seq") or ()


def order_of(length: int, plan: Plan) -> Any:
    """The order of the tokens of a sequence: zigzag along "seq"."""
    return bf.parallel.zigzag_order(length, plan.mesh.shape["seq"]) if plan.has("seq") else ...


def wiring(config: model.Config, plan: Plan) -> model.Wiring:
    """Hooks of the model in the global view of a mesh."""
    if plan.mesh is None:
        return model.Wiring(recompute=plan.recompute, loss_chunk=plan.loss_chunk)
    rows, features = plan.among(*ROWS), plan.among("model")
    tokens = plan.among("seq")
    heads = P(rows, tokens, features)
    by_rows = plan.among(*ROWS, "model")

    def lay(x, what):
        spec = heads  # and so are hidden units and logits
        if what == "stream":  # all-gathers of sequences need no copies, those of tokens do
            even = not x.shape[0] % plan.mesh.size_of(by_rows or ())
            spec = P(by_rows, tokens) if even else P(rows, plan.among("seq", "model"))
        return bf.constrain(x, plan.sharding(*spec))

    changed: dict[str, Any] = {}
    if plan.has("seq"):
        changed = _context_parallel(config, plan)
        changed["attend"] = bf.shard_map(changed["attend"], mesh=plan.mesh, in_specs=heads, out_specs=heads)
    if config.experts:
        changed["mixture"] = _mixture(plan, rows, tokens)
    return model.Wiring(
        lay=lay,
        recompute=plan.recompute,
        loss_chunk=0 if plan.has("model") else plan.loss_chunk,
        **changed,
    )


def _context_parallel(config: model.Config, plan: Plan) -> dict[str, Any]:
    """Attention by ``shard_map`` over sequences, and the order of their tokens."""
    attend = functools.partial(
        bf.parallel.context_parallel_attention, axis="seq", routing=plan.routing, is_causal=True
    )
    return {"attend": attend, "order": order_of(config.context, plan)}


def _microbatches(tokens: Any, plan: Plan) -> Any:
    """Microbatches [M, B / M, T + 1]; each device's rows are part of every one."""
    rows = tokens.reshape(-1, plan.microbatches, tokens.shape[-1])
    return rows.swapaxes(0, 1)


def _mixture(plan: Plan, rows: Any, tokens: Any) -> Callable:
    """Mixtures of experts in the global view: the tokens of each rank are a group."""
    axis, stream = "expert" if plan.has("expert") else None, P(rows, tokens)
    route = _routed(plan, (*(rows or ()), *(tokens or ())))

    def mixture(expert, params, router, x):
        mapped = bf.shard_map(
            functools.partial(route, expert),
            mesh=plan.mesh, in_specs=(P(axis), P(), stream), out_specs=(stream, P()),
        )  # fmt: skip
        return mapped(params, router, x)

    return mixture


def _routed(plan: Plan, data: Iterable[str]) -> Callable:
    """``mixture_of_experts`` of tokens sharded along the axes ``data``."""
    axis = "expert" if plan.has("expert") else None
    others = [a for a in data if a != axis]
    return functools.partial(bf.parallel.mixture_of_experts, axis=axis, data_axes=others)


def _parts(config: model.Config, plan: Plan) -> tuple[Callable, Callable, Callable]:
    """The functions of one rank of a pipeline, for ``of_pipeline``.

    Each rank has some layers, and a shard of their heads and units.
    """
    vocabulary = "model" if plan.has("model") else "stage" if plan.sharded_ends else None
    changed = _context_parallel(config, plan) if plan.has("seq") else {}
    if plan.has("model"):
        changed["total"] = lambda x: lax.psum(x, "model")
    if config.experts:
        changed["mixture"] = _routed(plan, _data_axes(plan))
    wired = model.Wiring(loss_chunk=plan.loss_chunk, **changed)

    def embed(shared, batch):
        inputs = batch["inputs"]
        length = inputs.shape[1]
        places = bf.parallel.zigzag_positions(length, "seq") if plan.has("seq") else slice(length)
        if vocabulary:
            found = bf.parallel.vocabulary_parallel_embedding(shared["tokens"], inputs, vocabulary)
        else:
            found = shared["tokens"][inputs]
        return found + shared["positions"][places]

    def stage(layers, x):
        x, balances = lax.scan(lambda x, params: model.block(params, x, config, wired), x, layers)
        return (x, model.BALANCE * balances.sum()) if config.experts else x

    def loss(shared, x, batch):
        if vocabulary:
            logits = model.head(shared, x)
            return bf.parallel.vocabulary_parallel_cross_entropy(logits, batch["targets"], vocabulary).mean()
        return model.cross_entropy(shared, x, batch["targets"], wired)

    return embed, stage, loss
