"""GPT-2's training step in JAX and optax: one jitted function, cuDNN attention.

python -m benchmarks.peers.gpt2_jax --attention cudnn --precision bf16
"""

from __future__ import annotations

import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers import clock, gpt2


def main() -> None:
    """Emit one row."""
    parser = gpt2.parser()
    parser.add_argument("--attention", choices=["xla", "cudnn"], default="cudnn")
    parser.add_argument("--gpus", type=int, help="divide batches of that many times --batch among devices")
    o = parser.parse_args()
    clock.emit_versions("jax", "optax")
    if o.gpus and o.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", o.gpus)
    device = everywhere = divided = jax.devices(o.platform)[0]
    if o.gpus:
        devices = jax.devices(o.platform)[: o.gpus]
        mesh = jax.make_mesh((o.gpus,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
        everywhere, divided = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))
        o.batch *= o.gpus
    precision = {"fp32": "highest", "tf32": "tensorfloat32", "bf16": "default"}[o.precision]
    jax.config.update("jax_default_matmul_precision", precision)
    low = jnp.bfloat16 if o.precision == "bf16" else jnp.float32

    def norm(p, x):
        x = x.astype(jnp.float32)
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return ((x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]).astype(low)

    def linear(p, x):
        return x @ p["weight"].astype(low) + p["bias"].astype(low)

    def loss(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        B, T = inputs.shape
        x = (params["tokens"][inputs] + params["positions"][:T]).astype(low)
        for b in params["blocks"]:
            qkv = linear(b["attention"]["qkv"], norm(b["norm1"], x)).reshape(B, T, 3 * o.heads, -1)
            y = jax.nn.dot_product_attention(
                *jnp.split(qkv, 3, axis=2), is_causal=True, implementation=o.attention
            )
            x = x + linear(b["attention"]["out"], y.reshape(B, T, o.width))
            up = linear(b["mlp"]["up"], norm(b["norm2"], x))
            x = x + linear(b["mlp"]["down"], jax.nn.gelu(up, approximate=True))
        logits = (norm(params["norm"], x) @ params["tokens"].T.astype(low)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    optimizer = optax.adamw(gpt2.LEARNING_RATE, **gpt2.ADAMW)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    initial, kept, batches = gpt2.weights(o), [], []

    def start():
        kept.clear()
        params = jax.device_put(initial, everywhere)
        kept[:] = [params, jax.jit(optimizer.init)(params)]
        jax.block_until_ready(kept)

    def load(tokens):
        batches[:] = [jax.device_put(t, divided) for t in tokens]
        jax.block_until_ready(batches)

    def step(i):
        *kept[:], value = train_step(*kept, batches[i % len(batches)])
        return value.block_until_ready()

    def memory():
        known = device.memory_stats() or {}
        names = {"peak_bytes_in_use": "peak_GB", "peak_pool_bytes": "held_GB"}
        return {name: known[key] / 1e9 for key, name in names.items() if known.get(key)}

    gradients = lambda: jax.jit(jax.value_and_grad(loss))(kept[0], batches[0])
    gpt2.run(o, gpt2.Trainer(start, load, step, lambda: jax.block_until_ready(kept), gradients, memory))


if __name__ == "__main__":
    main()
