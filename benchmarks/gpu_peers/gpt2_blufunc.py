"""GPT-2's training step in blufunc: the model of ``examples/gpt``, as it stands.

    python -m benchmarks.gpu_peers.gpt2_blufunc --precision bf16

With ``--hash`` the row has a fingerprint of the parameters after the steps, with which runs can be compared bit by bit.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import blufunc as bf
from benchmarks.gpu_peers import clock, gpt2
from blufunc import optim, tree
from examples.gpt import model


def main() -> None:
    """Tell one row."""
    parser = gpt2.parser()
    parser.add_argument("--hash", action="store_true")
    parser.add_argument(
        "--key", type=int, help="make the initial weights from this key instead of NumPy's generator"
    )
    parser.add_argument("--gpus", type=int, help="divide batches of that many times --batch among devices")
    parser.add_argument(
        "--layout", choices=["data", "fsdp"], default="data", help="how parameters lie on them"
    )
    parser.add_argument(
        "--products", default="default", help="how fp32 multiplies: float32_tc, BF16_BF16_F32_X6, ..."
    )
    o = parser.parse_args()
    if o.gpus and bf.distributed.is_launched():
        bf.distributed.initialize()
    elif o.gpus and o.platform == "cpu":
        bf.config.cpu_devices = o.gpus
    clock.emit_versions("blufunc", "cupy-cuda13x", "cupy-cuda12x", "numpy")
    mesh = bf.make_mesh((o.gpus,), ("data",), devices=bf.devices(o.platform)[: o.gpus]) if o.gpus else None
    o.batch *= o.gpus or 1
    config = model.Config(o.layers, o.heads, o.width, o.context, o.vocab)
    set_precision(o.precision, o.products)
    loss = lambda params, tokens: model.loss(params, tokens, config)
    loss = bf.autocast(loss) if o.precision == "bf16" else loss
    optimizer = optim.adamw(gpt2.LEARNING_RATE, **gpt2.ADAMW)

    def train_step(params, state, tokens):
        value, grads = bf.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    compiled = bf.jit(train_step, donate_argnums=(0, 1))
    place = where(mesh, o)
    params = initial(o, config, place)
    kept = [params, tree.map(lambda x: bf.device_put(x, place(x.shape)), bf.jit(optimizer.init)(params))]
    del params  # it is donated
    divided = bf.devices(o.platform)[0] if mesh is None else bf.NamedSharding(mesh, bf.P("data"))
    tokens = [bf.device_put(t, divided) for t in gpt2.tokens(o)]
    bf.block_until_ready((kept, tokens))

    def step(i):
        *kept[:], value = compiled(*kept, tokens[i % gpt2.BATCHES])
        return value.block_until_ready()

    def after():
        return memory(o.platform) | ({"parameters": fingerprint(kept[0])} if o.hash else {})

    if bf.process_index() == 0:
        gpt2.measure(o, step, after)
    else:
        gpt2.take(o, step)


def where(mesh: bf.Mesh | None, o: Any) -> Any:
    """By the shape of a parameter, where it lies: on the one device, on each of a mesh, or divided among them."""
    if mesh is None:
        return lambda shape: bf.devices(o.platform)[0]
    if o.layout == "data":
        return lambda shape: bf.NamedSharding(mesh, bf.P())
    divides = lambda shape: len(shape) > 1 and not shape[0] % mesh.size
    return lambda shape: bf.NamedSharding(mesh, bf.P("data") if divides(shape) else bf.P())


def initial(o: Any, config: model.Config, where: Any) -> dict:
    """The parameters before the first step, where they lie."""
    if o.key is None:
        return tree.map(lambda x: bf.device_put(x, where(x.shape)), gpt2.weights(o))
    made = bf.jit(lambda key: model.init(key, config))(bf.device_put(bf.random.key(o.key), where(())))
    return tree.map(lambda x: bf.device_put(x, where(x.shape)), made)


def set_precision(precision: str, products: str) -> None:
    """How products of float32 are computed: as ``products`` says, or on tensor cores in TF32."""
    bf.config.update("matmul_precision", "tf32" if precision == "tf32" else products)


def memory(platform: str) -> dict:
    """The most that arrays and plans held at once, and what was taken from the device for it."""
    if platform != "cuda":
        return {}
    from blufunc.kernels import cuda_memory, cuda_runtime

    free, total = cuda_runtime.free_memory(0)
    figures = {
        "peak_GB": cuda_memory.peak_bytes(0),
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
