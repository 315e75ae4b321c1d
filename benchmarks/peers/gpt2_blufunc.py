"""GPT-2's training step in blufunc: the unmodified model of ``examples/gpt``.

    python -m benchmarks.peers.gpt2_blufunc --precision bf16

``--gpus N`` shards it over devices, of this process or of processes started by blufunc's launcher, in one layout.
"data": every device has all parameters. "fsdp": each has a shard of them. The others are axes of ``examples/gpt``.
"tensor": each has some heads, hidden units and a shard of the vocabulary, and between these a shard of the tokens.
"zero1", "zero2": each has a shard of the optimizer state, and of the gradients of ``--microbatches``. "context": each
has a part of every sequence. "pipeline": each has some layers. "experts": each has some of ``--experts``. A step has
N times ``--batch`` sequences, with "context" ``--batch``. With ``--hash``, the row has a fingerprint of the final
parameters, to compare runs bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

import blufunc as bf
from benchmarks.peers import clock, gpt2
from blufunc import optim, tree
from examples.gpt import model, sharded

PLAIN = ("data", "fsdp")  # layouts of which only arguments are annotated
AXES = {  # mesh axes, by layout
    "data": "data", "fsdp": "data", "tensor": "model", "zero1": "zero1", "zero2": "zero2", "context": "seq",
    "pipeline": "stage", "experts": "expert",
}  # fmt: skip


def main() -> None:
    """Emit one row."""
    o = parser().parse_args()
    start_devices(o)
    clock.emit_versions("blufunc", "cupy-cuda13x", "cupy-cuda12x", "numpy")
    gpt2.run(o, trainer(o), leads=bf.process_index() == 0)


def parser() -> argparse.ArgumentParser:
    """Options of this library's program."""
    p = gpt2.parser()
    p.add_argument("--hash", action="store_true")
    p.add_argument("--key", type=int, help="make the initial weights from this key, not by NumPy's generator")
    p.add_argument("--gpus", type=int, help="divide batches of that many times --batch among devices")
    p.add_argument("--layout", choices=list(AXES), default="data", help="how parameters lie on them")
    usual = sharded.ALONE
    p.add_argument("--microbatches", type=int, default=usual.microbatches, help="of a step")
    p.add_argument(
        "--routing", default=usual.routing, help="of the layout context: ring, all_gather, all_to_all"
    )
    p.add_argument(
        "--schedule", default=usual.schedule, help="of a pipeline: 1f1b, interleaved, zb-h1, gpipe"
    )
    p.add_argument("--chunks", type=int, default=usual.chunks, help="of layers of a rank of a pipeline")
    p.add_argument("--experts", type=int, default=0, help="in the place of each MLP")
    p.add_argument("--groups", type=int, default=1, help="of tokens that compete for places at experts")
    p.add_argument(
        "--products", default="default", help="how fp32 multiplies: float32_tc, F16_F16_F32_SCALED, ..."
    )
    p.add_argument("--budget", help="what a step may plan to need of a device's memory: 9.7GB")
    p.add_argument("--chunk", default="0", help="tokens that have logits at a time; auto; 0: all")
    p.add_argument(
        "--recompute", type=int, default=0, help="1: compute each layer again in the backward pass"
    )
    return p


def start_devices(o: argparse.Namespace) -> None:
    """Join other processes, or simulate devices; sets ``o.batch`` to the global batch."""
    if o.gpus and bf.distributed.is_launched():
        bf.distributed.initialize()
    elif o.gpus and o.platform == "cpu":
        bf.config.cpu_devices = o.gpus
    if o.layout != "context":
        o.batch *= o.gpus or 1


def trainer(o: argparse.Namespace) -> gpt2.Trainer:
    """Build the training step that the options describe."""
    config = model.Config(o.layers, o.heads, o.width, o.context, o.vocab, o.experts)
    chunk = None if o.chunk == "auto" else int(o.chunk)
    plan = sharded.Plan(
        mesh_of(o), recompute=bool(o.recompute), loss_chunk=chunk, microbatches=o.microbatches,
        routing=o.routing, schedule=o.schedule, chunks=o.chunks,
    )  # fmt: skip
    by_axes = is_by_axes(plan, o)
    if by_axes and o.layout == "tensor" and chunk != 0:
        raise ValueError("--chunk with the layout tensor: its vocabulary is divided, and so are the logits")
    of_batch = None
    if by_axes:
        of_batch = sharded.value_and_grad(config, plan, precise(o))
    wiring = model.Wiring(recompute=plan.recompute, loss_chunk=chunk)
    if o.experts:  # tokens of a device compete for places: as many groups as there would be devices
        mixture = functools.partial(bf.parallel.mixture_of_experts, groups=o.groups)
        wiring = dataclasses.replace(wiring, mixture=mixture)
    keep = (lambda values: sharded.keep(values, plan)) if by_axes else None
    of_batch, optimizer, train_step = training(o, config, wiring, keep, of_batch)
    compiled = bf.jit(train_step, donate_argnums=(0, 1), memory_budget=o.budget)
    everywhere, divided = ends(plan, o)
    initial = gpt2.weights(o) if o.key is None else None
    kept: list[Any] = []
    batches: list[Any] = []

    def start():
        kept.clear()
        params = initial
        if params is None:
            key = bf.device_put(bf.random.key(o.key), everywhere)
            params = bf.jit(lambda key: model.init(key, config))(key)
        params = sharded.packed(params, plan)
        kept.append(bf.device_put(params, shardings({"params": params}, plan, o)["params"]))
        state = bf.jit(optimizer.init)(kept[0])
        kept.append(bf.device_put(state, shardings({"optimizer": state}, plan, o)["optimizer"]))
        bf.block_until_ready(kept)

    def load(tokens):
        batches[:] = [bf.device_put(t, divided) for t in tokens]
        bf.block_until_ready(batches)

    def step(i):
        *kept[:], value = compiled(*kept, batches[i % len(batches)])
        return value.block_until_ready()

    def after():
        return memory(o.platform) | ({"parameters": fingerprint(kept[0])} if o.hash else {}) | bubble(plan)

    gradients = lambda: bf.jit(of_batch)(kept[0], batches[0])
    return gpt2.Trainer(start, load, step, lambda: bf.block_until_ready(kept), gradients, after)


def training(
    o: argparse.Namespace,
    config: model.Config,
    wiring: model.Wiring,
    keep: Callable[[dict], dict] | None = None,
    of_batch: Callable | None = None,
) -> tuple[Callable, optim.GradientTransformation, Callable]:
    """Loss with gradients, the optimizer, and the step of both.

    The step is (params, state, tokens) -> (params, state, loss). On a mesh, ``keep`` constrains the shardings of new
    values, and ``of_batch`` is the first of these.
    """
    set_precision(o.precision, o.products)
    if of_batch is None:
        loss = precise(o)(lambda params, tokens: model.loss(params, tokens, config, wiring))
        of_batch = sharded.accumulated(loss, sharded.Plan(microbatches=o.microbatches), lie=lambda *_: None)
    optimizer = optim.adamw(gpt2.LEARNING_RATE, **gpt2.ADAMW)

    def train_step(params, state, tokens):
        value, grads = of_batch(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        values = {"params": optim.apply_updates(params, updates), "optimizer": state}
        values = values if keep is None else keep(values)
        return values["params"], values["optimizer"], value

    return of_batch, optimizer, train_step


def is_by_axes(plan: sharded.Plan, o: argparse.Namespace) -> bool:
    """True if the axis of the layout says what it shards, as in ``examples/gpt``."""
    return plan.mesh is not None and o.layout not in PLAIN


def precise(o: argparse.Namespace) -> Callable[[Callable], Callable]:
    """A transform to the precision of the options."""
    return bf.autocast if o.precision == "bf16" else lambda f: f


def bubble(plan: sharded.Plan) -> dict:
    """The idle fraction of a pipeline's step, by the table of its schedule."""
    if not plan.has("stage"):
        return {}
    how = plan.schedule, plan.mesh.shape["stage"], plan.microbatches, plan.chunks
    return {"bubble": bf.parallel.pipeline_schedule(*how).bubble()}


def mesh_of(o: argparse.Namespace) -> bf.Mesh | None:
    """Devices of a sharded step; None: one device."""
    if not o.gpus:
        return None
    return bf.make_mesh((o.gpus,), (AXES[o.layout],), devices=bf.devices(o.platform)[: o.gpus])


def ends(plan: sharded.Plan, o: argparse.Namespace) -> tuple[Any, Any]:
    """Shardings of replicated values, and of batches of tokens.

    Batches are sharded by sequences, if an axis allows it.
    """
    if plan.mesh is None:
        return (bf.devices(o.platform)[0],) * 2
    return plan.sharding(), plan.sharding(plan.among(*sharded.ROWS))


def shardings(values: dict, plan: sharded.Plan, o: argparse.Namespace) -> Any:
    """Shardings of packed values, as a tree; the root is "params" or "optimizer"."""
    everywhere, divided = ends(plan, o)
    if is_by_axes(plan, o):
        return sharded.shardings(values, plan)
    divides = lambda shape: o.layout == "fsdp" and len(shape) > 1 and not shape[0] % o.gpus
    return tree.map(lambda x: divided if divides(x.shape) else everywhere, values)


def set_precision(precision: str, products: str) -> None:
    """Precision of float32 matmuls: as ``products`` says, or TF32 on tensor cores."""
    bf.config.update("matmul_precision", "tf32" if precision == "tf32" else products)


def memory(platform: str) -> dict:
    """Peak memory of arrays and plans, and the device memory allocated for it."""
    if platform != "cuda":
        return {}
    from blufunc.kernels.backends.cuda.driver import driver
    from blufunc.kernels.backends.cuda.driver import memory as cuda_memory

    free, total = driver.free_memory(0)
    figures = {
        "peak_GB": cuda_memory.pool(0).peak_bytes(),
        "held_GB": cuda_memory.pool(0).held_bytes(),
        "device_GB": total - free,
    }
    return {name: nbytes / 1e9 for name, nbytes in figures.items()}


def fingerprint(params: Any) -> str:
    """SHA-256 of all bits of a pytree."""
    found = hashlib.sha256()
    for leaf in tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
